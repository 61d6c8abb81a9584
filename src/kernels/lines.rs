//! Biases that are read where they are.

use std::ops::Range;

use super::simd::prefetch_bytes;
use super::tile::MAX_ROWS;

/// Rows of numbers, equally far apart in one slice.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lines<'a, T> {
    numbers: &'a [T],
    first: usize,
    apart: usize,
}

impl<'a, T> Lines<'a, T> {
    /// Row `i` begins at `first + i * apart`.
    pub(crate) fn new(numbers: &'a [T], first: usize, apart: usize) -> Self {
        Self { numbers, first, apart }
    }

    /// The same from a row and column on.
    pub(crate) fn from(self, row: usize, column: usize) -> Self {
        Self { first: self.first + row * self.apart + column, ..self }
    }

    /// The slice that holds the first `width` numbers of `rows > 0` rows and begins with the first of them, and how far apart
    /// they are.
    pub(crate) fn extent(self, rows: usize, width: usize) -> (&'a [T], usize) {
        (&self.numbers[self.first..][..(rows - 1) * self.apart + width], self.apart)
    }

    /// The columns of a group of rows.
    pub(crate) fn group(self, rows: Range<usize>, columns: Range<usize>) -> [&'a [T]; MAX_ROWS] {
        std::array::from_fn(|i| match rows.start + i {
            row if row < rows.end => &self.numbers[self.first + row * self.apart..][columns.clone()],
            _ => &[][..],
        })
    }

    /// Asks memory for the columns of some rows, which are too far apart for the CPU to guess them.
    #[inline(always)]
    pub(crate) fn fetch(self, rows: Range<usize>, columns: Range<usize>) {
        for row in rows {
            let from = self.numbers.as_ptr().wrapping_add(self.first + row * self.apart + columns.start);
            prefetch_bytes(from.cast(), columns.len() * size_of::<T>());
        }
    }
}
