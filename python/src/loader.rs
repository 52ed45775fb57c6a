//! `Loader`: builds a loader, begins its iterations, saves and restores its position.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyRange, PyType};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::{Breakdown, Checkpoint, Dataset, Error, LastBatch};

use crate::batch::Batch;
use crate::dataset::{self, PythonData};
use crate::device;
use crate::engine::{Batches, Progress, Shared, State};
use crate::errors::{self, Failure};
use crate::foreign::{Filler, Identity};
use crate::iterate::{Loop, Run, closed};
use crate::locked::{LEAVE, check_end, detached};
use crate::names::Names;
use crate::number::{seconds_or_none, whole, whole_or_none};
use crate::object::Object;
use crate::plan::Plan;
use crate::position::Position;
use crate::records::{Records, read_mode_of};
use crate::report::Report;
use crate::switches;
use crate::taken::Taken;

/// Words in serde's messages about a state, and what Python calls the same.
const IN_PYTHON: [(&str, &str); 6] = [
    ("expected u32", "expected a whole number"),
    ("expected u64", "expected a whole number"),
    ("expected a sequence", "expected a list"),
    ("expected struct Saved", "expected a dict"),
    ("type: null", "type: None"),
    ("them null", "them None"),
];

/// Reads the batches of a plan ahead of use.
///
/// A thread reads while the loop computes. It fills ``depth`` buffers of one batch each in turn. They are allocated
/// once; nothing is allocated or copied per batch, and the thread never takes the GIL (unless the data set is written
/// in Python).
///
/// Iterate over ``epochs``, or over the loader itself for one epoch after another. Only one iteration is active:
/// starting another ends the previous one. The environment can override arguments with switches such as
/// ``TWINBUF_OVERLAP=0``. A change of ``depth``, ``workers`` or ``overlap`` is logged; ``repr()`` and `report` show the
/// values of these in effect.
///
/// In a process forked from the one that built it, every method except ``len()``, ``plan`` and ``repr()`` raises
/// `ForkedError`. Batches and arrays received before the fork stay usable there.
///
/// Parameters
/// ----------
/// data
///     `Records`, or an object with ``__len__``, the ``dtype`` and ``shape`` of a record, and ``read_into(indices,
///     out)``. That method fills ``out`` (a memoryview of shape ``(len(indices), *shape)``) with the records of these
///     numbers (an int64 array). It must fill all of ``out``: whatever it skips contains data of an earlier batch.
///     Keeping ``out``, or an array or tensor made from it, after the call raises ``BufferError``. It must not use the
///     loader that it reads for.
///
///     A tuple or a dict of data sets, such as images and labels, is matched by number; a batch is then a tuple or a dict
///     of arrays. An optional attribute ``fingerprint``, a number from 0 to 2**64 - 1, identifies the data in a state.
/// plan
///     Which records make up each batch.
/// name
///     Names the loader in errors, reports and traces, and in its switches: ``TWINBUF_TRAIN_DEPTH=3``.
/// device
///     Where batches go: ``"cuda"``, ``"cuda:1"``, a ``torch.device``, any accelerator of torch. A second thread sends
///     the next batch from page-locked slots, on a separate stream, while the loop uses this one. ``batch.torch()`` is
///     then on the device, and the current stream waits for it. A rank without ``set_device`` gets the device of its
///     ``LOCAL_RANK``. Default: host memory, like ``"cpu"``.
/// device_depth
///     How many batches the device holds, plus those that the loop keeps: 2 or more. Default: 2, one in use and one on its
///     way.
/// depth
///     The number of slots, at least one more than ``workers``; without overlap 1 is enough. Default: two more than
///     ``workers``, one of them for the batch that the loop holds; 2 for one worker with slots of 16 MiB or more, and
///     without overlap.
///     ``TWINBUF_DEPTH`` overrides it.
/// workers
///     The number of reading threads, each with a share of the batches: 1 to 64. One is enough for files. More help
///     with a Python data set whose ``read_into`` decodes and releases the GIL; several threads then call it.
/// overlap
///     Whether a thread reads ahead. With False each batch is read when it is requested; the batches are the same.
/// copy_stream
///     Whether copies to the ``device`` have a stream of their own. With False they are enqueued on the stream that is
///     current when the iteration starts, in order with the loop's work, to measure what the copy stream gains; do not
///     capture a graph on that stream. ``TWINBUF_COPY_STREAM`` overrides it.
/// map
///     A function that the loop's thread calls with each batch; the loop gets what it returns. The loader stays a loader,
///     with its length and its state: ``map=lambda batch: {"input_ids": batch.torch()}``.
/// read_mode
///     ``"auto"``: through the page cache if the data fits, otherwise as much of it as fits. ``"pread"``: all of it.
///     ``"direct"``: past the page cache.
/// memory_limit
///     The most bytes for slots and for reads past the page cache; more is an `OptionError`. Default: no limit.
/// breakdown
///     Prints the time of loading and of the whole step for the first 10 steps and every n-th, to the standard error, and
///     their sums with `report`. It turns the overlap off, because overlapping times cannot be separated.
///     ``TWINBUF_BREAKDOWN=100`` does the same.
/// trace
///     A file for a Chrome trace of the first five epochs.
#[pyclass(frozen, weakref, module = "twinbuf", name = "Loader")]
pub(crate) struct Loader {
    /// Shared by the iterators and this object.
    shared: Arc<Shared>,
    /// The plan that determines the batches.
    #[pyo3(get)]
    plan: Py<Plan>,
    /// The data sets written in Python.
    objects: Vec<Arc<Object>>,
    /// A function that turns each batch into what the loop gets.
    map: Option<Arc<Object>>,
    /// Fills slots in the loop's thread: without overlap, if that runs code of the program.
    filler: Option<Py<Filler>>,
    /// Sends the batches to a device: `twinbuf._device.Sender`.
    sender: Option<Py<PyAny>>,
    copy_stream: bool,
    depth: usize,
    workers: usize,
}

