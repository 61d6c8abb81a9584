//! Vectors of 16 bytes as arrays of numbers, for any CPU: plain loops over lanes, which LLVM turns into the vector
//! instructions of the target's baseline (SSE2 on x86-64, NEON on aarch64).

use super::real::Real;
use super::simd::{Block, Simd, transpose};
use std::marker::PhantomData;

/// The portable token for arrays of `N` lanes; every CPU has it.
#[derive(Clone, Copy)]
pub(crate) struct Portable<T, const N: usize>(PhantomData<T>);

impl<T: Real, const N: usize> Portable<T, N> {
    pub(crate) const NEW: Self = Self(PhantomData);
}

/// One lane-wise operation.
macro_rules! lanes {
    ($($name:ident($($arg:ident),*) -> $out:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: [T; N]),*) -> [$out; N] {
            let mut result = [<$out as Lane>::START; N];
            for i in 0..N {
                $(let $arg = $arg[i];)*
                result[i] = $body;
            }
            result
        }
    )*};
}

/// What a result holds before it is filled.
trait Lane {
    const START: Self;
}

impl Lane for bool {
    const START: Self = false;
}

impl Lane for f32 {
    const START: Self = 0.0;
}

impl Lane for f64 {
    const START: Self = 0.0;
}

impl<T: Real + Lane, const N: usize> Simd for Portable<T, N> {
    type Elem = T;
    type V = [T; N];
    type Mask = [bool; N];
    const LANES: usize = N;

    lanes! {
        add(a, b) -> T = a + b;
        sub(a, b) -> T = a - b;
        mul(a, b) -> T = a * b;
        div(a, b) -> T = a / b;
        fma(a, b, c) -> T = a.multiply_add(b, c);
        max(a, b) -> T = if a > b { a } else { b };
        min(a, b) -> T = if a < b { a } else { b };
        lt(a, b) -> bool = a < b;
        abs(a) -> T = a.abs();
        exponent_to_power(v) -> T = v.exponent_to_power();
    }

    #[inline(always)]
    fn splat(self, x: T) -> [T; N] {
        [x; N]
    }

    #[inline(always)]
    fn mask_from_bits(self, bits: u64) -> [bool; N] {
        let mut mask = [false; N];
        for (i, lane) in mask.iter_mut().enumerate() {
            *lane = bits >> i & 1 == 1;
        }
        mask
    }

    #[inline(always)]
    fn mask_bits(self, mask: [bool; N]) -> u64 {
        let mut bits = 0;
        for (i, &lane) in mask.iter().enumerate() {
            bits |= u64::from(lane) << i;
        }
        bits
    }

    #[inline(always)]
    fn select(self, mask: [bool; N], a: [T; N], b: [T; N]) -> [T; N] {
        let mut result = b;
        for i in 0..N {
            result[i] = if mask[i] { a[i] } else { b[i] };
        }
        result
    }

    #[inline(always)]
    fn interleave(self, a: [T; N], b: [T; N]) -> ([T; N], [T; N]) {
        let (mut low, mut high) = (a, b);
        for i in 0..N / 2 {
            (low[2 * i], low[2 * i + 1]) = (a[i], b[i]);
            (high[2 * i], high[2 * i + 1]) = (a[N / 2 + i], b[N / 2 + i]);
        }
        (low, high)
    }

    #[inline(always)]
    fn reduce_sum(self, v: [T; N]) -> T {
        let mut sum = v[0];
        for &x in &v[1..] {
            sum = sum + x;
        }
        sum
    }

    #[inline(always)]
    fn reduce_max(self, v: [T; N]) -> T {
        let mut max = v[0];
        for &x in &v[1..] {
            max = if x > max { x } else { max };
        }
        max
    }

    #[inline(always)]
    unsafe fn load(self, p: *const T) -> [T; N] {
        // SAFETY: the caller vouches for N readable elements; the read does not ask for alignment.
        unsafe { p.cast::<[T; N]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut T, v: [T; N]) {
        // SAFETY: the caller vouches for N writable elements; the write does not ask for alignment.
        unsafe { p.cast::<[T; N]>().write_unaligned(v) }
    }

    #[inline(always)]
    unsafe fn load_partial(self, p: *const T, n: usize) -> [T; N] {
        let mut v = [T::START; N];
        for (i, lane) in v.iter_mut().enumerate().take(n) {
            // SAFETY: i < n, and the caller vouches for n readable elements.
            *lane = unsafe { *p.add(i) };
        }
        v
    }

    #[inline(always)]
    unsafe fn store_partial(self, p: *mut T, v: [T; N], n: usize) {
        for (i, &lane) in v.iter().enumerate().take(n) {
            // SAFETY: i < n, and the caller vouches for n writable elements.
            unsafe { *p.add(i) = lane };
        }
    }

    #[inline(always)]
    unsafe fn transpose_block(self, block: Block<T>) {
        // SAFETY: the contract is the same.
        unsafe { transpose::<Self, N, N>(self, block) }
    }
}
