//! rten: the operators Attention (standard), MultiHeadAttention and GroupQueryAttention (contrib), each in an
//! ONNX graph of its own; a layer adds MatMul nodes.

use std::cell::RefCell;

use rten::{Model, ModelOptions, NodeId, Value, ValueView};
use rten_onnx::onnx::{
    AttributeProto, AttributeType, DataType, GraphProto, ModelProto, NodeProto, OperatorSetIdProto, TensorProto,
    ValueInfoProto,
};
use rten_tensor::{Tensor, TensorView};

use crate::case::{Case, heads_inside};
use crate::{Call, Output};

const CONTRIB: &str = "com.microsoft";
const MASKED: f32 = -1e30;

impl Output for Value {
    fn values(&self) -> Result<Vec<f32>, String> {
        let view: TensorView<f32> = ValueView::from(self).try_into().map_err(|e| format!("{e:?}"))?;
        Ok(view.iter().copied().collect())
    }
}

/// A graph under construction, with the values of its inputs.
#[derive(Default)]
struct Graph {
    proto: GraphProto,
    inputs: Vec<(String, Value)>,
}

fn info(name: &str) -> ValueInfoProto {
    ValueInfoProto { name: Some(name.into()), r#type: None }
}

impl Graph {
    fn feed(&mut self, name: &str, value: Value) {
        self.proto.input.push(info(name));
        self.inputs.push((name.into(), value));
    }

    fn floats(&mut self, name: &str, shape: &[usize], values: Vec<f32>) {
        self.feed(name, Tensor::from_data(shape, values).into());
    }

    fn weight(&mut self, name: &str, shape: [usize; 2], values: &[f32]) {
        self.proto.initializer.push(TensorProto {
            name: Some(name.into()),
            dims: shape.map(|n| n as i64).to_vec(),
            data_type: Some(DataType::FLOAT),
            raw_data: Some(RefCell::new(values.iter().flat_map(|x| x.to_le_bytes()).collect())),
            ..Default::default()
        });
    }

    fn node(&mut self, kind: &str, domain: &str, inputs: &[&str], output: &str, attributes: &[(&str, usize)]) {
        let attribute = |&(name, value): &(&str, usize)| AttributeProto {
            name: Some(name.into()),
            i: Some(value as i64),
            r#type: Some(AttributeType::INT),
            ..Default::default()
        };
        self.proto.node.push(NodeProto {
            domain: Some(domain.into()),
            name: Some(format!("node_{output}")),
            input: inputs.iter().map(|name| name.to_string()).collect(),
            output: vec![output.into()],
            op_type: Some(kind.into()),
            attribute: attributes.iter().map(attribute).collect(),
        });
    }

    fn call(mut self, label: &str, output: &str) -> Result<Call, String> {
        self.proto.output.push(info(output));
        let opset = |domain: &str, version| OperatorSetIdProto { domain: Some(domain.into()), version: Some(version) };
        let model = ModelProto {
            ir_version: Some(11),
            graph: Some(self.proto),
            opset_import: vec![opset("", 23), opset(CONTRIB, 1)],
            ..Default::default()
        };
        let bytes = model.write_buf().map_err(|e| e.to_string())?;
        let mut options = ModelOptions::with_all_ops();
        options.prepack_weights(true);
        let model: Model = options.load(bytes).map_err(|e| e.to_string())?;
        let id = |name: &str| model.node_id(name).map_err(|e| e.to_string());
        let output = id(output)?;
        let inputs: Vec<(NodeId, Value)> =
            self.inputs.into_iter().map(|(name, value)| Ok((id(&name)?, value))).collect::<Result<_, String>>()?;
        Ok(Call::new(label, move || {
            let views = inputs.iter().map(|(id, value)| (*id, value.into())).collect();
            let [value] = model.run_n(views, [output], None).map_err(|e| e.to_string())?;
            Ok(Box::new(value))
        }))
    }
}

#[derive(Clone, Copy)]
enum Operator {
    Standard,
    MultiHead,
    GroupQuery,
}

impl Operator {
    fn label(self) -> &'static str {
        match self {
            Self::Standard => "Attention (standard)",
            Self::MultiHead => "MultiHeadAttention",
            Self::GroupQuery => "GroupQueryAttention",
        }
    }

    /// What the operator can express.
    fn fits(self, case: &Case) -> bool {
        match self {
            Self::Standard => true,
            Self::MultiHead => case.group_size() == 1,
            // Always causal, and without a past it wants as many keys as queries.
            Self::GroupQuery => case.causal && case.mask.is_none() && !case.bias && case.value_dim == case.head_dim,
        }
    }

    /// Adds the node from q, k, v `[batch, len, heads * head_dim]` to "context".
    fn add(self, graph: &mut Graph, case: &Case) {
        let causal = usize::from(case.causal);
        let added = case.additive(false, MASKED);
        match self {
            Self::Standard => {
                let mut inputs = vec!["q", "k", "v"];
                if let Some(added) = added {
                    graph.floats("attn_mask", &[case.q_len, case.kv_len], added);
                    inputs.push("attn_mask");
                }
                let attributes = [("q_num_heads", case.heads), ("kv_num_heads", case.kv_heads), ("is_causal", causal)];
                graph.node("Attention", "", &inputs, "context", &attributes);
            }
            Self::MultiHead => {
                let mut inputs = vec!["q", "k", "v"];
                if let Some(added) = added {
                    graph.floats("attention_bias", &[1, 1, case.q_len, case.kv_len], added);
                    inputs.extend(["", "", "attention_bias"]);
                }
                let attributes = [("num_heads", case.heads), ("unidirectional", causal)];
                graph.node("MultiHeadAttention", CONTRIB, &inputs, "context", &attributes);
            }
            Self::GroupQuery => {
                let last = case.kv_len as i32 - 1;
                graph.feed("seqlens_k", Tensor::from_data(&[case.batch], vec![last; case.batch]).into());
                graph.feed("total", Tensor::from_data(&[], vec![case.kv_len as i32]).into());
                let inputs = ["q", "k", "v", "", "", "seqlens_k", "total"];
                let attributes = [("num_heads", case.heads), ("kv_num_heads", case.kv_heads)];
                graph.node("GroupQueryAttention", CONTRIB, &inputs, "context", &attributes);
            }
        }
    }
}

