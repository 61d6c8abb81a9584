//! Backward: a step meets a tile of its block of keys.
//!
//! Rows are met in groups of six, and those in blocks: of 128 for the matrix unit, which are on their way together (see
//! `backward_stage.rs`); else all rows are one.

use std::ops::Range;

use super::backward::{Backward, Keys, Own, Queries};
use super::backward_stage::{Lent, PLACE, STAGE_ROWS, Stage};
use super::sight::{Seeing, Sight};
use super::tables_backward::Patch;
use super::walk::Walk;
use crate::element::Element;
use crate::kernels::{
    BackGroup, Dropped, KEYS, MAX_ROWS, PANEL, Product, RowsAndKeys, Scoring, Start, Stride, Upcoming, Visible,
    can_add_to, key_bits,
};
use ndarray::{ArrayView1, ArrayViewMut1, ArrayViewMut2, s};

/// Rows of a step at most.
pub(super) const MAX_TILE: usize = 192;

/// Groups of a block at most.
const MAX_GROUPS: usize = MAX_TILE.div_ceil(MAX_ROWS);

/// A step and a tile of its block of keys.
struct Place<'w, 'p, 'a, T: 'static> {
    walk: &'w Walk<'p, 'a, T>,
    keys: Range<usize>,
    /// Keys of the block before the tile.
    offset: usize,
}

/// What a block of rows sees of a tile.
pub(super) struct Seen {
    /// Rows of the step.
    rows: Range<usize>,
    /// Keys of the block before the tile.
    offset: usize,
    /// Where p and d of its rows begin.
    numbers: usize,
    /// For each row, bit j set if it sees key j.
    bits: [u64; MAX_TILE],
    /// For each group of rows, the panels it sees, and whether its bits say more.
    groups: [(Range<usize>, bool); MAX_GROUPS],
}

impl Seen {
    pub(super) const NOTHING: Self =
        Self { rows: 0..0, offset: 0, numbers: 0, bits: [0; MAX_TILE], groups: [const { (0..0, false) }; MAX_GROUPS] };

    /// Takes up what the groups see. False if it is nothing.
    fn look<T: Element>(&mut self, place: &Place<'_, '_, '_, T>, rows: Range<usize>, seeing: &mut Seeing<'_>) -> bool {
        let Place { walk, ref keys, offset } = *place;
        (self.rows, self.offset) = (rows.clone(), offset);
        let mut any = false;
        for ((rows, bits), group) in groups(rows).zip(self.bits.chunks_mut(MAX_ROWS)).zip(&mut self.groups) {
            let whole = rows.end <= walk.run_of_all(seeing, rows.start);
            let sight = if whole { Some(Sight::WHOLE) } else { walk.sight(seeing, rows, keys.clone()) };
            let Some(Sight { panels, bits: seen }) = sight else {
                bits.fill(0);
                *group = (0..0, false);
                continue;
            };
            any = true;
            match seen {
                Some(seen) => bits.copy_from_slice(&seen[..bits.len()]),
                None => bits.fill(key_bits(panels.start * PANEL, panels.end * PANEL)),
            }
            *group = (panels, seen.is_some());
        }
        any
    }

    /// The groups, each with its rows, counted from the first of the block, and the panels that it sees.
    fn groups(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> {
        groups(0..self.rows.len()).zip(self.groups.iter().map(|(panels, _)| panels.clone()))
    }

    /// The rows of the groups from the first to the last that see a panel.
    fn seeing(&self, panel: usize) -> Range<usize> {
        let groups = self.groups().filter(|(_, panels)| panels.contains(&panel));
        groups.fold(0..0, |all, (rows, _)| hull(&all, &rows))
    }

    /// Whether some pair of the tile is hidden.
    fn is_partial(&self) -> bool {
        self.bits().iter().any(|&bits| bits != u64::MAX)
    }

    /// The numbers of p or d of some rows, counted from the first of the block.
    fn numbers(&self, rows: Range<usize>) -> Range<usize> {
        self.numbers + rows.start * KEYS..self.numbers + rows.end * KEYS
    }

    fn bits(&self) -> &[u64] {
        &self.bits[..self.rows.len()]
    }

    fn bits_mut(&mut self) -> &mut [u64] {
        &mut self.bits[..self.rows.len()]
    }
}

/// The rows of each group of a block.
fn groups(block: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    let end = block.end;
    block.step_by(MAX_ROWS).map(move |row| row..end.min(row + MAX_ROWS))
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
        let all = walk.rows();
        let mut seeing = walk.seeing(place.keys.clone(), walk.whole_tiles().contains(&tile));
        // Rows that do not fit the unit need the panels as they are.
        if !block.unit.as_ref().is_some_and(|unit| unit.has_rows()) {
            self.pack_keys(block);
        }
        let (block_rows, place_len) = if block.unit.is_some() { (STAGE_ROWS, PLACE) } else { (all, 0) };
        for first in (0..all).step_by(block_rows.max(1)) {
            let rows = first..all.min(first + block_rows);
            let sees = rows.start.max(seeing.some.start) < rows.end.min(seeing.some.end);
            let turn = 1 - queries.turn;
            queries.seen[turn].numbers = turn * place_len;
            if sees && queries.seen[turn].look(&place, rows, &mut seeing) {
                queries.turn = turn;
                self.block(&place, block, queries, own);
            }
        }
    }

