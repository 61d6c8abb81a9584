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
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let x = (x ^ x >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let x = (x ^ x >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ x >> 31
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The word of (seed, entry, head, query, key).
    fn word(at: [usize; 5]) -> u32 {
        let [seed, entry, head, i, j] = at;
        let dropout = Dropout::<f64>::new(0.5, seed as u64).unwrap().unwrap();
        dropout.head(entry, head).row(i).word(j)
    }

    /// How many standard deviations `hits` of `count` draws lie from what chance `p` gives.
    fn deviation(hits: usize, count: usize, p: f64) -> f64 {
        let n = count as f64;
        (hits as f64 - n * p).abs() / (n * p * (1.0 - p)).sqrt()
    }

    #[test]
    fn words_are_uniform() {
        let words: Vec<u32> = (0..256).flat_map(|i| (0..4096).map(move |j| word([7, 0, 0, i, j]))).collect();
        for rate in [0.001, 0.1, 0.3, 0.5, 0.9] {
            let last = (rate * 2f64.powi(32)) as u32 - 1;
            let hits = words.iter().filter(|&&word| word <= last).count();
            assert!(deviation(hits, words.len(), rate) < 4.0, "rate {rate}: {hits} of {}", words.len());
        }
        for bit in 0..32 {
            let hits = words.iter().filter(|&&word| word >> bit & 1 == 1).count();
            assert!(deviation(hits, words.len(), 0.5) < 4.0, "bit {bit}: {hits} of {}", words.len());
        }
        for shift in [0, 8, 16, 24] {
            let mut counts = [0usize; 256];
            words.iter().for_each(|word| counts[(word >> shift & 255) as usize] += 1);
            let expected = words.len() as f64 / 256.0;
            let chi_squared: f64 = counts.iter().map(|&n| (n as f64 - expected).powi(2) / expected).sum();
            // 255 degrees of freedom: mean 255, standard deviation 22.6.
            assert!((chi_squared - 255.0).abs() < 4.0 * 22.6, "byte at {shift}: {chi_squared}");
        }
    }

    #[test]
    fn the_counts_of_rows_scatter_as_they_should() {
        // A generator that deals the dropped keys of a row too evenly would pass every test of means.
        let p = 0.1;
        let last = (p * 2f64.powi(32)) as u32;
        let (rows, keys) = (2000, 256);
        let counts = (0..rows).map(|i| (0..keys).filter(|&j| word([3, 1, 2, i, j]) <= last).count() as f64);
        let variance = counts.map(|n| (n - p * keys as f64).powi(2)).sum::<f64>() / rows as f64;
        let expected = keys as f64 * p * (1.0 - p);
        assert!((variance / expected - 1.0).abs() < 4.0 * (2.0 / rows as f64).sqrt(), "{variance}, not {expected}");
    }

    #[test]
    fn neighbours_know_nothing_of_each_other() {
        let axes = ["seed", "entry", "head", "query", "key"];
        let at = |i: usize, j: usize| [11 + i % 3, i % 2, i % 5, i, j];
        let (rows, keys) = (256, 512);
        let dropped = |at: [usize; 5]| word(at) >> 31 == 1;
        let moved = |mut at: [usize; 5], axis: usize, step: usize| {
            at[axis] += step;
            at
        };
        for (axis, name) in axes.iter().enumerate() {
            for step in [1, 2, 3, 8, 16, 64, 128, 4096] {
                let pairs = || (0..rows).flat_map(|i| (0..keys).map(move |j| at(i, j)));
                let same = pairs().filter(|&here| dropped(here) == dropped(moved(here, axis, step))).count();
                let off = deviation(same, rows * keys, 0.5);
                assert!(off < 4.5, "{name} and the one {step} further: {off} deviations");
                // Corners of rectangles: a word that is a sum over a row's and a key's part would show here.
                let corners = pairs().filter(|&here| {
                    let across = moved(here, axis, step);
                    let parity = dropped(here) ^ dropped(across);
                    parity ^ dropped(moved(here, 4, 5)) ^ dropped(moved(across, 4, 5))
                });
                let off = deviation(corners.count(), rows * keys, 0.5);
                assert!(off < 4.5, "rectangles {step} along {name}: {off} deviations");
            }
        }
    }

    #[test]
    fn every_bit_of_a_row_key_moves_half_of_the_words() {
        for bit in 0..64 {
            let flips = (0..4096u64).map(|n| {
                let (bits, j) = (mix(n), n as usize % 977);
                (RowKey::new(bits).word(j) ^ RowKey::new(bits ^ 1 << bit).word(j)) >> 24
            });
            let ones: u32 = flips.map(u32::count_ones).sum();
            let share = f64::from(ones) / (8.0 * 4096.0);
            // The two highest bits pass through one product only.
            let near = if bit < 62 { 0.02 } else { 0.2 };
            assert!((share - 0.5).abs() < near, "bit {bit}: {share}");
        }
    }

    #[test]
    fn the_ends_of_the_rates() {
        assert!(Dropout::<f32>::new(0.0, 1).unwrap().is_none());
        assert!(Dropout::<f32>::new(-0.0, 1).unwrap().is_none());
        let all = Dropout::<f32>::new(1.0, 1).unwrap().unwrap();
        assert_eq!((all.drops.last, all.drops.factor), (u32::MAX, 0.0));
        let nearly = Dropout::<f32>::new(1.0 - 1e-16, 1).unwrap().unwrap();
        assert!(nearly.drops.last == u32::MAX && nearly.drops.factor.is_finite());
        for rate in [-1.0, 1.5, f64::NAN, f64::INFINITY, -1e-300] {
            let error = Dropout::<f32>::new(rate, 1).unwrap_err();
            assert_eq!(error.to_string(), format!("dropout: expected a rate in 0..=1, got {rate}"));
        }
    }
}
