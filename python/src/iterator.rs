//! The iterator of batches: waits in slices, and between two of them hears signals.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::batch::Batch;
use crate::engine::{Asked, Shared, State};
use crate::errors::{self, Failure};

/// The longest that a signal waits to be heard.
const SLICE: Duration = Duration::from_millis(50);
/// From then on a wait for a slot that is kept is logged.
const PATIENCE: Duration = Duration::from_secs(1);

pub(crate) fn closed(py: Python<'_>) -> PyErr {
    errors::raise(py, Failure::new("LoaderError", "the loader was closed"))
}

/// The batches of an iteration.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Batches {
    shared: Arc<Shared>,
    iteration: u64,
}

impl Batches {
    pub(crate) fn new(shared: Arc<Shared>, iteration: u64) -> Self {
        Self { shared, iteration }
    }
}

#[pymethods]
impl Batches {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        let shared = &*self.shared;
        shared.check_process(py)?;
        let ask = |first, timeout| move |state: &mut State| shared.ask(state, self.iteration, first, timeout);
        let mut asked = match shared.overlap {
            // Most batches are there already: no reason to let go of the GIL, and to wait to get it back.
            true => shared.with(py, ask(true, Duration::ZERO)),
            false => shared.detached(py, ask(true, SLICE)),
        };
        let mut wait = Wait { since: None, collected: false, warned: false };
        loop {
            match asked {
                Asked::Batch(lease) => return Ok(Some(Batch::new(lease))),
                Asked::End => return Ok(None),
                Asked::NotYet => wait.go_on(py, shared)?,
                Asked::Failed(error) => return Err(errors::loading(py, *error)),
                Asked::Closed => return Err(closed(py)),
                Asked::Replaced => {
                    let message = "another iteration of this loader has begun: there is one at a time";
                    return Err(errors::raise(py, Failure::new("LoaderError", message)));
                }
            }
            asked = shared.detached(py, ask(false, SLICE));
        }
    }
}

impl Drop for Batches {
    fn drop(&mut self) {
        // A loop that was left early: nothing more is read ahead for it.
        if !self.shared.is_forked() {
            let (shared, iteration) = (&*self.shared, self.iteration);
            let rest = |state: &mut State| {
                if state.iteration == iteration {
                    state.rest();
                }
            };
            if Python::try_attach(|py| shared.with(py, rest)).is_none() {
                rest(&mut shared.lock());
            }
        }
    }
}

/// A wait for one batch.
struct Wait {
    since: Option<Instant>,
    collected: bool,
    warned: bool,
}

impl Wait {
    /// Between two slices: hears signals, and looks for what keeps the slots.
    fn go_on(&mut self, py: Python<'_>, shared: &Shared) -> PyResult<()> {
        py.check_signals()?;
        let waited = self.since.get_or_insert_with(Instant::now).elapsed();
        if self.warned || waited < 2 * SLICE {
            return Ok(());
        }
        // Relaxed: a count for a message.
        let alive = shared.alive.load(Ordering::Relaxed);
        let report = shared.with(py, |state| state.report());
        if alive == 0 || report.loads > report.batches {
            return Ok(()); // the batch is being read
        }
        if !self.collected {
            // Batches in reference cycles, for example of an exception and its traceback, are gone after this.
            self.collected = true;
            py.import("gc")?.call_method0("collect")?;
        } else if waited > PATIENCE {
            self.warned = true;
            let name = shared.name.as_deref().map_or(String::new(), |name| format!("{name}: "));
            errors::warn(
                py,
                &format!(
                    "{name}waiting for a slot: {alive} of {} are in use by batches and arrays that were kept; keep \
                     fewer, raise `depth`, or keep copies",
                    shared.slots
                ),
            )?;
        }
        Ok(())
    }
}
