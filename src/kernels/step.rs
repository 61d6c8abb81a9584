//! One group of queries meets one tile of keys.
//!
//! ```text
//! p = q k^T        [rows][64]     rows <= 6 queries
//! p, m, l = softmax step          see `softmax.rs`
//! o += p v         [rows][width]       v in panels of 16 columns, so that a register block reads on and on
//! ```
//!
//! After the last tile, `o / Σ l` is the context and `factor m + ln Σ l` the log-sum-exp of a row (`m + ln Σ l` with a cap or a
//! bias).
//! The scheme is FlashAttention's (Dao et al., 2022) with tiles for registers and the first-level cache.

use super::dropout::{Dropped, Into};
use super::mods::BiasRows;
use super::operand::Operand;
use super::real::Real;
use super::softmax::Softmax;
use super::splitting::SplitTile;
use super::table::{Kernels, VALUES_PANEL, values_len};
use super::tile::{Ahead, MAX_ROWS, Start, Stride, Tile};
use super::unit::SplitQueries;
use super::upcoming::Upcoming;
use super::values::Values;
use super::{KEYS, PANEL, key_bits};
use std::ops::Range;
use std::ptr;

/// The queries of a group and what is known about their rows so far.
#[derive(Debug)]
pub(crate) struct Group<'a, T> {
    /// At most [`MAX_ROWS`].
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    /// `[rows][q_row]`, of which `head_dim` elements are used.
    pub(crate) q: &'a [T],
    pub(crate) q_row: usize,
    /// Reference of each row; -inf until it has seen a key.
    pub(crate) m: &'a mut [T],
    /// `[rows][16]` partial sums; zero at first.
    pub(crate) l: &'a mut [T],
    /// `[rows][o_row]`, of which the width of the values is used; zero at first.
    pub(crate) o: &'a mut [T],
    pub(crate) o_row: usize,
    /// `[rows][64]` scores and probabilities of the tile: scratch. What it holds at first does not matter.
    pub(crate) p: &'a mut [T],
    /// The queries, and room for weights, if they are to be multiplied by the matrix unit.
    pub(crate) split: Option<SplitQueries<'a, T>>,
    pub(crate) weights: &'a mut [T],
}

/// Some queries.
#[derive(Debug)]
pub(crate) struct Queries<'a, T> {
    /// At most [`MAX_ROWS`].
    pub(crate) rows: usize,
    pub(crate) head_dim: usize,
    /// `[rows][q_row]`, of which `head_dim` elements are used.
    pub(crate) q: &'a [T],
    pub(crate) q_row: usize,
}

/// A packed tile of at most 64 keys.
#[derive(Clone, Debug)]
pub(crate) struct KeyTile<'a, T> {
    /// `[panels][head_dim][16]`.
    pub(crate) keys: Operand<'a, T>,
    /// `[width / 16][64][16]`; in the type that is computed in, unless all of them are finite.
    pub(crate) values: Operand<'a, T>,
    /// Both of them, if they are to be multiplied by the matrix unit.
    pub(crate) split: Option<SplitTile<'a, T>>,
    /// Columns of `values`: the value width, rounded up to a multiple of 16.
    pub(crate) width: usize,
    pub(crate) finite: Finite,
    /// The panels of 16 keys that the group may see. Others are not touched.
    pub(crate) panels: Range<usize>,
    pub(crate) next: Option<Next<'a, T>>,
    /// Where the rows will be written that have met their keys: each group asks memory for its part.
    pub(crate) output: Option<Upcoming>,
    /// Which of the groups that read the tile it is, and how many there are.
    pub(crate) group: usize,
    pub(crate) groups: usize,
}

/// The tile after, of which each group asks memory for its part.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Next<'a, T> {
    /// It is read where it is: the products ask for what they will read next.
    InPlace { keys: Operand<'a, T>, values: Operand<'a, T> },
    /// It will be packed: rows of keys and of values.
    Rows([Upcoming; 2]),
}

impl<T> Next<'_, T> {
    /// What the product with the keys of this tile asks for; rows are asked for here.
    #[inline(always)]
    pub(super) fn keys(self, group: usize, groups: usize) -> Ahead {
        match self {
            Self::InPlace { keys, .. } => Ahead { from: keys.part(group, groups), share: groups },
            Self::Rows([keys, _]) => {
                keys.fetch(group, groups);
                Ahead::NOTHING
            }
        }
    }

    /// The same for the values. They have their turn after the keys because so many lines at once would make the CPU wait.
    #[inline(always)]
    pub(super) fn values(self, group: usize, groups: usize) -> Ahead {
        match self {
            Self::InPlace { values, .. } => Ahead { from: values.part(group, groups), share: groups },
            Self::Rows([_, values]) => {
                values.fetch(group, groups);
                Ahead::NOTHING
            }
        }
    }
}

/// Whether a tile of values holds a NaN or an infinity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Finite {
    /// Every value is finite, so `0 · v = 0`.
    All,
    /// Some value is not: keys that a row does not see are left out of its sum.
    NotAll,
}

