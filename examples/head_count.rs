//! Do 8 heads of 64 cost the same as 1 head of 512?
//!
//! Run with `cargo run --release --example head_count`.
//!
//! "Due to the reduced dimension of each head, the total computational cost is similar to that of single-head attention
//! with full dimensionality" (Vaswani et al. 2017, section 3.2.2). In floating-point operations it is exactly the same.
//! In time it is close to that: each head has a softmax of its own, which is not among these operations, and narrow
//! products run less well than wide ones.

use multihead::ndarray::Array3;
use multihead::{Mask, MultiHeadAttention, Workspace};
use std::error::Error;
use std::time::{Duration, Instant};

const D_MODEL: usize = 512;

fn main() -> Result<(), Box<dyn Error>> {
    println!("d_model {D_MODEL}, f32, no mask; times are the best of several runs\n");
    println!(
        "{:>6}{:>18}{:>24}{:>22}{:>12}",
        "len", "heads x width", "projections, MFLOP", "attention, MFLOP", "time, ms"
    );
    for len in [64, 256, 1024] {
        let mut counts = Vec::new();
        for num_heads in [1, 2, 4, 8, 16] {
            let mha = MultiHeadAttention::<f32>::builder(D_MODEL, num_heads).build()?;
            let flops = mha.config().flops(1, len, len);
            let time = best_time(&mha, len)?;
            let heads = format!("{num_heads} x {}", mha.config().head_dim);
            let [projections, attention] = [flops.projections, flops.attention].map(|n| n as f64 / 1e6);
            println!("{len:>6}{heads:>18}{projections:>24.1}{attention:>22.1}{:>12.2}", time.as_secs_f64() * 1e3);
            counts.push(flops);
        }
        if counts.iter().any(|&flops| flops != counts[0]) {
            return Err("expected the same number of operations for any number of heads".into());
        }
        println!();
    }
    println!("The same operations for any number of heads; the softmax of each head comes on top of them.");
    Ok(())
}

/// The fastest of the runs that fit into a fifth of a second, three at least.
fn best_time(mha: &MultiHeadAttention<f32>, len: usize) -> Result<Duration, Box<dyn Error>> {
    let x = Array3::from_shape_fn((1, len, D_MODEL), |(_, i, c)| ((7 * i + c) as f32).sin());
    let (mut y, mut workspace) = (x.clone(), Workspace::new());
    let mut best = Duration::MAX;
    let (start, mut runs) = (Instant::now(), 0);
    while runs < 3 || start.elapsed() < Duration::from_millis(200) {
        let run = Instant::now();
        mha.forward_into(&x, &Mask::none(), &mut y, &mut workspace)?;
        best = best.min(run.elapsed());
        runs += 1;
    }
    Ok(best)
}
