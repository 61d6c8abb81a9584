//! Exact multi-head attention on CPUs for [`ndarray`]: fast, linear in memory, the same bits for any number of threads.
//!
//! A [`MultiHeadAttention`] owns the projections W_Q, W_K, W_V and W_O as ndarray matrices, runs scaled dot-product
//! attention for all heads in parallel and projects back. Grouped-query and multi-query attention are the same struct
//! with fewer KV heads:
//!
//! ```
//! use multihead::{ndarray::Array3, Mask, MultiHeadAttention};
//!
//! let mha = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(2).build()?;
//! let x = Array3::ones((2, 10, 64)); // [batch, len, d_model]
//! let y = mha.forward(&x, &Mask::causal())?;
//! assert_eq!(y.shape(), [2, 10, 64]);
//! # Ok::<(), multihead::Error>(())
//! ```
//!
//! # Where to look
//!
//! | you want | look at |
//! | --- | --- |
//! | a layer | [`MultiHeadAttention::builder`], or [`Builder::from_weights`] for weights that you have |
//! | its output | [`MultiHeadAttention::forward`], [`MultiHeadAttention::forward_cross`] |
//! | the weights of each head, a bias, other values than keys | [`MultiHeadAttention::attend`] with [`Inputs`] and [`Options`] |
//! | attention of queries, keys and values, no layer | [`attention::forward`] |
//! | its gradients | [`MultiHeadAttention::forward_train`], then [`MultiHeadAttention::backward`]; [`MultiHeadAttention::parameters_mut`] for an optimiser |
//! | those of queries, keys and values | [`attention::backward`] |
//! | who may attend to whom | [`Mask`]; [`BoundMask`] draws it |
//! | which KV head a query head reads | [`HeadMap`] |
//! | positions of tokens | [`Builder::rope`] (with [`Builder::qk_norm`]), [`Inputs::offset`]; [`Builder::alibi`], [`Builder::relative_bias`], [`Builder::relative_keys`]; [`position`] |
//! | token by token, with a cache | [`MultiHeadAttention::decode`] with a [`KvCache`], [`attention::extend`], [`attention::decode`] |
//! | many calls with the same weights | [`MultiHeadAttention::prepack`], [`block::Stack::prepack`] |
//! | no allocation from call to call | the `*_into` functions of layers, blocks, stacks and [`attention`] with a [`Workspace`] |
//! | what a call costs | [`Config::flops`], [`Config::parameters`], [`Config::cache_bytes`] |
//! | what a head looks at | [`MultiHeadAttention::head_statistics`], pictures by [`inspect::HeatMaps`]; [`inspect`] |
//! | other heads in a layer | [`MultiHeadAttention::gate`], [`MultiHeadAttention::prune_heads`], [`MultiHeadAttention::pool_kv_heads`] |
//! | norms, feed-forward, blocks and stacks of whole models | [`block`] |
//! | training of a whole stack | [`block::Stack::forward_train`], then [`block::Stack::backward`]; [`block::Stack::parameters_mut`] |
//! | a layer from a configuration | [`Config::builder`]; with the feature `serde` from a file |
#![cfg_attr(feature = "safetensors", doc = "| a layer from a checkpoint | [`Builder::load`] with an [`io::Layout`] |")]
#![cfg_attr(feature = "safetensors", doc = "| a layer into a file | [`io::Layout::save`] |")]
#![cfg_attr(
    feature = "safetensors",
    doc = "| tensors from a file, and into one | [`io::Tensors`], [`io::TensorMap`] |"
)]
//!
//! # The contract
//!
//! - **Formula.** `s = scale * q k^T` (relative keys are part of `k`), soft cap, biases, mask, softmax (a sink adds to the denominator only), `context =
//!   weights v`; in this order on every path. See [`attention`].
//! - **Shapes.** Layers take `[batch, len, d_model]` or `[len, d_model]`, the core `[batch, heads, len, head_dim]`;
//!   weights are `[in, out]`. Any strides are right, the standard layout is fast.
//! - **Masks.** A mask says who *may* attend, and masks combine by `&`. Causal masks align the last query with the last
//!   valid key, windows include both ends. See [`Mask`].
//! - **Empty rows.** A query that sees no key has context 0, weights 0 and `lse = -inf` (its sink, if it has one).
//! - **Hidden is hidden.** A pair that a mask hides contributes nothing, be it NaN or infinite; a visible NaN comes out.
//! - **Groups.** Query head h reads KV head `h / group_size` unless a map says otherwise; K and V are never repeated.
//! - **Determinism.** The same bits for any number of threads; instruction sets and paths agree within rounding.
//! - **Memory.** No array of `q_len x kv_len` unless the weights are asked for. See [`Workspace`] for the bound.
//! - **Threads.** The current rayon pool is used and none is created; small calls stay on their thread.
//! - **Errors.** Every call that can be wrong returns a [`Result`] whose [`Error`] names the argument, what was expected
//!   and what came; nothing has been written then. No input makes the crate panic.
//!
//! # Features
//!
//! - `rayon` (default): parallel heads, batch entries and query tiles.
//! - `half`: caches that keep `f16` or `bf16`, see [`Storage`].
//! - `safetensors`: the module `io`, which reads layers and tensors from the bytes of a file and writes them.
//! - `serde`: [`Config`] and what it holds are read and written.

pub mod attention;
pub mod block;
mod cache;
mod compiled;
mod element;
mod error;
mod heads;
pub mod inspect;
#[cfg(feature = "safetensors")]
pub mod io;
mod kernels;
mod linear;
mod mask;
mod mha;
mod norm;
mod parallel;
pub mod position;
mod prepack;

pub use attention::{Attended, Gradients, Options, Path, Saved, Workspace};
pub use cache::{CacheShape, KvCache, Storage};
pub use element::Element;
pub use error::{Error, Lengths, Result};
#[cfg(feature = "half")]
pub use half;
pub use heads::HeadMap;
pub use kernels::{Level, UnknownLevel};
pub use mask::{BoundMask, Mask, Visibility};
pub use mha::{
    Builder, Config, Init, Inputs, LayerGradients, LayerOutput, MultiHeadAttention, Projection, Recording, Sequence,
    Tape, Weights,
};
pub use ndarray;
pub use position::{Positions, Rope, RopeScaling, RopeStyle};

/// The snippets of the README are tests.
#[cfg(all(doctest, feature = "safetensors"))]
#[doc = include_str!("../README.md")]
struct Readme;
