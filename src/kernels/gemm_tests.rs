//! Are blocks of projections what plain loops give, whatever their shape, layout and cut?

use super::*;
use crate::kernels::Level;
use crate::kernels::testing::{Numbers, at_every_level, real, wide};
use ndarray::{Array1, Array2, array};

/// One product against plain loops in f64.
fn verify<T: Real>(kernels: &Kernels<T>, x: ArrayView2<'_, T>, w: ArrayView2<'_, T>, bias: Option<&Array1<T>>) {
    let (rows, columns) = (x.nrows(), w.ncols());
    let mut out = Array2::from_elem((rows, columns), T::nan());
    let linear = Linear { x, w: w.into(), bias: bias.map(|bias| bias.view()), start: Start::Zero };
    kernels.linear_block(&linear, 0..rows, 0..columns, out.view_mut(), &mut Vec::new());
    for ((i, j), &y) in out.indexed_iter() {
        let first = bias.map_or(0.0, |bias| wide(bias[j]));
        let terms = || x.row(i).into_iter().zip(w.column(j)).map(|(&x, &w)| wide(x) * wide(w));
        let (sum, size) = (first + terms().sum::<f64>(), first.abs() + terms().map(f64::abs).sum::<f64>());
        let bound = wide(T::epsilon()) * (x.ncols() as f64 + 1.0) * size;
        assert!((wide(y) - sum).abs() <= bound, "{:?} x {:?} at {i}, {j}: {y:?} for {sum}", x.dim(), w.dim());
    }
}

/// The product, by blocks of so many rows and columns.
fn in_blocks<T: Real>(kernels: &Kernels<T>, linear: &Linear<'_, T>, [high, broad]: [usize; 2]) -> Array2<T> {
    let (whole, scratch) = ((linear.x.nrows(), linear.w.dim().1), &mut Vec::new());
    let mut out = Array2::from_elem(whole, T::nan());
    for rows in chunks(0..whole.0, high) {
        for columns in chunks(0..whole.1, broad) {
            let part = out.slice_mut(s![rows.clone(), columns.clone()]);
            kernels.linear_block(linear, rows.clone(), columns, part, scratch);
        }
    }
    out
}

#[test]
fn every_shape_and_layout() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        for rows in [0, 1, 2, 6, 7, 12, 13, 40] {
            for depth in [0, 1, 3, 64, 128, 129, 300] {
                for columns in [0, 1, 15, 16, 17, 64, 80, 130] {
                    let mut numbers = Numbers::new((rows + 100 * depth + 10_000 * columns) as u64);
                    let (x, w) = (numbers.matrix(rows, depth), numbers.matrix(depth, columns));
                    let (x_t, w_t) = (numbers.matrix(depth, rows), numbers.matrix(columns, depth));
                    let bias = Array1::from(numbers.vec(columns));
                    verify::<T>(kernels, x.view(), w.view(), None);
                    verify(kernels, x.view(), w_t.t(), Some(&bias));
                    verify(kernels, x_t.t(), w.view(), Some(&bias));
                    verify(kernels, x.slice(s![..;-1, ..;-1]), w.slice(s![..;-1, ..;-1]), None);
                    verify(
                        kernels,
                        x.slice(s![..;2, ..;2]),
                        w.slice(s![..;2, ..;2]),
                        Some(&bias.slice(s![..;2]).to_owned()),
                    );
                }
            }
        }
    }
    at_every_level!(check);
}

#[test]
fn rows_that_are_pages_apart() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let (depth, columns) = (DEPTH + 2, NARROW + 1);
        let mut numbers = Numbers::new(8);
        let (wide, w) = (numbers.matrix::<T>(14, PAGE), numbers.matrix(depth, columns));
        for rows in [4, 5, 13, 14] {
            verify(kernels, wide.slice(s![..rows, 3..3 + depth]), w.view(), None);
        }
    }
    at_every_level!(check);
}

#[test]
fn blocks_wider_than_a_strip() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let (depth, columns) = (DEPTH + 2, 2 * STRIP + 20);
        let mut numbers = Numbers::new(6);
        let (w, w_t) = (numbers.matrix(depth, columns), numbers.matrix(columns, depth));
        for rows in [2, 7] {
            let x = numbers.matrix::<T>(rows, depth);
            verify(kernels, x.view(), w.view(), None);
            verify(kernels, x.view(), w.slice(s![..;-1, ..]), None);
            verify(kernels, x.view(), w_t.slice(s![..;-1, ..]).reversed_axes(), None);
        }
    }
    at_every_level!(check);
}

#[test]
fn blocks_of_any_cut_have_the_same_bits() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let mut numbers = Numbers::new(3);
        let (x, w) = (numbers.matrix::<T>(50, 150), numbers.matrix(150, 200));
        let bias = Array1::from(numbers.vec(200));
        let linear = Linear { x: x.view(), w: w.view().into(), bias: Some(bias.view()), start: Start::Zero };
        let whole = in_blocks(kernels, &linear, [50, 200]);
        for size in [[1, 200], [7, 64], [13, 100], [50, 33], [6, 1]] {
            assert_eq!(whole, in_blocks(kernels, &linear, size));
        }
    }
    at_every_level!(check);
}

