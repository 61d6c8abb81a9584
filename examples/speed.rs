//! The measuring instrument: one JSON object a line in, one JSON line out, so that another program can alternate
//! between systems.
//!
//! ```text
//! cargo run --release --example speed -- --table
//! echo '{"op":"attention","batch":1,"heads":8,"kv_heads":8,"q_len":2048,"kv_len":2048,"head_dim":64,"value_dim":64,
//!        "causal":false,"dtype":"f32","threads":2,"rounds":5}' | tr -d '\n' | cargo run --release --example speed
//! ```
//!
//! Operations are `peak`, `attention` and `layer`. Inputs come from a fixed generator ([`draw`]), outputs and workspace
//! are reused between rounds, and the peak is probed in the same process before and after every round. FLOPs count
//! visible pairs only: `2 * heads * pairs * (head_dim + value_dim)`, plus `2 * in * out` per token and projection. With
//! `"pass":"forward_backward"` attention counts 3.5 times and projections 3 times, and the sums are those of the gradients
//! of q, k and v, or of x, w_q, w_k, w_v and w_o.

use std::collections::HashMap;
use std::error::Error;
use std::io::{BufRead, Write};
use std::time::Instant;

use multihead::ndarray::{Array, Array2, Array4, Dimension, IntoDimension, Ix2, Ix3, Ix4};
use multihead::{
    Attended, Element, Gradients, Inputs, LayerGradients, Level, Mask, MultiHeadAttention, Options, Path, Saved,
    Weights, Workspace, attention, inspect::Peak,
};
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::Deserialize;
use serde_json::{Value, json};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A request; what may be left out has a default, and a key that is not here is an error.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    op: String,
    #[serde(default = "one")]
    batch: usize,
    #[serde(default = "one")]
    heads: usize,
    kv_heads: Option<usize>,
    #[serde(default)]
    q_len: usize,
    #[serde(default)]
    kv_len: usize,
    #[serde(default)]
    head_dim: usize,
    #[serde(default)]
    value_dim: usize,
    /// Tokens and width of a layer.
    #[serde(default)]
    len: usize,
    #[serde(default)]
    d_model: usize,
    #[serde(default)]
    causal: bool,
    #[serde(default = "f32_name")]
    dtype: String,
    #[serde(default = "one")]
    threads: usize,
    #[serde(default = "five")]
    rounds: usize,
    level: Option<String>,
    path: Option<String>,
    query_tile: Option<usize>,
    mask: Option<MaskCase>,
    #[serde(default)]
    bias: bool,
    pass: Option<String>,
    /// The rate, for training.
    dropout: Option<f64>,
    /// Whether the bias has a gradient too.
    #[serde(default)]
    bias_gradient: bool,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
enum MaskCase {
    /// Every batch entry has this share of its keys.
    Lengths { fraction: f64 },
    /// Blocks of pairs are kept where the generator's value is not negative.
    Keep { density: f64, block: usize },
}

fn one() -> usize {
    1
}
fn five() -> usize {
    5
}
fn f32_name() -> String {
    "f32".into()
}

/// Element i of the array with this seed: SplitMix64 to a uniform number of mean 0 and variance 1.
fn draw(i: u64, seed: u64) -> f64 {
    let mut z = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    ((z >> 40) as f64 / 2f64.powi(24) - 0.5) * 12f64.sqrt()
}

fn array<T: Element, D: Dimension>(shape: impl IntoDimension<Dim = D>, seed: u64, factor: f64) -> Outcome<Array<T, D>> {
    let dim = shape.into_dimension();
    let values = (0..dim.size() as u64).map(|i| T::from_f64(draw(i, seed) * factor)).collect();
    Ok(Array::from_shape_vec(dim, values)?)
}

/// A case with its inputs, ready to be run again and again.
trait Run: Send {
    fn run(&mut self) -> Outcome<()>;
    fn flop(&self) -> f64;
    /// Sum and sum of absolute values of the output.
    fn sums(&self) -> (f64, f64);
}

