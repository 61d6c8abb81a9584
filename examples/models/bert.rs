//! BERT (Devlin et al. 2018, <https://arxiv.org/abs/1810.04805>): an encoder with learned positions and norms after each
//! part; padding is hidden from all tokens.

use multihead::Mask;
use multihead::block::{Block, Call, Norm, Norms, Stack};
use multihead::ndarray::{Array2, Array3};

use crate::checkpoint::{Checkpoint, Fault, embed};

pub(crate) struct Bert {
    /// `[words, d_model]`
    words: Array2<f32>,
    /// `[positions, d_model]`, with the row of the first kind of token added.
    positions: Array2<f32>,
    norm: Norm<f32>,
    encoder: Stack<f32>,
}

impl Bert {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        let eps = file.number("layer_norm_eps")?;
        let num_heads = file.size("num_attention_heads")?;
        let activation = file.activation("hidden_act")?;
        let block = |i: usize| -> Result<Block<f32>, Fault> {
            let name = |part: &str| format!("encoder.layer.{i}.{part}");
            let parts =
                ["attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"];
            let attention = file.attention(num_heads, parts.map(name), |builder| builder)?;
            let feed_forward = file.feed_forward(["intermediate.dense", "output.dense"].map(name), activation)?;
            let norms = Norms::Post {
                attention: file.layer_norm(&name("attention.output.LayerNorm"), eps)?,
                feed_forward: file.layer_norm(&name("output.LayerNorm"), eps)?,
            };
            Ok(Block::new(attention, feed_forward, norms)?)
        };
        let blocks = (0..file.size("num_hidden_layers")?).map(block).collect::<Result<_, _>>()?;
        let kinds: Array2<f32> = file.tensor("embeddings.token_type_embeddings.weight")?;
        let positions: Array2<f32> = file.tensor("embeddings.position_embeddings.weight")?;
        Ok(Self {
            words: file.tensor("embeddings.word_embeddings.weight")?,
            positions: positions + kinds.row(0),
            norm: file.layer_norm("embeddings.LayerNorm", eps)?,
            encoder: Stack::new(blocks, None)?,
        })
    }

    /// `ids: [batch, len]`, `lengths: [batch]`: how many of the tokens are no padding. The result is
    /// `[batch, len, d_model]`; what stands at padding means nothing.
    pub(crate) fn forward(&self, ids: &Array2<usize>, lengths: &[usize]) -> Result<Array3<f32>, Fault> {
        let (batch, len) = ids.dim();
        let places = Array2::from_shape_fn((batch, len), |(_, i)| i);
        let x = embed(&self.words, ids)? + embed(&self.positions, &places)?;
        let padding = Mask::key_lengths(lengths);
        Ok(self.encoder.forward(&self.norm.forward(&x)?, &Call::new().mask(&padding))?)
    }
}
