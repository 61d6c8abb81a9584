//! Blocks and stacks by their parts: to look at, to take out, to put together again.

use super::feed_forward::FeedForward;
use super::layer::{Block, Norms};
use super::norm::Norm;
use super::stack::Stack;
use crate::element::Element;
use crate::error::Result;
use crate::mha::MultiHeadAttention;

/// What a [`Block`] is made of. The fields can be changed at will: [`Block::from_parts`] checks that they fit.
///
/// A head of a stack that is there, from a file for example, is pruned like this:
///
/// ```
/// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
/// use multihead::{ndarray::{array, Array1, Array2, Array3}, MultiHeadAttention};
/// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
/// # let block = |seed| {
/// #     let attention = MultiHeadAttention::<f64>::builder(16, 4).seed(seed).build()?;
/// #     let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
/// #     Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, Norms::Pre { attention: norm()?, feed_forward: norm()? })
/// # };
/// # let stack = Stack::new(vec![block(1)?, block(2)?], Some(norm()?))?;
/// let with_first = |stack: Stack<f64>, change: &dyn Fn(&MultiHeadAttention<f64>) -> multihead::Result<_>| {
///     let (mut blocks, norm) = stack.into_parts();
///     let mut parts = blocks.remove(0).into_parts();
///     parts.attention = change(&parts.attention)?;
///     blocks.insert(0, Block::from_parts(parts)?);
///     Stack::new(blocks, norm)
/// };
/// let pruned = with_first(stack.clone(), &|attention| attention.prune_heads(&[1]))?;
/// assert_eq!(pruned.blocks()[0].attention().config().heads.num_heads(), 3);
///
/// // It is the stack in which the weights behind the head are 0.
/// let gated = with_first(stack, &|attention| attention.gate(&array![1.0, 0.0, 1.0, 1.0]))?;
/// let x = Array3::from_shape_fn((2, 5, 16), |(b, i, c)| ((b + i * 7 + c * 3) % 11) as f64);
/// let (got, want) = (pruned.forward(&x, &Call::new())?, gated.forward(&x, &Call::new())?);
/// assert!((&got - &want).iter().all(|gap| gap.abs() < 1e-12));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct BlockParts<T> {
    /// Self-attention.
    pub attention: MultiHeadAttention<T>,
    /// Cross-attention and its norm, see [`Block::cross`].
    pub cross: Option<(MultiHeadAttention<T>, Norm<T>)>,
    /// The feed-forward block.
    pub feed_forward: FeedForward<T>,
    /// The norms of self-attention and feed-forward.
    pub norms: Norms<T>,
}

impl<T: Element> Block<T> {
    /// Puts a block together, as [`Block::new`] and [`Block::cross`] do.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let mut parts = block.clone().into_parts();
    /// parts.attention = parts.attention.pool_kv_heads(1)?;
    /// assert_eq!(Block::from_parts(parts)?.attention().config().heads.num_kv_heads(), 1);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::new`] and [`Block::cross`].
    pub fn from_parts(parts: BlockParts<T>) -> Result<Self> {
        let BlockParts { attention, cross, feed_forward, norms } = parts;
        let block = Self::new(attention, feed_forward, norms)?;
        match cross {
            Some((attention, norm)) => block.cross(attention, norm),
            None => Ok(block),
        }
    }

    /// Takes the block apart. Copies by [`Block::prepack`] stay with their parts.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// assert_eq!(Block::from_parts(block.clone().into_parts())?, block);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn into_parts(self) -> BlockParts<T> {
        let Self { attention, cross, feed_forward, norms } = self;
        BlockParts { attention, cross, feed_forward, norms }
    }

    /// Its cross-attention and the norm of that, if there is one.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let [attention, cross] = [1, 2].map(|seed| MultiHeadAttention::<f32>::builder(16, 4).seed(seed).build());
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// # let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// # let (cross, feed_forward) = (cross?, FeedForward::new(weights, Activation::Gelu)?);
    /// let block = Block::new(attention?, feed_forward, norms)?.cross(cross.clone(), norm()?)?;
    /// assert_eq!(block.cross_attention(), Some((&cross, &norm()?)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn cross_attention(&self) -> Option<(&MultiHeadAttention<T>, &Norm<T>)> {
        self.cross.as_ref().map(|(attention, norm)| (attention, norm))
    }

    /// Its feed-forward block.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// assert_eq!(block.feed_forward().weights().w_in.shape(), [16, 64]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn feed_forward(&self) -> &FeedForward<T> {
        &self.feed_forward
    }

    /// Its norms of self-attention and feed-forward, and where they stand.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms.clone())?;
    /// assert_eq!(block.norms(), &norms);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn norms(&self) -> &Norms<T> {
        &self.norms
    }
}

impl<T: Element> Stack<T> {
    /// The norm in the end, if there is one.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// assert_eq!(Stack::new(vec![block], None)?.norm(), None);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn norm(&self) -> Option<&Norm<T>> {
        self.norm.as_ref()
    }

    /// Takes the stack apart into what [`Stack::new`] takes: the blocks in their order, and the norm in the end.
    /// [`BlockParts`] shows a use.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let stack = Stack::new(vec![block.clone(), block], None)?;
    /// let (blocks, norm) = stack.clone().into_parts();
    /// assert_eq!(Stack::new(blocks, norm)?, stack);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn into_parts(self) -> (Vec<Block<T>>, Option<Norm<T>>) {
        (self.blocks, self.norm)
    }
}