    /// A block of rows, of which `queries.seen` says what they see.
    fn block(
        &self,
        place: &Place<'_, '_, '_, T>,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        let offset = place.offset;
        let seen = &queries.seen[queries.turn];
        let stage = Stage::new(seen.rows.clone(), [offset, place.keys.start], queries.turn, seen.bits());
        let Some(unit) = &mut block.unit else {
            self.softmax_of_groups(place, queries.turn, false, block, queries, own);
            return self.gradients(place.walk, queries.turn, block, queries);
        };
        if self.flows(place, own) && unit.has_rows() && unit.makes_scores(offset) && unit.makes_gradients(offset) {
            return self.advance(Some(stage), place.walk, block, queries, own);
        }
        self.drain(place.walk, block, queries, own);
        let Some(unit) = &mut block.unit else { return };
        let by_unit = unit.makes_scores(offset);
        if by_unit {
            let operands = [[&*queries.q, &*queries.d_context], [&*block.key_panels, &*block.value_panels]];
            unit.scores(&stage, place.walk.rows(), operands, [queries.p, queries.d]);
        }
        self.softmax_of_groups(place, queries.turn, by_unit, block, queries, own);
        if let Some(unit) = block.unit.as_mut().filter(|unit| unit.makes_gradients(offset))
            && unit.split(&stage, [queries.p, queries.d])
        {
            return unit.gradients(&stage, queries.d_q);
        }
        self.gradients(place.walk, queries.turn, block, queries);
    }

    /// Whether the stages of the matrix unit may be on their way together: the softmax is all that becomes of their scores, and
    /// biases and their gradients are lines of memory.
    fn flows(&self, place: &Place<'_, '_, '_, T>, own: &Own<'_, T>) -> bool {
        let (rules, Place { walk, keys, .. }) = (&self.call.problem.rules, place);
        let lines = walk.bias_lines(0, keys.start).is_some() && keys.len() == KEYS;
        let sums = own.d_bias.as_ref().is_none_or(|sums| sums.nrows() == self.size.dims.q_len && can_add_to(sums));
        self.tables.is_none() && rules.softcap.is_none() && (rules.bias.is_none() || lines && sums)
    }

    /// The stages of the matrix unit move on by one, and `next` is the first of them.
    fn advance(
        &self,
        next: Option<Stage>,
        walk: &Walk<'_, '_, T>,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        let Some(unit) = &mut block.unit else { return };
        let rules = &self.call.problem.rules;
        let stage = unit.next();
        let lent = Lent {
            all: walk.rows(),
            packed: [queries.q, queries.d_context],
            panels: [block.key_panels, block.value_panels],
            products: [queries.p, queries.d],
            d_q: queries.d_q,
            lse: queries.lse,
            delta: queries.delta,
            visible: queries.seen.each_mut().map(Seen::bits_mut),
            factor: rules.scale,
            bias: stage.and_then(|stage| walk.bias_lines(stage.rows.start, stage.first_key)),
            d_bias: stage.and_then(|stage| {
                let rows = walk.positions().start + stage.rows.start..walk.positions().start + stage.rows.end;
                own.d_bias.as_mut().map(|sums| sums.slice_mut(s![rows, stage.offset..stage.offset + KEYS]))
            }),
            drops: rules.dropout.as_ref().map(|dropout| (&queries.row_keys[..], dropout.drops)),
            z: queries.room.z,
        };
        if let Some(stage) = unit.advance(next, lent) {
            let keys = stage.first_key..self.size.dims.kv_len.min(stage.first_key + KEYS);
            let place = Place { walk, keys, offset: stage.offset };
            // Those of the bias have been added already.
            let mut others = Own { d_bias: None, ..*own };
            self.softmax_of_groups(&place, stage.place, true, block, queries, &mut others);
            self.gradients(walk, stage.place, block, queries);
        }
    }

    /// The stages that are on their way come to their end.
    pub(super) fn drain(
        &self,
        walk: &Walk<'_, '_, T>,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        while block.unit.as_ref().is_some_and(|unit| unit.is_busy()) {
            self.advance(None, walk, block, queries, own);
        }
    }

    /// The gradients of a block by multiply-adds, from what `queries.seen` has of its turn.
    fn gradients(&self, walk: &Walk<'_, '_, T>, turn: usize, block: &mut Keys<'_, T>, queries: &mut Queries<'_, T>) {
        self.pack(walk, queries);
        self.pack_keys(block);
        block.begin();
        // Out of the way, and back in the end.
        let seen = std::mem::replace(&mut queries.seen[turn], Seen::NOTHING);
        if seen.is_partial() && !(block.finite && queries.finite) {
            self.pairs(&seen, block, queries);
        } else {
            self.to_keys(&seen, block, queries);
            self.to_queries(&seen, block, queries);
        }
        queries.seen[turn] = seen;
    }

