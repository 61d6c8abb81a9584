//! The walk through the layer: project, turn by position, attend, project back.

use ndarray::{
    Array, Array2, Array3, Array4, ArrayRef, ArrayRef3, ArrayRef4, ArrayView3, ArrayViewMut3, ArrayViewMut4, Axis,
    Dimension, Ix2, Ix3,
};

use super::{Config, MultiHeadAttention, Weights};
use crate::attention::{Dims, Options, Outputs, Workspace, lse_and_weights};
use crate::element::{Element, reused, zeros};
use crate::error::{Error, Result, check_shape};
use crate::kernels::Level;
use crate::linear::Projected;
use crate::mask::Mask;
use crate::position::{Positions, Turn};

/// An input with or without a batch axis: `[batch, len, width]` or `[len, width]`.
///
/// Implemented for ranks 3 and 2, and sealed: it cannot be implemented for other types.
pub trait Sequence: Dimension + sealed::Sealed {
    /// The view with a batch axis.
    fn batched<T>(array: &ArrayRef<T, Self>) -> ArrayView3<'_, T>;
    /// The view with a batch axis, to be written to.
    fn batched_mut<T>(array: &mut ArrayRef<T, Self>) -> ArrayViewMut3<'_, T>;
    /// The array as it came; for rank 2 its first batch entry, without rows if there is none.
    fn unbatched<T: Element>(array: Array3<T>) -> Array<T, Self>;
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for ndarray::Ix2 {}
    impl Sealed for ndarray::Ix3 {}
}

impl Sequence for Ix3 {
    fn batched<T>(array: &ArrayRef<T, Self>) -> ArrayView3<'_, T> {
        array.view()
    }
    fn batched_mut<T>(array: &mut ArrayRef<T, Self>) -> ArrayViewMut3<'_, T> {
        array.view_mut()
    }
    fn unbatched<T: Element>(array: Array3<T>) -> Array3<T> {
        array
    }
}

impl Sequence for Ix2 {
    fn batched<T>(array: &ArrayRef<T, Self>) -> ArrayView3<'_, T> {
        array.view().insert_axis(Axis(0))
    }
    fn batched_mut<T>(array: &mut ArrayRef<T, Self>) -> ArrayViewMut3<'_, T> {
        array.view_mut().insert_axis(Axis(0))
    }
    fn unbatched<T: Element>(array: Array3<T>) -> Array2<T> {
        match array.dim() {
            (0, _, width) => Array2::zeros((0, width)),
            _ => array.index_axis_move(Axis(0), 0),
        }
    }
}

/// What a layer attends from and to.
///
/// ```
/// use multihead::{ndarray::Array2, Inputs};
/// let (x, memory) = (Array2::<f32>::ones((4, 8)), Array2::ones((6, 8)));
/// let self_attention = Inputs::new(&x);
/// let cross_attention = Inputs::new(&x).context(&memory);
/// # let _ = (self_attention, cross_attention);
/// ```
#[derive(Debug, Clone)]
pub struct Inputs<'a, T> {
    pub(super) query: ArrayView3<'a, T>,
    pub(super) key: ArrayView3<'a, T>,
    pub(super) value: ArrayView3<'a, T>,
    /// Of the queries, and of the keys where they have their own.
    pub(super) positions: Option<Positions<'a>>,
    pub(super) key_positions: Option<Positions<'a>>,
    pub(super) sources: Sources,
}

/// How many different arrays queries, keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sources {
    /// Self-attention.
    One,
    /// Keys and values come from the same array.
    Two,
    Three,
}

impl<'a, T: Element> Inputs<'a, T> {
    /// Self-attention: `query: [batch, q_len, d_model]` or `[q_len, d_model]`.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs};
    /// let x = Array3::<f32>::ones((2, 4, 8));
    /// let inputs = Inputs::new(&x);
    /// # let _ = inputs;
    /// ```
    pub fn new<D: Sequence>(query: &'a ArrayRef<T, D>) -> Self {
        let query = D::batched(query);
        Self { query, key: query, value: query, positions: None, key_positions: None, sources: Sources::One }
    }

