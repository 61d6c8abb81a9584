//! Faults that other libraries had in the gradients of attention, each as a test with the right numbers, and what the
//! contract says of gradients: hidden pairs, empty rows, strides, buffers that are used again, threads.

use crate::common;

use common::core::Core;
use common::gradients::{assert_same_gradients, gradient_ways, named, tiled_ways, widened_gradients};
use common::layout::LAYOUTS;
use common::{Keep, Precision, Seeded, Way, is_near, typed, widened};
use multihead::ndarray::{Array1, Array2, Array4, ArrayView4, Axis, array, s};
use multihead::{Element, Gradients, HeadMap, Mask, Options, Path, Saved, Workspace, attention};

const NAN: f64 = f64::NAN;
const INFINITY: f64 = f64::INFINITY;

fn finite(gradients: &Gradients<f64>) -> bool {
    named(gradients).iter().all(|(_, gradient)| gradient.iter().all(|x| x.is_finite()))
}

#[track_caller]
fn assert_all(what: &str, got: impl IntoIterator<Item = f64>, want: &[f64], tolerance: f64) {
    let got: Vec<f64> = got.into_iter().collect();
    assert_eq!(got.len(), want.len(), "{what}");
    for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!(is_near(got, want, tolerance), "{what}: element {index} is {got:e}, not {want:e}");
    }
}

#[test]
fn b02_a_row_that_sees_nothing_poisons_nothing() {
    // The report's layer without its projections: all are 1. Query 2 of the second sequence sees no key.
    let x = Array4::from_shape_vec((2, 1, 3, 1), vec![0.5, 0.25, 0.125, -1.0, 9.0, 7.0]).unwrap();
    let core = Core::new(x.clone(), x.clone(), x)
        .mask(Mask::window(1, 0) & Mask::key_lengths(&[3, 1]) & Mask::causal_top_left());
    let mut d_context = Array4::zeros((2, 1, 3, 1));
    d_context[[0, 0, 0, 0]] = 1.0;
    d_context[[1, 0, 0, 0]] = 1.0;
    core.gradients_everywhere(&d_context, |way, gradients| {
        let what = way.to_string();
        assert_all(&what, gradients.d_v.clone(), &[1.0, 0.0, 0.0, 1.0, 0.0, 0.0], 0.0);
        assert!(gradients.d_q.iter().chain(&gradients.d_k).all(|&x| x == 0.0), "{what}");
    });
    // A gradient that is not finite, but of a row that sees nothing, has no influence either.
    d_context[[1, 0, 2, 0]] = NAN;
    core.sinks(array![0.25]).gradients_everywhere(&d_context, |way, gradients| assert!(finite(gradients), "{way}"));
}

#[test]
fn b08_nan_in_masked_slot() {
    let q = array![[1.0, 2.0], [3.0, -1.0]];
    let (k, v) = (array![[0.5, 0.25], [NAN, 7.0]], array![[2.0, -3.0], [INFINITY, NAN]]);
    let d_context = array![[1.0, 10.0], [100.0, 1000.0]].insert_axis(Axis(0)).insert_axis(Axis(0));
    let core = || Core::single(q.clone(), k.clone(), v.clone());
    let hidden = array![[0.0, -INFINITY], [0.0, -INFINITY]];
    let masks = [
        core().mask(Mask::keep(&array![[true, false], [true, false]]).unwrap()),
        core().mask(Mask::keep_keys(&array![[true, false]]).unwrap()),
        core().mask(Mask::key_lengths(&[1])),
        core().mask(Mask::causal_top_left() & Mask::key_lengths(&[1])),
        core()
            .mask(Mask::window(usize::MAX, 0) & Mask::causal_top_left() & Mask::window(2, 0) & Mask::key_lengths(&[1])),
        core().bias(hidden),
    ];
    for (index, core) in masks.iter().enumerate() {
        core.gradients_everywhere(&d_context, |way, gradients| {
            let what = format!("mask {index}, {way}");
            assert_all(&what, gradients.d_v.clone(), &[101.0, 1010.0, 0.0, 0.0], 0.0);
            assert!(gradients.d_q.iter().chain(&gradients.d_k).all(|&x| x == 0.0), "{what}");
        });
    }
}

