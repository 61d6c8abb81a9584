//! Do the statistics of the heads say what their formulas say, streamed and from weights?

use crate::common;

use common::core::Core;
use common::layer::Layer;
use common::recipe::recipes;
use common::{Call, Seeded, property};
use multihead::inspect::{HeadStatistics, Tokens};
use multihead::ndarray::{Array2, Array3, Array4, Axis, array, s};
use multihead::position::Alibi;
use multihead::{Element, HeadMap, Inputs, Mask, Options, Rope, RopeStyle, Weights};
use proptest::prelude::*;

/// The formulas in plain loops, of one head: the names of the columns and their means, then the column sums.
fn plain(weights: &Array2<f64>, offset: i64, ids: &[usize]) -> (Vec<f64>, Vec<f64>) {
    let (q_len, kv_len) = weights.dim();
    let mut rows: [Vec<f64>; 8] = Default::default();
    for i in (0..q_len).filter(|&i| weights.row(i).iter().any(|&w| w != 0.0)) {
        let (w, pos) = (|j: usize| weights[[i, j]], i as i64 + offset);
        let sum = |f: &dyn Fn(usize) -> f64| (0..kv_len).map(f).sum::<f64>();
        rows[0].push(sum(&|j| if w(j) == 0.0 { 0.0 } else { -w(j) * w(j).ln() }));
        rows[1].push(sum(&|j| w(j) * (pos - j as i64).abs() as f64));
        rows[2].push((0..kv_len).map(w).fold(0.0, f64::max));
        rows[3].push(w(0));
        let exists = |j: i64| (0..kv_len as i64).contains(&j);
        for (row, j) in [(4, pos - 1), (5, pos + 1)] {
            if exists(j) {
                rows[row].push(w(j as usize));
            }
        }
        if exists(pos) && ids[..pos as usize].contains(&ids[pos as usize]) {
            let pos = pos as usize;
            rows[6].push((0..pos).filter(|&j| ids[j] == ids[pos]).map(w).sum());
            rows[7].push((1..=pos).filter(|&j| ids[j - 1] == ids[pos]).map(w).sum());
        }
    }
    let means = rows.iter().map(|row| row.iter().sum::<f64>() / row.len().max(1) as f64).collect();
    (means, weights.sum_axis(Axis(0)).to_vec())
}

/// Checks all heads against the plain loops.
#[track_caller]
fn check(got: &HeadStatistics, weights: &Array4<f64>, offset: i64, ids: &Array2<usize>, tolerance: f64) {
    let (batch, num_heads, _, _) = weights.dim();
    for (b, h) in (0..batch).flat_map(|b| (0..num_heads).map(move |h| (b, h))) {
        let (means, received) = plain(&weights.slice(s![b, h, .., ..]).to_owned(), offset, &ids.row(b).to_vec());
        for ((name, column), want) in got.columns().zip(means) {
            let got = column[[b, h]];
            assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "{name} of [{b}, {h}]: {got}, not {want}");
        }
        for (j, want) in received.into_iter().enumerate() {
            let got = got.received[[b, h, j]];
            assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "key {j} of [{b}, {h}]: {got}, not {want}");
        }
    }
}

fn some_ids(batch: usize, kv_len: usize, seed: u64) -> Array2<usize> {
    let mut draws = Seeded(seed);
    Array2::from_shape_simple_fn((batch, kv_len), || (5.0 * (draws.draw() + 0.5)) as usize)
}

#[test]
fn streamed_stored_and_plain_are_the_same() {
    let offset = prop_oneof![2 => Just(None), 1 => (0..12usize).prop_map(Some)];
    property(256, (recipes(), offset), |(recipe, offset)| {
        let core = recipe.core();
        let ids = some_ids(recipe.batch, recipe.kv_len, recipe.seed);
        let tokens = offset.map_or(Tokens::new(), |offset| Tokens::new().offset(offset)).ids(&ids);
        let offset = offset.map_or(recipe.kv_len as i64 - recipe.q_len as i64, |offset| offset as i64);

        let [streamed, stored] = core.statistics::<f64>(&tokens).unwrap();
        assert_eq!(streamed, stored);
        let weights = core.oracle().weights.unwrap();
        check(&streamed, &weights, offset, &ids, 1e-10);
        let [streamed, stored] = core.statistics::<f32>(&tokens).unwrap();
        assert_eq!(streamed, stored);
        check(&streamed, &weights, offset, &ids, 1e-3);
    });
}

