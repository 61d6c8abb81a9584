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
use super::amx::split_more;
use super::beside::Coming;
use super::matrix::{Multiply, PARTS, UNIT_ROWS};
use super::simd::LINE;
use super::tile::Start;
use std::arch::asm;
use std::arch::x86_64::*;

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

/// What a block of sums is made of: how the sums begin, the six products of a step, and how the sums end. `$then` makes assembly
/// of the pieces. A block has 16 rows, or up to 32 if `$r` is 1, and one panel, or two if `$c` is 1.
///
/// The products go from small to large; each has a part of one operand that the product before had. `{c}` and `{d}` are the first
/// and the second 16 rows of the sums, `{a1}` to `{a3}` the parts of the rows, `{b}` and `{e}` the panels.
macro_rules! pieces {
    ($then:ident, $r:tt, $c:tt, $($more:tt)*) => {
        $then! {
            ($($more)*)
            {
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
            }
            [
                {
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
                }
                {
                    // a2 b1
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1 + 1024]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1 + 1024]"),
                }
                {
                    // a2 b2
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    "tileloadd tmm4, [{a1} + {line}*1]",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($r, "tileloadd tmm5, [{a1} + {line}*1 + 1024]"),
                }
                {
                    // a1 b2
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1 + 2048]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1 + 2048]"),
                }
                {
                    // a1 b3
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    "tileloadd tmm6, [{b} + {line}*1]",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                    line!($c, "tileloadd tmm7, [{e} + {line}*1]"),
                }
                {
                    // a1 b1
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    line!($c, "tdpbf16ps tmm1, tmm4, tmm7"),
                    line!($r, "tdpbf16ps tmm2, tmm5, tmm6"),
                    line_of_both!($r, $c, "tdpbf16ps tmm3, tmm5, tmm7"),
                }
            ]
            {
                "tilestored [{c} + {row}*1], tmm0",
                line!($c, "tilestored [{c} + {row}*1 + 64], tmm1"),
                line!($r, "tilestored [{d} + {row}*1], tmm2"),
                line_of_both!($r, $c, "tilestored [{d} + {row}*1 + 64], tmm3"),
            }
        }
    };
}

/// All of a block in one piece of assembly.
macro_rules! whole {
    (($m:ident, $panel:ident) {$($begin:tt)*} [$({$($product:tt)*})*] {$($end:tt)*}) => {
        let c = $m.c.wrapping_add($panel * PANEL);
        let b = $m.b.wrapping_add($panel * $m.b_panel);
        let part = |part: usize| $m.a.wrapping_add(part * $m.a_part);
        // SAFETY: the operands are readable and the sums writable (contract); the registers have been given their shapes.
        unsafe {
            asm!(
                // Every operand has to be named, also by blocks that have no second rows or panel.
                "# {d} {e}",
                $($begin)*
                $($($product)*)*
                "add {a1}, {a_step}",
                "add {a2}, {a_step}",
                "add {a3}, {a_step}",
                "add {b}, 3072",
                "add {e}, 3072",
                "dec {steps}",
                "jnz 2b",
                $($end)*
                add = in(reg) usize::from($m.start == Start::Add),
                c = in(reg) c,
                d = in(reg) c.wrapping_add(PANEL * $m.c_row),
                row = in(reg) $m.c_row * size_of::<f32>(),
                a1 = inout(reg) part(0) => _,
                a2 = inout(reg) part(1) => _,
                a3 = inout(reg) part(2) => _,
                a_step = in(reg) PARTS * $m.a_part * size_of::<f32>(),
                b = inout(reg) b => _,
                e = inout(reg) b.wrapping_add($m.b_panel) => _,
                steps = inout(reg) $m.steps => _,
                line = in(reg) LINE,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack)
            );
        }
    };
}

/// A block product by product, and a little of something else after each of them: four instructions of the unit take 64 cycles,
/// and with that little in between they wait for nothing. Memory may be asked for the sums of the rows that come next.
macro_rules! beside {
    (($m:ident, $panel:ident, $beside:ident, $c:tt) {$($begin:tt)*} [$({$($product:tt)*})*] {$($end:tt)*}) => {
        let c = $m.c.wrapping_add($panel * PANEL);
        let d = c.wrapping_add(PANEL * $m.c_row);
        let row = $m.c_row * size_of::<f32>();
        // SAFETY: the sums are readable (contract); the registers have been given their shapes.
        unsafe {
            asm!(
                "# {d}",
                $($begin)*
                add = in(reg) usize::from($m.start == Start::Add),
                c = in(reg) c,
                d = in(reg) d,
                row = in(reg) row,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack)
            );
        }
        let rows_a_step = UNIT_ROWS.div_ceil($m.steps.max(1));
        let (mut a, mut b) = ($m.a, $m.b.wrapping_add($panel * $m.b_panel));
        let mut ahead = c.wrapping_add(UNIT_ROWS * $m.c_row);
        for _ in 0..$m.steps {
            for _ in 0..if W::ASKS_AHEAD { rows_a_step } else { 0 } {
                for line in 0..2 + $c {
                    _mm_prefetch::<_MM_HINT_ET0>(ahead.wrapping_add(line * PANEL).cast());
                }
                ahead = ahead.wrapping_add($m.c_row);
            }
            let [a1, a2, a3] = std::array::from_fn(|part| a.wrapping_add(part * $m.a_part));
            let e = b.wrapping_add($m.b_panel);
            $(
                // SAFETY: the operands are readable (contract). Nothing but the unit's own instructions touches its registers.
                unsafe {
                    asm!(
                        "# {a1} {a2} {a3} {b} {e} {line}",
                        $($product)*
                        a1 = in(reg) a1,
                        a2 = in(reg) a2,
                        a3 = in(reg) a3,
                        b = in(reg) b,
                        e = in(reg) e,
                        line = in(reg) LINE,
                        out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                        out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                        options(nostack, readonly, preserves_flags)
                    );
                    $beside.more();
                }
            )*
            (a, b) = (a.wrapping_add(PARTS * $m.a_part), b.wrapping_add(PARTS * PANEL * PANEL));
        }
        // SAFETY: the sums are writable (contract).
        unsafe {
            asm!(
                "# {d}",
                $($end)*
                c = in(reg) c,
                d = in(reg) d,
                row = in(reg) row,
                options(nostack, preserves_flags)
            );
        }
    };
}

