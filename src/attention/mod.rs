//! The functional core: queries, keys and values in, context out; no weights.
//!
//! For each batch entry and query head, with `j` over the keys that query `i` may see:
//!
//! ```text
//! s[i, j] = scale * q[i] . k[j]                     (with relative keys: k[j] + r[j - pos(i)])
//! s[i, j] = softcap * tanh(s[i, j] / softcap)
//! s[i, j] = s[i, j] + bias[i, j]                    (-inf hides the pair; an array, ALiBi, a learned table, or several)
//! lse[i]  = ln(sum_j exp(s[i, j]) + exp(sink))
//! w[i, j] = exp(s[i, j] - lse[i])
//! context[i] = sum_j z[i, j] w[i, j] v[j]           (z = 1 without dropout)
//! ```
//!
//! (Vaswani et al. 2017, <https://arxiv.org/abs/1706.03762>, with the soft cap of Gemma 2 and the sinks of gpt-oss.)
//! A query that sees no key has context 0, weights 0 and `lse = -inf` (its sink where the head has one).
//! A hidden pair contributes nothing, whatever its values are.
//!
//! | path | what it is |
//! | --- | --- |
//! | [`Path::Reference`] | four passes in plain loops |
//! | [`Path::Tiled`] | tiles of keys with online softmax, no scores in memory; chunks of keys for few queries |
//! | [`Path::Dense`] | product, row softmax, product; stores the weights when they are asked for |
//!
//! [`backward`] gives the gradients and has their formulas.

// Read `reference.rs` and `reference_backward.rs` first: they are the plain loops. `walk.rs` and `sight.rs` are the tiles,
// which `forward.rs` walks whole and `split.rs` in chunks of keys; `backward.rs` goes back along them, tile by tile in
// `backward_tile.rs`. `dense.rs` is the path with weights.

mod backward;
mod backward_stage;
mod backward_tile;
mod backward_unit;
mod bias;
mod decode;
mod dense;
mod distance;
mod dropout;
mod forward;
mod gradients;
mod merge;
mod options;
mod problem;
mod reference;
mod reference_backward;
mod relative_keys;
mod room;
mod row_shares;
mod schedule;
mod sight;
mod source;
mod split;
mod tables_backward;
mod tiles;
mod totals;
mod walk;
mod workspace;

pub use decode::{NewTokens, decode, decode_into, extend, extend_into};
pub(crate) use decode::{check_decode, check_extend, check_reading, decode_checked, extend_checked, plan};
pub(crate) use dropout::mix;
pub use gradients::{Gradients, Saved, backward, backward_into};
pub(crate) use gradients::{GradientsMut, check_saved, differentiate};
pub use merge::merge;
pub use options::{Options, Path};
pub(crate) use source::{Coming, Packed, Source, Wanted};
pub use workspace::Workspace;

use ndarray::{Array3, Array4, ArrayRef4, ArrayViewMut3, ArrayViewMut4, Axis};

use crate::element::{Element, zeros};
use crate::error::{Error, Result, check_shape};
use crate::mask::Held;
pub(crate) use dense::Weigher;
use problem::Rules;
pub(crate) use problem::{Dims, Problem, check_finite, check_scale, check_softcap};
pub(crate) use relative_keys::check_relative_keys;
use source::Arrays;
use walk::Call;

/// What attention returns.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended<T> {
    /// `[batch, num_heads, q_len, value_dim]`: the weighted sums of the values.
    pub context: Array4<T>,
    /// `[batch, num_heads, q_len]`: natural log of the sum of exponentials of each query's visible scores, sink
    /// included; -inf where a query sees nothing.
    pub lse: Array3<T>,
    /// `[batch, num_heads, q_len, kv_len]`: the softmax probabilities, if [`Options::weights`] asked for them.
    pub weights: Option<Array4<T>>,
}

