//! One step of the online softmax: a group of rows meets one tile of 64 keys.
//!
//! ```text
//! s  = q·k                                   factor: from a product to a score
//! s  = cap · tanh(factor · s / cap) + bias   if there is a cap or a bias, and then factor = 1
//! m' = m, or the largest visible s           m' ≠ m only if powers of 4 vectors add up to more than 400
//! p  = e^(factor (s - m')) where visible, else 0
//! l  = l · e^(factor (m - m')) + p,   o = o · e^(factor (m - m'))
//! ```
//!
//! Shapes: `p` `[rows][64]` (scores in, probabilities out), `m` `[rows]`, `l` `[rows][16]` (one partial sum per lane), `o`
//! `[rows][width]`. The reference `m` is *lazy*: any reference gives the same quotient `o / l`, so it moves only when a
//! score would make `p` large, which is rare after the first tile. That it does is seen in the sum of the powers, infinite
//! ones included: a pass for the largest score of every row would be a tenth of the step. `m = -inf` means that the row has
//! seen no key, and then `l` and `o` are zero; the first visible tile sets `m` to its true maximum, so a single key has
//! `p = 1`.
//!
//! Masked lanes are selected away, never multiplied: what is in them, NaN included, has no influence.
//! Sources: Milakov and Gimelshein (2018) for the online form, FlashAttention (Dao et al., 2022) for the tiles.

use super::exp::{Powers, TOGETHER, exp2};
use super::mods::{BiasRows, Mods, mod_rows};
use super::real::Real;
use super::simd::Simd;
use super::tile::MAX_ROWS;
use super::{KEYS, PANEL, key_bits};
use num_traits::Float;
use std::ops::Range;
use std::ptr;

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

impl<T: Copy> Softmax<T> {
    /// The same step of some of its rows, whose scores are at `p`. Of bits and biases, which are told row by row, it has those
    /// of the first rows.
    #[inline(always)]
    pub(super) fn of_rows(&self, rows: Range<usize>, p: *mut T) -> Self {
        Self {
            rows: rows.len(),
            p,
            m: self.m.wrapping_add(rows.start),
            l: self.l.wrapping_add(rows.start * PANEL),
            o: self.o.wrapping_add(rows.start * self.o_row),
            ..*self
        }
    }
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
    let rate = factor * S::Elem::LOG2_E;
    let powers = Powers::new(s, rate);
    let powers = powers.in_memory::<S>();
    for row in 0..a.rows {
        // SAFETY: row < rows; the contract is handed on.
        unsafe {
            one_row::<S, MASKED, WHOLE>(s, a, (powers, rate), row, |key, e| {
                for (v, e) in e.into_iter().enumerate() {
                    let key = key + v * S::LANES;
                    if WHOLE || (a.first..a.end).contains(&key) {
                        s.store(a.p.add(row * KEYS + key), e);
                    }
                }
            });
        }
    }
}

/// The powers of a tile's keys, in vectors.
pub(super) type RowOfPowers<S> = [<S as Simd>::V; TOGETHER];

/// [`softmax`] of one row of the step, without bias and cap, where every key of the tile is visible: to the same bits, but the
/// powers are not written to memory.
///
/// # Safety
/// As [`softmax`], with such a row.
#[inline(always)]
pub(super) unsafe fn whole_row<S: Simd>(s: S, a: &Softmax<S::Elem>, row: usize) -> RowOfPowers<S> {
    let rate = a.factor * S::Elem::LOG2_E;
    // SAFETY: the contract is the same.
    unsafe { powers_of_row::<S, false>(s, a, (&Powers::new(s, rate), rate), row) }
}

/// # Safety
/// As [`softmax`], with a row that meets all keys of the tile.
#[inline(always)]
unsafe fn powers_of_row<S: Simd, const MASKED: bool>(
    s: S,
    a: &Softmax<S::Elem>,
    powers: (&Powers<S::V>, S::Elem),
    row: usize,
) -> RowOfPowers<S> {
    const { assert!(TOGETHER * S::LANES == KEYS, "a row is made at once") };
    let mut all = [s.zero(); TOGETHER];
    // SAFETY: the contract is the same.
    unsafe { one_row::<S, MASKED, true>(s, a, powers, row, |_, e| all = e) }
    all
}

