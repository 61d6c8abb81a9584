//! Tiled attention with online softmax: exact, no scores in memory.
//!
//! ```text
//! for each item (batch entry, KV head, block of query positions):      dealt to the threads, longest first
//!     q <- sign(scale) * Q                                             [rows][head_dim], heads of the group interleaved
//!     for each tile of 64 keys that the block can see:
//!         keys, values <- packed K, V                                  once for all rows of the item
//!         for each group of 6 rows that can see the tile:
//!             p <- |scale| * log2(e) * q keys^T; softcap, bias, mask; online softmax; context <- context + p values
//!     context <- context / sum; lse <- ln 2 * (m + log2 sum)
//! ```
//!
//! (FlashAttention, Dao et al. 2022, <https://arxiv.org/abs/2205.14135>, with register-sized groups.) A row meets its
//! keys in ascending order whatever the block, the group and the thread, so results do not depend on any of them.
//! Scratch is bounded by the tile, see [`crate::Workspace`].

use std::ops::Range;

use super::bias::Bias;
use super::problem::{Head, Problem};
use super::schedule::query_tile;
use super::workspace::{ItemSize, Scratch, Workspace};
use super::{Options, Outputs};
use crate::element::Element;
use crate::error::Result;
use crate::kernels::{Block, Deal, Finite, Group, KEYS, Kernels, KeyTile, MAX_ROWS, PANEL, Scoring};
use crate::mask::HeadMask;
use crate::parallel;
use ndarray::{Axis, s};

/// Fills context and lse.
pub(super) fn forward<T: Element>(
    problem: &Problem<'_, T>,
    options: &Options<'_, T>,
    outputs: Outputs<'_, T>,
    workspace: &mut Workspace<T>,
) -> Result<()> {
    let dims = &problem.dims;
    let heads = &*problem.rules.heads;
    let kernels = T::kernels(problem.rules.level);
    let group = (0..heads.num_read()).map(|index| heads.group_size(heads.read_kv_head(index))).max().unwrap_or(0);
    let query_tile = query_tile(dims, group, options.query_tile);
    let lse = outputs.lse.map(|lse| lse.insert_axis(Axis(3)));
    let Some(deal) = Deal::new(heads, query_tile, outputs.context, lse) else {
        debug_assert!(false, "the outputs were made for this problem");
        return Ok(());
    };
    let workers = workspace.workers(parallel::workers(dims.flop(), deal.len()));
    // Which items a thread gets depends on time; what it has room for must not.
    let size = ItemSize { rows: query_tile.saturating_mul(group), dims: *dims, biased: problem.rules.bias.is_some() };
    workers.iter_mut().try_for_each(|scratch| scratch.reserve(&size))?;
    parallel::for_each_worker(workers, |scratch| {
        while let Some(block) = deal.next() {
            Item::new(problem, kernels, block).run(scratch);
        }
    });
    Ok(())
}

/// One work item.
struct Item<'p, 'a, T: 'static> {
    problem: &'p Problem<'a, T>,
    kernels: &'static Kernels<T>,
    block: Block<'p, T>,
    /// First query position, and how many query heads share each position.
    first: usize,
    group: usize,
    rows: usize,
    /// The rules that all heads of the batch entry share.
    mask: HeadMask<'p>,
}

/// What a group of rows sees of a tile.
struct Sight {
    /// Panels of 16 keys.
    panels: Range<usize>,
    /// The bits of each row, where not all of the panels are visible.
    bits: Option<[u64; MAX_ROWS]>,
}

impl Sight {
    /// All of a full tile.
    const WHOLE: Self = Self { panels: 0..KEYS / PANEL, bits: None };
}

impl<'p, 'a, T: Element> Item<'p, 'a, T> {
    fn new(problem: &'p Problem<'a, T>, kernels: &'static Kernels<T>, block: Block<'p, T>) -> Self {
        let group = problem.rules.heads.group_size(block.kv_head());
        let mask = problem.mask(block.entry());
        Self {
            problem,
            kernels,
            first: block.positions().start,
            group,
            rows: block.positions().len() * group,
            mask,
            block,
        }
    }

