//! tract: `FlashSdpaOp`, the operation its attention node becomes on CPUs, called directly. There is no layer.

use tract_nnef::tract_ndarray::Array4;
use tract_transformers::ops::flash_sdpa::FlashSdpaOp;

use crate::case::{Case, unsupported};
use crate::{Call, Output};

impl Output for Array4<f32> {
    fn values(&self) -> Result<Vec<f32>, String> {
        Ok(self.iter().copied().collect())
    }
}

pub fn calls(case: &Case) -> Result<Vec<Call>, String> {
    if case.is_layer() {
        return Err(unsupported("no layer"));
    }
    if case.head_dim != case.value_dim {
        return Err(unsupported("values of another size than keys"));
    }
    let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, .. } = *case;
    let array =
        |values, heads, len| Array4::from_shape_vec((batch, heads, len, head_dim), values).map_err(|e| e.to_string());
    let (q, k, v) =
        (array(case.q(), heads, q_len)?, array(case.k(), kv_heads, kv_len)?, array(case.v(), kv_heads, kv_len)?);
    let op = FlashSdpaOp { causal: case.causal, scale: None };
    // The operation takes a mask or the causal rule, not both.
    let plain = case.mask.is_none() && !case.bias;
    let added = if plain { None } else { case.additive(true, f32::NEG_INFINITY) };
    let added = added
        .map(|added| Array4::from_shape_vec((1, 1, q_len, kv_len), added))
        .transpose()
        .map_err(|e| e.to_string())?;
    Ok(vec![Call::new("FlashSdpaOp", move || {
        Ok(Box::new(op.flash_attention_gqa(q.view(), k.view(), v.view(), added.as_ref().map(|a| a.view()))))
    })])
}
