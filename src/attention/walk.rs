//! How the rows of a work item meet their keys, tile by tile.
//!
//! ```text
//! q <- sign(scale) * Q                                                 [rows][head_dim], heads of the group interleaved
//! for each tile of 64 keys that the rows can see:
//!     keys, values <- packed K, V                                      once for all rows of the item
//!     for each group of 6 rows that can see the tile:                  `sight.rs`; those that see all of it at once
//!         p <- q keys^T; |scale|, softcap, bias, mask; online softmax; dropout
//!         context <- context + p values
//! context <- context / sum; lse <- |scale| * m + ln(sum)     (m + ln(sum) with softcap or bias), see `totals.rs`
//! ```
//!
//! A row meets its keys in ascending order whatever the item, the group and the thread, so results do not depend on any
//! of them.

use std::ops::Range;

use super::bias::ScoreRow;
use super::dropout::Dropout;
use super::problem::{Dims, Rules};
use super::room::{Room, RowsRoom, TilePlace, TileRoom};
use super::sight::{BlockSight, Seeing};
use super::source::{Coming, Source};
use super::tiles::Step;
use super::workspace::ItemSize;
use crate::element::Element;
use crate::kernels::{
    Dropped, Group, KEYS, Kernels, KeyTile, Lines, MAX_ROWS, PANEL, RowKey, RowsScoring, Scoring, SplitQueries,
    Splitting, UNIT_ROWS, Upcoming, rows_of_tile,
};
use crate::mask::HeadMask;
use ndarray::{ArrayView4, Axis, s};

/// The queries of a call and its rules, wherever its keys and values are.
pub(super) struct Call<'p, 'a, T> {
    pub(super) dims: Dims,
    /// `[batch, num_heads, rows, head_dim]`: all queries, or those from `first` on that are computed now.
    pub(super) q: ArrayView4<'p, T>,
    pub(super) first: usize,
    pub(super) rules: &'p Rules<'a, T>,
    pub(super) source: &'p dyn Source<T>,
}

/// Which rows: some query positions of all heads that read a KV head of a batch entry.
#[derive(Debug, Clone)]
pub(super) struct Rows {
    pub(super) entry: usize,
    pub(super) kv_head: usize,
    /// Of the queries that are computed now.
    pub(super) positions: Range<usize>,
}

/// What is known about rows that have met some of their keys.
pub(super) struct State<'s, T> {
    /// `[rows][width]`, not yet divided.
    pub(super) context: &'s mut [T],
    /// `[rows]`, the references of the softmax, in [`Walk::unit`]s.
    pub(super) maxima: &'s mut [T],
    /// `[rows][16]` partial sums.
    pub(super) sums: &'s mut [T],
}

impl<T: Element> Call<'_, '_, T> {
    /// Where the keys end that some query of the call sees by structure: what is behind them has no influence, on no bit.
    pub(super) fn seen(&self, mask: &HeadMask<'_>) -> usize {
        let queries = self.q.len_of(Axis(2));
        self.dims.kv_len.min(queries.checked_sub(1).map_or(0, |last| mask.keys(self.first + last).end))
    }

    /// The keys of a tile that no query of the heads that read them sees, bit by bit.
    pub(super) fn hidden(&self, entry: usize, kv_head: usize, tile: usize) -> u64 {
        let Rules { heads, .. } = self.rules;
        let mask = self.rules.mask(entry);
        let queries = self.first..self.first + self.q.len_of(Axis(2));
        let seen = heads.query_heads(kv_head).flat_map(|head| {
            let mask = mask.of_head(head);
            queries.clone().map(move |i| mask.word(i, tile))
        });
        !seen.fold(0, |all, seen| all | seen)
    }

    /// The tiles that some of the query positions can see.
    pub(super) fn tiles(&self, mask: &HeadMask<'_>, positions: Range<usize>) -> Range<usize> {
        if positions.is_empty() {
            return 0..0;
        }
        let (first, last) = (self.first + positions.start, self.first + positions.end - 1);
        mask.keys(first).start / KEYS..mask.keys(last).end.min(self.dims.kv_len).div_ceil(KEYS)
    }
}

