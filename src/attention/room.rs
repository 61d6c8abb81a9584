//! The memory that a walk works in, cut from the scratch of a thread.

use super::walk::State;
use super::workspace::{Lengths, Scratch};
use crate::element::Element;
use crate::kernels::RowKey;

/// What a walk needs besides the state of its rows. What it holds at first does not matter.
pub(super) struct Room<'s, T> {
    /// `[rows][head_dim]`
    pub(super) queries: &'s mut [T],
    /// The same, split for the matrix unit, if there is one.
    pub(super) split_queries: &'s mut [T],
    pub(super) tile: TileRoom<'s, T>,
}

/// What the tiles need, one after the other.
pub(super) struct TileRoom<'s, T> {
    pub(super) place: TilePlace<'s, T>,
    /// Of the tile after, if there is a matrix unit.
    pub(super) spare: TilePlace<'s, T>,
    pub(super) rows: RowsRoom<'s, T>,
}

/// Where a tile is packed.
pub(super) struct TilePlace<'s, T> {
    /// `[panels][head_dim][16]`
    pub(super) keys: &'s mut [T],
    /// `[width / 16][64][16]`
    pub(super) values: &'s mut [T],
    /// Both, split for the matrix unit.
    pub(super) split: [&'s mut [T]; 2],
}

/// What the rows that meet a packed tile need.
pub(super) struct RowsRoom<'s, T> {
    /// `[2][6][64]`, or as the matrix unit wants it.
    pub(super) scores: &'s mut [T],
    /// For the matrix unit.
    pub(super) weights: &'s mut [T],
    /// `[6][64]`, if there is a bias.
    pub(super) bias: &'s mut [T],
    /// `[rows][distances]`, if there are relative keys.
    pub(super) relative: &'s mut [T],
    /// `[rows]`, if there is dropout.
    pub(super) row_keys: &'s mut Vec<RowKey>,
}

impl<'s, T: Element> Room<'s, T> {
    /// Room for walks of these lengths, and for the state of one.
    pub(super) fn of(scratch: &'s mut Scratch<T>, lengths: &Lengths) -> (State<'s, T>, Self) {
        let (buffers, row_keys) = scratch.parts(lengths);
        let [
            queries,
            context,
            maxima,
            sums,
            keys,
            values,
            scores,
            bias,
            relative,
            split_queries,
            split_keys,
            split_values,
            weights,
            spare_keys,
            spare_values,
            spare_split_keys,
            spare_split_values,
            ..,
        ] = buffers;
        let rows = RowsRoom { scores, weights, bias, relative, row_keys };
        let place = TilePlace { keys, values, split: [split_keys, split_values] };
        let (keys, values, split) = (spare_keys, spare_values, [spare_split_keys, spare_split_values]);
        let tile = TileRoom { place, spare: TilePlace { keys, values, split }, rows };
        (State { context, maxima, sums }, Self { queries, split_queries, tile })
    }
}
