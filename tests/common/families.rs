//! Where the families of models keep their attention layers, and which rules these attend by.
//!
//! One short function for each family takes the model's configuration and returns a [`Plan`]; the library's own
//! layouts do the rest.

use multihead::io::{Layout, Tensors};
use multihead::ndarray::Array2;
use multihead::position::{Buckets, Llama3, Yarn};
use multihead::{Builder, Config, Mask, MultiHeadAttention, Rope, RopeScaling, RopeStyle, Weights};
use serde_json::Value;

use super::cases::Fault;
use super::models::File;

/// An attention layer of a model.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) config: Config,
    pub(crate) weights: Weights<f64>,
    /// Whom the layer lets see whom, before padding.
    pub(crate) mask: Mask,
}

/// How an attention layer of a model is made.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub(crate) builder: Builder<f64>,
    pub(crate) layout: Layout,
    mask: Mask,
}

impl Plan {
    /// Full attention of heads that split the model's width.
    fn new(file: &File, heads: &str, layout: Layout) -> Result<Self, Fault> {
        let d_model = ["hidden_size", "n_embd", "d_model"].into_iter().find_map(|key| file.size(key).ok());
        let builder = MultiHeadAttention::builder(d_model.ok_or("config: no width")?, file.size(heads)?);
        Ok(Self { builder, layout, mask: Mask::none() })
    }

    fn causal(mut self) -> Self {
        self.mask = Mask::causal();
        self
    }

    fn build(mut self, build: impl FnOnce(Builder<f64>) -> Builder<f64>) -> Self {
        self.builder = build(self.builder);
        self
    }

    pub(crate) fn load(&self, tensors: &Tensors<'_>) -> Result<MultiHeadAttention<f64>, Fault> {
        self.builder.clone().load(tensors, &self.layout).map_err(|e| e.to_string())
    }
}

/// The attention module of a family that stands at `index` in the order of the forward pass.
pub(crate) fn attention(file: &File, index: usize) -> Result<Attention, Fault> {
    let plan = plan(file, index)?;
    let mha = plan.load(&file.named()?)?;
    let (config, mut weights) = (mha.config().clone(), mha.into_weights());
    if file.family == "bert" {
        // The captured module ends before the output projection.
        weights = Weights { w_o: Array2::eye(weights.w_v.ncols()), b_o: None, ..weights };
    }
    Ok(Attention { config, weights, mask: plan.mask })
}

/// PyTorch's module at a prefix.
pub(crate) fn torch_attention(file: &File, prefix: &str) -> Result<Attention, Fault> {
    let plan = torch(file, prefix)?;
    let mha = plan.load(&file.named()?)?;
    Ok(Attention { config: mha.config().clone(), weights: mha.into_weights(), mask: plan.mask })
}

/// How that module is made.
pub(crate) fn plan(file: &File, index: usize) -> Result<Plan, Fault> {
    match file.family.as_str() {
        "bert" => Plan::new(file, "num_attention_heads", Layout::bert(&format!("encoder.layer.{index}.attention"))),
        "minilm" => minilm(file),
        "gpt2" => Ok(Plan::new(file, "n_head", Layout::gpt2(&format!("transformer.h.{index}.attn")))?.causal()),
        "gpt_bigcode" => {
            let layout = Layout::gpt_bigcode(&format!("transformer.h.{index}.attn"));
            Ok(Plan::new(file, "n_head", layout)?.causal().build(|builder| builder.num_kv_heads(1)))
        }
        "gpt_neox" => gpt_neox(file, index),
        "falcon" => falcon(file, index),
        "llama" | "mistral" | "qwen3" | "gemma2" | "gpt_oss" => llama(file, index),
        "llama_meta" => llama_meta(file, index),
        "t5" => t5(file, index),
        "vit" => Plan::new(file, "num_attention_heads", Layout::vit(&format!("layers.{index}.attention"))),
        "detr" => detr(file, index),
        "torch" => torch(file, ""),
        other => Err(format!("unknown family {other}")),
    }
}

/// Encoder layers come first, then for each decoder layer self-attention and cross-attention.
pub(crate) enum Place {
    Encoder(usize),
    DecoderSelf(usize),
    DecoderCross(usize),
}

pub(crate) fn place(index: usize, encoder_layers: usize) -> Place {
    match index.checked_sub(encoder_layers) {
        None => Place::Encoder(index),
        Some(later) if later % 2 == 0 => Place::DecoderSelf(later / 2),
        Some(later) => Place::DecoderCross(later / 2),
    }
}