    /// The query head and the position of a row: positions ascend, so that a group of rows spans few of them.
    fn row(&self, row: usize) -> (usize, usize) {
        let head = self.problem.rules.heads.query_head(self.block.kv_head(), row % self.group);
        (head, self.first + row / self.group)
    }

    fn run(mut self, scratch: &mut Scratch<T>) {
        if self.rows == 0 {
            return;
        }
        let Problem { dims, rules, .. } = self.problem;
        let size = ItemSize { rows: self.rows, dims: *dims, biased: rules.bias.is_some() };
        let width = size.width();
        let [queries, context, maxima, sums, keys, values, scores, bias] = scratch.buffers(&size);
        self.pack_queries(queries);
        let factor = split_scale(rules.scale).1;
        context.fill(T::zero());
        maxima.fill(T::neg_infinity());
        sums.fill(T::zero());

        let Head { k, v, .. } = self.problem.head(self.block.entry(), self.row(0).0);
        let last = self.block.positions().end - 1;
        let visible = self.mask.keys(self.first).start..self.mask.keys(last).end.min(dims.kv_len);
        for tile in visible.start / KEYS..visible.end.div_ceil(KEYS) {
            let range = tile * KEYS..dims.kv_len.min((tile + 1) * KEYS);
            let mut packed = None;
            // Most tiles are visible to all rows of the item; only the others are looked at group by group.
            let whole = self.sees_all(range.clone());
            for row in (0..self.rows).step_by(MAX_ROWS) {
                let rows = row..self.rows.min(row + MAX_ROWS);
                let sight = if whole { Some(Sight::WHOLE) } else { self.sight(rows.clone(), range.clone()) };
                let Some(sight) = sight else { continue };
                let finite = *packed.get_or_insert_with(|| {
                    self.kernels.pack_panels(k.slice(s![range.clone(), ..]), keys);
                    match self.kernels.pack_rows(v.slice(s![range.clone(), ..]), values) {
                        true => Finite::All,
                        false => Finite::NotAll,
                    }
                });
                if let Some(from) = &rules.bias {
                    self.pack_bias(from, rows.clone(), range.clone(), bias);
                }
                let mut group = Group {
                    rows: rows.len(),
                    head_dim: dims.head_dim,
                    q: &queries[row * dims.head_dim..],
                    q_row: dims.head_dim,
                    m: &mut maxima[row..],
                    l: &mut sums[row * PANEL..],
                    o: &mut context[row * width..],
                    o_row: width,
                    p: scores,
                };
                let tile = KeyTile { keys, values, width, finite, panels: sight.panels };
                let scoring = Scoring {
                    visible: sight.bits.as_ref().map(|bits| &bits[..]),
                    bias: rules.bias.is_some().then_some(&*bias),
                    softcap: rules.softcap,
                    factor,
                };
                self.kernels.attend(&mut group, &tile, &scoring);
            }
        }
        for row in 0..self.rows {
            let context = &mut context[row * width..][..dims.value_dim];
            self.finish(row, context, maxima[row], &sums[row * PANEL..][..PANEL]);
        }
    }

    /// `[rows][head_dim]`, with the sign of the scale: its size is applied to the products.
    fn pack_queries(&self, queries: &mut [T]) {
        let factor = split_scale(self.problem.rules.scale).0;
        let q = self.problem.q.index_axis(Axis(0), self.block.entry());
        let head_dim = self.problem.dims.head_dim;
        if self.group == 1 {
            let positions = self.block.positions();
            self.kernels.pack_scaled(q.slice(s![self.row(0).0, positions, ..]), factor, queries);
            return;
        }
        for row in 0..self.rows {
            let (head, i) = self.row(row);
            self.kernels.pack_scaled(q.slice(s![head, i..i + 1, ..]), factor, &mut queries[row * head_dim..]);
        }
    }

    /// `[rows][64]`, zeros beyond the keys.
    fn pack_bias(&self, from: &Bias<'_, T>, rows: Range<usize>, keys: Range<usize>, to: &mut [T]) {
        for (row, to) in rows.zip(to.chunks_exact_mut(KEYS)) {
            let (head, i) = self.row(row);
            let (visible, beyond) = to.split_at_mut(keys.len());
            from.copy([self.block.entry(), head, i], keys.start, visible);
            beyond.fill(T::zero());
        }
    }

