//! One group of queries meets one tile of keys.
//!
//! ```text
//! p = q k^T        [rows][64]     rows <= 6 queries
//! p, m, l = softmax step          see `softmax.rs`
//! o += p v         [rows][width]
//! ```
//!
//! After the last tile, `o / Σ l` is the context and `ln 2 · (m + log2 Σ l)` the log-sum-exp of a row.
//! The scheme is FlashAttention's (Dao et al., 2022) with tiles for registers and the first-level cache.

use super::dropout::{Dropped, Into};
use super::real::Real;
use super::softmax::{Softmax, key_bits};
use super::table::Kernels;
use super::tile::{MAX_ROWS, Start, Tile};
use super::values::Values;
use super::{KEYS, PANEL};
use std::ops::Range;
use std::ptr;

/// The queries of a group and what is known about their rows so far.
#[derive(Debug)]
pub(crate) struct Group<'a, T> {
    /// At most [`MAX_ROWS`].
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    /// `[rows][q_row]`, of which `head_dim` elements are used.
    pub(crate) q: &'a [T],
    pub(crate) q_row: usize,
    /// Reference of each row in binary units; -inf until it has seen a key.
    pub(crate) m: &'a mut [T],
    /// `[rows][16]` partial sums; zero at first.
    pub(crate) l: &'a mut [T],
    /// `[rows][o_row]`, of which the width of the values is used; zero at first.
    pub(crate) o: &'a mut [T],
    pub(crate) o_row: usize,
    /// `[rows][64]` scores and probabilities of the tile: scratch. What it holds at first does not matter.
    pub(crate) p: &'a mut [T],
}

/// Some queries.
#[derive(Debug)]
pub(crate) struct Queries<'a, T> {
    /// At most [`MAX_ROWS`].
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    /// `[rows][q_row]`, of which `head_dim` elements are used.
    pub(crate) q: &'a [T],
    pub(crate) q_row: usize,
}

/// A packed tile of at most 64 keys.
#[derive(Clone, Debug)]
pub(crate) struct KeyTile<'a, T> {
    /// `[panels][head_dim][16]`.
    pub(crate) keys: &'a [T],
    /// `[16 panels][width]`.
    pub(crate) values: &'a [T],
    /// Columns of `values`: the value width, rounded up to a multiple of 16.
    pub(crate) width: usize,
    pub(crate) finite: Finite,
    /// The panels of 16 keys that the group may see. Others are not touched.
    pub(crate) panels: Range<usize>,
}

/// Whether a tile of values holds a NaN or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finite {
    /// Every value is finite, so `0 · v = 0`.
    All,
    /// Some value is not: keys that a row does not see are left out of its sum.
    NotAll,
}

/// What happens between scores and probabilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scoring<'a, T> {
    /// Per row, bit j set if key j of the tile may be seen; without it, all keys of the panels may.
    pub(crate) visible: Option<&'a [u64]>,
    /// `[rows][64]`, in natural units.
    pub(crate) bias: Option<&'a [T]>,
    /// In natural units; finite and positive.
    pub(crate) softcap: Option<T>,
    /// `|scale| · log2(e)`: products of queries and keys to scores in binary units. Applied to the product and not to the
    /// queries, whose roundings would add up.
    pub(crate) factor: T,
    /// Of each row, after the softmax.
    pub(crate) dropout: Option<Dropped<'a, T>>,
}

impl<T> KeyTile<'_, T> {
    /// The keys of the panels: a range within 0..64.
    fn range(&self) -> Range<usize> {
        columns(&self.panels)
    }

    /// The width, which is a multiple of 16 whatever the caller wrote.
    fn padded_width(&self) -> usize {
        self.width / PANEL * PANEL
    }
}

/// Per row of a group, the keys of the tile that it sees.
pub(crate) type Visible = [u64; MAX_ROWS];

impl<T: Real> Kernels<T> {
    /// Scores, softmax, dropout and values of one group against one tile.
    ///
    /// Keys that do not exist (the tile's last panel may be padded) must be hidden by `visible`.
    #[cfg(test)]
    pub(crate) fn attend(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>, scoring: &Scoring<'_, T>) {
        self.scores(group, tile);
        self.weigh(group, tile, scoring);
    }

