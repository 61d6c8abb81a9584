//! The position table of the first Transformer, which is added to the inputs of its first layer.
//!
//! ```text
//! table[pos, 2 i]     = sin(pos / 10000^(2 i / d_model))
//! table[pos, 2 i + 1] = cos(pos / 10000^(2 i / d_model))
//! ```
//!
//! (Vaswani et al. 2017, section 3.5, <https://arxiv.org/abs/1706.03762>.)

use ndarray::Array2;
use std::ops::Range;

use crate::element::{Element, zeros};
use crate::error::{Error, Result};

/// `[positions.len(), d_model]`: sines in the even columns, cosines in the odd ones, computed in `f64`.
///
/// ```
/// use multihead::{ndarray::Array2, position::sinusoidal};
/// let table: Array2<f64> = sinusoidal(0..50, 16)?;
/// assert_eq!(table[[0, 0]], 0.0);
/// assert_eq!(table[[7, 1]], 7f64.cos());
/// let later: Array2<f64> = sinusoidal(40..50, 16)?;
/// assert_eq!(later.row(2), table.row(42));
/// # Ok::<(), multihead::Error>(())
/// ```
///
/// # Errors
/// [`Error::TooLarge`] if the table does not fit into memory, [`Error::Value`] for a range that ends before it starts.
#[doc(alias = "positional_encoding")]
pub fn sinusoidal<T: Element>(positions: Range<usize>, d_model: usize) -> Result<Array2<T>> {
    let Some(len) = positions.end.checked_sub(positions.start) else {
        return Err(Error::value("positions", "a start that is not behind the end", format!("{positions:?}")));
    };
    let mut table = zeros("sinusoidal", "[len, d_model]", (len, d_model))?;
    let frequencies: Vec<f64> = (0..d_model).map(|c| 1e4f64.powf(-((c - c % 2) as f64) / d_model as f64)).collect();
    for (mut row, position) in table.outer_iter_mut().zip(positions) {
        for ((c, x), frequency) in row.iter_mut().enumerate().zip(&frequencies) {
            let angle = position as f64 * frequency;
            *x = T::from_f64(if c % 2 == 0 { angle.sin() } else { angle.cos() });
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_formula() {
        for d_model in [1, 2, 7, 64] {
            let table: Array2<f64> = sinusoidal(3..40, d_model).unwrap();
            let single: Array2<f32> = sinusoidal(3..40, d_model).unwrap();
            assert_eq!(table.dim(), (37, d_model));
            for ((row, c), &x) in table.indexed_iter() {
                let angle = (row + 3) as f64 / 10_000f64.powf((2 * (c / 2)) as f64 / d_model as f64);
                let want = if c.is_multiple_of(2) { angle.sin() } else { angle.cos() };
                assert!((x - want).abs() < 1e-13 && (f64::from(single[[row, c]]) - want).abs() < 1e-7, "{row} {c}");
            }
        }
    }

    #[test]
    fn any_range_has_an_answer() {
        assert_eq!(sinusoidal::<f32>(5..5, 8).unwrap().dim(), (0, 8));
        assert_eq!(sinusoidal::<f32>(0..5, 0).unwrap().dim(), (5, 0));
        let backwards = Range { start: 5, end: 3 };
        let text = "positions: expected a start that is not behind the end, got 5..3";
        assert_eq!(sinusoidal::<f32>(backwards, 8).unwrap_err().to_string(), text);
        assert!(matches!(sinusoidal::<f32>(0..usize::MAX, 8), Err(Error::TooLarge { .. })));
        let last = sinusoidal::<f64>(usize::MAX - 1..usize::MAX, 4).unwrap();
        assert!(last.iter().all(|x| x.abs() <= 1.0));
    }
}
