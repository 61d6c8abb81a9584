//! The matrix unit by slices, for those who put products together from several tiles, as backward does.
//!
//! The layouts of split numbers are those of `matrix.rs`. Every method looks at the ends of what it reads and writes, so that a
//! wrong shape is a panic and nothing worse.

use super::PANEL;
use super::beside::Work;
use super::matrix::{
    Extent, Matrix, Multiply, PARTS, STEP, Session, SplitPanel, SplitRows, SplitSquare, UNIT_ROWS, split_panel_len,
    split_rows_len,
};
use super::returning::OnTheWay;
use super::table::Kernels;
use super::tile::Start;

/// The unit on this thread, until it is dropped: there must be no other one, or [`Session`], meanwhile.
#[derive(Debug)]
pub(crate) struct MatrixUnit<'m, T> {
    matrix: &'m Matrix<T>,
    session: Session<'m, T>,
}

/// `c = (c +) a b`, split rows by split panels.
#[derive(Debug)]
pub(crate) struct UnitProduct<'a, T> {
    /// At most [`UNIT_ROWS`].
    pub(crate) rows: usize,
    /// Panels of 16 columns.
    pub(crate) panels: usize,
    /// Instructions that the terms take: one for 32 of them.
    pub(crate) steps: usize,
    pub(crate) a: &'a [T],
    /// Numbers from a part of all rows to the next.
    pub(crate) a_part: usize,
    pub(crate) b: &'a [T],
    /// Numbers from panel to panel.
    pub(crate) b_panel: usize,
    pub(crate) c: &'a mut [T],
    pub(crate) c_row: usize,
    pub(crate) start: Start,
}

/// Where a square of 32 by 32 numbers is split to.
#[derive(Debug)]
pub(crate) struct Squares<'a, T> {
    /// Two panels of one step whose terms are the rows of the square, `panel` numbers apart.
    pub(crate) panels: &'a mut [T],
    pub(crate) panel: usize,
    /// 32 rows of one step.
    pub(crate) rows: Option<&'a mut [T]>,
}

impl<T> Kernels<T> {
    /// The unit, if there is one.
    pub(crate) fn matrix_unit(&self) -> Option<MatrixUnit<'_, T>> {
        self.matrix.as_ref().map(|matrix| MatrixUnit { matrix, session: Session::new(matrix) })
    }
}

/// Where the last of `count` things ends that begin `apart` from each other.
fn end(count: usize, apart: usize, len: usize) -> usize {
    count.checked_sub(1).map_or(0, |last| last.saturating_mul(apart).saturating_add(len))
}

impl<'m, T> MatrixUnit<'m, T> {
    /// Keeps the unit from falling asleep where the next product is some time off.
    pub(crate) fn stay_awake(&mut self) {
        self.session.stay_awake();
    }

    /// Splits the columns of `rows` packed rows, `[rows / 16][width][16]`, as `width` rows whose terms they are. Whether all fit.
    pub(crate) fn split_columns(&self, [rows, width]: [usize; 2], panels: &[T], to: &mut [T]) -> bool {
        let terms = rows.next_multiple_of(PANEL);
        let (panels, to) = (&panels[..terms * width], &mut to[..split_rows_len(width, terms)]);
        let mut unfit = 0;
        for first in (0..width).step_by(UNIT_ROWS) {
            // SAFETY: the slices have all columns of all panels, and a row of all terms for each.
            unfit |= unsafe {
                (self.matrix.split_rows)(&SplitRows {
                    rows: UNIT_ROWS.min(width - first),
                    terms,
                    from: panels.as_ptr().wrapping_add(first * PANEL),
                    from_row: PANEL,
                    from_next: width * PANEL,
                    to: to.as_mut_ptr().wrapping_add(first * PANEL),
                    to_part: width * PANEL,
                })
            };
        }
        unfit == 0
    }

    /// Splits panels of 16 columns of rows that begin `row` numbers apart, whose terms are the rows; `panel` numbers from one
    /// to the next. Whether all fit.
    pub(crate) fn split_panels(
        &self,
        [terms, panels]: [usize; 2],
        from: &[T],
        row: usize,
        to: &mut [T],
        panel: usize,
    ) -> bool {
        let (from, to) =
            (&from[..end(terms, row, panels * PANEL)], &mut to[..end(panels, panel, split_panel_len(terms))]);
        (0..panels).fold(true, |fit, index| {
            let (from, to) = (from.as_ptr().wrapping_add(index * PANEL), to.as_mut_ptr().wrapping_add(index * panel));
            let split = SplitPanel { terms, columns: PANEL, from, from_row: row, to };
            // SAFETY: the slices end with the last number of the last panel.
            unsafe { (self.matrix.split_panel)(&split) }.fits() && fit
        })
    }

