//! GELU, `x Φ(x)` with the normal distribution Φ, and its slope `Φ(x) + x φ(x)` with the density φ.
//!
//! ```text
//! Φ(-|x|) = 2^(-x² log2(e) / 2) p(t) / 2        z = |x| / √2,  t = (z - 3) / (z + 3) = 1 - 6 / (z + 3)
//! Φ(|x|)  = 1 - Φ(-|x|)
//! φ(x)    = 2^(-x² log2(e) / 2) / √(2π)
//! ```
//!
//! `p(t) ≈ e^(z²) erfc(z)`, so that there is no difference of close numbers. It is the Chebyshev series on all `z >= 0`,
//! computed in 60 digits and cut at a relative error of 7e-8 (`f32`, degree 11) and 1.4e-17 (`f64`, degree 25). What is
//! rounded is above all the exponent, two or three times by half an ε: the relative error of `Φ` is at most
//! `ε (16 + 3 x² / 4)` at every level, where ε is the distance from 1 to the next number (tests below).

use super::exp::Powers;
use super::real::Real;
use super::simd::Simd;
use num_traits::Float;
use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

/// Vectors whose polynomials advance together: one alone is a chain of dependent operations.
const TOGETHER: usize = 4;

/// Replaces each of `n` numbers by its GELU, or by the slope there.
///
/// # Safety
/// `x` must be valid for reading and writing `n` elements.
#[inline(always)]
pub(super) unsafe fn gelu<S: Simd, const SLOPE: bool>(s: S, x: *mut S::Elem, n: usize) {
    let step = TOGETHER * S::LANES;
    let whole = n - n % step;
    // SAFETY: every vector ends at or before n, and the caller vouches for n elements.
    unsafe {
        for i in (0..whole).step_by(step) {
            let mut v = [s.zero(); TOGETHER];
            for k in 0..TOGETHER {
                v[k] = s.load(x.add(i + k * S::LANES));
            }
            let y = part::<S, SLOPE, TOGETHER>(s, v);
            for k in 0..TOGETHER {
                s.store(x.add(i + k * S::LANES), y[k]);
            }
        }
        for i in (whole..n).step_by(S::LANES) {
            let lanes = S::LANES.min(n - i);
            let [y] = part::<S, SLOPE, 1>(s, [s.load_partial(x.add(i), lanes)]);
            s.store_partial(x.add(i), y, lanes);
        }
    }
}

/// The value or the slope for each lane.
#[inline(always)]
fn part<S: Simd, const SLOPE: bool, const N: usize>(s: S, x: [S::V; N]) -> [S::V; N] {
    let number = |x: f64| s.splat(S::Elem::nearest(x));
    let (one, half) = (number(1.0), number(0.5));
    let largest = s.splat(S::Elem::max_value());
    let (mut power, mut t, mut p) = (x, x, x);
    for v in 0..N {
        let size = s.abs(x[v]);
        power[v] = s.mul(s.mul(number(-0.5), x[v]), x[v]);
        t[v] = s.sub(one, s.div(number(6.0), s.fma(number(FRAC_1_SQRT_2), size, number(3.0))));
    }
    let power = Powers::new(s, S::Elem::LOG2_E).of(s, power);
    let (last, others) = (S::Elem::NORMAL_TAIL[S::Elem::NORMAL_TAIL.len() - 1], S::Elem::NORMAL_TAIL.len() - 1);
    p.fill(s.splat(last));
    for &coefficient in S::Elem::NORMAL_TAIL[..others].iter().rev() {
        for v in 0..N {
            p[v] = s.fma(p[v], t[v], s.splat(coefficient));
        }
    }
    let mut y = x;
    for v in 0..N {
        let tail = s.mul(s.mul(half, power[v]), p[v]);
        let gate = s.select(s.lt(x[v], s.zero()), tail, s.sub(one, tail));
        // An infinite x meets a gate or a density of 0: 0 times infinity must not come up. NaN stays.
        let x = s.max(s.sub(s.zero(), largest), x[v]);
        y[v] = if SLOPE {
            let density = s.mul(number(0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2), power[v]);
            s.fma(s.min(largest, x), density, gate)
        } else {
            s.mul(x, gate)
        };
    }
    y
}

