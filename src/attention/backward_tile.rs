//! Backward: a step meets a tile of its block of keys.
//!
//! Rows are met in groups of six, and those in blocks: of 32 for the matrix unit, so that what it makes is still in the
//! first-level cache when the softmax reads it, and what that makes when it is split; else all rows are one.

use std::ops::Range;

use super::backward::{Backward, Keys, Own, Queries};
use super::sight::Sight;
use super::tables_backward::Patch;
use super::walk::Walk;
use crate::element::Element;
use crate::kernels::{
    BackGroup, Dropped, KEYS, MAX_ROWS, PANEL, Product, RowsAndKeys, Scoring, Start, Stride, UNIT_ROWS, Upcoming,
    Visible,
};
use ndarray::{ArrayView1, ArrayViewMut1, ArrayViewMut2, s};

/// Rows of a step at most.
pub(super) const MAX_TILE: usize = 192;

/// Rows of a block for the matrix unit.
const UNIT_BLOCK: usize = 2 * UNIT_ROWS;

/// Groups of a step at most.
const MAX_GROUPS: usize = MAX_TILE / UNIT_BLOCK * UNIT_BLOCK.div_ceil(MAX_ROWS);

/// A step and a tile of its block of keys.
struct Place<'w, 'p, 'a, T: 'static> {
    walk: &'w Walk<'p, 'a, T>,
    keys: Range<usize>,
    /// Keys of the block before the tile.
    offset: usize,
}

/// What a step has seen of a tile.
pub(super) struct Seen {
    /// Rows of a block.
    block: usize,
    /// For each row, bit j set if it sees key j.
    bits: [u64; MAX_TILE],
    /// For each group of rows, the panels it sees.
    panels: [Range<usize>; MAX_GROUPS],
    /// For each panel, the rows of the groups from the first to the last that see it.
    rows: [Range<usize>; KEYS / PANEL],
    /// Whether some pair of the tile is hidden.
    partial: bool,
}

impl Seen {
    pub(super) const NOTHING: Self = Self {
        block: 1,
        bits: [0; MAX_TILE],
        panels: [const { 0..0 }; MAX_GROUPS],
        rows: [const { 0..0 }; KEYS / PANEL],
        partial: false,
    };

    /// Forgets the tile before; the groups that see nothing are told too. Blocks have `block` rows.
    fn begin(&mut self, block: usize) {
        (self.block, self.partial) = (block, false);
        self.rows.fill(0..0);
    }

    /// Takes up what a group has seen of some panels.
    fn note(&mut self, group: usize, rows: Range<usize>, panels: Range<usize>, visible: &Visible) {
        let visible = &visible[..rows.len()];
        self.partial |= visible.iter().any(|&bits| bits != u64::MAX);
        self.bits[rows.clone()].copy_from_slice(visible);
        for seen in &mut self.rows[panels.clone()] {
            *seen = hull(seen, &rows);
        }
        self.panels[group] = panels;
    }

    /// The same of a group that sees nothing.
    fn note_nothing(&mut self, group: usize, rows: Range<usize>) {
        self.partial = true;
        self.bits[rows].fill(0);
        self.panels[group] = 0..0;
    }

    /// The panels that the groups `groups` see, from the first to the last.
    fn panels(&self, groups: Range<usize>) -> Range<usize> {
        self.panels[groups].iter().fold(0..0, |all, panels| hull(&all, panels))
    }
}

/// The rows of each group of a block.
fn groups(block: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = block.end;
    block.step_by(MAX_ROWS).map(move |row| row..end.min(row + MAX_ROWS))
}

/// Blocks of `block` of some rows.
fn blocks(rows: usize, block: usize) -> impl Iterator<Item = Range<usize>> {
    (0..rows).step_by(block.max(1)).map(move |row| row..rows.min(row + block))
}

impl<T: Element> Backward<'_, '_, T> {
    /// A step and one tile of a block of keys that begins at `first_key`.
    pub(super) fn tile(
        &self,
        walk: &Walk<'_, '_, T>,
        tile: usize,
        first_key: usize,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        let keys = tile * KEYS..self.size.dims.kv_len.min((tile + 1) * KEYS);
        let place = Place { walk, offset: keys.start - first_key, keys };
        self.scores(&place, block, queries, own);
        let (rows, offset) = (walk.rows(), place.offset);
        if block.unit.as_mut().is_some_and(|unit| unit.gradients(rows, queries.d_q)) {
            return;
        }
        self.pack(walk, queries);
        self.pack_keys(block);
        block.begin();
        if queries.seen.partial && !(block.finite && queries.finite) {
            return self.pairs(rows, offset, block, queries);
        }
        self.to_keys(offset, block, queries);
        self.to_queries(rows, offset, block, queries);
    }

