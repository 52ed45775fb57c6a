//! `_Items`: what a thread makes ahead of a loop, handed over by the crate's ring. `prefetch`, `generate` and the
//! batches of a `Loader` with a device are made of it.
//!
//! An item is in [`Iterable::made`] or returned: an exception in `next()`, such as that of Ctrl-C, puts it back there.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::task::Poll;
use std::time::{Duration, Instant};
use std::{iter, mem};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyIterator, PyList};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;
use twinbuf::pipe::{self, Around, Content, Filling, Pipe, Slots};

use crate::batch::Batch;
use crate::errors;
use crate::locked::{IsThere, LEAVE, LEFT_FOR, Locked, SLICE, detached};
use crate::number::seconds_or_none;
use crate::object::{Object, mapped};
use crate::recorder::Recorder;
use crate::report::{Kind, Report};
use crate::tensors::Group;

struct Item {
    item: Py<PyAny>,
    /// The state of the iterable after it.
    state: Option<Py<PyAny>>,
    /// It is still to be sent.
    unsent: bool,
    /// It was received, and put back.
    received: bool,
}

impl Item {
    fn new(item: Py<PyAny>, state: Option<Py<PyAny>>, unsent: bool) -> Self {
        Self { item, state, unsent, received: false }
    }
}

/// What both sides have of the iterable: one reference to each object, which the loop's iterator reports to the garbage
/// collector.
struct Iterable {
    /// Items that the loop does not have yet, in order. The ring counts them. They are here because the collector cannot
    /// look into the ring. Locked with the GIL only, and for a few instructions.
    made: Mutex<VecDeque<Item>>,
    iterator: Object,
    /// Replaces an item by what is handed over.
    send: Option<Object>,
    /// Returns the state of the iterable.
    states: Option<Object>,
}

impl Iterable {
    fn next(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let Some(iterator) = self.iterator.get(py) else { return Ok(None) };
        let item = iterator.bind(py).cast::<PyIterator>()?.clone().next().transpose()?;
        Ok(item.map(Bound::unbind))
    }

    fn send(&self, py: Python<'_>, item: Py<PyAny>) -> PyResult<Py<PyAny>> {
        match self.send.as_ref().and_then(|send| send.get(py)) {
            Some(send) => send.call1(py, (item,)),
            None => Ok(item),
        }
    }

    fn state(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        let states = self.states.as_ref().and_then(|states| states.get(py));
        states.map(|states| states.call0(py)).transpose()
    }

    fn objects(&self) -> impl Iterator<Item = &Object> {
        iter::once(&self.iterator).chain(&self.send).chain(&self.states)
    }

    fn made(&self) -> MutexGuard<'_, VecDeque<Item>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what was made for nobody. That may run Python code, so the lock is free again.
    fn drop_made(&self) {
        let made = mem::take(&mut *self.made());
        drop(made);
    }
}

/// The thread's side.
struct Source {
    iterable: Arc<Iterable>,
    shared: Arc<Making>,
    /// When it last let go of the GIL.
    since: Instant,
    /// Calls the loop of the thread, in the loop's context.
    around: Option<Py<PyAny>>,
    /// Handed to the thread.
    running: Option<Running>,
}

/// Whoever has it uses the iterable.
struct Running(Arc<Making>);

impl Running {
    fn new(making: &Arc<Making>) -> Self {
        // Relaxed: this runs before the thread starts, on the thread that may later join it.
        making.running.store(true, Ordering::Relaxed);
        Self(making.clone())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Release: the thread that joins uses the iterable next, and must see this thread's changes to it.
        self.0.running.store(false, Ordering::Release);
    }
}

/// The longest time for which the thread has the GIL if the iterable does not let go of it.
const SWITCH: Duration = Duration::from_millis(1);

/// What both sides know about the thread.
#[derive(Default)]
struct Making {
    /// No more items are wanted.
    stop: AtomicBool,
    running: AtomicBool,
    /// It was given up.
    left: AtomicBool,
    thread: Turn,
    caller: Turn,
    /// The iteration, once it has begun. Not a reference of Python's: the garbage collector would clear that too early.
    shared: OnceLock<Weak<Shared>>,
    /// Why it could not begin.
    failed: Mutex<Option<PyErr>>,
}

