//! Reader of case files: one `*.safetensors` file holds the inputs, the configuration and the right answers of a call.
//!
//! Metadata (strings): `op` is `attention` or `layer`; `config` is a JSON object; `tolerance` and `tolerance_f64` are
//! JSON objects with the largest absolute error of each answer; `note` is for people.
//! Tensors: the inputs by name, and the answers as `want.NAME`. Whatever is unknown is an error, never passed over.

use multihead::ndarray::{Array, Array1, Array3, Array4, ArrayD, Axis, Dimension, Ix1, Ix3, Ix4, IxDyn, concatenate};
use multihead::position::Alibi;
use multihead::{HeadMap, Mask, Rope, RopeStyle, Weights};
use safetensors::tensor::{Dtype, SafeTensors};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

use super::core::Core;
use super::distances::Distances;
use super::layer::Layer;

/// Why a case cannot be used.
pub(crate) type Fault = String;

/// What the crate cannot do yet, left out: layers with these config keys set, and answers of an op that begin so.
/// Whoever brings a part takes it out of here.
pub(crate) const LEFT_OUT_CONFIG: [&str; 0] = [];
pub(crate) const LEFT_OUT_ANSWERS: [(Op, &str); 0] = [];

const METADATA: [&str; 5] = ["op", "config", "tolerance", "tolerance_f64", "note"];
const CONFIG: [&str; 5] = ["causal", "window", "scale", "softcap", "kv_of_head"];
const LAYER_CONFIG: [&str; 8] =
    ["d_model", "num_heads", "num_kv_heads", "head_dim", "value_dim", "bias", "rope", "alibi"];
const CORE_INPUTS: [&str; 10] = ["q", "k", "v", "keep", "bias", "kv_lengths", "sinks", "past_k", "past_v", "d_out"];
const LAYER_INPUTS: [&str; 14] =
    ["query", "key", "value", "w_q", "w_k", "w_v", "w_o", "b_q", "b_k", "b_v", "b_o", "keep", "kv_lengths", "d_out"];
const ANSWERS: [&str; 3] = ["out", "lse", "weights"];

/// Which call a case makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Op {
    Attention,
    Layer,
}

/// One right answer.
#[derive(Debug, Clone)]
pub(crate) struct Want {
    /// `out`, `lse`, `weights` or `d_INPUT`.
    pub(crate) name: String,
    pub(crate) values: ArrayD<f64>,
    /// Largest absolute error in f32 and f64.
    pub(crate) tolerance: [f64; 2],
}

impl Want {
    pub(crate) fn is_left_out(&self, op: Op) -> bool {
        LEFT_OUT_ANSWERS.iter().any(|&(of, prefix)| of == op && self.name.starts_with(prefix))
    }

    /// Whether it is a gradient.
    pub(crate) fn is_gradient(&self) -> bool {
        self.name.starts_with("d_")
    }
}

#[derive(Debug, Clone)]
pub(crate) struct Case {
    pub(crate) op: Op,
    pub(crate) wants: Vec<Want>,
    config: Map<String, Value>,
    inputs: BTreeMap<String, ArrayD<f64>>,
}

impl Case {
    pub(crate) fn parse(bytes: &[u8]) -> Result<Self, Fault> {
        let (_, header) = SafeTensors::read_metadata(bytes).map_err(|e| e.to_string())?;
        let metadata = header.metadata().clone().ok_or("no metadata")?;
        known("metadata", metadata.keys(), &[&METADATA])?;
        let text = |key: &str| metadata.get(key).ok_or(format!("no metadata {key}"));
        let object = |key: &str| -> Result<Map<String, Value>, Fault> {
            serde_json::from_str(text(key)?).map_err(|e| format!("{key}: {e}"))
        };
        let op = match text("op")?.as_str() {
            "attention" => Op::Attention,
            "layer" => Op::Layer,
            other => return Err(format!("unknown op {other}")),
        };
        let config = object("config")?;
        let (input_names, extra): (&[&str], &[&str]) = match op {
            Op::Attention => (&CORE_INPUTS, &[]),
            Op::Layer => (&LAYER_INPUTS, &LAYER_CONFIG),
        };
        known("config key", config.keys(), &[&CONFIG, extra])?;

        let tolerances = [object("tolerance")?, object("tolerance_f64")?];
        let (mut inputs, mut wants) = (BTreeMap::new(), Vec::new());
        let tensors = SafeTensors::deserialize(bytes).map_err(|e| e.to_string())?;
        let tensors: BTreeMap<_, _> = tensors.tensors().into_iter().collect();
        for (name, tensor) in tensors {
            let values = decode(tensor.dtype(), tensor.shape(), tensor.data()).map_err(|e| format!("{name}: {e}"))?;
            let Some(answer) = name.strip_prefix("want.") else {
                known("tensor", [&name], &[input_names])?;
                inputs.insert(name, values);
                continue;
            };
            let gradient_of_input = answer.strip_prefix("d_").is_some_and(|input| input_names.contains(&input));
            if !gradient_of_input {
                known("answer", [answer], &[&ANSWERS])?;
            }
            let tolerance = |index: usize| {
                let number: Option<f64> = tolerances[index].get(answer).and_then(Value::as_f64);
                number.ok_or(format!("no tolerance for {answer}"))
            };
            wants.push(Want { name: answer.to_owned(), values, tolerance: [tolerance(0)?, tolerance(1)?] });
        }
        Ok(Self { op, wants, config, inputs })
    }