struct Attention<T> {
    q: Array4<T>,
    k: Array4<T>,
    v: Array4<T>,
    bias: Option<Array2<T>>,
    mask: Mask,
    settings: Settings,
    context: Array4<T>,
    workspace: Workspace<T>,
}

/// Forward and backward.
struct Training<T> {
    forward: Attention<T>,
    d_context: Array4<T>,
    dropout: Option<f64>,
    bias_gradient: bool,
    attended: Attended<T>,
    gradients: Gradients<T>,
}

struct Layer<T> {
    layer: MultiHeadAttention<T>,
    x: Array<T, Ix3>,
    mask: Mask,
    settings: Settings,
    /// Of attention, and of the projections.
    flop: [f64; 2],
    output: Array<T, Ix3>,
    workspace: Workspace<T>,
}

/// Forward and backward.
struct LayerTraining<T> {
    forward: Layer<T>,
    d_output: Array<T, Ix3>,
    dropout: Option<f64>,
    gradients: LayerGradients<T>,
}

/// What a case asks of the implementation.
#[derive(Clone, Copy)]
struct Settings {
    path: Path,
    level: Option<Level>,
    query_tile: Option<usize>,
}

impl Settings {
    fn new(case: &Case) -> Outcome<Self> {
        let path = match case.path.as_deref() {
            None | Some("auto") => Path::Auto,
            Some("tiled") => Path::Tiled,
            Some("dense") => Path::Dense,
            Some("reference") => Path::Reference,
            Some(other) => return Err(format!("path: expected auto, tiled, dense or reference, got {other}").into()),
        };
        let level = case.level.as_deref().map(str::parse::<Level>).transpose()?;
        Ok(Self { path, level, query_tile: case.query_tile })
    }

    fn options<'a, T: Element>(&self, mask: &'a Mask) -> Options<'a, T> {
        let mut options = Options::new().mask(mask).path(self.path);
        if let Some(level) = self.level {
            options = options.level(level);
        }
        if let Some(query_tile) = self.query_tile {
            options = options.query_tile(query_tile);
        }
        options
    }
}

fn mask(case: &Case, q_len: usize, kv_len: usize) -> Outcome<Mask> {
    let causal = if case.causal { Mask::causal() } else { Mask::none() };
    Ok(match &case.mask {
        None => causal,
        Some(MaskCase::Lengths { fraction }) => {
            let length = (kv_len as f64 * fraction) as usize;
            causal & Mask::key_lengths(&vec![length; case.batch])
        }
        Some(MaskCase::Keep { density, block }) => {
            if *density != 0.5 {
                return Err("mask density: the generator's sign gives 0.5 and nothing else".into());
            }
            let kept = |i: usize, j: usize| draw((i / block * 65536 + j / block) as u64, 9) >= 0.0;
            causal & Mask::keep(&Array2::from_shape_fn((q_len, kv_len), |(i, j)| kept(i, j)))?
        }
    })
}

/// Visible pairs of one head, over all batch entries.
fn pairs(mask: &Mask, batch: usize, q_len: usize, kv_len: usize) -> Outcome<f64> {
    Ok(mask.bind(batch, 1, q_len, kv_len)?.visible_pairs() as f64)
}

impl<T: Element> Attention<T> {
    fn new(case: &Case) -> Outcome<Self> {
        let Case { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
        let kv_heads = case.kv_heads.unwrap_or(heads);
        Ok(Self {
            q: array::<T, Ix4>((batch, heads, q_len, head_dim), 1, 1.0)?,
            k: array::<T, Ix4>((batch, kv_heads, kv_len, head_dim), 2, 1.0)?,
            v: array::<T, Ix4>((batch, kv_heads, kv_len, value_dim), 3, 1.0)?,
            bias: if case.bias { Some(array::<T, Ix2>((q_len, kv_len), 6, 1.0)?) } else { None },
            mask: mask(case, q_len, kv_len)?,
            settings: Settings::new(case)?,
            context: Array4::zeros((batch, heads, q_len, value_dim)),
            workspace: Workspace::new(),
        })
    }
}

impl<T: Element> Run for Attention<T> {
    fn run(&mut self) -> Outcome<()> {
        let mut options = self.settings.options(&self.mask);
        if let Some(bias) = &self.bias {
            options = options.bias(bias)?;
        }
        Ok(attention::forward_into(&self.q, &self.k, &self.v, &options, &mut self.context, &mut self.workspace)?)
    }

