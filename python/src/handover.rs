//! `_Items`: an iterator whose items a thread makes ahead of the loop. `prefetch`, `generate`, and a `Loader` or a stream
//! with a device return it.
//!
//! The thread is one of Python's, and its loop is a function of `_drive.py`: the iterable's code never has a frame of Rust
//! below it, so the interpreter may end the thread at any time. The thread drives a worker of the crate's pipe, a
//! [`Worker`].
//!
//! No item is lost: if `next()` raises an exception, such as that of Ctrl-C, it puts the item back into
//! [`Iterable::made`]. Where the loop's thread calls functions of the program for each item, `_loop.py` is the iterator,
//! and [`Items::take`] gives it the items.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};
use std::{iter, mem};

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::{PyIterator, PyList};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;
use twinbuf::pipe::{self, Driven, Pipe, Slots};

use crate::errors;
use crate::locked::{Locked, SLICE, check_end, detached};
use crate::number::seconds_or_none;
use crate::object::Object;
use crate::report::{Kind, Report};
use crate::taken::{Left, Taken};

struct Item {
    item: Py<PyAny>,
    /// The state of the iterable after this item.
    state: Option<Py<PyAny>>,
}

/// The iterable, and the functions that are called for its items. The thread and the loop share it. It has the only
/// reference to each of these Python objects; [`Items`] reports them to the garbage collector.
struct Iterable {
    /// Items that the loop has yet to receive, in order. The slots of the ring are empty: the ring only counts the
    /// items, because the garbage collector cannot look into it. A thread locks this only while attached to Python,
    /// and for a few instructions.
    made: Mutex<VecDeque<Item>>,
    iterator: Object,
    /// A function that replaces an item before it is handed over: it sends it to the device, or makes tensors of arrays.
    send: Option<Object>,
    /// A function that returns the state of the iterable.
    states: Option<Object>,
}

impl Iterable {
    fn objects(&self) -> impl Iterator<Item = &Object> {
        iter::once(&self.iterator).chain(&self.send).chain(&self.states)
    }

    fn made(&self) -> MutexGuard<'_, VecDeque<Item>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops the items that nobody will receive, after it has released the lock: a drop may run Python code.
    fn drop_made(&self) {
        let made = mem::take(&mut *self.made());
        drop(made);
    }
}

/// Whoever has this may use the iterable. [`Making::join`] waits for its drop.
struct Running(Arc<Making>);

impl Running {
    fn new(making: &Arc<Making>) -> Self {
        // SeqCst: either this thread sees that it is to stop, or the thread that joins it sees that it runs.
        making.running.store(true, Ordering::SeqCst);
        Self(making.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Release: the thread that joins uses the iterable next, and must see this thread's changes to it.
        self.0.running.store(false, Ordering::Release);
    }
}

/// What the thread and the loop share about the thread.
#[derive(Default)]
struct Making {
    /// The loop wants no more items.
    stop: AtomicBool,
    /// Whether a [`Running`] exists.
    running: AtomicBool,
    thread: Hold,
    caller: Hold,
    /// The iteration, once it has begun. It is no reference of Python: the garbage collector would clear that too
    /// early.
    shared: OnceLock<Weak<Shared>>,
}

/// Whether one of two threads, the pipe's or the loop's, holds the GIL. A thread that needs the GIL first spins until
/// the other one has released it. It then takes the GIL without system calls, each of which costs more than a small
/// item.
#[derive(Default)]
struct Hold {
    holds: AtomicBool,
    /// How many more spins to leave out, because one was in vain.
    skip: AtomicU32,
}

impl Hold {
    /// Runs `wait`, for which this thread has released the GIL. Then spins until the other thread has released it too,
    /// or for [`SPIN`](Self::SPIN).
    fn pass<T>(&self, other: &Self, wait: impl FnOnce() -> T) -> T {
        self.holds.store(false, Ordering::Relaxed);
        let found = wait();
        let skip = self.skip.load(Ordering::Relaxed);
        self.skip.store(skip.saturating_sub(1), Ordering::Relaxed);
        let start = Instant::now();
        while skip == 0 && other.holds.load(Ordering::Relaxed) {
            if start.elapsed() > Self::SPIN {
                self.skip.store(Self::SKIPS, Ordering::Relaxed);
                break;
            }
            std::hint::spin_loop();
        }
        self.holds.store(true, Ordering::Relaxed);
        found
    }

    /// About as long as it takes to wake a thread up.
    const SPIN: Duration = Duration::from_micros(20);
    /// How many spins to leave out after one in vain.
    const SKIPS: u32 = 64;
}

impl Making {
    fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.get().and_then(Weak::upgrade)
    }

