//! `y = x W + b` for the projections, and its gradients: `x: [batch, len, in]`, `w: [in, out]`, `b: [out]`,
//! `y: [batch, len, out]`.
//!
//! ```text
//! d_x = d_y W^T            a projection too, by the turned view of W
//! d_W = sum x^T d_y        over all tokens of all batch entries, in their order
//! d_b = sum d_y
//! ```
//!
//! Blocks of the outputs are dealt to the threads; the projections of a layer's inputs are dealt together, so no thread
//! waits for the first to end. The product inside a block is `kernels/gemm.rs`. Every element sums its terms in order,
//! so neither the blocks nor the threads change a bit.

use ndarray::{Array1, ArrayRef0, ArrayView1, ArrayView2, ArrayView3, ArrayViewMut2, ArrayViewMut3, Axis, s};

use crate::block::Activation;
use crate::element::Element;
use crate::kernels::{Blocks, Factor, Kernels, Linear, Start, reserve};
use crate::parallel;

/// One projection, `y (+)= x w + bias`.
pub(crate) struct Projected<'a, T> {
    /// `[batch, len, in]`
    pub(crate) x: ArrayView3<'a, T>,
    /// `[in, out]`
    pub(crate) w: Factor<'a, T>,
    /// `[out]`
    pub(crate) bias: Option<ArrayView1<'a, T>>,
    /// `[batch, len, out]`
    pub(crate) y: ArrayViewMut3<'a, T>,
    /// Whether `y` is added to.
    pub(crate) start: Start,
    /// What takes the place of each number of `y` in the end, while it is in the cache.
    pub(crate) then: Option<Activation>,
}

impl<'a, T> Projected<'a, T> {
    /// `y = x w + bias`
    pub(crate) fn new(
        x: ArrayView3<'a, T>,
        w: impl Into<Factor<'a, T>>,
        bias: Option<&'a Array1<T>>,
        y: ArrayViewMut3<'a, T>,
    ) -> Self {
        Self { x, w: w.into(), bias: bias.map(|bias| bias.view()), y, start: Start::Zero, then: None }
    }

    /// `y = f(x w + bias)`
    pub(crate) fn then(self, activation: Activation) -> Self {
        Self { then: Some(activation), ..self }
    }
}

/// The gradient of a projection's weights, `d_w (+)= sum x^T d_y` over all tokens.
pub(crate) struct WeightGradient<'a, T> {
    /// `[batch, len, in]`
    pub(crate) x: ArrayView3<'a, T>,
    /// `[batch, len, out]`
    pub(crate) d_y: ArrayView3<'a, T>,
    /// `[in, out]`
    pub(crate) d_w: ArrayViewMut2<'a, T>,
    /// Whether `d_w` is added to.
    pub(crate) start: Start,
}

impl<'a, T> WeightGradient<'a, T> {
    /// That of a bias, which is the weight of an input that is always 1.
    pub(crate) fn of_bias(
        one: &'a ArrayRef0<T>,
        d_y: ArrayView3<'a, T>,
        d_b: &'a mut Option<Array1<T>>,
        start: Start,
    ) -> Option<Self> {
        let (batch, len, _) = d_y.dim();
        let d_w = d_b.as_mut()?.view_mut().insert_axis(Axis(0));
        Some(Self { x: one.broadcast((batch, len, 1))?, d_y, d_w, start })
    }
}

/// Rows of a block. W is packed once for all of them, which costs 9 % of 128 rows and half of that of 256 (Zen 3, 512 x 512
/// weights).
const BLOCK_ROWS: [usize; 2] = [256, 128];

/// The same where weights are packed already, and smaller blocks cost nothing but are shared more evenly: whole groups of
/// six.
const PREPACKED_BLOCK_ROWS: usize = 66;

/// Rows and columns of a block that a matrix unit computes, larger ones first: each number of W is split once for all rows of
/// a block, and each of x once for all columns.
const UNIT_BLOCKS: [[usize; 2]; 5] = [[1024, 512], [512, 512], [256, 512], [256, 256], [128, 256]];

/// The first of them are taken that leave so many blocks for each thread.
const BLOCKS_PER_THREAD: usize = 2;

/// Blocks that the larger number of rows must leave, for threads to share.
const FEWEST_BLOCKS: usize = 8;

/// A number of W that has to be fetched counts as much as so many operations: 4 bytes at 12 GB/s against 150 GFLOP/s.
const FLOP_PER_WEIGHT: f64 = 48.0;