/// One side's hold of the GIL. A side that waits for the other to let go of it spins a little: taking it is then free of
/// calls to the system, each of which costs more than a small item.
#[derive(Default)]
struct Turn {
    holds: AtomicBool,
    /// How often not to spin, because it was for nothing.
    skip: AtomicU32,
}

impl Turn {
    /// Without the GIL: this side lets go of it for `wait`, and then waits a little for the other side to do so.
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

    /// About what a wake-up takes.
    const SPIN: Duration = Duration::from_micros(20);
    const SKIPS: u32 = 64;
}

impl Making {
    fn shared(&self) -> Option<Arc<Shared>> {
        self.shared.get().and_then(Weak::upgrade)
    }

    /// Waits for the end of the thread, if it was started, as long as `timeout`. Returns whether it ended.
    fn join(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<bool> {
        let since = Instant::now();
        // Acquire: the caller uses the iterable next, and must see the thread's changes to it.
        while self.running.load(Ordering::Acquire) {
            if timeout.is_some_and(|timeout| since.elapsed() >= timeout) {
                self.left.store(true, Ordering::Relaxed);
                return Ok(false);
            }
            py.check_signals()?;
            detached(py, || std::thread::sleep(Duration::from_micros(100)));
        }
        Ok(true)
    }
}

// Relaxed is enough for these flags: the GIL, the lock of `State` or the ring orders the data that they announce.

impl Source {
    /// Makes the next item. Returns whether there was one.
    fn make(&self, py: Python<'_>) -> PyResult<bool> {
        if self.shared.stop.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let Some(item) = self.iterable.next(py)? else { return Ok(false) };
        let item = self.iterable.send(py, item)?;
        let item = Item::new(item, self.iterable.state(py)?, false);
        self.iterable.made().push_back(item);
        Ok(true)
    }

    /// Closes a generator that was left early, in the thread that ran it.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let iterator = self.iterable.iterator.get(py);
        let Some(iterator) = iterator.filter(|_| self.shared.stop.load(Ordering::Relaxed)) else {
            return Ok(());
        };
        let generator = py.import("types")?.getattr("GeneratorType")?;
        if iterator.bind(py).is_instance(&generator)? {
            if let Err(error) = iterator.call_method0(py, "close") {
                let logger = py.import("logging")?.call_method1("getLogger", ("twinbuf",))?;
                let options = PyDict::new(py);
                options.set_item("exc_info", error.value(py))?;
                logger.call_method("error", ("prefetch: closing a generator failed",), Some(&options))?;
            }
        }
        Ok(())
    }
}

impl pipe::Source<()> for Source {
    type Unit = ();

    fn fill(&mut self, (): &mut (), (): &mut (), at: &mut Filling<'_>) -> Result<Content, Error> {
        // Attaching fails while the interpreter exits. Nobody waits for this item then.
        Python::try_attach(|py| {
            // This thread has the GIL from one item to the next, and the interpreter makes only Python code release it.
            // So release it here from time to time.
            if self.since.elapsed() > SWITCH {
                py.detach(|| ());
                self.since = Instant::now();
            }
            let made = self.make(py).map_err(|error| at.failed(error))?;
            Ok(if made { Content::Bytes(0) } else { Content::End })
        })
        .unwrap_or_else(|| Err(at.failed("the interpreter is shutting down")))
    }

