//! Biases and keys that go by the distance of a query and a key: ALiBi, learned buckets, Shaw's relative keys.

use crate::common;

use common::core::Core;
use common::distances::{Distances, bucket};
use common::layer::Layer;
use common::masks::Rules;
use common::recipe::{Recipe, recipes};
use common::{Call, EXACTLY, PRINTED, ROUNDING, Seeded, Within, property};
use multihead::ndarray::{Array1, Array2, Array3, Array4, ArrayView1, ArrayView2, Axis, array, concatenate, s};
use multihead::position::{Alibi, Buckets};
use multihead::{Init, Mask, MultiHeadAttention, Weights};
use proptest::prelude::*;

fn log2_slopes(num_heads: usize) -> Vec<f64> {
    let alibi = Alibi::new(num_heads);
    assert_eq!((alibi.num_heads(), alibi.slope(num_heads)), (num_heads, None));
    (0..num_heads).map(|head| alibi.slope(head).unwrap().log2()).collect()
}

#[test]
fn b52_alibi_slopes() {
    assert_eq!(log2_slopes(0), [0.0; 0]);
    assert_eq!(log2_slopes(1), [-8.0]);
    assert_eq!(log2_slopes(2), [-4.0, -8.0]);
    assert_eq!(log2_slopes(3), [-4.0, -8.0, -2.0]);
    assert_eq!(log2_slopes(6), [-2.0, -4.0, -6.0, -8.0, -1.0, -3.0]);
    assert_eq!(log2_slopes(8), [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0]);
    let twelve = [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -0.5, -1.5, -2.5, -3.5];
    assert!(log2_slopes(12).iter().zip(twelve).all(|(got, want)| (got - want).abs() < 1e-15));
    assert_eq!(Alibi::new(usize::MAX).slope(usize::MAX), None);
    assert!(Alibi::new(usize::MAX).slope(usize::MAX - 1).unwrap() > 0.0);
}

/// The paper's recipe (Press et al. 2021): of a power of two, `2^(-8 i / n)`; of other counts, those of the power below, and
/// then every second one of the power above.
#[test]
fn b52_slopes_follow_the_paper_for_any_number_of_heads() {
    fn recipe(n: usize) -> Vec<f64> {
        if n.is_power_of_two() {
            return (1..=n).map(|i| -8.0 * i as f64 / n as f64).collect();
        }
        let below = n.next_power_of_two() / 2;
        let above = recipe(2 * below).into_iter().step_by(2).take(n - below);
        recipe(below).into_iter().chain(above).collect()
    }
    for n in 1..=300 {
        let (got, want) = (log2_slopes(n), recipe(n));
        assert!(
            got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-14),
            "{n} heads: {got:?}, not {want:?}"
        );
    }
}

/// Two heads with queries of zero, as the last of `kv_len` tokens.
fn b52(q_len: usize, kv_len: usize) -> Core {
    let mut core = Core::uniform(2, q_len, Array4::from_shape_fn((1, 2, kv_len, 1), |(_, _, j, _)| j as f64));
    core.distances.alibi = Some(Alibi::new(2));
    core.mask(Mask::causal())
}

#[test]
fn b52_alibi_counts_the_cached_tokens() {
    let weights = [0.312_730_35, 0.332_899_73, 0.354_369_92];
    b52(1, 3).everywhere(|run| {
        let head_0 = run.answer.weights.as_ref().map(|weights| weights.slice(s![0, 0, 0, ..]).to_vec());
        if let Some(head_0) = head_0 {
            assert!(head_0.iter().zip(weights).all(|(got, want)| (got - want).abs() < 1e-6), "{head_0:?}");
        }
        assert!((run.answer.lse[[0, 0, 0]] - 1.037_413_95).abs() < run.tolerance(PRINTED), "{}", run.way);
    });
    // Chunked equals full, lse included.
    let full = b52(6, 6).oracle();
    for (first, rows) in [(0, 1), (0, 4), (2, 3), (5, 1)] {
        b52(rows, first + rows).everywhere(|run| {
            let part = full.lse.slice(s![.., .., first..first + rows]).to_owned();
            run.lse(&common::flat(&part), ROUNDING);
            run.out(
                &common::flat(&full.out.slice(s![.., .., first..first + rows, ..]).to_owned().into_dyn()),
                ROUNDING,
            );
        });
    }
}

