//! Products by the registers of AMX: eight of 16 rows by 64 bytes.
//!
//! `tdpbf16ps` multiplies 16 rows with 16 columns, 32 terms at a time, in 16 cycles: 16 times the rate of the multiply-adds of
//! AVX-512. Four registers are sums, 32 rows by 32 columns, so that no multiplication waits for the one before; two and two hold
//! a part of the operands, and each is loaded anew as soon as it has been read for the last time. Measured on an Emerald
//! Rapids, operands in the first and second-level caches: 92 % of what the unit does without loads, on both of two threads at
//! once; 610 GFLOP/s of `f32` on each beside 250 of multiply-adds.
//!
//! The instructions are written as assembly: the compiler has no stable names for them. It uses none of the registers, so
//! what is in them stays from one piece of assembly to the next.
//!
//! Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 1, chapter 18, and volume 2.

use super::PANEL;
use super::matrix::{Multiply, PARTS, UNIT_ROWS};
use super::simd::LINE;
use super::tile::Start;
use std::arch::asm;

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

pub(super) use {line, line_of_both};

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
/// - [`super::amx::shape`] was called with the number of rows on this thread, and [`super::amx::release`] was not called since;
/// - `a` and `b` are readable, split as `matrix.rs` says; so many rows and panels of `c` are readable and writable, and
///   overlap neither.
pub(super) unsafe fn multiply(m: &Multiply<f32>) {
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
