//! Rotary positions: which pairs of columns of a head turn, and how fast.

use ndarray::{Array1, ArrayRef4};

use super::rotate::{Heads, RopeTable, Turn};
use super::{Positions, RopeScaling};
use crate::element::Element;
use crate::error::{Error, Result};

/// Which columns of a head turn together. Both are the same at position 0 and differ everywhere else.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum RopeStyle {
    /// Column `i` with column `i + dims / 2`: GPT-NeoX, Falcon, and LLaMA and its kin as Hugging Face stores them.
    #[doc(alias = "rotate_half")]
    #[doc(alias = "neox")]
    HalfSplit,
    /// Column `2 i` with column `2 i + 1`: the paper, GPT-J, and LLaMA as Meta stores it.
    #[doc(alias = "gptj")]
    Interleaved,
}

/// Rotary positions of a layer, see [`crate::Builder::rope`]: the pairs of columns of a query or key head turn by an angle
/// that grows with the position.
///
/// ```text
/// angle[i] = position * frequency[i]          frequency[i] = theta^(-2 i / dims)      0 <= i < dims / 2
/// a' = a cos(angle) - b sin(angle)
/// b' = a sin(angle) + b cos(angle)
/// ```
///
/// (Su et al. 2021, <https://arxiv.org/abs/2104.09864>.) The product of a turned query and a turned key depends on the
/// distance of their positions only. `(a, b)` are the columns `(i, i + dims / 2)` or `(2 i, 2 i + 1)`, see
/// [`RopeStyle`]; weights that were trained for one are wrong for the other, so there is no default.
///
/// ```
/// use multihead::{MultiHeadAttention, Rope, RopeStyle};
/// // GPT-NeoX turns the first half of each head.
/// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0).dims(8);
/// let mha = MultiHeadAttention::<f32>::builder(64, 4).rope(rope).build()?;
/// # let _ = mha;
/// # Ok::<(), multihead::Error>(())
/// ```
#[doc(alias = "RotaryEmbedding")]
#[derive(Debug, Clone, Copy, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[must_use = "a description of positions does nothing by itself"]
pub struct Rope {
    style: RopeStyle,
    theta: f64,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    dims: Option<usize>,
    #[cfg_attr(feature = "serde", serde(default, skip_serializing_if = "Option::is_none"))]
    scaling: Option<RopeScaling>,
}

impl Rope {
    /// Turns all columns of a head. `theta` is 10,000 in the paper and larger in models for long texts.
    ///
    /// ```
    /// use multihead::{Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::Interleaved, 10_000.0);
    /// # let _ = rope;
    /// ```
    pub fn new(style: RopeStyle, theta: f64) -> Self {
        Self { style, theta, dims: None, scaling: None }
    }

    /// Turns the first `dims` columns of each head and leaves the others as they are.
    ///
    /// ```
    /// use multihead::{Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0).dims(2);
    /// assert_eq!(rope.frequencies(8)?.len(), 1);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    #[doc(alias = "partial_rotary_factor")]
    #[doc(alias = "rotary_dim")]
    pub fn dims(mut self, dims: usize) -> Self {
        self.dims = Some(dims);
        self
    }

