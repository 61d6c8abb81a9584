//! What each head does, in numbers.

use ndarray::{Array2, Array3, ArrayRef4, ArrayView4, Axis, s};
use std::ops::Range;

use super::tally::{Sum, Tally};
use super::tokens::{Places, Tokens};
use crate::attention::{Options, Problem, Weigher};
use crate::element::{Element, zeros};
use crate::error::Result;
use crate::parallel;

/// Scores that are in memory at a time for each thread, if that is 8 rows at least.
const BLOCK_SCORES: usize = 1 << 16;
const BLOCK_ROWS: usize = 8;
/// Few heads of many rows are cut into parts, each with column sums of its own.
const ITEMS: usize = 16;
const PART_ROWS: usize = 256;
/// What a weight costs in operations, as far as it decides on threads: most of it is its logarithm.
const FLOP_PER_WEIGHT: f64 = 20.0;

/// What each head of each batch entry does.
///
/// With `w[i, j]` the softmax probabilities of one head of one batch entry, `pos` where query i stands among the keys and
/// `t[j]` the token of key j; each is a mean over the queries i that have a weight:
///
/// | statistic | of query i | source |
/// | --- | --- | --- |
/// | `entropy` | `-sum_j w[i, j] ln w[i, j]` | Ghader and Monz 2017, <https://arxiv.org/abs/1710.03348> |
/// | `distance` | `sum_j w[i, j] abs(pos - j)` | Vig and Belinkov 2019, <https://arxiv.org/abs/1906.04284> |
/// | `confidence` | `max_j w[i, j]` | Voita et al. 2019, <https://arxiv.org/abs/1905.09418> |
/// | `first` | `w[i, 0]`, or the first key that is no padding, see [`Tokens::starts`] | Xiao et al. 2023, <https://arxiv.org/abs/2309.17453> |
/// | `previous` | `w[i, pos - 1]`, where there is such a key | Clark et al. 2019, <https://arxiv.org/abs/1906.04341> |
/// | `next` | `w[i, pos + 1]`, where there is such a key | as `previous` |
/// | `duplicate` | `sum w[i, j]` over `j < pos` with `t[j] = t[pos]` | Wang et al. 2022, <https://arxiv.org/abs/2211.00593> |
/// | `induction` | `sum w[i, j]` over `j <= pos` with `t[j - 1] = t[pos]` | Olsson et al. 2022, <https://arxiv.org/abs/2209.11895> |
///
/// `duplicate` and `induction` are means over the queries whose token stands earlier too. `received[j] = sum_i w[i, j]` is
/// what a cache goes by that keeps the keys that get the most (Zhang et al. 2023, <https://arxiv.org/abs/2306.14048>).
///
/// A sink takes its share of a row and is no key: the weights of such a row sum up to less than 1.
///
/// Means are over the queries that have a weight that is not 0, and 0 if there are none. They are computed in `f64`
/// from the weights of the call's type.
///
/// ```
/// use multihead::{attention, inspect::{HeadStatistics, Tokens}, ndarray::Array4, Mask, Options};
/// let q = Array4::<f32>::zeros((1, 2, 4, 8));
/// let causal = Mask::causal();
/// let options = Options::new().mask(&causal);
/// let statistics = HeadStatistics::streamed(&q, &q, &options, &Tokens::new())?;
/// // Query i spreads evenly over i + 1 keys.
/// let entropy = (1f64.ln() + 2f64.ln() + 3f64.ln() + 4f64.ln()) / 4.0;
/// assert!((statistics.entropy[[0, 1]] - entropy).abs() < 1e-6);
/// assert_eq!(statistics.next[[0, 1]], 0.0);
///
/// let weights = attention::forward(&q, &q, &q, &options.weights())?.weights.unwrap();
/// assert_eq!(HeadStatistics::of_weights(&weights, &Tokens::new())?, statistics);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct HeadStatistics {
    /// `[batch, num_heads]`: how many queries have a weight that is not 0.
    pub queries: Array2<usize>,
    /// `[batch, num_heads]`, in nats: 0 for a head that looks at one key at a time, `ln kv_len` for one that looks at
    /// all of them alike.
    pub entropy: Array2<f64>,
    /// `[batch, num_heads]`: how many positions away the attended keys are.
    pub distance: Array2<f64>,
    /// `[batch, num_heads]`: the largest weight of a query.
    pub confidence: Array2<f64>,
    /// `[batch, num_heads]`: the weight of the first key, where decoders leave what they do not need. It is key 0 unless
    /// [`Tokens::starts`] names another one.
    #[doc(alias = "attention_sink")]
    pub first: Array2<f64>,
    /// `[batch, num_heads]`: the weight of the key before the query.
    pub previous: Array2<f64>,
    /// `[batch, num_heads]`: the weight of the key after the query.
    pub next: Array2<f64>,
    /// `[batch, num_heads]`: the weight of earlier keys with the query's token, if [`Tokens::ids`] are given.
    pub duplicate: Option<Array2<f64>>,
    /// `[batch, num_heads]`: the weight of keys that follow an earlier token like the query's, if [`Tokens::ids`] are
    /// given.
    pub induction: Option<Array2<f64>>,
    /// `[batch, num_heads, kv_len]`: what each key gets from all queries together.
    #[doc(alias = "heavy_hitters")]
    pub received: Array3<f64>,
}

