//! A step gives the same whatever it comes with: other tokens, other entries, no entries at all.

use crate::common;

use common::core::cache_of;
use common::{Seeded, typed};
use multihead::attention::{self, NewTokens};
use multihead::ndarray::{Array1, Array2, Array3, Array4, s};
use multihead::{CacheShape, Element, Inputs, KvCache, Mask, MultiHeadAttention, Options, Rope, RopeStyle, Weights};

/// B59: 40 tokens in the cache, then 1 to 12 new ones at once. What the first of them gets does not jump.
#[test]
fn b59_a_token_is_the_same_in_chunks_of_any_length() {
    fn check<T: Element>(tolerance: f64) {
        let mut draws = Seeded(59);
        let [q, k, v] = [4, 2, 2].map(|heads| typed::<T, _>(&draws.array((2, heads, 52, 64))));
        let causal = Mask::causal();
        let first = |n: usize| {
            let (old, new) = (s![.., .., ..40, ..], s![.., .., 40..40 + n, ..]);
            let mut cache = cache_of::<T>(k.slice(old), v.slice(old), 52).unwrap();
            let (q, k, v) = (q.slice(new), k.slice(new), v.slice(new));
            let tokens = NewTokens { q: &q, k: &k, v: &v };
            let attended = attention::extend(&tokens, &mut cache, &Options::new().mask(&causal)).unwrap();
            attended.context.slice(s![.., .., 0, ..]).mapv(T::into_f64)
        };
        let want = first(1);
        for n in 2..=12 {
            let gap = (first(n) - &want).iter().fold(0.0, |most: f64, gap| most.max(gap.abs()));
            assert!(gap <= tolerance, "{n} tokens: {gap:e}");
        }
    }
    check::<f32>(1e-6);
    check::<f64>(1e-14);
}

/// B55: in a cache too, no biases are biases of zeros.
#[test]
fn b55_no_bias_equals_a_bias_of_zeros_step_by_step() {
    let mut draws = Seeded(55);
    let mut w = || -> Array2<f64> { draws.array((8, 8)) };
    let plain = Weights::new(w(), w(), w(), w());
    let zero = || Some(Array1::zeros(8));
    let zeros = Weights { b_q: zero(), b_k: zero(), b_v: zero(), b_o: zero(), ..plain.clone() };
    let rope = Rope::new(RopeStyle::HalfSplit, 100.0);
    let layers =
        [plain, zeros].map(|weights| MultiHeadAttention::builder(8, 2).rope(rope).from_weights(weights).unwrap());
    let mut caches = layers.each_ref().map(|layer| layer.cache(1, 6).unwrap());
    let x: Array3<f64> = draws.array((1, 6, 8));
    for rows in [0..3, 3..4, 4..6] {
        let rows = x.slice(s![.., rows, ..]);
        let [plain, zeros] = [0, 1].map(|i| layers[i].decode(&rows, &mut caches[i]).unwrap());
        assert!((plain - zeros).iter().all(|gap| gap.abs() < 1e-12));
    }
}

/// Without entries there is no length, so a cache holds 0 keys whatever has been appended.
#[test]
fn no_entries_hold_no_keys() {
    let shape = CacheShape { batch: 0, num_kv_heads: 2, capacity: 4, head_dim: 5, value_dim: 3 };
    let causal = Mask::causal();
    for mut cache in [KvCache::<f32>::new(shape).unwrap(), KvCache::ring(shape).unwrap()] {
        for tokens in [3, 0, 70] {
            let (q, k) = (Array4::zeros((0, 4, tokens, 5)), Array4::zeros((0, 2, tokens, 5)));
            let new = NewTokens { q: &q, k: &k, v: &k.slice(s![.., .., .., ..3]) };
            let options = Options::new().mask(&causal).weights();
            let attended = attention::extend(&new, &mut cache, &options).unwrap();
            assert_eq!(attended.context.shape(), [0, 4, tokens, 3]);
            assert_eq!(attended.weights.unwrap().shape(), [0, 4, tokens, 0]);
            assert_eq!(attention::decode(&q, &cache, &options).unwrap().context.shape(), [0, 4, tokens, 3]);
            assert_eq!((cache.len(), cache.positions(), cache.bytes()), (0, 0..0, 0));
        }
    }
    let mha = MultiHeadAttention::<f32>::builder(8, 2).build().unwrap();
    let (mut cache, x) = (mha.cache(0, 4).unwrap(), Array3::zeros((0, 9, 8)));
    assert_eq!(mha.decode(&x, &mut cache).unwrap().shape(), [0, 9, 8]);
    let rules = Mask::keep(&Array2::from_elem((9, 0), true)).unwrap();
    assert!(mha.decode_with(&Inputs::new(&x), &mut cache, &Options::new().mask(&rules)).is_ok());
}