/// Few heads and many rows: several parts, several blocks of rows, a mask that hides most keys.
fn long(mask: Mask) -> Core {
    let mut draws = Seeded(3);
    let [q, k] = [(1, 2, 1100, 8), (1, 1, 1300, 8)].map(|shape| draws.array(shape) * 4.0);
    let mut core = Core::new(q, k.clone(), k).mask(mask);
    core.distances.alibi = Some(Alibi::with_slopes(&[0.01, 0.5]));
    core.distances.keys = Some(draws.array((9, 8)));
    core
}

#[test]
fn long_rows_are_counted_once() {
    for mask in [Mask::none(), Mask::causal(), Mask::causal() & Mask::window(40, 0), Mask::key_lengths(&[90])] {
        let core = long(mask);
        let ids = some_ids(1, 1300, 5);
        let [streamed, stored] = core.statistics::<f64>(&Tokens::new().ids(&ids)).unwrap();
        assert_eq!(streamed, stored);
        check(&streamed, &core.oracle().weights.unwrap(), 200, &ids, 1e-10);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let core = long(Mask::causal());
    let tokens = Tokens::new();
    let of = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| core.statistics::<f32>(&tokens)).unwrap()
    };
    let one = of(1);
    assert!([2, 3, 16].iter().all(|&threads| of(threads) == one));
}

#[test]
fn each_pattern_has_its_score() {
    // a b c a b: the second a finds the first (duplicate) or what followed it (induction).
    let ids = array![[0, 1, 2, 0, 1]];
    let looks_at = |targets: [usize; 5]| {
        let weights = Array4::from_shape_fn((1, 1, 5, 5), |(_, _, i, j)| f64::from(u8::from(targets[i] == j)));
        let statistics = HeadStatistics::of_weights(&weights, &Tokens::new().ids(&ids)).unwrap();
        statistics.columns().map(|(_, means)| means[[0, 0]]).collect::<Vec<_>>()
    };
    //                                 entropy distance confidence first previous next duplicate induction
    assert_eq!(looks_at([0, 0, 1, 2, 3]), [0.0, 0.8, 1.0, 0.4, 1.0, 0.0, 0.0, 0.0]);
    assert_eq!(looks_at([1, 2, 3, 4, 4]), [0.0, 0.8, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0]);
    assert_eq!(looks_at([0, 1, 2, 0, 1]), [0.0, 1.2, 1.0, 0.4, 0.0, 0.0, 1.0, 0.0]);
    assert_eq!(looks_at([0, 1, 2, 1, 2]), [0.0, 0.8, 1.0, 0.2, 0.0, 0.0, 0.0, 1.0]);
    assert_eq!(looks_at([0, 0, 0, 0, 0]), [0.0, 2.0, 1.0, 1.0, 0.25, 0.0, 0.5, 0.0]);
}

#[test]
fn a_token_said_twice_in_a_row_is_its_own_induction() {
    let weights = Array4::from_shape_fn((1, 1, 2, 2), |(_, _, i, j)| f64::from(u8::from(i == j)));
    let statistics = HeadStatistics::of_weights(&weights, &Tokens::new().ids(&array![[7, 7]])).unwrap();
    assert_eq!(statistics.induction, Some(array![[1.0]]));
    assert_eq!(statistics.duplicate, Some(array![[0.0]]));
}

#[test]
fn a_sink_takes_its_share() {
    // Two keys and the sink weigh a third each.
    let core = Core::means(1, [1.0, 2.0]).sinks(array![0.0]);
    let [statistics, _] = core.statistics::<f64>(&Tokens::new()).unwrap();
    assert!((statistics.received.sum() - 2.0 / 3.0).abs() < 1e-15);
    assert!((statistics.entropy[[0, 0]] - 2.0 / 3.0 * 3f64.ln()).abs() < 1e-15);
}

