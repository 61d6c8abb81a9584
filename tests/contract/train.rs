//! The gradients of the layer: against central differences in `f64` for every parameter under every pair of options, and
//! every other way to get them against the plain one.

use crate::common;

use common::distances::Distances;
use common::gradients::gradient_ways;
use common::layer::Layer;
use common::train::{Kept, Named, assert_same_named, fill, named};
use common::{Call, Keep, Precision, ROUNDING, Seeded, Way, is_near, widened};
use multihead::ndarray::{Array1, Array2, Array3, Array4, s};
use multihead::position::{Alibi, Buckets};
use multihead::{Inputs, LayerGradients, Mask, MultiHeadAttention, Options, Path, Rope, RopeStyle, Weights, Workspace};

const ORACLE: Way = Way::new(Precision::F64, Path::Reference, Keep::Nothing);

const Q_LEN: usize = 3;
const KV_LEN: usize = 4;
const D_MODEL: usize = 4;

fn masks(kv_len: usize) -> Vec<(&'static str, Mask)> {
    let keep = Array4::from_shape_fn((1, 4, Q_LEN, kv_len), |(_, h, i, j)| i != 1 && (h + 2 * i + j) % 3 != 0);
    vec![
        ("no mask", Mask::none()),
        ("causal", Mask::causal()),
        ("window", Mask::window(1, 1) & Mask::key_lengths(&[kv_len, 2])),
        ("keep", Mask::keep(&keep).unwrap()),
    ]
}

/// Where keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq)]
enum From {
    X,
    Context,
    KeyValue,
}

/// Options that are there or not; a run takes half of them, and any two of them meet in all four ways.
struct Extras {
    softcap: bool,
    biases: bool,
    sinks: bool,
    dropout: bool,
    rope: bool,
    score_bias: bool,
    scale: bool,
}

/// ALiBi and learned tables of distances.
fn distances(draws: &mut Seeded) -> Distances {
    let buckets = Buckets::T5 { count: 4, max_distance: 8 };
    let table = (buckets, draws.array((buckets.count(), 4)));
    Distances { alibi: Some(Alibi::new(4)), bias: Some(table), keys: Some(draws.array((5, 2))) }
}

impl Extras {
    const RUNS: u32 = 8;

    fn of(run: u32) -> Self {
        let [softcap, biases, sinks, dropout, rope, score_bias, scale] =
            [1, 2, 3, 4, 5, 6, 7].map(|factor: u32| (run & factor).count_ones() % 2 == 1);
        Self { softcap, biases, sinks, dropout, rope, score_bias, scale }
    }
}

/// Four query heads of widths 2 and 3, with `num_kv_heads` KV heads or by a map.
fn layer(from: From, num_kv_heads: usize, map: Option<Vec<usize>>, extras: &Extras) -> Layer {
    let mut draws = Seeded(40);
    let (k_dim, v_dim) = if from == From::KeyValue { (5, 3) } else { (D_MODEL, D_MODEL) };
    let mut w = |inputs: usize, outputs: usize| -> Array2<f64> { draws.array((inputs, outputs)) * 2.0 };
    let (w_q, w_k) = (w(D_MODEL, 4 * 2), w(k_dim, num_kv_heads * 2));
    let mut weights = Weights::new(w_q, w_k, w(v_dim, num_kv_heads * 3), w(4 * 3, D_MODEL));
    if extras.biases {
        weights.b_q = Some(draws.array(4 * 2));
        weights.b_k = Some(draws.array(num_kv_heads * 2));
        weights.b_v = Some(draws.array(num_kv_heads * 3));
        weights.b_o = Some(draws.array(D_MODEL));
    }
    weights.sinks = extras.sinks.then(|| draws.array(4) * 2.0);
    let mut layer = Layer::new(4, weights, draws.array((2, Q_LEN, D_MODEL)) * 2.0);
    (layer.num_kv_heads, layer.kv_of_head, layer.head_dim, layer.value_dim) = (num_kv_heads, map, 2, 3);
    if from != From::X {
        layer = layer.key_value(draws.array((2, KV_LEN, k_dim)) * 2.0, draws.array((2, KV_LEN, v_dim)) * 2.0);
    }
    layer.shared = from == From::Context;
    layer.softcap = extras.softcap.then_some(1.5);
    layer.dropout = extras.dropout.then_some((0.3, 9));
    layer.scale = extras.scale.then_some(-0.8);
    if extras.rope {
        layer = layer.rope(Rope::new(RopeStyle::HalfSplit, 10.0));
        layer.offsets = [Some(3), Some(1)];
    }
    if extras.score_bias {
        let kv_len = if from == From::X { Q_LEN } else { KV_LEN };
        let mut bias: Array4<f64> = draws.array((2, 1, Q_LEN, kv_len)) * 4.0;
        bias[[1, 0, 0, 1]] = f64::NEG_INFINITY;
        layer.bias = Some(bias.into_dyn());
    }
    layer
}

