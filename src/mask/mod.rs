//! What may attend to what: [`Mask`] holds the rules, [`BoundMask`] answers for given lengths.

mod bound;
mod dense;
mod pairs;
mod segments;
mod structure;

pub use bound::{BoundMask, Visibility};
pub(crate) use bound::{DenseWords, HeadMask, Held};
pub(crate) use dense::rank_2_or_4;
pub(crate) use structure::check_lengths;

use dense::Dense;
use ndarray::{ArrayRef, ArrayRef2, Dimension};
use segments::Segments;
use std::fmt;
use std::ops::{BitAnd, Range};
use std::sync::Arc;
use structure::{Align, Band, KeyRanges, QueryLengths};

use crate::error::Result;

/// Rules that say which keys a query may attend to. Cheap to clone.
///
/// A pair (query, key) is visible if *every* rule lets it through: masks combine by intersection, with `&`. The rules come
/// in two kinds. *Structure* (causal, window, key ranges, query lengths, segments) leaves each query one interval of keys
/// and costs no memory; *dense* rules hold one bit per pair. The constructors carry the meaning in their names, so that no
/// array of `bool` has to be guessed at.
///
/// ```
/// use multihead::Mask;
/// // Two decoder inputs of 2 and 3 tokens, padded at the end to 3: token i stands at position i.
/// let mask = Mask::causal_top_left() & Mask::key_lengths(&[2, 3]);
/// assert_eq!(mask.to_string(), "causal_top_left & key_lengths [2, 3]");
/// assert_eq!(
///     mask.bind(2, 1, 3, 3)?.to_string(),
///     "batch 0, head 0:\n1 0 0\n1 1 0\n1 1 0\nbatch 1, head 0:\n1 0 0\n1 1 0\n1 1 1\n",
/// );
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Positions
/// `pos(i)` is the key position of query i. Bottom-right (the default) aligns the last query with the last valid key:
/// `pos(i) = i + n - q_len`, where n is the end of the batch entry's key range. A causal mask keeps `j <= pos(i)`:
///
/// ```
/// use multihead::Mask;
/// let causal = Mask::causal();
/// assert_eq!(causal.bind(1, 1, 2, 5)?.to_string(), "1 1 1 1 0\n1 1 1 1 1\n");
/// assert_eq!(causal.bind(1, 1, 5, 2)?.to_string(), "0 0\n0 0\n0 0\n1 0\n1 1\n");
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// A window keeps `pos - left <= j <= pos + right`, both ends in:
///
/// ```
/// # use multihead::Mask;
/// let window = Mask::causal() & Mask::window(1, 1);
/// assert_eq!(window.bind(1, 1, 4, 4)?.to_string(), "1 0 0 0\n1 1 0 0\n0 1 1 0\n0 0 1 1\n");
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// The plain [`Mask::causal`] is for queries that are the *last* tokens of each entry's valid keys, as with a cache or
/// with padding at the start. Queries padded at the end would be taken for these.
#[doc(alias = "attn_mask")]
#[doc(alias = "key_padding_mask")]
#[derive(Clone, Default)]
pub struct Mask {
    bands: Vec<Band>,
    key_ranges: Vec<KeyRanges>,
    query_lengths: Vec<QueryLengths>,
    segments: Vec<Arc<Segments>>,
    dense: Vec<Arc<Dense>>,
}

impl Mask {
    /// What a call without a mask uses.
    pub(crate) const NONE: Self = Self {
        bands: Vec::new(),
        key_ranges: Vec::new(),
        query_lengths: Vec::new(),
        segments: Vec::new(),
        dense: Vec::new(),
    };

    /// Every query sees every key.
    ///
    /// ```
    /// # use multihead::Mask;
    /// assert!(Mask::none().is_none());
    /// ```
    pub fn none() -> Self {
        Self::default()
    }

