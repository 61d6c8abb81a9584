//! BERT (Devlin et al. 2018, <https://arxiv.org/abs/1810.04805>): an encoder with learned positions and norms after each
//! part.

use multihead::block::{Block, Call, Norm, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array2, Array3};
use multihead::{Mask, MultiHeadAttention};

use crate::checkpoint::{Checkpoint, Fault, embed};

pub(crate) struct Bert {
    /// `[words, d_model]`
    words: Array2<f32>,
    /// `[positions, d_model]`, with the row of the first kind of token added.
    positions: Array2<f32>,
    norm: Norm<f32>,
    pub(crate) encoder: Stack<f32>,
}

impl Bert {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        let eps = file.number("layer_norm_eps")?;
        let (d_model, num_heads) = (file.size("hidden_size")?, file.size("num_attention_heads")?);
        let activation = file.activation("hidden_act")?;
        let block = |i: usize| -> Result<Block<f32>, Fault> {
            let name = |part: &str| format!("encoder.layer.{i}.{part}");
            let builder = MultiHeadAttention::builder(d_model, num_heads);
            let attention = file.attention(builder, &Layout::bert(&name("attention")))?;
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
        let mut encoder = Stack::new(blocks, None)?;
        encoder.prepack()?;
        Ok(Self {
            words: file.tensor("embeddings.word_embeddings.weight")?,
            positions: positions + kinds.row(0),
            norm: file.layer_norm("embeddings.LayerNorm", eps)?,
            encoder,
        })
    }

    /// `ids: [batch, len]`, where each token stands in its sequence, and who sees whom: padding is hidden by
    /// `Mask::key_lengths`, and sequences that are packed one after the other are told apart by `Mask::segments`. The result
    /// is `[batch, len, d_model]`; what stands at padding means nothing.
    pub(crate) fn forward(
        &self,
        ids: &Array2<usize>,
        places: &Array2<usize>,
        mask: &Mask,
    ) -> Result<Array3<f32>, Fault> {
        Ok(self.encoder.forward(&self.embed(ids, places)?, &Call::new().mask(mask))?)
    }

    /// What the encoder receives, `[batch, len, d_model]`.
    pub(crate) fn embed(&self, ids: &Array2<usize>, places: &Array2<usize>) -> Result<Array3<f32>, Fault> {
        let mut x = embed(&self.words, ids)?;
        x += &embed(&self.positions, places)?;
        Ok(self.norm.forward(&x)?)
    }
}
