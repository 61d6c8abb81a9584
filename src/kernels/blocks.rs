//! Many threads fill one matrix: blocks of it are dealt one by one, each to one thread.
//!
//! The blocks of a deal are handed out once each and do not overlap, so each can be a `&mut` view of its own.

use ndarray::{ArrayViewMut2, Ix2, RawArrayViewMut, s};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Deals the blocks of a matrix.
pub(crate) struct Blocks<'a, T> {
    next: AtomicUsize,
    matrix: RawArrayViewMut<T, Ix2>,
    rows: usize,
    columns: usize,
    borrow: PhantomData<&'a mut T>,
}

/// A block and where it lies.
#[derive(Debug)]
pub(crate) struct Part<'a, T> {
    pub(crate) rows: Range<usize>,
    pub(crate) columns: Range<usize>,
    pub(crate) view: ArrayViewMut2<'a, T>,
}

// SAFETY: `Blocks` stands for a `&mut` of the matrix, which may be sent to a thread if `T` may.
unsafe impl<T: Send> Send for Blocks<'_, T> {}
// SAFETY: the only access is by `next`, which gives each part of the matrix to one caller.
unsafe impl<T: Send> Sync for Blocks<'_, T> {}

impl<'a, T> Blocks<'a, T> {
    /// Blocks of at most `rows` rows and `columns` columns; 0 counts as 1.
    pub(crate) fn new(mut matrix: ArrayViewMut2<'a, T>, rows: usize, columns: usize) -> Self {
        let (rows, columns) = (rows.max(1), columns.max(1));
        Self { next: AtomicUsize::new(0), matrix: matrix.raw_view_mut(), rows, columns, borrow: PhantomData }
    }

    /// Number of blocks.
    pub(crate) fn len(&self) -> usize {
        self.matrix.nrows().div_ceil(self.rows) * self.strips()
    }

    fn strips(&self) -> usize {
        self.matrix.ncols().div_ceil(self.columns)
    }

    /// The next block that nobody has; blocks beside each other come one after the other.
    pub(crate) fn next(&self) -> Option<Part<'_, T>> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index >= self.len() {
            return None;
        }
        let cut = |index: usize, size: usize, len: usize| index * size..len.min((index + 1) * size);
        let rows = cut(index / self.strips(), self.rows, self.matrix.nrows());
        let columns = cut(index % self.strips(), self.columns, self.matrix.ncols());
        let block = self.matrix.slice_move(s![rows.clone(), columns.clone()]);
        // SAFETY: the matrix is borrowed exclusively for 'a, which outlives `self`; every index is handed out once, and
        // blocks of different indices share no element.
        let view = unsafe { block.deref_into_view_mut() };
        Some(Part { rows, columns, view })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array2;

    #[test]
    fn every_element_is_dealt_once() {
        for (rows, columns) in [(1, 1), (2, 3), (5, 7), (100, 100), (0, 0)] {
            let mut matrix = Array2::<f64>::zeros((10, 14));
            for view in [matrix.view_mut(), Array2::zeros((14, 10)).view_mut().reversed_axes()] {
                let mut view = view;
                view.fill(0.0);
                let blocks = Blocks::new(view.view_mut(), rows, columns);
                std::thread::scope(|scope| {
                    for _ in 0..3 {
                        scope.spawn(|| {
                            while let Some(mut part) = blocks.next() {
                                for ((i, j), x) in part.view.indexed_iter_mut() {
                                    *x += ((part.rows.start + i) * 14 + part.columns.start + j) as f64 + 1.0;
                                }
                            }
                        });
                    }
                });
                let want = Array2::from_shape_fn((10, 14), |(i, j)| (i * 14 + j) as f64 + 1.0);
                assert_eq!(view, want);
            }
        }
    }

    #[test]
    fn an_empty_matrix_has_no_block() {
        let mut matrix = Array2::<f32>::zeros((0, 5));
        assert!(Blocks::new(matrix.view_mut(), 4, 4).next().is_none());
    }
}