    /// Waits up to `timeout` for the end of the thread, if it was started. Returns whether it has ended.
    fn join(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<bool> {
        let since = Instant::now();
        // SeqCst, which includes Acquire: the caller uses the iterable next, and must see the thread's changes to it.
        while self.running.load(Ordering::SeqCst) {
            if timeout.is_some_and(|timeout| since.elapsed() >= timeout) {
                return Ok(false);
            }
            py.check_signals()?;
            detached(py, || std::thread::sleep(Duration::from_micros(100)));
        }
        Ok(true)
    }
}

// Relaxed is enough for all other uses of the flags of `Making` and `Hold`: the GIL, the lock of `State` or the ring
// orders the data that they announce.

/// What the thread of an iteration drives. Only that thread calls it.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Worker")]
pub(crate) struct Worker {
    // Dropped in this order: the pipe is told that the worker leaves, and then `join` that the iterable is free.
    driven: Mutex<Driven<Slots<(), ()>>>,
    iterable: Arc<Iterable>,
    making: Arc<Making>,
    /// Set when the thread first asks. A thread that Ctrl-C kept from starting is not waited for.
    running: OnceLock<Running>,
    /// Whether the thread has used the iterable.
    used: AtomicBool,
}

impl Worker {
    fn driven(&self) -> MutexGuard<'_, Driven<Slots<(), ()>>> {
        self.driven.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the fill that `next` began.
    fn end_fill(&self, end: impl FnOnce(pipe::Fill<'_, Slots<(), ()>>)) {
        if let Poll::Ready(Some(fill)) = self.driven().try_next() {
            end(fill);
        }
    }
}

#[pymethods]
impl Worker {
    /// Wait until an item is wanted. False: no further one is, or the program is ending.
    fn next(&self, py: Python<'_>) -> bool {
        self.running.get_or_init(|| Running::new(&self.making));
        if self.making.stop.load(Ordering::SeqCst) {
            return false;
        }
        // Most slots are free already: there is no reason to release the GIL.
        let found = self.try_next() || {
            let (Making { thread, caller, .. }, mut driven) = (&*self.making, self.driven());
            let driven = &mut *driven;
            let wait = || driven.next().map(pipe::Fill::suspend).is_some();
            detached(py, || thread.pass(caller, wait))
        };
        found && !self.making.stop.load(Ordering::Relaxed)
    }

    /// Whether an item is wanted now.
    fn try_next(&self) -> bool {
        let found = self.driven().try_next().map(|fill| fill.map(pipe::Fill::suspend).is_some());
        found == Poll::Ready(true)
    }

    /// The iterable; None if it was collected.
    fn iterator(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.used.store(true, Ordering::Relaxed);
        self.iterable.iterator.get(py)
    }

    /// A function that replaces an item before it is handed over.
    fn send(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.iterable.send.as_ref().and_then(|send| send.get(py))
    }

    /// A function that returns the state of the iterable.
    fn states(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.iterable.states.as_ref().and_then(|states| states.get(py))
    }

    /// Hand over an item, and the state of the iterable after it.
    #[pyo3(signature = (item, state=None))]
    fn answer(&self, item: Py<PyAny>, state: Option<Py<PyAny>>) {
        self.iterable.made().push_back(Item { item, state });
        self.end_fill(|fill| fill.commit(0));
    }

    /// There are no more items.
    fn end(&self) {
        self.end_fill(|fill| {
            fill.end();
        });
    }

    /// The iterable raised this.
    fn fail(&self, raised: &Bound<'_, PyAny>) {
        self.end_fill(|mut fill| {
            let error = fill.parts().2.failed(PyErr::from_value(raised.clone()));
            fill.fail(error);
        });
    }

    /// The iterable, if the loop has left it early, and drop what was made.
    fn left(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        if !self.making.stop.load(Ordering::Relaxed) {
            return None;
        }
        self.iterable.drop_made();
        if self.used.load(Ordering::Relaxed) { self.iterable.iterator.get(py) } else { None }
    }
}

/// A handle of an iteration's thread, made before the thread. If Ctrl-C interrupts the start, `join` finds that there
/// is no thread. A `threading.Event` would not do: Ctrl-C can interrupt it while its lock is held.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Thread")]
#[derive(Default)]
pub(crate) struct Thread {
    making: Arc<Making>,
    /// The reports of the iterations over the same iterable that have ended, added up.
    total: Arc<Mutex<twinbuf::Report>>,
}

#[pymethods]
impl Thread {
    /// Makes the handle of an iteration. `before`: that of the iteration before it, over the same iterable.
    #[new]
    #[pyo3(signature = (before=None))]
    fn new(before: Option<&Bound<'_, Self>>) -> Self {
        let total = before.map_or_else(Arc::default, |before| before.get().total.clone());
        Self { making: Arc::default(), total }
    }

