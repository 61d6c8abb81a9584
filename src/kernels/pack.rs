//! Copies of strided matrices into the layouts that `tile.rs` reads.
//!
//! ```text
//! panels  [count][d] -> [⌈count/16⌉][d][16]          to[c][t][j] = from[16 c + j][t]    (keys; transposed weights)
//! rows    [count][w] -> [⌈count/16⌉·16][⌈w/16⌉·16]   to[j][t] = from[j][t]              (backward)
//! columns [count][w] -> [⌈w/16⌉][⌈count/16⌉·16][16]  to[c][j][t] = from[j][16 c + t]    (values; weights)
//! scaled  [count][d] -> [count][d]                   to[i][t] = factor · from[i][t]     (queries)
//! ```
//!
//! What has no source is zero. `rows` makes `columns` too, which may begin farther apart than their rows need (what is between
//! stays), and says whether every number is finite, since a tile of values that is not has to be multiplied with care.

use super::PANEL;
use super::simd::{Block, NEXT, Simd, prefetch};
use num_traits::Zero;

/// A strided matrix and where its copy goes. Strides count elements and may be negative.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pack<T> {
    pub(crate) from: *const T,
    pub(crate) row: isize,
    pub(crate) column: isize,
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    pub(crate) to: *mut T,
    /// For `rows`: distance between the rows of a panel of 16 columns, and between the panels.
    pub(crate) to_row: usize,
    pub(crate) to_panel: usize,
}

impl<T> Pack<T> {
    /// Where an element is, if it exists.
    #[inline(always)]
    fn at(&self, row: usize, column: usize) -> *const T {
        self.from.wrapping_offset(row as isize * self.row + column as isize * self.column)
    }
}

/// Rows to the lanes of panels.
///
/// # Safety
/// Every element of the source must be readable; the target needs `⌈rows/16⌉ · columns · 16` writable elements.
#[inline(always)]
pub(crate) unsafe fn panels<S: Simd>(s: S, a: &Pack<S::Elem>) {
    for first in (0..a.rows).step_by(PANEL) {
        let rows = PANEL.min(a.rows - first);
        // SAFETY: panel `first / 16` of the target exists (contract), and rows first..first + rows of the source.
        unsafe {
            let to = a.to.add(first * a.columns);
            let mut column = 0;
            if a.column == 1 {
                while a.columns - column >= S::LANES {
                    for lane in (0..PANEL).step_by(S::LANES) {
                        s.transpose_block(Block {
                            from: a.at(first + lane, column),
                            from_row: a.row,
                            rows: rows.saturating_sub(lane),
                            to: to.add(column * PANEL + lane),
                            to_row: PANEL,
                        });
                    }
                    column += S::LANES;
                }
            }
            for column in column..a.columns {
                for lane in 0..PANEL {
                    let x = if lane < rows { *a.at(first + lane, column) } else { S::Elem::zero() };
                    *to.add(column * PANEL + lane) = x;
                }
            }
        }
    }
}

/// Rows that are read side by side, a panel of each before the next panel. Memory serves them all at a time: read one after
/// the other, rows of 1024 numbers come at half the rate (Zen 3).
const STREAMS: usize = 4;

/// Rows to panels of 16 columns, with zeros up to the next multiple of 16 of both axes; true if every element is finite.
///
/// # Safety
/// Every element of the source must be readable; `⌈rows/16⌉ · 16` rows of `⌈columns/16⌉` panels of the target must be
/// writable.
#[inline(always)]
pub(crate) unsafe fn rows<S: Simd>(s: S, a: &Pack<S::Elem>) -> bool {
    let width = a.columns.next_multiple_of(PANEL);
    let to =
        |row: usize, column: usize| a.to.wrapping_add(column / PANEL * a.to_panel + row * a.to_row + column % PANEL);
    // Zero times a number is zero if the number is finite and NaN if it is not, and NaN stays in the sum. Four sums,
    // because one would make every vector wait for the one before.
    let mut products = [s.zero(); 4];
    for first in (0..a.rows.next_multiple_of(PANEL)).step_by(STREAMS) {
        let whole = if a.column == 1 && first + STREAMS <= a.rows { a.columns / PANEL * PANEL } else { 0 };
        for column in (0..whole).step_by(PANEL) {
            for i in 0..STREAMS {
                // The row that is read here next.
                prefetch::<NEXT>(a.at(first + STREAMS + i, column).cast::<u8>());
                for v in 0..PANEL / S::LANES {
                    // SAFETY: the row is one of the source, and so is the column, as a whole panel is.
                    unsafe {
                        let x = s.load(a.at(first + i, column + v * S::LANES));
                        let sum = (i * (PANEL / S::LANES) + v) % products.len();
                        products[sum] = s.fma(x, s.zero(), products[sum]);
                        s.store(to(first + i, column + v * S::LANES), x);
                    }
                }
            }
        }
        for row in first..first + STREAMS {
            let columns = if row < a.rows { a.columns } else { 0 };
            for column in (whole..width).step_by(S::LANES) {
                let lanes = columns.saturating_sub(column).min(S::LANES);
                // SAFETY: row and column exist in the source as long as column < columns, and in the target as long as
                // column < width (contract); `lanes` ends at the last column of the source.
                unsafe {
                    let x = if a.column == 1 {
                        s.load_partial(a.at(row, column), lanes)
                    } else {
                        for lane in 0..lanes {
                            *to(row, column + lane) = *a.at(row, column + lane);
                        }
                        s.load_partial(to(row, column), lanes)
                    };
                    products[0] = s.fma(x, s.zero(), products[0]);
                    s.store(to(row, column), x);
                }
            }
        }
    }
    let products = s.add(s.add(products[0], products[1]), s.add(products[2], products[3]));
    s.reduce_sum(products) == S::Elem::zero()
}

