//! The rules of masks, written out pair by pair and without a thought for speed.

use multihead::Mask;
use multihead::ndarray::{Array2, Array4, ArrayRef4, ArrayView4, Axis, s};
use proptest::prelude::*;
use std::ops::Range;

use super::Seeded;

/// `[batch, num_heads, q_len, kv_len]`
pub(crate) type Dims = [usize; 4];

/// One rule, with the arguments of the constructor that it stands for.
#[derive(Debug, Clone)]
pub(crate) enum Rule {
    Causal,
    TopLeft,
    Offset(usize),
    Window(usize, usize),
    LastN(usize),
    KeyLengths(Vec<usize>),
    KeyRanges(Vec<Range<usize>>),
    QueryLengths(Vec<usize>),
    KeepKeys(Array2<bool>),
    Keep(Array4<bool>),
    Drop(Array4<bool>),
}

/// Where query 0 stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    BottomRight,
    Offset(usize),
}

/// A side of a window that no array is long enough to meet.
const OPEN: usize = 1 << 60;

impl Rule {
    pub(crate) fn mask(&self) -> Mask {
        match self {
            Self::Causal => Mask::causal(),
            Self::TopLeft => Mask::causal_top_left(),
            Self::Offset(offset) => Mask::causal_offset(*offset),
            Self::Window(left, right) => Mask::window(*left, *right),
            Self::LastN(n) => Mask::last_n(*n),
            Self::KeyLengths(lengths) => Mask::key_lengths(lengths),
            Self::KeyRanges(ranges) => Mask::key_ranges(ranges),
            Self::QueryLengths(lengths) => Mask::query_lengths(lengths),
            Self::KeepKeys(keep) => Mask::keep_keys(keep).unwrap(),
            Self::Keep(keep) => Mask::keep(keep).unwrap(),
            Self::Drop(drop) => Mask::drop(drop).unwrap(),
        }
    }

    fn align(&self) -> Option<Align> {
        match self {
            Self::Causal => Some(Align::BottomRight),
            Self::TopLeft => Some(Align::Offset(0)),
            Self::Offset(offset) => Some(Align::Offset(*offset)),
            _ => None,
        }
    }

    fn is_window(&self) -> bool {
        matches!(self, Self::Window(..) | Self::LastN(_))
    }

    /// The queries of a batch entry that count, where the rule says so.
    fn queries(&self, entry: usize) -> Option<usize> {
        match self {
            Self::QueryLengths(lengths) => Some(lengths[entry]),
            _ => None,
        }
    }

    /// The keys of a batch entry that count at all, where the rule says so.
    fn key_range(&self, entry: usize) -> Option<Range<usize>> {
        match self {
            Self::KeyLengths(lengths) => Some(0..lengths[entry]),
            Self::KeyRanges(ranges) => Some(ranges[entry].clone()),
            _ => None,
        }
    }
}

/// Rules that must all hold.
#[derive(Debug, Clone)]
pub(crate) struct Rules(pub(crate) Vec<Rule>);

impl Rules {
    pub(crate) fn mask(&self) -> Mask {
        self.0.iter().fold(Mask::none(), |mask, rule| mask & rule.mask())
    }

    /// What windows count from; `None` if there are windows and causal rules that disagree.
    pub(crate) fn window_align(&self) -> Option<Align> {
        let mut aligns = self.0.iter().filter_map(Rule::align);
        let first = aligns.next().unwrap_or(Align::BottomRight);
        let agree = aligns.all(|other| other == first);
        (agree || !self.0.iter().any(Rule::is_window)).then_some(first)
    }

    /// What distances count from; `None` if there are causal rules that disagree.
    pub(crate) fn common_align(&self) -> Option<Align> {
        let mut aligns = self.0.iter().filter_map(Rule::align);
        let first = aligns.next().unwrap_or(Align::BottomRight);
        aligns.all(|other| other == first).then_some(first)
    }

    /// The key position of query i.
    pub(crate) fn position(&self, [_, _, q_len, kv_len]: Dims, entry: usize, i: usize) -> i128 {
        let end = self.0.iter().filter_map(|rule| rule.key_range(entry)).map(|range| (range.start, range.end));
        // Ranges that do not meet end where they start.
        let (start, end) = end.fold((0, kv_len), |(start, end), range| (start.max(range.0), end.min(range.1)));
        let queries = self.0.iter().filter_map(|rule| rule.queries(entry)).min().unwrap_or(q_len);
        match self.common_align() {
            Some(Align::Offset(offset)) => i as i128 + offset as i128,
            _ => i as i128 + start.max(end) as i128 - queries as i128,
        }
    }

