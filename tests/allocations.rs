//! How much memory a call takes: no copies of K and V for a group of heads, no buffer of size `q_len x kv_len`.

#![allow(clippy::unwrap_used)]
// A counting allocator cannot be written without it.
#![allow(unsafe_code)]

use multihead::ndarray::Array4;
use multihead::{Mask, Options, Path, attention};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

/// The system's allocator, counting what is held.
struct Counting;

static HELD: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to `System` as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let held = HELD.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(held, Relaxed);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Held by each test from its first line, since what another test allocates would be counted too.
static TURN: Mutex<()> = Mutex::new(());

const MIB: usize = 1 << 20;

/// Bytes that `f` held at most beyond what was held before.
fn peak(f: impl FnOnce()) -> usize {
    let before = HELD.load(Relaxed);
    PEAK.store(before, Relaxed);
    f();
    PEAK.load(Relaxed) - before
}

#[test]
fn the_counter_counts() {
    let _turn = TURN.lock();
    // Threads of the test harness may free a few bytes meanwhile.
    let bytes = peak(|| drop(std::hint::black_box(vec![1u8; 4 * MIB])));
    assert!((3 * MIB..5 * MIB).contains(&bytes), "{bytes}");
}

#[test]
fn b33_grouped_heads_are_not_copied_out() {
    let _turn = TURN.lock();
    // K and V hold 4 MiB; repeated for 16 heads they would take 64.
    let q = Array4::<f32>::ones((1, 16, 1, 64));
    let k = Array4::<f32>::ones((1, 1, 8192, 64));
    for path in [Path::Dense, Path::Tiled, Path::Auto, Path::Reference] {
        let options = Options::new().path(path);
        let bytes = peak(|| assert_eq!(attention::forward(&q, &k, &k, &options).unwrap().context[[0, 15, 0, 63]], 1.0));
        assert!(bytes < 4 * MIB, "{path:?}: {bytes}");
    }
}

#[test]
fn b33_no_scores_in_memory() {
    let _turn = TURN.lock();
    // All scores would take 64 MiB.
    let x = Array4::<f32>::ones((1, 1, 4096, 16));
    let mask = Mask::causal();
    for path in [Path::Tiled, Path::Auto] {
        let options = Options::new().mask(&mask).path(path);
        let bytes = peak(|| assert_eq!(attention::forward(&x, &x, &x, &options).unwrap().context[[0, 0, 0, 0]], 1.0));
        assert!(bytes < 8 * MIB, "{path:?}: {bytes}");
    }
}