    /// Keys and values from another sequence: `context: [batch, kv_len, k_dim]` or `[kv_len, k_dim]`.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs};
    /// let (decoder, encoder) = (Array3::<f32>::ones((2, 4, 8)), Array3::ones((2, 9, 8)));
    /// let inputs = Inputs::new(&decoder).context(&encoder);
    /// # let _ = inputs;
    /// ```
    #[doc(alias = "encoder_hidden_states")]
    #[doc(alias = "memory")]
    pub fn context<D: Sequence>(self, context: &'a ArrayRef<T, D>) -> Self {
        Self { sources: Sources::Two, ..self.key_value(context, context) }
    }

    /// `key: [batch, kv_len, k_dim]`, `value: [batch, kv_len, v_dim]`, or both without a batch axis.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Inputs};
    /// let (query, key, value) = (Array2::<f32>::ones((4, 8)), Array2::ones((9, 8)), Array2::ones((9, 6)));
    /// let inputs = Inputs::new(&query).key_value(&key, &value);
    /// # let _ = inputs;
    /// ```
    pub fn key_value<D: Sequence>(mut self, key: &'a ArrayRef<T, D>, value: &'a ArrayRef<T, D>) -> Self {
        (self.key, self.value) = (D::batched(key), D::batched(value));
        self.sources = Sources::Three;
        self
    }
}

/// What a layer returns.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerOutput<T> {
    /// `[batch, q_len, d_model]`
    pub output: Array3<T>,
    /// `[batch, num_heads, q_len]`, see [`crate::Attended::lse`].
    pub lse: Array3<T>,
    /// `[batch, num_heads, q_len, kv_len]`: the softmax probabilities of each head, if [`Options::weights`] asked.
    pub weights: Option<Array4<T>>,
}

/// The arrays that a layer fills.
pub(super) struct LayerOutputs<'a, T> {
    /// `[batch, q_len, d_model]`
    pub(super) output: ArrayViewMut3<'a, T>,
    /// `[batch, num_heads, q_len]`
    pub(super) lse: Option<ArrayViewMut3<'a, T>>,
    /// `[batch, num_heads, q_len, kv_len]`
    pub(super) weights: Option<ArrayViewMut4<'a, T>>,
}

impl<'a, T> LayerOutputs<'a, T> {
    pub(super) fn only(output: &'a mut ArrayRef3<T>) -> Self {
        Self { output: output.view_mut(), lse: None, weights: None }
    }
}

impl<T: Element> MultiHeadAttention<T> {
    /// Self-attention: `x: [batch, len, d_model]` or `[len, d_model]`; the output has the same shape.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Mask, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let sentence = Array2::ones((5, 16));
    /// assert_eq!(mha.forward(&sentence, &Mask::none())?.shape(), [5, 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error`] names the argument that does not fit: the width of `x`, which the text calls `query`, `key`
    /// or `value` since it is all three, or the shape of a mask; [`crate::Error::TooLarge`] if the projections or the
    /// result do not fit into memory.
    pub fn forward<D: Sequence>(&self, x: &ArrayRef<T, D>, mask: &Mask) -> Result<Array<T, D>> {
        let attended = self.attend(&Inputs::new(x), &Options::new().mask(mask))?;
        Ok(D::unbatched(attended.output))
    }

    /// Cross-attention: `query: [batch, q_len, d_model]`, `context: [batch, kv_len, k_dim]`, or both without a batch
    /// axis; the output has the shape of `query`.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Mask, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).k_dim(24).build()?;
    /// let (decoder, encoder) = (Array3::ones((2, 5, 16)), Array3::ones((2, 9, 24)));
    /// let y = mha.forward_cross(&decoder, &encoder, &Mask::key_lengths(&[9, 7]))?;
    /// assert_eq!(y.shape(), [2, 5, 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::forward`]; `context` stands under the names `key` and `value` in the text.
    pub fn forward_cross<D: Sequence>(
        &self,
        query: &ArrayRef<T, D>,
        context: &ArrayRef<T, D>,
        mask: &Mask,
    ) -> Result<Array<T, D>> {
        let attended = self.attend(&Inputs::new(query).context(context), &Options::new().mask(mask))?;
        Ok(D::unbatched(attended.output))
    }