    /// Softmax, dropout and values, from the scores that `p` holds.
    pub(crate) fn weigh(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>, scoring: &Scoring<'_, T>) {
        let visible = self.softmax(group, tile, scoring);
        if let Some(dropped) = &scoring.dropout {
            self.dropout(dropped, group.p, Into::Multiply);
        }
        self.values(group, tile, visible.as_ref());
    }

    /// `p = q k^T` for the keys of the panels.
    pub(crate) fn scores(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>) {
        let Group { rows, head_dim, q, q_row, .. } = *group;
        self.products(&Queries { rows, head_dim, q, q_row }, tile.keys, tile.panels.clone(), group.p);
    }

    /// `p = q k^T` for some panels of `keys: [panels][head_dim][16]`; `p: [rows][64]`, whose other columns stay.
    pub(crate) fn products(&self, queries: &Queries<'_, T>, keys: &[T], panels: Range<usize>, p: &mut [T]) {
        let Queries { rows, head_dim, q, q_row } = *queries;
        let (rows, columns) = (rows.min(MAX_ROWS), columns(&panels));
        if rows == 0 {
            return;
        }
        let panel = head_dim.saturating_mul(PANEL);
        let q = &q[..extent(rows, q_row, head_dim)];
        let k = &keys[..(columns.end / PANEL).saturating_mul(panel)];
        let p = &mut p[..rows * KEYS];
        // SAFETY: rows is in 1..=6. The slices above hold every row of `q`, every panel up to `columns.end` and every row
        // of `p`; `columns` is a range of whole panels within the 64 columns of `p`.
        unsafe {
            (self.tile)(&Tile {
                rows,
                n: columns.len(),
                k: head_dim,
                a: q.as_ptr(),
                a_row: q_row,
                a_k: 1,
                b: k.as_ptr().wrapping_add(columns.start / PANEL * panel),
                b_panel: panel,
                b_k: PANEL,
                c: p.as_mut_ptr().add(columns.start),
                c_row: KEYS,
                start: Start::Zero,
            });
        }
    }

    /// Scores to probabilities. Returns what each row sees, unless that is all of the panels.
    pub(crate) fn softmax(
        &self,
        group: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        scoring: &Scoring<'_, T>,
    ) -> Option<Visible> {
        let (rows, keys) = (group.rows.min(MAX_ROWS), tile.range());
        let mut visible = [u64::MAX; MAX_ROWS];
        if let Some(bits) = scoring.visible {
            visible[..rows].copy_from_slice(&bits[..rows]);
        }
        let p = &mut group.p[..rows * KEYS];
        let m = &mut group.m[..rows];
        let l = &mut group.l[..rows * PANEL];
        let o = &mut group.o[..extent(rows, group.o_row, tile.padded_width())];
        let bias = scoring.bias.map(|bias| &bias[..rows * KEYS]);
        // SAFETY: the slices above have the shapes that the kernel asks for, `keys` is a range of whole panels within
        // 64.
        unsafe {
            (self.softmax)(&Softmax {
                rows,
                first: keys.start,
                end: keys.end,
                p: p.as_mut_ptr(),
                m: m.as_mut_ptr(),
                l: l.as_mut_ptr(),
                o: o.as_mut_ptr(),
                o_row: group.o_row,
                width: tile.padded_width(),
                visible: visible.as_mut_ptr(),
                all_visible: scoring.visible.is_none(),
                bias: bias.map_or(ptr::null(), <[T]>::as_ptr),
                softcap: scoring.softcap,
                factor: scoring.factor,
            });
        }
        (scoring.visible.is_some() || scoring.bias.is_some()).then_some(visible)
    }

