//! A loader as a front: its position, and where the next iteration begins.

use std::ops::Range;
use std::sync::{Arc, atomic};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use twinbuf::{Breakdown, Checkpoint, Error, Plan};

use crate::errors::{self, Failure};
use crate::foreign::is_calling;
use crate::iterate::{self, Front, Run};
use crate::lease::{Lease, Names};
use crate::locked::LEAVE;

/// The batches of a loader.
pub(crate) struct Batches {
    pub(crate) names: Names,
    pub(crate) breakdown: Breakdown,
    /// Whether a thread reads ahead. If none does, asking for a batch of files reads it, even if the caller wants no wait.
    pub(crate) overlap: bool,
    /// Whether threads of Python fill its slots, because it runs code of the program.
    pub(crate) foreign: bool,
    /// Its number among the loaders of the process.
    pub(crate) number: usize,
    /// The epoch of the next `iter(loader)`. It is written under the lock of the state. A forked process, which may never get
    /// that, reads it here. Relaxed: a reader without the lock reads no other data.
    pub(crate) next_epoch: atomic::AtomicU64,
}

/// Where the iterations of a loader are.
#[derive(Default)]
pub(crate) struct Progress {
    /// A loaded state: where the next iteration starts.
    pub(crate) resume: Option<Checkpoint>,
    /// Whether a state was loaded. The trainer that runs then may count epochs from 0, although the loader goes on.
    pub(crate) loaded: bool,
    /// If set, `state_dict` returns this position instead of the loader's: the one before a batch that was put back, or
    /// before one on which `map` failed; after an iteration that reached its end, the start of the next epoch. When the
    /// program ends, it keeps the loader's last position. The end of an iteration does not clear it.
    pub(crate) before: Option<Checkpoint>,
    /// The iteration ends before this epoch.
    end: u64,
    /// The position before the batch that an interrupt has stopped: the loop's next request reads that batch again.
    again: Option<Checkpoint>,
    /// Whether a step has begun, for the breakdown.
    stepping: bool,
}

pub(crate) type Shared = iterate::Shared<Batches>;
pub(crate) type State = iterate::State<Batches>;

impl Batches {
    /// As `check`, for calls that only ask: without overlap the loop's thread reads, and a signal's handler may ask in it. No
    /// thread waits for a read with the lock.
    pub(crate) fn may_ask(&self, py: Python<'_>) -> PyResult<()> {
        if self.overlap { self.check(py) } else { Ok(()) }
    }

    /// Ends the step of the breakdown that the last batch began.
    fn end_step(&self, state: &mut State) {
        if std::mem::take(&mut state.own.stepping) {
            self.breakdown.end_step();
        }
    }
}

impl Front for Batches {
    type Run = twinbuf::Loader;
    type Item = Arc<Lease>;
    type Own = Progress;

    const AFTER_FORK: &'static str = "build the loader after the fork, or start processes by `spawn`";

    /// Refuses calls from the code of the program that fills a slot of this loader: they would wait for that.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        if is_calling(self.number) {
            let message = "code that reads for a loader (`read_into`, `Records.map`, a signal's handler meanwhile) used \
                           that loader, which would wait for itself";
            return Err(errors::raise(py, Failure::new("NestedError", message)));
        }
        Ok(())
    }

    fn reads(&self) -> bool {
        !self.overlap && !self.foreign
    }

    fn is_made_by_loop(&self) -> bool {
        !self.overlap && self.foreign
    }

    fn asked(&self, state: &mut State) {
        self.end_step(state);
        // After an interrupt, the iteration begins again: it reads the batch after the last received one.
        if let Some(at) = state.own.again.take() {
            // It is a position of this loader, which has no error.
            let _ = state.start(Some(&at), 0..state.own.end);
        }
    }

    fn received(&self, state: &mut State, batch: twinbuf::Batch) -> Result<Option<Arc<Lease>>, Error> {
        let lease = Arc::new(Lease::new(batch, self.names.clone())?);
        state.lent(&lease);
        (state.own.before, state.own.stepping) = (None, true);
        Ok(Some(lease))
    }

    fn put_back(&self, state: &mut State, lease: Arc<Lease>, again: bool) -> Option<Arc<Lease>> {
        let place = (lease.epoch, lease.step);
        state.put_back.extend(again.then_some((place, lease)));
        state.own.before = state.before(Some(place));
        state.own.stepping &= !again; // it goes on when the batch comes again
        None
    }

    fn take_back(&self, state: &mut State) -> Option<Arc<Lease>> {
        let (_, lease) = state.put_back.pop_first()?;
        (state.own.before, state.own.stepping) = (state.before(None), true);
        Some(lease)
    }

    /// The batch of an interrupt is read again when the loop asks for it, and not before: `close` would raise what a
    /// second read raises.
    fn failed(&self, state: &mut State, error: &Error) -> bool {
        let was_raised = errors::was_raised(error);
        let at = state.at().filter(|_| was_raised || errors::is_interrupt(error));
        state.rest();
        state.own.again = at;
        !was_raised
    }

    fn over(&self, state: &mut State, whole: bool) {
        self.end_step(state);
        state.own.again = None;
        // After a state of the end of an epoch, which another plan has made, it may be past these epochs already.
        if let Some(at) = state.at().filter(|at| whole && at.epoch() < state.own.end) {
            state.own.before = Some(at.next_epoch());
        }
        state.rest();
    }

    fn ends(&self, state: &mut State) {
        self.over(state, false);
        state.own.before = state.own.before.take().or_else(|| state.at());
    }

    /// No wait for a read of this thread; nor at the end of the program for threads of Python.
    fn limit(&self, ends: bool) -> Duration {
        if is_calling(self.number) || (ends && self.foreign) { Duration::ZERO } else { LEAVE }
    }

    fn close(loader: twinbuf::Loader, limit: Duration) -> Result<(), Error> {
        loader.close_timeout(limit)
    }
}

