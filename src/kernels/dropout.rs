//! Which pairs dropout keeps: a counter-based generator, so that tiles, threads and the order of the work do not matter.
//!
//! ```text
//! x = first + j G                        first, second: 32 bits each from the key of the row, see `RowKey`
//! x = (x ^ x >> 16 ^ second) A
//! x = (x ^ x >> 15) B
//! word(j) = x ^ x >> 16
//! z[i][j] = 0 if word(j) <= last, else factor
//! ```
//!
//! `G` is odd, so the counter j walks through all words, and every line is a bijection of x that carries the low bits up
//! or the high bits down; `second` makes two rows whose counters meet go apart again. A and B are those of a hash that
//! was searched for little bias ("lowbias32", Chris Wellons, 2018). Two products and a few shifts on lanes of 32 bits, in
//! plain loops that the compiler turns into vectors: a tenth of what the scores of a pair cost.

use super::KEYS;
use super::simd::Simd;
use super::table::Kernels;
use num_traits::Zero;
use std::ops::Range;

/// What the words of a row depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RowKey {
    first: u32,
    second: u32,
}

impl RowKey {
    pub(crate) fn new(bits: u64) -> Self {
        Self { first: bits as u32, second: (bits >> 32) as u32 }
    }

    /// The word of key j, uniform over all words. Keys 2^32 apart share theirs, but no row is that long.
    #[inline(always)]
    pub(crate) fn word(self, j: usize) -> u32 {
        let x = self.first.wrapping_add((j as u32).wrapping_mul(0x9E37_79B9));
        let x = (x ^ x >> 16 ^ self.second).wrapping_mul(0x7FEB_352D);
        let x = (x ^ x >> 15).wrapping_mul(0x846C_A68B);
        x ^ x >> 16
    }
}

/// What is dropped, and what the rest is multiplied by.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Drops<T> {
    /// The largest word that is dropped.
    pub(crate) last: u32,
    pub(crate) factor: T,
}

/// The dropout of a group of rows for one tile of keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropped<'a, T> {
    /// One for each row.
    pub(crate) keys: &'a [RowKey],
    /// The first key of the tile.
    pub(crate) first: usize,
    pub(crate) drops: Drops<T>,
}

impl<T: Copy> Dropped<'_, T> {
    /// That of some of the rows, whose numbers are `[rows][64]` at `to`.
    pub(super) fn rows(&self, rows: Range<usize>, to: *mut T, into: Into) -> Dropping<T> {
        let Self { keys, first, drops } = *self;
        Dropping { rows: rows.len(), keys: keys[rows].as_ptr(), first, drops, to, into }
    }
}

/// The same by pointers, and where the factors go.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dropping<T> {
    pub(crate) rows: usize,
    pub(crate) keys: *const RowKey,
    /// The first key of the tile.
    pub(crate) first: usize,
    pub(crate) drops: Drops<T>,
    /// `[rows][64]`
    pub(crate) to: *mut T,
    pub(crate) into: Into,
}

/// What happens to the numbers at `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Into {
    /// They become the factors.
    Store,
    /// They are multiplied by the factors.
    Multiply,
}

/// Runs over all rows.
///
/// # Safety
/// `keys` must have `rows` readable keys and `to` rows of 64 readable and writable numbers.
#[inline(always)]
pub(crate) unsafe fn dropping<S: Simd>(s: S, a: &Dropping<S::Elem>) {
    for row in 0..a.rows {
        // SAFETY: row < rows (contract).
        unsafe { dropping_row(s, a, row) }
    }
}

/// One of them.
///
/// # Safety
/// As [`dropping`], with a row `row`.
#[inline(always)]
pub(super) unsafe fn dropping_row<S: Simd>(_: S, a: &Dropping<S::Elem>, row: usize) {
    // SAFETY: there is such a row (contract).
    let (key, to) = unsafe { (*a.keys.add(row), &mut *a.to.add(row * KEYS).cast::<[S::Elem; KEYS]>()) };
    let mut factors = [S::Elem::zero(); KEYS];
    for j in 0..KEYS {
        factors[j] = if key.word(a.first + j) <= a.drops.last { S::Elem::zero() } else { a.drops.factor };
    }
    for j in 0..KEYS {
        to[j] = if a.into == Into::Store { factors[j] } else { to[j] * factors[j] };
    }
}

impl<T: Copy> Kernels<T> {
    /// The factors `[rows][64]`, into the rows of `to` or multiplied with them.
    pub(crate) fn dropout(&self, dropped: &Dropped<'_, T>, to: &mut [T], into: Into) {
        let rows = dropped.keys.len();
        let to = to[..rows * KEYS].as_mut_ptr();
        // SAFETY: the slices have a key for each row and a row of 64 numbers for each key.
        unsafe { (self.dropping)(&dropped.rows(0..rows, to, into)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Real;
    use crate::kernels::testing::{Numbers, at_every_level, nans, real};

    #[test]
    fn factors_are_those_of_the_words() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let mut numbers = Numbers::new(3);
            for rows in [0, 1, 5, 6] {
                let keys: Vec<RowKey> = (0..rows).map(|_| RowKey::new(numbers.word())).collect();
                for (last, first) in [(0, 0), (1 << 30, 64), (u32::MAX - 1, 1 << 20), (u32::MAX, 0)] {
                    let drops = Drops { last, factor: real::<T>(1.25) };
                    let mut stored = nans(rows * KEYS + 1);
                    let dropped = Dropped { keys: &keys, first, drops };
                    kernels.dropout(&dropped, &mut stored, Into::Store);
                    let p = numbers.vec::<T>(rows * KEYS);
                    let mut multiplied = p.clone();
                    kernels.dropout(&dropped, &mut multiplied, Into::Multiply);
                    for at in 0..rows * KEYS {
                        let dropped = keys[at / KEYS].word(first + at % KEYS) <= last;
                        assert_eq!(stored[at], if dropped { T::zero() } else { drops.factor });
                        assert_eq!(multiplied[at], p[at] * stored[at]);
                    }
                    assert!(stored[rows * KEYS].is_nan(), "wrote beyond the rows");
                }
            }
        }
        at_every_level!(check);
    }
}
