//! Blocks and stacks of every form: the first call may take memory, the others take none.

use super::common::blocks::{D_MODEL, MEMORY_WIDTH, Recipe, block, numbers, stack};
use super::{TURN, allocates_nothing_again, pool};
use multihead::block::Call;
use multihead::ndarray::Array3;
use multihead::{Mask, Workspace};

#[test]
fn blocks_and_stacks_allocate_nothing_again() {
    let _turn = TURN.lock();
    let memory = numbers(2, (2, 4, MEMORY_WIDTH));
    let causal = Mask::causal();
    for (threads, len) in [(1, 5), (2, 150)] {
        let pool = pool(threads);
        let x = numbers(1, (2, len, D_MODEL));
        for recipe in Recipe::all() {
            let call = Call::new().mask(&causal);
            let call = if recipe.has_cross { call.memory(&memory) } else { call };
            let (block, mut stack) = (block(recipe, 1), stack(recipe));
            for prepacked in [false, true] {
                if prepacked {
                    stack.prepack().unwrap();
                }
                let (mut y, mut workspace) = (Array3::zeros(x.dim()), Workspace::new());
                allocates_nothing_again(&format!("block of {recipe:?}, {len} tokens"), &pool, || {
                    block.forward_into(&x, &call, &mut y, &mut workspace).unwrap();
                });
                allocates_nothing_again(&format!("stack of {recipe:?}, {len} tokens, {prepacked}"), &pool, || {
                    stack.forward_into(&x, &call, &mut y, &mut workspace).unwrap();
                });
            }
        }
    }
}

#[test]
fn steps_of_a_stack_allocate_nothing_again() {
    let _turn = TURN.lock();
    let memory = numbers(2, (2, 4, MEMORY_WIDTH));
    let x = numbers(1, (2, 1, D_MODEL));
    for threads in [1, 2] {
        let pool = pool(threads);
        for recipe in Recipe::all() {
            let call = if recipe.has_cross { Call::new().memory(&memory) } else { Call::new() };
            let stack = stack(recipe);
            let mut caches = stack.cache(2, 100).unwrap();
            if recipe.has_cross {
                stack.cache_memory(&call, &mut caches).unwrap();
            }
            let (mut y, mut workspace) = (Array3::zeros(x.dim()), Workspace::new());
            allocates_nothing_again(&format!("steps of {recipe:?}"), &pool, || {
                stack.decode_into(&x, &Call::new(), &mut caches, &mut y, &mut workspace).unwrap();
            });
        }
    }
}
