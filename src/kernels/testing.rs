//! What the tests of the kernels share: numbers that look random, conversions, and every level by name.

use super::Real;
use ndarray::Array2;

/// Calls a generic check with the kernels of every level this CPU has, for both types.
macro_rules! at_every_level {
    ($check:ident) => {
        for &level in $crate::kernels::Level::available() {
            println!("{level}");
            $check(<f32 as $crate::kernels::Real>::kernels(level));
            $check(<f64 as $crate::kernels::Real>::kernels(level));
        }
    };
}
pub(super) use at_every_level;

/// Numbers in (-1, 1) that depend on the seed only.
pub(super) struct Numbers(u64);

impl Numbers {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(super) fn word(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(super) fn next<T: Real>(&mut self) -> T {
        real((self.word() >> 11) as f64 / (1_u64 << 52) as f64 - 1.0)
    }

    pub(super) fn vec<T: Real>(&mut self, n: usize) -> Vec<T> {
        (0..n).map(|_| self.next()).collect()
    }

    pub(super) fn matrix<T: Real>(&mut self, rows: usize, columns: usize) -> Array2<T> {
        Array2::from_shape_fn((rows, columns), |_| self.next())
    }
}

pub(super) fn real<T: Real>(x: f64) -> T {
    T::from(x).unwrap()
}

pub(super) fn wide<T: Real>(x: T) -> f64 {
    x.to_f64().unwrap()
}

pub(super) fn nans<T: Real>(n: usize) -> Vec<T> {
    vec![T::nan(); n]
}
