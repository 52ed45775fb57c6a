//! Numbers from Python and for it.

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyMemoryError, PyOverflowError};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use twinbuf::{BatchIndices, RecordList};

/// Records, as `_values.py` has checked them: the first one, the step and the number of them; or all of them.
#[derive(FromPyObject)]
pub(crate) enum List {
    Even(u64, u64, u64),
    Any(PyBuffer<u64>),
}

impl List {
    pub(crate) fn records(&self, py: Python<'_>) -> PyResult<RecordList> {
        match self {
            Self::Even(first, step, len) => {
                Ok(RecordList::even(*first, *step, *len).unwrap_or_else(|| (0..0).into()))
            }
            Self::Any(numbers) => Ok(numbers.to_vec(py)?.into()),
        }
    }
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

/// What `len` returns, or raises for a class in Python whose number is too large.
pub(crate) fn length(count: u64) -> PyResult<usize> {
    let fits = usize::try_from(count).ok().filter(|&count| isize::try_from(count).is_ok());
    fits.ok_or_else(|| PyOverflowError::new_err("cannot fit 'int' into an index-sized integer"))
}
