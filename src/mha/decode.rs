//! The layer with a cache: prefill, chunks of it, steps, and cross-attention over what has been cached.
//!
//! ```text
//! decode(x, cache):  K, V = x W_K, x W_V -> cache;   output = concat_h(attention(x W_Q, cache)) W_O
//! ```

use ndarray::{Array, Array3, ArrayRef, ArrayRef3, ArrayView3, Axis};
use std::sync::LazyLock;

use super::forward::LayerOutputs;
use super::{Config, Inputs, LayerOutput, MultiHeadAttention, Sequence};
use crate::attention::{Dims, NewTokens, Options, Workspace, lse_and_weights};
use crate::cache::{CacheShape, KvCache, Storage};
use crate::compiled::Compiled;
use crate::element::{Element, zeros};
use crate::error::{Result, check_shape};
use crate::mask::Mask;
use crate::position::Positions;

/// Made once, so that steps allocate nothing.
pub(crate) static CAUSAL: LazyLock<Mask> = LazyLock::new(Mask::causal);

impl<T: Element> MultiHeadAttention<T> {
    /// An empty cache that fits the layer, for `capacity` tokens in each of `batch` entries.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(2).build()?;
    /// let cache = mha.cache(1, 1000)?;
    /// assert_eq!(cache.shape().num_kv_heads, 2);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] if there is no memory for it.
    pub fn cache(&self, batch: usize, capacity: usize) -> Result<KvCache<T>> {
        KvCache::new(self.cache_shape(batch, capacity))
    }

