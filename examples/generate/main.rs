//! Text generation with a cache: a prompt at once, then token by token, each step at the cost of one token.
//!
//! ```text
//! cargo run --release --features safetensors,half --example generate [-- CHECKPOINT.safetensors [TOKEN ..]]
//! ```
//!
//! Without a checkpoint, the small decoder of `examples/train_induction` is trained for a few seconds to repeat a block of
//! tokens, and then does so. The same decoder with fewer KV heads shows what grouped-query attention is for. A checkpoint
//! is GPT-2 or a relative of LLaMA, with its `config.json` next to it or in its metadata.
//!
//! Every step is compared with the whole sequence at once, without a cache; the program fails if they differ.

// Each program that includes these files uses its own part of them.
#[path = "../models/checkpoint.rs"]
#[allow(dead_code)]
mod checkpoint;
#[path = "../models/gpt2.rs"]
#[allow(dead_code)]
mod gpt2;
mod induction;
#[path = "../models/llama.rs"]
#[allow(dead_code)]
mod llama;
#[path = "../train_induction/model.rs"]
mod model;
mod run;
#[path = "../train_induction/task.rs"]
mod task;

use std::path::Path;

use checkpoint::{Checkpoint, Fault};
use multihead::block::Stack;
use multihead::ndarray::Array2;
use run::{Run, generate, print_bytes};

/// How many tokens a checkpoint goes on for.
const COUNT: usize = 16;

fn main() -> Result<(), Fault> {
    let mut arguments = std::env::args().skip(1);
    let Some(path) = arguments.next() else { return induction::show() };
    let tokens: Vec<usize> = arguments.map(|token| token.parse()).collect::<Result<_, _>>()?;
    let prompt = if tokens.is_empty() { vec![1, 2, 3, 4] } else { tokens };
    let prompt = Array2::from_shape_vec((1, prompt.len()), prompt)?;

    let bytes = std::fs::read(&path)?;
    let config = std::fs::read_to_string(Path::new(&path).with_file_name("config.json")).ok();
    let file = Checkpoint::new(&bytes, config.as_deref())?;
    let tokens = prompt.len() + COUNT;
    match file.family() {
        Some("gpt2") => {
            let model = gpt2::Gpt2::load(&file)?;
            let mut caches = model.decoder.cache(1, tokens)?;
            let step = |ids: &_, position| model.step(ids, position, &mut caches);
            tell(&generate(&prompt, COUNT, step, |ids| model.logits(ids))?, &model.decoder)
        }
        Some("llama" | "mistral" | "qwen3") => {
            let model = llama::Llama::load(&file)?;
            let mut caches = model.decoder.cache(1, tokens)?;
            let step = |ids: &_, _| model.step(ids, &mut caches);
            tell(&generate(&prompt, COUNT, step, |ids| model.logits(ids))?, &model.decoder)
        }
        other => Err(format!("expected gpt2, llama, mistral or qwen3, got {other:?}").into()),
    }
}

/// What a checkpoint said, how fast, and what its caches take.
fn tell(run: &Run, decoder: &Stack<f32>) -> Result<(), Fault> {
    let layers: Vec<_> = decoder.blocks().iter().map(|block| block.attention().config()).collect();
    println!("{} layers, {}\n", layers.len(), layers.first().map_or(String::new(), |config| run::heads(config)));
    println!("prompt   {}", run::list(run.prompt()));
    println!("goes on  {}\n", run::list(run.continuation()));
    run.print_speed("f32");
    println!();
    layers.first().map_or(Ok(()), |config| print_bytes(config, layers.len(), 4096))?;
    run.check("f32", 1e-4)
}
