//! Are configurations read as they were written, checked as if they were built, and whole: what they make has the same
//! arrays?

#![cfg(feature = "serde")]

use multihead::ndarray::Array1;
use multihead::position::{Alibi, Buckets, Llama3, Yarn};
use multihead::{Builder, Config, HeadMap, MultiHeadAttention, Projection, Rope, RopeScaling, RopeStyle, Weights};
use serde_json::{Value, json};

fn builder() -> Builder<f32> {
    MultiHeadAttention::builder(12, 3).head_dim(4)
}

#[test]
fn any_configuration_is_read_back() {
    let rope = Rope::new(RopeStyle::HalfSplit, 500_000.0);
    let rule = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 };
    let builders = [
        builder(),
        builder().num_kv_heads(1).scale(0.25).softcap(50.0),
        builder().kv_of_head(&[1, 0, 1]).num_kv_heads(5).value_dim(7).k_dim(11).v_dim(13).scale(-0.0),
        builder().rope(rope),
        builder().rope(Rope::new(RopeStyle::Interleaved, 1e4).dims(2).scaling(RopeScaling::Linear { factor: 4.0 })),
        builder().rope(rope.scaling(RopeScaling::Ntk { factor: 2.0 })),
        builder().rope(rope.scaling(RopeScaling::Llama3(rule))),
        builder().rope(rope.scaling(RopeScaling::Yarn(Yarn::new(32.0, 4096).betas(16.0, 2.0).exact_bounds()))),
        builder().rope(rope.scaling(RopeScaling::Yarn(Yarn::new(32.0, 4096).attention_factor(1.0)))),
        builder().alibi().qk_norm(1e-5),
        builder().alibi_slopes(Alibi::with_slopes(&[0.5, -0.25, 0.0])),
        builder().relative_bias(Buckets::T5 { count: 32, max_distance: 128 }),
        builder().relative_bias(Buckets::Clipped { clip: 3 }),
        builder().relative_keys(0),
        builder().relative_keys(5).num_kv_heads(1),
        builder().bias().value_dim(7),
        builder().biases(&[Projection::Output, Projection::Key, Projection::Key]),
        builder().sinks(),
        builder().sinks().bias().qk_norm(1e-5).relative_keys(2).relative_bias(Buckets::Clipped { clip: 3 }).alibi(),
    ];
    for builder in builders {
        let mha = builder.build().unwrap();
        let text = serde_json::to_string(mha.config()).unwrap();
        let read: Config = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{text}: {e}"));
        assert_eq!(&read, mha.config(), "{text}");
        let other = read.builder::<f32>().build().unwrap();
        assert_same_structure(&other, &mha);
    }
}

/// The same configuration, and weights with the same arrays, which is what the configuration says.
#[track_caller]
fn assert_same_structure(got: &MultiHeadAttention<f32>, want: &MultiHeadAttention<f32>) {
    let shapes = |mha: &MultiHeadAttention<f32>| {
        let arrays = mha.weights().iter().map(|(name, array)| (name, array.shape().to_vec()));
        arrays.collect::<Vec<_>>()
    };
    assert_eq!(got.config(), want.config());
    assert_eq!(shapes(got), shapes(want));
    for mha in [got, want] {
        assert_eq!(mha.config().parameters(), mha.weights().parameters());
    }
}

#[test]
fn a_configuration_says_what_the_weights_have() {
    let full = || builder().sinks().bias().qk_norm(1e-5).relative_keys(2).build().unwrap();
    let config = full().config().clone();
    assert_eq!(config.biases, [Projection::Query, Projection::Key, Projection::Value, Projection::Output]);
    assert_eq!((config.sinks, config.q_norm, config.k_norm, config.relative_keys), (true, true, true, Some(2)));

    // What the weights have counts, whatever the builder says; one norm without the other cannot be asked of it.
    let weights = Weights { b_q: None, k_norm: None, sinks: None, relative_keys: None, ..full().into_weights() };
    let mha = full().config().builder().from_weights(weights.clone()).unwrap();
    let config = mha.config();
    assert_eq!(config.biases, [Projection::Key, Projection::Value, Projection::Output]);
    assert_eq!((config.sinks, config.q_norm, config.k_norm, config.relative_keys), (false, true, false, None));
    assert_same_structure(&config.builder().build().unwrap(), &mha);

    let mut other = full();
    other.set_weights(weights).unwrap();
    assert_eq!(&other, &mha);
    assert_same_structure(
        &mha.pool_kv_heads(1).unwrap().config().builder().build().unwrap(),
        &mha.pool_kv_heads(1).unwrap(),
    );
    let pruned = full().prune_heads(&[1]).unwrap();
    assert_same_structure(&pruned.config().builder().build().unwrap(), &pruned);
    // A refused replacement leaves the configuration alone.
    let bad = Weights { b_o: None, sinks: Some(Array1::zeros(2)), ..mha.weights().clone() };
    assert!(other.set_weights(bad).is_err());
    assert_eq!(&other, &mha);
}

