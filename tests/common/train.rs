//! The gradients of a layer's call, in every way the crate can compute them.

use multihead::ndarray::{Array, Array3, ArrayD, Dimension};
use multihead::{Element, Inputs, LayerGradients, MultiHeadAttention, Options, Result, Workspace};

use super::layer::Layer;
use super::{Precision, Way, assert_bits, typed, widened};

/// Gradients by name: `d_query`, `d_w_q` and so on.
pub(crate) type Named = Vec<(String, ArrayD<f64>)>;

/// What of the forward walk is kept for the walk back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    All,
    /// Inputs and lse.
    Lse,
}

impl Layer {
    /// The gradients where `d_output` is the output's. The bias of the scores has one too if it is there.
    pub(crate) fn gradients(&self, way: Way, d_output: &Array3<f64>) -> Result<Named> {
        self.gradients_keeping(way, Kept::All, d_output)
    }

    pub(crate) fn gradients_keeping(&self, way: Way, kept: Kept, d_output: &Array3<f64>) -> Result<Named> {
        match way.precision {
            Precision::F32 => self.trained::<f32, _>(way, kept, |mha, inputs, options| {
                let (_, tape) = mha.forward_train(inputs, options)?;
                Ok(named(&mha.backward(&tape, &typed(d_output))?))
            }),
            Precision::F64 => self.trained::<f64, _>(way, kept, |mha, inputs, options| {
                let (_, tape) = mha.forward_train(inputs, options)?;
                Ok(named(&mha.backward(&tape, d_output)?))
            }),
        }
    }

    /// The `_into` forms, twice into the same arrays, which hold NaN before.
    pub(crate) fn gradients_into<T: Element>(&self, way: Way, kept: Kept, d_output: &Array3<f64>) -> Result<Named> {
        self.trained::<T, _>(way, kept, |mha, inputs, options| {
            let mut output = Array3::from_elem(self.query.dim(), T::nan());
            let mut gradients = LayerGradients::zeros(mha, inputs, options)?;
            fill(&mut gradients, T::nan());
            let mut workspace = Workspace::new();
            for _ in 0..2 {
                let tape = mha.forward_train_into(inputs, options, &mut output, &mut workspace)?;
                mha.backward_into(tape, &typed(d_output), &mut gradients, &mut workspace)?;
            }
            assert_bits(&format!("{way}: output"), &widened(&output), &widened(&mha.attend(inputs, options)?.output));
            Ok(named(&gradients))
        })
    }

    /// Builds the layer and its arguments as training takes them and hands them to `f`.
    pub(crate) fn trained<T: Element, R>(
        &self,
        way: Way,
        kept: Kept,
        f: impl FnOnce(&MultiHeadAttention<T>, &Inputs<'_, T>, &Options<'_, T>) -> Result<R>,
    ) -> Result<R> {
        self.with::<T, _>(way, |mha, inputs, mut options| {
            if self.bias.is_some() {
                options = options.bias_gradient();
            }
            if kept == Kept::Lse {
                options = options.recompute();
            }
            f(mha, inputs, &options)
        })
    }
}

/// The gradients that there are.
pub(crate) fn named<T: Element>(gradients: &LayerGradients<T>) -> Named {
    fn wide<T: Element, D: Dimension>(name: &str, array: Option<&Array<T, D>>) -> Option<(String, ArrayD<f64>)> {
        Some((name.to_owned(), widened(array?).into_dyn()))
    }
    let LayerGradients { d_query, d_key, d_value, d_bias, weights } = gradients;
    let arrays = [wide("d_query", Some(d_query)), wide("d_key", d_key.as_ref()), wide("d_value", d_value.as_ref())];
    let bias = wide("d_bias", d_bias.as_ref());
    let weights = weights.iter().map(|(name, d_w)| (format!("d_{name}"), widened(&d_w)));
    arrays.into_iter().flatten().chain(bias).chain(weights).collect()
}

/// Every number of every gradient.
pub(crate) fn fill<T: Element>(gradients: &mut LayerGradients<T>, number: T) {
    let LayerGradients { d_query, d_key, d_value, d_bias, weights } = gradients;
    d_query.fill(number);
    for d_input in [d_key, d_value].into_iter().flatten() {
        d_input.fill(number);
    }
    d_bias.iter_mut().for_each(|d_bias| d_bias.fill(number));
    weights.iter_mut().for_each(|(_, mut d_w)| d_w.fill(number));
}

/// The same bits in all gradients.
#[track_caller]
pub(crate) fn assert_same_named(what: &str, got: &Named, want: &Named) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, got), (want_name, want)) in got.iter().zip(want) {
        assert_eq!(name, want_name, "{what}");
        assert_bits(&format!("{what}: {name}"), got, want);
    }
}
