//! Layers from files and back: every family's layout, exactly; what is missing or does not fit is named.

#![cfg(feature = "safetensors")]

use crate::common;

use common::Seeded;
use common::families::{Plan, plan, torch};
use common::models::File;
use multihead::io::{Fusion, Layout, StoredAxes, TensorMap, Tensors};
use multihead::ndarray::{Array1, Array2, Array3, ArrayD, array};
use multihead::position::Buckets;
use multihead::{Builder, Element, Mask, MultiHeadAttention, Projection, Rope, RopeStyle, Weights};
use std::fs;
use std::path::Path;

/// The bytes of a file with this layer.
fn saved<T: Element>(mha: &MultiHeadAttention<T>, layout: &Layout) -> Vec<u8> {
    let mut tensors = TensorMap::new();
    layout.save(mha, &mut tensors).unwrap();
    tensors.to_bytes()
}

fn loaded<T: Element>(bytes: &[u8], builder: Builder<T>, layout: &Layout) -> Result<MultiHeadAttention<T>, String> {
    builder.load(&Tensors::from_bytes(bytes).unwrap(), layout).map_err(|e| e.to_string())
}

/// Loads the layer in both types, and finds the same tensors in what is saved as in the file.
fn check_plan(file: &str, bytes: &[u8], plan: &Plan) {
    let tensors = Tensors::from_bytes(bytes).unwrap();
    let wide = plan.load(&tensors).unwrap_or_else(|e| panic!("{file}: {e}"));
    let builder = || wide.config().builder::<f32>();
    let mha = builder().load(&tensors, &plan.layout).unwrap();
    assert_eq!(mha.config(), wide.config(), "{file}");
    assert_eq!(mha.w_q().mapv(f64::from), wide.w_q(), "{file}");
    assert_eq!(mha.w_v().mapv(f64::from), wide.w_v(), "{file}");

    let saved = saved(&mha, &plan.layout);
    let saved = Tensors::from_bytes(&saved).unwrap();
    for name in saved.names() {
        let [got, want]: [ArrayD<f32>; 2] = [&saved, &tensors].map(|tensors| tensors.get(&name).unwrap());
        assert_eq!(got.shape(), want.shape(), "{file} {name}");
        let bits = |array: &ArrayD<f32>| array.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&got), bits(&want), "{file} {name}");
    }
    assert_eq!(builder().load(&saved, &plan.layout).unwrap(), mha, "{file}");
}

#[test]
fn every_family_comes_back_as_it_was() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/models"));
    let mut layers = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let bytes = fs::read(&path).unwrap();
        let file = File::parse(&bytes).unwrap();
        if file.tensors.contains_key("input.src") {
            for prefix in
                ["encoder.layers.0.self_attn", "decoder.layers.0.self_attn", "decoder.layers.0.multihead_attn"]
            {
                check_plan(&name, &bytes, &torch(&file, prefix).unwrap());
                layers += 1;
            }
            continue;
        }
        let modules = file.tensors.keys().filter(|name| name.starts_with("want.attn.")).count();
        for index in 0..modules.max(1) {
            check_plan(&name, &bytes, &plan(&file, index).unwrap());
            layers += 1;
        }
    }
    assert!(layers > 30, "{layers} layers");
}

/// A layer with whatever weights can have.
fn full<T: Element>(builder: Builder<T>, seed: u64) -> MultiHeadAttention<T> {
    let built = builder.clone().build().unwrap();
    let mut draws = Seeded(seed);
    let mut weights = built.into_weights();
    let mut draw = |x: &mut T| *x = T::from_f64(draws.draw());
    for matrix in [&mut weights.w_q, &mut weights.w_k, &mut weights.w_v, &mut weights.w_o] {
        matrix.iter_mut().for_each(&mut draw);
    }
    let Weights { b_q, b_k, b_v, b_o, sinks, q_norm, k_norm, relative_bias, .. } = &mut weights;
    for vector in [b_q, b_k, b_v, b_o, sinks, q_norm, k_norm].into_iter().flatten() {
        vector.iter_mut().for_each(&mut draw);
    }
    relative_bias.iter_mut().flatten().for_each(&mut draw);
    builder.from_weights(weights).unwrap()
}

