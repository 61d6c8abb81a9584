//! The models of `examples/models` on the tiny checkpoints of `tests/models`: what comes out of the whole model, in `f32`,
//! lies within 1e-4 of the largest right number, which PyTorch computed in `f64`.

#![cfg(feature = "safetensors")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../examples/models/bert.rs"]
mod bert;
#[path = "../examples/models/checkpoint.rs"]
mod checkpoint;
#[path = "../examples/models/detr.rs"]
mod detr;
#[path = "../examples/models/gpt2.rs"]
mod gpt2;
#[path = "../examples/models/llama.rs"]
mod llama;
#[path = "../examples/models/t5.rs"]
mod t5;
#[path = "../examples/models/transformer.rs"]
mod transformer;
#[path = "../examples/models/vit.rs"]
mod vit;

use checkpoint::Checkpoint;
use multihead::Mask;
use multihead::io::Tensors;
use multihead::ndarray::{Array2, Array3, ArrayRef3, Axis, Ix3, Ix4, Zip, s};
use safetensors::tensor::{Dtype, SafeTensors};
use std::path::Path;

const TOLERANCE: f64 = 1e-4;

/// The bytes of a file and what is in them.
struct Case {
    bytes: Vec<u8>,
}

impl Case {
    fn new(name: &str) -> Self {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/models");
        Self { bytes: std::fs::read(folder.join(name).with_extension("safetensors")).unwrap() }
    }

    fn file(&self) -> Checkpoint<'_> {
        Checkpoint::new(&self.bytes, None).unwrap()
    }

    /// Integers, `[batch, len]`.
    fn ids(&self, name: &str) -> Array2<usize> {
        let tensors = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = tensors.tensor(name).unwrap();
        assert_eq!(tensor.dtype(), Dtype::I64);
        let ids = tensor.data().as_chunks().0.iter().map(|&bytes| usize::try_from(i64::from_le_bytes(bytes)).unwrap());
        Array2::from_shape_vec((tensor.shape()[0], tensor.shape()[1]), ids.collect()).unwrap()
    }

    /// Compares the tokens that `is_compared` names.
    fn check_where(&self, name: &str, got: &ArrayRef3<f32>, is_compared: impl Fn(usize, usize) -> bool) {
        let want: Array3<f64> = Tensors::from_bytes(&self.bytes).unwrap().get(&format!("want.{name}")).unwrap();
        assert_eq!(got.shape(), want.shape(), "{name}");
        let largest = want.iter().fold(0.0, |largest: f64, x| largest.max(x.abs()));
        let mut worst = 0.0f64;
        Zip::indexed(got.view()).and(&want).for_each(|(b, i, _), &got, want| {
            let error = (f64::from(got) - want).abs() / largest;
            if is_compared(b, i) {
                worst = if error.is_nan() { f64::INFINITY } else { worst.max(error) };
            }
        });
        println!("{name}: {worst:e}");
        assert!(worst < TOLERANCE, "{name}: {worst:e}");
    }

    fn check(&self, name: &str, got: &ArrayRef3<f32>) {
        self.check_where(name, got, |_, _| true);
    }
}

#[test]
fn bert() {
    let case = Case::new("bert");
    let ids = case.ids("input.input_ids");
    let lengths = case.ids("input.attention_mask").sum_axis(Axis(1)).to_vec();
    assert!(lengths.iter().any(|&length| length < ids.ncols()), "expected padding in {lengths:?}");
    let model = bert::Bert::load(&case.file()).unwrap();
    let places = Array2::from_shape_fn(ids.dim(), |(_, i)| i);
    let padding = Mask::key_lengths(&lengths);
    let x = model.forward(&ids, &places, &padding).unwrap();
    // What stands at padding attends to the tokens too.
    case.check("last_hidden_state", &x);

    // Padding changes nothing for a token, whatever stands there.
    let mut other = ids.clone();
    for (b, &length) in lengths.iter().enumerate() {
        other.slice_mut(s![b, length..]).fill(7);
    }
    let y = model.forward(&other, &places, &padding).unwrap();
    case.check_where("last_hidden_state", &y, |b, i| i < lengths[b]);
    assert!(model.forward(&ids.mapv(|id| id + 64), &places, &padding).is_err());

    // Nor is there a difference without it, in one batch entry of all tokens.
    let kept = |from: &Array2<usize>| {
        let kept: Vec<usize> = from.indexed_iter().filter(|((b, i), _)| *i < lengths[*b]).map(|(_, &x)| x).collect();
        Array2::from_shape_vec((1, kept.len()), kept).unwrap()
    };
    let packed = model.forward(&kept(&ids), &kept(&places), &Mask::segments(&lengths)).unwrap();
    let mut z = x.clone();
    let mut start = 0;
    for (b, &length) in lengths.iter().enumerate() {
        z.slice_mut(s![b, ..length, ..]).assign(&packed.slice(s![0, start..start + length, ..]));
        start += length;
    }
    case.check("last_hidden_state", &z);
}

