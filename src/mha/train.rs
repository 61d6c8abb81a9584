//! The walk forward that remembers: what backward needs of it, as a value.

use ndarray::{Array3, ArrayRef3};

use super::forward::{Activations, Inputs, Room};
use super::{Config, MultiHeadAttention};
use crate::attention::{Options, Workspace};
use crate::element::{Element, reused, zeros};
use crate::error::{Result, check_shape};

/// What [`MultiHeadAttention::backward`] needs of a forward call: its inputs and options, by reference, and what was
/// computed on the way.
///
/// That is `batch * (q_len * num_heads + kv_len * num_kv_heads) * (head_dim + value_dim)` numbers for queries, keys,
/// values and context, and `batch * num_heads * q_len` for the lse. With [`Options::recompute`] the lse is all, and
/// backward computes the rest again.
///
/// ```
/// use multihead::{ndarray::Array3, Inputs, MultiHeadAttention, Options};
/// let mha = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(2).build()?;
/// let x = Array3::ones((1, 100, 64));
/// let (y, tape) = mha.forward_train(&Inputs::new(&x), &Options::new())?;
/// assert_eq!(tape.bytes(), 4 * (100 * (8 + 2) * (8 + 8) + 8 * 100));
/// let (same, tape) = mha.forward_train(&Inputs::new(&x), &Options::new().recompute())?;
/// assert_eq!((tape.bytes(), same), (4 * 8 * 100, y));
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
#[must_use = "a tape is there for backward"]
pub struct Tape<'a, 'b, T> {
    pub(super) inputs: Inputs<'a, T>,
    pub(super) options: Options<'b, T>,
    pub(super) recording: Recording<T>,
}

/// A tape by its parts, wherever they are kept.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TapeRef<'t, 'a, 'b, T> {
    pub(crate) inputs: &'t Inputs<'a, T>,
    pub(crate) options: &'t Options<'b, T>,
    pub(crate) recording: &'t Recording<T>,
}

/// A [`Tape`] without its inputs and options, which borrows nothing: for models that keep a layer's input in the same
/// place as what backward needs of it. See [`Tape::detach`].
#[derive(Debug, Clone)]
pub struct Recording<T> {
    /// `[batch, num_heads, q_len]`
    pub(super) lse: Array3<T>,
    /// `None` is computed again.
    pub(super) activations: Option<Activations<T>>,
}

impl<T: Element> Recording<T> {
    /// The tape again, with the inputs and options of the forward call. [`Tape::detach`] shows a use.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let x = Array3::ones((1, 5, 16));
    /// let (y, tape) = mha.forward_train(&Inputs::new(&x), &Options::new())?;
    /// let recording = tape.detach();
    /// let gradients = mha.backward(&recording.attach(&Inputs::new(&x), &Options::new()), &y)?;
    /// # let _ = gradients;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn attach<'a, 'b>(self, inputs: &Inputs<'a, T>, options: &Options<'b, T>) -> Tape<'a, 'b, T> {
        Tape { inputs: inputs.clone(), options: *options, recording: self }
    }

    /// How much memory it holds.
    pub(crate) fn bytes(&self) -> usize {
        let Self { lse, activations } = self;
        let numbers = activations.as_ref().map_or(0, |a| a.q.len() + a.k.len() + a.v.len() + a.context.len());
        (numbers + lse.len()) * size_of::<T>()
    }
}

