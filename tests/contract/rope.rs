//! Rotary positions: the rotation, its rules for long texts, and layers that use it.

use crate::common;

use common::distances::Distances;
use common::layer::Layer;
use common::layout::LAYOUTS;
use common::{Call, Precision, ROUNDING, Seeded, assert_bits, typed, widened};
use multihead::ndarray::{Array1, Array2, Array3, Array4, Axis, array, concatenate, s};
use multihead::position::{Alibi, Buckets, Llama3, Yarn};
use multihead::{
    Element, Inputs, Mask, MultiHeadAttention, Options, Positions, Rope, RopeScaling, RopeStyle, Weights, Workspace,
};
use std::f64::consts::TAU;

const STYLES: [RopeStyle; 2] = [RopeStyle::HalfSplit, RopeStyle::Interleaved];

/// Positions that reach from the first token to where `f32` angles have lost all digits.
const FAR: [usize; 4] = [0, 1000, 100_000, 1_000_000];

/// One head `[dims]` turned by the plain formula in f64.
fn plain(style: RopeStyle, head: &[f64], frequencies: &[f64], position: usize) -> Vec<f64> {
    let (mut turned, half) = (head.to_vec(), frequencies.len());
    for (i, frequency) in frequencies.iter().enumerate() {
        let (a, b) = match style {
            RopeStyle::HalfSplit => (i, half + i),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        let angle = frequency * position as f64;
        turned[a] = head[a] * angle.cos() - head[b] * angle.sin();
        turned[b] = head[b] * angle.cos() + head[a] * angle.sin();
    }
    turned
}

/// `theta^(-2 i / dims)`
fn powers(theta: f64, dims: usize) -> Vec<f64> {
    (0..dims / 2).map(|i| 1.0 / theta.powf(2.0 * i as f64 / dims as f64)).collect()
}

#[track_caller]
fn close(got: &[f64], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert!((got - want).abs() <= tolerance, "{i}: {got} is not {want} within {tolerance:e}");
    }
}

/// One head at one position, through the crate.
fn turned<T: Element>(rope: Rope, head: &[f64], position: usize) -> Vec<f64> {
    let x = Array1::from(head.to_vec()).into_shape_with_order((1, 1, 1, head.len())).unwrap();
    let mut x: Array4<T> = typed(&x);
    rope.rotate(&mut x, &Positions::offset(position)).unwrap();
    widened(&x).into_raw_vec_and_offset().0
}

#[test]
fn b48_rope_pairing() {
    let x = [1.0, 2.0, 3.0, 4.0];
    let wants = [
        [-1.984_110_65, 1.959_900_67, 2.462_377_90, 4.019_799_67],
        [-1.142_639_66, 1.922_075_60, 2.959_850_67, 4.029_799_50],
    ];
    for (style, want) in STYLES.into_iter().zip(wants) {
        let rope = Rope::new(style, 10_000.0);
        close(&turned::<f64>(rope, &x, 1), &want, 5e-9);
        close(&turned::<f32>(rope, &x, 1), &want, 1e-6);
        assert_eq!(turned::<f64>(rope, &x, 0), x);
        let norm = turned::<f64>(rope, &x, 1).iter().map(|x| x * x).sum::<f64>();
        assert!((norm - 30.0).abs() < 1e-13);
        // The gradient turns by the opposite angle.
        let mut back = Array4::from_shape_vec((1, 1, 1, 4), x.to_vec()).unwrap();
        rope.rotate_back(&mut back, &Positions::offset(1)).unwrap();
        let opposite: Vec<f64> = powers(10_000.0, 4).iter().map(|f| -f).collect();
        close(&back.into_raw_vec_and_offset().0, &plain(style, &x, &opposite, 1), 1e-15);
    }
}

