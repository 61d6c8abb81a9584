//! Whole models on the crate: a checkpoint by its path, tokens in, tokens or vectors out.
//!
//! Run with `cargo run --release --features safetensors --example models -- CHECKPOINT.safetensors [TOKEN ..]`.
//!
//! The model is what the configuration says: BERT, GPT-2, LLaMA (also Mistral and Qwen 3), ViT, T5, DETR or PyTorch's
//! `nn.Transformer`. The configuration is `config.json` next to the checkpoint, or stands in its metadata. Tokens are
//! numbers; decoders go on with them. The tiny checkpoints in `tests/models` have random weights.

mod bert;
mod checkpoint;
mod detr;
mod gpt2;
mod llama;
mod t5;
mod transformer;
mod vit;

use checkpoint::{Checkpoint, Fault};
use multihead::Mask;
use multihead::ndarray::{Array2, ArrayRef3, Ix3, Ix4, s};
use std::path::Path;

/// How many tokens a decoder goes on for.
const COUNT: usize = 16;

fn main() -> Result<(), Fault> {
    let mut arguments = std::env::args().skip(1);
    let tiny = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models/gpt2.safetensors");
    let path = arguments.next().unwrap_or(tiny.to_owned());
    let tokens: Vec<usize> = arguments.map(|token| token.parse()).collect::<Result<_, _>>()?;
    let tokens = if tokens.is_empty() { vec![1, 2, 3, 4] } else { tokens };
    let tokens = Array2::from_shape_vec((1, tokens.len()), tokens)?;

    let bytes = std::fs::read(&path)?;
    let config = std::fs::read_to_string(Path::new(&path).with_file_name("config.json")).ok();
    let file = Checkpoint::new(&bytes, config.as_deref())?;
    match file.family() {
        Some("bert") => {
            let places = Array2::from_shape_fn(tokens.dim(), |(_, i)| i);
            show(&bert::Bert::load(&file)?.forward(&tokens, &places, &Mask::none())?);
        }
        Some("gpt2") => {
            let model = gpt2::Gpt2::load(&file)?;
            let tokens = model.generate(&tokens, COUNT)?;
            tell(&tokens, &model.logits(&tokens)?);
        }
        Some("llama" | "mistral" | "qwen3") => {
            let model = llama::Llama::load(&file)?;
            let tokens = model.generate(&tokens, COUNT)?;
            tell(&tokens, &model.logits(&tokens)?);
        }
        Some("vit") => show(&vit::Vit::load(&file)?.forward(&file.tensor::<Ix4>("input.pixel_values")?)?),
        Some("t5") => {
            let model = t5::T5::load(&file)?;
            let answer = model.generate(&tokens, COUNT)?;
            tell(&answer, &model.logits(&model.decode(&answer, &model.encode(&tokens)?)?)?);
        }
        Some("detr") => {
            let [features, places] =
                ["attn.0.hidden_states", "attn.0.position_embeddings"].map(|name| file.tensor::<Ix3>(name));
            show(&detr::Detr::load(&file)?.forward(&features?, &places?)?.1);
        }
        Some("torch") => {
            let model = transformer::Transformer::load(&file, transformer::NUM_HEADS)?;
            let [source, target] = ["input.src", "input.tgt"].map(|name| file.tensor::<Ix3>(name));
            show(&model.forward(&source?, &target?)?.1);
        }
        other => return Err(format!("expected a model that stands in this example, got {other:?}").into()),
    }
    Ok(())
}

/// Tokens `[1, len]`, and how likely the model thinks each of them after those before: logits `[1, len, words]`.
fn tell(tokens: &Array2<usize>, logits: &ArrayRef3<f32>) {
    for (i, &token) in tokens.iter().enumerate() {
        let Some(before) = i.checked_sub(1) else {
            println!("{token}");
            continue;
        };
        let row = logits.slice(s![0, before, ..]);
        let most = row.fold(f32::MIN, |most, &x| most.max(x));
        let sum: f32 = row.iter().map(|x| (x - most).exp()).sum();
        println!("{token:<8}{:.3}", (row[token] - most).exp() / sum);
    }
}

/// The shape of an output, and how each of its first tokens begins.
fn show(x: &ArrayRef3<f32>) {
    println!("{:?}", x.shape());
    println!("{:.4}", x.slice(s![..1, ..x.dim().1.min(4), ..x.dim().2.min(6)]));
}
