//! The Rust part of `Tensors` and `stream`; the rest is in `twinbuf/_tensors.py`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyKeyError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Error;
use twinbuf::stream::TensorStream;

use crate::dtype;
use crate::errors::{self, Failure};
use crate::iterate::{Found, Front, Loop, Run, Shared, State};
use crate::lease::Lease;
use crate::locked::detached;
use crate::records::read_mode_of;
use crate::report::Recorder;

/// The class `Tensors` derives from this one.
#[pyclass(frozen, mapping, subclass, module = "twinbuf._twinbuf", name = "_Tensors")]
pub(crate) struct Tensors(twinbuf::stream::Tensors);

#[pymethods]
impl Tensors {
    #[new]
    fn new(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Self> {
        let opened = detached(py, || twinbuf::stream::Tensors::open(paths));
        opened.map(Self).map_err(|error| errors::raise(py, Failure::of_file(&error)))
    }

    fn __len__(&self) -> usize {
        self.0.all().len()
    }

    /// The names, sorted.
    fn __iter__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        PyList::new(py, self.0.all().iter().map(|tensor| tensor.name()))?.call_method0("__iter__")
    }

    /// The names, in the order of the files.
    fn _in_files(&self) -> Vec<&str> {
        let mut tensors: Vec<_> = self.0.all().iter().collect();
        tensors.sort_by_key(|tensor| (tensor.range().file, tensor.range().bytes.start));
        tensors.iter().map(|tensor| tensor.name()).collect()
    }

    /// The type, the shape and the bytes of a tensor.
    fn _info<'py>(&self, py: Python<'py>, name: &str) -> PyResult<(&str, Bound<'py, PyTuple>, u64)> {
        let tensor = self.0.get(name).map_err(|error| PyKeyError::new_err(error.to_string()))?;
        let dtype = tensor.dtype().map_or(tensor.format_type(), |dtype| dtype::name(dtype));
        Ok((dtype, PyTuple::new(py, tensor.shape())?, tensor.len()))
    }

    #[getter]
    fn _paths(&self) -> Vec<OsString> {
        self.0.paths().map(OsString::from).collect()
    }

    fn __repr__(&self) -> String {
        format!("<Tensors: {} in {} file(s)>", self.0.all().len(), self.0.paths().len())
    }
}

/// The arguments of `stream`, whose types it has checked.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    groups: Vec<Vec<String>>,
    name: Option<String>,
    /// Whether a thread sends the groups to a device.
    sends: bool,
    cycle: bool,
    depth: usize,
    keep: Option<usize>,
    order: Option<Vec<Vec<usize>>>,
    memory_limit: Option<u64>,
    read_mode: String,
    trace: Option<PathBuf>,
}

/// The groups of a stream, as a front. Its own state is the step of the next group in the pass.
struct Groups {
    /// The number of groups of a pass.
    count: usize,
}

impl Front for Groups {
    type Run = TensorStream;
    type Item = Group;
    type Own = u64;

    const AFTER_FORK: &'static str = "call `stream` after the fork";

    fn received(&self, state: &mut State<Self>, group: Found<Self>) -> Result<Option<Group>, Error> {
        let (number, lease) = (group.number(), Arc::new(Lease::of_group(group, state.own)));
        state.own += 1;
        state.lent(&lease);
        let (_place, count) = ((lease.epoch, lease.step), lease.parts.len());
        Ok(Some(Group { content: Content::Host(lease), _place, number, count }))
    }

    fn put_back(&self, state: &mut State<Self>, group: Group, _again: bool) -> Option<Group> {
        state.put_back.insert(group._place, group)
    }

    fn close(stream: TensorStream, limit: Duration) -> Result<(), Error> {
        stream.close_timeout(limit)
    }
}

/// The class `Stream` derives from this one.
#[pyclass(frozen, weakref, subclass, module = "twinbuf._twinbuf", name = "_Stream")]
pub(crate) struct Stream {
    shared: Arc<Shared<Groups>>,
    /// How many groups stay in memory when they have been read once.
    #[pyo3(get)]
    kept: usize,
    depth: usize,
    /// What measures the loop, if groups are sent to a device.
    #[pyo3(get)]
    _recorder: Option<Py<Recorder>>,
}

