//! The tiled path where its tiles end: lengths and widths around the sizes of tiles, panels and groups, with every
//! instruction set by name, against the plain loops in `f64`.

use crate::common;

use common::core::Core;
use common::{Answer, Call, Keep, Precision, ROUNDING, Run, Seeded, Way, Within, assert_bits, flat, is_near};
use multihead::ndarray::{Array1, Array2, Array4, Axis, s};
use multihead::{HeadMap, Level, Mask, Path};
use std::time::Instant;

const LENGTHS: [usize; 11] = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129];
const WIDTHS: [usize; 10] = [1, 3, 16, 64, 80, 96, 100, 128, 256, 257];

/// Every level by name, in both types, with these query tiles.
fn tiled(query_tiles: &[Option<usize>]) -> Vec<Way> {
    let mut ways = Vec::new();
    for precision in [Precision::F32, Precision::F64] {
        for &level in Level::available() {
            for &query_tile in query_tiles {
                let way = Way::new(precision, Path::Tiled, Keep::Nothing);
                ways.push(Way { level: Some(level), query_tile, ..way });
            }
        }
    }
    ways
}

/// Checks context and lse, and that `forward_into` gives the same bits.
#[track_caller]
fn check(what: &str, core: &Core, query_tiles: &[Option<usize>], within: Within) -> Answer {
    let right = core.oracle();
    for way in tiled(query_tiles) {
        let answer = core.answer(way).unwrap_or_else(|e| panic!("{what}, {way}: {e}"));
        let into = core.out_into(way).unwrap_or_else(|e| panic!("{what}, {way} into: {e}"));
        assert_bits(&format!("{what}, {way} into"), &into, &answer.out);
        assert_eq!(answer.out.shape(), right.out.shape(), "{what}, {way}");
        let tolerance = if way.precision == Precision::F32 { within.0 } else { within.1 };
        let pairs = [("out", flat(&answer.out), flat(&right.out)), ("lse", flat(&answer.lse), flat(&right.lse))];
        for (name, got, want) in pairs {
            for (at, (&got, &want)) in got.iter().zip(&want).enumerate() {
                assert!(is_near(got, want, tolerance), "{what}, {way}: {name}[{at}] is {got:e}, not {want:e}");
            }
        }
    }
    right
}

const BATCH: usize = 2;

/// Names of the combinations that [`rules`] makes.
const RULES: [&str; 9] = ["nothing", "causal", "window", "lengths", "keep", "bias", "softcap", "sinks", "all of them"];

/// Two heads to a KV head, with one kind of rule or all of them.
fn rules(kind: usize, core: Core) -> Core {
    let (_, heads, q_len, kv_len) = (0, core.q.dim().1, core.q.dim().2, core.k.dim().2);
    let mut draws = Seeded((kind * 1000 + q_len * 10 + kv_len) as u64);
    let all = kind == RULES.len() - 1;
    let mut core = core;
    let mut mask = Mask::none();
    if kind == 1 || all {
        mask = mask & Mask::causal();
    }
    if kind == 2 || all {
        mask = mask & Mask::window(70, 5);
    }
    if kind == 3 || all {
        mask = mask & Mask::key_lengths(&[kv_len, kv_len - kv_len / 3]);
    }
    if kind == 4 || all {
        let keep = Array4::from_shape_simple_fn((1, heads, q_len, kv_len), || draws.draw() > -0.2);
        mask = mask & Mask::keep(&keep).unwrap();
    }
    core = core.mask(mask);
    if kind == 5 || all {
        let bias: Array4<f64> = draws.array((1, heads, q_len, kv_len));
        core = core.bias(bias * 4.0);
    }
    if kind == 6 || all {
        core = core.softcap(1.5);
    }
    if kind == 7 || all {
        core = core.sinks(draws.array(heads));
    }
    core
}

