//! Projections: one block of `y = x w + bias`, or of `y = y + x w`.
//!
//! ```text
//! y[i][j] = (y[i][j] +) bias[j] + Σ_t x[i][t] w[t][j]      x [n, in], w [in, out], y [n, out]; x and w with any strides
//! ```
//!
//! The caller cuts `y` into blocks, by rows and whole panels of columns as it likes, and may hand them to threads. The sum over
//! `t` runs in one order for every element, so the cut changes no bit of the result.
//!
//! * Many rows: for each 128 or 256 terms of the sum, the columns of `w` are packed to panels (in `f32` 128 KiB for 128 terms
//!   of 256 columns: they stay in the second-level cache, which feeds the multipliers as well as the first), and every group
//!   of 6 rows of `x` meets them. A `w` that is stored transposed is packed by transposing, at about the same cost. Packing
//!   takes the time of reading `w` and is worth it from a few rows on; the more rows a block has, the less of it is left.
//! * Many rows of `f32`, where the CPU has a matrix unit: `gemm_matrix.rs`.
//! * Few rows: copying would cost more than it saves, and the time is that of reading `w`. It is read once, where it is,
//!   a few whole rows at a time. How many rows are few depends on the level: with registers of four cache lines it pays
//!   up to 12 rows; with AVX2 (Zen 3, 1024 x 1024) 4 rows take 0.38 ms so and 0.25 ms packed, 1 row 0.14 and 0.18 ms.
//! * Up to 24 rows and a transposed `w` (of a file that stores `[out, in]`): inner products along its rows, `dots.rs`. To
//!   transpose it while it is packed costs more than to add up lanes (1024 x 1024: 4 rows 54 and 18 GFLOP/s, 12 rows 74 and
//!   40, 24 rows 73 and 54), unless the sums are short.
//!
//! Packing whole blocks, several rows of `w` at a time (`pack.rs`), takes 15 to 30 % less time than strips of 64 columns for
//! a layer of 4 to 16 tokens, and 4 to 9 % for 512 to 1024 (Zen 3, d_model 1024 and 512).
//!
//! One thread, f32, GFLOP/s (lower quartile of interleaved times, each line from the quietest of four runs), on a shared
//! Zen 3 core with a peak of 103; blocks as a layer has them. `wᵀ` is stored `[out, in]`; `packed` are weights that were
//! packed beforehand (`prepacked.rs`). The weights come from the third-level cache.
//!
//! | rows x in x out | here, w | here, wᵀ | packed | gemm 0.19, w | wᵀ | matrixmultiply 0.3.11, w | wᵀ |
//! | --- | --- | --- | --- | --- | --- | --- | --- |
//! | 512 x 512 x 512 | 86 | 85 | 91 | 88 | 90 | 81 | 80 |
//! | 2048 x 512 x 512 | 87 | 86 | 90 | 87 | 88 | 83 | 83 |
//! | 1024 x 768 x 768 | 85 | 83 | 86 | 83 | 80 | 80 | 80 |
//! | 128 x 1024 x 1024 | 81 | 78 | 88 | 77 | 70 | 73 | 74 |
//! | 64 x 1024 x 1024 | 78 | 73 | 90 | 71 | 59 | 67 | 67 |
//! | 16 x 1024 x 1024 | 64 | 67 | 85 | 50 | 27 | 42 | 46 |
//! | 4 x 1024 x 1024 | 33 | 50 | 63 | 37 | 7 | 13 | 14 |
//! | 1 x 1024 x 1024 | 28 | 29 | 31 | 26 | 23 | 3 | 4 |
//!
//! The same on an Emerald Rapids with AVX-512 and a peak of 179, `w`, `wᵀ` and packed: 512 x 512 x 512 150, 148, 156;
//! 128 x 1024 x 1024 138, 146, 174; 64 rows of that 131, 120, 170; 16 rows 79, 84, 140; 4 rows 46, 47, 49; 1 row 12, 15, 15.
//!
//! The loops are those of GotoBLAS (Goto and van de Geijn, 2008).

use super::PANEL;
use super::dots::{Dots, MAX_DOT_ROWS};
use super::gemm_matrix::{Columns, matrix_scratch};
use super::matrix::Matrix;
use super::prepacked::Prepacked;
use super::real::Real;
use super::scratch::aligned;
use super::table::Kernels;
use super::tile::{Ahead, MAX_ROWS, Start, Stride, Tile};
use super::upcoming::Upcoming;
use ndarray::{ArrayView1, ArrayView2, ArrayViewMut2, Axis, s};
use std::ops::Range;

