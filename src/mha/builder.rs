//! From sizes to a layer, every argument checked once.

#[cfg(feature = "safetensors")]
mod load;
mod told;

#[cfg(feature = "serde")]
pub(super) use told::Told;

use ndarray::Array1;
use std::marker::PhantomData;

use super::{Config, Init, MultiHeadAttention, Weights};
use crate::element::{Element, zeros};
use crate::error::{Error, Result};
use crate::heads::HeadMap;
use crate::position::{Alibi, Buckets, Rope};
use crate::prepack::Packable;

/// One of the four projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum Projection {
    /// W_Q
    Query,
    /// W_K
    Key,
    /// W_V
    Value,
    /// W_O
    Output,
}

impl Projection {
    pub(crate) const ALL: [Self; 4] = [Self::Query, Self::Key, Self::Value, Self::Output];
}

/// The slopes of ALiBi.
#[derive(Debug, Clone, PartialEq)]
enum Slopes {
    Paper,
    Own(Alibi),
}

/// Collects the sizes and rules of a layer, made by [`MultiHeadAttention::builder`].
///
/// ```
/// use multihead::{Init, MultiHeadAttention, Projection};
/// // Qwen2 has biases on queries, keys and values only.
/// let mha = MultiHeadAttention::<f32>::builder(896, 14)
///     .num_kv_heads(2)
///     .biases(&[Projection::Query, Projection::Key, Projection::Value])
///     .init(Init::KaimingUniform)
///     .seed(1)
///     .build()?;
/// assert_eq!(mha.w_k().shape(), [896, 2 * 64]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[must_use = "a builder does nothing until `build` or `from_weights`"]
pub struct Builder<T> {
    d_model: usize,
    num_heads: usize,
    num_kv_heads: Option<usize>,
    kv_of_head: Option<Vec<usize>>,
    head_dim: Option<usize>,
    value_dim: Option<usize>,
    k_dim: Option<usize>,
    v_dim: Option<usize>,
    biases: Vec<Projection>,
    sinks: bool,
    scale: Option<f64>,
    softcap: Option<f64>,
    /// Whether new weights have a norm of queries, and one of keys.
    qk_norm: [bool; 2],
    qk_norm_eps: Option<f64>,
    rope: Option<Rope>,
    alibi: Option<Slopes>,
    relative_bias: Option<Buckets>,
    clip: Option<usize>,
    seed: u64,
    init: Init,
    element: PhantomData<T>,
}

impl<T: Element> Builder<T> {
    pub(super) fn new(d_model: usize, num_heads: usize) -> Self {
        Self {
            d_model,
            num_heads,
            num_kv_heads: None,
            kv_of_head: None,
            head_dim: None,
            value_dim: None,
            k_dim: None,
            v_dim: None,
            biases: Vec::new(),
            sinks: false,
            scale: None,
            softcap: None,
            qk_norm: [false; 2],
            qk_norm_eps: None,
            rope: None,
            alibi: None,
            relative_bias: None,
            clip: None,
            seed: 0,
            init: Init::default(),
            element: PhantomData,
        }
    }

