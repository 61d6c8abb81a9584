//! Many threads fill the gradients: blocks of keys are dealt one by one, and the gradient of the queries goes from one to
//! the next like the baton of a relay.
//!
//! An item is a block of keys of some KV heads. Its part of `d_k`, `d_v` and `d_bias` belongs to it alone. `d_q` gets
//! something from every block of keys, and the sum must have one order: a block adds to a step (one tile of query
//! positions of one head) after the block before it did. So block `b` of a KV head publishes how many steps it has passed,
//! and block `b + 1` waits for that number:
//!
//! ```text
//! block 0   step 0 | step 1 | step 2 | ...
//! block 1            step 0 | step 1 | ...            never beyond block 0
//! block 2                     step 0 | ...
//! ```
//!
//! Nothing is kept but a number for each block, so memory does not grow with the number of partial sums. Items are dealt
//! in the order of their blocks: what an item waits for was dealt before it and is being worked on by a thread that waits
//! for nothing later, so the wait ends on any number of threads. (The deterministic mode of FlashAttention-2 orders its
//! sums likewise.)

use crate::heads::HeadMap;
use ndarray::{ArrayViewMut2, ArrayViewMut4, Ix4, RawArrayViewMut, s};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Where the gradients go, any strides.
pub(crate) struct Targets<'a, T> {
    /// `[batch, num_heads, q_len, head_dim]`
    pub(crate) d_q: ArrayViewMut4<'a, T>,
    /// `[batch, num_kv_heads, kv_len, head_dim]`
    pub(crate) d_k: ArrayViewMut4<'a, T>,
    /// `[batch, num_kv_heads, kv_len, value_dim]`
    pub(crate) d_v: ArrayViewMut4<'a, T>,
    /// `[1 or batch, 1 or num_heads, 1 or q_len, kv_len]`
    pub(crate) d_bias: Option<ArrayViewMut4<'a, T>>,
}

/// How the work is cut.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cut<'a> {
    pub(crate) heads: &'a HeadMap,
    /// Keys of a block, above 0.
    pub(crate) key_block: usize,
    /// Query positions of a step, above 0.
    pub(crate) query_tile: usize,
    /// Whether a last step follows, in which the blocks of a pair add to something of the caller's in their order.
    pub(crate) last_step: bool,
}

/// Deals the items of one call.
pub(crate) struct Relay<'a, T> {
    next: AtomicUsize,
    cut: Cut<'a>,
    batch: usize,
    q_len: usize,
    kv_len: usize,
    /// Whether an item has all batch entries, and all KV heads: where they share a gradient of the bias.
    joint: [bool; 2],
    d_q: RawArrayViewMut<T, Ix4>,
    d_k: RawArrayViewMut<T, Ix4>,
    d_v: RawArrayViewMut<T, Ix4>,
    d_bias: Option<RawArrayViewMut<T, Ix4>>,
    /// `[batch][KV heads that are read][blocks]`: the steps that a block has passed.
    passed: &'a [AtomicUsize],
    borrow: PhantomData<&'a mut T>,
}

// SAFETY: `Relay` stands for a `&mut` of each target, which may be sent to a thread if `T` may.
unsafe impl<T: Send> Send for Relay<'_, T> {}
// SAFETY: targets are reached through items only, which hand every element to one thread at a time: see `RelayItem`.
unsafe impl<T: Send> Sync for Relay<'_, T> {}

impl<'a, T> Relay<'a, T> {
    /// How many numbers `passed` needs.
    pub(crate) fn counters(cut: &Cut<'_>, batch: usize, kv_len: usize) -> usize {
        batch.saturating_mul(cut.heads.num_read()).saturating_mul(blocks(cut, kv_len))
    }

