//! How the families of models name and lay out the weights of an attention layer, and which rules they attend by.
//!
//! One short function for each family takes the tensors of a layer and the model's configuration and returns an
//! [`Attention`]. Weights come out `[in, out]`, whatever the file has.

use multihead::ndarray::{Array1, Array2, ArrayRef1, Axis, Ix1, Ix2, s};
use multihead::position::{Alibi, Buckets, Llama3, Yarn};
use multihead::{Mask, Rope, RopeScaling, RopeStyle, Weights};
use serde_json::Value;

use super::cases::Fault;
use super::models::File;

/// An attention layer of a model.
#[derive(Debug, Clone)]
pub(crate) struct Attention {
    pub(crate) num_heads: usize,
    pub(crate) num_kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) scale: Option<f64>,
    pub(crate) softcap: Option<f64>,
    pub(crate) qk_norm_eps: Option<f64>,
    pub(crate) rope: Option<Rope>,
    pub(crate) alibi: Option<Alibi>,
    pub(crate) relative_bias: Option<(Buckets, Array2<f64>)>,
    pub(crate) weights: Weights<f64>,
    /// Whom the layer lets see whom, before padding.
    pub(crate) mask: Mask,
}

impl Attention {
    /// Full attention of heads that split `d_model`.
    fn new(num_heads: usize, weights: Weights<f64>) -> Self {
        Self {
            num_heads,
            num_kv_heads: num_heads,
            head_dim: weights.w_q.ncols() / num_heads,
            scale: None,
            softcap: None,
            qk_norm_eps: None,
            rope: None,
            alibi: None,
            relative_bias: None,
            weights,
            mask: Mask::none(),
        }
    }

    fn causal(mut self) -> Self {
        self.mask = Mask::causal();
        self
    }

    fn kv_heads(mut self, num_kv_heads: usize) -> Self {
        self.num_kv_heads = num_kv_heads;
        self
    }

    fn rope(mut self, rope: Rope) -> Self {
        self.rope = Some(rope);
        self
    }
}

