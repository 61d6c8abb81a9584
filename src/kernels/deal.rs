//! Many threads write one output: work items are dealt one by one, and an item can write its own rows and no others.
//!
//! The output is `[batch, num_heads, q_len, width]` with any strides. Item `index` stands for one batch entry, one KV
//! head and one block of query positions; its rows are those positions of the query heads that read the KV head. The
//! items of a deal are handed out once each, so their rows are disjoint, and a [`Block`] lets nothing else through.
//! While many are left, a thread is handed neighbours together: they need their keys prepared once.
//! (The rows of a group are no slice of the output, so a `&mut` of it cannot be split. `blocks.rs` and `relay.rs` deal
//! blocks of a matrix and parts of gradients for the same reason.)

use super::real::Real;
use super::table::Kernels;
use super::upcoming::Upcoming;
use crate::heads::HeadMap;
use ndarray::{ArrayViewMut4, Axis};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Batch entry, KV head and query positions.
type Place = (usize, usize, Range<usize>);

/// Deals the work items of one call.
#[derive(Debug)]
pub(crate) struct Deal<'a, T: 'static> {
    next: AtomicUsize,
    kernels: &'static Kernels<T>,
    heads: &'a HeadMap,
    batch: usize,
    q_len: usize,
    query_tile: usize,
    /// Neighbours that are handed out together at most, above 0, and for how many threads something is to be left.
    most_together: usize,
    threads: usize,
    /// `[batch, num_heads, q_len, value_dim]`
    context: Rows<'a, T>,
    /// `[batch, num_heads, q_len, 1]`
    lse: Option<Rows<'a, T>>,
}

impl<'a, T: Real> Deal<'a, T> {
    /// Blocks of `query_tile > 0` positions. `None` if the two outputs differ in batch, heads or length.
    pub(crate) fn new(
        kernels: &'static Kernels<T>,
        heads: &'a HeadMap,
        query_tile: usize,
        context: ArrayViewMut4<'a, T>,
        lse: Option<ArrayViewMut4<'a, T>>,
    ) -> Option<Self> {
        let (batch, num_heads, q_len, _) = context.dim();
        let (context, lse) = (Rows::new(context), lse.map(Rows::new));
        let same = lse.as_ref().is_none_or(|lse| context.shape[..3] == lse.shape[..3]);
        let fits = same && num_heads == heads.num_heads() && query_tile > 0;
        fits.then(|| Self {
            next: AtomicUsize::new(0),
            kernels,
            heads,
            batch,
            q_len,
            query_tile,
            most_together: 1,
            threads: 1,
            context,
            lse,
        })
    }

    /// Hands out up to `most` neighbours together, as long as each of so many threads finds as many left.
    pub(crate) fn together(self, most: usize, threads: usize) -> Self {
        Self { most_together: most.max(1), threads: threads.max(1), ..self }
    }

    /// Number of items.
    pub(crate) fn len(&self) -> usize {
        self.groups().saturating_mul(self.tiles())
    }

    fn tiles(&self) -> usize {
        self.q_len.div_ceil(self.query_tile)
    }

    fn groups(&self) -> usize {
        self.batch.saturating_mul(self.heads.num_read())
    }

    /// The next item that nobody has, or some. The last positions come first: under a causal mask they see the most keys, and
    /// the longest items must not be the last ones.
    pub(crate) fn next(&self) -> Option<Block<'_, T>> {
        let take = |index| self.items(index).map(|(count, _)| index + count);
        let index = self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take).ok()?;
        let (_, (entry, kv_head, positions)) = self.items(index)?;
        Some(Block { deal: self, entry, kv_head, positions })
    }

    /// Where the items are that nobody has yet: a guess at what this thread will do next.
    pub(crate) fn upcoming(&self) -> Option<Place> {
        self.items(self.next.load(Ordering::Relaxed)).map(|(_, items)| items)
    }

    /// How many items are handed out from one on, and what they are: neighbours of one KV head.
    ///
    /// ```text
    /// index       0 1 2 3 | 4 5 6 7 | 8 9 | 10 11          two groups of 6 tiles, at most 4 together
    /// group       0       | 1       | 0   | 1
    /// tile        5 4 3 2 | 5 4 3 2 | 1 0 | 1  0
    /// ```
    fn items(&self, index: usize) -> Option<(usize, Place)> {
        let left = self.len().checked_sub(index).filter(|&left| left > 0)?;
        let (tiles, groups) = (self.tiles(), self.groups());
        let chunk = index / (self.most_together * groups);
        let first = chunk * self.most_together;
        let length = self.most_together.min(tiles - first);
        let (group, place) = ((index - first * groups) / length, (index - first * groups) % length);
        let count = (length - place).min((left / self.threads).max(1));
        let last = tiles - first - place;
        let positions = (last - count) * self.query_tile..self.q_len.min(last * self.query_tile);
        let read = self.heads.num_read();
        let kv_head = self.heads.read_kv_head(group % read);
        Some((count, (group / read, kv_head, positions)))
    }
}

