//! The tensors of a file from the weights of a layer.

use ndarray::{ArrayD, ArrayView1, ArrayView2, IxDyn};
use std::collections::btree_map::{BTreeMap, Entry};

use super::layout::Layout;
use super::map::TensorMap;
use super::places::{Part, Place, Places};
use super::tensors::fault;
use crate::element::{Element, zeros};
use crate::error::{Error, Result};
use crate::mha::MultiHeadAttention;

/// Tensors that are being put together, with how many of their numbers are there.
type Parcels<'l, T> = BTreeMap<&'l str, (ArrayD<T>, usize)>;

impl Layout {
    /// Adds the tensors of a layer to those of a file, in the layer's own type. Loading them gives the same layer, bit for
    /// bit.
    ///
    /// ```
    /// use multihead::{io::{Layout, TensorMap}, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(12, 3).bias().build()?;
    /// let mut tensors = TensorMap::new();
    /// Layout::gpt2("h.0.attn").save(&mha, &mut tensors)?;
    /// Layout::bert("layer.0.attention").save(&mha, &mut tensors)?;
    /// assert_eq!(tensors.shape("h.0.attn.c_attn.weight"), Some(&[12, 3 * 12][..]));
    /// assert_eq!(tensors.shape("layer.0.attention.self.key.bias"), Some(&[12][..]));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::File`] names the tensor that cannot be written: one of a layer that lacks something which the layout
    /// needs, or some of the biases that are fused into one; one whose name another tensor has. [`Error::Value`] for what a
    /// layer has and the layout has no place for. The tensors are as before then.
    pub fn save<T: Element>(&self, mha: &MultiHeadAttention<T>, tensors: &mut TensorMap) -> Result<()> {
        let (weights, config) = (mha.weights(), mha.config());
        let places = Places { layout: self, config };
        let mut parcels = Parcels::new();
        for (part, w, b) in [
            (Part::Query, &weights.w_q, &weights.b_q),
            (Part::Key, &weights.w_k, &weights.b_k),
            (Part::Value, &weights.w_v, &weights.b_v),
        ] {
            put_matrix(&mut parcels, &places.matrix(part), w.view())?;
            self.put_bias(&mut parcels, &places.bias(part), b.as_ref().map(|b| b.view()))?;
        }
        put_matrix(&mut parcels, &places.output_matrix(), weights.w_o.view())?;
        self.put_bias(&mut parcels, &places.output_bias(), weights.b_o.as_ref().map(|b| b.view()))?;
        let no_place = |argument| Error::value(argument, "a layout with a place for it", "none");
        if let Some(sinks) = &weights.sinks {
            put(&mut parcels, &places.sinks().ok_or_else(|| no_place("sinks"))?, sinks.iter())?;
        }
        for (argument, index, norm) in [("q_norm", 0, &weights.q_norm), ("k_norm", 1, &weights.k_norm)] {
            let Some(norm) = norm else { continue };
            let place = places.norms().and_then(|norms| norms.into_iter().nth(index));
            self.put_norm(&mut parcels, &place.ok_or_else(|| no_place(argument))?, norm.view())?;
        }
        if let Some(table) = &weights.relative_bias {
            put_matrix(&mut parcels, &places.table().ok_or_else(|| no_place("relative_bias"))?, table.view())?;
        }
        if weights.relative_keys.is_some() {
            return Err(no_place("relative_keys"));
        }
        // Parts of a fused tensor that are not there would be zeros.
        if let Some((name, _)) = parcels.iter().find(|(_, (array, written))| array.len() != *written) {
            return Err(fault(name, "expected queries, keys and values to have biases, or none of them, got some"));
        }
        tensors.insert_all(parcels.iter().map(|(&name, (array, _))| (name, &**array)))
    }

    fn put_bias<'l, T: Element>(
        &self,
        parcels: &mut Parcels<'l, T>,
        place: &Place<'l>,
        bias: Option<ArrayView1<'_, T>>,
    ) -> Result<()> {
        match bias {
            Some(bias) => put(parcels, place, bias.iter()),
            None if self.always_biased => Err(fault(place.name, "expected a bias in the layer, got none")),
            None => Ok(()),
        }
    }

    fn put_norm<'l, T: Element>(
        &self,
        parcels: &mut Parcels<'l, T>,
        place: &Place<'l>,
        norm: ArrayView1<'_, T>,
    ) -> Result<()> {
        if !self.norms_less_1 {
            return put(parcels, place, norm.iter());
        }
        let less = norm.mapv(|x| x - T::one());
        if less.iter().zip(norm).any(|(&less, &x)| less + T::one() != x && !x.is_nan()) {
            return Err(fault(place.name, "expected norms that are 1 and a number of this type, got others"));
        }
        put(parcels, place, less.iter())
    }
}

/// `[in, out]`
fn put_matrix<'l, T: Element>(
    parcels: &mut Parcels<'l, T>,
    place: &Place<'l>,
    matrix: ArrayView2<'_, T>,
) -> Result<()> {
    match place.is_by_outputs() {
        true => put(parcels, place, matrix.t().iter()),
        false => put(parcels, place, matrix.iter()),
    }
}

/// Writes numbers, in the file's order of axes, to where they belong.
fn put<'l, 'n, T: Element>(
    parcels: &mut Parcels<'l, T>,
    place: &Place<'l>,
    mut numbers: impl Iterator<Item = &'n T>,
) -> Result<()> {
    let (array, written) = match parcels.entry(place.name) {
        Entry::Occupied(entry) => entry.into_mut(),
        Entry::Vacant(entry) => entry.insert((zeros("tensor", place.axes, IxDyn(&place.shape))?, 0)),
    };
    if array.shape() != place.shape {
        return Err(fault(
            place.name,
            format_args!("expected one shape, got {:?} and {:?}", array.shape(), place.shape),
        ));
    }
    let to = array.as_slice_mut().unwrap_or_default();
    for range in place.ranges() {
        for (to, &number) in to.get_mut(range).unwrap_or_default().iter_mut().zip(&mut numbers) {
            *to = number;
            *written += 1;
        }
    }
    Ok(())
}
