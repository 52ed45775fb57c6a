//! The records of a batch as an array of numbers.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use twinbuf::BatchIndices;

/// The numbers of a batch's records as a numpy array.
pub(crate) fn indices<'py>(py: Python<'py>, batch: &BatchIndices) -> PyResult<Bound<'py, PyAny>> {
    let len = batch.len().checked_mul(8).and_then(|len| isize::try_from(len).ok());
    let len = len.ok_or_else(|| PyMemoryError::new_err("no memory for the numbers of a batch"))? as usize;
    let bytes = PyByteArray::new_with(py, len, |bytes| {
        for (out, record) in bytes.chunks_exact_mut(8).zip(batch.runs().flatten()) {
            out.copy_from_slice(&record.to_ne_bytes());
        }
        Ok(())
    })?;
    py.import("numpy")?.call_method1("frombuffer", (bytes, "int64"))
}
