//! Faults that other attention libraries had, each as a test with the right numbers: scales, widths, strides, empty
//! axes, extreme scores and the layer's projections.

use crate::common;

use common::core::Core;
use common::layer::Layer;
use common::layout::{LAYOUTS, Layout};
use common::{Call, EXACTLY, PRINTED, ROUNDING, Run, Seeded, Within, flat};
use multihead::ndarray::{Array1, Array2, Array3, Array4, Axis, array, s};
use multihead::{Inputs, Mask, MultiHeadAttention, Options, Weights, attention};

const NEVER: f64 = f64::NEG_INFINITY;

#[test]
fn b28_scale_per_head_on_every_path() {
    // Head 0 sees the query (2, 0, 0, 0) and the keys (2, 0, 0, 0) and 0; head 1 sees zeros.
    let mut key = Array3::zeros((1, 2, 8));
    key[[0, 0, 0]] = 2.0;
    let query = key.slice(s![.., ..1, ..]).to_owned();
    let mut value = Array3::zeros((1, 2, 8));
    value[[0, 0, 0]] = 1.0;
    let layer = Layer::identity(2, query.clone()).key_value(key.clone(), value.clone());
    let heads =
        |x: &Array3<f64>| x.to_shape((1, x.len_of(Axis(1)), 2, 4)).unwrap().permuted_axes([0, 2, 1, 3]).to_owned();
    let core = Core::new(heads(&query), heads(&key), heads(&value));
    for (scale, want) in [(None, 0.88079708), (Some(0.0), 0.5), (Some(0.25), 0.73105858)] {
        let check = |run: &Run| {
            assert!((run.answer.out.iter().next().unwrap() - want).abs() < run.tolerance(PRINTED), "{}", run.way);
        };
        match scale {
            None => (layer.everywhere(check), core.everywhere(check)),
            Some(scale) => (layer.clone().scale(scale).everywhere(check), core.clone().scale(scale).everywhere(check)),
        };
    }
    for (bad, shown) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf"), (f64::NEG_INFINITY, "-inf")] {
        let text = format!("scale: expected a finite number, got {shown}");
        core.clone().scale(bad).refused(&text);
        layer.clone().scale(bad).refused(&text);
    }
}

