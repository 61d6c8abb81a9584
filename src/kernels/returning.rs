//! Rows go back through the softmax beside the products of other rows, and what that makes is split for products to come.
//!
//! ```text
//! of each row                  p, d = softmax's way back         see `back.rs`
//! of rows t and t + 16         p, d -> three bf16, as panels whose terms are rows; d as rows too
//! ```
//!
//! In small pieces, for the reason that `weighing.rs` gives: two rows and 32 keys, some 190 instructions on vectors. Smaller ones,
//! with numbers in memory in between, hide better and take longer (1.01 of the time). What is in front of the vectors counts too:
//! with an address for each of them, or a look at each row, a piece takes 100 more, and the whole 1.02.
//! Memory that is asked for beside the products (for sums to be added to, or places to be written) costs 1.05.

use super::back::{Back, Biases};
use super::beside::{Pace, Work};
use super::dropout::{Dropped, Dropping, Into};
use super::lines::Lines;
use super::matrix::{Extent, STEP, SplitSquare, UNIT_ROWS, split_panel_len, split_rows_len};
use super::matrix_unit::MatrixUnit;
use super::simd::prefetch_bytes;
use super::{KEYS, PANEL};
use ndarray::ArrayViewMut2;
use std::marker::PhantomData;
use std::ptr;

/// Blocks of 32 rows that return together at most. Time with 1, 2 and 6 of them over that with 4: 1.09, 1.04 and 1.01 (forward and
/// backward, a head of 4096 queries and keys): the sums of keys are loaded and stored once for all of them.
pub(crate) const BLOCKS: usize = 4;

/// Pairs of panels of a tile: as many columns as the unit has registers for, and as many terms as an instruction adds up.
pub(crate) const PAIRS: usize = KEYS / STEP;

/// Panels of a pair.
pub(crate) const BOTH: usize = STEP / PANEL;

/// Numbers from a panel of p or d to the next.
pub(crate) const RETURNED_PANEL: usize = BLOCKS * split_panel_len(UNIT_ROWS);

/// Numbers of split panels, and of split rows.
pub(crate) const RETURNED_PANELS: usize = KEYS / PANEL * RETURNED_PANEL;
pub(crate) const RETURNED_ROWS: usize = BLOCKS * PAIRS * SQUARE;

/// Numbers of a block of 32 rows and 32 terms, split as rows.
const SQUARE: usize = split_rows_len(UNIT_ROWS, STEP);

/// Where the rows of a block and the terms of a pair of panels begin among [`RETURNED_ROWS`].
pub(crate) const fn square_at(block: usize, pair: usize) -> usize {
    (block * PAIRS + pair) * SQUARE
}

/// Where the panels of a pair and the terms of a block begin among [`RETURNED_PANELS`].
pub(crate) const fn panels_at(pair: usize, block: usize) -> usize {
    pair * BOTH * RETURNED_PANEL + block * split_panel_len(UNIT_ROWS)
}

/// A piece of the work: rows `term` and `term + 16` of a block, and the keys of a pair of panels.
#[derive(Clone, Copy, Debug)]
pub(super) struct Part {
    pub(super) block: usize,
    pub(super) term: usize,
    pub(super) pair: usize,
}

/// A vector in memory.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub(super) struct Lanes(pub(super) [u32; PANEL]);

/// Rows on their way back, by pointers.
#[derive(Debug)]
pub(super) struct Returning<T> {
    /// Of all 64 keys.
    pub(super) back: Back<T>,
    pub(super) biases: Biases<T>,
    /// Before it, if there is dropout.
    pub(super) dropping: Option<Dropping<T>>,
    /// The pairs of panels that each block sees something of. The others are not touched.
    sees: [[bool; PAIRS]; BLOCKS],
    panels: [*mut T; 2],
    d_rows: *mut T,
    /// The largest absolute values of p and d, lane by lane.
    pub(super) largest: [Lanes; 2],
    /// The next piece.
    piece: usize,
    pace: Pace,
}

