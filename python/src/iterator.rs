//! The iterator of batches: waits in slices, and handles signals between two of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyException, PyMemoryError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;

use crate::batch::Batch;
use crate::engine::{Asked, Freed, Shared, State};
use crate::errors::{self, Failure};
use crate::foreign::Filler;
use crate::lease::Lease;
use crate::locked::{SLICE, check_end};
use crate::object::{Object, mapped};
use crate::position::Position;

/// How long to wait for a slot in use: another thread may be about to release it.
const PATIENCE: Duration = Duration::from_millis(100);

pub(crate) fn closed(py: Python<'_>) -> PyErr {
    errors::raise(py, Failure::new("LoaderError", "the loader was closed"))
}

/// The batches of an iteration.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Batches {
    pub(crate) shared: Arc<Shared>,
    /// The Python `Loader`. It reports the Python objects in `shared` and `map` to the garbage collector.
    pub(crate) loader: Py<PyAny>,
    pub(crate) iteration: u64,
    /// A function that turns a batch into what the loop gets.
    pub(crate) map: Option<Arc<Object>>,
    /// Fills a slot in this thread, with `_drive.fill_one`: without overlap, if that runs code of the program.
    pub(crate) fill: Option<Arc<(Py<Filler>, Py<PyAny>)>>,
    /// Whether a step of the breakdown has begun.
    pub(crate) stepping: AtomicBool,
    /// The longest wait for a batch.
    pub(crate) timeout: Option<Duration>,
}

impl Batches {
    /// Ends the step of the breakdown that the last batch began.
    fn end_step(&self) {
        // Relaxed: this flag orders no other access.
        if self.stepping.swap(false, Ordering::Relaxed) {
            self.shared.breakdown.end_step();
        }
    }

    /// Takes a batch back, because this call raises `raised` instead. If it is to come `again`, the next call returns
    /// it.
    fn put_back(&self, py: Python<'_>, lease: Arc<Lease>, again: bool, raised: PyErr) -> PyErr {
        self.shared.state.with(py, |state| state.put_back(self.iteration, lease, again));
        raised
    }

    /// Turns a batch into what the loop gets.
    fn hand_out(&self, py: Python<'_>, lease: Arc<Lease>) -> PyResult<Py<PyAny>> {
        // Handle signals now: an exception raised later would lose the batch.
        if let Err(raised) = py.check_signals() {
            return Err(self.put_back(py, lease, true, raised));
        }
        self.stepping.store(self.shared.breakdown.is_on(), Ordering::Relaxed);
        let batch = Py::new(py, Batch::new(lease.clone()))?.into_any();
        let Some(map) = self.map.as_ref().and_then(|map| map.get(py)) else { return Ok(batch) };
        mapped(py, &map, &batch).map_err(|raised| {
            // If `map` failed, do not return the batch again: it would fail again. After Ctrl-C, return it again.
            let again = !raised.is_instance_of::<PyException>(py);
            self.put_back(py, lease, again, raised)
        })
    }
}

#[pymethods]
impl Batches {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The position after the last batch that this iterator returned.
    fn _position(&self, py: Python<'_>) -> Option<Position> {
        self.shared.state.with(py, |state| state.position())
    }

    /// Returns whether it filled a slot.
    fn fill(&self, py: Python<'_>) -> PyResult<bool> {
        let Some((filler, fill_one)) = self.fill.as_deref() else { return Ok(false) };
        let filled = fill_one.call1(py, (filler,));
        filler.get().calls_no_more();
        filled?.extract(py)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.loader)
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let shared = &*self.shared;
        shared.check(py)?;
        check_end(py)?;
        self.end_step();
        let since = Instant::now();
        let ask = |state: &mut State| shared.ask(state, self.iteration, Duration::ZERO);
        let mut asked = match shared.overlap {
            // Most batches are ready already: there is no reason to release the GIL and wait to get it back.
            true => shared.state.with(py, ask),
            // Without overlap, this call reads the batch itself, so release the GIL.
            false => shared.state.detached(py, ask),
        };
        loop {
            if !matches!(asked, Asked::Batch(_)) {
                check_end(py)?;
            }
            match asked {
                Asked::Batch(lease) => return self.hand_out(py, lease).map(Some),
                Asked::End => return Ok(None),
                Asked::NotYet => {
                    py.check_signals()?;
                    if let Some(waited) = self.timeout.filter(|&timeout| since.elapsed() >= timeout) {
                        let reading = shared.state.with(py, |state| state.reading());
                        return Err(errors::loading(py, Error::Timeout { waited, reading }));
                    }
                }
                Asked::Failed(error) => return Err(errors::loading(py, *error)),
                Asked::Closed => return Err(closed(py)),
                Asked::Replaced => {
                    let message = "this iteration is over: another has begun, or a state was loaded";
                    return Err(errors::raise(py, Failure::new("LoaderError", message)));
                }
            }
            if self.fill(py)? {
                asked = shared.state.with(py, ask);
                continue;
            }
            let slice =
                self.timeout.map_or(SLICE, |timeout| SLICE.min(timeout.saturating_sub(since.elapsed())));
            let freed;
            (freed, asked) = shared.state.detached(py, |state| {
                let freed = state.free_a_slot(PATIENCE);
                (freed, shared.ask(state, self.iteration, slice))
            });
            if let Err(raised) = tell(py, shared, &freed) {
                return Err(match asked {
                    Asked::Batch(lease) => self.put_back(py, lease, true, raised),
                    _ => raised,
                });
            }
        }
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        self.end_step();
        // If the loop was left early, stop reading ahead for it.
        let (shared, iteration) = (&*self.shared, self.iteration);
        if !shared.state.is_forked() {
            let rest = |state: &mut State| {
                if state.iteration == iteration {
                    state.rest();
                }
            };
            if Python::try_attach(|py| shared.state.with(py, rest)).is_none() {
                rest(&mut shared.state.lock());
            }
        }
    }
}

/// Logs that a batch which the loop keeps has left its slot, or raises that there was no memory for that.
fn tell(py: Python<'_>, shared: &Shared, freed: &Freed) -> PyResult<()> {
    match freed {
        Freed::NoMemory => {
            Err(PyMemoryError::new_err("no memory for a batch that was kept: let go of earlier batches"))
        }
        Freed::FirstKept => {
            let name = shared.name.as_deref().map_or(String::new(), |name| format!("{name}: "));
            let line = format!(
                "{name}all slots were in use for {} s, so one got new memory, and so will others: let go of \
                 batches, tensors and arrays sooner, raise `depth`, or keep copies",
                PATIENCE.as_secs_f32()
            );
            errors::warn(py, &line)
        }
        Freed::Nothing => Ok(()),
    }
}