/// What is hidden from whom in the tests of numbers that are not finite.
fn sees(i: usize, j: usize) -> bool {
    j <= i + 30 && (i + j) % 7 != 3
}

/// A call over several tiles, groups of rows and blocks of keys.
fn wide_core() -> Core {
    let mut draws = Seeded(8);
    let (q_len, kv_len) = (110, 290);
    let keep = Array2::from_shape_fn((q_len, kv_len), |(i, j)| sees(i, j));
    let (q, k) = (draws.array((1, 2, q_len, 5)), draws.array((1, 1, kv_len, 5)));
    Core::new(q * 3.0, k, draws.array((1, 1, kv_len, 20))).mask(Mask::keep(&keep).unwrap())
}

/// Puts `bad` at row `at` of one argument: whoever sees it has a gradient that is not finite, and all others have the
/// gradients that they have without it.
#[track_caller]
fn check_reach(
    what: &str,
    core: &Core,
    spoil: impl Fn(&mut Core, &mut Array4<f64>),
    query: Option<usize>,
    key: Option<usize>,
) {
    let d_context = Seeded(9).array((1, 2, 110, 20));
    let (mut spoilt, mut spoilt_d_context) = (core.clone(), d_context.clone());
    spoil(&mut spoilt, &mut spoilt_d_context);
    // Head 0 of the queries is spoilt, or the only KV head.
    let row_is_bad = |head: usize, i: usize| match (query, key) {
        (Some(query), _) => head == 0 && i == query,
        (_, Some(key)) => sees(i, key),
        _ => false,
    };
    let key_is_bad = |j: usize| (0..110).any(|i| row_is_bad(0, i) && sees(i, j));
    core.gradients_everywhere(&d_context, |way, clean| {
        let got = spoilt.gradients(way, &spoilt_d_context).unwrap();
        let tolerance = if way.precision == Precision::F32 { 1e-4 } else { 1e-10 };
        let mut seen_bad = 0;
        for ((at, &x), &y) in got.d_q.indexed_iter().zip(&clean.d_q) {
            let bad = row_is_bad(at.1, at.2) && (0..290).any(|j| sees(at.2, j));
            seen_bad += usize::from(bad);
            assert!(
                if bad { !x.is_finite() } else { is_near(x, y, tolerance) },
                "{what}, {way}: d_q[{at:?}] is {x:e}, not {y:e}"
            );
        }
        for ((at, &x), &y) in got.d_k.indexed_iter().zip(&clean.d_k) {
            let bad = key_is_bad(at.2);
            seen_bad += usize::from(bad);
            assert!(
                if bad { !x.is_finite() } else { is_near(x, y, tolerance) },
                "{what}, {way}: d_k[{at:?}] is {x:e}, not {y:e}"
            );
        }
        for ((at, &x), &y) in got.d_v.indexed_iter().zip(&clean.d_v) {
            assert!(key_is_bad(at.2) || is_near(x, y, tolerance), "{what}, {way}: d_v[{at:?}] is {x:e}, not {y:e}");
        }
        assert!(seen_bad > 0, "{what}: nobody sees it");
    });
}

#[test]
fn what_is_not_finite_reaches_those_who_see_it_and_nobody_else() {
    let core = wide_core();
    for bad in [NAN, INFINITY] {
        for i in [0, 5, 63, 109] {
            let (q, g) = (format!("{bad} in query {i}"), format!("{bad} in d_context {i}"));
            // Infinite times a positive and a negative number, so that scores are of both signs and the row has no softmax.
            check_reach(&q, &core, |core, _| core.q.slice_mut(s![0, 0, i, ..]).fill(bad), Some(i), None);
            check_reach(&g, &core, |_, d_context| d_context.slice_mut(s![0, 0, i, ..]).fill(bad), Some(i), None);
        }
        for j in [0, 64, 100, 138] {
            check_reach(&format!("{bad} in value {j}"), &core, |core, _| core.v[[0, 0, j, 3]] = bad, None, Some(j));
        }
    }
    for j in [0, 64, 100, 138] {
        check_reach(&format!("NaN in key {j}"), &core, |core, _| core.k[[0, 0, j, 3]] = NAN, None, Some(j));
    }
}

