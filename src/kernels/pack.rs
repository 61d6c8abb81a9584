//! Copies of strided matrices into the layouts that `tile.rs` reads.
//!
//! ```text
//! panels  [count][d] -> [⌈count/16⌉][d][16]          to[c][t][j] = from[16 c + j][t]    (keys; transposed weights)
//! rows    [count][w] -> [⌈count/16⌉·16][⌈w/16⌉·16]   to[j][t] = from[j][t]              (values; weights)
//! scaled  [count][d] -> [count][d]                   to[i][t] = factor · from[i][t]     (queries)
//! ```
//!
//! What has no source is zero. `rows` also says whether every number is finite, since a tile of values that is not has
//! to be multiplied with care.

use super::PANEL;
use super::simd::{Block, Simd};
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
}

impl<T: Copy> Pack<T> {
    /// # Safety
    /// The element must exist and be readable.
    #[inline(always)]
    unsafe fn read(&self, row: usize, column: usize) -> T {
        // SAFETY: by this function's contract. An index below a dimension times its stride does not overflow.
        unsafe { *self.from.offset(row as isize * self.row + column as isize * self.column) }
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
                            from: a.from.wrapping_offset((first + lane) as isize * a.row + column as isize),
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
                    let x = if lane < rows { a.read(first + lane, column) } else { S::Elem::zero() };
                    *to.add(column * PANEL + lane) = x;
                }
            }
        }
    }
}

/// Rows to rows whose width and count are multiples of 16; true if every element is finite.
///
/// # Safety
/// Every element of the source must be readable; the target needs `⌈rows/16⌉ · 16 · ⌈columns/16⌉ · 16` writable elements.
#[inline(always)]
pub(crate) unsafe fn rows<S: Simd>(s: S, a: &Pack<S::Elem>) -> bool {
    let width = a.columns.next_multiple_of(PANEL);
    // Zero times a number is zero if the number is finite and NaN if it is not, and NaN stays in the sum.
    let mut products = s.zero();
    for row in 0..a.rows.next_multiple_of(PANEL) {
        for column in (0..width).step_by(S::LANES) {
            let lanes = if row < a.rows { a.columns.saturating_sub(column).min(S::LANES) } else { 0 };
            // SAFETY: the target has this row and `width` columns; `lanes` ends at the last column of the source.
            unsafe {
                let to = a.to.add(row * width + column);
                let from = a.from.wrapping_offset(row as isize * a.row + column as isize * a.column);
                let v = if lanes == 0 {
                    s.zero()
                } else if a.column == 1 && lanes == S::LANES {
                    s.load(from)
                } else if a.column == 1 {
                    s.load_partial(from, lanes)
                } else {
                    for lane in 0..lanes {
                        *to.add(lane) = a.read(row, column + lane);
                    }
                    s.load_partial(to, lanes)
                };
                products = s.fma(v, s.zero(), products);
                s.store(to, v);
            }
        }
    }
    s.reduce_sum(products) == S::Elem::zero()
}

/// Rows times a factor to contiguous rows.
///
/// # Safety
/// Every element of the source must be readable; the target needs `rows · columns` writable elements.
#[inline(always)]
pub(crate) unsafe fn scaled<S: Simd>(s: S, a: &Pack<S::Elem>, factor: S::Elem) {
    for row in 0..a.rows {
        for column in (0..a.columns).step_by(S::LANES) {
            let lanes = S::LANES.min(a.columns - column);
            // SAFETY: row < rows and column + lanes <= columns, in the source and in the target (contract).
            unsafe {
                let to = a.to.add(row * a.columns + column);
                let from = a.from.wrapping_offset(row as isize * a.row + column as isize * a.column);
                if a.column == 1 {
                    let v = s.load_partial(from, lanes);
                    s.store_partial(to, s.mul(v, s.splat(factor)), lanes);
                } else {
                    for lane in 0..lanes {
                        *to.add(lane) = a.read(row, column + lane) * factor;
                    }
                }
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
    fn one_value_that_is_not_finite_is_noticed_wherever_it_is() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let (rows, columns) = (3, 35);
            for bad in [T::nan(), -T::nan(), T::infinity(), T::neg_infinity()] {
                for at in 0..rows * columns {
                    let mut from = Array2::from_elem((rows, columns), T::max_value());
                    from[(at / columns, at % columns)] = bad;
                    let mut to = nans(PANEL * 48);
                    assert!(!kernels.pack_rows(from.view(), &mut to));
                    let mut to = nans(48 * PANEL);
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
