//! A workspace that is used again: calls after the first allocate nothing, and what it holds never matters. And calls
//! that there is no memory for.
//!
//! Allocations are counted on the threads of a pool of the test's own, and calls are made from inside its `install`: a
//! call from outside is handed over through rayon's queue, which may allocate, and the test harness allocates on
//! threads of its own.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// A counting allocator cannot be written without it.
#![allow(unsafe_code)]

mod blocks;
#[path = "../common/mod.rs"]
mod common;
mod decode;
mod failing;

use common::{Keep, Precision, Seeded, Way, assert_bits, typed, widened};
use multihead::attention::NewTokens;
use multihead::ndarray::{Array2, Array3, Array4, s};
use multihead::position::{Alibi, Buckets};
use multihead::{
    Attended, CacheShape, Element, Gradients, HeadMap, Inputs, KvCache, LayerGradients, Level, Mask,
    MultiHeadAttention, Options, Path, Rope, RopeStyle, Saved, Workspace, attention,
};
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting what is asked for on the threads that are watched.
struct Counting;

static CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    static WATCHED: Cell<bool> = const { Cell::new(false) };
    /// The most bytes that the thread is given at a time.
    static LIMIT: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn count() {
    if WATCHED.try_with(Cell::get).unwrap_or(false) {
        CALLS.fetch_add(1, Relaxed);
    }
}

/// Whether there is no memory for so many bytes.
fn is_refused(size: usize) -> bool {
    LIMIT.try_with(Cell::get).is_ok_and(|limit| size > limit)
}

// SAFETY: every call is handed on to `System` as it came, or answered with null, which says that there is no memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        if is_refused(layout.size()) {
            return std::ptr::null_mut();
        }
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        if is_refused(size) {
            return std::ptr::null_mut();
        }
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Held by each test that counts, since the pools of all tests count into one number.
static TURN: Mutex<()> = Mutex::new(());

/// A pool whose threads are watched and have done all that rayon does once for each thread.
fn pool(threads: usize) -> ThreadPool {
    let pool = ThreadPoolBuilder::new().num_threads(threads).start_handler(|_| WATCHED.set(true)).build().unwrap();
    pool.broadcast(|_| std::hint::black_box(()));
    pool.install(|| rayon::join(|| (), || ()));
    // Idle threads look for work at once, and then sleep.
    std::thread::sleep(std::time::Duration::from_millis(20));
    pool
}

/// How many allocations `call` makes on the threads that are watched.
fn allocations(call: impl FnOnce()) -> usize {
    let before = CALLS.load(Relaxed);
    call();
    CALLS.load(Relaxed) - before
}

/// The call once, and then without an allocation.
#[track_caller]
fn allocates_nothing_again(what: &str, pool: &ThreadPool, mut call: impl FnMut() + Send) {
    let threads = pool.current_num_threads();
    pool.install(|| {
        call();
        for again in 1..=8 {
            assert_eq!(allocations(&mut call), 0, "{what}, {threads} threads, call {again} after the first");
        }
    });
}

#[test]
fn the_counter_counts() {
    let _turn = TURN.lock();
    pool(1).install(|| {
        assert_eq!(allocations(|| drop(std::hint::black_box(vec![1u8; 100]))), 1);
    });
}

const BATCH: usize = 2;
const HEADS: usize = 6;

