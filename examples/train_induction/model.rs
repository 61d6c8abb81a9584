//! A decoder of attention and nothing else: token embedding, attention layers around a residual stream, unembedding.
//!
//! ```text
//! x = E[token] (+ P[position])
//! x = x + attention_l(x)        for each layer l, causal
//! logits = x U
//! ```
//!
//! Forward, loss, gradients by hand, Adam and a file format: all that it takes to train one, in plain code.

// Each program that includes this file uses its own part of it.
#![allow(dead_code)]

use std::collections::HashMap;
use std::error::Error;
use std::path::Path;

use multihead::ndarray::{
    Array, Array2, Array3, ArrayD, ArrayView2, ArrayViewD, ArrayViewMutD, Dimension, IntoDimension, ShapeError, Zip, s,
};
use multihead::{Builder, Inputs, Mask, MultiHeadAttention, Options, Rope, RopeStyle, Weights};
use safetensors::tensor::{Dtype, TensorView, serialize};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// A stream of random numbers, the same on every machine: SplitMix64.
#[derive(Debug, Clone)]
pub(crate) struct Draws(pub(crate) u64);

impl Draws {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Below `end`, which is small.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (((self.next() >> 32) * end as u64) >> 32) as usize
    }

    /// Uniform numbers of mean 0 and this deviation.
    fn array<D: Dimension>(&mut self, shape: impl IntoDimension<Dim = D>, deviation: f64) -> Array<f32, D> {
        let width = 12f64.sqrt() * deviation;
        Array::from_shape_simple_fn(shape.into_dimension(), || {
            ((self.next() >> 11) as f64 / (1u64 << 53) as f64 - 0.5) as f32 * width as f32
        })
    }
}

/// How the decoder knows where a token stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Places {
    /// Queries and keys turn.
    Rope,
    /// A learned row for each position, so many of them.
    Learned(usize),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Config {
    pub(crate) vocabulary: usize,
    pub(crate) d_model: usize,
    pub(crate) num_heads: usize,
    pub(crate) num_layers: usize,
    pub(crate) places: Places,
    pub(crate) seed: u64,
}

/// The model; gradients and the averages of Adam have the same arrays.
#[derive(Debug, Clone)]
pub(crate) struct Decoder {
    /// `[vocabulary, d_model]`
    pub(crate) embedding: Array2<f32>,
    /// `[positions, d_model]`
    pub(crate) positions: Option<Array2<f32>>,
    pub(crate) layers: Vec<MultiHeadAttention<f32>>,
    /// `[d_model, vocabulary]`
    pub(crate) unembedding: Array2<f32>,
}

/// What a batch taught.
#[derive(Debug)]
pub(crate) struct Lesson {
    /// Mean cross-entropy of the tokens that count, in nats.
    pub(crate) loss: f32,
    /// Share of them that the model puts first.
    pub(crate) accuracy: f32,
    pub(crate) gradients: Gradients,
}

#[derive(Debug)]
pub(crate) struct Gradients {
    embedding: Array2<f32>,
    positions: Option<Array2<f32>>,
    layers: Vec<Weights<f32>>,
    unembedding: Array2<f32>,
}

/// Sequences and what is to be predicted.
#[derive(Debug, Clone)]
pub(crate) struct Batch {
    /// `[batch, len]`
    pub(crate) tokens: Array2<usize>,
    /// `[batch, len]`: the token to be predicted from each one, if it counts.
    pub(crate) targets: Array2<Option<usize>>,
}

/// The rules of a layer.
fn builder(d_model: usize, num_heads: usize, places: Places) -> Builder<f32> {
    let builder = MultiHeadAttention::builder(d_model, num_heads);
    match places {
        Places::Rope => builder.rope(Rope::new(RopeStyle::HalfSplit, 100.0)),
        Places::Learned(_) => builder,
    }
}

