//! GPT-2 (Radford et al. 2019): a decoder with learned positions and norms before each part. Its matrices are stored
//! `[in, out]`, and those of queries, keys and values lie side by side.

use multihead::block::{Block, BlockCache, Call, FeedForward, FeedForwardWeights, Norms, Stack};
use multihead::io::Layout;
use multihead::ndarray::{Array2, Array3};
use multihead::{Mask, MultiHeadAttention};

use crate::checkpoint::{Checkpoint, Fault, embed, greedy, last_logits, product};

pub(crate) struct Gpt2 {
    /// `[words, d_model]`: of the input and, turned round, of the output.
    words: Array2<f32>,
    /// `[positions, d_model]`
    positions: Array2<f32>,
    pub(crate) decoder: Stack<f32>,
}

impl Gpt2 {
    pub(crate) fn load(file: &Checkpoint<'_>) -> Result<Self, Fault> {
        // The model alone, or with the head that predicts words.
        let root = if file.has("transformer.wte.weight") { "transformer." } else { "" };
        let (num_heads, eps) = (file.size("n_head")?, file.number("layer_norm_epsilon")?);
        let activation = file.activation("activation_function")?;
        let block = |i: usize| -> Result<Block<f32>, Fault> {
            let name = |part: &str| format!("{root}h.{i}.{part}");
            let builder = MultiHeadAttention::builder(file.size("n_embd")?, num_heads);
            let attention = file.attention(builder, &Layout::gpt2(&name("attn")))?;
            let weights = FeedForwardWeights {
                b_in: file.bias(&name("mlp.c_fc"))?,
                b_out: file.bias(&name("mlp.c_proj"))?,
                ..FeedForwardWeights::new(
                    file.tensor(&name("mlp.c_fc.weight"))?,
                    file.tensor(&name("mlp.c_proj.weight"))?,
                )
            };
            let norms = Norms::Pre {
                attention: file.layer_norm(&name("ln_1"), eps)?,
                feed_forward: file.layer_norm(&name("ln_2"), eps)?,
            };
            Ok(Block::new(attention, FeedForward::new(weights, activation)?, norms)?)
        };
        let blocks = (0..file.size("n_layer")?).map(block).collect::<Result<_, _>>()?;
        let mut decoder = Stack::new(blocks, Some(file.layer_norm(&format!("{root}ln_f"), eps)?))?;
        decoder.prepack()?;
        Ok(Self {
            words: file.tensor(&format!("{root}wte.weight"))?,
            positions: file.tensor(&format!("{root}wpe.weight"))?,
            decoder,
        })
    }

    /// `ids: [batch, len]` to logits `[batch, len, words]`.
    pub(crate) fn logits(&self, ids: &Array2<usize>) -> Result<Array3<f32>, Fault> {
        let x = self.decoder.forward(&self.embed(ids, 0)?, &Call::new().mask(&Mask::causal()))?;
        product(&x, &self.words.t())
    }

    /// Tokens that go on from `position`, where the caches end: logits after the last of them, `[batch, words]`.
    pub(crate) fn step(
        &self,
        ids: &Array2<usize>,
        position: usize,
        caches: &mut [BlockCache<f32>],
    ) -> Result<Array2<f32>, Fault> {
        let x = self.decoder.decode(&self.embed(ids, position)?, &Call::new(), caches)?;
        last_logits(&x, &self.words.t())
    }

    /// `count` more tokens for each entry of `prompt: [batch, len]`, always the likeliest one.
    pub(crate) fn generate(&self, prompt: &Array2<usize>, count: usize) -> Result<Array2<usize>, Fault> {
        let (batch, len) = prompt.dim();
        let mut caches = self.decoder.cache(batch, len + count)?;
        greedy(prompt, count, |ids, position| self.step(ids, position, &mut caches))
    }

    /// The first of the tokens stands at `position`.
    fn embed(&self, ids: &Array2<usize>, position: usize) -> Result<Array3<f32>, Fault> {
        let places = Array2::from_shape_fn(ids.dim(), |(_, i)| position + i);
        Ok(embed(&self.words, ids)? + embed(&self.positions, &places)?)
    }
}
