//! Which KV head a query head reads: multi-head, grouped-query and multi-query attention as one map.

use crate::error::{Error, Result};

/// The KV head of each query head.
///
/// Multi-head attention has `num_kv_heads = num_heads`, multi-query attention one KV head, and grouped-query attention lies
/// between (Ainslie et al. 2023, <https://arxiv.org/abs/2305.13245>). The general form is any list; it allows groups of
/// different sizes.
///
/// ```
/// use multihead::HeadMap;
/// let gqa = HeadMap::grouped(6, 2)?;
/// assert_eq!((0..6).filter_map(|h| gqa.kv_head(h)).collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
/// let uneven = HeadMap::explicit(&[1, 0, 1], 2)?;
/// assert_eq!(uneven.query_heads(1).collect::<Vec<_>>(), [0, 2]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(into = "written::HeadMap", try_from = "written::HeadMap"))]
pub struct HeadMap {
    num_heads: usize,
    num_kv_heads: usize,
    map: Map,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Map {
    /// Query head h reads KV head `h / group_size`.
    Grouped { group_size: usize },
    /// Query head h reads KV head `kv_of_head[h]`.
    Explicit {
        kv_of_head: Vec<usize>,
        /// The KV heads that some query head reads, in ascending order: there can be any number of others.
        read: Vec<usize>,
    },
}

impl HeadMap {
    /// Equal groups: query head h reads KV head `h / (num_heads / num_kv_heads)`.
    ///
    /// # Errors
    /// [`Error::Value`] if a count is 0, [`Error::HeadGroups`] if `num_heads` is no multiple of `num_kv_heads`.
    ///
    /// ```
    /// use multihead::HeadMap;
    /// let map = HeadMap::grouped(4, 2)?;
    /// assert_eq!([0, 1, 2, 3, 4].map(|h| map.kv_head(h)), [Some(0), Some(0), Some(1), Some(1), None]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn grouped(num_heads: usize, num_kv_heads: usize) -> Result<Self> {
        check_counts(num_heads, num_kv_heads)?;
        if !num_heads.is_multiple_of(num_kv_heads) {
            return Err(Error::HeadGroups { num_heads, num_kv_heads });
        }
        Ok(Self { num_heads, num_kv_heads, map: Map::Grouped { group_size: num_heads / num_kv_heads } })
    }

