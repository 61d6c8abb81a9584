//! Files that were damaged or made to do harm: an error or a layer comes out, nothing panics, and memory is taken in
//! proportion to the bytes of the file, whatever its header says.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(feature = "safetensors")]
// A counting allocator cannot be written without it.
#![allow(unsafe_code)]

mod common;

use common::property;
use multihead::io::{Fusion, Layout, StoredAxes, TensorMap, Tensors};
use multihead::ndarray::{Ix1, IxDyn};
use multihead::position::Buckets;
use multihead::{Builder, MultiHeadAttention, Rope, RopeStyle};
use proptest::collection::vec;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, System};
use std::cell::Cell;

/// The system's allocator, which notes what the thread holds.
struct Noting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static PEAK: Cell<isize> = const { Cell::new(0) };
}

fn note(change: isize) {
    // While a thread ends there is nothing to note in.
    let _ = HELD.try_with(|held| held.set(held.get() + change));
    let _ = PEAK.try_with(|peak| peak.set(peak.get().max(HELD.get())));
}

// SAFETY: every call is handed on to `System` as it came; the cells have neither lazy state nor a destructor.
unsafe impl GlobalAlloc for Noting {
    unsafe fn alloc(&self, layout: std::alloc::Layout) -> *mut u8 {
        note(layout.size() as isize);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: std::alloc::Layout) {
        note(-(layout.size() as isize));
        // SAFETY: as above; the pointer came from `System`.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Noting = Noting;

fn builder() -> Builder<f64> {
    MultiHeadAttention::builder(4, 2).head_dim(4).rope(Rope::new(RopeStyle::Interleaved, 10.0))
}

/// Layouts with what a file has to hold for them.
fn layouts() -> Vec<(Layout, Builder<f64>)> {
    let buckets = Buckets::T5 { count: 4, max_distance: 9 };
    vec![
        (Layout::llama(""), builder().num_kv_heads(1).qk_norm(1e-6).sinks()),
        (Layout::torch(""), builder().bias()),
        (Layout::gpt2(""), builder().bias()),
        (Layout::fused("w", Fusion::Groups, "o").stored(StoredAxes::InOut), builder().num_kv_heads(1)),
        (Layout::t5(""), builder().relative_bias(buckets)),
    ]
}

fn files() -> Vec<Vec<u8>> {
    let file = |(layout, builder): (Layout, Builder<f64>)| {
        let mut tensors = TensorMap::new();
        layout.save(&builder.build().unwrap(), &mut tensors).unwrap();
        tensors.set_metadata("format", "pt");
        tensors.to_bytes()
    };
    layouts().into_iter().map(file).collect()
}

/// Reads all that can be read. A number takes at most four times its bytes in the file (`F16` in `f64`). The rest is the
/// header, which is held as names, shapes and offsets (`[0,0,..]` is eight bytes for two), and what any layer needs.
fn read(bytes: &[u8]) {
    let layouts = layouts();
    let before = HELD.get();
    PEAK.set(before);
    if let Ok(tensors) = Tensors::from_bytes(bytes) {
        for name in tensors.names() {
            let _ = tensors.get::<f32, Ix1>(&name);
            let _ = tensors.get::<f64, IxDyn>(&name);
        }
        for (layout, builder) in layouts {
            let _ = builder.load(&tensors, &layout);
        }
    }
    let peak = PEAK.get() - before;
    assert!(peak <= 10 * bytes.len() as isize + 2000, "{peak} bytes for a file of {}", bytes.len());
}

#[test]
fn sound_files_are_read() {
    for (bytes, (layout, builder)) in files().into_iter().zip(layouts()) {
        assert_eq!(builder.clone().load(&Tensors::from_bytes(&bytes).unwrap(), &layout), builder.build());
        read(&bytes);
    }
}

#[test]
fn every_truncated_file_is_refused() {
    for bytes in files() {
        for end in 0..bytes.len() {
            assert!(Tensors::from_bytes(&bytes[..end]).is_err(), "{end}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert!(Tensors::from_bytes(&longer).is_err());
    }
}

#[test]
fn changed_bytes_do_no_harm() {
    let files = files();
    let changes = vec((any::<prop::sample::Index>(), any::<u8>()), 1..6);
    property(2000, (0..files.len(), changes), |(file, changes)| {
        let mut bytes = files[file].clone();
        for (index, byte) in changes {
            let index = index.index(bytes.len());
            bytes[index] = byte;
        }
        read(&bytes);
    });
}

/// Pieces that JSON and this format are made of.
fn token() -> impl Strategy<Value = String> {
    let fixed = [
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "0",
        "-1",
        "1e9",
        "null",
        "\"F16\"",
        "\"BF16\"",
        "\"F64\"",
        "\"I64\"",
        "\\u0000",
        "4294967296",
        "18446744073709551615",
        "9223372036854775807",
        "\"shape\":",
        "\"data_offsets\":",
        "\"__metadata__\":",
    ];
    prop_oneof![prop::sample::select(fixed.to_vec()).prop_map(str::to_owned), (0u64..70).prop_map(|n| n.to_string())]
}

/// The header is changed as text and the length before it put right, so that the change is seen.
#[test]
fn changed_headers_do_no_harm() {
    let files = files();
    let change = (any::<prop::sample::Index>(), 0usize..12, vec(token(), 0..3));
    property(3000, (0..files.len(), vec(change, 1..4)), |(file, changes)| {
        let bytes = &files[file];
        let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
        let (mut header, data) = (bytes[8..8 + length].to_vec(), &bytes[8 + length..]);
        for (index, removed, tokens) in changes {
            let start = index.index(header.len() + 1);
            let end = (start + removed).min(header.len());
            header.splice(start..end, tokens.concat().bytes());
        }
        read(&[&(header.len() as u64).to_le_bytes()[..], &header, data].concat());
    });
}

/// Headers that are sound JSON and lie about shapes and offsets.
#[test]
fn lying_headers_do_no_harm() {
    let length =
        || prop_oneof![0u64..9, Just(1 << 32), Just(u64::MAX), Just(u64::MAX / 8), Just(1 << 61), Just(1 << 63)];
    let offset = || prop_oneof![0u64..70, (0u64..9).prop_map(|n| 8 * n), Just(u64::MAX), Just(u64::MAX - 7)];
    let name = prop::sample::select(vec!["q_proj.weight", "in_proj_weight", "c_attn.weight", "w.weight", "q.weight"]);
    let dtype = prop::sample::select(vec!["F64", "F32", "F16", "BF16", "U8", "F4"]);
    let tensor = (name, dtype, vec(length(), 0..4), offset(), offset());
    property(4000, (vec(tensor, 0..4), 0usize..70), |(tensors, data)| {
        let tensors = tensors.into_iter().map(|(name, dtype, shape, start, end)| {
            format!(r#""{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{start},{end}]}}"#)
        });
        let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
        read(&[&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &vec![0; data]].concat());
    });
}

#[test]
fn a_header_longer_than_the_file_is_refused() {
    for bytes in files() {
        for length in [bytes.len() as u64 - 7, 1 << 20, 1 << 40, u64::MAX] {
            let mut bytes = bytes.clone();
            bytes[..8].copy_from_slice(&length.to_le_bytes());
            let error = Tensors::from_bytes(&bytes).unwrap_err().to_string();
            assert!(error.starts_with("file: expected a header of at most "), "{error}");
        }
    }
}
