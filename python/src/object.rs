//! References to Python objects that the garbage collector sees.

use std::cell::Cell;
use std::mem;
use std::sync::Mutex;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};

use crate::locked::lock;

/// The only reference to a Python object, such as a data set or a function, that a loader or an iteration has: all of
/// its threads share it. The garbage collector finds cycles by counting references, and sees only those that a Python
/// object reports.
pub(crate) struct Object(Mutex<Option<Py<PyAny>>>);

impl Object {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> Self {
        Self(Mutex::new(Some(object.clone().unbind())))
    }

    pub(crate) fn copy(&self, py: Python<'_>) -> Self {
        Self(Mutex::new(self.get(py)))
    }

    pub(crate) fn get(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        // The lock is held only while a reference count changes, and never while Python code runs.
        let object = lock(&self.0);
        object.as_ref().map(|object| object.clone_ref(py))
    }

    pub(crate) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        // If another thread holds the lock, do not report the reference: the collector then keeps the object until its
        // next run.
        self.0.try_lock().map_or(Ok(()), |object| visit.call(&*object))
    }

    pub(crate) fn take(&self) -> Option<Py<PyAny>> {
        lock(&self.0).take()
    }
}

/// `_thread.start_new_thread`.
static START: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

thread_local! {
    /// Whether this is the main thread, if that imported the package.
    static MAIN: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn imported(py: Python<'_>) -> PyResult<()> {
    let threading = py.import("threading")?;
    MAIN.set(threading.call_method0("current_thread")?.is(&threading.call_method0("main_thread")?));
    START.import(py, "_thread", "start_new_thread").map(|_| ())
}

/// Drops objects of the program. Their `__del__` may take any time, and the interpreter may end a thread there, but for the
/// main one: no frame of Rust may be below. Other threads leave the drop to a new one, in which `list.clear` does it.
pub(crate) fn let_go(py: Python<'_>, objects: impl IntoIterator<Item = Py<PyAny>>) {
    let objects: Vec<_> = objects.into_iter().collect();
    if MAIN.get() || objects.is_empty() {
        return;
    }
    // An iterator is also dropped while an exception leaves its loop. A call would lose that, or fail by it.
    let raised = PyErr::take(py);
    if let Ok(list) = PyList::new(py, objects) {
        let start = |clear| START.get(py)?.bind(py).call1((clear, ())).ok();
        if list.getattr("clear").ok().and_then(start).is_none() {
            mem::forget(list); // no thread can start, as when the interpreter ends
        }
    }
    raised.into_iter().for_each(|raised| raised.restore(py));
}
