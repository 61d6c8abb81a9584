//! Attention modules of whole models: every file of `tests/models` and of the folder that `MULTIHEAD_MODELS` names, with
//! the file's own tensors. Each output must lie within 2e-5 of the largest one, on every path, in `f32` and `f64`.
//! `cargo test --test models -- --nocapture` shows what was compared.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
#![cfg(feature = "safetensors")]

mod common;

use common::cases::Fault;
use common::folder::check_files;
use common::models::{File, Pair, error_of};
use common::ways;
use std::collections::HashSet;
use std::fs;
use std::path::Path;

/// Largest error over the largest right number.
const TOLERANCE: f64 = 2e-5;

/// What a folder's files amounted to.
#[derive(Default)]
struct Tally {
    files: usize,
    modules: usize,
    worst: (f64, String),
    faults: Vec<String>,
}

impl Tally {
    fn file(&mut self, file: &str, bytes: &[u8]) -> Result<(), Fault> {
        let mut compared = HashSet::new();
        for part in File::parse(bytes)?.parts()? {
            for way in ways() {
                for Pair { name, got, want } in part.pairs(way)? {
                    let ratio = error_of(&got, &want).map_err(|fault| format!("{name}: {fault}"))? / TOLERANCE;
                    if ratio > 1.0 {
                        self.faults.push(format!("{file}:{name} {way}: error {:e}", ratio * TOLERANCE));
                    } else if ratio > self.worst.0 || self.worst.1.is_empty() {
                        self.worst = (ratio, format!("{file}:{name}"));
                    }
                    compared.insert((name, way.precision));
                }
            }
        }
        if compared.is_empty() {
            return Err("nothing to compare".to_owned());
        }
        self.files += 1;
        // Each in two types; of an encoder-decoder whose modules are not in the file, the output of each stack.
        self.modules += compared.len() / 2;
        Ok(())
    }
}

fn run(folder: &Path) -> Tally {
    let mut tally = Tally::default();
    let faults = check_files(folder, |name, bytes| tally.file(name, bytes));
    tally.faults.extend(faults);
    if tally.modules == 0 {
        tally.faults.push(format!("{}: nothing was compared", folder.display()));
    }
    tally
}

/// Runs a folder and says in one line what was compared.
fn check(folder: &Path) {
    let Tally { files, modules, worst: (ratio, worst), faults } = run(folder);
    let folder = folder.display();
    println!("models: {files} files, {modules} modules compared, worst ratio {ratio:.3} in {worst}, folder {folder}");
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn own_folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models"))
}

#[test]
fn own_models_match() {
    check(own_folder());
}

#[test]
fn models_of_the_named_folder_match() {
    if let Some(folder) = std::env::var_os("MULTIHEAD_MODELS") {
        check(Path::new(&folder));
    }
}

mod runner {
    //! The runner itself: what it must refuse.

    use super::*;
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};
    use std::collections::HashMap;

    /// A file with some metadata replaced, and a tensor added or put in the place of another.
    fn altered(file: &str, metadata: &[(&str, &str)], tensor: Option<(&str, Vec<usize>, &[u8])>) -> Vec<u8> {
        let bytes = fs::read(own_folder().join(file)).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut texts: HashMap<String, String> = header.metadata().clone().unwrap();
        texts.extend(metadata.iter().map(|&(key, text)| (key.to_owned(), text.to_owned())));
        let mut tensors: Vec<_> = SafeTensors::deserialize(&bytes).unwrap().tensors();
        if let Some((name, shape, data)) = tensor {
            tensors.retain(|(other, _)| other != name);
            tensors.push((name.to_owned(), TensorView::new(Dtype::F32, shape, data).unwrap()));
        }
        serialize(tensors, Some(texts)).unwrap()
    }

    fn fault(file: &str, metadata: &[(&str, &str)], tensor: Option<(&str, Vec<usize>, &[u8])>) -> String {
        Tally::default().file(file, &altered(file, metadata, tensor)).unwrap_err()
    }

    #[test]
    fn unknown_things_are_faults() {
        let llama = "llama_gqa.safetensors";
        assert_eq!(Tally::default().file(llama, &altered(llama, &[], None)), Ok(()));
        assert_eq!(fault(llama, &[("family", "mamba")], None), "unknown family mamba");
        let argument = ("attn.0.cache", vec![1], &[0; 4][..]);
        assert_eq!(fault(llama, &[], Some(argument)), "unknown argument cache");
        let input = ("input.need_weights", vec![1], &[0; 4][..]);
        assert_eq!(fault("torch_mha.safetensors", &[], Some(input)), "unknown input need_weights");
        let config = r#"{"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "longrope"}}"#;
        assert_eq!(fault(llama, &[("config", config)], None), r#"rope_type: unknown Some("longrope")"#);
        let window = config.replace("longrope", "default").replace("8,", r#"8, "sliding_window": 3,"#);
        let text = "attn.0.attention_mask is not causal & window(2, 0)";
        assert_eq!(fault(llama, &[("config", &window)], None), text);
        let text = "layers.0.attention.q_proj.weight: expected in the file, got no such tensor";
        assert_eq!(fault(llama, &[("family", "vit")], None), text);
        assert!(Tally::default().file("noise", &[7; 40]).is_err());
    }

    #[test]
    fn wrong_answers_are_faults() {
        let file = "llama_gqa.safetensors";
        for (from, to) in
            [("10000.0", "500000.0"), ("\"head_dim\": 8", "\"head_dim\": 8, \"query_pre_attn_scalar\": 9")]
        {
            let bytes = fs::read(own_folder().join(file)).unwrap();
            let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
            let config = header.metadata().as_ref().unwrap()["config"].replace(from, to);
            let mut tally = Tally::default();
            tally.file(file, &altered(file, &[("config", &config)], None)).unwrap();
            assert!(tally.faults.iter().any(|fault| fault.starts_with("llama_gqa.safetensors:attn.0 Tiled F32")));
        }
    }

    #[test]
    fn an_empty_or_missing_folder_is_a_fault() {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_models");
        fs::create_dir_all(&folder).unwrap();
        assert!(run(&folder).faults[0].ends_with("no_models: nothing was compared"));
        assert!(!run(&folder.join("missing")).faults.is_empty());
    }
}
