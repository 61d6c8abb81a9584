//! A block for training: the walk forward that keeps what the way back needs, and the way back.
//!
//! ```text
//! Norms::Post      s = x + part(x), y = norm(s)              d_s = norm'(d_y)
//!                                                            d_x = d_s + part'(d_s)
//! Norms::Pre       y = x + part(norm(x))                     d_x = d_y + norm'(part'(d_y))
//! Norms::Parallel  y = x + attention(norm(x))                d_x = d_y + norm'(attention'(d_y))
//!                        + feed_forward(second(x))                     + second'(feed_forward'(d_y))
//! ```
//!
//! `f'` takes the gradient of what f gives to that of what it reads, at what it has read. What is kept are the tokens that each norm
//! reads, and what attention keeps; norms and feed-forward blocks are computed again.

use ndarray::{Array, Array3, ArrayRef};

use super::call::Call;
use super::feed_forward::{self, Passed};
use super::layer::{Block, Norms, Walk, no_memory};
use super::norm::{self, Norm, NormWeights, copied};
use super::parameters::{BlockWeights, StackWeights, check_gradients};
use crate::attention::Workspace;
use crate::element::{Element, reused, zeros};
use crate::error::{Result, check_shape};
use crate::kernels::Start;
use crate::mha::{Inputs, LayerGradientsMut, MultiHeadAttention, Recording, Sequence, TapeRef, Weights};

/// What [`Block::backward`] needs of a forward call: the call, by reference, and what was computed on the way.
///
/// That is what a [`Tape`](crate::Tape) keeps for each attention, and the tokens that each norm reads: `batch * len *
/// d_model` numbers for each part of the block, once more with norms after the parts, and once in all for parallel parts.
///
/// ```
/// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
/// use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention};
/// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
/// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
/// # let norm = || Norm::rms(Array1::ones(16), 1e-6);
/// let norms = Norms::Pre { attention: norm()?, feed_forward: norm()? };
/// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
/// let x = Array3::ones((1, 100, 16));
/// let (_, tape) = block.forward_train(&x, &Call::new())?;
/// // Two arrays of tokens; queries, keys, values and context; the lse of four heads.
/// assert_eq!(tape.bytes(), 4 * 100 * (2 * 16 + 4 * 16 + 4));
/// let (_, tape) = block.forward_train(&x, &Call::new().recompute())?;
/// assert_eq!(tape.bytes(), 4 * 100 * (2 * 16 + 4));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a tape is there for backward"]
pub struct BlockTape<'a, T> {
    call: Call<'a, T>,
    kept: Kept<T>,
}

/// What is kept of one block.
#[derive(Debug, Clone, Default)]
pub(super) struct Kept<T> {
    /// What each norm reads, and before that what the first part reads if its norm comes after it: `[batch, len, d_model]`.
    pub(super) tokens: Vec<Array3<T>>,
    /// Of attention and cross-attention.
    pub(super) recordings: Vec<Recording<T>>,
}

/// The gradients of a loss with respect to all that a block was given and what it holds; with [`StackWeights`], those of a
/// [`Stack`](super::Stack).
#[derive(Debug, Clone, PartialEq)]
pub struct BlockGradients<T, W = BlockWeights<T>> {
    /// `[batch, len, d_model]`
    pub d_x: Array3<T>,
    /// `[batch, kv_len, k_dim]`, where there is a memory; the sum over all that read it.
    pub d_memory: Option<Array3<T>>,
    /// `[batch, len, d_model]`, where there are [`Call::position_embeddings`]; the sum over all that add them.
    pub d_position_embeddings: Option<Array3<T>>,
    /// `[batch, kv_len, k_dim]`, where there are [`Call::memory_position_embeddings`]; the sum over all that add them.
    pub d_memory_position_embeddings: Option<Array3<T>>,
    /// The gradient of each parameter, under its name.
    pub weights: W,
}

/// The gradients of a loss with respect to all that a [`Stack`](super::Stack) was given and what it holds.
pub type StackGradients<T> = BlockGradients<T, StackWeights<T>>;

