//! The forward pass of whole layers, projections included, with the sizes of models that people run.
//!
//! `cargo bench --bench forward`, or one layer with `cargo bench --bench forward -- gpt2`. Throughput counts the
//! floating-point operations of `Config::flops_masked`: pairs that a causal mask hides are not work.

#![allow(clippy::unwrap_used)]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use multihead::ndarray::Array3;
use multihead::{Mask, MultiHeadAttention, Workspace};
use std::hint::black_box;

struct Layer {
    name: &'static str,
    batch: usize,
    len: usize,
    d_model: usize,
    num_heads: usize,
    num_kv_heads: usize,
    mask: Mask,
}

fn layers() -> [Layer; 4] {
    let encoder =
        Layer { name: "minilm", batch: 8, len: 128, d_model: 384, num_heads: 12, num_kv_heads: 12, mask: Mask::none() };
    let decoder = Layer { batch: 1, mask: Mask::causal(), ..encoder };
    [
        Layer { mask: Mask::none(), ..encoder },
        Layer { name: "bert_base", d_model: 768, mask: Mask::none(), ..encoder },
        Layer { name: "gpt2", len: 1024, d_model: 768, mask: Mask::causal(), ..decoder },
        Layer { name: "llama", len: 512, d_model: 2048, num_heads: 16, num_kv_heads: 4, ..decoder },
    ]
}

fn forward(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("forward");
    group.sample_size(10);
    for Layer { name, batch, len, d_model, num_heads, num_kv_heads, mask } in layers() {
        let mha = MultiHeadAttention::<f32>::builder(d_model, num_heads).num_kv_heads(num_kv_heads).build().unwrap();
        // Numbers of about unit size, no two rows alike.
        let x = Array3::from_shape_fn((batch, len, d_model), |(b, i, c)| ((7 * b + 3 * i + c) as f32 * 0.37).sin());
        let (mut y, mut workspace) = (x.clone(), Workspace::new());
        let flops = mha.config().flops_masked(batch, len, len, &mask).unwrap().total();
        group.throughput(Throughput::Elements(flops));
        group.bench_function(name, |bencher| {
            bencher.iter(|| mha.forward_into(black_box(&x), &mask, &mut y, &mut workspace).unwrap())
        });
    }
    group.finish();
}

criterion_group!(benches, forward);
criterion_main!(benches);