    /// Probabilities and gradients of a tile.
    fn scores(
        &self,
        place: &Place<'_, '_, '_, T>,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        let Place { walk, ref keys, offset } = *place;
        let tile = keys.start / KEYS;
        let all = walk.rows();
        let block_rows = if block.unit.is_some() { UNIT_BLOCK } else { all };
        queries.seen.begin(block_rows);
        let mut seeing = walk.seeing(keys.clone(), walk.whole_tiles().contains(&tile));
        // Rows that do not fit the unit need the panels as they are.
        if !block.unit.as_ref().is_some_and(|unit| unit.has_rows()) {
            self.pack_keys(block);
        }
        if let Some(unit) = &mut block.unit {
            unit.begin(offset);
        }
        let mut group = 0;
        for rows in blocks(all, block_rows) {
            let sees = rows.start.max(seeing.some.start) < rows.end.min(seeing.some.end);
            let Queries { q, d_context, p, d, .. } = &mut *queries;
            let panels = [&*block.key_panels, &*block.value_panels];
            let mut unit = block.unit.as_mut().filter(|_| sees);
            let by_unit =
                unit.as_mut().is_some_and(|unit| unit.products(all, rows.clone(), [q, d_context], panels, [p, d]));
            let first = group;
            for rows in groups(rows.clone()) {
                let whole = rows.end <= walk.run_of_all(&mut seeing, rows.start);
                let sight = if whole { Some(Sight::WHOLE) } else { walk.sight(&seeing, rows.clone(), keys.clone()) };
                if let Some(sight) = sight {
                    if !by_unit {
                        self.pack(walk, queries);
                        self.pack_keys(block);
                        self.products(rows.clone(), offset, &sight.panels, block, queries);
                    }
                    let visible = self.softmax(place, rows.clone(), &sight, queries, own);
                    queries.seen.note(group, rows, sight.panels, &visible);
                    if let Some(unit) = block.unit.as_mut().filter(|_| by_unit) {
                        unit.stay_awake();
                    }
                } else {
                    let numbers = rows.start * KEYS..rows.end * KEYS;
                    queries.p[numbers.clone()].fill(T::zero());
                    queries.d[numbers].fill(T::zero());
                    queries.seen.note_nothing(group, rows);
                }
                group += 1;
            }
            if let Some(unit) = &mut block.unit {
                unit.split(rows, queries.seen.panels(first..group), [queries.p, queries.d]);
            }
        }
    }

    /// The products of a group of rows with some panels of keys and values.
    fn products(
        &self,
        rows: Range<usize>,
        offset: usize,
        panels: &Range<usize>,
        block: &Keys<'_, T>,
        queries: &mut Queries<'_, T>,
    ) {
        let (dims, [k_width, v_width], first) = (&self.size.dims, self.size.widths(), panels.start * PANEL);
        let product = |a: &[T], k: usize, width: usize, b: &[T], c: &mut [T]| {
            self.kernels.multiply(Product {
                rows: rows.len(),
                n: panels.len() * PANEL,
                k,
                a: &a[rows.start * width..],
                a_stride: Stride::Rows(width),
                b: &b[(offset + first) * k..],
                b_panel: PANEL * k,
                b_k: PANEL,
                c: &mut c[rows.start * KEYS + first..],
                c_row: KEYS,
                start: Start::Zero,
            });
        };
        product(queries.q, dims.head_dim, k_width, block.key_panels, queries.p);
        product(queries.d_context, dims.value_dim, v_width, block.value_panels, queries.d);
    }

    /// The products of a group to probabilities and gradients. Returns what each row sees.
    fn softmax(
        &self,
        place: &Place<'_, '_, '_, T>,
        rows: Range<usize>,
        Sight { panels, bits }: &Sight,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) -> Visible {
        let Place { walk, ref keys, offset } = *place;
        let rules = &self.call.problem.rules;
        let numbers = rows.start * KEYS..rows.end * KEYS;
        let (p, d) = (&mut queries.p[numbers.clone()], &mut queries.d[numbers]);
        let columns = panels.start * PANEL..keys.len().min(panels.end * PANEL);
        let patch = Patch { walk, rows: rows.clone(), first_key: keys.start, columns: columns.clone() };
        if let Some(tables) = &self.tables {
            tables.add_products(&patch, p, queries.tables);
        }
        let bias = walk.bias_rows(rows.clone(), keys.clone(), &mut *queries.bias);
        let mut group =
            BackGroup { rows: rows.len(), p, d, lse: &queries.lse[rows.clone()], delta: &queries.delta[rows.clone()] };
        let scoring = Scoring {
            visible: bits.as_ref().map(|bits| &bits[..]),
            bias,
            softcap: rules.softcap,
            factor: rules.scale,
            dropout: rules.dropout.as_ref().map(|dropout| Dropped {
                keys: &queries.row_keys[rows.clone()],
                first: keys.start,
                drops: dropout.drops,
            }),
        };
        let visible = self.kernels.back(&mut group, panels.clone(), &scoring, &mut queries.room);
        if let Some(d_bias) = &mut own.d_bias {
            let d_scores = &queries.room.d_scores[..rows.len() * KEYS];
            add_to_bias(d_bias, [walk.positions().start + rows.start, offset], columns, d_scores);
        }
        if let Some(tables) = &self.tables {
            tables.collect(&patch, own.member, [queries.room.d_scores, group.d], queries.tables);
        }
        visible
    }