/// A call without outputs takes nothing from the next one: a layer in a loop may meet an empty batch.
#[test]
fn an_empty_call_takes_no_memory_away() {
    let _turn = TURN.lock();
    let pool = pool(2);
    let mut draws = Seeded(3);
    let (x, none) = (typed::<f32, _>(&draws.array((1, 2, 40, 24))), Array4::<f32>::zeros((0, 2, 40, 24)));
    let (alibi, table) = (Alibi::new(2), typed(&draws.array((32, 2))));
    let buckets = Buckets::T5 { count: 32, max_distance: 128 };
    for (what, options) in
        [("ALiBi", Options::new().alibi(&alibi)), ("a table", Options::new().relative_bias(buckets, &table))]
    {
        let mut workspace = Workspace::new();
        let mut outputs = [&x, &none].map(|q| Attended::zeros(q, q, q, &options).unwrap());
        allocates_nothing_again(&format!("forward with {what}"), &pool, || {
            for (q, attended) in [&x, &none].into_iter().zip(&mut outputs) {
                attention::forward_saving_into(q, q, q, &options, attended, &mut workspace).unwrap();
            }
        });
        let [full, empty] = &outputs;
        let saved = [(&x, full), (&none, empty)].map(|(q, attended)| Saved {
            q,
            k: q,
            v: q,
            context: &attended.context,
            lse: &attended.lse,
        });
        // A table has a gradient to fill also where there are no batch entries; ALiBi has none.
        let mut workspace = Workspace::new();
        let mut gradients = saved.each_ref().map(|saved| Gradients::zeros(saved, &options).unwrap());
        allocates_nothing_again(&format!("backward with {what}"), &pool, || {
            for (saved, gradients) in saved.iter().zip(&mut gradients) {
                attention::backward_into(saved, saved.q, &options, gradients, &mut workspace).unwrap();
            }
        });
        // Steps over a cache, and tokens that the cache refuses.
        let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 50, head_dim: 24, value_dim: 24 };
        let mut cache = KvCache::<f32>::new(shape).unwrap();
        cache.append(&x, &x).unwrap();
        let (mut context, mut workspace) = (Array4::zeros((1, 2, 40, 24)), Workspace::new());
        let mut no_context = Array4::zeros((1, 2, 0, 24));
        allocates_nothing_again(&format!("decode with {what}"), &pool, || {
            attention::decode_into(&x, &cache, &options, &mut context, &mut workspace).unwrap();
            let q = x.slice(s![.., .., ..0, ..]);
            attention::decode_into(&q, &cache, &options, &mut no_context, &mut workspace).unwrap();
            let tokens = NewTokens { q: &q, k: &q, v: &q };
            attention::extend_into(&tokens, &mut cache, &options, &mut no_context, &mut workspace).unwrap();
            let tokens = NewTokens { q: &x, k: &x, v: &x };
            assert!(attention::extend_into(&tokens, &mut cache, &options, &mut context, &mut workspace).is_err());
        });
    }
}

/// Masks of every kind, for [`BATCH`] entries of `len` queries and keys.
fn masks(len: usize) -> [(&'static str, Mask); 5] {
    let keep = Array4::from_shape_fn((1, 1, len, len), |(_, _, i, j)| (3 * i + j) % 5 != 0);
    let lengths = Mask::key_lengths(&[len, len - 9]);
    [
        ("no mask", Mask::none()),
        ("causal", Mask::causal()),
        ("key lengths", lengths.clone()),
        ("keep", Mask::keep(&keep).unwrap()),
        ("all masks", Mask::causal() & Mask::window(70, 3) & lengths & Mask::keep(&keep).unwrap()),
    ]
}

#[test]
fn the_core_allocates_nothing_again() {
    let _turn = TURN.lock();
    // 40 queries stay on the calling thread, 300 are dealt to the pool.
    for (len, threads) in [(40, 1), (40, 2), (300, 1), (300, 2), (300, 3)] {
        let pool = pool(threads);
        let mut draws = Seeded(1);
        let q: Array4<f32> = typed(&draws.array((BATCH, HEADS, len, 24)));
        let bias: Array4<f32> = typed(&draws.array((1, HEADS, len, len)));
        let sinks = typed(&draws.array(HEADS));
        let (alibi, buckets) = (Alibi::new(HEADS), Buckets::T5 { count: 32, max_distance: 128 });
        let (table, relative_keys) = (typed(&draws.array((32, HEADS))), typed(&draws.array((181, 24))));
        let maps = [
            ("grouped", 3, None),
            ("explicit", 4, Some(HeadMap::explicit(&[3, 0, 0, 2, 3, 3], 4).unwrap())),
            ("one to one", HEADS, None),
        ];
        for (map_name, num_kv_heads, map) in maps {
            let k: Array4<f32> = typed(&draws.array((BATCH, num_kv_heads, len, 24)));
            let v: Array4<f32> = typed(&draws.array((BATCH, num_kv_heads, len, 20)));
            for (mask_name, mask) in masks(len) {
                for extras in [false, true] {
                    let mut options = Options::new().mask(&mask);
                    if extras {
                        options = options.bias(&bias).unwrap().sinks(&sinks).softcap(5.0);
                        options = options.alibi(&alibi).relative_bias(buckets, &table).relative_keys(&relative_keys);
                    }
                    if let Some(map) = &map {
                        options = options.heads(map);
                    }
                    let mut context = Array4::zeros((BATCH, HEADS, len, 20));
                    let mut workspace = Workspace::new();
                    let what = format!("{len} queries, {map_name}, {mask_name}, biases, sinks and cap: {extras}");
                    allocates_nothing_again(&what, &pool, || {
                        attention::forward_into(&q, &k, &v, &options, &mut context, &mut workspace).unwrap();
                    });
                }
            }
        }
    }
}

/// A layer of heads of width 12 that are normalised and turn; three query heads share a KV head, or by a map of its own.
fn layer<T: Element>(map: Option<&[usize]>) -> MultiHeadAttention<T> {
    let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0).dims(10);
    let builder = MultiHeadAttention::builder(72, HEADS).head_dim(12).bias().qk_norm(1e-6).rope(rope);
    match map {
        None => builder.num_kv_heads(2).build().unwrap(),
        Some(map) => builder.kv_of_head(map).build().unwrap(),
    }
}