    fn flop(&self) -> f64 {
        let (batch, heads, q_len, head_dim) = self.q.dim();
        let (_, _, kv_len, value_dim) = self.v.dim();
        let pairs = pairs(&self.mask, batch, q_len, kv_len).unwrap_or(f64::NAN);
        2.0 * heads as f64 * pairs * (head_dim + value_dim) as f64
    }

    fn sums(&self) -> (f64, f64) {
        sums(self.context.iter())
    }
}

impl<T: Element> Training<T> {
    fn new(case: &Case) -> Outcome<Self> {
        let forward = Attention::<T>::new(case)?;
        let d_context = array::<T, Ix4>(forward.context.dim(), 5, 1.0)?;
        let Attention { q, k, v, mask, settings, bias, .. } = &forward;
        let mut options = settings.options(mask);
        if let Some(bias) = bias {
            options = options.bias(bias)?;
        }
        if case.bias_gradient {
            options = options.bias_gradient();
        }
        let attended = Attended::zeros(q, k, v, &options)?;
        let saved = Saved { q, k, v, context: &attended.context, lse: &attended.lse };
        let gradients = Gradients::zeros(&saved, &options)?;
        let (dropout, bias_gradient) = (case.dropout, case.bias_gradient);
        Ok(Self { forward, d_context, dropout, bias_gradient, attended, gradients })
    }
}

impl<T: Element> Run for Training<T> {
    fn run(&mut self) -> Outcome<()> {
        let Attention { q, k, v, mask, settings, bias, workspace, .. } = &mut self.forward;
        let mut options = settings.options(mask);
        if let Some(bias) = bias {
            options = options.bias(bias)?;
        }
        if self.bias_gradient {
            options = options.bias_gradient();
        }
        if let Some(rate) = self.dropout {
            options = options.dropout(rate, 1);
        }
        attention::forward_saving_into(q, k, v, &options, &mut self.attended, workspace)?;
        let saved = Saved { q, k, v, context: &self.attended.context, lse: &self.attended.lse };
        Ok(attention::backward_into(&saved, &self.d_context, &options, &mut self.gradients, workspace)?)
    }

    fn flop(&self) -> f64 {
        3.5 * self.forward.flop()
    }

    fn sums(&self) -> (f64, f64) {
        let Gradients { d_q, d_k, d_v, .. } = &self.gradients;
        sums(d_q.iter().chain(d_k).chain(d_v))
    }
}

impl<T: Element> Layer<T> {
    fn new(case: &Case) -> Outcome<Self> {
        let Case { batch, heads, len, d_model, .. } = *case;
        let kv_heads = case.kv_heads.unwrap_or(heads);
        let head_dim = d_model.checked_div(heads).unwrap_or(0);
        let factor = (d_model as f64).powf(-0.5);
        let weights = Weights::new(
            array::<T, Ix2>((d_model, heads * head_dim), 11, factor)?,
            array::<T, Ix2>((d_model, kv_heads * head_dim), 12, factor)?,
            array::<T, Ix2>((d_model, kv_heads * head_dim), 13, factor)?,
            array::<T, Ix2>((heads * head_dim, d_model), 14, factor)?,
        );
        let mask = mask(case, len, len)?;
        let projections = 2.0 * (batch * len) as f64 * (2 * d_model * (heads + kv_heads) * head_dim) as f64;
        let pairs = pairs(&mask, batch, len, len)?;
        Ok(Self {
            layer: MultiHeadAttention::builder(d_model, heads).num_kv_heads(kv_heads).from_weights(weights)?,
            x: array::<T, Ix3>((batch, len, d_model), 4, 1.0)?,
            mask,
            settings: Settings::new(case)?,
            flop: [4.0 * heads as f64 * pairs * head_dim as f64, projections],
            output: Array::zeros((batch, len, d_model)),
            workspace: Workspace::new(),
        })
    }
}

impl<T: Element> Run for Layer<T> {
    fn run(&mut self) -> Outcome<()> {
        let (inputs, options) = (Inputs::new(&self.x), self.settings.options(&self.mask));
        Ok(self.layer.attend_into(&inputs, &options, &mut self.output, &mut self.workspace)?)
    }

