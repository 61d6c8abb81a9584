//! RMSNorm of query and key heads: where it stands in a layer, and what it must not touch.

use crate::common;

use common::layer::Layer;
use common::{Call, ROUNDING, Seeded};
use multihead::ndarray::{Array1, Array3};
use multihead::{Mask, MultiHeadAttention, Rope, RopeStyle, Weights};

/// Each head of `[batch, len, heads * head_dim]`, normalised by the formula.
fn normalised(x: &Array3<f64>, weight: &Array1<f64>, eps: f64) -> Array3<f64> {
    let mut x = x.clone();
    for mut token in x.rows_mut() {
        for mut head in token.exact_chunks_mut(weight.len()) {
            let mean = head.iter().map(|x| x * x).sum::<f64>() / weight.len() as f64;
            head /= (mean + eps).sqrt();
            head *= weight;
        }
    }
    x
}

#[test]
fn heads_are_normalised_before_they_turn() {
    let mut draws = Seeded(1);
    let x: Array3<f64> = draws.array((2, 9, 12)) * 3.0;
    let (q_norm, k_norm): (Array1<f64>, Array1<f64>) = (draws.array(4) + 1.0, draws.array(4) * 3.0);
    for (eps, given) in [(1e-6, None), (0.25, Some(0.25)), (0.0, Some(0.0))] {
        for rope in [None, Some(Rope::new(RopeStyle::HalfSplit, 10.0)), Some(Rope::new(RopeStyle::Interleaved, 10.0))] {
            for (q_norm, k_norm) in [(Some(&q_norm), Some(&k_norm)), (Some(&q_norm), None), (None, Some(&k_norm))] {
                // Three identity heads of width 4.
                let plain = Layer { rope, ..Layer::identity(3, x.clone()).mask(Mask::causal()) };
                let apply = |norm: Option<&Array1<f64>>| norm.map_or(x.clone(), |norm| normalised(&x, norm, eps));
                let mut want = plain.clone();
                want.query = apply(q_norm);
                want.key_value = Some((apply(k_norm), x.clone()));
                let want = want.oracle();

                let mut layer = plain;
                (layer.weights.q_norm, layer.weights.k_norm) = (q_norm.cloned(), k_norm.cloned());
                layer.qk_norm_eps = given;
                layer.everywhere(|run| run.agrees(&want, ROUNDING));
            }
        }
    }
}

#[test]
fn grouped_heads_of_any_width_are_normalised() {
    let mut draws = Seeded(2);
    // 4 query heads on 2 KV heads, wider than d_model / 4.
    let x: Array3<f64> = draws.array((1, 5, 8));
    let weights = Weights::new(draws.array((8, 24)), draws.array((8, 12)), draws.array((8, 6)), draws.array((12, 8)));
    let mut layer = Layer::new(4, weights, x.clone());
    (layer.num_kv_heads, layer.head_dim, layer.value_dim) = (2, 6, 3);
    let plain = layer.oracle();
    let norm: Array1<f64> = draws.array(6) + 1.0;
    (layer.weights.q_norm, layer.weights.k_norm) = (Some(norm.clone()), Some(norm));
    let normed = layer.oracle();
    assert!((&normed.out - &plain.out).iter().any(|gap| gap.abs() > 1e-3));
    layer.everywhere(|run| run.agrees(&normed, ROUNDING));
    // A factor of the projections is taken out again, up to eps.
    layer.qk_norm_eps = Some(0.0);
    let want = layer.oracle();
    layer.weights.w_q *= 8.0;
    layer.weights.w_k *= 0.125;
    layer.everywhere(|run| run.agrees(&want, ROUNDING));
}

#[test]
fn what_does_not_fit_is_refused() {
    let builder = || MultiHeadAttention::<f32>::builder(8, 2);
    for eps in [-1e-6, f64::NAN, f64::INFINITY] {
        let error = builder().qk_norm(eps).build().unwrap_err().to_string();
        assert_eq!(error, format!("qk_norm eps: expected a finite number that is not negative, got {eps}"));
    }
    let weights = || builder().build().unwrap().into_weights();
    let q_norm = Weights { q_norm: Some(Array1::ones(8)), ..weights() };
    assert_eq!(builder().from_weights(q_norm).unwrap_err().to_string(), "q_norm: expected [head_dim] = [4], got [8]");
    let k_norm = Weights { k_norm: Some(Array1::ones(0)), ..weights() };
    assert_eq!(builder().from_weights(k_norm).unwrap_err().to_string(), "k_norm: expected [head_dim] = [4], got [0]");

    let fresh = builder().qk_norm(0.5).build().unwrap();
    assert_eq!((fresh.weights().q_norm.clone(), fresh.config().qk_norm_eps), (Some(Array1::ones(4)), 0.5));
    assert_eq!((weights().q_norm, builder().build().unwrap().config().qk_norm_eps), (None, 1e-6));
}
