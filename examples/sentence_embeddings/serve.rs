//! One JSON object a line in, one out, so that another program can compare: see `benches/peers/sentences.py`.
//!
//! ```text
//! {"op":"tokens","sentences":["a cat"]}                        {"tokens":[[101,1037,4937,102]]}
//! {"op":"embed","batches":[[[101,4937,102]]],"threads":2,      {"median_ms":..,"min_ms":..,
//!  "rounds":3}                                                  "embeddings":[[[..]]]}
//! ```
//!
//! The clock runs from the numbers of the tokens to the vectors, over all batches.

use multihead::ndarray::Array2;
use rayon::{ThreadPool, ThreadPoolBuilder};
use serde::Deserialize;
use serde_json::{Value, json};
use std::io::{BufRead, Write};
use std::time::Instant;

use crate::checkpoint::Fault;
use crate::embedder::Embedder;

#[derive(Deserialize)]
#[serde(tag = "op", rename_all = "lowercase", deny_unknown_fields)]
enum Request {
    Tokens { sentences: Vec<String> },
    Embed { batches: Vec<Vec<Vec<usize>>>, threads: usize, rounds: usize },
}

/// Answers until the input ends.
pub(crate) fn serve(embedder: &Embedder) -> Result<(), Fault> {
    let mut out = std::io::stdout().lock();
    let mut pool: Option<ThreadPool> = None;
    for line in std::io::stdin().lock().lines() {
        let answer = answer(embedder, &line?, &mut pool).unwrap_or_else(|error| json!({ "error": error.to_string() }));
        writeln!(out, "{answer}")?;
        out.flush()?;
    }
    Ok(())
}

fn answer(embedder: &Embedder, line: &str, pool: &mut Option<ThreadPool>) -> Result<Value, Fault> {
    match serde_json::from_str(line)? {
        Request::Tokens { sentences } => {
            let tokens: Vec<_> = sentences.iter().map(|text| embedder.wordpiece.encode(text)).collect();
            Ok(json!({ "tokens": tokens }))
        }
        Request::Embed { batches, threads, rounds } => {
            let pool = match pool.take().filter(|pool| pool.current_num_threads() == threads) {
                Some(same) => pool.insert(same),
                None => pool.insert(ThreadPoolBuilder::new().num_threads(threads).build()?),
            };
            let (mut times, mut vectors) = (Vec::new(), Vec::new());
            for _ in 0..rounds.max(1) {
                let start = Instant::now();
                vectors = pool.install(|| embed_all(embedder, &batches)).map_err(|error| error.to_string())?;
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
            times.sort_by(f64::total_cmp);
            let rows = |vectors: &Array2<f32>| vectors.outer_iter().map(|row| row.to_vec()).collect::<Vec<_>>();
            let embeddings: Vec<_> = vectors.iter().map(rows).collect();
            Ok(json!({ "median_ms": times[times.len() / 2], "min_ms": times[0], "embeddings": embeddings }))
        }
    }
}

fn embed_all(embedder: &Embedder, batches: &[Vec<Vec<usize>>]) -> Result<Vec<Array2<f32>>, String> {
    let embed = |batch: &Vec<Vec<usize>>| {
        let batch: Vec<&[usize]> = batch.iter().map(Vec::as_slice).collect();
        embedder.embed(&batch).map_err(|error| error.to_string())
    };
    batches.iter().map(embed).collect()
}
