//! What the CPU can do at best, to judge a kernel by: fused multiply-adds in registers, and a sum over memory.

use super::real::Real;
use super::simd::Simd;

/// Independent chains: enough to hide four cycles of latency on two ports, few enough for 16 registers.
const CHAINS: usize = 12;

/// Runs `steps * 12` vector multiply-adds on registers; returns their sum, so that they cannot be left out.
#[inline(always)]
pub(super) fn multiply_adds<S: Simd>(s: S, steps: usize, factor: S::Elem) -> S::Elem {
    let factor = s.splat(factor);
    let mut chains = [s.splat(S::Elem::LOG2_E); CHAINS];
    for _ in 0..steps {
        for chain in &mut chains {
            *chain = s.fma(*chain, factor, factor);
        }
    }
    s.reduce_sum(chains.into_iter().fold(s.zero(), |sum, chain| s.add(sum, chain)))
}

/// Floating-point operations of one step.
pub(super) const fn flop_per_step(lanes: usize) -> usize {
    2 * lanes * CHAINS
}

/// Sums `n` numbers, read once and in order, in 8 chains.
///
/// # Safety
/// `x` must be valid for reading `n` elements.
#[inline(always)]
pub(super) unsafe fn sum<S: Simd>(s: S, x: *const S::Elem, n: usize) -> S::Elem {
    let mut chains = [s.zero(); 8];
    let step = 8 * S::LANES;
    for first in (0..n / step).map(|i| i * step) {
        for (i, chain) in chains.iter_mut().enumerate() {
            // SAFETY: first + step <= n elements are readable (contract).
            *chain = s.add(*chain, unsafe { s.load(x.add(first + i * S::LANES)) });
        }
    }
    s.reduce_sum(chains.into_iter().fold(s.zero(), |sum, chain| s.add(sum, chain)))
}