impl<T: Element> Attended<T> {
    /// Zeros of the shapes that a call gives, for [`forward_saving_into`].
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, Attended, Options};
    /// let q = Array4::<f32>::zeros((1, 2, 3, 8));
    /// assert_eq!(Attended::zeros(&q, &q, &q, &Options::new())?.context.dim(), (1, 2, 3, 8));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`forward`].
    pub fn zeros(q: &ArrayRef4<T>, k: &ArrayRef4<T>, v: &ArrayRef4<T>, options: &Options<'_, T>) -> Result<Self> {
        let dims = T::check([q, k, v], options)?;
        let [batch, heads, q_len, _] = dims.scores();
        let shape = (batch, heads, q_len, dims.value_dim);
        let context = zeros("context", "[batch, num_heads, q_len, value_dim]", shape)?;
        let (lse, weights) = lse_and_weights(dims.scores(), options)?;
        Ok(Self { context, lse, weights })
    }

    /// The arrays as a path fills them.
    fn outputs(&mut self) -> Outputs<'_, T> {
        Outputs {
            context: self.context.view_mut(),
            lse: Some(self.lse.view_mut()),
            weights: self.weights.as_mut().map(|weights| weights.view_mut()),
        }
    }

    /// `[batch, q_len, kv_len]`: the weights averaged over the heads, if there are weights.
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, Options};
    /// let q = Array4::<f32>::zeros((1, 2, 3, 8));
    /// let mean = attention::forward(&q, &q, &q, &Options::new().weights())?.mean_weights().unwrap();
    /// assert_eq!(mean.shape(), [1, 3, 3]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "average_attn_weights")]
    pub fn mean_weights(&self) -> Option<Array3<T>> {
        let weights = self.weights.as_ref()?;
        let share = T::from_f64((weights.len_of(Axis(1)) as f64).recip());
        Some(weights.sum_axis(Axis(1)) * share)
    }
}

/// Scaled dot-product attention.
///
/// - `q: [batch, num_heads, q_len, head_dim]`
/// - `k: [batch, num_kv_heads, kv_len, head_dim]`
/// - `v: [batch, num_kv_heads, kv_len, value_dim]`
///
/// Any strides will do. With fewer KV heads than query heads, query head h reads KV head `h / group_size`
/// ([`Options::heads`] names any other map); K and V are never repeated in memory.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Mask, Options};
/// let q = Array4::<f32>::zeros((1, 4, 3, 8));
/// let k = Array4::<f32>::zeros((1, 2, 5, 8));
/// let v = Array4::from_shape_fn((1, 2, 5, 1), |(_, head, j, _)| (10 * head + j) as f32);
/// let causal = Mask::causal();
/// let attended = attention::forward(&q, &k, &v, &Options::new().mask(&causal))?;
/// // The first query sees keys 0 to 2, all with the same score.
/// assert_eq!(attended.context[[0, 0, 0, 0]], 1.0);
/// assert_eq!(attended.context[[0, 3, 2, 0]], 12.0);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error`] names the argument: shapes that do not fit each other, a head count that cannot be grouped, a mask,
/// bias or sinks of the wrong shape, a scale or softcap out of range, a level that this CPU cannot run, weights asked
/// of the tiled path, a result that does not fit into memory.
#[doc(alias = "scaled_dot_product_attention")]
#[doc(alias = "sdpa")]
pub fn forward<T: Element>(
    q: &ArrayRef4<T>,
    k: &ArrayRef4<T>,
    v: &ArrayRef4<T>,
    options: &Options<'_, T>,
) -> Result<Attended<T>> {
    let mut attended = Attended::zeros(q, k, v, options)?;
    T::attend([q, k, v], options, attended.outputs(), &mut Workspace::new())?;
    Ok(attended)
}

