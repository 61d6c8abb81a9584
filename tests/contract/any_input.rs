//! No input makes the crate panic, and every path refuses the same calls.

use crate::common;

use common::core::Core;
use common::distances::Distances;
use common::layer::Layer;
use common::layout::LAYOUTS;
use common::masks::{Rules, rules};
use common::{Call, Keep, Seeded, Via, property, ways};
use multihead::block::{Activation, FeedForward, FeedForwardWeights, Norm};
use multihead::ndarray::{Array1, Array2, Array3, Array4, Axis, s};
use multihead::position::{Llama3, Yarn};
use multihead::{
    HeadMap, Init, Mask, MultiHeadAttention, Options, Path, Rope, RopeScaling, RopeStyle, Weights, attention,
};
use proptest::prelude::*;

/// Small lengths, mostly alike, so that calls that fit come up too.
fn length() -> impl Strategy<Value = usize> {
    prop_oneof![6 => Just(2usize), 2 => Just(1usize), 1 => Just(0usize), 1 => Just(3usize)]
}

/// Mostly finite, sometimes not.
fn number() -> impl Strategy<Value = f64> {
    const ODD: [f64; 8] = [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -1.0, f64::MAX, f64::MIN_POSITIVE, 1e300];
    prop_oneof![3 => 0.1..4.0f64, 2 => prop::sample::select(&ODD[..])]
}

/// Any rule, most of them for heads of width 2.
fn rope() -> impl Strategy<Value = Rope> {
    let style = prop_oneof![Just(RopeStyle::HalfSplit), Just(RopeStyle::Interleaved)];
    let scaling = prop_oneof![
        number().prop_map(|factor| RopeScaling::Linear { factor }),
        number().prop_map(|factor| RopeScaling::Ntk { factor }),
        (number(), number(), number(), length()).prop_map(
            |(factor, low_freq_factor, high_freq_factor, original_len)| {
                RopeScaling::Llama3(Llama3 { factor, low_freq_factor, high_freq_factor, original_len })
            }
        ),
        (number(), length(), number(), number()).prop_map(|(factor, original_len, fast, slow)| {
            RopeScaling::Yarn(Yarn::new(factor, original_len).betas(fast, slow).attention_factor(factor))
        }),
    ];
    (style, number(), prop::option::of(length()), prop::option::of(scaling)).prop_map(
        |(style, theta, dims, scaling)| {
            let rope = Rope::new(style, theta);
            let rope = dims.map_or(rope, |dims| rope.dims(dims));
            scaling.map_or(rope, |scaling| rope.scaling(scaling))
        },
    )
}

/// Every way must give the same verdict, and an answer has the shapes that it should have.
fn agree_on(call: &impl Call, out: &[usize], scores: [usize; 4]) {
    let mut verdicts = Vec::new();
    for way in ways() {
        let verdict = call.answer(way).map(|answer| {
            assert_eq!(answer.out.shape(), out, "{way}");
            assert_eq!(answer.lse.shape(), &scores[..3], "{way}");
            assert_eq!(answer.weights.is_some(), way.keep == Keep::Weights, "{way}");
            assert!(answer.weights.is_none_or(|weights| weights.shape() == scores), "{way}");
        });
        let text = verdict.map_err(|error| error.to_string());
        assert!(text.as_ref().err().is_none_or(|text| text.contains(": expected ")), "{text:?}");
        if way.keep == Keep::Nothing {
            let into = call.out_into(way).map(drop).map_err(|error| error.to_string());
            assert_eq!(into, text, "{way}");
        }
        verdicts.push((way, text));
    }
    // A scale that only f64 can hold is refused in f32 alone, and a cache calls its arguments by other names.
    for (way, verdict) in &verdicts {
        let (_, first) = verdicts.iter().find(|(other, _)| other.precision == way.precision).unwrap();
        match way.via {
            Via::Arrays => assert_eq!(verdict, first, "{way}"),
            Via::Cache => assert_eq!(verdict.is_ok(), first.is_ok(), "{way}: {verdict:?} for {first:?}"),
        }
    }
}