    /// `o += p v` over the keys of the panels; `visible` is what [`Kernels::softmax`] returned.
    pub(crate) fn values(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>, visible: Option<&Visible>) {
        let (rows, keys, width) = (group.rows.min(MAX_ROWS), tile.range(), tile.padded_width());
        if rows == 0 {
            return;
        }
        let p = &group.p[..rows * KEYS];
        let v = &tile.values[..keys.end.saturating_mul(width)];
        let o = &mut group.o[..extent(rows, group.o_row, width)];
        match visible {
            Some(visible) if tile.finite == Finite::NotAll => {
                let seen = visible.map(|bits| bits & key_bits(keys.start, keys.end));
                // SAFETY: the slices above hold every row of `p` and `o` and the values up to `keys.end`, where the
                // bits of `seen` end.
                unsafe {
                    (self.values)(&Values {
                        rows,
                        p: p.as_ptr(),
                        visible: seen.as_ptr(),
                        v: v.as_ptr(),
                        v_row: width,
                        o: o.as_mut_ptr(),
                        o_row: group.o_row,
                        width,
                    });
                }
            }
            // SAFETY: rows is in 1..=6, `width` is a multiple of 16, and the slices above hold every row of `p` and `o`
            // and the values up to `keys.end`.
            _ => unsafe {
                (self.tile)(&Tile {
                    rows,
                    n: width,
                    k: keys.len(),
                    a: p.as_ptr().add(keys.start),
                    a_row: KEYS,
                    a_k: 1,
                    b: v.as_ptr().add(keys.start * width),
                    b_panel: PANEL,
                    b_k: width,
                    c: o.as_mut_ptr(),
                    c_row: group.o_row,
                    start: Start::Add,
                });
            },
        }
    }
}

/// The columns of panels of a tile: a range within 0..64.
fn columns(panels: &Range<usize>) -> Range<usize> {
    let end = panels.end.min(KEYS / PANEL) * PANEL;
    (panels.start.min(KEYS / PANEL) * PANEL).min(end)..end
}

