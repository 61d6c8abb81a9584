//! The first Transformer (Vaswani et al. 2017, <https://arxiv.org/abs/1706.03762>) as PyTorch's `nn.Transformer` has it:
//! norms after each part and at the end of each stack, ReLU, a causal mask on the targets. Words become vectors outside.

use multihead::block::{Activation, Block, Call, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array3, ArrayRef3};
use multihead::{Mask, MultiHeadAttention};

use crate::checkpoint::{Checkpoint, Fault};

/// PyTorch's default.
const EPS: f64 = 1e-5;

/// The number of heads is not in such a file; that of the tiny one in `tests/models`.
pub(crate) const NUM_HEADS: usize = 6;

pub(crate) struct Transformer {
    encoder: Stack<f32>,
    decoder: Stack<f32>,
}

impl Transformer {
    pub(crate) fn load(file: &Checkpoint<'_>, num_heads: usize) -> Result<Self, Fault> {
        Ok(Self { encoder: stack(file, "encoder", num_heads)?, decoder: stack(file, "decoder", num_heads)? })
    }

    /// `source: [batch, kv_len, d_model]` and `target: [batch, len, d_model]` to the memory and the output, of the same
    /// shapes.
    pub(crate) fn forward(
        &self,
        source: &ArrayRef3<f32>,
        target: &ArrayRef3<f32>,
    ) -> Result<(Array3<f32>, Array3<f32>), Fault> {
        let memory = self.encoder.forward(source, &Call::new())?;
        let causal = Mask::causal();
        let output = self.decoder.forward(target, &Call::new().mask(&causal).memory(&memory))?;
        Ok((memory, output))
    }
}

fn stack(file: &Checkpoint<'_>, stack: &str, num_heads: usize) -> Result<Stack<f32>, Fault> {
    let norm = |name: &str| file.layer_norm(name, EPS);
    let block = |i: usize| -> Result<Block<f32>, Fault> {
        let name = |part: &str| format!("{stack}.layers.{i}.{part}");
        let first = norm(&name("norm1"))?;
        let builder = || MultiHeadAttention::builder(first.d_model(), num_heads);
        let attention = |module: &str| file.attention(builder(), &Layout::torch(&name(module)));
        let cross = file.has(&name("multihead_attn.in_proj_weight"));
        let norms =
            Norms::Post { attention: first.clone(), feed_forward: norm(&name(if cross { "norm3" } else { "norm2" }))? };
        let feed_forward = file.feed_forward(["linear1", "linear2"].map(name), Activation::Relu)?;
        let block = Block::new(attention("self_attn")?, feed_forward, norms)?;
        match cross {
            true => Ok(block.cross(attention("multihead_attn")?, norm(&name("norm2"))?)?),
            false => Ok(block),
        }
    };
    let count = file.count(|i| format!("{stack}.layers.{i}.norm1.weight"));
    let blocks = (0..count).map(block).collect::<Result<_, _>>()?;
    Ok(Stack::new(blocks, Some(norm(&format!("{stack}.norm"))?))?)
}
