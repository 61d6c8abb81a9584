//! LayerNorm and RMSNorm of tokens: `x: [batch, len, d_model]`, see `crate::norm` for the formulas.

use ndarray::{Array, Array1, Array3, ArrayRef, ArrayView3, ArrayViewD, ArrayViewMutD, Axis};

use crate::element::{Element, reused, zeros};
use crate::error::{Error, Result, check_shape};
use crate::kernels::NormInput;
use crate::mha::Sequence;
use crate::norm::RowNorm;

/// Gives each token the same scale: `weight * (x - m) / sqrt(mean((x - m)^2) + eps) + bias`, where m is the mean of the
/// token (LayerNorm) or 0 (RMSNorm).
///
/// ```
/// use multihead::{block::Norm, ndarray::{array, Array1}};
/// let rms = Norm::rms(Array1::ones(2), 0.0)?;
/// assert_eq!(rms.forward(&array![[3.0, -3.0], [0.5, 0.5]])?, array![[1.0, -1.0], [1.0, 1.0]]);
/// let layer = Norm::layer(Array1::ones(2), Some(array![0.0, 5.0]), 0.0)?;
/// assert_eq!(layer.forward(&array![[3.0, 1.0]])?, array![[1.0, 4.0]]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[doc(alias = "LayerNorm")]
#[doc(alias = "RMSNorm")]
#[derive(Debug, Clone, PartialEq)]
pub struct Norm<T> {
    weights: NormWeights<T>,
    eps: f64,
    kind: Kind,
}

/// The weight and the bias of a [`Norm`], or their gradients.
#[derive(Debug, Clone, PartialEq)]
pub struct NormWeights<T> {
    /// `[d_model]`
    pub weight: Array1<T>,
    /// `[d_model]`
    pub bias: Option<Array1<T>>,
}

impl<T: Element> NormWeights<T> {
    /// Zeros of the same shapes, with a bias if there is one.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// let norm = Norm::layer(Array1::<f32>::ones(8), Some(Array1::ones(8)), 1e-5)?;
    /// assert_eq!(norm.weights().zeros_like().bias, Some(Array1::zeros(8)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn zeros_like(&self) -> Self {
        let vector = |vector: &Array1<T>| Array1::zeros(vector.dim());
        Self { weight: vector(&self.weight), bias: self.bias.as_ref().map(vector) }
    }

    /// The arrays that there are, by the names of the fields and in their order.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// let norm = Norm::<f32>::rms(Array1::ones(8), 1e-6)?;
    /// assert_eq!(norm.weights().iter().map(|(name, _)| name).collect::<Vec<_>>(), ["weight"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, ArrayViewD<'_, T>)> {
        let vectors = [("weight", Some(&self.weight)), ("bias", self.bias.as_ref())];
        vectors.into_iter().filter_map(|(name, vector)| Some((name, vector?.view().into_dyn())))
    }

    /// [`NormWeights::iter`] to write to.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// let norm = Norm::<f32>::rms(Array1::ones(8), 1e-6)?;
    /// let mut average = norm.weights().zeros_like();
    /// average.iter_mut().for_each(|(_, mut array)| array.fill(0.5));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&'static str, ArrayViewMutD<'_, T>)> {
        let vectors = [("weight", Some(&mut self.weight)), ("bias", self.bias.as_mut())];
        vectors.into_iter().filter_map(|(name, vector)| Some((name, vector?.view_mut().into_dyn())))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Layer,
    Rms,
}

/// The gradients of a loss with respect to what [`Norm::backward`] was given and what the norm holds.
#[derive(Debug, Clone, PartialEq)]
pub struct NormGradients<T> {
    /// `[batch, len, d_model]`
    pub d_x: Array3<T>,
    /// The gradients of the weight and the bias, under their names.
    pub weights: NormWeights<T>,
}

/// Memory of the way back that is kept from norm to norm.
#[derive(Debug, Default)]
pub(super) struct Room<T> {
    /// The gradient of the weight.
    sums: Vec<T>,
    chunks: Vec<T>,
}

impl<T: Element> Norm<T> {
    /// LayerNorm with `weight: [d_model]` and `bias: [d_model]`.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// let norm = Norm::<f32>::layer(Array1::ones(8), Some(Array1::zeros(8)), 1e-5)?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for a bias of another length, [`Error::Value`] for an eps that is negative or not finite.
    #[doc(alias = "layer_norm_eps")]
    pub fn layer(weight: Array1<T>, bias: Option<Array1<T>>, eps: f64) -> Result<Self> {
        if let Some(bias) = &bias {
            check_shape("bias", "[d_model]", [Some(weight.len())], bias.shape())?;
        }
        Self { weights: NormWeights { weight, bias }, eps, kind: Kind::Layer }.checked()
    }

