//! Attention over a cache, chunk by chunk, against the whole at once.

use crate::common;

use common::core::{Core, cache_of};
use common::layer::Layer;
use common::{Seeded, Way, assert_bits, is_near, property, typed, widened};
use multihead::attention::{self, Attended, NewTokens};
#[cfg(feature = "half")]
use multihead::half;
use multihead::ndarray::{Array2, Array3, Array4, Axis, array, concatenate, s};
use multihead::position::{Buckets, Rope, RopeStyle};
use multihead::{
    CacheShape, Element, HeadMap, Inputs, KvCache, Level, Mask, MultiHeadAttention, Options, Path, Storage, Weights,
    Workspace,
};
use proptest::prelude::*;

/// A sequence for each batch entry, and how it is fed to the cache.
#[derive(Debug, Clone)]
struct Feed {
    num_heads: usize,
    num_kv_heads: usize,
    head_dim: usize,
    value_dim: usize,
    /// New tokens of each entry, chunk by chunk: `chunks[chunk][entry]`.
    chunks: Vec<Vec<usize>>,
    /// How many keys a query sees besides its own, if not all.
    window: Option<usize>,
    seed: u64,
}

impl Feed {
    fn batch(&self) -> usize {
        self.chunks[0].len()
    }

    fn lengths(&self) -> Vec<usize> {
        (0..self.batch()).map(|entry| self.chunks.iter().map(|chunk| chunk[entry]).sum()).collect()
    }

    /// Queries, keys and values of all tokens of an entry, without the batch axis's other entries.
    fn tokens(&self, entry: usize) -> [Array4<f64>; 3] {
        let (mut draws, len) = (Seeded(self.seed + entry as u64), self.lengths()[entry]);
        [
            draws.array((1, self.num_heads, len, self.head_dim)) * 4.0,
            draws.array((1, self.num_kv_heads, len, self.head_dim)),
            draws.array((1, self.num_kv_heads, len, self.value_dim)),
        ]
    }

    fn mask(&self) -> Mask {
        self.window.map_or_else(Mask::causal, |left| Mask::causal() & Mask::window(left, 0))
    }

    /// Context and lse of each entry at once, by plain loops in `f64`, from the keys and values that the cache can keep.
    fn whole<S: Storage>(&self) -> Vec<Attended<f64>> {
        let kept = |x: Array4<f64>| x.mapv(|x| S::narrow(S::Element::from_f64(x)).widen().into_f64());
        let mask = self.mask();
        let options = Options::new().mask(&mask).path(Path::Reference);
        (0..self.batch())
            .map(|entry| {
                let [q, k, v] = self.tokens(entry);
                attention::forward(&q, &kept(k), &kept(v), &options).unwrap()
            })
            .collect()
    }

    fn shape(&self, capacity: usize) -> CacheShape {
        let Self { num_kv_heads, head_dim, value_dim, .. } = *self;
        CacheShape { batch: self.batch(), num_kv_heads, capacity, head_dim, value_dim }
    }

