//! What a call adds to its scores by distance, and the same as an array, pair by pair.

use multihead::ndarray::{Array2, Array4};
use multihead::position::{Alibi, Buckets};
use multihead::{Element, Options};

use super::masks::{Dims, Rules};
use super::typed;

/// Biases and keys by distance, in `f64`.
#[derive(Debug, Clone, Default)]
pub(crate) struct Distances {
    pub(crate) alibi: Option<Alibi>,
    /// With `[buckets, num_heads]`.
    pub(crate) bias: Option<(Buckets, Array2<f64>)>,
    /// `[2 clip + 1, head_dim]`
    pub(crate) keys: Option<Array2<f64>>,
}

/// The tables in the type of a call.
pub(crate) struct Typed<'d, T> {
    distances: &'d Distances,
    bias: Option<Array2<T>>,
    keys: Option<Array2<T>>,
}

impl Distances {
    pub(crate) fn typed<T: Element>(&self) -> Typed<'_, T> {
        let bias = self.bias.as_ref().map(|(_, table)| typed(table));
        Typed { distances: self, bias, keys: self.keys.as_ref().map(|keys| typed(keys)) }
    }

    /// `[batch, num_heads, q_len, kv_len]`: what is added to the scores after the soft cap.
    pub(crate) fn array(&self, rules: &Rules, dims: Dims) -> Array4<f64> {
        Array4::from_shape_fn(dims, |(b, h, i, j)| {
            let distance = j as i128 - rules.position(dims, b, i);
            let alibi = self.alibi.as_ref().map_or(0.0, |alibi| -slope(alibi, h) * distance.unsigned_abs() as f64);
            let table = self.bias.as_ref().map_or(0.0, |(buckets, table)| table[[bucket(buckets, distance), h]]);
            alibi + table
        })
    }
}

fn slope(alibi: &Alibi, head: usize) -> f64 {
    alibi.slope(head).unwrap()
}

/// T5's published function, or the distance itself.
pub(crate) fn bucket(buckets: &Buckets, distance: i128) -> usize {
    let t5 = |count: usize, max_distance: usize, distance: i128| {
        let exact = count / 2;
        if distance < exact as i128 {
            return distance as usize;
        }
        let share = (distance as f64 / exact as f64).ln() / (max_distance as f64 / exact as f64).ln();
        // The published code is in f32, which meets the powers exactly.
        let large = exact + ((share * (count - exact) as f64) as f32) as usize;
        large.min(count - 1)
    };
    match *buckets {
        Buckets::T5 { count, max_distance } if distance > 0 => count / 2 + t5(count / 2, max_distance, distance),
        Buckets::T5 { count, max_distance } => t5(count / 2, max_distance, -distance),
        Buckets::T5Causal { count, max_distance } => t5(count, max_distance, (-distance).max(0)),
        Buckets::Clipped { clip } => (distance.clamp(-(clip as i128), clip as i128) + clip as i128) as usize,
        _ => panic!("{buckets:?} is new"),
    }
}

impl<T: Element> Typed<'_, T> {
    pub(crate) fn choose<'o>(&'o self, mut options: Options<'o, T>) -> Options<'o, T> {
        if let Some(alibi) = &self.distances.alibi {
            options = options.alibi(alibi);
        }
        if let (Some((buckets, _)), Some(table)) = (&self.distances.bias, &self.bias) {
            options = options.relative_bias(*buckets, table);
        }
        match &self.keys {
            Some(keys) => options.relative_keys(keys),
            None => options,
        }
    }
}