/// One BERT layer under short names.
fn minilm(file: &File) -> Result<Plan, Fault> {
    let layout = Layout::separate(["query", "key", "value", "output.dense"]).always_biased();
    Ok(Plan { builder: MultiHeadAttention::builder(384, file.size("num_heads")?), layout, mask: Mask::none() })
}

/// Part of each head turns.
fn gpt_neox(file: &File, index: usize) -> Result<Plan, Fault> {
    let layout = Layout::gpt_neox(&format!("gpt_neox.layers.{index}.attention"));
    let head_dim = file.size("hidden_size")? / file.size("num_attention_heads")?;
    let rope = rope(&file.config, RopeStyle::HalfSplit, head_dim)?;
    Ok(Plan::new(file, "num_attention_heads", layout)?.causal().build(|builder| builder.rope(rope)))
}

/// The number of groups counts in the new architecture only.
fn falcon(file: &File, index: usize) -> Result<Plan, Fault> {
    let layout = Layout::falcon(&format!("transformer.h.{index}.self_attention"));
    let num_heads = file.size("num_attention_heads")?;
    let flag = |key: &str| file.config.get(key) == Some(&Value::Bool(true));
    let kv_heads = match (flag("new_decoder_architecture"), flag("multi_query")) {
        (true, _) => file.size("num_kv_heads")?,
        (false, true) => 1,
        (false, false) => num_heads,
    };
    let plan = Plan::new(file, "num_attention_heads", layout)?.causal().build(|builder| builder.num_kv_heads(kv_heads));
    if flag("alibi") {
        return Ok(plan.build(Builder::alibi));
    }
    let rope = rope(&file.config, RopeStyle::HalfSplit, file.size("hidden_size")? / num_heads)?;
    Ok(plan.build(|builder| builder.rope(rope)))
}

/// LLaMA and those that followed it.
fn llama(file: &File, index: usize) -> Result<Plan, Fault> {
    let layout = Layout::llama(&format!("model.layers.{index}.self_attn"));
    let head_dim = file.size("head_dim")?;
    let number = |key: &str| file.config.get(key).and_then(Value::as_f64);
    let mut plan = Plan::new(file, "num_attention_heads", layout)?.causal();
    if let Some(n) = window(&file.config, index)? {
        plan.mask = plan.mask & Mask::last_n(n);
    }
    let builder = plan.builder.head_dim(head_dim).num_kv_heads(file.size("num_key_value_heads")?);
    let mut builder = builder.rope(rope(&file.config, RopeStyle::HalfSplit, head_dim)?);
    if let Some(scalar) = number("query_pre_attn_scalar") {
        builder = builder.scale(scalar.sqrt().recip());
    }
    if let Some(softcap) = number("attn_logit_softcapping") {
        builder = builder.softcap(softcap);
    }
    builder = match file.family.as_str() {
        "qwen3" => builder.qk_norm(number("rms_norm_eps").ok_or("no rms_norm_eps")?),
        "gpt_oss" => builder.sinks().bias(),
        _ => builder,
    };
    Ok(Plan { builder, ..plan })
}

/// LLaMA under Meta's names, whose rows stand in pairs.
fn llama_meta(file: &File, index: usize) -> Result<Plan, Fault> {
    let plan = Plan::new(file, "num_attention_heads", Layout::llama_meta(&format!("layers.{index}.attention")))?;
    let head_dim = file.size("head_dim")?;
    let rope = rope(&file.config, RopeStyle::Interleaved, head_dim)?;
    let kv_heads = file.size("num_key_value_heads")?;
    Ok(plan.causal().build(|builder| builder.head_dim(head_dim).num_kv_heads(kv_heads).rope(rope)))
}

/// No scale; the first layer of each stack holds the biases by distance of all of them, and cross-attention has none.
fn t5(file: &File, index: usize) -> Result<Plan, Fault> {
    let own = |stack: &str, i: usize| format!("{stack}.block.{i}.layer.0.SelfAttention");
    let (stack, layer) = match place(index, file.size("num_layers")?) {
        Place::Encoder(i) => (Some("encoder"), own("encoder", i)),
        Place::DecoderSelf(i) => (Some("decoder"), own("decoder", i)),
        Place::DecoderCross(i) => (None, format!("decoder.block.{i}.layer.1.EncDecAttention")),
    };
    let plan = Plan::new(file, "num_heads", Layout::t5(&layer))?.build(|builder| builder.scale(1.0));
    let Some(stack) = stack else { return Ok(plan) };
    let count = file.size("relative_attention_num_buckets")?;
    let max_distance = file.size("relative_attention_max_distance")?;
    let (buckets, mask) = match stack {
        "decoder" => (Buckets::T5Causal { count, max_distance }, Mask::causal()),
        _ => (Buckets::T5 { count, max_distance }, Mask::none()),
    };
    let layout = plan.layout.relative_bias(&format!("{}.relative_attention_bias.weight", own(stack, 0)));
    Ok(Plan { builder: plan.builder.relative_bias(buckets), layout, mask })
}

