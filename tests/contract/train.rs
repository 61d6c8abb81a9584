//! The gradients of the layer: against central differences in `f64` for every parameter under every pair of options, and
//! every other way to get them against the plain one.

use crate::common;

use common::distances::Distances;
use common::gradients::gradient_ways;
use common::layer::Layer;
use common::train::{Kept, Named, assert_same_named, named};
use common::{Call, Keep, Precision, ROUNDING, Seeded, Way, is_near, widened};
use multihead::ndarray::{Array2, Array3, Array4, s};
use multihead::position::{Alibi, Buckets};
use multihead::{Inputs, LayerGradients, Mask, MultiHeadAttention, Options, Path, Rope, RopeStyle, Weights, Workspace};

pub(crate) const ORACLE: Way = Way::new(Precision::F64, Path::Reference, Keep::Nothing);

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
pub(crate) fn normalised(mut layer: Layer, draws: &mut Seeded) -> Layer {
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
pub(crate) fn assert_near(what: &str, got: &Named, want: &Named, tolerance: f64) {
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

#[test]
fn the_output_of_training_is_that_of_attend() {
    let (layer, _) = rich(From::KeyValue);
    // A call that trains returns no weights.
    let ways = common::ways().into_iter().filter(|way| way.precision == Precision::F32 && way.keep == Keep::Nothing);
    for way in ways {
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
