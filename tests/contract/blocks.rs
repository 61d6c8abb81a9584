//! Blocks and stacks are what their formulas say: put together from their parts by hand, with and without caches.

use crate::common::blocks::{
    D_MODEL, FORMS, FeedForwardKind, Form, MEMORY_WIDTH, NormKind, Recipe, attention, block, cross, feed_forward, norm,
    numbers, stack,
};
use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
use multihead::ndarray::{Array3, s};
use multihead::{Inputs, Mask, MultiHeadAttention, Options, Workspace};

/// The block by hand.
fn plain(form: Form, seed: u64, x: &Array3<f64>, memory: Option<&Array3<f64>>, mask: &Mask) -> Array3<f64> {
    let norm = |seed| norm(NormKind::Layer, seed);
    let (n1, n2) = (norm(seed + 1), norm(seed + 2));
    let attend = |x: &Array3<f64>| attention(seed).forward(x, mask).unwrap();
    let feed = |x: &Array3<f64>| feed_forward(FeedForwardKind::SwiGlu, seed + 10).forward(x).unwrap();
    let read = |x: &Array3<f64>| memory.map(|memory| cross(seed + 4).forward_cross(x, memory, &Mask::none()).unwrap());
    let of = |norm: &Norm<f64>, x: &Array3<f64>| norm.forward(x).unwrap();
    match form {
        Form::Pre => {
            let x = x + attend(&of(&n1, x));
            let x = read(&of(&norm(seed + 3), &x)).map_or(x.clone(), |read| x + read);
            &x + feed(&of(&n2, &x))
        }
        Form::Post => {
            let x = of(&n1, &(x + attend(x)));
            let x = read(&x).map_or(x.clone(), |read| of(&norm(seed + 3), &(&x + read)));
            of(&n2, &(&x + feed(&x)))
        }
        Form::Parallel => x + attend(&of(&n1, x)) + feed(&of(&n2, x)),
        Form::ParallelShared => x + attend(&of(&n1, x)) + feed(&of(&n1, x)),
    }
}

fn assert_close(got: &Array3<f64>, want: &Array3<f64>, what: &str) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    let gap =
        (got - want).iter().fold(0.0, |most: f64, gap| if gap.is_nan() { f64::INFINITY } else { most.max(gap.abs()) });
    assert!(gap < 1e-12, "{what}: {gap:e}");
}

#[test]
fn blocks_are_what_the_formulas_say() {
    let (x, memory) = (numbers(7, (2, 5, D_MODEL)), numbers(8, (2, 4, MEMORY_WIDTH)));
    for mask in [Mask::none(), Mask::causal(), Mask::causal() & Mask::last_n(2)] {
        for form in FORMS {
            let what = format!("{form:?} {mask}");
            let got = block(Recipe::new(form, false), 1).forward(&x, &Call::new().mask(&mask)).unwrap();
            assert_close(&got, &plain(form, 1, &x, None, &mask), &what);
            if [Form::Pre, Form::Post].contains(&form) {
                let call = Call::new().mask(&mask).memory(&memory);
                let got = block(Recipe::new(form, true), 1).forward(&x, &call).unwrap();
                assert_close(&got, &plain(form, 1, &x, Some(&memory), &mask), &what);
            }
        }
    }
}

#[test]
fn tokens_without_a_batch_and_of_any_strides_give_the_same() {
    let wide = numbers(7, (2, 5, 2 * D_MODEL));
    let x = wide.slice(s![.., ..;-1, ..;2]);
    let block = block(Recipe::new(Form::Pre, false), 1);
    let want = block.forward(&x.to_owned(), &Call::new()).unwrap();
    assert_eq!(block.forward(&x, &Call::new()).unwrap(), want);
    assert_eq!(block.forward(&x.slice(s![1, .., ..]), &Call::new()).unwrap(), want.slice(s![1, .., ..]));
    assert_eq!(block.forward(&Array3::zeros((0, 5, D_MODEL)), &Call::new()).unwrap().shape(), [0, 5, D_MODEL]);
}

