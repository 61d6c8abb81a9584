//! How far the tiled path may be from the right answer in `f32`.
//!
//! The bound of a case: twice the largest error of a plain `f32` computation, which is the worse of two,
//! - dense: the plain loops of `Path::Reference` in `f32` (all scores, softmax, product), and
//! - tiled: the textbook online softmax over tiles of 64 keys, written out below,
//!
//! and at least 1e-6 of the largest sum of absolute terms: `sum_j w[i, j] |v[j]|` for the context, `|lse|` for the lse.
//! Errors are against the plain loops in `f64` on the same numbers, as the maximum over all of an output.
//! With `--nocapture` the worst ratio of error and bound of each level is printed; 1 is what is allowed.

use crate::common;

use common::core::Core;
use common::gradients::tiled_ways;
use common::{Answer, Call, Keep, Precision, Seeded, Way};
use multihead::ndarray::{Array, Array2, Array3, Array4, ArrayView2, Axis, Dimension, IntoDimension, s};
use multihead::{Gradients, Level, Mask, Path};
use std::collections::BTreeMap;

/// Queries and keys; the queries of the longer cases are the last of their tokens, to keep the plain loops quick.
const LENGTHS: [(usize, usize); 3] = [(64, 64), (130, 257), (30, 1000)];
const HEAD_DIMS: [usize; 5] = [1, 3, 64, 80, 128];

/// Two query heads share a KV head.
const HEADS: usize = 2;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Normal,
    /// Scores of a row differ by more than 200.
    Spread,
    Softcap,
    Causal,
    Bias,
}

const KINDS: [Kind; 5] = [Kind::Normal, Kind::Spread, Kind::Softcap, Kind::Causal, Kind::Bias];

/// About normally distributed, variance 1, and numbers of `f32`.
fn normal<D: Dimension>(draws: &mut Seeded, shape: impl IntoDimension<Dim = D>) -> Array<f64, D> {
    Array::from_shape_simple_fn(shape.into_dimension(), || f64::from((0..12).map(|_| draws.draw()).sum::<f64>() as f32))
}

fn case(kind: Kind, (q_len, kv_len): (usize, usize), head_dim: usize) -> Core {
    let mut draws = Seeded((q_len * 1000 + head_dim) as u64);
    let q: Array4<f64> = normal(&mut draws, (1, HEADS, q_len, head_dim));
    let (k, v) = (normal(&mut draws, (1, 1, kv_len, head_dim)), normal(&mut draws, (1, 1, kv_len, head_dim)));
    match kind {
        Kind::Normal => Core::new(q, k, v),
        Kind::Spread => Core::new(q * 64.0, k, v),
        Kind::Softcap => Core::new(q * 16.0, k, v).softcap(20.0),
        Kind::Causal => Core::new(q, k, v).mask(Mask::causal()),
        Kind::Bias => {
            let bias: Array4<f64> = normal(&mut draws, (1, HEADS, q_len, kv_len));
            Core::new(q, k, v).bias(bias * 4.0)
        }
    }
}

/// The textbook form in `f32`: tiles of 64 keys, a running maximum, sum and context, one division at the end.
fn online(core: &Core) -> Answer {
    let (batch, heads, q_len, head_dim) = core.q.dim();
    let (kv_len, value_dim) = (core.k.dim().2, core.v.dim().3);
    let mask = core.mask.bind(batch, heads, q_len, kv_len).unwrap();
    let [q, k, v] = [&core.q, &core.k, &core.v].map(|array| array.iter().map(|&x| x as f32).collect::<Vec<_>>());
    let scale = 1.0 / (head_dim as f32).sqrt();
    let mut out = Array4::<f64>::zeros((batch, heads, q_len, value_dim));
    let mut lse = Array3::<f64>::zeros((batch, heads, q_len));
    for head in 0..heads {
        for i in 0..q_len {
            let q = &q[(head * q_len + i) * head_dim..][..head_dim];
            let (mut m, mut l, mut o) = (f32::NEG_INFINITY, 0.0f32, vec![0.0f32; value_dim]);
            for first in (0..kv_len).step_by(64) {
                let tile = first..kv_len.min(first + 64);
                let seen: Vec<usize> = tile.filter(|&j| mask.sees(0, head, i, j)).collect();
                let scores: Vec<f32> = seen
                    .iter()
                    .map(|&j| {
                        let mut s = scale * q.iter().zip(&k[j * head_dim..]).fold(0.0, |sum, (q, k)| sum + q * k);
                        if let Some(cap) = core.softcap {
                            s = cap as f32 * (s / cap as f32).tanh();
                        }
                        s + core.bias.as_ref().map_or(0.0, |bias| bias[[0, head, i, j]] as f32)
                    })
                    .collect();
                let next = scores.iter().copied().fold(m, f32::max);
                if seen.is_empty() {
                    continue;
                }
                let shrink = (m - next).exp();
                l *= shrink;
                o.iter_mut().for_each(|o| *o *= shrink);
                for (&j, &s) in seen.iter().zip(&scores) {
                    let p = (s - next).exp();
                    l += p;
                    o.iter_mut().zip(&v[j * value_dim..]).for_each(|(o, v)| *o += p * v);
                }
                m = next;
            }
            o.iter().enumerate().for_each(|(c, o)| out[[0, head, i, c]] = f64::from(o / l));
            lse[[0, head, i]] = f64::from(m + l.ln());
        }
    }
    Answer { out: out.into_dyn(), lse, weights: None }
}

