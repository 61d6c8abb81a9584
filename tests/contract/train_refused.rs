//! What the backward of a layer must refuse, with everything left as it was.

use crate::common::train::fill;
use multihead::ndarray::{Array1, Array2, Array3, Array4};
use multihead::{Inputs, LayerGradients, MultiHeadAttention, Options, Workspace};

/// The error's text, and what spoils the gradients.
type Spoilt = (&'static str, fn(&mut LayerGradients<f64>));

fn layer(heads: usize) -> MultiHeadAttention<f64> {
    MultiHeadAttention::builder(8, heads).bias().build().unwrap()
}

#[test]
fn gradients_of_another_shape_than_the_output() {
    let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
    let (_, tape) = mha.forward_train(&Inputs::new(&x), &Options::new()).unwrap();
    let error = mha.backward(&tape, &Array3::ones((2, 4, 8))).unwrap_err();
    assert_eq!(error.to_string(), "d_output: expected [batch, q_len, d_model] = [2, 3, 8], got [2, 4, 8]");
}

#[test]
fn a_tape_of_another_layer() {
    let x = Array3::ones((2, 3, 8));
    let (_, tape) = layer(2).forward_train(&Inputs::new(&x), &Options::new()).unwrap();
    let error = layer(4).backward(&tape, &x).unwrap_err();
    assert_eq!(error.to_string(), "tape: expected [batch, num_heads, q_len] = [2, 4, 3], got [2, 2, 3]");
    let wide = MultiHeadAttention::<f64>::builder(8, 2).value_dim(5).build().unwrap();
    let error = wide.backward(&tape, &x).unwrap_err().to_string();
    assert!(error.starts_with("tape: expected [batch, num_kv_heads, kv_len, value_dim] = [2, 2, 3, 5]"), "{error}");
}

#[test]
fn the_gradient_of_a_bias_that_is_not_there() {
    let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
    let (_, tape) = mha.forward_train(&Inputs::new(&x), &Options::new().bias_gradient()).unwrap();
    let error = mha.backward(&tape, &x).unwrap_err();
    assert_eq!(error.to_string(), "bias_gradient: expected a bias in the options, got none");
}

#[test]
fn gradients_that_do_not_fit() {
    let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
    let inputs = Inputs::new(&x);
    let zeros = LayerGradients::zeros(&mha, &inputs, &Options::new()).unwrap();
    let spoilt: [Spoilt; 6] = [
        ("d_query: expected [batch, q_len, d_model] = [2, 3, 8], got [2, 3, 7]", |g| {
            g.d_query = Array3::zeros((2, 3, 7))
        }),
        ("d_key: expected None, since the call gives no such gradient, got an array", |g| {
            g.d_key = Some(Array3::zeros((2, 3, 8)))
        }),
        ("d_bias: expected None, since the call gives no such gradient, got an array", |g| {
            g.d_bias = Some(Array4::zeros((1, 1, 3, 3)))
        }),
        ("w_o: expected [num_heads * value_dim, d_model] = [8, 8], got [8, 9]", |g| {
            g.weights.w_o = Array2::zeros((8, 9))
        }),
        ("b_k: expected a gradient, since the layer has one, got None", |g| g.weights.b_k = None),
        ("sinks: expected None, since the layer has none, got a gradient", |g| {
            g.weights.sinks = Some(Array1::zeros(2))
        }),
    ];
    for (text, spoil) in spoilt {
        let mut gradients = zeros.clone();
        fill(&mut gradients, 7.0);
        spoil(&mut gradients);
        let before = gradients.clone();
        let mut workspace = Workspace::new();
        let (y, tape) = mha.forward_train(&inputs, &Options::new()).unwrap();
        assert_eq!(mha.backward_into(tape.clone(), &y, &mut gradients, &mut workspace).unwrap_err().to_string(), text);
        assert_eq!(mha.backward_add(tape, &y, &mut gradients, &mut workspace).unwrap_err().to_string(), text);
        assert_eq!(gradients, before);
        let mut changed = mha.clone();
        let refused = changed.parameters_mut(&gradients.weights).map(drop).err().map(|e| e.to_string());
        assert_eq!(refused.is_some(), !text.starts_with("d_"), "{text}");
    }
}

#[test]
fn outputs_of_another_shape() {
    let (mha, x) = (layer(2), Array3::ones((2, 3, 8)));
    let mut y = Array3::from_elem((2, 3, 7), 7.0);
    let error = mha.forward_train_into(&Inputs::new(&x), &Options::new(), &mut y, &mut Workspace::new());
    assert_eq!(error.unwrap_err().to_string(), "output: expected [batch, q_len, d_model] = [2, 3, 8], got [2, 3, 7]");
    assert!(y.iter().all(|&y| y == 7.0));
}