#[test]
fn what_nobody_sees_has_no_influence() {
    let core = wide_core();
    let d_context = Seeded(9).array((1, 2, 110, 20));
    // Nobody sees the keys from 140 on.
    let spoilt = |[key, value]: [f64; 2]| {
        let mut spoilt = core.clone();
        spoilt.k.slice_mut(s![.., .., 140.., ..]).fill(key);
        spoilt.v.slice_mut(s![.., .., 140.., ..]).fill(value);
        spoilt
    };
    let (numbers, others) = (spoilt([1e15, -1e15]), spoilt([NAN, INFINITY]));
    core.gradients_everywhere(&d_context, |way, clean| {
        let got = numbers.gradients(way, &d_context).unwrap();
        assert!(got.d_k.slice(s![.., .., 140.., ..]).iter().all(|&x| x == 0.0), "{way}");
        assert_same_gradients(&way.to_string(), &got, clean);
        let got = others.gradients(way, &d_context).unwrap();
        assert!(got.d_k.slice(s![.., .., 140.., ..]).iter().all(|&x| x == 0.0), "{way}");
        assert_same_gradients(&way.to_string(), &got, clean);
    });
}

#[test]
fn b38_no_keys_at_all() {
    let d_context = Array4::ones((2, 2, 3, 5));
    for mask in [Mask::none(), Mask::causal()] {
        let core = Core::new(Array4::ones((2, 2, 3, 4)), Array4::zeros((2, 2, 0, 4)), Array4::zeros((2, 2, 0, 5)));
        core.mask(mask).sinks(array![0.5, -0.5]).gradients_everywhere(&d_context, |way, gradients| {
            assert_eq!(gradients.d_q, Array4::<f64>::zeros((2, 2, 3, 4)), "{way}");
            assert_eq!((gradients.d_k.dim(), gradients.d_v.dim()), ((2, 2, 0, 4), (2, 2, 0, 5)), "{way}");
            assert_eq!(gradients.d_sinks, Some(array![0.0, 0.0]), "{way}");
        });
    }
}

#[test]
fn b39_empty_batch_or_no_queries() {
    for (batch, q_len) in [(0, 3), (2, 0), (0, 0)] {
        let core = Core::new(
            Array4::ones((batch, 2, q_len, 4)),
            Array4::ones((batch, 2, 3, 4)),
            Array4::ones((batch, 2, 3, 5)),
        );
        let core = core.sinks(array![1.0, 2.0]).bias(Array2::<f64>::zeros((q_len, 3)));
        core.gradients_everywhere(&Array4::ones((batch, 2, q_len, 5)), |way, gradients| {
            assert_eq!(gradients.d_q, Array4::<f64>::zeros((batch, 2, q_len, 4)), "{way}");
            assert_eq!(gradients.d_k, Array4::<f64>::zeros((batch, 2, 3, 4)), "{way}");
            assert_eq!(gradients.d_v, Array4::<f64>::zeros((batch, 2, 3, 5)), "{way}");
            assert_eq!(gradients.d_sinks, Some(array![0.0, 0.0]), "{way}");
            assert_eq!(gradients.d_bias, Some(Array4::zeros((1, 1, q_len, 3))), "{way}");
        });
    }
}

#[test]
fn widths_of_zero() {
    for (head_dim, value_dim) in [(0, 3), (3, 0), (0, 0)] {
        let mut draws = Seeded(1);
        let (q, k) = (draws.array((1, 2, 4, head_dim)), draws.array((1, 1, 70, head_dim)));
        let core = Core::new(q, k, draws.array((1, 1, 70, value_dim))).sinks(array![0.5, 0.25]);
        let d_context = draws.array((1, 2, 4, value_dim));
        let right = core.right_gradients(&d_context);
        core.gradients_everywhere(&d_context, |way, gradients| {
            for ((name, got), (_, want)) in named(gradients).iter().zip(named(&right)) {
                assert_all(
                    &format!("{way}, {head_dim}, {value_dim}: {name}"),
                    got.clone(),
                    want.as_slice().unwrap(),
                    1e-5,
                );
            }
        });
    }
}

