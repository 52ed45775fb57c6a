//! `Batch`: the guard of a slot.

use std::ffi::c_int;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict};
use pyo3::{IntoPyObjectExt, PyTraverseError, PyVisit};
use twinbuf::BatchIndices;

use crate::dtype;
use crate::lease::{Lease, Memory, Part, View};
use crate::locked::lock;
use crate::plan::indices;

/// One batch, stored in the slot that it was read into.
///
/// What `numpy` and `torch` return are views of the slot: nothing is copied, and they are writable. The slot is free again
/// once the batch and all its views are gone. A normal loop needs no more than that: rebinding a name drops its old value.
///
/// Data in use is never overwritten. The loader fills its ``depth`` slots in turn. If the next slot is still in use, the
/// loader leaves the memory to the batch, and allocates new memory for the slot. The first time it waits 0.1 s before,
/// and logs a warning, but not for a batch of an earlier iteration.
///
/// A batch of a loader with a ``device`` has left its slot: it consists of tensors on the device, and can be kept.
#[pyclass(frozen, weakref, module = "twinbuf", name = "Batch")]
pub(crate) struct Batch {
    content: Mutex<Content>,
    /// Whether somebody took a buffer view of this object, perhaps to release it and use the memory for as long as it
    /// refers to this object: the tensor of `torch.frombuffer(batch)` does that.
    exported: AtomicBool,
    /// The epoch of the batch, from 0.
    #[pyo3(get)]
    pub(crate) epoch: u64,
    /// The step of the batch within its epoch, from 0.
    #[pyo3(get)]
    pub(crate) step: u64,
}

enum Content {
    Slot(Arc<Lease>),
    /// The result of `torch()`, moved to the device: a tensor, or a tuple, dict or list of tensors.
    Device {
        tensors: Py<PyAny>,
        records: BatchIndices,
    },
    /// Released. The lease, if there is one, keeps the slot until this object is freed, for users of the batch's own buffer.
    Released(Option<Arc<Lease>>),
}

impl Batch {
    pub(crate) fn new(lease: Arc<Lease>) -> Self {
        let (epoch, step) = (lease.epoch, lease.step);
        Self { content: Mutex::new(Content::Slot(lease)), exported: AtomicBool::new(false), epoch, step }
    }

    fn content(&self) -> MutexGuard<'_, Content> {
        // The content is valid even if a thread panicked with the lock: each holder only assigns to it. No holder
        // waits or runs Python code.
        lock(&self.content)
    }

    fn lease(&self) -> PyResult<Arc<Lease>> {
        match &*self.content() {
            Content::Slot(lease) => Ok(lease.clone()),
            Content::Device { .. } => Err(PyTypeError::new_err(
                "the batch is on a device: use `torch()`, or `torch().cpu().numpy()`",
            )),
            Content::Released(_) => Err(PyValueError::new_err("the batch was released")),
        }
    }

    /// Returns the tensors if the batch is on a device.
    fn on_device<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        match &*self.content() {
            Content::Device { tensors, .. } => Some(tensors.bind(py).clone()),
            _ => None,
        }
    }

    fn records(&self) -> PyResult<BatchIndices> {
        if let Content::Device { records, .. } = &*self.content() {
            return Ok(records.clone());
        }
        Ok(self.lease()?.records.clone().expect("a batch has numbers of records"))
    }

    fn replace(&self, new: impl FnOnce(&Content) -> Content) {
        let mut content = self.content();
        let new = new(&content);
        let old = mem::replace(&mut *content, new);
        // Drop the old content without the lock, because dropping a tensor may run Python code.
        drop(content);
        drop(old);
    }

    /// Returns the memory if the batch is one array, and otherwise an error that names the methods to use.
    fn only(&self) -> PyResult<Memory> {
        let lease = self.lease()?;
        match &lease.parts[..] {
            [Part::One(view)] => Ok(Memory::new(view.clone(), Some(lease.clone()), false)),
            [_] => Err(PyBufferError::new_err("the records differ in length: use `numpy()` or `torch()`")),
            parts => Err(PyBufferError::new_err(format!(
                "the batch is {} arrays, of as many data sets: use `numpy()` or `torch()`",
                parts.len()
            ))),
        }
    }
}

