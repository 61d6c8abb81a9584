//! Random calls of the functional core.

use multihead::HeadMap;
use multihead::ndarray::Array4;
use proptest::prelude::*;

use super::Seeded;
use super::core::Core;
use super::masks::{Dims, Rules, rules};

/// A call by its sizes and options; the numbers come from the seed.
#[derive(Debug, Clone)]
pub(crate) struct Recipe {
    pub(crate) batch: usize,
    pub(crate) num_kv_heads: usize,
    /// The KV head of each query head, or how many query heads share one.
    pub(crate) heads: Heads,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
    pub(crate) rules: Rules,
    /// The axes of the bias that have their own length, and the share of pairs that it hides.
    pub(crate) bias: Option<([bool; 4], f64)>,
    pub(crate) sinks: bool,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) seed: u64,
}

#[derive(Debug, Clone)]
pub(crate) enum Heads {
    Grouped(usize),
    Explicit(Vec<usize>),
}

impl Recipe {
    pub(crate) fn num_heads(&self) -> usize {
        match &self.heads {
            Heads::Grouped(size) => self.num_kv_heads * size,
            Heads::Explicit(map) => map.len(),
        }
    }

    /// `[batch, num_heads, q_len, kv_len]`
    pub(crate) fn dims(&self) -> Dims {
        [self.batch, self.num_heads(), self.q_len, self.kv_len]
    }

    /// The KV head of each query head.
    pub(crate) fn kv_of_head(&self) -> Vec<usize> {
        match &self.heads {
            Heads::Grouped(size) => (0..self.num_heads()).map(|head| head / size).collect(),
            Heads::Explicit(map) => map.clone(),
        }
    }

    pub(crate) fn core(&self) -> Core {
        let mut draws = Seeded(self.seed);
        let &Self { batch, num_kv_heads, q_len, kv_len, head_dim, value_dim, .. } = self;
        let (num_heads, dims) = (self.num_heads(), self.dims());
        let q: Array4<f64> = draws.array((batch, num_heads, q_len, head_dim));
        let (k, v) = (
            draws.array((batch, num_kv_heads, kv_len, head_dim)),
            draws.array((batch, num_kv_heads, kv_len, value_dim)),
        );
        let mut core = Core::new(q * 4.0, k, v).mask(self.rules.mask());
        if let Some((full, hidden)) = self.bias {
            let [b, h, i, j] = [0, 1, 2, 3].map(|axis| if full[axis] { dims[axis] } else { 1 });
            let bias: Array4<f64> = draws.array((b, h, i, j));
            core = core.bias(bias.mapv(|x| if x + 0.5 < hidden { f64::NEG_INFINITY } else { 4.0 * x }));
        }
        if self.sinks {
            core = core.sinks(draws.array(num_heads));
        }
        if let Heads::Explicit(map) = &self.heads {
            core = core.heads(HeadMap::explicit(map, num_kv_heads).unwrap());
        }
        (core.scale, core.softcap) = (self.scale, self.softcap);
        core
    }
}

/// Any call that is not refused.
pub(crate) fn recipes() -> impl Strategy<Value = Recipe> {
    let kv_len = prop_oneof![6 => 0..=9usize, 1 => 60..=70usize, 1 => 125..=131usize];
    let width = || prop_oneof![4 => 0..=9usize, 1 => 15..=17usize, 1 => Just(40usize)];
    let sizes = (0..=2usize, 1..=3usize, 0..=14usize, kv_len, width(), width());
    sizes.prop_flat_map(|(batch, num_kv_heads, q_len, kv_len, head_dim, value_dim)| {
        let heads = prop_oneof![
            2 => (1..=3usize).prop_map(Heads::Grouped),
            1 => prop::collection::vec(0..num_kv_heads, 1..=5).prop_map(Heads::Explicit),
        ];
        let options = heads.prop_flat_map(move |heads| {
            let num_heads = match &heads {
                Heads::Grouped(size) => num_kv_heads * size,
                Heads::Explicit(map) => map.len(),
            };
            let rules = rules([batch, num_heads, q_len, kv_len])
                .prop_filter("two alignments", |rules| rules.window_align().is_some());
            let bias = prop::option::of((any::<[bool; 4]>(), prop_oneof![Just(0.0), Just(0.3)]));
            let scale = prop::option::of(prop_oneof![Just(0.0), -2.0..2.0f64]);
            (Just(heads), rules, bias, any::<bool>(), scale, prop::option::of(0.5..20.0f64), any::<u64>())
        });
        options.prop_map(move |(heads, rules, bias, sinks, scale, softcap, seed)| Recipe {
            batch,
            num_kv_heads,
            heads,
            q_len,
            kv_len,
            head_dim,
            value_dim,
            rules,
            bias,
            sinks,
            scale,
            softcap,
            seed,
        })
    })
}
