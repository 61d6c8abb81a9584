//! The one level of parallelism: work items over the current rayon pool.
//!
//! Items are cut by shape and never by the number of threads, and no two of them write the same element, so results
//! have the same bits on any pool. No pool is created, and a call from inside a rayon task stays in that task's pool.

use ndarray::{ArrayViewMut, Axis, RemoveAxis};

use crate::error::Result;

/// Below this work a call stays on its thread: waking the pool costs 5 to 20 microseconds.
#[cfg(feature = "rayon")]
const SMALL_FLOP: f64 = 2e6;

/// Runs `f` over all items; the first error by order of time is returned.
pub(crate) fn try_for_each<I: Send>(items: Vec<I>, flop: f64, f: impl Fn(I) -> Result<()> + Send + Sync) -> Result<()> {
    #[cfg(feature = "rayon")]
    if flop > SMALL_FLOP && items.len() > 1 {
        use rayon::prelude::*;
        return items.into_par_iter().with_max_len(1).try_for_each(f);
    }
    let _ = flop;
    items.into_iter().try_for_each(f)
}

/// The views along the first axis, with the lifetime of the array and not of the view.
pub(crate) fn outer<'a, T, D: RemoveAxis>(
    view: ArrayViewMut<'a, T, D>,
) -> impl Iterator<Item = ArrayViewMut<'a, T, D::Smaller>> {
    let mut rest = Some(view);
    std::iter::from_fn(move || {
        let view = rest.take().filter(|view| view.len_of(Axis(0)) > 0)?;
        let (first, others) = view.split_at(Axis(0), 1);
        rest = Some(others);
        Some(first.index_axis_move(Axis(0), 0))
    })
}