/// Most terms of the sum for which `w` is packed at a time.
const DEPTH: usize = 256;

/// How many they are with vectors of so many bytes. AVX-512 comes with second-level caches of 1 MiB and more: 256 terms take
/// 5 % less time than 128 for layers of 512 and 1024 tokens (Emerald Rapids, two threads).
pub(super) const fn depth(vector: usize) -> usize {
    if vector < 64 { DEPTH / 2 } else { DEPTH }
}

/// Columns of `w` that are packed at a time.
const STRIP: usize = 512;

/// From one panel of so many terms of them to the next: a power of two apart, all would meet in the same few places of the
/// cache.
fn strip_panel(terms: usize) -> usize {
    (terms.next_multiple_of(PANEL) + 1) * PANEL
}

/// Up to so many rows, sums of many terms with a transposed `w` are inner products; at no level are more rows few
/// (`Kernels::few_rows`).
const INNER_ROWS: usize = 24;

/// Columns of a transposed `w` that all rows meet before the next ones: of 1024 terms they fill a first-level cache.
const INNER_COLUMNS: usize = 8;

/// Terms that make up for the addition of an inner product's lanes, for each of those rows.
const TERMS_PER_INNER_ROW: usize = 8;

/// Up to this many columns, `x` is not copied.
const NARROW: usize = 128;

/// Bytes after which addresses meet in the same place of a first-level cache: of rows so far apart, six leave no room for the
/// panels. They are copied; others are read where they are (2 to 4 % less time for 512 tokens of 512 or 768 numbers).
const PAGE: usize = 4096;

/// Groups of rows that ask memory for the next panels while they meet these.
const FETCHING_GROUPS: usize = 4;

/// Rows of `w` that are read together if it is not packed, with vectors of so many bytes. With four times as many, 1, 4 and 12 rows
/// take 0.79, 0.64 and 0.65 of the time with AVX-512 (Emerald Rapids, 1024 x 1024, two threads).
pub(super) const fn streams(vector: usize) -> usize {
    if vector < 64 { 8 } else { 32 }
}

/// From so many rows on, a matrix unit multiplies, if there is one. Splitting the weights costs more than packing them: one
/// thread of an Emerald Rapids with AMX takes 0.8 of the rate of AVX-512 with 32 to 40 rows of 1024 terms, 0.95 to 1.1 with 48
/// and 1.1 with 56; with prepacked weights, which must give the same bits, it would pay from 32 rows on.
const UNIT_FROM_ROWS: usize = 56;

/// And from so many terms on, of which it adds up 32 at a time.
const UNIT_FROM_TERMS: usize = 16;

/// Columns of a block that an output should be cut into.
const BLOCK_COLUMNS: usize = 256;

/// The same where `w` is read where it is. Memory gives whole pages faster than parts of them: one token takes 4.6 ms with
/// 512 columns of 2048 at a time and 3.2 ms with 1024, 12.0 ms with 512 of 4096 and 9.3 ms with 2048 (Zen 3, two threads).
const FEW_ROWS_COLUMNS: usize = 2048;

/// Up to so many rows, whose products take no longer than packing does, a block should have the columns of a strip: longer
/// parts of the rows of `w` are read faster. (4 to 8 % less time for 4 to 64 tokens, d_model 1024, two threads of a Zen 3.)
const SOME_ROWS: usize = 64;

/// Columns of a block of up to [`SOME_ROWS`] where `w` is packed already and narrow blocks cost nothing: a thread that wakes late leaves more of them to the
/// others. (7 to 12 % less time for 16 tokens, 1 to 5 % for 4 and 64, d_model 512, than with half of the columns for each of
/// two threads of a Zen 3; 4 % for 16 tokens and d_model 2048.)
const PREPACKED_COLUMNS: usize = 128;

/// Elements of scratch for so many terms of packed columns.
pub(super) fn strip_len(columns: usize, terms: usize) -> usize {
    columns.min(STRIP).div_ceil(PANEL) * strip_panel(terms)
}