impl<T> Returning<T> {
    /// The next part, which is taken off.
    #[inline(always)]
    pub(super) fn next(&mut self) -> Option<Part> {
        while self.piece < BLOCKS * PANEL * PAIRS {
            let piece = self.piece;
            let (block, term, pair) = (piece / (PANEL * PAIRS), piece / PAIRS % PANEL, piece % PAIRS);
            self.piece += 1;
            if self.sees[block][pair] {
                return Some(Part { block, term, pair });
            }
        }
        None
    }

    /// Whether a part is the first of its rows.
    #[inline(always)]
    pub(super) fn begins_rows(&self, Part { block, pair, .. }: &Part) -> bool {
        !self.sees[*block][..*pair].contains(&true)
    }

    /// Counts a product.
    #[inline(always)]
    pub(super) fn count_product(&mut self) {
        self.pace.count_product();
    }

    /// The next part, if it is due.
    #[inline(always)]
    pub(super) fn next_due(&mut self) -> Option<Part> {
        if !self.pace.is_due() {
            return None;
        }
        self.pace.take();
        self.next()
    }

    /// Asks memory for the biases of some rows and the keys of a pair in the next tile.
    #[inline(always)]
    pub(super) fn ask_for_biases(&self, rows: [usize; 2], pair: usize) {
        let Biases { bias, bias_row, .. } = self.biases;
        for row in rows {
            let from = bias.wrapping_add(row * bias_row + KEYS + pair * STEP);
            prefetch_bytes(from.cast(), STEP * size_of::<T>());
        }
    }

    /// The squares of p and d.
    #[inline(always)]
    pub(super) fn squares(&self, block: usize, pair: usize) -> [SplitSquare<T>; 2] {
        let Self { back: Back { rows, p, d, .. }, d_rows, panels: [p_panels, d_panels], .. } = *self;
        [(p, p_panels, ptr::null_mut()), (d, d_panels, d_rows.wrapping_add(square_at(block, pair)))].map(
            |(from, panels, to_rows)| SplitSquare {
                rows: UNIT_ROWS.min(rows - block * UNIT_ROWS),
                from: from.wrapping_add(block * UNIT_ROWS * KEYS + pair * STEP),
                from_row: KEYS,
                panels: panels.wrapping_add(panels_at(pair, block)),
                panel: RETURNED_PANEL,
                to_rows,
            },
        )
    }
}

/// Rows of a step and one tile of keys, whose products have been made.
#[derive(Debug)]
pub(crate) struct ReturningRows<'a, T> {
    /// At most 128.
    pub(crate) rows: usize,
    /// The pairs of panels that each block of 32 rows sees something of.
    pub(crate) sees: [[bool; PAIRS]; BLOCKS],
    /// `[rows][64]`: of queries and keys, and of the context's gradient and the values. They stay as they are.
    pub(crate) products: [&'a mut [T]; 2],
    /// `[rows]`
    pub(crate) lse: &'a [T],
    /// `[rows]`
    pub(crate) delta: &'a [T],
    /// `[rows]`, bit j set if key j is visible.
    pub(crate) visible: &'a mut [u64],
    /// From products to scores.
    pub(crate) factor: T,
    /// Of each row, from the first key of the tile on.
    pub(crate) bias: Option<Lines<'a, T>>,
    /// `[rows, 64]`, to which the gradients of the scores are added: [`can_add_to`] them.
    pub(crate) d_bias: Option<ArrayViewMut2<'a, T>>,
    pub(crate) dropout: Option<Dropped<'a, T>>,
    /// `[rows][64]` for dropout.
    pub(crate) z: &'a mut [T],
    /// [`RETURNED_PANELS`] of p and d, and [`RETURNED_ROWS`] of d.
    pub(crate) panels: [&'a mut [T]; 2],
    pub(crate) d_rows: &'a mut [T],
}

/// Whether the gradients of a bias may be added to where they are.
pub(crate) fn can_add_to<T>(d_bias: &ArrayViewMut2<'_, T>) -> bool {
    d_bias.strides()[1] == 1
}

/// The same on their way.
#[derive(Debug)]
pub(crate) struct OnTheWay<'a, T> {
    rows: Returning<T>,
    /// Of what the pointers point to.
    of: PhantomData<&'a mut T>,
}

