//! Rows of scores become split weights beside the products of other rows.
//!
//! While the unit multiplies, half of the ports for vectors of numbers is idle, and all of those for bits. But the CPU looks
//! only some hundred instructions ahead, so the vectors have to come in small portions: a row of 64 keys is 130 instructions,
//! and six products of the unit, which it goes between, take 96 cycles. Two or more rows at once leave the unit without
//! products (Emerald Rapids, a block of 32 rows with its operands in the first-level cache: 1.05 us of products alone and 0.42
//! of rows alone; 1.13 together, 1.22 and 1.38 with rows 1.5 and 3 times as dense). With operands in the second-level
//! cache it is 1.43, of 1.17 and 0.42.
//!
//! Their powers are split as they are in registers. Written over the scores first, and read again, attention as a whole takes 1.03
//! to 1.07 of the time: what the unit loads takes the ports for memory too.

use super::beside::{Pace, Work};
use super::dropout::{Dropped, Dropping, Into};
use super::matrix::{Session, UNIT_ROWS};
use super::real::Real;
use super::softmax::Softmax;
use super::splitting::Splitting;
use super::unit::{SCORES, Unit, WEIGHTS};
use super::{KEYS, PANEL};

/// The rows of a block, of which every one sees all 64 keys of a tile but for those that its bias hides, without a cap.
#[derive(Debug)]
pub(super) struct Weighing<T> {
    pub(super) softmax: Softmax<T>,
    /// The biases of the rows, and numbers from row to row.
    pub(super) bias: Option<(*const T, usize)>,
    /// After it, if there is dropout.
    pub(super) dropping: Option<Dropping<T>>,
    /// Rows among [`UNIT_ROWS`] that are split from their powers.
    pub(super) to: *mut T,
    /// The next row.
    pub(super) row: usize,
    pace: Pace,
}

impl<T> Weighing<T> {
    /// Whether a row is left.
    #[inline(always)]
    pub(super) fn is_left(&self) -> bool {
        self.row < self.softmax.rows
    }

    /// Counts a product.
    #[inline(always)]
    pub(super) fn count_product(&mut self) {
        self.pace.count_product();
    }

    /// Whether a row is due, which is taken off.
    #[inline(always)]
    pub(super) fn take_due(&mut self) -> bool {
        let due = self.pace.is_due() && self.is_left();
        if due {
            self.pace.take();
        }
        due
    }
}

impl<T: Real> Unit<'_, T> {
    /// Scores, softmax and values of rows that see all keys, or all but what their biases hide, and fit the unit, block by block:
    /// the softmax of one is beside the values of the one before and the scores of the one after. Beside the first scores and the
    /// last values some of the tile to come is split.
    ///
    /// # Safety
    /// As [`super::softmax::softmax`], of rows that this unit has, at least one, and all 64 keys; but `p` has room for two times
    /// [`SCORES`] numbers, and `weights` for two times [`WEIGHTS`]. There are biases for all rows, if any.
    pub(super) unsafe fn attend_beside(
        &self,
        session: &mut Session<'_, T>,
        all: &Softmax<T>,
        weights: *mut T,
        biases: Option<(&[T], usize)>,
        dropped: Option<Dropped<'_, T>>,
        mut coming: Option<&mut Splitting<'_, T>>,
    ) {
        let &Softmax { rows, o, o_row, width, p, .. } = all;
        let blocks = rows.div_ceil(UNIT_ROWS);
        let block = |index: usize| index * UNIT_ROWS..rows.min((index + 1) * UNIT_ROWS);
        // What two neighbours write lies apart.
        let p = |index: usize| p.wrapping_add(index % 2 * SCORES);
        let weights = |index: usize| weights.wrapping_add(index % 2 * WEIGHTS);
        let scores = |index: usize| self.scores(block(index), 0..KEYS / PANEL, p(index));
        let values = |index: usize| {
            let o = o.wrapping_add(index * UNIT_ROWS * o_row);
            self.values(weights(index), [block(index).len(), KEYS, width], o, o_row)
        };
        let (score_products, value_products) = (scores(0).products(), values(0).products());
        // SAFETY: blocks are 1 to 32 of the rows, of which there are all, and there is room for the scores and weights of two
        // (contract).
        unsafe {
            session.multiply_with(&scores(0), coming.as_deref_mut().and_then(Splitting::work));
            for index in 0..blocks {
                let (has_before, has_after) = (index > 0, index + 1 < blocks);
                let products = if has_before { value_products } else { 0 } + if has_after { score_products } else { 0 };
                // In one piece, where it stays: a copy would wait for the unit's sums to reach memory, which are older.
                let mut weighing = Weighing {
                    softmax: all.of_rows(block(index), p(index)),
                    bias: biases.map(|(bias, apart)| (bias.as_ptr().wrapping_add(index * UNIT_ROWS * apart), apart)),
                    dropping: dropped.as_ref().map(|dropped| dropped.rows(block(index), p(index), Into::Multiply)),
                    to: weights(index),
                    row: 0,
                    pace: Pace::new(block(index).len(), products),
                };
                if has_before {
                    session.multiply_beside(&values(index - 1), Work::Weigh(&mut weighing));
                }
                if has_after {
                    session.multiply_beside(&scores(index + 1), Work::Weigh(&mut weighing));
                }
                (self.matrix.finish)(Work::Weigh(&mut weighing));
            }
            session.multiply_with(&values(blocks - 1), coming.and_then(Splitting::work));
        }
    }
}