#[test]
fn b49_rope_axis_and_offset() {
    let head = [0.3, -0.2, 0.7, 0.1];
    let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    let same = |len: usize| Array4::from_shape_fn((1, 2, len, 4), |(_, _, _, c)| head[c]);
    let at = |len: usize, offset: usize| {
        let mut x = same(len);
        rope.rotate(&mut x, &Positions::offset(offset)).unwrap();
        x
    };
    // (a) heads are alike, tokens differ
    let start = at(3, 0);
    assert_eq!(start.slice(s![.., 0, .., ..]), start.slice(s![.., 1, .., ..]));
    assert_ne!(start.slice(s![0, 0, 0, ..]), start.slice(s![0, 0, 1, ..]));
    // (b), (d) the offset counts, whatever was turned before and however long it was
    let long = at(11, 0);
    assert_eq!(at(3, 5), long.slice(s![.., .., 5..8, ..]));
    assert_eq!(at(3, 7), long.slice(s![.., .., 7..10, ..]));
    assert_ne!(at(3, 5), start);
    // The same in one workspace, through a layer.
    let layer = MultiHeadAttention::<f64>::builder(8, 2).rope(rope).seed(1).build().unwrap();
    let x: Array3<f64> = Seeded(49).array((1, 3, 8));
    let run = |inputs: &Inputs<'_, f64>, workspace: &mut Workspace<f64>| {
        let mut y = Array3::zeros((1, 3, 8));
        layer.attend_into(inputs, &Options::new(), &mut y, workspace).unwrap();
        y
    };
    let mut workspace = Workspace::new();
    let apart = |offset: usize| Inputs::new(&x).offset(offset).key_offset(0);
    for offset in [0, 5, 70, 5, 0] {
        assert_eq!(run(&apart(offset), &mut workspace), run(&apart(offset), &mut Workspace::new()), "{offset}");
    }
    assert_ne!(run(&apart(0), &mut workspace), run(&apart(5), &mut workspace));
}

#[test]
fn b50_partial_rotary() {
    let of_width = |dims: usize, style| Rope::new(style, 10_000.0).dims(dims);
    for style in STYLES {
        let got = turned::<f64>(of_width(2, style), &[1.0, 2.0, 3.0, 4.0], 1);
        close(&got, &[-1.142_639_66, 1.922_075_60, 3.0, 4.0], 5e-9);
    }
    let x = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0];
    let want = [-1.413_352_52, 1.879_118_07, -2.828_857_48, 4.058_191_14, 5.0, 6.0, 7.0, 8.0];
    close(&turned::<f64>(of_width(4, RopeStyle::HalfSplit), &x, 3), &want, 5e-9);

    for dims in [0, 3, 10, usize::MAX] {
        let rope = of_width(dims, RopeStyle::HalfSplit);
        let text = format!("rope dims: expected an even number from 2 to head_dim, got {dims}");
        let mut x = Array4::<f64>::ones((1, 1, 1, 8));
        assert_eq!(rope.rotate(&mut x, &Positions::offset(1)).unwrap_err().to_string(), text);
        assert!(x.iter().all(|&x| x == 1.0));
        assert_eq!(MultiHeadAttention::<f32>::builder(16, 2).rope(rope).build().unwrap_err().to_string(), text);
    }
    // All columns of an odd head cannot turn.
    let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    let error = MultiHeadAttention::<f32>::builder(15, 3).rope(rope).build().unwrap_err();
    assert_eq!(error.to_string(), "rope dims: expected an even number from 2 to head_dim, got 5");
}

#[test]
fn far_positions_are_as_exact_as_near_ones() {
    let head: Vec<f64> = Seeded(7).array(128).to_vec();
    for theta in [10_000.0, 500_000.0] {
        let frequencies = powers(theta, 128);
        for (style, position) in STYLES.into_iter().flat_map(|style| FAR.map(|position| (style, position))) {
            let want = plain(style, &head, &frequencies, position);
            let rope = Rope::new(style, theta);
            close(&turned::<f32>(rope, &head, position), &want, 1e-7);
            // The angle itself is known to a few parts in 2^53.
            close(&turned::<f64>(rope, &head, position), &want, 1e-15 + 4e-16 * position as f64);
        }
    }
}