/// The operands of `x w + bias`, and whether that is added to what the output holds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Linear<'a, T> {
    /// `[n, in]`.
    pub(crate) x: ArrayView2<'a, T>,
    pub(crate) w: Factor<'a, T>,
    /// `[out]`.
    pub(crate) bias: Option<ArrayView1<'a, T>>,
    pub(crate) start: Start,
}

/// What `x` is multiplied with: `[in, out]`.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Factor<'a, T> {
    /// A matrix of any strides.
    Plain(ArrayView2<'a, T>),
    Prepacked(&'a Prepacked<T>),
}

impl<T: Real> Factor<'_, T> {
    pub(crate) fn dim(&self) -> (usize, usize) {
        match self {
            Self::Plain(w) => w.dim(),
            Self::Prepacked(w) => w.dim(),
        }
    }
}

impl<'a, T> From<ArrayView2<'a, T>> for Factor<'a, T> {
    fn from(w: ArrayView2<'a, T>) -> Self {
        Self::Plain(w)
    }
}

impl<T: Real> Kernels<T> {
    /// How many columns a block of the product of so many rows with `w` should have for so many threads. No bit depends on
    /// it.
    pub(crate) fn block_columns(&self, w: &Factor<'_, T>, rows: usize, threads: usize) -> usize {
        let most = match (rows, w) {
            (rows, _) if rows <= self.few_rows => FEW_ROWS_COLUMNS,
            (rows, Factor::Prepacked(_)) if rows <= SOME_ROWS => return PREPACKED_COLUMNS,
            (rows, Factor::Plain(_)) if rows <= SOME_ROWS => STRIP,
            _ => BLOCK_COLUMNS,
        };
        w.dim().1.div_ceil(threads.max(1)).next_multiple_of(PANEL).clamp(BLOCK_COLUMNS, most)
    }

    /// Up to how many rows inner products are the fastest way to multiply with a transposed `w`.
    fn inner_rows(&self, terms: usize) -> usize {
        self.few_rows.max(INNER_ROWS.min(terms / TERMS_PER_INNER_ROW))
    }

    /// Elements of scratch for the operands of a block of so many rows, columns and terms: packed columns and their part of
    /// `x`, or all of the few rows whose inner products are taken, or what a matrix unit multiplies.
    fn operand_scratch(&self, rows: usize, columns: usize, terms: usize) -> usize {
        let few = if rows <= INNER_ROWS { rows * terms } else { 0 };
        let split = if self.matrix.is_some() { matrix_scratch(rows, columns, terms) } else { 0 };
        few.max(strip_len(columns, terms.min(DEPTH)) + DEPTH.min(terms) * rows).max(split)
    }

    /// Elements of scratch for blocks of `out` of up to `rows` rows and `columns` columns: the operands, and the block
    /// itself where it may have to be copied.
    pub(crate) fn block_scratch(&self, out: &ArrayViewMut2<'_, T>, rows: usize, columns: usize, terms: usize) -> usize {
        let (rows, columns) = (rows.min(out.nrows()), columns.min(out.ncols()));
        self.operand_scratch(rows, columns, terms) + if has_rows(out) { 0 } else { rows * columns }
    }

    /// What computes a product, if that is not left to the multipliers. Decided by the whole of both operands, because the
    /// unit adds in another order: the cut must not choose.
    fn unit_for(&self, linear: &Linear<'_, T>) -> Option<&Matrix<T>> {
        let (terms, columns) = linear.w.dim();
        let enough = linear.x.nrows() >= UNIT_FROM_ROWS && terms >= UNIT_FROM_TERMS && columns >= PANEL;
        self.matrix.as_ref().filter(|_| enough)
    }

    /// Whether a matrix unit computes a product.
    pub(crate) fn has_unit_for(&self, linear: &Linear<'_, T>) -> bool {
        self.unit_for(linear).is_some()
    }

