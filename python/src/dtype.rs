//! Element types in numpy's and DLPack's terms, and the type of a record.

use std::ffi::CStr;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;

use crate::errors;

/// Returns the type of records of one size, from a `dtype` and a `shape` in Python.
pub(crate) fn record(dtype: &Bound<'_, PyAny>, axes: &Bound<'_, PyAny>) -> PyResult<RecordType> {
    match RecordType::new(parse(dtype)?, shape(axes)?) {
        Ok(record) if record.len() > 0 && isize::try_from(record.len()).is_ok() => Ok(record),
        _ => {
            let line = format!(
                "shape: wanted records of at least one element that fit memory, found {}",
                axes.repr()?
            );
            Err(errors::option(axes.py(), line))
        }
    }
}

/// Returns the type of a record's elements: `U8` if the record is plain bytes.
pub(crate) fn of(record: &RecordType) -> DType {
    record.dtype().unwrap_or(DType::U8)
}

/// Returns the shape of an array of this many records, each of this shape.
pub(crate) fn of_records(records: usize, shape: &[usize]) -> Box<[isize]> {
    // The records are in memory, so no axis is longer than `isize::MAX`.
    std::iter::once(&records).chain(shape).map(|&axis| axis as isize).collect()
}

const LONG: bool = size_of::<std::ffi::c_long>() == 8;
// numpy has separate types for C's `long` and `long long`. If `long` has 64 bits, numpy's `int64` is `long`.
const U64: &CStr = if LONG { c"L" } else { c"Q" };
const I64: &CStr = if LONG { c"l" } else { c"q" };

/// A type; its name, as numpy and torch spell it; its format for the buffer protocol (PEP 3118, the codes of the module
/// `struct`), which the 8-bit floats and bfloat16 lack; DLPack's code and bits (`DLDataTypeCode` in dlpack.h, version 1.1).
type Row = (DType, &'static str, Option<&'static CStr>, (u8, u8));

const ALL: [Row; 17] = [
    (DType::Bool, "bool", Some(c"?"), (6, 8)),
    (DType::U8, "uint8", Some(c"B"), (1, 8)),
    (DType::I8, "int8", Some(c"b"), (0, 8)),
    (DType::U16, "uint16", Some(c"H"), (1, 16)),
    (DType::I16, "int16", Some(c"h"), (0, 16)),
    (DType::F8E4M3, "float8_e4m3fn", None, (10, 8)),
    (DType::F8E5M2, "float8_e5m2", None, (12, 8)),
    (DType::F16, "float16", Some(c"e"), (2, 16)),
    (DType::Bf16, "bfloat16", None, (4, 16)),
    (DType::U32, "uint32", Some(c"I"), (1, 32)),
    (DType::I32, "int32", Some(c"i"), (0, 32)),
    (DType::F32, "float32", Some(c"f"), (2, 32)),
    (DType::U64, "uint64", Some(U64), (1, 64)),
    (DType::I64, "int64", Some(I64), (0, 64)),
    (DType::F64, "float64", Some(c"d"), (2, 64)),
    (DType::C64, "complex64", Some(c"Zf"), (5, 64)),
    (DType::C128, "complex128", Some(c"Zd"), (5, 128)),
];

fn row(dtype: DType) -> &'static Row {
    ALL.iter().find(|row| row.0 == dtype).unwrap_or(&(DType::U8, "unknown", None, (3, 8)))
}

/// A type's name, as numpy and torch spell it.
pub(crate) fn name(dtype: DType) -> &'static str {
    row(dtype).1
}

/// The format of an element for the buffer protocol. `None` for types without one.
pub(crate) fn format(dtype: DType) -> Option<&'static CStr> {
    row(dtype).2
}

/// DLPack's code and bits of a type.
pub(crate) fn dlpack(dtype: DType) -> (u8, u8) {
    row(dtype).3
}

/// The type named by a string or by anything else that `numpy.dtype` accepts.
pub(crate) fn parse(dtype: &Bound<'_, PyAny>) -> PyResult<DType> {
    let text = match dtype.extract::<String>() {
        Ok(text) => text,
        // `str(torch.uint16)` is "torch.uint16".
        Err(_) => dtype.str()?.to_string().trim_start_matches("torch.").to_owned(),
    };
    if dtype.is_none() {
        // Refuse `None`, which `numpy.dtype` converts to float64.
        return Err(PyTypeError::new_err("dtype: wanted the type of a record's elements, found None"));
    }
    let find = |text: &str| ALL.iter().find(|row| row.1 == text).map(|row| row.0);
    if let Some(dtype) = find(&text) {
        return Ok(dtype);
    }
    let numpy = dtype.py().import("numpy")?.getattr("dtype")?.call1((dtype,))?;
    let native = numpy.getattr("isnative")?.extract::<bool>()?;
    let found = numpy.getattr("name")?.extract::<String>()?;
    find(&found).filter(|_| native).ok_or_else(|| {
        let line = format!(
            "dtype: wanted a boolean, a number or a complex number in native byte order, found {text}"
        );
        errors::option(dtype.py(), line)
    })
}

/// Returns the axes of a record, from a `shape` in Python.
pub(crate) fn shape(shape: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    if let Ok(axes) = shape.extract() {
        return Ok(axes);
    }
    Err(errors::of_type("shape", "the axes of a record as a tuple of numbers from 1 on", shape.repr()?))
}

/// Returns the names of the types for which `accepts` is true, as in `uint8, int16 or float32`.
pub(crate) fn names(accepts: impl Fn(DType) -> bool) -> String {
    let names = ALL.iter().filter(|row| accepts(row.0)).map(|row| row.1).collect::<Vec<_>>();
    match names.split_last() {
        Some((last, names)) if !names.is_empty() => format!("{} or {last}", names.join(", ")),
        _ => names.concat(),
    }
}

/// Replaces the names of types in a message of the crates by numpy's. Text in quotes, such as a path, does not change.
pub(crate) fn in_python(text: &str) -> String {
    let word = |word: &str| {
        let rust = word.trim_end_matches([',', ':']);
        match ALL.iter().find(|row| row.0.to_string() == rust) {
            Some(row) => word.replacen(rust, row.1, 1),
            None => word.to_owned(),
        }
    };
    let part = |(at, part): (usize, &str)| match at % 2 {
        0 => part.split(' ').map(word).collect::<Vec<_>>().join(" "),
        _ => part.to_owned(),
    };
    text.split('"').enumerate().map(part).collect::<Vec<_>>().join("\"")
}
