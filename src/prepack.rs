//! Weights that can keep their matrices twice: as they are, and packed for the products of all calls to come.

use ndarray::Array2;
use std::ops::Deref;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernels::{Factor, Prepacked};

/// Weights that have matrices, by the names of the fields.
pub(crate) trait Matrices<T: Element> {
    fn matrices(&self) -> impl Iterator<Item = (&'static str, &Array2<T>)>;
}

/// Weights, and a packed copy of their matrices if somebody asked for one. Changing the weights drops the copy.
#[derive(Debug, Clone)]
pub(crate) struct Packable<W, T> {
    weights: W,
    /// Of all matrices in their order, or empty.
    packed: Vec<Prepacked<T>>,
}

impl<W: Matrices<T>, T: Element> Packable<W, T> {
    /// Weights without a copy.
    pub(crate) fn new(weights: W) -> Self {
        Self { weights, packed: Vec::new() }
    }

    /// The weights, to be changed.
    pub(crate) fn edit(&mut self) -> &mut W {
        self.packed = Vec::new();
        &mut self.weights
    }

    pub(crate) fn into_weights(self) -> W {
        self.weights
    }

    /// Makes the copy, unless it is there. Without memory for all of it nothing changes.
    pub(crate) fn prepack(&mut self) -> Result<()> {
        if self.is_prepacked() {
            return Ok(());
        }
        let pack = |(argument, w): (&'static str, &Array2<T>)| {
            let too_large = || Error::TooLarge { argument, axes: "[in, out]", got: w.shape().to_vec() };
            T::prepack(w.view()).ok_or_else(too_large)
        };
        self.packed = self.weights.matrices().map(pack).collect::<Result<_>>()?;
        Ok(())
    }

    pub(crate) fn is_prepacked(&self) -> bool {
        !self.packed.is_empty()
    }

    /// One of the matrices, packed if there is a copy.
    pub(crate) fn factor<'a>(&'a self, w: &'a Array2<T>) -> Factor<'a, T> {
        let packed = self.weights.matrices().zip(&self.packed).find(|((_, matrix), _)| std::ptr::eq(*matrix, w));
        packed.map_or_else(|| w.view().into(), |(_, packed)| Factor::Prepacked(packed))
    }
}

impl<W, T> Deref for Packable<W, T> {
    type Target = W;

    fn deref(&self) -> &W {
        &self.weights
    }
}

/// The copy holds nothing that the weights do not.
impl<W: PartialEq, T> PartialEq for Packable<W, T> {
    fn eq(&self, other: &Self) -> bool {
        self.weights == other.weights
    }
}