/// Runs all projections. `scratch` grows to one buffer for each thread of the pool.
pub(crate) fn project<T: Element>(
    kernels: &Kernels<T>,
    mut projections: [Option<Projected<'_, T>>; 3],
    scratch: &mut Vec<Vec<T>>,
) {
    let flat = |p: &Projected<'_, T>| flatten(p.x).is_some() && flatten(p.y.view()).is_some();
    if projections.iter().flatten().all(flat) {
        let products = projections.map(|projection| {
            let Projected { x, w, bias, y, start, then } = projection?;
            Some(Product { linear: Linear { x: flatten(x)?, w, bias, start }, y: flatten_mut(y)?, then })
        });
        return deal(kernels, products, scratch);
    }
    let batch = projections.iter().flatten().map(|p| p.y.len_of(Axis(0))).max().unwrap_or(0);
    for entry in 0..batch {
        let products = projections.each_mut().map(|projection| {
            let Projected { x, w, bias, y, start, then } = projection.as_mut()?;
            let linear = Linear { x: x.index_axis_move(Axis(0), entry), w: *w, bias: *bias, start: *start };
            Some(Product { linear, y: y.index_axis_mut(Axis(0), entry), then: *then })
        });
        deal(kernels, products, scratch);
    }
}

/// Which tokens give something to the gradient of the weights.
#[derive(Clone, Copy)]
pub(crate) enum Terms<'a> {
    All,
    /// Not those whose gradient is zero in all columns, whatever they hold: a mask hid them.
    Seen,
    /// Not those that are named, counted over all batch entries.
    AllBut(&'a dyn Fn(usize) -> bool),
}

impl Terms<'_> {
    /// The first token from `token` on that gives nothing though it is not finite. (One that is finite gives zeros.)
    /// `before` tokens of other batch entries come before these.
    fn next_hidden<T: Element>(
        self,
        before: usize,
        x: ArrayView2<'_, T>,
        d_y: ArrayView2<'_, T>,
        token: usize,
    ) -> Option<usize> {
        let is_finite = |row: ArrayView1<'_, T>| match row.to_slice() {
            // Without a way out of the loop, so that it is done by vectors.
            Some(row) => row.iter().fold(true, |finite, x| finite & x.is_finite()),
            None => row.iter().all(|x| x.is_finite()),
        };
        match self {
            Self::All => None,
            Self::Seen => (token..x.nrows()).find(|&t| !is_finite(x.row(t)) && d_y.row(t).iter().all(|x| x.is_zero())),
            Self::AllBut(hidden) => (token..x.nrows()).find(|&t| hidden(before + t)),
        }
    }
}

/// Runs the gradients of all weights.
pub(crate) fn weight_gradients<T: Element>(
    kernels: &Kernels<T>,
    mut gradients: [Option<WeightGradient<'_, T>>; 3],
    terms: Terms<'_>,
    scratch: &mut Vec<Vec<T>>,
) {
    let whole = |g: &WeightGradient<'_, T>| {
        flatten(g.x).zip(flatten(g.d_y)).is_some_and(|(x, d_y)| terms.next_hidden(0, x, d_y, 0).is_none())
    };
    if gradients.iter().flatten().all(whole) {
        let products = gradients.map(|gradient| {
            let WeightGradient { x, d_y, d_w, start } = gradient?;
            let linear = Linear { x: flatten(x)?.reversed_axes(), w: flatten(d_y)?.into(), bias: None, start };
            Some(Product { linear, y: d_w, then: None })
        });
        return deal(kernels, products, scratch);
    }
    for gradient in gradients.iter_mut().flatten() {
        let WeightGradient { x, d_y, d_w, start } = gradient;
        let len = x.len_of(Axis(1));
        for (entry, (x, d_y)) in x.outer_iter().zip(d_y.outer_iter()).enumerate() {
            // The tokens between two hidden ones, and once none at all, which begins the sums.
            let mut token = 0;
            loop {
                let end = terms.next_hidden(entry * len, x, d_y, token);
                let tokens = token..end.unwrap_or(x.nrows());
                let x = x.slice(s![tokens.clone(), ..]).reversed_axes();
                let linear = Linear { x, w: d_y.slice(s![tokens, ..]).into(), bias: None, start: *start };
                deal(kernels, [Some(Product { linear, y: d_w.view_mut(), then: None }), None, None], scratch);
                *start = Start::Add;
                match end {
                    Some(end) => token = end + 1,
                    None => break,
                }
            }
        }
    }
}

