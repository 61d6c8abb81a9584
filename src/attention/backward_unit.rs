//! Backward by the matrix unit: what it multiplies, split into parts, and sums that lie as it has them.
//!
//! ```text
//! of a block of keys     K, V         panels of keys [keys / 16][head_dim or value_dim]      p = q K^T,  d = d_o V^T
//!                        K            for each tile, panels of columns [k_width / 16][64]    d_q += d K
//!                        d_k, d_v     for each tile, [head_dim or value_dim][64]             transposed
//! of a step              Q, d_O       rows [rows][head_dim or value_dim]
//!                        Q^T, d_O^T   rows [head_dim or value_dim][rows]                     d_k += Q^T d,  d_v += d_O^T p
//! of a stage             p, d         panels of keys [4][128]; d rows [4][32][64] too     see `backward_stage.rs`
//! ```
//!
//! The scores have to be the very numbers that the lse was made of, rounding included: a probability is a power of their
//! difference, and where scores are large, two ways to round them are far apart. So what the unit multiplies is what it
//! multiplied in the forward pass: the same tiles, the same rows.
//!
//! Arrays are split where they lie, and packed for the multipliers only where these are needed: what is packed for nobody takes
//! room in the second-level cache (0.95 of the time without, 16 heads of 128). What the softmax makes of p and d is split as
//! it lies: no product needs it transposed. Gradients of keys and values are transposed once for a block.
//!
//! Where something does not fit the unit (see `kernels/matrix.rs`), a tile is met as in `backward_tile.rs`; the sums of both
//! ways are added in the end. Products of 32 rows and 32 keys that see nothing of each other are left out.

use super::backward_stage::{PLACES, Stage};
use super::problem::Dims;
use crate::element::Element;
use crate::kernels::{
    KEYS, Kernels, MatrixUnit, PAIRS, PANEL, RETURNED_PANELS, RETURNED_ROWS, STEP, clear_keys, split_keys_len,
    split_panel_len, split_rows_len,
};
use ndarray::{ArrayView2, ShapeBuilder, s};

/// How large the operands are.
#[derive(Debug, Clone, Copy)]
pub(super) struct UnitSize {
    /// `head_dim` and `value_dim`.
    pub(super) dims: [usize; 2],
    /// Of a step.
    pub(super) rows: usize,
    /// Of a block of keys.
    tiles: usize,
}

impl UnitSize {
    /// For steps of `rows` query positions and blocks of `keys` keys.
    pub(super) fn new(dims: &Dims, rows: usize, keys: usize) -> Self {
        Self { dims: [dims.head_dim, dims.value_dim], rows, tiles: keys.div_ceil(KEYS) }
    }

    /// Widths of packed rows: both, rounded up to a multiple of 16.
    pub(super) fn widths(&self) -> [usize; 2] {
        self.dims.map(|dim| dim.next_multiple_of(PANEL))
    }

    /// Numbers of the columns of a tile of keys.
    pub(super) fn columns(&self) -> usize {
        split_panel_len(KEYS).saturating_mul(self.dims[0].div_ceil(PANEL))
    }

    fn lengths(&self) -> [usize; 13] {
        let Self { dims: [k, v], rows, tiles } = *self;
        let of_tiles = |n: usize| n.saturating_mul(tiles);
        let turned = rows.max(KEYS).next_multiple_of(PANEL).saturating_mul(k.max(v).next_multiple_of(PANEL));
        [
            split_rows_len(rows, k),
            split_rows_len(rows, v),
            of_tiles(split_keys_len(k)),
            of_tiles(split_keys_len(v)),
            of_tiles(self.columns()),
            split_rows_len(k, rows),
            split_rows_len(v, rows),
            turned,
            PLACES * RETURNED_PANELS,
            PLACES * RETURNED_PANELS,
            PLACES * RETURNED_ROWS,
            of_tiles(k.saturating_mul(KEYS)),
            of_tiles(v.saturating_mul(KEYS)),
        ]
    }

    /// Numbers of scratch.
    pub(super) fn len(&self) -> usize {
        self.lengths().into_iter().fold(0, usize::saturating_add)
    }
}

