//! Rules that leave each query one interval of keys: causal, window, key ranges, query lengths.
//!
//! All of them have slope 1 or 0 in the query index, so any number of them over one batch entry comes down to a few
//! numbers: query i, if it is valid, sees the keys `max(start, i + lower) ..= min(end - 1, i + upper)`.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result, check_shape};
use crate::position::{FAR, whole};

/// Where query 0 stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Align {
    /// The last query stands at the last valid key.
    BottomRight,
    /// Query 0 stands at this key position.
    Offset(usize),
}

impl fmt::Display for Align {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::BottomRight => f.write_str("causal"),
            Self::Offset(0) => f.write_str("causal_top_left"),
            Self::Offset(n) => write!(f, "causal_offset({n})"),
        }
    }
}

/// Keys from `pos - left` to `pos + right`, both ends in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Band {
    /// What `pos` counts from; `None` follows the causal rule that the band is combined with.
    align: Option<Align>,
    left: i64,
    right: i64,
}

impl Band {
    pub(super) fn causal(align: Align) -> Self {
        Self { align: Some(align), left: FAR, right: 0 }
    }

    pub(super) fn window(left: usize, right: usize) -> Self {
        Self { align: None, left: whole(left), right: whole(right) }
    }

    pub(super) fn nothing() -> Self {
        Self { align: None, left: 0, right: -1 }
    }

    /// The last n > 0 keys up to the bottom-right position, whatever causal rule there is.
    pub(super) fn last_of_cache(n: usize) -> Self {
        Self { align: Some(Align::BottomRight), left: whole(n) - 1, right: 0 }
    }
}

impl fmt::Display for Band {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = |n: i64| if n == FAR { "MAX".to_owned() } else { n.to_string() };
        match (self.align, self.right) {
            (Some(align), _) => align.fmt(f),
            (None, -1) => f.write_str("last_n(0)"),
            (None, _) => write!(f, "window({}, {})", side(self.left), side(self.right)),
        }
    }
}

/// The alignment that all causal rules share; bottom-right if there is none.
///
/// # Errors
/// [`Error::Alignment`] if two of them disagree.
pub(super) fn common_alignment(bands: &[Band]) -> Result<Align> {
    let mut aligns = bands.iter().filter_map(|band| band.align);
    let first = aligns.next().unwrap_or(Align::BottomRight);
    match aligns.find(|&other| other != first) {
        Some(second) => Err(Error::Alignment { first: first.to_string(), second: second.to_string() }),
        None => Ok(first),
    }
}

/// The alignment that windows count from; that of the first rule, where nothing counts.
///
/// # Errors
/// As [`common_alignment`], if there is a window.
pub(super) fn window_alignment(bands: &[Band]) -> Result<Align> {
    match bands.iter().any(|band| band.align.is_none()) {
        true => common_alignment(bands),
        false => Ok(bands.iter().find_map(|band| band.align).unwrap_or(Align::BottomRight)),
    }
}

/// The valid keys of each batch entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct KeyRanges {
    constructor: &'static str,
    ranges: Vec<Range<usize>>,
}

impl KeyRanges {
    pub(super) fn new(constructor: &'static str, ranges: Vec<Range<usize>>) -> Self {
        Self { constructor, ranges }
    }

    pub(super) fn check(&self, batch: usize, kv_len: usize) -> Result<()> {
        check_shape(self.constructor, "[batch]", [Some(batch)], &[self.ranges.len()])?;
        match self.ranges.iter().enumerate().find(|(_, r)| r.start > r.end || r.end > kv_len) {
            None => Ok(()),
            Some((entry, range)) => {
                Err(Error::KeyRange { argument: self.constructor, entry, start: range.start, end: range.end, kv_len })
            }
        }
    }
}

impl fmt::Display for KeyRanges {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.constructor)?;
        if self.constructor == "key_lengths" {
            f.debug_list().entries(self.ranges.iter().map(|r| r.end)).finish()
        } else {
            f.debug_list().entries(&self.ranges).finish()
        }
    }
}

/// The valid queries of each batch entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct QueryLengths(Vec<usize>);

impl QueryLengths {
    pub(super) fn new(lengths: &[usize]) -> Self {
        Self(lengths.to_vec())
    }

    pub(super) fn check(&self, batch: usize, q_len: usize) -> Result<()> {
        check_lengths("query_lengths", &self.0, batch, (q_len, "q_len"))
    }

