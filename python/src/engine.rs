//! State shared by a loader and its iterators: the crate's loader, or the iteration that owns it, behind a lock.
//!
//! No thread waits while it holds both the lock and the GIL. A wait with the lock lasts for [`SLICE`] at most.

use std::collections::VecDeque;
use std::mem;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use twinbuf::loader::Reading;
use twinbuf::pipe::Front;
use twinbuf::{Breakdown, Checkpoint, Plan};

use crate::errors::{self, Failure};
use crate::foreign::{Identity, is_calling};
use crate::handover;
use crate::lease::Lease;
use crate::locked::{LEAVE, Locked, begin_end, detached};
use crate::names::Names;
use crate::position::Position;
use crate::run::Run;

#[derive(Default)]
pub(crate) struct State {
    pub(crate) run: Run,
    /// The number of the newest iteration. Older ones get no more batches.
    pub(crate) iteration: u64,
    /// A loaded state: where the next iteration starts.
    pub(crate) resume: Option<Checkpoint>,
    /// The epoch of the next `iter(loader)`.
    pub(crate) next_epoch: u64,
    /// A batch that `next` received and did not return, because it raised an exception such as that of Ctrl-C. The
    /// following `next` returns it.
    pub(crate) put_back: Option<Arc<Lease>>,
    /// The position before `put_back`, or before a batch on which `map` failed. It stays when that iteration ends.
    pub(crate) before: Option<Checkpoint>,
    /// The iteration ends before this epoch.
    pub(crate) end: u64,
    /// Whether the last iteration reached its end.
    pub(crate) exhausted: bool,
    /// The report of a loader that was closed.
    pub(crate) last_report: twinbuf::Report,
    /// Batches that were handed out and may be in use, in their order, with the number of their iteration.
    pub(crate) leases: VecDeque<(u64, Weak<Lease>)>,
    /// The number of batches that left their slots because the loop kept them.
    pub(crate) kept: u64,
}

/// What the loader and its iterators share.
pub(crate) struct Shared {
    pub(crate) state: Locked<State>,
    pub(crate) name: Option<String>,
    pub(crate) names: Names,
    pub(crate) breakdown: Breakdown,
    /// Whether a thread reads ahead. If none does, asking for a batch reads it, even if the caller wants no wait.
    pub(crate) overlap: bool,
    /// Whether threads of Python fill its slots, because it runs code of the program.
    pub(crate) foreign: bool,
    pub(crate) identity: Arc<Identity>,
}

/// Loaders whose threads must end before the interpreter does.
static LOADERS: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());

/// Registers the loader, so that the end of the program ends its threads.
pub(crate) fn register(shared: &Arc<Shared>) {
    let mut loaders = LOADERS.lock().unwrap_or_else(PoisonError::into_inner);
    loaders.retain(|loader| loader.strong_count() > 0);
    loaders.push(Arc::downgrade(shared));
}

/// The result of requesting a batch.
pub(crate) enum Asked {
    Batch(Arc<Lease>),
    End,
    NotYet,
    Failed(Box<twinbuf::Error>),
    /// Another iteration has started since.
    Replaced,
    Closed,
}

/// The result of [`State::free_a_slot`].
pub(crate) enum Freed {
    Nothing,
    /// A slot was freed of a batch that the loop has kept, for the first time in this loader: this is logged.
    FirstKept,
    NoMemory,
}

impl Shared {
    /// Refuses calls that would wait forever: those in a forked process, and those from `read_into` of this loader.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.state.check(py, "build the loader after the fork, or start processes by `spawn`")?;
        self.is_not_reading(py)
    }

    /// Refuses calls from `read_into` of this loader: the thread that called `read_into` may hold the lock.
    pub(crate) fn is_not_reading(&self, py: Python<'_>) -> PyResult<()> {
        if is_calling(&self.identity) {
            let message = "`read_into` used the loader that it reads for, which would wait for itself";
            return Err(errors::raise(py, Failure::new("LoaderError", message)));
        }
        Ok(())
    }

    /// Asks for the next batch, and waits for it up to `timeout`.
    pub(crate) fn ask(&self, state: &mut State, iteration: u64, timeout: Duration) -> Asked {
        if state.iteration != iteration {
            return if matches!(state.run, Run::Closed) { Asked::Closed } else { Asked::Replaced };
        }
        if let Some(lease) = state.put_back.take() {
            state.before = None;
            return Asked::Batch(lease);
        }
        let Run::Running(epochs) = &mut state.run else { return Asked::End };
        let found = match timeout.is_zero() {
            true => epochs.try_next(),
            false => epochs.next_timeout(timeout),
        };
        match found {
            Poll::Pending => Asked::NotYet,
            Poll::Ready(Some(Ok(batch))) => match Lease::new(batch, self.names.clone()).map(Arc::new) {
                Ok(lease) => {
                    state.before = None;
                    state.lent(&lease);
                    Asked::Batch(lease)
                }
                Err(error) => Asked::Failed(Box::new(error)),
            },
            Poll::Ready(Some(Err(error))) => {
                match errors::is_interrupt(&error) {
                    true => state.again(),
                    false => state.rest(),
                }
                Asked::Failed(Box::new(error))
            }
            Poll::Ready(None) => {
                state.exhausted = true;
                state.rest();
                Asked::End
            }
        }
    }
}

