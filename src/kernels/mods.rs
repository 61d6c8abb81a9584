//! What happens to a score between the product and the softmax.
//!
//! ```text
//! s = cap · tanh(factor · q·k / cap) + bias
//! slope = 1 - tanh²                                the derivative of the cap, for backward
//! ```
//!
//! A bias of -inf hides its key: the bit of the key is cleared.

use super::KEYS;
use super::exp::tanh;
use super::simd::Simd;
use super::softmax::cold;
use super::tile::MAX_ROWS;
use num_traits::{Float, One};

/// For each row of a group, where the biases of a tile's keys begin.
pub(super) type BiasRows<T> = [*const T; MAX_ROWS];

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
    pub(super) bias: Option<BiasRows<T>>,
    pub(super) softcap: Option<T>,
    /// What turns the products into scores.
    pub(super) factor: T,
    /// `[rows][64]` that become the derivative of the soft cap, or null.
    pub(super) slope: *mut T,
}

/// [`score_mods`] of so many rows, if there is a cap or a bias. What turns the numbers into scores from here on, and whether a
/// bias hid keys.
///
/// # Safety
/// As [`score_mods`], of each row.
#[inline(always)]
pub(super) unsafe fn mod_rows<S: Simd>(s: S, a: &Mods<S::Elem>, rows: usize) -> (S::Elem, bool) {
    if a.softcap.is_none() && a.bias.is_none() {
        return (a.factor, false);
    }
    let mut hides = false;
    for row in 0..rows {
        // SAFETY: the contract is handed on.
        hides |= unsafe { score_mods(s, a, row) };
    }
    (S::Elem::one(), hides)
}

/// Caps the scores of a row, adds the bias, and hides the keys whose bias is -inf. True if there are such keys.
///
/// # Safety
/// The arrays of [`Mods`] must have its shapes, with a row `row`.
#[inline(always)]
unsafe fn score_mods<S: Simd>(s: S, a: &Mods<S::Elem>, row: usize) -> bool {
    let mut factor = a.factor;
    if let Some(cap) = a.softcap {
        // SAFETY: the contract is handed on.
        unsafe { cap_scores(s, a, row, cap) };
        factor = S::Elem::one();
    }
    let Some(bias) = a.bias else { return false };
    let factor = s.splat(factor);
    let mut smallest = s.zero();
    for key in (a.first..a.end).step_by(S::LANES) {
        // SAFETY: key + LANES <= end <= 64, so the vector lies in the row of each array (contract).
        unsafe {
            let (bias, p) = (s.load(bias[row].add(key)), a.p.add(row * KEYS + key));
            s.store(p, s.fma(s.load(p), factor, bias));
            // This order of operands skips NaN, which reaches the score by itself.
            smallest = s.min(bias, smallest);
        }
    }
    if s.mask_bits(s.lt(smallest, s.splat(S::Elem::min_value()))) == 0 {
        return false;
    }
    cold();
    // SAFETY: the contract is handed on; `visible` has a word per row.
    unsafe { *a.visible.add(row) &= !hidden(s, a, bias[row]) };
    true
}

/// The products of a row to capped scores.
///
/// # Safety
/// As [`score_mods`].
#[inline(always)]
unsafe fn cap_scores<S: Simd>(s: S, a: &Mods<S::Elem>, row: usize, cap: S::Elem) {
    let (factor, cap) = (s.splat(a.factor), s.splat(cap));
    for key in (a.first..a.end).step_by(S::LANES) {
        // SAFETY: key + LANES <= end <= 64, so the vector lies in the row of each array (contract).
        unsafe {
            let p = a.p.add(row * KEYS + key);
            let bounded = tanh(s, s.div(s.mul(s.load(p), factor), cap));
            s.store(p, s.mul(cap, bounded));
            if !a.slope.is_null() {
                let slope = s.fma(s.sub(s.zero(), bounded), bounded, s.splat(S::Elem::one()));
                s.store(a.slope.add(row * KEYS + key), slope);
            }
        }
    }
}

/// The bits of the keys whose bias is -inf.
///
/// # Safety
/// As [`score_mods`], with a bias.
#[inline(always)]
unsafe fn hidden<S: Simd>(s: S, a: &Mods<S::Elem>, bias: *const S::Elem) -> u64 {
    let lowest = s.splat(S::Elem::min_value());
    let mut bits = 0;
    for key in (a.first..a.end).step_by(S::LANES) {
        // SAFETY: as above.
        bits |= s.mask_bits(s.lt(unsafe { s.load(bias.add(key)) }, lowest)) << key;
    }
    bits
}
