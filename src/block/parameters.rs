//! The parameters of blocks and stacks, and one array for each of them: gradients, or the averages of an optimiser. Each has
//! a name that says where it is, such as `layers.3.attention.w_q`.

use ndarray::{ArrayViewD, ArrayViewMutD};

use super::feed_forward::FeedForwardWeights;
use super::layer::{Block, Norms};
use super::norm::NormWeights;
use super::stack::Stack;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::mha::Weights;

/// An array for each parameter of a [`Block`], by the names of its parts: gradients, or the averages of an optimiser.
#[derive(Debug, Clone, PartialEq)]
pub struct BlockWeights<T> {
    /// Of self-attention.
    pub attention: Weights<T>,
    /// Of cross-attention, where there is some.
    pub cross: Option<Weights<T>>,
    /// Of the feed-forward block.
    pub feed_forward: FeedForwardWeights<T>,
    /// Of the norms.
    pub norms: BlockNorms<T>,
}

/// An array for each parameter of the norms of a [`Block`].
#[derive(Debug, Clone, PartialEq)]
pub struct BlockNorms<T> {
    /// The norm of self-attention.
    pub attention: NormWeights<T>,
    /// The norm of cross-attention, where there is some.
    pub cross: Option<NormWeights<T>>,
    /// The norm of the feed-forward block, where it has its own.
    pub feed_forward: Option<NormWeights<T>>,
}

/// An array for each parameter of a [`Stack`]: gradients, or the averages of an optimiser.
#[derive(Debug, Clone, PartialEq)]
pub struct StackWeights<T> {
    /// Of each block, in their order.
    pub layers: Vec<BlockWeights<T>>,
    /// Of the norm in the end, where there is one.
    pub norm: Option<NormWeights<T>>,
}

impl<T: Element> BlockWeights<T> {
    /// All arrays that there are, by their names. [`Block::parameters`] has the same names in the same order.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let zeros = block.zero_gradients().weights;
    /// assert!(zeros.iter().map(|(name, _)| name).eq(block.parameters().map(|(name, _)| name)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = (String, ArrayViewD<'_, T>)> {
        let Self { attention, cross, feed_forward, norms } = self;
        let norms = [Some(&norms.attention), norms.cross.as_ref(), norms.feed_forward.as_ref()];
        named(
            attention.iter(),
            cross.as_ref().map(Weights::iter),
            feed_forward.iter(),
            norms.map(|norm| Some(norm?.iter())),
        )
    }

    /// [`BlockWeights::iter`] to write to.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let mut gradients = block.zero_gradients().weights;
    /// gradients.iter_mut().for_each(|(_, mut gradient)| gradient /= 2.0);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (String, ArrayViewMutD<'_, T>)> {
        let Self { attention, cross, feed_forward, norms } = self;
        let norms = [Some(&mut norms.attention), norms.cross.as_mut(), norms.feed_forward.as_mut()];
        named(
            attention.iter_mut(),
            cross.as_mut().map(Weights::iter_mut),
            feed_forward.iter_mut(),
            norms.map(|norm| Some(norm?.iter_mut())),
        )
    }
}

impl<T: Element> StackWeights<T> {
    /// All arrays that there are, by their names. [`Stack::parameters`] has the same names in the same order.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let stack = Stack::new(vec![block], None)?;
    /// let zeros = stack.zero_gradients().weights;
    /// assert!(zeros.iter().map(|(name, _)| name).eq(stack.parameters().map(|(name, _)| name)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = (String, ArrayViewD<'_, T>)> {
        in_stack(self.layers.iter().map(BlockWeights::iter), self.norm.as_ref().map(NormWeights::iter))
    }

    /// [`StackWeights::iter`] to write to.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let mut gradients = Stack::new(vec![block], None)?.zero_gradients().weights;
    /// // Clipped to a norm of 1.
    /// let norm = gradients.iter().map(|(_, d)| d.iter().map(|d| d * d).sum::<f32>()).sum::<f32>().sqrt();
    /// gradients.iter_mut().for_each(|(_, mut d)| d /= norm.max(1.0));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (String, ArrayViewMutD<'_, T>)> {
        in_stack(self.layers.iter_mut().map(BlockWeights::iter_mut), self.norm.as_mut().map(NormWeights::iter_mut))
    }
}