    fn around(&mut self) -> Option<Around> {
        let (failed, around, running) = (self.shared.clone(), self.around.take(), self.running.take());
        let run = move |run: pipe::Loop| {
            // Dropped last, because `join` waits for this drop. Before it, the loop drops the iterable, which may block
            // and needs the GIL: the interpreter must not exit until that is done.
            let _running = running;
            let run = Mutex::new(Some(run));
            Python::try_attach(|py| {
                // The loop holds the GIL except while it waits, so that the GIL is not handed over for each item.
                let run = PyCFunction::new_closure(py, None, None, move |_, _| {
                    let run = run.lock().unwrap_or_else(PoisonError::into_inner).take();
                    run.into_iter().for_each(|run| run());
                })?;
                match around {
                    Some(around) => around.bind(py).call1((run,)).map(drop),
                    None => run.call0().map(drop),
                }
            })
            .unwrap_or(Ok(()))
            .unwrap_or_else(|error| {
                *failed.failed.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
            });
        };
        let turns = self.shared.clone();
        let wait = move |wait: &mut (dyn FnMut() + Send)| {
            let wait = Mutex::new(wait);
            let call = || wait.lock().unwrap_or_else(PoisonError::into_inner)();
            let passed = Python::try_attach(|py| py.detach(|| turns.thread.pass(&turns.caller, call)));
            passed.unwrap_or_else(call);
        };
        Some(Around { run: Box::new(run), wait: Box::new(wait) })
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        Python::try_attach(|py| {
            if let Err(error) = self.close(py) {
                error.write_unraisable(py, None);
            }
            if self.shared.stop.load(Ordering::Relaxed) {
                self.iterable.drop_made();
            }
        });
    }
}

/// The thread of an iteration, known before it starts: an interrupt of the start leaves nothing to wait for. Python's own
/// `Event` can be interrupted with its lock held.
#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Thread")]
#[derive(Default)]
pub(crate) struct Thread {
    making: Arc<Making>,
    /// The report of all iterations over the same iterable that have ended.
    total: Arc<Mutex<twinbuf::Report>>,
}

#[pymethods]
impl Thread {
    /// That of the iteration after this one, over the same iterable.
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
    /// `None` at the end, or if the loop makes its items itself.
    run: Option<pipe::Items<'static, Pipe<Slots<(), ()>>>>,
    /// Rounds that the pipe may start.
    granted: u64,
    /// How many of the items were received before an exception withheld them from the loop.
    put_back: usize,
    /// Rounds that may be started, and received ones.
    asked: u64,
    received: u64,
    /// The round that the loop has, if `after` has not run for it.
    used: Option<u64>,
    /// What `before` raised: it takes the place of the next round.
    failed: Option<PyErr>,
    total: Arc<Mutex<twinbuf::Report>>,
}

pub(crate) struct Shared {
    state: Locked<State>,
    making: Arc<Making>,
}

impl Shared {
    /// Lets the thread end as soon as it is out of the iterable. It drops what it makes meanwhile.
    fn stop(&self, py: Option<Python<'_>>) {
        self.making.stop.store(true, Ordering::Relaxed);
        match py {
            Some(py) => self.state.with(py, State::end),
            None => self.state.lock().end(),
        }
    }
}

impl State {
    /// Whether there is another item, waited for as long as `timeout`.
    fn next(&mut self, timeout: Duration) -> Poll<Result<bool, Error>> {
        self.grant();
        let Some(items) = &mut self.run else { return Poll::Ready(Ok(false)) };
        let found = if timeout.is_zero() { items.try_next() } else { items.next_timeout(timeout) };
        match found {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Ok(false)),
            Poll::Ready(Some(Ok(_))) => {
                self.received += 1;
                Poll::Ready(Ok(true))
            }
            Poll::Ready(Some(Err(error))) => {
                // If the loop goes on after this error, the next call lets the thread make further items.
                self.granted = 0;
                Poll::Ready(Err(error))
            }
        }
    }

    /// Lets what was asked for be started.
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

/// Iterations whose threads must end before the interpreter does.
static ITERATIONS: Mutex<Vec<Arc<Making>>> = Mutex::new(Vec::new());

/// The iterator that a loop has. Dropping it ends the thread.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf", name = "_Items")]
pub(crate) struct Items {
    shared: Arc<Shared>,
    /// Makes what was sent usable on the loop's thread.
    receive: Option<Py<PyAny>>,
    /// Makes of a batch what the loop gets.
    map: Option<Py<PyAny>>,
    iterable: Arc<Iterable>,
    /// Called with the number of a round before it is started.
    before: Option<Py<PyAny>>,
    /// Called with the number of a round when the loop is done with it.
    after: Option<Py<PyAny>>,
    /// The number of rounds, if an error ends them.
    rounds: Option<u64>,
    /// The state after the item that the loop has; empty at the end, where it is the iterable's own.
    place: Option<Py<PyList>>,
    /// Measures the loop, if it is over the batches of a loader.
    recorder: Option<Py<Recorder>>,
    /// Without overlap the loop sends the batches itself.
    overlap: bool,
    name: String,
}

