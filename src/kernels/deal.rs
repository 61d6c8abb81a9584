//! Many threads write one output: work items are dealt one by one, and an item can write its own rows and no others.
//!
//! The output is `[batch, num_heads, q_len, width]` with any strides. Item `index` stands for one batch entry, one KV
//! head and one block of query positions; its rows are those positions of the query heads that read the KV head. The
//! items of a deal are handed out once each, so their rows are disjoint, and a [`Block`] lets nothing else through.
//! This is the crate's one way around a `&mut` that cannot be split (the rows of a group are no slice of the output).

use crate::heads::HeadMap;
use ndarray::{ArrayViewMut4, Axis};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Deals the work items of one call.
#[derive(Debug)]
pub(crate) struct Deal<'a, T> {
    next: AtomicUsize,
    heads: &'a HeadMap,
    batch: usize,
    q_len: usize,
    query_tile: usize,
    /// `[batch, num_heads, q_len, value_dim]`
    context: Rows<'a, T>,
    /// `[batch, num_heads, q_len, 1]`
    lse: Option<Rows<'a, T>>,
}

impl<'a, T: Copy> Deal<'a, T> {
    /// Blocks of `query_tile > 0` positions. `None` if the two outputs differ in batch, heads or length.
    pub(crate) fn new(
        heads: &'a HeadMap,
        query_tile: usize,
        context: ArrayViewMut4<'a, T>,
        lse: Option<ArrayViewMut4<'a, T>>,
    ) -> Option<Self> {
        let (batch, num_heads, q_len, _) = context.dim();
        let (context, lse) = (Rows::new(context), lse.map(Rows::new));
        let same = lse.as_ref().is_none_or(|lse| context.shape[..3] == lse.shape[..3]);
        let fits = same && num_heads == heads.num_heads() && query_tile > 0;
        fits.then(|| Self { next: AtomicUsize::new(0), heads, batch, q_len, query_tile, context, lse })
    }

    /// Number of items.
    pub(crate) fn len(&self) -> usize {
        self.groups().saturating_mul(self.q_len.div_ceil(self.query_tile))
    }

    fn groups(&self) -> usize {
        self.batch.saturating_mul(self.heads.num_read())
    }

    /// The next item that nobody has. The last positions come first: under a causal mask they see the most keys, and
    /// the longest items must not be the last ones.
    pub(crate) fn next(&self) -> Option<Block<'_, T>> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index >= self.len() {
            return None;
        }
        let (tile, group) = (index / self.groups(), index % self.groups());
        let start = (self.q_len.div_ceil(self.query_tile) - 1 - tile) * self.query_tile;
        let positions = start..self.q_len.min(start + self.query_tile);
        let read = self.heads.num_read();
        let kv_head = self.heads.read_kv_head(group % read);
        Some(Block { deal: self, entry: group / read, kv_head, positions })
    }
}

/// One work item. There is one of each, which is why it cannot be cloned.
#[derive(Debug)]
pub(crate) struct Block<'a, T> {
    deal: &'a Deal<'a, T>,
    entry: usize,
    kv_head: usize,
    positions: Range<usize>,
}

impl<T: Copy> Block<'_, T> {
    /// The batch entry.
    pub(crate) fn entry(&self) -> usize {
        self.entry
    }

    /// The KV head.
    pub(crate) fn kv_head(&self) -> usize {
        self.kv_head
    }

    /// The query positions.
    pub(crate) fn positions(&self) -> Range<usize> {
        self.positions.clone()
    }

    /// Whether [`Block::write`] does anything with the lse.
    pub(crate) fn wants_lse(&self) -> bool {
        self.deal.lse.is_some()
    }

    /// Writes the context `[value_dim]` and the lse of one query. A row that is not the item's own is left alone.
    pub(crate) fn write(&mut self, head: usize, position: usize, context: &[T], lse: T) {
        let deal = self.deal;
        let own = head < deal.heads.num_heads()
            && deal.heads.kv_head(head) == self.kv_head
            && self.positions.contains(&position);
        debug_assert!(own, "head {head}, position {position} belongs to another item");
        if own {
            // SAFETY: the row belongs to this item (checked above), every item exists once (`Deal::next` hands each
            // index out once) and each (entry, head, position) belongs to one item, so no other thread touches the
            // row; entry, head and position lie within the shape that `Deal::new` compared.
            unsafe {
                deal.context.write([self.entry, head, position], context);
                if let Some(rows) = &deal.lse {
                    rows.write([self.entry, head, position], &[lse]);
                }
            }
        }
    }
}

