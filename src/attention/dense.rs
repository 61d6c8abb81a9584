//! Attention by products: `S = Q K^T`, row softmax, dropout, `C = P V`.
//!
//! A work item is one batch entry, one KV head and a block of query rows; the group's query heads share it. Items run
//! in parallel, products inside an item do not (matrixmultiply, single-threaded). Each row is computed by one item, in
//! the same order whatever the number of threads.
//!
//! Scratch: `block_rows * kv_len` numbers an item in flight, at most [`BLOCK_SCORES`] or one row.

use ndarray::linalg::general_mat_mul;
use ndarray::{ArrayViewMut1, ArrayViewMut2, Axis, s};

use super::Outputs;
use super::distance::{Start, add_from_line};
use super::problem::{Head, Problem};
use crate::element::{Element, zeros};
use crate::error::Result;
use crate::parallel::{self, outer};

/// Scores of one item: 256 KiB of f32 stay in the second-level cache between the two products.
const BLOCK_SCORES: usize = 1 << 16;

/// The rows of one query head that an item computes.
struct Part<'a, T> {
    head: usize,
    /// `[rows, value_dim]`
    context: ArrayViewMut2<'a, T>,
    /// `[rows]`
    lse: Option<ArrayViewMut1<'a, T>>,
    /// `[rows, kv_len]`
    weights: Option<ArrayViewMut2<'a, T>>,
}

struct Item<'a, T> {
    entry: usize,
    first_row: usize,
    /// One part for each query head of the KV group.
    parts: Vec<Part<'a, T>>,
}

pub(super) fn forward<T: Element>(problem: &Problem<'_, T>, outputs: Outputs<'_, T>) -> Result<()> {
    let dims = &problem.dims;
    let block_rows = (BLOCK_SCORES / dims.kv_len.max(1)).clamp(1, dims.q_len.max(1));
    let distances = problem.rules.relative_keys.map_or(0, |keys| keys.view().nrows());
    parallel::try_for_each(items(problem, outputs, block_rows), dims.flop(), |item| {
        let mut scores = zeros("scores", "[rows, kv_len]", (block_rows, dims.kv_len))?;
        let mut relative = zeros("relative_keys", "[rows, distances]", (block_rows, distances))?;
        for part in item.parts {
            let rows = part.context.nrows();
            let scratch = [scores.slice_mut(s![..rows, ..]), relative.slice_mut(s![..rows, ..])];
            block(problem, &problem.head(item.entry, part.head), item.first_row, scratch, part);
        }
        Ok(())
    })
}

/// Cuts the outputs into the items' own parts.
fn items<'a, T: Element>(problem: &Problem<'_, T>, outputs: Outputs<'a, T>, block_rows: usize) -> Vec<Item<'a, T>> {
    let mut items = Vec::new();
    let (mut lse, mut weights) = (outputs.lse.map(outer), outputs.weights.map(outer));
    for (entry, context) in outer(outputs.context).enumerate() {
        let mut lse = lse.as_mut().and_then(Iterator::next).map(outer);
        let mut weights = weights.as_mut().and_then(Iterator::next).map(outer);
        let mut groups: Vec<Vec<Item<'a, T>>> = (0..problem.rules.heads.num_read()).map(|_| Vec::new()).collect();
        for (head, context) in outer(context).enumerate() {
            let lse = lse.as_mut().and_then(Iterator::next);
            let weights = weights.as_mut().and_then(Iterator::next);
            let blocks = &mut groups[problem.rules.heads.read_index(head)];
            for (index, part) in parts(head, context, lse, weights, block_rows).into_iter().enumerate() {
                match blocks.get_mut(index) {
                    Some(item) => item.parts.push(part),
                    None => blocks.push(Item { entry, first_row: index * block_rows, parts: vec![part] }),
                }
            }
        }
        items.extend(groups.into_iter().flatten());
    }
    items
}

