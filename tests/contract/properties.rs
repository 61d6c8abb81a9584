//! What holds for every call: of masks, heads, values, strides and shapes, and of all paths alike.

use crate::common;

use common::core::Core;
use common::layout::{LAYOUTS, Layout};
use common::masks::{Dims, Rules, rules, some_dims};
use common::recipe::{Recipe, recipes};
use common::{Answer, Call, Keep, Precision, ROUNDING, Run, Seeded, Way, Within, property, ways};
use multihead::ndarray::{Array2, Array4, ArrayD, ArrayRef2, ArrayView4, Axis, Zip, array, s};
use multihead::{Error, HeadMap, Mask, MultiHeadAttention, Options, Visibility, attention};
use proptest::prelude::*;

fn pairs(dims: Dims) -> impl Iterator<Item = [usize; 4]> {
    let [batch, heads, q_len, kv_len] = dims;
    multihead::ndarray::indices((batch, heads, q_len, kv_len)).into_iter().map(|(b, h, i, j)| [b, h, i, j])
}

fn masks() -> impl Strategy<Value = (Dims, Rules)> {
    some_dims().prop_flat_map(|dims| (Just(dims), rules(dims)))
}

#[test]
fn masks_follow_their_rules() {
    property(400, masks(), |(dims, rules)| {
        let mask = rules.mask();
        let [batch, heads, q_len, kv_len] = dims;
        let bound = match mask.bind(batch, heads, q_len, kv_len) {
            Ok(bound) => bound,
            Err(error) => {
                assert!(rules.window_align().is_none(), "{error}");
                assert!(matches!(error, Error::Alignment { .. }), "{error}");
                return;
            }
        };
        assert!(rules.window_align().is_some());
        let array = bound.to_array().unwrap();
        for pair in pairs(dims) {
            let [b, h, i, j] = pair;
            assert_eq!(array[pair], rules.sees(dims, pair), "{mask} {pair:?}");
            assert_eq!(bound.sees(b, h, i, j), array[pair], "{mask} {pair:?}");
        }
    });
}

/// Lengths of sequences whose sum is `len`, in up to two ways.
fn segments(len: usize) -> impl Strategy<Value = Vec<Vec<usize>>> {
    let cuts = prop::collection::vec(0..=len, 0..=6).prop_map(move |mut cuts| {
        cuts.extend([0, len]);
        cuts.sort_unstable();
        cuts.windows(2).map(|cut| cut[1] - cut[0]).collect()
    });
    prop::collection::vec(cuts, 0..=2)
}

#[test]
fn visible_pairs_are_counted() {
    let square = some_dims().prop_map(|[batch, heads, _, len]| [batch, heads, len, len]);
    let cases = prop_oneof![
        masks().prop_map(|(dims, rules)| (dims, rules, Vec::new())),
        square.prop_flat_map(|dims| (Just(dims), rules(dims), segments(dims[3]))),
    ];
    property(600, cases, |(dims, rules, segments)| {
        let mask = segments.iter().fold(rules.mask(), |mask, lengths| mask & Mask::segments(lengths));
        let [batch, heads, q_len, kv_len] = dims;
        let Ok(bound) = mask.bind(batch, heads, q_len, kv_len) else { return };
        let want = bound.to_array().unwrap().iter().filter(|&&sees| sees).count();
        assert_eq!(bound.visible_pairs(), want as u64, "{mask} {dims:?}");
    });
}