/// The largest errors of context and lse.
fn errors(got: &Answer, right: &Answer) -> [f64; 2] {
    let worst = |got: &mut dyn Iterator<Item = (&f64, &f64)>| {
        got.map(|(x, y)| (x - y).abs())
            .fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
    };
    [worst(&mut got.out.iter().zip(&right.out)), worst(&mut got.lse.iter().zip(&right.lse))]
}

/// 1e-6 of the largest sum of absolute terms.
fn floors(core: &Core, right: &Answer) -> [f64; 2] {
    let weights = right.weights.as_ref().unwrap();
    let v: Array2<f64> = core.v.clone().mapv(f64::abs).into_shape_with_order((core.k.dim().2, core.v.dim().3)).unwrap();
    let rows = weights.to_shape((weights.len() / v.nrows(), v.nrows())).unwrap();
    let context = rows.dot(&v).into_iter().fold(0.0, f64::max);
    let lse = right.lse.iter().fold(0.0, |worst: f64, lse| worst.max(lse.abs()));
    [1e-6 * context, 1e-6 * lse]
}

#[test]
fn f32_is_within_twice_the_error_of_a_plain_computation() {
    let mut worst: BTreeMap<String, (f64, String)> = BTreeMap::new();
    let mut beyond = Vec::new();
    for kind in KINDS {
        for lengths in LENGTHS {
            for head_dim in HEAD_DIMS {
                let core = case(kind, lengths, head_dim);
                let right = core.oracle();
                let dense = core.answer(Way::new(Precision::F32, Path::Reference, Keep::Nothing)).unwrap();
                let plain = [errors(&dense, &right), errors(&online(&core), &right)];
                let floors = floors(&core, &right);
                let bounds = [0, 1].map(|n| (2.0 * plain[0][n].max(plain[1][n])).max(floors[n]));
                for &level in Level::available() {
                    for query_tile in [None, Some(1), Some(5), Some(64)] {
                        let way = Way {
                            level: Some(level),
                            query_tile,
                            ..Way::new(Precision::F32, Path::Tiled, Keep::Nothing)
                        };
                        let got = errors(&core.answer(way).unwrap(), &right);
                        for (n, name) in ["context", "lse"].into_iter().enumerate() {
                            let ratio = got[n] / bounds[n];
                            let text = format!(
                                "{ratio:.3}: {name}, {way}, {kind:?}, lengths {lengths:?}, head_dim {head_dim}: error \
                                 {:e}, plain {:e} and {:e}, floor {:e}",
                                got[n], plain[0][n], plain[1][n], floors[n]
                            );
                            // NaN is beyond every bound.
                            if ratio.is_nan() || ratio > 1.0 {
                                beyond.push(text.clone());
                            }
                            let worst = worst.entry(format!("{level} {name}")).or_insert((-1.0, String::new()));
                            if ratio > worst.0 {
                                *worst = (ratio, text);
                            }
                        }
                    }
                }
            }
        }
    }
    for (_, text) in worst.values() {
        println!("{text}");
    }
    assert!(beyond.is_empty(), "beyond the bound:\n{}", beyond.join("\n"));
}