#[test]
fn no_core_call_panics() {
    let shape = || prop::array::uniform4(length());
    let dense = (shape(), 0..=1u8);
    let options = (
        shape().prop_flat_map(rules),
        prop::option::of(dense),
        prop::option::of(length()),
        prop::option::of((prop::collection::vec(0..=2usize, 0..=3), length())),
        prop::option::of(number()),
        prop::option::of(number()),
    );
    let cases =
        (shape(), shape(), shape(), options, prop::array::uniform4(prop::sample::select(&LAYOUTS[..])), any::<u64>());
    property(400, cases, |(q, k, v, (rules, bias, sinks, map, scale, softcap), layouts, seed)| {
        let mut draws = Seeded(seed);
        let mut core = Core::new(draws.array(q), draws.array(k), draws.array(v)).mask(rules.mask()).layouts(layouts);
        if let Some((shape, rank)) = bias {
            let bias: Array4<f64> = draws.array(shape);
            core.bias = Some(if rank == 0 { bias.into_dyn() } else { Array2::zeros((shape[2], shape[3])).into_dyn() });
        }
        core.sinks = sinks.map(|n| draws.array(n));
        core.heads = map.and_then(|(map, kv_heads)| HeadMap::explicit(&map, kv_heads).ok());
        (core.scale, core.softcap) = (scale, softcap);
        agree_on(&core, &[q[0], q[1], q[2], v[3]], [q[0], q[1], q[2], k[2]]);
    });
}

#[test]
fn no_layer_call_panics() {
    let matrix = || (length(), length());
    let weights = (matrix(), matrix(), matrix(), matrix(), prop::array::uniform5(prop::option::of(length())));
    let sizes = (length(), length(), length(), length(), prop::option::of(prop::collection::vec(0..=2usize, 0..=3)));
    let sequence = || prop::array::uniform3(length());
    let inputs = (sequence(), prop::option::of((sequence(), sequence())));
    let offset = || prop_oneof![3 => Just(None), 2 => (0..2_000_000usize).prop_map(Some), 1 => Just(Some(usize::MAX))];
    let positions = (prop::option::of(rope()), [offset(), offset()]);
    let cases = (weights, sizes, inputs, prop::array::uniform4(length()).prop_flat_map(rules), number(), positions);
    property(400, cases, |((w_q, w_k, w_v, w_o, vectors), sizes, (query, key_value), rules, scale, positions)| {
        let (num_heads, num_kv_heads, head_dim, value_dim, kv_of_head) = sizes;
        let mut draws = Seeded(7);
        let [b_q, b_k, b_v, b_o, sinks] = vectors.map(|n| n.map(|n| draws.array(n)));
        let layer = Layer {
            num_heads,
            num_kv_heads,
            kv_of_head,
            head_dim,
            value_dim,
            scale: Some(scale),
            softcap: None,
            weights: Weights {
                b_q,
                b_k,
                b_v,
                b_o,
                sinks,
                ..Weights::new(draws.array(w_q), draws.array(w_k), draws.array(w_v), draws.array(w_o))
            },
            query: draws.array(query),
            key_value: key_value.map(|(key, value)| (draws.array(key), draws.array(value))),
            mask: rules.mask(),
            qk_norm_eps: None,
            rope: positions.0,
            offsets: positions.1,
            distances: Distances::default(),
            shared: false,
            bias: None,
            dropout: None,
        };
        let kv_len = key_value.map_or(query[1], |(key, _)| key[1]);
        agree_on(&layer, &query, [query[0], num_heads, query[1], kv_len]);
    });
}

#[test]
fn no_layer_that_fits_is_refused() {
    let cases = (1..=3usize, 1..=3usize, 1..=4usize, 1..=4usize, 0..=3usize, any::<u64>());
    property(64, cases, |(kv_heads, group, head_dim, value_dim, len, seed)| {
        let num_heads = kv_heads * group;
        let mha = MultiHeadAttention::<f64>::builder(5, num_heads)
            .num_kv_heads(kv_heads)
            .head_dim(head_dim)
            .value_dim(value_dim)
            .k_dim(3)
            .v_dim(2)
            .bias()
            .sinks()
            .qk_norm(1e-6)
            .seed(seed)
            .init(Init::KaimingUniform)
            .build()
            .unwrap();
        let mut draws = Seeded(seed);
        let layer = Layer {
            num_heads,
            num_kv_heads: kv_heads,
            kv_of_head: None,
            head_dim,
            value_dim,
            scale: None,
            softcap: None,
            weights: mha.into_weights(),
            query: draws.array((2, len, 5)),
            key_value: Some((draws.array((2, 4, 3)), draws.array((2, 4, 2)))),
            mask: Rules(Vec::new()).mask(),
            qk_norm_eps: Some(0.5),
            rope: (head_dim > 1).then(|| Rope::new(RopeStyle::HalfSplit, 100.0).dims(2)),
            offsets: [Some(5), None],
            distances: Distances::default(),
            shared: false,
            bias: None,
            dropout: None,
        };
        layer.everywhere(|run| assert_eq!(run.answer.out.shape(), [2, len, 5]));
    });
}