/// Lengths cost nothing to name, and masks that say the same of all queries or keys fit any of them.
#[test]
fn pairs_of_endless_lengths_are_counted_at_once() {
    let max = usize::MAX;
    let count = |mask: &Mask, dims: [usize; 4]| {
        let [batch, heads, q_len, kv_len] = dims;
        mask.bind(batch, heads, q_len, kv_len).unwrap().visible_pairs()
    };
    assert_eq!(count(&Mask::segments(&[max]), [1, 1, max, max]), u64::MAX);
    let long = 1usize << 58;
    let packed = Mask::segments(&[3, long - 8, 5]);
    assert_eq!(count(&(packed.clone() & Mask::window(1, 0)), [1, 1, long, long]), 5 + 2 * (long as u64 - 8) - 1 + 9);
    let keep = |pairs: &ArrayRef2<bool>| Mask::keep(pairs).unwrap();
    let (yes, no) = (keep(&array![[true]]), keep(&array![[false]]));
    assert_eq!([&yes, &no].map(|mask| count(mask, [1, 1, 1 << 40, 1 << 20])), [1 << 60, 0]);
    assert_eq!(
        count(&(yes.clone() & packed.clone() & Mask::last_n(2)), [1, 1, long, long]),
        5 + 2 * (long as u64 - 8) - 1 + 9
    );
    // Three keys: all queries see the first, the last two of them the second, and nobody the third.
    let two = keep(&array![[true, true, false]]);
    assert_eq!(count(&(two.clone() & Mask::causal()), [1, 1, long, 3]), 3 + 2);
    assert_eq!(count(&two, [7, 1, long, 3]), 7 * 2 * long as u64);
    // Two queries: the second sees all keys up to its own, and the first does not see any.
    let second = keep(&array![[false], [true]]);
    assert_eq!(count(&(second.clone() & Mask::causal()), [1, 1, 2, long]), long as u64);
    assert_eq!(count(&(second & two), [1, 1, 2, 3]), 2);
    let none = Mask::keep(&Array4::from_elem((1 << 40, 1, 1, 0), true)).unwrap();
    assert_eq!(count(&none, [1 << 40, 1, 1, 0]), 0);

    let mha = MultiHeadAttention::<f32>::builder(8, 2).build().unwrap();
    let flops = mha.config().flops_masked(1, max, max, &Mask::segments(&[max])).unwrap();
    assert_eq!(flops.attention, u64::MAX);
    // Tiles of such masks are answered at once too.
    let tile = |mask: &Mask| mask.bind(1, 1, long, long).unwrap().tile(0, 0, 0..max, 0..max);
    assert_eq!((tile(&yes), tile(&no)), (Visibility::All, Visibility::Nothing));
    assert_eq!(tile(&(yes.clone() & Mask::segments(&[1, long - 1]))), Visibility::Some);
}

#[test]
fn tiles_of_masks_are_never_wrong() {
    let cases = masks().prop_flat_map(|(dims, rules)| (Just(dims), Just(rules), any::<[prop::sample::Index; 6]>()));
    property(400, cases, |(dims, rules, at)| {
        let mask = rules.mask();
        let [batch, heads, q_len, kv_len] = dims;
        let Ok(bound) = mask.bind(batch, heads, q_len, kv_len) else { return };
        if batch == 0 {
            return;
        }
        let range = |a: &prop::sample::Index, b: &prop::sample::Index, len: usize| {
            let (a, b) = (a.index(len + 1), b.index(len + 1));
            a.min(b)..a.max(b)
        };
        let (entry, head) = (at[0].index(batch), at[1].index(heads));
        let (rows, keys) = (range(&at[2], &at[3], q_len), range(&at[4], &at[5], kv_len));
        let visible = bound.to_array().unwrap().slice(s![entry, head, rows.clone(), keys.clone()]).to_owned();
        match bound.tile(entry, head, rows, keys) {
            Visibility::Nothing => assert!(visible.iter().all(|&sees| !sees), "{mask}"),
            Visibility::All => assert!(visible.iter().all(|&sees| sees), "{mask}"),
            Visibility::Some => {}
        }
    });
}

#[test]
fn intersection_is_the_elementwise_and() {
    property(400, masks(), |(dims, rules)| {
        if !rules.are_independent() {
            return;
        }
        let [batch, heads, q_len, kv_len] = dims;
        let array = |mask: Mask| mask.bind(batch, heads, q_len, kv_len).unwrap().to_array().unwrap();
        let mut want = Array4::from_elem(dims, true);
        for rule in &rules.0 {
            Zip::from(&mut want).and(&array(rule.mask())).for_each(|want, &sees| *want &= sees);
        }
        assert_eq!(array(rules.mask()), want);
        let backwards = rules.0.iter().rev().fold(Mask::none(), |mask, rule| rule.mask().and(mask));
        assert_eq!(array(backwards), want);
    });
}

