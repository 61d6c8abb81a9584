//! The cache by itself: what fits, what is taken back, what forks share, and that unused slots never matter.

use crate::common;

use common::core::cache_of;
use common::{Seeded, assert_bits, typed, widened};
use multihead::attention::{self, NewTokens};
#[cfg(feature = "half")]
use multihead::half;
use multihead::ndarray::{Array2, Array4, Axis, s};
use multihead::position::{Alibi, Buckets};
use multihead::{CacheShape, Element, Error, KvCache, Level, Mask, Options, Path, Storage, Workspace};

const SHAPE: CacheShape = CacheShape { batch: 2, num_kv_heads: 2, capacity: 200, head_dim: 5, value_dim: 3 };

/// Runs a check that is generic over what a cache keeps its numbers in.
macro_rules! every_storage {
    ($check:ident) => {
        $check::<f64>();
        $check::<f32>();
        #[cfg(feature = "half")]
        $check::<half::f16>();
        #[cfg(feature = "half")]
        $check::<half::bf16>();
    };
}

/// Keys and values of the first `n` tokens of a sequence.
fn tokens(seed: u64, n: usize) -> (Array4<f64>, Array4<f64>) {
    let mut draws = Seeded(seed);
    let all: [Array4<f64>; 2] = [draws.array((2, 2, 200, 5)), draws.array((2, 2, 200, 3))];
    let [k, v] = all.map(|all| all.slice(s![.., .., ..n, ..]).to_owned());
    (k, v)
}

fn filled(n: usize) -> KvCache<f64> {
    let (k, v) = tokens(1, n);
    cache_of(k.view(), v.view(), SHAPE.capacity).unwrap()
}

fn answer(cache: &KvCache<f64>) -> Array4<f64> {
    let q = Seeded(5).array((2, 4, 2, 5));
    attention::decode(&q, cache, &Options::new().mask(&Mask::causal())).unwrap().context
}

#[test]
fn b57_cache_overflow() {
    let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 4, head_dim: 2, value_dim: 2 };
    let mut cache = KvCache::<f64>::new(shape).unwrap();
    let x = |n: usize| Seeded(n as u64).array((1, 1, n, 2));
    let text = |length, requested| {
        format!("cache[0]: expected at most capacity = 4 tokens, got {length} and {requested} more")
    };
    assert_eq!(cache.append(&x(5), &x(5)).unwrap_err().to_string(), text(0, 5));
    assert_eq!(cache.len(), 0);
    cache.append(&x(3), &x(3)).unwrap();
    let q = x(1);
    let before = attention::decode(&q, &cache, &Options::new()).unwrap();
    assert_eq!(cache.append(&x(2), &x(2)).unwrap_err().to_string(), text(3, 2));
    let refused = attention::extend(&NewTokens { q: &x(2), k: &x(2), v: &x(2) }, &mut cache, &Options::new());
    assert_eq!(refused.unwrap_err().to_string(), text(3, 2));
    assert!(cache.append(&x(2).slice(s![.., .., .., ..1]), &x(2)).is_err());
    assert!(cache.append(&x(1), &x(2)).is_err());
    assert!(cache.append(&Array4::zeros((1, 2, 1, 2)), &Array4::zeros((1, 2, 1, 2))).is_err());
    cache.append(&x(0), &x(0)).unwrap();
    assert_eq!(cache.keys().unwrap(), x(3));
    assert_eq!(attention::decode(&q, &cache, &Options::new()).unwrap(), before);
    cache.append(&x(1), &x(1)).unwrap();
    assert_eq!(cache.len(), 4);
    assert_eq!(cache.append(&x(1), &x(1)).unwrap_err().to_string(), text(4, 1));
}

#[test]
fn views_are_what_was_appended() {
    for chunks in [vec![150], vec![1; 70], vec![15, 1, 17, 64, 3, 50], vec![16, 48, 64, 22]] {
        let mut cache = KvCache::<f64>::new(SHAPE).unwrap();
        let (k, v) = tokens(1, chunks.iter().sum());
        let mut first = 0;
        for n in chunks {
            let range = s![.., .., first..first + n, ..];
            cache.append(&k.slice(range), &v.slice(range)).unwrap();
            first += n;
        }
        assert_eq!((cache.keys().unwrap(), cache.values().unwrap()), (k, v));
    }
}

#[test]
fn any_strides_can_be_appended() {
    let (k, v) = tokens(1, 90);
    let mut cache = KvCache::<f64>::new(SHAPE).unwrap();
    let token_major = |x: &Array4<f64>| x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().to_owned();
    let (k_t, v_t) = (token_major(&k), token_major(&v));
    cache.append(&k_t.view().permuted_axes([0, 2, 1, 3]), &v_t.view().permuted_axes([0, 2, 1, 3])).unwrap();
    assert_eq!((cache.keys().unwrap(), cache.values().unwrap()), (k, v));
}

