//! Blocks one after the other, and a norm in the end if there is one.

use ndarray::{Array, ArrayRef};

use super::call::Call;
use super::layer::{Block, BlockCache, Room};
use super::norm::{Norm, copied};
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
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
    blocks: Vec<Block<T>>,
    norm: Option<Norm<T>>,
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

    /// The blocks in their order. [`Stack`] shows how they are made.
    pub fn blocks(&self) -> &[Block<T>] {
        &self.blocks
    }

    /// `x: [batch, len, d_model]` or `[len, d_model]`; the output has the same shape. [`Stack`] shows an example.
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward<D: Sequence>(&self, x: &ArrayRef<T, D>, call: &Call<'_, T>) -> Result<Array<T, D>> {
        self.walk(x, call, None)
    }

    /// Empty caches for `capacity` tokens in each of `batch` entries, one for each block. [`Stack`] shows a use.
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
    /// [`Error::Value`] if there is no memory, or not one cache for each block; [`Error::Shape`] for a memory that does not
    /// fit. The caches are as they were then.
    pub fn cache_memory(&self, call: &Call<'_, T>, caches: &mut [BlockCache<T>]) -> Result<()> {
        self.check_count(caches)?;
        let memories = self.blocks.iter().map(|block| block.cache_memory(call)).collect::<Result<Vec<_>>>()?;
        caches.iter_mut().zip(memories).for_each(|(cache, memory)| cache.memory = memory);
        Ok(())
    }

    /// New tokens over themselves and what the caches hold, causal unless the call says otherwise; their keys and values
    /// are appended. One call takes a whole prompt, a chunk of it or a single token. [`Stack`] shows an example.
    ///
    /// # Errors
    /// As [`Block::forward`]; [`Error::CacheFull`] if there is no room, [`Error::Value`] if there is not one cache for each
    /// block, [`Error::Shape`] for caches of other blocks. The caches are as they were then.
    pub fn decode<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        caches: &mut [BlockCache<T>],
    ) -> Result<Array<T, D>> {
        self.check_count(caches)?;
        self.walk(x, call, Some(caches))
    }

    fn walk<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'_, T>,
        mut caches: Option<&mut [BlockCache<T>]>,
    ) -> Result<Array<T, D>> {
        let x = D::batched(x);
        let d_model = self.blocks.first().map(Block::d_model);
        check_shape("x", "[batch, len, d_model]", [None, None, d_model], x.shape())?;
        call.check(x)?;
        let mut tokens = copied("x", x)?;
        for (block, cache) in self.blocks.iter().zip(caches.iter_mut().flat_map(|caches| caches.iter_mut())) {
            block.check_decode(&tokens, call, cache)?;
        }
        let mut room = Room::default();
        for (index, block) in self.blocks.iter().enumerate() {
            let cache = caches.as_mut().and_then(|caches| caches.get_mut(index));
            block.run(&mut tokens, call, cache, &mut room)?;
        }
        if let Some(norm) = &self.norm {
            norm.apply(&mut tokens);
        }
        Ok(D::unbatched(tokens))
    }

    fn check_count(&self, caches: &[BlockCache<T>]) -> Result<()> {
        check_shape("caches", "[blocks]", [Some(self.blocks.len())], &[caches.len()])
    }
}
