//! Attention and layers, forward and backward.

use multihead::ndarray::{Array, Array4, Ix3, Ix4};
use multihead::{Attended, Element, Gradients, Inputs, LayerGradients, Options, Saved, attention};

use crate::case::{Case, array};
use crate::forward::{Attention, Layer};
use crate::{Outcome, Run, sums};

/// Forward and backward.
pub(crate) struct Training<T> {
    forward: Attention<T>,
    d_context: Array4<T>,
    dropout: Option<f64>,
    bias_gradient: bool,
    attended: Attended<T>,
    gradients: Gradients<T>,
}

impl<T: Element> Training<T> {
    pub(crate) fn new(case: &Case) -> Outcome<Self> {
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

/// A layer, forward and backward.
pub(crate) struct LayerTraining<T> {
    forward: Layer<T>,
    d_output: Array<T, Ix3>,
    dropout: Option<f64>,
    gradients: LayerGradients<T>,
}

impl<T: Element> LayerTraining<T> {
    pub(crate) fn new(case: &Case) -> Outcome<Self> {
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
        // Of self-attention: the sum over the roles of x.
        sums(self.gradients.d_query.iter())
    }
}