/// Queries and keys of a layer at far positions: its scores against a layer without RoPE that is handed turned inputs.
#[test]
fn layers_are_exact_at_far_positions() {
    let x: Array3<f64> = Seeded(8).array((1, 6, 32)) * 4.0;
    for (style, position) in STYLES.into_iter().flat_map(|style| FAR.map(|position| (style, position))) {
        // Two identity heads of 16 columns; keys 40 tokens behind the queries.
        let rope = Rope::new(style, 10_000.0);
        let mut layer = Layer::identity(2, x.clone()).rope(rope).mask(Mask::causal());
        layer.offsets = [Some(position + 40), Some(position)];

        let turn = |offset: usize| {
            let mut heads = x.clone();
            for (t, mut token) in heads.index_axis_mut(Axis(0), 0).outer_iter_mut().enumerate() {
                for mut head in token.exact_chunks_mut(16) {
                    let turned = plain(style, &head.to_vec(), &powers(10_000.0, 16), offset + t);
                    head.assign(&Array1::from(turned));
                }
            }
            heads
        };
        let mut want = Layer::identity(2, turn(position + 40)).mask(Mask::causal());
        want.key_value = Some((turn(position), x.clone()));
        let want = want.oracle();
        layer.everywhere(|run| {
            let tolerance = match run.way.precision {
                Precision::F32 => 1e-5,
                Precision::F64 => 1e-9,
            };
            close(&run.answer.out.iter().copied().collect::<Vec<_>>(), &common::flat(&want.out), tolerance);
        });
    }
}

#[test]
fn scores_depend_on_distances_only() {
    let draw = |seed| -> Vec<f64> { Seeded(seed).array(64).to_vec() };
    let (q, k) = (draw(1), draw(2));
    let score = |rope: Rope, i: usize, j: usize| -> f64 {
        let (q, k) = (turned::<f64>(rope, &q, i), turned::<f64>(rope, &k, j));
        q.iter().zip(&k).map(|(q, k)| q * k).sum()
    };
    let yarn = RopeScaling::Yarn(Yarn::new(4.0, 64));
    for rope in STYLES.into_iter().flat_map(|s| [Rope::new(s, 10_000.0), Rope::new(s, 10_000.0).scaling(yarn)]) {
        for (i, j) in [(0, 0), (3, 0), (0, 3), (70, 2), (127, 64)] {
            let near = score(rope, i, j);
            for shift in [1, 63, 64, 1000, 99_937] {
                let far = score(rope, i + shift, j + shift);
                assert!((far - near).abs() < 1e-9, "{rope:?} {i} {j} {shift}: {far} {near}");
            }
            assert!(i == j || (score(rope, i, j) - score(rope, i + 1, j)).abs() > 1e-3);
        }
    }
    // A layer whose queries and keys move together gives the same output.
    let mut layer = Layer::identity(2, Seeded(9).array((2, 7, 16))).rope(Rope::new(RopeStyle::HalfSplit, 10_000.0));
    let want = layer.oracle();
    for offset in [1, 64, 12_345] {
        layer.offsets = [Some(offset), None];
        layer.everywhere(|run| run.agrees(&want, ROUNDING));
    }
}

#[test]
fn positions_can_be_named_one_by_one() {
    let rope = Rope::new(RopeStyle::Interleaved, 10_000.0).dims(4);
    let x: Array4<f64> = Seeded(10).array((2, 3, 5, 6));
    let ids = array![[0, 3, 1_000_000, 3, 64], [9, 8, 7, 6, 5]];
    let mut got = x.clone();
    rope.rotate(&mut got, &Positions::ids(&ids)).unwrap();
    for ((entry, head, token, _), _) in x.slice(s![.., .., .., ..1]).indexed_iter() {
        let at = s![entry, head, token, ..];
        let position = ids[[entry, token]];
        let mut want =
            plain(RopeStyle::Interleaved, &x.slice(s![entry, head, token, ..4]).to_vec(), &powers(1e4, 4), position);
        want.extend(x.slice(s![entry, head, token, 4..]));
        close(&got.slice(at).to_vec(), &want, 1e-9);
    }
    // One row of ids stands for all entries; consecutive ids are an offset, bit for bit.
    let row = array![[7, 8, 9, 10, 11]];
    let (mut by_ids, mut by_offset) = (x.clone(), x.clone());
    rope.rotate(&mut by_ids, &Positions::ids(&row)).unwrap();
    rope.rotate(&mut by_offset, &Positions::offset(7)).unwrap();
    assert_bits("ids", &by_ids, &by_offset);
    rope.rotate_back(&mut got, &Positions::ids(&ids)).unwrap();
    close(&common::flat(&got), &common::flat(&x), 1e-15);
}