    /// The same, chunk by chunk. Rows beyond a chunk's length hold NaN and must come back as nothing.
    fn fed<S: Storage>(&self, cache: &mut KvCache<S>, level: Level, path: Path) -> Vec<Attended<f64>> {
        let all: Vec<_> = (0..self.batch()).map(|entry| self.tokens(entry)).collect();
        let mut parts: Vec<Vec<_>> = vec![Vec::new(); self.batch()];
        let mut done = vec![0; self.batch()];
        for chunk in &self.chunks {
            let longest = chunk.iter().copied().max().unwrap_or(0);
            let padded = |which: usize| {
                let (_, heads, _, width) = all[0][which].dim();
                let mut array = Array4::from_elem((self.batch(), heads, longest, width), f64::NAN);
                for (entry, &n) in chunk.iter().enumerate() {
                    let from = all[entry][which].slice(s![0, .., done[entry]..done[entry] + n, ..]);
                    array.slice_mut(s![entry, .., ..n, ..]).assign(&from);
                }
                typed::<S::Element, _>(&array)
            };
            let (q, k, v) = (padded(0), padded(1), padded(2));
            let mask = self.mask() & Mask::query_lengths(chunk);
            let options = Options::new().mask(&mask).level(level).path(path);
            let attended = attention::extend(&NewTokens { q: &q, k: &k, v: &v }, cache, &options).unwrap();
            for (entry, &n) in chunk.iter().enumerate() {
                let one = s![entry..entry + 1, .., ..n, ..];
                parts[entry].push((
                    widened(&attended.context.slice(one)),
                    widened(&attended.lse.slice(s![entry..entry + 1, .., ..n])),
                ));
                let rest = attended.context.slice(s![entry, .., n.., ..]);
                assert!(rest.iter().all(|x| x.into_f64() == 0.0), "padding answers with nothing");
                done[entry] += n;
            }
        }
        assert_eq!(cache.lengths(), self.lengths());
        parts
            .into_iter()
            .map(|parts| {
                let contexts: Vec<_> = parts.iter().map(|(context, _)| context.view()).collect();
                let lses: Vec<_> = parts.iter().map(|(_, lse)| lse.view()).collect();
                let context = concatenate(Axis(2), &contexts).unwrap();
                Attended { context, lse: concatenate(Axis(2), &lses).unwrap(), weights: None }
            })
            .collect()
    }

    fn check<S: Storage>(&self, mut cache: KvCache<S>, level: Level, path: Path, tolerance: f64) {
        for (entry, (got, want)) in self.fed(&mut cache, level, path).iter().zip(&self.whole::<S>()).enumerate() {
            assert_eq!(got.context.dim(), want.context.dim());
            let pairs = got.context.iter().zip(&want.context).chain(got.lse.iter().zip(&want.lse));
            for (index, (&got, &want)) in pairs.enumerate() {
                assert!(is_near(got, want, tolerance), "entry {entry}, {level} {path:?}: {index} is {got}, not {want}");
            }
        }
    }

    /// Every storage, level and path; of a ring too, if there is a window.
    fn check_all(&self) {
        let capacity = self.lengths().into_iter().max().unwrap_or(0);
        let (shape, ring) = (self.shape(capacity), self.window.map(|left| self.shape(left + 1)));
        let ways = Level::available().iter().map(|&level| (level, Path::Tiled));
        for (level, path) in ways.chain([(Level::best(), Path::Reference)]) {
            self.check(KvCache::<f64>::new(shape).unwrap(), level, path, 1e-12);
            self.check(KvCache::<f32>::new(shape).unwrap(), level, path, 2e-5);
            #[cfg(feature = "half")]
            {
                self.check(KvCache::<half::f16>::new(shape).unwrap(), level, path, 2e-5);
                self.check(KvCache::<half::bf16>::new(shape).unwrap(), level, path, 2e-5);
            }
            if let Some(ring) = ring {
                #[cfg(feature = "half")]
                {
                    self.check(KvCache::<half::f16>::ring(ring).unwrap(), level, path, 2e-5);
                    self.check(KvCache::<half::bf16>::ring(ring).unwrap(), level, path, 2e-5);
                }
                self.check(KvCache::<f64>::ring(ring).unwrap(), level, path, 1e-12);
                self.check(KvCache::<f32>::ring(ring).unwrap(), level, path, 2e-5);
            }
        }
    }
}

fn feeds() -> impl Strategy<Value = Feed> {
    let chunk = || prop_oneof![3 => 0..=3usize, 2 => 4..=70usize, 1 => 60..=300usize];
    let chunks =
        (1..=3usize).prop_flat_map(move |batch| prop::collection::vec(prop::collection::vec(chunk(), batch), 1..=6));
    let heads = prop_oneof![Just((1, 1)), Just((4, 2)), Just((3, 1)), Just((8, 1))];
    let window = prop_oneof![2 => Just(None), 3 => (0..=100usize).prop_map(Some), 1 => Just(Some(usize::MAX / 4))];
    (heads, 1..=9usize, 1..=20usize, chunks, window, any::<u32>()).prop_map(
        |((num_heads, num_kv_heads), head_dim, value_dim, chunks, window, seed)| Feed {
            num_heads,
            num_kv_heads,
            head_dim,
            value_dim,
            chunks,
            window,
            seed: u64::from(seed),
        },
    )
}

