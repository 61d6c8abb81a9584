//! Many rows meet a tile of keys by the matrix unit: what `rows.rs` and `step.rs` do with multiply-adds.
//!
//! ```text
//! split     q, keys, values -> three bf16 for each number       once for all that they meet, see `matrix.rs`
//! scores    p = q keys^T                                        by the unit, 32 rows at a time
//! softmax   p, m, l = softmax step                              see `softmax.rs`
//! split     p -> three bf16
//! values    o += p values                                       by the unit
//! ```
//!
//! A block of 32 rows after the other: its scores and weights stay in the first-level cache. Where all rows see all keys, the
//! softmax of a block goes beside the products of its neighbours, row by row, see `weighing.rs`:
//!
//! ```text
//! scores 0 | values -1, scores 1 | values 0, scores 2 | ...      the unit
//!          | softmax 0           | softmax 1          | ...      beside it
//! ```
//!
//! Elsewhere one comes after the other. But the unit must not wait for long: after some 200 nanoseconds without a product it
//! has to be woken, for 300 more, which is a seventh of the time of a block. So it is given one, whose result nobody wants, from
//! time to time.
//!
//! What a row gets does not depend on the rows beside it: each of its products is made by the unit if its tile of keys and
//! the row itself fit (see `matrix.rs`), else by multiply-adds.

use super::dropout::Into;
use super::matrix::{
    Extent, Matrix, Multiply, STEP, Session, SplitRows, UNIT_ROWS, split_panel_len, split_rows_len, steps,
};
use super::matrix_unit::MatrixUnit;
use super::operand::Operand;
use super::real::Real;
use super::returning::OnTheWay;
use super::rows::RowsScoring;
use super::softmax::Softmax;
use super::splitting::{SplitTile, Splitting};
use super::step::{Group, KeyTile, Queries, extent};
use super::table::Kernels;
use super::tile::{MAX_ROWS, Start};
use super::{KEYS, PANEL};
use std::ops::Range;
use std::ptr;

/// Calls with fewer rows to a KV head, or fewer of their numbers, are computed by multiply-adds: what has to be split for them
/// takes longer than it saves. Time by the unit over that by multiply-adds, 96 to 192 heads on two threads of an Emerald Rapids:
/// 1.12, 1.06, 0.92 and 0.92 for 64, 96, 128 and 160 queries and keys of 64 numbers; 0.91 for 64 of 128 numbers, but 1.06 with
/// the way back.
const FEWEST_UNIT_ROWS: usize = 128;
const FEWEST_UNIT_NUMBERS: usize = 128 * 64;

/// The fewest rows where the unit was asked for by name: a block of it.
const FEWEST_NAMED_ROWS: usize = UNIT_ROWS;

/// Numbers of scores of a block, and of its split weights.
pub(super) const SCORES: usize = UNIT_ROWS * KEYS;
pub(super) const WEIGHTS: usize = split_rows_len(UNIT_ROWS, KEYS);

/// Numbers of scores and of split weights that a walk by the unit needs room for: of two blocks.
pub(crate) const UNIT_SCORES: usize = 2 * SCORES;
pub(crate) const UNIT_WEIGHTS: usize = 2 * WEIGHTS;

/// The fewest rows whose softmax goes beside products: the first and the last block have no neighbour. Time with it over that
/// without, heads of 64 numbers on two threads of an Emerald Rapids: 0.95, 0.97, 0.92 and 0.92 for items of 128, 256, 512 and 1024
/// rows, and 0.97 for runs of 128 rows between those that a mask hides.
const FEWEST_BESIDE: usize = 4 * UNIT_ROWS;

/// Rows whose softmax is one call, so that the unit stays awake; or [`MAX_ROWS`], for which biases are told.
const MOST_TOGETHER: usize = 8;

/// Split queries, from the first row of a group on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitQueries<'a, T> {
    numbers: &'a [T],
    /// Of all that were split together.
    rows: usize,
    first: usize,
    /// Whether the unit may multiply all of them.
    fit: bool,
}

impl<'a, T> SplitQueries<'a, T> {
    /// The first of `rows` rows that were split to these numbers, and whether they fit the unit.
    pub(crate) fn new(numbers: &'a [T], rows: usize, fit: bool) -> Self {
        Self { numbers, rows, first: 0, fit }
    }

    /// Whether the unit may multiply all of them.
    pub(crate) fn fit(&self) -> bool {
        self.fit
    }

    /// The same from another row on.
    pub(crate) fn from(self, row: usize) -> Self {
        Self { first: self.first + row, ..self }
    }
}

