//! The matrix unit of x86-64: AMX with bf16, used by AVX-512 code.
//!
//! Eight registers of 16 rows by 64 bytes. `tdpbf16ps` multiplies 16 rows with 16 columns, 32 terms at a time, in 16 cycles:
//! 16 times the rate of the multiply-adds of AVX-512. Four registers are sums, 32 rows by 32 columns, so that no
//! multiplication waits for the one before; two and two hold a part of the operands, and each is loaded anew as soon as it
//! has been read for the last time. Measured on an Emerald Rapids, operands in the first and second-level caches: 92 % of
//! what the unit does without loads, on both of two threads at once; 610 GFLOP/s of `f32` on each beside 250 of
//! multiply-adds.
//!
//! The instructions are written as assembly: the compiler has no stable names for them. It uses none of the registers, so
//! what the unit was told by `ldtilecfg` stays until it is told something else.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2.

use super::PANEL;
use super::matrix::{Extent, Matrix, Multiply, PARTS, STEP, SplitPanel, SplitRows, UNIT_ROWS};
use super::simd::LINE;
use super::tile::Start;
use std::arch::asm;
use std::arch::x86_64::*;
use std::sync::OnceLock;

/// The kernels.
pub(super) const MATRIX: Matrix<f32> = Matrix { shape, release, multiply, split_rows, split_panel };

/// Whether the CPU has the unit and the operating system lets this process use it, which Linux wants to be asked for once
/// (<https://docs.kernel.org/arch/x86/xstate.html>).
pub(super) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| has_unit() && is_permitted())
}

