//! What the weights do not say: where the queries stand among the keys, and which tokens are the same.

use ndarray::{ArrayRef2, ArrayView2, Axis};
use std::collections::HashSet;

use crate::error::{Result, check_shape};

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
    ids: Option<ArrayView2<'a, usize>>,
}

impl<'a> Tokens<'a> {
    /// The last query stands at the last key, `pos = i + kv_len - q_len`; nothing is known about tokens.
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
        let Some(ids) = &self.ids else { return Ok(()) };
        let entries = if ids.nrows() == 1 { 1 } else { batch };
        check_shape("ids", "[batch, kv_len]", [Some(entries), Some(kv_len)], ids.shape())
    }

    /// What concerns one batch entry.
    pub(super) fn of_entry(&self, entry: usize, q_len: usize, kv_len: usize) -> Places {
        let int = |n: usize| i64::try_from(n).unwrap_or(i64::MAX / 4).min(i64::MAX / 4);
        let offset = self.offset.map_or_else(|| int(kv_len) - int(q_len), int);
        let ids = self.ids.as_ref().map(|ids| {
            let ids = ids.index_axis(Axis(0), if ids.nrows() == 1 { 0 } else { entry }).to_vec();
            let mut seen = HashSet::new();
            let repeated = ids.iter().map(|id| !seen.insert(*id)).collect();
            Ids { ids, repeated }
        });
        Places { offset, ids }
    }
}

/// The tokens of one batch entry.
#[derive(Debug)]
pub(super) struct Places {
    /// Position of query 0 among the keys.
    offset: i64,
    pub(super) ids: Option<Ids>,
}

impl Places {
    /// Where query i stands.
    pub(super) fn position(&self, i: usize) -> i64 {
        self.offset + i64::try_from(i).unwrap_or(i64::MAX / 4)
    }
}

#[derive(Debug)]
pub(super) struct Ids {
    /// `[kv_len]`
    pub(super) ids: Vec<usize>,
    /// `[kv_len]`: whether the token stands earlier too.
    pub(super) repeated: Vec<bool>,
}