    /// Splits 32 columns of up to 32 rows both ways. How large they are.
    pub(crate) fn split_square(&self, rows: usize, from: &[T], row: usize, to: Squares<'_, T>) -> Extent {
        let rows = rows.min(UNIT_ROWS);
        let from = &from[..end(rows, row, STEP)];
        let panels = &mut to.panels[..end(STEP / PANEL, to.panel, split_panel_len(UNIT_ROWS))];
        let to_rows = to.rows.map_or(std::ptr::null_mut(), |to| to[..split_rows_len(UNIT_ROWS, STEP)].as_mut_ptr());
        let (from, panels) = (from.as_ptr(), panels.as_mut_ptr());
        // SAFETY: the slices above end with the last number that is read and written.
        unsafe {
            (self.matrix.split_square)(&SplitSquare { rows, from, from_row: row, panels, panel: to.panel, to_rows })
        }
    }

    /// All that is left of some work.
    pub(super) fn finish(&mut self, work: Work<'_, T>) {
        // SAFETY: who made the work has borrowed what it reads and writes.
        unsafe { (self.matrix.finish)(work) }
    }

    /// One product, and rows that go back through the softmax beside it.
    #[inline(always)]
    pub(crate) fn multiply(&mut self, x: UnitProduct<'_, T>, beside: Option<&mut OnTheWay<'_, T>>) {
        let UnitProduct { rows, panels, steps, a_part, b_panel, c_row, start, .. } = x;
        assert!(rows <= UNIT_ROWS, "{rows} rows are more than the unit has");
        if rows == 0 || panels == 0 {
            return;
        }
        let a = x.a[..end(steps * PARTS, a_part, rows * PANEL)].as_ptr();
        let b = x.b[..end(panels, b_panel, steps * split_panel_len(STEP))].as_ptr();
        let c = x.c[..end(rows, c_row, panels * PANEL)].as_mut_ptr();
        // SAFETY: rows are in `1..=UNIT_ROWS`; the slices end with the last number that the strides reach, and `c` is borrowed
        // exclusively, as is what the rows beside it are.
        unsafe {
            self.multiply_by_pointers(
                &Multiply { rows, panels, steps, a, a_part, b, b_panel, c, c_row, start },
                beside,
            );
        }
    }