/// Rows and the panels of a tile of keys, as they are and split.
#[derive(Clone, Debug)]
pub(crate) struct SplitFactors<'a, T> {
    /// `[rows][q_row]`, of which `head_dim` elements are used.
    pub(crate) q: &'a [T],
    pub(crate) q_row: usize,
    pub(crate) head_dim: usize,
    pub(crate) queries: SplitQueries<'a, T>,
    pub(crate) panels: Range<usize>,
    /// `[panels][head_dim][16]`
    pub(crate) keys: &'a [T],
    pub(crate) split: &'a [T],
}

impl<T: Real> Kernels<T> {
    /// Whether calls with so many rows to a KV head are computed by the unit; `named` says that the caller named the level.
    pub(crate) fn uses_unit(&self, rows: usize, head_dim: usize, named: bool) -> bool {
        let enough = rows >= FEWEST_UNIT_ROWS && rows.saturating_mul(head_dim) >= FEWEST_UNIT_NUMBERS;
        self.matrix.is_some() && (enough || named && rows >= FEWEST_NAMED_ROWS)
    }

    /// The first `head_dim` numbers of `rows` rows that begin `q_row` apart, split into the first numbers of `to`.
    pub(crate) fn split_queries<'s>(
        &self,
        q: &[T],
        [rows, head_dim, q_row]: [usize; 3],
        to: &'s mut [T],
    ) -> Option<SplitQueries<'s, T>> {
        let matrix = self.matrix.as_ref()?;
        let q = &q[..extent(rows, q_row, head_dim)];
        let to = &mut to[..split_rows_len(rows, head_dim)];
        let mut unfit = 0;
        for first in (0..rows).step_by(UNIT_ROWS) {
            // SAFETY: both slices have the rows.
            unfit |= unsafe {
                (matrix.split_rows)(&SplitRows {
                    rows: UNIT_ROWS.min(rows - first),
                    terms: head_dim,
                    from: q.as_ptr().add(first * q_row),
                    from_row: q_row,
                    from_next: PANEL,
                    to: to.as_mut_ptr().add(first * PANEL),
                    to_part: rows * PANEL,
                })
            };
        }
        Some(SplitQueries::new(to, rows, unfit == 0))
    }

    /// `p = q k^T` of up to 32 rows, for some panels of a tile; `p: [rows][64]`. Rows may go back through the softmax beside it.
    #[inline(always)]
    pub(crate) fn unit_products(
        &self,
        on: &mut MatrixUnit<'_, T>,
        factors: &SplitFactors<'_, T>,
        rows: Range<usize>,
        p: &mut [T],
        beside: Option<&mut OnTheWay<'_, T>>,
    ) {
        let SplitFactors { q, q_row, head_dim, queries, ref panels, keys, split } = *factors;
        let Some(matrix) = self.matrix.as_ref().filter(|_| !rows.is_empty() && !panels.is_empty()) else { return };
        let enough = rows.len() <= UNIT_ROWS
            && queries.first + rows.end <= queries.rows
            && split_rows_len(queries.rows, head_dim) <= queries.numbers.len()
            && panels.end <= KEYS / PANEL
            && split_panel_len(head_dim) * panels.end <= split.len();
        assert!(enough, "split rows and panels for all of a product");
        let tile = SplitTile { keys: split, values: &[], steps: 0 };
        let unit = Unit { kernels: self, matrix, q, q_row, head_dim, queries, keys: Operand::Own(keys), tile };
        let p = p[..rows.len() * KEYS].as_mut_ptr();
        // SAFETY: the rows are some of those that are split, and `p` has that many.
        unsafe {
            on.multiply_by_pointers(&unit.scores(rows.clone(), panels.clone(), p), beside);
            unit.replace_unfit(rows, panels.clone(), p);
        }
    }

    /// `p = q k^T` of up to 32 rows, for the keys of the panels, and the unit for their values. `None` if group or tile is not
    /// split.
    pub(crate) fn unit_scores(
        &self,
        group: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        coming: Option<&mut Splitting<'_, T>>,
    ) -> Option<Session<'_, T>> {
        let mut session = Session::new(self.matrix.as_ref()?);
        let unit = Unit::new(self, group, tile)?;
        if group.rows > 0 {
            assert!(group.rows <= UNIT_ROWS, "a block of rows");
            let p = group.p[..group.rows * KEYS].as_mut_ptr();
            // SAFETY: the rows are all of the group, and `p` has that many.
            unsafe {
                let product = unit.scores(0..group.rows, tile.panels.clone(), p);
                session.multiply_with(&product, coming.and_then(Splitting::work));
                unit.replace_unfit(0..group.rows, tile.panels.clone(), p);
            }
        }
        Some(session)
    }

    /// `o += p v` of as many rows, of which none sees a key beyond the panels; `p` must be zero where a row does not see a key
    /// of the tile.
    pub(crate) fn unit_values(
        &self,
        session: &mut Session<'_, T>,
        group: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        coming: Option<&mut Splitting<'_, T>>,
    ) {
        let Some(unit) = Unit::new(self, group, tile) else { return };
        let rows = group.rows.min(UNIT_ROWS);
        if rows == 0 {
            return;
        }
        let weights = group.weights[..WEIGHTS].as_mut_ptr();
        let p = group.p[..rows * KEYS].as_ptr();
        let o = group.o[..extent(rows, group.o_row, tile.padded_width())].as_mut_ptr();
        let seen = tile.range().end;
        // SAFETY: the slices above hold all rows, and weights for 32.
        unsafe {
            unit.split(p, rows, seen, weights);
            let product = unit.values(weights, [rows, seen, tile.padded_width()], o, group.o_row);
            session.multiply_with(&product, coming.and_then(Splitting::work));
        }
    }

    /// Scores, softmax and values of any number of rows against a tile whose 64 keys all of them see but for those that a
    /// bias hides, and some of the tile to come is split. Does nothing and returns false if group or tile is not split.
    pub(super) fn unit_attend_rows(
        &self,
        all: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        scoring: &RowsScoring<'_, T>,
        mut coming: Option<&mut Splitting<'_, T>>,
    ) -> bool {
        let RowsScoring { bias, softcap, factor, dropout } = *scoring;
        let Some(unit) = Unit::new(self, all, tile) else { return false };
        let (rows, width, o_row) = (all.rows, tile.padded_width(), all.o_row);
        let biases = bias.map(|bias| bias.extent(rows, KEYS));
        let weights = all.weights[..UNIT_WEIGHTS].as_mut_ptr();
        let softmax = Softmax {
            rows,
            first: 0,
            end: KEYS,
            p: all.p[..UNIT_SCORES].as_mut_ptr(),
            m: all.m[..rows].as_mut_ptr(),
            l: all.l[..rows.saturating_mul(PANEL)].as_mut_ptr(),
            o: all.o[..extent(rows, o_row, width)].as_mut_ptr(),
            o_row,
            width,
            visible: ptr::null_mut(),
            all_visible: true,
            bias: None,
            softcap,
            factor,
        };

        let mut session = Session::new(unit.matrix);
        if rows >= FEWEST_BESIDE && softcap.is_none() && unit.queries.fit {
            // SAFETY: the slices above have all rows, and room for the scores and weights of two blocks.
            unsafe { unit.attend_beside(&mut session, &softmax, weights, biases, dropout, coming) }
            return true;
        }
        let (p, o) = (softmax.p, softmax.o);
        let most = if biases.is_some() { MAX_ROWS } else { MOST_TOGETHER };
        for block in (0..rows).step_by(UNIT_ROWS) {
            let block = block..rows.min(block + UNIT_ROWS);
            // SAFETY: blocks are 1 to 32 of the rows, of which the slices above have all, and there is room for the scores and
            // weights of one.
            unsafe {
                let product = unit.scores(block.clone(), 0..KEYS / PANEL, p);
                session.multiply_with(&product, coming.as_deref_mut().and_then(Splitting::work));
                unit.replace_unfit(block.clone(), 0..KEYS / PANEL, p);
                for first in block.clone().step_by(most) {
                    let rows = first..block.end.min(first + most);
                    let p = p.add((first - block.start) * KEYS);
                    let mut visible = [u64::MAX; MAX_ROWS];
                    (self.softmax)(&Softmax {
                        visible: visible.as_mut_ptr(),
                        bias: biases.map(|(numbers, apart)| {
                            // Rows beyond the last are not read.
                            std::array::from_fn(|i| numbers.as_ptr().wrapping_add((first + i) * apart))
                        }),
                        ..softmax.of_rows(rows.clone(), p)
                    });
                    if let Some(dropped) = &dropout {
                        (self.dropping)(&dropped.rows(rows.clone(), p, Into::Multiply));
                    }
                    unit.split(p, rows.len(), KEYS, weights.add((first - block.start) * PANEL));
                    session.stay_awake();
                    if let Some(bias) = bias {
                        bias.fetch(rows.start + UNIT_ROWS..rows.end + UNIT_ROWS, 0..KEYS);
                    }
                }
                let o = o.add(block.start * o_row);
                let product = unit.values(weights, [block.len(), KEYS, width], o, o_row);
                session.multiply_with(&product, coming.as_deref_mut().and_then(Splitting::work));
            }
        }
        true
    }
}

