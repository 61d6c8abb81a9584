//! Layers with other heads than before: gates on heads, fewer query heads, fewer KV heads.
//!
//! ```text
//! output = sum_h gate[h] context_h W_O[h] + b_O        the gates are factors on rows of W_O
//! ```
//!
//! | | what is exact |
//! | --- | --- |
//! | `gate` | gates 0, 1 and powers of two round nothing; others round each number of `w_o` once |
//! | `prune_heads` | lse and weights of the heads that stay; the output is that of gates 0 up to the order of its sums |
//! | `pool_kv_heads` | pooling KV heads that are the same keeps their numbers, and the output but for the order of sums |

use ndarray::{Array1, Array2, ArrayRef1, Axis};
use std::ops::Range;

use super::{Config, MultiHeadAttention, Weights};
use crate::element::Element;
use crate::error::{Error, Result, check_shape};
use crate::heads::HeadMap;
use crate::prepack::Packable;

impl<T: Element> MultiHeadAttention<T> {
    /// A layer whose heads count `gates: [num_heads]` times as much: the rows of `w_o` that belong to a head are
    /// multiplied, so the gates cost nothing when the layer runs. A gate of 0 makes zeros, whatever `w_o` held; a NaN in
    /// the context of such a head still comes out.
    ///
    /// ```
    /// use multihead::{ndarray::{array, Array2}, Mask, MultiHeadAttention};
    /// let mha = MultiHeadAttention::<f32>::builder(8, 2).build()?;
    /// let [first, second] = [mha.gate(&array![1.0, 0.0])?, mha.gate(&array![0.0, 1.0])?];
    /// let x = Array2::from_shape_fn((3, 8), |(i, c)| (i + c) as f32);
    /// let sum = first.forward(&x, &Mask::none())? + second.forward(&x, &Mask::none())?;
    /// let whole = mha.forward(&x, &Mask::none())?;
    /// assert!(sum.iter().zip(&whole).all(|(a, b)| (a - b).abs() < 1e-5));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Shape`] for another number of gates, [`Error::Value`] for one that is not finite.
    #[doc(alias = "head_mask")]
    pub fn gate(&self, gates: &ArrayRef1<T>) -> Result<Self> {
        check_shape("gates", "[num_heads]", [Some(self.config.heads.num_heads())], gates.shape())?;
        if let Some(gate) = gates.iter().find(|gate| !gate.is_finite()) {
            return Err(Error::value("gates", "finite numbers", gate));
        }
        let mut weights = (*self.weights).clone();
        let rows_of_heads = weights.w_o.axis_chunks_iter_mut(Axis(0), self.config.value_dim);
        for (mut rows, &gate) in rows_of_heads.zip(gates) {
            match gate.is_zero() {
                true => rows.fill(T::zero()),
                false => rows.mapv_inplace(|w| w * gate),
            }
        }
        Ok(Self { config: self.config.clone(), weights: Packable::new(weights) })
    }

    /// A layer without these query heads, in any order; KV heads that no other head reads go with them. The heads that
    /// stay keep their order and their KV heads, in groups of different sizes where it comes to that.
    ///
    /// Up to the order of the output's sums, it is the layer whose gates for these heads are 0, see
    /// [`MultiHeadAttention::gate`]. A mask or bias with a row for each head has to lose those of the heads as well.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(64, 8).num_kv_heads(4).build()?;
    /// // The group of heads 2 and 3 goes, and one head of the last group.
    /// let pruned = mha.prune_heads(&[2, 3, 7])?;
    /// let heads = &pruned.config().heads;
    /// assert_eq!((0..5).filter_map(|h| heads.kv_head(h)).collect::<Vec<_>>(), [0, 0, 1, 1, 2]);
    /// assert_eq!((pruned.w_q().ncols(), pruned.w_k().ncols()), (5 * 8, 3 * 8));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] for a head that is not there, and if none would be left.
    pub fn prune_heads(&self, heads: &[usize]) -> Result<Self> {
        let Config { heads: map, head_dim, value_dim, .. } = &self.config;
        let num_heads = map.num_heads();
        if let Some(head) = heads.iter().find(|&&head| head >= num_heads) {
            return Err(Error::value("heads", format!("query heads below num_heads = {num_heads}"), head));
        }
        let mut stays = vec![true; num_heads];
        heads.iter().for_each(|&head| stays[head] = false);
        let kept: Vec<usize> = (0..num_heads).filter(|&head| stays[head]).collect();
        if kept.is_empty() {
            return Err(Error::value("heads", "at least one query head to stay", "all of them"));
        }
        let mut kept_kv: Vec<usize> = kept.iter().map(|&head| map.read_by(head)).collect();
        kept_kv.sort_unstable();
        kept_kv.dedup();
        let kv_of_head = |&head: &usize| kept_kv.partition_point(|&kv| kv < map.read_by(head));
        let new_map = HeadMap::explicit(&kept.iter().map(kv_of_head).collect::<Vec<_>>(), kept_kv.len())?;

        let [q, k, v, o] = [
            columns(&kept, *head_dim),
            columns(&kept_kv, *head_dim),
            columns(&kept_kv, *value_dim),
            columns(&kept, *value_dim),
        ];
        let old = &self.weights;
        let vector = |vector: &Option<Array1<T>>, at: &[usize]| vector.as_ref().map(|b| b.select(Axis(0), at));
        let weights = Weights {
            w_q: old.w_q.select(Axis(1), &q),
            w_k: old.w_k.select(Axis(1), &k),
            w_v: old.w_v.select(Axis(1), &v),
            w_o: old.w_o.select(Axis(0), &o),
            b_q: vector(&old.b_q, &q),
            b_k: vector(&old.b_k, &k),
            b_v: vector(&old.b_v, &v),
            b_o: old.b_o.clone(),
            sinks: vector(&old.sinks, &kept),
            // The heads share norms and keys for distances.
            q_norm: old.q_norm.clone(),
            k_norm: old.k_norm.clone(),
            relative_bias: old.relative_bias.as_ref().map(|table| table.select(Axis(1), &kept)),
            relative_keys: old.relative_keys.clone(),
        };
        let mut config = Config { heads: new_map, ..self.config.clone() };
        if kept.len() < num_heads {
            config.alibi = config.alibi.map(|alibi| alibi.select(&kept));
        }
        Self::checked(config, weights)
    }

