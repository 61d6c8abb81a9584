//! The gradients of what goes by distance in the tiled backward: learned biases and relative keys.
//!
//! ```text
//! for each item (block of keys of a batch entry and KV head):
//!     lines <- 0; d_r <- 0                         [heads of the group][distances], [distances][head_dim]
//!     for each step (tile of query positions of a head):
//!         products <- Q r^T; d_line <- 0           [rows][distances that step and block have]
//!         for each tile of 64 keys:
//!             p <- q keys^T + products by distance
//!             lines[head] <- lines[head] + d_s by distance; d_line <- d_line + d_x by distance
//!         d_q <- d_q + d_line r; d_r <- d_r + d_line^T Q
//!     sums of the pair <- sums + lines, d_r        block after block, see `kernels/relay.rs`
//! d_table[bucket] <- sum over entries, heads and distances; d_keys <- scale * sum over pairs
//! ```
//!
//! "By distance" is the walk of `distance.rs`, so a pair costs an addition. A distance is met by as many pairs as there are
//! queries, so the lines of biases are summed in `f64`. Every sum has one order, whatever the number of threads.

use ndarray::{Axis, Slice};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use super::bias::Table;
use super::distance::{Span, Start, add_from_line, add_to_line};
use super::gradients::GradientsMut;
use super::problem::{Dims, Rules};
use super::relative_keys::RelativeKeys;
use super::walk::Walk;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::heads::HeadMap;
use crate::kernels::{KEYS, Kernels, MAX_ROWS, PANEL, Pair, Product, Start as From, Stride, aligned, reserve};

/// How large the room of a thread and the sums of a pair are.
#[derive(Debug, Clone, Copy)]
pub(super) struct TableSize {
    /// Heads that share a KV head at most.
    group: usize,
    /// Distances of a bias, 0 if its gradient is not asked for.
    line: usize,
    /// Distances of relative keys, 0 without them.
    distances: usize,
    /// Distances that a step and a block of keys have at most, a multiple of 16.
    piece: usize,
    rows: usize,
    head_dim: usize,
    /// `head_dim` rounded up to a multiple of 16.
    width: usize,
}

impl TableSize {
    /// For steps of `rows` query positions and blocks of `keys` keys. `None` if nothing goes by distance.
    pub(super) fn new<T: Element>(
        rules: &Rules<'_, T>,
        gradients: &GradientsMut<'_, T>,
        dims: &Dims,
        [rows, keys]: [usize; 2],
    ) -> Option<Self> {
        let table = rules.bias.as_ref().and_then(|bias| bias.table()).filter(|_| gradients.d_relative_bias.is_some());
        let distances = rules.relative_keys.map_or(0, |keys| keys.span().len());
        let piece = if distances > 0 { (rows + keys).min(distances).next_multiple_of(PANEL) } else { 0 };
        let (group, line) = (rules.heads.largest_group(), table.map_or(0, |table| table.span().len()));
        let Dims { head_dim, .. } = *dims;
        let width = head_dim.next_multiple_of(PANEL);
        (table.is_some() || distances > 0).then_some(Self { group, line, distances, piece, rows, head_dim, width })
    }

    /// Numbers of the lines and of the gradient of the keys.
    fn sums(&self) -> [usize; 2] {
        [self.group.saturating_mul(self.line), self.distances.saturating_mul(self.width)]
    }

    fn too_large(&self) -> Error {
        let got = vec![self.group, self.line, self.distances];
        Error::TooLarge { argument: "workspace", axes: "[heads, distances, relative keys]", got }
    }
}

/// The room of a thread.
#[derive(Debug)]
pub(super) struct TableRoom<T> {
    /// `[heads of a group][distances]`
    lines: Vec<f64>,
    /// `[distances][width]`
    d_keys: Vec<T>,
    /// `[rows][piece]`: products with the keys of the piece, and what they get by distance.
    products: Vec<T>,
    d_line: Vec<T>,
    /// The keys of the piece: `[panels][head_dim][16]` and `[piece][width]`.
    panels: Vec<T>,
    keys: Vec<T>,
    piece: Piece,
}

/// The distances of a step and a block of keys.
#[derive(Debug, Clone, Copy)]
struct Piece {
    span: Span,
    /// From row to row.
    stride: usize,
    /// Whether all keys of the piece are finite.
    finite: bool,
}

