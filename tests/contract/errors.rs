//! What a refused call says: the argument, its axes, what was expected and what came; and that nothing was written.

use crate::common;

use common::core::Core;
use common::layer::Layer;
use common::{Call, Keep, Precision, Way};
use multihead::ndarray::{Array1, Array2, Array3, Array4, ArrayView4, array};
use multihead::{
    Error, HeadMap, Inputs, Level, Mask, MultiHeadAttention, Options, Path, Weights, Workspace, attention,
};

const RANKS: &str = "rank 2 [q_len, kv_len] or rank 4 [batch, num_heads, q_len, kv_len]";

/// Batch 2, 4 query heads, 2 KV heads, 3 queries, 5 keys, widths 8 and 6.
fn core() -> Core {
    Core::new(Array4::zeros((2, 4, 3, 8)), Array4::zeros((2, 2, 5, 8)), Array4::zeros((2, 2, 5, 6)))
}

/// Batch 2, 3 queries, d_model 4, 2 heads.
fn layer() -> Layer {
    Layer::identity(2, Array3::zeros((2, 3, 4)))
}

#[test]
fn shapes_of_arrays() {
    let k_axes = "[batch, num_kv_heads, kv_len, head_dim]";
    let mut bad = core();
    bad.k = Array4::zeros((2, 2, 5, 7));
    bad.refused(&format!("k: expected {k_axes} = [2, _, _, 8], got [2, 2, 5, 7]"));
    let mut bad = core();
    bad.v = Array4::zeros((2, 2, 4, 6));
    bad.refused("v: expected [batch, num_kv_heads, kv_len, value_dim] = [2, 2, 5, _], got [2, 2, 4, 6]");

    let heads = HeadMap::explicit(&[0, 1, 2], 3).unwrap();
    core().heads(heads).refused("q: expected [batch, num_heads, q_len, head_dim] = [_, 3, _, _], got [2, 4, 3, 8]");
    let heads = HeadMap::explicit(&[0, 1, 2, 0], 3).unwrap();
    core().heads(heads).refused(&format!("k: expected {k_axes} = [2, 3, _, 8], got [2, 2, 5, 8]"));

    core().sinks(Array1::zeros(3)).refused("sinks: expected [num_heads] = [4], got [3]");
    let scores = "expected [batch, num_heads, q_len, kv_len] = [2, 4, 3, 5], got";
    core().bias(Array2::zeros((3, 4))).refused(&format!("bias: {scores} [1, 1, 3, 4]"));
    let pairs = Array4::from_elem((2, 2, 3, 5), true);
    core().mask(Mask::keep(&pairs).unwrap()).refused(&format!("keep: {scores} [2, 2, 3, 5]"));
    core().mask(Mask::drop(&pairs).unwrap()).refused(&format!("drop: {scores} [2, 2, 3, 5]"));
    let keys = Array2::from_elem((2, 4), true);
    core().mask(Mask::keep_keys(&keys).unwrap()).refused("keep_keys: expected [batch, kv_len] = [2, 5], got [2, 4]");
    core().mask(Mask::key_lengths(&[1, 2, 3])).refused("key_lengths: expected [batch] = [2], got [3]");
    core().mask(Mask::query_lengths(&[1])).refused("query_lengths: expected [batch] = [2], got [1]");
    core().mask(Mask::query_lengths(&[0, 9])).refused("query_lengths: expected no length above q_len, got 9 of 3");
    core().mask(Mask::key_ranges(&[])).refused("key_ranges: expected [batch] = [2], got [0]");
}

