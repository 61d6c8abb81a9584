//! Gradients over several tiles, some of which, or of whose numbers, are unlike the rest.

use crate::common;

use common::core::Core;
use common::gradients::{assert_same_gradients, named, tiled_ways};
use common::{Call, Precision, ROUNDING, Seeded, assert_bits, is_near};
use multihead::Mask;
use multihead::ndarray::{Array2, Array4, s};

const Q_LEN: usize = 140;
const KV_LEN: usize = 200;

/// A group of two heads, and the gradient of their context.
fn core() -> (Core, Array4<f64>) {
    let mut draws = Seeded(12);
    let (q, k) = (draws.array((1, 2, Q_LEN, 20)), draws.array((1, 1, KV_LEN, 20)));
    (Core::new(q, k, draws.array((1, 1, KV_LEN, 24))), draws.array((1, 2, Q_LEN, 24)))
}

/// The tiled gradients of both types at every level are those of the plain loops, each relative to the largest of its name.
#[track_caller]
fn check(what: &str, core: &Core, d_context: &Array4<f64>) {
    let want = named(&core.right_gradients(d_context));
    for way in [Precision::F32, Precision::F64].into_iter().flat_map(tiled_ways) {
        let got = named(&core.gradients(way, d_context).unwrap());
        for ((name, got), (_, want)) in got.iter().zip(&want) {
            let size = want.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
            assert!(size > 0.0, "{what}: all of {name} is zero");
            for (at, (&got, &want)) in got.iter().zip(want).enumerate() {
                let near = is_near(got / size, want / size, ROUNDING.0);
                assert!(near, "{what}, {way}: {name}[{at}] is {got:e}, not {want:e}; the largest is {size:e}");
            }
        }
    }
}

/// Rows that see nothing of some keys are between rows that do, and the other way round.
#[test]
fn squares_that_see_nothing_between_others() {
    for (side, sees) in [(16, 2), (32, 2), (32, 1), (64, 2)] {
        let (core, d_context) = core();
        let keep = Array2::from_shape_fn((Q_LEN, KV_LEN), |(i, j)| (i / side + j / side) % 3 < sees);
        check(&format!("squares of {side}"), &core.mask(Mask::keep(&keep).unwrap()), &d_context);
    }
}

/// Keys between others that nobody sees, and queries that see nothing, may hold anything: no bit of the others depends on it,
/// neither of the context nor of the gradients.
#[test]
fn what_is_hidden_moves_no_bit() {
    let (core, d_context) = core();
    let (keys, queries) = ([70, 71, 90], [5, 33, 34]);
    let keep = Array2::from_shape_fn((Q_LEN, KV_LEN), |(i, j)| !keys.contains(&j) && !queries.contains(&i));
    let core = core.mask(Mask::keep(&keep).unwrap());
    for bad in [f64::NAN, 1e30, f64::INFINITY] {
        let (mut spoilt, mut bad_context) = (core.clone(), d_context.clone());
        for key in keys {
            spoilt.k.slice_mut(s![.., .., key, ..]).fill(bad);
            spoilt.v.slice_mut(s![.., .., key, 3]).fill(bad);
        }
        for query in queries {
            spoilt.q.slice_mut(s![.., .., query, 1]).fill(bad);
            bad_context.slice_mut(s![.., .., query, ..]).fill(bad);
        }
        for way in [Precision::F32, Precision::F64].into_iter().flat_map(tiled_ways) {
            let what = format!("{bad}, {way}");
            assert_bits(&what, &spoilt.answer(way).unwrap().out, &core.answer(way).unwrap().out);
            let got = spoilt.gradients(way, &bad_context).unwrap();
            assert_same_gradients(&what, &got, &core.gradients(way, &d_context).unwrap());
        }
    }
}

/// What a matrix unit multiplies must be of some size: the rest is multiplied otherwise.
#[test]
fn gradients_of_numbers_far_from_one() {
    let scale = |x: &mut f64, power: i32| *x *= f64::from(power).exp2();
    let cases: [(&str, [i32; 4]); 7] = [
        ("as they are", [0; 4]),
        ("small queries, large keys", [-40, 40, 0, 0]),
        ("large queries, small keys", [62, -62, 0, 0]),
        ("small values", [0, 0, -60, 0]),
        ("large values", [0, 0, 62, 0]),
        ("small gradients", [0, 0, 0, -60]),
        // Each of them is of that size, but not what becomes of them.
        ("small products", [0, -20, -46, -46]),
    ];
    for (what, [q, k, v, d]) in cases {
        let (mut core, mut d_context) = core();
        core.q.iter_mut().for_each(|x| scale(x, q));
        core.k.iter_mut().for_each(|x| scale(x, k));
        core.v.iter_mut().for_each(|x| scale(x, v));
        d_context.iter_mut().for_each(|x| scale(x, d));
        check(what, &core, &d_context);
    }
}

/// The same where only some of them are.
#[test]
fn gradients_of_a_few_numbers_far_from_one() {
    let far = 62.0_f64.exp2();
    let (mut values, d_context) = core();
    values.v.slice_mut(s![.., .., 64..128, ..]).mapv_inplace(|x| x * far);
    check("large values of a tile", &values, &d_context);
    let (mut column, d_context) = core();
    column.k.slice_mut(s![.., .., .., 3]).mapv_inplace(|x| x / far);
    check("small numbers of a column of keys", &column, &d_context);
    let (rows, mut d_context) = core();
    d_context.slice_mut(s![.., .., 33..40, ..]).mapv_inplace(|x| x / far);
    check("small gradients of some rows", &rows, &d_context);
}
