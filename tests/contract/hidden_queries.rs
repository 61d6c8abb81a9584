//! A query that sees no key learns nothing: what its gradient holds reaches the bias of the output and nothing else.

use crate::common;

use common::gradients::gradient_ways;
use common::layer::Layer;
use common::{Seeded, flat};
use multihead::ndarray::{Array1, Array3, Array4, ArrayD, s};
use multihead::{Mask, Weights};

/// Two heads of two columns over three tokens of two entries; with sinks, if wanted.
fn layer(mask: Mask, has_sinks: bool) -> (Layer, Array3<f64>) {
    let mut draws = Seeded(17);
    let mut w = |rows| draws.array((rows, 4));
    let mut weights = Weights::new(w(4), w(4), w(4), w(4));
    weights.b_o = Some(Array1::zeros(4));
    weights.sinks = has_sinks.then(|| draws.array(2));
    let layer = Layer::new(2, weights, draws.array((2, 3, 4))).mask(mask);
    (layer, draws.array((2, 3, 4)))
}

#[track_caller]
fn assert_near(what: &str, got: &ArrayD<f64>, want: &ArrayD<f64>) {
    assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-6), "{what}: {got}, not {want}");
}

#[test]
fn a_bad_gradient_of_a_query_that_sees_nothing_reaches_the_output_bias_only() {
    // In entry 1 the first query sees nothing; then it is the first head alone that sees nothing.
    let all_heads = Mask::causal() & Mask::key_ranges(&[0..3, 1..3]);
    let one_head = Mask::keep(&Array4::from_shape_fn((2, 2, 3, 3), |(b, h, i, _)| (b, h, i) != (1, 0, 0))).unwrap();
    for (bad, has_sinks) in [(f64::NAN, false), (f64::INFINITY, true), (f64::NAN, true)] {
        for (mask, hidden) in [(all_heads.clone(), 2), (one_head.clone(), 1)] {
            let (layer, mut d_output) = layer(mask, has_sinks);
            for way in gradient_ways() {
                d_output.slice_mut(s![1, 0, ..]).fill(0.0);
                let want = layer.gradients(way, &d_output).unwrap();
                d_output.slice_mut(s![1, 0, ..]).fill(bad);
                let got = layer.gradients(way, &d_output).unwrap();
                for ((name, got), (_, want)) in got.iter().zip(&want) {
                    let what = format!("{way}, {bad}, sinks {has_sinks}, {hidden} heads: {name}");
                    match (name.as_str(), hidden) {
                        ("d_b_o", _) => assert!(got.iter().all(|x| !x.is_finite()), "{what}"),
                        (_, 2) => assert_near(&what, got, want),
                        ("d_w_o", _) => {
                            let of_head = |gradient: &ArrayD<f64>, head| {
                                gradient.slice(s![2 * head..2 * head + 2, ..]).to_owned().into_dyn()
                            };
                            assert_near(&what, &of_head(got, 0), &of_head(want, 0));
                            assert!(of_head(got, 1).iter().all(|x| !x.is_finite()), "{what}");
                        }
                        _ => {}
                    }
                }
                assert!(want.iter().all(|(_, gradient)| flat(gradient).iter().all(|x| x.is_finite())));
            }
        }
    }
}

#[test]
fn a_bad_gradient_of_a_query_that_sees_a_key_does_not_vanish() {
    // Values of zero give a context of zero, which is not the same as none.
    let (mut layer, mut d_output) = layer(Mask::causal(), false);
    layer.weights.w_v.fill(0.0);
    d_output[[1, 0, 2]] = f64::NAN;
    for way in gradient_ways() {
        let gradients = layer.gradients(way, &d_output).unwrap();
        let (_, d_w_o) = gradients.iter().find(|(name, _)| name == "d_w_o").unwrap();
        assert!(d_w_o.slice(s![.., 2]).iter().all(|x| x.is_nan()), "{way}: {d_w_o}");
    }
}
