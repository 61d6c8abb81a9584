//! What a call of a block says besides its tokens.

use ndarray::{Array3, ArrayRef, ArrayView3, Axis};

use crate::attention::{Options, mix};
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::mask::Mask;
use crate::mha::{Inputs, Sequence};

/// What a [`Block`](super::Block) or a [`Stack`](super::Stack) is told besides its tokens: who sees whom, and for decoders
/// what the encoder made.
///
/// ```
/// use multihead::{block::Call, ndarray::Array3, Mask};
/// let (causal, padding, memory) = (Mask::causal(), Mask::key_lengths(&[9, 7]), Array3::<f32>::ones((2, 9, 16)));
/// let encoder = Call::<f32>::new().mask(&padding);
/// let decoder = Call::new().mask(&causal).memory(&memory).memory_mask(&padding);
/// # let _ = (encoder, decoder);
/// ```
#[derive(Debug, Clone)]
pub struct Call<'a, T> {
    pub(super) mask: Option<&'a Mask>,
    pub(super) memory: Option<ArrayView3<'a, T>>,
    pub(super) memory_mask: Option<&'a Mask>,
    /// Added to the queries and keys of self-attention and to the queries of cross-attention.
    position_embeddings: Option<ArrayView3<'a, T>>,
    memory_position_embeddings: Option<ArrayView3<'a, T>>,
    /// Rate and seed.
    dropout: Option<(f64, u64)>,
    recompute: bool,
}

/// Tokens, and with their position embeddings added where there are any.
pub(super) struct Placed<'a, T> {
    query: Option<Array3<T>>,
    x: ArrayView3<'a, T>,
}

impl<T: Element> Default for Call<'_, T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<'a, T: Element> Call<'a, T> {
    /// Everybody sees everybody (in decoding, what came before), and there is no memory.
    ///
    /// ```
    /// let call = multihead::block::Call::<f32>::new();
    /// # let _ = call;
    /// ```
    pub fn new() -> Self {
        Self {
            mask: None,
            memory: None,
            memory_mask: None,
            position_embeddings: None,
            memory_position_embeddings: None,
            dropout: None,
            recompute: false,
        }
    }

    /// Who sees whom in self-attention. In decoding this takes the place of the causal mask.
    ///
    /// ```
    /// # use multihead::{block::Call, Mask};
    /// let mask = Mask::causal() & Mask::last_n(4096);
    /// let call = Call::<f32>::new().mask(&mask);
    /// # let _ = call;
    /// ```
    pub fn mask(mut self, mask: &'a Mask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// What cross-attention reads: `[batch, kv_len, k_dim]` or `[kv_len, k_dim]`. In decoding it is read from the cache
    /// instead.
    ///
    /// ```
    /// # use multihead::{block::Call, ndarray::Array3};
    /// let encoded = Array3::<f32>::ones((2, 9, 16));
    /// let call = Call::new().memory(&encoded);
    /// # let _ = call;
    /// ```
    #[doc(alias = "encoder_hidden_states")]
    pub fn memory<D: Sequence>(mut self, memory: &'a ArrayRef<T, D>) -> Self {
        self.memory = Some(D::batched(memory));
        self
    }

    /// Which tokens see which part of the memory: its padding.
    ///
    /// ```
    /// # use multihead::{block::Call, Mask};
    /// let padding = Mask::key_lengths(&[9, 7]);
    /// let call = Call::<f32>::new().memory_mask(&padding);
    /// # let _ = call;
    /// ```
    #[doc(alias = "encoder_attention_mask")]
    pub fn memory_mask(mut self, mask: &'a Mask) -> Self {
        self.memory_mask = Some(mask);
        self
    }

    /// What every block adds to its queries and keys, and not to its values: `[batch, len, d_model]` or `[len, d_model]`.
    /// DETR does so with the places in an image and with its object queries. (These are numbers to add, not the ids of
    /// [`Inputs::positions`](crate::Inputs::positions).)
    ///
    /// ```
    /// # use multihead::{block::Call, ndarray::Array2};
    /// let places = Array2::<f32>::ones((12, 16));
    /// let call = Call::new().position_embeddings(&places);
    /// # let _ = call;
    /// ```
    #[doc(alias = "object_queries")]
    pub fn position_embeddings<D: Sequence>(mut self, embeddings: &'a ArrayRef<T, D>) -> Self {
        self.position_embeddings = Some(D::batched(embeddings));
        self
    }

    /// What every block adds to the keys of its cross-attention: `[batch, kv_len, k_dim]` or `[kv_len, k_dim]`.
    ///
    /// ```
    /// # use multihead::{block::Call, ndarray::Array2};
    /// let (encoded, places) = (Array2::<f32>::ones((12, 16)), Array2::ones((12, 16)));
    /// let call = Call::new().memory(&encoded).memory_position_embeddings(&places);
    /// # let _ = call;
    /// ```
    pub fn memory_position_embeddings<D: Sequence>(mut self, embeddings: &'a ArrayRef<T, D>) -> Self {
        self.memory_position_embeddings = Some(D::batched(embeddings));
        self
    }

    /// Drops weights of attention, see [`Options::dropout`]. Every attention of every block of a stack draws by a seed of
    /// its own, made of this one. For training: a call that does not ask for it drops nothing.
    ///
    /// ```
    /// # use multihead::block::Call;
    /// let call = Call::<f32>::new().dropout(0.1, 17); // another seed for the next step
    /// # let _ = call;
    /// ```
    #[doc(alias = "attention_dropout")]
    pub fn dropout(mut self, rate: f64, seed: u64) -> Self {
        self.dropout = Some((rate, seed));
        self
    }

    /// Lets [`Block::forward_train`](super::Block::forward_train) keep the log-sum-exp of attention and nothing else of
    /// it, see [`Options::recompute`]: the same gradients to the bit, for less memory and more time.
    ///
    /// ```
    /// # use multihead::block::Call;
    /// let call = Call::<f32>::new().recompute();
    /// # let _ = call;
    /// ```
    #[doc(alias = "gradient_checkpointing")]
    pub fn recompute(mut self) -> Self {
        self.recompute = true;
        self
    }

    /// The same for a block of a stack, which drops other weights than the block before.
    pub(super) fn at(&self, index: usize) -> Self {
        Self { dropout: self.dropout.map(|(rate, seed)| (rate, mix(seed ^ index as u64))), ..self.clone() }
    }

    /// What self-attention is asked for.
    pub(super) fn of_attention(&self) -> Options<'a, T> {
        self.options(self.mask, self.dropout)
    }

    /// What cross-attention is asked for.
    pub(super) fn of_cross(&self) -> Options<'a, T> {
        self.options(self.memory_mask, self.dropout.map(|(rate, seed)| (rate, !seed)))
    }

    fn options(&self, mask: Option<&'a Mask>, dropout: Option<(f64, u64)>) -> Options<'a, T> {
        let mut options = mask.map_or_else(Options::new, |mask| Options::new().mask(mask));
        if let Some((rate, seed)) = dropout {
            options = options.dropout(rate, seed);
        }
        if self.recompute { options.recompute() } else { options }
    }

    pub(super) fn has_position_embeddings(&self) -> bool {
        self.position_embeddings.is_some()
    }

    pub(super) fn has_memory_position_embeddings(&self) -> bool {
        self.memory_position_embeddings.is_some()
    }

    /// Checks what is added.
    pub(super) fn check(&self, x: ArrayView3<'_, T>) -> Result<()> {
        like("position_embeddings", &self.position_embeddings, x.dim())?;
        self.check_memory()
    }

    /// Checks what is added to the memory.
    pub(super) fn check_memory(&self) -> Result<()> {
        match &self.memory {
            Some(memory) => like("memory_position_embeddings", &self.memory_position_embeddings, memory.dim()),
            None if self.memory_position_embeddings.is_some() => {
                Err(Error::value("memory_position_embeddings", "a memory that they belong to", "none"))
            }
            None => Ok(()),
        }
    }

    /// Self-attention of `x`.
    pub(super) fn of_tokens<'x>(&self, x: ArrayView3<'x, T>) -> Result<Placed<'x, T>> {
        Ok(Placed { query: added(x, &self.position_embeddings)?, x })
    }

    /// The keys of the memory, where they are not the memory itself.
    pub(super) fn memory_key(&self, memory: ArrayView3<'_, T>) -> Result<Option<Array3<T>>> {
        added(memory, &self.memory_position_embeddings)
    }
}

