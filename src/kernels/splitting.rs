//! A tile of keys and values is split for the matrix unit, see `matrix.rs`: all at once, or beside the products of the tile
//! before, which leave the vectors of the CPU idle where they have no softmax beside them.

use super::beside::{Coming, PanelRun, Work};
use super::matrix::{Matrix, SplitPanel, split_panel_len, steps};
use super::operand::Operand;
use super::real::Real;
use super::table::{Kernels, VALUES_PANEL};
use super::{KEYS, PANEL};
use ndarray::{ArrayView2, s};
use std::marker::PhantomData;

/// A split tile of keys and values.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SplitTile<'a, T> {
    /// Panels of 16 keys.
    pub(super) keys: &'a [T],
    /// Panels of 16 columns.
    pub(super) values: &'a [T],
    /// Instructions that the terms of the values take.
    pub(super) steps: usize,
}

/// Values that are to be split: of a packed tile, or rows as they are.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unsplit<'a, T> {
    Tile(Operand<'a, T>),
    /// See [`are_lines`].
    Rows(ArrayView2<'a, T>),
}

/// Where a tile of keys and values is split.
#[derive(Debug)]
pub(crate) struct SplitPlace<'s, T> {
    /// How many of its keys somebody sees: the first.
    pub(crate) count: usize,
    pub(crate) head_dim: usize,
    /// Columns of the values, a multiple of 16.
    pub(crate) width: usize,
    pub(crate) to: [&'s mut [T]; 2],
}

/// What splitting a tile needs.
pub(crate) struct SplitRoom<'s, 'p, T> {
    pub(crate) place: SplitPlace<'s, T>,
    /// Whether the tile has been packed and split to the place already, by a [`Splitting`].
    pub(crate) done: bool,
    /// For a panel of keys or values.
    pub(crate) panel: &'p mut [T],
    /// Says which keys nobody sees, bit by bit.
    pub(crate) hidden: &'p dyn Fn() -> u64,
}

impl<'s, T> SplitRoom<'s, '_, T> {
    /// What was split.
    pub(crate) fn tile(self) -> SplitTile<'s, T> {
        let SplitPlace { count, to: [keys, values], .. } = self.place;
        SplitTile { keys, values, steps: steps(count) }
    }
}

/// Whether rows are lines of memory, one after the other.
pub(crate) fn are_lines<T>(rows: ArrayView2<'_, T>) -> bool {
    (rows.ncols() <= 1 || rows.strides()[1] == 1) && rows.strides()[0] >= 0
}

/// Numbers that split keys or values of a tile take: panels of keys for a head, panels of a head for keys.
pub(crate) fn split_keys_len(head_dim: usize) -> usize {
    split_panel_len(head_dim).saturating_mul(KEYS / PANEL)
}

/// See [`split_keys_len`].
pub(crate) fn split_values_len(width: usize) -> usize {
    split_panel_len(KEYS).saturating_mul(width / PANEL)
}

/// The keys of a tile whose bits are set.
fn keys_of(bits: u64) -> impl Iterator<Item = usize> {
    (0..KEYS).filter(move |key| bits >> key & 1 == 1)
}

/// Makes some keys of a packed tile zero, `[panels][head_dim][16]`: those whose bits are set.
pub(crate) fn clear_keys<T: Real>(panels: &mut [T], head_dim: usize, bits: u64) {
    for key in keys_of(bits) {
        let panel = panels.chunks_exact_mut((head_dim * PANEL).max(1)).nth(key / PANEL);
        panel.into_iter().flatten().skip(key % PANEL).step_by(PANEL).for_each(|x| *x = T::zero());
    }
}

impl<T: Real> Kernels<T> {
    /// Splits the first packed keys of a tile and their values. Whether they fit the unit, if there is one.
    pub(crate) fn split_tile(
        &self,
        keys: Operand<'_, T>,
        values: Unsplit<'_, T>,
        room: &mut SplitRoom<'_, '_, T>,
    ) -> bool {
        let SplitRoom { place: SplitPlace { count, head_dim, width, to: [to_keys, to_values] }, panel, .. } = room;
        let (count, head_dim, panels) = (*count, *head_dim, *width / PANEL);
        let keys_fit =
            self.split_panels(keys, [count.div_ceil(PANEL), head_dim, count], head_dim * PANEL, to_keys, panel);
        keys_fit == Some(true)
            && match values {
                Unsplit::Tile(values) => {
                    self.split_panels(values, [panels, count, *width], VALUES_PANEL, to_values, panel) == Some(true)
                }
                Unsplit::Rows(values) => {
                    self.split_lines(values.slice(s![..count, ..]), to_values, split_panel_len(count)) == Some(true)
                }
            }
    }

    /// The same of a copy, with zeros for what nobody sees: it must not decide how the rest is rounded.
    pub(crate) fn split_seen(&self, keys: &mut [T], values: &mut [T], room: &mut SplitRoom<'_, '_, T>) -> bool {
        let hidden = (room.hidden)();
        if hidden == 0 {
            return false;
        }
        clear_keys(keys, room.place.head_dim, hidden);
        for panel in values.chunks_exact_mut(VALUES_PANEL).take(room.place.width / PANEL) {
            keys_of(hidden).for_each(|key| panel[key * PANEL..][..PANEL].fill(T::zero()));
        }
        self.split_tile(Operand::Own(keys), Unsplit::Tile(Operand::Own(values)), room)
    }