#[test]
fn queries_that_see_nothing_are_not_counted() {
    let core = Core::means(3, [1.0, 2.0]).mask(Mask::causal());
    let [statistics, stored] = core.statistics::<f64>(&Tokens::new()).unwrap();
    assert_eq!(statistics, stored);
    // Query 0 stands before the first key.
    assert_eq!((statistics.queries[[0, 0]], statistics.confidence[[0, 0]]), (2, 0.75));
    let [nothing, _] = core.mask(Mask::key_lengths(&[0])).statistics::<f64>(&Tokens::new()).unwrap();
    assert_eq!(nothing.queries[[0, 0]], 0);
    assert!(nothing.columns().all(|(_, means)| means[[0, 0]] == 0.0));
}

#[test]
fn a_nan_counts_where_it_is_seen() {
    let mut draws = Seeded(1);
    let [q, mut k] = [(1, 2, 5, 4), (1, 2, 5, 4)].map(|shape| draws.array(shape));
    let clean = Core::new(q.clone(), k.clone(), k.clone()).mask(Mask::key_lengths(&[4]));
    k[[0, 0, 4, 1]] = f64::NAN;
    let hidden = Core::new(q, k.clone(), k).mask(Mask::key_lengths(&[4]));
    assert_eq!(hidden.statistics::<f64>(&Tokens::new()).unwrap(), clean.statistics::<f64>(&Tokens::new()).unwrap());
    for visible in [hidden.clone().mask(Mask::none()), hidden.mask(Mask::causal() & Mask::window(1, 0))] {
        for statistics in visible.statistics::<f64>(&Tokens::new()).unwrap() {
            // Behind a causal mask only the last query sees the key, and no key comes after it.
            let counted = |name| name != "next" || statistics.next[[0, 0]] != 0.0;
            assert!(statistics.columns().all(|(name, means)| means[[0, 0]].is_nan() || !counted(name)));
            assert!(statistics.columns().all(|(_, means)| !means[[0, 1]].is_nan()));
            assert!(statistics.received.slice(s![0, 0, ..]).iter().all(|sum| sum.is_nan()));
            assert_eq!(statistics.queries, array![[5, 5]]);
        }
    }
}

fn layer<T: Element>() -> (Layer, Array3<T>) {
    let mut draws = Seeded(8);
    let (w_q, w_k) = (draws.array((12, 16)), draws.array((12, 8)));
    let weights = Weights {
        b_k: Some(draws.array(8)),
        sinks: Some(draws.array(4)),
        q_norm: Some(draws.array(4)),
        ..Weights::new(w_q, w_k.clone(), w_k, draws.array((16, 12)))
    };
    let query = draws.array((2, 7, 12)) * 3.0;
    let x = query.mapv(T::from_f64);
    let mut layer = Layer::new(4, weights, query).rope(Rope::new(RopeStyle::HalfSplit, 100.0));
    (layer.num_kv_heads, layer.value_dim) = (2, 4);
    (layer, x)
}

#[test]
fn a_layer_has_the_statistics_of_its_weights() {
    fn of<T: Element>() {
        let (layer, x) = layer::<T>();
        let mha = layer.build::<T>().unwrap();
        let mask = Mask::causal() & Mask::key_ranges(&[0..7, 2..7]);
        let (options, ids) = (Options::new().mask(&mask), some_ids(2, 7, 1));
        let (inputs, tokens) = (Inputs::new(&x).offset(5), Tokens::new().ids(&ids));
        let weights = mha.attend(&inputs, &options.weights()).unwrap().weights.unwrap();
        let streamed = mha.head_statistics(&inputs, &options, &tokens).unwrap();
        assert_eq!(streamed, HeadStatistics::of_weights(&weights, &tokens).unwrap());
    }
    of::<f32>();
    of::<f64>();
}