/// `loss = sum(d_output * output)`
fn loss(layer: &Layer, d_output: &Array3<f64>) -> f64 {
    let out = layer.answer(ORACLE).unwrap().out;
    out.iter().zip(d_output).map(|(x, y)| x * y).sum()
}

/// The numbers whose gradient has this name. The context has its numbers in the keys; see `Layer::shared`.
fn parameter<'a>(layer: &'a mut Layer, name: &str) -> Vec<&'a mut f64> {
    match name {
        "d_query" => layer.query.iter_mut().collect(),
        "d_key" => layer.key_value.iter_mut().flat_map(|(key, _)| key.iter_mut()).collect(),
        "d_value" => layer.key_value.iter_mut().flat_map(|(_, value)| value.iter_mut()).collect(),
        "d_bias" => layer.bias.iter_mut().flatten().collect(),
        "d_relative_bias" => layer.distances.bias.iter_mut().flat_map(|(_, table)| table.iter_mut()).collect(),
        "d_relative_keys" => layer.distances.keys.iter_mut().flatten().collect(),
        _ => {
            let mut arrays = layer.weights.iter_mut().filter(|(array, _)| name.strip_prefix("d_") == Some(array));
            let (_, array) = arrays.next().unwrap_or_else(|| panic!("{name} is no gradient"));
            array.into_iter().collect()
        }
    }
}

/// Moves each number of each parameter up and down and compares the slope of the loss with the gradient.
#[track_caller]
fn check_slopes(what: &str, layer: &Layer, d_output: &Array3<f64>) {
    const STEP: f64 = 1e-5;
    for (name, gradient) in layer.gradients(ORACLE, d_output).unwrap() {
        assert_eq!(gradient.len(), parameter(&mut layer.clone(), &name).len(), "{what}: {name}");
        for (index, &gradient) in gradient.iter().enumerate() {
            let mut moved = layer.clone();
            let was = *parameter(&mut moved, &name)[index];
            if was.is_infinite() {
                assert_eq!(gradient, 0.0, "{what}: {name}[{index}] belongs to a hidden pair");
                continue;
            }
            let [up, down] = [STEP, -STEP].map(|step| {
                *parameter(&mut moved, &name)[index] = was + step;
                loss(&moved, d_output)
            });
            let slope = (up - down) / (2.0 * STEP);
            let near = (gradient - slope).abs() < 1e-7 * (1.0 + slope.abs());
            assert!(near, "{what}: {name}[{index}] is {gradient:e}, the slope {slope:e}");
        }
    }
}

/// KV heads and maps: one to one, groups of two, groups of their own.
fn head_maps() -> [(usize, Option<Vec<usize>>); 3] {
    [(4, None), (2, None), (3, Some(vec![2, 0, 2, 2]))]
}

#[test]
fn gradients_are_slopes_for_every_pair_of_options() {
    let d_output = Seeded(41).array((2, Q_LEN, D_MODEL));
    for from in [From::X, From::Context, From::KeyValue] {
        for (num_kv_heads, map) in head_maps() {
            for (mask_name, mask) in masks(if from == From::X { Q_LEN } else { KV_LEN }) {
                for run in 0..Extras::RUNS {
                    let layer = layer(from, num_kv_heads, map.clone(), &Extras::of(run)).mask(mask.clone());
                    let what = format!("{from:?}, {num_kv_heads} KV heads, {map:?}, {mask_name}, run {run}");
                    check_slopes(&what, &layer, &d_output);
                }
            }
        }
    }
}

/// Norms of query and key heads.
fn normalised(mut layer: Layer, draws: &mut Seeded) -> Layer {
    layer.qk_norm_eps = Some(0.1);
    layer.weights.q_norm = Some(draws.array(layer.head_dim) + 1.0);
    layer.weights.k_norm = Some(draws.array(layer.head_dim) + 1.0);
    layer
}

#[test]
fn gradients_of_norms_are_slopes() {
    let d_output = Seeded(41).array((2, Q_LEN, D_MODEL));
    for from in [From::X, From::KeyValue] {
        for run in 0..Extras::RUNS {
            let layer = layer(from, 2, None, &Extras::of(run)).mask(Mask::causal());
            check_slopes(&format!("{from:?}, run {run}"), &normalised(layer, &mut Seeded(46)), &d_output);
        }
    }
}

