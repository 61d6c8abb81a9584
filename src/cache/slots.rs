//! What attention needs of a cache, whatever it keeps its numbers in: room for new tokens, and their places.

use ndarray::{Array4, ArrayRef4, s};
use std::ops::Range;
use std::sync::Arc;

use super::{CacheShape, KvCache, Storage};
use crate::attention::{Coming, Packed, Source, Wanted};
use crate::error::{Error, Result, check_shape};
use crate::kernels::{Finite, KEYS, Kernels, Next, Operand, SplitPlace, SplitRoom, Splitting, Unsplit};
use crate::mask::{BoundMask, Held, Mask};
use crate::position::FAR;

/// A cache to read from and write to.
pub(crate) trait Slots<T: 'static>: Source<T> {
    fn shape(&self) -> CacheShape;

    /// The cache as the keys and values of a call.
    fn source(&self) -> &dyn Source<T>;

    /// What each entry holds.
    fn now(&self) -> Held<'_>;

    /// What each entry will hold after the tokens that are planned.
    fn then(&self) -> Held<'_>;

    /// How many tokens can be written before their queries have to be answered.
    fn step(&self) -> usize;

    /// Checks that no query sees a key that a ring has overwritten, wherever the mask puts the queries.
    fn check_reach(&self, mask: &BoundMask<'_>) -> Result<()>;

    /// Checks that the mask, bound to what there will be, puts the queries of new tokens of a ring where the tokens are:
    /// what queries elsewhere see may be overwritten before they are answered.
    fn check_places(&self, mask: &BoundMask<'_>) -> Result<()>;

    /// Checks the arrays of new tokens; returns how many there are.
    fn check_tokens(&self, kv: [&ArrayRef4<T>; 2]) -> Result<usize>;

    /// Checks that `tokens` rows, as far as the mask says that they are valid, have room, and makes every page that they
    /// will be written to the cache's own.
    fn plan(&mut self, tokens: usize, mask: &Mask) -> Result<()>;

    /// Writes the rows `rows` of new tokens, of which each entry has as many as were planned. Of a ring, later tokens take
    /// the slots of earlier ones.
    fn write(&mut self, kv: [&ArrayRef4<T>; 2], rows: Range<usize>);

    /// Takes tokens back that have been planned and written, the first [`Slots::step`] of them at most.
    fn take_back(&mut self, tokens: usize, mask: &Mask);

    /// The keys and values of all positions `0..kv_len`, with new tokens where they are planned to go, as they will be
    /// stored. For the paths that read arrays.
    fn arrays(&self, new: Option<[&ArrayRef4<T>; 2]>, kv_len: usize) -> Result<[Array4<T>; 2]>;
}

impl<S: Storage> Slots<S::Element> for KvCache<S> {
    fn shape(&self) -> CacheShape {
        self.shape
    }

    fn source(&self) -> &dyn Source<S::Element> {
        self
    }

    fn now(&self) -> Held<'_> {
        Held { lengths: Some(&self.lengths), last: self.window, room: Some(self.slots()) }
    }

    fn then(&self) -> Held<'_> {
        Held { lengths: Some(&self.planned), ..self.now() }
    }

    fn step(&self) -> usize {
        self.window.map_or(usize::MAX, |window| (self.slots() + 1).saturating_sub(window))
    }

    fn check_reach(&self, mask: &BoundMask<'_>) -> Result<()> {
        let Some(window) = self.window else { return Ok(()) };
        for (entry, &oldest) in self.oldest.iter().enumerate() {
            if mask.sees_before(entry, oldest) {
                let got = usize::try_from(mask.bottom_right(entry)).unwrap_or(0);
                return Err(Error::Overwritten { entry, lowest: oldest + (window - 1), got });
            }
        }
        Ok(())
    }

    fn check_places(&self, mask: &BoundMask<'_>) -> Result<()> {
        if self.window.is_none() {
            return Ok(());
        }
        for (entry, (&length, &planned)) in self.lengths.iter().zip(&self.planned).enumerate() {
            let position = mask.bottom_right(entry);
            if planned > length && i64::try_from(length) != Ok(position) {
                let expected = "one that puts the queries of a ring where their tokens are";
                let got = format!("the first query of entry {entry} at {position} and its token at {length}");
                return Err(Error::value("mask", expected, got));
            }
        }
        Ok(())
    }

    fn take_back(&mut self, tokens: usize, mask: &Mask) {
        for (entry, (length, planned)) in self.lengths.iter_mut().zip(&self.planned).enumerate() {
            *length = planned - mask.valid_queries(entry, tokens);
        }
    }

    fn arrays(&self, new: Option<[&ArrayRef4<S::Element>; 2]>, kv_len: usize) -> Result<[Array4<S::Element>; 2]> {
        self.with_new(new, kv_len)
    }

    fn check_tokens(&self, [k, v]: [&ArrayRef4<S::Element>; 2]) -> Result<usize> {
        let CacheShape { batch, num_kv_heads, head_dim, value_dim, .. } = self.shape;
        let (batch, heads) = (Some(batch), Some(num_kv_heads));
        check_shape("k", "[batch, num_kv_heads, tokens, head_dim]", [batch, heads, None, Some(head_dim)], k.shape())?;
        let tokens = k.dim().2;
        let expected = [batch, heads, Some(tokens), Some(value_dim)];
        check_shape("v", "[batch, num_kv_heads, tokens, value_dim]", expected, v.shape())?;
        Ok(tokens)
    }

    fn plan(&mut self, tokens: usize, mask: &Mask) -> Result<()> {
        let capacity = match self.window {
            // A ring goes on for as long as positions can be told apart.
            Some(_) => usize::try_from(FAR).unwrap_or(usize::MAX),
            None => self.shape.capacity,
        };
        for (entry, (planned, &length)) in self.planned.iter_mut().zip(&self.lengths).enumerate() {
            let requested = mask.valid_queries(entry, tokens);
            match length.checked_add(requested).filter(|&after| after <= capacity) {
                Some(after) => *planned = after,
                None => return Err(Error::CacheFull { entry, capacity, length, requested }),
            }
        }
        for entry in 0..self.shape.batch {
            let tiles = self.lengths[entry] / KEYS..self.planned[entry].div_ceil(KEYS);
            for tile in tiles.take(self.tiles) {
                let index = entry * self.tiles + tile % self.tiles;
                if Arc::get_mut(&mut self.pages[index]).is_none() {
                    self.pages[index] = self.pages[index].copy().ok_or_else(|| self.no_memory())?;
                }
            }
        }
        Ok(())
    }

    fn write(&mut self, [k, v]: [&ArrayRef4<S::Element>; 2], rows: Range<usize>) {
        let slots = self.slots();
        for entry in 0..self.shape.batch {
            let first = self.lengths[entry];
            let count = rows.len().min(self.planned[entry] - first);
            // What later rows would overwrite need not be written.
            let mut done = count.saturating_sub(slots);
            while done < count {
                let position = first + done;
                let n = (KEYS - position % KEYS).min(count - done);
                let from = rows.start + done..rows.start + done + n;
                let page = self.pages.get_mut(entry * self.tiles + position / KEYS % self.tiles).and_then(Arc::get_mut);
                debug_assert!(page.is_some(), "the plan has made the page the cache's own");
                if let Some(page) = page {
                    let [k, v] = [k, v].map(|tokens| tokens.slice(s![entry, .., from.clone(), ..]));
                    for (head, (k, v)) in k.outer_iter().zip(v.outer_iter()).enumerate() {
                        page.write(head, position % KEYS, k, v);
                    }
                }
                done += n;
            }
            self.lengths[entry] = first + count;
            self.oldest[entry] = self.oldest[entry].max((first + count).saturating_sub(slots));
        }
    }
}