/// AMX with bf16 in the CPU, and its registers among those that the operating system keeps for each thread.
fn has_unit() -> bool {
    const TILES_AND_BF16: u32 = 1 << 24 | 1 << 22;
    const KEPT: u64 = 1 << 17 | 1 << 18;
    const OS_KEEPS_REGISTERS: u32 = 1 << 27;
    let keeps = __cpuid(1).ecx & OS_KEEPS_REGISTERS != 0;
    keeps && __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & TILES_AND_BF16 == TILES_AND_BF16 && {
        let (low, high): (u32, u32);
        // SAFETY: the instruction exists where the operating system keeps registers by it, and reads a register only.
        unsafe {
            asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high, options(nomem, nostack, preserves_flags))
        };
        (u64::from(high) << 32 | u64::from(low)) & KEPT == KEPT
    }
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
unsafe fn shape(rows: usize) {
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
unsafe fn release() {
    // SAFETY: the unit is there (contract).
    unsafe { asm!("tilerelease", options(nostack, nomem, preserves_flags)) }
}

/// A line of assembly, if the flag before it is 1.
macro_rules! line {
    (1, $line:literal) => {
        $line
    };
    (0, $line:literal) => {
        ""
    };
}

/// A line of assembly, if both flags are 1.
macro_rules! line_of_both {
    (1, 1, $line:literal) => {
        $line
    };
    ($rows:tt, $columns:tt, $line:literal) => {
        ""
    };
}

/// One block of sums: 16 rows, or up to 32 if `$r` is 1, by one panel, or two if `$c` is 1.
///
/// The six products of a step go from small to large; one of them has the part of one operand that the product before had.
macro_rules! block {
    ($name:ident, $r:tt, $c:tt) => {
        /// # Safety
        /// As [`multiply`]; `panel` is one of the block, and the one after it too if there are two. There is a step.
        #[inline]
        unsafe fn $name(m: &Multiply<f32>, panel: usize) {
            let c = m.c.wrapping_add(panel * PANEL);
            let b = m.b.wrapping_add(panel * m.b_panel);
            let part = |part: usize| m.a.wrapping_add(part * m.a_part);
            // SAFETY: the operands are readable and the sums writable (contract); the registers have been given their shapes.
            unsafe {
                asm!(
                    // Every operand has to be named, also by blocks that have no second rows or panel.
                    "# {d} {e}",
                    "test {add:e}, {add:e}",
                    "jz 3f",
                    "tileloadd tmm0, [{c} + {row}*1]",
                    line!($c, "tileloadd tmm1, [{c} + {row}*1 + 64]"),
                    line!($r, "tileloadd tmm2, [{d} + {row}*1]"),
                    line_of_both!($r, $c, "tileloadd tmm3, [{d} + {row}*1 + 64]"),
                    "jmp 2f",
                    "3:",
                    "tilezero tmm0",
                    line!($c, "tilezero tmm1"),
                    line!($r, "tilezero tmm2"),
                    line_of_both!($r, $c, "tilezero tmm3"),
                    "2:",
                    // a3 b1
                    "tileloadd tmm4, [{a3} + {line}*1]",
                    "tileloadd tmm6, [{b} + {line}*1]",
                    line!($r, "tileloadd tmm5, [{a3} + {line}*1 + 1024]"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    "tileloadd tmm4, [{a2} + {line}*1]",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($r, "tileloadd tmm5, [{a2} + {line}*1 + 1024]"),
                    // a2 b1
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1 + 1024]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1 + 1024]"),
                    // a2 b2
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    "tileloadd tmm4, [{a1} + {line}*1]",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($r, "tileloadd tmm5, [{a1} + {line}*1 + 1024]"),
                    // a1 b2
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1 + 2048]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1 + 2048]"),
                    // a1 b3
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1]"),
                    // a1 b1
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    "add {a1}, {a_step}",
                    "add {a2}, {a_step}",
                    "add {a3}, {a_step}",
                    "add {b}, 3072",
                    "add {e}, 3072",
                    "dec {steps}",
                    "jnz 2b",
                    "tilestored [{c} + {row}*1], tmm0",
                    line!($c, "tilestored [{c} + {row}*1 + 64], tmm1"),
                    line!($r, "tilestored [{d} + {row}*1], tmm2"),
                    line_of_both!($r, $c, "tilestored [{d} + {row}*1 + 64], tmm3"),
                    add = in(reg) usize::from(m.start == Start::Add),
                    c = in(reg) c,
                    d = in(reg) c.wrapping_add(PANEL * m.c_row),
                    row = in(reg) m.c_row * size_of::<f32>(),
                    a1 = inout(reg) part(0) => _,
                    a2 = inout(reg) part(1) => _,
                    a3 = inout(reg) part(2) => _,
                    a_step = in(reg) PARTS * m.a_part * size_of::<f32>(),
                    b = inout(reg) b => _,
                    e = inout(reg) b.wrapping_add(m.b_panel) => _,
                    steps = inout(reg) m.steps => _,
                    line = in(reg) LINE,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack)
                );
            }
        }
    };
}

block!(rows_and_panels, 1, 1);
block!(rows_and_panel, 1, 0);
block!(half_and_panels, 0, 1);
block!(half_and_panel, 0, 0);

/// # Safety
/// - [`shape`] was called with the number of rows on this thread, and [`release`] was not called since;
/// - `a` and `b` are readable, split as `matrix.rs` says; so many rows and panels of `c` are readable and writable, and
///   overlap neither.
unsafe fn multiply(m: &Multiply<f32>) {
    debug_assert!((1..=UNIT_ROWS).contains(&m.rows));
    if m.steps == 0 {
        if m.start == Start::Zero {
            for row in 0..m.rows {
                // SAFETY: the row is writable (contract).
                unsafe { m.c.add(row * m.c_row).write_bytes(0, m.panels * PANEL) };
            }
        }
        return;
    }
    for panel in (0..m.panels).step_by(2) {
        // SAFETY: the contract is handed on, and there is a step.
        unsafe {
            match (m.rows > PANEL, panel + 1 < m.panels) {
                (true, true) => rows_and_panels(m, panel),
                (true, false) => rows_and_panel(m, panel),
                (false, true) => half_and_panels(m, panel),
                (false, false) => half_and_panel(m, panel),
            }
        }
    }
}

