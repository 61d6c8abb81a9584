//! Back through the softmax: one group of rows and one tile of 64 keys.
//!
//! ```text
//! s = factor · q·k
//! s = cap · tanh(s / cap) + bias             slope = 1 - tanh²
//! p = e^(s - lse)       where visible, else 0
//! d_s = p (z d_p - D)   where visible, else 0
//! d_x = slope d_s
//! p = z p
//! ```
//!
//! `z` are the factors of dropout, `d_p` the products of the gradient of the context with the values, `D` that of the
//! context's gradient with the context. Shapes: `p` `[rows][64]` (products in, probabilities after dropout out), `d`
//! `[rows][64]` (`d_p` in, `d_x` out). Keys outside of the range count as hidden: both are set to zero there.
//!
//! Masked lanes are selected away, never multiplied. Gradients below the smallest normal number are zero, as the powers
//! of `exp.rs` are: one operand in denormal form makes the products that follow a hundred times slower.

use super::dropout::Into;
use super::exp::{Powers, TOGETHER};
use super::mods::{BiasRows, Mods, mod_rows};
use super::real::Real;
use super::simd::Simd;
use super::step::{Scoring, Visible};
use super::table::Kernels;
use super::tile::MAX_ROWS;
use super::{KEYS, PANEL, key_bits};
use num_traits::Float;
use std::ops::Range;
use std::ptr;

/// One group against one tile, by pointers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Back<T> {
    pub(crate) rows: usize,
    /// The keys of the tile that count, both ends multiples of 16.
    pub(crate) first: usize,
    pub(crate) end: usize,
    pub(crate) p: *mut T,
    pub(crate) d: *mut T,
    /// `[rows]`
    pub(crate) lse: *const T,
    /// `[rows]`
    pub(crate) delta: *const T,
    /// Per row, bit j set if key j is visible. A bias of -inf clears bits.
    pub(crate) visible: *mut u64,
    /// Every key of the range is visible, as far as `visible` knows beforehand.
    pub(crate) all_visible: bool,
    /// For each row, of the keys up to `end`.
    pub(crate) bias: Option<BiasRows<T>>,
    pub(crate) softcap: Option<T>,
    /// What turns the products in `p` into scores.
    pub(crate) factor: T,
    /// `[rows][64]` of the soft cap, or null without one: scratch.
    pub(crate) slope: *mut T,
    /// `[rows][64]` factors of dropout, or null.
    pub(crate) z: *const T,
    /// `[rows][64]` that become `d_s`, or null.
    pub(crate) d_scores: *mut T,
}

/// Runs over one tile.
///
/// # Safety
/// The arrays must have the shapes above and be readable and writable, `first <= end <= 64`; a soft cap needs `slope`.
#[inline(always)]
pub(crate) unsafe fn back<S: Simd>(s: S, a: &Back<S::Elem>) {
    // SAFETY: the contract is handed on; `WHOLE` is chosen only if the range is 0..64.
    unsafe {
        let Back { first, end, p, visible, bias, softcap, factor, slope, .. } = *a;
        let (factor, hides) = mod_rows(s, &Mods { first, end, p, visible, bias, softcap, factor, slope }, a.rows);
        let all_visible = a.all_visible && !hides;
        match (all_visible, a.first == 0 && a.end == KEYS) {
            (true, true) => rows::<S, false, true>(s, a, factor),
            (true, false) => rows::<S, false, false>(s, a, factor),
            (false, true) => rows::<S, true, true>(s, a, factor),
            (false, false) => rows::<S, true, false>(s, a, factor),
        }
    }
}

/// The rows of a group. `WHOLE` fixes the range of keys to 0..64, so that the loop is unrolled.
///
/// # Safety
/// As [`back`].
#[inline(always)]
unsafe fn rows<S: Simd, const MASKED: bool, const WHOLE: bool>(s: S, a: &Back<S::Elem>, factor: S::Elem) {
    let powers = Powers::new(s, S::Elem::LOG2_E);
    let powers = powers.in_memory::<S>();
    for row in 0..a.rows {
        // SAFETY: row < rows; the contract is handed on.
        unsafe { one_row::<S, MASKED, WHOLE>(s, a, (powers, factor), row) }
    }
}