#[pymethods]
impl Items {
    #[new]
    #[pyo3(signature = (
        iterator, depth, *, send=None, receive=None, map=None, states=None, place=None, around=None, thread=None,
        before=None, after=None, rounds=None, recorder=None, overlap=true, name="", trace=None, epoch=0
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        py: Python<'_>,
        iterator: Py<PyIterator>,
        depth: usize,
        send: Option<Py<PyAny>>,
        receive: Option<Py<PyAny>>,
        map: Option<Py<PyAny>>,
        states: Option<Py<PyAny>>,
        place: Option<Py<PyList>>,
        around: Option<Py<PyAny>>,
        thread: Option<&Bound<'_, Thread>>,
        before: Option<Py<PyAny>>,
        after: Option<Py<PyAny>>,
        rounds: Option<u64>,
        recorder: Option<Py<Recorder>>,
        overlap: bool,
        name: &str,
        trace: Option<std::path::PathBuf>,
        epoch: u64,
    ) -> PyResult<Self> {
        let own = Thread::default();
        let Thread { making, total } = thread.map_or(&own, |thread| thread.get());
        let (making, total) = (making.clone(), total.clone());
        let object = |object: Py<PyAny>| Object::new(object.bind(py));
        let (iterator, send, states) = (object(iterator.into_any()), send.map(object), states.map(object));
        let iterable = Arc::new(Iterable { made: Mutex::default(), iterator, send, states });
        let all = rounds.unwrap_or(u64::MAX);
        let asked = if before.is_some() { 0 } else { all };
        let run = if overlap {
            let (shared, since, running) = (making.clone(), Instant::now(), Some(Running::new(&making)));
            let source = Source { iterable: iterable.clone(), shared, since, around, running };
            let builder = pipe::builder(vec![(); depth]).worker(source);
            let builder = if rounds.is_some() { builder.rounds() } else { builder };
            let builder = if name.is_empty() { builder } else { builder.name(name) };
            let builder = trace.into_iter().fold(builder, |builder, path| builder.trace(path));
            let mut pipe = detached(py, || builder.build()).map_err(|error| errors::loading(py, error))?;
            pipe.begin(epoch, (0..all).map(|_| ()), 0);
            Some(pipe::Items::owned(pipe))
        } else {
            None
        };
        let state =
            State { run, granted: 0, put_back: 0, asked, received: 0, used: None, failed: None, total };
        let shared = Arc::new(Shared { state: Locked::new(state), making: making.clone() });
        making.shared.get_or_init(|| Arc::downgrade(&shared));
        let mut iterations = ITERATIONS.lock().unwrap_or_else(PoisonError::into_inner);
        iterations.retain(|making| making.running.load(Ordering::Relaxed));
        iterations.push(making);
        drop(iterations);
        let name = name.to_string();
        Ok(Self { shared, receive, map, iterable, before, after, rounds, place, recorder, overlap, name })
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.shared.state.check(py, &format!("call iter() in process {}", std::process::id()))?;
        if let Some(recorder) = &self.recorder {
            recorder.get().asked();
        }
        let found = self.next(py);
        if let Some(recorder) = &self.recorder {
            let ended = match &found {
                Ok(item) => item.is_none(),
                Err(error) => error.is_instance_of::<PyException>(py),
            };
            if ended {
                recorder.get().ended();
            }
        }
        found
    }

    /// End the thread as soon as it is out of the iterable. What it has made is dropped.
    fn close(&self, py: Python<'_>) {
        if !self.shared.state.is_forked() {
            self.stop(py);
        }
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
        visit.call(&self.receive)?;
        visit.call(&self.map)?;
        visit.call(&self.before)?;
        visit.call(&self.after)?;
        visit.call(&self.place)?;
        // The garbage collector holds the GIL, so no other thread holds this lock.
        self.iterable.made.try_lock().map_or(Ok(()), |made| {
            made.iter().try_for_each(|Item { item, state, .. }| {
                visit.call(item)?;
                visit.call(state)
            })
        })
    }

    /// Nothing else reaches the iterator: no further item is wanted.
    fn __clear__(&self) {
        self.shared.making.stop.store(true, Ordering::Relaxed);
        self.iterable.objects().for_each(Object::clear);
        self.iterable.drop_made();
    }
}