    /// [`MultiHeadAttention::forward`] into an array of the caller's, which has the shape of `x` and any strides.
    /// With the same workspace, calls after the first allocate nothing.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Mask, MultiHeadAttention, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let (x, mut y) = (Array2::ones((5, 16)), Array2::zeros((5, 16)));
    /// let mut workspace = Workspace::new();
    /// mha.forward_into(&x, &Mask::causal(), &mut y, &mut workspace)?;
    /// assert_eq!(y, mha.forward(&x, &Mask::causal())?);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::forward`], and [`crate::Error::Shape`] for an output of other lengths. Nothing is
    /// written then.
    pub fn forward_into<D: Sequence>(
        &self,
        x: &ArrayRef<T, D>,
        mask: &Mask,
        output: &mut ArrayRef<T, D>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        self.attend_into(&Inputs::new(x), &Options::new().mask(mask), &mut D::batched_mut(output), workspace)
    }

    /// Attention with everything that a call can ask for: other keys and values, bias, weights, path. The output has a
    /// batch axis, of length 1 for inputs without one.
    ///
    /// The layer's own rules hold: `scale`, `softcap`, `heads`, `sinks`, `alibi`, `relative_bias` and `relative_keys` are
    /// set by its builder or its weights. Options that name one of them are refused, here and in every other call of a
    /// layer, whatever the value.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, Mask, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let x = Array3::ones((2, 5, 16));
    /// let causal = Mask::causal();
    /// let attended = mha.attend(&Inputs::new(&x), &Options::new().mask(&causal).weights())?;
    /// assert_eq!(attended.weights.unwrap().shape(), [2, 4, 5, 5]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::forward`] and, for what the options ask, as [`crate::attention::forward`];
    /// [`crate::Error::Value`] if the options name a rule of the layer.
    pub fn attend(&self, inputs: &Inputs<'_, T>, options: &Options<'_, T>) -> Result<LayerOutput<T>> {
        let (batch, q_len, d_model) = self.check(inputs, options)?;
        let mut output = zeros("output", "[batch, q_len, d_model]", (batch, q_len, d_model))?;
        let (num_heads, kv_len) = (self.config.heads.num_heads(), inputs.key.len_of(Axis(1)));
        let (mut lse, mut weights) = lse_and_weights([batch, num_heads, q_len, kv_len], options)?;
        let kept = weights.as_mut().map(|weights| weights.view_mut());
        let outputs = LayerOutputs { output: output.view_mut(), lse: Some(lse.view_mut()), weights: kept };
        self.run(inputs, options, outputs, &mut Workspace::new(), T::attend)?;
        Ok(LayerOutput { output, lse, weights })
    }

    /// [`MultiHeadAttention::attend`] into an array of the caller's: `output: [batch, q_len, d_model]`, any strides.
    /// Weights and lse are not returned.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, MultiHeadAttention, Options, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let (x, mut y) = (Array3::ones((2, 5, 16)), Array3::zeros((2, 5, 16)));
    /// mha.attend_into(&Inputs::new(&x), &Options::new(), &mut y, &mut Workspace::new())?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::attend`], [`crate::Error::Shape`] for an output of other lengths, and
    /// [`crate::Error::Value`] if the options ask for weights, which [`MultiHeadAttention::attend`] returns. Nothing is
    /// written then.
    pub fn attend_into(
        &self,
        inputs: &Inputs<'_, T>,
        options: &Options<'_, T>,
        output: &mut ArrayRef3<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        options.check_no_weights("none asked of attend_into; attend returns them")?;
        let (batch, q_len, d_model) = self.check(inputs, options)?;
        let expected = [Some(batch), Some(q_len), Some(d_model)];
        check_shape("output", "[batch, q_len, d_model]", expected, output.shape())?;
        self.run(inputs, options, LayerOutputs::only(output), workspace, T::attend)
    }

    /// Checks all that a call can get wrong, before any work; returns the shape of the output.
    pub(super) fn check(&self, inputs: &Inputs<'_, T>, options: &Options<'_, T>) -> Result<(usize, usize, usize)> {
        self.check_shapes(inputs)?;
        let (batch, q_len, d_model) = inputs.query.dim();
        T::check_rules(self.dims(batch, q_len, inputs.key.len_of(Axis(1))), &self.options(options)?)?;
        Ok((batch, q_len, d_model))
    }

