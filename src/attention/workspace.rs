//! Scratch that outlives a call, so that the next call allocates nothing.

use super::backward_stage::{PLACE, PLACES};
use super::backward_unit::UnitSize;
use super::problem::{Dims, Rules};
use super::tables_backward::{PairSums, TableRoom};
use crate::block::Room;
use crate::element::Element;
use crate::error::{Error, Result};
use crate::kernels::{
    KEYS, MAX_ROWS, PANEL, RowKey, UNIT_SCORES, UNIT_WEIGHTS, aligned, reserve, split_keys_len, split_rows_len,
    split_values_len,
};
use crate::position::RopeTable;
use std::sync::Mutex;
use std::sync::atomic::AtomicUsize;

/// Scratch memory of attention; reuse one for calls of any shape.
///
/// It grows to what the largest call needed and is kept until it is dropped. What it holds never matters.
///
/// A call from a thread outside the rayon pool is handed over by a queue of rayon's own, which allocates every few dozen
/// calls; inside [`ThreadPool::install`](https://docs.rs/rayon/latest/rayon/struct.ThreadPool.html#method.install) nothing
/// does.
///
/// For each thread of the pool, with `rows` the query rows of a work item and `width` the value width rounded up to 16,
/// the tiled path takes `rows * (head_dim + width + 17) + 64 * (head_dim + width) + 768` numbers, whatever the lengths.
/// `rows` is at most `max(192, 102400 / (head_dim + value_dim))`, or one position of a group: half a MiB for heads of 64
/// in `f32`. Where a matrix unit multiplies ([`Level::Amx`](crate::Level::Amx)), `rows` may be twice as many, and it takes
/// `1.5 * rows * head_dim + 256 * (head_dim + width) + 9472` more, `head_dim` rounded up to 32. The other paths allocate in each call.
///
/// With relative keys, an item takes a number more for each row and distance; a learned bias by distance takes a number for
/// each head and distance. The distances are those that a call has, at most `q_len + 2 kv_len`, and that the table tells
/// apart.
///
/// Where few queries meet many keys (at most 384 rows of a KV head), the keys are cut into chunks, and a chunk leaves
/// `rows * (width + 17)` numbers: below a tenth of the keys and values. Over a [`KvCache`](crate::KvCache), the first call
/// takes what steps like it will need once the cache is full.
///
/// A layer keeps its projections and the context besides,
/// `batch * (q_len * num_heads + kv_len * num_kv_heads) * (head_dim + value_dim)` numbers, and for each thread a block of
/// packed weights; with RoPE, `len * dims` numbers for the angles of the positions and `66 * dims` numbers of `f64` that
/// they are made from. Training takes as many numbers again for the gradients of projections and context, and keeps
/// the memory of differentiated [`Tape`](crate::Tape)s for the next ones. A [`Block`](crate::block::Block) or
/// [`Stack`](crate::block::Stack) keeps its tokens three times, and the hidden numbers of a feed-forward block.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Options, Workspace};
/// let mut workspace = Workspace::new();
/// let q = Array4::<f32>::ones((1, 2, 3, 8));
/// let mut context = Array4::zeros((1, 2, 3, 8));
/// for _ in 0..3 {
///     attention::forward_into(&q, &q, &q, &Options::new(), &mut context, &mut workspace)?;
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Workspace<T> {
    workers: Vec<Scratch<T>>,
    /// Biases by distance.
    lines: Vec<T>,
    kept: Kept<T>,
    /// A state for each item of a call whose keys are cut.
    states: Vec<T>,
    /// Lengths of a cache, while it is written to.
    pub(crate) lengths: Vec<usize>,
    /// What a layer keeps between its projections.
    pub(crate) layer: LayerBuffers<T>,
    /// What a block keeps between its parts.
    pub(crate) block: Room<T>,
}

