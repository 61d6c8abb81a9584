//! The gradients of the core: the plain loops against central differences in `f64`, for every parameter under every
//! combination of options, and every other way of computing them against the plain loops.

use crate::common;

use common::core::Core;
use common::distances::Distances;
use common::gradients::named;
use common::{Call, Keep, Precision, Seeded, Way};
use multihead::ndarray::{Array1, Array2, Array4, ArrayD, Dimension};
use multihead::position::{Alibi, Buckets};
use multihead::{Gradients, HeadMap, Mask, Path};

const ORACLE: Way = Way::new(Precision::F64, Path::Reference, Keep::Nothing);

/// `loss = sum(d_context * context)`
fn loss(core: &Core, d_context: &Array4<f64>) -> f64 {
    let out = core.answer(ORACLE).unwrap().out;
    out.iter().zip(d_context).map(|(x, y)| x * y).sum()
}

/// The parameters by the names of their gradients.
fn parameter<'a>(core: &'a mut Core, name: &str) -> Vec<&'a mut f64> {
    match name {
        "d_q" => core.q.iter_mut().collect(),
        "d_k" => core.k.iter_mut().collect(),
        "d_v" => core.v.iter_mut().collect(),
        "d_bias" => core.bias.iter_mut().flatten().collect(),
        "d_sinks" => core.sinks.iter_mut().flatten().collect(),
        "d_relative_bias" => core.distances.bias.iter_mut().flat_map(|(_, table)| table).collect(),
        "d_relative_keys" => core.distances.keys.iter_mut().flatten().collect(),
        other => panic!("{other} is no gradient"),
    }
}

/// Moves each number of each parameter up and down and compares the slope of the loss with the gradient.
#[track_caller]
fn check_slopes(what: &str, core: &Core, d_context: &Array4<f64>) {
    const STEP: f64 = 1e-5;
    for (name, gradient) in named(&core.right_gradients(d_context)) {
        for (index, &gradient) in gradient.iter().enumerate() {
            let moved = |step: f64| {
                let mut core = core.clone();
                *parameter(&mut core, name)[index] += step;
                loss(&core, d_context)
            };
            if parameter(&mut core.clone(), name)[index].is_infinite() {
                assert_eq!(gradient, 0.0, "{what}: {name}[{index}] belongs to a hidden pair");
                continue;
            }
            let slope = (moved(STEP) - moved(-STEP)) / (2.0 * STEP);
            let near = (gradient - slope).abs() < 1e-8 * (1.0 + slope.abs());
            assert!(near, "{what}: {name}[{index}] is {gradient:e}, the slope {slope:e}");
        }
    }
}

const Q_LEN: usize = 3;
const KV_LEN: usize = 4;

fn masks() -> Vec<(&'static str, Mask)> {
    let keep = Array4::from_shape_fn((1, 4, Q_LEN, KV_LEN), |(_, h, i, j)| i != 1 && (h + 2 * i + j) % 3 != 0);
    vec![
        ("no mask", Mask::none()),
        ("causal", Mask::causal()),
        ("window", Mask::window(1, 1) & Mask::key_lengths(&[4, 2])),
        ("keep", Mask::keep(&keep).unwrap()),
    ]
}

/// No bias, a full one with hidden pairs, and one that is broadcast over some axes.
fn biases(draws: &mut Seeded) -> Vec<(&'static str, Option<ArrayD<f64>>)> {
    let mut full: Array4<f64> = draws.array((2, 4, Q_LEN, KV_LEN)) * 4.0;
    full[[0, 1, 2, 0]] = f64::NEG_INFINITY;
    full[[1, 2, 0, 3]] = f64::NEG_INFINITY;
    let shared: Array2<f64> = draws.array((Q_LEN, KV_LEN)) * 4.0;
    let keys: Array4<f64> = draws.array((2, 1, 1, KV_LEN)) * 4.0;
    let rows: Array4<f64> = draws.array((1, 4, Q_LEN, 1)) * 4.0;
    vec![
        ("no bias", None),
        ("full bias", Some(full.into_dyn())),
        ("shared bias", Some(shared.into_dyn())),
        ("bias of keys", Some(keys.into_dyn())),
        ("bias of rows", Some(rows.into_dyn())),
    ]
}

fn head_maps() -> Vec<(&'static str, Option<HeadMap>, usize)> {
    let uneven = HeadMap::explicit(&[2, 0, 2, 2], 4).unwrap();
    vec![("4 heads", None, 4), ("groups of 2", None, 2), ("uneven groups", Some(uneven), 4)]
}

