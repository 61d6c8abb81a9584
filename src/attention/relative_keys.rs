//! Keys for distances: a query meets the key of a pair plus a learned key for how far apart they stand.
//!
//! ```text
//! s[i, j] = scale * q[i] . (k[j] + r[clamp(j - pos(i))])        r: [2 clip + 1, head_dim], from -clip to clip
//! ```
//!
//! (Shaw et al. 2018, <https://arxiv.org/abs/1803.02155>, equation 5.) The term belongs to the product: it is scaled and
//! capped with it, and the bias comes after. The keys are shared by all heads. Tiles take it from the products
//! `q . r`, a line for each row, see `distance.rs`.

use ndarray::{ArrayView1, ArrayView2, Axis, Slice};

use super::distance::Span;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
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
