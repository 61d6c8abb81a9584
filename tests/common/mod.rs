//! What the integration tests share: calls written once in `f64` and run in every way the crate can run them.

// Each test binary uses its own part of this module.
#![allow(dead_code)]

pub(crate) mod cases;
pub(crate) mod core;
pub(crate) mod layer;
pub(crate) mod layout;
pub(crate) mod masks;

use multihead::ndarray::{Array, Array3, Array4, ArrayD, ArrayRef, Dimension, IntoDimension};
use multihead::{Element, Path, Result};
use std::fmt;

/// Every implementation that a call can name.
pub(crate) const PATHS: [Path; 3] = [Path::Reference, Path::Dense, Path::Auto];

/// The type that a call is computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Precision {
    F32,
    F64,
}

/// Whether the call asks for the weights; without them another kernel may run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Keep {
    Weights,
    Nothing,
}

/// What a call returned, in `f64`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    /// Context of the core, output of a layer.
    pub(crate) out: ArrayD<f64>,
    pub(crate) lse: Array3<f64>,
    pub(crate) weights: Option<Array4<f64>>,
}

/// A call that can be made in both types and on every path.
pub(crate) trait Call {
    fn run<T: Element>(&self, path: Path, keep: Keep) -> Result<Answer>;

    /// The `_into` variant, into an array that held NaN before.
    fn run_into<T: Element>(&self, path: Path) -> Result<ArrayD<f64>>;

    fn run_in(&self, precision: Precision, path: Path, keep: Keep) -> Result<Answer> {
        match precision {
            Precision::F32 => self.run::<f32>(path, keep),
            Precision::F64 => self.run::<f64>(path, keep),
        }
    }

    fn run_into_in(&self, precision: Precision, path: Path) -> Result<ArrayD<f64>> {
        match precision {
            Precision::F32 => self.run_into::<f32>(path),
            Precision::F64 => self.run_into::<f64>(path),
        }
    }

    /// Checks the answer on every path, in both types, with and without weights. `_into` must give the same bits.
    fn everywhere(&self, check: impl Fn(&Run)) {
        for (path, precision) in ways() {
            for keep in [Keep::Weights, Keep::Nothing] {
                let answer = self.run_in(precision, path, keep).unwrap_or_else(|e| panic!("{path:?} {precision:?}: {e}"));
                assert_eq!(answer.weights.is_some(), keep == Keep::Weights, "{path:?} {precision:?}");
                check(&Run { path, precision, keep, answer });
            }
            let plain = self.run_in(precision, path, Keep::Nothing).map(|answer| answer.out);
            let into = self.run_into_in(precision, path);
            let (plain, into) = (plain.expect("ran above"), into.unwrap_or_else(|e| panic!("{path:?}: {e}")));
            assert_bits(&format!("{path:?} {precision:?} into"), &into, &plain);
        }
    }

    /// The answer of the plain loops in `f64`.
    fn oracle(&self) -> Answer {
        self.run::<f64>(Path::Reference, Keep::Weights).unwrap_or_else(|e| panic!("reference: {e}"))
    }

    /// Checks that the call is refused everywhere with this text.
    fn refused(&self, text: &str) {
        for (path, precision) in ways() {
            for keep in [Keep::Weights, Keep::Nothing] {
                let error = self.run_in(precision, path, keep).expect_err(text);
                assert_eq!(error.to_string(), text, "{path:?} {precision:?} {keep:?}");
            }
            assert_eq!(self.run_into_in(precision, path).expect_err(text).to_string(), text, "{path:?} into");
        }
    }
}

/// Every path in every type.
pub(crate) fn ways() -> impl Iterator<Item = (Path, Precision)> {
    PATHS.into_iter().flat_map(|path| [Precision::F32, Precision::F64].map(|precision| (path, precision)))
}

/// How far an answer may lie from the right one, relative plus absolute, in f32 and in f64.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Within(pub(crate) f64, pub(crate) f64);

/// Not at all.
pub(crate) const EXACTLY: Within = Within(0.0, 0.0);
/// Rounding of short sums.
pub(crate) const ROUNDING: Within = Within(1e-5, 1e-12);
/// Right values that are known to eight digits.
pub(crate) const PRINTED: Within = Within(1e-5, 1e-7);