/// The bits of a `f32` that a `bf16` has.
const HIGH: i32 = 0xFFFF_0000_u32 as i32;

/// The three parts of two vectors, in words of two.
///
/// The first part has the first 8 bits of a number, the second those of what is left rounded to the nearest, and the third what
/// is left then. A NaN stays one in the first part, and makes the sums NaN.
#[target_feature(enable = "avx512f")]
fn split(low: __m512, high: __m512) -> [__m512i; PARTS] {
    let bits = _mm512_set1_epi32(HIGH);
    let parts = |x: __m512| {
        let first = _mm512_and_si512(_mm512_castps_si512(x), bits);
        let rest = _mm512_sub_ps(x, _mm512_castsi512_ps(first));
        let half = _mm512_set1_epi32(1 << 15);
        let second = _mm512_and_si512(_mm512_add_epi32(_mm512_castps_si512(rest), half), bits);
        [first, second, _mm512_castps_si512(_mm512_sub_ps(rest, _mm512_castsi512_ps(second)))]
    };
    /// Of three bits, the first or both others.
    const LOW_OR_HIGH: i32 = 0xF8;
    let (low, high) = (parts(low), parts(high));
    std::array::from_fn(|i| _mm512_ternarylogic_epi32::<LOW_OR_HIGH>(_mm512_srli_epi32::<16>(low[i]), high[i], bits))
}

/// The larger of the absolute values, as bits.
#[target_feature(enable = "avx512f")]
fn larger(largest: __m512i, x: __m512) -> __m512i {
    _mm512_max_epu32(largest, _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(i32::MAX)))
}

/// # Safety
/// The rows must be readable, and so much of the target writable as `matrix.rs` says; the CPU must have AVX-512.
#[target_feature(enable = "avx512f")]
unsafe fn split_rows(a: &SplitRows<f32>) -> Extent {
    let mut largest = _mm512_setzero_si512();
    for step in 0..a.terms.div_ceil(STEP) {
        let terms = STEP.min(a.terms - step * STEP);
        let [low, high] = [terms.min(PANEL), terms.saturating_sub(PANEL)].map(|n| ((1_u32 << n) - 1) as __mmask16);
        for row in 0..a.rows {
            // SAFETY: only terms of the row are read (contract), and the words of the row are written.
            unsafe {
                let from = a.from.add(row * a.from_row + step * STEP);
                let low = _mm512_maskz_loadu_ps(low, from);
                let high = _mm512_maskz_loadu_ps(high, from.wrapping_add(PANEL));
                largest = larger(larger(largest, low), high);
                for (i, part) in split(low, high).into_iter().enumerate() {
                    _mm512_storeu_si512(a.to.add((step * PARTS + i) * a.to_part + row * PANEL).cast(), part);
                }
            }
        }
    }
    Extent { largest: _mm512_reduce_max_epu32(largest) }
}

/// # Safety
/// As [`split_rows`], for a panel.
#[target_feature(enable = "avx512f")]
unsafe fn split_panel(a: &SplitPanel<f32>) -> Extent {
    let mut largest = _mm512_setzero_si512();
    for step in 0..a.terms.div_ceil(STEP) {
        for term in 0..PANEL {
            let load = |term: usize| match term < a.terms {
                // SAFETY: the term is one of the panel (contract).
                true => unsafe { _mm512_loadu_ps(a.from.add(term * PANEL)) },
                false => _mm512_setzero_ps(),
            };
            let (low, high) = (load(step * STEP + term), load(step * STEP + PANEL + term));
            largest = larger(larger(largest, low), high);
            for (i, part) in split(low, high).into_iter().enumerate() {
                // SAFETY: the target has a line for each term of a part (contract).
                unsafe { _mm512_storeu_si512(a.to.add(((step * PARTS + i) * PANEL + term) * PANEL).cast(), part) };
            }
        }
    }
    Extent { largest: _mm512_reduce_max_epu32(largest) }
}
