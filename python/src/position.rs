//! A position in a plan, cheap to take after every batch. It becomes JSON when it is saved.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use twinbuf::Checkpoint;

#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Position {
    pub(crate) checkpoint: Checkpoint,
    /// Whether the iteration has reached its end: the position is then saved as the start of the next epoch.
    pub(crate) exhausted: bool,
}

#[pymethods]
impl Position {
    /// As JSON.
    fn text(&self) -> PyResult<String> {
        let at = self.checkpoint.clone();
        let at = if self.exhausted { at.next_epoch() } else { at };
        serde_json::to_string(&at).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