#[test]
fn ids_and_offsets_of_a_layer() {
    let mut draws = Seeded(11);
    let x: Array3<f64> = draws.array((2, 4, 12));
    let memory: Array3<f64> = draws.array((2, 6, 12));
    let rope = Rope::new(RopeStyle::HalfSplit, 100.0);
    let mha = MultiHeadAttention::<f64>::builder(12, 3).rope(rope).seed(3).build().unwrap();
    let attend = |inputs: Inputs<'_, f64>| mha.attend(&inputs, &Options::new()).unwrap().output;
    let (plain, cross) = (attend(Inputs::new(&x)), attend(Inputs::new(&x).context(&memory)));

    let (ids, keys) = (array![[2, 3, 4, 5]], array![[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 9, 10]]);
    assert_bits("zero", &attend(Inputs::new(&x).offset(0)), &plain);
    assert_bits("ids", &attend(Inputs::new(&x).positions(&ids)), &attend(Inputs::new(&x).offset(2)));
    let by_ids = attend(Inputs::new(&x).context(&memory).positions(&ids).key_positions(&keys));
    assert_bits("both", &by_ids, &attend(Inputs::new(&x).context(&memory).offset(2).key_offset(5)));
    assert_ne!(by_ids, cross);
    // Ids by entry: each entry is what it is alone.
    let ids = array![[0, 1, 2, 3], [3, 9, 0, 1]];
    let together = attend(Inputs::new(&x).positions(&ids));
    for entry in 0..2 {
        let (x, ids) = (x.slice(s![entry..=entry, .., ..]), ids.slice(s![entry..=entry, ..]));
        let alone = attend(Inputs::new(&x).positions(&ids));
        assert_bits("alone", &alone, &together.slice(s![entry..=entry, .., ..]).to_owned());
    }

    let refused = |inputs: Inputs<'_, f64>| mha.attend(&inputs, &Options::new()).unwrap_err().to_string();
    let cross = || Inputs::new(&x).context(&memory);
    let wrong = array![[1, 2, 3]];
    assert_eq!(refused(Inputs::new(&x).positions(&wrong)), "positions: expected [batch, len] = [1, 4], got [1, 3]");
    let text = "positions (of the keys): expected [batch, len] = [2, 6], got [2, 4]";
    assert_eq!(refused(cross().positions(&ids)), text);
    let text = "key_positions: expected [batch, len] = [1, 6], got [1, 3]";
    assert_eq!(refused(cross().key_positions(&wrong)), text);
    let text = "positions: expected an offset that leaves room for the tokens behind it, got 18446744073709551615";
    assert_eq!(refused(Inputs::new(&x).offset(usize::MAX)), text);
}

#[test]
fn any_strides_give_the_same_bits() {
    let x: Array4<f64> = Seeded(12).array((2, 3, 70, 8));
    let ids = Array2::from_shape_fn((2, 70), |(entry, token)| 5 * token + 1000 * entry);
    for rope in STYLES.map(|style| Rope::new(style, 10_000.0).dims(6)) {
        for positions in [Positions::offset(30), Positions::ids(&ids)] {
            let mut want = x.clone();
            rope.rotate(&mut want, &positions).unwrap();
            for layout in LAYOUTS {
                let mut storage = layout.store::<f64>(&x);
                rope.rotate(&mut layout.view_mut(&mut storage), &positions).unwrap();
                assert_bits(&format!("{layout:?}"), &layout.view(&storage).to_owned(), &want);
            }
            // Heads of a projection lie side by side.
            let mut storage = x.view().permuted_axes([0, 2, 1, 3]).as_standard_layout().into_owned();
            rope.rotate(&mut storage.view_mut().permuted_axes([0, 2, 1, 3]), &positions).unwrap();
            assert_bits("by token", &storage.permuted_axes([0, 2, 1, 3]), &want);
        }
    }
}

#[test]
fn the_number_of_threads_does_not_move_a_bit() {
    // Large enough to be cut, at a width that cuts inside an entry.
    let x: Array4<f64> = Seeded(15).array((3, 700, 5, 24)).permuted_axes([0, 2, 1, 3]);
    for style in STYLES {
        let rope = Rope::new(style, 10_000.0);
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            let mut x = x.clone();
            pool.install(|| rope.rotate(&mut x, &Positions::offset(3)).unwrap());
            x
        };
        let want = on(1);
        for (entry, token) in [(0, 0), (1, 392), (1, 393), (2, 699)] {
            let head = x.slice(s![entry, 4, token, ..]).to_vec();
            let want_head = plain(style, &head, &powers(10_000.0, 24), token + 3);
            close(&want.slice(s![entry, 4, token, ..]).to_vec(), &want_head, 1e-12);
        }
        for threads in [2, 3, 8] {
            assert_bits(&format!("{threads} threads"), &on(threads), &want);
        }
    }
}

