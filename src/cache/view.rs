//! What a cache holds, as arrays in logical order.

use ndarray::{Array4, ArrayRef4, ArrayViewMut4, s};
use std::ops::Range;

use super::{KvCache, Storage};
use crate::element::zeros;
use crate::error::Result;
use crate::kernels::KEYS;

impl<S: Storage> KvCache<S> {
    /// The positions that some entry can still read: `0..len` unless this is a ring.
    ///
    /// ```
    /// # use multihead::{CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// assert_eq!(KvCache::<f32>::new(shape)?.positions(), 0..0);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn positions(&self) -> Range<usize> {
        let held = (0..self.shape.batch).map(|entry| self.held(entry)).filter(|held| !held.is_empty());
        held.reduce(|all, held| all.start.min(held.start)..all.end.max(held.end)).unwrap_or(0..0)
    }

    /// A copy of the keys `[batch, num_kv_heads, positions, head_dim]`, in the order of [`KvCache::positions`]. Zero where
    /// an entry has no key.
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 8 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// let k = Array4::from_shape_fn((1, 2, 3, 8), |(_, h, j, t)| (100 * h + 10 * j + t) as f32);
    /// cache.append(&k, &k)?;
    /// assert_eq!(cache.keys()?, k);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] if there is no memory for the copy.
    pub fn keys(&self) -> Result<Array4<S::Element>> {
        let (positions, shape) = (self.positions(), self.shape);
        let lengths = (shape.batch, shape.num_kv_heads, positions.len(), shape.head_dim);
        let mut keys = zeros("keys", "[batch, num_kv_heads, positions, head_dim]", lengths)?;
        self.copy_keys(positions.start, keys.view_mut());
        Ok(keys)
    }

    /// A copy of the values `[batch, num_kv_heads, positions, value_dim]`, as [`KvCache::keys`].
    ///
    /// ```
    /// # use multihead::{ndarray::Array4, CacheShape, KvCache};
    /// # let shape = CacheShape { batch: 1, num_kv_heads: 2, capacity: 4, head_dim: 8, value_dim: 3 };
    /// let mut cache = KvCache::<f32>::new(shape)?;
    /// cache.append(&Array4::zeros((1, 2, 3, 8)), &Array4::ones((1, 2, 3, 3)))?;
    /// assert_eq!(cache.values()?, Array4::<f32>::ones((1, 2, 3, 3)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`KvCache::keys`].
    pub fn values(&self) -> Result<Array4<S::Element>> {
        let (positions, shape) = (self.positions(), self.shape);
        let lengths = (shape.batch, shape.num_kv_heads, positions.len(), shape.value_dim);
        let mut values = zeros("values", "[batch, num_kv_heads, positions, value_dim]", lengths)?;
        self.copy_values(positions.start, values.view_mut());
        Ok(values)
    }

    /// Fills `[batch, num_kv_heads, positions, head_dim]` from position `first` on, where there are keys.
    fn copy_keys(&self, first: usize, mut to: ArrayViewMut4<'_, S::Element>) {
        for (entry, position) in self.places() {
            if let Some(page) = self.page(entry, position) {
                for ((head, t), to) in to.slice_mut(s![entry, .., position - first, ..]).indexed_iter_mut() {
                    *to = page.key(head, position % KEYS, t).widen();
                }
            }
        }
    }

    /// As [`KvCache::copy_keys`], `[batch, num_kv_heads, positions, value_dim]`.
    fn copy_values(&self, first: usize, mut to: ArrayViewMut4<'_, S::Element>) {
        for (entry, position) in self.places() {
            if let Some(page) = self.page(entry, position) {
                for ((head, t), to) in to.slice_mut(s![entry, .., position - first, ..]).indexed_iter_mut() {
                    *to = page.value(head, position % KEYS, t).widen();
                }
            }
        }
    }

    /// Every position of every entry that can be read.
    fn places(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        (0..self.shape.batch).flat_map(|entry| self.held(entry).map(move |position| (entry, position)))
    }

    /// The keys and values of all positions `0..kv_len`, with new tokens where they are planned to go, as they will be
    /// stored. For the paths that read arrays.
    pub(super) fn with_new(
        &self,
        new: Option<[&ArrayRef4<S::Element>; 2]>,
        kv_len: usize,
    ) -> Result<[Array4<S::Element>; 2]> {
        let shape = self.shape;
        let lengths = |width| (shape.batch, shape.num_kv_heads, kv_len, width);
        let mut keys = zeros("keys", "[batch, num_kv_heads, kv_len, head_dim]", lengths(shape.head_dim))?;
        let mut values = zeros("values", "[batch, num_kv_heads, kv_len, value_dim]", lengths(shape.value_dim))?;
        self.copy_keys(0, keys.view_mut());
        self.copy_values(0, values.view_mut());
        for (array, new) in [&mut keys, &mut values].into_iter().zip(new.into_iter().flatten()) {
            for entry in 0..shape.batch {
                let range = self.lengths[entry]..self.planned[entry];
                let from = new.slice(s![entry, .., ..range.len(), ..]);
                array.slice_mut(s![entry, .., range, ..]).zip_mut_with(&from, |to, &x| *to = S::narrow(x).widen());
            }
        }
        Ok([keys, values])
    }
}
