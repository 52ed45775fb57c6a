//! The Rust part of `Loader`: builds a loader, begins its iterations, saves and restores its position. The rest is in
//! `twinbuf/_loader.py`.

use std::ops::Range;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::Buffer;
use twinbuf::{Breakdown, Checkpoint, Dataset, Error, LastBatch};

use crate::batch::Batch;
use crate::dtype;
use crate::engine::{Batches, Position, Shared, State};
use crate::errors::{self, Failure};
use crate::foreign::{Filler, PythonData};
use crate::iterate::{Loop, Run, Taken, closed, refused_by};
use crate::lease::Names;
use crate::locked::{check_end, detached, lock};
use crate::object::{Object, let_go};
use crate::plan::{Plan, length};
use crate::records::{Records, read_mode_of};
use crate::report::Recorder;

/// Words in serde's messages about a state, and what Python calls the same.
const IN_PYTHON: [(&str, &str); 8] = [
    ("expected u32", "expected a whole number"),
    ("expected u64", "expected a whole number"),
    ("expected a sequence", "expected a list"),
    ("expected struct Saved", "expected a dict"),
    ("struct PartialEpoch with 3 elements", "a list of 3 whole numbers"),
    ("struct PartialEpoch", "a list of 3 whole numbers"),
    ("type: null", "type: None"),
    ("them null", "them None"),
];

/// A data set: files, or an object of the program with the number of its records, its fingerprint, and the type and shape
/// of a record.
#[derive(FromPyObject)]
enum Source {
    Files(Py<Records>),
    Foreign(Py<PyAny>, u64, u64, String, Vec<usize>),
}

/// The arguments of `Loader`, whose types it has checked.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    sources: Vec<Source>,
    /// Whether a batch is a tuple of the data sets' parts.
    tuple: bool,
    /// Their names, if a batch is a dict.
    names: Option<Vec<String>>,
    name: Option<String>,
    depth: Option<usize>,
    workers: usize,
    overlap: bool,
    read_mode: String,
    memory_limit: Option<u64>,
    breakdown: Option<u64>,
    trace: Option<PathBuf>,
    /// Whether a thread sends the batches to a device.
    sends: bool,
}

impl Options {
    /// Returns a builder without the environment, and the objects of the program that the loader keeps.
    fn prepare(&self, py: Python<'_>, plan: &Plan) -> PyResult<(LoaderBuilder, Vec<Arc<Object>>)> {
        let (mut objects, mut opened, mut steps) = (Vec::new(), Vec::<Box<dyn Dataset>>::new(), Vec::new());
        for (field, source) in self.sources.iter().enumerate() {
            match source {
                &Source::Foreign(ref object, records, fingerprint, ref dtype, ref shape) => {
                    let (object, record) =
                        (Arc::new(Object::new(object.bind(py))), dtype::record(dtype, shape)?);
                    objects.push(object.clone());
                    opened.push(Box::new(PythonData { object, records, fingerprint, record }));
                }
                Source::Files(records) => {
                    let (files, of_field) = records.get().for_loader(py)?;
                    opened.push(files);
                    objects.extend(of_field.iter().filter_map(|step| step.object().cloned()));
                    steps.extend(of_field.into_iter().map(|step| (field, step)));
                }
            }
        }
        if let Some(set) = opened.first() {
            plan.check(py, set.records())?;
        }
        let builder = twinbuf::Loader::builder(opened, plan.inner.clone());
        let builder =
            steps.into_iter().fold(builder, |builder, (field, step)| builder.transform_field(field, step));
        let builder = builder.workers(self.workers).overlap(self.overlap);
        let builder = builder.read_mode(read_mode_of(py, &self.read_mode)?);
        let builder = self.memory_limit.into_iter().fold(builder, LoaderBuilder::memory_limit);
        let builder = builder.breakdown(self.breakdown.map_or(Breakdown::off(), Breakdown::every));
        let builder = self.depth.into_iter().fold(builder, LoaderBuilder::depth);
        let builder = self.name.iter().fold(builder, |builder, name| builder.name(name));
        let builder = self.trace.iter().fold(builder, |builder, path| builder.trace(path));
        let builder = if self.sends { builder.sends() } else { builder };
        let builder = if objects.is_empty() { builder } else { builder.driven() };
        Ok((builder, objects))
    }
}

