//! The bias as an array: `[batch, num_heads, q_len, kv_len]`, any axis may have length 1 and stands for all then.

use ndarray::ArrayView4;
use std::ops::Range;

use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernels::{Lines, fetch};

/// An array whose shape fits the call.
#[derive(Clone, Copy)]
pub(super) struct Dense<'a, T> {
    view: ArrayView4<'a, T>,
    shape: [usize; 4],
    /// The same numbers, where they lie in standard layout: a row of a tile is one copy then.
    slice: Option<&'a [T]>,
}

impl<'a, T: Element> Dense<'a, T> {
    pub(super) fn new(view: ArrayView4<'a, T>, dims: [usize; 4]) -> Result<Self> {
        let shape: [usize; 4] = view.dim().into();
        if shape.iter().zip(dims).all(|(&have, want)| have == 1 || have == want) {
            return Ok(Self { view, shape, slice: view.to_slice() });
        }
        let axes = "[batch, num_heads, q_len, kv_len]";
        Err(Error::Shape { argument: "bias", axes, expected: dims.into(), got: shape.to_vec() })
    }

    /// The index along an axis, or the only one there is.
    fn at(&self, axis: usize, index: usize) -> usize {
        if self.shape[axis] == 1 { 0 } else { index }
    }

    /// What is added to the score of query i and key j.
    pub(super) fn get(&self, [entry, head, i]: [usize; 3], j: usize) -> T {
        self.view[[self.at(0, entry), self.at(1, head), self.at(2, i), self.at(3, j)]]
    }

    /// What is added to the scores of query i and the keys from `first` on.
    pub(super) fn copy(&self, [entry, head, i]: [usize; 3], first: usize, to: &mut [T]) {
        match self.row([entry, head, i]) {
            Some(row) => to.copy_from_slice(&row[first..][..to.len()]),
            None => to.iter_mut().enumerate().for_each(|(j, to)| *to = self.get([entry, head, i], first + j)),
        }
    }

    /// Asks memory for what a copy will take.
    pub(super) fn fetch(&self, index: [usize; 3], keys: Range<usize>) {
        if let Some(row) = self.row(index) {
            fetch(&row[keys]);
        }
    }

    /// The rows of a head's queries from `i` on, if their keys are neighbours in memory.
    pub(super) fn lines(&self, [entry, head, i]: [usize; 3]) -> Option<Lines<'a, T>> {
        let [_, heads, rows, keys] = self.shape;
        let row = (self.at(0, entry) * heads + self.at(1, head)) * rows + self.at(2, i);
        let apart = if rows == 1 { 0 } else { keys };
        self.slice.filter(|_| keys > 1).map(|slice| Lines::new(slice, row * keys, apart))
    }

    /// The keys of a query, if they are neighbours in memory.
    pub(super) fn row(&self, index: [usize; 3]) -> Option<&'a [T]> {
        self.lines(index).map(|lines| lines.extent(1, self.shape[3]).0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array4;

    #[test]
    fn copies_are_what_the_indices_say() {
        let dims = [2, 3, 4, 5];
        for shape in (0..16).map(|bits| [0, 1, 2, 3].map(|axis| if bits >> axis & 1 == 1 { dims[axis] } else { 1 })) {
            let mut next = 0.0;
            let array = Array4::from_shape_simple_fn(shape, || {
                next += 1.0;
                next
            });
            let turned = array.clone().permuted_axes([3, 1, 2, 0]).as_standard_layout().to_owned();
            for view in [array.view(), turned.view().permuted_axes([3, 1, 2, 0])] {
                let bias = Dense::new(view, dims).unwrap();
                let mut row = [0.0; 3];
                bias.copy([1, 2, 3], 2, &mut row);
                let want = array.broadcast(dims).unwrap();
                assert_eq!(row, [want[[1, 2, 3, 2]], want[[1, 2, 3, 3]], want[[1, 2, 3, 4]]], "{shape:?}");
                assert_eq!(bias.get([0, 1, 2], 3), want[[0, 1, 2, 3]]);
            }
        }
    }
}
