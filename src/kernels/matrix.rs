//! Products by a matrix unit that multiplies numbers of 16 bits: those of 32 bits as sums of three.
//!
//! ```text
//! x = x1 + x2 + x3        three bf16, exact: 8 + 8 + 8 bits of the 24
//! x y = x1 y1 + (x1 y2 + x2 y1) + (x1 y3 + x2 y2 + x3 y1) + terms below 2^-24 |x y|, which are left out
//! ```
//!
//! Six products of 16 bits for one of 32, each summed up in `f32`. A unit with 16 times the rate of the multipliers, as AMX
//! has, is still 2.7 times as fast, and not less exact: it rounds once for many terms. The errors of sums of 64 to 2048 terms were
//! measured as 0.42 to 0.45 of those of one multiply-add after the other (root mean square; the largest of ten thousand 0.35 to
//! 0.62).
//!
//! Numbers below 2^-126 are zero to the unit. That is no loss as long as the largest number of a matrix is far from there,
//! and the sums stay finite as long as it is far from the other end too: whoever splits a matrix is told so ([`Extent`]),
//! and computes with the multipliers where it is not, or where a number is NaN or infinite.
//!
//! The layouts, in words of two bf16, those of term `t` and of term `t + 16`; terms beyond the last are zero:
//!
//! ```text
//! rows     a [n][k]            -> [⌈k/32⌉][3][n][16]              word (s, part, i, t):  a[i][32 s + t], a[i][32 s + 16 + t]
//! panels   b [⌈n/16⌉][k][16]   -> [⌈n/16⌉][⌈k/32⌉][3][16][16]     word (c, s, part, t, j):  b[c][32 s + t][j], b[c][32 s + 16 + t][j]
//! ```
//!
//! Source: Henry, Tang and Heinecke, *Leveraging the bfloat16 artificial intelligence datatype for higher-precision
//! computations*, 2019, <https://arxiv.org/abs/1904.06376>.

use super::PANEL;
use super::beside::Work;
use super::real::Real;
use super::tile::Start;

/// Terms that an instruction of the unit adds up.
pub(crate) const STEP: usize = 32;

/// Parts of a number.
pub(super) const PARTS: usize = 3;

/// Products of parts for a product of numbers.
pub(super) const PRODUCTS: usize = 6;

/// Panels that all rows meet before the next ones: the sums of two panels are what the unit has registers for.
pub(super) const TOGETHER: usize = 2;

/// Rows of a product at most.
pub(crate) const UNIT_ROWS: usize = 32;

/// The kernels of a matrix unit. Split numbers lie in memory of the type that they were split from.
#[derive(Clone, Copy, Debug)]
pub(super) struct Matrix<T> {
    /// Makes the unit ready for products of so many rows, `1..=UNIT_ROWS`, on this thread.
    pub(super) shape: unsafe fn(usize),
    /// Gives the unit back.
    pub(super) release: unsafe fn(),
    pub(super) multiply: unsafe fn(&Multiply<T>),
    /// The same, and a little of something else beside each product of parts.
    pub(super) multiply_beside: unsafe fn(&Multiply<T>, Work<'_, T>),
    /// All that is left of it.
    pub(super) finish: unsafe fn(Work<'_, T>),
    /// A product whose result nobody wants: the unit falls asleep without one.
    pub(super) stay_awake: unsafe fn(),
    /// Splits up to [`UNIT_ROWS`] rows. Bit i of the result is set if row i does not fit.
    pub(super) split_rows: unsafe fn(&SplitRows<T>) -> u32,
    /// The same for numbers that fit.
    pub(super) split_weights: unsafe fn(&SplitRows<T>),
    pub(super) split_panel: unsafe fn(&SplitPanel<T>) -> Extent,
    pub(super) split_square: unsafe fn(&SplitSquare<T>) -> Extent,
}

/// `c[i][j] = (c[i][j] +) Σ_t a[i][t] b[t][j]`, by pointers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Multiply<T> {
    pub(super) rows: usize,
    /// Panels of 16 columns, of `b` and `c`.
    pub(super) panels: usize,
    pub(super) steps: usize,
    /// Split rows, from the first row on.
    pub(super) a: *const T,
    /// Numbers from a part of all rows to the next.
    pub(super) a_part: usize,
    /// Split panels, from the first step on.
    pub(super) b: *const T,
    /// Numbers from panel to panel.
    pub(super) b_panel: usize,
    pub(super) c: *mut T,
    pub(super) c_row: usize,
    pub(super) start: Start,
}

/// Rows to be split.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitRows<T> {
    pub(super) rows: usize,
    pub(super) terms: usize,
    pub(super) from: *const T,
    pub(super) from_row: usize,
    /// Numbers from 16 terms of a row to its next 16: as many, unless something is between them.
    pub(super) from_next: usize,
    pub(super) to: *mut T,
    /// Numbers from a part of all rows to the next.
    pub(super) to_part: usize,
}

