//! Are layers with other heads what they are said to be?

use crate::common;

use common::{Seeded, is_near, property, typed};
use multihead::inspect::{gate_gradient, head_importance};
use multihead::ndarray::{Array1, Array2, Array3, Axis, array, s};
use multihead::position::Buckets;
use multihead::{Element, HeadMap, Inputs, LayerOutput, Mask, MultiHeadAttention, Options, Weights, attention};
use proptest::prelude::*;

/// A layer whose query heads read the KV heads of the map, with all that can be there.
fn layer<T: Element>(kv_of_head: &[usize], num_kv_heads: usize, seed: u64) -> MultiHeadAttention<T> {
    let (num_heads, mut draws) = (kv_of_head.len(), Seeded(seed));
    let mut matrix = |rows: usize, columns: usize| typed::<T, _>(&draws.array((rows, columns)));
    let (w_q, w_k) = (matrix(10, 3 * num_heads), matrix(10, 3 * num_kv_heads));
    let weights = Weights::new(w_q, w_k, matrix(10, 2 * num_kv_heads), matrix(2 * num_heads, 10));
    let mut vector = |len: usize| Some(typed::<T, _>(&draws.array(len)));
    let weights = Weights {
        b_q: vector(3 * num_heads),
        b_k: vector(3 * num_kv_heads),
        b_v: vector(2 * num_kv_heads),
        b_o: vector(10),
        sinks: vector(num_heads),
        relative_bias: Some(typed(&draws.array((5, num_heads)))),
        relative_keys: Some(typed(&draws.array((3, 3)))),
        ..weights
    };
    let builder = MultiHeadAttention::builder(10, num_heads).head_dim(3).value_dim(2).softcap(3.0);
    let builder = builder.alibi().relative_bias(Buckets::Clipped { clip: 2 });
    builder.kv_of_head(kv_of_head).num_kv_heads(num_kv_heads).from_weights(weights).unwrap()
}

fn attend<T: Element>(mha: &MultiHeadAttention<T>) -> LayerOutput<T> {
    let x: Array3<T> = typed(&(Seeded(99).array((2, 9, 10)) * 4.0));
    mha.attend(&Inputs::new(&x), &Options::new().mask(&Mask::causal()).weights()).unwrap()
}

#[track_caller]
fn assert_close<T: Element>(got: &LayerOutput<T>, want: &LayerOutput<T>, tolerance: f64) {
    assert_eq!(got.output.shape(), want.output.shape());
    for (got, want) in got.output.iter().zip(&want.output) {
        assert!(is_near(got.into_f64(), want.into_f64(), tolerance), "{got}, not {want}");
    }
}

/// The heads that stay, if one does.
fn maps() -> impl Strategy<Value = (Vec<usize>, usize, Vec<bool>)> {
    (1..=4usize).prop_flat_map(|num_kv_heads| {
        prop::collection::vec((0..num_kv_heads, any::<bool>()), 1..=7)
            .prop_map(move |heads| {
                let (map, pruned) = heads.into_iter().unzip();
                (map, num_kv_heads, pruned)
            })
            .prop_filter("none would stay", |(_, _, pruned): &(Vec<usize>, usize, Vec<bool>)| pruned.contains(&false))
    })
}

fn pruning_is_gating_by_zero<T: Element>(tolerance: f64) {
    property(128, (maps(), any::<u64>()), |((map, num_kv_heads, pruned), seed)| {
        let mha = layer::<T>(&map, num_kv_heads, seed);
        let gone: Vec<usize> = (0..map.len()).rev().filter(|&head| pruned[head]).collect();
        let stay: Vec<usize> = (0..map.len()).filter(|&head| !pruned[head]).collect();
        let gates = Array1::from_iter(pruned.iter().map(|&gone| if gone { T::zero() } else { T::one() }));
        let small = mha.prune_heads(&gone).unwrap();
        let (got, gated, whole) = (attend(&small), attend(&mha.gate(&gates).unwrap()), attend(&mha));
        assert_close(&got, &gated, tolerance);
        // The heads that stay do what they did.
        for (got, want) in [(got.lse.insert_axis(Axis(3)), whole.lse.insert_axis(Axis(3)))]
            .into_iter()
            .chain(got.weights.zip(whole.weights))
        {
            let want = want.select(Axis(1), &stay);
            assert!(got.iter().zip(&want).all(|(a, b)| is_near(a.into_f64(), b.into_f64(), tolerance)));
        }
        // No KV head stays that nobody reads, and none is read by others than before.
        let heads = &small.config().heads;
        assert!((0..heads.num_kv_heads()).all(|kv| heads.query_heads(kv).next().is_some()));
        for (a, b) in stay.iter().enumerate().flat_map(|(a, _)| (0..stay.len()).map(move |b| (a, b))) {
            assert_eq!(heads.kv_head(a) == heads.kv_head(b), map[stay[a]] == map[stay[b]]);
        }
    });
}

