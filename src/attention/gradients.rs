//! The gradients of [`attention::forward`](super::forward): what backward takes, what it gives, and its two entry points.

use ndarray::{
    Array1, Array2, Array4, ArrayRef3, ArrayRef4, ArrayView3, ArrayView4, ArrayViewMut1, ArrayViewMut2, ArrayViewMut4,
};

use super::problem::Problem;
use super::{Dims, Options, Path, Workspace, reference_backward};
use crate::element::{Element, zeros};
use crate::error::{Error, Result, check_shape};

/// A forward call as backward needs it: its inputs and what it returned.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Options, Saved};
/// let q = Array4::<f32>::ones((1, 2, 3, 8));
/// let attended = attention::forward(&q, &q, &q, &Options::new())?;
/// let saved = Saved { q: &q, k: &q, v: &q, context: &attended.context, lse: &attended.lse };
/// # let _ = saved;
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Saved<'a, T> {
    /// `[batch, num_heads, q_len, head_dim]`
    pub q: &'a ArrayRef4<T>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`
    pub k: &'a ArrayRef4<T>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`
    pub v: &'a ArrayRef4<T>,
    /// `[batch, num_heads, q_len, value_dim]`: [`Attended::context`](super::Attended::context).
    pub context: &'a ArrayRef4<T>,
    /// `[batch, num_heads, q_len]`: [`Attended::lse`](super::Attended::lse).
    pub lse: &'a ArrayRef3<T>,
}

/// The gradients of a loss with respect to what attention was given.
///
/// Gradients of pairs that a mask hides are zero, and so are those of queries that see no key.
#[derive(Debug, Clone, PartialEq)]
pub struct Gradients<T> {
    /// `[batch, num_heads, q_len, head_dim]`
    pub d_q: Array4<T>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`, summed over the query heads that read the KV head.
    pub d_k: Array4<T>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`, likewise.
    pub d_v: Array4<T>,
    /// The shape of the bias, a bias of rank 2 as `[1, 1, q_len, kv_len]`; summed over the axes that it is broadcast
    /// along. There if [`Options::bias_gradient`] asked for it.
    pub d_bias: Option<Array4<T>>,
    /// `[num_heads]`, if the call has sinks.
    pub d_sinks: Option<Array1<T>>,
    /// `[buckets, num_heads]`, if the call has a learned bias by distance.
    pub d_relative_bias: Option<Array2<T>>,
    /// `[2 clip + 1, head_dim]`, if the call has relative keys.
    pub d_relative_keys: Option<Array2<T>>,
}

