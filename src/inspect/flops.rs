//! How many floating-point operations a layer takes, a multiplication and an addition being two.
//!
//! ```text
//! projections = 2 * batch * (q_len * d_model * num_heads * head_dim             x W_Q
//!                          + kv_len * k_dim * num_kv_heads * head_dim           x W_K
//!                          + kv_len * v_dim * num_kv_heads * value_dim          x W_V
//!                          + q_len * num_heads * value_dim * d_model)           context W_O
//! attention   = 2 * pairs * (head_dim + value_dim)          Q K^T and P V
//! pairs       = batch * num_heads * q_len * kv_len          fewer where a mask hides some
//! ```
//!
//! As is usual, softmax, biases and masks are not counted: they take `q_len * kv_len` steps a head, where the products
//! take `2 * (head_dim + value_dim)` times as many.

use crate::error::Result;
use crate::mask::Mask;
use crate::mha::Config;

/// Floating-point operations of one call of a layer. A count that `u64` cannot hold is `u64::MAX`.
#[doc(alias = "macs")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Flops {
    /// The four products with W_Q, W_K, W_V and W_O: linear in the lengths.
    pub projections: u64,
    /// The two products of each head, `Q K^T` and `P V`: one of the lengths times the other.
    pub attention: u64,
}

impl Flops {
    /// Both together.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// let flops = mha.config().flops(1, 4, 4);
    /// assert_eq!(flops.total(), flops.projections + flops.attention);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn total(self) -> u64 {
        self.projections.saturating_add(self.attention)
    }
}

impl Config {
    /// What one call costs without a mask, for queries `[batch, q_len, d_model]` and `kv_len` keys an entry.
    ///
    /// How `d_model` is cut into heads does not matter: 8 heads of 64 cost the same as one of 512.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let flops = |heads| MultiHeadAttention::<f32>::builder(512, heads).build().map(|mha| mha.config().flops(1, 128, 128));
    /// let eight = flops(8)?;
    /// assert_eq!(eight, flops(1)?);
    /// assert_eq!(eight.projections, 4 * 2 * 128 * 512 * 512);
    /// assert_eq!(eight.attention, 8 * 2 * 128 * 128 * (64 + 64));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn flops(&self, batch: usize, q_len: usize, kv_len: usize) -> Flops {
        self.count(batch, q_len, kv_len, product(&[batch, self.heads.num_heads(), q_len, kv_len]))
    }

    /// [`Config::flops`] with a mask: only the pairs that may attend are counted, which is what the work would be if
    /// nothing were computed in vain.
    ///
    /// ```
    /// use multihead::{Mask, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(512, 8).build()?;
    /// let causal = mha.config().flops_masked(1, 100, 100, &Mask::causal())?;
    /// assert_eq!(causal.attention, 8 * (100 * 101 / 2) * 2 * (64 + 64));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Mask::bind`], if the mask does not fit these lengths.
    pub fn flops_masked(&self, batch: usize, q_len: usize, kv_len: usize, mask: &Mask) -> Result<Flops> {
        let pairs = mask.bind(batch, self.heads.num_heads(), q_len, kv_len)?.visible_pairs();
        Ok(self.count(batch, q_len, kv_len, pairs))
    }

    fn count(&self, batch: usize, q_len: usize, kv_len: usize, pairs: u64) -> Flops {
        let lengths = [q_len, kv_len, kv_len, q_len];
        let projections = lengths
            .into_iter()
            .zip(self.shapes())
            .map(|(len, (inputs, outputs))| product(&[2, batch, len, inputs, outputs]))
            .fold(0, u64::saturating_add);
        let widths = product(&[2, self.head_dim.saturating_add(self.value_dim)]);
        Flops { projections, attention: pairs.saturating_mul(widths) }
    }
}

/// The product, or the largest number there is; 0 if one factor is.
pub(super) fn product(factors: &[usize]) -> u64 {
    factors.iter().fold(1, |product, &n| product.saturating_mul(u64::try_from(n).unwrap_or(u64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mha::MultiHeadAttention;
    use ndarray::Array2;

    fn config() -> Config {
        let builder = MultiHeadAttention::<f32>::builder(12, 4).num_kv_heads(2).head_dim(5).value_dim(7);
        builder.k_dim(11).v_dim(13).build().unwrap().config().clone()
    }

    #[test]
    fn every_product_is_counted_once() {
        let [query, key] = [3, 9];
        let want = 2 * 2 * (query * 12 * 4 * 5 + key * 11 * 2 * 5 + key * 13 * 2 * 7 + query * 4 * 7 * 12);
        let flops = config().flops(2, 3, 9);
        assert_eq!(flops, Flops { projections: want, attention: 2 * (2 * 4 * 3 * 9) * (5 + 7) });
        assert_eq!(flops.total(), flops.projections + flops.attention);
        assert_eq!(config().flops_masked(2, 3, 9, &Mask::none()).unwrap(), flops);
    }

    #[test]
    fn masks_count_what_they_show() {
        let keep = Array2::from_shape_fn((3, 9), |(i, j)| (i + j) % 3 == 0);
        let masks = [Mask::causal(), Mask::window(1, 1), Mask::key_lengths(&[4, 9]), Mask::keep(&keep).unwrap()];
        for mask in masks.iter().chain([&(masks[0].clone() & masks[3].clone())]) {
            let pairs = mask.bind(2, 4, 3, 9).unwrap().to_array().unwrap().iter().filter(|&&seen| seen).count() as u64;
            assert_eq!(config().flops_masked(2, 3, 9, mask).unwrap().attention, 2 * pairs * (5 + 7), "{mask}");
        }
        assert!(config().flops_masked(3, 3, 9, &masks[2]).is_err());
    }

    #[test]
    fn huge_and_empty_lengths_do_not_overflow() {
        let max = usize::MAX;
        assert_eq!(config().flops(max, max, max), Flops { projections: u64::MAX, attention: u64::MAX });
        assert_eq!(config().flops(max, max, max).total(), u64::MAX);
        assert_eq!(config().flops(0, max, max), Flops::default());
        assert_eq!(config().flops(max, 0, 0).total(), 0);
    }
}