#[test]
fn turning_back_is_the_transpose() {
    // <y, R x> = <R^T y, x>, also where YaRN's factor is not 1.
    let mut draws = Seeded(13);
    let (x, y): (Array4<f64>, Array4<f64>) = (draws.array((2, 3, 9, 12)), draws.array((2, 3, 9, 12)));
    let yarn = RopeScaling::Yarn(Yarn::new(8.0, 16));
    for rope in STYLES.map(|style| Rope::new(style, 10_000.0).dims(8).scaling(yarn)) {
        let (mut there, mut back) = (x.clone(), y.clone());
        rope.rotate(&mut there, &Positions::offset(77)).unwrap();
        rope.rotate_back(&mut back, &Positions::offset(77)).unwrap();
        assert!(((&y * &there).sum() - (&back * &x).sum()).abs() < 1e-13);
        assert_ne!(there, x);
    }
}

#[test]
fn empty_heads_are_left_alone() {
    let rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
    for shape in [(0, 2, 3, 4), (2, 0, 3, 4), (2, 2, 0, 4), (1 << 40, 0, 1 << 20, 4)] {
        rope.rotate(&mut Array4::<f32>::zeros(shape), &Positions::offset(3)).unwrap();
    }
    assert!(rope.rotate(&mut Array4::<f32>::zeros((1, 1, 1, 0)), &Positions::offset(3)).is_err());
}

mod scaling {
    use super::*;

    fn frequencies(theta: f64, head_dim: usize, scaling: RopeScaling) -> Vec<f64> {
        Rope::new(RopeStyle::HalfSplit, theta).scaling(scaling).frequencies(head_dim).unwrap().to_vec()
    }

    #[track_caller]
    fn relatively_close(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        assert!(got.iter().zip(want).all(|(got, want)| (got / want - 1.0).abs() < 1e-13), "{got:?} is not {want:?}");
    }

    #[test]
    fn linear_divides_positions() {
        let plain_rope = Rope::new(RopeStyle::HalfSplit, 10_000.0);
        let rope = plain_rope.scaling(RopeScaling::Linear { factor: 4.0 });
        let head: Vec<f64> = Seeded(14).array(16).to_vec();
        close(&turned::<f64>(rope, &head, 4 * 77), &turned::<f64>(plain_rope, &head, 77), 1e-13);
    }

    #[test]
    fn ntk_is_a_larger_theta() {
        for (dims, factor) in [(4, 2.0), (64, 8.0), (128, 3.5)] {
            let base = 10_000.0 * f64::powf(factor, dims as f64 / (dims as f64 - 2.0));
            let got = frequencies(10_000.0, dims, RopeScaling::Ntk { factor });
            relatively_close(&got, &powers(base, dims));
            // The fastest pair stays and the slowest is divided by the factor.
            assert_eq!(got[0], 1.0);
            let slowest = powers(10_000.0, dims)[dims / 2 - 1];
            assert!((slowest / got[dims / 2 - 1] / factor - 1.0).abs() < 1e-13);
        }
        assert_eq!(frequencies(10_000.0, 2, RopeScaling::Ntk { factor: 8.0 }), [1.0]);
    }

