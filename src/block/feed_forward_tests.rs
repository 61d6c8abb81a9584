//! Values against the formula, gradients against differences, and what must not change a bit.

use super::*;
use ndarray::{Dimension, Ix3};

const ALL: [Activation; 4] = [Activation::Gelu, Activation::GeluTanh, Activation::Relu, Activation::Silu];

/// Numbers without a pattern, between -1 and 1.
fn numbers<D: Dimension>(seed: u64, shape: impl ndarray::IntoDimension<Dim = D>) -> Array<f64, D> {
    let mut state = seed;
    Array::from_shape_simple_fn(shape.into_dimension(), || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f64 / f64::from(1 << 23) - 1.0
    })
}

fn weights(is_gated: bool, has_biases: bool) -> FeedForwardWeights<f64> {
    let gate = is_gated.then(|| numbers(3, (5, 7)));
    FeedForwardWeights {
        b_in: has_biases.then(|| numbers(4, 7)),
        b_gate: (has_biases && is_gated).then(|| numbers(5, 7)),
        b_out: has_biases.then(|| numbers(6, 5)),
        w_gate: gate,
        ..FeedForwardWeights::new(numbers(1, (5, 7)), numbers(2, (7, 5)))
    }
}

/// The arrays of the weights, one after the other.
fn arrays(w: &mut FeedForwardWeights<f64>) -> Vec<(&'static str, Vec<&mut f64>)> {
    w.iter_mut().map(|(name, array)| (name, array.into_iter().collect())).collect()
}

#[test]
fn outputs_are_what_the_formula_says() {
    let x = numbers::<Ix3>(7, (2, 3, 5));
    for (is_gated, has_biases) in [(false, false), (false, true), (true, false), (true, true)] {
        let weights = weights(is_gated, has_biases);
        let block = FeedForward::new(weights.clone(), Activation::Silu).unwrap();
        let y = block.forward(&x).unwrap();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        for ((b, i, c), got) in y.indexed_iter() {
            let dot = |w: &Array2<f64>, bias: &Option<Array1<f64>>, j: usize| {
                x.slice(s![b, i, ..]).dot(&w.column(j)) + bias.as_ref().map_or(0.0, |bias| bias[j])
            };
            let mut want = weights.b_out.as_ref().map_or(0.0, |bias| bias[c]);
            for j in 0..7 {
                let h = dot(&weights.w_in, &weights.b_in, j);
                let a = weights.w_gate.as_ref().map_or(silu(h), |w| silu(dot(w, &weights.b_gate, j)) * h);
                want += a * weights.w_out[[j, c]];
            }
            assert!((got - want).abs() < 1e-13, "{is_gated} {has_biases}: {got} {want}");
        }
        let single = block.forward(&x.slice(s![1, .., ..])).unwrap();
        assert_eq!(single, y.slice(s![1, .., ..]));
    }
}

#[test]
fn gradients_are_slopes() {
    const STEP: f64 = 1e-5;
    let (x, d_y) = (numbers::<Ix3>(7, (2, 3, 5)), numbers::<Ix3>(8, (2, 3, 5)));
    for activation in ALL {
        for (is_gated, has_biases) in [(false, false), (false, true), (true, false), (true, true)] {
            let weights = weights(is_gated, has_biases);
            let loss = |x: &Array3<f64>, weights: &FeedForwardWeights<f64>| {
                (FeedForward::new(weights.clone(), activation).unwrap().forward(x).unwrap() * &d_y).sum()
            };
            let block = FeedForward::new(weights.clone(), activation).unwrap();
            let FeedForwardGradients { d_x, weights: mut d_weights } = block.backward(&x, &d_y).unwrap();
            let check = |name: &str, got: f64, above: f64, below: f64| {
                let want = (above - below) / (2.0 * STEP);
                assert!((got - want).abs() < 1e-8, "{activation:?} {is_gated} {has_biases} {name}: {got} {want}");
            };
            for (index, &d) in d_x.indexed_iter() {
                let moved = |step: f64| {
                    let mut x = x.clone();
                    x[index] += step;
                    loss(&x, &weights)
                };
                check("x", d, moved(STEP), moved(-STEP));
            }
            for (array, (name, gradient)) in arrays(&mut d_weights).into_iter().enumerate() {
                for (index, d) in gradient.into_iter().enumerate() {
                    let moved = |step: f64| {
                        let mut weights = weights.clone();
                        *arrays(&mut weights)[array].1[index] += step;
                        loss(&x, &weights)
                    };
                    check(name, *d, moved(STEP), moved(-STEP));
                }
            }
        }
    }
}