#[test]
fn b41_single_key_gradient() {
    for q_len in [1, 4] {
        let mut draws = Seeded(41);
        let mut next = |len| draws.array((1, 1, len, 16)) * 6.0;
        let core = Core::new(next(q_len), next(1), next(1));
        core.gradients_everywhere(&Array4::ones((1, 1, q_len, 16)), |way, gradients| {
            assert!(gradients.d_q.iter().chain(&gradients.d_k).all(|x| x.abs() <= 1e-6 * 20.0), "{way}");
            assert_all(&way.to_string(), gradients.d_v.clone(), &[q_len as f64; 16], 1e-6);
        });
    }
}

#[test]
fn causal_with_more_queries_than_keys() {
    let mut draws = Seeded(42);
    let (q, k) = (draws.array((1, 2, 150, 8)), draws.array((1, 2, 70, 8)));
    let core = Core::new(q * 4.0, k, draws.array((1, 2, 70, 6))).mask(Mask::causal());
    let d_context = draws.array((1, 2, 150, 6));
    let right = core.right_gradients(&d_context);
    core.gradients_everywhere(&d_context, |way, gradients| {
        assert!(gradients.d_q.slice(s![.., .., ..80, ..]).iter().all(|&x| x == 0.0), "{way}: the first 80 see nothing");
        for ((name, got), (_, want)) in named(gradients).iter().zip(named(&right)) {
            let tolerance = if way.precision == Precision::F32 { 1e-5 } else { 1e-12 };
            assert_all(&format!("{way}: {name}"), got.clone(), want.as_slice().unwrap(), tolerance);
        }
    });
}

#[test]
fn gradients_of_a_group_are_summed_over_its_heads() {
    let mut draws = Seeded(43);
    let map = HeadMap::explicit(&[1, 0, 1, 1], 3).unwrap();
    let (q, k) = (draws.array((2, 4, 20, 8)), draws.array((2, 3, 80, 8)));
    let shared = Core::new(q * 4.0, k, draws.array((2, 3, 80, 6))).heads(map).mask(Mask::causal());
    let d_context = draws.array((2, 4, 20, 6));
    let repeated = |x: &Array4<f64>| x.select(Axis(1), &[1, 0, 1, 1]);
    let alone = Core::new(shared.q.clone(), repeated(&shared.k), repeated(&shared.v)).mask(Mask::causal());
    let right = alone.right_gradients(&d_context);
    shared.gradients_everywhere(&d_context, |way, gradients| {
        for (name, got, want) in [("d_k", &gradients.d_k, &right.d_k), ("d_v", &gradients.d_v, &right.d_v)] {
            let head = |h| want.index_axis(Axis(1), h).to_owned();
            let sums = [head(1), head(0) + head(2) + head(3), head(0) * 0.0];
            for (kv_head, want) in sums.iter().enumerate() {
                let got = got.index_axis(Axis(1), kv_head).to_owned();
                assert_all(&format!("{way}: {name} of KV head {kv_head}"), got, want.as_slice().unwrap(), 1e-5);
            }
        }
        assert!(gradients.d_k.index_axis(Axis(1), 2).iter().all(|&x| x == 0.0), "{way}: nobody reads KV head 2");
    });
}

/// A call with everything, over several tiles.
fn full_core() -> (Core, Array4<f64>) {
    let mut draws = Seeded(44);
    let (q, k) = (draws.array((2, 4, 75, 12)), draws.array((2, 2, 270, 12)));
    let core = Core::new(q * 4.0, k, draws.array((2, 2, 270, 7)))
        .mask(Mask::causal() & Mask::key_lengths(&[270, 200]))
        .sinks(draws.array(4))
        .bias(draws.array((1, 4, 75, 270)))
        .dropout(0.1, 3);
    (core, draws.array((2, 4, 75, 7)))
}

