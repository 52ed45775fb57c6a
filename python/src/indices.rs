//! The records of a batch as an array of numbers.

use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use twinbuf::BatchIndices;

/// The numbers of a batch's records as a numpy array.
pub(crate) fn indices<'py>(py: Python<'py>, batch: &BatchIndices) -> PyResult<Bound<'py, PyAny>> {
    let len = usize::try_from(batch.len())?;
    let bytes = PyByteArray::new_with(py, len * 8, |bytes| {
        for (out, record) in bytes.chunks_exact_mut(8).zip(batch.runs().flatten()) {
            out.copy_from_slice(&record.to_ne_bytes());
        }
        Ok(())
    })?;
    py.import("numpy")?.call_method1("frombuffer", (bytes, "int64"))
}