#[test]
fn tokens_without_a_gradient_give_nothing_whatever_they_hold() {
    let (mut x, mut d_y) = (numbers::<Ix3>(7, (2, 3, 5)), numbers::<Ix3>(8, (2, 3, 5)));
    d_y.slice_mut(s![1, 2, ..]).fill(0.0);
    for is_gated in [false, true] {
        let block = FeedForward::new(weights(is_gated, true), Activation::Silu).unwrap();
        x.slice_mut(s![1, 2, ..]).fill(0.5);
        let want = block.backward(&x, &d_y).unwrap();
        x.slice_mut(s![1, 2, ..]).fill(f64::NAN);
        let FeedForwardGradients { d_x, weights } = block.backward(&x, &d_y).unwrap();
        assert_eq!(d_x, want.d_x);
        for ((name, got), (_, want)) in weights.iter().zip(want.weights.iter()) {
            assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-13), "{is_gated} {name}");
        }
    }
}

#[test]
fn threads_change_no_bit() {
    let single = |array: Array2<f64>| array.mapv(|x| x as f32);
    let weights = FeedForwardWeights {
        w_gate: Some(single(numbers(3, (64, 200)))),
        ..FeedForwardWeights::new(single(numbers(1, (64, 200))), single(numbers(2, (200, 64))))
    };
    let block = FeedForward::new(weights, Activation::Gelu).unwrap();
    let x = numbers::<Ix3>(7, (2, 300, 64)).mapv(|x| x as f32);
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| (block.forward(&x).unwrap(), block.backward(&x, &x).unwrap()))
    };
    let want = on(1);
    assert!(on(2) == want && on(3) == want);
}

#[test]
fn many_tokens_are_what_few_are() {
    let width = 2 * MOST_HIDDEN / FEWEST_TOKENS;
    let weights = FeedForwardWeights {
        w_gate: Some(numbers(3, (3, width))),
        ..FeedForwardWeights::new(numbers(1, (3, width)), numbers(2, (width, 3)))
    };
    let block = FeedForward::new(weights, Activation::Relu).unwrap();
    let x = numbers::<Ix3>(7, (3, FEWEST_TOKENS, 3));
    let y = block.forward(&x).unwrap();
    for entry in 0..3 {
        let alone = block.forward(&x.slice(s![entry, .., ..])).unwrap();
        assert!(alone.iter().zip(y.slice(s![entry, .., ..])).all(|(x, y)| (x - y).abs() < 1e-12));
    }
    // Without one piece there are no parts.
    let turned = x.view().permuted_axes([1, 0, 2]);
    let y_turned = block.forward(&turned).unwrap();
    let gap = y_turned - y.permuted_axes([1, 0, 2]);
    assert!(gap.iter().all(|gap| gap.abs() < 1e-12));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |change: &dyn Fn(&mut FeedForwardWeights<f64>)| {
        let mut weights = weights(true, true);
        change(&mut weights);
        FeedForward::new(weights, Activation::Relu).unwrap_err().to_string()
    };
    assert_eq!(refused(&|w| w.b_in = Some(Array1::zeros(6))), "b_in: expected [width] = [7], got [6]");
    assert_eq!(refused(&|w| w.w_gate = None), "b_gate: expected [width of w_gate] = [0], got [7]");
    let gate = "w_gate: expected [d_model, width] = [5, 7], got [7, 5]";
    assert_eq!(refused(&|w| w.w_gate = Some(Array2::zeros((7, 5)))), gate);
    let block = FeedForward::new(weights(true, true), Activation::Relu).unwrap();
    assert!(block.forward(&Array3::zeros((2, 3, 4))).is_err());
    assert!(block.backward(&Array3::zeros((2, 3, 5)), &Array3::zeros((2, 4, 5))).is_err());
    assert_eq!(block.forward(&Array3::zeros((0, 3, 5))).unwrap().shape(), [0, 3, 5]);
}
