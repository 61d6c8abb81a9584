//! PyTorch's `nn.Transformer`, whose file holds the outputs of its two stacks only: the model around the attention
//! modules, in plain `f64`. Post-norm, ReLU, a causal mask on the targets, a norm at the end of each stack.

use multihead::Mask;
use multihead::ndarray::{Array1, Array2, Array3, Axis};

use super::cases::Fault;
use super::layer::Layer;
use super::models::File;
use super::{Call, Way};

/// The outputs of encoder and decoder where the attention modules are computed this way.
pub(crate) fn stacks(file: &File, way: Way) -> Result<[Array3<f64>; 2], Fault> {
    let walk = Walk { file, way };
    let mut x: Array3<f64> = file.need("input.src")?;
    for i in 0..layers(file, "encoder") {
        let name = format!("encoder.layers.{i}");
        x = walk.residual(x, [&name, "self_attn", "norm1"], None, Mask::none())?;
        x = walk.feed_forward(x, &name, "norm2")?;
    }
    let memory = walk.norm(x, "encoder.norm")?;
    let mut y: Array3<f64> = file.need("input.tgt")?;
    for i in 0..layers(file, "decoder") {
        let name = format!("decoder.layers.{i}");
        y = walk.residual(y, [&name, "self_attn", "norm1"], None, Mask::causal())?;
        y = walk.residual(y, [&name, "multihead_attn", "norm2"], Some(&memory), Mask::none())?;
        y = walk.feed_forward(y, &name, "norm3")?;
    }
    let out = walk.norm(y, "decoder.norm")?;
    Ok([memory, out])
}

fn layers(file: &File, stack: &str) -> usize {
    (0..).take_while(|i| file.tensors.contains_key(&format!("{stack}.layers.{i}.norm1.weight"))).count()
}

struct Walk<'f> {
    file: &'f File,
    way: Way,
}

impl Walk<'_> {
    /// `norm(x + attention(x))`
    fn residual(
        &self,
        x: Array3<f64>,
        [layer, module, norm]: [&str; 3],
        memory: Option<&Array3<f64>>,
        mask: Mask,
    ) -> Result<Array3<f64>, Fault> {
        let prefix = format!("{layer}.{module}");
        let call = Layer { mask, ..self.file.torch_module(&prefix, x.clone(), memory.cloned())? };
        let output = call.answer(self.way).map_err(|e| format!("{prefix}: {e}"))?.out;
        let output: Array3<f64> = output.into_dimensionality().map_err(|e| e.to_string())?;
        self.norm(x + output, &format!("{layer}.{norm}"))
    }

    /// `norm(x + relu(x W_1 + b_1) W_2 + b_2)`
    fn feed_forward(&self, x: Array3<f64>, layer: &str, norm: &str) -> Result<Array3<f64>, Fault> {
        let inner = self.linear(&x, &format!("{layer}.linear1"))?.mapv(|x| x.max(0.0));
        let outer = self.linear(&inner, &format!("{layer}.linear2"))?;
        self.norm(x + outer, &format!("{layer}.{norm}"))
    }

    fn linear(&self, x: &Array3<f64>, name: &str) -> Result<Array3<f64>, Fault> {
        let w: Array2<f64> = self.file.need(&format!("{name}.weight"))?;
        let b: Array1<f64> = self.file.need(&format!("{name}.bias"))?;
        let (batch, len, width) = x.dim();
        let rows = x.to_shape((batch * len, width)).map_err(|e| e.to_string())?;
        let y = rows.dot(&w.t()) + &b;
        let outputs = y.ncols();
        y.into_shape_with_order((batch, len, outputs)).map_err(|e| e.to_string())
    }

    /// LayerNorm of each token.
    fn norm(&self, mut x: Array3<f64>, name: &str) -> Result<Array3<f64>, Fault> {
        let weight: Array1<f64> = self.file.need(&format!("{name}.weight"))?;
        let bias: Array1<f64> = self.file.need(&format!("{name}.bias"))?;
        for mut token in x.lanes_mut(Axis(2)) {
            let mean = token.sum() / token.len() as f64;
            let variance = token.mapv(|x| (x - mean) * (x - mean)).sum() / token.len() as f64;
            token.mapv_inplace(|x| (x - mean) / (variance + 1e-5).sqrt());
            token *= &weight;
            token += &bias;
        }
        Ok(x)
    }
}
