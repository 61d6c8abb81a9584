//! Numbers that depend on the distance from a query to a key, for whole rows of a tile at a time.
//!
//! A *line* holds one number for each distance from `-reach` to `reach`, `2 reach + 1` of them; distances beyond take the
//! outer ones. Row i of the scores is then a piece of the line, `row[j] = line[clamp(j - pos(i)) + reach]`, so it is
//! copied and not looked up pair by pair. Gradients go the other way: the distances of a row are summed into a line.

use crate::element::Element;
use std::ops::Range;

/// How the keys of a row fall onto a line.
struct Pieces {
    /// Keys whose distance has its own number; those before take the first, those after the last.
    keys: Range<usize>,
    /// Where these numbers begin.
    start: usize,
}

/// The pieces of a row of `n` keys from `first` on, of a query at `position`.
fn pieces(reach: usize, position: i64, first: usize, n: usize) -> Pieces {
    let far = i64::MAX / 8;
    let whole = |n: usize| i64::try_from(n).map_or(far, |n| n.min(far));
    // Number of the line that key `first` would have.
    let at = whole(first) - position + whole(reach);
    let clamp = |key: i64| key.clamp(0, whole(n)) as usize;
    let (start, end) = (clamp(-at), clamp(whole(reach).saturating_mul(2) + 1 - at));
    Pieces { keys: start..end.max(start), start: at.max(0) as usize }
}

/// Half of the line's length.
fn reach<T>(line: &[T]) -> usize {
    line.len() / 2
}

/// Adds to each key of a row, from key `first` on, what the line holds for its distance from `position`.
pub(crate) fn add_from_line<T: Element>(line: &[T], position: i64, first: usize, row: &mut [T]) {
    let Pieces { keys, start } = pieces(reach(line), position, first, row.len());
    let (Some(&lowest), Some(&highest)) = (line.first(), line.last()) else { return };
    row[..keys.start].iter_mut().for_each(|x| *x += lowest);
    row[keys.end..].iter_mut().for_each(|x| *x += highest);
    let own = &mut row[keys.clone()];
    if !own.is_empty() {
        own.iter_mut().zip(&line[start..][..keys.len()]).for_each(|(x, &from)| *x += from);
    }
}

/// Adds each key of a row, from key `first` on, to the number that the line holds for its distance from `position`.
#[cfg_attr(not(test), expect(dead_code, reason = "gradients are summed pair by pair until there is a tiled backward"))]
pub(crate) fn add_to_line<T: Element>(row: &[T], position: i64, first: usize, line: &mut [T]) {
    let Pieces { keys, start } = pieces(reach(line), position, first, row.len());
    let sum = |row: &[T]| row.iter().fold(T::zero(), |sum, &x| sum + x);
    let (before, after) = (sum(&row[..keys.start]), sum(&row[keys.end..]));
    let own = &row[keys.clone()];
    if !own.is_empty() {
        line[start..][..keys.len()].iter_mut().zip(own).for_each(|(to, &x)| *to += x);
    }
    if let Some(first) = line.first_mut() {
        *first += before;
    }
    if let Some(last) = line.last_mut() {
        *last += after;
    }
}

/// The number of a line for one distance.
pub(crate) fn index(reach: usize, distance: i64) -> usize {
    let size = usize::try_from(distance.unsigned_abs()).unwrap_or(usize::MAX).min(reach);
    if distance < 0 { reach - size } else { reach + size }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_pieces_of_the_line() {
        for reach in [0, 1, 2, 5, 40] {
            let line: Vec<f64> = (0..2 * reach + 1).map(|n| (n * n) as f64 + 1.0).collect();
            for n in [0, 1, 3, 64] {
                for position in [-300, -41, -7, -1, 0, 1, 2, 5, 39, 40, 41, 64, 100, 300] {
                    for first in [0, 1, 64, 192] {
                        let what = format!("reach {reach}, {n} keys from {first}, position {position}");
                        let number = |j: usize| index(reach, (first + j) as i64 - position);
                        let mut row = vec![0.5; n];
                        add_from_line(&line, position, first, &mut row);
                        let want: Vec<f64> = (0..n).map(|j| 0.5 + line[number(j)]).collect();
                        assert_eq!(row, want, "{what}");

                        let (mut got, mut want) = (line.clone(), line.clone());
                        add_to_line(&row, position, first, &mut got);
                        (0..n).for_each(|j| want[number(j)] += row[j]);
                        assert_eq!(got, want, "{what}");
                    }
                }
            }
        }
    }

    #[test]
    fn positions_far_away_take_the_outer_numbers() {
        let (line, far) = ([1.0, 2.0, 4.0], i64::MAX / 4);
        for (position, want) in [(far, 1.0), (-far, 4.0)] {
            let mut row = [0.0; 3];
            add_from_line(&line, position, usize::MAX / 2, &mut row);
            add_from_line(&line, position, 7, &mut row);
            assert_eq!(row, [2.0 * want; 3]);
        }
    }
}
