//! Probabilities times values where a value is NaN or infinite: only what a row sees may touch it.
//!
//! ```text
//! o[i][:] += Σ_j p[i][j] v[j][:]    over the keys j that row i sees, in order
//! ```
//!
//! The product by `tile.rs` adds `0 · v` for the keys that a row does not see, which is NaN if `v` is not finite. This
//! kernel leaves those keys out. It gives the same bits as the tile when all values are finite: adding `±0` to a sum
//! changes no bit that a user can see. It needs no register block, because such tiles are rare.

use super::simd::Simd;
use super::table::VALUES_PANEL;
use super::{KEYS, PANEL};

/// One selecting product, by pointers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values<T> {
    pub(crate) rows: usize,
    /// `[rows][64]`.
    pub(crate) p: *const T,
    /// Per row, bit j set if key j is visible.
    pub(crate) visible: *const u64,
    /// `[width / 16][64][16]`.
    pub(crate) v: *const T,
    /// `[rows][o_row]`, of which `width` columns are used.
    pub(crate) o: *mut T,
    pub(crate) o_row: usize,
    /// A multiple of 16.
    pub(crate) width: usize,
}

/// Adds the visible values.
///
/// # Safety
/// The arrays must have the shapes above, with as many rows of `v` as the highest visible key asks for.
#[inline(always)]
pub(crate) unsafe fn values<S: Simd>(s: S, a: &Values<S::Elem>) {
    for row in 0..a.rows {
        // SAFETY: row < rows, and `visible` has a word per row (contract).
        let mut keys = unsafe { *a.visible.add(row) };
        while keys != 0 {
            let key = keys.trailing_zeros() as usize;
            keys &= keys - 1;
            // SAFETY: the key is visible, so its row of `v` exists; width is a multiple of LANES (contract).
            unsafe {
                let p = s.splat(*a.p.add(row * KEYS + key));
                for column in (0..a.width).step_by(S::LANES) {
                    let o = a.o.add(row * a.o_row + column);
                    let v = s.load(a.v.add(column / PANEL * VALUES_PANEL + key * PANEL + column % PANEL));
                    s.store(o, s.fma(p, v, s.load(o)));
                }
            }
        }
    }
}
