//! Tiled backward: gradients by recomputation, no scores in memory.
//!
//! ```text
//! D <- rowsum(d_context * context)                                        once, [batch, num_heads, q_len]
//! for each item (block of keys of a batch entry and KV head):             dealt to the threads
//!     keys, values <- K, V packed to panels and rows; d_k, d_v <- 0
//!     for each step (tile of query positions of a head that reads them, if it can see the block):
//!         q, d_o <- Q, d_context; d_q <- 0
//!         for each tile of 64 keys that the step can see:
//!             for each group of 6 rows that can see the tile:
//!                 p <- q keys^T; d <- d_o values^T                        what goes by distance: see `tables_backward.rs`
//!                 p, d <- probabilities and gradients of the products     see `kernels/back.rs`
//!             d_v <- d_v + p^T d_o;  d_k <- d_k + d^T q                    p and d are read along their columns
//!             d_q <- d_q + d keys
//!         D_Q <- D_Q + scale * d_q                                         block after block, see `kernels/relay.rs`
//!     D_K <- scale * d_k; D_V <- d_v
//! ```
//!
//! (FlashAttention-2, Dao 2023, <https://arxiv.org/abs/2307.08691>, with register-sized groups.) Five products for each
//! visible pair, tiles that nobody sees are skipped, and the sums over the heads of a group are made inside an item. A matrix
//! unit has all of them, where there is one: see `backward_unit.rs`.
//! Every sum has one order, whatever the number of threads. Scratch is bounded by the block, see [`crate::Workspace`].

use std::ops::Range;

use super::backward_unit::UnitRoom;
use super::gradients::{Differentiated, GradientsMut};
use super::problem::Problem;
use super::row_shares::{fill_delta, sum_bias, sum_sinks};
use super::schedule::{back_tile, key_block};
use super::sight::Sight;
use super::source::Arrays;
use super::tables_backward::{Patch, TableGradients, TableRoom, TableSize, Tables, reserve_sums};
use super::walk::{Call, Rows, Walk};
use super::workspace::{BackMods, BackSize, Scratch, Workspace};
use crate::element::Element;
use crate::error::Result;
use crate::kernels::{
    BackGroup, BackRoom, Cut, Dropped, KEYS, Kernels, MAX_ROWS, PANEL, Pair, Product, Relay, RelayItem, RowKey,
    RowsAndKeys, Scoring, Start, Stride, Targets, Upcoming,
};
use crate::parallel;
use ndarray::{ArrayView1, ArrayViewMut1, ArrayViewMut2, Axis, s};

