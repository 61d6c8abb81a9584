//! candle-nn: `attention::flash_attn` for CPUs, and the matmul path that its models use without it.

use candle_core::{D, Device, Result, Tensor};
use candle_nn::attention::{AttnMask, flash_attn};
use candle_nn::{Linear, Module, ops::softmax_last_dim};

use crate::case::{Case, heads_inside, transposed};
use crate::{Call, Output};

impl Output for Tensor {
    fn values(&self) -> std::result::Result<Vec<f32>, String> {
        self.flatten_all().and_then(|t| t.to_vec1()).map_err(|e| e.to_string())
    }
}

pub(crate) fn boxed(result: Result<Tensor>) -> std::result::Result<Box<dyn Output>, String> {
    result.map(|tensor| Box::new(tensor) as Box<dyn Output>).map_err(|e| e.to_string())
}

/// Attention on `[batch, len, heads, head_dim]`; gives `[batch, heads, len, head_dim]`.
#[derive(Clone)]
struct Flash {
    scale: f32,
    mask: AttnMask,
}

impl Flash {
    fn new(case: &Case) -> Result<Self> {
        let plain = case.mask.is_none() && !case.bias;
        let mask = match case.additive(true, f32::NEG_INFINITY) {
            Some(_) if plain => AttnMask::causal(),
            Some(added) => AttnMask::Mask(Tensor::from_vec(added, (case.q_len, case.kv_len), &Device::Cpu)?),
            None => AttnMask::None,
        };
        Ok(Self { scale: case.scale() as f32, mask })
    }

    fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        flash_attn::<f32>(q, k, v, self.scale, self.mask.clone(), None, None)
    }
}

/// Attention on `[batch, heads, len, head_dim]` by two products and a softmax; the score matrix is stored.
#[derive(Clone)]
pub(crate) struct Matmul {
    scale: f64,
    group_size: usize,
    added: Option<Tensor>,
}

impl Matmul {
    pub(crate) fn new(case: &Case) -> Result<Self> {
        let added = case.additive(true, f32::NEG_INFINITY);
        let added = added.map(|added| Tensor::from_vec(added, (1, 1, case.q_len, case.kv_len), &Device::Cpu));
        Ok(Self { scale: case.scale(), group_size: case.group_size(), added: added.transpose()? })
    }

    fn repeated(&self, kv: &Tensor) -> Result<Tensor> {
        if self.group_size == 1 {
            return Ok(kv.clone());
        }
        let (batch, kv_heads, len, size) = kv.dims4()?;
        let repeated = kv.unsqueeze(2)?.expand((batch, kv_heads, self.group_size, len, size))?;
        repeated.reshape((batch, kv_heads * self.group_size, len, size))
    }

    pub(crate) fn attend(&self, q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
        let (k, v) = (self.repeated(k)?, self.repeated(v)?);
        let mut scores = (q * self.scale)?.matmul(&k.t()?)?;
        if let Some(added) = &self.added {
            scores = scores.broadcast_add(added)?;
        }
        softmax_last_dim(&scores)?.matmul(&v)
    }
}

fn attention(case: &Case) -> Result<Vec<Call>> {
    let Case { batch, heads, kv_heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
    let (q, k, v) = (case.q(), case.k(), case.v());
    let inside = |values: &[f32], heads, len, size| {
        Tensor::from_vec(heads_inside(values, batch, heads, len, size), (batch, len, heads, size), &Device::Cpu)
    };
    let flash = Flash::new(case)?;
    let flash_q = inside(&q, heads, q_len, head_dim)?;
    let flash_k = inside(&k, kv_heads, kv_len, head_dim)?;
    let flash_v = inside(&v, kv_heads, kv_len, value_dim)?;
    let matmul = Matmul::new(case)?;
    let q = Tensor::from_vec(q, (batch, heads, q_len, head_dim), &Device::Cpu)?;
    let k = Tensor::from_vec(k, (batch, kv_heads, kv_len, head_dim), &Device::Cpu)?;
    let v = Tensor::from_vec(v, (batch, kv_heads, kv_len, value_dim), &Device::Cpu)?;
    Ok(vec![
        Call::new("flash_attn", move || boxed(flash.attend(&flash_q, &flash_k, &flash_v))),
        Call::new("matmul, softmax, matmul", move || boxed(matmul.attend(&q, &k, &v))),
    ])
}

/// Four `Linear` layers around an attention.
#[derive(Clone)]
struct Layer {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    heads: usize,
    kv_heads: usize,
}

impl Layer {
    fn new(case: &Case) -> Result<Self> {
        let weights = case.weights();
        // candle stores [out, in].
        let linear = |weight: &[f32], columns: usize| {
            let rows = weight.len() / columns;
            let weight = Tensor::from_vec(transposed(weight, columns), (columns, rows), &Device::Cpu)?;
            Ok::<_, candle_core::Error>(Linear::new(weight, None))
        };
        let kv_width = case.kv_heads * case.head_dim;
        Ok(Self {
            q: linear(&weights.q, case.heads * case.head_dim)?,
            k: linear(&weights.k, kv_width)?,
            v: linear(&weights.v, kv_width)?,
            o: linear(&weights.o, case.d_model)?,
            heads: case.heads,
            kv_heads: case.kv_heads,
        })
    }

    /// The projections as `[batch, len, heads, head_dim]`.
    fn split(&self, x: &Tensor) -> Result<[Tensor; 3]> {
        let (batch, len, _) = x.dims3()?;
        let part = |linear: &Linear, heads: usize| linear.forward(x)?.reshape((batch, len, heads, ()));
        Ok([part(&self.q, self.heads)?, part(&self.k, self.kv_heads)?, part(&self.v, self.kv_heads)?])
    }

    /// From `[batch, heads, len, head_dim]`.
    fn merge(&self, context: &Tensor) -> Result<Tensor> {
        self.o.forward(&context.transpose(1, 2)?.contiguous()?.flatten_from(D::Minus2)?)
    }

    fn flash(&self, x: &Tensor, flash: &Flash) -> Result<Tensor> {
        let [q, k, v] = self.split(x)?;
        self.merge(&flash.attend(&q, &k, &v)?)
    }

    fn matmul(&self, x: &Tensor, matmul: &Matmul) -> Result<Tensor> {
        let [q, k, v] = self.split(x)?;
        let outside = |t: Tensor| t.transpose(1, 2)?.contiguous();
        self.merge(&matmul.attend(&outside(q)?, &outside(k)?, &outside(v)?)?)
    }
}

fn layer(case: &Case) -> Result<Vec<Call>> {
    let x = Tensor::from_vec(case.x(), (case.batch, case.len, case.d_model), &Device::Cpu)?;
    let (layer, flash, matmul) = (Layer::new(case)?, Flash::new(case)?, Matmul::new(case)?);
    let (other_layer, other_x) = (layer.clone(), x.clone());
    Ok(vec![
        Call::new("Linear and flash_attn", move || boxed(layer.flash(&x, &flash))),
        Call::new("Linear and matmul path", move || boxed(other_layer.matmul(&other_x, &matmul))),
    ])
}

pub fn calls(case: &Case) -> std::result::Result<Vec<Call>, String> {
    if case.is_layer() { layer(case) } else { attention(case) }.map_err(|e| e.to_string())
}
