//! Memory of a long sequence: 32768 tokens, 8 heads of 64, and no score matrix (which would take 32 GiB).
//!
//! ```text
//! cargo run --release --example long_context [length]
//! ```
//!
//! Prints the peak resident memory beyond inputs and output, as the kernel counts it (Linux), and fails above 64 MiB.

use std::time::Instant;

use multihead::ndarray::Array4;
use multihead::{Mask, Options, Workspace, attention};

const HEADS: usize = 8;
const HEAD_DIM: usize = 64;
const MIB: f64 = 1024.0 * 1024.0;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let len = std::env::args().nth(1).map_or(Ok(32768), |len| len.parse())?;
    let wave = |phase: f32| {
        let shape = (1, HEADS, len, HEAD_DIM);
        Array4::from_shape_fn(shape, |(_, h, i, j)| (phase * (i * 7 + j * 3 + h + 1) as f32).sin())
    };
    let (q, k, v) = (wave(0.11), wave(0.13), wave(0.17));
    // Every page of the output is touched before the count begins.
    let mut context = Array4::from_elem(q.dim(), 1.0);
    let (mask, mut workspace) = (Mask::causal(), Workspace::new());
    let before = peak_resident_bytes()?;

    let start = Instant::now();
    attention::forward_into(&q, &k, &v, &Options::new().mask(&mask), &mut context, &mut workspace)?;
    let seconds = start.elapsed().as_secs_f64();

    let beyond = (peak_resident_bytes()? - before) / MIB;
    let pairs = len as f64 * (len as f64 + 1.0) / 2.0;
    let gflops = 4.0 * HEADS as f64 * pairs * HEAD_DIM as f64 / seconds / 1e9;
    println!("{len} tokens, {HEADS} heads of {HEAD_DIM}, causal: {seconds:.2} s, {gflops:.0} GFLOP/s");
    println!("peak memory beyond inputs and output: {beyond:.1} MiB");
    println!("scores would take {:.0} MiB", HEADS as f64 * len as f64 * len as f64 * 4.0 / MIB);
    if beyond < 64.0 { Ok(()) } else { Err("expected less than 64 MiB".into()) }
}

/// The highest resident size of this process so far.
fn peak_resident_bytes() -> Result<f64, Box<dyn std::error::Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM in /proc/self/status")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<f64>()? * 1024.0)
}