impl State {
    fn lent(&mut self, lease: &Arc<Lease>) {
        // Forget batches that were freed, so that the list does not grow.
        self.leases.retain(|(_, lease)| lease.strong_count() > 0);
        self.leases.push_back((self.iteration, Arc::downgrade(lease)));
    }

    /// If the program still uses the next slot, frees the slot of the oldest batch: the batch takes the memory along,
    /// and the slot gets new memory.
    ///
    /// The first time this happens only after the slot has been held for `patience`. Later it happens at once, because
    /// a loop that has kept one batch keeps others. It also happens at once for a batch of an earlier iteration:
    /// probably only a loop variable refers to that.
    pub(crate) fn free_a_slot(&mut self, patience: Duration) -> Freed {
        let Run::Running(epochs) = &self.run else { return Freed::Nothing };
        let Some(held_for) = epochs.held_for() else { return Freed::Nothing };
        while let Some((iteration, lease)) = self.leases.front() {
            let Some(lease) = lease.upgrade() else {
                self.leases.pop_front();
                continue;
            };
            let left_over = *iteration != self.iteration;
            if !left_over && held_for < patience && self.kept == 0 {
                return Freed::Nothing;
            }
            self.leases.pop_front();
            match lease.leave_slot() {
                Some(true) if left_over => return Freed::Nothing,
                Some(true) => {
                    self.kept += 1;
                    return if self.kept == 1 { Freed::FirstKept } else { Freed::Nothing };
                }
                Some(false) => return Freed::NoMemory,
                None => {}
            }
        }
        Freed::Nothing
    }

    /// Takes back a batch that `next` did not return. If it is to come `again`, the following `next` returns it.
    pub(crate) fn put_back(&mut self, iteration: u64, lease: Arc<Lease>, again: bool) {
        if self.iteration != iteration || matches!(self.run, Run::Closed) {
            return;
        }
        let same = |after: &Checkpoint| after.epoch() == lease.epoch;
        self.before = self.at().filter(same).map(|after| after.with_step(lease.step));
        self.put_back = Some(lease).filter(|_| again);
    }

    /// Restarts the iteration at its position: it reads the batch after the last received one again.
    fn again(&mut self) {
        let at = self.at();
        self.rest();
        if self.start(at.as_ref(), 0..self.end).is_err() {
            // Drop the error of the restart: the caller gets the interrupt now, and this error from the next iteration.
            self.rest();
        }
    }

    /// Ends the iteration. From now on `next` of its iterator raises an error.
    pub(crate) fn end_iteration(&mut self) {
        self.rest();
        self.iteration += 1;
    }

    /// Ends the iteration, if there is one. From now on its iterator has no more batches.
    pub(crate) fn rest(&mut self) {
        self.put_back = None;
        self.run.rest();
    }

    /// Returns the checkpoint at which an iteration over these epochs begins: the loaded state, or the end of the epoch
    /// before them, if the last iteration ended in that epoch. `None`: the iteration begins at the start of the first
    /// one, as if all epochs before it had been run with this plan.
    fn origin(&self, epochs: &Range<u64>, single: bool) -> Option<Checkpoint> {
        let loaded = self.resume.as_ref().filter(|resume| goes_on(resume, epochs, single)).cloned();
        let follows = |at: &Checkpoint| at.epoch().checked_add(1) == Some(epochs.start);
        loaded.or_else(|| self.at().filter(follows).map(Checkpoint::next_epoch))
    }

    /// Returns the number of batches of an iteration over these epochs that begins now.
    pub(crate) fn count(&self, plan: &Plan, epochs: Range<u64>, single: bool) -> u64 {
        match self.origin(&epochs, single) {
            Some(origin) => origin.steps_left(plan, epochs.end).unwrap_or_default(),
            None => plan.steps_between(epochs.clone(), plan.steps_between(0..epochs.start, 0)),
        }
    }