/// Fills the gradients of all arguments. `wish` is the caller's number of query positions to a step.
pub(super) fn backward<T: Element>(
    call: &Differentiated<'_, T>,
    wish: Option<usize>,
    mut gradients: GradientsMut<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let Problem { dims, rules, .. } = &call.problem;
    if dims.value_dim == 0 || dims.batch == 0 {
        // Nothing depends on anything.
        gradients.clear();
        return Ok(());
    }
    let unit = rules.use_unit(dims);
    let size = BackSize {
        dims: *dims,
        query_tile: back_tile(dims, wish, unit),
        key_block: key_block(dims, unit),
        unit,
        mods: BackMods {
            biased: rules.bias.is_some(),
            capped: rules.softcap.is_some(),
            drops: rules.dropout.is_some(),
            bias_gradient: gradients.d_bias.is_some() || gradients.d_relative_bias.is_some(),
        },
    };
    let tables = TableSize::new(rules, &gradients, dims, [size.query_tile, size.key_block]);
    let (key_block, query_tile) = (size.key_block, size.query_tile);
    let cut = Cut { heads: &rules.heads, key_block, query_tile, last_step: tables.is_some() };
    let counters = Relay::<T>::counters(&cut, dims.batch, dims.kv_len);
    let flop = 2.5 * dims.flop();
    let (kept, workers) = workspace.backward(parallel::workers(flop, counters));
    let lengths = size.lengths();
    workers.iter_mut().try_for_each(|scratch| scratch.reserve(&lengths))?;
    kept.reserve(dims, counters)?;
    if let Some(size) = &tables {
        workers.iter_mut().try_for_each(|scratch| scratch.tables.reserve(size))?;
        reserve_sums(&mut kept.sums, dims.batch.saturating_mul(rules.heads.num_read()), size)?;
    }
    let (delta, passed, sums) = kept.parts(dims, counters);
    let kernels = T::kernels(rules.level);
    let tables = tables.map(|size| Tables { size, kernels, rules, sums });

    fill_delta(call, delta);
    if let Some(d_sinks) = &mut gradients.d_sinks {
        sum_sinks(call, delta, d_sinks.view_mut());
    }
    // A bias that is the same for all keys of a query needs no pairs.
    if let Some(d_bias) = gradients.d_bias.take_if(|d_bias| d_bias.len_of(Axis(3)) == 1) {
        sum_bias(call, delta, d_bias);
    }
    clear_unread(call, &mut gradients);

    let GradientsMut { d_q, d_k, d_v, d_bias, mut d_relative_bias, mut d_relative_keys, .. } = gradients;
    let Some(relay) = Relay::new(cut, Targets { d_q, d_k, d_v, d_bias }, passed) else {
        debug_assert!(false, "the gradients were made for this call");
        return Ok(());
    };
    let source = Arrays { k: call.problem.k.view(), v: call.problem.v.view() };
    let forward = Call { dims: *dims, q: call.problem.q.view(), first: 0, rules, source: &source };
    let back = Backward { call, forward: &forward, kernels, size, delta, tables };
    parallel::for_each_worker(workers, |scratch| {
        while let Some(mut item) = relay.next() {
            back.item(&mut item, scratch);
        }
    });
    if let Some(tables) = &back.tables {
        tables.finish(dims.batch, &mut TableGradients { bias: &mut d_relative_bias, keys: &mut d_relative_keys });
    }
    Ok(())
}

/// Keys and values of KV heads that no query head reads have no gradient.
fn clear_unread<T: Element>(call: &Differentiated<'_, T>, gradients: &mut GradientsMut<'_, T>) {
    let Problem { dims, rules, .. } = &call.problem;
    if rules.heads.num_read() < dims.num_kv_heads && !(gradients.d_k.is_empty() && gradients.d_v.is_empty()) {
        for kv_head in (0..dims.num_kv_heads).filter(|&kv_head| rules.heads.group_size(kv_head) == 0) {
            gradients.d_k.index_axis_mut(Axis(1), kv_head).fill(T::zero());
            gradients.d_v.index_axis_mut(Axis(1), kv_head).fill(T::zero());
        }
    }
}

/// What all items share.
struct Backward<'p, 'a, T: 'static> {
    call: &'p Differentiated<'a, T>,
    forward: &'p Call<'p, 'a, T>,
    kernels: &'static Kernels<T>,
    size: BackSize,
    /// `[batch, num_heads, q_len]`
    delta: &'p [T],
    /// What goes by distance.
    tables: Option<Tables<'p, 'a, T>>,
}

/// A block of keys, packed, and its gradients.
struct Keys<'s, T: 'static> {
    /// `[panels][head_dim][16]`
    key_panels: &'s [T],
    /// `[panels][value_dim][16]`
    value_panels: &'s [T],
    /// What the matrix unit has of them and of the rows that they meet, if it multiplies.
    unit: Option<UnitRoom<'s, T>>,
    /// `[keys][k_width]`
    keys: &'s [T],
    /// `[keys][k_width]`
    d_k: &'s mut [T],
    /// `[keys][v_width]`
    d_v: &'s mut [T],
    /// Whether these two are sums. Before, they hold anything.
    added: bool,
    /// Whether all keys are finite.
    finite: bool,
}