impl HeadStatistics {
    /// Of weights that are in memory, as [`Options::weights`] gives them: `weights: [batch, num_heads, q_len, kv_len]`,
    /// any strides.
    ///
    /// ```
    /// use multihead::{inspect::{HeadStatistics, Tokens}, ndarray::{array, Axis}};
    /// let head = array![[1.0, 0.0, 0.0], [0.75, 0.25, 0.0], [0.0, 1.0, 0.0]]; // looks at the token before
    /// let weights = head.insert_axis(Axis(0)).insert_axis(Axis(0));
    /// let statistics = HeadStatistics::of_weights(&weights, &Tokens::new())?;
    /// assert_eq!(statistics.previous[[0, 0]], (0.75 + 1.0) / 2.0);
    /// assert_eq!(statistics.received.into_raw_vec_and_offset().0, [1.75, 1.25, 0.0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::Error::Shape`] for ids of other lengths, [`crate::Error::TooLarge`] if the result does not fit into memory.
    pub fn of_weights<T: Element>(weights: &ArrayRef4<T>, tokens: &Tokens<'_>) -> Result<Self> {
        T::head_statistics(Attention::Weights(weights.view()), tokens)
    }

    /// Of queries and keys, without weights in memory: `q: [batch, num_heads, q_len, head_dim]`,
    /// `k: [batch, num_kv_heads, kv_len, head_dim]`. Mask, bias, sinks, head map, scale and softcap of `options` hold, and
    /// the result has the same bits as that of the weights which the call would return.
    ///
    /// Each thread takes `max(65536, 8 kv_len)` numbers of `T` at most, and the column sums `[batch, num_heads, kv_len]`
    /// are there up to twice, or 16 times those of a head where there are few heads.
    ///
    /// ```
    /// use multihead::{inspect::{HeadStatistics, Tokens}, ndarray::Array4, Mask, Options};
    /// let (q, k) = (Array4::<f32>::ones((1, 8, 1000, 16)), Array4::ones((1, 2, 1000, 16)));
    /// let window = Mask::window(1, 0);
    /// let statistics = HeadStatistics::streamed(&q, &k, &Options::new().mask(&window), &Tokens::new())?;
    /// assert_eq!(statistics.previous[[0, 7]], 0.5);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`attention::forward`](crate::attention::forward) for queries, keys and options, and as
    /// [`HeadStatistics::of_weights`] for tokens.
    pub fn streamed<T: Element>(
        q: &ArrayRef4<T>,
        k: &ArrayRef4<T>,
        options: &Options<'_, T>,
        tokens: &Tokens<'_>,
    ) -> Result<Self> {
        T::head_statistics(Attention::Queries { q, k, options }, tokens)
    }

    /// The columns of a table: the names and the means `[batch, num_heads]`.
    ///
    /// ```
    /// use multihead::{inspect::{HeadStatistics, Tokens}, ndarray::Array4};
    /// let statistics = HeadStatistics::of_weights(&Array4::<f32>::ones((1, 2, 1, 1)), &Tokens::new())?;
    /// let names: Vec<_> = statistics.columns().map(|(name, _)| name).collect();
    /// assert_eq!(names, ["entropy", "distance", "confidence", "first", "previous", "next"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn columns(&self) -> impl Iterator<Item = (&'static str, &Array2<f64>)> {
        let all = [
            ("entropy", Some(&self.entropy)),
            ("distance", Some(&self.distance)),
            ("confidence", Some(&self.confidence)),
            ("first", Some(&self.first)),
            ("previous", Some(&self.previous)),
            ("next", Some(&self.next)),
            ("duplicate", self.duplicate.as_ref()),
            ("induction", self.induction.as_ref()),
        ];
        all.into_iter().filter_map(|(name, means)| Some((name, means?)))
    }
}

