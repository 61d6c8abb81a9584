//! The numbers that attention is computed in: `f32` and `f64`.

use ndarray::{Array, Dimension, IntoDimension, LinalgScalar, ScalarOperand};
use num_traits::{Float, NumAssign};
use std::fmt::{Debug, Display};

use crate::error::{Error, Result};

#[cfg(feature = "safetensors")]
use crate::io::Stored;

/// How a number type stands in a file: in none.
#[cfg(not(feature = "safetensors"))]
pub(crate) trait Stored {}
#[cfg(not(feature = "safetensors"))]
impl<T> Stored for T {}

mod sealed {
    #[expect(private_bounds, reason = "the kernels and the files of a type are nobody else's business")]
    pub trait Sealed: crate::compiled::Compiled + super::Stored {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// A number type of the crate: `f32` or `f64`. Sealed, because every kernel is tested for both and for nothing else.
pub trait Element:
    sealed::Sealed
    + crate::Storage<Element = Self>
    + LinalgScalar
    + ScalarOperand
    + Float
    + NumAssign
    + Debug
    + Display
    + Default
    + Send
    + Sync
    + 'static
{
    /// The nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The same value in `f64`, exactly.
    fn into_f64(self) -> f64;
}

impl Element for f32 {
    fn from_f64(x: f64) -> Self {
        x as f32
    }
    fn into_f64(self) -> f64 {
        f64::from(self)
    }
}

impl Element for f64 {
    fn from_f64(x: f64) -> Self {
        x
    }
    fn into_f64(self) -> f64 {
        self
    }
}

/// An array of zeros, or an error where its size cannot be addressed or had: an argument's lengths may come from a
/// broadcast view and be as large as they like.
pub(crate) fn zeros<T: Element, D: Dimension>(
    argument: &'static str,
    axes: &'static str,
    shape: impl IntoDimension<Dim = D>,
) -> Result<Array<T, D>> {
    reused(argument, axes, shape, Vec::new())
}

/// As [`zeros`], in the memory of `data` where it is enough; numbers that it held stay where they were.
pub(crate) fn reused<T: Element, D: Dimension>(
    argument: &'static str,
    axes: &'static str,
    shape: impl IntoDimension<Dim = D>,
    mut data: Vec<T>,
) -> Result<Array<T, D>> {
    let dim = shape.into_dimension();
    let too_large = || Error::TooLarge { argument, axes, got: dim.slice().to_vec() };
    // ndarray wants the product of the non-zero lengths to fit into isize, empty arrays included.
    let limit = isize::MAX as usize / size_of::<T>();
    dim.slice()
        .iter()
        .filter(|&&n| n > 0)
        .try_fold(1usize, |product, &n| product.checked_mul(n))
        .filter(|&n| n <= limit)
        .ok_or_else(too_large)?;
    let len = dim.size();
    data.try_reserve_exact(len.saturating_sub(data.len())).map_err(|_| too_large())?;
    data.resize(len, T::zero());
    Array::from_shape_vec(dim.clone(), data).map_err(|_| too_large())
}