impl Items {
    fn next(&self, py: Python<'_>) -> PyResult<Option<Py<PyAny>>> {
        self.after(py)?;
        if self.before.is_some() && self.shared.state.with(py, |state| state.asked == 0) {
            self.ask(py)?;
        }
        let put_back = self.shared.state.with(py, |state| {
            let before = state.put_back;
            state.put_back = before.saturating_sub(1);
            before
        });
        let item = if put_back > 0 { self.iterable.made().pop_front() } else { self.take(py)? };
        let Some(mut item) = item else { return Ok(None) };
        // After an exception from here on, put the item back for the next call, unless `map` failed for this item.
        let mut again = true;
        let received = self.receive(py, &mut item).and_then(|found| py.check_signals().map(|()| found));
        let made = received.and_then(|found| {
            let first = !mem::replace(&mut item.received, true);
            if let (true, Some(recorder)) = (first, &self.recorder) {
                if let Some(place) = place_of(found.bind(py)) {
                    recorder.get().received(place);
                }
            }
            let Some(map) = &self.map else { return Ok(found) };
            mapped(py, map, &found).inspect_err(|raised| again = !raised.is_instance_of::<PyException>(py))
        });
        match made {
            Ok(found) => {
                if let (Some(place), Some(state)) = (&self.place, item.state) {
                    place.bind(py).set_item(0, state)?;
                }
                if self.after.is_some() {
                    self.shared.state.with(py, |state| state.used = state.received.checked_sub(1));
                }
                Ok(Some(found))
            }
            Err(raised) => {
                if again && !self.is_stopped() {
                    self.iterable.made().push_front(item);
                    self.shared.state.with(py, |state| state.put_back += 1);
                }
                Err(raised)
            }
        }
    }

    /// The next item out of the ring, or in turn; `None` at the end.
    fn take(&self, py: Python<'_>) -> PyResult<Option<Item>> {
        if let Some(error) = self.shared.state.with(py, |state| state.failed.take()) {
            self.stop(py);
            return Err(error);
        }
        if self.recorder.is_some() && (!self.overlap || self.is_stopped()) {
            // If `close` or another iteration has ended this one, this call raises the loader's error.
            let Some(item) = self.iterable.next(py)? else {
                self.at_the_end(py)?;
                return Ok(None);
            };
            return Ok(Some(Item::new(item, self.iterable.state(py)?, true)));
        }
        // Most items are ready already: there is no reason to release the GIL and wait to get it back.
        let mut found = self.shared.state.with(py, |state| state.next(Duration::ZERO));
        loop {
            let made = match found {
                Poll::Ready(made) => made,
                Poll::Pending => {
                    py.check_signals()?;
                    let Making { thread, caller, .. } = &*self.shared.making;
                    found = detached(py, || caller.pass(thread, || self.shared.state.lock().next(SLICE)));
                    continue;
                }
            };
            match made {
                Ok(true) => return Ok(self.iterable.made().pop_front()),
                Ok(false) => {
                    self.at_the_end(py)?;
                    self.shared.state.with(py, State::end);
                    if self.recorder.is_some() {
                        // Until it ends, the thread keeps the stream, and so the end of its trace.
                        self.shared.making.join(py, Some(LEAVE))?;
                    }
                    return Ok(None);
                }
                Err(error) => return Err(self.failed(py, error)),
            }
        }
    }

    /// From now on the place is the iterable's own.
    fn at_the_end(&self, py: Python<'_>) -> PyResult<()> {
        let Some(place) = self.place.as_ref().filter(|_| !self.is_stopped()) else { return Ok(()) };
        let place = place.bind(py);
        place.del_slice(0, place.len())
    }

    /// Ends the thread as soon as it is out of the iterable.
    fn stop(&self, py: Python<'_>) {
        self.shared.stop(Some(py));
        self.iterable.drop_made();
    }