    /// The left-out part of the crate that the case needs, if any.
    pub(crate) fn left_out(&self) -> Option<&'static str> {
        LEFT_OUT_CONFIG
            .into_iter()
            .find(|key| !matches!(self.config.get(*key), None | Some(Value::Null | Value::Bool(false))))
    }

    /// The gradient of the context or output, where gradients are expected.
    pub(crate) fn d_out<D: Dimension>(&self) -> Result<Option<Array<f64, D>>, Fault> {
        self.input("d_out")
    }

    /// The call of a case of [`Op::Attention`]. What a cache would hold stands before the new keys and values.
    pub(crate) fn core(&self) -> Result<Core, Fault> {
        let with_past = |past: &str, new: &str| -> Result<Array4<f64>, Fault> {
            let new = self.need::<Ix4>(new)?;
            match self.input::<Ix4>(past)? {
                None => Ok(new),
                Some(past) => concatenate(Axis(2), &[past.view(), new.view()]).map_err(|e| e.to_string()),
            }
        };
        let mut core = Core::new(self.need("q")?, with_past("past_k", "k")?, with_past("past_v", "v")?);
        core.mask = self.mask()?;
        core.bias = self.inputs.get("bias").cloned();
        core.sinks = self.input("sinks")?;
        core.scale = self.number("scale")?;
        core.softcap = self.number("softcap")?;
        if let Some(map) = self.kv_of_head()? {
            core.heads = Some(HeadMap::explicit(&map, core.k.dim().1).map_err(|e| e.to_string())?);
        }
        Ok(core)
    }

    /// The call of a case of [`Op::Layer`].
    pub(crate) fn layer(&self) -> Result<Layer, Fault> {
        let size = |key: &str| {
            let number = self.config.get(key).and_then(Value::as_u64);
            number.map(|n| n as usize).ok_or(format!("config {key}: expected a count"))
        };
        let query: Array3<f64> = self.need("query")?;
        if size("d_model")? != query.dim().2 {
            return Err("config d_model: not the width of query".to_owned());
        }
        let biased = self.config.get("bias") == Some(&Value::Bool(true));
        for name in ["b_q", "b_k", "b_v", "b_o"] {
            if biased != self.inputs.contains_key(name) {
                return Err(format!("config bias is {biased}, which {name} contradicts"));
            }
        }
        let weights = Weights {
            b_q: self.input("b_q")?,
            b_k: self.input("b_k")?,
            b_v: self.input("b_v")?,
            b_o: self.input("b_o")?,
            ..Weights::new(self.need("w_q")?, self.need("w_k")?, self.need("w_v")?, self.need("w_o")?)
        };
        let alibi = match self.config.get("alibi") {
            None | Some(Value::Null | Value::Bool(false)) => None,
            Some(Value::Bool(true)) => Some(Alibi::new(size("num_heads")?)),
            Some(other) => return Err(format!("config alibi: unknown {other}")),
        };
        let key_value = match (self.input::<Ix3>("key")?, self.input::<Ix3>("value")?) {
            (None, None) => None,
            (Some(key), Some(value)) => Some((key, value)),
            _ => return Err("key and value: expected both or none".to_owned()),
        };
        Ok(Layer {
            num_heads: size("num_heads")?,
            num_kv_heads: size("num_kv_heads")?,
            kv_of_head: self.kv_of_head()?,
            head_dim: size("head_dim")?,
            value_dim: size("value_dim")?,
            scale: self.number("scale")?,
            softcap: self.number("softcap")?,
            weights,
            query,
            key_value,
            shared: false,
            mask: self.mask()?,
            qk_norm_eps: None,
            rope: self.rope()?,
            offsets: self.offsets()?,
            distances: Distances { alibi, ..Distances::default() },
            bias: None,
            dropout: None,
        })
    }

    fn rope_config(&self) -> Result<Option<&Map<String, Value>>, Fault> {
        match self.config.get("rope") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(rule)) => {
                known("rope key", rule.keys(), &[&["theta", "style", "dims", "offset", "key_offset"]])?;
                Ok(Some(rule))
            }
            Some(other) => Err(format!("config rope: unknown {other}")),
        }
    }

    fn rope(&self) -> Result<Option<Rope>, Fault> {
        let Some(rule) = self.rope_config()? else { return Ok(None) };
        let style = match rule.get("style").and_then(Value::as_str) {
            Some("half_split") => RopeStyle::HalfSplit,
            Some("interleaved") => RopeStyle::Interleaved,
            other => return Err(format!("rope style: unknown {other:?}")),
        };
        let theta = rule.get("theta").and_then(Value::as_f64).ok_or("rope theta: expected a number")?;
        let rope = Rope::new(style, theta);
        let dims = rule.get("dims").map(whole).transpose()?;
        Ok(Some(dims.map_or(rope, |dims| rope.dims(dims))))
    }

    /// The positions of query 0 and key 0.
    fn offsets(&self) -> Result<[Option<usize>; 2], Fault> {
        let rule = self.rope_config()?;
        let offset = |key: &str| rule.and_then(|rule| rule.get(key)).map(whole).transpose();
        Ok([offset("offset")?, offset("key_offset")?])
    }

    fn mask(&self) -> Result<Mask, Fault> {
        let mut mask = match self.config.get("causal") {
            None | Some(Value::Null) => Mask::none(),
            Some(Value::String(rule)) if rule == "bottom_right" => Mask::causal(),
            Some(Value::String(rule)) if rule == "top_left" => Mask::causal_top_left(),
            Some(Value::Object(rule)) if rule.len() == 1 && rule.get("offset").is_some_and(Value::is_u64) => {
                Mask::causal_offset(whole(&rule["offset"])?)
            }
            Some(other) => return Err(format!("config causal: unknown {other}")),
        };
        match self.config.get("window") {
            None | Some(Value::Null) => {}
            Some(Value::Object(window)) => {
                known("window side", window.keys(), &[&["left", "right"]])?;
                let side = |key: &str| match window.get(key) {
                    None | Some(Value::Null) => Ok(usize::MAX),
                    Some(side) => whole(side),
                };
                mask = mask & Mask::window(side("left")?, side("right")?);
            }
            Some(other) => return Err(format!("config window: unknown {other}")),
        }
        if let Some(lengths) = self.input::<Ix1>("kv_lengths")? {
            let lengths: Vec<usize> = lengths.iter().map(|&n| n as usize).collect();
            mask = mask & Mask::key_lengths(&lengths);
        }
        if let Some(keep) = self.input::<Ix4>("keep")? {
            mask = mask & Mask::keep(&keep.mapv(|kept| kept != 0.0)).map_err(|e| e.to_string())?;
        }
        Ok(mask)
    }

    fn kv_of_head(&self) -> Result<Option<Vec<usize>>, Fault> {
        match self.config.get("kv_of_head") {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Array(map)) => map.iter().map(whole).collect::<Result<_, _>>().map(Some),
            Some(other) => Err(format!("config kv_of_head: unknown {other}")),
        }
    }

    fn number(&self, key: &str) -> Result<Option<f64>, Fault> {
        match self.config.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => value.as_f64().map(Some).ok_or(format!("config {key}: unknown {value}")),
        }
    }

    fn input<D: Dimension>(&self, name: &str) -> Result<Option<Array<f64, D>>, Fault> {
        let array = self.inputs.get(name).cloned().map(Array::into_dimensionality);
        array.transpose().map_err(|e| format!("{name}: {e}"))
    }

    fn need<D: Dimension>(&self, name: &str) -> Result<Array<f64, D>, Fault> {
        self.input(name)?.ok_or(format!("no tensor {name}"))
    }
}

