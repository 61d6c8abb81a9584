//! Reader of model files: the tensors of a whole model, what its attention modules were given and what they returned.
//!
//! `attn.I.NAME` is an argument of the I-th attention module in the order of the forward pass, `want.attn.I.output` its
//! right output. Files of PyTorch's own layer have `input.NAME` and `want.NAME` instead. Whatever is unknown is a fault.

use multihead::Mask;
use multihead::io::Tensors;
use multihead::ndarray::{Array, Array2, Array3, Array4, ArrayD, Axis, Dimension, Ix2, Ix3, Ix4};
use safetensors::tensor::SafeTensors;
use serde_json::Value;
use std::collections::BTreeMap;

use super::cases::{Fault, decode, known};
use super::distances::Distances;
use super::families::{Attention, attention, torch_attention};
use super::layer::Layer;
use super::{Call, Way, transformer};

/// The tensors and the configuration of a model.
#[derive(Debug, Clone)]
pub(crate) struct File {
    pub(crate) family: String,
    pub(crate) config: Value,
    pub(crate) tensors: BTreeMap<String, ArrayD<f64>>,
    bytes: Vec<u8>,
}

/// What a file has right answers for.
pub(crate) enum Part {
    Module(Box<Module>),
    /// The stacks of an encoder-decoder, with all their attention modules.
    Stacks(File),
}

/// A right answer and what came out.
pub(crate) struct Pair {
    pub(crate) name: String,
    pub(crate) got: ArrayD<f64>,
    pub(crate) want: ArrayD<f64>,
}

impl Part {
    /// Computes everything this way.
    pub(crate) fn pairs(&self, way: Way) -> Result<Vec<Pair>, Fault> {
        match self {
            Self::Module(module) => {
                let Module { name, layer, output, weights } = &**module;
                let answer = layer.answer(way).map_err(|e| format!("{name} {way}: {e}"))?;
                let pair = |got, want| Pair { name: name.clone(), got, want };
                let mut pairs = vec![pair(answer.out, output.clone().into_dyn())];
                if let (Some(got), Some(want)) = (answer.weights, weights) {
                    pairs.push(pair(got.into_dyn(), want.clone().into_dyn()));
                }
                Ok(pairs)
            }
            Self::Stacks(file) => {
                let [memory, out] = transformer::stacks(file, way)?;
                let pair = |name: &str, got: Array3<f64>| -> Result<Pair, Fault> {
                    let want = file.need::<Ix3>(&format!("want.{name}"))?.into_dyn();
                    Ok(Pair { name: name.to_owned(), got: got.into_dyn(), want })
                };
                Ok(vec![pair("memory", memory)?, pair("out", out)?])
            }
        }
    }
}

/// An attention module with its inputs and its right answers.
#[derive(Debug, Clone)]
pub(crate) struct Module {
    pub(crate) name: String,
    pub(crate) layer: Layer,
    /// `[batch, q_len, d_model]`
    pub(crate) output: Array3<f64>,
    /// `[batch, num_heads, q_len, kv_len]`
    pub(crate) weights: Option<Array4<f64>>,
}

/// The arguments of an attention module.
const ARGUMENTS: [&str; 7] = [
    "hidden_states",
    "key_value_states",
    "attention_mask",
    "mask",
    "position_bias",
    "position_embeddings",
    "encoder_position_embeddings",
];

impl File {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let metadata = header.metadata().clone().ok_or("no metadata")?;
        let mut tensors = BTreeMap::new();
        for (name, tensor) in SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?.tensors() {
            let values = decode(tensor.dtype(), tensor.shape(), tensor.data()).map_err(|e| format!("{name}: {e}"))?;
            tensors.insert(name, values);
        }
        let (family, config) = match (metadata.get("family"), metadata.get("model")) {
            (Some(family), _) => (family.clone(), metadata.get("config").ok_or("no metadata config")?.clone()),
            // One layer, with all that it has of a configuration in the metadata.
            (None, Some(model)) if model.contains("MiniLM") => {
                let heads = metadata.get("num_heads").ok_or("no metadata num_heads")?;
                ("minilm".to_owned(), format!(r#"{{"num_heads": {heads}}}"#))
            }
            _ => return Err("no metadata family".to_owned()),
        };
        let config = serde_json::from_str(&config).map_err(|e| format!("config: {e}"))?;
        Ok(Self { family, config, tensors, bytes: bytes.to_vec() })
    }

    /// The file as the library reads it.
    pub(crate) fn named(&self) -> Result<Tensors<'_>, Fault> {
        Tensors::from_bytes(&self.bytes).map_err(|e| e.to_string())
    }

