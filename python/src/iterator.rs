//! The iterator of batches: waits in slices, and handles signals between two of them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyMemoryError, PyStopIteration};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;

use crate::batch::Batch;
use crate::engine::{Asked, Freed, Shared, State};
use crate::errors::{self, Failure};
use crate::lease::Lease;
use crate::locked::{SLICE, check_end};
use crate::position::Position;
use crate::taken::{Left, Taken};

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
    /// Whether a step of the breakdown has begun.
    pub(crate) stepping: AtomicBool,
    /// The longest wait for a batch.
    pub(crate) timeout: Option<Duration>,
    /// Since when the loop has waited.
    pub(crate) since: Mutex<Option<Instant>>,
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

    /// Asks for the next batch, and waits for it for one [`SLICE`] at most, or not at all. `None` at the end.
    fn next(&self, py: Python<'_>, waits: bool) -> PyResult<Poll<Option<Arc<Lease>>>> {
        let shared = &*self.shared;
        shared.check(py)?;
        check_end(py)?;
        self.end_step();
        let since = || self.since.lock().unwrap_or_else(PoisonError::into_inner);
        let ask = |state: &mut State| shared.ask(state, self.iteration, Duration::ZERO);
        let asked = match waits {
            true => {
                let waited = since().get_or_insert_with(Instant::now).elapsed();
                py.check_signals()?;
                let rest = self.timeout.map(|timeout| timeout.saturating_sub(waited));
                if rest.is_some_and(|rest| rest.is_zero()) {
                    since().take();
                    let reading = shared.state.with(py, |state| state.reading());
                    let waited = self.timeout.unwrap_or_default();
                    return Err(errors::loading(py, Error::Timeout { waited, reading }));
                }
                let (freed, asked) = shared.state.detached(py, |state| {
                    let freed = state.free_a_slot(PATIENCE);
                    (freed, shared.ask(state, self.iteration, rest.unwrap_or(SLICE).min(SLICE)))
                });
                if let Err(raised) = tell(py, shared, &freed) {
                    return Err(match asked {
                        Asked::Batch(lease) => self.put_back(py, lease, true, raised),
                        _ => raised,
                    });
                }
                asked
            }
            // Most batches are ready already: there is no reason to release the GIL and wait to get it back.
            false if shared.overlap || shared.foreign => shared.state.with(py, ask),
            // Without overlap, this call reads the batch itself, so release the GIL.
            false => shared.state.detached(py, ask),
        };
        if !matches!(asked, Asked::NotYet) {
            since().take();
        }
        match asked {
            Asked::Batch(lease) => {
                self.stepping.store(shared.breakdown.is_on(), Ordering::Relaxed);
                return Ok(Poll::Ready(Some(lease)));
            }
            Asked::NotYet => return Ok(Poll::Pending),
            _ => check_end(py)?,
        }
        match asked {
            Asked::Failed(error) => Err(errors::loading(py, *error)),
            Asked::Closed => Err(closed(py)),
            Asked::Replaced => {
                let message = "this iteration is over: another has begun, or a state was loaded";
                Err(errors::raise(py, Failure::new("LoaderError", message)))
            }
            _ => Ok(Poll::Ready(None)),
        }
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

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.loader)
    }

    pub(crate) fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let mut waits = false;
        loop {
            match self.next(py, waits)? {
                Poll::Pending => waits = true,
                Poll::Ready(None) => return Ok(None),
                // Handle signals now: an exception raised later would lose the batch.
                Poll::Ready(Some(lease)) => match py.check_signals() {
                    Ok(()) => return Ok(Some(Batch::new(lease))),
                    Err(raised) => return Err(self.put_back(py, lease, true, raised)),
                },
            }
        }
    }

    /// The next batch, for `_loop.py`. None: there is none yet, also after a short wait if that is wanted.
    fn take(&self, py: Python<'_>, waits: bool) -> PyResult<Option<Taken>> {
        match self.next(py, waits)? {
            Poll::Pending => Ok(None),
            Poll::Ready(None) => Err(PyStopIteration::new_err(())),
            Poll::Ready(Some(lease)) => {
                let batch = Py::new(py, Batch::new(lease.clone()))?.into_any();
                let (shared, iteration) = (self.shared.clone(), self.iteration);
                Ok(Some(Taken::new(batch, move |py, left| {
                    if left != Left::Out {
                        let again = left == Left::Back;
                        shared.state.with(py, |state| state.put_back(iteration, lease, again));
                    }
                })))
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