/// Each layout with a builder whose layers have all that it can hold.
fn layouts<T: Element>() -> Vec<(Layout, Builder<T>)> {
    let plain = || MultiHeadAttention::<T>::builder(12, 6).bias();
    let rope = |style| plain().num_kv_heads(2).head_dim(6).rope(Rope::new(style, 100.0).dims(4));
    let all = |style| rope(style).qk_norm(1e-5).sinks();
    let buckets = Buckets::T5 { count: 8, max_distance: 20 };
    let uneven = || rope(RopeStyle::HalfSplit).kv_of_head(&[1, 0, 0, 1, 1, 1]).value_dim(5);
    vec![
        (Layout::torch("a"), plain()),
        (Layout::torch(""), plain()),
        (Layout::torch_separate("a"), plain().k_dim(7).v_dim(5)),
        (Layout::bert("layer.0.attention"), plain()),
        (Layout::gpt2("h.0.attn"), plain()),
        (Layout::gpt_bigcode("h.0.attn"), plain().num_kv_heads(1)),
        (Layout::gpt_bigcode("h.0.attn"), plain()),
        (Layout::gpt_neox("layers.0.attention"), plain()),
        (Layout::falcon("h.0"), rope(RopeStyle::HalfSplit)),
        (Layout::falcon("h.0"), rope(RopeStyle::Interleaved)),
        (Layout::falcon("h.0"), uneven()),
        (Layout::fused("qkv", Fusion::Groups, "out").stored(StoredAxes::InOut), uneven()),
        (Layout::fused("qkv", Fusion::Blocks, "out"), uneven()),
        (Layout::llama("l"), all(RopeStyle::HalfSplit)),
        (Layout::llama("l"), all(RopeStyle::Interleaved)),
        (Layout::llama_meta("l"), rope(RopeStyle::Interleaved)),
        (Layout::llama_meta("l"), rope(RopeStyle::HalfSplit)),
        (Layout::t5("block.0"), plain().relative_bias(buckets)),
        (Layout::vit("v"), plain()),
        (Layout::detr("d"), plain()),
        (Layout::separate(["q", "k", "v", "o"]).stored(StoredAxes::InOut), plain().num_kv_heads(3)),
    ]
}

fn round_trips<T: Element>() {
    for (index, (layout, builder)) in layouts::<T>().into_iter().enumerate() {
        let mha = full(builder.clone(), index as u64);
        let bytes = saved(&mha, &layout);
        assert_eq!(loaded(&bytes, builder, &layout).as_ref(), Ok(&mha), "{index}");
        assert_eq!(bytes, saved(&mha, &layout), "{index}");
        // The format's own library reads the file.
        assert!(safetensors::SafeTensors::deserialize(&bytes).is_ok(), "{index}");
    }
}

#[test]
fn round_trips_are_exact() {
    round_trips::<f32>();
    round_trips::<f64>();
}

#[test]
fn b53_square_weights_in_files() {
    let stored: Array2<f64> = array![[0.0, 1.0], [0.0, 0.0]];
    let eye = Array2::eye(2);
    for turned in 0..4 {
        let mut tensors = TensorMap::new();
        for (index, name) in ["q", "k", "v", "o"].into_iter().enumerate() {
            tensors.insert(&format!("{name}.weight"), if index == turned { &stored } else { &eye }).unwrap();
        }
        let bytes = tensors.to_bytes();
        let load = |axes| {
            let layout = Layout::separate(["q", "k", "v", "o"]).stored(axes);
            loaded(&bytes, MultiHeadAttention::builder(2, 1), &layout).unwrap()
        };
        let project = |mha: &MultiHeadAttention<f64>| {
            let w = [mha.w_q(), mha.w_k(), mha.w_v(), mha.w_o()][turned];
            array![5.0, 7.0].dot(w)
        };
        assert_eq!(project(&load(StoredAxes::OutIn)), array![7.0, 0.0]);
        assert_eq!(project(&load(StoredAxes::InOut)), array![0.0, 5.0]);
        let mha = load(StoredAxes::OutIn);
        let layout = Layout::separate(["q", "k", "v", "o"]);
        assert_eq!(saved(&mha, &layout), bytes);
    }
    let mut tensors = TensorMap::new();
    tensors.insert("q.weight", &Array2::<f64>::zeros((2, 3))).unwrap();
    let refused = loaded(
        &tensors.to_bytes(),
        MultiHeadAttention::<f64>::builder(2, 1).head_dim(3),
        &Layout::separate(["q", "k", "v", "o"]),
    );
    assert_eq!(refused.unwrap_err(), "q.weight: expected [out, in] = [3, 2], got [2, 3]");
}