/// The class `Loader` derives from this one.
#[pyclass(frozen, weakref, subclass, module = "twinbuf._twinbuf", name = "_Loader")]
pub(crate) struct Loader {
    /// Shared by the iterators and this object.
    shared: Arc<Shared>,
    /// The plan that determines the batches.
    #[pyo3(get)]
    plan: Py<Plan>,
    /// The data sets written in Python, and the functions of `Records.map`.
    objects: Vec<Arc<Object>>,
    /// What threads of Python fill its slots by, until they have it; the loop's thread without overlap.
    fillers: Mutex<Vec<Filler>>,
    /// The number of slots without the environment, and with it; the number of workers; whether a thread reads ahead;
    /// whether it runs code of the program.
    #[pyo3(get)]
    _settings: (usize, usize, usize, bool, bool),
    /// What measures the loop, if batches are sent to a device.
    #[pyo3(get)]
    _recorder: Option<Py<Recorder>>,
}

impl Loader {
    /// Returns an error in a forked process, and for a call in which the thread would wait for itself.
    fn may_ask(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.is_not_forked(py)?;
        self.shared.front.may_ask(py)
    }
}

#[pymethods]
impl Loader {
    /// ``slots``: addresses of memory for the slots, and what owns it.
    #[new]
    fn new(
        py: Python<'_>,
        plan: Py<Plan>,
        options: Options,
        slots: Option<Vec<(usize, Py<PyAny>)>>,
    ) -> PyResult<Self> {
        let (builder, objects) = options.prepare(py, plan.get())?;
        let failed = |error| errors::loading(py, error);
        let default = || builder.wanted_slots().map(|(count, _)| count);
        let asked_depth = options.depth.map_or_else(default, Ok).map_err(failed)?;
        let builder = builder.from_env().map_err(failed)?;
        let (depth, slot) = builder.wanted_slots().map_err(failed)?;
        let lent = |(start, owner): (usize, Py<PyAny>)| {
            let start = NonNull::new(start as *mut u8)?;
            // SAFETY: `_loader.py` passes the memory of tensors, each as large as `_slots` returned, all of it initialized.
            // The sender also reads it, but only that of a batch which it holds: it waits for a copy out of the slot
            // before it lets go of the batch.
            (start.addr().get() % slot.align() == 0)
                .then(|| unsafe { Buffer::lent(start, slot.size(), owner) })
        };
        let slots = slots.and_then(|slots| slots.into_iter().map(lent).collect::<Option<Vec<_>>>());
        let builder = slots.into_iter().fold(builder, LoaderBuilder::slots);
        let mut built = detached(py, || builder.build()).map_err(failed)?;
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        // Relaxed: it only has to differ.
        let (number, settings) = (NUMBER.fetch_add(1, Ordering::Relaxed), built.report().settings);
        let quick = !options.sources.iter().any(|source| matches!(source, Source::Files(_)));
        let fillers = built.driven().into_iter();
        let fillers = fillers.map(|driven| Filler::new(driven, number, quick)).collect();
        let (breakdown, foreign) = (built.breakdown(), !objects.is_empty());
        let without = if options.tuple { Names::Tuple } else { Names::One };
        let names = options.names.map_or(without, |names| Names::Dict(names.into()));
        let _recorder = Recorder::of(py, &built, options.sends)?;
        let (overlap, next_epoch) = (settings.overlap, AtomicU64::default());
        let front = Batches { names, breakdown, overlap, foreign, number, next_epoch };
        let shared = Shared::new(front, options.name, Run::Idle(built));
        let _settings = (asked_depth, depth, settings.workers, settings.overlap, foreign);
        Ok(Self { shared, plan, objects, fillers: Mutex::new(fillers), _settings, _recorder })
    }

    /// The number of slots, and the bytes of each.
    #[staticmethod]
    fn _slots(py: Python<'_>, plan: &Plan, options: Options) -> PyResult<(usize, usize)> {
        let wanted = options.prepare(py, plan)?.0.from_env().and_then(|builder| builder.wanted_slots());
        wanted.map(|(count, slot)| (count, slot.size())).map_err(|error| errors::loading(py, error))
    }

    /// What fills its slots, if that runs code of the program. They are handed out once.
    fn _fillers(&self) -> Vec<Filler> {
        std::mem::take(&mut *lock(&self.fillers))
    }