/// A call of two entries and two heads that share a KV head.
fn core([q_len, kv_len]: [usize; 2], [head_dim, value_dim]: [usize; 2]) -> Core {
    let mut draws = Seeded((q_len + 1000 * kv_len + 7 * head_dim + value_dim) as u64);
    let q: Array4<f64> = draws.array((BATCH, 2, q_len, head_dim));
    Core::new(q * 8.0, draws.array((BATCH, 1, kv_len, head_dim)), draws.array((BATCH, 1, kv_len, value_dim)))
}

#[test]
fn every_length_with_every_width() {
    for (n, &kv_len) in LENGTHS.iter().enumerate() {
        for (w, &head_dim) in WIDTHS.iter().enumerate() {
            // Another number of queries, another width of values and another rule each time; all pairs come round.
            let q_len = [13, 6, 1, 7][(n + w) % 4];
            let value_dim = WIDTHS[(w + 1 + n) % WIDTHS.len()];
            let kind = (n + 2 * w) % RULES.len();
            let what = format!("lengths {q_len}, {kv_len}, widths {head_dim}, {value_dim}, {}", RULES[kind]);
            let core = rules(kind, core([q_len, kv_len], [head_dim, value_dim]));
            check(&what, &core, &[None, Some(5)], ROUNDING);
        }
    }
}

#[test]
fn every_length_with_every_rule() {
    for &len in &LENGTHS {
        for (kind, name) in RULES.iter().enumerate() {
            let (head_dim, value_dim) = ([3, 16, 20][kind % 3], [17, 5, 32][(kind + len) % 3]);
            let what = format!("length {len}, widths {head_dim}, {value_dim}, {name}");
            check(&what, &rules(kind, core([len, len], [head_dim, value_dim])), &[None, Some(1), Some(64)], ROUNDING);
        }
    }
}

#[test]
fn more_queries_than_keys_and_the_other_way() {
    for lengths in [[129, 64], [129, 1], [70, 17], [1, 129], [5, 128], [64, 129]] {
        for (kind, name) in RULES.iter().enumerate() {
            check(
                &format!("lengths {lengths:?}, {name}"),
                &rules(kind, core(lengths, [8, 9])),
                &[None, Some(7)],
                ROUNDING,
            );
        }
    }
}

#[test]
fn uneven_groups_of_heads() {
    let mut draws = Seeded(71);
    for map in [&[0, 1, 1, 1, 1, 1, 1, 1][..], &[2, 0, 2, 2, 0], &[0; 13], &[1]] {
        let q = draws.array((1, map.len(), 23, 20));
        let core = Core::new(q, draws.array((1, 3, 90, 20)), draws.array((1, 3, 90, 33)));
        let core = core.heads(HeadMap::explicit(map, 3).unwrap()).mask(Mask::causal()).sinks(draws.array(map.len()));
        check(&format!("{map:?}"), &core, &[None, Some(1), Some(5)], ROUNDING);
    }
}

/// One head of width 1 whose scores are `factor * keys[j]` for each factor.
fn products(factors: &[f64], keys: &[f64], value: impl Fn(usize, usize) -> f64) -> Core {
    let q = Array1::from(factors.to_vec()).insert_axis(Axis(1));
    let k = Array1::from(keys.to_vec()).insert_axis(Axis(1));
    Core::single(q, k, Array2::from_shape_fn((keys.len(), 20), |(j, c)| value(j, c))).scale(1.0)
}

