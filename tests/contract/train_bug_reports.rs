//! What went wrong elsewhere when layers were trained: rows and batches without keys, hidden tokens, dropout.

use crate::common;
use crate::train::{ORACLE, assert_near, normalised};

use common::gradients::gradient_ways;
use common::layer::Layer;
use common::train::Kept;
use common::{Call, Keep, Precision, ROUNDING, Seeded, Way};
use multihead::ndarray::{Array1, Array2, Array3, Array4, s};
use multihead::{Inputs, Mask, MultiHeadAttention, Options, Path, Weights};

#[test]
fn b02_a_query_that_sees_no_key_leaves_the_gradients_of_others_alone() {
    let one = || Array2::ones((1, 1));
    let mut weights = Weights::new(one(), one(), one(), one());
    let zero = || Some(Array1::zeros(1));
    (weights.b_q, weights.b_k, weights.b_v, weights.b_o) = (zero(), zero(), zero(), zero());
    let x = Array3::from_shape_vec((2, 3, 1), vec![0.5, 0.25, 0.125, -1.0, 9.0, 7.0]).unwrap();
    let mask = Mask::window(1, 0) & Mask::key_lengths(&[3, 1]) & Mask::causal_top_left();
    // Queries see themselves and the token before: counted from the first key, whatever the lengths.
    let keep = Array4::from_shape_fn((2, 1, 3, 3), |(b, _, i, j)| j <= i && j + 1 >= i && (b == 0 || j == 0));
    let mut d_output = Array3::zeros((2, 3, 1));
    (d_output[[0, 0, 0]], d_output[[1, 0, 0]]) = (1.0, 1.0);
    for mask in [mask, Mask::keep(&keep).unwrap()] {
        let layer = Layer::new(1, weights.clone(), x.clone()).mask(mask);
        for way in gradient_ways() {
            assert_eq!(layer.answer(way).unwrap().out.iter().zip(&d_output).map(|(x, d)| x * d).sum::<f64>(), -0.5);
            for (name, gradient) in layer.gradients(way, &d_output).unwrap() {
                let want: &[f64] = match name.as_str() {
                    "d_query" => &[1.0, 0.0, 0.0, 1.0, 0.0, 0.0],
                    "d_w_v" | "d_w_o" => &[-0.5],
                    "d_b_v" | "d_b_o" => &[2.0],
                    _ => &[0.0],
                };
                assert_eq!(common::flat(&gradient), want, "{way}: {name}");
            }
        }
    }
}

#[test]
fn b08_what_a_mask_hides_does_not_reach_the_gradients_of_the_weights() {
    let mut draws = Seeded(8);
    let weights = Weights::new(draws.array((4, 4)), draws.array((5, 4)), draws.array((3, 4)), draws.array((4, 4)));
    let clean = Layer::new(2, weights, draws.array((2, 3, 4)))
        .key_value(draws.array((2, 6, 5)), draws.array((2, 6, 3)))
        .mask(Mask::key_ranges(&[0..4, 2..5]));
    let clean = normalised(clean, &mut draws);
    let d_output = draws.array((2, 3, 4));
    let mut bad = clean.clone();
    let (key, value) = bad.key_value.as_mut().unwrap();
    for (entry, token) in [(0, 4), (0, 5), (1, 0), (1, 1), (1, 5)] {
        key.slice_mut(s![entry, token, ..]).fill(f64::NAN);
        value.slice_mut(s![entry, token, ..]).fill(f64::INFINITY);
    }
    for way in gradient_ways() {
        let (got, want) = (bad.gradients(way, &d_output).unwrap(), clean.gradients(way, &d_output).unwrap());
        let tolerance = if way.precision == Precision::F32 { ROUNDING.0 } else { ROUNDING.1 };
        assert!(want.iter().all(|(_, d)| d.iter().all(|x| x.is_finite())));
        assert_near(&way.to_string(), &got, &want, tolerance);
        for (name, gradient) in &got {
            let hidden = if name == "d_key" || name == "d_value" { gradient.slice(s![.., 5, ..]) } else { continue };
            assert!(hidden.iter().all(|&x| x == 0.0), "{way}: {name}");
        }
    }
}

#[test]
fn b08_a_visible_nan_does_not_vanish() {
    let mut draws = Seeded(9);
    let mut w = || draws.array((4, 4));
    let mut layer = Layer::new(2, Weights::new(w(), w(), w(), w()), draws.array((2, 3, 4))).mask(Mask::causal());
    layer.query[[1, 1, 2]] = f64::NAN;
    let d_output = draws.array((2, 3, 4));
    for way in gradient_ways() {
        for (name, gradient) in layer.gradients(way, &d_output).unwrap() {
            match name.as_str() {
                // The other entry does not see it.
                "d_query" => assert!(gradient.slice(s![0, .., ..]).iter().all(|x| x.is_finite()), "{way}"),
                _ => assert!(gradient.iter().all(|x| x.is_nan()), "{way}: {name} {gradient}"),
            }
            let seen = gradient.iter().any(|x| x.is_nan());
            assert!(seen, "{way}: {name}");
        }
    }
}

