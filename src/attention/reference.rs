//! Attention in plain loops: the meaning of every other path, and its oracle in `f64`.
//!
//! One query at a time, in four numbered passes over the keys that it sees:
//!
//! 1. scores: `s[j] = scale * q . k[j]` (relative keys besides `k[j]`), soft cap, bias
//! 2. maximum: `m = max_j s[j]`, so that no exponential overflows
//! 3. sum: `total = sum_j exp(s[j] - m)`, the sink's share included; `lse = m + ln(total)`
//! 4. context: `sum_j (exp(s[j] - m) / total) * v[j]`, some of the weights dropped
//!
//! Hidden pairs are passed over, so nothing that they hold is ever read. Memory: one row of scores.

use super::Outputs;
use super::problem::{Head, Problem};
use crate::element::{Element, zeros};
use crate::error::Result;
use ndarray::{ArrayView1, ArrayViewMut1, s};

/// Fills the context, lse and weights of all queries.
pub(super) fn forward<T: Element>(problem: &Problem<'_, T>, mut outputs: Outputs<'_, T>) -> Result<()> {
    let dims = &problem.dims;
    let mut scores = zeros("scores", "[kv_len]", dims.kv_len)?.to_vec();
    for entry in 0..dims.batch {
        for head_index in 0..dims.num_heads {
            let head = problem.head(entry, head_index);
            for i in 0..dims.q_len {
                let at = s![entry, head_index, i, ..];
                let context = outputs.context.slice_mut(at);
                let weights = outputs.weights.as_mut().map(|weights| weights.slice_mut(at));
                let row = query(problem, &head, i, &mut scores, context, weights);
                if let Some(lse) = &mut outputs.lse {
                    lse[[entry, head_index, i]] = row;
                }
            }
        }
    }
    Ok(())
}

/// One query; returns its lse.
fn query<T: Element>(
    problem: &Problem<'_, T>,
    head: &Head<'_, T>,
    i: usize,
    scores: &mut [T],
    mut context: ArrayViewMut1<'_, T>,
    mut weights: Option<ArrayViewMut1<'_, T>>,
) -> T {
    context.fill(T::zero());
    if let Some(weights) = &mut weights {
        weights.fill(T::zero());
    }
    let visible = || head.visible(i);

    // 1. scores
    for (j, bias) in visible() {
        let mut score = problem.rules.scale * head.product(i, j);
        if let Some(softcap) = problem.rules.softcap {
            score = softcap * (score / softcap).tanh();
        }
        scores[j] = score + bias;
    }

    // 2. maximum (of a row with a NaN it does not matter which number comes out)
    if visible().next().is_none() {
        return head.sink.unwrap_or(T::neg_infinity());
    }
    let start = head.sink.unwrap_or(T::neg_infinity());
    let maximum = visible().fold(start, |m, (j, _)| m.max(scores[j]));

    // 3. sum
    let mut total = head.sink.map_or(T::zero(), |sink| (sink - maximum).exp());
    for (j, _) in visible() {
        scores[j] = (scores[j] - maximum).exp();
        total += scores[j];
    }

    // 4. context
    for (j, _) in visible() {
        let weight = scores[j] / total;
        if let Some(weights) = &mut weights {
            weights[j] = weight;
        }
        let weight = head.dropout.map_or(weight, |dropout| weight * dropout.factor(i, j));
        for (c, &v) in context.iter_mut().zip(head.v.row(j)) {
            *c += weight * v;
        }
    }
    // w = exp(s - lse), so a row that sees a NaN has no weight that is a number, hidden pairs included.
    if let Some(mut weights) = weights.filter(|_| total.is_nan()) {
        weights.fill(total);
    }
    maximum + total.ln()
}

pub(super) fn dot<T: Element>(a: ArrayView1<'_, T>, b: ArrayView1<'_, T>) -> T {
    a.iter().zip(b).fold(T::zero(), |sum, (&x, &y)| sum + x * y)
}