/// What a layer keeps from call to call, token by token.
#[derive(Debug, Default)]
pub(crate) struct LayerBuffers<T> {
    /// Queries, keys, values and context.
    pub(crate) heads: [Vec<T>; 4],
    /// The gradients of these.
    pub(crate) d_heads: [Vec<T>; 4],
    /// Queries or keys before they were normalised, the gradient of the norm's weight, and scratch of it.
    pub(crate) norm: [Vec<T>; 3],
    /// What gradients held that are added to.
    pub(crate) before: Vec<T>,
    /// Queries, keys, values, context and lse of calls that have been differentiated, for the next ones.
    pub(crate) tapes: Vec<[Vec<T>; 5]>,
    /// Packed weights, for each thread.
    pub(crate) scratch: Vec<Vec<T>>,
    /// Cosines and sines of the positions.
    pub(crate) rope: RopeTable<T>,
}

impl<T: Element> Workspace<T> {
    /// An empty workspace.
    ///
    /// ```
    /// let mut workspace = multihead::Workspace::<f32>::new();
    /// # let _ = &mut workspace;
    /// ```
    pub fn new() -> Self {
        Self {
            workers: Vec::new(),
            lines: Vec::new(),
            kept: Kept::default(),
            states: Vec::new(),
            lengths: Vec::new(),
            layer: LayerBuffers::default(),
            block: Room::default(),
        }
    }

    /// Lends the biases by distance to a call that takes the rest of the workspace besides; they come back however it ends.
    pub(super) fn with_lines<R>(&mut self, call: impl FnOnce(&mut Vec<T>, &mut Self) -> R) -> R {
        let mut lines = std::mem::take(&mut self.lines);
        let result = call(&mut lines, self);
        self.lines = lines;
        result
    }

    /// What backward keeps for a call, and scratch for `count` threads.
    pub(super) fn backward(&mut self, count: usize) -> (&mut Kept<T>, &mut [Scratch<T>]) {
        self.workers(count);
        (&mut self.kept, &mut self.workers[..count])
    }

    /// Scratch for `count` threads, and a state for each of `items`.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it cannot be had.
    pub(super) fn split(
        &mut self,
        count: usize,
        size: &ItemSize,
        items: usize,
    ) -> Result<(&mut [Scratch<T>], &mut [T])> {
        self.workers(count).iter_mut().try_for_each(|scratch| scratch.reserve(&size.lengths()))?;
        let numbers = items.saturating_mul(size.state_len());
        reserve(&mut self.states, numbers).ok_or_else(|| size.too_large())?;
        Ok((&mut self.workers[..count], aligned(&mut self.states, numbers)))
    }

    /// Scratch for `count` threads.
    pub(super) fn workers(&mut self, count: usize) -> &mut [Scratch<T>] {
        if self.workers.len() < count {
            self.workers.resize_with(count, Scratch::default);
        }
        &mut self.workers[..count]
    }
}

/// What backward keeps for a call.
#[derive(Debug, Default)]
pub(super) struct Kept<T> {
    /// `[batch, num_heads, q_len]`: `d_context . context` of each query.
    pub(super) delta: Vec<T>,
    /// The steps that each block of keys has passed.
    pub(super) passed: Vec<AtomicUsize>,
    /// The gradients of tables, for each batch entry and KV head.
    pub(super) sums: Vec<Mutex<PairSums<T>>>,
}

/// See [`Kept`].
type KeptParts<'k, T> = (&'k mut [T], &'k mut [AtomicUsize], &'k [Mutex<PairSums<T>>]);

impl<T: Element> Kept<T> {
    /// Room for a call.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it cannot be had.
    pub(super) fn reserve(&mut self, dims: &Dims, counters: usize) -> Result<()> {
        let [batch, num_heads, q_len, _] = dims.scores();
        let axes = "[batch, num_heads, q_len]";
        let too_large = || Error::TooLarge { argument: "workspace", axes, got: vec![batch, num_heads, q_len] };
        reserve(&mut self.delta, Self::rows(dims)).ok_or_else(too_large)?;
        let missing = counters.saturating_sub(self.passed.len());
        self.passed.try_reserve_exact(missing).map_err(|_| too_large())
    }

    /// The products, the counters and the sums, with whatever they hold.
    pub(super) fn parts(&mut self, dims: &Dims, counters: usize) -> KeptParts<'_, T> {
        if self.passed.len() < counters {
            self.passed.resize_with(counters, AtomicUsize::default);
        }
        (aligned(&mut self.delta, Self::rows(dims)), &mut self.passed[..counters], &self.sums)
    }

    fn rows(dims: &Dims) -> usize {
        dims.batch.saturating_mul(dims.num_heads).saturating_mul(dims.q_len)
    }
}

