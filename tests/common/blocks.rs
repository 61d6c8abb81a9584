//! Blocks and stacks of every form, small and made of seeds.

use multihead::block::{Activation, Block, FeedForward, FeedForwardWeights, Norm, Norms, Stack};
use multihead::ndarray::{Array, Dimension, IntoDimension};
use multihead::{MultiHeadAttention, Rope, RopeStyle};

use super::Seeded;

pub(crate) const D_MODEL: usize = 6;
pub(crate) const MEMORY_WIDTH: usize = 5;
const WIDTH: usize = 7;

/// Numbers without a pattern, between -1 and 1.
pub(crate) fn numbers<D: Dimension>(seed: u64, shape: impl IntoDimension<Dim = D>) -> Array<f64, D> {
    Seeded(seed).array(shape) * 2.0
}

/// Where norms stand.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Form {
    Pre,
    Post,
    Parallel,
    /// With one norm for both parts.
    ParallelShared,
}

pub(crate) const FORMS: [Form; 4] = [Form::Pre, Form::Post, Form::Parallel, Form::ParallelShared];

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum NormKind {
    Layer,
    Rms,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum FeedForwardKind {
    SwiGlu,
    /// With biases.
    Gelu,
}

/// What a block is made of.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Recipe {
    pub(crate) form: Form,
    pub(crate) has_cross: bool,
    pub(crate) norm: NormKind,
    pub(crate) feed_forward: FeedForwardKind,
}

impl Recipe {
    pub(crate) const fn new(form: Form, has_cross: bool) -> Self {
        Self { form, has_cross, norm: NormKind::Layer, feed_forward: FeedForwardKind::SwiGlu }
    }

    /// Every form, with cross-attention where it can be.
    pub(crate) fn forms() -> impl Iterator<Item = Self> {
        let with = [Form::Pre, Form::Post].map(|form| Self::new(form, true));
        FORMS.map(|form| Self::new(form, false)).into_iter().chain(with)
    }

    /// Every form with either norm and either feed-forward block.
    pub(crate) fn all() -> impl Iterator<Item = Self> {
        use {FeedForwardKind::*, NormKind::*};
        let pairs = [[(Layer, SwiGlu), (Rms, Gelu)], [(Rms, SwiGlu), (Layer, Gelu)]];
        Self::forms()
            .zip(pairs.into_iter().cycle())
            .flat_map(|(recipe, pairs)| pairs.map(|(norm, feed_forward)| Self { norm, feed_forward, ..recipe }))
    }
}

pub(crate) fn norm(kind: NormKind, seed: u64) -> Norm<f64> {
    match kind {
        NormKind::Layer => Norm::layer(numbers(seed, D_MODEL), Some(numbers(seed + 50, D_MODEL)), 1e-2).unwrap(),
        NormKind::Rms => Norm::rms(numbers(seed, D_MODEL), 1e-2).unwrap(),
    }
}

pub(crate) fn attention(seed: u64) -> MultiHeadAttention<f64> {
    let rope = Rope::new(RopeStyle::HalfSplit, 100.0);
    MultiHeadAttention::builder(D_MODEL, 3).num_kv_heads(1).bias().rope(rope).seed(seed).build().unwrap()
}

pub(crate) fn cross(seed: u64) -> MultiHeadAttention<f64> {
    MultiHeadAttention::builder(D_MODEL, 2).k_dim(MEMORY_WIDTH).seed(seed).build().unwrap()
}

pub(crate) fn feed_forward(kind: FeedForwardKind, seed: u64) -> FeedForward<f64> {
    let weights = FeedForwardWeights {
        b_out: Some(numbers(seed + 2, D_MODEL)),
        ..FeedForwardWeights::new(numbers(seed + 3, (D_MODEL, WIDTH)), numbers(seed + 4, (WIDTH, D_MODEL)))
    };
    let (weights, activation) = match kind {
        FeedForwardKind::SwiGlu => {
            (FeedForwardWeights { w_gate: Some(numbers(seed + 1, (D_MODEL, WIDTH))), ..weights }, Activation::Silu)
        }
        FeedForwardKind::Gelu => {
            (FeedForwardWeights { b_in: Some(numbers(seed + 5, WIDTH)), ..weights }, Activation::Gelu)
        }
    };
    FeedForward::new(weights, activation).unwrap()
}

pub(crate) fn block(recipe: Recipe, seed: u64) -> Block<f64> {
    let [own, second, between] = [1, 2, 3].map(|n| norm(recipe.norm, seed + n));
    let norms = match recipe.form {
        Form::Pre => Norms::Pre { attention: own, feed_forward: second },
        Form::Post => Norms::Post { attention: own, feed_forward: second },
        Form::Parallel => Norms::Parallel { attention: own, feed_forward: Some(second) },
        Form::ParallelShared => Norms::Parallel { attention: own, feed_forward: None },
    };
    let block = Block::new(attention(seed), feed_forward(recipe.feed_forward, seed + 10), norms).unwrap();
    if recipe.has_cross { block.cross(cross(seed + 4), between).unwrap() } else { block }
}

/// Two blocks and a norm.
pub(crate) fn stack(recipe: Recipe) -> Stack<f64> {
    Stack::new(vec![block(recipe, 1), block(recipe, 30)], Some(norm(recipe.norm, 90))).unwrap()
}
