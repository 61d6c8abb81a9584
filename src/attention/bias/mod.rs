//! What is added to the scores after the soft cap. Several sources can be given; they add up.
//!
//! | source | what it is | memory |
//! | --- | --- | --- |
//! | `dense.rs` | an array of the caller's | the caller's |
//! | `position/alibi.rs` | `-slope[h] * abs(pos(i) - j)`, by arithmetic | none |
//! | `table.rs` | a learned number for each bucket of distances and head | a line for each head |
//!
//! Kernels take rows of a tile, whatever the source.

mod dense;
mod table;

use dense::Dense;
pub(crate) use table::Table;

use std::ops::Range;

use super::Options;
use super::distance::Span;
use super::problem::Dims;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernels::Lines;
use crate::mask::BoundMask;
use crate::position::Alibi;

/// A row of the scores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScoreRow {
    pub(crate) entry: usize,
    pub(crate) head: usize,
    pub(crate) i: usize,
    /// `pos(i)`, the key position of the query; see [`crate::mask::HeadMask::position`].
    pub(crate) position: i64,
}

/// All sources of a call.
#[derive(Clone, Copy)]
pub(crate) struct Bias<'a, T> {
    dense: Option<Dense<'a, T>>,
    alibi: Option<&'a Alibi>,
    /// `[num_heads]`, or nothing yet.
    slopes: &'a [T],
    table: Option<Table<'a, T>>,
}

impl<'a, T: Element> Bias<'a, T> {
    /// The bias of the options, if they have any.
    pub(super) fn new(options: &'a Options<'_, T>, dims: Dims, mask: &BoundMask<'_>) -> Result<Option<Self>> {
        let dense = options.bias.as_ref().map(|bias| Dense::new(bias.view(), dims.scores())).transpose()?;
        if let Some(alibi) = options.alibi {
            alibi.check::<T>(dims.num_heads)?;
            mask.check_positions()?;
        }
        let table = match &options.relative_bias {
            Some((buckets, table)) => {
                mask.check_positions()?;
                Some(Table::new(*buckets, table.view(), dims.num_heads)?)
            }
            None => None,
        };
        let some = dense.is_some() || options.alibi.is_some() || table.is_some();
        Ok(some.then_some(Self { dense, alibi: options.alibi, slopes: &[], table }))
    }

    /// Prepares what is looked up row by row, in `room`, for a call of so many query heads.
    /// Its distances are those of the first span, later calls with the same room have those of the second.
    pub(super) fn lay_out(&mut self, num_heads: usize, spans: [Span; 2], room: &'a mut Vec<T>) -> Result<()> {
        room.clear();
        let heads = if self.alibi.is_some() { num_heads } else { 0 };
        let too_large = || Error::TooLarge { argument: "alibi slopes", axes: "[num_heads]", got: vec![heads] };
        room.try_reserve_exact(heads).map_err(|_| too_large())?;
        room.extend((0..heads).map(|head| self.slope(head)));
        if let Some(table) = &mut self.table {
            table.write_lines(spans, room)?;
        }
        let (slopes, lines) = room.split_at(heads);
        self.slopes = slopes;
        if let Some(table) = &mut self.table {
            table.read_lines(lines);
        }
        Ok(())
    }

    /// The slope of a head in the type of the call; 0 without ALiBi.
    fn slope(&self, head: usize) -> T {
        match self.slopes.get(head) {
            Some(&slope) => slope,
            None => T::from_f64(self.alibi.and_then(|alibi| alibi.slope(head)).unwrap_or(0.0)),
        }
    }

    /// The learned table, for its gradient.
    pub(crate) fn table(&self) -> Option<&Table<'a, T>> {
        self.table.as_ref()
    }

    /// What is added to the score of a row and key j.
    pub(crate) fn get(&self, row: ScoreRow, j: usize) -> T {
        let ScoreRow { entry, head, i, position } = row;
        let distance = j as i64 - position;
        let mut sum = self.dense.map_or(T::zero(), |dense| dense.get([entry, head, i], j));
        if self.alibi.is_some() {
            sum -= self.slope(head) * T::from_f64(distance.unsigned_abs() as f64);
        }
        if let Some(table) = &self.table {
            sum += table.get(head, distance);
        }
        sum
    }

    /// Asks memory for what a copy will take, where the rows of an array are too far apart for the CPU to guess it.
    pub(crate) fn fetch(&self, row: ScoreRow, keys: Range<usize>) {
        if let Some(dense) = &self.dense {
            dense.fetch([row.entry, row.head, row.i], keys);
        }
    }

    /// The numbers that are added to the scores of a row and some keys, if they lie like that in memory.
    pub(crate) fn row(&self, row: ScoreRow, keys: Range<usize>) -> Option<&'a [T]> {
        let dense = self.dense.filter(|_| self.alibi.is_none() && self.table.is_none())?;
        dense.row([row.entry, row.head, row.i]).map(|row| &row[keys])
    }

    /// What is added to the scores of a row and of those of the same head after it, if it lies like that in memory.
    pub(crate) fn lines(&self, row: ScoreRow) -> Option<Lines<'a, T>> {
        let dense = self.dense.filter(|_| self.alibi.is_none() && self.table.is_none())?;
        dense.lines([row.entry, row.head, row.i])
    }

    /// What is added to the scores of a row and the keys from `first` on.
    pub(crate) fn copy(&self, row: ScoreRow, first: usize, to: &mut [T]) {
        let ScoreRow { entry, head, i, position } = row;
        match &self.dense {
            Some(dense) => dense.copy([entry, head, i], first, to),
            None => to.fill(T::zero()),
        }
        if self.alibi.is_some() {
            let (slope, start) = (self.slope(head), T::from_f64((first as i64 - position) as f64));
            // A tile's keys are few enough for 32 bits, which convert faster.
            for (j, to) in to.iter_mut().enumerate() {
                *to -= slope * (start + T::from_f64(f64::from(j as i32))).abs();
            }
        }
        if let Some(table) = &self.table {
            table.add(head, position, first, to);
        }
    }
}