    /// How many queries of the entry are valid.
    pub(super) fn of(&self, entry: usize) -> Option<usize> {
        self.0.get(entry).copied()
    }
}

/// Checks that there is a length for each batch entry, and none above `most`, which users know as `name`.
pub(crate) fn check_lengths(
    argument: &'static str,
    lengths: &[usize],
    batch: usize,
    (most, name): (usize, &str),
) -> Result<()> {
    check_shape(argument, "[batch]", [Some(batch)], &[lengths.len()])?;
    match lengths.iter().find(|&&length| length > most) {
        None => Ok(()),
        Some(length) => Err(Error::value(argument, format!("no length above {name}"), format!("{length} of {most}"))),
    }
}

impl fmt::Display for QueryLengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "query_lengths {:?}", self.0)
    }
}

/// What the rules of one batch entry are about.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub(super) entry: usize,
    /// Valid queries.
    pub(super) queries: usize,
    /// Keys that exist.
    pub(super) keys: usize,
}

/// All structural rules of one batch entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Interval {
    /// Valid queries.
    queries: i64,
    /// Valid keys, before causal rules and windows.
    start: i64,
    end: i64,
    /// Query i sees the keys from `i + lower` to `i + upper`, both ends in.
    lower: i64,
    upper: i64,
    /// Where query 0 stands among the keys.
    origin: i64,
}

impl Interval {
    pub(super) fn new(
        bands: impl IntoIterator<Item = Band>,
        key_ranges: &[KeyRanges],
        window_align: Align,
        extent: Extent,
    ) -> Self {
        let (mut start, mut end) = (0, extent.keys);
        for ranges in key_ranges {
            if let Some(range) = ranges.ranges.get(extent.entry) {
                (start, end) = (start.max(range.start), end.min(range.end));
            }
        }
        // An empty intersection has no last key; it counts as ending where it starts.
        let (start, end) = (whole(start), whole(end.max(start)));
        let queries = whole(extent.queries);
        let pos = |align| match align {
            Align::BottomRight => end - queries,
            Align::Offset(offset) => whole(offset),
        };
        let (mut lower, mut upper) = (-FAR, FAR);
        for band in bands {
            let pos = pos(band.align.unwrap_or(window_align));
            // An open side stays open, wherever the position is.
            if band.left < FAR {
                lower = lower.max(pos - band.left);
            }
            if band.right < FAR {
                upper = upper.min(pos + band.right);
            }
        }
        Self { queries, start, end, lower, upper, origin: pos(window_align) }
    }

    /// The key position of query i, which can lie before the first key or behind the last.
    pub(crate) fn position(&self, i: usize) -> i64 {
        self.origin + whole(i)
    }

    /// The key position of query 0 if the last query is at the last key.
    pub(super) fn bottom_right(&self) -> i64 {
        self.end - self.queries
    }

    /// The keys that query i sees.
    pub(crate) fn keys(&self, i: usize) -> Range<usize> {
        let i = whole(i);
        let start = self.start.max(i + self.lower).max(0);
        // Both ends grow with i, also where there is no valid query any more.
        let start = if i < self.queries { start } else { start.max(self.end) };
        let end = self.end.min(i + self.upper + 1).max(start);
        // Both lie in 0..=kv_len or are equal, so they fit.
        start as usize..end as usize
    }

    /// The keys that some query may see.
    pub(super) fn valid_keys(&self) -> Range<usize> {
        // Both lie in 0..=kv_len, so they fit.
        self.start as usize..self.end as usize
    }

    /// The queries that see key j.
    pub(super) fn queries(&self, j: usize) -> Range<usize> {
        let j = whole(j);
        if !(self.start..self.end).contains(&j) {
            return 0..0;
        }
        let first = (j - self.upper).clamp(0, self.queries);
        first as usize..(j - self.lower + 1).clamp(first, self.queries) as usize
    }

