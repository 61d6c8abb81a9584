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
    /// Panels to come are split, and memory is asked for the sums of the next rows.
    Split(&'w mut Coming<T>),
    /// Panels to come are split.
    SplitTile(&'w mut Coming<T>),
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

/// Panels side by side that are to be split.
#[derive(Clone, Copy, Debug)]
pub(super) struct PanelRun<T> {
    pub(super) terms: usize,
    /// Of all panels; those that the last one misses become zeros.
    pub(super) columns: usize,
    pub(super) from: *const T,
    /// Numbers from term to term.
    pub(super) from_row: usize,
    /// Numbers from panel to panel.
    pub(super) from_panel: usize,
    pub(super) to: *mut T,
    pub(super) to_panel: usize,
}

impl<T> PanelRun<T> {
    const NOTHING: Self = Self {
        terms: 0,
        columns: 0,
        from: std::ptr::null(),
        from_row: 0,
        from_panel: 0,
        to: std::ptr::null_mut(),
        to_panel: 0,
    };

    /// Lines of each part of a panel.
    fn lines(&self) -> usize {
        steps(self.terms) * PANEL
    }
}

/// Panels that are split bit by bit, a line of each part at a time: the unit leaves the vectors of the CPU idle, and they have
/// time to wait for memory too.
#[derive(Clone, Copy, Debug)]
pub(super) struct Coming<T> {
    runs: [PanelRun<T>; TOGETHER],
    count: usize,
    /// Where the next line is: the run, the panel of it, the line of that.
    pub(super) run: usize,
    panel: usize,
    pub(super) line: usize,
    /// Lines to be split beside each product of parts.
    pub(super) pace: usize,
    /// Memory to be asked for, so many lines beside each product of parts.
    pub(super) from: *const u8,
    pub(super) fetches: usize,
    /// The largest absolute values of each run, lane by lane.
    pub(super) largest: [[u32; PANEL]; TOGETHER],
}

impl<T> Coming<T> {
    /// No panels.
    pub(super) const NOTHING: Self = Self {
        runs: [PanelRun::NOTHING; TOGETHER],
        count: 0,
        run: 0,
        panel: 0,
        line: 0,
        pace: 0,
        from: std::ptr::null(),
        fetches: 0,
        largest: [[0; PANEL]; TOGETHER],
    };

    /// Forgets the panels. (A copy of nothing would wait for the unit's sums to reach memory, which are older.)
    pub(super) fn clear(&mut self) {
        (self.count, self.run, self.panel, self.line, self.fetches) = (0, 0, 0, 0, 0);
    }

    /// Some more; there are [`TOGETHER`] runs at most.
    ///
    /// # Safety
    /// The columns must be readable for all terms and the panels writable until all lines are split.
    pub(super) unsafe fn push(&mut self, run: PanelRun<T>) {
        let PanelRun { terms, columns, from, from_row, from_panel, to, to_panel } = run;
        let place = &mut self.runs[self.count];
        // One by one, as above. Without a column there is no line.
        place.terms = if columns == 0 { 0 } else { terms };
        place.columns = columns;
        place.from = from;
        place.from_row = from_row;
        place.from_panel = from_panel;
        place.to = to;
        place.to_panel = to_panel;
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
    #[inline(always)]
    pub(super) fn next(&self) -> Option<SplitPanel<T>> {
        let run = self.runs[..self.count].get(self.run)?;
        Some(SplitPanel {
            terms: run.terms,
            columns: (run.columns - self.panel * PANEL).min(PANEL),
            from: run.from.wrapping_add(self.panel * run.from_panel),
            from_row: run.from_row,
            to: run.to.wrapping_add(self.panel * run.to_panel),
        })
    }

    /// Goes to the next panel.
    #[inline(always)]
    pub(super) fn end_panel(&mut self) {
        (self.panel, self.line) = (self.panel + 1, 0);
        if self.panel * PANEL >= self.runs[self.run].columns {
            (self.run, self.panel) = (self.run + 1, 0);
        }
    }

    /// All lines of all panels.
    pub(super) fn lines(&self) -> usize {
        self.runs[..self.count].iter().map(|run| run.columns.div_ceil(PANEL) * run.lines()).sum()
    }

    pub(super) fn extent(&self, run: usize) -> Extent {
        Extent { largest: self.largest[run].iter().copied().fold(0, u32::max) }
    }
}