    #[getter]
    fn _name(&self) -> Option<&str> {
        self.shared.name.as_deref()
    }

    /// Refuse a forked process, and code that reads for this loader.
    fn _check(&self, py: Python<'_>) -> PyResult<()> {
        self.shared.check(py)
    }

    /// The batches of these epochs, or of the next one. ``single``: of one that was asked for alone.
    fn _epochs(
        slf: &Bound<'_, Self>,
        timeout: Option<f64>,
        epochs: Option<(u64, u64)>,
        single: bool,
    ) -> PyResult<Epochs> {
        let (py, this, timeout) = (slf.py(), slf.get(), timeout.map(Duration::from_secs_f64));
        this.shared.check(py)?;
        check_end(py)?;
        if this.shared.state.with(py, |state| state.is_closed()) {
            return Err(closed(py));
        }
        let epochs = epochs.map(|(first, end)| first..end);
        let (batches, loader) = (Loop::new(this.shared.clone(), timeout), slf.clone().unbind());
        Ok(Epochs { batches, loader, epochs, single, all: OnceLock::new(), received: AtomicU64::new(0) })
    }

    /// End the iteration under way. If the program ``closes`` the loader, refuse others. With a device, batches are sent
    /// ahead of the loop: ``at`` is the position of the loop, which ``state_dict`` then returns.
    fn _end_iteration(&self, py: Python<'_>, closes: bool, at: Option<&Position>) {
        self.shared.state.with(py, |state| {
            state.leave(closes);
            state.own.before = at.map(|at| at.0.clone()).or(state.own.before.take());
        });
    }

    /// Make ``epoch`` the next one that ``iter(loader)`` begins.
    fn set_epoch(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.shared.check(py)?;
        self.shared.state.with(py, |state| {
            self.shared.front.next_epoch.store(epoch, Ordering::Relaxed);
            state.own.loaded = false;
            state.own.resume.take_if(|resume| resume.epoch() != epoch);
        });
        Ok(())
    }

    /// Make ``epoch`` the next one for a trainer, which counts epochs from 0 on: a loaded state with steps left stays, unless
    /// it is of an earlier epoch, which the trainer has left early. After it no epoch comes again.
    fn _reach_epoch(&self, py: Python<'_>, epoch: u64) -> PyResult<()> {
        self.shared.check(py)?;
        let plan = &self.plan.get().inner;
        self.shared.state.with(py, |state| {
            let left = |at: &Checkpoint| at.steps_left(plan, at.epoch().saturating_add(1)).unwrap_or(0);
            state.own.resume.take_if(|at| at.epoch() < epoch || left(at) == 0);
            if state.own.resume.is_none() {
                let next = &self.shared.front.next_epoch;
                let least = if state.own.loaded { next.load(Ordering::Relaxed) } else { 0 };
                next.store(epoch.max(least), Ordering::Relaxed);
            }
        });
        Ok(())
    }

    /// The number of steps of this rank in the epoch under way, or in the next one. If batches are sent to a device ahead of
    /// the loop, and a loop is under way, ``at`` is its position.
    fn _len(&self, py: Python<'_>, at: Option<&Position>) -> PyResult<usize> {
        self.shared.front.may_ask(py)?;
        let (plan, next) = (&self.plan.get().inner, self.shared.front.next_epoch.load(Ordering::Relaxed));
        let (sends, at) = (self._recorder.is_some(), at.map(|at| &at.0));
        let found = self.shared.state.ask(py, |state| state.steps(plan, next, sends, at));
        // In a forked process that cannot ask, what the plan alone tells.
        length(found.unwrap_or_else(|_| plan.steps(next)))
    }