#[test]
fn attention_averages_what_the_mask_shows() {
    property(48, masks(), |(dims, rules)| {
        if rules.window_align().is_none() {
            return;
        }
        let [batch, heads, q_len, kv_len] = dims;
        // Values that are hidden from a query must not reach it, so they are told apart by powers of 2.
        let v = Array4::from_shape_fn((batch, heads, kv_len, 1), |(b, h, j, _)| {
            f64::from(1 << (j % 20)) + (b + 10 * h) as f64
        });
        let rows: Vec<(f64, f64)> = pairs([batch, heads, q_len, 1])
            .map(|[b, h, i, _]| {
                let seen = (0..kv_len).filter(|&j| rules.sees(dims, [b, h, i, j]));
                seen.fold((0.0, 0.0), |(sum, n), j| (sum + v[[b, h, j, 0]], n + 1.0))
            })
            .collect();
        let out: Vec<f64> = rows.iter().map(|&(sum, n)| if n > 0.0 { sum / n } else { 0.0 }).collect();
        let lse: Vec<f64> = rows.iter().map(|&(_, n)| n.ln()).collect();
        let weights: Vec<f64> = pairs(dims)
            .map(|pair| {
                let [b, h, i, _] = pair;
                if rules.sees(dims, pair) { rows[(b * heads + h) * q_len + i].1.recip() } else { 0.0 }
            })
            .collect();
        Core::uniform(heads, q_len, v).mask(rules.mask()).everywhere(|run| {
            run.out(&out, ROUNDING);
            run.lse(&lse, ROUNDING);
            run.weights(&weights, ROUNDING);
        });
    });
}

/// Bounds of the absolute errors of context, lse and weights.
///
/// With u half the distance from 1 to the next number, and |q| |k| the sum of the absolute products of a score:
/// - a score is a sum of `head_dim` products and a handful of operations, each with relative error u:
///   `d = u ((head_dim + 16) |scale| |q| |k| + 8 softcap + 8 |bias| + 4 |sink|)`, since |tanh'| <= 1;
/// - `exp` turns an error d of score and maximum into the relative error 2 d, its argument's rounding into less than
///   d, and itself errs by a few u; a sum of n such terms, rescaled at most once for each of them, adds 2 n u;
/// - so each weight is right to the relative error `r = 4 d + (2 n + 16) u` before the division, and `2 r` after it;
/// - the context is a sum of n products of weights that sum to 1: `2 r max|v|` and `n u max|v|` for the sum.
///
/// The oracle errs too, which doubles the bounds where it has the same u.
fn bounds(core: &Core, oracle: &Answer, precision: Precision) -> (f64, f64, f64) {
    let u = match precision {
        Precision::F32 => f64::from(f32::EPSILON) / 2.0,
        Precision::F64 => f64::EPSILON,
    };
    let largest = |x: &mut dyn Iterator<Item = f64>| x.filter(|x| x.is_finite()).fold(0.0, |a: f64, x| a.max(x.abs()));
    let head_dim = core.q.dim().3 as f64;
    let scale = core.scale.unwrap_or(head_dim.max(1.0).sqrt().recip()).abs();
    let products = head_dim * largest(&mut core.q.iter().copied()) * largest(&mut core.k.iter().copied());
    let bias = core.bias.as_ref().map_or(0.0, |bias| largest(&mut bias.iter().copied()));
    let sink = core.sinks.as_ref().map_or(0.0, |sinks| largest(&mut sinks.iter().copied()));
    let d = u * ((head_dim + 16.0) * scale * products + 8.0 * core.softcap.unwrap_or(0.0) + 8.0 * bias + 4.0 * sink);
    let n = core.k.dim().2 as f64;
    let r = 4.0 * d + (2.0 * n + 16.0) * u;
    let v = largest(&mut core.v.iter().copied());
    let lse = largest(&mut oracle.lse.iter().copied());
    ((2.0 * r + n * u) * v, r + 4.0 * u * lse, 2.0 * r)
}

#[test]
fn every_path_agrees_with_the_oracle() {
    property(200, recipes(), |recipe| {
        let core = recipe.core();
        let oracle = core.oracle();
        core.everywhere(|run| {
            let (out, lse, weights) = bounds(&core, &oracle, run.way.precision);
            let near = |name: &str, got: &ArrayD<f64>, want: &ArrayD<f64>, bound: f64| {
                for ((index, &got), &want) in got.indexed_iter().zip(want) {
                    let fits = got == want || (got - want).abs() <= bound;
                    assert!(fits, "{}: {name}{:?} is {got:e}, not {want:e} within {bound:e}", run.way, index);
                }
            };
            near("out", &run.answer.out, &oracle.out, out);
            near("lse", &run.answer.lse.clone().into_dyn(), &oracle.lse.clone().into_dyn(), lse);
            if let Some(got) = &run.answer.weights {
                near("weights", &got.clone().into_dyn(), &oracle.weights.clone().unwrap().into_dyn(), weights);
            }
        });
    });
}

