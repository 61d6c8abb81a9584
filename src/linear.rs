//! `y = x W + b` for the projections: `x: [batch, len, in]`, `w: [in, out]`, `b: [out]`, `y: [batch, len, out]`.
//!
//! Blocks of rows run in parallel, the product inside a block does not (matrixmultiply, single-threaded).

use ndarray::linalg::general_mat_mul;
use ndarray::{Array1, Array2, ArrayView3, ArrayViewMut3, Axis};

use crate::element::Element;
use crate::error::Result;
use crate::parallel;

/// Rows of a block: as many as make the packing of W worth it, few enough to share the work.
const BLOCK_ROWS: usize = 64;

pub(crate) fn project<T: Element>(
    x: ArrayView3<'_, T>,
    w: &Array2<T>,
    bias: Option<&Array1<T>>,
    y: ArrayViewMut3<'_, T>,
) -> Result<()> {
    let flop = 2.0 * x.len() as f64 * w.ncols() as f64;
    let mut blocks = Vec::new();
    for (x, mut y) in x.outer_iter().zip(parallel::outer(y)) {
        let mut first = 0;
        while !y.is_empty() {
            let rows = BLOCK_ROWS.min(y.nrows());
            let (block, rest) = y.split_at(Axis(0), rows);
            blocks.push((x.slice_move(ndarray::s![first..first + rows, ..]), block));
            (first, y) = (first + rows, rest);
        }
    }
    parallel::try_for_each(blocks, flop, |(x, mut y)| {
        match bias {
            Some(bias) => y.assign(bias),
            None => y.fill(T::zero()),
        }
        general_mat_mul(T::one(), &x, w, T::one(), &mut y);
        Ok(())
    })
}
