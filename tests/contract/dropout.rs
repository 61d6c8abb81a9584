//! Dropout: the same pairs on every path, the same expectation, and nothing where it was not asked for.

use crate::common;

use common::core::Core;
use common::gradients::{assert_same_gradients, named};
use common::{Call, EXACTLY, ROUNDING, Seeded, Way, assert_bits, is_near, typed, ways};
use multihead::ndarray::{Array2, Array4, Axis};
use multihead::{Error, HeadMap, Mask, Options, Saved, attention};

/// Queries of zero and values that are the unit vectors: the context is the weights after dropout.
fn shown(batch: usize, heads: usize, len: usize) -> Core {
    let units = Array4::from_shape_fn((batch, heads, len, len), |(_, _, j, c)| f64::from(j == c));
    Core::uniform(heads, len, units)
}

/// Which pairs are kept, `[batch, heads, q_len, kv_len]`.
fn kept(core: &Core, way: Way) -> Array4<bool> {
    core.answer(way).unwrap().out.mapv(|x| x != 0.0).into_dimensionality().unwrap()
}

fn core() -> Core {
    let mut draws = Seeded(23);
    let (q, k, v) = (draws.array((2, 4, 70, 8)), draws.array((2, 2, 90, 8)), draws.array((2, 2, 90, 5)));
    Core::new(q * 4.0, k, v).mask(Mask::causal()).sinks(draws.array(4))
}

#[test]
fn every_path_drops_the_same_pairs() {
    for rate in [1e-6, 0.1, 0.5, 0.97] {
        for core in [core(), core().softcap(2.0).bias(Seeded(1).array((70, 90)))] {
            let core = core.dropout(rate, 5);
            let want = core.oracle();
            core.everywhere(|run| run.agrees(&want, ROUNDING));
        }
    }
}

#[test]
fn weights_and_lse_are_those_before_dropout() {
    let want = core().oracle();
    core().dropout(0.5, 3).everywhere(|run| {
        let tolerance = run.tolerance(ROUNDING);
        assert!(run.answer.lse.iter().zip(&want.lse).all(|(&x, &y)| is_near(x, y, tolerance)), "{}", run.way);
        if let (Some(got), Some(want)) = (&run.answer.weights, &want.weights) {
            assert!(got.iter().zip(want).all(|(&x, &y)| is_near(x, y, tolerance)), "{}", run.way);
        }
    });
}

#[test]
fn b23_nothing_is_dropped_unasked() {
    let mut draws = Seeded(23);
    let x: Array4<f64> = draws.array((2, 2, 4, 4));
    let core = Core::new(x.clone(), x.clone(), x);
    for way in ways() {
        let plain = core.answer(way).unwrap();
        assert_bits(&way.to_string(), &core.answer(way).unwrap().out, &plain.out);
        assert_bits(&way.to_string(), &core.clone().dropout(0.0, 9).answer(way).unwrap().out, &plain.out);
    }
    let d_context = draws.array((2, 2, 4, 4));
    for way in common::gradients::gradient_ways() {
        let plain = core.gradients(way, &d_context).unwrap();
        assert_same_gradients(
            &way.to_string(),
            &core.clone().dropout(0.0, 9).gradients(way, &d_context).unwrap(),
            &plain,
        );
    }
}

#[test]
fn b24_rate_one_gives_zeros_and_zero_gradients() {
    let core = core().dropout(1.0, 4);
    core.everywhere(|run| run.out(&vec![0.0; 2 * 4 * 70 * 5], EXACTLY));
    let d_context = Seeded(24).array((2, 4, 70, 5));
    core.gradients_everywhere(&d_context, |way, gradients| {
        for (name, gradient) in named(gradients) {
            assert!(gradient.iter().all(|&x| x == 0.0), "{way}: {name}");
        }
    });
}

#[test]
fn b24_rates_that_are_none_are_refused() {
    let x: Array4<f32> = typed(&Seeded(2).array((1, 2, 3, 4)));
    for rate in [-1.0, 1.5, f64::NAN, f64::INFINITY] {
        core().dropout(rate, 1).refused(&format!("dropout: expected a rate in 0..=1, got {rate}"));
        let attended = attention::forward(&x, &x, &x, &Options::new()).unwrap();
        let saved = Saved { q: &x, k: &x, v: &x, context: &attended.context, lse: &attended.lse };
        let error = attention::backward(&saved, &x, &Options::new().dropout(rate, 1)).unwrap_err();
        assert!(matches!(error, Error::Value { argument: "dropout", .. }), "{error}");
    }
}

