//! The two functions of attention: `2^x` for the softmax and `tanh(x)` for the score cap.
//!
//! ```text
//! 2^x     = 2^(n-1) · P(x - n), n = x rounded       P(f) = 2 + f (c0 + f (c1 + ...)) for 2^(1+f), |f| <= 1/2
//!         = 2^n · P(x - n), n = x rounded down       P(f) = 1 + f (c0 + f (c1 + ...)), 0 <= f < 1, with AVX-512
//! tanh(x) = x + x z (c0 + z (c1 + ...)), z = x²     |x| < 0.625
//!         = ±(1 - 2 / (1 + e^(2|x|)))               elsewhere
//! ```
//!
//! The coefficients are minimax in the relative error (Remez exchange in 50 digits) with the constant term *fixed*, so that
//! `2^0 == 1` exactly: a query that sees one key must return its value bit for bit. `n` is found by adding a number so large
//! that the sum has no fraction bits; it is left in the low bits of the sum, which a shift makes the exponent of a power.
//! AVX-512 has one instruction for the fraction and one for the product with a power of two rounded down; there a product
//! `rate x` is rounded before its fraction is taken, an error of half an ulp for each unit of `rate x`, of powers that are as
//! small as that is large.
//! Error of the polynomials: `2^x` 2.0e-9 (f32, degree 6) and 3.4e-18 (f64, degree 11), `tanh` 4.4e-9 and 1.0e-17;
//! rounding dominates. Largest error measured, in units of the last place, rounding included (tests below):
//!
//! | level | 2^x f32 | 2^x f64 | tanh f32 | tanh f64 |
//! | --- | --- | --- | --- | --- |
//! | AVX-512 | 1.5 | 1.0 | 1.6 | 2.0 |
//! | AVX2 | 1.0 | 1.0 | 1.6 | 2.0 |
//! | portable, SSE2 | 1.2 | 1.0 | 1.6 | 2.0 |
//!
//! Powers below 2^-125.5 (f64: 2^-1021.5) are exactly zero: one operand in denormal form makes a product of the values a
//! hundred times slower. (Where `n` is rounded, theirs is -126, and `2^(n-1)` has the exponent field of zero.) `2^-inf = 0`,
//! `2^x = inf` from the overflow exponent on, NaN gives NaN; `tanh(±inf) = ±1`.

use super::real::Real;
use super::simd::Simd;
use num_traits::{Float, One};
use std::hint::black_box;

/// Vectors whose polynomials advance together.
pub(crate) const TOGETHER: usize = 4;

/// The constants of `2^(rate x)`.
#[derive(Clone, Copy)]
pub(crate) struct Powers<V> {
    pub(super) rate: V,
    /// From here down the power is zero.
    pub(super) lowest: V,
    /// From here up it is infinite.
    pub(super) highest: V,
    pub(super) to_exponent: V,
    /// The highest first.
    coefficients: [V; MOST_COEFFICIENTS],
}

/// Coefficients of the longer polynomial.
const MOST_COEFFICIENTS: usize = <f64 as Real>::EXP2.len();

impl<V: Copy> Powers<V> {
    /// `rate > 0`
    #[inline(always)]
    pub(crate) fn new<S: Simd<V = V>>(s: S, rate: S::Elem) -> Self {
        let rate = rate.min(S::Elem::max_value());
        let lowest = ((S::Elem::MIN_EXPONENT - S::Elem::one()) / rate).max(S::Elem::min_value());
        let highest = (S::Elem::OVERFLOW_EXPONENT / rate).min(S::Elem::max_value());
        let mut coefficients = [s.zero(); MOST_COEFFICIENTS];
        for (to, &from) in coefficients.iter_mut().zip(S::EXP2.iter().rev()) {
            *to = s.splat(from);
        }
        Self {
            rate: s.splat(rate),
            lowest: s.splat(lowest),
            highest: s.splat(highest),
            to_exponent: s.splat(S::Elem::TO_EXPONENT),
            coefficients,
        }
    }