#[test]
fn arrays_of_the_caller_get_what_is_returned() {
    let memory = numbers(8, (2, 4, MEMORY_WIDTH));
    let causal = Mask::causal();
    // What another stack left there does not matter.
    let mut workspace = Workspace::new();
    for recipe in Recipe::all() {
        let call = Call::new().mask(&causal);
        let call = if recipe.has_cross { call.memory(&memory) } else { call };
        let (block, stack) = (block(recipe, 1), stack(recipe));
        for len in [5, 3] {
            let x = numbers(7, (2, len, D_MODEL));
            let mut wide = Array3::from_elem((2, len, 2 * D_MODEL), f64::NAN);
            let mut y = wide.slice_mut(s![.., .., ..;-2]);
            block.forward_into(&x, &call, &mut y, &mut workspace).unwrap();
            assert_eq!(y, block.forward(&x, &call).unwrap(), "{recipe:?}");
            y.fill(f64::NAN);
            stack.forward_into(&x, &call, &mut y, &mut workspace).unwrap();
            assert_eq!(y, stack.forward(&x, &call).unwrap(), "{recipe:?}");
            assert!(wide.slice(s![.., .., ..;2]).iter().all(|x| x.is_nan()), "only what was given is written");
        }

        let mut caches = [stack.cache(2, 5).unwrap(), stack.cache(2, 5).unwrap()];
        for cache in caches.iter_mut().filter(|_| recipe.has_cross) {
            stack.cache_memory(&call, cache).unwrap();
        }
        let [cache, other] = &mut caches;
        for len in [3, 1] {
            let (x, mut y) = (numbers(9, (2, len, D_MODEL)), Array3::from_elem((2, len, D_MODEL), f64::NAN));
            stack.decode_into(&x, &Call::new(), cache, &mut y, &mut workspace).unwrap();
            assert_eq!(y, stack.decode(&x, &Call::new(), other).unwrap(), "{recipe:?}");
        }

        let (x, mut y) = (numbers(9, (2, 1, D_MODEL)), Array3::from_elem((2, 2, D_MODEL), 7.0));
        let text = "output: expected [batch, len, d_model] = [2, 1, 6], got [2, 2, 6]";
        assert_eq!(block.forward_into(&x, &call, &mut y, &mut workspace).unwrap_err().to_string(), text);
        assert_eq!(stack.forward_into(&x, &call, &mut y, &mut workspace).unwrap_err().to_string(), text);
        let error = stack.decode_into(&x, &Call::new(), cache, &mut y, &mut workspace).unwrap_err();
        assert_eq!((error.to_string(), cache[0].tokens.lengths()), (text.to_owned(), &[4, 4][..]));
        assert!(y.iter().all(|&y| y == 7.0));
    }
}

#[test]
fn positions_are_added_to_queries_and_keys_only() {
    let (x, places) = (numbers(7, (2, 5, D_MODEL)), numbers(9, (2, 5, D_MODEL)));
    let (memory, memory_places) = (numbers(8, (2, 4, MEMORY_WIDTH)), numbers(10, (2, 4, MEMORY_WIDTH)));
    let block = block(Recipe::new(Form::Post, true), 1);
    let call = Call::new().position_embeddings(&places).memory(&memory).memory_position_embeddings(&memory_places);
    let got = block.forward(&x, &call).unwrap();

    let norm = |seed| norm(NormKind::Layer, seed);
    let placed = &x + &places;
    let own = attention(1).attend(&Inputs::new(&placed).key_value(&placed, &x), &Options::new()).unwrap().output;
    let x = norm(2).forward(&(&x + own)).unwrap();
    let inputs = &x + &places;
    let key = &memory + &memory_places;
    let read = cross(5).attend(&Inputs::new(&inputs).key_value(&key, &memory), &Options::new()).unwrap().output;
    let x = norm(4).forward(&(&x + read)).unwrap();
    let want = norm(3).forward(&(&x + feed_forward(FeedForwardKind::SwiGlu, 11).forward(&x).unwrap())).unwrap();
    assert_close(&got, &want, "positions");
}

#[test]
fn caches_change_nothing() {
    let (x, memory) = (numbers(7, (2, 9, D_MODEL)), numbers(8, (2, 4, MEMORY_WIDTH)));
    let window = Mask::causal() & Mask::last_n(3);
    let padding = Mask::key_lengths(&[4, 2]);
    for recipe in Recipe::forms() {
        for mask in [None, Some(&window)] {
            let stack = stack(recipe);
            let causal = Mask::causal();
            let mut call = Call::new().mask(mask.unwrap_or(&causal)).memory_mask(&padding);
            let steps = mask.map_or(Call::new(), |mask| Call::new().mask(mask)).memory_mask(&padding);
            let mut caches = stack.cache(2, 9).unwrap();
            if recipe.has_cross {
                call = call.memory(&memory);
                stack.cache_memory(&Call::new().memory(&memory), &mut caches).unwrap();
            }
            let want = stack.forward(&x, &call).unwrap();
            let mut got = Array3::zeros(x.dim());
            for part in [0..4, 4..5, 5..6, 6..9] {
                let part = s![.., part, ..];
                got.slice_mut(part).assign(&stack.decode(&x.slice(part), &steps, &mut caches).unwrap());
            }
            assert_close(&got, &want, &format!("{recipe:?} {mask:?}"));
        }
    }
}