/// Rows times a factor to contiguous rows.
///
/// # Safety
/// Every element of the source must be readable; the target needs `rows · columns` writable elements.
#[inline(always)]
pub(crate) unsafe fn scaled<S: Simd>(s: S, a: &Pack<S::Elem>, factor: S::Elem) {
    let factors = s.splat(factor);
    for row in 0..a.rows {
        let to = a.to.wrapping_add(row * a.columns);
        let mut column = 0;
        // SAFETY: row < rows and column + lanes <= columns, in the source and in the target (contract).
        unsafe {
            while a.column == 1 && a.columns - column >= S::LANES {
                s.store(to.add(column), s.mul(s.load(a.at(row, column)), factors));
                column += S::LANES;
            }
            for column in column..a.columns {
                *to.add(column) = *a.at(row, column) * factor;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::PANEL;
    use crate::kernels::testing::{Numbers, at_every_level, nans, real};
    use crate::kernels::{Kernels, Real};
    use ndarray::{Array2, ArrayView2, s};

    const ROWS: [usize; 8] = [0, 1, 15, 16, 17, 63, 64, 33];
    const WIDTHS: [usize; 9] = [0, 1, 3, 15, 64, 80, 96, 128, 256];

    /// Calls `check` with a matrix as rows, as columns, and as every second element of both axes backwards.
    fn every_layout<T: Real>(rows: usize, columns: usize, mut check: impl FnMut(ArrayView2<'_, T>)) {
        let mut numbers = Numbers::new((rows * 1000 + columns) as u64);
        check(numbers.matrix(rows, columns).view());
        check(numbers.matrix(columns, rows).t());
        check(numbers.matrix(2 * rows, 2 * columns).slice(s![..;-2, ..;-2]));
        check(numbers.matrix(2 * rows, columns + 5).slice(s![..;-2, 3..columns + 3]));
    }

    #[test]
    fn panels_hold_rows_in_lanes_and_zeros_after_them() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for rows in ROWS {
                for columns in WIDTHS {
                    every_layout::<T>(rows, columns, |from| {
                        let mut to = nans(rows.next_multiple_of(PANEL) * columns);
                        kernels.pack_panels(from, &mut to);
                        for (at, &x) in to.iter().enumerate() {
                            let (panel, column, lane) = (at / (PANEL * columns), at / PANEL % columns, at % PANEL);
                            let expected = from.get((panel * PANEL + lane, column)).copied().unwrap_or(T::zero());
                            assert_eq!(x, expected, "{rows} x {columns} at {panel}, {column}, {lane}");
                        }
                    });
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn rows_are_padded_with_zeros_on_both_axes() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for rows in ROWS {
                for columns in WIDTHS {
                    every_layout::<T>(rows, columns, |from| {
                        let width = columns.next_multiple_of(PANEL);
                        let mut to = nans(rows.next_multiple_of(PANEL) * width);
                        assert!(kernels.pack_rows(from, &mut to), "all is finite");
                        for (at, &x) in to.iter().enumerate() {
                            let expected = from.get((at / width, at % width)).copied().unwrap_or(T::zero());
                            assert_eq!(x, expected, "{rows} x {columns} at {}, {}", at / width, at % width);
                        }
                    });
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn columns_lie_in_panels_with_zeros_after_them() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for rows in ROWS {
                for columns in WIDTHS {
                    for gap in [0, 16, 37] {
                        every_layout::<T>(rows, columns, |from| {
                            let panel = rows.next_multiple_of(PANEL) * PANEL + gap;
                            let mut to = nans(columns.div_ceil(PANEL) * panel);
                            assert!(kernels.pack_columns(from, panel, &mut to), "all is finite");
                            for (at, &x) in to.iter().enumerate() {
                                let (row, column) = (at % panel / PANEL, at / panel * PANEL + at % panel % PANEL);
                                let expected = from.get((row, column)).copied().unwrap_or(T::zero());
                                let between = at % panel >= panel - gap;
                                let right = if between { x.is_nan() } else { x == expected };
                                assert!(right, "{rows} x {columns} + {gap} at {row}, {column}: {x:?}");
                            }
                        });
                    }
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn one_value_that_is_not_finite_is_noticed_wherever_it_is() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let (rows, columns) = (3, 35);
            for bad in [T::nan(), -T::nan(), T::infinity(), T::neg_infinity()] {
                for at in 0..rows * columns {
                    let mut from = Array2::from_elem((rows, columns), T::max_value());
                    from[(at / columns, at % columns)] = bad;
                    let mut to = nans(48 * PANEL);
                    assert!(!kernels.pack_columns(from.view(), PANEL * PANEL, &mut to));
                    assert!(!kernels.pack_columns(from.t(), 48 * PANEL, &mut to));
                    assert!(!kernels.pack_rows(from.view(), &mut to));
                    assert!(!kernels.pack_rows(from.t(), &mut to));
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn scaled_rows_are_contiguous() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let factor: T = real(0.3);
            for rows in ROWS {
                for columns in WIDTHS {
                    every_layout::<T>(rows, columns, |from| {
                        let mut to = nans(rows * columns + 1);
                        kernels.pack_scaled(from, factor, &mut to);
                        assert!(from.iter().zip(&to).all(|(&x, &y)| x * factor == y));
                        assert!(to[rows * columns].is_nan(), "wrote beyond the rows");
                    });
                }
            }
        }
        at_every_level!(check);
    }
}