impl<'a, T: Copy> ReturningRows<'a, T> {
    /// Lets them go, beside so many products of parts.
    pub(crate) fn beside(self, products: usize) -> OnTheWay<'a, T> {
        let Self {
            rows,
            sees,
            products: [p, d],
            lse,
            delta,
            visible,
            factor,
            dropout,
            z,
            panels,
            d_rows,
            bias,
            d_bias,
        } = self;
        let rows = rows.min(BLOCKS * UNIT_ROWS);
        let (p, d) = (&mut p[..rows * KEYS], &mut d[..rows * KEYS]);
        let (lse, delta, visible) = (&lse[..rows], &delta[..rows], &mut visible[..rows]);
        let mut biases = Biases::NONE;
        if let Some((bias, row)) = bias.map(|bias| bias.extent(rows, KEYS)) {
            (biases.bias, biases.bias_row) = (bias.as_ptr(), row);
        }
        if let Some(mut sums) = d_bias {
            assert!(sums.dim() == (rows, KEYS) && can_add_to(&sums), "lines of gradients for all rows");
            (biases.sums, biases.sums_row) = (sums.as_mut_ptr(), sums.strides()[0]);
        }
        let dropping = dropout.map(|dropped| dropped.rows(0..rows, z[..rows * KEYS].as_mut_ptr(), Into::Store));
        let pieces = PANEL * sees.iter().flatten().filter(|sees| **sees).count();
        let there = |block: usize| block * UNIT_ROWS < rows;
        assert!(sees.iter().enumerate().all(|(block, sees)| there(block) || *sees == [false; PAIRS]), "rows that see");
        let rows = Returning {
            back: Back {
                rows,
                first: 0,
                end: KEYS,
                p: p.as_mut_ptr(),
                d: d.as_mut_ptr(),
                lse: lse.as_ptr(),
                delta: delta.as_ptr(),
                visible: visible.as_mut_ptr(),
                all_visible: false,
                bias: None,
                softcap: None,
                factor,
                slope: ptr::null_mut(),
                z: dropping.as_ref().map_or(ptr::null(), |dropping| dropping.to),
                d_scores: ptr::null_mut(),
            },
            biases,
            dropping,
            sees,
            panels: panels.map(|panels| panels[..RETURNED_PANELS].as_mut_ptr()),
            d_rows: d_rows[..RETURNED_ROWS].as_mut_ptr(),
            largest: [Lanes([0; PANEL]); 2],
            piece: 0,
            pace: Pace::new(pieces, products),
        };
        OnTheWay { rows, of: PhantomData }
    }
}

