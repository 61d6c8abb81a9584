//! Are products of many rows what plain loops give, whatever their shape, layout and cut, and whatever numbers they have?

use super::super::gemm::{Factor, Linear};
use super::*;
use crate::kernels::testing::{Numbers, at_every_level, real, wide};
use ndarray::{Array1, Array2};

/// The product, by blocks of so many rows and columns, onto `before` if there is something.
fn in_blocks<T: Real>(
    kernels: &Kernels<T>,
    linear: &Linear<'_, T>,
    [high, broad]: [usize; 2],
    before: Option<&Array2<T>>,
) -> Array2<T> {
    let (rows, columns) = (linear.x.nrows(), linear.w.dim().1);
    let mut out = before.cloned().unwrap_or_else(|| Array2::from_elem((rows, columns), T::nan()));
    let linear = Linear { start: if before.is_some() { Start::Add } else { Start::Zero }, ..*linear };
    let scratch = &mut Vec::new();
    for rows in chunks(0..rows, high) {
        for columns in chunks(0..columns, broad) {
            let part = out.slice_mut(s![rows.clone(), columns.clone()]);
            kernels.linear_block(&linear, rows.clone(), columns, part, scratch);
        }
    }
    out
}

fn plain<'a, T: Real>(x: ArrayView2<'a, T>, w: ArrayView2<'a, T>) -> Linear<'a, T> {
    Linear { x, w: Factor::Plain(w), bias: None, start: Start::Zero }
}

fn bits<T: Real>(x: &Array2<T>) -> Vec<Option<u64>> {
    x.iter().map(|&x| (!wide(x).is_nan()).then(|| wide(x).to_bits())).collect()
}

/// Against plain loops in f64, which are finite or not in the same places.
fn verify<T: Real>(linear: &Linear<'_, T>, w: ArrayView2<'_, T>, before: Option<&Array2<T>>, got: &Array2<T>) {
    for ((i, j), &y) in got.indexed_iter() {
        let first = before.map_or(0.0, |before| wide(before[[i, j]])) + linear.bias.map_or(0.0, |bias| wide(bias[j]));
        let terms = || linear.x.row(i).into_iter().zip(w.column(j)).map(|(&x, &w)| wide(x) * wide(w));
        let (sum, size) = (first + terms().sum::<f64>(), first.abs() + terms().map(f64::abs).sum::<f64>());
        if sum.is_finite() && size < wide(T::max_value()) {
            let bound = wide(T::epsilon()) * (w.nrows() as f64 + 1.0) * size + wide(T::min_positive_value());
            assert!(
                (wide(y) - sum).abs() <= bound,
                "{:?} x {:?} at {i}, {j}: {y:?} for {sum}",
                linear.x.dim(),
                w.dim()
            );
        } else {
            assert!(!y.is_finite() && (!sum.is_nan() || y.is_nan()), "at {i}, {j}: {y:?} for {sum}");
        }
    }
}

#[test]
fn every_shape_and_layout_of_many_rows() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        for rows in [56, 65, 81, ROWS + 33] {
            for (depth, columns) in [(16, 16), (31, 130), (33, 17), (SPLIT_TERMS, 33), (SPLIT_TERMS + 1, 50)] {
                let mut numbers = Numbers::new((rows + 100 * depth + 10_000 * columns) as u64);
                let (x, w) = (numbers.matrix::<T>(rows, depth), numbers.matrix(depth, columns));
                let turned = [x.t().as_standard_layout().into_owned(), w.t().as_standard_layout().into_owned()];
                let backwards = [x.slice(s![..;-1, ..;-1]).to_owned(), w.slice(s![..;-1, ..;-1]).to_owned()];
                let bias = Array1::from(numbers.vec(columns));
                let layouts = |at: usize| [[&x, &w][at].view(), turned[at].t(), backwards[at].slice(s![..;-1, ..;-1])];
                let linear = Linear { bias: Some(bias.view()), ..plain(x.view(), w.view()) };
                let whole = in_blocks(kernels, &linear, [rows, columns], None);
                verify(&linear, w.view(), None, &whole);
                for (x, w) in layouts(0).into_iter().flat_map(|x| layouts(1).map(|w| (x, w))) {
                    let linear = Linear { bias: Some(bias.view()), ..plain(x, w) };
                    assert_eq!(in_blocks(kernels, &linear, [rows, columns], None), whole, "{x:?} {w:?}");
                }
                let mut out = Array2::from_elem((2 * columns, 2 * rows), real::<T>(7.0));
                let part = out.slice_mut(s![..;-2, ..;-2]).reversed_axes();
                kernels.linear_block(&linear, 0..rows, 0..columns, part, &mut Vec::new());
                assert_eq!(out.slice(s![..;-2, ..;-2]).t(), whole);
                assert!(out.slice(s![..;2, ..]).iter().all(|&x| x == real(7.0)));
            }
        }
    }
    at_every_level!(check);
}