impl<T: Element> Gradients<T> {
    /// Zeros of the shapes that a call gives, for [`backward_into`].
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, Gradients, Options, Saved};
    /// let (q, k) = (Array4::<f32>::ones((1, 4, 3, 8)), Array4::ones((1, 2, 5, 8)));
    /// let attended = attention::forward(&q, &k, &k, &Options::new())?;
    /// let saved = Saved { q: &q, k: &k, v: &k, context: &attended.context, lse: &attended.lse };
    /// assert_eq!(Gradients::zeros(&saved, &Options::new())?.d_k, Array4::<f32>::zeros((1, 2, 5, 8)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`backward`], as far as it does not concern `d_context`.
    pub fn zeros(saved: &Saved<'_, T>, options: &Options<'_, T>) -> Result<Self> {
        let dims = T::check_saved(saved, options)?;
        let Dims { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim } = dims;
        let bias = options.bias.as_ref().filter(|_| options.wants_bias_gradient());
        let d_bias = bias.map(|bias| zeros("d_bias", "[batch, num_heads, q_len, kv_len]", bias.dim()));
        let d_sinks = options.sinks.map(|_| zeros("d_sinks", "[num_heads]", num_heads));
        Ok(Self {
            d_q: zeros("d_q", "[batch, num_heads, q_len, head_dim]", (batch, num_heads, q_len, head_dim))?,
            d_k: zeros("d_k", "[batch, num_kv_heads, kv_len, head_dim]", (batch, num_kv_heads, kv_len, head_dim))?,
            d_v: zeros("d_v", "[batch, num_kv_heads, kv_len, value_dim]", (batch, num_kv_heads, kv_len, value_dim))?,
            d_bias: d_bias.transpose()?,
            d_sinks: d_sinks.transpose()?,
            d_relative_bias: match &options.relative_bias {
                Some((_, table)) => Some(zeros("d_relative_bias", "[buckets, num_heads]", table.dim())?),
                None => None,
            },
            d_relative_keys: match &options.relative_keys {
                Some(keys) => Some(zeros("d_relative_keys", "[2 clip + 1, head_dim]", keys.dim())?),
                None => None,
            },
        })
    }

    /// Checks the shapes against a call's.
    fn check(&self, dims: &Dims, options: &Options<'_, T>) -> Result<()> {
        let [batch, num_heads, num_kv_heads] = [dims.batch, dims.num_heads, dims.num_kv_heads].map(Some);
        let [q_len, kv_len, head_dim, value_dim] = [dims.q_len, dims.kv_len, dims.head_dim, dims.value_dim].map(Some);
        let expected = [batch, num_heads, q_len, head_dim];
        check_shape("d_q", "[batch, num_heads, q_len, head_dim]", expected, self.d_q.shape())?;
        let expected = [batch, num_kv_heads, kv_len, head_dim];
        check_shape("d_k", "[batch, num_kv_heads, kv_len, head_dim]", expected, self.d_k.shape())?;
        let expected = [batch, num_kv_heads, kv_len, value_dim];
        check_shape("d_v", "[batch, num_kv_heads, kv_len, value_dim]", expected, self.d_v.shape())?;
        let bias = options.bias.as_ref().filter(|_| options.wants_bias_gradient());
        match (&self.d_bias, bias) {
            (Some(d_bias), Some(bias)) => {
                let expected = <[usize; 4]>::from(bias.dim()).map(Some);
                check_shape("d_bias", "[batch, num_heads, q_len, kv_len]", expected, d_bias.shape())?;
            }
            (None, None) => {}
            (None, Some(_)) => return Err(Error::value("d_bias", "an array, which bias_gradient() asks for", "None")),
            (Some(_), None) => return Err(Error::value("d_bias", "None without bias_gradient()", "an array")),
        }
        match (&self.d_sinks, options.sinks) {
            (Some(d_sinks), Some(_)) => check_shape("d_sinks", "[num_heads]", [num_heads], d_sinks.shape())?,
            (None, None) => {}
            (None, Some(_)) => return Err(Error::value("d_sinks", "an array, since the call has sinks", "None")),
            (Some(_), None) => return Err(Error::value("d_sinks", "None for a call without sinks", "an array")),
        }
        let table = options.relative_bias.as_ref().map(|(_, table)| table.dim());
        check_table("d_relative_bias", "[buckets, num_heads]", &self.d_relative_bias, table)?;
        let keys = options.relative_keys.as_ref().map(|keys| keys.dim());
        check_table("d_relative_keys", "[2 clip + 1, head_dim]", &self.d_relative_keys, keys)
    }

    /// The arrays as backward fills them.
    pub(crate) fn view_mut(&mut self) -> GradientsMut<'_, T> {
        GradientsMut {
            d_q: self.d_q.view_mut(),
            d_k: self.d_k.view_mut(),
            d_v: self.d_v.view_mut(),
            d_bias: self.d_bias.as_mut().map(|d_bias| d_bias.view_mut()),
            d_sinks: self.d_sinks.as_mut().map(|d_sinks| d_sinks.view_mut()),
            d_relative_bias: self.d_relative_bias.as_mut().map(|d_table| d_table.view_mut()),
            d_relative_keys: self.d_relative_keys.as_mut().map(|d_keys| d_keys.view_mut()),
        }
    }
}

/// Checks that the gradient of a learned table is there if the table is.
fn check_table<T>(
    name: &'static str,
    axes: &'static str,
    gradient: &Option<Array2<T>>,
    table: Option<(usize, usize)>,
) -> Result<()> {
    match (gradient, table) {
        (Some(gradient), Some((rows, columns))) => {
            check_shape(name, axes, [Some(rows), Some(columns)], gradient.shape())
        }
        (None, None) => Ok(()),
        (None, Some(_)) => Err(Error::value(name, "an array, since the call has such a table", "None")),
        (Some(_), None) => Err(Error::value(name, "None for a call without such a table", "an array")),
    }
}

/// The arrays that backward fills, each element of them; any strides. See [`Gradients`] for the shapes.
pub(crate) struct GradientsMut<'a, T> {
    pub(crate) d_q: ArrayViewMut4<'a, T>,
    pub(crate) d_k: ArrayViewMut4<'a, T>,
    pub(crate) d_v: ArrayViewMut4<'a, T>,
    pub(crate) d_bias: Option<ArrayViewMut4<'a, T>>,
    pub(crate) d_sinks: Option<ArrayViewMut1<'a, T>>,
    pub(crate) d_relative_bias: Option<ArrayViewMut2<'a, T>>,
    pub(crate) d_relative_keys: Option<ArrayViewMut2<'a, T>>,
}

