//! Attention of new queries over a cache.
//!
//! ```text
//! decode(q, cache)          context, lse of the queries over what the cache holds
//! extend(q, k, v, cache)    append k, v; then decode
//! ```
//!
//! With a bottom-right mask (causal, window) the last valid query stands at the last key of its batch entry, so the offset
//! of a call is the length of the cache before the append, and nobody computes it. Bounds of masks, biases and weights
//! count all positions: `kv_len` is the length of the longest entry. (Without entries there is no length, and `kv_len` is 0
//! whatever has been appended: a batch of none keeps nothing, not even a count.)
//!
//! A ring cannot hold a long chunk and the windows of its first queries at once; `extend` writes and answers such a chunk
//! piece by piece.

use ndarray::{Array4, ArrayRef4, s};
use std::ops::Range;

use super::problem::{Dims, Problem, Rules};
use super::walk::Call;
use super::{Attended, Options, Outputs, Path, Workspace, forward, lse_and_weights, run, tiled};
use crate::cache::{CacheShape, KvCache, Slots, Storage};
use crate::compiled::Compiled;
use crate::element::{Element, zeros};
use crate::error::{Result, check_shape};
use crate::heads::HeadMap;
use crate::mask::Held;

/// Queries, keys and values of new tokens.
///
/// ```
/// use multihead::{attention::NewTokens, ndarray::Array4};
/// let (q, kv) = (Array4::<f32>::ones((1, 4, 1, 8)), Array4::ones((1, 2, 1, 8)));
/// let tokens = NewTokens { q: &q, k: &kv, v: &kv };
/// # let _ = tokens;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct NewTokens<'a, T> {
    /// `[batch, num_heads, q_len, head_dim]`
    pub q: &'a ArrayRef4<T>,
    /// `[batch, num_kv_heads, q_len, head_dim]`
    pub k: &'a ArrayRef4<T>,
    /// `[batch, num_kv_heads, q_len, value_dim]`
    pub v: &'a ArrayRef4<T>,
}

/// Attention over what a cache holds; nothing is appended. `q: [batch, num_heads, q_len, head_dim]`, any strides.
///
/// For cross-attention over a cache that has been filled once, and for queries whose keys have been appended. The queries
/// are taken for the last tokens of each entry, as far as the mask asks for positions.
///
/// ```
/// use multihead::{attention, ndarray::Array4, CacheShape, KvCache, Mask, Options};
/// let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 8, head_dim: 4, value_dim: 1 };
/// let mut cache = KvCache::<f32>::new(shape)?;
/// let v = Array4::from_shape_fn((1, 1, 5, 1), |(_, _, j, _)| j as f32);
/// cache.append(&Array4::zeros((1, 1, 5, 4)), &v)?;
/// let (q, causal) = (Array4::zeros((1, 2, 2, 4)), Mask::causal());
/// let attended = attention::decode(&q, &cache, &Options::new().mask(&causal))?;
/// // The first of the two queries sees keys 0 to 3, all with the same score.
/// assert_eq!(attended.context[[0, 0, 0, 0]], 1.5);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`super::forward`]; [`crate::Error::Overwritten`] if a query would see keys that a ring has overwritten: there are more
/// of them than its windows last for, or the mask puts them further back.
#[doc(alias = "flash_attn_with_kvcache")]
pub fn decode<S: Storage>(
    q: &ArrayRef4<S::Element>,
    cache: &KvCache<S>,
    options: &Options<'_, S::Element>,
) -> Result<Attended<S::Element>> {
    let dims = S::Element::check_decode(q, cache, options)?;
    attended(dims, options, |outputs, workspace| S::Element::decode(q, cache, options, outputs, workspace))
}