/// What [`back`] makes of two vectors of each of two rows, from `key` on, without a cap: p and d, while the products stay as they
/// are.
/// Zeros of rows that are not there; the first of two comes first.
///
/// # Safety
/// As [`back`], and as [`Biases`] say; the keys are some of the 64.
#[inline(always)]
pub(super) unsafe fn two_rows<S: Simd>(
    s: S,
    (a, biases): (&Back<S::Elem>, &Biases<S::Elem>),
    rows: [usize; 2],
    key: usize,
) -> [[S::V; 4]; 2] {
    if rows[0] >= a.rows {
        return [[s.zero(); 4]; 2];
    }
    let powers = Powers::new(s, S::Elem::LOG2_E);
    // A second one that is not there sees nothing, and is read where the first is.
    let (first, second) = (rows[0], if rows[1] < a.rows { rows[1] } else { rows[0] });
    // SAFETY: both rows are there; the contract is handed on.
    unsafe {
        let visible = [*a.visible.add(first), if second == rows[1] { *a.visible.add(second) } else { 0 }];
        let of = |x: *const S::Elem| {
            let (first, second) = (s.splat(*x.add(first)), s.splat(*x.add(second)));
            [first, first, second, second]
        };
        let (at, below) = (first * KEYS + key, second * KEYS + key);
        let (bits, bits_below) = (visible[0] >> key, visible[1] >> key);
        let numbers = Numbers {
            factor: s.splat(a.factor),
            lse: of(a.lse),
            delta: of(a.delta),
            at: [at, at + S::LANES, below, below + S::LANES],
            visible: [bits, bits >> S::LANES, bits_below, bits_below >> S::LANES],
        };
        let whole = visible == [u64::MAX; 2] && a.z.is_null();
        if whole && biases.bias.is_null() {
            return vectors::<S, false, PLAIN, 4>(s, a, &powers, &numbers, &[Biases::NONE; 4]);
        }
        let (above, below) = (biases.of_row(first, key), biases.of_row(second, key));
        let of_vectors = [above, above.from(S::LANES), below, below.from(S::LANES)];
        if whole && !biases.sums.is_null() {
            return vectors::<S, true, BIASED, 4>(s, a, &powers, &numbers, &of_vectors);
        }
        // What would be added for one that is not there goes nowhere.
        let below = if second == rows[1] { below } else { below.without_sums() };
        let of_vectors = [above, above.from(S::LANES), below, below.from(S::LANES)];
        vectors::<S, true, ANY, 4>(s, a, &powers, &numbers, &of_vectors)
    }
}

/// # Safety
/// As [`back`]; `row` is one of the group.
#[inline(always)]
unsafe fn one_row<S: Simd, const MASKED: bool, const WHOLE: bool>(
    s: S,
    a: &Back<S::Elem>,
    (powers, factor): (&Powers<S::V>, S::Elem),
    row: usize,
) {
    let (first, end) = if WHOLE { (0, KEYS) } else { (a.first, a.end) };
    // SAFETY: row < rows, and keys run within the 64 of a row, in steps of vectors that divide 16 (contract).
    unsafe {
        let numbers = Row {
            row,
            visible: if MASKED { *a.visible.add(row) } else { u64::MAX },
            factor: s.splat(factor),
            lse: s.splat(*a.lse.add(row)),
            delta: s.splat(*a.delta.add(row)),
        };
        let key = keys::<S, MASKED, TOGETHER>(s, a, powers, &numbers, first..end);
        let key = keys::<S, MASKED, 2>(s, a, powers, &numbers, key..end);
        keys::<S, MASKED, 1>(s, a, powers, &numbers, key..end);
        if !WHOLE {
            let (p, d) = (a.p.add(row * KEYS), a.d.add(row * KEYS));
            for key in (0..first).chain(end..KEYS).step_by(S::LANES) {
                s.store(p.add(key), s.zero());
                s.store(d.add(key), s.zero());
            }
        }
    }
}

/// Biases of rows and the sums of their gradients, by pointers: there are 64 of each row, from the first key of the tile on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Biases<T> {
    /// Null without biases.
    pub(super) bias: *const T,
    /// Numbers from row to row.
    pub(super) bias_row: usize,
    /// Null if no gradient is asked for.
    pub(super) sums: *mut T,
    pub(super) sums_row: isize,
}