impl Loader {
    fn iterate<'py>(
        slf: &Bound<'py, Self>,
        which: Which,
        timeout: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (py, this, timeout) = (slf.py(), slf.get(), seconds_or_none("timeout", timeout)?);
        this.shared.check(py)?;
        check_end(py)?;
        if this.shared.state.with(py, |state| matches!(state.run, Run::Closed)) {
            return Err(closed(py));
        }
        let (batches, loader) = (Loop::new(this.shared.clone(), timeout), slf.clone().unbind());
        let (all, received) = (OnceLock::new(), AtomicU64::new(0));
        let epochs = Bound::new(py, Epochs { batches, loader, which, all, received })?;
        let map = this.map.as_ref().and_then(|map| map.get(py));
        if map.is_none() && this.filler.is_none() && this.sender.is_none() {
            return Ok(epochs.into_any());
        }
        // Python code, so that there is no frame of Rust below that of the program.
        let overlap = this.shared.front.overlap;
        let send = this.sender.as_ref().map(|sender| (sender, overlap, this.copy_stream));
        py.import("twinbuf._loop")?.getattr("Epochs")?.call1((epochs, this.filler.as_ref(), map, send))
    }

    /// Ends the thread that sends batches to a device, within `limit`. The iteration ends before the join, because the
    /// thread may be waiting for a batch.
    fn stop_sending(&self, py: Python<'_>, limit: Option<Duration>) -> PyResult<()> {
        let Some(sender) = &self.sender else { return Ok(()) };
        sender.call_method0(py, "stop")?;
        self.shared.state.with(py, State::end_iteration);
        let ended =
            sender.call_method1(py, "join", (limit.map(|limit| limit.as_secs_f64()),))?.extract(py)?;
        let late = Error::Timeout { waited: limit.unwrap_or_default(), reading: None };
        if ended { Ok(()) } else { Err(errors::loading(py, late)) }
    }

    /// Logs each argument that the environment has overridden.
    fn tell_overridden(&self, py: Python<'_>, depth: usize, workers: usize, overlap: bool) -> PyResult<()> {
        let name = self.shared.name.as_deref();
        let word = |on| if on { "True" } else { "False" };
        let found = self.workers.to_string();
        let options = [
            ("DEPTH", "depth", depth.to_string(), self.depth.to_string()),
            ("WORKERS", "workers", workers.to_string(), found),
            ("OVERLAP", "overlap", word(overlap).to_owned(), word(self.shared.front.overlap).to_owned()),
        ];
        let prefix = name.map_or(String::new(), |name| format!("{name}: "));
        for (switch, option, argument, found) in options {
            // The breakdown also overrides `overlap` and `workers`, because it turns overlap off.
            let breakdown = || switches::switch(name, "BREAKDOWN").filter(|_| switch != "DEPTH");
            let Some(by) = switches::switch(name, switch).or_else(breakdown) else { continue };
            if argument != found {
                let line = format!("{prefix}{by} of the environment: {option}={found} and not {argument}");
                errors::warn(py, &line)?;
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Loader {
    #[new]
    #[pyo3(
        signature = (
            data, plan, *, name=None, device=None, device_depth=None, depth=None, workers=None, overlap=true,
            copy_stream=true, map=None, read_mode="auto", memory_limit=None, breakdown=None, trace=None
        ),
        text_signature = "(data, plan, *, name=None, device=None, device_depth=2, depth=None, workers=1, overlap=True, \
                          copy_stream=True, map=None, read_mode='auto', memory_limit=None, breakdown=None, trace=None)"
    )]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        data: &Bound<'_, PyAny>,
        plan: Bound<'_, Plan>,
        name: Option<String>,
        device: Option<&Bound<'_, PyAny>>,
        device_depth: Option<&Bound<'_, PyAny>>,
        depth: Option<&Bound<'_, PyAny>>,
        workers: Option<&Bound<'_, PyAny>>,
        overlap: bool,
        copy_stream: bool,
        map: Option<&Bound<'_, PyAny>>,
        read_mode: &str,
        memory_limit: Option<&Bound<'_, PyAny>>,
        breakdown: Option<&Bound<'_, PyAny>>,
        trace: Option<PathBuf>,
    ) -> PyResult<Self> {
        let py = data.py();
        if let Some(map) = map.filter(|map| !map.is_callable()) {
            return Err(errors::of_type("map", "a function", map.repr()?));
        }
        let asked_workers = workers.map_or(Ok(1), |workers| whole("workers", workers))?;
        let device_depth = device_depth.map_or(Ok(2), |depth| whole("device_depth", depth))?;
        let copy_stream = switches::is_on(name.as_deref(), "COPY_STREAM").unwrap_or(copy_stream);
        let sender = device::sender(device, device_depth, name.as_deref(), trace.as_deref())?;
        let sets = dataset::each(data);
        if sets.is_empty() {
            return Err(errors::option(py, "data: wanted at least one data set, found none"));
        }
        let names = Names::of(data)?;
        let given_depth = whole_or_none::<usize>("depth", depth)?;
        let memory_limit = whole_or_none::<u64>("memory_limit", memory_limit)?;
        let breakdown = whole_or_none::<u64>("breakdown", breakdown)?.filter(|&steps| steps > 0);
        let (mut objects, mut opened, mut steps) = (Vec::new(), Vec::<Box<dyn Dataset>>::new(), Vec::new());
        let mut quick = true; // no field is files
        for (field, set) in sets.iter().enumerate() {
            let Ok(records) = set.cast::<Records>() else {
                let data = PythonData::new(set)?;
                objects.push(data.object.clone());
                opened.push(Box::new(data));
                continue;
            };
            let (files, of_field) = records.get().for_loader()?;
            opened.push(files);
            quick = false;
            for step in of_field {
                let step = step.copy(py);
                objects.extend(step.object().cloned());
                steps.push((field, step));
            }
        }
        if let Some(set) = opened.first() {
            plan.get().check(py, set.records())?;
        }
        let foreign = !objects.is_empty();
        let map = map.map(|map| Arc::new(Object::new(map)));
        objects.extend(map.clone());
        let builder = twinbuf::Loader::builder(opened, plan.get().inner.clone());
        let builder =
            steps.into_iter().fold(builder, |builder, (field, step)| builder.transform_field(field, step));
        let builder = builder.workers(asked_workers).overlap(overlap).read_mode(read_mode_of(py, read_mode)?);
        let builder = memory_limit.into_iter().fold(builder, twinbuf::loader::LoaderBuilder::memory_limit);
        let builder = builder.breakdown(breakdown.map_or(Breakdown::off(), Breakdown::every));
        let builder = given_depth.into_iter().fold(builder, twinbuf::loader::LoaderBuilder::depth);
        let builder = name.iter().fold(builder, |builder, name| builder.name(name));
        let builder = trace.into_iter().fold(builder, |builder, path| builder.trace(path));
        let builder = if sender.is_some() { builder.sends() } else { builder };
        let builder = if foreign { builder.driven() } else { builder };
        let failed = |error| errors::loading(py, error);
        let asked_depth =
            given_depth.map_or_else(|| builder.wanted_slots().map(|wanted| wanted.0), Ok).map_err(failed)?;
        let builder = builder.from_env().map_err(failed)?;
        let wanted = builder.wanted_slots().map_err(failed)?;
        let slots = sender.as_ref().map_or(Ok(None), |sender| device::slots(sender, wanted))?;
        let builder = slots.into_iter().fold(builder, twinbuf::loader::LoaderBuilder::slots);
        let mut built = detached(py, || builder.build()).map_err(failed)?;
        let (identity, driven) = (Arc::<Identity>::default(), built.driven());
        let (report, breakdown) = (built.report(), built.breakdown());
        let (asked_overlap, overlap) = (overlap, report.settings.overlap);
        let front = Batches { names, breakdown, overlap, foreign, identity: identity.clone() };
        let shared = Shared::new(front, name, built, Progress::default());
        let mut filler = None;
        for worker in driven {
            let worker = Py::new(py, Filler::new(worker, identity.clone(), quick))?;
            if overlap {
                let fill = py.import("twinbuf._drive")?.getattr("fill")?;
                fill.call1((worker, shared.name.as_deref()))?;
            } else {
                filler = Some(worker);
            }
        }
        let sender = sender.map(Bound::unbind);
        let (depth, workers) = (wanted.0, report.settings.workers);
        let this =
            Self { shared, plan: plan.unbind(), objects, map, filler, sender, copy_stream, depth, workers };
        this.tell_overridden(py, asked_depth, asked_workers, asked_overlap)?;
        Ok(this)
    }

    /// The batches of several epochs: ``epochs(3)`` is epochs 0, 1 and 2, ``epochs(range(3, 5))`` is 3 and 4.
    ///
    /// There is no gap between two epochs. After `load_state_dict` the iteration continues from that state:
    /// ``epochs(3)`` is what remains of three epochs.
    ///
    /// With ``timeout``, a wait of so many seconds for a batch raises `LoaderTimeoutError`, which is a ``TimeoutError``
    /// and names what is being read. The next call waits again. Without overlap there is no such wait. While the files are
    /// in memory, a loop that waits may read a batch itself, and ``timeout`` does not limit that read.
    #[pyo3(signature = (epochs, /, *, timeout=None))]
    fn epochs<'py>(
        slf: &Bound<'py, Self>,
        epochs: &Bound<'py, PyAny>,
        timeout: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (first, end) = match epochs.cast::<PyRange>() {
            Ok(range) => {
                let part = |name: &str| range.getattr(name)?.extract::<i64>();
                if part("step")? != 1 {
                    return Err(errors::option(epochs.py(), "epochs: wanted a range with a step of 1"));
                }
                let negative = |number| {
                    errors::option(epochs.py(), format!("epochs: wanted epochs from 0 on, found {number}"))
                };
                let checked = |number: i64| u64::try_from(number).map_err(|_| negative(number));
                (checked(part("start")?)?, checked(part("stop")?)?)
            }
            Err(_) => (0, whole("epochs", epochs)?),
        };
        Self::iterate(slf, Which::Range(first..end), timeout)
    }

    /// The batches of one epoch, or the rest of it after `load_state_dict`. ``timeout`` as of `epochs`.
    #[pyo3(signature = (epoch, *, timeout=None))]
    fn epoch<'py>(
        slf: &Bound<'py, Self>,
        epoch: &Bound<'py, PyAny>,
        timeout: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        Self::iterate(slf, Which::One(Some(epoch_of(epoch)?)), timeout)
    }

    /// The batches of the next epoch, starting with 0; of the epoch that was set; or the rest after `load_state_dict`.
    fn __iter__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        Self::iterate(slf, Which::One(None), None)
    }

    /// Make ``epoch`` the next one that ``iter(loader)`` begins.
    fn set_epoch(&self, epoch: &Bound<'_, PyAny>) -> PyResult<()> {
        let (py, epoch) = (epoch.py(), epoch_of(epoch)?);
        self.shared.check(py)?;
        self.shared.state.with(py, |state| {
            state.own.next_epoch = epoch;
            state.own.resume.take_if(|resume| resume.epoch() != epoch);
        });
        Ok(())
    }

    /// The number of steps of this rank in the epoch under way, or in the next one.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        self.shared.front.is_not_reading(py)?;
        let plan = &self.plan.get().inner;
        Ok(usize::try_from(self.shared.state.with(py, |state| state.steps(plan)))?)
    }

    /// The attributes of a ``DataLoader`` that trainers read: ``batch_size``, and those by which they skip batches when
    /// they resume.
    fn __getattr__<'py>(slf: &Bound<'py, Self>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        slf.get().shared.front.is_not_reading(slf.py())?;
        check_end(slf.py())?; // there may be no modules any more
        let next = slf.get().shared.state.with(slf.py(), |state| state.own.next_epoch);
        slf.py().import("twinbuf._trainers")?.call_method1("attribute", (slf, name, next))
    }

    /// The position after the last received batch, as a dict of plain values to save with the model.
    ///
    /// Batches that were only read ahead, or sent to a device, are not counted. All ranks have the same state: any rank
    /// resumes from any rank's state.
    fn state_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.shared.check(py)?;
        let position = self.shared.state.with(py, |state| state.position()).ok_or_else(|| closed(py))?;
        if let Some(sender) = &self.sender {
            let received = sender.bind(py).call_method0("position")?;
            if let Ok(received) = received.cast::<Position>() {
                return received.get().to_dict(py);
            }
        }
        position.to_dict(py)
    }

    /// Continue from a state of `state_dict` with the next iteration.
    ///
    /// Raises `CheckpointError` if the state belongs to another plan or data set; the message names the field that
    /// differs. Depth, overlap, rank, batch size and the number of ranks may differ.
    ///
    /// Data sets are identified by the number and size of their records and by a fingerprint. For files the fingerprint
    /// covers the windows of their records and samples of their bytes, so a change between the samples is not noticed.
    /// A Python data set has no fingerprint, unless it has an attribute ``fingerprint``.
    #[pyo3(signature = (state, /))]
    fn load_state_dict(&self, py: Python<'_>, state: &Bound<'_, PyDict>) -> PyResult<()> {
        self.shared.check(py)?;
        self.stop_sending(py, None)?;
        // `operator.index` converts numpy's integers to Python's.
        let options = [("default", py.import("operator")?.getattr("index")?)].into_py_dict(py)?;
        options.set_item("allow_nan", false)?;
        let text = py.import("json")?.call_method("dumps", (state,), Some(&options));
        let text = text.map_err(|error| match error.is_instance_of::<PyValueError>(py) {
            true => errors::raise(py, Failure::new("CheckpointError", format!("state: {}", error.value(py)))),
            false => error,
        })?;
        let text = text.extract::<String>()?;
        let wrong = |error: serde_json::Error| {
            let text =
                IN_PYTHON.iter().fold(error.to_string(), |text, (rust, python)| text.replace(rust, python));
            errors::raise(py, Failure::new("CheckpointError", format!("state: {text}")))
        };
        let mut fields: serde_json::Value = serde_json::from_str(&text).map_err(wrong)?;
        let own = self.plan.get().inner.last_batch();
        let last = fields.pointer_mut("/plan/last_batch");
        if let (true, Some(last)) =
            (own != LastBatch::Drop, last.filter(|last| *last == "keep" || *last == "wrap"))
        {
            // `drop_last=False` means `keep` for one rank and `wrap` for several. Both have the same steps and the same
            // records before each step, so a state of one fits the other.
            *last = serde_json::to_value(own).map_err(wrong)?;
        }
        let checkpoint: Checkpoint = serde_json::from_value(fields).map_err(wrong)?;
        let checked = self.shared.state.with(py, |state| {
            state.rest();
            let Run::Idle(loader) = &mut state.run else { return Ok(false) };
            // Check that the state is valid. This iteration has no epoch, so it reads nothing.
            drop(loader.epochs_from(&checkpoint, 0)?);
            state.iteration += 1;
            state.own.next_epoch = checkpoint.epoch() + 1;
            (state.own.exhausted, state.own.before) = (false, None);
            state.own.resume = Some(checkpoint);
            Ok(true)
        });
        match checked {
            Ok(true) => match &self.sender {
                Some(sender) => sender.call_method0(py, "forget").map(drop),
                None => Ok(()),
            },
            Ok(false) => Err(closed(py)),
            Err(error) => Err(errors::loading(py, error)),
        }
    }

    /// Where the time went so far, as a report.
    pub(crate) fn report(&self, py: Python<'_>) -> PyResult<Report> {
        self.shared.check(py)?;
        let (report, kept) = self.shared.state.with(py, |state| (state.report(), state.kept));
        let report = device::report(py, self.sender.as_ref(), report)?;
        let name = self.shared.name.as_deref().unwrap_or_default();
        Ok(Report::of_loader(report, name, kept, &self.shared.front.breakdown))
    }

    /// What a thread is reading for the batch that is needed first, or None: its ``epoch`` and ``step``, for how many
    /// ``seconds``, from which ``record`` on, and the ``path`` and ``offset`` of that.
    fn reading<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.shared.check(py)?;
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

    /// Stop the reading thread. Raises the error of a read that the loop has not received. Batches in use stay valid.
    ///
    /// Waits up to ``timeout`` seconds for a read in progress, and then raises `LoaderTimeoutError`, which names it. The
    /// thread is left behind, and ends with its read; so is one that copies to a device. Default: 1 second if the data set or
    /// a function is written in Python or batches are copied to a device, otherwise no limit. Ctrl-C ends the wait.
    #[pyo3(signature = (*, timeout=None))]
    fn close(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let calls_python = !self.objects.is_empty() || self.sender.is_some();
        let limit = seconds_or_none("timeout", timeout)?.or(calls_python.then_some(LEAVE));
        self.shared.check(py)?;
        let (shared, since) = (&self.shared, Instant::now());
        let sent = self.stop_sending(py, limit);
        shared.state.detached(py, State::end_iteration);
        // No other read begins. Wait for those in progress.
        let (mut raised, mut reading) = (Ok(()), None);
        while let Some(found) = shared.state.with(py, |state| state.run.reading()) {
            (raised, reading) = (py.check_signals(), Some(found));
            if raised.is_err() || limit.is_some_and(|limit| since.elapsed() >= limit) {
                break;
            }
            detached(py, || std::thread::sleep(Duration::from_micros(100)));
        }
        let run = shared.state.with(py, |state| {
            state.own.last_report = state.report();
            std::mem::take(&mut state.run)
        });
        let waits = if raised.is_ok() { limit } else { Some(Duration::ZERO) };
        let closed = detached(py, || {
            let Run::Idle(loader) = run else { return Ok(()) };
            match waits {
                Some(limit) => loader.close_timeout(limit.saturating_sub(since.elapsed())),
                None => loader.close(),
            }
        });
        raised?;
        closed.map_err(|error| match error {
            Error::Timeout { reading: found, .. } => {
                let (waited, reading) = (limit.unwrap_or_default(), found.or(reading));
                errors::loading(py, Error::Timeout { waited, reading })
            }
            error => errors::loading(py, error),
        })?;
        sent
    }

    fn __enter__(slf: Bound<'_, Self>) -> PyResult<Bound<'_, Self>> {
        slf.get().shared.check(slf.py())?;
        Ok(slf)
    }

    fn __exit__(
        &self,
        py: Python<'_>,
        kind: &Bound<'_, PyAny>,
        _error: &Bound<'_, PyAny>,
        _trace: &Bound<'_, PyAny>,
    ) -> PyResult<()> {
        let closed = self.close(py, None);
        // If the `with` block raised an exception, report that and not the error of `close`.
        if kind.is_none() { closed } else { Ok(()) }
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = self.shared.name.as_deref().map_or(String::new(), |name| format!(" {name:?}"));
        let device = match &self.sender {
            Some(sender) => format!(", device={}", sender.bind(py).getattr("device")?.str()?.repr()?),
            None => String::new(),
        };
        let overlap = if self.shared.front.overlap { "True" } else { "False" };
        let (plan, depth, workers) = (self.plan.bind(py).repr()?, self.depth, self.workers);
        Ok(format!("<Loader{name}: {plan}{device}, depth={depth}, workers={workers}, overlap={overlap}>"))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.objects.iter().try_for_each(|object| object.traverse(&visit))?;
        visit.call(&self.sender)
    }

    /// The garbage collector calls this if nothing in use refers to the loader or its iterators: nobody asks for
    /// another batch.
    fn __clear__(&self) {
        self.objects.iter().for_each(|object| object.clear());
    }

    /// ``Loader[Batch]``: the type of what the loop gets.
    #[classmethod]
    fn __class_getitem__<'py>(
        class: &Bound<'py, PyType>,
        item: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        class.py().import("types")?.getattr("GenericAlias")?.call1((class, item))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a Loader cannot be pickled, because it owns a thread and open files: build it in the process that uses it, \
             and send its `state_dict()`",
        ))
    }
}

