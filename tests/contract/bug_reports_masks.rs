//! Faults that other attention libraries had, each as a test with the right numbers: masks, positions and broadcasting.
//!
//! With queries of zero all visible keys are equally likely, so an output is the mean of the values that its query
//! sees, and a mask that is off by one shows in plain numbers.

use crate::common;

use common::core::Core;
use common::layer::Layer;
use common::{Call, EXACTLY, PRINTED, ROUNDING, Run, Seeded, Within};
use multihead::ndarray::{Array2, Array3, Array4, Axis, array, concatenate, s};
use multihead::{Mask, Options};

const NEVER: f64 = f64::NEG_INFINITY;
/// As negative as `f32` goes, and still a number.
const LOWEST: f64 = f32::MIN as f64;

/// -inf where a pair is hidden, else 0.
fn additive(keep: &Array2<bool>) -> Array2<f64> {
    keep.mapv(|kept| if kept { 0.0 } else { NEVER })
}

fn keep(rows: &Array2<u8>) -> Array2<bool> {
    rows.mapv(|bit| bit == 1)
}

/// `v[b, h, j] = 100 b + 10 h + j`
fn labelled(batch: usize, heads: usize, kv_len: usize) -> Array4<f64> {
    Array4::from_shape_fn((batch, heads, kv_len, 1), |(b, h, j, _)| (100 * b + 10 * h + j) as f64)
}

fn counting(n: usize) -> impl Iterator<Item = f64> {
    (0..n).map(|j| j as f64)
}

#[test]
fn b01_masked_row_forward() {
    let rows = keep(&array![[1, 1], [0, 0], [1, 0]]);
    let core = Core::single(
        array![[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]],
        array![[1.0, 0.0], [0.0, 1.0]],
        array![[1.0, 2.0], [3.0, 4.0]],
    )
    .scale(1.0);
    let check = |run: &Run| {
        run.out(&[1.5378828, 2.5378828, 0.0, 0.0, 1.0, 2.0], PRINTED);
        run.weights(&[0.7310586, 0.2689414, 0.0, 0.0, 1.0, 0.0], PRINTED);
        run.lse(&[1.3132617, NEVER, 1.0], PRINTED);
        assert_eq!(run.answer.out.slice(s![0, 0, 1, ..]), array![0.0, 0.0], "{}", run.way);
    };
    core.clone().mask(Mask::keep(&rows).unwrap()).everywhere(check);
    core.clone().mask(Mask::drop(&rows.mapv(|kept| !kept)).unwrap()).everywhere(check);
    core.bias(additive(&rows)).everywhere(check);
}

#[test]
fn b01_finite_bias_is_no_mask() {
    Core::means(1, counting(4)).bias(Array2::from_elem((1, 4), LOWEST)).everywhere(|run| {
        run.out(&[1.5], ROUNDING);
        run.weights(&[0.25; 4], ROUNDING);
    });
}

#[test]
fn b03_masked_head_paths_agree() {
    let x = array![[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]];
    let mask = Mask::keep(&Array4::from_shape_fn((1, 3, 2, 2), |(_, head, _, _)| head == 2)).unwrap();
    Layer::identity(3, x).mask(mask).everywhere(|run| {
        run.out(&[0.0, 0.0, 5.99962982, 0.0, 0.0, 5.99999995], PRINTED);
        let seen = [1.2339458e-4, 0.99987661, 1.522998e-8, 0.99999998];
        run.weights(&[&[0.0; 8], &seen[..]].concat(), PRINTED);
        if let Some(weights) = &run.answer.weights {
            assert!(weights.slice(s![0, ..2, .., ..]).iter().all(|&w| w == 0.0), "{}", run.way);
        }
    });
}