    /// `d_v += p^T d_context` and `d_k += d^T q`, up to six keys at a time.
    fn to_keys(&self, offset: usize, block: &mut Keys<'_, T>, queries: &Queries<'_, T>) {
        let seen = &queries.seen;
        let [k_width, v_width] = self.size.widths();
        let end = (0..KEYS / PANEL).rfind(|&panel| !seen.rows[panel].is_empty()).map_or(0, |panel| (panel + 1) * PANEL);
        // Strips of nearly the same height: of 64 keys, four would be left, too few to keep the multipliers busy.
        let strips = end.div_ceil(MAX_ROWS);
        for strip in 0..strips {
            let strip = end * strip / strips..end * (strip + 1) / strips;
            let first = strip.start;
            let seeing = hull(&seen.rows[first / PANEL], &seen.rows[(strip.end - 1) / PANEL]);
            if seeing.is_empty() {
                continue;
            }
            let product = |a: &[T], b: &[T], width: usize, c: &mut [T]| {
                self.kernels.multiply(Product {
                    rows: strip.len(),
                    n: width,
                    k: seeing.len(),
                    a: &a[seeing.start * KEYS + first..],
                    a_stride: Stride::Columns(KEYS),
                    b: &b[seeing.start * width..],
                    b_panel: PANEL,
                    b_k: width,
                    c: &mut c[(offset + first) * width..],
                    c_row: width,
                    start: Start::Add,
                });
            };
            product(queries.p, queries.d_context, v_width, block.d_v);
            product(queries.d, queries.q, k_width, block.d_k);
        }
    }

    /// `d_q += d keys`, six rows at a time.
    fn to_queries(&self, rows: usize, offset: usize, block: &Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let seen = &queries.seen;
        let [width, _] = self.size.widths();
        for (rows, panels) in blocks(rows, seen.block).flat_map(groups).zip(&seen.panels) {
            let first = panels.start * PANEL;
            self.kernels.multiply(Product {
                rows: rows.len(),
                n: if panels.is_empty() { 0 } else { width },
                k: panels.len() * PANEL,
                a: &queries.d[rows.start * KEYS + first..],
                a_stride: Stride::Rows(KEYS),
                b: &block.keys[(offset + first) * width..],
                b_panel: PANEL,
                b_k: width,
                c: &mut queries.d_q[rows.start * width..],
                c_row: width,
                start: Start::Add,
            });
        }
    }

    /// The three products of a tile with something that is not finite: hidden pairs are left out.
    fn pairs(&self, rows: usize, offset: usize, block: &mut Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let seen = &queries.seen;
        let [k_width, v_width] = self.size.widths();
        self.kernels.pairs(&mut RowsAndKeys {
            visible: &seen.bits[..rows],
            p: queries.p,
            d: queries.d,
            d_context: queries.d_context,
            q: queries.q,
            k: &block.keys[offset * k_width..],
            d_v: &mut block.d_v[offset * v_width..],
            d_k: &mut block.d_k[offset * k_width..],
            d_q: queries.d_q,
            k_width,
            v_width,
        });
    }
}

/// The smallest range that holds both, of which either may be empty.
fn hull(one: &Range<usize>, other: &Range<usize>) -> Range<usize> {
    match (one.is_empty(), other.is_empty()) {
        (true, _) => other.clone(),
        (_, true) => one.clone(),
        _ => one.start.min(other.start)..one.end.max(other.end),
    }
}

/// Adds the columns `keys` of the gradients of scores `[rows][64]` to the bias's `[1 or q_len, keys]`, where the tile begins
/// at `first` and `offset`.
fn add_to_bias<T: Element>(
    d_bias: &mut ArrayViewMut2<'_, T>,
    [first, offset]: [usize; 2],
    keys: Range<usize>,
    d_scores: &[T],
) {
    let columns = offset + keys.start..offset + keys.end;
    let add = |mut to: ArrayViewMut1<'_, T>, d_scores: &[T]| match to.as_slice_mut() {
        Some(to) => to.iter_mut().zip(d_scores).for_each(|(to, &x)| *to += x),
        None => to += &ArrayView1::from(d_scores),
    };
    let lines = d_scores.chunks_exact(KEYS).map(|line| &line[keys.clone()]);
    if d_bias.nrows() == 1 {
        lines.for_each(|line| add(d_bias.slice_mut(s![0, columns.clone()]), line));
        return;
    }
    let end = first + lines.len();
    let mut to = d_bias.slice_mut(s![first..end, columns.clone()]);
    to.rows_mut().into_iter().zip(lines).for_each(|(to, line)| add(to, line));
    // The next group comes after the products of its own: time enough.
    Upcoming::new(d_bias.slice(s![end..d_bias.nrows().min(end + MAX_ROWS), columns])).fetch(0, 1);
}