impl<T> Biases<T> {
    pub(super) const NONE: Self = Self { bias: ptr::null(), bias_row: 0, sums: ptr::null_mut(), sums_row: 0 };

    /// Those of a row, from a key on.
    #[inline(always)]
    fn of_row(&self, row: usize, key: usize) -> Self {
        let bias = if self.bias.is_null() { self.bias } else { self.bias.wrapping_add(row * self.bias_row + key) };
        let apart = self.sums_row.wrapping_mul(row as isize).wrapping_add(key as isize);
        let sums = if self.sums.is_null() { self.sums } else { self.sums.wrapping_offset(apart) };
        Self { bias, sums, ..*self }
    }

    /// Those of the same row, so many keys further.
    #[inline(always)]
    fn from(&self, keys: usize) -> Self {
        self.of_row(0, keys)
    }

    #[inline(always)]
    fn without_sums(&self) -> Self {
        Self { sums: ptr::null_mut(), ..*self }
    }
}

/// A row, and what all its keys share.
struct Row<V> {
    row: usize,
    visible: u64,
    factor: V,
    lse: V,
    delta: V,
}

/// Vectors of products: where they are, the visible bits of each from its first key on, and what belongs to their rows.
struct Numbers<V, const N: usize> {
    factor: V,
    lse: [V; N],
    delta: [V; N],
    at: [usize; N],
    visible: [u64; N],
}

/// The keys `keys` of a row, `STEP` vectors at a time as long as there are so many. Returns where it ended.
///
/// # Safety
/// As [`back`]; `keys` are whole vectors of the tile's keys.
#[inline(always)]
unsafe fn keys<S: Simd, const MASKED: bool, const STEP: usize>(
    s: S,
    a: &Back<S::Elem>,
    powers: &Powers<S::V>,
    row: &Row<S::V>,
    keys: Range<usize>,
) -> usize {
    let mut key = keys.start;
    while key + STEP * S::LANES <= keys.end {
        let numbers = Numbers {
            factor: row.factor,
            lse: [row.lse; STEP],
            delta: [row.delta; STEP],
            at: std::array::from_fn(|v| row.row * KEYS + key + v * S::LANES),
            visible: std::array::from_fn(|v| row.visible >> (key + v * S::LANES)),
        };
        // SAFETY: row < rows, and STEP vectors from `key` on lie within the 64 keys of a row (contract).
        unsafe {
            let [p, d] = vectors::<S, MASKED, ANY, STEP>(s, a, powers, &numbers, &[Biases::NONE; STEP]);
            for v in 0..STEP {
                s.store(a.p.add(numbers.at[v]), p[v]);
                s.store(a.d.add(numbers.at[v]), d[v]);
            }
        }
        key += STEP * S::LANES;
    }
    key
}

/// With neither bias, cap nor dropout, and nobody who asks for gradients of scores.
const PLAIN: u8 = 0;
/// With biases and the sums of their gradients, and no more.
const BIASED: u8 = 1;
/// With any of them.
const ANY: u8 = 2;

