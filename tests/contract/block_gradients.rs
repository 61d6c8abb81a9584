//! The gradients of blocks and stacks: against central differences in `f64` for every parameter and input of every form.

use crate::common::blocks::{D_MODEL, Form, MEMORY_WIDTH, NormKind, Recipe, block, norm, numbers, stack};
use multihead::block::{
    Activation, Block, Call, FeedForward, FeedForwardWeights, Norm, Norms, Stack, StackGradients, StackTape,
};
use multihead::ndarray::{Array3, ArrayD, Axis, s};
use multihead::{Mask, MultiHeadAttention};

const LEN: usize = 3;

/// All that a call reads.
#[derive(Debug, Clone)]
struct Inputs {
    x: Array3<f64>,
    memory: Option<Array3<f64>>,
    positions: Option<Array3<f64>>,
    memory_positions: Option<Array3<f64>>,
    masks: [Mask; 2],
    /// Rate and seed.
    dropout: Option<(f64, u64)>,
}

impl Inputs {
    /// Two sequences, the second of them padded at its end; with positions or without.
    fn new(recipe: Recipe, has_positions: bool, dropout: Option<(f64, u64)>) -> Self {
        let (tokens, memory) = ((2, LEN, D_MODEL), (2, 3, MEMORY_WIDTH));
        Self {
            x: numbers(7, tokens),
            memory: recipe.has_cross.then(|| numbers(8, memory)),
            positions: has_positions.then(|| numbers(9, tokens)),
            memory_positions: (has_positions && recipe.has_cross).then(|| numbers(10, memory)),
            masks: [Mask::causal_top_left() & Mask::key_lengths(&[LEN, 2]), Mask::key_lengths(&[3, 2])],
            dropout,
        }
    }

    fn call(&self) -> Call<'_, f64> {
        let mut call = Call::new().mask(&self.masks[0]).memory_mask(&self.masks[1]);
        if let Some(memory) = &self.memory {
            call = call.memory(memory);
        }
        if let Some(positions) = &self.positions {
            call = call.position_embeddings(positions);
        }
        if let Some(positions) = &self.memory_positions {
            call = call.memory_position_embeddings(positions);
        }
        match self.dropout {
            Some((rate, seed)) => call.dropout(rate, seed),
            None => call,
        }
    }

    /// The inputs that have gradients.
    fn arrays(&mut self) -> [Option<&mut Array3<f64>>; 4] {
        [Some(&mut self.x), self.memory.as_mut(), self.positions.as_mut(), self.memory_positions.as_mut()]
    }
}

/// The gradients of the inputs in the order of [`Inputs::arrays`].
fn of_inputs(gradients: &StackGradients<f64>) -> [Option<&Array3<f64>>; 4] {
    let StackGradients { d_x, d_memory, d_position_embeddings, d_memory_position_embeddings, .. } = gradients;
    [Some(d_x), d_memory.as_ref(), d_position_embeddings.as_ref(), d_memory_position_embeddings.as_ref()]
}

/// All gradients by name, those of the inputs too.
fn named(gradients: &StackGradients<f64>) -> Vec<(String, ArrayD<f64>)> {
    let names = ["d_x", "d_memory", "d_position_embeddings", "d_memory_position_embeddings"].into_iter();
    let inputs = names.zip(of_inputs(gradients)).filter_map(|(name, d)| Some((name.to_owned(), d?.clone().into_dyn())));
    inputs.chain(gradients.weights.iter().map(|(name, d)| (name, d.to_owned()))).collect()
}

#[track_caller]
fn assert_near(what: &str, got: &[(String, ArrayD<f64>)], want: &[(String, ArrayD<f64>)], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{what}");
    for ((name, got), (want_name, want)) in got.iter().zip(want) {
        assert_eq!((name, got.shape()), (want_name, want.shape()), "{what}");
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() <= tolerance * (1.0 + want.abs()), "{what}: {name} is {got:e}, not {want:e}");
        }
    }
}

fn backward(stack: &Stack<f64>, inputs: &Inputs, d_y: &Array3<f64>) -> StackGradients<f64> {
    let (_, tape) = stack.forward_train(&inputs.x, &inputs.call()).unwrap();
    stack.backward(&tape, d_y).unwrap()
}