#[pymethods]
impl Batch {
    /// The batch as a numpy array, without a copy: shape ``(records, *shape of a record)``.
    ///
    /// A tuple or a dict of arrays if the loader has a tuple or a dict of data sets. Records that differ in length are a
    /// list of arrays. Raises TypeError for bfloat16 and 8-bit floats, which numpy lacks, and on a ``device``: use `torch`.
    /// jax's ``device_put`` and jitted functions take this array, and not the batch itself.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        slf.get().lease()?.arrays(slf.py())
    }

    /// The batch as a torch tensor, without a copy: in host memory, or on the loader's ``device``. A tuple, a dict or a
    /// list, as of `numpy`.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        match slf.get().on_device(slf.py()) {
            Some(tensors) => Ok(tensors),
            None => slf.get().lease()?.tensors(slf.py()),
        }
    }

    /// For ``numpy.asarray``: refuses a batch of several arrays, which would become an array of one object.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        slf: &Bound<'py, Self>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        slf.get().only().map_err(|error| PyTypeError::new_err(error.value(py).to_string()))?;
        let array = Self::numpy(slf)?;
        let dtype = dtype.map_or_else(|| array.getattr("dtype"), |dtype| Ok(dtype.clone()))?;
        let copies = [("copy", copy == Some(true))].into_py_dict(py)?;
        let made = array.call_method("astype", (dtype,), Some(&copies))?;
        let fits = copy != Some(false) || made.is(&array);
        fits.then_some(made).ok_or_else(|| PyValueError::new_err("copy: wanted none, found another type"))
    }

    /// The numbers of the batch's records in the data set, in batch order, as an int64 array.
    #[getter]
    fn indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        indices(py, &self.records()?)
    }

    /// Release the slot now. Arrays made from the batch keep it until they are gone too.
    ///
    /// ``torch.frombuffer(batch)`` and other users of the batch's own buffer may not report when they are done with it.
    /// If there was one, the slot stays until the batch object is gone too.
    fn release(&self) {
        self.replace(|old| {
            Content::Released(match old {
                Content::Slot(lease) if self.exported.load(Ordering::Relaxed) => Some(lease.clone()),
                Content::Released(kept) => kept.clone(),
                _ => None,
            })
        });
    }

    /// The epoch and the step.
    #[getter]
    fn _place(&self) -> (u64, u64) {
        (self.epoch, self.step)
    }

    /// Replaces the batch's memory by these tensors on a device, which frees its slot.
    fn _moved(slf: Py<Self>, tensors: Py<PyAny>) -> PyResult<Py<Self>> {
        let records = slf.get().records()?;
        slf.get().replace(|_| Content::Device { tensors, records });
        Ok(slf)
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.content.try_lock().as_deref() {
            Ok(Content::Device { tensors, .. }) => visit.call(tensors),
            _ => Ok(()),
        }
    }

    fn __clear__(&self) {
        self.replace(|_| Content::Released(None));
    }

    /// The number of records.
    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.records()?.len())?)
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.release();
    }

    /// The batch for ``from_dlpack`` of any library. The parameters are those of the array API standard.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = PyDict::new(py);
        max_version.map_or(Ok(()), |version| options.set_item("max_version", version))?;
        if let Some(tensor) = self.on_device(py) {
            options.set_item("stream", stream)?;
            options.set_item("dl_device", dl_device)?;
            options.set_item("copy", copy)?;
            return tensor.call_method("__dlpack__", (), Some(&options));
        }
        if stream.is_some() {
            return Err(PyValueError::new_err("stream: wanted None for host memory"));
        }
        if dl_device.is_some_and(|device| device != HOST) || copy == Some(true) {
            return Err(PyBufferError::new_err("a batch is exported without a copy, in host memory"));
        }
        let memory = self.only()?;
        let array = match dtype::format(memory.view.dtype) {
            Some(_) => memory.array(py)?,
            None => memory.tensor(py)?, // numpy lacks it
        };
        array.call_method("__dlpack__", (), Some(&options))
    }

    fn __dlpack_device__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.on_device(py) {
            Some(tensor) => tensor.call_method0("__dlpack_device__"),
            None => HOST.into_bound_py_any(py),
        }
    }

    /// # Safety
    ///
    /// Python calls it with a view to fill, according to the buffer protocol.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // Relaxed: the lock of the content, which `only` and `release` take, orders it.
        slf.get().exported.store(true, Ordering::Relaxed);
        let memory = Bound::new(slf.py(), slf.get().only()?)?;
        // SAFETY: as for this function.
        unsafe { Memory::__getbuffer__(memory, view, flags) }
    }

    fn __repr__(&self) -> String {
        let of = |view: &Arc<View>| format!("{} {:?}", dtype::name(view.dtype), view.shape);
        let content = match &*self.content() {
            Content::Slot(lease) => lease.views().map(of).collect::<Vec<_>>().join(", "),
            Content::Device { .. } => "on a device".to_owned(),
            Content::Released(_) => "released".to_owned(),
        };
        format!("<Batch: epoch {}, step {}, {content}>", self.epoch, self.step)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a Batch cannot be pickled, because it is a slot of its loader: send a copy, `batch.numpy().copy()`",
        ))
    }
}

/// Host memory in DLPack's terms: `kDLCPU`, device 0.
const HOST: (i32, i32) = (1, 0);
