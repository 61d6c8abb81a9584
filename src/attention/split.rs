//! Few queries, many keys: the keys of a KV head are cut into chunks, so that there is work for all threads.
//!
//! ```text
//! for each item (batch entry, KV head, chunk of keys):                 dealt to the threads
//!     (o, m, l) of the item <- the walk of all rows over the chunk             one state for each item
//! for each (batch entry, KV head):
//!     m = max_c m_c,   o = sum_c 2^(m_c - m) o_c,   l = sum_c 2^(m_c - m) l_c  in ascending order
//!     context, lse <- o / l, m + ln l
//! ```
//!
//! (Flash-Decoding, Dao et al. 2023, <https://pytorch.org/blog/flash-decoding/>.) The heads of a group are rows of one
//! walk, so the keys and values of a group are read once. Chunks depend on the lengths and the mask, never on the
//! threads, and so do the bits of the result.

use super::room::Room;
use super::walk::{Call, Rows, State, Walk};
use super::workspace::{ItemSize, Workspace};
use super::{Outputs, schedule};
use crate::element::Element;
use crate::error::Result;
use crate::kernels::{Blocks, Deal, KEYS};
use crate::parallel;
use ndarray::{ArrayViewMut2, Axis, s};

/// Tiles of a chunk, if the call is to be cut: rows few, items few, keys many.
pub(super) fn chunk_tiles<T: Element>(call: &Call<'_, '_, T>) -> Option<usize> {
    let heads = &*call.rules.heads;
    let rows = call.dims.q_len.saturating_mul(heads.largest_group());
    let items = call.dims.batch.saturating_mul(heads.num_read());
    schedule::chunk_tiles(rows, items, || longest_span(call))
}

/// The largest number of tiles that the rows of a batch entry can see.
fn longest_span<T: Element>(call: &Call<'_, '_, T>) -> usize {
    let tiles = |entry| call.tiles(&call.rules.mask(entry), 0..call.dims.q_len).len();
    (0..call.dims.batch).map(tiles).max().unwrap_or(0)
}

/// Takes the memory that a call like this one needs once there are `keys` keys, so that the steps until then take none.
pub(super) fn make_room<T: Element>(
    call: &Call<'_, '_, T>,
    keys: usize,
    query_tile: Option<usize>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let (dims, heads) = (&call.dims, &*call.rules.heads);
    let items = dims.batch.saturating_mul(heads.num_read());
    let all_rows = dims.q_len.saturating_mul(heads.largest_group());
    let chunks = schedule::most_chunks(all_rows, items, keys.div_ceil(KEYS));
    let ItemSize { biased, unit, .. } = ItemSize::new(0, *dims, call.rules);
    let (group, mods) = (heads.largest_group(), [biased, unit]);
    let tile = schedule::query_tile(dims, group, mods, query_tile);
    let together = if query_tile.is_none() { schedule::tiles_together(dims, group, mods, tile) } else { 1 };
    let (rows, parts) = match chunks {
        0 => (tile.saturating_mul(together).min(dims.q_len.max(1)).saturating_mul(group), dims.q_len.div_ceil(tile)),
        _ => (all_rows, chunks),
    };
    let distances = call.rules.relative_keys.map_or(0, |keys| keys.most());
    let size = ItemSize { distances, ..ItemSize::new(rows, *dims, call.rules) };
    let workers = parallel::workers(f64::INFINITY, items.saturating_mul(parts));
    workspace.split(workers, &size, items.saturating_mul(chunks)).map(drop)
}

/// Fills context and lse. `chunk_tiles` tiles of keys make an item.
pub(super) fn forward<'p, T: Element>(
    call: &'p Call<'p, '_, T>,
    chunk_tiles: usize,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = &call.dims;
    let heads = &*call.rules.heads;
    let kernels = T::kernels(call.rules.level);
    let walk = |entry: usize, read: usize| {
        Walk::new(call, kernels, Rows { entry, kv_head: heads.read_kv_head(read), positions: 0..dims.q_len })
    };
    let span = longest_span(call);
    let chunks = span.div_ceil(chunk_tiles).max(1);

    let rows = dims.q_len.saturating_mul(heads.largest_group());
    let size = ItemSize::new(rows, *dims, call.rules);
    let items = dims.batch.saturating_mul(heads.num_read()).saturating_mul(chunks);
    let work = schedule::work(dims, heads.num_read(), span);
    let (workers, states) = workspace.split(parallel::workers(work, items), &size, items)?;
    let numbers = size.state_len();
    let Ok(mut states) = ArrayViewMut2::from_shape((items, numbers), states) else {
        debug_assert!(false, "there is a state for each item");
        return Ok(());
    };
    let blocks = Blocks::new(states.view_mut(), 1, numbers);
    parallel::for_each_worker(workers, |scratch| {
        let (_, mut room) = Room::of(scratch, &size.lengths());
        while let Some(part) = blocks.next() {
            let (group, index) = (part.rows.start / chunks, part.rows.start % chunks);
            let walk = walk(group / heads.num_read(), group % heads.num_read());
            let Some(numbers) = part.view.into_slice() else { continue };
            let mut state = State::new(numbers, &walk.size());
            state.clear();
            let first = walk.tiles().start + index * chunk_tiles;
            walk.run(first..first + chunk_tiles, None, &mut state, &mut room);
        }
    });

    let lse = outputs.lse.map(|lse| lse.insert_axis(Axis(3)));
    let Some(deal) = Deal::new(kernels, heads, dims.q_len.max(1), outputs.context, lse) else {
        debug_assert!(false, "the outputs were made for this call");
        return Ok(());
    };
    // A state is read and added for every chunk: as much work as a few keys.
    let merging = parallel::workers(states.len() as f64 * 4.0, deal.len()).min(workers.len());
    parallel::for_each_worker(&mut workers[..merging], |scratch| {
        let (mut state, _) = Room::of(scratch, &size.lengths());
        while let Some(mut block) = deal.next() {
            let read = heads.read_index_of(block.kv_head());
            let walk = walk(block.entry(), read);
            state.clear();
            let first = (block.entry() * heads.num_read() + read) * chunks;
            for part in states.slice(s![first..first + chunks, ..]).rows() {
                if let Some(numbers) = part.to_slice() {
                    walk.add(&mut state, numbers);
                }
            }
            walk.write(&mut state, &mut block);
        }
    });
    Ok(())
}
