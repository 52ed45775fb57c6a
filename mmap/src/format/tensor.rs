//! The description of a tensor and its position in a file.

use std::fmt;
use std::ops::Range;
use std::path::Path;

use crate::{DType, Error};

/// A byte range in a file.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ByteRange {
    /// The index of the file in [`Tensors::paths`](crate::Tensors::paths).
    pub file: usize,
    /// The range of offsets from the start of the file. It may be empty.
    pub bytes: Range<u64>,
}

/// The description of one tensor of a model: its name, type, shape, and byte range in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub(super) name: Box<str>,
    pub(super) dtype: Option<DType>,
    pub(super) format: Box<str>,
    pub(super) shape: Box<[usize]>,
    pub(super) range: ByteRange,
}

impl Tensor {
    /// Returns the name of the tensor.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the element type. Returns `None` for types without a [`DType`]: 4-bit and 6-bit floats, some 8-bit
    /// floats, and quantized GGUF blocks. The crate treats their data as untyped bytes.
    #[must_use]
    pub const fn dtype(&self) -> Option<DType> {
        self.dtype
    }

    /// Returns the type in the notation of the file format, for example `BF16`, `F8_E8M0` or `Q4_K`.
    #[must_use]
    pub fn format_type(&self) -> &str {
        &self.format
    }

    /// Returns the number of elements along each axis, in C order. The shape is empty for a single number.
    #[must_use]
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Returns the file and the byte range of the tensor's data.
    #[must_use]
    pub const fn range(&self) -> &ByteRange {
        &self.range
    }

    /// Returns the size of the tensor's data in bytes, not the number of elements.
    #[must_use]
    pub const fn len(&self) -> u64 {
        self.range.bytes.end - self.range.bytes.start
    }

    /// Returns `true` if the tensor has no data, because an axis has length 0.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Prints the type and the shape, for example `bf16 [2, 3]`. Without a [`DType`], it prints the type of the file
/// format.
impl fmt::Display for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.dtype {
            Some(dtype) => write!(f, "{dtype} {:?}", self.shape),
            None => write!(f, "{} {:?}", self.format, self.shape),
        }
    }
}

/// Finds a tensor by its name. Returns its index in `tensors`, which are sorted by name. `path` is that of the file or the
/// model, for the error.
pub(super) fn find(tensors: &[Tensor], name: &str, path: &Path) -> Result<usize, Error> {
    tensors.binary_search_by(|tensor| (*tensor.name).cmp(name)).map_err(|_| {
        let found = tensors.iter().map(|tensor| tensor.name.to_string()).collect();
        Error::NoTensor { path: path.to_owned(), wanted: name.to_owned(), found }
    })
}