impl<T: Element> Block<T> {
    /// All parameters, by their names and in their order.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let names: Vec<_> = block.parameters().map(|(name, _)| name).collect();
    /// assert_eq!(names[..4], ["attention.w_q", "attention.w_k", "attention.w_v", "attention.w_o"]);
    /// assert_eq!(names[4..], ["feed_forward.w_in", "feed_forward.w_out", "norms.attention.weight"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn parameters(&self) -> impl Iterator<Item = (String, ArrayViewD<'_, T>)> {
        let Self { attention, cross, feed_forward, .. } = self;
        let (own, [between, last]) = self.each_norm();
        let norms = [Some(own), between, last];
        named(
            attention.weights().iter(),
            cross.as_ref().map(|(cross, _)| cross.weights().iter()),
            feed_forward.weights().iter(),
            norms.map(|norm| Some(norm?.weights().iter())),
        )
    }

    /// All parameters to write to, each with its gradient and its name, for an optimiser. [`Stack::parameters_mut`] shows
    /// one. Copies by [`Block::prepack`] are dropped, whatever is written.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let mut block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let (y, tape) = block.forward_train(&Array3::ones((2, 5, 16)), &Call::new())?;
    /// let gradients = block.backward(&tape, &y)?;
    /// for (name, mut w, d_w) in block.parameters_mut(&gradients.weights)? {
    ///     // Norms stay as they are.
    ///     if !name.starts_with("norms") {
    ///         w.scaled_add(-0.01, &d_w);
    ///     }
    /// }
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Gradient`] names the gradient of another shape than its parameter, the one that is missing, and the one that
    /// has no parameter.
    pub fn parameters_mut<'b>(
        &'b mut self,
        gradients: &'b BlockWeights<T>,
    ) -> Result<impl Iterator<Item = (String, ArrayViewMutD<'b, T>, ArrayViewD<'b, T>)>> {
        check_gradients(self.parameters(), gradients.iter())?;
        Ok(in_pairs(self.named_mut(), gradients.iter()))
    }

    fn named_mut(&mut self) -> impl Iterator<Item = (String, ArrayViewMutD<'_, T>)> {
        let Self { attention, cross, feed_forward, norms } = self;
        let (own, second) = match norms {
            Norms::Pre { attention, feed_forward } | Norms::Post { attention, feed_forward } => {
                (attention, Some(feed_forward))
            }
            Norms::Parallel { attention, feed_forward } => (attention, feed_forward.as_mut()),
        };
        let (cross, between) = cross.as_mut().map(|(cross, norm)| (cross, norm)).unzip();
        let norms = [Some(own), between, second];
        named(
            attention.weights_mut().iter_mut(),
            cross.map(|cross| cross.weights_mut().iter_mut()),
            feed_forward.weights_mut().iter_mut(),
            norms.map(|norm| Some(norm?.weights_mut().iter_mut())),
        )
    }

    /// Zeros in the shapes of the parameters.
    pub(super) fn zeros(&self) -> BlockWeights<T> {
        let Self { attention, cross, feed_forward, .. } = self;
        let (own, [between, last]) = self.each_norm();
        BlockWeights {
            attention: attention.weights().zeros_like(),
            cross: cross.as_ref().map(|(cross, _)| cross.weights().zeros_like()),
            feed_forward: feed_forward.weights().zeros_like(),
            norms: BlockNorms {
                attention: own.weights().zeros_like(),
                cross: between.map(|norm| norm.weights().zeros_like()),
                feed_forward: last.map(|norm| norm.weights().zeros_like()),
            },
        }
    }
}

impl<T: Element> Stack<T> {
    /// All parameters, by their names and in their order.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let stack = Stack::new(vec![block.clone(), block], Some(Norm::rms(Array1::ones(16), 1e-6)?))?;
    /// let names: Vec<_> = stack.parameters().map(|(name, _)| name).collect();
    /// assert_eq!(names[0], "layers.0.attention.w_q");
    /// assert_eq!(names[12..], ["layers.1.feed_forward.w_out", "layers.1.norms.attention.weight", "norm.weight"]);
    /// let numbers: usize = stack.parameters().map(|(_, array)| array.len()).sum();
    /// assert_eq!(numbers, 2 * (4 * 16 * 16 + 2 * 16 * 64 + 16) + 16);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn parameters(&self) -> impl Iterator<Item = (String, ArrayViewD<'_, T>)> {
        let norm = self.norm.as_ref().map(|norm| norm.weights().iter());
        in_stack(self.blocks.iter().map(Block::parameters), norm)
    }

    /// All parameters to write to, each with its gradient and its name, for an optimiser.
    ///
    /// This is Adam (Kingma and Ba 2015, <https://arxiv.org/abs/1412.6980>) on a small encoder, whose averages have the
    /// shapes of the gradients:
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// use multihead::{ndarray::{Array1, Array2, Array3, Zip}, Mask, MultiHeadAttention};
    ///
    /// let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// let block = |seed| {
    ///     let attention = MultiHeadAttention::<f32>::builder(16, 4).seed(seed).build()?;
    ///     let draw = |(i, j): (usize, usize)| ((i * 37 + j * 11 + seed as usize) % 19) as f32 / 95.0 - 0.1;
    ///     let weights = FeedForwardWeights::new(
    ///         Array2::from_shape_fn((16, 32), draw),
    ///         Array2::from_shape_fn((32, 16), draw),
    ///     );
    ///     let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    ///     Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)
    /// };
    /// let mut stack = Stack::new(vec![block(1)?, block(2)?], Some(norm()?))?;
    ///
    /// // Each token is to become the one before it.
    /// let x = Array3::from_shape_fn((2, 6, 16), |(b, i, c)| ((b * 5 + i * 7 + c * 3) % 11) as f32 / 5.0 - 1.0);
    /// let target = Array3::from_shape_fn(x.dim(), |(b, i, c)| x[[b, i.max(1) - 1, c]]);
    /// let causal = Mask::causal();
    /// let mut mean = stack.zero_gradients().weights;
    /// let mut square = mean.clone();
    /// let mut losses = Vec::new();
    /// for step in 1..=60 {
    ///     let call = Call::new().mask(&causal).dropout(0.05, step as u64);
    ///     let (y, tape) = stack.forward_train(&x, &call)?;
    ///     let d_y = y - &target;
    ///     losses.push(d_y.mapv(|d| d * d).sum() / 2.0);
    ///     let gradients = stack.backward(&tape, &d_y)?;
    ///     let unbias = |beta: f32| 1.0 - beta.powi(step);
    ///     let rate = 0.02 * unbias(0.999).sqrt() / unbias(0.9);
    ///     let averages = mean.iter_mut().zip(square.iter_mut());
    ///     for ((_, w, d_w), ((_, mean), (_, square))) in stack.parameters_mut(&gradients.weights)?.zip(averages) {
    ///         Zip::from(w).and(d_w).and(mean).and(square).for_each(|w, &d_w, mean, square| {
    ///             *mean += 0.1 * (d_w - *mean);
    ///             *square += 0.001 * (d_w * d_w - *square);
    ///             *w -= rate * *mean / (square.sqrt() + 1e-8);
    ///         });
    ///     }
    /// }
    /// assert!(losses[59] < 0.5 * losses[0], "{losses:?}");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::parameters_mut`].
    pub fn parameters_mut<'b>(
        &'b mut self,
        gradients: &'b StackWeights<T>,
    ) -> Result<impl Iterator<Item = (String, ArrayViewMutD<'b, T>, ArrayViewD<'b, T>)>> {
        check_gradients(self.parameters(), gradients.iter())?;
        let norm = self.norm.as_mut().map(|norm| norm.weights_mut().iter_mut());
        let parameters = in_stack(self.blocks.iter_mut().map(Block::named_mut), norm);
        Ok(in_pairs(parameters, gradients.iter()))
    }
}