    /// A layer with fewer KV heads, each the mean of as many neighbours: how multi-head attention becomes grouped-query
    /// attention, or multi-query attention with `num_kv_heads = 1`, before it is trained on (Ainslie et al. 2023,
    /// <https://arxiv.org/abs/2305.13245>, section 2.1). What a query head read it reads in the mean.
    ///
    /// KV heads that are the same keep every number; the mean of others is rounded.
    ///
    /// ```
    /// use multihead::MultiHeadAttention;
    /// let mha = MultiHeadAttention::<f32>::builder(64, 8).build()?;
    /// let gqa = mha.pool_kv_heads(2)?;
    /// assert_eq!(gqa.w_k().ncols(), 2 * 8);
    /// let mean = (mha.w_k()[[0, 0]] + mha.w_k()[[0, 8]] + mha.w_k()[[0, 16]] + mha.w_k()[[0, 24]]) / 4.0;
    /// assert!((gqa.w_k()[[0, 0]] - mean).abs() < 1e-7);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Value`] if `num_kv_heads` is 0 or no divisor of the present number.
    pub fn pool_kv_heads(&self, num_kv_heads: usize) -> Result<Self> {
        let Config { heads, head_dim, value_dim, .. } = &self.config;
        if num_kv_heads == 0 || !heads.num_kv_heads().is_multiple_of(num_kv_heads) {
            let expected = format!("a divisor of the present num_kv_heads = {}", heads.num_kv_heads());
            return Err(Error::value("num_kv_heads", expected, num_kv_heads));
        }
        let pool = heads.num_kv_heads() / num_kv_heads;
        let kv_of_head: Vec<usize> = (0..heads.num_heads()).map(|head| heads.read_by(head) / pool).collect();
        let map = HeadMap::explicit(&kv_of_head, num_kv_heads)?;
        let vector = |vector: &Option<Array1<T>>, width| {
            let pooled = vector.as_ref().map(|b| pooled(&b.view().insert_axis(Axis(0)).to_owned(), pool, width));
            pooled.map(|pooled| pooled.index_axis_move(Axis(0), 0))
        };
        let weights = Weights {
            w_k: pooled(&self.weights.w_k, pool, *head_dim),
            w_v: pooled(&self.weights.w_v, pool, *value_dim),
            b_k: vector(&self.weights.b_k, *head_dim),
            b_v: vector(&self.weights.b_v, *value_dim),
            ..(*self.weights).clone()
        };
        Self::checked(Config { heads: map, ..self.config.clone() }, weights)
    }

    fn checked(config: Config, weights: Weights<T>) -> Result<Self> {
        weights.check(&config)?;
        Ok(Self { config: config.describing(&weights), weights: Packable::new(weights) })
    }
}

/// The columns of these heads.
fn columns(heads: &[usize], width: usize) -> Vec<usize> {
    heads.iter().flat_map(|&head| head_columns(head, width)).collect()
}

fn head_columns(head: usize, width: usize) -> Range<usize> {
    head * width..(head + 1) * width
}

/// The means of each `pool` neighbouring heads: `w: [in, pool * heads * width]`.
fn pooled<T: Element>(w: &Array2<T>, pool: usize, width: usize) -> Array2<T> {
    let share = T::from_f64((pool as f64).recip());
    let heads = w.ncols() / (pool * width);
    Array2::from_shape_fn((w.nrows(), heads * width), |(row, column)| {
        let (head, c) = (column / width, column % width);
        let mut of_pool = (0..pool).map(|n| w[[row, (head * pool + n) * width + c]]);
        let first = of_pool.next().unwrap_or(T::zero());
        // Sums of equal numbers would round; their differences do not.
        let differences = of_pool.fold(T::zero(), |sum, x| sum + (x - first));
        if differences.is_zero() { first } else { first + differences * share }
    })
}