/// A product, the matrix that it fills or is added to, and what becomes of that.
struct Product<'a, 'y, T> {
    linear: Linear<'a, T>,
    y: ArrayViewMut2<'y, T>,
    then: Option<Activation>,
}

/// How outputs are cut. No bit depends on it.
struct BlockShapes {
    rows: usize,
    unit: [usize; 2],
}

impl BlockShapes {
    /// For products that are dealt together.
    fn of<T: Element>(kernels: &Kernels<T>, products: &[Option<Product<'_, '_, T>>; 3]) -> Self {
        let count = |block: &dyn Fn(&Linear<'_, T>) -> [usize; 2]| {
            let blocks = |x: &Linear<'_, T>| {
                let [rows, columns] = block(x);
                x.x.nrows().div_ceil(rows) * x.w.dim().1.div_ceil(columns)
            };
            products.iter().flatten().map(|product| blocks(&product.linear)).sum::<usize>()
        };
        let threads = parallel::threads();
        let [most, fewer] = BLOCK_ROWS;
        let enough = count(&|x| [most, kernels.block_columns(&x.w, x.x.nrows(), threads)]) >= FEWEST_BLOCKS;
        let leaves_enough = |unit: &[usize; 2]| count(&|_| *unit) >= BLOCKS_PER_THREAD * threads;
        let [.., smallest] = UNIT_BLOCKS;
        Self {
            rows: if enough { most } else { fewer },
            unit: UNIT_BLOCKS.into_iter().find(leaves_enough).unwrap_or(smallest),
        }
    }

    /// Rows and columns of a block of a product.
    fn block<T: Element>(&self, kernels: &Kernels<T>, x: &Linear<'_, T>) -> [usize; 2] {
        if kernels.has_unit_for(x) {
            return self.unit;
        }
        let rows = if let Factor::Prepacked(_) = x.w { PREPACKED_BLOCK_ROWS } else { self.rows };
        [rows, kernels.block_columns(&x.w, x.x.nrows(), parallel::threads())]
    }
}

fn deal<T: Element>(kernels: &Kernels<T>, products: [Option<Product<'_, '_, T>>; 3], scratch: &mut Vec<Vec<T>>) {
    let mut work = 0.0;
    let mut items = 0;
    let mut room = 0;
    let shapes = BlockShapes::of(kernels, &products);
    let jobs = products.map(|product| {
        let Product { linear, y, then } = product?;
        let terms = linear.w.dim().0;
        work += (2.0 * linear.x.nrows() as f64 + FLOP_PER_WEIGHT) * terms as f64 * y.ncols() as f64;
        let [rows, columns] = shapes.block(kernels, &linear);
        room = room.max(kernels.block_scratch(&y, rows, columns, terms));
        let blocks = Blocks::new(y, rows, columns);
        items += blocks.len();
        Some((linear, blocks, then))
    });
    let workers = parallel::workers(work, items);
    if scratch.len() < workers {
        scratch.resize_with(workers, Vec::new);
    }
    // Which blocks a thread gets depends on time; what it has room for must not. (Without the room a block makes its own:
    // a panel of weights that exist is never too large.)
    scratch[..workers].iter_mut().for_each(|scratch| {
        reserve(scratch, room);
    });
    parallel::for_each_worker(&mut scratch[..workers], |scratch| {
        for (linear, blocks, then) in jobs.iter().flatten() {
            while let Some(mut part) = blocks.next() {
                kernels.linear_block(linear, part.rows, part.columns, part.view.view_mut(), scratch);
                if let Some(activation) = then {
                    activation.apply(kernels, &mut part.view);
                }
            }
        }
    });
}