#[test]
fn b27_a_seed_is_a_pattern() {
    let seven = shown(2, 4, 16).dropout(0.5, 7);
    let want = kept(&seven, Way::ORACLE);
    for way in ways() {
        assert_eq!(kept(&seven, way), want, "{way}");
    }
    let share = want.iter().filter(|&&kept| kept).count() as f64 / want.len() as f64;
    assert!((share - 0.5).abs() < 0.06, "{share}");
    let heads: Vec<Array2<bool>> = want
        .axis_iter(Axis(0))
        .flat_map(|entry| entry.axis_iter(Axis(0)).map(|head| head.to_owned()).collect::<Vec<_>>())
        .collect();
    for (a, one) in heads.iter().enumerate() {
        for (b, other) in heads.iter().enumerate().skip(a + 1) {
            let same = one.iter().zip(other).filter(|(x, y)| x == y).count();
            assert!((88..168).contains(&same), "patterns {a} and {b} share {same} of 256");
        }
    }
    let eight = kept(&shown(2, 4, 16).dropout(0.5, 8), Way::ORACLE);
    let same = eight.iter().zip(&want).filter(|(x, y)| x == y).count();
    assert!((900..1148).contains(&same), "seeds 7 and 8 share {same} of 2048");
}

#[cfg(feature = "rayon")]
#[test]
fn b27_threads_do_not_move_the_pattern() {
    let core = shown(2, 4, 130).dropout(0.5, 7);
    for way in ways() {
        let want = core.answer(way).unwrap().out;
        for threads in [1, 4] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let got = pool.install(|| core.answer(way)).unwrap().out;
            assert_bits(&format!("{way}, {threads} threads"), &got, &want);
        }
    }
}

#[test]
fn kept_weights_make_up_for_the_dropped_ones() {
    // The mean over seeds of each output approaches the output without dropout.
    let mut draws = Seeded(31);
    let (q, k, v) = (draws.array((1, 2, 5, 4)), draws.array((1, 2, 40, 4)), draws.array((1, 2, 40, 3)) + 1.0);
    let core = Core::new(q, k, v);
    let want = core.oracle().out;
    let seeds = 4000;
    let sum = (0..seeds).fold(want.clone() * 0.0, |sum, seed| sum + core.clone().dropout(0.25, seed).oracle().out);
    // A draw deviates by sqrt(rate / (1 - rate) sum w^2 v^2), about 0.1.
    for (&mean, &want) in (sum / seeds as f64).iter().zip(&want) {
        assert!((mean - want).abs() < 4.5 * 0.12 / (seeds as f64).sqrt(), "{mean}, not {want}");
    }
}

#[test]
fn what_is_dropped_depends_on_the_query_head_and_not_on_its_group() {
    let units = Array4::from_shape_fn((1, 4, 12, 12), |(_, _, j, c)| f64::from(j == c));
    let alone = kept(&Core::uniform(4, 12, units.clone()).dropout(0.5, 1), Way::ORACLE);
    let one: Array4<f64> = units.slice_axis(Axis(1), (0..1).into()).to_owned();
    let shared = Core::uniform(4, 12, one.clone()).dropout(0.5, 1);
    let mapped = Core::uniform(4, 12, one).heads(HeadMap::explicit(&[0; 4], 1).unwrap()).dropout(0.5, 1);
    for way in ways() {
        assert_eq!(kept(&shared, way), alone, "{way}");
        assert_eq!(kept(&mapped, way), alone, "{way}");
    }
}

#[test]
fn a_value_that_is_dropped_is_still_visible() {
    // Zero times NaN is NaN, as in a product with the weights that were dropped.
    let mut core = shown(1, 1, 20).dropout(0.5, 2);
    core.v[[0, 0, 7, 3]] = f64::NAN;
    core.everywhere(|run| {
        for (at, &x) in run.answer.out.indexed_iter() {
            assert_eq!(x.is_nan(), at[3] == 3, "{}: {at:?}", run.way);
        }
    });
}