#[test]
fn b22_left_padded_batch_equals_single() {
    let mut draws = Seeded(22);
    let (long, short): (Array3<f64>, Array3<f64>) = (draws.array((1, 5, 8)), draws.array((1, 2, 8)));
    let padded = concatenate(Axis(1), &[Array3::from_elem((1, 3, 8), 1e3).view(), short.view()]).unwrap();
    let both = concatenate(Axis(0), &[long.view(), padded.view()]).unwrap();
    let mut w = || -> Array2<f64> { draws.array((8, 8)) };
    let weights = Weights::new(w(), w(), w(), w());
    let tables = [
        Distances { alibi: Some(Alibi::new(2)), ..Distances::default() },
        Distances { bias: Some((Buckets::Clipped { clip: 2 }, Seeded(1).array((5, 2)))), ..Distances::default() },
        Distances { keys: Some(Seeded(2).array((5, 4))), ..Distances::default() },
    ];
    for distances in tables {
        let with = |x: &Array3<f64>, mask: Mask| {
            let mut layer = Layer::new(2, weights.clone(), x.clone()).mask(Mask::causal() & mask);
            layer.distances = distances.clone();
            layer
        };
        let alone = with(&short, Mask::none()).oracle().out;
        with(&both, Mask::key_ranges(&[0..5, 3..5])).everywhere(|run| {
            let rows = run.answer.out.slice(s![1, 3.., ..]).to_owned();
            let gap = rows.iter().zip(&alone).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
            assert!(gap < run.tolerance(ROUNDING), "{}: {gap:e}", run.way);
        });
    }
}

#[test]
fn buckets_are_those_of_the_published_function() {
    for count in [4, 8, 12, 32, 64, 128] {
        for max_distance in [count, 100, 128, 200, 1024] {
            let both = [Buckets::T5 { count, max_distance }, Buckets::T5Causal { count, max_distance }];
            for buckets in both.into_iter().filter(|_| max_distance > count / 2) {
                for distance in -3000..3000 {
                    let want = bucket(&buckets, i128::from(distance));
                    assert_eq!(buckets.bucket(distance), want, "{buckets:?} {distance}");
                }
                assert!(buckets.bucket(i64::MIN).max(buckets.bucket(i64::MAX)) < count);
            }
        }
    }
    for clip in [0, 1, 7] {
        let buckets = Buckets::Clipped { clip };
        assert!((-30..30).all(|distance| buckets.bucket(distance) == bucket(&buckets, i128::from(distance))));
    }
    let endless = Buckets::Clipped { clip: usize::MAX };
    assert_eq!((endless.bucket(i64::MIN), endless.count()), (usize::MAX - (1 << 63), usize::MAX));
}

/// Sources of every kind for a recipe; small tables, so that most distances lie beyond them, and large ones.
fn distances(recipe: &Recipe, bits: u8, draws: &mut Seeded) -> Distances {
    let heads = recipe.num_heads();
    let buckets = [
        Buckets::Clipped { clip: 0 },
        Buckets::Clipped { clip: 3 },
        Buckets::Clipped { clip: 300 },
        Buckets::T5 { count: 8, max_distance: 20 },
        Buckets::T5Causal { count: 6, max_distance: 11 },
        Buckets::T5 { count: 32, max_distance: 1 << 40 },
    ][usize::from(bits >> 3) % 6];
    let mut table: Array2<f64> = draws.array((buckets.count(), heads)) * 4.0;
    if bits & 128 != 0 {
        table.column_mut(0)[buckets.count() / 2] = f64::NEG_INFINITY;
    }
    let clip = [0, 2, 40, 90][usize::from(bits) % 4];
    Distances {
        alibi: (bits & 1 != 0).then(|| match bits & 64 {
            0 => Alibi::new(heads),
            _ => Alibi::with_slopes(&draws.array(heads).to_vec()),
        }),
        bias: (bits & 2 != 0).then_some((buckets, table)),
        keys: (bits & 4 != 0).then(|| draws.array((2 * clip + 1, recipe.head_dim)) * 4.0),
    }
}

