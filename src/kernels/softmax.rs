//! One step of the online softmax: a group of rows meets one tile of 64 keys.
//!
//! ```text
//! s  = q·k                                   factor: from a product to a score
//! s  = cap · tanh(factor · s / cap) + bias   if there is a cap or a bias, and then factor = 1
//! m' = m, or the largest visible s           m' ≠ m only if some visible factor · s > factor · m + 6
//! p  = e^(factor (s - m')) where visible, else 0
//! l  = l · e^(factor (m - m')) + p,   o = o · e^(factor (m - m'))
//! ```
//!
//! Shapes: `p` `[rows][64]` (scores in, probabilities out), `m` `[rows]`, `l` `[rows][16]` (one partial sum per lane), `o`
//! `[rows][width]`. The reference `m` is *lazy*: any reference gives the same quotient `o / l`, so it moves only when a
//! score would make `p` large (e^6), which is rare after the first tile. `m = -inf` means that the row has seen no key,
//! and then `l` and `o` are zero; the first visible tile sets `m` to its true maximum, so a single key has `p = 1`.
//!
//! Masked lanes are selected away, never multiplied: what is in them, NaN included, has no influence.
//! Sources: Milakov and Gimelshein (2018) for the online form, FlashAttention (Dao et al., 2022) for the tiles.

use super::exp::{Powers, TOGETHER, exp2};
use super::mods::{BiasRows, Mods, mod_rows};
use super::real::Real;
use super::simd::Simd;
use super::{KEYS, PANEL, key_bits};
use num_traits::Float;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};

/// One step, by pointers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Softmax<T> {
    pub(crate) rows: usize,
    /// The keys of the tile that count, both ends multiples of 16. The others are neither read nor written.
    pub(crate) first: usize,
    pub(crate) end: usize,
    pub(crate) p: *mut T,
    /// In units of `s`: of products, or of scores if there is a cap or a bias.
    pub(crate) m: *mut T,
    pub(crate) l: *mut T,
    pub(crate) o: *mut T,
    pub(crate) o_row: usize,
    /// Elements of a row of `o`, a multiple of 16.
    pub(crate) width: usize,
    /// Per row, bit j set if key j is visible. A bias of -inf clears bits.
    pub(crate) visible: *mut u64,
    /// Every key of the range is visible, as far as `visible` knows beforehand.
    pub(crate) all_visible: bool,
    /// For each row, of the keys up to `end`.
    pub(crate) bias: Option<BiasRows<T>>,
    pub(crate) softcap: Option<T>,
    /// What turns the products in `p` into scores; positive, so that -inf stays -inf.
    pub(crate) factor: T,
}

/// Runs one step.
///
/// # Safety
/// The arrays must have the shapes above and be readable and writable, `first <= end <= 64`.
#[inline(always)]
pub(crate) unsafe fn softmax<S: Simd>(s: S, a: &Softmax<S::Elem>) {
    // SAFETY: the contract is handed on; `WHOLE` is chosen only if the range is 0..64.
    unsafe {
        let Softmax { first, end, p, visible, bias, softcap, factor, .. } = *a;
        let (factor, hides) =
            mod_rows(s, &Mods { first, end, p, visible, bias, softcap, factor, slope: ptr::null_mut() }, a.rows);
        let all_visible = a.all_visible && !hides;
        match (all_visible, a.first == 0 && a.end == KEYS) {
            (true, true) => rows::<S, false, true>(s, a, factor),
            (true, false) => rows::<S, false, false>(s, a, factor),
            (false, true) => rows::<S, true, true>(s, a, factor),
            (false, false) => rows::<S, true, false>(s, a, factor),
        }
    }
}

