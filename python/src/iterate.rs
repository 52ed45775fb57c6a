//! The loop of every iterator in Rust, over any front: it waits in slices and handles signals between two of them,
//! keeps an item that `next` received and did not return, frees the slots of items that the program keeps, and ends
//! with the program.
//!
//! No thread waits while it holds both the lock and the GIL. A wait with the lock lasts for [`SLICE`] at most.

use std::collections::{BTreeMap, VecDeque};
use std::mem;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyMemoryError, PyStopIteration};
use pyo3::prelude::*;
use twinbuf::loader::Reading;
use twinbuf::{Error, pipe};

use crate::errors::{self, Failure};
use crate::lease::{Lease, NoMemory};
use crate::locked::{ENDING, LEAVE, Locked, SLICE, check_end, detached, lock};
use crate::report::{self, Recorder, report};

/// How long to wait for a slot in use: another thread may be about to release it.
const PATIENCE: Duration = Duration::from_millis(100);

/// What differs between the batches of a loader, the groups of a stream, and the items of an iterable.
pub(crate) trait Front: Sized + Send + Sync + 'static {
    /// The crate's loader, stream or pipe.
    type Run: pipe::Front + Send + 'static;
    /// What the loop receives.
    type Item: Send + 'static;
    /// What else the lock guards.
    type Own: Default + Send;
    /// What to do in place of a call in a forked process.
    const AFTER_FORK: &'static str;

    /// Refuses calls that would wait for ever, other than those in a forked process.
    fn check(&self, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    /// Whether asking for an item reads it, also where no wait is wanted.
    fn reads(&self) -> bool {
        false
    }

    /// Whether the threads of the loop make the items, in `_loop.py`: none comes while they wait here, only a slot.
    fn is_made_by_loop(&self) -> bool {
        false
    }

    /// Runs a wait, for which this thread has released the GIL.
    fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        wait()
    }

    /// The loop asks for its next item.
    fn asked(&self, _state: &mut State<Self>) {}

    /// Makes an item of what the crate handed out. `None`: there is no such item any more.
    fn received(&self, state: &mut State<Self>, found: Found<Self>) -> Result<Option<Self::Item>, Error>;

    /// Keeps an item that was not handed to the loop, to come `again` or not. Returns it if it is not kept.
    fn put_back(&self, state: &mut State<Self>, item: Self::Item, again: bool) -> Option<Self::Item>;

    /// Takes the first item that was put back.
    fn take_back(&self, state: &mut State<Self>) -> Option<Self::Item> {
        state.put_back.pop_first().map(|(_, item)| item)
    }

    /// The item passes to the loop, or back from it.
    fn passes(&self, _py: Python<'_>, _item: &mut Self::Item, _to_loop: bool) {}

    /// A fill has failed. Returns whether the loop gets the error.
    fn failed(&self, state: &mut State<Self>, _error: &Error) -> bool {
        state.rest();
        true
    }

    /// The iteration is over: it came to its end, or the loop has left it.
    fn over(&self, state: &mut State<Self>, _whole: bool) {
        state.rest();
    }

    /// The program ends. What a finalizer may ask for stays.
    fn ends(&self, state: &mut State<Self>) {
        self.over(state, false);
    }

    /// The loop is told that there are no more items.
    fn tell_end(&self, _py: Python<'_>) -> PyResult<()> {
        Ok(())
    }

    fn raise(&self, py: Python<'_>, error: Error) -> PyErr {
        errors::loading(py, error)
    }

    /// How long to wait for what is being read, when the last reference is dropped or the program ends.
    fn limit(&self, _ends: bool) -> Duration {
        LEAVE
    }

    fn close(run: Self::Run, limit: Duration) -> Result<(), Error>;
}

/// What the crate hands out.
pub(crate) type Found<F> = <<F as Front>::Run as pipe::Front>::Item;

/// A loader or a stream of tensors of the crate, or an iteration that owns it.
#[allow(clippy::large_enum_variant, reason = "there is one for each loader or stream")]
#[derive(Default)]
pub(crate) enum Run<R: pipe::Front + 'static> {
    Idle(R),
    Running(pipe::Items<'static, R>),
    #[default]
    Closed,
}