#[test]
fn shapes_of_layers() {
    let mut bad = layer();
    bad.query = Array3::zeros((2, 3, 5));
    bad.refused("query: expected [batch, q_len, d_model] = [_, _, 4], got [2, 3, 5]");
    let context = |key, value| layer().key_value(Array3::zeros(key), Array3::zeros(value));
    context((3, 5, 4), (3, 5, 4)).refused("key: expected [batch, kv_len, k_dim] = [2, _, 4], got [3, 5, 4]");
    context((2, 5, 4), (2, 6, 4)).refused("value: expected [batch, kv_len, v_dim] = [2, 5, 4], got [2, 6, 4]");

    let axes = ["[d_model, num_heads * head_dim]", "[k_dim, num_kv_heads * head_dim]"];
    let mut bad = layer();
    bad.weights.w_q = Array2::zeros((4, 6));
    bad.refused(&format!("w_q: expected {} = [4, 4], got [4, 6]", axes[0]));
    let mut bad = layer();
    bad.weights.w_k = Array2::zeros((4, 3));
    bad.refused(&format!("w_k: expected {} = [4, 4], got [4, 3]", axes[1]));
    let mut bad = layer();
    bad.weights.w_v = Array2::zeros((4, 3));
    bad.refused("w_v: expected [v_dim, num_kv_heads * value_dim] = [4, 4], got [4, 3]");
    let mut bad = layer();
    bad.weights.w_o = Array2::zeros((4, 3));
    bad.refused("w_o: expected [num_heads * value_dim, d_model] = [4, 4], got [4, 3]");

    type Vector = fn(&mut Weights<f64>) -> &mut Option<Array1<f64>>;
    let vectors: [(Vector, &str); 5] = [
        (|w| &mut w.b_q, "b_q: expected [num_heads * head_dim] = [4], got [3]"),
        (|w| &mut w.b_k, "b_k: expected [num_kv_heads * head_dim] = [4], got [3]"),
        (|w| &mut w.b_v, "b_v: expected [num_kv_heads * value_dim] = [4], got [3]"),
        (|w| &mut w.b_o, "b_o: expected [d_model] = [4], got [3]"),
        (|w| &mut w.sinks, "sinks: expected [num_heads] = [2], got [3]"),
    ];
    for (vector, text) in vectors {
        let mut bad = layer();
        *vector(&mut bad.weights) = Some(Array1::zeros(3));
        bad.refused(text);
    }
}

#[test]
fn ranks() {
    let rank_3 = Array3::from_elem((2, 3, 5), true);
    let text = |name| format!("{name}: expected {RANKS}, got rank 3 [2, 3, 5]");
    assert_eq!(Mask::keep(&rank_3).unwrap_err().to_string(), text("keep"));
    assert_eq!(Mask::drop(&rank_3).unwrap_err().to_string(), text("drop"));
    let bias = rank_3.mapv(|_| 0f32);
    assert_eq!(Options::new().bias(&bias).unwrap_err().to_string(), text("bias"));
    let vector = array![true];
    assert_eq!(Mask::keep(&vector).unwrap_err().to_string(), format!("keep: expected {RANKS}, got rank 1 [1]"));
}

#[test]
fn values() {
    for (bad, shown) in [(f64::NAN, "NaN"), (f64::INFINITY, "inf")] {
        core().scale(bad).refused(&format!("scale: expected a finite number, got {shown}"));
        core().softcap(bad).refused(&format!("softcap: expected a finite number above 0, got {shown}"));
    }
    core().softcap(0.0).refused("softcap: expected a finite number above 0, got 0");
    core().softcap(-2.0).refused("softcap: expected a finite number above 0, got -2");
    let mut bad = layer();
    bad.softcap = Some(0.0);
    bad.refused("softcap: expected a finite number above 0, got 0");

    // What f64 holds and f32 does not.
    let way = |precision| Way::new(precision, Path::Auto, Keep::Nothing);
    let huge = core().scale(1e300);
    assert!(huge.answer(way(Precision::F64)).is_ok());
    let error = huge.answer(way(Precision::F32)).unwrap_err();
    assert!(error.to_string().starts_with("scale: expected a finite number, got 1"), "{error}");

    let asked = Way::new(Precision::F32, Path::Tiled, Keep::Weights);
    let text = "path: expected Dense, Reference or Auto with weights, got Tiled";
    assert_eq!(core().answer(asked).unwrap_err().to_string(), text);
    assert_eq!(layer().answer(asked).unwrap_err().to_string(), text);
}

