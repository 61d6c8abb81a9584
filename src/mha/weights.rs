//! What a layer owns.

use ndarray::{Array1, Array2, ArrayViewD, ArrayViewMutD};

use super::Config;
use crate::attention::check_relative_keys;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::prepack::Matrices;

/// The weights of a layer, stored `[in, out]` so that a projection reads `x.dot(&w_q)`.
///
/// Files that store `[out, in]` give a transposed view: `array.reversed_axes()` costs nothing and any strides will do.
/// The layouts of known checkpoints are in the module `io`, with the feature `safetensors`.
#[derive(Debug, Clone, PartialEq)]
pub struct Weights<T> {
    /// `[d_model, num_heads * head_dim]`
    #[doc(alias = "q_proj")]
    pub w_q: Array2<T>,
    /// `[k_dim, num_kv_heads * head_dim]`
    #[doc(alias = "k_proj")]
    pub w_k: Array2<T>,
    /// `[v_dim, num_kv_heads * value_dim]`
    #[doc(alias = "v_proj")]
    pub w_v: Array2<T>,
    /// `[num_heads * value_dim, d_model]`
    #[doc(alias = "o_proj")]
    #[doc(alias = "out_proj")]
    pub w_o: Array2<T>,
    /// `[num_heads * head_dim]`
    pub b_q: Option<Array1<T>>,
    /// `[num_kv_heads * head_dim]`
    pub b_k: Option<Array1<T>>,
    /// `[num_kv_heads * value_dim]`
    pub b_v: Option<Array1<T>>,
    /// `[d_model]`
    pub b_o: Option<Array1<T>>,
    /// `[num_heads]`: a logit for each query head that enters the denominator only, see [`crate::Options::sinks`].
    pub sinks: Option<Array1<T>>,
    /// `[head_dim]`: the weight of the RMSNorm of each query head, see [`crate::Builder::qk_norm`].
    pub q_norm: Option<Array1<T>>,
    /// `[head_dim]`: the weight of the RMSNorm of each key head.
    pub k_norm: Option<Array1<T>>,
    /// `[buckets, num_heads]`: a bias for each bucket of distances, see [`crate::Options::relative_bias`]. Which
    /// distances fall into a bucket is said by [`crate::Builder::relative_bias`].
    #[doc(alias = "relative_attention_bias")]
    pub relative_bias: Option<Array2<T>>,
    /// `[2 clip + 1, head_dim]`: a key for each distance from `-clip` to `clip`, see [`crate::Options::relative_keys`].
    pub relative_keys: Option<Array2<T>>,
}

impl<T: Element> Matrices<T> for Weights<T> {
    fn matrices(&self) -> impl Iterator<Item = (&'static str, &Array2<T>)> {
        [("w_q", &self.w_q), ("w_k", &self.w_k), ("w_v", &self.w_v), ("w_o", &self.w_o)].into_iter()
    }
}

