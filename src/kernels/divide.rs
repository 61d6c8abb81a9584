//! The last step of a softmax row: `to = x / d` for all of a row, correctly rounded but for rare last bits.
//!
//! A division takes 16 cycles for 16 lanes where a product takes half a cycle; for short sequences dividing the context
//! would be a tenth of the work. So `q = x r` with `r = 1 / d`, and one correction `q + (x - q d) r` by fused
//! multiply-adds (Markstein 1990). A product with the reciprocal alone would lose the last bit of a value that should
//! come back unchanged.

use super::simd::Simd;
use num_traits::{Float, One, Zero};

/// Divides `n` numbers by `d`.
///
/// # Safety
/// `x` must be valid for reading `n` elements and `to` for writing them; they do not overlap.
#[inline(always)]
pub(super) unsafe fn divide<S: Simd>(s: S, x: *const S::Elem, to: *mut S::Elem, n: usize, d: S::Elem) {
    let by = Divisor {
        negated: s.splat(S::Elem::zero() - d),
        reciprocal: s.splat(S::Elem::one() / d),
        largest: s.splat(S::Elem::max_value()),
    };
    let whole = n - n % S::LANES;
    // SAFETY: every vector ends at or before n, and the caller vouches for n elements.
    unsafe {
        for i in (0..whole).step_by(S::LANES) {
            s.store(to.add(i), quotient(s, s.load(x.add(i)), &by));
        }
        if whole < n {
            // A partial store can take as long as all the rest, so rows of whole vectors do without.
            let last = s.load_partial(x.add(whole), n - whole);
            s.store_partial(to.add(whole), quotient(s, last, &by), n - whole);
        }
    }
}

/// The number to divide by, in all lanes.
struct Divisor<V> {
    negated: V,
    reciprocal: V,
    largest: V,
}

/// `v / d`.
#[inline(always)]
fn quotient<S: Simd>(s: S, v: S::V, by: &Divisor<S::V>) -> S::V {
    let q = s.mul(v, by.reciprocal);
    let corrected = s.fma(s.fma(q, by.negated, v), by.reciprocal, q);
    // An infinite quotient has no remainder; NaN fails both comparisons and comes through as `q`.
    let size = s.abs(q);
    s.select(s.lt(size, by.largest), corrected, q)
}

#[cfg(test)]
mod tests {
    use crate::kernels::{Level, Real};

    fn check<T: Real>(level: Level, from: fn(f64) -> T) {
        let kernels = T::kernels(level);
        for d in [1.0, 3.0, 7.5, 1e-3, 1234.567, 4096.0] {
            let d = from(d);
            let x: Vec<T> = (0..77).map(|i| from((i as f64 - 30.0) * 0.37)).collect();
            let mut quotients = vec![T::nan(); x.len()];
            kernels.divide(&x, &mut quotients, d);
            for (&x, &q) in x.iter().zip(&quotients) {
                let error = (q - x / d).abs();
                assert!(error <= (x / d).abs() * T::epsilon(), "{level}: {x:?} / {d:?} = {q:?}");
            }
        }
        // What went in times d comes out unchanged where the product is exact.
        let by = |x: &[T], d: f64| {
            let mut to = vec![T::nan(); x.len()];
            kernels.divide(x, &mut to, from(d));
            to
        };
        let triples: Vec<T> = (0..33).map(|i| from(f64::from(i) * 3.0)).collect();
        assert!(by(&triples, 3.0).iter().enumerate().all(|(i, &q)| q == from(i as f64)), "{level}");
        let (inf, nan, zero) = (T::infinity(), T::nan(), T::zero());
        let special = by(&[inf, -inf, nan, zero], 2.0);
        assert!(special[0] == inf && special[1] == -inf && special[2].is_nan() && special[3] == zero, "{level}");
        assert!(by(&[zero; 3], 0.0).iter().all(|q| q.is_nan()), "{level}: nothing divided by nothing is NaN");
    }

    #[test]
    fn quotients_are_those_of_division() {
        for &level in Level::available() {
            check::<f32>(level, |x| x as f32);
            check::<f64>(level, |x| x);
        }
    }
}
