//! What a call of attention can be asked for.

use ndarray::{ArrayRef, ArrayRef1, ArrayRef2, ArrayView1, ArrayView2, ArrayView4, Dimension};

use crate::element::Element;
use crate::error::{Error, Result};
use crate::heads::HeadMap;
use crate::kernels::Level;
use crate::mask::{Mask, rank_2_or_4};
use crate::mha::{Config, Weights};
use crate::position::{Alibi, Buckets};

/// Which implementation runs. All of them agree within rounding.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum Path {
    /// The fastest one that can do what is asked.
    #[default]
    Auto,
    /// Plain loops: the oracle in `f64`.
    Reference,
    /// Product, row softmax, product.
    Dense,
    /// Tiles with online softmax; memory linear in the length. Gives no weights.
    Tiled,
}

/// The options of one call; everything is off until it is named.
///
/// `scale`, `softcap`, `heads`, `sinks`, `alibi`, `relative_bias` and `relative_keys` are for the functional core,
/// [`attention`](crate::attention). A layer has them from its builder or its weights and refuses options that name one.
///
/// ```
/// use multihead::{Mask, Options};
/// let mask = Mask::causal() & Mask::window(255, 0);
/// let options = Options::<f32>::new().mask(&mask).scale(0.125).softcap(50.0);
/// # let _ = options;
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Options<'a, T> {
    pub(crate) mask: Option<&'a Mask>,
    pub(crate) bias: Option<ArrayView4<'a, T>>,
    pub(crate) alibi: Option<&'a Alibi>,
    pub(crate) relative_bias: Option<(Buckets, ArrayView2<'a, T>)>,
    pub(crate) relative_keys: Option<ArrayView2<'a, T>>,
    pub(crate) sinks: Option<ArrayView1<'a, T>>,
    pub(crate) heads: Option<&'a HeadMap>,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    /// Rate and seed.
    pub(crate) dropout: Option<(f64, u64)>,
    pub(crate) path: Path,
    pub(crate) level: Option<Level>,
    pub(crate) query_tile: Option<usize>,
    keep_weights: bool,
    bias_gradient: bool,
    recompute: bool,
}

impl<T> Default for Options<'_, T> {
    fn default() -> Self {
        Self {
            mask: None,
            bias: None,
            alibi: None,
            relative_bias: None,
            relative_keys: None,
            sinks: None,
            heads: None,
            scale: None,
            softcap: None,
            dropout: None,
            path: Path::Auto,
            level: None,
            query_tile: None,
            keep_weights: false,
            bias_gradient: false,
            recompute: false,
        }
    }
}

impl<'a, T: Element> Options<'a, T> {
    /// No mask, no bias, `scale = 1 / sqrt(head_dim)`.
    ///
    /// ```
    /// # use multihead::{attention, ndarray::Array4, Options};
    /// # let q = Array4::<f32>::ones((1, 2, 3, 8));
    /// attention::forward(&q, &q, &q, &Options::new())?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Which keys a query may see.
    ///
    /// ```
    /// use multihead::{Mask, Options};
    /// let causal = Mask::causal();
    /// let options = Options::<f32>::new().mask(&causal);
    /// # let _ = options;
    /// ```
    #[doc(alias = "attn_mask")]
    pub fn mask(mut self, mask: &'a Mask) -> Self {
        self.mask = Some(mask);
        self
    }

