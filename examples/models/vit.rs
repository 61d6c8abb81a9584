//! ViT (Dosovitskiy et al. 2020, <https://arxiv.org/abs/2010.11929>): the patches of an image are the tokens of an encoder,
//! and one token more stands for the whole image.

use multihead::MultiHeadAttention;
use multihead::block::{Block, Call, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array1, Array2, Array3, Array4, ArrayRef4, s};

use crate::checkpoint::{Checkpoint, Fault, product};

pub(crate) struct Vit {
    patch: usize,
    /// `[channels * patch * patch, d_model]`
    projection: Array2<f32>,
    bias: Array1<f32>,
    /// `[1, 1, d_model]`
    class: Array3<f32>,
    /// `[1, 1 + patches, d_model]`
    positions: Array3<f32>,
    encoder: Stack<f32>,
}

impl Vit {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        let eps = file.number("layer_norm_eps")?;
        let (num_heads, activation) = (file.size("num_attention_heads")?, file.activation("hidden_act")?);
        let block = |i: usize| -> Result<Block<f32>, Fault> {
            let name = |part: &str| format!("layers.{i}.{part}");
            let norms = Norms::Pre {
                attention: file.layer_norm(&name("layernorm_before"), eps)?,
                feed_forward: file.layer_norm(&name("layernorm_after"), eps)?,
            };
            let builder = MultiHeadAttention::builder(file.size("hidden_size")?, num_heads);
            let attention = file.attention(builder, &Layout::vit(&name("attention")))?;
            Ok(Block::new(attention, file.feed_forward(["mlp.fc1", "mlp.fc2"].map(name), activation)?, norms)?)
        };
        let blocks = (0..file.size("num_hidden_layers")?).map(block).collect::<Result<_, _>>()?;
        // A convolution whose steps are as wide as its window is a product with each patch.
        let convolution: Array4<f32> = file.tensor("embeddings.patch_embeddings.projection.weight")?;
        let (d_model, channels, patch, width) = convolution.dim();
        let rows = convolution.into_shape_with_order((d_model, channels * patch * width))?;
        Ok(Self {
            patch,
            projection: rows.reversed_axes(),
            bias: file.tensor("embeddings.patch_embeddings.projection.bias")?,
            class: file.tensor("embeddings.cls_token")?,
            positions: file.tensor("embeddings.position_embeddings")?,
            encoder: Stack::new(blocks, Some(file.layer_norm("layernorm", eps)?))?,
        })
    }

    /// `pixels: [batch, channels, height, width]` to `[batch, 1 + patches, d_model]`; the first token is that of the image.
    pub(crate) fn forward(&self, pixels: &ArrayRef4<f32>) -> Result<Array3<f32>, Fault> {
        let patches = product(&self.patches(pixels)?, &self.projection)? + &self.bias;
        let (batch, len, d_model) = patches.dim();
        if self.positions.dim() != (1, len + 1, d_model) {
            return Err(format!("expected {:?} tokens, got 1 and {len}", self.positions.dim()).into());
        }
        let mut x = Array3::zeros((batch, len + 1, d_model));
        x.slice_mut(s![.., ..1, ..]).assign(&self.class);
        x.slice_mut(s![.., 1.., ..]).assign(&patches);
        x += &self.positions;
        Ok(self.encoder.forward(&x, &Call::new())?)
    }

    /// `[batch, patches, channels * patch * patch]`, row by row of the image.
    fn patches(&self, pixels: &ArrayRef4<f32>) -> Result<Array3<f32>, Fault> {
        let ((batch, channels, height, width), p) = (pixels.dim(), self.patch.max(1));
        let (down, across) = (height / p, width / p);
        let cut = pixels.slice(s![.., .., ..down * p, ..across * p]);
        let cut = cut.to_shape((batch, channels, down, p, across, p))?.permuted_axes([0, 2, 4, 1, 3, 5]);
        let patches = cut.as_standard_layout().into_owned();
        Ok(patches.into_shape_with_order((batch, down * across, channels * p * p))?)
    }
}
