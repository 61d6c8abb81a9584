//! How the work of the tiled path is cut into items: (batch entry, KV head, block of query positions).
//!
//! Cuts depend on shapes only. A row's result does not depend on the cut either: it meets the same keys in the same
//! order whichever rows share its item.

use super::backward::MAX_TILE;
use super::problem::Dims;
use crate::kernels::{KEYS, MAX_ROWS};

/// Numbers of queries and context that an item holds at most: 400 KiB of `f32`, a fifth of a second-level cache of
/// 2 MiB. The keys and values of a tile are packed once for all rows of an item, which costs as much as 8 of them.
const MOST_NUMBERS: usize = 100 * 1024;

/// Items at least, as long as they keep [`FEWEST_ROWS`]: dealt one by one, 16 of them leave 16 threads no more than an
/// item apart.
const FEWEST_ITEMS: usize = 16;

/// Rows of an item at least where more items are wanted: packing costs below 5 %.
const FEWEST_ROWS: usize = 192;

/// Query positions of an item. `group` is the largest number of query heads that share a KV head; `wish` is the caller's.
pub(crate) fn query_tile(dims: &Dims, group: usize, wish: Option<usize>) -> usize {
    let (q_len, group) = (dims.q_len.max(1), group.max(1));
    let chosen = wish.unwrap_or_else(|| {
        let rows = q_len.saturating_mul(group);
        let wanted = FEWEST_ITEMS.div_ceil(dims.batch.saturating_mul(dims.num_kv_heads).max(1));
        let most_rows = (MOST_NUMBERS / (dims.head_dim + dims.value_dim).max(1)).max(FEWEST_ROWS);
        let tiles = rows.div_ceil(most_rows).max(wanted.min(rows / FEWEST_ROWS)).max(1);
        // Whole groups of six rows, the height of a register block, for one head to a group.
        q_len.div_ceil(tiles).next_multiple_of(if group == 1 { 6 } else { 1 })
    });
    chosen.clamp(1, q_len)
}

/// Numbers that a block of keys of backward holds at most: 640 KiB of `f32`, a third of a second-level cache of 2 MiB.
const MOST_KEY_NUMBERS: usize = 160 * 1024;

/// Keys of a block at most. More of them would pack queries less often, which costs 1 % of 256 keys, and leave fewer
/// items.
const MOST_KEYS: usize = 256;

/// Keys of a work item of backward: a multiple of 64.
pub(crate) fn key_block(dims: &Dims) -> usize {
    let width = dims.head_dim.saturating_mul(3).saturating_add(dims.value_dim.saturating_mul(2)).max(1);
    let most = (MOST_KEY_NUMBERS / width / KEYS * KEYS).clamp(KEYS, MOST_KEYS);
    // Blocks of about the same length.
    let blocks = dims.kv_len.div_ceil(most).max(1);
    dims.kv_len.div_ceil(blocks).next_multiple_of(KEYS).max(KEYS)
}

/// Numbers of queries that a step of backward holds at most: with their gradients and scores they stay in a first-level
/// cache of 48 KiB for the products that read them.
const MOST_QUERY_NUMBERS: usize = 6 * 1024;

/// Query positions of a step of backward; `wish` is the caller's.
pub(crate) fn back_tile(dims: &Dims, wish: Option<usize>) -> usize {
    let chosen = wish.unwrap_or_else(|| {
        let most = MOST_QUERY_NUMBERS / dims.head_dim.max(dims.value_dim).max(1);
        most.clamp(2 * KEYS / 3, 3 * KEYS / 2) / (MAX_ROWS * 2) * (MAX_ROWS * 2)
    });
    chosen.clamp(1, dims.q_len.max(1)).min(MAX_TILE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(batch: usize, num_heads: usize, num_kv_heads: usize, q_len: usize) -> Dims {
        Dims { batch, num_heads, num_kv_heads, q_len, kv_len: q_len, head_dim: 64, value_dim: 64 }
    }

    #[test]
    fn items_are_neither_few_nor_small() {
        let tile = |d: Dims, group| query_tile(&d, group, None);
        assert_eq!(tile(dims(1, 8, 8, 2048), 1), 684);
        assert_eq!(tile(dims(1, 8, 8, 512), 1), 258);
        assert_eq!(tile(dims(8, 12, 12, 128), 1), 128);
        assert_eq!(tile(dims(1, 32, 1, 100), 32), 7);
        let wide = Dims { head_dim: 1 << 20, ..dims(1, 1, 1, 4096) };
        assert_eq!(tile(wide, 1), 192);
    }

    #[test]
    fn extremes_are_cut_too() {
        assert_eq!(query_tile(&dims(1, 1, 1, 0), 1, None), 1);
        assert_eq!(query_tile(&dims(1, 1, 1, 5), 1, Some(0)), 1);
        assert_eq!(query_tile(&dims(1, 1, 1, 5), 1, Some(usize::MAX)), 5);
        assert_eq!(query_tile(&dims(1, 1000, 1, 5), 1000, None), 1);
    }
}