/// `[batch, len, width]` as `[batch * len, width]`, if the strides allow it. Without numbers there is nothing to merge.
fn flatten<T>(mut view: ArrayView3<'_, T>) -> Option<ArrayView2<'_, T>> {
    if view.is_empty() {
        let (batch, len, width) = view.dim();
        return ArrayView2::from_shape((batch * len, width), &[]).ok();
    }
    view.merge_axes(Axis(0), Axis(1)).then(|| view.index_axis_move(Axis(0), 0))
}

fn flatten_mut<T>(mut view: ArrayViewMut3<'_, T>) -> Option<ArrayViewMut2<'_, T>> {
    if view.is_empty() {
        let (batch, len, width) = view.dim();
        return ArrayViewMut2::from_shape((batch * len, width), &mut []).ok();
    }
    view.merge_axes(Axis(0), Axis(1)).then(|| view.index_axis_move(Axis(0), 0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{Level, Real};
    use ndarray::{Array2, Array3};

    /// Small numbers whose products and sums `f32` holds exactly.
    fn numbers(shape: (usize, usize, usize), seed: usize) -> Array3<f32> {
        Array3::from_shape_fn(shape, |(b, t, i)| ((7 * b + 5 * t * t + 3 * i + seed) % 11) as f32 - 5.0)
    }

    /// `sum x^T d_y` by loops, over the tokens that are `seen`.
    fn plain(x: &Array3<f32>, d_y: &Array3<f32>, seen: impl Fn(usize, usize) -> bool) -> Array2<f32> {
        Array2::from_shape_fn((x.dim().2, d_y.dim().2), |(i, j)| {
            let tokens = (0..x.dim().0).flat_map(|b| (0..x.dim().1).map(move |t| (b, t)));
            tokens.filter(|&(b, t)| seen(b, t)).map(|(b, t)| x[[b, t, i]] * d_y[[b, t, j]]).sum()
        })
    }

    fn run(x: ArrayView3<'_, f32>, d_y: ArrayView3<'_, f32>, start: Start, terms: Terms<'_>) -> Array2<f32> {
        let level = Level::best();
        let begin = if start == Start::Add { 1000.0 } else { f32::NAN };
        let mut d_w = Array2::from_elem((x.dim().2, d_y.dim().2), begin);
        let gradient = WeightGradient { x, d_y, d_w: d_w.view_mut(), start };
        weight_gradients(f32::kernels(level), [None, Some(gradient), None], terms, &mut Vec::new());
        d_w
    }

    #[test]
    fn weight_gradients_are_sums_over_tokens_for_any_strides_and_start() {
        for (batch, len, inputs, outputs) in
            [(1, 1, 1, 1), (2, 3, 5, 7), (3, 50, 20, 300), (2, 200, 130, 17), (2, 0, 4, 5)]
        {
            let (x, d_y) = (numbers((batch, len, inputs), 1), numbers((batch, len, outputs), 4));
            let want = plain(&x, &d_y, |_, _| true);
            let turned = x.t().as_standard_layout().into_owned().reversed_axes();
            for x in [x.view(), turned.view()] {
                assert_eq!(run(x, d_y.view(), Start::Zero, Terms::Seen), want);
                assert_eq!(run(x, d_y.view(), Start::Add, Terms::All), &want + 1000.0);
            }
        }
    }

    #[test]
    fn tokens_that_nothing_saw_give_nothing_whatever_they_hold() {
        let (mut x, mut d_y) = (numbers((2, 30, 6), 2), numbers((2, 30, 9), 3));
        let hidden = [(0, 0), (0, 1), (0, 29), (1, 7), (1, 9), (1, 29)];
        for (b, t) in hidden {
            x[[b, t, t % 6]] = if t == 7 { f32::INFINITY } else { f32::NAN };
            d_y.slice_mut(s![b, t, ..]).fill(0.0);
        }
        let want = plain(&x, &d_y, |b, t| !hidden.contains(&(b, t)));
        for (start, want) in [(Start::Zero, want.clone()), (Start::Add, &want + 1000.0)] {
            assert_eq!(run(x.view(), d_y.view(), start, Terms::Seen), want);
            assert!(run(x.view(), d_y.view(), start, Terms::All).iter().any(|x| x.is_nan()));
        }
        // Those that are named, without a look at what they hold.
        let named = |token: usize| hidden.contains(&(token / 30, token % 30));
        d_y.slice_mut(s![1, 9, ..]).fill(f32::NAN);
        assert_eq!(run(x.view(), d_y.view(), Start::Zero, Terms::AllBut(&named)), want);
        d_y.slice_mut(s![1, 9, ..]).fill(0.0);
        // All of them.
        let nan = Array3::from_elem((2, 30, 6), f32::NAN);
        assert_eq!(
            run(nan.view(), Array3::zeros((2, 30, 9)).view(), Start::Zero, Terms::Seen),
            Array2::<f32>::zeros((6, 9))
        );
        // One that is seen stays.
        d_y[[1, 9, 3]] = 1.0;
        let got = run(x.view(), d_y.view(), Start::Zero, Terms::Seen);
        assert!(got.row(3).iter().all(|x| x.is_nan()) && got.row(2).iter().all(|x| x.is_finite()));
    }
}
