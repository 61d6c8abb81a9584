//! The walk back through the layer: from the gradient of the output to those of inputs, weights, biases and sinks.
//!
//! ```text
//! d_context = d_output W_O^T              d_W_O = context^T d_output        d_b_O = sum d_output
//! d_Q, d_K, d_V = attention backward of d_context, turned back by the positions
//! d_query = d_Q W_Q^T                     d_W_Q = query^T d_Q               d_b_Q = sum d_Q
//! d_key   = d_K W_K^T                     d_W_K = key^T d_K                 d_b_K = sum d_K
//! d_value = d_V W_V^T                     d_W_V = value^T d_V               d_b_V = sum d_V
//! ```
//!
//! Sums run over the tokens of all batch entries, in their order. An array that plays several roles has the sum of its
//! gradients: `d_x = d_query + d_key + d_value` in self-attention.

use ndarray::{Array2, Array3, Array4, ArrayRef3, ArrayView3, ArrayViewMut3, Axis, aview0, s};

use super::forward::{Activations, Inputs, Room, Sources, by_head, by_token, by_token_mut, level};
use super::train::TapeRef;
use super::{MultiHeadAttention, Tape, Weights};
use crate::attention::{GradientsMut, Options, Saved, Workspace};
use crate::element::{Element, reused, zeros};
use crate::error::{Error, Result, check_shape};
use crate::kernels::{Level, Start};
use crate::linear::{Projected, Terms, WeightGradient};
use crate::position::Turn;

/// The gradients of a loss with respect to all that a layer was given.
///
/// Each input array has one gradient, the sum over its roles: self-attention has `d_query` alone, which is that of x;
/// with [`Inputs::context`], `d_key` is that of the context; with [`Inputs::key_value`] there are all three.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerGradients<T> {
    /// `[batch, q_len, d_model]`
    #[doc(alias = "d_x")]
    pub d_query: Array3<T>,
    /// `[batch, kv_len, k_dim]`, where keys do not come from the query's array.
    pub d_key: Option<Array3<T>>,
    /// `[batch, kv_len, v_dim]`, where values do not come from the keys' array.
    pub d_value: Option<Array3<T>>,
    /// See [`Gradients::d_bias`](crate::Gradients::d_bias): there if [`Options::bias_gradient`] asked for it.
    pub d_bias: Option<Array4<T>>,
    /// The gradient of each weight, bias and sink, under its name.
    pub weights: Weights<T>,
}

/// The arrays that backward fills, wherever they are kept.
pub(crate) struct LayerGradientsMut<'g, T> {
    pub(crate) d_query: &'g mut Array3<T>,
    pub(crate) d_key: Option<&'g mut Array3<T>>,
    pub(crate) d_value: Option<&'g mut Array3<T>>,
    pub(crate) d_bias: Option<&'g mut Array4<T>>,
    pub(crate) weights: &'g mut Weights<T>,
}