/// [`forward`] into an array of the caller's: `context: [batch, num_heads, q_len, value_dim]`, any strides; what it
/// held before does not matter. Weights and lse are not returned ([`forward_saving_into`] has both).
///
/// ```
/// use multihead::{attention, ndarray::Array4, Options, Workspace};
/// let q = Array4::<f32>::ones((1, 4, 3, 8));
/// let mut context = Array4::zeros((1, 4, 3, 8));
/// let mut workspace = Workspace::new();
/// attention::forward_into(&q, &q, &q, &Options::new(), &mut context, &mut workspace)?;
/// assert_eq!(context, q);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`forward`], [`crate::Error::Shape`] if `context` has other lengths, and [`crate::Error::Value`] if the options ask
/// for weights, which [`forward`] and [`forward_saving_into`] return. Nothing is written then.
pub fn forward_into<T: Element>(
    q: &ArrayRef4<T>,
    k: &ArrayRef4<T>,
    v: &ArrayRef4<T>,
    options: &Options<'_, T>,
    context: &mut ArrayRef4<T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    options.check_no_weights("none asked of forward_into; forward and forward_saving_into return them")?;
    let dims = T::check([q, k, v], options)?;
    let expected = [Some(dims.batch), Some(dims.num_heads), Some(dims.q_len), Some(dims.value_dim)];
    check_shape("context", "[batch, num_heads, q_len, value_dim]", expected, context.shape())?;
    let outputs = Outputs { context: context.view_mut(), lse: None, weights: None };
    T::attend([q, k, v], options, outputs, workspace)
}

/// [`forward`] into arrays of the caller's, of any strides: the context, the lse that [`backward`] needs, and the weights
/// if the options ask for them. What they held before does not matter.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Attended, Options, Workspace};
/// let q = Array4::<f32>::ones((1, 4, 3, 8));
/// let mut attended = Attended::zeros(&q, &q, &q, &Options::new())?;
/// let mut workspace = Workspace::new();
/// attention::forward_saving_into(&q, &q, &q, &Options::new(), &mut attended, &mut workspace)?;
/// assert_eq!(attended, attention::forward(&q, &q, &q, &Options::new())?);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`forward`], and [`crate::Error::Shape`] or [`crate::Error::Value`] if an array of `attended` has other lengths, or
/// there are weights unasked or none. Nothing is written then.
pub fn forward_saving_into<T: Element>(
    q: &ArrayRef4<T>,
    k: &ArrayRef4<T>,
    v: &ArrayRef4<T>,
    options: &Options<'_, T>,
    attended: &mut Attended<T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = T::check([q, k, v], options)?;
    let [batch, num_heads, q_len, kv_len] = dims.scores().map(Some);
    let expected = [batch, num_heads, q_len, Some(dims.value_dim)];
    check_shape("context", "[batch, num_heads, q_len, value_dim]", expected, attended.context.shape())?;
    check_shape("lse", "[batch, num_heads, q_len]", [batch, num_heads, q_len], attended.lse.shape())?;
    match (&attended.weights, options.keeps_weights()) {
        (Some(weights), true) => {
            let expected = [batch, num_heads, q_len, kv_len];
            check_shape("weights", "[batch, num_heads, q_len, kv_len]", expected, weights.shape())?;
        }
        (None, false) => {}
        (None, true) => return Err(Error::value("weights", "an array, which the options ask for", "None")),
        (Some(_), false) => return Err(Error::value("weights", "None, as the options ask for none", "an array")),
    }
    T::attend([q, k, v], options, attended.outputs(), workspace)
}

/// The lse `[batch, num_heads, q_len]` of a call and, if it asks for them, the weights `[batch, num_heads, q_len, kv_len]`.
pub(crate) fn lse_and_weights<T: Element>(
    [batch, heads, q_len, kv_len]: [usize; 4],
    options: &Options<'_, T>,
) -> Result<(Array3<T>, Option<Array4<T>>)> {
    let lse = zeros("lse", "[batch, num_heads, q_len]", (batch, heads, q_len))?;
    let weights = match options.keeps_weights() {
        true => Some(zeros("weights", "[batch, num_heads, q_len, kv_len]", (batch, heads, q_len, kv_len))?),
        false => None,
    };
    Ok((lse, weights))
}

