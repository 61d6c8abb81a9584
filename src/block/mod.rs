//! What surrounds attention in a Transformer: norms, feed-forward blocks, residuals, and stacks of all that.
//!
//! ```text
//! Norms::Post      x = norm(x + attention(x));  x = norm(x + cross(x, memory));  x = norm(x + feed_forward(x))
//! Norms::Pre       x += attention(norm(x));     x += cross(norm(x), memory);     x += feed_forward(norm(x))
//! Norms::Parallel  x += attention(norm(x)) + feed_forward(norm(x))
//! ```
//!
//! | you want | look at |
//! | --- | --- |
//! | LayerNorm, RMSNorm | [`Norm::layer`], [`Norm::rms`] |
//! | two products with GELU, ReLU or SiLU between them, SwiGLU | [`FeedForward`] |
//! | an encoder or decoder layer | [`Block`] |
//! | many of them, with caches | [`Stack`] |
//! | other heads, norms or weights in one that is there | [`BlockParts`] |
//! | gradients of a block | [`Block::forward_train`], then [`Block::backward`] |
//! | those of a stack, and an optimiser | [`Stack::forward_train`], [`Stack::backward`], [`Stack::parameters_mut`] |
//!
//! Tokens are `[batch, len, d_model]` or `[len, d_model]`. Embeddings and heads of models are the caller's: a row of a
//! table and a product. The `*_into` functions of blocks and stacks allocate nothing from call to call, unless position
//! embeddings are added to the tokens. The folder `examples` builds BERT, GPT-2, LLaMA and others of these.

mod activation;
mod call;
mod decode;
mod feed_forward;
mod layer;
mod norm;
mod parameters;
mod parts;
mod stack;
mod train;

pub use activation::Activation;
pub(crate) use activation::{Part, activate};
pub use call::Call;
pub use decode::BlockCache;
pub use feed_forward::{FeedForward, FeedForwardGradients, FeedForwardWeights};
pub(crate) use layer::Room;
pub use layer::{Block, Norms};
pub use norm::{Norm, NormGradients, NormWeights};
pub use parameters::{BlockNorms, BlockWeights, StackWeights};
pub use parts::BlockParts;
pub use stack::{Stack, StackTape};
pub use train::{BlockGradients, BlockTape, StackGradients};
