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
//! Steps and what they share are here, the tile and its products in `backward_tile.rs`.
//! (FlashAttention-2, Dao 2023, <https://arxiv.org/abs/2307.08691>, with register-sized groups.) Five products for each
//! visible pair, tiles that nobody sees are skipped, and the sums over the heads of a group are made inside an item. A matrix
//! unit has all of them, where there is one: see `backward_unit.rs` and `backward_stage.rs`.
//! Every sum has one order, whatever the number of threads. Scratch is bounded by the block, see [`crate::Workspace`].

use super::backward_tile::Seen;
use super::backward_unit::UnitRoom;
use super::gradients::{Differentiated, GradientsMut};
use super::problem::Problem;
use super::row_shares::{fill_delta, sum_bias, sum_sinks};
use super::schedule::{back_tile, key_block};
use super::source::Arrays;
use super::tables_backward::{TableGradients, TableRoom, TableSize, Tables, reserve_sums};
use super::walk::{Call, Rows, Walk};
use super::workspace::{BackMods, BackSize, Scratch, Workspace};
use crate::element::Element;
use crate::error::Result;
use crate::kernels::{BackRoom, Cut, KEYS, Kernels, Pair, Relay, RelayItem, RowKey, Targets};
use crate::parallel;
use ndarray::{ArrayView2, ArrayViewMut2, Axis, s};

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
pub(super) struct Backward<'p, 'a, T: 'static> {
    pub(super) call: &'p Differentiated<'a, T>,
    forward: &'p Call<'p, 'a, T>,
    pub(super) kernels: &'static Kernels<T>,
    pub(super) size: BackSize,
    /// `[batch, num_heads, q_len]`
    delta: &'p [T],
    /// What goes by distance.
    pub(super) tables: Option<Tables<'p, 'a, T>>,
}