#[test]
fn chunks_equal_the_whole() {
    property(30, feeds(), |feed| {
        // A ring with a window without end would need memory without end.
        let bounded = Feed { window: feed.window.filter(|&left| left < 1000), ..feed.clone() };
        bounded.check_all();
        let capacity = feed.lengths().into_iter().max().unwrap_or(0);
        feed.check(KvCache::<f64>::new(feed.shape(capacity)).unwrap(), Level::best(), Path::Auto, 1e-12);
    });
}

#[test]
fn b12_chunked_equals_full() {
    let mut draws = Seeded(13);
    let (q, k, v) = (draws.array((1, 2, 7, 3)), draws.array((1, 1, 7, 3)), draws.array((1, 1, 7, 3)));
    let causal = Mask::causal();
    for chunks in [vec![7], vec![3, 1, 2, 1], vec![1; 7], vec![6, 1]] {
        let mut cache = cache_of::<f64>(k.slice(s![.., .., ..0, ..]), v.slice(s![.., .., ..0, ..]), 7).unwrap();
        let (mut rows, mut first) = (Vec::new(), 0);
        for n in chunks {
            let part = s![.., .., first..first + n, ..];
            let (q, k, v) = (q.slice(part), k.slice(part), v.slice(part));
            let tokens = NewTokens { q: &q, k: &k, v: &v };
            rows.push(attention::extend(&tokens, &mut cache, &Options::new().mask(&causal)).unwrap().context);
            first += n;
        }
        let views: Vec<_> = rows.iter().map(|rows| rows.view()).collect();
        let got = concatenate(Axis(2), &views).unwrap();
        for (head, row, want) in [
            (0, 0, [-0.46432060, -0.30186462, 0.15262914]),
            (0, 6, [-0.12529662, 0.11107102, 0.07453049]),
            (1, 6, [-0.13558413, 0.11446721, 0.08160503]),
        ] {
            let got = got.slice(s![0, head, row, ..]);
            assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-7), "{head} {row}: {got}");
        }
        assert!((got.sum() + 1.83584048).abs() < 1e-7);
    }
}

#[test]
fn b46_one_window_on_every_path() {
    let v = Array4::from_shape_fn((1, 1, 6, 1), |(_, _, j, _)| j as f64);
    let zeros = Array4::zeros((1, 1, 6, 1));
    for (mask, want) in [
        (Mask::causal() & Mask::last_n(3), [0.0, 0.5, 1.0, 2.0, 3.0, 4.0]),
        (Mask::causal() & Mask::window(3, 0), [0.0, 0.5, 1.0, 1.5, 2.5, 3.5]),
        (Mask::last_n(1), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
    ] {
        let options = Options::new().mask(&mask);
        for chunk in [1, 2, 4, 6] {
            let mut cache = cache_of::<f64>(zeros.slice(s![.., .., ..0, ..]), v.slice(s![.., .., ..0, ..]), 6).unwrap();
            let mut got = Vec::new();
            for first in (0..6).step_by(chunk) {
                let part = s![.., .., first..6.min(first + chunk), ..];
                let (q, v) = (zeros.slice(part), v.slice(part));
                let attended = attention::extend(&NewTokens { q: &q, k: &q, v: &v }, &mut cache, &options).unwrap();
                got.extend(attended.context);
            }
            assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12), "{mask} {chunk}: {got:?}");
        }
    }
    // The window of a ring counts the token itself.
    let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 3, head_dim: 1, value_dim: 1 };
    let mut ring = KvCache::<f64>::ring(shape).unwrap();
    let attended = attention::extend(&NewTokens { q: &zeros, k: &zeros, v: &v }, &mut ring, &Options::new()).unwrap();
    let want = [0.0, 0.5, 1.0, 2.0, 3.0, 4.0];
    assert!(attended.context.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12));
}

/// Few queries and so many keys that these are cut into chunks.
fn long(q_len: usize, kv_len: usize) -> Core {
    let mut draws = Seeded(7);
    let (q, k) = (draws.array((2, 6, q_len, 20)), draws.array((2, 3, kv_len, 20)));
    Core::new(q * 4.0, k, draws.array((2, 3, kv_len, 33)))
}

