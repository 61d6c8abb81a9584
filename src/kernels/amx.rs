//! The matrix unit of x86-64: AMX with bf16, used by AVX-512 code.
//!
//! Whether it is there, how it is made ready, how numbers are split for it, and what goes beside its products, which are in
//! `amx_tiles.rs`.

use super::amx_tiles::{Beside, OfTile, multiply, multiply_beside};
use super::avx512::Avx512;
use super::back::two_rows;
use super::beside::{Coming, Work};
use super::dropout::{Dropping, dropping_row};
use super::matrix::{Extent, Matrix, Multiply, PARTS, STEP, SplitPanel, SplitRows, SplitSquare, UNIT_ROWS};
use super::returning::{Part, Returning};
use super::simd::{LATER, LINE, prefetch, prefetch_bytes};
use super::softmax::{biased_row, whole_row};
use super::weighing::Weighing;
use super::{KEYS, PANEL};
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// The kernels.
pub(super) const MATRIX: Matrix<f32> = Matrix {
    shape,
    release,
    multiply,
    multiply_beside: multiply_beside_work,
    finish,
    stay_awake,
    split_rows,
    split_weights,
    split_panel,
    split_square,
};

/// Whether the CPU has the unit and the operating system lets this process use it, which Linux wants to be asked for once
/// (<https://docs.kernel.org/arch/x86/xstate.html>).
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_unit() && is_permitted())
}

/// AMX with bf16 in the CPU, and its registers among those that the operating system keeps for each thread.
#[allow(unused_unsafe, reason = "asking the CPU is unsafe up to some version of Rust")]
fn has_unit() -> bool {
    const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
    const KEPT: u64 = 1 << 17 | 1 << 18;
    const OS_KEEPS_REGISTERS: u32 = 1 << 27;
    // SAFETY: every x86-64 has the instruction.
    let (first, leaves) = unsafe { (__cpuid(1), __cpuid(0).eax) };
    if first.ecx & OS_KEEPS_REGISTERS == 0 || leaves < 7 {
        return false;
    }
    // SAFETY: as above.
    let features = unsafe { __cpuid_count(7, 0) };
    let (low, high): (u32, u32);
    // SAFETY: the instruction exists where the operating system keeps registers by it, and reads a register only.
    unsafe { asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags)) };
    features.edx & TILES_AND_BF16 == TILES_AND_BF16 && (u64::from(high) << 32 | u64::from(low)) & KEPT == KEPT
}

/// Asks Linux for the registers, for all threads of the process.
#[cfg(target_os = "linux")]
fn is_permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
    const TILE_DATA: u64 = 18;
    let result: i64;
    // SAFETY: a system call with two numbers, which changes no memory of the process; the registers that it changes are named.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") ARCH_PRCTL => result,
            in("rdi") ARCH_REQ_XCOMP_PERM,
            in("rsi") TILE_DATA,
            out("rcx") _,
            out("r11") _,
            options(nostack)
        );
    }
    result == 0
}