#[test]
fn b04_first_tiles_all_masked() {
    const L: usize = 700;
    let band = Array2::from_shape_fn((L, L), |(i, j)| j <= i && j + 7 >= i);
    let want: Vec<f64> = counting(L).map(|i| if i < 7.0 { i / 2.0 } else { i - 3.5 }).collect();
    let lse: Vec<f64> = (0..L).map(|i| ((i + 1).min(8) as f64).ln()).collect();
    let core = Core::means(L, counting(L));
    let forms = [
        core.clone().bias(additive(&band)),
        core.clone().mask(Mask::keep(&band).unwrap()),
        core.mask(Mask::causal() & Mask::window(7, 0)),
    ];
    for form in forms {
        form.everywhere(|run| {
            // 1e-3 absolute at values of 700.
            run.out(&want, Within(1e-6, 1e-12));
            run.lse(&lse, ROUNDING);
        });
    }
}

#[test]
fn b06_summed_finite_masks() {
    let core = || Core::means(4, [1.0, 2.0, 4.0, 8.0]);
    let padding = Array2::from_shape_fn((1, 4), |(_, j)| if j < 2 { LOWEST } else { 0.0 });
    core().mask(Mask::causal()).bias(padding).everywhere(|run| run.out(&[1.0, 1.5, 4.0, 6.0], ROUNDING));

    let real = Mask::keep_keys(&array![[false, false, true, true]]).unwrap();
    core().mask(Mask::causal() & real).everywhere(|run| run.out(&[0.0, 0.0, 4.0, 6.0], ROUNDING));

    let both = Array2::from_shape_fn((4, 4), |(i, j)| {
        let (padding, future) = (if j < 2 { f32::MIN } else { 0.0 }, if j > i { f32::MIN } else { 0.0 });
        f64::from(padding + future)
    });
    assert_eq!(both[[0, 1]], NEVER);
    core().bias(both).everywhere(|run| {
        let out: Vec<f64> = run.answer.out.iter().copied().collect();
        assert!(out.iter().all(|x| x.is_finite()), "{}: {out:?}", run.way);
        assert!((out[2] - 4.0).abs() < 1e-5 && (out[3] - 6.0).abs() < 1e-5, "{}: {out:?}", run.way);
    });
}

#[test]
fn b07_finite_mask_constant_leaks() {
    for key in [-1e3, -1e9] {
        Core::single(array![[1000.0]], array![[key], [1000.0]], array![[7.0], [9.0]])
            .scale(1.0)
            .mask(Mask::keep(&array![[true, false]]).unwrap())
            .everywhere(|run| {
                run.out(&[7.0], EXACTLY);
                run.weights(&[1.0, 0.0], EXACTLY);
            });
    }
}

#[test]
fn b08_nan_in_masked_slot() {
    let q = array![[1.0, 2.0], [3.0, -1.0]];
    let (good_k, bad_k) = (array![[0.5, 0.25]], array![[f64::NAN, 7.0]]);
    let (good_v, bad_v) = (array![[2.0, -3.0]], array![[f64::INFINITY, f64::NAN]]);
    let stack = |rows: &[&Array2<f64>]| {
        let views: Vec<_> = rows.iter().map(|rows| rows.view()).collect();
        concatenate(Axis(0), &views).unwrap()
    };
    let check = |run: &Run| {
        run.out(&[2.0, -3.0, 2.0, -3.0], EXACTLY);
        assert!(run.answer.lse.iter().all(|lse| lse.is_finite()), "{}", run.way);
    };
    let last = || Core::single(q.clone(), stack(&[&good_k, &bad_k]), stack(&[&good_v, &bad_v]));
    let hidden_last = [
        Mask::keep(&array![[true, false]]).unwrap(),
        Mask::drop(&array![[false, true], [false, true]]).unwrap(),
        Mask::keep_keys(&array![[true, false]]).unwrap(),
        Mask::key_lengths(&[1]),
        Mask::key_ranges(std::slice::from_ref(&(0..1))),
        Mask::causal_top_left() & Mask::key_lengths(&[1]),
    ];
    for mask in hidden_last {
        last().mask(mask).everywhere(check);
    }
    last().bias(array![[0.0, NEVER]]).everywhere(check);

    // Left padding, and left of a window: each query sees its own key only.
    let first = || Core::single(q.clone(), stack(&[&bad_k, &good_k]), stack(&[&bad_v, &good_v]));
    first().mask(Mask::key_ranges(std::slice::from_ref(&(1..2)))).everywhere(check);
    Core::single(q.clone(), stack(&[&bad_k, &good_k, &good_k]), stack(&[&bad_v, &good_v, &good_v]))
        .mask(Mask::last_n(1))
        .everywhere(check);

    // Above the diagonal the first query is spared and the second is not.
    last().mask(Mask::causal()).everywhere(|run| {
        run.out(&[2.0, -3.0, f64::NAN, f64::NAN], EXACTLY);
        run.lse(&[run.answer.lse[[0, 0, 0]], f64::NAN], EXACTLY);
        assert!(run.answer.lse[[0, 0, 0]].is_finite(), "{}", run.way);
    });
}