/// Up to 16 columns to be split; those that are missing become zeros.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitPanel<T> {
    pub(super) terms: usize,
    pub(super) columns: usize,
    pub(super) from: *const T,
    /// Numbers from term to term.
    pub(super) from_row: usize,
    pub(super) to: *mut T,
}

/// 32 columns of up to 32 rows, to be split as panels whose terms are the rows, and as rows too.
#[derive(Clone, Copy, Debug)]
pub(super) struct SplitSquare<T> {
    /// Those that there are; the others are zero.
    pub(super) rows: usize,
    pub(super) from: *const T,
    pub(super) from_row: usize,
    /// Two panels of one step.
    pub(super) panels: *mut T,
    /// Numbers from the first to the second.
    pub(super) panel: usize,
    /// 32 rows of one step, or null.
    pub(super) to_rows: *mut T,
}

impl<T> Multiply<T> {
    /// Products of parts, of which each may have something beside it.
    pub(super) fn products(&self) -> usize {
        products_of_parts(self.steps, self.panels)
    }
}

/// The bits of a power of two.
const fn power(exponent: i32) -> u32 {
    ((f32::MAX_EXP - 1 + exponent) as u32) << (f32::MANTISSA_DIGITS - 1)
}

/// How large the numbers of a matrix are; of none, by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Extent {
    /// The bits of the largest absolute value; NaN and infinity are the largest of all.
    pub(super) largest: u32,
}

impl Extent {
    /// The bits of 2^-48 and of 2^60.
    pub(super) const LEAST: u32 = power(-48);
    pub(super) const MOST: u32 = power(60);

    /// Of no numbers.
    pub(crate) const NOTHING: Self = Self { largest: 0 };

    /// Of some numbers.
    pub(super) fn of<T: Real>(numbers: &[T]) -> Self {
        let bits = |x: &T| x.to_f32().unwrap_or(f32::NAN).abs().to_bits();
        Self { largest: numbers.iter().map(bits).max().unwrap_or(0) }
    }

    /// Whether the unit multiplies matrices of such numbers as exactly as the multipliers would: all are zero, or the largest is
    /// between 2^-48 and 2^60. The products of the largest are 2^-96 at least then, and what the unit takes for zero, 2^-126,
    /// is as far below them as the last bit of a sum of a few.
    pub(crate) fn fits(self) -> bool {
        self.largest == 0 || (Self::LEAST..=Self::MOST).contains(&self.largest)
    }

    /// Of both.
    pub(crate) fn and(self, other: Self) -> Self {
        Self { largest: self.largest.max(other.largest) }
    }
}

/// Instructions that so many terms take.
pub(crate) const fn steps(terms: usize) -> usize {
    terms.div_ceil(STEP)
}

/// Products of parts of up to 32 rows with so many panels.
pub(crate) const fn products_of_parts(steps: usize, panels: usize) -> usize {
    steps * panels.div_ceil(TOGETHER) * PRODUCTS
}

/// Numbers of memory that `rows` split rows take.
pub(crate) const fn split_rows_len(rows: usize, terms: usize) -> usize {
    rows.saturating_mul(steps(terms)).saturating_mul(PARTS * PANEL)
}

/// Numbers of memory that a split panel takes.
pub(crate) const fn split_panel_len(terms: usize) -> usize {
    steps(terms).saturating_mul(PARTS * PANEL * PANEL)
}