/// Scores to probabilities, with the reference of a row moved first if it has to. `WHOLE` fixes the range of keys to
/// 0..64, so that loops over keys are unrolled.
///
/// # Safety
/// As [`softmax`].
#[inline(always)]
unsafe fn rows<S: Simd, const MASKED: bool, const WHOLE: bool>(s: S, a: &Softmax<S::Elem>, factor: S::Elem) {
    let (to_exponent, slack) = (factor * S::Elem::LOG2_E, S::Elem::SLACK / factor);
    let powers = Powers::new(s, to_exponent);
    let powers = powers.in_memory();
    let nothing = s.splat(S::Elem::neg_infinity());
    let (first, end) = if WHOLE { (0, KEYS) } else { (a.first, a.end) };
    for row in 0..a.rows {
        // SAFETY: row < rows, and keys run over first..end within 64, both multiples of LANES (contract).
        unsafe {
            let p = a.p.add(row * KEYS);
            let visible = if MASKED { *a.visible.add(row) } else { u64::MAX };

            let mut top = nothing;
            for key in (first..end).step_by(S::LANES) {
                let mut x = s.load(p.add(key));
                if MASKED {
                    // The power of what is hidden is zero from here on.
                    x = s.select(s.mask_from_bits(visible >> key), x, nothing);
                    s.store(p.add(key), x);
                }
                // Of a NaN all that follows is NaN; that it hides what came before it does not matter any more.
                top = s.max(top, x);
            }

            let m = &mut *a.m.add(row);
            let limit = s.splat(*m + slack);
            if *m == S::Elem::neg_infinity() || s.mask_bits(s.lt(limit, top)) != 0 {
                cold();
                if MASKED && *m == S::Elem::neg_infinity() && visible & key_bits(first, end) == 0 {
                    for key in (first..end).step_by(S::LANES) {
                        s.store(p.add(key), s.zero());
                    }
                    continue;
                }
                // Finite from now on, also if every visible score is -inf.
                let moved = m.max(s.reduce_max(top)).max(S::Elem::min_value());
                if *m != S::Elem::neg_infinity() {
                    rescale(s, a, row, (*m - moved) * to_exponent);
                }
                *m = moved;
            }

            let reference = s.splat(*m);
            // The row is read anew: kept from above, it would take all registers, and be written to memory once more.
            compiler_fence(Ordering::AcqRel);
            let l = a.l.add(row * PANEL);
            let sum = s.load(l);
            let (key, sum) = to_powers::<S, TOGETHER>(s, powers, p, first..end, reference, sum);
            let (key, sum) = to_powers::<S, 2>(s, powers, p, key..end, reference, sum);
            let (_, sum) = to_powers::<S, 1>(s, powers, p, key..end, reference, sum);
            s.store(l, sum);
        }
    }
}

/// Scores to powers, `STEP` vectors at a time as long as there are so many; adds them to `sum`. Returns where it ended.
///
/// # Safety
/// `p` must be valid for reading and writing the elements `keys`, whole vectors of them.
#[inline(always)]
unsafe fn to_powers<S: Simd, const STEP: usize>(
    s: S,
    powers: &Powers<S::V>,
    p: *mut S::Elem,
    keys: Range<usize>,
    reference: S::V,
    mut sum: S::V,
) -> (usize, S::V) {
    let mut key = keys.start;
    while key + STEP * S::LANES <= keys.end {
        // SAFETY: STEP vectors from `key` on end within `keys`.
        unsafe {
            let mut x = [s.zero(); STEP];
            for v in 0..STEP {
                // The difference is exact where it is small: all that follows from it has the relative error of a power,
                // and a key that has all the weight has p = 1.
                x[v] = s.sub(s.load(p.add(key + v * S::LANES)), reference);
            }
            let e = powers.of(s, x);
            for v in 0..STEP {
                s.store(p.add(key + v * S::LANES), e[v]);
                sum = s.add(sum, e[v]);
            }
        }
        key += STEP * S::LANES;
    }
    (key, sum)
}

/// Multiplies the row of `o` and its partial sums by `2^exponent`.
///
/// # Safety
/// As [`softmax`], with `row < rows`.
#[inline(always)]
unsafe fn rescale<S: Simd>(s: S, a: &Softmax<S::Elem>, row: usize, exponent: S::Elem) {
    let factor = exp2(s, s.splat(exponent));
    // SAFETY: `width` and 16 are multiples of LANES, and the row of `o` and `l` has that many elements (contract).
    unsafe {
        let l = a.l.add(row * PANEL);
        s.store(l, s.mul(s.load(l), factor));
        for column in (0..a.width).step_by(S::LANES) {
            let o = a.o.add(row * a.o_row + column);
            s.store(o, s.mul(s.load(o), factor));
        }
    }
}

/// Tells the compiler that the branch it is called in is rare: the code moves out of the way of the common path.
#[cold]
pub(super) fn cold() {}