    /// Rows as panels of 16 columns, `panel` numbers from one to the next. Whether they fit the unit, unless there is none, or the
    /// rows are not lines of memory.
    pub(crate) fn split_lines(&self, rows: ArrayView2<'_, T>, to: &mut [T], panel: usize) -> Option<bool> {
        let matrix = self.matrix.as_ref().filter(|_| are_lines(rows))?;
        let ((terms, width), from_row) = (rows.dim(), rows.strides()[0].unsigned_abs());
        let mut fit = true;
        for (index, first) in (0..width).step_by(PANEL).enumerate() {
            let to = to[index * panel..][..split_panel_len(terms)].as_mut_ptr();
            let from = rows.as_ptr().wrapping_add(first);
            let columns = PANEL.min(width - first);
            // SAFETY: rows and columns are some of the view, and the slice has room for as many split ones.
            fit &= unsafe { (matrix.split_panel)(&SplitPanel { terms, columns, from, from_row, to }) }.fits();
        }
        Some(fit)
    }

    /// Panels that begin `apart` numbers after each other. Whether they fit the unit, unless there is none, or no room.
    fn split_panels(
        &self,
        from: Operand<'_, T>,
        [panels, terms, columns]: [usize; 3],
        apart: usize,
        to: &mut [T],
        room: &mut [T],
    ) -> Option<bool> {
        let matrix = self.matrix.as_ref()?;
        let len = terms * PANEL;
        if !matches!(from, Operand::Own(_)) && room.len() < len {
            return None;
        }
        let to = &mut to[..panels * split_panel_len(terms)];
        let mut fit = true;
        for panel in 0..panels {
            let from = self.widened(from.range(panel * apart, panel * apart + len), room);
            // SAFETY: the first slice is a panel, and the second has room for as many split ones.
            fit &= unsafe {
                let to = to.as_mut_ptr().add(panel * split_panel_len(terms));
                let columns = columns.saturating_sub(panel * PANEL).min(PANEL);
                (matrix.split_panel)(&SplitPanel { terms, columns, from: from.as_ptr(), from_row: PANEL, to })
            }
            .fits();
        }
        Some(fit)
    }

    /// The first `count` of rows that are packed as `[panels][terms][16]`, split into the first numbers of `to`. Whether they fit
    /// the unit, if there is one.
    pub(crate) fn split_key_panels(&self, panels: &[T], [count, terms]: [usize; 2], to: &mut [T]) -> Option<bool> {
        self.split_panels(Operand::Own(panels), [count.div_ceil(PANEL), terms, count], terms * PANEL, to, &mut [])
    }
}

/// A tile that is being split: a little beside each product of the tile before, and what is left in the end.
#[derive(Debug)]
pub(crate) struct Splitting<'s, T> {
    matrix: &'s Matrix<T>,
    /// Keys, then values.
    coming: Coming<T>,
    /// What is read and written.
    borrow: PhantomData<(&'s T, &'s mut T)>,
}

/// Lines that are split beside each product of parts: 22 instructions each, together as many as a row of weights has (see
/// `weighing.rs`). Products of one block of rows with keys and values are enough for a tile of as wide keys as values.
const LINES: usize = 6;

impl<T: Real> Kernels<T> {
    /// Begins to split the first packed keys of a tile and their values. `None` if there is no unit, or they are not numbers of
    /// this type in memory.
    pub(crate) fn begin_split<'s>(
        &'s self,
        keys: Operand<'s, T>,
        values: Unsplit<'s, T>,
        place: SplitPlace<'s, T>,
    ) -> Option<Splitting<'s, T>> {
        let matrix = self.matrix.as_ref()?;
        let SplitPlace { count, head_dim, width, to: [to_keys, to_values] } = place;
        let keys = keys.own()?;
        let to_keys = &mut to_keys[..count.div_ceil(PANEL) * split_panel_len(head_dim)];
        let keys = PanelRun {
            terms: head_dim,
            columns: count,
            from: keys[..count.div_ceil(PANEL) * PANEL * head_dim].as_ptr(),
            from_row: PANEL,
            from_panel: head_dim * PANEL,
            to: to_keys.as_mut_ptr(),
            to_panel: split_panel_len(head_dim),
        };
        let (columns, from, from_row, from_panel) = match values {
            Unsplit::Tile(values) => {
                let values = values.own()?;
                (width, values[..width / PANEL * VALUES_PANEL].as_ptr(), PANEL, VALUES_PANEL)
            }
            Unsplit::Rows(rows) if are_lines(rows) => {
                let rows = rows.slice_move(s![..count, ..width.min(rows.ncols())]);
                (rows.ncols(), rows.as_ptr(), rows.strides()[0].unsigned_abs(), PANEL)
            }
            Unsplit::Rows(_) => return None,
        };
        let to_panel = split_panel_len(count);
        let to = to_values[..columns.div_ceil(PANEL) * to_panel].as_mut_ptr();
        let values = PanelRun { terms: count, columns, from, from_row, from_panel, to, to_panel };
        let mut coming = Coming::NOTHING;
        coming.pace = LINES;
        // SAFETY: the slices and the view, which are borrowed for as long as the result lives, have all terms and columns, and
        // room for as many split panels.
        unsafe {
            coming.push(keys);
            coming.push(values);
        }
        Some(Splitting { matrix, coming, borrow: PhantomData })
    }
}

