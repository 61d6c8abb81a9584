//! Many threads, one output: work items are dealt once each, and an item's owner alone writes its rows.
//!
//! ```text
//! item = (batch entry, KV head, query tile)  ->  rows [batch][h][tile · length .. ] for every head h of the KV head
//! ```
//!
//! A [`Deal`] gives each item out exactly once, as an [`Item`] that cannot be copied. A [`SharedRows`] lets an item write
//! only rows that are its own, and two items have no row in common, so no two threads ever write the same element.

use ndarray::ArrayViewMut4;
use std::marker::PhantomData;
use std::ops::Range;
use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

/// How an output [batch, heads, q_len, width] is cut into work items.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut<'a> {
    pub(crate) batch: usize,
    pub(crate) kv_heads: usize,
    /// The KV head of each query head.
    pub(crate) kv_of_head: &'a [usize],
    pub(crate) q_len: usize,
    /// Query rows of an item; at least 1.
    pub(crate) tile: usize,
}

/// Deals the items of a cut: the last query tiles first, since under a causal mask they see the most keys, and within a
/// tile one KV head after the other.
#[derive(Debug)]
pub(crate) struct Deal<'a> {
    cut: Cut<'a>,
    next: AtomicUsize,
}

impl<'a> Deal<'a> {
    pub(crate) fn new(cut: Cut<'a>) -> Self {
        Self { cut: Cut { tile: cut.tile.max(1), ..cut }, next: AtomicUsize::new(0) }
    }

    /// How many items there are.
    pub(crate) fn items(&self) -> usize {
        let groups = self.cut.batch.saturating_mul(self.cut.kv_heads);
        groups.saturating_mul(self.cut.q_len.div_ceil(self.cut.tile))
    }

    /// An item that nobody has had yet, or nothing if all are dealt.
    pub(crate) fn next(&self) -> Option<Item<'_>> {
        let items = self.items();
        // An update that stops at the end, so that the counter never wraps and deals an item again.
        let claim = |next: usize| (next < items).then_some(next + 1);
        let number = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, claim).ok()?;
        let groups = self.cut.batch * self.cut.kv_heads;
        let (tile, group) = (items / groups - 1 - number / groups, number % groups);
        let start = tile * self.cut.tile;
        let queries = start..self.cut.q_len.min(start.saturating_add(self.cut.tile));
        Some(Item { deal: self, batch: group / self.cut.kv_heads, kv_head: group % self.cut.kv_heads, queries })
    }

    /// An output whose rows the items of this deal may write.
    pub(crate) fn share<'s, T>(&'s self, out: &'s mut ArrayViewMut4<'_, T>) -> SharedRows<'s, T> {
        let (batch, heads, q_len, width) = out.dim();
        let strides = [0, 1, 2, 3].map(|axis| out.strides()[axis]);
        SharedRows {
            deal: self,
            data: out.as_mut_ptr(),
            dim: [batch, heads, q_len, width],
            strides,
            array: PhantomData,
        }
    }
}

/// One work item. Neither `Clone` nor constructible elsewhere: who holds it is its only owner.
#[derive(Debug)]
pub(crate) struct Item<'a> {
    deal: &'a Deal<'a>,
    batch: usize,
    kv_head: usize,
    queries: Range<usize>,
}

impl Item<'_> {
    pub(crate) fn batch(&self) -> usize {
        self.batch
    }

    pub(crate) fn kv_head(&self) -> usize {
        self.kv_head
    }

    pub(crate) fn queries(&self) -> Range<usize> {
        self.queries.clone()
    }

    /// Whether a row of the item's batch entry belongs to it.
    fn owns(&self, head: usize, query: usize) -> bool {
        self.queries.contains(&query) && self.deal.cut.kv_of_head.get(head) == Some(&self.kv_head)
    }
}

/// An output [batch, heads, q_len, width] that threads write together, each the rows of its items.
#[derive(Debug)]
pub(crate) struct SharedRows<'a, T> {
    deal: &'a Deal<'a>,
    data: *mut T,
    dim: [usize; 4],
    strides: [isize; 4],
    /// The array is borrowed exclusively for as long as it is shared.
    array: PhantomData<&'a mut T>,
}

// SAFETY: the only access is `write_row`, which needs the item that owns the row, exclusively. Items of one deal have no
// row in common and exist once each (`Deal::next`), so no element is written by two threads; `T: Send` moves the values.
unsafe impl<T: Send> Sync for SharedRows<'_, T> {}

// SAFETY: as for `Sync`; the pointer stands for an exclusive borrow, which may move to another thread if `T` may.
unsafe impl<T: Send> Send for SharedRows<'_, T> {}

