//! Two layers of attention learn to repeat: training from scratch, with gradients by hand, in under a minute.
//!
//! ```text
//! cargo run --release --example train_induction [--learned] [--steps N] [--seed N] [--folder DIR] [--save FILE]
//! ```
//!
//! Each sequence is a block of random tokens, twice. To predict the second copy, a model has to find the earlier place of
//! a token and look at what came next. One layer cannot: what it looks for is the token *after* a match. With two
//! layers, a head of the first tells each token which token stood before it (a previous-token head), and a head of the
//! second looks for the token that says "before me stood what stands here" (an induction head). Both appear out of
//! nothing, at about the same time, where the loss falls. (Olsson et al. 2022, <https://arxiv.org/abs/2209.11895>.)
//!
//! The same seed gives the same bits on any number of threads. `--learned` trains position embeddings instead of RoPE.

mod charts;
mod model;
mod task;

use std::path::PathBuf;
use std::time::Instant;

use charts::Head;
use indicatif::{ProgressBar, ProgressStyle};
use model::{Adam, Config, Decoder, Draws, Outcome, Places};
use multihead::Inputs;
use multihead::inspect::{HeadStatistics, Tokens};
use multihead::ndarray::{Array2, Array4, s};
use task::Task;

/// What the command line asks for.
struct Wishes {
    steps: usize,
    seed: u64,
    learned: bool,
    folder: PathBuf,
    save: Option<PathBuf>,
}

impl Wishes {
    fn from_arguments() -> Outcome<Self> {
        let mut wishes = Self { steps: STEPS, seed: 1, learned: false, folder: PathBuf::from("."), save: None };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().ok_or(format!("{argument}: expected a value"));
            match argument.as_str() {
                "--learned" => wishes.learned = true,
                "--steps" => wishes.steps = value()?.parse()?,
                "--seed" => wishes.seed = value()?.parse()?,
                "--folder" => wishes.folder = value()?.into(),
                "--save" => wishes.save = Some(value()?.into()),
                other => return Err(format!("unknown argument {other}").into()),
            }
        }
        Ok(wishes)
    }
}

const STEPS: usize = 1500;
const BATCH: usize = 32;
const TASK: Task = Task { vocabulary: 32, blocks: [8, 16] };

/// The learning rate: up in a few steps, then down in a straight line.
fn rate(step: usize, steps: usize) -> f32 {
    let (warm_up, peak) = (20.0, 3e-3);
    let (step, steps) = (step as f32 + 1.0, steps as f32);
    peak * (step / warm_up).min(1.0) * (1.0 - step / steps).max(0.02)
}

fn main() -> Outcome<()> {
    let wishes = Wishes::from_arguments()?;
    let places = if wishes.learned { Places::Learned(TASK.len()) } else { Places::Rope };
    let config =
        Config { vocabulary: TASK.vocabulary, d_model: 64, num_heads: 4, num_layers: 2, places, seed: wishes.seed };
    let mut model = Decoder::new(&config)?;
    let mut adam = Adam::default();
    let mut draws = Draws(wishes.seed);

    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} {elapsed} {msg}")?;
    let bar = ProgressBar::new(wishes.steps as u64).with_style(style);
    let start = Instant::now();
    let mut curve = Vec::new();
    for step in 0..wishes.steps {
        let lesson = model.learn(&TASK.batch(BATCH, &mut draws))?;
        adam.update(&mut model, &lesson.gradients, rate(step, wishes.steps))?;
        curve.push((lesson.loss, lesson.accuracy));
        bar.set_message(format!("loss {:.3}, accuracy {:.3}", lesson.loss, lesson.accuracy));
        bar.inc(1);
    }
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();

    println!("{} steps of {BATCH} sequences in {seconds:.1} s; loss in nats:\n", wishes.steps);
    charts::print_curve(&curve);

    // Sequences that the model has not seen.
    let test = TASK.batch(256, &mut Draws(wishes.seed ^ 0x7E57));
    let lesson = model.learn(&test)?;
    println!("\nNew sequences: loss {:.4}, accuracy on the second copy {:.4}\n", lesson.loss, lesson.accuracy);

    // What the heads do on whole blocks, as numbers for many sequences and as pictures for one.
    let long = Task { blocks: [TASK.blocks[1]; 2], ..TASK }.batch(64, &mut Draws(wishes.seed ^ 0x1000));
    let ids = Tokens::new().ids(&long.tokens);
    let statistics =
        model.walk(&long.tokens.view(), |layer, x, options| layer.head_statistics(&Inputs::new(x), options, &ids))?;
    let heads = heads(&statistics);
    charts::print_heads(&heads);

    let loss_file = wishes.folder.join("induction_loss.svg");
    let heads_file = wishes.folder.join("induction_heads.svg");
    charts::draw_curve(&curve, &loss_file)?;
    let one = long.tokens.slice(s![..1, ..]);
    let weights = model.walk(&one, |layer, x, options| layer.attend(&Inputs::new(x), &options.weights()))?;
    let weights: Vec<Array4<f32>> = weights.into_iter().filter_map(|attended| attended.weights).collect();
    charts::draw_heads(&heads, &weights, &one.row(0).to_vec(), &heads_file)?;
    println!("\nThe loss: {}\nThe heads: {}", loss_file.display(), heads_file.display());
    if let Some(file) = &wishes.save {
        model.save(file)?;
        println!("The weights: {}", file.display());
    }
    match lesson.accuracy {
        accuracy if accuracy >= 0.98 => Ok(()),
        accuracy => Err(format!("expected an accuracy of at least 0.98, got {accuracy:.4}").into()),
    }
}

/// The scores of all heads, as means over the sequences.
fn heads(statistics: &[HeadStatistics]) -> Vec<Head> {
    let mut heads = Vec::new();
    for (layer, statistics) in statistics.iter().enumerate() {
        let mean = |scores: &Array2<f64>, head| scores.column(head).mean().unwrap_or(f64::NAN);
        heads.extend((0..statistics.previous.ncols()).map(|head| Head {
            layer,
            head,
            previous: mean(&statistics.previous, head),
            induction: statistics.induction.as_ref().map_or(f64::NAN, |scores| mean(scores, head)),
        }));
    }
    heads
}
