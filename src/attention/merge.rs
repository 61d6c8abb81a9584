//! Two parts of one attention, over keys that share none, become the whole.
//!
//! ```text
//! lse     = ln(exp(lse_1) + exp(lse_2))
//! context = exp(lse_1 - lse) context_1 + exp(lse_2 - lse) context_2
//! ```
//!
//! For a prefix that many sequences share, and for keys that lie with several owners. An empty part (`lse = -inf`) adds
//! nothing, whatever its context holds. Since `lse` counts a sink, only one of the parts may have been given the sinks.

use ndarray::{Array3, Array4, Axis, Zip, concatenate};

use super::Attended;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};

/// The attention over the keys of both parts. Weights are merged if both have them: the keys of `first` come first.
///
/// ```
/// use multihead::{attention, ndarray::{s, Array4}, Options};
/// let x = Array4::<f64>::from_shape_fn((1, 2, 9, 4), |(_, h, i, t)| ((h + 2 * i + 3 * t) % 5) as f64);
/// let over = |keys: std::ops::Range<usize>| {
///     let part = x.slice(s![.., .., keys, ..]);
///     attention::forward(&x, &part, &part, &Options::new())
/// };
/// let merged = attention::merge(&over(0..3)?, &over(3..9)?)?;
/// assert!((merged.context - over(0..9)?.context).iter().all(|gap| gap.abs() < 1e-12));
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Shape`] if the parts differ in batch, heads, queries or width; [`crate::Error::TooLarge`] if the
/// weights of both do not fit into memory.
#[doc(alias = "merge_state")]
pub fn merge<T: Element>(first: &Attended<T>, second: &Attended<T>) -> Result<Attended<T>> {
    let (batch, heads, q_len, value_dim) = first.context.dim();
    let rows = [batch, heads, q_len].map(Some);
    let context_axes = "[batch, num_heads, q_len, value_dim]";
    let expected = [Some(batch), Some(heads), Some(q_len), Some(value_dim)];
    check_shape("first.lse", "[batch, num_heads, q_len]", rows, first.lse.shape())?;
    check_shape("second.context", context_axes, expected, second.context.shape())?;
    check_shape("second.lse", "[batch, num_heads, q_len]", rows, second.lse.shape())?;

    let (mut context, mut lse) = (first.context.clone(), first.lse.clone());
    let (mut share_1, mut share_2) = (first.lse.clone(), second.lse.clone());
    Zip::from(&mut lse).and(&mut share_1).and(&mut share_2).for_each(|lse, share_1, share_2| {
        (*lse, [*share_1, *share_2]) = join([*share_1, *share_2]);
    });
    Zip::from(context.lanes_mut(Axis(3))).and(second.context.lanes(Axis(3))).and(&share_1).and(&share_2).for_each(
        |mut context, other, &share_1, &share_2| {
            // A part with no share is left out and not multiplied: it may hold anything.
            match (share_1 == T::zero(), share_2 == T::zero()) {
                (_, true) => context.mapv_inplace(|c| if share_1 == T::zero() { T::zero() } else { c * share_1 }),
                (true, _) => context.zip_mut_with(&other, |c, &o| *c = o * share_2),
                _ => context.zip_mut_with(&other, |c, &o| *c = *c * share_1 + o * share_2),
            }
        },
    );
    let weights = match (&first.weights, &second.weights) {
        (Some(w_1), Some(w_2)) => {
            let both = [scaled(w_1, "first.weights", rows, &share_1)?, scaled(w_2, "second.weights", rows, &share_2)?];
            let too_large = |_| Error::TooLarge {
                argument: "weights",
                axes: "[batch, num_heads, q_len, kv_len]",
                got: vec![batch, heads, q_len, w_1.dim().3.saturating_add(w_2.dim().3)],
            };
            Some(concatenate(Axis(3), &[both[0].view(), both[1].view()]).map_err(too_large)?)
        }
        _ => None,
    };
    Ok(Attended { context, lse, weights })
}

/// `ln(exp(a) + exp(b))`, and the share of each part in the sum. The shares are not formed from the rounded logarithm,
/// which is far from exact where it is large.
fn join<T: Element>([a, b]: [T; 2]) -> (T, [T; 2]) {
    let never = T::neg_infinity();
    match (a == never, b == never) {
        (true, true) => (never, [T::zero(); 2]),
        (true, false) => (b, [T::zero(), T::one()]),
        (false, true) => (a, [T::one(), T::zero()]),
        (false, false) => {
            let high = if a < b { b } else { a };
            let parts = [a, b].map(|lse| (lse - high).exp());
            let sum = parts[0] + parts[1];
            (high + sum.ln(), parts.map(|part| part / sum))
        }
    }
}

/// Weights times the share of their part.
fn scaled<T: Element>(
    weights: &Array4<T>,
    argument: &'static str,
    [batch, heads, q_len]: [Option<usize>; 3],
    shares: &Array3<T>,
) -> Result<Array4<T>> {
    check_shape(argument, "[batch, num_heads, q_len, kv_len]", [batch, heads, q_len, None], weights.shape())?;
    let mut scaled = weights.clone();
    Zip::from(scaled.lanes_mut(Axis(3))).and(shares).for_each(|mut row, &share| row *= share);
    Ok(scaled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    fn part(context: [f64; 2], lse: f64) -> Attended<f64> {
        let context = array![[[[context[0], context[1]]]]];
        Attended { context, lse: array![[[lse]]], weights: None }
    }

    fn merged(first: &Attended<f64>, second: &Attended<f64>) -> ([f64; 2], f64) {
        let merged = merge(first, second).unwrap();
        ([merged.context[[0, 0, 0, 0]], merged.context[[0, 0, 0, 1]]], merged.lse[[0, 0, 0]])
    }

    #[test]
    fn equal_parts_weigh_the_same() {
        assert_eq!(merged(&part([1.0, 2.0], 0.0), &part([3.0, 4.0], 0.0)), ([2.0, 3.0], 2f64.ln()));
    }

    #[test]
    fn empty_parts_add_nothing_on_either_side() {
        let never = f64::NEG_INFINITY;
        let some = part([1.0, 2.0], 7.25);
        for nothing in [part([0.0; 2], never), part([f64::NAN; 2], never)] {
            assert_eq!(merged(&some, &nothing), ([1.0, 2.0], 7.25));
            assert_eq!(merged(&nothing, &some), ([1.0, 2.0], 7.25));
            assert_eq!(merged(&nothing, &nothing), ([0.0; 2], never));
        }
    }

    #[test]
    fn far_scores_neither_overflow_nor_vanish() {
        assert_eq!(merged(&part([1.0, 2.0], 1e300), &part([3.0, 4.0], -1e300)), ([1.0, 2.0], 1e300));
        assert_eq!(merged(&part([1.0, 2.0], -1e6), &part([3.0, 4.0], -1e6)), ([2.0, 3.0], -1e6 + 2f64.ln()));
    }

    #[test]
    fn a_nan_is_seen() {
        let (context, lse) = merged(&part([1.0, 2.0], 0.0), &part([f64::NAN; 2], f64::NAN));
        assert!(context.iter().all(|c| c.is_nan()) && lse.is_nan());
        let (context, lse) = merged(&part([f64::NAN; 2], f64::NAN), &part([1.0, 2.0], 0.0));
        assert!(context.iter().all(|c| c.is_nan()) && lse.is_nan());
    }

    #[test]
    fn parts_of_other_shapes_are_refused() {
        let mut other = part([1.0, 2.0], 0.0);
        other.lse = Array3::zeros((1, 1, 2));
        let error = merge(&part([1.0, 2.0], 0.0), &other).unwrap_err();
        assert_eq!(error.to_string(), "second.lse: expected [batch, num_heads, q_len] = [1, 1, 1], got [1, 1, 2]");
    }
}