impl<T: Element> LayerGradients<T> {
    /// Zeros of the shapes that a call gives, for [`MultiHeadAttention::backward_into`] and
    /// [`MultiHeadAttention::backward_add`].
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, LayerGradients, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).k_dim(12).build()?;
    /// let (decoder, encoder) = (Array3::ones((2, 5, 16)), Array3::ones((2, 9, 12)));
    /// let inputs = Inputs::new(&decoder).context(&encoder);
    /// let gradients = LayerGradients::zeros(&mha, &inputs, &Options::new())?;
    /// assert_eq!(gradients.d_key, Some(Array3::zeros((2, 9, 12))));
    /// assert_eq!(gradients.weights.w_k.shape(), [12, 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::attend`].
    pub fn zeros(mha: &MultiHeadAttention<T>, inputs: &Inputs<'_, T>, options: &Options<'_, T>) -> Result<Self> {
        mha.check(inputs, options)?;
        let (key, value) = distinct(inputs);
        let d_key = key.map(|key| zeros("d_key", "[batch, kv_len, k_dim]", key.dim()));
        let d_value = value.map(|value| zeros("d_value", "[batch, kv_len, v_dim]", value.dim()));
        let bias = options.bias.as_ref().filter(|_| options.wants_bias_gradient());
        let d_bias = bias.map(|bias| zeros("d_bias", "[batch, num_heads, q_len, kv_len]", bias.dim()));
        Ok(Self {
            d_query: zeros("d_query", "[batch, q_len, d_model]", inputs.query.dim())?,
            d_key: d_key.transpose()?,
            d_value: d_value.transpose()?,
            d_bias: d_bias.transpose()?,
            weights: mha.weights.zeros_like(),
        })
    }

    fn by_parts(&mut self) -> LayerGradientsMut<'_, T> {
        let Self { d_query, d_key, d_value, d_bias, weights } = self;
        let (d_key, d_value, d_bias) = (d_key.as_mut(), d_value.as_mut(), d_bias.as_mut());
        LayerGradientsMut { d_query, d_key, d_value, d_bias, weights }
    }

    /// Checks the shapes against a call's.
    fn check(&self, mha: &MultiHeadAttention<T>, inputs: &Inputs<'_, T>, options: &Options<'_, T>) -> Result<()> {
        let expected = <[usize; 3]>::from(inputs.query.dim()).map(Some);
        check_shape("d_query", "[batch, q_len, d_model]", expected, self.d_query.shape())?;
        let (key, value) = distinct(inputs);
        for (name, axes, d_input, input) in [
            ("d_key", "[batch, kv_len, k_dim]", &self.d_key, key),
            ("d_value", "[batch, kv_len, v_dim]", &self.d_value, value),
        ] {
            let shape = d_input.as_ref().map(|d_input| d_input.shape());
            let expected = input.map(|input| <[usize; 3]>::from(input.dim()).map(Some));
            check_optional(name, axes, expected, shape)?;
        }
        let bias = options.bias.as_ref().filter(|_| options.wants_bias_gradient());
        let expected = bias.map(|bias| <[usize; 4]>::from(bias.dim()).map(Some));
        let shape = self.d_bias.as_ref().map(|d_bias| d_bias.shape());
        check_optional("d_bias", "[batch, num_heads, q_len, kv_len]", expected, shape)?;
        self.weights.check_gradients(&mha.config, &mha.weights)
    }
}

/// The keys where they are another array than the queries, and the values where they are another than the keys.
fn distinct<'b, 'a, T>(inputs: &'b Inputs<'a, T>) -> (Option<&'b ArrayView3<'a, T>>, Option<&'b ArrayView3<'a, T>>) {
    match inputs.sources {
        Sources::One => (None, None),
        Sources::Two => (Some(&inputs.key), None),
        Sources::Three => (Some(&inputs.key), Some(&inputs.value)),
    }
}

fn check_optional<const N: usize>(
    name: &'static str,
    axes: &'static str,
    expected: Option<[Option<usize>; N]>,
    got: Option<&[usize]>,
) -> Result<()> {
    match (expected, got) {
        (Some(expected), Some(got)) => check_shape(name, axes, expected, got),
        (None, None) => Ok(()),
        (Some(_), None) => Err(Error::value(name, "an array, which the call gives", "None")),
        (None, Some(_)) => Err(Error::value(name, "None, since the call gives no such gradient", "an array")),
    }
}

