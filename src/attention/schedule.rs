//! How the work of the tiled path is cut into items: (batch entry, KV head, block of query positions).
//!
//! Cuts depend on shapes only. A row's result does not depend on the cut either: it meets the same keys in the same
//! order whichever rows share its item.

use super::backward_stage::STAGE_ROWS;
use super::backward_tile::MAX_TILE;
use super::problem::Dims;
use crate::kernels::{KEYS, MAX_ROWS, UNIT_ROWS};

/// Numbers of queries and context that an item holds at most: 400 KiB of `f32`, a fifth of a second-level cache of
/// 2 MiB. The keys and values of a tile are packed once for all rows of an item, which costs as much as 8 of them.
const MOST_NUMBERS: usize = 100 * 1024;

/// The same where the matrix unit multiplies: for it tiles are split too, and it takes less time for a row, so that 400 KiB
/// are 1.02 to 1.08 of the time of 800, and 1600 KiB 1.00 to 1.06 (2048 to 4096 queries, 128 and 256 numbers to a row).
const MOST_UNIT_NUMBERS: usize = 200 * 1024;

/// Items at least, as long as they keep [`FEWEST_ROWS`]: 16 of them leave 16 threads no more than an item apart. Fewer threads
/// are dealt neighbours together, see [`tiles_together`].
const FEWEST_ITEMS: usize = 16;

/// Rows of an item at least where more items are wanted: packing costs below 5 %.
const FEWEST_ROWS: usize = 192;

/// Query positions of an item. `group` is the largest number of query heads that share a KV head; `wish` is the caller's.
/// With a bias, as many numbers of it as a tile has keys pass through the cache for each row. `unit` says that the matrix unit
/// multiplies.
pub(crate) fn query_tile(dims: &Dims, group: usize, [biased, unit]: [bool; 2], wish: Option<usize>) -> usize {
    let (q_len, group) = (dims.q_len.max(1), group.max(1));
    let chosen = wish.unwrap_or_else(|| {
        let rows = q_len.saturating_mul(group);
        let wanted = FEWEST_ITEMS.div_ceil(dims.batch.saturating_mul(dims.num_kv_heads).max(1));
        let tiles = rows.div_ceil(most_rows(dims, [biased, unit])).max(wanted.min(rows / FEWEST_ROWS)).max(1);
        // Whole blocks of rows, as far as that takes few positions: 32 of the matrix unit, else six in registers.
        let whole = match (unit, group) {
            (true, _) => UNIT_ROWS >> group.trailing_zeros().min(UNIT_ROWS.trailing_zeros()),
            (false, 1) => MAX_ROWS,
            (false, _) => 1,
        };
        q_len.div_ceil(tiles).next_multiple_of(whole)
    });
    chosen.clamp(1, q_len)
}

/// Items of one KV head that a thread meets as one, while enough are left: the tiles of keys are packed and split once for all
/// of them. Time over that of one by one, 64 numbers to a head, two threads of an Emerald Rapids: 0.93 for one head of 4096
/// queries, 0.93 and 0.96 for 8 heads of 512 and 1024.
const MOST_TOGETHER: usize = 4;

/// How many neighbours of so many query positions may be one item, by the rows that an item may have.
pub(crate) fn tiles_together(dims: &Dims, group: usize, mods: [bool; 2], query_tile: usize) -> usize {
    let rows = query_tile.saturating_mul(group.max(1)).max(1);
    (most_rows(dims, mods) / rows).clamp(1, MOST_TOGETHER)
}

/// Rows of an item at most.
fn most_rows(dims: &Dims, [biased, unit]: [bool; 2]) -> usize {
    let numbers = dims.head_dim + dims.value_dim + if biased { KEYS } else { 0 };
    let most = if unit { MOST_UNIT_NUMBERS } else { MOST_NUMBERS };
    (most / numbers.max(1)).max(FEWEST_ROWS)
}

/// Numbers that a block of keys of backward holds at most: 640 KiB of `f32`, a third of a second-level cache of 2 MiB.
const MOST_KEY_NUMBERS: usize = 160 * 1024;

/// Keys of a block at most. More of them would pack queries less often, which costs 1 % of 256 keys, and leave fewer
/// items.
const MOST_KEYS: usize = 256;

/// Keys of a block for the matrix unit, for which queries are split besides, at any width: 1.01 to 1.05 of the time with 256, and
/// 0.97 to 1.00 with 1024, which leave fewer items (8 heads of 64 numbers, 16 of 128, 1024 queries and keys).
const UNIT_KEYS: usize = 512;

