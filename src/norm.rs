//! RMSNorm of each query and key head, in place: `heads: [.., head_dim]`, one head after the other in memory.
//!
//! ```text
//! r    = 1 / sqrt(mean_c x[c]^2 + eps)
//! y[c] = weight[c] r x[c]
//! d_x[c]      = r weight[c] d_y[c] - r^3 / head_dim * x[c] * sum_c (weight[c] d_y[c] x[c])
//! d_weight[c] = sum over heads of d_y[c] r x[c]
//! ```
//!
//! (Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>; on heads: Qwen3, Gemma 3.) Squares are summed in `f64`, so
//! they do not overflow. Heads are dealt to the threads in chunks of fixed size, and what a chunk adds to the gradient of
//! the weight is added up in the order of the chunks.

use ndarray::Array1;
use std::borrow::Cow;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::parallel;

/// Heads of a chunk.
const CHUNK: usize = 512;

/// What a number counts as when it is decided on threads.
const FLOP_PER_NUMBER: f64 = 16.0;

/// The rule of all heads.
#[derive(Debug)]
pub(crate) struct HeadNorm<'a, T: Clone> {
    /// `[head_dim]`
    weight: Cow<'a, [T]>,
    eps: f64,
}

impl<'a, T: Element> HeadNorm<'a, T> {
    pub(crate) fn new(weight: &'a Array1<T>, eps: f64) -> Self {
        // Copied only if it is a vector with gaps or backwards.
        let weight = weight.as_slice().map_or_else(|| Cow::Owned(weight.to_vec()), Cow::Borrowed);
        Self { weight, eps }
    }

    /// Normalises each head.
    pub(crate) fn apply(&self, heads: &mut [T]) {
        let width = self.weight.len().max(1);
        let work = FLOP_PER_NUMBER * heads.len() as f64;
        parallel::for_each_chunk(heads, CHUNK * width, work, |_, chunk| {
            for head in chunk.chunks_exact_mut(width) {
                let r = T::from_f64(self.reciprocal(head));
                head.iter_mut().zip(&*self.weight).for_each(|(x, &weight)| *x = weight * (r * *x));
            }
        });
    }

    /// Turns the gradient of the normalised heads into that of `heads`, which are those before, and adds to that of the
    /// weight. A head whose gradient is zero gives nothing, whatever it holds: a mask hid it. `room` is scratch.
    pub(crate) fn differentiate(
        &self,
        heads: &[T],
        d_heads: &mut [T],
        d_weight: &mut [T],
        room: &mut Vec<T>,
    ) -> Result<()> {
        let width = self.weight.len().max(1);
        let count = heads.len() / width;
        let numbers = count.div_ceil(CHUNK) * width;
        room.clear();
        let too_large = |_| Error::TooLarge { argument: "d_weight", axes: "[chunks, head_dim]", got: vec![numbers] };
        room.try_reserve_exact(numbers).map_err(too_large)?;
        room.resize(numbers, T::zero());

        let work = FLOP_PER_NUMBER * heads.len() as f64;
        let gradient: &[T] = d_heads;
        parallel::for_each_chunk(room, width, work, |index, sums| {
            let chunk = index * CHUNK * width..(count * width).min((index + 1) * CHUNK * width);
            let pairs = heads[chunk.clone()].chunks_exact(width).zip(gradient[chunk].chunks_exact(width));
            for (x, d_y) in pairs.filter(|(_, d_y)| is_seen(d_y)) {
                let r = T::from_f64(self.reciprocal(x));
                sums.iter_mut().zip(x).zip(d_y).for_each(|((sum, &x), &d_y)| *sum += d_y * (r * x));
            }
        });
        for sums in room.chunks_exact(width) {
            d_weight.iter_mut().zip(sums).for_each(|(d, &sum)| *d += sum);
        }
        parallel::for_each_chunk(d_heads, CHUNK * width, work, |index, chunk| {
            let heads = heads[index * CHUNK * width..].chunks_exact(width);
            let seen = chunk.chunks_exact_mut(width).zip(heads).filter(|(d_head, _)| is_seen(d_head));
            seen.for_each(|(d_head, head)| self.differentiate_head(head, d_head));
        });
        Ok(())
    }