    /// `out (+)= x[rows] w[:, columns] + bias[columns]`; `out` is `[rows, columns]` with any strides, and is read only if
    /// it is added to. The columns begin with a panel of `w`.
    ///
    /// `scratch` grows to [`Kernels::block_scratch`] elements at most and can be used again.
    pub(crate) fn linear_block(
        &self,
        linear: &Linear<'_, T>,
        rows: Range<usize>,
        columns: Range<usize>,
        mut out: ArrayViewMut2<'_, T>,
        scratch: &mut Vec<T>,
    ) {
        let x = linear.x.slice_move(s![rows, ..]);
        let start = linear.start;
        let bias = linear.bias.map(|bias| bias.slice_move(s![columns.clone()]));
        assert_eq!((x.ncols(), out.dim()), (linear.w.dim().0, (x.nrows(), columns.len())), "shapes of a block");
        if out.is_empty() {
            return;
        }
        let copied = if has_rows(&out) { 0 } else { out.len() };
        let operands = self.operand_scratch(x.nrows(), columns.len(), x.ncols());
        let (operands, copy) = aligned(scratch, operands + copied).split_at_mut(operands);
        let form = |out: ArrayViewMut2<'_, T>, start| match (self.unit_for(linear), linear.w) {
            (Some(unit), Factor::Prepacked(w)) => {
                let w = Columns::Prepacked(w, columns.start);
                self.matrix_tiles(unit, x, w, out, start, operands);
            }
            (Some(unit), Factor::Plain(w)) => {
                let w = Columns::Plain(w.slice_move(s![.., columns]));
                self.matrix_tiles(unit, x, w, out, start, operands);
            }
            (None, Factor::Prepacked(w)) => self.prepacked_tiles(x, w, columns, out, start, operands),
            (None, Factor::Plain(w)) => {
                // Decided by the whole of both, because inner products add in another order too.
                let inner = linear.x.nrows() <= self.inner_rows(w.nrows()) && is_turned(&w);
                let w = w.slice_move(s![.., columns]);
                if inner {
                    self.inner_products(x, w, out, start, operands);
                } else {
                    self.tiles(x, w, out, start, operands);
                }
            }
        };
        if copied == 0 {
            let start = begin(&mut out, bias, start);
            return form(out, start);
        }
        let Ok(mut copy) = ArrayViewMut2::from_shape(out.dim(), copy) else {
            debug_assert!(false, "the copy was made as long as the block");
            return;
        };
        if start == Start::Add {
            copy.assign(&out);
        }
        let start = begin(&mut copy, bias, start);
        form(copy.view_mut(), start);
        out.assign(&copy);
    }

    /// Few rows and a transposed `w`, for an output whose rows are contiguous.
    fn inner_products(
        &self,
        x: ArrayView2<'_, T>,
        w: ArrayView2<'_, T>,
        mut out: ArrayViewMut2<'_, T>,
        start: Start,
        scratch: &mut [T],
    ) {
        let x = if is_unit(&x, 1) && is_forward(&x) { x } else { self.contiguous(x, scratch) };
        let [a_row, c_row] = [x.strides()[0], out.strides()[0]].map(isize::unsigned_abs);
        let b_row = w.strides()[1].unsigned_abs();
        // A few columns of `w` at a time, which stay in the cache until the last group of rows has met them.
        for columns in chunks(0..w.ncols(), INNER_COLUMNS) {
            for rows in chunks(0..x.nrows(), MAX_DOT_ROWS) {
                // SAFETY: `rows` are 1 to 3 rows of `x` and `out`, contiguous both; the columns of `w` are contiguous
                // (checked by the caller), and all strides are from 0 on.
                unsafe {
                    (self.dots)(&Dots {
                        rows: rows.len(),
                        n: columns.len(),
                        k: w.nrows(),
                        a: x.as_ptr().add(rows.start * a_row),
                        a_row,
                        b: w.as_ptr().add(columns.start * b_row),
                        b_row,
                        c: out.as_mut_ptr().add(rows.start * c_row + columns.start),
                        c_row,
                        start,
                    });
                }
            }
        }
    }

    /// Everything else, for an output whose rows are contiguous.
    fn tiles(
        &self,
        x: ArrayView2<'_, T>,
        w: ArrayView2<'_, T>,
        mut out: ArrayViewMut2<'_, T>,
        mut start: Start,
        scratch: &mut [T],
    ) {
        let (depth, columns) = w.dim();
        if depth == 0 && start == Start::Zero {
            out.fill(T::zero());
        }
        // The micro-kernel reads to the end of a panel, so the columns of a last, partial one are packed in any case.
        let few = x.nrows() <= self.few_rows && is_unit(&w, 1) && is_forward(&w);
        let streamed = if few { columns / PANEL * PANEL } else { 0 };

        for terms in chunks(0..depth, self.depth) {
            let (strip, copy) = scratch.split_at_mut(strip_len(columns, depth.min(DEPTH)));
            let mut x = self.broadcast_operand(x.slice_move(s![.., terms.clone()]), columns, copy);
            let w = w.slice_move(s![terms, ..]);
            if streamed > 0 {
                let b = Panels { data: w.as_ptr(), panel: PANEL, k: w.strides()[0].unsigned_abs() };
                // SAFETY: `x` has strides from 0 on (`broadcast_operand`), `w` too (`few`), and `streamed` whole panels.
                unsafe { self.product(&mut x, b, self.streams, None, out.slice_mut(s![.., ..streamed]), start) };
            }
            for range in chunks(streamed..columns, STRIP) {
                let b = self.pack_strip(w.slice(s![.., range.clone()]), strip);
                // SAFETY: `x` has strides from 0 on (`broadcast_operand`), and the strip is packed to whole panels.
                unsafe { self.product(&mut x, b, DEPTH, None, out.slice_mut(s![.., range]), start) };
            }
            start = Start::Add;
        }
    }

    /// `x` as the micro-kernel can walk it.
    pub(super) fn broadcast_operand<'a>(
        &self,
        x: ArrayView2<'a, T>,
        columns: usize,
        copy: &'a mut [T],
    ) -> Broadcast<'a, T> {
        // Too few columns do not pay for a copy.
        let worth_it = x.nrows() > self.few_rows && columns > NARROW;
        let (rows, turned) = (is_unit(&x, 1), is_unit(&x, 0));
        if is_forward(&x) && rows {
            let apart = x.strides()[0].unsigned_abs() * size_of::<T>();
            let group = if worth_it && apart.is_multiple_of(PAGE) { x.nrows().min(MAX_ROWS) * x.ncols() } else { 0 };
            return Broadcast { x, copy: &mut copy[..group], fetch: worth_it };
        }
        let x = if is_forward(&x) && turned && !worth_it {
            x
        } else if turned && !rows {
            // A turned matrix is walked turned: its copy moves whole rows of what is stored.
            self.contiguous(x.reversed_axes(), copy).reversed_axes()
        } else {
            self.contiguous(x, copy)
        };
        Broadcast { x, copy: &mut [], fetch: false }
    }

    /// A copy with contiguous rows.
    pub(super) fn contiguous<'a>(&self, x: ArrayView2<'a, T>, copy: &'a mut [T]) -> ArrayView2<'a, T> {
        let copy = &mut copy[..x.len()];
        self.pack_scaled(x, T::one(), copy);
        // Cannot fail: the slice has as many elements as the shape.
        ArrayView2::from_shape(x.dim(), copy).unwrap_or(x)
    }

    /// At most `DEPTH` rows and `STRIP` columns of `w` in panels.
    pub(super) fn pack_strip(&self, w: ArrayView2<'_, T>, strip: &mut [T]) -> Panels<T> {
        let panel = if is_unit(&w, 1) {
            let panel = strip_panel(w.nrows());
            self.pack_columns(w, panel, strip);
            panel
        } else {
            self.pack_panels(w.reversed_axes(), strip);
            w.nrows() * PANEL
        };
        Panels { data: strip.as_ptr(), panel, k: PANEL }
    }

    /// `out (+)= a b`, so many terms at a time, each by groups of rows. The last of them ask memory for `next`, which is
    /// as large as `b`.
    ///
    /// # Safety
    /// No stride of `a` is negative, and its rows or its columns are contiguous. `b` has as many rows as `a` has columns
    /// and is readable up to the last column of `out`, rounded up to a whole panel. The rows of `out` are contiguous, one
    /// after the other.
    pub(super) unsafe fn product(
        &self,
        a: &mut Broadcast<'_, T>,
        b: Panels<T>,
        together: usize,
        next: Option<Panels<T>>,
        mut out: ArrayViewMut2<'_, T>,
        mut start: Start,
    ) {
        let Broadcast { x: a, copy, fetch } = a;
        let (rows, n) = out.dim();
        // Groups of nearly equal size: one row alone would leave the multipliers waiting for each other.
        let groups = rows.div_ceil(MAX_ROWS);
        let share = groups.min(FETCHING_GROUPS);
        let [row, column] = [0, 1].map(|axis| a.strides()[axis].unsigned_abs());
        let a_stride = if is_unit(a, 1) { Stride::Rows(row) } else { Stride::Columns(column) };
        let c_row = out.strides()[0].unsigned_abs();
        for terms in chunks(0..a.ncols(), together) {
            for group in 0..groups {
                let (first, end) = (rows * group / groups, rows * (group + 1) / groups);
                let (mut from, mut a_stride) = (a.as_ptr().wrapping_add(first * row + terms.start * column), a_stride);
                if !copy.is_empty() {
                    self.pack_scaled(a.slice(s![first..end, terms.clone()]), T::one(), copy);
                    (from, a_stride) = (copy.as_ptr(), Stride::Rows(terms.len()));
                }
                if *fetch {
                    // The next group comes after the product of this one: time enough.
                    Upcoming::new(a.slice(s![end..rows.min(end + MAX_ROWS), terms.clone()])).fetch(0, 1);
                }
                let ahead = match next {
                    // One row waits for its own weights.
                    Some(next) if group + share >= groups && rows > 1 => {
                        let part = (group + share - groups) * (n * terms.len() / share);
                        Ahead { from: next.data.wrapping_add(part).cast(), share }
                    }
                    _ => Ahead::NOTHING,
                };
                // SAFETY: first..end are 1 to 6 rows of `a` and `out`, whose strides are theirs, and the terms are columns
                // of `a`, or all of a copy; `b` by the contract.
                unsafe {
                    (self.tile)(&Tile {
                        rows: end - first,
                        n,
                        k: terms.len(),
                        a: from,
                        a_stride,
                        b: b.data.add(terms.start * b.k),
                        b_panel: b.panel,
                        b_k: b.k,
                        c: out.as_mut_ptr().add(first * c_row),
                        c_row,
                        start,
                        ahead,
                    });
                }
            }
            start = Start::Add;
        }
    }
}

