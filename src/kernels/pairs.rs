//! The products of backward where a query, a key or a gradient is NaN or infinite: only visible pairs may touch each
//! other.
//!
//! ```text
//! for each row i and key j that it sees:
//!     d_v[j][:] += p[i][j] d_context[i][:]
//!     d_k[j][:] += d[i][j] q[i][:]
//!     d_q[i][:] += d[i][j] k[j][:]
//! ```
//!
//! The products by `tile.rs` add `0 · x` for the pairs that are hidden, which is NaN if `x` is not finite. This kernel
//! leaves those pairs out and adds the others in the same order. It needs no register block, because such tiles are
//! rare.

use super::KEYS;
use super::real::Real;
use super::simd::Simd;
use super::table::Kernels;

/// Some rows and one tile of keys, by pointers. `[rows][64]` and rows of `k_width` and `v_width`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pairs<T> {
    pub(crate) rows: usize,
    /// Per row, bit j set if key j is visible.
    pub(crate) visible: *const u64,
    pub(crate) p: *const T,
    pub(crate) d: *const T,
    pub(crate) d_context: *const T,
    pub(crate) q: *const T,
    pub(crate) k: *const T,
    pub(crate) d_v: *mut T,
    pub(crate) d_k: *mut T,
    pub(crate) d_q: *mut T,
    /// Multiples of 16.
    pub(crate) k_width: usize,
    pub(crate) v_width: usize,
}

/// Adds what the visible pairs give.
///
/// # Safety
/// The arrays must have the shapes above, with as many rows of keys as the highest visible one asks for.
#[inline(always)]
pub(crate) unsafe fn pairs<S: Simd>(s: S, a: &Pairs<S::Elem>) {
    for row in 0..a.rows {
        // SAFETY: row < rows, and `visible` has a word per row (contract).
        let mut keys = unsafe { *a.visible.add(row) };
        while keys != 0 {
            let key = keys.trailing_zeros() as usize;
            keys &= keys - 1;
            // SAFETY: the row and the key exist in every array, since the key is visible (contract).
            unsafe {
                let (p, d) = (*a.p.add(row * KEYS + key), *a.d.add(row * KEYS + key));
                add(s, a.d_v.add(key * a.v_width), p, a.d_context.add(row * a.v_width), a.v_width);
                add(s, a.d_k.add(key * a.k_width), d, a.q.add(row * a.k_width), a.k_width);
                add(s, a.d_q.add(row * a.k_width), d, a.k.add(key * a.k_width), a.k_width);
            }
        }
    }
}

/// `to[:] += factor x[:]`
///
/// # Safety
/// Both must have `n` elements, a multiple of 16.
#[inline(always)]
unsafe fn add<S: Simd>(s: S, to: *mut S::Elem, factor: S::Elem, x: *const S::Elem, n: usize) {
    for at in (0..n).step_by(S::LANES) {
        // SAFETY: at + LANES <= n, since LANES divides 16 (contract).
        unsafe { s.store(to.add(at), s.fma(s.splat(factor), s.load(x.add(at)), s.load(to.add(at)))) };
    }
}

/// Some rows and one tile of keys.
#[derive(Debug)]
pub(crate) struct RowsAndKeys<'a, T> {
    /// For each row, the keys that it sees.
    pub(crate) visible: &'a [u64],
    /// `[rows][64]`
    pub(crate) p: &'a [T],
    /// `[rows][64]`
    pub(crate) d: &'a [T],
    /// `[rows][v_width]`
    pub(crate) d_context: &'a [T],
    /// `[rows][k_width]`
    pub(crate) q: &'a [T],
    /// `[64][k_width]`
    pub(crate) k: &'a [T],
    /// `[64][v_width]`
    pub(crate) d_v: &'a mut [T],
    /// `[64][k_width]`
    pub(crate) d_k: &'a mut [T],
    /// `[rows][k_width]`
    pub(crate) d_q: &'a mut [T],
    /// Multiples of 16.
    pub(crate) k_width: usize,
    pub(crate) v_width: usize,
}

