//! Measures attention in other Rust crates: `peers SYSTEM`, where the system is candle, burn, rten or tract.
//!
//! One JSON object a line in, one out. The inputs of the last case are kept, so that a repeated request
//! times runs and nothing else. The first request of a case prepares the inputs, tries each call the crate
//! offers for it and keeps the fastest; the answer names it under "call". A round repeats a short run until
//! it lasts a millisecond, and is divided by the repeats. `{"op":"about"}` answers with the versions.
//!
//! The number of threads is fixed when the process starts: RAYON_NUM_THREADS and RTEN_NUM_THREADS.

mod burn_peer;
mod candle_decode;
mod candle_peer;
mod case;
mod rten_peer;
mod tract_peer;

use std::io::{BufRead, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use case::{Case, unsupported};
use serde_json::{Value, json};

const TRIALS: usize = 6;
const SLOW_SECONDS: f64 = 0.5;
const ROUND_SECONDS: f64 = 1e-3;

/// A result that is summed only after the clock has stopped.
pub trait Output {
    fn values(&self) -> Result<Vec<f32>, String>;
}

pub type Run = Box<dyn FnMut() -> Result<Box<dyn Output>, String>>;

/// One way to compute a case.
pub struct Call {
    label: String,
    run: Run,
}

impl Call {
    pub fn new(label: impl Into<String>, run: impl FnMut() -> Result<Box<dyn Output>, String> + 'static) -> Self {
        Self { label: label.into(), run: Box::new(run) }
    }

    /// Seconds of one run; a panic inside the crate under test is an error.
    fn time(&mut self) -> Result<f64, String> {
        let start = Instant::now();
        match catch_unwind(AssertUnwindSafe(&mut self.run)) {
            Ok(result) => result.map(|_| start.elapsed().as_secs_f64()),
            Err(_) => Err("panicked".into()),
        }
    }
}

struct System {
    name: &'static str,
    version: &'static str,
    calls: fn(&Case) -> Result<Vec<Call>, String>,
    /// The calls for queries over a cache.
    decode_calls: fn(&Case) -> Result<Vec<Call>, String>,
}

fn no_decode_calls(_: &Case) -> Result<Vec<Call>, String> {
    Err(unsupported("decoding is compared with candle only"))
}

const SYSTEMS: [System; 4] = [
    System {
        name: "candle",
        version: "candle-nn 0.11.1",
        calls: candle_peer::calls,
        decode_calls: candle_decode::calls,
    },
    System { name: "burn", version: "burn 0.22.1 (flex)", calls: burn_peer::calls, decode_calls: no_decode_calls },
    System { name: "rten", version: "rten 0.27.0", calls: rten_peer::calls, decode_calls: no_decode_calls },
    System {
        name: "tract",
        version: "tract-transformers 0.23.9",
        calls: tract_peer::calls,
        decode_calls: no_decode_calls,
    },
];

/// The call with the fastest run over a few alternating trials; if none works, the first one's error.
fn choose(calls: Vec<Call>) -> Result<Call, String> {
    let mut failure = None;
    let mut best = Vec::new();
    for mut call in calls {
        match call.time() {
            Ok(seconds) => best.push((seconds, call)),
            Err(error) => failure = failure.or(Some(unsupported(&format!("{}: {error}", call.label)))),
        }
    }
    if best.len() > 1 {
        for _ in 0..TRIALS {
            for (seconds, call) in best.iter_mut().filter(|(seconds, _)| *seconds < SLOW_SECONDS) {
                *seconds = seconds.min(call.time()?);
            }
        }
    }
    let fastest = best.into_iter().min_by(|(a, _), (b, _)| a.total_cmp(b));
    fastest.map(|(_, call)| call).ok_or_else(|| failure.unwrap_or_else(|| unsupported("no call for this case")))
}

/// The last case with its call, and how often a round repeats it.
struct Prepared {
    case: Case,
    call: Call,
    repeats: usize,
}

fn prepare(system: &System, case: &Case) -> Result<Prepared, String> {
    let variable = if system.name == "rten" { "RTEN_NUM_THREADS" } else { "RAYON_NUM_THREADS" };
    if std::env::var(variable).ok().as_deref() != Some(case.threads.to_string().as_str()) {
        return Err(format!("start this worker with {variable}={}", case.threads));
    }
    let calls = if case.decodes() { system.decode_calls } else { system.calls };
    let mut call = choose(calls(case)?)?;
    let seconds = call.time()?;
    let repeats = (ROUND_SECONDS / seconds).ceil().clamp(1.0, 1e4) as usize;
    Ok(Prepared { case: case.clone(), call, repeats })
}

fn answer(system: &System, last: &mut Option<Prepared>, line: &str) -> Result<Value, String> {
    let request: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
    if request["op"] == "about" {
        let detail = if cfg!(feature = "x86-v4") { "AVX-512 matrix products" } else { "default features" };
        return Ok(json!({ "version": system.version, "detail": detail }));
    }
    let case = Case::parse(line)?;
    let same = last.as_ref().is_some_and(|p| Case { rounds: case.rounds, ..p.case.clone() } == case);
    if !same {
        *last = None;
        *last = Some(prepare(system, &case)?);
    }
    let Some(Prepared { call, repeats, .. }) = last else { return Err("no case".into()) };
    let (mut times, mut output) = (Vec::new(), None);
    for _ in 0..case.rounds.max(1) {
        let start = Instant::now();
        for _ in 0..*repeats {
            output = Some((call.run)()?);
        }
        times.push(start.elapsed().as_secs_f64() * 1e3 / *repeats as f64);
    }
    times.sort_by(f64::total_cmp);
    let (flop, median) = (case.flop(), times[times.len() / 2]);
    let values = output.map_or(Ok(Vec::new()), |output| output.values())?;
    let (sum, sum_abs) =
        values.iter().fold((0.0, 0.0), |(sum, abs), &x| (sum + f64::from(x), abs + f64::from(x.abs())));
    Ok(json!({
        "call": call.label, "min_ms": times[0], "median_ms": median, "flop": flop, "gflops": flop / median / 1e6,
        "sum": sum, "sum_abs": sum_abs,
    }))
}

fn main() -> std::io::Result<()> {
    let name = std::env::args().nth(1).unwrap_or_default();
    let Some(system) = SYSTEMS.iter().find(|system| system.name == name) else {
        eprintln!("usage: peers candle|burn|rten|tract");
        std::process::exit(2);
    };
    let mut last = None;
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let mut reply = answer(system, &mut last, &line?).unwrap_or_else(|error| json!({ "error": error }));
        reply["system"] = json!(system.name);
        writeln!(out, "{reply}")?;
        out.flush()?;
    }
    Ok(())
}