    /// Whether a rule means the same alone and together with the others: a key range moves the bottom-right position,
    /// query lengths do too, and a causal rule moves a window.
    pub(crate) fn are_independent(&self) -> bool {
        let has = |f: fn(&Rule) -> bool| self.0.iter().any(f);
        let ranges = has(|rule| matches!(rule, Rule::KeyLengths(_) | Rule::KeyRanges(_) | Rule::QueryLengths(_)));
        let bottom_right = has(|rule| rule.is_window() || rule.align() == Some(Align::BottomRight));
        let moved = has(Rule::is_window) && has(|rule| matches!(rule.align(), Some(Align::Offset(_))));
        !(moved || ranges && bottom_right)
    }

    /// Whether query i of head `head` may attend to key j.
    pub(crate) fn sees(&self, [_, _, q_len, kv_len]: Dims, [entry, head, i, j]: [usize; 4]) -> bool {
        let wide = |n: usize| n as i128;
        let ranges = || self.0.iter().filter_map(|rule| rule.key_range(entry));
        let end = ranges().map(|range| range.end).min().unwrap_or(kv_len);
        let queries = self.0.iter().filter_map(|rule| rule.queries(entry)).min().unwrap_or(q_len);
        let pos = |align| match align {
            Align::BottomRight => wide(i) + wide(end) - wide(queries),
            Align::Offset(offset) => wide(i) + wide(offset),
        };
        let window = |left: usize, right: usize| {
            let pos = pos(self.window_align().unwrap());
            (left >= OPEN || pos - wide(left) <= wide(j)) && (right >= OPEN || wide(j) <= pos + wide(right))
        };
        i < queries
            && ranges().all(|range| range.contains(&j))
            && self.0.iter().all(|rule| match rule {
                Rule::Causal | Rule::TopLeft | Rule::Offset(_) => wide(j) <= pos(rule.align().unwrap()),
                Rule::Window(left, right) => window(*left, *right),
                Rule::LastN(n) => *n > 0 && window(n - 1, 0),
                Rule::KeyLengths(_) | Rule::KeyRanges(_) | Rule::QueryLengths(_) => true,
                Rule::KeepKeys(keep) => pair(&over_keys(keep), [entry, head, i, j]),
                Rule::Keep(keep) => pair(keep, [entry, head, i, j]),
                Rule::Drop(drop) => !pair(drop, [entry, head, i, j]),
            })
    }
}

/// `[batch, kv_len] -> [batch, 1, 1, kv_len]`
fn over_keys(keep: &Array2<bool>) -> ArrayView4<'_, bool> {
    keep.view().insert_axis(Axis(1)).insert_axis(Axis(1))
}

/// An axis of length 1 stands for all.
fn pair(array: &ArrayRef4<bool>, index: [usize; 4]) -> bool {
    let at = |axis: usize| if array.shape()[axis] == 1 { 0 } else { index[axis] };
    array[[at(0), at(1), at(2), at(3)]]
}

/// Lengths that meet the edges of words and tiles.
pub(crate) fn some_dims() -> impl Strategy<Value = Dims> {
    let kv_len = prop_oneof![4 => 0..=8usize, 1 => 62..=66usize, 1 => 126..=130usize];
    (0..=3usize, 1..=3usize, 0..=7usize, kv_len).prop_map(|(b, h, q, k)| [b, h, q, k])
}

/// Up to four rules that fit the lengths.
pub(crate) fn rules(dims: Dims) -> impl Strategy<Value = Rules> {
    prop::collection::vec(rule(dims), 0..=4).prop_map(Rules)
}

fn rule(dims: Dims) -> impl Strategy<Value = Rule> {
    let [batch, _, q_len, kv_len] = dims;
    let side = || prop_oneof![8 => 0..=5usize, 1 => Just(usize::MAX), 1 => Just(usize::MAX / 2)];
    let range = (0..=kv_len, 0..=kv_len).prop_map(|(a, b)| a.min(b)..a.max(b));
    let dense = |dims| (any::<u64>(), any::<[bool; 4]>()).prop_map(move |(seed, full)| dense(dims, seed, full));
    prop_oneof![
        Just(Rule::Causal),
        Just(Rule::TopLeft),
        side().prop_map(Rule::Offset),
        (side(), side()).prop_map(|(left, right)| Rule::Window(left, right)),
        side().prop_map(Rule::LastN),
        prop::collection::vec(0..=kv_len, batch).prop_map(Rule::KeyLengths),
        prop::collection::vec(range, batch).prop_map(Rule::KeyRanges),
        prop::collection::vec(0..=q_len, batch).prop_map(Rule::QueryLengths),
        dense([batch, 1, 1, kv_len]).prop_map(|keep| Rule::KeepKeys(keep.slice_move(s![.., 0, 0, ..]))),
        dense(dims).prop_map(Rule::Keep),
        dense(dims).prop_map(Rule::Drop),
    ]
}

/// Random pairs; only the axes in `full` have their own length.
fn dense(dims: Dims, seed: u64, full: [bool; 4]) -> Array4<bool> {
    let [b, h, q, k] = [0, 1, 2, 3].map(|axis| if full[axis] { dims[axis] } else { 1 });
    Seeded(seed).array((b, h, q, k)).mapv(|draw| draw > -0.2)
}