#[test]
fn padding_at_the_start_changes_no_statistic() {
    let (layer, x) = layer::<f64>();
    let mha = layer.build::<f64>().unwrap();
    // The second entry is the last four tokens of the first, behind three that are padding.
    let mut x = x.slice(s![..1, .., ..]).to_owned();
    let alone = x.slice(s![.., 3.., ..]).to_owned();
    x.slice_mut(s![.., ..3, ..]).fill(1e3);
    let ids = array![[5, 5, 5, 5, 6, 5, 6]];
    let (mask, starts) = (Mask::causal() & Mask::key_ranges(std::slice::from_ref(&(3..7))), [3]);
    let tokens = Tokens::new().ids(&ids).starts(&starts);
    let padded = mha.head_statistics(&Inputs::new(&x), &Options::new().mask(&mask), &tokens).unwrap();

    let (causal, ids) = (Mask::causal(), ids.slice(s![.., 3..]));
    let options = Options::new().mask(&causal);
    let want = mha.head_statistics(&Inputs::new(&alone), &options, &Tokens::new().ids(&ids)).unwrap();
    assert_eq!(padded.queries, want.queries);
    for ((name, got), (_, want)) in padded.columns().zip(want.columns()) {
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-9), "{name}: {got}, not {want}");
    }
    assert!(want.first.iter().all(|&first| first > 0.01));
}

#[test]
fn what_does_not_fit_is_named() {
    let weights = Array4::<f32>::ones((2, 1, 3, 4));
    let text =
        |ids: Array2<usize>| HeadStatistics::of_weights(&weights, &Tokens::new().ids(&ids)).unwrap_err().to_string();
    assert_eq!(text(Array2::zeros((3, 4))), "ids: expected [batch, kv_len] = [2, 4], got [3, 4]");
    assert_eq!(text(Array2::zeros((1, 3))), "ids: expected [batch, kv_len] = [1, 4], got [1, 3]");
    assert!(HeadStatistics::of_weights(&weights, &Tokens::new().ids(&Array2::zeros((1, 4)))).is_ok());
    let text = |starts: &[usize]| HeadStatistics::of_weights(&weights, &Tokens::new().starts(starts)).map(drop);
    assert_eq!(text(&[0]).unwrap_err().to_string(), "starts: expected [batch] = [2], got [1]");
    assert_eq!(text(&[4, 5]).unwrap_err().to_string(), "starts: expected no start above kv_len, got 5 of 4");
    assert_eq!(text(&[4, 0]), Ok(()));

    let (q, k) = (Array4::<f32>::ones((2, 3, 3, 4)), Array4::ones((2, 2, 3, 4)));
    let text =
        |options: &Options<'_, f32>| HeadStatistics::streamed(&q, &k, options, &Tokens::new()).unwrap_err().to_string();
    assert_eq!(text(&Options::new()), "num_heads: expected a multiple of num_kv_heads = 2, got 3");
    let map = HeadMap::explicit(&[0, 1, 1], 2).unwrap();
    let mask = Mask::key_lengths(&[3]);
    assert_eq!(text(&Options::new().heads(&map).mask(&mask)), "key_lengths: expected [batch] = [2], got [1]");

    let (layer, x) = layer::<f32>();
    let mha = layer.build::<f32>().unwrap();
    let narrow = x.slice(s![.., .., ..5]);
    let error = mha.head_statistics(&Inputs::new(&narrow), &Options::new(), &Tokens::new()).unwrap_err();
    assert_eq!(error.to_string(), "query: expected [batch, q_len, d_model] = [_, _, 12], got [2, 7, 5]");
}

#[test]
fn broadcast_lengths_are_refused_or_walked_in_no_time() {
    let one = Array4::<f32>::ones((1, 1, 1, 1));
    let huge = one.broadcast((1 << 20, 1 << 20, 1 << 10, 1 << 10)).unwrap();
    let error = HeadStatistics::of_weights(&huge, &Tokens::new().offset(usize::MAX)).unwrap_err().to_string();
    assert!(error.contains("to fit into memory"), "{error}");
    let none = Array4::<f32>::ones((1, 1, 0, 1));
    let none = none.broadcast((1, 1, 0, 1 << 10)).unwrap();
    let statistics = HeadStatistics::of_weights(&none, &Tokens::new().offset(usize::MAX)).unwrap();
    assert_eq!(statistics.received.len(), 1 << 10);
    assert!(HeadStatistics::of_weights(&one, &Tokens::new().offset(usize::MAX)).is_ok());
}
