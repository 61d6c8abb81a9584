//! How many numbers a layer holds, and what a cache for it takes.
//!
//! ```text
//! parameters  = d_model * num_heads * head_dim + k_dim * num_kv_heads * head_dim
//!             + v_dim * num_kv_heads * value_dim + num_heads * value_dim * d_model
//!             + biases + sinks + norms + tables of distances, where there are any
//! cache_bytes = batch * len * num_kv_heads * (head_dim + value_dim) * element_bytes
//! ```

use super::flops::product;
use crate::element::Element;
use crate::mha::{Config, Projection, Weights};

impl Config {
    /// How many numbers the weights of such a layer hold, as [`Weights::parameters`] counts them: projections, biases,
    /// sinks, norms, and what is learned for distances. A count that `u64` cannot hold is `u64::MAX`.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(512, 8).num_kv_heads(2).sinks().build()?;
    /// assert_eq!(mha.config().parameters(), 2 * 512 * 512 + 2 * 512 * 128 + 8);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn parameters(&self) -> u64 {
        let shapes = self.shapes();
        let matrices = shapes.map(|(inputs, outputs)| product(&[inputs, outputs]));
        let with_bias =
            Projection::ALL.into_iter().zip(shapes).filter(|(projection, _)| self.biases.contains(projection));
        let biases = with_bias.map(|(_, (_, outputs))| outputs as u64);
        let num_heads = self.heads.num_heads();
        let others = [
            if self.sinks { num_heads as u64 } else { 0 },
            (self.head_dim as u64).saturating_mul(u64::from(self.q_norm) + u64::from(self.k_norm)),
            self.relative_bias.map_or(0, |buckets| product(&[buckets.count(), num_heads])),
            self.relative_keys.map_or(0, |clip| product(&[clip.saturating_mul(2).saturating_add(1), self.head_dim])),
        ];
        matrices.into_iter().chain(biases).chain(others).fold(0, u64::saturating_add)
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
    /// assert_eq!(mha.weights().parameters(), 4 * (512 * 512 + 512));
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
        assert_eq!(mha.weights().parameters(), matrices + 4 * 5 + 2 * 5 + 2 * 7 + 12 + 4);
        assert_eq!(mha.config().parameters(), mha.weights().parameters());
        assert_eq!(mha.config().cache_bytes(3, 100, 2), 3 * 100 * 2 * (5 + 7) * 2);
    }

    #[test]
    fn huge_and_empty_sizes_do_not_overflow() {
        let mha = MultiHeadAttention::<f32>::builder(12, 4).build().unwrap();
        assert_eq!(mha.config().cache_bytes(usize::MAX, usize::MAX, 4), u64::MAX);
        assert_eq!(mha.config().cache_bytes(usize::MAX, usize::MAX, 0), 0);
    }
}