/// Puts the bias into `out`, if there is one, and says what the sums begin with.
fn begin<T: Real>(out: &mut ArrayViewMut2<'_, T>, bias: Option<ArrayView1<'_, T>>, start: Start) -> Start {
    let Some(bias) = bias else { return start };
    match start {
        Start::Zero => out.assign(&bias),
        Start::Add => out.zip_mut_with(&bias, |y, &b| *y = *y + b),
    }
    Start::Add
}

/// The operand whose numbers are broadcast, for some of the terms.
pub(super) struct Broadcast<'a, T> {
    /// With strides from 0 on, and contiguous rows or columns.
    x: ArrayView2<'a, T>,
    /// Room for a group of its rows, if they are to be copied before they are used.
    copy: &'a mut [T],
    /// Whether groups ask memory for the next one.
    fetch: bool,
}

impl<'a, T> Broadcast<'a, T> {
    /// One that is read where it is.
    pub(super) fn of(x: ArrayView2<'a, T>) -> Self {
        Self { x, copy: &mut [], fetch: false }
    }
}

/// Columns in panels of 16, as `tile.rs` describes `b`.
#[derive(Clone, Copy)]
pub(super) struct Panels<T> {
    pub(super) data: *const T,
    pub(super) panel: usize,
    pub(super) k: usize,
}

