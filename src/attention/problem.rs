//! A checked call: every path starts from here and trusts it.

use ndarray::{ArrayRef4, ArrayView1, ArrayView2, ArrayView4, s};
use std::borrow::Cow;

use super::Options;
use super::bias::{Bias, ScoreRow, Table};
use super::distance::Span;
use super::dropout::{Dropout, HeadDropout};
use super::reference::dot;
use super::relative_keys::RelativeKeys;
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::heads::HeadMap;
use crate::kernels::Level;
use crate::mask::{BoundMask, HeadMask, Held};
use crate::position::whole;

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

    /// How many numbers all keys and values are.
    pub(crate) fn kv_numbers(&self) -> f64 {
        let keys = [self.batch, self.num_kv_heads, self.kv_len].iter().fold(1.0, |product, &n| product * n as f64);
        keys * (self.head_dim as f64 + self.value_dim as f64)
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
    pub(crate) dropout: Option<Dropout<T>>,
    pub(crate) level: Level,
    /// Whether the caller asked for it by name.
    pub(crate) named: bool,
    pub(crate) mask: BoundMask<'a>,
    pub(crate) bias: Option<Bias<'a, T>>,
    pub(crate) relative_keys: Option<RelativeKeys<'a, T>>,
    sinks: Option<ArrayView1<'a, T>>,
}

impl<'a, T: Element> Rules<'a, T> {
    /// Checks everything but the arrays of queries, keys and values. `held` says which keys there are.
    pub(crate) fn new(dims: Dims, options: &'a Options<'_, T>, held: Held<'a>) -> Result<Self> {
        let num_heads = dims.num_heads;
        let mask = BoundMask::new(options.chosen_mask(), dims.scores(), held)?;
        if options.query_tile == Some(0) {
            return Err(Error::value("query_tile", "at least 1", 0));
        }
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
            dropout: options.dropout.map_or(Ok(None), |(rate, seed)| Dropout::new(rate, seed))?,
            level: options.level.map_or_else(|| Ok(Level::best()), check_level)?,
            named: options.level.is_some(),
            bias: Bias::new(options, dims, &mask)?,
            relative_keys: match &options.relative_keys {
                Some(keys) => Some(RelativeKeys::new(keys.view(), dims.head_dim, &mask)?),
                None => None,
            },
            mask,
            sinks: options.sinks.as_ref().map(|sinks| check_sinks(sinks.view(), num_heads)).transpose()?,
        })
    }
}

impl<'a, T: Element> Rules<'a, T> {
    /// Prepares what depends on distances, in `room`. Without it, biases are looked up pair by pair. Where keys will be
    /// added, there is room for the distances to all of them.
    pub(crate) fn lay_out(&mut self, dims: &Dims, room: &'a mut Vec<T>) -> Result<()> {
        if self.bias.is_none() && self.relative_keys.is_none() {
            return Ok(());
        }
        let span = self.span(dims);
        let most = self.bounded(match self.room() {
            Some(keys) => span.union(Span::new(whole(keys), whole(keys), 0..keys)),
            None => span,
        });
        if let Some(keys) = &mut self.relative_keys {
            keys.trim(span, most);
        }
        self.bias.as_mut().map_or(Ok(()), |bias| bias.lay_out(dims.num_heads, [span, most], room))
    }

    /// The distances of the call's pairs.
    fn span(&self, dims: &Dims) -> Span {
        let of_entry = |entry: usize| {
            let mask = self.mask.head(entry, 0);
            Span::new(mask.position(0), mask.position(dims.q_len.saturating_sub(1)), 0..dims.kv_len)
        };
        self.bounded((0..dims.batch).map(of_entry).reduce(Span::union).unwrap_or(Span { lowest: 0, highest: 0 }))
    }

    /// A ring is far longer than what its queries see.
    fn bounded(&self, span: Span) -> Span {
        match self.mask.last() {
            Some(last) => Span { lowest: span.lowest.max(-last), highest: span.highest.min(0) },
            None => span,
        }
    }
}