#[test]
fn a_bad_key_reaches_the_queries_that_see_it_and_no_others() {
    let cases = (recipes(), any::<prop::sample::Index>(), any::<[bool; 2]>());
    property(100, cases, |(recipe, key, [bad_key, bad_value])| {
        if recipe.kv_len == 0 {
            return;
        }
        let (core, dims, bad) = (recipe.core(), recipe.dims(), key.index(recipe.kv_len));
        let mut spoiled = core.clone();
        if bad_key {
            spoiled.k.slice_mut(s![.., .., bad, ..]).fill(f64::NAN);
        }
        if bad_value {
            spoiled.v.slice_mut(s![.., .., bad, ..]).fill(f64::INFINITY);
        }
        let bias = core.bias.as_ref().map(|bias| bias.broadcast(dims.as_slice()).unwrap());
        let sees = |[b, h, i, _]: [usize; 4]| {
            let hidden = bias.as_ref().is_some_and(|bias| bias[[b, h, i, bad]] == f64::NEG_INFINITY);
            recipe.rules.sees(dims, [b, h, i, bad]) && !hidden
        };
        let mut want = core.oracle();
        for [b, h, i, _] in pairs([dims[0], dims[1], dims[2], 1]).filter(|&query| sees(query)) {
            if bad_key && recipe.head_dim > 0 {
                want.lse[[b, h, i]] = f64::NAN;
                want.weights.as_mut().unwrap().slice_mut(s![b, h, i, ..]).fill(f64::NAN);
            }
            if bad_value || (bad_key && recipe.head_dim > 0) {
                want.out.slice_mut(s![b, h, i, ..]).fill(f64::NAN);
            }
        }
        spoiled.everywhere(|run| run.agrees(&want, ROUNDING));
    });
}

/// Calls without structural masks: order and number of their keys can change.
fn unstructured() -> impl Strategy<Value = Recipe> {
    recipes().prop_map(|recipe| Recipe { rules: Rules(Vec::new()), ..recipe })
}

#[test]
fn permuting_keys_changes_nothing() {
    let cases = unstructured().prop_flat_map(|recipe| {
        let order: Vec<usize> = (0..recipe.kv_len).collect();
        (Just(recipe), Just(order).prop_shuffle(), any::<u64>())
    });
    property(64, cases, |(recipe, order, seed)| {
        let (b, h) = (recipe.batch, recipe.num_heads());
        let keep = Seeded(seed).array((b, h, recipe.q_len, recipe.kv_len)).mapv(|draw| draw > -0.2);
        let core = recipe.core().mask(Mask::keep(&keep).unwrap());
        let mut permuted = recipe.core().mask(Mask::keep(&keep.select(Axis(3), &order)).unwrap());
        (permuted.k, permuted.v) = (core.k.select(Axis(2), &order), core.v.select(Axis(2), &order));
        permuted.bias = core.bias.as_ref().map(|bias| match bias.len_of(Axis(3)) {
            1 => bias.clone(),
            _ => bias.select(Axis(3), &order),
        });
        let mut want = core.oracle();
        want.weights = want.weights.map(|weights| weights.select(Axis(3), &order));
        permuted.everywhere(|run| run.agrees(&want, ROUNDING));
    });
}

#[test]
fn context_lies_in_the_hull_of_the_values() {
    property(64, recipes(), |recipe| {
        let core = Core { sinks: None, bias: None, ..recipe.core() };
        let dims = recipe.dims();
        let map = recipe.kv_of_head();
        core.everywhere(|run| {
            for [b, h, i, c] in pairs([dims[0], dims[1], dims[2], recipe.value_dim]) {
                let values =
                    (0..dims[3]).filter(|&j| recipe.rules.sees(dims, [b, h, i, j])).map(|j| core.v[[b, map[h], j, c]]);
                let (low, high) = values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)));
                let (low, high) = if low > high { (0.0, 0.0) } else { (low, high) };
                let (got, slack) = (run.answer.out[[b, h, i, c]], run.tolerance(ROUNDING));
                assert!((low - slack..=high + slack).contains(&got), "{}: {got} not in {low}..{high}", run.way);
            }
        });
    });
}