    #[test]
    fn llama3_goes_by_wavelength() {
        let rule = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 8192 };
        let got = frequencies(500_000.0, 128, RopeScaling::Llama3(rule));
        let mut kinds = [0; 3];
        let want: Vec<f64> = powers(500_000.0, 128)
            .into_iter()
            .map(|f| {
                let wavelength = TAU / f;
                if wavelength < 8192.0 / 4.0 {
                    kinds[0] += 1;
                    return f;
                }
                if wavelength > 8192.0 / 1.0 {
                    kinds[1] += 1;
                    return f / 8.0;
                }
                kinds[2] += 1;
                let smooth = (8192.0 / wavelength - 1.0) / (4.0 - 1.0);
                (1.0 - smooth) * f / 8.0 + smooth * f
            })
            .collect();
        assert!(kinds.iter().all(|&n| n > 2), "{kinds:?}");
        relatively_close(&got, &want);
    }

    /// YaRN's published code: extrapolated and interpolated frequencies, mixed along a ramp over the pairs.
    fn yarn(theta: f64, dims: usize, factor: f64, length: f64, [fast, slow]: [f64; 2], whole: bool) -> Vec<f64> {
        let dimension_of = |turns: f64| (dims as f64 * (length / (turns * TAU)).ln()) / (2.0 * theta.ln());
        let mut ends = [dimension_of(fast), dimension_of(slow)];
        if whole {
            ends = [ends[0].floor(), ends[1].ceil()];
        }
        let [low, high] = [ends[0].max(0.0), ends[1].min(dims as f64 - 1.0)];
        let mixed = powers(theta, dims).into_iter().enumerate().map(|(i, f)| {
            let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (f / factor) * ramp + f * (1.0 - ramp)
        });
        mixed.collect()
    }

    #[test]
    fn yarn_blends_over_the_pairs() {
        let rule = Yarn::new(32.0, 4096);
        let got = |rule| frequencies(150_000.0, 64, RopeScaling::Yarn(rule));
        let bounds = [32.0, 1.0];
        relatively_close(&got(rule), &yarn(150_000.0, 64, 32.0, 4096.0, bounds, true));
        relatively_close(&got(rule.exact_bounds()), &yarn(150_000.0, 64, 32.0, 4096.0, bounds, false));
        let others = rule.betas(20.0, 2.5);
        relatively_close(&got(others), &yarn(150_000.0, 64, 32.0, 4096.0, [20.0, 2.5], true));
        assert_ne!(got(rule), got(rule.exact_bounds()));
        assert_ne!(got(rule), got(others));
        // Texts so short or so long that no pair lies between the bounds.
        let all = |len| frequencies(10_000.0, 8, RopeScaling::Yarn(Yarn::new(4.0, len)));
        relatively_close(&all(1_000_000_000), &powers(10_000.0, 8));
        assert!(all(1).iter().chain(&all(usize::MAX)).all(|f| f.is_finite()));
    }

    #[test]
    fn yarn_lengthens_the_turned_columns() {
        let head = [0.5, -0.25, 1.0, 2.0];
        let norm = |rule: Yarn, position| -> f64 {
            let rope = Rope::new(RopeStyle::Interleaved, 10_000.0).dims(2).scaling(RopeScaling::Yarn(rule));
            let turned = turned::<f64>(rope, &head, position);
            assert_eq!(turned[2..], head[2..]);
            (turned[0] * turned[0] + turned[1] * turned[1]).sqrt() / f64::hypot(head[0], head[1])
        };
        for position in [0, 9, 1000] {
            assert!((norm(Yarn::new(32.0, 64), position) - (0.1 * 32f64.ln() + 1.0)).abs() < 1e-14);
            assert!((norm(Yarn::new(32.0, 64).attention_factor(0.75), position) - 0.75).abs() < 1e-14);
            assert!((norm(Yarn::new(0.5, 64), position) - 1.0).abs() < 1e-14);
        }
    }

    #[test]
    fn numbers_out_of_range_are_refused() {
        let refused = |theta: f64, scaling: Option<RopeScaling>| {
            let rope = Rope::new(RopeStyle::HalfSplit, theta);
            let rope = scaling.map_or(rope, |scaling| rope.scaling(scaling));
            let error = MultiHeadAttention::<f32>::builder(16, 2).rope(rope).build().unwrap_err().to_string();
            assert_eq!(rope.frequencies(8).unwrap_err().to_string(), error);
            error
        };
        for theta in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            assert_eq!(refused(theta, None), format!("rope theta: expected a finite number above 0, got {theta}"));
        }
        let llama = Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_len: 64 };
        let finite = |name: &str, got: &str| format!("rope {name}: expected a finite number above 0, got {got}");
        let cases = [
            (RopeScaling::Linear { factor: 0.0 }, finite("factor", "0")),
            (RopeScaling::Ntk { factor: f64::NAN }, finite("factor", "NaN")),
            (RopeScaling::Llama3(Llama3 { factor: -1.0, ..llama }), finite("factor", "-1")),
            (RopeScaling::Llama3(Llama3 { original_len: 0, ..llama }), finite("original_len", "0")),
            (RopeScaling::Llama3(Llama3 { low_freq_factor: 0.0, ..llama }), finite("low_freq_factor", "0")),
            (
                RopeScaling::Llama3(Llama3 { low_freq_factor: 4.0, ..llama }),
                "rope low_freq_factor, high_freq_factor: expected the smaller number first, got 4 and 4".to_owned(),
            ),
            (RopeScaling::Yarn(Yarn::new(0.0, 64)), finite("factor", "0")),
            (RopeScaling::Yarn(Yarn::new(2.0, 0)), finite("original_len", "0")),
            (RopeScaling::Yarn(Yarn::new(2.0, 64).attention_factor(-1.0)), finite("attention_factor", "-1")),
            (
                RopeScaling::Yarn(Yarn::new(2.0, 64).betas(1.0, 32.0)),
                "rope beta_slow, beta_fast: expected the smaller number first, got 32 and 1".to_owned(),
            ),
        ];
        for (scaling, text) in cases {
            assert_eq!(refused(10_000.0, Some(scaling)), text);
        }
        let text = "rope theta: expected a number above 1 for YaRN, got 1";
        assert_eq!(refused(1.0, Some(RopeScaling::Yarn(Yarn::new(2.0, 64)))), text);
    }
}

