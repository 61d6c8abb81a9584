//! RMSNorm and LayerNorm of each query and key head or of each token, in place: `heads: [.., head_dim]`, one head after the
//! other in memory (or tokens, `[.., d_model]`).
//!
//! ```text
//! m    = mean_c x[c] in LayerNorm, 0 in RMSNorm
//! r    = 1 / sqrt(mean_c (x[c] - m)^2 + eps)
//! y[c] = weight[c] r (x[c] - m) + bias[c]
//! g[c] = weight[c] d_y[c] - mean_c (weight[c] d_y[c]) in LayerNorm, weight[c] d_y[c] in RMSNorm
//! d_x[c]      = r g[c] - r^3 / head_dim * (x[c] - m) * sum_c (weight[c] d_y[c] (x[c] - m))
//! d_weight[c] = sum over heads of d_y[c] r (x[c] - m)
//! ```
//!
//! (Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>; on heads: Qwen3, Gemma 3. Ba, Kiros and Hinton 2016,
//! <https://arxiv.org/abs/1607.06450>.) Numbers and squares are summed in `f64`, so they do not overflow. Heads are dealt to the threads in chunks of fixed size, and what a chunk adds to the gradient of
//! the weight is added up in the order of the chunks.

use ndarray::Array1;
use std::borrow::Cow;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernels::{Kernels, Moments, NormInput, RowRule, moments};
use crate::parallel;

/// Heads of a chunk of backward.
const CHUNK: usize = 512;

/// Numbers of a chunk of forward, about.
const CHUNK_NUMBERS: usize = 32 * 1024;

/// What a number counts as when it is decided on threads.
const FLOP_PER_NUMBER: f64 = 16.0;

/// The rule of all heads.
#[derive(Debug)]
pub(crate) struct RowNorm<'a, T: Clone> {
    /// `[head_dim]`
    weight: Cow<'a, [T]>,
    /// `[head_dim]`
    bias: Option<Cow<'a, [T]>>,
    eps: f64,
    /// Whether the mean is taken off.
    centred: bool,
}

impl<'a, T: Element> RowNorm<'a, T> {
    /// RMSNorm.
    pub(crate) fn new(weight: &'a Array1<T>, eps: f64) -> Self {
        Self { weight: Self::slice(weight), bias: None, eps, centred: false }
    }

    /// LayerNorm: the mean is taken off, and the bias is added in the end.
    pub(crate) fn centred(self, bias: Option<&'a Array1<T>>) -> Self {
        Self { bias: bias.map(Self::slice), centred: true, ..self }
    }

