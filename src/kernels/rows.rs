//! Many rows meet a tile of keys that all of them see, or that a bias hides: the common case, without a word that is not
//! needed.
//!
//! ```text
//! for each group of 6 rows, and one more:
//!     p' = q k^T                                       of the group
//!     p, m, l = softmax step;  o += p v                of the group before, see `step.rs`
//! ```
//!
//! The products of a group come before the softmax of the group before it, since neither waits for the other: the CPU
//! begins the one while it ends the other. What the kernels are told differs by a few addresses. Putting it together anew
//! for each group, with its checks, is 370 instructions (30 here) beside the 11800 of the products at AVX2. Both together:
//! 7.7 to 7.0 ms for 2 heads of 1024 queries, keys and 64 columns on a thread of a Zen 3.

use super::dropout::Dropped;
use super::lines::Lines;
use super::real::Real;
use super::softmax::Softmax;
use super::splitting::Splitting;
use super::step::{Finite, Group, KeyTile, extent};
use super::table::{Kernels, VALUES_PANEL, values_len};
use super::tile::{Ahead, MAX_ROWS, Start, Stride, Tile};
use super::{KEYS, PANEL};
use std::ptr;

/// What happens between scores and probabilities of rows that see all keys of a tile, but for those that a bias hides.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RowsScoring<'a, T> {
    /// The biases from the first row and the first key of the tile on.
    pub(crate) bias: Option<Lines<'a, T>>,
    /// Finite and positive.
    pub(crate) softcap: Option<T>,
    /// `|scale|`, as in [`super::Scoring`].
    pub(crate) factor: T,
    /// Of each row, after the softmax.
    pub(crate) dropout: Option<Dropped<'a, T>>,
}

