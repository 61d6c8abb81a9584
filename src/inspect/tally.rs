//! The sums of one head, row by row.

use ndarray::{ArrayView1, ArrayViewMut1};

use super::tokens::Places;
use crate::element::Element;

/// A sum and how many rows it is over.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sum {
    sum: f64,
    rows: usize,
}

impl Sum {
    fn add(&mut self, x: f64) {
        self.sum += x;
        self.rows += 1;
    }

    fn merge(&mut self, other: Self) {
        self.sum += other.sum;
        self.rows += other.rows;
    }

    /// The mean; 0 of no rows.
    pub(super) fn mean(self) -> f64 {
        self.sum / self.rows.max(1) as f64
    }
}

/// The sums over some rows of one head.
#[derive(Debug, Default)]
pub(super) struct Tally {
    /// Rows that have a weight.
    pub(super) queries: usize,
    pub(super) entropy: Sum,
    pub(super) distance: Sum,
    pub(super) confidence: Sum,
    pub(super) first: Sum,
    pub(super) previous: Sum,
    pub(super) next: Sum,
    pub(super) duplicate: Sum,
    pub(super) induction: Sum,
    /// `[kv_len]`
    received: Vec<f64>,
}

impl Tally {
    /// Before the first row; `received` holds zeros, one for each key.
    pub(super) fn new(received: Vec<f64>) -> Self {
        Self { received, ..Self::default() }
    }

    /// Row i, whose weights from key `start` on are given; all others are 0.
    pub(super) fn row<T: Element>(&mut self, places: &Places, i: usize, start: usize, weights: ArrayView1<'_, T>) {
        let position = places.position(i);
        let [mut total, mut entropy, mut distance, mut largest] = [0.0; 4];
        for (j, &weight) in (start..).zip(weights) {
            let w = weight.into_f64();
            // w ln w tends to 0 with w. A NaN is counted.
            if w == 0.0 {
                continue;
            }
            total += w;
            entropy -= w * weight.ln().into_f64();
            distance += w * (j as i64).abs_diff(position) as f64;
            largest = w.max(largest);
            self.received[j] += w;
        }
        if total == 0.0 {
            return;
        }
        if total.is_nan() {
            // Such a row has no weight that is a number, wherever its walk began.
            self.received.fill(f64::NAN);
            largest = f64::NAN;
        }
        self.queries += 1;
        self.entropy.add(entropy);
        self.distance.add(distance);
        self.confidence.add(largest);

        let at = |key: Option<usize>| {
            let key = key.and_then(|key| key.checked_sub(start));
            let weight = key.and_then(|key| weights.get(key)).map_or(0.0, |weight| weight.into_f64());
            if total.is_nan() { total } else { weight }
        };
        self.first.add(at(Some(places.first)));
        // Before the first key there is padding, if anything.
        let keys = places.first..self.received.len();
        let key = |position: i64| usize::try_from(position).ok().filter(|key| keys.contains(key));
        for (sum, neighbour) in [(&mut self.previous, position - 1), (&mut self.next, position + 1)] {
            if let Some(neighbour) = key(neighbour) {
                sum.add(at(Some(neighbour)));
            }
        }

        let (Some(ids), Some(own)) = (&places.ids, key(position)) else { return };
        if !ids.repeated[own] {
            return;
        }
        let (mut duplicate, mut induction) = (0.0, 0.0);
        for (j, weight) in (start..=own).zip(weights) {
            let w = weight.into_f64();
            if j < own && ids.ids[j] == ids.ids[own] {
                duplicate += w;
            }
            if j > places.first && ids.ids[j - 1] == ids.ids[own] {
                induction += w;
            }
        }
        let or_nan = |sum: f64| if total.is_nan() { total } else { sum };
        self.duplicate.add(or_nan(duplicate));
        self.induction.add(or_nan(induction));
    }

    /// Takes in the rows that follow.
    pub(super) fn merge(&mut self, other: &Self) {
        self.queries += other.queries;
        let sums = [
            (&mut self.entropy, other.entropy),
            (&mut self.distance, other.distance),
            (&mut self.confidence, other.confidence),
            (&mut self.first, other.first),
            (&mut self.previous, other.previous),
            (&mut self.next, other.next),
            (&mut self.duplicate, other.duplicate),
            (&mut self.induction, other.induction),
        ];
        sums.into_iter().for_each(|(sum, other)| sum.merge(other));
        self.received.iter_mut().zip(&other.received).for_each(|(sum, &other)| *sum += other);
    }

    /// Writes the column sums: `to: [kv_len]`.
    pub(super) fn received(&self, mut to: ArrayViewMut1<'_, f64>) {
        to.iter_mut().zip(&self.received).for_each(|(to, &sum)| *to = sum);
    }
}