/// Elsewhere nobody has been seen to use it.
#[cfg(not(target_os = "linux"))]
fn is_permitted() -> bool {
    false
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Registers 0, 1 and 4 have the first 16 rows, 2, 3 and 5 the others, 6 and 7 what they are multiplied with.
///
/// # Safety
/// [`is_available`] must be true, and `rows` in `1..=UNIT_ROWS`.
pub(super) unsafe fn shape(rows: usize) {
    let first = rows.min(PANEL) as u8;
    // A register of no rows would not be one; of one that is not used, the number does not matter.
    let second = rows.saturating_sub(PANEL).max(1) as u8;
    let mut shapes = Shapes { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    shapes.row_bytes[..8].fill(64);
    shapes.rows[..8].copy_from_slice(&[first, first, second, second, first, second, 16, 16]);
    // SAFETY: the unit is there (contract), and 64 bytes are read.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const shapes, options(nostack, readonly, preserves_flags)) }
}

/// # Safety
/// [`is_available`] must be true.
pub(super) unsafe fn release() {
    // SAFETY: the unit is there (contract).
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}

/// A product of whatever the registers hold.
///
/// # Safety
/// [`shape`] was called on this thread, and [`release`] was not called since.
unsafe fn stay_awake() {
    // SAFETY: the registers have their shapes (contract); nobody reads the sums of a product after it.
    unsafe { asm!("tdpbf16ps tmm0, tmm4, tmm6", out("tmm0") _, options(nostack, nomem, preserves_flags)) }
}

/// The bits of a `f32` that a `bf16` has.
const HIGH: i32 = 0xFFFF_0000_u32 as i32;

/// The three parts of two vectors, in words of two.
///
/// The first part has the first 8 bits of a number, the second those of what is left rounded to the nearest, and the third what
/// is left then. A NaN stays one in the first part, and makes the sums NaN.
#[target_feature(enable = "avx512f")]
fn split(low: __m512, high: __m512) -> [__m512i; PARTS] {
    words(parts(low), parts(high))
}

/// The parts, each in the high half of a word; what the low half of the last has is to be cut off.
#[inline]
#[target_feature(enable = "avx512f")]
fn parts(x: __m512) -> [__m512i; PARTS] {
    let bits = _mm512_set1_epi32(HIGH);
    let first = _mm512_and_si512(_mm512_castps_si512(x), bits);
    let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
    let half = _mm512_set1_epi32(1 << 15);
    let second = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), bits);
    [first, second, _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(second)))]
}

/// Parts of two vectors in words of two.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(low: [__m512i; PARTS], high: [__m512i; PARTS]) -> [__m512i; PARTS] {
    /// Of three bits, the first or both others.
    const LOW_OR_HIGH: i32 = 0xF8;
    let bits = _mm512_set1_epi32(HIGH);
    std::array::from_fn(|i| _mm512_ternarylogic_epi32::<LOW_OR_HIGH>(_mm512_srli_epi32::<16>(low[i]), high[i], bits))
}

/// The larger of the absolute values, as bits.
#[target_feature(enable = "avx512f")]
fn larger(largest: __m512i, x: __m512) -> __m512i {
    _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX)))
}

/// The lines of both halves of a step's terms of a row, to the part that they belong to; `largest` grows to their numbers.
///
/// # Safety
/// The row must be readable and its words in each part of the step writable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn split_step(a: &SplitRows<f32>, row: usize, step: usize, largest: __m512i) -> __m512i {
    let terms = STEP.min(a.terms - step * STEP);
    let [low, high] = [terms.min(PANEL), terms.saturating_sub(PANEL)].map(|n| ((1_u32 << n) - 1) as __mmask16);
    // SAFETY: only terms of the row are read (contract), and the words of the row are written.
    unsafe {
        let from = a.from.add(row * a.from_row).wrapping_add(2 * step * a.from_next);
        let low = _mm512_maskz_loadu_ps(low, from);
        let high = _mm512_maskz_loadu_ps(high, from.wrapping_add(a.from_next));
        for (i, part) in split(low, high).into_iter().enumerate() {
            _mm512_storeu_si512(a.to.add((step * PARTS + i) * a.to_part + row * PANEL).cast(), part);
        }
        larger(larger(largest, low), high)
    }
}

/// Whether numbers fit, by the largest of each lane: see [`Extent::fits`].
#[inline]
#[target_feature(enable = "avx512f")]
fn fits(largest: __m512i) -> bool {
    let [least, most] = [Extent::LEAST, Extent::MOST].map(|bits| _mm512_set1_epi32(bits as i32));
    let enough = _mm512_cmpge_epu32_mask(largest, least) != 0 || _mm512_test_epi32_mask(largest, largest) == 0;
    enough && _mm512_cmpgt_epu32_mask(largest, most) == 0
}