/// The call with everything by distance written out as one array; only without a soft cap, which relative keys precede.
fn written_out(core: &Core, rules: &Rules, recipe: &Recipe) -> Core {
    let dims = recipe.dims();
    let mut bias = core.distances.array(rules, dims);
    if let Some(dense) = &core.bias {
        bias += &dense.broadcast(dims.as_slice()).unwrap().into_dimensionality::<multihead::ndarray::Ix4>().unwrap();
    }
    if let Some(keys) = &core.distances.keys {
        let scale = core.scale.unwrap_or((recipe.head_dim.max(1) as f64).sqrt().recip());
        let clip = (keys.nrows() / 2) as i128;
        for ((b, h, i, j), bias) in bias.indexed_iter_mut() {
            let distance = (j as i128 - rules.position(dims, b, i)).clamp(-clip, clip);
            *bias += scale * core.q.slice(s![b, h, i, ..]).dot(&keys.row((distance + clip) as usize));
        }
    }
    Core { bias: Some(bias.into_dyn()), distances: Distances::default(), ..core.clone() }
}

#[test]
fn distances_are_what_an_array_says() {
    property(150, (recipes(), any::<u8>()), |(recipe, bits)| {
        if recipe.rules.common_align().is_none() {
            return;
        }
        let mut core = recipe.core();
        core.distances = distances(&recipe, bits, &mut Seeded(recipe.seed ^ 1));
        if core.distances.keys.is_some() {
            core.softcap = None;
        }
        // Positions end at 2^60, where a slope times a distance has lost all its digits; tables end long before.
        let far = (0..recipe.batch).any(|entry| recipe.rules.position(recipe.dims(), entry, 0).abs() > 1 << 20);
        if far {
            core.distances.alibi = None;
        }
        let want = written_out(&core, &recipe.rules, &recipe).oracle();
        // Slopes times distances of a hundred, on top of scores of ten.
        core.everywhere(|run| run.agrees(&want, Within(1e-4, 1e-11)));
    });
}

#[test]
fn a_table_that_reaches_farther_than_memory_takes_room_for_the_distances_there_are() {
    let mut draws = Seeded(8);
    let (q, k, v) = (draws.array((1, 2, 12, 8)), draws.array((1, 1, 4, 8)), draws.array((1, 1, 4, 3)));
    let mut core = Core::new(q, k, v).mask(Mask::causal_offset(usize::MAX));
    core.distances.bias = Some((Buckets::T5 { count: 32, max_distance: 1 << 50 }, draws.array((32, 2)) * 4.0));
    let want = core.oracle();
    core.everywhere(|run| run.agrees(&want, Within(1e-4, 1e-11)));
}

#[test]
fn relative_keys_are_capped_with_the_product() {
    let mut draws = Seeded(3);
    let (q, k, v) = (draws.array((1, 2, 3, 4)) * 6.0, draws.array((1, 1, 70, 4)) * 6.0, draws.array((1, 1, 70, 2)));
    let keys: Array2<f64> = draws.array((7, 4)) * 6.0;
    let mut core = Core::new(q, k, v).scale(-0.7).softcap(1.5).mask(Mask::causal());
    core.distances.keys = Some(keys.clone());
    let mut want = Vec::new();
    for (h, i) in [(0usize, 0usize), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)] {
        let seen = 68 + i;
        let weights = Array1::from_shape_fn(seen, |j| {
            let relative = keys.row((j + 3).saturating_sub(seen - 1).min(6));
            let key: Array1<f64> = &core.k.slice(s![0, 0, j, ..]) + &relative;
            let q: ArrayView1<'_, f64> = core.q.slice(s![0, h, i, ..]);
            let score = -0.7 * q.dot(&key);
            (1.5 * (score / 1.5).tanh()).exp()
        });
        let v: ArrayView2<'_, f64> = core.v.slice(s![0, 0, ..seen, ..]);
        want.extend(weights.dot(&v) / weights.sum());
    }
    core.everywhere(|run| run.out(&want, ROUNDING));
}