impl<T: Element, W> BlockGradients<T, W> {
    /// Zeros for parameters, and no inputs yet.
    pub(super) fn begin(weights: W) -> Self {
        let d_x = Array3::zeros((0, 0, 0));
        Self { d_x, d_memory: None, d_position_embeddings: None, d_memory_position_embeddings: None, weights }
    }

    /// Takes the place of the gradients of the inputs.
    pub(super) fn replace(&mut self, d_x: Array3<T>, shared: Shared<T>) {
        self.d_x = d_x;
        (self.d_memory, self.d_position_embeddings) = (shared.d_memory, shared.d_position_embeddings);
        self.d_memory_position_embeddings = shared.d_memory_position_embeddings;
    }
}

/// The gradients of what all blocks of a stack read: sums.
#[derive(Debug)]
pub(super) struct Shared<T> {
    d_memory: Option<Array3<T>>,
    d_position_embeddings: Option<Array3<T>>,
    d_memory_position_embeddings: Option<Array3<T>>,
}

impl<T: Element> Shared<T> {
    /// Zeros for a call with tokens of this shape.
    pub(super) fn zeros(call: &Call<'_, T>, shape: (usize, usize, usize)) -> Result<Self> {
        let tokens = |name| zeros(name, "[batch, len, d_model]", shape);
        let memory = |name| call.memory.map(|memory| zeros(name, "[batch, kv_len, k_dim]", memory.dim())).transpose();
        Ok(Self {
            d_memory: memory("d_memory")?,
            d_position_embeddings: match call.has_position_embeddings() {
                true => Some(tokens("d_position_embeddings")?),
                false => None,
            },
            d_memory_position_embeddings: match call.has_memory_position_embeddings() {
                true => memory("d_memory_position_embeddings")?,
                false => None,
            },
        })
    }
}

/// The way back through one block.
pub(super) struct WayBack<'w, 'c, T> {
    pub(super) call: &'w Call<'c, T>,
    pub(super) kept: &'w Kept<T>,
    /// `[batch, len, d_model]`, of the output and then of the input.
    pub(super) d: &'w mut Array3<T>,
    pub(super) d_weights: &'w mut BlockWeights<T>,
}

/// What blocks have in common on their way back: where the gradients of shared inputs are summed up, and memory.
#[derive(Debug)]
pub(super) struct Back<'w, T> {
    shared: &'w mut Shared<T>,
    pub(super) norm: norm::Room<T>,
    workspace: Workspace<T>,
    feed_forward: feed_forward::Room<T>,
    /// What a part reads and the gradients of that.
    room: [Vec<T>; 3],
}

/// The gradient of what a part gives, and the array for that of what it reads: `[batch, len, d_model]`.
type Passing<'p, T> = (&'p Array3<T>, &'p mut Array3<T>);

/// A part of a block with its norm.
struct Part<'p, T> {
    norm: &'p Norm<T>,
    place: Place,
    /// What the norm reads.
    before_norm: &'p Array3<T>,
    /// What the part reads is this, normalised if there is a norm.
    reads: (&'p Array3<T>, Option<&'p Norm<T>>),
}

/// Where the norm of a part stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Before,
    After,
}

/// An attention, what it reads, and what it kept.
struct Attention<'p, T> {
    mha: &'p MultiHeadAttention<T>,
    x: &'p Array3<T>,
    recording: &'p Recording<T>,
}

impl<T: Element> BlockTape<'_, T> {
    /// How much memory the tape holds; a memory and position embeddings are the caller's.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let feed_forward = FeedForward::new(weights, Activation::Gelu)?;
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// # let block = Block::new(attention, feed_forward, norms)?;
    /// let (_, tape) = block.forward_train(&Array2::ones((10, 16)), &Call::new())?;
    /// // One array of tokens; queries, keys, values and context; the lse of four heads.
    /// assert_eq!(tape.bytes(), 4 * 10 * (16 + 4 * 16 + 4));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn bytes(&self) -> usize {
        self.kept.bytes()
    }
}

