//! Options that a call of a layer has no place for are refused, by every call, and not dropped without a word.

use multihead::attention::NewTokens;
use multihead::inspect::Tokens;
use multihead::ndarray::{Array3, Array4, array};
use multihead::position::{Alibi, Buckets};
use multihead::{
    CacheShape, Error, HeadMap, Inputs, KvCache, LayerGradients, MultiHeadAttention, Options, Result, Workspace,
    attention,
};

/// Two heads of width 2.
fn layer() -> MultiHeadAttention<f64> {
    MultiHeadAttention::builder(4, 2).softcap(30.0).build().unwrap()
}

/// What every call of a layer says to the options, by name. None of them writes anything if it refuses.
fn verdicts(options: &Options<'_, f64>) -> Vec<(&'static str, Result<()>)> {
    let (mha, x) = (layer(), Array3::<f64>::ones((1, 3, 4)));
    let inputs = Inputs::new(&x);
    let untouched = Array3::from_elem((1, 3, 4), 7.0);
    let mut memory = mha.cache(1, 3).unwrap();
    mha.cache_context(&x, &mut memory).unwrap();
    let into = |run: &dyn Fn(&mut Array3<f64>) -> Result<()>| {
        let mut y = untouched.clone();
        let verdict = run(&mut y);
        assert_eq!(verdict.is_err(), y == untouched);
        verdict
    };
    let with_cache = |run: &dyn Fn(&mut KvCache<f64>) -> Result<()>| {
        let mut cache = mha.cache(1, 3).unwrap();
        let verdict = run(&mut cache);
        assert_eq!(verdict.is_err(), cache.is_empty());
        verdict
    };
    let workspace = Workspace::new;
    let (_, tape) = mha.forward_train(&inputs, &Options::new()).unwrap();
    vec![
        ("attend", mha.attend(&inputs, options).map(drop)),
        ("attend_into", into(&|y| mha.attend_into(&inputs, options, y, &mut workspace()))),
        ("forward_train", mha.forward_train(&inputs, options).map(drop)),
        ("forward_train_into", into(&|y| mha.forward_train_into(&inputs, options, y, &mut workspace()).map(drop))),
        ("backward", mha.backward(&tape.detach().attach(&inputs, options), &x).map(drop)),
        ("LayerGradients", LayerGradients::zeros(&mha, &inputs, options).map(drop)),
        ("decode_with", with_cache(&|cache| mha.decode_with(&inputs, cache, options).map(drop))),
        (
            "decode_with_into",
            with_cache(&|cache| {
                into(&|y| {
                    let mut fork = cache.fork()?;
                    mha.decode_with_into(&inputs, &mut fork, options, y, &mut workspace())
                })
                .and_then(|()| mha.decode_with_into(&inputs, cache, options, &mut untouched.clone(), &mut workspace()))
            }),
        ),
        ("decode_cross", mha.decode_cross(&inputs, &memory, options).map(drop)),
        ("decode_cross_into", into(&|y| mha.decode_cross_into(&inputs, &memory, options, y, &mut workspace()))),
        ("head_statistics", mha.head_statistics(&inputs, options, &Tokens::new()).map(drop)),
    ]
}

#[test]
fn rules_of_a_layer_are_refused_in_the_options_of_a_call() {
    for (call, verdict) in verdicts(&Options::new()) {
        assert_eq!(verdict, Ok(()), "{call}");
    }
    let (map, alibi) = (HeadMap::grouped(2, 2).unwrap(), Alibi::new(2));
    let (sinks, table, keys) = (array![0.0, 0.0], array![[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], array![[0.0, 0.0]]);
    let plain = Options::new;
    for (argument, options, got) in [
        ("scale", plain().scale(0.5), "0.5"),
        // The layer's own value is refused as well: it is not the call's to name.
        ("softcap", plain().softcap(30.0), "30"),
        ("heads", plain().heads(&map), "a map"),
        ("sinks", plain().sinks(&sinks), "an array"),
        ("alibi", plain().alibi(&alibi), "slopes"),
        ("relative_bias", plain().relative_bias(Buckets::Clipped { clip: 1 }, &table), "an array"),
        ("relative_keys", plain().relative_keys(&keys), "an array"),
    ] {
        let text = format!(
            "{argument}: expected none in a call of a layer, which has it from its builder or weights, got {got}"
        );
        for (call, verdict) in verdicts(&options) {
            let error = verdict.expect_err(call);
            assert!(matches!(error, Error::Value { .. }), "{call}");
            assert_eq!(error.to_string(), text, "{call}");
        }
    }
}

#[test]
fn weights_are_refused_where_nothing_returns_them() {
    let text = |call: &str, other: &str| {
        format!("weights: expected none asked of {call}; {other}, got weights() in the options")
    };
    let mut refused = 0;
    for (call, verdict) in verdicts(&Options::new().weights()) {
        let instead = match call {
            "attend_into" | "forward_train" | "forward_train_into" => Some("attend returns them"),
            "decode_with_into" => Some("decode_with returns them"),
            "decode_cross_into" => Some("decode_cross returns them"),
            _ => None,
        };
        refused += usize::from(instead.is_some());
        let want = instead.map_or(Ok(()), |instead| Err(text(call, instead)));
        assert_eq!(verdict.map_err(|error| error.to_string()), want, "{call}");
    }
    assert_eq!(refused, 5);

    let (q, asked) = (Array4::<f32>::ones((1, 2, 3, 4)), Options::new().weights());
    let (mut context, mut workspace) = (Array4::from_elem((1, 2, 3, 4), 7.0), Workspace::new());
    let mut cache = cache_of_tokens();
    cache.append(&q, &q).unwrap();
    let tokens = NewTokens { q: &q, k: &q, v: &q };
    let verdicts = [
        (
            text("forward_into", "forward and forward_saving_into return them"),
            attention::forward_into(&q, &q, &q, &asked, &mut context, &mut workspace),
        ),
        (
            text("decode_into", "decode returns them"),
            attention::decode_into(&q, &cache, &asked, &mut context, &mut workspace),
        ),
        (
            text("extend_into", "extend returns them"),
            attention::extend_into(&tokens, &mut cache, &asked, &mut context, &mut workspace),
        ),
    ];
    for (text, verdict) in verdicts {
        let error = verdict.expect_err(&text);
        assert!(matches!(error, Error::Value { argument: "weights", .. }));
        assert_eq!(error.to_string(), text);
    }
    assert_eq!((cache.len(), context.iter().all(|&x| x == 7.0)), (3, true));
}

fn cache_of_tokens() -> KvCache<f32> {
    KvCache::new(CacheShape { batch: 1, num_kv_heads: 2, capacity: 9, head_dim: 4, value_dim: 4 }).unwrap()
}