    pub(crate) fn optional<D: Dimension>(&self, name: &str) -> Result<Option<Array<f64, D>>, Fault> {
        let array = self.tensors.get(name).cloned().map(Array::into_dimensionality);
        array.transpose().map_err(|e| format!("{name}: {e}"))
    }

    pub(crate) fn need<D: Dimension>(&self, name: &str) -> Result<Array<f64, D>, Fault> {
        self.optional(name)?.ok_or(format!("no tensor {name}"))
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, Fault> {
        let number = self.config.get(key).and_then(Value::as_u64);
        number.map(|n| n as usize).ok_or(format!("config {key}: expected a count"))
    }

    /// The number of heads by the shape of the right weights.
    pub(crate) fn heads_of_weights(&self) -> Option<usize> {
        self.tensors.get("want.weights").map(|weights| weights.len_of(Axis(1)))
    }

    /// All that the file has an answer for.
    pub(crate) fn parts(&self) -> Result<Vec<Part>, Fault> {
        let boxed = |module| Part::Module(Box::new(module));
        let single = |module| vec![boxed(module)];
        match self.family.as_str() {
            "minilm" => self.single(self.need("hidden_states")?, None, Mask::none()).map(single),
            "torch" if self.tensors.contains_key("input.src") => Ok(vec![Part::Stacks(self.clone())]),
            "torch" => self.torch_layer().map(single),
            _ => {
                let indices = self.tensors.keys().filter_map(|name| name.strip_prefix("want.attn."));
                let count = indices.filter(|rest| rest.ends_with(".output")).count();
                (0..count).map(|index| self.module(index).map(boxed)).collect()
            }
        }
    }

    /// The I-th module of a model.
    fn module(&self, index: usize) -> Result<Module, Fault> {
        let prefix = format!("attn.{index}.");
        known("argument", self.tensors.keys().filter_map(|name| name.strip_prefix(&prefix)), &[&ARGUMENTS])?;
        let argument = |name: &str| self.optional::<Ix3>(&format!("{prefix}{name}"));
        let attention = attention(self, index)?;
        let hidden = argument("hidden_states")?.ok_or("no hidden_states")?;
        let memory = argument("key_value_states")?;
        // Positions are added to queries and keys, not to values.
        let (positions, of_memory) = (argument("position_embeddings")?, argument("encoder_position_embeddings")?);
        let with = |x: &Array3<f64>, positions: &Option<Array3<f64>>| match positions {
            Some(positions) => x + positions,
            None => x.clone(),
        };
        let query = with(&hidden, &positions);
        let key_value = match (&memory, &positions) {
            (Some(memory), _) => Some((with(memory, &of_memory), memory.clone())),
            (None, Some(_)) => Some((query.clone(), hidden.clone())),
            (None, None) => None,
        };
        let kv_len = key_value.as_ref().map_or(query.dim().1, |(key, _)| key.dim().1);
        let mask =
            self.mask(&prefix, &attention, [query.dim().0, attention.config.heads.num_heads(), query.dim().1, kv_len])?;
        if let Some(bias) = self.optional::<Ix4>(&format!("{prefix}position_bias"))? {
            check_position_bias(&bias, &attention)?;
        }
        let layer = layer(attention, query, key_value, mask);
        let output = self.need(&format!("want.attn.{index}.output"))?;
        Ok(Module { name: format!("attn.{index}"), layer, output, weights: None })
    }

    /// The captured mask, 0 or the most negative number; it must be what the family's own rules say, if they say something.
    fn mask(&self, prefix: &str, attention: &Attention, dims: [usize; 4]) -> Result<Mask, Fault> {
        let captured = match self.optional::<Ix4>(&format!("{prefix}attention_mask"))? {
            None => self.optional::<Ix4>(&format!("{prefix}mask"))?,
            captured => captured,
        };
        let Some(captured) = captured else { return Ok(attention.mask.clone()) };
        if captured.iter().any(|&x| x != 0.0 && x > -1e30) {
            return Err("a mask that is neither 0 nor very negative".to_owned());
        }
        let keep = captured.mapv(|x| x == 0.0);
        if attention.mask.is_none() {
            return Mask::keep(&keep).map_err(|e| e.to_string());
        }
        let [batch, heads, q_len, kv_len] = dims;
        let bound = attention.mask.bind(batch, heads, q_len, kv_len).map_err(|e| e.to_string())?;
        let rules = bound.to_array().map_err(|e| e.to_string())?;
        match keep.broadcast(dims) {
            Some(keep) if keep == rules => Ok(attention.mask.clone()),
            _ => Err(format!("{prefix}attention_mask is not {}", attention.mask)),
        }
    }

    /// A file with one module, which also holds the right weights.
    fn single(
        &self,
        query: Array3<f64>,
        key_value: Option<(Array3<f64>, Array3<f64>)>,
        mask: Mask,
    ) -> Result<Module, Fault> {
        let layer = layer(attention(self, 0)?, query, key_value, mask);
        let weights = Some(self.need("want.weights")?);
        Ok(Module { name: "out".to_owned(), layer, output: self.need("want.out")?, weights })
    }

    /// `nn.MultiheadAttention`, whose masks are 1 where a query may not attend.
    fn torch_layer(&self) -> Result<Module, Fault> {
        const INPUTS: [&str; 6] = ["x", "query", "key", "value", "attn_mask", "key_padding_mask"];
        known("input", self.tensors.keys().filter_map(|name| name.strip_prefix("input.")), &[&INPUTS])?;
        let input = |name: &str| self.optional::<Ix3>(&format!("input.{name}"));
        let blocked = |name: &str| -> Result<Option<Array2<bool>>, Fault> {
            Ok(self.optional::<Ix2>(&format!("input.{name}"))?.map(|mask| mask.mapv(|x| x != 0.0)))
        };
        let mut mask = Mask::none();
        if let Some(blocked) = blocked("attn_mask")? {
            mask = mask & Mask::drop(&blocked).map_err(|e| e.to_string())?;
        }
        if let Some(blocked) = blocked("key_padding_mask")? {
            mask = mask & Mask::keep_keys(&blocked.mapv(|blocked| !blocked)).map_err(|e| e.to_string())?;
        }
        match (input("x")?, input("query")?, input("key")?, input("value")?) {
            (Some(x), None, None, None) => self.single(x, None, mask),
            (None, Some(query), Some(key), Some(value)) => self.single(query, Some((key, value)), mask),
            _ => Err("inputs: expected x, or query, key and value".to_owned()),
        }
    }

    /// A module of PyTorch's with these inputs.
    pub(crate) fn torch_module(
        &self,
        prefix: &str,
        query: Array3<f64>,
        memory: Option<Array3<f64>>,
    ) -> Result<Layer, Fault> {
        Ok(layer(torch_attention(self, prefix)?, query, memory.map(|memory| (memory.clone(), memory)), Mask::none()))
    }
}

/// T5 hands the biases of its first layer on to the others: they must be those of the table. Cross-attention has zeros.
fn check_position_bias(bias: &Array4<f64>, attention: &Attention) -> Result<(), Fault> {
    let (_, heads, q_len, kv_len) = bias.dim();
    let want = match (attention.config.relative_bias, &attention.weights.relative_bias) {
        (None, None) => Array4::zeros((1, heads, q_len, kv_len)),
        (Some(buckets), Some(table)) => Array4::from_shape_fn((1, heads, q_len, kv_len), |(_, h, i, j)| {
            table[[buckets.bucket(j as i64 - i as i64), h]]
        }),
        _ => return Err("buckets without a table".to_owned()),
    };
    if *bias == want { Ok(()) } else { Err("position_bias is not what the table says".to_owned()) }
}

fn layer(attention: Attention, query: Array3<f64>, key_value: Option<(Array3<f64>, Array3<f64>)>, mask: Mask) -> Layer {
    let Attention { config, weights, .. } = attention;
    let bias = config.relative_bias.zip(weights.relative_bias.clone());
    Layer {
        num_kv_heads: config.heads.num_kv_heads(),
        head_dim: config.head_dim,
        value_dim: config.value_dim,
        scale: config.scale,
        softcap: config.softcap,
        qk_norm_eps: Some(config.qk_norm_eps),
        rope: config.rope,
        distances: Distances { alibi: config.alibi, bias, keys: None },
        key_value,
        mask,
        ..Layer::new(config.heads.num_heads(), weights, query)
    }
}

/// The largest error over the largest right number; infinite if something is no number.
pub(crate) fn error_of(got: &ArrayD<f64>, want: &ArrayD<f64>) -> Result<f64, Fault> {
    if got.shape() != want.shape() {
        return Err(format!("shape {:?}, not {:?}", got.shape(), want.shape()));
    }
    let largest = want.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
    let errors = got.iter().zip(want).map(|(got, want)| (got - want).abs());
    let error = errors.fold(0.0, |worst: f64, error| if error.is_nan() { f64::INFINITY } else { worst.max(error) });
    if largest > 0.0 { Ok(error / largest) } else { Err("nothing but zeros to compare with".to_owned()) }
}