    /// Whether every row sees every key of a full tile.
    fn sees_all(&self, keys: Range<usize>) -> bool {
        let (first, last) = (self.mask.keys(self.first), self.mask.keys(self.block.positions().end - 1));
        keys.len() == KEYS && !self.mask.is_dense() && last.start <= keys.start && first.end >= keys.end
    }

    /// What the rows see of the keys `keys` of a tile, which starts at a multiple of 64; `None` if it is nothing.
    fn sight(&self, rows: Range<usize>, keys: Range<usize>) -> Option<Sight> {
        let (first, last) = (self.first + rows.start / self.group, self.first + (rows.end - 1) / self.group);
        let (first, last) = (self.mask.keys(first), self.mask.keys(last));
        let (start, end) = (first.start.max(keys.start), last.end.min(keys.end));
        if start >= end {
            return None;
        }
        let panels = (start - keys.start) / PANEL..(end - keys.start).div_ceil(PANEL);
        let all = keys.start + panels.start * PANEL..keys.start + panels.end * PANEL;
        if !self.mask.is_dense() && last.start <= all.start && first.end >= all.end {
            return Some(Sight { panels, bits: None });
        }
        let mut bits = [0; MAX_ROWS];
        for (bits, row) in bits.iter_mut().zip(rows.clone()) {
            let (head, i) = self.row(row);
            *bits = self.mask.of_head(head).word(i, keys.start / KEYS);
        }
        let any = bits.iter().fold(0, |any, bits| any | bits);
        if any == 0 {
            return None;
        }
        let panels = any.trailing_zeros() as usize / PANEL..KEYS / PANEL - any.leading_zeros() as usize / PANEL;
        let all = ones(panels.end * PANEL) & !ones(panels.start * PANEL);
        let partial = bits[..rows.len()].iter().any(|bits| bits & all != all);
        Some(Sight { panels, bits: partial.then_some(bits) })
    }

    /// Divides a row by its sum, the sink's share included, and writes it out.
    fn finish(&mut self, row: usize, context: &mut [T], maximum: T, sums: &[T]) {
        let (head, i) = self.row(row);
        let sink = self.problem.sink(head);
        if maximum == T::neg_infinity() {
            // The row has seen no key; its context is still zero.
            self.block.write(head, i, context, sink.unwrap_or(maximum));
            return;
        }
        let mut total = sum_of_16(sums);
        let mut reference = maximum;
        if let Some(sink) = sink {
            let sink = in_binary_units(sink);
            reference = maximum.max(sink);
            let shrink = (maximum - reference).exp2();
            total = total * shrink + (sink - reference).exp2();
            context.iter_mut().for_each(|c| *c *= shrink);
        }
        self.kernels.divide(context, total);
        let lse = match self.block.wants_lse() {
            // Visible scores that are all -inf (by overflow, not by a mask) have no softmax.
            true if total == T::zero() => T::nan(),
            true => (reference + total.log2()) * T::from_f64(std::f64::consts::LN_2),
            false => T::zero(),
        };
        self.block.write(head, i, context, lse);
    }
}

/// What the queries are multiplied by, which must not round them, and what their products are, which must be positive:
/// hidden scores are -inf and have to stay so.
fn split_scale<T: Element>(scale: T) -> (T, T) {
    if scale == T::zero() { (T::zero(), T::one()) } else { (scale.signum(), in_binary_units(scale.abs())) }
}

/// `x * log2(e)`, rounded once; a finite number stays finite.
fn in_binary_units<T: Element>(x: T) -> T {
    let binary = T::from_f64(x.into_f64() * std::f64::consts::LOG2_E);
    if x.is_finite() { binary.max(T::min_value()).min(T::max_value()) } else { binary }
}

/// The sum of 16 partial sums, by halves: the order is fixed, and few additions wait for each other.
fn sum_of_16<T: Element>(sums: &[T]) -> T {
    let mut sums: [T; PANEL] = std::array::from_fn(|i| sums[i]);
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}

/// The `n <= 64` lowest bits.
fn ones(n: usize) -> u64 {
    if n == KEYS { u64::MAX } else { (1 << n) - 1 }
}
