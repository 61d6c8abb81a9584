//! What the vectors of the CPU do beside the products of a matrix unit, which leaves them idle.
//!
//! The unit is given a product of parts, and then the vectors a little of what they have to do: so little that the CPU sees the
//! next product in time, see `weighing.rs`.

use super::PANEL;
use super::matrix::{Extent, SplitPanel, TOGETHER, steps};
use super::returning::Returning;
use super::simd::LINE;
use super::weighing::Weighing;

/// What the vectors of the CPU have to do while the unit multiplies.
#[derive(Debug)]
pub(super) enum Work<'w, T> {
    /// Panels to come are split.
    Split(&'w mut Coming<T>),
    /// Rows of scores become split weights.
    Weigh(&'w mut Weighing<T>),
    /// Rows go back through the softmax, and are split.
    Return(&'w mut Returning<T>),
}

/// How many pieces of work go beside each product of parts.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    /// Parts of a [`Pace::PIECE`] for a product, and those that are due.
    each: usize,
    due: usize,
}

impl Pace {
    const PIECE: usize = 1 << 16;

    /// So many pieces beside so many products.
    pub(super) fn new(pieces: usize, products: usize) -> Self {
        Self { each: (pieces * Self::PIECE).div_ceil(products.max(1)), due: 0 }
    }

    /// Counts a product.
    #[inline(always)]
    pub(super) fn count_product(&mut self) {
        self.due += self.each;
    }

    /// Whether a piece is due.
    #[inline(always)]
    pub(super) fn is_due(&self) -> bool {
        self.due >= Self::PIECE
    }

    /// Takes it off.
    #[inline(always)]
    pub(super) fn take(&mut self) {
        self.due -= Self::PIECE;
    }
}

/// Panels that are split bit by bit, a line of each part at a time: the unit leaves the vectors of the CPU idle, and they have
/// time to wait for memory too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming<T> {
    panels: [SplitPanel<T>; TOGETHER],
    count: usize,
    /// Where the next line is.
    pub(super) panel: usize,
    pub(super) line: usize,
    /// Lines to be split beside each product of parts.
    pub(super) pace: usize,
    /// Memory to be asked for, so many lines beside each product of parts.
    pub(super) from: *const u8,
    pub(super) fetches: usize,
    /// The largest absolute values of each panel, lane by lane.
    pub(super) largest: [[u32; PANEL]; TOGETHER],
}

impl<T> Coming<T> {
    /// No panels.
    pub(super) fn nothing() -> Self {
        let panel = SplitPanel { terms: 0, columns: 0, from: std::ptr::null(), from_row: 0, to: std::ptr::null_mut() };
        let panels = std::array::from_fn(|_| SplitPanel { ..panel });
        Self {
            panels,
            count: 0,
            panel: 0,
            line: 0,
            pace: 0,
            from: std::ptr::null(),
            fetches: 0,
            largest: [[0; PANEL]; TOGETHER],
        }
    }

    /// Forgets the panels. (A copy of nothing would wait for the unit's sums to reach memory, which are older.)
    pub(super) fn clear(&mut self) {
        (self.count, self.panel, self.line, self.fetches) = (0, 0, 0, 0);
    }

    /// One more; there are [`TOGETHER`] at most.
    ///
    /// # Safety
    /// The columns must be readable for all terms and the panel writable until all lines are split.
    pub(super) unsafe fn push(&mut self, panel: SplitPanel<T>) {
        let SplitPanel { terms, columns, from, from_row, to } = panel;
        let place = &mut self.panels[self.count];
        place.terms = terms;
        place.columns = columns;
        place.from = from;
        place.from_row = from_row;
        place.to = to;
        self.largest[self.count] = [0; PANEL];
        self.count += 1;
    }

    /// Asks memory for numbers beside so many products.
    pub(super) fn fetch(&mut self, from: *const T, numbers: usize, products: usize) {
        self.from = from.cast();
        self.fetches = (numbers * size_of::<T>()).div_ceil(LINE).div_ceil(products);
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// The panel whose turn it is.
    #[inline]
    pub(super) fn next(&self) -> Option<&SplitPanel<T>> {
        self.panels[..self.count].get(self.panel)
    }

    /// All lines of all panels.
    pub(super) fn lines(&self) -> usize {
        self.count * steps(self.panels[0].terms) * PANEL
    }

    pub(super) fn extent(&self, panel: usize) -> Extent {
        Extent { largest: self.largest[panel].iter().copied().fold(0, u32::max) }
    }
}