impl<R: pipe::Front + 'static> Run<R> {
    /// Ends the iteration, if there is one, and returns the loader or stream.
    pub(crate) fn take(&mut self) -> Option<R> {
        match mem::take(self) {
            Self::Idle(run) => Some(run),
            Self::Running(items) => items.into_front(),
            Self::Closed => None,
        }
    }

    pub(crate) fn report(&self) -> Option<twinbuf::Report> {
        match self {
            Self::Idle(run) => Some(run.pipe().report()),
            Self::Running(items) => Some(items.report()),
            Self::Closed => None,
        }
    }

    /// Returns what a thread is reading now for the item that the loop needs first.
    pub(crate) fn reading(&self) -> Option<Reading> {
        match self {
            Self::Idle(run) => run.pipe().reading(),
            Self::Running(items) => items.reading(),
            Self::Closed => None,
        }
    }
}

/// The state of a front, behind a lock.
pub(crate) struct State<F: Front> {
    pub(crate) run: Run<F::Run>,
    /// The number of the newest iteration. Older ones get no more items.
    pub(crate) iteration: u64,
    /// Set when the program closes the loader: from then on no iteration can begin.
    closes: bool,
    /// Items that `next` received and has not returned, while signals are handled, or because it raised an exception such as
    /// that of Ctrl-C. By epoch and step. The following `next` returns the first one. There are several if threads share the
    /// iterator.
    pub(crate) put_back: BTreeMap<(u64, u64), F::Item>,
    /// Items that were handed out and may be in use, in their order, with the number of their iteration.
    leases: VecDeque<(u64, Weak<Lease>)>,
    /// The number of items that left their slots because the loop kept them in their iteration.
    pub(crate) kept: u64,
    /// The report, once it was closed.
    last_report: twinbuf::Report,
    pub(crate) own: F::Own,
}

/// What a loader, a stream or an iteration and its iterators share.
pub(crate) struct Shared<F: Front> {
    pub(crate) state: Locked<State<F>>,
    pub(crate) front: F,
    pub(crate) name: Option<String>,
}

/// The result of requesting an item: `None` at the end, or why there is none.
type Asked<I> = Result<Poll<Option<I>>, Refused>;

enum Refused {
    Failed(Error),
    /// Another iteration has started since.
    Replaced,
    Closed,
}

impl<F: Front> State<F> {
    /// Asks for the next item of an iteration. `timeout` limits waits, not fills.
    fn next(&mut self, front: &F, iteration: u64, timeout: Duration) -> Asked<F::Item> {
        if self.iteration != iteration {
            return Err(if self.is_closed() { Refused::Closed } else { Refused::Replaced });
        }
        front.asked(self);
        if let Some(item) = front.take_back(self) {
            return Ok(Poll::Ready(Some(item)));
        }
        let Run::Running(items) = &mut self.run else { return Ok(Poll::Ready(None)) };
        let found = if timeout.is_zero() { items.try_next() } else { items.next_timeout(timeout) };
        Ok(match found {
            Poll::Pending => Poll::Pending,
            Poll::Ready(Some(Ok(found))) => {
                Poll::Ready(front.received(self, found).map_err(Refused::Failed)?)
            }
            Poll::Ready(Some(Err(error))) => match front.failed(self, &error) {
                true => return Err(Refused::Failed(error)),
                // It asks again, so that what makes the item need not wait for the next request.
                false => return self.next(front, iteration, timeout),
            },
            Poll::Ready(None) => {
                front.over(self, true);
                Poll::Ready(None)
            }
        })
    }

    /// Notes an item that the loop receives.
    pub(crate) fn lent(&mut self, lease: &Arc<Lease>) {
        // Forget items that were freed, so that the list does not grow.
        self.leases.retain(|(_, lease)| lease.strong_count() > 0);
        self.leases.push_back((self.iteration, Arc::downgrade(lease)));
    }

    /// Returns how long the program has used the next slot, if it still does.
    fn held_for(&self) -> Option<Duration> {
        let Run::Running(items) = &self.run else { return None };
        items.held_for()
    }