    /// Any map: query head h reads KV head `kv_of_head[h]`. A KV head that nobody reads is legal. Equal groups in order
    /// make the map of [`HeadMap::grouped`].
    ///
    /// # Errors
    /// [`Error::Value`] if a count is 0, [`Error::KvOfHead`] if an entry is not below `num_kv_heads`.
    ///
    /// ```
    /// use multihead::HeadMap;
    /// let map = HeadMap::explicit(&[1, 0, 1], 2)?;
    /// assert_eq!(map.num_heads(), 3);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn explicit(kv_of_head: &[usize], num_kv_heads: usize) -> Result<Self> {
        check_counts(kv_of_head.len(), num_kv_heads)?;
        if let Some((head, &got)) = kv_of_head.iter().enumerate().find(|&(_, &kv)| kv >= num_kv_heads) {
            return Err(Error::KvOfHead { head, num_kv_heads, got });
        }
        // Equal groups in order are the same map by whatever name.
        let num_heads = kv_of_head.len();
        if num_heads.is_multiple_of(num_kv_heads) {
            let group_size = num_heads / num_kv_heads;
            if kv_of_head.iter().enumerate().all(|(head, &kv)| kv == head / group_size) {
                return Self::grouped(num_heads, num_kv_heads);
            }
        }
        let mut read = kv_of_head.to_vec();
        read.sort_unstable();
        read.dedup();
        let map = Map::Explicit { kv_of_head: kv_of_head.to_vec(), read };
        Ok(Self { num_heads, num_kv_heads, map })
    }

    /// Number of query heads.
    ///
    /// ```
    /// # use multihead::HeadMap;
    /// assert_eq!(HeadMap::grouped(8, 2)?.num_heads(), 8);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn num_heads(&self) -> usize {
        self.num_heads
    }

    /// Number of key and value heads.
    ///
    /// ```
    /// # use multihead::HeadMap;
    /// assert_eq!(HeadMap::grouped(8, 2)?.num_kv_heads(), 2);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn num_kv_heads(&self) -> usize {
        self.num_kv_heads
    }

    /// The KV head that a query head reads, if there is such a query head.
    ///
    /// ```
    /// # use multihead::HeadMap;
    /// let map = HeadMap::grouped(8, 2)?;
    /// assert_eq!((map.kv_head(5), map.kv_head(8)), (Some(1), None));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn kv_head(&self, head: usize) -> Option<usize> {
        (head < self.num_heads).then(|| self.read_by(head))
    }

    /// The KV head that query head `head < num_heads` reads.
    pub(crate) fn read_by(&self, head: usize) -> usize {
        debug_assert!(head < self.num_heads, "query head {head} of {}", self.num_heads);
        match &self.map {
            Map::Grouped { group_size } => (head / group_size).min(self.num_kv_heads - 1),
            Map::Explicit { kv_of_head, .. } => kv_of_head.get(head).copied().unwrap_or(self.num_kv_heads - 1),
        }
    }

    /// The KV head of each query head, where that is not told by the two counts.
    pub(crate) fn kv_of_head(&self) -> Option<&[usize]> {
        match &self.map {
            Map::Grouped { .. } => None,
            Map::Explicit { kv_of_head, .. } => Some(kv_of_head),
        }
    }

    /// How many KV heads are read by some query head.
    pub(crate) fn num_read(&self) -> usize {
        match &self.map {
            Map::Grouped { .. } => self.num_kv_heads,
            Map::Explicit { read, .. } => read.len(),
        }
    }

    /// The KV head at `index < num_read` among those that are read.
    pub(crate) fn read_kv_head(&self, index: usize) -> usize {
        match &self.map {
            Map::Grouped { .. } => index,
            Map::Explicit { read, .. } => read.get(index).copied().unwrap_or(0),
        }
    }

    /// Where [`HeadMap::read_kv_head`] has the KV head of a query head.
    pub(crate) fn read_index(&self, head: usize) -> usize {
        self.read_index_of(self.read_by(head))
    }

    /// Where [`HeadMap::read_kv_head`] has a KV head that is read.
    pub(crate) fn read_index_of(&self, kv_head: usize) -> usize {
        match &self.map {
            Map::Grouped { .. } => kv_head,
            Map::Explicit { read, .. } => read.partition_point(|&other| other < kv_head),
        }
    }

    /// How many query heads read `kv_head`.
    pub(crate) fn group_size(&self, kv_head: usize) -> usize {
        match &self.map {
            Map::Grouped { group_size } => *group_size,
            Map::Explicit { .. } => self.query_heads(kv_head).count(),
        }
    }

    /// How many query heads read a KV head at most.
    pub(crate) fn largest_group(&self) -> usize {
        (0..self.num_read()).map(|index| self.group_size(self.read_kv_head(index))).max().unwrap_or(0)
    }

    /// The query head at `index < group_size` among those that read `kv_head`.
    pub(crate) fn query_head(&self, kv_head: usize, index: usize) -> usize {
        match &self.map {
            Map::Grouped { group_size } => kv_head * group_size + index,
            Map::Explicit { .. } => self.query_heads(kv_head).nth(index).unwrap_or(0),
        }
    }

    /// The query heads that read `kv_head`, in ascending order.
    ///
    /// ```
    /// # use multihead::HeadMap;
    /// assert_eq!(HeadMap::grouped(8, 2)?.query_heads(1).collect::<Vec<_>>(), [4, 5, 6, 7]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn query_heads(&self, kv_head: usize) -> impl Iterator<Item = usize> + Clone + '_ {
        let range = match &self.map {
            Map::Grouped { group_size } => {
                let start = kv_head.saturating_mul(*group_size);
                start..start.saturating_add(*group_size)
            }
            Map::Explicit { .. } => 0..self.num_heads,
        };
        let end = range.end.min(self.num_heads);
        (range.start.min(end)..end).filter(move |&h| self.read_by(h) == kv_head)
    }
}

/// How a map stands in a file.
#[cfg(feature = "serde")]
mod written {
    use serde::{Deserialize, Serialize};

