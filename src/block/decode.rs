//! A block with caches: what it keeps of the tokens so far, and a step with it.
//!
//! ```text
//! decode(x, cache)     the block's formula, attention over the cache and x; keys and values of x -> the cache
//! cache_memory(call)   keys and values of the memory -> the cache, where cross-attention reads them
//! ```
//!
//! A part that fails after attention (for want of memory) leaves a cache longer than before, and a stack those of the
//! blocks before as well. [`appending`] takes these tokens back.

use ndarray::{Array, Array3, ArrayRef, ArrayView3, Axis};

use super::call::Call;
use super::layer::{Block, Walk, no_memory, unread_memory, write_to};
use crate::attention::{Options, Workspace};
use crate::cache::KvCache;
use crate::element::Element;
use crate::error::Result;
use crate::mha::{CAUSAL, Inputs, Sequence};

/// What a block keeps of the tokens that it has seen.
#[derive(Debug)]
pub struct BlockCache<T: Element> {
    /// Keys and values of its tokens. A ring will do where the mask is a window.
    pub tokens: KvCache<T>,
    /// Keys and values of the memory, where there is cross-attention.
    pub memory: Option<KvCache<T>>,
}

impl<T: Element> Block<T> {
    /// An empty cache for `capacity` tokens in each of `batch` entries, and without a memory.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// assert_eq!(block.cache(2, 100)?.tokens.lengths(), [0, 0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`](crate::Error::TooLarge) if there is no memory for it.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<BlockCache<T>> {
        Ok(BlockCache { tokens: self.attention.cache(batch, capacity)?, memory: None })
    }

    /// Puts the memory of `call` into the cache, where cross-attention reads it from then on; an older memory is forgotten.
    /// A block without cross-attention keeps nothing of it.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention};
    /// let [attention, cross] = [1, 2].map(|seed| MultiHeadAttention::<f64>::builder(16, 4).seed(seed).build());
    /// let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// let norm = || Norm::rms(Array1::ones(16), 1e-6);
    /// let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
    /// let block = Block::new(attention?, FeedForward::new(weights, Activation::Relu)?, norms)?.cross(cross?, norm()?)?;
    ///
    /// let (x, memory) = (Array3::ones((2, 1, 16)), Array3::ones((2, 9, 16)));
    /// let mut cache = block.cache(2, 10)?;
    /// block.cache_memory(&Call::new().memory(&memory), &mut cache)?;
    /// let step = block.decode(&x, &Call::new(), &mut cache)?;
    /// let full = block.forward(&x, &Call::new().memory(&memory))?;
    /// assert!((step / full).iter().all(|ratio| (ratio - 1.0).abs() < 1e-12));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`](crate::Error::Value) if there is cross-attention and no memory,
    /// [`Error::Shape`](crate::Error::Shape) for a memory that does not fit the block or its position embeddings,
    /// [`Error::TooLarge`](crate::Error::TooLarge) if there is no room for what is kept of it. The cache is as it was then.
    pub fn cache_memory(&self, call: &Call<'_, T>, cache: &mut BlockCache<T>) -> Result<()> {
        cache.memory = self.memory_cache(call)?;
        Ok(())
    }

    /// What cross-attention keeps of the memory, if there is cross-attention.
    pub(super) fn memory_cache(&self, call: &Call<'_, T>) -> Result<Option<KvCache<T>>> {
        let Some((cross, _)) = &self.cross else { return Ok(None) };
        let Some(memory) = call.memory else { return Err(no_memory()) };
        call.check_memory()?;
        let mut cache = cross.cache(memory.len_of(Axis(0)), memory.len_of(Axis(1)))?;
        let key = call.memory_key(memory)?;
        cross.cache_key_value([key.as_ref().map_or(memory, |key| key.view()), memory], &mut cache)?;
        Ok(Some(cache))
    }

    /// New tokens over themselves and what the cache holds, causal unless the call says otherwise; their keys and values are
    /// appended. `x: [batch, len, d_model]` or `[len, d_model]`: a whole prompt, a chunk of it or a single token; the output
    /// has the same shape. Cross-attention reads what [`Block::cache_memory`] has put into the cache.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{s, Array1, Array2}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f64>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::eye(64).slice_move(s![.., ..16]));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let x = Array2::from_shape_fn((5, 16), |(i, c)| ((i * 7 + c * 3) % 11) as f64);
    /// let mut cache = block.cache(1, 100)?;
    /// block.decode(&x.slice(s![..4, ..]), &Call::new(), &mut cache)?; // the prompt
    /// let last = block.decode(&x.slice(s![4.., ..]), &Call::new(), &mut cache)?; // a step
    /// let full = block.forward(&x, &Call::new().mask(&Mask::causal()))?;
    /// assert!((&last - &full.slice(s![4.., ..])).iter().all(|gap| gap.abs() < 1e-12));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::forward`]; [`Error::CacheFull`](crate::Error::CacheFull) if there is no room,
    /// [`Error::Shape`](crate::Error::Shape) for the cache of another block, [`Error::Value`](crate::Error::Value) if there
    /// is cross-attention and no memory in the cache or the other way round. The cache is as it was then; only a ring can
    /// be taken back less far than before. There is one exception, which only
    /// [`Error::TooLarge`](crate::Error::TooLarge) comes with: a ring that held tokens and was given more than 64 at once
    /// may have overwritten keys that the next token would see. Then the cache is empty, and of a stack all caches are.
    pub fn decode<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        cache: &mut BlockCache<T>,
    ) -> Result<Array<T, D>> {
        Ok(D::unbatched(self.decoded(D::batched(x), call, cache, &mut Workspace::new())?))
    }

    /// [`Block::decode`] into an array of the caller's, which has the shape of `x` and any strides. With the same workspace,
    /// steps after the first allocate nothing, unless the call has position embeddings.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention, Workspace};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let (mut cache, mut workspace) = (block.cache(1, 100)?, Workspace::new());
    /// let (token, mut next) = (Array2::ones((1, 16)), Array2::zeros((1, 16)));
    /// for _ in 0..10 {
    ///     block.decode_into(&token, &Call::new(), &mut cache, &mut next, &mut workspace)?;
    /// }
    /// assert_eq!(cache.tokens.lengths(), [10]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::decode`], and [`Error::Shape`](crate::Error::Shape) for an output of other lengths. The output is as it
    /// was then.
    pub fn decode_into<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        cache: &mut BlockCache<T>,
        output: &mut ArrayRef<T, D>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        write_to(x, output, workspace, |x, workspace| self.decoded(x, call, cache, workspace))
    }

    fn decoded(
        &self,
        x: ArrayView3<'_, T>,
        call: &Call<'_, T>,
        cache: &mut BlockCache<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<Array3<T>> {
        let mut tokens = self.begin(x, call, std::mem::take(&mut workspace.block.tokens))?;
        self.check_decode(&tokens, call, cache)?;
        appending(std::slice::from_mut(cache), workspace, |cache, workspace| {
            cache.iter_mut().try_for_each(|cache| self.run(&mut tokens, call, Walk::Decode(cache), workspace))
        })?;
        Ok(tokens)
    }

    /// Checks all that a step could get wrong but for the memory that it takes.
    pub(super) fn check_decode(&self, x: &Array3<T>, call: &Call<'_, T>, cache: &mut BlockCache<T>) -> Result<()> {
        let inputs = Inputs::new(x);
        self.attention.check_decode(&inputs, &mut cache.tokens, &step(call))?;
        match (&self.cross, &cache.memory) {
            (Some((cross, _)), Some(memory)) => cross.check_reads(&inputs, memory, &call.of_cross()),
            (Some(_), None) => Err(no_memory()),
            (None, Some(_)) => Err(unread_memory()),
            (None, None) => Ok(()),
        }
    }
}

