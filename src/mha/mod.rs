//! The layer: multi-head attention that owns its projections.

mod backward;
mod builder;
mod decode;
mod forward;
mod heads;
mod init;
mod positions;
mod surgery;
mod train;
mod weights;

pub use backward::LayerGradients;
pub(crate) use backward::LayerGradientsMut;
pub use builder::{Builder, Projection};
pub(crate) use decode::CAUSAL;
pub use forward::{Inputs, LayerOutput, Sequence};
pub use init::Init;
pub(crate) use train::TapeRef;
pub use train::{Recording, Tape};
pub use weights::Weights;

use ndarray::{Array2, ArrayViewD, ArrayViewMutD};

use crate::element::Element;
use crate::error::Result;
use crate::heads::HeadMap;
use crate::position::{Alibi, Buckets, Rope};
use crate::prepack::Packable;

/// The sizes and rules of a layer, and which arrays its weights have, without the weights.
///
/// With the feature `serde` it can be written to a file and read from one. Reading takes what the builder takes: `d_model`
/// and `heads` have to be there, the others have the builder's defaults, and what does not fit together is refused.
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "builder::Told", try_from = "builder::Told"))]
#[non_exhaustive]
pub struct Config {
    /// Width of queries and output.
    #[doc(alias = "embed_dim")]
    #[doc(alias = "hidden_size")]
    pub d_model: usize,
    /// Which KV head each query head reads; holds both head counts.
    pub heads: HeadMap,
    /// Width of a query or key head.
    #[doc(alias = "d_k")]
    pub head_dim: usize,
    /// Width of a value head.
    #[doc(alias = "d_v")]
    pub value_dim: usize,
    /// Width of the keys' input.
    #[doc(alias = "kdim")]
    pub k_dim: usize,
    /// Width of the values' input.
    #[doc(alias = "vdim")]
    pub v_dim: usize,
    /// The projections that have a bias, in the order of [`Projection`]'s variants.
    pub biases: Vec<Projection>,
    /// Whether each query head has a sink, see [`Weights::sinks`].
    pub sinks: bool,
    /// Factor of the scores; `None` is `1 / sqrt(head_dim)`.
    pub scale: Option<f64>,
    /// Bound of the scores, see [`crate::Options::softcap`].
    pub softcap: Option<f64>,
    /// Whether query heads have an RMSNorm, see [`Weights::q_norm`].
    pub q_norm: bool,
    /// Whether key heads have an RMSNorm.
    pub k_norm: bool,
    /// What the RMSNorm of queries and keys adds to the mean of the squares, where there is one.
    pub qk_norm_eps: f64,
    /// Rotary positions of queries and keys.
    pub rope: Option<Rope>,
    /// A bias that falls with the distance, see [`crate::Options::alibi`].
    pub alibi: Option<Alibi>,
    /// What the rows of [`Weights::relative_bias`] stand for, where there is such a table.
    pub relative_bias: Option<Buckets>,
    /// The distance, either way, from which on all share a key, where there is a table of keys for distances: see
    /// [`Weights::relative_keys`].
    pub relative_keys: Option<usize>,
}

impl Config {
    /// Starts a layer of these sizes and rules, whose weights have the same arrays.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f64>::builder(64, 8).num_kv_heads(2).softcap(50.0).bias().build()?;
    /// let other = mha.config().builder::<f32>().seed(1).build()?;
    /// assert_eq!(other.config(), mha.config());
    /// assert_eq!(other.weights().parameters(), mha.weights().parameters());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn builder<T: Element>(&self) -> Builder<T> {
        Builder::told(self.clone().into())
    }

    /// The same sizes and rules, with the arrays that these weights have.
    fn describing<T>(self, weights: &Weights<T>) -> Self {
        let Weights { b_q, b_k, b_v, b_o, sinks, q_norm, k_norm, relative_keys, .. } = weights;
        let biases = Projection::ALL.into_iter().zip([b_q, b_k, b_v, b_o]);
        Self {
            biases: biases.filter(|(_, bias)| bias.is_some()).map(|(projection, _)| projection).collect(),
            sinks: sinks.is_some(),
            q_norm: q_norm.is_some(),
            k_norm: k_norm.is_some(),
            relative_keys: relative_keys.as_ref().map(|keys| keys.nrows() / 2),
            ..self
        }
    }

    /// `[in, out]` of w_q, w_k, w_v and w_o.
    pub(crate) fn shapes(&self) -> [(usize, usize); 4] {
        let (heads, kv_heads) = (self.heads.num_heads(), self.heads.num_kv_heads());
        [
            (self.d_model, heads.saturating_mul(self.head_dim)),
            (self.k_dim, kv_heads.saturating_mul(self.head_dim)),
            (self.v_dim, kv_heads.saturating_mul(self.value_dim)),
            (heads.saturating_mul(self.value_dim), self.d_model),
        ]
    }
}

