//! Named arrays to the bytes of a `.safetensors` file.

use ndarray::{ArrayRef, Dimension};
use safetensors::Dtype;
use serde_json::{Value, json};
use std::cmp::Reverse;
use std::collections::BTreeMap;

use super::tensors::fault;
use crate::element::Element;
use crate::error::Result;

/// What stands among the names of tensors and is none.
const METADATA: &str = "__metadata__";

/// One tensor, row-major and little-endian.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Tensor {
    dtype: Dtype,
    shape: Vec<usize>,
    bytes: Vec<u8>,
}

/// Tensors that are to become a `.safetensors` file.
///
/// ```
/// use multihead::{io::{TensorMap, Tensors}, ndarray::{array, Array2}};
/// let mut tensors = TensorMap::new();
/// tensors.insert("w", &array![[1.5f32, -2.0]])?;
/// tensors.set_metadata("format", "pt");
/// let bytes = tensors.to_bytes();
///
/// let w: Array2<f32> = Tensors::from_bytes(&bytes)?.get("w")?;
/// assert_eq!(w, array![[1.5, -2.0]]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TensorMap {
    tensors: BTreeMap<String, Tensor>,
    metadata: BTreeMap<String, String>,
}

impl TensorMap {
    /// No tensors.
    ///
    /// ```
    /// assert!(multihead::io::TensorMap::new().names().is_empty());
    /// ```
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a tensor of any shape and strides. The same tensor may be added again.
    ///
    /// # Errors
    /// [`Error::File`](crate::Error::File) names the tensor if there is another one of this name, or if the format does not
    /// allow the name.
    ///
    /// ```
    /// use multihead::{io::TensorMap, ndarray::array};
    /// let mut tensors = TensorMap::new();
    /// tensors.insert("shared", &array![1.0f32])?;
    /// tensors.insert("shared", &array![1.0f32])?;
    /// let error = tensors.insert("shared", &array![2.0f32]).unwrap_err();
    /// assert_eq!(error.to_string(), "shared: expected a name that no other tensor has, got one that differs");
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn insert<T: Element, D: Dimension>(&mut self, name: &str, array: &ArrayRef<T, D>) -> Result<()> {
        self.insert_all([(name, array)])
    }

    /// Adds all or none.
    pub(super) fn insert_all<'n, T: Element, D: Dimension + 'n>(
        &mut self,
        arrays: impl IntoIterator<Item = (&'n str, &'n ArrayRef<T, D>)>,
    ) -> Result<()> {
        let mut new = BTreeMap::new();
        for (name, array) in arrays {
            if name == METADATA {
                return Err(fault(name, "expected the name of a tensor, got that of the metadata"));
            }
            let mut bytes = Vec::new();
            let size = array.len().saturating_mul(size_of::<T>());
            // A broadcast view may be larger than any memory.
            bytes.try_reserve_exact(size).map_err(|_| fault(name, "expected to fit into memory"))?;
            array.iter().for_each(|x| x.write_le(&mut bytes));
            let tensor = Tensor { dtype: T::DTYPE, shape: array.shape().to_vec(), bytes };
            if self.tensors.get(name).is_some_and(|other| *other != tensor) {
                return Err(fault(name, "expected a name that no other tensor has, got one that differs"));
            }
            new.insert(name.to_owned(), tensor);
        }
        self.tensors.append(&mut new);
        Ok(())
    }

    /// Sets an entry of the file's free-text metadata. Some readers want `format` to be `pt`.
    ///
    /// ```
    /// # use multihead::io::{TensorMap, Tensors};
    /// let mut tensors = TensorMap::new();
    /// tensors.set_metadata("format", "pt");
    /// assert_eq!(Tensors::from_bytes(&tensors.to_bytes())?.metadata("format"), Some("pt"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn set_metadata(&mut self, key: &str, text: &str) {
        self.metadata.insert(key.to_owned(), text.to_owned());
    }

    /// The names of all tensors, sorted.
    ///
    /// ```
    /// use multihead::{io::TensorMap, ndarray::array};
    /// let mut tensors = TensorMap::new();
    /// tensors.insert("b", &array![1.0f32])?;
    /// tensors.insert("a", &array![1.0f64])?;
    /// assert_eq!(tensors.names(), ["a", "b"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn names(&self) -> Vec<String> {
        self.tensors.keys().cloned().collect()
    }

    /// The axis lengths of a tensor, if there is one of this name.
    ///
    /// ```
    /// use multihead::{io::TensorMap, ndarray::Array2};
    /// let mut tensors = TensorMap::new();
    /// tensors.insert("w", &Array2::<f32>::zeros((2, 3)))?;
    /// assert_eq!(tensors.shape("w"), Some(&[2, 3][..]));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.tensors.get(name)?.shape)
    }

    /// The file. The same tensors give the same bytes, in whatever order they came.
    ///
    /// ```
    /// use multihead::{io::{TensorMap, Tensors}, ndarray::array};
    /// let mut tensors = TensorMap::new();
    /// tensors.insert("x", &array![1.0f64])?;
    /// assert_eq!(Tensors::from_bytes(&tensors.to_bytes())?.names(), ["x"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn to_bytes(&self) -> Vec<u8> {
        // Wide numbers first, and a header whose length is a multiple of 8: every number is aligned in the file.
        let mut tensors: Vec<_> = self.tensors.iter().collect();
        tensors.sort_by_key(|(_, tensor)| Reverse(tensor.dtype.bitsize()));
        let mut header = Vec::new();
        if !self.metadata.is_empty() {
            header.push(entry(METADATA, &json!(self.metadata)));
        }
        let mut end = 0;
        for (name, Tensor { dtype, shape, bytes }) in &tensors {
            let start = end;
            end += bytes.len();
            let info = json!({"dtype": dtype.to_string(), "shape": shape, "data_offsets": [start, end]});
            header.push(entry(name, &info));
        }
        let mut header = format!("{{{}}}", header.join(","));
        header.extend(std::iter::repeat_n(' ', header.len().next_multiple_of(8) - header.len()));
        let mut file = Vec::with_capacity(8 + header.len() + end);
        file.extend((header.len() as u64).to_le_bytes());
        file.extend(header.as_bytes());
        tensors.iter().for_each(|(_, tensor)| file.extend(&tensor.bytes));
        file
    }
}

fn entry(name: &str, value: &Value) -> String {
    format!("{}:{value}", json!(name))
}
