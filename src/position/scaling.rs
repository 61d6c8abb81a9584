//! Slower turns for texts that are longer than those of the training: each rule maps the plain frequencies of
//! `rope.rs` to others.
//!
//! | rule | frequency | source |
//! | --- | --- | --- |
//! | linear | `f / factor` | Chen et al. 2023, <https://arxiv.org/abs/2306.15595> |
//! | NTK | `f` of `theta * factor^(dims / (dims - 2))`: the fastest stays, the slowest is divided by `factor` | bloc97 2023, cited in the YaRN paper |
//! | LLaMA 3 | fast ones stay, slow ones are divided, a linear blend between two wavelengths | LLaMA 3.1's reference code |
//! | YaRN | the same idea, blended over the index of the pair; the turned columns grow by a factor | Peng et al. 2023, <https://arxiv.org/abs/2309.00071> |

use ndarray::Array1;
use std::f64::consts::TAU;

use super::rope::above_0;
use crate::error::{Error, Result};

/// How the frequencies of a [`crate::Rope`] change for long texts.
#[doc(alias = "rope_scaling")]
#[doc(alias = "rope_type")]
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "snake_case", deny_unknown_fields))]
#[non_exhaustive]
pub enum RopeScaling {
    /// Position interpolation: every frequency is divided by `factor`.
    Linear {
        /// How many times longer than in training a text may be.
        factor: f64,
    },
    /// A larger theta, `theta * factor^(dims / (dims - 2))`: fast pairs hardly change, slow ones are interpolated.
    Ntk {
        /// How many times longer than in training a text may be.
        factor: f64,
    },
    /// The rule of LLaMA 3.1 and later.
    Llama3(Llama3),
    /// "Yet another RoPE extension".
    Yarn(Yarn),
}

/// The numbers of LLaMA 3.1's rule. A pair whose wavelength (positions for a whole turn) is above
/// `original_len / low_freq_factor` is slowed down by `factor`, one below `original_len / high_freq_factor` is left
/// alone, and those between are blended.
///
/// ```
/// use multihead::{position::Llama3, Rope, RopeScaling, RopeStyle};
/// let rule = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 };
/// let rope = Rope::new(RopeStyle::HalfSplit, 500_000.0).scaling(RopeScaling::Llama3(rule));
/// assert_eq!(rope.frequencies(128)?[0], 1.0);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub struct Llama3 {
    /// Divides the slow frequencies.
    pub factor: f64,
    /// Whole turns within `original_len` below which a pair is slow.
    pub low_freq_factor: f64,
    /// Whole turns within `original_len` above which a pair is fast; larger than `low_freq_factor`.
    pub high_freq_factor: f64,
    /// Length of the training's texts.
    #[doc(alias = "original_max_position_embeddings")]
    pub original_len: usize,
}

/// The numbers of YaRN: pairs with more than `beta_fast` whole turns within `original_len` stay, those with fewer than
/// `beta_slow` are slowed down by `factor`, those between are blended by their index.
///
/// ```
/// use multihead::{position::Yarn, Rope, RopeScaling, RopeStyle};
/// let rope = Rope::new(RopeStyle::HalfSplit, 150_000.0).scaling(RopeScaling::Yarn(Yarn::new(32.0, 4096)));
/// assert_eq!(rope.frequencies(64)?[31], 150_000f64.powf(-62.0 / 64.0) / 32.0);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[must_use = "a description of positions does nothing by itself"]
pub struct Yarn {
    factor: f64,
    original_len: usize,
    beta_fast: f64,
    beta_slow: f64,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    attention_factor: Option<f64>,
    whole_bounds: bool,
}

impl Yarn {
    /// With the paper's bounds of 32 turns and 1 turn and its attention factor, `0.1 ln(factor) + 1`.
    ///
    /// ```
    /// use multihead::position::Yarn;
    /// let yarn = Yarn::new(32.0, 4096);
    /// # let _ = yarn;
    /// ```
    #[doc(alias = "original_max_position_embeddings")]
    pub fn new(factor: f64, original_len: usize) -> Self {
        Self { factor, original_len, beta_fast: 32.0, beta_slow: 1.0, attention_factor: None, whole_bounds: true }
    }

    /// Whole turns within `original_len`: above `fast` a pair stays, below `slow` it is slowed down. `fast > slow`.
    ///
    /// ```
    /// use multihead::position::Yarn;
    /// let yarn = Yarn::new(32.0, 4096).betas(16.0, 2.0);
    /// # let _ = yarn;
    /// ```
    #[doc(alias = "beta_fast")]
    #[doc(alias = "beta_slow")]
    pub fn betas(mut self, fast: f64, slow: f64) -> Self {
        (self.beta_fast, self.beta_slow) = (fast, slow);
        self
    }

