//! The task: a block of random tokens, twice. Whoever has seen the first copy can predict the second, by looking for the
//! earlier place of a token and copying what came after it.

use multihead::ndarray::Array2;

use super::model::{Batch, Draws};

#[derive(Debug, Clone, Copy)]
pub(crate) struct Task {
    pub(crate) vocabulary: usize,
    /// Length of the shortest and of the longest block. It varies, so that counting steps back does not help.
    pub(crate) blocks: [usize; 2],
}

impl Task {
    /// Length of a sequence.
    pub(crate) fn len(&self) -> usize {
        2 * self.blocks[1]
    }

    /// Sequences of which the token at i counts if it is in the second copy and has a successor there. The tokens of a
    /// block differ, so that there is one right answer; sequences of short blocks end in token 0, which nobody is asked.
    pub(crate) fn batch(&self, size: usize, draws: &mut Draws) -> Batch {
        let mut tokens = Array2::zeros((size, self.len()));
        let mut targets = Array2::from_elem((size, self.len()), None);
        let mut deck: Vec<usize> = (0..self.vocabulary).collect();
        for (mut tokens, mut targets) in tokens.rows_mut().into_iter().zip(targets.rows_mut()) {
            let [least, most] = self.blocks;
            let block = least + draws.below(most - least + 1);
            for i in 0..block {
                deck.swap(i, i + draws.below(self.vocabulary - i));
                (tokens[i], tokens[block + i]) = (deck[i], deck[i]);
            }
            for i in 0..block - 1 {
                targets[block + i] = Some(deck[i + 1]);
            }
        }
        Batch { tokens, targets }
    }
}
