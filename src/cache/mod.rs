//! The keys and values of the tokens so far, so that a new token costs one row of attention.
//!
//! ```text
//! append(k, v)        keys and values of new tokens -> the next free slots of each batch entry
//! decode(q, cache)    softmax(scale q k^T) v over the filled slots               see `attention/decode.rs`
//! ```

mod page;
mod ring;
mod slots;
mod storage;
mod view;

pub use storage::Storage;

use ndarray::ArrayRef4;
use std::ops::Range;
use std::sync::Arc;

use crate::error::{Error, Result, check_shape};
use crate::kernels::KEYS;
use crate::mask::{Mask, check_lengths};
use page::{Page, PageShape};
pub(crate) use slots::Slots;

/// The lengths of a cache.
///
/// ```
/// use multihead::{CacheShape, KvCache};
/// let shape = CacheShape { batch: 2, num_kv_heads: 8, capacity: 100, head_dim: 64, value_dim: 64 };
/// let cache = KvCache::<f32>::new(shape)?;
/// assert_eq!(cache.shape(), shape);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct CacheShape {
    /// Batch entries; each has its own length.
    pub batch: usize,
    /// Number of key and value heads.
    pub num_kv_heads: usize,
    /// Tokens that an entry has room for; of a ring, how many of the last ones a query sees, itself included.
    pub capacity: usize,
    /// Width of a key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub value_dim: usize,
}

/// Keys and values of one layer, token by token.
///
/// All memory is taken when a cache is made. Each batch entry has its own length. What lies beyond a length is never
/// visible, whatever it is.
///
/// ```
/// use multihead::{attention, ndarray::Array4, CacheShape, KvCache, Mask, Options};
/// let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 16, head_dim: 8, value_dim: 8 };
/// let mut cache = KvCache::<f32>::new(shape)?;
/// let prompt = Array4::ones((1, 2, 5, 8)); // [batch, num_kv_heads, tokens, head_dim]
/// cache.append(&prompt, &prompt)?;
/// assert_eq!(cache.lengths(), [5]);
/// let q = Array4::ones((1, 4, 1, 8));
/// let attended = attention::decode(&q, &cache, &Options::new())?;
/// assert_eq!(attended.context, q);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Pages
/// Keys and values lie as attention reads them, in pages of 64 tokens, so nothing is packed when it is read. A token takes
/// `num_kv_heads * (head_dim + width)` numbers of the [`Storage`], with `width` the value width rounded up to 16, and a page
/// `8 * num_kv_heads` bytes more, which [`KvCache::bytes`] counts. Pages lie side by side in pieces of up to 16 MiB, for which
/// Linux is asked for huge pages; a piece is free when no cache and no fork has a page of it any more.
///
/// Position p of an entry is in slot `p % 64` of page `p / 64`, or of page `p / 64 % pages` of a ring:
///
/// ```text
///                              page 0      page 1      page 2      page 3
/// a cache for 200 tokens
///   entry 0, 150 tokens     |  0 ..  63| 64 .. 127|128 .. 149  |            |
///   entry 1, 70 tokens      |  0 ..  63| 64 .. 69 |            |            |
///
/// a ring with a window of 100
///   entry 0, 300 tokens     |192 .. 255|256 .. 299 108 .. 127  |128 .. 191  |
/// ```
///
/// The next token of the ring ([`KvCache::ring`]) goes over position 108, which no query sees any more: the query at 300
/// sees 201 and later ones. Positions below 108 have been overwritten, so 207 tokens are the fewest that it can be taken
/// back to.
///
/// Forks ([`KvCache::fork`]) share pages until one of them writes. A fork of the first cache shares pages 0 to 2 of its
/// entry 0; the first token that either of them appends to it copies page 2, and pages 0 and 1 stay shared.
#[derive(Debug)]
pub struct KvCache<S: Storage> {
    shape: CacheShape,
    /// `Some` for a ring.
    window: Option<usize>,
    /// Pages of a batch entry.
    tiles: usize,
    /// `[batch][tiles]`
    pages: Vec<Arc<Page<S>>>,
    lengths: Vec<usize>,
    /// The lengths after the tokens that are about to come.
    planned: Vec<usize>,
    /// The first position of each entry whose slot has not been taken by a later one.
    oldest: Vec<usize>,
}