impl Decoder {
    pub(crate) fn new(config: &Config) -> Outcome<Self> {
        let Config { vocabulary, d_model, num_heads, num_layers, places, seed } = *config;
        let mut draws = Draws(seed);
        let layer = |draws: &mut Draws| builder(d_model, num_heads, places).seed(draws.next()).build();
        Ok(Self {
            embedding: draws.array((vocabulary, d_model), 1.0),
            positions: match places {
                Places::Rope => None,
                Places::Learned(count) => Some(draws.array((count, d_model), 1.0)),
            },
            layers: (0..num_layers).map(|_| layer(&mut draws)).collect::<Result<_, _>>()?,
            unembedding: draws.array((d_model, vocabulary), (d_model as f64).powf(-0.5)),
        })
    }

    pub(crate) fn d_model(&self) -> usize {
        self.embedding.ncols()
    }

    /// `[batch, len, d_model]`: the start of the residual stream, for tokens `[batch, len]` from position `first` on.
    pub(crate) fn embed(&self, tokens: &ArrayView2<'_, usize>, first: usize) -> Array3<f32> {
        let (batch, len) = tokens.dim();
        let mut x = Array3::zeros((batch, len, self.d_model()));
        for ((entry, i), &token) in tokens.indexed_iter() {
            let mut row = x.slice_mut(s![entry, i, ..]);
            row += &self.embedding.row(token);
            if let Some(positions) = &self.positions {
                row += &positions.row(first + i);
            }
        }
        x
    }

    /// `[batch, len, vocabulary]`
    pub(crate) fn unembed(&self, x: &Array3<f32>) -> Outcome<Array3<f32>> {
        Ok(with_rows(rows(x)?.dot(&self.unembedding), x)?)
    }