impl State {
    /// Returns the checkpoint at which an iteration over these epochs begins: the loaded state, the position if that is
    /// their start, or the end of the epoch before them, if the position is in that epoch. `None`: the iteration begins
    /// at the start of the first one, as if all epochs before it had been run with this plan.
    fn origin(&self, epochs: &Range<u64>, single: bool) -> Option<Checkpoint> {
        let Position(at) = self.position()?;
        match &self.own.resume {
            Some(_) if at.epoch() == epochs.start || at.epoch() > epochs.start && !single => Some(at),
            _ if at.epoch().checked_add(1) == Some(epochs.start) => Some(at.next_epoch()),
            _ => Some(at).filter(|at| (at.epoch(), at.step()) == (epochs.start, 0)),
        }
    }

    /// Returns the number of batches of an iteration over these epochs that begins now.
    pub(crate) fn count(&self, plan: &Plan, epochs: Range<u64>, single: bool) -> u64 {
        match self.origin(&epochs, single) {
            Some(origin) => origin.steps_left(plan, epochs.end).unwrap_or_default(),
            None => plan.steps_between(epochs.clone(), plan.steps_between(0..epochs.start, 0)),
        }
    }

    /// Returns the number of steps of the epoch under way, or of the `next` one. The position of the loop, `at`, says which
    /// epoch is under way if a thread `sends` batches ahead of the loop: this state is then that of the thread.
    pub(crate) fn steps(&self, plan: &Plan, next: u64, sends: bool, at: Option<&Checkpoint>) -> u64 {
        let at = match &self.run {
            _ if at.is_some() => at.cloned(),
            Run::Running(epochs) if !sends => Some(epochs.checkpoint()),
            _ => self.own.again.as_ref().or(self.own.resume.as_ref()).cloned(),
        };
        at.map_or_else(
            || self.count(plan, next..next.saturating_add(1), true),
            |at| at.step() + at.steps_left(plan, at.epoch().saturating_add(1)).unwrap_or_default(),
        )
    }

    /// Ends the iteration, and forgets the batch that an interrupt kept from it.
    pub(crate) fn leave(&mut self, closes: bool) {
        self.end_iteration(closes);
        self.own.again = None;
    }

    /// Begins an iteration over these epochs, or over what a loaded state leaves of them. If it is over a single epoch and
    /// the state belongs to another one, it covers the whole epoch.
    pub(crate) fn begin(&mut self, epochs: Range<u64>, single: bool) -> Result<(), Error> {
        let origin = self.origin(&epochs, single);
        self.leave(false);
        let start = origin.as_ref().map_or(epochs.start, Checkpoint::epoch);
        if start >= epochs.end {
            // No epoch is left to iterate over: keep the position.
            return Ok(());
        }
        (self.own.before, self.own.resume) = (None, None);
        self.start(origin.as_ref(), epochs)
    }

    fn start(&mut self, from: Option<&Checkpoint>, epochs: Range<u64>) -> Result<(), Error> {
        let Some(loader) = self.run.take() else { return Ok(()) };
        self.own.end = epochs.end;
        let begun = match from {
            Some(from) => loader.into_epochs_from(from, epochs.end),
            None => Ok(loader.into_epochs(epochs)),
        };
        let refused;
        (self.run, refused) = match begun {
            Ok(running) => (Run::Running(running), Ok(())),
            Err(refused) => (Run::Idle(refused.0), Err(refused.1)),
        };
        refused
    }

    /// Returns the position after the last batch that the loop received, for `state_dict`.
    pub(crate) fn position(&self) -> Option<Position> {
        let noted = self.own.resume.as_ref().or(self.own.before.as_ref());
        noted.cloned().or_else(|| self.at()).map(Position)
    }

    /// Returns the position before the first batch that comes again, or before one on which `map` failed.
    fn before(&self, failed: Option<(u64, u64)>) -> Option<Checkpoint> {
        let (epoch, step) = self.put_back.keys().copied().chain(failed).min()?;
        self.at().filter(|after| after.epoch() == epoch).map(|after| after.with_step(step))
    }

    /// Returns the position after the last batch that the crate's loader handed out.
    pub(crate) fn at(&self) -> Option<Checkpoint> {
        match &self.run {
            Run::Idle(loader) => Some(loader.checkpoint()),
            Run::Running(epochs) => Some(epochs.checkpoint()),
            Run::Closed => None,
        }
    }
}

/// A position in a plan, cheap to take after every batch. It becomes JSON when it is saved.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Position(pub(crate) Checkpoint);

#[pymethods]
impl Position {
    /// As JSON.
    fn text(&self) -> PyResult<String> {
        serde_json::to_string(&self.0).map_err(|error| PyValueError::new_err(error.to_string()))
    }
}
