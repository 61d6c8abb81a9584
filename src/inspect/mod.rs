//! Looking into layers: what they cost.

mod flops;

pub use flops::Flops;
