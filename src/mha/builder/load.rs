//! A layer from a file.

use super::Builder;
use crate::element::Element;
use crate::error::Result;
use crate::io::{Asked, Layout, Tensors};
use crate::mha::MultiHeadAttention;

impl<T: Element> Builder<T> {
    /// A layer with the weights of a file, wherever the layout says that they are. `F32`, `F16` and `BF16` tensors make
    /// layers of `f32` and `f64`, `F64` tensors those of `f64`; nothing is rounded. Biases, norms and sinks are there if
    /// the file has them. Those that the builder asks for have to be there. What a file does not say is the builder's:
    /// above all RoPE, without which a layer of LLaMA's loads and has no positions.
    ///
    /// Matrices are `[in, out]` and lie in memory as they lie in the file; products of few tokens depend on that in their
    /// last bits, see [`MultiHeadAttention::prepack`].
    ///
    /// ```
    /// use multihead::{io::{Layout, TensorMap, Tensors}, MultiHeadAttention, Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    /// let builder = MultiHeadAttention::<f32>::builder(32, 4).num_kv_heads(2).rope(rope);
    /// # let mut tensors = TensorMap::new();
    /// # Layout::llama("model.layers.0.self_attn").save(&builder.clone().build()?, &mut tensors)?;
    /// # let bytes = tensors.to_bytes();
    /// // let bytes = std::fs::read("model.safetensors")?;
    /// let tensors = Tensors::from_bytes(&bytes)?;
    /// let mha = builder.load(&tensors, &Layout::llama("model.layers.0.self_attn"))?;
    /// assert_eq!(mha.w_k().shape(), [32, 2 * 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::build`]; [`Error::File`](crate::Error::File) names a tensor that is missing, has another shape than
    /// the sizes of the builder say, or holds numbers that `T` does not hold exactly;
    /// [`Error::Value`](crate::Error::Value) for something that the builder asks for and the layout has no place for.
    #[doc(alias = "load_state_dict")]
    #[doc(alias = "from_pretrained")]
    pub fn load(self, tensors: &Tensors<'_>, layout: &Layout) -> Result<MultiHeadAttention<T>> {
        let asked =
            Asked { biases: &self.biases, sinks: self.sinks, norms: self.qk_norm, relative_keys: self.clip.is_some() };
        let weights = layout.load(tensors, &self.config()?, asked)?;
        self.from_weights(weights)
    }
}
