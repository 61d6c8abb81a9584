//! DETR (Carion et al. 2020, <https://arxiv.org/abs/2005.12872>): an encoder over the features of an image, and a decoder
//! whose tokens begin as zeros and are told apart by learned queries. Positions are added to queries and keys, not to
//! values. The convolutions that make the features stay outside.

use multihead::MultiHeadAttention;
use multihead::block::{Block, Call, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array2, Array3, ArrayRef3};

use crate::checkpoint::{Checkpoint, Fault};

/// The configuration does not name it; PyTorch's default.
const EPS: f64 = 1e-5;

pub(crate) struct Detr {
    /// `[queries, d_model]`
    queries: Array2<f32>,
    encoder: Stack<f32>,
    decoder: Stack<f32>,
}

impl Detr {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        let decoder = blocks(file, "decoder")?;
        Ok(Self {
            queries: file.tensor("query_position_embeddings.weight")?,
            encoder: Stack::new(blocks(file, "encoder")?, None)?,
            decoder: Stack::new(decoder, Some(file.layer_norm("decoder.layernorm", EPS)?))?,
        })
    }

    /// `features` and `places: [batch, len, d_model]` to the memory `[batch, len, d_model]` and the objects
    /// `[batch, queries, d_model]`.
    pub(crate) fn forward(
        &self,
        features: &ArrayRef3<f32>,
        places: &ArrayRef3<f32>,
    ) -> Result<(Array3<f32>, Array3<f32>), Fault> {
        let memory = self.encoder.forward(features, &Call::new().position_embeddings(places))?;
        let (count, d_model) = self.queries.dim();
        let shape = (features.dim().0, count, d_model);
        let queries = self.queries.broadcast(shape).ok_or("expected queries for each image")?;
        let call = Call::new().position_embeddings(&queries).memory(&memory).memory_position_embeddings(places);
        let objects = self.decoder.forward(&Array3::zeros(shape), &call)?;
        Ok((memory, objects))
    }
}

/// All blocks of the encoder or the decoder.
fn blocks(file: &Checkpoint<'_>, stack: &str) -> Result<Vec<Block<f32>>, Fault> {
    let (d_model, num_heads) = (file.size("d_model")?, file.size(&format!("{stack}_attention_heads"))?);
    let activation = file.activation("activation_function")?;
    let block = |i: usize| -> Result<Block<f32>, Fault> {
        let name = |part: &str| format!("{stack}.layers.{i}.{part}");
        let attention = |module: &str| {
            let builder = MultiHeadAttention::builder(d_model, num_heads);
            file.attention(builder, &Layout::detr(&name(module)))
        };
        let norms = Norms::Post {
            attention: file.layer_norm(&name("self_attn_layer_norm"), EPS)?,
            feed_forward: file.layer_norm(&name("final_layer_norm"), EPS)?,
        };
        let feed_forward = file.feed_forward(["mlp.fc1", "mlp.fc2"].map(name), activation)?;
        let block = Block::new(attention("self_attn")?, feed_forward, norms)?;
        if !file.has(&name("encoder_attn.q_proj.weight")) {
            return Ok(block);
        }
        Ok(block.cross(attention("encoder_attn")?, file.layer_norm(&name("encoder_attn_layer_norm"), EPS)?)?)
    };
    (0..file.size(&format!("{stack}_layers"))?).map(block).collect()
}
