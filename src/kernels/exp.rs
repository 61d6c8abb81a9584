//! The two functions of attention: `2^x` for the softmax and `tanh(x)` for the score cap.
//!
//! ```text
//! 2^x     = 2^⌊x⌋ · P(x - ⌊x⌋)                      P(f) = 1 + f (c0 + f (c1 + ...)), f in [0, 1)
//! tanh(x) = x + x z (c0 + z (c1 + ...)), z = x²     |x| < 0.625
//!         = ±(1 - 2 / (1 + e^(2|x|)))               elsewhere
//! ```
//!
//! The coefficients are minimax in the relative error (Remez exchange in 50 digits) with the constant term *fixed* at 1,
//! so that `2^0 == 1` exactly: a query that sees one key must return its value bit for bit.
//! Error of the polynomials: `2^x` 2.0e-9 (f32, degree 6) and 3.2e-18 (f64, degree 11), `tanh` 4.4e-9 and 1.0e-17;
//! rounding dominates. Largest error measured, in units of the last place, rounding included (tests below):
//!
//! | level | 2^x f32 | 2^x f64 | tanh f32 | tanh f64 |
//! | --- | --- | --- | --- | --- |
//! | with FMA | MEASURE | | | |
//! | portable, SSE2 | | | | |
//!
//! Powers below the smallest normal number are exactly zero: one operand in denormal form makes a product of the values
//! a hundred times slower. `2^-inf = 0`, `2^x = inf` from the overflow exponent on, NaN gives NaN; `tanh(±inf) = ±1`.

use super::real::Real;
use super::simd::Simd;
use num_traits::One;

/// `2^t` for each lane.
#[inline(always)]
pub(crate) fn exp2<S: Simd>(s: S, t: S::V) -> S::V {
    let f = s.fraction(t);
    let p = s.fma(f, polynomial(s, f, S::Elem::EXP2), s.splat(S::Elem::one()));
    s.scale_by_floor(p, t)
}

/// `tanh(x)` for each lane.
#[inline(always)]
pub(crate) fn tanh<S: Simd>(s: S, x: S::V) -> S::V {
    let (one, two) = (s.splat(S::Elem::one()), s.splat(S::Elem::one() + S::Elem::one()));
    let negated = s.sub(s.zero(), x);
    let size = s.max(negated, x);

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
