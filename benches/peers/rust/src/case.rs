//! A request, and the inputs that its fixed generator gives.

use serde::Deserialize;

/// What a call that does not exist for a case answers; the driver shows a dash.
pub fn unsupported(what: &str) -> String {
    format!("unsupported: {what}")
}

/// A request; an unknown key is an error, so that a case is never run as another one.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Case {
    pub op: String,
    #[serde(default = "one")]
    pub batch: usize,
    #[serde(default = "one")]
    pub heads: usize,
    #[serde(default)]
    pub kv_heads: usize,
    #[serde(default)]
    pub q_len: usize,
    #[serde(default)]
    pub kv_len: usize,
    #[serde(default)]
    pub head_dim: usize,
    #[serde(default)]
    pub value_dim: usize,
    #[serde(default)]
    pub len: usize,
    #[serde(default)]
    pub d_model: usize,
    #[serde(default)]
    pub causal: bool,
    #[serde(default = "f32_name")]
    pub dtype: String,
    #[serde(default = "one")]
    pub threads: usize,
    #[serde(default = "one")]
    pub rounds: usize,
    pub mask: Option<Mask>,
    #[serde(default)]
    pub bias: bool,
    pub pass: Option<String>,
    /// What a cache keeps its numbers in, for decoding.
    pub cache: Option<String>,
    /// Keys of each batch entry, where they are not `kv_len` for all.
    pub kv_lens: Option<Vec<usize>>,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Mask {
    Lengths { fraction: f64 },
    Keep { density: f64, block: usize },
}

fn one() -> usize {
    1
}

fn f32_name() -> String {
    "f32".into()
}

/// Which input an array is; the number is its seed.
#[derive(Debug, Clone, Copy)]
pub enum Seed {
    Q = 1,
    K = 2,
    V = 3,
    X = 4,
    Bias = 6,
    Keep = 9,
    WeightQ = 11,
    WeightK = 12,
    WeightV = 13,
    WeightO = 14,
}

