//! Sequences that are packed one after the other give what each of them gives alone, forward and backward, on every path.

use crate::common;

use common::core::Core;
use common::gradients::named;
use common::{Call, Keep, PATHS, Precision, Seeded, Way, gives_weights};
use multihead::ndarray::{Array4, ArrayD, Axis, Slice, s};
use multihead::{CacheShape, KvCache, Mask, Options, Path, attention};

/// Shorter and longer than a tile of keys, across its ends, and empty.
const LENGTHS: [usize; 7] = [5, 0, 70, 1, 64, 0, 130];

/// Grouped heads over all tokens.
fn packed(mask: Mask) -> Core {
    let (mut draws, len) = (Seeded(91), LENGTHS.iter().sum());
    let (q, k, v) = (draws.array((2, 4, len, 16)), draws.array((2, 2, len, 16)), draws.array((2, 2, len, 24)));
    Core::new(q * 4.0, k, v).mask(mask)
}

/// Each sequence by itself, with the tokens that it has.
fn alone(core: &Core, mask: &Mask) -> Vec<(Slice, Core)> {
    let mut start = 0;
    let of = |length: usize| {
        let tokens = start..start + length;
        start = tokens.end;
        let cut = |x: &Array4<f64>| x.slice(s![.., .., tokens.clone(), ..]).to_owned();
        (Slice::from(tokens.clone()), Core::new(cut(&core.q), cut(&core.k), cut(&core.v)).mask(mask.clone()))
    };
    LENGTHS.into_iter().map(of).collect()
}

#[track_caller]
fn assert_near(what: &str, got: &ArrayD<f64>, tokens: Slice, want: &ArrayD<f64>, precision: Precision) {
    let largest = want.iter().fold(1.0, |largest: f64, x| largest.max(x.abs()));
    let tolerance = largest * if precision == Precision::F32 { 1e-5 } else { 1e-12 };
    let got = got.slice_axis(Axis(2), tokens);
    assert_eq!(got.shape(), want.shape(), "{what}");
    let worst = got.iter().zip(want).map(|(x, y)| (x - y).abs()).fold(0.0, f64::max);
    assert!(worst < tolerance, "{what} {tokens:?}: {worst:e}");
}

#[test]
fn packed_sequences_are_what_they_are_alone() {
    for mask in [Mask::none(), Mask::causal(), Mask::causal() & Mask::window(9, 0)] {
        let core = packed(mask.clone() & Mask::segments(&LENGTHS));
        for path in PATHS {
            for precision in [Precision::F32, Precision::F64] {
                let way = Way::new(precision, path, Keep::Nothing);
                let got = core.answer(way).unwrap();
                for (tokens, core) in alone(&core, &mask) {
                    let want = core.answer(Way::new(Precision::F64, Path::Reference, Keep::Nothing)).unwrap();
                    assert_near(
                        &format!("{mask} {way}"),
                        &got.out.clone().into_dyn(),
                        tokens,
                        &want.out.into_dyn(),
                        precision,
                    );
                }
            }
            if gives_weights(path) {
                let weights = core.answer(Way::new(Precision::F64, path, Keep::Weights)).unwrap().weights.unwrap();
                let ends: Vec<usize> = LENGTHS
                    .iter()
                    .scan(0, |end, n| {
                        *end += n;
                        Some(*end)
                    })
                    .collect();
                let sequence = |i: usize| ends.iter().position(|&end| i < end);
                let mut crossing = weights.indexed_iter().filter(|((_, _, i, j), _)| sequence(*i) != sequence(*j));
                assert!(crossing.all(|(_, &weight)| weight == 0.0), "{path:?}");
            }
        }
    }
}

#[test]
fn gradients_stay_within_their_sequence() {
    let mask = Mask::causal();
    let core = packed(mask.clone() & Mask::segments(&LENGTHS));
    let d_context: Array4<f64> = Seeded(92).array((2, 4, core.q.len_of(Axis(2)), 24));
    core.gradients_everywhere(&d_context, |way, got| {
        for (tokens, core) in alone(&core, &mask) {
            let d_context = d_context.slice_axis(Axis(2), tokens).to_owned();
            let want = named(&core.right_gradients(&d_context));
            for ((name, got), (_, want)) in named(got).iter().zip(&want) {
                assert_near(&format!("{way} {name}"), got, tokens, want, way.precision);
            }
        }
    });
}

#[test]
fn nan_stays_within_its_sequence() {
    let mut core = packed(Mask::segments(&LENGTHS));
    let want = core.answer(Way::new(Precision::F64, Path::Reference, Keep::Nothing)).unwrap().out;
    core.k.slice_mut(s![.., .., 5..75, ..]).fill(f64::NAN);
    core.v.slice_mut(s![.., .., 5..75, ..]).fill(f64::INFINITY);
    for path in PATHS {
        let got = core.answer(Way::new(Precision::F64, path, Keep::Nothing)).unwrap().out;
        for ((index, x), y) in got.indexed_iter().zip(&want) {
            let is_inside = (5..75).contains(&index[2]);
            assert!(if is_inside { x.is_nan() } else { (x - y).abs() < 1e-12 }, "{path:?} {index:?}");
        }
    }
}

#[test]
fn sums_that_do_not_fit_are_refused() {
    let text = |mask: Mask, q_len: usize, kv_len: usize| {
        let (q, k) = (Array4::<f32>::zeros((1, 1, q_len, 4)), Array4::zeros((1, 1, kv_len, 4)));
        attention::forward(&q, &k, &k, &Options::new().mask(&mask)).unwrap_err().to_string()
    };
    let expected = "segments: expected lengths whose sum is q_len and kv_len, got";
    assert_eq!(text(Mask::segments(&[2, 3]), 5, 6), format!("{expected} 5 for 5 queries and 6 keys"));
    assert_eq!(text(Mask::segments(&[]), 1, 1), format!("{expected} 0 for 1 queries and 1 keys"));
    // A cache has more keys than there are queries.
    let mask = Mask::segments(&[1]);
    let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 4, head_dim: 4, value_dim: 4 };
    let cache = KvCache::<f32>::new(shape).unwrap();
    let q = Array4::<f32>::zeros((1, 1, 1, 4));
    assert!(attention::decode(&q, &cache, &Options::new().mask(&mask)).is_err());
}