#[test]
fn the_spread_case_spreads() {
    for lengths in LENGTHS {
        for head_dim in HEAD_DIMS {
            let core = case(Kind::Spread, lengths, head_dim);
            let scale = (head_dim as f64).sqrt().recip();
            let (q, k) = (core.q.mapv(|x| x * scale), &core.k);
            let range = |i: usize| {
                let score = |j: usize| (0..head_dim).map(|t| q[[0, 0, i, t]] * k[[0, 0, j, t]]).sum::<f64>();
                let scores = (0..lengths.1).map(score);
                scores.clone().fold(f64::NEG_INFINITY, f64::max) - scores.fold(f64::INFINITY, f64::min)
            };
            let widest = (0..lengths.0).map(range).fold(0.0, f64::max);
            assert!(widest > 200.0, "{lengths:?}, {head_dim}: {widest}");
        }
    }
}

/// The gradients of the dense form in `f32`, by differentiation: all scores, softmax, `d_s = p (d_p - sum_j p d_p)`, products.
/// Names and numbers of d_q, d_k, d_v.
fn dense_gradients(core: &Core, d_context: &Array4<f64>) -> [Array4<f64>; 3] {
    let (batch, heads, q_len, head_dim) = core.q.dim();
    let (kv_len, value_dim) = (core.k.dim().2, core.v.dim().3);
    let mask = core.mask.bind(batch, heads, q_len, kv_len).unwrap();
    let single = |array: &Array4<f64>| array.iter().map(|&x| x as f32).collect::<Vec<_>>();
    let [q, k, v, g] = [&core.q, &core.k, &core.v, d_context].map(single);
    let scale = 1.0 / (head_dim as f32).sqrt();
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |sum, (a, b)| sum + a * b);
    let (mut d_q, mut d_k, mut d_v) = (vec![0f32; q.len()], vec![0f32; k.len()], vec![0f32; v.len()]);
    for row in 0..heads * q_len {
        let (head, i) = (row / q_len, row % q_len);
        let (q, g) = (&q[row * head_dim..][..head_dim], &g[row * value_dim..][..value_dim]);
        let seen: Vec<usize> = (0..kv_len).filter(|&j| mask.sees(0, head, i, j)).collect();
        let (mut p, slopes): (Vec<f32>, Vec<f32>) = seen
            .iter()
            .map(|&j| {
                let (mut s, mut slope) = (scale * dot(q, &k[j * head_dim..][..head_dim]), 1.0);
                if let Some(cap) = core.softcap {
                    let bounded = (s / cap as f32).tanh();
                    (s, slope) = (cap as f32 * bounded, 1.0 - bounded * bounded);
                }
                (s + core.bias.as_ref().map_or(0.0, |bias| bias[[0, head, i, j]] as f32), slope)
            })
            .unzip();
        let top = p.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        p.iter_mut().for_each(|p| *p = (*p - top).exp());
        let total: f32 = p.iter().sum();
        p.iter_mut().for_each(|p| *p /= total);
        let d_p: Vec<f32> = seen.iter().map(|&j| dot(g, &v[j * value_dim..][..value_dim])).collect();
        let delta = dot(&p, &d_p);
        for (n, &j) in seen.iter().enumerate() {
            let d_x = scale * (p[n] * (d_p[n] - delta) * slopes[n]);
            let add =
                |to: &mut [f32], factor: f32, x: &[f32]| to.iter_mut().zip(x).for_each(|(to, x)| *to += factor * x);
            add(&mut d_v[j * value_dim..][..value_dim], p[n], g);
            add(&mut d_k[j * head_dim..][..head_dim], d_x, q);
            add(&mut d_q[row * head_dim..][..head_dim], d_x, &k[j * head_dim..][..head_dim]);
        }
    }
    let shaped = |x: Vec<f32>, like: &Array4<f64>| {
        Array4::from_shape_vec(like.dim(), x.into_iter().map(f64::from).collect()).unwrap()
    };
    [shaped(d_q, &core.q), shaped(d_k, &core.k), shaped(d_v, &core.v)]
}