#[test]
fn gradients_of_learned_distances_are_slopes() {
    let d_output = Seeded(41).array((2, Q_LEN, D_MODEL));
    for (num_kv_heads, map) in head_maps() {
        for run in 0..Extras::RUNS {
            let mut layer = layer(From::KeyValue, num_kv_heads, map.clone(), &Extras::of(run)).mask(Mask::causal());
            layer.distances = distances(&mut Seeded(45));
            check_slopes(&format!("{num_kv_heads} KV heads, run {run}"), &layer, &d_output);
        }
    }
}

/// A layer with everything, and two batch entries of more tokens than a register block has rows.
fn rich(from: From) -> (Layer, Array3<f64>) {
    let all =
        Extras { softcap: true, biases: true, sinks: true, dropout: true, rope: true, score_bias: false, scale: false };
    let mut layer = layer(from, 2, None, &all).mask(Mask::causal() & Mask::key_lengths(&[70, 60]));
    let mut draws = Seeded(42);
    layer.query = draws.array((2, 70, D_MODEL));
    if let Some((key, value)) = &mut layer.key_value {
        *key = draws.array((2, 70, key.dim().2));
        *value = draws.array((2, 70, value.dim().2));
    }
    layer.bias = Some(draws.array((1, 4, 70, 70)).into_dyn());
    layer.distances = distances(&mut draws);
    let layer = normalised(layer, &mut draws);
    (layer, draws.array((2, 70, D_MODEL)))
}

#[track_caller]
fn assert_near(what: &str, got: &Named, want: &Named, tolerance: f64) {
    for ((name, got), (_, want)) in got.iter().zip(want) {
        for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
            assert!(is_near(got, want, tolerance), "{what}: {name}[{index}] is {got:e}, not {want:e}");
        }
    }
}

#[test]
fn every_way_gives_the_same_gradients() {
    for from in [From::X, From::KeyValue] {
        let (layer, d_output) = rich(from);
        let want = layer.gradients(ORACLE, &d_output).unwrap();
        for way in gradient_ways() {
            // Sums over 140 tokens of numbers up to a few.
            let tolerance = if way.precision == Precision::F32 { 20.0 * ROUNDING.0 } else { ROUNDING.1 };
            let got = layer.gradients(way, &d_output).unwrap();
            assert_near(&format!("{from:?} {way}"), &got, &want, tolerance);
            for kept in [Kept::All, Kept::Lse] {
                let into = match way.precision {
                    Precision::F32 => layer.gradients_into::<f32>(way, kept, &d_output),
                    Precision::F64 => layer.gradients_into::<f64>(way, kept, &d_output),
                };
                assert_same_named(&format!("{from:?} {way}, {kept:?}, into"), &into.unwrap(), &got);
            }
        }
    }
}

#[test]
fn computing_again_moves_no_bit() {
    for from in [From::X, From::KeyValue] {
        let (layer, d_output) = rich(from);
        for way in gradient_ways() {
            let kept = layer.gradients_keeping(way, Kept::All, &d_output).unwrap();
            let again = layer.gradients_keeping(way, Kept::Lse, &d_output).unwrap();
            assert_same_named(&way.to_string(), &again, &kept);
        }
    }
}

#[test]
fn gradients_of_parts_add_up() {
    let (layer, d_output) = rich(From::Context);
    let way = Way::new(Precision::F64, Path::Auto, Keep::Nothing);
    layer
        .trained::<f64, _>(way, Kept::All, |mha, inputs, options| {
            let mut workspace = Workspace::new();
            let mut sums = LayerGradients::zeros(mha, inputs, options)?;
            let once = mha.backward(&mha.forward_train(inputs, options)?.1, &d_output)?;
            for times in 1..=3 {
                // What the gradients of the inputs held does not matter.
                sums.d_query.fill(f64::NAN);
                let (_, tape) = mha.forward_train(inputs, options)?;
                mha.backward_add(tape, &d_output, &mut sums, &mut workspace)?;
                let mut want = once.clone();
                let times = f64::from(times);
                want.weights.iter_mut().for_each(|(_, mut d_w)| d_w *= times);
                want.d_bias.iter_mut().for_each(|d_bias| *d_bias *= times);
                assert_near(&format!("{times} times"), &named(&sums), &named(&want), 1e-13);
                if times == 1.0 {
                    assert_same_named("once, onto zeros", &named(&sums), &named(&once));
                }
            }
            Ok(())
        })
        .unwrap();
}

