//! Multi-head, grouped-query and multi-query attention are one struct with another number of KV heads.
//!
//! Run with `cargo run --release --example grouped_query`.
//!
//! Prints what sharing keys and values saves, then checks what it means: a grouped layer computes the same as a
//! multi-head layer in which each KV head is repeated for all query heads of its group.

use multihead::ndarray::{Array2, Array3, Axis, concatenate, s};
use multihead::{Mask, MultiHeadAttention, Weights};
use std::error::Error;

const D_MODEL: usize = 512;
const NUM_HEADS: usize = 8;
const HEAD_DIM: usize = D_MODEL / NUM_HEADS;

fn main() -> Result<(), Box<dyn Error>> {
    println!("d_model {D_MODEL}, {NUM_HEADS} query heads of width {HEAD_DIM}, f32\n");
    println!(
        "{:<22}{:>12}{:>12}{:>12}{:>14}{:>22}",
        "", "w_q", "w_k, w_v", "w_o", "parameters", "cached bytes a token"
    );
    for (name, num_kv_heads) in [("multi-head (MHA)", 8), ("grouped-query (GQA)", 2), ("multi-query (MQA)", 1)] {
        let mha = MultiHeadAttention::<f32>::builder(D_MODEL, NUM_HEADS).num_kv_heads(num_kv_heads).build()?;
        let parameters: usize = [mha.w_q(), mha.w_k(), mha.w_v(), mha.w_o()].map(|w| w.len()).iter().sum();
        // A decoder keeps the key and the value of each KV head for every token it has seen.
        let cached = num_kv_heads * (HEAD_DIM + HEAD_DIM) * size_of::<f32>();
        let shape = |w: &Array2<f32>| format!("{}x{}", w.nrows(), w.ncols());
        let [q, k, o] = [mha.w_q(), mha.w_k(), mha.w_o()].map(shape);
        println!("{name:<22}{q:>12}{k:>12}{o:>12}{parameters:>14}{cached:>22}");
    }

    let gqa = MultiHeadAttention::<f32>::builder(D_MODEL, NUM_HEADS).num_kv_heads(2).seed(1).build()?;
    let group_size = NUM_HEADS / 2;
    let repeated = Weights {
        w_k: repeat_heads(gqa.w_k(), group_size)?,
        w_v: repeat_heads(gqa.w_v(), group_size)?,
        ..gqa.weights().clone()
    };
    let mha = MultiHeadAttention::builder(D_MODEL, NUM_HEADS).from_weights(repeated)?;

    let x = Array3::from_shape_fn((2, 64, D_MODEL), |(b, i, c)| ((13 * b + 7 * i + c) as f32).sin());
    let [grouped, full] = [&gqa, &mha].map(|layer| layer.forward(&x, &Mask::causal()));
    let difference = (grouped? - full?).iter().fold(0.0, |most: f32, d| most.max(d.abs()));
    println!("\nGQA against MHA with each KV head repeated {group_size} times: largest difference {difference:.1e}");

    // Groups need not be equal, nor neighbours: any map from query heads to KV heads will do.
    let uneven = MultiHeadAttention::<f32>::builder(D_MODEL, 4).kv_of_head(&[0, 1, 1, 0]).build()?;
    let heads = &uneven.config().heads;
    for kv_head in 0..heads.num_kv_heads() {
        let readers: Vec<usize> = heads.query_heads(kv_head).collect();
        println!("kv_of_head [0, 1, 1, 0]: KV head {kv_head} is read by the query heads {readers:?}");
    }
    if difference < 1e-5 { Ok(()) } else { Err("expected a difference below 1e-5".into()) }
}

/// `[in, kv_heads * HEAD_DIM] -> [in, kv_heads * group_size * HEAD_DIM]`, copies of a head side by side.
fn repeat_heads(w: &Array2<f32>, group_size: usize) -> Result<Array2<f32>, Box<dyn Error>> {
    let heads = (0..w.ncols() / HEAD_DIM).map(|head| w.slice(s![.., head * HEAD_DIM..(head + 1) * HEAD_DIM]));
    let repeated: Vec<_> = heads.flat_map(|head| std::iter::repeat_n(head, group_size)).collect();
    Ok(concatenate(Axis(1), &repeated)?)
}