    /// Slows the turns down for positions beyond those of the training.
    ///
    /// ```
    /// use multihead::{Rope, RopeScaling, RopeStyle};
    /// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0).scaling(RopeScaling::Linear { factor: 4.0 });
    /// assert_eq!(rope.frequencies(2)?[0], 0.25);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn scaling(mut self, scaling: RopeScaling) -> Self {
        self.scaling = Some(scaling);
        self
    }

    /// `[dims / 2]`: the angle from one position to the next of each pair of columns of a head.
    ///
    /// ```
    /// use multihead::{ndarray::array, Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    /// assert_eq!(rope.frequencies(4)?, array![1.0, 0.01]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for a width that is odd, 0 or above `head_dim`, and for numbers of the scaling out of range.
    #[doc(alias = "inv_freq")]
    pub fn frequencies(&self, head_dim: usize) -> Result<Array1<f64>> {
        let dims = self.width(head_dim)?;
        let plain = (0..dims / 2).map(|i| self.theta.powf(-((2 * i) as f64) / dims as f64));
        let mut frequencies = Array1::from_iter(plain);
        if let Some(scaling) = &self.scaling {
            scaling.apply(self.theta, dims, &mut frequencies);
        }
        Ok(frequencies)
    }

    /// Turns all heads of `x: [batch, heads, len, head_dim]`, queries or keys, in place. Any strides will do; heads that
    /// are views of a projection `[batch, len, heads * head_dim]` are fast.
    ///
    /// ```
    /// use multihead::{ndarray::array, position::Positions, Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    /// let mut x = array![[[[1.0f64, 0.0], [1.0, 0.0]]]];
    /// rope.rotate(&mut x, &Positions::offset(2))?;
    /// assert_eq!(x, array![[[[2f64.cos(), 2f64.sin()], [3f64.cos(), 3f64.sin()]]]]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rope::frequencies`], and for positions that do not fit `x`. Nothing is written then.
    #[doc(alias = "apply_rotary_pos_emb")]
    pub fn rotate<T: Element>(&self, x: &mut ArrayRef4<T>, positions: &Positions<'_>) -> Result<()> {
        self.turn(x, positions, Turn::There)
    }

    /// The transposed rotation, which takes the gradient of a turned head to that of the head before:
    /// `d_x: [batch, heads, len, head_dim]` in place.
    ///
    /// ```
    /// use multihead::{ndarray::Array4, position::Positions, Rope, RopeStyle};
    /// let rope = Rope::new(RopeStyle::Interleaved, 10_000.0);
    /// let mut x = Array4::<f64>::ones((1, 2, 3, 4));
    /// rope.rotate(&mut x, &Positions::offset(9))?;
    /// rope.rotate_back(&mut x, &Positions::offset(9))?;
    /// assert!(x.iter().all(|x| (x - 1.0).abs() < 1e-15));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Rope::rotate`].
    pub fn rotate_back<T: Element>(&self, d_x: &mut ArrayRef4<T>, positions: &Positions<'_>) -> Result<()> {
        self.turn(d_x, positions, Turn::Back)
    }

    fn turn<T: Element>(&self, x: &mut ArrayRef4<T>, positions: &Positions<'_>, turn: Turn) -> Result<()> {
        let (batch, _, len, head_dim) = x.dim();
        self.check(head_dim)?;
        positions.check("positions", batch, len)?;
        let heads = Heads { x: x.view_mut(), positions: *positions };
        T::rotate(self, [Some(heads), None], turn, &mut RopeTable::default())
    }

    /// Checks all numbers for heads of this width.
    pub(crate) fn check(&self, head_dim: usize) -> Result<()> {
        self.width(head_dim).map(drop)
    }

    pub(crate) fn style(&self) -> RopeStyle {
        self.style
    }

    /// The factor of turned columns.
    pub(crate) fn attention_factor(&self) -> f64 {
        self.scaling.map_or(1.0, |scaling| scaling.attention_factor())
    }

    /// How many columns of a head turn, where the numbers have been checked.
    #[cfg(feature = "safetensors")]
    pub(crate) fn turned(&self, head_dim: usize) -> usize {
        self.dims.unwrap_or(head_dim)
    }

    /// The width that turns.
    fn width(&self, head_dim: usize) -> Result<usize> {
        let dims = self.dims.unwrap_or(head_dim);
        if dims == 0 || !dims.is_multiple_of(2) || dims > head_dim {
            return Err(Error::value("rope dims", "an even number from 2 to head_dim", dims));
        }
        above_0("rope theta", self.theta)?;
        if let Some(scaling) = &self.scaling {
            scaling.check(self.theta)?;
        }
        Ok(dims)
    }
}

pub(super) fn above_0(argument: &'static str, number: f64) -> Result<()> {
    let fits = number.is_finite() && number > 0.0;
    if fits { Ok(()) } else { Err(Error::value(argument, "a finite number above 0", number)) }
}
