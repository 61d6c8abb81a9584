//! Numbers about attention: what a call costs, what the machine could do, and what the heads do.
//!
//! | question | answer |
//! | --- | --- |
//! | what a head looks at | [`HeadStatistics`], of a layer by [`MultiHeadAttention::head_statistics`] |
//! | what a loss would miss without a head | [`gate_gradient`], [`head_importance`] |
//! | operations, parameters, cache of a layer | [`Config::flops`], [`Config::parameters`], [`Config::cache_bytes`] |
//! | what the machine could do | [`Peak`] |
//! | a picture of the weights | [`HeatMaps`], and [`bertviz_json`] for viewers |
//!
//! Heads that turn out to be idle are taken out by [`MultiHeadAttention::prune_heads`].
//!
//! [`Config::flops`]: crate::Config::flops
//! [`Config::parameters`]: crate::Config::parameters
//! [`Config::cache_bytes`]: crate::Config::cache_bytes
//! [`MultiHeadAttention::head_statistics`]: crate::MultiHeadAttention::head_statistics
//! [`MultiHeadAttention::prune_heads`]: crate::MultiHeadAttention::prune_heads

mod flops;
mod importance;
mod json;
mod peak;
mod size;
mod statistics;
mod svg;
mod tally;
mod tokens;

pub use flops::Flops;
pub use importance::{gate_gradient, head_importance};
pub use json::bertviz_json;
pub use peak::Peak;
pub use statistics::HeadStatistics;
pub(crate) use statistics::{Attention, head_statistics};
pub use svg::HeatMaps;
pub use tokens::Tokens;
