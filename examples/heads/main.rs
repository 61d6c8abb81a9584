//! What do heads do, and what does their number change?
//!
//! Run with `cargo run --release --features safetensors --example heads [FOLDER]`.
//!
//! Takes the last attention layer of all-MiniLM-L6-v2 and what it receives for one sentence, says in numbers what each of
//! its 12 heads does and how much the output owes to it, and takes the least important heads out. Then cuts one width
//! into 1 to 32 heads: the cost stays the same, and there are more patterns to see.
//!
//! With the folder of the whole model (`config.json`, `tokenizer.json`, `model.safetensors`) it names, among the heads of
//! all layers, those that look at the token before, from a pronoun at what it stands for and from a verb at its object.

#[path = "../models/bert.rs"]
#[expect(dead_code, reason = "the layers are run one by one")]
mod bert;
#[path = "../models/checkpoint.rs"]
#[expect(dead_code, reason = "the other models read the rest of it")]
mod checkpoint;
mod layers;
#[path = "../sentence_embeddings/wordpiece.rs"]
mod wordpiece;

use multihead::inspect::{HeadStatistics, Tokens, head_importance};
use multihead::io::{Layout, Tensors};
use multihead::ndarray::{Array2, Array3, Array4, Axis};
use multihead::{Inputs, Mask, MultiHeadAttention, Options, attention};
use std::error::Error;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/minilm_layer5.safetensors");
const NUM_HEADS: usize = 12;

fn main() -> Result<(), Box<dyn Error>> {
    let bytes = std::fs::read(MODEL)?;
    let tensors = Tensors::from_bytes(&bytes)?;
    let tokens: Vec<String> = serde_json::from_str(tensors.metadata("tokens").ok_or("the file names no tokens")?)?;
    let sentence = tensors.metadata("sentence").unwrap_or_default();
    println!("\"{sentence}\"\n");
    if let Some(folder) = std::env::args().nth(1) {
        layers::name_heads(folder.as_ref(), sentence, &tokens)?;
    }

    let x: Array3<f32> = tensors.get("hidden_states")?;
    // The layer alone, so its tensors have short names.
    let layout = Layout::separate(["query", "key", "value", "output.dense"]).always_biased();
    let mha = MultiHeadAttention::builder(x.len_of(Axis(2)), NUM_HEADS).load(&tensors, &layout)?;

    print_statistics(&mha, &x, &tokens)?;
    prune(&mha, &x)?;
    sweep(&x)
}

/// One line for each head.
fn print_statistics(mha: &MultiHeadAttention<f32>, x: &Array3<f32>, words: &[String]) -> Result<(), Box<dyn Error>> {
    let number = |word: &String| words.iter().position(|other| other == word).unwrap_or(0);
    let ids = Array2::from_shape_vec((1, words.len()), words.iter().map(number).collect())?;
    let attended = mha.attend(&Inputs::new(x), &Options::new().weights())?;
    let weights = attended.weights.ok_or("weights were asked for")?;
    let tokens = Tokens::new().ids(&ids);
    let statistics = mha.head_statistics(&Inputs::new(x), &Options::new(), &tokens)?;
    if statistics != HeadStatistics::of_weights(&weights, &tokens)? {
        return Err("expected the same statistics, streamed and from weights".into());
    }

    print!("{:>6}", "head");
    statistics.columns().for_each(|(name, _)| print!("{name:>12}"));
    println!("{:>14}", "most read");
    for head in 0..NUM_HEADS {
        print!("{head:>6}");
        statistics.columns().for_each(|(_, means)| print!("{:>12.3}", means[[0, head]]));
        let received = statistics.received.index_axis(Axis(0), 0);
        let (key, sum) = largest((0..words.len()).map(|j| received[[head, j]]));
        println!("{:>14}", format!("{} {sum:.1}", words[key]));
    }
    println!("\nWho does it most?\n");
    for (what, means) in statistics.columns().filter(|(name, _)| !["entropy", "distance"].contains(name)) {
        let (head, mean) = largest(means.iter().copied());
        println!("{what:<24}{mean:.2} by head {head}");
    }
    let place = |word: &str| words.iter().position(|other| other == word).ok_or("the sentence has other words");
    for (what, from, to) in [("pronoun: it -> cat", "it", "cat"), ("object: ate -> fish", "ate", "fish")] {
        let (from, to) = (place(from)?, place(to)?);
        let (head, weight) = largest((0..NUM_HEADS).map(|head| f64::from(weights[[0, head, from, to]])));
        println!("{what:<24}{weight:.2} by head {head}");
    }
    println!();
    Ok(())
}

