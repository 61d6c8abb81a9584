//! `y = x W + b` for the projections: `x: [batch, len, in]`, `w: [in, out]`, `b: [out]`, `y: [batch, len, out]`.
//!
//! Blocks of the outputs are dealt to the threads; the projections of a layer's inputs are dealt together, so no thread
//! waits for the first to end. The product inside a block is `kernels/gemm.rs`. Every element sums its terms in order,
//! so neither the blocks nor the threads change a bit.

use ndarray::{Array1, Array2, ArrayView2, ArrayView3, ArrayViewMut2, ArrayViewMut3, Axis, s};

use crate::element::Element;
use crate::kernels::{Blocks, Kernels, Linear, block_scratch, reserve};
use crate::parallel;

/// One projection.
pub(crate) struct Projected<'a, T> {
    /// `[batch, len, in]`
    pub(crate) x: ArrayView3<'a, T>,
    /// `[in, out]`
    pub(crate) w: &'a Array2<T>,
    /// `[out]`
    pub(crate) bias: Option<&'a Array1<T>>,
    /// `[batch, len, out]`
    pub(crate) y: ArrayViewMut3<'a, T>,
}

/// Rows and columns of a block: W is packed once for all rows of a block, which costs 3 % of 128 rows.
const BLOCK_ROWS: usize = 128;
const BLOCK_COLUMNS: usize = 256;

/// A number of W that has to be fetched counts as much as so many operations: 4 bytes at 12 GB/s against 150 GFLOP/s.
const FLOP_PER_WEIGHT: f64 = 48.0;

/// Runs all projections. `scratch` grows to one buffer for each thread of the pool.
pub(crate) fn project<T: Element>(
    kernels: &Kernels<T>,
    mut projections: [Option<Projected<'_, T>>; 3],
    scratch: &mut Vec<Vec<T>>,
) {
    let flat = |p: &Projected<'_, T>| flatten(p.x).is_some() && flatten(p.y.view()).is_some();
    if projections.iter().flatten().all(flat) {
        return deal(kernels, projections, scratch);
    }
    // One batch entry always lies flat.
    let batch = projections.iter().flatten().map(|p| p.y.len_of(Axis(0))).max().unwrap_or(0);
    for entry in 0..batch {
        let entry = entry..entry + 1;
        let one = projections.each_mut().map(|projection| {
            projection.as_mut().map(|Projected { x, w, bias, y }| Projected {
                x: x.slice_move(s![entry.clone(), .., ..]),
                w,
                bias: *bias,
                y: y.slice_mut(s![entry.clone(), .., ..]),
            })
        });
        deal(kernels, one, scratch);
    }
}

fn deal<T: Element>(kernels: &Kernels<T>, projections: [Option<Projected<'_, T>>; 3], scratch: &mut Vec<Vec<T>>) {
    let mut work = 0.0;
    let mut items = 0;
    let mut room = 0;
    let jobs = projections.map(|projection| {
        let Projected { x, w, bias, y } = projection?;
        work += 2.0 * x.len() as f64 * w.ncols() as f64 + FLOP_PER_WEIGHT * w.len() as f64;
        let linear = Linear { x: flatten(x)?, w: w.view(), bias: bias.map(|bias| bias.view()) };
        let y = flatten_mut(y)?;
        room = room.max(block_scratch(&y, BLOCK_ROWS, BLOCK_COLUMNS, w.nrows()));
        let blocks = Blocks::new(y, BLOCK_ROWS, BLOCK_COLUMNS);
        items += blocks.len();
        Some((linear, blocks))
    });
    let workers = parallel::workers(work, items);
    if scratch.len() < workers {
        scratch.resize_with(workers, Vec::new);
    }
    // Which blocks a thread gets depends on time; what it has room for must not. (Without the room a block makes its own:
    // a panel of weights that exist is never too large.)
    scratch[..workers].iter_mut().for_each(|scratch| {
        reserve(scratch, room);
    });
    parallel::for_each_worker(&mut scratch[..workers], |scratch| {
        for (linear, blocks) in jobs.iter().flatten() {
            while let Some(part) = blocks.next() {
                kernels.linear_block(linear, part.rows, part.columns, part.view, scratch);
            }
        }
    });
}

/// `[batch, len, width]` as `[batch * len, width]`, if the strides allow it. Without rows there is no axis to merge.
fn flatten<T>(mut view: ArrayView3<'_, T>) -> Option<ArrayView2<'_, T>> {
    if view.is_empty() {
        return ArrayView2::from_shape((0, view.len_of(Axis(2))), &[]).ok();
    }
    view.merge_axes(Axis(0), Axis(1)).then(|| view.index_axis_move(Axis(0), 0))
}

fn flatten_mut<T>(mut view: ArrayViewMut3<'_, T>) -> Option<ArrayViewMut2<'_, T>> {
    if view.is_empty() {
        return ArrayViewMut2::from_shape((0, view.len_of(Axis(2))), &mut []).ok();
    }
    view.merge_axes(Axis(0), Axis(1)).then(|| view.index_axis_move(Axis(0), 0))
}