    /// What `passed` holds does not matter. `None` if it is too short or the targets do not fit each other.
    pub(crate) fn new(cut: Cut<'a>, mut targets: Targets<'a, T>, passed: &'a mut [AtomicUsize]) -> Option<Self> {
        // That a step belongs to one block at a time rests on these numbers: no block has passed any step yet, and nobody
        // but the relay can say that one has.
        passed.iter_mut().for_each(|steps| *steps.get_mut() = 0);
        let passed = &*passed;
        let ((batch, num_heads, q_len, head_dim), (_, num_kv_heads, kv_len, _)) =
            (targets.d_q.dim(), targets.d_k.dim());
        let keys = targets.d_k.dim() == (batch, num_kv_heads, kv_len, head_dim)
            && targets.d_v.shape()[..3] == [batch, num_kv_heads, kv_len];
        let heads = cut.heads.num_heads() == num_heads && cut.heads.num_kv_heads() == num_kv_heads;
        let bias = targets.d_bias.as_ref().is_none_or(|d_bias| {
            let full = [batch, num_heads, q_len, kv_len];
            d_bias.shape()[3] == kv_len && d_bias.shape().iter().zip(full).all(|(&n, full)| n == 1 || n == full)
        });
        let counted = passed.len() >= Self::counters(&cut, batch, kv_len) && cut.key_block > 0 && cut.query_tile > 0;
        let is_one = |axis: usize| targets.d_bias.as_ref().is_some_and(|d_bias| d_bias.shape()[axis] == 1);
        let joint = [is_one(0), is_one(1)];
        (keys && heads && bias && counted).then(|| Self {
            next: AtomicUsize::new(0),
            cut,
            batch,
            q_len,
            kv_len,
            joint,
            d_q: targets.d_q.raw_view_mut(),
            d_k: targets.d_k.raw_view_mut(),
            d_v: targets.d_v.raw_view_mut(),
            d_bias: targets.d_bias.as_mut().map(|d_bias| d_bias.raw_view_mut()),
            passed,
            borrow: PhantomData,
        })
    }

    /// Number of items.
    pub(crate) fn len(&self) -> usize {
        let [entries, kv_heads] = self.shares();
        entries.saturating_mul(kv_heads).saturating_mul(blocks(&self.cut, self.kv_len))
    }

    /// How many shares the batch entries and the KV heads are cut into.
    fn shares(&self) -> [usize; 2] {
        let lengths = [self.batch, self.cut.heads.num_read()];
        [0, 1].map(|axis| if self.joint[axis] { lengths[axis].min(1) } else { lengths[axis] })
    }

    /// The next item that nobody has. The first keys come first: under a causal mask most queries see them, and the
    /// longest items must not be the last ones.
    pub(crate) fn next(&self) -> Option<RelayItem<'_, T>> {
        let index = self.next.fetch_add(1, Ordering::Relaxed);
        if index >= self.len() {
            return None;
        }
        let [entries, kv_heads] = self.shares();
        let (block, share) = (index / (entries * kv_heads), index % (entries * kv_heads));
        let own = |axis: usize, share: usize, all: usize| if self.joint[axis] { 0..all } else { share..share + 1 };
        Some(RelayItem {
            relay: self,
            block,
            entries: own(0, share / kv_heads, self.batch),
            kv_heads: own(1, share % kv_heads, self.cut.heads.num_read()),
        })
    }
}

/// Blocks of keys; at least one, which also covers the queries of a call without keys.
fn blocks(cut: &Cut<'_>, kv_len: usize) -> usize {
    kv_len.div_ceil(cut.key_block.max(1)).max(1)
}

/// One block of keys of some batch entries and KV heads. There is one of each, which is why it cannot be cloned.
pub(crate) struct RelayItem<'r, T> {
    relay: &'r Relay<'r, T>,
    block: usize,
    entries: Range<usize>,
    /// Indices among the KV heads that are read.
    kv_heads: Range<usize>,
}

/// A batch entry and the index of a KV head among those that are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pair {
    pub(crate) entry: usize,
    pub(crate) index: usize,
}

