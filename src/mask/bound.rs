//! A mask over given lengths: the answers that kernels ask for.
//!
//! A tiled kernel asks two questions: what a block of queries may see of a block of keys ([`BoundMask::tile`]:
//! nothing, all or some of it), and, where it is some, the bits of each row. Both are answered without memory of size
//! `q_len x kv_len` for structural rules.

use ndarray::Array4;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use super::Mask;
use super::dense::{Column, Dense};
use super::structure::{Align, Band, Extent, Interval, common_alignment, window_alignment};
use crate::error::{Error, Result};
use crate::kernels::{KEYS, key_bits};

/// What a block of queries may see of a block of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Visibility {
    /// No pair of the block is visible: it can be skipped.
    Nothing,
    /// Every pair is visible: no mask work.
    All,
    /// Some pairs may be hidden.
    Some,
}

/// The keys that there are, where not every batch entry has all `kv_len` of them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held<'a> {
    /// How many each entry has; `None` is `kv_len` for all.
    pub(crate) lengths: Option<&'a [usize]>,
    /// How many of the last ones a query can see at most, itself included: those of a ring.
    pub(crate) last: Option<usize>,
    /// How many there is room for, if later calls will have more of them.
    pub(crate) room: Option<usize>,
}

impl Held<'_> {
    /// All keys of every entry.
    pub(crate) const ALL: Self = Self { lengths: None, last: None, room: None };
}

/// A [`Mask`] bound to `[batch, num_heads, q_len, kv_len]`, made by [`Mask::bind`].
///
/// `Display` draws 0/1 matrices, one for each batch entry and head.
///
/// ```
/// use multihead::{Mask, Visibility};
/// let mask = Mask::causal();
/// let bound = mask.bind(1, 1, 4, 4)?;
/// assert!(bound.sees(0, 0, 3, 1) && !bound.sees(0, 0, 1, 3));
/// assert_eq!(bound.tile(0, 0, 0..2, 2..4), Visibility::Nothing);
/// assert_eq!(bound.tile(0, 0, 2..4, 0..2), Visibility::All);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct BoundMask<'a> {
    mask: &'a Mask,
    dims: [usize; 4],
    window_align: Align,
    held: Held<'a>,
}

impl<'a> BoundMask<'a> {
    /// The lengths of `held` are one for each entry and at most `kv_len`.
    pub(crate) fn new(mask: &'a Mask, dims: [usize; 4], held: Held<'a>) -> Result<Self> {
        let [batch, _, q_len, kv_len] = dims;
        mask.check_queries(batch, q_len)?;
        for ranges in &mask.key_ranges {
            ranges.check(batch, kv_len)?;
        }
        mask.segments.iter().try_for_each(|segments| segments.check(q_len, kv_len))?;
        for dense in &mask.dense {
            dense.check(dims)?;
        }
        Ok(Self { mask, dims, window_align: window_alignment(&mask.bands)?, held })
    }

    /// Checks that queries have positions among the keys.
    ///
    /// # Errors
    /// [`Error::Alignment`] if two causal rules disagree.
    pub(crate) fn check_positions(&self) -> Result<()> {
        common_alignment(&self.mask.bands).map(drop)
    }

    /// How far behind its position a query sees keys at most, if this is over a ring that its position counts along.
    pub(crate) fn last(&self) -> Option<i64> {
        let last = self.held.last.filter(|_| self.window_align == Align::BottomRight)?;
        i64::try_from(last).ok()
    }

    /// Whether a query of the entry sees, by structure, one of the first `keys` keys.
    pub(crate) fn sees_before(&self, entry: usize, keys: usize) -> bool {
        self.head(entry, 0).interval.pairs(0..self.dims[2], 0..keys) > 0
    }

    /// Where the entry's first query stands if its last one stands at the last valid key, as the window of a ring has it.
    pub(crate) fn bottom_right(&self, entry: usize) -> i64 {
        self.head(entry, 0).interval.bottom_right()
    }