impl Default for Piece {
    fn default() -> Self {
        Self { span: Span { lowest: 0, highest: -1 }, stride: 0, finite: true }
    }
}

impl<T> Default for TableRoom<T> {
    fn default() -> Self {
        let [d_keys, products, d_line, panels, keys] = [const { Vec::new() }; 5];
        Self { lines: Vec::new(), d_keys, products, d_line, panels, keys, piece: Piece::default() }
    }
}

impl<T: Element> TableRoom<T> {
    /// Room for calls of this size.
    pub(super) fn reserve(&mut self, size: &TableSize) -> Result<()> {
        let [lines, d_keys] = size.sums();
        let tile = size.rows.saturating_mul(size.piece);
        let buffers = [
            (&mut self.d_keys, d_keys),
            (&mut self.products, tile),
            (&mut self.d_line, tile),
            (&mut self.panels, size.piece.saturating_mul(size.head_dim)),
            (&mut self.keys, size.piece.saturating_mul(size.width)),
        ];
        let reserved = buffers.into_iter().try_for_each(|(buffer, n)| reserve(buffer, n));
        reserved.and_then(|()| reserve(&mut self.lines, lines)).ok_or_else(|| size.too_large())
    }
}

/// What the blocks of keys of one batch entry and KV head have added up to.
#[derive(Debug, Default)]
pub(super) struct PairSums<T> {
    lines: Vec<f64>,
    d_keys: Vec<T>,
}

/// Sums for `pairs` pairs, with whatever they hold: the first block of keys sets them.
pub(super) fn reserve_sums<T: Element>(
    sums: &mut Vec<Mutex<PairSums<T>>>,
    pairs: usize,
    size: &TableSize,
) -> Result<()> {
    let too_large = |_| size.too_large();
    sums.try_reserve_exact(pairs.saturating_sub(sums.len())).map_err(too_large)?;
    if sums.len() < pairs {
        sums.resize_with(pairs, Mutex::default);
    }
    let [lines, d_keys] = size.sums();
    for sums in &mut sums[..pairs] {
        let sums = sums.get_mut().unwrap_or_else(PoisonError::into_inner);
        sums.lines.try_reserve_exact(lines.saturating_sub(sums.lines.len())).map_err(too_large)?;
        sums.d_keys.try_reserve_exact(d_keys.saturating_sub(sums.d_keys.len())).map_err(too_large)?;
        sums.lines.resize(lines, 0.0);
        sums.d_keys.resize(d_keys, T::zero());
    }
    Ok(())
}

/// The tables of a call.
pub(super) struct Tables<'p, 'a, T: 'static> {
    pub(super) size: TableSize,
    pub(super) kernels: &'static Kernels<T>,
    pub(super) rules: &'p Rules<'a, T>,
    /// `[batch][KV heads that are read]`
    pub(super) sums: &'p [Mutex<PairSums<T>>],
}

/// Some rows of a step and some columns of a tile of keys.
pub(super) struct Patch<'w, 'p, 'a, T: 'static> {
    pub(super) walk: &'w Walk<'p, 'a, T>,
    pub(super) rows: Range<usize>,
    /// First key of the tile.
    pub(super) first_key: usize,
    /// Of the tile.
    pub(super) columns: Range<usize>,
}

impl<T: Element> Patch<'_, '_, '_, T> {
    /// Where the patch's part of a row begins on a line.
    fn start(&self, row: usize, lowest: i64) -> Start {
        Start { lowest, position: self.walk.position(row), first: self.first_key + self.columns.start }
    }
}