#[test]
fn weights_that_are_denormal_or_vanish() {
    let value = |j: usize, c: usize| ((j * 7 + c * 3) % 11) as f64 / 8.0 - 0.5;
    let factors = [1.0, -1.0, 0.5, -0.25, 0.0, 2.0, -2.0];
    // A score of 300 has an error of 3e-5 in units of the last place; so have the weights.
    let within = Within(2e-4, 1e-11);
    // Growing and falling with the key, 250 from end to end, twice that for a factor of 2.
    let ramp: Vec<f64> = (0..500).map(|j| f64::from(j) / 2.0 - 125.0).collect();
    let mut falling = ramp.clone();
    falling.reverse();
    // One high score first, last or in the middle; the others make exponentials of f32 denormal (87 to 104 below).
    let spike = |at: usize| (0..300).map(|j| if j == at { 0.0 } else { -86.0 - (j % 20) as f64 }).collect::<Vec<_>>();
    // The same for f64: 708 to 745 below.
    let deep = |at: usize| (0..200).map(|j| if j == at { 0.0 } else { -706.0 - (j % 42) as f64 }).collect::<Vec<_>>();
    // All far below zero, or far above: no reference but the row's own maximum will do.
    let (low, high): (Vec<f64>, Vec<f64>) = (0..200).map(|j| (f64::from(j) - 900.0, f64::from(j) + 700.0)).unzip();
    let saw: Vec<f64> = (0..400).map(|j| f64::from(j * 37 % 256) - 128.0).collect();
    let cases = [
        ("ramp", ramp),
        ("falling", falling),
        ("spike first", spike(0)),
        ("spike last", spike(299)),
        ("spike", spike(130)),
        ("deep spike first", deep(0)),
        ("deep spike last", deep(199)),
        ("low", low),
        ("high", high),
        ("saw", saw),
    ];
    for (name, keys) in cases {
        for (rule, mask) in [("", Mask::none()), ("causal", Mask::causal()), ("window", Mask::window(40, 3))] {
            let right = check(&format!("{name} {rule}"), &products(&factors, &keys, value).mask(mask), &[None], within);
            assert!(right.out.iter().chain(&right.lse).all(|x| !x.is_nan()), "{name} {rule}");
        }
    }
}

#[test]
fn a_far_score_leaves_the_other_values_alone() {
    // Key 0 outweighs all others by e^500, so each row is its value, bit for bit, whatever comes later.
    let keys: Vec<f64> = (0..200).map(|j| if j == 0 { 800.0 } else { 0.25 * f64::from(j % 7) }).collect();
    let core = products(&[1.0, 1.0, 1.0], &keys, |j, c| if j == 0 { 0.3125 + c as f64 } else { -1.0 });
    let want: Vec<f64> = (0..60).map(|at| 0.3125 + f64::from(at % 20)).collect();
    for way in tiled(&[None, Some(1)]) {
        Run { way, answer: core.answer(way).unwrap() }.out(&want, common::EXACTLY);
    }
}

#[test]
fn blocks_of_minus_infinity_with_softcap_and_masks() {
    let (q_len, kv_len) = (70, 200);
    let mut draws = Seeded(72);
    let noise: Array4<f64> = draws.array((1, 2, q_len, kv_len));
    // Whole tiles, parts of tiles and single pairs; row 9 sees nothing at all, and head 1 begins with hidden tiles.
    let bias = Array4::from_shape_fn((1, 2, q_len, kv_len), |(b, h, i, j)| {
        let hidden = (64..128).contains(&j) && i % 3 == 0
            || h == 1 && j < 130
            || i == 9
            || (15..35).contains(&j) && (12..30).contains(&i)
            || (i * 31 + j * 17) % 13 == 0;
        if hidden { f64::NEG_INFINITY } else { noise[[b, h, i, j]] * 8.0 }
    });
    let keep = Array4::from_shape_fn((1, 1, q_len, kv_len), |(_, _, i, j)| (i + j) % 4 != 1);
    let masks = [
        Mask::none(),
        Mask::causal(),
        Mask::key_lengths(&[150, 131]),
        Mask::keep(&keep).unwrap(),
        Mask::causal() & Mask::window(90, 0) & Mask::keep(&keep).unwrap() & Mask::key_lengths(&[200, 180]),
    ];
    for mask in masks {
        for softcap in [None, Some(0.5), Some(30.0)] {
            let mut core = core([q_len, kv_len], [24, 40]).bias(bias.clone()).mask(mask.clone());
            core.softcap = softcap;
            let right = check(&format!("{mask}, softcap {softcap:?}"), &core, &[None, Some(1), Some(5)], ROUNDING);
            assert!(right.lse.iter().any(|&lse| lse == f64::NEG_INFINITY), "row 9");
        }
    }
}

