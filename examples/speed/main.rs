//! The measuring instrument: one JSON object a line in, one JSON line out, so that another program can alternate
//! between systems.
//!
//! ```text
//! cargo run --release --example speed -- --table
//! echo '{"op":"attention","batch":1,"heads":8,"kv_heads":8,"q_len":2048,"kv_len":2048,"head_dim":64,"value_dim":64,
//!        "causal":false,"dtype":"f32","threads":2,"rounds":5}' | tr -d '\n' | cargo run --release --example speed
//! ```
//!
//! Operations are `peak`, `attention`, `layer` and `append`. Inputs come from a fixed generator ([`case::draw`]), outputs and workspace
//! are reused between rounds, and the peak is probed in the same process before and after every round. FLOPs count
//! visible pairs only: `2 * heads * pairs * (head_dim + value_dim)`, plus `2 * in * out` per token and projection. With
//! `"pass":"forward_backward"` attention counts 3.5 times and projections 3 times, and the sums are those of the gradients
//! of q, k and v, or of x.
//!
//! With `"pass":"decode"` and `"cache":"f32"` (`"bf16"` or `"f16"` in a build with the feature `half`), attention is that
//! of `q_len` new queries over a cache of `kv_len` keys (`"kv_lens":[..]` for each batch entry), their own among them;
//! `"pass":"prefill"` appends the keys of all queries to an empty cache first. `"op":"append"` appends one token to a
//! cache of `kv_len`. The answer says the fraction of the roofline, too: see `measure.rs`.

mod case;
mod decode;
mod forward;
mod measure;
mod table;
mod training;

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};

use multihead::{Element, Level, inspect::Peak};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde_json::{Value, json};

use case::{Case, Settings};
use forward::{Attention, Layer};
use measure::{measure, warm_up};
use training::{LayerTraining, Training};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// A case with its inputs, ready to be run again and again.
pub(crate) trait Run: Send {
    fn run(&mut self) -> Outcome<()>;
    fn flop(&self) -> f64;
    /// Bytes of keys and values in a cache, which a run has to read once.
    fn bytes(&self) -> Option<usize> {
        None
    }
    /// Sum and sum of absolute values of the output.
    fn sums(&self) -> (f64, f64);
}

/// Sum and sum of absolute values.
pub(crate) fn sums<'a, T: Element>(values: impl Iterator<Item = &'a T>) -> (f64, f64) {
    values.fold((0.0, 0.0), |(sum, abs), &x| (sum + x.into_f64(), abs + x.into_f64().abs()))
}

/// Keeps the inputs of the last case and one pool for each number of threads.
#[derive(Default)]
struct Instrument {
    pools: HashMap<usize, ThreadPool>,
    last: Option<(Case, Box<dyn Run>, usize)>,
}

