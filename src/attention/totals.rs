//! What rows come to that have met their keys: what is known about them elsewhere added, divided, and written.

use super::walk::{State, Walk};
use crate::element::Element;
use crate::kernels::{Block, PANEL};

/// What a row's exponentials sum up to.
enum Total<T> {
    /// `e^reference * total`
    Keys { reference: T, total: T },
    /// No key was seen: the sink, or -inf where there is none.
    Sink(T),
}

impl<T: Element> Total<T> {
    /// What the context is to be divided by.
    fn divisor(&self) -> T {
        match *self {
            Self::Keys { total, .. } => total,
            // The context is zero.
            Self::Sink(_) => T::one(),
        }
    }

    fn lse(&self) -> T {
        match *self {
            // Visible scores that are all -inf (by overflow, not by a mask) have no softmax.
            Self::Keys { total, .. } if total == T::zero() => T::nan(),
            Self::Keys { reference, total } => reference + total.ln(),
            Self::Sink(sink) => sink,
        }
    }
}

impl<T: Element> Walk<'_, '_, T> {
    /// Writes the rows, which have met all their keys, to the block of an output that is theirs.
    pub(super) fn write(&self, state: &mut State<'_, T>, block: &mut Block<'_, T>) {
        let wants_lse = block.wants_lse();
        let unit = self.unit();
        for index in 0..self.group.min(self.rows) {
            let head = self.row(index).0;
            let sink = self.call.rules.sink(head);
            let Some(mut rows) = block.head(head) else { continue };
            for (row, position) in (index..self.rows).step_by(self.group).zip(self.at.positions.clone()) {
                let total = self.total(row, sink, unit, state);
                let lse = if wants_lse { total.lse() } else { T::zero() };
                let context = &state.context[row * self.width..][..self.call.dims.value_dim];
                rows.write(position, context, total.divisor(), lse);
            }
        }
    }

    /// What a row that has met all its keys is to be divided by, the sink's share included.
    #[inline(always)]
    fn total(&self, row: usize, sink: Option<T>, unit: T, state: &mut State<'_, T>) -> Total<T> {
        let maximum = state.maxima[row];
        if maximum == T::neg_infinity() {
            // The row has seen no key; its context is still zero.
            return Total::Sink(sink.unwrap_or(maximum));
        }
        let mut total = sum_of_16(&state.sums[row * PANEL..][..PANEL]);
        let maximum = maximum * unit;
        let mut reference = maximum;
        if let Some(sink) = sink {
            reference = maximum.max(sink);
            let shrink = (maximum - reference).exp();
            total = total * shrink + (sink - reference).exp();
            let context = &mut state.context[row * self.width..][..self.call.dims.value_dim];
            context.iter_mut().for_each(|c| *c *= shrink);
        }
        Total::Keys { reference, total }
    }

    /// Adds what the same rows have met elsewhere: the numbers of a [`State::new`].
    pub(super) fn add(&self, state: &mut State<'_, T>, numbers: &[T]) {
        let width = self.width;
        let (context, rest) = numbers.split_at(self.rows * width);
        let (sums, maxima) = rest.split_at(self.rows * PANEL);
        let unit = self.unit();
        for row in 0..self.rows {
            let other = maxima[row];
            if other == T::neg_infinity() {
                continue;
            }
            let maximum = &mut state.maxima[row];
            let reference = maximum.max(other);
            // A row that has seen nothing is zero, and e^-inf keeps it so.
            let factors = [*maximum, other].map(|m| ((m - reference) * unit).exp());
            *maximum = reference;
            let weigh = |to: &mut [T], from: &[T]| {
                to.iter_mut().zip(from).for_each(|(to, &from)| *to = *to * factors[0] + from * factors[1]);
            };
            weigh(&mut state.context[row * width..][..width], &context[row * width..][..width]);
            weigh(&mut state.sums[row * PANEL..][..PANEL], &sums[row * PANEL..][..PANEL]);
        }
    }
}

/// The sum of 16 partial sums, by halves: the order is fixed, and few additions wait for each other.
fn sum_of_16<T: Element>(sums: &[T]) -> T {
    let mut sums: [T; PANEL] = std::array::from_fn(|i| sums[i]);
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            sums[i] += sums[i + half];
        }
    }
    sums[0]
}
