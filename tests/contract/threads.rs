//! The same bits for any number of threads, on whatever pool the call runs, and for any cut of the work.

#![cfg(feature = "rayon")]
use crate::common;

use common::core::Core;
use common::distances::Distances;
use common::layer::Layer;
use common::train::{Kept, assert_same_named};
use common::{Answer, Call, Keep, PATHS, Precision, Seeded, Way, assert_bits, gives_weights};
use multihead::ndarray::{Array2, Axis, s};
use multihead::position::{Alibi, Buckets};
use multihead::{Level, Mask, Path, Rope, RopeStyle, Weights};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Pools of 1, 2, 3 and 8 threads.
fn pools() -> Vec<ThreadPool> {
    [1, 2, 3, 8].map(|threads| ThreadPoolBuilder::new().num_threads(threads).build().unwrap()).into()
}

/// Grouped heads, a mask and a bias; above 30 million operations, so that every path takes the parallel branch.
fn core(len: usize) -> Core {
    let mut draws = Seeded(59);
    let (q, k, v) = (draws.array((2, 4, len, 64)), draws.array((2, 2, len, 64)), draws.array((2, 2, len, 64)));
    let core = Core::new(q * 8.0, k, v).mask(Mask::causal() & Mask::key_lengths(&[len, len - 5]));
    let mut core = core.bias(draws.array((1, 4, len, len))).sinks(draws.array(4));
    core.distances = Distances {
        alibi: Some(Alibi::new(4)),
        bias: Some((Buckets::T5 { count: 32, max_distance: 100 }, draws.array((32, 4)))),
        keys: Some(draws.array((41, 64))),
    };
    core
}

fn layer() -> Layer {
    let mut draws = Seeded(60);
    let mut w = |inputs: usize, outputs: usize| -> Array2<f64> { draws.array((inputs, outputs)) };
    let weights = Weights::new(w(96, 96), w(96, 96), w(96, 96), w(96, 96));
    let norm = Some(Seeded(62).array(24));
    let weights = Weights { q_norm: norm.clone(), k_norm: norm, ..weights };
    let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    Layer::new(4, weights, Seeded(61).array((3, 130, 96))).mask(Mask::causal()).rope(rope)
}

/// Every path in both types; what returns weights, with them too.
fn plain_ways() -> Vec<Way> {
    let keeps = |path| {
        [Keep::Nothing, Keep::Weights].into_iter().filter(move |&keep| keep == Keep::Nothing || gives_weights(path))
    };
    let ways = PATHS.into_iter().flat_map(|path| keeps(path).map(move |keep| (path, keep)));
    ways.flat_map(|(path, keep)| [Precision::F32, Precision::F64].map(|precision| Way::new(precision, path, keep)))
        .collect()
}

#[track_caller]
fn assert_same(what: &str, got: &Answer, want: &Answer) {
    assert_bits(what, &got.out, &want.out);
    assert_bits(what, &got.lse, &want.lse);
    assert_eq!(got.weights.is_some(), want.weights.is_some(), "{what}");
    if let (Some(got), Some(want)) = (&got.weights, &want.weights) {
        assert_bits(what, got, want);
    }
}

/// The call on each pool and from inside a task of another pool.
fn check(call: &(impl Call + Sync)) {
    let pools = pools();
    for way in plain_ways() {
        let want = pools[0].install(|| call.answer(way)).unwrap();
        // The plain loops have no parallel branch.
        let pools_of_path = if way.path == Path::Reference { &pools[2..3] } else { &pools };
        for pool in pools_of_path {
            let threads = pool.current_num_threads();
            let got = pool.install(|| call.answer(way)).unwrap();
            assert_same(&format!("{way} on {threads} threads"), &got, &want);
            let (left, right) = pool.install(|| rayon::join(|| call.answer(way), || call.answer(way)));
            for got in [left.unwrap(), right.unwrap()] {
                assert_same(&format!("{way} inside a task of {threads} threads"), &got, &want);
            }
            if way.keep == Keep::Nothing {
                let into = pool.install(|| call.out_into(way)).unwrap();
                assert_bits(&format!("{way} into, {threads} threads"), &into, &want.out);
            }
        }
        let nested = pools[3].install(|| pools[1].install(|| call.answer(way))).unwrap();
        assert_same(&format!("{way} on a pool inside a pool"), &nested, &want);
    }
}

#[test]
fn b59_core_has_the_same_bits_on_any_pool() {
    check(&core(129));
}

#[test]
fn b59_short_lengths_have_the_same_bits_on_any_pool() {
    for len in [31, 32, 33, 64, 65] {
        check(&core(len));
    }
}

#[test]
fn layer_has_the_same_bits_on_any_pool() {
    check(&layer());
}

#[test]
fn b59_gradients_of_the_layer_have_the_same_bits_on_any_pool() {
    let mut layer = layer();
    layer.weights.b_k = Some(Seeded(62).array(96));
    layer.dropout = Some((0.2, 5));
    let d_output = Seeded(63).array(layer.query.dim());
    let pools = pools();
    let ways = [Precision::F32, Precision::F64].map(|precision| Way::new(precision, Path::Auto, Keep::Nothing));
    for (way, kept) in ways.into_iter().zip([Kept::All, Kept::Lse]) {
        let want = pools[0].install(|| layer.gradients_keeping(way, kept, &d_output)).unwrap();
        for pool in &pools[1..] {
            let what = format!("{way}, {kept:?}, {} threads", pool.current_num_threads());
            let gradients = || layer.gradients_keeping(way, kept, &d_output).unwrap();
            assert_same_named(&what, &pool.install(gradients), &want);
            let (left, right) = pool.install(|| rayon::join(gradients, gradients));
            assert_same_named(&format!("{what}, inside a task"), &left, &want);
            assert_same_named(&format!("{what}, inside a task"), &right, &want);
        }
    }
}

#[test]
fn query_tiles_do_not_move_a_bit() {
    let (core, layer) = (core(129), layer());
    for &level in Level::available() {
        let way = Way { level: Some(level), ..Way::new(Precision::F32, Path::Tiled, Keep::Nothing) };
        let (want, want_layer) = (core.answer(way).unwrap(), layer.answer(way).unwrap());
        for tile in [1, 2, 5, 6, 7, 64, 128, 129, usize::MAX] {
            let way = Way { query_tile: Some(tile), ..way };
            assert_same(&way.to_string(), &core.answer(way).unwrap(), &want);
            assert_same(&way.to_string(), &layer.answer(way).unwrap(), &want_layer);
        }
    }
}

#[test]
fn b59_a_query_is_the_same_alone_and_among_others() {
    // The last queries of a causal call see the same keys whether the earlier ones are there or not.
    let whole = core(65);
    for way in plain_ways() {
        let want = whole.answer(way).unwrap();
        for rows in [1, 2, 5, 12, 64] {
            let mut part = whole.clone();
            part.q = part.q.slice(s![.., .., 65 - rows.., ..]).to_owned();
            let bias = part.bias.take().unwrap();
            part.bias = Some(bias.slice_axis(Axis(2), (65 - rows..65).into()).to_owned());
            let got = part.answer(way).unwrap();
            let tail = want.out.slice_axis(Axis(2), (65 - rows..65).into());
            let gap = (&got.out - &tail).mapv(f64::abs).fold(0.0, |a: f64, &b| a.max(b));
            assert!(gap < 1e-6, "{way}: {rows} rows differ by {gap:e}");
        }
    }
}
