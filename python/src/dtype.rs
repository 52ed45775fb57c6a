//! Element types in numpy's terms, and the type of a record.

use std::collections::HashMap;
use std::ffi::CStr;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;

/// Returns the type of records of one size. `_values.py` has checked both arguments.
pub(crate) fn record(name: &str, shape: &[usize]) -> PyResult<RecordType> {
    RecordType::new(parse(name)?, shape).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Returns the type of this name.
pub(crate) fn parse(name: &str) -> PyResult<DType> {
    let found = ALL.iter().find(|row| row.1 == name).map(|row| row.0);
    found.ok_or_else(|| PyValueError::new_err(format!("dtype: {name}")))
}

/// Returns the names of all types, and the bytes of an element.
pub(crate) fn sizes() -> HashMap<&'static str, usize> {
    ALL.iter().map(|row| (row.1, row.0.size())).collect()
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
/// `struct`), which the 8-bit floats and bfloat16 lack.
type Row = (DType, &'static str, Option<&'static CStr>);

const ALL: [Row; 17] = [
    (DType::Bool, "bool", Some(c"?")),
    (DType::U8, "uint8", Some(c"B")),
    (DType::I8, "int8", Some(c"b")),
    (DType::U16, "uint16", Some(c"H")),
    (DType::I16, "int16", Some(c"h")),
    (DType::F8E4M3, "float8_e4m3fn", None),
    (DType::F8E5M2, "float8_e5m2", None),
    (DType::F16, "float16", Some(c"e")),
    (DType::Bf16, "bfloat16", None),
    (DType::U32, "uint32", Some(c"I")),
    (DType::I32, "int32", Some(c"i")),
    (DType::F32, "float32", Some(c"f")),
    (DType::U64, "uint64", Some(U64)),
    (DType::I64, "int64", Some(I64)),
    (DType::F64, "float64", Some(c"d")),
    (DType::C64, "complex64", Some(c"Zf")),
    (DType::C128, "complex128", Some(c"Zd")),
];

fn row(dtype: DType) -> &'static Row {
    ALL.iter().find(|row| row.0 == dtype).unwrap_or(&(DType::U8, "unknown", None))
}

/// A type's name, as numpy and torch spell it.
pub(crate) fn name(dtype: DType) -> &'static str {
    row(dtype).1
}

/// The format of an element for the buffer protocol. `None` for types without one.
pub(crate) fn format(dtype: DType) -> Option<&'static CStr> {
    row(dtype).2
}

/// The error of a type that numpy lacks.
pub(crate) fn lacking(dtype: DType, advice: &str) -> PyErr {
    PyTypeError::new_err(format!("numpy has no {}: {advice}", name(dtype)))
}

/// The same for records that are changed or read as arrays: there is a cast from bfloat16, and none from 8-bit floats.
pub(crate) fn no_array(dtype: DType) -> PyErr {
    let cast = "use `to(\"float32\")`";
    lacking(dtype, if dtype == DType::Bf16 { cast } else { "use `torch()` of a loader's batch" })
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
