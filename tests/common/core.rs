//! A call of the functional core.

use multihead::attention::NewTokens;
use multihead::inspect::{HeadStatistics, Tokens};
use multihead::ndarray::{Array, Array1, Array2, Array4, ArrayD, ArrayRef4, ArrayView4, Axis, Dimension};
use multihead::{CacheShape, Element, HeadMap, KvCache, Mask, Options, Path, Result, Storage, Workspace, attention};
use std::cell::RefCell;

use super::distances::Distances;
use super::layout::Layout;
use super::{Answer, Call, Keep, Precision, Via, Way, typed, widened};

/// Scaled dot-product attention with all its options, in `f64`.
#[derive(Debug, Clone)]
pub(crate) struct Core {
    /// `[batch, num_heads, q_len, head_dim]`
    pub(crate) q: Array4<f64>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`
    pub(crate) k: Array4<f64>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`
    pub(crate) v: Array4<f64>,
    pub(crate) mask: Mask,
    pub(crate) bias: Option<ArrayD<f64>>,
    pub(crate) sinks: Option<Array1<f64>>,
    pub(crate) heads: Option<HeadMap>,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) distances: Distances,
    /// Rate and seed.
    pub(crate) dropout: Option<(f64, u64)>,
    /// Of q, k, v and of the array that `forward_into` fills.
    pub(crate) layouts: [Layout; 4],
}

impl Core {
    pub(crate) fn new(q: Array4<f64>, k: Array4<f64>, v: Array4<f64>) -> Self {
        Self {
            q,
            k,
            v,
            mask: Mask::none(),
            bias: None,
            sinks: None,
            heads: None,
            scale: None,
            softcap: None,
            distances: Distances::default(),
            dropout: None,
            layouts: [Layout::Standard; 4],
        }
    }

    /// One head of one batch entry.
    pub(crate) fn single(q: Array2<f64>, k: Array2<f64>, v: Array2<f64>) -> Self {
        let lifted = |x: Array2<f64>| x.insert_axis(Axis(0)).insert_axis(Axis(0));
        Self::new(lifted(q), lifted(k), lifted(v))
    }

    /// All scores 0, so that each output is the mean of the values that its query sees.
    pub(crate) fn uniform(num_heads: usize, q_len: usize, v: Array4<f64>) -> Self {
        let (batch, num_kv_heads, kv_len, _) = v.dim();
        Self::new(Array4::zeros((batch, num_heads, q_len, 1)), Array4::zeros((batch, num_kv_heads, kv_len, 1)), v)
    }

    /// [`Core::uniform`] with one head and values of width 1.
    pub(crate) fn means(q_len: usize, values: impl IntoIterator<Item = f64>) -> Self {
        let v = Array1::from_iter(values);
        Self::uniform(1, q_len, v.insert_axis(Axis(1)).insert_axis(Axis(0)).insert_axis(Axis(0)))
    }

    pub(crate) fn mask(mut self, mask: Mask) -> Self {
        self.mask = mask;
        self
    }

    pub(crate) fn bias<D: Dimension>(mut self, bias: Array<f64, D>) -> Self {
        self.bias = Some(bias.into_dyn());
        self
    }

    pub(crate) fn sinks(mut self, sinks: Array1<f64>) -> Self {
        self.sinks = Some(sinks);
        self
    }

    pub(crate) fn heads(mut self, heads: HeadMap) -> Self {
        self.heads = Some(heads);
        self
    }

    pub(crate) fn scale(mut self, scale: f64) -> Self {
        self.scale = Some(scale);
        self
    }

    pub(crate) fn softcap(mut self, softcap: f64) -> Self {
        self.softcap = Some(softcap);
        self
    }

    pub(crate) fn dropout(mut self, rate: f64, seed: u64) -> Self {
        self.dropout = Some((rate, seed));
        self
    }

    pub(crate) fn layouts(mut self, layouts: [Layout; 4]) -> Self {
        self.layouts = layouts;
        self
    }

    /// What the heads do, streamed and from the weights that the call returns.
    pub(crate) fn statistics<T: Element>(&self, tokens: &Tokens<'_>) -> Result<[HeadStatistics; 2]> {
        let way = Way::new(Precision::F64, Path::Auto, Keep::Weights);
        self.with::<T, _>(way, |[q, k, v], options| {
            let [lq, lk, lv, _] = self.layouts;
            let (q, k, v) = (lq.view(&q), lk.view(&k), lv.view(&v));
            let weights = attention::forward(&q, &k, &v, &options)?.weights.unwrap();
            Ok([HeadStatistics::streamed(&q, &k, &options, tokens)?, HeadStatistics::of_weights(&weights, tokens)?])
        })
    }

