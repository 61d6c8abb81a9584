//! The kernels of each level: the generic bodies, compiled with the instructions of that level, behind function pointers.

use super::back::{self, Back};
use super::dots::{self, Dots};
use super::dropout::{self, Dropping};
#[cfg(feature = "half")]
use super::halves::{self, Halves};
use super::level::Level;
use super::matrix::Matrix;
use super::norm::{self, NormInput, RowRule};
use super::normal;
use super::pack::{self, Pack};
use super::pairs::{self, Pairs};
use super::portable::Portable;
use super::softmax::{self, Softmax};
use super::tile::{self, Tile};
use super::values::{self, Values};
use super::{KEYS, PANEL, divide, exp, gemm, peak};
#[cfg(feature = "half")]
use half::{bf16, f16};
use ndarray::ArrayView2;

/// The kernels of one level for one scalar type.
///
/// The fields are unsafe to call for the reasons that their generic bodies state; that the CPU has the instructions is
/// settled when a table is handed out.
#[derive(Debug)]
pub(crate) struct Kernels<T: 'static> {
    pub(super) tile: unsafe fn(&Tile<T>),
    pub(super) dots: unsafe fn(&Dots<T>),
    pub(super) softmax: unsafe fn(&Softmax<T>),
    pub(super) values: unsafe fn(&Values<T>),
    pub(super) back: unsafe fn(&Back<T>),
    pub(super) pairs: unsafe fn(&Pairs<T>),
    pub(super) dropping: unsafe fn(&Dropping<T>),
    pub(super) panels: unsafe fn(&Pack<T>),
    pub(super) rows: unsafe fn(&Pack<T>) -> bool,
    pub(super) scaled: unsafe fn(&Pack<T>, T),
    exp2: unsafe fn(*mut T, usize),
    tanh: unsafe fn(*mut T, usize),
    gelu: unsafe fn(*mut T, usize),
    gelu_slope: unsafe fn(*mut T, usize),
    normalise: unsafe fn(&RowRule<'_, T>, NormInput<'_, T>, &mut [T]),
    divide: unsafe fn(*const T, *mut T, usize, T),
    multiply_adds: unsafe fn(usize, T) -> T,
    multiply_adds_flop: usize,
    sum: unsafe fn(*const T, usize) -> T,
    /// For `f32`.
    #[cfg(feature = "half")]
    pub(super) halves: Option<Halves<T>>,
    /// Up to this many rows of a projection, its weights are read where they are and not packed.
    pub(super) few_rows: usize,
    /// For so many terms of a projection's sums, its weights are packed at a time.
    pub(super) depth: usize,
    /// Rows of weights that are read where they are, at a time.
    pub(super) streams: usize,
    /// What multiplies many rows, if there is one.
    pub(super) matrix: Option<Matrix<T>>,
}

