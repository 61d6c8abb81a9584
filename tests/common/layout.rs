//! The ways an array can lie in memory.

use multihead::Element;
use multihead::ndarray::{Array4, ArrayBase, ArrayView4, ArrayViewMut4, Ix4, RawData, s};

/// How the elements of a `[batch, heads, len, width]` array are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Layout {
    Standard,
    /// First axis fastest.
    ColumnMajor,
    /// Stored `[len, batch, heads, width]`.
    LengthFirst,
    /// Every axis backwards.
    Reversed,
    /// Every second row and column of a larger array.
    Stepped,
    /// The middle third of a buffer that holds three such arrays side by side.
    Packed,
    /// Heads backwards, every third row, columns backwards with step 2, batch fastest.
    Mixed,
}

pub(crate) const LAYOUTS: [Layout; 7] = [
    Layout::Standard,
    Layout::ColumnMajor,
    Layout::LengthFirst,
    Layout::Reversed,
    Layout::Stepped,
    Layout::Packed,
    Layout::Mixed,
];

impl Layout {
    /// Storage full of NaN for an array of these lengths.
    pub(crate) fn storage<T: Element>(self, dim: (usize, usize, usize, usize)) -> Array4<T> {
        let (batch, heads, len, width) = dim;
        let shape = match self {
            Self::Standard | Self::Reversed => dim,
            Self::ColumnMajor => (width, len, heads, batch),
            Self::LengthFirst => (len, batch, heads, width),
            Self::Stepped => (batch, heads, 2 * len, 2 * width),
            Self::Packed => (batch, heads, len, 3 * width),
            Self::Mixed => (heads, 3 * len, 2 * width, batch),
        };
        Array4::from_elem(shape, T::nan())
    }

    /// Storage that holds the array's numbers.
    pub(crate) fn store<T: Element>(self, array: &Array4<f64>) -> Array4<T> {
        let mut storage = self.storage(array.dim());
        self.view_mut(&mut storage).assign(&array.mapv(T::from_f64));
        storage
    }

    pub(crate) fn view<T>(self, storage: &Array4<T>) -> ArrayView4<'_, T> {
        self.cut(storage.view())
    }

    pub(crate) fn view_mut<T>(self, storage: &mut Array4<T>) -> ArrayViewMut4<'_, T> {
        self.cut(storage.view_mut())
    }

    fn cut<S: RawData>(self, storage: ArrayBase<S, Ix4>) -> ArrayBase<S, Ix4> {
        match self {
            Self::Standard => storage,
            Self::ColumnMajor => storage.reversed_axes(),
            Self::LengthFirst => storage.permuted_axes([1, 2, 0, 3]),
            Self::Reversed => storage.slice_move(s![..;-1, ..;-1, ..;-1, ..;-1]),
            Self::Stepped => storage.slice_move(s![.., .., ..;2, ..;2]),
            Self::Packed => {
                let width = storage.dim().3 / 3;
                storage.slice_move(s![.., .., .., width..2 * width])
            }
            Self::Mixed => storage.slice_move(s![..;-1, ..;3, ..;-2, ..]).permuted_axes([3, 0, 1, 2]),
        }
    }
}