    /// Copied only if it is a vector with gaps or backwards.
    fn slice(vector: &'a Array1<T>) -> Cow<'a, [T]> {
        vector.as_slice().map_or_else(|| Cow::Owned(vector.to_vec()), Cow::Borrowed)
    }

    /// Normalises each head: what stands in `heads`, or the input that takes its place.
    pub(crate) fn apply(&self, kernels: &Kernels<T>, input: NormInput<'_, T>, heads: &mut [T]) {
        let width = self.weight.len().max(1);
        let work = FLOP_PER_NUMBER * heads.len() as f64;
        let rule =
            RowRule { weight: &self.weight, bias: self.bias.as_deref(), eps: self.eps, is_centred: self.centred };
        let len = (CHUNK_NUMBERS / width).max(1) * width;
        parallel::for_each_chunk(heads, len, work, |index, chunk| {
            let first = index * len;
            kernels.normalise(&rule, input.part(first..first + chunk.len()), chunk);
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
                let Moments { mean, r } = self.moments(x);
                let r = T::from_f64(r);
                sums.iter_mut().zip(x).zip(d_y).for_each(|((sum, &x), &d_y)| *sum += d_y * (r * (x - mean)));
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
        let Moments { mean, r } = self.moments(head);
        let width = head.len() as f64;
        let terms = || head.iter().zip(&*d_head).zip(&*self.weight);
        let sum: f64 = terms().map(|((&x, &d_y), &weight)| (weight * d_y).into_f64() * (x - mean).into_f64()).sum();
        let shift =
            if self.centred { terms().map(|((_, &d_y), &weight)| (weight * d_y).into_f64()).sum() } else { 0.0 };
        let (shrink, shift, r) = (r * r * r * sum / width, T::from_f64(shift / width), T::from_f64(r));
        let shrink = T::from_f64(shrink);
        for ((d, &x), &weight) in d_head.iter_mut().zip(head).zip(&*self.weight) {
            *d = r * (weight * *d - shift) - shrink * (x - mean);
        }
    }

    fn moments(&self, head: &[T]) -> Moments<T> {
        moments(head, self.eps, self.centred)
    }
}

/// Whether a head has a gradient.
fn is_seen<T: Element>(d_head: &[T]) -> bool {
    d_head.iter().any(|d| !d.is_zero())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Level;
    use ndarray::{array, s};

    fn run<T: Element>(norm: &RowNorm<'_, T>, heads: &mut [T]) {
        norm.apply(T::kernels(Level::best()), NormInput::Rows, heads);
    }

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

    /// A norm of each kind; the bias is twice the weight.
    fn norms<T: Element>(weight: &Array1<T>, eps: f64, check: impl Fn(bool, RowNorm<'_, T>)) {
        check(false, RowNorm::new(weight, eps));
        check(true, RowNorm::new(weight, eps).centred(Some(&(weight + weight))));
    }

    fn plain(heads: &[f64], weight: &Array1<f64>, eps: f64, centred: bool) -> Vec<f64> {
        let normalise = |head: &[f64]| {
            let mean = |f: &dyn Fn(f64) -> f64| head.iter().map(|&x| f(x)).sum::<f64>() / head.len() as f64;
            let m = if centred { mean(&|x| x) } else { 0.0 };
            let deviation = (mean(&|x| (x - m).powi(2)) + eps).sqrt();
            let bias = if centred { 2.0 } else { 0.0 };
            head.iter().zip(weight).map(|(x, w)| (x - m) / deviation * w + bias * w).collect::<Vec<_>>()
        };
        heads.chunks(weight.len()).flat_map(normalise).collect()
    }

    fn check(heads: &[f64], weight: &Array1<f64>, eps: f64) {
        norms(weight, eps, |centred, norm| {
            let mut got = heads.to_vec();
            run(&norm, &mut got);
            let want = plain(heads, weight, eps, centred);
            let near = |(x, y): (&f64, &f64)| (x - y).abs() < if centred { 1e-12 } else { 1e-14 };
            assert!(got.iter().zip(&want).all(near), "{} {eps} {centred}", weight.len());
        });
        norms(&weight.mapv(|x| x as f32), eps, |centred, norm| {
            let mut got: Vec<_> = heads.iter().map(|&x| x as f32).collect();
            run(&norm, &mut got);
            // A mean that was rounded, over a deviation that may be small: a few numbers of f32 may be close together.
            let want = plain(heads, weight, eps, centred);
            let near = |(&x, y): (&f32, &f64)| (f64::from(x) - y).abs() < if centred { 2e-4 } else { 1e-6 };
            assert!(got.iter().zip(&want).all(near), "{} {eps} {centred}", weight.len());
        });
    }

    #[test]
    fn heads_are_what_the_formula_says() {
        for width in [1, 3, 8, 13, 64] {
            let (heads, weight): (Vec<f64>, _) = (numbers(1, 1100 * width), Array1::from(numbers(2, width)));
            for eps in [0.0, 1e-6, 0.5] {
                // Of one number nothing is left without the mean: rounding over nothing if eps is 0.
                if width > 1 || eps > 0.0 {
                    check(&heads, &weight, eps);
                }
            }
        }
    }

    #[test]
    fn large_and_small_heads_keep_their_directions() {
        for scale in [1e-30f32, 1e25, 1e37] {
            let mut heads = [3.0 * scale, -4.0 * scale];
            run(&RowNorm::new(&array![1.0, 1.0], 0.0), &mut heads);
            let norm = 12.5f32.sqrt();
            assert!((heads[0] - 3.0 / norm).abs() < 1e-6 && (heads[1] + 4.0 / norm).abs() < 1e-6, "{heads:?}");
        }
        let mut nothing = [0.0f32; 4];
        run(&RowNorm::new(&Array1::ones(4), 1e-6), &mut nothing);
        assert_eq!(nothing, [0.0; 4]);
        let mut bad = [f32::NAN, 1.0, 2.0, 3.0];
        run(&RowNorm::new(&Array1::ones(2), 1e-6), &mut bad);
        assert!(bad[0].is_nan() && bad[1].is_nan() && bad[2].is_finite() && bad[3].is_finite());
    }

    #[test]
    fn a_weight_may_lie_backwards() {
        let backwards = array![3.0, 2.0, 1.0].slice_move(s![..;-1]);
        let (mut got, mut want) = ([1.0, -2.0, 0.5], [1.0, -2.0, 0.5]);
        run(&RowNorm::new(&backwards, 0.1), &mut got);
        run(&RowNorm::new(&array![1.0, 2.0, 3.0], 0.1), &mut want);
        assert_eq!(got, want);
    }

    #[test]
    fn gradients_are_slopes() {
        const STEP: f64 = 1e-6;
        for (width, count) in [(1, 3), (2, 5), (7, 4), (16, 3)] {
            let (heads, weight) = (numbers::<f64>(3, width * count), Array1::from(numbers::<f64>(4, width)));
            let d_y: Vec<f64> = numbers(5, width * count);
            for (eps, centred) in [(1e-6, false), (0.3, false), (0.01, true), (0.3, true)] {
                let loss = |heads: &[f64], weight: &Array1<f64>| -> f64 {
                    plain(heads, weight, eps, centred).iter().zip(&d_y).map(|(y, d)| y * d).sum()
                };
                let (mut d_x, mut d_weight) = (d_y.clone(), vec![0.25; width]);
                let mut norm = RowNorm::new(&weight, eps);
                // The loss of a bias that is twice the weight has a slope that is not asked for here.
                if centred {
                    norm = norm.centred(None);
                    let columns = d_y.chunks(width).flat_map(|d_y| d_y.iter().enumerate());
                    columns.for_each(|(c, d_y)| d_weight[c] += 2.0 * d_y);
                }
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
                    assert!(
                        (d - want).abs() < 1e-7 * (1.0 + want.abs()),
                        "{width} {eps} {centred}: d_x[{index}] {d} {want}"
                    );
                }
                for (index, &d) in d_weight.iter().enumerate() {
                    let want = 0.25 + slope(&weight.to_vec(), index, &|weight| loss(&heads, &weight.to_vec().into()));
                    assert!(
                        (d - want).abs() < 1e-7 * (1.0 + want.abs()),
                        "{width} {eps} {centred}: d_weight[{index}] {d} {want}"
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
        let norm = RowNorm::new(&weight, 1e-6);
        let back = |heads: &[f32], d_y: &[f32]| {
            let (mut d_x, mut d_weight) = (d_y.to_vec(), vec![0.0; width]);
            norm.differentiate(heads, &mut d_x, &mut d_weight, &mut vec![f32::NAN; 7]).unwrap();
            (d_x, d_weight)
        };
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| back(&heads, &d_y))
        };
        let want = on(1);
        for threads in [2, 3, 8] {
            assert_eq!(on(threads), want, "{threads} threads");
        }
        // Each head by itself.
        let mut sums = vec![0.0f64; width];
        for ((head, d_y), want) in heads.chunks(width).zip(d_y.chunks(width)).zip(want.0.chunks(width)) {
            let (d_x, d_weight) = back(head, d_y);
            assert_eq!(d_x, want);
            sums.iter_mut().zip(d_weight).for_each(|(sum, d)| *sum += f64::from(d));
        }
        assert!(sums.iter().zip(&want.1).all(|(sum, &d)| (sum - f64::from(d)).abs() < 1e-3));
    }
}