/// [`decode`] into an array of the caller's: `context: [batch, num_heads, q_len, value_dim]`, any strides. With the same
/// workspace, calls after the first allocate nothing.
///
/// ```
/// use multihead::{attention, ndarray::Array4, CacheShape, KvCache, Options, Workspace};
/// let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 8, head_dim: 4, value_dim: 4 };
/// let mut cache = KvCache::<f32>::new(shape)?;
/// cache.append(&Array4::ones((1, 2, 5, 4)), &Array4::ones((1, 2, 5, 4)))?;
/// let (q, mut context) = (Array4::ones((1, 2, 1, 4)), Array4::zeros((1, 2, 1, 4)));
/// attention::decode_into(&q, &cache, &Options::new(), &mut context, &mut Workspace::new())?;
/// assert_eq!(context, q);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`decode`], [`crate::Error::Shape`] if `context` has other lengths, and [`crate::Error::Value`] if the options ask for
/// weights, which [`decode`] returns. Nothing is written then.
pub fn decode_into<S: Storage>(
    q: &ArrayRef4<S::Element>,
    cache: &KvCache<S>,
    options: &Options<'_, S::Element>,
    context: &mut ArrayRef4<S::Element>,
    workspace: &mut Workspace<S::Element>,
) -> Result<()> {
    options.check_no_weights("none asked of decode_into; decode returns them")?;
    let dims = S::Element::check_decode(q, cache, options)?;
    check_context(&dims, context)?;
    let outputs = Outputs { context: context.view_mut(), lse: None, weights: None };
    S::Element::decode(q, cache, options, outputs, workspace)
}

/// Appends the keys and values of new tokens and attends with their queries: prefill, chunks of it, and steps.
///
/// Of entries with fewer tokens than `q_len`, [`crate::Mask::query_lengths`] in the options says how many are valid: only
/// those are appended, and the queries of the others see nothing. Chunks of any length fit a ring, under masks that leave each
/// query where its token is: valid keys end with the new tokens.
///
/// ```
/// use multihead::{attention::{self, NewTokens}, ndarray::Array4, CacheShape, KvCache, Mask, Options};
/// let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 8, head_dim: 4, value_dim: 1 };
/// let mut cache = KvCache::<f32>::new(shape)?;
/// let causal = Mask::causal();
/// for token in 0..3 {
///     let (q, v) = (Array4::zeros((1, 1, 1, 4)), Array4::from_elem((1, 1, 1, 1), token as f32));
///     let tokens = NewTokens { q: &q, k: &q, v: &v };
///     let attended = attention::extend(&tokens, &mut cache, &Options::new().mask(&causal))?;
///     assert_eq!(attended.context[[0, 0, 0, 0]], token as f32 / 2.0);
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`decode`] and [`KvCache::append`]; [`crate::Error::Value`] for a mask that moves the queries of a ring. The cache is as
/// it was then.
pub fn extend<S: Storage>(
    tokens: &NewTokens<'_, S::Element>,
    cache: &mut KvCache<S>,
    options: &Options<'_, S::Element>,
) -> Result<Attended<S::Element>> {
    let dims = S::Element::check_extend(tokens, cache, options)?;
    attended(dims, options, |outputs, workspace| S::Element::extend(tokens, cache, options, outputs, workspace))
}

/// [`extend`] into an array of the caller's, as [`decode_into`].
///
/// ```
/// use multihead::{attention::{self, NewTokens}, ndarray::Array4, CacheShape, KvCache, Options, Workspace};
/// let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 8, head_dim: 4, value_dim: 4 };
/// let mut cache = KvCache::<f32>::new(shape)?;
/// let (x, mut context) = (Array4::ones((1, 2, 1, 4)), Array4::zeros((1, 2, 1, 4)));
/// let tokens = NewTokens { q: &x, k: &x, v: &x };
/// attention::extend_into(&tokens, &mut cache, &Options::new(), &mut context, &mut Workspace::new())?;
/// assert_eq!((cache.len(), &context), (1, &x));
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`extend`], [`crate::Error::Shape`] if `context` has other lengths, and [`crate::Error::Value`] if the options ask for
/// weights, which [`extend`] returns. Nothing is written then.
pub fn extend_into<S: Storage>(
    tokens: &NewTokens<'_, S::Element>,
    cache: &mut KvCache<S>,
    options: &Options<'_, S::Element>,
    context: &mut ArrayRef4<S::Element>,
    workspace: &mut Workspace<S::Element>,
) -> Result<()> {
    options.check_no_weights("none asked of extend_into; extend returns them")?;
    let dims = S::Element::check_extend(tokens, cache, options)?;
    check_context(&dims, context)?;
    let outputs = Outputs { context: context.view_mut(), lse: None, weights: None };
    S::Element::extend(tokens, cache, options, outputs, workspace)
}