#[test]
fn b10_causal_alignment() {
    for (q_len, kv_len, want) in
        [(1, 4, vec![1.5]), (2, 5, vec![1.5, 2.0]), (3, 5, vec![1.0, 1.5, 2.0]), (1, 1, vec![0.0])]
    {
        Core::means(q_len, counting(kv_len)).mask(Mask::causal()).everywhere(|run| run.out(&want, ROUNDING));
    }
    let top_left = Core::means(2, counting(5)).mask(Mask::causal_top_left());
    top_left.everywhere(|run| run.out(&[0.0, 0.5], ROUNDING));
}

#[test]
fn b14_option_alone_is_ignored() {
    let options = [
        (Mask::causal(), [0.0, 0.5, 1.0, 1.5]),
        (Mask::window(1, 0), [0.0, 0.5, 1.5, 2.5]),
        (Mask::key_lengths(&[2]), [0.5; 4]),
        (Mask::none(), [1.5; 4]),
    ];
    for (mask, want) in options {
        Core::means(4, counting(4)).mask(mask).everywhere(|run| run.out(&want, ROUNDING));
    }
}

#[test]
fn b15_mask_and_causal_together() {
    let columns = Mask::keep(&array![[true, false, true]]).unwrap();
    for mask in [Mask::causal() & columns.clone(), columns & Mask::causal()] {
        Core::means(3, [1.0, 10.0, 100.0]).mask(mask).everywhere(|run| run.out(&[1.0, 1.0, 50.5], ROUNDING));
    }
}

#[test]
fn b16_mask_polarity_and_float_masks() {
    let core = || Core::means(1, [1.0, 100.0]);
    let first_only = [
        core().mask(Mask::keep(&array![[true, false]]).unwrap()),
        core().mask(Mask::drop(&array![[false, true]]).unwrap()),
        core().mask(Mask::keep_keys(&array![[true, false]]).unwrap()),
        core().mask(Mask::key_lengths(&[1])),
        core().bias(array![[0.0, NEVER]]),
    ];
    for form in first_only {
        form.everywhere(|run| run.out(&[1.0], EXACTLY));
    }
    let ones = array![[true, true]];
    core().mask(Mask::keep(&ones).unwrap()).everywhere(|run| run.out(&[50.5], EXACTLY));
    core().mask(Mask::keep_keys(&ones).unwrap()).everywhere(|run| run.out(&[50.5], EXACTLY));
    core().mask(Mask::drop(&ones).unwrap()).everywhere(|run| run.out(&[0.0], EXACTLY));
    core().bias(array![[3f64.ln(), 0.0]]).everywhere(|run| {
        run.out(&[25.75], ROUNDING);
        run.weights(&[0.75, 0.25], ROUNDING);
    });
}

