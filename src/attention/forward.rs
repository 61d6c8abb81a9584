//! Tiled attention with online softmax: exact, no scores in memory.
//!
//! ```text
//! for each item (batch entry, KV head, block of query positions):      dealt to the threads, longest first
//!     context, lse <- the walk of its rows over all keys that they see         see `walk.rs`
//! ```
//!
//! (FlashAttention, Dao et al. 2022, <https://arxiv.org/abs/2205.14135>, with register-sized groups.) Scratch is bounded
//! by the tile, see [`crate::Workspace`].

use super::Outputs;
use super::room::Room;
use super::schedule::{query_tile, tiles_together};
use super::walk::{Call, Rows, Walk};
use super::workspace::{ItemSize, Scratch, Workspace};
use crate::element::Element;
use crate::error::Result;
use crate::kernels::{Block, Deal, Kernels};
use crate::parallel;
use ndarray::Axis;

/// What an item takes besides its products, counted as so many operations: 1.5 microseconds. (16 heads with 16 tokens take
/// 43 microseconds on one thread and 30 on two.)
const FLOP_PER_ITEM: f64 = 1.5e5;

/// Fills context and lse. `wish` is the caller's number of query positions to an item.
pub(super) fn forward<'p, T: Element>(
    call: &'p Call<'p, '_, T>,
    wish: Option<usize>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = &call.dims;
    let heads = &*call.rules.heads;
    let kernels = T::kernels(call.rules.level);
    let ItemSize { biased, unit, .. } = ItemSize::new(0, *dims, call.rules);
    let (group, mods) = (heads.largest_group(), [biased, unit]);
    let query_tile = query_tile(dims, group, mods, wish);
    let together = if wish.is_none() { tiles_together(dims, group, mods, query_tile) } else { 1 };
    let lse = outputs.lse.map(|lse| lse.insert_axis(Axis(3)));
    let Some(deal) = Deal::new(kernels, heads, query_tile, outputs.context, lse) else {
        debug_assert!(false, "the outputs were made for this call");
        return Ok(());
    };
    let workers = workspace.workers(parallel::workers(dims.flop() + FLOP_PER_ITEM * deal.len() as f64, deal.len()));
    // Which items a thread gets depends on time; what it has room for must not.
    let positions = query_tile.saturating_mul(together).min(dims.q_len.max(1));
    let rows = positions.saturating_mul(group);
    let lengths = ItemSize::new(rows, *dims, call.rules).lengths();
    workers.iter_mut().try_for_each(|scratch| scratch.reserve(&lengths))?;
    let deal = deal.together(together, workers.len());
    parallel::for_each_worker(workers, |scratch| {
        while let Some(block) = deal.next() {
            let after = deal.upcoming().map(|(entry, kv_head, positions)| Rows { entry, kv_head, positions });
            item(call, kernels, block, after, scratch);
        }
    });
    Ok(())
}

/// One work item, and what comes after it if no other thread takes that first.
fn item<'p, T: Element>(
    call: &'p Call<'p, '_, T>,
    kernels: &'static Kernels<T>,
    mut block: Block<'_, T>,
    after: Option<Rows>,
    scratch: &mut Scratch<T>,
) {
    let at = Rows { entry: block.entry(), kv_head: block.kv_head(), positions: block.positions() };
    let walk = Walk::new(call, kernels, at).with_output(block.output());
    let (mut state, mut room) = Room::of(scratch, &walk.size().lengths());
    state.clear();
    walk.run(walk.tiles(), after, &mut state, &mut room);
    walk.write(&mut state, &mut block);
}
