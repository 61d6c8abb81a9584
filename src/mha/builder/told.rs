//! A configuration as a builder takes it. One that is read from a file goes through the builder, so a file is held to what
//! a program is.

use super::{Builder, Projection, Slopes};
use crate::element::Element;
#[cfg(feature = "serde")]
use crate::error::{Error, Result};
use crate::heads::HeadMap;
use crate::mha::Config;
use crate::position::{Alibi, Buckets, Rope};

/// A configuration of which not all has to be there: how one stands in a file.
#[derive(Debug, Clone)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
pub(in crate::mha) struct Told {
    d_model: usize,
    heads: HeadMap,
    head_dim: Option<usize>,
    value_dim: Option<usize>,
    k_dim: Option<usize>,
    v_dim: Option<usize>,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Vec::is_empty"))]
    biases: Vec<Projection>,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "std::ops::Not::not"))]
    sinks: bool,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    scale: Option<f64>,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    softcap: Option<f64>,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "std::ops::Not::not"))]
    q_norm: bool,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "std::ops::Not::not"))]
    k_norm: bool,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    qk_norm_eps: Option<f64>,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    rope: Option<Rope>,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    alibi: Option<Alibi>,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    relative_bias: Option<Buckets>,
    #[cfg_attr(feature = "serde", serde(skip_serializing_if = "Option::is_none"))]
    relative_keys: Option<usize>,
}

impl From<Config> for Told {
    fn from(config: Config) -> Self {
        Self {
            d_model: config.d_model,
            heads: config.heads,
            head_dim: Some(config.head_dim),
            value_dim: Some(config.value_dim),
            k_dim: Some(config.k_dim),
            v_dim: Some(config.v_dim),
            biases: config.biases,
            sinks: config.sinks,
            scale: config.scale,
            softcap: config.softcap,
            q_norm: config.q_norm,
            k_norm: config.k_norm,
            qk_norm_eps: Some(config.qk_norm_eps),
            rope: config.rope,
            alibi: config.alibi,
            relative_bias: config.relative_bias,
            relative_keys: config.relative_keys,
        }
    }
}

/// Numbers are checked in the wider of the two types; a layer of `f32` checks them again.
#[cfg(feature = "serde")]
impl TryFrom<Told> for Config {
    type Error = Error;

    fn try_from(told: Told) -> Result<Self> {
        Builder::<f64>::told(told).config()
    }
}

impl<T: Element> Builder<T> {
    /// What a builder has been told, or a file.
    pub(in crate::mha) fn told(told: Told) -> Self {
        Self {
            num_kv_heads: Some(told.heads.num_kv_heads()),
            kv_of_head: told.heads.kv_of_head().map(<[usize]>::to_vec),
            head_dim: told.head_dim,
            value_dim: told.value_dim,
            k_dim: told.k_dim,
            v_dim: told.v_dim,
            biases: told.biases,
            sinks: told.sinks,
            scale: told.scale,
            softcap: told.softcap,
            qk_norm: [told.q_norm, told.k_norm],
            qk_norm_eps: told.qk_norm_eps,
            rope: told.rope,
            alibi: told.alibi.map(Slopes::Own),
            relative_bias: told.relative_bias,
            clip: told.relative_keys,
            ..Self::new(told.d_model, told.heads.num_heads())
        }
    }
}