    /// RMSNorm with `weight: [d_model]`.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// let norm = Norm::<f32>::rms(Array1::ones(8), 1e-6)?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for an eps that is negative or not finite.
    #[doc(alias = "rms_norm_eps")]
    pub fn rms(weight: Array1<T>, eps: f64) -> Result<Self> {
        Self { weights: NormWeights { weight, bias: None }, eps, kind: Kind::Rms }.checked()
    }

    fn checked(self) -> Result<Self> {
        if self.eps.is_finite() && self.eps >= 0.0 {
            Ok(self)
        } else {
            Err(Error::value("eps", "a finite number that is not negative", self.eps))
        }
    }

    /// The width of a token.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// assert_eq!(Norm::rms(Array1::<f32>::ones(8), 1e-6)?.d_model(), 8);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn d_model(&self) -> usize {
        self.weights.weight.len()
    }

    /// The weight, and the bias if there is one.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::Array1};
    /// let norm = Norm::rms(Array1::<f32>::ones(8), 1e-6)?;
    /// assert_eq!(norm.weights().weight, Array1::<f32>::ones(8));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn weights(&self) -> &NormWeights<T> {
        &self.weights
    }

    pub(super) fn weights_mut(&mut self) -> &mut NormWeights<T> {
        &mut self.weights
    }

    /// Normalises each token: `x: [batch, len, d_model]` or `[len, d_model]`; the output has the same shape.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::{Array1, Array3}};
    /// let norm = Norm::<f32>::rms(Array1::ones(8), 1e-6)?;
    /// assert_eq!(norm.forward(&Array3::ones((2, 5, 8)))?.shape(), [2, 5, 8]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for tokens of another width, [`Error::TooLarge`] if the result does not fit into memory.
    pub fn forward<D: Sequence>(&self, x: &ArrayRef<T, D>) -> Result<Array<T, D>> {
        let x = D::batched(x);
        self.check("x", x)?;
        let mut y = copied("y", x)?;
        self.apply(NormInput::Rows, &mut y);
        Ok(D::unbatched(y))
    }

    /// The gradients of a loss, from that of the output: `x` and `d_y: [batch, len, d_model]`, any strides.
    ///
    /// ```
    /// # use multihead::{block::Norm, ndarray::{Array1, Array3}};
    /// let norm = Norm::<f64>::layer(Array1::ones(8), Some(Array1::zeros(8)), 1e-5)?;
    /// let x = Array3::from_shape_fn((2, 5, 8), |(b, i, c)| (b + i * c) as f64);
    /// let gradients = norm.backward(&x, &Array3::ones((2, 5, 8)))?;
    /// // The same step in all directions changes nothing but the mean.
    /// assert!(gradients.d_x.iter().all(|d| d.abs() < 1e-12));
    /// assert_eq!(gradients.weights.bias, Some(Array1::from_elem(8, 10.0)));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Norm::forward`], and [`Error::Shape`] where `d_y` has other lengths than `x`.
    pub fn backward<D: Sequence>(&self, x: &ArrayRef<T, D>, d_y: &ArrayRef<T, D>) -> Result<NormGradients<T>> {
        let (x, d_y) = (D::batched(x), D::batched(d_y));
        self.check("x", x)?;
        let (batch, len, d_model) = x.dim();
        check_shape("d_y", "[batch, len, d_model]", [batch, len, d_model].map(Some), d_y.shape())?;
        let (x, mut d_x) = (copied("x", x)?, copied("d_x", d_y)?);
        let mut weights = self.weights.zeros_like();
        self.differentiate(&x, &mut d_x, &mut weights, &mut Room::default())?;
        Ok(NormGradients { d_x, weights })
    }

    /// Turns the gradient of the output into that of `x`, and adds to those of weight and bias. The arguments have been
    /// checked; both arrays are in standard layout. A token whose gradient is zero gives nothing, whatever it holds.
    pub(super) fn differentiate(
        &self,
        x: &Array3<T>,
        d: &mut Array3<T>,
        d_weights: &mut NormWeights<T>,
        room: &mut Room<T>,
    ) -> Result<()> {
        debug_assert!(x.is_standard_layout() && d.is_standard_layout());
        // Tokens without numbers take no memory: there may be any number of them.
        if x.is_empty() {
            return Ok(());
        }
        if let Some(d_bias) = &mut d_weights.bias {
            *d_bias += &column_sums(d.view())?;
        }
        let Room { sums, chunks } = room;
        sums.clear();
        sums.resize(self.d_model(), T::zero());
        if let (Some(x), Some(d)) = (x.as_slice(), d.as_slice_mut()) {
            T::differentiate_norm(&self.rule(), x, d, sums, chunks)?;
        }
        d_weights.weight.iter_mut().zip(&*sums).for_each(|(d, &sum)| *d += sum);
        Ok(())
    }

    /// Normalises tokens where they are, or what takes their place. All arrays are in standard layout and have been
    /// checked.
    pub(super) fn apply(&self, input: NormInput<'_, T>, tokens: &mut Array3<T>) {
        debug_assert!(tokens.is_standard_layout() && tokens.len_of(Axis(2)) == self.d_model());
        if let Some(tokens) = tokens.as_slice_mut() {
            T::normalise(&self.rule(), input, tokens);
        }
    }

    /// Fills `tokens` with the norms of `x`.
    pub(super) fn fill(&self, tokens: &mut Array3<T>, x: &Array3<T>) {
        debug_assert!(x.is_standard_layout() && x.dim() == tokens.dim());
        if let Some(x) = x.as_slice() {
            self.apply(NormInput::Other(x), tokens);
        }
    }

    /// `tokens = norm(tokens + update)`
    pub(super) fn add(&self, tokens: &mut Array3<T>, update: &Array3<T>) {
        debug_assert!(update.is_standard_layout() && update.dim() == tokens.dim());
        if let Some(update) = update.as_slice() {
            self.apply(NormInput::RowsPlus(update), tokens);
        }
    }

    fn check(&self, argument: &'static str, x: ArrayView3<'_, T>) -> Result<()> {
        check_shape(argument, "[batch, len, d_model]", [None, None, Some(self.d_model())], x.shape())
    }

    fn rule(&self) -> RowNorm<'_, T> {
        let rms = RowNorm::new(&self.weights.weight, self.eps);
        match self.kind {
            Kind::Rms => rms,
            Kind::Layer => rms.centred(self.weights.bias.as_ref()),
        }
    }
}

