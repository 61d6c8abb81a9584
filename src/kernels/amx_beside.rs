//! Products by the registers of AMX, as in `amx_tiles.rs`, and beside them some of the next panels are split.
//!
//! Between one product of parts and the next, the CPU splits a few lines: four instructions of the unit take 64 cycles, and with
//! that little in between they wait for nothing.

use super::PANEL;
use super::amx::split_more;
use super::amx_tiles::{line, line_of_both};
use super::matrix::{Coming, Multiply, PARTS, UNIT_ROWS};
use super::simd::LINE;
use super::tile::Start;
use std::arch::asm;
use std::arch::x86_64::*;

/// A product of one part of each operand, with the loads of what comes next; then a little of what is to be split, while the
/// unit multiplies.
macro_rules! product {
    ($coming:ident, [$($name:ident = $value:expr),*], $($lines:tt)*) => {
        // SAFETY: the operands are readable (contract). Nothing but the unit's own instructions touches its registers.
        unsafe {
            asm!(
                concat!("# {line}" $(, " {", stringify!($name), "}")*),
                $($lines)*
                $($name = in(reg) $value,)*
                line = in(reg) LINE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags)
            );
            split_more($coming, $coming.pace);
        }
    };
}

/// One block of sums: 16 rows, or up to 32 if `$r` is 1, by one panel, or two if `$c` is 1.
///
/// The six products of a step go from small to large; one of them has the part of one operand that the product before had.
/// What is split beside a step has its time: the multiplications wait in the unit.
macro_rules! block {
    ($name:ident, $r:tt, $c:tt) => {
        /// # Safety
        /// As [`multiply_beside`]; `panel` is one of the block, and the one after it too if there are two.
        #[target_feature(enable = "avx512f")]
        unsafe fn $name(m: &Multiply<f32>, panel: usize, coming: &mut Coming<f32>) {
            let c = m.c.wrapping_add(panel * PANEL);
            let d = c.wrapping_add(PANEL * m.c_row);
            let row = m.c_row * size_of::<f32>();
            // SAFETY: the sums are readable (contract); the registers have been given their shapes.
            unsafe {
                asm!(
                    // Every operand has to be named, also by blocks that have no second rows.
                    "# {d}",
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
                    add = in(reg) usize::from(m.start == Start::Add),
                    c = in(reg) c,
                    d = in(reg) d,
                    row = in(reg) row,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    options(nostack)
                );
            }
            let rows_a_step = UNIT_ROWS.div_ceil(m.steps.max(1));
            let (mut a, mut b) = (m.a, m.b.wrapping_add(panel * m.b_panel));
            let mut ahead = c.wrapping_add(UNIT_ROWS * m.c_row);
            for _ in 0..m.steps {
                for _ in 0..rows_a_step {
                    for line in 0..2 + $c {
                        _mm_prefetch::<_MM_HINT_ET0>(ahead.wrapping_add(line * PANEL).cast());
                    }
                    ahead = ahead.wrapping_add(m.c_row);
                }
                let [a1, a2, a3] = std::array::from_fn(|part| a.wrapping_add(part * m.a_part));
                let e = b.wrapping_add(m.b_panel);
                // a3 b1
                product!(coming, [a = a3, n = a2, b = b, e = e],
                    "tileloadd tmm4, [{a} + {line}*1]",
                    "tileloadd tmm6, [{b} + {line}*1]",
                    line!($r, "tileloadd tmm5, [{a} + {line}*1 + 1024]"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1]"),
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    "tileloadd tmm4, [{n} + {line}*1]",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($r, "tileloadd tmm5, [{n} + {line}*1 + 1024]"),
                );
                // a2 b1
                product!(coming, [b = b, e = e],
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1 + 1024]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1 + 1024]"),
                );
                // a2 b2
                product!(coming, [n = a1],
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    "tileloadd tmm4, [{n} + {line}*1]",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($r, "tileloadd tmm5, [{n} + {line}*1 + 1024]"),
                );
                // a1 b2
                product!(coming, [b = b, e = e],
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1 + 2048]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1 + 2048]"),
                );
                // a1 b3
                product!(coming, [b = b, e = e],
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1]"),
                );
                // a1 b1
                product!(coming, [],
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                );
                (a, b) = (a.wrapping_add(PARTS * m.a_part), b.wrapping_add(PARTS * PANEL * PANEL));
            }
            // SAFETY: the sums are writable (contract).
            unsafe {
                asm!(
                    "# {d}",
                    "tilestored [{c} + {row}*1], tmm0",
                    line!($c, "tilestored [{c} + {row}*1 + 64], tmm1"),
                    line!($r, "tilestored [{d} + {row}*1], tmm2"),
                    line_of_both!($r, $c, "tilestored [{d} + {row}*1 + 64], tmm3"),
                    c = in(reg) c,
                    d = in(reg) d,
                    row = in(reg) row,
                    options(nostack, preserves_flags)
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
/// As [`super::amx_tiles::multiply`] and [`split_more`]; what is split overlaps nothing else.
pub(super) unsafe fn multiply_beside(m: &Multiply<f32>, coming: &mut Coming<f32>) {
    debug_assert!((1..=UNIT_ROWS).contains(&m.rows));
    for panel in (0..m.panels).step_by(2) {
        // SAFETY: the contract is handed on; who has the unit has AVX-512.
        unsafe {
            match (m.rows > PANEL, panel + 1 < m.panels) {
                (true, true) => rows_and_panels(m, panel, coming),
                (true, false) => rows_and_panel(m, panel, coming),
                (false, true) => half_and_panels(m, panel, coming),
                (false, false) => half_and_panel(m, panel, coming),
            }
        }
    }
}