/// Tokens that follow with a cache are those that follow without.
fn check_generation(
    ids: &Array2<usize>,
    generate: impl Fn(&Array2<usize>, usize) -> Result<Array2<usize>, checkpoint::Fault>,
    logits: impl Fn(&Array2<usize>) -> Result<Array3<f32>, checkpoint::Fault>,
) {
    let prompt = ids.slice(s![.., ..5]).to_owned();
    let tokens = generate(&prompt, 12).unwrap();
    assert_eq!(tokens.shape(), [ids.nrows(), 17]);
    assert_eq!(tokens.slice(s![.., ..5]), prompt);
    let logits = logits(&tokens).unwrap();
    for ((b, i), &token) in tokens.indexed_iter().filter(|((_, i), _)| *i >= 5) {
        let row = logits.slice(s![b, i - 1, ..]);
        let likeliest = row.iter().fold(f32::MIN, |most, &x| most.max(x));
        assert!(row[token] >= likeliest - 1e-4, "{b} {i}: {} {likeliest}", row[token]);
    }
}

#[test]
fn gpt2() {
    let case = Case::new("gpt2");
    let ids = case.ids("input.input_ids");
    let model = gpt2::Gpt2::load(&case.file()).unwrap();
    case.check("logits", &model.logits(&ids).unwrap());
    check_generation(&ids, |ids, count| model.generate(ids, count), |ids| model.logits(ids));
}

#[test]
fn llama_and_its_relatives() {
    for name in ["llama_gqa", "llama31_scaled_rope", "mistral_window", "qwen3_qk_norm"] {
        println!("{name}");
        let case = Case::new(name);
        let ids = case.ids("input.input_ids");
        let model = llama::Llama::load(&case.file()).unwrap();
        case.check("logits", &model.logits(&ids).unwrap());
        check_generation(&ids, |ids, count| model.generate(ids, count), |ids| model.logits(ids));
    }
}

#[test]
fn vit() {
    let case = Case::new("vit");
    let file = case.file();
    let model = vit::Vit::load(&file).unwrap();
    case.check("last_hidden_state", &model.forward(&file.tensor::<Ix4>("input.pixel_values").unwrap()).unwrap());
}

#[test]
fn t5() {
    let case = Case::new("t5_relative");
    let model = t5::T5::load(&case.file()).unwrap();
    let ids = case.ids("input.input_ids");
    let memory = model.encode(&ids).unwrap();
    case.check("encoder_last_hidden_state", &memory);
    case.check("last_hidden_state", &model.decode(&case.ids("input.decoder_input_ids"), &memory).unwrap());

    // With caches the same tokens follow as without.
    let tokens = model.generate(&ids, 6).unwrap();
    let logits = model.logits(&model.decode(&tokens, &memory).unwrap()).unwrap();
    for ((b, i), &token) in tokens.indexed_iter().filter(|((_, i), _)| *i > 0) {
        let row = logits.slice(s![b, i - 1, ..]);
        assert!(row.iter().all(|&x| x <= row[token] + 1e-4), "{b} {i}");
    }
}

#[test]
fn transformer() {
    let case = Case::new("torch_transformer");
    let file = case.file();
    let model = transformer::Transformer::load(&file, transformer::NUM_HEADS).unwrap();
    let [source, target] = ["input.src", "input.tgt"].map(|name| file.tensor::<Ix3>(name).unwrap());
    let (memory, output) = model.forward(&source, &target).unwrap();
    case.check("memory", &memory);
    case.check("out", &output);
}

#[test]
fn detr() {
    let case = Case::new("detr");
    let file = case.file();
    let model = detr::Detr::load(&file).unwrap();
    let [features, places] =
        ["attn.0.hidden_states", "attn.0.position_embeddings"].map(|name| file.tensor::<Ix3>(name).unwrap());
    let (memory, objects) = model.forward(&features, &places).unwrap();
    case.check("encoder_last_hidden_state", &memory);
    case.check("last_hidden_state", &objects);
}

#[test]
fn faults_name_what_is_missing() {
    let case = Case::new("gpt2");
    let text = llama::Llama::load(&case.file()).err().unwrap().to_string();
    assert_eq!(text, "config rms_norm_eps: expected a number");
    let config = r#"{"rms_norm_eps": 1e-6, "hidden_act": "silu", "num_hidden_layers": 1, "model_type": "llama"}"#;
    let file = Checkpoint::new(&case.bytes, Some(config)).unwrap();
    assert_eq!(file.family(), Some("llama"));
    let text = llama::Llama::load(&file).err().unwrap().to_string();
    assert_eq!(text, "model.layers.0.input_layernorm.weight: expected in the file, got no such tensor");
}
