//! An encoder or decoder layer: attention, cross-attention if there is any, and the feed-forward block, each with a norm and
//! a residual. The formulas stand in [`crate::block`].

use ndarray::{Array, Array3, ArrayRef, ArrayView3};

use super::call::Call;
use super::decode::{BlockCache, step};
use super::feed_forward::{self, FeedForward};
use super::norm::{Norm, add, copied, copied_to};
use super::train::Kept;
use crate::attention::{Options, Workspace};
use crate::element::{Element, reused};
use crate::error::{Error, Result, check_shape};
use crate::kernels::NormInput;
use crate::mha::{Inputs, MultiHeadAttention, Recording, Sequence};

/// The norms of attention and feed-forward, and where they stand: see [`crate::block`] for the formulas.
#[derive(Debug, Clone, PartialEq)]
pub enum Norms<T> {
    /// Before each part: GPT-2, LLaMA, ViT, T5.
    #[doc(alias = "norm_first")]
    Pre {
        /// Before attention.
        attention: Norm<T>,
        /// Before the feed-forward block.
        feed_forward: Norm<T>,
    },
    /// After each part and its residual: the first Transformer, BERT, DETR.
    Post {
        /// After attention.
        attention: Norm<T>,
        /// After the feed-forward block.
        feed_forward: Norm<T>,
    },
    /// Both parts read the same tokens: GPT-NeoX, Falcon.
    #[doc(alias = "use_parallel_residual")]
    #[doc(alias = "parallel_attn")]
    Parallel {
        /// Before attention.
        attention: Norm<T>,
        /// Before the feed-forward block; `None` is that of attention, as Falcon 7B and GPT-J have it.
        feed_forward: Option<Norm<T>>,
    },
}

/// An encoder or decoder layer: attention and feed-forward with norms and residuals, cross-attention between them if there
/// is any.
///
/// ```
/// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
/// use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
///
/// let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
/// let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
/// let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
/// let norm = || Norm::layer(Array1::ones(16), Some(Array1::zeros(16)), 1e-5);
/// let block = Block::new(attention, feed_forward, Norms::Pre { attention: norm()?, feed_forward: norm()? })?;
///
/// let causal = Mask::causal();
/// let y = block.forward(&Array3::ones((2, 5, 16)), &Call::new().mask(&causal))?;
/// assert_eq!(y.shape(), [2, 5, 16]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[doc(alias = "EncoderLayer")]
#[doc(alias = "DecoderLayer")]
#[doc(alias = "TransformerEncoderLayer")]
#[doc(alias = "TransformerDecoderLayer")]
#[derive(Debug, Clone, PartialEq)]
pub struct Block<T> {
    pub(super) attention: MultiHeadAttention<T>,
    pub(super) cross: Option<(MultiHeadAttention<T>, Norm<T>)>,
    pub(super) feed_forward: FeedForward<T>,
    pub(super) norms: Norms<T>,
}

/// Memory that blocks of one stack share, and that a workspace keeps from call to call.
#[derive(Debug, Default)]
pub(crate) struct Room<T> {
    feed_forward: feed_forward::Room<T>,
    normed: Vec<T>,
    update: Vec<T>,
    pub(super) tokens: Vec<T>,
    /// Of caches, before tokens are appended.
    pub(super) lengths: Vec<usize>,
}