/// # Safety
/// Up to [`UNIT_ROWS`] rows must be readable, and so much of the target writable as `matrix.rs` says; the CPU must have AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn split_rows(a: &SplitRows<f32>) -> u32 {
    let mut largest = [_mm512_setzero_si512(); UNIT_ROWS];
    for step in 0..a.terms.div_ceil(STEP) {
        for (row, largest) in largest[..a.rows].iter_mut().enumerate() {
            // SAFETY: row and step are some of those of the contract.
            *largest = unsafe { split_step(a, row, step, *largest) };
        }
    }
    largest[..a.rows].iter().enumerate().fold(0, |unfit, (row, largest)| unfit | u32::from(!fits(*largest)) << row)
}

/// # Safety
/// As [`split_rows`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn split_weights(a: &SplitRows<f32>) {
    let largest = _mm512_setzero_si512();
    for step in 0..a.terms.div_ceil(STEP) {
        for row in 0..a.rows {
            // SAFETY: row and step are some of those of the contract. (What is not used of the result is not computed.)
            let _ = unsafe { split_step(a, row, step, largest) };
        }
    }
}

/// Line `line` of each part of a panel; `largest` grows to its numbers.
///
/// # Safety
/// As [`split_rows`], for a panel; it has the line.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn split_line(a: &SplitPanel<f32>, line: usize, largest: __m512i) -> __m512i {
    let columns = ((1_u32 << a.columns) - 1) as __mmask16;
    let (step, line) = (line / PANEL, line % PANEL);
    let load = |term: usize| {
        let columns = if term < a.terms { columns } else { 0 };
        // SAFETY: only columns of a term of the panel are read (contract).
        unsafe { _mm512_maskz_loadu_ps(columns, a.from.wrapping_add(term * a.from_row)) }
    };
    let (low, high) = (load(step * STEP + line), load(step * STEP + PANEL + line));
    for (i, part) in split(low, high).into_iter().enumerate() {
        // SAFETY: the target has a line for each term of a part (contract).
        unsafe { _mm512_storeu_si512(a.to.add(((step * PARTS + i) * PANEL + line) * PANEL).cast(), part) };
    }
    larger(larger(largest, low), high)
}

/// # Safety
/// As [`split_rows`], for a panel.
#[target_feature(enable = "avx512f")]
unsafe fn split_panel(a: &SplitPanel<f32>) -> Extent {
    let mut largest = _mm512_setzero_si512();
    for line in 0..a.terms.div_ceil(STEP) * PANEL {
        // SAFETY: the contract is handed on.
        largest = unsafe { split_line(a, line, largest) };
    }
    Extent { largest: _mm512_reduce_max_epu32(largest) }
}

/// # Safety
/// As [`split_rows`], for a square.
#[target_feature(enable = "avx512f")]
unsafe fn split_square(a: &SplitSquare<f32>) -> Extent {
    // SAFETY: the contract is the same.
    unsafe { if a.to_rows.is_null() { square::<false>(a) } else { square::<true>(a) } }
}

/// # Safety
/// As [`split_square`].
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn square<const ROWS: bool>(a: &SplitSquare<f32>) -> Extent {
    let mut largest = _mm512_setzero_si512();
    for term in 0..PANEL {
        // SAFETY: the contract is the same.
        largest = unsafe { square_term::<ROWS>(a, term, largest) };
    }
    Extent { largest: _mm512_reduce_max_epu32(largest) }
}

/// Rows `term` and `term + 16` of a square; `largest` grows to their numbers.
///
/// # Safety
/// As [`split_square`]; `term < 16`.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn square_term<const ROWS: bool>(a: &SplitSquare<f32>, term: usize, largest: __m512i) -> __m512i {
    let [lower, upper] = [term, PANEL + term].map(|row| if row < a.rows { __mmask16::MAX } else { 0 });
    let from = a.from.wrapping_add(term * a.from_row);
    let below = from.wrapping_add(PANEL * a.from_row);
    // SAFETY: only rows of the square are read (contract). The targets have a line for each term of a part, and for each row
    // of a part.
    unsafe {
        // The first and the second 16 of each.
        let x = (_mm512_maskz_loadu_ps(lower, from), _mm512_maskz_loadu_ps(lower, from.wrapping_add(PANEL)));
        let y = (_mm512_maskz_loadu_ps(upper, below), _mm512_maskz_loadu_ps(upper, below.wrapping_add(PANEL)));
        split_rows_of_square::<ROWS>(a, term, x, y);
        larger(larger(larger(larger(largest, x.0), x.1), y.0), y.1)
    }
}

