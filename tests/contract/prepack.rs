//! Weights that were packed beforehand change no bit, and are never those of before.

use crate::common::blocks::{D_MODEL, FeedForwardKind, MEMORY_WIDTH, Recipe, block, feed_forward, numbers, stack};
use crate::common::{Seeded, typed};
use multihead::block::{BlockCache, Call, Stack};
use multihead::ndarray::{Array1, Array2, Array3, s};
use multihead::{Element, Inputs, Level, Mask, MultiHeadAttention, Options, Weights};

/// Widths that end in the middle of panels and chunks, with all biases.
fn layer<T: Element>(seed: u64) -> MultiHeadAttention<T> {
    MultiHeadAttention::builder(150, 6).num_kv_heads(2).k_dim(140).v_dim(9).bias().seed(seed).build().unwrap()
}

fn prepacked<T: Element>(mha: &MultiHeadAttention<T>) -> MultiHeadAttention<T> {
    let mut packed = mha.clone();
    packed.prepack().unwrap();
    assert!(packed.is_prepacked() && !mha.is_prepacked());
    packed
}

/// The output and the weights for so many queries, in two batch entries.
fn attend<T: Element>(mha: &MultiHeadAttention<T>, q_len: usize, level: Level) -> Array3<T> {
    let array = |seed, len, width| typed::<T, _>(&Seeded(seed).array((2, len, width)));
    let (query, key, value) =
        (array(1, q_len, 150), array(2, 33, mha.config().k_dim), array(3, 33, mha.config().v_dim));
    let options = Options::new().level(level);
    mha.attend(&Inputs::new(&query).key_value(&key, &value), &options).unwrap().output
}

fn no_bit_changes<T: Element>() {
    let mha = layer::<T>(1);
    let packed = prepacked(&mha);
    for &level in Level::available() {
        for q_len in [0, 1, 3, 70] {
            assert_eq!(attend(&packed, q_len, level), attend(&mha, q_len, level), "{q_len} queries at {level}");
        }
    }
    // Weights of a file that stores [out, in]: the bits of weights stored row by row.
    let turn = |w: &Array2<T>| w.t().as_standard_layout().into_owned().reversed_axes();
    let Weights { w_q, w_k, w_v, w_o, .. } = mha.weights();
    let weights = Weights { w_q: turn(w_q), w_k: turn(w_k), w_v: turn(w_v), w_o: turn(w_o), ..mha.weights().clone() };
    let turned = prepacked(&mha.config().builder().from_weights(weights).unwrap());
    for q_len in [1, 70] {
        assert_eq!(attend(&turned, q_len, Level::best()), attend(&mha, q_len, Level::best()), "{q_len} queries");
    }
}

#[test]
fn no_bit_of_a_layer_changes() {
    no_bit_changes::<f32>();
    no_bit_changes::<f64>();
}

#[test]
fn the_copy_is_no_part_of_what_a_layer_is() {
    let mha = layer::<f32>(1);
    let mut packed = prepacked(&mha);
    assert_eq!(packed, mha);
    packed.prepack().unwrap();
    assert!(packed.clone().is_prepacked());
    assert_eq!(attend(&packed.clone(), 5, Level::best()), attend(&mha, 5, Level::best()));
    assert_eq!(packed.into_weights(), mha.into_weights());
}

#[test]
fn changed_weights_are_used() {
    let (one, two) = (layer::<f32>(1), layer::<f32>(2));
    let want = attend(&two, 5, Level::best());
    assert_ne!(attend(&one, 5, Level::best()), want);

    let mut mha = prepacked(&one);
    mha.set_weights(two.weights().clone()).unwrap();
    assert!(!mha.is_prepacked());
    assert_eq!(attend(&mha, 5, Level::best()), want);

    // A clone shares the copy, and other weights of either are its own.
    let kept = prepacked(&one);
    let mut changed = kept.clone();
    changed.set_weights(two.weights().clone()).unwrap();
    assert!(kept.is_prepacked() && !changed.is_prepacked());
    assert_eq!(attend(&changed, 5, Level::best()), want);
    assert_eq!(attend(&kept, 5, Level::best()), attend(&one, 5, Level::best()));
    drop(kept.clone());
    drop(changed);
    assert_eq!(attend(&kept, 5, Level::best()), attend(&one, 5, Level::best()));

    // Weights that do not fit change nothing.
    let mut mha = prepacked(&one);
    mha.set_weights(Weights { w_q: Array2::zeros((3, 3)), ..two.weights().clone() }).unwrap_err();
    assert!(mha.is_prepacked());
    assert_eq!(attend(&mha, 5, Level::best()), attend(&one, 5, Level::best()));

    // An optimiser that replaces each parameter.
    let mut mha = prepacked(&one);
    mha.parameters_mut(two.weights()).unwrap().for_each(|(_, mut parameter, new)| parameter.assign(&new));
    assert!(!mha.is_prepacked());
    assert_eq!(attend(&mha, 5, Level::best()), want);
    mha.prepack().unwrap();
    assert_eq!(attend(&mha, 5, Level::best()), want);
}