    /// # Safety
    /// As [`Session::multiply_beside`].
    #[inline(always)]
    pub(super) unsafe fn multiply_by_pointers(&mut self, x: &Multiply<T>, beside: Option<&mut OnTheWay<'_, T>>) {
        // SAFETY: the contract is the same.
        unsafe {
            match beside {
                Some(rows) => self.session.multiply_beside(x, rows.work()),
                None => self.session.multiply(x),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::matrix::steps;
    use crate::kernels::testing::{Numbers, nans};
    use crate::kernels::{KEYS, Level, Real};

    /// The unit of each level that has one.
    fn units() -> Vec<MatrixUnit<'static, f32>> {
        Level::available().iter().filter_map(|&level| f32::kernels(level).matrix_unit()).collect()
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn squares_are_split_as_panels_and_as_rows() {
        for unit in units() {
            let x = Numbers::new(1).vec::<f32>(UNIT_ROWS * KEYS);
            for rows in [1, 15, 16, 17, 31, 32] {
                // Panels of two steps, of which the square is the second.
                let (len, panel) = (split_panel_len(UNIT_ROWS), split_panel_len(2 * UNIT_ROWS));
                let (mut panels, mut to_rows) = (nans(2 * panel), nans(split_rows_len(UNIT_ROWS, STEP)));
                let to = Squares { panels: &mut panels[len..], panel, rows: Some(&mut to_rows) };
                let extent = unit.split_square(rows, &x[3..], KEYS, to);
                let mut alone = nans(2 * panel);
                let to = Squares { panels: &mut alone[len..], panel, rows: None };
                assert_eq!(unit.split_square(rows, &x[3..], KEYS, to), extent);
                assert_eq!(bits(&alone), bits(&panels), "{rows} rows");
                let square: Vec<f32> = (0..rows).flat_map(|row| x[3 + row * KEYS..][..STEP].to_vec()).collect();
                assert_eq!(extent, Extent::of(&square));

                let mut want = nans(2 * len);
                assert!(unit.split_panels([rows, 2], &x[3..], KEYS, &mut want, len));
                for index in 0..2 {
                    assert_eq!(bits(&panels[index * panel + len..][..len]), bits(&want[index * len..][..len]));
                }
                let mut want = nans(split_rows_len(UNIT_ROWS, STEP));
                // Rows as columns of panels that are their transpose.
                let mut turned = vec![0.0; STEP * UNIT_ROWS];
                for (at, turned) in turned.iter_mut().enumerate() {
                    let (term, row) = (at / (UNIT_ROWS * PANEL) * PANEL + at % PANEL, at / PANEL % UNIT_ROWS);
                    *turned = if row < rows { x[3 + row * KEYS + term] } else { 0.0 };
                }
                assert!(unit.split_columns([STEP, UNIT_ROWS], &turned, &mut want));
                assert_eq!(bits(&to_rows), bits(&want), "{rows} rows");
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        for unit in units() {
            for bad in [f32::NAN, f32::INFINITY, -1e19, 1e-19] {
                for column in 0..STEP {
                    let rows = 5;
                    let mut x = Numbers::new(2).vec::<f32>(rows * STEP);
                    let mut to = nans(2 * split_panel_len(rows));
                    assert!(unit.split_panels([rows, 2], &x, STEP, &mut to, split_panel_len(rows)));
                    // All of a panel, so that its largest is too small.
                    let panel = column / PANEL * PANEL..(column / PANEL + 1) * PANEL;
                    x.chunks_exact_mut(STEP).for_each(|x| x[panel.clone()].fill(bad));
                    assert!(!unit.split_panels([rows, 2], &x, STEP, &mut to, split_panel_len(rows)), "{bad}");
                    let mut turned = Numbers::new(3).vec::<f32>(PANEL * STEP);
                    turned[column * PANEL..][..PANEL].fill(bad);
                    let mut to = nans(split_rows_len(STEP, PANEL));
                    assert!(!unit.split_columns([PANEL, STEP], &turned, &mut to), "{bad}, column {column}");
                }
            }
        }
    }

    #[test]
    fn columns_of_rows_give_the_product_of_their_transpose() {
        for mut unit in units() {
            let (dims, rows, keys) = (48, 27, 32);
            let mut numbers = Numbers::new(3);
            let (q, d) = (numbers.matrix::<f32>(rows, dims), numbers.vec::<f32>(UNIT_ROWS * keys));
            let mut turned = nans(2 * PANEL * dims);
            f32::kernels(Level::Amx).pack_panels(q.view(), &mut turned);
            let (mut a, mut panels) = (nans(split_rows_len(dims, UNIT_ROWS)), nans(2 * split_panel_len(UNIT_ROWS)));
            assert!(unit.split_columns([rows, dims], &turned, &mut a));
            let to = Squares { panels: &mut panels, panel: split_panel_len(UNIT_ROWS), rows: None };
            assert!(unit.split_square(rows, &d, keys, to).fits());
            let mut c = nans(dims * keys);
            // Fewer rows after more need no other shape.
            for (first, rows) in [(0, UNIT_ROWS), (UNIT_ROWS, PANEL)] {
                unit.multiply(
                    UnitProduct {
                        rows,
                        panels: 2,
                        steps: steps(UNIT_ROWS),
                        a: &a[first * PANEL..],
                        a_part: dims * PANEL,
                        b: &panels,
                        b_panel: split_panel_len(UNIT_ROWS),
                        c: &mut c[first * keys..],
                        c_row: keys,
                        start: Start::Zero,
                    },
                    None,
                );
            }
            for (dim, key) in (0..dims).flat_map(|dim| (0..keys).map(move |key| (dim, key))) {
                let want: f64 = (0..rows).map(|row| f64::from(q[(row, dim)]) * f64::from(d[row * keys + key])).sum();
                assert!((f64::from(c[dim * keys + key]) - want).abs() < 1e-5, "{dim}, {key}");
            }
        }
    }
}
