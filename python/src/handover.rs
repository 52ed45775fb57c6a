//! `_Items`: an iterator whose items a thread makes ahead of the loop. `prefetch`, `generate`, and a `Loader` or a stream
//! with a device return or wrap it.
//!
//! The thread is one of Python's, and its loop is a function of `_drive.py`: the iterable's code never has a frame of Rust
//! below it, so the interpreter may end the thread at any time. The thread drives a worker of the crate's pipe, a
//! [`Worker`].
//!
//! Where the loop's thread calls functions of the program for each item, `_loop.py` is the iterator, and [`Items::take`]
//! gives it the items.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::task::Poll;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};
use std::{iter, mem};

use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;
use twinbuf::pipe::{self, Driven, Filled, Pipe, Slots};

use crate::errors::{self, Failure};
use crate::iterate::{self, Front, Loop, Run, Taken};
use crate::locked::{check_end, detached, is_over, lock};
use crate::object::{Object, let_go};
use crate::report::{self, report};

pub(crate) struct Item {
    item: Py<PyAny>,
    /// The state of the iterable after this item; while the loop has it, and may give it back, the one before it.
    state: Option<Py<PyAny>>,
    /// Its number, once it was received; after it was put back, the newest one then.
    number: u64,
}

/// The state of the thread that makes the items. That thread and the loop that receives the items share it.
#[derive(Default)]
struct Making {
    /// The loop wants no more items.
    stop: AtomicBool,
    /// Whether the thread may use the iterable: from its first request for work until it leaves, or its worker is dropped.
    /// [`Thread::join`] waits for the end of that. A thread that Ctrl-C kept from starting is not waited for.
    running: AtomicBool,
    /// The thread, once it asks for work.
    maker: OnceLock<ThreadId>,
    /// Whether another iteration has begun that has the iterator of this one.
    replaced: AtomicBool,
    thread: Hold,
    caller: Hold,
    /// The iteration, once it has begun. It is no reference of Python: the garbage collector would clear that too
    /// early.
    shared: OnceLock<Weak<Shared>>,
    /// The reports of the iterations over the same iterable that have ended, added up.
    total: Arc<Mutex<twinbuf::Report>>,
}

