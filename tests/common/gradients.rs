//! The gradients of a call of the core, in every way the crate can compute them.

use multihead::ndarray::Array4;
use multihead::{Element, Gradients, Level, Options, Path, Result, Saved, attention};

use super::core::Core;
use super::{Keep, Precision, Way, assert_bits, typed, widened};

/// Every way to compute gradients: the plain loops and the tiled path in both types, the latter at every level of this
/// CPU and with small tiles.
pub(crate) fn gradient_ways() -> Vec<Way> {
    let mut ways = Vec::new();
    for precision in [Precision::F32, Precision::F64] {
        ways.extend([Path::Reference, Path::Auto].map(|path| Way::new(precision, path, Keep::Nothing)));
        ways.extend(tiled_ways(precision));
    }
    ways
}

/// The tiled path at every level, with its own tiles and with small ones.
pub(crate) fn tiled_ways(precision: Precision) -> Vec<Way> {
    let plain = Way::new(precision, Path::Tiled, Keep::Nothing);
    let levels = Level::available().iter().map(|&level| Some(level));
    levels.flat_map(|level| [None, Some(1), Some(5)].map(|query_tile| Way { level, query_tile, ..plain })).collect()
}

impl Core {
    /// The gradients where `d_context` is the context's, of the bias too if there is one.
    pub(crate) fn gradients(&self, way: Way, d_context: &Array4<f64>) -> Result<Gradients<f64>> {
        match way.precision {
            Precision::F32 => self.gradients_in::<f32>(way, d_context),
            Precision::F64 => self.gradients_in::<f64>(way, d_context),
        }
    }

    fn gradients_in<T: Element>(&self, way: Way, d_context: &Array4<f64>) -> Result<Gradients<f64>> {
        self.differentiated::<T, _>(way, d_context, |saved, d_context, options| {
            Ok(widened_gradients(&attention::backward(saved, d_context, options)?))
        })
    }

    /// Runs forward and hands what backward needs to `f`.
    pub(crate) fn differentiated<T: Element, R>(
        &self,
        way: Way,
        d_context: &Array4<f64>,
        f: impl FnOnce(&Saved<'_, T>, &Array4<T>, &Options<'_, T>) -> Result<R>,
    ) -> Result<R> {
        self.with::<T, _>(way, |[q, k, v], options| {
            let [lq, lk, lv, _] = self.layouts;
            let (q, k, v) = (lq.view(&q), lk.view(&k), lv.view(&v));
            let attended = attention::forward(&q, &k, &v, &options)?;
            let options = if self.bias.is_some() { options.bias_gradient() } else { options };
            let saved = Saved { q: &q, k: &k, v: &v, context: &attended.context, lse: &attended.lse };
            f(&saved, &typed(d_context), &options)
        })
    }

    /// The gradients of the plain loops in `f64`.
    pub(crate) fn right_gradients(&self, d_context: &Array4<f64>) -> Gradients<f64> {
        let way = Way::new(Precision::F64, Path::Reference, Keep::Nothing);
        self.gradients(way, d_context).unwrap_or_else(|e| panic!("reference: {e}"))
    }

    /// Checks the gradients in every way.
    pub(crate) fn gradients_everywhere(&self, d_context: &Array4<f64>, check: impl Fn(Way, &Gradients<f64>)) {
        for way in gradient_ways() {
            let gradients = self.gradients(way, d_context).unwrap_or_else(|e| panic!("{way}: {e}"));
            check(way, &gradients);
        }
    }
}

/// The same gradients in `f64`.
pub(crate) fn widened_gradients<T: Element>(gradients: &Gradients<T>) -> Gradients<f64> {
    let Gradients { d_q, d_k, d_v, d_bias, d_sinks, d_relative_bias, d_relative_keys } = gradients;
    Gradients {
        d_q: widened(d_q),
        d_k: widened(d_k),
        d_v: widened(d_v),
        d_bias: d_bias.as_ref().map(|x| widened(x)),
        d_sinks: d_sinks.as_ref().map(|x| widened(x)),
        d_relative_bias: d_relative_bias.as_ref().map(|x| widened(x)),
        d_relative_keys: d_relative_keys.as_ref().map(|x| widened(x)),
    }
}

/// The gradients by name, those that there are.
pub(crate) fn named(gradients: &Gradients<f64>) -> Vec<(&'static str, multihead::ndarray::ArrayD<f64>)> {
    let Gradients { d_q, d_k, d_v, d_bias, d_sinks, d_relative_bias, d_relative_keys } = gradients.clone();
    let mut named = vec![("d_q", d_q.into_dyn()), ("d_k", d_k.into_dyn()), ("d_v", d_v.into_dyn())];
    named.extend(d_bias.map(|d_bias| ("d_bias", d_bias.into_dyn())));
    named.extend(d_sinks.map(|d_sinks| ("d_sinks", d_sinks.into_dyn())));
    named.extend(d_relative_bias.map(|d_table| ("d_relative_bias", d_table.into_dyn())));
    named.extend(d_relative_keys.map(|d_keys| ("d_relative_keys", d_keys.into_dyn())));
    named
}

/// The same bits in all gradients.
#[track_caller]
pub(crate) fn assert_same_gradients(what: &str, got: &Gradients<f64>, want: &Gradients<f64>) {
    let (got, want) = (named(got), named(want));
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, got), (_, want)) in got.iter().zip(&want) {
        assert_bits(&format!("{what}: {name}"), got, want);
    }
}