    pub(super) fn check_shapes(&self, inputs: &Inputs<'_, T>) -> Result<()> {
        let config = &self.config;
        let Inputs { query, key, value, .. } = inputs;
        let batch = query.len_of(Axis(0));
        check_shape("query", "[batch, q_len, d_model]", [None, None, Some(config.d_model)], query.shape())?;
        check_shape("key", "[batch, kv_len, k_dim]", [Some(batch), None, Some(config.k_dim)], key.shape())?;
        let kv_len = key.len_of(Axis(1));
        let expected = [Some(batch), Some(kv_len), Some(config.v_dim)];
        check_shape("value", "[batch, kv_len, v_dim]", expected, value.shape())?;
        inputs.check_places()
    }

    pub(super) fn dims(&self, batch: usize, q_len: usize, kv_len: usize) -> Dims {
        let Config { heads, head_dim, value_dim, .. } = &self.config;
        let (num_heads, num_kv_heads) = (heads.num_heads(), heads.num_kv_heads());
        Dims { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim: *head_dim, value_dim: *value_dim }
    }

    /// The options of the call under the rules of the layer, which a call cannot change.
    pub(super) fn options<'b>(&'b self, options: &'b Options<'_, T>) -> Result<Options<'b, T>> {
        options.with_layer(&self.config, &self.weights)
    }

    /// Fills the output, the lse and the weights; the arguments have been checked. `attend` is what queries, keys and
    /// values go through: attention, with or without a cache.
    pub(super) fn run(
        &self,
        inputs: &Inputs<'_, T>,
        options: &Options<'_, T>,
        outputs: LayerOutputs<'_, T>,
        workspace: &mut Workspace<T>,
        attend: impl FnOnce([&ArrayRef4<T>; 3], &Options<'_, T>, Outputs<'_, T>, &mut Workspace<T>) -> Result<()>,
    ) -> Result<()> {
        let LayerOutputs { output, lse, weights } = outputs;
        let room = Room { lse, weights, memory: std::mem::take(&mut workspace.layer.heads) };
        let activations = self.activate(inputs, options, room, workspace, attend)?;
        self.project_back(&activations, options, output, workspace)?;
        workspace.layer.heads = activations.into_memory();
        Ok(())
    }

    /// The walk as far as the context; `attend` as in [`MultiHeadAttention::run`].
    pub(super) fn activate(
        &self,
        inputs: &Inputs<'_, T>,
        options: &Options<'_, T>,
        room: Room<'_, T>,
        workspace: &mut Workspace<T>,
        attend: impl FnOnce([&ArrayRef4<T>; 3], &Options<'_, T>, Outputs<'_, T>, &mut Workspace<T>) -> Result<()>,
    ) -> Result<Activations<T>> {
        let Room { lse, weights, memory: [q, k, v, context] } = room;
        let Weights { w_q, w_k, w_v, b_q, b_k, b_v, .. } = &*self.weights;
        let Config { heads, head_dim, value_dim, .. } = &self.config;
        let (num_heads, num_kv_heads) = (heads.num_heads(), heads.num_kv_heads());
        let (batch, q_len, _) = inputs.query.dim();
        let kv_len = inputs.key.len_of(Axis(1));

        let [mut q, mut k, mut v] = [
            reused("q", "[batch, q_len, num_heads * head_dim]", (batch, q_len, w_q.ncols()), q)?,
            reused("k", "[batch, kv_len, num_kv_heads * head_dim]", (batch, kv_len, w_k.ncols()), k)?,
            reused("v", "[batch, kv_len, num_kv_heads * value_dim]", (batch, kv_len, w_v.ncols()), v)?,
        ];
        let projections = [
            Some(Projected::new(inputs.query, self.weights.factor(w_q), b_q.as_ref(), q.view_mut())),
            Some(Projected::new(inputs.key, self.weights.factor(w_k), b_k.as_ref(), k.view_mut())),
            Some(Projected::new(inputs.value, self.weights.factor(w_v), b_v.as_ref(), v.view_mut())),
        ];
        T::project(level(options), projections, &mut workspace.layer.scratch);

        // Both lie in one piece; they have just been made.
        if let (Some(q), Some(k)) = (q.as_slice_mut(), k.as_slice_mut()) {
            self.normalise_heads([q, k]);
        }
        // Heads are split and merged by strides: the heads of a token lie side by side.
        let mut q = by_head(q, num_heads, *head_dim)?;
        let mut k = by_head(k, num_kv_heads, *head_dim)?;
        let v = by_head(v, num_kv_heads, *value_dim)?;
        let turning = [q.view_mut(), k.view_mut()];
        self.turn_heads(turning, inputs.places(), Turn::There, &mut workspace.layer.rope)?;
        let shape = (batch, q_len, num_heads * value_dim);
        let context = reused("context", "[batch, q_len, num_heads * value_dim]", shape, context)?;
        let mut context = by_head(context, num_heads, *value_dim)?;
        let outputs = Outputs { context: context.view_mut(), lse, weights };
        attend([&q, &k, &v], &self.options(options)?, outputs, workspace)?;
        Ok(Activations { q, k, v, context })
    }

    /// The rest of the walk: from the context to the output.
    pub(super) fn project_back(
        &self,
        activations: &Activations<T>,
        options: &Options<'_, T>,
        output: ArrayViewMut3<'_, T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        let Weights { w_o, b_o, .. } = &*self.weights;
        let back = Projected::new(by_token(&activations.context)?, self.weights.factor(w_o), b_o.as_ref(), output);
        T::project(level(options), [Some(back), None, None], &mut workspace.layer.scratch);
        Ok(())
    }
}

