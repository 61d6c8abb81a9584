//! One group against several tiles, beside the textbook formula in f64.

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
        kernels.pack_scaled(self.q.view(), T::one(), &mut q);
        let (mut m, mut l) = (vec![T::neg_infinity(); rows], vec![T::zero(); rows * PANEL]);
        let mut o = vec![T::zero(); rows * width];
        for first in (0..keys).step_by(KEYS) {
            let count = KEYS.min(keys - first);
            let range = s![first..first + count, ..];
            let mut packed_keys = nans(count.next_multiple_of(PANEL) * head_dim);
            kernels.pack_panels(self.k.slice(range), &mut packed_keys);
            let mut packed_values = nans(KEYS * width);
            let all = kernels.pack_values(self.v.slice(range), &mut packed_values);

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
                panels = any.trailing_zeros() as usize / PANEL..(KEYS - any.leading_zeros() as usize).div_ceil(PANEL);
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
                split: None,
                weights: &mut [],
            };
            let tile = KeyTile {
                keys: Operand::Own(&packed_keys),
                values: Operand::Own(&packed_values),
                split: None,
                width,
                finite: if all { Finite::All } else { Finite::NotAll },
                panels,
                output: None,
                next: None,
                group: 0,
                groups: 1,
            };
            let scoring = Scoring {
                visible: (!plain).then_some(&bits[..]),
                bias: self.bias.is_some().then(|| rows_of_tile(&bias)),
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

    /// Scores, in f64.
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
fn scores_whose_powers_overflow_move_the_reference() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        for far in [90.0, 130.0, 700.0, 1025.0, 1e5, 1e30] {
            // A key of the first tile, or of the second, whose row has a reference by then; before and behind others.
            for top in [0, 1, 15, 16, 31, 32, 40, 63, 64, 80, 100, 127, 129] {
                let mut case = Case::<T>::new(2, 130, 1, 16);
                case.q.fill(T::one());
                case.k[(top, 0)] = real(far);
                let got = case.run(kernels, false);
                for ((_, c), &x) in got.context.indexed_iter() {
                    let (want, near) = (wide(case.v[(top, c)]), 1e-35_f64.max((4.0 - far).exp() * 130.0));
                    assert!((x - want).abs() <= near, "score {far} of key {top}: {x} for {want}");
                }
                assert_eq!(got.m, [real::<T>(far); 2], "score {far} of key {top}");
            }
        }
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
        let mut case = Case::<T>::new(3, 64, 16, 16).bias(|i, j| if i < 2 && j == 9 { f64::NEG_INFINITY } else { 0.1 });
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
            split: None,
            weights: &mut [],
        };
        let values = &numbers.vec(KEYS * PANEL);
        let tile = KeyTile {
            keys: Operand::Own(&keys),
            values: Operand::Own(values),
            split: None,
            width: PANEL,
            next: None,
            output: None,
            group: 0,
            groups: 1,
            finite: Finite::All,
            panels: 1..3,
        };
        let factor = T::one();
        let scoring = Scoring { visible: None, bias: None, softcap: None, factor, dropout: None };
        kernels.attend(&mut group, &tile, &scoring);
        let sums_are_finite = group.l.iter().all(|l| l.is_finite());
        assert!(sums_are_finite, "the sums hold what is not asked for");
        for ((_, panel, _), x) in p.indexed_iter() {
            assert_eq!(x.is_nan(), !(1..3).contains(&panel));
        }
    }
    at_every_level!(check);
}