/// The options of self-attention in decoding.
pub(super) fn step<'a, T: Element>(call: &Call<'a, T>) -> Options<'a, T> {
    match call.mask {
        Some(_) => call.of_attention(),
        None => call.of_attention().mask(&CAUSAL),
    }
}

/// A walk that appends tokens to caches. If it fails, they are taken back: all caches have the lengths that they had. Where
/// a ring has lost what it would need for that, all of them are empty, since lengths that differ from block to block would
/// be worse: nobody notices, and the next step is wrong.
pub(super) fn appending<T: Element, R>(
    caches: &mut [BlockCache<T>],
    workspace: &mut Workspace<T>,
    walk: impl FnOnce(&mut [BlockCache<T>], &mut Workspace<T>) -> Result<R>,
) -> Result<R> {
    let mut before = std::mem::take(&mut workspace.block.lengths);
    before.clear();
    before.extend(caches.iter().flat_map(|cache| cache.tokens.lengths()));
    let walked = walk(caches, workspace);
    if walked.is_err() {
        let mut rest = before.as_slice();
        let mut is_restored = true;
        for cache in caches.iter_mut() {
            let (own, others) = rest.split_at(cache.tokens.lengths().len());
            is_restored &= cache.tokens.restore(own);
            rest = others;
        }
        if !is_restored {
            caches.iter_mut().for_each(|cache| cache.tokens.clear());
        }
    }
    workspace.block.lengths = before;
    walked
}
