//! The peaks of this machine, probed next to a measurement that is to be judged by them.
//!
//! On a shared machine the clock and the memory change from second to second, so a fraction of peak means something only
//! if both were taken together.

use std::time::Instant;

use crate::element::Element;
use crate::kernels::{Level, Real};
use crate::parallel;

/// Probes of all threads of the current pool together.
///
/// ```
/// use multihead::{inspect::Peak, Level};
/// assert!(Peak::gflops::<f32>(Level::Portable) > 0.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Peak;

/// Steps of a probe that lasts about a millisecond: long against the waking of threads, short against the machine's
/// moods.
const STEPS: usize = 1 << 18;

impl Peak {
    /// Billions of floating-point operations a second, by fused multiply-adds (each counts as two) on registers, on every
    /// thread at once. A level that this CPU does not have counts as portable.
    ///
    /// ```
    /// use multihead::{inspect::Peak, Level};
    /// assert!(Peak::gflops::<f64>(Level::best()) > 0.0);
    /// ```
    pub fn gflops<T: Element>(level: Level) -> f64 {
        let kernels = T::kernels(level);
        let mut sums = vec![T::zero(); parallel::workers(f64::MAX, usize::MAX)];
        let seconds = best_of(2, || parallel::for_each_worker(&mut sums, |sum| *sum = kernels.multiply_adds(STEPS)));
        (sums.len() * kernels.multiply_adds_flop(STEPS)) as f64 / seconds / 1e9
    }

    /// Billions of bytes a second that all threads of the pool together read from a buffer of `bytes` bytes; 0 if there
    /// is no memory for it.
    ///
    /// ```
    /// use multihead::inspect::Peak;
    /// assert!(Peak::read_gbs(1 << 20) > 0.0);
    /// assert_eq!(Peak::read_gbs(usize::MAX), 0.0);
    /// ```
    pub fn read_gbs(bytes: usize) -> f64 {
        let threads = parallel::workers(f64::MAX, usize::MAX);
        let mut buffer = Vec::new();
        if buffer.try_reserve_exact(bytes / size_of::<f32>()).is_err() {
            return 0.0;
        }
        buffer.resize(bytes / size_of::<f32>(), 1f32);
        let kernels = f32::kernels(Level::best());
        let mut parts: Vec<_> = buffer.chunks(buffer.len().div_ceil(threads).max(1)).map(|part| (part, 0.0)).collect();
        let seconds = best_of(5, || parallel::for_each_worker(&mut parts, |(part, sum)| *sum = kernels.read_all(part)));
        (buffer.len() * size_of::<f32>()) as f64 / seconds / 1e9
    }
}

/// The shortest of several runs: a probe can be disturbed and cannot be too fast.
fn best_of(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs).fold(f64::MAX, |best, _| {
        let start = Instant::now();
        f();
        best.min(start.elapsed().as_secs_f64())
    })
}