/// A block of keys, packed, and its gradients.
pub(super) struct Keys<'s, T: 'static> {
    /// Keys and values.
    source: [ArrayView2<'s, T>; 2],
    /// Whether they are packed: the unit may have read them where they are.
    packed: bool,
    /// `[panels][head_dim][16]`
    pub(super) key_panels: &'s mut [T],
    /// `[panels][value_dim][16]`
    pub(super) value_panels: &'s mut [T],
    /// What the matrix unit has of them and of the rows that they meet, if it multiplies.
    pub(super) unit: Option<UnitRoom<'s, T>>,
    /// `[keys][k_width]`
    pub(super) keys: &'s mut [T],
    /// `[keys][k_width]`
    pub(super) d_k: &'s mut [T],
    /// `[keys][v_width]`
    pub(super) d_v: &'s mut [T],
    /// Whether these two are sums. Before, they hold anything.
    added: bool,
    /// Whether all keys are finite.
    pub(super) finite: bool,
}

impl<T: Element> Keys<'_, T> {
    /// Makes the sums ready to be added to.
    pub(super) fn begin(&mut self) {
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
pub(super) struct Queries<'s, T> {
    /// `[rows][k_width]`
    pub(super) q: &'s mut [T],
    /// `[rows][v_width]`
    pub(super) d_context: &'s mut [T],
    /// `[rows][k_width]`
    pub(super) d_q: &'s mut [T],
    /// `[rows][64]`: probabilities of a tile, and gradients of its products.
    pub(super) p: &'s mut [T],
    pub(super) d: &'s mut [T],
    /// `[rows]`
    pub(super) lse: &'s mut [T],
    /// `[rows]`
    pub(super) delta: &'s mut [T],
    pub(super) row_keys: &'s mut Vec<RowKey>,
    /// `[6][64]`, if there is a bias.
    pub(super) bias: &'s mut [T],
    pub(super) room: BackRoom<'s, T>,
    pub(super) tables: &'s mut TableRoom<T>,
    /// Whether queries and d_context are packed: the unit may have read them where they are.
    packed: bool,
    /// What the last two blocks of rows have seen of their tiles.
    pub(super) seen: [Seen; 2],
    /// Which of them is the last.
    pub(super) turn: usize,
    /// Whether queries and d_context are finite.
    pub(super) finite: bool,
}

/// What a step adds to besides queries, keys and values.
pub(super) struct Own<'s, T> {
    /// `[1 or q_len, keys]`
    pub(super) d_bias: Option<ArrayViewMut2<'s, T>>,
    /// Which of the heads that read the KV head it is.
    pub(super) member: usize,
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
        let mut queries = Queries {
            q,
            d_context,
            d_q,
            p,
            d,
            lse,
            delta,
            row_keys,
            bias,
            room,
            tables: &mut tables,
            packed: false,
            seen: [Seen::NOTHING; 2],
            turn: 0,
            finite: true,
        };
        for pair in item.pairs() {
            let heads = &self.call.problem.rules.heads;
            let kv_head = heads.read_kv_head(pair.index);
            let at = s![pair.entry, kv_head, item.keys(), ..];
            let (k, v) = (self.call.problem.k.slice(at), self.call.problem.v.slice(at));
            let seen = self.forward.seen(&self.call.problem.rules.mask(pair.entry)).min(item.keys().end);
            let seen = seen.saturating_sub(item.keys().start);
            let unit =
                if self.size.unit { UnitRoom::new(self.kernels, self.size.unit_size(), &mut *unit) } else { None };
            let (source, packed, finite, added) = ([k, v], false, true, false);
            let mut block = Keys { source, packed, key_panels, value_panels, unit, keys, d_k, d_v, added, finite };
            self.take_keys(pair, item.keys().start / KEYS, seen, &mut block);
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
                self.write(d_keys, block.d_k, k_width, scale);
                self.write(d_values, block.d_v, v_width, T::one());
            }
        }
        scratch.tables = tables;
    }

    /// Splits the first `seen` keys of a block, which begins with tile `tile`, and their values, or packs them.
    fn take_keys(&self, pair: Pair, tile: usize, seen: usize, block: &mut Keys<'_, T>) {
        // The unit reads them where they are.
        if block.unit.as_mut().is_some_and(|unit| unit.split_lines(seen, block.source)) {
            return;
        }
        self.pack_keys(block);
        let Keys { unit, key_panels, value_panels, keys, .. } = block;
        if let Some(unit) = unit {
            let kv_head = self.call.problem.rules.heads.read_kv_head(pair.index);
            let hidden = |index: usize| self.forward.hidden(pair.entry, kv_head, tile + index);
            unit.take_keys(seen, [key_panels, value_panels], keys, hidden);
        }
    }

    /// Packs a block of keys and values, unless that was done.
    pub(super) fn pack_keys(&self, block: &mut Keys<'_, T>) {
        if !block.packed {
            let [k, v] = block.source;
            self.kernels.pack_panels(k, block.key_panels);
            self.kernels.pack_panels(v, block.value_panels);
            block.finite = self.kernels.pack_rows(k, block.keys);
            block.packed = true;
        }
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
            if item.begins_bias(pair, step % group)
                && let Some(mut d_bias) = item.d_bias(pair.entry, head)
            {
                // Not all at once: what is cleared here is still in the caches when the step adds to it.
                match d_bias.nrows() == dims.q_len {
                    true => d_bias.slice_mut(s![walk.positions(), ..]).fill(T::zero()),
                    false if start == 0 => d_bias.fill(T::zero()),
                    false => {}
                }
            }
            let tiles = visible.start.max(keys.start / KEYS)..visible.end.min(keys.end.div_ceil(KEYS));
            if tiles.is_empty() && !item.is_first() {
                continue;
            }
            queries.d_q[..walk.rows() * k_width].fill(T::zero());
            if !tiles.is_empty() {
                self.take_rows(&walk, head, block, queries);
                if let Some(tables) = &self.tables {
                    tables.begin_step(&walk, keys.clone(), queries.q, queries.tables);
                }
                let mut own = Own { d_bias: item.d_bias(pair.entry, head), member: step % group };
                for tile in tiles {
                    self.tile(&walk, tile, keys.start, block, queries, &mut own);
                }
                self.drain(&walk, block, queries, &mut own);
                if let Some(tables) = &self.tables {
                    tables.end_step(walk.rows(), queries.q, queries.finite, queries.d_q, queries.tables);
                }
            }
            let (first, scale) = (item.is_first(), rules.scale);
            if let Some(mut turn) = item.turn(pair, step) {
                match first {
                    true => self.write(turn.rows(), queries.d_q, k_width, scale),
                    false => put(turn.rows(), queries.d_q, k_width, |to, x| *to += scale * x),
                }
            }
        }
    }

    /// Rows of `width` numbers times a factor to a gradient of any strides.
    fn write(&self, mut to: ArrayViewMut2<'_, T>, rows: &[T], width: usize, factor: T) {
        let (count, columns) = to.dim();
        if columns == width
            && let Some(to) = to.as_slice_mut()
            && let Ok(rows) = ArrayView2::from_shape((count, columns), &rows[..count * columns])
        {
            return self.kernels.pack_scaled(rows, factor, to);
        }
        put(to, rows, width, |to, x| *to = factor * x);
    }

    /// What a step needs of its rows.
    fn take_rows(&self, walk: &Walk<'_, '_, T>, head: usize, block: &mut Keys<'_, T>, queries: &mut Queries<'_, T>) {
        let Problem { dims, rules, q, .. } = &self.call.problem;
        let (entry, positions) = (walk.entry(), walk.positions());
        let at = s![entry, head, positions.clone(), ..];
        let lines = [q.slice(at).to_slice(), self.call.d_context.slice(at).to_slice()];
        (queries.packed, queries.finite) = (false, true);
        // The unit reads them where they are. What goes by distance reads them packed, as the multipliers do.
        let taken = match (&mut block.unit, lines) {
            (Some(unit), [Some(q), Some(d_context)]) if self.tables.is_none() => {
                unit.split_rows(walk.rows(), [q, d_context], [dims.head_dim, dims.value_dim])
            }
            _ => false,
        };
        if !taken {
            self.pack(walk, queries);
            if let Some(unit) = &mut block.unit {
                unit.take_rows(walk.rows(), [queries.q, queries.d_context], |row| walk.sees_something(row));
            }
        }
        let lse = self.call.lse.slice(s![entry, head, positions.clone()]);
        queries.lse.iter_mut().zip(lse).for_each(|(to, &lse)| *to = lse);
        let first = (entry * dims.num_heads + head) * dims.q_len + positions.start;
        queries.delta[..positions.len()].copy_from_slice(&self.delta[first..][..positions.len()]);
        if let Some(dropout) = &rules.dropout {
            walk.fill_row_keys(dropout, queries.row_keys);
        }
    }

    /// Packs the rows of a step, unless that was done.
    pub(super) fn pack(&self, walk: &Walk<'_, '_, T>, queries: &mut Queries<'_, T>) {
        if !queries.packed {
            queries.packed = true;
            let at = s![walk.entry(), walk.row(0).0, walk.positions(), ..];
            let finite = self.kernels.pack_rows(self.call.problem.q.slice(at), queries.q);
            queries.finite = self.kernels.pack_rows(self.call.d_context.slice(at), queries.d_context) && finite;
        }
    }
}

/// Rows of `width` numbers to a gradient of any strides.
fn put<T: Element>(mut to: ArrayViewMut2<'_, T>, rows: &[T], width: usize, put: impl Fn(&mut T, T)) {
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