#[test]
fn the_layer_allocates_nothing_again() {
    let _turn = TURN.lock();
    for (len, threads) in [(10, 1), (40, 2), (300, 1), (300, 2), (300, 3)] {
        let pool = pool(threads);
        let x: Array3<f32> = typed(&Seeded(2).array((BATCH, len, 72)));
        for (map, prepacked) in [(None, false), (None, true), (Some(&[3, 0, 0, 2, 3, 3][..]), false)] {
            let mut layer = layer::<f32>(map);
            if prepacked {
                layer.prepack().unwrap();
            }
            for (name, mask) in masks(len) {
                let mut y = Array3::zeros(x.dim());
                let mut workspace = Workspace::new();
                let what = format!("layer, {len} tokens, map {map:?}, prepacked {prepacked}, {name}");
                allocates_nothing_again(&what, &pool, || {
                    layer.forward_into(&x, &mask, &mut y, &mut workspace).unwrap();
                });
            }
        }
    }
}

#[test]
fn the_layer_allocates_nothing_again_for_other_strides_and_a_bias() {
    let _turn = TURN.lock();
    let len = 150;
    let layer = layer::<f32>(None);
    let mut draws = Seeded(3);
    let x: Array3<f32> = typed(&draws.array((BATCH, 72, 2 * len)));
    let x = x.slice(s![.., .., ..;2]).permuted_axes([0, 2, 1]);
    let bias: Array2<f32> = typed(&draws.array((len, len)));
    let options = Options::new().bias(&bias).unwrap();
    let mut storage = Array3::zeros((72, len, BATCH));
    for threads in [1, 2] {
        let pool = pool(threads);
        let mut workspace = Workspace::new();
        allocates_nothing_again("layer with turned arrays", &pool, || {
            let mut y = storage.view_mut().reversed_axes();
            layer.attend_into(&Inputs::new(&x), &options, &mut y, &mut workspace).unwrap();
        });
    }
}

#[test]
fn training_allocates_nothing_again() {
    let _turn = TURN.lock();
    for (len, threads) in [(10, 1), (40, 2), (90, 3)] {
        let pool = pool(threads);
        let mut draws = Seeded(7);
        let x: Array3<f32> = typed(&draws.array((BATCH, len, 72)));
        let context: Array3<f32> = typed(&draws.array((BATCH, len, 72)));
        let bias: Array2<f32> = typed(&draws.array((len, len)));
        for map in [None, Some(&[3, 0, 0, 2, 3, 3][..])] {
            // Two layers, whose tapes are there at the same time.
            let layers = [layer::<f32>(map), layer(None)];
            for (name, mask) in [masks(len)[1].clone(), masks(len)[4].clone()] {
                let plain = Options::new().mask(&mask).dropout(0.1, 3);
                for options in [plain, plain.recompute(), plain.bias(&bias).unwrap().bias_gradient()] {
                    let inputs = [Inputs::new(&x).context(&context), Inputs::new(&context)];
                    let mut gradients =
                        [0, 1].map(|i| LayerGradients::zeros(&layers[i], &inputs[i], &options).unwrap());
                    let mut y = Array3::zeros(x.dim());
                    let mut workspace = Workspace::new();
                    let what = format!("training, {len} tokens, map {map:?}, {name}");
                    allocates_nothing_again(&what, &pool, || {
                        let tapes = [0, 1].map(|i| {
                            layers[i].forward_train_into(&inputs[i], &options, &mut y, &mut workspace).unwrap()
                        });
                        let [first, second] = tapes;
                        layers[1].backward_into(second, &y, &mut gradients[1], &mut workspace).unwrap();
                        layers[0].backward_add(first, &y, &mut gradients[0], &mut workspace).unwrap();
                    });
                }
            }
        }
    }
}