/// p and d of `N` vectors, `WITH` what says how much there may be. Of the biases, only those that were not added before count,
/// and they need `MASKED`.
///
/// # Safety
/// As [`back`]; the vectors are whole ones of rows of the group.
#[inline(always)]
unsafe fn vectors<S: Simd, const MASKED: bool, const WITH: u8, const N: usize>(
    s: S,
    a: &Back<S::Elem>,
    powers: &Powers<S::V>,
    numbers: &Numbers<S::V, N>,
    biases: &[Biases<S::Elem>; N],
) -> [[S::V; N]; 2] {
    let Numbers { factor, lse, delta, at, visible } = *numbers;
    let smallest = s.splat(S::Elem::min_positive_value());
    let (mut x, mut d) = ([s.zero(); N], [s.zero(); N]);
    // SAFETY: the vectors lie within the arrays (contract).
    unsafe {
        for v in 0..N {
            // Rounded before the difference, as the lse was: a key that has all the weight has p = 1.
            let products = s.load(a.p.add(at[v]));
            let scores = match biases[v].bias {
                bias if WITH == PLAIN || WITH == ANY && bias.is_null() => s.mul(products, factor),
                bias => s.fma(products, factor, s.load(bias)),
            };
            x[v] = s.sub(scores, lse[v]);
        }
        let mut p = powers.of(s, x);
        for v in 0..N {
            let mut seen = s.mask_from_bits(visible[v]);
            if WITH == BIASED || WITH == ANY && MASKED && !biases[v].bias.is_null() {
                let hidden = s.mask_bits(s.lt(s.load(biases[v].bias), s.splat(S::Elem::min_value())));
                seen = s.mask_from_bits(visible[v] & !hidden);
            }
            let e = if MASKED { s.select(seen, p[v], s.zero()) } else { p[v] };
            let mut d_p = s.load(a.d.add(at[v]));
            p[v] = e;
            if WITH == ANY && !a.z.is_null() {
                let z = s.load(a.z.add(at[v]));
                (d_p, p[v]) = (s.mul(z, d_p), s.mul(z, e));
            }
            let mut d_x = s.mul(e, s.sub(d_p, delta[v]));
            if MASKED {
                d_x = s.select(seen, d_x, s.zero());
            }
            if WITH == ANY && !a.d_scores.is_null() {
                s.store(a.d_scores.add(at[v]), d_x);
            }
            if WITH == BIASED || WITH == ANY && !biases[v].sums.is_null() {
                s.store(biases[v].sums, s.add(s.load(biases[v].sums), d_x));
            }
            if WITH == ANY && a.softcap.is_some() {
                d_x = s.mul(d_x, s.load(a.slope.add(at[v])));
                if MASKED {
                    // The slope of a hidden pair is what its product was, NaN included.
                    d_x = s.select(seen, d_x, s.zero());
                }
            }
            d[v] = s.select(s.lt(s.abs(d_x), smallest), s.zero(), d_x);
        }
        [p, d]
    }
}

/// A group of rows on its way back through a tile.
#[derive(Debug)]
pub(crate) struct BackGroup<'a, T> {
    /// At most [`MAX_ROWS`].
    pub(crate) rows: usize,
    /// `[rows][64]`: products of queries and keys; then probabilities after dropout.
    pub(crate) p: &'a mut [T],
    /// `[rows][64]`: products of the context's gradient and the values; then the gradients of the products in `p`, but
    /// for the scale.
    pub(crate) d: &'a mut [T],
    /// `[rows]`
    pub(crate) lse: &'a [T],
    /// `[rows]`
    pub(crate) delta: &'a [T],
}

/// Working memory of `[6][64]` each; those that a call does not need may be empty.
#[derive(Debug)]
pub(crate) struct BackRoom<'a, T> {
    /// For a soft cap.
    pub(crate) slope: &'a mut [T],
    /// For dropout.
    pub(crate) z: &'a mut [T],
    /// If they are not empty, the gradients of the scores come out here.
    pub(crate) d_scores: &'a mut [T],
}

