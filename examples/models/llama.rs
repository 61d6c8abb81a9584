//! LLaMA (Touvron et al. 2023, <https://arxiv.org/abs/2302.13971>) and its relatives: rotary positions, RMSNorm before each
//! part, SwiGLU, grouped queries. By their configurations also LLaMA 3.1 (slower rotations for long texts), Mistral (a
//! window) and Qwen 3 (norms of query and key heads).

use multihead::block::{Activation, Block, BlockCache, Call, FeedForward, FeedForwardWeights, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array2, Array3};
use multihead::position::Llama3;
use multihead::{Mask, MultiHeadAttention, Rope, RopeScaling, RopeStyle};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, Fault, embed, greedy, last_logits, product};

pub(crate) struct Llama {
    /// `[words, d_model]`
    words: Array2<f32>,
    pub(crate) decoder: Stack<f32>,
    /// `[d_model, words]`
    head: Array2<f32>,
    /// Causal, and no further back than the window if there is one.
    mask: Mask,
}

impl Llama {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        let eps = file.number("rms_norm_eps")?;
        let activation = file.activation("hidden_act")?;
        let block = |i: usize| -> Result<Block<f32>, Fault> {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            let norms = Norms::Pre {
                attention: file.rms_norm(&name("input_layernorm"), eps)?,
                feed_forward: file.rms_norm(&name("post_attention_layernorm"), eps)?,
            };
            let feed_forward = feed_forward(file, &name("mlp"), activation)?;
            Ok(Block::new(attention(file, &name("self_attn"), eps)?, feed_forward, norms)?)
        };
        let blocks = (0..file.size("num_hidden_layers")?).map(block).collect::<Result<_, _>>()?;
        let words: Array2<f32> = file.tensor("model.embed_tokens.weight")?;
        let head = if file.has("lm_head.weight") { file.linear("lm_head")? } else { words.t().to_owned() };
        let window = file.value("use_sliding_window").is_none_or(|is_used| is_used != &Value::Bool(false));
        let mask = match file.value("sliding_window") {
            // The window counts the token itself.
            Some(_) if window => Mask::causal() & Mask::last_n(file.size("sliding_window")?),
            _ => Mask::causal(),
        };
        let mut decoder = Stack::new(blocks, Some(file.rms_norm("model.norm", eps)?))?;
        decoder.prepack()?;
        Ok(Self { words, decoder, head, mask })
    }

    /// `ids: [batch, len]` to logits `[batch, len, words]`.
    pub(crate) fn logits(&self, ids: &Array2<usize>) -> Result<Array3<f32>, Fault> {
        let x = self.decoder.forward(&embed(&self.words, ids)?, &Call::new().mask(&self.mask))?;
        product(&x, &self.head)
    }

    /// Tokens that go on where the caches end, and so do their positions: logits after the last of them, `[batch, words]`.
    pub(crate) fn step(&self, ids: &Array2<usize>, caches: &mut [BlockCache<f32>]) -> Result<Array2<f32>, Fault> {
        let call = Call::new().mask(&self.mask);
        last_logits(&self.decoder.decode(&embed(&self.words, ids)?, &call, caches)?, &self.head)
    }

    /// `count` more tokens for each entry of `prompt: [batch, len]`, always the likeliest one.
    pub(crate) fn generate(&self, prompt: &Array2<usize>, count: usize) -> Result<Array2<usize>, Fault> {
        let (batch, len) = prompt.dim();
        let mut caches = self.decoder.cache(batch, len + count)?;
        greedy(prompt, count, |ids, _| self.step(ids, &mut caches))
    }
}

fn attention(file: &Checkpoint<'_>, name: &str, eps: f64) -> Result<MultiHeadAttention<f32>, Fault> {
    let (d_model, num_heads) = (file.size("hidden_size")?, file.size("num_attention_heads")?);
    let builder = MultiHeadAttention::builder(d_model, num_heads)
        .num_kv_heads(file.size("num_key_value_heads")?)
        .head_dim(file.size("head_dim").unwrap_or(d_model / num_heads.max(1)))
        .rope(rope(file)?);
    // Qwen 3 has norms of query and key heads, its relatives have none.
    let builder = if file.has(&format!("{name}.q_norm.weight")) { builder.qk_norm(eps) } else { builder };
    file.attention(builder, &Layout::llama(name))
}

/// Newer configurations keep all numbers in one place, older ones in two.
fn rope(file: &Checkpoint<'_>) -> Result<Rope, Fault> {
    let rules = file.value("rope_parameters").or(file.value("rope_scaling"));
    let number = |key: &str| rules.and_then(|rules| rules.get(key)).and_then(Value::as_f64);
    let needed = |key: &str| number(key).ok_or(format!("rope_parameters {key}: expected a number"));
    let theta = number("rope_theta").or(file.number("rope_theta").ok()).ok_or("expected a rope_theta")?;
    let rope = Rope::new(RopeStyle::HalfSplit, theta);
    match rules.and_then(|rules| rules.get("rope_type")).and_then(Value::as_str) {
        None | Some("default") => Ok(rope),
        Some("linear") => Ok(rope.scaling(RopeScaling::Linear { factor: needed("factor")? })),
        Some("llama3") => Ok(rope.scaling(RopeScaling::Llama3(Llama3 {
            factor: needed("factor")?,
            low_freq_factor: needed("low_freq_factor")?,
            high_freq_factor: needed("high_freq_factor")?,
            original_len: needed("original_max_position_embeddings")? as usize,
        }))),
        Some(other) => Err(format!("rope_type: expected default, linear or llama3, got {other}").into()),
    }
}

/// SwiGLU of three matrices `[out, in]`.
fn feed_forward(file: &Checkpoint<'_>, name: &str, activation: Activation) -> Result<FeedForward<f32>, Fault> {
    let [gate, up, down] = ["gate_proj", "up_proj", "down_proj"].map(|part| format!("{name}.{part}"));
    let weights = FeedForwardWeights {
        b_in: file.bias(&up)?,
        w_gate: Some(file.linear(&gate)?),
        b_gate: file.bias(&gate)?,
        b_out: file.bias(&down)?,
        ..FeedForwardWeights::new(file.linear(&up)?, file.linear(&down)?)
    };
    Ok(FeedForward::new(weights, activation)?)
}