#[test]
fn windows_and_dead_tiles_keep_their_distances() {
    // 500 keys, of which a query sees ten far from the start.
    let mut core = Core::uniform(2, 4, Array4::from_shape_fn((1, 1, 500, 1), |(_, _, j, _)| (j % 97) as f64));
    core.distances = Distances {
        alibi: Some(Alibi::with_slopes(&[0.1, 1.0])),
        bias: Some((Buckets::Clipped { clip: 4 }, Seeded(5).array((9, 2)))),
        keys: None,
    };
    let core = core.mask(Mask::causal() & Mask::window(9, 0));
    let mut alone = core.clone();
    alone.v = core.v.slice(s![.., .., 487.., ..]).to_owned();
    alone.k = core.k.slice(s![.., .., 487.., ..]).to_owned();
    let want = alone.oracle();
    core.everywhere(|run| run.out(&common::flat(&want.out), ROUNDING));
}

#[test]
fn tables_that_hold_nothing_change_nothing() {
    let mut core =
        Core::new(Seeded(6).array((1, 2, 5, 4)), Seeded(7).array((1, 2, 9, 4)), Seeded(8).array((1, 2, 9, 3)));
    let want = core.oracle();
    core.distances = Distances {
        alibi: Some(Alibi::with_slopes(&[0.0, 0.0])),
        bias: Some((Buckets::T5 { count: 32, max_distance: 128 }, Array2::zeros((32, 2)))),
        keys: Some(Array2::zeros((3, 4))),
    };
    core.everywhere(|run| run.agrees(&want, ROUNDING));
    assert_eq!(core.oracle(), want);
}

#[test]
fn a_bucket_of_minus_infinity_hides_its_pairs() {
    let values = Array4::from_shape_fn((1, 1, 4, 1), |(_, _, j, _)| f64::from(1 << j));
    let mut core = Core::uniform(1, 4, values);
    core.distances.bias = Some((Buckets::Clipped { clip: 1 }, array![[f64::NEG_INFINITY], [0.0], [f64::NEG_INFINITY]]));
    core.everywhere(|run| run.out(&[1.0, 2.0, 4.0, 8.0], EXACTLY));
    core.distances.bias = Some((Buckets::Clipped { clip: 0 }, array![[f64::NEG_INFINITY]]));
    core.everywhere(|run| {
        run.out(&[0.0; 4], EXACTLY);
        run.lse(&[f64::NEG_INFINITY; 4], EXACTLY);
    });
}

#[test]
fn a_bad_number_of_a_table_reaches_its_distance_only() {
    let mut core =
        Core::new(Seeded(9).array((1, 1, 6, 2)), Seeded(10).array((1, 1, 6, 2)), Seeded(11).array((1, 1, 6, 2)));
    core = core.mask(Mask::causal());
    let mut keys: Array2<f64> = Seeded(12).array((9, 2));
    core.distances.keys = Some(keys.clone());
    let clean = core.oracle();
    // Distance -3: queries 3, 4 and 5 have a key there. Distance 2 is hidden.
    keys.row_mut(1).fill(f64::NAN);
    keys.row_mut(6).fill(f64::NAN);
    core.distances.keys = Some(keys);
    core.everywhere(|run| {
        for i in 0..6 {
            let row = run.answer.out.slice(s![0, 0, i, ..]);
            match i {
                3.. => assert!(row.iter().all(|x| x.is_nan()), "{} {i}", run.way),
                _ => assert!(row.iter().zip(clean.out.slice(s![0, 0, i, ..])).all(|(x, y)| (x - y).abs() < 1e-5)),
            }
        }
    });
}