/// The gradients into arrays of any layout that hold NaN, and twice from the same workspace.
fn into<T: Element>(core: &Core, way: Way, d_context: &Array4<f64>, workspace: &mut Workspace<T>) -> Gradients<f64> {
    core.differentiated::<T, _>(way, d_context, |saved, d_context, options| {
        let mut gradients = Gradients::zeros(saved, options)?;
        // Token by token, as a layer has them.
        gradients.d_q = Array4::from_elem((2, 75, 4, 12), T::nan()).permuted_axes([0, 2, 1, 3]);
        gradients.d_k = Array4::from_elem((2, 270, 2, 12), T::nan()).permuted_axes([0, 2, 1, 3]);
        gradients.d_v = Array4::from_elem((7, 270, 2, 2), T::nan()).reversed_axes();
        gradients.d_bias = Some(Array4::from_elem((4, 75, 270, 1), T::nan()).permuted_axes([3, 0, 1, 2]));
        gradients.d_sinks = Some(Array1::from_elem(4, T::nan()));
        attention::backward_into(saved, d_context, options, &mut gradients, workspace)?;
        Ok(widened_gradients(&gradients))
    })
    .unwrap()
}

#[test]
fn what_arrays_and_workspace_held_before_does_not_matter() {
    let (core, d_context) = full_core();
    let (mut single, mut double) = (Workspace::<f32>::new(), Workspace::<f64>::new());
    for way in gradient_ways() {
        let want = core.gradients(way, &d_context).unwrap();
        for _ in 0..2 {
            let got = match way.precision {
                Precision::F32 => into(&core, way, &d_context, &mut single),
                Precision::F64 => into(&core, way, &d_context, &mut double),
            };
            assert_same_gradients(&way.to_string(), &got, &want);
        }
    }
}

/// What nobody contributes to is zero, and not what the arrays held: queries of whole steps that see no key, keys and
/// values of KV heads that no query head reads, and of whole blocks that no query sees.
#[test]
fn what_nobody_contributes_to_is_zero() {
    let mut draws = Seeded(45);
    // Aligned at the end, the first 236 queries come before the first key.
    let (q, k) = (draws.array((1, 2, 300, 5)), draws.array((1, 3, 64, 5)));
    let heads = HeadMap::explicit(&[0, 2], 3).unwrap();
    let core = Core::new(q, k, draws.array((1, 3, 64, 3))).mask(Mask::causal()).heads(heads);
    let d_context = draws.array((1, 2, 300, 3));
    for way in gradient_ways() {
        let got = core
            .differentiated::<f64, _>(way, &d_context, |saved, d_context, options| {
                let mut gradients = Gradients::zeros(saved, options)?;
                gradients.d_q.fill(f64::NAN);
                gradients.d_k.fill(f64::NAN);
                gradients.d_v.fill(f64::NAN);
                attention::backward_into(saved, d_context, options, &mut gradients, &mut Workspace::new())?;
                Ok(gradients)
            })
            .unwrap();
        let zero = |x: ArrayView4<'_, f64>| x.iter().all(|&x| x == 0.0);
        assert!(zero(got.d_q.slice(s![.., .., ..236, ..])), "{way}");
        assert!(zero(got.d_k.slice(s![.., 1..2, .., ..])) && zero(got.d_v.slice(s![.., 1..2, .., ..])), "{way}");
        let all = [&got.d_q, &got.d_k, &got.d_v];
        assert!(all.iter().all(|d| d.iter().all(|x| x.is_finite())), "{way}");
    }
}

#[test]
fn every_layout_of_the_arguments() {
    let (core, d_context) = full_core();
    for layout in LAYOUTS {
        for way in gradient_ways() {
            let want = core.gradients(way, &d_context).unwrap();
            let laid_out = core.clone().layouts([layout; 4]);
            let tolerance = if way.precision == Precision::F32 { 1e-5 } else { 1e-12 };
            let got = match way.precision {
                Precision::F32 => with_layout::<f32>(&laid_out, way, &d_context),
                Precision::F64 => with_layout::<f64>(&laid_out, way, &d_context),
            };
            for ((name, got), (_, want)) in named(&got).iter().zip(named(&want)) {
                assert_all(&format!("{layout:?}, {way}: {name}"), got.clone(), want.as_slice().unwrap(), tolerance);
            }
        }
    }
}

