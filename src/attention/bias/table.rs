//! The learned bias of `position/relative.rs`: `table: [buckets, num_heads]`, looked up by the distance of a pair.
//!
//! A call first lays the table out as a line for each head, see `distance.rs`: rows of a tile are copied from there.

use ndarray::{ArrayView2, ArrayViewMut2};

use crate::attention::distance::{Span, Start, add_from_line};
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::position::Buckets;

/// A table whose shape fits the call.
#[derive(Clone, Copy)]
pub(crate) struct Table<'a, T> {
    buckets: Buckets,
    /// `[buckets, num_heads]`
    view: ArrayView2<'a, T>,
    /// `[num_heads]`, a number for each distance of the span; or nothing yet.
    lines: &'a [T],
    span: Span,
}

impl<'a, T: Element> Table<'a, T> {
    pub(super) fn new(buckets: Buckets, view: ArrayView2<'a, T>, num_heads: usize) -> Result<Self> {
        buckets.check()?;
        let expected = [Some(buckets.count()), Some(num_heads)];
        check_shape("relative_bias", "[buckets, num_heads]", expected, view.shape())?;
        Ok(Self { buckets, view, lines: &[], span: Span { lowest: 0, highest: 0 } })
    }

    /// Appends the lines to `room`, for a call whose distances are those of `span`; there will be room for `most`.
    pub(super) fn write_lines(&mut self, [span, most]: [Span; 2], room: &mut Vec<T>) -> Result<()> {
        self.span = span.within(self.buckets.reach());
        let heads = self.view.ncols();
        let mut reserve =
            |length: usize| length.checked_mul(heads).is_some_and(|numbers| room.try_reserve_exact(numbers).is_ok());
        // Room for later calls is welcome; where it cannot be had, what this one needs will do.
        let (later, now) = (most.within(self.buckets.reach()).len(), self.span.len());
        if !reserve(later) && !reserve(now) {
            let axes = "[num_heads, distances]";
            return Err(Error::TooLarge { argument: "relative_bias", axes, got: vec![heads, now] });
        }
        for column in self.view.columns() {
            let distances = self.span.lowest..=self.span.highest;
            room.extend(distances.map(|distance| column[self.buckets.bucket(distance)]));
        }
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
        match self.lines.chunks_exact(self.span.len().max(1)).nth(head) {
            Some(line) => add_from_line(line, Start { lowest: self.span.lowest, position, first }, to),
            None => to.iter_mut().enumerate().for_each(|(j, to)| {
                *to += self.get(head, (first + j) as i64 - position);
            }),
        }
    }

    /// The row of the table for a distance.
    pub(crate) fn bucket(&self, distance: i64) -> usize {
        self.buckets.bucket(distance)
    }

    /// The distances of a line.
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// Adds the gradient of the head's line to that of the table, `[buckets, num_heads]`.
    pub(crate) fn add_line(&self, d_line: &[f64], head: usize, d_table: &mut ArrayViewMut2<'_, T>) {
        let mut sum = 0.0;
        let mut numbers = (self.span.lowest..).zip(d_line).peekable();
        while let Some((distance, d)) = numbers.next() {
            sum += d;
            // A bucket is a run of distances, or two.
            let bucket = self.bucket(distance);
            if numbers.peek().is_none_or(|&(next, _)| self.bucket(next) != bucket) {
                d_table[[bucket, head]] += T::from_f64(std::mem::take(&mut sum));
            }
        }
    }
}
