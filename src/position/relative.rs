//! Buckets of distances: a learned table holds a bias for each bucket and head.
//!
//! ```text
//! bias[h, i, j] = table[bucket(j - pos(i)), h]      table: [buckets, num_heads]
//! ```
//!
//! (Raffel et al. 2020, <https://arxiv.org/abs/1910.10683>.) T5 gives small distances a bucket each, and larger ones
//! share buckets whose widths grow like powers, up to a distance from where on all share the last.

use crate::error::{Error, Result};

/// How distances from a query to a key fall into buckets.
///
/// ```
/// use multihead::position::Buckets;
/// let encoder = Buckets::T5 { count: 32, max_distance: 128 };
/// assert_eq!([-200, -1, 0, 1, 200].map(|distance| encoder.bucket(distance)), [15, 1, 0, 17, 31]);
/// let decoder = Buckets::T5Causal { count: 32, max_distance: 128 };
/// assert_eq!([-200, -1, 0, 1, 200].map(|distance| decoder.bucket(distance)), [31, 1, 0, 0, 0]);
/// let each = Buckets::Clipped { clip: 2 };
/// assert_eq!([-3, -2, -1, 0, 1, 2, 3].map(|distance| each.bucket(distance)), [0, 0, 1, 2, 3, 4, 4]);
/// ```
#[doc(alias = "relative_attention_num_buckets")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum Buckets {
    /// T5's encoder: half of the buckets for keys up to the query, half for keys behind it.
    T5 {
        /// Number of buckets, a multiple of 4.
        count: usize,
        /// Distance from where on all share the last bucket; more than a quarter of `count`.
        #[doc(alias = "relative_attention_max_distance")]
        max_distance: usize,
    },
    /// T5's decoder: all buckets for keys up to the query; keys behind it fall into the first.
    T5Causal {
        /// Number of buckets, a multiple of 2.
        count: usize,
        /// Distance from where on all share the last bucket; more than half of `count`.
        max_distance: usize,
    },
    /// A bucket for each distance from `-clip` to `clip`, where those beyond share the outer ones: `2 clip + 1`.
    Clipped {
        /// The largest distance with a bucket of its own.
        clip: usize,
    },
}

impl Buckets {
    /// How many buckets there are: the rows of the table.
    ///
    /// ```
    /// use multihead::position::Buckets;
    /// assert_eq!(Buckets::Clipped { clip: 16 }.count(), 33);
    /// ```
    pub fn count(&self) -> usize {
        match *self {
            Self::T5 { count, .. } | Self::T5Causal { count, .. } => count,
            Self::Clipped { clip } => clip.saturating_mul(2).saturating_add(1),
        }
    }

    /// The bucket of a key `distance` positions behind the query's own; keys before it have negative distances.
    ///
    /// ```
    /// use multihead::position::Buckets;
    /// assert_eq!(Buckets::T5 { count: 32, max_distance: 128 }.bucket(-9), 8);
    /// ```
    pub fn bucket(&self, distance: i64) -> usize {
        let size = usize::try_from(distance.unsigned_abs()).unwrap_or(usize::MAX);
        match *self {
            Self::T5 { count, max_distance } => {
                let behind = if distance > 0 { count / 2 } else { 0 };
                behind + logarithmic(size, count / 2, max_distance)
            }
            Self::T5Causal { .. } if distance > 0 => 0,
            Self::T5Causal { count, max_distance } => logarithmic(size, count, max_distance),
            Self::Clipped { clip } if distance < 0 => clip - size.min(clip),
            Self::Clipped { clip } => clip.saturating_add(size.min(clip)),
        }
    }

    /// From this distance on, either way, the bucket stays the same.
    pub(crate) fn reach(&self) -> usize {
        match *self {
            Self::T5 { max_distance, .. } | Self::T5Causal { max_distance, .. } => max_distance,
            Self::Clipped { clip } => clip,
        }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let (count, multiple, expected, side) = match *self {
            Self::T5 { count, .. } => (count, 4, "a multiple of 4 above 0", count / 2),
            Self::T5Causal { count, .. } => (count, 2, "a multiple of 2 above 0", count),
            Self::Clipped { .. } => return Ok(()),
        };
        if count == 0 || !count.is_multiple_of(multiple) {
            return Err(Error::value("buckets", expected, count));
        }
        let own = side / 2;
        match self.reach() > own {
            true => Ok(()),
            false => {
                let expected = format!("more than the {own} distances with buckets of their own");
                Err(Error::value("max_distance", expected, self.reach()))
            }
        }
    }
}

/// One bucket for each distance in the first half of `count`; the others divide the logarithms up to `max_distance`.
fn logarithmic(size: usize, count: usize, max_distance: usize) -> usize {
    let own = count / 2;
    if size < own {
        return size;
    }
    if size >= max_distance {
        return count.saturating_sub(1);
    }
    let ratio = |n: usize| (n as f64 / own.max(1) as f64).ln();
    let step = ratio(size) / ratio(max_distance) * (count - own) as f64;
    // A power that is met exactly must not be lost to a rounding.
    (own + (step + 1e-9) as usize).min(count.saturating_sub(1))
}