/// What the walk to the context fills, and where it works.
pub(super) struct Room<'a, T> {
    /// `[batch, num_heads, q_len]`
    pub(super) lse: Option<ArrayViewMut3<'a, T>>,
    /// `[batch, num_heads, q_len, kv_len]`
    pub(super) weights: Option<ArrayViewMut4<'a, T>>,
    /// Of queries, keys, values and context; what it holds does not matter.
    pub(super) memory: [Vec<T>; 4],
}

/// What lies between the projections, by head; in memory the heads of a token lie side by side.
#[derive(Debug, Clone)]
pub(super) struct Activations<T> {
    /// `[batch, num_heads, q_len, head_dim]`, turned by the positions
    pub(super) q: Array4<T>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`, turned by the positions
    pub(super) k: Array4<T>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`
    pub(super) v: Array4<T>,
    /// `[batch, num_heads, q_len, value_dim]`
    pub(super) context: Array4<T>,
}

impl<T> Activations<T> {
    /// The memory of queries, keys, values and context.
    pub(super) fn into_memory(self) -> [Vec<T>; 4] {
        [self.q, self.k, self.v, self.context].map(|array| array.into_raw_vec_and_offset().0)
    }
}

/// The instruction set of a call.
pub(super) fn level<T>(options: &Options<'_, T>) -> Level {
    options.level.unwrap_or_else(Level::best)
}

/// `[batch, heads, len, width]` as `[batch, len, heads * width]`, of an array of [`by_head`].
pub(super) fn by_token<T>(array: &Array4<T>) -> Result<ArrayView3<'_, T>> {
    let (batch, heads, len, width) = array.dim();
    let array = array.view().permuted_axes([0, 2, 1, 3]);
    array.into_shape_with_order((batch, len, heads * width)).map_err(too_long)
}

pub(super) fn by_token_mut<T>(array: &mut Array4<T>) -> Result<ArrayViewMut3<'_, T>> {
    let (batch, heads, len, width) = array.dim();
    let array = array.view_mut().permuted_axes([0, 2, 1, 3]);
    array.into_shape_with_order((batch, len, heads * width)).map_err(too_long)
}

/// `[batch, len, heads * width]` as `[batch, heads, len, width]`, without moving a number.
pub(super) fn by_head<T>(array: Array3<T>, heads: usize, width: usize) -> Result<Array4<T>> {
    let (batch, len, _) = array.dim();
    let array = array.into_shape_with_order((batch, len, heads, width)).map_err(too_long)?;
    Ok(array.permuted_axes([0, 2, 1, 3]))
}

/// The lengths of an existing array cannot fail to multiply; ndarray's answer is passed on all the same.
fn too_long(error: ndarray::ShapeError) -> Error {
    Error::value("shape", "lengths that fit each other", error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_without_entries_has_no_first_one() {
        assert_eq!(Ix2::unbatched(Array3::<f32>::zeros((0, 3, 4))).shape(), [0, 4]);
        assert_eq!(Ix2::unbatched(Array3::<f32>::zeros((1, 3, 4))).shape(), [3, 4]);
    }
}
