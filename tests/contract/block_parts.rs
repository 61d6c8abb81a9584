//! Blocks and stacks taken apart, changed and put together again; one block that decodes by itself.

use crate::common::blocks::{D_MODEL, Form, MEMORY_WIDTH, NormKind, Recipe, block, cross, norm, numbers, stack};
use multihead::block::{Block, Call, Norm, Stack};
use multihead::ndarray::{Array3, array, s};
use multihead::{Error, MultiHeadAttention, Workspace};

/// The stack with another attention in its first block.
fn with_first(
    stack: Stack<f64>,
    change: impl FnOnce(MultiHeadAttention<f64>) -> MultiHeadAttention<f64>,
) -> Result<Stack<f64>, Error> {
    let (mut blocks, norm) = stack.into_parts();
    let mut parts = blocks.remove(0).into_parts();
    parts.attention = change(parts.attention);
    blocks.insert(0, Block::from_parts(parts)?);
    Stack::new(blocks, norm)
}

#[test]
fn parts_make_the_same_block() {
    for recipe in Recipe::all() {
        let (block, stack) = (block(recipe, 1), stack(recipe));
        assert_eq!(Block::from_parts(block.clone().into_parts()).unwrap(), block);
        let parts = block.clone().into_parts();
        assert_eq!((&parts.attention, &parts.feed_forward), (block.attention(), block.feed_forward()));
        assert_eq!(&parts.norms, block.norms());
        assert_eq!(parts.cross.as_ref().map(|(cross, norm)| (cross, norm)), block.cross_attention());
        assert_eq!(block.cross_attention().is_some(), recipe.has_cross);

        let (blocks, last) = stack.clone().into_parts();
        assert_eq!((blocks.as_slice(), last.as_ref()), (stack.blocks(), stack.norm()));
        assert_eq!(Stack::new(blocks, last).unwrap(), stack);
    }
}

#[test]
fn a_pruned_head_is_a_gate_of_zero() {
    let (x, memory) = (numbers(7, (2, 5, D_MODEL)), numbers(8, (2, 4, MEMORY_WIDTH)));
    for recipe in Recipe::forms() {
        let call = if recipe.has_cross { Call::new().memory(&memory) } else { Call::new() };
        let pruned = with_first(stack(recipe), |attention| attention.prune_heads(&[1]).unwrap()).unwrap();
        let gated = with_first(stack(recipe), |attention| attention.gate(&array![1.0, 0.0, 1.0]).unwrap()).unwrap();
        assert_eq!(pruned.blocks()[0].attention().config().heads.num_heads(), 2);
        let (got, want) = (pruned.forward(&x, &call).unwrap(), gated.forward(&x, &call).unwrap());
        assert!((&got - &want).iter().all(|gap| gap.abs() < 1e-12), "{recipe:?}");
        assert_ne!(want, stack(recipe).forward(&x, &call).unwrap(), "{recipe:?}");
    }
}

#[test]
fn changed_parts_are_checked_as_new_ones() {
    let recipe = Recipe::new(Form::Post, true);
    let refused = |change: &dyn Fn(&mut multihead::block::BlockParts<f64>)| {
        let mut parts = block(recipe, 1).into_parts();
        change(&mut parts);
        Block::from_parts(parts).unwrap_err().to_string()
    };
    let wide = || MultiHeadAttention::builder(D_MODEL + 2, 2).build().unwrap();
    let narrow = || Norm::rms(numbers(1, 5), 1e-6).unwrap();
    assert_eq!(refused(&|parts| parts.attention = wide()), "norm of attention: expected [d_model] = [8], got [6]");
    assert_eq!(
        refused(&|parts| parts.cross = Some((cross(1), narrow()))),
        "norm of cross: expected [d_model] = [6], got [5]"
    );
    let uneven = MultiHeadAttention::builder(D_MODEL, 2).k_dim(MEMORY_WIDTH).v_dim(7).build().unwrap();
    assert_eq!(
        refused(&|parts| parts.cross = Some((uneven.clone(), norm(NormKind::Layer, 1)))),
        "v_dim of cross: expected k_dim = 5, since both read the memory, got 7"
    );
    assert_eq!(
        refused(&|parts| parts.norms = block(Recipe::new(Form::Parallel, false), 1).norms().clone()),
        "cross: expected norms before or after each part, got parallel parts"
    );
    // A whole block of another width is a block, and no part of the stack.
    let (mut blocks, last) = stack(recipe).into_parts();
    blocks.truncate(1);
    let norm = norm(NormKind::Layer, 1);
    assert!(Stack::new(blocks.clone(), Some(narrow())).is_err());
    assert!(Stack::new(blocks, last.or(Some(norm))).is_ok());
}