/// Moves each number of each parameter and input up and down and compares the slope of `sum(d_y * y)` with its gradient.
fn check_slopes(what: &str, stack: &Stack<f64>, inputs: &Inputs) {
    const STEP: f64 = 1e-5;
    let d_y = numbers(11, inputs.x.dim());
    let loss = |stack: &Stack<f64>, inputs: &Inputs| -> f64 {
        (stack.forward(&inputs.x, &inputs.call()).unwrap() * &d_y).sum()
    };
    let check = |name: &str, gradient: f64, above: f64, below: f64| {
        let slope = (above - below) / (2.0 * STEP);
        let is_near = (gradient - slope).abs() < 1e-6 * (1.0 + slope.abs());
        assert!(is_near, "{what}: {name} has {gradient:e}, the slope is {slope:e}");
    };
    let gradients = backward(stack, inputs, &d_y);
    for (at, gradient) in of_inputs(&gradients).into_iter().enumerate() {
        assert_eq!(gradient.is_some(), inputs.clone().arrays()[at].is_some(), "{what}: input {at}");
        for (index, &gradient) in gradient.into_iter().flat_map(|d| d.indexed_iter()) {
            let moved = |step: f64| {
                let mut inputs = inputs.clone();
                inputs.arrays()[at].as_mut().unwrap()[index] += step;
                loss(stack, &inputs)
            };
            check(&format!("input {at} {index:?}"), gradient, moved(STEP), moved(-STEP));
        }
    }
    let mut moved = stack.clone();
    for (at, (name, gradient)) in gradients.weights.iter().enumerate() {
        for (index, &gradient) in gradient.iter().enumerate() {
            let move_by = |stack: &mut Stack<f64>, step: f64| {
                let (_, mut parameter, _) = stack.parameters_mut(&gradients.weights).unwrap().nth(at).unwrap();
                *parameter.iter_mut().nth(index).unwrap() += step;
            };
            move_by(&mut moved, STEP);
            let above = loss(&moved, inputs);
            move_by(&mut moved, -2.0 * STEP);
            let below = loss(&moved, inputs);
            move_by(&mut moved, STEP);
            check(&format!("{name}[{index}]"), gradient, above, below);
        }
    }
}

#[test]
fn gradients_are_slopes_in_every_form() {
    for (run, recipe) in Recipe::all().enumerate() {
        // Each form once with positions and dropout, and once without.
        let (has_positions, dropout) = (run % 2 == 0, (run % 2 == 0).then_some((0.3, 5)));
        let stack = Stack::new(vec![block(recipe, 1)], None).unwrap();
        check_slopes(&format!("{recipe:?}"), &stack, &Inputs::new(recipe, has_positions, dropout));
    }
}

#[test]
fn gradients_of_several_blocks_are_slopes() {
    for recipe in [Recipe::new(Form::Pre, true), Recipe::new(Form::ParallelShared, false)] {
        check_slopes(&format!("{recipe:?}"), &stack(recipe), &Inputs::new(recipe, true, Some((0.3, 5))));
    }
}

#[test]
fn a_block_is_a_stack_of_one() {
    for recipe in Recipe::forms() {
        let inputs = Inputs::new(recipe, true, None);
        let block = block(recipe, 1);
        let stack = Stack::new(vec![block.clone()], None).unwrap();
        let d_y = numbers(11, inputs.x.dim());
        let (y, tape) = block.forward_train(&inputs.x, &inputs.call()).unwrap();
        assert_eq!(y, block.forward(&inputs.x, &inputs.call()).unwrap());
        let got = block.backward(&tape, &d_y).unwrap();
        let want = backward(&stack, &inputs, &d_y);
        assert_eq!([Some(&got.d_x), got.d_memory.as_ref()], [Some(&want.d_x), want.d_memory.as_ref()], "{recipe:?}");
        assert_eq!(
            [got.d_position_embeddings, got.d_memory_position_embeddings],
            [want.d_position_embeddings, want.d_memory_position_embeddings]
        );
        assert_eq!(got.weights, want.weights.layers[0]);
        let names = block.parameters().map(|(name, _)| format!("layers.0.{name}"));
        assert!(names.eq(stack.parameters().map(|(name, _)| name)));
    }
}

