//! What the heads of a layer look at.

use ndarray::{Array3, Array4, Axis};

use super::forward::by_head;
use super::{Inputs, MultiHeadAttention};
use crate::attention::Options;
use crate::element::{Element, zeros};
use crate::error::Result;
use crate::inspect::{HeadStatistics, Tokens};
use crate::kernels::Level;
use crate::linear::Projected;
use crate::position::{RopeTable, Turn};

impl<T: Element> MultiHeadAttention<T> {
    /// What each head does on these inputs, in numbers: [`HeadStatistics::streamed`] of the queries and keys that
    /// [`MultiHeadAttention::attend`] makes. The weights are never in memory, whatever the lengths.
    ///
    /// ```
    /// use multihead::{inspect::Tokens, ndarray::Array2, Inputs, Mask, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let x = Array2::from_shape_fn((6, 16), |(i, c)| ((3 * i + c) as f32).sin());
    /// let causal = Mask::causal();
    /// let statistics = mha.head_statistics(&Inputs::new(&x), &Options::new().mask(&causal), &Tokens::new())?;
    /// assert_eq!(statistics.entropy.shape(), [1, 4]);
    /// assert!((statistics.received.sum() - 4.0 * 6.0).abs() < 1e-5);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::attend`], and [`crate::Error::Shape`] for token ids of other lengths.
    pub fn head_statistics(
        &self,
        inputs: &Inputs<'_, T>,
        options: &Options<'_, T>,
        tokens: &Tokens<'_>,
    ) -> Result<HeadStatistics> {
        self.check(inputs, options)?;
        let (q, k) = self.queries_and_keys(inputs, options.level.unwrap_or_else(Level::best))?;
        HeadStatistics::streamed(&q, &k, &self.options(options), tokens)
    }

    /// `[batch, num_heads, q_len, head_dim]` and `[batch, num_kv_heads, kv_len, head_dim]` of checked inputs,
    /// normalised and turned by their positions.
    fn queries_and_keys(&self, inputs: &Inputs<'_, T>, level: Level) -> Result<(Array4<T>, Array4<T>)> {
        let (weights, config) = (&self.weights, &self.config);
        let (batch, q_len, _) = inputs.query.dim();
        let (kv_len, [q_width, k_width]) =
            (inputs.key.len_of(Axis(1)), [&weights.w_q, &weights.w_k].map(|w| w.ncols()));
        let mut q: Array3<T> = zeros("q", "[batch, q_len, num_heads * head_dim]", (batch, q_len, q_width))?;
        let mut k: Array3<T> = zeros("k", "[batch, kv_len, num_kv_heads * head_dim]", (batch, kv_len, k_width))?;
        let projections = [
            Some(Projected::new(inputs.query, weights.w_q.view(), weights.b_q.as_ref(), q.view_mut())),
            Some(Projected::new(inputs.key, weights.w_k.view(), weights.b_k.as_ref(), k.view_mut())),
            None,
        ];
        T::project(level, projections, &mut Vec::new());
        if let (Some(q), Some(k)) = (q.as_slice_mut(), k.as_slice_mut()) {
            self.normalise_heads([q, k]);
        }
        let mut q = by_head(q, config.heads.num_heads(), config.head_dim)?;
        let mut k = by_head(k, config.heads.num_kv_heads(), config.head_dim)?;
        self.turn_heads([q.view_mut(), k.view_mut()], inputs.places(), Turn::There, &mut RopeTable::default())?;
        Ok((q, k))
    }
}