/// Compiles the kernels for a token, and collects them in the constants `F32` and `F64` of a module.
macro_rules! level {
    ($module:ident, $f32:expr, $f64:expr, NV = [$nv:literal, $medium:literal, $wide:literal, $widest:literal], NR = $nr:literal, BYTES = $bytes:literal, FEW = $few:literal $(, $features:literal)?) => {
        mod $module {
            use super::*;

            level!(@table F32, f32, $f32, [$nv, $medium, $wide, $widest], $nr, $bytes, $few $(, $features)?);
            level!(@table F64, f64, $f64, [$nv, $medium, $wide, $widest], $nr, $bytes, $few $(, $features)?);
        }
    };
    (@table $name:ident, $t:ident, $token:expr, [$nv:literal, $medium:literal, $wide:literal, $widest:literal], $nr:literal, $bytes:literal, $few:literal $(, $features:literal)?) => {
        pub(super) const $name: Kernels<$t> = {
            level!(@entry $token $(, $features)?, tile(a: &Tile<$t>) -> () = tile::tile::<_, _, $nv, $medium, $wide, $widest>);
            level!(@entry $token $(, $features)?, dots(a: &Dots<$t>) -> () = dots::dots::<_, $nr>);
            level!(@entry $token $(, $features)?, softmax(a: &Softmax<$t>) -> () = softmax::softmax);
            level!(@entry $token $(, $features)?, values(a: &Values<$t>) -> () = values::values);
            level!(@entry $token $(, $features)?, back(a: &Back<$t>) -> () = back::back);
            level!(@entry $token $(, $features)?, pairs(a: &Pairs<$t>) -> () = pairs::pairs);
            level!(@entry $token $(, $features)?, dropping(a: &Dropping<$t>) -> () = dropout::dropping);
            level!(@entry $token $(, $features)?, panels(a: &Pack<$t>) -> () = pack::panels);
            level!(@entry $token $(, $features)?, rows(a: &Pack<$t>) -> bool = pack::rows);
            level!(@entry $token $(, $features)?, scaled(a: &Pack<$t>, factor: $t) -> () = pack::scaled);
            level!(@entry $token $(, $features)?, exp2(x: *mut $t, n: usize) -> () = exp::exp2_slice);
            level!(@entry $token $(, $features)?, tanh(x: *mut $t, n: usize) -> () = exp::tanh_slice);
            level!(@entry $token $(, $features)?, gelu(x: *mut $t, n: usize) -> () = normal::gelu::<_, false>);
            level!(@entry $token $(, $features)?, gelu_slope(x: *mut $t, n: usize) -> () = normal::gelu::<_, true>);
            level!(@entry $token $(, $features)?, normalise(rule: &RowRule<'_, $t>, input: NormInput<'_, $t>, rows: &mut [$t]) -> () = norm::normalise);
            level!(@entry $token $(, $features)?, divide(x: *const $t, to: *mut $t, n: usize, d: $t) -> () = divide::divide);
            level!(@entry $token $(, $features)?, multiply_adds(steps: usize, x: $t) -> $t = peak::multiply_adds);
            level!(@entry $token $(, $features)?, sum(x: *const $t, n: usize) -> $t = peak::sum);
            let multiply_adds_flop = peak::flop_per_step($bytes / size_of::<$t>());
            #[cfg(feature = "half")]
            let halves = level!(@halves $t, $token, [$nv, $medium, $wide, $widest] $(, $features)?);
            Kernels { tile, dots, softmax, values, back, pairs, dropping, panels, rows, scaled, exp2, tanh, gelu, gelu_slope, normalise, divide, multiply_adds, multiply_adds_flop, sum, few_rows: $few, depth: gemm::depth($bytes), streams: gemm::streams($bytes), matrix: None, #[cfg(feature = "half")] halves }
        };
    };
    (@halves f32, $token:expr, [$nv:literal, $medium:literal, $wide:literal, $widest:literal] $(, $features:literal)?) => {{
        level!(@entry $token $(, $features)?, tile_f16(a: &Tile<f32, f16>) -> () = tile::tile::<_, _, $nv, $medium, $wide, $widest>);
        level!(@entry $token $(, $features)?, tile_bf16(a: &Tile<f32, bf16>) -> () = tile::tile::<_, _, $nv, $medium, $wide, $widest>);
        level!(@entry $token $(, $features)?, widen_f16(from: *const f16, to: *mut f32, n: usize) -> () = halves::widen);
        level!(@entry $token $(, $features)?, widen_bf16(from: *const bf16, to: *mut f32, n: usize) -> () = halves::widen);
        Some(Halves { tile_f16, tile_bf16, widen_f16, widen_bf16 })
    }};
    (@halves f64, $($rest:tt)*) => { None };
    (@entry $token:expr $(, $features:literal)?, $name:ident($($arg:ident: $t:ty),*) -> $out:ty = $body:expr) => {
        $(#[target_feature(enable = $features)])?
        #[allow(unused_unsafe, reason = "some bodies are safe")]
        unsafe fn $name($($arg: $t),*) -> $out {
            // SAFETY: the table of a level is handed out only where the CPU has its instructions (`table` below); the
            // caller keeps the contract of the body.
            unsafe { $body($token, $($arg),*) }
        }
    };
}

#[cfg(target_arch = "x86_64")]
level!(
    avx512,
    Avx512::<f32>::assume(),
    Avx512::<f64>::assume(),
    NV = [4, 4, 8, 16],
    NR = 8,
    BYTES = 64,
    FEW = 12,
    "avx512f,avx512dq,avx2,fma,f16c"
);
#[cfg(target_arch = "x86_64")]
level!(
    avx2,
    Avx2::<f32>::assume(),
    Avx2::<f64>::assume(),
    NV = [2, 3, 4, 8],
    NR = 4,
    BYTES = 32,
    FEW = 3,
    "avx2,fma,f16c"
);
#[cfg(target_arch = "aarch64")]
level!(portable, Portable::<f32, 4>::NEW, Portable::<f64, 2>::NEW, NV = [4, 4, 8, 16], NR = 8, BYTES = 16, FEW = 3);
#[cfg(not(target_arch = "aarch64"))]
level!(portable, Portable::<f32, 4>::NEW, Portable::<f64, 2>::NEW, NV = [2, 3, 4, 8], NR = 4, BYTES = 16, FEW = 3);

#[cfg(target_arch = "x86_64")]
use super::{amx, avx2::Avx2, avx512::Avx512};

/// Products of many rows by the matrix unit, everything else by AVX-512.
#[cfg(target_arch = "x86_64")]
mod avx512_with_amx {
    use super::{Kernels, amx, avx512};

    pub(super) const F32: Kernels<f32> = Kernels { matrix: Some(amx::MATRIX), ..avx512::F32 };
    /// The unit does not multiply them.
    pub(super) const F64: Kernels<f64> = avx512::F64;
}

/// The table of a level that the CPU has, or the portable one.
macro_rules! table {
    ($level:expr, $name:ident) => {
        match $level {
            #[cfg(target_arch = "x86_64")]
            Level::Amx if Level::Amx.is_available() => &avx512_with_amx::$name,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 if Level::Avx512.is_available() => &avx512::$name,
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 if Level::Avx2.is_available() => &avx2::$name,
            _ => &portable::$name,
        }
    };
}

/// The `f32` kernels of a level, or the portable ones if this CPU cannot run it.
pub(crate) fn kernels_f32(level: Level) -> &'static Kernels<f32> {
    table!(level, F32)
}

/// The `f64` kernels of a level, or the portable ones if this CPU cannot run it.
pub(crate) fn kernels_f64(level: Level) -> &'static Kernels<f64> {
    table!(level, F64)
}

