//! The one level of parallelism: work items over the current rayon pool.
//!
//! Items are cut by shape and never by the number of threads, and no two of them write the same element, so results
//! have the same bits on any pool. No pool is created, and a call from inside a rayon task stays in that task's pool.

use ndarray::{ArrayViewMut, Axis, RemoveAxis};

use crate::error::Result;

/// Below this work a call stays on its thread: waking the pool costs 5 to 20 microseconds.
#[cfg(feature = "rayon")]
const SMALL_FLOP: f64 = 2e6;

/// Threads of the current pool.
pub(crate) fn threads() -> usize {
    #[cfg(feature = "rayon")]
    return rayon::current_num_threads();
    #[cfg(not(feature = "rayon"))]
    1
}

/// How many workers a call of so much work and so many items is worth.
pub(crate) fn workers(flop: f64, items: usize) -> usize {
    #[cfg(feature = "rayon")]
    if flop > SMALL_FLOP {
        return threads().min(items).max(1);
    }
    let _ = (flop, items);
    1
}

/// Runs `f` once for each worker, in parallel where there are several. Workers take items until there are none left.
pub(crate) fn for_each_worker<S: Send>(workers: &mut [S], f: impl Fn(&mut S) + Send + Sync) {
    #[cfg(feature = "rayon")]
    if workers.len() > 1 {
        use rayon::prelude::*;
        workers.par_iter_mut().with_max_len(1).for_each(f);
        return;
    }
    workers.iter_mut().for_each(f);
}

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

/// Runs `f` over the chunks of `len` numbers that `data` is cut into, with the number of each.
pub(crate) fn for_each_chunk<T: Send>(
    data: &mut [T],
    len: usize,
    flop: f64,
    f: impl Fn(usize, &mut [T]) + Send + Sync,
) {
    let len = len.max(1);
    #[cfg(feature = "rayon")]
    if flop > SMALL_FLOP && data.len() > len {
        use rayon::prelude::*;
        data.par_chunks_mut(len).enumerate().for_each(|(index, chunk)| f(index, chunk));
        return;
    }
    let _ = flop;
    data.chunks_mut(len).enumerate().for_each(|(index, chunk)| f(index, chunk));
}

/// Numbers of a chunk of [`for_each_pair`], and what one of them counts as: it is read and written.
const PAIRS: usize = 16 * 1024;
const FLOP_PER_PAIR: f64 = 16.0;

/// Runs `f` over the numbers of two slices of one length.
pub(crate) fn for_each_pair<T: Copy + Send + Sync>(x: &mut [T], y: &[T], f: impl Fn(&mut T, T) + Send + Sync) {
    let work = FLOP_PER_PAIR * x.len() as f64;
    for_each_chunk(x, PAIRS, work, |index, x| {
        x.iter_mut().zip(&y[index * PAIRS..]).for_each(|(x, &y)| f(x, y));
    });
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
