//! The feed-forward block: two products with a function between them, each token by itself.
//!
//! ```text
//! h = x W_in + b_in                    a = f(h)              y = a W_out + b_out
//! g = x W_gate + b_gate, with a gate   a = f(g) * h
//!
//! d_a = d_y W_out^T      d_W_out = a^T d_y       d_b_out = sum d_y
//! d_h = d_a f'(h),       d_W_in = x^T d_h        d_b_in = sum d_h         d_x = d_h W_in^T
//! with a gate: d_h = d_a f(g), d_g = d_a h f'(g), d_W_gate = x^T d_g, ..., d_x = d_h W_in^T + d_g W_gate^T
//! ```
//!
//! (Vaswani et al. 2017, section 3.3, <https://arxiv.org/abs/1706.03762>; gates: Shazeer 2020,
//! <https://arxiv.org/abs/2002.05202>.)

use ndarray::{
    Array, Array1, Array2, Array3, ArrayRef, ArrayView3, ArrayViewD, ArrayViewMut3, ArrayViewMutD, aview0, s,
};

use super::activation::{Activation, Part};
use crate::element::{Element, reused, zeros};
use crate::error::{Result, check_shape};
use crate::kernels::{Level, Start};
use crate::linear::{Projected, Terms, WeightGradient};
use crate::mha::Sequence;
use crate::prepack::{Matrices, Packable};

/// The weights of a [`FeedForward`], stored `[in, out]`, or their gradients.
///
/// LLaMA's `gate_proj`, `up_proj` and `down_proj` are `w_gate`, `w_in` and `w_out`; BERT's `intermediate.dense` and
/// `output.dense` are `w_in` and `w_out`. Files that store `[out, in]` give a transposed view by `reversed_axes()`.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForwardWeights<T> {
    /// `[d_model, width]`
    #[doc(alias = "up_proj")]
    #[doc(alias = "fc1")]
    pub w_in: Array2<T>,
    /// `[width]`
    pub b_in: Option<Array1<T>>,
    /// `[d_model, width]`: if it is there, `f(x w_gate)` multiplies `x w_in`.
    #[doc(alias = "gate_proj")]
    pub w_gate: Option<Array2<T>>,
    /// `[width]`
    pub b_gate: Option<Array1<T>>,
    /// `[width, d_model]`
    #[doc(alias = "down_proj")]
    #[doc(alias = "fc2")]
    pub w_out: Array2<T>,
    /// `[d_model]`
    pub b_out: Option<Array1<T>>,
}

impl<T: Element> Matrices<T> for FeedForwardWeights<T> {
    fn matrices(&self) -> impl Iterator<Item = (&'static str, &Array2<T>)> {
        let gate = self.w_gate.as_ref().map(|w| ("w_gate", w));
        [("w_in", &self.w_in), ("w_out", &self.w_out)].into_iter().chain(gate)
    }
}

impl<T: Element> FeedForwardWeights<T> {
    /// Two products and nothing else: `w_in: [d_model, width]`, `w_out: [width, d_model]`.
    ///
    /// ```
    /// use multihead::{block::FeedForwardWeights, ndarray::{Array1, Array2}};
    /// let weights = FeedForwardWeights::<f32>::new(Array2::zeros((8, 32)), Array2::zeros((32, 8)));
    /// let with_gate = FeedForwardWeights { w_gate: Some(Array2::zeros((8, 32))), ..weights };
    /// ```
    pub fn new(w_in: Array2<T>, w_out: Array2<T>) -> Self {
        Self { w_in, b_in: None, w_gate: None, b_gate: None, w_out, b_out: None }
    }