impl<'a, 'b, T: Element> Tape<'a, 'b, T> {
    /// What was computed, without what is borrowed; [`Recording::attach`] makes it a tape again.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, MultiHeadAttention, Options, Recording};
    /// /// What a block of a model keeps for its way back.
    /// struct Kept {
    ///     normed: Array3<f32>,
    ///     recording: Recording<f32>,
    /// }
    ///
    /// fn forward(mha: &MultiHeadAttention<f32>, x: &Array3<f32>) -> multihead::Result<(Array3<f32>, Kept)> {
    ///     let normed = x.mapv(|x| x / 2.0);
    ///     let (y, tape) = mha.forward_train(&Inputs::new(&normed), &Options::new())?;
    ///     let recording = tape.detach();
    ///     Ok((y, Kept { normed, recording }))
    /// }
    ///
    /// fn backward(mha: &MultiHeadAttention<f32>, kept: Kept, d_y: &Array3<f32>) -> multihead::Result<Array3<f32>> {
    ///     let tape = kept.recording.attach(&Inputs::new(&kept.normed), &Options::new());
    ///     Ok(mha.backward(&tape, d_y)?.d_query / 2.0)
    /// }
    ///
    /// let mha = MultiHeadAttention::builder(16, 4).build()?;
    /// let (y, kept) = forward(&mha, &Array3::ones((1, 5, 16)))?;
    /// assert_eq!(backward(&mha, kept, &y)?.dim(), (1, 5, 16));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn detach(self) -> Recording<T> {
        self.recording
    }

    /// `[batch, num_heads, q_len]`, see [`crate::Attended::lse`].
    ///
    /// ```
    /// # use multihead::{ndarray::Array3, Inputs, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(64, 8).build()?;
    /// let x = Array3::zeros((1, 10, 64));
    /// let (_, tape) = mha.forward_train(&Inputs::new(&x), &Options::new())?;
    /// assert!(tape.lse().iter().all(|lse| (lse - 10f32.ln()).abs() < 1e-6));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn lse(&self) -> &ArrayRef3<T> {
        &self.recording.lse
    }

    /// How much memory the tape holds; the inputs are the caller's.
    ///
    /// ```
    /// # use multihead::{ndarray::Array3, Inputs, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f64>::builder(64, 8).build()?;
    /// let x = Array3::zeros((1, 10, 64));
    /// let (_, tape) = mha.forward_train(&Inputs::new(&x), &Options::new())?;
    /// assert_eq!(tape.bytes(), 8 * (4 * 10 * 64 + 8 * 10));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn bytes(&self) -> usize {
        self.recording.bytes()
    }

    pub(super) fn parts(&self) -> TapeRef<'_, 'a, 'b, T> {
        let Self { inputs, options, recording } = self;
        TapeRef { inputs, options, recording }
    }

    /// Gives the memory to the next tapes.
    pub(super) fn recycle(self, workspace: &mut Workspace<T>) {
        let Recording { lse, activations } = self.recording;
        let [q, k, v, context] = activations.map(Activations::into_memory).unwrap_or_default();
        workspace.layer.tapes.push([q, k, v, context, lse.into_raw_vec_and_offset().0]);
    }
}

impl<T: Element> TapeRef<'_, '_, '_, T> {
    /// Checks that a layer can have made the tape.
    pub(crate) fn check(&self, mha: &MultiHeadAttention<T>) -> Result<()> {
        let (batch, q_len, _) = mha.check(self.inputs, self.options)?;
        let Config { heads, head_dim, value_dim, .. } = &mha.config;
        let kv_len = self.inputs.key.dim().1;
        let [batch, q_len, kv_len, head_dim, value_dim] = [batch, q_len, kv_len, *head_dim, *value_dim].map(Some);
        let [heads, kv_heads] = [heads.num_heads(), heads.num_kv_heads()].map(Some);
        check_shape("tape", "[batch, num_heads, q_len]", [batch, heads, q_len], self.recording.lse.shape())?;
        let Some(Activations { q, k, v, context }) = &self.recording.activations else { return Ok(()) };
        let parts = [
            ("[batch, num_heads, q_len, head_dim]", q, [batch, heads, q_len, head_dim]),
            ("[batch, num_kv_heads, kv_len, head_dim]", k, [batch, kv_heads, kv_len, head_dim]),
            ("[batch, num_kv_heads, kv_len, value_dim]", v, [batch, kv_heads, kv_len, value_dim]),
            ("[batch, num_heads, q_len, value_dim]", context, [batch, heads, q_len, value_dim]),
        ];
        parts.into_iter().try_for_each(|(axes, part, expected)| check_shape("tape", axes, expected, part.shape()))
    }
}