impl<T: Element> MultiHeadAttention<T> {
    /// The gradients of a loss, from that of the output of [`MultiHeadAttention::forward_train`]:
    /// `d_output: [batch, q_len, d_model]`, any strides. The layer has the weights that it had then.
    ///
    /// ```
    /// use multihead::{ndarray::{Array1, Array3}, Inputs, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f64>::builder(16, 4).bias().build()?;
    /// let x = Array3::ones((2, 5, 16));
    /// let (y, tape) = mha.forward_train(&Inputs::new(&x), &Options::new())?;
    /// // loss = sum y: each of the ten tokens adds 1 to the gradient of the output's bias
    /// let gradients = mha.backward(&tape, &Array3::ones(y.dim()))?;
    /// assert_eq!(gradients.d_query.dim(), x.dim());
    /// assert_eq!(gradients.weights.b_o, Some(Array1::from_elem(16, 10.0)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if `d_output` has other lengths than the output, or if the tape is not of this layer or one with
    /// its sizes; [`Error::Value`] if the gradient of a bias is asked for that is not there; [`Error::TooLarge`] if the
    /// gradients do not fit into memory.
    pub fn backward(&self, tape: &Tape<'_, '_, T>, d_output: &ArrayRef3<T>) -> Result<LayerGradients<T>> {
        self.check_backward(tape, d_output)?;
        let mut gradients = LayerGradients::zeros(self, &tape.inputs, &tape.options)?;
        self.differentiate(tape.parts(), d_output, Start::Zero, gradients.by_parts(), &mut Workspace::new())?;
        Ok(gradients)
    }

    /// [`MultiHeadAttention::backward`] into arrays of the caller's, of any strides; what they held before does not
    /// matter. The memory of the tape goes back to the workspace; with the same one, calls after the first allocate
    /// nothing. See [`MultiHeadAttention::forward_train_into`] for an example.
    ///
    /// # Errors
    /// As [`MultiHeadAttention::backward`], and [`Error::Shape`] or [`Error::Value`] if an array of `gradients` has other
    /// lengths than the call gives, is missing or is there unasked. Nothing is written then.
    pub fn backward_into(
        &self,
        tape: Tape<'_, '_, T>,
        d_output: &ArrayRef3<T>,
        gradients: &mut LayerGradients<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        self.check_backward(&tape, d_output)?;
        gradients.check(self, &tape.inputs, &tape.options)?;
        self.differentiate(tape.parts(), d_output, Start::Zero, gradients.by_parts(), workspace)?;
        tape.recycle(workspace);
        Ok(())
    }

