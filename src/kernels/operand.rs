//! The numbers of a packed matrix in the type that they are stored in. Kernels compute in `f32` and `f64`; a matrix in 16
//! bits is widened when a vector of it is loaded, so that it takes half of the bandwidth.

use super::table::Kernels;
use super::tile::Tile;

#[cfg(feature = "half")]
use half::{bf16, f16};

/// A packed matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Operand<'a, T> {
    /// In the type that is computed in.
    Own(&'a [T]),
    /// To be computed with in `f32`.
    #[cfg(feature = "half")]
    F16(&'a [f16]),
    /// To be computed with in `f32`.
    #[cfg(feature = "half")]
    Bf16(&'a [bf16]),
}

impl<'a, T> Operand<'a, T> {
    /// The numbers, if they are of the type that is computed in.
    #[inline]
    pub(super) fn own(self) -> Option<&'a [T]> {
        match self {
            Self::Own(numbers) => Some(numbers),
            #[cfg(feature = "half")]
            Self::F16(_) | Self::Bf16(_) => None,
        }
    }

    /// The first `len` numbers without the first `skip <= len` of them.
    #[inline(always)]
    pub(super) fn range(self, skip: usize, len: usize) -> Self {
        match self {
            Self::Own(numbers) => Self::Own(&numbers[skip..len]),
            #[cfg(feature = "half")]
            Self::F16(numbers) => Self::F16(&numbers[skip..len]),
            #[cfg(feature = "half")]
            Self::Bf16(numbers) => Self::Bf16(&numbers[skip..len]),
        }
    }
}

impl<T> Operand<'_, T> {
    /// Where its part `part` of `parts` begins.
    pub(super) fn part(self, part: usize, parts: usize) -> *const u8 {
        let (from, bytes) = match self {
            Self::Own(numbers) => (numbers.as_ptr().cast::<u8>(), size_of_val(numbers)),
            #[cfg(feature = "half")]
            Self::F16(numbers) => (numbers.as_ptr().cast::<u8>(), size_of_val(numbers)),
            #[cfg(feature = "half")]
            Self::Bf16(numbers) => (numbers.as_ptr().cast::<u8>(), size_of_val(numbers)),
        };
        from.wrapping_add(bytes / parts.max(1) * part)
    }
}

impl<T: Copy> Kernels<T> {
    /// A product whose `b` begins where the numbers do.
    ///
    /// # Safety
    /// As [`super::tile::tile`].
    #[inline(always)]
    pub(super) unsafe fn tile_of(&self, shape: &mut Tile<T>, b: Operand<'_, T>) {
        match b {
            // SAFETY: the contract is handed on.
            Operand::Own(b) => unsafe {
                shape.b = b.as_ptr();
                (self.tile)(shape);
            },
            #[cfg(feature = "half")]
            Operand::F16(b) => {
                if let Some(halves) = &self.halves {
                    // SAFETY: as above.
                    unsafe { (halves.tile_f16)(&shape.with_b(b.as_ptr())) }
                }
            }
            #[cfg(feature = "half")]
            Operand::Bf16(b) => {
                if let Some(halves) = &self.halves {
                    // SAFETY: as above.
                    unsafe { (halves.tile_bf16)(&shape.with_b(b.as_ptr())) }
                }
            }
        }
    }

    /// Copies the numbers in the type that is computed in.
    pub(crate) fn copied(&self, from: Operand<'_, T>, to: &mut [T]) {
        match from {
            Operand::Own(from) => to[..from.len()].copy_from_slice(from),
            #[cfg(feature = "half")]
            from => {
                self.widened(from, to);
            }
        }
    }

    /// The numbers in the type that is computed in, in `room` if they have to be widened.
    pub(crate) fn widened<'s>(&self, from: Operand<'s, T>, room: &'s mut [T]) -> &'s [T] {
        #[cfg(not(feature = "half"))]
        let _ = room;
        match from {
            Operand::Own(from) => from,
            #[cfg(feature = "half")]
            Operand::F16(from) => {
                let to = &mut room[..from.len()];
                if let Some(halves) = &self.halves {
                    // SAFETY: both slices have that many numbers.
                    unsafe { (halves.widen_f16)(from.as_ptr(), to.as_mut_ptr(), to.len()) }
                }
                to
            }
            #[cfg(feature = "half")]
            Operand::Bf16(from) => {
                let to = &mut room[..from.len()];
                if let Some(halves) = &self.halves {
                    // SAFETY: both slices have that many numbers.
                    unsafe { (halves.widen_bf16)(from.as_ptr(), to.as_mut_ptr(), to.len()) }
                }
                to
            }
        }
    }
}