/// How much the output owes to each head, and what happens if those that it owes least to are taken out.
fn prune(mha: &MultiHeadAttention<f32>, x: &Array3<f32>) -> Result<(), Box<dyn Error>> {
    let config = mha.config();
    let by_head = |y: Array2<f32>, width: usize| -> Result<Array4<f32>, Box<dyn Error>> {
        let (len, heads) = (y.nrows(), y.ncols() / width);
        Ok(y.into_shape_with_order((1, len, heads, width))?.permuted_axes([0, 2, 1, 3]))
    };
    let project = |w: &Array2<f32>, b: &Option<_>| {
        let x = x.index_axis(Axis(0), 0);
        b.as_ref().map_or_else(|| x.dot(w), |b| x.dot(w) + b)
    };
    let w = mha.weights();
    let q = by_head(project(&w.w_q, &w.b_q), config.head_dim)?;
    let k = by_head(project(&w.w_k, &w.b_k), config.head_dim)?;
    let v = by_head(project(&w.w_v, &w.b_v), config.value_dim)?;
    let context = attention::forward(&q, &k, &v, &Options::new())?.context;

    // The loss is half of the output's square, whose gradient is the output.
    let output = mha.forward(x, &Mask::none())?;
    let d_context = by_head(output.index_axis(Axis(0), 0).dot(&w.w_o.t()), config.value_dim)?;
    let importance = head_importance(&context, &d_context)?;
    let mut order: Vec<usize> = (0..NUM_HEADS).collect();
    order.sort_by(|&a, &b| importance[a].total_cmp(&importance[b]));
    println!("By the gradient of a gate, from the least important on: {order:?}\n");
    println!("{:>14}{:>14}{:>22}{:>22}", "heads out", "parameters", "cache bytes a token", "change of the output");
    for count in [0, 1, 2, 4, 8] {
        let small = mha.prune_heads(&order[..count])?;
        let change = small.forward(x, &Mask::none())? - &output;
        let norm = |a: &Array3<f32>| a.iter().map(|&a| f64::from(a).powi(2)).sum::<f64>().sqrt();
        let (parameters, cache) = (small.weights().parameters(), small.config().cache_bytes(1, 1, size_of::<f32>()));
        println!("{count:>14}{parameters:>14}{cache:>22}{:>21.1}%", 100.0 * norm(&change) / norm(&output));
    }
    println!();
    Ok(())
}

/// One width cut into more and more heads.
fn sweep(x: &Array3<f32>) -> Result<(), Box<dyn Error>> {
    let (_, len, d_model) = x.dim();
    println!("d_model {d_model}, fresh weights, the same input, scale 8 / sqrt(width)\n");
    println!("{:>14}{:>14}{:>14}{:>12}{:>22}", "heads x width", "parameters", "MFLOP", "entropy", "different patterns");
    let mut costs = Vec::new();
    for num_heads in [1, 2, 4, 8, 16, 32] {
        // With the usual scale, fresh weights make small scores: every head looks everywhere alike.
        let scale = 8.0 / ((d_model / num_heads) as f64).sqrt();
        let mha = MultiHeadAttention::<f32>::builder(d_model, num_heads).scale(scale).seed(1).build()?;
        let (inputs, config) = (Inputs::new(x), mha.config());
        let weights = mha.attend(&inputs, &Options::new().weights())?.weights.ok_or("weights were asked for")?;
        let statistics = HeadStatistics::of_weights(&weights, &Tokens::new())?;
        let entropy = statistics.entropy.mean().unwrap_or(0.0);
        let cost = (config.parameters(), config.flops(1, len, len).total());
        println!(
            "{:>14}{:>14}{:>14.2}{entropy:>12.2}{:>22.2}",
            format!("{num_heads} x {}", config.head_dim),
            cost.0,
            cost.1 as f64 / 1e6,
            patterns(&weights, entropy)?,
        );
        costs.push(cost);
    }
    println!("\nThe same cost for any number of heads, and more to see with each of them.");
    if costs.iter().all(|&cost| cost == costs[0]) { Ok(()) } else { Err("expected the same cost".into()) }
}

/// How many different patterns there are, in effect: `exp(entropy of the mean head - mean entropy of a head)`, whose
/// logarithm is the Jensen-Shannon divergence of all heads. It is 1 if all heads are the same, and the number of heads if
/// no two of them look at the same key.
fn patterns(weights: &Array4<f32>, entropy: f64) -> Result<f64, Box<dyn Error>> {
    let mean = weights.mean_axis(Axis(1)).ok_or("there are heads")?.insert_axis(Axis(1));
    let of_mean = HeadStatistics::of_weights(&mean, &Tokens::new())?.entropy[[0, 0]];
    Ok((of_mean - entropy).exp())
}

/// The largest number and where it is.
fn largest(numbers: impl Iterator<Item = f64>) -> (usize, f64) {
    numbers.enumerate().fold((0, f64::MIN), |best, next| if next.1 > best.1 { next } else { best })
}