impl<S: Storage> KvCache<S> {
    /// A cache of `shape.capacity` tokens for each batch entry.
    ///
    /// ```
    /// use multihead::{CacheShape, KvCache};
    /// let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 1000, head_dim: 64, value_dim: 64 };
    /// assert!(KvCache::<f64>::new(shape)?.is_empty());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there is no memory for it, or `usize` cannot count its slots.
    pub fn new(shape: CacheShape) -> Result<Self> {
        Self::with_slots(shape, shape.capacity, None)
    }

    /// The first position of each entry that can still be read, and its length: `0..len` unless this is a ring.
    pub(crate) fn held(&self, entry: usize) -> Range<usize> {
        match (self.oldest.get(entry), self.lengths.get(entry)) {
            (Some(&oldest), Some(&length)) => oldest.min(length)..length,
            _ => 0..0,
        }
    }

    fn with_slots(shape: CacheShape, slots: usize, window: Option<usize>) -> Result<Self> {
        let CacheShape { batch, num_kv_heads, head_dim, value_dim, .. } = shape;
        let too_large = || Error::TooLarge {
            argument: "cache",
            axes: "[batch, num_kv_heads, capacity, head_dim, value_dim]",
            got: vec![batch, num_kv_heads, shape.capacity, head_dim, value_dim],
        };
        // Without batch entries no memory bounds the slots.
        let tiles = slots.checked_next_multiple_of(KEYS).ok_or_else(too_large)? / KEYS;
        let list = |n: usize| {
            let mut list = Vec::new();
            list.try_reserve_exact(n).map_err(|_| too_large())?;
            list.resize(n, 0);
            Ok(list)
        };
        let (lengths, planned, oldest) = (list(batch)?, list(batch)?, list(batch)?);
        let count = batch.checked_mul(tiles).ok_or_else(too_large)?;
        let page_shape = PageShape { num_kv_heads, head_dim, value_dim };
        let pages = Page::several(page_shape, count).ok_or_else(too_large)?;
        Ok(Self { shape, window, tiles, pages, lengths, planned, oldest })
    }