#[test]
fn no_number_of_a_head_map_or_mask_panics() {
    let count = || prop_oneof![0..=5usize, Just(usize::MAX), Just(usize::MAX / 2), Just(1usize << 40)];
    property(400, (count(), count(), count(), count()), |(a, b, c, d)| {
        if let Ok(map) = HeadMap::grouped(a, b) {
            match map.kv_head(c) {
                Some(kv_head) => assert!(c < map.num_heads() && kv_head < map.num_kv_heads()),
                None => assert!(c >= map.num_heads()),
            }
            assert!(map.query_heads(d).take(3).all(|head| head < map.num_heads()));
        }
        let keep = Array2::from_elem((2, 3), true);
        let mask = Mask::keep(&keep).unwrap() & Mask::window(a, b) & Mask::causal_offset(c);
        let bound = mask.bind(1, 1, 2, 3).unwrap();
        // Pairs that do not exist have no right answer, but asking is no crime.
        let _ = bound.sees(a, b, c, d);
        let _ = bound.tile(a, b, 0..2, c.min(3)..3);
        assert!(Mask::causal().bind(a, b, c, d).is_ok());
    });
}

/// The tiled path walked every KV head, and the dense one made room for each: 2^40 of them for one query head.
#[test]
fn a_broadcast_of_more_kv_heads_than_memory_holds_is_not_walked() {
    let q = Array4::<f32>::ones((1, 1, 2, 3));
    let kv = q.slice(s![.., 0, .., ..]).insert_axis(Axis(1));
    let kv = kv.broadcast((1, 1 << 40, 2, 3)).unwrap();
    let heads = HeadMap::explicit(&[1 << 39], 1 << 40).unwrap();
    for path in [Path::Reference, Path::Dense, Path::Tiled] {
        let attended = attention::forward(&q, &kv, &kv, &Options::new().heads(&heads).path(path)).unwrap();
        assert_eq!(attended.context, q, "{path:?}");
    }
}

/// The tiled path took its scratch without asking whether there is so much memory.
#[test]
fn a_broadcast_of_heads_wider_than_memory_is_refused() {
    let one = Array4::<f32>::ones((1, 1, 1, 1));
    let wide = one.broadcast((1, 1, 1, 1 << 50)).unwrap();
    let error = attention::forward(&wide, &wide, &one, &Options::new()).unwrap_err();
    let text =
        format!("workspace: expected [rows, head_dim, value_dim] to fit into memory, got [1, {}, 1]", 1u64 << 50);
    assert_eq!(error.to_string(), text);
}

/// Arrays without numbers take no memory, however long they are. (Each of these was walked, or overflowed.)
#[test]
fn any_number_of_tokens_without_numbers_takes_no_time() {
    let many = 1usize << 50;
    let x = Array3::<f32>::zeros((many, 1, 0));
    for width in [0, 8] {
        let weights = FeedForwardWeights::new(Array2::zeros((0, width)), Array2::zeros((width, 0)));
        let weights = FeedForwardWeights { b_in: Some(Array1::ones(width)), ..weights };
        let mut block = FeedForward::new(weights, Activation::Relu).unwrap();
        block.prepack().unwrap();
        assert_eq!(block.forward(&x).unwrap().dim(), x.dim());
        assert_eq!(block.backward(&x, &x).unwrap().weights.b_in, Some(Array1::zeros(width)));
    }
    let norm = Norm::layer(Array1::zeros(0), Some(Array1::zeros(0)), 1e-5).unwrap();
    assert_eq!(norm.forward(&x).unwrap().dim(), x.dim());
    assert_eq!(norm.backward(&x, &x).unwrap().d_x.dim(), x.dim());
    // Neither do matrices.
    let weights = FeedForwardWeights::new(Array2::<f32>::zeros((many, 0)), Array2::zeros((0, many)));
    let mut block = FeedForward::new(weights, Activation::Relu).unwrap();
    block.prepack().unwrap();
    assert_eq!(block.forward(&Array3::zeros((0, 1, many))).unwrap().dim(), (0, 1, many));
}
