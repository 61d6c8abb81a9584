//! The functions between the two products of a feed-forward block. All of them are `x g(x)`:
//!
//! ```text
//! GELU        g(x) = Φ(x), the normal distribution             g'(x) = φ(x), its density
//! GELU, tanh  g(x) = (1 + tanh u) / 2, u = c (x + a x³)        g'(x) = (1 - tanh² u) c (1 + 3 a x²) / 2
//! SiLU        g(x) = 1 / (1 + e^-x)                            g'(x) = g(x) (1 - g(x))
//! ReLU        g(x) = 1 where x > 0, else 0                     g'(x) = 0
//! ```
//!
//! (Hendrycks and Gimpel 2016, <https://arxiv.org/abs/1606.08415>; `c = √(2/π)`, `a = 0.044715`.) The slope is
//! `g(x) + x g'(x)`. GELU has a kernel of its own, `kernels/normal.rs`.

use ndarray::ArrayViewMut2;

use crate::element::Element;
use crate::kernels::Kernels;
use crate::parallel;

/// The function between the two products of a feed-forward block.
///
/// ```
/// use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::{array, Array2}};
/// let weights = FeedForwardWeights::new(Array2::eye(3), Array2::eye(3));
/// let relu = FeedForward::new(weights, Activation::Relu)?;
/// assert_eq!(relu.forward(&array![[-1.0, 0.0, 2.0]])?, array![[0.0, 0.0, 2.0]]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Activation {
    /// `x Φ(x)` with the normal distribution Φ, as BERT and ViT have it.
    Gelu,
    /// GELU with `tanh` in the place of Φ, as GPT-2 has it.
    #[doc(alias = "gelu_new")]
    #[doc(alias = "gelu_pytorch_tanh")]
    GeluTanh,
    /// `max(x, 0)`
    Relu,
    /// `x / (1 + e^-x)`; with a gate it makes SwiGLU.
    #[doc(alias = "swish")]
    #[doc(alias = "SwiGLU")]
    Silu,
}

/// What takes the place of each number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Part {
    Value,
    Slope,
}

/// Numbers that a thread takes at a time, and that lie on the stack at a time.
const CHUNK: usize = 8192;
const STRIP: usize = 128;

/// What a number counts as when it is decided on threads.
const FLOP_PER_NUMBER: f64 = 40.0;

/// `√(2/π)` and the factor of x³.
const TANH_FACTORS: [f64; 2] = [0.797_884_560_802_865_4, 0.044_715];

/// Replaces each number by the value or the slope of the function there.
pub(crate) fn activate<T: Element>(kernels: &Kernels<T>, activation: Activation, part: Part, numbers: &mut [T]) {
    let work = FLOP_PER_NUMBER * numbers.len() as f64;
    parallel::for_each_chunk(numbers, CHUNK, work, |_, chunk| activation.replace(kernels, part, chunk));
}

impl Activation {
    /// Replaces each number of a block by the value there, on this thread.
    pub(crate) fn apply<T: Element>(self, kernels: &Kernels<T>, block: &mut ArrayViewMut2<'_, T>) {
        for mut row in block.outer_iter_mut() {
            match row.as_slice_mut() {
                Some(row) => self.replace(kernels, Part::Value, row),
                None => row.iter_mut().for_each(|x| self.replace(kernels, Part::Value, std::slice::from_mut(x))),
            }
        }
    }

    fn replace<T: Element>(self, kernels: &Kernels<T>, part: Part, numbers: &mut [T]) {
        match (self, part) {
            (Self::Gelu, Part::Value) => kernels.gelu(numbers),
            (Self::Gelu, Part::Slope) => kernels.gelu_slope(numbers),
            // NaN stays.
            (Self::Relu, Part::Value) => {
                numbers.iter_mut().filter(|x| **x < T::zero()).for_each(|x| *x = T::zero());
            }
            (Self::Relu, Part::Slope) => numbers.iter_mut().filter(|x| !x.is_nan()).for_each(|x| {
                *x = if *x > T::zero() { T::one() } else { T::zero() };
            }),
            (Self::GeluTanh | Self::Silu, _) => self.replace_by_gates(kernels, part, numbers),
        }
    }

    /// By strips that lie on the stack: g and g', then what they make of x.
    fn replace_by_gates<T: Element>(self, kernels: &Kernels<T>, part: Part, numbers: &mut [T]) {
        let (mut gate, mut slope) = ([T::zero(); STRIP], [T::zero(); STRIP]);
        for x in numbers.chunks_mut(STRIP) {
            let (gate, slope) = (&mut gate[..x.len()], &mut slope[..x.len()]);
            gates(kernels, self, x, gate, slope);
            // An infinite x has a gate of 0 or 1 and no slope of it: 0 times infinity must not come up.
            let times = |x: T, factor: T| if factor.is_zero() { T::zero() } else { x * factor };
            for ((x, &gate), &slope) in x.iter_mut().zip(&*gate).zip(&*slope) {
                *x = match part {
                    Part::Value => times(*x, gate),
                    Part::Slope => gate + times(*x, slope),
                };
            }
        }
    }
}

