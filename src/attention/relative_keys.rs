//! Keys for distances: a query meets the key of a pair plus a learned key for how far apart they stand.
//!
//! ```text
//! s[i, j] = scale * q[i] . (k[j] + r[clamp(j - pos(i))])        r: [2 clip + 1, head_dim], from -clip to clip
//! ```
//!
//! (Shaw et al. 2018, <https://arxiv.org/abs/1803.02155>, equation 5.) The term belongs to the product: it is scaled and
//! capped with it, and the bias comes after. The keys are shared by all heads. Tiles take it from the products
//! `q . r`, a line for each row, see `distance.rs`.

use ndarray::{ArrayView1, ArrayView2, Axis, Slice, s};
use std::ops::Range;

use super::distance::{Span, Start, add_from_line};
use super::walk::Walk;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::kernels::{KEYS, MAX_ROWS, Operand, PANEL, Queries};
use crate::mask::BoundMask;

/// Keys whose shape fits the call.
#[derive(Clone, Copy)]
pub(crate) struct RelativeKeys<'a, T> {
    /// `[distances, head_dim]`: all of the caller's, or those that the call has.
    view: ArrayView2<'a, T>,
    /// Distances of the view.
    span: Span,
    /// How many distances later calls can have.
    most: usize,
    clip: i64,
}

impl<'a, T: Element> RelativeKeys<'a, T> {
    pub(super) fn new(view: ArrayView2<'a, T>, head_dim: usize, mask: &BoundMask<'_>) -> Result<Self> {
        check_relative_keys(view.shape(), head_dim)?;
        mask.check_positions()?;
        // Half of what a length can be.
        let clip = (view.nrows() / 2) as i64;
        Ok(Self { view, span: Span { lowest: -clip, highest: clip }, most: view.nrows(), clip })
    }

    /// Leaves out distances that no pair of the call has; later calls have those of `most`.
    pub(super) fn trim(&mut self, span: Span, most: Span) {
        let [span, most] = [span, most].map(|span| span.within(self.clip as usize));
        self.most = most.len();
        if span.len() == 0 {
            return;
        }
        let first = (span.lowest - self.span.lowest) as usize;
        self.view.slice_axis_inplace(Axis(0), Slice::from(first..first + span.len()));
        self.span = span;
    }

    /// `[distances, head_dim]`
    pub(crate) fn view(&self) -> ArrayView2<'a, T> {
        self.view
    }

    /// How many distances later calls can have.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// The distances of [`RelativeKeys::view`].
    pub(crate) fn span(&self) -> Span {
        self.span
    }

    /// The row of the caller's table for a distance.
    pub(crate) fn row(&self, distance: i64) -> usize {
        (distance.clamp(-self.clip, self.clip) + self.clip) as usize
    }

    /// The key of a distance.
    pub(crate) fn key(&self, distance: i64) -> ArrayView1<'a, T> {
        let index = distance.clamp(self.span.lowest, self.span.highest) - self.span.lowest;
        self.view.index_axis_move(Axis(0), index as usize)
    }
}

/// Checks the shape of a table.
pub(crate) fn check_relative_keys(shape: &[usize], head_dim: usize) -> Result<()> {
    check_shape("relative_keys", "[2 clip + 1, head_dim]", [None, Some(head_dim)], shape)?;
    match shape.first() {
        Some(rows) if rows.is_multiple_of(2) => {
            Err(Error::value("relative_keys", "an odd number of rows, 2 clip + 1", rows))
        }
        _ => Ok(()),
    }
}

impl<T: Element> Walk<'_, '_, T> {
    /// `[rows][distances]`: the products of the packed queries with the relative keys, packed tile by tile like others.
    pub(super) fn relative_products(
        &self,
        from: &RelativeKeys<'_, T>,
        queries: &[T],
        [panels, scores]: [&mut [T]; 2],
        to: &mut [T],
    ) {
        let (keys, head_dim) = (from.view(), self.call.dims.head_dim);
        let distances = keys.nrows();
        for first in (0..distances).step_by(KEYS) {
            let count = KEYS.min(distances - first);
            self.kernels.pack_panels(keys.slice(s![first..first + count, ..]), panels);
            for row in (0..self.rows).step_by(MAX_ROWS) {
                let rows = MAX_ROWS.min(self.rows - row);
                let group = Queries { rows, head_dim, q: &queries[row * head_dim..], q_row: head_dim };
                self.kernels.products(&group, Operand::Own(panels), 0..count.div_ceil(PANEL), scores);
                let lines = to[row * distances..].chunks_exact_mut(distances).zip(scores.chunks_exact(KEYS));
                lines.take(rows).for_each(|(to, products)| to[first..][..count].copy_from_slice(&products[..count]));
            }
        }
    }

    /// Adds to the products `[rows][64]` of a tile those with the relative keys.
    pub(super) fn add_relative(
        &self,
        from: &RelativeKeys<'_, T>,
        rows: Range<usize>,
        keys: Range<usize>,
        lines: &[T],
        to: &mut [T],
    ) {
        let distances = from.view().nrows();
        for (row, to) in rows.zip(to.chunks_exact_mut(KEYS)) {
            let (head, i) = self.row(row);
            let position = self.score_row(head, i).position;
            let at = Start { lowest: from.span().lowest, position, first: keys.start };
            add_from_line(&lines[row * distances..][..distances], at, &mut to[..keys.len()]);
        }
    }
}
