//! The gradients of attention in plain loops: the meaning of the tiled backward, and its oracle in `f64`.
//!
//! One query at a time, in four numbered steps, with the letters of `gradients.rs`:
//!
//! 1. delta: `D = d_context . context`
//! 2. for each key that the query sees: its score again, and `p = exp(s - lse)`
//! 3. back through dropout, softmax, bias and soft cap; what the key, the value and the query get of it
//! 4. the sink: `d_sink = d_sink - exp(sink - lse) D`
//!
//! Hidden pairs are passed over, so nothing that they hold is ever read. No memory but the gradients.

use super::gradients::{Differentiated, GradientsMut};
use super::reference::dot;
use crate::element::Element;
use crate::error::Result;
use ndarray::{ArrayView1, ArrayViewMut1, s};

/// Fills the gradients of all arguments.
pub(super) fn backward<T: Element>(call: &Differentiated<'_, T>, mut gradients: GradientsMut<'_, T>) -> Result<()> {
    gradients.clear();
    let dims = &call.problem.dims;
    for entry in 0..dims.batch {
        for head in 0..dims.num_heads {
            for i in 0..dims.q_len {
                query(call, [entry, head, i], &mut gradients);
            }
        }
    }
    Ok(())
}

/// Adds what one query gives to the gradients.
fn query<T: Element>(call: &Differentiated<'_, T>, at: [usize; 3], gradients: &mut GradientsMut<'_, T>) {
    let [entry, head_index, i] = at;
    let rules = &call.problem.rules;
    let head = call.problem.head(entry, head_index);
    let kv_head = rules.heads.read_by(head_index);
    let d_context = call.d_context.slice(s![entry, head_index, i, ..]);
    let lse = call.lse[at];

    // 1. delta
    let delta = dot(d_context, call.context.slice(s![entry, head_index, i, ..]));

    for (j, bias) in head.visible(i) {
        // 2. probability
        let (q, k, v) = (head.q.row(i), head.k.row(j), head.v.row(j));
        let score = rules.scale * head.product(i, j);
        let (capped, slope) = match rules.softcap {
            None => (score, T::one()),
            Some(softcap) => {
                let bounded = (score / softcap).tanh();
                (softcap * bounded, T::one() - bounded * bounded)
            }
        };
        let p = (capped + bias - lse).exp();

        // 3. back
        let kept = head.dropout.map_or(T::one(), |dropout| dropout.factor(i, j));
        let d_score = p * (kept * dot(d_context, v) - delta);
        if let Some(d_bias) = &mut gradients.d_bias {
            let index = |axis, index| if d_bias.shape()[axis] == 1 { 0 } else { index };
            let at = [index(0, entry), index(1, head_index), index(2, i), index(3, j)];
            d_bias[at] += d_score;
        }
        let distance = j as i64 - head.mask.position(i);
        if let (Some(d_table), Some(table)) = (&mut gradients.d_relative_bias, head.table()) {
            d_table[[table.bucket(distance), head_index]] += d_score;
        }
        let d_product = rules.scale * (d_score * slope);
        add(gradients.d_v.slice_mut(s![entry, kv_head, j, ..]), p * kept, d_context);
        add(gradients.d_k.slice_mut(s![entry, kv_head, j, ..]), d_product, q);
        add(gradients.d_q.slice_mut(s![entry, head_index, i, ..]), d_product, k);
        if let (Some(d_keys), Some(keys)) = (&mut gradients.d_relative_keys, &rules.relative_keys) {
            add(d_keys.row_mut(keys.row(distance)), d_product, q);
            add(gradients.d_q.slice_mut(s![entry, head_index, i, ..]), d_product, keys.key(distance));
        }
    }

    // 4. sink
    if let (Some(d_sinks), Some(sink)) = (&mut gradients.d_sinks, head.sink)
        && head.visible(i).next().is_some()
    {
        d_sinks[head_index] -= (sink - lse).exp() * delta;
    }
}

/// `sum = sum + factor * x`
fn add<T: Element>(mut sum: ArrayViewMut1<'_, T>, factor: T, x: ArrayView1<'_, T>) {
    sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += factor * x);
}
