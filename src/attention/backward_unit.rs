//! The first two products of backward by the matrix unit: those of queries and keys, and of gradients and values.
//!
//! The former have to be the very numbers that the lse was made of, rounding included: a probability is a power of their
//! difference, and where scores are large, two ways to round them are far apart. So what the unit multiplies is what it multiplied
//! in the forward pass: the same tiles, the same rows.

use std::ops::Range;

use super::backward::{Backward, Keys, Queries};
use super::problem::Dims;
use crate::element::Element;
use crate::kernels::{KEYS, PANEL, SplitFactors, SplitQueries, split_keys_len};

/// The keys and values of a block, split tile by tile.
pub(super) struct SplitBlock<'s, T> {
    /// Panels of both.
    panels: [&'s [T]; 2],
    /// Those that are seen.
    keys: usize,
    /// Bit i is set if the unit may multiply tile i.
    fit: u64,
}

impl<T: Element> Backward<'_, '_, T> {
    /// Splits the first `keys` packed keys and values of a block.
    pub(super) fn split_block<'s>(
        &self,
        panels: [&[T]; 2],
        keys: usize,
        [to_keys, to_values]: [&'s mut [T]; 2],
    ) -> SplitBlock<'s, T> {
        let Dims { head_dim, value_dim, .. } = self.size.dims;
        let mut fit = 0;
        let tiles = if self.size.unit { keys.div_ceil(KEYS) } else { 0 };
        for tile in 0..tiles {
            let count = KEYS.min(keys - tile * KEYS);
            let fits = |panels: &[T], width: usize, to: &mut [T]| {
                let panels = &panels[tile * KEYS * width..];
                self.kernels.split_key_panels(panels, [count, width], &mut to[tile * split_keys_len(width)..])
                    == Some(true)
            };
            let fits = [fits(panels[0], head_dim, to_keys), fits(panels[1], value_dim, to_values)];
            fit |= u64::from(fits == [true; 2]) << tile;
        }
        SplitBlock { panels: [to_keys, to_values], keys, fit }
    }

    /// Splits the queries and gradients of a step.
    pub(super) fn split_step(&self, rows: usize, queries: &mut Queries<'_, T>) {
        if !self.size.unit {
            return;
        }
        let (Dims { head_dim, value_dim, .. }, [k_width, v_width]) = (self.size.dims, self.size.widths());
        let Queries { q, d_context, split: [to_q, to_d], .. } = queries;
        let split = |numbers: &[T], [width, row]: [usize; 2], to: &mut [T]| {
            self.kernels.split_queries(numbers, [rows, width, row], to).is_some_and(|split| split.fit())
        };
        queries.fit = [split(q, [head_dim, k_width], to_q), split(d_context, [value_dim, v_width], to_d)];
    }

    /// Both products of some of the `all` rows of a step with the tile at key `offset` of a block. False if the unit may not multiply
    /// the tile.
    pub(super) fn unit_products(
        &self,
        all: usize,
        rows: Range<usize>,
        offset: usize,
        block: &Keys<'_, T>,
        queries: &mut Queries<'_, T>,
    ) -> bool {
        let tile = offset / KEYS;
        if block.split.fit >> tile & 1 == 0 {
            return false;
        }
        let (Dims { head_dim, value_dim, .. }, [k_width, v_width]) = (self.size.dims, self.size.widths());
        let panels = KEYS.min(block.split.keys - offset).div_ceil(PANEL);
        let product =
            |[q, split]: [&[T]; 2], [q_row, width]: [usize; 2], fit, [keys, split_keys]: [&[T]; 2], to: &mut [T]| {
                let factors = SplitFactors {
                    q,
                    q_row,
                    head_dim: width,
                    queries: SplitQueries::new(split, all, fit),
                    panels,
                    keys: &keys[offset * width..],
                    split: &split_keys[tile * split_keys_len(width)..],
                };
                self.kernels.unit_products(&factors, rows.clone(), &mut to[rows.start * KEYS..]);
            };
        let Queries { q, d_context, p, d, split: [split_q, split_d], fit: [q_fits, d_fits], .. } = queries;
        let [split_keys, split_values] = block.split.panels;
        product([q, split_q], [k_width, head_dim], *q_fits, [block.key_panels, split_keys], p);
        product([d_context, split_d], [v_width, value_dim], *d_fits, [block.value_panels, split_values], d);
        true
    }
}