/// g and g' at each x, for GELU with tanh and for SiLU.
fn gates<T: Element>(kernels: &Kernels<T>, activation: Activation, x: &[T], gate: &mut [T], slope: &mut [T]) {
    let [one, half] = [1.0, 0.5].map(T::from_f64);
    match activation {
        Activation::GeluTanh => {
            let [factor, cubic] = TANH_FACTORS.map(T::from_f64);
            let three = T::from_f64(3.0);
            gate.iter_mut().zip(x).for_each(|(g, &x)| *g = factor * (x + cubic * x * x * x));
            kernels.tanh(gate);
            for ((slope, gate), &x) in slope.iter_mut().zip(gate).zip(x) {
                let rest = one - *gate * *gate;
                // Where tanh is 1 x may be so large that its square is infinite.
                *slope = if rest.is_zero() { rest } else { half * rest * factor * (one + three * cubic * x * x) };
                *gate = half * (one + *gate);
            }
        }
        _ => {
            let factor = T::from_f64(-std::f64::consts::LOG2_E);
            gate.iter_mut().zip(x).for_each(|(g, &x)| *g = factor * x.abs());
            kernels.exp2(gate);
            for ((slope, gate), &x) in slope.iter_mut().zip(gate).zip(x) {
                let e = *gate;
                let large = one / (one + e);
                let small = e * large;
                *slope = large * small;
                *gate = if x < T::zero() { small } else { large };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Level;

    const ALL: [Activation; 4] = [Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Silu];

    fn run<T: Element>(activation: Activation, part: Part, x: &[T]) -> Vec<T> {
        let mut y = x.to_vec();
        T::activate(Level::best(), activation, part, &mut y);
        y
    }

    /// x, Φ(x) rounded to the nearest number.
    const NORMAL: [(f64, f64); 8] = [
        (-6.0, 9.86587645037698e-10),
        (-3.0, 0.0013498980316300946),
        (-1.0, 0.15865525393145705),
        (-0.125, 0.4502617751698871),
        (0.0, 0.5),
        (0.5, 0.6914624612740131),
        (2.0, 0.9772498680518208),
        (4.0, 0.9999683287581669),
    ];

    #[test]
    fn values_are_those_of_the_formulas() {
        for (x, phi) in NORMAL {
            let got = run(Activation::Gelu, Part::Value, &[x])[0];
            // The exponent x² / 2 has been rounded, and its error is that of the power.
            assert!((got - x * phi).abs() <= 1e-14 * (x * phi).abs(), "{x} {got} {}", x * phi);
            let single = f64::from(run(Activation::Gelu, Part::Value, &[x as f32])[0]);
            assert!((single - x * phi).abs() < 1e-6 * (x * phi).abs().max(1e-2), "{x} {single}");
        }
        let x: Vec<f64> = (-4000..4000).map(|i| f64::from(i) / 317.0).collect();
        let [factor, cubic] = TANH_FACTORS;
        let plain = |activation, x: f64| match activation {
            Activation::GeluTanh => 0.5 * x * (1.0 + (factor * (x + cubic * x.powi(3))).tanh()),
            Activation::Silu => x / (1.0 + (-x).exp()),
            _ => x.max(0.0),
        };
        for activation in &ALL[1..] {
            let single: Vec<f32> = x.iter().map(|&x| x as f32).collect();
            let got = run(*activation, Part::Value, &x);
            for ((&x, got), single) in x.iter().zip(got).zip(run(*activation, Part::Value, &single)) {
                let want = plain(*activation, x);
                assert!((got - want).abs() < 1e-14 * x.abs().max(1.0), "{activation:?} {x} {got} {want}");
                assert!((f64::from(single) - want).abs() < 1e-6 * x.abs().max(1.0), "{activation:?} {x} {single}");
            }
        }
    }

    #[test]
    fn slopes_are_differences() {
        let x: Vec<f64> = (-800..800).map(|i| (f64::from(i) + 0.5) / 97.0).collect();
        let step = 1e-5;
        for activation in ALL {
            let moved = |by: f64| run(activation, Part::Value, &x.iter().map(|x| x + by).collect::<Vec<_>>());
            let (above, below) = (moved(step), moved(-step));
            for (i, slope) in run(activation, Part::Slope, &x).into_iter().enumerate() {
                let want = (above[i] - below[i]) / (2.0 * step);
                assert!((slope - want).abs() < 1e-8, "{activation:?} {}: {slope} {want}", x[i]);
            }
        }
    }

    #[test]
    fn the_ends_have_their_limits_and_nan_stays() {
        for activation in ALL {
            for large in [f32::INFINITY, f32::MAX, 1e20] {
                let value = run(activation, Part::Value, &[large, -large, f32::NAN, 0.0]);
                assert!(value[0] == large && value[1] == 0.0 && value[2].is_nan() && value[3] == 0.0, "{value:?}");
                let slope = run(activation, Part::Slope, &[large, -large, f32::NAN]);
                assert!(slope[0] == 1.0 && slope[1] == 0.0 && slope[2].is_nan(), "{activation:?} {slope:?}");
            }
        }
    }

    #[test]
    fn every_length_and_any_number_of_threads_gives_the_same_bits() {
        let x: Vec<f32> = (0..3 * CHUNK + 77).map(|i| (i % 4001) as f32 / 500.0 - 4.0).collect();
        for activation in ALL {
            let want = run(activation, Part::Value, &x);
            for threads in [1, 3] {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
                assert_eq!(pool.install(|| run(activation, Part::Value, &x)), want);
            }
            for n in [0, 1, 7, STRIP - 1, STRIP, STRIP + 1] {
                assert_eq!(run(activation, Part::Value, &x[..n]), want[..n]);
            }
        }
    }
}
