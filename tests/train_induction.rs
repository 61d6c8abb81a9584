//! The model of `examples/train_induction`, on a smaller task: it learns, to the same bits on any pool, and its gradients
//! by hand are those of its loss.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../examples/train_induction/model.rs"]
mod model;
#[path = "../examples/train_induction/task.rs"]
mod task;

use model::{Adam, Config, Decoder, Draws, Places};
use multihead::ndarray::Array2;
use multihead::{Inputs, inspect::Tokens};
use task::Task;

const TASK: Task = Task { vocabulary: 12, blocks: [4, 7] };

fn config(places: Places) -> Config {
    Config { vocabulary: TASK.vocabulary, d_model: 32, num_heads: 2, num_layers: 2, places, seed: 3 }
}

/// The model after so many steps, and the losses on the way.
fn trained(steps: usize) -> (Decoder, Vec<f32>) {
    let (mut model, mut adam) = (Decoder::new(&config(Places::Rope)).unwrap(), Adam::default());
    let mut draws = Draws(5);
    let losses = (0..steps).map(|_| {
        let lesson = model.learn(&TASK.batch(32, &mut draws)).unwrap();
        adam.update(&mut model, &lesson.gradients, 4e-3).unwrap();
        lesson.loss
    });
    let losses = losses.collect();
    (model, losses)
}

#[cfg(any(feature = "rayon", feature = "safetensors"))]
fn parameters(model: &Decoder) -> Vec<multihead::ndarray::ArrayD<f32>> {
    model.parameters().into_iter().map(|(_, w)| w.to_owned()).collect()
}

#[test]
fn two_layers_learn_to_repeat() {
    let (model, losses) = trained(300);
    let test = TASK.batch(100, &mut Draws(6));
    let lesson = model.learn(&test).unwrap();
    assert!(losses[0] > 2.0 && lesson.loss < 0.2, "{} to {}", losses[0], lesson.loss);
    assert!(lesson.accuracy >= 0.98, "{}", lesson.accuracy);

    // A head of the first layer looks at the token before, one of the second at what came after the first copy.
    let whole = Task { blocks: [7, 7], ..TASK }.batch(20, &mut Draws(7));
    let ids = Tokens::new().ids(&whole.tokens);
    let statistics =
        model.walk(&whole.tokens.view(), |layer, x, options| layer.head_statistics(&Inputs::new(x), options, &ids));
    let statistics = statistics.unwrap();
    let best =
        |scores: &Array2<f64>| scores.mean_axis(multihead::ndarray::Axis(0)).unwrap().fold(0.0, |m: f64, &x| m.max(x));
    let (previous, induction) = (best(&statistics[0].previous), best(statistics[1].induction.as_ref().unwrap()));
    assert!(previous > 0.4 && induction > 0.4, "{previous}, {induction}");
}

#[cfg(feature = "rayon")]
#[test]
fn a_seed_gives_the_same_bits_on_any_pool() {
    let on = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| trained(20))
    };
    let (want, losses) = on(1);
    for threads in [1, 2, 3] {
        let (got, again) = on(threads);
        assert_eq!(again, losses, "{threads} threads");
        assert_eq!(parameters(&got), parameters(&want), "{threads} threads");
    }
    assert!(losses[19] < losses[0]);
}

#[test]
fn a_small_step_down_the_gradient_lowers_the_loss_by_its_square() {
    for places in [Places::Rope, Places::Learned(TASK.len())] {
        let batch = TASK.batch(16, &mut Draws(8));
        let mut model = Decoder::new(&config(places)).unwrap();
        let lesson = model.learn(&batch).unwrap();
        let (mut square, rate) = (0.0, 1e-3);
        for (_, mut w, d_w) in model.parameters_mut(&lesson.gradients).unwrap() {
            square += d_w.iter().map(|&d| f64::from(d * d)).sum::<f64>();
            w.scaled_add(-rate, &d_w);
        }
        let fall = f64::from(lesson.loss - model.learn(&batch).unwrap().loss);
        let want = f64::from(rate) * square;
        assert!((fall / want - 1.0).abs() < 0.05, "{places:?}: {fall:e}, not {want:e}");
    }
}

#[cfg(feature = "safetensors")]
#[test]
fn a_saved_model_comes_back() {
    for places in [Places::Rope, Places::Learned(TASK.len())] {
        let model = Decoder::new(&config(places)).unwrap();
        let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{places:?}.safetensors"));
        model.save(&file).unwrap();
        let back = Decoder::load(&file).unwrap();
        assert_eq!(parameters(&back), parameters(&model));
        let batch = TASK.batch(2, &mut Draws(9));
        assert_eq!(back.learn(&batch).unwrap().loss, model.learn(&batch).unwrap().loss);
    }
}