    /// Zeros of the same shapes, with the same gate and biases: the start of a sum of gradients, or of an optimiser's
    /// averages.
    ///
    /// ```
    /// use multihead::{block::FeedForwardWeights, ndarray::Array2};
    /// let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// assert_eq!(weights.zeros_like().w_out, Array2::<f32>::zeros((32, 8)));
    /// ```
    pub fn zeros_like(&self) -> Self {
        let matrix = |w: &Array2<T>| Array2::zeros(w.dim());
        let vector = |b: &Option<Array1<T>>| b.as_ref().map(|b| Array1::zeros(b.dim()));
        Self {
            w_in: matrix(&self.w_in),
            b_in: vector(&self.b_in),
            w_gate: self.w_gate.as_ref().map(matrix),
            b_gate: vector(&self.b_gate),
            w_out: matrix(&self.w_out),
            b_out: vector(&self.b_out),
        }
    }

    /// All arrays that there are, by the names of the fields and in their order.
    ///
    /// ```
    /// use multihead::{block::FeedForwardWeights, ndarray::Array2};
    /// let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// assert_eq!(weights.iter().map(|(name, _)| name).collect::<Vec<_>>(), ["w_in", "w_out"]);
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, ArrayViewD<'_, T>)> {
        let Self { w_in, b_in, w_gate, b_gate, w_out, b_out } = self;
        let arrays = [
            ("w_in", Some(w_in.view().into_dyn())),
            ("b_in", b_in.as_ref().map(|b| b.view().into_dyn())),
            ("w_gate", w_gate.as_ref().map(|w| w.view().into_dyn())),
            ("b_gate", b_gate.as_ref().map(|b| b.view().into_dyn())),
            ("w_out", Some(w_out.view().into_dyn())),
            ("b_out", b_out.as_ref().map(|b| b.view().into_dyn())),
        ];
        arrays.into_iter().filter_map(|(name, array)| Some((name, array?)))
    }

    /// [`FeedForwardWeights::iter`] to write to.
    ///
    /// ```
    /// use multihead::{block::FeedForwardWeights, ndarray::Array2};
    /// let mut weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// weights.iter_mut().for_each(|(_, mut array)| array *= 0.5);
    /// assert_eq!(weights.w_in[[0, 0]], 0.5);
    /// ```
    pub fn iter_mut(&mut self) -> impl Iterator<Item = (&'static str, ArrayViewMutD<'_, T>)> {
        let Self { w_in, b_in, w_gate, b_gate, w_out, b_out } = self;
        let arrays = [
            ("w_in", Some(w_in.view_mut().into_dyn())),
            ("b_in", b_in.as_mut().map(|b| b.view_mut().into_dyn())),
            ("w_gate", w_gate.as_mut().map(|w| w.view_mut().into_dyn())),
            ("b_gate", b_gate.as_mut().map(|b| b.view_mut().into_dyn())),
            ("w_out", Some(w_out.view_mut().into_dyn())),
            ("b_out", b_out.as_mut().map(|b| b.view_mut().into_dyn())),
        ];
        arrays.into_iter().filter_map(|(name, array)| Some((name, array?)))
    }

    fn check(&self) -> Result<()> {
        let (d_model, width) = self.w_in.dim();
        check_shape("w_out", "[width, d_model]", [Some(width), Some(d_model)], self.w_out.shape())?;
        if let Some(w_gate) = &self.w_gate {
            check_shape("w_gate", "[d_model, width]", [Some(d_model), Some(width)], w_gate.shape())?;
        }
        let gate = self.w_gate.as_ref().map_or(0, |_| width);
        let vectors = [
            ("b_in", "[width]", &self.b_in, width),
            ("b_gate", "[width of w_gate]", &self.b_gate, gate),
            ("b_out", "[d_model]", &self.b_out, d_model),
        ];
        for (name, axes, vector, len) in vectors {
            if let Some(vector) = vector {
                check_shape(name, axes, [Some(len)], vector.shape())?;
            }
        }
        Ok(())
    }
}

