//! `Tensors` and `stream`: the weights of a model, group by group, the next one read while this one is used.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::task::Poll;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use twinbuf::stream::{Pass, TensorStream};

use crate::dtype;
use crate::errors::{self, Failure};
use crate::lease::Lease;
use crate::loader::read_mode_of;
use crate::locked::{Locked, SLICE};
use crate::number::whole;
use crate::records::paths_of;
use crate::report::{Kind, Report};

/// The tensors of a model: ``safetensors``, its ``model.safetensors.index.json``, or GGUF. Only headers are read.
///
/// A mapping from names, sorted, to what the tensors are: ``model["lm_head.weight"].shape``. `stream` reads them.
#[pyclass(frozen, mapping, module = "twinbuf", name = "Tensors")]
pub(crate) struct Tensors {
    inner: twinbuf::stream::Tensors,
}

#[pymethods]
impl Tensors {
    /// Open a file, or a list of files.
    #[staticmethod]
    fn open(paths: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, paths) = (paths.py(), paths_of(paths)?);
        let opened = py.detach(|| twinbuf::mmap::files(&paths).and_then(twinbuf::stream::Tensors::open));
        Ok(Self { inner: opened.map_err(|error| errors::raise(py, Failure::of_file(&error)))? })
    }

    fn __len__(&self) -> usize {
        self.inner.all().len()
    }

    fn __contains__(&self, name: &Bound<'_, PyAny>) -> bool {
        name.extract::<&str>().is_ok_and(|name| self.inner.get(name).is_ok())
    }

    /// The names, sorted.
    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        PyList::new(py, self.inner.all().iter().map(|tensor| tensor.name()))?.call_method0("__iter__")
    }

    /// What a tensor is: its ``dtype`` (in the words of the format where Python has none), ``shape`` and ``nbytes``.
    fn __getitem__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let tensor = self.inner.get(name).map_err(|error| PyKeyError::new_err(error.to_string()))?;
        let dtype = tensor.dtype().map_or(tensor.format_type(), |dtype| dtype::name(dtype));
        let of = (dtype, PyTuple::new(py, tensor.shape())?, tensor.len());
        py.import("twinbuf.tensors")?.getattr("TensorInfo")?.call1(of)
    }

    /// The files.
    #[getter]
    fn paths(&self) -> Vec<PathBuf> {
        self.inner.paths().map(PathBuf::from).collect()
    }

    /// For ``pickle``: opens the files again.
    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<(Bound<'py, PyAny>, (Vec<PathBuf>,))> {
        let paths = slf.get().inner.paths().map(std::path::absolute).collect::<Result<_, _>>()?;
        Ok((slf.get_type().getattr("open")?, (paths,)))
    }

    fn __repr__(&self) -> String {
        format!("<Tensors: {} in {} file(s)>", self.inner.all().len(), self.inner.paths().len())
    }
}

/// Read groups of tensors in the order of use, such as the layers of a model, the next one while this one is used.
///
/// ``for layer in tb.stream(model, layer_of)`` is one pass. Each pass has all groups.
///
/// Parameters
/// ----------
/// model
///     `Tensors`.
/// groups
///     A function of a tensor's name that returns the key of its group, such as the number of a layer, or None for a
///     tensor that is left out; groups are in the order of their keys. Or a list of lists of names, in the order of use.
/// name
///     Names the stream in errors, reports and traces.
/// cycle
///     Whether a pass follows the one before it without a gap: the first group is read while the last one is used.
/// depth
///     The number of slots, each as large as the largest group: 2 or more. The loop has a group while it asks for the next one.
/// memory_limit
///     The most bytes for slots and for groups that are kept in what the slots leave of it: these are read once. Default:
///     no limit, and no group is kept.
/// read_mode
///     As of `Loader`.
#[pyfunction]
#[pyo3(signature = (model, groups, *, name=None, cycle=false, depth=2, memory_limit=None, read_mode="auto"))]
pub(crate) fn stream(
    model: &Bound<'_, Tensors>,
    groups: &Bound<'_, PyAny>,
    name: Option<String>,
    cycle: bool,
    depth: usize,
    memory_limit: Option<&Bound<'_, PyAny>>,
    read_mode: &str,
) -> PyResult<Stream> {
    let (py, model) = (model.py(), &model.get().inner);
    let of_file = |error: twinbuf::mmap::Error| errors::raise(py, Failure::of_file(&error));
    let lists = match groups.is_callable() {
        true => by_key(py, model, groups)?,
        false => groups.extract::<Vec<Vec<String>>>().map_err(|_| {
            PyTypeError::new_err("groups: wanted a function of a name, or a list of lists of names")
        })?,
    };
    let builder = twinbuf::stream(model.groups(&lists).map_err(of_file)?);
    let builder = builder.depth(depth).read_mode(read_mode_of(py, read_mode)?);
    let builder = if cycle { builder.cycle() } else { builder };
    let builder = name.iter().fold(builder, |builder, name| builder.name(name));
    let builder = match memory_limit {
        Some(bytes) => builder.memory_limit(whole::<u64>("memory_limit", bytes)?),
        None => builder,
    };
    let built = py.detach(|| builder.build()).map_err(|error| errors::loading(py, error))?;
    let (groups, kept) = (built.groups().len(), built.kept());
    let run = Run { pass: None, stream: Box::new(built), leases: Vec::new() };
    Ok(Stream { run: Arc::new(Locked::new((0, run))), name, groups, kept, depth })
}

