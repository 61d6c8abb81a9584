//! What a line asks for: the request, its inputs from a fixed generator, its mask.

use multihead::ndarray::{Array, Array2, Dimension, IntoDimension};
use multihead::{Element, Level, Mask, Options, Path};
use serde::Deserialize;

use crate::Outcome;

/// A request; what may be left out has a default, and a key that is not here is an error.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Case {
    pub(crate) op: String,
    #[serde(default = "one")]
    pub(crate) batch: usize,
    #[serde(default = "one")]
    pub(crate) heads: usize,
    pub(crate) kv_heads: Option<usize>,
    #[serde(default)]
    pub(crate) q_len: usize,
    #[serde(default)]
    pub(crate) kv_len: usize,
    #[serde(default)]
    pub(crate) head_dim: usize,
    #[serde(default)]
    pub(crate) value_dim: usize,
    /// Tokens and width of a layer.
    #[serde(default)]
    pub(crate) len: usize,
    #[serde(default)]
    pub(crate) d_model: usize,
    #[serde(default)]
    pub(crate) causal: bool,
    #[serde(default = "f32_name")]
    pub(crate) dtype: String,
    #[serde(default = "one")]
    pub(crate) threads: usize,
    #[serde(default = "five")]
    pub(crate) rounds: usize,
    pub(crate) level: Option<String>,
    pub(crate) path: Option<String>,
    pub(crate) query_tile: Option<usize>,
    /// Whether a layer's weights are packed before the first run.
    #[serde(default)]
    pub(crate) prepacked: bool,
    pub(crate) mask: Option<MaskCase>,
    #[serde(default)]
    pub(crate) bias: bool,
    pub(crate) pass: Option<String>,
    /// The rate, for training.
    pub(crate) dropout: Option<f64>,
    /// Whether the bias has a gradient too.
    #[serde(default)]
    pub(crate) bias_gradient: bool,
    /// What a cache keeps its numbers in, for decoding: `f32`, `f64`, `bf16` or `f16`.
    pub(crate) cache: Option<String>,
    /// Keys of each batch entry, where they are not `kv_len` for all.
    pub(crate) kv_lens: Option<Vec<usize>>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub(crate) enum MaskCase {
    /// Every batch entry has this share of its keys.
    Lengths { fraction: f64 },
    /// Blocks of pairs are kept where the generator's value is not negative.
    Keep { density: f64, block: usize },
}

fn one() -> usize {
    1
}
fn five() -> usize {
    5
}
fn f32_name() -> String {
    "f32".into()
}

/// Element i of the array with this seed: SplitMix64 to a uniform number of mean 0 and variance 1.
pub(crate) fn draw(i: u64, seed: u64) -> f64 {
    let mut z = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    ((z >> 40) as f64 / 2f64.powi(24) - 0.5) * 12f64.sqrt()
}

pub(crate) fn array<T: Element, D: Dimension>(
    shape: impl IntoDimension<Dim = D>,
    seed: u64,
    factor: f64,
) -> Outcome<Array<T, D>> {
    let dim = shape.into_dimension();
    let values = (0..dim.size() as u64).map(|i| T::from_f64(draw(i, seed) * factor)).collect();
    Ok(Array::from_shape_vec(dim, values)?)
}

/// What a case asks of the implementation.
#[derive(Clone, Copy)]
pub(crate) struct Settings {
    path: Path,
    pub(crate) level: Option<Level>,
    query_tile: Option<usize>,
}

impl Settings {
    pub(crate) fn new(case: &Case) -> Outcome<Self> {
        let path = match case.path.as_deref() {
            None | Some("auto") => Path::Auto,
            Some("tiled") => Path::Tiled,
            Some("dense") => Path::Dense,
            Some("reference") => Path::Reference,
            Some(other) => return Err(format!("path: expected auto, tiled, dense or reference, got {other}").into()),
        };
        let level = case.level.as_deref().map(str::parse::<Level>).transpose()?;
        Ok(Self { path, level, query_tile: case.query_tile })
    }

    pub(crate) fn options<'a, T: Element>(&self, mask: &'a Mask) -> Options<'a, T> {
        let mut options = Options::new().mask(mask).path(self.path);
        if let Some(level) = self.level {
            options = options.level(level);
        }
        if let Some(query_tile) = self.query_tile {
            options = options.query_tile(query_tile);
        }
        options
    }
}

pub(crate) fn mask(case: &Case, q_len: usize, kv_len: usize) -> Outcome<Mask> {
    let causal = if case.causal { Mask::causal() } else { Mask::none() };
    Ok(match &case.mask {
        None => causal,
        Some(MaskCase::Lengths { fraction }) => {
            let length = (kv_len as f64 * fraction) as usize;
            causal & Mask::key_lengths(&vec![length; case.batch])
        }
        Some(MaskCase::Keep { density, block }) => {
            if *density != 0.5 {
                return Err("mask density: the generator's sign gives 0.5 and nothing else".into());
            }
            let kept = |i: usize, j: usize| draw((i / block * 65536 + j / block) as u64, 9) >= 0.0;
            causal & Mask::keep(&Array2::from_shape_fn((q_len, kv_len), |(i, j)| kept(i, j)))?
        }
    })
}

/// Visible pairs of one head, over all batch entries.
pub(crate) fn pairs(mask: &Mask, batch: usize, q_len: usize, kv_len: usize) -> Outcome<f64> {
    Ok(mask.bind(batch, 1, q_len, kv_len)?.visible_pairs() as f64)
}