#[test]
fn b54_a_fused_matrix_is_cut_by_the_counts_of_heads() {
    // Row r is r + 1 at column r mod 4: what a projection reads tells which row it got.
    let fused = Array2::from_shape_fn((8, 4), |(r, c)| if c == r % 4 { r as f64 + 1.0 } else { 0.0 });
    let mut tensors = TensorMap::new();
    tensors.insert("qkv.weight", &fused).unwrap();
    tensors.insert("out.weight", &Array2::<f64>::eye(4)).unwrap();
    let bytes = tensors.to_bytes();
    let builder = || MultiHeadAttention::<f64>::builder(4, 4).num_kv_heads(2);
    let x = array![1.0, 2.0, 3.0, 4.0];
    let blocks = loaded(&bytes, builder(), &Layout::fused("qkv", Fusion::Blocks, "out")).unwrap();
    assert_eq!(x.dot(blocks.w_q()), array![1.0, 4.0, 9.0, 16.0]);
    assert_eq!(x.dot(blocks.w_k()), array![5.0, 12.0]);
    assert_eq!(x.dot(blocks.w_v()), array![21.0, 32.0]);
    let input = Array3::from_shape_vec((1, 1, 4), x.to_vec()).unwrap();
    assert_eq!(blocks.forward(&input, &Mask::none()).unwrap(), array![[[21.0, 21.0, 32.0, 32.0]]]);
    // Two queries, a key, a value, and again.
    let groups = loaded(&bytes, builder(), &Layout::fused("qkv", Fusion::Groups, "out")).unwrap();
    assert_eq!(x.dot(groups.w_q()), array![1.0, 4.0, 5.0, 12.0]);
    assert_eq!(x.dot(groups.w_k()), array![9.0, 21.0]);
    assert_eq!(x.dot(groups.w_v()), array![16.0, 32.0]);

    let refused = loaded(&bytes, builder().num_kv_heads(4), &Layout::fused("qkv", Fusion::Blocks, "out"));
    assert_eq!(refused.unwrap_err(), "qkv.weight: expected [out, in] = [12, 4], got [8, 4]");
}

#[test]
fn b54_rows_in_pairs_are_reordered_for_halves() {
    let builder = |style| MultiHeadAttention::<f64>::builder(32, 8).num_kv_heads(2).bias().rope(Rope::new(style, 10.0));
    let halves = full(builder(RopeStyle::HalfSplit), 3);
    let bytes = saved(&halves, &Layout::llama_meta("m"));
    // Key row 4 g + 2 i of the file is column 4 g + i of the layer, and the row behind it is two columns further.
    let rows: Array2<f64> = Tensors::from_bytes(&bytes).unwrap().get("m.wk.weight").unwrap();
    for (row, column) in [0, 2, 1, 3, 4, 6, 5, 7].into_iter().enumerate() {
        assert_eq!(rows.row(row), halves.w_k().column(column), "{row}");
    }
    let pairs = loaded(&bytes, builder(RopeStyle::Interleaved), &Layout::llama_meta("m")).unwrap();
    assert_ne!(pairs.w_k(), halves.w_k());
    let x = Seeded(5).array((2, 6, 32));
    let [one, other] = [&halves, &pairs].map(|mha| mha.forward(&x, &Mask::causal()).unwrap());
    let error = (&one - &other).fold(0.0, |worst: f64, x| worst.max(x.abs()));
    assert!(error < 1e-14, "{error:e}");
    assert_eq!(loaded(&bytes, builder(RopeStyle::HalfSplit), &Layout::llama_meta("m")), Ok(halves));
}