    /// If the program still uses the next slot, frees the slot of the oldest item: the item takes the memory along, and
    /// the slot gets new memory. Returns whether this was the first item that the loop has kept, or an error if there was
    /// no memory.
    ///
    /// The first time this happens only after the slot has been held for [`PATIENCE`]. Later it happens at once, because
    /// a loop that has kept one item keeps others. It also happens at once for an item of an earlier iteration: probably
    /// only a loop variable refers to that.
    fn free_a_slot(&mut self) -> Result<bool, NoMemory> {
        let Some(held_for) = self.held_for() else { return Ok(false) };
        while let Some((iteration, lease)) = self.leases.pop_front() {
            let Some(kept) = lease.upgrade() else { continue };
            let left_over = iteration != self.iteration;
            if !left_over && held_for < PATIENCE && self.kept == 0 {
                self.leases.push_front((iteration, lease));
                return Ok(false);
            }
            // After an error the next call tries again.
            if kept.leave_slot().inspect_err(|_| self.leases.push_front((iteration, lease)))? {
                self.kept += u64::from(!left_over);
                return Ok(self.kept == 1 && !left_over);
            }
        }
        Ok(false)
    }

    pub(crate) fn report(&self) -> twinbuf::Report {
        self.run.report().unwrap_or_else(|| self.last_report.clone())
    }

    /// Takes the loader, stream or pipe, to close it. Its report stays.
    pub(crate) fn take(&mut self) -> Option<F::Run> {
        self.last_report = self.report();
        self.run.take()
    }

    /// Ends the iteration, if there is one. From now on its iterator has no more items.
    pub(crate) fn rest(&mut self) {
        self.put_back.clear();
        self.run = self.run.take().map_or(Run::Closed, Run::Idle);
    }

    /// Ends the iteration. From now on `next` of its iterator raises an error, which tells whether the program closes
    /// the loader.
    pub(crate) fn end_iteration(&mut self, closes: bool) {
        self.rest();
        self.iteration += 1;
        self.closes |= closes;
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closes || matches!(self.run, Run::Closed)
    }
}

impl<F: Front> Shared<F> {
    /// Makes what iterators share. The end of the program ends its threads.
    pub(crate) fn new(front: F, name: Option<String>, run: Run<F::Run>) -> Arc<Self> {
        let (put_back, leases, last_report, own) = Default::default();
        let state = State { run, iteration: 0, closes: false, put_back, leases, kept: 0, last_report, own };
        let shared = Arc::new(Self { state: Locked::new(state), front, name });
        let mut all = lock(&ALL);
        all.retain(|shared| shared.strong_count() > 0);
        all.push(Arc::<Self>::downgrade(&shared));
        shared
    }

    /// Refuses calls that would wait for ever.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.is_not_forked(py)?;
        self.front.check(py)
    }

    /// Refuses a forked process.
    pub(crate) fn is_not_forked(&self, py: Python<'_>) -> PyResult<()> {
        self.state.check(py, F::AFTER_FORK)
    }

    /// Returns where the time of a loader or a stream went so far. With the recorder of a loop over items on a device, the
    /// report is made of two: that of the recorder, which measures the loop, and that of the loader or stream.
    pub(crate) fn report(
        &self,
        py: Python<'_>,
        recorder: Option<&Py<Recorder>>,
        phases: String,
    ) -> PyResult<Py<PyAny>> {
        let (reads, kept) = self.state.with(py, |state| (state.report(), state.kept));
        let found = match recorder {
            Some(recorder) => lock(&recorder.get().0).report().on_device(reads),
            None => reads,
        };
        let name = self.name.as_deref().unwrap_or_default();
        report(py, &found, &report::Loop { name, bytes: true, kept, phases, ..Default::default() })
    }

    /// Takes an item back that `next` does not return, to come `again` or not.
    fn put_back(&self, py: Python<'_>, iteration: u64, item: F::Item, again: bool) {
        // What is refused is dropped without the lock, because that may run Python code. In a forked process, the lock may
        // belong to a thread that is not there.
        let _ = self.state.ask(py, |state| match state.iteration == iteration {
            true => self.front.put_back(state, item, again),
            false => Some(item),
        });
    }
}

