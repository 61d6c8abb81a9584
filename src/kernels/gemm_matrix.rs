//! Projections of many rows by a matrix unit, as `matrix.rs` describes it.
//!
//! ```text
//! out[i][j] (+)= Σ_d Σ_t x[i][d + t] w[d + t][j]       d = 0, 512 ..., each sum over t < 512 by the unit
//! ```
//!
//! For each 512 terms, up to 256 rows of `x` are split and stay in the second-level cache, and two panels of `w` at a time meet
//! them all. While they do, the next two are split, and the lines of the output that come next are asked for: the unit needs
//! no vectors, but where sums are stored to memory that is not there it waits (17 % of the time for 512 x 512 x 512). The panels
//! are read where they are, unless `w` is stored transposed; weights that were packed beforehand have been split too. The split
//! panels of a strip are kept if other rows follow.
//!
//! One thread of a shared Emerald Rapids, GFLOP/s (best of interleaved rounds), AVX-512 and this, `w` and packed beforehand;
//! blocks of 512 columns. The unit alone does 530 to 550 with numbers that are not zero:
//!
//! | rows x in x out | AVX-512, w | this, w | AVX-512, packed | this, packed |
//! | --- | --- | --- | --- | --- |
//! | 2048 x 512 x 512 | 224 | 396 | 222 | 415 |
//! | 1024 x 768 x 768 | 216 | 365 | 211 | 389 |
//! | 512 x 512 x 512 | 221 | 342 | 225 | 394 |
//! | 128 x 1024 x 1024 | 196 | 273 | 217 | 397 |
//! | 64 x 1024 x 1024 | 171 | 228 | 217 | 336 |
//!
//! What is split is written three lines for two that are read, to the second-level cache, whose bandwidth the unit's loads
//! need as well: 0.3 ns for a number of `w`. It changed nothing to split row by row of `w` before, to ask for the lines that
//! are read or written, or to load the unit's operands ahead to the first-level cache.
//!
//! What the unit does not multiply as exactly as the multipliers would (`Extent`) is left to them: for those terms, a row of
//! `x` with such a number, and a panel of `w` with one, whatever the others hold. So a NaN stays in its row or column.

use super::PANEL;
use super::beside::{Coming, PanelRun, Work};
use super::gemm::{Broadcast, Panels, chunks, is_forward, is_unit, strip_len};
use super::matrix::{
    Matrix, Multiply, PRODUCTS, Session, SplitRows, TOGETHER, UNIT_ROWS, split_panel_len, split_rows_len, steps,
};
use super::prepacked::Prepacked;
use super::real::Real;
use super::table::Kernels;
use super::tile::Start;
use ndarray::{ArrayView2, ArrayViewMut2, s};
use std::ops::Range;

/// Terms of a sum that the unit adds up before the next ones. With 256 the sums go to memory twice as often (0.92 of the rate),
/// and 1024 leave room for fewer rows.
pub(super) const SPLIT_TERMS: usize = 512;

/// Rows of `x` that are split before they meet the panels: with 512 terms 768 KiB. (384 rows have 0.93 of the rate, 512 have 0.8,
/// and 128 take more time to split panels.)
const ROWS: usize = 256;

/// Columns whose split panels are kept for more than [`ROWS`] rows.
const STRIP: usize = 512;

/// What `x` is multiplied with.
#[derive(Clone, Copy)]
pub(super) enum Columns<'a, T> {
    Plain(ArrayView2<'a, T>),
    /// From a column on that begins a panel.
    Prepacked(&'a Prepacked<T>, usize),
}

/// Working memory, which other terms, rows or panels overwrite.
struct Room<'s, T> {
    /// Split rows, piece by piece.
    rows: &'s mut [T],
    /// Rows of a piece as they are.
    copy: &'s mut [T],
    /// Split panels.
    panels: &'s mut [T],
    /// Panels to be split, if they cannot be read where they are.
    strip: &'s mut [T],
    /// Panels for the multipliers.
    spare: &'s mut [T],
    /// A piece of the output that ends in the middle of a panel.
    edge: &'s mut [T],
}

/// The parts of [`Room`], for blocks of so many rows, columns and terms.
fn lens(rows: usize, columns: usize, terms: usize) -> [usize; 6] {
    let terms = terms.min(SPLIT_TERMS);
    let kept = if rows > ROWS { STRIP } else { 2 * TOGETHER * PANEL };
    let pieces = rows.min(ROWS).div_ceil(UNIT_ROWS);
    [
        pieces * split_rows_len(UNIT_ROWS, terms),
        UNIT_ROWS * terms.next_multiple_of(PANEL),
        columns.min(kept).div_ceil(PANEL) * split_panel_len(terms),
        strip_len(TOGETHER * PANEL, terms),
        strip_len(TOGETHER * PANEL, terms),
        UNIT_ROWS * TOGETHER * PANEL,
    ]
}

