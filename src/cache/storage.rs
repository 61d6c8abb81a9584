//! What a cache keeps its numbers in.

use ndarray::{ArrayView2, s};
use num_traits::Float;

use crate::element::Element;
use crate::kernels::{KEYS, Level, Operand, PANEL};

mod sealed {
    #[expect(private_bounds, reason = "how numbers lie in a page is nobody else's business")]
    pub trait Sealed: super::InPages {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
    #[cfg(feature = "half")]
    impl Sealed for half::f16 {}
    #[cfg(feature = "half")]
    impl Sealed for half::bf16 {}
}

/// A number type of a [`KvCache`](crate::KvCache). Sealed: `f32` and `f64` keep what they are given; with the feature
/// `half`, `half::f16` and `half::bf16` keep numbers of `f32` in half of the memory, rounded. Sums are in `f32` then, and
/// what rounds to an infinity is one.
///
/// | storage | computes in | bytes a number | relative rounding | largest number | 1000 tokens of 8 KV heads of 128 |
/// | --- | --- | --- | --- | --- | --- |
/// | `f64` | `f64` | 8 | none | 1.8e308 | 16.4 MB |
/// | `f32` | `f32` | 4 | none | 3.4e38 | 8.2 MB |
/// | `half::bf16` | `f32` | 2 | 2^-9 | 3.4e38 | 4.1 MB |
/// | `half::f16` | `f32` | 2 | 2^-11 | 65504 | 4.1 MB |
///
/// ```
/// use multihead::Storage;
/// assert_eq!(f32::narrow(0.1).widen(), 0.1);
/// ```
pub trait Storage: sealed::Sealed + Copy + Default + std::fmt::Debug + Send + Sync + 'static {
    /// What attention computes in.
    type Element: Element;

    /// The nearest number that the cache can keep.
    fn narrow(x: Self::Element) -> Self;

    /// The same number in the type that is computed in, exactly.
    fn widen(self) -> Self::Element;
}

/// How numbers get into a page and are read there.
pub(super) trait InPages: Sized {
    /// Writes keys `[n, head_dim]` to the slots from `first` on of panels `[4][head_dim][16]`; the other slots stay.
    fn write_keys(from: ArrayView2<'_, Self::Element>, first: usize, to: &mut [Self])
    where
        Self: Storage;

    /// Writes values `[n, value_dim]` to the rows from `first` on of panels `[width / 16][64][16]`. Bit j is set if slot j has been
    /// written with a value that is not finite.
    fn write_values(from: ArrayView2<'_, Self::Element>, first: usize, to: &mut [Self]) -> u64
    where
        Self: Storage;

    /// The numbers as an operand of a product.
    fn operand(numbers: &[Self]) -> Operand<'_, Self::Element>
    where
        Self: Storage;
}

/// Storage that keeps the numbers as they are.
macro_rules! as_it_is {
    ($($t:ty),*) => {$(
        impl Storage for $t {
            type Element = $t;

            fn narrow(x: $t) -> $t {
                x
            }

            fn widen(self) -> $t {
                self
            }
        }

        impl InPages for $t {
            fn write_keys(from: ArrayView2<'_, $t>, first: usize, to: &mut [$t]) {
                let kernels = <$t as crate::kernels::Real>::kernels(Level::best());
                write_keys(from, first, to, |panel, to| kernels.pack_panels(panel, to));
            }

            fn write_values(from: ArrayView2<'_, $t>, first: usize, to: &mut [$t]) -> u64 {
                write_values(from, first, to)
            }

            fn operand(numbers: &[$t]) -> Operand<'_, $t> {
                Operand::Own(numbers)
            }
        }
    )*};
}

as_it_is!(f32, f64);

/// Storage of 16 bits.
#[cfg(feature = "half")]
macro_rules! narrow {
    ($($t:ident in $operand:ident),*) => {$(
        impl Storage for half::$t {
            type Element = f32;

            fn narrow(x: f32) -> Self {
                Self::from_f32(x)
            }

            fn widen(self) -> f32 {
                self.to_f32()
            }
        }

        impl InPages for half::$t {
            fn write_keys(from: ArrayView2<'_, f32>, first: usize, to: &mut [Self]) {
                write_keys(from, first, to, |panel, to| {
                    for (t, row) in to.chunks_exact_mut(PANEL).enumerate() {
                        row.iter_mut().zip(panel.column(t)).for_each(|(to, &x)| *to = Self::from_f32(x));
                    }
                });
            }

            fn write_values(from: ArrayView2<'_, f32>, first: usize, to: &mut [Self]) -> u64 {
                write_values(from, first, to)
            }

            fn operand(numbers: &[Self]) -> Operand<'_, f32> {
                Operand::$operand(numbers)
            }
        }
    )*};
}

#[cfg(feature = "half")]
narrow!(f16 in F16, bf16 in Bf16);

/// Whole panels by `pack`, others lane by lane.
fn write_keys<S: Storage>(
    from: ArrayView2<'_, S::Element>,
    first: usize,
    to: &mut [S],
    pack: impl Fn(ArrayView2<'_, S::Element>, &mut [S]),
) {
    let (count, head_dim) = from.dim();
    debug_assert!(first + count <= KEYS && to.len() == KEYS * head_dim);
    let mut slot = first;
    while slot < first + count {
        let end = (first + count).min((slot / PANEL + 1) * PANEL);
        let keys = from.slice(s![slot - first..end - first, ..]);
        let panel = &mut to[slot / PANEL * PANEL * head_dim..][..PANEL * head_dim];
        if keys.nrows() == PANEL {
            pack(keys, panel);
        } else {
            for (lane, key) in keys.outer_iter().enumerate() {
                let lane = slot % PANEL + lane;
                let lanes = panel.chunks_exact_mut(PANEL).map(|row| &mut row[lane]);
                // A slice is walked in less time than an axis.
                match key.as_slice() {
                    Some(key) => lanes.zip(key).for_each(|(to, &x)| *to = S::narrow(x)),
                    None => lanes.zip(key).for_each(|(to, &x)| *to = S::narrow(x)),
                }
            }
        }
        slot = end;
    }
}

/// Values `[n, value_dim]` to the slots from `first` on of `to: [panels][64][16]`; returns the bits of those slots that then
/// hold something that is not finite.
fn write_values<S: Storage>(from: ArrayView2<'_, S::Element>, first: usize, to: &mut [S]) -> u64 {
    let mut not_finite = 0;
    for (slot, value) in (first..).zip(from.outer_iter()) {
        let panels = to.chunks_exact_mut(KEYS * PANEL).map(|panel| &mut panel[slot * PANEL..][..PANEL]);
        let mut finite = true;
        let mut write = |(to, x): (&mut S, S::Element)| {
            *to = S::narrow(x);
            finite &= Float::is_finite(to.widen());
        };
        match value.as_slice() {
            Some(value) => panels.zip(value.chunks(PANEL)).for_each(|(to, value)| {
                to.iter_mut().zip(value.iter().copied()).for_each(&mut write);
            }),
            None => panels.flatten().zip(value.iter().copied()).for_each(write),
        }
        not_finite |= u64::from(!finite) << slot;
    }
    not_finite
}