    /// Builds the arguments and hands them to `f`.
    pub(super) fn with<T: Element, R>(
        &self,
        way: Way,
        f: impl FnOnce([Array4<T>; 3], Options<'_, T>) -> Result<R>,
    ) -> Result<R> {
        let stored = [self.layouts[0].store(&self.q), self.layouts[1].store(&self.k), self.layouts[2].store(&self.v)];
        let bias = self.bias.as_ref().map(|bias| typed(bias));
        let sinks = self.sinks.as_ref().map(|sinks| typed(sinks));
        let distances = self.distances.typed();
        let mut options = distances.choose(way.choose(Options::new().mask(&self.mask)));
        if let Some(bias) = &bias {
            options = options.bias(bias)?;
        }
        if let Some(sinks) = &sinks {
            options = options.sinks(sinks);
        }
        if let Some(heads) = &self.heads {
            options = options.heads(heads);
        }
        if let Some(scale) = self.scale {
            options = options.scale(scale);
        }
        if let Some(softcap) = self.softcap {
            options = options.softcap(softcap);
        }
        if let Some((rate, seed)) = self.dropout {
            options = options.dropout(rate, seed);
        }
        f(stored, options)
    }
}

/// A cache of the first keys and values, whose other slots hold NaN.
pub(crate) fn cache_of<S: Storage>(
    k: ArrayView4<'_, S::Element>,
    v: ArrayView4<'_, S::Element>,
    capacity: usize,
) -> Result<KvCache<S>> {
    let (batch, num_kv_heads, _, head_dim) = k.dim();
    let value_dim = v.dim().3;
    let mut cache = KvCache::new(CacheShape { batch, num_kv_heads, capacity, head_dim, value_dim })?;
    let bad = |width| Array4::from_elem((batch, num_kv_heads, capacity, width), S::Element::from_f64(f64::NAN));
    cache.append(&bad(head_dim), &bad(value_dim))?;
    cache.clear();
    cache.append(&k, &v)?;
    Ok(cache)
}

impl Core {
    /// A cache without entries has no length that a mask could fit.
    fn is_cached(&self, way: Way) -> bool {
        way.via == Via::Cache && self.q.dim().0 > 0
    }

    /// The call over a cache: the queries come with the last keys, if there are as many.
    fn cached<T: Element, R>(
        &self,
        [q, k, v]: [Array4<T>; 3],
        extend: impl FnOnce(&NewTokens<'_, T>, &mut KvCache<T>) -> Result<R>,
        decode: impl FnOnce(&ArrayRef4<T>, &KvCache<T>) -> Result<R>,
    ) -> Result<R> {
        let [lq, lk, lv, _] = self.layouts;
        let (q, k, v) = (lq.view(&q), lk.view(&k), lv.view(&v));
        let (q_len, kv_len) = (q.dim().2, k.dim().2);
        // Padded queries would bring no keys.
        let padded = self.mask.to_string().contains("query_lengths");
        let Some(past) = kv_len.checked_sub(q_len).filter(|_| !padded) else {
            return decode(&q, &cache_of(k, v, kv_len)?);
        };
        let ((old_k, new_k), (old_v, new_v)) = (k.split_at(Axis(2), past), v.split_at(Axis(2), past.min(v.dim().2)));
        extend(&NewTokens { q: &q, k: &new_k, v: &new_v }, &mut cache_of(old_k, old_v, kv_len)?)
    }
}

impl Call for Core {
    fn run<T: Element>(&self, way: Way) -> Result<Answer> {
        self.with::<T, _>(way, |arrays, options| {
            let attended = if self.is_cached(way) {
                let extend =
                    |tokens: &NewTokens<'_, T>, cache: &mut KvCache<T>| attention::extend(tokens, cache, &options);
                self.cached(arrays, extend, |q, cache| attention::decode(q, cache, &options))?
            } else {
                let ([q, k, v], [lq, lk, lv, _]) = (arrays, self.layouts);
                attention::forward(&lq.view(&q), &lk.view(&k), &lv.view(&v), &options)?
            };
            Ok(Answer {
                out: widened(&attended.context).into_dyn(),
                lse: widened(&attended.lse),
                weights: attended.weights.map(|weights| widened(&weights)),
            })
        })
    }

    fn run_into<T: Element>(&self, way: Way) -> Result<ArrayD<f64>> {
        self.with::<T, _>(way, |arrays, options| {
            let [lq, lk, lv, lo] = self.layouts;
            let (batch, num_heads, q_len, _) = self.q.dim();
            let mut storage = lo.storage::<T>((batch, num_heads, q_len, self.v.dim().3));
            let (out, workspace) = (&mut *lo.view_mut(&mut storage), &mut Workspace::new());
            if self.is_cached(way) {
                let (out, workspace) = (RefCell::new(out), RefCell::new(workspace));
                let extend = |tokens: &NewTokens<'_, T>, cache: &mut KvCache<T>| {
                    attention::extend_into(tokens, cache, &options, &mut out.borrow_mut(), &mut workspace.borrow_mut())
                };
                self.cached(arrays, extend, |q, cache| {
                    attention::decode_into(q, cache, &options, &mut out.borrow_mut(), &mut workspace.borrow_mut())
                })?;
            } else {
                let [q, k, v] = arrays;
                let (q, k, v) = (lq.view(&q), lk.view(&k), lv.view(&v));
                attention::forward_into(&q, &k, &v, &options, out, workspace)?;
            }
            Ok(widened(&lo.view(&storage)).into_dyn())
        })
    }
}