impl<T: Element> Kept<T> {
    pub(super) fn bytes(&self) -> usize {
        let tokens: usize = self.tokens.iter().map(|tokens| size_of::<T>() * tokens.len()).sum();
        tokens + self.recordings.iter().map(Recording::bytes).sum::<usize>()
    }
}

impl<T: Element> Block<T> {
    /// [`Block::forward`] for training: the output, which has the shape of `x`, and the tape that [`Block::backward`] goes
    /// back along.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{Array1, Array2, Array3}, Mask, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let (x, causal) = (Array3::ones((2, 5, 16)), Mask::causal());
    /// let call = Call::new().mask(&causal);
    /// let (y, tape) = block.forward_train(&x, &call)?;
    /// assert_eq!(y, block.forward(&x, &call)?);
    /// # let _ = tape;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::forward`].
    pub fn forward_train<'a, D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        call: &Call<'a, T>,
    ) -> Result<(Array<T, D>, BlockTape<'a, T>)> {
        let mut tokens = self.begin(D::batched(x), call, Vec::new())?;
        let mut kept = Kept::default();
        self.run(&mut tokens, call, Walk::Train(&mut kept), &mut Workspace::new())?;
        Ok((D::unbatched(tokens), BlockTape { call: call.clone(), kept }))
    }

    /// The gradients of a loss, from that of the output of [`Block::forward_train`]: `d_y: [batch, len, d_model]` or
    /// `[len, d_model]`, any strides. The block has the parameters that it had then. A token whose gradient is zero all the
    /// way gives nothing to the norms and the feed-forward block, whatever it holds.
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
    /// let (x, memory) = (Array3::ones((2, 5, 16)), Array3::ones((2, 9, 16)));
    /// let (y, tape) = block.forward_train(&x, &Call::new().memory(&memory))?;
    /// let gradients = block.backward(&tape, &y)?;
    /// assert_eq!(gradients.d_x.dim(), (2, 5, 16));
    /// assert_eq!(gradients.d_memory.map(|d| d.dim()), Some((2, 9, 16)));
    /// assert_eq!(gradients.weights.norms.attention.weight.dim(), 16);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if `d_y` has other lengths than the output, or if the tape is not of this block or one with
    /// its sizes; [`crate::Error::TooLarge`] if the gradients do not fit into memory.
    pub fn backward<D: Sequence>(&self, tape: &BlockTape<'_, T>, d_y: &ArrayRef<T, D>) -> Result<BlockGradients<T>> {
        let mut gradients = self.zero_gradients();
        self.backward_add(tape, d_y, &mut gradients)?;
        Ok(gradients)
    }

    /// [`Block::backward`] that adds the gradients of the parameters to what is there, for batches that come in parts. The
    /// gradients of the inputs are replaced: the parts may have different lengths.
    ///
    /// ```
    /// use multihead::block::{Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms};
    /// use multihead::{ndarray::{Array1, Array2, Array3}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// let mut gradients = block.zero_gradients();
    /// for x in [Array3::ones((2, 5, 16)), Array3::ones((3, 4, 16))] {
    ///     let (y, tape) = block.forward_train(&x, &Call::new())?;
    ///     block.backward_add(&tape, &y, &mut gradients)?;
    /// }
    /// assert_eq!(gradients.d_x.dim(), (3, 4, 16));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Block::backward`], and as [`Block::parameters_mut`] for gradients of another block. Nothing is written then.
    pub fn backward_add<D: Sequence>(
        &self,
        tape: &BlockTape<'_, T>,
        d_y: &ArrayRef<T, D>,
        gradients: &mut BlockGradients<T>,
    ) -> Result<()> {
        let BlockTape { call, kept } = tape;
        let shape = self.check_kept(call, kept)?;
        let d_y = D::batched(d_y);
        check_shape("d_y", "[batch, len, d_model]", <[usize; 3]>::from(shape).map(Some), d_y.shape())?;
        check_gradients(self.parameters(), gradients.weights.iter())?;
        let mut shared = Shared::zeros(call, shape)?;
        let mut d = copied("d_x", d_y)?;
        let way = WayBack { call, kept, d: &mut d, d_weights: &mut gradients.weights };
        self.run_back(way, &mut Back::new(&mut shared))?;
        gradients.replace(d, shared);
        Ok(())
    }

    /// Gradients of zero for all parameters, and none of the inputs yet: the start of [`Block::backward_add`], or of an
    /// optimiser's averages.
    ///
    /// ```
    /// # use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms};
    /// # use multihead::{ndarray::{Array1, Array2}, MultiHeadAttention};
    /// # let attention = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// # let weights = FeedForwardWeights::new(Array2::ones((16, 64)), Array2::ones((64, 16)));
    /// # let norms = Norms::Parallel { attention: Norm::rms(Array1::ones(16), 1e-6)?, feed_forward: None };
    /// let block = Block::new(attention, FeedForward::new(weights, Activation::Gelu)?, norms)?;
    /// assert_eq!(block.zero_gradients().weights.feed_forward.w_in, Array2::<f32>::zeros((16, 64)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn zero_gradients(&self) -> BlockGradients<T> {
        BlockGradients::begin(self.zeros())
    }

    /// Checks that this block can have kept it in such a call; returns the shape of the tokens.
    pub(super) fn check_kept(&self, call: &Call<'_, T>, kept: &Kept<T>) -> Result<(usize, usize, usize)> {
        let Kept { tokens, recordings } = kept;
        let parts = 1 + usize::from(self.cross.is_some());
        let arrays = match self.norms {
            Norms::Pre { .. } => parts + 1,
            Norms::Post { .. } => parts + 2,
            Norms::Parallel { .. } => 1,
        };
        let got = [tokens.len(), recordings.len()];
        check_shape("tape", "[arrays of tokens, attentions] of the block", [arrays, parts].map(Some), &got)?;
        let [first, ..] = tokens.as_slice() else { return Ok((0, 0, 0)) };
        let (batch, len, _) = first.dim();
        let expected = [batch, len, self.d_model()].map(Some);
        tokens.iter().try_for_each(|x| check_shape("tape", "[batch, len, d_model]", expected, x.shape()))?;
        // Of what attention reads, only the shape matters here.
        let own = (&self.attention, Inputs::new(first), call.of_attention());
        let cross = match &self.cross {
            None => None,
            Some((cross, _)) => {
                let memory = call.memory.as_ref().ok_or_else(no_memory)?;
                Some((cross, Inputs::new(first).context(memory), call.of_cross()))
            }
        };
        for ((mha, inputs, options), recording) in [Some(own), cross].into_iter().flatten().zip(recordings) {
            TapeRef { inputs: &inputs, options: &options, recording }.check(mha)?;
        }
        Ok(first.dim())
    }

    /// The way back through the block, in place. The gradients of the parameters are added to; the arguments have been
    /// checked.
    pub(super) fn run_back(&self, way: WayBack<'_, '_, T>, back: &mut Back<'_, T>) -> Result<()> {
        match &self.norms {
            Norms::Parallel { .. } => self.run_parallel_back(way, back),
            Norms::Pre { .. } => self.run_parts_back(way, Place::Before, back),
            Norms::Post { .. } => self.run_parts_back(way, Place::After, back),
        }
    }

    /// One part after the other, from the last to the first.
    fn run_parts_back(&self, way: WayBack<'_, '_, T>, place: Place, back: &mut Back<'_, T>) -> Result<()> {
        let WayBack { call, kept: Kept { tokens, recordings }, d, d_weights } = way;
        let BlockWeights { attention: d_attention, cross: d_cross, feed_forward: d_feed_forward, norms: d_norms } =
            d_weights;
        let (first, [between, last]) = self.each_norm();
        let norms: Vec<_> = [Some(first), between, last].into_iter().flatten().collect();
        let part = |index: usize| match place {
            Place::Before => Part {
                norm: norms[index],
                place,
                before_norm: &tokens[index],
                reads: (&tokens[index], Some(norms[index])),
            },
            // What the block begins with comes first, so all others stand one place further.
            Place::After => Part {
                norm: norms[index],
                place,
                before_norm: &tokens[index + 1],
                reads: (&tokens[index], index.checked_sub(1).map(|before| norms[before])),
            },
        };
        if let Some(d_norm) = &mut d_norms.feed_forward {
            part(norms.len() - 1).run_back(d, d_norm, back, |input, (d, d_input), back| {
                let passed = Passed { x: input.view(), d_y: d.view(), d_x: d_input.view_mut() };
                self.feed_forward.differentiate(passed, d_feed_forward, &mut back.feed_forward)
            })?;
        }
        let mut recordings = recordings.iter();
        let (own, other) = (recordings.next(), recordings.next());
        if let (Some((mha, _)), Some(recording)) = (&self.cross, other)
            && let (Some(d_cross), Some(d_norm)) = (d_cross, &mut d_norms.cross)
        {
            part(1).run_back(d, d_norm, back, |x, passing, back| {
                back.read(call, Attention { mha, x, recording }, passing, d_cross)
            })?;
        }
        let Some(recording) = own else { return Ok(()) };
        part(0).run_back(d, &mut d_norms.attention, back, |x, passing, back| {
            back.attend(call, Attention { mha: &self.attention, x, recording }, passing, d_attention)
        })
    }

    /// Both parts, which begin and end with the same tokens.
    fn run_parallel_back(&self, way: WayBack<'_, '_, T>, back: &mut Back<'_, T>) -> Result<()> {
        let WayBack { call, kept: Kept { tokens, recordings }, d, d_weights } = way;
        let (Some(x), Some(recording)) = (tokens.first(), recordings.first()) else { return Ok(()) };
        let (first, [_, second]) = self.each_norm();
        let [mut input, mut d_first, mut d_second] = back.arrays(x)?;
        normalise(x, first, &mut input);
        let attention = Attention { mha: &self.attention, x: &input, recording };
        back.attend(call, attention, (d, &mut d_first), &mut d_weights.attention)?;
        if let Some(second) = second {
            normalise(x, second, &mut input);
        }
        let passed = Passed { x: input.view(), d_y: d.view(), d_x: d_second.view_mut() };
        self.feed_forward.differentiate(passed, &mut d_weights.feed_forward, &mut back.feed_forward)?;
        match second.zip(d_weights.norms.feed_forward.as_mut()) {
            Some((second, d_norm)) => {
                second.differentiate(x, &mut d_second, d_norm, &mut back.norm)?;
                *d += &d_second;
            }
            // Both have read what one norm gave.
            None => d_first += &d_second,
        }
        first.differentiate(x, &mut d_first, &mut d_weights.norms.attention, &mut back.norm)?;
        *d += &d_first;
        back.room = [input, d_first, d_second].map(|array| array.into_raw_vec_and_offset().0);
        Ok(())
    }
}