impl<F: Front> Drop for Shared<F> {
    /// Waits for a read in progress, for a limited time.
    fn drop(&mut self) {
        let Some(run) = self.state.get_mut().run.take() else { return };
        let close = || F::close(run, self.front.limit(false));
        // Nobody can receive the error.
        let _ = match Python::try_attach(|_| ()) {
            Some(()) => Python::attach(|py| detached(py, close)),
            None => close(),
        };
    }
}

/// What must end before the interpreter does.
trait Ends: Send + Sync {
    fn end(&self, until: Instant);
}

static ALL: Mutex<Vec<Weak<dyn Ends>>> = Mutex::new(Vec::new());

impl<F: Front> Ends for Shared<F> {
    /// Takes the loader, stream or pipe away from its iterators, and closes it.
    fn end(&self, until: Instant) {
        if let Some(mut state) = self.state.lock_until(until) {
            self.front.ends(&mut state);
            let run = state.take();
            drop(state);
            let limit = self.front.limit(true).min(until.saturating_duration_since(Instant::now()));
            let _ = run.map(|run| F::close(run, limit));
        }
    }
}

/// The program begins to end: iterations are cut off, and all threads end. Waits for up to half of [`LEAVE`] for the
/// crate's own, which read files; `_drive.py` waits for those of Python. Returns how many seconds of [`LEAVE`] are left.
#[pyfunction]
pub(crate) fn _begin_end(py: Python<'_>) -> PyResult<f64> {
    errors::classes(py)?;
    ENDING.store(true, Ordering::SeqCst);
    report::CLASS.import(py, "twinbuf._report", "Report")?;
    let (all, start) = (mem::take(&mut *lock(&ALL)), Instant::now());
    all.iter().filter_map(Weak::upgrade).for_each(|shared| detached(py, || shared.end(start + LEAVE / 2)));
    Ok(LEAVE.saturating_sub(start.elapsed()).as_secs_f64())
}

pub(crate) fn replaced(py: Python<'_>) -> PyErr {
    let message = "this iteration is over: another has begun, or a state was loaded";
    errors::raise(py, Failure::new("LoaderError", message))
}

/// The error of a call that the loader refused with an error, or because it was closed.
pub(crate) fn refused_by(py: Python<'_>, error: Option<Error>) -> PyErr {
    error.map_or_else(|| closed(py), |error| errors::loading(py, error))
}

pub(crate) fn closed(py: Python<'_>) -> PyErr {
    errors::raise(py, Failure::new("LoaderError", "the loader was closed"))
}

/// An iteration. Its drop ends it.
pub(crate) struct Loop<F: Front> {
    pub(crate) shared: Arc<Shared<F>>,
    /// Its number, once it has begun.
    number: OnceLock<u64>,
    /// The longest wait for an item.
    timeout: Option<Duration>,
}

impl<F: Front> Loop<F> {
    pub(crate) fn new(shared: Arc<Shared<F>>, timeout: Option<Duration>) -> Self {
        Self { shared, number: OnceLock::new(), timeout }
    }

    /// Begins the iteration, unless it has begun: `begin` makes it the newest one.
    pub(crate) fn begin(
        &self,
        py: Python<'_>,
        begin: impl FnOnce(&mut State<F>) -> Result<(), Error> + Send,
    ) -> PyResult<()> {
        if self.has_begun() {
            return Ok(());
        }
        self.shared.check(py)?;
        check_end(py)?;
        let begun = self.shared.state.with(py, |state| match self.number.get() {
            Some(_) => Ok(()), // another thread was first
            None if state.is_closed() => Err(None),
            None => begin(state).map(|()| _ = self.number.set(state.iteration)).map_err(Some),
        });
        begun.map_err(|refused| refused_by(py, refused))
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.number.get().is_some()
    }

    fn number(&self) -> u64 {
        self.number.get().copied().unwrap_or_default()
    }

    /// Whether this iteration is under way.
    pub(crate) fn is_current(&self, state: &State<F>) -> bool {
        self.number.get() == Some(&state.iteration)
    }