/// Small calls: every mask with every bias and every map of heads, with all of soft cap, sinks and dropout, and with some
/// of them in turn. Each pair of options meets in some call.
fn combinations(check: impl Fn(&str, &Core, &Array4<f64>)) {
    let mut draws = Seeded(4);
    let (masks, biases) = (masks(), biases(&mut draws));
    let mut turn = 0;
    for (heads, map, num_kv_heads) in head_maps() {
        let q: Array4<f64> = draws.array((2, 4, Q_LEN, 3)) * 4.0;
        let (k, v) = (draws.array((2, num_kv_heads, KV_LEN, 3)), draws.array((2, num_kv_heads, KV_LEN, 2)));
        let sinks: Array1<f64> = draws.array(4) * 2.0;
        let d_context = draws.array((2, 4, Q_LEN, 2));
        for ((mask_name, mask), (bias_name, bias)) in masks.iter().flat_map(|m| biases.iter().map(move |b| (m, b))) {
            turn += 1;
            for bits in [7, turn % 7] {
                let mut core = Core::new(q.clone(), k.clone(), v.clone()).mask(mask.clone());
                core.bias.clone_from(bias);
                core.heads.clone_from(&map);
                core.softcap = (bits & 1 != 0).then_some(1.5);
                core.sinks = (bits & 2 != 0).then(|| sinks.clone());
                core.dropout = (bits & 4 != 0).then_some((0.3, 9));
                core.scale = (bits == 5).then_some(-0.8);
                check(&format!("{heads}, {mask_name}, {bias_name}, options {bits:03b}"), &core, &d_context);
            }
        }
    }
}

#[test]
fn plain_gradients_are_slopes_for_every_combination_of_options() {
    combinations(check_slopes);
}

#[test]
fn plain_gradients_of_tables_are_slopes() {
    let mut draws = Seeded(6);
    let bias: Array4<f64> = draws.array((1, 4, Q_LEN, KV_LEN));
    let tables: [(Buckets, Array2<f64>); 3] = [
        (Buckets::Clipped { clip: 1 }, draws.array((3, 4)) * 4.0),
        (Buckets::Clipped { clip: 9 }, draws.array((19, 4)) * 4.0),
        (Buckets::T5 { count: 4, max_distance: 3 }, draws.array((4, 4)) * 4.0),
    ];
    for (mask_name, mask) in masks() {
        for (bits, table) in (1..16).flat_map(|bits| tables.iter().map(move |table| (bits, table))) {
            let (q, k, v) =
                (draws.array((2, 4, Q_LEN, 3)), draws.array((2, 2, KV_LEN, 3)), draws.array((2, 2, KV_LEN, 2)));
            let mut core = Core::new(q * 4.0, k, v).mask(mask.clone());
            core.distances = Distances {
                alibi: (bits & 1 != 0).then(|| Alibi::new(4)),
                bias: (bits & 2 != 0).then(|| table.clone()),
                keys: (bits & 4 != 0).then(|| draws.array(([1, 3, 5, 21][bits % 4], 3)) * 4.0),
            };
            core.softcap = (bits & 8 != 0).then_some(1.5);
            core.bias = (bits % 3 == 0).then(|| bias.clone().into_dyn());
            core.sinks = (bits % 5 == 0).then(|| draws.array(4));
            let d_context = draws.array((2, 4, Q_LEN, 2));
            check_slopes(&format!("{mask_name}, {:?}, options {bits:04b}", table.0), &core, &d_context);
        }
    }
}

#[test]
fn a_scale_of_zero_moves_nothing_but_values() {
    let mut draws = Seeded(5);
    let core = Core::new(draws.array((1, 2, 3, 4)), draws.array((1, 2, 5, 4)), draws.array((1, 2, 5, 3))).scale(0.0);
    let d_context = draws.array((1, 2, 3, 3));
    check_slopes("scale 0", &core, &d_context);
    core.gradients_everywhere(&d_context, |way, gradients| {
        assert!(gradients.d_q.iter().chain(&gradients.d_k).all(|&x| x == 0.0), "{way}");
        assert!(gradients.d_v.iter().all(|&x| x != 0.0), "{way}");
    });
}

/// Every way of computing the gradients against the plain loops in `f64`, relative to the largest number of each.
#[track_caller]
fn check_ways(what: &str, core: &Core, d_context: &Array4<f64>) {
    let right = core.right_gradients(d_context);
    core.gradients_everywhere(d_context, |way, gradients| {
        let tolerance = if way.precision == Precision::F32 { 2e-5 } else { 1e-12 };
        assert_near(&format!("{what}, {way}"), gradients, &right, tolerance);
    });
}