    /// The same, to be read from memory where they are needed if there are 16 registers. The compiler would keep all of them
    /// in registers, and let the vectors follow each other because none are left to have several at a time. (AVX2, 64 keys:
    /// 192 instructions a row and not 179, and 6 % less time of the softmax.)
    #[inline(always)]
    pub(crate) fn in_memory<S: Simd<V = V>>(&self) -> &Self {
        if S::MANY_REGISTERS { self } else { black_box(self) }
    }

    /// `2^(rate x)` for each lane of `N` vectors. The polynomials advance together: one alone is a chain of operations that
    /// wait for each other.
    #[inline(always)]
    pub(crate) fn of<S: Simd<V = V>, const N: usize>(&self, s: S, x: [V; N]) -> [V; N] {
        let (mut exponent, mut f, mut p) = (x, x, x);
        for v in 0..N {
            (exponent[v], f[v]) = s.split_exponent(self, x[v]);
            p[v] = self.coefficients[0];
        }
        for coefficient in &self.coefficients[1..S::EXP2.len()] {
            for v in 0..N {
                p[v] = s.fma(p[v], f[v], *coefficient);
            }
        }
        for v in 0..N {
            p[v] = s.times_power(p[v], exponent[v]);
        }
        p
    }
}

/// `2^t` for each lane.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, t: S::V) -> S::V {
    let [power] = Powers::new(s, S::Elem::one()).of(s, [t]);
    power
}

/// `tanh(x)` for each lane.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (one, two) = (s.splat(S::Elem::one()), s.splat(S::Elem::one() + S::Elem::one()));
    let size = s.abs(x);

    let z = s.mul(x, x);
    let near = s.fma(s.mul(x, z), polynomial(s, z, S::Elem::TANH), x);

    let e = exp2(s, s.mul(size, s.splat(S::Elem::LOG2_E + S::Elem::LOG2_E)));
    let far = s.sub(one, s.div(two, s.add(one, e)));
    let far = s.select(s.lt(x, s.zero()), s.sub(s.zero(), far), far);

    s.select(s.lt(size, s.splat(S::Elem::TANH_NEAR)), near, far)
}

/// `c[0] + x (c[1] + x (c[2] + ...))`; the slice is a constant, so the loop is unrolled.
#[inline(always)]
fn polynomial<S: Simd>(s: S, x: S::V, c: &'static [S::Elem]) -> S::V {
    let mut sum = s.splat(c[c.len() - 1]);
    for &coefficient in c[..c.len() - 1].iter().rev() {
        sum = s.fma(sum, x, s.splat(coefficient));
    }
    sum
}

/// Replaces each of `n` numbers by its power of two.
///
/// # Safety
/// `x` must be valid for reading and writing `n` elements.
#[inline(always)]
pub(crate) unsafe fn exp2_slice<S: Simd>(s: S, x: *mut S::Elem, n: usize) {
    for i in (0..n).step_by(S::LANES) {
        let lanes = S::LANES.min(n - i);
        // SAFETY: i + lanes <= n, and the caller vouches for n elements.
        unsafe {
            let v = s.load_partial(x.add(i), lanes);
            s.store_partial(x.add(i), exp2(s, v), lanes);
        }
    }
}