impl<T: Element> GradientsMut<'_, T> {
    /// Zeros everywhere.
    pub(super) fn clear(&mut self) {
        self.d_q.fill(T::zero());
        self.d_k.fill(T::zero());
        self.d_v.fill(T::zero());
        self.d_bias.iter_mut().for_each(|d_bias| d_bias.fill(T::zero()));
        self.d_sinks.iter_mut().for_each(|d_sinks| d_sinks.fill(T::zero()));
        for d_table in [&mut self.d_relative_bias, &mut self.d_relative_keys].into_iter().flatten() {
            d_table.fill(T::zero());
        }
    }

    fn is_empty(&self) -> bool {
        let d_sinks = self.d_sinks.as_ref().is_none_or(|d_sinks| d_sinks.is_empty());
        let d_bias = self.d_bias.as_ref().is_none_or(|d_bias| d_bias.is_empty());
        let tables = [&self.d_relative_bias, &self.d_relative_keys];
        let tables = tables.into_iter().flatten().all(|d_table| d_table.is_empty());
        self.d_q.is_empty() && self.d_k.is_empty() && self.d_v.is_empty() && d_bias && d_sinks && tables
    }
}

/// The gradients of [`forward`](super::forward): from the gradient of the context to those of queries, keys and values,
/// of the sinks if there are any, and of the bias if [`Options::bias_gradient`] asks for it.
///
/// - `saved`: the inputs and outputs of the forward call
/// - `d_context: [batch, num_heads, q_len, value_dim]`
///
/// With `p[i, j] = exp(s[i, j] - lse[i])` over the pairs that are visible, and `z` the factors of dropout (1 without it):
///
/// ```text
/// D[i]     = d_context[i] . context[i]
/// d_p      = z[i, j] (d_context[i] . v[j])
/// d_s      = p[i, j] (d_p - D[i])                    the gradient of the bias
/// d_x      = d_s (1 - (capped / softcap)^2)          capped = softcap tanh(scale q . k / softcap)
/// d_v[j]   = sum_i z p d_context[i]
/// d_k[j]   = scale sum_i d_x q[i]
/// d_q[i]   = scale sum_j d_x k[j]
/// d_sink   = -sum_i exp(sink - lse[i]) D[i]
/// ```
///
/// The learned bias of a bucket gets `d_s` of all pairs in it, a relative key `scale d_x q[i]` of all pairs at its distance;
/// queries get the relative keys besides `k[j]`.
///
/// (Dao et al. 2022, <https://arxiv.org/abs/2205.14135>, appendix B.2.) The sums of keys and values run over all queries
/// of all heads that read them.
///
/// `options` are those of the forward call, the seed of the dropout included. Whether weights were asked for does not
/// matter. [`Path::Reference`] names the plain loops; every other path means the tiled one, whose memory is linear in the
/// length.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Mask, Options, Saved};
/// let (q, k) = (Array4::<f64>::zeros((1, 2, 3, 8)), Array4::ones((1, 1, 3, 8)));
/// let v = Array4::from_shape_fn((1, 1, 3, 1), |(_, _, j, _)| j as f64);
/// let causal = Mask::causal();
/// let options = Options::new().mask(&causal);
/// let attended = attention::forward(&q, &k, &v, &options)?;
/// let saved = Saved { q: &q, k: &k, v: &v, context: &attended.context, lse: &attended.lse };
/// let gradients = attention::backward(&saved, &Array4::ones((1, 2, 3, 1)), &options)?;
/// // Key 0 is all that query 0 sees, a half of query 1 and a third of query 2; of both heads.
/// assert!((gradients.d_v[[0, 0, 0, 0]] - 2.0 * (1.0 + 0.5 + 1.0 / 3.0)).abs() < 1e-12);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`forward`](super::forward); [`crate::Error::Shape`] if context, lse or their gradient have other lengths than the
/// call, [`crate::Error::Value`] if the gradient of a bias is asked for that is not there.
#[doc(alias = "scaled_dot_product_attention_backward")]
pub fn backward<T: Element>(
    saved: &Saved<'_, T>,
    d_context: &ArrayRef4<T>,
    options: &Options<'_, T>,
) -> Result<Gradients<T>> {
    let dims = T::check_saved(saved, options)?;
    check_d_context(&dims, d_context)?;
    let mut gradients = Gradients::zeros(saved, options)?;
    T::differentiate(saved, d_context, options, gradients.view_mut(), &mut Workspace::new())?;
    Ok(gradients)
}