/// The names of each group, in the order of their keys; in a group, as the files have them.
fn by_key(
    py: Python<'_>,
    model: &twinbuf::stream::Tensors,
    key_of: &Bound<'_, PyAny>,
) -> PyResult<Vec<Vec<String>>> {
    let mut tensors: Vec<_> = model.all().iter().collect();
    tensors.sort_by_key(|tensor| (tensor.range().file, tensor.range().bytes.start));
    let groups = PyDict::new(py);
    for tensor in tensors {
        let key = key_of.call1((tensor.name(),))?;
        if !key.is_none() {
            groups
                .call_method1("setdefault", (key, PyList::empty(py)))?
                .call_method1("append", (tensor.name(),))?;
        }
    }
    let keys = groups.keys();
    keys.sort()?;
    keys.iter().map(|key| groups.as_any().get_item(key)?.extract()).collect()
}

/// A stream and its pass. The order of the fields is that of dropping.
struct Run {
    /// Borrows from `stream`.
    pass: Option<Pass<'static>>,
    /// Not used while there is a pass.
    stream: Box<TensorStream>,
    /// Groups that were handed out and may be in use, with the number of their pass.
    leases: Vec<(u64, Weak<Lease>)>,
}

impl Run {
    fn begin(&mut self) {
        self.pass = None;
        let stream: *mut TensorStream = &mut *self.stream;
        // SAFETY: the stream is on the heap, stays there when `Run` moves, and is dropped after the pass. Until the pass is
        // dropped nothing else uses it: see `report`.
        self.pass = Some(unsafe { &mut *stream }.pass());
    }

    /// If the next slot is in use by a group of a pass before this one, which a loop variable still has, that group
    /// keeps its memory and frees its slot.
    fn free_a_slot(&mut self, pass: u64) {
        if self.pass.as_ref().is_some_and(|pass| pass.held_for().is_some()) {
            let before = self.leases.iter().filter(|(of, _)| *of != pass);
            before.filter_map(|(_, lease)| lease.upgrade()).for_each(|lease| _ = lease.leave_slot());
        }
    }

    fn report(&self) -> twinbuf::Report {
        match &self.pass {
            Some(pass) => pass.report(),
            None => self.stream.report(),
        }
    }
}

/// Groups of tensors; made by `stream`. Each iteration is a pass.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf")]
pub(crate) struct Stream {
    /// The number of passes begun so far: only the newest gets groups.
    run: Arc<Locked<(u64, Run)>>,
    name: Option<String>,
    groups: usize,
    kept: usize,
    depth: usize,
}

impl Stream {
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        self.run.check(py, "call `stream` after the fork")
    }
}

#[pymethods]
impl Stream {
    /// The next pass. It begins at its first group, and ends one that is under way.
    fn __iter__(slf: &Bound<'_, Self>) -> PyResult<PassOfGroups> {
        slf.get().check(slf.py())?;
        let (at, put_back) = (Mutex::new(At::default()), Mutex::new(None));
        Ok(PassOfGroups { stream: slf.clone().unbind(), at, put_back })
    }

    /// The number of groups.
    fn __len__(&self) -> usize {
        self.groups
    }

    /// How many groups stay in memory when they have been read once.
    #[getter]
    fn kept(&self) -> usize {
        self.kept
    }

    /// Where the time went so far: passes are epochs, and groups are batches.
    fn report(&self, py: Python<'_>) -> PyResult<Report> {
        self.check(py)?;
        let found = self.run.with(py, |run| run.1.report());
        Ok(Report::new(found, self.name.as_deref().unwrap_or_default(), Kind::Loader))
    }

    fn __repr__(&self) -> String {
        let name = self.name.as_deref().map_or(String::new(), |name| format!(" {name:?}"));
        format!("<Stream{name}: {} groups, {} kept, depth={}>", self.groups, self.kept, self.depth)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if self.run.is_forked() {
            // The thread is in the other process.
            std::mem::forget(self.run.clone());
        }
    }
}