/// Elements of scratch for the operands of a block.
pub(super) fn matrix_scratch(rows: usize, columns: usize, terms: usize) -> usize {
    lens(rows, columns, terms).iter().sum()
}

impl<'s, T> Room<'s, T> {
    fn new(scratch: &'s mut [T], [rows, copy, panels, strip, spare, edge]: [usize; 6]) -> Self {
        let (rows, scratch) = scratch.split_at_mut(rows);
        let (copy, scratch) = scratch.split_at_mut(copy);
        let (panels, scratch) = scratch.split_at_mut(panels);
        let (strip, scratch) = scratch.split_at_mut(strip);
        let (spare, scratch) = scratch.split_at_mut(spare);
        Room { rows, copy, panels, strip, spare, edge: &mut scratch[..edge] }
    }
}

impl<T: Real> Kernels<T> {
    /// `out (+)= x w`, for an output whose rows are contiguous.
    pub(super) fn matrix_tiles(
        &self,
        matrix: &Matrix<T>,
        x: ArrayView2<'_, T>,
        w: Columns<'_, T>,
        mut out: ArrayViewMut2<'_, T>,
        mut start: Start,
        scratch: &mut [T],
    ) {
        let depth = x.ncols();
        if depth == 0 && start == Start::Zero {
            out.fill(T::zero());
        }
        let mut room = Room::new(scratch, lens(x.nrows(), out.ncols(), depth));
        let mut session = Session::new(matrix);
        let x_rows = x.nrows();
        for terms in chunks(0..depth, SPLIT_TERMS) {
            let mut held = None;
            for strip in chunks(0..out.ncols(), STRIP) {
                let w = match &w {
                    Columns::Plain(w) => Columns::Plain(w.slice(s![terms.clone(), strip.clone()])),
                    Columns::Prepacked(w, first) => Columns::Prepacked(w, first + strip.start),
                };
                let mut panels_fit = [true; STRIP / PANEL];
                for (index, rows) in chunks(0..x.nrows(), ROWS).enumerate() {
                    let x = x.slice(s![rows.clone(), terms.clone()]);
                    // Not again if there is nothing else in the room.
                    let fits = match held {
                        Some((start, fits)) if start == rows.start => fits,
                        _ => self.split_rows_of(matrix, x, &mut room),
                    };
                    held = Some((rows.start, fits));
                    let part = Part {
                        kernels: self,
                        matrix,
                        x,
                        fits,
                        w: &w,
                        terms: terms.clone(),
                        keep: x_rows > ROWS,
                        split: index > 0,
                        start,
                    };
                    part.run(&mut session, out.slice_mut(s![rows, strip.clone()]), &mut panels_fit, &mut room);
                }
            }
            start = Start::Add;
        }
    }

    /// Splits up to [`ROWS`] rows, and says which of each piece the unit may multiply.
    fn split_rows_of(&self, matrix: &Matrix<T>, x: ArrayView2<'_, T>, room: &mut Room<'_, T>) -> Fits {
        let mut fits = [0; ROWS / UNIT_ROWS];
        let terms = x.ncols();
        let piece_len = split_rows_len(UNIT_ROWS, terms);
        for ((rows, to), fits) in
            chunks(0..x.nrows(), UNIT_ROWS).zip(room.rows.chunks_exact_mut(piece_len)).zip(&mut fits)
        {
            let x = x.slice(s![rows, ..]);
            let rows = x.nrows();
            let (from, from_row, from_next) = if is_unit(&x, 1) && is_forward(&x) {
                (x.as_ptr(), x.strides()[0].unsigned_abs(), PANEL)
            } else if is_unit(&x, 0) {
                // Whole rows of what is stored become lanes: 16 terms of all rows, then the next 16.
                self.pack_panels(x.reversed_axes(), room.copy);
                (room.copy.as_ptr(), PANEL, rows * PANEL)
            } else {
                (self.contiguous(x, room.copy).as_ptr(), terms, PANEL)
            };
            let shape =
                SplitRows { rows, terms, from, from_row, from_next, to: to.as_mut_ptr(), to_part: UNIT_ROWS * PANEL };
            // SAFETY: the rows are some of `x` or of their copy, and the target is a piece of as many rows or more.
            *fits = unsafe { !(matrix.split_rows)(&shape) };
        }
        fits
    }
}

/// Which rows of each piece fit the unit.
type Fits = [u32; ROWS / UNIT_ROWS];

