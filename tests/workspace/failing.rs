//! Steps that there is no memory for, half-way: the caches are as they were.

use super::common::blocks::numbers;
use super::{LIMIT, TURN, pool};
use multihead::block::{Activation, Block, BlockCache, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
use multihead::ndarray::{Array1, Array3, Axis, s};
use multihead::{Error, KvCache, Mask, MultiHeadAttention, Result, Workspace};

const BATCH: usize = 2;
const D_MODEL: usize = 4;
/// The window of rings. They take 64 tokens at a time.
const WINDOW: usize = 20;
/// Hidden numbers of the second block, whose feed-forward block needs more than [`ROOM`] for two tokens.
const WIDE: usize = 1 << 14;
/// Bytes that are enough for everything else.
const ROOM: usize = 256 << 10;

fn block(seed: u64, width: usize) -> Block<f64> {
    let attention = MultiHeadAttention::builder(D_MODEL, 2).seed(seed).build().unwrap();
    let weights = FeedForwardWeights::new(numbers(seed, (D_MODEL, width)), numbers(seed + 1, (width, D_MODEL)));
    let feed_forward = FeedForward::new(weights, Activation::Relu).unwrap();
    let norm = || Norm::rms(Array1::ones(D_MODEL), 1e-6).unwrap();
    Block::new(attention, feed_forward, Norms::Pre { attention: norm(), feed_forward: norm() }).unwrap()
}

fn stack() -> Stack<f64> {
    Stack::new(vec![block(1, 8), block(3, WIDE)], None).unwrap()
}

fn caches(stack: &Stack<f64>, rings: bool) -> Vec<BlockCache<f64>> {
    let mut caches = stack.cache(BATCH, 400).unwrap();
    for (cache, block) in caches.iter_mut().zip(stack.blocks()).filter(|_| rings) {
        cache.tokens = KvCache::ring(block.attention().cache_shape(BATCH, WINDOW)).unwrap();
    }
    caches
}

fn lengths(caches: &[BlockCache<f64>]) -> Vec<&[usize]> {
    caches.iter().map(|cache| cache.tokens.lengths()).collect()
}

/// Runs `call` without memory for more than [`ROOM`] bytes at a time.
fn short_of_memory<R>(call: impl FnOnce() -> Result<R>) -> Error {
    LIMIT.set(ROOM);
    let refused = call();
    LIMIT.set(usize::MAX);
    refused.map(drop).unwrap_err()
}

/// Tokens that come before, and the step that fails at first; the same caches without the failure are the measure.
fn check(rings: bool, before: usize, step: usize) {
    let what = format!("rings {rings}, {step} tokens after {before}");
    let (stack, x) = (stack(), numbers(7, (BATCH, before + step, D_MODEL)));
    let (prompt, new) = x.view().split_at(Axis(1), before);
    // Entries of different lengths, where there are any.
    let ragged = Mask::causal() & Mask::query_lengths(&[before, before / 2]);
    let [mut got, mut want] = [caches(&stack, rings), caches(&stack, rings)];
    for caches in [&mut got, &mut want].into_iter().filter(|_| before > 0) {
        stack.decode(&prompt, &Call::new().mask(&ragged), caches).unwrap();
    }
    let mut y = Array3::from_elem((BATCH, step, D_MODEL), 7.0);
    let mut workspace = Workspace::new();
    for _ in 0..2 {
        let error = short_of_memory(|| stack.decode_into(&new, &Call::new(), &mut got, &mut y, &mut workspace));
        assert!(matches!(error, Error::TooLarge { argument: "hidden", .. }), "{what}: {error}");
        assert!(y.iter().all(|&y| y == 7.0), "{what}");
        assert_eq!(lengths(&got), lengths(&want), "{what}");
    }
    stack.decode_into(&new, &Call::new(), &mut got, &mut y, &mut workspace).unwrap();
    assert_eq!(y, stack.decode(&new, &Call::new(), &mut want).unwrap(), "{what}");
}

#[test]
fn a_stack_that_fails_late_leaves_all_caches_as_they_were() {
    let _turn = TURN.lock();
    pool(1).install(|| {
        for rings in [false, true] {
            for (before, step) in [(0, 2), (5, 2), (150, 3), (150, 64), (0, 100)] {
                check(rings, before, step);
            }
        }
        check(false, 150, 100);
    });
}

#[test]
fn a_ring_that_has_lost_keys_leaves_all_caches_empty() {
    let _turn = TURN.lock();
    pool(1).install(|| {
        let (stack, x) = (stack(), numbers(7, (BATCH, 300, D_MODEL)));
        let mut caches = caches(&stack, true);
        // The second block's cache could go back; it would not fit the first one's.
        caches[1].tokens = KvCache::new(stack.blocks()[1].attention().cache_shape(BATCH, 400)).unwrap();
        stack.decode(&x.slice(s![.., ..150, ..]), &Call::new(), &mut caches).unwrap();
        let error = short_of_memory(|| stack.decode(&x.slice(s![.., 150.., ..]), &Call::new(), &mut caches));
        assert!(matches!(error, Error::TooLarge { argument: "hidden", .. }), "{error}");
        assert_eq!(lengths(&caches), [[0, 0]; 2]);
    });
}

#[test]
fn a_block_that_fails_late_leaves_its_cache_as_it_was() {
    let _turn = TURN.lock();
    pool(1).install(|| {
        let (block, x) = (block(3, WIDE), numbers(7, (BATCH, 2, D_MODEL)));
        let mut cache = block.cache(BATCH, 9).unwrap();
        let error = short_of_memory(|| block.decode(&x, &Call::new(), &mut cache));
        assert!(matches!(error, Error::TooLarge { argument: "hidden", .. }), "{error}");
        assert_eq!(cache.tokens.lengths(), [0, 0]);
        let y = block.decode(&x, &Call::new(), &mut cache).unwrap();
        assert_eq!((cache.tokens.lengths(), y.dim()), (&[2, 2][..], (BATCH, 2, D_MODEL)));
    });
}