impl<T> RelayItem<'_, T> {
    /// The keys.
    pub(crate) fn keys(&self) -> Range<usize> {
        let start = self.block * self.relay.cut.key_block;
        start..self.relay.kv_len.min(start + self.relay.cut.key_block)
    }

    /// Whether these are the first keys: whoever has them writes `d_q`, and others add to it.
    pub(crate) fn is_first(&self) -> bool {
        self.block == 0
    }

    /// The batch entries and KV heads, in the order in which they must be worked on.
    pub(crate) fn pairs(&self) -> impl Iterator<Item = Pair> + use<T> {
        let kv_heads = self.kv_heads.clone();
        self.entries.clone().flat_map(move |entry| kv_heads.clone().map(move |index| Pair { entry, index }))
    }

    fn has(&self, pair: Pair) -> bool {
        self.entries.contains(&pair.entry) && self.kv_heads.contains(&pair.index)
    }

    /// The item's rows of `d_k` and `d_v`; `None` for a pair that is not the item's.
    pub(crate) fn d_keys_values(&mut self, pair: Pair) -> Option<[ArrayViewMut2<'_, T>; 2]> {
        let (relay, keys) = (self.relay, self.keys());
        let kv_head = relay.cut.heads.read_kv_head(pair.index);
        self.has(pair).then(|| {
            [&relay.d_k, &relay.d_v].map(|target| {
                let part = (*target).slice_move(s![pair.entry, kv_head, keys.clone(), ..]);
                // SAFETY: the target is borrowed exclusively for as long as the relay lives. Items are handed out once
                // (`Relay::next`) and differ in block, entry or KV head, so no other thread has these rows; `&mut self`
                // keeps this one from having them twice.
                unsafe { part.deref_into_view_mut() }
            })
        })
    }

    /// Whether a pair and one of the heads that read its KV head are the first that add to their part of the bias's gradient.
    pub(crate) fn begins_bias(&self, pair: Pair, member: usize) -> bool {
        let [entry_shared, head_shared] = self.relay.joint;
        !(entry_shared && pair.entry > 0 || head_shared && (pair.index > 0 || member > 0))
    }

    /// The item's keys in the bias's gradient for one batch entry and query head, `[1 or q_len, keys]`: others may share
    /// it. `None` if there is none, or the head is not the item's.
    pub(crate) fn d_bias(&mut self, entry: usize, head: usize) -> Option<ArrayViewMut2<'_, T>> {
        let (relay, keys) = (self.relay, self.keys());
        let target = relay.d_bias.as_ref()?;
        let own =
            head < relay.cut.heads.num_heads() && self.has(Pair { entry, index: relay.cut.heads.read_index(head) });
        let [entry, head] = [(0, entry), (1, head)].map(|(axis, index)| if relay.joint[axis] { 0 } else { index });
        own.then(|| {
            let part = (*target).slice_move(s![entry, head, .., keys]);
            // SAFETY: as above. Where entries or heads share a gradient, one item has all of them (`joint`).
            unsafe { part.deref_into_view_mut() }
        })
    }

    /// Waits until the blocks before this one have added to a step of `d_q`, and gives access to it. Steps count
    /// through the query tiles, and within a tile through the heads that read the KV head. `None` for a step that does
    /// not exist, that the item has passed already, or that is none of its pairs.
    pub(crate) fn turn(&mut self, pair: Pair, step: usize) -> Option<Turn<'_, T>> {
        let relay = self.relay;
        let own = self.has(pair) && step < relay.row_steps(pair) && step >= relay.passed_by(pair, self.block);
        own.then(|| {
            self.wait(pair, step + 1);
            Turn { relay, block: self.block, pair, step, item: PhantomData }
        })
    }

    /// Waits for the last step of the pair: the blocks before this one have dropped theirs then. `None` if the cut has no
    /// such step, the item has passed it, or the pair is none of its own.
    pub(crate) fn last_turn(&mut self, pair: Pair) -> Option<LastTurn<'_, T>> {
        let (relay, steps) = (self.relay, self.relay.steps(pair));
        let own = self.has(pair) && relay.cut.last_step && relay.passed_by(pair, self.block) < steps;
        own.then(|| {
            self.wait(pair, steps);
            LastTurn { relay, block: self.block, pair, item: PhantomData }
        })
    }

    /// Says that the item adds to no further step of the pair.
    pub(crate) fn done(&mut self, pair: Pair) {
        let steps = self.relay.steps(pair);
        if self.has(pair) && self.relay.passed_by(pair, self.block) < steps {
            self.wait(pair, steps);
            self.relay.pass(pair, self.block, steps);
        }
    }

    /// Waits until the block before this one has passed `steps` steps.
    fn wait(&self, pair: Pair, steps: usize) {
        let mut turns = 0;
        while self.block > 0 && self.relay.passed_by(pair, self.block - 1) < steps {
            turns += 1;
            if turns < SPINS { std::hint::spin_loop() } else { std::thread::yield_now() }
        }
    }
}

