//! The peaks of this machine, probed next to a measurement that is to be judged by them.
//!
//! On a shared machine the clock and the memory change from second to second, so a fraction of peak means something only
//! if both were taken together.

use std::time::Instant;

use crate::kernels::{Level, Real};
use crate::parallel;

/// Floating-point rates of all threads of the current pool together.
///
/// ```
/// use multihead::{inspect::Peak, Level};
/// let peak = Peak::probe(Level::Portable);
/// assert!(peak.gflops_f32() > 0.0);
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Peak {
    gflops_f32: f64,
    gflops_f64: f64,
}

/// A probe lasts about a millisecond: long against the waking of threads, short against the machine's moods.
const STEPS: usize = 1 << 18;

impl Peak {
    /// Runs fused multiply-adds on registers, on every thread of the current pool at once. A level that this CPU does
    /// not have counts as portable.
    pub fn probe(level: Level) -> Self {
        Self { gflops_f32: gflops::<f32>(level), gflops_f64: gflops::<f64>(level) }
    }

    /// Billions of `f32` operations a second; a multiply-add counts as two.
    pub fn gflops_f32(&self) -> f64 {
        self.gflops_f32
    }

    /// Billions of `f64` operations a second.
    pub fn gflops_f64(&self) -> f64 {
        self.gflops_f64
    }

    /// Billions of bytes a second that all threads of the pool together read from a buffer of `bytes` bytes.
    pub fn read_gbs(bytes: usize) -> f64 {
        let threads = parallel::workers(f64::MAX, usize::MAX);
        let buffer = vec![1f32; bytes / size_of::<f32>()];
        let kernels = f32::kernels(Level::best());
        let mut parts: Vec<_> = buffer.chunks(buffer.len().div_ceil(threads).max(1)).map(|part| (part, 0.0)).collect();
        let seconds = best_of(5, || parallel::for_each_worker(&mut parts, |(part, sum)| *sum = kernels.read_all(part)));
        (buffer.len() * size_of::<f32>()) as f64 / seconds / 1e9
    }
}

fn gflops<T: Real>(level: Level) -> f64 {
    let kernels = T::kernels(level);
    let mut sums = vec![T::zero(); parallel::workers(f64::MAX, usize::MAX)];
    let seconds = best_of(2, || parallel::for_each_worker(&mut sums, |sum| *sum = kernels.multiply_adds(STEPS)));
    (sums.len() * kernels.multiply_adds_flop(STEPS)) as f64 / seconds / 1e9
}

/// The shortest of several runs: a probe can be disturbed and cannot be too fast.
fn best_of(runs: usize, mut f: impl FnMut()) -> f64 {
    (0..runs).fold(f64::MAX, |best, _| {
        let start = Instant::now();
        f();
        best.min(start.elapsed().as_secs_f64())
    })
}