impl<T: Element> Keys<'_, T> {
    /// Makes the sums ready to be added to.
    fn begin(&mut self) {
        if !self.added {
            self.d_k.fill(T::zero());
            self.d_v.fill(T::zero());
            self.added = true;
        }
    }

    /// After the last step.
    fn finish(&mut self) {
        let Self { d_k, d_v, added, .. } = self;
        let given = self.unit.as_mut().is_some_and(|unit| unit.give_keys([d_k, d_v], *added));
        if !given {
            self.begin();
        }
    }
}

/// The rows of a step, packed, and what they get.
struct Queries<'s, T> {
    /// `[rows][k_width]`
    q: &'s mut [T],
    /// `[rows][v_width]`
    d_context: &'s mut [T],
    /// `[rows][k_width]`
    d_q: &'s mut [T],
    /// `[rows][64]`: probabilities of a tile, and gradients of its products.
    p: &'s mut [T],
    d: &'s mut [T],
    /// `[rows]`
    lse: &'s mut [T],
    /// `[rows]`
    delta: &'s mut [T],
    row_keys: &'s mut Vec<RowKey>,
    /// `[6][64]`, if there is a bias.
    bias: &'s mut [T],
    room: BackRoom<'s, T>,
    tables: &'s mut TableRoom<T>,
    /// Whether queries and d_context are finite.
    finite: bool,
}

/// What a step adds to besides queries, keys and values.
struct Own<'s, T> {
    /// `[1 or q_len, keys]`
    d_bias: Option<ArrayViewMut2<'s, T>>,
    /// Which of the heads that read the KV head it is.
    member: usize,
}

/// Groups of a step at most.
const MAX_GROUPS: usize = MAX_TILE.div_ceil(MAX_ROWS);

/// Rows of a step at most.
pub(super) const MAX_TILE: usize = 192;

/// What a step has seen of a tile.
pub(super) struct Seen {
    /// For each row, bit j set if it sees key j.
    bits: [u64; MAX_TILE],
    /// For each group of rows, the panels it sees.
    panels: [Range<usize>; MAX_GROUPS],
    /// For each panel, the groups from the first to the last that see it.
    groups: [Range<usize>; KEYS / PANEL],
    /// Whether some pair of the tile is hidden.
    partial: bool,
}

impl Seen {
    /// Whether some row of `rows` sees something of the panels.
    pub(super) fn sees(&self, rows: Range<usize>, panels: Range<usize>) -> bool {
        let groups = rows.start / MAX_ROWS..if rows.is_empty() { 0 } else { (rows.end - 1) / MAX_ROWS + 1 };
        (groups.start..groups.end).any(|group| {
            let seen = &self.panels[group];
            seen.start.max(panels.start) < seen.end.min(panels.end)
        })
    }
}

impl<T: Element> Backward<'_, '_, T> {
    /// A block of keys, for each batch entry and KV head that the item has.
    fn item(&self, item: &mut RelayItem<'_, T>, scratch: &mut Scratch<T>) {
        let lengths = self.size.lengths();
        let mut tables = std::mem::take(&mut scratch.tables);
        let (buffers, row_keys) = scratch.parts(&lengths);
        let [
            key_panels,
            value_panels,
            keys,
            d_k,
            d_v,
            q,
            d_context,
            d_q,
            p,
            d,
            lse,
            delta,
            bias,
            slope,
            z,
            d_scores,
            unit,
            ..,
        ] = buffers;
        let room = BackRoom { slope, z, d_scores };
        let tables_room = &mut tables;
        let mut queries =
            Queries { q, d_context, d_q, p, d, lse, delta, row_keys, bias, room, tables: tables_room, finite: true };
        item.clear_bias();
        for pair in item.pairs() {
            let heads = &self.call.problem.rules.heads;
            let kv_head = heads.read_kv_head(pair.index);
            let at = s![pair.entry, kv_head, item.keys(), ..];
            let (k, v) = (self.call.problem.k.slice(at), self.call.problem.v.slice(at));
            self.kernels.pack_panels(k, key_panels);
            self.kernels.pack_panels(v, value_panels);
            let finite = self.kernels.pack_rows(k, keys);
            let seen = self.forward.seen(&self.call.problem.rules.mask(pair.entry)).min(item.keys().end);
            let seen = seen.saturating_sub(item.keys().start);
            let mut unit = self.size.unit.then(|| UnitRoom::new(self.kernels, self.size.unit_size(), &mut *unit));
            if let Some(unit) = &mut unit {
                unit.take_keys(seen, [key_panels, value_panels], keys);
            }
            let mut block = Keys { key_panels, value_panels, unit, keys, d_k, d_v, added: false, finite };
            if let Some(tables) = &self.tables {
                tables.begin(queries.tables);
            }
            self.steps(item, pair, &mut block, &mut queries);
            block.finish();
            let first = item.is_first();
            if let (Some(tables), Some(_turn)) = (&self.tables, item.last_turn(pair)) {
                tables.merge(pair, first, queries.tables);
            }
            item.done(pair);
            let scale = self.call.problem.rules.scale;
            if let Some([d_keys, d_values]) = item.d_keys_values(pair) {
                let [k_width, v_width] = self.size.widths();
                write(d_keys, d_k, k_width, |to, x| *to = scale * x);
                write(d_values, d_v, v_width, |to, x| *to = x);
            }
        }
        scratch.tables = tables;
    }