impl<T: Element> Part<'_, T> {
    /// From the gradient of what comes after the part to that of what comes before it, in place. `run` goes back through
    /// the part itself: it takes what the part reads and the gradient of what it gives, and fills that of what it reads.
    fn run_back(
        self,
        d: &mut Array3<T>,
        d_norm: &mut NormWeights<T>,
        back: &mut Back<'_, T>,
        run: impl FnOnce(&Array3<T>, Passing<'_, T>, &mut Back<'_, T>) -> Result<()>,
    ) -> Result<()> {
        let Self { norm, place, before_norm, reads: (x, before) } = self;
        let [mut input, mut d_input, other] = back.arrays(x)?;
        match before {
            Some(before) => normalise(x, before, &mut input),
            None => input.assign(x),
        }
        if place == Place::After {
            norm.differentiate(before_norm, d, d_norm, &mut back.norm)?;
        }
        run(&input, (d, &mut d_input), back)?;
        if place == Place::Before {
            norm.differentiate(before_norm, &mut d_input, d_norm, &mut back.norm)?;
        }
        *d += &d_input;
        back.room = [input, d_input, other].map(|array| array.into_raw_vec_and_offset().0);
        Ok(())
    }
}

impl<'w, T: Element> Back<'w, T> {
    pub(super) fn new(shared: &'w mut Shared<T>) -> Self {
        Self {
            shared,
            norm: norm::Room::default(),
            workspace: Workspace::new(),
            feed_forward: feed_forward::Room::default(),
            room: Default::default(),
        }
    }

