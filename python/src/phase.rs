//! Phases of a step, for the breakdown of a loader.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use pyo3::prelude::*;
use twinbuf::Breakdown;

/// The names of phases. A program has a few, and they stay.
static NAMES: Mutex<Option<HashSet<&'static str>>> = Mutex::new(None);

/// A part of a step, as a context manager.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Phase {
    breakdown: Breakdown,
    name: &'static str,
    begun: Mutex<Option<Instant>>,
}

impl Phase {
    pub(crate) fn new(breakdown: Breakdown, name: &str) -> Self {
        let mut names = NAMES.lock().unwrap_or_else(PoisonError::into_inner);
        let names = names.get_or_insert_default();
        let name = match names.get(name) {
            Some(name) => name,
            None => {
                let name: &'static str = Box::leak(name.into());
                names.insert(name);
                name
            }
        };
        Self { breakdown, name, begun: Mutex::new(None) }
    }
}

#[pymethods]
impl Phase {
    fn __enter__(slf: PyRef<'_, Self>) -> PyRef<'_, Self> {
        *slf.begun.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        if let Some(begun) = self.begun.lock().unwrap_or_else(PoisonError::into_inner).take() {
            self.breakdown.add(self.name, begun.elapsed());
        }
    }
}
