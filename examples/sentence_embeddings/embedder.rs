//! One vector of length 1 for each sentence: BERT, the mean of its tokens, and that divided by its length.

use multihead::Mask;
use multihead::ndarray::{Array1, Array2, Array3, Axis, s};
use std::path::Path;

use crate::bert::Bert;
use crate::checkpoint::{Checkpoint, Fault};
use crate::wordpiece::WordPiece;

pub(crate) struct Embedder {
    bert: Bert,
    pub(crate) wordpiece: WordPiece,
}

impl Embedder {
    /// From a folder with `config.json`, `tokenizer.json` and `model.safetensors`.
    pub(crate) fn load(folder: &Path) -> Result<Self, Fault> {
        let read = |name: &str| {
            let path = folder.join(name);
            std::fs::read(&path).map_err(|error| format!("{}: {error}", path.display()))
        };
        let (config, bytes) = (String::from_utf8(read("config.json")?)?, read("model.safetensors")?);
        let file = Checkpoint::new(&bytes, Some(&config))?;
        let wordpiece =
            WordPiece::new(&String::from_utf8(read("tokenizer.json")?)?, file.size("max_position_embeddings")?)?;
        Ok(Self { bert: Bert::load(&file)?, wordpiece })
    }

    /// `[batch, d_model]`: the vectors of sentences that go through the model together, one after the other without
    /// padding.
    pub(crate) fn embed(&self, sentences: &[&[usize]]) -> Result<Array2<f32>, Fault> {
        let lengths: Vec<usize> = sentences.iter().map(|ids| ids.len()).collect();
        let ids = Array2::from_shape_vec((1, lengths.iter().sum()), sentences.concat())?;
        let places = Array2::from_shape_vec(ids.dim(), lengths.iter().flat_map(|&length| 0..length).collect())?;
        mean_tokens(&self.bert.forward(&ids, &places, &Mask::segments(&lengths))?, &lengths)
    }
}

/// The mean of the tokens of each sentence as a vector of length 1: `[1, tokens, d_model]` to `[batch, d_model]`.
fn mean_tokens(x: &Array3<f32>, lengths: &[usize]) -> Result<Array2<f32>, Fault> {
    let mut means = Array2::zeros((lengths.len(), x.len_of(Axis(2))));
    let mut start = 0;
    for (mut mean, &length) in means.outer_iter_mut().zip(lengths) {
        let sum: Array1<f32> = x.slice(s![0, start..start + length, ..]).sum_axis(Axis(0));
        let norm = sum.dot(&sum).sqrt();
        if norm == 0.0 {
            return Err("expected sentences of at least one token".into());
        }
        mean.assign(&(sum / norm));
        start += length;
    }
    Ok(means)
}

/// The numbers of sentences, the shortest first, in batches: neighbours have nearly one
/// length, so that a model that pads them would pad little, and batches come back at an even pace.
pub(crate) fn batches(tokens: &[Vec<usize>], size: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|&i| tokens[i].len());
    order.chunks(size.max(1)).map(<[usize]>::to_vec).collect()
}