impl<'a, T: Element> Tables<'_, 'a, T> {
    fn table(&self) -> Option<&Table<'a, T>> {
        self.rules.bias.as_ref().and_then(|bias| bias.table()).filter(|_| self.size.line > 0)
    }

    fn keys(&self) -> Option<&RelativeKeys<'a, T>> {
        self.rules.relative_keys.as_ref()
    }

    /// Before the first step of a pair.
    pub(super) fn begin(&self, room: &mut TableRoom<T>) {
        let [lines, d_keys] = self.size.sums();
        room.lines.clear();
        room.lines.resize(lines, 0.0);
        aligned(&mut room.d_keys, d_keys).fill(T::zero());
    }

    /// Before the first tile of a step, whose queries are `q: [rows][width]`, with the keys `keys` of the item.
    pub(super) fn begin_step(&self, walk: &Walk<'_, '_, T>, keys: Range<usize>, q: &[T], room: &mut TableRoom<T>) {
        let Some(from) = self.keys() else { return };
        let (rows, all) = (walk.rows(), from.span());
        if rows == 0 || keys.is_empty() {
            return;
        }
        let span = Span::new(walk.position(0), walk.position(rows - 1), keys).clamp_to(all);
        let (n, stride) = (span.len(), span.len().next_multiple_of(PANEL));
        let first = (span.lowest - all.lowest) as usize;
        let view = from.view().slice_axis_move(Axis(0), Slice::from(first..first + n));
        let TableSize { head_dim, width, .. } = self.size;
        let panels = aligned(&mut room.panels, stride * head_dim);
        self.kernels.pack_panels(view, panels);
        let finite = self.kernels.pack_rows(view, aligned(&mut room.keys, stride * width));
        let products = aligned(&mut room.products, rows * stride);
        for row in (0..rows).step_by(MAX_ROWS) {
            self.kernels.multiply(Product {
                rows: MAX_ROWS.min(rows - row),
                n: stride,
                k: head_dim,
                a: &q[row * width..],
                a_stride: Stride::Rows(width),
                b: panels,
                b_panel: PANEL * head_dim,
                b_k: PANEL,
                c: &mut products[row * stride..],
                c_row: stride,
                start: From::Zero,
            });
        }
        aligned(&mut room.d_line, rows * stride).fill(T::zero());
        room.piece = Piece { span, stride, finite };
    }

    /// Adds to the products `[rows][64]` of a tile those with the relative keys.
    pub(super) fn add_products(&self, patch: &Patch<'_, '_, '_, T>, p: &mut [T], room: &mut TableRoom<T>) {
        if self.keys().is_none() {
            return;
        }
        let Piece { span, stride, .. } = room.piece;
        let products = aligned(&mut room.products, patch.walk.rows() * stride);
        for (row, p) in patch.rows.clone().zip(p.chunks_exact_mut(KEYS)) {
            let line = &products[row * stride..][..span.len()];
            add_from_line(line, patch.start(row, span.lowest), &mut p[patch.columns.clone()]);
        }
    }

    /// Takes up the gradients of the scores and of the products of a tile, `[rows][64]` each. `member` counts the heads
    /// of the group.
    pub(super) fn collect(
        &self,
        patch: &Patch<'_, '_, '_, T>,
        member: usize,
        [d_scores, d]: [&[T]; 2],
        room: &mut TableRoom<T>,
    ) {
        if let Some(table) = self.table() {
            let line = &mut room.lines[member * self.size.line..][..self.size.line];
            for (row, d_scores) in patch.rows.clone().zip(d_scores.chunks_exact(KEYS)) {
                let at = patch.start(row, table.span().lowest);
                add_to_line(&d_scores[patch.columns.clone()], at, line, Element::into_f64);
            }
        }
        if self.keys().is_some() {
            let Piece { span, stride, .. } = room.piece;
            let d_line = aligned(&mut room.d_line, patch.walk.rows() * stride);
            for (row, d) in patch.rows.clone().zip(d.chunks_exact(KEYS)) {
                let line = &mut d_line[row * stride..][..span.len()];
                add_to_line(&d[patch.columns.clone()], patch.start(row, span.lowest), line, |x| x);
            }
        }
    }

    /// After the last tile of a step: what queries `[rows][width]` and relative keys get from each other.
    pub(super) fn end_step(&self, rows: usize, q: &[T], finite: bool, d_q: &mut [T], room: &mut TableRoom<T>) {
        let Some(from) = self.keys() else { return };
        let (Piece { span, stride, finite: keys_finite }, width) = (room.piece, self.size.width);
        let first = (span.lowest - from.span().lowest) as usize;
        let d_line = &*aligned(&mut room.d_line, rows * stride);
        let keys = &*aligned(&mut room.keys, stride * width);
        let d_keys = &mut aligned(&mut room.d_keys, self.size.distances * width)[first * width..];
        if !(finite && keys_finite) {
            // 0 * NaN is NaN: pairs that nobody sees have left a zero.
            let pairs = (0..rows).flat_map(|row| (0..span.len()).map(move |n| (row, n, d_line[row * stride + n])));
            for (row, n, d) in pairs.filter(|(_, _, d)| *d != T::zero()) {
                add_row(&mut d_q[row * width..][..width], d, &keys[n * width..]);
                add_row(&mut d_keys[n * width..][..width], d, &q[row * width..]);
            }
            return;
        }
        let product = |[rows, k]: [usize; 2], a: &[T], a_stride: Stride, b: &[T], c: &mut [T]| {
            let (n, b_panel, b_k, c_row) = (width, PANEL, width, width);
            self.kernels.multiply(Product { rows, n, k, a, a_stride, b, b_panel, b_k, c, c_row, start: From::Add });
        };
        for row in (0..rows).step_by(MAX_ROWS) {
            let strip = MAX_ROWS.min(rows - row);
            product([strip, span.len()], &d_line[row * stride..], Stride::Rows(stride), keys, &mut d_q[row * width..]);
        }
        for n in (0..span.len()).step_by(MAX_ROWS) {
            let strip = MAX_ROWS.min(span.len() - n);
            product([strip, rows], &d_line[n..], Stride::Columns(stride), q, &mut d_keys[n * width..]);
        }
    }

    /// Adds the sums of an item to those of its pair; those of the first block are there before all others.
    pub(super) fn merge(&self, pair: Pair, first: bool, room: &mut TableRoom<T>) {
        let Some(sums) = self.sums.get(pair.entry * self.rules.heads.num_read() + pair.index) else { return };
        let mut sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
        let d_keys = aligned(&mut room.d_keys, self.size.sums()[1]);
        if first {
            sums.lines.copy_from_slice(&room.lines);
            sums.d_keys.copy_from_slice(d_keys);
        } else {
            sums.lines.iter_mut().zip(&room.lines).for_each(|(sum, x)| *sum += x);
            sums.d_keys.iter_mut().zip(d_keys).for_each(|(sum, x)| *sum += *x);
        }
    }

    /// Adds up the pairs.
    pub(super) fn finish(&self, batch: usize, gradients: &mut TableGradients<'_, '_, T>) {
        let heads: &HeadMap = &self.rules.heads;
        gradients.clear();
        for (index, sums) in self.sums.iter().enumerate().take(batch * heads.num_read()) {
            let sums = sums.lock().unwrap_or_else(PoisonError::into_inner);
            let kv_head = heads.read_kv_head(index % heads.num_read());
            if let (Some(table), Some(d_table)) = (self.table(), &mut gradients.bias) {
                for (head, line) in heads.query_heads(kv_head).zip(sums.lines.chunks_exact(self.size.line.max(1))) {
                    table.add_line(line, head, d_table);
                }
            }
            if let (Some(keys), Some(d_table)) = (self.keys(), &mut gradients.keys) {
                let first = keys.row(keys.span().lowest);
                let rows = sums.d_keys.chunks_exact(self.size.width.max(1));
                for (mut d_key, sum) in d_table.rows_mut().into_iter().skip(first).zip(rows) {
                    d_key.iter_mut().zip(sum).for_each(|(d, &sum)| *d += self.rules.scale * sum);
                }
            }
        }
    }
}

/// `sum = sum + factor * x`
fn add_row<T: Element>(sum: &mut [T], factor: T, x: &[T]) {
    sum.iter_mut().zip(x).for_each(|(sum, &x)| *sum += factor * x);
}

/// The gradients of the tables.
pub(super) struct TableGradients<'g, 'a, T> {
    /// `[buckets, num_heads]`
    pub(super) bias: &'g mut Option<ndarray::ArrayViewMut2<'a, T>>,
    /// `[2 clip + 1, head_dim]`
    pub(super) keys: &'g mut Option<ndarray::ArrayViewMut2<'a, T>>,
}

impl<T: Element> TableGradients<'_, '_, T> {
    fn clear(&mut self) {
        [&mut *self.bias, &mut *self.keys].into_iter().flatten().for_each(|d_table| d_table.fill(T::zero()));
    }
}
