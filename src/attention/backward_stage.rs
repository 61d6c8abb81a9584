//! The stages of backward by the matrix unit, one beside the other.
//!
//! A stage is a block of 128 rows of a step and a tile of keys. While the unit multiplies, the vectors of the CPU are idle; so
//! what they have to do for a stage goes beside the products of its neighbours, in small pieces (see `kernels/returning.rs`):
//!
//! ```text
//! unit       p, d of 0 | p, d of 1 | d_q, d_k, d_v of 0   p, d of 2 | d_q, d_k, d_v of 1   p, d of 3 | ...
//! vectors              | softmax 0 | softmax 1                      | softmax 2                      | ...
//! ```
//!
//! Two stages are on their way at any time, and have a place each for p and d and for what they are split to. Steps do not
//! overlap: twice as many stages to a step, of more keys, gain nothing. A stage that needs more (a soft cap, what goes by distance,
//! a bias that is no line of memory) comes alone, its parts one after the other. The sums are the same, bit by bit.
//!
//! Time over that of blocks that all come alone, forward and backward (Emerald Rapids, two threads): 0.90 for 8 heads of 64
//! numbers and 1024 queries and keys, 0.87 with a causal mask, 0.89 for a head of 4096, 0.87 for 8 with a learned bias. What the
//! vectors do is not hidden for nothing: stages of 64 rows took 0.97 when they began, and 0.81 with nothing beside the products,
//! whose operands come from the second-level cache.

use std::ops::Range;

use super::backward_unit::{UnitRoom, UnitSize, begun};
use crate::element::Element;
use crate::kernels::{
    BLOCKS, BOTH, Dropped, Drops, Extent, KEYS, Kernels, Lines, MatrixUnit, OnTheWay, PAIRS, PANEL, RETURNED_PANEL,
    RETURNED_PANELS, RETURNED_ROWS, ReturningRows, RowKey, STEP, SplitFactors, SplitQueries, Squares, Start, UNIT_ROWS,
    UnitProduct, panels_at, products_of_parts, split_keys_len, split_panel_len, split_rows_len, square_at, steps,
};
use ndarray::ArrayViewMut2;

/// Rows of a stage.
pub(super) const STAGE_ROWS: usize = BLOCKS * UNIT_ROWS;

/// Stages on their way.
pub(super) const PLACES: usize = 2;

/// Numbers of p or d of a place.
pub(super) const PLACE: usize = STAGE_ROWS * KEYS;

/// Some rows of a step and a tile of the block of keys.
#[derive(Debug, Clone)]
pub(super) struct Stage {
    pub(super) rows: Range<usize>,
    /// Keys of the block before the tile.
    pub(super) offset: usize,
    /// Where p and d are, and what they are split to.
    pub(super) place: usize,
    /// The first key of the tile, of all.
    pub(super) first_key: usize,
    /// Which pairs of panels each block of 32 rows sees something of.
    sees: [[bool; PAIRS]; BLOCKS],
}

impl Stage {
    /// `bits` are those that each row sees.
    pub(super) fn new(rows: Range<usize>, [offset, first_key]: [usize; 2], place: usize, bits: &[u64]) -> Self {
        let mut sees = [[false; PAIRS]; BLOCKS];
        for (sees, bits) in sees.iter_mut().zip(bits[..rows.len()].chunks(UNIT_ROWS)) {
            let any = bits.iter().fold(0, |any, bits| any | bits);
            *sees = std::array::from_fn(|pair| any >> (pair * STEP) << (KEYS - STEP) != 0);
        }
        Self { rows, offset, place, first_key, sees }
    }

    fn tile(&self) -> usize {
        self.offset / KEYS
    }

    /// The blocks that see something: their index, their rows among those of the step, and the pairs that they see.
    fn blocks(&self) -> impl Iterator<Item = (usize, Range<usize>, Range<usize>)> {
        self.sees.iter().enumerate().filter(|(_, sees)| sees.contains(&true)).map(|(block, sees)| {
            let first = self.rows.start + block * UNIT_ROWS;
            (block, first..self.rows.end.min(first + UNIT_ROWS), span(*sees))
        })
    }

    /// The pairs that some block sees, and those blocks.
    fn pairs(&self) -> impl Iterator<Item = (usize, Range<usize>)> {
        let blocks = |pair: usize| span(self.sees.map(|sees| sees[pair]));
        (0..PAIRS).map(move |pair| (pair, blocks(pair))).filter(|(_, blocks)| !blocks.is_empty())
    }
}

