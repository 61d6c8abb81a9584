//! What the heads of a layer look at.

use super::forward::{Activations, Room};
use super::{Inputs, MultiHeadAttention};
use crate::attention::{Options, Workspace};
use crate::element::Element;
use crate::error::Result;
use crate::inspect::{HeadStatistics, Tokens};

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
        let room = Room { lse: None, weights: None, memory: Default::default() };
        let Activations { q, k, .. } =
            self.activate(inputs, options, room, &mut Workspace::new(), |_, _, _, _| Ok(()))?;
        HeadStatistics::streamed(&q, &k, &self.options(options)?, tokens)
    }
}