#[pymethods]
impl Stream {
    #[new]
    fn new(py: Python<'_>, model: &Tensors, options: Options) -> PyResult<Self> {
        let of_file = |error: twinbuf::mmap::Error| errors::raise(py, Failure::of_file(&error));
        let groups = model.0.groups(&options.groups).map_err(of_file)?;
        let (count, depth, name) = (groups.len(), options.depth, options.name);
        let staging = (0..count).map(|group| groups.bytes(group)).max().filter(|_| options.sends);
        let staging = 2 * staging.unwrap_or_default() as u64;
        let builder = twinbuf::stream(groups).depth(depth).read_mode(read_mode_of(py, &options.read_mode)?);
        let builder = if options.cycle { builder.cycle() } else { builder };
        let builder = if options.sends { builder.sends() } else { builder };
        let builder = name.iter().fold(builder, |builder, name| builder.name(name));
        let builder = options.trace.into_iter().fold(builder, |builder, path| builder.trace(path));
        let builder = options.keep.into_iter().fold(builder, |builder, groups| builder.keep(groups));
        let builder = options.order.into_iter().fold(builder, |builder, order| {
            builder.order(move |pass, step| order[(pass % order.len() as u64) as usize][step])
        });
        let limit = options.memory_limit;
        if let Some(bytes) = limit.filter(|&bytes| bytes < staging) {
            let wanted = format!("{staging} bytes for page-locked memory, and slots");
            return Err(errors::option(py, format!("memory_limit: wanted {wanted}, found {bytes}")));
        }
        let builder = limit.into_iter().fold(builder, |builder, bytes| builder.memory_limit(bytes - staging));
        let built = detached(py, || builder.build()).map_err(|error| errors::loading(py, error))?;
        let (kept, _recorder) = (built.kept(), Recorder::of(py, &built, options.sends)?);
        Ok(Self { shared: Shared::new(Groups { count }, name, Run::Idle(built)), kept, depth, _recorder })
    }

    /// The next pass. It begins when its first group is asked for, and then ends one that is under way.
    fn __iter__(&self, py: Python<'_>) -> PyResult<PassOfGroups> {
        self.shared.check(py)?;
        Ok(PassOfGroups(Loop::new(self.shared.clone(), None)))
    }

    /// End the pass under way.
    fn _end_pass(&self, py: Python<'_>) {
        self.shared.state.detached(py, |state| state.end_iteration(false));
    }

    /// The number of groups.
    fn __len__(&self) -> usize {
        self.shared.front.count
    }

    /// Return where the time went so far: passes are epochs, and groups are batches.
    fn report(&self, py: Python<'_>) -> PyResult<Py<PyAny>> {
        self.shared.check(py)?;
        self.shared.report(py, self._recorder.as_ref(), String::new())
    }

    fn __repr__(&self) -> String {
        let name = self.shared.name.as_deref().map_or(String::new(), |name| format!(" {name:?}"));
        format!(
            "<Stream{name}: {} groups, {} kept, depth={}>",
            self.shared.front.count, self.kept, self.depth
        )
    }
}

/// The groups of one pass.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
struct PassOfGroups(Loop<Groups>);

#[pymethods]
impl PassOfGroups {
    fn __iter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    /// The groups that are left.
    fn __len__(&self, py: Python<'_>) -> PyResult<usize> {
        let Shared { state, front: Groups { count }, .. } = &*self.0.shared;
        state.ask(py, |state| match self.0.is_current(state) {
            true => count - state.own as usize + state.put_back.len(),
            false if self.0.has_begun() => 0,
            false => *count,
        })
    }

    /// End the pass, if it has begun.
    fn close(&self) {
        self.0.leave();
    }

    /// The group was sent to the device.
    fn _sent(&self, py: Python<'_>) {
        self.0.used(py);
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<Group>> {
        self.0.begin(py, |state| {
            state.end_iteration(false);
            let pass = state.run.take().map(TensorStream::into_pass);
            (state.run, state.own) = (pass.map_or(Run::Closed, Run::Running), 0);
            Ok(())
        })?;
        self.0.next(py)
    }
}

/// A group of tensors. Its slot is free again when the group and all its arrays and tensors are gone. If the slot is needed
/// before, the group takes its memory along, as a `Batch` does.
#[pyclass(frozen, weakref, module = "twinbuf", name = "Group")]
pub(crate) struct Group {
    content: Content,
    /// The number of the pass, and the step in it.
    #[pyo3(get)]
    _place: (u64, u64),
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
    /// Raises TypeError for bfloat16, `F8_E4M3` and `F8_E5M2`, which only torch has, and on a ``device``. Quantized
    /// types, and the other floats of 8 bits and less, are arrays of bytes with one axis; `view` those of torch, as
    /// `torch.float8_e8m0fnu`.
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
