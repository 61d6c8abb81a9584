//! The gradients of learned biases and relative keys on the tiled path: against the plain loops, which are checked by
//! differences in `gradients.rs`.

use crate::common;

use common::core::Core;
use common::distances::Distances;
use common::gradients::{assert_same_gradients, gradient_ways, named};
use common::recipe::recipes;
use common::{Call, Keep, Precision, Seeded, Way, property};
use multihead::ndarray::{Array2, Array4, Dimension, s};
use multihead::position::{Alibi, Buckets};
use multihead::{Gradients, HeadMap, Mask, Path};
use proptest::prelude::*;

/// All gradients near those of the plain loops, by the largest number of each.
#[track_caller]
fn check(what: &str, core: &Core, d_context: &Array4<f64>) {
    let want = named(&core.right_gradients(d_context));
    for way in gradient_ways() {
        let gradients = core.gradients(way, d_context).unwrap_or_else(|e| panic!("{what} {way}: {e}"));
        let tolerance = if way.precision == Precision::F32 { 3e-5 } else { 1e-11 };
        for ((name, got), (_, want)) in named(&gradients).iter().zip(&want) {
            assert_eq!(got.shape(), want.shape(), "{what} {way}: {name}");
            let largest = want.iter().fold(1.0, |a: f64, x| a.max(x.abs()));
            for ((index, &got), &want) in got.indexed_iter().zip(want) {
                let fits = if want.is_nan() { !got.is_finite() } else { (got - want).abs() <= tolerance * largest };
                assert!(fits, "{what} {way}: {name}{:?} is {got:e}, not {want:e}", index.slice());
            }
        }
    }
}

/// A call of several blocks of keys and several tiles of queries.
fn long(heads: &HeadMap, q_len: usize, kv_len: usize, seed: u64) -> (Core, Array4<f64>) {
    let mut draws = Seeded(seed);
    let (num_heads, num_kv_heads) = (heads.num_heads(), heads.num_kv_heads());
    let q: Array4<f64> = draws.array((2, num_heads, q_len, 5)) * 3.0;
    let (k, v) = (draws.array((2, num_kv_heads, kv_len, 5)), draws.array((2, num_kv_heads, kv_len, 3)));
    (Core::new(q, k, v).heads(heads.clone()), draws.array((2, num_heads, q_len, 3)))
}

fn tables(heads: usize, buckets: Option<Buckets>, clip: Option<usize>, seed: u64) -> Distances {
    let mut draws = Seeded(seed);
    Distances {
        alibi: None,
        bias: buckets.map(|buckets| (buckets, draws.array((buckets.count(), heads)) * 4.0)),
        keys: clip.map(|clip| draws.array((2 * clip + 1, 5)) * 3.0),
    }
}

#[test]
fn several_blocks_and_tiles() {
    let maps = [HeadMap::grouped(2, 2), HeadMap::grouped(4, 2), HeadMap::explicit(&[2, 0, 2], 4)];
    let masks = [Mask::none(), Mask::causal(), Mask::causal() & Mask::window(70, 0), Mask::key_lengths(&[600, 290])];
    let kinds = [
        (Some(Buckets::T5 { count: 32, max_distance: 128 }), None),
        (None, Some(16)),
        (None, Some(2000)),
        (Some(Buckets::Clipped { clip: 300 }), Some(0)),
    ];
    for (heads, mask) in maps.map(Result::unwrap).iter().zip(masks.iter().cycle().skip(1)) {
        for (index, (buckets, clip)) in kinds.into_iter().enumerate() {
            let (core, d_context) = long(heads, 120, 600, index as u64);
            let mut core = core.mask(mask.clone());
            core.distances = tables(heads.num_heads(), buckets, clip, 7);
            check(&format!("{heads:?} {mask} {buckets:?} {clip:?}"), &core, &d_context);
        }
    }
}

#[test]
fn everything_at_once() {
    let heads = HeadMap::grouped(4, 2).unwrap();
    let (mut core, d_context) = long(&heads, 110, 300, 3);
    core.distances = tables(4, Some(Buckets::T5Causal { count: 16, max_distance: 60 }), Some(20), 8);
    core.distances.alibi = Some(Alibi::new(4));
    let mut draws = Seeded(9);
    let bias: Array4<f64> = draws.array((1, 4, 1, 300));
    let mut core = core.mask(Mask::causal()).softcap(2.0).scale(-0.6).dropout(0.2, 5).sinks(draws.array(4));
    check("without an array", &core, &d_context);
    core.bias = Some(bias.into_dyn());
    check("with an array", &core, &d_context);
    core.distances.alibi = None;
    core.distances.keys = None;
    check("no relative keys", &core, &d_context);
}

