//! Reading layers from files.
//!
//! | file | what it does |
//! | --- | --- |
//! | `tensors.rs` | [`Tensors`]: named arrays from the bytes of a `.safetensors` file |

mod tensors;

pub use tensors::Tensors;
