//! Numbers about attention: what a call costs, what the machine could do, and what the heads do.
//!
//! | question | answer |
//! | --- | --- |
//! | what a head looks at | [`HeadStatistics`], of a layer by [`MultiHeadAttention::head_statistics`] |
//! | what the machine could do | [`Peak`] |
//!
//!
//! [`Config::flops`]: crate::Config::flops
//! [`MultiHeadAttention::head_statistics`]: crate::MultiHeadAttention::head_statistics

mod flops;
mod peak;
mod statistics;
mod tally;
mod tokens;

pub use flops::Flops;
pub use peak::Peak;
pub use statistics::HeadStatistics;
pub(crate) use statistics::{Attention, head_statistics};
pub use tokens::Tokens;
