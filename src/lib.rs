//! Multi-head attention for `ndarray`.

#[allow(dead_code, unused_imports)]
mod kernels;

pub use kernels::{Level, UnknownLevel};
