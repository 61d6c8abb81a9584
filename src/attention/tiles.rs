//! How a walk comes by its tiles: packed as it meets them, or for the matrix unit beside the products of the tile before.

use super::room::TilePlace;
use super::source::{Coming, Packed, Wanted};
use super::walk::Walk;
use crate::element::Element;
use crate::kernels::{KEYS, KeyTile, SplitPlace, SplitRoom, Splitting, Upcoming};
use std::ops::Range;

/// One tile of keys, and what memory is asked for while the rows meet them.
pub(super) struct Step {
    pub(super) keys: Range<usize>,
    pub(super) next: Option<Coming>,
    pub(super) output: Option<Upcoming>,
    /// Whether the tile has been split, see [`Walk::begin`].
    pub(super) done: bool,
}

impl<T: Element> Walk<'_, '_, T> {
    /// Keys and values of a tile, which `groups` groups of rows will read; `panel` has room for a panel of them.
    pub(super) fn unpack<'s>(
        &'s self,
        step: &Step,
        groups: usize,
        TilePlace { keys, values, split }: &'s mut TilePlace<'_, T>,
        panel: &mut [T],
    ) -> Packed<'s, T> {
        let at = &self.at;
        let (entry, kv_head) = (at.entry, at.kv_head);
        let wanted = Wanted { entry, kv_head, keys: step.keys.clone(), next: step.next.clone(), groups };
        let hidden = || self.call.hidden(entry, kv_head, step.keys.start / KEYS);
        let place = self.split_place(&step.keys, split);
        let split = self.unit.then_some(SplitRoom { place, done: step.done, panel, hidden: &hidden });
        self.call.source.tile(self.kernels, wanted, [keys, values], split)
    }

    /// Begins to split the tile that comes next, unless nobody sees it; `whole` says that everybody does by structure.
    pub(super) fn begin<'s>(
        &'s self,
        keys: Range<usize>,
        whole: bool,
        TilePlace { keys: panels, values, split }: &'s mut TilePlace<'_, T>,
    ) -> Option<Splitting<'s, T>> {
        if self.mask.is_dense() {
            let seeing = self.seeing(keys.clone(), whole);
            if self.first_seeing(&seeing, seeing.some.start) == seeing.some.end {
                return None;
            }
        }
        let place = self.split_place(&keys, split);
        let coming = Coming { entry: self.at.entry, kv_head: self.at.kv_head, keys };
        self.call.source.begin(self.kernels, &coming, [panels, values], place)
    }

    fn split_place<'s>(&self, keys: &Range<usize>, split: &'s mut [&mut [T]; 2]) -> SplitPlace<'s, T> {
        SplitPlace {
            count: self.call.seen(&self.mask).min(keys.end).saturating_sub(keys.start),
            head_dim: self.call.dims.head_dim,
            width: self.width,
            to: split.each_mut().map(|split| &mut **split),
        }
    }

    /// A tile as group `group` of `groups` meets it.
    pub(super) fn key_tile<'s>(
        &self,
        from: Packed<'s, T>,
        output: Option<Upcoming>,
        panels: Range<usize>,
        group: usize,
        groups: usize,
    ) -> KeyTile<'s, T> {
        let Packed { keys, values, split, finite, next } = from;
        KeyTile { keys, values, split, width: self.width, finite, panels, next, output, group, groups }
    }
}
