//! What can be wrong with a call, said with the argument's name, what was expected and what came.

use std::borrow::Cow;
use std::fmt;

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Axis lengths as a message shows them; an axis that may have any length prints as `_`.
///
/// ```
/// use multihead::Lengths;
/// assert_eq!(Lengths::from([Some(2), None]).to_string(), "[2, _]");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lengths(Vec<Option<usize>>);

impl<const N: usize> From<[Option<usize>; N]> for Lengths {
    fn from(lengths: [Option<usize>; N]) -> Self {
        Self(lengths.to_vec())
    }
}

impl<const N: usize> From<[usize; N]> for Lengths {
    fn from(lengths: [usize; N]) -> Self {
        Self(lengths.iter().copied().map(Some).collect())
    }
}

impl fmt::Display for Lengths {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[")?;
        for (i, length) in self.0.iter().enumerate() {
            if i > 0 {
                f.write_str(", ")?;
            }
            match length {
                Some(n) => write!(f, "{n}")?,
                None => f.write_str("_")?,
            }
        }
        f.write_str("]")
    }
}

/// Why a call was refused. Nothing has been written when one of these is returned.
///
/// ```
/// use multihead::{attention, ndarray::Array4, Options};
/// let q = Array4::<f32>::zeros((2, 8, 16, 64));
/// let k = Array4::<f32>::zeros((2, 3, 16, 64));
/// let error = attention::forward(&q, &k, &k, &Options::new()).unwrap_err();
/// assert_eq!(error.to_string(), "num_heads: expected a multiple of num_kv_heads = 3, got 8");
/// ```
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An array has axes of the wrong length.
    #[error("{argument}: expected {axes} = {expected}, got {got:?}")]
    Shape {
        /// The argument's name.
        argument: &'static str,
        /// The names of its axes, in brackets.
        axes: &'static str,
        /// The lengths that would have been right.
        expected: Lengths,
        /// The lengths that came.
        got: Vec<usize>,
    },
    /// An array has the wrong number of axes.
    #[error("{argument}: expected {expected}, got rank {} {got:?}", got.len())]
    Rank {
        /// The argument's name.
        argument: &'static str,
        /// The ranks that have a meaning here.
        expected: &'static str,
        /// The lengths that came.
        got: Vec<usize>,
    },
    /// A number lies outside of what is allowed.
    #[error("{argument}: expected {expected}, got {got}")]
    Value {
        /// The argument's name.
        argument: &'static str,
        /// What is allowed, with the numbers that it depends on.
        expected: Cow<'static, str>,
        /// What came, printed.
        got: String,
    },
    /// The gradient of a parameter has another shape, is missing, or is there without a parameter.
    #[error("gradient of {parameter}: expected {expected}, got {got}")]
    Gradient {
        /// The name of the parameter, with the parts that it belongs to.
        parameter: String,
        /// The lengths of the parameter, or `None` where there is no such parameter.
        expected: String,
        /// The lengths that came, or `None`.
        got: String,
    },
    /// The query heads cannot be dealt evenly to the KV heads.
    #[error("num_heads: expected a multiple of num_kv_heads = {num_kv_heads}, got {num_heads}")]
    HeadGroups {
        /// Number of query heads.
        num_heads: usize,
        /// Number of key and value heads.
        num_kv_heads: usize,
    },
    /// A query head is mapped to a KV head that does not exist.
    #[error("kv_of_head[{head}]: expected a KV head below num_kv_heads = {num_kv_heads}, got {got}")]
    KvOfHead {
        /// The query head.
        head: usize,
        /// Number of key and value heads.
        num_kv_heads: usize,
        /// The KV head that was asked for.
        got: usize,
    },
    /// A key range of a mask is reversed or ends beyond the keys.
    #[error("{argument}[{entry}]: expected start <= end <= kv_len = {kv_len}, got {start}..{end}")]
    KeyRange {
        /// The mask's constructor.
        argument: &'static str,
        /// The batch entry.
        entry: usize,
        /// First key of the range.
        start: usize,
        /// One past the last key of the range.
        end: usize,
        /// Number of keys.
        kv_len: usize,
    },
    /// Two causal rules of one mask count positions differently, and a window or a bias by distance would have to choose.
    #[error("mask: expected one causal alignment for windows and distances to count from, got {first} and {second}")]
    Alignment {
        /// One alignment.
        first: String,
        /// The other alignment.
        second: String,
    },
    /// An array of this size cannot be addressed or allocated.
    #[error("{argument}: expected {axes} to fit into memory, got {got:?}")]
    TooLarge {
        /// What was to be made.
        argument: &'static str,
        /// The names of its axes, in brackets.
        axes: &'static str,
        /// The lengths it would have had.
        got: Vec<usize>,
    },
    /// A batch entry of a cache has no room for the tokens.
    #[error("cache[{entry}]: expected at most capacity = {capacity} tokens, got {length} and {requested} more")]
    CacheFull {
        /// The batch entry.
        entry: usize,
        /// What it has room for.
        capacity: usize,
        /// What it holds.
        length: usize,
        /// What was to be appended.
        requested: usize,
    },
    /// A ring has overwritten keys that are needed.
    #[error(
        "cache[{entry}]: expected a position of at least {lowest}, since the ring has overwritten older keys, got {got}"
    )]
    Overwritten {
        /// The batch entry.
        entry: usize,
        /// The first position whose window the ring still holds.
        lowest: usize,
        /// The position that a token would have.
        got: usize,
    },
    /// A level was asked for that this CPU cannot run.
    #[error("level: expected one that this CPU has ({available}), got {got}")]
    Level {
        /// The levels that can be asked for.
        available: String,
        /// The level that was.
        got: String,
    },
    /// A file of tensors cannot be used.
    #[error("{tensor}: {reason}")]
    File {
        /// The tensor, or `file` where the fault is in its header.
        tensor: String,
        /// What was expected and what came.
        reason: String,
    },
}

impl Error {
    pub(crate) fn value(
        argument: &'static str,
        expected: impl Into<Cow<'static, str>>,
        got: impl fmt::Display,
    ) -> Self {
        Self::Value { argument, expected: expected.into(), got: got.to_string() }
    }
}

/// Checks one array's lengths; the error prints both sides.
pub(crate) fn check_shape<const N: usize>(
    argument: &'static str,
    axes: &'static str,
    expected: [Option<usize>; N],
    got: &[usize],
) -> Result<()> {
    let fits = got.len() == N && got.iter().zip(&expected).all(|(g, e)| e.is_none_or(|e| e == *g));
    if fits { Ok(()) } else { Err(Error::Shape { argument, axes, expected: expected.into(), got: got.to_vec() }) }
}