#[test]
fn arrays_of_any_strides_give_the_same_gradients() {
    let (layer, d_output) = rich(From::X);
    let mha: MultiHeadAttention<f64> = layer.build().unwrap();
    let bias = layer.bias.clone().unwrap();
    let options = Options::new().mask(&layer.mask).bias(&bias).unwrap().bias_gradient().dropout(0.3, 9);
    let gradients = |x: &multihead::ndarray::ArrayRef3<f64>, d_output: &multihead::ndarray::ArrayRef3<f64>| {
        let (_, tape) = mha.forward_train(&Inputs::new(x), &options).unwrap();
        named(&mha.backward(&tape, d_output).unwrap())
    };
    let want = gradients(&layer.query, &d_output);
    // Columns first, every second token backwards, and one stored batch entry after the other in either array.
    let turned = |x: &Array3<f64>| x.t().as_standard_layout().into_owned().reversed_axes();
    let spread = |x: &Array3<f64>| {
        let (batch, len, width) = x.dim();
        let mut wide = Array3::from_elem((2 * len, batch, width + 3), f64::NAN);
        wide.slice_mut(s![..;-2, .., 1..=width]).assign(&x.view().permuted_axes([1, 0, 2]));
        wide
    };
    let (wide_x, wide_d) = (spread(&layer.query), spread(&d_output));
    let view = |wide: &Array3<f64>| {
        let width = wide.dim().2 - 3;
        wide.slice(s![..;-2, .., 1..=width]).permuted_axes([1, 0, 2]).to_owned()
    };
    assert_eq!(view(&wide_x), layer.query);
    let strided = |wide: &Array3<f64>, f: &dyn Fn(&multihead::ndarray::ArrayRef3<f64>) -> Named| {
        let width = wide.dim().2 - 3;
        f(&wide.slice(s![..;-2, .., 1..=width]).permuted_axes([1, 0, 2]))
    };
    for (what, got) in [
        ("turned x", gradients(&turned(&layer.query), &d_output)),
        ("turned d_output", gradients(&layer.query, &turned(&d_output))),
        ("spread x", strided(&wide_x, &|x| gradients(x, &d_output))),
        ("spread d_output", strided(&wide_d, &|d| gradients(&layer.query, d))),
        ("both", strided(&wide_x, &|x| strided(&wide_d, &|d| gradients(x, d)))),
    ] {
        assert_near(what, &got, &want, 1e-13);
    }
}

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

#[test]
fn an_array_in_several_roles_has_the_sum_of_their_gradients() {
    let mut draws = Seeded(44);
    let mut w = || draws.array((6, 6));
    let alone = Layer::new(2, Weights::new(w(), w(), w(), w()), draws.array((2, 5, 6)));
    let d_output = draws.array((2, 5, 6));
    let get = |named: &Named, name: &str| named.iter().find(|(n, _)| n == name).map(|(_, d)| d.clone()).unwrap();
    let x = alone.query.clone();
    let named = alone.clone().key_value(x.clone(), x).gradients(ORACLE, &d_output).unwrap();
    let mut context = alone.clone().key_value(alone.query.clone(), alone.query.clone());
    context.shared = true;
    let context = context.gradients(ORACLE, &d_output).unwrap();
    let one = alone.gradients(ORACLE, &d_output).unwrap();
    let keys = &get(&named, "d_key") + &get(&named, "d_value");
    let all = &get(&named, "d_query") + &keys;
    let near = |a: &multihead::ndarray::ArrayD<f64>, b: &multihead::ndarray::ArrayD<f64>| {
        (a - b).iter().all(|x| x.abs() < 1e-13)
    };
    assert!(near(&get(&context, "d_key"), &keys) && near(&get(&one, "d_query"), &all));
}

mod refused {
    //! What backward must refuse, with everything left as it was.

    use super::*;