fn detr(file: &File, index: usize) -> Result<Plan, Fault> {
    let (layer, heads) = match place(index, file.size("encoder_layers")?) {
        Place::Encoder(i) => (format!("encoder.layers.{i}.self_attn"), "encoder_attention_heads"),
        Place::DecoderSelf(i) => (format!("decoder.layers.{i}.self_attn"), "decoder_attention_heads"),
        Place::DecoderCross(i) => (format!("decoder.layers.{i}.encoder_attn"), "decoder_attention_heads"),
    };
    Plan::new(file, heads, Layout::detr(&layer))
}

/// `nn.MultiheadAttention`. The sizes are not in such a file, but those of its tensors.
pub(crate) fn torch(file: &File, prefix: &str) -> Result<Plan, Fault> {
    let named = file.named()?;
    let below = |name: &str| if prefix.is_empty() { name.to_owned() } else { format!("{prefix}.{name}") };
    let axis = |name: &str, axis: usize| named.shape(&below(name)).and_then(|shape| shape.get(axis)).copied();
    let d_model = axis("out_proj.weight", 0).ok_or("no out_proj.weight")?;
    let builder = MultiHeadAttention::builder(d_model, file.heads_of_weights().unwrap_or(6));
    let (builder, layout) = match (axis("k_proj_weight", 1), axis("v_proj_weight", 1)) {
        (Some(k_dim), Some(v_dim)) => (builder.k_dim(k_dim).v_dim(v_dim), Layout::torch_separate(prefix)),
        _ => (builder, Layout::torch(prefix)),
    };
    Ok(Plan { builder, layout, mask: Mask::none() })
}

/// How many keys a layer's window holds, the token's own among them.
fn window(config: &Value, index: usize) -> Result<Option<usize>, Fault> {
    let size = match config.get("sliding_window") {
        None | Some(Value::Null) => return Ok(None),
        Some(size) => size.as_u64().ok_or(format!("sliding_window: unknown {size}"))? as usize,
    };
    match config.get("layer_types").and_then(|types| types.get(index)).map(Value::as_str) {
        None | Some(Some("sliding_attention")) => Ok(Some(size)),
        Some(Some("full_attention")) => Ok(None),
        Some(other) => Err(format!("layer_types: unknown {other:?}")),
    }
}

/// RoPE from `rope_parameters`.
fn rope(config: &Value, style: RopeStyle, head_dim: usize) -> Result<Rope, Fault> {
    let parameters = config.get("rope_parameters").ok_or("no rope_parameters")?;
    let optional = |key: &str| parameters.get(key).and_then(Value::as_f64);
    let number = |key: &str| optional(key).ok_or(format!("rope_parameters: no {key}"));
    let count = |key: &str| number(key).map(|number| number as usize);
    let rope = Rope::new(style, number("rope_theta")?);
    let rope = match optional("partial_rotary_factor") {
        Some(share) => rope.dims((head_dim as f64 * share) as usize),
        None => rope,
    };
    let scaling = match parameters.get("rope_type").and_then(Value::as_str) {
        Some("default") => return Ok(rope),
        Some("linear") => RopeScaling::Linear { factor: number("factor")? },
        Some("llama3") => RopeScaling::Llama3(Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_len: count("original_max_position_embeddings")?,
        }),
        Some("yarn") => {
            let yarn = Yarn::new(number("factor")?, count("original_max_position_embeddings")?);
            let yarn = yarn.betas(optional("beta_fast").unwrap_or(32.0), optional("beta_slow").unwrap_or(1.0));
            let yarn = optional("attention_factor").map_or(yarn, |factor| yarn.attention_factor(factor));
            match parameters.get("truncate") {
                None | Some(Value::Bool(true)) => RopeScaling::Yarn(yarn),
                Some(Value::Bool(false)) => RopeScaling::Yarn(yarn.exact_bounds()),
                Some(other) => return Err(format!("rope truncate: unknown {other}")),
            }
        }
        other => return Err(format!("rope_type: unknown {other:?}")),
    };
    Ok(rope.scaling(scaling))
}
