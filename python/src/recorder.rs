//! Where the time of a loop goes that iterates over something else than a `Loader`: the crate's own recorder.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use twinbuf::observe::LoopRecorder;

use crate::report;

/// What `watch` and the loop of a device are measured by.
#[pyclass(name = "_Recorder", module = "twinbuf._twinbuf", frozen)]
pub(crate) struct Recorder {
    recorder: Mutex<LoopRecorder>,
    /// A time, and what Python's clock showed.
    base: (Instant, f64),
}

impl Recorder {
    fn lock(&self) -> MutexGuard<'_, LoopRecorder> {
        self.recorder.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn at(&self, now: f64) -> Instant {
        let (base, then) = self.base;
        let time = Duration::try_from_secs_f64((now - then).abs()).unwrap_or_default();
        let at = if now < then { base.checked_sub(time) } else { base.checked_add(time) };
        at.unwrap_or(base)
    }
}

#[pymethods]
impl Recorder {
    /// Times are seconds of a clock that shows `now`.
    #[new]
    fn new(now: f64) -> Self {
        Self { recorder: Mutex::default(), base: (Instant::now(), now) }
    }

    /// The loop asks for an item.
    fn ask(&self, now: f64) {
        self.lock().asked(self.at(now));
    }

    /// The loop has the item.
    fn receive(&self, epoch: u64, step: u64, now: f64) {
        self.lock().received(epoch, step, self.at(now));
    }

    /// There are no more items, or the loop has left.
    fn end(&self, now: f64) {
        self.lock().ended(self.at(now));
    }

    /// Seconds that the loop waited and used its items.
    fn times(&self) -> (f64, f64) {
        let train = self.lock().report().train;
        (train.waiting.as_secs_f64(), train.busy.as_secs_f64())
    }

    /// The figures of a report, by name.
    fn figures<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let (report, steps) = {
            let recorder = self.lock();
            (recorder.report(), recorder.recent_steps())
        };
        report::figures(py, &report, &steps)
    }
}