/// A group and a tile that are split.
pub(super) struct Unit<'a, T: 'static> {
    kernels: &'a Kernels<T>,
    pub(super) matrix: &'a Matrix<T>,
    /// `[rows][q_row]`
    q: &'a [T],
    q_row: usize,
    head_dim: usize,
    queries: SplitQueries<'a, T>,
    keys: Operand<'a, T>,
    tile: SplitTile<'a, T>,
}

impl<'a, T: Real> Unit<'a, T> {
    /// `None` if they are not, or there is nothing to do. Checks that all that is split is as long as it has to be.
    fn new(kernels: &'a Kernels<T>, group: &Group<'a, T>, tile: &KeyTile<'a, T>) -> Option<Self> {
        let (matrix, queries, split) = (kernels.matrix.as_ref()?, group.split?, tile.split?);
        let (head_dim, width) = (group.head_dim, tile.padded_width());
        let enough = queries.first + group.rows <= queries.rows
            && split_rows_len(queries.rows, head_dim) <= queries.numbers.len()
            && split_panel_len(head_dim) * tile.panels.end <= split.keys.len()
            && split_panel_len(split.steps * STEP) * (width / PANEL) <= split.values.len();
        assert!(enough, "split rows and panels for all of a group");
        let (q, q_row, keys) = (group.q, group.q_row, tile.keys);
        Some(Self { kernels, matrix, q, q_row, head_dim, queries, keys, tile: split })
    }