impl<T: Element> Weights<T> {
    /// Four projections and nothing else.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, MultiHeadAttention, Weights};
    /// let eye = Array2::<f64>::eye(4);
    /// let weights = Weights::new(eye.clone(), eye.clone(), eye.clone(), eye);
    /// let mha = MultiHeadAttention::builder(4, 2).from_weights(weights)?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn new(w_q: Array2<T>, w_k: Array2<T>, w_v: Array2<T>, w_o: Array2<T>) -> Self {
        Self {
            w_q,
            w_k,
            w_v,
            w_o,
            b_q: None,
            b_k: None,
            b_v: None,
            b_o: None,
            sinks: None,
            q_norm: None,
            k_norm: None,
            relative_bias: None,
            relative_keys: None,
        }
    }

    /// Zeros of the same shapes, with the same biases and sinks: the start of a sum of gradients, or of an optimiser's
    /// averages.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).bias().build()?;
    /// let zeros = mha.weights().zeros_like();
    /// assert!(zeros.iter().zip(mha.weights().iter()).all(|((_, zero), (_, w))| zero.shape() == w.shape()));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn zeros_like(&self) -> Self {
        let matrix = |w: &Array2<T>| Array2::zeros(w.dim());
        let vector = |b: &Option<Array1<T>>| b.as_ref().map(|b| Array1::zeros(b.dim()));
        Self {
            w_q: matrix(&self.w_q),
            w_k: matrix(&self.w_k),
            w_v: matrix(&self.w_v),
            w_o: matrix(&self.w_o),
            b_q: vector(&self.b_q),
            b_k: vector(&self.b_k),
            b_v: vector(&self.b_v),
            b_o: vector(&self.b_o),
            sinks: vector(&self.sinks),
            q_norm: vector(&self.q_norm),
            k_norm: vector(&self.k_norm),
            relative_bias: self.relative_bias.as_ref().map(matrix),
            relative_keys: self.relative_keys.as_ref().map(matrix),
        }
    }

    /// All arrays that there are, by the names of the fields and in their order.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).biases(&[multihead::Projection::Output]).build()?;
    /// assert_eq!(mha.weights().iter().map(|(name, _)| name).collect::<Vec<_>>(), ["w_q", "w_k", "w_v", "w_o", "b_o"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, ArrayViewD<'_, T>)> {
        let Self { b_q, b_k, b_v, b_o, sinks, q_norm, k_norm, .. } = self;
        let vectors = [("b_q", b_q), ("b_k", b_k), ("b_v", b_v), ("b_o", b_o), ("sinks", sinks)];
        let vectors = vectors.into_iter().chain([("q_norm", q_norm), ("k_norm", k_norm)]);
        let vectors = vectors.filter_map(|(name, b)| Some((name, b.as_ref()?.view().into_dyn())));
        let tables = [("relative_bias", &self.relative_bias), ("relative_keys", &self.relative_keys)];
        let tables = tables.into_iter().filter_map(|(name, table)| Some((name, table.as_ref()?.view().into_dyn())));
        self.matrices().map(|(name, w)| (name, w.view().into_dyn())).chain(vectors).chain(tables)
    }

    /// [`Weights::iter`] to write to.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).bias().build()?;
    /// let mut average = mha.weights().zeros_like();
    /// for ((_, mut average), (_, w)) in average.iter_mut().zip(mha.weights().iter()) {
    ///     average.zip_mut_with(&w, |average, &w| *average = 0.99 * *average + 0.01 * w);
    /// }
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&'static str, ArrayViewMutD<'_, T>)> {
        let Self { w_q, w_k, w_v, w_o, b_q, b_k, b_v, b_o, sinks, q_norm, k_norm, relative_bias, relative_keys } = self;
        let matrices = [("w_q", w_q), ("w_k", w_k), ("w_v", w_v), ("w_o", w_o)];
        let vectors = [("b_q", b_q), ("b_k", b_k), ("b_v", b_v), ("b_o", b_o), ("sinks", sinks)];
        let vectors = vectors.into_iter().chain([("q_norm", q_norm), ("k_norm", k_norm)]);
        let vectors = vectors.filter_map(|(name, b)| Some((name, b.as_mut()?.view_mut().into_dyn())));
        let tables = [("relative_bias", relative_bias), ("relative_keys", relative_keys)];
        let tables = tables.into_iter().filter_map(|(name, table)| Some((name, table.as_mut()?.view_mut().into_dyn())));
        matrices.into_iter().map(|(name, w)| (name, w.view_mut().into_dyn())).chain(vectors).chain(tables)
    }

    /// Checks gradients: the shapes of the configuration, and the same arrays as in the weights.
    pub(super) fn check_gradients(&self, config: &Config, weights: &Self) -> Result<()> {
        const OPTIONAL: [&str; 9] =
            ["b_q", "b_k", "b_v", "b_o", "sinks", "q_norm", "k_norm", "relative_bias", "relative_keys"];
        let of = |w: &Self| {
            let vectors = [&w.b_q, &w.b_k, &w.b_v, &w.b_o, &w.sinks, &w.q_norm, &w.k_norm].map(Option::is_some);
            vectors.into_iter().chain([&w.relative_bias, &w.relative_keys].map(Option::is_some))
        };
        for (name, pair) in OPTIONAL.into_iter().zip(of(self).zip(of(weights))) {
            match pair {
                (false, true) => return Err(Error::value(name, "a gradient, since the layer has one", "None")),
                (true, false) => return Err(Error::value(name, "None, since the layer has none", "a gradient")),
                _ => {}
            }
        }
        if let (Some(got), Some(keys)) = (&self.relative_keys, &weights.relative_keys) {
            let expected = [Some(keys.nrows()), Some(keys.ncols())];
            check_shape("relative_keys", "[2 clip + 1, head_dim]", expected, got.shape())?;
        }
        self.check(config)
    }

    /// Checks the shapes.
    pub(super) fn check(&self, config: &Config) -> Result<()> {
        let [q, k, v, o] = config.shapes();
        let axes = [
            ("w_q", "[d_model, num_heads * head_dim]", &self.w_q, q),
            ("w_k", "[k_dim, num_kv_heads * head_dim]", &self.w_k, k),
            ("w_v", "[v_dim, num_kv_heads * value_dim]", &self.w_v, v),
            ("w_o", "[num_heads * value_dim, d_model]", &self.w_o, o),
        ];
        for (name, axes, weight, (inputs, outputs)) in axes {
            check_shape(name, axes, [Some(inputs), Some(outputs)], weight.shape())?;
        }
        let vectors = [
            ("b_q", "[num_heads * head_dim]", &self.b_q, q.1),
            ("b_k", "[num_kv_heads * head_dim]", &self.b_k, k.1),
            ("b_v", "[num_kv_heads * value_dim]", &self.b_v, v.1),
            ("b_o", "[d_model]", &self.b_o, o.1),
            ("sinks", "[num_heads]", &self.sinks, config.heads.num_heads()),
            ("q_norm", "[head_dim]", &self.q_norm, config.head_dim),
            ("k_norm", "[head_dim]", &self.k_norm, config.head_dim),
        ];
        for (name, axes, vector, len) in vectors {
            if let Some(vector) = vector {
                check_shape(name, axes, [Some(len)], vector.shape())?;
            }
        }
        self.check_tables(config)
    }

    /// The learned tables of distances.
    fn check_tables(&self, config: &Config) -> Result<()> {
        if let Some(keys) = &self.relative_keys {
            check_relative_keys(keys.shape(), config.head_dim)?;
        }
        match (&self.relative_bias, &config.relative_bias) {
            (Some(table), Some(buckets)) => {
                let expected = [Some(buckets.count()), Some(config.heads.num_heads())];
                check_shape("relative_bias", "[buckets, num_heads]", expected, table.shape())?;
            }
            (None, None) => {}
            (Some(_), None) => {
                let expected = "buckets in the builder for the table in the weights";
                return Err(Error::value("relative_bias", expected, "none"));
            }
            (None, Some(_)) => {
                let expected = "a table in the weights for the buckets in the builder";
                return Err(Error::value("relative_bias", expected, "none"));
            }
        }
        Ok(())
    }
}
