//! What the rows of a walk see of a tile of keys.
//!
//! Rows ascend by position, and both ends of the keys that a query sees by structure grow with its position. So the rows that
//! see some of a tile follow each other, and so do those among them that see all of it:
//!
//! ```text
//!                    keys of the tile
//! rows               ................      see nothing: not met
//!    .               xx..............
//!    .   some        xxxxxxxx........      looked at six by six, for panels of 16 keys and the bits of rows
//!    .         all   xxxxxxxxxxxxxxxx      met at once, see `kernels/rows.rs`
//!    .               xxxxxxxxxxxxxxxx
//! ```
//!
//! Dense rules are asked by word, 64 keys of a row at a time; they end runs of rows that see all.

use std::ops::Range;

use super::walk::Walk;
use crate::element::Element;
use crate::kernels::{KEYS, MAX_ROWS, PANEL, UNIT_ROWS, key_bits};
use crate::mask::DenseWords;

/// Rows of a run that the matrix unit meets at once: half a block of it. Fewer are met with those beside them.
const SHORTEST_RUN: usize = UNIT_ROWS / 2;

/// What a group of rows sees of a tile.
pub(super) struct Sight {
    /// Panels of 16 keys.
    pub(super) panels: Range<usize>,
    /// The bits of each row, where not all of the panels are visible.
    pub(super) bits: Option<[u64; MAX_ROWS]>,
}

impl Sight {
    /// All of a full tile.
    pub(super) const WHOLE: Self = Self { panels: 0..KEYS / PANEL, bits: None };
}

/// The rows that a tile concerns.
pub(super) struct Seeing<'m> {
    /// Which tile it is.
    tile: usize,
    /// What dense rules say of it, if they say the same for all heads of the rows.
    words: Option<DenseWords<'m>>,
    /// Those that may see some of its keys.
    pub(super) some: Range<usize>,
    /// Those that see all of its 64 keys, unless dense rules hide some.
    all: Range<usize>,
    /// Up to where rows are known to see all.
    run: usize,
}

impl<'p, T: Element> Walk<'p, '_, T> {
    /// The keys that a row sees by structure.
    fn keys(&self, row: usize) -> Range<usize> {
        self.mask.keys(self.index(row))
    }

    /// Whether a row sees any key.
    pub(super) fn sees_something(&self, row: usize) -> bool {
        self.mask.of_head(self.row(row).0).runs(self.index(row)).next().is_some()
    }

    /// The tiles that all rows see by structure: most of them.
    pub(super) fn whole_tiles(&self) -> Range<usize> {
        match self.rows {
            0 => 0..0,
            rows => self.keys(rows - 1).start.div_ceil(KEYS)..self.keys(0).end / KEYS,
        }
    }

    /// Which rows see keys `keys`, a tile or the last part of one; `whole` if that is all of them.
    pub(super) fn seeing(&self, keys: Range<usize>, whole: bool) -> Seeing<'p> {
        let tile = keys.start / KEYS;
        let alike = self.rows > 0 && (self.group == 1 || !self.mask.differs_by_head());
        let words = alike.then(|| self.mask.of_head(self.row(0).0).dense_words(tile));
        if whole {
            return Seeing { tile, words, some: 0..self.rows, all: 0..self.rows, run: 0 };
        }
        let begun = first_where(0..self.rows, |row| self.keys(row).end > keys.start);
        let ended = first_where(begun..self.rows, |row| self.keys(row).start >= keys.end);
        let all = if keys.len() == KEYS {
            let all = first_where(begun..ended, |row| self.keys(row).end >= keys.end);
            // Whole blocks of the unit before them, as those that begin with a tile of keys are but for one row.
            let all = if self.unit { ended.min(begun + (all - begun).next_multiple_of(SHORTEST_RUN)) } else { all };
            all..first_where(all..ended, |row| self.keys(row).start > keys.start)
        } else {
            begun..begun
        };
        Seeing { tile, words, some: begun..ended, all, run: 0 }
    }

    /// What dense rules say of a row and the tile.
    fn dense_word(&self, seeing: &Seeing<'_>, row: usize) -> u64 {
        match seeing.words {
            Some(words) => words.of(self.index(row)),
            None => self.mask.of_head(self.row(row).0).dense_word(self.index(row), seeing.tile),
        }
    }

    /// The first row from `row` on that dense rules let see some of the tile, or the end of those that see some.
    pub(super) fn first_seeing(&self, seeing: &Seeing<'_>, row: usize) -> usize {
        match self.mask.is_dense() {
            true => (row..seeing.some.end).find(|&row| self.dense_word(seeing, row) != 0).unwrap_or(seeing.some.end),
            false => row,
        }
    }

    /// Where the run of rows ends that starts at `row` and sees all keys of the tile; `row` if it does not. Where dense rules
    /// end it, a run is of [`SHORTEST_RUN`] rows or more for the matrix unit, and else of whole groups of six. Rows are asked for
    /// in ascending order.
    pub(super) fn run_of_all(&self, seeing: &mut Seeing<'_>, row: usize) -> usize {
        if row >= seeing.run {
            let sees = |&row: &usize| self.dense_word(seeing, row) == u64::MAX;
            seeing.run = match seeing.all.contains(&row) {
                false => row,
                true if !self.mask.is_dense() => seeing.all.end,
                true => match (row..seeing.all.end).find(|row| !sees(row)) {
                    Some(hidden) if self.unit && hidden - row >= SHORTEST_RUN => hidden,
                    Some(_) if self.unit => row,
                    Some(hidden) => row + (hidden - row) / MAX_ROWS * MAX_ROWS,
                    None => seeing.all.end,
                },
            };
        }
        seeing.run
    }

    /// What the rows see of the keys `keys` of a tile, which starts at a multiple of 64; `None` if it is nothing.
    pub(super) fn sight(&self, seeing: &Seeing<'_>, rows: Range<usize>, keys: Range<usize>) -> Option<Sight> {
        let (first, last) = (self.keys(rows.start), self.keys(rows.end - 1));
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
            let seen = self.keys(row);
            let within = |key: usize| key.clamp(keys.start, keys.start + KEYS) - keys.start;
            *bits = self.dense_word(seeing, row) & key_bits(within(seen.start), within(seen.end.max(seen.start)));
        }
        let any = bits.iter().fold(0, |any, bits| any | bits);
        if any == 0 {
            return None;
        }
        let panels = any.trailing_zeros() as usize / PANEL..KEYS / PANEL - any.leading_zeros() as usize / PANEL;
        let all = key_bits(panels.start * PANEL, panels.end * PANEL);
        let partial = bits[..rows.len()].iter().any(|bits| bits & all != all);
        Some(Sight { panels, bits: partial.then_some(bits) })
    }
}