/// What a walk through a block does besides.
#[derive(Debug)]
pub(super) enum Walk<'w, T: Element> {
    /// Nothing.
    Forward,
    /// Reads the tokens before, and appends those that come.
    Decode(&'w mut BlockCache<T>),
    /// Keeps what the way back needs.
    Train(&'w mut Kept<T>),
}

/// What a block does between a norm and a residual: reads tokens and fills an array of their shape.
type Part<'r, T> = dyn FnMut(&Array3<T>, &mut Array3<T>) -> Result<()> + 'r;

impl<T: Element> Block<T> {
    /// A block without cross-attention.
    ///
    /// # Errors
    /// [`Error::Shape`] if the parts have different widths.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(8), 1e-6)?, feed_forward: None };
    /// let error = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms).unwrap_err();
    /// assert_eq!(error.to_string(), "norm of attention: expected [d_model] = [16], got [8]");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn new(attention: MultiHeadAttention<T>, feed_forward: FeedForward<T>, norms: Norms<T>) -> Result<Self> {
        let d_model = attention.config().d_model;
        let block = Self { attention, cross: None, feed_forward, norms };
        let (first, [_, second]) = block.each_norm();
        let width = |name, width: usize| check_shape(name, "[d_model]", [Some(d_model)], &[width]);
        width("norm of attention", first.d_model())?;
        width("norm of feed_forward", second.map_or(d_model, Norm::d_model))?;
        width("feed_forward", block.feed_forward.d_model())?;
        // Keys and values come from the tokens themselves.
        width("k_dim of attention", block.attention.config().k_dim)?;
        width("v_dim of attention", block.attention.config().v_dim)?;
        Ok(block)
    }

    /// Puts cross-attention with its norm between attention and feed-forward.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention};
    /// let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let cross = MultiHeadAttention::<f32>::builder(16, 4).k_dim(24).build()?;
    /// let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Relu)?, norms)?.cross(cross, norm()?)?;
    /// let (x, memory) = (Array3::ones((2, 5, 16)), Array3::ones((2, 9, 24)));
    /// assert_eq!(block.forward(&x, &Call::new().memory(&memory))?.shape(), [2, 5, 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for other widths than that of the block; [`Error::Value`] for a parallel block, and if the widths
    /// of the memory's keys and values differ.
    pub fn cross(mut self, attention: MultiHeadAttention<T>, norm: Norm<T>) -> Result<Self> {
        let d_model = self.d_model();
        let width = |name, width: usize| check_shape(name, "[d_model]", [Some(d_model)], &[width]);
        width("cross", attention.config().d_model)?;
        width("norm of cross", norm.d_model())?;
        let (k_dim, v_dim) = (attention.config().k_dim, attention.config().v_dim);
        if k_dim != v_dim {
            let expected = format!("k_dim = {k_dim}, since both read the memory");
            return Err(Error::value("v_dim of cross", expected, v_dim));
        }
        if matches!(self.norms, Norms::Parallel { .. }) {
            return Err(Error::value("cross", "norms before or after each part", "parallel parts"));
        }
        self.cross = Some((attention, norm));
        Ok(self)
    }

    /// Copies all matrices into the order in which products read them, for many calls with the same weights; what that
    /// costs and gives is said at [`MultiHeadAttention::prepack`]. Changing the weights drops the copies.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// # let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let mut block = Block::new(attention, feed_forward, norms)?;
    /// block.prepack()?;
    /// assert!(block.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there is no memory for a copy; the block works without it then.
    pub fn prepack(&mut self) -> Result<()> {
        self.attention.prepack()?;
        if let Some((cross, _)) = &mut self.cross {
            cross.prepack()?;
        }
        self.feed_forward.prepack()
    }

    /// Whether [`Block::prepack`] was called since weights were changed.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// assert!(!Block::new(attention, feed_forward, norms)?.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn is_prepacked(&self) -> bool {
        let cross = self.cross.as_ref().is_none_or(|(cross, _)| cross.is_prepacked());
        self.attention.is_prepacked() && cross && self.feed_forward.is_prepacked()
    }

    /// The width of a token.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// # let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention, feed_forward, norms)?;
    /// assert_eq!(block.d_model(), 16);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn d_model(&self) -> usize {
        self.attention.config().d_model
    }

    /// Its self-attention.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// # let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention, feed_forward, norms)?;
    /// assert_eq!(block.attention().config().heads.num_heads(), 4);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn attention(&self) -> &MultiHeadAttention<T> {
        &self.attention
    }

    /// `x: [batch, len, d_model]` or `[len, d_model]`; the output has the same shape.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// # let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention, feed_forward, norms)?;
    /// let padding = Mask::key_lengths(&[5, 3]);
    /// let y = block.forward(&Array3::ones((2, 5, 16)), &Call::new().mask(&padding))?;
    /// assert_eq!(y.shape(), [2, 5, 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for arrays that do not fit the block or each other, [`Error::Value`] if there is cross-attention
    /// and no memory or the other way round, and what [`MultiHeadAttention::attend`] refuses.
    pub fn forward<D: Sequence>(&self, x: &ArrayRef<T, D>, call: &Call<'_, T>) -> Result<Array<T, D>> {
        let mut tokens = self.begin(D::batched(x), call, Vec::new())?;
        self.run(&mut tokens, call, Walk::Forward, &mut Workspace::new())?;
        Ok(D::unbatched(tokens))
    }

    /// [`Block::forward`] into an array of the caller's, which has the shape of `x` and any strides. With the same workspace,
    /// calls after the first allocate nothing, unless the call has position embeddings.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention, Workspace};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// # let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention, feed_forward, norms)?;
    /// let (x, mut y) = (Array3::ones((2, 5, 16)), Array3::zeros((2, 5, 16)));
    /// block.forward_into(&x, &Call::new(), &mut y, &mut Workspace::new())?;
    /// assert_eq!(y, block.forward(&x, &Call::new())?);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::forward`], and [`Error::Shape`] for an output of other lengths. Nothing is written then.
    pub fn forward_into<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        output: &mut ArrayRef<T, D>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        write_to(x, output, workspace, |x, workspace| {
            let mut tokens = self.begin(x, call, std::mem::take(&mut workspace.block.tokens))?;
            self.run(&mut tokens, call, Walk::Forward, workspace)?;
            Ok(tokens)
        })
    }

    /// Checks the tokens and copies them: the walk is in place.
    pub(super) fn begin(&self, x: ArrayView3<'_, T>, call: &Call<'_, T>, memory: Vec<T>) -> Result<Array3<T>> {
        call.check(x)?;
        check_shape("x", "[batch, len, d_model]", [None, None, Some(self.d_model())], x.shape())?;
        copied_to(memory, "x", x)
    }

    /// The norm of attention, and those of cross-attention and feed-forward where they have their own.
    pub(super) fn each_norm(&self) -> (&Norm<T>, [Option<&Norm<T>>; 2]) {
        let between = self.cross.as_ref().map(|(_, norm)| norm);
        match &self.norms {
            Norms::Pre { attention, feed_forward } | Norms::Post { attention, feed_forward } => {
                (attention, [between, Some(feed_forward)])
            }
            Norms::Parallel { attention, feed_forward } => (attention, [between, feed_forward.as_ref()]),
        }
    }

    /// The walk through the block, in place. `x` is in standard layout.
    pub(super) fn run(
        &self,
        x: &mut Array3<T>,
        call: &Call<'_, T>,
        walk: Walk<'_, T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        let (mut cache, mut kept, mut recordings) = match walk {
            Walk::Forward => (None, None, None),
            Walk::Decode(cache) => (Some(cache), None, None),
            Walk::Train(Kept { tokens, recordings }) => (None, Some(tokens), Some(recordings)),
        };
        if cache.is_none() && self.cross.is_none() && call.memory.is_some() {
            return Err(unread_memory());
        }
        let is_kept = kept.is_some();
        let mut keep = |x: &Array3<T>| -> Result<()> {
            if let Some(kept) = &mut kept {
                kept.push(copied("tape", x.view())?);
            }
            Ok(())
        };
        let Room { feed_forward: mut hidden, normed, update, tokens, lengths } = std::mem::take(&mut workspace.block);
        let array = |name, memory: Vec<T>| reused(name, "[batch, len, d_model]", x.dim(), memory);
        let (mut input, mut output) = (array("normed", normed)?, array("update", update)?);
        let mut attend = |input: &Array3<T>, output: &mut Array3<T>, workspace: &mut Workspace<T>| {
            let placed = call.of_tokens(input.view())?;
            match &mut cache {
                Some(cache) => {
                    let cache = &mut cache.tokens;
                    self.attention.decode_with_into(&placed.inputs(), cache, &step(call), output, workspace)
                }
                None => {
                    let target = Target { output, recordings: recordings.as_deref_mut(), workspace };
                    target.fill(&self.attention, &placed.inputs(), &call.of_attention())
                }
            }
        };
        if !matches!(self.norms, Norms::Pre { .. }) {
            keep(x)?;
        }
        match &self.norms {
            Norms::Parallel { attention, feed_forward: second } => {
                attention.fill(&mut input, x);
                attend(&input, &mut output, workspace)?;
                if let Some(norm) = second {
                    norm.fill(&mut input, x);
                }
                add(x, &output);
                self.feed_forward.run(input.view(), output.view_mut(), &mut hidden)?;
                add(x, &output);
            }
            Norms::Pre { attention, feed_forward: second } | Norms::Post { attention, feed_forward: second } => {
                let is_pre = matches!(self.norms, Norms::Pre { .. });
                let mut part = |norm: &Norm<T>, run: &mut Part<'_, T>| {
                    if is_pre {
                        keep(x)?;
                        norm.fill(&mut input, x);
                        run(&input, &mut output)?;
                        add(x, &output);
                    } else {
                        run(x, &mut output)?;
                        if is_kept {
                            add(x, &output);
                            keep(x)?;
                            norm.apply(NormInput::Rows, x);
                        } else {
                            norm.add(x, &output);
                        }
                    }
                    Ok(())
                };
                part(attention, &mut |input, output| attend(input, output, workspace))?;
                if let Some((cross, norm)) = &self.cross {
                    let options = call.of_cross();
                    part(norm, &mut |input, output| match cache.as_ref().map(|cache| &cache.memory) {
                        Some(Some(memory)) => {
                            let placed = call.of_tokens(input.view())?;
                            cross.decode_cross_into(&placed.query(), memory, &options, output, workspace)
                        }
                        Some(None) => Err(no_memory()),
                        None => {
                            let memory = call.memory.ok_or_else(no_memory)?;
                            let (placed, key) = (call.of_tokens(input.view())?, call.memory_key(memory)?);
                            let target = Target { output, recordings: recordings.as_deref_mut(), workspace };
                            target.fill(cross, &placed.cross(&memory, key.as_ref()), &options)
                        }
                    })?;
                }
                part(second, &mut |input, output| self.feed_forward.run(input.view(), output.view_mut(), &mut hidden))?;
            }
        }
        let [normed, update] = [input, output].map(|array| array.into_raw_vec_and_offset().0);
        workspace.block = Room { feed_forward: hidden, normed, update, tokens, lengths };
        Ok(())
    }
}