impl<'s, T: Element> State<'s, T> {
    /// Cut from the [`ItemSize::state_len`] numbers of an item.
    pub(super) fn new(numbers: &'s mut [T], size: &ItemSize) -> Self {
        let (context, rest) = numbers.split_at_mut(size.rows * size.width());
        let (sums, rest) = rest.split_at_mut(size.rows * PANEL);
        Self { context, sums, maxima: &mut rest[..size.rows] }
    }

    /// Before the first key.
    pub(super) fn clear(&mut self) {
        self.context.fill(T::zero());
        self.maxima.fill(T::neg_infinity());
        self.sums.fill(T::zero());
    }
}

/// So many numbers of keys and values may still be in the second-level caches when a call begins. One row that reads no more
/// does not ask ahead: that would cost more than it saves (8 heads of 512 keys, one token: 1.25 of the time; 32 heads of 4096 keys, which are asked for:
/// 0.93, in `bf16` 0.70; Emerald Rapids, two threads).
const HOT_NUMBERS: f64 = (1 << 21) as f64;

/// The packed queries of a walk.
#[derive(Clone, Copy)]
struct Asking<'s, T> {
    /// `[rows][head_dim]`
    rows: &'s [T],
    split: Option<SplitQueries<'s, T>>,
}

/// The walk of one item.
pub(super) struct Walk<'p, 'a, T: 'static> {
    pub(super) call: &'p Call<'p, 'a, T>,
    pub(super) kernels: &'static Kernels<T>,
    pub(super) at: Rows,
    /// The only query head of the rows, if they do not belong to all that read the KV head.
    only: Option<usize>,
    /// How many query heads share each position.
    pub(super) group: usize,
    pub(super) rows: usize,
    /// Columns of a row of context.
    pub(super) width: usize,
    /// The rules that all heads of the batch entry share.
    pub(super) mask: HeadMask<'p>,
    /// The biases of the rows, if they all belong to one head and lie in memory like that.
    lines: Option<Lines<'a, T>>,
    /// Where the rows are written in the end.
    output: Option<Upcoming>,
    /// Whether products are made by the matrix unit.
    pub(super) unit: bool,
}

impl<'p, 'a, T: Element> Walk<'p, 'a, T> {
    pub(super) fn new(call: &'p Call<'p, 'a, T>, kernels: &'static Kernels<T>, at: Rows) -> Self {
        let group = call.rules.heads.group_size(at.kv_head);
        Self::of_group(call, kernels, at, None, group)
    }

    /// The rows of one query head.
    pub(super) fn of_head(call: &'p Call<'p, 'a, T>, kernels: &'static Kernels<T>, at: Rows, head: usize) -> Self {
        Self::of_group(call, kernels, at, Some(head), 1)
    }

    fn of_group(
        call: &'p Call<'p, 'a, T>,
        kernels: &'static Kernels<T>,
        at: Rows,
        only: Option<usize>,
        group: usize,
    ) -> Self {
        let (rows, mask) = (at.positions.len() * group, call.rules.mask(at.entry));
        let size = ItemSize::new(rows, call.dims, call.rules);
        let (width, unit) = (size.width(), size.unit);
        Self { call, kernels, at, only, group, rows, width, mask, lines: None, output: None, unit }.with_lines()
    }

    fn with_lines(self) -> Self {
        let Some(bias) = self.call.rules.bias.as_ref().filter(|_| self.group == 1 && self.rows > 0) else {
            return self;
        };
        let (head, i) = self.row(0);
        Self { lines: bias.lines(self.score_row(head, i)), ..self }
    }

    /// Asks memory for the rows' place in the output while they meet their last keys.
    pub(super) fn with_output(self, output: Option<Upcoming>) -> Self {
        Self { output, ..self }
    }

    pub(super) fn entry(&self) -> usize {
        self.at.entry
    }