/// Where the weights come from.
pub(crate) enum Attention<'a, 'o, T> {
    /// `[batch, num_heads, q_len, kv_len]`
    Weights(ArrayView4<'a, T>),
    /// Row by row from queries and keys.
    Queries { q: &'a ArrayRef4<T>, k: &'a ArrayRef4<T>, options: &'a Options<'o, T> },
}

/// Some rows of a head, and their sums.
struct Item {
    at: [usize; 2],
    rows: Range<usize>,
    tally: Tally,
}

/// The body of [`Compiled::head_statistics`](crate::compiled::Compiled::head_statistics).
pub(crate) fn head_statistics<T: Element>(of: Attention<'_, '_, T>, tokens: &Tokens<'_>) -> Result<HeadStatistics> {
    match of {
        Attention::Weights(weights) => {
            let statistics = HeadStatistics::zeros(weights.dim().into(), tokens)?;
            gather(statistics, weights.len_of(Axis(2)), 0.0, tokens, |item, places| {
                let head = weights.slice(s![item.at[0], item.at[1], .., ..]);
                item.rows.clone().for_each(|i| item.tally.row(places, i, 0, head.row(i)));
                Ok(())
            })
        }
        Attention::Queries { q, k, options } => {
            // Weights do not depend on values: those of no width will do.
            let v = k.slice(s![.., .., .., ..0]);
            let (mut room, mut problem) = (Vec::new(), Problem::new(q, k, &v, options)?);
            let dims = problem.dims;
            let statistics = HeadStatistics::zeros(dims.scores(), tokens)?;
            if dims.q_len == 0 {
                return Ok(statistics);
            }
            problem.rules.lay_out(&dims, &mut room)?;
            let block_rows = (BLOCK_SCORES / dims.kv_len.max(1)).max(BLOCK_ROWS).min(dims.q_len);
            gather(statistics, dims.q_len, 2.0 * dims.head_dim as f64, tokens, |item, places| {
                let [entry, head] = item.at;
                let head = problem.head(entry, head);
                let mut weigher = Weigher::new(&problem, block_rows)?;
                for first in item.rows.clone().step_by(block_rows) {
                    let rows = first..item.rows.end.min(first + block_rows);
                    let (weights, keys) = weigher.weigh(&problem, &head, rows.clone(), None);
                    for (i, row) in rows.zip(weights.outer_iter()) {
                        item.tally.row(places, i, keys.start, row.slice_move(s![keys.clone()]));
                    }
                }
                Ok(())
            })
        }
    }
}

/// Runs `count` over all rows of all heads. What is cut into parts, and how they are added, depends on the lengths only.
fn gather(
    mut statistics: HeadStatistics,
    q_len: usize,
    flop_per_score: f64,
    tokens: &Tokens<'_>,
    count: impl Fn(&mut Item, &Places) -> Result<()> + Send + Sync,
) -> Result<HeadStatistics> {
    let (batch, num_heads, kv_len) = statistics.received.dim();
    if statistics.received.is_empty() || q_len == 0 {
        return Ok(statistics);
    }
    // The arrays above have the length of batch * num_heads, so it can be counted.
    let heads = batch * num_heads;
    let parts = (ITEMS / heads).min(q_len / PART_ROWS).max(1);
    let part_rows = q_len.div_ceil(parts);
    let places: Vec<Places> = (0..batch).map(|entry| tokens.of_entry(entry, q_len, kv_len)).collect();
    let mut items = Vec::new();
    for at in (0..batch).flat_map(|entry| (0..num_heads).map(move |head| [entry, head])) {
        for start in (0..q_len).step_by(part_rows) {
            let (received, _) = zeros("received", "[kv_len]", kv_len)?.into_raw_vec_and_offset();
            items.push(Item { at, rows: start..q_len.min(start + part_rows), tally: Tally::new(received) });
        }
    }
    let flop = heads as f64 * q_len as f64 * kv_len as f64 * (flop_per_score + FLOP_PER_WEIGHT);
    parallel::try_for_each(items.iter_mut().collect(), flop, |item: &mut Item| {
        let [entry, _] = item.at;
        count(item, &places[entry])
    })?;
    for parts in items.chunk_by_mut(|a, b| a.at == b.at) {
        if let Some((whole, others)) = parts.split_first_mut() {
            others.iter().for_each(|part| whole.tally.merge(&part.tally));
            statistics.set(whole.at, &whole.tally);
        }
    }
    Ok(statistics)
}

impl HeadStatistics {
    /// Before anything is counted.
    fn zeros([batch, num_heads, _, kv_len]: [usize; 4], tokens: &Tokens<'_>) -> Result<Self> {
        tokens.check(batch, kv_len)?;
        let table = |name| zeros::<f64, _>(name, "[batch, num_heads]", (batch, num_heads));
        let with_ids = |name| if tokens.has_ids() { table(name).map(Some) } else { Ok(None) };
        Ok(Self {
            queries: table("queries")?.mapv(|_| 0),
            entropy: table("entropy")?,
            distance: table("distance")?,
            confidence: table("confidence")?,
            first: table("first")?,
            previous: table("previous")?,
            next: table("next")?,
            duplicate: with_ids("duplicate")?,
            induction: with_ids("induction")?,
            received: zeros("received", "[batch, num_heads, kv_len]", (batch, num_heads, kv_len))?,
        })
    }

    fn set(&mut self, [entry, head]: [usize; 2], tally: &Tally) {
        let at = [entry, head];
        self.queries[at] = tally.queries;
        let means: [(&mut Array2<f64>, Sum); 6] = [
            (&mut self.entropy, tally.entropy),
            (&mut self.distance, tally.distance),
            (&mut self.confidence, tally.confidence),
            (&mut self.first, tally.first),
            (&mut self.previous, tally.previous),
            (&mut self.next, tally.next),
        ];
        means.into_iter().for_each(|(means, sum)| means[at] = sum.mean());
        for (means, sum) in [(&mut self.duplicate, tally.duplicate), (&mut self.induction, tally.induction)] {
            if let Some(means) = means {
                means[at] = sum.mean();
            }
        }
        tally.received(self.received.index_axis_mut(Axis(0), entry).index_axis_move(Axis(0), head));
    }
}
