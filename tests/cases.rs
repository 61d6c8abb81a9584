//! Known answers: every case file of `tests/cases` and of the folder that `MULTIHEAD_CASES` names, on every path, in
//! `f32` and `f64`, with and without weights. `cargo test --test cases -- --nocapture` shows what was compared.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::cases::{Case, Fault, Op, Want};
use common::folder::check_files;
use common::gradients::gradient_ways;
use common::{Answer, Call, PATHS, Precision, Via, Way, ways};
use multihead::ndarray::{Array, ArrayD, Dimension};
use std::collections::{HashMap, HashSet};
use std::fs;
use std::path::Path;

/// What a folder's files amounted to.
#[derive(Default)]
struct Tally {
    files: usize,
    answers: usize,
    worst: (f64, String),
    left_out: Vec<String>,
    faults: Vec<String>,
}

impl Tally {
    fn file(&mut self, name: &str, bytes: &[u8]) -> Result<(), Fault> {
        let case = Case::parse(bytes)?;
        if let Some(part) = case.left_out() {
            self.left_out.push(format!("{name} ({part})"));
            return Ok(());
        }
        let before = self.answers;
        let wants: Vec<&Want> = case.wants.iter().filter(|want| !want.is_left_out(case.op)).collect();
        let (gradients, outputs): (Vec<&Want>, Vec<&Want>) = wants.into_iter().partition(|want| want.is_gradient());
        match case.op {
            Op::Attention => {
                let core = case.core()?;
                self.call(name, &core, &outputs)?;
                if let Some(d_out) = d_out(&case, &gradients)? {
                    self.gradients(name, &gradients, |way| {
                        let gradients = core.gradients(way, &d_out).map_err(|e| e.to_string())?;
                        Ok(common::gradients::named(&gradients).into_iter().map(|(n, d)| (n.to_owned(), d)).collect())
                    })?;
                }
            }
            Op::Layer => {
                let layer = case.layer()?;
                self.call(name, &layer, &outputs)?;
                if let Some(d_out) = d_out(&case, &gradients)? {
                    self.gradients(name, &gradients, |way| {
                        layer.gradients(way, &d_out).map_err(|e| e.to_string()).map(HashMap::from_iter)
                    })?;
                }
            }
        }
        if self.answers == before {
            return Err("no answer to compare".to_owned());
        }
        self.files += 1;
        Ok(())
    }

    fn call(&mut self, file: &str, call: &impl Call, wants: &[&Want]) -> Result<(), Fault> {
        let mut compared = HashSet::new();
        for way in ways() {
            let answer = call.answer(way).map_err(|e| format!("{way}: {e}"))?;
            for want in wants {
                let Some(got) = named(&answer, &want.name)? else { continue };
                self.compare(file, way, want, &got);
                compared.insert((&want.name, way.path, way.via == Via::Cache, way.precision));
            }
        }
        self.answers += compared.len();
        Ok(())
    }

    fn gradients(
        &mut self,
        file: &str,
        wants: &[&Want],
        gradients: impl Fn(Way) -> Result<HashMap<String, ArrayD<f64>>, Fault>,
    ) -> Result<(), Fault> {
        let mut compared = HashSet::new();
        for way in gradient_ways() {
            let gradients = gradients(way).map_err(|e| format!("{way}: {e}"))?;
            for want in wants {
                let got = gradients.get(&want.name).ok_or(format!("nothing returns {}", want.name))?;
                self.compare(file, way, want, got);
                compared.insert((&want.name, way.path, way.precision));
            }
        }
        self.answers += compared.len();
        Ok(())
    }

    fn compare(&mut self, file: &str, way: Way, want: &Want, got: &ArrayD<f64>) {
        let what = format!("{file}:{}", want.name);
        match ratio(got, want, way.precision) {
            Ok(ratio) if ratio > self.worst.0 || self.worst.1.is_empty() => self.worst = (ratio, what),
            Ok(_) => {}
            Err(fault) => self.faults.push(format!("{what} {way}: {fault}")),
        }
    }
}

/// The gradient of the output, which a file with gradients has.
fn d_out<D: Dimension>(case: &Case, gradients: &[&Want]) -> Result<Option<Array<f64, D>>, Fault> {
    match case.d_out()? {
        None if !gradients.is_empty() => Err("gradients without d_out".to_owned()),
        d_out => Ok(d_out),
    }
}

/// The answer by its name in the file; `None` for weights that the call was not asked for.
fn named(answer: &Answer, name: &str) -> Result<Option<ArrayD<f64>>, Fault> {
    match name {
        "out" => Ok(Some(answer.out.clone())),
        "lse" => Ok(Some(answer.lse.clone().into_dyn())),
        "weights" => Ok(answer.weights.clone().map(|weights| weights.into_dyn())),
        other => Err(format!("nothing returns {other}")),
    }
}

/// Largest error over tolerance; an error text where it is above 1 or a number is of another kind than the right one.
fn ratio(got: &ArrayD<f64>, want: &Want, precision: Precision) -> Result<f64, Fault> {
    if got.shape() != want.values.shape() {
        return Err(format!("shape {:?}, not {:?}", got.shape(), want.values.shape()));
    }
    let tolerance = want.tolerance[usize::from(precision == Precision::F64)];
    let mut worst: f64 = 0.0;
    for ((index, &right), &got) in want.values.indexed_iter().zip(got) {
        let error = match right {
            _ if right.is_nan() && !got.is_finite() => 0.0,
            _ if right == got => 0.0,
            _ if right.is_finite() => (got - right).abs() / tolerance,
            _ => f64::INFINITY,
        };
        if error.is_nan() || error > 1.0 {
            return Err(format!("{:?} is {got:e}, not {right:e} within {tolerance:e}", index.slice()));
        }
        worst = worst.max(error);
    }
    Ok(worst)
}

