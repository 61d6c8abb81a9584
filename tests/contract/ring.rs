//! A ring: it holds what its window sees, however it comes round, and says what it no longer has.

use crate::common;

use common::{Seeded, assert_bits, is_near, typed, widened};
use multihead::attention::{self, NewTokens};
#[cfg(feature = "half")]
use multihead::half;
use multihead::ndarray::{Array4, Axis, concatenate, s};
use multihead::{CacheShape, Element, Error, KvCache, Mask, Options, Path, Storage, Workspace};
use std::ops::Range;

/// A window of 100 lies in three pages, 192 slots: 93 tokens can be written at a time.
const SHAPE: CacheShape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 100, head_dim: 5, value_dim: 3 };

/// Queries, keys and values of so many tokens.
fn tokens(len: usize) -> [Array4<f64>; 3] {
    let mut draws = Seeded(100);
    [draws.array((1, 4, len, 5)) * 4.0, draws.array((1, 2, len, 5)), draws.array((1, 2, len, 3))]
}

/// Feeds the tokens `from..` chunk by chunk; returns the context of all of them.
fn feed<S: Storage>(
    ring: &mut KvCache<S>,
    all: &[Array4<f64>; 3],
    from: usize,
    chunks: &[usize],
) -> Array4<S::Element> {
    let [q, k, v] = all.each_ref().map(|all| typed::<S::Element, _>(all));
    let mut first = from;
    let parts: Vec<_> = chunks
        .iter()
        .map(|n| {
            let part = s![.., .., first..first + n, ..];
            let (q, k, v) = (q.slice(part), k.slice(part), v.slice(part));
            first += n;
            attention::extend(&NewTokens { q: &q, k: &k, v: &v }, ring, &Options::new()).unwrap().context
        })
        .collect();
    concatenate(Axis(2), &parts.iter().map(|part| part.view()).collect::<Vec<_>>()).unwrap()
}

fn wraps<S: Storage>(tolerance: f64) {
    let all = tokens(500);
    let [q, k, v] = &all;
    let kept = |x: &Array4<f64>| x.mapv(|x| S::narrow(S::Element::from_f64(x)).widen().into_f64());
    let mask = Mask::causal() & Mask::last_n(100);
    let want = attention::forward(q, &kept(k), &kept(v), &Options::new().mask(&mask)).unwrap().context;
    // Slot 191 is followed by slot 0: at position 192 and at 384, here at the end of a chunk, one behind it, in its middle,
    // and twice in one chunk.
    for chunks in
        [&[192, 192, 116][..], &[191, 2, 307], &[150, 150, 1, 1, 198], &[500], &[99, 1, 93, 94, 213], &[1; 500]]
    {
        let mut ring = KvCache::<S>::ring(SHAPE).unwrap();
        let bytes = ring.bytes();
        let got = widened(&feed(&mut ring, &all, 0, chunks));
        for (index, (&got, &want)) in got.iter().zip(&want).enumerate() {
            assert!(is_near(got, want, tolerance), "{chunks:?}: {index} is {got}, not {want}");
        }
        assert_eq!((ring.lengths(), ring.positions(), ring.bytes()), (&[500][..], 308..500, bytes));
        assert_eq!(widened(&ring.keys().unwrap()), kept(&k.slice(s![.., .., 308.., ..]).to_owned()));
    }
}

#[test]
fn a_ring_wraps_anywhere_in_a_chunk() {
    wraps::<f64>(1e-12);
    wraps::<f32>(2e-5);
    #[cfg(feature = "half")]
    wraps::<half::f16>(2e-5);
    #[cfg(feature = "half")]
    wraps::<half::bf16>(2e-5);
}

fn of_range(keys: Range<usize>) -> Mask {
    Mask::key_ranges(&[keys; 1])
}

#[test]
fn queries_that_a_mask_puts_elsewhere_do_not_see_overwritten_keys() {
    let [q, k, v] = tokens(300);
    let mut ring = KvCache::<f64>::ring(SHAPE).unwrap();
    feed(&mut ring, &[q.clone(), k.clone(), v.clone()], 0, &[300]);
    assert_eq!(ring.positions(), 108..300);
    let q = q.slice(s![.., .., ..1, ..]);
    let of_lengths = |lengths| Mask::key_lengths(&[lengths]);
    // The last 100 of 150 keys begin at 50.
    for (mask, position) in [(of_lengths(150), 149), (of_range(10..150), 149), (Mask::causal() & of_lengths(206), 205)]
    {
        for path in [Path::Auto, Path::Tiled, Path::Dense, Path::Reference] {
            let refused = attention::decode(&q, &ring, &Options::new().mask(&mask).path(path)).unwrap_err();
            assert_eq!(refused, Error::Overwritten { entry: 0, lowest: 207, got: position }, "{mask} {path:?}");
        }
    }
    // What is still there is seen.
    for (mask, keys) in [
        (of_lengths(208), 108..208),
        (of_lengths(250), 150..250),
        (of_lengths(150) & Mask::window(20, 0), 129..150),
        (of_range(110..150), 110..150),
    ] {
        let [k, v] = [&k, &v].map(|x| x.slice(s![.., .., keys.clone(), ..]));
        let want = attention::forward(&q, &k, &v, &Options::new()).unwrap().context;
        let got = attention::decode(&q, &ring, &Options::new().mask(&mask)).unwrap().context;
        for (&got, &want) in got.iter().zip(&want) {
            assert!(is_near(got, want, 1e-12), "{mask}: {got}, not {want}");
        }
    }
}

