//! What the weights do not say: where the queries stand among the keys, where each entry begins, and which tokens are the
//! same.
//!
//! None of it is taken from the mask of a call. Its positions are those of a causal rule, which padding shifts: behind
//! `key_lengths`, they align the last query with the last valid key. Which token a query is does not depend on that.

use ndarray::{ArrayRef2, ArrayView2, Axis};
use std::collections::HashSet;

use crate::error::{Error, Result, check_shape};
use crate::position::whole;

/// Where the queries stand among the keys, and which token each key is.
///
/// ```
/// use multihead::{inspect::Tokens, ndarray::array};
/// let ids = array![[7, 8, 9, 7, 8]]; // [batch, kv_len]
/// let tokens = Tokens::new().ids(&ids);
/// # let _ = tokens;
/// ```
#[derive(Debug, Clone, Copy, Default)]
pub struct Tokens<'a> {
    offset: Option<usize>,
    starts: Option<&'a [usize]>,
    ids: Option<ArrayView2<'a, usize>>,
}

impl<'a> Tokens<'a> {
    /// The last query stands at the last key, `pos = i + kv_len - q_len`: in self-attention each query at its own key,
    /// wherever there is padding. Every entry begins with key 0, and nothing is known about tokens.
    ///
    /// ```
    /// # use multihead::inspect::Tokens;
    /// let tokens = Tokens::new();
    /// # let _ = tokens;
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// The first query stands at key `offset`: `pos = i + offset`.
    ///
    /// ```
    /// # use multihead::inspect::Tokens;
    /// let tokens = Tokens::new().offset(0); // queries and keys start together, whatever their lengths
    /// # let _ = tokens;
    /// ```
    pub fn offset(mut self, offset: usize) -> Self {
        self.offset = Some(offset);
        self
    }

    /// The first token of each entry that is no padding, `[batch]`: what [`HeadStatistics::first`] is about. None comes before
    /// it for the other statistics either.
    ///
    /// ```
    /// use multihead::{inspect::{HeadStatistics, Tokens}, ndarray::{array, Axis}};
    /// // Padded at the start: key 0 is hidden, and the queries look at key 1.
    /// let head = array![[0.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.75, 0.25]];
    /// let weights = head.insert_axis(Axis(0)).insert_axis(Axis(0));
    /// let first = |tokens: Tokens<'_>| HeadStatistics::of_weights(&weights, &tokens).map(|found| found.first[[0, 0]]);
    /// assert_eq!(first(Tokens::new().starts(&[1]))?, (1.0 + 0.75) / 2.0);
    /// assert_eq!(first(Tokens::new())?, 0.0);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// [`HeadStatistics::first`]: crate::inspect::HeadStatistics::first
    #[doc(alias = "left_padding")]
    pub fn starts(mut self, starts: &'a [usize]) -> Self {
        self.starts = Some(starts);
        self
    }

    /// The token of each key: `[batch, kv_len]`, or `[1, kv_len]` for all batch entries alike.
    ///
    /// ```
    /// use multihead::{inspect::Tokens, ndarray::array};
    /// let ids = array![[7, 8, 9, 7, 8]];
    /// let tokens = Tokens::new().ids(&ids);
    /// # let _ = tokens;
    /// ```
    #[doc(alias = "input_ids")]
    pub fn ids(mut self, ids: &'a ArrayRef2<usize>) -> Self {
        self.ids = Some(ids.view());
        self
    }

    pub(super) fn has_ids(&self) -> bool {
        self.ids.is_some()
    }

    pub(super) fn check(&self, batch: usize, kv_len: usize) -> Result<()> {
        if let Some(starts) = self.starts {
            check_shape("starts", "[batch]", [Some(batch)], &[starts.len()])?;
            if let Some(start) = starts.iter().find(|&&start| start > kv_len) {
                return Err(Error::value("starts", "no start above kv_len", format_args!("{start} of {kv_len}")));
            }
        }
        let Some(ids) = &self.ids else { return Ok(()) };
        let entries = if ids.nrows() == 1 { 1 } else { batch };
        check_shape("ids", "[batch, kv_len]", [Some(entries), Some(kv_len)], ids.shape())
    }

    /// What concerns one batch entry.
    pub(super) fn of_entry(&self, entry: usize, q_len: usize, kv_len: usize) -> Places {
        let offset = self.offset.map_or_else(|| whole(kv_len) - whole(q_len), whole);
        let first = self.starts.and_then(|starts| starts.get(entry).copied()).unwrap_or(0);
        let ids = self.ids.as_ref().map(|ids| {
            let ids = ids.index_axis(Axis(0), if ids.nrows() == 1 { 0 } else { entry }).to_vec();
            let mut seen = HashSet::new();
            let repeated = ids.iter().enumerate().map(|(j, id)| j >= first && !seen.insert(*id)).collect();
            Ids { ids, repeated }
        });
        Places { offset, first, ids }
    }
}

/// The tokens of one batch entry.
#[derive(Debug)]
pub(super) struct Places {
    /// Position of query 0 among the keys.
    offset: i64,
    /// The first key that is no padding.
    pub(super) first: usize,
    pub(super) ids: Option<Ids>,
}

impl Places {
    /// Where query i stands.
    pub(super) fn position(&self, i: usize) -> i64 {
        self.offset + whole(i)
    }
}

#[derive(Debug)]
pub(super) struct Ids {
    /// `[kv_len]`
    pub(super) ids: Vec<usize>,
    /// `[kv_len]`: whether the token stands earlier too.
    pub(super) repeated: Vec<bool>,
}