impl<'a, T: Copy> Rules<'a, T> {
    /// The mask of a batch entry, for head 0.
    pub(crate) fn mask(&self, entry: usize) -> HeadMask<'a> {
        self.mask.head(entry, 0)
    }

    /// How many keys there is room for, if later calls will have more of them.
    pub(crate) fn room(&self) -> Option<usize> {
        self.mask.room()
    }

    pub(crate) fn sink(&self, head: usize) -> Option<T> {
        self.sinks.as_ref().map(|sinks| sinks[head])
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
        Self::with_held([q, k, v], options, Held::ALL)
    }

    /// A call in which not every batch entry has all keys of the arrays.
    pub(crate) fn with_held(
        [q, k, v]: [&'a ArrayRef4<T>; 3],
        options: &'a Options<'_, T>,
        held: Held<'a>,
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
        Ok(Self { dims, q: q.view(), k: k.view(), v: v.view(), rules: Rules::new(dims, options, held)? })
    }

    /// Everything that belongs to one query head of one batch entry.
    pub(crate) fn head(&self, entry: usize, head: usize) -> Head<'a, T> {
        let kv_head = self.rules.heads.read_by(head);
        Head {
            q: self.q.slice_move(s![entry, head, .., ..]),
            k: self.k.slice_move(s![entry, kv_head, .., ..]),
            v: self.v.slice_move(s![entry, kv_head, .., ..]),
            mask: self.rules.mask.head(entry, head),
            bias: self.rules.bias,
            relative_keys: self.rules.relative_keys,
            at: [entry, head],
            sink: self.rules.sink(head),
            dropout: self.rules.dropout.map(|dropout| dropout.head(entry, head)),
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
    bias: Option<Bias<'a, T>>,
    relative_keys: Option<RelativeKeys<'a, T>>,
    /// Batch entry and query head.
    at: [usize; 2],
    pub(crate) sink: Option<T>,
    pub(crate) dropout: Option<HeadDropout<T>>,
}

impl<'a, T: Element> Head<'a, T> {
    /// The key that query i meets besides key j.
    pub(crate) fn relative_key(&self, i: usize, j: usize) -> Option<ArrayView1<'a, T>> {
        self.relative_keys.map(|keys| keys.key(j as i64 - self.mask.position(i)))
    }

    /// The learned bias by distance.
    pub(crate) fn table(&self) -> Option<&Table<'a, T>> {
        self.bias.as_ref().and_then(Bias::table)
    }

    /// The product of query i with key j and the key of their distance.
    pub(crate) fn product(&self, i: usize, j: usize) -> T {
        let (q, product) = (self.q.row(i), dot(self.q.row(i), self.k.row(j)));
        self.relative_key(i, j).map_or(product, |key| product + dot(q, key))
    }

    /// The keys that query i sees, in ascending order, with what the bias adds to each; mask and bias can hide a pair.
    pub(crate) fn visible(&self, i: usize) -> impl Iterator<Item = (usize, T)> + '_ {
        let [entry, head] = self.at;
        let row = ScoreRow { entry, head, i, position: self.mask.position(i) };
        self.mask.runs(i).flatten().filter_map(move |j| {
            let bias = self.bias.map_or(T::zero(), |bias| bias.get(row, j));
            (bias != T::neg_infinity()).then_some((j, bias))
        })
    }
}

pub(crate) fn check_scale<T: Element>(scale: f64) -> Result<T> {
    check_finite("scale", scale)
}

pub(crate) fn check_finite<T: Element>(argument: &'static str, number: f64) -> Result<T> {
    finite(argument, "a finite number", number)
}

pub(crate) fn check_softcap<T: Element>(softcap: f64) -> Result<T> {
    let expected = "a finite number above 0";
    let value: T = finite("softcap", expected, softcap)?;
    if value > T::zero() { Ok(value) } else { Err(Error::value("softcap", expected, shown::<T>(softcap))) }
}

impl<T: Element> Rules<'_, T> {
    /// Whether the products of a call are made by a matrix unit.
    pub(crate) fn use_unit(&self, dims: &Dims) -> bool {
        let rows = dims.q_len.saturating_mul(self.heads.largest_group());
        T::kernels(self.level).uses_unit(rows, dims.head_dim, self.named)
    }
}

fn check_level(level: Level) -> Result<Level> {
    if level.is_available() {
        return Ok(level);
    }
    let available: Vec<String> = Level::available().iter().map(Level::to_string).collect();
    Err(Error::Level { available: available.join(", "), got: level.to_string() })
}

/// The number in the type of the call; one that only `f64` can hold is refused.
fn finite<T: Element>(argument: &'static str, expected: &'static str, number: f64) -> Result<T> {
    let value = T::from_f64(number);
    if value.is_finite() { Ok(value) } else { Err(Error::value(argument, expected, shown::<T>(number))) }
}

/// A refused number in few digits, with what it would be in the type of the call where that is another number.
fn shown<T: Element>(number: f64) -> String {
    let value = T::from_f64(number);
    match number.is_finite() && (value.is_infinite() || value.is_zero() && number != 0.0) {
        true => format!("{number:e}, which is {value} in {}", std::any::type_name::<T>()),
        false => format!("{number}"),
    }
}

fn check_sinks<T>(sinks: ArrayView1<'_, T>, num_heads: usize) -> Result<ArrayView1<'_, T>> {
    check_shape("sinks", "[num_heads]", [Some(num_heads)], sinks.shape())?;
    Ok(sinks)
}