    /// Where the time of all iterations went so far.
    fn report(&self, py: Python<'_>, name: &str) -> Report {
        let report = match self.making.shared() {
            Some(shared) => shared.state.with(py, |state| state.report()),
            None => self.total.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        Report::new(report, name, Kind::Prefetched)
    }

    /// Wait for its end, if it was started, for at most so many seconds. Returns whether it ended.
    #[pyo3(signature = (timeout=None))]
    fn join(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<bool> {
        self.making.join(py, seconds_or_none("timeout", timeout)?)
    }
}

struct State {
    /// The crate's iterator. `None` at the end.
    run: Option<pipe::Items<'static, Pipe<Slots<(), ()>>>>,
    /// The number of rounds that the pipe was told it may start.
    granted: u64,
    /// The number of items that `next()` has received and put back into `made`, at its front.
    put_back: usize,
    /// The number of rounds that may be started: those for which `before` has run.
    asked: u64,
    total: Arc<Mutex<twinbuf::Report>>,
}

pub(crate) struct Shared {
    state: Locked<State>,
    making: Arc<Making>,
}

impl Shared {
    /// Ends the iteration. The thread ends as soon as the iterable returns, and drops what it has made meanwhile.
    fn stop(&self, py: Option<Python<'_>>) {
        self.making.stop.store(true, Ordering::SeqCst);
        match py {
            Some(py) => self.state.with(py, State::end),
            None => self.state.lock().end(),
        }
    }
}

impl State {
    /// Waits up to `timeout` for the next item. Returns whether there is one: it is then in [`Iterable::made`].
    fn next(&mut self, timeout: Duration) -> Poll<Result<bool, Error>> {
        self.grant();
        let Some(items) = &mut self.run else { return Poll::Ready(Ok(false)) };
        let found = if timeout.is_zero() { items.try_next() } else { items.next_timeout(timeout) };
        match found {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Ok(false)),
            Poll::Ready(Some(Ok(_))) => Poll::Ready(Ok(true)),
            Poll::Ready(Some(Err(error))) => {
                // If the loop goes on after this error, the next call lets the thread make further items.
                self.granted = 0;
                Poll::Ready(Err(error))
            }
        }
    }

    /// Tells the pipe that it may start the rounds that were asked for.
    fn grant(&mut self) {
        if let Some(items) = self.run.as_mut().filter(|_| self.granted < self.asked) {
            items.resume(self.asked);
            self.granted = self.asked;
        }
    }

    /// Ends the iteration.
    fn end(&mut self) {
        self.put_back = 0;
        if let Some(pipe) = self.run.take().and_then(pipe::Items::into_front) {
            let mut total = self.total.lock().unwrap_or_else(PoisonError::into_inner);
            *total = total.then(pipe.report());
            drop(total);
            // Do not wait for the thread. It ends as soon as it has made its current item.
            let _ = pipe.close_timeout(Duration::ZERO);
        }
    }

    fn report(&self) -> twinbuf::Report {
        let total = self.total.lock().unwrap_or_else(PoisonError::into_inner);
        match &self.run {
            Some(items) => total.then(items.report()),
            None => total.clone(),
        }
    }
}

/// The iterations whose threads must end before the interpreter does.
static ITERATIONS: Mutex<Vec<Arc<Making>>> = Mutex::new(Vec::new());

/// The iterator that a loop has. Dropping it ends the thread.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf", name = "_Items")]
pub(crate) struct Items {
    shared: Arc<Shared>,
    iterable: Arc<Iterable>,
    /// For `generate`, the number of rounds: an error ends them. `None` for other iterables: they may go on after one.
    rounds: Option<u64>,
    /// What the thread drives, until the thread takes it; the loop's thread without overlap.
    worker: Mutex<Option<Py<Worker>>>,
    /// A list that the Python code reads: the state of the iterable after the last item that the loop received. It is
    /// empty at the end, where that is the present state of the iterable.
    place: Option<Py<PyList>>,
    name: String,
}

#[pymethods]
impl Items {
    #[new]
    #[pyo3(signature = (
        iterator, depth, *, send=None, states=None, place=None, thread=None, rounds=None, lockstep=false,
        overlap=true, name="", trace=None, epoch=0
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        py: Python<'_>,
        iterator: Py<PyIterator>,
        depth: usize,
        send: Option<Py<PyAny>>,
        states: Option<Py<PyAny>>,
        place: Option<Py<PyList>>,
        thread: Option<&Bound<'_, Thread>>,
        rounds: Option<u64>,
        lockstep: bool,
        overlap: bool,
        name: &str,
        trace: Option<std::path::PathBuf>,
        epoch: u64,
    ) -> PyResult<Self> {
        check_end(py)?;
        let own = Thread::default();
        let Thread { making, total } = thread.map_or(&own, |thread| thread.get());
        let (making, total) = (making.clone(), total.clone());
        let object = |object: Py<PyAny>| Object::new(object.bind(py));
        let (iterator, send, states) = (object(iterator.into_any()), send.map(object), states.map(object));
        let iterable = Arc::new(Iterable { made: Mutex::default(), iterator, send, states });
        let all = rounds.unwrap_or(u64::MAX);
        let asked = if lockstep { 0 } else { all };
        let builder = pipe::builder(vec![(); depth]).driven().overlap(overlap);
        let builder = if rounds.is_some() { builder.rounds() } else { builder };
        let builder = if name.is_empty() { builder } else { builder.name(name) };
        let builder = trace.into_iter().fold(builder, |builder, path| builder.trace(path));
        let mut pipe = detached(py, || builder.build()).map_err(|error| errors::loading(py, error))?;
        pipe.begin(epoch, (0..all).map(|_| ()), 0);
        let mut worker = None;
        if let Some(driven) = pipe.driven().pop() {
            let (driven, iterable, making) = (Mutex::new(driven), iterable.clone(), making.clone());
            let (running, used) = (OnceLock::new(), AtomicBool::new(false));
            worker = Some(Py::new(py, Worker { driven, iterable, making, running, used })?);
        }
        let run = Some(pipe::Items::owned(pipe));
        let state = State { run, granted: 0, put_back: 0, asked, total };
        let shared = Arc::new(Shared { state: Locked::new(state), making: making.clone() });
        making.shared.get_or_init(|| Arc::downgrade(&shared));
        let mut iterations = ITERATIONS.lock().unwrap_or_else(PoisonError::into_inner);
        iterations.retain(|making| making.shared().is_some());
        iterations.push(making);
        drop(iterations);
        let (name, worker) = (name.to_string(), Mutex::new(worker));
        Ok(Self { shared, iterable, rounds, worker, place, name })
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let mut waits = false;
        loop {
            match self.next(py, waits)? {
                Poll::Pending => waits = true,
                Poll::Ready(None) => return Ok(None),
                Poll::Ready(Some(item)) => {
                    // Handle signals now: an exception raised later would lose the item.
                    if let Err(raised) = py.check_signals() {
                        self.put_back(py, item);
                        return Err(raised);
                    }
                    return self.hand_out(py, item).map(Some);
                }
            }
        }
    }

