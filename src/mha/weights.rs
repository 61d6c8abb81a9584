//! What a layer owns.

use ndarray::{Array1, Array2};

use super::Config;
use crate::attention::check_relative_keys;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};

/// The weights of a layer, stored `[in, out]` so that a projection reads `x.dot(&w_q)`.
///
/// Files that store `[out, in]` give a transposed view: `array.reversed_axes()` costs nothing and any strides will do.
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
