//! Memory that is asked for before it is needed.

use super::simd::prefetch_bytes;
use ndarray::ArrayView2;

/// Rows of an array that will be read soon: each of those that work before asks memory for a part of them.
///
/// The rows of a head are too far apart, or too few, for the CPU to guess them in time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Upcoming {
    from: *const u8,
    /// From row to row and of a row, in bytes.
    row: isize,
    width: usize,
    rows: usize,
}

impl Upcoming {
    /// Nothing, unless each row is contiguous.
    pub(crate) fn new<T>(view: ArrayView2<'_, T>) -> Self {
        Self::at(view.as_ptr(), view.dim().into(), [view.strides()[0], view.strides()[1]])
    }

    /// The same by pointer, shape and strides; nothing is read.
    pub(super) fn at<T>(from: *const T, [rows, columns]: [usize; 2], [row, column]: [isize; 2]) -> Self {
        let size = size_of::<T>();
        let contiguous = columns <= 1 || column == 1;
        Self {
            from: from.cast(),
            row: row.wrapping_mul(size as isize),
            width: if contiguous { columns * size } else { 0 },
            rows,
        }
    }

    /// Asks for part `part` of `parts`.
    #[inline(always)]
    pub(crate) fn fetch(&self, part: usize, parts: usize) {
        for row in self.rows * part / parts..self.rows * (part + 1) / parts {
            prefetch_bytes(self.from.wrapping_offset(self.row.wrapping_mul(row as isize)), self.width);
        }
    }
}
