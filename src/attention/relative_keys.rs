//! Keys for distances: a query meets the key of a pair plus a learned key for how far apart they stand.
//!
//! ```text
//! s[i, j] = scale * q[i] . (k[j] + r[clamp(j - pos(i))])        r: [2 clip + 1, head_dim], from -clip to clip
//! ```
//!
//! (Shaw et al. 2018, <https://arxiv.org/abs/1803.02155>, equation 5.) The term belongs to the product: it is scaled and
//! capped with it, and the bias comes after. The keys are shared by all heads. Tiles take it from the products
//! `q . r`, a line of `2 clip + 1` numbers for each row, see `distance.rs`.

use ndarray::{ArrayView1, ArrayView2, Axis, Slice};

use super::distance;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::mask::BoundMask;

/// Keys whose shape fits the call.
#[derive(Clone, Copy)]
pub(crate) struct RelativeKeys<'a, T> {
    /// `[2 clip + 1, head_dim]`
    view: ArrayView2<'a, T>,
    /// Rows of the caller's table before those of the view.
    skipped: usize,
}

impl<'a, T: Element> RelativeKeys<'a, T> {
    pub(super) fn new(view: ArrayView2<'a, T>, head_dim: usize, mask: &BoundMask<'_>) -> Result<Self> {
        check_relative_keys(view.shape(), head_dim)?;
        mask.check_positions()?;
        Ok(Self { view, skipped: 0 })
    }

    /// Leaves out distances that are larger than `farthest`, which no pair of the call has.
    pub(super) fn trim(&mut self, farthest: usize) {
        let clip = self.view.nrows() / 2;
        let skipped = clip.saturating_sub(farthest);
        self.view.slice_axis_inplace(Axis(0), Slice::from(skipped..self.view.nrows() - skipped));
        self.skipped += skipped;
    }

    /// `[2 clip + 1, head_dim]`, for the distances that the call has.
    pub(crate) fn view(&self) -> ArrayView2<'a, T> {
        self.view
    }

    /// The row of the caller's table for a distance.
    pub(crate) fn row(&self, distance: i64) -> usize {
        self.skipped + self.index(distance)
    }

    /// The key of a distance.
    pub(crate) fn key(&self, distance: i64) -> ArrayView1<'a, T> {
        self.view.index_axis_move(Axis(0), self.index(distance))
    }

    fn index(&self, distance: i64) -> usize {
        distance::index(self.view.nrows() / 2, distance)
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