/// A range in pieces of `size`, the last one shorter.
pub(super) fn chunks(range: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> + Clone {
    range.clone().step_by(size).map(move |start| start..range.end.min(start + size))
}

/// Whether neighbours along an axis are neighbours in memory; an axis of length 1 has no neighbours.
pub(super) fn is_unit<T>(view: &ArrayView2<'_, T>, axis: usize) -> bool {
    view.len_of(Axis(axis)) <= 1 || view.strides()[axis] == 1
}

/// Whether this is the transpose of contiguous rows that run forwards, and not contiguous rows as well: a single row or column
/// counts as stored row by row.
fn is_turned<T>(view: &ArrayView2<'_, T>) -> bool {
    let (rows, columns) = view.dim();
    rows > 1 && columns > 1 && is_unit(view, 0) && is_forward(view)
}

/// Whether no axis runs backwards.
pub(super) fn is_forward<T>(view: &ArrayView2<'_, T>) -> bool {
    (0..2).all(|axis| view.len_of(Axis(axis)) <= 1 || view.strides()[axis] >= 0)
}

/// Whether the rows are contiguous and run forwards.
fn has_rows<T>(out: &ArrayViewMut2<'_, T>) -> bool {
    is_unit(&out.view(), 1) && is_forward(&out.view())
}

#[cfg(test)]
#[path = "gemm_tests.rs"]
mod tests;