/// Looks at a number this often before the thread is offered to others: a few microseconds, as long as a step takes.
const SPINS: usize = 200;

/// An item that is dropped has passed everything, so that no other waits for it, also when its thread panics.
impl<T> Drop for RelayItem<'_, T> {
    fn drop(&mut self) {
        self.pairs().for_each(|pair| self.done(pair));
    }
}

impl<T> Relay<'_, T> {
    /// Steps of a pair, the last one included.
    fn steps(&self, pair: Pair) -> usize {
        self.row_steps(pair) + usize::from(self.cut.last_step)
    }

    /// Steps that have rows of `d_q`.
    fn row_steps(&self, pair: Pair) -> usize {
        let heads = self.cut.heads;
        self.q_len.div_ceil(self.cut.query_tile) * heads.group_size(heads.read_kv_head(pair.index))
    }

    fn counter(&self, pair: Pair, block: usize) -> &AtomicUsize {
        let pair = pair.entry * self.cut.heads.num_read() + pair.index;
        &self.passed[pair * blocks(&self.cut, self.kv_len) + block]
    }

    /// Everything that the block and those before it wrote to these steps is visible to the caller.
    fn passed_by(&self, pair: Pair, block: usize) -> usize {
        self.counter(pair, block).load(Ordering::Acquire)
    }

    fn pass(&self, pair: Pair, block: usize, steps: usize) {
        self.counter(pair, block).store(steps, Ordering::Release);
    }
}

/// Exclusive access to one step of `d_q`. Dropped, it hands the step on.
pub(crate) struct Turn<'t, T> {
    relay: &'t Relay<'t, T>,
    block: usize,
    pair: Pair,
    step: usize,
    /// One turn at a time.
    item: PhantomData<&'t mut T>,
}

impl<T> Turn<'_, T> {
    /// `[positions, head_dim]`
    pub(crate) fn rows(&mut self) -> ArrayViewMut2<'_, T> {
        let Relay { cut: Cut { heads, query_tile, .. }, q_len, d_q, .. } = self.relay;
        let kv_head = heads.read_kv_head(self.pair.index);
        let group = heads.group_size(kv_head);
        let head = heads.query_head(kv_head, self.step % group);
        let start = self.step / group * query_tile;
        let part = (*d_q).slice_move(s![self.pair.entry, head, start..*q_len.min(&(start + query_tile)), ..]);
        // SAFETY: the target is borrowed exclusively for as long as the relay lives. Steps differ in entry, head or
        // positions, and this step belongs to one block at a time: `turn` waited for the blocks before, which do not come
        // back to a step that they have passed, and the blocks after wait for this turn to be dropped.
        unsafe { part.deref_into_view_mut() }
    }
}