    /// Asks for the next item, and waits for it for one [`SLICE`] at most, or not at all: `waited` is how long this call
    /// of `next` has waited for it. `None` at the end.
    fn ask(&self, py: Python<'_>, waited: Option<Duration>) -> PyResult<Poll<Option<F::Item>>> {
        let Shared { state, front, .. } = &*self.shared;
        self.shared.check(py)?;
        check_end(py)?;
        let next = |state: &mut State<F>| state.next(front, self.number(), Duration::ZERO);
        // If this call reads the item itself, signals come meanwhile as they do in a wait.
        let waited = waited.or(front.reads().then_some(Duration::ZERO));
        let asked = match waited {
            Some(waited) => {
                let rest = self.timeout.map_or(SLICE, |timeout| timeout.saturating_sub(waited).min(SLICE));
                let wait = || {
                    let (since, made_here) = (Instant::now(), front.is_made_by_loop());
                    loop {
                        let mut state = state.lock();
                        // Which slot is needed may have changed since this thread asked.
                        let mut found = (Ok(false), next(&mut state));
                        if matches!(found.1, Ok(Poll::Pending)) {
                            let slice = if made_here { Duration::ZERO } else { rest };
                            found = (state.free_a_slot(), state.next(front, self.number(), slice));
                        }
                        let waits = made_here && matches!(found, (Ok(false), Ok(Poll::Pending)));
                        if !waits || state.held_for().is_none() || since.elapsed() >= rest {
                            let (freed, asked) = found;
                            let Ok(Poll::Ready(Some(item))) = asked else { return (freed, Ok(asked)) };
                            return (freed, Err(front.put_back(&mut state, item, true)));
                        }
                        // Without the lock: another thread may be about to ask.
                        drop(state);
                        std::thread::sleep(Duration::from_micros(100));
                    }
                };
                let (freed, asked) = detached(py, || front.wait(wait));
                // An error of the item goes first: it comes only once.
                if !matches!(asked, Ok(Err(_))) {
                    // An item was put back: a signal's handler finds the position before it, and may end the iteration.
                    self.tell(py, freed)?;
                    py.check_signals()?;
                }
                // The handler may have forked. If it or another thread has the item, no other is read here, with the GIL.
                let gone =
                    |state: &State<F>| front.reads() && state.put_back.is_empty() && self.is_current(state);
                let next = |state: &mut State<F>| if gone(state) { Ok(Poll::Pending) } else { next(state) };
                let asked = asked.or_else(|_| self.shared.check(py).map(|()| state.with(py, next)))?;
                // Not before it has asked: a loop that waits for nothing has kept items too.
                if let (true, Ok(Poll::Pending), Some(waited)) = (rest.is_zero(), &asked, self.timeout) {
                    let reading = state.with(py, |state| state.run.reading());
                    return Err(front.raise(py, Error::Timeout { waited, reading }));
                }
                asked
            }
            // Most items are ready already: there is no reason to release the GIL and wait to get it back.
            None => state.with(py, next),
        };
        if matches!(asked, Ok(Poll::Ready(None)) | Err(_)) {
            // What the end of the program, or another iteration, cut off has not come to its end.
            check_end(py).and_then(|()| self.shared.check(py))?;
        }
        match asked {
            Ok(Poll::Ready(None)) => front.tell_end(py).map(|()| Poll::Ready(None)),
            Ok(found) => Ok(found),
            Err(Refused::Failed(error)) => Err(front.raise(py, error)),
            Err(Refused::Closed) => Err(closed(py)),
            Err(Refused::Replaced) => Err(replaced(py)),
        }
    }

    /// Waits for the next item.
    pub(crate) fn next(&self, py: Python<'_>) -> PyResult<Option<F::Item>> {
        let mut since = None::<Instant>;
        loop {
            match self.ask(py, since.map(|since| since.elapsed()))? {
                Poll::Pending => _ = since.get_or_insert_with(Instant::now),
                Poll::Ready(None) => return Ok(None),
                // Handle signals now: an exception raised later would lose the item.
                Poll::Ready(Some(item)) => match py.check_signals() {
                    Ok(()) => return Ok(Some(item)),
                    Err(raised) => {
                        self.shared.put_back(py, self.number(), item, true);
                        return Err(raised);
                    }
                },
            }
        }
    }