/// Makes the arrays of an answer and fills them.
fn attended<T: Element>(
    dims: Dims,
    options: &Options<'_, T>,
    fill: impl FnOnce(Outputs<'_, T>, &mut Workspace<T>) -> Result<()>,
) -> Result<Attended<T>> {
    let [batch, heads, q_len, _] = dims.scores();
    let shape = (batch, heads, q_len, dims.value_dim);
    let mut context = zeros("context", "[batch, num_heads, q_len, value_dim]", shape)?;
    let (mut lse, mut weights) = lse_and_weights(dims.scores(), options)?;
    let outputs = Outputs {
        context: context.view_mut(),
        lse: Some(lse.view_mut()),
        weights: weights.as_mut().map(|weights| weights.view_mut()),
    };
    fill(outputs, &mut Workspace::new())?;
    Ok(Attended { context, lse, weights })
}

fn check_context<T>(dims: &Dims, context: &ArrayRef4<T>) -> Result<()> {
    let expected = [dims.batch, dims.num_heads, dims.q_len, dims.value_dim].map(Some);
    check_shape("context", "[batch, num_heads, q_len, value_dim]", expected, context.shape())
}

/// The lengths of a call with so many heads and queries over the keys that are held.
fn dims<T: Element>(
    num_heads: usize,
    q_len: usize,
    cache: &dyn Slots<T>,
    options: &Options<'_, T>,
    held: Held<'_>,
) -> Result<Dims> {
    let CacheShape { batch, num_kv_heads, capacity, head_dim, value_dim } = cache.shape();
    if let Some(heads) = options.heads {
        let expected = [None, Some(heads.num_kv_heads()), None, None, None];
        let got = [batch, num_kv_heads, capacity, head_dim, value_dim];
        check_shape("cache", "[batch, num_kv_heads, capacity, head_dim, value_dim]", expected, &got)?;
    }
    let kv_len = held.lengths.into_iter().flatten().copied().max().unwrap_or(0);
    Ok(Dims { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim })
}

/// Checks the shape of the queries of a call with `q_len` tokens, any number if it is not known.
fn check_q<T: Element>(
    q: &ArrayRef4<T>,
    q_len: Option<usize>,
    cache: &dyn Slots<T>,
    options: &Options<'_, T>,
) -> Result<()> {
    let (shape, num_heads) = (cache.shape(), options.heads.map(HeadMap::num_heads));
    let expected = [Some(shape.batch), num_heads, q_len, Some(shape.head_dim)];
    check_shape("q", "[batch, num_heads, q_len, head_dim]", expected, q.shape())
}

/// The body of [`Compiled::check_decode`].
pub(crate) fn check_decode<T: Element>(
    q: &ArrayRef4<T>,
    cache: &dyn Slots<T>,
    options: &Options<'_, T>,
) -> Result<Dims> {
    check_q(q, None, cache, options)?;
    check_reading(q.dim().1, q.dim().2, cache, options)
}

/// The body of [`Compiled::check_reading`].
pub(crate) fn check_reading<T: Element>(
    num_heads: usize,
    q_len: usize,
    cache: &dyn Slots<T>,
    options: &Options<'_, T>,
) -> Result<Dims> {
    options.chosen_path()?;
    let dims = dims(num_heads, q_len, cache, options, cache.now())?;
    let rules = Rules::new(dims, options, cache.now())?;
    cache.check_reach(&rules.mask)?;
    Ok(dims)
}

/// The body of [`Compiled::check_extend`].
pub(crate) fn check_extend<T: Element>(
    tokens: &NewTokens<'_, T>,
    cache: &mut dyn Slots<T>,
    options: &Options<'_, T>,
) -> Result<Dims> {
    let NewTokens { q, k, v } = *tokens;
    let q_len = cache.check_tokens([k, v])?;
    check_q(q, Some(q_len), cache, options)?;
    plan(q.dim().1, q_len, cache, options)
}

/// The body of [`Compiled::plan`]. The cache plans the tokens and holds what it held.
pub(crate) fn plan<T: Element>(
    num_heads: usize,
    q_len: usize,
    cache: &mut dyn Slots<T>,
    options: &Options<'_, T>,
) -> Result<Dims> {
    options.chosen_path()?;
    // The lengths of queries have to fit before the cache counts them.
    options.chosen_mask().check_queries(cache.shape().batch, q_len)?;
    cache.plan(q_len, options.chosen_mask())?;
    let dims = dims(num_heads, q_len, cache, options, cache.then())?;
    let rules = Rules::new(dims, options, cache.then())?;
    cache.check_places(&rules.mask)?;
    Ok(dims)
}

/// The body of [`Compiled::decode`].
pub(crate) fn decode_checked<T: Element>(
    q: &ArrayRef4<T>,
    cache: &dyn Slots<T>,
    options: &Options<'_, T>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = check_decode(q, cache, options)?;
    if outputs.is_empty() {
        return Ok(());
    }
    if options.chosen_path()? != Path::Tiled {
        let arrays = cache.arrays(None, dims.kv_len)?;
        return on_arrays(q, &arrays, options, cache.now(), outputs, workspace);
    }
    workspace.with_lines(|lines, workspace| {
        let mut rules = Rules::new(dims, options, cache.now())?;
        rules.lay_out(&dims, lines)?;
        let call = Call { dims, q: q.view(), first: 0, rules: &rules, source: cache.source() };
        tiled(&call, options.query_tile, outputs, workspace)
    })
}

/// The body of [`Compiled::extend`].
pub(crate) fn extend_checked<T: Element>(
    tokens: &NewTokens<'_, T>,
    cache: &mut dyn Slots<T>,
    options: &Options<'_, T>,
    mut outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = check_extend(tokens, cache, options)?;
    let (NewTokens { q, k, v }, q_len) = (*tokens, dims.q_len);
    if options.chosen_path()? != Path::Tiled && !outputs.is_empty() {
        let arrays = cache.arrays(Some([k, v]), dims.kv_len)?;
        on_arrays(q, &arrays, options, cache.then(), outputs, workspace)?;
        cache.write([k, v], 0..q_len);
        return Ok(());
    }
    // Without outputs there is nothing to answer between two pieces, however many tokens a broadcast view claims to have.
    let step = if outputs.is_empty() { usize::MAX } else { cache.step().max(1) };
    let answer = |cache: &dyn Slots<T>, rows: Range<usize>, outputs: Outputs<'_, T>, workspace: &mut Workspace<T>| {
        workspace.with_lines(|lines, workspace| {
            let mut rules = Rules::new(dims, options, cache.then())?;
            rules.lay_out(&dims, lines)?;
            let q = q.slice(s![.., .., rows.clone(), ..]);
            let (dims, first) = (Dims { q_len: rows.len(), ..dims }, rows.start);
            let call = Call { dims, q, first, rules: &rules, source: cache.source() };
            match rows.len() == q_len {
                true => tiled(&call, options.query_tile, outputs, workspace),
                // Later pieces need no more memory than the first one, which can still be taken back.
                false => forward::forward(&call, options.query_tile, outputs, workspace),
            }
        })
    };
    let mut first = 0;
    while first < q_len {
        let rows = first..q_len.min(first.saturating_add(step));
        cache.write([k, v], rows.clone());
        if !outputs.is_empty() {
            let piece = Outputs {
                context: outputs.context.slice_mut(s![.., .., rows.clone(), ..]),
                lse: outputs.lse.as_mut().map(|lse| lse.slice_mut(s![.., .., rows.clone()])),
                weights: None,
            };
            if let Err(error) = answer(&*cache, rows.clone(), piece, workspace) {
                cache.take_back(q_len, options.chosen_mask());
                return Err(error);
            }
        }
        first = rows.end;
    }
    Ok(())
}

/// A path that reads arrays.
fn on_arrays<T: Element>(
    q: &ArrayRef4<T>,
    [k, v]: &[Array4<T>; 2],
    options: &Options<'_, T>,
    held: Held<'_>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    workspace.with_lines(|lines, workspace| {
        let mut problem = Problem::with_held([q, k, v], options, held)?;
        problem.rules.lay_out(&problem.dims, lines)?;
        run(&problem, options, outputs, workspace)
    })
}