/// The copies and functions that need nothing but slices and views; the others are in `step.rs` and `gemm.rs`.
impl<T: Copy> Kernels<T> {
    /// Replaces each number by its power of two.
    pub(crate) fn exp2(&self, x: &mut [T]) {
        // SAFETY: pointer and length are those of a mutable slice.
        unsafe { (self.exp2)(x.as_mut_ptr(), x.len()) }
    }

    /// Replaces each number by its hyperbolic tangent.
    pub(crate) fn tanh(&self, x: &mut [T]) {
        // SAFETY: pointer and length are those of a mutable slice.
        unsafe { (self.tanh)(x.as_mut_ptr(), x.len()) }
    }

    /// Replaces each number by its GELU.
    pub(crate) fn gelu(&self, x: &mut [T]) {
        // SAFETY: pointer and length are those of a mutable slice.
        unsafe { (self.gelu)(x.as_mut_ptr(), x.len()) }
    }

    /// Replaces each number by the slope of GELU there.
    pub(crate) fn gelu_slope(&self, x: &mut [T]) {
        // SAFETY: pointer and length are those of a mutable slice.
        unsafe { (self.gelu_slope)(x.as_mut_ptr(), x.len()) }
    }

    /// Normalises rows; the input has as many numbers as the rows.
    pub(crate) fn normalise(&self, rule: &RowRule<'_, T>, input: NormInput<'_, T>, rows: &mut [T]) {
        // SAFETY: the body is safe; the CPU has the instructions of the table's level.
        unsafe { (self.normalise)(rule, input, rows) }
    }

    /// `to = x / d`, as far as both slices reach.
    pub(crate) fn divide(&self, x: &[T], to: &mut [T], d: T) {
        let n = x.len().min(to.len());
        // SAFETY: both slices have n elements, and one of them is borrowed exclusively.
        unsafe { (self.divide)(x.as_ptr(), to.as_mut_ptr(), n, d) }
    }

    /// Multiply-adds on registers for as long as `steps` takes.
    pub(crate) fn multiply_adds(&self, steps: usize) -> T
    where
        T: num_traits::One,
    {
        // SAFETY: the kernel touches registers only.
        unsafe { (self.multiply_adds)(steps, T::one()) }
    }