fn run(folder: &Path) -> Tally {
    let mut tally = Tally::default();
    let faults = check_files(folder, |name, bytes| tally.file(name, bytes));
    tally.faults.extend(faults);
    if tally.answers == 0 {
        tally.faults.push(format!("{}: nothing was compared", folder.display()));
    }
    tally
}

/// Runs a folder and says in one line what was compared.
fn check(folder: &Path) {
    let Tally { files, answers, worst: (ratio, worst), left_out, faults } = run(folder);
    let paths = format!("{},Cache", PATHS.map(|path| format!("{path:?}")).join(","));
    let folder = folder.display();
    println!(
        "cases: {files} files, {answers} answers compared on paths {paths}, \
         worst ratio to tolerance {ratio:.3} in {worst}, folder {folder}"
    );
    if !left_out.is_empty() {
        println!("left out: {}", left_out.join(", "));
    }
    assert!(faults.is_empty(), "{} faults:\n{}", faults.len(), faults.join("\n"));
}

fn own_folder() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases"))
}

#[test]
fn own_cases_match() {
    check(own_folder());
}

#[test]
fn cases_of_the_named_folder_match() {
    if let Some(folder) = std::env::var_os("MULTIHEAD_CASES") {
        check(Path::new(&folder));
    }
}

mod runner {
    //! The runner itself: what it must refuse.

    use super::*;
    use safetensors::tensor::{Dtype, SafeTensors, TensorView, serialize};

    /// `plain.safetensors` with some metadata replaced and one tensor of three bytes added.
    fn altered(metadata: &[(&str, &str)], tensor: Option<&str>) -> Vec<u8> {
        let bytes = fs::read(own_folder().join("plain.safetensors")).unwrap();
        let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
        let mut texts: HashMap<String, String> = header.metadata().clone().unwrap();
        texts.extend(metadata.iter().map(|&(key, text)| (key.to_owned(), text.to_owned())));
        let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
        let extra = tensor.map(|name| (name.to_owned(), TensorView::new(Dtype::U8, vec![3], &[1, 0, 1]).unwrap()));
        tensors.extend(extra);
        serialize(tensors, Some(texts)).unwrap()
    }

    fn fault(metadata: &[(&str, &str)], tensor: Option<&str>) -> String {
        Tally::default().file("plain", &altered(metadata, tensor)).unwrap_err()
    }

    #[test]
    fn unknown_things_are_faults() {
        assert_eq!(Tally::default().file("plain", &altered(&[], None)), Ok(()));
        assert_eq!(fault(&[("op", "convolution")], None), "unknown op convolution");
        assert_eq!(fault(&[("device", "cpu")], None), "unknown metadata device");
        assert_eq!(fault(&[("config", r#"{"causal": null, "dropout": 0.5}"#)], None), "unknown config key dropout");
        assert_eq!(fault(&[("config", r#"{"causal": "diagonal"}"#)], None), r#"config causal: unknown "diagonal""#);
        assert_eq!(fault(&[("config", r#"{"d_model": 8}"#)], None), "unknown config key d_model");
        assert_eq!(fault(&[("config", r#"{"window": {"top": 1}}"#)], None), "unknown window side top");
        assert_eq!(fault(&[], Some("segments")), "unknown tensor segments");
        assert_eq!(fault(&[], Some("want.entropy")), "unknown answer entropy");
        assert_eq!(fault(&[], Some("want.d_segments")), "unknown answer d_segments");
        assert_eq!(fault(&[], Some("keep")), "keep: ShapeError/IncompatibleShape: incompatible shapes");
        assert_eq!(fault(&[("tolerance", r#"{"out": 1}"#)], None), "no tolerance for d_k");
        assert!(Tally::default().file("noise", &[7; 40]).is_err());
    }

    #[test]
    fn wrong_answers_are_faults() {
        let mut tally = Tally::default();
        let scaled = altered(&[("config", r#"{"scale": 0.3535}"#)], None);
        tally.file("plain", &scaled).unwrap();
        assert!(tally.faults.iter().any(|fault| fault.starts_with("plain:out Reference F64 with weights:")));
        assert!(tally.faults.iter().any(|fault| fault.starts_with("plain:lse Dense F32:")));
    }

    #[test]
    fn an_empty_or_missing_folder_is_a_fault() {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("no_cases");
        fs::create_dir_all(&folder).unwrap();
        assert!(run(&folder).faults[0].ends_with("no_cases: nothing was compared"));
        assert!(!run(&folder.join("missing")).faults.is_empty());
    }

    #[test]
    fn kinds_of_numbers_do_not_mix() {
        let compare = |got: f64, right: f64| {
            let values = ArrayD::from_elem(vec![1], right);
            let want = Want { name: "out".to_owned(), values, tolerance: [0.5, 0.25] };
            ratio(&ArrayD::from_elem(vec![1], got), &want, Precision::F64)
        };
        let infinity = f64::INFINITY;
        assert_eq!(compare(1.125, 1.0), Ok(0.5));
        assert_eq!(compare(-infinity, -infinity), Ok(0.0));
        assert_eq!(compare(infinity, f64::NAN), Ok(0.0));
        for (got, right) in [(1.5, 1.0), (f64::NAN, 1.0), (infinity, 1.0), (0.0, f64::NAN), (-infinity, infinity)] {
            assert!(compare(got, right).is_err(), "{got} for {right}");
        }
        assert!(compare(f64::NAN, infinity).is_err());
    }
}
