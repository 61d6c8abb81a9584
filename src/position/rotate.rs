//! The rotation of `rope.rs`, in place: `x: [batch, heads, len, head_dim]` and a table `[positions][2][dims / 2]` of
//! the cosines and sines of its positions.
//!
//! Angles are made in `f64`, whose own sine reduces them: at position 1,000,000 an angle of one radian a position is
//! known to 1e-10. Position `64 a + b` takes its cosine and sine from those of `64 a` and `b`,
//!
//! ```text
//! cos(64 a f + b f) = cos(64 a f) cos(b f) - sin(64 a f) sin(b f)
//! sin(64 a f + b f) = sin(64 a f) cos(b f) + cos(64 a f) sin(b f)
//! ```
//!
//! which costs four products instead of two library calls and two roundings of `f64`. The split is that of the position
//! and not of the call, so a token gets the same bits in a prompt and in a step behind it.

use ndarray::ArrayViewMut4;

use super::{Positions, Rope, RopeStyle};
use crate::element::Element;
use crate::error::{Error, Result};
use crate::parallel;

/// Positions that share a coarse angle.
const FINE: usize = 64;

/// What a number counts as when it is decided on threads: it is fetched and stored for three operations.
const FLOP_PER_NUMBER: f64 = 16.0;

/// Numbers that a thread turns at a time: half of a second-level cache.
const CHUNK: usize = 1 << 17;

/// Which way the heads turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Turn {
    There,
    /// The transposed rotation, for gradients.
    Back,
}

/// Cosines and sines of the positions of a call. Kept from call to call: the angles that all positions are made of
/// stay as long as the rule does.
#[derive(Debug, Default)]
pub(crate) struct RopeTable<T> {
    /// The rule and the head width that the angles below belong to.
    rule: Option<(Rope, usize)>,
    frequencies: Vec<f64>,
    /// `[64][dims / 2]`: cosine and sine of `b f`, where the bit of b is set in `known`.
    fine: Vec<[f64; 2]>,
    known: u64,
    /// `[dims / 2]`: cosine and sine of `64 a f`, and a.
    coarse: Vec<[f64; 2]>,
    coarse_of: Option<usize>,
    /// `[entries * len][2][dims / 2]`
    rows: Vec<T>,
}

impl<T: Element> RopeTable<T> {
    /// Makes the rows of `len` positions of each entry, one set of rows where all entries stand alike.
    fn fill(&mut self, rope: &Rope, head_dim: usize, positions: &Positions<'_>, len: usize, turn: Turn) -> Result<()> {
        self.begin(rope, head_dim)?;
        let (entries, half) = (positions.entries(), self.frequencies.len());
        let too_large =
            || Error::TooLarge { argument: "rope", axes: "[batch, len, dims]", got: vec![entries, len, 2 * half] };
        let numbers = entries.checked_mul(len).and_then(|n| n.checked_mul(2 * half)).ok_or_else(too_large)?;
        let mut rows = std::mem::take(&mut self.rows);
        rows.try_reserve_exact(numbers.saturating_sub(rows.len())).map_err(|_| too_large())?;
        rows.resize(numbers.max(rows.len()), T::zero());
        let factor = rope.attention_factor();
        let factors = match turn {
            Turn::There => [factor, factor],
            Turn::Back => [factor, -factor],
        };
        let tokens = (0..entries).flat_map(|entry| (0..len).map(move |token| (entry, token)));
        for ((entry, token), row) in tokens.zip(rows.chunks_exact_mut(2 * half)) {
            self.row(positions.at(entry, token), factors, row);
        }
        self.rows = rows;
        Ok(())
    }

    /// Forgets the angles of another rule.
    fn begin(&mut self, rope: &Rope, head_dim: usize) -> Result<()> {
        if self.rule == Some((*rope, head_dim)) {
            return Ok(());
        }
        self.rule = None;
        let frequencies = rope.frequencies(head_dim)?;
        self.frequencies.clear();
        self.frequencies.extend(frequencies);
        let half = self.frequencies.len();
        self.fine.resize(FINE * half, [0.0; 2]);
        self.coarse.resize(half, [0.0; 2]);
        (self.known, self.coarse_of) = (0, None);
        self.rule = Some((*rope, head_dim));
        Ok(())
    }

