//! A checked call: every path starts from here and trusts it.

use ndarray::{ArrayRef4, ArrayView1, ArrayView2, ArrayView4, s};
use std::borrow::Cow;

use super::Options;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::heads::HeadMap;
use crate::mask::{BoundMask, HeadMask, Mask};

/// The lengths of one call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Dims {
    pub(crate) batch: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) q_len: usize,
    pub(crate) kv_len: usize,
    pub(crate) head_dim: usize,
    pub(crate) value_dim: usize,
}

impl Dims {
    /// `[batch, num_heads, q_len, kv_len]`
    pub(crate) fn scores(&self) -> [usize; 4] {
        [self.batch, self.num_heads, self.q_len, self.kv_len]
    }

    /// The work of all pairs, as far as it decides on threads.
    pub(crate) fn flop(&self) -> f64 {
        let pairs = self.scores().iter().fold(1.0, |product, &n| product * n as f64);
        2.0 * pairs * (self.head_dim as f64 + self.value_dim as f64)
    }
}

/// What the options come to for given lengths.
pub(crate) struct Rules<'a, T> {
    pub(crate) heads: Cow<'a, HeadMap>,
    pub(crate) scale: T,
    pub(crate) softcap: Option<T>,
    mask: BoundMask<'a>,
    /// `[batch, num_heads, q_len, kv_len]`, any axis may have length 1.
    bias: Option<ArrayView4<'a, T>>,
    sinks: Option<ArrayView1<'a, T>>,
}

/// The mask of a call that names none.
static NO_MASK: Mask = Mask::NONE;

impl<'a, T: Element> Rules<'a, T> {
    /// Checks everything but the arrays of queries, keys and values.
    pub(crate) fn new(dims: Dims, options: &'a Options<'_, T>) -> Result<Self> {
        let [batch, num_heads, q_len, kv_len] = dims.scores();
        Ok(Self {
            heads: match options.heads {
                Some(map) => Cow::Borrowed(map),
                None => Cow::Owned(HeadMap::grouped(num_heads, dims.num_kv_heads)?),
            },
            scale: match options.scale {
                Some(scale) => check_scale(scale)?,
                // Heads of no width have all scores 0, whatever the scale.
                None => T::from_f64((dims.head_dim.max(1) as f64).sqrt().recip()),
            },
            softcap: options.softcap.map(check_softcap).transpose()?,
            mask: options.mask.unwrap_or(&NO_MASK).bind(batch, num_heads, q_len, kv_len)?,
            bias: options.bias.as_ref().map(|bias| check_bias(bias.view(), dims.scores())).transpose()?,
            sinks: options.sinks.as_ref().map(|sinks| check_sinks(sinks.view(), num_heads)).transpose()?,
        })
    }
}

/// A checked call.
pub(crate) struct Problem<'a, T> {
    pub(crate) dims: Dims,
    /// `[batch, num_heads, q_len, head_dim]`
    pub(crate) q: ArrayView4<'a, T>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`
    pub(crate) k: ArrayView4<'a, T>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`
    pub(crate) v: ArrayView4<'a, T>,
    pub(crate) rules: Rules<'a, T>,
}

impl<'a, T: Element> Problem<'a, T> {
    pub(crate) fn new(
        q: &'a ArrayRef4<T>,
        k: &'a ArrayRef4<T>,
        v: &'a ArrayRef4<T>,
        options: &'a Options<'_, T>,
    ) -> Result<Self> {
        let (batch, num_heads, q_len, head_dim) = q.dim();
        let (_, num_kv_heads, kv_len, _) = k.dim();
        let value_dim = v.dim().3;
        let q_heads = options.heads.map(HeadMap::num_heads);
        let kv_heads = options.heads.map(HeadMap::num_kv_heads);
        check_shape("q", "[batch, num_heads, q_len, head_dim]", [None, q_heads, None, None], q.shape())?;
        let expected = [Some(batch), kv_heads, None, Some(head_dim)];
        check_shape("k", "[batch, num_kv_heads, kv_len, head_dim]", expected, k.shape())?;
        let expected = [Some(batch), Some(num_kv_heads), Some(kv_len), None];
        check_shape("v", "[batch, num_kv_heads, kv_len, value_dim]", expected, v.shape())?;
        let dims = Dims { batch, num_heads, num_kv_heads, q_len, kv_len, head_dim, value_dim };
        Ok(Self { dims, q: q.view(), k: k.view(), v: v.view(), rules: Rules::new(dims, options)? })
    }