#[test]
fn a_ring_takes_only_tokens_whose_queries_stand_where_they_are() {
    let [q, k, v] = tokens(300);
    let tokens = NewTokens { q: &q, k: &k, v: &v };
    let mut ring = KvCache::<f64>::ring(SHAPE).unwrap();
    for (mask, position) in [(Mask::causal() & Mask::key_lengths(&[200]), -100), (of_range(5..299), -1)] {
        let refused = attention::extend(&tokens, &mut ring, &Options::new().mask(&mask)).unwrap_err().to_string();
        let expected = "mask: expected one that puts the queries of a ring where their tokens are";
        assert_eq!(refused, format!("{expected}, got the first query of entry 0 at {position} and its token at 0"));
        assert_eq!((ring.lengths(), ring.positions()), (&[0][..], 0..0));
    }
    // Padding before the first token moves no query.
    let padding = Mask::causal() & of_range(5..300);
    let got = attention::extend(&tokens, &mut ring, &Options::new().mask(&padding)).unwrap().context;
    let mask = padding & Mask::last_n(100);
    let want = attention::forward(&q, &k, &v, &Options::new().mask(&mask)).unwrap().context;
    assert!(got.iter().zip(&want).all(|(&got, &want)| is_near(got, want, 1e-12)));
}

#[test]
fn what_has_left_the_window_never_matters() {
    let (clean, mut bad) = (tokens(400), tokens(400));
    for (old, x) in [(f64::NAN, 0), (1e30, 1), (f64::INFINITY, 2)] {
        for array in &mut bad[1..] {
            array.slice_mut(s![.., .., 60 * x..60 * x + 60, ..]).fill(old);
        }
    }
    // From position 279 on, no window reaches back to what is bad.
    let mut rings = [(); 2].map(|()| KvCache::<f64>::ring(SHAPE).unwrap());
    feed(&mut rings[0], &clean, 0, &[279]);
    feed(&mut rings[1], &bad, 0, &[279]);
    for chunks in [&[121][..], &[1; 121], &[93, 28]] {
        let [want, got] = [&clean, &bad].map(|all| all.clone());
        let mut forks = rings.each_ref().map(|ring| ring.fork().unwrap());
        let want = feed(&mut forks[0], &want, 279, chunks);
        assert_bits("after what is bad", &feed(&mut forks[1], &got, 279, chunks), &want);
        assert!(want.iter().all(|x| x.is_finite()));
    }
}

#[test]
fn windows_of_every_size_see_what_they_should() {
    let all = tokens(300);
    let [q, k, v] = &all;
    for window in [1, 2, 64, 65, 66, 129, 300] {
        let mask = Mask::causal() & Mask::last_n(window);
        let want = attention::forward(q, k, v, &Options::new().mask(&mask)).unwrap().context;
        for chunks in [&[300][..], &[1; 300], &[70, 1, 129, 100]] {
            let mut ring = KvCache::<f64>::ring(CacheShape { capacity: window, ..SHAPE }).unwrap();
            let got = feed(&mut ring, &all, 0, chunks);
            assert!(got.iter().zip(&want).all(|(&got, &want)| is_near(got, want, 1e-12)), "{window}: {chunks:?}");
        }
    }
}