#[test]
fn the_cap_comes_before_the_bias_and_the_bias_before_the_mask() {
    // All scores are 0 before the bias ln(j + 1), so the weights are in proportion to j + 1. A cap of 1/2 after the
    // bias would bound it; a cap of the hidden bias would make it -1/2.
    let kv_len = 150;
    let bias = Array2::from_shape_fn((7, kv_len), |(i, j)| match (i + j) % 5 {
        0 => f64::NEG_INFINITY,
        _ => (j as f64 + 1.0).ln(),
    });
    let core = Core::means(7, (0..kv_len).map(|j| j as f64 / 64.0)).softcap(0.5).bias(bias).mask(Mask::causal());
    let want: Vec<f64> = (0..7)
        .map(|i| {
            let seen = (0..=i + kv_len - 7).filter(|j| (i + j) % 5 != 0);
            let (sum, total) = seen
                .map(|j| j as f64)
                .fold((0.0, 0.0), |(sum, total), j| (sum + (j + 1.0) * j / 64.0, total + j + 1.0));
            sum / total
        })
        .collect();
    core.everywhere(|run| run.out(&want, ROUNDING));
}

#[test]
fn the_first_tiles_are_all_hidden() {
    let (q_len, kv_len) = (20, 260);
    let first = 130;
    let hidden_first = |from: usize| Array4::from_shape_fn((1, 1, q_len, kv_len), |(_, _, i, j)| j >= from + i % 7);
    let nan_before = |mut core: Core| {
        for j in 0..first {
            core.k.index_axis_mut(Axis(2), j).fill(f64::NAN);
            core.v.index_axis_mut(Axis(2), j).fill(f64::INFINITY);
        }
        core
    };
    let masks = [
        ("ranges", Mask::key_ranges(&[first..kv_len, 200..260])),
        ("ranges and causal", Mask::key_ranges(&[first..kv_len, 200..259]) & Mask::causal()),
        ("window", Mask::window(40, 0)),
        ("keep", Mask::keep(&hidden_first(first)).unwrap()),
        ("keep and causal", Mask::keep(&hidden_first(235)).unwrap() & Mask::causal()),
    ];
    for (name, mask) in masks {
        let core = nan_before(core([q_len, kv_len], [16, 18]).mask(mask));
        let right = check(name, &core, &[None, Some(1), Some(5)], ROUNDING);
        assert!(right.out.iter().all(|x| x.is_finite()), "{name}");
    }
    let bias = hidden_first(first).map(|&seen| if seen { 0.25 } else { f64::NEG_INFINITY });
    let right = check("bias", &nan_before(core([q_len, kv_len], [16, 18]).bias(bias)), &[None, Some(1)], ROUNDING);
    assert!(right.out.iter().all(|x| x.is_finite()), "bias");
}

