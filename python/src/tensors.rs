//! `Tensors` and `stream`: the weights of a model, group by group, the next one read while this one is used.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;
use twinbuf::stream::TensorStream;

use crate::device;
use crate::dtype;
use crate::errors::{self, Failure};
use crate::iterate::{Front, Loop, Run, Shared, State};
use crate::lease::Lease;
use crate::locked::{LEAVE, Locked, detached};
use crate::number::whole_or_none;
use crate::records::{paths_of, read_mode_of};
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
        let opened = detached(py, || twinbuf::mmap::files(&paths).and_then(twinbuf::stream::Tensors::open));
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
/// device
///     Where groups go, as of `Loader`. A second thread copies the next group through page-locked memory on a separate
///     stream while the loop uses this one. ``group.torch()`` is then on the device, and stays there as long as its tensors
///     exist.
/// cycle
///     Whether a pass follows the one before it without a gap: the first group is read while the last one is used.
/// depth
///     The number of slots, each as large as the largest group: 2 or more. The loop has a group while it asks for the next one.
/// keep
///     The most groups that stay in host memory when they have been read once, spread over the pass. Default: as many as
///     ``memory_limit`` has room for, or none without a limit.
/// order
///     The order of the groups: lists of their numbers. Passes use them in turn: ``[range(n), range(n)[::-1]]`` is forward
///     and backward. Default: the order of ``groups``.
/// memory_limit
///     The most bytes of host memory: slots, groups that are kept, and with a ``device`` two page-locked buffers of the
///     largest group. Default: no limit.
/// read_mode
///     As of `Loader`.
/// trace
///     A file for a Chrome trace of the first five passes.
#[pyfunction]
#[pyo3(signature = (
    model, groups, *, name=None, device=None, cycle=false, depth=2, keep=None, order=None, memory_limit=None,
    read_mode="auto", trace=None
))]
#[allow(clippy::too_many_arguments, reason = "keywords")]
pub(crate) fn stream(
    model: &Bound<'_, Tensors>,
    groups: &Bound<'_, PyAny>,
    name: Option<String>,
    device: Option<&Bound<'_, PyAny>>,
    cycle: bool,
    depth: usize,
    keep: Option<&Bound<'_, PyAny>>,
    order: Option<Vec<Vec<usize>>>,
    memory_limit: Option<&Bound<'_, PyAny>>,
    read_mode: &str,
    trace: Option<PathBuf>,
) -> PyResult<Stream> {
    let (py, model) = (model.py(), &model.get().inner);
    let sender = device::sender(device, DEVICE_DEPTH, name.as_deref(), trace.as_deref())?;
    let of_file = |error: twinbuf::mmap::Error| errors::raise(py, Failure::of_file(&error));
    let lists = match groups.is_callable() {
        true => by_key(py, model, groups)?,
        false => groups.extract::<Vec<Vec<String>>>().map_err(|_| {
            PyTypeError::new_err("groups: wanted a function of a name, or a list of lists of names")
        })?,
    };
    let groups = model.groups(&lists).map_err(of_file)?;
    let all = groups.len();
    let staging = (0..all).map(|group| groups.bytes(group)).max().filter(|_| sender.is_some());
    let staging = 2 * staging.unwrap_or_default() as u64;
    let builder = twinbuf::stream(groups).depth(depth).read_mode(read_mode_of(py, read_mode)?);
    let builder = if cycle { builder.cycle() } else { builder };
    let builder = name.iter().fold(builder, |builder, name| builder.name(name));
    let builder = trace.into_iter().fold(builder, |builder, path| builder.trace(path));
    let builder =
        whole_or_none("keep", keep)?.into_iter().fold(builder, |builder, groups| builder.keep(groups));
    let builder = match order {
        Some(order) if order.is_empty() || order.iter().any(|pass| pass.len() != all) => {
            return Err(errors::option(py, format!("order: wanted lists of {all} groups, found {order:?}")));
        }
        Some(order) => builder.order(move |pass, step| order[(pass % order.len() as u64) as usize][step]),
        None => builder,
    };
    let limit = whole_or_none::<u64>("memory_limit", memory_limit)?;
    if let Some(bytes) = limit.filter(|&bytes| bytes < staging) {
        let line =
            format!("memory_limit: wanted {staging} bytes for page-locked memory, and slots, found {bytes}");
        return Err(errors::option(py, line));
    }
    let builder = limit.into_iter().fold(builder, |builder, bytes| builder.memory_limit(bytes - staging));
    let built = detached(py, || builder.build()).map_err(|error| errors::loading(py, error))?;
    let kept = built.kept();
    let (shared, sender) = (Shared::new(Groups, name, built, 0), sender.map(Bound::unbind));
    Ok(Stream { shared, sender, groups: all, kept, depth })
}

/// The number of groups that a device holds: one in use, and one on its way.
const DEVICE_DEPTH: usize = 2;

/// Returns the names of the tensors of each group. Groups are in the order of their keys, and tensors in that of the
/// files.
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

/// The groups of a stream, as a front. Its own state is the step of the next group in the pass.
struct Groups;

impl Front for Groups {
    type Run = TensorStream;
    type Item = Group;
    type Own = u64;

    fn check(&self, py: Python<'_>, state: &Locked<State<Self>>) -> PyResult<()> {
        state.check(py, "call `stream` after the fork")
    }

    fn received(
        &self,
        state: &mut State<Self>,
        group: twinbuf::stream::Group,
    ) -> Result<Option<Group>, Error> {
        let (number, lease) = (group.number(), Arc::new(Lease::of_group(group, state.own)));
        state.own += 1;
        state.lent(&lease);
        let (place, count) = ((lease.epoch, lease.step), lease.views.len());
        Ok(Some(Group { content: Content::Host(lease), place, number, count }))
    }

