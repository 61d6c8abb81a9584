//! Rules with one bit per (query, key) pair, 64 keys to a word, so that a tile of 64 keys is one word per query.

use ndarray::{ArrayRef, ArrayRef2, ArrayView4, Axis, Dimension, Ix2, Ix4};
use std::fmt;

use crate::error::{Error, Result};

/// A keep mask `[batch, heads, q_len, kv_len]`; any axis may have length 1, which stands for all.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Dense {
    constructor: &'static str,
    shape: [usize; 4],
    words_per_row: usize,
    /// Row-major rows of words; bit j % 64 of word j / 64 says whether key j is kept, bits beyond the keys are 0.
    words: Vec<u64>,
}

impl Dense {
    /// From a `[q_len, kv_len]` or `[batch, heads, q_len, kv_len]` array; `kept` reads one element.
    pub(super) fn pairs<D: Dimension>(
        constructor: &'static str,
        array: &ArrayRef<bool, D>,
        kept: impl Fn(bool) -> bool,
    ) -> Result<Self> {
        Self::pack(constructor, rank_2_or_4(constructor, array)?, kept)
    }

    /// From a `[batch, kv_len]` array.
    pub(super) fn keys(keep: &ArrayRef2<bool>) -> Result<Self> {
        let view = keep.view().insert_axis(Axis(1)).insert_axis(Axis(1));
        Self::pack("keep_keys", view, |kept| kept)
    }

    fn pack(constructor: &'static str, view: ArrayView4<'_, bool>, kept: impl Fn(bool) -> bool) -> Result<Self> {
        let shape: [usize; 4] = view.dim().into();
        let words_per_row = shape[3].div_ceil(64);
        let mut words = Vec::new();
        // A broadcast view can be longer than memory.
        words.try_reserve_exact(words_per_row * view.rows().into_iter().len()).map_err(|_| Error::TooLarge {
            argument: constructor,
            axes: "[batch, num_heads, q_len, kv_len]",
            got: shape.to_vec(),
        })?;
        // Rows without keys need no walk, and a broadcast view can have any number of them.
        for row in view.rows().into_iter().take(if words_per_row == 0 { 0 } else { usize::MAX }) {
            let mut keys = row.iter();
            for _ in 0..words_per_row {
                let bits = keys.by_ref().take(64).enumerate();
                words.push(bits.fold(0, |word, (bit, &x)| word | u64::from(kept(x)) << bit));
            }
        }
        Ok(Self { constructor, shape, words_per_row, words })
    }

    pub(super) fn check(&self, dims: [usize; 4]) -> Result<()> {
        let fits = self.shape.iter().zip(dims).all(|(&have, want)| have == 1 || have == want);
        if fits {
            return Ok(());
        }
        let (axes, expected, got) = match (self.constructor, self.shape) {
            ("keep_keys", [batch, _, _, keys]) => ("[batch, kv_len]", [dims[0], dims[3]].into(), vec![batch, keys]),
            (_, shape) => ("[batch, num_heads, q_len, kv_len]", dims.into(), shape.to_vec()),
        };
        Err(Error::Shape { argument: self.constructor, axes, expected, got })
    }

    /// Whether the places along an axis can differ: it is not broadcast.
    pub(super) fn differs_along(&self, axis: usize) -> bool {
        self.shape[axis] != 1
    }

    /// Bit b is set where query i of head h may attend to key `64 * word + b`.
    pub(crate) fn word(&self, entry: usize, head: usize, i: usize, word: usize) -> u64 {
        self.column(entry, head, word).word(i)
    }

    /// The same word of all queries.
    pub(super) fn column(&self, entry: usize, head: usize, word: usize) -> Column<'_> {
        let at = |axis: usize, index: usize| if self.differs_along(axis) { index } else { 0 };
        let row = (at(0, entry) * self.shape[1] + at(1, head)) * self.shape[2];
        Column {
            words: &self.words,
            first: row * self.words_per_row + at(3, word),
            apart: at(2, self.words_per_row),
            spread: !self.differs_along(3),
        }
    }
}

/// A word of each query.
#[derive(Debug, Clone, Copy)]
pub(super) struct Column<'a> {
    words: &'a [u64],
    first: usize,
    apart: usize,
    /// Whether one key stands for all.
    spread: bool,
}

impl Column<'_> {
    #[inline]
    pub(super) fn word(&self, i: usize) -> u64 {
        match self.words.get(self.first + i * self.apart) {
            Some(&bits) if self.spread => 0u64.wrapping_sub(bits & 1),
            Some(&bits) => bits,
            None => 0,
        }
    }
}

/// A mask or bias as a rank-4 view: rank 2 stands for every batch entry and head.
pub(crate) fn rank_2_or_4<'a, A, D: Dimension>(
    argument: &'static str,
    array: &'a ArrayRef<A, D>,
) -> Result<ArrayView4<'a, A>> {
    let view = array.view().into_dyn();
    let view = match view.ndim() {
        2 => view.into_dimensionality::<Ix2>().map(|v| v.insert_axis(Axis(0)).insert_axis(Axis(0))),
        _ => view.into_dimensionality::<Ix4>(),
    };
    view.map_err(|_| Error::Rank {
        argument,
        expected: "rank 2 [q_len, kv_len] or rank 4 [batch, num_heads, q_len, kv_len]",
        got: array.shape().to_vec(),
    })
}

impl fmt::Display for Dense {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.constructor, self.shape) {
            ("keep_keys", [batch, _, _, keys]) => write!(f, "keep_keys [{batch}, {keys}]"),
            (name, shape) => write!(f, "{name} {shape:?}"),
        }
    }
}