#[test]
fn a_failed_step_leaves_all_caches_as_they_were() {
    let stack = stack(Recipe::new(Form::Pre, true));
    let (x, memory) = (numbers(7, (2, 3, D_MODEL)), numbers(8, (2, 4, MEMORY_WIDTH)));
    let mut caches = stack.cache(2, 4).unwrap();
    let refused = |caches: &mut Vec<_>, x: &Array3<f64>, call: &Call<'_, f64>| {
        stack.decode(x, call, caches).unwrap_err().to_string()
    };
    assert_eq!(refused(&mut caches, &x, &Call::new()), "memory: expected what cross-attention reads, got none");
    stack.cache_memory(&Call::new().memory(&memory), &mut caches).unwrap();
    stack.decode(&x, &Call::new(), &mut caches).unwrap();
    // The second block alone is full.
    caches[0] = stack.cache(2, 9).unwrap().remove(0);
    let mut other = stack.cache(2, 9).unwrap();
    stack.cache_memory(&Call::new().memory(&memory), &mut other).unwrap();
    caches[0].memory = other.remove(0).memory;
    assert!(refused(&mut caches, &x, &Call::new()).starts_with("cache[0]: expected at most capacity = 4 tokens"));
    assert_eq!((caches[0].tokens.len(), caches[1].tokens.len()), (0, 3));
    let wrong = Array3::zeros((2, 3, D_MODEL + 1));
    assert!(refused(&mut caches, &wrong, &Call::new()).starts_with("x: expected [batch, len, d_model] = [_, _, 6]"));
    let places = Array3::zeros((2, 1, D_MODEL));
    let text = refused(&mut caches, &x, &Call::new().position_embeddings(&places));
    assert!(text.starts_with("position_embeddings: expected"), "{text}");
    caches.pop();
    assert_eq!(refused(&mut caches, &x, &Call::new()), "caches: expected [blocks] = [2], got [1]");
}

#[test]
fn parts_that_do_not_fit_are_refused() {
    let (norm, feed_forward) = (|seed| norm(NormKind::Layer, seed), |seed| feed_forward(FeedForwardKind::SwiGlu, seed));
    let narrow = Norm::rms(numbers(1, 5), 1e-6).unwrap();
    let norms = Norms::Pre { attention: norm(1), feed_forward: narrow.clone() };
    let text = Block::new(attention(1), feed_forward(1), norms).unwrap_err().to_string();
    assert_eq!(text, "norm of feed_forward: expected [d_model] = [6], got [5]");
    let weights = FeedForwardWeights::new(numbers(1, (5, 8)), numbers(2, (8, 5)));
    let norms = Norms::Pre { attention: norm(1), feed_forward: norm(2) };
    let other = FeedForward::new(weights, Activation::Gelu).unwrap();
    assert!(Block::new(attention(1), other, norms.clone()).is_err());
    assert!(Block::new(cross(1), feed_forward(1), norms).is_err());
    assert!(block(Recipe::new(Form::Parallel, false), 1).cross(cross(1), norm(1)).is_err());
    assert!(block(Recipe::new(Form::Pre, false), 1).cross(cross(1), narrow.clone()).is_err());
    assert!(Stack::new(vec![block(Recipe::new(Form::Pre, false), 1)], Some(narrow)).is_err());

    let (x, memory) = (numbers(7, (2, 3, D_MODEL)), numbers(8, (2, 4, MEMORY_WIDTH)));
    let unread =
        block(Recipe::new(Form::Pre, false), 1).forward(&x, &Call::new().memory(&memory)).unwrap_err().to_string();
    assert_eq!(unread, "memory: expected cross-attention that reads it, got a block without");
    let missing = block(Recipe::new(Form::Pre, true), 1).forward(&x, &Call::new()).unwrap_err().to_string();
    assert_eq!(missing, "memory: expected what cross-attention reads, got none");
    let places = Array3::zeros((2, 4, MEMORY_WIDTH));
    let lonely = block(Recipe::new(Form::Pre, true), 1)
        .forward(&x, &Call::new().memory_position_embeddings(&places))
        .unwrap_err()
        .to_string();
    assert_eq!(lonely, "memory_position_embeddings: expected a memory that they belong to, got none");
}

#[test]
fn threads_change_no_bit() {
    const D_MODEL: usize = 12;
    let x = numbers(7, (2, 200, D_MODEL)).mapv(|x| x as f32);
    let attention = MultiHeadAttention::<f32>::builder(D_MODEL, 3).seed(1).build().unwrap();
    let weights = FeedForwardWeights::new(
        numbers(3, (D_MODEL, 400)).mapv(|x| x as f32),
        numbers(4, (400, D_MODEL)).mapv(|x| x as f32),
    );
    let norm = || Norm::rms(numbers(1, D_MODEL).mapv(|x| x as f32), 1e-6).unwrap();
    let feed_forward = FeedForward::new(weights, Activation::Gelu).unwrap();
    let block = Block::new(attention, feed_forward, Norms::Pre { attention: norm(), feed_forward: norm() }).unwrap();
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| block.forward(&x, &Call::new().mask(&Mask::causal())).unwrap())
    };
    let want = on(1);
    assert!(on(2) == want && on(4) == want);
}
