//! What a loss would miss without a head: the gradient of a gate on its context.
//!
//! With `gate[h] = 1` a factor on the context of head h,
//!
//! ```text
//! d_gate[b, h]  = sum_(i, c) context[b, h, i, c] d_context[b, h, i, c]
//! importance[h] = mean_b |d_gate[b, h]|
//! ```
//!
//! (Michel, Levy and Neubig 2019, <https://arxiv.org/abs/1905.10650>, section 4.1.)

use ndarray::{Array1, Array2, ArrayRef4, Axis, Zip, s};

use crate::element::{Element, zeros};
use crate::error::{Result, check_shape};

/// `[batch, num_heads]`: the gradient of the loss with respect to a factor on each head's context, summed in `f64`.
///
/// - `context: [batch, num_heads, q_len, value_dim]`: [`Attended::context`](crate::Attended::context)
/// - `d_context`, of the same shape: the gradient of the loss with respect to it
///
/// ```
/// use multihead::{inspect::gate_gradient, ndarray::{array, Array4}};
/// let context = Array4::from_shape_fn((1, 2, 3, 4), |(_, head, _, _)| head as f32);
/// let gradient = gate_gradient(&context, &Array4::ones((1, 2, 3, 4)))?;
/// assert_eq!(gradient, array![[0.0, 12.0]]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// [`crate::Error::Shape`] if the shapes differ, [`crate::Error::TooLarge`] if the result does not fit into memory.
pub fn gate_gradient<T: Element>(context: &ArrayRef4<T>, d_context: &ArrayRef4<T>) -> Result<Array2<f64>> {
    let (batch, num_heads, q_len, value_dim) = context.dim();
    let expected = [batch, num_heads, q_len, value_dim].map(Some);
    check_shape("d_context", "[batch, num_heads, q_len, value_dim]", expected, d_context.shape())?;
    let mut gradient = zeros("d_gate", "[batch, num_heads]", (batch, num_heads))?;
    if context.is_empty() {
        return Ok(gradient);
    }
    for ((entry, head), sum) in gradient.indexed_iter_mut() {
        let at = s![entry, head, .., ..];
        let products = Zip::from(context.slice(at)).and(d_context.slice(at));
        *sum = products.fold(0.0, |sum, &c, &d| sum + c.into_f64() * d.into_f64());
    }
    Ok(gradient)
}

/// `[num_heads]`: how much the loss changes, to first order, if a head is taken out: the mean over the batch entries of
/// the size of [`gate_gradient`]. With one example in each entry this is the paper's; 0 for an empty batch.
///
/// ```
/// use multihead::{inspect::head_importance, ndarray::{array, Array4}};
/// let context = Array4::<f64>::ones((2, 1, 1, 1));
/// let d_context = array![[[[3.0]]], [[[-1.0]]]];
/// assert_eq!(head_importance(&context, &d_context)?, array![2.0]);
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// As [`gate_gradient`].
pub fn head_importance<T: Element>(context: &ArrayRef4<T>, d_context: &ArrayRef4<T>) -> Result<Array1<f64>> {
    let gradient = gate_gradient(context, d_context)?;
    let batch = gradient.nrows().max(1) as f64;
    Ok(gradient.mapv(f64::abs).sum_axis(Axis(0)) / batch)
}