    /// Probabilities and gradients of a block, group by group. `has_products` says that these are there.
    fn softmax_of_groups(
        &self,
        place: &Place<'_, '_, '_, T>,
        turn: usize,
        has_products: bool,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        let offset = place.offset;
        for index in 0..queries.seen[turn].rows.len().div_ceil(MAX_ROWS) {
            let seen = &queries.seen[turn];
            let of_block = index * MAX_ROWS..seen.rows.len().min((index + 1) * MAX_ROWS);
            let rows = seen.rows.start + of_block.start..seen.rows.start + of_block.end;
            let ((panels, partial), numbers) = (seen.groups[index].clone(), seen.numbers(of_block.clone()));
            if panels.is_empty() {
                queries.p[numbers.clone()].fill(T::zero());
                queries.d[numbers].fill(T::zero());
                continue;
            }
            if !has_products {
                self.pack(place.walk, queries);
                self.pack_keys(block);
                self.products(rows.clone(), numbers.start, offset, &panels, block, queries);
            }
            let mut bits = [0; MAX_ROWS];
            bits[..rows.len()].copy_from_slice(&queries.seen[turn].bits[of_block.clone()]);
            let sight = Sight { panels, bits: partial.then_some(bits) };
            let visible = self.softmax(place, rows, numbers, &sight, queries, own);
            queries.seen[turn].bits[of_block.clone()].copy_from_slice(&visible[..of_block.len()]);
            if let Some(unit) = &mut block.unit {
                unit.stay_awake();
            }
        }
    }

    /// The products of a group of rows with some panels of keys and values.
    fn products(
        &self,
        rows: Range<usize>,
        to: usize,
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
                c: &mut c[to + first..],
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
        numbers: Range<usize>,
        Sight { panels, bits }: &Sight,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) -> Visible {
        let Place { walk, ref keys, offset } = *place;
        let rules = &self.call.problem.rules;
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
    fn to_keys(&self, seen: &Seen, block: &mut Keys<'_, T>, queries: &Queries<'_, T>) {
        let [k_width, v_width] = self.size.widths();
        let seeing: [_; KEYS / PANEL] = std::array::from_fn(|panel| seen.seeing(panel));
        let end = (0..KEYS / PANEL).rfind(|&panel| !seeing[panel].is_empty()).map_or(0, |panel| (panel + 1) * PANEL);
        // Strips of nearly the same height: of 64 keys, four would be left, too few to keep the multipliers busy.
        let strips = end.div_ceil(MAX_ROWS);
        for strip in 0..strips {
            let strip = end * strip / strips..end * (strip + 1) / strips;
            let first = strip.start;
            let seeing = hull(&seeing[first / PANEL], &seeing[(strip.end - 1) / PANEL]);
            if seeing.is_empty() {
                continue;
            }
            let product = |a: &[T], b: &[T], width: usize, c: &mut [T]| {
                self.kernels.multiply(Product {
                    rows: strip.len(),
                    n: width,
                    k: seeing.len(),
                    a: &a[seen.numbers(seeing.clone())][first..],
                    a_stride: Stride::Columns(KEYS),
                    b: &b[(seen.rows.start + seeing.start) * width..],
                    b_panel: PANEL,
                    b_k: width,
                    c: &mut c[(seen.offset + first) * width..],
                    c_row: width,
                    start: Start::Add,
                });
            };
            product(queries.p, queries.d_context, v_width, block.d_v);
            product(queries.d, queries.q, k_width, block.d_k);
        }
    }

    /// `d_q += d keys`, six rows at a time.
    fn to_queries(&self, seen: &Seen, block: &Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let [width, _] = self.size.widths();
        for (rows, panels) in seen.groups() {
            let first = panels.start * PANEL;
            self.kernels.multiply(Product {
                rows: rows.len(),
                n: if panels.is_empty() { 0 } else { width },
                k: panels.len() * PANEL,
                a: &queries.d[seen.numbers(rows.clone())][first..],
                a_stride: Stride::Rows(KEYS),
                b: &block.keys[(seen.offset + first) * width..],
                b_panel: PANEL,
                b_k: width,
                c: &mut queries.d_q[(seen.rows.start + rows.start) * width..],
                c_row: width,
                start: Start::Add,
            });
        }
    }

    /// The three products of a block with something that is not finite: hidden pairs are left out.
    fn pairs(&self, seen: &Seen, block: &mut Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let [k_width, v_width] = self.size.widths();
        let (first, numbers) = (seen.rows.start, seen.numbers(0..seen.rows.len()));
        self.kernels.pairs(&mut RowsAndKeys {
            visible: seen.bits(),
            p: &queries.p[numbers.clone()],
            d: &queries.d[numbers],
            d_context: &queries.d_context[first * v_width..],
            q: &queries.q[first * k_width..],
            k: &block.keys[seen.offset * k_width..],
            d_v: &mut block.d_v[seen.offset * v_width..],
            d_k: &mut block.d_k[seen.offset * k_width..],
            d_q: &mut queries.d_q[first * k_width..],
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