#[test]
fn halves_are_widened() {
    use safetensors::tensor::{Dtype, TensorView, serialize};
    // 1, -2, 0.5 and 65504 or, in the wider range, 2^127.
    let numbers = [
        (Dtype::F16, [0x3c00u16, 0xc000, 0x3800, 0x7bff], [1.0, -2.0, 0.5, 65504.0]),
        (Dtype::BF16, [0x3f80, 0xc000, 0x3f00, 0x7f00], [1.0, -2.0, 0.5, 2f64.powi(127)]),
    ];
    for (dtype, bits, want) in numbers {
        let data: Vec<u8> = bits.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let tensor = || TensorView::new(dtype, vec![2, 2], &data).unwrap();
        let names = ["q_proj", "k_proj", "v_proj", "o_proj"].map(|name| format!("{name}.weight"));
        let bytes = serialize(names.map(|name| (name, tensor())), None).unwrap();
        let want = Array2::from_shape_vec((2, 2), want.to_vec()).unwrap().reversed_axes();
        let narrow = loaded::<f32>(&bytes, MultiHeadAttention::builder(2, 1), &Layout::llama("")).unwrap();
        let wide = loaded::<f64>(&bytes, MultiHeadAttention::builder(2, 1), &Layout::llama("")).unwrap();
        assert_eq!(narrow.w_k().mapv(f64::from), want);
        assert_eq!(wide.w_o(), want);
    }
}

#[test]
fn what_is_asked_for_has_to_be_there() {
    let builder = || MultiHeadAttention::<f32>::builder(4, 2);
    let bytes = saved(&builder().build().unwrap(), &Layout::llama("l"));
    let refused = |builder: Builder<f32>, layout: &Layout| loaded(&bytes, builder, layout).unwrap_err();
    let llama = Layout::llama("l");
    let missing = |name: &str| format!("{name}: expected in the file, got no such tensor");
    assert_eq!(refused(builder(), &Layout::llama("m")), missing("m.q_proj.weight"));
    assert_eq!(refused(builder().bias(), &llama), missing("l.q_proj.bias"));
    assert_eq!(refused(builder().biases(&[Projection::Output]), &llama), missing("l.o_proj.bias"));
    assert_eq!(refused(builder().sinks(), &llama), missing("l.sinks"));
    assert_eq!(refused(builder().qk_norm(1e-6), &llama), missing("l.q_norm.weight"));
    assert_eq!(refused(builder(), &Layout::detr("l")), missing("l.q_proj.bias"));
    let no_place = |argument: &str| format!("{argument}: expected a layout with a place for it, got none");
    assert_eq!(refused(builder().sinks(), &Layout::vit("l")), no_place("sinks"));
    assert_eq!(refused(builder().qk_norm(1e-6), &Layout::vit("l")), no_place("qk_norm"));
    assert_eq!(refused(builder().relative_keys(2), &llama), no_place("relative_keys"));
    let buckets = Buckets::T5 { count: 8, max_distance: 20 };
    assert_eq!(refused(builder().relative_bias(buckets), &llama), no_place("relative_bias"));
    // The sizes are the builder's.
    let text = "l.k_proj.weight: expected [out, in] = [2, 4], got [4, 4]";
    assert_eq!(refused(builder().num_kv_heads(1), &llama), text);
    let huge = MultiHeadAttention::<f32>::builder(usize::MAX, usize::MAX);
    assert!(refused(huge, &llama).starts_with("l.q_proj.weight: expected [out, in] = "));
    let many = MultiHeadAttention::<f32>::builder(4, usize::MAX).head_dim(usize::MAX);
    assert!(refused(many, &Layout::falcon("l")).starts_with("l.query_key_value.weight: expected in the file"));
}

#[test]
fn other_numbers_are_not_rounded() {
    let bytes = saved(&MultiHeadAttention::<f64>::builder(4, 2).build().unwrap(), &Layout::vit("l"));
    let refused = loaded::<f32>(&bytes, MultiHeadAttention::builder(4, 2), &Layout::vit("l"));
    assert_eq!(refused.unwrap_err(), "l.q_proj.weight: expected numbers of type F32, F16 or BF16, got F64");
}