impl<T: Copy> SharedRows<'_, T> {
    /// Writes the row of `head` and `query` in the item's batch entry. A row that does not exist, is not the item's, or
    /// has another width than `row` is a mistake of the caller and stays as it is.
    pub(crate) fn write_row(&self, item: &mut Item<'_>, head: usize, query: usize, row: &[T]) {
        let index = [item.batch, head, query];
        let exists = (0..3).all(|axis| index[axis] < self.dim[axis]) && row.len() == self.dim[3];
        let owned = ptr::eq(item.deal, self.deal) && item.owns(head, query);
        debug_assert!(exists && owned, "row {index:?} of {:?} is not the item's", self.dim);
        if !(exists && owned) {
            return;
        }
        let offset: isize = (0..3).map(|axis| index[axis] as isize * self.strides[axis]).sum();
        let start = self.data.wrapping_offset(offset);
        for (i, &x) in row.iter().enumerate() {
            // SAFETY: the index was checked against the shape above, so the element lies in the array, which is
            // borrowed exclusively; the row is the item's alone (`owns`), and `item` is borrowed exclusively.
            unsafe { start.offset(i as isize * self.strides[3]).write(x) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array4, s};

    const KV_OF_HEAD: [usize; 5] = [0, 1, 0, 2, 2];

    fn cut(q_len: usize, tile: usize) -> Cut<'static> {
        Cut { batch: 2, kv_heads: 3, kv_of_head: &KV_OF_HEAD, q_len, tile }
    }

    #[test]
    fn threads_write_every_row_once_whatever_the_strides() {
        for (q_len, tile) in [(0, 4), (1, 4), (3, 4), (4, 4), (5, 4), (9, 1)] {
            let mut out = Array4::<usize>::zeros((q_len, 2, 6, 5));
            let mut view = out.slice_mut(s![..;-1, .., ..;2, ..]).permuted_axes([1, 3, 0, 2]);
            let deal = Deal::new(cut(q_len, tile));
            let rows = deal.share(&mut view);
            std::thread::scope(|scope| {
                for _ in 0..4 {
                    scope.spawn(|| {
                        while let Some(mut item) = deal.next() {
                            let kv_head = item.kv_head();
                            let heads = (0..5).filter(|&head| KV_OF_HEAD[head] == kv_head);
                            for head in heads {
                                for query in item.queries() {
                                    let first = 100 * item.batch() + 1000 * head + 10_000 * query;
                                    rows.write_row(&mut item, head, query, &[first + 1, first + 2, first + 3]);
                                }
                            }
                        }
                    });
                }
            });
            for ((b, h, q, c), &x) in view.indexed_iter() {
                assert_eq!(x, 100 * b + 1000 * h + 10_000 * q + c + 1);
            }
            assert!(out.slice(s![.., .., 1..;2, ..]).iter().all(|&x| x == 0));
        }
    }

    #[test]
    fn each_item_is_dealt_once_and_the_last_tiles_come_first() {
        let deal = Deal::new(cut(5, 2));
        let items: Vec<_> = std::iter::from_fn(|| deal.next()).collect();
        assert_eq!((items.len(), deal.items()), (18, 18));
        assert_eq!((items[0].batch(), items[0].kv_head(), items[0].queries()), (0, 0, 4..5));
        assert_eq!((items[17].batch(), items[17].kv_head(), items[17].queries()), (1, 2, 0..2));
        assert!(deal.next().is_none() && deal.next().is_none());
    }

    #[test]
    fn a_row_of_another_item_is_refused() {
        let mut out = Array4::<u8>::zeros((2, 5, 4, 1));
        let (deal, other) = (Deal::new(cut(4, 2)), Deal::new(cut(4, 2)));
        let mut view = out.view_mut();
        let rows = deal.share(&mut view);
        let (mut item, mut stranger) = (deal.next().unwrap(), other.next().unwrap());
        let write = |item: &mut Item<'_>, head, query, row: &[u8]| {
            // In a debug build the refusal is an assertion as well.
            let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| rows.write_row(item, head, query, row)));
        };
        write(&mut item, 1, 2, &[1]);
        write(&mut item, 0, 1, &[1]);
        write(&mut item, 0, 4, &[1]);
        write(&mut item, 5, 2, &[1]);
        write(&mut item, 0, 2, &[1, 1]);
        write(&mut stranger, 0, 2, &[1]);
        rows.write_row(&mut item, 2, 3, &[1]);
        assert_eq!(out.iter().filter(|&&x| x != 0).count(), 1);
        assert_eq!(out[(0, 2, 3, 0)], 1);
    }
}
