//! Layers from files and back.
//!
//! | file | what it does |
//! | --- | --- |
//! | `tensors.rs` | [`Tensors`]: named arrays from the bytes of a `.safetensors` file |
//! | `numbers.rs` | the types of numbers in a file, and how they are widened |
//! | `map.rs` | [`TensorMap`]: named arrays to the bytes of a file |
//! | `layout.rs` | [`Layout`]: what each family of models calls the tensors of an attention layer, and how it lays them out |
//! | `places.rs` | which numbers of a tensor an array of the layer consists of |
//! | `load.rs`, `save.rs` | [`Builder::load`](crate::Builder::load) and [`Layout::save`] |

mod layout;
mod load;
mod map;
mod numbers;
mod places;
mod save;
mod tensors;

pub use layout::{Fusion, Layout, StoredAxes};
pub(crate) use load::Asked;
pub use map::TensorMap;
pub(crate) use numbers::Stored;
pub use tensors::Tensors;