    /// Hands each layer what it sees of these tokens, `[batch, len, d_model]`, one after the other.
    pub(crate) fn walk<R>(
        &self,
        tokens: &ArrayView2<'_, usize>,
        mut visit: impl FnMut(&MultiHeadAttention<f32>, &Array3<f32>, &Options<'_, f32>) -> multihead::Result<R>,
    ) -> Outcome<Vec<R>> {
        let causal = Mask::causal();
        let options = Options::new().mask(&causal);
        let mut x = self.embed(tokens, 0);
        let mut all = Vec::new();
        for layer in &self.layers {
            all.push(visit(layer, &x, &options)?);
            let y = layer.attend(&Inputs::new(&x), &options)?.output;
            x += &y;
        }
        Ok(all)
    }

    /// Loss and gradients of a batch.
    pub(crate) fn learn(&self, batch: &Batch) -> Outcome<Lesson> {
        let causal = Mask::causal();
        let options = Options::new().mask(&causal);

        // Forward: each layer adds to the residual stream, whose states are kept for the way back.
        let mut x = self.embed(&batch.tokens.view(), 0);
        let mut kept = Vec::new();
        for layer in &self.layers {
            let (y, tape) = layer.forward_train(&Inputs::new(&x), &options)?;
            let recording = tape.detach();
            let next = &x + &y;
            kept.push((x, recording));
            x = next;
        }
        let (loss, accuracy, d_logits) = cross_entropy(self.unembed(&x)?, &batch.targets.view());

        // Backward: what a layer adds passes its gradient on, to itself and to the stream before it.
        let d_logits = rows(&d_logits)?;
        let unembedding = rows(&x)?.t().dot(&d_logits);
        let mut d_x = with_rows(d_logits.dot(&self.unembedding.t()), &x)?;
        let mut layers = Vec::new();
        for (layer, (x, recording)) in self.layers.iter().zip(kept).rev() {
            let gradients = layer.backward(&recording.attach(&Inputs::new(&x), &options), &d_x)?;
            d_x += &gradients.d_query;
            layers.insert(0, gradients.weights);
        }
        let (embedding, positions) = self.embed_gradient(&batch.tokens.view(), &d_x);
        Ok(Lesson { loss, accuracy, gradients: Gradients { embedding, positions, layers, unembedding } })
    }

    /// The gradients of the tables that [`Decoder::embed`] reads.
    fn embed_gradient(&self, tokens: &ArrayView2<'_, usize>, d_x: &Array3<f32>) -> (Array2<f32>, Option<Array2<f32>>) {
        let mut d_embedding = Array2::zeros(self.embedding.dim());
        let mut d_positions = self.positions.as_ref().map(|positions| Array2::zeros(positions.dim()));
        for ((entry, i), &token) in tokens.indexed_iter() {
            let d_row = d_x.slice(s![entry, i, ..]);
            let mut row = d_embedding.row_mut(token);
            row += &d_row;
            if let Some(d_positions) = &mut d_positions {
                let mut row = d_positions.row_mut(i);
                row += &d_row;
            }
        }
        (d_embedding, d_positions)
    }

    /// All parameters by name.
    pub(crate) fn parameters(&self) -> Vec<(String, ArrayViewD<'_, f32>)> {
        let mut all = vec![
            ("embedding".to_owned(), self.embedding.view().into_dyn()),
            ("unembedding".to_owned(), self.unembedding.view().into_dyn()),
        ];
        all.extend(self.positions.iter().map(|positions| ("positions".to_owned(), positions.view().into_dyn())));
        for (index, layer) in self.layers.iter().enumerate() {
            all.extend(layer.weights().iter().map(|(name, w)| (format!("layers.{index}.{name}"), w)));
        }
        all
    }

    /// Writes the parameters to a `.safetensors` file, under their names.
    pub(crate) fn save(&self, path: &Path) -> Outcome<()> {
        let parameters = self.parameters().into_iter();
        let stored: Vec<(String, Vec<usize>, Vec<u8>)> = parameters
            .map(|(name, w)| (name, w.shape().to_vec(), w.iter().flat_map(|x| x.to_le_bytes()).collect()))
            .collect();
        let views =
            stored.iter().map(|(name, shape, bytes)| Ok((name, TensorView::new(Dtype::F32, shape.clone(), bytes)?)));
        let views = views.collect::<Result<Vec<_>, safetensors::SafeTensorError>>()?;
        let num_heads = self.layers.first().map_or(0, |layer| layer.config().heads.num_heads());
        let metadata = HashMap::from([("num_heads".to_owned(), num_heads.to_string())]);
        std::fs::write(path, serialize(views, Some(metadata))?)?;
        Ok(())
    }

    /// Reads what [`Decoder::save`] wrote.
    #[cfg(feature = "safetensors")]
    pub(crate) fn load(path: &Path) -> Outcome<Self> {
        let bytes = std::fs::read(path)?;
        let tensors = multihead::io::Tensors::from_bytes(&bytes)?;
        let num_heads = tensors.metadata("num_heads").ok_or("the file names no number of heads")?.parse()?;
        let positions = tensors.shape("positions").is_some().then(|| tensors.get("positions")).transpose()?;
        let embedding: Array2<f32> = tensors.get("embedding")?;
        let mut layers = Vec::new();
        while tensors.shape(&format!("layers.{}.w_q", layers.len())).is_some() {
            let matrix = |name: &str| tensors.get(&format!("layers.{}.{name}", layers.len()));
            let weights = Weights::new(matrix("w_q")?, matrix("w_k")?, matrix("w_v")?, matrix("w_o")?);
            let places = if positions.is_some() { Places::Learned(0) } else { Places::Rope };
            layers.push(builder(embedding.ncols(), num_heads, places).from_weights(weights)?);
        }
        Ok(Self { embedding, positions, layers, unembedding: tensors.get("unembedding")? })
    }

    /// All parameters with their gradients, by name.
    pub(crate) fn parameters_mut<'a>(&'a mut self, gradients: &'a Gradients) -> Outcome<Vec<Parameter<'a>>> {
        let Self { embedding, positions, layers, unembedding } = self;
        let mut all = vec![
            ("embedding".to_owned(), embedding.view_mut().into_dyn(), gradients.embedding.view().into_dyn()),
            ("unembedding".to_owned(), unembedding.view_mut().into_dyn(), gradients.unembedding.view().into_dyn()),
        ];
        if let (Some(positions), Some(gradient)) = (positions, &gradients.positions) {
            all.push(("positions".to_owned(), positions.view_mut().into_dyn(), gradient.view().into_dyn()));
        }
        for (index, (layer, gradients)) in layers.iter_mut().zip(&gradients.layers).enumerate() {
            let pairs = layer.parameters_mut(gradients)?;
            all.extend(pairs.map(|(name, w, d_w)| (format!("layers.{index}.{name}"), w, d_w)));
        }
        Ok(all)
    }
}

/// A parameter's name, its numbers and their gradient.
pub(crate) type Parameter<'a> = (String, ArrayViewMutD<'a, f32>, ArrayViewD<'a, f32>);

/// Adam (Kingma and Ba 2015, <https://arxiv.org/abs/1412.6980>).
#[derive(Debug, Default)]
pub(crate) struct Adam {
    step: i32,
    /// Mean and mean square of the gradients of each parameter.
    averages: Vec<[ArrayD<f32>; 2]>,
}

impl Adam {
    const DECAY: [f32; 2] = [0.9, 0.99];