    /// Arrays of the shape of `x`, with any numbers. Who takes them puts their memory back.
    fn arrays(&mut self, x: &Array3<T>) -> Result<[Array3<T>; 3]> {
        let [first, second, third] = std::mem::take(&mut self.room);
        let array = |memory| reused("d_x", "[batch, len, d_model]", x.dim(), memory);
        Ok([array(first)?, array(second)?, array(third)?])
    }

    /// Through self-attention.
    fn attend(
        &mut self,
        call: &Call<'_, T>,
        Attention { mha, x, recording }: Attention<'_, T>,
        (d_output, d_input): Passing<'_, T>,
        d_weights: &mut Weights<T>,
    ) -> Result<()> {
        let (placed, options) = (call.of_tokens(x.view())?, call.of_attention());
        // With position embeddings, queries and keys are other tokens than values.
        let other = |name| zeros(name, "[batch, len, d_model]", x.dim());
        let has_others = call.has_position_embeddings();
        let mut d_key = has_others.then(|| other("d_key")).transpose()?;
        let mut d_value = has_others.then(|| other("d_value")).transpose()?;
        let tape = TapeRef { inputs: &placed.inputs(), options: &options, recording };
        let gradients = LayerGradientsMut {
            d_query: d_input,
            d_key: d_key.as_mut(),
            d_value: d_value.as_mut(),
            d_bias: None,
            weights: d_weights,
        };
        mha.differentiate(tape, d_output, Start::Add, gradients, &mut self.workspace)?;
        if let (Some(d_key), Some(d_value)) = (d_key, d_value) {
            *d_input += &d_key;
            add(&mut self.shared.d_position_embeddings, d_input);
            *d_input += &d_value;
        }
        Ok(())
    }