#[test]
fn what_is_written_stays_as_it_is() {
    let mha = builder().kv_of_head(&[1, 0, 1]).rope(Rope::new(RopeStyle::HalfSplit, 1e4)).build().unwrap();
    let want = json!({
        "d_model": 12,
        "heads": {"num_heads": 3, "num_kv_heads": 2, "kv_of_head": [1, 0, 1]},
        "head_dim": 4, "value_dim": 4, "k_dim": 12, "v_dim": 12,
        "qk_norm_eps": 1e-6,
        "rope": {"style": "half_split", "theta": 1e4},
    });
    assert_eq!(serde_json::to_value(mha.config()).unwrap(), want);
    let mha = builder().biases(&[Projection::Output, Projection::Query]).sinks().qk_norm(1e-6).relative_keys(2);
    let want = json!({
        "d_model": 12,
        "heads": {"num_heads": 3, "num_kv_heads": 3},
        "head_dim": 4, "value_dim": 4, "k_dim": 12, "v_dim": 12,
        "biases": ["query", "output"], "sinks": true,
        "q_norm": true, "k_norm": true, "qk_norm_eps": 1e-6, "relative_keys": 2,
    });
    assert_eq!(serde_json::to_value(mha.build().unwrap().config()).unwrap(), want);
    let scaling = Rope::new(RopeStyle::Interleaved, 1e4).scaling(RopeScaling::Linear { factor: 4.0 });
    let want = json!({"style": "interleaved", "theta": 1e4, "scaling": {"linear": {"factor": 4.0}}});
    assert_eq!(serde_json::to_value(scaling).unwrap(), want);
}

#[test]
fn what_is_left_out_has_the_defaults_of_the_builder() {
    let text = r#"{"d_model": 64, "heads": {"num_heads": 8, "num_kv_heads": 2}}"#;
    let mha = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(2).build().unwrap();
    assert_eq!(&serde_json::from_str::<Config>(text).unwrap(), mha.config());
}

#[test]
fn what_could_not_be_built_is_not_read() {
    let heads = |value: Value| serde_json::from_value::<HeadMap>(value).unwrap_err().to_string();
    assert_eq!(
        heads(json!({"num_heads": 3, "num_kv_heads": 2})),
        "num_heads: expected a multiple of num_kv_heads = 2, got 3"
    );
    assert_eq!(heads(json!({"num_heads": 0, "num_kv_heads": 2})), "num_heads: expected at least 1, got 0");
    assert_eq!(heads(json!({"num_heads": 2, "num_kv_heads": 0})), "num_kv_heads: expected at least 1, got 0");
    assert_eq!(
        heads(json!({"num_heads": 2, "num_kv_heads": 2, "kv_of_head": [0, 2]})),
        "kv_of_head[1]: expected a KV head below num_kv_heads = 2, got 2"
    );
    assert_eq!(
        heads(json!({"num_heads": 3, "num_kv_heads": 2, "kv_of_head": [0, 1]})),
        "kv_of_head: expected one entry for each of num_heads = 3, got 2"
    );
    assert!(
        heads(json!({"num_heads": 2, "num_kv_heads": 2, "group_size": 1})).starts_with("unknown field `group_size`")
    );
    assert!(heads(json!({"num_heads": 2})).starts_with("missing field `num_kv_heads`"));

    let config = |key: &str, value: Value| {
        let mut config = json!({"d_model": 12, "heads": {"num_heads": 3, "num_kv_heads": 3}});
        config[key] = value;
        serde_json::from_value::<Config>(config).unwrap_err().to_string()
    };
    assert_eq!(
        config("d_model", json!(10)),
        "d_model: expected a multiple of num_heads = 3 where head_dim is not given, got 10"
    );
    assert_eq!(config("d_model", json!(0)), "d_model: expected at least 1, got 0");
    assert_eq!(config("head_dim", json!(0)), "head_dim: expected at least 1, got 0");
    assert_eq!(config("softcap", json!(-1.0)), "softcap: expected a finite number above 0, got -1");
    let rope = |dims: usize| json!({"style": "half_split", "theta": 1e4, "dims": dims});
    assert_eq!(config("rope", rope(6)), "rope dims: expected an even number from 2 to head_dim, got 6");
    assert!(config("dropout", json!(0.1)).starts_with("unknown field `dropout`"));
    assert!(config("d_model", json!(-1)).starts_with("invalid value"));
    let slopes = json!({"own": [0.5, 0.25]});
    assert_eq!(config("alibi", slopes), "alibi slopes: expected [num_heads] = [3], got [2]");
    let buckets = json!({"t5": {"count": 5, "max_distance": 128}});
    assert_eq!(config("relative_bias", buckets), "buckets: expected a multiple of 4 above 0, got 5");
    let scaled = json!({"style": "half_split", "theta": 1e4, "scaling": {"ntk": {"factor": 0.0}}});
    assert_eq!(config("rope", scaled), "rope factor: expected a finite number above 0, got 0");
}