/// The groups of one pass.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
struct PassOfGroups {
    stream: Py<Stream>,
    at: Mutex<At>,
    /// A group that a signal withheld from the loop.
    put_back: Mutex<Option<Group>>,
}

/// Where a pass is.
#[derive(Default)]
struct At {
    /// Which pass of the stream, 0 before it has begun.
    pass: u64,
    /// The number of the next group.
    next: u64,
    ended: bool,
}

#[pymethods]
impl PassOfGroups {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The groups that are left.
    fn __len__(&self) -> usize {
        let received = self.at.lock().unwrap_or_else(PoisonError::into_inner).next;
        let put_back = self.put_back.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        let all = self.stream.get().groups + usize::from(put_back);
        all.saturating_sub(usize::try_from(received).unwrap_or(usize::MAX))
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Group>> {
        let stream = self.stream.get();
        stream.check(py)?;
        let put_back = self.put_back.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(group) = put_back {
            return self.hand_out(py, group).map(Some);
        }
        loop {
            py.check_signals()?;
            let found = py.detach(|| {
                let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
                if at.ended {
                    return Some(Poll::Ready(None));
                }
                let mut run = stream.run.lock();
                let (passes, run) = &mut *run;
                if at.pass == 0 {
                    run.begin();
                    *passes += 1;
                    at.pass = *passes;
                }
                let pass = run.pass.as_mut().filter(|_| at.pass == *passes)?;
                let found = pass.next_timeout(SLICE);
                let found = found.map_ok(|group| {
                    let (number, lease) = (group.number(), Arc::new(Lease::of_group(group, at.next)));
                    run.leases.retain(|(_, lease)| lease.strong_count() > 0);
                    run.leases.push((at.pass, Arc::downgrade(&lease)));
                    Group { lease, number }
                });
                match &found {
                    Poll::Ready(None) => (run.pass, at.ended) = (None, true),
                    Poll::Ready(Some(Ok(_))) => at.next += 1,
                    Poll::Ready(Some(Err(_))) => at.ended = true,
                    Poll::Pending => run.free_a_slot(at.pass),
                }
                Some(found)
            });
            return match found {
                None => {
                    let message = "another pass of this stream has begun: there is one at a time";
                    Err(errors::raise(py, Failure::new("LoaderError", message)))
                }
                Some(Poll::Pending) => continue,
                Some(Poll::Ready(None)) => Ok(None),
                Some(Poll::Ready(Some(Err(error)))) => Err(errors::loading(py, error)),
                Some(Poll::Ready(Some(Ok(group)))) => self.hand_out(py, group).map(Some),
            };
        }
    }
}

impl PassOfGroups {
    /// Returns the group, or keeps it for the next call if a signal raises an exception: Ctrl-C later would lose it.
    fn hand_out(&self, py: Python<'_>, group: Group) -> PyResult<Group> {
        match py.check_signals() {
            Ok(()) => Ok(group),
            Err(raised) => {
                *self.put_back.lock().unwrap_or_else(PoisonError::into_inner) = Some(group);
                Err(raised)
            }
        }
    }
}

impl Drop for PassOfGroups {
    fn drop(&mut self) {
        // Left early: nothing more is read ahead for it.
        let begun = self.at.get_mut().unwrap_or_else(PoisonError::into_inner).pass;
        let stream = self.stream.get();
        if begun > 0 && !stream.run.is_forked() {
            let mut run = stream.run.lock();
            if run.0 == begun {
                run.1.pass = None;
            }
        }
    }
}

/// A group of tensors, in memory. Its slot is free again when the group and all its arrays and tensors are gone.
#[pyclass(frozen, weakref, module = "twinbuf", name = "Group")]
pub(crate) struct Group {
    lease: Arc<Lease>,
    /// Its number in the order of the groups.
    #[pyo3(get)]
    number: usize,
}

#[pymethods]
impl Group {
    /// The tensors as numpy arrays for reading, without a copy: a dict by name.
    ///
    /// Raises TypeError for types that only torch has. Types that both lack are arrays of bytes.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lease.arrays(py)
    }

    /// The tensors as torch tensors, without a copy: a dict by name. Do not write to them: a group may stay in memory for
    /// the next pass.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.lease.tensors(py)
    }

    /// The number of tensors.
    fn __len__(&self) -> usize {
        self.lease.views.len()
    }

    fn __repr__(&self) -> String {
        format!("<Group {}: {} tensors>", self.number, self.lease.views.len())
    }
}