/// With context, d_context and lse in the layout of the arguments too.
fn with_layout<T: Element>(core: &Core, way: Way, d_context: &Array4<f64>) -> Gradients<f64> {
    let layout = core.layouts[0];
    core.differentiated::<T, _>(way, d_context, |saved, d_context, options| {
        let (context, d_context) = (layout.store::<T>(&widened(saved.context)), layout.store::<T>(&widened(d_context)));
        let lse = layout.store::<T>(&widened(saved.lse).insert_axis(Axis(3)));
        let lse = layout.view(&lse);
        let saved = Saved { context: &layout.view(&context), lse: &lse.slice(s![.., .., .., 0]), ..*saved };
        let gradients = attention::backward(&saved, &layout.view(&d_context), options)?;
        Ok(widened_gradients(&gradients))
    })
    .unwrap()
}

#[test]
fn query_tiles_do_not_move_a_bit_of_heads_that_share_nothing() {
    let (core, d_context) = full_core();
    // Within a group of heads, the order of the sums is that of the tiles.
    let core = Core { k: core.k.select(Axis(1), &[0, 0, 1, 1]), v: core.v.select(Axis(1), &[0, 0, 1, 1]), ..core };
    for way in tiled_ways(Precision::F32).into_iter().filter(|way| way.query_tile.is_none()) {
        let want = core.gradients(way, &d_context).unwrap();
        for tile in [1, 2, 6, 7, 64, usize::MAX] {
            let way = Way { query_tile: Some(tile), ..way };
            assert_same_gradients(&way.to_string(), &core.gradients(way, &d_context).unwrap(), &want);
        }
    }
}

