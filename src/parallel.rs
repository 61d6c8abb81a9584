//! The one level of parallelism: work items over the current rayon pool.
//!
//! Items are cut by shape and never by the number of threads, and no two of them write the same element, so results
//! have the same bits on any pool. No pool is created, and a call from inside a rayon task stays in that task's pool.

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