impl Drop for Loader {
    /// No iterator is left. The threads that refer to the program's code end later.
    fn drop(&mut self) {
        self.objects.iter().for_each(|object| object.clear());
    }
}

/// Converts the argument `epoch`.
fn epoch_of(epoch: &Bound<'_, PyAny>) -> PyResult<u64> {
    match whole("epoch", epoch)? {
        // Refuse the largest number, because the end of the range is the next epoch, which needs a number too.
        found @ u64::MAX => {
            Err(errors::option(epoch.py(), format!("epoch: wanted at most 2**64 - 2, found {found}")))
        }
        found => Ok(found),
    }
}

/// An iterator over the batches of a loader. The iteration begins at the first `next`, because some programs make an
/// iterator only to ask for its length.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf")]
pub(crate) struct Epochs {
    batches: Loop<Batches>,
    /// It reports the Python objects of the loader to the garbage collector.
    loader: Py<Loader>,
    which: Which,
    /// The number of batches of the whole iteration, once it is known.
    all: OnceLock<u64>,
    /// The number of batches that the loop has received.
    received: AtomicU64,
}

pub(crate) enum Which {
    /// Several epochs.
    Range(Range<u64>),
    /// One epoch: the next one, if it has no number.
    One(Option<u64>),
}

impl Epochs {
    /// Returns the epochs to iterate over, whether it is a single one, and the number of batches.
    fn epochs(&self, state: &State) -> (Range<u64>, bool, u64) {
        let (epochs, single) = match &self.which {
            Which::Range(epochs) => (epochs.clone(), false),
            Which::One(epoch) => {
                let next = || state.own.resume.as_ref().map_or(state.own.next_epoch, Checkpoint::epoch);
                let one = epoch.unwrap_or_else(next);
                (one..one.saturating_add(1), true)
            }
        };
        let count = || state.count(&self.loader.get().plan.get().inner, epochs.clone(), single);
        let all = *self.all.get_or_init(count);
        (epochs, single, all)
    }
}