/// Two products with a function between them: `f(x W_in + b_in) W_out + b_out`, or with a gate
/// `(f(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out`.
///
/// ```
/// use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::{Array2, Array3}};
/// let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
/// let gelu = FeedForward::new(weights.clone(), Activation::Gelu)?;
/// let swiglu = FeedForward::new(FeedForwardWeights { w_gate: Some(Array2::ones((8, 32))), ..weights }, Activation::Silu)?;
/// assert_eq!(swiglu.forward(&Array3::ones((2, 5, 8)))?.shape(), [2, 5, 8]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[doc(alias = "MLP")]
#[doc(alias = "SwiGLU")]
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForward<T> {
    weights: Packable<FeedForwardWeights<T>, T>,
    activation: Activation,
}

/// The gradients of a loss with respect to what [`FeedForward::backward`] was given and what the block holds.
#[derive(Debug, Clone, PartialEq)]
pub struct FeedForwardGradients<T> {
    /// `[batch, len, d_model]`
    pub d_x: Array3<T>,
    /// The gradient of each weight and bias, under its name.
    pub weights: FeedForwardWeights<T>,
}

/// What the way back goes from, and where to.
pub(super) struct Passed<'a, T> {
    /// `[batch, len, d_model]`
    pub(super) x: ArrayView3<'a, T>,
    /// `[batch, len, d_model]`
    pub(super) d_y: ArrayView3<'a, T>,
    /// `[batch, len, d_model]`, filled.
    pub(super) d_x: ArrayViewMut3<'a, T>,
}

/// Hidden numbers of a part: 4 MiB of `f32`, which a third-level cache holds. Tokens of a part at least: weights are packed
/// once for 128 of them, and each thread wants some.
const MOST_HIDDEN: usize = 1 << 20;
const FEWEST_TOKENS: usize = 512;

/// Memory that is kept from block to block.
#[derive(Debug, Default)]
pub(super) struct Room<T> {
    hidden: Vec<T>,
    gate: Vec<T>,
    /// Gradients of both.
    back: [Vec<T>; 2],
    /// Packed weights, for each thread.
    scratch: Vec<Vec<T>>,
}

impl<T: Element> FeedForward<T> {
    /// A block with these weights; it has a gate if they have one.
    ///
    /// # Errors
    /// [`crate::Error::Shape`] names the array that does not fit `w_in`.
    ///
    /// ```
    /// use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::Array2};
    /// let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((30, 8)));
    /// let error = FeedForward::new(weights, Activation::Relu).unwrap_err();
    /// assert_eq!(error.to_string(), "w_out: expected [width, d_model] = [32, 8], got [30, 8]");
    /// ```
    pub fn new(weights: FeedForwardWeights<T>, activation: Activation) -> Result<Self> {
        weights.check()?;
        Ok(Self { weights: Packable::new(weights), activation })
    }