/// The arrays of the parts of a block under its name for each part.
fn named<V>(
    attention: impl Iterator<Item = (&'static str, V)>,
    cross: Option<impl Iterator<Item = (&'static str, V)>>,
    feed_forward: impl Iterator<Item = (&'static str, V)>,
    norms: [Option<impl Iterator<Item = (&'static str, V)>>; 3],
) -> impl Iterator<Item = (String, V)> {
    let under = |part: &'static str| move |(name, array): (&'static str, V)| (format!("{part}.{name}"), array);
    let norms = ["norms.attention", "norms.cross", "norms.feed_forward"].into_iter().zip(norms);
    let norms = norms.flat_map(move |(part, norm)| norm.into_iter().flatten().map(under(part)));
    let cross = cross.into_iter().flatten().map(under("cross"));
    attention.map(under("attention")).chain(cross).chain(feed_forward.map(under("feed_forward"))).chain(norms)
}

/// The arrays of the blocks and of the last norm under the names of a stack.
fn in_stack<V, B: Iterator<Item = (String, V)>>(
    blocks: impl Iterator<Item = B>,
    norm: Option<impl Iterator<Item = (&'static str, V)>>,
) -> impl Iterator<Item = (String, V)> {
    let in_block =
        |(index, arrays): (usize, B)| arrays.map(move |(name, array)| (format!("layers.{index}.{name}"), array));
    let norm = norm.into_iter().flatten().map(|(name, array)| (format!("norm.{name}"), array));
    blocks.enumerate().flat_map(in_block).chain(norm)
}

/// Parameters with their gradients, which have been checked.
fn in_pairs<P, G>(
    parameters: impl Iterator<Item = (String, P)>,
    gradients: impl Iterator<Item = (String, G)>,
) -> impl Iterator<Item = (String, P, G)> {
    parameters.zip(gradients).map(|((name, parameter), (_, gradient))| (name, parameter, gradient))
}

/// Checks that there is a gradient of the same shape for each parameter, and no other.
pub(super) fn check_gradients<'p, 'g, T: 'p + 'g>(
    parameters: impl Iterator<Item = (String, ArrayViewD<'p, T>)>,
    gradients: impl Iterator<Item = (String, ArrayViewD<'g, T>)>,
) -> Result<()> {
    let parameters: Vec<_> = parameters.map(|(name, array)| (name, array.shape().to_vec())).collect();
    let gradients: Vec<_> = gradients.map(|(name, array)| (name, array.shape().to_vec())).collect();
    if parameters == gradients {
        return Ok(());
    }
    // Something is wrong; what comes first in the order of the parameters is named.
    let text = |shape: Option<&Vec<usize>>| shape.map_or_else(|| "None".into(), |shape| format!("{shape:?}"));
    for (name, _) in parameters.iter().chain(&gradients) {
        let [expected, got] =
            [&parameters, &gradients].map(|list| list.iter().find(|(other, _)| other == name).map(|(_, shape)| shape));
        if expected != got {
            return Err(Error::Gradient { parameter: name.clone(), expected: text(expected), got: text(got) });
        }
    }
    Ok(())
}