#[test]
fn a_key_beside_the_input_is_refused() {
    let mha = MultiHeadAttention::<f32>::builder(4, 2).bias().build().unwrap();
    let mut tensors = TensorMap::new();
    Layout::torch("a").save(&mha, &mut tensors).unwrap();
    tensors.insert("a.bias_k", &Array3::<f32>::zeros((1, 1, 4))).unwrap();
    let refused = loaded::<f32>(&tensors.to_bytes(), MultiHeadAttention::builder(4, 2), &Layout::torch("a"));
    assert_eq!(refused.unwrap_err(), "a.bias_k: expected no such tensor, for the layer has nothing like it");
}

#[test]
fn what_cannot_be_written_is_refused_and_nothing_is() {
    let builder = || MultiHeadAttention::<f32>::builder(4, 2);
    let mut tensors = TensorMap::new();
    tensors.insert("l.o_proj.weight", &array![1.0f32]).unwrap();
    tensors.insert("out.weight", &array![1.0f32]).unwrap();
    let before = tensors.clone();
    let mut refused = |builder: Builder<f32>, layout: Layout| {
        let error = layout.save(&builder.build().unwrap(), &mut tensors).unwrap_err();
        assert_eq!(tensors, before);
        error.to_string()
    };
    let no_place = |argument: &str| format!("{argument}: expected a layout with a place for it, got none");
    assert_eq!(refused(builder().sinks(), Layout::vit("v")), no_place("sinks"));
    assert_eq!(refused(builder().qk_norm(1e-6), Layout::vit("v")), no_place("q_norm"));
    assert_eq!(refused(builder().relative_keys(2), Layout::llama("v")), no_place("relative_keys"));
    let buckets = Buckets::T5 { count: 8, max_distance: 20 };
    assert_eq!(refused(builder().relative_bias(buckets), Layout::llama("v")), no_place("relative_bias"));
    assert_eq!(refused(builder(), Layout::gpt2("v")), "v.c_attn.bias: expected a bias in the layer, got none");
    let some = builder().biases(&[Projection::Query]);
    let text = "v.in_proj_bias: expected queries, keys and values to have biases, or none of them, got some";
    assert_eq!(refused(some, Layout::torch("v")), text);
    let text = "l.o_proj.weight: expected a name that no other tensor has, got one that differs";
    assert_eq!(refused(builder(), Layout::vit("l")), text);
    let wide = builder().k_dim(3);
    let text = "v.in_proj_weight: expected one shape, got [12, 4] and [12, 3]";
    assert_eq!(refused(wide, Layout::torch("v")), text);
    // Two parts under one name.
    let same = Layout::separate(["q", "q", "v", "o"]);
    assert!(refused(builder(), same).starts_with("q.weight: expected "));
}

#[test]
fn norms_less_1_come_back() {
    let builder = || MultiHeadAttention::<f32>::builder(4, 2).qk_norm(1e-6);
    let stored = array![0.25f32, -0.5];
    let mut tensors = TensorMap::new();
    Layout::vit("l").save(&MultiHeadAttention::<f32>::builder(4, 2).build().unwrap(), &mut tensors).unwrap();
    tensors.insert("l.q_norm.weight", &stored).unwrap();
    tensors.insert("l.k_norm.weight", &stored).unwrap();
    let bytes = tensors.to_bytes();
    let mha = loaded(&bytes, builder(), &Layout::gemma3("l")).unwrap();
    assert_eq!(mha.weights().q_norm, Some(array![1.25, 0.5]));
    assert_eq!(saved(&mha, &Layout::gemma3("l")), bytes);
    let mut weights = mha.weights().clone();
    weights.k_norm = Some(Array1::from_elem(2, 1e-9));
    let tiny = builder().from_weights(weights).unwrap();
    let error = Layout::gemma3("l").save(&tiny, &mut TensorMap::new()).unwrap_err().to_string();
    assert_eq!(error, "l.k_norm.weight: expected norms that are 1 and a number of this type, got others");
}