/// A copy in standard layout.
pub(super) fn copied<T: Element>(argument: &'static str, x: ArrayView3<'_, T>) -> Result<Array3<T>> {
    copied_to(Vec::new(), argument, x)
}

/// The same in the memory of an array that was there before.
pub(super) fn copied_to<T: Element>(memory: Vec<T>, argument: &'static str, x: ArrayView3<'_, T>) -> Result<Array3<T>> {
    let mut copy = reused(argument, "[batch, len, d_model]", x.dim(), memory)?;
    copy.assign(&x);
    Ok(copy)
}

/// `x += update` for arrays in standard layout.
pub(super) fn add<T: Element>(x: &mut Array3<T>, update: &Array3<T>) {
    debug_assert!(x.is_standard_layout() && update.is_standard_layout() && update.dim() == x.dim());
    if let (Some(x), Some(update)) = (x.as_slice_mut(), update.as_slice()) {
        T::add_all(x, update);
    }
}

/// The sum of all tokens.
pub(super) fn column_sums<T: Element>(x: ArrayView3<'_, T>) -> Result<Array1<T>> {
    let mut sums = zeros("sums", "[columns]", x.len_of(Axis(2)))?;
    for entry in x.outer_iter() {
        for token in entry.outer_iter() {
            sums += &token;
        }
    }
    Ok(sums)
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{array, s};

    #[test]
    fn any_strides_will_do() {
        let wide = Array3::from_shape_fn((3, 4, 10), |(b, i, c)| ((b * 7 + i * 5 + c * c) % 11) as f64);
        let x = wide.slice(s![..;-1, 1.., ..;2]);
        let norm = Norm::layer(array![1.0, -2.0, 0.5, 3.0, 1.5], None, 1e-5).unwrap();
        let dense = x.to_owned();
        assert_eq!(norm.forward(&x).unwrap(), norm.forward(&dense).unwrap());
        assert_eq!(norm.forward(&x.slice(s![1, .., ..])).unwrap(), norm.forward(&dense).unwrap().slice(s![1, .., ..]));
        assert_eq!(norm.backward(&x, &x).unwrap(), norm.backward(&dense, &dense).unwrap());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let norm = Norm::<f32>::rms(Array1::ones(4), 1e-6).unwrap();
        let x = Array3::zeros((2, 3, 4));
        let text = |error: Error| error.to_string();
        let wide = norm.forward(&Array3::zeros((2, 3, 5))).map_err(text);
        assert_eq!(wide, Err("x: expected [batch, len, d_model] = [_, _, 4], got [2, 3, 5]".into()));
        let other = norm.backward(&x, &Array3::zeros((2, 2, 4))).map_err(text);
        assert_eq!(other.unwrap_err(), "d_y: expected [batch, len, d_model] = [2, 3, 4], got [2, 2, 4]");
        for eps in [-1.0, f64::NAN, f64::INFINITY] {
            assert!(Norm::<f32>::rms(Array1::ones(4), eps).is_err());
        }
        assert!(Norm::<f32>::layer(Array1::ones(4), Some(Array1::ones(3)), 0.0).is_err());
        assert_eq!(norm.forward(&Array3::zeros((2, 0, 4))).unwrap().shape(), [2, 0, 4]);
        assert_eq!(
            Norm::rms(Array1::<f32>::ones(0), 0.0).unwrap().forward(&Array3::zeros((2, 3, 0))).unwrap().len(),
            0
        );
    }
}