/// What the groups of a block of rows see of a tile.
pub(super) struct BlockSight {
    pub(super) rows: Range<usize>,
    /// Where the run of rows ends that starts with the block and sees all keys; its start if there is none.
    pub(super) run: usize,
    /// Of each group, what it sees, if it sees any of it.
    pub(super) groups: [Option<Sight>; UNIT_ROWS.div_ceil(MAX_ROWS)],
    /// The panels that some group sees.
    pub(super) panels: Range<usize>,
}

impl<T: Element> Walk<'_, '_, T> {
    /// What up to `most` rows from `first` on see of the keys `keys` of a tile. With `runs`, the rows end before a run of rows
    /// that see all keys, and are only the first group of such a run if they begin with one.
    pub(super) fn block_sight(
        &self,
        seeing: &mut Seeing<'_>,
        first: usize,
        keys: Range<usize>,
        most: usize,
        runs: bool,
    ) -> BlockSight {
        let end = seeing.some.end.min(first + most.min(UNIT_ROWS));
        let run = self.run_of_all(seeing, first);
        let mut block = BlockSight { rows: first..first, run, groups: Default::default(), panels: 0..0 };
        for sight in &mut block.groups {
            let row = block.rows.end;
            if row >= end {
                break;
            }
            let run = self.run_of_all(seeing, row);
            let alone = row < run && runs;
            if alone && row > first {
                break;
            }
            block.rows.end = end.min(row + MAX_ROWS);
            *sight = if block.rows.end <= run {
                Some(Sight::WHOLE)
            } else {
                self.sight(seeing, row..block.rows.end, keys.clone())
            };
            if let Some(Sight { bits: Some(bits), .. }) = sight.as_ref().filter(|_| runs && self.unit) {
                // The group ends where a run begins.
                let mut later = (row..block.rows.end).zip(bits).skip(1).filter(|(_, bits)| **bits == u64::MAX);
                if let Some((run, _)) = later.find(|&(row, _)| self.run_of_all(seeing, row) > row) {
                    block.rows.end = run;
                    *sight = self.sight(seeing, row..run, keys.clone());
                }
            }
            if let Some(sight) = sight {
                let Range { start, end } = sight.panels;
                let first = block.panels.is_empty();
                block.panels =
                    if first { start..end } else { block.panels.start.min(start)..block.panels.end.max(end) };
            }
            // Its run is met at once, and those after it are asked for then.
            if alone {
                break;
            }
        }
        block
    }
}

/// The first of `candidates` of which `holds` is true, as it is of all after it; their end if there is none.
fn first_where(candidates: Range<usize>, holds: impl Fn(usize) -> bool) -> usize {
    let Range { mut start, mut end } = candidates;
    while start < end {
        let middle = start.midpoint(end);
        (start, end) = if holds(middle) { (start, middle) } else { (middle + 1, end) };
    }
    start
}