/// Elements of `rows` rows that begin `row` apart and use `width` elements each; more than any slice has on overflow.
fn extent(rows: usize, row: usize, width: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1).saturating_mul(row).saturating_add(width) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Numbers, at_every_level, nans, real, wide};
    use ndarray::{Array2, Array3, s};

    /// One group against several tiles, with every number that takes part.
    struct Case<T> {
        q: Array2<T>,
        k: Array2<T>,
        v: Array2<T>,
        /// `[rows, keys]`; a pair counts if it is kept and its bias is not -inf.
        keep: Array2<bool>,
        bias: Option<Array2<T>>,
        softcap: Option<T>,
    }

    /// What one group gives: normalised context `[rows, value_dim]`, reference and sum of each row.
    struct Output<T> {
        context: Array2<f64>,
        m: Vec<T>,
        l: Vec<f64>,
    }

    impl<T: Real> Case<T> {
        fn new(rows: usize, keys: usize, head_dim: usize, value_dim: usize) -> Self {
            let mut numbers = Numbers::new((rows + 10 * keys + 1000 * head_dim + value_dim) as u64);
            let scale: T = real(6.0 / (head_dim.max(1) as f64).sqrt());
            Self {
                q: numbers.matrix::<T>(rows, head_dim).mapv(|x| x * scale),
                k: numbers.matrix(keys, head_dim),
                v: numbers.matrix(keys, value_dim),
                keep: Array2::from_elem((rows, keys), true),
                bias: None,
                softcap: None,
            }
        }

        fn keep(mut self, rule: impl Fn(usize, usize) -> bool) -> Self {
            self.keep = Array2::from_shape_fn(self.keep.dim(), |(i, j)| rule(i, j));
            self
        }

        fn bias(mut self, rule: impl Fn(usize, usize) -> f64) -> Self {
            self.bias = Some(Array2::from_shape_fn(self.keep.dim(), |(i, j)| real(rule(i, j))));
            self
        }

        fn sees(&self, i: usize, j: usize) -> bool {
            self.keep[(i, j)] && self.bias.as_ref().is_none_or(|bias| bias[(i, j)] != T::neg_infinity())
        }

        /// Runs the tiles of 64 keys through the kernels. Everything that is output starts as NaN where that is legal.
        fn run(&self, kernels: &Kernels<T>, skip: bool) -> Output<T> {
            let ((rows, head_dim), (keys, value_dim)) = (self.q.dim(), self.v.dim());
            let width = value_dim.next_multiple_of(PANEL);
            let mut q = nans(rows * head_dim);
            kernels.pack_scaled(self.q.view(), T::LOG2_E, &mut q);
            let (mut m, mut l) = (vec![T::neg_infinity(); rows], vec![T::zero(); rows * PANEL]);
            let mut o = vec![T::zero(); rows * width];
            for first in (0..keys).step_by(KEYS) {
                let count = KEYS.min(keys - first);
                let range = s![first..first + count, ..];
                let mut packed_keys = nans(count.next_multiple_of(PANEL) * head_dim);
                kernels.pack_panels(self.k.slice(range), &mut packed_keys);
                let mut packed_values = nans(count.next_multiple_of(PANEL) * width);
                let all = kernels.pack_rows(self.v.slice(range), &mut packed_values);

                let mut bits = vec![0_u64; rows];
                let mut bias = nans(rows * KEYS);
                for i in 0..rows {
                    for j in 0..count {
                        bits[i] |= u64::from(self.keep[(i, first + j)]) << j;
                        if let Some(from) = &self.bias {
                            bias[i * KEYS + j] = from[(i, first + j)];
                        }
                    }
                }
                let any = bits.iter().fold(0, |any, word| any | word);
                let mut panels = 0..count.div_ceil(PANEL);
                if skip && any != 0 {
                    panels =
                        any.trailing_zeros() as usize / PANEL..(KEYS - any.leading_zeros() as usize).div_ceil(PANEL);
                }
                let plain = bits.iter().all(|&word| word == u64::MAX);
                let mut group = Group {
                    rows,
                    head_dim,
                    q: &q,
                    q_row: head_dim,
                    m: &mut m,
                    l: &mut l,
                    o: &mut o,
                    o_row: width,
                    p: &mut nans(rows * KEYS),
                };
                let tile = KeyTile {
                    keys: &packed_keys,
                    values: &packed_values,
                    width,
                    finite: if all { Finite::All } else { Finite::NotAll },
                    panels,
                };
                let scoring = Scoring {
                    visible: (!plain).then_some(&bits[..]),
                    bias: self.bias.is_some().then_some(&bias[..]),
                    softcap: self.softcap,
                    factor: T::one(),
                    dropout: None,
                };
                kernels.attend(&mut group, &tile, &scoring);
            }
            let l: Vec<f64> = l.chunks(PANEL).map(|row| row.iter().map(|&x| wide(x)).sum()).collect();
            let context = Array2::from_shape_fn((rows, value_dim), |(i, j)| wide(o[i * width + j]) / l[i]);
            Output { context, m, l }
        }

        /// Scores in natural units, in f64.
        fn score(&self, i: usize, j: usize) -> f64 {
            let mut score = self.q.row(i).iter().zip(self.k.row(j)).map(|(&q, &k)| wide(q) * wide(k)).sum::<f64>();
            if let Some(cap) = self.softcap {
                score = wide(cap) * (score / wide(cap)).tanh();
            }
            score + self.bias.as_ref().map_or(0.0, |bias| wide(bias[(i, j)]))
        }

        /// The textbook formula over the keys that a row sees; NaN in a row that sees none.
        fn expected(&self) -> Output<f64> {
            let ((rows, _), (keys, value_dim)) = (self.q.dim(), self.v.dim());
            let mut expected = Output { context: Array2::zeros((rows, value_dim)), m: vec![], l: vec![] };
            for i in 0..rows {
                let seen: Vec<usize> = (0..keys).filter(|&j| self.sees(i, j)).collect();
                let top = seen.iter().map(|&j| self.score(i, j)).fold(f64::NEG_INFINITY, f64::max);
                let p: Vec<f64> = seen.iter().map(|&j| (self.score(i, j) - top).exp()).collect();
                let sum = p.iter().sum::<f64>();
                for c in 0..value_dim {
                    let total = seen.iter().zip(&p).map(|(&j, p)| p * wide(self.v[(j, c)])).sum::<f64>();
                    expected.context[(i, c)] = total / sum;
                }
                expected.m.push(top);
                expected.l.push(sum);
            }
            expected
        }

        /// Runs the kernels with and without skipped panels and compares with the formula; NaN matches NaN.
        fn verify(&self, kernels: &Kernels<T>) {
            let expected = self.expected();
            let (rows, keys) = self.keep.dim();
            for skip in [false, true] {
                let got = self.run(kernels, skip);
                for ((i, c), &x) in got.context.indexed_iter() {
                    let y = expected.context[(i, c)];
                    let close = (x - y).abs() < 60.0 * wide(T::epsilon()) || x.is_nan() && y.is_nan();
                    assert!(close, "{rows} x {keys}, skip {skip}, row {i}, column {c}: {x}, expected {y}");
                }
                for i in 0..rows {
                    if (0..keys).all(|j| !self.sees(i, j)) {
                        assert_eq!((got.m[i], got.l[i]), (T::neg_infinity(), 0.0), "row {i} sees nothing");
                    }
                }
            }
        }
    }

    #[test]
    fn every_head_size_and_count_of_keys() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for head_dim in [1, 3, 64, 80, 96, 128, 256] {
                for keys in [1, 16, 63, 64, 65, 200] {
                    Case::<T>::new(MAX_ROWS, keys, head_dim, head_dim).verify(kernels);
                }
            }
            for rows in 1..=MAX_ROWS {
                Case::<T>::new(rows, 130, 16, 40).verify(kernels);
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn masks_of_every_kind() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let case = || Case::<T>::new(MAX_ROWS, 200, 32, 48);
            case().keep(|i, j| j <= 70 + 20 * i).verify(kernels);
            case().keep(|i, j| j >= 60 + 20 * i && j < 90 + 20 * i).verify(kernels);
            case().keep(|i, j| (i * 7 + j * 3) % 5 == 0).verify(kernels);
            // Nothing in the first tiles; nothing at all in row 2; one key only in row 3.
            case().keep(|i, j| j >= 128 && i != 2 && (i != 3 || j == 150)).verify(kernels);
            case().keep(|_, _| false).verify(kernels);
        }
        at_every_level!(check);
    }

    #[test]
    fn biases_and_caps() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let infinity = f64::INFINITY;
            let case = || Case::<T>::new(MAX_ROWS, 150, 32, 16);
            case().bias(|i, j| (i + 1) as f64 * -0.1 * j as f64).verify(kernels);
            case().bias(|i, j| if (i + j) % 3 == 0 { -infinity } else { 0.5 }).verify(kernels);
            case().bias(|i, j| if i == 1 || j < 64 { -infinity } else { 0.0 }).keep(|i, j| j < 140 - i).verify(kernels);
            case().bias(|_, j| 40.0 * (j as f64 / 20.0).sin()).verify(kernels);
            Case { softcap: Some(real(2.0)), ..case() }.verify(kernels);
            Case { softcap: Some(real(5.0)), ..case().bias(|i, j| (i as f64 - j as f64) / 9.0) }.verify(kernels);
            Case { softcap: Some(real(1.0)), ..case().keep(|i, j| (i + j) % 2 == 0) }.verify(kernels);
        }
        at_every_level!(check);
    }

    #[test]
    fn the_lowest_finite_bias_is_arithmetic() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let lowest = wide(T::min_value());
            // All keys of row 0 have it: they are visible, and so alike that each weighs the same.
            let mut case = Case::<T>::new(2, 70, 8, 16).bias(|i, j| if i == 0 || j == 3 { lowest } else { 0.0 });
            case.v.fill(T::one());
            let got = case.run(kernels, false);
            assert!(got.context.iter().all(|&x| (x - 1.0).abs() < 1e-5), "{:?}", got.context);
            assert!(got.m.iter().all(|m| m.is_finite()));
            assert_eq!(got.l[0], 70.0);
        }
        at_every_level!(check);
    }

    #[test]
    fn a_single_key_returns_its_value_bit_for_bit() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let case = Case::<T>::new(MAX_ROWS, 130, 24, 32).keep(|i, j| j == 20 * i + 3);
            let got = case.run(kernels, true);
            for ((i, c), &x) in got.context.indexed_iter() {
                assert_eq!(x, wide(case.v[(20 * i + 3, c)]));
            }
            assert!(got.l.iter().all(|&l| l == 1.0));
        }
        at_every_level!(check);
    }

    #[test]
    fn growing_scores_move_the_reference() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let mut case = Case::<T>::new(MAX_ROWS, 320, 8, 16);
            for (j, mut row) in case.k.rows_mut().into_iter().enumerate() {
                row.fill(real(j as f64 * 0.02));
            }
            for (i, mut row) in case.q.rows_mut().into_iter().enumerate() {
                row.fill(real(if i % 2 == 0 { 1.0 } else { -1.0 }));
            }
            case.verify(kernels);
        }
        at_every_level!(check);
    }

    #[test]
    fn what_is_masked_has_no_influence_whatever_it_is() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for bad in [T::nan(), T::infinity(), T::neg_infinity()] {
                // Key 70 and value 70 are seen by no row, value 75 and key 76 by row 4 only.
                let keep = |i: usize, j: usize| j != 70 && (i == 4 || j != 75 && j != 76) && (i + j) % 4 != 1;
                let clean = Case::<T>::new(MAX_ROWS, 140, 16, 32).keep(keep);
                let mut dirty = Case::<T>::new(MAX_ROWS, 140, 16, 32).keep(keep);
                dirty.k.row_mut(70).fill(bad);
                dirty.v.row_mut(70).fill(bad);
                dirty.v[(75, 9)] = bad;
                for skip in [false, true] {
                    let (clean, got) = (clean.run(kernels, skip), dirty.run(kernels, skip));
                    for ((i, c), &x) in got.context.indexed_iter() {
                        let seen = i == 4 && c == 9;
                        let same = x.to_bits() == clean.context[(i, c)].to_bits();
                        assert!(if seen { !x.is_finite() } else { same }, "row {i}, column {c}: {x}");
                    }
                }
                dirty.k.row_mut(76).fill(T::nan());
                let got = dirty.run(kernels, false);
                for ((i, c), x) in got.context.indexed_iter() {
                    assert_eq!(x.is_nan(), i == 4, "row {i}, column {c}: {x}");
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn a_bias_of_minus_infinity_hides_nan() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let mut case =
                Case::<T>::new(3, 64, 16, 16).bias(|i, j| if i < 2 && j == 9 { f64::NEG_INFINITY } else { 0.1 });
            case.k.row_mut(9).fill(T::nan());
            case.v.row_mut(9).fill(T::infinity());
            let got = case.run(kernels, false);
            for ((i, _), x) in got.context.indexed_iter() {
                assert_eq!(x.is_nan(), i == 2);
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn infinite_scores() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            // Row 0 has only scores of -inf but sees its keys; row 1 has a score of +inf; row 2 one of -inf.
            let mut case = Case::<T>::new(3, 80, 1, 16);
            case.q.assign(&ndarray::arr2(&[[-T::one()], [T::one()], [T::one()]]));
            case.k.fill(T::infinity());
            case.keep = Array2::from_shape_fn((3, 80), |(i, _)| i < 2);
            let got = case.run(kernels, false);
            assert_eq!((got.m[0], got.l[0]), (T::min_value(), 0.0));
            assert!(got.l[1].is_nan());
            assert_eq!((got.m[2], got.l[2]), (T::neg_infinity(), 0.0));
        }
        at_every_level!(check);
    }

    #[test]
    fn only_the_panels_asked_for_are_touched() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let (rows, head_dim) = (2, 4);
            let mut numbers = Numbers::new(5);
            let (q, keys) = (numbers.vec::<T>(rows * head_dim), numbers.vec::<T>(KEYS * head_dim));
            let mut p = Array3::from_elem((rows, KEYS / PANEL, PANEL), T::nan());
            let mut group = Group {
                rows,
                head_dim,
                q: &q,
                q_row: head_dim,
                m: &mut vec![T::neg_infinity(); rows],
                l: &mut vec![T::zero(); rows * PANEL],
                o: &mut vec![T::zero(); rows * PANEL],
                o_row: PANEL,
                p: p.as_slice_mut().unwrap(),
            };
            let values = &numbers.vec(KEYS * PANEL);
            let tile = KeyTile { keys: &keys, values, width: PANEL, finite: Finite::All, panels: 1..3 };
            let factor = T::one();
            let scoring = Scoring { visible: None, bias: None, softcap: None, factor, dropout: None };
            kernels.attend(&mut group, &tile, &scoring);
            for ((_, panel, _), x) in p.indexed_iter() {
                assert_eq!(x.is_nan(), !(1..3).contains(&panel));
            }
        }
        at_every_level!(check);
    }
}