impl<T: Real> Kernels<T> {
    /// Adds what the visible pairs give to the three gradients.
    pub(crate) fn pairs(&self, a: &mut RowsAndKeys<'_, T>) {
        let rows = a.visible.len();
        let keys = a.visible.iter().map(|bits| 64 - bits.leading_zeros() as usize).max().unwrap_or(0);
        let (k_width, v_width) = (a.k_width / 16 * 16, a.v_width / 16 * 16);
        let (p, d) = (&a.p[..rows * KEYS], &a.d[..rows * KEYS]);
        let (d_context, q) = (&a.d_context[..rows * v_width], &a.q[..rows * k_width]);
        let (k, d_k, d_v) = (&a.k[..keys * k_width], &mut a.d_k[..keys * k_width], &mut a.d_v[..keys * v_width]);
        let d_q = &mut a.d_q[..rows * k_width];
        // SAFETY: the slices above have the shapes that the kernel asks for, up to the highest visible key.
        unsafe {
            (self.pairs)(&Pairs {
                rows,
                visible: a.visible.as_ptr(),
                p: p.as_ptr(),
                d: d.as_ptr(),
                d_context: d_context.as_ptr(),
                q: q.as_ptr(),
                k: k.as_ptr(),
                d_v: d_v.as_mut_ptr(),
                d_k: d_k.as_mut_ptr(),
                d_q: d_q.as_mut_ptr(),
                k_width,
                v_width,
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Numbers, at_every_level, wide};

    #[test]
    fn visible_pairs_and_no_others() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let (k_width, v_width) = (32, 16);
            let mut numbers = Numbers::new(9);
            for visible in [vec![], vec![0], vec![1 << 63, 0b101], vec![u64::MAX, 0, 0x00FF_0000, 1, 2, 4, 8]] {
                let rows = visible.len();
                let (p, d) = (numbers.vec::<T>(rows * KEYS), numbers.vec::<T>(rows * KEYS));
                let (mut d_context, mut q) = (numbers.vec::<T>(rows * v_width), numbers.vec::<T>(rows * k_width));
                let mut k = numbers.vec::<T>(KEYS * k_width);
                // What nobody sees is NaN.
                let seen = visible.iter().fold(0u64, |seen, bits| seen | bits);
                (0..KEYS).filter(|key| seen >> key & 1 == 0).for_each(|key| k[key * k_width] = T::nan());
                for row in (0..rows).filter(|&row| visible[row] == 0) {
                    (q[row * k_width], d_context[row * v_width]) = (T::nan(), T::nan());
                }
                let start = [KEYS * v_width, KEYS * k_width, rows * k_width].map(|n| numbers.vec::<T>(n));
                let [mut d_v, mut d_k, mut d_q] = start.clone();
                kernels.pairs(&mut RowsAndKeys {
                    visible: &visible,
                    p: &p,
                    d: &d,
                    d_context: &d_context,
                    q: &q,
                    k: &k,
                    d_v: &mut d_v,
                    d_k: &mut d_k,
                    d_q: &mut d_q,
                    k_width,
                    v_width,
                });
                let mut want = start.map(|x| x.into_iter().map(wide).collect::<Vec<_>>());
                for (row, key) in (0..rows).flat_map(|row| (0..KEYS).map(move |key| (row, key))) {
                    if visible[row] >> key & 1 == 1 {
                        let (p, d) = (wide(p[row * KEYS + key]), wide(d[row * KEYS + key]));
                        (0..v_width).for_each(|c| want[0][key * v_width + c] += p * wide(d_context[row * v_width + c]));
                        (0..k_width).for_each(|c| want[1][key * k_width + c] += d * wide(q[row * k_width + c]));
                        (0..k_width).for_each(|c| want[2][row * k_width + c] += d * wide(k[key * k_width + c]));
                    }
                }
                for (got, want) in [d_v, d_k, d_q].iter().zip(&want) {
                    let near = |(&x, &y): (&T, &f64)| (wide(x) - y).abs() <= 200.0 * wide(T::epsilon());
                    assert!(got.iter().zip(want).all(near), "{rows} rows");
                }
            }
        }
        at_every_level!(check);
    }
}