    /// `j <= i + n - q_len`: the last query sees the last valid key (n is the end of the entry's key range). Where queries are
    /// padded at their end, see [`Mask::key_lengths`].
    ///
    /// ```
    /// # use multihead::Mask;
    /// assert_eq!(Mask::causal().bind(1, 1, 2, 3)?.to_string(), "1 1 0\n1 1 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "is_causal")]
    #[doc(alias = "bottom_right")]
    pub fn causal() -> Self {
        Self::band(Band::causal(Align::BottomRight))
    }

    /// `j <= i`: the first query sees the first key only, however many keys there are.
    ///
    /// ```
    /// # use multihead::Mask;
    /// assert_eq!(Mask::causal_top_left().bind(1, 1, 2, 3)?.to_string(), "1 0 0\n1 1 0\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn causal_top_left() -> Self {
        Self::band(Band::causal(Align::Offset(0)))
    }

    /// `j <= i + offset`: query 0 stands at key position `offset`.
    ///
    /// ```
    /// use multihead::Mask;
    /// assert_eq!(Mask::causal_offset(1).bind(1, 1, 2, 4)?.to_string(), "1 1 0 0\n1 1 1 0\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn causal_offset(offset: usize) -> Self {
        Self::band(Band::causal(Align::Offset(offset)))
    }

    /// `pos - left <= j <= pos + right`, both ends in: `window(3, 0)` is the token itself and the three before it.
    /// `usize::MAX` leaves a side open. Counts from the causal rule that it is combined with, from the bottom-right
    /// position where there is none.
    ///
    /// ```
    /// # use multihead::Mask;
    /// assert_eq!(Mask::window(0, 1).bind(1, 1, 3, 3)?.to_string(), "1 1 0\n0 1 1\n0 0 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "sliding_window")]
    #[doc(alias = "local_window_size")]
    pub fn window(left: usize, right: usize) -> Self {
        Self::band(Band::window(left, right))
    }

    /// The last n keys up to and including `pos`: the same as `window(n - 1, 0)`. With n = 0 nothing is visible.
    ///
    /// ```
    /// use multihead::Mask;
    /// assert_eq!(Mask::last_n(2).bind(1, 1, 3, 3)?.to_string(), "1 0 0\n1 1 0\n0 1 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn last_n(n: usize) -> Self {
        match n.checked_sub(1) {
            Some(left) => Self::window(left, 0),
            None => Self::band(Band::nothing()),
        }
    }

    /// The first `lengths[b]` keys of batch entry b are valid, the rest is padding and is never read.
    ///
    /// For causal self-attention over such a batch combine it with [`Mask::causal_top_left`], or with [`Mask::causal`] and
    /// [`Mask::query_lengths`]: `causal` alone aligns the last query, padding though it is, with the last valid key.
    ///
    /// ```
    /// # use multihead::Mask;
    /// assert_eq!(Mask::key_lengths(&[2]).bind(1, 1, 1, 4)?.to_string(), "1 1 0 0\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "seqlens_k")]
    pub fn key_lengths(lengths: &[usize]) -> Self {
        let ranges = lengths.iter().map(|&n| 0..n).collect();
        Self { key_ranges: vec![KeyRanges::new("key_lengths", ranges)], ..Self::default() }
    }

    /// The keys `ranges[b]` of batch entry b are valid; the ones before and after are padding and are never read.
    /// For left-padded batches.
    ///
    /// ```
    /// use multihead::Mask;
    /// let mask = Mask::causal() & Mask::key_ranges(&[1..3, 0..3]);
    /// assert_eq!(
    ///     mask.bind(2, 1, 3, 3)?.to_string(),
    ///     "batch 0, head 0:\n0 0 0\n0 1 0\n0 1 1\nbatch 1, head 0:\n1 0 0\n1 1 0\n1 1 1\n",
    /// );
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn key_ranges(ranges: &[Range<usize>]) -> Self {
        Self { key_ranges: vec![KeyRanges::new("key_ranges", ranges.to_vec())], ..Self::default() }
    }

    /// The first `lengths[b]` queries of batch entry b are valid, the rest is padding and sees nothing. The bottom-right
    /// position aligns the last *valid* query with the last valid key. For batches of queries padded at the end.
    ///
    /// ```
    /// use multihead::Mask;
    /// let mask = Mask::causal() & Mask::query_lengths(&[2]);
    /// assert_eq!(mask.bind(1, 1, 3, 4)?.to_string(), "1 1 1 0\n1 1 1 1\n0 0 0 0\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "seqlens_q")]
    pub fn query_lengths(lengths: &[usize]) -> Self {
        Self { query_lengths: vec![QueryLengths::new(lengths)], ..Self::default() }
    }

    /// Sequences one after the other, packed without padding: each token sees those of its own sequence. The lengths are
    /// those of the sequences, in every batch entry; their sum is the number of queries and of keys.
    ///
    /// A batch of sequences of unlike lengths is one entry of all their tokens then, and nothing is computed for padding.
    /// The position of a token counts from the first sequence on. Layers that read positions can be told those within the
    /// sequence by [`Inputs::positions`](crate::Inputs::positions); for RoPE, ALiBi and learned distances, which go by
    /// differences, that changes no more than roundings.
    ///
    /// ```
    /// use multihead::Mask;
    /// let mask = Mask::segments(&[1, 2]);
    /// assert_eq!(mask.bind(1, 1, 3, 3)?.to_string(), "1 0 0\n0 1 1\n0 1 1\n");
    /// assert_eq!((mask & Mask::causal()).bind(1, 1, 3, 3)?.to_string(), "1 0 0\n0 1 0\n0 1 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "cu_seqlens")]
    #[doc(alias = "varlen")]
    #[doc(alias = "document_mask")]
    pub fn segments(lengths: &[usize]) -> Self {
        Self { segments: vec![Arc::new(Segments::new(lengths))], ..Self::default() }
    }

    /// A padding mask: key j of batch entry b may be attended to where `keep[[b, j]]` is true.
    ///
    /// `keep: [batch, kv_len]`, an axis of length 1 stands for all. It is a mask and not a length: the bottom-right
    /// position still counts all keys.
    ///
    /// ```
    /// use multihead::{ndarray::array, Mask};
    /// let mask = Mask::keep_keys(&array![[true, false, true]])?;
    /// assert_eq!(mask.bind(1, 1, 2, 3)?.to_string(), "1 0 1\n1 0 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] if the bits of a broadcast view do not fit into memory.
    #[doc(alias = "key_padding_mask")]
    pub fn keep_keys(keep: &ArrayRef2<bool>) -> Result<Self> {
        Ok(Self::dense(Dense::keys(keep)?))
    }

    /// Pairs that *may* attend are `true` (the meaning of PyTorch's `scaled_dot_product_attention`).
    ///
    /// `keep: [q_len, kv_len]` or `[batch, heads, q_len, kv_len]`; an axis of length 1 is broadcast, so one mask per
    /// head is `[1, heads, q_len, kv_len]`.
    ///
    /// ```
    /// use multihead::{ndarray::array, Mask};
    /// let mask = Mask::keep(&array![[true, false], [true, true]])?;
    /// assert_eq!(mask.bind(1, 1, 2, 2)?.to_string(), "1 0\n1 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Rank`] for any other rank; rank 3 could mean one mask per batch entry or one per head.
    /// [`crate::Error::TooLarge`] if the bits of a broadcast view do not fit into memory.
    pub fn keep<D: Dimension>(keep: &ArrayRef<bool, D>) -> Result<Self> {
        Ok(Self::dense(Dense::pairs("keep", keep, |kept| kept)?))
    }

    /// Pairs that may *not* attend are `true` (the meaning of PyTorch's `nn.MultiheadAttention`).
    ///
    /// `drop: [q_len, kv_len]` or `[batch, heads, q_len, kv_len]`; an axis of length 1 is broadcast.
    ///
    /// ```
    /// use multihead::{ndarray::array, Mask};
    /// let mask = Mask::drop(&array![[false, true], [false, false]])?;
    /// assert_eq!(mask.bind(1, 1, 2, 2)?.to_string(), "1 0\n1 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Mask::keep`].
    pub fn drop<D: Dimension>(drop: &ArrayRef<bool, D>) -> Result<Self> {
        Ok(Self::dense(Dense::pairs("drop", drop, |dropped| !dropped)?))
    }

    /// Both masks: the same as `self & other`.
    ///
    /// ```
    /// # use multihead::Mask;
    /// let mask = Mask::causal().and(Mask::last_n(1));
    /// assert_eq!(mask.bind(1, 1, 2, 2)?.to_string(), "1 0\n0 1\n");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn and(mut self, other: Self) -> Self {
        self.bands.extend(other.bands);
        self.key_ranges.extend(other.key_ranges);
        self.query_lengths.extend(other.query_lengths);
        self.segments.extend(other.segments);
        self.dense.extend(other.dense);
        self
    }

    /// Whether there is no rule at all.
    ///
    /// ```
    /// # use multihead::Mask;
    /// assert!(!Mask::causal().is_none());
    /// ```
    pub fn is_none(&self) -> bool {
        let Self { bands, key_ranges, query_lengths, segments, dense } = self;
        bands.is_empty() && key_ranges.is_empty() && query_lengths.is_empty() && segments.is_empty() && dense.is_empty()
    }

    /// The mask over given lengths, to be asked, drawn or turned into an array.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] if a dense mask or the number of key ranges or query lengths does not fit,
    /// [`crate::Error::Value`] if there are more valid queries than queries or if segments have another sum,
    /// [`crate::Error::KeyRange`] if a range ends beyond `kv_len`,
    /// [`crate::Error::Alignment`] if a window could count from two causal rules.
    ///
    /// ```
    /// # use multihead::Mask;
    /// let error = Mask::key_lengths(&[5]).bind(1, 1, 1, 4).unwrap_err();
    /// assert_eq!(error.to_string(), "key_lengths[0]: expected start <= end <= kv_len = 4, got 0..5");
    /// ```
    pub fn bind(&self, batch: usize, num_heads: usize, q_len: usize, kv_len: usize) -> Result<BoundMask<'_>> {
        BoundMask::new(self, [batch, num_heads, q_len, kv_len], Held::ALL)
    }

    /// Checks the lengths of queries alone.
    pub(crate) fn check_queries(&self, batch: usize, q_len: usize) -> Result<()> {
        self.query_lengths.iter().try_for_each(|lengths| lengths.check(batch, q_len))
    }

    /// How many of the `q_len` queries of a batch entry are valid.
    pub(crate) fn valid_queries(&self, entry: usize, q_len: usize) -> usize {
        self.query_lengths.iter().filter_map(|lengths| lengths.of(entry)).fold(q_len, usize::min)
    }

    fn band(band: Band) -> Self {
        Self { bands: vec![band], ..Self::default() }
    }

    fn dense(dense: Dense) -> Self {
        Self { dense: vec![Arc::new(dense)], ..Self::default() }
    }
}

impl BitAnd for Mask {
    type Output = Self;

    fn bitand(self, other: Self) -> Self {
        self.and(other)
    }
}

/// The rules by name, in a fixed order; [`BoundMask`] draws the 0/1 matrix.
impl fmt::Display for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_none() {
            return f.write_str("none");
        }
        let bands = self.bands.iter().map(|rule| rule as &dyn fmt::Display);
        let ranges = self.key_ranges.iter().map(|rule| rule as &dyn fmt::Display);
        let lengths = self.query_lengths.iter().map(|rule| rule as &dyn fmt::Display);
        let segments = self.segments.iter().map(|rule| &**rule as &dyn fmt::Display);
        let dense = self.dense.iter().map(|rule| &**rule as &dyn fmt::Display);
        for (i, rule) in bands.chain(ranges).chain(lengths).chain(segments).chain(dense).enumerate() {
            if i > 0 {
                f.write_str(" & ")?;
            }
            rule.fmt(f)?;
        }
        Ok(())
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask({self})")
    }
}