    /// How many keys there is room for, if later calls will have more of them.
    pub(crate) fn room(&self) -> Option<usize> {
        self.held.room
    }

    /// The rules of one batch entry and head.
    pub(crate) fn head(&self, entry: usize, head: usize) -> HeadMask<'a> {
        let [_, _, q_len, kv_len] = self.dims;
        let bands = self.mask.bands.iter().copied().chain(self.held.last.map(Band::last_of_cache));
        let keys = self.held.lengths.and_then(|lengths| lengths.get(entry).copied()).unwrap_or(kv_len);
        let extent = Extent { entry, queries: self.mask.valid_queries(entry, q_len), keys };
        let interval = Interval::new(bands, &self.mask.key_ranges, self.window_align, extent);
        HeadMask { mask: self.mask, entry, head, interval }
    }

    /// Whether query i of batch entry `entry` and head `head` may attend to key j. Outside of the lengths
    /// nothing is visible.
    ///
    /// ```
    /// # use multihead::Mask;
    /// let causal = Mask::causal();
    /// assert!(!causal.bind(1, 1, 3, 3)?.sees(0, 0, 1, 2));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn sees(&self, entry: usize, head: usize, i: usize, j: usize) -> bool {
        self.holds(entry, head) && i < self.dims[2] && self.head(entry, head).sees(i, j)
    }

    /// What the queries `rows` may see of the keys `keys`. `Some` may be answered where all or nothing would be
    /// right for a dense mask; `Nothing` and `All` are always right. Rows and keys beyond the lengths are left out.
    ///
    /// ```
    /// use multihead::{Mask, Visibility};
    /// let causal = Mask::causal();
    /// let bound = causal.bind(1, 1, 8, 8)?;
    /// assert_eq!(bound.tile(0, 0, 0..4, 4..8), Visibility::Nothing);
    /// assert_eq!(bound.tile(0, 0, 4..8, 4..8), Visibility::Some);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn tile(&self, entry: usize, head: usize, rows: Range<usize>, keys: Range<usize>) -> Visibility {
        let [_, _, q_len, kv_len] = self.dims;
        if !self.holds(entry, head) {
            return Visibility::Nothing;
        }
        self.head(entry, head).tile(rows.start..rows.end.min(q_len), keys.start..keys.end.min(kv_len))
    }

    fn holds(&self, entry: usize, head: usize) -> bool {
        entry < self.dims[0] && head < self.dims[1]
    }

    /// The number of visible pairs over all batch entries and heads, at most `u64::MAX`. Structure is counted by
    /// formula, one for each sequence of segments; of dense rules, the bits that they hold are looked at, for each batch
    /// entry and head that differ. Lengths along which no rule differs cost nothing.
    ///
    /// ```
    /// use multihead::Mask;
    /// assert_eq!(Mask::causal().bind(2, 1, 4, 4)?.visible_pairs(), 2 * (1 + 2 + 3 + 4));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn visible_pairs(&self) -> u64 {
        let [batch, num_heads, q_len, _] = self.dims;
        // Without pairs there is nothing to walk, however long the other axes are.
        if self.dims.contains(&0) {
            return 0;
        }
        let Mask { key_ranges, query_lengths, dense, .. } = self.mask;
        // Entries and heads that no rule tells apart see the same.
        let differ = |axis| dense.iter().any(|dense| dense.differs_along(axis));
        let same = key_ranges.is_empty() && query_lengths.is_empty() && self.held.lengths.is_none() && !differ(0);
        let entries = if same { batch.min(1) } else { batch };
        let heads = if differ(1) { num_heads } else { num_heads.min(1) };
        let rules = (0..entries).flat_map(|entry| (0..heads).map(move |head| self.head(entry, head)));
        let pairs = rules.map(|rules| rules.pairs(q_len));
        let times = ((batch / entries.max(1)) as u64).saturating_mul((num_heads / heads.max(1)) as u64);
        pairs.fold(0, u64::saturating_add).saturating_mul(times)
    }

    /// `[batch, num_heads, q_len, kv_len]`, `true` where a pair is visible.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if the array cannot be had.
    ///
    /// ```
    /// use multihead::{ndarray::array, Mask};
    /// let causal = Mask::causal();
    /// assert_eq!(causal.bind(1, 1, 2, 2)?.to_array()?, array![[[[true, false], [true, true]]]]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn to_array(&self) -> Result<Array4<bool>> {
        let [batch, heads, q_len, kv_len] = self.dims;
        let too_large =
            || Error::TooLarge { argument: "mask", axes: "[batch, num_heads, q_len, kv_len]", got: self.dims.to_vec() };
        let len = self.dims.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).ok_or_else(too_large)?;
        let mut pairs = Vec::new();
        pairs.try_reserve_exact(len).map_err(|_| too_large())?;
        // Without pairs there is nothing to walk, however long the other axes are.
        for entry in 0..if len == 0 { 0 } else { batch } {
            for head in 0..heads {
                let rules = self.head(entry, head);
                pairs.extend((0..q_len).flat_map(|i| (0..kv_len).map(move |j| (i, j))).map(|(i, j)| rules.sees(i, j)));
            }
        }
        Array4::from_shape_vec((batch, heads, q_len, kv_len), pairs).map_err(|_| too_large())
    }
}