#[test]
fn a_constant_added_to_all_scores_changes_nothing() {
    property(64, (recipes(), -20.0..20.0f32), |(recipe, constant)| {
        let core = Core { sinks: None, bias: None, ..recipe.core() };
        let mut want = core.oracle();
        want.lse += f64::from(constant);
        let shifted = core.bias(Array2::from_elem((1, 1), f64::from(constant)));
        // Scores of 20 are rounded to 1e-6.
        shifted.everywhere(|run| run.agrees(&want, Within(2e-5, 1e-12)));
    });
}

#[test]
fn shared_heads_equal_repeated_ones() {
    property(64, recipes(), |recipe| {
        let core = recipe.core();
        let map = recipe.kv_of_head();
        let repeated =
            Core { k: core.k.select(Axis(1), &map), v: core.v.select(Axis(1), &map), heads: None, ..core.clone() };
        let explicit = Core { heads: Some(HeadMap::explicit(&map, recipe.num_kv_heads).unwrap()), ..core.clone() };
        let want = repeated.oracle();
        for call in [repeated, explicit, core] {
            call.everywhere(|run| run.agrees(&want, ROUNDING));
        }
    });
}

#[test]
fn any_strides_equal_the_contiguous_run() {
    let layouts = prop::array::uniform4(prop::sample::select(&LAYOUTS[..]));
    property(100, (recipes(), layouts), |(recipe, layouts)| {
        let core = recipe.core();
        let want = core.oracle();
        core.layouts(layouts).everywhere(|run| run.agrees(&want, ROUNDING));
    });
}

#[test]
fn broadcast_views_equal_their_copies() {
    let cases = (unstructured(), any::<[[bool; 3]; 3]>());
    property(64, cases, |(recipe, repeated)| {
        // Axes of length 1, repeated by a stride of 0 to the lengths of the call.
        let core = recipe.core();
        let one = |x: &Array4<f64>, repeated: [bool; 3]| {
            let mut view = x.view();
            for (axis, repeated) in repeated.into_iter().enumerate() {
                if repeated && view.len_of(Axis(axis)) > 0 {
                    view.slice_axis_inplace(Axis(axis), (..1).into());
                }
            }
            view.to_owned()
        };
        let parts = [one(&core.q, repeated[0]), one(&core.k, repeated[1]), one(&core.v, repeated[2])];
        let [q, k, v]: [ArrayView4<'_, f64>; 3] =
            [(0, core.q.dim()), (1, core.k.dim()), (2, core.v.dim())].map(|(i, dim)| parts[i].broadcast(dim).unwrap());
        let copies = Core { q: q.to_owned(), k: k.to_owned(), v: v.to_owned(), ..core.clone() };
        for way in ways().into_iter().filter(|way| way.precision == Precision::F64) {
            let mut options = way.choose(Options::new());
            if let Some(bias) = &core.bias {
                options = options.bias(bias).unwrap();
            }
            let copies = Core { sinks: None, heads: core.heads.clone(), scale: None, softcap: None, ..copies.clone() };
            if let Some(heads) = &core.heads {
                options = options.heads(heads);
            }
            let got = attention::forward(&q, &k, &v, &options).unwrap();
            let answer = Answer { out: got.context.into_dyn(), lse: got.lse, weights: got.weights };
            Run { way, answer }.agrees(&copies.answer(way).unwrap(), ROUNDING);
        }
    });
}

#[test]
fn layouts_hold_what_was_stored() {
    let x: Array4<f64> = Seeded(1).array((2, 3, 4, 5));
    for layout in LAYOUTS {
        let stored = layout.store::<f64>(&x);
        assert_eq!(layout.view(&stored), x, "{layout:?}");
        assert_eq!(layout.view(&stored).is_standard_layout(), layout == Layout::Standard, "{layout:?}");
    }
}

#[test]
fn seeded_draws_are_the_known_ones() {
    assert_eq!(Seeded(13).draw(), 0.06321531534194946);
    let way = Way::new(Precision::F32, multihead::Path::Dense, Keep::Weights);
    assert_eq!(way.to_string(), "Dense F32 with weights");
}