#[test]
fn keys_in_chunks_equal_the_whole() {
    use common::Call;
    let lengths = Mask::key_lengths(&[1500, 700]);
    let keep = Mask::keep(&Array2::from_shape_fn((5, 1500), |(i, j)| (i * 31 + j * 17) % 5 != 0)).unwrap();
    let none = Mask::keep(&Array2::from_shape_fn((5, 1500), |(i, _)| i % 2 == 0)).unwrap();
    let masks = [
        Mask::none(),
        Mask::causal(),
        Mask::causal() & lengths.clone(),
        Mask::causal() & Mask::window(600, 0) & lengths,
        Mask::window(900, 3) & keep,
        none,
        Mask::causal_offset(700),
        Mask::query_lengths(&[5, 2]) & Mask::causal(),
    ];
    for mask in masks {
        let mut draws = Seeded(3);
        let bias = draws.array((1, 6, 1, 1500)) * 3.0;
        for core in [long(5, 1500), long(5, 1500).sinks(draws.array(6)).bias(bias).softcap(2.0)] {
            let core = core.mask(mask.clone());
            let want = core.oracle();
            core.everywhere(|run| run.agrees(&want, common::Within(2e-5, 1e-12)));
        }
    }
    let uneven = HeadMap::explicit(&[2, 0, 2, 2, 0, 2], 3).unwrap();
    let core = long(3, 1000).heads(uneven).mask(Mask::causal());
    let want = core.oracle();
    core.everywhere(|run| run.agrees(&want, common::Within(2e-5, 1e-12)));
}

#[test]
fn what_is_not_finite_reaches_the_queries_that_see_it_and_no_others() {
    use common::Call;
    for bad in [f64::NAN, f64::INFINITY] {
        let mut core = long(4, 1200).mask(Mask::causal());
        core.v[[0, 0, 1198, 2]] = bad;
        core.k[[1, 1, 1199, 0]] = bad;
        let want = core.oracle();
        assert!(want.out.iter().any(|x| !x.is_finite()) && want.out.iter().any(|x| x.is_finite()));
        core.everywhere(|run| run.agrees(&want, common::Within(2e-5, 1e-12)));
    }
}

#[cfg(feature = "half")]
#[test]
fn sums_over_a_cache_of_16_bits_are_those_of_f32() {
    // B44: with equal scores the context is the mean of the values, whose sum 16 bits could not hold.
    fn check<S: Storage<Element = f32>>() {
        let n = 65_536;
        let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: n, head_dim: 4, value_dim: 3 };
        let mut cache = KvCache::<S>::new(shape).unwrap();
        cache.append(&Array4::zeros((1, 1, n, 4)), &Array4::ones((1, 1, n, 3))).unwrap();
        for heads in [1, 9] {
            let attended = attention::decode(&Array4::ones((1, heads, 1, 4)), &cache, &Options::new()).unwrap();
            assert!(attended.context.iter().all(|&x| x == 1.0), "{}", attended.context);
            assert!(attended.lse.iter().all(|&lse| (lse - (n as f32).ln()).abs() < 1e-5));
        }
    }
    check::<half::f16>();
    check::<half::bf16>();
}

#[cfg(feature = "half")]
#[test]
fn what_16_bits_cannot_hold_is_infinite_where_it_is_seen() {
    use half::f16;
    let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 100, head_dim: 2, value_dim: 2 };
    let mut cache = KvCache::<f16>::new(shape).unwrap();
    let mut v = Array4::<f32>::ones((1, 1, 80, 2));
    v[[0, 0, 70, 1]] = 1e6;
    cache.append(&Array4::zeros((1, 1, 80, 2)), &v).unwrap();
    assert_eq!(cache.values().unwrap()[[0, 0, 70, 1]], f32::INFINITY);
    let causal = Mask::causal();
    let q = Array4::zeros((1, 1, 20, 2));
    let context = attention::decode(&q, &cache, &Options::new().mask(&causal)).unwrap().context;
    for row in 0..20 {
        let want = if row < 10 { 1.0 } else { f32::INFINITY };
        assert!((context[[0, 0, row, 0]] - 1.0).abs() < 1e-6);
        assert!(context[[0, 0, row, 1]] == want || (context[[0, 0, row, 1]] - want).abs() < 1e-6, "row {row}");
    }
}

