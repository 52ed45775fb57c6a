//! What a tensor of a model is, and where its bytes are.

use std::borrow::Cow;
use std::fmt;
use std::ops::Range;

use crate::DType;

/// Bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The index of the file in [`Tensors::paths`](crate::Tensors::paths).
    pub file: usize,
    /// Offsets from the start of the file. May be empty.
    pub bytes: Range<u64>,
}

/// One tensor of a model: its name, type and shape, and where its bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub(super) name: Box<str>,
    pub(super) dtype: Option<DType>,
    pub(super) format: Cow<'static, str>,
    pub(super) shape: Box<[usize]>,
    pub(super) range: ByteRange,
}

impl Tensor {
    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the type of its elements. `None` for a type that is bytes here: floats of 4 and 6 bits, some of 8 bits, and
    /// the blocks of GGUF.
    #[must_use]
    pub const fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Returns the type in the words of the format: `BF16`, `F8_E8M0`, `Q4_K`.
    #[must_use]
    pub fn format_type(&self) -> &str {
        &self.format
    }

    /// Returns the elements along each axis, in C order; empty for a single number.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns where its bytes are; the file is an index into [`Tensors::paths`](crate::Tensors::paths).
    #[must_use]
    pub const fn range(&self) -> &ByteRange {
        &self.range
    }

    /// Bytes in it.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.range.bytes.end - self.range.bytes.start
    }

    /// Whether it has no bytes: an axis is 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// As `bf16 [2, 3]`, with the format's own name where Rust has none.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            Some(dtype) => write!(f, "{dtype} {:?}", self.shape),
            None => write!(f, "{} {:?}", self.format, self.shape),
        }
    }
}