    /// The rules of a batch entry, for head 0.
    pub(crate) fn mask(&self, entry: usize) -> HeadMask<'a> {
        self.rules.mask.head(entry, 0)
    }

    pub(crate) fn has_bias(&self) -> bool {
        self.rules.bias.is_some()
    }

    pub(crate) fn sink(&self, head: usize) -> Option<T> {
        self.rules.sinks.as_ref().map(|sinks| sinks[head])
    }

    /// Everything that belongs to one query head of one batch entry.
    pub(crate) fn head(&self, entry: usize, head: usize) -> Head<'_, T> {
        let kv_head = self.rules.heads.kv_head(head);
        Head {
            q: self.q.slice(s![entry, head, .., ..]),
            k: self.k.slice(s![entry, kv_head, .., ..]),
            v: self.v.slice(s![entry, kv_head, .., ..]),
            mask: self.rules.mask.head(entry, head),
            bias: self.rules.bias.as_ref().map(|bias| {
                let at = |axis: usize, index: usize| if bias.shape()[axis] == 1 { 0 } else { index };
                bias.slice(s![at(0, entry), at(1, head), .., ..])
            }),
            sink: self.sink(head),
        }
    }
}

/// One query head of one batch entry.
#[derive(Clone, Copy)]
pub(crate) struct Head<'a, T> {
    /// `[q_len, head_dim]`
    pub(crate) q: ArrayView2<'a, T>,
    /// `[kv_len, head_dim]`
    pub(crate) k: ArrayView2<'a, T>,
    /// `[kv_len, value_dim]`
    pub(crate) v: ArrayView2<'a, T>,
    pub(crate) mask: HeadMask<'a>,
    /// `[q_len, kv_len]`, any axis may have length 1.
    bias: Option<ArrayView2<'a, T>>,
    pub(crate) sink: Option<T>,
}

impl<T: Element> Head<'_, T> {
    /// The bias of query i and the keys from `first` on; zeros without a bias.
    pub(crate) fn copy_bias(&self, i: usize, first: usize, to: &mut [T]) {
        let Some(bias) = self.bias else { return to.fill(T::zero()) };
        let row = bias.row(i.min(bias.nrows() - 1));
        match row.as_slice() {
            Some(&[single]) => to.fill(single),
            Some(row) => to.copy_from_slice(&row[first..first + to.len()]),
            None => to.iter_mut().enumerate().for_each(|(j, to)| *to = row[(first + j).min(row.len() - 1)]),
        }
    }

    /// The keys that query i sees, in ascending order, with what the bias adds to each; mask and bias can hide a pair.
    pub(crate) fn visible(&self, i: usize) -> impl Iterator<Item = (usize, T)> + '_ {
        self.mask.runs(i).flatten().filter_map(move |j| {
            let bias = self.bias.map_or(T::zero(), |bias| {
                let (rows, keys) = bias.dim();
                bias[[i.min(rows - 1), j.min(keys - 1)]]
            });
            (bias != T::neg_infinity()).then_some((j, bias))
        })
    }
}

pub(crate) fn check_scale<T: Element>(scale: f64) -> Result<T> {
    finite("scale", "a finite number", scale)
}

pub(crate) fn check_softcap<T: Element>(softcap: f64) -> Result<T> {
    let expected = "a finite number above 0";
    let value: T = finite("softcap", expected, softcap)?;
    if value > T::zero() { Ok(value) } else { Err(Error::value("softcap", expected, softcap)) }
}

/// The number in the type of the call; one that only `f64` can hold is refused.
fn finite<T: Element>(argument: &'static str, expected: &'static str, number: f64) -> Result<T> {
    let value = T::from_f64(number);
    if value.is_finite() { Ok(value) } else { Err(Error::value(argument, expected, number)) }
}

fn check_bias<T>(bias: ArrayView4<'_, T>, dims: [usize; 4]) -> Result<ArrayView4<'_, T>> {
    let fits = bias.shape().iter().zip(dims).all(|(&have, want)| have == 1 || have == want);
    let axes = "[batch, num_heads, q_len, kv_len]";
    let error = || Error::Shape { argument: "bias", axes, expected: dims.into(), got: bias.shape().to_vec() };
    if fits { Ok(bias) } else { Err(error()) }
}

fn check_sinks<T>(sinks: ArrayView1<'_, T>, num_heads: usize) -> Result<ArrayView1<'_, T>> {
    check_shape("sinks", "[num_heads]", [Some(num_heads)], sinks.shape())?;
    Ok(sinks)
}
