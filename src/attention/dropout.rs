//! Dropout on the weights: a pair is kept with probability `1 - rate`, and its weight is divided by that (inverted
//! scaling), so that the expected context is the one without dropout.
//!
//! Whether a pair is kept depends on (seed, batch entry, query head, query, key) and on nothing else: the seed and the
//! first three are mixed into the key of a row, from which `kernels/dropout.rs` draws a word for each key.

use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernels::{Drops, RowKey};

/// The dropout of one call; its rate is above 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Dropout<T> {
    seed: u64,
    pub(crate) drops: Drops<T>,
}

impl<T: Element> Dropout<T> {
    /// `None` if nothing is dropped: a rate counts in units of 2^-32.
    ///
    /// # Errors
    /// [`Error::Value`] for a rate outside of 0..=1.
    pub(crate) fn new(rate: f64, seed: u64) -> Result<Option<Self>> {
        if !(0.0..=1.0).contains(&rate) {
            return Err(Error::value("dropout", "a rate in 0..=1", rate));
        }
        let dropped_words = (rate * (1u64 << 32) as f64).round() as u64;
        // At rate 1 there is nothing to multiply, and the inverse would be infinite.
        let factor = if rate < 1.0 { T::from_f64((1.0 - rate).recip()) } else { T::zero() };
        let last = dropped_words.checked_sub(1);
        Ok(last.map(|last| Self { seed: mix(seed), drops: Drops { last: last as u32, factor } }))
    }

    /// The dropout of one query head of one batch entry.
    pub(crate) fn head(&self, entry: usize, head: usize) -> HeadDropout<T> {
        HeadDropout { seed: mix(mix(self.seed ^ entry as u64) ^ head as u64), dropout: *self }
    }
}

/// The dropout of one query head of one batch entry.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadDropout<T> {
    seed: u64,
    dropout: Dropout<T>,
}

impl<T: Element> HeadDropout<T> {
    /// The key of query i.
    pub(crate) fn row(&self, i: usize) -> RowKey {
        RowKey::new(mix(self.seed ^ i as u64))
    }

    /// What the weight of query i and key j is multiplied by.
    pub(crate) fn factor(&self, i: usize, j: usize) -> T {
        let drops = &self.dropout.drops;
        if self.row(i).word(j) <= drops.last { T::zero() } else { drops.factor }
    }
}

/// A bijection of 64 bits in which every bit of the argument moves half of the result's: the step of SplitMix64 (Steele,
/// Lea and Flood 2014).
fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}
