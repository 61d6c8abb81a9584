//! The weights of a layer from the tensors of a file.

use ndarray::{Array1, Array2, ShapeBuilder};

use super::layout::{Layout, Parts};
use super::places::{PARTS, Part, Place, Places};
use super::tensors::{Tensors, fault};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::mha::{Config, Projection, Weights};

/// What a builder asks for. Of that, nothing may be missing in the file.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked<'a> {
    pub(crate) biases: &'a [Projection],
    pub(crate) sinks: bool,
    /// Of queries and of keys.
    pub(crate) norms: [bool; 2],
    pub(crate) relative_keys: bool,
}

impl Asked<'_> {
    /// What is asked for must have a place in the layout.
    fn check(&self, layout: &Layout, config: &Config) -> Result<()> {
        let asked = [
            ("qk_norm", self.norms.contains(&true), layout.norms.is_some()),
            ("sinks", self.sinks, layout.sinks.is_some()),
            ("relative_bias", config.relative_bias.is_some(), layout.relative_bias.is_some()),
            ("relative_keys", self.relative_keys, false),
        ];
        match asked.into_iter().find(|&(_, is_asked, has_place)| is_asked && !has_place) {
            Some((argument, ..)) => Err(Error::value(argument, "a layout with a place for it", "none")),
            None => Ok(()),
        }
    }

    /// Whether the bias of a part must be there; a fused bias as a whole.
    fn needs_bias(&self, layout: &Layout, part: Part) -> bool {
        let is_asked = |part| {
            self.biases.contains(&match part {
                Part::Query => Projection::Query,
                Part::Key => Projection::Key,
                Part::Value => Projection::Value,
            })
        };
        layout.always_biased
            || match layout.biases {
                Parts::Separate(_) => is_asked(part),
                Parts::Fused(..) => PARTS.into_iter().any(is_asked),
            }
    }
}

impl Layout {
    /// Reads all that a layer of these sizes has.
    pub(crate) fn load<T: Element>(
        &self,
        tensors: &Tensors<'_>,
        config: &Config,
        asked: Asked<'_>,
    ) -> Result<Weights<T>> {
        asked.check(self, config)?;
        if let Some(name) = self.foreign.iter().find(|name| tensors.shape(name).is_some()) {
            return Err(fault(name, "expected no such tensor, for the layer has nothing like it"));
        }
        let places = Places { layout: self, config };
        let matrix = |part| read_matrix(tensors, &places.matrix(part));
        let bias = |part| read_vector(tensors, &places.bias(part), asked.needs_bias(self, part));
        let [q_norm, k_norm] = match places.norms() {
            None => [None, None],
            Some([q, k]) => [self.norm(tensors, &q, asked.norms[0])?, self.norm(tensors, &k, asked.norms[1])?],
        };
        let biased_output = self.always_biased || asked.biases.contains(&Projection::Output);
        Ok(Weights {
            w_q: matrix(Part::Query)?,
            w_k: matrix(Part::Key)?,
            w_v: matrix(Part::Value)?,
            w_o: read_matrix(tensors, &places.output_matrix())?,
            b_q: bias(Part::Query)?,
            b_k: bias(Part::Key)?,
            b_v: bias(Part::Value)?,
            b_o: read_vector(tensors, &places.output_bias(), biased_output)?,
            sinks: places.sinks().map_or(Ok(None), |place| read_vector(tensors, &place, asked.sinks))?,
            q_norm,
            k_norm,
            relative_bias: places.table().map(|place| read_matrix(tensors, &place)).transpose()?,
            relative_keys: None,
        })
    }

    fn norm<T: Element>(&self, tensors: &Tensors<'_>, place: &Place<'_>, is_needed: bool) -> Result<Option<Array1<T>>> {
        let norm: Option<Array1<T>> = read_vector(tensors, place, is_needed)?;
        Ok(if self.norms_less_1 { norm.map(|norm| norm + T::one()) } else { norm })
    }
}

/// The numbers of a place in the file's order of axes. Memory is taken when the shape has been found right.
fn read<T: Element>(tensors: &Tensors<'_>, place: &Place<'_>) -> Result<Option<Vec<T>>> {
    let Place { name, axes, shape, .. } = place;
    let Some(got) = tensors.shape(name) else { return Ok(None) };
    if got != shape {
        return Err(fault(name, format_args!("expected {axes} = {shape:?}, got {got:?}")));
    }
    let numbers = tensors.numbers::<T>(name)?;
    let mut data = Vec::new();
    let len = place.ranges().map(|range| range.len()).sum();
    data.try_reserve_exact(len).map_err(|_| fault(name, "expected to fit into memory"))?;
    place.ranges().for_each(|range| numbers.append(range.start, range.end, &mut data));
    Ok(Some(data))
}

/// `[in, out]`, also for a table that has no other name for its axes.
fn read_matrix<T: Element>(tensors: &Tensors<'_>, place: &Place<'_>) -> Result<Array2<T>> {
    let data = read(tensors, place)?.ok_or_else(|| Tensors::missing(place.name))?;
    let inputs = place.inputs();
    let shape = (inputs, data.len() / inputs.max(1)).set_f(place.is_by_outputs());
    Array2::from_shape_vec(shape, data).map_err(|error| fault(place.name, error))
}

fn read_vector<T: Element>(tensors: &Tensors<'_>, place: &Place<'_>, is_needed: bool) -> Result<Option<Array1<T>>> {
    match read(tensors, place)? {
        None if is_needed => Err(Tensors::missing(place.name)),
        numbers => Ok(numbers.map(Array1::from_vec)),
    }
}