#[cfg(feature = "rayon")]
#[test]
fn the_same_bits_for_any_number_of_threads() {
    let pools = [1, 2, 3, 8].map(|n| rayon::ThreadPoolBuilder::new().num_threads(n).build().unwrap());
    let mut draws = Seeded(8);
    let (q, k, v) = (draws.array((2, 8, 3, 64)), draws.array((2, 2, 3000, 64)), draws.array((2, 2, 3000, 64)));
    let (q, k, v) = (typed::<f32, _>(&q), typed(&k), typed(&v));
    let mask = Mask::causal() & Mask::key_lengths(&[3000, 1234]);
    let run = |q: &Array4<f32>| {
        let mut cache =
            cache_of::<f32>(k.slice(s![.., .., ..2997, ..]), v.slice(s![.., .., ..2997, ..]), 3000).unwrap();
        let (k, v) = (k.slice(s![.., .., 2997.., ..]), v.slice(s![.., .., 2997.., ..]));
        let options = Options::new().mask(&mask);
        attention::extend(&NewTokens { q, k: &k, v: &v }, &mut cache, &options).unwrap()
    };
    let want = pools[0].install(|| run(&q));
    for pool in &pools {
        for _ in 0..5 {
            assert_eq!(pool.install(|| run(&q)), want);
        }
    }
}

#[test]
fn merged_parts_are_the_whole() {
    let Core { q, k, v, .. } = long(3, 40);
    let sinks = array![0.5, -1.0, 0.0, 2.0, f64::NEG_INFINITY, 0.1];
    let over = |keys: std::ops::Range<usize>, options: &Options<'_, f64>| {
        let part = s![.., .., keys, ..];
        attention::forward(&q, &k.slice(part), &v.slice(part), options).unwrap()
    };
    let (plain, with_sinks) = (Options::new().weights(), Options::new().weights().sinks(&sinks));
    for cut in [0, 1, 17, 40] {
        for (whole, first, second) in
            [(&plain, &plain, &plain), (&with_sinks, &with_sinks, &plain), (&with_sinks, &plain, &with_sinks)]
        {
            let (want, got) =
                (over(0..40, whole), attention::merge(&over(0..cut, first), &over(cut..40, second)).unwrap());
            let near = |got: &[f64], want: &[f64]| got.iter().zip(want).all(|(&got, &want)| is_near(got, want, 1e-13));
            assert!(near(got.context.as_slice().unwrap(), want.context.as_slice().unwrap()), "cut at {cut}");
            assert!(near(got.lse.as_slice().unwrap(), want.lse.as_slice().unwrap()), "cut at {cut}");
            let (got, want) = (got.weights.unwrap(), want.weights.unwrap());
            assert!(got.iter().zip(&want).all(|(&got, &want)| is_near(got, want, 1e-13)), "cut at {cut}");
        }
    }
}

/// A grouped layer with biases.
fn layer<T: Element>() -> MultiHeadAttention<T> {
    let mut draws = Seeded(21);
    let mut weights = Weights::new(
        typed(&draws.array((12, 16))),
        typed(&draws.array((12, 8))),
        typed(&draws.array((12, 6))),
        typed(&draws.array((12, 12))),
    );
    weights.b_k = Some(typed(&draws.array(8)));
    weights.b_o = Some(typed(&draws.array(12)));
    MultiHeadAttention::builder(12, 4).num_kv_heads(2).head_dim(4).value_dim(3).from_weights(weights).unwrap()
}