    /// Floating-point operations of [`Kernels::multiply_adds`].
    pub(crate) fn multiply_adds_flop(&self, steps: usize) -> usize {
        steps * self.multiply_adds_flop
    }

    /// The sum of all numbers but for a tail of less than 8 vectors.
    pub(crate) fn read_all(&self, x: &[T]) -> T {
        // SAFETY: pointer and length are those of a slice.
        unsafe { (self.sum)(x.as_ptr(), x.len()) }
    }

    /// `[count, d]` to panels `[⌈count/16⌉][d][16]`; the lanes of rows that do not exist are zero.
    pub(crate) fn pack_panels(&self, from: ArrayView2<'_, T>, to: &mut [T]) {
        let (rows, columns) = from.dim();
        let to = &mut to[..panels_len(rows, columns)];
        // SAFETY: the view makes the source readable, and the slice above has the length that the kernel asks for.
        unsafe { (self.panels)(&describe(from, to)) }
    }

    /// `[count, w]` to rows `[⌈count/16⌉·16][⌈w/16⌉·16]` with zeros where there is no source. True if all is finite.
    pub(crate) fn pack_rows(&self, from: ArrayView2<'_, T>, to: &mut [T]) -> bool {
        let (rows, columns) = from.dim();
        let to = &mut to[..panels_len(rows, columns.next_multiple_of(PANEL))];
        // SAFETY: as for `pack_panels`.
        unsafe { (self.rows)(&Pack { to_row: columns.next_multiple_of(PANEL), ..describe(from, to) }) }
    }

    /// `[count, w]` to panels of columns `[⌈w/16⌉][⌈count/16⌉·16][16]` that begin `panel` elements apart, with zeros where
    /// there is no source. True if all is finite.
    pub(crate) fn pack_columns(&self, from: ArrayView2<'_, T>, panel: usize, to: &mut [T]) -> bool {
        let (rows, columns) = from.dim();
        let rows = rows.next_multiple_of(PANEL);
        assert!(rows.saturating_mul(PANEL) <= panel, "panels of {rows} rows do not overlap");
        let to = &mut to[..columns_len(rows, columns, panel)];
        // SAFETY: as for `pack_panels`; a panel has room for all rows.
        unsafe { (self.rows)(&Pack { to_panel: panel, ..describe(from, to) }) }
    }

    /// The values of a tile: [`Kernels::pack_columns`] of up to 64 rows.
    pub(crate) fn pack_values(&self, from: ArrayView2<'_, T>, to: &mut [T]) -> bool {
        self.pack_columns(from, VALUES_PANEL, to)
    }

    /// `factor · from`, `[count, d]` to contiguous rows.
    pub(crate) fn pack_scaled(&self, from: ArrayView2<'_, T>, factor: T, to: &mut [T]) {
        let to = &mut to[..from.len()];
        // SAFETY: as for `pack_panels`.
        unsafe { (self.scaled)(&describe(from, to), factor) }
    }
}

/// Elements of `rows` packed to panels of 16 with `columns` each.
pub(crate) const fn panels_len(rows: usize, columns: usize) -> usize {
    rows.next_multiple_of(PANEL).saturating_mul(columns)
}

/// Numbers of 16 columns of a tile of values.
pub(super) const VALUES_PANEL: usize = KEYS * PANEL;

/// Where the first `rows` rows of a tile of values end.
pub(super) const fn values_len(rows: usize, columns: usize) -> usize {
    columns_len(rows, columns, VALUES_PANEL)
}

/// Where the first `rows` rows of panels of columns end that begin `panel` elements apart.
const fn columns_len(rows: usize, columns: usize, panel: usize) -> usize {
    match columns.div_ceil(PANEL) {
        0 => 0,
        panels => (panels - 1).saturating_mul(panel).saturating_add(rows.saturating_mul(PANEL)),
    }
}

/// A view and a slice as the kernels see them.
fn describe<T>(from: ArrayView2<'_, T>, to: &mut [T]) -> Pack<T> {
    let (rows, columns) = from.dim();
    let (row, column) = (from.strides()[0], from.strides()[1]);
    Pack { from: from.as_ptr(), row, column, rows, columns, to: to.as_mut_ptr(), to_row: PANEL, to_panel: PANEL }
}