    /// [`MultiHeadAttention::backward_into`] that adds the gradients of parameters (weights, biases, sinks, and the bias
    /// of the scores) to what is there, for batches that come in parts. The gradients of the inputs are replaced.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, LayerGradients, MultiHeadAttention, Options, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let parts = [Array3::ones((2, 5, 16)), Array3::zeros((2, 5, 16))];
    /// let mut workspace = Workspace::new();
    /// let mut gradients = LayerGradients::zeros(&mha, &Inputs::new(&parts[0]), &Options::new())?;
    /// for x in &parts {
    ///     let (y, tape) = mha.forward_train(&Inputs::new(x), &Options::new())?;
    ///     mha.backward_add(tape, &y, &mut gradients, &mut workspace)?;
    /// }
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::backward_into`].
    pub fn backward_add(
        &self,
        tape: Tape<'_, '_, T>,
        d_output: &ArrayRef3<T>,
        gradients: &mut LayerGradients<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        self.check_backward(&tape, d_output)?;
        gradients.check(self, &tape.inputs, &tape.options)?;
        self.differentiate(tape.parts(), d_output, Start::Add, gradients.by_parts(), workspace)?;
        tape.recycle(workspace);
        Ok(())
    }

    fn check_backward(&self, tape: &Tape<'_, '_, T>, d_output: &ArrayRef3<T>) -> Result<()> {
        tape.parts().check(self)?;
        let (batch, q_len, _) = tape.inputs.query.dim();
        let expected = [batch, q_len, self.config.d_model].map(Some);
        check_shape("d_output", "[batch, q_len, d_model]", expected, d_output.shape())?;
        match tape.options.wants_bias_gradient() && tape.options.bias.is_none() {
            true => Err(Error::value("bias_gradient", "a bias in the options", "none")),
            false => Ok(()),
        }
    }

    /// Fills all gradients, or adds those of the parameters; the arguments have been checked.
    pub(crate) fn differentiate(
        &self,
        tape: TapeRef<'_, '_, '_, T>,
        d_output: &ArrayRef3<T>,
        start: Start,
        mut gradients: LayerGradientsMut<'_, T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        let again = match &tape.recording.activations {
            Some(_) => None,
            None => {
                let memory = std::mem::take(&mut workspace.layer.heads);
                let room = Room { lse: None, weights: None, memory };
                Some(self.activate(tape.inputs, tape.options, room, workspace, T::attend)?)
            }
        };
        if let Some(activations) = tape.recording.activations.as_ref().or(again.as_ref()) {
            let mut d_heads = room_like(activations, std::mem::take(&mut workspace.layer.d_heads))?;
            let level = level(tape.options);
            let d_context = by_token_mut(&mut d_heads.context)?;
            let back = turned(d_output.view(), &self.weights.w_o, d_context, Start::Zero);
            T::project(level, [Some(back), None, None], &mut workspace.layer.scratch);
            self.differentiate_heads(tape, activations, &mut d_heads, start, &mut gradients, workspace)?;
            self.differentiate_norms(tape, &mut d_heads, start, gradients.weights, workspace)?;

            let scratch = &mut workspace.layer.scratch;
            let context = by_token(&activations.context)?;
            let [d_q, d_k, d_v] = [by_token(&d_heads.q)?, by_token(&d_heads.k)?, by_token(&d_heads.v)?];
            let &Inputs { query, key, value, .. } = tape.inputs;
            differentiate_weights(level, [(query, d_q), (key, d_k), (value, d_v)], start, gradients.weights, scratch);
            self.differentiate_output(tape, (context, d_output.view()), start, gradients.weights, scratch);
            self.differentiate_inputs(level, [d_q, d_k, d_v], &mut gradients, scratch);
            workspace.layer.d_heads = d_heads.into_memory();
        }
        if let Some(again) = again {
            workspace.layer.heads = again.into_memory();
        }
        Ok(())
    }

    /// From the gradient of the context to those of queries, keys and values before they were turned, and of the
    /// parameters of the scores.
    fn differentiate_heads(
        &self,
        tape: TapeRef<'_, '_, '_, T>,
        activations: &Activations<T>,
        d_heads: &mut Activations<T>,
        start: Start,
        gradients: &mut LayerGradientsMut<'_, T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        // Attention fills the gradients of its own parameters; what they held is added afterwards.
        let mut before = std::mem::take(&mut workspace.layer.before);
        before.clear();
        if start == Start::Add {
            before.extend(gradients.of_scores().map(|x| *x));
        }
        let views = GradientsMut {
            d_q: d_heads.q.view_mut(),
            d_k: d_heads.k.view_mut(),
            d_v: d_heads.v.view_mut(),
            d_bias: gradients.d_bias.as_mut().map(|d_bias| d_bias.view_mut()),
            d_sinks: gradients.weights.sinks.as_mut().map(|d_sinks| d_sinks.view_mut()),
            d_relative_bias: gradients.weights.relative_bias.as_mut().map(|d_table| d_table.view_mut()),
            d_relative_keys: gradients.weights.relative_keys.as_mut().map(|d_keys| d_keys.view_mut()),
        };
        let Activations { q, k, v, context } = activations;
        let saved = Saved { q, k, v, context, lse: &tape.recording.lse };
        T::differentiate(&saved, &d_heads.context, &self.options(tape.options)?, views, workspace)?;
        gradients.of_scores().zip(&before).for_each(|(x, &before)| *x += before);
        workspace.layer.before = before;

        let turning = [d_heads.q.view_mut(), d_heads.k.view_mut()];
        self.turn_heads(turning, tape.inputs.places(), Turn::Back, &mut workspace.layer.rope)
    }

    /// From the gradients of normalised queries and keys to those before, which are projected once more.
    fn differentiate_norms(
        &self,
        tape: TapeRef<'_, '_, '_, T>,
        d_heads: &mut Activations<T>,
        start: Start,
        d_weights: &mut Weights<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        let Weights { w_q, w_k, b_q, b_k, .. } = &*self.weights;
        let [q_norm, k_norm] = self.norms();
        let queries = (q_norm, tape.inputs.query, w_q, b_q, &mut d_heads.q, &mut d_weights.q_norm);
        let keys = (k_norm, tape.inputs.key, w_k, b_k, &mut d_heads.k, &mut d_weights.k_norm);
        for (norm, x, w, bias, d_heads, d_weight) in [queries, keys] {
            let (Some(norm), Some(d_weight)) = (norm, d_weight) else { continue };
            let [heads, mut sums, mut room] = std::mem::take(&mut workspace.layer.norm);
            let mut d_heads = by_token_mut(d_heads)?;
            let mut heads = reused("heads", "[batch, len, heads * head_dim]", d_heads.dim(), heads)?;
            let again = [Some(Projected::new(x, self.weights.factor(w), bias.as_ref(), heads.view_mut())), None, None];
            T::project(level(tape.options), again, &mut workspace.layer.scratch);
            sums.clear();
            sums.resize(d_weight.len(), T::zero());
            // Both have just been made and lie in one piece.
            if let (Some(heads), Some(d_heads)) = (heads.as_slice(), d_heads.as_slice_mut()) {
                T::differentiate_norm(&norm, heads, d_heads, &mut sums, &mut room)?;
            }
            if start == Start::Zero {
                d_weight.fill(T::zero());
            }
            d_weight.iter_mut().zip(&sums).for_each(|(d, &sum)| *d += sum);
            workspace.layer.norm = [heads.into_raw_vec_and_offset().0, sums, room];
        }
        Ok(())
    }

    /// The gradients of W_O and its bias, from the context and the gradient of the output.
    ///
    /// A query that sees no key of a head has no context there, so the head's rows of W_O get nothing from it, whatever its
    /// gradient holds. The bias does: it is all that such a query puts out.
    fn differentiate_output(
        &self,
        tape: TapeRef<'_, '_, '_, T>,
        (context, d_output): (ArrayView3<'_, T>, ArrayView3<'_, T>),
        start: Start,
        Weights { w_o, b_o, .. }: &mut Weights<T>,
        scratch: &mut Vec<Vec<T>>,
    ) {
        let (level, lse) = (level(tape.options), &tape.recording.lse);
        let (_, num_heads, q_len) = lse.dim();
        // The lse of such a query is the sink's, which keys that vanish next to the sink cannot be told from: they leave
        // no context either.
        let nothing = |head: usize| self.weights.sinks.as_ref().map_or(T::neg_infinity(), |sinks| sinks[head]);
        let is_hidden = |head: usize, token: usize| lse[[token / q_len, head, token % q_len]] == nothing(head);
        let some_hidden = || (0..num_heads).any(|h| lse.index_axis(Axis(1), h).iter().any(|&x| x == nothing(h)));
        let one = T::one();
        let one = aview0(&one);
        let bias = WeightGradient::of_bias(&one, d_output, b_o, start);
        if !some_hidden() || d_output.iter().all(|x| x.is_finite()) {
            let d_w = w_o.view_mut();
            let of_weights = Some(WeightGradient { x: context, d_y: d_output, d_w, start });
            return T::weight_gradients(level, [of_weights, bias, None], Terms::All, scratch);
        }
        T::weight_gradients(level, [bias, None, None], Terms::All, scratch);
        let value_dim = self.config.value_dim;
        for head in 0..num_heads {
            let columns = head * value_dim..(head + 1) * value_dim;
            let x = context.slice(s![.., .., columns.clone()]);
            let hidden = |token| {
                let context = x.slice(s![token / q_len, token % q_len, ..]);
                is_hidden(head, token) && context.iter().all(|x| x.is_zero())
            };
            let gradient = WeightGradient { x, d_y: d_output, d_w: w_o.slice_mut(s![columns, ..]), start };
            T::weight_gradients(level, [Some(gradient), None, None], Terms::AllBut(&hidden), scratch);
        }
    }

    /// The gradients of the inputs, each the sum over its roles, from those of the projections.
    fn differentiate_inputs(
        &self,
        level: Level,
        d_projections: [ArrayView3<'_, T>; 3],
        gradients: &mut LayerGradientsMut<'_, T>,
        scratch: &mut Vec<Vec<T>>,
    ) {
        let weights = [&self.weights.w_q, &self.weights.w_k, &self.weights.w_v];
        let LayerGradientsMut { d_query, d_key, d_value, .. } = gradients;
        let mut arrays = [Some(&mut **d_query), d_key.as_deref_mut(), d_value.as_deref_mut()];
        let mut roles = d_projections.into_iter().zip(weights);
        let firsts = arrays.each_mut().map(|array| {
            let (d_projection, weights) = roles.next()?;
            Some(turned(d_projection, weights, array.as_mut()?.view_mut(), Start::Zero))
        });
        T::project(level, firsts, scratch);
        // A role without an array of its own belongs to the array of the role before.
        for role in 1..arrays.len() {
            let (before, own) = arrays.split_at_mut(role);
            if own[0].is_none()
                && let Some(array) = before.iter_mut().rev().flatten().next()
            {
                let more = turned(d_projections[role], weights[role], array.view_mut(), Start::Add);
                T::project(level, [Some(more), None, None], scratch);
            }
        }
    }
}

impl<T> LayerGradientsMut<'_, T> {
    /// All numbers of the gradients of the scores' own parameters.
    fn of_scores(&mut self) -> impl Iterator<Item = &mut T> {
        let Weights { sinks, relative_bias, relative_keys, .. } = &mut *self.weights;
        let d_tables = [relative_bias, relative_keys].into_iter().flatten().flatten();
        let d_bias = self.d_bias.iter_mut().flat_map(|d_bias| d_bias.iter_mut());
        d_bias.chain(sinks.iter_mut().flatten()).chain(d_tables)
    }
}

/// The gradients of the weights and biases of W_Q, W_K and W_V, from what goes into each and the gradient of what comes
/// out.
fn differentiate_weights<T: Element>(
    level: Level,
    [q, k, v]: [(ArrayView3<'_, T>, ArrayView3<'_, T>); 3],
    start: Start,
    d_weights: &mut Weights<T>,
    scratch: &mut Vec<Vec<T>>,
) {
    let Weights { w_q, w_k, w_v, b_q, b_k, b_v, .. } = d_weights;
    let of_weights = |(x, d_y), d_w| Some(WeightGradient { x, d_y, d_w, start });
    let inputs = [of_weights(q, w_q.view_mut()), of_weights(k, w_k.view_mut()), of_weights(v, w_v.view_mut())];
    T::weight_gradients(level, inputs, Terms::Seen, scratch);

    let one = T::one();
    let one = aview0(&one);
    let of_bias = |d_y, d_b| WeightGradient::of_bias(&one, d_y, d_b, start);
    let inputs = [of_bias(q.1, b_q), of_bias(k.1, b_k), of_bias(v.1, b_v)];
    T::weight_gradients(level, inputs, Terms::All, scratch);
}

/// `y (+)= x W^T`
fn turned<'a, T>(x: ArrayView3<'a, T>, w: &'a Array2<T>, y: ArrayViewMut3<'a, T>, start: Start) -> Projected<'a, T> {
    Projected { x, w: w.t().into(), bias: None, y, start, then: None }
}

/// Arrays like these, with any numbers, in `memory`.
fn room_like<T: Element>(activations: &Activations<T>, memory: [Vec<T>; 4]) -> Result<Activations<T>> {
    let room = |name, array: &Array4<T>, memory| {
        let (batch, heads, len, width) = array.dim();
        by_head(reused(name, "[batch, len, heads * width]", (batch, len, heads * width), memory)?, heads, width)
    };
    let (Activations { q, k, v, context }, [d_q, d_k, d_v, d_context]) = (activations, memory);
    Ok(Activations {
        q: room("d_q", q, d_q)?,
        k: room("d_k", k, d_k)?,
        v: room("d_v", v, d_v)?,
        context: room("d_context", context, d_context)?,
    })
}
