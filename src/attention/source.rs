//! Where a walk finds its keys and values: tiles of 64 keys, in the layout that the kernels read.

use ndarray::{ArrayView4, s};
use std::ops::Range;

use crate::element::Element;
use crate::kernels::{
    Finite, KEYS, Kernels, Next, Operand, PANEL, SplitPlace, SplitRoom, SplitTile, Splitting, Unsplit, Upcoming,
    are_lines,
};

/// A tile of keys and values.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packed<'a, T> {
    /// `[panels][head_dim][16]`
    pub(crate) keys: Operand<'a, T>,
    /// `[width / 16][64][16]`; in the type that is computed in, unless all of them are finite.
    pub(crate) values: Operand<'a, T>,
    /// Both of them for the matrix unit, if it multiplies; then nobody reads the values otherwise.
    pub(crate) split: Option<SplitTile<'a, T>>,
    pub(crate) finite: Finite,
    /// The keys and values of the tile after.
    pub(crate) next: Option<Next<'a, T>>,
}

/// Which keys a walk wants.
#[derive(Debug, Clone)]
pub(crate) struct Wanted {
    pub(crate) entry: usize,
    pub(crate) kv_head: usize,
    /// Within one tile, from its first one on.
    pub(crate) keys: Range<usize>,
    /// What will be wanted after them.
    pub(crate) next: Option<Coming>,
    /// How many groups of rows will read them.
    pub(crate) groups: usize,
}

/// The keys that a walk will want after others, or the next walk of its thread.
#[derive(Debug, Clone)]
pub(crate) struct Coming {
    pub(crate) entry: usize,
    pub(crate) kv_head: usize,
    pub(crate) keys: Range<usize>,
}

/// Keys and values of a call.
pub(crate) trait Source<T: 'static>: Sync {
    /// Some keys and their values. `room` has space for a tile of each and can be used or not. With room to split them, they are
    /// split if they fit the matrix unit.
    fn tile<'s>(
        &'s self,
        kernels: &Kernels<T>,
        wanted: Wanted,
        room: [&'s mut [T]; 2],
        split: Option<SplitRoom<'s, '_, T>>,
    ) -> Packed<'s, T>;

    /// Begins to split a tile, which [`Source::tile`] is asked for afterwards with the same room, `done` if all of it fits. `None`
    /// where nothing is won by that.
    fn begin<'s>(
        &'s self,
        kernels: &'s Kernels<T>,
        coming: &Coming,
        room: [&'s mut [T]; 2],
        place: SplitPlace<'s, T>,
    ) -> Option<Splitting<'s, T>>;
}

/// Keys and values as arrays, packed for every walk that meets them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Arrays<'a, T> {
    /// `[batch, num_kv_heads, kv_len, head_dim]`
    pub(super) k: ArrayView4<'a, T>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`
    pub(super) v: ArrayView4<'a, T>,
}

impl<T: Element> Source<T> for Arrays<'_, T> {
    fn tile<'s>(
        &'s self,
        kernels: &Kernels<T>,
        Wanted { entry, kv_head, keys, next, .. }: Wanted,
        [panels, rows]: [&'s mut [T]; 2],
        mut split: Option<SplitRoom<'s, '_, T>>,
    ) -> Packed<'s, T> {
        debug_assert!(keys.start.is_multiple_of(KEYS) && keys.len() <= KEYS && panels.len().is_multiple_of(PANEL));
        let done = split.as_ref().is_some_and(|room| room.done);
        let v = self.v.slice(s![entry, kv_head, keys.clone(), ..]);
        // Lines of memory are split as they are, and packed only if they do not fit.
        let lines = split.is_some() && are_lines(v);
        if !done {
            kernels.pack_panels(self.k.slice(s![entry, kv_head, keys, ..]), panels);
        }
        let mut finite = if done || lines { Finite::All } else { kernels.pack_values(v, rows).into() };
        let mut fits = done
            || split.as_mut().is_some_and(|room| {
                let values = if lines { Unsplit::Rows(v) } else { Unsplit::Tile(Operand::Own(&*rows)) };
                kernels.split_tile(Operand::Own(panels), values, room)
            });
        if !fits && let Some(room) = &mut split {
            if lines {
                finite = kernels.pack_values(v, rows).into();
            }
            fits = kernels.split_seen(panels, rows, room);
        }
        let split = split.filter(|_| fits).map(SplitRoom::tile);
        let next = next.map(|Coming { entry, kv_head, keys }| {
            let next = s![entry, kv_head, keys, ..];
            Next::Rows([Upcoming::new(self.k.slice(next)), Upcoming::new(self.v.slice(next))])
        });
        Packed { keys: Operand::Own(panels), values: Operand::Own(rows), split, finite, next }
    }

    fn begin<'s>(
        &'s self,
        kernels: &'s Kernels<T>,
        Coming { entry, kv_head, keys }: &Coming,
        [panels, _]: [&'s mut [T]; 2],
        place: SplitPlace<'s, T>,
    ) -> Option<Splitting<'s, T>> {
        let tile = s![*entry, *kv_head, keys.clone(), ..];
        let v = Some(self.v.slice(tile)).filter(|v| are_lines(*v))?;
        kernels.pack_panels(self.k.slice(tile), panels);
        kernels.begin_split(Operand::Own(panels), Unsplit::Rows(v), place)
    }
}