#[test]
fn b29_odd_head_sizes() {
    let core = Core::single(array![[1.0, 1.0, 1.0]], array![[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], array![[1.0], [0.0]]);
    core.everywhere(|run| run.out(&[0.84967455], PRINTED));

    let seeded = |head_dim: usize, value_dim: usize| {
        let mut draws = Seeded(1000 + head_dim as u64);
        Core::single(draws.array((5, head_dim)), draws.array((5, head_dim)), draws.array((5, value_dim)))
    };
    let known = [
        (1, 1, -0.10697616, -0.49981304),
        (3, 5, 0.01773814, 0.09019380),
        (80, 64, 0.03542317, 7.69035817),
        (257, 3, 0.04561912, 0.63138283),
    ];
    for (head_dim, value_dim, last, sum) in known {
        seeded(head_dim, value_dim).everywhere(|run| {
            let out = &run.answer.out;
            assert!((out[[0, 0, 4, 0]] - last).abs() < run.tolerance(PRINTED), "{} width {head_dim}", run.way);
            assert!((out.sum() - sum).abs() < run.tolerance(Within(1e-4, 1e-7)), "{} width {head_dim}", run.way);
        });
    }
    for width in [1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 31, 33, 80, 96, 100, 192, 256, 257, 320] {
        let core = seeded(width, width);
        let oracle = core.oracle();
        core.everywhere(|run| run.agrees(&oracle, ROUNDING));
    }
}

#[test]
fn b30_different_key_and_value_widths() {
    let mut draws = Seeded(30);
    let mut bias = |len| Some(draws.array(len));
    let (b_q, b_k, b_v, b_o) = (bias(4), bias(4), bias(4), bias(4));
    let w_q: Array2<f64> = draws.array((4, 4));
    let (w_k, w_v, w_o) = (draws.array((3, 4)), draws.array((2, 4)), draws.array((4, 4)));
    let weights = Weights { b_q, b_k, b_v, b_o, ..Weights::new(w_q, w_k, w_v, w_o) };
    let (query, key, value) = (draws.array((2, 5, 4)), draws.array((2, 6, 3)), draws.array((2, 6, 2)));

    // By hand: project each token, split the heads, attend, put the heads side by side, project.
    let project = |x: &Array3<f64>, w: &Array2<f64>, b: &Option<Array1<f64>>| {
        Array4::from_shape_fn((2, 2, x.len_of(Axis(1)), 2), |(entry, head, i, c)| {
            let column = 2 * head + c;
            x.slice(s![entry, i, ..]).dot(&w.column(column)) + b.as_ref().unwrap()[column]
        })
    };
    let w = &weights;
    let core =
        Core::new(project(&query, &w.w_q, &w.b_q), project(&key, &w.w_k, &w.b_k), project(&value, &w.w_v, &w.b_v));
    let mut want = core.oracle();
    let context = want.out.clone();
    want.out = Array3::from_shape_fn((2, 5, 4), |(entry, i, column)| {
        let merged = Array1::from_shape_fn(4, |c| context[[entry, c / 2, i, c % 2]]);
        merged.dot(&w.w_o.column(column)) + w.b_o.as_ref().unwrap()[column]
    })
    .into_dyn();

    let layer = Layer::new(2, weights, query).key_value(key.clone(), value);
    layer.everywhere(|run| {
        assert_eq!(run.answer.out.shape(), [2, 5, 4]);
        run.agrees(&want, ROUNDING);
    });
    layer
        .key_value(key, Array3::zeros((2, 7, 2)))
        .refused("value: expected [batch, kv_len, v_dim] = [2, 6, 2], got [2, 7, 2]");
}

#[test]
fn b31_gqa_head_order() {
    let kv_heads = |n: usize| Array4::from_shape_fn((1, n, 1, 1), |(_, head, ..)| 10.0 * (head as f64 + 1.0));
    for (num_heads, num_kv_heads, want) in [
        (4, 2, vec![10.0, 10.0, 20.0, 20.0]),
        (6, 2, vec![10.0, 10.0, 10.0, 20.0, 20.0, 20.0]),
        (4, 1, vec![10.0; 4]),
        (3, 3, vec![10.0, 20.0, 30.0]),
    ] {
        Core::uniform(num_heads, 1, kv_heads(num_kv_heads)).everywhere(|run| run.out(&want, EXACTLY));
    }
}

#[test]
fn b34_merge_heads() {
    for (num_heads, x) in
        [(2, array![[[1.0, 2.0], [3.0, 4.0]]]), (2, Array3::from_shape_fn((1, 3, 4), |(_, i, c)| (4 * i + c) as f64))]
    {
        let len = x.len_of(Axis(1));
        let diagonal = Mask::keep(&Array2::from_shape_fn((len, len), |(i, j)| i == j)).unwrap();
        Layer::identity(num_heads, x.clone()).mask(diagonal).everywhere(|run| run.out(&flat(&x), EXACTLY));
    }
}

#[test]
fn b35_non_contiguous_inputs() {
    let mut draws = Seeded(35);
    let core = Core::single(draws.array((5, 4)), draws.array((5, 4)), draws.array((5, 4))).scale(0.5);
    let oracle = core.oracle();
    let check = |run: &Run| {
        run.agrees(&oracle, ROUNDING);
        let first = [0.04176809, -0.07547309, 0.22004214, -0.01483686];
        for (c, want) in first.into_iter().enumerate() {
            assert!((run.answer.out[[0, 0, 0, c]] - want).abs() < run.tolerance(PRINTED), "{}", run.way);
        }
        assert!((run.answer.out.sum() - 0.85421891).abs() < run.tolerance(PRINTED), "{}", run.way);
    };
    for layout in LAYOUTS {
        for operand in 0..4 {
            let mut layouts = [Layout::Standard; 4];
            layouts[operand] = layout;
            core.clone().layouts(layouts).everywhere(check);
        }
        core.clone().layouts([layout; 4]).everywhere(check);
    }
}

#[test]
fn b35_non_contiguous_masks_and_biases() {
    let mut draws = Seeded(36);
    let core = Core::single(draws.array((5, 4)), draws.array((7, 4)), draws.array((7, 4)));
    let bias: Array2<f64> = draws.array((5, 7));
    let keep = bias.mapv(|b| b > -0.2);
    let oracle = core.clone().mask(Mask::keep(&keep).unwrap()).bias(bias.clone()).oracle();
    let mut stepped = Array2::from_elem((10, 21), false);
    stepped.slice_mut(s![..;-2, ..;3]).assign(&keep);
    let masks = [
        Mask::keep(&keep.t().as_standard_layout().t()),
        Mask::keep(&stepped.slice(s![..;-2, ..;3])),
        Mask::drop(&keep.mapv(|kept| !kept).t().as_standard_layout().t()),
    ];
    let mut reversed = bias.clone();
    reversed.slice_mut(s![..;-1, ..;-1]).assign(&bias);
    for mask in masks {
        // `to_owned` and `mapv` keep the order of a transposed array, so the bias arrives column-major.
        let column_major = bias.t().as_standard_layout().to_owned().reversed_axes();
        assert!(!column_major.is_standard_layout());
        core.clone().mask(mask.unwrap()).bias(column_major).everywhere(|run| run.agrees(&oracle, ROUNDING));
    }
    let (q, k, v) = (core.q.view(), core.k.view(), core.v.view());
    let mask = Mask::keep(&keep).unwrap();
    for way in common::ways().into_iter().filter(|way| way.precision == common::Precision::F64) {
        let view = reversed.slice(s![..;-1, ..;-1]);
        let options = way.choose(Options::new().mask(&mask).bias(&view).unwrap());
        let answer = attention::forward(&q, &k, &v, &options).unwrap();
        let gap = (&answer.context - &oracle.out).mapv(f64::abs).fold(0.0, |a: f64, &b| a.max(b));
        assert!(gap < 1e-12, "{way}: {gap:e}");
    }
}

#[test]
fn b37_single_column_projection() {
    // [2, 1] matrices, cut from a [1, 2] one: the stride of the second axis says nothing.
    let column = || array![[1.0, 2.0]].reversed_axes();
    let weights = Weights::new(column(), column(), column(), array![[1.0, 0.0]]);
    let layer = Layer::new(1, weights, array![[[1.0, 2.0]]]);
    layer.everywhere(|run| run.out(&[5.0, 0.0], EXACTLY));
}

#[test]
fn b37_one_row_one_column_views() {
    let long = Array3::from_shape_fn((3, 4, 2), |(b, i, c)| (10 * b + i) as f32 + 0.5 * c as f32);
    let mha = MultiHeadAttention::<f32>::builder(1, 1).seed(37).build().unwrap();
    let views = [
        long.slice(s![1..2, 2..3, 1..2]),
        long.slice(s![1..3;2, 2..4;2, 1..2;2]),
        long.slice(s![0..2;-2, 1..3;-2, 1..2;-1]),
        long.slice(s![1, 2, 1..2]).insert_axis(Axis(0)).insert_axis(Axis(0)),
        long.slice(s![1..2, 2..3, 1..2]).reversed_axes(),
    ];
    for view in views {
        assert_eq!(view.shape(), [1, 1, 1]);
        let owned = Array3::from_elem((1, 1, 1), view[[0, 0, 0]]);
        let heads = |x: &multihead::ndarray::ArrayView3<'_, f32>| Array4::from_elem((1, 1, 1, 1), x[[0, 0, 0]]);
        for way in common::ways().into_iter().filter(|way| way.precision == common::Precision::F32) {
            let options = way.choose(Options::new());
            let got = mha.attend(&Inputs::new(&view), &options).unwrap();
            assert_eq!(got, mha.attend(&Inputs::new(&owned), &options).unwrap(), "{way}");
            let cut = view.view().insert_axis(Axis(1));
            let answer = attention::forward(&cut, &cut, &cut, &options).unwrap();
            assert_eq!(answer.context, heads(&view), "{way}");
        }
    }
}

#[test]
fn b38_no_keys_at_all() {
    let core = || Core::new(Array4::ones((2, 2, 3, 4)), Array4::zeros((2, 2, 0, 4)), Array4::zeros((2, 2, 0, 5)));
    for mask in [Mask::none(), Mask::causal(), Mask::window(2, 2), Mask::key_lengths(&[0, 0])] {
        core().mask(mask).everywhere(|run| {
            assert_eq!(run.answer.out.shape(), [2, 2, 3, 5]);
            run.out(&[0.0; 60], EXACTLY);
            run.lse(&[NEVER; 12], EXACTLY);
            if let Some(weights) = &run.answer.weights {
                assert_eq!(weights.shape(), [2, 2, 3, 0]);
            }
        });
    }
    let mut draws = Seeded(38);
    let mut layer =
        Layer::identity(2, draws.array((2, 3, 4))).key_value(Array3::zeros((2, 0, 4)), Array3::zeros((2, 0, 4)));
    let b_o: Array1<f64> = draws.array(4);
    layer.weights.b_o = Some(b_o.clone());
    let want = flat(&b_o).repeat(6);
    layer.everywhere(|run| run.out(&want, EXACTLY));
}

#[test]
fn b39_empty_batch_or_no_queries() {
    for (batch, q_len) in [(0, 3), (2, 0), (0, 0)] {
        let shape = [batch, 2, q_len, 3];
        let core = Core::new(
            Array4::zeros((batch, 2, q_len, 4)),
            Array4::zeros((batch, 2, 3, 4)),
            Array4::zeros((batch, 2, 3, 5)),
        );
        core.everywhere(|run| {
            assert_eq!(run.answer.out.shape(), [batch, 2, q_len, 5], "{}", run.way);
            assert_eq!(run.answer.lse.shape(), &shape[..3], "{}", run.way);
            assert!(run.answer.weights.as_ref().is_none_or(|weights| weights.shape() == shape), "{}", run.way);
        });
        let layer = Layer::identity(2, Array3::zeros((batch, q_len, 8)))
            .key_value(Array3::zeros((batch, 3, 8)), Array3::zeros((batch, 3, 8)));
        layer.everywhere(|run| {
            assert_eq!(run.answer.out.shape(), [batch, q_len, 8], "{}", run.way);
            assert!(run.answer.weights.as_ref().is_none_or(|weights| weights.shape() == shape), "{}", run.way);
        });
        let q = Array4::<f32>::zeros((batch, 2, q_len, 4));
        let k = Array4::zeros((batch, 2, 3, 4));
        let attended = attention::forward(&q, &k, &k, &Options::new().weights()).unwrap();
        assert_eq!(attended.mean_weights().unwrap().shape(), [batch, q_len, 3]);
    }
}

#[test]
fn b43_large_and_small_scores() {
    let cases = [
        (vec![400.0, -250.0, 0.0], 1.0),
        (vec![1e30, 1e30], 1.5),
        (vec![-1e30, -1e30], 1.5),
        (vec![88.8, 89.8], 1.7310586),
        (vec![-104.0, -105.0], 1.2689414),
    ];
    for (scores, want) in cases {
        let n = scores.len();
        let (k, v) =
            (Array1::from(scores).insert_axis(Axis(1)), Array2::from_shape_fn((n, 1), |(j, _)| j as f64 + 1.0));
        Core::single(array![[1.0]], k, v).scale(1.0).everywhere(|run| run.out(&[want], PRINTED));
    }
    let exact = Core::single(array![[1.0]], array![[400.0], [-250.0], [0.0]], array![[1.0], [2.0], [3.0]]).scale(1.0);
    exact.everywhere(|run| run.out(&[1.0], EXACTLY));
}

#[test]
fn b44_long_row_sum() {
    let sums_to_1 = |run: &Run, within: Within| {
        if let Some(weights) = &run.answer.weights {
            assert!((weights.sum() - 1.0).abs() < run.tolerance(within), "{}: {}", run.way, weights.sum());
        }
    };
    for kv_len in [4096, 65536] {
        Core::means(1, vec![1.0; kv_len]).everywhere(|run| {
            run.out(&[1.0], Within(1e-6, 1e-12));
            sums_to_1(run, Within(1e-6, 1e-12));
        });
    }
    let mut draws = Seeded(44);
    let k = Array2::from_shape_simple_fn((65536, 1), || 4.0 * draws.draw());
    let v = Array2::from_shape_fn((65536, 1), |(j, _)| (j % 2) as f64);
    Core::single(array![[1.0]], k, v).scale(1.0).everywhere(|run| {
        // The right values are known to eight digits.
        run.out(&[0.50315625], Within(1e-4, 1e-8));
        run.lse(&[11.68338322], Within(1e-4, 1e-8));
        sums_to_1(run, Within(1e-4, 1e-10));
    });
}

#[test]
fn b53_square_weight_transposed() {
    // Rows are outputs; the layer takes the transposed view.
    let stored = array![[0.0, 1.0], [0.0, 0.0]].reversed_axes();
    let x = || array![[[5.0, 7.0]]];
    let eye = || Array2::eye(2);
    let layer = |w_q, w_k, w_v, w_o| Layer::new(1, Weights::new(w_q, w_k, w_v, w_o), x()).scale(1.0);
    let first_only = || array![[1.0, 0.0], [0.0, 0.0]];
    layer(eye(), eye(), stored.clone(), eye()).everywhere(|run| run.out(&[7.0, 0.0], EXACTLY));
    layer(eye(), eye(), eye(), stored.clone()).everywhere(|run| run.out(&[7.0, 0.0], EXACTLY));
    // With one key the lse is the score: 7 * 5 the right way, 0 the other.
    layer(stored.clone(), first_only(), eye(), eye()).everywhere(|run| run.lse(&[35.0], ROUNDING));
    layer(first_only(), stored.clone(), eye(), eye()).everywhere(|run| run.lse(&[35.0], ROUNDING));

    let mut mha = layer(stored, eye(), eye(), eye()).build::<f64>().unwrap();
    let before = mha.clone();
    let mut weights = mha.weights().clone();
    weights.w_k = Array2::zeros((3, 2));
    let refused = mha.set_weights(weights).unwrap_err();
    assert_eq!(refused.to_string(), "w_k: expected [k_dim, num_kv_heads * head_dim] = [2, 2], got [3, 2]");
    assert_eq!(mha, before);
}

#[test]
fn b55_argument_checks() {
    let refused = |builder: multihead::Builder<f32>, text: &str| {
        assert_eq!(builder.build().unwrap_err().to_string(), text);
    };
    let builder = MultiHeadAttention::<f32>::builder;
    refused(builder(0, 2), "d_model: expected at least 1, got 0");
    refused(builder(8, 0), "num_heads: expected at least 1, got 0");
    refused(builder(10, 3), "d_model: expected a multiple of num_heads = 3 where head_dim is not given, got 10");
    refused(builder(9, 3).num_kv_heads(2), "num_heads: expected a multiple of num_kv_heads = 2, got 3");
    refused(builder(8, 2).num_kv_heads(4), "num_heads: expected a multiple of num_kv_heads = 4, got 2");
    refused(builder(8, 2).num_kv_heads(0), "num_kv_heads: expected at least 1, got 0");

    let core =
        |k: [usize; 4], v: [usize; 4]| Core::new(Array4::zeros((2, 4, 3, 8)), Array4::zeros(k), Array4::zeros(v));
    core([2, 4, 5, 8], [2, 4, 6, 8])
        .refused("v: expected [batch, num_kv_heads, kv_len, value_dim] = [2, 4, 5, _], got [2, 4, 6, 8]");
    core([3, 4, 5, 8], [3, 4, 5, 8])
        .refused("k: expected [batch, num_kv_heads, kv_len, head_dim] = [2, _, _, 8], got [3, 4, 5, 8]");
    core([2, 4, 5, 7], [2, 4, 5, 8])
        .refused("k: expected [batch, num_kv_heads, kv_len, head_dim] = [2, _, _, 8], got [2, 4, 5, 7]");
    core([2, 3, 5, 8], [2, 3, 5, 8]).refused("num_heads: expected a multiple of num_kv_heads = 3, got 4");

    let layer = |query: [usize; 3], key: [usize; 3]| {
        let eye = || Array2::eye(8);
        let weights = Weights::new(eye(), eye(), eye(), eye());
        Layer::new(2, weights, Array3::zeros(query)).key_value(Array3::zeros(key), Array3::zeros(key))
    };
    layer([2, 3, 7], [2, 3, 8]).refused("query: expected [batch, q_len, d_model] = [_, _, 8], got [2, 3, 7]");
    layer([2, 3, 8], [2, 3, 7]).refused("key: expected [batch, kv_len, k_dim] = [2, _, 8], got [2, 3, 7]");
    layer([2, 3, 8], [1, 3, 8]).refused("key: expected [batch, kv_len, k_dim] = [2, _, 8], got [1, 3, 8]");
    layer([2, 3, 8], [2, 4, 8])
        .mask(Mask::keep(&Array2::from_elem((3, 3), true)).unwrap())
        .refused("keep: expected [batch, num_heads, q_len, kv_len] = [2, 2, 3, 4], got [1, 1, 3, 3]");
}

#[test]
fn b55_no_bias_equals_a_bias_of_zeros() {
    let mut draws = Seeded(55);
    let mut w = || draws.array((6, 6));
    let weights = Weights::new(w(), w(), w(), w());
    let plain = Layer::new(3, weights, draws.array((2, 4, 6))).mask(Mask::causal());
    let mut zeros = plain.clone();
    let zero = || Some(Array1::zeros(6));
    (zeros.weights.b_q, zeros.weights.b_k, zeros.weights.b_v, zeros.weights.b_o) = (zero(), zero(), zero(), zero());
    let want = plain.oracle();
    zeros.everywhere(|run| run.agrees(&want, ROUNDING));
    plain.everywhere(|run| run.agrees(&want, ROUNDING));
}

#[test]
fn an_empty_row_has_weights_of_zero_whatever_its_sink() {
    for sink in [0.5, f64::NAN, f64::INFINITY, NEVER] {
        let core = Core::means(1, [1.0, 2.0]).sinks(array![sink]).mask(Mask::last_n(0));
        core.everywhere(|run| {
            run.out(&[0.0], EXACTLY);
            run.lse(&[sink], EXACTLY);
            run.weights(&[0.0, 0.0], EXACTLY);
        });
    }
}

#[test]
fn infinite_scores_are_arithmetic() {
    // 1e30 * 1e30 overflows in f32: a score of -inf is no mask, and inf is capped.
    let core = |keys: Array2<f64>| Core::single(array![[1e30]], keys, array![[1.0], [2.0]]).scale(1.0);
    core(array![[-1e30], [-1e30]]).sinks(array![0.5]).everywhere(|run| {
        run.out(&[0.0], EXACTLY);
        run.lse(&[0.5], EXACTLY);
    });
    core(array![[1e30], [-1e30]]).softcap(5.0).everywhere(|run| {
        run.out(&[1.0000453978687025], ROUNDING);
        run.lse(&[5.000045398899217], ROUNDING);
    });
    core(array![[1e30], [-1e30]]).softcap(1e-30).everywhere(|run| run.out(&[1.5], ROUNDING));
}
