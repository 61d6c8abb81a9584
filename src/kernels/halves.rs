//! Operand of 16 bits, widened to `f32` as they are loaded: every one of them is a number of `f32`, so nothing is rounded.
//!
//! `bf16` is the upper half of an `f32`. `f16` has 5 bits of exponent and 10 of fraction:
//!
//! ```text
//! s eeeee ffffffffff -> s 000eeeee ffffffffff 0000000000000 · 2^112           e < 31, subnormal numbers included
//!                       s 11111111 ffffffffff 0000000000000                    e = 31: infinities and NaN
//! ```

use super::portable::Portable;
use super::simd::{Simd, Widen};
use super::tile::Tile;
use half::{bf16, f16};

#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;

/// The kernels that read numbers of 16 bits.
#[derive(Debug)]
pub(super) struct Halves<T> {
    pub(super) tile_f16: unsafe fn(&Tile<T, f16>),
    pub(super) tile_bf16: unsafe fn(&Tile<T, bf16>),
    pub(super) widen_f16: unsafe fn(*const f16, *mut T, usize),
    pub(super) widen_bf16: unsafe fn(*const bf16, *mut T, usize),
}

/// Widens `n` numbers.
///
/// # Safety
/// `from` must be valid for reading and `to` for writing `n` numbers.
#[inline(always)]
pub(super) unsafe fn widen<S: Widen<B> + Simd<Elem = f32>, B: Copy + Into<f32>>(
    s: S,
    from: *const B,
    to: *mut f32,
    n: usize,
) {
    let mut i = 0;
    // SAFETY: i + LANES <= n, or i < n (contract).
    unsafe {
        while n - i >= S::LANES {
            s.store(to.add(i), s.widen(from.add(i)));
            i += S::LANES;
        }
        for i in i..n {
            *to.add(i) = (*from.add(i)).into();
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen<bf16> for Avx512<f32> {
    #[inline(always)]
    unsafe fn widen(self, p: *const bf16) -> __m512 {
        // SAFETY: `self` exists, so the CPU has the instructions; the caller vouches for 16 numbers.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen<f16> for Avx512<f32> {
    #[inline(always)]
    unsafe fn widen(self, p: *const f16) -> __m512 {
        // SAFETY: `self` exists, so the CPU has the instructions; the caller vouches for 16 numbers.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen<bf16> for Avx2<f32> {
    #[inline(always)]
    unsafe fn widen(self, p: *const bf16) -> __m256 {
        // SAFETY: `self` exists, so the CPU has the instructions; the caller vouches for 8 numbers.
        unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast())))) }
    }
}

#[cfg(target_arch = "x86_64")]
impl Widen<f16> for Avx2<f32> {
    #[inline(always)]
    unsafe fn widen(self, p: *const f16) -> __m256 {
        // SAFETY: `self` exists, so the CPU has the instructions, F16C among them; the caller vouches for 8 numbers.
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(p.cast())) }
    }
}

impl<const N: usize> Widen<bf16> for Portable<f32, N> {
    #[inline(always)]
    unsafe fn widen(self, p: *const bf16) -> [f32; N] {
        // SAFETY: the caller vouches for N numbers, which are words of 16 bits; the read does not ask for alignment.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(|bits| f32::from_bits(u32::from(bits) << 16))
    }
}

impl<const N: usize> Widen<f16> for Portable<f32, N> {
    #[inline(always)]
    unsafe fn widen(self, p: *const f16) -> [f32; N] {
        // SAFETY: the caller vouches for N numbers, which are words of 16 bits; the read does not ask for alignment.
        let bits = unsafe { p.cast::<[u16; N]>().read_unaligned() };
        bits.map(widen_f16)
    }
}

/// See the top of the file.
#[inline(always)]
fn widen_f16(bits: u16) -> f32 {
    /// What the exponents of the two formats differ by: 2^112.
    const REBIAS: f32 = f32::from_bits((127 + 112) << 23);
    /// Exponent 31, in the place that it has after the shift.
    const ENDLESS: u32 = 31 << 23;
    let size = u32::from(bits & 0x7fff) << 13;
    let finite = (f32::from_bits(size) * REBIAS).to_bits();
    let size = if size < ENDLESS { finite } else { size | 0x7f80_0000 };
    f32::from_bits(size | u32::from(bits & 0x8000) << 16)
}

#[cfg(test)]
mod tests {
    use crate::kernels::{Kernels, Level, Operand, Real};
    use half::{bf16, f16};

    fn check(kernels: &Kernels<f32>, level: Level, first: usize, n: usize) {
        let bits = || (first..first + n).map(|bits| bits as u16);
        let (narrow, mut room) = (bits().map(bf16::from_bits).collect::<Vec<_>>(), vec![f32::NAN; n]);
        for (&x, &y) in narrow.iter().zip(kernels.widened(Operand::Bf16(&narrow), &mut room)) {
            assert!(x.to_f32() == y || x.is_nan() && y.is_nan(), "{level}: {x:?} became {y}");
            assert_eq!(x.is_sign_negative(), y.is_sign_negative(), "{level}: {x:?} became {y}");
        }
        let (narrow, mut room) = (bits().map(f16::from_bits).collect::<Vec<_>>(), vec![f32::NAN; n]);
        for (&x, &y) in narrow.iter().zip(kernels.widened(Operand::F16(&narrow), &mut room)) {
            assert!(x.to_f32() == y || x.is_nan() && y.is_nan(), "{level}: {x:?} became {y}");
            assert_eq!(x.is_sign_negative(), y.is_sign_negative(), "{level}: {x:?} became {y}");
        }
    }

    #[test]
    fn every_number_of_16_bits_is_widened_exactly() {
        for &level in Level::available() {
            check(f32::kernels(level), level, 0, 1 << 16);
            for n in 0..40 {
                check(f32::kernels(level), level, 15_000, n);
            }
        }
    }
}