/// Buffers of a thread. Forward needs half of them.
const BUFFERS: usize = 20;

/// The scratch of one thread.
#[derive(Debug)]
pub(super) struct Scratch<T> {
    buffers: [Vec<T>; BUFFERS],
    /// For the dropout, one for each row.
    row_keys: Vec<RowKey>,
    /// For the gradients of tables.
    pub(super) tables: TableRoom<T>,
}

impl<T> Default for Scratch<T> {
    fn default() -> Self {
        Self { buffers: Default::default(), row_keys: Vec::new(), tables: TableRoom::default() }
    }
}

/// How large a work item is, as far as its scratch depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct ItemSize {
    pub(super) rows: usize,
    pub(super) dims: Dims,
    pub(super) biased: bool,
    pub(super) drops: bool,
    /// Relative keys that there are.
    pub(super) distances: usize,
    /// Whether its products are made by the matrix unit.
    pub(super) unit: bool,
}

impl ItemSize {
    pub(super) fn new<T: Element>(rows: usize, dims: Dims, rules: &Rules<'_, T>) -> Self {
        let Rules { bias, dropout, relative_keys, .. } = rules;
        let distances = relative_keys.map_or(0, |keys| keys.view().nrows());
        let unit = rules.use_unit(&dims);
        Self { rows, dims, biased: bias.is_some(), drops: dropout.is_some(), distances, unit }
    }

    /// Width of the rows of context and values.
    pub(super) fn width(&self) -> usize {
        self.dims.value_dim.div_ceil(PANEL).saturating_mul(PANEL)
    }

    /// Numbers of the state of all rows, whole cache lines of them: threads write states side by side.
    pub(super) fn state_len(&self) -> usize {
        self.rows.saturating_mul(self.width() + PANEL + 1).div_ceil(2 * PANEL).saturating_mul(2 * PANEL)
    }

    fn too_large(&self) -> Error {
        let Self { rows, dims: Dims { head_dim, value_dim, .. }, .. } = *self;
        let axes = "[rows, head_dim, value_dim]";
        Error::TooLarge { argument: "workspace", axes, got: vec![rows, head_dim, value_dim] }
    }

    /// Queries, context, maxima, sums, keys, values, scores, bias, relative; split queries, keys and values, and weights;
    /// keys and values of the tile after, as they are and split. See `walk.rs` for what is in them.
    pub(super) fn lengths(&self) -> Lengths {
        let Self { rows, dims: Dims { head_dim, .. }, biased, distances, unit, .. } = *self;
        let split = |numbers: usize| if unit { numbers } else { 0 };
        let (width, tile) = (self.width(), MAX_ROWS * KEYS);
        let numbers = [
            rows.saturating_mul(head_dim),
            rows.saturating_mul(width),
            rows,
            rows.saturating_mul(PANEL),
            head_dim.saturating_mul(KEYS),
            width.saturating_mul(KEYS),
            split(UNIT_SCORES).max(2 * tile),
            usize::from(biased) * tile,
            rows.saturating_mul(distances),
            split(split_rows_len(rows, head_dim)),
            split(split_keys_len(head_dim)),
            split(split_values_len(width)),
            split(UNIT_WEIGHTS),
            split(head_dim.saturating_mul(KEYS)),
            split(width.saturating_mul(KEYS)),
            split(split_keys_len(head_dim)),
            split(split_values_len(width)),
        ];
        Lengths::new(rows, &self.dims, &numbers, if self.drops { rows } else { 0 })
    }
}

/// How long the buffers of an item are.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lengths {
    numbers: [usize; BUFFERS],
    row_keys: usize,
    /// Rows, `head_dim` and `value_dim`, for the error.
    got: [usize; 3],
}

impl Lengths {
    fn new(rows: usize, dims: &Dims, numbers: &[usize], row_keys: usize) -> Self {
        let mut all = [0; BUFFERS];
        all.iter_mut().zip(numbers).for_each(|(all, &n)| *all = n);
        Self { numbers: all, row_keys, got: [rows, dims.head_dim, dims.value_dim] }
    }
}

