//! The decoder of `examples/train_induction`, trained and set to work.

use std::time::Instant;

#[cfg(feature = "half")]
use multihead::half::{bf16, f16};
use multihead::ndarray::{Array2, Array3, Axis, s};
use multihead::{KvCache, Mask, MultiHeadAttention, Storage};

use crate::checkpoint::Fault;
use crate::model::{Adam, Config, Decoder, Draws, Places};
use crate::run::{self, Run, generate, print_bytes};
use crate::task::Task;

const TASK: Task = Task { vocabulary: 16, blocks: [4, 8] };
const CONFIG: Config =
    Config { vocabulary: TASK.vocabulary, d_model: 64, num_heads: 4, num_layers: 2, places: Places::Rope, seed: 3 };
/// Steps of training.
const LESSONS: usize = 500;
/// Tokens that are timed: a prompt, and steps after it.
const PROMPT: usize = 1024;
const STEPS: usize = 256;

/// Trains, repeats a block, measures.
pub(crate) fn show() -> Result<(), Fault> {
    let model = trained()?;

    // A block, and the first token of its second copy: what comes next is known.
    let block = Task { blocks: [TASK.blocks[1]; 2], ..TASK }.batch(1, &mut Draws(11)).tokens;
    let len = TASK.blocks[1];
    let prompt = block.slice(s![.., ..=len]).to_owned();
    let run = of::<f32>(&model, &prompt, len - 1)?;
    let right = block.iter().skip(len + 1).zip(run.continuation()).filter(|(want, got)| want == got).count();
    println!("prompt   {}", run::list(run.prompt()));
    println!("goes on  {:>width$}", run::list(run.continuation()), width = run::list(run.prompt()).len());
    println!("{right} of {} as in the first copy\n", len - 1);

    // The same decoder with fewer KV heads, each the mean of those before: not trained again, so only its speed matters.
    let mut draws = Draws(12);
    let prompt = Array2::from_shape_simple_fn((1, PROMPT), || draws.below(TASK.vocabulary));
    println!("{PROMPT} tokens at once, then {STEPS} one by one; difference to all at once, over the largest logit");
    run::print_head();
    for (name, num_kv_heads) in [("MHA", 4), ("GQA", 2), ("MQA", 1)] {
        let layers = model.layers.iter().map(|layer| layer.pool_kv_heads(num_kv_heads));
        let model = Decoder { layers: layers.collect::<Result<_, _>>()?, ..model.clone() };
        // Sums are in f32 whatever the storage; a cache of 16 bits rounds each key and value once.
        measure::<f32>(&model, &prompt, &format!("{name}, {num_kv_heads} KV heads, f32"), 1e-4)?;
        #[cfg(feature = "half")]
        measure::<f16>(&model, &prompt, &format!("{name}, {num_kv_heads} KV heads, f16"), 0.02)?;
        #[cfg(feature = "half")]
        measure::<bf16>(&model, &prompt, &format!("{name}, {num_kv_heads} KV heads, bf16"), 0.1)?;
    }
    println!();
    model.layers.first().map_or(Ok(()), |layer| print_bytes(layer.config(), model.layers.len(), 4096))?;
    if right + 1 < len { Err("expected the block once more".into()) } else { Ok(()) }
}

/// At a rate that falls to zero, so that the last batches are as good as the model gets.
fn trained() -> Result<Decoder, Fault> {
    let (mut model, mut adam, mut draws) = (Decoder::new(&CONFIG)?, Adam::default(), Draws(5));
    let (start, mut accuracy) = (Instant::now(), 0.0);
    for step in 0..LESSONS {
        let lesson = model.learn(&TASK.batch(32, &mut draws))?;
        adam.update(&mut model, &lesson.gradients, 4e-3 * (1.0 - step as f32 / LESSONS as f32))?;
        accuracy = lesson.accuracy;
    }
    let seconds = start.elapsed().as_secs_f64();
    println!("Trained for {LESSONS} steps in {seconds:.1} s: accuracy {accuracy:.3}\n");
    Ok(model)
}

/// A line of the table.
fn measure<S: Storage<Element = f32>>(
    model: &Decoder,
    prompt: &Array2<usize>,
    name: &str,
    limit: f32,
) -> Result<(), Fault> {
    let run = of::<S>(model, prompt, STEPS)?;
    run.print_speed(name);
    run.check(name, limit)
}

/// A generation whose caches keep numbers of type `S`.
fn of<S: Storage<Element = f32>>(model: &Decoder, prompt: &Array2<usize>, count: usize) -> Result<Run, Fault> {
    let cache = |layer: &MultiHeadAttention<f32>| KvCache::<S>::new(layer.cache_shape(1, prompt.len() + count));
    let mut caches = model.layers.iter().map(cache).collect::<Result<Vec<_>, _>>()?;
    let step = |tokens: &Array2<usize>, position| -> Result<Array2<f32>, Fault> {
        let mut x = model.embed(&tokens.view(), position);
        for (layer, cache) in model.layers.iter().zip(&mut caches) {
            let y = layer.decode(&x, cache)?;
            x += &y;
        }
        let last = x.slice_move(s![.., -1.., ..]);
        Ok(model.unembed(&last)?.index_axis_move(Axis(1), 0))
    };
    generate(prompt, count, step, |tokens| whole(model, tokens))
}

/// The logits of all tokens, without a cache.
fn whole(model: &Decoder, tokens: &Array2<usize>) -> Result<Array3<f32>, Fault> {
    let mut x = model.embed(&tokens.view(), 0);
    for layer in &model.layers {
        let y = layer.forward(&x, &Mask::causal())?;
        x += &y;
    }
    model.unembed(&x)
}
