//! Initial weights, from a seed and nothing else: the same numbers on every machine.

use ndarray::Array2;

use crate::element::{Element, zeros};
use crate::error::Result;

/// How a new layer's weights are drawn. Biases and sinks start at 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Init {
    /// Each matrix uniform within `sqrt(6 / (in + out))` (Glorot and Bengio 2010).
    #[default]
    XavierUniform,
    /// As PyTorch's `nn.MultiheadAttention` does it: W_Q, W_K and W_V as one matrix, uniform within
    /// `sqrt(6 / (d_model + out_q + out_k + out_v))`; W_O within `1 / sqrt(in)`.
    XavierFused,
    /// Each matrix uniform within `sqrt(6 / in)` (He et al. 2015).
    KaimingUniform,
    /// All weights 0.
    Zeros,
}

impl Init {
    /// The bounds of the uniform distributions of w_q, w_k, w_v and w_o, whose shapes are `[in, out]`.
    fn bounds(self, shapes: [(usize, usize); 4]) -> [f64; 4] {
        let root = |numerator: f64, denominator: usize| (numerator / denominator.max(1) as f64).sqrt();
        match self {
            Self::XavierUniform => shapes.map(|(inputs, outputs)| root(6.0, inputs.saturating_add(outputs))),
            Self::KaimingUniform => shapes.map(|(inputs, _)| root(6.0, inputs)),
            Self::Zeros => [0.0; 4],
            Self::XavierFused => {
                let [q, k, v, o] = shapes;
                let fused = root(6.0, [q.0, q.1, k.1, v.1].iter().fold(0, |sum: usize, &n| sum.saturating_add(n)));
                [fused, fused, fused, root(1.0, o.0)]
            }
        }
    }

    /// The matrices w_q, w_k, w_v and w_o.
    pub(super) fn draw<T: Element>(self, seed: u64, shapes: [(usize, usize); 4]) -> Result<[Array2<T>; 4]> {
        let bounds = self.bounds(shapes);
        let matrix = |index: usize, name| -> Result<Array2<T>> {
            let mut w = zeros(name, "[in, out]", shapes[index])?;
            // Streams of one seed start 2^62 draws apart, so no two matrices share numbers.
            let mut draws = SplitMix64(seed.wrapping_add((index as u64) << 62));
            w.map_inplace(|w| *w = T::from_f64(bounds[index] * draws.symmetric()));
            Ok(w)
        };
        Ok([matrix(0, "w_q")?, matrix(1, "w_k")?, matrix(2, "w_v")?, matrix(3, "w_o")?])
    }
}

/// The generator of Steele, Lea and Flood 2014 ("Fast splittable pseudorandom number generators").
struct SplitMix64(u64);

impl SplitMix64 {
    /// Uniform in [-1, 1), 53 bits.
    fn symmetric(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^= z >> 31;
        (z >> 11) as f64 * 2f64.powi(-52) - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPES: [(usize, usize); 4] = [(64, 96), (32, 48), (16, 24), (48, 64)];

    #[test]
    fn draws_fill_their_bounds() {
        let cases = [
            (Init::XavierUniform, SHAPES.map(|(i, o)| (6.0 / (i + o) as f64).sqrt())),
            (Init::KaimingUniform, SHAPES.map(|(i, _)| (6.0 / i as f64).sqrt())),
            (Init::XavierFused, {
                let fused = (6.0f64 / (64.0 + 96.0 + 48.0 + 24.0)).sqrt();
                [fused, fused, fused, (1.0f64 / 48.0).sqrt()]
            }),
        ];
        for (init, bounds) in cases {
            for (w, bound) in init.draw::<f64>(7, SHAPES).unwrap().iter().zip(bounds) {
                let largest = w.iter().fold(0.0, |m: f64, w| m.max(w.abs()));
                assert!(largest <= bound && largest > 0.97 * bound, "{init:?} {largest} {bound}");
                assert!(w.mean().unwrap().abs() < 0.1 * bound, "{init:?}");
            }
        }
        assert!(Init::Zeros.draw::<f32>(7, SHAPES).unwrap().iter().all(|w| w.iter().all(|&w| w == 0.0)));
    }

    #[test]
    fn a_seed_fixes_all_and_matrices_differ() {
        let square = [(8, 8); 4];
        let draw = |seed| Init::XavierUniform.draw::<f32>(seed, square).unwrap();
        let [q, k, v, o] = draw(3);
        assert_eq!(draw(3), [q.clone(), k.clone(), v.clone(), o.clone()]);
        assert_ne!(draw(4)[0], q);
        assert!(q != k && k != v && v != o && q != v && q != o && k != o);
    }
}