impl Instrument {
    fn answer(&mut self, line: &str) -> Outcome<Value> {
        let case: Case = serde_json::from_str(line)?;
        let pass = case.pass.as_deref().unwrap_or("forward");
        if pass == "forward" && (case.dropout.is_some() || case.bias_gradient) {
            return Err("dropout and bias_gradient: expected a pass of forward_backward".into());
        }
        let pool = self.pools.entry(case.threads);
        let pool = match pool {
            std::collections::hash_map::Entry::Occupied(entry) => entry.into_mut(),
            std::collections::hash_map::Entry::Vacant(entry) => {
                entry.insert(ThreadPoolBuilder::new().num_threads(case.threads).build()?)
            }
        };
        let level = Settings::new(&case)?.level.unwrap_or_else(Level::best);
        if case.op == "peak" {
            return Ok(pool.install(|| {
                let (f32, f64) = (Peak::gflops::<f32>(level), Peak::gflops::<f64>(level));
                json!({ "gflops_f32": f32, "gflops_f64": f64, "read_gbs": Peak::read_gbs(1 << 28) })
            }));
        }
        let same = |last: &Case| Case { rounds: case.rounds, ..last.clone() } == case;
        if !self.last.as_ref().is_some_and(|(last, ..)| same(last)) {
            self.last = None;
            let mut run: Box<dyn Run> = match (case.op.as_str(), pass, case.dtype.as_str()) {
                ("attention", "forward", "f32") => Box::new(Attention::<f32>::new(&case)?),
                ("attention", "forward", "f64") => Box::new(Attention::<f64>::new(&case)?),
                ("attention", "forward_backward", "f32") => Box::new(Training::<f32>::new(&case)?),
                ("attention", "forward_backward", "f64") => Box::new(Training::<f64>::new(&case)?),
                ("attention", "decode" | "prefill", _) | ("append", ..) => decode::new(&case)?,
                ("layer", "forward", "f32") => Box::new(Layer::<f32>::new(&case)?),
                ("layer", "forward", "f64") => Box::new(Layer::<f64>::new(&case)?),
                ("layer", "forward_backward", "f32") => Box::new(LayerTraining::<f32>::new(&case)?),
                ("layer", "forward_backward", "f64") => Box::new(LayerTraining::<f64>::new(&case)?),
                (op, pass, dtype) => {
                    let expected = "op peak, attention, layer or append, pass forward, forward_backward or \
                                    (of attention) decode or prefill, f32 or f64";
                    return Err(format!("expected {expected}, got {op}, {pass}, {dtype}").into());
                }
            };
            let repeats = pool.install(|| warm_up(run.as_mut())).map_err(|e| e.to_string())?;
            self.last = Some((case.clone(), run, repeats));
        }
        let Some((_, run, repeats)) = &mut self.last else { return Err("no case".into()) };
        let measure = || measure(run.as_mut(), *repeats, case.rounds, level, case.dtype == "f64");
        Ok(pool.install(measure).map_err(|e| e.to_string())?)
    }
}

fn main() -> Outcome<()> {
    let mut instrument = Instrument::default();
    if std::env::args().nth(1).as_deref() == Some("--table") {
        return table(&mut instrument);
    }
    let mut out = std::io::stdout().lock();
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let answer = instrument.answer(&line).unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn table(instrument: &mut Instrument) -> Outcome<()> {
    println!("{:52} {:>10} {:>9} {:>8}", "2 threads, medians of 11 rounds", "ms", "GFLOP/s", "of peak");
    for (name, request) in table::TABLE {
        let mut request: Value = serde_json::from_str(&format!("{{{request},\"threads\":2,\"rounds\":11}}"))?;
        if request["op"] == "attention" {
            // Square and with values as wide as the keys: the table says len and head_dim once.
            let (len, head_dim) = (request["len"].take(), request["head_dim"].clone());
            request["len"] = json!(0);
            request["q_len"] = len.clone();
            request["kv_len"] = len;
            request["value_dim"] = head_dim;
        }
        let answer = instrument.answer(&request.to_string())?;
        let [ms, gflops, fraction] = ["median_ms", "gflops", "fraction_of_peak"].map(|key| number(&answer, key));
        println!("{name:52} {ms:10.3} {gflops:9.1} {fraction:8.2}");
    }
    println!("\n{:52} {:>10} {:>9} {:>11}", "over a cache", "ms", "GB/s", "of roofline");
    for (name, request) in table::DECODE {
        let mut request: Value = serde_json::from_str(&format!("{{{request},\"threads\":2,\"rounds\":11}}"))?;
        if request["op"] == "attention" && request["pass"].is_null() {
            request["pass"] = json!("decode");
        }
        request["value_dim"] = request["head_dim"].clone();
        let answer = match instrument.answer(&request.to_string()) {
            Ok(answer) => answer,
            Err(error) => {
                println!("{name:52} {error}");
                continue;
            }
        };
        let [ms, bytes, fraction] = ["median_ms", "bytes", "fraction_of_roofline"].map(|key| number(&answer, key));
        println!("{name:52} {ms:10.4} {:9.1} {fraction:11.2}", bytes / ms / 1e6);
    }
    Ok(())
}

fn number(answer: &Value, key: &str) -> f64 {
    answer[key].as_f64().unwrap_or(f64::NAN)
}