    /// The cosines and sines of one position, times the factors.
    fn row(&mut self, position: usize, factors: [f64; 2], row: &mut [T]) {
        let half = self.frequencies.len();
        let (a, b) = (position / FINE, position % FINE);
        let fine = &mut self.fine[b * half..][..half];
        if self.known >> b & 1 == 0 {
            angles(b, &self.frequencies, fine);
            self.known |= 1 << b;
        }
        if self.coarse_of != Some(a) {
            angles(a * FINE, &self.frequencies, &mut self.coarse);
            self.coarse_of = Some(a);
        }
        let (cos, sin) = row.split_at_mut(half);
        for (((cos, sin), coarse), fine) in cos.iter_mut().zip(sin).zip(&self.coarse).zip(&*fine) {
            *cos = T::from_f64(factors[0] * (coarse[0] * fine[0] - coarse[1] * fine[1]));
            *sin = T::from_f64(factors[1] * (coarse[1] * fine[0] + coarse[0] * fine[1]));
        }
    }
}

/// Cosine and sine of `position * frequency`.
fn angles(position: usize, frequencies: &[f64], to: &mut [[f64; 2]]) {
    for (to, frequency) in to.iter_mut().zip(frequencies) {
        let (sin, cos) = (position as f64 * frequency).sin_cos();
        *to = [cos, sin];
    }
}

/// Heads to turn in place.
pub(crate) struct Heads<'x, 'p, T> {
    /// `[batch, heads, len, head_dim]`
    pub(crate) x: ArrayViewMut4<'x, T>,
    /// Where the tokens stand; checked for these lengths.
    pub(crate) positions: Positions<'p>,
}

/// The body of [`Compiled::rotate`](crate::compiled::Compiled::rotate): turns all heads. They share their width, and the
/// rule has been checked for it.
pub(crate) fn rotate<'x, 'p, T: Element>(
    rope: &Rope,
    heads: impl IntoIterator<Item = Heads<'x, 'p, T>>,
    turn: Turn,
    table: &mut RopeTable<T>,
) -> Result<()> {
    let mut filled = None;
    for Heads { x, positions } in heads {
        let (_, _, len, head_dim) = x.dim();
        if x.is_empty() {
            continue;
        }
        // The keys of self-attention stand where its queries do.
        if filled != Some((positions, len)) {
            table.fill(rope, head_dim, &positions, len, turn)?;
            filled = Some((positions, len));
        }
        turn_all(rope.style(), x, positions.entries(), table);
    }
    Ok(())
}

fn turn_all<T: Element>(style: RopeStyle, x: ArrayViewMut4<'_, T>, entries: usize, table: &RopeTable<T>) {
    let (_, heads, len, head_dim) = x.dim();
    let half = table.frequencies.len();
    // Entries that stand alike share their rows.
    let stride = if entries == 1 { 0 } else { len };
    let row = |entry: usize, token: usize| &table.rows[(entry * stride + token) * 2 * half..][..2 * half];

    let mut tokens = x.permuted_axes([0, 2, 1, 3]);
    let work = FLOP_PER_NUMBER * tokens.len() as f64;
    if let Some(numbers) = tokens.as_slice_mut() {
        let width = heads * head_dim;
        let per_chunk = (CHUNK / width).max(1);
        parallel::for_each_chunk(numbers, per_chunk * width, work, |index, chunk| {
            for (t, token) in chunk.chunks_exact_mut(width).enumerate() {
                let t = index * per_chunk + t;
                let angles = row(t / len, t % len);
                token.chunks_exact_mut(head_dim).for_each(|head| turn_head(style, &mut head[..2 * half], angles));
            }
        });
        return;
    }
    for (entry, mut tokens) in tokens.outer_iter_mut().enumerate() {
        for (token, mut heads) in tokens.outer_iter_mut().enumerate() {
            let (cos, sin) = row(entry, token).split_at(half);
            for mut head in heads.outer_iter_mut() {
                for i in 0..half {
                    let (a, b) = pair(style, half, i);
                    (head[a], head[b]) = turned(head[a], head[b], cos[i], sin[i]);
                }
            }
        }
    }
}

/// The columns of pair i.
fn pair(style: RopeStyle, half: usize, i: usize) -> (usize, usize) {
    match style {
        RopeStyle::HalfSplit => (i, i + half),
        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
    }
}

fn turned<T: Element>(a: T, b: T, cos: T, sin: T) -> (T, T) {
    (a * cos - b * sin, a * sin + b * cos)
}

/// The turning columns of one head, which lie side by side.
fn turn_head<T: Element>(style: RopeStyle, head: &mut [T], angles: &[T]) {
    let (cos, sin) = angles.split_at(angles.len() / 2);
    match style {
        RopeStyle::HalfSplit => {
            let (first, second) = head.split_at_mut(cos.len());
            for (((a, b), &cos), &sin) in first.iter_mut().zip(second).zip(cos).zip(sin) {
                (*a, *b) = turned(*a, *b, cos, sin);
            }
        }
        RopeStyle::Interleaved => {
            for (([a, b], &cos), &sin) in head.as_chunks_mut().0.iter_mut().zip(cos).zip(sin) {
                (*a, *b) = turned(*a, *b, cos, sin);
            }
        }
    }
}
