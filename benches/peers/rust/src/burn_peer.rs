//! burn on its flex backend: the attention operation, and `nn::attention::MultiHeadAttention` for a layer.

use burn::module::Param;
use burn::nn::attention::{MhaInput, MultiHeadAttention, MultiHeadAttentionConfig};
use burn::tensor::module::attention;
use burn::tensor::ops::AttentionModuleOptions;
use burn::tensor::{Bool, Device, Tensor, TensorData};

use crate::case::{Case, unsupported};
use crate::{Call, Output};

impl<const D: usize> Output for Tensor<D> {
    fn values(&self) -> Result<Vec<f32>, String> {
        self.to_data().try_into_vec::<f32>().map_err(|e| format!("{e:?}"))
    }
}

fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D]) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), &Device::flex())
}

/// The attention operation on `[batch, heads, len, head_dim]`.
#[derive(Clone)]
struct Attention {
    group_size: usize,
    drop: Option<Tensor<4, Bool>>,
    bias: Option<Tensor<4>>,
    is_causal: bool,
}

impl Attention {
    fn new(case: &Case) -> Self {
        let shape = [1, 1, case.q_len, case.kv_len];
        // burn's masks are true where a key is hidden.
        let drop = case.mask.map(|_| {
            let hidden: Vec<bool> = case.keep(false).into_iter().map(|seen| !seen).collect();
            Tensor::from_data(TensorData::new(hidden, shape), &Device::flex())
        });
        Self {
            group_size: case.group_size(),
            drop,
            bias: case.bias().map(|bias| tensor(bias, shape)),
            is_causal: case.causal,
        }
    }

    fn repeated(&self, kv: &Tensor<4>) -> Tensor<4> {
        let [batch, kv_heads, len, size] = kv.dims();
        if self.group_size == 1 {
            return kv.clone();
        }
        let repeated =
            kv.clone().reshape([batch, kv_heads, 1, len, size]).expand([batch, kv_heads, self.group_size, len, size]);
        repeated.reshape([batch, kv_heads * self.group_size, len, size])
    }

    fn attend(&self, q: &Tensor<4>, k: &Tensor<4>, v: &Tensor<4>) -> Tensor<4> {
        let options = AttentionModuleOptions { scale: None, softcap: None, is_causal: self.is_causal };
        attention(q.clone(), self.repeated(k), self.repeated(v), self.drop.clone(), self.bias.clone(), options)
    }
}

fn attention_calls(case: &Case) -> Vec<Call> {
    let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
    let q = tensor(case.q(), [batch, heads, q_len, head_dim]);
    let k = tensor(case.k(), [batch, kv_heads, kv_len, head_dim]);
    let v = tensor(case.v(), [batch, kv_heads, kv_len, value_dim]);
    let attention = Attention::new(case);
    vec![Call::new("attention", move || Ok(Box::new(attention.attend(&q, &k, &v))))]
}

fn module(case: &Case) -> MultiHeadAttention {
    let config = MultiHeadAttentionConfig::new(case.d_model, case.heads).with_dropout(0.0);
    let config = config.with_query_bias(false).with_key_bias(false).with_value_bias(false).with_output_bias(false);
    let mut module = config.init(&Device::flex());
    let (weights, square) = (case.weights(), [case.d_model, case.d_model]);
    for (linear, weight) in [
        (&mut module.query, weights.q),
        (&mut module.key, weights.k),
        (&mut module.value, weights.v),
        (&mut module.output, weights.o),
    ] {
        linear.weight = Param::from_tensor(tensor(weight, square));
    }
    module
}

fn layer_calls(case: &Case) -> Result<Vec<Call>, String> {
    if case.group_size() != 1 {
        return Err(unsupported("MultiHeadAttention has no grouped heads"));
    }
    if case.bias {
        return Err(unsupported("a bias in MultiHeadAttention"));
    }
    let Case { batch, heads, len, head_dim, d_model, .. } = *case;
    let x = tensor(case.x(), [batch, len, d_model]);
    let hidden = (case.causal || case.mask.is_some()).then(|| {
        let hidden: Vec<bool> = case.keep(case.causal).into_iter().map(|seen| !seen).collect();
        Tensor::<3, Bool>::from_data(TensorData::new(hidden, [1, len, len]), &Device::flex()).expand([batch, len, len])
    });
    let (module, attention) = (module(case), Attention::new(case));
    let (own, own_x) = (module.clone(), x.clone());
    let by_module = move || {
        let mut input = MhaInput::self_attn(x.clone());
        if let Some(hidden) = &hidden {
            input = input.mask_attn(hidden.clone());
        }
        Ok(Box::new(module.forward(input).context) as Box<dyn Output>)
    };
    let by_operation = move || {
        let split = |t: Tensor<3>| t.reshape([batch, len, heads, head_dim]).swap_dims(1, 2);
        let q = split(own.query.forward(own_x.clone()));
        let k = split(own.key.forward(own_x.clone()));
        let v = split(own.value.forward(own_x.clone()));
        let context = attention.attend(&q, &k, &v).swap_dims(1, 2).reshape([batch, len, d_model]);
        Ok(Box::new(own.output.forward(context)) as Box<dyn Output>)
    };
    Ok(vec![Call::new("nn MultiHeadAttention", by_module), Call::new("Linear and attention", by_operation)])
}

pub fn calls(case: &Case) -> Result<Vec<Call>, String> {
    if case.is_layer() { layer_calls(case) } else { Ok(attention_calls(case)) }
}