#[test]
fn pruning_is_gating_by_zero_in_f64() {
    pruning_is_gating_by_zero::<f64>(1e-13);
}

#[test]
fn pruning_is_gating_by_zero_in_f32() {
    pruning_is_gating_by_zero::<f32>(1e-5);
}

#[test]
fn pruning_the_last_heads_has_the_bits_of_gates() {
    // What is left out stands at the end of every sum.
    let mha = layer::<f64>(&[0, 0, 1, 1], 2, 4);
    let gated = mha.gate(&array![1.0, 1.0, 0.0, 0.0]).unwrap();
    assert_eq!(attend(&mha.prune_heads(&[2, 3]).unwrap()).output, attend(&gated).output);
}

#[test]
fn gates_are_factors_on_the_context() {
    let mha = layer::<f64>(&[0, 1, 0], 2, 1);
    let gates = array![2.0, -0.5, 0.0];
    let gated = mha.gate(&gates).unwrap();
    let w_o = Array2::from_shape_fn((6, 10), |(row, c)| mha.w_o()[[row, c]] * gates[row / 2]);
    assert_eq!(gated.w_o(), w_o);
    assert_eq!(Weights { w_o: mha.w_o().clone(), ..gated.into_weights() }, *mha.weights());
    assert_eq!(mha.gate(&Array1::ones(3)).unwrap(), mha);

    let mut weights = mha.weights().clone();
    weights.w_o.slice_mut(s![4.., ..]).fill(f64::NAN);
    let mut broken = mha.clone();
    broken.set_weights(weights).unwrap();
    assert!(broken.gate(&gates).unwrap().w_o().iter().all(|w| w.is_finite()));
}

#[test]
fn pooling_identical_heads_changes_nothing() {
    fn of<T: Element>(tolerance: f64) {
        // 6 KV heads, of which 3 neighbours each are the same.
        let mut weights = layer::<T>(&[0, 1, 2, 3, 4, 5, 1, 4], 6, 7).into_weights();
        let copy = |matrix: &mut Array2<T>, width: usize| {
            for head in [1, 2, 4, 5] {
                let from = (head / 3 * 3) * width;
                let columns = matrix.slice(s![.., from..from + width]).to_owned();
                matrix.slice_mut(s![.., head * width..(head + 1) * width]).assign(&columns);
            }
        };
        for (matrix, vector, width) in
            [(&mut weights.w_k, &mut weights.b_k, 3), (&mut weights.w_v, &mut weights.b_v, 2)]
        {
            matrix[[0, 0]] = T::from_f64(0.1);
            copy(matrix, width);
            let mut row = vector.take().unwrap().insert_axis(Axis(0));
            copy(&mut row, width);
            *vector = Some(row.index_axis_move(Axis(0), 0));
        }
        let mut mha = layer::<T>(&[0, 1, 2, 3, 4, 5, 1, 4], 6, 7);
        mha.set_weights(weights.clone()).unwrap();
        let pooled = mha.pool_kv_heads(2).unwrap();
        assert_eq!(pooled.config().heads, HeadMap::explicit(&[0, 0, 0, 1, 1, 1, 0, 1], 2).unwrap());
        // Every number is one of those before.
        for head in 0..2 {
            let (new, old) = (3 * head..3 * head + 3, 9 * head..9 * head + 3);
            assert_eq!(pooled.w_k().slice(s![.., new.clone()]), mha.w_k().slice(s![.., old.clone()]));
            assert_eq!(
                pooled.weights().b_k.as_ref().unwrap().slice(s![new]),
                weights.b_k.as_ref().unwrap().slice(s![old])
            );
        }
        assert_close(&attend(&pooled), &attend(&mha), tolerance);
        assert_eq!(mha.pool_kv_heads(6).unwrap(), mha);
    }
    of::<f32>(1e-6);
    of::<f64>(1e-14);
}

#[test]
fn pooled_heads_are_means() {
    let mha = layer::<f64>(&[0, 1, 2, 3], 4, 2);
    for num_kv_heads in [1, 2] {
        let pooled = mha.pool_kv_heads(num_kv_heads).unwrap();
        assert_eq!(pooled.config().heads, HeadMap::grouped(4, num_kv_heads).unwrap());
        let pool = 4 / num_kv_heads;
        for ((row, column), &got) in pooled.w_v().indexed_iter() {
            let (head, c) = (column / 2, column % 2);
            let want = (0..pool).map(|n| mha.w_v()[[row, (head * pool + n) * 2 + c]]).sum::<f64>() / pool as f64;
            assert!((got - want).abs() < 1e-16, "{got}, not {want}");
        }
    }
}