/// The same with the biases of the row's 64 keys, which may hide some of them.
///
/// # Safety
/// As [`whole_row`]; and the biases must be readable.
#[inline(always)]
pub(super) unsafe fn biased_row<S: Simd>(
    s: S,
    a: &Softmax<S::Elem>,
    bias: *const S::Elem,
    row: usize,
) -> RowOfPowers<S> {
    let mut visible = u64::MAX;
    let mods = Mods {
        first: 0,
        end: KEYS,
        p: a.p.wrapping_add(row * KEYS),
        visible: &raw mut visible,
        bias: Some([bias; MAX_ROWS]),
        softcap: None,
        factor: a.factor,
        slope: ptr::null_mut(),
    };
    // SAFETY: the row is there, and so is its bias (contract); the bits are those of the row.
    unsafe {
        let (factor, hides) = mod_rows(s, &mods, 1);
        let rate = factor * S::Elem::LOG2_E;
        let powers = Powers::new(s, rate);
        if hides {
            cold();
            let a = Softmax { visible: (&raw mut visible).wrapping_sub(row), ..*a };
            return powers_of_row::<S, true>(s, &a, (&powers, rate), row);
        }
        powers_of_row::<S, false>(s, a, (&powers, rate), row)
    }
}

/// The powers go to `sink`, those of the vectors from a key on; vectors out of the range are not to be written.
///
/// # Safety
/// As [`softmax`]; `row` is one of the step.
#[inline(always)]
unsafe fn one_row<S: Simd, const MASKED: bool, const WHOLE: bool>(
    s: S,
    a: &Softmax<S::Elem>,
    (powers, rate): (&Powers<S::V>, S::Elem),
    row: usize,
    mut sink: impl FnMut(usize, [S::V; TOGETHER]),
) {
    let (first, end) = if WHOLE { (0, KEYS) } else { (a.first, a.end) };
    // SAFETY: row < rows, and keys run over first..end within 64, both multiples of LANES (contract).
    unsafe {
        let visible = if MASKED { *a.visible.add(row) } else { u64::MAX };
        let (m, l) = (&mut *a.m.add(row), a.l.add(row * PANEL));
        let mut row = Row { s, a, powers, rate, row, first, end, visible, m, sum: s.load(l) };
        // Always the same vectors together, wherever the range begins: no bit may depend on it.
        let together = TOGETHER * S::LANES;
        let keys = (first / together * together..end).step_by(together);
        if *row.m == S::Elem::neg_infinity() {
            cold();
            if MASKED && visible & key_bits(first, end) == 0 {
                keys.for_each(|key| sink(key, [s.zero(); TOGETHER]));
                return;
            }
            let mut top = s.splat(S::Elem::neg_infinity());
            for key in keys.clone() {
                top = largest(s, top, row.scores::<MASKED, WHOLE>(key));
            }
            // Finite from now on, also if every visible score is -inf.
            *row.m = s.reduce_max(top).max(S::Elem::min_value());
        }
        for key in keys {
            sink(key, row.exponentiate::<MASKED, WHOLE>(key));
        }
        s.store(l, row.sum);
    }
}

/// A row that meets the keys of the range.
struct Row<'a, S: Simd> {
    s: S,
    a: &'a Softmax<S::Elem>,
    powers: &'a Powers<S::V>,
    /// Of the powers of two.
    rate: S::Elem,
    row: usize,
    first: usize,
    end: usize,
    visible: u64,
    m: &'a mut S::Elem,
    /// The row of `l`.
    sum: S::V,
}

