//! Attention over a cache, and what it costs to fill one.

use multihead::attention::{self, NewTokens};
use multihead::ndarray::{Array4, Axis, Ix4, Slice, s};
use multihead::{CacheShape, Element, KvCache, Mask, Storage, Workspace};

use crate::case::{Case, Settings, array, mask};
use crate::{Outcome, Run, sums};

/// The case with the cache that it names.
pub(crate) fn new(case: &Case) -> Outcome<Box<dyn Run>> {
    match (case.cache.as_deref(), case.dtype.as_str()) {
        (None | Some("f32"), "f32") => typed::<f32>(case),
        (None | Some("f64"), "f64") => typed::<f64>(case),
        #[cfg(feature = "half")]
        (Some("bf16"), "f32") => typed::<multihead::half::bf16>(case),
        #[cfg(feature = "half")]
        (Some("f16"), "f32") => typed::<multihead::half::f16>(case),
        (cache, dtype) => {
            let expected = "cache: expected f32, or bf16 or f16 in a build with the feature half, or f64 in f64";
            Err(format!("{expected}, got {cache:?} in {dtype}").into())
        }
    }
}

fn typed<S: Storage>(case: &Case) -> Outcome<Box<dyn Run>> {
    Ok(match (case.op.as_str(), case.pass.as_deref()) {
        ("append", _) => Box::new(Append::<S>::new(case)?),
        (_, Some("prefill")) => Box::new(Prefill::<S>::new(case)?),
        _ => Box::new(Decode::<S>::new(case)?),
    })
}

/// Keys and values of all entries, as long as the longest.
struct Filling<T> {
    k: Array4<T>,
    v: Array4<T>,
    lengths: Vec<usize>,
    shape: CacheShape,
}

impl<T: Element> Filling<T> {
    fn new(case: &Case) -> Outcome<Self> {
        let Case { batch, heads, head_dim, value_dim, .. } = *case;
        let num_kv_heads = case.kv_heads.unwrap_or(heads);
        let lengths = case.kv_lens.clone().unwrap_or_else(|| vec![case.kv_len; batch]);
        let capacity = lengths.iter().copied().max().unwrap_or(0);
        Ok(Self {
            k: array::<T, Ix4>((batch, num_kv_heads, capacity, head_dim), 2, 1.0)?,
            v: array::<T, Ix4>((batch, num_kv_heads, capacity, value_dim), 3, 1.0)?,
            lengths,
            shape: CacheShape { batch, num_kv_heads, capacity, head_dim, value_dim },
        })
    }

    /// A cache that holds them.
    fn cache<S: Storage<Element = T>>(&self) -> Outcome<KvCache<S>> {
        let mut cache = KvCache::new(self.shape)?;
        cache.append_ragged(&self.k, &self.v, &self.lengths)?;
        Ok(cache)
    }

    /// Pairs of one head, over all entries: all keys, or those up to the last queries' own.
    fn pairs(&self, mask: &Mask, q_len: usize) -> Outcome<f64> {
        let of_entry =
            |&length: &usize| Ok::<_, multihead::Error>(mask.bind(1, 1, q_len, length)?.visible_pairs() as f64);
        Ok(self.lengths.iter().map(of_entry).sum::<Result<f64, _>>()?)
    }

    fn bytes<S>(&self) -> usize {
        let CacheShape { num_kv_heads, head_dim, value_dim, .. } = self.shape;
        self.lengths.iter().sum::<usize>() * num_kv_heads * (head_dim + value_dim) * size_of::<S>()
    }
}

/// Queries over a filled cache.
struct Decode<S: Storage> {
    q: Array4<S::Element>,
    cache: KvCache<S>,
    mask: Mask,
    settings: Settings,
    flop: f64,
    bytes: usize,
    context: Array4<S::Element>,
    workspace: Workspace<S::Element>,
}