#[test]
fn a_layer_decodes_what_it_computes_at_once() {
    let (mha, x): (_, Array3<f64>) = (layer::<f64>(), Seeded(22).array((2, 90, 12)));
    let want = mha.forward(&x, &Mask::causal()).unwrap();
    for chunks in [vec![90], vec![70, 1, 1, 18], vec![1; 90], vec![64, 26]] {
        let (mut cache, mut workspace) = (mha.cache(2, 90).unwrap(), Workspace::new());
        let mut first = 0;
        for n in chunks {
            let rows = s![.., first..first + n, ..];
            let mut other = cache.fork().unwrap();
            let got = mha.decode(&x.slice(rows), &mut cache).unwrap();
            assert!((&got - &want.slice(rows)).iter().all(|gap| gap.abs() < 1e-12));
            let mut into = Array3::from_elem((2, n, 12), f64::NAN);
            mha.decode_into(&x.slice(rows), &mut other, &mut into, &mut workspace).unwrap();
            assert_bits("into", &into, &got);
            first += n;
        }
        assert_eq!(cache.lengths(), [90, 90]);
    }
}

/// Chunks of self-attention against the whole, with entries of different lengths.
fn check_chunks(mha: &MultiHeadAttention<f64>, d_model: usize) {
    let lengths = [83, 40];
    let x: Array3<f64> = Seeded(31).array((2, 83, d_model));
    let whole = lengths
        .iter()
        .enumerate()
        .map(|(entry, &n)| mha.forward(&x.slice(s![entry..entry + 1, ..n, ..]), &Mask::causal()).unwrap());
    let whole: Vec<_> = whole.collect();
    for chunks in [vec![[83, 40]], vec![[70, 1], [0, 39], [13, 0]], vec![[40, 40], [1, 0], [1, 0], [41, 0]]] {
        let mut cache = mha.cache(2, 83).unwrap();
        let mut done = [0, 0];
        for chunk in chunks {
            let longest = chunk[0].max(chunk[1]);
            let mut rows = Array3::from_elem((2, longest, d_model), f64::NAN);
            for entry in 0..2 {
                let from = x.slice(s![entry, done[entry]..done[entry] + chunk[entry], ..]);
                rows.slice_mut(s![entry, ..chunk[entry], ..]).assign(&from);
            }
            let mask = Mask::causal() & Mask::query_lengths(&chunk);
            let got = mha.decode_with(&Inputs::new(&rows), &mut cache, &Options::new().mask(&mask)).unwrap().output;
            for entry in 0..2 {
                let want = whole[entry].slice(s![0, done[entry]..done[entry] + chunk[entry], ..]);
                let gap = &got.slice(s![entry, ..chunk[entry], ..]) - &want;
                assert!(gap.iter().all(|gap| gap.abs() < 1e-11), "{chunk:?}, entry {entry}: {gap}");
                done[entry] += chunk[entry];
            }
        }
        assert_eq!(cache.lengths(), lengths);
    }
}

#[test]
fn b49_positions_go_on_from_the_cache() {
    let builder = || MultiHeadAttention::<f64>::builder(16, 4).num_kv_heads(2).seed(5);
    for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
        check_chunks(&builder().rope(Rope::new(style, 10000.0)).build().unwrap(), 16);
    }
    check_chunks(&builder().alibi().build().unwrap(), 16);
    check_chunks(&builder().relative_bias(Buckets::T5Causal { count: 8, max_distance: 30 }).build().unwrap(), 16);
}

#[test]
fn positions_that_are_given_hold() {
    let rope = Rope::new(RopeStyle::HalfSplit, 10000.0);
    let mha = MultiHeadAttention::<f64>::builder(16, 4).rope(rope).seed(5).build().unwrap();
    let x: Array3<f64> = Seeded(31).array((1, 6, 16));
    let ids = array![[3, 4, 5, 9, 9, 1]];
    let causal = Mask::causal();
    let options = Options::new().mask(&causal);
    let want = mha.attend(&Inputs::new(&x).positions(&ids), &options).unwrap().output;
    let mut cache = mha.cache(1, 6).unwrap();
    for (first, end) in [(0, 4), (4, 6)] {
        let (rows, ids) = (x.slice(s![.., first..end, ..]), ids.slice(s![.., first..end]));
        let got = mha.decode_with(&Inputs::new(&rows).positions(&ids), &mut cache, &options).unwrap().output;
        assert!((&got - &want.slice(s![.., first..end, ..])).iter().all(|gap| gap.abs() < 1e-12));
    }
}