/// The attention module of a family that stands at `index` in the order of the forward pass.
pub(crate) fn attention(file: &File, index: usize) -> Result<Attention, Fault> {
    match file.family.as_str() {
        "bert" => bert(file, index),
        "minilm" => minilm(file),
        "gpt2" => gpt2(file, index),
        "gpt_bigcode" => gpt_bigcode(file, index),
        "gpt_neox" => gpt_neox(file, index),
        "falcon" => falcon(file, index),
        "llama" | "mistral" | "qwen3" | "gemma2" | "gpt_oss" => llama(file, index),
        "llama_meta" => llama_meta(file, index),
        "t5" => t5(file, index),
        "vit" => vit(file, index),
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

/// Separate matrices `[out, in]`, named by what stands before `.weight` and `.bias`; biases if there are any.
fn separate(file: &File, [q, k, v, o]: [String; 4]) -> Result<Weights<f64>, Fault> {
    let w = |name: &str| linear(file, &format!("{name}.weight"));
    let b = |name: &str| file.optional::<Ix1>(&format!("{name}.bias"));
    let weights = Weights::new(w(&q)?, w(&k)?, w(&v)?, w(&o)?);
    Ok(Weights { b_q: b(&q)?, b_k: b(&k)?, b_v: b(&v)?, b_o: b(&o)?, ..weights })
}

/// Queries, keys and values: matrices `[in, out]`, and biases if there are any.
struct Fused([Array2<f64>; 3], Option<[Array1<f64>; 3]>);

impl Fused {
    /// With the output projection.
    fn into_weights(self, w_o: Array2<f64>, b_o: Option<Array1<f64>>) -> Weights<f64> {
        let Self([w_q, w_k, w_v], biases) = self;
        let weights = Weights::new(w_q, w_k, w_v, w_o);
        match biases {
            None => Weights { b_o, ..weights },
            Some([b_q, b_k, b_v]) => Weights { b_q: Some(b_q), b_k: Some(b_k), b_v: Some(b_v), b_o, ..weights },
        }
    }

    /// From rows `[out, in]` of which the ranges belong to queries, keys and values.
    fn from_rows(w: &Array2<f64>, b: Option<&Array1<f64>>, rows: [Vec<usize>; 3]) -> Result<Self, Fault> {
        let total: usize = rows.iter().map(Vec::len).sum();
        if w.nrows() != total || b.is_some_and(|b| b.len() != total) {
            return Err(format!("a fused matrix of {:?} and not of {total} rows", w.dim()));
        }
        let biases = b.map(|b| rows.each_ref().map(|rows| b.select(Axis(0), rows)));
        Ok(Self(rows.map(|rows| w.select(Axis(0), &rows).reversed_axes()), biases))
    }
}

/// Rows of queries, keys and values that lie one block after the other.
fn in_blocks([q, k, v]: [usize; 3]) -> [Vec<usize>; 3] {
    [(0..q).collect(), (q..q + k).collect(), (q + k..q + k + v).collect()]
}

/// Rows that lie group by group: `queries` heads, a key head, a value head.
fn in_groups(groups: usize, queries: usize, head_dim: usize) -> [Vec<usize>; 3] {
    let size = (queries + 2) * head_dim;
    let rows = |first: usize, heads: usize| {
        (0..groups).flat_map(|g| g * size + first * head_dim..g * size + (first + heads) * head_dim).collect()
    };
    [rows(0, queries), rows(queries, 1), rows(queries + 1, 1)]
}

/// A matrix that is stored `[out, in]`.
fn linear(file: &File, name: &str) -> Result<Array2<f64>, Fault> {
    Ok(file.need::<Ix2>(name)?.reversed_axes())
}

/// `query`, `key` and `value`; the module ends before the output projection.
fn bert(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("encoder.layer.{index}.attention.self.{part}");
    let matrix = |part: &str| linear(file, &format!("{}.weight", name(part)));
    let bias = |part: &str| file.need::<Ix1>(&format!("{}.bias", name(part))).map(Some);
    let w_q = matrix("query")?;
    let w_o = Array2::eye(w_q.ncols());
    let weights = Weights::new(w_q, matrix("key")?, matrix("value")?, w_o);
    let weights = Weights { b_q: bias("query")?, b_k: bias("key")?, b_v: bias("value")?, ..weights };
    Ok(Attention::new(file.size("num_attention_heads")?, weights))
}

/// One BERT layer, with its output projection.
fn minilm(file: &File) -> Result<Attention, Fault> {
    let weights = separate(file, ["query", "key", "value", "output.dense"].map(str::to_owned))?;
    Ok(Attention::new(file.size("num_heads")?, weights))
}

/// `c_attn` holds queries, keys and values side by side, stored `[in, out]`.
fn gpt2(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("transformer.h.{index}.attn.{part}");
    let (w, b) = (file.need::<Ix2>(&name("c_attn.weight"))?, file.need::<Ix1>(&name("c_attn.bias"))?);
    let d_model = w.nrows();
    let fused = Fused::from_rows(&w.reversed_axes(), Some(&b), in_blocks([d_model; 3]))?;
    let weights = fused.into_weights(file.need(&name("c_proj.weight"))?, Some(file.need(&name("c_proj.bias"))?));
    Ok(Attention::new(file.size("n_head")?, weights).causal())
}

/// `c_attn` holds all queries, then the one key head, then the one value head.
fn gpt_bigcode(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("transformer.h.{index}.attn.{part}");
    let num_heads = file.size("n_head")?;
    let (w, b) = (file.need::<Ix2>(&name("c_attn.weight"))?, file.need::<Ix1>(&name("c_attn.bias"))?);
    let (d_model, head_dim) = (w.ncols(), w.ncols() / num_heads);
    let fused = Fused::from_rows(&w, Some(&b), in_blocks([d_model, head_dim, head_dim]))?;
    let weights = fused.into_weights(linear(file, &name("c_proj.weight"))?, Some(file.need(&name("c_proj.bias"))?));
    Ok(Attention::new(num_heads, weights).kv_heads(1).causal())
}

/// `query_key_value` holds the query, key and value of each head together; part of each head turns.
fn gpt_neox(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("gpt_neox.layers.{index}.attention.{part}");
    let num_heads = file.size("num_attention_heads")?;
    let w: Array2<f64> = file.need(&name("query_key_value.weight"))?;
    let b: Option<Array1<f64>> = file.optional(&name("query_key_value.bias"))?;
    let head_dim = w.ncols() / num_heads;
    let fused = Fused::from_rows(&w, b.as_ref(), in_groups(num_heads, 1, head_dim))?;
    let weights = fused.into_weights(linear(file, &name("dense.weight"))?, file.optional(&name("dense.bias"))?);
    let rope = rope(&file.config, RopeStyle::HalfSplit, head_dim)?;
    Ok(Attention::new(num_heads, weights).causal().rope(rope))
}

/// `query_key_value`, group by group in the new architecture; before that all queries, one key head, one value head.
fn falcon(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("transformer.h.{index}.self_attention.{part}");
    let num_heads = file.size("num_attention_heads")?;
    let w: Array2<f64> = file.need(&name("query_key_value.weight"))?;
    let b: Option<Array1<f64>> = file.optional(&name("query_key_value.bias"))?;
    let (d_model, head_dim) = (w.ncols(), w.ncols() / num_heads);
    let flag = |key: &str| file.config.get(key) == Some(&Value::Bool(true));
    let (kv_heads, rows) = match (flag("new_decoder_architecture"), flag("multi_query")) {
        (true, _) => {
            let groups = file.size("num_kv_heads")?;
            (groups, in_groups(groups, num_heads / groups, head_dim))
        }
        (false, true) => (1, in_blocks([d_model, head_dim, head_dim])),
        (false, false) => (num_heads, in_groups(num_heads, 1, head_dim)),
    };
    let fused = Fused::from_rows(&w, b.as_ref(), rows)?;
    let weights = fused.into_weights(linear(file, &name("dense.weight"))?, file.optional(&name("dense.bias"))?);
    let attention = Attention::new(num_heads, weights).kv_heads(kv_heads).causal();
    match flag("alibi") {
        true => Ok(Attention { alibi: Some(Alibi::new(num_heads)), ..attention }),
        false => Ok(attention.rope(rope(&file.config, RopeStyle::HalfSplit, head_dim)?)),
    }
}

/// LLaMA and those that followed it: what a model adds is there if the file has it.
fn llama(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("model.layers.{index}.self_attn.{part}");
    let weights = separate(file, ["q_proj", "k_proj", "v_proj", "o_proj"].map(name))?;
    let (q_norm, k_norm) = (file.optional(&name("q_norm.weight"))?, file.optional(&name("k_norm.weight"))?);
    let weights = Weights { sinks: file.optional(&name("sinks"))?, q_norm, k_norm, ..weights };
    let head_dim = file.size("head_dim")?;
    let number = |key: &str| file.config.get(key).and_then(Value::as_f64);
    let window = window(&file.config, index)?;
    Ok(Attention {
        head_dim,
        scale: number("query_pre_attn_scalar").map(|scalar| scalar.sqrt().recip()),
        softcap: number("attn_logit_softcapping"),
        qk_norm_eps: number("rms_norm_eps"),
        mask: window.map_or(Mask::causal(), |n| Mask::causal() & Mask::last_n(n)),
        ..Attention::new(file.size("num_attention_heads")?, weights)
            .kv_heads(file.size("num_key_value_heads")?)
            .rope(rope(&file.config, RopeStyle::HalfSplit, head_dim)?)
    })
}

/// LLaMA under Meta's names, whose rows stand in pairs.
fn llama_meta(file: &File, index: usize) -> Result<Attention, Fault> {
    let weights = separate(file, ["wq", "wk", "wv", "wo"].map(|part| format!("layers.{index}.attention.{part}")))?;
    let head_dim = file.size("head_dim")?;
    Ok(Attention::new(file.size("num_attention_heads")?, weights)
        .kv_heads(file.size("num_key_value_heads")?)
        .causal()
        .rope(rope(&file.config, RopeStyle::Interleaved, head_dim)?))
}

/// No scale; the first layer of each stack holds the biases by distance of all of them, and cross-attention has none.
fn t5(file: &File, index: usize) -> Result<Attention, Fault> {
    let (stack, layer, causal) = match place(index, file.size("num_layers")?) {
        Place::Encoder(i) => (Some("encoder"), format!("encoder.block.{i}.layer.0.SelfAttention"), false),
        Place::DecoderSelf(i) => (Some("decoder"), format!("decoder.block.{i}.layer.0.SelfAttention"), true),
        Place::DecoderCross(i) => (None, format!("decoder.block.{i}.layer.1.EncDecAttention"), false),
    };
    let weights = separate(file, ["q", "k", "v", "o"].map(|part| format!("{layer}.{part}")))?;
    let count = file.size("relative_attention_num_buckets")?;
    let max_distance = file.size("relative_attention_max_distance")?;
    let buckets = match causal {
        true => Buckets::T5Causal { count, max_distance },
        false => Buckets::T5 { count, max_distance },
    };
    let relative_bias = match stack {
        Some(stack) => {
            let name = format!("{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight");
            Some((buckets, file.need(&name)?))
        }
        None => None,
    };
    Ok(Attention {
        scale: Some(1.0),
        relative_bias,
        mask: if causal { Mask::causal() } else { Mask::none() },
        ..Attention::new(file.size("num_heads")?, weights)
    })
}

fn vit(file: &File, index: usize) -> Result<Attention, Fault> {
    let name = |part: &str| format!("layers.{index}.attention.{part}");
    let weights = separate(file, ["q_proj", "k_proj", "v_proj", "o_proj"].map(name))?;
    Ok(Attention::new(file.size("num_attention_heads")?, weights))
}

fn detr(file: &File, index: usize) -> Result<Attention, Fault> {
    let (layer, heads) = match place(index, file.size("encoder_layers")?) {
        Place::Encoder(i) => (format!("encoder.layers.{i}.self_attn"), "encoder_attention_heads"),
        Place::DecoderSelf(i) => (format!("decoder.layers.{i}.self_attn"), "decoder_attention_heads"),
        Place::DecoderCross(i) => (format!("decoder.layers.{i}.encoder_attn"), "decoder_attention_heads"),
    };
    let weights = separate(file, ["q_proj", "k_proj", "v_proj", "o_proj"].map(|part| format!("{layer}.{part}")))?;
    Ok(Attention::new(file.size(heads)?, weights))
}

/// `nn.MultiheadAttention`: one matrix of rows for queries, keys and values, or three where widths differ; one bias.
/// `prefix` is empty or ends with a dot. The number of heads is not in such a file.
pub(crate) fn torch(file: &File, prefix: &str) -> Result<Attention, Fault> {
    let name = |part: &str| format!("{prefix}{part}");
    let b: Option<Array1<f64>> = file.optional(&name("in_proj_bias"))?;
    let w_o = linear(file, &name("out_proj.weight"))?;
    let d_model = w_o.nrows();
    let fused = match file.optional::<Ix2>(&name("in_proj_weight"))? {
        Some(w) => Fused::from_rows(&w, b.as_ref(), in_blocks([d_model; 3]))?,
        None => {
            let third = |b: &ArrayRef1<f64>, i: usize| b.slice(s![i * d_model..(i + 1) * d_model]).to_owned();
            let w = |part: &str| linear(file, &name(part));
            let biases = b.map(|b| [0, 1, 2].map(|i| third(&b, i)));
            Fused([w("q_proj_weight")?, w("k_proj_weight")?, w("v_proj_weight")?], biases)
        }
    };
    let weights = fused.into_weights(w_o, file.optional(&name("out_proj.bias"))?);
    Ok(Attention::new(file.heads_of_weights().unwrap_or(6), weights))
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
