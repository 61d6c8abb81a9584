//! How many pairs a mask shows, in steps that the lengths of a call do not decide.
//!
//! Lengths cost nothing to name, so they may be as large as they like. What a mask stores bounds the work for a batch entry
//! and head:
//!
//! ```text
//! rules that are met            looked at                                     steps
//! structure alone               each sequence between two ends of segments    a formula each
//! bits for each pair            each query, its words of keys                 stored words
//! bits for each query           each query, its number of keys                stored bits
//! bits for each key             each key, its number of queries               stored bits
//! ```
//!
//! Where queries and keys have bits, but in no rule both, the keys between the two ends of a query's interval are counted
//! once: both ends grow with the query, so what comes in and what falls out is all that is looked at.

use std::ops::Range;

use super::bound::HeadMask;

/// Axes of the pairs of a head.
const QUERIES: usize = 2;
const KEYS: usize = 3;

impl HeadMask<'_> {
    /// The number of pairs that the first `q_len` queries see, at most `u64::MAX`. Dense rules are over these queries and
    /// at least one key.
    pub(super) fn pairs(&self, q_len: usize) -> u64 {
        let rules = &self.mask.dense;
        let [by_query, by_key] = [QUERIES, KEYS].map(|axis| rules.iter().any(|rule| rule.differs_along(axis)));
        if rules.iter().any(|rule| rule.differs_along(QUERIES) && rule.differs_along(KEYS)) {
            sum((0..q_len).map(|i| sum(self.runs(i).map(|run| run.len() as u64))))
        } else if by_query {
            self.pairs_by_query(q_len, by_key)
        } else if by_key {
            let keys = self.interval.valid_keys();
            sum(keys.filter(|&j| self.dense_word(0, j / 64) >> (j % 64) & 1 == 1).map(|j| self.queries(j).len() as u64))
        } else if self.dense_word(0, 0) == 0 {
            0
        } else {
            self.pairs_by_segment(q_len)
        }
    }

    /// Of structure alone.
    fn pairs_by_segment(&self, q_len: usize) -> u64 {
        let (mut start, mut pairs) = (0, 0u64);
        while start < q_len {
            let segments = self.mask.segments.iter();
            let segment = segments.fold(0..q_len, |tokens, segments| segments.within(start, tokens));
            // Without segments the keys are not those of the queries.
            let keys = if self.mask.segments.is_empty() { 0..usize::MAX } else { segment.clone() };
            let end = segment.end.max(start + 1);
            pairs = pairs.saturating_add(self.interval.pairs(start..end, keys));
            start = end;
        }
        pairs
    }

    /// Where no dense rule tells both queries and keys apart; `by_key` if one tells keys apart.
    fn pairs_by_query(&self, q_len: usize, by_key: bool) -> u64 {
        let of_queries = |i: usize| {
            let rules = self.mask.dense.iter().filter(|rule| rule.differs_along(QUERIES));
            rules.fold(u64::MAX, |bits, rule| bits & rule.word(self.entry, self.head, i, 0)) != 0
        };
        let of_keys = |word: usize| {
            let rules = self.mask.dense.iter().filter(|rule| !rule.differs_along(QUERIES));
            rules.fold(u64::MAX, |bits, rule| bits & rule.word(self.entry, self.head, 0, word))
        };
        let all = by_key || of_keys(0) != 0;
        let count = |keys: Range<usize>| match by_key {
            true => sum((keys.start / 64..keys.end.div_ceil(64))
                .map(|word| u64::from((of_keys(word) & Self::wanted(&keys, word)).count_ones()))),
            false if all => keys.len() as u64,
            false => 0,
        };
        let (mut last, mut seen, mut pairs) = (0..0, 0u64, 0u64);
        for i in 0..q_len {
            let keys = self.keys(i);
            seen = seen.saturating_add(count(last.end..keys.end)).saturating_sub(count(last.start..keys.start));
            if of_queries(i) {
                pairs = pairs.saturating_add(seen);
            }
            last = keys;
        }
        pairs
    }

    /// The queries that see key j by structure.
    fn queries(&self, j: usize) -> Range<usize> {
        let queries = self.interval.queries(j);
        // The sequence of a key is that of its queries.
        self.mask.segments.iter().fold(queries, |queries, segments| segments.within(j, queries))
    }
}

fn sum(counts: impl Iterator<Item = u64>) -> u64 {
    counts.fold(0, u64::saturating_add)
}
