//! What the integration tests share: calls written once in `f64` and run in every way the crate can run them.

// Each test binary uses its own part of this module.
#![allow(dead_code)]

pub(crate) mod blocks;
pub(crate) mod cases;
pub(crate) mod core;
pub(crate) mod distances;
#[cfg(feature = "safetensors")]
pub(crate) mod families;
pub(crate) mod folder;
pub(crate) mod gradients;
pub(crate) mod layer;
pub(crate) mod layout;
pub(crate) mod masks;
#[cfg(feature = "safetensors")]
pub(crate) mod models;
pub(crate) mod recipe;
pub(crate) mod train;
#[cfg(feature = "safetensors")]
pub(crate) mod transformer;

use multihead::ndarray::{Array, Array3, Array4, ArrayD, ArrayRef, Dimension, IntoDimension};
use multihead::{Element, Level, Options, Path, Result};
use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestRunner};
use std::fmt;

/// Every implementation that a call can name.
pub(crate) const PATHS: [Path; 4] = [Path::Reference, Path::Dense, Path::Tiled, Path::Auto];

/// Whether the path can return the weights.
pub(crate) fn gives_weights(path: Path) -> bool {
    path != Path::Tiled
}

/// The type that a call is computed in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
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

/// Where the keys and values come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Via {
    Arrays,
    /// As many as there are queries come with them, the earlier ones are in the cache by then.
    Cache,
}

/// How a call is computed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Way {
    pub(crate) precision: Precision,
    pub(crate) path: Path,
    pub(crate) level: Option<Level>,
    pub(crate) query_tile: Option<usize>,
    pub(crate) keep: Keep,
    pub(crate) via: Via,
}

impl Way {
    pub(crate) const ORACLE: Self = Self::new(Precision::F64, Path::Reference, Keep::Weights);

    pub(crate) const fn new(precision: Precision, path: Path, keep: Keep) -> Self {
        Self { precision, path, level: None, query_tile: None, keep, via: Via::Arrays }
    }

    /// These options, computed this way.
    pub(crate) fn choose<'a, T: Element>(self, options: Options<'a, T>) -> Options<'a, T> {
        let mut options = options.path(self.path);
        if let Some(level) = self.level {
            options = options.level(level);
        }
        if let Some(query_tile) = self.query_tile {
            options = options.query_tile(query_tile);
        }
        if self.keep == Keep::Weights { options.weights() } else { options }
    }
}

impl fmt::Display for Way {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let via = if self.via == Via::Cache { "Cache " } else { "" };
        write!(f, "{via}{:?} {:?}", self.path, self.precision)?;
        if let Some(level) = self.level {
            write!(f, " {level}")?;
        }
        if let Some(query_tile) = self.query_tile {
            write!(f, " query_tile {query_tile}")?;
        }
        if self.keep == Keep::Weights { f.write_str(" with weights") } else { Ok(()) }
    }
}

/// Every way to compute a call: paths, types, with and without weights; the tiled path with every instruction set of
/// this CPU and several tiles; and over a cache.
pub(crate) fn ways() -> Vec<Way> {
    let mut ways = ways_by_arrays();
    for precision in [Precision::F32, Precision::F64] {
        let cached = |path, keep| Way { via: Via::Cache, ..Way::new(precision, path, keep) };
        ways.extend(Level::available().iter().map(|&level| {
            let level = Some(level);
            Way { level, ..cached(Path::Tiled, Keep::Nothing) }
        }));
        ways.extend([cached(Path::Auto, Keep::Weights), cached(Path::Reference, Keep::Nothing)]);
    }
    ways
}

/// Those of [`ways`] that take keys and values as arrays.
pub(crate) fn ways_by_arrays() -> Vec<Way> {
    let mut ways = Vec::new();
    for path in PATHS {
        for precision in [Precision::F32, Precision::F64] {
            ways.push(Way::new(precision, path, Keep::Nothing));
            if gives_weights(path) {
                ways.push(Way::new(precision, path, Keep::Weights));
            }
            if path == Path::Tiled {
                let levels = Level::available().iter();
                ways.extend(levels.flat_map(|&level| {
                    [1, 5].map(|tile| Way {
                        level: Some(level),
                        query_tile: Some(tile),
                        ..Way::new(precision, path, Keep::Nothing)
                    })
                }));
            }
        }
    }
    ways
}