/// One work item. There is one of each, which is why it cannot be cloned.
#[derive(Debug)]
pub(crate) struct Block<'a, T: 'static> {
    deal: &'a Deal<'a, T>,
    entry: usize,
    kv_head: usize,
    positions: Range<usize>,
}

impl<T: Real> Block<'_, T> {
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

    /// Where the rows of the first head will be written, which are all unless it shares the KV head with others.
    pub(crate) fn output(&self) -> Option<Upcoming> {
        let deal = self.deal;
        let head = deal.heads.query_heads(self.kv_head).next()?;
        let rows = &deal.context;
        let [entry, head, first] = [self.entry, head, self.positions.start].map(|at| at as isize);
        let offset = entry * rows.strides[0] + head * rows.strides[1] + first * rows.strides[2];
        Some(Upcoming::at(
            rows.start.wrapping_offset(offset),
            [self.positions.len(), rows.shape[3]],
            [rows.strides[2], rows.strides[3]],
        ))
    }

    /// Whether [`HeadRows::write`] does anything with the lse.
    pub(crate) fn wants_lse(&self) -> bool {
        self.deal.lse.is_some()
    }

    /// The rows of one of the query heads; `None` if it belongs to other items.
    pub(crate) fn head(&mut self, head: usize) -> Option<HeadRows<'_, T>> {
        let heads = self.deal.heads;
        let own = head < heads.num_heads() && heads.kv_head(head) == Some(self.kv_head);
        debug_assert!(own, "head {head} belongs to another item");
        own.then(|| HeadRows { deal: self.deal, entry: self.entry, head, positions: self.positions.clone() })
    }
}

/// The rows of one query head of an item.
#[derive(Debug)]
pub(crate) struct HeadRows<'b, T: 'static> {
    deal: &'b Deal<'b, T>,
    entry: usize,
    head: usize,
    positions: Range<usize>,
}