    /// All weights and biases.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::Array2};
    /// # let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// let block = FeedForward::new(weights, Activation::Relu)?;
    /// assert_eq!(block.weights().w_in.shape(), [8, 32]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn weights(&self) -> &FeedForwardWeights<T> {
        &self.weights
    }

    pub(super) fn weights_mut(&mut self) -> &mut FeedForwardWeights<T> {
        self.weights.edit()
    }

    /// Replaces all weights and biases.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::Array2};
    /// # let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// let mut block = FeedForward::new(weights, Activation::Relu)?;
    /// let mut weights = block.weights().clone();
    /// weights.w_in.fill(0.5);
    /// block.set_weights(weights)?;
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`FeedForward::new`]; the block is unchanged then.
    pub fn set_weights(&mut self, weights: FeedForwardWeights<T>) -> Result<()> {
        weights.check()?;
        *self.weights.edit() = weights;
        Ok(())
    }

    /// Copies the matrices into the order in which products read them, for many calls with the same weights; what that
    /// costs and gives is said at [`MultiHeadAttention::prepack`](crate::MultiHeadAttention::prepack). Changing the
    /// weights drops the copy.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::Array2};
    /// # let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// let mut block = FeedForward::new(weights, Activation::Relu)?;
    /// block.prepack()?;
    /// assert!(block.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`] if there is no memory for the copy; the block works without it then.
    pub fn prepack(&mut self) -> Result<()> {
        self.weights.prepack()
    }

    /// Whether [`FeedForward::prepack`] was called since the weights were changed.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::Array2};
    /// # let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// assert!(!FeedForward::new(weights, Activation::Relu)?.is_prepacked());
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn is_prepacked(&self) -> bool {
        self.weights.is_prepacked()
    }

    /// The width of a token.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::Array2};
    /// # let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// assert_eq!(FeedForward::new(weights, Activation::Relu)?.d_model(), 8);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn d_model(&self) -> usize {
        self.weights.w_in.nrows()
    }

    /// `x: [batch, len, d_model]` or `[len, d_model]`; the output has the same shape.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::{Array2, Array3}};
    /// # let weights = FeedForwardWeights::<f32>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// let block = FeedForward::new(weights, Activation::Relu)?;
    /// assert_eq!(block.forward(&Array3::ones((2, 5, 8)))?, Array3::from_elem((2, 5, 8), 256.0));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for tokens of another width, [`crate::Error::TooLarge`] if the hidden numbers or the
    /// result do not fit into memory.
    pub fn forward<D: Sequence>(&self, x: &ArrayRef<T, D>) -> Result<Array<T, D>> {
        let x = D::batched(x);
        self.check(x)?;
        let (batch, len, d_model) = x.dim();
        let mut y = zeros("y", "[batch, len, d_model]", (batch, len, d_model))?;
        self.run(x, y.view_mut(), &mut Room::default())?;
        Ok(D::unbatched(y))
    }

    /// The gradients of a loss, from that of the output: `x` and `d_y: [batch, len, d_model]`, any strides. What lies
    /// between is computed again.
    ///
    /// ```
    /// # use multihead::{block::{Activation, FeedForward, FeedForwardWeights}, ndarray::{Array2, Array3}};
    /// # let weights = FeedForwardWeights::<f64>::new(Array2::ones((8, 32)), Array2::ones((32, 8)));
    /// let block = FeedForward::new(weights, Activation::Relu)?;
    /// let x = Array3::ones((2, 5, 8));
    /// let gradients = block.backward(&x, &Array3::ones((2, 5, 8)))?;
    /// assert_eq!(gradients.d_x, Array3::from_elem((2, 5, 8), 8.0 * 32.0));
    /// assert_eq!(gradients.weights.w_in.shape(), [8, 32]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`FeedForward::forward`], and [`crate::Error::Shape`] where `d_y` has other lengths than `x`.
    pub fn backward<D: Sequence>(&self, x: &ArrayRef<T, D>, d_y: &ArrayRef<T, D>) -> Result<FeedForwardGradients<T>> {
        let (x, d_y) = (D::batched(x), D::batched(d_y));
        self.check(x)?;
        let (batch, len, d_model) = x.dim();
        check_shape("d_y", "[batch, len, d_model]", [batch, len, d_model].map(Some), d_y.shape())?;
        let mut d_x = zeros("d_x", "[batch, len, d_model]", (batch, len, d_model))?;
        let mut weights = self.weights.zeros_like();
        self.differentiate(Passed { x, d_y, d_x: d_x.view_mut() }, &mut weights, &mut Room::default())?;
        Ok(FeedForwardGradients { d_x, weights })
    }

    /// Fills the gradient of `x` and adds to those of the weights; the arguments have been checked. A token whose gradient
    /// is zero gives nothing, whatever it holds.
    pub(super) fn differentiate(
        &self,
        Passed { x, d_y, mut d_x }: Passed<'_, T>,
        d_weights: &mut FeedForwardWeights<T>,
        room: &mut Room<T>,
    ) -> Result<()> {
        // As in `run`.
        if x.is_empty() {
            return Ok(());
        }
        let FeedForwardWeights { w_in, b_in, w_gate, b_gate, w_out, .. } = &*self.weights;
        let (batch, len, _) = x.dim();
        let shape = (batch, len, w_in.ncols());
        let array = |memory: &mut Vec<T>| reused("hidden", "[batch, len, width]", shape, std::mem::take(memory));
        let Room { hidden, gate, back: [back_hidden, back_gate], scratch } = room;
        let (mut h, mut g, mut d_h) = (array(hidden)?, array(gate)?, array(back_hidden)?);
        let mut d_g = match w_gate {
            Some(_) => Some(array(back_gate)?),
            None => None,
        };
        let into_h = Projected::new(x, self.weights.factor(w_in), b_in.as_ref(), h.view_mut());
        let into_g = w_gate.as_ref().map(|w| Projected::new(x, self.weights.factor(w), b_gate.as_ref(), g.view_mut()));
        // That of a so far.
        let into_d_h = Projected::new(d_y, w_out.t(), None, d_h.view_mut());
        T::project(Level::best(), [Some(into_h), into_g, Some(into_d_h)], scratch);
        match &mut d_g {
            None => {
                g.assign(&h);
                self.activate(Part::Slope, &mut g);
                d_h *= &g;
                self.activate(Part::Value, &mut h);
            }
            Some(d_g) => {
                d_g.assign(&g);
                self.activate(Part::Slope, d_g);
                *d_g *= &h;
                *d_g *= &d_h;
                self.activate(Part::Value, &mut g);
                d_h *= &g;
                h *= &g;
            }
        }
        let a = h;
        for d in [Some(&mut d_h), d_g.as_mut()].into_iter().flatten() {
            clear_unseen(d, d_y);
        }

        let FeedForwardWeights { w_in: d_w_in, b_in, w_gate: d_w_gate, b_gate, w_out: d_w_out, b_out } = d_weights;
        let of_weights = |x, d_y, d_w| WeightGradient { x, d_y, d_w, start: Start::Add };
        let gates = d_w_gate.as_mut().zip(d_g.as_ref());
        let of_gate = gates.map(|(d_w, d_g)| of_weights(x, d_g.view(), d_w.view_mut()));
        let of_in = of_weights(x, d_h.view(), d_w_in.view_mut());
        let of_out = of_weights(a.view(), d_y, d_w_out.view_mut());
        T::weight_gradients(Level::best(), [Some(of_in), of_gate, Some(of_out)], Terms::Seen, scratch);
        let one = T::one();
        let one = aview0(&one);
        let of_bias = |d_y, d_b| WeightGradient::of_bias(&one, d_y, d_b, Start::Add);
        let of_gate = d_g.as_ref().and_then(|d_g| of_bias(d_g.view(), b_gate));
        let of_biases = [of_bias(d_h.view(), b_in), of_gate, of_bias(d_y, b_out)];
        T::weight_gradients(Level::best(), of_biases, Terms::All, scratch);

        let through_h = Projected::new(d_h.view(), w_in.t(), None, d_x.view_mut());
        T::project(Level::best(), [Some(through_h), None, None], scratch);
        if let Some((w, d_g)) = w_gate.as_ref().zip(d_g.as_ref()) {
            let through_g = Projected { start: Start::Add, ..Projected::new(d_g.view(), w.t(), None, d_x.view_mut()) };
            T::project(Level::best(), [Some(through_g), None, None], scratch);
        }
        let memory = |array: Array3<T>| array.into_raw_vec_and_offset().0;
        (*hidden, *gate) = (memory(a), memory(g));
        (*back_hidden, *back_gate) = (memory(d_h), d_g.map(memory).unwrap_or_default());
        Ok(())
    }

    /// The walk; the arguments have been checked. Tokens in one piece are taken by parts of nearly one size, so that what
    /// lies between the products stays in the cache.
    pub(super) fn run(&self, x: ArrayView3<'_, T>, y: ArrayViewMut3<'_, T>, room: &mut Room<T>) -> Result<()> {
        let (batch, len, d_model) = x.dim();
        // Tokens without numbers take no memory: there may be any number of them.
        if x.is_empty() {
            return Ok(());
        }
        let tokens = batch * len;
        let parts = tokens.div_ceil((MOST_HIDDEN / self.weights.w_in.ncols().max(1)).max(FEWEST_TOKENS));
        if parts <= 1 || !(x.is_standard_layout() && y.is_standard_layout()) {
            return self.run_part(x, y, room);
        }
        let whole = (1, tokens, d_model);
        let (Ok(x), Ok(mut y)) = (x.into_shape_with_order(whole), y.into_shape_with_order(whole)) else {
            debug_assert!(false, "arrays in standard layout have all shapes of their size");
            return Ok(());
        };
        for part in 0..parts {
            let tokens = tokens * part / parts..tokens * (part + 1) / parts;
            let y = y.slice_mut(s![.., tokens.clone(), ..]);
            self.run_part(x.slice(s![.., tokens, ..]), y, room)?;
        }
        Ok(())
    }

    fn run_part(&self, x: ArrayView3<'_, T>, y: ArrayViewMut3<'_, T>, room: &mut Room<T>) -> Result<()> {
        let FeedForwardWeights { w_in, b_in, w_gate, b_gate, w_out, b_out } = &*self.weights;
        let (batch, len, _) = x.dim();
        let shape = (batch, len, w_in.ncols());
        let hidden = |memory: &mut Vec<T>| reused("hidden", "[batch, len, width]", shape, std::mem::take(memory));
        let mut h = hidden(&mut room.hidden)?;
        let mut g = match w_gate {
            Some(_) => Some(hidden(&mut room.gate)?),
            None => None,
        };
        let into_h = Projected::new(x, self.weights.factor(w_in), b_in.as_ref(), h.view_mut());
        let activation = self.activation;
        match w_gate.as_ref().zip(g.as_mut()) {
            None => T::project(Level::best(), [Some(into_h.then(activation)), None, None], &mut room.scratch),
            Some((w_gate, g)) => {
                let into_g =
                    Projected::new(x, self.weights.factor(w_gate), b_gate.as_ref(), g.view_mut()).then(activation);
                T::project(Level::best(), [Some(into_h), Some(into_g), None], &mut room.scratch);
                // Both have just been made and lie in one piece.
                if let (Some(h), Some(g)) = (h.as_slice_mut(), g.as_slice()) {
                    T::multiply_all(h, g);
                }
            }
        }
        let back = Projected::new(h.view(), self.weights.factor(w_out), b_out.as_ref(), y);
        T::project(Level::best(), [Some(back), None, None], &mut room.scratch);
        room.hidden = h.into_raw_vec_and_offset().0;
        room.gate = g.map(|g| g.into_raw_vec_and_offset().0).unwrap_or_default();
        Ok(())
    }

    /// Of an array in standard layout.
    fn activate(&self, part: Part, numbers: &mut Array3<T>) {
        debug_assert!(numbers.is_standard_layout());
        if let Some(numbers) = numbers.as_slice_mut() {
            T::activate(Level::best(), self.activation, part, numbers);
        }
    }

    fn check(&self, x: ArrayView3<'_, T>) -> Result<()> {
        check_shape("x", "[batch, len, d_model]", [None, None, Some(self.d_model())], x.shape())
    }
}

/// Zero where the gradient that came in is zero for the whole token.
fn clear_unseen<T: Element>(d: &mut Array3<T>, d_y: ArrayView3<'_, T>) {
    for (mut d, d_y) in d.outer_iter_mut().zip(d_y.outer_iter()) {
        let tokens = d.outer_iter_mut().zip(d_y.outer_iter());
        tokens.filter(|(_, d_y)| d_y.iter().all(|d| d.is_zero())).for_each(|(mut d, _)| d.fill(T::zero()));
    }
}

#[cfg(test)]
#[path = "feed_forward_tests.rs"]
mod tests;
