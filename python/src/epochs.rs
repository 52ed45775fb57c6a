//! What a loop iterates over: begins reading at its first batch, and has a length.

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyIterator;
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Checkpoint;

use crate::engine::State;
use crate::loader::Loader;
use crate::report::Report;

/// The batches of an iteration of a loader. Programs ask for an iterator, and for its length, without iterating: the
/// iteration begins at the first batch.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf")]
pub(crate) struct Epochs {
    loader: Py<Loader>,
    which: Which,
    /// The longest wait for a batch.
    timeout: Option<Duration>,
    begun: OnceLock<Py<PyAny>>,
    /// Held by the thread that begins.
    beginning: Mutex<()>,
    /// Batches of the whole iteration once that is known, and those handed out.
    all: OnceLock<u64>,
    received: AtomicU64,
}

#[derive(Clone)]
pub(crate) enum Which {
    /// Several epochs.
    Range(Range<u64>),
    /// One epoch: the next one, if it has no number.
    One(Option<u64>),
}

impl Which {
    /// The epochs; and if it is a single one, the epoch after it.
    pub(crate) fn epochs(&self, state: &State) -> (Range<u64>, Option<u64>) {
        let one = match self {
            Self::Range(epochs) => return (epochs.clone(), None),
            Self::One(Some(epoch)) => *epoch,
            Self::One(None) => state.resume.as_ref().map_or(state.next_epoch, Checkpoint::epoch),
        };
        let next = one.saturating_add(1);
        (one..next, Some(next))
    }
}

impl Epochs {
    pub(crate) fn new(loader: Py<Loader>, which: Which, timeout: Option<Duration>) -> Self {
        let (begun, all) = (OnceLock::new(), OnceLock::new());
        Self { loader, which, timeout, begun, beginning: Mutex::new(()), all, received: AtomicU64::new(0) }
    }

    fn all(&self, py: Python<'_>) -> PyResult<u64> {
        match self.all.get() {
            Some(&all) => Ok(all),
            // Not within the lock's own call, which would wait while it holds the GIL.
            None => {
                let all = self.loader.get().count(py, &self.which);
                Ok(*self.all.get_or_init(|| all))
            }
        }
    }
}

#[pymethods]
impl Epochs {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The batches that are left.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        // Relaxed: a number for whoever asks, and nothing depends on it.
        Ok(usize::try_from(self.all(py)?.saturating_sub(self.received.load(Ordering::Relaxed)))?)
    }

    /// Where the time went so far, in all iterations of the loader.
    fn report(&self, py: Python<'_>) -> PyResult<Report> {
        self.loader.get().report(py)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let batches = match self.begun.get() {
            Some(batches) => batches,
            None => {
                let _one = self.beginning.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
                if self.begun.get().is_none() {
                    self.all(py)?;
                    let begun = Loader::begin(self.loader.bind(py), &self.which, self.timeout)?;
                    let _ = self.begun.set(begun);
                }
                self.begun.get().ok_or_else(|| PyRuntimeError::new_err("the iteration did not begin"))?
            }
        };
        let batch = batches.bind(py).cast::<PyIterator>()?.clone().next().transpose()?;
        self.received.fetch_add(u64::from(batch.is_some()), Ordering::Relaxed);
        Ok(batch.map(Bound::unbind))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.loader)?;
        visit.call(self.begun.get())
    }
}