impl<T: Real> HeadRows<'_, T> {
    /// Writes `sum / divisor` `[value_dim]` and the lse of one query. A row that is not the item's own is left alone.
    #[inline]
    pub(crate) fn write(&mut self, position: usize, sum: &[T], divisor: T, lse: T) {
        let deal = self.deal;
        let own = self.positions.contains(&position);
        debug_assert!(own, "position {position} belongs to another item");
        if own {
            // SAFETY: the row belongs to this item (checked above, and by `Block::head`, which borrows the block while these
            // rows exist), every item exists once (`Deal::next` hands each index out once) and each (entry, head, position)
            // belongs to one item, so no other thread touches the row; entry, head and position lie within the shape that
            // `Deal::new` compared.
            unsafe {
                let at = [self.entry, self.head, position];
                deal.context.write(at, sum, |sum, to| deal.kernels.divide(sum, to, divisor));
                if let Some(rows) = &deal.lse {
                    rows.write(at, &[lse], |lse, to| to.copy_from_slice(lse));
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

/// Elements of a row that is not contiguous which are written together.
const PIECE: usize = 64;

impl<'a, T: Real> Rows<'a, T> {
    fn new(mut array: ArrayViewMut4<'a, T>) -> Self {
        let strides = [0, 1, 2, 3].map(|axis| array.stride_of(Axis(axis)));
        Self { start: array.as_mut_ptr(), shape: array.dim().into(), strides, array: PhantomData }
    }

    /// Has `fill` make a row, or pieces of it, from `row`.
    ///
    /// # Safety
    /// `at` lies within the first three axes, and nobody else reads or writes that row meanwhile.
    #[inline(always)]
    unsafe fn write(&self, at: [usize; 3], row: &[T], fill: impl Fn(&[T], &mut [T])) {
        let offset: isize = at.iter().zip(self.strides).map(|(&index, stride)| index as isize * stride).sum();
        // SAFETY: within the array by this function's contract; a view's offsets do not overflow isize.
        let first = unsafe { self.start.offset(offset) };
        let len = row.len().min(self.shape[3]);
        if self.strides[3] == 1 {
            // SAFETY: the row has shape[3] >= len elements side by side, which are initialised and nobody else's.
            fill(&row[..len], unsafe { std::slice::from_raw_parts_mut(first, len) });
            return;
        }
        let mut piece = [T::zero(); PIECE];
        for (start, row) in (0..).step_by(PIECE).zip(row[..len].chunks(PIECE)) {
            fill(row, &mut piece[..row.len()]);
            for (j, &x) in (start..).zip(&piece[..row.len()]) {
                // SAFETY: j < shape[3].
                unsafe { first.offset(j as isize * self.strides[3]).write(x) };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Level;
    use ndarray::{Array4, s};

    /// More than one piece.
    const WIDTH: usize = PIECE + 3;

    fn kernels<T: Real>() -> &'static Kernels<T> {
        T::kernels(Level::best())
    }

    fn deal_all(heads: &HeadMap, [query_tile, together]: [usize; 2], mut context: Array4<f64>) -> Array4<f64> {
        let (batch, num_heads, q_len, _) = context.dim();
        let mut lse = Array4::from_elem((batch, num_heads, q_len, 1), -1.0);
        let deal = Deal::new(kernels(), heads, query_tile, context.view_mut(), Some(lse.view_mut())).unwrap();
        let deal = deal.together(together, 3);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    while let Some(mut block) = deal.next() {
                        let entry = block.entry();
                        for head in heads.query_heads(block.kv_head()) {
                            let positions = block.positions();
                            let mut rows = block.head(head).unwrap();
                            for i in positions {
                                let value = (100 * entry + 10 * head + i) as f64;
                                let sum: Vec<f64> = (0..WIDTH).map(|j| 2.0 * (value + 0.005 * j as f64)).collect();
                                rows.write(i, &sum, 2.0, value);
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
        let want = Array4::from_shape_fn((2, 3, 5, WIDTH), |(b, h, i, j)| {
            let value = (100 * b + 10 * h + i) as f64 + 0.005 * j as f64;
            2.0 * value / 2.0
        });
        for heads in [HeadMap::grouped(3, 1), HeadMap::grouped(3, 3), HeadMap::explicit(&[2, 0, 2], 4)] {
            for cut in [1, 2, 5, 9].into_iter().flat_map(|tile| [0, 1, 2, 3, 4, 7].map(|together| [tile, together])) {
                let heads = heads.as_ref().unwrap();
                assert_eq!(deal_all(heads, cut, Array4::from_elem((2, 3, 5, WIDTH), f64::NAN)), want);
                let token_major = Array4::from_elem((2, 5, WIDTH, 3), f64::NAN).permuted_axes([0, 3, 1, 2]);
                assert_eq!(deal_all(heads, cut, token_major), want);
            }
        }
    }

    #[test]
    fn neighbours_are_handed_out_together_while_there_are_enough() {
        let heads = HeadMap::grouped(2, 2).unwrap();
        let mut context = Array4::<f32>::zeros((1, 2, 11, 1));
        let deal = Deal::new(kernels(), &heads, 2, context.view_mut(), None).unwrap().together(4, 2);
        let mut blocks = std::iter::from_fn(|| deal.next()).map(|block| (block.kv_head(), block.positions()));
        // Six tiles of each head, the last of one position.
        let want = [(0, 4..11), (1, 4..11), (0, 0..4), (1, 2..4), (1, 0..2)];
        assert!(want.into_iter().all(|want| blocks.next() == Some(want)) && blocks.next().is_none());
    }

    #[test]
    fn outputs_that_differ_are_refused() {
        let heads = HeadMap::grouped(2, 2).unwrap();
        let (mut a, mut b) = (Array4::<f32>::zeros((1, 2, 3, 4)), Array4::zeros((1, 2, 4, 1)));
        assert!(Deal::new(kernels(), &heads, 1, a.view_mut(), Some(b.view_mut())).is_none());
        let mut c = a.clone();
        assert!(Deal::new(kernels(), &heads, 0, c.view_mut(), Some(a.view_mut())).is_none());
    }

    #[test]
    fn nothing_to_deal_is_dealt() {
        let heads = HeadMap::grouped(2, 2).unwrap();
        for shape in [(0, 2, 3, 4), (1, 2, 0, 4)] {
            let (mut a, mut b) = (Array4::<f32>::zeros(shape), Array4::zeros(shape));
            assert!(Deal::new(kernels(), &heads, 2, a.view_mut(), Some(b.view_mut())).unwrap().next().is_none());
        }
    }
}