    /// The next item, for `_loop.py`. None: there is none yet, also after a short wait if that is wanted.
    fn take(slf: &Bound<'_, Self>, waits: bool) -> PyResult<Option<Taken>> {
        let (py, own) = (slf.py(), slf.clone().unbind());
        match slf.get().next(py, waits)? {
            Poll::Pending => Ok(None),
            Poll::Ready(None) => Err(PyStopIteration::new_err(())),
            Poll::Ready(Some(item)) => {
                Ok(Some(Taken::new(item.item.clone_ref(py), move |py, left| match left {
                    Left::Out => drop(own.get().hand_out(py, item)),
                    Left::Back if !own.get().is_stopped() => own.get().put_back(py, item),
                    Left::Back | Left::Gone => {}
                })))
            }
        }
    }

    /// Let this many rounds begin in all.
    fn grant(&self, py: Python<'_>, rounds: u64) {
        self.shared.state.with(py, |state| {
            state.asked = rounds;
            state.grant();
        });
    }

    /// What the thread drives. It is handed out once.
    fn worker(&self) -> Option<Py<Worker>> {
        self.worker.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// End the thread as soon as it is out of the iterable. What it has made is dropped.
    fn close(&self, py: Python<'_>) {
        if !self.shared.state.is_forked() {
            self.stop(py);
        }
    }

    /// Whether `close` has ended it.
    #[getter]
    fn is_closed(&self) -> bool {
        self.is_stopped()
    }

    /// Whether there are no more items.
    #[getter]
    fn ended(&self, py: Python<'_>) -> bool {
        self.shared.state.with(py, |state| state.run.is_none() && state.put_back == 0)
    }

    /// Where the time went so far.
    fn report(&self, py: Python<'_>) -> Report {
        let report = self.shared.state.with(py, |state| state.report());
        let kind = if self.rounds.is_some() { Kind::Rounds } else { Kind::Prefetched };
        Report::new(report, &self.name, kind)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.iterable.objects().try_for_each(|object| object.traverse(&visit))?;
        visit.call(&self.place)?;
        // No other thread holds this lock: a thread takes it only while attached to Python, and runs no Python code until
        // it lets go. So the garbage collector does not run in between.
        self.iterable.made.try_lock().map_or(Ok(()), |made| {
            made.iter().try_for_each(|Item { item, state, .. }| {
                visit.call(item)?;
                visit.call(state)
            })
        })
    }

    /// The garbage collector calls this if nothing in use refers to the iterator: nobody wants another item.
    fn __clear__(&self) {
        self.shared.making.stop.store(true, Ordering::Relaxed);
        self.iterable.objects().for_each(Object::clear);
        self.iterable.drop_made();
    }
}

impl Items {
    /// Asks for the next item, and waits for it for one [`SLICE`] at most, or not at all. `None` at the end.
    fn next(&self, py: Python<'_>, waits: bool) -> PyResult<Poll<Option<Item>>> {
        self.shared.state.check(py, &format!("call iter() in process {}", std::process::id()))?;
        if waits {
            py.check_signals()?;
        }
        check_end(py)?;
        let Making { thread, caller, .. } = &*self.shared.making;
        let next = |state: &mut State, timeout| match state.put_back.checked_sub(1) {
            Some(rest) => {
                state.put_back = rest;
                Poll::Ready(Ok(true))
            }
            None => state.next(timeout),
        };
        let found = match waits {
            // Most items are ready already: there is no reason to release the GIL and wait to get it back.
            false => self.shared.state.with(py, |state| next(state, Duration::ZERO)),
            true => detached(py, || caller.pass(thread, || next(&mut self.shared.state.lock(), SLICE))),
        };
        match found {
            Poll::Pending => Ok(Poll::Pending),
            Poll::Ready(Ok(true)) => {
                let item = self.iterable.made().pop_front();
                // There is none if the end of the program or `close` has dropped it.
                check_end(py).map(|()| Poll::Ready(item))
            }
            Poll::Ready(Ok(false)) => {
                check_end(py)?; // which is not the end of the items
                self.at_the_end(py)?;
                self.shared.state.with(py, State::end);
                Ok(Poll::Ready(None))
            }
            Poll::Ready(Err(error)) => Err(self.failed(py, error)),
        }
    }

