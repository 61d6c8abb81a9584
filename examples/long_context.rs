//! Memory of a long sequence: 32768 tokens, 8 heads of 64, and no score matrix (which would take 32 GiB).
//!
//! ```text
//! cargo run --release --example long_context [length] [backward] [full]
//! ```
//!
//! Prints the peak resident memory beyond inputs and output, as the kernel counts it (Linux), and fails above 64 MiB. With
//! `backward` the gradients of queries, keys and values are computed too, and 96 MiB are allowed beyond them. The mask is
//! causal, with `full` there is none.

use std::time::Instant;

use multihead::ndarray::Array4;
use multihead::{Attended, Gradients, Mask, Options, Saved, Workspace, attention};

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const MIB: f64 = 1024.0 * 1024.0;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// What the words of the command line ask for.
struct Wish {
    len: usize,
    backward: bool,
    mask: Mask,
}

impl Wish {
    fn read(words: impl Iterator<Item = String>) -> Outcome<Self> {
        let mut wish = Self { len: 32768, backward: false, mask: Mask::causal() };
        for word in words {
            match word.as_str() {
                "backward" => wish.backward = true,
                "full" => wish.mask = Mask::none(),
                len => wish.len = len.parse().map_err(|_| format!("expected a length, backward or full, got {len}"))?,
            }
        }
        Ok(wish)
    }
}

fn main() -> Outcome<()> {
    let Wish { len, backward, mask } = Wish::read(std::env::args().skip(1))?;
    let wave = |phase: f32| {
        let shape = (1, HEADS, len, HEAD_DIM);
        Array4::from_shape_fn(shape, |(_, h, i, j)| (phase * (i * 7 + j * 3 + h + 1) as f32).sin())
    };
    let (q, k, v) = (wave(0.11), wave(0.13), wave(0.17));
    let options = Options::new().mask(&mask);
    let d_context = if backward { Some(wave(0.19)) } else { None };
    let mut workspace = Workspace::new();
    let mut attended = Attended::zeros(&q, &k, &v, &options)?;
    let saved = Saved { q: &q, k: &k, v: &v, context: &attended.context, lse: &attended.lse };
    let mut gradients = if backward { Some(Gradients::zeros(&saved, &options)?) } else { None };
    // Every page of what comes out is touched before the count begins.
    attended.context.fill(1.0);
    attended.lse.fill(1.0);
    if let Some(Gradients { d_q, d_k, d_v, .. }) = &mut gradients {
        [d_q, d_k, d_v].into_iter().for_each(|gradient| gradient.fill(1.0));
    }
    let before = peak_resident_bytes()?;

    let start = Instant::now();
    match (&d_context, &mut gradients) {
        (Some(d_context), Some(gradients)) => {
            attention::forward_saving_into(&q, &k, &v, &options, &mut attended, &mut workspace)?;
            let saved = Saved { q: &q, k: &k, v: &v, context: &attended.context, lse: &attended.lse };
            attention::backward_into(&saved, d_context, &options, gradients, &mut workspace)?;
        }
        _ => attention::forward_into(&q, &k, &v, &options, &mut attended.context, &mut workspace)?,
    }
    let seconds = start.elapsed().as_secs_f64();

    let beyond = (peak_resident_bytes()? - before) / MIB;
    let pairs = mask.bind(1, 1, len, len)?.visible_pairs() as f64;
    let (work, what, most) =
        if backward { (3.5, "inputs, outputs and gradients", 96.0) } else { (1.0, "inputs and output", 64.0) };
    let gflops = work * 4.0 * HEADS as f64 * pairs * HEAD_DIM as f64 / seconds / 1e9;
    println!("{len} tokens, {HEADS} heads of {HEAD_DIM}, {pairs} pairs each: {seconds:.2} s, {gflops:.0} GFLOP/s");
    println!("peak memory beyond {what}: {beyond:.1} MiB");
    println!("scores would take {:.0} MiB", HEADS as f64 * len as f64 * len as f64 * 4.0 / MIB);
    if beyond < most { Ok(()) } else { Err(format!("expected less than {most} MiB").into()) }
}

/// The highest resident size of this process so far.
fn peak_resident_bytes() -> Outcome<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM in /proc/self/status")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? * 1024.0)
}