fn small(draws: &mut Seeded, batch: usize, q_len: usize, kv_len: usize) -> Layer {
    let mut w = |outputs: usize| -> Array2<f64> { draws.array((8, outputs)) };
    let mut weights = Weights::new(w(8), w(8), w(8), w(8));
    weights.b_o = Some(draws.array(8));
    weights.b_k = Some(draws.array(8));
    Layer::new(2, weights, draws.array((batch, q_len, 8)))
        .key_value(draws.array((batch, kv_len, 8)), draws.array((batch, kv_len, 8)))
}

#[test]
fn b23_evaluation_never_drops() {
    let w = || Seeded(23).array((8, 8));
    let layer = Layer::new(2, Weights::new(w(), w(), w(), w()), Seeded(24).array((2, 4, 8)));
    let mha: MultiHeadAttention<f64> = layer.build().unwrap();
    let inputs = Inputs::new(&layer.query);
    let dropping = Options::new().dropout(0.9, 1);
    let (dropped, _) = mha.forward_train(&inputs, &dropping).unwrap();
    let plain = mha.forward(&layer.query, &Mask::none()).unwrap();
    assert_ne!(dropped, plain);
    for path in [Path::Reference, Path::Dense, Path::Tiled] {
        // Training with the rate 0 is evaluation to the bit.
        let way = Way::new(Precision::F64, path, Keep::Nothing);
        let want = mha.attend(&inputs, &way.choose(Options::new())).unwrap().output;
        let (zero, _) = mha.forward_train(&inputs, &way.choose(Options::new().dropout(0.0, 7))).unwrap();
        common::assert_bits(&format!("{path:?}"), &zero, &want);
        assert_eq!(mha.attend(&inputs, &way.choose(Options::new())).unwrap().output, want);
    }
}

#[test]
fn b24_dropping_everything_gives_the_bias_and_no_gradient_before_it() {
    let mut layer = small(&mut Seeded(24), 2, 4, 5);
    layer.dropout = Some((1.0, 3));
    let b_o = layer.weights.b_o.clone().unwrap();
    let d_output = Array3::ones((2, 4, 8));
    for way in gradient_ways() {
        let out = layer.answer(way).unwrap().out;
        assert!(
            out.rows()
                .into_iter()
                .all(|row| row == b_o.mapv(|b| if way.precision == Precision::F32 { f64::from(b as f32) } else { b })),
            "{way}"
        );
        for (name, gradient) in layer.gradients(way, &d_output).unwrap() {
            let want = if name == "d_b_o" { 8.0 } else { 0.0 };
            assert!(gradient.iter().all(|&x| x == want), "{way}: {name}");
        }
    }
    for (rate, text) in [(-1.0, "-1"), (1.5, "1.5"), (f64::NAN, "NaN")] {
        layer.dropout = Some((rate, 3));
        let error = layer.gradients(ORACLE, &d_output).unwrap_err().to_string();
        assert!(error.starts_with("dropout") && error.ends_with(text), "{error}");
    }
}

#[test]
fn b38_without_keys_only_the_output_bias_learns() {
    for mask in [Mask::none(), Mask::causal()] {
        let layer = small(&mut Seeded(38), 2, 3, 0).mask(mask);
        let d_output = Array3::ones((2, 3, 8));
        for way in gradient_ways() {
            for (name, gradient) in layer.gradients(way, &d_output).unwrap() {
                let want = if name == "d_b_o" { 6.0 } else { 0.0 };
                assert!(gradient.iter().all(|&x| x == want), "{way}: {name}");
                assert_eq!(gradient.is_empty(), name == "d_key" || name == "d_value", "{way}: {name}");
            }
        }
    }
}

#[test]
fn b39_empty_batches_and_no_queries_give_gradients_of_zero() {
    for (batch, q_len, kv_len) in [(0, 3, 3), (2, 0, 3), (0, 0, 0)] {
        let mut layer = small(&mut Seeded(39), batch, q_len, kv_len);
        layer.weights.sinks = Some(Array1::zeros(2));
        let d_output = Array3::zeros((batch, q_len, 8));
        for way in gradient_ways() {
            for kept in [Kept::All, Kept::Lse] {
                // Into arrays that held NaN.
                let gradients = layer.gradients_into::<f64>(way, kept, &d_output).unwrap();
                for (name, gradient) in gradients {
                    assert!(gradient.iter().all(|&x| x == 0.0), "{way}, {batch} entries: {name}");
                }
            }
        }
    }
}

#[test]
fn b41_one_key_gives_no_gradient_to_queries_and_keys() {
    for q_len in [1, 4] {
        let layer = Layer::identity(1, Seeded(41).array((1, q_len, 16)) * 6.0)
            .key_value(Seeded(42).array((1, 1, 16)) * 6.0, Seeded(43).array((1, 1, 16)) * 6.0);
        for way in gradient_ways() {
            for (name, gradient) in layer.gradients(way, &Array3::ones((1, q_len, 16))).unwrap() {
                let near = |want: f64| gradient.iter().all(|&x| (x - want).abs() <= 1e-5);
                match name.as_str() {
                    "d_query" | "d_key" | "d_w_q" | "d_w_k" => assert!(near(0.0), "{way}: {name} {gradient}"),
                    "d_value" => assert!(near(q_len as f64), "{way}: {name} {gradient}"),
                    _ => {}
                }
            }
        }
    }
}