impl From<bool> for Finite {
    fn from(all: bool) -> Self {
        if all { Self::All } else { Self::NotAll }
    }
}

/// What happens between scores and probabilities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scoring<'a, T> {
    /// Per row, bit j set if key j of the tile may be seen; without it, all keys of the panels may.
    pub(crate) visible: Option<&'a [u64]>,
    /// Of each row, the biases of the keys from the first of the tile up to the last of the panels at least.
    pub(crate) bias: Option<[&'a [T]; MAX_ROWS]>,
    /// Finite and positive.
    pub(crate) softcap: Option<T>,
    /// `|scale|`: products of queries and keys to scores. Applied to the product and not to the
    /// queries, whose roundings would add up.
    pub(crate) factor: T,
    /// Of each row, after the softmax.
    pub(crate) dropout: Option<Dropped<'a, T>>,
}

impl<T> Scoring<'_, T> {
    /// Where the biases of the first `rows` rows begin, each for `end` keys.
    pub(super) fn bias_pointers(&self, rows: usize, end: usize) -> Option<BiasRows<T>> {
        let mut pointers = [ptr::null(); MAX_ROWS];
        for (to, from) in pointers.iter_mut().zip(self.bias.as_ref()?).take(rows) {
            *to = from[..end].as_ptr();
        }
        Some(pointers)
    }
}

/// Rows that lie one after the other, `[6][64]` or the first of them.
pub(crate) fn rows_of_tile<T>(numbers: &[T]) -> [&[T]; MAX_ROWS] {
    let mut rows = numbers.chunks_exact(KEYS);
    std::array::from_fn(|_| rows.next().unwrap_or_default())
}

impl<T: Real> KeyTile<'_, T> {
    /// The keys of the panels: a range within 0..64.
    pub(super) fn range(&self) -> Range<usize> {
        columns(&self.panels)
    }

    /// Makes the weights of keys zero that are not in the panels.
    pub(crate) fn clear_hidden(&self, rows: usize, p: &mut [T]) {
        let Range { start, end } = self.range();
        for p in p.chunks_exact_mut(KEYS).take(rows) {
            p[..start].fill(T::zero());
            p[end..].fill(T::zero());
        }
    }

    /// The width, which is a multiple of 16 whatever the caller wrote.
    pub(super) fn padded_width(&self) -> usize {
        self.width / PANEL * PANEL
    }
}

/// Per row of a group, the keys of the tile that it sees.
pub(crate) type Visible = [u64; MAX_ROWS];

impl<T: Real> Kernels<T> {
    /// Scores, softmax, dropout and values of one group against one tile.
    ///
    /// Keys that do not exist (the tile's last panel may be padded) must be hidden by `visible`.
    #[cfg(test)]
    pub(crate) fn attend(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>, scoring: &Scoring<'_, T>) {
        self.scores(group, tile);
        self.weigh(group, tile, scoring);
    }

    /// Softmax, dropout and values, from the scores that `p` holds.
    #[inline(always)]
    pub(crate) fn weigh(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>, scoring: &Scoring<'_, T>) {
        let visible = self.weights(group, tile, scoring);
        self.values(group, tile, visible.as_ref());
    }

    /// Softmax and dropout, from the scores that `p` holds. Returns what [`Kernels::softmax`] does.
    #[inline(always)]
    pub(crate) fn weights(
        &self,
        group: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        scoring: &Scoring<'_, T>,
    ) -> Option<Visible> {
        let visible = self.softmax(group, tile, scoring);
        if let Some(dropped) = &scoring.dropout {
            self.dropout(dropped, group.p, Into::Multiply);
        }
        visible
    }

    /// `p = q k^T` for the keys of the panels.
    #[inline(always)]
    pub(crate) fn scores(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>) {
        let Group { rows, head_dim, q, q_row, .. } = *group;
        let queries = Queries { rows, head_dim, q, q_row };
        let ahead = tile.next.map_or(Ahead::NOTHING, |next| next.keys(tile.group, tile.groups));
        if let Some(output) = tile.output {
            output.fetch(tile.group, tile.groups);
        }
        self.products_ahead(&queries, tile.keys, tile.panels.clone(), group.p, ahead);
    }

    /// `p = q k^T` for some panels of `keys: [panels][head_dim][16]`; `p: [rows][64]`, whose other columns stay.
    pub(crate) fn products(&self, queries: &Queries<'_, T>, keys: Operand<'_, T>, panels: Range<usize>, p: &mut [T]) {
        self.products_ahead(queries, keys, panels, p, Ahead::NOTHING);
    }