    /// Number of key and value heads: `num_heads` is MHA (the default), 1 is MQA, any divisor between is GQA.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let gqa = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(2).build()?;
    /// assert_eq!(gqa.w_k().shape(), [64, 2 * 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "num_key_value_heads")]
    pub fn num_kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = Some(num_kv_heads);
        self
    }

    /// Query head h reads KV head `kv_of_head[h]`, in groups of any size. Without [`Builder::num_kv_heads`] there are
    /// as many KV heads as the map names.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(12, 3).kv_of_head(&[0, 1, 0]).build()?;
    /// assert_eq!(mha.w_k().shape(), [12, 2 * 4]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn kv_of_head(mut self, kv_of_head: &[usize]) -> Self {
        self.kv_of_head = Some(kv_of_head.to_vec());
        self
    }

    /// Width of a query or key head; `d_model / num_heads` unless given.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let wide = MultiHeadAttention::<f32>::builder(24, 3).head_dim(16).build()?;
    /// assert_eq!(wide.w_q().shape(), [24, 3 * 16]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn head_dim(mut self, head_dim: usize) -> Self {
        self.head_dim = Some(head_dim);
        self
    }

    /// Width of a value head; `head_dim` unless given.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).value_dim(10).build()?;
    /// assert_eq!(mha.w_o().shape(), [3 * 10, 24]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn value_dim(mut self, value_dim: usize) -> Self {
        self.value_dim = Some(value_dim);
        self
    }

    /// Width of the keys' input; `d_model` unless given.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).k_dim(20).build()?;
    /// assert_eq!(mha.w_k().shape(), [20, 24]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "kdim")]
    pub fn k_dim(mut self, k_dim: usize) -> Self {
        self.k_dim = Some(k_dim);
        self
    }

    /// Width of the values' input; `k_dim` unless given.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).v_dim(28).build()?;
    /// assert_eq!(mha.w_v().shape(), [28, 24]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "vdim")]
    pub fn v_dim(mut self, v_dim: usize) -> Self {
        self.v_dim = Some(v_dim);
        self
    }

    /// A bias on all four projections. There is none unless asked for.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).bias().build()?;
    /// assert!(mha.weights().b_q.is_some() && mha.weights().b_o.is_some());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn bias(self) -> Self {
        self.biases(&[Projection::Query, Projection::Key, Projection::Value, Projection::Output])
    }

    /// A bias on these projections.
    ///
    /// ```
    /// use multihead::{MultiHeadAttention, Projection};
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).biases(&[Projection::Query]).build()?;
    /// assert!(mha.weights().b_q.is_some() && mha.weights().b_o.is_none());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn biases(mut self, projections: &[Projection]) -> Self {
        self.biases = projections.to_vec();
        self
    }

    /// A learned sink for each query head, see [`crate::Options::sinks`].
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).sinks().build()?;
    /// assert_eq!(mha.weights().sinks.as_ref().map(|sinks| sinks.len()), Some(3));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn sinks(mut self) -> Self {
        self.sinks = true;
        self
    }

    /// Any finite factor of the scores; `1 / sqrt(head_dim)` unless given.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).scale(1.0).build()?;
    /// assert_eq!(mha.config().scale, Some(1.0));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    /// Bounds the scores, see [`crate::Options::softcap`].
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let error = MultiHeadAttention::<f32>::builder(24, 3).softcap(0.0).build().unwrap_err();
    /// assert_eq!(error.to_string(), "softcap: expected a finite number above 0, got 0");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    /// RMSNorm of each query and each key head, before positions turn them: `weight * x / sqrt(mean(x^2) + eps)`, with a
    /// weight of `head_dim` numbers for queries and one for keys. New weights are 1. A layer made from weights has a norm
    /// if the weights have one; eps is 1e-6 there unless given.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).qk_norm(1e-5).build()?;
    /// assert_eq!(mha.weights().q_norm.as_ref().map(|weight| weight.len()), Some(8));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "rms_norm_eps")]
    pub fn qk_norm(mut self, eps: f64) -> Self {
        (self.qk_norm, self.qk_norm_eps) = ([true; 2], Some(eps));
        self
    }

    /// Rotary positions: the heads of queries and keys turn by the position of their token. Tokens count from 0 unless
    /// the call says otherwise, see [`crate::Inputs::offset`].
    ///
    /// ```
    /// use multihead::{MultiHeadAttention, Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).rope(rope).build()?;
    /// assert_eq!(mha.config().rope, Some(rope));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "rotary_emb")]
    pub fn rope(mut self, rope: Rope) -> Self {
        self.rope = Some(rope);
        self
    }

    /// ALiBi with the paper's slopes for the number of query heads, see [`crate::Options::alibi`].
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 2).alibi().build()?;
    /// assert_eq!(mha.config().alibi.as_ref().and_then(|alibi| alibi.slope(0)), Some(0.0625));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn alibi(mut self) -> Self {
        self.alibi = Some(Slopes::Paper);
        self
    }

    /// ALiBi with slopes of your own, one for each query head.
    ///
    /// ```
    /// use multihead::{position::Alibi, MultiHeadAttention};
    /// let alibi = Alibi::with_slopes(&[0.5, 0.25, 0.125]);
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).alibi_slopes(alibi).build()?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn alibi_slopes(mut self, alibi: Alibi) -> Self {
        self.alibi = Some(Slopes::Own(alibi));
        self
    }

    /// A learned bias for each bucket of distances and query head, see [`crate::Options::relative_bias`]. A new table
    /// holds zeros.
    ///
    /// ```
    /// use multihead::{position::Buckets, MultiHeadAttention};
    /// let buckets = Buckets::T5 { count: 32, max_distance: 128 };
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).relative_bias(buckets).scale(1.0).build()?;
    /// assert_eq!(mha.weights().relative_bias.as_ref().map(|table| table.dim()), Some((32, 3)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "relative_attention_bias")]
    pub fn relative_bias(mut self, buckets: Buckets) -> Self {
        self.relative_bias = Some(buckets);
        self
    }

    /// A learned key for each distance from `-clip` to `clip`, see [`crate::Options::relative_keys`]. A new table holds
    /// zeros.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).relative_keys(16).build()?;
    /// assert_eq!(mha.weights().relative_keys.as_ref().map(|keys| keys.dim()), Some((33, 8)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "max_relative_position")]
    pub fn relative_keys(mut self, clip: usize) -> Self {
        self.clip = Some(clip);
        self
    }

    /// Seed of the initial weights, 0 if it is not given: layers of a model need one each, or they begin alike.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let layer = |seed| MultiHeadAttention::<f32>::builder(24, 3).seed(seed).build();
    /// assert_eq!(layer(1)?, layer(1)?);
    /// assert_ne!(layer(1)?, layer(2)?);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How the initial weights are drawn, [`Init::XavierUniform`] if it is not said.
    ///
    /// ```
    /// use multihead::{Init, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(24, 3).init(Init::Zeros).build()?;
    /// assert!(mha.w_q().iter().all(|&w| w == 0.0));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn init(mut self, init: Init) -> Self {
        self.init = init;
        self
    }

    /// A layer with fresh weights.
    ///
    /// # Errors
    /// [`Error::Value`] for a size of 0, a `d_model` that is no multiple of `num_heads` where no `head_dim` is given,
    /// a scale, a softcap or numbers of positions and norms out of range; [`Error::HeadGroups`] or [`Error::KvOfHead`] for heads that do not fit;
    /// [`Error::TooLarge`] if the weights do not fit into memory.
    ///
    /// ```
    /// # use multihead::MultiHeadAttention;
    /// let error = MultiHeadAttention::<f32>::builder(24, 5).build().unwrap_err();
    /// assert_eq!(error.to_string(), "d_model: expected a multiple of num_heads = 5 where head_dim is not given, got 24");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn build(self) -> Result<MultiHeadAttention<T>> {
        let config = self.config()?;
        let shapes = config.shapes();
        let [w_q, w_k, w_v, w_o] = self.init.draw(self.seed, shapes)?;
        let vector = |wanted: bool, name, axes, len| -> Result<Option<Array1<T>>> {
            if wanted { zeros(name, axes, len).map(Some) } else { Ok(None) }
        };
        let ones = |wanted, name| -> Result<Option<Array1<T>>> {
            let norm = vector(wanted, name, "[head_dim]", config.head_dim)?;
            Ok(norm.map(|norm| norm + T::one()))
        };
        let has = |projection| config.biases.contains(&projection);
        let [q, k, v, o] = shapes.map(|(_, outputs)| outputs);
        let weights = Weights {
            w_q,
            w_k,
            w_v,
            w_o,
            b_q: vector(has(Projection::Query), "b_q", "[num_heads * head_dim]", q)?,
            b_k: vector(has(Projection::Key), "b_k", "[num_kv_heads * head_dim]", k)?,
            b_v: vector(has(Projection::Value), "b_v", "[num_kv_heads * value_dim]", v)?,
            b_o: vector(has(Projection::Output), "b_o", "[d_model]", o)?,
            sinks: vector(config.sinks, "sinks", "[num_heads]", config.heads.num_heads())?,
            q_norm: ones(config.q_norm, "q_norm")?,
            k_norm: ones(config.k_norm, "k_norm")?,
            relative_bias: match &config.relative_bias {
                Some(buckets) => {
                    let shape = (buckets.count(), config.heads.num_heads());
                    Some(zeros("relative_bias", "[buckets, num_heads]", shape)?)
                }
                None => None,
            },
            relative_keys: match config.relative_keys {
                Some(clip) => {
                    let shape = (clip.saturating_mul(2).saturating_add(1), config.head_dim);
                    Some(zeros("relative_keys", "[2 clip + 1, head_dim]", shape)?)
                }
                None => None,
            },
        };
        Ok(MultiHeadAttention { config, weights: Packable::new(weights) })
    }

    /// A layer with these weights. Biases and sinks are there if the weights have them, whatever the builder says.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, MultiHeadAttention, Weights};
    /// // 4 query heads of width 2 share 2 KV heads.
    /// let (eye, half) = (Array2::<f32>::eye(8), Array2::ones((8, 4)));
    /// let weights = Weights::new(eye.clone(), half.clone(), half, eye);
    /// let mha = MultiHeadAttention::builder(8, 4).num_kv_heads(2).from_weights(weights)?;
    /// assert_eq!(mha.config().heads.num_kv_heads(), 2);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Builder::build`], and [`Error::Shape`] names the array that does not fit.
    pub fn from_weights(self, weights: Weights<T>) -> Result<MultiHeadAttention<T>> {
        let config = self.config()?;
        weights.check(&config)?;
        Ok(MultiHeadAttention { config: config.describing(&weights), weights: Packable::new(weights) })
    }

    fn config(&self) -> Result<Config> {
        let at_least_1 = |argument, n: usize| if n == 0 { Err(Error::value(argument, "at least 1", n)) } else { Ok(n) };
        let d_model = at_least_1("d_model", self.d_model)?;
        let num_heads = at_least_1("num_heads", self.num_heads)?;
        let heads = match &self.kv_of_head {
            None => HeadMap::grouped(num_heads, self.num_kv_heads.unwrap_or(num_heads))?,
            Some(map) if map.len() != num_heads => {
                let expected = format!("one entry for each of num_heads = {num_heads}");
                return Err(Error::value("kv_of_head", expected, map.len()));
            }
            Some(map) => {
                let named = map.iter().max().map_or(1, |&last| last.saturating_add(1));
                HeadMap::explicit(map, self.num_kv_heads.unwrap_or(named))?
            }
        };
        let head_dim = match self.head_dim {
            Some(head_dim) => at_least_1("head_dim", head_dim)?,
            None if d_model.is_multiple_of(num_heads) => d_model / num_heads,
            None => {
                let expected = format!("a multiple of num_heads = {num_heads} where head_dim is not given");
                return Err(Error::value("d_model", expected, d_model));
            }
        };
        let value_dim = at_least_1("value_dim", self.value_dim.unwrap_or(head_dim))?;
        let k_dim = at_least_1("k_dim", self.k_dim.unwrap_or(d_model))?;
        let v_dim = at_least_1("v_dim", self.v_dim.unwrap_or(k_dim))?;
        // The same checks as at a call, only earlier.
        let scale = self.scale.map(crate::attention::check_scale::<T>).transpose()?.and(self.scale);
        let softcap = self.softcap.map(crate::attention::check_softcap::<T>).transpose()?.and(self.softcap);
        if let Some(rope) = &self.rope {
            rope.check(head_dim)?;
        }
        let qk_norm_eps = self.qk_norm_eps.unwrap_or(1e-6);
        if !(qk_norm_eps.is_finite() && qk_norm_eps >= 0.0) {
            return Err(Error::value("qk_norm eps", "a finite number that is not negative", qk_norm_eps));
        }
        let alibi = self.alibi.as_ref().map(|slopes| match slopes {
            Slopes::Paper => Alibi::new(num_heads),
            Slopes::Own(alibi) => alibi.clone(),
        });
        if let Some(alibi) = &alibi {
            alibi.check::<T>(num_heads)?;
        }
        if let Some(buckets) = &self.relative_bias {
            buckets.check()?;
        }
        Ok(Config {
            d_model,
            heads,
            head_dim,
            value_dim,
            k_dim,
            v_dim,
            biases: Projection::ALL.into_iter().filter(|projection| self.biases.contains(projection)).collect(),
            sinks: self.sinks,
            scale,
            softcap,
            q_norm: self.qk_norm[0],
            k_norm: self.qk_norm[1],
            qk_norm_eps,
            rope: self.rope,
            alibi,
            relative_bias: self.relative_bias,
            relative_keys: self.clip,
        })
    }
}