    /// All queries that can see a block of keys, and for the first block the others too.
    fn steps(&self, item: &mut RelayItem<'_, T>, pair: Pair, block: &mut Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let Problem { dims, rules, .. } = &self.call.problem;
        let kv_head = rules.heads.read_kv_head(pair.index);
        let group = rules.heads.group_size(kv_head);
        let tile = self.size.query_tile;
        let [k_width, _] = self.size.widths();
        for step in 0..dims.q_len.div_ceil(tile) * group {
            let head = rules.heads.query_head(kv_head, step % group);
            let start = step / group * tile;
            let positions = start..dims.q_len.min(start + tile);
            let rows = Rows { entry: pair.entry, kv_head, positions };
            let walk = Walk::of_head(self.forward, self.kernels, rows, head);
            let (visible, keys) = (walk.tiles(), item.keys());
            let tiles = visible.start.max(keys.start / KEYS)..visible.end.min(keys.end.div_ceil(KEYS));
            if tiles.is_empty() && !item.is_first() {
                continue;
            }
            queries.d_q[..walk.rows() * k_width].fill(T::zero());
            if !tiles.is_empty() {
                self.pack(&walk, head, queries);
                if let Some(unit) = &mut block.unit {
                    unit.take_rows(walk.rows(), [queries.q, queries.d_context]);
                }
                if let Some(tables) = &self.tables {
                    tables.begin_step(&walk, keys.clone(), queries.q, queries.tables);
                }
                let mut own = Own { d_bias: item.d_bias(pair.entry, head), member: step % group };
                for tile in tiles {
                    self.tile(&walk, tile, keys.start, block, queries, &mut own);
                }
                if let Some(tables) = &self.tables {
                    tables.end_step(walk.rows(), queries.q, queries.finite, queries.d_q, queries.tables);
                }
            }
            let (first, scale) = (item.is_first(), rules.scale);
            if let Some(mut turn) = item.turn(pair, step) {
                match first {
                    true => write(turn.rows(), queries.d_q, k_width, |to, x| *to = scale * x),
                    false => write(turn.rows(), queries.d_q, k_width, |to, x| *to += scale * x),
                }
            }
        }
    }

    /// What a step needs of its rows.
    fn pack(&self, walk: &Walk<'_, '_, T>, head: usize, queries: &mut Queries<'_, T>) {
        let Problem { dims, rules, q, .. } = &self.call.problem;
        let (entry, positions) = (walk.entry(), walk.positions());
        let at = s![entry, head, positions.clone(), ..];
        let finite = self.kernels.pack_rows(q.slice(at), queries.q);
        queries.finite = self.kernels.pack_rows(self.call.d_context.slice(at), queries.d_context) && finite;
        let lse = self.call.lse.slice(s![entry, head, positions.clone()]);
        queries.lse.iter_mut().zip(lse).for_each(|(to, &lse)| *to = lse);
        let first = (entry * dims.num_heads + head) * dims.q_len + positions.start;
        queries.delta[..positions.len()].copy_from_slice(&self.delta[first..][..positions.len()]);
        if let Some(dropout) = &rules.dropout {
            walk.fill_row_keys(dropout, queries.row_keys);
        }
    }