/// What a call returned, in `f64`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Answer {
    /// Context of the core, output of a layer.
    pub(crate) out: ArrayD<f64>,
    pub(crate) lse: Array3<f64>,
    pub(crate) weights: Option<Array4<f64>>,
}

/// A call that can be computed in every way.
pub(crate) trait Call {
    fn run<T: Element>(&self, way: Way) -> Result<Answer>;

    /// The `_into` variant, into an array that held NaN before.
    fn run_into<T: Element>(&self, way: Way) -> Result<ArrayD<f64>>;

    fn answer(&self, way: Way) -> Result<Answer> {
        match way.precision {
            Precision::F32 => self.run::<f32>(way),
            Precision::F64 => self.run::<f64>(way),
        }
    }

    fn out_into(&self, way: Way) -> Result<ArrayD<f64>> {
        match way.precision {
            Precision::F32 => self.run_into::<f32>(way),
            Precision::F64 => self.run_into::<f64>(way),
        }
    }

    /// Checks the answer in every way. `_into` must give the same bits.
    fn everywhere(&self, check: impl Fn(&Run)) {
        for way in ways() {
            let answer = self.answer(way).unwrap_or_else(|e| panic!("{way}: {e}"));
            assert_eq!(answer.weights.is_some(), way.keep == Keep::Weights, "{way}");
            if way.keep == Keep::Nothing {
                let into = self.out_into(way).unwrap_or_else(|e| panic!("{way} into: {e}"));
                assert_bits(&format!("{way} into"), &into, &answer.out);
            }
            check(&Run { way, answer });
        }
    }

    /// The answer of the plain loops in `f64`.
    fn oracle(&self) -> Answer {
        self.answer(Way::ORACLE).unwrap_or_else(|e| panic!("reference: {e}"))
    }

    /// Checks that the call is refused in every way with this text. (A cache has its own arguments.)
    fn refused(&self, text: &str) {
        for way in ways_by_arrays() {
            assert_eq!(self.answer(way).expect_err(text).to_string(), text, "{way}");
            if way.keep == Keep::Nothing {
                assert_eq!(self.out_into(way).expect_err(text).to_string(), text, "{way} into");
            }
        }
    }
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
    pub(crate) way: Way,
    pub(crate) answer: Answer,
}

impl Run {
    pub(crate) fn tolerance(&self, within: Within) -> f64 {
        match self.way.precision {
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
        assert_eq!(self.answer.out.shape(), want.out.shape(), "{}", self.way);
        self.compare("out", self.answer.out.iter(), &flat(&want.out), within);
        self.compare("lse", self.answer.lse.iter(), &flat(&want.lse), within);
        if let (Some(got), Some(want)) = (&self.answer.weights, &want.weights) {
            self.compare("weights", got.iter(), &flat(want), within);
        }
    }

    #[track_caller]
    fn compare<'a>(&self, name: &str, got: impl Iterator<Item = &'a f64>, want: &[f64], within: Within) {
        let way = self.way;
        let got: Vec<f64> = got.copied().collect();
        assert_eq!(got.len(), want.len(), "{way}: {name} {got:?}");
        for (index, (&got, &want)) in got.iter().zip(want).enumerate() {
            let fits = is_near(got, want, self.tolerance(within));
            assert!(fits, "{way}: {name}[{index}] is {got:e}, not {want:e}");
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
    array.mapv(Element::into_f64)
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

/// Runs a property on random values; a failure shows the smallest value that was found.
pub(crate) fn property<S: Strategy>(cases: u32, values: S, holds: impl Fn(S::Value)) {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&values, |value| {
        holds(value);
        Ok(())
    });
    outcome.unwrap_or_else(|failure| panic!("{failure}"));
}
