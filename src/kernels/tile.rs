//! The micro-kernel of every matrix product: a few rows, held in registers.
//!
//! ```text
//! c[i][j]  =  (c[i][j] +)  Σ_t a[i][t] b[t][j]        i < rows <= 6,  j < n,  t < k
//! ```
//!
//! `a` is broadcast; its rows are contiguous, or its columns if it is transposed. `b` comes in *panels* of 16 columns, at
//! every level and for both types, so that packed data does not depend on the level; a row-major matrix is the special case
//! `b_panel = 16, b_k = row stride`. The sum over `t` runs in order, one fused multiply-add per term, so the bits of a
//! result do not depend on how rows and columns are cut into tiles.
//!
//! A register block is MR rows by NV vectors: 6 x 4 with the 32 registers of AVX-512 and aarch64, 6 x 2 with 16. To see that
//! the accumulators of a level stay in registers (24 multiply-adds per turn of the loop, four times 12 with AVX2, and no
//! vector moved to the stack):
//!
//! ```text
//! cargo rustc --release --lib -- --emit asm -C codegen-units=1
//! grep -n 'vfmadd231ps.*zmm' target/release/deps/multihead-*.s
//! ```
//!
//! Measured against a probe of independent multiply-adds next to it (f32, operands in the first-level cache): 98 % of the
//! peak with AVX-512 for 6 x 64 x 64 from zero, 95 % if `c` is added to (Emerald Rapids); 98 to 99 % with AVX2 (Zen 3).
//! Panels are narrow enough that it would pay to let several groups of rows meet one before the next; it was tried, for
//! attention with 24 rows and for projections with 256, and changed nothing: the second-level cache keeps up.
//!
//! The scheme is that of the BLIS micro-kernel (Van Zee and van de Geijn, 2015).

use super::PANEL;
use super::real::Real;
use super::simd::{LINE, Simd, Widen};
use super::table::Kernels;

/// Rows of the largest register block.
pub(crate) const MAX_ROWS: usize = 6;

/// One product, by pointers. Strides count elements.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<T, B = T> {
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: *const T,
    pub(crate) a_stride: Stride,
    /// In the type that it is stored in.
    pub(crate) b: *const B,
    pub(crate) b_panel: usize,
    pub(crate) b_k: usize,
    pub(crate) c: *mut T,
    pub(crate) c_row: usize,
    pub(crate) start: Start,
    pub(crate) ahead: Ahead,
}

#[cfg(feature = "half")]
impl<T: Copy> Tile<T> {
    /// The same product with another `b`.
    pub(super) fn with_b<B>(&self, b: *const B) -> Tile<T, B> {
        let Self { rows, n, k, a, a_stride, b: _, b_panel, b_k, c, c_row, start, ahead } = *self;
        Tile { rows, n, k, a, a_stride, b, b_panel, b_k, c, c_row, start, ahead }
    }
}

/// How the numbers of `a` follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stride {
    /// Each row is contiguous, and begins so many elements after the one before.
    Rows(usize),
    /// Each column is contiguous, and begins so many elements after the one before.
    Columns(usize),
}

/// What a product asks memory for while it computes: as much as it reads of `b`, or a part of that.
///
/// A product of a few rows with a matrix that lies in memory waits for it, unless somebody has asked for it in time: the
/// CPU does so by itself for a row, not for four. One token of 32 heads on 8 against 32768 keys, two threads of a Zen 3:
/// 17 ms without, 12.5 ms with this, 8.5 ms at the rate of a plain sum; in `bf16` 12 and 6.5 ms. Into which cache it is
/// asked depends on the level: see [`Simd::ask_ahead`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ahead {
    pub(crate) from: *const u8,
    /// One part in so many; 0 for nothing.
    pub(crate) share: usize,
}

impl Ahead {
    pub(crate) const NOTHING: Self = Self { from: std::ptr::null(), share: 0 };
}

/// What a sum begins with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Start {
    /// Zero: what `c` holds is not read.
    Zero,
    /// What `c` holds.
    Add,
}

/// Up to so many terms, the multipliers go on with the next block while one ends.
const SHORT: usize = 8;