    /// A step and one tile of a block of keys that begins at `first_key`.
    fn tile(
        &self,
        walk: &Walk<'_, '_, T>,
        tile: usize,
        first_key: usize,
        block: &mut Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) {
        let keys = tile * KEYS..self.size.dims.kv_len.min((tile + 1) * KEYS);
        let offset = keys.start - first_key;
        let seen = self.scores(walk, keys, offset, block, queries, own);
        let by_unit = block.unit.as_mut().is_some_and(|unit| {
            let Queries { p, d, d_q, .. } = &mut *queries;
            unit.gradients([walk.rows(), offset], &seen, [p, d], d_q)
        });
        if by_unit {
            return;
        }
        block.begin();
        if seen.partial && !(block.finite && queries.finite) {
            return self.pairs(walk.rows(), offset, &seen, block, queries);
        }
        self.to_keys(walk.rows(), offset, &seen, block, queries);
        self.to_queries(walk.rows(), offset, &seen, block, queries);
    }

    /// Probabilities and gradients of a tile.
    fn scores(
        &self,
        walk: &Walk<'_, '_, T>,
        keys: Range<usize>,
        offset: usize,
        block: &Keys<'_, T>,
        queries: &mut Queries<'_, T>,
        own: &mut Own<'_, T>,
    ) -> Seen {
        let Problem { dims, rules, .. } = &self.call.problem;
        let [k_width, v_width] = self.size.widths();
        let mut seen = Seen {
            bits: [0; MAX_TILE],
            panels: [const { 0..0 }; MAX_GROUPS],
            groups: [const { 0..0 }; KEYS / PANEL],
            partial: false,
        };
        let mut seeing = walk.seeing(keys.clone(), walk.whole_tiles().contains(&(keys.start / KEYS)));
        // Whole groups, so that all of their products are numbers.
        let some = seeing.some.start / MAX_ROWS * MAX_ROWS..seeing.some.end.next_multiple_of(MAX_ROWS).min(walk.rows());
        let Queries { q, d_context, p, d, .. } = &mut *queries;
        let by_unit = block.unit.as_ref().is_some_and(|unit| {
            let panels = [block.key_panels, block.value_panels];
            unit.products([walk.rows(), offset], some, [q, d_context], panels, [p, d])
        });
        for (index, row) in (0..walk.rows()).step_by(MAX_ROWS).enumerate() {
            let rows = row..walk.rows().min(row + MAX_ROWS);
            let all = rows.end <= walk.run_of_all(&mut seeing, row, keys.start / KEYS);
            let sight = if all { Some(Sight::WHOLE) } else { walk.sight(rows.clone(), keys.clone()) };
            let p = &mut queries.p[row * KEYS..][..rows.len() * KEYS];
            let d = &mut queries.d[row * KEYS..][..rows.len() * KEYS];
            let Some(Sight { panels, bits }) = sight else {
                p.fill(T::zero());
                d.fill(T::zero());
                seen.partial = true;
                continue;
            };
            let product = |a: &[T], k: usize, width: usize, b: &[T], c: &mut [T]| {
                let first = panels.start * PANEL;
                self.kernels.multiply(Product {
                    rows: rows.len(),
                    n: panels.len() * PANEL,
                    k,
                    a: &a[row * width..],
                    a_stride: Stride::Rows(width),
                    b: &b[(offset + first) * k..],
                    b_panel: PANEL * k,
                    b_k: PANEL,
                    c: &mut c[first..],
                    c_row: KEYS,
                    start: Start::Zero,
                });
            };
            if !by_unit {
                product(queries.q, dims.head_dim, k_width, block.key_panels, p);
                product(queries.d_context, dims.value_dim, v_width, block.value_panels, d);
            }
            let columns = panels.start * PANEL..keys.len().min(panels.end * PANEL);
            let patch = Patch { walk, rows: rows.clone(), first_key: keys.start, columns: columns.clone() };
            if let Some(tables) = &self.tables {
                tables.add_products(&patch, p, queries.tables);
            }
            let bias = walk.bias_rows(rows.clone(), keys.clone(), &mut *queries.bias);
            let mut group = BackGroup {
                rows: rows.len(),
                p,
                d,
                lse: &queries.lse[rows.clone()],
                delta: &queries.delta[rows.clone()],
            };
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
                add_to_bias(d_bias, [walk.positions().start + row, offset], columns, d_scores);
            }
            if let Some(tables) = &self.tables {
                tables.collect(&patch, own.member, [queries.room.d_scores, group.d], queries.tables);
            }
            seen.partial |= visible[..rows.len()].iter().any(|&bits| bits != u64::MAX);
            seen.bits[rows.clone()].copy_from_slice(&visible[..rows.len()]);
            for groups in &mut seen.groups[panels.clone()] {
                *groups = hull(groups, &(index..index + 1));
            }
            seen.panels[index] = panels;
        }
        seen
    }

    /// `d_v += p^T d_context` and `d_k += d^T q`, up to six keys at a time.
    fn to_keys(&self, rows: usize, offset: usize, seen: &Seen, block: &mut Keys<'_, T>, queries: &Queries<'_, T>) {
        let [k_width, v_width] = self.size.widths();
        let end =
            (0..KEYS / PANEL).rfind(|&panel| !seen.groups[panel].is_empty()).map_or(0, |panel| (panel + 1) * PANEL);
        // Strips of nearly the same height: of 64 keys, four would be left, too few to keep the multipliers busy.
        let strips = end.div_ceil(MAX_ROWS);
        for strip in 0..strips {
            let strip = end * strip / strips..end * (strip + 1) / strips;
            let first = strip.start;
            let groups = hull(&seen.groups[first / PANEL], &seen.groups[(strip.end - 1) / PANEL]);
            let seeing = groups.start * MAX_ROWS..rows.min(groups.end * MAX_ROWS);
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
    fn to_queries(&self, rows: usize, offset: usize, seen: &Seen, block: &Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let [width, _] = self.size.widths();
        for (row, panels) in (0..rows).step_by(MAX_ROWS).zip(&seen.panels) {
            let first = panels.start * PANEL;
            self.kernels.multiply(Product {
                rows: MAX_ROWS.min(rows - row),
                n: if panels.is_empty() { 0 } else { width },
                k: panels.len() * PANEL,
                a: &queries.d[row * KEYS + first..],
                a_stride: Stride::Rows(KEYS),
                b: &block.keys[(offset + first) * width..],
                b_panel: PANEL,
                b_k: width,
                c: &mut queries.d_q[row * width..],
                c_row: width,
                start: Start::Add,
            });
        }
    }

    /// The three products of a tile with something that is not finite: hidden pairs are left out.
    fn pairs(&self, rows: usize, offset: usize, seen: &Seen, block: &mut Keys<'_, T>, queries: &mut Queries<'_, T>) {
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

/// Rows of `width` numbers to a gradient of any strides.
fn write<T: Element>(mut to: ArrayViewMut2<'_, T>, rows: &[T], width: usize, put: impl Fn(&mut T, T)) {
    let columns = to.ncols();
    if width == 0 {
        return;
    }
    for (mut to, row) in to.rows_mut().into_iter().zip(rows.chunks_exact(width)) {
        match to.as_slice_mut() {
            Some(to) => to.iter_mut().zip(row).for_each(|(to, &x)| put(to, x)),
            None => to.iter_mut().zip(&row[..columns]).for_each(|(to, &x)| put(to, x)),
        }
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
