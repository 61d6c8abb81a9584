//! Vectors of 64 bytes: AVX-512 F and DQ.

use super::exp::Powers;
use super::real::Real;
use super::simd::{Block, Simd, memory_ops, transpose, vector_ops};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Proof that the CPU has AVX-512 F and DQ.
#[derive(Clone, Copy)]
pub(crate) struct Avx512<T>(PhantomData<T>);

impl<T: Real> Avx512<T> {
    /// # Safety
    /// The CPU must have AVX-512 F and DQ.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(PhantomData)
    }
}

impl Simd for Avx512<f32> {
    type Elem = f32;
    type V = __m512;
    type Mask = __mmask16;
    const LANES: usize = 16;
    const MANY_REGISTERS: bool = true;
    const ASKS_SECOND_LEVEL: bool = true;
    const EXP2: &'static [f32] = f32::EXP2_FROM_ZERO;

    vector_ops! {
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        abs(a: __m512) -> __m512 = _mm512_abs_ps(a);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        lt(a: __m512, b: __m512) -> __mmask16 = _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b);
        select(mask: __mmask16, a: __m512, b: __m512) -> __m512 = _mm512_mask_blend_ps(mask, b, a);
        split_exponent(powers: &Powers<__m512>, x: __m512) -> (__m512, __m512) = {
            let exponent = _mm512_mul_ps(x, powers.rate);
            (exponent, _mm512_reduce_ps::<ROUND_DOWN>(exponent))
        };
        times_power(p: __m512, exponent: __m512) -> __m512 = {
            let lowest = _mm512_set1_ps(f32::MIN_EXPONENT - 0.5);
            _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(exponent, lowest), p, exponent)
        };
        exponent_to_power(v: __m512) -> __m512 = _mm512_castsi512_ps(_mm512_slli_epi32::<23>(_mm512_castps_si512(v)));
        interleave(a: __m512, b: __m512) -> (__m512, __m512) = {
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            (_mm512_permutex2var_ps(a, low, b), _mm512_permutex2var_ps(a, high, b))
        };
        reduce_sum(v: __m512) -> f32 = _mm512_reduce_add_ps(v);
        reduce_max(v: __m512) -> f32 = _mm512_reduce_max_ps(v);
    }

    memory_ops! {
        load(p: *const f32) -> __m512 = _mm512_loadu_ps(p);
        store(p: *mut f32, v: __m512) -> () = _mm512_storeu_ps(p, v);
        load_partial(p: *const f32, n: usize) -> __m512 = _mm512_maskz_loadu_ps(first_lanes(n) as __mmask16, p);
        store_partial(p: *mut f32, v: __m512, n: usize) -> () = _mm512_mask_storeu_ps(p, first_lanes(n) as __mmask16, v);
    }

    #[inline(always)]
    unsafe fn transpose_block(self, block: Block<f32>) {
        // SAFETY: the contract is the same.
        unsafe { transpose::<Self, 16, 16>(self, block) }
    }

    #[inline(always)]
    fn mask_from_bits(self, bits: u64) -> __mmask16 {
        bits as __mmask16
    }

    #[inline(always)]
    fn mask_bits(self, mask: __mmask16) -> u64 {
        u64::from(mask)
    }
}

impl Simd for Avx512<f64> {
    type Elem = f64;
    type V = __m512d;
    type Mask = __mmask8;
    const LANES: usize = 8;
    const MANY_REGISTERS: bool = true;
    const ASKS_SECOND_LEVEL: bool = true;
    const EXP2: &'static [f64] = f64::EXP2_FROM_ZERO;

    vector_ops! {
        splat(x: f64) -> __m512d = _mm512_set1_pd(x);
        add(a: __m512d, b: __m512d) -> __m512d = _mm512_add_pd(a, b);
        sub(a: __m512d, b: __m512d) -> __m512d = _mm512_sub_pd(a, b);
        mul(a: __m512d, b: __m512d) -> __m512d = _mm512_mul_pd(a, b);
        div(a: __m512d, b: __m512d) -> __m512d = _mm512_div_pd(a, b);
        fma(a: __m512d, b: __m512d, c: __m512d) -> __m512d = _mm512_fmadd_pd(a, b, c);
        abs(a: __m512d) -> __m512d = _mm512_abs_pd(a);
        max(a: __m512d, b: __m512d) -> __m512d = _mm512_max_pd(a, b);
        min(a: __m512d, b: __m512d) -> __m512d = _mm512_min_pd(a, b);
        lt(a: __m512d, b: __m512d) -> __mmask8 = _mm512_cmp_pd_mask::<_CMP_LT_OQ>(a, b);
        select(mask: __mmask8, a: __m512d, b: __m512d) -> __m512d = _mm512_mask_blend_pd(mask, b, a);
        split_exponent(powers: &Powers<__m512d>, x: __m512d) -> (__m512d, __m512d) = {
            let exponent = _mm512_mul_pd(x, powers.rate);
            (exponent, _mm512_reduce_pd::<ROUND_DOWN>(exponent))
        };
        times_power(p: __m512d, exponent: __m512d) -> __m512d = {
            let lowest = _mm512_set1_pd(f64::MIN_EXPONENT - 0.5);
            _mm512_maskz_scalef_pd(_mm512_cmp_pd_mask::<_CMP_NLT_UQ>(exponent, lowest), p, exponent)
        };
        exponent_to_power(v: __m512d) -> __m512d = _mm512_castsi512_pd(_mm512_slli_epi64::<52>(_mm512_castpd_si512(v)));
        interleave(a: __m512d, b: __m512d) -> (__m512d, __m512d) = {
            let low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11);
            let high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
            (_mm512_permutex2var_pd(a, low, b), _mm512_permutex2var_pd(a, high, b))
        };
        reduce_sum(v: __m512d) -> f64 = _mm512_reduce_add_pd(v);
        reduce_max(v: __m512d) -> f64 = _mm512_reduce_max_pd(v);
    }

    memory_ops! {
        load(p: *const f64) -> __m512d = _mm512_loadu_pd(p);
        store(p: *mut f64, v: __m512d) -> () = _mm512_storeu_pd(p, v);
        load_partial(p: *const f64, n: usize) -> __m512d = _mm512_maskz_loadu_pd(first_lanes(n) as __mmask8, p);
        store_partial(p: *mut f64, v: __m512d, n: usize) -> () = _mm512_mask_storeu_pd(p, first_lanes(n) as __mmask8, v);
    }

    #[inline(always)]
    unsafe fn transpose_block(self, block: Block<f64>) {
        // SAFETY: the contract is the same.
        unsafe { transpose::<Self, 8, 8>(self, block) }
    }

    #[inline(always)]
    fn mask_from_bits(self, bits: u64) -> __mmask8 {
        bits as __mmask8
    }

    #[inline(always)]
    fn mask_bits(self, mask: __mmask8) -> u64 {
        u64::from(mask)
    }
}

/// The operand of `vreduce` for what is left of a number above the integer below it.
const ROUND_DOWN: i32 = _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC;

/// `n <= 16` ones in the low bits.
#[inline(always)]
fn first_lanes(n: usize) -> u32 {
    (1 << n) - 1
}