    fn flop(&self) -> f64 {
        self.flop.iter().sum()
    }

    fn sums(&self) -> (f64, f64) {
        sums(self.output.iter())
    }
}

impl<T: Element> LayerTraining<T> {
    fn new(case: &Case) -> Outcome<Self> {
        if case.bias_gradient {
            return Err("bias_gradient: expected op attention".into());
        }
        let forward = Layer::<T>::new(case)?;
        let d_output = array::<T, Ix3>(forward.output.dim(), 5, 1.0)?;
        let gradients = LayerGradients::zeros(&forward.layer, &Inputs::new(&forward.x), &Options::new())?;
        Ok(Self { forward, d_output, dropout: case.dropout, gradients })
    }
}

impl<T: Element> Run for LayerTraining<T> {
    fn run(&mut self) -> Outcome<()> {
        let Layer { layer, x, mask, settings, output, workspace, .. } = &mut self.forward;
        let (inputs, mut options) = (Inputs::new(x), settings.options(mask));
        if let Some(rate) = self.dropout {
            options = options.dropout(rate, 1);
        }
        let tape = layer.forward_train_into(&inputs, &options, output, workspace)?;
        Ok(layer.backward_into(tape, &self.d_output, &mut self.gradients, workspace)?)
    }

    fn flop(&self) -> f64 {
        let [attention, projections] = self.forward.flop;
        3.5 * attention + 3.0 * projections
    }