impl<S: Simd> Row<'_, S> {
    /// The powers of the scores, those vectors from `key` on that are in the range.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn exponentiate<const MASKED: bool, const WHOLE: bool>(&mut self, key: usize) -> [S::V; TOGETHER] {
        let s = self.s;
        // SAFETY: those that are in the range are readable and writable (contract).
        unsafe {
            let (mut e, mut part) = self.powers_of(self.scores::<MASKED, WHOLE>(key));
            // That some of them are too large is seen in their sum, which is needed anyway.
            if s.mask_bits(s.lt(s.splat(S::Elem::MOST_POWER), part)) != 0 {
                cold();
                // Read anew: kept for this rare case, the scores of every row would be written to memory once more.
                self.move_reference(self.scores::<MASKED, WHOLE>(key), key);
                (e, part) = self.powers_of(self.scores::<MASKED, WHOLE>(key));
            }
            self.sum = s.add(self.sum, part);
            e
        }
    }

    /// Whether the vector that begins with a key is in the range, whose ends are ends of vectors.
    #[inline(always)]
    fn counts(&self, key: usize) -> bool {
        self.first <= key && key < self.end
    }

    /// The vectors of scores from `key` on; -inf what is hidden or not in the range.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn scores<const MASKED: bool, const WHOLE: bool>(&self, key: usize) -> [S::V; TOGETHER] {
        let s = self.s;
        let nothing = s.splat(S::Elem::neg_infinity());
        let mut x = [nothing; TOGETHER];
        for (v, x) in x.iter_mut().enumerate() {
            let key = key + v * S::LANES;
            if WHOLE || self.counts(key) {
                // SAFETY: the vector is readable (contract).
                *x = unsafe { s.load(self.a.p.add(self.row * KEYS + key)) };
                if MASKED {
                    *x = s.select(s.mask_from_bits(self.visible >> key), *x, nothing);
                }
            }
        }
        x
    }

    /// `e^(factor (x - m))`, and the sum of these vectors.
    #[inline(always)]
    fn powers_of(&self, x: [S::V; TOGETHER]) -> ([S::V; TOGETHER], S::V) {
        let s = self.s;
        // The difference is exact where it is small: all that follows from it has the relative error of a power, and a key
        // that has all the weight has p = 1.
        let reference = s.splat(*self.m);
        let mut below = x;
        for v in 0..TOGETHER {
            below[v] = s.sub(x[v], reference);
        }
        let e = self.powers.of(s, below);
        (e, s.add(s.add(e[0], e[2]), s.add(e[1], e[3])))
    }

    /// Makes the largest of the scores `x`, the vectors from `key` on, the reference, and brings what was computed with the
    /// one before to it.
    ///
    /// # Safety
    /// As [`softmax`].
    #[inline(always)]
    unsafe fn move_reference(&mut self, x: [S::V; TOGETHER], key: usize) {
        let s = self.s;
        let moved = s.reduce_max(largest(s, s.splat(*self.m), x));
        let factor = exp2(s, s.splat((*self.m - moved) * self.rate));
        *self.m = moved;
        self.sum = s.mul(self.sum, factor);
        // SAFETY: `first..key` is a part of the range of keys, and the row of `o` has `width` elements (contract); all are
        // multiples of LANES.
        unsafe {
            let done = key.saturating_sub(self.first);
            scale(s, self.a.p.add(self.row * KEYS + self.first), done, factor);
            scale(s, self.a.o.add(self.row * self.a.o_row), self.a.width, factor);
        }
    }
}

/// The largest of each lane. (A loop: what iterators make of it goes through memory, and waits for what the matrix unit stores.)
#[inline(always)]
fn largest<S: Simd>(s: S, mut top: S::V, x: [S::V; TOGETHER]) -> S::V {
    for v in 0..TOGETHER {
        // In this order of operands NaN is passed over.
        top = s.max(x[v], top);
    }
    top
}

/// Multiplies `n` numbers by a factor.
///
/// # Safety
/// `n` must be a multiple of `LANES`, and `x` valid for reading and writing so many elements.
#[inline(always)]
unsafe fn scale<S: Simd>(s: S, x: *mut S::Elem, n: usize, factor: S::V) {
    for at in (0..n).step_by(S::LANES) {
        // SAFETY: at + LANES <= n (contract).
        unsafe { s.store(x.add(at), s.mul(s.load(x.add(at)), factor)) };
    }
}

/// Tells the compiler that the branch it is called in is rare: the code moves out of the way of the common path.
#[cold]
pub(super) fn cold() {}