impl fmt::Display for BoundMask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [batch, heads, q_len, kv_len] = self.dims;
        for entry in 0..batch {
            for head in 0..heads {
                if batch > 1 || heads > 1 {
                    writeln!(f, "batch {entry}, head {head}:")?;
                }
                let rules = self.head(entry, head);
                for i in 0..q_len {
                    for j in 0..kv_len {
                        let space = if j > 0 { " " } else { "" };
                        write!(f, "{space}{}", u8::from(rules.sees(i, j)))?;
                    }
                    writeln!(f)?;
                }
            }
        }
        Ok(())
    }
}

/// The rules of one batch entry and head.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadMask<'a> {
    pub(super) mask: &'a Mask,
    pub(super) entry: usize,
    pub(super) head: usize,
    pub(super) interval: Interval,
}

/// What dense rules say of 64 keys, for any query.
#[derive(Clone, Copy)]
pub(crate) struct DenseWords<'a> {
    /// Of the first rule, and mostly the only one.
    first: Option<Column<'a>>,
    rest: &'a [Arc<Dense>],
    entry: usize,
    head: usize,
    word: usize,
}

impl DenseWords<'_> {
    /// See [`HeadMask::dense_word`].
    #[inline]
    pub(crate) fn of(&self, i: usize) -> u64 {
        let first = self.first.map_or(u64::MAX, |first| first.word(i));
        self.rest.iter().fold(first, |bits, rule| bits & rule.word(self.entry, self.head, i, self.word))
    }
}

impl<'a> HeadMask<'a> {
    /// The keys that query i may see; dense rules can hide more of them.
    pub(crate) fn keys(&self, i: usize) -> Range<usize> {
        let keys = self.interval.keys(i);
        self.mask.segments.iter().fold(keys, |keys, segments| segments.within(i, keys))
    }

    /// The key position of query i: what windows and biases by distance count from.
    pub(crate) fn position(&self, i: usize) -> i64 {
        self.interval.position(i)
    }