/// Multi-head, grouped-query or multi-query attention with its projections W_Q, W_K, W_V and W_O.
///
/// ```text
/// Q = query W_Q + b_Q     K = key W_K + b_K     V = value W_V + b_V
/// Q_h = norm(Q_h)         K_g = norm(K_g)       with Builder::qk_norm, each head by itself
/// Q_h = turn(Q_h)         K_g = turn(K_g)       with Builder::rope, by the positions of the tokens
/// output = concat_h(attention(Q_h, K_g, V_g)) W_O + b_O        g the KV head that query head h reads
/// ```
///
/// (Vaswani et al. 2017, section 3.2.2, <https://arxiv.org/abs/1706.03762>.) The parts follow each other in this order, so a
/// cache keeps keys that are normalised and turned. [`Builder::qk_norm`] says what the norm computes (Zhang and Sennrich
/// 2019, <https://arxiv.org/abs/1910.07467>), [`Rope`] how heads turn, and the module [`attention`](crate::attention) what
/// follows. Multi-query and grouped-query attention are the same layer with fewer KV heads. Heads are split and merged by
/// strides, never by copying.
///
/// ```
/// use multihead::{ndarray::Array3, Mask, MultiHeadAttention};
/// let mha = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(2).build()?;
/// let x = Array3::ones((1, 10, 64));
/// let y = mha.forward(&x, &Mask::causal())?;
/// assert_eq!(y.shape(), [1, 10, 64]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[doc(alias = "MultiheadAttention")]
#[doc(alias = "MultiQueryAttention")]
#[doc(alias = "GroupedQueryAttention")]
#[derive(Debug, Clone, PartialEq)]
pub struct MultiHeadAttention<T> {
    config: Config,
    weights: Packable<Weights<T>, T>,
}