fn attention(case: &Case, operator: Operator) -> Result<Call, String> {
    let mut graph = Graph::default();
    let mut feed = |name, values: Vec<f32>, heads, len, size| {
        let values = heads_inside(&values, case.batch, heads, len, size);
        graph.floats(name, &[case.batch, len, heads * size], values);
    };
    feed("q", case.q(), case.heads, case.q_len, case.head_dim);
    feed("k", case.k(), case.kv_heads, case.kv_len, case.head_dim);
    feed("v", case.v(), case.kv_heads, case.kv_len, case.value_dim);
    operator.add(&mut graph, case);
    graph.call(operator.label(), "context")
}

fn layer(case: &Case, operator: Operator) -> Result<Call, String> {
    let (mut graph, weights, d_model) = (Graph::default(), case.weights(), case.d_model);
    graph.floats("x", &[case.batch, case.len, d_model], case.x());
    for (name, output, weight) in [("w_q", "q", &weights.q), ("w_k", "k", &weights.k), ("w_v", "v", &weights.v)] {
        graph.weight(name, [d_model, weight.len() / d_model], weight);
        graph.node("MatMul", "", &["x", name], output, &[]);
    }
    operator.add(&mut graph, case);
    graph.weight("w_o", [weights.o.len() / d_model, d_model], &weights.o);
    graph.node("MatMul", "", &["context", "w_o"], "out", &[]);
    graph.call(&format!("MatMul and {}", operator.label()), "out")
}

pub fn calls(case: &Case) -> Result<Vec<Call>, String> {
    let operators = [Operator::Standard, Operator::MultiHead, Operator::GroupQuery];
    let fitting = operators.into_iter().filter(|operator| operator.fits(case));
    fitting.map(|operator| if case.is_layer() { layer(case, operator) } else { attention(case, operator) }).collect()
}