impl<T: Real> Kernels<T> {
    /// Scores, softmax and values of any number of rows against a tile whose 64 keys all of them see but for those that a
    /// bias hides; `p: [2][6][64]`. Does nothing and returns false if values that are not finite may be hidden, or if there is
    /// dropout and no matrix unit that multiplies. The unit splits some of the tile to come.
    pub(crate) fn attend_rows(
        &self,
        all: &mut Group<'_, T>,
        tile: &KeyTile<'_, T>,
        scoring: &RowsScoring<'_, T>,
        coming: Option<&mut Splitting<'_, T>>,
    ) -> bool {
        if self.unit_attend_rows(all, tile, scoring, coming) {
            return true;
        }
        let RowsScoring { bias, softcap, factor, dropout } = *scoring;
        let Group { rows, head_dim, q_row, o_row, .. } = *all;
        // A bias can hide keys, whose values have to be left out if they are not finite.
        if rows == 0 || dropout.is_some() || bias.is_some() && tile.finite == Finite::NotAll {
            return false;
        }
        let biases = bias.map(|bias| bias.extent(rows, KEYS));
        let width = tile.padded_width();
        let k = tile.keys.range(0, head_dim.saturating_mul(KEYS));
        let v = tile.values.range(0, values_len(KEYS, width));
        let q = &all.q[..extent(rows, q_row, head_dim)];
        let o = &mut all.o[..extent(rows, o_row, width)];
        let (m, l) = (&mut all.m[..rows], &mut all.l[..rows.saturating_mul(PANEL)]);
        let (p, next_p) = all.p[..2 * MAX_ROWS * KEYS].split_at_mut(MAX_ROWS * KEYS);

        let mut scores = Tile {
            rows: 0,
            n: KEYS,
            k: head_dim,
            a: q.as_ptr(),
            a_stride: Stride::Rows(q_row),
            b: ptr::null(),
            b_panel: head_dim * PANEL,
            b_k: PANEL,
            c: p.as_mut_ptr(),
            c_row: KEYS,
            start: Start::Zero,
            ahead: Ahead::NOTHING,
        };
        let mut softmax = Softmax {
            rows: 0,
            first: 0,
            end: KEYS,
            p: p.as_mut_ptr(),
            m: m.as_mut_ptr(),
            l: l.as_mut_ptr(),
            o: o.as_mut_ptr(),
            o_row,
            width,
            visible: ptr::null_mut(),
            all_visible: true,
            bias: None,
            softcap,
            factor,
        };
        let mut values = Tile {
            rows: 0,
            n: width,
            k: KEYS,
            a: p.as_ptr(),
            a_stride: Stride::Rows(KEYS),
            b: ptr::null(),
            b_panel: VALUES_PANEL,
            b_k: PANEL,
            c: o.as_mut_ptr(),
            c_row: o_row,
            start: Start::Add,
            ahead: Ahead::NOTHING,
        };
        let p = [p.as_mut_ptr(), next_p.as_mut_ptr()];
        let mut visible;
        let groups = rows.div_ceil(MAX_ROWS);
        for group in 0..groups + 1 {
            // SAFETY: groups have 1 to 6 rows; the slices above end with the last row of the last one, and `k` has 4
            // panels, `v` 64 rows of its panels, each `p` and `visible` 6 rows. Bits of keys are neither read nor written
            // without a mask and a bias.
            unsafe {
                if group < groups {
                    let first = group * MAX_ROWS;
                    scores.rows = MAX_ROWS.min(rows - first);
                    (scores.a, scores.c) = (q.as_ptr().add(first * q_row), p[group % 2]);
                    if let Some(next) = tile.next {
                        let group = tile.group + group;
                        scores.ahead = next.keys(group, tile.groups);
                    }
                    if let Some(bias) = bias {
                        bias.fetch(first..first + scores.rows, 0..KEYS);
                    }
                    self.tile_of(&mut scores, k);
                }
                let Some(group) = group.checked_sub(1) else { continue };
                let first = group * MAX_ROWS;
                softmax.rows = MAX_ROWS.min(rows - first);
                softmax.p = p[group % 2];
                softmax.m = m.as_mut_ptr().add(first);
                softmax.l = l.as_mut_ptr().add(first * PANEL);
                softmax.o = o.as_mut_ptr().add(first * o_row);
                if let Some((numbers, apart)) = biases {
                    // Rows beyond the last are not read.
                    let row = |i| numbers.as_ptr().wrapping_add((first + i) * apart);
                    softmax.bias = Some(std::array::from_fn(row));
                    visible = [u64::MAX; MAX_ROWS];
                    softmax.visible = visible.as_mut_ptr();
                }
                if let Some(output) = tile.output {
                    output.fetch(tile.group + group, tile.groups);
                }
                (self.softmax)(&softmax);
                (values.rows, values.a, values.c) = (softmax.rows, softmax.p, softmax.o);
                if let Some(next) = tile.next {
                    values.ahead = next.values(tile.group + group, tile.groups);
                }
                self.tile_of(&mut values, v);
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use crate::kernels::testing::{Numbers, at_every_level, nans};
    use crate::kernels::{
        Finite, Group, KEYS, Kernels, KeyTile, Lines, MAX_ROWS, Next, Operand, PANEL, Real, RowsScoring, Scoring,
    };

    /// `m`, `l` and `o` after two tiles, all rows at once or group by group.
    fn run<T: Real>(
        kernels: &Kernels<T>,
        [rows, head_dim, width]: [usize; 3],
        biased: bool,
        at_once: bool,
    ) -> [Vec<T>; 3] {
        let mut numbers = Numbers::new((rows * 1000 + head_dim + width) as u64);
        // Some keys are hidden by it, from the first row all.
        let mut biases = numbers.vec::<T>(5 + rows * (KEYS + 3));
        biases.iter_mut().step_by(11).for_each(|bias| *bias = T::neg_infinity());
        biases[5..5 + KEYS].fill(T::neg_infinity());
        let bias = biased.then(|| Lines::new(&biases, 5, KEYS + 3));
        let q = numbers.vec::<T>(rows * head_dim);
        let (mut m, mut l, mut o) =
            (vec![T::neg_infinity(); rows], vec![T::zero(); rows * PANEL], vec![T::zero(); rows * width]);
        let (softcap, factor) = (Some(T::LOG2_E), T::LOG2_E);
        for _ in 0..2 {
            let (k, v) = (numbers.vec::<T>(head_dim * KEYS), numbers.vec::<T>(KEYS * width));
            let (keys, values) = (Operand::Own(&k[..]), Operand::Own(&v[..]));
            // What is asked for ahead has no part in the result.
            let next = at_once.then_some(Next::InPlace { keys, values });
            let (panels, groups) = (0..KEYS / PANEL, rows.div_ceil(MAX_ROWS));
            let (finite, output) = (Finite::All, None);
            let tile = KeyTile { keys, values, split: None, width, finite, panels, next, output, group: 0, groups };
            let (height, mut p) = (if at_once { rows } else { MAX_ROWS }, nans(2 * MAX_ROWS * KEYS));
            for first in (0..rows).step_by(height) {
                let mut group = Group {
                    rows: height.min(rows - first),
                    head_dim,
                    q: &q[first * head_dim..],
                    q_row: head_dim,
                    m: &mut m[first..],
                    l: &mut l[first * PANEL..],
                    o: &mut o[first * width..],
                    o_row: width,
                    p: &mut p,
                    split: None,
                    weights: &mut [],
                };
                if at_once {
                    let scoring = RowsScoring { bias, softcap, factor, dropout: None };
                    assert!(kernels.attend_rows(&mut group, &tile, &scoring, None));
                } else {
                    let bias = bias.map(|bias| bias.group(first..first + group.rows, 0..KEYS));
                    let scoring = Scoring { visible: None, bias, softcap, factor, dropout: None };
                    kernels.attend(&mut group, &tile, &scoring);
                }
            }
        }
        [m, l, o]
    }

    #[test]
    fn all_rows_at_once_have_the_bits_of_one_group_after_the_other() {
        fn check<T: Real>(kernels: &Kernels<T>) {
            for rows in [1, 2, 4, 5, 6, 7, 11, 12, 13, 32] {
                for (head_dim, width) in [(1, 16), (64, 64), (80, 128), (3, 48)] {
                    for biased in [false, true] {
                        let [at_once, groups] =
                            [true, false].map(|at_once| run(kernels, [rows, head_dim, width], biased, at_once));
                        assert_eq!(at_once, groups, "{rows} rows, {head_dim} and {width} columns, biased: {biased}");
                        let [m, rest @ ..] = at_once;
                        assert!(m[usize::from(biased)..].iter().chain(rest.iter().flatten()).all(|x| x.is_finite()));
                        assert_eq!(m[0].is_finite(), !biased, "all keys of the first row are hidden");
                    }
                }
            }
        }
        at_every_level!(check);
    }
}