/// Some rows of `x` and some terms of their products with all columns.
struct Part<'a, 'w, T: 'static> {
    kernels: &'a Kernels<T>,
    matrix: &'a Matrix<T>,
    /// `[rows, terms]`
    x: ArrayView2<'a, T>,
    fits: Fits,
    /// The terms and columns of a strip.
    w: &'a Columns<'w, T>,
    terms: Range<usize>,
    /// Whether other rows come, for which the split panels are kept.
    keep: bool,
    /// Whether the panels have been split for other rows.
    split: bool,
    start: Start,
}

impl<T: Real> Part<'_, '_, T> {
    /// A few panels at a time meet all rows, while the next ones are split.
    fn run(
        &self,
        session: &mut Session<'_, T>,
        mut out: ArrayViewMut2<'_, T>,
        panels_fit: &mut [bool; STRIP / PANEL],
        room: &mut Room<'_, T>,
    ) {
        let to = room.panels.as_mut_ptr();
        let groups = chunks(0..out.ncols(), TOGETHER * PANEL);
        let mut next_groups = groups.clone();
        let mut coming = Coming::NOTHING;
        self.come(&mut coming, next_groups.next(), to, room.strip);
        for columns in groups {
            // SAFETY: as written in `come`: what it reads and writes has not been touched since.
            unsafe { (self.matrix.finish)(Work::Split(&mut coming)) };
            for (index, panel) in (columns.start / PANEL..).take(coming.count()).enumerate() {
                panels_fit[panel] = coming.extent(index).fits();
            }
            self.come(&mut coming, next_groups.next(), to, room.strip);
            let mut panels = chunks(columns.clone(), PANEL).map(|columns| self.panel(columns.start, to, panels_fit));
            if panels.clone().all(|(_, fits)| fits) {
                if let Some(first) = panels.next() {
                    self.meet(session, first, columns, &mut out, room, &mut coming);
                }
                continue;
            }
            for (columns, panel) in chunks(columns, PANEL).zip(panels) {
                self.meet(session, panel, columns, &mut out, room, &mut coming);
            }
        }
    }

    /// A split panel, `split` being where the first one would be if none was split beforehand; and whether it fits.
    fn panel(&self, column: usize, split: *const T, fit: &[bool; STRIP / PANEL]) -> (*const T, bool) {
        match self.w {
            Columns::Prepacked(w, first) => w.split_panel(&self.terms, first + column),
            Columns::Plain(_) => {
                let panel = column / PANEL;
                (split.wrapping_add(self.place(panel)), fit[panel])
            }
        }
    }

    /// Where a panel is split to. If no other rows come, it is needed once, and the one after the next takes its place.
    fn place(&self, panel: usize) -> usize {
        (if self.keep { panel } else { panel % (2 * TOGETHER) }) * split_panel_len(self.terms.len())
    }

    /// Names the panels to be split to their place after `to`, where the first of all is; there are none if that was done
    /// before. They are copied to `strip` if they cannot be read where they are.
    fn come(&self, coming: &mut Coming<T>, columns: Option<Range<usize>>, to: *mut T, strip: &mut [T]) {
        coming.clear();
        let Some(columns) = columns else { return };
        let terms = self.terms.len();
        let products = self.x.nrows().div_ceil(UNIT_ROWS) * steps(terms) * PRODUCTS;
        let w = match self.w {
            Columns::Plain(w) if !self.split => w.slice(s![.., columns.clone()]),
            _ => {
                let (from, _) = self.panel(columns.start, to, &[true; STRIP / PANEL]);
                let count = columns.len().div_ceil(PANEL);
                return coming.fetch(from, count * split_panel_len(terms), products);
            }
        };
        let (from, from_row, from_panel) = if is_unit(&w, 1) && is_forward(&w) {
            (w.as_ptr(), w.strides()[0].unsigned_abs(), PANEL)
        } else {
            let Panels { data, panel, k } = self.kernels.pack_strip(w, strip);
            (data, k, panel)
        };
        let to = to.wrapping_add(self.place(columns.start / PANEL));
        for (index, columns) in chunks(columns, PANEL).enumerate() {
            let (from, to) = (from.wrapping_add(index * from_panel), to.wrapping_add(index * split_panel_len(terms)));
            // SAFETY: the terms and columns of `w`, or of a copy in `strip`, stay readable until the next panels come, and there
            // is room for so many panels from `to` on (`lens`).
            unsafe {
                coming.push(PanelRun { terms, columns: columns.len(), from, from_row, from_panel: 0, to, to_panel: 0 });
            }
        }
        coming.pace = coming.lines().div_ceil(products);
    }

