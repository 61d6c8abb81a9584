//! candle-nn over a cache: the keys and values are tensors of exactly the tokens so far, filled beforehand and contiguous,
//! which is more than its `KvCache` gives (views of arrays with free slots).

use candle_core::{Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};

use crate::Call;
use crate::candle_peer::{Matmul, boxed};
use crate::case::{Case, heads_inside};

/// One query that is as many rows of its KV head as it has heads, so that no key is repeated: it sees every key.
fn folded(case: &Case) -> Case {
    Case { heads: case.kv_heads, q_len: case.group_size(), causal: false, ..case.clone() }
}

fn tensors(case: &Case) -> Result<Vec<Call>> {
    let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
    let (q, k, v) = (case.q(), case.k(), case.v());
    let tensor = |values: Vec<f32>, shape: (usize, usize, usize, usize)| Tensor::from_vec(values, shape, &Device::Cpu);
    let inside = |values: &[f32], heads, len, size| {
        tensor(heads_inside(values, batch, heads, len, size), (batch, len, heads, size))
    };
    let by_token = [inside(&q, heads, q_len, head_dim)?, inside(&k, kv_heads, kv_len, head_dim)?];
    let [flash_q, flash_k] = by_token;
    let flash_v = inside(&v, kv_heads, kv_len, value_dim)?;
    let q = tensor(q, (batch, heads, q_len, head_dim))?;
    let k = tensor(k, (batch, kv_heads, kv_len, head_dim))?;
    let v = tensor(v, (batch, kv_heads, kv_len, value_dim))?;

    let scale = case.scale() as f32;
    let mut calls = Vec::new();
    let mut flash = |label: &str, k: &Tensor, v: &Tensor, mask: AttnMask| {
        let (q, k, v) = (flash_q.clone(), k.clone(), v.clone());
        let run = move || boxed(flash_attn::<f32>(&q, &k, &v, scale, mask.clone(), None, None));
        calls.push(Call::new(label, run));
    };
    let (head_k, head_v) = (k.transpose(1, 2)?, v.transpose(1, 2)?);
    let causal = || AttnMask::causal_with_offset(kv_len - q_len);
    flash("flash_attn, causal, cache by token", &flash_k, &flash_v, causal());
    flash("flash_attn, causal, cache by head", &head_k, &head_v, causal());
    if !case.causal || q_len == 1 {
        flash("flash_attn, cache by token", &flash_k, &flash_v, AttnMask::None);
        flash("flash_attn, cache by head", &head_k, &head_v, AttnMask::None);
    }
    if q_len == 1 && case.group_size() > 1 {
        let (rows, matmul) = ((batch, kv_heads, case.group_size(), head_dim), Matmul::new(&folded(case))?);
        let (q, k, v) = (q.clone(), k.clone(), v.clone());
        let run = move || {
            let context = matmul.attend(&q.reshape(rows)?, &k, &v)?;
            context.reshape((batch, heads, 1, value_dim))
        };
        calls.push(Call::new("matmul, softmax, matmul, group folded into the queries", move || boxed(run())));
    }
    let matmul = Matmul::new(case)?;
    calls.push(Call::new("matmul, softmax, matmul", move || boxed(matmul.attend(&q, &k, &v))));
    Ok(calls)
}

pub fn calls(case: &Case) -> std::result::Result<Vec<Call>, String> {
    if case.mask.is_some() || case.bias {
        return Err(crate::case::unsupported("decoding with a mask or bias of the caller's"));
    }
    tensors(case).map_err(|e| e.to_string())
}