impl<S: Storage> Decode<S> {
    fn new(case: &Case) -> Outcome<Self> {
        let Case { batch, heads, head_dim, value_dim, .. } = *case;
        let (q_len, filling) = (case.q_len.max(1), Filling::<S::Element>::new(case)?);
        let mask = mask(case, q_len, filling.shape.capacity)?;
        Ok(Self {
            q: array::<S::Element, Ix4>((batch, heads, q_len, head_dim), 1, 1.0)?,
            cache: filling.cache()?,
            settings: Settings::new(case)?,
            flop: 2.0 * heads as f64 * filling.pairs(&mask, q_len)? * (head_dim + value_dim) as f64,
            bytes: filling.bytes::<S>(),
            mask,
            context: Array4::zeros((batch, heads, q_len, value_dim)),
            workspace: Workspace::new(),
        })
    }
}

impl<S: Storage> Run for Decode<S> {
    fn run(&mut self) -> Outcome<()> {
        let options = self.settings.options(&self.mask);
        Ok(attention::decode_into(&self.q, &self.cache, &options, &mut self.context, &mut self.workspace)?)
    }

    fn flop(&self) -> f64 {
        self.flop
    }

    fn bytes(&self) -> Option<usize> {
        Some(self.bytes)
    }

    fn sums(&self) -> (f64, f64) {
        sums(self.context.iter())
    }
}

/// A whole prompt into an empty cache.
struct Prefill<S: Storage> {
    decode: Decode<S>,
    k: Array4<S::Element>,
    v: Array4<S::Element>,
}

impl<S: Storage> Prefill<S> {
    fn new(case: &Case) -> Outcome<Self> {
        if case.q_len != case.kv_len || case.kv_lens.is_some() {
            return Err("prefill: expected as many keys as queries".into());
        }
        let Filling { k, v, .. } = Filling::<S::Element>::new(case)?;
        Ok(Self { decode: Decode::new(case)?, k, v })
    }
}

impl<S: Storage> Run for Prefill<S> {
    fn run(&mut self) -> Outcome<()> {
        let Decode { q, cache, mask, settings, context, workspace, .. } = &mut self.decode;
        cache.clear();
        let (tokens, options) = (NewTokens { q, k: &self.k, v: &self.v }, settings.options(mask));
        Ok(attention::extend_into(&tokens, cache, &options, context, workspace)?)
    }

    fn flop(&self) -> f64 {
        self.decode.flop
    }

    fn bytes(&self) -> Option<usize> {
        self.decode.bytes()
    }

    fn sums(&self) -> (f64, f64) {
        self.decode.sums()
    }
}

/// One token more, again and again; now and then the cache goes back to where it began.
struct Append<S: Storage> {
    cache: KvCache<S>,
    first: usize,
    k: Array4<S::Element>,
    v: Array4<S::Element>,
}

/// Tokens from where it begins to where it goes back.
const LAP: usize = 1024;

impl<S: Storage> Append<S> {
    fn new(case: &Case) -> Outcome<Self> {
        let mut filling = Filling::<S::Element>::new(case)?;
        filling.shape.capacity += LAP;
        let token = |x: &Array4<S::Element>| x.slice_axis(Axis(2), Slice::from(..1)).to_owned();
        if filling.k.len_of(Axis(2)) == 0 {
            return Err("append: expected a kv_len of at least 1".into());
        }
        Ok(Self { cache: filling.cache()?, first: case.kv_len, k: token(&filling.k), v: token(&filling.v) })
    }
}

impl<S: Storage> Run for Append<S> {
    fn run(&mut self) -> Outcome<()> {
        if self.cache.len() == self.cache.shape().capacity {
            self.cache.truncate(self.first)?;
        }
        Ok(self.cache.append(&self.k, &self.v)?)
    }

    fn flop(&self) -> f64 {
        0.0
    }

    fn sums(&self) -> (f64, f64) {
        let last = self.cache.keys().map(|keys| keys.slice(s![.., .., -1, ..]).to_owned());
        last.map_or((f64::NAN, f64::NAN), |last| sums(last.iter()))
    }
}