/// Runs a product with register blocks of up to 6 rows and `NV` vectors; of one row and `WIDEST` vectors or of two rows and
/// `WIDE`, where `n` is that large: with fewer accumulators the multipliers would wait for each other. Three rows have
/// `MEDIUM` vectors, the most that leave registers for the operands, and so have four that wait for memory: as many
/// accumulators as the multipliers need leave none to catch up with after a load that came late (AVX2, one thread: 0.73 to
/// 0.82 of the bandwidth).
///
/// # Safety
/// - `1 <= rows <= MAX_ROWS`;
/// - all of `a` is readable, and of `b` every column below `n` rounded up to a multiple of 16;
/// - `c` is readable and writable, columns below `n` only, and overlaps neither `a` nor `b`.
#[inline(always)]
pub(crate) unsafe fn tile<
    S: Widen<B>,
    B,
    const NV: usize,
    const MEDIUM: usize,
    const WIDE: usize,
    const WIDEST: usize,
>(
    s: S,
    t: &Tile<S::Elem, B>,
) {
    // With smaller registers, a single row asks for so much by itself that memory has no time for more.
    let ahead = t.ahead.share > 0 && (t.rows > 1 || S::MANY_REGISTERS);
    // SAFETY: the contract is handed on; MR is the number of rows, or 1 for each of them.
    unsafe {
        match (t.a_stride, t.rows, ahead) {
            (Stride::Rows(_), 1, true) => strip::<S, B, 1, NV, WIDE, false, true>(s, t, 0),
            (Stride::Rows(_), 1, _) if t.k <= SHORT => strip::<S, B, 1, NV, WIDE, false, false>(s, t, 0),
            (Stride::Rows(_), 1, _) => strip::<S, B, 1, NV, WIDEST, false, false>(s, t, 0),
            (Stride::Rows(_), 2, false) => strip::<S, B, 2, NV, WIDE, false, false>(s, t, 0),
            (Stride::Rows(_), 3, false) => strip::<S, B, 3, NV, MEDIUM, false, false>(s, t, 0),
            (Stride::Rows(_), 4, false) => strip::<S, B, 4, NV, NV, false, false>(s, t, 0),
            (Stride::Rows(_), 5, false) => strip::<S, B, 5, NV, NV, false, false>(s, t, 0),
            (Stride::Rows(_), _, false) => strip::<S, B, MAX_ROWS, NV, NV, false, false>(s, t, 0),
            (Stride::Rows(_), 2, true) => strip::<S, B, 2, NV, WIDE, false, true>(s, t, 0),
            (Stride::Rows(_), 3, true) => strip::<S, B, 3, NV, MEDIUM, false, true>(s, t, 0),
            (Stride::Rows(_), 4, true) => strip::<S, B, 4, NV, MEDIUM, false, true>(s, t, 0),
            (Stride::Rows(_), 5, true) => strip::<S, B, 5, NV, NV, false, true>(s, t, 0),
            (Stride::Rows(_), _, true) => strip::<S, B, MAX_ROWS, NV, NV, false, true>(s, t, 0),
            // Whoever has a transposed matrix cuts it into fives and sixes; what is left is too small to matter.
            (Stride::Columns(_), 5, _) => strip::<S, B, 5, NV, NV, true, false>(s, t, 0),
            (Stride::Columns(_), MAX_ROWS, _) => strip::<S, B, MAX_ROWS, NV, NV, true, false>(s, t, 0),
            (Stride::Columns(_), rows, _) => {
                for row in 0..rows {
                    strip::<S, B, 1, NV, WIDEST, true, false>(s, t, row);
                }
            }
        }
    }
}

/// Walks the columns of `MR` rows from `first` on: blocks of `WIDE` vectors, blocks of `NV`, then what is left.
///
/// # Safety
/// As [`tile`], with `first + MR <= rows`.
#[inline(always)]
unsafe fn strip<
    S: Widen<B>,
    B,
    const MR: usize,
    const NV: usize,
    const WIDE: usize,
    const COLUMNS: bool,
    const AHEAD: bool,
