//! Attention and layers, forward.

use multihead::ndarray::{Array, Array2, Array4, Ix2, Ix3, Ix4};
use multihead::{Element, Inputs, Mask, MultiHeadAttention, Weights, Workspace, attention};

use crate::case::{Case, Settings, array, mask, pairs};
use crate::{Outcome, Run, sums};

/// Attention alone.
pub(crate) struct Attention<T> {
    pub(crate) q: Array4<T>,
    pub(crate) k: Array4<T>,
    pub(crate) v: Array4<T>,
    pub(crate) bias: Option<Array2<T>>,
    pub(crate) mask: Mask,
    pub(crate) settings: Settings,
    pub(crate) context: Array4<T>,
    pub(crate) workspace: Workspace<T>,
}

/// A layer: projections, attention, projection.
pub(crate) struct Layer<T> {
    pub(crate) layer: MultiHeadAttention<T>,
    pub(crate) x: Array<T, Ix3>,
    pub(crate) mask: Mask,
    pub(crate) settings: Settings,
    /// Of attention, and of the projections.
    pub(crate) flop: [f64; 2],
    pub(crate) output: Array<T, Ix3>,
    pub(crate) workspace: Workspace<T>,
}

impl<T: Element> Attention<T> {
    pub(crate) fn new(case: &Case) -> Outcome<Self> {
        let Case { batch, heads, q_len, kv_len, head_dim, value_dim, .. } = *case;
        let kv_heads = case.kv_heads.unwrap_or(heads);
        Ok(Self {
            q: array::<T, Ix4>((batch, heads, q_len, head_dim), 1, 1.0)?,
            k: array::<T, Ix4>((batch, kv_heads, kv_len, head_dim), 2, 1.0)?,
            v: array::<T, Ix4>((batch, kv_heads, kv_len, value_dim), 3, 1.0)?,
            bias: if case.bias { Some(array::<T, Ix2>((q_len, kv_len), 6, 1.0)?) } else { None },
            mask: mask(case, q_len, kv_len)?,
            settings: Settings::new(case)?,
            context: Array4::zeros((batch, heads, q_len, value_dim)),
            workspace: Workspace::new(),
        })
    }
}

impl<T: Element> Run for Attention<T> {
    fn run(&mut self) -> Outcome<()> {
        let mut options = self.settings.options(&self.mask);
        if let Some(bias) = &self.bias {
            options = options.bias(bias)?;
        }
        Ok(attention::forward_into(&self.q, &self.k, &self.v, &options, &mut self.context, &mut self.workspace)?)
    }

    fn flop(&self) -> f64 {
        let (batch, heads, q_len, head_dim) = self.q.dim();
        let (_, _, kv_len, value_dim) = self.v.dim();
        let pairs = pairs(&self.mask, batch, q_len, kv_len).unwrap_or(f64::NAN);
        2.0 * heads as f64 * pairs * (head_dim + value_dim) as f64
    }

    fn sums(&self) -> (f64, f64) {
        sums(self.context.iter())
    }
}

impl<T: Element> Layer<T> {
    pub(crate) fn new(case: &Case) -> Outcome<Self> {
        let Case { batch, heads, len, d_model, .. } = *case;
        let kv_heads = case.kv_heads.unwrap_or(heads);
        let head_dim = d_model.checked_div(heads).unwrap_or(0);
        let factor = (d_model as f64).powf(-0.5);
        let weights = Weights::new(
            array::<T, Ix2>((d_model, heads * head_dim), 11, factor)?,
            array::<T, Ix2>((d_model, kv_heads * head_dim), 12, factor)?,
            array::<T, Ix2>((d_model, kv_heads * head_dim), 13, factor)?,
            array::<T, Ix2>((heads * head_dim, d_model), 14, factor)?,
        );
        let mask = mask(case, len, len)?;
        let projections = 2.0 * (batch * len) as f64 * (2 * d_model * (heads + kv_heads) * head_dim) as f64;
        let pairs = pairs(&mask, batch, len, len)?;
        let mut layer = MultiHeadAttention::builder(d_model, heads).num_kv_heads(kv_heads).from_weights(weights)?;
        if case.prepacked {
            layer.prepack()?;
        }
        Ok(Self {
            layer,
            x: array::<T, Ix3>((batch, len, d_model), 4, 1.0)?,
            mask,
            settings: Settings::new(case)?,
            flop: [4.0 * heads as f64 * pairs * head_dim as f64, projections],
            output: Array::zeros((batch, len, d_model)),
            workspace: Workspace::new(),
        })
    }
}

impl<T: Element> Run for Layer<T> {
    fn run(&mut self) -> Outcome<()> {
        let (inputs, options) = (Inputs::new(&self.x), self.settings.options(&self.mask));
        Ok(self.layer.attend_into(&inputs, &options, &mut self.output, &mut self.workspace)?)
    }

    fn flop(&self) -> f64 {
        self.flop.iter().sum()
    }

    fn sums(&self) -> (f64, f64) {
        sums(self.output.iter())
    }
}