/// Every path, and every level of the tiled one. The precision is that of the call.
fn some_ways() -> Vec<Way> {
    let plain = [Path::Auto, Path::Dense, Path::Reference].map(|path| Way::new(Precision::F32, path, Keep::Nothing));
    let tiled = Level::available()
        .iter()
        .map(|&level| Way { level: Some(level), ..Way::new(Precision::F32, Path::Tiled, Keep::Nothing) });
    plain.into_iter().chain(tiled).collect()
}

/// Queries, keys and values of any lengths.
fn arrays<T: Element>(seed: u64, len: usize, width: usize) -> [Array4<T>; 3] {
    let mut draws = Seeded(seed);
    [HEADS, 2, 2].map(|heads| typed(&draws.array((BATCH, heads, len, width))))
}

fn core_forgets<T: Element>() {
    let [q, k, v] = arrays::<T>(4, 77, 19);
    let nan = [HEADS, 2, 2].map(|heads| Array4::from_elem((BATCH, heads, 203, 40), T::nan()));
    let bias: Array2<T> = typed(&Seeded(5).array((77, 77)));
    let nan_bias = Array2::from_elem((203, 203), T::nan());
    for way in some_ways() {
        for (mask_name, mask) in masks(77) {
            for biased in [false, true] {
                let mut first = way.choose(Options::new());
                let mut then = way.choose(Options::new()).mask(&mask);
                if biased {
                    (first, then) = (first.bias(&nan_bias).unwrap(), then.bias(&bias).unwrap());
                }
                let mut workspace = Workspace::new();
                let mut garbage = Array4::zeros((BATCH, HEADS, 203, 40));
                attention::forward_into(&nan[0], &nan[1], &nan[2], &first, &mut garbage, &mut workspace).unwrap();
                assert!(garbage.iter().all(|x| x.is_nan()), "{way}");
                let mut got = Array4::from_elem((BATCH, HEADS, 77, 19), T::nan());
                attention::forward_into(&q, &k, &v, &then, &mut got, &mut workspace).unwrap();
                let want = attention::forward(&q, &k, &v, &then).unwrap().context;
                assert_bits(&format!("{way}, {mask_name}, bias {biased}"), &widened(&got), &widened(&want));
                assert!(want.iter().all(|x| x.is_finite()), "{way}, {mask_name}");
            }
        }
    }
}

#[test]
fn the_core_forgets_what_a_workspace_held() {
    core_forgets::<f32>();
    core_forgets::<f64>();
}

fn layer_forgets<T: Element>() {
    let layer = layer::<T>(None);
    // The wide layer's buffers are longer in every direction.
    let rope = Rope::new(RopeStyle::Interleaved, 100.0);
    let wide = MultiHeadAttention::<T>::builder(144, HEADS).rope(rope).build().unwrap();
    let x: Array3<T> = typed(&Seeded(6).array((BATCH, 77, 72)));
    for way in some_ways() {
        for (mask_name, mask) in masks(77) {
            let options = way.choose(Options::new()).mask(&mask);
            let mut workspace = Workspace::new();
            let mut garbage = Array3::zeros((BATCH, 203, 144));
            let nan = Array3::from_elem((BATCH, 203, 144), T::nan());
            wide.attend_into(&Inputs::new(&nan), &Options::new(), &mut garbage, &mut workspace).unwrap();
            assert!(garbage.iter().all(|x| x.is_nan()), "{way}");
            let mut got = Array3::from_elem(x.dim(), T::nan());
            layer.attend_into(&Inputs::new(&x), &options, &mut got, &mut workspace).unwrap();
            let want = layer.attend(&Inputs::new(&x), &options).unwrap().output;
            assert_bits(&format!("{way}, {mask_name}"), &widened(&got), &widened(&want));
            assert!(want.iter().all(|x| x.is_finite()), "{way}, {mask_name}");
        }
    }
}

#[test]
fn the_layer_forgets_what_a_workspace_held() {
    layer_forgets::<f32>();
    layer_forgets::<f64>();
}
