//! Weights in the order in which products read them, for whoever multiplies with the same ones again and again.
//!
//! ```text
//! [in, out] -> [⌈in/d⌉][⌈out/16⌉][d][16]     to[c][p][t][j] = w[d c + t][16 p + j]
//! ```
//!
//! with the depth `d` of the CPU's best level, 128 or 256, and zeros where there is no source; of the last rows there are as
//! many as are left, rounded up to 16. A product walks this from end to end and can ask memory for what comes next, while rows
//! of a matrix are pages apart and have to be copied first unless there are few. Every element has the bits that a `w` stored
//! row by row gives: the sums run in the same order.
//!
//! Where the CPU has a matrix unit, `f32` are kept split for it too (`matrix.rs`), in one and a half times the memory that
//! they take themselves; few rows, and numbers that the unit does not take, need the packed ones.
//!
//! One layer of d_model 1024, time with this against the time without (Zen 3, medians of interleaved rounds, one and two
//! threads; up to 16 tokens 0.7 to 0.8 where the system has no huge pages, see `slab.rs`):
//!
//! | tokens | 1 | 4 | 16 | 64 | 512 (d_model 512) |
//! | --- | --- | --- | --- | --- | --- |
//! | one thread | 0.57 | 0.46 | 0.60 | 0.85 | 0.98 |
//! | two threads | 0.63 | 0.49 | 0.78 | 1.00 | 0.95 |

use super::gemm::{Panels, chunks, is_unit};
use super::gemm_matrix::SPLIT_TERMS;
use super::matrix::{Extent, Matrix, SplitPanel, split_panel_len};
use super::real::Real;
use super::slab::Lot;
use super::table::Kernels;
use super::tile::{MAX_ROWS, Start};
use super::{Level, PANEL};
use ndarray::{ArrayView2, ArrayViewMut2, s};
use std::fmt;
use std::ops::Range;

/// Columns that all rows of `x` meet before the next: their panels and the next ones fit into the second-level cache.
const STRIP: usize = 256;

/// The same for a single group of rows, which meets them once.
const ONE_GROUP_STRIP: usize = 512;

/// A matrix of weights, packed for every product to come.
pub(crate) struct Prepacked<T> {
    /// `[in, out]`
    dim: (usize, usize),
    /// Terms of the sum that follow each other in a panel.
    depth: usize,
    numbers: Lot<T>,
    /// The same as a matrix unit takes it, where there is one: panels of [`SPLIT_TERMS`] terms. One that it may not multiply
    /// with begins with NaN, which no other does.
    split: Lot<T>,
}

impl<T: Real> Prepacked<T> {
    /// Packs matrices of any strides.
    ///
    /// # Errors
    /// The index of the first matrix that there is no memory for.
    pub(crate) fn several(matrices: &[ArrayView2<'_, T>]) -> Result<Vec<Self>, usize> {
        // What `usize` cannot count is more than there is memory for.
        let len = |w: &ArrayView2<'_, T>| match w.dim() {
            // It may have any number of rows.
            (_, 0) => 0,
            (terms, columns) => padded(terms).saturating_mul(padded(columns)),
        };
        let split_len = |w: &ArrayView2<'_, T>| match w.dim() {
            (terms, columns) if T::kernels(Level::available()[0]).matrix.is_some() => {
                split_panel_len(terms).saturating_mul(columns.div_ceil(PANEL))
            }
            _ => 0,
        };
        let count = matrices.len();
        let lens =
            (0..2 * count).map(|at| if at < count { len(&matrices[at]) } else { split_len(&matrices[at - count]) });
        let mut lots = Lot::of_lens(lens).map_err(|at| at % count.max(1))?;
        let split = lots.split_off(count);
        Ok(matrices
            .iter()
            .zip(lots)
            .zip(split)
            .map(|((w, numbers), split)| Self::packed(w.view(), numbers, split))
            .collect())
    }

    fn packed(w: ArrayView2<'_, T>, mut numbers: Lot<T>, split: Lot<T>) -> Self {
        let dim = w.dim();
        let kernels = T::kernels(Level::best());
        let depth = kernels.depth;
        if numbers.is_empty() {
            return Self { dim, depth, numbers, split };
        }
        let mut left = &mut numbers[..];
        for terms in chunks(0..dim.0, depth) {
            let (rows, w) = (padded(terms.len()), w.slice(s![terms, ..]));
            let chunk;
            (chunk, left) = left.split_at_mut(rows * padded(dim.1));
            if w.nrows() == rows && !is_unit(&w, 1) {
                kernels.pack_panels(w.reversed_axes(), chunk);
            } else {
                kernels.pack_columns(w, rows * PANEL, chunk);
            }
        }
        let mut packed = Self { dim, depth, numbers, split };
        if let Some(matrix) = &T::kernels(Level::available()[0]).matrix {
            packed.split_all(matrix);
        }
        packed
    }

    /// Splits what has been packed.
    fn split_all(&mut self, matrix: &Matrix<T>) {
        let mut at = 0;
        for terms in chunks(0..self.dim.0, SPLIT_TERMS) {
            for column in (0..self.dim.1).step_by(PANEL) {
                let to = &mut self.split[at..][..split_panel_len(terms.len())];
                at += to.len();
                let (mut extent, mut end) = (Extent::NOTHING, 0);
                // The parts that it was packed in are whole steps, but for the last.
                for terms in chunks(terms.clone(), self.depth) {
                    let Panels { data: from, k: from_row, .. } = panels(&self.numbers, self.dim, &terms, column);
                    let part = &mut to[end..][..split_panel_len(terms.len())];
                    end += part.len();
                    let (terms, to) = (terms.len(), part.as_mut_ptr());
                    // SAFETY: a packed panel has the terms and 16 columns; there is room for a split one.
                    let part =
                        unsafe { (matrix.split_panel)(&SplitPanel { terms, columns: PANEL, from, from_row, to }) };
                    extent = extent.and(part);
                }
                if !extent.fits() {
                    to[0] = T::nan();
                }
            }
        }
    }

    /// `[in, out]`
    pub(crate) fn dim(&self) -> (usize, usize) {
        self.dim
    }

    /// The panel of some terms from a column on that begins one, split for a matrix unit, and whether that may multiply with
    /// it. The terms are those that [`SPLIT_TERMS`] cuts.
    pub(super) fn split_panel(&self, terms: &Range<usize>, column: usize) -> (*const T, bool) {
        let len = split_panel_len(terms.len());
        let before = split_panel_len(terms.start) * self.dim.1.div_ceil(PANEL);
        let panel = &self.split[before + column / PANEL * len..][..len];
        (panel.as_ptr(), !panel[0].is_nan())
    }

    /// The panels of a chunk of the terms, from a column on that begins one.
    pub(super) fn panels(&self, terms: &Range<usize>, column: usize) -> Panels<T> {
        panels(&self.numbers, self.dim, terms, column)
    }
}

