//! T5 (Raffel et al. 2019, <https://arxiv.org/abs/1910.10683>): an encoder and a decoder that know distances by a learned
//! bias, which all layers of a stack share; RMSNorm before each part, and no scale in attention.

use multihead::block::{Block, Call, FeedForward, FeedForwardWeights, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array2, Array3};
use multihead::position::Buckets;
use multihead::{Mask, MultiHeadAttention};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, Fault, embed, greedy, last_logits, product};

pub(crate) struct T5 {
    /// `[words, d_model]`
    words: Array2<f32>,
    encoder: Stack<f32>,
    decoder: Stack<f32>,
    /// `[d_model, words]`
    head: Array2<f32>,
    /// What the decoder begins with.
    start: usize,
}

impl T5 {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        let count = file.size("relative_attention_num_buckets")?;
        let max_distance = file.size("relative_attention_max_distance")?;
        let words: Array2<f32> = file.tensor("shared.weight")?;
        let head = if file.has("lm_head.weight") { file.linear("lm_head")? } else { words.t().to_owned() };
        let start = file.size("decoder_start_token_id").or(file.size("pad_token_id"))?;
        let encoder = stack(file, "encoder", file.size("num_layers")?, Buckets::T5 { count, max_distance })?;
        let layers = file.size("num_decoder_layers").or(file.size("num_layers"))?;
        let decoder = stack(file, "decoder", layers, Buckets::T5Causal { count, max_distance })?;
        Ok(Self { words, encoder, decoder, head, start })
    }

    /// `ids: [batch, len]` to the memory `[batch, len, d_model]`.
    pub(crate) fn encode(&self, ids: &Array2<usize>) -> Result<Array3<f32>, Fault> {
        Ok(self.encoder.forward(&embed(&self.words, ids)?, &Call::new())?)
    }

    /// `ids: [batch, len]` over the memory, to `[batch, len, d_model]`.
    pub(crate) fn decode(&self, ids: &Array2<usize>, memory: &Array3<f32>) -> Result<Array3<f32>, Fault> {
        let causal = Mask::causal();
        Ok(self.decoder.forward(&embed(&self.words, ids)?, &Call::new().mask(&causal).memory(memory))?)
    }

    /// `[batch, len, d_model]` of the decoder to logits `[batch, len, words]`. (Scaled where the configuration says so,
    /// which changes no order.)
    pub(crate) fn logits(&self, x: &Array3<f32>) -> Result<Array3<f32>, Fault> {
        product(x, &self.head)
    }

    /// What the decoder says to `ids: [batch, len]`, `count` tokens, always the likeliest one.
    pub(crate) fn generate(&self, ids: &Array2<usize>, count: usize) -> Result<Array2<usize>, Fault> {
        let memory = self.encode(ids)?;
        let start = Array2::from_elem((ids.nrows(), 1), self.start);
        let mut cache = self.decoder.cache(ids.nrows(), 1 + count)?;
        self.decoder.cache_memory(&Call::new().memory(&memory), &mut cache)?;
        greedy(&start, count, |ids, _| {
            last_logits(&self.decoder.decode(&embed(&self.words, ids)?, &Call::new(), &mut cache)?, &self.head)
        })
    }
}

fn stack(file: &Checkpoint<'_>, stack: &str, layers: usize, buckets: Buckets) -> Result<Stack<f32>, Fault> {
    let eps = file.number("layer_norm_epsilon")?;
    let table = format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
    let block = |i: usize| -> Result<Block<f32>, Fault> {
        let name = |part: &str| format!("{stack}.block.{i}.layer.{part}");
        let cross = file.has(&name("1.EncDecAttention.q.weight"));
        let last = if cross { 2 } else { 1 };
        let norms = Norms::Pre {
            attention: file.rms_norm(&name("0.layer_norm"), eps)?,
            feed_forward: file.rms_norm(&name(&format!("{last}.layer_norm")), eps)?,
        };
        let own = attention(file, &name("0.SelfAttention"), Some((buckets, &table)))?;
        let block = Block::new(own, feed_forward(file, &name(&format!("{last}.DenseReluDense")))?, norms)?;
        if !cross {
            return Ok(block);
        }
        let norm = file.rms_norm(&name("1.layer_norm"), eps)?;
        Ok(block.cross(attention(file, &name("1.EncDecAttention"), None)?, norm)?)
    };
    let blocks = (0..layers).map(block).collect::<Result<_, _>>()?;
    Ok(Stack::new(blocks, Some(file.rms_norm(&format!("{stack}.final_layer_norm"), eps)?))?)
}

/// Without a scale; with the table of the stack's first layer where there are distances.
fn attention(
    file: &Checkpoint<'_>,
    name: &str,
    distances: Option<(Buckets, &str)>,
) -> Result<MultiHeadAttention<f32>, Fault> {
    let builder = MultiHeadAttention::builder(file.size("d_model")?, file.size("num_heads")?)
        .head_dim(file.size("d_kv")?)
        .scale(1.0);
    match distances {
        None => file.attention(builder, &Layout::t5(name)),
        Some((buckets, table)) => {
            file.attention(builder.relative_bias(buckets), &Layout::t5(name).relative_bias(table))
        }
    }
}

/// Two matrices, or with a gate three.
fn feed_forward(file: &Checkpoint<'_>, name: &str) -> Result<FeedForward<f32>, Fault> {
    let activation = file.activation("dense_act_fn")?;
    let linear = |part: &str| file.linear(&format!("{name}.{part}"));
    let weights = match file.value("is_gated_act") {
        Some(Value::Bool(true)) => FeedForwardWeights {
            w_gate: Some(linear("wi_0")?),
            ..FeedForwardWeights::new(linear("wi_1")?, linear("wo")?)
        },
        _ => FeedForwardWeights::new(linear("wi")?, linear("wo")?),
    };
    Ok(FeedForward::new(weights, activation)?)
}