#[test]
fn sizes_of_layers() {
    let builder = MultiHeadAttention::<f64>::builder;
    let cases = [
        (builder(0, 1), "d_model: expected at least 1, got 0"),
        (builder(4, 0), "num_heads: expected at least 1, got 0"),
        (builder(4, 2).num_kv_heads(0), "num_kv_heads: expected at least 1, got 0"),
        (builder(4, 2).head_dim(0), "head_dim: expected at least 1, got 0"),
        (builder(4, 2).value_dim(0), "value_dim: expected at least 1, got 0"),
        (builder(4, 2).k_dim(0), "k_dim: expected at least 1, got 0"),
        (builder(4, 2).v_dim(0), "v_dim: expected at least 1, got 0"),
        (builder(4, 3), "d_model: expected a multiple of num_heads = 3 where head_dim is not given, got 4"),
        (builder(2, 4), "d_model: expected a multiple of num_heads = 4 where head_dim is not given, got 2"),
        (builder(4, 2).kv_of_head(&[0]), "kv_of_head: expected one entry for each of num_heads = 2, got 1"),
        (builder(4, 2).scale(f64::NAN), "scale: expected a finite number, got NaN"),
        (builder(4, 2).softcap(-1.0), "softcap: expected a finite number above 0, got -1"),
    ];
    let weights = || Weights::new(Array2::eye(4), Array2::eye(4), Array2::eye(4), Array2::eye(4));
    for (builder, text) in cases {
        assert_eq!(builder.clone().build().unwrap_err().to_string(), text);
        assert_eq!(builder.from_weights(weights()).unwrap_err().to_string(), text);
    }
    // More numbers than can be addressed.
    let huge = builder(usize::MAX / 2, 1).head_dim(usize::MAX / 2).build().unwrap_err();
    assert!(matches!(huge, Error::TooLarge { .. }), "{huge}");
    assert!(huge.to_string().starts_with("w_q: expected [in, out] to fit into memory, got ["), "{huge}");
}

#[test]
fn heads() {
    core_with_heads(4, 3).refused("num_heads: expected a multiple of num_kv_heads = 3, got 4");
    core_with_heads(2, 4).refused("num_heads: expected a multiple of num_kv_heads = 4, got 2");
    core_with_heads(2, 0).refused("num_kv_heads: expected at least 1, got 0");
    core_with_heads(0, 1).refused("num_heads: expected at least 1, got 0");
    let text = "kv_of_head[2]: expected a KV head below num_kv_heads = 2, got 5";
    assert_eq!(HeadMap::explicit(&[0, 1, 5], 2).unwrap_err().to_string(), text);
    let builder = MultiHeadAttention::<f32>::builder(6, 3).kv_of_head(&[0, 1, 5]).num_kv_heads(2);
    assert_eq!(builder.build().unwrap_err().to_string(), text);
}

fn core_with_heads(num_heads: usize, num_kv_heads: usize) -> Core {
    Core::uniform(num_heads, 3, Array4::zeros((1, num_kv_heads, 5, 1)))
}

#[test]
fn key_ranges() {
    let text =
        |argument, entry, range| format!("{argument}[{entry}]: expected start <= end <= kv_len = 5, got {range}");
    core().mask(Mask::key_lengths(&[5, 6])).refused(&text("key_lengths", 1, "0..6"));
    core().mask(Mask::key_ranges(&[1..6, 0..5])).refused(&text("key_ranges", 0, "1..6"));
    #[expect(clippy::reversed_empty_ranges, reason = "the mistake in question")]
    core().mask(Mask::key_ranges(&[0..5, 4..3])).refused(&text("key_ranges", 1, "4..3"));
}

#[test]
fn alignments() {
    let text =
        "mask: expected one causal alignment for windows and distances to count from, got causal and causal_top_left";
    core().mask(Mask::causal() & Mask::causal_top_left() & Mask::window(1, 0)).refused(text);
    core().mask(Mask::causal_top_left() & Mask::last_n(2) & Mask::causal_offset(3)).refused(
        "mask: expected one causal alignment for windows and distances to count from, got causal_top_left and causal_offset(3)",
    );
}

#[test]
fn more_than_memory_holds() {
    // A view can be as long as it likes, its answer cannot.
    let one = Array4::<f32>::zeros((1, 1, 1, 1));
    let huge = 1usize << 61;
    let long: ArrayView4<'_, f32> = one.broadcast((1, 1, huge, 1)).unwrap();
    let text = |call: multihead::Result<attention::Attended<f32>>| call.unwrap_err().to_string();
    let options = Options::new();
    let axes = "[batch, num_heads, q_len, value_dim]";
    assert_eq!(
        text(attention::forward(&long, &one, &one, &options)),
        format!("context: expected {axes} to fit into memory, got [1, 1, {huge}, 1]")
    );
    let options = Options::new().weights();
    let axes = "[batch, num_heads, q_len, kv_len]";
    assert_eq!(
        text(attention::forward(&one, &long, &long, &options)),
        format!("weights: expected {axes} to fit into memory, got [1, 1, 1, {huge}]")
    );
    let pairs = Array2::from_elem((1, 1), true);
    let rows = pairs.broadcast((huge, 1)).unwrap();
    assert_eq!(
        Mask::keep(&rows).unwrap_err().to_string(),
        format!("keep: expected {axes} to fit into memory, got [1, 1, {huge}, 1]")
    );
    assert!(matches!(Mask::causal().bind(huge, huge, 1, 1).unwrap().to_array(), Err(Error::TooLarge { .. })));
}