/// 1e-6 of the largest sum of absolute terms of d_q, d_k, d_v.
fn gradient_floors(core: &Core, right: &Answer, d_context: &Array4<f64>) -> [f64; 3] {
    let weights = right.weights.as_ref().unwrap();
    let (_, heads, q_len, head_dim) = core.q.dim();
    let scale = (head_dim as f64).sqrt().recip();
    let size = |array: Array2<f64>| array.mapv(f64::abs);
    let (k, v): (Array2<f64>, Array2<f64>) =
        (size(core.k.slice(s![0, 0, .., ..]).to_owned()), size(core.v.slice(s![0, 0, .., ..]).to_owned()));
    let (mut d_q, mut d_k, mut d_v) = (0.0f64, k.clone() * 0.0, v.clone() * 0.0);
    for head in 0..heads {
        let p: ArrayView2<'_, f64> = weights.slice(s![0, head, .., ..]);
        let (q, g) = (core.q.slice(s![0, head, .., ..]).to_owned(), d_context.slice(s![0, head, .., ..]).to_owned());
        let (q, g): (Array2<f64>, Array2<f64>) = (size(q), size(g));
        let d_p: Array2<f64> = g.dot(&v.t());
        let delta = (&p * &d_p).sum_axis(Axis(1)).insert_axis(Axis(1));
        let d_s: Array2<f64> = (d_p + delta) * p * scale;
        d_q = d_s.dot(&k).into_iter().fold(d_q, f64::max);
        d_k += &d_s.t().dot(&q);
        d_v += &p.t().dot(&g);
        assert_eq!(d_s.nrows(), q_len);
    }
    [d_q, d_k.into_iter().fold(0.0, f64::max), d_v.into_iter().fold(0.0, f64::max)].map(|floor| 1e-6 * floor)
}

#[test]
fn f32_gradients_are_within_twice_the_error_of_a_plain_computation() {
    let worst_of = |got: &Array4<f64>, right: &Array4<f64>| {
        let errors = got.iter().zip(right).map(|(x, y)| (x - y).abs());
        errors.fold(0.0, |worst, error| if error > worst || error.is_nan() { error } else { worst })
    };
    let errors = |got: &[&Array4<f64>; 3], right: &Gradients<f64>| {
        let right = [&right.d_q, &right.d_k, &right.d_v];
        [0, 1, 2].map(|n| worst_of(got[n], right[n]))
    };
    let mut worst: BTreeMap<String, (f64, String)> = BTreeMap::new();
    let mut beyond = Vec::new();
    for (kind, lengths) in KINDS.into_iter().flat_map(|kind| LENGTHS.map(|lengths| (kind, lengths))) {
        for head_dim in HEAD_DIMS {
            let core = case(kind, lengths, head_dim);
            let d_context = normal(&mut Seeded(head_dim as u64), (1, HEADS, lengths.0, core.v.dim().3));
            let right = core.right_gradients(&d_context);
            let textbook =
                core.gradients(Way::new(Precision::F32, Path::Reference, Keep::Nothing), &d_context).unwrap();
            let dense = dense_gradients(&core, &d_context);
            let plain = [
                errors(&[&dense[0], &dense[1], &dense[2]], &right),
                errors(&[&textbook.d_q, &textbook.d_k, &textbook.d_v], &right),
            ];
            let floors = gradient_floors(&core, &core.oracle(), &d_context);
            // Query tiles move no bit here.
            for way in tiled_ways(Precision::F32).into_iter().filter(|way| way.query_tile.is_none()) {
                let got = core.gradients(way, &d_context).unwrap();
                let got = errors(&[&got.d_q, &got.d_k, &got.d_v], &right);
                for (n, name) in ["d_q", "d_k", "d_v"].into_iter().enumerate() {
                    let ratio = got[n] / (2.0 * plain[0][n].max(plain[1][n])).max(floors[n]);
                    let text = format!(
                        "{ratio:.3}: {name}, {way}, {kind:?}, lengths {lengths:?}, head_dim {head_dim}: error {:e}, plain \
                         {:e} and {:e}, floor {:e}",
                        got[n], plain[0][n], plain[1][n], floors[n]
                    );
                    // NaN is beyond every bound.
                    if ratio.is_nan() || ratio > 1.0 {
                        beyond.push(text.clone());
                    }
                    let level = way.level.map_or("best".to_owned(), |level| level.to_string());
                    let worst = worst.entry(format!("{level} {name}")).or_insert((-1.0, String::new()));
                    if ratio > worst.0 {
                        *worst = (ratio, text);
                    }
                }
            }
        }
    }
    for (_, text) in worst.values() {
        println!("{text}");
    }
    assert!(beyond.is_empty(), "beyond the bound:\n{}", beyond.join("\n"));
}
