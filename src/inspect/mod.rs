//! Numbers about attention: what a call costs, and what the machine could do.

mod flops;
mod peak;

pub use flops::Flops;
pub use peak::Peak;