    fn sums(&self) -> (f64, f64) {
        let LayerGradients { d_query, weights: Weights { w_q, w_k, w_v, w_o, .. }, .. } = &self.gradients;
        sums(d_query.iter().chain(w_q).chain(w_k).chain(w_v).chain(w_o))
    }
}

fn sums<'a, T: Element>(values: impl Iterator<Item = &'a T>) -> (f64, f64) {
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
                ("layer", "forward", "f32") => Box::new(Layer::<f32>::new(&case)?),
                ("layer", "forward", "f64") => Box::new(Layer::<f64>::new(&case)?),
                ("layer", "forward_backward", "f32") => Box::new(LayerTraining::<f32>::new(&case)?),
                ("layer", "forward_backward", "f64") => Box::new(LayerTraining::<f64>::new(&case)?),
                (op, pass, dtype) => {
                    let expected = "op peak, attention or layer, pass forward or forward_backward, f32 or f64";
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

/// Runs that make a round last about a millisecond at least.
fn warm_up(run: &mut dyn Run) -> Result<usize, String> {
    run.run().map_err(|e| e.to_string())?;
    let start = Instant::now();
    run.run().map_err(|e| e.to_string())?;
    Ok((1e-3 / start.elapsed().as_secs_f64()).ceil().clamp(1.0, 1e4) as usize)
}

/// A round is judged by the peaks probed right before and after it, and the case by the median round: on a shared
/// machine the clock and the neighbours change faster than a case lasts.
fn measure(run: &mut dyn Run, repeats: usize, rounds: usize, level: Level, double: bool) -> Result<Value, String> {
    let peak = || if double { Peak::gflops::<f64>(level) } else { Peak::gflops::<f32>(level) };
    let (flop, mut before) = (run.flop(), peak());
    let (mut times, mut peaks, mut fractions) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds.max(1) {
        let start = Instant::now();
        for _ in 0..repeats {
            run.run().map_err(|e| e.to_string())?;
        }
        let ms = start.elapsed().as_secs_f64() * 1e3 / repeats as f64;
        let after = peak();
        let beside = (before + after) / 2.0;
        times.push(ms);
        peaks.push(beside);
        fractions.push(flop / ms / 1e6 / beside);
        before = after;
    }
    let (min, median_ms, (sum, sum_abs)) =
        (times.iter().copied().fold(f64::MAX, f64::min), median(&mut times), run.sums());
    Ok(json!({
        "min_ms": min, "median_ms": median_ms, "flop": flop, "gflops": flop / median_ms / 1e6,
        "peak_gflops": median(&mut peaks), "fraction_of_peak": median(&mut fractions), "sum": sum, "sum_abs": sum_abs,
    }))
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The rows of the README's table: two threads, `f32` unless the row says otherwise.
const TABLE: &[(&str, &str)] = &[
    ("attention b1 h8 n2048 d64", r#""op":"attention","heads":8,"len":2048,"head_dim":64"#),
    ("attention b1 h8 n2048 d64 causal", r#""op":"attention","heads":8,"len":2048,"head_dim":64,"causal":true"#),
    ("attention b1 h16 n4096 d128 causal", r#""op":"attention","heads":16,"len":4096,"head_dim":128,"causal":true"#),
    ("attention b1 h8 n512 d64", r#""op":"attention","heads":8,"len":512,"head_dim":64"#),
    ("attention b8 h12 n128 d64", r#""op":"attention","batch":8,"heads":12,"len":128,"head_dim":64"#),
    (
        "attention b1 h32 kv8 n2048 d128 causal",
        r#""op":"attention","heads":32,"kv_heads":8,"len":2048,"head_dim":128,"causal":true"#,
    ),
    ("attention b1 h8 n1024 d48", r#""op":"attention","heads":8,"len":1024,"head_dim":48"#),
    ("attention b1 h8 n1024 d80", r#""op":"attention","heads":8,"len":1024,"head_dim":80"#),
    ("attention b1 h8 n1024 d96", r#""op":"attention","heads":8,"len":1024,"head_dim":96"#),
    ("attention b1 h8 n1024 d100", r#""op":"attention","heads":8,"len":1024,"head_dim":100"#),
    ("attention b1 h8 n1024 d256", r#""op":"attention","heads":8,"len":1024,"head_dim":256"#),
    (
        "attention b1 h8 n2048 d64, half the keys",
        r#""op":"attention","heads":8,"len":2048,"head_dim":64,"mask":{"kind":"lengths","fraction":0.5}"#,
    ),
    (
        "attention b1 h8 n2048 d64, half of the 128-blocks",
        r#""op":"attention","heads":8,"len":2048,"head_dim":64,"mask":{"kind":"keep","density":0.5,"block":128}"#,
    ),
    ("attention b1 h8 n2048 d64, bias", r#""op":"attention","heads":8,"len":2048,"head_dim":64,"bias":true"#),
    ("attention b1 h8 n1024 d64 f64", r#""op":"attention","heads":8,"len":1024,"head_dim":64,"dtype":"f64""#),
    ("layer b1 n512 d_model 512 h8", r#""op":"layer","len":512,"d_model":512,"heads":8"#),
    ("layer b8 n128 d_model 768 h12", r#""op":"layer","batch":8,"len":128,"d_model":768,"heads":12"#),
    ("layer b1 n2048 d_model 512 h8", r#""op":"layer","len":2048,"d_model":512,"heads":8"#),
    ("layer b1 n16 d_model 1024 h16", r#""op":"layer","len":16,"d_model":1024,"heads":16"#),
    ("layer b1 n1 d_model 1024 h16", r#""op":"layer","len":1,"d_model":1024,"heads":16"#),
    ("attention b1 h8 n2048 d64, level avx2", r#""op":"attention","heads":8,"len":2048,"head_dim":64,"level":"avx2""#),
    (
        "attention b1 h8 n2048 d64, level portable",
        r#""op":"attention","heads":8,"len":2048,"head_dim":64,"level":"portable""#,
    ),
];

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
    for (name, request) in TABLE {
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
    Ok(())
}

fn number(answer: &Value, key: &str) -> f64 {
    answer[key].as_f64().unwrap_or(f64::NAN)
}