    /// The products of all rows with some columns.
    fn meet(
        &self,
        session: &mut Session<'_, T>,
        (b, fits): (*const T, bool),
        columns: Range<usize>,
        out: &mut ArrayViewMut2<'_, T>,
        room: &mut Room<'_, T>,
        coming: &mut Coming<T>,
    ) {
        let terms = self.terms.len();
        let mut product = Multiply {
            rows: 0,
            panels: columns.len().div_ceil(PANEL),
            steps: steps(terms),
            a: room.rows.as_ptr(),
            a_part: UNIT_ROWS * PANEL,
            b,
            b_panel: split_panel_len(terms),
            c: out.as_mut_ptr().wrapping_add(columns.start),
            c_row: out.strides()[0].unsigned_abs(),
            start: self.start,
        };
        let (a, c) = (product.a, product.c);
        let whole = columns.len().is_multiple_of(PANEL);
        for (piece, rows) in chunks(0..self.x.nrows(), UNIT_ROWS).enumerate() {
            for (run, fits) in runs(if fits { self.fits[piece] } else { 0 }, rows.len()) {
                let rows = rows.start + run.start..rows.start + run.end;
                if !fits {
                    self.by_multipliers(rows, columns.clone(), out, room);
                    continue;
                }
                product.rows = rows.len();
                product.a = a.wrapping_add(piece * split_rows_len(UNIT_ROWS, terms) + run.start * PANEL);
                if !whole {
                    self.end_of_rows(session, &product, out.slice_mut(s![rows, columns.clone()]), room.edge);
                    continue;
                }
                product.c = c.wrapping_add(rows.start * product.c_row);
                // SAFETY: so many rows of a piece have been split, and so many panels; the rows of `out` are contiguous, have
                // the columns, and nobody else has them. The panels to come are as `come` says.
                unsafe {
                    session.multiply_beside(&product, Work::Split(coming));
                }
            }
        }
    }

    /// A product whose last panel goes beyond the columns of `out`, by a copy of that.
    fn end_of_rows(
        &self,
        session: &mut Session<'_, T>,
        product: &Multiply<T>,
        mut out: ArrayViewMut2<'_, T>,
        edge: &mut [T],
    ) {
        let c_row = product.panels * PANEL;
        if self.start == Start::Add {
            for (edge, out) in edge.chunks_exact_mut(c_row).zip(out.rows()) {
                edge.iter_mut().zip(out).for_each(|(edge, &out)| *edge = out);
            }
        }
        // SAFETY: as in `meet`, and there is room for the panels of a whole piece. What lies beyond the columns stays there.
        unsafe { session.multiply(&Multiply { c: edge.as_mut_ptr(), c_row, ..*product }) };
        for (edge, out) in edge.chunks_exact(c_row).zip(out.rows_mut()) {
            out.into_iter().zip(edge).for_each(|(out, &edge)| *out = edge);
        }
    }

    /// A product whose numbers do not fit.
    fn by_multipliers(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        out: &mut ArrayViewMut2<'_, T>,
        room: &mut Room<'_, T>,
    ) {
        let Self { kernels, terms, .. } = self;
        let mut start = self.start;
        for part in chunks(terms.clone(), kernels.depth) {
            let x = self.x.slice(s![rows.clone(), part.start - terms.start..part.end - terms.start]);
            let walkable = is_forward(&x) && (is_unit(&x, 0) || is_unit(&x, 1));
            let x = if walkable { x } else { kernels.contiguous(x, room.copy) };
            let b = match self.w {
                Columns::Prepacked(w, first) => w.panels(&part, first + columns.start),
                Columns::Plain(w) => {
                    let part = part.start - terms.start..part.end - terms.start;
                    kernels.pack_strip(w.slice(s![part, columns.clone()]), room.spare)
                }
            };
            let out = out.slice_mut(s![rows.clone(), columns.clone()]);
            // SAFETY: `x` has strides from 0 on, and the panels hold the terms and the columns.
            unsafe { kernels.product(&mut Broadcast::of(x), b, part.len(), None, out, start) }
            start = Start::Add;
        }
    }
}

/// Rows that fit, and such that do not, in turn.
fn runs(fits: u32, rows: usize) -> impl Iterator<Item = (Range<usize>, bool)> {
    let mut start = 0;
    std::iter::from_fn(move || {
        let first = start;
        let fit = fits >> first.min(UNIT_ROWS - 1) & 1 == 1;
        let others = if fit { !fits } else { fits } >> first.min(UNIT_ROWS - 1);
        start = rows.min(first + others.trailing_zeros() as usize);
        (first < rows).then_some((first..start, fit))
    })
}

#[cfg(test)]
#[path = "gemm_matrix_tests.rs"]
mod tests;
