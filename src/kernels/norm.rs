//! Rows to their norms: LayerNorm and RMSNorm, see `crate::norm` for the formulas.
//!
//! Plain loops, which LLVM turns into the instructions of the level. Nothing is fused, so all levels give the same bits.

use super::real::Real;
use super::simd::Simd;

/// The rule of all rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowRule<'a, T> {
    /// `[width]`
    pub(crate) weight: &'a [T],
    /// `[width]`
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) eps: f64,
    /// Whether the mean is taken off.
    pub(crate) is_centred: bool,
}

/// What is normalised.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NormInput<'a, T> {
    /// What stands in the rows.
    Rows,
    /// That and these numbers, added up.
    RowsPlus(&'a [T]),
    /// These numbers; what stands in the rows does not count.
    Other(&'a [T]),
}

impl<T> NormInput<'_, T> {
    /// The same of `range` of the numbers.
    pub(crate) fn part(&self, range: std::ops::Range<usize>) -> NormInput<'_, T> {
        match self {
            Self::Rows => NormInput::Rows,
            Self::RowsPlus(numbers) => NormInput::RowsPlus(&numbers[range]),
            Self::Other(numbers) => NormInput::Other(&numbers[range]),
        }
    }
}

/// The mean and the reciprocal deviation of a row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moments<T> {
    pub(crate) mean: T,
    pub(crate) r: f64,
}

/// `rows: [.., width]` become the norms of the input, `[.., width]`. What is left behind whole rows is left alone.
#[inline(always)]
pub(super) fn normalise<S: Simd>(
    _: S,
    rule: &RowRule<'_, S::Elem>,
    input: NormInput<'_, S::Elem>,
    rows: &mut [S::Elem],
) {
    let width = rule.weight.len().max(1);
    for (index, row) in rows.chunks_exact_mut(width).enumerate() {
        let range = index * width..(index + 1) * width;
        match input {
            NormInput::Rows => {}
            NormInput::RowsPlus(numbers) => {
                for (x, &y) in row.iter_mut().zip(&numbers[range]) {
                    *x = *x + y;
                }
            }
            NormInput::Other(numbers) => row.copy_from_slice(&numbers[range]),
        }
        let Moments { mean, r } = moments(row, rule.eps, rule.is_centred);
        let r = S::Elem::nearest(r);
        for (x, &weight) in row.iter_mut().zip(rule.weight) {
            *x = weight * (r * (*x - mean));
        }
        if let Some(bias) = rule.bias {
            for (x, &bias) in row.iter_mut().zip(bias) {
                *x = *x + bias;
            }
        }
    }
}

/// `m` and `1 / sqrt(mean of squares + eps)`
#[inline(always)]
pub(crate) fn moments<T: Real>(row: &[T], eps: f64, is_centred: bool) -> Moments<T> {
    let width = row.len() as f64;
    if !is_centred {
        return Moments { mean: T::zero(), r: (sum_of_squares(row, 0.0) / width + eps).sqrt().recip() };
    }
    // In the type of the numbers, so that what is taken off is what the squares are taken of.
    let mean = T::nearest(sum(row) / width);
    Moments { mean, r: (sum_of_squares(row, mean.wide()) / width + eps).sqrt().recip() }
}

/// Sums that do not wait for each other.
const SUMS: usize = 16;

#[inline(always)]
fn sum<T: Real>(row: &[T]) -> f64 {
    let (chunks, rest) = row.as_chunks::<SUMS>();
    let mut sums = [0.0; SUMS];
    for chunk in chunks {
        for i in 0..SUMS {
            sums[i] += chunk[i].wide();
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x.wide();
    }
    sums.iter().sum()
}

/// The sum of `(x - m)²`.
#[inline(always)]
fn sum_of_squares<T: Real>(row: &[T], m: f64) -> f64 {
    let (chunks, rest) = row.as_chunks::<SUMS>();
    let mut sums = [0.0; SUMS];
    for chunk in chunks {
        for i in 0..SUMS {
            let x = chunk[i].wide() - m;
            sums[i] += x * x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        let x = x.wide() - m;
        *sum += x * x;
    }
    sums.iter().sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Level;
    use crate::kernels::testing::Numbers;

    /// The same numbers however they come in, and the same bits at every level; `crate::norm` tests which.
    #[test]
    fn inputs_and_levels_agree() {
        fn check<T: Real>() {
            for width in [1, 3, 16, 17, 64, 100] {
                let mut numbers = Numbers::new(width as u64);
                let (weight, bias) = (numbers.vec::<T>(width), numbers.vec::<T>(width));
                let (x, y) = (numbers.vec::<T>(5 * width + 1), numbers.vec::<T>(5 * width + 1));
                for is_centred in [false, true] {
                    let rule = RowRule { weight: &weight, bias: Some(&bias), eps: 1e-3, is_centred };
                    let run = |level, input, rows: &[T]| {
                        let mut rows = rows.to_vec();
                        T::kernels(level).normalise(&rule, input, &mut rows);
                        rows
                    };
                    let sum: Vec<T> = x.iter().zip(&y).map(|(&x, &y)| x + y).collect();
                    let want = run(Level::Portable, NormInput::Rows, &sum);
                    for &level in Level::available() {
                        let equal = |got: Vec<T>| assert_eq!(got[..5 * width], want[..5 * width], "{level} {width}");
                        equal(run(level, NormInput::Rows, &sum));
                        equal(run(level, NormInput::RowsPlus(&y), &x));
                        equal(run(level, NormInput::Other(&sum), &x));
                    }
                    // What is no whole row stays.
                    assert!(width == 1 || want[5 * width] == sum[5 * width]);
                }
            }
        }
        check::<f32>();
        check::<f64>();
    }
}
