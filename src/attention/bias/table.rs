//! The learned bias of `position/relative.rs`: `table: [buckets, num_heads]`, looked up by the distance of a pair.
//!
//! A call first lays the table out as a line for each head, see `distance.rs`: rows of a tile are copied from there.

use ndarray::ArrayView2;

use crate::attention::distance::add_from_line;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::position::Buckets;

/// A table whose shape fits the call.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a, T> {
    buckets: Buckets,
    /// `[buckets, num_heads]`
    view: ArrayView2<'a, T>,
    /// `[num_heads][2 reach + 1]`, or nothing yet.
    lines: &'a [T],
    reach: usize,
}

impl<'a, T: Element> Table<'a, T> {
    pub(super) fn new(buckets: Buckets, view: ArrayView2<'a, T>, num_heads: usize) -> Result<Self> {
        buckets.check()?;
        let expected = [Some(buckets.count()), Some(num_heads)];
        check_shape("relative_bias", "[buckets, num_heads]", expected, view.shape())?;
        Ok(Self { buckets, view, lines: &[], reach: 0 })
    }

    /// Appends the lines to `room`. No distance of the call is larger than `farthest`.
    pub(super) fn write_lines(&mut self, farthest: usize, room: &mut Vec<T>) -> Result<()> {
        let (reach, heads) = (self.buckets.reach().min(farthest), self.view.ncols());
        let too_large =
            || Error::TooLarge { argument: "relative_bias", axes: "[num_heads, distances]", got: vec![heads, reach] };
        let length = reach.checked_mul(2).and_then(|n| n.checked_add(1)).ok_or_else(too_large)?;
        let numbers = length.checked_mul(heads).ok_or_else(too_large)?;
        room.try_reserve_exact(numbers).map_err(|_| too_large())?;
        for column in self.view.columns() {
            room.extend((0..length).map(|n| column[self.buckets.bucket(n as i64 - reach as i64)]));
        }
        self.reach = reach;
        Ok(())
    }

    /// The lines that have been written.
    pub(super) fn read_lines(&mut self, lines: &'a [T]) {
        self.lines = lines;
    }

    /// What is added to the score of a pair.
    pub(super) fn get(&self, head: usize, distance: i64) -> T {
        self.view[[self.buckets.bucket(distance), head]]
    }

    /// Adds to the scores of the keys from `first` on what the head has for their distances from `position`.
    pub(super) fn add(&self, head: usize, position: i64, first: usize, to: &mut [T]) {
        match self.lines.chunks_exact(self.line()).nth(head) {
            Some(line) => add_from_line(line, position, first, to),
            None => to.iter_mut().enumerate().for_each(|(j, to)| {
                *to += self.get(head, (first + j) as i64 - position);
            }),
        }
    }

    /// The row of the table for a distance.
    pub(crate) fn bucket(&self, distance: i64) -> usize {
        self.buckets.bucket(distance)
    }

    /// Numbers of a line.
    fn line(&self) -> usize {
        2 * self.reach + 1
    }
}