impl<T: Element> Placed<'_, T> {
    /// Self-attention: the keys are the queries.
    pub(super) fn inputs(&self) -> Inputs<'_, T> {
        match &self.query {
            Some(query) => Inputs::new(query).key_value(query, &self.x),
            None => Inputs::new(&self.x),
        }
    }

    /// The queries of cross-attention, over a cache.
    pub(super) fn query(&self) -> Inputs<'_, T> {
        match &self.query {
            Some(query) => Inputs::new(query),
            None => Inputs::new(&self.x),
        }
    }

    /// Cross-attention: the keys are the memory, unless there are others.
    pub(super) fn cross<'m>(&'m self, memory: &'m ArrayView3<'_, T>, key: Option<&'m Array3<T>>) -> Inputs<'m, T> {
        match key {
            Some(key) => self.query().key_value(key, memory),
            None => self.query().context(memory),
        }
    }
}

/// Checks that an array has the shape of what it is added to, if there is one.
fn like<T>(
    name: &'static str,
    array: &Option<ArrayView3<'_, T>>,
    (batch, len, width): (usize, usize, usize),
) -> Result<()> {
    match array {
        Some(array) => check_shape(name, "[batch, len, d_model]", [batch, len, width].map(Some), array.shape()),
        None => Ok(()),
    }
}

fn added<T: Element>(x: ArrayView3<'_, T>, embeddings: &Option<ArrayView3<'_, T>>) -> Result<Option<Array3<T>>> {
    let Some(embeddings) = embeddings else { return Ok(None) };
    let mut sum = super::norm::copied("x + position_embeddings", x)?;
    debug_assert_eq!(sum.len_of(Axis(1)), embeddings.len_of(Axis(1)));
    sum += embeddings;
    Ok(Some(sum))
}