#[test]
fn one_block_decodes_as_a_stack_of_one() {
    let (x, memory) = (numbers(7, (2, 6, D_MODEL)), numbers(8, (2, 4, MEMORY_WIDTH)));
    for recipe in Recipe::all() {
        let block = block(recipe, 1);
        let stack = Stack::new(vec![block.clone()], None).unwrap();
        let call = if recipe.has_cross { Call::new().memory(&memory) } else { Call::new() };
        let (mut cache, mut caches) = (block.cache(2, 6).unwrap(), stack.cache(2, 6).unwrap());
        // Without cross-attention there is nothing to keep of a memory.
        block.cache_memory(&call, &mut cache).unwrap();
        stack.cache_memory(&call, &mut caches).unwrap();
        assert_eq!(cache.memory.as_ref().map(|memory| memory.len()), recipe.has_cross.then_some(4));
        let mut workspace = Workspace::new();
        for part in [0..4, 4..5, 5..6] {
            let x = x.slice(s![.., part, ..]);
            let mut y = Array3::from_elem(x.dim(), f64::NAN);
            let mut fork = multihead::block::BlockCache { tokens: cache.tokens.fork().unwrap(), memory: None };
            fork.memory = cache.memory.as_ref().map(|memory| memory.fork().unwrap());
            block.decode_into(&x, &Call::new(), &mut cache, &mut y, &mut workspace).unwrap();
            assert_eq!(y, block.decode(&x, &Call::new(), &mut fork).unwrap(), "{recipe:?}");
            assert_eq!(y, stack.decode(&x, &Call::new(), &mut caches).unwrap(), "{recipe:?}");
            assert_eq!(cache.tokens.lengths(), caches[0].tokens.lengths());
        }
        let full = block.decode(&x, &Call::new(), &mut cache).unwrap_err();
        assert_eq!(full.to_string(), "cache[0]: expected at most capacity = 6 tokens, got 6 and 6 more");
        assert_eq!(cache.tokens.lengths(), [6, 6]);
    }
}

#[test]
fn a_memory_that_does_not_fit_is_refused_before_it_is_cached() {
    let (block, memory) = (block(Recipe::new(Form::Pre, true), 1), numbers(8, (2, 4, MEMORY_WIDTH)));
    let mut cache = block.cache(2, 6).unwrap();
    let refused = |call: &Call<'_, f64>, cache: &mut _| block.cache_memory(call, cache).unwrap_err().to_string();
    assert_eq!(refused(&Call::new(), &mut cache), "memory: expected what cross-attention reads, got none");
    let wide = numbers(8, (2, 4, MEMORY_WIDTH + 1));
    assert!(refused(&Call::new().memory(&wide), &mut cache).starts_with("key: expected [batch, kv_len, k_dim]"));
    // ndarray panics if it is asked to add them.
    for shape in [(2, 3, MEMORY_WIDTH), (1, 4, MEMORY_WIDTH), (2, 4, MEMORY_WIDTH + 1)] {
        let places = numbers(9, shape);
        let call = Call::new().memory(&memory).memory_position_embeddings(&places);
        let text = refused(&call, &mut cache);
        assert!(text.starts_with("memory_position_embeddings: expected [batch, len, d_model] = [2, 4, 5]"), "{text}");
    }
    assert!(cache.memory.is_none());
}