impl<T: Real> Kernels<T> {
    /// Products to probabilities and gradients, for the keys of the panels. Returns what each row sees of them.
    pub(crate) fn back(
        &self,
        group: &mut BackGroup<'_, T>,
        panels: Range<usize>,
        scoring: &Scoring<'_, T>,
        room: &mut BackRoom<'_, T>,
    ) -> Visible {
        let rows = group.rows.min(MAX_ROWS);
        let end = panels.end.min(KEYS / PANEL) * PANEL;
        let first = (panels.start * PANEL).min(end);
        let mut visible = [key_bits(first, end); MAX_ROWS];
        if let Some(bits) = scoring.visible {
            visible.iter_mut().zip(&bits[..rows]).for_each(|(visible, bits)| *visible &= bits);
        }
        let all_visible = scoring.visible.is_none();
        if let Some(dropped) = &scoring.dropout {
            self.dropout(dropped, room.z, Into::Store);
        }
        let len = rows * KEYS;
        let (p, d) = (&mut group.p[..len], &mut group.d[..len]);
        let (lse, delta) = (&group.lse[..rows], &group.delta[..rows]);
        let bias = scoring.bias_pointers(rows, end);
        let z = scoring.dropout.as_ref().map(|_| &room.z[..len]);
        let slope = scoring.softcap.map(|_| &mut room.slope[..len]);
        let d_scores = (!room.d_scores.is_empty()).then(|| &mut room.d_scores[..len]);
        // SAFETY: the slices above have the shapes that the kernel asks for, `first..end` is a range of whole panels
        // within 64, and there is a slope if there is a soft cap.
        unsafe {
            (self.back)(&Back {
                rows,
                first,
                end,
                p: p.as_mut_ptr(),
                d: d.as_mut_ptr(),
                lse: lse.as_ptr(),
                delta: delta.as_ptr(),
                visible: visible.as_mut_ptr(),
                all_visible,
                bias,
                softcap: scoring.softcap,
                factor: scoring.factor,
                slope: slope.map_or(ptr::null_mut(), <[T]>::as_mut_ptr),
                z: z.map_or(ptr::null(), <[T]>::as_ptr),
                d_scores: d_scores.map_or(ptr::null_mut(), <[T]>::as_mut_ptr),
            });
        }
        visible
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::dropout::{Dropped, Drops, RowKey};
    use crate::kernels::step::rows_of_tile;
    use crate::kernels::testing::{Numbers, at_every_level, nans, real, wide};

    /// What a call of the kernel is given beyond the products.
    struct Case<T> {
        panels: Range<usize>,
        visible: Option<[u64; MAX_ROWS]>,
        bias: Option<Vec<T>>,
        softcap: Option<T>,
        drops: Option<Drops<T>>,
    }

    impl<T: Real> Case<T> {
        fn plain() -> Self {
            Self { panels: 0..KEYS / PANEL, visible: None, bias: None, softcap: None, drops: None }
        }

        fn sees(&self, row: usize, key: usize) -> bool {
            self.panels.contains(&(key / PANEL))
                && self.visible.is_none_or(|visible| visible[row] >> key & 1 == 1)
                && self.bias.as_ref().is_none_or(|bias| bias[row * KEYS + key] != T::neg_infinity())
        }

        /// Runs the kernel on random products and compares with the formulas in `f64`. What is hidden is NaN at first.
        fn check(&self, kernels: &Kernels<T>, rows: usize) {
            let mut numbers = Numbers::new(rows as u64 + 17);
            let factor = real::<T>(-0.7);
            let mut fill = |size: f64| -> Vec<T> {
                let mut x = numbers.vec::<T>(rows * KEYS);
                x.iter_mut().for_each(|x| *x = *x * real(size));
                (0..x.len()).filter(|&at| !self.sees(at / KEYS, at % KEYS)).for_each(|at| x[at] = T::nan());
                x
            };
            let (products, d_products) = (fill(5.0), fill(2.0));
            let (lse, delta) = (numbers.vec::<T>(rows), numbers.vec::<T>(rows));
            let row_keys: Vec<RowKey> = (0..rows).map(|_| RowKey::new(numbers.word())).collect();
            let (mut p, mut d) = (products.clone(), d_products.clone());
            let tile = || nans::<T>(MAX_ROWS * KEYS);
            let (mut slope, mut z, mut d_scores) = (tile(), tile(), tile());
            let mut room = BackRoom { slope: &mut slope, z: &mut z, d_scores: &mut d_scores };
            let scoring = Scoring {
                visible: self.visible.as_ref().map(|visible| &visible[..]),
                bias: self.bias.as_deref().map(rows_of_tile),
                softcap: self.softcap,
                factor,
                dropout: self.drops.map(|drops| Dropped { keys: &row_keys, first: 128, drops }),
            };
            let mut group = BackGroup { rows, p: &mut p, d: &mut d, lse: &lse, delta: &delta };
            let seen = kernels.back(&mut group, self.panels.clone(), &scoring, &mut room);

            for at in 0..rows * KEYS {
                let (row, key) = (at / KEYS, at % KEYS);
                assert_eq!(seen[row] >> key & 1 == 1, self.sees(row, key), "row {row}, key {key}");
                if !self.sees(row, key) {
                    assert_eq!((p[at], d[at]), (T::zero(), T::zero()), "row {row}, key {key} is hidden");
                    continue;
                }
                let (mut score, mut slope) = (wide(products[at]) * wide(factor), 1.0);
                if let Some(cap) = self.softcap.map(wide) {
                    let bounded = (score / cap).tanh();
                    (score, slope) = (cap * bounded, 1.0 - bounded * bounded);
                }
                score += self.bias.as_ref().map_or(0.0, |bias| wide(bias[at]));
                let kept = self.drops.map_or(1.0, |drops| match row_keys[row].word(128 + key) <= drops.last {
                    true => 0.0,
                    false => wide(drops.factor),
                });
                let weight = (score - wide(lse[row])).exp();
                let d_score = weight * (kept * wide(d_products[at]) - wide(delta[row]));
                let size = weight * (kept * wide(d_products[at]).abs() + wide(delta[row]).abs());
                for (name, got, want, size) in [
                    ("p", p[at], kept * weight, kept * weight),
                    ("d", d[at], d_score * slope, size),
                    ("d_scores", d_scores[at], d_score, size),
                ] {
                    let error = (wide(got) - want).abs();
                    let bound = 40.0 * wide(T::epsilon()) * size;
                    assert!(error <= bound, "{name}, row {row}, key {key}: {got:?}, not {want}");
                }
            }
        }
    }

    #[test]
    fn gradients_are_those_of_the_formula() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let mut numbers = Numbers::new(4);
            let visible = || Some([0x5555_3333_0F0F_00FF, u64::MAX, 0, 1, 1 << 63, 0xFFFF_0000]);
            let mut biased = || {
                let mut bias = numbers.vec::<T>(MAX_ROWS * KEYS);
                bias.iter_mut().step_by(7).for_each(|bias| *bias = T::neg_infinity());
                Some(bias)
            };
            let drops = Some(Drops { last: u32::MAX / 3, factor: real(1.5) });
            let softcap = Some(real(2.5));
            let cases: [Case<T>; 9] = [
                Case::plain(),
                Case { panels: 1..3, ..Case::plain() },
                Case { panels: 2..2, ..Case::plain() },
                Case { visible: visible(), ..Case::plain() },
                Case { visible: visible(), panels: 0..2, ..Case::plain() },
                Case { bias: biased(), ..Case::plain() },
                Case { softcap, drops, ..Case::plain() },
                Case { drops, visible: visible(), ..Case::plain() },
                Case { panels: 1..4, visible: visible(), bias: biased(), softcap, drops },
            ];
            for case in &cases {
                for rows in [0, 1, 5, MAX_ROWS] {
                    case.check(kernels, rows);
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn gradients_are_normal_numbers_or_zero() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            // Probabilities from the smallest normal number on, and gradients of an eighth of them.
            let smallest = T::min_positive_value();
            let lse: Vec<T> = (0..6).map(|row| -smallest.ln() - real(f64::from(row))).collect();
            let (mut p, mut d) = (vec![T::zero(); 6 * KEYS], vec![real::<T>(0.125); 6 * KEYS]);
            let mut group = BackGroup { rows: 6, p: &mut p, d: &mut d, lse: &lse, delta: &[T::zero(); 6] };
            let scoring = Scoring { visible: None, bias: None, softcap: None, factor: T::one(), dropout: None };
            let mut room = BackRoom { slope: &mut [], z: &mut [], d_scores: &mut [] };
            kernels.back(&mut group, 0..4, &scoring, &mut room);
            assert!(p.iter().chain(&d).all(|&x| x == T::zero() || x >= smallest));
            assert!(p[KEYS] > T::zero() && d[KEYS] == T::zero() && d[5 * KEYS] > T::zero());
        }
        at_every_level!(check);
    }

    #[test]
    fn a_visible_nan_comes_out() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            // Product, gradient of the probability, lse, delta: one of them is NaN.
            for bad in 0..4 {
                let number = |index: usize| if index == bad { T::nan() } else { T::one() };
                let (mut p, mut d) = (vec![number(0); KEYS], vec![number(1); KEYS]);
                let (lse, delta) = ([number(2)], [number(3)]);
                let mut group = BackGroup { rows: 1, p: &mut p, d: &mut d, lse: &lse, delta: &delta };
                let (visible, factor) = ([1 << 9], T::one());
                let scoring = Scoring { visible: Some(&visible), bias: None, softcap: None, factor, dropout: None };
                let mut room = BackRoom { slope: &mut [], z: &mut [], d_scores: &mut [] };
                kernels.back(&mut group, 0..4, &scoring, &mut room);
                for key in 0..KEYS {
                    assert_eq!(d[key].is_nan(), key == 9, "number {bad}, key {key}");
                    assert_eq!(p[key].is_nan(), key == 9 && bad % 2 == 0, "number {bad}, key {key}");
                }
            }
        }
        at_every_level!(check);
    }
}
