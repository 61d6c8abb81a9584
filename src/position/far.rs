//! Positions and lengths as signed numbers that can be added and subtracted.

/// Positions and lengths are kept within this bound, so that sums of a few of them never wrap. No array is as long.
pub(crate) const FAR: i64 = i64::MAX / 8;

/// A position or length, within the bound.
pub(crate) fn whole(n: usize) -> i64 {
    i64::try_from(n).map_or(FAR, |n| n.min(FAR))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_kept_within_the_bound() {
        assert_eq!([0, 7, FAR as usize - 1].map(whole), [0, 7, FAR - 1]);
        assert_eq!([FAR as usize, FAR as usize + 1, i64::MAX as usize, usize::MAX].map(whole), [FAR; 4]);
    }
}