/// A layer of 2 heads of width 4.
fn layer(seed: u64, x: Array3<f64>) -> Layer {
    let mut draws = Seeded(seed);
    let mut w = || -> Array2<f64> { draws.array((8, 8)) };
    Layer::new(2, Weights::new(w(), w(), w(), w()), x)
}

/// Queries in chunks, each with all tokens before it and its own as keys, which is what a cache makes of them.
#[test]
fn b12_and_b49_chunks_equal_the_whole() {
    let x: Array3<f64> = Seeded(12).array((2, 7, 8));
    let mut draws = Seeded(13);
    let kinds: [(Option<Rope>, Distances); 5] = [
        (Some(Rope::new(RopeStyle::HalfSplit, 10_000.0)), Distances::default()),
        (Some(Rope::new(RopeStyle::Interleaved, 10.0).dims(2)), Distances::default()),
        (None, Distances { alibi: Some(Alibi::new(2)), ..Distances::default() }),
        (None, Distances { bias: Some((Buckets::Clipped { clip: 3 }, draws.array((7, 2)))), ..Distances::default() }),
        (None, Distances { keys: Some(draws.array((5, 4))), ..Distances::default() }),
    ];
    for (rope, distances) in kinds {
        let mut whole = layer(14, x.clone()).mask(Mask::causal() & Mask::window(4, 0));
        whole.weights.q_norm = Some(draws.array(4) + 1.0);
        whole.weights.k_norm = whole.weights.q_norm.clone();
        (whole.rope, whole.distances) = (rope, distances);
        let want = whole.oracle().out;
        for chunks in [&[3, 1, 2, 1][..], &[1; 7], &[6, 1]] {
            let mut first = 0;
            for chunk in chunks {
                let tokens = |range| x.slice_axis(Axis(1), range).to_owned();
                let mut part = whole.clone();
                part.query = tokens((first..first + chunk).into());
                let seen = tokens((..first + chunk).into());
                part.key_value = Some((seen.clone(), seen));
                part.offsets = [Some(first), Some(0)];
                let want = want.slice_axis(Axis(1), (first..first + chunk).into()).to_owned();
                part.everywhere(|run| run.out(&common::flat(&want), ROUNDING));
                first += chunk;
            }
        }
    }
}

#[test]
fn b22_left_padded_batch_equals_single() {
    for rope in [None, Some(Rope::new(RopeStyle::HalfSplit, 10_000.0)), Some(Rope::new(RopeStyle::Interleaved, 1e4))] {
        let mut draws = Seeded(22);
        let (long, short): (Array3<f64>, Array3<f64>) = (draws.array((1, 5, 8)), draws.array((1, 2, 8)));
        let padding = Array3::from_elem((1, 3, 8), 1e3);
        let padded = concatenate(Axis(1), &[padding.view(), short.view()]).unwrap();
        let both = concatenate(Axis(0), &[long.view(), padded.view()]).unwrap();
        let with = |x: Array3<f64>, mask: Mask| {
            let layer = layer(23, x).mask(Mask::causal() & mask);
            Layer { rope, ..layer }
        };
        let alone = with(short, Mask::none()).oracle().out;
        with(both, Mask::key_ranges(&[0..5, 3..5])).everywhere(|run| {
            let rows = run.answer.out.slice(s![1, 3.., ..]).to_owned();
            let tolerance = run.tolerance(ROUNDING);
            close(&common::flat(&rows), &common::flat(&alone), tolerance * 2.0);
        });
    }
}