#[test]
fn training_computes_what_forward_does() {
    for recipe in Recipe::forms() {
        for dropout in [None, Some((0.5, 3))] {
            let (stack, inputs) = (stack(recipe), Inputs::new(recipe, true, dropout));
            let (y, _) = stack.forward_train(&inputs.x, &inputs.call()).unwrap();
            assert_eq!(y, stack.forward(&inputs.x, &inputs.call()).unwrap(), "{recipe:?} {dropout:?}");
        }
    }
}

#[test]
fn computing_again_moves_no_bit() {
    for recipe in Recipe::forms() {
        let (stack, inputs) = (stack(recipe), Inputs::new(recipe, true, Some((0.3, 5))));
        let d_y = numbers(11, inputs.x.dim());
        let (y, kept) = stack.forward_train(&inputs.x, &inputs.call()).unwrap();
        let (same, again) = stack.forward_train(&inputs.x, &inputs.call().recompute()).unwrap();
        assert_eq!(y, same);
        assert!(again.bytes() < kept.bytes());
        assert_eq!(stack.backward(&again, &d_y).unwrap(), stack.backward(&kept, &d_y).unwrap(), "{recipe:?}");
    }
}

#[test]
fn gradients_of_parts_add_up() {
    for recipe in Recipe::forms() {
        let stack = stack(recipe);
        let whole = Inputs::new(recipe, false, None);
        // Without the padding, which would have to be cut as well; parts of other lengths than the whole.
        let masks = [Mask::causal(), Mask::none()];
        let cut = |entry: usize, len: usize| Inputs {
            x: whole.x.slice(s![entry..entry + 1, ..len, ..]).to_owned(),
            memory: whole.memory.as_ref().map(|memory| memory.slice(s![entry..entry + 1, .., ..]).to_owned()),
            masks: masks.clone(),
            ..whole.clone()
        };
        let mut sums = stack.zero_gradients();
        let mut want: Option<StackGradients<f64>> = None;
        for part in [cut(0, LEN), cut(1, LEN - 1)] {
            let d_y = numbers(11, part.x.dim());
            let (_, tape) = stack.forward_train(&part.x, &part.call()).unwrap();
            stack.backward_add(&tape, &d_y, &mut sums).unwrap();
            let mut alone = stack.backward(&tape, &d_y).unwrap();
            match &want {
                None => assert_eq!(sums, alone, "{recipe:?}: once, onto zeros"),
                Some(first) => {
                    let pairs = alone.weights.iter_mut().zip(first.weights.iter());
                    pairs.for_each(|((_, mut sum), (_, d))| sum += &d);
                }
            }
            want = Some(alone);
        }
        assert_near(&format!("{recipe:?}"), &named(&sums), &named(&want.unwrap()), 1e-13);
    }
}

#[test]
fn tokens_of_any_strides_and_without_a_batch_give_the_same() {
    let recipe = Recipe::new(Form::Pre, false);
    let stack = stack(recipe);
    let (x, d_y) = (numbers(7, (1, 5, D_MODEL)), numbers(11, (1, 5, D_MODEL)));
    let of = |x: &Array3<f64>, d_y: &Array3<f64>| {
        let (_, tape) = stack.forward_train(x, &Call::new()).unwrap();
        stack.backward(&tape, d_y).unwrap()
    };
    let want = of(&x, &d_y);
    let turned = |x: &Array3<f64>| x.t().as_standard_layout().into_owned().reversed_axes();
    assert_eq!(of(&turned(&x), &turned(&d_y)), want);
    let (row, d_row) = (x.index_axis(Axis(0), 0), d_y.index_axis(Axis(0), 0));
    let (y, tape) = stack.forward_train(&row, &Call::new()).unwrap();
    assert_eq!(y.dim(), (5, D_MODEL));
    assert_eq!(stack.backward(&tape, &d_row).unwrap(), want);
    for shape in [(0, 5, D_MODEL), (2, 0, D_MODEL)] {
        let gradients = of(&Array3::zeros(shape), &Array3::zeros(shape));
        assert_eq!(gradients.d_x.dim(), shape);
        assert!(gradients.weights.iter().all(|(_, d)| d.iter().all(|&d| d == 0.0)));
    }
}

