//! Blocks one after the other, and a norm in the end if there is one.

use ndarray::{Array, Array3, ArrayRef, ArrayView3};

use super::call::Call;
use super::decode::{BlockCache, appending};
use super::layer::{Block, Walk, write_to};
use super::norm::{Norm, copied, copied_to};
use super::parameters::{StackWeights, check_gradients};
use super::train::{Back, BlockGradients, Kept, Shared, StackGradients, WayBack};
use crate::attention::Workspace;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::kernels::NormInput;
use crate::mha::Sequence;

/// Blocks one after the other, and a norm in the end if there is one: an encoder or a decoder.
///
/// ```
/// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
/// use multihead::{ndarray::{s, Array1, Array2, Array3}, Mask, MultiHeadAttention};
///
/// let norm = || Norm::rms(Array1::ones(16), 1e-6);
/// let block = |seed| {
///     let attention = MultiHeadAttention::<f64>::builder(16, 4).seed(seed).build()?;
///     let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::eye(64).slice_move(s![.., ..16]));
///     Block::new(attention, FeedForward::new(weights, Activation::Silu)?, Norms::Pre { attention: norm()?, feed_forward: norm()? })
/// };
/// let decoder = Stack::new(vec![block(1)?, block(2)?], Some(norm()?))?;
///
/// // A prompt of four tokens and a step are the same as five tokens at once.
/// let x = Array3::from_shape_fn((1, 5, 16), |(_, i, c)| ((i * 7 + c * 3) % 11) as f64);
/// let mut cache = decoder.cache(1, 5)?;
/// decoder.decode(&x.slice(s![.., ..4, ..]), &Call::new(), &mut cache)?;
/// let last = decoder.decode(&x.slice(s![.., 4.., ..]), &Call::new(), &mut cache)?;
/// let full = decoder.forward(&x, &Call::new().mask(&Mask::causal()))?;
/// assert!((&last - &full.slice(s![.., 4.., ..])).iter().all(|gap| gap.abs() < 1e-12));
/// # Ok::<(), multihead::Error>(())
/// ```
#[doc(alias = "TransformerEncoder")]
#[doc(alias = "TransformerDecoder")]
#[derive(Debug, Clone, PartialEq)]
pub struct Stack<T> {
    pub(super) blocks: Vec<Block<T>>,
    pub(super) norm: Option<Norm<T>>,
}

/// What [`Stack::backward`] needs of a forward call: what a [`BlockTape`](super::BlockTape) keeps for each block, and the
/// tokens that the norm in the end reads.
#[derive(Debug, Clone)]
#[must_use = "a tape is there for backward"]
pub struct StackTape<'a, T> {
    call: Call<'a, T>,
    blocks: Vec<Kept<T>>,
    /// `[batch, len, d_model]`, where there is a norm in the end.
    before_norm: Option<Array3<T>>,
}

impl<T: Element> Stack<T> {
    /// Blocks of one width.
    ///
    /// # Errors
    /// [`Error::Value`] if there is no block, [`Error::Shape`] if one of them or the norm has another width than the first.
    ///
    /// ```
    /// # use multihead::block::Stack;
    /// let error = Stack::<f32>::new(Vec::new(), None).unwrap_err();
    /// assert_eq!(error.to_string(), "blocks: expected at least 1, got 0");
    /// ```
    pub fn new(blocks: Vec<Block<T>>, norm: Option<Norm<T>>) -> Result<Self> {
        let Some(first) = blocks.first() else { return Err(Error::value("blocks", "at least 1", 0)) };
        let d_model = first.d_model();
        let width = |name, width: usize| check_shape(name, "[d_model]", [Some(d_model)], &[width]);
        blocks.iter().try_for_each(|block| width("blocks", block.d_model()))?;
        norm.iter().try_for_each(|norm| width("norm", norm.d_model()))?;
        Ok(Self { blocks, norm })
    }

    /// [`Block::prepack`] for each block: few tokens take 0.7 to 0.8 of the time, and the matrices twice their memory
    /// (three and a half times if they are `f32` and the CPU has a matrix unit).
    /// [`Stack::parameters_mut`] drops the copies: after training, pack again.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let mut decoder = Stack::new(vec![block.clone(), block], None)?;
    /// decoder.prepack()?;
    /// assert!(decoder.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there is no memory for a copy; the stack works without it then.
    pub fn prepack(&mut self) -> Result<()> {
        self.blocks.iter_mut().try_for_each(Block::prepack)
    }