#[test]
fn what_does_not_fit_is_refused() {
    let core = || Core::uniform(2, 3, Array4::zeros((1, 2, 4, 1)));
    let with = |distances: Distances| {
        let mut core = core();
        core.distances = distances;
        core
    };
    let none = Distances::default;
    let alibi = |alibi: Alibi| with(Distances { alibi: Some(alibi), ..none() });
    let bias = |buckets, shape| with(Distances { bias: Some((buckets, Array2::zeros(shape))), ..none() });
    let keys = |shape| with(Distances { keys: Some(Array2::zeros(shape)), ..none() });
    alibi(Alibi::new(3)).refused("alibi slopes: expected [num_heads] = [2], got [3]");
    alibi(Alibi::with_slopes(&[0.5, f64::NAN])).refused("alibi slope: expected a finite number, got NaN");
    let clipped = Buckets::Clipped { clip: 2 };
    bias(clipped, (5, 3)).refused("relative_bias: expected [buckets, num_heads] = [5, 2], got [5, 3]");
    bias(clipped, (4, 2)).refused("relative_bias: expected [buckets, num_heads] = [5, 2], got [4, 2]");
    let text = "buckets: expected a multiple of 4 above 0, got 30";
    bias(Buckets::T5 { count: 30, max_distance: 128 }, (30, 2)).refused(text);
    let text = "buckets: expected a multiple of 2 above 0, got 0";
    bias(Buckets::T5Causal { count: 0, max_distance: 128 }, (0, 2)).refused(text);
    let text = "max_distance: expected more than the 8 distances with buckets of their own, got 8";
    bias(Buckets::T5 { count: 32, max_distance: 8 }, (32, 2)).refused(text);
    keys((4, 1)).refused("relative_keys: expected an odd number of rows, 2 clip + 1, got 4");
    keys((5, 2)).refused("relative_keys: expected [2 clip + 1, head_dim] = [_, 1], got [5, 2]");

    let two = Mask::causal() & Mask::causal_offset(3);
    core().mask(two.clone()).oracle();
    let text =
        "mask: expected one causal alignment for windows and distances to count from, got causal and causal_offset(3)";
    for core in [alibi(Alibi::new(2)), bias(clipped, (5, 2)), keys((3, 1))] {
        core.mask(two.clone()).refused(text);
    }
}

#[test]
fn layers_hold_their_tables() {
    let builder = || MultiHeadAttention::<f64>::builder(8, 2).init(Init::Zeros);
    let weights = || builder().build().unwrap().into_weights();
    let buckets = Buckets::T5 { count: 8, max_distance: 20 };
    let layer = builder().relative_bias(buckets).relative_keys(3).alibi().build().unwrap();
    assert_eq!(layer.weights().relative_bias.as_ref().unwrap().dim(), (8, 2));
    assert_eq!(layer.weights().relative_keys.as_ref().unwrap().dim(), (7, 4));
    assert_eq!(layer.config().alibi, Some(Alibi::new(2)));
    assert_eq!(layer.config().relative_bias, Some(buckets));

    let refused = |builder: multihead::Builder<f64>, weights| builder.from_weights(weights).unwrap_err().to_string();
    let table = Weights { relative_bias: Some(Array2::zeros((8, 2))), ..weights() };
    let text = "relative_bias: expected buckets in the builder for the table in the weights, got none";
    assert_eq!(refused(builder(), table.clone()), text);
    let text = "relative_bias: expected a table in the weights for the buckets in the builder, got none";
    assert_eq!(refused(builder().relative_bias(buckets), weights()), text);
    let other = Buckets::Clipped { clip: 2 };
    let text = "relative_bias: expected [buckets, num_heads] = [5, 2], got [8, 2]";
    assert_eq!(refused(builder().relative_bias(other), table.clone()), text);
    assert!(builder().relative_bias(buckets).from_weights(table).is_ok());
    let keys = Weights { relative_keys: Some(Array2::zeros((6, 4))), ..weights() };
    assert_eq!(refused(builder(), keys), "relative_keys: expected an odd number of rows, 2 clip + 1, got 6");
    let text = "alibi slopes: expected [num_heads] = [2], got [1]";
    assert_eq!(refused(builder().alibi_slopes(Alibi::with_slopes(&[1.0])), weights()), text);
    let bad = Buckets::T5Causal { count: 3, max_distance: 20 };
    let text = "buckets: expected a multiple of 2 above 0, got 3";
    assert_eq!(builder().relative_bias(bad).build().unwrap_err().to_string(), text);
    let text = "relative_keys: expected [2 clip + 1, head_dim] to fit into memory, got [18446744073709551615, 4]";
    assert_eq!(builder().relative_keys(usize::MAX).build().unwrap_err().to_string(), text);
}