#[pymethods]
impl Epochs {
    /// The number of batches of the whole iteration.
    fn all(&self, py: Python<'_>) -> u64 {
        let count = || self.loader.get().shared.state.with(py, |state| self.epochs(state).2);
        self.all.get().copied().unwrap_or_else(count)
    }

    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The batches that are left.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        // Relaxed: the count is only shown, and orders no other access.
        Ok(usize::try_from(self.all(py).saturating_sub(self.received.load(Ordering::Relaxed)))?)
    }

    /// Where the time went so far, in all iterations of the loader.
    fn report(&self, py: Python<'_>) -> PyResult<Report> {
        self.loader.get().report(py)
    }

    /// Begins the iteration, unless it has begun, and ends the one before it.
    fn begin(&self, py: Python<'_>) -> PyResult<()> {
        if self.batches.has_begun() {
            return Ok(());
        }
        let loader = self.loader.get();
        loader.shared.check(py)?;
        check_end(py)?;
        loader.stop_sending(py, None)?;
        let begun = self.batches.begin(py, |state| {
            if matches!(state.run, Run::Closed) {
                return Err(None);
            }
            let (epochs, single, _) = self.epochs(state);
            if single {
                state.own.next_epoch = epochs.end;
            }
            state.begin(epochs, single).map_err(Some)
        });
        begun.map_err(|error| error.map_or_else(|| closed(py), |error| errors::loading(py, error)))
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Batch>> {
        self.begin(py)?;
        let lease = self.batches.next(py)?;
        self.received.fetch_add(u64::from(lease.is_some()), Ordering::Relaxed);
        Ok(lease.map(Batch::new))
    }

    /// The next batch, for `_loop.py`. None: there is none yet, also after a short wait if that is wanted.
    fn take(&self, py: Python<'_>, waits: bool) -> PyResult<Option<Taken>> {
        self.batches.take(py, waits, |lease| Ok(Py::new(py, Batch::new(lease.clone()))?.into_any()))
    }

    /// The position after the last batch that the loop received.
    fn _position(&self, py: Python<'_>) -> Option<Position> {
        self.loader.get().shared.state.with(py, |state| state.position())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.loader)
    }
}