/// One answer and how it was computed.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) path: Path,
    pub(crate) precision: Precision,
    pub(crate) keep: Keep,
    pub(crate) answer: Answer,
}

impl fmt::Display for Run {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?} keeping {:?}", self.path, self.precision, self.keep)
    }
}

impl Run {
    pub(crate) fn tolerance(&self, within: Within) -> f64 {
        match self.precision {
            Precision::F32 => within.0,
            Precision::F64 => within.1,
        }
    }

    /// The context or output, in logical order.
    #[track_caller]
    pub(crate) fn out(&self, want: &[f64], within: Within) {
        self.compare("out", self.answer.out.iter(), want, within);
    }

    #[track_caller]
    pub(crate) fn lse(&self, want: &[f64], within: Within) {
        self.compare("lse", self.answer.lse.iter(), want, within);
    }

    /// The weights, in the runs that keep them.
    #[track_caller]
    pub(crate) fn weights(&self, want: &[f64], within: Within) {
        if let Some(weights) = &self.answer.weights {
            self.compare("weights", weights.iter(), want, within);
        }
    }

    /// All answers against those of another call.
    #[track_caller]
    pub(crate) fn agrees(&self, want: &Answer, within: Within) {
        assert_eq!(self.answer.out.shape(), want.out.shape(), "{self}");
        self.compare("out", self.answer.out.iter(), &flat(&want.out), within);
        self.compare("lse", self.answer.lse.iter(), &flat(&want.lse), within);
        if let (Some(got), Some(want)) = (&self.answer.weights, &want.weights) {
            self.compare("weights", got.iter(), &flat(want), within);
        }
    }

    #[track_caller]
    fn compare<'a>(&self, name: &str, got: impl Iterator<Item = &'a f64>, want: &[f64], within: Within) {
        let got: Vec<f64> = got.copied().collect();
        assert_eq!(got.len(), want.len(), "{self}: {name} {got:?}");
        for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
            let fits = is_near(got, want, self.tolerance(within));
            assert!(fits, "{self}: {name}[{index}] is {got:e}, not {want:e}");
        }
    }
}

/// Relative plus absolute. NaN is right where any non-finite value is, infinities match themselves.
pub(crate) fn is_near(got: f64, want: f64, tolerance: f64) -> bool {
    match want {
        _ if want.is_nan() => !got.is_finite(),
        _ if want.is_infinite() => got == want,
        _ => (got - want).abs() <= tolerance * (1.0 + want.abs()),
    }
}

/// The same bits; all NaN count as one.
#[track_caller]
pub(crate) fn assert_bits<D: Dimension>(what: &str, got: &ArrayRef<f64, D>, want: &ArrayRef<f64, D>) {
    assert_eq!(got.shape(), want.shape(), "{what}");
    let bits = |x: f64| if x.is_nan() { f64::NAN.to_bits() } else { x.to_bits() };
    for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert_eq!(bits(got), bits(want), "{what}: element {index} is {got:e}, not {want:e}");
    }
}

/// The elements in logical order.
pub(crate) fn flat<D: Dimension>(array: &ArrayRef<f64, D>) -> Vec<f64> {
    array.iter().copied().collect()
}

/// The same numbers in another type.
pub(crate) fn typed<T: Element, D: Dimension>(array: &ArrayRef<f64, D>) -> Array<T, D> {
    array.mapv(T::from_f64)
}

/// The same numbers in `f64`.
pub(crate) fn widened<T: Element, D: Dimension>(array: &ArrayRef<T, D>) -> Array<f64, D> {
    array.mapv(Element::to_f64)
}

/// A stream of numbers in [-0.5, 0.5) that `f32` holds exactly, the same on every machine.
#[derive(Debug, Clone)]
pub(crate) struct Seeded(pub(crate) u64);

impl Seeded {
    pub(crate) fn draw(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 40) as f64 / f64::from(1 << 24) - 0.5
    }

    /// Filled in row-major order.
    pub(crate) fn array<D: Dimension>(&mut self, shape: impl IntoDimension<Dim = D>) -> Array<f64, D> {
        Array::from_shape_simple_fn(shape.into_dimension(), || self.draw())
    }
}