#[test]
fn every_attention_drops_other_weights() {
    let recipe = Recipe::new(Form::Pre, true);
    let one = block(recipe, 1);
    let stack = Stack::new(vec![one.clone(), one.clone()], None).unwrap();
    let inputs = Inputs::new(recipe, false, None);
    let call = |seed| inputs.call().dropout(0.5, seed);
    let run = |seed| stack.forward(&inputs.x, &call(seed)).unwrap();
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
    // Had both blocks the same seed, the second would do the same to the same tokens.
    let alone = |kept: &str, call: &Call<'_, f64>| {
        let mut stack = stack.clone();
        let zeros = stack.zero_gradients().weights;
        for (name, mut parameter, _) in stack.parameters_mut(&zeros).unwrap() {
            let is_out = ["attention.w_o", "attention.b_o", "cross.w_o", "feed_forward.w_out", "feed_forward.b_out"];
            if is_out.iter().any(|out| name.ends_with(out)) && !name.contains(kept) {
                parameter.fill(0.0);
            }
        }
        stack.forward(&inputs.x, call).unwrap()
    };
    for part in ["attention", "cross"] {
        let [first, second] = [0, 1].map(|block| format!("layers.{block}.{part}"));
        assert_eq!(alone(&first, &inputs.call()), alone(&second, &inputs.call()));
        assert_ne!(alone(&first, &call(1)), alone(&second, &call(1)), "{part}");
    }
}

#[test]
fn hidden_tokens_without_a_gradient_give_nothing_whatever_they_hold() {
    for recipe in Recipe::all() {
        let stack = stack(recipe);
        let mut inputs = Inputs::new(recipe, false, None);
        // The last token of the second sequence neither asks nor is seen.
        let padding = Mask::key_lengths(&[LEN, 2]) & Mask::query_lengths(&[LEN, 2]);
        inputs.masks = [padding, Mask::key_lengths(&[3, 2]) & Mask::query_lengths(&[LEN, 2])];
        let mut d_y = numbers(11, inputs.x.dim());
        d_y.slice_mut(s![1, 2, ..]).fill(0.0);
        let want = backward(&stack, &inputs, &d_y);
        inputs.x.slice_mut(s![1, 2, ..]).fill(f64::NAN);
        if let Some(memory) = &mut inputs.memory {
            memory.slice_mut(s![1, 2, ..]).fill(f64::NAN);
        }
        let got = backward(&stack, &inputs, &d_y);
        assert_near(&format!("{recipe:?}"), &named(&got), &named(&want), 1e-12);
    }
}

#[test]
fn threads_change_no_bit() {
    const D_MODEL: usize = 32;
    let single = |seed, shape: (usize, usize)| numbers(seed, shape).mapv(|x| x as f32 / 4.0);
    let norm = || Norm::rms(numbers(1, D_MODEL).mapv(|x| x as f32), 1e-6).unwrap();
    let block = |seed: u64| {
        let weights = FeedForwardWeights {
            w_gate: Some(single(seed + 5, (D_MODEL, 80))),
            b_in: Some(numbers(3, 80).mapv(|x| x as f32)),
            ..FeedForwardWeights::new(single(seed + 3, (D_MODEL, 80)), single(seed + 4, (80, D_MODEL)))
        };
        let [own, cross] =
            [1, 2].map(|n| MultiHeadAttention::<f32>::builder(D_MODEL, 4).seed(seed + n).build().unwrap());
        let norms = Norms::Pre { attention: norm(), feed_forward: norm() };
        let block = Block::new(own, FeedForward::new(weights, Activation::Silu).unwrap(), norms).unwrap();
        block.cross(cross, norm()).unwrap()
    };
    let stack = Stack::new(vec![block(1), block(20)], Some(norm())).unwrap();
    let tokens = |seed, len| numbers(seed, (2, len, D_MODEL)).mapv(|x| x as f32);
    let (x, memory, causal) = (tokens(7, 700), tokens(8, 300), Mask::causal());
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let call = Call::new().mask(&causal).memory(&memory).dropout(0.1, 3);
            let (y, tape) = stack.forward_train(&x, &call).unwrap();
            (stack.backward(&tape, &y).unwrap(), y)
        })
    };
    let want = on(1);
    assert!(on(2) == want && on(4) == want);
}