/// An output that is borrowed exclusively and written through shared references.
#[derive(Debug)]
struct Rows<'a, T> {
    start: *mut T,
    shape: [usize; 4],
    strides: [isize; 4],
    array: PhantomData<&'a mut T>,
}

// SAFETY: `Rows` stands for a `&mut` of the array, which may be sent to a thread if `T` may.
unsafe impl<T: Send> Send for Rows<'_, T> {}
// SAFETY: the only access is `write`, whose callers give each row to one thread.
unsafe impl<T: Send> Sync for Rows<'_, T> {}

impl<'a, T: Copy> Rows<'a, T> {
    fn new(mut array: ArrayViewMut4<'a, T>) -> Self {
        let strides = [0, 1, 2, 3].map(|axis| array.stride_of(Axis(axis)));
        Self { start: array.as_mut_ptr(), shape: array.dim().into(), strides, array: PhantomData }
    }

    /// # Safety
    /// `at` lies within the first three axes, and nobody else reads or writes that row meanwhile.
    unsafe fn write(&self, at: [usize; 3], row: &[T]) {
        let offset: isize = at.iter().zip(self.strides).map(|(&index, stride)| index as isize * stride).sum();
        // SAFETY: within the array by this function's contract; a view's offsets do not overflow isize.
        let first = unsafe { self.start.offset(offset) };
        let len = row.len().min(self.shape[3]);
        if self.strides[3] == 1 {
            // SAFETY: the row has shape[3] >= len elements side by side; a slice cannot overlap an exclusive borrow.
            unsafe { first.copy_from_nonoverlapping(row.as_ptr(), len) };
            return;
        }
        for (j, &x) in row[..len].iter().enumerate() {
            // SAFETY: j < shape[3].
            unsafe { first.offset(j as isize * self.strides[3]).write(x) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array4, s};

    fn deal_all(heads: &HeadMap, query_tile: usize, mut context: Array4<f64>) -> Array4<f64> {
        let (batch, num_heads, q_len, _) = context.dim();
        let mut lse = Array4::from_elem((batch, num_heads, q_len, 1), -1.0);
        let deal = Deal::new(heads, query_tile, context.view_mut(), Some(lse.view_mut())).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(mut block) = deal.next() {
                        let entry = block.entry();
                        for head in heads.query_heads(block.kv_head()) {
                            for i in block.positions() {
                                let value = (100 * entry + 10 * head + i) as f64;
                                block.write(head, i, &[value, value + 0.5], value);
                            }
                        }
                    }
                });
            }
        });
        assert_eq!(lse.slice(s![.., .., .., 0]), context.slice(s![.., .., .., 0]));
        context
    }

    #[test]
    fn every_row_is_written_once_whatever_the_cut_and_the_strides() {
        let want = Array4::from_shape_fn((2, 3, 5, 2), |(b, h, i, j)| (100 * b + 10 * h + i) as f64 + 0.5 * j as f64);
        for heads in [HeadMap::grouped(3, 1), HeadMap::grouped(3, 3), HeadMap::explicit(&[2, 0, 2], 4)] {
            for query_tile in [1, 2, 5, 9] {
                let heads = heads.as_ref().unwrap();
                assert_eq!(deal_all(heads, query_tile, Array4::from_elem((2, 3, 5, 2), f64::NAN)), want);
                let token_major = Array4::from_elem((2, 5, 2, 3), f64::NAN).permuted_axes([0, 3, 1, 2]);
                assert_eq!(deal_all(heads, query_tile, token_major), want);
            }
        }
    }

    #[test]
    fn outputs_that_differ_are_refused() {
        let heads = HeadMap::grouped(2, 2).unwrap();
        let (mut a, mut b) = (Array4::<f32>::zeros((1, 2, 3, 4)), Array4::zeros((1, 2, 4, 1)));
        assert!(Deal::new(&heads, 1, a.view_mut(), Some(b.view_mut())).is_none());
        let mut c = a.clone();
        assert!(Deal::new(&heads, 0, c.view_mut(), Some(a.view_mut())).is_none());
    }

    #[test]
    fn nothing_to_deal_is_dealt() {
        let heads = HeadMap::grouped(2, 2).unwrap();
        for shape in [(0, 2, 3, 4), (1, 2, 0, 4)] {
            let (mut a, mut b) = (Array4::<f32>::zeros(shape), Array4::zeros(shape));
            assert!(Deal::new(&heads, 2, a.view_mut(), Some(b.view_mut())).unwrap().next().is_none());
        }
    }
}