#[cfg(feature = "rayon")]
#[test]
fn b59_gradients_have_the_same_bits_on_any_pool() {
    let pools = [1, 2, 3, 8].map(|threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap());
    let mut draws = Seeded(59);
    let mut cores = vec![full_core()];
    for len in [31, 33, 64, 65, 129] {
        let (q, k) = (draws.array((2, 4, len, 64)), draws.array((2, 4, len, 64)));
        cores.push((Core::new(q * 8.0, k, draws.array((2, 4, len, 64))), draws.array((2, 4, len, 64))));
    }
    // One head and several blocks of keys, which the threads share.
    let (q, k) = (draws.array((1, 1, 600, 16)), draws.array((1, 1, 1100, 16)));
    let one_head = Core::new(q * 4.0, k, draws.array((1, 1, 1100, 16)));
    let d_context: Array4<f64> = draws.array((1, 1, 600, 16));
    cores.extend([
        (one_head.clone(), d_context.clone()),
        (one_head.clone().mask(Mask::causal()), d_context.clone()),
        (one_head.clone().mask(Mask::causal() & Mask::window(100, 0)), d_context.clone()),
        (one_head.bias(draws.array((600, 1100))), d_context),
    ]);
    for (index, (core, d_context)) in cores.iter().enumerate() {
        for precision in [Precision::F32, Precision::F64] {
            let way = Way::new(precision, Path::Tiled, Keep::Nothing);
            let want = pools[0].install(|| core.gradients(way, d_context)).unwrap();
            for pool in &pools {
                for _ in 0..3 {
                    let got = pool.install(|| core.gradients(way, d_context)).unwrap();
                    let what = format!("case {index}, {way}, {} threads", pool.current_num_threads());
                    assert_same_gradients(&what, &got, &want);
                }
                let (left, right) =
                    pool.install(|| rayon::join(|| core.gradients(way, d_context), || core.gradients(way, d_context)));
                for got in [left.unwrap(), right.unwrap()] {
                    assert_same_gradients(&format!("case {index}, {way}, inside a task"), &got, &want);
                }
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_and_nothing_is_written() {
    let x: Array4<f32> = typed(&Seeded(45).array((1, 2, 3, 4)));
    let attended = attention::forward(&x, &x, &x, &Options::new()).unwrap();
    let saved = Saved { q: &x, k: &x, v: &x, context: &attended.context, lse: &attended.lse };
    let plain = Options::new();
    let (bias, sinks) = (Array2::<f32>::zeros((3, 3)), Array1::<f32>::zeros(2));
    let biased = plain.bias(&bias).unwrap();
    let right = Gradients::zeros(&saved, &plain).unwrap();
    let long = Array4::<f32>::zeros((1, 2, 4, 4));
    let refused =
        |saved: &Saved<'_, f32>, d_context: &Array4<f32>, options: &Options<'_, f32>, gradients: &Gradients<f32>| {
            let mut gradients = gradients.clone();
            gradients.d_q.fill(7.0);
            gradients.d_v.fill(7.0);
            let before = gradients.clone();
            let error =
                attention::backward_into(saved, d_context, options, &mut gradients, &mut Workspace::new()).unwrap_err();
            assert_eq!(gradients, before, "{error}");
            error.to_string()
        };
    assert_eq!(
        refused(&saved, &long, &plain, &right),
        "d_context: expected [batch, num_heads, q_len, value_dim] = [1, 2, 3, 4], got [1, 2, 4, 4]"
    );
    assert_eq!(
        refused(&Saved { context: &long, ..saved }, &x, &plain, &right),
        "context: expected [batch, num_heads, q_len, value_dim] = [1, 2, 3, 4], got [1, 2, 4, 4]"
    );
    assert_eq!(
        refused(&Saved { lse: &multihead::ndarray::Array3::zeros((1, 2, 4)), ..saved }, &x, &plain, &right),
        "lse: expected [batch, num_heads, q_len] = [1, 2, 3], got [1, 2, 4]"
    );
    assert_eq!(
        refused(&saved, &x, &plain, &Gradients { d_k: long.clone(), ..right.clone() }),
        "d_k: expected [batch, num_kv_heads, kv_len, head_dim] = [1, 2, 3, 4], got [1, 2, 4, 4]"
    );
    assert_eq!(
        refused(&saved, &x, &plain.bias_gradient(), &right),
        "bias_gradient: expected a bias in the options, got none"
    );
    assert_eq!(
        refused(&saved, &x, &biased.bias_gradient(), &right),
        "d_bias: expected an array, which bias_gradient() asks for, got None"
    );
    assert_eq!(
        refused(&saved, &x, &biased, &Gradients { d_bias: Some(Array4::zeros((1, 1, 3, 3))), ..right.clone() }),
        "d_bias: expected None without bias_gradient(), got an array"
    );
    assert_eq!(
        refused(
            &saved,
            &x,
            &biased.bias_gradient(),
            &Gradients { d_bias: Some(Array4::zeros((1, 2, 3, 3))), ..right.clone() }
        ),
        "d_bias: expected [batch, num_heads, q_len, kv_len] = [1, 1, 3, 3], got [1, 2, 3, 3]"
    );
    assert_eq!(
        refused(&saved, &x, &plain.sinks(&sinks), &right),
        "d_sinks: expected an array, since the call has sinks, got None"
    );
    assert_eq!(
        refused(&saved, &x, &plain, &Gradients { d_sinks: Some(sinks.clone()), ..right }),
        "d_sinks: expected None for a call without sinks, got an array"
    );
}

#[test]
fn weights_may_be_asked_for() {
    let (core, d_context) = full_core();
    let kept = Way::new(Precision::F64, Path::Auto, Keep::Weights);
    let want = core.gradients(Way { keep: Keep::Nothing, ..kept }, &d_context).unwrap();
    let got = core.gradients(kept, &d_context).unwrap();
    for ((name, got), (_, want)) in named(&got).iter().zip(named(&want)) {
        assert_all(name, got.clone(), want.as_slice().unwrap(), 1e-12);
    }
}