/// The same, of both vectors of both rows.
///
/// # Safety
/// As [`square_term`]; the rows themselves are not read.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn split_rows_of_square<const ROWS: bool>(
    a: &SplitSquare<f32>,
    term: usize,
    x: (__m512, __m512),
    y: (__m512, __m512),
) {
    let (x, y) = ((parts(x.0), parts(x.1)), (parts(y.0), parts(y.1)));
    // SAFETY: the targets have a line for each term of a part, and for each row of a part (contract).
    unsafe {
        let panels = a.panels.add(term * PANEL);
        store(words(x.0, y.0), panels, PANEL * PANEL);
        store(words(x.1, y.1), panels.add(a.panel), PANEL * PANEL);
        if ROWS {
            let rows = a.to_rows.add(term * PANEL);
            store(words(x.0, x.1), rows, UNIT_ROWS * PANEL);
            store(words(y.0, y.1), rows.add(PANEL * PANEL), UNIT_ROWS * PANEL);
        }
    }
}

/// Stores parts that are so many numbers apart.
///
/// # Safety
/// All must be writable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn store(words: [__m512i; PARTS], to: *mut f32, part: usize) {
    for (i, words) in words.into_iter().enumerate() {
        // SAFETY: the contract is the same.
        unsafe { _mm512_storeu_si512(to.add(i * part).cast(), words) }
    }
}

/// # Safety
/// As [`multiply_beside`], with any work.
unsafe fn multiply_beside_work(m: &Multiply<f32>, work: Work<'_, f32>) {
    // SAFETY: the contract is the same; who has the unit has AVX-512.
    unsafe {
        match work {
            Work::Split(coming) => multiply_beside(m, coming),
            Work::SplitTile(coming) => multiply_beside(m, &mut OfTile(coming)),
            Work::Weigh(rows) => multiply_beside(m, rows),
            Work::Return(rows) => multiply_beside(m, rows),
        }
    }
}

/// # Safety
/// What the work reads and writes must be there.
unsafe fn finish(work: Work<'_, f32>) {
    // SAFETY: only what is left is done (contract); who has the unit has AVX-512.
    unsafe {
        match work {
            Work::Split(coming) | Work::SplitTile(coming) => split_more(coming, usize::MAX),
            Work::Weigh(rows) => {
                while rows.is_left() {
                    weigh_row(rows);
                }
            }
            Work::Return(rows) => {
                while let Some(part) = rows.next() {
                    return_part(rows, part);
                }
            }
        }
    }
}

/// The next row, from scores to split weights.
///
/// # Safety
/// A row must be left; the arrays of the step must have their shapes, and the target room for 32 split rows of 64 keys.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
unsafe fn weigh_row(rows: &mut Weighing<f32>) {
    let row = rows.row;
    // SAFETY: the row is one of the step, and among the 32 of the target (contract).
    unsafe {
        let s = Avx512::<f32>::assume();
        let mut powers = match rows.bias {
            None => whole_row(s, &rows.softmax, row),
            Some((bias, apart)) => {
                // Of the next block of rows, which are too far apart for the CPU to guess.
                prefetch_bytes(bias.wrapping_add((UNIT_ROWS + row) * apart).cast(), KEYS * size_of::<f32>());
                biased_row(s, &rows.softmax, bias.wrapping_add(row * apart), row)
            }
        };
        if let Some(dropping) = &rows.dropping {
            let p = rows.softmax.p.add(row * KEYS);
            for (v, powers) in powers.iter().enumerate() {
                _mm512_storeu_ps(p.add(v * PANEL), *powers);
            }
            drop_row(dropping, row);
            for (v, powers) in powers.iter_mut().enumerate() {
                *powers = _mm512_loadu_ps(p.add(v * PANEL));
            }
        }
        let [a, b, c, d] = powers;
        let to = rows.to.add(row * PANEL);
        store(split(a, b), to, UNIT_ROWS * PANEL);
        store(split(c, d), to.add(PARTS * UNIT_ROWS * PANEL), UNIT_ROWS * PANEL);
    }
    rows.row += 1;
}