    /// Returns the next item, for `_loop.py`, as `object` shows it, or `None` if there is none yet. With `waited`, the seconds
    /// that this call of `next` has waited, it first waits a moment.
    pub(crate) fn take(
        &self,
        py: Python<'_>,
        waited: Option<f64>,
        object: impl FnOnce(&F::Item) -> PyResult<Py<PyAny>>,
    ) -> PyResult<Option<Taken>> {
        match self.ask(py, waited.map(Duration::from_secs_f64))? {
            Poll::Pending => Ok(None),
            Poll::Ready(None) => Err(PyStopIteration::new_err(())),
            Poll::Ready(Some(mut item)) => {
                let (shared, number, object) = (self.shared.clone(), self.number(), object(&item)?);
                shared.front.passes(py, &mut item, true);
                let back: Back = Box::new(move |py, again| {
                    shared.front.passes(py, &mut item, false);
                    shared.put_back(py, number, item, again);
                });
                Ok(Some(Taken { item: object, back: Mutex::new(Some(back)) }))
            }
        }
    }

    /// The loop's use of its item is over.
    pub(crate) fn used(&self, py: Python<'_>) {
        self.shared.state.with(py, |state| {
            if let (true, Run::Running(items)) = (self.is_current(state), &mut state.run) {
                items.used();
            }
        });
    }

    /// Ends the iteration, if it is under way.
    pub(crate) fn leave(&self) {
        let Shared { state, front, .. } = &*self.shared;
        if !self.has_begun() || state.is_forked() {
            return;
        }
        let leave = |state: &mut State<F>| {
            if self.is_current(state) {
                front.over(state, false);
            }
        };
        if Python::try_attach(|py| state.with(py, leave)).is_none() {
            leave(&mut state.lock());
        }
    }

    /// Logs that an item which the loop keeps has left its slot, for the first one, or raises that there was no memory.
    fn tell(&self, py: Python<'_>, freed: Result<bool, NoMemory>) -> PyResult<()> {
        let no_memory = "no memory for a batch that was kept: let go of earlier batches";
        if !freed.map_err(|NoMemory| PyMemoryError::new_err(no_memory))? {
            return Ok(());
        }
        let name = self.shared.name.as_ref().map_or(String::new(), |name| format!("{name}: "));
        let line = format!(
            "{name}all slots were in use for {} s, so one got new memory, and so will others: let go of batches, tensors \
             and arrays sooner, raise `depth`, or keep copies",
            PATIENCE.as_secs_f32()
        );
        // The handlers of the program are called in a thread of their own.
        let (told, since) = (py.import("twinbuf._drive")?.call_method1("tell", (line,))?, Instant::now());
        while told.call_method0("locked")?.is_truthy()? && since.elapsed() < LEAVE {
            py.check_signals()?;
            detached(py, || std::thread::sleep(Duration::from_micros(100)));
        }
        Ok(())
    }
}

impl<F: Front> Drop for Loop<F> {
    /// If the loop was left early, stop reading ahead for it.
    fn drop(&mut self) {
        self.leave();
    }
}

/// An item that was taken for the loop. If `_loop.py` does not hand it out, for example after Ctrl-C, the next call
/// returns it again, unless a function of the program failed for it.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Taken")]
pub(crate) struct Taken {
    #[pyo3(get)]
    item: Py<PyAny>,
    /// What gives it back. `None`: the loop has it, or gave it back.
    back: Mutex<Option<Back>>,
}

type Back = Box<dyn FnOnce(Python<'_>, bool) + Send>;

#[pymethods]
impl Taken {
    /// The loop gets it. It is an attribute because no signal is handled between a store to one and a return.
    #[setter]
    fn set_handed_out(&self, _yes: bool) {
        let back = lock(&self.back).take();
        drop(back);
    }

    /// The next call has it ``again``, or nobody: a function of the program failed for it.
    fn back(&self, py: Python<'_>, again: bool) {
        let back = lock(&self.back).take();
        back.into_iter().for_each(|back| back(py, again));
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        Python::try_attach(|py| self.back(py, true));
    }
}