    /// Hands an item to the loop.
    fn hand_out(&self, py: Python<'_>, item: Item) -> PyResult<Py<PyAny>> {
        if let (Some(place), Some(state)) = (&self.place, item.state) {
            place.bind(py).set_item(0, state)?;
        }
        Ok(item.item)
    }

    /// Keeps an item for the next call.
    fn put_back(&self, py: Python<'_>, item: Item) {
        self.iterable.made().push_front(item);
        self.shared.state.with(py, |state| state.put_back += 1);
    }

    /// Empties `place`: from now on the state after the last item is that of the iterable.
    fn at_the_end(&self, py: Python<'_>) -> PyResult<()> {
        let Some(place) = self.place.as_ref().filter(|_| !self.is_stopped()) else { return Ok(()) };
        let place = place.bind(py);
        place.del_slice(0, place.len())
    }

    /// Ends the iteration, and its thread as soon as the iterable returns. Drops what was made for the loop.
    fn stop(&self, py: Python<'_>) {
        self.shared.stop(Some(py));
        self.iterable.drop_made();
    }

    fn is_stopped(&self) -> bool {
        self.shared.making.stop.load(Ordering::Relaxed)
    }

    fn failed(&self, py: Python<'_>, error: Error) -> PyErr {
        if self.rounds.is_some() {
            self.stop(py);
        }
        match error {
            Error::Load { at, source } => match source.downcast::<PyErr>() {
                Ok(raised) => *raised,
                Err(source) => errors::loading(py, Error::Load { at, source }),
            },
            error => errors::loading(py, error),
        }
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        if !self.shared.state.is_forked() {
            Python::try_attach(|py| self.stop(py)).unwrap_or_else(|| self.shared.stop(None));
        }
    }
}

/// Stops all iterations, because the program ends.
pub(crate) fn stop_all(py: Python<'_>) {
    let iterations = mem::take(&mut *ITERATIONS.lock().unwrap_or_else(PoisonError::into_inner));
    let shared = iterations.iter().filter_map(|making| making.shared());
    shared.filter(|shared| !shared.state.is_forked()).for_each(|shared| shared.stop(Some(py)));
}
