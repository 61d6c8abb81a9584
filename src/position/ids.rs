//! The positions of the tokens of a call: counted from an offset, or named one by one.

use ndarray::{ArrayRef2, ArrayView2};

use crate::error::{Error, Result, check_shape};

/// Where the tokens of a call stand.
///
/// ```
/// use multihead::{ndarray::array, position::Positions};
/// let after_a_cache = Positions::offset(100); // 100, 101, 102, ...
/// let ids = array![[0, 1, 2], [0, 0, 1]];
/// let one_by_one = Positions::ids(&ids); // [batch, len]
/// # let _ = (after_a_cache, one_by_one);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Positions<'a>(Kind<'a>);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind<'a> {
    Offset(usize),
    /// `[batch, len]`, or `[1, len]` for all entries.
    Ids(ArrayView2<'a, usize>),
    /// The first position of each entry.
    After(&'a [usize]),
}

impl Default for Positions<'_> {
    /// 0, 1, 2, ...
    fn default() -> Self {
        Self::offset(0)
    }
}

impl<'a> Positions<'a> {
    /// The first token stands at `offset`, each other one behind the one before it.
    ///
    /// ```
    /// use multihead::position::Positions;
    /// assert_eq!(Positions::offset(0), Positions::default());
    /// ```
    #[doc(alias = "past_length")]
    pub fn offset(offset: usize) -> Self {
        Self(Kind::Offset(offset))
    }

    /// `ids: [batch, len]`, or `[1, len]` for all batch entries alike.
    ///
    /// ```
    /// use multihead::{ndarray::array, position::Positions};
    /// let ids = array![[7, 8, 3]];
    /// let positions = Positions::ids(&ids);
    /// # let _ = positions;
    /// ```
    #[doc(alias = "position_ids")]
    pub fn ids(ids: &'a ArrayRef2<usize>) -> Self {
        Self(Kind::Ids(ids.view()))
    }

    /// Entry b goes on from position `lengths[b]`, behind what a cache holds.
    pub(crate) fn after(lengths: &'a [usize]) -> Self {
        Self(Kind::After(lengths))
    }

    /// The same positions, borrowed for less long.
    pub(crate) fn reborrow(&self) -> Positions<'_> {
        Positions(match &self.0 {
            Kind::Offset(offset) => Kind::Offset(*offset),
            Kind::Ids(ids) => Kind::Ids(ids.view()),
            Kind::After(lengths) => Kind::After(lengths),
        })
    }

    /// Checks that there is a position for each token.
    pub(crate) fn check(&self, argument: &'static str, batch: usize, len: usize) -> Result<()> {
        let room = |offset: usize| match offset.checked_add(len) {
            Some(_) => Ok(()),
            None => Err(Error::value(argument, "an offset that leaves room for the tokens behind it", offset)),
        };
        match self.0 {
            Kind::Offset(offset) => room(offset),
            Kind::After(lengths) => {
                check_shape(argument, "[batch]", [Some(batch)], &[lengths.len()])?;
                lengths.iter().try_for_each(|&length| room(length))
            }
            Kind::Ids(ids) => {
                let entries = if ids.nrows() == 1 { 1 } else { batch };
                check_shape(argument, "[batch, len]", [Some(entries), Some(len)], ids.shape())
            }
        }
    }

    /// How many batch entries differ: 1 if all stand alike.
    pub(crate) fn entries(&self) -> usize {
        match self.0 {
            Kind::Offset(_) => 1,
            Kind::Ids(ids) => ids.nrows(),
            Kind::After(lengths) if lengths.windows(2).all(|pair| pair[0] == pair[1]) => 1,
            Kind::After(lengths) => lengths.len(),
        }
    }

    /// The position of a token; the arguments have been checked.
    pub(crate) fn at(&self, entry: usize, token: usize) -> usize {
        match self.0 {
            Kind::Offset(offset) => offset + token,
            Kind::Ids(ids) => ids[[entry, token]],
            Kind::After(lengths) => lengths.get(entry).map_or(0, |length| length + token),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::array;

    #[test]
    fn offsets_and_ids_are_checked() {
        assert_eq!(Positions::offset(usize::MAX - 4).check("positions", 3, 4), Ok(()));
        let text = |positions: Positions<'_>| positions.check("positions", 3, 4).unwrap_err().to_string();
        assert_eq!(
            text(Positions::offset(usize::MAX - 3)),
            "positions: expected an offset that leaves room for the tokens behind it, got 18446744073709551612"
        );
        let ids = array![[0, 1, 2, 3], [0, 1, 2, 3]];
        assert_eq!(text(Positions::ids(&ids)), "positions: expected [batch, len] = [3, 4], got [2, 4]");
        assert_eq!(Positions::ids(&ids).check("positions", 2, 4), Ok(()));
        assert!(Positions::ids(&ids).check("positions", 2, 3).is_err());
        let all = array![[5, 6, 7, 8]];
        assert_eq!(Positions::ids(&all).check("positions", 3, 4), Ok(()));
        assert_eq!(Positions::ids(&all).at(0, 2), 7);
    }
}