    /// Without `kv_of_head` the groups are equal.
    #[derive(Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    pub(super) struct HeadMap {
        num_heads: usize,
        num_kv_heads: usize,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        kv_of_head: Option<Vec<usize>>,
    }

    impl From<super::HeadMap> for HeadMap {
        fn from(map: super::HeadMap) -> Self {
            let kv_of_head = map.kv_of_head().map(<[usize]>::to_vec);
            Self { num_heads: map.num_heads, num_kv_heads: map.num_kv_heads, kv_of_head }
        }
    }

    impl TryFrom<HeadMap> for super::HeadMap {
        type Error = crate::Error;

        fn try_from(HeadMap { num_heads, num_kv_heads, kv_of_head }: HeadMap) -> crate::Result<Self> {
            match kv_of_head {
                None => Self::grouped(num_heads, num_kv_heads),
                Some(map) if map.len() != num_heads => {
                    let expected = format!("one entry for each of num_heads = {num_heads}");
                    Err(crate::Error::value("kv_of_head", expected, map.len()))
                }
                Some(map) => Self::explicit(&map, num_kv_heads),
            }
        }
    }
}

fn check_counts(num_heads: usize, num_kv_heads: usize) -> Result<()> {
    for (argument, count) in [("num_heads", num_heads), ("num_kv_heads", num_kv_heads)] {
        if count == 0 {
            return Err(Error::value(argument, "at least 1", 0));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_repeat_in_place_and_never_alternate() -> Result<()> {
        for (heads, kv, want) in [(4, 2, vec![0, 0, 1, 1]), (6, 2, vec![0, 0, 0, 1, 1, 1]), (3, 1, vec![0, 0, 0])] {
            let map = HeadMap::grouped(heads, kv)?;
            assert_eq!((0..heads).filter_map(|h| map.kv_head(h)).collect::<Vec<_>>(), want);
            for k in 0..kv {
                assert_eq!(map.query_heads(k).count(), heads / kv);
                assert!(map.query_heads(k).all(|h| map.kv_head(h) == Some(k)));
            }
        }
        Ok(())
    }

    #[test]
    fn a_head_that_does_not_exist_reads_no_other() -> Result<()> {
        let map = HeadMap::grouped(4, 2)?;
        assert_eq!(map.query_heads(2).count(), 0);
        assert_eq!([3, 4, usize::MAX].map(|head| map.kv_head(head)), [Some(1), None, None]);
        assert_eq!(HeadMap::explicit(&[1, 0], 2)?.kv_head(2), None);
        assert_eq!(HeadMap::explicit(&[0, 0], 2)?.query_heads(1).count(), 0);
        Ok(())
    }

    #[test]
    fn equal_groups_are_one_map_by_either_name() -> Result<()> {
        assert_eq!(HeadMap::explicit(&[0, 0, 1, 1], 2)?, HeadMap::grouped(4, 2)?);
        for (map, kv) in [([0, 1, 0, 1], 2), ([1, 1, 0, 0], 2), ([0, 0, 0, 1], 2), ([0, 0, 1, 1], 3)] {
            assert_eq!(HeadMap::explicit(&map, kv)?.kv_of_head(), Some(&map[..]));
        }
        Ok(())
    }

    #[test]
    fn kv_heads_that_nobody_reads_are_not_walked() -> Result<()> {
        let map = HeadMap::explicit(&[7, 1 << 40, 7], usize::MAX)?;
        assert_eq!((0..map.num_read()).map(|i| map.read_kv_head(i)).collect::<Vec<_>>(), [7, 1 << 40]);
        assert_eq!([0, 1, 2].map(|h| map.read_index(h)), [0, 1, 0]);
        Ok(())
    }

    #[test]
    fn bad_maps_are_named() {
        let text = |r: Result<HeadMap>| r.unwrap_err().to_string();
        assert_eq!(text(HeadMap::grouped(3, 2)), "num_heads: expected a multiple of num_kv_heads = 2, got 3");
        assert_eq!(text(HeadMap::grouped(2, 4)), "num_heads: expected a multiple of num_kv_heads = 4, got 2");
        assert_eq!(text(HeadMap::grouped(2, 0)), "num_kv_heads: expected at least 1, got 0");
        assert_eq!(text(HeadMap::grouped(0, 2)), "num_heads: expected at least 1, got 0");
        assert_eq!(
            text(HeadMap::explicit(&[0, 2], 2)),
            "kv_of_head[1]: expected a KV head below num_kv_heads = 2, got 2"
        );
    }
}
