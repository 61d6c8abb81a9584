//! Working memory that begins at a cache line, so that no vector of a packed tile lies across two.

use super::Real;
use super::simd::LINE;

/// The first `n` elements of `buffer` from a cache line on. The buffer grows if it has to and keeps what it holds,
/// whatever that is.
#[inline]
pub(crate) fn aligned<T: Real>(buffer: &mut Vec<T>, n: usize) -> &mut [T] {
    if n == 0 {
        return &mut [];
    }
    let slack = LINE / size_of::<T>();
    if buffer.len() < n + slack {
        buffer.resize(n + slack, T::zero());
    }
    // An address that cannot be aligned costs speed, not correctness.
    let start = buffer.as_ptr().align_offset(LINE).min(slack);
    &mut buffer[start..start + n]
}

/// Makes room for `n` elements of [`aligned`], so that it allocates nothing; writes none of them. `None` if that much
/// memory cannot be had.
pub(crate) fn reserve<T: Real>(buffer: &mut Vec<T>, n: usize) -> Option<()> {
    let wanted = n.saturating_add(LINE / size_of::<T>());
    buffer.try_reserve_exact(wanted.saturating_sub(buffer.len())).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn begins_at_a_line_and_does_not_grow_twice() {
        let mut buffer = Vec::<f32>::new();
        for n in [0, 1, 100, 50, 100] {
            let slice = aligned(&mut buffer, n);
            assert_eq!(slice.len(), n);
            assert!(n == 0 || slice.as_ptr().addr().is_multiple_of(LINE));
        }
        assert_eq!(buffer.len(), 116);
    }
}