    #[inline(always)]
    fn products_ahead(
        &self,
        queries: &Queries<'_, T>,
        keys: Operand<'_, T>,
        panels: Range<usize>,
        p: &mut [T],
        ahead: Ahead,
    ) {
        let Queries { rows, head_dim, q, q_row } = *queries;
        let (rows, columns) = (rows.min(MAX_ROWS), columns(&panels));
        if rows == 0 {
            return;
        }
        let panel = head_dim.saturating_mul(PANEL);
        let q = &q[..extent(rows, q_row, head_dim)];
        let k = keys.range(columns.start / PANEL * panel, (columns.end / PANEL).saturating_mul(panel));
        let p = &mut p[..rows * KEYS];
        // SAFETY: rows is in 1..=6. The slices above hold every row of `q`, every panel up to `columns.end` and every row
        // of `p`; `columns` is a range of whole panels within the 64 columns of `p`.
        unsafe {
            let mut shape = Tile {
                rows,
                n: columns.len(),
                k: head_dim,
                a: q.as_ptr(),
                a_stride: Stride::Rows(q_row),
                b: ptr::null(),
                b_panel: panel,
                b_k: PANEL,
                c: p.as_mut_ptr().add(columns.start),
                c_row: KEYS,
                start: Start::Zero,
                ahead,
            };
            self.tile_of(&mut shape, k);
        }
    }

    /// Scores to probabilities. Returns what each row sees, unless that is all of the panels.
    #[inline(always)]
    pub(crate) fn softmax(
        &self,
        group: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        scoring: &Scoring<'_, T>,
    ) -> Option<Visible> {
        let (rows, keys) = (group.rows.min(MAX_ROWS), tile.range());
        let mut visible = [u64::MAX; MAX_ROWS];
        if let Some(bits) = scoring.visible {
            visible[..rows].copy_from_slice(&bits[..rows]);
        }
        let p = &mut group.p[..rows * KEYS];
        let m = &mut group.m[..rows];
        let l = &mut group.l[..rows * PANEL];
        let o = &mut group.o[..extent(rows, group.o_row, tile.padded_width())];
        let bias = scoring.bias_pointers(rows, keys.end);
        // SAFETY: the slices above have the shapes that the kernel asks for, `keys` is a range of whole panels within
        // 64.
        unsafe {
            (self.softmax)(&Softmax {
                rows,
                first: keys.start,
                end: keys.end,
                p: p.as_mut_ptr(),
                m: m.as_mut_ptr(),
                l: l.as_mut_ptr(),
                o: o.as_mut_ptr(),
                o_row: group.o_row,
                width: tile.padded_width(),
                visible: visible.as_mut_ptr(),
                all_visible: scoring.visible.is_none(),
                bias,
                softcap: scoring.softcap,
                factor: scoring.factor,
            });
        }
        (scoring.visible.is_some() || scoring.bias.is_some()).then_some(visible)
    }

    /// `o += p v` over the keys of the panels; `visible` is what [`Kernels::softmax`] returned.
    #[inline(always)]
    pub(crate) fn values(&self, group: &mut Group<'_, T>, tile: &KeyTile<'_, T>, visible: Option<&Visible>) {
        let (rows, keys, width) = (group.rows.min(MAX_ROWS), tile.range(), tile.padded_width());
        if rows == 0 {
            return;
        }
        let p = &group.p[..rows * KEYS];
        let v_len = values_len(keys.end, width);
        let v = tile.values.range((keys.start * PANEL).min(v_len), v_len);
        let o = &mut group.o[..extent(rows, group.o_row, width)];
        match (visible, v) {
            (Some(visible), Operand::Own(v)) if tile.finite == Finite::NotAll => {
                let seen = visible.map(|bits| bits & key_bits(keys.start, keys.end));
                // SAFETY: the slices above hold every row of `p` and `o` and the values up to `keys.end`, where the
                // bits of `seen` end.
                unsafe {
                    (self.values)(&Values {
                        rows,
                        p: p.as_ptr(),
                        visible: seen.as_ptr(),
                        // Row 0 of the tile: the rows before `keys.start` have no bit.
                        v: v.as_ptr().wrapping_sub(keys.start * PANEL),
                        o: o.as_mut_ptr(),
                        o_row: group.o_row,
                        width,
                    });
                }
            }
            // SAFETY: rows is in 1..=6, `width` is a multiple of 16, and the slices above hold every row of `p` and `o`
            // and the values up to `keys.end`.
            _ => unsafe {
                let mut shape = Tile {
                    rows,
                    n: width,
                    k: keys.len(),
                    a: p.as_ptr().add(keys.start),
                    a_stride: Stride::Rows(KEYS),
                    b: ptr::null(),
                    b_panel: VALUES_PANEL,
                    b_k: PANEL,
                    c: o.as_mut_ptr(),
                    c_row: group.o_row,
                    start: Start::Add,
                    ahead: tile.next.map_or(Ahead::NOTHING, |next| next.values(tile.group, tile.groups)),
                };
                self.tile_of(&mut shape, v);
            },
        }
    }
}

/// The columns of panels of a tile: a range within 0..64.
fn columns(panels: &Range<usize>) -> Range<usize> {
    let end = panels.end.min(KEYS / PANEL) * PANEL;
    (panels.start.min(KEYS / PANEL) * PANEL).min(end)..end
}

/// Elements of `rows` rows that begin `row` apart and use `width` elements each; more than any slice has on overflow.
pub(super) fn extent(rows: usize, row: usize, width: usize) -> usize {
    if rows == 0 { 0 } else { (rows - 1).saturating_mul(row).saturating_add(width) }
}

#[cfg(test)]
#[path = "step_tests.rs"]
mod tests;