/// Relative to the largest number of each gradient; NaN where NaN is right.
#[track_caller]
fn assert_near(what: &str, got: &Gradients<f64>, want: &Gradients<f64>, tolerance: f64) {
    let (got, want) = (named(got), named(want));
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, got), (_, want)) in got.iter().zip(&want) {
        assert_eq!(got.shape(), want.shape(), "{what}: {name}");
        let size = want.iter().filter(|x| x.is_finite()).fold(1.0, |size: f64, x| size.max(x.abs()));
        for ((at, &x), &y) in got.indexed_iter().zip(want) {
            let fits = if y.is_finite() { (x - y).abs() <= tolerance * size } else { !x.is_finite() };
            assert!(fits, "{what}: {name}[{:?}] is {x:e}, not {y:e}", at.slice());
        }
    }
}

#[test]
fn every_way_agrees_for_every_combination_of_options() {
    combinations(check_ways);
}

/// Lengths and widths at the edges of panels, tiles, groups of rows and blocks of keys.
#[test]
fn every_length_and_width() {
    let mut draws = Seeded(7);
    let keep = |q_len, kv_len, rule: fn(usize, usize) -> bool| {
        Mask::keep(&Array2::from_shape_fn((q_len, kv_len), |(i, j)| rule(i, j))).unwrap()
    };
    for (turn, (head_dim, value_dim)) in [(1, 3), (16, 16), (64, 48), (80, 17)].into_iter().enumerate() {
        for (q_len, kv_len) in [(1, 1), (5, 15), (7, 17), (64, 64), (65, 63), (97, 129), (20, 520)] {
            let (q, k) = (draws.array((1, 2, q_len, head_dim)), draws.array((1, 1, kv_len, head_dim)));
            let core = Core::new(q * 3.0, k, draws.array((1, 1, kv_len, value_dim)));
            let d_context = draws.array((1, 2, q_len, value_dim));
            let masks = [
                ("no mask", Mask::none()),
                ("causal", Mask::causal()),
                ("window", Mask::causal() & Mask::window(20, 0)),
                ("keep", keep(q_len, kv_len, |i, j| (i * 7 + j * 3) % 5 != 0)),
                ("blocks", keep(q_len, kv_len, |i, j| (i / 12 + j / 64) % 2 == 0)),
            ];
            // Two of the masks in turn, so that each meets each length.
            for (name, mask) in masks.into_iter().cycle().skip(2 * turn).take(2) {
                let what = format!("{name}, lengths {q_len} and {kv_len}, widths {head_dim} and {value_dim}");
                check_ways(&what, &core.clone().mask(mask), &d_context);
            }
        }
    }
}

#[test]
fn options_over_several_tiles() {
    let mut draws = Seeded(8);
    let (q_len, kv_len) = (50, 270);
    let (q, k) = (draws.array((2, 4, q_len, 20)), draws.array((2, 2, kv_len, 20)));
    let core = Core::new(q * 4.0, k, draws.array((2, 2, kv_len, 9)));
    let d_context = draws.array((2, 4, q_len, 9));
    let mut full: Array4<f64> = draws.array((2, 4, q_len, kv_len)) * 4.0;
    full.indexed_iter_mut()
        .filter(|((_, h, i, j), _)| (h + i + j / 70) % 4 == 0)
        .for_each(|(_, x)| *x = f64::NEG_INFINITY);
    let cores = [
        core.clone().dropout(0.2, 1),
        core.clone().dropout(0.2, 1).mask(Mask::causal()),
        core.clone().softcap(2.0).mask(Mask::causal()),
        core.clone().sinks(draws.array(4)).mask(Mask::causal() & Mask::key_lengths(&[260, 70])),
        core.clone().bias(full),
        core.clone().bias(draws.array((1, 4, q_len, kv_len))).mask(Mask::causal()).softcap(3.0),
        core.clone().bias(draws.array((2, 1, q_len, kv_len))).dropout(0.4, 2),
        core.clone().bias(draws.array((q_len, kv_len))).mask(Mask::causal()),
        core.clone().bias(draws.array((1, 1, 1, kv_len))),
        core.clone().bias(draws.array((1, 4, 1, kv_len))).mask(Mask::causal()),
        core.clone().bias(draws.array((2, 4, q_len, 1))).sinks(draws.array(4)),
        core.clone().bias(draws.array((1, 1, 1, 1))).sinks(draws.array(4)).mask(Mask::causal()),
        core.clone().heads(HeadMap::explicit(&[1, 0, 1, 1], 2).unwrap()).mask(Mask::causal()).scale(-0.3),
    ];
    for (index, core) in cores.iter().enumerate() {
        check_ways(&format!("case {index}"), core, &d_context);
    }
}
