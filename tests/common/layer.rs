//! A call of the layer.

use multihead::ndarray::{Array, Array2, Array3, ArrayD, Dimension};
use multihead::{Element, Inputs, LayerOutput, Mask, MultiHeadAttention, Options, Result, Rope, Weights, Workspace};

use super::distances::Distances;
use super::{Answer, Call, Via, Way, typed, widened};

/// A layer and its inputs, in `f64`.
#[derive(Debug, Clone)]
pub(crate) struct Layer {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) kv_of_head: Option<Vec<usize>>,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) weights: Weights<f64>,
    /// `[batch, q_len, d_model]`
    pub(crate) query: Array3<f64>,
    /// `[batch, kv_len, k_dim]` and `[batch, kv_len, v_dim]`; `None` is self-attention.
    pub(crate) key_value: Option<(Array3<f64>, Array3<f64>)>,
    /// Keys and values come from one array, that of the keys.
    pub(crate) shared: bool,
    pub(crate) mask: Mask,
    pub(crate) qk_norm_eps: Option<f64>,
    pub(crate) rope: Option<Rope>,
    /// Positions of query 0 and key 0.
    pub(crate) offsets: [Option<usize>; 2],
    /// The tables replace those of the weights.
    pub(crate) distances: Distances,
    /// Of the scores, of rank 2 or 4.
    pub(crate) bias: Option<ArrayD<f64>>,
    /// Rate and seed.
    pub(crate) dropout: Option<(f64, u64)>,
}

impl Layer {
    /// Self-attention of `num_heads` heads that split `d_model`, without biases.
    pub(crate) fn new(num_heads: usize, weights: Weights<f64>, query: Array3<f64>) -> Self {
        let (head_dim, value_dim) = (weights.w_q.ncols() / num_heads, weights.w_v.ncols() / num_heads);
        Self {
            num_heads,
            num_kv_heads: num_heads,
            kv_of_head: None,
            head_dim,
            value_dim,
            scale: None,
            softcap: None,
            weights,
            query,
            key_value: None,
            shared: false,
            mask: Mask::none(),
            qk_norm_eps: None,
            rope: None,
            offsets: [None; 2],
            distances: Distances::default(),
            bias: None,
            dropout: None,
        }
    }

    /// All projections are the identity: each head sees its own slice of the input as it is.
    pub(crate) fn identity(num_heads: usize, query: Array3<f64>) -> Self {
        let eye = || Array2::eye(query.dim().2);
        Self::new(num_heads, Weights::new(eye(), eye(), eye(), eye()), query)
    }

    pub(crate) fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    pub(crate) fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    pub(crate) fn rope(mut self, rope: Rope) -> Self {
        self.rope = Some(rope);
        self
    }

    pub(crate) fn key_value(mut self, key: Array3<f64>, value: Array3<f64>) -> Self {
        self.key_value = Some((key, value));
        self
    }

    pub(crate) fn build<T: Element>(&self) -> Result<MultiHeadAttention<T>> {
        let w = &self.weights;
        let mut builder = MultiHeadAttention::<T>::builder(w.w_q.nrows(), self.num_heads)
            .num_kv_heads(self.num_kv_heads)
            .head_dim(self.head_dim)
            .value_dim(self.value_dim)
            .k_dim(w.w_k.nrows())
            .v_dim(w.w_v.nrows());
        if let Some(kv_of_head) = &self.kv_of_head {
            builder = builder.kv_of_head(kv_of_head);
        }
        if let Some(scale) = self.scale {
            builder = builder.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            builder = builder.softcap(softcap);
        }
        if let Some(eps) = self.qk_norm_eps {
            builder = builder.qk_norm(eps);
        }
        if let Some(rope) = self.rope {
            builder = builder.rope(rope);
        }
        if let Some(alibi) = &self.distances.alibi {
            builder = builder.alibi_slopes(alibi.clone());
        }
        if let Some((buckets, _)) = &self.distances.bias {
            builder = builder.relative_bias(*buckets);
        }
        builder.from_weights(Weights {
            w_q: typed(&w.w_q),
            w_k: typed(&w.w_k),
            w_v: typed(&w.w_v),
            w_o: typed(&w.w_o),
            b_q: optional(&w.b_q),
            b_k: optional(&w.b_k),
            b_v: optional(&w.b_v),
            b_o: optional(&w.b_o),
            sinks: optional(&w.sinks),
            q_norm: optional(&w.q_norm),
            k_norm: optional(&w.k_norm),
            relative_bias: self.distances.bias.as_ref().map(|(_, table)| typed(table)),
            relative_keys: optional(&self.distances.keys),
        })
    }

