//! A ring: the keys of the last tokens in bounded memory, for attention under a sliding window.
//!
//! Position p is in slot `p % slots`. A query at position p sees the last `window` keys up to its own, so tokens that come
//! together need the keys of `window - 1` tokens before the first of them: with `slots >= window - 1 + n`, n tokens can be
//! written before their queries are answered. Longer chunks are taken n tokens at a time.

use super::{CacheShape, KvCache, Storage};
use crate::error::{Error, Result};
use crate::kernels::KEYS;

/// Tokens that are written together, at least and at most; between, an eighth of the window. A multiple of 64 in each
/// case, so that the tiles of a chunk are full.
const FEWEST: usize = 64;
const MOST: usize = 512;

/// How many tokens a ring with this window takes at a time.
fn step(window: usize) -> usize {
    (window / 8).next_multiple_of(KEYS).clamp(FEWEST, MOST)
}

impl<S: Storage> KvCache<S> {
    /// A ring: each query sees the last `shape.capacity` keys up to its own position, and memory does not grow with the
    /// length. The window is part of the cache; masks can narrow it.
    ///
    /// ```
    /// use multihead::{CacheShape, KvCache, ndarray::Array4};
    /// let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 100, head_dim: 8, value_dim: 8 };
    /// let mut ring = KvCache::<f32>::ring(shape)?;
    /// let tokens = Array4::ones((1, 1, 1000, 8));
    /// ring.append(&tokens, &tokens)?;
    /// assert_eq!((ring.len(), ring.window()), (1000, Some(100)));
    /// assert!(ring.truncate(999).is_ok() && ring.truncate(10).is_err());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for a window of 0, [`Error::TooLarge`] if there is no memory for it.
    #[doc(alias = "sliding_window")]
    pub fn ring(shape: CacheShape) -> Result<Self> {
        let window = shape.capacity;
        if window == 0 {
            return Err(Error::value("capacity", "at least 1 for a ring", 0));
        }
        Self::with_slots(shape, (window - 1).saturating_add(step(window)), Some(window))
    }

    /// How many of the last keys a query sees at most, itself included; `None` if this is no ring.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 1, capacity: 100, head_dim: 8, value_dim: 8 };
    /// assert_eq!(KvCache::<f32>::new(shape)?.window(), None);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn window(&self) -> Option<usize> {
        self.window
    }
}