    fn put_back(&self, state: &mut State<Self>, group: Group, _again: bool) -> Option<Group> {
        state.put_back.replace(group)
    }

    fn limit(&self, _: bool) -> Duration {
        LEAVE
    }

    fn close(stream: TensorStream, limit: Duration) -> Result<(), Error> {
        stream.close_timeout(limit)
    }
}

impl State<Groups> {
    /// Begins a pass, and returns its number.
    fn begin(&mut self) -> u64 {
        self.end_iteration();
        let pass = self.run.take().map(TensorStream::into_pass);
        (self.run, self.own) = (pass.map_or(Run::Closed, Run::Running), 0);
        self.iteration
    }
}

/// Groups of tensors; made by `stream`. Each iteration is a pass.
#[pyclass(frozen, weakref, module = "twinbuf._twinbuf")]
pub(crate) struct Stream {
    shared: Arc<Shared<Groups>>,
    /// Sends the groups to a device: `twinbuf._device.Sender`.
    sender: Option<Py<PyAny>>,
    groups: usize,
    /// How many groups stay in memory when they have been read once.
    #[pyo3(get)]
    kept: usize,
    depth: usize,
}

#[pymethods]
impl Stream {
    /// The next pass. It begins at its first group, and ends one that is under way.
    fn __iter__(slf: &Bound<'_, Self>) -> PyResult<Py<PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        this.shared.check(py)?;
        let groups = Loop::new(this.shared.clone(), None);
        let pass = Py::new(py, PassOfGroups { groups, stream: slf.clone().unbind() })?;
        let Some(sender) = &this.sender else { return Ok(pass.into_any()) };
        sender.call_method0(py, "stop")?;
        this.shared.state.detached(py, State::end_iteration);
        sender.call_method0(py, "join")?;
        py.import("twinbuf._loop")?
            .getattr("Loop")?
            .call_method1("sending", (sender, pass))
            .map(Bound::unbind)
    }

    /// The number of groups.
    fn __len__(&self) -> usize {
        self.groups
    }

    /// Where the time went so far: passes are epochs, and groups are batches.
    fn report(&self, py: Python<'_>) -> PyResult<Report> {
        self.shared.check(py)?;
        let found = self.shared.state.with(py, |state| state.run.report()).unwrap_or_default();
        let found = device::report(py, self.sender.as_ref(), found)?;
        Ok(Report::new(found, self.shared.name.as_deref().unwrap_or_default(), Kind::Loader))
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.sender)
    }

    fn __repr__(&self) -> String {
        let name = self.shared.name.as_deref().map_or(String::new(), |name| format!(" {name:?}"));
        format!("<Stream{name}: {} groups, {} kept, depth={}>", self.groups, self.kept, self.depth)
    }
}

/// The groups of one pass.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
struct PassOfGroups {
    groups: Loop<Groups>,
    stream: Py<Stream>,
}

#[pymethods]
impl PassOfGroups {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The groups that are left.
    fn __len__(&self, py: Python<'_>) -> usize {
        let stream = self.stream.get();
        let received = stream.shared.state.with(py, |state| match self.groups.is_current(state) {
            true => state.own as usize - usize::from(state.put_back.is_some()),
            false if self.groups.has_begun() => stream.groups,
            false => 0,
        });
        stream.groups - received
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Group>> {
        self.stream.get().shared.check(py)?;
        self.groups.begin(py, |state| PyResult::Ok(state.begin()))?;
        self.groups.next(py)
    }
}

/// A group of tensors. Its slot is free again when the group and all its arrays and tensors are gone. If the next slot is
/// still in use then, the group takes its memory along, as a `Batch` does.
#[pyclass(frozen, weakref, module = "twinbuf", name = "Group")]
pub(crate) struct Group {
    content: Content,
    /// The number of the pass, and the step in it.
    place: (u64, u64),
    /// Its number in the order of the groups.
    #[pyo3(get)]
    number: usize,
    count: usize,
}

enum Content {
    Host(Arc<Lease>),
    /// A dict of tensors.
    Device(Py<PyDict>),
}

#[pymethods]
impl Group {
    /// The tensors as numpy arrays for reading, without a copy: a dict by name.
    ///
    /// Raises TypeError for types that only torch has. Types that both lack are arrays of bytes.
    fn numpy<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.content {
            Content::Host(lease) => lease.arrays(py),
            Content::Device(_) => Err(PyTypeError::new_err("the group is on a device: use `torch()`")),
        }
    }

    /// The tensors as torch tensors, without a copy: a dict by name, in host memory or on the stream's ``device``. Do not
    /// write to those in host memory: a group may stay there for the next pass.
    fn torch<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match &self.content {
            Content::Host(lease) => lease.tensors(py),
            Content::Device(tensors) => Ok(tensors.bind(py).clone().into_any()),
        }
    }

    /// The pass and the step.
    #[getter]
    fn _place(&self) -> (u64, u64) {
        self.place
    }

    /// Returns the group with these tensors, which are on a device, in place of its own.
    fn _moved(&self, tensors: Py<PyDict>) -> Self {
        Self { content: Content::Device(tensors), ..*self }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match &self.content {
            Content::Host(_) => Ok(()),
            Content::Device(tensors) => visit.call(tensors),
        }
    }

    /// The number of tensors.
    fn __len__(&self) -> usize {
        self.count
    }

    fn __repr__(&self) -> String {
        format!("<Group {}: {} tensors>", self.number, self.count)
    }
}
