//! Attention layers from files and back.
//!
//! | you want | look at |
//! | --- | --- |
//! | a layer from a file | [`Builder::load`](crate::Builder::load) with a [`Layout`] |
//! | a layer into a file | [`Layout::save`] to a [`TensorMap`] |
//! | any array from a file | [`Tensors`] |
//! | any array into a file | [`TensorMap`] |
//!
//! What the families of models call the tensors of an attention layer, and how they lay them out (matrices end in `.weight`
//! and biases in `.bias`; biases, norms and sinks may be absent unless a family always has them):
//!
//! | constructor | names after the prefix | stored |
//! | --- | --- | --- |
//! | [`Layout::torch`] | `in_proj_weight`, `in_proj_bias`, `out_proj` | `[out, in]`, fused in blocks |
//! | [`Layout::torch_separate`] | `q_proj_weight`, .., `in_proj_bias`, `out_proj` | `[out, in]`, biases fused in blocks |
//! | [`Layout::bert`] | `self.query`, `self.key`, `self.value`, `output.dense` | `[out, in]` |
//! | [`Layout::gpt2`] | `c_attn`, `c_proj` | `[in, out]`, fused in blocks |
//! | [`Layout::gpt_bigcode`] | `c_attn`, `c_proj` | `[out, in]`, fused in groups |
//! | [`Layout::gpt_neox`] | `query_key_value`, `dense` | `[out, in]`, fused in groups, rows for half-split RoPE |
//! | [`Layout::falcon`] | `query_key_value`, `dense` | `[out, in]`, fused in groups, rows for half-split RoPE |
//! | [`Layout::llama`] | `q_proj`, `k_proj`, `v_proj`, `o_proj`; `q_norm`, `k_norm`, `sinks` | `[out, in]`, rows for half-split RoPE |
//! | [`Layout::gemma3`] | as LLaMA | as LLaMA, norms less 1 |
//! | [`Layout::llama_meta`] | `wq`, `wk`, `wv`, `wo` | `[out, in]`, rows for interleaved RoPE |
//! | [`Layout::t5`] | `q`, `k`, `v`, `o`; `relative_attention_bias` | `[out, in]` |
//! | [`Layout::vit`], [`Layout::detr`] | `q_proj`, `k_proj`, `v_proj`, `o_proj` | `[out, in]` |

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
