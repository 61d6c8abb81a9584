//! Vectors of 32 bytes: AVX2, FMA and F16C.

use super::real::Real;
use super::simd::{Block, Simd, memory_ops, transpose, vector_ops};
use std::arch::x86_64::*;
use std::marker::PhantomData;

/// Proof that the CPU has AVX2, FMA and F16C.
#[derive(Clone, Copy)]
pub(crate) struct Avx2<T>(PhantomData<T>);

impl<T: Real> Avx2<T> {
    /// # Safety
    /// The CPU must have AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn assume() -> Self {
        Self(PhantomData)
    }
}

impl Simd for Avx2<f32> {
    type Elem = f32;
    type V = __m256;
    /// All bits of a lane are set, or none.
    type Mask = __m256;
    const LANES: usize = 8;

    vector_ops! {
        splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        abs(a: __m256) -> __m256 = _mm256_andnot_ps(_mm256_set1_ps(-0.0), a);
        max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        lt(a: __m256, b: __m256) -> __m256 = _mm256_cmp_ps::<_CMP_LT_OQ>(a, b);
        mask_from_bits(bits: u64) -> __m256 = {
            let lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(bits as i32), lane);
            _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, lane))
        };
        mask_bits(mask: __m256) -> u64 = u64::from(_mm256_movemask_ps(mask) as u32);
        select(mask: __m256, a: __m256, b: __m256) -> __m256 = _mm256_blendv_ps(b, a, mask);
        exponent_to_power(v: __m256) -> __m256 = _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_castps_si256(v)));
        interleave(a: __m256, b: __m256) -> (__m256, __m256) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        reduce_sum(v: __m256) -> f32 = {
            let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
        };
        reduce_max(v: __m256) -> f32 = {
            let v = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let v = _mm_max_ps(v, _mm_movehl_ps(v, v));
            _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)))
        };
    }

    memory_ops! {
        load(p: *const f32) -> __m256 = _mm256_loadu_ps(p);
        store(p: *mut f32, v: __m256) -> () = _mm256_storeu_ps(p, v);
        load_parts(place: impl Fn(usize) -> *const f32) -> __m256 = _mm256_loadu2_m128(place(1), place(0));
        load_partial(p: *const f32, n: usize) -> __m256 = _mm256_maskload_ps(p, first_lanes_f32(n));
        store_partial(p: *mut f32, v: __m256, n: usize) -> () = _mm256_maskstore_ps(p, first_lanes_f32(n), v);
    }

    #[inline(always)]
    unsafe fn transpose_block(self, block: Block<f32>) {
        // SAFETY: the contract is the same.
        unsafe { transpose::<Self, 8, 4>(self, block) }
    }
}

impl Simd for Avx2<f64> {
    type Elem = f64;
    type V = __m256d;
    /// All bits of a lane are set, or none.
    type Mask = __m256d;
    const LANES: usize = 4;

    vector_ops! {
        splat(x: f64) -> __m256d = _mm256_set1_pd(x);
        add(a: __m256d, b: __m256d) -> __m256d = _mm256_add_pd(a, b);
        sub(a: __m256d, b: __m256d) -> __m256d = _mm256_sub_pd(a, b);
        mul(a: __m256d, b: __m256d) -> __m256d = _mm256_mul_pd(a, b);
        div(a: __m256d, b: __m256d) -> __m256d = _mm256_div_pd(a, b);
        fma(a: __m256d, b: __m256d, c: __m256d) -> __m256d = _mm256_fmadd_pd(a, b, c);
        abs(a: __m256d) -> __m256d = _mm256_andnot_pd(_mm256_set1_pd(-0.0), a);
        max(a: __m256d, b: __m256d) -> __m256d = _mm256_max_pd(a, b);
        min(a: __m256d, b: __m256d) -> __m256d = _mm256_min_pd(a, b);
        lt(a: __m256d, b: __m256d) -> __m256d = _mm256_cmp_pd::<_CMP_LT_OQ>(a, b);
        mask_from_bits(bits: u64) -> __m256d = {
            let lane = _mm256_setr_epi64x(1, 2, 4, 8);
            let set = _mm256_and_si256(_mm256_set1_epi64x(bits as i64), lane);
            _mm256_castsi256_pd(_mm256_cmpeq_epi64(set, lane))
        };
        mask_bits(mask: __m256d) -> u64 = u64::from(_mm256_movemask_pd(mask) as u32);
        select(mask: __m256d, a: __m256d, b: __m256d) -> __m256d = _mm256_blendv_pd(b, a, mask);
        exponent_to_power(v: __m256d) -> __m256d = _mm256_castsi256_pd(_mm256_slli_epi64::<52>(_mm256_castpd_si256(v)));
        interleave(a: __m256d, b: __m256d) -> (__m256d, __m256d) = (_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b));
        reduce_sum(v: __m256d) -> f64 = {
            let v = _mm_add_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd::<1>(v));
            _mm_cvtsd_f64(_mm_add_sd(v, _mm_unpackhi_pd(v, v)))
        };
        reduce_max(v: __m256d) -> f64 = {
            let v = _mm_max_pd(_mm256_castpd256_pd128(v), _mm256_extractf128_pd::<1>(v));
            _mm_cvtsd_f64(_mm_max_sd(v, _mm_unpackhi_pd(v, v)))
        };
    }

    memory_ops! {
        load(p: *const f64) -> __m256d = _mm256_loadu_pd(p);
        store(p: *mut f64, v: __m256d) -> () = _mm256_storeu_pd(p, v);
        load_parts(place: impl Fn(usize) -> *const f64) -> __m256d = _mm256_loadu2_m128d(place(1), place(0));
        load_partial(p: *const f64, n: usize) -> __m256d = _mm256_maskload_pd(p, first_lanes_f64(n));
        store_partial(p: *mut f64, v: __m256d, n: usize) -> () = _mm256_maskstore_pd(p, first_lanes_f64(n), v);
    }

    #[inline(always)]
    unsafe fn transpose_block(self, block: Block<f64>) {
        // SAFETY: the contract is the same.
        unsafe { transpose::<Self, 4, 2>(self, block) }
    }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn first_lanes_f32(n: usize) -> __m256i {
    // SAFETY: AVX2 by this function's contract.
    unsafe { _mm256_cmpgt_epi32(_mm256_set1_epi32(n as i32), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)) }
}

/// # Safety
/// The CPU must have AVX2.
#[inline(always)]
unsafe fn first_lanes_f64(n: usize) -> __m256i {
    // SAFETY: AVX2 by this function's contract.
    unsafe { _mm256_cmpgt_epi64(_mm256_set1_epi64x(n as i64), _mm256_setr_epi64x(0, 1, 2, 3)) }
}
