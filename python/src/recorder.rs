//! Measures, with the crate's recorder, the loops of `watch` and those over batches or groups on a device.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::PyIterator;
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::observe::{LoopRecorder, Trace};

use crate::errors;
use crate::report::Report;

/// The crate's recorder, as a Python object.
#[pyclass(name = "_Recorder", module = "twinbuf._twinbuf", frozen)]
pub(crate) struct Recorder {
    recorder: Mutex<LoopRecorder>,
}

impl Recorder {
    pub(crate) fn lock(&self) -> MutexGuard<'_, LoopRecorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Recorder {
    /// ``workers``: the items come from threads or processes of the iterable. ``device``: the loop waits for copies.
    #[new]
    #[pyo3(signature = (*, name="", trace=None, workers=false, device=false))]
    pub(crate) fn new(
        py: Python<'_>,
        name: &str,
        trace: Option<PathBuf>,
        workers: bool,
        device: bool,
    ) -> PyResult<Self> {
        let name = Some(name).filter(|name| !name.is_empty());
        let mut recorder = match trace {
            Some(path) => LoopRecorder::traced(name, Trace::new(path), device)
                .map_err(|error| errors::loading(py, error))?,
            None => LoopRecorder::default(),
        };
        if workers {
            recorder.from_workers();
        }
        Ok(Self { recorder: Mutex::new(recorder) })
    }

    /// The loop asks for its next item.
    fn asked(&self) {
        self.lock().asked(Instant::now());
    }

    /// The loop has this item.
    fn received(&self, epoch: u64, step: u64) {
        self.lock().received(epoch, step, Instant::now());
    }

    /// The loop has received its last item.
    pub(crate) fn ended(&self) {
        self.lock().ended(Instant::now());
    }

    /// The report of a watched loop. ``line`` is where the loop is, for the advice.
    fn report(&self, name: &str, line: &str) -> Report {
        Report::watched(self.lock().report(), name, line)
    }
}

/// One epoch of a watched loop: hands the items on as they are.
#[pyclass(name = "_Watch", module = "twinbuf._twinbuf", frozen)]
pub(crate) struct Watch {
    iterator: Py<PyIterator>,
    recorder: Py<Recorder>,
    place: Mutex<Place>,
}

struct Place {
    epoch: u64,
    step: u64,
    /// The time that `iter` took. It is added to the wait for the first item.
    begun: Duration,
    /// A generator that ends the epoch when it is closed: after the last item by this iterator, and by Python if the
    /// loop is left early. It is a generator because the garbage collector closes these before it clears a cycle.
    end: Option<Py<PyAny>>,
}

impl Watch {
    fn place(&self) -> MutexGuard<'_, Place> {
        self.place.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ended(&self, py: Python<'_>) -> PyResult<()> {
        let end = self.place().end.take();
        let Some(end) = end else { return Ok(()) };
        end.call_method0(py, "close").map(drop)
    }
}

#[pymethods]
impl Watch {
    #[new]
    fn new(
        py: Python<'_>,
        iterable: &Bound<'_, PyAny>,
        recorder: Py<Recorder>,
        epoch: u64,
        end: Py<PyAny>,
    ) -> PyResult<Self> {
        let start = Instant::now();
        let iterator = iterable.try_iter()?.unbind();
        end.call_method0(py, "__next__")?;
        let place = Mutex::new(Place { epoch, step: 0, begun: start.elapsed(), end: Some(end) });
        Ok(Self { iterator, recorder, place })
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let recorder = self.recorder.get();
        let begun = std::mem::take(&mut self.place().begun);
        let now = Instant::now();
        recorder.lock().asked(now.checked_sub(begun).unwrap_or(now));
        // Nothing after this call can raise an exception, so no item is lost.
        match self.iterator.bind(py).clone().next() {
            Some(Ok(item)) => {
                let mut place = self.place();
                recorder.lock().received(place.epoch, place.step, Instant::now());
                place.step += 1;
                Ok(Some(item))
            }
            None => self.ended(py).map(|()| None),
            Some(Err(error)) => {
                // Ctrl-C does not end the recording: the loop may go on after it.
                if error.is_instance_of::<PyException>(py) {
                    self.ended(py)?;
                }
                Err(error)
            }
        }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.iterator)?;
        // If another thread holds the lock, do not report the reference: the collector then keeps the object until its
        // next run.
        self.place.try_lock().map_or(Ok(()), |place| visit.call(&place.end))
    }
}
