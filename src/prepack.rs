//! Weights that can keep their matrices twice: as they are, and packed for the products of all calls to come.

use ndarray::{Array2, ArrayView2};
use std::ops::Deref;
use std::sync::Arc;

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
    /// Of all matrices in their order. Clones share it.
    packed: Option<Arc<[Prepacked<T>]>>,
}

impl<W: Matrices<T>, T: Element> Packable<W, T> {
    /// Weights without a copy.
    pub(crate) fn new(weights: W) -> Self {
        Self { weights, packed: None }
    }

    /// The weights, to be changed.
    pub(crate) fn edit(&mut self) -> &mut W {
        self.packed = None;
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
        let (names, matrices): (Vec<_>, Vec<ArrayView2<'_, T>>) =
            self.weights.matrices().map(|(name, w)| (name, w.view())).unzip();
        let too_large = |index: usize| Error::TooLarge {
            argument: names[index],
            axes: "[in, out]",
            got: matrices[index].shape().to_vec(),
        };
        let packed = T::prepack(&matrices).map_err(too_large)?;
        self.packed = Some(packed.into());
        Ok(())
    }

    pub(crate) fn is_prepacked(&self) -> bool {
        self.packed.is_some()
    }

    /// One of the matrices, packed if there is a copy.
    pub(crate) fn factor<'a>(&'a self, w: &'a Array2<T>) -> Factor<'a, T> {
        let packed = self.packed.iter().flat_map(|packed| packed.iter());
        let packed = self.weights.matrices().zip(packed).find(|((_, matrix), _)| std::ptr::eq(*matrix, w));
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