    pub(super) fn positions(&self) -> Range<usize> {
        self.at.positions.clone()
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Which query of the call a row has.
    pub(super) fn index(&self, row: usize) -> usize {
        self.call.first + self.at.positions.start + if self.group == 1 { row } else { row / self.group }
    }

    /// The key position of a row's query.
    pub(super) fn position(&self, row: usize) -> i64 {
        self.mask.position(self.index(row))
    }

    /// What the walk needs room for.
    pub(super) fn size(&self) -> ItemSize {
        ItemSize::new(self.rows, self.call.dims, self.call.rules)
    }

    /// The query head and the position of a row: positions ascend, so that a group of rows spans few of them.
    pub(super) fn row(&self, row: usize) -> (usize, usize) {
        let (index, position) = if self.group == 1 { (0, row) } else { (row % self.group, row / self.group) };
        let head = self.only.unwrap_or_else(|| self.call.rules.heads.query_head(self.at.kv_head, index));
        (head, self.at.positions.start + position)
    }

    /// The tiles that some row can see.
    pub(super) fn tiles(&self) -> Range<usize> {
        let positions = if self.rows == 0 { 0..0 } else { self.at.positions.clone() };
        self.call.tiles(&self.mask, positions)
    }

    /// Meets the keys of the tiles that are among `tiles`, in ascending order. `after` is what the thread will probably do
    /// then: memory is asked for its first keys in time.
    pub(super) fn run(
        &self,
        tiles: Range<usize>,
        after: Option<Rows>,
        state: &mut State<'_, T>,
        room: &mut Room<'_, T>,
    ) {
        let visible = self.tiles();
        let tiles = tiles.start.max(visible.start)..tiles.end.min(visible.end);
        if tiles.is_empty() {
            return;
        }
        let Call { dims, rules, .. } = self.call;
        let Room { queries, split_queries, tile: room } = room;
        let queries = self.queries(queries);
        if let Some(dropout) = &rules.dropout {
            self.fill_row_keys(dropout, room.rows.row_keys);
        }
        if let Some(from) = &rules.relative_keys {
            self.relative_products(from, queries, [&mut *room.place.keys, &mut *room.rows.scores], room.rows.relative);
        }
        let keys_of = |tile: usize| dims.kv_len.min(tile * KEYS)..dims.kv_len.min((tile + 1) * KEYS);
        let mut after = after.map(|Rows { entry, kv_head, positions }| {
            let first = self.call.tiles(&rules.mask(entry), positions).start;
            Coming { entry, kv_head, keys: keys_of(first) }
        });
        let split = self
            .unit
            .then(|| self.kernels.split_queries(queries, [self.rows, dims.head_dim, dims.head_dim], split_queries));
        let queries = Asking { rows: queries, split: split.flatten() };
        let whole = self.whole_tiles();
        // What is split for the unit in between leaves the CPU time to guess: asked for besides, it comes later. (0.88 of the time
        // without, 96 heads of 128 queries and keys; 0.99, 8 heads of 2048; two threads of an Emerald Rapids.)
        let asks = !self.unit && (self.rows > 1 || dims.kv_numbers() > HOT_NUMBERS);
        let TileRoom { place, spare, rows } = room;
        let mut done = false;
        // Dense rules hide keys of any tile.
        let simple = self.at_once() && !self.mask.is_dense();
        for tile in tiles.clone() {
            let Rows { entry, kv_head, .. } = self.at;
            let last = tile + 1 == tiles.end;
            // Also beyond the last of these tiles: this thread or another will want it soon.
            let more = tile + 1 < visible.end;
            let next = if more { Some(Coming { entry, kv_head, keys: keys_of(tile + 1) }) } else { after.take() };
            let step = Step {
                keys: keys_of(tile),
                next: next.filter(|_| asks),
                output: self.output.filter(|_| last && !self.unit),
                done,
            };
            let mut coming = match self.unit && !last {
                true => self.begin(keys_of(tile + 1), whole.contains(&(tile + 1)), spare),
                false => None,
            };
            let all_see = whole.contains(&tile);
            if !(simple && all_see && self.whole_tile(&step, queries, state, (place, rows), coming.as_mut())) {
                let seeing = self.seeing(step.keys.clone(), all_see);
                self.tile(step, seeing, queries, state, (place, rows), coming.as_mut());
            }
            done = coming.is_some_and(Splitting::finish);
            if self.unit {
                std::mem::swap(place, spare);
            }
        }
    }

    /// Whether rows that see all of a tile can meet it at once.
    fn at_once(&self) -> bool {
        let Rules { bias, dropout, relative_keys, .. } = self.call.rules;
        self.lines.is_some() == bias.is_some() && (dropout.is_none() || self.unit) && relative_keys.is_none()
    }

    /// Meets the keys of one tile that all rows see, as most tiles are: what [`Walk::tile`] does then, without a question of
    /// who sees what, which is a sixth of the time of a token's tile. Does nothing and returns false where
    /// [`Kernels::attend_rows`] does.
    fn whole_tile(
        &self,
        step: &Step,
        queries: Asking<'_, T>,
        state: &mut State<'_, T>,
        (place, room): (&mut TilePlace<'_, T>, &mut RowsRoom<'_, T>),
        coming: Option<&mut Splitting<'_, T>>,
    ) -> bool {
        let RowsRoom { scores, weights, row_keys, .. } = room;
        let groups = self.rows.div_ceil(MAX_ROWS);
        let from = self.unpack(step, groups, place, weights);
        let tile = self.key_tile(from, step.output, 0..KEYS / PANEL, 0, groups);
        let all = self.group(0..self.rows, queries, state, [scores, weights]);
        self.meet_at_once(&tile, step.keys.start, all, (0, row_keys), coming)
    }

    /// [`Kernels::attend_rows`] with the rules of the walk: `rows` from `row` on meet the tile whose first key is `first`. With the
    /// keys of the generator for all rows of the walk, if there is dropout.
    #[inline(always)]
    fn meet_at_once(
        &self,
        tile: &KeyTile<'_, T>,
        first: usize,
        mut rows: Group<'_, T>,
        (row, row_keys): (usize, &[RowKey]),
        coming: Option<&mut Splitting<'_, T>>,
    ) -> bool {
        let Rules { softcap, scale, dropout, .. } = self.call.rules;
        let keys = row..row + rows.rows;
        let dropped = |dropout: &Dropout<T>| Dropped { keys: &row_keys[keys], first, drops: dropout.drops };
        let scoring = RowsScoring {
            bias: self.bias_lines(row, first),
            softcap: *softcap,
            factor: split_scale(*scale).1,
            dropout: dropout.as_ref().map(dropped),
        };
        self.kernels.attend_rows(&mut rows, tile, &scoring, coming)
    }

    /// Meets the keys of one tile.
    fn tile(
        &self,
        step: Step,
        mut seeing: Seeing<'_>,
        queries: Asking<'_, T>,
        state: &mut State<'_, T>,
        (place, room): (&mut TilePlace<'_, T>, &mut RowsRoom<'_, T>),
        mut coming: Option<&mut Splitting<'_, T>>,
    ) {
        let keys = step.keys.clone();
        let mut at_once = self.at_once();
        let some = seeing.some.clone();
        let groups = some.len().div_ceil(MAX_ROWS);
        let most = if queries.split.is_some() { UNIT_ROWS } else { MAX_ROWS };
        let (mut unpacked, mut packed) = (Some(place), None);
        let mut row = some.start;
        loop {
            row = self.first_seeing(&seeing, row);
            if row >= some.end {
                break;
            }
            let block = self.block_sight(&mut seeing, row, keys.clone(), most, at_once);
            if block.panels.is_empty() {
                row = block.rows.end;
                continue;
            }
            // Packed for the first that see any of it.
            if let Some(place) = unpacked.take() {
                packed = Some(self.unpack(&step, groups, place, room.weights));
            }
            let Some(from) = packed else { continue };
            let first = (block.rows.start - some.start) / MAX_ROWS;
            let tile = self.key_tile(from, step.output, block.panels.clone(), first, groups);
            if at_once && row < block.run {
                let run = block.run;
                let all = self.group(row..run, queries, state, [&mut *room.scores, &mut *room.weights]);
                if self.meet_at_once(&tile, keys.start, all, (row, room.row_keys), coming.as_deref_mut()) {
                    row = run;
                    continue;
                }
                // Some values are not finite, for no row of it.
                at_once = false;
            }
            row = block.rows.end;
            self.block(&tile, keys.clone(), block, queries, (&mut *state, &mut *room), coming.as_deref_mut());
        }
    }

    /// A block of rows and a tile: by the matrix unit if the tile is split for it, else group by group.
    fn block(
        &self,
        tile: &KeyTile<'_, T>,
        keys: Range<usize>,
        block: BlockSight,
        queries: Asking<'_, T>,
        (state, room): (&mut State<'_, T>, &mut RowsRoom<'_, T>),
        mut coming: Option<&mut Splitting<'_, T>>,
    ) {
        let rules = self.call.rules;
        let rows = block.rows.clone();
        let mut all = self.group(rows.clone(), queries, state, [&mut *room.scores, &mut *room.weights]);
        let mut unit = self.kernels.unit_scores(&mut all, tile, coming.as_deref_mut());
        let by_unit = unit.is_some();
        for (index, sight) in block.groups.into_iter().enumerate() {
            let first = rows.start + index * MAX_ROWS;
            let rows = first..rows.end.min(first + MAX_ROWS);
            if rows.is_empty() {
                break;
            }
            let at = if by_unit { index * MAX_ROWS * KEYS } else { 0 };
            let Some(sight) = sight else {
                if by_unit {
                    room.scores[at..][..rows.len() * KEYS].fill(T::zero());
                }
                continue;
            };
            let tile = KeyTile { panels: sight.panels, group: tile.group + index, ..tile.clone() };
            let mut group = self.group(rows.clone(), queries, state, [&mut room.scores[at..], &mut *room.weights]);
            if !by_unit {
                self.kernels.scores(&mut group, &tile);
            }
            if let Some(from) = &rules.relative_keys {
                self.add_relative(from, rows.clone(), keys.clone(), room.relative, group.p);
            }
            let scoring = Scoring {
                visible: sight.bits.as_ref().map(|bits| &bits[..]),
                bias: self.bias_rows(rows.clone(), keys.clone(), room.bias),
                softcap: rules.softcap,
                factor: split_scale(rules.scale).1,
                dropout: rules.dropout.as_ref().map(|dropout| Dropped {
                    keys: &room.row_keys[rows],
                    first: keys.start,
                    drops: dropout.drops,
                }),
            };
            if let Some(unit) = &mut unit {
                self.kernels.weights(&mut group, &tile, &scoring);
                tile.clear_hidden(group.rows, group.p);
                unit.stay_awake();
            } else {
                self.kernels.weigh(&mut group, &tile, &scoring);
            }
        }
        if let Some(unit) = &mut unit {
            let mut all = self.group(rows, queries, state, [&mut *room.scores, &mut *room.weights]);
            self.kernels.unit_values(unit, &mut all, tile, coming);
        }
    }

    /// Some rows and what is known about them.
    fn group<'s>(
        &self,
        rows: Range<usize>,
        queries: Asking<'s, T>,
        state: &'s mut State<'_, T>,
        [scores, weights]: [&'s mut [T]; 2],
    ) -> Group<'s, T> {
        let (head_dim, width) = (self.call.dims.head_dim, self.width);
        Group {
            rows: rows.len(),
            head_dim,
            q: &queries.rows[rows.start * head_dim..],
            q_row: head_dim,
            split: queries.split.map(|split| split.from(rows.start)),
            m: &mut state.maxima[rows.start..],
            l: &mut state.sums[rows.start * PANEL..],
            o: &mut state.context[rows.start * width..],
            o_row: width,
            p: scores,
            weights,
        }
    }