/// The operands of a block of keys and of a step, and sums.
pub(super) struct UnitRoom<'s, T: 'static> {
    pub(super) kernels: &'static Kernels<T>,
    pub(super) size: UnitSize,
    /// Q and d_O.
    pub(super) rows: [&'s mut [T]; 2],
    /// K and V.
    pub(super) keys: [&'s mut [T]; 2],
    pub(super) key_columns: &'s mut [T],
    /// Q^T and d_O^T.
    pub(super) row_columns: [&'s mut [T]; 2],
    turned: &'s mut [T],
    /// p and d, of two stages.
    pub(super) weights: [&'s mut [T]; 2],
    pub(super) d_rows: &'s mut [T],
    /// d_k and d_v.
    pub(super) sums: [&'s mut [T]; 2],
    pub(super) unit: MatrixUnit<'static, T>,
    /// Keys of the block that are seen.
    pub(super) seen: usize,
    /// Bit i is set if the unit may multiply tile i: for scores, and for gradients of queries.
    pub(super) scores_fit: u64,
    pub(super) columns_fit: u64,
    /// The same for the rows of the step, and for both of their transposes.
    pub(super) rows_fit: [bool; 2],
    pub(super) row_columns_fit: bool,
    /// The stage that goes back through the softmax next, and the one that has.
    pub(super) next: Option<Stage>,
    pub(super) done: Option<Stage>,
    /// Of each tile and pair of panels, a bit that says whether its sums have begun.
    pub(super) begun: u64,
}

impl<'s, T: Element> UnitRoom<'s, T> {
    /// Room in a buffer of [`UnitSize::len`] numbers; `None` without a unit.
    pub(super) fn new(kernels: &'static Kernels<T>, size: UnitSize, buffer: &'s mut [T]) -> Option<Self> {
        let unit = kernels.matrix_unit()?;
        let mut rest = buffer;
        let [q, d_context, keys, values, key_columns, q_columns, d_columns, turned, p, d, d_rows, d_k, d_v] =
            size.lengths().map(|n| {
                let (part, behind) = std::mem::take(&mut rest).split_at_mut(n);
                rest = behind;
                part
            });
        Some(Self {
            kernels,
            size,
            unit,
            rows: [q, d_context],
            keys: [keys, values],
            key_columns,
            row_columns: [q_columns, d_columns],
            turned,
            weights: [p, d],
            d_rows,
            sums: [d_k, d_v],
            seen: 0,
            scores_fit: 0,
            columns_fit: 0,
            rows_fit: [false; 2],
            row_columns_fit: false,
            next: None,
            done: None,
            begun: 0,
        })
    }

    /// Before the first `seen` keys of a block are split.
    fn begin_block(&mut self, seen: usize) {
        (self.seen, self.scores_fit, self.columns_fit, self.begun) = (seen, 0, 0, 0);
    }

    /// Splits the first `seen` keys `[keys, head_dim]` and values `[keys, value_dim]` of a block where they are. False if not all
    /// of them fit, or keys are not lines of memory.
    pub(super) fn split_lines(&mut self, seen: usize, [k, v]: [ArrayView2<'_, T>; 2]) -> bool {
        self.begin_block(seen);
        for (tile, first) in (0..seen).step_by(KEYS).enumerate() {
            let keys = first..seen.min(first + KEYS);
            let mut fits = true;
            for ((to, from), width) in self.keys.iter_mut().zip([k, v]).zip(self.size.dims) {
                self.kernels.pack_panels(from.slice(s![keys.clone(), ..]), self.turned);
                let to = &mut to[tile * split_keys_len(width)..];
                fits &= self.kernels.split_key_panels(self.turned, [keys.len(), width], to) == Some(true);
            }
            let to = &mut self.key_columns[tile * self.size.columns()..];
            fits &= self.kernels.split_lines(k.slice(s![keys, ..]), to, split_panel_len(KEYS)) == Some(true);
            if !fits {
                return false;
            }
            self.note_keys(tile, [true; 2]);
        }
        true
    }

    /// Whether the unit may multiply a tile for scores, and for gradients of queries.
    fn note_keys(&mut self, tile: usize, fits: [bool; 2]) {
        self.scores_fit |= u64::from(fits[0]) << tile;
        self.columns_fit |= u64::from(fits[1]) << tile;
    }

    /// Whether all rows of the step fit.
    pub(super) fn has_rows(&self) -> bool {
        self.rows_fit == [true; 2]
    }

    /// Splits the first `seen` keys and values of a block: their packed panels, and the rows of the former. `hidden` says which
    /// keys of a tile nobody sees, bit by bit: they become zeros where they would keep the unit from multiplying the others.
    pub(super) fn take_keys(
        &mut self,
        seen: usize,
        mut panels: [&mut [T]; 2],
        keys: &mut [T],
        hidden: impl Fn(usize) -> u64,
    ) {
        self.begin_block(seen);
        let [k_width, _] = self.size.widths();
        for (tile, first) in (0..seen).step_by(KEYS).enumerate() {
            let count = KEYS.min(seen - first);
            let mut fits = self.split_keys(tile, count, panels.each_ref().map(|panels| &**panels), keys);
            if fits != [true; 2] {
                let hidden = hidden(tile);
                if hidden != 0 {
                    for (panels, width) in panels.iter_mut().zip(self.size.dims) {
                        clear_keys(&mut panels[first * width..], width, hidden);
                    }
                    for (key, row) in keys[first * k_width..].chunks_exact_mut(k_width.max(1)).take(count).enumerate() {
                        if hidden >> key & 1 == 1 {
                            row.fill(T::zero());
                        }
                    }
                    fits = self.split_keys(tile, count, panels.each_ref().map(|panels| &**panels), keys);
                }
            }
            self.note_keys(tile, fits);
        }
    }

    /// Splits the first `count` keys of a tile. Whether the unit may multiply it for scores, and for gradients of queries.
    fn split_keys(&mut self, tile: usize, count: usize, panels: [&[T]; 2], keys: &[T]) -> [bool; 2] {
        let (first, [k_width, _]) = (tile * KEYS, self.size.widths());
        let mut fits = true;
        for ((to, panels), width) in self.keys.iter_mut().zip(panels).zip(self.size.dims) {
            let (panels, to) = (&panels[first * width..], &mut to[tile * split_keys_len(width)..]);
            fits &= self.kernels.split_key_panels(panels, [count, width], to) == Some(true);
        }
        let (shape, to) = ([count, k_width / PANEL], &mut self.key_columns[tile * self.size.columns()..]);
        [fits, self.unit.split_panels(shape, &keys[first * k_width..], k_width, to, split_panel_len(KEYS))]
    }

    /// Splits the queries and gradients of a step, which are packed. `sees` says whether a row sees anything: if not, it becomes
    /// zeros where it would keep the unit from multiplying the others.
    pub(super) fn take_rows(&mut self, n: usize, mut packed: [&mut [T]; 2], sees: impl Fn(usize) -> bool) {
        let widths = self.size.widths();
        if self.split_rows(n, packed.each_ref().map(|packed| &**packed), widths) {
            return;
        }
        let mut cleared = false;
        for row in (0..n).filter(|&row| !sees(row)) {
            cleared = true;
            for (packed, width) in packed.iter_mut().zip(widths) {
                packed[row * width..][..width].fill(T::zero());
            }
        }
        if cleared {
            self.split_rows(n, packed.each_ref().map(|packed| &**packed), widths);
        }
    }

    /// The same of rows that begin so many numbers apart. Whether all fit.
    pub(super) fn split_rows(&mut self, n: usize, rows: [&[T]; 2], widths: [usize; 2]) -> bool {
        self.row_columns_fit = true;
        for (i, ((from, dim), width)) in rows.into_iter().zip(self.size.dims).zip(widths).enumerate() {
            let split = self.kernels.split_queries(from, [n, dim, width], &mut *self.rows[i]);
            self.rows_fit[i] = split.is_some_and(|split| split.fit());
            let Ok(from) = ArrayView2::from_shape((n, dim).strides((width.max(1), 1)), from) else { continue };
            self.kernels.pack_panels(from, self.turned);
            self.row_columns_fit &= self.unit.split_columns([n, dim], self.turned, &mut *self.row_columns[i]);
        }
        self.row_columns_fit && self.rows_fit == [true; 2]
    }

    /// Writes the sums to the gradients of keys and values, `[keys][width]`, or adds them. False if there are none.
    pub(super) fn give_keys(&mut self, to: [&mut [T]; 2], add: bool) -> bool {
        if self.begun == 0 {
            return false;
        }
        for ((from, to), dim) in self.sums.iter_mut().zip(to).zip(self.size.dims).filter(|&(_, dim)| dim > 0) {
            let width = dim.next_multiple_of(PANEL);
            for (tile, (from, to)) in from.chunks_exact_mut(dim * KEYS).zip(to.chunks_mut(width * KEYS)).enumerate() {
                for pair in (0..PAIRS).filter(|&pair| self.begun & begun(tile, pair) == 0) {
                    from.chunks_exact_mut(KEYS).for_each(|sums| sums[pair * STEP..][..STEP].fill(T::zero()));
                }
                let Ok(from) = ArrayView2::from_shape((dim, KEYS), &*from) else { continue };
                self.kernels.pack_panels(from, self.turned);
                for (panel, lines) in self.turned.chunks_exact(KEYS * PANEL).take(width / PANEL).enumerate() {
                    let places = to.chunks_exact_mut(width).map(|row| &mut row[panel * PANEL..][..PANEL]);
                    for (to, line) in places.zip(lines.chunks_exact(PANEL)) {
                        match add {
                            true => to.iter_mut().zip(line).for_each(|(to, &x)| *to += x),
                            false => to.copy_from_slice(line),
                        }
                    }
                }
            }
        }
        true
    }
}

/// The bit of the sums of a tile and pair of panels.
pub(super) fn begun(tile: usize, pair: usize) -> u64 {
    1 << (tile * PAIRS + pair)
}