/// Element `index` of the array with this seed: splitmix64 to a number of mean 0 and variance 1.
fn draw(index: usize, seed: Seed) -> f64 {
    let mut z = (index as u64 + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(seed as u64);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    ((z >> 40) as f64 / f64::from(1 << 24) - 0.5) * 12f64.sqrt()
}

/// `count` elements of an input; `factor` scales weights.
pub fn values(count: usize, seed: Seed, factor: f64) -> Vec<f32> {
    (0..count).map(|i| (draw(i, seed) * factor) as f32).collect()
}

/// A layer's weights, each `[in, out]`: W_Q, W_K, W_V, W_O.
pub struct Weights {
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub o: Vec<f32>,
}

impl Case {
    /// Reads a request; a layer's lengths and head size are filled in.
    pub fn parse(line: &str) -> Result<Self, String> {
        let mut case: Case = serde_json::from_str(line).map_err(|e| e.to_string())?;
        if !matches!(case.pass.as_deref(), None | Some("forward" | "decode")) {
            return Err(unsupported("this pass"));
        }
        if case.dtype != "f32" || !matches!(case.cache.as_deref(), None | Some("f32")) {
            return Err(unsupported("only f32 is compared"));
        }
        if case.kv_lens.is_some() {
            return Err(unsupported("entries of unlike lengths"));
        }
        if case.kv_heads == 0 {
            case.kv_heads = case.heads;
        }
        match case.op.as_str() {
            "attention" => {
                if case.value_dim == 0 {
                    case.value_dim = case.head_dim;
                }
            }
            "layer" => {
                (case.q_len, case.kv_len) = (case.len, case.len);
                case.head_dim = case.d_model.checked_div(case.heads).unwrap_or(0);
                case.value_dim = case.head_dim;
            }
            other => return Err(unsupported(&format!("op {other}"))),
        }
        if case.heads == 0 || !case.heads.is_multiple_of(case.kv_heads) {
            return Err("heads must be a multiple of kv_heads".into());
        }
        if matches!(case.mask, Some(Mask::Keep { density, .. }) if density != 0.5) {
            return Err("mask density: the generator's sign gives 0.5 and nothing else".into());
        }
        if case.causal && (case.q_len > case.kv_len || case.q_len < case.kv_len && !case.decodes()) {
            return Err(unsupported("causal with different numbers of queries and keys"));
        }
        Ok(case)
    }

    /// Whether the queries are those of new tokens, and the keys are in a cache.
    pub fn decodes(&self) -> bool {
        self.pass.as_deref() == Some("decode")
    }

    pub fn is_layer(&self) -> bool {
        self.op == "layer"
    }

    pub fn group_size(&self) -> usize {
        self.heads / self.kv_heads
    }

    pub fn scale(&self) -> f64 {
        (self.head_dim as f64).powf(-0.5)
    }

    pub fn q(&self) -> Vec<f32> {
        values(self.batch * self.heads * self.q_len * self.head_dim, Seed::Q, 1.0)
    }

    pub fn k(&self) -> Vec<f32> {
        values(self.batch * self.kv_heads * self.kv_len * self.head_dim, Seed::K, 1.0)
    }

    pub fn v(&self) -> Vec<f32> {
        values(self.batch * self.kv_heads * self.kv_len * self.value_dim, Seed::V, 1.0)
    }

    pub fn x(&self) -> Vec<f32> {
        values(self.batch * self.len * self.d_model, Seed::X, 1.0)
    }

    pub fn weights(&self) -> Weights {
        let factor = (self.d_model as f64).powf(-0.5);
        let keys = self.d_model * self.kv_heads * self.head_dim;
        let queries = self.d_model * self.heads * self.head_dim;
        Weights {
            q: values(queries, Seed::WeightQ, factor),
            k: values(keys, Seed::WeightK, factor),
            v: values(keys, Seed::WeightV, factor),
            o: values(queries, Seed::WeightO, factor),
        }
    }

    pub fn bias(&self) -> Option<Vec<f32>> {
        self.bias.then(|| values(self.q_len * self.kv_len, Seed::Bias, 1.0))
    }

    /// Whether the mask, without the causal rule, lets query i see key j.
    fn kept(&self, i: usize, j: usize) -> bool {
        match self.mask {
            None => true,
            Some(Mask::Lengths { fraction }) => j < (self.kv_len as f64 * fraction) as usize,
            Some(Mask::Keep { block, .. }) => draw(i / block * 65536 + j / block, Seed::Keep) >= 0.0,
        }
    }

    /// One flag for each pair `[q_len, kv_len]`, true where the query sees the key; with the causal rule if asked.
    pub fn keep(&self, with_causal: bool) -> Vec<bool> {
        let offset = self.kv_len.saturating_sub(self.q_len);
        let seen = |i: usize, j: usize| self.kept(i, j) && (!with_causal || j <= i + offset);
        (0..self.q_len * self.kv_len).map(|at| seen(at / self.kv_len, at % self.kv_len)).collect()
    }

    /// Bias and mask as one additive array `[q_len, kv_len]`; nothing if there is nothing to add.
    pub fn additive(&self, with_causal: bool, masked: f32) -> Option<Vec<f32>> {
        if self.mask.is_none() && !self.bias && !(with_causal && self.causal) {
            return None;
        }
        let mut added = self.bias().unwrap_or_else(|| vec![0.0; self.q_len * self.kv_len]);
        for (value, seen) in added.iter_mut().zip(self.keep(with_causal && self.causal)) {
            if !seen {
                *value = masked;
            }
        }
        Some(added)
    }

    /// FLOPs of visible pairs and projections.
    pub fn flop(&self) -> f64 {
        let pairs = match (self.mask, self.causal) {
            (None, false) => self.q_len * self.kv_len,
            _ => self.keep(self.causal).into_iter().filter(|&seen| seen).count(),
        };
        let attention = 2 * self.heads * pairs * (self.head_dim + self.value_dim);
        let width = (self.heads + self.kv_heads) * (self.head_dim + self.value_dim);
        let projections = if self.is_layer() { 2 * self.len * self.d_model * width } else { 0 };
        (self.batch * (attention + projections)) as f64
    }
}

/// `[batch, heads, len, size]` to `[batch, len, heads, size]`, in memory.
pub fn heads_inside(values: &[f32], batch: usize, heads: usize, len: usize, size: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(values.len());
    for b in 0..batch {
        for i in 0..len {
            for h in 0..heads {
                let at = ((b * heads + h) * len + i) * size;
                out.extend_from_slice(&values[at..at + size]);
            }
        }
    }
    out
}

/// `[rows, columns]` transposed, in memory.
pub fn transposed(values: &[f32], columns: usize) -> Vec<f32> {
    let rows = values.len() / columns;
    (0..values.len()).map(|at| values[at % rows * columns + at / rows]).collect()
}