impl<T: Element> Scratch<T> {
    /// Room for items of up to this size, whichever of them the thread will get.
    ///
    /// # Errors
    /// [`Error::TooLarge`] if it cannot be had: heads of a broadcast view can be wider than memory.
    pub(super) fn reserve(&mut self, size: &Lengths) -> Result<()> {
        let too_large =
            || Error::TooLarge { argument: "workspace", axes: "[rows, head_dim, value_dim]", got: size.got.to_vec() };
        self.row_keys.clear();
        self.row_keys.try_reserve_exact(size.row_keys).map_err(|_| too_large())?;
        let mut buffers = self.buffers.iter_mut().zip(size.numbers);
        buffers.try_for_each(|(buffer, n)| reserve(buffer, n)).ok_or_else(too_large)
    }

    /// The buffers, with whatever they hold, and room for the key of each row.
    pub(super) fn parts(&mut self, size: &Lengths) -> ([&mut [T]; BUFFERS], &mut Vec<RowKey>) {
        let mut lengths = size.numbers.into_iter();
        (self.buffers.each_mut().map(|buffer| aligned(buffer, lengths.next().unwrap_or(0))), &mut self.row_keys)
    }
}

/// How large the work items of backward are, as far as their scratch depends on it.
#[derive(Debug, Clone, Copy)]
pub(super) struct BackSize {
    pub(super) dims: Dims,
    /// Query positions of a step.
    pub(super) query_tile: usize,
    /// Keys of an item.
    pub(super) key_block: usize,
    pub(super) mods: BackMods,
    /// Whether the matrix unit multiplies, as it did in the forward pass.
    pub(super) unit: bool,
}

/// What backward does beyond the common case; each takes a tile of scratch.
#[derive(Debug, Clone, Copy)]
pub(super) struct BackMods {
    pub(super) biased: bool,
    pub(super) capped: bool,
    pub(super) drops: bool,
    pub(super) bias_gradient: bool,
}

impl BackSize {
    /// Widths of rows: `head_dim` and `value_dim`, rounded up to a multiple of 16.
    pub(super) fn widths(&self) -> [usize; 2] {
        [self.dims.head_dim, self.dims.value_dim].map(|width| width.div_ceil(PANEL).saturating_mul(PANEL))
    }

    /// What the matrix unit works on, if it does.
    pub(super) fn unit_size(&self) -> UnitSize {
        UnitSize::new(&self.dims, self.query_tile, self.key_block)
    }

    /// Key panels, value panels, keys, d_k, d_v; queries, d_context, d_q, probabilities, d_scores, lse, delta; bias,
    /// slope, factors of dropout, gradients of the scores; the matrix unit's. See `backward.rs` and
    /// `backward_unit.rs` for what is in them.
    pub(super) fn lengths(&self) -> Lengths {
        let Self { dims: Dims { head_dim, value_dim, .. }, query_tile, key_block, mods, unit } = *self;
        let [k_width, v_width] = self.widths();
        let (rows, keys) = (query_tile.next_multiple_of(PANEL), key_block.next_multiple_of(KEYS));
        let tile = |wanted: bool| usize::from(wanted) * MAX_ROWS * KEYS;
        // The matrix unit has blocks of rows on their way.
        let (places, place) = if unit { (PLACES * PLACE, PLACE) } else { (0, 0) };
        let numbers = [
            keys.saturating_mul(head_dim),
            keys.saturating_mul(value_dim),
            keys.saturating_mul(k_width),
            keys.saturating_mul(k_width),
            keys.saturating_mul(v_width),
            rows.saturating_mul(k_width),
            rows.saturating_mul(v_width),
            rows.saturating_mul(k_width),
            places.max(rows * KEYS),
            places.max(rows * KEYS),
            rows,
            rows,
            tile(mods.biased),
            tile(mods.capped),
            tile(mods.drops).max(if mods.drops { place } else { 0 }),
            tile(mods.bias_gradient),
            if unit { self.unit_size().len() } else { 0 },
        ];
        Lengths::new(query_tile, &self.dims, &numbers, if mods.drops { rows } else { 0 })
    }
}