    /// Whether [`Stack::prepack`] was called since weights were changed.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// assert!(!Stack::new(vec![block], None)?.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn is_prepacked(&self) -> bool {
        self.blocks.iter().all(Block::is_prepacked)
    }

    /// The blocks in their order.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let stack = Stack::new(vec![block.clone(), block], None)?;
    /// assert_eq!(stack.blocks().len(), 2);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn blocks(&self) -> &[Block<T>] {
        &self.blocks
    }

    /// `x: [batch, len, d_model]` or `[len, d_model]`; the output has the same shape.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let encoder = Stack::new(vec![block.clone(), block], None)?;
    /// let padding = Mask::key_lengths(&[5, 3]);
    /// let y = encoder.forward(&Array3::ones((2, 5, 16)), &Call::new().mask(&padding))?;
    /// assert_eq!(y.shape(), [2, 5, 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward<D: Sequence>(&self, x: &ArrayRef<T, D>, call: &Call<'_, T>) -> Result<Array<T, D>> {
        Ok(D::unbatched(self.forwarded(D::batched(x), call, &mut Workspace::new())?))
    }

    /// [`Stack::forward`] into an array of the caller's, which has the shape of `x` and any strides. With the same workspace,
    /// calls after the first allocate nothing, unless the call has position embeddings.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention, Workspace};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let encoder = Stack::new(vec![block.clone(), block], None)?;
    /// let (x, mut y) = (Array3::ones((2, 5, 16)), Array3::zeros((2, 5, 16)));
    /// encoder.forward_into(&x, &Call::new(), &mut y, &mut Workspace::new())?;
    /// assert_eq!(y, encoder.forward(&x, &Call::new())?);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::forward_into`].
    pub fn forward_into<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        output: &mut ArrayRef<T, D>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        write_to(x, output, workspace, |x, workspace| self.forwarded(x, call, workspace))
    }

    /// [`Stack::forward`] for training: the output, which has the shape of `x`, and the tape that [`Stack::backward`] goes
    /// back along.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let encoder = Stack::new(vec![block.clone(), block], None)?;
    /// let x = Array3::ones((2, 5, 16));
    /// let (y, tape) = encoder.forward_train(&x, &Call::new().dropout(0.1, 7))?;
    /// let gradients = encoder.backward(&tape, &y)?;
    /// # let _ = gradients;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward_train<'a, D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'a, T>,
    ) -> Result<(Array<T, D>, StackTape<'a, T>)> {
        let mut blocks: Vec<Kept<T>> = self.blocks.iter().map(|_| Kept::default()).collect();
        let workspace = &mut Workspace::new();
        let tokens = self.begin(D::batched(x), call, workspace)?;
        let mut tokens = self.walk(tokens, call, blocks.iter_mut().map(Walk::Train), workspace)?;
        let before_norm = self.norm.as_ref().map(|_| copied("tape", tokens.view())).transpose()?;
        self.finish(&mut tokens);
        Ok((D::unbatched(tokens), StackTape { call: call.clone(), blocks, before_norm }))
    }

    /// The gradients of a loss, from that of the output of [`Stack::forward_train`]: `d_y: [batch, len, d_model]` or
    /// `[len, d_model]`, any strides. The stack has the parameters that it had then. [`Stack::parameters_mut`] shows a
    /// training loop.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let encoder = Stack::new(vec![block.clone(), block], Some(Norm::rms(Array1::ones(16), 1e-6)?))?;
    /// let (y, tape) = encoder.forward_train(&Array3::ones((2, 5, 16)), &Call::new())?;
    /// let gradients = encoder.backward(&tape, &y)?;
    /// assert_eq!(gradients.d_x.dim(), (2, 5, 16));
    /// assert_eq!(gradients.weights.layers[1].attention.w_q.dim(), (16, 16));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::backward`].
    pub fn backward<D: Sequence>(&self, tape: &StackTape<'_, T>, d_y: &ArrayRef<T, D>) -> Result<StackGradients<T>> {
        let mut gradients = self.zero_gradients();
        self.backward_add(tape, d_y, &mut gradients)?;
        Ok(gradients)
    }

    /// [`Stack::backward`] that adds the gradients of the parameters to what is there, for batches that come in parts. The
    /// gradients of the inputs are replaced: the parts may have different lengths.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let encoder = Stack::new(vec![block.clone(), block], None)?;
    /// let mut gradients = encoder.zero_gradients();
    /// for x in [Array3::ones((2, 5, 16)), Array3::ones((3, 4, 16))] {
    ///     let (y, tape) = encoder.forward_train(&x, &Call::new())?;
    ///     encoder.backward_add(&tape, &y, &mut gradients)?;
    /// }
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::backward_add`]. Nothing is written then.
    pub fn backward_add<D: Sequence>(
        &self,
        tape: &StackTape<'_, T>,
        d_y: &ArrayRef<T, D>,
        gradients: &mut StackGradients<T>,
    ) -> Result<()> {
        let d_y = D::batched(d_y);
        let StackTape { call, blocks, before_norm } = tape;
        let expected = [Some(self.blocks.len()), Some(usize::from(self.norm.is_some()))];
        let got = [blocks.len(), usize::from(before_norm.is_some())];
        check_shape("tape", "[blocks, norms] of the stack", expected, &got)?;
        for (block, kept) in self.blocks.iter().zip(blocks) {
            let (batch, len, d_model) = block.check_kept(call, kept)?;
            check_shape("d_y", "[batch, len, d_model]", [batch, len, d_model].map(Some), d_y.shape())?;
        }
        check_gradients(self.parameters(), gradients.weights.iter())?;

        let mut shared = Shared::zeros(call, d_y.dim())?;
        let mut back = Back::new(&mut shared);
        let mut d = copied("d_x", d_y)?;
        let StackWeights { layers, norm: d_norm } = &mut gradients.weights;
        if let (Some(norm), Some(x), Some(d_norm)) = (&self.norm, before_norm, d_norm) {
            norm.differentiate(x, &mut d, d_norm, &mut back.norm)?;
        }
        let parts = self.blocks.iter().zip(blocks).zip(layers);
        for (index, ((block, kept), d_weights)) in parts.enumerate().rev() {
            block.run_back(WayBack { call: &call.at(index), kept, d: &mut d, d_weights }, &mut back)?;
        }
        gradients.replace(d, shared);
        Ok(())
    }

    /// Gradients of zero for all parameters, and none of the inputs yet: the start of [`Stack::backward_add`], or of an
    /// optimiser's averages.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let gradients = Stack::new(vec![block], None)?.zero_gradients();
    /// assert_eq!(gradients.weights.layers[0].attention.w_q, Array2::<f32>::zeros((16, 16)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn zero_gradients(&self) -> StackGradients<T> {
        let norm = self.norm.as_ref().map(|norm| norm.weights().zeros_like());
        BlockGradients::begin(StackWeights { layers: self.blocks.iter().map(Block::zeros).collect(), norm })
    }

    /// Empty caches for `capacity` tokens in each of `batch` entries, one for each block. Their fields are those of
    /// [`KvCache`](crate::KvCache): `caches.iter_mut().try_for_each(|cache| cache.tokens.truncate(n))` takes tokens back, and
    /// a ring is a [`BlockCache`] with [`KvCache::ring`](crate::KvCache::ring) for the block's
    /// [`cache_shape`](crate::MultiHeadAttention::cache_shape). They keep the type that is computed in; `f16` and `bf16` are
    /// for layers by themselves.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let cache = Stack::new(vec![block.clone(), block], None)?.cache(2, 100)?;
    /// assert_eq!((cache.len(), cache[0].tokens.lengths()), (2, &[0, 0][..]));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there is no memory for them.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<Vec<BlockCache<T>>> {
        self.blocks.iter().map(|block| block.cache(batch, capacity)).collect()
    }

    /// Puts the memory of `call` into the caches, where the cross-attention of each block reads it from then on; an older
    /// memory is forgotten.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention};
    /// let [attention, cross] = [1, 2].map(|seed| MultiHeadAttention::<f64>::builder(16, 4).seed(seed).build());
    /// let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention?, FeedForward::new(weights, Activation::Relu)?, norms)?.cross(cross?, norm()?)?;
    /// let decoder = Stack::new(vec![block], None)?;
    ///
    /// let (x, memory) = (Array3::ones((2, 1, 16)), Array3::ones((2, 9, 16)));
    /// let mut cache = decoder.cache(2, 10)?;
    /// decoder.cache_memory(&Call::new().memory(&memory), &mut cache)?;
    /// let step = decoder.decode(&x, &Call::new(), &mut cache)?;
    /// let full = decoder.forward(&x, &Call::new().memory(&memory))?;
    /// assert!((step / full).iter().all(|ratio| (ratio - 1.0).abs() < 1e-12));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::cache_memory`], and [`Error::Shape`] if there is not one cache for each block. The caches are as they were
    /// then.
    pub fn cache_memory(&self, call: &Call<'_, T>, caches: &mut [BlockCache<T>]) -> Result<()> {
        self.check_count(caches)?;
        let memories = self.blocks.iter().map(|block| block.memory_cache(call)).collect::<Result<Vec<_>>>()?;
        caches.iter_mut().zip(memories).for_each(|(cache, memory)| cache.memory = memory);
        Ok(())
    }

    /// New tokens over themselves and what the caches hold, causal unless the call says otherwise; their keys and values
    /// are appended. One call takes a whole prompt, a chunk of it or a single token.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let decoder = Stack::new(vec![block], None)?;
    /// let mut cache = decoder.cache(1, 100)?;
    /// decoder.decode(&Array2::ones((7, 16)), &Call::new(), &mut cache)?; // the prompt
    /// let next = decoder.decode(&Array2::ones((1, 16)), &Call::new(), &mut cache)?;
    /// assert_eq!((next.dim(), cache[0].tokens.lengths()), ((1, 16), &[8][..]));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::decode`], and [`Error::Shape`] if there is not one cache for each block. The caches are as they were
    /// then, with the exception that [`Block::decode`] names.
    pub fn decode<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        caches: &mut [BlockCache<T>],
    ) -> Result<Array<T, D>> {
        Ok(D::unbatched(self.decoded(D::batched(x), call, caches, &mut Workspace::new())?))
    }

    /// [`Stack::decode`] into an array of the caller's, which has the shape of `x` and any strides. With the same workspace,
    /// steps after the first allocate nothing, unless the call has position embeddings.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention, Workspace};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let decoder = Stack::new(vec![block], None)?;
    /// let (mut cache, mut workspace) = (decoder.cache(1, 100)?, Workspace::new());
    /// let (token, mut next) = (Array2::ones((1, 16)), Array2::zeros((1, 16)));
    /// for _ in 0..10 {
    ///     decoder.decode_into(&token, &Call::new(), &mut cache, &mut next, &mut workspace)?;
    /// }
    /// assert_eq!(cache[0].tokens.lengths(), [10]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Stack::decode`], and [`Error::Shape`] for an output of other lengths. The output is as it was then.
    pub fn decode_into<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        caches: &mut [BlockCache<T>],
        output: &mut ArrayRef<T, D>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        write_to(x, output, workspace, |x, workspace| self.decoded(x, call, caches, workspace))
    }

    fn forwarded(&self, x: ArrayView3<'_, T>, call: &Call<'_, T>, workspace: &mut Workspace<T>) -> Result<Array3<T>> {
        let tokens = self.begin(x, call, workspace)?;
        let mut tokens = self.walk(tokens, call, std::iter::repeat_with(|| Walk::Forward), workspace)?;
        self.finish(&mut tokens);
        Ok(tokens)
    }

    fn decoded(
        &self,
        x: ArrayView3<'_, T>,
        call: &Call<'_, T>,
        caches: &mut [BlockCache<T>],
        workspace: &mut Workspace<T>,
    ) -> Result<Array3<T>> {
        self.check_count(caches)?;
        let tokens = self.begin(x, call, workspace)?;
        for (index, (block, cache)) in self.blocks.iter().zip(caches.iter_mut()).enumerate() {
            block.check_decode(&tokens, &call.at(index), cache)?;
        }
        let mut tokens = appending(caches, workspace, |caches, workspace| {
            self.walk(tokens, call, caches.iter_mut().map(Walk::Decode), workspace)
        })?;
        self.finish(&mut tokens);
        Ok(tokens)
    }

    /// Checks the tokens and copies them: the walk is in place.
    fn begin(&self, x: ArrayView3<'_, T>, call: &Call<'_, T>, workspace: &mut Workspace<T>) -> Result<Array3<T>> {
        let d_model = self.blocks.first().map(Block::d_model);
        check_shape("x", "[batch, len, d_model]", [None, None, d_model], x.shape())?;
        call.check(x)?;
        copied_to(std::mem::take(&mut workspace.block.tokens), "x", x)
    }

    /// The walk through all blocks.
    fn walk<'w>(
        &self,
        mut tokens: Array3<T>,
        call: &Call<'_, T>,
        walks: impl Iterator<Item = Walk<'w, T>>,
        workspace: &mut Workspace<T>,
    ) -> Result<Array3<T>> {
        for (index, (block, walk)) in self.blocks.iter().zip(walks).enumerate() {
            block.run(&mut tokens, &call.at(index), walk, workspace)?;
        }
        Ok(tokens)
    }

    fn finish(&self, tokens: &mut Array3<T>) {
        if let Some(norm) = &self.norm {
            norm.apply(NormInput::Rows, tokens);
        }
    }

    fn check_count(&self, caches: &[BlockCache<T>]) -> Result<()> {
        check_shape("caches", "[blocks]", [Some(self.blocks.len())], &[caches.len()])
    }
}

impl<T: Element> StackTape<'_, T> {
    /// How much memory the tape holds; a memory and position embeddings are the caller's.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let stack = Stack::new(vec![block.clone(), block], None)?;
    /// let (_, tape) = stack.forward_train(&Array3::ones((1, 100, 16)), &Call::new().recompute())?;
    /// // For each block the tokens and the lse of four heads.
    /// assert_eq!(tape.bytes(), 2 * 4 * 100 * (16 + 4));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn bytes(&self) -> usize {
        let last = self.before_norm.as_ref().map_or(0, |x| size_of::<T>() * x.len());
        last + self.blocks.iter().map(Kept::bytes).sum::<usize>()
    }
}
