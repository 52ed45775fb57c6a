//! An item on its way to the loop.

use std::sync::Mutex;

use pyo3::prelude::*;

use crate::locked::lock;

/// What becomes of an item that was taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Left {
    /// The loop gets it.
    Out,
    /// The next call has it again.
    Back,
    /// A function of the program failed for it.
    Gone,
}

/// An item that was taken for the loop. If `_loop.py` does not hand it out, for example after Ctrl-C, the next call
/// returns it again, unless a function of the program failed for it.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Taken")]
pub(crate) struct Taken {
    #[pyo3(get)]
    item: Py<PyAny>,
    leave: Mutex<Option<Leave>>,
}

type Leave = Box<dyn FnOnce(Python<'_>, Left) + Send>;

impl Taken {
    pub(crate) fn new(item: Py<PyAny>, leave: impl FnOnce(Python<'_>, Left) + Send + 'static) -> Self {
        Self { item, leave: Mutex::new(Some(Box::new(leave))) }
    }

    fn leave(&self, py: Python<'_>, left: Left) {
        let leave = lock(&self.leave).take();
        leave.into_iter().for_each(|leave| leave(py, left));
    }
}

#[pymethods]
impl Taken {
    /// The loop gets it. It is an attribute because no signal is handled between a store to one and a return.
    #[setter]
    fn set_handed_out(&self, py: Python<'_>, _yes: bool) {
        self.leave(py, Left::Out);
    }

    /// The next call has it again.
    fn back(&self, py: Python<'_>) {
        self.leave(py, Left::Back);
    }

    /// Nobody has it again: a function of the program failed for it.
    fn gone(&self, py: Python<'_>) {
        self.leave(py, Left::Gone);
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        Python::try_attach(|py| self.leave(py, Left::Back));
    }
}