/// Those of a packed matrix of such a shape.
fn panels<T>(numbers: &[T], dim: (usize, usize), terms: &Range<usize>, column: usize) -> Panels<T> {
    let rows = padded(terms.len());
    let at = terms.start * padded(dim.1) + column * rows;
    Panels { data: numbers[at..].as_ptr(), panel: rows * PANEL, k: PANEL }
}

/// What so many terms or columns are filled up to with zeros; `usize::MAX` for more than it can count.
fn padded(n: usize) -> usize {
    n.div_ceil(PANEL).saturating_mul(PANEL)
}

impl<T> fmt::Debug for Prepacked<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepacked").field("dim", &self.dim).finish_non_exhaustive()
    }
}

impl<T: Real> Kernels<T> {
    /// `out (+)= x w[:, columns]`, for an output whose rows are contiguous. The columns begin with a panel. All but what a
    /// matrix unit computes.
    pub(super) fn prepacked_tiles(
        &self,
        x: ArrayView2<'_, T>,
        w: &Prepacked<T>,
        columns: Range<usize>,
        mut out: ArrayViewMut2<'_, T>,
        mut start: Start,
        copy: &mut [T],
    ) {
        assert!(columns.start.is_multiple_of(PANEL) && columns.end <= w.dim.1, "columns that are whole panels");
        assert_eq!((x.ncols(), out.dim()), (w.dim.0, (x.nrows(), columns.len())), "shapes of a block");
        if w.dim.0 == 0 && start == Start::Zero {
            out.fill(T::zero());
        }
        let width = if x.nrows() <= MAX_ROWS { ONE_GROUP_STRIP } else { STRIP };
        for terms in chunks(0..w.dim.0, w.depth) {
            let mut x = self.broadcast_operand(x.slice(s![.., terms.clone()]), columns.len(), copy);
            let then = terms.end..w.dim.0.min(terms.end + w.depth);
            for strip in chunks(columns.clone(), width) {
                let b = w.panels(&terms, strip.start);
                let next = if strip.end < columns.end {
                    Some(w.panels(&terms, strip.end))
                } else if then.is_empty() {
                    None
                } else {
                    Some(w.panels(&then, columns.start))
                };
                let out = out.slice_mut(s![.., strip.start - columns.start..strip.end - columns.start]);
                // SAFETY: `x` has strides from 0 on (`broadcast_operand`), the panels hold the terms and the columns.
                unsafe { self.product(&mut x, b, w.depth, next, out, start) };
            }
            start = Start::Add;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::gemm::{Factor, Linear};
    use crate::kernels::testing::{Numbers, at_every_level};
    use ndarray::{Array1, Array2};

    fn prepacked<T: Real>(w: ArrayView2<'_, T>) -> Prepacked<T> {
        Prepacked::several(&[w]).ok().and_then(|mut packed| packed.pop()).expect("a small matrix")
    }

    /// Some columns of `x w + bias`, or of that and what `out` held.
    fn run<T: Real>(
        kernels: &Kernels<T>,
        linear: &Linear<'_, T>,
        columns: Range<usize>,
        mut out: ArrayViewMut2<'_, T>,
    ) -> Array2<T> {
        let part = out.slice_mut(s![.., columns.clone()]);
        kernels.linear_block(linear, 0..linear.x.nrows(), columns, part, &mut Vec::new());
        out.to_owned()
    }

    #[test]
    fn products_have_the_bits_that_they_have_without() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for (depth, columns) in [
                (0, 5),
                (1, 1),
                (3, 0),
                (16, 16),
                (127, 17),
                (128, 15),
                (129, STRIP + 1),
                (300, ONE_GROUP_STRIP + 40),
                (256, 2 * STRIP),
            ] {
                let mut numbers = Numbers::new((100 * depth + 10_000 * columns) as u64);
                let many = numbers.matrix::<T>(40, depth);
                let before = numbers.matrix::<T>(40, columns);
                let bias = Array1::from(numbers.vec(columns));
                let w = numbers.matrix::<T>(depth, columns);
                // The same matrix with other strides.
                let turned = w.t().as_standard_layout().into_owned().reversed_axes();
                let backwards = w.slice(s![..;-1, ..;-1]).to_owned();
                let layouts = [w.view(), turned.view(), backwards.slice(s![..;-1, ..;-1])];
                for (start, bias) in [(Start::Zero, None), (Start::Zero, Some(bias.view())), (Start::Add, None)] {
                    let out = |rows: usize| match start {
                        Start::Zero => Array2::from_elem((rows, columns), T::nan()),
                        Start::Add => before.slice(s![..rows, ..]).to_owned(),
                    };
                    let plain = Linear { x: many.view(), w: w.view().into(), bias, start };
                    let expected = run(kernels, &plain, 0..columns, out(40).view_mut());
                    for (layout, w) in layouts.into_iter().enumerate() {
                        let packed = prepacked(w);
                        for rows in [0, 1, 2, 6, 7, 13, 40] {
                            let x = many.slice(s![..rows, ..]);
                            let linear = Linear { x, w: Factor::Prepacked(&packed), ..plain };
                            let expected = expected.slice(s![..rows, ..]);
                            let name = format!("{rows} x {depth} x {columns} layout {layout} {start:?}");
                            assert_eq!(run(kernels, &linear, 0..columns, out(rows).view_mut()), expected, "{name}");
                            // In two parts, into columns.
                            let middle = columns / 2 / PANEL * PANEL;
                            let mut out = out(rows).reversed_axes().as_standard_layout().into_owned().reversed_axes();
                            run(kernels, &linear, 0..middle, out.view_mut());
                            let parts = run(kernels, &linear, middle..columns, out.view_mut());
                            assert_eq!(parts, expected, "{name} in parts");
                        }
                    }
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn single_rows_and_columns_have_the_bits_that_they_have_without() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for (depth, columns) in [(1, 1), (1, 20), (50, 1), (300, 1)] {
                let mut numbers = Numbers::new((depth + 1000 * columns) as u64);
                let (x, w) = (numbers.matrix::<T>(5, depth), numbers.matrix::<T>(depth, columns));
                let bias = Array1::from(numbers.vec(columns));
                let packed = prepacked(w.view());
                for rows in [1, 2, 5] {
                    let x = x.slice(s![..rows, ..]);
                    let plain = Linear { x, w: w.view().into(), bias: Some(bias.view()), start: Start::Zero };
                    let prepacked = Linear { w: Factor::Prepacked(&packed), ..plain };
                    let [got, want] = [prepacked, plain].map(|linear| {
                        run(kernels, &linear, 0..columns, Array2::from_elem((rows, columns), T::nan()).view_mut())
                    });
                    assert_eq!(got, want, "{rows} x {depth} x {columns}");
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn panels_begin_at_a_line() {
        let w = Numbers::new(1).matrix::<f32>(40, 40);
        let packed = prepacked(w.view());
        assert!(packed.panels(&(0..40), 16).data.addr().is_multiple_of(64));
        assert_eq!(format!("{packed:?}"), "Prepacked { dim: (40, 40), .. }");
    }

    #[test]
    fn matrices_without_numbers_take_no_memory() {
        let [w, empty] = [ArrayView2::<f32>::from_shape((usize::MAX / 8, 0), &[]), ArrayView2::from_shape((0, 7), &[])]
            .map(|w| w.unwrap());
        let packed = Prepacked::several(&[w, empty, w]).unwrap();
        assert!(packed.iter().all(|packed| packed.numbers.is_empty()));
        assert_eq!(packed.iter().map(|packed| packed.dim()).collect::<Vec<_>>(), [w.dim(), (0, 7), w.dim()]);
    }

    #[test]
    fn the_first_that_there_is_no_memory_for_is_named() {
        let w = Array2::<f32>::zeros((1, 1));
        let large = w.broadcast((1 << 40, 1 << 20)).unwrap();
        assert_eq!(Prepacked::several(&[w.view(), large, w.view()]).err(), Some(1));
    }
}