#[test]
fn b17_bias_broadcast_over_heads_only() {
    let bias = array![[[[0.0, NEVER], [0.0, NEVER]]], [[[NEVER, 0.0], [NEVER, 0.0]]]];
    Core::uniform(2, 2, labelled(2, 2, 2)).bias(bias).everywhere(|run| {
        run.out(&[0.0, 0.0, 10.0, 10.0, 101.0, 101.0, 111.0, 111.0], EXACTLY);
    });
}

#[test]
fn b18_mask_broadcast_every_form() {
    let rows = keep(&array![[1, 0, 0], [0, 1, 1]]);
    let want: Vec<f64> = labelled(2, 3, 1).iter().flat_map(|&first| [first, first + 1.5]).collect();
    let rank_4 = rows.view().insert_axis(Axis(0)).insert_axis(Axis(0));
    let wide = |batch, heads| rank_4.broadcast((batch, heads, 2, 3)).unwrap();
    let core = |mask| Core::uniform(3, 2, labelled(2, 3, 3)).mask(mask);
    // The views have strides of 0, the copies do not.
    for (batch, heads) in [(1, 1), (2, 1), (1, 3), (2, 3)] {
        let view = wide(batch, heads);
        core(Mask::keep(&view).unwrap()).everywhere(|run| run.out(&want, ROUNDING));
        core(Mask::keep(&view.as_standard_layout()).unwrap()).everywhere(|run| run.out(&want, ROUNDING));
        let bias = view.mapv(|kept| if kept { 0.0 } else { NEVER });
        core(Mask::none()).bias(bias).everywhere(|run| run.out(&want, ROUNDING));
    }
    core(Mask::keep(&rows).unwrap()).everywhere(|run| run.out(&want, ROUNDING));

    let middle: Vec<f64> = labelled(2, 3, 1).iter().flat_map(|&first| [first + 1.0; 2]).collect();
    let row = array![[[[true, false, true]]]];
    core(Mask::keep(&row).unwrap()).everywhere(|run| run.out(&middle, ROUNDING));

    let short = Array4::from_elem((1, 2, 2, 3), true);
    core(Mask::keep(&short).unwrap())
        .refused("keep: expected [batch, num_heads, q_len, kv_len] = [2, 3, 2, 3], got [1, 2, 2, 3]");
    core(Mask::none())
        .bias(short.mapv(|_| 0.0))
        .refused("bias: expected [batch, num_heads, q_len, kv_len] = [2, 3, 2, 3], got [1, 2, 2, 3]");
}

#[test]
fn b19_rank3_mask_when_batch_equals_heads() {
    let ranks = "rank 2 [q_len, kv_len] or rank 4 [batch, num_heads, q_len, kv_len]";
    let rank_3 = Array3::from_elem((2, 2, 2), true);
    for (name, refused) in [("keep", Mask::keep(&rank_3)), ("drop", Mask::drop(&rank_3))] {
        assert_eq!(refused.unwrap_err().to_string(), format!("{name}: expected {ranks}, got rank 3 [2, 2, 2]"));
    }
    let bias = Array3::<f32>::zeros((2, 2, 2));
    let refused = Options::new().bias(&bias).unwrap_err();
    assert_eq!(refused.to_string(), format!("bias: expected {ranks}, got rank 3 [2, 2, 2]"));
}

#[test]
fn b20_key_padding_masks_columns_only() {
    let causal = Array4::from_shape_fn((1, 2, 3, 3), |(_, _, i, j)| j <= i);
    let padding = Mask::keep_keys(&array![[true, true, false]]).unwrap();
    let v = array![[[[1.0], [2.0], [30.0]], [[1.0], [2.0], [30.0]]]];
    Core::uniform(2, 3, v)
        .mask(padding & Mask::keep(&causal).unwrap())
        .everywhere(|run| run.out(&[1.0, 1.5, 1.5, 1.0, 1.5, 1.5], ROUNDING));
}