/// The blocks of one query head.
fn parts<'a, T: Element>(
    head: usize,
    mut context: ArrayViewMut2<'a, T>,
    mut lse: Option<ArrayViewMut1<'a, T>>,
    mut weights: Option<ArrayViewMut2<'a, T>>,
    block_rows: usize,
) -> Vec<Part<'a, T>> {
    let mut parts = Vec::new();
    while context.nrows() > 0 {
        let rows = block_rows.min(context.nrows());
        let (context_block, context_rest) = context.split_at(Axis(0), rows);
        let (lse_block, lse_rest) = lse.map(|lse| lse.split_at(Axis(0), rows)).unzip();
        let (weights_block, weights_rest) = weights.map(|weights| weights.split_at(Axis(0), rows)).unzip();
        parts.push(Part { head, context: context_block, lse: lse_block, weights: weights_block });
        (context, lse, weights) = (context_rest, lse_rest, weights_rest);
    }
    parts
}

/// The rows `first_row..` of one query head. `scores: [rows, kv_len]` and `relative: [rows, distances]` are scratch.
fn block<T: Element>(
    problem: &Problem<'_, T>,
    head: &Head<'_, T>,
    first_row: usize,
    [mut scores, mut relative]: [ArrayViewMut2<'_, T>; 2],
    mut part: Part<'_, T>,
) {
    let rows = scores.nrows();
    // A product over an inner axis of length 0 must leave zeros and not what was there before.
    scores.fill(T::zero());
    part.context.fill(T::zero());
    let q = head.q.slice(s![first_row..first_row + rows, ..]);
    general_mat_mul(problem.rules.scale, &q, &head.k.t(), T::zero(), &mut scores);
    if let Some(keys) = &problem.rules.relative_keys {
        relative.fill(T::zero());
        general_mat_mul(problem.rules.scale, &q, &keys.view().t(), T::zero(), &mut relative);
    }
    for (r, mut row) in scores.outer_iter_mut().enumerate() {
        if let Some(row) = row.as_slice_mut() {
            if let (Some(keys), Some(line)) = (&problem.rules.relative_keys, relative.row(r).as_slice()) {
                let position = head.mask.position(first_row + r);
                add_from_line(line, Start { lowest: keys.lowest(), position, first: 0 }, row);
            }
            let row = softmax_row(problem, head, first_row + r, row);
            if let Some(lse) = &mut part.lse {
                lse[r] = row;
            }
        }
    }
    if let Some(weights) = &mut part.weights {
        weights.assign(&scores);
    }
    if let Some(dropout) = &head.dropout {
        scores.indexed_iter_mut().for_each(|((r, j), weight)| *weight *= dropout.factor(first_row + r, j));
    }
    if head.v.iter().all(|v| v.is_finite()) {
        general_mat_mul(T::one(), &scores, &head.v, T::zero(), &mut part.context);
        return;
    }
    // 0 * NaN is NaN: with such a value about, only visible pairs may be multiplied.
    for (r, mut context) in part.context.outer_iter_mut().enumerate() {
        for (j, _) in head.visible(first_row + r) {
            context.scaled_add(scores[[r, j]], &head.v.row(j));
        }
    }
}

/// Turns the scaled products of query i with all keys into its weights, 0 where a pair is hidden; returns the lse.
fn softmax_row<T: Element>(problem: &Problem<'_, T>, head: &Head<'_, T>, i: usize, row: &mut [T]) -> T {
    let mut next = 0;
    let mut maximum = head.sink.unwrap_or(T::neg_infinity());
    let mut empty = true;
    for (j, bias) in head.visible(i) {
        row[next..j].fill(T::zero());
        (next, empty) = (j + 1, false);
        let capped = problem.rules.softcap.map_or(row[j], |softcap| softcap * (row[j] / softcap).tanh());
        row[j] = capped + bias;
        maximum = maximum.max(row[j]);
    }
    row[next..].fill(T::zero());
    if empty {
        return maximum;
    }
    let mut total = head.sink.map_or(T::zero(), |sink| (sink - maximum).exp());
    for (j, _) in head.visible(i) {
        row[j] = (row[j] - maximum).exp();
        total += row[j];
    }
    // w = exp(s - lse), so a row that sees a NaN has no weight that is a number, hidden pairs included.
    if total.is_nan() {
        row.fill(total);
    }
    for (j, _) in head.visible(i) {
        row[j] /= total;
    }
    maximum + total.ln()
}