>(
    s: S,
    t: &Tile<S::Elem, B>,
    first: usize,
) {
    let mut column = 0;
    // SAFETY: each block starts below n and holds at most the vectors up to the next multiple of LANES, which divides
    // the multiple of 16 up to which the caller vouches for `b`.
    unsafe {
        let left = |column: usize| (t.n - column) / S::LANES;
        // A single vector at the end would leave the multipliers waiting.
        while WIDE > NV && left(column) >= WIDE && left(column) != WIDE + 1 {
            block::<S, B, MR, WIDE, false, COLUMNS, AHEAD>(s, t, first, column);
            column += WIDE * S::LANES;
        }
        // Five vectors are three and two, six are three and three: one or two alone have too few multiply-adds to a term for
        // the loads and addresses beside them.
        while left(column) >= NV && (NV < 4 || left(column) == NV || left(column) > NV + 2) {
            block::<S, B, MR, NV, false, COLUMNS, AHEAD>(s, t, first, column);
            column += NV * S::LANES;
        }
        while NV > 3 && left(column) >= 3 {
            block::<S, B, MR, 3, false, COLUMNS, AHEAD>(s, t, first, column);
            column += 3 * S::LANES;
        }
        if NV > 2 && left(column) >= 2 {
            block::<S, B, MR, 2, false, COLUMNS, AHEAD>(s, t, first, column);
            column += 2 * S::LANES;
        }
        if left(column) == 1 {
            block::<S, B, MR, 1, false, COLUMNS, AHEAD>(s, t, first, column);
            column += S::LANES;
        }
        if column < t.n {
            block::<S, B, MR, 1, true, COLUMNS, AHEAD>(s, t, first, column);
        }
    }
}

/// One register block at row `first` and `column`. With `EDGE`, only columns below `n` of `c` are touched.
///
/// # Safety
/// As [`tile`], with `first + MR <= rows`; `column` is a multiple of `LANES`, and without `EDGE` the block ends at or
/// before `n`.
#[inline(always)]
unsafe fn block<
    S: Widen<B>,
    B,
    const MR: usize,
    const NV: usize,
    const EDGE: bool,
    const COLUMNS: bool,
    const AHEAD: bool,
>(
    s: S,
    t: &Tile<S::Elem, B>,
    first: usize,
    column: usize,
) {
    let lanes = |v: usize| if EDGE { (t.n - column).saturating_sub(v * S::LANES).min(S::LANES) } else { S::LANES };
    let mut sum = [[s.zero(); NV]; MR];
    // SAFETY: rows below MR and columns below n of `c` are readable (contract); lanes() ends at n.
    unsafe {
        if t.start == Start::Add {
            for i in 0..MR {
                for v in 0..NV {
                    let c = t.c.add((first + i) * t.c_row + column + v * S::LANES);
                    sum[i][v] = if lanes(v) == S::LANES { s.load(c) } else { s.load_partial(c, lanes(v)) };
                }
            }
        }
    }

    let (Stride::Rows(apart) | Stride::Columns(apart)) = t.a_stride;
    // One of the two is 1, and the compiler knows which.
    let (a_row, a_k) = if COLUMNS { (1, apart) } else { (apart, 1) };
    let ahead_share = t.ahead.share.max(1);
    let strides = Strides {
        a_row,
        a_k,
        b: std::array::from_fn(|v| {
            let column = column + v * S::LANES;
            column / PANEL * t.b_panel + column % PANEL
        }),
        b_k: t.b_k,
        ahead: if AHEAD { NV * S::LANES * size_of::<B>() / lines::<S, B, NV>() / ahead_share } else { 0 },
    };
    let mut at = At { a: t.a.wrapping_add(first * a_row), b: t.b, ahead: t.ahead.from };
    if AHEAD {
        at.ahead = at.ahead.wrapping_add(column * t.k * size_of::<B>() / ahead_share);
    }
    // SAFETY: rows below MR of `a` and NV vectors of `b` are readable for each of the k terms (contract). A block begins
    // at a panel, or lies inside one if NV vectors are less than a panel.
    unsafe {
        // Of wider blocks the addresses are a smaller part (and with AVX-512 the compiler would fetch the factors of four
        // terms at once, for which it has no registers); of few rows too, and what reads ahead waits for memory anyway.
        let unrolled = MR >= 4 && NV == 2 && !AHEAD;
        if unrolled {
            terms::<S, B, MR, NV, AHEAD, UNROLL>(s, t.k / UNROLL, &strides, &mut at, &mut sum);
        }
        let left = if unrolled { t.k % UNROLL } else { t.k };
        terms::<S, B, MR, NV, AHEAD, 1>(s, left, &strides, &mut at, &mut sum);
    }

    for i in 0..MR {
        for v in 0..NV {
            // SAFETY: as for the loads of `c` above.
            unsafe {
                let c = t.c.add((first + i) * t.c_row + column + v * S::LANES);
                if lanes(v) == S::LANES {
                    s.store(c, sum[i][v]);
                } else {
                    s.store_partial(c, sum[i][v], lanes(v));
                }
            }
        }
    }
}

