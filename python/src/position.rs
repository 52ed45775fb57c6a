//! A position in a plan, cheap to take after every batch. It becomes a dict when it is saved.

use pyo3::prelude::*;
use twinbuf::Checkpoint;

use crate::errors;

#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Position {
    pub(crate) checkpoint: Checkpoint,
    /// Whether the iteration has reached its end: the position is then saved as the start of the next epoch.
    pub(crate) exhausted: bool,
}

impl Position {
    pub(crate) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let at = self.checkpoint.clone();
        let at = if self.exhausted { at.next_epoch() } else { at };
        let text = serde_json::to_string(&at).map_err(|error| errors::option(py, error))?;
        py.import("json")?.call_method1("loads", (text,))
    }
}