/// The rows of such a head read their biases where they are, whatever axes the bias has; -inf hides what is not finite.
#[test]
fn a_bias_where_no_heads_share_keys() {
    let (heads, q_len, kv_len) = (2, 40, 150);
    let mut draws = Seeded(62);
    for axes in 0..8 {
        let long = |axis: usize, len: usize| if axes >> axis & 1 == 1 { len } else { 1 };
        let mut bias: Array4<f64> = draws.array((long(0, BATCH), long(1, heads), long(2, q_len), kv_len));
        for ((_, _, i, j), bias) in bias.indexed_iter_mut() {
            if (i + j) % 11 == 3 || (70..80).contains(&j) {
                *bias = f64::NEG_INFINITY;
            }
        }
        let (q, k) = (draws.array((BATCH, heads, q_len, 16)), draws.array((BATCH, heads, kv_len, 16)));
        let v: Array4<f64> = draws.array((BATCH, heads, kv_len, 18));
        for bad in [0.5, f64::NAN, f64::INFINITY] {
            let mut core = Core::new(q.clone(), k.clone(), v.clone()).bias(bias.clone());
            core.k.slice_mut(s![.., .., 73, ..]).fill(bad);
            core.v.slice_mut(s![.., 0, 77, 3]).fill(bad);
            let what = format!("axes {axes:03b}, {bad}");
            let right = check(&what, &core, &[None, Some(7)], ROUNDING);
            assert!(right.out.iter().all(|x| x.is_finite()), "{what}");
        }
    }
}

#[test]
fn values_that_are_not_finite_reach_only_the_rows_that_see_them() {
    for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
        for (name, mask) in [
            ("causal", Mask::causal()),
            ("window", Mask::window(3, 2)),
            ("keep", Mask::keep(&Array2::from_shape_fn((90, 90), |(i, j)| (i * j) % 3 != 1)).unwrap()),
        ] {
            for kind in [0, 5, 6, 7] {
                let mut core = rules(kind, core([90, 90], [10, 21])).mask(mask.clone());
                for (at, c) in [(5, 0), (63, 20), (64, 7), (89, 16)] {
                    core.v[[0, 0, at, c]] = bad;
                }
                check(&format!("{bad}, {name}, {}", RULES[kind]), &core, &[None, Some(1)], ROUNDING);
            }
        }
    }
}

/// A mask that leaves each of many queries its own key: no time goes into the pairs that it hides.
#[test]
fn b61_a_long_sequence_under_a_narrow_window() {
    let len = 70_000;
    let mut draws = Seeded(61);
    let values: Vec<f64> = (0..len).map(|_| draws.draw()).collect();
    let core = Core::means(len, values.iter().copied()).mask(Mask::causal() & Mask::window(0, 0));
    let mut ways = tiled(&[None]);
    ways.extend([Precision::F32, Precision::F64].map(|precision| Way::new(precision, Path::Auto, Keep::Nothing)));
    for way in ways {
        let started = Instant::now();
        let answer = core.answer(way).unwrap();
        let seconds = started.elapsed().as_secs_f64();
        assert!(answer.out.iter().zip(&values).all(|(got, want)| got.to_bits() == want.to_bits()), "{way}");
        assert!(answer.lse.iter().all(|&lse| lse == 0.0), "{way}");
        // All pairs would take minutes; this takes milliseconds, and a busy machine has its due.
        assert!(seconds < 5.0, "{way}: {seconds} s");
    }
}

/// A matrix unit cannot multiply all numbers; which of them are multiplied otherwise must not depend on who is beside them.
#[test]
fn numbers_far_from_one_among_many_queries() {
    let far = 70.0_f64.exp2();
    let scaled = |change: &dyn Fn(&mut Core)| {
        let mut core = core([100, 200], [20, 33]);
        change(&mut core);
        core
    };
    let rows = [3, 40, 41, 99];
    let cases = [
        (
            "small queries",
            scaled(&|core| rows.iter().for_each(|&i| core.q.slice_mut(s![.., .., i, ..]).mapv_inplace(|x| x / far))),
        ),
        (
            "large queries, small keys",
            scaled(&|core| {
                rows.iter().for_each(|&i| core.q.slice_mut(s![.., .., i, ..]).mapv_inplace(|x| x * far));
                core.k.mapv_inplace(|x| x / far);
            }),
        ),
        ("small values", scaled(&|core| core.v.slice_mut(s![.., .., 64..128, ..]).mapv_inplace(|x| x / far))),
        ("large values", scaled(&|core| core.v.slice_mut(s![.., .., 64..128, ..]).mapv_inplace(|x| x * far))),
        ("no number", scaled(&|core| rows.iter().for_each(|&i| core.q.slice_mut(s![.., .., i, 7]).fill(f64::NAN)))),
        ("infinite keys", scaled(&|core| core.k.slice_mut(s![.., .., 70, 3]).fill(f64::INFINITY))),
    ];
    for (what, core) in cases {
        let right = core.oracle();
        let size = right.out.iter().filter(|x| x.is_finite()).fold(1.0, |size, x| x.abs().max(size));
        for way in tiled(&[None]) {
            let got = core.answer(way).unwrap();
            for (at, (&got, &want)) in flat(&got.out).iter().zip(&flat(&right.out)).enumerate() {
                assert!(
                    is_near(got / size, want / size, ROUNDING.0),
                    "{what}, {way}: out[{at}] is {got:e}, not {want:e}"
                );
            }
            for query_tile in [1, 7, 64] {
                let cut = core.answer(Way { query_tile: Some(query_tile), ..way }).unwrap();
                assert_bits(&format!("{what}, {way}, {query_tile}"), &cut.out, &got.out);
            }
        }
    }
}

