//! How many numbers a layer holds, and what a cache for it takes.
//!
//! ```text
//! parameters  = d_model * num_heads * head_dim + k_dim * num_kv_heads * head_dim
//!             + v_dim * num_kv_heads * value_dim + num_heads * value_dim * d_model
//! cache_bytes = batch * len * num_kv_heads * (head_dim + value_dim) * element_bytes
//! ```

use super::flops::product;
use crate::element::Element;
use crate::mha::{Config, Weights};

impl Config {
    /// How many numbers the four projections hold, and nothing else ([`Weights::parameters`] counts all that is
    /// there). A count that `u64` cannot hold is `u64::MAX`.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(512, 8).num_kv_heads(2).build()?;
    /// assert_eq!(mha.config().parameters(), 2 * 512 * 512 + 2 * 512 * 128);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn parameters(&self) -> u64 {
        self.shapes().map(|(inputs, outputs)| product(&[inputs, outputs])).into_iter().fold(0, u64::saturating_add)
    }

    /// What the keys and values of `len` tokens take in a cache, `element_bytes` each: 4 for `f32`, 2 for half the
    /// width. `cache_bytes(1, 1, 4)` is that of one token. A size that `u64` cannot hold is `u64::MAX`.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let bytes = |kv_heads| -> multihead::Result<u64> {
    ///     let mha = MultiHeadAttention::<f32>::builder(512, 8).num_kv_heads(kv_heads).build()?;
    ///     Ok(mha.config().cache_bytes(1, 1024, size_of::<f32>()))
    /// };
    /// assert_eq!(bytes(8)?, 1024 * 8 * (64 + 64) * 4);
    /// assert_eq!(bytes(8)?, 4 * bytes(2)?);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "kv_cache_size")]
    pub fn cache_bytes(&self, batch: usize, len: usize, element_bytes: usize) -> u64 {
        let widths = self.head_dim.saturating_add(self.value_dim);
        product(&[batch, len, self.heads.num_kv_heads(), widths, element_bytes])
    }
}

impl<T: Element> Weights<T> {
    /// How many numbers there are: projections, biases, sinks, norms, and what is learned for distances.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(512, 8).bias().build()?;
    /// assert_eq!(mha.weights().parameters(), mha.config().parameters() + 4 * 512);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn parameters(&self) -> u64 {
        let Self { w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, sinks, q_norm, k_norm, relative_bias, relative_keys } = self;
        let matrices = [w_q, w_k, w_v, w_o].map(|matrix| matrix.len());
        let vectors =
            [b_q, b_k, b_v, b_o, sinks, q_norm, k_norm].map(|vector| vector.as_ref().map_or(0, |vector| vector.len()));
        let tables = [relative_bias, relative_keys].map(|table| table.as_ref().map_or(0, |table| table.len()));
        matrices.into_iter().chain(vectors).chain(tables).map(|n| n as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use crate::mha::MultiHeadAttention;

    #[test]
    fn counts_are_those_of_the_arrays() {
        let builder = MultiHeadAttention::<f32>::builder(12, 4).num_kv_heads(2).head_dim(5).value_dim(7);
        let mha = builder.k_dim(11).v_dim(13).bias().sinks().build().unwrap();
        let matrices = 12 * 4 * 5 + 11 * 2 * 5 + 13 * 2 * 7 + 4 * 7 * 12;
        assert_eq!(mha.config().parameters(), matrices);
        assert_eq!(mha.weights().parameters(), matrices + 4 * 5 + 2 * 5 + 2 * 7 + 12 + 4);
        assert_eq!(mha.config().cache_bytes(3, 100, 2), 3 * 100 * 2 * (5 + 7) * 2);
    }

    #[test]
    fn huge_and_empty_sizes_do_not_overflow() {
        let mha = MultiHeadAttention::<f32>::builder(12, 4).build().unwrap();
        assert_eq!(mha.config().cache_bytes(usize::MAX, usize::MAX, 4), u64::MAX);
        assert_eq!(mha.config().cache_bytes(usize::MAX, usize::MAX, 0), 0);
    }
}
