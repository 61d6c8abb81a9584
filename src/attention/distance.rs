//! Numbers that depend on the distance from a query to a key, for whole rows of a tile at a time.
//!
//! A *line* holds one number for each distance of a range; distances beyond its ends take the outer ones. Row i of the
//! scores is then a piece of the line, `row[j] = line[clamp(j - pos(i)) - lowest]`, so it is copied and not looked up pair by
//! pair. Gradients go the other way: the distances of a row are summed into a line.

use crate::element::Element;
use crate::position::whole;
use std::ops::Range;

/// The smallest and the largest distance of some pairs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) lowest: i64,
    pub(crate) highest: i64,
}

impl Span {
    /// Of queries at the positions from `first` to `last`.
    pub(crate) fn new(first: i64, last: i64, keys: Range<usize>) -> Self {
        Self { lowest: whole(keys.start) - last, highest: whole(keys.end) - first }
    }

    /// The part within `outer`, at least one of its ends.
    pub(crate) fn clamp_to(self, outer: Self) -> Self {
        let clamp = |distance: i64| distance.clamp(outer.lowest, outer.highest.max(outer.lowest));
        Self { lowest: clamp(self.lowest), highest: clamp(self.highest) }
    }

    /// The smallest span that holds both.
    pub(crate) fn union(self, other: Self) -> Self {
        Self { lowest: self.lowest.min(other.lowest), highest: self.highest.max(other.highest) }
    }

    /// Where distances from `-reach` to `reach` are told apart: the part of the span within them, at least one of its
    /// ends.
    pub(crate) fn within(self, reach: usize) -> Self {
        let reach = whole(reach);
        self.clamp_to(Self { lowest: -reach, highest: reach })
    }

    /// How many distances there are.
    pub(crate) fn len(self) -> usize {
        usize::try_from(self.highest - self.lowest + 1).unwrap_or(0)
    }
}

/// How the keys of a row fall onto a line.
struct Pieces {
    /// Keys whose distance has its own number; those before take the first, those after the last.
    keys: Range<usize>,
    /// Where these numbers begin.
    start: usize,
}

/// Where a row begins on a line: key `first` of a query at `position`, on a line that begins with the distance `lowest`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Start {
    pub(crate) lowest: i64,
    pub(crate) position: i64,
    pub(crate) first: usize,
}

impl Start {
    /// The pieces of a row of `n` keys on a line of `len` numbers.
    fn pieces(self, len: usize, n: usize) -> Pieces {
        // Number of the line that the first key would have.
        let at = whole(self.first) - self.position - self.lowest;
        let clamp = |key: i64| key.clamp(0, whole(n)) as usize;
        let (start, end) = (clamp(-at), clamp(whole(len) - at));
        Pieces { keys: start..end.max(start), start: at.max(0) as usize }
    }
}

/// Adds to each key of a row what the line holds for its distance.
pub(crate) fn add_from_line<T: Element>(line: &[T], at: Start, row: &mut [T]) {
    let Pieces { keys, start } = at.pieces(line.len(), row.len());
    let (Some(&lowest), Some(&highest)) = (line.first(), line.last()) else { return };
    row[..keys.start].iter_mut().for_each(|x| *x += lowest);
    row[keys.end..].iter_mut().for_each(|x| *x += highest);
    if !keys.is_empty() {
        let numbers = &line[start..][..keys.len()];
        row[keys].iter_mut().zip(numbers).for_each(|(x, &from)| *x += from);
    }
}

/// Adds each key of a row to the number that the line holds for its distance. `number` is how the line counts.
pub(crate) fn add_to_line<T: Element, N: Element>(row: &[T], at: Start, line: &mut [N], number: impl Fn(T) -> N) {
    let Pieces { keys, start } = at.pieces(line.len(), row.len());
    let sum = |row: &[T]| row.iter().fold(N::zero(), |sum, &x| sum + number(x));
    let (before, after) = (sum(&row[..keys.start]), sum(&row[keys.end..]));
    if !keys.is_empty() {
        let numbers = &mut line[start..][..keys.len()];
        numbers.iter_mut().zip(&row[keys]).for_each(|(to, &x)| *to += number(x));
    }
    if let Some(first) = line.first_mut() {
        *first += before;
    }
    if let Some(last) = line.last_mut() {
        *last += after;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::position::FAR;

    #[test]
    fn rows_are_pieces_of_the_line() {
        for (lowest, length) in [(0, 1), (-1, 3), (-5, 11), (-40, 81), (-70, 60), (10, 30), (-1000, 1), (1000, 5)] {
            let line: Vec<f64> = (0..length).map(|n| (n * n) as f64 + 1.0).collect();
            for n in [0, 1, 3, 64] {
                for position in [-300, -41, -7, -1, 0, 1, 2, 5, 39, 40, 41, 64, 100, 300] {
                    for first in [0, 1, 64, 192] {
                        let what = format!("{length} from {lowest}, {n} keys from {first}, position {position}");
                        let number = |j: usize| {
                            let distance = (first + j) as i64 - position;
                            (distance - lowest).clamp(0, length - 1) as usize
                        };
                        let (at, mut row) = (Start { lowest, position, first }, vec![0.5; n]);
                        add_from_line(&line, at, &mut row);
                        let want: Vec<f64> = (0..n).map(|j| 0.5 + line[number(j)]).collect();
                        assert_eq!(row, want, "{what}");

                        let (mut got, mut want) = (line.clone(), line.clone());
                        add_to_line(&row, at, &mut got, |x| x);
                        (0..n).for_each(|j| want[number(j)] += row[j]);
                        assert_eq!(got, want, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn positions_far_away_take_the_outer_numbers() {
        for (position, want) in [(2 * FAR, 1.0), (-2 * FAR, 4.0)] {
            let mut row = [0.0; 3];
            for first in [usize::MAX / 2, 7] {
                add_from_line(&[1.0, 2.0, 4.0], Start { lowest: -1, position, first }, &mut row);
            }
            assert_eq!(row, [2.0 * want; 3]);
        }
    }

    #[test]
    fn spans_are_as_long_as_the_call_and_no_longer_than_the_reach() {
        // Three queries at 5, 6 and 7, nine keys.
        let span = Span::new(5, 7, 0..9);
        assert_eq!(span, Span { lowest: -7, highest: 4 });
        assert_eq!((span.within(2), span.within(2).len()), (Span { lowest: -2, highest: 2 }, 5));
        assert_eq!((span.within(5), span.within(usize::MAX)), (Span { lowest: -5, highest: 4 }, span));
        assert_eq!(span.union(Span::new(-3, 0, 0..2)), Span { lowest: -7, highest: 5 });
        // Far behind the keys, all distances are the same.
        assert_eq!(Span::new(FAR, FAR + 2, 0..9).within(100), Span { lowest: -100, highest: -100 });
        assert_eq!(Span::new(FAR, FAR + 2, 0..9).within(usize::MAX).len(), 10);
        assert_eq!(Span::new(0, -1, 0..0).len(), 0);
    }
}