    /// Through cross-attention.
    fn read(
        &mut self,
        call: &Call<'_, T>,
        Attention { mha, x, recording }: Attention<'_, T>,
        (d_output, d_input): Passing<'_, T>,
        d_weights: &mut Weights<T>,
    ) -> Result<()> {
        let memory = call.memory.ok_or_else(no_memory)?;
        let (placed, key, options) = (call.of_tokens(x.view())?, call.memory_key(memory)?, call.of_cross());
        let other = |name| zeros(name, "[batch, kv_len, k_dim]", memory.dim());
        let mut d_key = other("d_key")?;
        let mut d_value = key.as_ref().map(|_| other("d_value")).transpose()?;
        let tape = TapeRef { inputs: &placed.cross(&memory, key.as_ref()), options: &options, recording };
        let gradients = LayerGradientsMut {
            d_query: d_input,
            d_key: Some(&mut d_key),
            d_value: d_value.as_mut(),
            d_bias: None,
            weights: d_weights,
        };
        mha.differentiate(tape, d_output, Start::Add, gradients, &mut self.workspace)?;
        add(&mut self.shared.d_position_embeddings, d_input);
        add(&mut self.shared.d_memory_position_embeddings, &d_key);
        add(&mut self.shared.d_memory, &d_key);
        if let Some(d_value) = &d_value {
            add(&mut self.shared.d_memory, d_value);
        }
        Ok(())
    }
}

/// `sum += d`, where there is a sum.
fn add<T: Element>(sum: &mut Option<Array3<T>>, d: &Array3<T>) {
    if let Some(sum) = sum {
        *sum += d;
    }
}

/// `norm(x)` into an array of its shape, in standard layout.
fn normalise<T: Element>(x: &Array3<T>, norm: &Norm<T>, into: &mut Array3<T>) {
    norm.fill(into, x);
}
