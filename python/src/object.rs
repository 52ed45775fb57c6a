//! References to Python objects that the garbage collector sees.

use std::sync::Mutex;

use pyo3::prelude::*;
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

    pub(crate) fn clear(&self) {
        drop(self.take());
    }
}