    pub(crate) fn update(&mut self, model: &mut Decoder, gradients: &Gradients, rate: f32) -> Outcome<()> {
        self.step += 1;
        let [unbias, unbias_square] = Self::DECAY.map(|decay| 1.0 - decay.powi(self.step));
        let rate = rate * unbias_square.sqrt() / unbias;
        let parameters = model.parameters_mut(gradients)?;
        if self.averages.is_empty() {
            self.averages = parameters.iter().map(|(_, w, _)| [0, 1].map(|_| ArrayD::zeros(w.raw_dim()))).collect();
        }
        for ((_, w, d_w), [mean, square]) in parameters.into_iter().zip(&mut self.averages) {
            Zip::from(w).and(d_w).and(mean).and(square).for_each(|w, &d_w, mean, square| {
                *mean += (1.0 - Self::DECAY[0]) * (d_w - *mean);
                *square += (1.0 - Self::DECAY[1]) * (d_w * d_w - *square);
                *w -= rate * *mean / (square.sqrt() + 1e-8);
            });
        }
        Ok(())
    }
}

/// Mean loss in nats and accuracy of the tokens that count, and the gradient of the logits `[batch, len, vocabulary]`,
/// in place.
fn cross_entropy(mut logits: Array3<f32>, targets: &ArrayView2<'_, Option<usize>>) -> (f32, f32, Array3<f32>) {
    let count = targets.iter().flatten().count().max(1) as f32;
    let (mut loss, mut right) = (0.0, 0.0);
    for (mut row, target) in logits.rows_mut().into_iter().zip(targets) {
        let Some(target) = *target else {
            row.fill(0.0);
            continue;
        };
        let largest = row.fold(f32::NEG_INFINITY, |m, &x| m.max(x));
        if row[target] == largest {
            right += 1.0;
        }
        row.mapv_inplace(|x| (x - largest).exp());
        let total = row.sum();
        loss -= f64::from((row[target] / total).ln());
        row.mapv_inplace(|x| x / (total * count));
        row[target] -= count.recip();
    }
    (loss as f32 / count, right / count, logits)
}

/// `[batch, len, width]` as `[batch * len, width]`.
fn rows(x: &Array3<f32>) -> Result<ArrayView2<'_, f32>, ShapeError> {
    let (batch, len, width) = x.dim();
    x.view().into_shape_with_order((batch * len, width))
}

/// And back.
fn with_rows(x: Array2<f32>, like: &Array3<f32>) -> Result<Array3<f32>, ShapeError> {
    let ((batch, len, _), width) = (like.dim(), x.ncols());
    x.into_shape_with_order((batch, len, width))
}
