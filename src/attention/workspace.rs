//! Scratch that outlives a call, so that the next call allocates nothing.

use crate::element::Element;

/// Scratch memory of attention; reuse one for calls of any shape.
///
/// It grows to what the largest call needed and is kept until it is dropped. What it holds never matters.
///
/// For each thread of the pool, with `rows` the query rows of a work item (at most 384, or one query position of a
/// group) and `value_width` the value width rounded up to 16, the tiled path takes
/// `rows * (head_dim + value_width + 17) + 64 * (head_dim + 15 + value_width) + 768` numbers: 0.25 MiB for heads of 64
/// in `f32`, whatever the lengths. The other paths allocate in each call.
///
/// A layer keeps its projections and the context besides,
/// `batch * (q_len * num_heads + kv_len * num_kv_heads) * (head_dim + value_dim)` numbers, and for each thread a block of
/// packed weights.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Options, Workspace};
/// let mut workspace = Workspace::new();
/// let q = Array4::<f32>::ones((1, 2, 3, 8));
/// let mut context = Array4::zeros((1, 2, 3, 8));
/// for _ in 0..3 {
///     attention::forward_into(&q, &q, &q, &Options::new(), &mut context, &mut workspace)?;
/// }
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Workspace<T> {
    workers: Vec<Scratch<T>>,
    /// What a layer keeps between its projections.
    pub(crate) layer: LayerBuffers<T>,
}

/// Queries, keys, values and context of a layer, token by token.
#[derive(Debug, Default)]
pub(crate) struct LayerBuffers<T> {
    pub(crate) q: Vec<T>,
    pub(crate) k: Vec<T>,
    pub(crate) v: Vec<T>,
    pub(crate) context: Vec<T>,
    /// Packed weights, for each thread.
    pub(crate) scratch: Vec<Vec<T>>,
}

impl<T: Element> Workspace<T> {
    /// An empty workspace.
    pub fn new() -> Self {
        Self { workers: Vec::new(), layer: LayerBuffers::default() }
    }

    /// Scratch for `count` threads.
    pub(super) fn workers(&mut self, count: usize) -> &mut [Scratch<T>] {
        if self.workers.len() < count {
            self.workers.resize_with(count, Scratch::default);
        }
        &mut self.workers[..count]
    }
}

/// The scratch of one thread; see `forward.rs` for what is in it.
#[derive(Debug, Default)]
pub(super) struct Scratch<T> {
    pub(super) queries: Vec<T>,
    pub(super) context: Vec<T>,
    pub(super) maxima: Vec<T>,
    pub(super) sums: Vec<T>,
    pub(super) keys: Vec<T>,
    pub(super) values: Vec<T>,
    pub(super) scores: Vec<T>,
    pub(super) bias: Vec<T>,
}