#[test]
fn layers_with_other_heads_have_their_own_weights() {
    let mha = layer::<f64>(1);
    let packed = prepacked(&mha);
    let gates = Array1::from(vec![1.0, 0.0, 0.5, 2.0, 1.0, 0.25]);
    let changed = |mha: &MultiHeadAttention<f64>| {
        [mha.gate(&gates).unwrap(), mha.prune_heads(&[1, 4]).unwrap(), mha.pool_kv_heads(1).unwrap()]
    };
    for (got, want) in changed(&packed).iter().zip(&changed(&mha)) {
        assert!(!got.is_prepacked());
        assert_eq!(attend(got, 5, Level::best()), attend(want, 5, Level::best()));
    }
}

#[test]
fn training_is_the_same() {
    let mha = MultiHeadAttention::<f64>::builder(20, 4).qk_norm(1e-6).seed(3).build().unwrap();
    let packed = prepacked(&mha);
    let (x, d_y) = (typed::<f64, _>(&Seeded(4).array((2, 40, 20))), typed(&Seeded(5).array((2, 40, 20))));
    let run = |mha: &MultiHeadAttention<f64>| {
        let causal = Mask::causal();
        let options = Options::new().mask(&causal);
        let (y, tape) = mha.forward_train(&Inputs::new(&x), &options).unwrap();
        (y, mha.backward(&tape, &d_y).unwrap())
    };
    assert_eq!(run(&packed), run(&mha));
}

#[test]
fn no_bit_of_a_step_changes() {
    let mha = MultiHeadAttention::<f32>::builder(48, 4).num_kv_heads(2).bias().seed(6).build().unwrap();
    let packed = prepacked(&mha);
    let x = typed::<f32, _>(&Seeded(7).array((2, 9, 48)));
    let run = |mha: &MultiHeadAttention<f32>| {
        let mut cache = mha.cache(2, 9).unwrap();
        [0..5, 5..6, 6..9].map(|tokens| mha.decode(&x.slice(s![.., tokens, ..]), &mut cache).unwrap())
    };
    assert_eq!(run(&packed), run(&mha));
}

#[test]
fn no_bit_of_a_feed_forward_block_changes() {
    let x = numbers(1, (2, 50, D_MODEL));
    for kind in [FeedForwardKind::SwiGlu, FeedForwardKind::Gelu] {
        let (plain, other) = (feed_forward(kind, 1), feed_forward(kind, 2));
        let mut packed = plain.clone();
        packed.prepack().unwrap();
        assert!(packed.is_prepacked() && packed == plain);
        let d_y = numbers(2, (2, 50, D_MODEL));
        for len in [1, 50] {
            let x = x.slice(s![.., ..len, ..]);
            assert_eq!(packed.forward(&x).unwrap(), plain.forward(&x).unwrap(), "{kind:?} {len}");
        }
        assert_eq!(packed.backward(&x, &d_y).unwrap(), plain.backward(&x, &d_y).unwrap(), "{kind:?}");
        packed.set_weights(other.weights().clone()).unwrap();
        assert!(!packed.is_prepacked());
        assert_eq!(packed.forward(&x).unwrap(), other.forward(&x).unwrap());
    }
}

#[test]
fn no_bit_of_a_block_or_a_stack_changes() {
    let (x, memory) = (numbers(1, (2, 5, D_MODEL)), numbers(2, (2, 4, MEMORY_WIDTH)));
    let causal = Mask::causal();
    for recipe in Recipe::all() {
        let call = Call::new().mask(&causal);
        let call = if recipe.has_cross { call.memory(&memory) } else { call };
        let plain = block(recipe, 1);
        let mut packed = plain.clone();
        packed.prepack().unwrap();
        assert!(packed.is_prepacked() && !plain.is_prepacked());
        assert_eq!(packed.forward(&x, &call).unwrap(), plain.forward(&x, &call).unwrap(), "{recipe:?}");

        let plain = stack(recipe);
        let mut packed = plain.clone();
        packed.prepack().unwrap();
        assert_eq!(packed.forward(&x, &call).unwrap(), plain.forward(&x, &call).unwrap(), "{recipe:?}");
        let steps = |stack: &Stack<f64>| {
            let mut caches: Vec<BlockCache<f64>> = stack.cache(2, 5).unwrap();
            if recipe.has_cross {
                stack.cache_memory(&call, &mut caches).unwrap();
            }
            [0..3, 3..4, 4..5]
                .map(|tokens| stack.decode(&x.slice(s![.., tokens, ..]), &Call::new(), &mut caches).unwrap())
        };
        assert_eq!(steps(&packed), steps(&plain), "{recipe:?}");

        // All parameters become 0, so that a block gives what a block of zeros does.
        let zeros = plain.zero_gradients().weights;
        let cleared = |mut stack: Stack<f64>| {
            stack.parameters_mut(&zeros).unwrap().for_each(|(_, mut parameter, zero)| parameter.assign(&zero));
            assert!(stack.blocks().iter().all(|block| !block.is_prepacked()));
            stack.forward(&x, &call).unwrap()
        };
        assert_eq!(cleared(packed), cleared(plain), "{recipe:?}");
    }
}