/// Keys of a work item of backward: a multiple of 64. `unit` says that the matrix unit multiplies.
pub(crate) fn key_block(dims: &Dims, unit: bool) -> usize {
    let width = dims.head_dim.saturating_mul(3).saturating_add(dims.value_dim.saturating_mul(2)).max(1);
    let most = if unit { UNIT_KEYS } else { (MOST_KEY_NUMBERS / width / KEYS * KEYS).clamp(KEYS, MOST_KEYS) };
    // Blocks of about the same length.
    let blocks = dims.kv_len.div_ceil(most).max(1);
    dims.kv_len.div_ceil(blocks).next_multiple_of(KEYS).max(KEYS)
}

/// Numbers of queries that a step of backward holds at most: with their gradients and scores they stay in a first-level
/// cache of 48 KiB for the products that read them.
const MOST_QUERY_NUMBERS: usize = 6 * 1024;

/// Query positions of a step for the matrix unit, which reads its operands from the second-level cache too: as many as a stage has
/// (see `backward_stage.rs`). 1.00 to 1.01 of the time with 192 and stages as long, 0.99 to 1.01 with 256 and two stages.
const UNIT_TILE: usize = STAGE_ROWS;

/// Query positions of a step of backward; `wish` is the caller's. `unit` says that the matrix unit multiplies: it adds up whole
/// blocks of its rows, so that a sum has the same bits whatever the wish.
pub(crate) fn back_tile(dims: &Dims, wish: Option<usize>, unit: bool) -> usize {
    let chosen = match wish {
        Some(wish) if unit => wish.clamp(1, MAX_TILE).next_multiple_of(UNIT_ROWS),
        Some(wish) => wish,
        None if unit => UNIT_TILE,
        None => {
            let most = MOST_QUERY_NUMBERS / dims.head_dim.max(dims.value_dim).max(1);
            most.clamp(2 * KEYS / 3, 3 * KEYS / 2) / (MAX_ROWS * 2) * (MAX_ROWS * 2)
        }
    };
    chosen.clamp(1, dims.q_len.max(1)).min(MAX_TILE)
}

/// Rows up to which keys are cut instead of queries: twice [`FEWEST_ROWS`], from where on queries make items enough.
const MOST_SPLIT_ROWS: usize = 384;

/// Items of a split call, as far as its chunks stay within the bounds below: 64 of them leave two threads 1.5 % apart.
const SPLIT_ITEMS: usize = 64;

/// Calls with more items than this are not split: entries and heads are work enough.
const MOST_WHOLE_ITEMS: usize = 256;

/// Tiles of a chunk at least and at most. The state of a chunk is written and merged once, which costs as much as a few
/// keys; and chunks of 2048 keys keep batches of unlike lengths balanced.
const FEWEST_CHUNK_TILES: usize = 4;
const MOST_CHUNK_TILES: usize = 32;

/// Tiles of a chunk at least where [`FEWEST_SPLIT_ITEMS`] are made without shorter ones: 8 heads of 512 keys in one chunk each
/// take 0.92 of the time of two (two threads of a Zen 3), 4 heads 1.1 to 1.2.
const EASY_CHUNK_TILES: usize = 8;
const FEWEST_SPLIT_ITEMS: usize = 8;

/// Tiles of a chunk of keys, if the keys of `rows` rows are to be cut. `items` counts entries and KV heads, `span` gives
/// the tiles that an entry sees at most. Depends on shapes and the mask only, and not on how queries are cut.
pub(crate) fn chunk_tiles(rows: usize, items: usize, span: impl Fn() -> usize) -> Option<usize> {
    if rows > MOST_SPLIT_ROWS || items > MOST_WHOLE_ITEMS {
        return None;
    }
    let span = span();
    let all = span.saturating_mul(items);
    let fewest = fewest_chunk_tiles(rows).max(EASY_CHUNK_TILES.min(all / FEWEST_SPLIT_ITEMS));
    let chunk = all.div_ceil(SPLIT_ITEMS).min(MOST_CHUNK_TILES).max(fewest);
    (chunk < span).then_some(chunk)
}

/// The most chunks that [`chunk_tiles`] makes of spans of up to `tiles` tiles; 0 if it cuts none of them.
pub(crate) fn most_chunks(rows: usize, items: usize, tiles: usize) -> usize {
    let fewest = fewest_chunk_tiles(rows);
    if rows > MOST_SPLIT_ROWS || items > MOST_WHOLE_ITEMS || tiles <= fewest {
        return 0;
    }
    let even = SPLIT_ITEMS.div_ceil(items.max(1));
    tiles.div_ceil(fewest).min(even.max(tiles.div_ceil(MOST_CHUNK_TILES)))
}

/// Eight keys to a row, so that the states of all chunks are small against the keys and values.
fn fewest_chunk_tiles(rows: usize) -> usize {
    rows.saturating_mul(8).div_ceil(KEYS).max(FEWEST_CHUNK_TILES)
}