    /// Returns the number of steps of the epoch under way, or of the next one.
    pub(crate) fn steps(&self, plan: &Plan) -> u64 {
        let at = match &self.run {
            Run::Running(epochs) => Some(epochs.checkpoint()),
            _ => self.resume.clone(),
        };
        let next = self.next_epoch..self.next_epoch.saturating_add(1);
        at.map_or_else(
            || self.count(plan, next, true),
            |at| at.step() + at.steps_left(plan, at.epoch().saturating_add(1)).unwrap_or_default(),
        )
    }

    /// Begins an iteration over these epochs, or over what a loaded state leaves of them, and returns its number. If it
    /// is over a single epoch and the state belongs to another one, it covers the whole epoch.
    pub(crate) fn begin(&mut self, epochs: Range<u64>, single: bool) -> Result<u64, Box<twinbuf::Error>> {
        let origin = self.origin(&epochs, single);
        self.rest();
        self.iteration += 1;
        self.resume.take_if(|resume| !goes_on(resume, &epochs, single));
        let start = origin.as_ref().map_or(epochs.start, Checkpoint::epoch);
        if start >= epochs.end {
            // No epoch is left to iterate over: keep the position.
            return Ok(self.iteration);
        }
        (self.exhausted, self.before, self.resume) = (false, None, None);
        self.start(origin.as_ref(), epochs).map(|()| self.iteration)
    }

    fn start(&mut self, from: Option<&Checkpoint>, epochs: Range<u64>) -> Result<(), Box<twinbuf::Error>> {
        let Some(loader) = self.run.take() else { return Ok(()) };
        self.end = epochs.end;
        let begun = match from {
            Some(from) => loader.into_epochs_from(from, epochs.end),
            None => Ok(loader.into_epochs(epochs)),
        };
        match begun {
            Ok(running) => {
                self.run = Run::Running(running);
                Ok(())
            }
            Err(refused) => {
                let (loader, error) = *refused;
                self.run = Run::Idle(loader);
                Err(Box::new(error))
            }
        }
    }

    /// Returns what a thread is reading now for the batch that the loop needs first.
    pub(crate) fn reading(&self) -> Option<Reading> {
        match &self.run {
            Run::Running(epochs) => epochs.reading(),
            Run::Idle(loader) => loader.pipe().reading(),
            Run::Closed => None,
        }
    }

    pub(crate) fn report(&self) -> twinbuf::Report {
        self.run.report().unwrap_or_else(|| self.last_report.clone())
    }

    /// Returns the position after the last batch that the loop received, for `state_dict`.
    pub(crate) fn position(&self) -> Option<Position> {
        let checkpoint = self.resume.clone().or_else(|| self.before.clone()).or_else(|| self.at())?;
        Some(Position { checkpoint, exhausted: self.exhausted && self.resume.is_none() })
    }

    /// Returns the position after the last batch that the crate's loader handed out.
    fn at(&self) -> Option<Checkpoint> {
        match &self.run {
            Run::Idle(loader) => Some(loader.checkpoint()),
            Run::Running(epochs) => Some(epochs.checkpoint()),
            Run::Closed => None,
        }
    }
}

/// Whether an iteration over these epochs continues at this loaded state.
fn goes_on(resume: &Checkpoint, epochs: &Range<u64>, single: bool) -> bool {
    if single { resume.epoch() == epochs.start } else { resume.epoch() >= epochs.start }
}

impl Drop for Shared {
    /// Waits for a read in progress, but no longer than [`LEAVE`], and not for one of this thread.
    fn drop(&mut self) {
        let limit = if is_calling(&self.identity) { Duration::ZERO } else { LEAVE };
        let Some(loader) = self.state.get_mut().run.take() else { return };
        let close = || loader.close_timeout(limit);
        // Drop an error of the loader, which nobody can receive any more.
        let _ = match Python::try_attach(|_| ()) {
            Some(()) => Python::attach(|py| detached(py, close)),
            None => close(),
        };
    }
}

/// The program begins to end: iterations are cut off, and the threads of all loaders end. Waits for the crate's own, which
/// read files, for [`LEAVE`] in all; `_drive.py` waits for those of Python.
#[pyfunction]
pub(crate) fn _begin_end(py: Python<'_>) -> PyResult<()> {
    begin_end(py)?;
    handover::stop_all(py);
    let loaders = mem::take(&mut *LOADERS.lock().unwrap_or_else(PoisonError::into_inner));
    let until = Instant::now() + LEAVE;
    for shared in loaders.iter().filter_map(Weak::upgrade).filter(|shared| !shared.state.is_forked()) {
        detached(py, || {
            // Take the loader away from its iterators: from now on they return no more batches.
            let loader = shared.state.lock().run.take();
            let limit =
                if shared.foreign { Duration::ZERO } else { until.saturating_duration_since(Instant::now()) };
            let _ = loader.map(|loader| loader.close_timeout(limit));
        });
    }
    Ok(())
}
