//! One generation: its tokens, how long prompt and steps took, and how far the steps are from the whole sequence at once.

use std::time::{Duration, Instant};

#[cfg(feature = "half")]
use multihead::half::{bf16, f16};
use multihead::ndarray::{Array2, Array3, ArrayRef2, s};
use multihead::{CacheShape, Config, KvCache, Storage};

use crate::checkpoint::{Fault, greedy};

/// See the top of the file.
pub(crate) struct Run {
    /// The prompt and what was generated.
    tokens: Vec<usize>,
    prompt_len: usize,
    prefill: Duration,
    steps: Duration,
    /// The largest difference between logits of a step and those of the whole sequence, over the largest logit.
    gap: f32,
}

/// `count` more tokens after `prompt: [1, len]`, always the likeliest one. `step` takes tokens and the position of the first
/// of them and returns the logits after the last, `[1, words]`; `whole` returns those of all tokens, `[1, len, words]`.
pub(crate) fn generate(
    prompt: &Array2<usize>,
    count: usize,
    mut step: impl FnMut(&Array2<usize>, usize) -> Result<Array2<f32>, Fault>,
    whole: impl FnOnce(&Array2<usize>) -> Result<Array3<f32>, Fault>,
) -> Result<Run, Fault> {
    let (mut times, mut logits) = (Vec::new(), Vec::new());
    let tokens = greedy(prompt, count, |ids, position| {
        let start = Instant::now();
        let after = step(ids, position)?;
        times.push(start.elapsed());
        logits.push(after.clone());
        Ok(after)
    })?;
    let whole = whole(&tokens)?;
    let largest = whole.iter().fold(f32::MIN_POSITIVE, |largest, x| largest.max(x.abs()));
    let gaps = (prompt.len() - 1..).zip(&logits).map(|(i, step)| difference(step, &whole.slice(s![.., i, ..])));
    let gap = largest_of(gaps);
    Ok(Run {
        tokens: tokens.into_iter().collect(),
        prompt_len: prompt.len(),
        prefill: times.first().copied().unwrap_or_default(),
        steps: times.iter().skip(1).sum(),
        gap: gap / largest,
    })
}

/// The largest difference.
fn difference(a: &ArrayRef2<f32>, b: &ArrayRef2<f32>) -> f32 {
    largest_of(a.iter().zip(b.iter()).map(|(a, b)| (a - b).abs()))
}

/// NaN if there is one.
fn largest_of(numbers: impl Iterator<Item = f32>) -> f32 {
    numbers.fold(0.0, |most: f32, x| if most.is_nan() || x <= most { most } else { x })
}

impl Run {
    pub(crate) fn prompt(&self) -> &[usize] {
        &self.tokens[..self.prompt_len]
    }

    pub(crate) fn continuation(&self) -> &[usize] {
        &self.tokens[self.prompt_len..]
    }

    /// A line of a table: tokens per second, and the difference.
    pub(crate) fn print_speed(&self, name: &str) {
        // The last token has been chosen and not been read.
        let steps = self.continuation().len().saturating_sub(1);
        let rate = |tokens: usize, time: Duration| tokens as f64 / time.as_secs_f64().max(1e-9);
        println!(
            "{name:<26}{:>10.0} tokens/s{:>10.0} tokens/s{:>14.1e}",
            rate(self.prompt_len, self.prefill),
            rate(steps, self.steps),
            self.gap
        );
    }

    /// Fails if a step differs from the whole sequence by more than `limit` of the largest logit.
    pub(crate) fn check(&self, name: &str, limit: f32) -> Result<(), Fault> {
        match self.gap <= limit {
            true => Ok(()),
            false => Err(format!("{name}: expected steps within {limit:e} of all at once, got {:e}", self.gap).into()),
        }
    }
}

/// The head of the table of [`Run::print_speed`].
pub(crate) fn print_head() {
    println!("{:<26}{:>19}{:>19}{:>14}", "", "prefill", "steps", "difference");
}

/// Tokens side by side.
pub(crate) fn list(tokens: &[usize]) -> String {
    tokens.iter().map(usize::to_string).collect::<Vec<_>>().join(" ")
}

/// The heads of a layer in words.
pub(crate) fn heads(config: &Config) -> String {
    let (queries, keys) = (config.heads.num_heads(), config.heads.num_kv_heads());
    format!("{queries} query heads on {keys} KV heads of width {}", config.head_dim)
}

/// What the caches of all layers take for so many tokens, with a KV head for each query head, for a group of them, and with
/// one for all.
pub(crate) fn print_bytes(config: &Config, layers: usize, tokens: usize) -> Result<(), Fault> {
    let num_heads = config.heads.num_heads();
    let grouped = match config.heads.num_kv_heads() {
        own if (2..num_heads).contains(&own) => own,
        _ => num_heads.div_ceil(4).max(2),
    };
    let storages: &[&str] = if cfg!(feature = "half") { &["f32", "f16", "bf16"] } else { &["f32"] };
    let title = format!("cache of {tokens} tokens");
    print!("{title:<26}");
    storages.iter().for_each(|name| print!("{name:>12}"));
    println!();
    for (name, num_kv_heads) in [("MHA", num_heads), ("GQA", grouped), ("MQA", 1)] {
        let (head_dim, value_dim) = (config.head_dim, config.value_dim);
        let shape = CacheShape { batch: 1, num_kv_heads, capacity: tokens, head_dim, value_dim };
        let own = if num_kv_heads == config.heads.num_kv_heads() { ", this one" } else { "" };
        let name = format!("{name}, {num_kv_heads} KV heads{own}");
        print!("{name:<26}{}", bytes::<f32>(shape, layers)?);
        #[cfg(feature = "half")]
        print!("{}{}", bytes::<f16>(shape, layers)?, bytes::<bf16>(shape, layers)?);
        println!();
    }
    Ok(())
}

/// The bytes of so many caches, as text.
fn bytes<S: Storage>(shape: CacheShape, layers: usize) -> Result<String, Fault> {
    let bytes = layers * KvCache::<S>::new(shape)?.bytes();
    Ok(format!("{:>8.2} MiB", bytes as f64 / f64::from(1 << 20)))
}