/// Terms of a turn of the loop. Addresses are counted once for all of them: 23 instructions a term (AVX2, 6 x 2) and not
/// 28. Six cycles of a Zen 3 have room for either as long as the core is all ours; where another thread takes every second
/// one, the product is 15 % faster.
const UNROLL: usize = 4;

/// Lines of the cache that a term reads of `b`.
const fn lines<S: Simd, B, const NV: usize>() -> usize {
    (NV * S::LANES * size_of::<B>()).div_ceil(LINE)
}

/// From one element to the next, in elements.
struct Strides<const NV: usize> {
    a_row: usize,
    a_k: usize,
    /// Of each vector, from the first: blocks begin in the middle of a panel if their vectors do not make whole panels.
    b: [usize; NV],
    b_k: usize,
    /// In bytes.
    ahead: usize,
}

/// Where the next term is.
struct At<T, B> {
    a: *const T,
    b: *const B,
    ahead: *const u8,
}

/// Adds `turns * U` terms to the sums.
///
/// # Safety
/// `MR` rows of `a` and `NV` vectors of `b` must be readable for as many terms.
#[inline(always)]
unsafe fn terms<S: Widen<B>, B, const MR: usize, const NV: usize, const AHEAD: bool, const U: usize>(
    s: S,
    turns: usize,
    strides: &Strides<NV>,
    at: &mut At<S::Elem, B>,
    sum: &mut [[S::V; NV]; MR],
) {
    for _ in 0..turns {
        for u in 0..U {
            // SAFETY: the term is one of those that the caller vouches for.
            unsafe {
                let mut row = [s.zero(); NV];
                for v in 0..NV {
                    row[v] = s.widen(at.b.add(strides.b[v] + u * strides.b_k));
                }
                for _ in 0..if AHEAD { lines::<S, B, NV>() } else { 0 } {
                    s.ask_ahead(at.ahead);
                    at.ahead = at.ahead.wrapping_add(strides.ahead);
                }
                for i in 0..MR {
                    let factor = s.splat(*at.a.add(i * strides.a_row + u * strides.a_k));
                    for v in 0..NV {
                        sum[i][v] = s.fma(factor, row[v], sum[i][v]);
                    }
                }
            }
        }
        at.a = at.a.wrapping_add(U * strides.a_k);
        at.b = at.b.wrapping_add(U * strides.b_k);
    }
}

/// One product, by slices: see [`Tile`].
#[derive(Debug)]
pub(crate) struct Product<'a, T> {
    /// At most [`MAX_ROWS`].
    pub(crate) rows: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: &'a [T],
    pub(crate) a_stride: Stride,
    pub(crate) b: &'a [T],
    pub(crate) b_panel: usize,
    pub(crate) b_k: usize,
    pub(crate) c: &'a mut [T],
    pub(crate) c_row: usize,
    pub(crate) start: Start,
}