impl<S: Storage> Source<S::Element> for KvCache<S> {
    fn tile<'s>(
        &'s self,
        kernels: &Kernels<S::Element>,
        Wanted { entry, kv_head, keys, next, groups }: Wanted,
        [panels, rows]: [&'s mut [S::Element]; 2],
        mut split: Option<SplitRoom<'s, '_, S::Element>>,
    ) -> Packed<'s, S::Element> {
        let first = keys.start;
        let Some(page) = self.page(entry, first) else {
            debug_assert!(false, "a visible key is in the cache");
            return Packed {
                keys: Operand::Own(panels),
                values: Operand::Own(rows),
                split: None,
                finite: Finite::All,
                next: None,
            };
        };
        let (mut keys, mut values) = (S::operand(page.keys(kv_head)), S::operand(page.values(kv_head)));
        let finite = page.finite(kv_head);
        let fits = split.as_mut().is_some_and(|room| {
            room.done || kernels.split_tile(keys, Unsplit::Tile(values), room) || {
                let (panels, rows) = (&mut *panels, &mut *rows);
                kernels.copied(keys, panels);
                kernels.copied(values, rows);
                kernels.split_seen(panels, rows, room)
            }
        });
        let split = split.filter(|_| fits).map(SplitRoom::tile);
        // Widening by the load costs less than a copy, once. The product that leaves keys out does not know how.
        if groups > 1 && split.is_none() {
            keys = Operand::Own(kernels.widened(keys, panels));
        }
        if groups > 1 && split.is_none() || finite == Finite::NotAll {
            values = Operand::Own(kernels.widened(values, rows));
        }
        let next = next.and_then(|Coming { entry, kv_head, keys }| {
            let page = self.page(entry, keys.start).filter(|_| keys.start < self.lengths[entry])?;
            let [keys, values] = [page.keys(kv_head), page.values(kv_head)].map(S::operand);
            Some(Next::InPlace { keys, values })
        });
        Packed { keys, values, split, finite, next }
    }

    fn begin<'s>(
        &'s self,
        kernels: &'s Kernels<S::Element>,
        Coming { entry, kv_head, keys }: &Coming,
        _: [&'s mut [S::Element]; 2],
        place: SplitPlace<'s, S::Element>,
    ) -> Option<Splitting<'s, S::Element>> {
        let page = self.page(*entry, keys.start)?;
        let [keys, values] = [page.keys(*kv_head), page.values(*kv_head)].map(S::operand);
        kernels.begin_split(keys, Unsplit::Tile(values), place)
    }
}
