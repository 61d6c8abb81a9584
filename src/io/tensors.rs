//! Named arrays from the bytes of a `.safetensors` file.
//!
//! ```text
//! 8 bytes            n, little-endian
//! n bytes            JSON: {"__metadata__": {..}, "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, ..}
//! all that is left   the numbers, little-endian, row-major; the offsets count from here
//! ```
//!
//! (<https://github.com/huggingface/safetensors>.) The numbers need not be aligned, and they are read byte by byte, so
//! any slice will do: a file that was read, a mapped one, one inside another file. A file is not trusted: the
//! offsets of all tensors are checked against the data before the first is read.

use ndarray::{Array, Dimension, IxDyn};
use safetensors::tensor::{Metadata, TensorInfo};
use std::fmt::{Display, Write};

use super::numbers::Numbers;
use crate::element::Element;
use crate::error::{Error, Result};

/// A longer header than this is refused, as by the format's own library.
const MAX_HEADER: usize = 100_000_000;

/// The tensors of a `.safetensors` file: the header, parsed and checked, and the bytes behind it.
///
/// ```
/// use multihead::{io::Tensors, ndarray::{array, Array2}};
/// let header = br#"{"__metadata__":{"layout":"[out, in]"},"w":{"dtype":"F32","shape":[2,1],"data_offsets":[0,8]}}"#;
/// let mut file = (header.len() as u64).to_le_bytes().to_vec();
/// file.extend(header);
/// file.extend([1.5f32, -2.0].iter().flat_map(|x| x.to_le_bytes()));
///
/// let tensors = Tensors::from_bytes(&file)?;
/// assert_eq!(tensors.names(), ["w"]);
/// assert_eq!(tensors.metadata("layout"), Some("[out, in]"));
/// let w: Array2<f32> = tensors.get("w")?;
/// assert_eq!(w.reversed_axes(), array![[1.5, -2.0]]);
/// # Ok::<(), multihead::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Tensors<'a> {
    header: Metadata,
    data: &'a [u8],
}

