//! Where the tokens of a call stand, and the heads that turn by it.

use ndarray::{ArrayRef2, ArrayViewMut4, Axis};

use super::{Inputs, MultiHeadAttention, Weights};
use crate::element::Element;
use crate::error::Result;
use crate::kernels::NormInput;
use crate::norm::RowNorm;
use crate::position::{Heads, Positions, RopeTable, Turn};

impl<'a, T: Element> Inputs<'a, T> {
    /// Position of the first query for RoPE, 0 unless given, or the length of the cache that it goes to; the keys count from there too unless
    /// [`Inputs::key_offset`] or [`Inputs::key_positions`] says otherwise. A layer without RoPE takes no notice: what
    /// a mask hides is the mask's own matter.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Inputs};
    /// let x = Array2::<f32>::ones((4, 8));
    /// let later = Inputs::new(&x).offset(100); // 100, 101, 102, 103
    /// # let _ = later;
    /// ```
    #[doc(alias = "past_length")]
    pub fn offset(mut self, offset: usize) -> Self {
        self.positions = Some(Positions::offset(offset));
        self
    }

    /// Position of the first key, where it is not that of the first query.
    ///
    /// ```
    /// use multihead::{ndarray::Array2, Inputs};
    /// let (x, memory) = (Array2::<f32>::ones((4, 8)), Array2::ones((6, 8)));
    /// let inputs = Inputs::new(&x).context(&memory).offset(40).key_offset(3);
    /// # let _ = inputs;
    /// ```
    pub fn key_offset(mut self, offset: usize) -> Self {
        self.key_positions = Some(Positions::offset(offset));
        self
    }

    /// The position of each query, and of each key unless they have their own: `[batch, q_len]`, or `[1, q_len]` for
    /// all batch entries alike.
    ///
    /// ```
    /// use multihead::{ndarray::{array, Array3}, Inputs};
    /// let x = Array3::<f32>::ones((2, 4, 8));
    /// let ids = array![[0, 1, 2, 3], [0, 0, 0, 1]]; // the second entry is padded at the start
    /// let inputs = Inputs::new(&x).positions(&ids);
    /// # let _ = inputs;
    /// ```
    #[doc(alias = "position_ids")]
    pub fn positions(mut self, ids: &'a ArrayRef2<usize>) -> Self {
        self.positions = Some(Positions::ids(ids));
        self
    }

    /// The position of each key, where they are not those of the queries: `[batch, kv_len]` or `[1, kv_len]`.
    ///
    /// ```
    /// use multihead::{ndarray::{array, Array2}, Inputs};
    /// let (x, memory) = (Array2::<f32>::ones((4, 8)), Array2::ones((3, 8)));
    /// let ids = array![[5, 9, 11]];
    /// let inputs = Inputs::new(&x).context(&memory).key_positions(&ids);
    /// # let _ = inputs;
    /// ```
    pub fn key_positions(mut self, ids: &'a ArrayRef2<usize>) -> Self {
        self.key_positions = Some(Positions::ids(ids));
        self
    }

    /// The same inputs, borrowed for less long; where no position has been given, queries and keys go on from `lengths`.
    pub(super) fn after<'b>(&'b self, lengths: &'b [usize]) -> Inputs<'b, T> {
        let positions = self.positions.as_ref().map_or_else(|| Positions::after(lengths), Positions::reborrow);
        Inputs {
            query: self.query.view(),
            key: self.key.view(),
            value: self.value.view(),
            positions: Some(positions),
            key_positions: self.key_positions.as_ref().map(Positions::reborrow),
            sources: self.sources,
        }
    }

    /// The positions of queries and keys.
    pub(super) fn places(&self) -> [Positions<'a>; 2] {
        let positions = self.positions.unwrap_or_default();
        [positions, self.key_positions.unwrap_or(positions)]
    }

    /// Checks that every token has a position.
    pub(super) fn check_places(&self) -> Result<()> {
        let [queries, keys] = self.places();
        let (batch, q_len, _) = self.query.dim();
        queries.check("positions", batch, q_len)?;
        let name = if self.key_positions.is_some() { "key_positions" } else { "positions (of the keys)" };
        keys.check(name, batch, self.key.len_of(Axis(1)))
    }
}

impl<T: Element> MultiHeadAttention<T> {
    /// Normalises projected queries and keys, if the layer does: the heads of each, one after the other in memory.
    pub(super) fn normalise_heads(&self, [q, k]: [&mut [T]; 2]) {
        let [q_norm, k_norm] = self.norms();
        for (norm, heads) in [(q_norm, q), (k_norm, k)] {
            if let Some(norm) = norm {
                T::normalise(&norm, NormInput::Rows, heads);
            }
        }
    }

    /// The norms of query and key heads.
    pub(super) fn norms(&self) -> [Option<RowNorm<'_, T>>; 2] {
        let Weights { q_norm, k_norm, .. } = &*self.weights;
        [q_norm, k_norm].map(|weight| weight.as_ref().map(|weight| RowNorm::new(weight, self.config.qk_norm_eps)))
    }

    /// Turns projected queries `[batch, num_heads, q_len, head_dim]` and keys `[batch, num_kv_heads, kv_len, head_dim]`
    /// by their positions, which have been checked; their gradients turn back.
    pub(super) fn turn_heads(
        &self,
        [q, k]: [ArrayViewMut4<'_, T>; 2],
        [queries, keys]: [Positions<'_>; 2],
        turn: Turn,
        table: &mut RopeTable<T>,
    ) -> Result<()> {
        let Some(rope) = &self.config.rope else { return Ok(()) };
        let heads = [Heads { x: q, positions: queries }, Heads { x: k, positions: keys }];
        T::rotate(rope, heads.map(Some), turn, table)
    }
}