mod refused {
    //! What backward must refuse, with everything left as it was.

    use super::*;

    fn tape<'a>(stack: &Stack<f64>, inputs: &'a Inputs) -> StackTape<'a, f64> {
        stack.forward_train(&inputs.x, &inputs.call()).unwrap().1
    }

    #[test]
    fn tapes_of_other_stacks() {
        let recipes: Vec<_> = Recipe::forms().collect();
        for &recipe in &recipes {
            let inputs = Inputs::new(recipe, false, None);
            let tape = tape(&stack(recipe), &inputs);
            for &other in recipes.iter().filter(|&&other| other != recipe) {
                let both_parallel =
                    [recipe, other].iter().all(|r| [Form::Parallel, Form::ParallelShared].contains(&r.form));
                let stack = stack(other);
                let mut gradients = stack.zero_gradients();
                let refused = stack.backward_add(&tape, &inputs.x, &mut gradients).map_err(|e| e.to_string());
                // Parallel parts keep the same whether they share a norm or not.
                assert_eq!(refused.is_err(), !both_parallel, "{recipe:?} {other:?}");
                if let Err(text) = refused {
                    assert!(text.starts_with("tape: expected [arrays of tokens, attentions] of the block"), "{text}");
                    assert_eq!(gradients, stack.zero_gradients());
                }
            }
        }
        let recipe = Recipe::new(Form::Post, false);
        let inputs = Inputs::new(recipe, false, None);
        let other = Stack::new(vec![block(recipe, 1)], None).unwrap();
        let error = other.backward(&tape(&stack(recipe), &inputs), &inputs.x).unwrap_err().to_string();
        assert_eq!(error, "tape: expected [blocks, norms] of the stack = [1, 0], got [2, 1]");
    }

    #[test]
    fn gradients_of_another_shape_than_the_output() {
        let recipe = Recipe::new(Form::Pre, false);
        let inputs = Inputs::new(recipe, false, None);
        let error =
            stack(recipe).backward(&tape(&stack(recipe), &inputs), &Array3::zeros((2, 4, D_MODEL))).unwrap_err();
        assert_eq!(error.to_string(), "d_y: expected [batch, len, d_model] = [2, 3, 6], got [2, 4, 6]");
    }

    #[test]
    fn gradients_of_other_blocks() {
        let recipe = Recipe::new(Form::Pre, false);
        let inputs = Inputs::new(recipe, false, None);
        let mut stack = stack(recipe);
        let tape = tape(&stack, &inputs);
        type Spoil = fn(&mut StackGradients<f64>);
        let spoilt: [(&str, Spoil); 6] = [
            ("layers.1.attention.w_q: expected [6, 6], got [6, 5]", |g| {
                g.weights.layers[1].attention.w_q = numbers(1, (6, 5));
            }),
            ("layers.0.attention.b_q: expected [6], got None", |g| g.weights.layers[0].attention.b_q = None),
            ("layers.0.cross.w_q: expected None, got [6, 6]", |g| {
                g.weights.layers[0].cross = Some(g.weights.layers[1].attention.clone());
            }),
            ("layers.1.norms.feed_forward.weight: expected [6], got None", |g| {
                g.weights.layers[1].norms.feed_forward = None;
            }),
            ("layers.1.attention.w_q: expected [6, 6], got None", |g| g.weights.layers.truncate(1)),
            ("norm.bias: expected [6], got None", |g| {
                g.weights.norm = Some(norm(NormKind::Rms, 1).weights().clone());
            }),
        ];
        for (text, spoil) in spoilt {
            let mut gradients = stack.zero_gradients();
            gradients.weights.iter_mut().for_each(|(_, mut d)| d.fill(7.0));
            spoil(&mut gradients);
            let before = gradients.clone();
            let want = Err(format!("gradient of {text}"));
            assert_eq!(stack.backward_add(&tape, &inputs.x, &mut gradients).map_err(|e| e.to_string()), want);
            assert_eq!(gradients, before);
            let refused = stack.parameters_mut(&gradients.weights).map(drop).map_err(|e| e.to_string());
            assert_eq!(refused, want);
        }
    }
}
