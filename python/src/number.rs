//! Numbers from Python and for it. An invalid one is refused with the argument's name and the value found.

use std::time::Duration;

use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyRange};
use twinbuf::{BatchIndices, RecordList};

use crate::errors;

/// A whole number that fits `T`. Raises `OptionError`, a `ValueError`, if it is negative or too large, and `TypeError`
/// if it is not a whole number.
pub(crate) fn whole<'py, T>(name: &str, found: &Bound<'py, PyAny>) -> PyResult<T>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    let (py, wanted) = (found.py(), "a whole number");
    found.extract::<T>().map_err(|error| match error.is_instance_of::<PyOverflowError>(py) {
        true => errors::option(py, format!("{name}: wanted {wanted} from 0 to 2**64 - 1, found {found}")),
        false => found.repr().map_or_else(|error| error, |found| errors::of_type(name, wanted, found)),
    })
}

/// Same as [`whole`], or `None` if there is no number.
pub(crate) fn whole_or_none<'py, T>(name: &str, found: Option<&Bound<'py, PyAny>>) -> PyResult<Option<T>>
where
    T: for<'a> FromPyObject<'a, 'py, Error = PyErr>,
{
    found.map(|found| whole(name, found)).transpose()
}

/// A time in seconds, or `None` for no limit.
pub(crate) fn seconds_or_none(name: &str, found: Option<&Bound<'_, PyAny>>) -> PyResult<Option<Duration>> {
    let Some(found) = found else { return Ok(None) };
    let seconds = found.extract::<f64>();
    let seconds = seconds.map_err(|_| errors::of_type(name, "a number of seconds or None", found))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(time) => Ok(Some(time)),
        Err(_) => Err(errors::option(found.py(), format!("{name}: wanted 0 seconds or more, found {found}"))),
    }
}

/// Whole numbers from 0 on: a range, a list, or an array.
pub(crate) fn numbers(name: &str, found: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    let py = found.py();
    let array = py.import("numpy")?.call_method1("asarray", (found,))?;
    let kind = array.getattr("dtype")?.getattr("kind")?.extract::<String>()?;
    let empty = array.getattr("size")?.extract::<usize>()? == 0;
    if array.getattr("ndim")?.extract::<usize>()? != 1 || !(empty || matches!(&*kind, "i" | "u")) {
        let found =
            array.getattr("dtype")?.str()?.to_string() + " " + &array.getattr("shape")?.repr()?.to_string();
        return Err(errors::of_type(name, "a list or an array of whole numbers", found));
    }
    if !empty {
        let least = array.call_method0("min")?;
        if least.lt(0)? {
            return Err(errors::option(py, format!("{name}: wanted numbers from 0 on, found {least}")));
        }
    }
    let bytes = array.call_method1("astype", ("uint64",))?.call_method0("tobytes")?.cast_into::<PyBytes>()?;
    Ok(bytes.as_bytes().chunks_exact(8).map(bytemuck::pod_read_unaligned).collect())
}

/// The numbers of a range, which are not expanded if they ascend. Returns the first or the last one if it is not from 0
/// to below `end`.
pub(crate) fn range<'py>(
    found: &Bound<'py, PyRange>,
    end: u64,
) -> PyResult<Result<RecordList, Bound<'py, PyAny>>> {
    // Not by `len()`, which a large range does not have.
    if !found.is_truthy()? {
        return Ok(Ok((0..0).into()));
    }
    let ends = [found.get_item(0)?, found.get_item(-1)?];
    for outside in &ends {
        if outside.lt(0)? || outside.ge(end)? {
            return Ok(Err(outside.clone()));
        }
    }
    let (first, last, len) = (ends[0].extract::<u64>()?, ends[1].extract::<u64>()?, found.len()? as u64);
    let step = first.abs_diff(last) / (len - 1).max(1);
    let ascends = RecordList::even(first, step.max(1), len).filter(|_| first <= last);
    Ok(Ok(ascends.unwrap_or_else(|| (0..len).map(|at| first - at * step).collect())))
}

/// The numbers of a batch's records as a numpy array.
pub(crate) fn indices<'py>(py: Python<'py>, batch: &BatchIndices) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?.call_method1("frombuffer", (bytes_of(py, batch)?, "int64"))
}

/// The numbers of a batch's records, as the bytes of an array of int64.
pub(crate) fn bytes_of<'py>(py: Python<'py>, batch: &BatchIndices) -> PyResult<Bound<'py, PyByteArray>> {
    let len = batch.len().checked_mul(8).and_then(|len| isize::try_from(len).ok());
    let len = len.ok_or_else(|| PyMemoryError::new_err("no memory for the numbers of a batch"))? as usize;
    PyByteArray::new_with(py, len, |bytes| {
        for (out, record) in bytes.chunks_exact_mut(8).zip(batch.runs().flatten()) {
            out.copy_from_slice(&record.to_ne_bytes());
        }
        Ok(())
    })
}
