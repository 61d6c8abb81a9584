//! One layer of a real sentence encoder: what do its 12 heads look at?
//!
//! Run with `cargo run --release --features safetensors --example quickstart [heads.svg]`.
//!
//! Loads the last attention layer of all-MiniLM-L6-v2 and what it receives for one sentence, runs it, prints what each
//! word looks at, draws all heads as one sheet of heat maps, and compares with what PyTorch computed.

use multihead::inspect::HeatMaps;
use multihead::io::{Layout, Tensors};
use multihead::ndarray::{Array3, Array4, ArrayRef3, ArrayView2, Axis};
use multihead::{Inputs, MultiHeadAttention, Options};
use std::error::Error;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/minilm_layer5.safetensors");
const NUM_HEADS: usize = 12;

fn main() -> Result<(), Box<dyn Error>> {
    let sheet = std::env::args().nth(1).unwrap_or_else(|| "heads.svg".into());
    let bytes = std::fs::read(MODEL)?;
    let tensors = Tensors::from_bytes(&bytes)?;
    let sentence = tensors.metadata("sentence").ok_or("the file names no sentence")?;
    let tokens: Vec<String> = serde_json::from_str(tensors.metadata("tokens").ok_or("the file names no tokens")?)?;

    let hidden_states: Array3<f32> = tensors.get("hidden_states")?;
    let d_model = hidden_states.len_of(Axis(2));
    // The layer alone, so its tensors have short names.
    let layout = Layout::separate(["query", "key", "value", "output.dense"]).always_biased();
    let mha = MultiHeadAttention::builder(d_model, NUM_HEADS).load(&tensors, &layout)?;

    // All heads at once, and the softmax probabilities beside the output.
    let attended = mha.attend(&Inputs::new(&hidden_states), &Options::new().weights())?;
    let weights = attended.weights.ok_or("weights were asked for")?;
    // [num_heads, len, len]: the one sentence of the batch
    let maps = weights.index_axis(Axis(0), 0);
    let heads: Vec<ArrayView2<f32>> = maps.outer_iter().collect();

    println!("\"{sentence}\", {NUM_HEADS} heads of width {}\n", mha.config().head_dim);
    print_table(&heads, &tokens);
    std::fs::write(&sheet, draw_sheet(&maps, &heads, &tokens, sentence)?)?;
    println!("The heads as heat maps: {sheet}");

    let want_output: Array3<f64> = tensors.get("want.out")?;
    let want_weights: Array4<f64> = tensors.get("want.weights")?;
    let output = largest_difference(attended.output.iter(), want_output.iter());
    let weights = largest_difference(weights.iter(), want_weights.iter());
    println!("Largest difference from PyTorch in f64: output {output:.1e}, weights {weights:.1e}");
    if output.max(weights) < 1e-5 { Ok(()) } else { Err("expected differences below 1e-5".into()) }
}

/// For each word and head, the word it looks at most and with which weight.
fn print_table(heads: &[ArrayView2<f32>], tokens: &[String]) {
    println!("The word that each word looks at most. The rest goes to [CLS], [SEP] and the full stop.\n");
    for (block, heads) in heads.chunks(6).enumerate() {
        print!("{:9}", "");
        for head in 0..heads.len() {
            print!("{:>14}", format!("head {}", 6 * block + head));
        }
        println!();
        for i in words(tokens) {
            print!("{:<9}", tokens[i]);
            for w in heads {
                let j = words(tokens).max_by(|&a, &b| w[[i, a]].total_cmp(&w[[i, b]])).unwrap_or(i);
                print!("{:>14}", format!("{} {:.2}", tokens[j], w[[i, j]]));
            }
            println!();
        }
        print!("{:<9}", "(rest)");
        for w in heads {
            let shares = words(tokens).map(|i| 1.0 - words(tokens).map(|j| w[[i, j]]).sum::<f32>());
            print!("{:>14.2}", shares.sum::<f32>() / words(tokens).count() as f32);
        }
        println!("\n");
    }
    println!("Which head sees it best?\n");
    for (from, to) in [("it", "cat"), ("ate", "fish"), ("ate", "hungry"), ("was", "because")] {
        let place = |word| tokens.iter().position(|token| token == word);
        let Some(pair) = place(from).zip(place(to)) else { continue };
        if let Some((head, w)) = heads.iter().enumerate().max_by(|(_, a), (_, b)| a[pair].total_cmp(&b[pair])) {
            let bar = "#".repeat((40.0 * w[pair]).round() as usize);
            println!("{:<20}{:.2} in head {head:<4}{bar}", format!("{from} -> {to}"), w[pair]);
        }
    }
    println!();
}

/// The positions of the words, without [CLS], [SEP] and the full stop.
fn words(tokens: &[String]) -> impl Iterator<Item = usize> + '_ {
    (0..tokens.len()).filter(|&i| tokens[i].chars().all(char::is_alphabetic))
}

/// The pair of different words, articles left out, with the largest weight.
fn strongest_link(w: &ArrayView2<f32>, tokens: &[String]) -> (usize, usize) {
    let words = || words(tokens).filter(|&i| tokens[i] != "the");
    let pairs = words().flat_map(|i| words().filter(move |&j| j != i).map(move |j| (i, j)));
    pairs.max_by(|&a, &b| w[a].total_cmp(&w[b])).unwrap_or_default()
}

fn largest_difference<'a>(got: impl Iterator<Item = &'a f32>, want: impl Iterator<Item = &'a f64>) -> f64 {
    got.zip(want).map(|(&got, want)| (f64::from(got) - want).abs()).fold(0.0, f64::max)
}

/// One heat map for each head, with words on the outer axes and one colour scale for all.
fn draw_sheet(
    weights: &ArrayRef3<f32>,
    heads: &[ArrayView2<f32>],
    tokens: &[String],
    sentence: &str,
) -> Result<String, Box<dyn Error>> {
    let mut sheet = HeatMaps::new(weights, tokens, tokens)?.title(&format!("“{sentence}”")).subtitle(
        "What each word (row) looks at (column) in the 12 heads of the last layer of all-MiniLM-L6-v2. \
         Framed: the strongest link of two words.",
    );
    for (head, w) in heads.iter().enumerate() {
        let (i, j) = strongest_link(w, tokens);
        let link = format!("{} → {} {:.2}", tokens[i], tokens[j], w[[i, j]]);
        sheet = sheet.note(head, &link, Some([i, j]))?;
    }
    Ok(sheet.to_svg())
}