    /// The error's text, and what spoils the gradients.
    type Spoilt = (&'static str, fn(&mut LayerGradients<f64>));

    fn layer(heads: usize) -> MultiHeadAttention<f64> {
        MultiHeadAttention::builder(8, heads).bias().build().unwrap()
    }

    #[test]
    fn gradients_of_another_shape_than_the_output() {
        let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
        let (_, tape) = mha.forward_train(&Inputs::new(&x), &Options::new()).unwrap();
        let error = mha.backward(&tape, &Array3::ones((2, 4, 8))).unwrap_err();
        assert_eq!(error.to_string(), "d_output: expected [batch, q_len, d_model] = [2, 3, 8], got [2, 4, 8]");
    }

    #[test]
    fn a_tape_of_another_layer() {
        let x = Array3::ones((2, 3, 8));
        let (_, tape) = layer(2).forward_train(&Inputs::new(&x), &Options::new()).unwrap();
        let error = layer(4).backward(&tape, &x).unwrap_err();
        assert_eq!(error.to_string(), "tape: expected [batch, num_heads, q_len] = [2, 4, 3], got [2, 2, 3]");
        let wide = MultiHeadAttention::<f64>::builder(8, 2).value_dim(5).build().unwrap();
        let error = wide.backward(&tape, &x).unwrap_err().to_string();
        assert!(error.starts_with("tape: expected [batch, num_kv_heads, kv_len, value_dim] = [2, 2, 3, 5]"), "{error}");
    }

    #[test]
    fn the_gradient_of_a_bias_that_is_not_there() {
        let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
        let (_, tape) = mha.forward_train(&Inputs::new(&x), &Options::new().bias_gradient()).unwrap();
        let error = mha.backward(&tape, &x).unwrap_err();
        assert_eq!(error.to_string(), "bias_gradient: expected a bias in the options, got none");
    }

    #[test]
    fn gradients_that_do_not_fit() {
        let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
        let inputs = Inputs::new(&x);
        let zeros = LayerGradients::zeros(&mha, &inputs, &Options::new()).unwrap();
        let spoilt: [Spoilt; 6] = [
            ("d_query: expected [batch, q_len, d_model] = [2, 3, 8], got [2, 3, 7]", |g| {
                g.d_query = Array3::zeros((2, 3, 7))
            }),
            ("d_key: expected None, since the call gives no such gradient, got an array", |g| {
                g.d_key = Some(Array3::zeros((2, 3, 8)))
            }),
            ("d_bias: expected None, since the call gives no such gradient, got an array", |g| {
                g.d_bias = Some(Array4::zeros((1, 1, 3, 3)))
            }),
            ("w_o: expected [num_heads * value_dim, d_model] = [8, 8], got [8, 9]", |g| {
                g.weights.w_o = Array2::zeros((8, 9))
            }),
            ("b_k: expected a gradient, since the layer has one, got None", |g| g.weights.b_k = None),
            ("sinks: expected None, since the layer has none, got a gradient", |g| {
                g.weights.sinks = Some(Array1::zeros(2))
            }),
        ];
        for (text, spoil) in spoilt {
            let mut gradients = zeros.clone();
            fill(&mut gradients, 7.0);
            spoil(&mut gradients);
            let before = gradients.clone();
            let mut workspace = Workspace::new();
            let (y, tape) = mha.forward_train(&inputs, &Options::new()).unwrap();
            assert_eq!(
                mha.backward_into(tape.clone(), &y, &mut gradients, &mut workspace).unwrap_err().to_string(),
                text
            );
            assert_eq!(mha.backward_add(tape, &y, &mut gradients, &mut workspace).unwrap_err().to_string(), text);
            assert_eq!(gradients, before);
            let mut changed = mha.clone();
            let refused = changed.parameters_mut(&gradients.weights).map(drop).err().map(|e| e.to_string());
            assert_eq!(refused.is_some(), !text.starts_with("d_"), "{text}");
        }
    }

    #[test]
    fn outputs_of_another_shape() {
        let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
        let mut y = Array3::from_elem((2, 3, 7), 7.0);
        let error = mha.forward_train_into(&Inputs::new(&x), &Options::new(), &mut y, &mut Workspace::new());
        assert_eq!(
            error.unwrap_err().to_string(),
            "output: expected [batch, q_len, d_model] = [2, 3, 8], got [2, 3, 7]"
        );
        assert!(y.iter().all(|&y| y == 7.0));
    }
}

#[test]
fn the_output_of_training_is_that_of_attend() {
    let (layer, _) = rich(From::KeyValue);
    for way in common::ways().into_iter().filter(|way| way.precision == Precision::F32) {
        let want = layer.answer(way).unwrap();
        layer
            .trained::<f32, _>(way, Kept::All, |mha, inputs, options| {
                let (output, tape) = mha.forward_train(inputs, options)?;
                common::assert_bits(&way.to_string(), &widened(&output).into_dyn(), &want.out);
                common::assert_bits(&way.to_string(), &widened(tape.lse()), &want.lse);
                Ok(())
            })
            .unwrap();
    }
}
