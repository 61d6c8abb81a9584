//! Gradients that need a row of the output and no pair of query and key: `D`, and what follows from it.

use super::gradients::Differentiated;
use super::problem::Problem;
use crate::element::Element;
use crate::parallel;
use ndarray::{ArrayViewMut1, ArrayViewMut4, Axis, s};

/// Rows that a thread takes at a time, long enough to pay for waking it.
const DELTA_ROWS: usize = 512;

/// `D[i] = d_context[i] . context[i]` for all rows.
pub(super) fn fill_delta<T: Element>(call: &Differentiated<'_, T>, delta: &mut [T]) {
    let dims = &call.problem.dims;
    let kernels = T::kernels(call.problem.rules.level);
    // Each number is fetched once, from memory that takes as long for it as for so many operations.
    let flop = 16.0 * delta.len() as f64 * dims.value_dim as f64;
    parallel::for_each_chunk(delta, DELTA_ROWS, flop, |chunk, delta| {
        for (row, delta) in delta.iter_mut().enumerate() {
            let (head, i) = ((chunk * DELTA_ROWS + row) / dims.q_len, (chunk * DELTA_ROWS + row) % dims.q_len);
            let at = s![head / dims.num_heads, head % dims.num_heads, i, ..];
            let (a, b) = (call.d_context.slice(at), call.context.slice(at));
            *delta = match (a.to_slice(), b.to_slice()) {
                (Some(a), Some(b)) => kernels.dot(a, b),
                _ => a.iter().zip(b).fold(T::zero(), |sum, (&a, &b)| sum + a * b),
            };
        }
    });
}

/// `exp(sink - lse) D` for each row: the gradient of a number that is added to all scores of the row (the sink alone
/// does not move with it), and minus the gradient of the sink. Zero where there is no sink.
struct RowShares<'p, 'a, T> {
    call: &'p Differentiated<'a, T>,
    delta: &'p [T],
}

impl<T: Element> RowShares<'_, '_, T> {
    fn for_each(&self, mut f: impl FnMut([usize; 3], T)) {
        let Problem { dims, rules, .. } = &self.call.problem;
        let rows = self.delta.iter().zip(&self.call.lse).zip(ndarray::indices_of(&self.call.lse));
        for ((&delta, &lse), (entry, head, i)) in rows {
            // Whoever sees no key has D = 0, unless its d_context is not finite.
            let sees = || delta.is_finite() || self.call.problem.head(entry, head).visible(i).next().is_some();
            if delta != T::zero() && sees() {
                let sink = rules.sink(head).unwrap_or(T::neg_infinity());
                f([entry, head, i], (sink - lse).exp() * delta);
            }
        }
        debug_assert_eq!(self.delta.len(), dims.batch * dims.num_heads * dims.q_len);
    }
}

/// The gradient of the sinks, `[num_heads]`.
pub(super) fn sum_sinks<T: Element>(call: &Differentiated<'_, T>, delta: &[T], mut d_sinks: ArrayViewMut1<'_, T>) {
    d_sinks.fill(T::zero());
    RowShares { call, delta }.for_each(|[_, head, _], share| d_sinks[head] -= share);
}

/// The gradient of a bias that is the same for all keys of a query, `[1 or batch, 1 or num_heads, 1 or q_len, 1]`.
pub(super) fn sum_bias<T: Element>(call: &Differentiated<'_, T>, delta: &[T], mut d_bias: ArrayViewMut4<'_, T>) {
    d_bias.fill(T::zero());
    RowShares { call, delta }.for_each(|[entry, head, i], share| {
        let at = |axis: usize, index: usize| if d_bias.len_of(Axis(axis)) == 1 { 0 } else { index };
        let at = [at(0, entry), at(1, head), at(2, i), 0];
        d_bias[at] += share;
    });
}