/// Replaces each of `n` numbers by its hyperbolic tangent.
///
/// # Safety
/// `x` must be valid for reading and writing `n` elements.
#[inline(always)]
pub(crate) unsafe fn tanh_slice<S: Simd>(s: S, x: *mut S::Elem, n: usize) {
    for i in (0..n).step_by(S::LANES) {
        let lanes = S::LANES.min(n - i);
        // SAFETY: i + lanes <= n, and the caller vouches for n elements.
        unsafe {
            let v = s.load_partial(x.add(i), lanes);
            s.store_partial(x.add(i), tanh(s, v), lanes);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::testing::{at_every_level, real, wide};
    use crate::kernels::{Kernels, Real};

    /// Distance in units of the last place of `expected`.
    fn ulps<T: Real>(got: T, expected: f64) -> f64 {
        let exponent = expected.abs().log2().floor();
        (wide(got) - expected).abs() / (wide(T::epsilon()) * exponent.exp2())
    }

    /// The worst distance of `run(x)` from `exact(x)` for evenly spaced x.
    fn worst<T: Real>(run: impl Fn(&mut [T]), exact: impl Fn(f64) -> f64, from: f64, to: f64) -> f64 {
        let count = 200_001;
        let x: Vec<T> = (0..count).map(|i| real(from + (to - from) * f64::from(i) / f64::from(count - 1))).collect();
        let mut y = x.clone();
        run(&mut y);
        x.iter().zip(&y).map(|(&x, &y)| ulps(y, exact(wide(x)))).fold(0.0, f64::max)
    }

    #[test]
    fn powers_of_two_are_accurate() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let run = |x: &mut [T]| kernels.exp2(x);
            let low = wide(T::MIN_EXPONENT);
            let error = [(low, -low), (-2.0, 2.0), (-40.0, 0.0), (-1e-3, 1e-3)]
                .map(|(from, to)| worst(run, f64::exp2, from, to))
                .into_iter()
                .fold(0.0, f64::max);
            println!("2^x {}: {error:.3} ulp", std::any::type_name::<T>());
            assert!(error < 2.5, "{error}");
        }
        at_every_level!(check);
    }

    #[test]
    fn powers_of_two_at_the_edges() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let (low, high) = (T::MIN_EXPONENT, T::OVERFLOW_EXPONENT);
            let below = low - real::<T>(0.501);
            let one = T::one();
            let mut x = [
                T::zero(),
                -T::zero(),
                one,
                -one,
                low,
                high - one,
                high,
                below,
                low - one,
                T::neg_infinity(),
                T::infinity(),
                T::min_value(),
                T::max_value(),
                T::nan(),
                -T::nan(),
                real(1e9),
                real(-1e9),
                high + one,
            ];
            kernels.exp2(&mut x);
            let half = real(0.5);
            assert_eq!(x[..4], [one, one, one + one, half]);
            assert_eq!(x[4], T::min_positive_value() + T::min_positive_value());
            assert_eq!(x[5], (high - one).exp2());
            assert_eq!(x[6], T::infinity());
            assert_eq!(x[7..10], [T::zero(); 3]);
            assert_eq!(x[10..13], [T::infinity(), T::zero(), T::infinity()]);
            assert!(x[13].is_nan() && x[14].is_nan());
            assert_eq!(x[15..], [T::infinity(), T::zero(), T::infinity()]);
        }
        at_every_level!(check);
    }

    #[test]
    fn tanh_is_accurate_near_zero_and_far_away() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let run = |x: &mut [T]| kernels.tanh(x);
            let error = [(1e-12, 1e-3), (-0.7, -1e-3), (0.6, 0.65), (0.5, 20.0), (-20.0, -0.5)]
                .map(|(from, to)| worst(run, f64::tanh, from, to))
                .into_iter()
                .fold(0.0, f64::max);
            println!("tanh {}: {error:.3} ulp", std::any::type_name::<T>());
            assert!(error < 3.5, "{error}");
        }
        at_every_level!(check);
    }

    #[test]
    fn tanh_at_the_edges() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let mut x = [T::zero(), -T::zero(), T::infinity(), T::neg_infinity(), T::max_value(), T::nan(), -T::nan()];
            kernels.tanh(&mut x);
            let one = T::one();
            assert_eq!(x[..5], [T::zero(), T::zero(), one, -one, one]);
            assert!(x[5].is_nan() && x[6].is_nan());
        }
        at_every_level!(check);
    }

    #[test]
    fn slices_of_every_length_are_filled_to_the_end() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for n in 0..40 {
                let mut x = vec![T::zero(); n + 1];
                kernels.exp2(&mut x[..n]);
                assert!(x[..n].iter().all(|&x| x == T::one()));
                assert_eq!(x[n], T::zero());
            }
        }
        at_every_level!(check);
    }
}
