//! Exact multi-head attention on CPUs for [`ndarray`]: fast, linear in memory, the same bits for any number of threads.

pub mod attention;
mod element;
mod error;
mod heads;
pub mod inspect;
#[allow(dead_code, unused_imports)]
mod kernels;
mod linear;
mod mask;
mod mha;
mod parallel;

pub use attention::{Attended, Options, Path, Workspace};
pub use element::Element;
pub use error::{Error, Lengths, Result};
pub use heads::HeadMap;
pub use kernels::{Level, UnknownLevel};
pub use mask::{BoundMask, Mask, Visibility};
pub use mha::{Builder, Config, Init, Inputs, LayerOutput, MultiHeadAttention, Projection, Sequence, Weights};
pub use ndarray;