#[test]
fn a_layer_that_refuses_leaves_the_cache_as_it_was() {
    let mha = layer::<f64>();
    let mut cache = mha.cache(2, 10).unwrap();
    let x: Array3<f64> = Seeded(22).array((2, 11, 12));
    mha.decode(&x.slice(s![.., ..3, ..]), &mut cache).unwrap();
    let (keys, values) = (cache.keys().unwrap(), cache.values().unwrap());
    let mut workspace = Workspace::new();
    let mut out = Array3::zeros((2, 4, 12));
    let texts = [
        mha.decode(&x, &mut cache).unwrap_err(),
        mha.decode(&x.slice(s![.., ..2, ..11]), &mut cache).unwrap_err(),
        mha.decode(&x.slice(s![..1, ..2, ..]), &mut cache).unwrap_err(),
        mha.decode_into(&x.slice(s![.., ..2, ..]), &mut cache, &mut out, &mut workspace).unwrap_err(),
        mha.decode_with(&Inputs::new(&x), &mut cache, &Options::new().mask(&Mask::key_lengths(&[1]))).unwrap_err(),
    ]
    .map(|error| error.to_string());
    assert_eq!(
        texts,
        [
            "cache[0]: expected at most capacity = 10 tokens, got 3 and 11 more",
            "query: expected [batch, q_len, d_model] = [_, _, 12], got [2, 2, 11]",
            "cache: expected [batch, num_kv_heads, capacity, head_dim, value_dim] = [1, 2, _, 4, 3], got [2, 2, 10, 4, 3]",
            "output: expected [batch, q_len, d_model] = [2, 2, 12], got [2, 4, 12]",
            "cache[0]: expected at most capacity = 10 tokens, got 3 and 11 more",
        ]
    );
    assert_eq!((cache.keys().unwrap(), cache.values().unwrap()), (keys, values));
    assert_eq!(cache.lengths(), [3, 3]);

    let mut other = layer::<f64>().cache(2, 10).unwrap();
    let narrow = MultiHeadAttention::<f64>::builder(12, 4).build().unwrap();
    assert!(narrow.decode(&x.slice(s![.., ..3, ..]), &mut other).is_err());
    assert!(other.is_empty());
}

#[test]
fn a_context_is_cached_once_and_read_often() {
    let mha = layer::<f64>();
    let (memory, x): (Array3<f64>, Array3<f64>) = (Seeded(23).array((2, 70, 12)), Seeded(24).array((2, 5, 12)));
    let mut cache = mha.cache(2, 70).unwrap();
    mha.cache_context(&memory, &mut cache).unwrap();
    let mask = Mask::key_lengths(&[70, 33]);
    let want = mha.forward_cross(&x, &memory, &mask).unwrap();
    for row in 0..5 {
        let options = Options::new().mask(&mask);
        let got = mha.decode_cross(&Inputs::new(&x.slice(s![.., row..row + 1, ..])), &cache, &options).unwrap();
        assert!((&got.output - &want.slice(s![.., row..row + 1, ..])).iter().all(|gap| gap.abs() < 1e-12));
    }
    assert_eq!(cache.lengths(), [70, 70]);
}

#[test]
fn b28_scale_over_a_cache() {
    use common::Call;
    let x = array![[[2.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]]];
    for (scale, want) in [(None, 0.88079708), (Some(0.0), 0.5), (Some(0.25), 0.73105858)] {
        let mut layer = Layer::identity(2, x.clone());
        layer.scale = scale;
        let mha = layer.build::<f64>().unwrap();
        let mut cache = mha.cache(1, 2).unwrap();
        let (k, mut v) = (Array4::zeros((1, 2, 2, 4)), Array4::zeros((1, 2, 2, 4)));
        let mut k: Array4<f64> = k;
        k[[0, 0, 0, 0]] = 2.0;
        v[[0, 0, 0, 0]] = 1.0;
        cache.append(&k, &v).unwrap();
        let got = mha.decode_cross(&Inputs::new(&x), &cache, &Options::new()).unwrap().output[[0, 0, 0]];
        assert!((got - want).abs() < 1e-7, "{scale:?}: {got}");
        assert!(layer.answer(Way::ORACLE).is_ok());
    }
}