impl<T> Splitting<'_, T> {
    /// What goes beside a product, if something is left.
    #[inline]
    pub(super) fn work(&mut self) -> Option<Work<'_, T>> {
        self.coming.next().is_some().then_some(Work::SplitTile(&mut self.coming))
    }

    /// Splits what is left. Whether all of the tile fits the unit.
    pub(crate) fn finish(mut self) -> bool {
        // SAFETY: what is read and written is borrowed, see `begin_split`.
        unsafe { (self.matrix.finish)(Work::SplitTile(&mut self.coming)) };
        self.coming.extent(0).fits() && self.coming.extent(1).fits()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::testing::{Numbers, nans};
    use crate::kernels::{Level, Real};

    /// A tile of `count` keys, split at once or beside `pieces` products first; and whether it fits.
    fn split(
        kernels: &Kernels<f32>,
        [count, head_dim, value_dim]: [usize; 3],
        (keys, rows): (&[f32], &[f32]),
        pieces: Option<usize>,
    ) -> (Vec<f32>, Vec<f32>, bool) {
        let view = ArrayView2::from_shape((KEYS, rows.len() / KEYS), rows).expect("a matrix");
        let values = Unsplit::Rows(view.slice_move(s![.., ..value_dim]));
        let width = value_dim.next_multiple_of(PANEL);
        let (mut to_keys, mut to_values) = (nans(split_keys_len(head_dim)), nans(split_values_len(width)));
        let place = SplitPlace { count, head_dim, width, to: [&mut to_keys, &mut to_values] };
        let fits = match pieces {
            None => {
                let mut room = SplitRoom { place, done: false, panel: &mut [], hidden: &|| 0 };
                kernels.split_tile(Operand::Own(keys), values, &mut room)
            }
            Some(pieces) => {
                let mut splitting = kernels.begin_split(Operand::Own(keys), values, place).expect("numbers in memory");
                let mut session = crate::kernels::matrix::Session::new(splitting.matrix);
                let (a, b, mut c) = (vec![0.0; 6 * 512], vec![0.0; 12 * 256], vec![0.0; 32 * 32]);
                for _ in 0..pieces {
                    let product = crate::kernels::matrix::Multiply {
                        rows: 32,
                        panels: 2,
                        steps: 1,
                        a: a.as_ptr(),
                        a_part: 512,
                        b: b.as_ptr(),
                        b_panel: 3 * 256,
                        c: c.as_mut_ptr(),
                        c_row: 32,
                        start: crate::kernels::Start::Zero,
                    };
                    // SAFETY: the vectors have 32 rows and two panels of a step.
                    unsafe { session.multiply_with(&product, splitting.work()) };
                }
                splitting.finish()
            }
        };
        (to_keys, to_values, fits)
    }

    #[test]
    fn a_tile_is_split_beside_products_as_it_is_at_once() {
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        for kernels in Level::available().iter().map(|&level| f32::kernels(level)).filter(|k| k.matrix.is_some()) {
            let mut numbers = Numbers::new(5);
            let shapes = [
                [64, 64, 64],
                [64, 128, 16],
                [1, 3, 5],
                [17, 80, 100],
                [40, 31, 200],
                [64, 0, 1],
                [64, 5, 0],
                [0, 7, 9],
            ];
            for shape in shapes {
                let [count, head_dim, value_dim] = shape;
                let row = value_dim + 3;
                let (keys, rows) = (numbers.vec::<f32>(KEYS * head_dim), numbers.vec::<f32>(KEYS * row));
                for unfit in [None, Some(f32::NAN), Some(1e30)] {
                    for in_values in [false, true] {
                        let (mut keys, mut rows) = (keys.clone(), rows.clone());
                        if let Some(unfit) = unfit {
                            if count * if in_values { value_dim } else { head_dim } == 0 {
                                continue;
                            }
                            let last = count - 1;
                            match in_values {
                                true => rows[last * row + value_dim - 1] = unfit,
                                false => keys[last / PANEL * PANEL * head_dim + last % PANEL] = unfit,
                            }
                        }
                        let tile = (&keys[..], &rows[..]);
                        let want = split(kernels, shape, tile, None);
                        assert_eq!(want.2, unfit.is_none(), "{shape:?}");
                        for pieces in [0, 1, 3, 200] {
                            let got = split(kernels, shape, tile, Some(pieces));
                            assert_eq!(got.2, want.2, "{shape:?}, {pieces} products");
                            if want.2 {
                                assert_eq!([bits(&got.0), bits(&got.1)], [bits(&want.0), bits(&want.1)], "{shape:?}");
                            }
                        }
                    }
                }
            }
        }
    }
}