#[test]
fn levels_that_the_cpu_does_not_have() {
    let q = Array4::<f32>::zeros((1, 1, 1, 1));
    let available = Level::available().iter().map(Level::to_string).collect::<Vec<_>>().join(", ");
    for level in [Level::Amx, Level::Avx512, Level::Avx2, Level::Portable] {
        let verdict = attention::forward(&q, &q, &q, &Options::new().level(level)).map(drop);
        let text = format!("level: expected one that this CPU has ({available}), got {level}");
        assert_eq!(verdict.map_err(|e| e.to_string()), if level.is_available() { Ok(()) } else { Err(text.clone()) });
        assert_eq!(Error::Level { available: available.clone(), got: level.to_string() }.to_string(), text);
    }
    let unknown = "sse9".parse::<Level>().unwrap_err();
    assert_eq!(unknown.to_string(), "level: expected one of amx, avx512, avx2, portable, got sse9");
}

#[test]
fn tiles_without_queries() {
    let q = Array4::<f32>::zeros((1, 1, 1, 1));
    let refused = attention::forward(&q, &q, &q, &Options::new().query_tile(0)).map(drop);
    assert_eq!(refused.unwrap_err().to_string(), "query_tile: expected at least 1, got 0");
}

#[test]
fn a_refused_call_writes_nothing() {
    let (q, k) = (Array4::<f64>::ones((1, 2, 3, 4)), Array4::ones((1, 2, 5, 4)));
    let mut workspace = Workspace::new();
    let mut context = Array4::from_elem((1, 2, 3, 5), 7.0);
    let refused = attention::forward_into(&q, &k, &k, &Options::new(), &mut context, &mut workspace);
    let axes = "[batch, num_heads, q_len, value_dim]";
    assert_eq!(refused.unwrap_err().to_string(), format!("context: expected {axes} = [1, 2, 3, 4], got [1, 2, 3, 5]"));
    assert!(context.iter().all(|&c| c == 7.0));

    let mut context = Array4::from_elem((1, 2, 3, 4), 7.0);
    let options = Options::new().scale(f64::NAN);
    assert!(attention::forward_into(&q, &k, &k, &options, &mut context, &mut workspace).is_err());
    let mask = Mask::key_lengths(&[9]);
    let options = Options::new().mask(&mask);
    assert!(attention::forward_into(&q, &k, &k, &options, &mut context, &mut workspace).is_err());
    assert!(context.iter().all(|&c| c == 7.0));

    let mha = MultiHeadAttention::<f64>::builder(4, 2).build().unwrap();
    let x = Array3::ones((2, 3, 4));
    let mut output = Array3::from_elem((2, 2, 4), 7.0);
    let refused = mha.attend_into(&Inputs::new(&x), &Options::new(), &mut output, &mut workspace);
    let text = "output: expected [batch, q_len, d_model] = [2, 3, 4], got [2, 2, 4]";
    assert_eq!(refused.unwrap_err().to_string(), text);
    let mut output = Array3::from_elem((2, 3, 4), 7.0);
    assert!(mha.attend_into(&Inputs::new(&x), &options, &mut output, &mut workspace).is_err());
    assert!(mha.forward_into(&x, &mask, &mut output, &mut workspace).is_err());
    assert!(output.iter().all(|&y| y == 7.0));
}

#[test]
fn errors_can_be_passed_on() {
    fn passes<E: std::error::Error + Send + Sync + 'static>(error: E) -> Box<dyn std::error::Error + Send + Sync> {
        error.into()
    }
    let error = HeadMap::grouped(3, 2).unwrap_err();
    assert_eq!(passes(error.clone()).to_string(), error.to_string());
    let file = Error::File { tensor: "w_q".to_owned(), reason: "expected F32, got I64".to_owned() };
    assert_eq!(passes(file).to_string(), "w_q: expected F32, got I64");
}