#[test]
fn entries_have_their_own_lengths() {
    let (k, v) = tokens(1, 90);
    let mut cache = KvCache::<f64>::new(SHAPE).unwrap();
    cache.append_ragged(&k, &v, &[90, 7]).unwrap();
    cache.append_ragged(&k, &v, &[0, 60]).unwrap();
    assert_eq!((cache.lengths(), cache.len(), cache.positions()), (&[90, 67][..], 90, 0..90));
    let keys = cache.keys().unwrap();
    assert_eq!(keys.index_axis(Axis(0), 0), k.index_axis(Axis(0), 0));
    assert_eq!(keys.slice(s![1, .., ..7, ..]), k.slice(s![1, .., ..7, ..]));
    assert_eq!(keys.slice(s![1, .., 7..67, ..]), k.slice(s![1, .., ..60, ..]));
    assert!(keys.slice(s![1, .., 67.., ..]).iter().all(|&x| x == 0.0));

    let error = cache.append_ragged(&k, &v, &[111, 0]).unwrap_err();
    assert_eq!(error.to_string(), "lengths: expected no length above the number of tokens, got 111 of 90");
    let error = cache.append_ragged(&k, &v, &[10]).unwrap_err();
    assert_eq!(error.to_string(), "lengths: expected [batch] = [2], got [1]");
    let full = Error::CacheFull { entry: 0, capacity: 200, length: 180, requested: 90 };
    cache.append(&k, &v).unwrap();
    assert_eq!(cache.append(&k, &v), Err(full));
    assert_eq!(cache.lengths(), [180, 157]);
}

#[test]
fn tokens_are_taken_back() {
    let (mut cache, whole) = (filled(100), filled(70));
    cache.truncate(70).unwrap();
    assert_bits("after truncate", &answer(&cache), &answer(&whole));
    cache.truncate(80).unwrap();
    assert_eq!(cache.lengths(), [70, 70]);
    // What was taken back has left no trace in what comes after.
    let ((k, v), mut whole) = (tokens(9, 20), whole);
    cache.append(&k, &v).unwrap();
    whole.append(&k, &v).unwrap();
    assert_bits("after more", &answer(&cache), &answer(&whole));

    cache.truncate_ragged(&[3, 50]).unwrap();
    assert_eq!(cache.lengths(), [3, 50]);
    assert_eq!(cache.truncate_ragged(&[3]).unwrap_err().to_string(), "lengths: expected [batch] = [2], got [1]");
    cache.clear();
    assert!(cache.is_empty() && cache.keys().unwrap().is_empty());
}

fn unused<S: Storage>() {
    for n in [1, 15, 16, 40, 63, 64, 65, 127] {
        let answer = |before: Option<f64>| {
            let mut cache = KvCache::<S>::new(SHAPE).unwrap();
            if let Some(bad) = before.map(S::Element::from_f64) {
                cache.append(&Array4::from_elem((2, 2, 200, 5), bad), &Array4::from_elem((2, 2, 200, 3), bad)).unwrap();
                cache.clear();
            }
            let (k, v) = tokens(1, n);
            // The second entry is shorter than the first.
            cache.append_ragged(&typed(&k), &typed(&v), &[n, n / 2]).unwrap();
            let q: Array4<f64> = Seeded(5).array((2, 4, 2, 5));
            attention::decode(&typed(&q), &cache, &Options::new().mask(&Mask::causal())).unwrap().context
        };
        let want = widened(&answer(None));
        assert!(want.iter().all(|x| x.is_finite()));
        for bad in [f64::NAN, 1e30, f64::INFINITY] {
            assert_bits(&format!("{n} tokens, {bad} beyond"), &widened(&answer(Some(bad))), &want);
        }
    }
}

#[test]
fn unused_slots_never_matter() {
    every_storage!(unused);
}