    /// The shape of a cache that fits the layer: for rings, and for other storage than `T`.
    ///
    /// ```
    /// use multihead::{KvCache, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(64, 8).build()?;
    /// let ring = KvCache::<f32>::ring(mha.cache_shape(1, 128))?;
    /// assert_eq!(ring.window(), Some(128));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn cache_shape(&self, batch: usize, capacity: usize) -> CacheShape {
        let Config { heads, head_dim, value_dim, .. } = self.config();
        let num_kv_heads = heads.num_kv_heads();
        CacheShape { batch, num_kv_heads, capacity, head_dim: *head_dim, value_dim: *value_dim }
    }

    /// Causal self-attention of new tokens over themselves and what the cache holds; their keys and values are appended.
    /// One call takes a whole prompt, a chunk of it or a single token. `x: [batch, len, d_model]` or `[len, d_model]`; the
    /// output has the same shape.
    ///
    /// ```
    /// use multihead::{ndarray::{s, Array2}, Mask, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f64>::builder(16, 4).build()?;
    /// let x = Array2::from_shape_fn((6, 16), |(i, j)| (i * j % 5) as f64);
    /// let mut cache = mha.cache(1, 6)?;
    /// mha.decode(&x.slice(s![..5, ..]), &mut cache)?; // the prompt
    /// let last = mha.decode(&x.slice(s![5.., ..]), &mut cache)?; // a step
    /// let full = mha.forward(&x, &Mask::causal())?;
    /// assert!((&last - &full.slice(s![5.., ..])).iter().all(|gap| gap.abs() < 1e-12));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::forward`]; [`crate::Error::Shape`] for a cache of another layer,
    /// [`crate::Error::CacheFull`] if it has no room. The cache is as it was then.
    pub fn decode<D: Sequence, S: Storage<Element = T>>(
        &self,
        x: &ArrayRef<T, D>,
        cache: &mut KvCache<S>,
    ) -> Result<Array<T, D>> {
        let decoded = self.decode_with(&Inputs::new(x), cache, &Options::new().mask(&CAUSAL))?;
        Ok(D::unbatched(decoded.output))
    }

    /// [`MultiHeadAttention::decode`] into an array of the caller's, which has the shape of `x` and any strides. With the
    /// same workspace, calls after the first allocate nothing, as long as they need no more memory.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, MultiHeadAttention, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let (x, mut y) = (Array2::ones((1, 16)), Array2::zeros((1, 16)));
    /// let (mut cache, mut workspace) = (mha.cache(1, 100)?, Workspace::new());
    /// for _ in 0..3 {
    ///     mha.decode_into(&x, &mut cache, &mut y, &mut workspace)?;
    /// }
    /// assert_eq!(cache.len(), 3);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::decode`], and [`crate::Error::Shape`] for an output of other lengths. Nothing is written
    /// then.
    pub fn decode_into<D: Sequence, S: Storage<Element = T>>(
        &self,
        x: &ArrayRef<T, D>,
        cache: &mut KvCache<S>,
        output: &mut ArrayRef<T, D>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        let options = Options::new().mask(&CAUSAL);
        self.decode_with_into(&Inputs::new(x), cache, &options, &mut D::batched_mut(output), workspace)
    }

    /// [`MultiHeadAttention::decode`] with everything that a call can ask for: a mask instead of the causal one, bias,
    /// weights, path, other keys and values than the queries' own, positions for RoPE other than those behind what the
    /// cache holds. `kv_len` in shapes counts the tokens of the cache and the new ones. The output has a batch axis.
    ///
    /// Where entries have different numbers of new tokens, [`Mask::query_lengths`] says how many; the rest is padding and
    /// does not enter the cache.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, Mask, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let (mut cache, prompts) = (mha.cache(2, 100)?, Array3::ones((2, 7, 16)));
    /// let mask = Mask::causal() & Mask::window(3, 0) & Mask::query_lengths(&[7, 4]);
    /// mha.decode_with(&Inputs::new(&prompts), &mut cache, &Options::new().mask(&mask))?;
    /// assert_eq!(cache.lengths(), [7, 4]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::decode`] and, for what the options ask, as [`crate::attention::extend`];
    /// [`crate::Error::Value`] if they name a rule of the layer, see [`MultiHeadAttention::attend`].
    pub fn decode_with<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &mut KvCache<S>,
        options: &Options<'_, T>,
    ) -> Result<LayerOutput<T>> {
        let dims = self.check_decode(inputs, cache, options)?;
        self.layer_output(inputs, dims, options, |outputs| {
            self.run_decode(inputs, cache, options, outputs, &mut Workspace::new())
        })
    }

    /// [`MultiHeadAttention::decode_with`] into an array of the caller's: `output: [batch, q_len, d_model]`, any strides.
    ///
    /// ```
    /// use multihead::{ndarray::Array3, Inputs, Mask, MultiHeadAttention, Options, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let (x, mut y) = (Array3::ones((1, 1, 16)), Array3::zeros((1, 1, 16)));
    /// let (mut cache, mut workspace, window) = (mha.cache(1, 100)?, Workspace::new(), Mask::last_n(8));
    /// mha.decode_with_into(&Inputs::new(&x), &mut cache, &Options::new().mask(&window), &mut y, &mut workspace)?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::decode_with`], [`crate::Error::Shape`] for an output of other lengths, and
    /// [`crate::Error::Value`] if the options ask for weights, which [`MultiHeadAttention::decode_with`] returns. Nothing
    /// is written then.
    pub fn decode_with_into<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &mut KvCache<S>,
        options: &Options<'_, T>,
        output: &mut ArrayRef3<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        options.check_no_weights("none asked of decode_with_into; decode_with returns them")?;
        self.check_decode(inputs, cache, options)?;
        check_shape("output", "[batch, q_len, d_model]", self.shape_of(inputs), output.shape())?;
        self.run_decode(inputs, cache, options, LayerOutputs::only(output), workspace)
    }

    /// Projects the keys and values of a sequence and appends them: `context: [batch, kv_len, k_dim]` or
    /// `[kv_len, k_dim]`. For cross-attention, which reads them with [`MultiHeadAttention::decode_cross`] as often as it
    /// likes.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Inputs, Mask, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).k_dim(24).build()?;
    /// let (encoded, x) = (Array2::ones((9, 24)), Array2::ones((1, 16)));
    /// let mut cache = mha.cache(1, 9)?;
    /// mha.cache_context(&encoded, &mut cache)?;
    /// let decoded = mha.decode_cross(&Inputs::new(&x), &cache, &Options::new())?;
    /// let full = mha.forward_cross(&x, &encoded, &Mask::none())?;
    /// assert!((&decoded.output - &full).iter().all(|gap| gap.abs() < 1e-5));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::decode`]. The cache is as it was then.
    pub fn cache_context<D: Sequence, S: Storage<Element = T>>(
        &self,
        context: &ArrayRef<T, D>,
        cache: &mut KvCache<S>,
    ) -> Result<()> {
        let context = D::batched(context);
        self.cache_key_value([context, context], cache)
    }

    /// As `cache_context`, of keys and values from two sequences.
    pub(crate) fn cache_key_value<S: Storage<Element = T>>(
        &self,
        [key, value]: [ArrayView3<'_, T>; 2],
        cache: &mut KvCache<S>,
    ) -> Result<()> {
        let nobody = zeros("query", "[batch, q_len, d_model]", (key.len_of(Axis(0)), 0, self.config.d_model))?;
        let lengths = cache.lengths().to_vec();
        let mut inputs = Inputs::new(&nobody);
        (inputs.key, inputs.value, inputs.key_positions) = (key, value, Some(Positions::after(&lengths)));
        self.check_cache(&inputs, cache)?;
        let options = Options::new();
        self.check(&inputs, &options)?;
        let mut nothing = nobody.clone();
        let outputs = LayerOutputs::only(&mut nothing);
        self.run(&inputs, &options, outputs, &mut Workspace::new(), |[_, k, v], _, _, _| cache.append(k, v))
    }

    /// Attention of the queries of `inputs` over what the cache holds; nothing is appended, and the keys and values of
    /// `inputs` are not looked at. The output has a batch axis.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Inputs, MultiHeadAttention, Options};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let mut cache = mha.cache(1, 9)?;
    /// mha.cache_context(&Array2::ones((9, 16)), &mut cache)?;
    /// let x = Array2::ones((2, 16));
    /// let decoded = mha.decode_cross(&Inputs::new(&x), &cache, &Options::new().weights())?;
    /// assert_eq!(decoded.weights.unwrap().shape(), [1, 4, 2, 9]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::decode_with`].
    pub fn decode_cross<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &KvCache<S>,
        options: &Options<'_, T>,
    ) -> Result<LayerOutput<T>> {
        let inputs = self.queries_of(inputs)?;
        let dims = self.check_cross(&inputs, cache, options)?;
        self.layer_output(&inputs, dims, options, |outputs| {
            self.run_cross(&inputs, cache, options, outputs, &mut Workspace::new())
        })
    }

    /// [`MultiHeadAttention::decode_cross`] into an array of the caller's: `output: [batch, q_len, d_model]`, any strides.
    /// With the same workspace, calls after the first allocate nothing.
    ///
    /// ```
    /// use multihead::{ndarray::{Array2, Array3}, Inputs, MultiHeadAttention, Options, Workspace};
    /// let mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let mut cache = mha.cache(1, 9)?;
    /// mha.cache_context(&Array2::ones((9, 16)), &mut cache)?;
    /// let (x, mut y) = (Array3::ones((1, 1, 16)), Array3::zeros((1, 1, 16)));
    /// mha.decode_cross_into(&Inputs::new(&x), &cache, &Options::new(), &mut y, &mut Workspace::new())?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`MultiHeadAttention::decode_cross`], [`crate::Error::Shape`] for an output of other lengths, and
    /// [`crate::Error::Value`] if the options ask for weights, which [`MultiHeadAttention::decode_cross`] returns. Nothing
    /// is written then.
    pub fn decode_cross_into<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &KvCache<S>,
        options: &Options<'_, T>,
        output: &mut ArrayRef3<T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        options.check_no_weights("none asked of decode_cross_into; decode_cross returns them")?;
        let inputs = self.queries_of(inputs)?;
        self.check_cross(&inputs, cache, options)?;
        check_shape("output", "[batch, q_len, d_model]", self.shape_of(&inputs), output.shape())?;
        self.run_cross(&inputs, cache, options, LayerOutputs::only(output), workspace)
    }

    /// The queries and no keys.
    fn queries_of<'a>(&self, inputs: &Inputs<'a, T>) -> Result<Inputs<'a, T>> {
        let batch = inputs.query.len_of(Axis(0));
        let none = |width| {
            let view = ArrayView3::from_shape((batch, 0, width), &[]);
            view.map_err(|error| crate::Error::value("query", "a batch that can be addressed", error))
        };
        let (key, value) = (none(self.config.k_dim)?, none(self.config.v_dim)?);
        Ok(Inputs { key, value, key_positions: Some(Positions::default()), ..inputs.clone() })
    }

    /// The shape of the output.
    fn shape_of(&self, inputs: &Inputs<'_, T>) -> [Option<usize>; 3] {
        let (batch, q_len, _) = inputs.query.dim();
        [batch, q_len, self.config.d_model].map(Some)
    }

    /// Checks that the cache is one for this layer and batch.
    fn check_cache<S: Storage<Element = T>>(&self, inputs: &Inputs<'_, T>, cache: &KvCache<S>) -> Result<()> {
        let CacheShape { batch, num_kv_heads, capacity, head_dim, value_dim } = cache.shape();
        let CacheShape { num_kv_heads: heads, head_dim: keys, value_dim: values, .. } =
            self.cache_shape(batch, capacity);
        let expected = [Some(inputs.query.len_of(Axis(0))), Some(heads), None, Some(keys), Some(values)];
        let got = [batch, num_kv_heads, capacity, head_dim, value_dim];
        check_shape("cache", "[batch, num_kv_heads, capacity, head_dim, value_dim]", expected, &got)
    }

    /// Checks all that a step can get wrong, before any work.
    pub(crate) fn check_decode<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &mut KvCache<S>,
        options: &Options<'_, T>,
    ) -> Result<Dims> {
        self.check_shapes(inputs)?;
        let q_len = inputs.query.len_of(Axis(1));
        // Every new token has a key.
        check_shape("key", "[batch, q_len, k_dim]", [None, Some(q_len), None], inputs.key.shape())?;
        self.check_cache(inputs, cache)?;
        T::plan(self.config.heads.num_heads(), q_len, cache, &self.options(options)?)
    }

    /// As `check_decode`, for queries that read what the cache holds.
    pub(crate) fn check_reads<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &KvCache<S>,
        options: &Options<'_, T>,
    ) -> Result<()> {
        self.check_cross(&self.queries_of(inputs)?, cache, options)?;
        Ok(())
    }

    fn check_cross<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &KvCache<S>,
        options: &Options<'_, T>,
    ) -> Result<Dims> {
        self.check_shapes(inputs)?;
        self.check_cache(inputs, cache)?;
        let q_len = inputs.query.len_of(Axis(1));
        T::check_reading(self.config.heads.num_heads(), q_len, cache, &self.options(options)?)
    }

    fn run_decode<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &mut KvCache<S>,
        options: &Options<'_, T>,
        outputs: LayerOutputs<'_, T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        let mut lengths = std::mem::take(&mut workspace.lengths);
        lengths.clear();
        lengths.extend_from_slice(cache.lengths());
        self.run(&inputs.after(&lengths), options, outputs, workspace, |[q, k, v], options, outputs, workspace| {
            <T as Compiled>::extend(&NewTokens { q, k, v }, cache, options, outputs, workspace)
        })?;
        workspace.lengths = lengths;
        Ok(())
    }

    fn run_cross<S: Storage<Element = T>>(
        &self,
        inputs: &Inputs<'_, T>,
        cache: &KvCache<S>,
        options: &Options<'_, T>,
        outputs: LayerOutputs<'_, T>,
        workspace: &mut Workspace<T>,
    ) -> Result<()> {
        self.run(inputs, options, outputs, workspace, |[q, _, _], options, outputs, workspace| {
            <T as Compiled>::decode(q, cache, options, outputs, workspace)
        })
    }

    /// Makes the arrays of an answer and fills them.
    fn layer_output(
        &self,
        inputs: &Inputs<'_, T>,
        dims: Dims,
        options: &Options<'_, T>,
        fill: impl FnOnce(LayerOutputs<'_, T>) -> Result<()>,
    ) -> Result<LayerOutput<T>> {
        let (batch, q_len, d_model) = inputs.query.dim();
        let mut output: Array3<T> = zeros("output", "[batch, q_len, d_model]", (batch, q_len, d_model))?;
        let (mut lse, mut weights) = lse_and_weights(dims.scores(), options)?;
        fill(LayerOutputs {
            output: output.view_mut(),
            lse: Some(lse.view_mut()),
            weights: weights.as_mut().map(|weights| weights.view_mut()),
        })?;
        Ok(LayerOutput { output, lse, weights })
    }
}