fn whole(value: &Value) -> Result<usize, Fault> {
    value.as_u64().map(|n| n as usize).ok_or(format!("{value}: expected a count"))
}

pub(crate) fn known<S: AsRef<str>>(
    what: &str,
    names: impl IntoIterator<Item = S>,
    lists: &[&[&str]],
) -> Result<(), Fault> {
    match names.into_iter().find(|name| !lists.iter().any(|list| list.contains(&name.as_ref()))) {
        None => Ok(()),
        Some(name) => Err(format!("unknown {what} {}", name.as_ref())),
    }
}

/// Little-endian numbers, read byte by byte: a file's tensors may lie at any address.
pub(crate) fn decode(dtype: Dtype, shape: &[usize], data: &[u8]) -> Result<ArrayD<f64>, Fault> {
    fn numbers<const N: usize>(data: &[u8], number: impl Fn([u8; N]) -> f64) -> Vec<f64> {
        data.as_chunks::<N>().0.iter().map(|&bytes| number(bytes)).collect()
    }
    let numbers = match dtype {
        Dtype::F32 => numbers(data, |bytes| f64::from(f32::from_le_bytes(bytes))),
        Dtype::F64 => numbers(data, f64::from_le_bytes),
        Dtype::U8 => numbers(data, |[byte]| f64::from(byte)),
        Dtype::I64 => numbers(data, |bytes| i64::from_le_bytes(bytes) as f64),
        other => return Err(format!("unknown type {other:?}")),
    };
    Array1::from_vec(numbers).into_shape_with_order(IxDyn(shape)).map_err(|e| e.to_string())
}
