//! Attention by products: `S = Q K^T`, row softmax, dropout, `C = P V`.
//!
//! A work item is one batch entry, one KV head and a block of query rows; the group's query heads share it. Items run
//! in parallel, products inside an item do not (matrixmultiply, single-threaded). Each row is computed by one item, in
//! the same order whatever the number of threads.
//!
//! Scratch: `block_rows * kv_len` numbers an item in flight, at most [`BLOCK_SCORES`] or one row.

use ndarray::linalg::general_mat_mul;
use ndarray::{Array2, ArrayViewMut1, ArrayViewMut2, Axis, s};
use std::ops::Range;

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
    parallel::try_for_each(items(problem, outputs, block_rows), dims.flop(), |item| {
        let mut weigher = Weigher::new(problem, block_rows)?;
        for part in item.parts {
            block(problem, &problem.head(item.entry, part.head), item.first_row, &mut weigher, part);
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

/// The rows of one query head from `first_row` on.
fn block<T: Element>(
    problem: &Problem<'_, T>,
    head: &Head<'_, T>,
    first_row: usize,
    weigher: &mut Weigher<T>,
    mut part: Part<'_, T>,
) {
    let rows = first_row..first_row + part.context.nrows();
    let (mut scores, _) = weigher.weigh(problem, head, rows, part.lse);
    part.context.fill(T::zero());
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

/// Makes the weights of a few rows at a time.
pub(crate) struct Weigher<T> {
    /// `[rows, kv_len]`
    scores: Array2<T>,
    /// `[rows, distances]`
    relative: Array2<T>,
}

impl<T: Element> Weigher<T> {
    /// With room for `rows` rows.
    pub(crate) fn new(problem: &Problem<'_, T>, rows: usize) -> Result<Self> {
        let distances = problem.rules.relative_keys.map_or(0, |keys| keys.view().nrows());
        Ok(Self {
            scores: zeros("scores", "[rows, kv_len]", (rows, problem.dims.kv_len))?,
            relative: zeros("relative_keys", "[rows, distances]", (rows, distances))?,
        })
    }

    /// The weights `[rows, kv_len]` of these rows of a query head, and the keys that one of them may see: the weights of
    /// others are 0 (or NaN, in a row that sees one).
    pub(crate) fn weigh(
        &mut self,
        problem: &Problem<'_, T>,
        head: &Head<'_, T>,
        rows: Range<usize>,
        mut lse: Option<ArrayViewMut1<'_, T>>,
    ) -> (ArrayViewMut2<'_, T>, Range<usize>) {
        let mut scores = self.scores.slice_mut(s![..rows.len(), ..]);
        // A product over an inner axis of length 0 must leave zeros and not what was there before.
        scores.fill(T::zero());
        if rows.is_empty() {
            return (scores, 0..0);
        }
        // Both ends of what a query sees grow with the query; those of a query that sees nothing can lie anywhere.
        let (start, end) = (head.mask.keys(rows.start).start, head.mask.keys(rows.end - 1).end);
        let end = end.min(scores.ncols());
        let keys = start.min(end)..end;
        let (q, k) = (head.q.slice(s![rows.clone(), ..]), head.k.slice(s![keys.clone(), ..]));
        general_mat_mul(problem.rules.scale, &q, &k.t(), T::zero(), &mut scores.slice_mut(s![.., keys.clone()]));
        if let Some(keys) = &problem.rules.relative_keys {
            self.relative.fill(T::zero());
            let mut relative = self.relative.slice_mut(s![..rows.len(), ..]);
            general_mat_mul(problem.rules.scale, &q, &keys.view().t(), T::zero(), &mut relative);
        }
        for ((r, i), mut row) in rows.enumerate().zip(scores.outer_iter_mut()) {
            let Some(row) = row.as_slice_mut() else { continue };
            if let (Some(relative_keys), Some(line)) = (&problem.rules.relative_keys, self.relative.row(r).as_slice()) {
                let (lowest, position, first) = (relative_keys.span().lowest, head.mask.position(i), keys.start);
                add_from_line(line, Start { lowest, position, first }, &mut row[keys.clone()]);
            }
            let row = softmax_row(problem, head, i, row);
            if let Some(lse) = &mut lse {
                lse[r] = row;
            }
        }
        (scores, keys)
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