#[test]
fn b21_per_batch_key_lengths() {
    let lengths = [1, 3, 0];
    for beyond in [1e30, f64::NAN] {
        let v =
            Array4::from_shape_fn((3, 1, 4, 1), |(b, _, j, _)| if j < lengths[b] { j as f64 + 1.0 } else { beyond });
        Core::uniform(1, 2, v).mask(Mask::key_lengths(&lengths)).everywhere(|run| {
            run.out(&[1.0, 1.0, 2.0, 2.0, 0.0, 0.0], ROUNDING);
            run.lse(&[0.0, 0.0, 3f64.ln(), 3f64.ln(), NEVER, NEVER], ROUNDING);
        });
    }
    Core::uniform(1, 2, Array4::zeros((3, 1, 4, 1)))
        .mask(Mask::key_lengths(&[1, 5, 0]))
        .refused("key_lengths[1]: expected start <= end <= kv_len = 4, got 0..5");
}

#[test]
fn b22_left_padded_batch_equals_single() {
    let mut draws = Seeded(22);
    let [q, k, v] = [0; 3].map(|_| {
        let mut x: Array4<f64> = draws.array((2, 2, 5, 4));
        x.slice_mut(s![1, .., ..3, ..]).fill(1e3);
        x
    });
    let real = |x: &Array4<f64>| x.slice(s![1..2, .., 3.., ..]).to_owned();
    let alone = Core::new(real(&q), real(&k), real(&v)).mask(Mask::causal()).oracle();
    let keys = Array2::from_shape_fn((2, 5), |(b, j)| b == 0 || j >= 3);
    for padding in [Mask::keep_keys(&keys).unwrap(), Mask::key_ranges(&[0..5, 3..5])] {
        Core::new(q.clone(), k.clone(), v.clone()).mask(Mask::causal() & padding).everywhere(|run| {
            let short = run.answer.out.slice(s![1, .., 3.., ..]);
            let gap = (&short - &alone.out.slice(s![0, .., .., ..])).mapv(f64::abs).fold(0.0, |a: f64, &b| a.max(b));
            assert!(gap < run.tolerance(ROUNDING), "{}: {gap:e}", run.way);
        });
    }
}

#[test]
fn b26_returned_weights_meaning() {
    let eye = Array4::from_shape_fn((1, 2, 2, 2), |(_, head, i, j)| (i == j) == (head == 0));
    let x = Seeded(26).array((1, 2, 4));
    Layer::identity(2, x.clone()).mask(Mask::keep(&eye).unwrap()).everywhere(|run| {
        run.weights(&[1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0], EXACTLY);
    });
    let q = Array4::<f32>::zeros((1, 2, 2, 4));
    let mask = Mask::keep(&eye).unwrap();
    let attended = multihead::attention::forward(&q, &q, &q, &Options::new().mask(&mask).weights()).unwrap();
    assert_eq!(attended.mean_weights().unwrap(), Array3::from_elem((1, 2, 2), 0.5));
}

#[test]
fn b46_window_size_off_by_one() {
    let core = |mask| Core::means(6, counting(6)).mask(mask);
    let with_itself = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0];
    let before = [0.0, 0.5, 1.0, 1.5, 2.5, 3.5];
    core(Mask::causal() & Mask::last_n(3)).everywhere(|run| run.out(&with_itself, ROUNDING));
    core(Mask::last_n(3)).everywhere(|run| run.out(&with_itself, ROUNDING));
    core(Mask::causal() & Mask::window(3, 0)).everywhere(|run| run.out(&before, ROUNDING));
    let itself: Vec<f64> = counting(6).collect();
    core(Mask::causal() & Mask::window(0, 0)).everywhere(|run| run.out(&itself, EXACTLY));
    core(Mask::last_n(1)).everywhere(|run| run.out(&itself, EXACTLY));
    core(Mask::last_n(0)).everywhere(|run| run.out(&[0.0; 6], EXACTLY));
    for side in [usize::MAX, usize::MAX - 1, i64::MAX as usize] {
        core(Mask::window(side, side)).everywhere(|run| run.out(&[2.5; 6], ROUNDING));
    }
}