    /// Factor of the turned columns of queries and keys; `0.1 ln(factor) + 1` unless given, and 1 where `factor` is at
    /// most 1. The scores grow by its square.
    ///
    /// ```
    /// use multihead::position::Yarn;
    /// let yarn = Yarn::new(32.0, 4096).attention_factor(1.0);
    /// # let _ = yarn;
    /// ```
    #[doc(alias = "mscale")]
    pub fn attention_factor(mut self, factor: f64) -> Self {
        self.attention_factor = Some(factor);
        self
    }

    /// Blends between the bounds as computed, where the paper's code rounds them outwards to whole indices.
    ///
    /// ```
    /// use multihead::position::Yarn;
    /// let yarn = Yarn::new(32.0, 4096).exact_bounds(); // gpt-oss
    /// # let _ = yarn;
    /// ```
    #[doc(alias = "truncate")]
    pub fn exact_bounds(mut self) -> Self {
        self.whole_bounds = false;
        self
    }

    /// The indices of the pairs between which frequencies are blended.
    fn bounds(&self, theta: f64, dims: usize) -> (f64, f64) {
        // The pair that makes so many turns within the original length.
        let index = |turns: f64| dims as f64 * (self.original_len as f64 / (turns * TAU)).ln() / (2.0 * theta.ln());
        let (mut low, mut high) = (index(self.beta_fast), index(self.beta_slow));
        if self.whole_bounds {
            (low, high) = (low.floor(), high.ceil());
        }
        let last = (dims - 1) as f64;
        let (low, high) = (low.max(0.0), high.min(last));
        // Bounds that meet or cross, beyond either end, make a step.
        (low, if low >= high { low + 0.001 } else { high })
    }
}

impl RopeScaling {
    /// Turns the plain frequencies into scaled ones; the numbers have been checked.
    pub(super) fn apply(&self, theta: f64, dims: usize, frequencies: &mut Array1<f64>) {
        match *self {
            Self::Linear { factor } => frequencies.mapv_inplace(|f| f / factor),
            Self::Ntk { factor } => {
                // theta^(-2 i / dims) of the larger theta; the only pair of two columns has frequency 1 for any theta.
                let dims = dims as f64;
                for (i, f) in frequencies.iter_mut().enumerate().skip(1) {
                    *f *= factor.powf(-2.0 * i as f64 / (dims - 2.0));
                }
            }
            Self::Llama3(Llama3 { factor, low_freq_factor, high_freq_factor, original_len }) => {
                frequencies.mapv_inplace(|f| {
                    let turns = original_len as f64 * f / TAU;
                    // The share that stays, from 0 at the slow end to 1 at the fast one.
                    let stays = ((turns - low_freq_factor) / (high_freq_factor - low_freq_factor)).clamp(0.0, 1.0);
                    (1.0 - stays) * f / factor + stays * f
                });
            }
            Self::Yarn(yarn) => {
                let (low, high) = yarn.bounds(theta, dims);
                for (i, f) in frequencies.iter_mut().enumerate() {
                    let slowed = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    *f = slowed * *f / yarn.factor + (1.0 - slowed) * *f;
                }
            }
        }
    }

    /// The factor of turned columns.
    pub(super) fn attention_factor(&self) -> f64 {
        match self {
            Self::Yarn(Yarn { attention_factor: Some(given), .. }) => *given,
            Self::Yarn(Yarn { factor, .. }) if *factor > 1.0 => 0.1 * factor.ln() + 1.0,
            _ => 1.0,
        }
    }

    pub(super) fn check(&self, theta: f64) -> Result<()> {
        let ordered = |argument, low: f64, high: f64| match low < high {
            true => Ok(()),
            false => Err(Error::value(argument, "the smaller number first", format!("{low} and {high}"))),
        };
        match *self {
            Self::Linear { factor } | Self::Ntk { factor } => above_0("rope factor", factor),
            Self::Llama3(Llama3 { factor, low_freq_factor, high_freq_factor, original_len }) => {
                above_0("rope factor", factor)?;
                above_0("rope low_freq_factor", low_freq_factor)?;
                above_0("rope high_freq_factor", high_freq_factor)?;
                above_0("rope original_len", original_len as f64)?;
                ordered("rope low_freq_factor, high_freq_factor", low_freq_factor, high_freq_factor)
            }
            // Its bounds are logarithms to the base theta.
            Self::Yarn(_) if theta <= 1.0 => Err(Error::value("rope theta", "a number above 1 for YaRN", theta)),
            Self::Yarn(yarn) => {
                above_0("rope factor", yarn.factor)?;
                above_0("rope beta_fast", yarn.beta_fast)?;
                above_0("rope beta_slow", yarn.beta_slow)?;
                above_0("rope original_len", yarn.original_len as f64)?;
                yarn.attention_factor.map_or(Ok(()), |factor| above_0("rope attention_factor", factor))?;
                ordered("rope beta_slow, beta_fast", yarn.beta_slow, yarn.beta_fast)
            }
        }
    }
}