    /// The keys that query i sees, as runs of neighbours in ascending order.
    pub(crate) fn runs(&self, i: usize) -> impl Iterator<Item = Range<usize>> + Clone + '_ {
        let keys = self.keys(i);
        let end = keys.end;
        let mut next = keys.start;
        std::iter::from_fn(move || {
            if self.mask.dense.is_empty() {
                let run = next..end;
                next = end;
                return (!run.is_empty()).then_some(run);
            }
            let start = self.find(i, next..end, |bits| bits)?;
            let stop = self.find(i, start..end, |bits| !bits).unwrap_or(end);
            next = stop;
            Some(start..stop)
        })
    }

    /// The first key of `keys` whose bit is set once `bits` has been applied to its word.
    fn find(&self, i: usize, keys: Range<usize>, bits: impl Fn(u64) -> u64) -> Option<usize> {
        (keys.start / 64..keys.end.div_ceil(64)).find_map(|word| {
            let found = bits(self.word(i, word)) & Self::wanted(&keys, word);
            (found != 0).then(|| 64 * word + found.trailing_zeros() as usize)
        })
    }

    /// The same rules for another head of the batch entry.
    pub(crate) fn of_head(self, head: usize) -> Self {
        Self { head, ..self }
    }

    /// Whether there are rules beyond [`HeadMask::keys`].
    pub(crate) fn is_dense(&self) -> bool {
        !self.mask.dense.is_empty()
    }

    /// Whether query i may attend to key j.
    pub(crate) fn sees(&self, i: usize, j: usize) -> bool {
        self.keys(i).contains(&j)
            && self.mask.dense.iter().all(|d| d.word(self.entry, self.head, i, j / 64) >> (j % 64) & 1 == 1)
    }

    /// Bit b is set where query i may attend to key `64 * word + b`.
    pub(crate) fn word(&self, i: usize, word: usize) -> u64 {
        Self::wanted(&self.keys(i), word) & self.dense_word(i, word)
    }

    /// The same by dense rules alone.
    pub(crate) fn dense_word(&self, i: usize, word: usize) -> u64 {
        self.dense_words(word).of(i)
    }

    /// The same of all queries.
    pub(crate) fn dense_words(&self, word: usize) -> DenseWords<'a> {
        let (first, rest) = self.mask.dense.split_first().map_or((None, &[][..]), |(first, rest)| (Some(first), rest));
        let first = first.map(|dense| dense.column(self.entry, self.head, word));
        DenseWords { first, rest, entry: self.entry, head: self.head, word }
    }

    /// Whether dense rules tell heads apart.
    pub(crate) fn differs_by_head(&self) -> bool {
        self.mask.dense.iter().any(|dense| dense.differs_along(1))
    }

    /// See [`BoundMask::tile`]. Dense rules are asked by word, so for them the keys count in blocks of 64.
    pub(crate) fn tile(&self, rows: Range<usize>, keys: Range<usize>) -> Visibility {
        if rows.is_empty() || keys.is_empty() {
            return Visibility::Nothing;
        }
        // Both ends of a query's interval grow with the query: the outer queries bound all between them.
        let (first, last) = (self.keys(rows.start), self.keys(rows.end - 1));
        if last.end <= keys.start || first.start >= keys.end {
            return Visibility::Nothing;
        }
        let structure_all = last.start <= keys.start && first.end >= keys.end;
        if self.mask.dense.is_empty() {
            return if structure_all { Visibility::All } else { Visibility::Some };
        }
        let differ = |axis: usize| self.mask.dense.iter().any(|dense| dense.differs_along(axis));
        // What no rule tells apart is asked once, and its answer holds for all; lengths may be as large as they like.
        let words = keys.start / 64..if differ(3) { keys.end.div_ceil(64) } else { keys.start / 64 + 1 };
        let rows = rows.start..if differ(2) { rows.end } else { rows.start + 1 };
        let (mut any, mut all) = (false, structure_all);
        for word in words {
            let wanted = Self::wanted(&keys, word);
            for i in rows.clone() {
                let bits = self.dense_word(i, word) & wanted;
                any |= bits != 0;
                all &= bits == wanted;
                if any && !all {
                    return Visibility::Some;
                }
            }
        }
        if all { Visibility::All } else { Visibility::Nothing }
    }

    /// The bits of `word` that stand for these keys.
    pub(super) fn wanted(keys: &Range<usize>, word: usize) -> u64 {
        let clamp = |key: usize| key.saturating_sub(KEYS * word).min(KEYS);
        key_bits(clamp(keys.start), clamp(keys.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array2;

    /// Words and tile answers against the pair-by-pair answer, over every aligned and unaligned block.
    fn check(mask: &Mask, dims: [usize; 4]) {
        let bound = BoundMask::new(mask, dims, Held::ALL).unwrap();
        let [batch, heads, q_len, kv_len] = dims;
        let pairs = bound.to_array().unwrap().iter().filter(|&&seen| seen).count();
        assert_eq!(bound.visible_pairs(), pairs as u64, "{mask}");
        for (entry, head) in (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h))) {
            let rules = bound.head(entry, head);
            for i in 0..q_len {
                for j in 0..kv_len.next_multiple_of(64) {
                    let bit = rules.word(i, j / 64) >> (j % 64) & 1 == 1;
                    assert_eq!(bit, j < kv_len && rules.sees(i, j), "{mask} query {i} key {j}");
                }
            }
            for i in 0..q_len {
                let runs: Vec<usize> = rules.runs(i).flatten().collect();
                assert_eq!(runs, (0..kv_len).filter(|&j| rules.sees(i, j)).collect::<Vec<_>>(), "{mask} query {i}");
                assert!(rules.runs(i).zip(rules.runs(i).skip(1)).all(|(a, b)| a.end < b.start), "{mask} query {i}");
            }
            for (rows, keys) in blocks(q_len, kv_len) {
                let pairs = || rows.clone().flat_map(|i| keys.clone().map(move |j| (i, j)));
                match rules.tile(rows.clone(), keys.clone()) {
                    Visibility::Nothing => assert!(pairs().all(|(i, j)| !rules.sees(i, j)), "{mask} {rows:?} {keys:?}"),
                    Visibility::All => assert!(pairs().all(|(i, j)| rules.sees(i, j)), "{mask} {rows:?} {keys:?}"),
                    Visibility::Some => {}
                }
            }
        }
    }

    fn blocks(q_len: usize, kv_len: usize) -> Vec<(Range<usize>, Range<usize>)> {
        let cuts = |n: usize| [0, 1, 5, 63, 64, 65, 127, 128].into_iter().filter(move |&x| x < n).chain([n]);
        let ranges = |n: usize| cuts(n).flat_map(move |a| cuts(n).filter(move |&b| b >= a).map(move |b| a..b));
        ranges(q_len).flat_map(|r| ranges(kv_len).map(move |k| (r.clone(), k))).collect()
    }

    #[test]
    fn words_and_tiles_agree_with_pairs() {
        let random = Array2::from_shape_fn((20, 150), |(i, j)| (i * 31 + j * 17) % 5 != 0);
        let blocky = Array2::from_shape_fn((20, 150), |(i, j)| (i / 6 + j / 64) % 2 == 0);
        let masks = [
            Mask::none(),
            Mask::causal(),
            Mask::causal_top_left(),
            Mask::causal_offset(70),
            Mask::window(3, 70),
            Mask::window(usize::MAX, 0),
            Mask::last_n(0),
            Mask::causal() & Mask::window(9, 0) & Mask::key_lengths(&[90]),
            Mask::causal() & Mask::key_ranges(std::slice::from_ref(&(40..64))),
            Mask::keep(&random).unwrap(),
            Mask::drop(&random).unwrap() & Mask::causal(),
            Mask::keep(&blocky).unwrap(),
            Mask::keep_keys(&random.slice(ndarray::s![..1, ..])).unwrap(),
            Mask::keep(&random.slice(ndarray::s![.., ..1])).unwrap(),
            Mask::causal() & Mask::query_lengths(&[13]),
            Mask::window(30, 5) & Mask::query_lengths(&[17]) & Mask::query_lengths(&[7]),
            Mask::query_lengths(&[0]),
        ];
        for mask in &masks {
            check(mask, [1, 1, 20, 150]);
        }
        let packed = || Mask::segments(&[3, 0, 70, 1, 60, 2]);
        for mask in [packed(), packed() & Mask::causal(), packed() & Mask::window(5, 2) & Mask::segments(&[100, 36])] {
            check(&mask, [1, 1, 136, 136]);
        }
        check(&(packed() & Mask::key_lengths(&[50]) & Mask::query_lengths(&[75])), [1, 1, 136, 136]);
    }

    #[test]
    fn uniform_dense_blocks_are_recognised() {
        let blocky = Array2::from_shape_fn((12, 128), |(i, j)| (i / 6 + j / 64) % 2 == 0);
        let mask = Mask::keep(&blocky).unwrap();
        let rules = mask.bind(1, 1, 12, 128).unwrap();
        assert_eq!(rules.tile(0, 0, 0..6, 0..64), Visibility::All);
        assert_eq!(rules.tile(0, 0, 0..6, 64..128), Visibility::Nothing);
        assert_eq!(rules.tile(0, 0, 0..12, 0..128), Visibility::Some);
    }

    #[test]
    fn shapes_that_do_not_fit_are_named() {
        let text = |mask: Mask| mask.bind(2, 3, 4, 5).unwrap_err().to_string();
        assert_eq!(
            text(Mask::keep(&Array2::from_elem((4, 4), true)).unwrap()),
            "keep: expected [batch, num_heads, q_len, kv_len] = [2, 3, 4, 5], got [1, 1, 4, 4]"
        );
        assert_eq!(
            text(Mask::keep_keys(&Array2::from_elem((3, 5), true)).unwrap()),
            "keep_keys: expected [batch, kv_len] = [2, 5], got [3, 5]"
        );
        assert_eq!(text(Mask::key_lengths(&[1])), "key_lengths: expected [batch] = [2], got [1]");
        assert_eq!(text(Mask::key_lengths(&[1, 6])), "key_lengths[1]: expected start <= end <= kv_len = 5, got 0..6");
        let rank_3 = ndarray::Array3::from_elem((2, 4, 5), true);
        assert_eq!(
            Mask::keep(&rank_3).unwrap_err().to_string(),
            "keep: expected rank 2 [q_len, kv_len] or rank 4 [batch, num_heads, q_len, kv_len], got rank 3 [2, 4, 5]"
        );
    }

    #[test]
    fn nothing_is_seen_outside_of_the_lengths() {
        let mask = Mask::keep(&Array4::from_elem((2, 2, 2, 2), true)).unwrap();
        let bound = mask.bind(2, 2, 2, 2).unwrap();
        for [entry, head, i, j] in [[0, 2, 0, 0], [0, 0, 2, 0], [0, 0, 0, 2], [usize::MAX, 0, 0, 0]] {
            assert!(!bound.sees(entry, head, i, j));
        }
        assert_eq!(bound.tile(usize::MAX, 0, 0..2, 0..2), Visibility::Nothing);
        assert_eq!(bound.tile(1, 1, 0..9, 0..9), Visibility::All);
    }

    #[test]
    fn lengths_without_pairs_are_not_walked() {
        let none = Mask::none();
        assert!(none.bind(usize::MAX, 1, 0, 4).unwrap().to_array().is_err());
        let one = Mask::keep(&Array2::from_elem((1, 1), true)).unwrap();
        assert_eq!(one.bind(usize::MAX, 1, 1, 1).unwrap().visible_pairs(), u64::MAX);
        let heads = Mask::keep(&Array4::from_shape_fn((1, 3, 2, 2), |(_, h, i, j)| h >= i + j)).unwrap();
        assert_eq!(heads.bind(4, 3, 2, 2).unwrap().visible_pairs(), 4 * (1 + 3 + 4));
    }

    #[test]
    fn empty_lengths_are_legal() {
        for dims in [[0, 1, 3, 4], [1, 1, 0, 4], [1, 1, 3, 0], [2, 0, 3, 4]] {
            let mask = Mask::causal() & Mask::window(1, 1);
            assert_eq!(BoundMask::new(&mask, dims, Held::ALL).unwrap().to_array().unwrap().shape(), dims);
        }
    }
}
