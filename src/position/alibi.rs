//! Attention with linear biases: the farther a key, the lower its score.
//!
//! ```text
//! bias[h, i, j] = -slope[h] * |pos(i) - j|          pos(i): the key position of query i, see `crate::Mask`
//! slope[h] = 2^(-8 (h + 1) / n)                     n heads, a power of two
//! ```
//!
//! (Press et al. 2021, <https://arxiv.org/abs/2108.12409>.) For other counts the paper's code takes the slopes of the
//! next lower power of two, and every second slope of twice that many heads for the rest.

use crate::attention::check_finite;
use crate::element::Element;
use crate::error::{Result, check_shape};

/// A slope for each query head, see [`crate::Options::alibi`].
///
/// ```
/// use multihead::position::Alibi;
/// let slopes = |n: usize| (0..n).filter_map(|h| Alibi::new(n).slope(h)).map(f64::log2).collect::<Vec<_>>();
/// assert_eq!(slopes(2), [-4.0, -8.0]);
/// assert_eq!(slopes(3), [-4.0, -8.0, -2.0]);
/// ```
#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Alibi(Slopes);

#[derive(Debug, Clone, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
enum Slopes {
    /// For so many heads.
    Paper(usize),
    Own(Vec<f64>),
}

impl Alibi {
    /// The paper's slopes for any number of heads.
    ///
    /// ```
    /// use multihead::position::Alibi;
    /// assert_eq!(Alibi::new(8).slope(7), Some(2f64.powi(-8)));
    /// ```
    pub fn new(num_heads: usize) -> Self {
        Self(Slopes::Paper(num_heads))
    }

    /// Slopes of your own, one for each query head. Negative ones favour what is far away.
    ///
    /// ```
    /// use multihead::position::Alibi;
    /// assert_eq!(Alibi::with_slopes(&[0.5, 0.25]).slope(1), Some(0.25));
    /// ```
    pub fn with_slopes(slopes: &[f64]) -> Self {
        Self(Slopes::Own(slopes.to_vec()))
    }

    /// How many heads have a slope.
    ///
    /// ```
    /// # use multihead::position::Alibi;
    /// assert_eq!(Alibi::new(12).num_heads(), 12);
    /// ```
    pub fn num_heads(&self) -> usize {
        match &self.0 {
            Slopes::Paper(num_heads) => *num_heads,
            Slopes::Own(slopes) => slopes.len(),
        }
    }

    /// The slope of a query head, if there is such a head.
    ///
    /// ```
    /// # use multihead::position::Alibi;
    /// assert_eq!(Alibi::new(1).slope(1), None);
    /// ```
    pub fn slope(&self, head: usize) -> Option<f64> {
        match &self.0 {
            Slopes::Paper(num_heads) => (head < *num_heads).then(|| paper(*num_heads, head)),
            Slopes::Own(slopes) => slopes.get(head).copied(),
        }
    }

    /// The slopes of these heads.
    pub(crate) fn select(&self, heads: &[usize]) -> Self {
        Self(Slopes::Own(heads.iter().filter_map(|&head| self.slope(head)).collect()))
    }

    /// Checks that there is a slope for each head, which is a number in the type of the call.
    pub(crate) fn check<T: Element>(&self, num_heads: usize) -> Result<()> {
        check_shape("alibi slopes", "[num_heads]", [Some(num_heads)], &[self.num_heads()])?;
        match &self.0 {
            Slopes::Paper(_) => Ok(()),
            Slopes::Own(slopes) => {
                slopes.iter().try_for_each(|&slope| check_finite::<T>("alibi slope", slope).map(drop))
            }
        }
    }
}

/// The slope of a head among `num_heads` > `head`.
fn paper(num_heads: usize, head: usize) -> f64 {
    // The largest power of two up to the count.
    let whole = 1usize << num_heads.ilog2();
    let (step, n) = match head.checked_sub(whole) {
        None => (head as f64 + 1.0, whole as f64),
        Some(rest) => (2.0 * rest as f64 + 1.0, 2.0 * whole as f64),
    };
    (-8.0 * step / n).exp2()
}