impl<T> Drop for Turn<'_, T> {
    fn drop(&mut self) {
        self.relay.pass(self.pair, self.block, self.step + 1);
    }
}

/// The last step of a pair. Dropped, it hands the step on.
pub(crate) struct LastTurn<'t, T> {
    relay: &'t Relay<'t, T>,
    block: usize,
    pair: Pair,
    /// One turn at a time.
    item: PhantomData<&'t mut T>,
}

impl<T> Drop for LastTurn<'_, T> {
    fn drop(&mut self) {
        self.relay.pass(self.pair, self.block, self.relay.steps(self.pair));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::Array4;
    use std::sync::Mutex;

    /// Every block writes `8 * d_q + block + 1` to each step: a number that tells the order of the blocks.
    fn run(heads: &HeadMap, [q_len, kv_len]: [usize; 2], threads: usize, bias: Option<[usize; 4]>) -> [Array4<f64>; 4] {
        let (batch, num_heads, num_kv_heads) = (2, heads.num_heads(), heads.num_kv_heads());
        let mut d_q = Array4::from_elem((batch, num_heads, q_len, 2), f64::NAN);
        let mut d_k = Array4::from_elem((batch, num_kv_heads, kv_len, 2), f64::NAN);
        let mut d_v = Array4::from_elem((batch, num_kv_heads, kv_len, 3), f64::NAN);
        let mut d_bias = Array4::zeros(bias.unwrap_or([1, 1, 1, kv_len]));
        let cut = Cut { heads, key_block: 2, query_tile: 3, last_step: threads != 2 };
        let last_turns = Mutex::new(Vec::new());
        // What an earlier call left there does not matter.
        let mut passed: Vec<_> =
            (0..Relay::<f64>::counters(&cut, batch, kv_len)).map(|_| AtomicUsize::new(usize::MAX)).collect();
        let targets = Targets {
            d_q: d_q.view_mut(),
            d_k: d_k.view_mut(),
            d_v: d_v.view_mut(),
            d_bias: bias.is_some().then(|| d_bias.view_mut()),
        };
        let relay = Relay::new(cut, targets, &mut passed).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    while let Some(mut item) = relay.next() {
                        for pair in item.pairs() {
                            work(heads, &mut item, pair, q_len, &last_turns);
                        }
                    }
                });
            }
        });
        let last_turns = last_turns.into_inner().unwrap();
        for entry in 0..batch {
            for index in 0..heads.num_read() {
                let of_pair = last_turns.iter().filter(|(pair, _)| *pair == Pair { entry, index });
                let want = if cut.last_step { blocks(&cut, kv_len) } else { 0 };
                assert!(of_pair.map(|&(_, block)| block).eq(0..want), "{last_turns:?}");
            }
        }
        [d_q, d_k, d_v, d_bias]
    }

    fn work(
        heads: &HeadMap,
        item: &mut RelayItem<'_, f64>,
        pair: Pair,
        q_len: usize,
        last_turns: &Mutex<Vec<(Pair, usize)>>,
    ) {
        let kv_head = heads.read_kv_head(pair.index);
        let (block, first) = (item.block as f64, item.is_first());
        let group = heads.group_size(kv_head);
        for step in 0..q_len.div_ceil(3) * group {
            // Some blocks pass some steps over, and say so by the next one or at the end.
            if !first && step % 4 == item.block % 4 {
                continue;
            }
            let mut turn = item.turn(pair, step).unwrap();
            turn.rows().mapv_inplace(|x| if first { 1.0 } else { 8.0 * x + block + 1.0 });
            drop(turn);
            assert!(item.turn(pair, step).is_none(), "a step that was passed");
            for head in heads.query_heads(kv_head) {
                if let Some(mut d_bias) = item.d_bias(pair.entry, head) {
                    d_bias += 1.0;
                }
            }
        }
        let block = item.block;
        let turn = item.last_turn(pair);
        if turn.is_some() {
            last_turns.lock().unwrap().push((pair, block));
        }
        drop(turn);
        assert!(item.last_turn(pair).is_none(), "a step that was passed, or is none");
        item.done(pair);
        let keys = item.keys().start as f64;
        let [mut d_k, mut d_v] = item.d_keys_values(pair).unwrap();
        d_k.fill(keys + 100.0 * pair.entry as f64);
        d_v.fill(keys + 100.0 * pair.entry as f64);
        assert!(item.d_keys_values(Pair { entry: 9, ..pair }).is_none() && item.turn(pair, usize::MAX).is_none());
    }

    #[test]
    fn blocks_add_in_order_on_any_number_of_threads() {
        let maps = [HeadMap::grouped(3, 1), HeadMap::grouped(2, 2), HeadMap::explicit(&[2, 0, 2], 4)];
        for heads in maps.map(Result::unwrap) {
            for lengths in [[7, 9], [1, 1], [12, 2], [3, 17], [4, 0]] {
                let want = run(&heads, lengths, 1, None);
                assert!(want[0].iter().all(|x| !x.is_nan()), "every step is written");
                for threads in [2, 3, 8] {
                    for _ in 0..5 {
                        let got = run(&heads, lengths, threads, None);
                        assert_eq!(got[0], want[0], "{heads:?} {lengths:?}");
                        assert_eq!(format!("{got:?}"), format!("{want:?}"), "{heads:?} {lengths:?}");
                    }
                }
            }
        }
    }

    #[test]
    fn gradients_of_a_bias_are_one_items_own() {
        let heads = HeadMap::explicit(&[2, 0, 2], 4).unwrap();
        for shape in [[2, 3, 7, 9], [1, 3, 7, 9], [2, 1, 7, 9], [1, 1, 7, 9], [1, 1, 1, 9]] {
            let want = run(&heads, [7, 9], 1, Some(shape));
            for _ in 0..5 {
                assert_eq!(run(&heads, [7, 9], 4, Some(shape))[3], want[3], "{shape:?}");
            }
        }
    }

    #[test]
    fn targets_that_do_not_fit_are_refused() {
        let heads = HeadMap::grouped(2, 2).unwrap();
        let refused = |d_k: [usize; 4], d_v: [usize; 4], bias: [usize; 4], key_block: usize, counters: usize| {
            let (mut d_q, mut d_k) = (Array4::<f32>::zeros((1, 2, 3, 4)), Array4::zeros(d_k));
            let (mut d_v, mut d_bias) = (Array4::zeros(d_v), Array4::zeros(bias));
            let d_bias = Some(d_bias.view_mut());
            let targets = Targets { d_q: d_q.view_mut(), d_k: d_k.view_mut(), d_v: d_v.view_mut(), d_bias };
            let mut passed: Vec<_> = (0..counters).map(|_| AtomicUsize::new(0)).collect();
            let cut = Cut { heads: &heads, key_block, query_tile: 1, last_step: false };
            Relay::new(cut, targets, &mut passed).is_none()
        };
        assert!(!refused([1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 1, 5], 2, 6));
        assert!(refused([1, 2, 5, 3], [1, 2, 5, 6], [1, 2, 1, 5], 2, 6));
        assert!(refused([1, 2, 5, 4], [1, 2, 4, 6], [1, 2, 1, 5], 2, 6));
        assert!(refused([1, 1, 5, 4], [1, 1, 5, 6], [1, 2, 1, 5], 2, 6));
        assert!(refused([1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 1, 1], 2, 6));
        assert!(refused([1, 2, 5, 4], [1, 2, 5, 6], [1, 3, 1, 5], 2, 6));
        assert!(refused([1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 1, 5], 0, 6));
        assert!(refused([1, 2, 5, 4], [1, 2, 5, 6], [1, 2, 1, 5], 2, 5));
    }
}