#[test]
fn columns_more_than_a_strip() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let mut numbers = Numbers::new(2);
        let (x, w) = (numbers.matrix::<T>(ROWS + 60, 40), numbers.matrix(40, STRIP + 40));
        let linear = plain(x.view(), w.view());
        let whole = in_blocks(kernels, &linear, [ROWS + 60, STRIP + 40], None);
        verify(&linear, w.view(), None, &whole);
        for cut in [[ROWS, STRIP + 40], [60, 48], [ROWS + 60, STRIP]] {
            assert_eq!(in_blocks(kernels, &linear, cut, None), whole);
        }
    }
    at_every_level!(check);
}

/// Numbers among which some rows and columns have such that no matrix unit takes.
fn odd_numbers<T: Real>(seed: u64, rows: usize, columns: usize, along_rows: bool) -> Array2<T> {
    let mut x = Numbers::new(seed).matrix::<T>(rows, columns);
    let (huge, tiny) = (real::<T>(1e25), real::<T>(1e-25));
    let odd = [T::nan(), T::infinity(), T::neg_infinity(), huge, T::zero(), tiny];
    for (index, odd) in odd.into_iter().enumerate() {
        let place = (3 + 11 * index, 7 + 83 * index);
        let (line, at) = if along_rows { place } else { (place.0 + 2, place.1) };
        let mut line = if along_rows { x.row_mut(line) } else { x.column_mut(line) };
        let len = line.len();
        if odd == tiny || odd.is_zero() {
            line.mapv_inplace(|x| x * odd);
        } else {
            line[at % len] = odd;
        }
    }
    x
}

#[test]
fn numbers_that_a_unit_does_not_take_stay_in_their_rows_and_columns_whatever_the_cut() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let (rows, depth, columns) = (90, SPLIT_TERMS + 50, 120);
        let x = odd_numbers::<T>(3, rows, depth, true);
        let w = odd_numbers::<T>(4, depth, columns, false);
        let usual = [Numbers::new(5).matrix::<T>(rows, depth), Numbers::new(6).matrix(rows, columns)];
        let usual_w = Numbers::new(7).matrix::<T>(depth, columns);
        let prepacked = Prepacked::several(&[w.view(), usual_w.view()]).expect("small matrices");
        for (x, w, packed) in [
            (&x, &w, &prepacked[0]),
            (&x, &usual_w, &prepacked[1]),
            (&usual[0], &w, &prepacked[0]),
            (&usual[0], &usual_w, &prepacked[1]),
        ] {
            for before in [None, Some(&usual[1])] {
                let linear = plain(x.view(), w.view());
                let whole = in_blocks(kernels, &linear, [rows, columns], before);
                verify(&linear, w.view(), before, &whole);
                for cut in [[1, columns], [7, 48], [33, 16], [rows, 96]] {
                    assert_eq!(bits(&in_blocks(kernels, &linear, cut, before)), bits(&whole), "{cut:?}");
                    let linear = Linear { w: Factor::Prepacked(packed), ..linear };
                    assert_eq!(bits(&in_blocks(kernels, &linear, cut, before)), bits(&whole), "packed, {cut:?}");
                }
            }
        }
    }
    at_every_level!(check);
}

#[test]
fn weights_packed_for_many_rows_give_the_same_bits() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        for (depth, columns) in [(16, 16), (17, 33), (300, 40), (SPLIT_TERMS, 16), (2 * SPLIT_TERMS + 20, 70)] {
            let mut numbers = Numbers::new((depth + 1000 * columns) as u64);
            let (x, w) = (numbers.matrix::<T>(ROWS + 40, depth), numbers.matrix::<T>(depth, columns));
            let turned = w.t().as_standard_layout().into_owned();
            let packed = Prepacked::several(&[w.view(), turned.t()]).expect("small matrices");
            for rows in [56, 70, ROWS + 40] {
                let linear = plain(x.slice(s![..rows, ..]), w.view());
                let whole = in_blocks(kernels, &linear, [rows, columns], None);
                for packed in &packed {
                    let linear = Linear { w: Factor::Prepacked(packed), ..linear };
                    assert_eq!(in_blocks(kernels, &linear, [rows, columns], None), whole);
                    assert_eq!(in_blocks(kernels, &linear, [32, 32], None), whole);
                }
            }
        }
    }
    at_every_level!(check);
}

#[test]
fn runs_cover_all_rows() {
    for fits in [0, 1, u32::MAX, 0x8000_0000, 0x7fff_ffff, 0xf00f_1234] {
        for rows in [1, 5, 31, 32] {
            let mut next = 0;
            for (run, fit) in runs(fits, rows) {
                assert_eq!(run.start, next);
                assert!(run.clone().all(|row| (fits >> row & 1 == 1) == fit) && !run.is_empty());
                next = run.end;
            }
            assert_eq!(next, rows);
        }
    }
}

#[test]
fn small_numbers_are_as_exact() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let mut numbers = Numbers::new(8);
        let (x, w) = (numbers.matrix::<T>(60, 70), numbers.matrix::<T>(70, 20));
        for size in [1e-10, 1e-14, 1e-16, 2e-18, 1e17] {
            let [x, w] = [&x, &w].map(|x| x.mapv(|x| x * real(size)));
            let linear = plain(x.view(), w.view());
            verify(&linear, w.view(), None, &in_blocks(kernels, &linear, [60, 20], None));
        }
    }
    at_every_level!(check);
}