/// A wrong split would take the KV heads of the query heads' places: 4 query heads of width 1 on 2 KV heads.
#[test]
fn heads_of_groups_are_counted_apart() {
    let fused = |rows: [usize; 2]| {
        Array2::from_shape_fn((4, rows[1] - rows[0]), |(c, r)| {
            if (rows[0] + r) % 4 == c { (rows[0] + r + 1) as f64 } else { 0.0 }
        })
    };
    let weights = Weights::new(fused([0, 4]), fused([4, 6]), fused([6, 8]), Array2::eye(4));
    let mha = MultiHeadAttention::builder(4, 4).num_kv_heads(2).from_weights(weights).unwrap();
    let x = array![[1.0, 2.0, 3.0, 4.0]];
    let output = |mha: &MultiHeadAttention<f64>| mha.forward(&x, &Mask::none()).unwrap().into_raw_vec_and_offset().0;
    assert_eq!(output(&mha), [21.0, 21.0, 32.0, 32.0]);
    assert_eq!(output(&mha.prune_heads(&[0, 3]).unwrap()), [0.0, 21.0, 32.0, 0.0]);
    assert_eq!(output(&mha.prune_heads(&[0, 1]).unwrap()), [0.0, 0.0, 32.0, 32.0]);
    assert_eq!(output(&mha.pool_kv_heads(1).unwrap()), [26.5; 4]);
    assert_eq!(output(&mha.prune_heads(&[1]).unwrap().pool_kv_heads(1).unwrap()), [26.5, 0.0, 26.5, 26.5]);
}

#[test]
fn importance_is_the_gradient_of_a_gate() {
    let mut draws = Seeded(6);
    let [q, k, v] = [(2, 3, 4, 5), (2, 1, 6, 5), (2, 1, 6, 2)].map(|shape| draws.array(shape));
    let d_context = draws.array((2, 3, 4, 2));
    let context = attention::forward(&q, &k, &v, &Options::new()).unwrap().context;
    let gradient = gate_gradient(&context, &d_context).unwrap();
    // The loss is linear in the gates, so a whole step is a derivative.
    let loss = |entry: usize, head: usize| {
        let mut gated = context.clone();
        gated.slice_mut(s![entry, head, .., ..]).fill(0.0);
        (&context - &gated).iter().zip(&d_context).map(|(c, d)| c * d).sum::<f64>()
    };
    for ((entry, head), &got) in gradient.indexed_iter() {
        assert!((got - loss(entry, head)).abs() < 1e-15);
    }
    let importance = head_importance(&context, &d_context).unwrap();
    assert!((importance[1] - (gradient[[0, 1]].abs() + gradient[[1, 1]].abs()) / 2.0).abs() < 1e-16);
}

#[test]
fn what_does_not_fit_is_named() {
    let mha = layer::<f32>(&[0, 1, 1, 0, 2, 2], 3, 0);
    let text = |result: multihead::Result<MultiHeadAttention<f32>>| result.unwrap_err().to_string();
    assert_eq!(text(mha.prune_heads(&[0, 6])), "heads: expected query heads below num_heads = 6, got 6");
    assert_eq!(
        text(mha.prune_heads(&[usize::MAX])),
        format!("heads: expected query heads below num_heads = 6, got {}", usize::MAX)
    );
    assert_eq!(
        text(mha.prune_heads(&[5, 4, 3, 2, 1, 0])),
        "heads: expected at least one query head to stay, got all of them"
    );
    assert_eq!(mha.prune_heads(&[3, 3]).unwrap(), mha.prune_heads(&[3]).unwrap());
    assert_eq!(mha.prune_heads(&[]).unwrap(), mha);
    for num_kv_heads in [0, 2, 4, usize::MAX] {
        let want = format!("num_kv_heads: expected a divisor of the present num_kv_heads = 3, got {num_kv_heads}");
        assert_eq!(text(mha.pool_kv_heads(num_kv_heads)), want);
    }
    assert_eq!(text(mha.gate(&Array1::ones(5))), "gates: expected [num_heads] = [6], got [5]");
    assert_eq!(text(mha.gate(&(Array1::ones(6) * f32::NAN))), "gates: expected finite numbers, got NaN");
}