/// Keys and values that are not finite, wherever in a row of which storage, do not reach the queries that they are hidden from,
/// however many there are.
fn hidden<S: Storage>() {
    let (n, hidden) = (80, [3, 70]);
    let keep = Array2::from_shape_fn((2, n), |(_, j)| !hidden.contains(&j));
    let mask = Mask::keep_keys(&keep).unwrap();
    let cache = |bad: f64, column: usize| {
        let (mut k, mut v) = tokens(1, n);
        for j in hidden {
            k[[1, 0, j, column]] = bad;
            v[[1, 0, j, column]] = bad;
        }
        let mut cache = KvCache::<S>::new(SHAPE).unwrap();
        // One token alone, and the others in pieces that end within a page.
        for piece in [0..1, 1..7, 7..71, 71..n] {
            let at = s![.., .., piece, ..];
            cache.append(&typed(&k.slice(at).to_owned()), &typed(&v.slice(at).to_owned())).unwrap();
        }
        cache
    };
    let ways = Level::available().iter().flat_map(|&level| [2, 40].map(|q_len| (level, q_len)));
    for (level, q_len) in ways {
        let q: Array4<f64> = Seeded(5).array((2, 4, q_len, 5));
        let options = Options::new().mask(&mask).level(level);
        let answer = |cache: &KvCache<S>| {
            widened(&attention::decode(&typed::<S::Element, _>(&q), cache, &options).unwrap().context)
        };
        let want = answer(&cache(1.0, 0));
        assert!(want.iter().all(|x| x.is_finite()));
        for bad in [f64::NAN, f64::INFINITY] {
            for column in 0..3 {
                let what = format!("{bad} in column {column}, {q_len} queries, {level}");
                assert_bits(&what, &answer(&cache(bad, column)), &want);
            }
        }
    }
}

#[test]
fn hidden_values_never_matter() {
    every_storage!(hidden);
}

#[test]
fn bytes_are_those_of_the_numbers() {
    fn bytes<S: Storage>(num_kv_heads: usize) -> usize {
        let shape = CacheShape { batch: 2, num_kv_heads, capacity: 128, head_dim: 24, value_dim: 20 };
        KvCache::<S>::new(shape).unwrap().bytes()
    }
    // 2 pages for each entry: 64 keys of 24 numbers and values of 32 for each head, and a word for each head.
    for heads in [1, 2, 8] {
        let page = |size: usize| heads * 64 * (24 + 32) * size + 8 * heads;
        assert_eq!([bytes::<f64>(heads), bytes::<f32>(heads)], [4 * page(8), 4 * page(4)]);
        #[cfg(feature = "half")]
        assert_eq!([bytes::<half::f16>(heads), bytes::<half::bf16>(heads)], [4 * page(2); 2]);
    }
}

#[test]
fn forks_share_what_was_there_and_nothing_else() {
    for n in [0, 1, 64, 100, 150] {
        let mut cache = filled(n);
        let mut fork = cache.fork().unwrap();
        assert_eq!((fork.lengths(), fork.shape(), fork.bytes()), (cache.lengths(), SHAPE, cache.bytes()));
        let ((k_1, v_1), (k_2, v_2)) = (tokens(2, 50), tokens(3, 20));
        cache.append(&k_1, &v_1).unwrap();
        fork.append(&k_2, &v_2).unwrap();
        let alone = |k: &Array4<f64>, v: &Array4<f64>| {
            let mut cache = filled(n);
            cache.append(k, v).unwrap();
            cache
        };
        assert_bits("the cache", &answer(&cache), &answer(&alone(&k_1, &v_1)));
        assert_bits("its fork", &answer(&fork), &answer(&alone(&k_2, &v_2)));
        // A fork that goes back behind the common tokens does not touch them.
        fork.truncate(n / 2).unwrap();
        fork.append(&k_1, &v_1).unwrap();
        assert_bits("the cache again", &answer(&cache), &answer(&alone(&k_1, &v_1)));
        drop(cache);
        assert_eq!(fork.keys().unwrap().slice(s![.., .., n / 2.., ..]), k_1);
    }
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    for shape in [
        CacheShape { capacity: usize::MAX, ..SHAPE },
        CacheShape { batch: usize::MAX, ..SHAPE },
        CacheShape { head_dim: usize::MAX, ..SHAPE },
        CacheShape { value_dim: usize::MAX / 2, num_kv_heads: usize::MAX / 2, ..SHAPE },
    ] {
        assert!(matches!(KvCache::<f32>::new(shape), Err(Error::TooLarge { argument: "cache", .. })), "{shape:?}");
        assert!(matches!(KvCache::<f32>::ring(shape), Err(Error::TooLarge { argument: "cache", .. })), "{shape:?}");
    }
    let nothing = CacheShape { batch: 0, num_kv_heads: 0, capacity: 0, head_dim: 0, value_dim: 0 };
    assert!(KvCache::<f32>::new(nothing).unwrap().keys().unwrap().is_empty());
    assert_eq!(
        KvCache::<f32>::ring(nothing).unwrap_err().to_string(),
        "capacity: expected at least 1 for a ring, got 0"
    );
}

