//! Sequences one after the other in one batch entry: each query sees the keys of its own sequence.

use std::fmt;
use std::ops::Range;

use crate::error::{Error, Result};

/// Where the sequences end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Segments {
    /// Ascending; a sequence without tokens ends where it begins.
    ends: Vec<usize>,
}

impl Segments {
    pub(super) fn new(lengths: &[usize]) -> Self {
        let mut end = 0usize;
        let ends = lengths.iter().map(|&length| {
            end = end.saturating_add(length);
            end
        });
        Self { ends: ends.collect() }
    }

    pub(super) fn check(&self, q_len: usize, kv_len: usize) -> Result<()> {
        let total = self.ends.last().copied().unwrap_or(0);
        if total == q_len && total == kv_len {
            return Ok(());
        }
        let got = format!("{total} for {q_len} queries and {kv_len} keys");
        Err(Error::value("segments", "lengths whose sum is q_len and kv_len", got))
    }

    /// Those of `keys` that lie in the sequence of token i; both ends grow with i. Behind the last sequence there are none.
    pub(super) fn within(&self, i: usize, keys: Range<usize>) -> Range<usize> {
        let index = self.ends.partition_point(|&end| end <= i);
        let first = index.checked_sub(1).and_then(|before| self.ends.get(before)).copied().unwrap_or(0);
        let end = self.ends.get(index).copied().unwrap_or(first);
        let start = keys.start.max(first);
        start..keys.end.min(end).max(start)
    }
}

impl fmt::Display for Segments {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        f.write_str("segments ")?;
        f.debug_list().entries(self.ends.iter().zip(starts).map(|(end, start)| end - start)).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_see_their_own_sequence() {
        let segments = Segments::new(&[2, 0, 3, 0]);
        let seen: Vec<_> = (0..7).map(|i| segments.within(i, 0..5)).collect();
        assert_eq!(seen, [0..2, 0..2, 2..5, 2..5, 2..5, 5..5, 5..5]);
        assert_eq!(segments.within(3, 0..3), 2..3);
        assert_eq!(segments.within(3, 0..1), 2..2);
        assert_eq!(segments.to_string(), "segments [2, 0, 3, 0]");
    }

    #[test]
    fn other_sums_are_refused() {
        assert!(Segments::new(&[2, 3]).check(5, 5).is_ok() && Segments::new(&[]).check(0, 0).is_ok());
        let error = Segments::new(&[2, 3]).check(5, 6).unwrap_err().to_string();
        assert_eq!(error, "segments: expected lengths whose sum is q_len and kv_len, got 5 for 5 queries and 6 keys");
        assert!(Segments::new(&[usize::MAX, 5]).check(4, 4).is_err());
    }
}