    /// `[rows][head_dim]`, with the sign of the scale (its size is applied to the products): where they are, if they lie
    /// like that, or packed.
    fn queries<'s>(&'s self, room: &'s mut [T]) -> &'s [T] {
        let factor = split_scale(self.call.rules.scale).0;
        let q = self.call.q.index_axis(Axis(0), self.at.entry);
        let head_dim = self.call.dims.head_dim;
        if self.group == 1 {
            let rows = q.slice_move(s![self.row(0).0, self.at.positions.clone(), ..]);
            if factor == T::one()
                && let Some(rows) = rows.to_slice()
            {
                return rows;
            }
            self.kernels.pack_scaled(rows, factor, room);
            return room;
        }
        for row in 0..self.rows {
            let (head, i) = self.row(row);
            self.kernels.pack_scaled(q.slice(s![head, i..i + 1, ..]), factor, &mut room[row * head_dim..]);
        }
        room
    }

    /// The biases from a row and a key on, if they are lines of memory.
    pub(super) fn bias_lines(&self, row: usize, key: usize) -> Option<Lines<'a, T>> {
        self.lines.map(|lines| lines.from(row, key))
    }

    /// The biases of a group of rows, if there are any: where they are, or copied, with zeros beyond the keys.
    pub(super) fn bias_rows<'s>(
        &'s self,
        rows: Range<usize>,
        keys: Range<usize>,
        room: &'s mut [T],
    ) -> Option<[&'s [T]; MAX_ROWS]> {
        let from = self.call.rules.bias.as_ref()?;
        let row = |row: usize| {
            let (head, i) = self.row(row);
            self.score_row(head, i)
        };
        // The next group comes after the products of this one: time enough.
        let next = rows.end..self.rows.min(rows.end + MAX_ROWS);
        if let Some(lines) = self.lines.filter(|_| keys.len() == KEYS) {
            lines.fetch(next, keys.clone());
            return Some(lines.group(rows, keys));
        }
        for next in next {
            from.fetch(row(next), keys.clone());
        }
        let mut found = [&[][..]; MAX_ROWS];
        let mut find =
            |(row, to): (ScoreRow, &mut &'s [T])| from.row(row, keys.clone()).map(|found| *to = found).is_some();
        if keys.len() == KEYS && rows.clone().map(row).zip(&mut found).all(&mut find) {
            return Some(found);
        }
        for (row, to) in rows.map(row).zip(room.chunks_exact_mut(KEYS)) {
            let (visible, beyond) = to.split_at_mut(keys.len());
            from.copy(row, keys.start, visible);
            beyond.fill(T::zero());
        }
        Some(rows_of_tile(room))
    }

    /// `[rows]`, the keys of the generator.
    pub(super) fn fill_row_keys(&self, dropout: &Dropout<T>, to: &mut Vec<RowKey>) {
        let rows = (0..self.rows).map(|row| self.row(row));
        to.clear();
        to.extend(rows.map(|(head, i)| dropout.head(self.at.entry, head).row(self.call.first + i)));
    }

    /// The scores of a query that is computed now.
    pub(super) fn score_row(&self, head: usize, i: usize) -> ScoreRow {
        let i = self.call.first + i;
        ScoreRow { entry: self.at.entry, head, i, position: self.mask.position(i) }
    }

    /// What the maxima are counted in: products, or scores where something is done to them.
    pub(super) fn unit(&self) -> T {
        let Rules { softcap, bias, scale, .. } = self.call.rules;
        if softcap.is_some() || bias.is_some() { T::one() } else { split_scale(*scale).1 }
    }
}

/// What the queries are multiplied by, which must not round them, and what their products are, which must be positive:
/// hidden scores are -inf and have to stay so.
fn split_scale<T: Element>(scale: T) -> (T, T) {
    if scale == T::zero() { (T::zero(), T::one()) } else { (scale.signum(), scale.abs()) }
}