    /// The next epoch.
    fn _next_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.shared.front.may_ask(py)?;
        check_end(py)?; // there may be no modules any more
        Ok(self.shared.front.next_epoch.load(Ordering::Relaxed))
    }

    /// The position after the last received batch.
    fn _position(&self, py: Python<'_>) -> PyResult<Position> {
        self.may_ask(py)?;
        self.shared.state.with(py, |state| state.position()).ok_or_else(|| closed(py))
    }

    /// Continue from a state, which is JSON, with the next iteration.
    fn _load(&self, py: Python<'_>, state: &str) -> PyResult<()> {
        let wrong = |error: serde_json::Error| {
            let text = IN_PYTHON.iter().fold(error.to_string(), |text, (from, to)| text.replace(from, to));
            // The field before the place where the text is no state. The other errors name theirs.
            let place = serde_json::from_str::<Checkpoint>(state).map_or_else(|error| error.column(), |_| 0);
            let before = state.get(..place).filter(|_| text.starts_with("invalid"));
            let field = before.and_then(|before| before.rsplit("\":").nth(1)?.rsplit('"').next());
            let field = field.map_or(String::new(), |field| format!("field `{field}`: "));
            errors::raise(py, Failure::new("CheckpointError", format!("state: {field}{text}")))
        };
        let mut fields: serde_json::Value = serde_json::from_str(state).map_err(wrong)?;
        let own = self.plan.get().inner.last_batch();
        let last = fields.pointer_mut("/plan/last_batch").filter(|last| *last == "keep" || *last == "wrap");
        if let Some(last) = last.filter(|_| own != LastBatch::Drop) {
            // `drop_last=False` means `keep` for one rank and `wrap` for several. Both have the same steps and the same
            // records before each step, so a state of one fits the other.
            *last = serde_json::to_value(own).map_err(wrong)?;
        }
        let checkpoint: Checkpoint = serde_json::from_value(fields).map_err(wrong)?;
        let loaded = self.shared.state.with(py, |state| {
            if state.is_closed() {
                return Err(None);
            }
            // Also for a state that is refused: a loop that goes on must not take this for its end.
            state.leave(false);
            let Run::Idle(loader) = &mut state.run else { return Err(None) };
            // Check that the state is valid. This iteration has no epoch, so it reads nothing.
            drop(loader.epochs_from(&checkpoint, 0).map_err(Some)?);
            self.shared.front.next_epoch.store(checkpoint.epoch().saturating_add(1), Ordering::Relaxed);
            (state.own.before, state.own.resume, state.own.loaded) = (None, Some(checkpoint), true);
            Ok(())
        });
        loaded.map_err(|refused| refused_by(py, refused))
    }

    /// Return where the time went so far.
    fn report(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.may_ask(py)?;
        let breakdown = &self.shared.front.breakdown;
        let phases = if breakdown.is_on() { format!("\n{breakdown}") } else { String::new() };
        self.shared.report(py, self._recorder.as_ref(), phases)
    }

    /// What a thread is reading for the batch that is needed first, or None: its ``epoch`` and ``step``, for how many
    /// ``seconds``, from which ``record`` on, and the ``path`` and ``offset`` of that.
    fn reading<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.may_ask(py)?;
        let Some(reading) = self.shared.state.with(py, |state| state.run.reading()) else { return Ok(None) };
        let (path, offset) = reading.file.unzip();
        let found = PyDict::new(py);
        found.set_item("epoch", reading.at.epoch)?;
        found.set_item("step", reading.at.step)?;
        found.set_item("seconds", reading.time.as_secs_f64())?;
        found.set_item("record", reading.record)?;
        found.set_item("path", path)?;
        found.set_item("offset", offset)?;
        Ok(Some(found))
    }

    /// Stop the reading thread, within ``limit`` seconds, of which ``waited`` are over.
    fn _close(&self, py: Python<'_>, limit: Option<f64>, waited: f64) -> PyResult<()> {
        let limit = limit.map_or(Duration::MAX, Duration::from_secs_f64);
        self.shared.check(py)?;
        let (shared, since) = (&self.shared, Instant::now());
        let since = since.checked_sub(Duration::from_secs_f64(waited)).unwrap_or(since);
        shared.state.detached(py, |state| state.leave(true));
        // No other read begins. Wait for those in progress.
        let (mut raised, mut reading) = (Ok(()), None);
        while let Some(found) = shared.state.with(py, |state| state.run.reading()) {
            (raised, reading) = (py.check_signals(), Some(found));
            if raised.is_err() || since.elapsed() >= limit {
                break;
            }
            detached(py, || std::thread::sleep(Duration::from_micros(100)));
        }
        let run = shared.state.with(py, |state| {
            // For `state_dict` of the closed loader.
            state.own.before = state.own.before.take().or_else(|| state.at());
            state.take()
        });
        let waits = if raised.is_ok() { limit } else { Duration::ZERO };
        let close = |loader: twinbuf::Loader| loader.close_timeout(waits.saturating_sub(since.elapsed()));
        let closed = detached(py, || run.map_or(Ok(()), close));
        raised?;
        closed.map_err(|mut error| {
            if let Error::Timeout { waited, reading: found, .. } = &mut error {
                (*waited, *found) = (limit, found.take().or(reading));
            }
            errors::loading(py, error)
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.objects.iter().try_for_each(|object| object.traverse(&visit))
    }

    /// The garbage collector calls this if nothing in use refers to the loader or its iterators: nobody asks for
    /// another batch.
    fn __clear__(&self, py: Python<'_>) {
        let_go(py, self.objects.iter().filter_map(|object| object.take()));
    }
}

impl Drop for Loader {
    /// No iterator is left. The threads that refer to the program's code end later.
    fn drop(&mut self) {
        Python::try_attach(|py| self.__clear__(py));
    }
}

/// An iterator over the batches of a loader. The iteration begins at the first `next`, because some programs make an
/// iterator only to ask for its length.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf")]
pub(crate) struct Epochs {
    batches: Loop<Batches>,
    /// It reports the Python objects of the loader to the garbage collector.
    loader: Py<Loader>,
    /// The epochs. `None`: the next one.
    epochs: Option<Range<u64>>,
    /// Whether it is one epoch that was asked for alone.
    single: bool,
    /// The number of batches of the whole iteration, once it has begun.
    all: OnceLock<u64>,
    /// The number of batches that the loop has received.
    received: AtomicU64,
}

impl Epochs {
    /// Returns the epochs to iterate over, and the number of batches.
    fn epochs(&self, state: &State) -> (Range<u64>, u64) {
        let epochs = self.epochs.clone().unwrap_or_else(|| {
            let next = || self.batches.shared.front.next_epoch.load(Ordering::Relaxed);
            let next = state.own.resume.as_ref().map_or_else(next, Checkpoint::epoch);
            next..next.saturating_add(1)
        });
        let all = state.count(&self.loader.get().plan.get().inner, epochs.clone(), self.single);
        (epochs, all)
    }
}

#[pymethods]
impl Epochs {
    /// The number of batches of the whole iteration.
    fn all(&self, py: Python<'_>) -> PyResult<u64> {
        let count = || self.batches.shared.state.ask(py, |state| self.epochs(state).1);
        self.all.get().copied().map_or_else(count, Ok)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The batches that are left.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        // Relaxed: the count is only shown, and orders no other access.
        length(self.all(py)?.saturating_sub(self.received.load(Ordering::Relaxed)))
    }

    /// Where the time went so far, in all iterations of the loader.
    fn report(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.loader.get().report(py)
    }

    /// End the iteration, if it has begun.
    fn close(&self) {
        self.batches.leave();
    }

    /// Whether the iteration has begun.
    #[getter]
    fn has_begun(&self) -> bool {
        self.batches.has_begun()
    }

    /// Begins the iteration, unless it has begun, and ends the one before it.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        self.batches.begin(py, |state| {
            let (epochs, all) = self.epochs(state);
            let _ = self.all.set(all);
            if self.single {
                self.batches.shared.front.next_epoch.store(epochs.end, Ordering::Relaxed);
            }
            state.begin(epochs, self.single)
        })
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        self.begin(py)?;
        let lease = self.batches.next(py)?;
        self.received.fetch_add(u64::from(lease.is_some()), Ordering::Relaxed);
        Ok(lease.map(Batch::new))
    }

    /// Return the next batch, for `_loop.py`, or None if there is none yet. With ``waited``, the seconds waited so far, first
    /// wait a moment.
    fn take(&self, py: Python<'_>, waited: Option<f64>) -> PyResult<Option<Taken>> {
        self.batches.take(py, waited, |lease| Ok(Py::new(py, Batch::new(lease.clone()))?.into_any()))
    }

    /// The batch was sent to the device.
    fn _sent(&self, py: Python<'_>) {
        self.batches.used(py);
    }

    /// The position after the last batch that the loop received.
    fn _position(&self, py: Python<'_>) -> Option<Position> {
        self.batches.shared.state.with(py, |state| state.position())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.loader)
    }
}