#[test]
fn the_cut_does_not_choose_how_sums_are_formed_whatever_the_layout() {
    // Parts of one column have no layout of their own.
    fn check<T: Real>(kernels: &Kernels<T>) {
        let mut numbers = Numbers::new(9);
        let (x, w, turned) = (numbers.matrix::<T>(24, 200), numbers.matrix(200, 33), numbers.matrix(33, 200));
        let layouts = [
            w.view(),
            w.slice(s![..;-1, ..]),
            w.slice(s![.., ..;-1]),
            turned.t(),
            turned.slice(s![..;-1, ..]).reversed_axes(),
            turned.slice(s![.., ..;-1]).reversed_axes(),
        ];
        let bias = Array1::from(numbers.vec(33));
        for (layout, w) in layouts.into_iter().enumerate() {
            for rows in [1, 2, 5, 24] {
                let x = x.slice(s![..rows, ..]);
                let linear = Linear { x, w: w.into(), bias: Some(bias.view()), start: Start::Zero };
                let whole = in_blocks(kernels, &linear, [rows, 33]);
                for broad in [1, 16, 32] {
                    assert_eq!(
                        in_blocks(kernels, &linear, [rows, broad]),
                        whole,
                        "layout {layout}, {rows} rows, {broad} columns"
                    );
                }
            }
        }
    }
    at_every_level!(check);
}

#[test]
fn few_rows_have_the_bits_that_they_have_among_many_whatever_the_cut() {
    // The number of threads chooses the columns of a block here.
    fn check<T: Real>(kernels: &Kernels<T>) {
        let mut numbers = Numbers::new(8);
        let (x, w) = (numbers.matrix::<T>(50, 300), numbers.matrix(300, 200));
        let run = |rows: usize, broad: usize| {
            let linear = Linear { x: x.slice(s![..rows, ..]), w: w.view().into(), bias: None, start: Start::Zero };
            in_blocks(kernels, &linear, [rows, broad])
        };
        let many = run(50, 200);
        for (rows, broad) in [(1, 200), (1, 112), (2, 64), (3, 200), (3, 33), (4, 48)] {
            assert_eq!(run(rows, broad), many.slice(s![..rows, ..]), "{rows} rows, {broad} columns");
        }
    }
    at_every_level!(check);
}

#[test]
fn sums_that_go_on_have_the_bits_of_one_sum() {
    // Both forms, many and few rows, outputs that are copied and such that are not: the terms in two parts.
    fn check<T: Real>(kernels: &Kernels<T>) {
        for (rows, split) in [(50, 1), (50, 130), (3, 70), (1, 0)] {
            let mut numbers = Numbers::new(5);
            let (x, w) = (numbers.matrix::<T>(rows, 200), numbers.matrix::<T>(200, 90));
            let bias = Array1::from(numbers.vec(90));
            let scratch = &mut Vec::new();
            let mut run = |terms: Range<usize>, start, bias, out: ArrayViewMut2<'_, T>| {
                let (x, w) = (x.slice(s![.., terms.clone()]), w.slice(s![terms, ..]));
                kernels.linear_block(&Linear { x, w: w.into(), bias, start }, 0..rows, 0..90, out, scratch);
            };
            let mut whole = Array2::from_elem((rows, 90), T::nan());
            run(0..200, Start::Zero, Some(bias.view()), whole.view_mut());
            let mut straight = Array2::from_elem((rows, 90), T::nan());
            let mut turned = Array2::from_elem((90, rows), T::nan());
            for out in [straight.view_mut(), turned.view_mut().reversed_axes()] {
                let mut out = out;
                run(0..split, Start::Zero, Some(bias.view()), out.view_mut());
                run(split..200, Start::Add, None, out.view_mut());
                assert_eq!(out, whole, "{rows} rows, {split} terms first");
            }
            straight.fill(T::zero());
            run(0..0, Start::Add, Some(bias.view()), straight.view_mut());
            run(0..200, Start::Add, None, straight.view_mut());
            assert_eq!(straight, whole, "{rows} rows, onto zeros");
        }
    }
    at_every_level!(check);
}

#[test]
fn outputs_with_any_strides() {
    fn check<T: Real>(kernels: &Kernels<T>) {
        let mut numbers = Numbers::new(4);
        let (x, w) = (numbers.matrix::<T>(20, 10), numbers.matrix(10, 30));
        let linear = Linear { x: x.view(), w: w.view().into(), bias: None, start: Start::Zero };
        let mut expected = Array2::zeros((20, 30));
        let scratch = &mut Vec::new();
        kernels.linear_block(&linear, 0..20, 0..30, expected.view_mut(), scratch);
        let mut out = Array2::from_elem((40, 60), real::<T>(7.0));
        kernels.linear_block(&linear, 0..20, 0..30, out.slice_mut(s![..;-2, ..;-2]), scratch);
        assert_eq!(out.slice(s![..;-2, ..;-2]), expected);
        assert!(out.slice(s![..;2, ..]).iter().all(|&x| x == real(7.0)));
        let mut out = Array2::zeros((30, 20));
        kernels.linear_block(&linear, 0..20, 0..30, out.view_mut().reversed_axes(), scratch);
        assert_eq!(out.t(), expected);
    }
    at_every_level!(check);
}

#[test]
fn a_row_broadcast_over_all_rows() {
    for &level in Level::available() {
        let (row, w) = (array![[1.0, 2.0]], array![[1.0, 10.0, 100.0], [3.0, 30.0, 300.0]]);
        let mut out = Array2::zeros((5, 3));
        if let Some(x) = row.broadcast((5, 2)) {
            let linear = Linear { x, w: w.view().into(), bias: None, start: Start::Zero };
            f64::kernels(level).linear_block(&linear, 0..5, 0..3, out.view_mut(), &mut Vec::new());
        }
        assert!(out.rows().into_iter().all(|row| row == array![7.0, 70.0, 700.0]));
    }
}