/// The arrays that a path fills, each element of them.
pub(crate) struct Outputs<'a, T> {
    /// `[batch, num_heads, q_len, value_dim]`
    pub(crate) context: ArrayViewMut4<'a, T>,
    /// `[batch, num_heads, q_len]`
    pub(crate) lse: Option<ArrayViewMut3<'a, T>>,
    /// `[batch, num_heads, q_len, kv_len]`
    pub(crate) weights: Option<ArrayViewMut4<'a, T>>,
}

impl<T> Outputs<'_, T> {
    fn is_empty(&self) -> bool {
        let (lse, weights) = (self.lse.as_ref(), self.weights.as_ref());
        self.context.is_empty() && lse.is_none_or(|lse| lse.is_empty()) && weights.is_none_or(|w| w.is_empty())
    }
}

/// The body of [`Compiled::check`](crate::compiled::Compiled::check).
pub(crate) fn check<T: Element>([q, k, v]: [&ArrayRef4<T>; 3], options: &Options<'_, T>) -> Result<Dims> {
    options.chosen_path()?;
    Ok(Problem::new(q, k, v, options)?.dims)
}

/// The body of [`Compiled::check_rules`](crate::compiled::Compiled::check_rules).
pub(crate) fn check_rules<T: Element>(dims: Dims, options: &Options<'_, T>) -> Result<()> {
    options.chosen_path()?;
    Rules::new(dims, options, Held::ALL).map(drop)
}

/// The body of [`Compiled::attend`](crate::compiled::Compiled::attend).
pub(crate) fn attend<T: Element>(
    [q, k, v]: [&ArrayRef4<T>; 3],
    options: &Options<'_, T>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    workspace.with_lines(|lines, workspace| {
        let mut problem = Problem::new(q, k, v, options)?;
        if outputs.is_empty() {
            // Nothing to fill, however many heads or batch entries a broadcast view claims to have.
            return Ok(());
        }
        problem.rules.lay_out(&problem.dims, lines)?;
        run(&problem, options, outputs, workspace)
    })
}

/// Fills the outputs of a call that has been checked, on the path that was chosen.
fn run<T: Element>(
    problem: &Problem<'_, T>,
    options: &Options<'_, T>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    match options.chosen_path()? {
        Path::Reference => reference::forward(problem, outputs),
        Path::Dense => dense::forward(problem, outputs),
        Path::Auto | Path::Tiled => {
            let Problem { dims, q, k, v, rules } = problem;
            let source = Arrays { k: k.view(), v: v.view() };
            let call = Call { dims: *dims, q: q.view(), first: 0, rules, source: &source };
            tiled(&call, options.query_tile, outputs, workspace)
        }
    }
}

/// Tiles with online softmax: the keys cut into chunks where there are few queries, the queries into blocks elsewhere.
fn tiled<'p, T: Element>(
    call: &'p Call<'p, '_, T>,
    query_tile: Option<usize>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    if let Some(keys) = call.rules.room() {
        split::make_room(call, keys, query_tile, workspace)?;
    }
    match split::chunk_tiles(call) {
        Some(tiles) => split::forward(call, tiles, outputs, workspace),
        None => forward::forward(call, query_tile, outputs, workspace),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broadcast_batches_of_values_without_width_are_not_walked() -> Result<()> {
        let (one, none) = (Array4::<f32>::ones((1, 1, 1, 1)), Array4::<f32>::ones((1, 1, 1, 0)));
        let (batch, mut context) = (1 << 40, Array4::zeros((1 << 40, 1, 1, 0)));
        let (q, v) = (one.broadcast((batch, 1, 1, 1)).unwrap(), none.broadcast((batch, 1, 1, 0)).unwrap());
        for path in [Path::Reference, Path::Dense, Path::Tiled] {
            forward_into(&q, &q, &v, &Options::new().path(path), &mut context, &mut Workspace::new())?;
        }
        Ok(())
    }
}
