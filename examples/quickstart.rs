//! One layer of a real sentence encoder: what do its 12 heads look at?
//!
//! Run with `cargo run --release --features safetensors --example quickstart [heads.svg]`.
//!
//! Loads the last attention layer of all-MiniLM-L6-v2 and what it receives for one sentence, runs it, prints what each
//! word looks at, draws all heads as one sheet of heat maps, and compares with what PyTorch computed.

use multihead::io::Tensors;
use multihead::ndarray::{Array2, Array3, Array4, ArrayView2, Axis};
use multihead::{Inputs, MultiHeadAttention, Options, Weights};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};
use std::error::Error;
use std::path::Path;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/data/minilm_layer5.safetensors");
const NUM_HEADS: usize = 12;

fn main() -> Result<(), Box<dyn Error>> {
    let sheet = std::env::args().nth(1).unwrap_or_else(|| "heads.svg".into());
    let bytes = std::fs::read(MODEL)?;
    let tensors = Tensors::from_bytes(&bytes)?;
    let sentence = tensors.metadata("sentence").ok_or("the file names no sentence")?;
    let tokens: Vec<String> = serde_json::from_str(tensors.metadata("tokens").ok_or("the file names no tokens")?)?;

    // The file stores its matrices as [out, in]; turning the axes round costs nothing.
    let matrix = |name: &str| tensors.get(name).map(Array2::<f32>::reversed_axes);
    let [w_q, w_k] = [matrix("query.weight")?, matrix("key.weight")?];
    let [w_v, w_o] = [matrix("value.weight")?, matrix("output.dense.weight")?];
    let weights = Weights {
        b_q: Some(tensors.get("query.bias")?),
        b_k: Some(tensors.get("key.bias")?),
        b_v: Some(tensors.get("value.bias")?),
        b_o: Some(tensors.get("output.dense.bias")?),
        ..Weights::new(w_q, w_k, w_v, w_o)
    };
    let hidden_states: Array3<f32> = tensors.get("hidden_states")?;
    let d_model = hidden_states.len_of(Axis(2));
    let mha = MultiHeadAttention::builder(d_model, NUM_HEADS).from_weights(weights)?;

    // All heads at once, and the softmax probabilities beside the output.
    let attended = mha.attend(&Inputs::new(&hidden_states), &Options::new().weights())?;
    let weights = attended.weights.ok_or("weights were asked for")?;
    // [num_heads, len, len]: the one sentence of the batch
    let heads = weights.index_axis(Axis(0), 0);
    let heads: Vec<ArrayView2<f32>> = heads.outer_iter().collect();

    println!("\"{sentence}\", {NUM_HEADS} heads of width {}\n", mha.config().head_dim);
    print_table(&heads, &tokens);
    draw_sheet(&heads, &tokens, sentence, Path::new(&sheet))?;
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
fn draw_sheet(heads: &[ArrayView2<f32>], tokens: &[String], sentence: &str, path: &Path) -> Result<(), Box<dyn Error>> {
    const CELL: i32 = 16;
    const COLUMNS: i32 = 4;
    let map = CELL * tokens.len() as i32;
    let (left, top, step_x, step_y) = (78, 104, map + 18, map + 38);
    let rows = (heads.len() as i32 + COLUMNS - 1) / COLUMNS;
    let (width, height) = (left + COLUMNS * step_x + 70, top + rows * step_y + 40);

    let root = SVGBackend::new(path, (width as u32, height as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let ink = RGBColor(40, 40, 52);
    let font = |size: i32| ("sans-serif", size).into_font().color(&ink);
    let bold = |size: i32| ("sans-serif", size, FontStyle::Bold).into_font().color(&ink);
    let at = |h, v| Pos::new(h, v);
    root.draw_text(&format!("“{sentence}”"), &font(26).pos(at(HPos::Left, VPos::Top)), (left, 14))?;
    let subtitle = "What each word (row) looks at (column) in the 12 heads of the last layer of all-MiniLM-L6-v2. \
                    Framed: the strongest link of two words.";
    root.draw_text(subtitle, &font(15).pos(at(HPos::Left, VPos::Top)), (left, 46))?;

    let largest = heads.iter().flat_map(|w| w.iter()).fold(0.0, |m: f32, &w| m.max(w));
    for (head, w) in heads.iter().enumerate() {
        let (column, row) = (head as i32 % COLUMNS, head as i32 / COLUMNS);
        let (x, y) = (left + column * step_x, top + row * step_y);
        let cell = |i: usize, j: usize| {
            let (x, y) = (x + CELL * j as i32, y + CELL * i as i32);
            [(x, y), (x + CELL, y + CELL)]
        };
        root.draw(&Rectangle::new([(x, y), (x + map, y + map)], heat(0.0).filled()))?;
        // A weight that nobody could tell from 0 is left to the background.
        for ((i, j), &w) in w.indexed_iter().filter(|&(_, &w)| w > 0.004) {
            root.draw(&Rectangle::new(cell(i, j), heat(w / largest).filled()))?;
        }
        let (i, j) = strongest_link(w, tokens);
        root.draw(&Rectangle::new(cell(i, j), ink.stroke_width(2)))?;
        let title = format!("head {head}");
        root.draw_text(&title, &bold(16).pos(at(HPos::Left, VPos::Bottom)), (x, y - 6))?;
        let link = format!("{} → {} {:.2}", tokens[i], tokens[j], w[[i, j]]);
        root.draw_text(&link, &font(15).pos(at(HPos::Right, VPos::Bottom)), (x + map, y - 6))?;

        for (n, token) in tokens.iter().enumerate() {
            let middle = CELL * n as i32 + CELL / 2;
            if column == 0 {
                root.draw_text(token, &font(15).pos(at(HPos::Right, VPos::Center)), (x - 6, y + middle))?;
            }
            if row == rows - 1 {
                let upright = font(15).transform(FontTransform::Rotate270).pos(at(HPos::Right, VPos::Center));
                root.draw_text(token, &upright, (x + middle, y + map + 6))?;
            }
        }
    }

    // The colour scale.
    let (x, y, steps) = (left + COLUMNS * step_x + 4, top, 64);
    for step in 0..steps {
        let y = y + (steps - 1 - step) * 3;
        root.draw(&Rectangle::new([(x, y), (x + 14, y + 4)], heat(step as f32 / (steps - 1) as f32).filled()))?;
    }
    for (share, y) in [(largest, y + 4), (largest / 2.0, y + steps * 3 / 2), (0.0, y + steps * 3 - 4)] {
        root.draw_text(&format!("{share:.2}"), &font(14).pos(at(HPos::Left, VPos::Center)), (x + 18, y))?;
    }
    root.draw_text("weight", &font(14).pos(at(HPos::Left, VPos::Bottom)), (x, y - 6))?;
    root.present()?;
    Ok(())
}

/// From paper over orange and red to night, for 0 to 1; darker is more, also in grey.
fn heat(share: f32) -> RGBColor {
    const STOPS: [[f32; 3]; 5] =
        [[247.0, 244.0, 236.0], [253.0, 205.0, 130.0], [240.0, 110.0, 80.0], [168.0, 32.0, 92.0], [44.0, 8.0, 64.0]];
    let place = share.clamp(0.0, 1.0) * (STOPS.len() - 1) as f32;
    let stop = (place as usize).min(STOPS.len() - 2);
    let mix = |c: usize| (STOPS[stop][c] + (place - stop as f32) * (STOPS[stop + 1][c] - STOPS[stop][c])) as u8;
    RGBColor(mix(0), mix(1), mix(2))
}
