//! Element types in numpy's and DLPack's terms, and the layout of a batch's records.

use std::ffi::CStr;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use twinbuf::mmap::DType;

/// The layout of one record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) dtype: DType,
    /// Elements along each axis, in C order.
    pub(crate) shape: Vec<usize>,
}

impl Layout {
    /// Bytes in a record, or `None` if that exceeds the address space.
    pub(crate) fn bytes(&self) -> Option<usize> {
        self.shape.iter().try_fold(self.dtype.size(), |bytes, &axis| bytes.checked_mul(axis))
    }
}

/// The shape of this many records of a shape.
pub(crate) fn of_records(records: usize, shape: &[usize]) -> Box<[isize]> {
    // They are in memory, so no axis is longer than `isize::MAX`.
    std::iter::once(&records).chain(shape).map(|&axis| axis as isize).collect()
}

/// A type's name, as numpy and torch spell it.
pub(crate) const fn name(dtype: DType) -> &'static str {
    match dtype {
        DType::Bool => "bool",
        DType::U8 => "uint8",
        DType::I8 => "int8",
        DType::U16 => "uint16",
        DType::I16 => "int16",
        DType::F8E4M3 => "float8_e4m3fn",
        DType::F8E5M2 => "float8_e5m2",
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
        DType::U32 => "uint32",
        DType::I32 => "int32",
        DType::F32 => "float32",
        DType::U64 => "uint64",
        DType::I64 => "int64",
        DType::F64 => "float64",
        DType::C64 => "complex64",
        DType::C128 => "complex128",
        _ => "unknown",
    }
}

const ALL: [DType; 17] = [
    DType::Bool,
    DType::U8,
    DType::I8,
    DType::U16,
    DType::I16,
    DType::F8E4M3,
    DType::F8E5M2,
    DType::F16,
    DType::Bf16,
    DType::U32,
    DType::I32,
    DType::F32,
    DType::U64,
    DType::I64,
    DType::F64,
    DType::C64,
    DType::C128,
];

const LONG: bool = size_of::<std::ffi::c_long>() == 8;

/// The format of an element for the buffer protocol (PEP 3118, the codes of the module `struct`). `None` for types
/// without a code: the 8-bit floats and bfloat16.
pub(crate) const fn format(dtype: DType) -> Option<&'static CStr> {
    Some(match dtype {
        DType::Bool => c"?",
        DType::U8 => c"B",
        DType::I8 => c"b",
        DType::U16 => c"H",
        DType::I16 => c"h",
        DType::F16 => c"e",
        DType::U32 => c"I",
        DType::I32 => c"i",
        DType::F32 => c"f",
        // numpy has two types of 64 bits where `long` is one, and `int64` is `long` there.
        DType::U64 if LONG => c"L",
        DType::I64 if LONG => c"l",
        DType::U64 => c"Q",
        DType::I64 => c"q",
        DType::F64 => c"d",
        DType::C64 => c"Zf",
        DType::C128 => c"Zd",
        _ => return None,
    })
}

/// DLPack's code and bits of a type (`DLDataTypeCode` in dlpack.h, version 1.1).
pub(crate) const fn dlpack(dtype: DType) -> (u8, u8) {
    match dtype {
        DType::I8 => (0, 8),
        DType::I16 => (0, 16),
        DType::I32 => (0, 32),
        DType::I64 => (0, 64),
        DType::U8 => (1, 8),
        DType::U16 => (1, 16),
        DType::U32 => (1, 32),
        DType::U64 => (1, 64),
        DType::F16 => (2, 16),
        DType::F32 => (2, 32),
        DType::F64 => (2, 64),
        DType::Bf16 => (4, 16),
        DType::C64 => (5, 64),
        DType::C128 => (5, 128),
        DType::Bool => (6, 8),
        DType::F8E4M3 => (10, 8),
        DType::F8E5M2 => (12, 8),
        _ => (3, 8),
    }
}

/// The type named by a string or by anything else that `numpy.dtype` accepts.
pub(crate) fn parse(dtype: &Bound<'_, PyAny>) -> PyResult<DType> {
    let text = match dtype.extract::<String>() {
        Ok(text) => text,
        // `torch.uint16` prints as that.
        Err(_) => dtype.str()?.to_string().trim_start_matches("torch.").to_owned(),
    };
    if dtype.is_none() {
        // numpy would convert it to float64.
        return Err(PyTypeError::new_err("dtype: wanted the type of a record's elements, found None"));
    }
    let find = |text: &str| ALL.into_iter().find(|&dtype| name(dtype) == text);
    if let Some(dtype) = find(&text) {
        return Ok(dtype);
    }
    let numpy = dtype.py().import("numpy")?.getattr("dtype")?.call1((dtype,))?;
    let native = numpy.getattr("isnative")?.extract::<bool>()?;
    let found = numpy.getattr("name")?.extract::<String>()?;
    find(&found).filter(|_| native).ok_or_else(|| {
        PyValueError::new_err(format!(
            "dtype: wanted a boolean, a number or a complex number in native byte order, found {text}"
        ))
    })
}