impl<'a> Tensors<'a> {
    /// Parses the header. The numbers stay where they are until [`Tensors::get`] asks for them.
    ///
    /// # Errors
    /// [`Error::File`] with the tensor `file` if the bytes end too early, the header is not what the format says, or
    /// the tensors do not fill the rest of the file exactly.
    ///
    /// ```
    /// use multihead::io::Tensors;
    /// let header = br#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"hand"}}"#;
    /// let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    /// bytes.extend(header);
    /// bytes.extend([1f32, 2.0].iter().flat_map(|x| x.to_le_bytes()));
    /// let tensors = Tensors::from_bytes(&bytes)?;
    /// assert_eq!(tensors.names(), ["x"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn from_bytes(bytes: &'a [u8]) -> Result<Self> {
        let (length, rest) =
            bytes.split_first_chunk().ok_or_else(|| fault("file", "expected 8 bytes of header length, got fewer"))?;
        let length = u64::from_le_bytes(*length);
        let (json, data) = usize::try_from(length)
            .ok()
            .filter(|&length| length <= MAX_HEADER)
            .and_then(|length| rest.split_at_checked(length))
            .ok_or_else(|| {
                let most = rest.len().min(MAX_HEADER);
                fault("file", format_args!("expected a header of at most {most} bytes, got {length}"))
            })?;
        let header: Metadata =
            serde_json::from_slice(json).map_err(|error| fault("file", format_args!("header: {error}")))?;
        // The header's own checks have made sure that the tensors lie one behind another without gaps.
        let end = header.data_len();
        if end != data.len() {
            return Err(fault("file", format_args!("expected {end} bytes of numbers, got {}", data.len())));
        }
        Ok(Self { header, data })
    }

    /// The names of all tensors, in the order of the file.
    ///
    /// ```
    /// # use multihead::io::Tensors;
    /// # let header = br#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"hand"}}"#;
    /// # let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    /// # bytes.extend(header);
    /// # bytes.extend([1f32, 2.0].iter().flat_map(|x| x.to_le_bytes()));
    /// # let tensors = Tensors::from_bytes(&bytes)?;
    /// assert_eq!(tensors.names(), ["x"]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn names(&self) -> Vec<String> {
        self.header.offset_keys()
    }

    /// The axis lengths of a tensor, if there is one of this name.
    ///
    /// ```
    /// # use multihead::io::Tensors;
    /// # let header = br#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"hand"}}"#;
    /// # let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    /// # bytes.extend(header);
    /// # bytes.extend([1f32, 2.0].iter().flat_map(|x| x.to_le_bytes()));
    /// # let tensors = Tensors::from_bytes(&bytes)?;
    /// assert_eq!(tensors.shape("x"), Some(&[2][..]));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        Some(&self.header.info(name)?.shape)
    }

    /// An entry of the file's free-text metadata.
    ///
    /// ```
    /// # use multihead::io::Tensors;
    /// # let header = br#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"hand"}}"#;
    /// # let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    /// # bytes.extend(header);
    /// # bytes.extend([1f32, 2.0].iter().flat_map(|x| x.to_le_bytes()));
    /// # let tensors = Tensors::from_bytes(&bytes)?;
    /// assert_eq!(tensors.metadata("by"), Some("hand"));
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn metadata(&self, key: &str) -> Option<&str> {
        self.header.metadata().as_ref()?.get(key).map(String::as_str)
    }

    /// A copy of one tensor, in row-major order. `T` may be wider than the file's type (`F32`, `F16` or `BF16` in `f32`,
    /// these and `F64` in `f64`) and not narrower: nothing is rounded.
    ///
    /// # Errors
    /// [`Error::File`] names the tensor if there is none of this name, if it holds numbers that `T` does not hold exactly,
    /// or if it has another rank than `D`.
    ///
    /// ```
    /// # use multihead::io::Tensors;
    /// # let header = br#"{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"by":"hand"}}"#;
    /// # let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    /// # bytes.extend(header);
    /// # bytes.extend([1f32, 2.0].iter().flat_map(|x| x.to_le_bytes()));
    /// # let tensors = Tensors::from_bytes(&bytes)?;
    /// use multihead::ndarray::{array, Array1};
    /// let x: Array1<f32> = tensors.get("x")?;
    /// assert_eq!(x, array![1.0, 2.0]);
    /// # Ok::<(), multihead::Error>(())
    /// ```
    pub fn get<T: Element, D: Dimension>(&self, name: &str) -> Result<Array<T, D>> {
        let numbers = self.numbers::<T>(name)?;
        let shape = self.shape(name).unwrap_or_default();
        let rank = |rank: usize| fault(name, format_args!("expected rank {rank}, got rank {} {shape:?}", shape.len()));
        if let Some(expected) = D::NDIM.filter(|&rank| rank != shape.len()) {
            return Err(rank(expected));
        }
        let mut data = Vec::new();
        // A number for each number of the file, however wide.
        data.try_reserve_exact(numbers.len()).map_err(|_| fault(name, "expected to fit into memory"))?;
        numbers.append_all(&mut data);
        let array = Array::from_shape_vec(IxDyn(shape), data)
            .map_err(|error| fault(name, format_args!("{error}, got {shape:?}")))?;
        array.into_dimensionality().map_err(|error| fault(name, error))
    }

    /// The numbers of one tensor.
    pub(super) fn numbers<T: Element>(&self, name: &str) -> Result<Numbers<'a, T>> {
        let TensorInfo { dtype, data_offsets: (start, end), .. } =
            self.header.info(name).ok_or_else(|| Self::missing(name))?;
        let bytes = self.data.get(*start..*end).unwrap_or_default();
        Numbers::new(*dtype, bytes)
            .ok_or_else(|| fault(name, format_args!("expected numbers of type {}, got {dtype}", T::READABLE)))
    }

    pub(super) fn missing(name: &str) -> Error {
        fault(name, "expected in the file, got no such tensor")
    }
}

/// Names of tensors and messages of the parser may quote the file, which can be long: a message is cut.
pub(super) fn fault(tensor: &str, reason: impl Display) -> Error {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = write!(text, "{reason}");
    Error::File { tensor: short(tensor), reason: short(&text) }
}