#[cfg(test)]
mod tests {
    use crate::kernels::testing::{Numbers, at_every_level, real, wide};
    use crate::kernels::{Kernels, Real};
    use std::f64::consts::{FRAC_1_SQRT_2, FRAC_2_SQRT_PI};

    /// Φ(x), by the series of erf without cancellation near 0 and by the continued fraction of erfc further out.
    fn normal(x: f64) -> f64 {
        let z = x.abs() * FRAC_1_SQRT_2;
        let tail = if z < 1.0 {
            let (mut term, mut sum) = (z, z);
            for n in 1..80 {
                term *= 2.0 * z * z / f64::from(2 * n + 1);
                sum += term;
            }
            0.5 * (1.0 - FRAC_2_SQRT_PI * bell(x) * sum)
        } else {
            let fraction = (1..400).rev().fold(z, |rest, n| z + 0.5 * f64::from(n) / rest);
            0.25 * FRAC_2_SQRT_PI * bell(x) / fraction
        };
        if x < 0.0 { tail } else { 1.0 - tail }
    }

    fn density(x: f64) -> f64 {
        0.5 * FRAC_2_SQRT_PI * FRAC_1_SQRT_2 * bell(x)
    }

    /// `e^(-x²/2)`; what the square loses to rounding would be as large as the errors that are looked for.
    fn bell(x: f64) -> f64 {
        let square = x * x;
        (-0.5 * square).exp() * (1.0 - 0.5 * x.mul_add(x, -square))
    }

    #[test]
    fn values_and_slopes_are_accurate_in_both_tails() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let x: Vec<T> = (-60_000..=60_000).map(|i| real(f64::from(i) / 5000.0)).collect();
            let (mut y, mut slope) = (x.clone(), x.clone());
            kernels.gelu(&mut y);
            kernels.gelu_slope(&mut slope);
            let (mut worst, epsilon) = (0.0f64, wide(T::epsilon()));
            for ((&x, &y), &slope) in x.iter().zip(&y).zip(&slope) {
                let (x, bound) = (wide(x), 16.0 + 0.75 * wide(x * x));
                let want = x * normal(x);
                let error = (wide(y) - want).abs() / (epsilon * want.abs() + f64::MIN_POSITIVE);
                worst = worst.max(error / bound);
                let terms = normal(x) + x.abs() * density(x);
                let error = (wide(slope) - normal(x) - x * density(x)).abs() / (epsilon * terms);
                worst = worst.max(error / bound);
            }
            println!("{} of the bound", worst);
            assert!(worst < 1.0, "{worst}");
        }
        at_every_level!(check);
    }

    #[test]
    fn the_ends_have_their_limits_and_nan_stays() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let (infinity, largest) = (T::infinity(), T::max_value());
            let ends = [infinity, largest, -infinity, -largest, T::zero(), T::nan(), T::min_positive_value()];
            let (mut y, mut slope) = (ends, ends);
            kernels.gelu(&mut y);
            kernels.gelu_slope(&mut slope);
            assert_eq!(y[..5], [infinity, largest, T::zero(), T::zero(), T::zero()]);
            assert_eq!(slope[..4], [T::one(), T::one(), T::zero(), T::zero()]);
            assert!(y[5].is_nan() && slope[5].is_nan());
            let is_half = |x: T| (wide(x) - 0.5).abs() < 4.0 * wide(T::epsilon());
            assert!(y[6] <= ends[6] && is_half(slope[4]) && is_half(slope[6]));
        }
        at_every_level!(check);
    }

    #[test]
    fn every_length_has_the_same_numbers() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let x = Numbers::new(3).vec::<T>(300);
            let mut whole = x.clone();
            kernels.gelu(&mut whole);
            for n in 0..=x.len() {
                let mut y = x.clone();
                kernels.gelu(&mut y[..n]);
                assert!(y[..n] == whole[..n] && y[n..] == x[n..], "{n}");
            }
        }
        at_every_level!(check);
    }
}