    /// Builds the layer and its arguments and hands them to `f`.
    pub(super) fn with<T: Element, R>(
        &self,
        way: Way,
        f: impl FnOnce(&MultiHeadAttention<T>, &Inputs<'_, T>, Options<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let query = typed(&self.query);
        let mut inputs = Inputs::new(&query);
        if let Some(offset) = self.offsets[0] {
            inputs = inputs.offset(offset);
        }
        if let Some(offset) = self.offsets[1] {
            inputs = inputs.key_offset(offset);
        }
        let bias = self.bias.as_ref().map(|bias| typed(bias));
        let mut options = way.choose(Options::new().mask(&self.mask));
        if let Some(bias) = &bias {
            options = options.bias(bias)?;
        }
        if let Some((rate, seed)) = self.dropout {
            options = options.dropout(rate, seed);
        }
        let mha = self.build()?;
        match &self.key_value {
            None => f(&mha, &inputs, options),
            Some((context, _)) if self.shared => f(&mha, &inputs.context(&typed(context)), options),
            Some((key, value)) => f(&mha, &inputs.key_value(&typed(key), &typed(value)), options),
        }
    }
}

impl Layer {
    /// A context that is cached by itself has one sequence for keys and values, and its positions count from 0. One without
    /// entries has no length that a mask could fit.
    fn is_cached(&self) -> bool {
        let cross = |(key, value): &(Array3<f64>, Array3<f64>)| key == value && self.offsets == [None; 2];
        self.query.dim().0 > 0 && self.key_value.as_ref().is_none_or(cross)
    }

    /// The call over a cache: all tokens of self-attention at once, or a context that has been cached before.
    fn cached<T: Element>(
        &self,
        mha: &MultiHeadAttention<T>,
        inputs: &Inputs<'_, T>,
        options: &Options<'_, T>,
    ) -> Result<LayerOutput<T>> {
        let (batch, q_len, _) = self.query.dim();
        let Some((context, _)) = &self.key_value else {
            return mha.decode_with(inputs, &mut mha.cache(batch, q_len)?, options);
        };
        let mut cache = mha.cache(batch, context.dim().1)?;
        mha.cache_context(&typed(context), &mut cache)?;
        mha.decode_cross(inputs, &cache, options)
    }
}

fn optional<T: Element, D: Dimension>(array: &Option<Array<f64, D>>) -> Option<Array<T, D>> {
    array.as_ref().map(|array| typed(array))
}

impl Call for Layer {
    fn run<T: Element>(&self, way: Way) -> Result<Answer> {
        self.with::<T, _>(way, |mha, inputs, options| {
            let attended = match way.via {
                Via::Cache if self.is_cached() => self.cached(mha, inputs, &options)?,
                _ => mha.attend(inputs, &options)?,
            };
            Ok(Answer {
                out: widened(&attended.output).into_dyn(),
                lse: widened(&attended.lse),
                weights: attended.weights.map(|weights| widened(&weights)),
            })
        })
    }

    fn run_into<T: Element>(&self, way: Way) -> Result<ArrayD<f64>> {
        self.with::<T, _>(way, |mha, inputs, options| {
            if way.via == Via::Cache && self.is_cached() {
                return Ok(widened(&self.cached(mha, inputs, &options)?.output).into_dyn());
            }
            let mut output = Array3::from_elem(self.query.dim(), T::nan());
            mha.attend_into(inputs, &options, &mut output, &mut Workspace::new())?;
            Ok(widened(&output).into_dyn())
        })
    }
}