impl<T: Element> MultiHeadAttention<T> {
    /// [`MultiHeadAttention::attend`] for training: the output `[batch, q_len, d_model]`, and the tape that
    /// [`MultiHeadAttention::backward`] goes back along. Weights are not returned.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, Mask, MultiHeadAttention, Options};
    /// let mut mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let x = Array3::from_shape_fn((2, 5, 16), |(b, i, j)| ((b + 3 * i + 7 * j) % 5) as f32 - 2.0);
    /// let causal = Mask::causal();
    /// for step in 0..3 {
    ///     let options = Options::new().mask(&causal).dropout(0.1, step);
    ///     let (y, tape) = mha.forward_train(&Inputs::new(&x), &options)?;
    ///     // loss = sum (y - x)^2 / 2
    ///     let gradients = mha.backward(&tape, &(&y - &x))?;
    ///     for (_, mut w, d_w) in mha.parameters_mut(&gradients.weights)? {
    ///         w.scaled_add(-0.01, &d_w);
    ///     }
    /// }
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::attend`], and [`crate::Error::Value`] if the options ask for weights, which
    /// [`MultiHeadAttention::attend`] returns.
    pub fn forward_train<'a, 'b>(
        &self,
        inputs: &Inputs<'a, T>,
        options: &Options<'b, T>,
    ) -> Result<(Array3<T>, Tape<'a, 'b, T>)> {
        options.check_no_weights("none asked of forward_train; attend returns them")?;
        let shape = self.check(inputs, options)?;
        let mut output = zeros("output", "[batch, q_len, d_model]", shape)?;
        let tape = self.record(inputs, options, &mut output, &mut Workspace::new())?;
        Ok((output, tape))
    }

    /// [`MultiHeadAttention::forward_train`] into an array of the caller's: `output: [batch, q_len, d_model]`, any
    /// strides. The tape takes its memory from the workspace, where [`MultiHeadAttention::backward_into`] returns it:
    /// with the same workspace, steps after the first allocate nothing, however many layers there are.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, LayerGradients, MultiHeadAttention, Options, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let (x, mut y) = (Array3::ones((2, 5, 16)), Array3::zeros((2, 5, 16)));
    /// let (inputs, options) = (Inputs::new(&x), Options::new());
    /// let mut gradients = LayerGradients::zeros(&mha, &inputs, &options)?;
    /// let mut workspace = Workspace::new();
    /// for step in 0..3 {
    ///     let tape = mha.forward_train_into(&inputs, &options, &mut y, &mut workspace)?;
    ///     mha.backward_into(tape, &y, &mut gradients, &mut workspace)?;
    /// }
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::attend_into`].
    pub fn forward_train_into<'a, 'b>(
        &self,
        inputs: &Inputs<'a, T>,
        options: &Options<'b, T>,
        output: &mut ArrayRef3<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<Tape<'a, 'b, T>> {
        options.check_no_weights("none asked of forward_train_into; attend returns them")?;
        let (batch, q_len, d_model) = self.check(inputs, options)?;
        check_shape("output", "[batch, q_len, d_model]", [batch, q_len, d_model].map(Some), output.shape())?;
        self.record(inputs, options, output, workspace)
    }

    /// Fills the output and makes the tape; the arguments have been checked.
    fn record<'a, 'b>(
        &self,
        inputs: &Inputs<'a, T>,
        options: &Options<'b, T>,
        output: &mut ArrayRef3<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<Tape<'a, 'b, T>> {
        let [q, k, v, context, lse] = workspace.layer.tapes.pop().unwrap_or_default();
        let mut memory = [q, k, v, context];
        if options.recomputes() {
            memory = std::mem::take(&mut workspace.layer.heads);
        }
        let (batch, q_len, _) = inputs.query.dim();
        let mut lse = reused("lse", "[batch, num_heads, q_len]", (batch, self.config.heads.num_heads(), q_len), lse)?;
        let room = Room { lse: Some(lse.view_mut()), weights: None, memory };
        let activations = self.activate(inputs, options, room, workspace, T::attend)?;
        self.project_back(&activations, options, output.view_mut(), workspace)?;
        let mut recording = Recording { lse, activations: None };
        match options.recomputes() {
            true => workspace.layer.heads = activations.into_memory(),
            false => recording.activations = Some(activations),
        }
        Ok(recording.attach(inputs, options))
    }
}