/// Items of many rows are met in another order than those of few, which moves no bit: also where the reference of a row moves
/// from tile to tile, and with a last block that is not whole.
#[test]
fn long_items_have_the_bits_of_short_ones() {
    const Q_LEN: usize = 611;
    let mut draws = Seeded(77);
    for (head_dim, value_dim) in [(64, 64), (40, 72), (16, 16), (130, 40), (0, 24), (24, 0)] {
        let mut k = draws.array((1, 1, 3 * 64 + 9, head_dim));
        // Scores grow from key to key, by enough to move the reference.
        k.axis_iter_mut(Axis(2)).enumerate().for_each(|(key, mut row)| row *= 1.0 + key as f64);
        let v = draws.array((1, 1, 3 * 64 + 9, value_dim));
        let core = Core::new(draws.array((1, 1, Q_LEN, head_dim)), k, v);
        let what = format!("{head_dim} and {value_dim}");
        // Scores are up to 200 times as large as elsewhere, and so are their roundings, which powers turn into relative ones.
        check(&what, &core, &[Some(Q_LEN)], Within(200.0 * ROUNDING.0, 200.0 * ROUNDING.1));
        for way in tiled(&[Some(Q_LEN)]) {
            let long = core.answer(way).unwrap();
            for query_tile in [64, 127, 300] {
                let short = core.answer(Way { query_tile: Some(query_tile), ..way }).unwrap();
                assert_bits(&format!("{what}, {way}, {query_tile}"), &short.out, &long.out);
                assert_bits(&format!("lse of {what}, {way}, {query_tile}"), &short.lse, &long.lse);
            }
        }
        // Nor does what is dropped depend on the item, or what a bias adds or hides.
        let mut bias = draws.array((1, 1, Q_LEN, 3 * 64 + 9));
        bias.iter_mut().step_by(5).for_each(|x| *x = f64::NEG_INFINITY);
        // Some see nothing of a tile, or nothing at all.
        bias.slice_mut(s![.., .., 100..120, ..64]).fill(f64::NEG_INFINITY);
        bias.slice_mut(s![.., .., 300..305, ..]).fill(f64::NEG_INFINITY);
        for (what, core) in [("dropout", core.clone().dropout(0.4, 7)), ("bias", core.bias(bias).dropout(0.1, 8))]
            .map(|(with, core)| (format!("{what}, {with}"), core))
        {
            check(&what, &core, &[Some(Q_LEN)], Within(200.0 * ROUNDING.0, 200.0 * ROUNDING.1));
            for way in tiled(&[Some(Q_LEN)]) {
                let long = core.answer(way).unwrap();
                let short = core.answer(Way { query_tile: Some(64), ..way }).unwrap();
                assert_bits(&format!("{what}, {way}"), &short.out, &long.out);
            }
        }
    }
}