/// What a step lends its stages.
pub(super) struct Lent<'f, T> {
    /// Rows of the step.
    pub(super) all: usize,
    /// Q and d_O, `[rows][width]`, and the panels of keys and values: where they are needed as they are.
    pub(super) packed: [&'f [T]; 2],
    pub(super) panels: [&'f [T]; 2],
    /// p and d, `[2][128][64]`.
    pub(super) products: [&'f mut [T]; 2],
    /// `[rows][width]`
    pub(super) d_q: &'f mut [T],
    /// `[rows]`
    pub(super) lse: &'f [T],
    pub(super) delta: &'f [T],
    /// What the rows of each place see, bit by bit.
    pub(super) visible: [&'f mut [u64]; PLACES],
    pub(super) factor: T,
    /// The biases of the stage before, and what their gradients are added to.
    pub(super) bias: Option<Lines<'f, T>>,
    pub(super) d_bias: Option<ArrayViewMut2<'f, T>>,
    pub(super) drops: Option<(&'f [RowKey], Drops<T>)>,
    /// `[128][64]` for them.
    pub(super) z: &'f mut [T],
}

impl<'s, T: Element> UnitRoom<'s, T> {
    /// Whether the unit may make the scores of the tile at key `offset` of the block.
    pub(super) fn makes_scores(&self, offset: usize) -> bool {
        self.scores_fit >> (offset / KEYS) & 1 == 1
    }

    /// Whether it may make the gradients too, as far as the tile and the step are concerned.
    pub(super) fn makes_gradients(&self, offset: usize) -> bool {
        // So few queries would leave the unit idle.
        self.size.rows >= UNIT_ROWS && self.row_columns_fit && self.columns_fit >> (offset / KEYS) & 1 == 1
    }

    /// Keeps the unit from falling asleep between its products.
    pub(super) fn stay_awake(&mut self) {
        self.unit.stay_awake();
    }

    /// `p = q k^T` and `d = d_o v^T` of a stage alone.
    pub(super) fn scores(&mut self, stage: &Stage, all: usize, operands: [[&[T]; 2]; 2], products: [&mut [T]; 2]) {
        let products = products.map(|products| &mut products[stage.place * PLACE..]);
        self.parts().0.scores(stage, all, operands, products, None);
    }

    /// Splits what became of them. Whether the unit may multiply it.
    pub(super) fn split(&mut self, stage: &Stage, products: [&[T]; 2]) -> bool {
        let mut largest = [Extent::NOTHING; 2];
        let d_rows = &mut self.d_rows[stage.place * RETURNED_ROWS..];
        for (block, rows, pairs) in stage.blocks() {
            for pair in pairs {
                for (i, from) in products.into_iter().enumerate() {
                    let to = Squares {
                        panels: &mut self.weights[i][stage.place * RETURNED_PANELS + panels_at(pair, block)..],
                        panel: RETURNED_PANEL,
                        // Only the gradients of products are multiplied with keys.
                        rows: (i == 1).then_some(&mut d_rows[square_at(block, pair)..]),
                    };
                    let from = &from[stage.place * PLACE + block * UNIT_ROWS * KEYS + pair * STEP..];
                    largest[i] = largest[i].and(self.unit.split_square(rows.len(), from, KEYS, to));
                }
            }
        }
        largest.iter().all(|largest| largest.fits())
    }

    /// The three products of the gradients of a stage alone, from what was split.
    pub(super) fn gradients(&mut self, stage: &Stage, d_q: &mut [T]) {
        self.clear_between(stage);
        let (mut operands, [p, d], d_rows) = self.parts();
        let (p, d) = (&p[stage.place * RETURNED_PANELS..], &d[stage.place * RETURNED_PANELS..]);
        operands.gradients(stage, [p, d, &d_rows[stage.place * RETURNED_ROWS..]], d_q, None);
    }

    /// The stage that was named last goes back through the softmax, beside the gradients of the one before and the scores of
    /// `next`, which is named. A stage is returned that went back and whose gradients the unit may not make.
    pub(super) fn advance(&mut self, next: Option<Stage>, lent: Lent<'_, T>) -> Option<Stage> {
        let Lent { all, packed, panels, products: [p, d], d_q, lse, delta, visible, factor, bias, d_bias, drops, z } =
            lent;
        let (now, done) = (std::mem::replace(&mut self.next, next.clone()), self.done.take());
        // The stages before and after share the other place.
        let place = now.as_ref().map(|now| now.place);
        let place = place.or(done.as_ref().or(next.as_ref()).map(|other| 1 - other.place)).unwrap_or(0);
        let dims = self.size.dims;
        if let Some(done) = &done {
            self.clear_between(done);
        }
        let (mut operands, weights, d_rows) = self.parts();
        let [p, d] = [p, d].map(|products| split_places(products, PLACE, place));
        let weights = weights.map(|weights| split_places(weights, RETURNED_PANELS, place));
        let d_rows = split_places(d_rows, RETURNED_ROWS, place);

        let work = |stage: &Option<Stage>, work: fn(&Stage, [usize; 2]) -> usize| {
            stage.as_ref().map_or(0, |stage| work(stage, dims))
        };
        let products = work(&done, gradient_products) + work(&next, score_products);
        let ([p_now, p], [d_now, d]) = (p, d);
        let [[p_panels, p_done], [d_panels, d_done]] = weights;
        let [rows_now, rows_done] = d_rows;
        let [first, second] = visible;
        let visible = if place == 0 { first } else { second };
        let mut beside = now.as_ref().map(|now| {
            let rows = now.rows.clone();
            ReturningRows {
                rows: rows.len(),
                sees: now.sees,
                products: [p_now, d_now],
                lse: &lse[rows.clone()],
                delta: &delta[rows.clone()],
                visible,
                factor,
                bias,
                d_bias,
                dropout: drops.map(|(keys, drops)| Dropped { keys: &keys[rows], first: now.first_key, drops }),
                z,
                panels: [p_panels, d_panels],
                d_rows: rows_now,
            }
            .beside(products)
        });
        if let Some(done) = &done {
            operands.gradients(done, [p_done, d_done, rows_done].map(|x| &*x), d_q, beside.as_mut());
        }
        if let Some(next) = &next {
            operands.scores(next, all, [packed, panels], [p, d], beside.as_mut());
        }
        let fit = beside.is_none_or(|rows| rows.finish(operands.unit).iter().all(|extent| extent.fits()));
        if fit {
            self.done = now;
            return None;
        }
        now
    }

    /// The stage that goes back through the softmax next.
    pub(super) fn next(&self) -> Option<&Stage> {
        self.next.as_ref()
    }

    /// Zeros for blocks that see nothing of a pair of panels, between others that do: the sums of keys go over all of them.
    fn clear_between(&mut self, stage: &Stage) {
        for (pair, blocks) in stage.pairs() {
            for block in blocks.filter(|&block| !stage.sees[block][pair]) {
                for weights in &mut self.weights {
                    for panel in 0..BOTH {
                        let at = stage.place * RETURNED_PANELS + panels_at(pair, block) + panel * RETURNED_PANEL;
                        weights[at..][..split_panel_len(STEP)].fill(T::zero());
                    }
                }
            }
        }
    }

    /// Whether stages are on their way.
    pub(super) fn is_busy(&self) -> bool {
        self.next.is_some() || self.done.is_some()
    }

    fn parts(&mut self) -> (Operands<'_, 's, T>, [&mut [T]; 2], &mut [T]) {
        let operands = Operands {
            kernels: self.kernels,
            size: &self.size,
            rows: self.rows.each_ref().map(|rows| &**rows),
            rows_fit: self.rows_fit,
            keys: self.keys.each_ref().map(|keys| &**keys),
            seen: self.seen,
            key_columns: self.key_columns,
            row_columns: self.row_columns.each_ref().map(|columns| &**columns),
            sums: &mut self.sums,
            begun: &mut self.begun,
            unit: &mut self.unit,
        };
        (operands, self.weights.each_mut().map(|weights| &mut **weights), self.d_rows)
    }
}

/// What was split of a block of keys and a step, see [`UnitRoom`].
struct Operands<'r, 's, T: 'static> {
    kernels: &'static Kernels<T>,
    size: &'r UnitSize,
    rows: [&'r [T]; 2],
    rows_fit: [bool; 2],
    keys: [&'r [T]; 2],
    /// Keys of the block.
    seen: usize,
    key_columns: &'r [T],
    row_columns: [&'r [T]; 2],
    sums: &'r mut [&'s mut [T]; 2],
    begun: &'r mut u64,
    unit: &'r mut MatrixUnit<'static, T>,
}

impl<T: Element> Operands<'_, '_, T> {
    /// `p = q k^T` and `d = d_o v^T`, of `all` rows of the step.
    fn scores(
        &mut self,
        stage: &Stage,
        all: usize,
        [packed, panels]: [[&[T]; 2]; 2],
        to: [&mut [T]; 2],
        mut beside: Option<&mut OnTheWay<'_, T>>,
    ) {
        let Stage { offset, .. } = *stage;
        for (i, to) in to.into_iter().enumerate() {
            let head_dim = self.size.dims[i];
            for (block, rows, pairs) in stage.blocks() {
                let end = KEYS.min(self.seen - offset).div_ceil(PANEL);
                let factors = SplitFactors {
                    q: packed[i],
                    q_row: self.size.widths()[i],
                    head_dim,
                    queries: SplitQueries::new(self.rows[i], all, self.rows_fit[i]),
                    panels: pairs.start * BOTH..end.min(pairs.end * BOTH),
                    keys: &panels[i][offset * head_dim..],
                    split: &self.keys[i][stage.tile() * split_keys_len(head_dim)..],
                };
                let to = &mut to[block * UNIT_ROWS * KEYS..];
                self.kernels.unit_products(self.unit, &factors, rows, to, beside.as_deref_mut());
            }
        }
    }

    /// `d_q += d K`, `d_v += d_O^T p` and `d_k += Q^T d`, from what p and d were split to: their panels, and the rows of d.
    fn gradients(
        &mut self,
        stage: &Stage,
        [p, d, d_rows]: [&[T]; 3],
        d_q: &mut [T],
        mut beside: Option<&mut OnTheWay<'_, T>>,
    ) {
        let [width, _] = self.size.widths();
        for (block, rows, pairs) in stage.blocks() {
            let product = UnitProduct {
                rows: rows.len(),
                panels: width / PANEL,
                steps: pairs.len(),
                a: &d_rows[square_at(block, pairs.start)..],
                a_part: UNIT_ROWS * PANEL,
                b: &self.key_columns[stage.tile() * self.size.columns() + pairs.start * split_panel_len(STEP)..],
                b_panel: split_panel_len(KEYS),
                c: &mut d_q[rows.start * width..],
                c_row: width,
                start: Start::Add,
            };
            self.unit.multiply(product, beside.as_deref_mut());
        }
        // Sums that have begun are added to.
        let starts = std::array::from_fn::<_, PAIRS, _>(|pair| match *self.begun & begun(stage.tile(), pair) {
            0 => Start::Zero,
            _ => Start::Add,
        });
        for (i, (a, b)) in self.row_columns.into_iter().zip([d, p]).enumerate() {
            let dim = self.size.dims[i];
            for first in (0..dim).step_by(UNIT_ROWS) {
                for (pair, blocks) in stage.pairs() {
                    let first_block = stage.rows.start / UNIT_ROWS + blocks.start;
                    let product = UnitProduct {
                        rows: UNIT_ROWS.min(dim - first),
                        panels: BOTH,
                        steps: blocks.len(),
                        a: &a[first_block * split_rows_len(dim, STEP) + first * PANEL..],
                        a_part: dim * PANEL,
                        b: &b[panels_at(pair, blocks.start)..],
                        b_panel: RETURNED_PANEL,
                        c: &mut self.sums[i][(stage.tile() * dim + first) * KEYS + pair * STEP..],
                        c_row: KEYS,
                        start: starts[pair],
                    };
                    self.unit.multiply(product, beside.as_deref_mut());
                }
            }
        }
        for (pair, _) in stage.pairs() {
            *self.begun |= begun(stage.tile(), pair);
        }
    }
}

/// Products of parts that the scores of a stage take.
fn score_products(stage: &Stage, dims: [usize; 2]) -> usize {
    let of_block = |pairs: Range<usize>| dims.map(|dim| products_of_parts(steps(dim), pairs.len() * BOTH));
    stage.blocks().flat_map(|(_, _, pairs)| of_block(pairs)).sum()
}

/// The same of its gradients.
fn gradient_products(stage: &Stage, dims: [usize; 2]) -> usize {
    let [width, _] = dims.map(|dim| dim.div_ceil(PANEL));
    let to_queries: usize = stage.blocks().map(|(_, _, pairs)| products_of_parts(pairs.len(), width)).sum();
    let of_pair =
        |blocks: Range<usize>| dims.map(|dim| dim.div_ceil(UNIT_ROWS) * products_of_parts(blocks.len(), BOTH));
    to_queries + stage.pairs().flat_map(|(_, blocks)| of_pair(blocks)).sum::<usize>()
}

/// Place `place` of both, and the other one.
fn split_places<T>(both: &mut [T], len: usize, place: usize) -> [&mut [T]; 2] {
    let (first, second) = both.split_at_mut(len);
    if place == 0 { [first, second] } else { [second, first] }
}

/// From the first to the last that are.
fn span<const N: usize>(of: [bool; N]) -> Range<usize> {
    match of.iter().position(|&is| is) {
        Some(first) => first..of.iter().rposition(|&is| is).map_or(first, |last| last + 1),
        None => 0..0,
    }
}
