//! A checkpoint as its models read it: tensors by name, numbers of the configuration, and the parts that most models share.

use multihead::block::{Activation, FeedForward, FeedForwardWeights, Norm};
use multihead::io::{Layout, Tensors};
use multihead::ndarray::{Array, Array1, Array2, Array3, ArrayRef2, ArrayRef3, ArrayView1, Axis, Dimension, Ix1, s};
use multihead::{Builder, MultiHeadAttention};
use serde_json::Value;

pub(crate) type Fault = Box<dyn std::error::Error>;

/// The tensors and the configuration of a model.
pub(crate) struct Checkpoint<'a> {
    tensors: Tensors<'a>,
    config: Value,
}

impl<'a> Checkpoint<'a> {
    /// From the bytes of a `.safetensors` file; the configuration is a text, or stands in the file's metadata.
    pub(crate) fn new(bytes: &'a [u8], config: Option<&str>) -> Result<Self, Fault> {
        let tensors = Tensors::from_bytes(bytes)?;
        let text = config.or(tensors.metadata("config")).ok_or("expected a config.json next to the checkpoint")?;
        let config = serde_json::from_str(text)?;
        Ok(Self { tensors, config })
    }

    /// What the configuration calls the model, or the file's metadata.
    pub(crate) fn family(&self) -> Option<&str> {
        self.config.get("model_type").and_then(Value::as_str).or(self.tensors.metadata("family"))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.tensors.shape(name).is_some()
    }

    /// A tensor as it is.
    pub(crate) fn tensor<D: Dimension>(&self, name: &str) -> Result<Array<f32, D>, Fault> {
        Ok(self.tensors.get(name)?)
    }

    pub(crate) fn optional<D: Dimension>(&self, name: &str) -> Result<Option<Array<f32, D>>, Fault> {
        if self.has(name) { self.tensor(name).map(Some) } else { Ok(None) }
    }

    /// A matrix that is stored `[out, in]`, as `[in, out]`; products read its rows faster where they lie in one piece.
    pub(crate) fn linear(&self, name: &str) -> Result<Array2<f32>, Fault> {
        let stored: Array2<f32> = self.tensor(&format!("{name}.weight"))?;
        Ok(stored.reversed_axes().as_standard_layout().into_owned())
    }

    pub(crate) fn bias(&self, name: &str) -> Result<Option<Array1<f32>>, Fault> {
        self.optional::<Ix1>(&format!("{name}.bias"))
    }

    pub(crate) fn value(&self, key: &str) -> Option<&Value> {
        self.config.get(key).filter(|value| !value.is_null())
    }

    pub(crate) fn number(&self, key: &str) -> Result<f64, Fault> {
        self.value(key).and_then(Value::as_f64).ok_or_else(|| format!("config {key}: expected a number").into())
    }

    pub(crate) fn size(&self, key: &str) -> Result<usize, Fault> {
        let number = self.value(key).and_then(Value::as_u64).ok_or(format!("config {key}: expected a count"))?;
        Ok(usize::try_from(number)?)
    }

    /// The function that the configuration names.
    pub(crate) fn activation(&self, key: &str) -> Result<Activation, Fault> {
        match self.value(key).and_then(Value::as_str) {
            Some("gelu") => Ok(Activation::Gelu),
            Some("gelu_new" | "gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
            Some("relu") => Ok(Activation::Relu),
            Some("silu") => Ok(Activation::Silu),
            other => Err(format!("config {key}: expected a known activation, got {other:?}").into()),
        }
    }

    /// How many layers have a tensor whose name begins so: `name(i)` for the i-th.
    pub(crate) fn count(&self, name: impl Fn(usize) -> String) -> usize {
        (0..).take_while(|&i| self.has(&name(i))).count()
    }

    pub(crate) fn layer_norm(&self, name: &str, eps: f64) -> Result<Norm<f32>, Fault> {
        Ok(Norm::layer(self.tensor(&format!("{name}.weight"))?, self.bias(name)?, eps)?)
    }

    pub(crate) fn rms_norm(&self, name: &str, eps: f64) -> Result<Norm<f32>, Fault> {
        Ok(Norm::rms(self.tensor(&format!("{name}.weight"))?, eps)?)
    }

    /// Attention of the builder's sizes, from where the layout says that its tensors are.
    pub(crate) fn attention(&self, builder: Builder<f32>, layout: &Layout) -> Result<MultiHeadAttention<f32>, Fault> {
        Ok(builder.load(&self.tensors, layout)?)
    }

    /// Two matrices `[out, in]` with the biases that are there.
    pub(crate) fn feed_forward(&self, [into, out]: [String; 2], f: Activation) -> Result<FeedForward<f32>, Fault> {
        let weights = FeedForwardWeights::new(self.linear(&into)?, self.linear(&out)?);
        let weights = FeedForwardWeights { b_in: self.bias(&into)?, b_out: self.bias(&out)?, ..weights };
        Ok(FeedForward::new(weights, f)?)
    }
}

/// The rows of a table: `ids: [batch, len]`, `table: [words, d_model]` to `[batch, len, d_model]`.
pub(crate) fn embed(table: &Array2<f32>, ids: &Array2<usize>) -> Result<Array3<f32>, Fault> {
    let (batch, len) = ids.dim();
    let mut x = Array3::zeros((batch, len, table.ncols()));
    for ((b, i), &id) in ids.indexed_iter() {
        if id >= table.nrows() {
            return Err(format!("ids[{b}, {i}]: expected less than {}, got {id}", table.nrows()).into());
        }
        x.slice_mut(s![b, i, ..]).assign(&table.row(id));
    }
    Ok(x)
}

/// `x w` of the last token of each entry: `[batch, len, d_model]` to `[batch, words]`.
pub(crate) fn last_logits(x: &ArrayRef3<f32>, w: &ArrayRef2<f32>) -> Result<Array2<f32>, Fault> {
    let last = x.len_of(Axis(1)).checked_sub(1).ok_or("expected at least one token")?;
    Ok(x.index_axis(Axis(1), last).dot(w))
}

/// `x w` of all tokens.
pub(crate) fn product(x: &ArrayRef3<f32>, w: &ArrayRef2<f32>) -> Result<Array3<f32>, Fault> {
    let (batch, len, d_model) = x.dim();
    let rows = x.to_shape((batch * len, d_model))?.dot(w);
    Ok(rows.into_shape_with_order((batch, len, w.ncols()))?)
}

/// `count` more tokens for each entry of `prompt: [batch, len]`, always the likeliest one. `step` takes tokens and the
/// position of the first of them and returns the logits after the last, `[batch, words]`.
pub(crate) fn greedy(
    prompt: &Array2<usize>,
    count: usize,
    mut step: impl FnMut(&Array2<usize>, usize) -> Result<Array2<f32>, Fault>,
) -> Result<Array2<usize>, Fault> {
    let (batch, len) = prompt.dim();
    let mut tokens = Array2::zeros((batch, len + count));
    tokens.slice_mut(s![.., ..len]).assign(prompt);
    let (mut new, mut position) = (prompt.clone(), 0);
    for i in len..len + count {
        let next = largest(&step(&new, position)?);
        tokens.column_mut(i).assign(&next);
        (new, position) = (next.insert_axis(Axis(1)), i);
    }
    Ok(tokens)
}

/// The place of the largest number of each row.
fn largest(logits: &Array2<f32>) -> Array1<usize> {
    let best = |row: ArrayView1<'_, f32>| {
        row.iter().enumerate().fold((0, f32::MIN), |best, (i, &x)| if x > best.1 { (i, x) } else { best }).0
    };
    logits.outer_iter().map(best).collect()
}
