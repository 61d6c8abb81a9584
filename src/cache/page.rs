//! 64 slots of one batch entry, for all its KV heads, in the layout that the kernels read.
//!
//! ```text
//! keys    [num_kv_heads][4 panels][head_dim][16]      key of slot j in lane j % 16 of panel j / 16
//! values  [num_kv_heads][panels][64][16]              column t of slot j in lane t % 16 of row j of panel t / 16
//! ```
//!
//! The columns of `values` beyond `value_dim` are zero. A slot that has not been written is zero, one that has been taken
//! back holds what it held: neither is ever visible.

use ndarray::ArrayView2;
use std::iter::repeat_n;
use std::sync::Arc;

use super::Storage;
use crate::kernels::{Finite, KEYS, Lot, PANEL, key_bits};

/// The lengths of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PageShape {
    pub(super) num_kv_heads: usize,
    pub(super) head_dim: usize,
    pub(super) value_dim: usize,
}

impl PageShape {
    /// Numbers of the keys of one head.
    fn key_len(&self) -> usize {
        self.head_dim.saturating_mul(KEYS)
    }

    fn width(&self) -> usize {
        self.value_dim.div_ceil(PANEL).saturating_mul(PANEL)
    }

    /// Numbers of the values of one head.
    fn value_len(&self) -> usize {
        self.width().saturating_mul(KEYS)
    }

    fn numbers(&self) -> usize {
        self.num_kv_heads.saturating_mul(self.key_len().saturating_add(self.value_len()))
    }
}

/// See the top of the file.
#[derive(Debug)]
pub(super) struct Page<S> {
    shape: PageShape,
    numbers: Lot<S>,
    /// Per head, bit j set if the value in slot j is not finite.
    not_finite: Vec<u64>,
}

impl<S: Storage> Page<S> {
    /// So many empty pages; `None` if there is no memory for them.
    pub(super) fn several(shape: PageShape, count: usize) -> Option<Vec<Arc<Self>>> {
        let mut pages = Vec::new();
        pages.try_reserve_exact(count).ok()?;
        for numbers in Lot::of_lens(repeat_n(shape.numbers(), count)).ok()? {
            let mut not_finite = Vec::new();
            not_finite.try_reserve_exact(shape.num_kv_heads).ok()?;
            not_finite.resize(shape.num_kv_heads, 0);
            pages.push(Arc::new(Self { shape, numbers, not_finite }));
        }
        Some(pages)
    }

    /// The same numbers in memory of its own.
    pub(super) fn copy(&self) -> Option<Arc<Self>> {
        let mut copy = Self::several(self.shape, 1)?.pop()?;
        let page = Arc::get_mut(&mut copy)?;
        page.numbers.copy_from_slice(&self.numbers);
        page.not_finite.copy_from_slice(&self.not_finite);
        Some(copy)
    }

    pub(super) fn bytes(&self) -> usize {
        size_of_val(&self.numbers[..]) + size_of_val(&self.not_finite[..])
    }

    /// `[4 panels][head_dim][16]`
    pub(super) fn keys(&self, head: usize) -> &[S] {
        &self.numbers[head * self.shape.key_len()..][..self.shape.key_len()]
    }

    /// `[panels][64][16]`
    pub(super) fn values(&self, head: usize) -> &[S] {
        let first = self.shape.num_kv_heads * self.shape.key_len();
        &self.numbers[first + head * self.shape.value_len()..][..self.shape.value_len()]
    }

    /// Whether all values of a head are finite.
    pub(super) fn finite(&self, head: usize) -> Finite {
        if self.not_finite[head] == 0 { Finite::All } else { Finite::NotAll }
    }

    pub(super) fn key(&self, head: usize, slot: usize, t: usize) -> S {
        self.keys(head)[slot / PANEL * PANEL * self.shape.head_dim + t * PANEL + slot % PANEL]
    }

    pub(super) fn value(&self, head: usize, slot: usize, t: usize) -> S {
        self.values(head)[t / PANEL * KEYS * PANEL + slot * PANEL + t % PANEL]
    }

    /// Writes keys `[n, head_dim]` and values `[n, value_dim]` to the slots from `first` on.
    pub(super) fn write(
        &mut self,
        head: usize,
        first: usize,
        keys: ArrayView2<'_, S::Element>,
        values: ArrayView2<'_, S::Element>,
    ) {
        let (shape, count) = (self.shape, keys.nrows());
        let numbers = &mut self.numbers[..];
        S::write_keys(keys, first, &mut numbers[head * shape.key_len()..][..shape.key_len()]);
        let numbers = &mut numbers[shape.num_kv_heads * shape.key_len()..];
        let bits = S::write_values(values, first, &mut numbers[head * shape.value_len()..][..shape.value_len()]);
        self.not_finite[head] = self.not_finite[head] & !key_bits(first, first + count) | bits;
    }
}
