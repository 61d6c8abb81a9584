//! The vector type that kernels are generic over: a *token* whose existence proves that the CPU has the instructions.
//!
//! A kernel takes `s: S` with `S: Simd` and calls `s.add(a, b)`. The token can only be made by unsafe code that checked
//! the CPU, so the arithmetic needs no further proof and is safe; only loads and stores, which take pointers, are not.
//! Everything is `#[inline(always)]` and carries no `#[target_feature]`: the attribute sits on the entry points in
//! `table.rs`, into which all of it is inlined.

use super::exp::Powers;
use super::real::Real;
use num_traits::Zero;

/// Bytes of a cache line.
pub(super) const LINE: usize = 64;

/// Where a line of memory is asked for: to the first-level cache what is read next, to the second what comes after work that
/// needs the first. (The hints of x86, which names them by these numbers.)
pub(super) const NEXT: i32 = 3;
pub(super) const LATER: i32 = 2;

/// Asks for a line of memory. Any address will do: nothing is read.
#[inline(always)]
pub(super) fn prefetch<const WHEN: i32>(p: *const u8) {
    // SAFETY: every x86-64 CPU has the instruction, and it is allowed any address.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<WHEN>(p.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Asks for the lines of so many bytes that are needed later.
#[inline(always)]
pub(super) fn prefetch_bytes(from: *const u8, bytes: usize) {
    for offset in (0..bytes).step_by(LINE) {
        prefetch::<LATER>(from.wrapping_add(offset));
    }
}

/// Asks memory for numbers that are needed soon, where the CPU cannot guess that.
pub(crate) fn fetch<T>(numbers: &[T]) {
    prefetch_bytes(numbers.as_ptr().cast(), size_of_val(numbers));
}

/// Operations on vectors of [`Simd::LANES`] numbers.
///
/// `max` and `min` return `b` if either operand is NaN, as on x86, so `max(x, best)` skips NaN and `max(floor, x)`
/// keeps it. Comparisons with NaN are false.
pub(crate) trait Simd: Copy {
    type Elem: Real;
    type V: Copy;
    /// One truth value per lane.
    type Mask: Copy;

    /// A power of two that divides [`super::PANEL`].
    const LANES: usize;

    /// Whether there are 32 registers and not 16.
    const MANY_REGISTERS: bool = false;

    /// Whether [`Simd::ask_ahead`] asks for the second-level cache and not the first. AVX-512 comes with 1 MiB of it and more.
    /// (One token of 32 heads on 8 against 32768 keys: asked for the second level 13 instead of 12.5 ms on a Zen 3, 9.2 instead
    /// of 10.8 ms on an Emerald Rapids; in `bf16` 7.5 instead of 6.5 and 5.6 instead of 6.2 ms.)
    const ASKS_SECOND_LEVEL: bool = false;

    fn splat(self, x: Self::Elem) -> Self::V;
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a b + c`; rounded once at every level but `Portable` on x86.
    fn fma(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    fn abs(self, a: Self::V) -> Self::V;
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    fn min(self, a: Self::V, b: Self::V) -> Self::V;

    /// `a < b`.
    fn lt(self, a: Self::V, b: Self::V) -> Self::Mask;
    /// The lanes whose bit is set; bits from `LANES` on are ignored.
    fn mask_from_bits(self, bits: u64) -> Self::Mask;
    /// The inverse of [`Simd::mask_from_bits`].
    fn mask_bits(self, mask: Self::Mask) -> u64;
    /// `a` where the mask is true, `b` elsewhere. The lane that is not taken has no influence, NaN included.
    fn select(self, mask: Self::Mask, a: Self::V, b: Self::V) -> Self::V;

    /// [`Real::exponent_to_power`] of each lane.
    fn exponent_to_power(self, v: Self::V) -> Self::V;

    /// Coefficients of the polynomial between [`Simd::split_exponent`] and [`Simd::times_power`], the constant first.
    const EXP2: &'static [Self::Elem] = Self::Elem::EXP2;

    /// The exponent `rate x`, as [`Simd::times_power`] takes it, and its fraction: see `exp.rs`.
    #[inline(always)]
    fn split_exponent(self, powers: &Powers<Self::V>, x: Self::V) -> (Self::V, Self::V) {
        let Powers { rate, lowest, highest, to_exponent, .. } = *powers;
        // This order of operands keeps NaN.
        let x = self.max(lowest, self.min(highest, x));
        let exponent = self.fma(x, rate, to_exponent);
        (exponent, self.fma(x, rate, self.sub(to_exponent, exponent)))
    }

    /// The polynomial of the fraction times the power of two of the rest of an exponent.
    #[inline(always)]
    fn times_power(self, p: Self::V, exponent: Self::V) -> Self::V {
        self.mul(p, self.exponent_to_power(exponent))
    }

    /// The lanes of `a` and `b` alternating: the first `LANES` of them and the rest. Where lanes cannot change between the
    /// parts of a vector for little, each part by itself; see [`transpose`].
    fn interleave(self, a: Self::V, b: Self::V) -> (Self::V, Self::V);

    fn reduce_sum(self, v: Self::V) -> Self::Elem;
    /// The largest lane; no lane may be NaN.
    fn reduce_max(self, v: Self::V) -> Self::Elem;

    /// # Safety
    /// `p` must be valid for reading `LANES` elements.
    unsafe fn load(self, p: *const Self::Elem) -> Self::V;

    /// # Safety
    /// `p` must be valid for writing `LANES` elements.
    unsafe fn store(self, p: *mut Self::Elem, v: Self::V);

    /// The first `n` lanes from memory, zero in the others.
    ///
    /// # Safety
    /// `n <= LANES`, and `p` must be valid for reading `n` elements.
    unsafe fn load_partial(self, p: *const Self::Elem, n: usize) -> Self::V;

    /// Each part of a vector from its own place.
    ///
    /// # Safety
    /// `place(part)` must be valid for reading as many elements as [`Simd::interleave`] takes for a part.
    #[inline(always)]
    unsafe fn load_parts(self, place: impl Fn(usize) -> *const Self::Elem) -> Self::V {
        // SAFETY: the contract is the same for a vector that is one part.
        unsafe { self.load(place(0)) }
    }

    /// The first `n` lanes to memory.
    ///
    /// # Safety
    /// `n <= LANES`, and `p` must be valid for writing `n` elements.
    unsafe fn store_partial(self, p: *mut Self::Elem, v: Self::V, n: usize);

    /// Asks for a line that a product reads after what it reads now: up to 64 KiB later.
    #[inline(always)]
    fn ask_ahead(self, line: *const u8) {
        if Self::ASKS_SECOND_LEVEL { prefetch::<LATER>(line) } else { prefetch::<NEXT>(line) }
    }

    /// Transposes a block of `LANES x LANES`: [`transpose`] with the constants filled in.
    ///
    /// # Safety
    /// As [`transpose`].
    unsafe fn transpose_block(self, block: Block<Self::Elem>);

    #[inline(always)]
    fn zero(self) -> Self::V {
        self.splat(Self::Elem::zero())
    }
}

/// Vectors of numbers that are stored in another type, or in the same.
pub(crate) trait Widen<B>: Simd {
    /// `LANES` numbers, as they are.
    ///
    /// # Safety
    /// `p` must be valid for reading `LANES` numbers.
    unsafe fn widen(self, p: *const B) -> Self::V;
}

impl<S: Simd> Widen<S::Elem> for S {
    #[inline(always)]
    unsafe fn widen(self, p: *const S::Elem) -> S::V {
        // SAFETY: the contract is the same.
        unsafe { self.load(p) }
    }
}

/// What [`transpose`] reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct Block<T> {
    pub(crate) from: *const T,
    /// Distance between the rows of the source.
    pub(crate) from_row: isize,
    /// Rows that exist; the others count as zero.
    pub(crate) rows: usize,
    pub(crate) to: *mut T,
    /// Distance between the rows of the target.
    pub(crate) to_row: usize,
}

/// `to[j][i] = from[i][j]` for `i, j < N = LANES`, in log2(P) rounds, with `P` lanes to a part of [`Simd::interleave`].
///
/// A round interleaves the two halves of a block of `P x P`, which rotates the bits of the flat index `i P + j` by one place;
/// after log2(P) rounds the bits of `i` and `j` have changed places. If there are several parts, each takes its own block,
/// from other rows: the loads put them in place.
///
/// # Safety
/// The `rows` first rows of `N` elements must be readable and all `N` rows of the target writable.
#[inline(always)]
pub(crate) unsafe fn transpose<S: Simd, const N: usize, const P: usize>(s: S, block: Block<S::Elem>) {
    const { assert!(N == S::LANES && N.is_multiple_of(P)) };
    let nothing = [S::Elem::zero(); P];
    for first in (0..N).step_by(P) {
        let place = |row: usize| match row < block.rows {
            true => block.from.wrapping_offset(row as isize * block.from_row).wrapping_add(first),
            false => nothing.as_ptr(),
        };
        // SAFETY: `P` elements of a row that exists are readable by this function's contract, and so are those of `nothing`.
        let mut rows = std::array::from_fn::<_, P, _>(|i| unsafe { s.load_parts(|part| place(part * P + i)) });
        for _ in 0..P.trailing_zeros() {
            let mut next = rows;
            for i in 0..P / 2 {
                (next[2 * i], next[2 * i + 1]) = s.interleave(rows[i], rows[i + P / 2]);
            }
            rows = next;
        }
        for (j, &row) in (first..).zip(&rows) {
            // SAFETY: row j < N of the target is writable by this function's contract.
            unsafe { s.store(block.to.add(j * block.to_row), row) };
        }
    }
}

/// Implements methods of [`Simd`] by intrinsics: `name(a, b) -> type = expression;`
macro_rules! vector_ops {
    ($($name:ident($($arg:ident: $t:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        fn $name(self, $($arg: $t),*) -> $result {
            // SAFETY: `self` exists, so the CPU has the instructions (established by the caller of `assume`).
            unsafe { $body }
        }
    )*};
}

/// Implements the methods of [`Simd`] that touch memory, likewise.
macro_rules! memory_ops {
    ($($name:ident($($arg:ident: $t:ty),*) -> $result:ty = $body:expr;)*) => {$(
        #[inline(always)]
        unsafe fn $name(self, $($arg: $t),*) -> $result {
            // SAFETY: `self` exists, so the CPU has the instructions (established by the caller of `assume`); the
            // caller of this method vouches for the memory.
            unsafe { $body }
        }
    )*};
}

#[cfg(target_arch = "x86_64")]
pub(crate) use {memory_ops, vector_ops};