/// A batch of none needs no memory, so nothing but the number itself bounds its capacity.
#[test]
fn enormous_caches_without_batch_entries_do_not_overflow() {
    let shape = |capacity| CacheShape { batch: 0, num_kv_heads: 1, capacity, head_dim: 1, value_dim: 1 };
    let most = usize::MAX - 63; // as many slots as whole pages have
    for capacity in [most + 1, usize::MAX] {
        assert!(matches!(KvCache::<f32>::new(shape(capacity)), Err(Error::TooLarge { argument: "cache", .. })));
    }
    for capacity in [most - 510, most, usize::MAX] {
        assert!(matches!(KvCache::<f32>::ring(shape(capacity)), Err(Error::TooLarge { argument: "cache", .. })));
    }
    let new = [1, 1 << 60, usize::MAX / 2, most].map(|n| KvCache::<f32>::new(shape(n)).unwrap());
    let rings = [1, 1 << 60, usize::MAX / 2, most - 511].map(|n| KvCache::<f32>::ring(shape(n)).unwrap());
    let (alibi, buckets) = (Alibi::new(1), Buckets::Clipped { clip: 1 });
    let (table, relative_keys) = (Array2::zeros((3, 1)), Array2::zeros((3, 1)));
    let options = [
        Options::new(),
        Options::new().alibi(&alibi),
        Options::new().relative_bias(buckets, &table),
        Options::new().relative_keys(&relative_keys),
        Options::new().path(Path::Reference),
        Options::new().path(Path::Dense),
    ];
    for mut cache in new.into_iter().chain(rings) {
        let capacity = cache.shape().capacity;
        for len in [0, 1, 1000, isize::MAX as usize / 4] {
            let x = Array4::zeros((0, 1, len, 1));
            cache.append(&x, &x).unwrap();
            cache.append_ragged(&x, &x, &[]).unwrap();
            for options in &options {
                let tokens = NewTokens { q: &x, k: &x, v: &x };
                assert_eq!(attention::decode(&x, &cache, options).unwrap().context, x, "{capacity} {len}");
                assert_eq!(attention::extend(&tokens, &mut cache, options).unwrap().context, x, "{capacity} {len}");
                let (mut context, mut workspace) = (x.clone(), Workspace::new());
                attention::decode_into(&x, &cache, options, &mut context, &mut workspace).unwrap();
                attention::extend_into(&tokens, &mut cache, options, &mut context, &mut workspace).unwrap();
            }
            cache.truncate(len).unwrap();
            cache.truncate_ragged(&[]).unwrap();
            cache = cache.fork().unwrap();
            assert_eq!((cache.len(), cache.bytes(), cache.positions()), (0, 0, 0..0));
            assert_eq!((cache.shape(), cache.lengths(), cache.is_empty()), (shape(capacity), &[][..], true));
            assert!(cache.keys().unwrap().is_empty() && cache.values().unwrap().is_empty());
            cache.clear();
        }
    }
}

#[test]
fn calls_that_do_not_fit_are_refused_and_change_nothing() {
    let mut cache = filled(30);
    let before = answer(&cache);
    let (k, v) = tokens(2, 4);
    let q = Array4::zeros((2, 4, 4, 5));
    let mut check = |q: &Array4<f64>, mask: &Mask, text: &str| {
        let options = Options::new().mask(mask);
        let error = attention::extend(&NewTokens { q, k: &k, v: &v }, &mut cache, &options).unwrap_err();
        assert_eq!(error.to_string(), text);
        assert_eq!(cache.lengths(), [30, 30]);
        assert_bits(text, &answer(&cache), &before);
    };
    let axes = "[batch, num_heads, q_len, head_dim]";
    check(&Array4::zeros((2, 4, 3, 5)), &Mask::none(), &format!("q: expected {axes} = [2, _, 4, 5], got [2, 4, 3, 5]"));
    check(&Array4::zeros((1, 4, 4, 5)), &Mask::none(), &format!("q: expected {axes} = [2, _, 4, 5], got [1, 4, 4, 5]"));
    check(&Array4::zeros((2, 3, 4, 5)), &Mask::none(), "num_heads: expected a multiple of num_kv_heads = 2, got 3");
    check(&q, &Mask::key_lengths(&[35, 3]), "key_lengths[0]: expected start <= end <= kv_len = 34, got 0..35");
    check(&q, &Mask::query_lengths(&[5, 3]), "query_lengths: expected no length above q_len, got 5 of 4");
    let pairs = Mask::keep(&Array4::from_elem((1, 1, 4, 30), true)).unwrap();
    let scores = "expected [batch, num_heads, q_len, kv_len] = [2, 4, 4, 34], got";
    check(&q, &pairs, &format!("keep: {scores} [1, 1, 4, 30]"));
}