impl<T> OnTheWay<'_, T> {
    /// What a product is to have beside it.
    pub(super) fn work(&mut self) -> Work<'_, T> {
        Work::Return(&mut self.rows)
    }

    /// All that is left. How large p and d are.
    pub(crate) fn finish(mut self, unit: &mut MatrixUnit<'_, T>) -> [Extent; 2] {
        unit.finish(self.work());
        self.rows.largest.map(|largest| Extent { largest: largest.0.into_iter().fold(0, u32::max) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::back::{BackGroup, BackRoom};
    use crate::kernels::dropout::{Drops, RowKey};
    use crate::kernels::matrix_unit::{Squares, UnitProduct};
    use crate::kernels::step::Scoring;
    use crate::kernels::testing::{Numbers, nans};
    use crate::kernels::tile::{MAX_ROWS, Start};
    use crate::kernels::{Kernels, Level, Real};
    use ndarray::Array2;

    const FACTOR: f32 = 0.125;
    const FIRST_KEY: usize = 192;
    const MOST: usize = BLOCKS * UNIT_ROWS;

    /// Rows, and what they are given beyond the products.
    struct Case {
        rows: usize,
        products: [Vec<f32>; 2],
        lse: Vec<f32>,
        delta: Vec<f32>,
        visible: Vec<u64>,
        row_keys: Vec<RowKey>,
        drops: Option<Drops<f32>>,
        bias: Option<Array2<f32>>,
    }

    /// What comes out: panels of p and d, rows of d, sums.
    #[derive(PartialEq)]
    struct Out {
        panels: [Vec<u32>; 2],
        d_rows: Vec<u32>,
        sums: Vec<u32>,
    }

    impl Case {
        fn new(rows: usize, drops: bool, biased: bool) -> Self {
            let mut numbers = Numbers::new(rows as u64);
            let products = [(); 2].map(|()| numbers.vec::<f32>(MOST * KEYS));
            let bias = biased.then(|| {
                let mut bias = numbers.matrix::<f32>(rows, KEYS + 3);
                bias.iter_mut().step_by(7).for_each(|x| *x = f32::NEG_INFINITY);
                bias
            });
            // Rows that see all, some, or nothing; a block that sees one pair only. Hidden products are NaN.
            let mut case = Self {
                rows,
                products,
                lse: numbers.vec(rows),
                delta: numbers.vec(rows),
                visible: (0..rows)
                    .map(|row| match (row / UNIT_ROWS, row % 5) {
                        (1, _) => numbers.word() >> 32,
                        (2, _) => 0,
                        (_, 0) => numbers.word(),
                        (_, 1) if row > 3 => 0,
                        _ => u64::MAX,
                    })
                    .collect(),
                row_keys: (0..rows).map(|_| RowKey::new(numbers.word())).collect(),
                drops: drops.then_some(Drops { last: u32::MAX / 4, factor: 1.25 }),
                bias,
            };
            for (at, bits) in (0..rows * KEYS).map(|at| (at, case.visible[at / KEYS])) {
                let hidden = case.bias.as_ref().is_some_and(|bias| bias[(at / KEYS, at % KEYS)] == f32::NEG_INFINITY);
                if hidden || bits >> (at % KEYS) & 1 == 0 {
                    case.products.iter_mut().for_each(|x| x[at] = f32::NAN);
                }
            }
            case
        }

        fn sees(&self) -> [[bool; PAIRS]; BLOCKS] {
            std::array::from_fn(|block| {
                let bits = self.visible.chunks(UNIT_ROWS).nth(block).unwrap_or_default().iter().fold(0, |a, b| a | b);
                std::array::from_fn(|pair| bits >> (pair * STEP) << (KEYS - STEP) != 0)
            })
        }

        /// By the kernels that do one thing after the other, in groups of six rows.
        fn right(&self, kernels: &Kernels<f32>) -> Out {
            let [mut p, mut d] = self.products.clone();
            let mut sums = vec![0.5_f32; self.rows * KEYS];
            for first in (0..self.rows).step_by(MAX_ROWS) {
                let rows = first..self.rows.min(first + MAX_ROWS);
                let numbers = first * KEYS..rows.end * KEYS;
                let (mut z, mut d_scores) = (nans(MAX_ROWS * KEYS), nans(MAX_ROWS * KEYS));
                let mut bits = [0; MAX_ROWS];
                bits[..rows.len()].copy_from_slice(&self.visible[rows.clone()]);
                let scoring = Scoring {
                    visible: Some(&bits),
                    bias: self.bias.as_ref().map(|bias| {
                        let row = |i: usize| (first + i).min(self.rows - 1);
                        std::array::from_fn(|i| &bias.as_slice().unwrap()[row(i) * (KEYS + 3)..][..KEYS])
                    }),
                    softcap: None,
                    factor: FACTOR,
                    dropout: self.drops.map(|drops| Dropped {
                        keys: &self.row_keys[rows.clone()],
                        first: FIRST_KEY,
                        drops,
                    }),
                };
                let mut group = BackGroup {
                    rows: rows.len(),
                    p: &mut p[numbers.clone()],
                    d: &mut d[numbers.clone()],
                    lse: &self.lse[rows.clone()],
                    delta: &self.delta[rows],
                };
                let mut room = BackRoom { slope: &mut [], z: &mut z, d_scores: &mut d_scores };
                kernels.back(&mut group, 0..KEYS / PANEL, &scoring, &mut room);
                sums[numbers].iter_mut().zip(d_scores).for_each(|(sum, d)| *sum += d);
            }
            let mut panels = [(); 2].map(|()| nans::<f32>(RETURNED_PANELS));
            let mut d_rows = nans::<f32>(RETURNED_ROWS);
            let unit = kernels.matrix_unit().unwrap();
            for (block, pair) in (0..BLOCKS).flat_map(|block| (0..PAIRS).map(move |pair| (block, pair))) {
                if !self.sees()[block][pair] {
                    continue;
                }
                for (i, from) in [&p, &d].into_iter().enumerate() {
                    let to = Squares {
                        panels: &mut panels[i][panels_at(pair, block)..],
                        panel: RETURNED_PANEL,
                        rows: (i == 1).then_some(&mut d_rows[square_at(block, pair)..]),
                    };
                    let from = &from[block * UNIT_ROWS * KEYS + pair * STEP..];
                    unit.split_square(UNIT_ROWS.min(self.rows - block * UNIT_ROWS), from, KEYS, to);
                }
            }
            Out::new(panels, d_rows, if self.bias.is_some() { sums } else { vec![0.5; self.rows * KEYS] })
        }

        /// Beside so many products.
        fn beside(&self, kernels: &Kernels<f32>, products: usize) -> Out {
            let mut given = self.products.clone();
            let mut panels = [(); 2].map(|()| nans::<f32>(RETURNED_PANELS));
            let (mut d_rows, mut z) = (nans::<f32>(RETURNED_ROWS), nans(MOST * KEYS));
            let mut sums = Array2::from_elem((self.rows, KEYS), 0.5_f32);
            let mut unit = kernels.matrix_unit().unwrap();
            let [p, d] = &mut given;
            let mut visible = self.visible.clone();
            let mut on_the_way = ReturningRows {
                rows: self.rows,
                sees: self.sees(),
                products: [p, d],
                lse: &self.lse,
                delta: &self.delta,
                visible: &mut visible,
                factor: FACTOR,
                bias: self.bias.as_ref().map(|bias| Lines::new(bias.as_slice().unwrap(), 0, KEYS + 3)),
                d_bias: self.bias.is_some().then_some(sums.view_mut()),
                dropout: self.drops.map(|drops| Dropped { keys: &self.row_keys, first: FIRST_KEY, drops }),
                z: &mut z,
                panels: panels.each_mut().map(|panels| &mut panels[..]),
                d_rows: &mut d_rows,
            }
            .beside(products);
            let (a, b) = (vec![0.0; split_rows_len(UNIT_ROWS, STEP)], vec![0.0; 2 * split_panel_len(STEP)]);
            let mut c = nans(UNIT_ROWS * STEP);
            for _ in 0..products.div_ceil(crate::kernels::products_of_parts(1, 2)) {
                let product = UnitProduct {
                    rows: UNIT_ROWS,
                    panels: 2,
                    steps: 1,
                    a: &a,
                    a_part: UNIT_ROWS * PANEL,
                    b: &b,
                    b_panel: split_panel_len(STEP),
                    c: &mut c,
                    c_row: STEP,
                    start: Start::Zero,
                };
                unit.multiply(product, Some(&mut on_the_way));
                assert!(c.iter().all(|&c| c == 0.0));
            }
            let extents = on_the_way.finish(&mut unit);
            assert!(given.iter().zip(&self.products).all(|(x, y)| bits(x) == bits(y)), "the products stay");
            assert!(extents.iter().all(|extent| extent.fits()));
            Out::new(panels, d_rows, sums.into_raw_vec_and_offset().0)
        }
    }

    impl Out {
        fn new(panels: [Vec<f32>; 2], d_rows: Vec<f32>, sums: Vec<f32>) -> Self {
            Self { panels: panels.map(|panels| bits(&panels)), d_rows: bits(&d_rows), sums: bits(&sums) }
        }
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|x| x.to_bits()).collect()
    }

    #[test]
    fn rows_return_beside_products_as_they_do_alone() {
        for level in Level::available() {
            let kernels = f32::kernels(*level);
            if kernels.matrix.is_none() {
                continue;
            }
            for rows in [1, 15, 16, 17, 31, 33, 40, 64, 90, MOST] {
                for (drops, biased) in [(false, false), (true, false), (false, true), (true, true)] {
                    let case = Case::new(rows, drops, biased);
                    let want = case.right(kernels);
                    for products in [0, 30, 1000] {
                        let got = case.beside(kernels, products);
                        let what = format!("{rows} rows, dropout {drops}, bias {biased}, {products} products");
                        assert!(got.sums == want.sums, "sums: {what}");
                        assert!(got.panels == want.panels, "panels: {what}");
                        assert!(got.d_rows == want.d_rows, "rows: {what}");
                    }
                }
            }
        }
    }
}
