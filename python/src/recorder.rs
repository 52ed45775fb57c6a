//! Measures, with the crate's recorder, the loops of `watch` and those over batches or groups on a device.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use twinbuf::observe::{LoopRecorder, Trace};

use crate::errors;
use crate::locked::lock;
use crate::report::{self, report};

/// The crate's recorder, as a Python object.
#[pyclass(name = "_Recorder", module = "twinbuf._twinbuf", frozen)]
pub(crate) struct Recorder(pub(crate) Mutex<LoopRecorder>);

impl Recorder {
    pub(crate) fn lock(&self) -> MutexGuard<'_, LoopRecorder> {
        lock(&self.0)
    }

    /// Returns the report of a loop. With a recorder it is made of two: that of the recorder, which measures the loop,
    /// and `reads`, that of the loader or stream.
    pub(crate) fn with(recorder: Option<&Self>, reads: twinbuf::Report) -> twinbuf::Report {
        match recorder {
            Some(recorder) => recorder.lock().report().on_device(reads),
            None => reads,
        }
    }
}

#[pymethods]
impl Recorder {
    /// ``workers``: the items come from threads or processes of the iterable.
    #[new]
    #[pyo3(signature = (*, name="", trace=None, workers=false))]
    pub(crate) fn new(py: Python<'_>, name: &str, trace: Option<PathBuf>, workers: bool) -> PyResult<Self> {
        let name = Some(name).filter(|name| !name.is_empty());
        let recorder = LoopRecorder::new(name, trace.map(Trace::new), workers);
        recorder.map(|recorder| Self(Mutex::new(recorder))).map_err(|error| errors::loading(py, error))
    }

    /// The loop asks for its next item, and has waited for it for so many seconds before.
    #[pyo3(signature = (waited=0.0))]
    fn asked(&self, waited: f64) {
        let now = Instant::now();
        self.lock().asked(now.checked_sub(Duration::from_secs_f64(waited)).unwrap_or(now));
    }

    /// The loop has this item.
    fn received(&self, epoch: u64, step: u64) {
        self.lock().received(epoch, step, Instant::now());
    }

    /// The loop asks for no more items.
    pub(crate) fn ended(&self) {
        self.lock().ended(Instant::now());
    }

    /// Let go of the trace.
    fn close(&self) {
        self.lock().close();
    }

    /// The report of a watched loop. ``line`` is where the loop is, for the advice.
    fn report(&self, py: Python<'_>, name: &str, line: &str) -> PyResult<Py<PyAny>> {
        let found = self.lock().report();
        report(py, &found, &report::Loop { name, line, ..Default::default() })
    }
}