#[cfg(debug_assertions)]
thread_local! {
    /// Whether a session of this thread has made the unit ready.
    static READY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// Checks that sessions of a thread come one after the other, where assertions are checked.
#[inline(always)]
fn claim(ready: bool) {
    #[cfg(debug_assertions)]
    assert!(READY.replace(ready) != ready, "a session of the matrix unit within another");
    #[cfg(not(debug_assertions))]
    let _ = ready;
}

/// The unit, made ready for products on this thread, until it is dropped. One at a time: the second would leave the first without
/// its registers.
#[derive(Debug)]
pub(crate) struct Session<'m, T> {
    matrix: &'m Matrix<T>,
    /// For which it is ready.
    rows: usize,
}

impl<'m, T> Session<'m, T> {
    pub(super) fn new(matrix: &'m Matrix<T>) -> Self {
        Self { matrix, rows: 0 }
    }

    /// # Safety
    /// `rows` is in `1..=UNIT_ROWS`; `a` and `b` are readable, split as written above; so many rows and panels of `c` are
    /// readable and writable, and overlap neither.
    #[inline]
    pub(super) unsafe fn multiply(&mut self, product: &Multiply<T>) {
        // SAFETY: the contract is handed on; the unit is ready for so many rows.
        unsafe {
            self.shape(product.rows);
            (self.matrix.multiply)(product);
        }
    }

    /// The same, and some of the work beside it.
    ///
    /// # Safety
    /// As above; what the work reads and writes is there until it is done, and overlaps nothing of the product.
    #[inline]
    pub(super) unsafe fn multiply_beside(&mut self, product: &Multiply<T>, work: Work<'_, T>) {
        // SAFETY: as above.
        unsafe {
            self.shape(product.rows);
            (self.matrix.multiply_beside)(product, work);
        }
    }

    /// A product, and some of the work beside it if there is any.
    ///
    /// # Safety
    /// As above.
    #[inline]
    pub(super) unsafe fn multiply_with(&mut self, product: &Multiply<T>, work: Option<Work<'_, T>>) {
        // SAFETY: the contract is handed on.
        unsafe {
            match work {
                Some(work) => self.multiply_beside(product, work),
                None => self.multiply(product),
            }
        }
    }

    /// Keeps the unit from falling asleep where the next product is some time off.
    #[inline]
    pub(crate) fn stay_awake(&mut self) {
        if self.rows > 0 {
            // SAFETY: the unit is there, and ready.
            unsafe { (self.matrix.stay_awake)() }
        }
    }

    /// Makes the unit ready.
    ///
    /// # Safety
    /// `rows` is in `1..=UNIT_ROWS`.
    #[inline]
    unsafe fn shape(&mut self, rows: usize) {
        if self.rows != rows {
            if self.rows == 0 {
                claim(true);
            }
            // SAFETY: the unit is there, since somebody was handed its table.
            unsafe { (self.matrix.shape)(rows) }
            self.rows = rows;
        }
    }
}

