//! Numbers about attention: what a call costs, and what the machine could do.

mod peak;

pub use peak::Peak;