/// Whether one of two threads, the pipe's or the loop's, holds the GIL. A thread that needs the GIL first spins for a
/// short time until the other one has released it. It then takes the GIL without system calls, each of which costs more
/// than a small item.
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
        let mut start = None;
        while skip == 0 && other.holds.load(Ordering::Relaxed) {
            if start.get_or_insert_with(Instant::now).elapsed() > Self::SPIN {
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
    /// Refuses what would wait for ever in the thread that makes the items.
    fn is_not_making(&self, py: Python<'_>) -> PyResult<()> {
        if self.maker.get().is_none_or(|maker| *maker != thread::current().id()) {
            return Ok(());
        }
        let message = "code that makes the items of an iterator used it, which would wait for itself";
        Err(errors::raise(py, Failure::new("LoaderError", message)))
    }
}

// Relaxed is enough for all other uses of the flags of `Making` and `Hold`: the GIL, the lock of `State` or the ring
// orders the data that they announce.

/// What the thread of an iteration drives, or without overlap the loop's. Only one thread at a time calls it.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Worker")]
pub(crate) struct Worker {
    /// `None` once the thread has left.
    driven: Mutex<Option<Driven<Slots<(), ()>>>>,
    shared: Arc<Shared>,
    /// Whether the thread has used the iterable.
    used: AtomicBool,
}

impl Worker {
    /// Passes the present fill to `take`: a new one, or the one that `next` suspended. Returns `false` if none is wanted.
    fn fill(&self, take: impl FnOnce(pipe::Fill<'_, Slots<(), ()>>)) -> bool {
        let mut driven = lock(&self.driven);
        let Some(Poll::Ready(Some(fill))) = driven.as_mut().map(Driven::try_next) else { return false };
        take(fill);
        true
    }
}

#[pymethods]
impl Worker {
    /// Wait until an item is wanted. False: no further one is, or the program is ending, or the iterable's code has forked and
    /// this is the child, which has no loop.
    fn next(&self, py: Python<'_>) -> bool {
        let making = &self.shared.front.making;
        // SeqCst: either this thread sees that it is to stop, or the thread that joins it sees that it runs.
        making.running.store(true, Ordering::SeqCst);
        making.maker.get_or_init(|| thread::current().id());
        if making.stop.load(Ordering::SeqCst) || self.shared.state.is_forked() {
            return false;
        }
        // Most slots are free already: there is no reason to release the GIL.
        let found = self.try_next() || {
            let driven = &mut *lock(&self.driven);
            let wait = || driven.as_mut().and_then(Driven::next).map(pipe::Fill::suspend).is_some();
            detached(py, || making.thread.pass(&making.caller, wait))
        };
        found && !making.stop.load(Ordering::Relaxed)
    }

    /// Whether an item is wanted now.
    fn try_next(&self) -> bool {
        self.fill(|fill| fill.suspend())
    }

    /// The iterable, a function that replaces an item before it is handed over, and one that returns the state of the
    /// iterable. None if they were collected.
    fn parts(&self, py: Python<'_>) -> Option<Py<PyAny>> {
        self.used.store(true, Ordering::Relaxed);
        self.shared.front.parts.get(py)
    }

    /// Hand over an item, and the state of the iterable after it. Returns whether another one is wanted now, unless this
    /// was to be the only one: then ``kept`` is a list that has had it until now.
    fn answer(
        &self,
        item: Py<PyAny>,
        state: Option<Py<PyAny>>,
        kept: Option<&Bound<'_, PyList>>,
    ) -> PyResult<bool> {
        lock(&self.shared.front.made).push_back(Item { item, state, number: 0 });
        self.fill(|fill| fill.commit(0));
        if let Some(kept) = kept {
            return kept.del_slice(0, kept.len()).map(|()| false);
        }
        Ok(!self.shared.front.is_stopped() && self.try_next())
    }

    /// There are no more items.
    fn end(&self) {
        self.fill(|fill| fill.end());
    }

    /// The iterable raised this. ``here``: this thread raises it itself.
    fn fail(&self, raised: Bound<'_, PyAny>, here: bool) {
        self.fill(|mut fill| {
            let error = fill.parts().2.failed(errors::of_call(raised, here));
            fill.fail(error);
        });
    }

    /// Leaves the pipe, and lets `Thread::join` return. The thread calls it when it no longer uses the iterable. The drop of
    /// the worker may come much later: the frames of a kept exception refer to it.
    fn leave(&self) {
        // Without the lock, because a drop may run Python code.
        let driven = lock(&self.driven).take();
        drop(driven);
        // Release: the thread that joins uses the iterable next, and must see this thread's changes to it.
        self.shared.front.making.running.store(false, Ordering::Release);
    }

    /// Whether the loop has left early what the thread has used; and all that only this thread needs, to be dropped where no
    /// frame of Rust is below: the parts, or None if they were collected, and items.
    fn left(&self) -> (bool, Option<Py<PyAny>>, Vec<Py<PyAny>>) {
        let front = &self.shared.front;
        let items = if front.is_stopped() { front.take_made().collect() } else { Vec::new() };
        (front.is_stopped() && self.used.load(Ordering::Relaxed), front.parts.take(), items)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.leave();
    }
}

/// A handle of an iteration's thread, made before the thread. If Ctrl-C interrupts the start, `join` finds that there
/// is no thread. A `threading.Event` would not do: Ctrl-C can interrupt it while its lock is held.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Thread")]
pub(crate) struct Thread(Arc<Making>);

#[pymethods]
impl Thread {
    /// Makes the handle of an iteration. `before`: that of the iteration before it, over the same iterable.
    #[new]
    #[pyo3(signature = (before=None))]
    fn new(before: Option<&Bound<'_, Self>>) -> Self {
        let total = before.map_or_else(Arc::default, |before| before.get().0.total.clone());
        Self(Arc::new(Making { total, ..Making::default() }))
    }

    /// Where the time of all iterations went so far.
    fn report(&self, py: Python<'_>, name: &str) -> PyResult<Py<PyAny>> {
        let own = |state: &mut State| state.run.report().map(|own| lock(&self.0.total).then(own));
        let shared = self.0.shared.get().and_then(Weak::upgrade);
        let found = shared.map(|shared| shared.state.ask(py, own)).transpose()?.flatten();
        let found = found.unwrap_or_else(|| lock(&self.0.total).clone());
        report(py, &found, &report::Loop { name, ..Default::default() })
    }

    /// Wait for its end, if it was started, for at most so many seconds. Returns whether it ended.
    fn join(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let since = Instant::now();
        // SeqCst: see `Worker::next`. It includes Acquire: the caller uses the iterable next, and must see the thread's
        // changes.
        while self.0.running.load(Ordering::SeqCst) {
            self.0.is_not_making(py)?;
            if timeout.is_some_and(|timeout| since.elapsed().as_secs_f64() >= timeout) {
                return Ok(false);
            }
            py.check_signals()?;
            if timeout.is_none() || is_over() {
                check_end(py)?; // such a thread may never end, or gets no GIL
            }
            detached(py, || thread::sleep(Duration::from_micros(100)));
        }
        Ok(true)
    }
}

/// The items that a thread makes, as a front: the iterable, and the functions that are called for its items. [`Items`]
/// reports them to the garbage collector.
pub(crate) struct Ahead {
    /// Items that the loop has yet to receive, in order, those that were put back too. The slots of the ring are empty:
    /// the ring only counts the items, because the garbage collector cannot look into it. A thread locks this for a few
    /// instructions. It runs no Python code while it has the lock.
    made: Mutex<VecDeque<Item>>,
    /// A tuple: the iterable; a function that replaces an item before it is handed over, as it sends it to the device or makes
    /// tensors of arrays, or None; a function that returns the state of the iterable, or None.
    parts: Object,
    making: Arc<Making>,
    /// `true` for the rounds of `generate`, which end with an error. Other iterables may go on after an error.
    rounds: bool,
    /// A list that the Python code reads: the state of the iterable after the last item that the loop received. It is
    /// empty at the end, where that is the present state of the iterable.
    place: Option<Py<PyList>>,
    /// The largest number of an item that the loop took. Relaxed: the GIL orders its uses.
    newest: AtomicU64,
}

#[derive(Default)]
pub(crate) struct Counts {
    /// Whether the thread makes further items only once the loop asks for one: it is the first round, or the iterable failed
    /// and may go on.
    waits: bool,
    /// The number of items at the front of [`Ahead::made`] that were put back.
    put_back: usize,
    /// The number of items that were received.
    received: u64,
}

type Shared = iterate::Shared<Ahead>;
type State = iterate::State<Ahead>;

impl Ahead {
    /// Takes the items that nobody will receive. Their drop may run Python code, so the lock is free by then.
    fn take_made(&self) -> impl Iterator<Item = Py<PyAny>> {
        let made = mem::take(&mut *lock(&self.made));
        made.into_iter().flat_map(|Item { item, state, .. }| iter::once(item).chain(state))
    }

    fn is_stopped(&self) -> bool {
        self.making.stop.load(Ordering::Relaxed)
    }
}

impl Front for Ahead {
    type Run = Pipe<Slots<(), ()>>;
    type Item = Item;
    type Own = Counts;

    const AFTER_FORK: &'static str = "make the iterator in this process";

    fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.making.replaced.load(Ordering::Relaxed) {
            return Err(iterate::replaced(py));
        }
        self.making.is_not_making(py)
    }

    fn wait<T>(&self, wait: impl FnOnce() -> T) -> T {
        self.making.caller.pass(&self.making.thread, wait)
    }

    fn asked(&self, state: &mut State) {
        if let (true, Run::Running(items)) = (mem::take(&mut state.own.waits), &mut state.run) {
            items.resume(u64::MAX);
        }
    }

    fn received(&self, state: &mut State, _: Filled<(), ()>) -> Result<Option<Item>, Error> {
        state.own.received += 1;
        // There is none if `close` or the end of the program has dropped it.
        Ok(lock(&self.made).pop_front().map(|item| Item { number: state.own.received, ..item }))
    }

    fn put_back(&self, state: &mut State, item: Item, again: bool) -> Option<Item> {
        if !again || self.is_stopped() {
            return Some(item);
        }
        lock(&self.made).push_front(item);
        state.own.put_back += 1;
        None
    }

    fn take_back(&self, state: &mut State) -> Option<Item> {
        state.own.put_back = state.own.put_back.checked_sub(1)?;
        lock(&self.made).pop_front()
    }

    /// Exchanges the state at `place`, for the loop, and that of the item.
    fn passes(&self, py: Python<'_>, item: &mut Item, to_loop: bool) {
        if !to_loop {
            item.number = self.newest.load(Ordering::Relaxed); // the state that it gets is as new
        } else if self.newest.fetch_max(item.number, Ordering::Relaxed) > item.number {
            item.state = None; // another thread took a later item first
        }
        let (Some(place), Some(state)) = (&self.place, &mut item.state) else { return };
        let place = place.bind(py);
        // The list has one element, or none.
        let _ = place.get_item(0).and_then(|other| place.set_item(0, mem::replace(state, other.unbind())));
    }

    fn failed(&self, state: &mut State, error: &Error) -> bool {
        match self.rounds {
            true => self.over(state, false),
            false => state.own.waits = true,
        }
        !errors::was_raised(error)
    }

    /// Ends the iteration. When the iterable returns, the thread drops the item and ends.
    fn over(&self, state: &mut State, whole: bool) {
        // SeqCst: see `Worker::next`.
        self.making.stop.fetch_or(!whole, Ordering::SeqCst);
        state.own.put_back = 0;
        // This ends the use of the last item, which the report then has.
        if let Some(pipe) = state.run.take() {
            let mut total = lock(&self.making.total);
            *total = total.then(pipe.report());
            drop(total);
            let _ = pipe.close_timeout(Duration::ZERO);
        }
    }

    /// Empties `place`: from now on the state after the last item is that of the iterable.
    fn tell_end(&self, py: Python<'_>) -> PyResult<()> {
        let place = self.place.as_ref().filter(|_| !self.is_stopped()).map(|place| place.bind(py));
        place.map_or(Ok(()), |place| place.del_slice(0, place.len()))
    }

    fn raise(&self, py: Python<'_>, error: Error) -> PyErr {
        match error {
            Error::Load { source, .. } if source.is::<PyErr>() => errors::of_transform(py, source),
            error => errors::loading(py, error),
        }
    }

    /// Does not wait for the thread. It ends as soon as it has made its present item.
    fn limit(&self, _: bool) -> Duration {
        Duration::ZERO
    }

    fn close(pipe: Pipe<Slots<(), ()>>, limit: Duration) -> Result<(), Error> {
        pipe.close_timeout(limit)
    }
}

/// The iterator that a loop has. Dropping it ends the thread.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf", name = "_Items")]
pub(crate) struct Items {
    items: Loop<Ahead>,
    /// What the thread drives, until the thread takes it; the loop's thread without overlap.
    driven: Mutex<Option<Driven<Slots<(), ()>>>>,
}

#[pymethods]
impl Items {
    #[new]
    #[pyo3(signature = (
        parts, depth, *, place=None, thread=None, rounds=None, waits=false, overlap=true, name=None, trace=None,
        epoch=0
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        py: Python<'_>,
        parts: &Bound<'_, PyAny>,
        depth: usize,
        place: Option<Py<PyList>>,
        thread: Option<&Bound<'_, Thread>>,
        rounds: Option<u64>,
        waits: bool,
        overlap: bool,
        name: Option<String>,
        trace: Option<std::path::PathBuf>,
        epoch: u64,
    ) -> PyResult<Self> {
        check_end(py)?;
        let making = thread.map_or_else(Arc::default, |thread| thread.get().0.clone());
        let (parts, all) = (Object::new(parts), rounds.unwrap_or(u64::MAX));
        let builder = pipe::builder(vec![(); depth]).driven().overlap(overlap);
        let builder = if rounds.is_some() { builder.rounds() } else { builder };
        let builder = name.iter().fold(builder, |builder, name| builder.name(name));
        let builder = trace.into_iter().fold(builder, |builder, path| builder.trace(path));
        let mut pipe = detached(py, || builder.build()).map_err(|error| errors::loading(py, error))?;
        pipe.begin(epoch, (0..all).map(|_| ()), if rounds.is_some() { 0 } else { all });
        let driven = Mutex::new(pipe.driven().pop());
        let (made, rounds) = (Mutex::default(), rounds.is_some());
        let front = Ahead { made, parts, making, rounds, place, newest: AtomicU64::default() };
        let run = Run::Running(pipe::Items::owned(pipe));
        let shared = iterate::Shared::new(front, name, run);
        shared.front.making.shared.get_or_init(|| Arc::downgrade(&shared));
        let items = Loop::new(shared, None);
        items.begin(py, |state| {
            state.own.waits = waits;
            Ok(())
        })?;
        Ok(Self { items, driven })
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        Ok(self.items.next(py)?.map(|mut item| {
            self.items.shared.front.passes(py, &mut item, true);
            item.item
        }))
    }

    /// Return the next item, for `_loop.py`, or None if there is none yet. With ``waited``, the seconds waited so far, first
    /// wait a moment.
    fn take(&self, py: Python<'_>, waited: Option<f64>) -> PyResult<Option<Taken>> {
        self.items.take(py, waited, |item| Ok(item.item.clone_ref(py)))
    }

    /// Refuse calls that would wait for ever.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.items.shared.check(py)
    }

    /// Let this many rounds begin in all.
    fn grant(&self, py: Python<'_>, rounds: u64) -> PyResult<()> {
        self.items.shared.state.ask(py, |state| {
            if let Run::Running(items) = &mut state.run {
                items.resume(rounds);
            }
        })
    }

    /// What the thread drives. It is handed out once.
    fn worker(&self) -> Option<Worker> {
        let driven = Mutex::new(Some(lock(&self.driven).take()?));
        Some(Worker { driven, shared: self.items.shared.clone(), used: AtomicBool::new(false) })
    }

    /// End the thread as soon as it is out of the iterable. What it has made is dropped.
    fn close(&self, py: Python<'_>) {
        if !self.items.shared.state.is_forked() {
            self.items.leave();
            let_go(py, self.items.shared.front.take_made());
        }
    }

    /// End it, because another iteration is about to begin that has its iterator: further calls raise an error.
    fn replace(&self, py: Python<'_>) {
        self.items.shared.front.making.replaced.store(true, Ordering::Relaxed);
        self.close(py);
    }

    /// Whether it was ended before its last item.
    #[getter]
    fn is_closed(&self) -> bool {
        self.items.shared.front.is_stopped()
    }

    /// Whether there are no more items, and a loop was told so, or has left early.
    #[getter]
    fn ended(&self, py: Python<'_>) -> PyResult<bool> {
        let Shared { state, front, .. } = &*self.items.shared;
        let told = front.is_stopped() || front.place.as_ref().is_none_or(|place| place.bind(py).is_empty());
        state.ask(py, |state| told && matches!(state.run, Run::Closed) && state.own.put_back == 0)
    }

    /// Where the time went so far.
    fn report(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        let thread = Thread(self.items.shared.front.making.clone());
        thread.report(py, self.items.shared.name.as_deref().unwrap_or_default())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let front = &self.items.shared.front;
        front.parts.traverse(&visit)?;
        visit.call(&front.place)?;
        // If another thread holds this lock, do not report the items: the collector then keeps them until its next run.
        front.made.try_lock().map_or(Ok(()), |made| {
            made.iter().try_for_each(|Item { item, state, .. }| {
                visit.call(item)?;
                visit.call(state)
            })
        })
    }

    /// The garbage collector calls this if nothing in use refers to the iterator: nobody wants another item.
    fn __clear__(&self, py: Python<'_>) {
        let front = &self.items.shared.front;
        front.making.stop.store(true, Ordering::Relaxed);
        let_go(py, front.parts.take().into_iter().chain(front.take_made()));
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        // Without an interpreter, the drop of `items` leaves the iteration.
        Python::try_attach(|py| {
            self.close(py);
            let front = &self.items.shared.front;
            // If no thread runs, only this call can drop them.
            if !front.making.running.load(Ordering::Relaxed) {
                let_go(py, front.parts.take());
            }
        });
    }
}