/// [`backward`] into arrays of the caller's, of any strides; what they held before does not matter.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Gradients, Options, Saved, Workspace};
/// let q = Array4::<f32>::ones((1, 2, 3, 8));
/// let attended = attention::forward(&q, &q, &q, &Options::new())?;
/// let saved = Saved { q: &q, k: &q, v: &q, context: &attended.context, lse: &attended.lse };
/// let mut gradients = Gradients::zeros(&saved, &Options::new())?;
/// let mut workspace = Workspace::new();
/// attention::backward_into(&saved, &q, &Options::new(), &mut gradients, &mut workspace)?;
/// assert!((gradients.d_v.sum() - q.sum()).abs() < 1e-4);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`backward`], and [`crate::Error::Shape`] or [`crate::Error::Value`] if an array of `gradients` has other lengths
/// than the call gives, is missing or is there unasked. Nothing is written then.
pub fn backward_into<T: Element>(
    saved: &Saved<'_, T>,
    d_context: &ArrayRef4<T>,
    options: &Options<'_, T>,
    gradients: &mut Gradients<T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = T::check_saved(saved, options)?;
    check_d_context(&dims, d_context)?;
    gradients.check(&dims, options)?;
    T::differentiate(saved, d_context, options, gradients.view_mut(), workspace)
}

fn check_d_context<T>(dims: &Dims, d_context: &ArrayRef4<T>) -> Result<()> {
    let expected = [dims.batch, dims.num_heads, dims.q_len, dims.value_dim].map(Some);
    check_shape("d_context", "[batch, num_heads, q_len, value_dim]", expected, d_context.shape())
}

/// The body of [`Compiled::check_saved`](crate::compiled::Compiled::check_saved).
pub(crate) fn check_saved<T: Element>(saved: &Saved<'_, T>, options: &Options<'_, T>) -> Result<Dims> {
    options.chosen_path()?;
    let dims = Problem::new(saved.q, saved.k, saved.v, options)?.dims;
    let [batch, num_heads, q_len, value_dim] = [dims.batch, dims.num_heads, dims.q_len, dims.value_dim].map(Some);
    let expected = [batch, num_heads, q_len, value_dim];
    check_shape("context", "[batch, num_heads, q_len, value_dim]", expected, saved.context.shape())?;
    check_shape("lse", "[batch, num_heads, q_len]", [batch, num_heads, q_len], saved.lse.shape())?;
    match options.wants_bias_gradient() && options.bias.is_none() {
        true => Err(Error::value("bias_gradient", "a bias in the options", "none")),
        false => Ok(dims),
    }
}

/// The body of [`Compiled::differentiate`](crate::compiled::Compiled::differentiate).
pub(crate) fn differentiate<T: Element>(
    saved: &Saved<'_, T>,
    d_context: &ArrayRef4<T>,
    options: &Options<'_, T>,
    gradients: GradientsMut<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    workspace.with_lines(|lines, workspace| {
        let mut problem = Problem::new(saved.q, saved.k, saved.v, options)?;
        if gradients.is_empty() {
            // Nothing to fill, however many heads or batch entries a broadcast view claims to have.
            return Ok(());
        }
        problem.rules.lay_out(&problem.dims, lines)?;
        let (context, lse) = (saved.context.view(), saved.lse.view());
        let call = Differentiated { problem, context, lse, d_context: d_context.view() };
        match options.chosen_path()? {
            Path::Reference => reference_backward::backward(&call, gradients),
            _ => super::backward::backward(&call, options.query_tile, gradients, workspace),
        }
    })
}

/// A checked call of backward.
pub(crate) struct Differentiated<'a, T> {
    pub(crate) problem: Problem<'a, T>,
    /// `[batch, num_heads, q_len, value_dim]`
    pub(crate) context: ArrayView4<'a, T>,
    /// `[batch, num_heads, q_len]`
    pub(crate) lse: ArrayView3<'a, T>,
    /// `[batch, num_heads, q_len, value_dim]`
    pub(crate) d_context: ArrayView4<'a, T>,
}