#[test]
fn any_call() {
    property(60, (recipes(), any::<[u8; 2]>()), |(recipe, [bits, clip])| {
        if recipe.rules.common_align().is_none() {
            return;
        }
        let mut core = recipe.core();
        let mut draws = Seeded(recipe.seed ^ 3);
        let buckets = [
            Buckets::Clipped { clip: usize::from(bits) },
            Buckets::T5 { count: 8, max_distance: 20 },
            Buckets::T5Causal { count: 6, max_distance: 1 << 50 },
        ][usize::from(bits) % 3];
        core.distances = Distances {
            alibi: None,
            bias: (bits & 64 != 0).then(|| (buckets, draws.array((buckets.count(), recipe.num_heads())))),
            keys: (bits & 128 != 0).then(|| draws.array((2 * usize::from(clip) + 1, recipe.head_dim))),
        };
        let d_context = draws.array((recipe.batch, recipe.num_heads(), recipe.q_len, recipe.value_dim));
        check("recipe", &core, &d_context);
    });
}

#[test]
fn bad_numbers_stay_where_they_are_seen() {
    let heads = HeadMap::grouped(1, 1).unwrap();
    let (core, d_context) = long(&heads, 9, 140, 4);
    let mut core = core.mask(Mask::causal());
    core.distances = tables(1, Some(Buckets::Clipped { clip: 4 }), Some(200), 6);
    // No pair has these distances: 9 queries at 131 to 139, all keys up to their own.
    let keys = core.distances.keys.as_mut().unwrap();
    keys.slice_mut(s![201.., ..]).fill(f64::NAN);
    keys.slice_mut(s![..60, ..]).fill(f64::INFINITY);
    check("hidden distances", &core, &d_context);
    assert!(core.right_gradients(&d_context).d_q.iter().all(|x| x.is_finite()));
    // The first query is bad; it sees all distances but the smallest ones.
    let mut bad = core.clone();
    bad.q.slice_mut(s![.., .., 0, ..]).fill(f64::NAN);
    check("a bad query", &bad, &d_context);
    let mut bad = core.clone();
    bad.k.slice_mut(s![.., .., 139, ..]).fill(f64::NAN);
    check("a bad key", &bad, &d_context);
    core.distances.keys.as_mut().unwrap().row_mut(200 - 135).fill(f64::NAN);
    check("a distance that five queries have", &core, &d_context);
}

#[test]
fn the_same_bits_on_any_pool() {
    let heads = HeadMap::grouped(4, 2).unwrap();
    let (core, d_context) = long(&heads, 400, 700, 5);
    let mut core = core.mask(Mask::causal());
    core.distances = tables(4, Some(Buckets::T5 { count: 32, max_distance: 128 }), Some(100), 7);
    for precision in [Precision::F32, Precision::F64] {
        let way = Way::new(precision, Path::Tiled, Keep::Nothing);
        let on = |threads: usize| -> Gradients<f64> {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| core.gradients(way, &d_context).unwrap())
        };
        let want = on(1);
        for threads in [2, 3, 8] {
            for _ in 0..3 {
                assert_same_gradients(&format!("{way} on {threads} threads"), &on(threads), &want);
            }
        }
    }
}

#[test]
fn tables_without_pairs_have_no_gradient() {
    for (q_len, kv_len) in [(0, 4), (3, 0), (0, 0)] {
        let heads = HeadMap::grouped(2, 1).unwrap();
        let (mut core, d_context) = long(&heads, q_len, kv_len, 6);
        core.distances = tables(2, Some(Buckets::Clipped { clip: 2 }), Some(3), 7);
        core.gradients_everywhere(&d_context, |way, gradients| {
            assert_eq!(gradients.d_relative_bias, Some(Array2::zeros((5, 2))), "{way}");
            assert_eq!(gradients.d_relative_keys, Some(Array2::zeros((7, 5))), "{way}");
        });
    }
    // All pairs hidden.
    let (core, d_context) = long(&HeadMap::grouped(2, 2).unwrap(), 4, 70, 7);
    let mut core = core.mask(Mask::last_n(0));
    core.distances = tables(2, Some(Buckets::Clipped { clip: 2 }), Some(3), 7);
    core.gradients_everywhere(&d_context, |way, gradients| {
        assert!(named(gradients).iter().all(|(_, gradient)| gradient.iter().all(|&x| x == 0.0)), "{way}");
    });
    assert!(core.oracle().out.iter().all(|&x| x == 0.0));
}
