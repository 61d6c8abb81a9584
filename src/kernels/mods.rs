//! What happens to a score between the product and the softmax.
//!
//! ```text
//! s = cap · tanh(factor · q·k / cap) + bias        in binary units
//! slope = 1 - tanh²                                the derivative of the cap, for backward
//! ```
//!
//! A bias of -inf hides its key: the bit of the key is cleared.

use super::KEYS;
use super::exp::tanh;
use super::real::Real;
use super::simd::Simd;
use super::softmax::cold;
use num_traits::{Float, One};

/// The scores of a group of rows and one tile of keys, by pointers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mods<T> {
    /// The keys of the tile that count, both ends multiples of 16 within 0..=64.
    pub(super) first: usize,
    pub(super) end: usize,
    /// `[rows][64]`: products in, scores out.
    pub(super) p: *mut T,
    /// Per row, bit j set if key j is visible.
    pub(super) visible: *mut u64,
    /// `[rows][64]` in natural units, or null.
    pub(super) bias: *const T,
    /// In natural units.
    pub(super) softcap: Option<T>,
    /// What turns the products into scores in binary units.
    pub(super) factor: T,
    /// `[rows][64]` that become the derivative of the soft cap, or null.
    pub(super) slope: *mut T,
}

/// Caps the scores of a row, adds the bias, and hides the keys whose bias is -inf. True if there are such keys.
///
/// # Safety
/// The arrays of [`Mods`] must have its shapes, with a row `row`.
#[inline(always)]
pub(super) unsafe fn score_mods<S: Simd>(s: S, a: &Mods<S::Elem>, row: usize) -> bool {
    // SAFETY: the contract is handed on; `visible` has a word per row.
    unsafe {
        if a.bias.is_null() || small_bias(s, a, row) {
            modify::<S, false>(s, a, row);
            return false;
        }
        cold();
        let hidden = modify::<S, true>(s, a, row);
        *a.visible.add(row) &= !hidden;
        hidden != 0
    }
}

/// Whether no bias of a row is infinite or becomes so by the change of units. NaN is let through.
///
/// # Safety
/// As [`score_mods`], with a bias.
#[inline(always)]
unsafe fn small_bias<S: Simd>(s: S, a: &Mods<S::Elem>, row: usize) -> bool {
    let mut largest = s.zero();
    for key in (a.first..a.end).step_by(S::LANES) {
        // SAFETY: key + LANES <= end <= 64, so the vector lies in the row of the bias (contract).
        let bias = unsafe { s.load(a.bias.add(row * KEYS + key)) };
        // This order of operands skips NaN, which reaches the score by itself.
        largest = s.max(s.max(s.sub(s.zero(), bias), bias), largest);
    }
    let limit = S::Elem::max_value() / (S::Elem::one() + S::Elem::one());
    s.mask_bits(s.lt(s.splat(limit), largest)) == 0
}

/// The scores of a row capped and with the bias added; the bits of the keys whose bias is -inf. Without `LARGE`, all
/// biases are small.
///
/// # Safety
/// The arrays of [`Mods`] must have its shapes, with a row `row`.
#[inline(always)]
unsafe fn modify<S: Simd, const LARGE: bool>(s: S, a: &Mods<S::Elem>, row: usize) -> u64 {
    let (factor, log2_e) = (s.splat(a.factor), s.splat(S::Elem::LOG2_E));
    let (lowest, highest) = (s.splat(S::Elem::min_value()), s.splat(S::Elem::max_value()));
    let mut hidden = 0;
    for key in (a.first..a.end).step_by(S::LANES) {
        // SAFETY: key + LANES <= end <= 64, so the vector lies in the row of `p` and of the bias (contract).
        unsafe {
            let p = a.p.add(row * KEYS + key);
            let mut x = s.mul(s.load(p), factor);
            if let Some(cap) = a.softcap {
                let cap = s.splat((cap * S::Elem::LOG2_E).min(S::Elem::max_value()));
                let bounded = tanh(s, s.div(x, cap));
                x = s.mul(cap, bounded);
                if !a.slope.is_null() {
                    let slope = s.fma(s.sub(s.zero(), bounded), bounded, s.splat(S::Elem::one()));
                    s.store(a.slope.add(row * KEYS + key), slope);
                }
            }
            if !a.bias.is_null() {
                let bias = s.load(a.bias.add(row * KEYS + key));
                if LARGE {
                    hidden |= s.mask_bits(s.lt(bias, lowest)) << key;
                    // A large finite bias is arithmetic, not a mask: the change of units must not make it infinite.
                    let scaled = s.max(lowest, s.min(highest, s.mul(bias, log2_e)));
                    x = s.add(x, s.select(s.lt(highest, bias), bias, scaled));
                } else {
                    x = s.fma(bias, log2_e, x);
                }
            }
            s.store(p, x);
        }
    }
    hidden
}
