//! A position in a plan, cheap to take after every batch. It becomes a dict when it is saved.

use pyo3::prelude::*;
use twinbuf::Checkpoint;

use crate::errors;

#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Position {
    checkpoint: Checkpoint,
    /// The end of a finished epoch is the start of the next one.
    exhausted: bool,
}

impl Position {
    pub(crate) fn new(checkpoint: Checkpoint, exhausted: bool) -> Self {
        Self { checkpoint, exhausted }
    }

    pub(crate) fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let text = serde_json::to_string(&self.checkpoint).map_err(|error| errors::option(py, error))?;
        let state = py.import("json")?.call_method1("loads", (text,))?;
        if self.exhausted {
            state.set_item("epoch", self.checkpoint.epoch() + 1)?;
            state.set_item("step", 0)?;
        }
        Ok(state)
    }
}