    /// The number of pairs of these queries and keys that are seen, at most `u64::MAX`.
    pub(super) fn pairs(&self, rows: Range<usize>, keys: Range<usize>) -> u64 {
        let Self { lower, upper, queries, .. } = *self;
        let (start, end, upper) = (self.start.max(whole(keys.start)), self.end.min(whole(keys.end)), upper + 1);
        // The count of query i is a line between the places where one of its two bounds starts or stops to move or
        // where the bounds meet.
        let seen = |i: i64| ((i + upper).min(end) - (i + lower).max(start)).max(0);
        let last = whole(rows.end).min(queries);
        let first = whole(rows.start).min(last);
        let mut cuts =
            [first, start - lower, start - upper, end - lower, end - upper, last].map(|i| i.clamp(first, last));
        cuts.sort_unstable();
        let lines = cuts.windows(2).filter(|cut| cut[0] < cut[1]);
        let twice = lines.map(|cut| i128::from(seen(cut[0]) + seen(cut[1] - 1)) * i128::from(cut[1] - cut[0]));
        u64::try_from(twice.sum::<i128>() / 2).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXTENT: Extent = Extent { entry: 0, queries: 2, keys: 9 };

    fn interval(bands: &[Band], q_len: usize, kv_len: usize) -> Interval {
        let extent = Extent { entry: 0, queries: q_len, keys: kv_len };
        Interval::new(bands.iter().copied(), &[], window_alignment(bands).unwrap(), extent)
    }

    #[test]
    fn open_sides_do_not_wrap() {
        for side in [usize::MAX, usize::MAX / 2, i64::MAX as usize, i64::MAX as usize - 1] {
            let band = Band::window(side, side);
            assert_eq!(interval(&[band], 3, 5).keys(0), 0..5);
            assert_eq!(interval(&[band, Band::causal(Align::Offset(side))], 3, 5).keys(2), 0..5);
        }
    }

    #[test]
    fn far_offset_with_a_window_sees_nothing() {
        let bands = [Band::causal(Align::Offset(usize::MAX)), Band::window(3, 0)];
        assert!(interval(&bands, 3, 5).keys(2).is_empty());
    }

    #[test]
    fn valid_range_moves_the_bottom_right_position() {
        let ranges = [KeyRanges::new("key_ranges", std::iter::once(1..4).collect())];
        let interval = Interval::new([Band::causal(Align::BottomRight)], &ranges, Align::BottomRight, EXTENT);
        assert_eq!(interval.keys(0), 1..3);
        assert_eq!(interval.keys(1), 1..4);
    }

    #[test]
    fn pairs_are_counted_by_formula() {
        let sides = [-9, -4, -1, 0, 1, 2, 5, 8, FAR];
        for (lower, upper) in sides.iter().flat_map(|&l| sides.iter().map(move |&u| (-l, u))) {
            for (start, end) in [(0, 0), (0, 1), (0, 6), (2, 5), (7, 7)] {
                for (queries, q_len) in [3, 20].into_iter().flat_map(|n| (0..12).map(move |q_len| (n, q_len))) {
                    let interval = Interval { queries, start, end, lower, upper, origin: 0 };
                    let want: usize = (0..q_len).map(|i| interval.keys(i).len()).sum();
                    assert_eq!(interval.pairs(0..q_len, 0..usize::MAX), want as u64, "{interval:?} {q_len}");
                    let some = (2..q_len).flat_map(|i| interval.keys(i)).filter(|j| (1..4).contains(j)).count();
                    assert_eq!(interval.pairs(2..q_len, 1..4), some as u64, "{interval:?} {q_len}");
                }
                let interval = Interval { queries: 5, start, end, lower, upper, origin: 0 };
                for j in 0..8 {
                    let want = (0..9).filter(|&i| interval.keys(i).contains(&j));
                    assert!(interval.queries(j).eq(want), "{interval:?} {j}");
                }
            }
        }
        let all = Interval { queries: FAR, start: 0, end: FAR, lower: -FAR, upper: FAR, origin: 0 };
        assert_eq!(all.pairs(0..usize::MAX, 0..usize::MAX), u64::MAX);
    }

    #[test]
    fn disjoint_ranges_see_nothing() {
        let ranges = [0..2, 5..7].map(|range| KeyRanges::new("key_ranges", [range].into()));
        let interval = Interval::new([], &ranges, Align::BottomRight, EXTENT);
        assert!(interval.keys(0).is_empty() && interval.keys(1).is_empty());
    }

    #[test]
    fn a_window_cannot_count_from_two_alignments() {
        let causal = [Band::causal(Align::BottomRight), Band::causal(Align::Offset(2))];
        assert!(window_alignment(&causal).is_ok());
        let error = window_alignment(&[causal[0], causal[1], Band::window(1, 0)]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "mask: expected one causal alignment for windows and distances to count from, got causal and causal_offset(2)"
        );
    }
}
