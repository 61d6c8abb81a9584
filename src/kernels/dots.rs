//! Products of few rows with a matrix that is stored transposed: inner products along contiguous rows.
//!
//! ```text
//! c[i][j]  =  (c[i][j] +)  Σ_t a[i][t] b[j][t]        i < rows <= 3,  j < n,  t < k
//! ```
//!
//! The lanes of a vector run along `t` and are added at the end, so `b` is read once, in order and without a copy: this
//! is for the case where reading `b` is all that matters. Each element of `c` has its own vector of partial sums, so its
//! bits do not depend on how rows and columns are cut.

use super::real::Real;
use super::simd::Simd;
use super::table::Kernels;
use super::tile::Start;

/// Rows of the largest register block.
pub(crate) const MAX_DOT_ROWS: usize = 3;

/// One product, by pointers. Strides count elements; along `t`, neighbours are next to each other.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dots<T> {
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: *const T,
    pub(crate) a_row: usize,
    pub(crate) b: *const T,
    pub(crate) b_row: usize,
    pub(crate) c: *mut T,
    pub(crate) c_row: usize,
    pub(crate) start: Start,
}

/// Runs a product with register blocks of up to 2 rows by `NR` columns, or of 3 by 4.
///
/// # Safety
/// `1 <= rows <= MAX_DOT_ROWS`; `rows` rows of `a` and `n` rows of `b` with `k` elements each are readable; `c` is
/// readable and writable and overlaps neither.
#[inline(always)]
pub(crate) unsafe fn dots<S: Simd, const NR: usize>(s: S, d: &Dots<S::Elem>) {
    // SAFETY: the contract is handed on; MR is the number of rows.
    unsafe {
        match d.rows {
            1 => strip::<S, 1, NR>(s, d),
            2 => strip::<S, 2, NR>(s, d),
            // Twelve sums keep the multipliers busy; of 24, the compiler moves half to the stack.
            _ => strip::<S, MAX_DOT_ROWS, 4>(s, d),
        }
    }
}

/// Walks the columns of `c`: blocks of `NR`, then one at a time.
///
/// # Safety
/// As [`dots`], with `MR == rows`.
#[inline(always)]
unsafe fn strip<S: Simd, const MR: usize, const NR: usize>(s: S, d: &Dots<S::Elem>) {
    let mut column = 0;
    // SAFETY: every block ends at or before n.
    unsafe {
        while d.n - column >= NR {
            block::<S, MR, NR>(s, d, column);
            column += NR;
        }
        while column < d.n {
            block::<S, MR, 1>(s, d, column);
            column += 1;
        }
    }
}

/// The inner products of `MR` rows of `a` with `NR` rows of `b` from `column` on.
///
/// # Safety
/// As [`dots`], with `MR == rows` and `column + NR <= n`.
#[inline(always)]
unsafe fn block<S: Simd, const MR: usize, const NR: usize>(s: S, d: &Dots<S::Elem>, column: usize) {
    let mut sum = [[s.zero(); NR]; MR];
    let b = d.b.wrapping_add(column * d.b_row);
    let mut t = 0;
    // SAFETY: row i < MR of `a` and row column + j < n of `b` have k elements, of which t + lanes are used (contract).
    unsafe {
        while d.k - t >= S::LANES {
            let mut rows = [s.zero(); MR];
            for i in 0..MR {
                rows[i] = s.load(d.a.add(i * d.a_row + t));
            }
            for j in 0..NR {
                let column = s.load(b.add(j * d.b_row + t));
                for i in 0..MR {
                    sum[i][j] = s.fma(rows[i], column, sum[i][j]);
                }
            }
            t += S::LANES;
        }
        if t < d.k {
            for j in 0..NR {
                let column = s.load_partial(b.add(j * d.b_row + t), d.k - t);
                for i in 0..MR {
                    let row = s.load_partial(d.a.add(i * d.a_row + t), d.k - t);
                    sum[i][j] = s.fma(row, column, sum[i][j]);
                }
            }
        }
    }
    for i in 0..MR {
        for j in 0..NR {
            let total = s.reduce_sum(sum[i][j]);
            // SAFETY: the element of `c` exists (contract).
            unsafe {
                let c = d.c.add(i * d.c_row + column + j);
                *c = if d.start == Start::Add { *c + total } else { total };
            }
        }
    }
}

impl<T: Real> Kernels<T> {
    /// The inner product of the numbers that both have.
    pub(crate) fn dot(&self, a: &[T], b: &[T]) -> T {
        let (k, mut c) = (a.len().min(b.len()), T::zero());
        let (a, b) = (a.as_ptr(), b.as_ptr());
        // SAFETY: one row of `k` elements of each is readable, and `c` is one number.
        unsafe {
            (self.dots)(&Dots { rows: 1, n: 1, k, a, a_row: k, b, b_row: k, c: &mut c, c_row: 1, start: Start::Zero })
        };
        c
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Numbers, at_every_level, wide};

    #[test]
    fn inner_products_of_every_shape() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for rows in 1..=MAX_DOT_ROWS {
                for n in [0, 1, 3, 4, 7, 8, 9, 17] {
                    for k in [0, 1, 3, 15, 16, 17, 64, 80] {
                        for start in [Start::Zero, Start::Add] {
                            let mut numbers = Numbers::new((rows + 10 * n + 1000 * k) as u64);
                            let (a, b) = (numbers.vec::<T>(rows * k), numbers.vec::<T>(n * k));
                            let before = match start {
                                Start::Zero => vec![T::nan(); rows * n],
                                Start::Add => numbers.vec(rows * n),
                            };
                            let mut c = before.clone();
                            let (a_at, b_at, c_at) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
                            let all =
                                Dots { rows, n, k, a: a_at, a_row: k, b: b_at, b_row: k, c: c_at, c_row: n, start };
                            // SAFETY: the vectors above have the shapes that `all` says.
                            unsafe { (kernels.dots)(&all) };
                            for (at, &got) in c.iter().enumerate() {
                                let (a, b) = (&a[at / n * k..][..k], &b[at % n * k..][..k]);
                                let first = if start == Start::Add { wide(before[at]) } else { 0.0 };
                                let terms = || a.iter().zip(b).map(|(&a, &b)| wide(a) * wide(b));
                                let size = first.abs() + terms().map(f64::abs).sum::<f64>();
                                let error = (wide(got) - first - terms().sum::<f64>()).abs();
                                assert!(error <= wide(T::epsilon()) * (k as f64 + 1.0) * size, "{rows} {n} {k} {at}");
                            }
                        }
                    }
                }
            }
        }
        at_every_level!(check);
    }
}