impl<T: Element> MultiHeadAttention<T> {
    /// Starts a layer of `num_heads` heads of width `d_model / num_heads`, everything else being optional.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f64>::builder(8, 2).num_kv_heads(1).build()?;
    /// assert_eq!(mha.config().head_dim, 4);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn builder(d_model: usize, num_heads: usize) -> Builder<T> {
        Builder::new(d_model, num_heads)
    }

    /// The sizes and rules of the layer.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert_eq!(mha.config().heads.num_heads(), 2);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// All weights, biases and sinks.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert!(mha.weights().b_q.is_none());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn weights(&self) -> &Weights<T> {
        &self.weights
    }

    pub(crate) fn weights_mut(&mut self) -> &mut Weights<T> {
        self.weights.edit()
    }

    /// Gives the weights away.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert_eq!(mha.into_weights().w_q.shape(), [8, 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn into_weights(self) -> Weights<T> {
        self.weights.into_weights()
    }

    /// Replaces all weights, biases and sinks. They may have other biases, sinks, norms and keys for distances than before;
    /// the configuration says so then.
    ///
    /// ```
    /// # use multihead::{MultiHeadAttention, Error};
    /// let mut mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// let mut weights = mha.weights().clone();
    /// weights.w_o.fill(0.0);
    /// mha.set_weights(weights)?;
    /// # Ok::<(), Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Shape`] names the array that does not fit; [`crate::Error::Value`] says that a table of relative
    /// biases is missing or is there without buckets in the layer, or that relative keys have an even number of rows. The
    /// layer is unchanged then.
    pub fn set_weights(&mut self, weights: Weights<T>) -> Result<()> {
        weights.check(&self.config)?;
        self.config = self.config.clone().describing(&weights);
        *self.weights.edit() = weights;
        Ok(())
    }

    /// Copies the four projections into the order in which products read them, for many calls with the same weights.
    ///
    /// Without it each call does that for itself, or reads the rows where they are, if it has only a few tokens. A call
    /// with 1 to 16 tokens takes 0.7 to 0.8 of the time, one with 64 about 0.9, one with hundreds 0.95 to 1 (d_model 1024,
    /// two threads of a Zen 3); packing takes as long as a few calls. The copy takes as much memory again as the matrices,
    /// which stay readable, or two and a half times as much if they are `f32` and the CPU has a matrix unit
    /// ([`crate::Level::Amx`]: many tokens take 0.7 to 0.95 of the time then).
    ///
    /// Outputs have the bits that they have with weights that lie in memory as `[in, out]`. Those that lie there as
    /// `[out, in]` (from most files, see `Builder::load`) give calls of up to 24 tokens other roundings without a copy.
    ///
    /// [`MultiHeadAttention::set_weights`] and [`MultiHeadAttention::parameters_mut`] drop the copy, so it pays in between
    /// if there are many calls; `forward_train` reads it too. A clone shares the copy, and `==` does not ask for one;
    /// what [`MultiHeadAttention::prune_heads`] and the like make has none.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Mask, MultiHeadAttention};
    /// let mut mha = MultiHeadAttention::<f32>::builder(16, 4).build()?;
    /// let before = mha.forward(&Array2::ones((5, 16)), &Mask::none())?;
    /// mha.prepack()?;
    /// assert_eq!(mha.forward(&Array2::ones((5, 16)), &Mask::none())?, before);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] if there is no memory for the copy; the layer works without it then.
    #[doc(alias = "prepack_weights")]
    pub fn prepack(&mut self) -> Result<()> {
        self.weights.prepack()
    }

    /// Whether [`MultiHeadAttention::prepack`] was called since the weights were changed.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mut mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// mha.prepack()?;
    /// assert!(mha.is_prepacked());
    /// let same = mha.weights().clone();
    /// mha.set_weights(same)?;
    /// assert!(!mha.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn is_prepacked(&self) -> bool {
        self.weights.is_prepacked()
    }

    /// All weights, biases and sinks, each with its gradient and by the name of its field, for an optimiser. A copy by
    /// [`MultiHeadAttention::prepack`] is dropped.
    ///
    /// SGD is `w.scaled_add(-rate, &d_w)`. This is Adam (Kingma and Ba 2015, <https://arxiv.org/abs/1412.6980>):
    ///
    /// ```
    /// use multihead::{ndarray::{Array3, Zip}, Inputs, MultiHeadAttention, Options, Weights};
    ///
    /// struct Adam {
    ///     rate: f32,
    ///     step: i32,
    ///     mean: Weights<f32>,
    ///     square: Weights<f32>,
    /// }
    ///
    /// impl Adam {
    ///     fn update(&mut self, mha: &mut MultiHeadAttention<f32>, d: &Weights<f32>) -> multihead::Result<()> {
    ///         self.step += 1;
    ///         let unbias = |beta: f32| 1.0 - beta.powi(self.step);
    ///         let (rate, floor) = (self.rate * unbias(0.999).sqrt() / unbias(0.9), 1e-8);
    ///         let averages = self.mean.iter_mut().zip(self.square.iter_mut());
    ///         for ((_, w, d_w), ((_, mean), (_, square))) in mha.parameters_mut(d)?.zip(averages) {
    ///             Zip::from(w).and(d_w).and(mean).and(square).for_each(|w, &d_w, mean, square| {
    ///                 *mean += 0.1 * (d_w - *mean);
    ///                 *square += 0.001 * (d_w * d_w - *square);
    ///                 *w -= rate * *mean / (square.sqrt() + floor);
    ///             });
    ///         }
    ///         Ok(())
    ///     }
    /// }
    ///
    /// let mut mha = MultiHeadAttention::builder(16, 4).bias().build()?;
    /// let zeros = mha.weights().zeros_like();
    /// let mut adam = Adam { rate: 0.01, step: 0, mean: zeros.clone(), square: zeros };
    /// let x = Array3::from_shape_fn((2, 5, 16), |(b, i, j)| ((b + 3 * i + 7 * j) % 5) as f32 - 2.0);
    /// let mut losses = Vec::new();
    /// for _ in 0..20 {
    ///     let (y, tape) = mha.forward_train(&Inputs::new(&x), &Options::new())?;
    ///     let d_y = y - &x;
    ///     losses.push(d_y.mapv(|d| d * d).sum() / 2.0);
    ///     let gradients = mha.backward(&tape, &d_y)?;
    ///     adam.update(&mut mha, &gradients.weights)?;
    /// }
    /// assert!(losses[19] < 0.5 * losses[0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Shape`] or [`crate::Error::Value`] names the gradient of another shape than its parameter, the one
    /// that is missing, and the one that has no parameter.
    pub fn parameters_mut<'b>(
        &'b mut self,
        gradients: &'b Weights<T>,
    ) -> Result<impl Iterator<Item = (&'static str, ArrayViewMutD<'b, T>, ArrayViewD<'b, T>)>> {
        gradients.check_gradients(&self.config, &self.weights)?;
        let pairs = self.weights.edit().iter_mut().zip(gradients.iter());
        Ok(pairs.map(|((name, parameter), (_, gradient))| (name, parameter, gradient)))
    }

    /// `[d_model, num_heads * head_dim]`
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert_eq!(mha.w_q().shape(), [8, 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn w_q(&self) -> &Array2<T> {
        &self.weights.w_q
    }

    /// `[k_dim, num_kv_heads * head_dim]`
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert_eq!(mha.w_k().shape(), [8, 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn w_k(&self) -> &Array2<T> {
        &self.weights.w_k
    }

    /// `[v_dim, num_kv_heads * value_dim]`
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert_eq!(mha.w_v().shape(), [8, 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn w_v(&self) -> &Array2<T> {
        &self.weights.w_v
    }

    /// `[num_heads * value_dim, d_model]`
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// assert_eq!(mha.w_o().shape(), [8, 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn w_o(&self) -> &Array2<T> {
        &self.weights.w_o
    }
}