    /// The lengths that it was made with.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 16, head_dim: 8, value_dim: 8 };
    /// assert_eq!(KvCache::<f32>::new(shape)?.shape().capacity, 16);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn shape(&self) -> CacheShape {
        self.shape
    }

    /// Tokens of each batch entry so far, those that a ring has dropped included.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 3, num_kv_heads: 2, capacity: 16, head_dim: 8, value_dim: 8 };
    /// assert_eq!(KvCache::<f32>::new(shape)?.lengths(), [0, 0, 0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "cache_seqlens")]
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Tokens of the longest batch entry.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 16, head_dim: 8, value_dim: 8 };
    /// assert_eq!(KvCache::<f32>::new(shape)?.len(), 0);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn len(&self) -> usize {
        self.lengths.iter().copied().max().unwrap_or(0)
    }

    /// Whether no entry has a token.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 16, head_dim: 8, value_dim: 8 };
    /// assert!(KvCache::<f32>::new(shape)?.is_empty());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Bytes of memory for keys and values. Pages that forks share count for each of them.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// let shape = CacheShape { batch: 1, num_kv_heads: 8, capacity: 4096, head_dim: 128, value_dim: 128 };
    /// let grouped = KvCache::<f32>::new(shape)?.bytes();
    /// let single = KvCache::<f32>::new(CacheShape { num_kv_heads: 1, ..shape })?.bytes();
    /// assert!((7.9..8.1).contains(&(grouped as f64 / single as f64)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn bytes(&self) -> usize {
        self.pages.iter().map(|page| page.bytes()).sum()
    }

    /// Appends the same number of tokens to every entry: `k: [batch, num_kv_heads, tokens, head_dim]`,
    /// `v: [batch, num_kv_heads, tokens, value_dim]`, any strides.
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// let three = Array4::ones((1, 2, 3, 8));
    /// cache.append(&three, &three)?;
    /// let error = cache.append(&three, &three).unwrap_err();
    /// assert_eq!(error.to_string(), "cache[0]: expected at most capacity = 4 tokens, got 3 and 3 more");
    /// assert_eq!(cache.len(), 3);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] if an array does not fit, [`Error::CacheFull`] if there is no room; [`Error::TooLarge`] if a page
    /// that a fork shares has to be copied and there is no memory for it. The cache is as it was then.
    pub fn append(&mut self, k: &ArrayRef4<S::Element>, v: &ArrayRef4<S::Element>) -> Result<()> {
        self.append_valid([k, v], &Mask::NONE)
    }

    /// Appends the first `lengths[b]` tokens to entry b; the rest of its rows is padding and is never read. Otherwise as
    /// [`KvCache::append`].
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 2, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// let prompts = Array4::ones((2, 2, 3, 8));
    /// cache.append_ragged(&prompts, &prompts, &[3, 1])?;
    /// assert_eq!(cache.lengths(), [3, 1]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KvCache::append`], and [`Error::Shape`] if there is not one length for each entry, [`Error::Value`] if one is
    /// above the number of tokens.
    pub fn append_ragged(
        &mut self,
        k: &ArrayRef4<S::Element>,
        v: &ArrayRef4<S::Element>,
        lengths: &[usize],
    ) -> Result<()> {
        check_lengths("lengths", lengths, self.shape.batch, (k.dim().2, "the number of tokens"))?;
        self.append_valid([k, v], &Mask::query_lengths(lengths))
    }

    fn append_valid(&mut self, kv: [&ArrayRef4<S::Element>; 2], mask: &Mask) -> Result<()> {
        let tokens = self.check_tokens(kv)?;
        self.plan(tokens, mask)?;
        self.write(kv, 0..tokens);
        Ok(())
    }

    /// Takes tokens back: no entry is longer than `len` afterwards. One that is shorter stays as it is.
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// let three = Array4::ones((1, 2, 3, 8));
    /// cache.append(&three, &three)?;
    /// cache.truncate(1)?; // two speculative tokens were refused
    /// assert_eq!(cache.len(), 1);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Overwritten`] if a ring has overwritten what the next token would see; the cache is as it was then.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        self.truncate_by(|_| len)
    }

    /// As [`KvCache::truncate`], to `lengths[b]` for entry b.
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 2, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// let three = Array4::ones((2, 2, 3, 8));
    /// cache.append(&three, &three)?;
    /// cache.truncate_ragged(&[1, 2])?;
    /// assert_eq!(cache.lengths(), [1, 2]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KvCache::truncate`], and [`Error::Shape`] if there is not one length for each entry.
    pub fn truncate_ragged(&mut self, lengths: &[usize]) -> Result<()> {
        check_shape("lengths", "[batch]", [Some(self.shape.batch)], &[lengths.len()])?;
        self.truncate_by(|entry| lengths[entry])
    }

    /// Back to the lengths that it had before tokens were appended: `lengths[b]` for entry b. Returns whether that was
    /// possible; a ring that has overwritten what the next token would see stays as it is.
    pub(crate) fn restore(&mut self, lengths: &[usize]) -> bool {
        let is_restored =
            self.truncate_by(|entry| if lengths[entry] == 0 { usize::MAX } else { lengths[entry] }).is_ok();
        if is_restored {
            // An entry that was empty needs nothing of what it had.
            let entries = self.lengths.iter_mut().zip(&mut self.oldest).zip(lengths);
            entries.filter(|(_, wanted)| **wanted == 0).for_each(|(entry, _)| (*entry.0, *entry.1) = (0, 0));
        }
        is_restored
    }

    fn truncate_by(&mut self, wanted: impl Fn(usize) -> usize) -> Result<()> {
        for (entry, (&length, &oldest)) in self.lengths.iter().zip(&self.oldest).enumerate() {
            let wanted = wanted(entry);
            let window = self.window.unwrap_or(usize::MAX);
            // The next token sees `window - 1` keys besides its own.
            if wanted < length && oldest > wanted.saturating_sub(window.saturating_sub(1)) {
                return Err(Error::Overwritten { entry, lowest: oldest.saturating_add(window - 1), got: wanted });
            }
        }
        self.lengths.iter_mut().enumerate().for_each(|(entry, length)| *length = wanted(entry).min(*length));
        Ok(())
    }

    /// Takes all tokens back; the memory is kept.
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// cache.append(&Array4::ones((1, 2, 3, 8)), &Array4::ones((1, 2, 3, 8)))?;
    /// cache.clear();
    /// assert!(cache.is_empty());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn clear(&mut self) {
        self.lengths.fill(0);
        self.oldest.fill(0);
    }

    /// A second cache that goes on from the same tokens. The pages that are filled are shared and are copied, one by one,
    /// when one of the two writes to them; room for what is to come is made now.
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 400, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// let prompt = Array4::ones((1, 2, 300, 8));
    /// cache.append(&prompt, &prompt)?;
    /// let mut other = cache.fork()?;
    /// other.truncate(299)?;
    /// assert_eq!((cache.len(), other.len()), (300, 299));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::TooLarge`] if there is no memory for it.
    #[doc(alias = "clone")]
    pub fn fork(&self) -> Result<Self> {
        // A cache without a page costs its lists and nothing else.
        let mut fork = Self::with_slots(self.shape, 0, self.window)?;
        let failed = || self.no_memory();
        fork.tiles = self.tiles;
        fork.pages.try_reserve_exact(self.pages.len()).map_err(|_| failed())?;
        let filled = self.lengths.iter().map(|length| length.div_ceil(KEYS).min(self.tiles));
        let empty = self.pages.len() - filled.clone().sum::<usize>();
        let mut empty = Page::several(self.page_shape(), empty).ok_or_else(failed)?.into_iter();
        for (entry, filled) in filled.enumerate() {
            let pages = &self.pages[entry * self.tiles..];
            fork.pages.extend(pages[..filled].iter().map(Arc::clone));
            fork.pages.extend(empty.by_ref().take(self.tiles - filled));
        }
        fork.lengths.copy_from_slice(&self.lengths);
        fork.oldest.copy_from_slice(&self.oldest);
        Ok(fork)
    }

    fn page_shape(&self) -> PageShape {
        let CacheShape { num_kv_heads, head_dim, value_dim, .. } = self.shape;
        PageShape { num_kv_heads, head_dim, value_dim }
    }

    fn no_memory(&self) -> Error {
        let PageShape { num_kv_heads, head_dim, value_dim } = self.page_shape();
        Error::TooLarge {
            argument: "cache",
            axes: "[num_kv_heads, tokens, head_dim, value_dim]",
            got: vec![num_kv_heads, KEYS, head_dim, value_dim],
        }
    }

    /// Slots of a batch entry, which `usize` can count: see `with_slots`.
    fn slots(&self) -> usize {
        self.tiles * KEYS
    }

    /// The page that holds a position, if there is one.
    fn page(&self, entry: usize, position: usize) -> Option<&Page<S>> {
        let tile = position / KEYS;
        // A division takes long, and only rings need it.
        let tile = if tile < self.tiles { tile } else { tile.checked_rem(self.tiles)? };
        self.pages.get(entry * self.tiles + tile).map(|page| &**page)
    }
}
