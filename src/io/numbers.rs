//! How numbers stand in a file: little-endian, and in a type that the layer's own holds exactly.
//!
//! ```text
//! F16    sign 1 | exponent 5, bias 15 | fraction 10
//! BF16   the upper half of an F32
//! ```

use safetensors::Dtype;

/// Appends the numbers of a byte string; a rest that is no whole number is ignored.
type Read<T> = fn(&[u8], &mut Vec<T>);

/// A type that numbers of a file can be read into.
pub(crate) trait Stored: Copy {
    /// What numbers of this type are written as.
    const DTYPE: Dtype;
    /// The types that are read, in words.
    const READABLE: &'static str;
    /// How numbers of a file's type are read, if this type holds all of them exactly.
    fn reader(dtype: Dtype) -> Option<Read<Self>>;
    /// Appends the bytes of a number.
    fn write_le(self, to: &mut Vec<u8>);
}

/// Reads numbers of `N` bytes. They may lie anywhere in memory.
fn read<T, const N: usize>(bytes: &[u8], to: &mut Vec<T>, number: impl Fn([u8; N]) -> T) {
    to.extend(bytes.as_chunks().0.iter().map(|&bytes| number(bytes)));
}

impl Stored for f32 {
    const DTYPE: Dtype = Dtype::F32;
    const READABLE: &'static str = "F32, F16 or BF16";

    fn reader(dtype: Dtype) -> Option<Read<Self>> {
        match dtype {
            Dtype::F32 => Some(|bytes, to| read(bytes, to, Self::from_le_bytes)),
            Dtype::F16 => Some(|bytes, to| read(bytes, to, |b| f16(u16::from_le_bytes(b)))),
            Dtype::BF16 => Some(|bytes, to| read(bytes, to, |b| bf16(u16::from_le_bytes(b)))),
            _ => None,
        }
    }

    fn write_le(self, to: &mut Vec<u8>) {
        to.extend(self.to_le_bytes());
    }
}

impl Stored for f64 {
    const DTYPE: Dtype = Dtype::F64;
    const READABLE: &'static str = "F64, F32, F16 or BF16";

    fn reader(dtype: Dtype) -> Option<Read<Self>> {
        match dtype {
            Dtype::F64 => Some(|bytes, to| read(bytes, to, Self::from_le_bytes)),
            Dtype::F32 => Some(|bytes, to| read(bytes, to, |b| f32::from_le_bytes(b).into())),
            Dtype::F16 => Some(|bytes, to| read(bytes, to, |b| f16(u16::from_le_bytes(b)).into())),
            Dtype::BF16 => Some(|bytes, to| read(bytes, to, |b| bf16(u16::from_le_bytes(b)).into())),
            _ => None,
        }
    }

    fn write_le(self, to: &mut Vec<u8>) {
        to.extend(self.to_le_bytes());
    }
}

fn bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn f16(bits: u16) -> f32 {
    /// The unit of the numbers below the smallest normal one, 2^-24.
    const UNIT: f32 = 1.0 / 16_777_216.0;
    let (sign, exponent, fraction) = (u32::from(bits >> 15), u32::from(bits >> 10 & 31), u32::from(bits & 1023));
    let magnitude = match exponent {
        0 => (f32::from(bits & 1023) * UNIT).to_bits(),
        31 => 0x7f80_0000 | fraction << 13,
        // The two biases are 15 and 127.
        _ => (exponent + 112) << 23 | fraction << 13,
    };
    f32::from_bits(sign << 31 | magnitude)
}

/// The numbers of one tensor.
pub(super) struct Numbers<'a, T> {
    bytes: &'a [u8],
    /// Bytes of one number.
    size: usize,
    read: Read<T>,
}

impl<'a, T: Stored> Numbers<'a, T> {
    /// `None` where the type does not hold the file's numbers exactly.
    pub(super) fn new(dtype: Dtype, bytes: &'a [u8]) -> Option<Self> {
        Some(Self { bytes, size: dtype.bitsize() / 8, read: T::reader(dtype)? })
    }

    pub(super) fn len(&self) -> usize {
        self.bytes.len() / self.size
    }

    /// Appends those from `start` up to `end`, as far as they exist.
    pub(super) fn append(&self, start: usize, end: usize, to: &mut Vec<T>) {
        let byte = |number: usize| number.saturating_mul(self.size).min(self.bytes.len());
        (self.read)(self.bytes.get(byte(start)..byte(end)).unwrap_or_default(), to);
    }

    /// Appends all.
    pub(super) fn append_all(&self, to: &mut Vec<T>) {
        (self.read)(self.bytes, to);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `2^exponent * (1 + fraction / 1024)`, by arithmetic in a wider type.
    fn by_formula(bits: u16) -> f64 {
        let sign = if bits >> 15 == 1 { -1.0 } else { 1.0 };
        let (exponent, fraction) = (i32::from(bits >> 10 & 31), f64::from(bits & 1023));
        match (exponent, fraction) {
            (31, 0.0) => sign * f64::INFINITY,
            (31, _) => f64::NAN,
            (0, _) => sign * fraction * 2f64.powi(-24),
            _ => sign * (1.0 + fraction / 1024.0) * 2f64.powi(exponent - 15),
        }
    }

    #[test]
    fn every_half_is_its_formula() {
        for bits in 0..=u16::MAX {
            let (mut narrow, mut wide) = (Vec::<f32>::new(), Vec::<f64>::new());
            Numbers::new(Dtype::F16, &bits.to_le_bytes()).unwrap().append_all(&mut narrow);
            Numbers::new(Dtype::F16, &bits.to_le_bytes()).unwrap().append_all(&mut wide);
            let want = by_formula(bits);
            for got in [f64::from(narrow[0]), wide[0]] {
                assert!(got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan(), "{bits:#x}: {got} {want}");
            }
        }
    }

    #[test]
    fn every_bfloat_is_half_of_a_float() {
        for bits in 0..=u16::MAX {
            let mut wide = Vec::<f64>::new();
            Numbers::new(Dtype::BF16, &bits.to_le_bytes()).unwrap().append_all(&mut wide);
            let back = (wide[0] as f32).to_bits();
            assert!(back == u32::from(bits) << 16 || wide[0].is_nan() && back << 1 > 0xff00_0000, "{bits:#x}");
        }
    }

    #[test]
    fn nothing_is_rounded_and_nothing_lies_outside() {
        assert!(Numbers::<f32>::new(Dtype::F64, &[]).is_none());
        assert!(Numbers::<f64>::new(Dtype::I32, &[]).is_none());
        let bytes: Vec<u8> = [1.0f32, 2.0, 3.0].iter().flat_map(|x| x.to_le_bytes()).collect();
        let numbers = Numbers::<f32>::new(Dtype::F32, &bytes).unwrap();
        let mut got = Vec::new();
        numbers.append(1, 3, &mut got);
        numbers.append(2, usize::MAX, &mut got);
        numbers.append(5, 4, &mut got);
        assert_eq!(got, [2.0, 3.0, 3.0]);
    }
}