    fn differentiate_head(&self, head: &[T], d_head: &mut [T]) {
        let r = self.reciprocal(head);
        let terms = head.iter().zip(&*d_head).zip(&*self.weight);
        let sum: f64 = terms.map(|((&x, &d_y), &weight)| (weight * d_y).into_f64() * x.into_f64()).sum();
        let (shrink, r) = (T::from_f64(r * r * r * sum / head.len() as f64), T::from_f64(r));
        for ((d, &x), &weight) in d_head.iter_mut().zip(head).zip(&*self.weight) {
            *d = r * (weight * *d) - shrink * x;
        }
    }

    /// `1 / sqrt(mean of squares + eps)`
    fn reciprocal(&self, head: &[T]) -> f64 {
        // Eight sums, so that additions need not wait for each other.
        let (chunks, rest) = head.as_chunks::<8>();
        let mut sums = [0.0; 8];
        for chunk in chunks {
            sums.iter_mut().zip(chunk).for_each(|(sum, x)| *sum += x.into_f64() * x.into_f64());
        }
        sums.iter_mut().zip(rest).for_each(|(sum, x)| *sum += x.into_f64() * x.into_f64());
        (sums.iter().sum::<f64>() / head.len() as f64 + self.eps).sqrt().recip()
    }
}

/// Whether a head has a gradient.
fn is_seen<T: Element>(d_head: &[T]) -> bool {
    d_head.iter().any(|d| !d.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{array, s};

    /// Numbers without a pattern.
    fn numbers<T: Element>(seed: u64, n: usize) -> Vec<T> {
        let mut state = seed;
        std::iter::repeat_with(|| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            T::from_f64((state >> 40) as f64 / f64::from(1 << 23) - 1.0)
        })
        .take(n)
        .collect()
    }

    fn plain(heads: &[f64], weight: &Array1<f64>, eps: f64) -> Vec<f64> {
        let normalise = |head: &[f64]| {
            let mean = head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64;
            head.iter().zip(weight).map(|(x, w)| x / (mean + eps).sqrt() * w).collect::<Vec<_>>()
        };
        heads.chunks(weight.len()).flat_map(normalise).collect()
    }

    #[test]
    fn heads_are_what_the_formula_says() {
        for width in [1, 3, 8, 13, 64] {
            let (heads, weight): (Vec<f64>, _) = (numbers(1, 1100 * width), Array1::from(numbers(2, width)));
            for eps in [0.0, 1e-6, 0.5] {
                let want = plain(&heads, &weight, eps);
                let mut got = heads.clone();
                HeadNorm::new(&weight, eps).apply(&mut got);
                assert!(got.iter().zip(&want).all(|(x, y)| (x - y).abs() < 1e-14), "{width} {eps}");
                let single = |x: &[f64]| x.iter().map(|&x| x as f32).collect::<Vec<_>>();
                let mut got = single(&heads);
                HeadNorm::new(&weight.mapv(|x| x as f32), eps).apply(&mut got);
                assert!(got.iter().zip(&want).all(|(&x, y)| (f64::from(x) - y).abs() < 1e-6), "{width} {eps}");
            }
        }
    }

    #[test]
    fn large_and_small_heads_keep_their_directions() {
        for scale in [1e-30f32, 1e25, 1e37] {
            let mut heads = [3.0 * scale, -4.0 * scale];
            HeadNorm::new(&array![1.0, 1.0], 0.0).apply(&mut heads);
            let norm = 12.5f32.sqrt();
            assert!((heads[0] - 3.0 / norm).abs() < 1e-6 && (heads[1] + 4.0 / norm).abs() < 1e-6, "{heads:?}");
        }
        let mut nothing = [0.0f32; 4];
        HeadNorm::new(&Array1::ones(4), 1e-6).apply(&mut nothing);
        assert_eq!(nothing, [0.0; 4]);
        let mut bad = [f32::NAN, 1.0, 2.0, 3.0];
        HeadNorm::new(&Array1::ones(2), 1e-6).apply(&mut bad);
        assert!(bad[0].is_nan() && bad[1].is_nan() && bad[2].is_finite() && bad[3].is_finite());
    }

    #[test]
    fn a_weight_may_lie_backwards() {
        let backwards = array![3.0, 2.0, 1.0].slice_move(s![..;-1]);
        let (mut got, mut want) = ([1.0, -2.0, 0.5], [1.0, -2.0, 0.5]);
        HeadNorm::new(&backwards, 0.1).apply(&mut got);
        HeadNorm::new(&array![1.0, 2.0, 3.0], 0.1).apply(&mut want);
        assert_eq!(got, want);
    }

    #[test]
    fn gradients_are_slopes() {
        const STEP: f64 = 1e-6;
        for (width, count) in [(1, 3), (2, 5), (7, 4), (16, 3)] {
            let (heads, weight) = (numbers::<f64>(3, width * count), Array1::from(numbers::<f64>(4, width)));
            let d_y: Vec<f64> = numbers(5, width * count);
            for eps in [1e-6, 0.3] {
                let loss = |heads: &[f64], weight: &Array1<f64>| -> f64 {
                    plain(heads, weight, eps).iter().zip(&d_y).map(|(y, d)| y * d).sum()
                };
                let (mut d_x, mut d_weight) = (d_y.clone(), vec![0.25; width]);
                let norm = HeadNorm::new(&weight, eps);
                norm.differentiate(&heads, &mut d_x, &mut d_weight, &mut Vec::new()).unwrap();
                let slope = |numbers: &[f64], index: usize, loss: &dyn Fn(&[f64]) -> f64| {
                    let moved = |step: f64| {
                        let mut numbers = numbers.to_vec();
                        numbers[index] += step;
                        loss(&numbers)
                    };
                    (moved(STEP) - moved(-STEP)) / (2.0 * STEP)
                };
                for (index, &d) in d_x.iter().enumerate() {
                    let want = slope(&heads, index, &|heads| loss(heads, &weight));
                    assert!((d - want).abs() < 1e-7 * (1.0 + want.abs()), "{width} {eps}: d_x[{index}] {d} {want}");
                }
                for (index, &d) in d_weight.iter().enumerate() {
                    let want = 0.25 + slope(&weight.to_vec(), index, &|weight| loss(&heads, &weight.to_vec().into()));
                    assert!(
                        (d - want).abs() < 1e-7 * (1.0 + want.abs()),
                        "{width} {eps}: d_weight[{index}] {d} {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn gradients_do_not_depend_on_chunks_or_threads() {
        let width = 24;
        let count = 4 * CHUNK + 77;
        let (heads, d_y): (Vec<f32>, Vec<f32>) = (numbers(6, width * count), numbers(8, width * count));
        let weight = Array1::from(numbers::<f32>(7, width));
        let norm = HeadNorm::new(&weight, 1e-6);
        let run = |heads: &[f32], d_y: &[f32]| {
            let (mut d_x, mut d_weight) = (d_y.to_vec(), vec![0.0; width]);
            norm.differentiate(heads, &mut d_x, &mut d_weight, &mut vec![f32::NAN; 7]).unwrap();
            (d_x, d_weight)
        };
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| run(&heads, &d_y))
        };
        let want = on(1);
        for threads in [2, 3, 8] {
            assert_eq!(on(threads), want, "{threads} threads");
        }
        // Each head by itself.
        let mut sums = vec![0.0f64; width];
        for ((head, d_y), want) in heads.chunks(width).zip(d_y.chunks(width)).zip(want.0.chunks(width)) {
            let (d_x, d_weight) = run(head, d_y);
            assert_eq!(d_x, want);
            sums.iter_mut().zip(d_weight).for_each(|(sum, d)| *sum += f64::from(d));
        }
        assert!(sums.iter().zip(&want.1).all(|(sum, &d)| (sum - f64::from(d)).abs() < 1e-3));
    }
}
