//! Steps over a cache: the first one may take memory, the others take none.

use super::common::{Seeded, typed};
use super::{TURN, pool};
use crate::allocations;
#[cfg(feature = "half")]
use multihead::half;
use multihead::ndarray::{Array3, Array4};
use multihead::position::{Alibi, Buckets, Rope, RopeStyle};
use multihead::{
    CacheShape, Element, Inputs, KvCache, Mask, MultiHeadAttention, Options, Storage, Workspace,
    attention::{self, NewTokens},
};
use rayon::ThreadPool;

const BATCH: usize = 2;
const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const WIDTH: usize = 24;

/// Calls `step` with 0, 1, 2 .. `count`; none after the first allocates.
#[track_caller]
fn only_the_first_allocates(what: &str, pool: &ThreadPool, count: usize, mut step: impl FnMut(usize) + Send) {
    let threads = pool.current_num_threads();
    pool.install(|| {
        step(0);
        for i in 1..count {
            assert_eq!(allocations(|| step(i)), 0, "{what}, {threads} threads, step {i} after the first");
        }
    });
}

/// Tokens so that keys get cut into chunks, work gets dealt to the pool and a ring comes round while steps are counted.
const STEPS: usize = 700;

fn core_steps<S: Storage>(
    what: &str,
    pool: &ThreadPool,
    mut cache: KvCache<S>,
    tokens: usize,
    options: &Options<'_, S::Element>,
) {
    let mut draws = Seeded(1);
    let q: Array4<S::Element> = typed(&draws.array((BATCH, HEADS, tokens, WIDTH)));
    let k: Array4<S::Element> = typed(&draws.array((BATCH, KV_HEADS, tokens, WIDTH)));
    let mut context = Array4::zeros((BATCH, HEADS, tokens, WIDTH));
    let mut workspace = Workspace::new();
    only_the_first_allocates(what, pool, STEPS / tokens, |_| {
        attention::extend_into(&NewTokens { q: &q, k: &k, v: &k }, &mut cache, options, &mut context, &mut workspace)
            .unwrap();
        attention::decode_into(&q, &cache, options, &mut context, &mut workspace).unwrap();
        cache.append(&k, &k).unwrap();
        cache.truncate(cache.len() - tokens).unwrap();
    });
}

fn core_of<S: Storage>(storage: &str) {
    let shape =
        CacheShape { batch: BATCH, num_kv_heads: KV_HEADS, capacity: STEPS + 8, head_dim: WIDTH, value_dim: WIDTH };
    let (alibi, buckets) = (Alibi::new(HEADS), Buckets::T5Causal { count: 32, max_distance: 128 });
    let (table, relative_keys) = (typed(&Seeded(2).array((32, HEADS))), typed(&Seeded(3).array((181, WIDTH))));
    let sinks = typed(&Seeded(4).array(HEADS));
    let (causal, window) = (Mask::causal(), Mask::causal() & Mask::window(300, 0));
    let plain = Options::new().mask(&causal);
    let all = Options::new().mask(&window).alibi(&alibi).relative_bias(buckets, &table).relative_keys(&relative_keys);
    for threads in [1, 2] {
        let pool = pool(threads);
        for tokens in [1, 3] {
            for (name, options) in [("plain", plain), ("everything", all.sinks(&sinks).softcap(5.0))] {
                let what = format!("{storage}, {tokens} tokens, {name}");
                core_steps(&what, &pool, KvCache::<S>::new(shape).unwrap(), tokens, &options);
                let ring = KvCache::<S>::ring(CacheShape { capacity: 300, ..shape }).unwrap();
                core_steps(&format!("ring of {what}"), &pool, ring, tokens, &options);
            }
        }
    }
}

#[test]
fn steps_of_the_core_allocate_nothing() {
    let _turn = TURN.lock();
    core_of::<f32>("f32");
    core_of::<f64>("f64");
    #[cfg(feature = "half")]
    core_of::<half::f16>("f16");
    #[cfg(feature = "half")]
    core_of::<half::bf16>("bf16");
}

/// A layer of heads that are normalised and turn.
fn layer<T: Element>() -> MultiHeadAttention<T> {
    let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0).dims(10);
    let builder = MultiHeadAttention::builder(72, HEADS).num_kv_heads(KV_HEADS).bias().qk_norm(1e-6).rope(rope);
    builder.build().unwrap()
}

fn layer_steps<S: Storage>(storage: &str) {
    let layer = layer::<S::Element>();
    let memory: Array3<S::Element> = typed(&Seeded(5).array((BATCH, 700, 72)));
    let mut memories = KvCache::<S>::new(layer.cache_shape(BATCH, 700)).unwrap();
    layer.cache_context(&memory, &mut memories).unwrap();
    let lengths = Mask::key_lengths(&[700, 300]);
    for threads in [1, 2] {
        let pool = pool(threads);
        for tokens in [1, 4] {
            let x: Array3<S::Element> = typed(&Seeded(6).array((BATCH, tokens, 72)));
            let caches = [
                KvCache::<S>::new(layer.cache_shape(BATCH, STEPS)).unwrap(),
                KvCache::<S>::ring(layer.cache_shape(BATCH, 200)).unwrap(),
            ];
            for mut cache in caches {
                let what = format!("layer, {storage}, {tokens} tokens, ring of {:?}", cache.window());
                let (mut y, mut workspace) = (Array3::zeros(x.dim()), Workspace::new());
                only_the_first_allocates(&what, &pool, STEPS / tokens, |_| {
                    layer.decode_into(&x, &mut cache, &mut y, &mut workspace).unwrap();
                    let options = Options::new().mask(&lengths);
                    layer.decode_cross_into(&Inputs::new(&x), &memories, &options, &mut y, &mut workspace).unwrap();
                });
            }
        }
    }
}

#[test]
fn steps_of_a_layer_allocate_nothing() {
    let _turn = TURN.lock();
    layer_steps::<f32>("f32");
    layer_steps::<f64>("f64");
    #[cfg(feature = "half")]
    layer_steps::<half::f16>("f16");
    #[cfg(feature = "half")]
    layer_steps::<half::bf16>("bf16");
}
