//! How long a case takes, and how long it would take at best.

use multihead::{Level, inspect::Peak};
use serde_json::{Value, json};
use std::time::Instant;

use crate::Run;

/// Runs that make a round last four milliseconds at least: during the probes, which take about as long, neighbours fill the
/// caches that all share, and a round of one run would pay for that. (A layer of one token, whose weights fit there: 0.86 of
/// the time with rounds of a millisecond.) Over a cache, 20 milliseconds: see [`measure`].
pub(crate) fn warm_up(run: &mut dyn Run) -> Result<usize, String> {
    let least = if run.bytes().is_some() { 20e-3 } else { 4e-3 };
    run.run().map_err(|e| e.to_string())?;
    let start = Instant::now();
    run.run().map_err(|e| e.to_string())?;
    Ok((least / start.elapsed().as_secs_f64()).ceil().clamp(1.0, 1e4) as usize)
}

/// A round is judged by the peaks probed right before and after it, and the case by the median round: on a shared
/// machine the clock and the neighbours change faster than a case lasts. A run over a cache is judged by the roofline,
/// too: what it would take if it did nothing but read, or nothing but multiply and add, whichever is longer.
pub(crate) fn measure(
    run: &mut dyn Run,
    repeats: usize,
    rounds: usize,
    level: Level,
    double: bool,
) -> Result<Value, String> {
    let (flop, bytes) = (run.flop(), run.bytes());
    let probe = || {
        let gflops = if double { Peak::gflops::<f64>(level) } else { Peak::gflops::<f32>(level) };
        // On a buffer as large as the keys and values, so that both come from the same caches or from none.
        [gflops, bytes.map_or(f64::NAN, Peak::read_gbs)]
    };
    let mut before = probe();
    let (mut times, mut peaks, mut fractions) = (Vec::new(), Vec::new(), Vec::new());
    let (mut bandwidths, mut rooflines) = (Vec::new(), Vec::new());
    for _ in 0..rounds.max(1) {
        // The probes have emptied the caches, and a last-level cache that could hold all keys and values takes several passes
        // until it does. (134 MB on an Emerald Rapids: 4.5 ms for the second pass, 2.6 ms from the fifth on.) Other systems
        // are not probed in between.
        let unprobed = if bytes.is_some() { repeats } else { 0 };
        for _ in 0..unprobed {
            run.run().map_err(|e| e.to_string())?;
        }
        let start = Instant::now();
        for _ in 0..repeats {
            run.run().map_err(|e| e.to_string())?;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3 / repeats as f64;
        let after = probe();
        let [gflops, gbs] = [0, 1].map(|i| (before[i] + after[i]) / 2.0);
        let at_best = (flop / gflops).max(bytes.map_or(0.0, |bytes| bytes as f64 / gbs)) / 1e6;
        times.push(ms);
        peaks.push(gflops);
        fractions.push(flop / ms / 1e6 / gflops);
        bandwidths.push(gbs);
        rooflines.push(at_best / ms);
        before = after;
    }
    let min = times.iter().copied().fold(f64::MAX, f64::min);
    let (median_ms, (sum, sum_abs)) = (median(&mut times), run.sums());
    let mut answer = json!({
        "min_ms": min, "median_ms": median_ms, "flop": flop, "gflops": flop / median_ms / 1e6,
        "peak_gflops": median(&mut peaks), "fraction_of_peak": median(&mut fractions), "sum": sum, "sum_abs": sum_abs,
    });
    if let Some(bytes) = bytes {
        answer["bytes"] = json!(bytes);
        answer["read_gbs"] = json!(median(&mut bandwidths));
        answer["fraction_of_roofline"] = json!(median(&mut rooflines));
    }
    Ok(answer)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