/// Where attention puts what it makes.
struct Target<'t, T> {
    output: &'t mut Array3<T>,
    /// There if what backward needs is kept.
    recordings: Option<&'t mut Vec<Recording<T>>>,
    workspace: &'t mut Workspace<T>,
}

impl<T: Element> Target<'_, T> {
    fn fill(self, mha: &MultiHeadAttention<T>, inputs: &Inputs<'_, T>, options: &Options<'_, T>) -> Result<()> {
        let Self { output, recordings, workspace } = self;
        match recordings {
            None => mha.attend_into(inputs, options, output, workspace),
            Some(recordings) => {
                recordings.push(mha.forward_train_into(inputs, options, output, workspace)?.detach());
                Ok(())
            }
        }
    }
}

/// Writes the tokens that `run` makes of `x` to the caller's array of the same shape, and keeps their memory for the next
/// call.
pub(super) fn write_to<T: Element, D: Sequence>(
    x: &ArrayRef<T, D>,
    output: &mut ArrayRef<T, D>,
    workspace: &mut Workspace<T>,
    run: impl FnOnce(ArrayView3<'_, T>, &mut Workspace<T>) -> Result<Array3<T>>,
) -> Result<()> {
    let (x, mut output) = (D::batched(x), D::batched_mut(output));
    let (batch, len, d_model) = x.dim();
    check_shape("output", "[batch, len, d_model]", [batch, len, d_model].map(Some), output.shape())?;
    let tokens = run(x, workspace)?;
    output.assign(&tokens);
    workspace.block.tokens = tokens.into_raw_vec_and_offset().0;
    Ok(())
}

pub(super) fn no_memory() -> Error {
    Error::value("memory", "what cross-attention reads", "none")
}

pub(super) fn unread_memory() -> Error {
    Error::value("memory", "cross-attention that reads it", "a block without")
}
