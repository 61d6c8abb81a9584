//! The arithmetic of the crate: the only folder with `unsafe` code or knowledge of the CPU.
//!
//! A kernel is written once, generic over the vector type, and compiled once per instruction set. Callers get a table of
//! them, [`Kernels`], whose methods are safe: they take slices and views and check the lengths.
//!
//! | file | what it computes |
//! | --- | --- |
//! | `level.rs` | which instruction sets this CPU has |
//! | `real.rs`, `simd.rs` | the scalar and the vector type that kernels are generic over |
//! | `avx512.rs`, `avx2.rs`, `portable.rs` | the vector types |
//! | `exp.rs` | `2^x` and `tanh(x)` |
//! | `normal.rs` | GELU by the normal distribution |
//! | `norm.rs` | rows to their norms |
//! | `tile.rs` | products: a few rows in registers |
//! | `matrix.rs`, `amx.rs`, `amx_tiles.rs` | products: many rows by a matrix unit |
//! | `operand.rs`, `halves.rs` | operands of 16 bits |
//! | `dots.rs` | products of few rows with a matrix stored transposed |
//! | `pack.rs` | copies into the layouts that products read |
//! | `mods.rs`, `lines.rs` | soft cap and bias |
//! | `softmax.rs` | one step of the online softmax |
//! | `unit.rs` | many queries meet one tile of keys by the matrix unit |
//! | `splitting.rs` | a tile of keys and values is split for it |
//! | `beside.rs`, `weighing.rs` | what vectors do beside products of the matrix unit; the softmax of rows |
//! | `matrix_unit.rs` | the products of backward by the matrix unit |
//! | `returning.rs` | rows go back through the softmax beside them |
//! | `upcoming.rs` | memory that is asked for before it is needed |
//! | `values.rs` | probabilities times values that are not finite |
//! | `back.rs` | back through the softmax: probabilities again, and the gradients of the scores |
//! | `pairs.rs` | products of backward where something is not finite |
//! | `relay.rs` | disjoint parts of the gradients for many threads, and one that they add to in turn |
//! | `table.rs` | the kernels of a level, compiled with its instructions |
//! | `step.rs` | one group of queries meets one tile of keys: scores, softmax, values |
//! | `divide.rs` | the last step of a softmax row |
//! | `dropout.rs` | which pairs dropout keeps |
//! | `peak.rs` | what the CPU can do at best |
//! | `scratch.rs` | working memory that begins at a cache line |
//! | `slab.rs` | memory that is kept from call to call, in huge pages |
//! | `gemm.rs` | projections: blocks of `x w + bias` |
//! | `gemm_matrix.rs` | the same of many rows by a matrix unit |
//! | `prepacked.rs` | weights that were packed for all calls to come |
//! | `blocks.rs` | disjoint blocks of one matrix for many threads |
//! | `deal.rs` | disjoint rows of one output for many threads |

#![allow(unsafe_code)]
// Loops over registers read best with the index of the row and of the vector.
#![allow(clippy::needless_range_loop)]

mod back;
// As `matrix.rs` below.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod beside;
mod blocks;
mod deal;
mod divide;
mod dots;
mod dropout;
mod exp;
mod gemm;
mod gemm_matrix;
#[cfg(feature = "half")]
mod halves;
mod level;
mod lines;
// Elsewhere nothing computes with what this describes.
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod matrix;
mod matrix_unit;
mod mods;
mod norm;
mod normal;
mod operand;
mod pack;
mod pairs;
mod peak;
mod portable;
mod prepacked;
mod real;
mod relay;
mod returning;
mod rows;
mod scratch;
mod simd;
mod slab;
mod softmax;
mod splitting;
mod step;
mod table;
#[cfg(test)]
mod testing;
mod tile;
mod unit;
mod upcoming;
mod values;
mod weighing;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_tiles;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

pub(crate) use back::{BackGroup, BackRoom};
pub(crate) use blocks::Blocks;
pub(crate) use deal::{Block, Deal};
pub(crate) use dropout::{Dropped, Drops, RowKey};
pub(crate) use gemm::{Factor, Linear};
pub use level::{Level, UnknownLevel};
pub(crate) use lines::Lines;
pub(crate) use matrix::{Extent, STEP, UNIT_ROWS, products_of_parts, split_panel_len, split_rows_len, steps};
pub(crate) use matrix_unit::{MatrixUnit, Squares, UnitProduct};
pub(crate) use norm::{Moments, NormInput, RowRule, moments};
pub(crate) use operand::Operand;
pub(crate) use pairs::RowsAndKeys;
pub(crate) use prepacked::Prepacked;
pub(crate) use real::Real;
pub(crate) use relay::{Cut, Pair, Relay, RelayItem, Targets};
pub(crate) use returning::{
    BLOCKS, BOTH, OnTheWay, PAIRS, RETURNED_PANEL, RETURNED_PANELS, RETURNED_ROWS, ReturningRows, can_add_to,
    panels_at, square_at,
};
pub(crate) use rows::RowsScoring;
pub(crate) use scratch::{aligned, reserve};
pub(crate) use simd::fetch;
pub(crate) use slab::Lot;
pub(crate) use splitting::{
    SplitPlace, SplitRoom, SplitTile, Splitting, Unsplit, are_lines, clear_keys, split_keys_len, split_values_len,
};
pub(crate) use step::{Finite, Group, KeyTile, Next, Queries, Scoring, Visible, rows_of_tile};
pub(crate) use table::{Kernels, kernels_f32, kernels_f64};
pub(crate) use tile::{MAX_ROWS, Product, Start, Stride};
pub(crate) use unit::{SplitFactors, SplitQueries, UNIT_SCORES, UNIT_WEIGHTS};
pub(crate) use upcoming::Upcoming;

/// Columns of a panel, at every level and for both types.
pub(crate) const PANEL: usize = 16;

/// Keys of a tile: the bits of a word.
pub(crate) const KEYS: usize = 64;

/// The bits `first..end` of a word, `first <= end <= 64`.
#[inline(always)]
pub(crate) fn key_bits(first: usize, end: usize) -> u64 {
    if first == end { 0 } else { (u64::MAX >> (KEYS - (end - first))) << first }
}