impl<T> Drop for Session<'_, T> {
    fn drop(&mut self) {
        if self.rows > 0 {
            claim(false);
            // SAFETY: the unit is there, as above.
            unsafe { (self.matrix.release)() }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Numbers, nans};
    use crate::kernels::{Level, Real};

    /// The unit of each level that has one.
    fn units() -> Vec<&'static Matrix<f32>> {
        Level::available().iter().filter_map(|&level| f32::kernels(level).matrix.as_ref()).collect()
    }

    /// Also whether all rows fit.
    fn split_rows(matrix: &Matrix<f32>, x: &[f32], rows: usize, terms: usize) -> (Vec<f32>, bool) {
        let mut to = nans(split_rows_len(rows, terms));
        let mut unfit = 0;
        for first in (0..rows).step_by(UNIT_ROWS) {
            let shape = SplitRows {
                rows: UNIT_ROWS.min(rows - first),
                terms,
                from: x[first * terms..].as_ptr(),
                from_row: terms,
                from_next: PANEL,
                to: to[first * PANEL..].as_mut_ptr(),
                to_part: rows * PANEL,
            };
            // SAFETY: both have that many rows.
            unfit |= unsafe { (matrix.split_rows)(&shape) };
        }
        (to, unfit == 0)
    }

    fn split_panel(matrix: &Matrix<f32>, x: &[f32], terms: usize) -> (Vec<f32>, Extent) {
        let mut to = nans(split_panel_len(terms));
        // SAFETY: both are a panel of so many terms.
        let extent = unsafe {
            (matrix.split_panel)(&SplitPanel {
                terms,
                columns: PANEL,
                from: x.as_ptr(),
                from_row: PANEL,
                to: to.as_mut_ptr(),
            })
        };
        (to, extent)
    }

    /// Both halves of a word as numbers, the low one first.
    fn halves(word: f32) -> [f32; 2] {
        [word.to_bits() << 16, word.to_bits() & 0xFFFF_0000].map(f32::from_bits)
    }

    #[test]
    fn parts_add_up_to_the_number() {
        for matrix in units() {
            let mut numbers = Numbers::new(1);
            for (rows, terms) in [(1, 1), (3, 16), (2, 17), (5, 32), (4, 80), (33, 33)] {
                let mut x = numbers.vec::<f32>(rows * terms);
                x.iter_mut().enumerate().for_each(|(i, x)| *x *= 2_f32.powi(i as i32 % 40 - 20));
                let (split, fits) = split_rows(matrix, &x, rows, terms);
                assert!(fits);
                for (row, term) in (0..rows).flat_map(|row| (0..steps(terms) * STEP).map(move |term| (row, term))) {
                    let (step, half, lane) = (term / STEP, term % STEP / PANEL, term % PANEL);
                    let part = |part| halves(split[((step * PARTS + part) * rows + row) * PANEL + lane])[half];
                    let sum = f64::from(part(0)) + f64::from(part(1)) + f64::from(part(2));
                    let want = if term < terms { x[row * terms + term] } else { 0.0 };
                    assert_eq!(sum, f64::from(want), "{rows} x {terms}, row {row}, term {term}");
                    assert!(part(1).abs() <= want.abs() / 127.0 && part(2).abs() <= want.abs() / 32000.0);
                }
            }
            for terms in [1, 16, 17, 32, 64, 100] {
                let x = numbers.vec::<f32>(terms * PANEL);
                let (split, extent) = split_panel(matrix, &x, terms);
                assert!(extent.fits());
                for (term, column) in (0..steps(terms) * STEP).flat_map(|term| (0..PANEL).map(move |j| (term, j))) {
                    let (step, half, line) = (term / STEP, term % STEP / PANEL, term % PANEL);
                    let part = |part| halves(split[((step * PARTS + part) * PANEL + line) * PANEL + column])[half];
                    let sum = f64::from(part(0)) + f64::from(part(1)) + f64::from(part(2));
                    let want = if term < terms { x[term * PANEL + column] } else { 0.0 };
                    assert_eq!(sum, f64::from(want), "{terms} terms, term {term}, column {column}");
                }
            }
        }
    }

    #[test]
    fn numbers_that_the_unit_would_lose_are_told() {
        for matrix in units() {
            let far = [
                f32::NAN,
                -f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                f32::MAX,
                1e19,
                -1e19,
                f32::from_bits(u32::MAX),
            ];
            for (x, fits) in far.map(|x| (x, false)).into_iter().chain([1e18, -1e18, 1.0, 1e-14].map(|x| (x, true))) {
                for at in [0, 15, 16, 30] {
                    let mut row = vec![0.0; 31];
                    row[at] = x;
                    assert_eq!(split_rows(matrix, &row, 1, 31).1, fits, "{x} at {at}");
                    let mut panel = vec![0.0; 31 * PANEL];
                    panel[at * PANEL + at % PANEL] = x;
                    assert_eq!(split_panel(matrix, &panel, 31).1.fits(), fits, "{x} at {at}");
                }
            }
            assert!(split_rows(matrix, &[0.0, -0.0], 1, 2).1);
            assert!(!split_rows(matrix, &[1e-15, 0.0, -1e-30], 1, 3).1);
            assert!(split_rows(matrix, &[1e-15, 1.0, -1e-30], 1, 3).1);
            // Each row by itself: what is large in one does not make up for what is small in another.
            assert!(!split_rows(matrix, &[1.0, 1e-15], 2, 1).1);
        }
    }

    #[test]
    fn products_are_those_of_the_numbers() {
        for matrix in units() {
            let mut numbers = Numbers::new(2);
            let mut session = Session::new(matrix);
            for rows in [1, 7, 15, 16, 17, 31, 32] {
                for terms in [0, 1, 31, 32, 64, 80, 200] {
                    for panels in [1, 2, 3, 5] {
                        for start in [Start::Zero, Start::Add] {
                            let (x, w) = (numbers.vec::<f32>(rows * terms), numbers.vec::<f32>(panels * terms * PANEL));
                            let a = split_rows(matrix, &x, rows, terms).0;
                            let b: Vec<f32> = (0..panels)
                                .flat_map(|panel| {
                                    split_panel(matrix, &w[panel * terms * PANEL..][..terms * PANEL], terms).0
                                })
                                .collect();
                            let c_row = panels * PANEL + 5;
                            let before = numbers.vec::<f32>(rows * c_row);
                            let mut c = before.clone();
                            let product = Multiply {
                                rows,
                                panels,
                                steps: steps(terms),
                                a: a.as_ptr(),
                                a_part: rows * PANEL,
                                b: b.as_ptr(),
                                b_panel: split_panel_len(terms),
                                c: c.as_mut_ptr(),
                                c_row,
                                start,
                            };
                            // SAFETY: the vectors have the shapes of the product, but for rows of `a` beyond the last, which
                            // are not read: the unit is told how many there are.
                            unsafe { session.multiply(&product) };
                            for at in 0..rows * c_row {
                                let (row, column) = (at / c_row, at % c_row);
                                if column >= panels * PANEL {
                                    assert_eq!(c[at], before[at], "beyond the columns");
                                    continue;
                                }
                                let add = if start == Start::Add { f64::from(before[at]) } else { 0.0 };
                                let (mut want, mut size) = (add, add.abs());
                                for term in 0..terms {
                                    let w = w[(column / PANEL * terms + term) * PANEL + column % PANEL];
                                    let x = f64::from(x[row * terms + term]) * f64::from(w);
                                    (want, size) = (want + x, size + x.abs());
                                }
                                let error = (f64::from(c[at]) - want).abs();
                                assert!(
                                    error <= 3e-7 * size,
                                    "{rows} x {terms} x {panels}, {row}, {column}: {error:e} of {size}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_session_within_another_is_found() {
        for matrix in units() {
            let mut session = Session::new(matrix);
            // SAFETY: a number of rows that there may be.
            unsafe { session.shape(PANEL) };
            // SAFETY: as above.
            let within = std::panic::catch_unwind(|| unsafe { Session::new(matrix).shape(PANEL) });
            assert!(within.is_err());
        }
    }

    #[test]
    fn a_nan_among_the_rows_stays_in_its_row() {
        for matrix in units() {
            let mut numbers = Numbers::new(3);
            let (mut x, w) = (numbers.vec::<f32>(8 * 64), numbers.vec::<f32>(64 * PANEL));
            for (row, nan) in [(1, f32::NAN), (4, f32::from_bits(0x7FFF_FFFF)), (6, f32::from_bits(0xFFFF_FFFF))] {
                x[row * 64 + 9 * row] = nan;
            }
            let (a, b) = (split_rows(matrix, &x, 8, 64).0, split_panel(matrix, &w, 64).0);
            let mut c = vec![0.0; 8 * PANEL];
            let product = Multiply {
                rows: 8,
                panels: 1,
                steps: 2,
                a: a.as_ptr(),
                a_part: 8 * PANEL,
                b: b.as_ptr(),
                b_panel: 0,
                c: c.as_mut_ptr(),
                c_row: PANEL,
                start: Start::Zero,
            };
            // SAFETY: the vectors have the shapes of the product.
            unsafe { Session::new(matrix).multiply(&product) };
            for (at, c) in c.iter().enumerate() {
                assert_eq!(c.is_nan(), [1, 4, 6].contains(&(at / PANEL)), "row {}", at / PANEL);
            }
        }
    }
}