    /// `p = q k^T` for the keys of panels; `p: [rows][64]`. The product may be run if the rows are at most 32 of the group, the
    /// panels are some of the tile, and `p` is writable.
    #[inline(always)]
    pub(super) fn scores(&self, rows: Range<usize>, panels: Range<usize>, p: *mut T) -> Multiply<T> {
        let panel = split_panel_len(self.head_dim);
        Multiply {
            rows: rows.len(),
            panels: panels.len(),
            steps: steps(self.head_dim),
            // Split queries and keys are as long as that (checked by `new`).
            a: self.queries.numbers.as_ptr().wrapping_add((self.queries.first + rows.start) * PANEL),
            a_part: self.queries.rows * PANEL,
            b: self.tile.keys.as_ptr().wrapping_add(panels.start * panel),
            b_panel: panel,
            c: p.wrapping_add(panels.start * PANEL),
            c_row: KEYS,
            start: Start::Zero,
        }
    }

    /// The scores of those rows that do not fit the unit, by multiply-adds.
    ///
    /// # Safety
    /// `p` has the scores of the rows.
    #[inline]
    unsafe fn replace_unfit(&self, rows: Range<usize>, panels: Range<usize>, p: *mut T) {
        if !self.queries.fit {
            // SAFETY: `p` has that many rows (contract).
            let p = unsafe { std::slice::from_raw_parts_mut(p, rows.len() * KEYS) };
            self.replace(rows, panels, p);
        }
    }

    #[cold]
    fn replace(&self, rows: Range<usize>, panels: Range<usize>, p: &mut [T]) {
        let Self { head_dim, q_row, .. } = *self;
        for (row, p) in rows.zip(p.chunks_exact_mut(KEYS)) {
            let q = &self.q[row * q_row..][..head_dim];
            if !Extent::of(q).fits() {
                self.kernels.products(&Queries { rows: 1, head_dim, q, q_row }, self.keys, panels.clone(), p);
            }
        }
    }

    /// Splits the first `keys` of 64 probabilities of rows, into rows among 32.
    ///
    /// # Safety
    /// The rows are readable, and the words of as many rows are writable in each of the parts; `keys <= 64`.
    #[inline]
    unsafe fn split(&self, p: *const T, rows: usize, keys: usize, to: *mut T) {
        let to_part = UNIT_ROWS * PANEL;
        // SAFETY: the contract is handed on.
        unsafe {
            (self.matrix.split_weights)(&SplitRows {
                rows,
                terms: keys,
                from: p,
                from_row: KEYS,
                from_next: PANEL,
                to,
                to_part,
            })
        }
    }

    /// `o += p v`. The product may be run if `weights` are as many split rows, at most 32, of as many keys, and so many rows of `o`
    /// are readable and writable.
    #[inline]
    pub(super) fn values(
        &self,
        weights: *const T,
        [rows, keys, width]: [usize; 3],
        o: *mut T,
        o_row: usize,
    ) -> Multiply<T> {
        Multiply {
            rows,
            panels: width / PANEL,
            steps: steps(keys).min(self.tile.steps),
            a: weights,
            a_part: UNIT_ROWS * PANEL,
            // Split values are as long as that (checked by `new`).
            b: self.tile.values.as_ptr(),
            b_panel: split_panel_len(self.tile.steps * STEP),
            c: o,
            c_row: o_row,
            start: Start::Add,
        }
    }
}