    fn is_stopped(&self) -> bool {
        self.shared.making.stop.load(Ordering::Relaxed)
    }

    fn failed(&self, py: Python<'_>, error: Error) -> PyErr {
        let begun = self.shared.making.failed.lock().unwrap_or_else(PoisonError::into_inner).take();
        if self.rounds.is_some() || begun.is_some() {
            self.stop(py);
        }
        match (begun, error) {
            (Some(error), _) => error,
            (_, Error::Load { at, source }) => match source.downcast::<PyErr>() {
                Ok(raised) => *raised,
                Err(source) => errors::loading(py, Error::Load { at, source }),
            },
            (_, error) => errors::loading(py, error),
        }
    }

    /// Makes an item usable here, and lets the next round begin.
    fn receive(&self, py: Python<'_>, item: &mut Item) -> PyResult<Py<PyAny>> {
        if !self.overlap && item.unsent {
            item.item = self.iterable.send(py, item.item.clone_ref(py))?;
            item.unsent = false;
        }
        let found = match &self.receive {
            Some(receive) => receive.call1(py, (&item.item,))?,
            None => item.item.clone_ref(py),
        };
        if self.before.is_some() && self.shared.state.with(py, |state| state.asked <= state.received) {
            self.ask(py)?;
        }
        Ok(found)
    }

    /// Runs `after` for the round that the loop had. An error of it ends the rounds.
    fn after(&self, py: Python<'_>) -> PyResult<()> {
        let Some(after) = &self.after else { return Ok(()) };
        let Some(used) = self.shared.state.with(py, |state| state.used.take()) else { return Ok(()) };
        let Err(raised) = after.call1(py, (used,)) else { return Ok(()) };
        if !raised.is_instance_of::<PyException>(py) {
            self.shared.state.with(py, |state| state.used = Some(used));
            return Err(raised);
        }
        self.stop(py);
        Err(errors::not_the_end(py, "after", raised))
    }

    /// Lets the next round be started, after `before`. An error of it takes the place of that round.
    fn ask(&self, py: Python<'_>) -> PyResult<()> {
        let next = self.shared.state.with(py, |state| state.asked);
        if self.rounds.is_some_and(|rounds| next >= rounds) {
            return Ok(());
        }
        let called = self.before.as_ref().map_or(Ok(()), |before| before.call1(py, (next,)).map(drop));
        let failed = match called {
            Ok(()) => None,
            Err(error) if !error.is_instance_of::<PyException>(py) => return Err(error),
            Err(error) => Some(errors::not_the_end(py, "before", error)),
        };
        self.shared.state.with(py, |state| {
            state.asked = next + 1;
            if failed.is_some() {
                state.failed = failed;
            } else {
                state.grant();
            }
        });
        Ok(())
    }
}

impl Drop for Items {
    fn drop(&mut self) {
        if !self.shared.state.is_forked() {
            if let Some(recorder) = &self.recorder {
                recorder.get().ended();
            }
            Python::try_attach(|py| self.stop(py)).unwrap_or_else(|| self.shared.stop(None));
        }
    }
}

/// Stops all iterations, before the interpreter goes that their threads need. Returns what tells whether each is there,
/// and how long it may take to leave.
pub(crate) fn stop_all(py: Python<'_>) -> Vec<(Duration, IsThere)> {
    let iterations = mem::take(&mut *ITERATIONS.lock().unwrap_or_else(PoisonError::into_inner));
    let mut threads: Vec<(Duration, IsThere)> = Vec::new();
    for making in iterations {
        if let Some(shared) = making.shared() {
            if shared.state.is_forked() {
                return Vec::new();
            }
            shared.stop(Some(py));
        }
        let patience = if making.left.load(Ordering::Relaxed) { LEFT_FOR } else { LEAVE };
        threads.push((patience, Box::new(move || making.running.load(Ordering::Relaxed))));
    }
    threads
}

/// The epoch and the step of a batch, or of a group.
fn place_of(item: &Bound<'_, PyAny>) -> Option<(u64, u64)> {
    if let Ok(batch) = item.cast::<Batch>() {
        return Some((batch.get().epoch, batch.get().step));
    }
    item.cast::<Group>().ok().map(|group| group.get().place)
}