impl<T: Real> Kernels<T> {
    /// `c = a b` or `c = c + a b`.
    pub(crate) fn multiply(&self, x: Product<'_, T>) {
        let Product { rows, n, k, a_stride, b_panel, b_k, c_row, start, .. } = x;
        let rows = rows.min(MAX_ROWS);
        if rows == 0 || n == 0 {
            return;
        }
        let last = |count: usize, step: usize| (count - 1).saturating_mul(step);
        let (a, b) = match k {
            0 => (&x.a[..0], &x.b[..0]),
            _ => {
                let a = match a_stride {
                    Stride::Rows(apart) => last(rows, apart).saturating_add(k),
                    Stride::Columns(apart) => last(k, apart).saturating_add(rows),
                };
                let b = last(n.div_ceil(PANEL), b_panel).saturating_add(last(k, b_k)).saturating_add(PANEL);
                (&x.a[..a], &x.b[..b])
            }
        };
        let c = &mut x.c[..last(rows, c_row).saturating_add(n)];
        let (a, b, c) = (a.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        // SAFETY: rows is in 1..=6; the slices above end with the last element that the strides reach, and `c` is
        // borrowed exclusively.
        unsafe {
            (self.tile)(&Tile { rows, n, k, a, a_stride, b, b_panel, b_k, c, c_row, start, ahead: Ahead::NOTHING })
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Numbers, at_every_level, wide};

    /// How the operands lie in memory: whether `a` is transposed, and whether `b` is packed.
    const LAYOUTS: [[bool; 2]; 4] = [[false, true], [false, false], [true, true], [true, false]];

    /// One product against plain loops in f64; `c` is wider than n, and what is beyond n must stay.
    fn product<T: Real>(kernels: &Kernels<T>, (rows, n, k): (usize, usize, usize), layout: [bool; 2], start: Start) {
        let mut numbers = Numbers::new((rows * 1000 + n * 100 + k) as u64);
        let padded = n.next_multiple_of(PANEL);
        let [transposed, packed] = layout;
        // Rows and columns have a gap between them.
        let (a_stride, a_row, a_k) =
            if transposed { (Stride::Columns(rows + 2), 1, rows + 2) } else { (Stride::Rows(k + 1), k + 1, 1) };
        let (b_panel, b_k) = if packed { (k * PANEL, PANEL) } else { (PANEL, padded) };
        let (a, b) = (numbers.vec::<T>((rows + 2) * (k + 1)), numbers.vec::<T>(k * padded));
        let c_row = n + 3;
        let before: Vec<T> = match start {
            Start::Zero => vec![T::nan(); rows * c_row],
            Start::Add => numbers.vec(rows * c_row),
        };
        let mut c = before.clone();
        let (a_at, b_at) = (a.as_ptr(), b.as_ptr());
        let tile = Tile {
            rows,
            n,
            k,
            a: a_at,
            a_stride,
            b: b_at,
            b_panel,
            b_k,
            c: c.as_mut_ptr(),
            c_row,
            start,
            ahead: Ahead::NOTHING,
        };
        // SAFETY: `a` has rows and columns to spare, `b` every column up to the padded width, `c` rows of c_row > n.
        unsafe { (kernels.tile)(&tile) };

        for i in 0..rows {
            for j in 0..c_row {
                let at = i * c_row + j;
                if j >= n {
                    assert!(c[at] == before[at] || before[at].is_nan() && c[at].is_nan(), "wrote beyond n");
                    continue;
                }
                let first = if start == Start::Add { wide(before[at]) } else { 0.0 };
                let (mut sum, mut size) = (first, first.abs());
                for t in 0..k {
                    let term = wide(a[i * a_row + t * a_k]) * wide(b[j / PANEL * b_panel + t * b_k + j % PANEL]);
                    sum += term;
                    size += term.abs();
                }
                let error = (wide(c[at]) - sum).abs();
                let bound = wide(T::epsilon()) * (k as f64 + 1.0) * size;
                assert!(error <= bound, "{rows} x {n} x {k} {layout:?} {start:?} at {i}, {j}: {error} > {bound}");
            }
        }
    }

    #[test]
    fn products_of_every_shape() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for rows in 1..=MAX_ROWS {
                for n in [0, 1, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 80, 96, 128, 256] {
                    for k in [0, 1, 2, 3, 64, 81] {
                        for layout in LAYOUTS {
                            product(kernels, (rows, n, k), layout, Start::Zero);
                            product(kernels, (rows, n, k), layout, Start::Add);
                        }
                    }
                }
            }
        }
        at_every_level!(check);
    }

    #[test]
    fn the_cut_into_tiles_does_not_change_a_bit() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            let mut numbers = Numbers::new(7);
            let (n, k) = (80, 50);
            let (a, b) = (numbers.vec::<T>(MAX_ROWS * k), numbers.vec::<T>(n * k));
            let run = |rows: usize, from_row: usize, n: usize, from: usize| {
                let mut c = vec![T::zero(); rows * n];
                let (a, b) = (a[from_row * k..].as_ptr(), b[from..].as_ptr());
                let (b_panel, b_k, c_row, start) = (PANEL, 80, n, Start::Zero);
                // SAFETY: rows and columns lie within the matrices above, and n is a multiple of 16.
                unsafe {
                    let c = c.as_mut_ptr();
                    (kernels.tile)(&Tile {
                        rows,
                        n,
                        k,
                        a,
                        a_stride: Stride::Rows(k),
                        b,
                        b_panel,
                        b_k,
                        c,
                        c_row,
                        start,
                        ahead: Ahead::NOTHING,
                    });
                }
                c
            };
            let whole = run(MAX_ROWS, 0, n, 0);
            for row in 0..MAX_ROWS {
                for column in (0..n).step_by(PANEL) {
                    let part = run(1, row, PANEL, column);
                    assert_eq!(part, whole[row * n + column..][..PANEL]);
                }
            }
        }
        at_every_level!(check);
    }
}