fn short(text: &str) -> String {
    const MOST: usize = 200;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}..", &text[..end]),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array1, Array2, ArrayD, Ix1, array};

    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
    }

    fn tensor(dtype: &str, shape: &str, end: u64) -> String {
        format!(r#"{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,{end}]}}}}"#)
    }

    fn refused(bytes: &[u8]) -> String {
        Tensors::from_bytes(bytes).unwrap_err().to_string()
    }

    #[test]
    fn numbers_are_read_from_any_address() {
        let numbers = [1.5f64, -0.0, f64::NAN, 1e300];
        let data: Vec<u8> = numbers.iter().flat_map(|x| x.to_le_bytes()).collect();
        // Eight starts cover all alignments.
        for pad in 0..8 {
            let header = tensor("F64", "[2,2]", 32) + &" ".repeat(pad);
            let bytes = file(&header, &data);
            let w: Array2<f64> = Tensors::from_bytes(&bytes).unwrap().get("w").unwrap();
            assert!(w.iter().zip(numbers).all(|(a, b)| a.to_bits() == b.to_bits()), "{w}");
        }
    }

    #[test]
    fn every_rank_and_empty_axes_work() {
        let data: Vec<u8> = 2.5f32.to_le_bytes().to_vec();
        for shape in ["[]", "[1]", "[1,1,1,1,1,1,1]"] {
            let bytes = file(&tensor("F32", shape, 4), &data);
            let w: ArrayD<f32> = Tensors::from_bytes(&bytes).unwrap().get("w").unwrap();
            assert_eq!(w.sum(), 2.5);
        }
        let bytes = file(&tensor("F32", "[3,0]", 0), &[]);
        let w: Array2<f32> = Tensors::from_bytes(&bytes).unwrap().get("w").unwrap();
        assert_eq!(w.shape(), [3, 0]);
        assert!(Tensors::from_bytes(&file("{}", &[])).unwrap().names().is_empty());
    }

    #[test]
    fn errors_name_the_tensor() {
        let wide = file(&tensor("F64", "[1,1]", 8), &[0; 8]);
        assert_eq!(
            Tensors::from_bytes(&wide).unwrap().get::<f32, ndarray::Ix2>("w").unwrap_err().to_string(),
            "w: expected numbers of type F32, F16 or BF16, got F64"
        );
        let bytes = file(&tensor("F32", "[2,1]", 8), &[0; 8]);
        let tensors = Tensors::from_bytes(&bytes).unwrap();
        assert_eq!(
            tensors.get::<f32, Ix1>("v").unwrap_err().to_string(),
            "v: expected in the file, got no such tensor"
        );
        assert_eq!(tensors.get::<f32, Ix1>("w").unwrap_err().to_string(), "w: expected rank 1, got rank 2 [2, 1]");
        assert_eq!(tensors.shape("w"), Some(&[2, 1][..]));
        assert_eq!((tensors.shape("v"), tensors.metadata("v")), (None, None));
        assert_eq!(tensors.get::<f32, ndarray::Ix2>("w").unwrap(), array![[0.0f32], [0.0]]);
        let long = "x".repeat(10_000);
        assert!(tensors.get::<f32, Ix1>(&long).unwrap_err().to_string().len() < 300);
    }

    #[test]
    fn hostile_files_are_refused() {
        assert_eq!(refused(&[]), "file: expected 8 bytes of header length, got fewer");
        assert_eq!(
            refused(&u64::MAX.to_le_bytes()),
            format!("file: expected a header of at most 0 bytes, got {}", u64::MAX)
        );
        assert_eq!(refused(&file(&tensor("F32", "[2]", 8), &[0; 9])), "file: expected 8 bytes of numbers, got 9");
        let max = u64::MAX;
        for header in [
            "",
            "[]",
            "\u{0}",
            "{\"w\":1}",
            &"[".repeat(100_000),
            &"{\"a\":".repeat(100_000),
            &tensor("F32", "[2]", 4),
            &tensor("F32", "[-1]", 4),
            &tensor("F32", "[1e3]", 4),
            &tensor("F32", "[4294967296,4294967296]", 0),
            &tensor("F32", &format!("[{max}]"), max),
            &tensor("F99", "[1]", 4),
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}"#,
            r#"{"w":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}"#,
            r#"{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#,
        ] {
            assert!(refused(&file(header, &[0; 8])).starts_with("file: "), "{header:.80}");
        }
        let not_utf8 = [&3u64.to_le_bytes()[..], b"{\xff}"].concat();
        assert!(refused(&not_utf8).starts_with("file: header: "));
    }

    /// These tensors end 8 bytes before 2^64, so nothing may be added to that end.
    #[test]
    fn a_file_that_ends_at_the_end_of_memory_is_refused() {
        let most = u64::MAX / 8;
        let tensors = (0..8).map(|i| {
            let (start, end) = (i * most, (i + 1) * most);
            format!(r#""{i}":{{"dtype":"U8","shape":[{most}],"data_offsets":[{start},{end}]}}"#)
        });
        let header = format!("{{{}}}", tensors.collect::<Vec<_>>().join(","));
        assert_eq!(refused(&file(&header, &[])), format!("file: expected {} bytes of numbers, got 0", u64::MAX - 7));
    }

    #[test]
    fn lengths_that_no_array_can_have_are_refused() {
        let bytes = file(&tensor("F32", "[0,18446744073709551615]", 0), &[]);
        let result = Tensors::from_bytes(&bytes).unwrap().get::<f32, ndarray::Ix2>("w");
        assert!(result.is_err_and(|error| error.to_string().starts_with("w: ")));
    }

    #[test]
    fn every_prefix_and_every_flipped_byte_is_harmless() {
        let bytes = file(&tensor("F32", "[2,1]", 8), &[0; 8]);
        for end in 0..bytes.len() {
            refused(&bytes[..end]);
        }
        for position in 0..bytes.len() {
            for value in [0, 1, b'"', b'9', 0x7f, 0xff] {
                let mut bytes = bytes.clone();
                bytes[position] = value;
                if let Ok(tensors) = Tensors::from_bytes(&bytes) {
                    for name in tensors.names() {
                        let _ = tensors.get::<f32, Ix1>(&name).map(|w: Array1<f32>| w.len());
                        let _ = tensors.get::<f32, IxDyn>(&name);
                    }
                }
            }
        }
    }
}