    /// Added to the scores after scale and softcap: `[q_len, kv_len]` or `[batch, num_heads, q_len, kv_len]`, an axis
    /// of length 1 is broadcast. -inf hides a pair; any finite value, `f32::MIN` too, is only a number.
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, Options};
    /// let q = Array4::<f32>::zeros((1, 2, 3, 8));
    /// let bias = Array4::from_shape_fn((1, 2, 3, 3), |(_, head, i, j)| if i == j { head as f32 } else { 0.0 });
    /// let attended = attention::forward(&q, &q, &q, &Options::new().bias(&bias)?.weights())?;
    /// let own_and_other = attended.weights.map(|w| w[[0, 1, 0, 0]] / w[[0, 1, 0, 2]]).unwrap();
    /// assert!((own_and_other - 1f32.exp()).abs() < 1e-6);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Rank`] for any other rank.
    pub fn bias<D: Dimension>(mut self, bias: &'a ArrayRef<T, D>) -> Result<Self> {
        self.bias = Some(rank_2_or_4("bias", bias)?);
        Ok(self)
    }

    /// Attention with linear biases: `-slope[h] * |pos(i) - j|` is added to the scores besides any other bias, where
    /// `pos(i)` is the key position that the mask counts from (see [`crate::Mask`]). No array is made.
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, position::Alibi, Options};
    /// let q = Array4::<f32>::zeros((1, 2, 3, 8));
    /// let alibi = Alibi::with_slopes(&[0.5, 0.25]);
    /// let attended = attention::forward(&q, &q, &q, &Options::new().alibi(&alibi).weights())?;
    /// let near_and_far = attended.weights.map(|w| w[[0, 0, 0, 1]] / w[[0, 0, 0, 2]]).unwrap();
    /// assert!((near_and_far - 0.5f32.exp()).abs() < 1e-6);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn alibi(mut self, alibi: &'a Alibi) -> Self {
        self.alibi = Some(alibi);
        self
    }

    /// A learned bias for each bucket of distances and head: `table[bucket(j - pos(i)), h]` is added to the scores
    /// besides any other bias. `table: [buckets, num_heads]`.
    ///
    /// ```
    /// use multihead::{attention, ndarray::{array, Array4}, position::Buckets, Options};
    /// let q = Array4::<f32>::zeros((1, 1, 3, 8));
    /// // The key before, the query's own, the key behind.
    /// let table = array![[0.0], [1.0], [f32::NEG_INFINITY]];
    /// let options = Options::new().relative_bias(Buckets::Clipped { clip: 1 }, &table).weights();
    /// let weights = attention::forward(&q, &q, &q, &options)?.weights.unwrap();
    /// assert_eq!(weights[[0, 0, 0, 0]], 1.0);
    /// assert!((weights[[0, 0, 1, 1]] / weights[[0, 0, 1, 0]] - 1f32.exp()).abs() < 1e-6);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "relative_attention_bias")]
    pub fn relative_bias(mut self, buckets: Buckets, table: &'a ArrayRef2<T>) -> Self {
        self.relative_bias = Some((buckets, table.view()));
        self
    }

    /// A learned key for each distance from `-clip` to `clip`, which a query meets together with the pair's own:
    /// `s = scale * q[i] . (k[j] + r[clamp(j - pos(i))])`, before the soft cap. `keys: [2 clip + 1, head_dim]`, shared by
    /// all heads.
    ///
    /// ```
    /// use multihead::{attention, ndarray::{array, Array4}, Options};
    /// let (q, k) = (Array4::<f32>::ones((1, 1, 2, 1)), Array4::zeros((1, 1, 2, 1)));
    /// let keys = array![[0.0], [1.0], [3.0]]; // before the query, its own, behind it
    /// let options = Options::new().relative_keys(&keys).weights();
    /// let weights = attention::forward(&q, &k, &k, &options)?.weights.unwrap();
    /// assert!((weights[[0, 0, 0, 1]] / weights[[0, 0, 0, 0]] - 2f32.exp()).abs() < 1e-5);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "relative_position_k")]
    pub fn relative_keys(mut self, keys: &'a ArrayRef2<T>) -> Self {
        self.relative_keys = Some(keys.view());
        self
    }

    /// `[num_heads]`: a logit for each query head that enters the softmax's denominator only, neither scaled nor
    /// masked. A sink of 0 is what others call quiet softmax or `add_zero_attn`.
    ///
    /// ```
    /// use multihead::{attention, ndarray::{array, Array4}, Options};
    /// let (q, v) = (Array4::<f32>::zeros((1, 1, 1, 8)), Array4::ones((1, 1, 1, 8)));
    /// let sinks = array![0.0];
    /// let attended = attention::forward(&q, &q, &v, &Options::new().sinks(&sinks))?;
    /// // One key with score 0 shares evenly with the sink.
    /// assert_eq!(attended.context[[0, 0, 0, 0]], 0.5);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "add_zero_attn")]
    #[doc(alias = "quiet_softmax")]
    pub fn sinks(mut self, sinks: &'a ArrayRef1<T>) -> Self {
        self.sinks = Some(sinks.view());
        self
    }

    /// Which KV head each query head reads, where it is not `h / group_size`.
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, HeadMap, Options};
    /// let (q, k) = (Array4::<f32>::zeros((1, 3, 1, 8)), Array4::zeros((1, 2, 1, 8)));
    /// let v = Array4::from_shape_fn((1, 2, 1, 1), |(_, head, _, _)| head as f32);
    /// let map = HeadMap::explicit(&[0, 1, 0], 2)?;
    /// let attended = attention::forward(&q, &k, &v, &Options::new().heads(&map))?;
    /// assert_eq!(attended.context.into_raw_vec_and_offset().0, [0.0, 1.0, 0.0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "enable_gqa")]
    pub fn heads(mut self, heads: &'a HeadMap) -> Self {
        self.heads = Some(heads);
        self
    }

    /// Any finite factor of the products, 0 and negative ones too. The default is `1 / sqrt(head_dim)`.
    ///
    /// ```
    /// # use multihead::Options;
    /// let options = Options::<f32>::new().scale(0.0); // 0 means 0: all visible keys weigh the same
    /// # let _ = options;
    /// ```
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Bounds the scores: `s = softcap * tanh(s / softcap)`. Finite and positive.
    ///
    /// ```
    /// # use multihead::Options;
    /// let options = Options::<f32>::new().softcap(50.0);
    /// # let _ = options;
    /// ```
    #[doc(alias = "logit_cap")]
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// Drops each weight with probability `rate` after the softmax and multiplies the others by `1 / (1 - rate)`. For
    /// training: a call that does not ask for it drops nothing.
    ///
    /// The same `seed` drops the same pairs, so backward needs the one of its forward call, and the next step another
    /// one. What is dropped depends on the seed, the batch entry, the query head, the query and the key, and on nothing
    /// else. Returned weights and lse are those before dropout. `rate` is in 0..=1: 0 is exactly no dropout, 1 gives
    /// zeros.
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, Options};
    /// let x = Array4::<f32>::ones((1, 2, 50, 8));
    /// let half = |seed| attention::forward(&x, &x, &x, &Options::new().dropout(0.5, seed));
    /// let context = half(1)?.context;
    /// assert!((0.8..1.2).contains(&context.mean().unwrap()) && context != x);
    /// assert_eq!(half(1)?.context, context);
    /// assert_ne!(half(2)?.context, context);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "dropout_p")]
    #[doc(alias = "attn_dropout")]
    pub fn dropout(mut self, rate: f64, seed: u64) -> Self {
        self.dropout = Some((rate, seed));
        self
    }

    /// Asks backward for the gradient of the bias too; forward does not look at it. See
    /// [`Gradients::d_bias`](crate::Gradients::d_bias).
    ///
    /// ```
    /// # use multihead::Options;
    /// # let bias = multihead::ndarray::Array2::<f32>::zeros((3, 3));
    /// let options = Options::new().bias(&bias)?.bias_gradient();
    /// # let _ = options;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn bias_gradient(mut self) -> Self {
        self.bias_gradient = true;
        self
    }

    /// Lets a layer's forward keep the lse and nothing else for backward, which computes queries, keys, values and context
    /// again: the same gradients to the bit for the time of another forward. See [`Tape`](crate::Tape) for the memory.
    /// Everything but [`MultiHeadAttention::forward_train`](crate::MultiHeadAttention::forward_train) takes no notice.
    ///
    /// ```
    /// # use multihead::Options;
    /// let options = Options::<f32>::new().recompute();
    /// # let _ = options;
    /// ```
    #[doc(alias = "gradient_checkpointing")]
    pub fn recompute(mut self) -> Self {
        self.recompute = true;
        self
    }

    /// Returns the softmax probabilities of each head too. They take `q_len * kv_len` numbers a head, and the call takes
    /// [`Path::Dense`]: its output agrees with that of a call without weights within rounding, not bit for bit. Calls that
    /// fill an array of the caller's and return nothing, and those that return a tape, refuse to be asked for weights.
    ///
    /// ```
    /// use multihead::{attention, ndarray::Array4, Options};
    /// let q = Array4::<f32>::ones((1, 2, 3, 8));
    /// let attended = attention::forward(&q, &q, &q, &Options::new().weights())?;
    /// assert_eq!(attended.weights.map(|w| w.dim()), Some((1, 2, 3, 3)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "need_weights")]
    pub fn weights(mut self) -> Self {
        self.keep_weights = true;
        self
    }

    /// Which implementation runs.
    ///
    /// ```
    /// use multihead::{Options, Path};
    /// let options = Options::<f64>::new().path(Path::Reference);
    /// # let _ = options;
    /// ```
    pub fn path(mut self, path: Path) -> Self {
        self.path = path;
        self
    }

    /// The instruction set of the tiled path and of a layer's projections; [`Level::best`] unless given. A level that
    /// this CPU cannot run is an error of the call.
    ///
    /// ```
    /// use multihead::{Level, Options};
    /// let options = Options::<f32>::new().level(Level::Portable);
    /// # let _ = options;
    /// ```
    pub fn level(mut self, level: Level) -> Self {
        self.level = Some(level);
        self
    }

    /// Query positions of a work item of the tiled path, at least 1, for measuring. It moves time and scratch, and no bit of the
    /// result but for the gradients of keys and values that several query heads read: these are summed tile by tile.
    ///
    /// ```
    /// # use multihead::Options;
    /// let options = Options::<f32>::new().query_tile(96);
    /// # let _ = options;
    /// ```
    pub fn query_tile(mut self, query_tile: usize) -> Self {
        self.query_tile = Some(query_tile);
        self
    }

    /// What the call asks for (mask, bias, path, weights) under the rules of a layer.
    ///
    /// # Errors
    /// [`Error::Value`] for a rule in the options of the call: the layer has its own, and two could contradict each other.
    pub(crate) fn with_layer<'b>(&'b self, config: &'b Config, weights: &'b Weights<T>) -> Result<Options<'b, T>> {
        self.check_no_rules()?;
        Ok(Options {
            mask: self.mask,
            bias: self.bias.as_ref().map(|bias| bias.view()),
            alibi: config.alibi.as_ref(),
            relative_bias: config.relative_bias.zip(weights.relative_bias.as_ref().map(|table| table.view())),
            relative_keys: weights.relative_keys.as_ref().map(|keys| keys.view()),
            sinks: weights.sinks.as_ref().map(|sinks| sinks.view()),
            heads: Some(&config.heads),
            scale: config.scale,
            softcap: config.softcap,
            dropout: self.dropout,
            path: self.path,
            level: self.level,
            query_tile: self.query_tile,
            keep_weights: self.keep_weights,
            bias_gradient: self.bias_gradient,
            recompute: self.recompute,
        })
    }

    /// Refuses what a layer has as its own, the layer's value as well.
    fn check_no_rules(&self) -> Result<()> {
        let number = |number: Option<f64>| number.map(|number| number.to_string());
        let array = |is_there: bool| is_there.then(|| "an array".to_string());
        let rules = [
            ("scale", number(self.scale)),
            ("softcap", number(self.softcap)),
            ("heads", self.heads.map(|_| "a map".to_string())),
            ("sinks", array(self.sinks.is_some())),
            ("alibi", self.alibi.map(|_| "slopes".to_string())),
            ("relative_bias", array(self.relative_bias.is_some())),
            ("relative_keys", array(self.relative_keys.is_some())),
        ];
        match rules.into_iter().find_map(|(argument, got)| Some((argument, got?))) {
            Some((argument, got)) => {
                Err(Error::value(argument, "none in a call of a layer, which has it from its builder or weights", got))
            }
            None => Ok(()),
        }
    }

    /// Refuses weights in a call that does not return them: the call takes the memory and time of [`Path::Dense`] for
    /// nothing. `returned_by` says which calls do.
    ///
    /// # Errors
    /// [`Error::Value`] if the options ask for weights.
    pub(crate) fn check_no_weights(&self, returned_by: &'static str) -> Result<()> {
        match self.keep_weights {
            true => Err(Error::value("weights", returned_by, "weights() in the options")),
            false => Ok(()),
        }
    }

    /// The path that runs.
    ///
    /// # Errors
    /// [`Error::Value`] if weights are asked of a path that has none.
    pub(crate) fn chosen_path(&self) -> Result<Path> {
        match (self.path, self.keep_weights) {
            (Path::Tiled, true) => Err(Error::value("path", "Dense, Reference or Auto with weights", "Tiled")),
            (Path::Auto, true) => Ok(Path::Dense),
            (Path::Auto, false) => Ok(Path::Tiled),
            (path, _) => Ok(path),
        }
    }

    /// The mask, one without rules if none was given.
    pub(crate) fn chosen_mask(&self) -> &'a Mask {
        static NONE: Mask = Mask::NONE;
        self.mask.unwrap_or(&NONE)
    }

    pub(crate) fn wants_bias_gradient(&self) -> bool {
        self.bias_gradient
    }

    pub(crate) fn recomputes(&self) -> bool {
        self.recompute
    }

    pub(crate) fn keeps_weights(&self) -> bool {
        self.keep_weights
    }
}