/// Reading a number of a key or value costs as much as so many operations: 4 bytes at 12 GB/s against 150 GFLOP/s.
const FLOP_PER_NUMBER: f64 = 48.0;

/// The work of a call with few rows, as far as it decides on threads. `tiles` is what an entry sees at most.
pub(crate) fn work(dims: &Dims, num_read: usize, tiles: usize) -> f64 {
    let keys = dims.batch as f64 * num_read as f64 * tiles as f64 * KEYS as f64;
    dims.flop() + FLOP_PER_NUMBER * keys * (dims.head_dim as f64 + dims.value_dim as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dims(batch: usize, num_heads: usize, num_kv_heads: usize, q_len: usize) -> Dims {
        Dims { batch, num_heads, num_kv_heads, q_len, kv_len: q_len, head_dim: 64, value_dim: 64 }
    }

    #[test]
    fn items_are_neither_few_nor_small() {
        let tile = |d: Dims, group| query_tile(&d, group, [false; 2], None);
        assert_eq!(tile(dims(1, 8, 8, 2048), 1), 684);
        assert_eq!(query_tile(&dims(1, 8, 8, 2048), 1, [true, false], None), 516);
        assert_eq!(query_tile(&dims(1, 8, 8, 2048), 1, [false, true], None), 1024);
        assert_eq!(query_tile(&dims(1, 32, 8, 2048), 4, [false, true], None), 344);
        assert_eq!(tile(dims(1, 8, 8, 512), 1), 258);
        assert_eq!(tile(dims(8, 12, 12, 128), 1), 128);
        assert_eq!(tile(dims(1, 32, 1, 100), 32), 7);
        let wide = Dims { head_dim: 1 << 20, ..dims(1, 1, 1, 4096) };
        assert_eq!(tile(wide, 1), 192);
    }

    #[test]
    fn steps_of_the_matrix_unit_are_whole_blocks() {
        let dims = dims(1, 8, 8, 1000);
        for wish in [None, Some(0), Some(1), Some(33), Some(191), Some(usize::MAX)] {
            let tile = back_tile(&dims, wish, true);
            assert!(tile.is_multiple_of(UNIT_ROWS) && (1..=MAX_TILE).contains(&tile), "{wish:?}: {tile}");
        }
        assert_eq!(back_tile(&dims, Some(33), false), 33);
        assert_eq!(back_tile(&Dims { q_len: 20, ..dims }, None, true), 20);
    }

    #[test]
    fn keys_are_cut_where_queries_are_few() {
        // One token against 32768 keys: MHA, GQA, MQA.
        assert_eq!(chunk_tiles(1, 32, || 512), Some(32));
        assert_eq!(chunk_tiles(4, 8, || 512), Some(32));
        assert_eq!(chunk_tiles(32, 1, || 512), Some(8));
        assert_eq!(chunk_tiles(1, 8, || 9), Some(8));
        assert_eq!(chunk_tiles(1, 8, || 8), None);
        assert_eq!(chunk_tiles(1, 4, || 8), Some(4));
        assert_eq!(chunk_tiles(1, 2, || 32), Some(8));
        assert_eq!(chunk_tiles(1, 1, || 5), Some(4));
        assert_eq!(chunk_tiles(384, 1, || 512), Some(48));
        assert_eq!(chunk_tiles(385, 1, || 512), None);
        assert_eq!(chunk_tiles(1, 257, || 512), None);
        assert_eq!(chunk_tiles(0, 0, || 0), None);
    }

    #[test]
    fn no_length_makes_more_chunks_than_foreseen() {
        for (rows, items) in
            [1, 4, 32, 100, 384, 385].into_iter().flat_map(|r| [1, 2, 7, 63, 64, 65, 256, 257].map(|i| (r, i)))
        {
            let mut most = 0;
            for tiles in 0..3000 {
                let chunks = chunk_tiles(rows, items, || tiles).map_or(0, |chunk| tiles.div_ceil(chunk));
                most = most.max(chunks);
                let foreseen = most_chunks(rows, items, tiles);
                assert!(most <= foreseen, "{rows} rows, {items} items, {tiles} tiles: {most} > {foreseen}");
            }
        }
    }

    #[test]
    fn extremes_are_cut_too() {
        assert_eq!(query_tile(&dims(1, 1, 1, 0), 1, [false; 2], None), 1);
        assert_eq!(query_tile(&dims(1, 1, 1, 5), 1, [false; 2], Some(0)), 1);
        assert_eq!(query_tile(&dims(1, 1, 1, 5), 1, [false; 2], Some(usize::MAX)), 5);
        assert_eq!(query_tile(&dims(1, 1000, 1, 5), 1000, [false; 2], None), 1);
    }
}