/// Both ways to make a block.
macro_rules! block {
    ($whole:ident, $beside:ident, $r:tt, $c:tt) => {
        /// # Safety
        /// As [`multiply`]; `panel` is one of the block, and the one after it too if there are two. There is a step.
        unsafe fn $whole(m: &Multiply<f32>, panel: usize) {
            pieces!(whole, $r, $c, m, panel);
        }

        /// # Safety
        /// As [`multiply_beside`]; `panel` as above, and there may be no step.
        #[target_feature(enable = "avx512f")]
        unsafe fn $beside<W: Beside>(m: &Multiply<f32>, panel: usize, work: &mut W) {
            pieces!(beside, $r, $c, m, panel, work, $c);
        }
    };
}

block!(rows_and_panels, rows_and_panels_beside, 1, 1);
block!(rows_and_panel, rows_and_panel_beside, 1, 0);
block!(half_and_panels, half_and_panels_beside, 0, 1);
block!(half_and_panel, half_and_panel_beside, 0, 0);

/// The blocks of a product: of each, whether it has more than 16 rows and two panels, and the first of these.
fn blocks(m: &Multiply<f32>) -> impl Iterator<Item = ([bool; 2], usize)> {
    debug_assert!((1..=UNIT_ROWS).contains(&m.rows));
    let (rows, panels) = (m.rows > PANEL, m.panels);
    (0..panels).step_by(2).map(move |panel| ([rows, panel + 1 < panels], panel))
}

/// # Safety
/// - [`super::amx::shape`] was called with the number of rows on this thread, and [`super::amx::release`] was not called since;
/// - `a` and `b` are readable, split as `matrix.rs` says; so many rows and panels of `c` are readable and writable, and
///   overlap neither.
pub(super) unsafe fn multiply(m: &Multiply<f32>) {
    if m.steps == 0 {
        if m.start == Start::Zero {
            for row in 0..m.rows {
                // SAFETY: the row is writable (contract).
                unsafe { m.c.add(row * m.c_row).write_bytes(0, m.panels * PANEL) };
            }
        }
        return;
    }
    for (shape, panel) in blocks(m) {
        // SAFETY: the contract is handed on, and there is a step.
        unsafe {
            match shape {
                [true, true] => rows_and_panels(m, panel),
                [true, false] => rows_and_panel(m, panel),
                [false, true] => half_and_panels(m, panel),
                [false, false] => half_and_panel(m, panel),
            }
        }
    }
}

/// What the vectors of the CPU do while the unit multiplies.
pub(super) trait Beside {
    /// Whether memory is asked for the sums of the rows that come next.
    const ASKS_AHEAD: bool;

    /// What belongs to one product of parts.
    ///
    /// # Safety
    /// The CPU must have AVX-512; and what the work itself asks for.
    unsafe fn more(&mut self);
}

/// Panels of a tile, beside products whose sums are where they were a moment ago.
pub(super) struct OfTile<'c>(pub(super) &'c mut Coming<f32>);

impl Beside for OfTile<'_> {
    const ASKS_AHEAD: bool = false;

    #[inline(always)]
    unsafe fn more(&mut self) {
        // SAFETY: the contract is handed on.
        unsafe { split_more(self.0, self.0.pace) }
    }
}

impl Beside for Coming<f32> {
    const ASKS_AHEAD: bool = true;

    #[inline(always)]
    unsafe fn more(&mut self) {
        // SAFETY: the contract is handed on.
        unsafe { split_more(self, self.pace) }
    }
}

/// The same, and some other work beside it.
///
/// # Safety
/// As [`multiply`] and [`Beside::more`]; what the work writes overlaps nothing of the product.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn multiply_beside<W: Beside>(m: &Multiply<f32>, work: &mut W) {
    for (shape, panel) in blocks(m) {
        // SAFETY: the contract is handed on.
        unsafe {
            match shape {
                [true, true] => rows_and_panels_beside(m, panel, work),
                [true, false] => rows_and_panel_beside(m, panel, work),
                [false, true] => half_and_panels_beside(m, panel, work),
                [false, false] => half_and_panel_beside(m, panel, work),
            }
        }
    }
}