impl Beside for Weighing<f32> {
    const ASKS_AHEAD: bool = false;

    #[inline(always)]
    unsafe fn more(&mut self) {
        self.count_product();
        while self.take_due() {
            // SAFETY: there is a row; the contract is handed on.
            unsafe { weigh_row(self) }
        }
    }
}

/// The factors of dropout of a row, out of the way of those who have none.
///
/// # Safety
/// As [`dropping_row`].
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
unsafe fn drop_row(dropping: &Dropping<f32>, row: usize) {
    // SAFETY: the contract is the same.
    unsafe { dropping_row(Avx512::<f32>::assume(), dropping, row) }
}

/// A part of the way back of some rows.
///
/// # Safety
/// The part must be one that [`Returning::next`] gave, of rows whose arrays are there.
#[inline(never)]
#[target_feature(enable = "avx512f,avx512dq,avx2,fma,f16c")]
unsafe fn return_part(rows: &mut Returning<f32>, part: Part) {
    let Part { block, term, pair } = part;
    let row = block * UNIT_ROWS + term;
    let both = [row, row + PANEL];
    // SAFETY: rows that there are, keys and places are those of the contract, as are the lanes.
    unsafe {
        if let Some(dropping) = rows.dropping.as_ref().filter(|_| rows.begins_rows(&part)) {
            both.into_iter().filter(|&row| row < rows.back.rows).for_each(|row| drop_row(dropping, row));
        }
        if !rows.biases.bias.is_null() {
            rows.ask_for_biases(both, pair);
        }
        let [p, d] = two_rows(Avx512::<f32>::assume(), (&rows.back, &rows.biases), both, pair * STEP);
        let [p_square, d_square] = rows.squares(block, pair);
        let [p_rows, d_rows] = [p, d].map(|x| [(x[0], x[1]), (x[2], x[3])]);
        split_rows_of_square::<false>(&p_square, term, p_rows[0], p_rows[1]);
        split_rows_of_square::<true>(&d_square, term, d_rows[0], d_rows[1]);
        for (lanes, [a, b, c, d]) in rows.largest.iter_mut().zip([p, d]) {
            let lanes = lanes.0.as_mut_ptr().cast();
            _mm512_store_si512(lanes, larger(larger(larger(larger(_mm512_load_si512(lanes), a), b), c), d));
        }
    }
}

impl Beside for Returning<f32> {
    const ASKS_AHEAD: bool = false;

    #[inline(always)]
    unsafe fn more(&mut self) {
        self.count_product();
        while let Some(part) = self.next_due() {
            // SAFETY: the part is one that was given; the contract is handed on.
            unsafe { return_part(self, part) }
        }
    }
}

/// # Safety
/// As [`split_panel`], for what is left of the panels to come.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn split_more(coming: &mut Coming<f32>, lines: usize) {
    for _ in 0..coming.fetches {
        prefetch::<LATER>(coming.from);
        coming.from = coming.from.wrapping_add(LINE);
    }
    let mut left = lines;
    while let Some(panel) = coming.next() {
        let all = panel.terms.div_ceil(STEP) * PANEL;
        let end = all.min(coming.line.saturating_add(left));
        left -= end - coming.line;
        let lanes = coming.largest[coming.run].as_mut_ptr();
        // SAFETY: there are as many lanes, and the lines are some of the panel (contract).
        unsafe {
            let mut largest = _mm512_loadu_si512(lanes.cast());
            for line in coming.line..end {
                largest = split_line(&panel, line, largest);
            }
            _mm512_storeu_si512(lanes.cast(), largest);
        }
        coming.line = end;
        if end < all {
            return;
        }
        coming.end_panel();
    }
}