#[test]
fn what_a_ring_has_overwritten_cannot_be_taken_back() {
    let all = tokens(400);
    let mut ring = KvCache::<f64>::ring(SHAPE).unwrap();
    feed(&mut ring, &all, 0, &[300]);
    let held = (ring.keys().unwrap(), ring.values().unwrap());
    // Slots 108 to 299 are there, and the query at 207 sees 108.
    for len in [206, 108, 0] {
        let error = ring.truncate(len).unwrap_err();
        assert_eq!(error, Error::Overwritten { entry: 0, lowest: 207, got: len });
        assert!(error.to_string().contains("207") && error.to_string().contains(&len.to_string()), "{error}");
        assert_eq!((ring.lengths(), (ring.keys().unwrap(), ring.values().unwrap())), (&[300][..], held.clone()));
    }
    ring.truncate(207).unwrap();
    // Tokens that come after that bring nothing back.
    let mut on = ring.fork().unwrap();
    feed(&mut on, &all, 207, &[1]);
    assert_eq!(on.truncate(206), Err(Error::Overwritten { entry: 0, lowest: 207, got: 206 }));
    let mut whole = KvCache::<f64>::ring(SHAPE).unwrap();
    let want = feed(&mut whole, &all, 0, &[207, 100]).slice(s![.., .., 207.., ..]).to_owned();
    let got = feed(&mut ring, &all, 207, &[100]);
    assert!(got.iter().zip(&want).all(|(&got, &want)| is_near(got, want, 1e-12)));
    // A ring that has not come round forgets anything.
    let mut young = KvCache::<f64>::ring(SHAPE).unwrap();
    feed(&mut young, &all, 0, &[192]);
    young.truncate(0).unwrap();
    assert!(young.is_empty());
    // Of entries with lengths of their own, none is changed where one cannot be.
    let mut two = KvCache::<f64>::ring(CacheShape { batch: 2, ..SHAPE }).unwrap();
    let kv = |width| Array4::<f64>::ones((2, 2, 300, width));
    two.append_ragged(&kv(5), &kv(3), &[50, 300]).unwrap();
    assert_eq!(two.truncate_ragged(&[10, 200]), Err(Error::Overwritten { entry: 1, lowest: 207, got: 200 }));
    assert_eq!(two.lengths(), [50, 300]);
    two.truncate_ragged(&[0, 250]).unwrap();
    assert_eq!(two.lengths(), [0, 250]);
}

#[test]
fn more_queries_than_windows_are_held_are_refused() {
    let all = tokens(300);
    let mut ring = KvCache::<f64>::ring(SHAPE).unwrap();
    feed(&mut ring, &all, 0, &[300]);
    // The last 93 tokens still have their windows, the one before has not.
    let queries = |n: usize| all[0].slice(s![.., .., 300 - n.., ..]).to_owned();
    let read = |n| attention::decode(&queries(n), &ring, &Options::new());
    assert!(matches!(read(94), Err(Error::Overwritten { .. })), "{:?}", read(94).map(drop));
    let [q, k, v] = &all;
    let mask = Mask::causal() & Mask::last_n(100);
    let want = attention::forward(q, k, v, &Options::new().mask(&mask)).unwrap().context;
    let got = read(93).unwrap().context;
    assert!(got.iter().zip(want.slice(s![.., .., 207.., ..])).all(|(&got, &want)| is_near(got, want, 1e-12)));
}

/// Broadcast views can have as many tokens as a length can say, and a ring takes any number.
#[test]
fn a_ring_takes_tokens_as_far_as_positions_are_told_apart() {
    let mut ring = KvCache::<f64>::ring(CacheShape { num_kv_heads: 1, head_dim: 1, value_dim: 1, ..SHAPE }).unwrap();
    let (one, most) = (Array4::ones((1, 1, 1, 1)), (1 << 60) - 1);
    let many = one.broadcast((1, 1, most - 2, 1)).unwrap();
    ring.append(&many, &many).unwrap();
    let two = Array4::ones((1, 1, 2, 1));
    ring.append(&one, &(&one * 3.0)).unwrap();
    assert_eq!(
        ring.append(&two, &two),
        Err(Error::CacheFull { entry: 0, capacity: most, length: most - 1, requested: 2 })
    );
    ring.append(&one, &(&one * 5.0)).unwrap();
    assert_eq!((ring.len(), ring.positions()), (most, most - 192..most));
    // 98 of the last hundred values are 1, then come 3 and 5.
    let context = attention::decode(&one, &ring, &Options::new()).unwrap().context;
    assert!(is_near(context[[0, 0, 0, 0]], 1.06, 1e-12), "{context}");
    assert_eq!(
        ring.append(&many, &many),
        Err(Error::CacheFull { entry: 0, capacity: most, length: most, requested: most - 2 })
    );
    ring.clear();
    ring.append(&two, &two).unwrap();
    assert_eq!(ring.len(), 2);
}

/// There is nothing to answer, so the tokens are not taken piece by piece.
#[test]
fn tokens_without_values_end() {
    let mut ring = KvCache::<f64>::ring(CacheShape { num_kv_heads: 1, head_dim: 1, value_dim: 0, ..SHAPE }).unwrap();
    let (one, none, len) = (Array4::ones((1, 1, 1, 1)), Array4::ones((1, 1, 1, 0)), 1 << 50);
    let (qk, v) = (one.broadcast((1, 1, len, 1)).unwrap(), none.broadcast((1, 1, len, 0)).unwrap());
    let mut context = Array4::zeros((1, 1, len, 0));
    let tokens = NewTokens { q: &qk, k: &qk, v: &v };
    attention::extend_into(&tokens, &mut ring, &Options::new(), &mut context, &mut Workspace::new()).unwrap();
    assert_eq!(ring.lengths(), [len]);
}
