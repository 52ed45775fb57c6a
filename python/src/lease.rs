//! The memory of a batch, its shape in Python, and the arrays that view it.

use std::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::{mem, ptr, slice};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{IntoPyDict, PyDict, PyList, PyTuple};
use twinbuf::mmap::{Buffer, DType};
use twinbuf::stream::Group;
use twinbuf::{BatchIndices, Error};

use crate::dtype;
use crate::locked::lock;

/// A batch or a group of tensors that the loop has. Each of its arrays holds a reference to this; the drop of the last
/// reference frees the slot.
pub(crate) struct Lease {
    /// The parts: one for each data set of the loader, or one for each tensor of the group.
    pub(crate) parts: Box<[Part]>,
    pub(crate) names: Names,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    /// The numbers of a batch's records. `None` for a group.
    pub(crate) records: Option<BatchIndices>,
    pub(crate) readonly: bool,
    owner: Mutex<Owner>,
}

/// How the parts of a batch are put together: like the data sets in the argument `data`.
#[derive(Clone)]
pub(crate) enum Names {
    One,
    Tuple,
    Dict(Arc<[String]>),
}

/// The views of one data set.
pub(crate) enum Part {
    /// All records are one view.
    One(Arc<View>),
    /// Each record is a view, because they differ in length.
    Each(Box<[Arc<View>]>),
}

/// Records of one data set, in C order.
pub(crate) struct View {
    /// The first byte. It does not move while the lease exists.
    pub(crate) data: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) dtype: DType,
    /// The number of records, followed by the axes of a record.
    pub(crate) shape: Box<[isize]>,
    /// The strides in bytes, of C order.
    pub(crate) byte_strides: Box<[isize]>,
}

// SAFETY: a view is an address and what is there. Who has it has the owner of the memory too: a lease, or a fill that was
// put off. Simultaneous access by several threads to arrays on it is up to Python code, as with any array.
unsafe impl Send for View {}
// SAFETY: as for `Send`; it is immutable after construction.
unsafe impl Sync for View {}

/// The owner of the bytes. They are accessed only through [`View::data`].
enum Owner {
    /// A slot of the loader.
    Slot(twinbuf::Batch),
    /// Taken out of its slot, because the loader needed the slot.
    Own(#[allow(dead_code, reason = "it keeps the bytes")] Buffer),
    /// Tensors of a stream.
    Group(Group),
    /// Only within [`Lease::leave_slot`], while it has the lock.
    Moving,
}

/// There is no memory for a slot that somebody keeps.
pub(crate) struct NoMemory;

impl View {
    pub(crate) fn new(data: *mut u8, bytes: usize, dtype: DType, shape: Box<[isize]>) -> Arc<Self> {
        // The size is that of a single number, a few bytes, so it fits `isize`.
        let mut byte_strides = vec![dtype.size() as isize; shape.len()].into_boxed_slice();
        for axis in (1..shape.len()).rev() {
            byte_strides[axis - 1] = byte_strides[axis] * shape[axis];
        }
        Arc::new(Self { data, bytes, dtype, shape, byte_strides })
    }
}

/// Lends a view to numpy, torch or a data set of the program, by the buffer protocol.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Memory {
    pub(crate) view: Arc<View>,
    /// The owner. `None`: the memory is lent for one call of `read_into`, and `Filler::is_returned` finds out whether a
    /// buffer outlived it.
    _lease: Option<Arc<Lease>>,
    readonly: bool,
    /// The number of buffers that have not been released.
    pub(crate) exports: AtomicUsize,
}

impl Memory {
    pub(crate) fn new(view: Arc<View>, lease: Option<Arc<Lease>>, readonly: bool) -> Self {
        Self { view, _lease: lease, readonly, exports: AtomicUsize::new(0) }
    }

    /// The array refers to this, and this to the lease. It does not refer to the batch: a program can release the batch
    /// before the array.
    pub(crate) fn array(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        static ASARRAY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        ASARRAY.import(py, "numpy", "asarray")?.call1((self,))
    }

    /// As `array`.
    pub(crate) fn tensor(self, py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
        static FROM_NUMPY: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let view = self.view.clone();
        if dtype::format(view.dtype).is_some() {
            return FROM_NUMPY.import(py, "torch", "from_numpy")?.call1((self.array(py)?,));
        }
        let (torch, shape) = (py.import("torch")?, PyTuple::new(py, &view.shape)?);
        let dtype = [("dtype", torch.getattr(dtype::name(view.dtype))?)].into_py_dict(py)?;
        match view.bytes {
            0 => torch.call_method("empty", (shape,), Some(&dtype)), // torch refuses memory of no bytes
            _ => torch.call_method("frombuffer", (self,), Some(&dtype))?.call_method1("view", (shape,)),
        }
    }
}

#[pymethods]
impl Memory {
    /// # Safety
    ///
    /// Python calls it with a view to fill, according to the buffer protocol. The view refers to this object, which has
    /// the memory, the shape and the strides.
    pub(crate) unsafe fn __getbuffer__(
        slf: Bound<'_, Self>,
        view: *mut ffi::Py_buffer,
        flags: c_int,
    ) -> PyResult<()> {
        let Self { view: found, readonly, exports, .. } = slf.get();
        let wanted = |flag: c_int| flags & flag == flag;
        let format = dtype::format(found.dtype);
        if wanted(ffi::PyBUF_WRITABLE) && *readonly {
            return Err(PyBufferError::new_err("tensors of a stream are not for writing"));
        }
        if wanted(ffi::PyBUF_FORMAT) && format.is_none() {
            let name = dtype::name(found.dtype);
            return Err(PyBufferError::new_err(format!("the buffer protocol has no format for {name}")));
        }
        if wanted(ffi::PyBUF_F_CONTIGUOUS) && !wanted(ffi::PyBUF_ANY_CONTIGUOUS) && found.shape.len() > 1 {
            return Err(PyBufferError::new_err("a batch lies in C order"));
        }
        let or_null = |flag: c_int, axes: &[isize]| match wanted(flag) {
            true => axes.as_ptr().cast_mut(),
            false => ptr::null_mut(),
        };
        let filled = ffi::Py_buffer {
            buf: found.data.cast::<c_void>(),
            obj: slf.clone().into_ptr(),
            len: found.bytes as isize,
            itemsize: found.dtype.size() as isize,
            readonly: c_int::from(*readonly),
            ndim: if wanted(ffi::PyBUF_ND) { found.shape.len() as c_int } else { 1 },
            format: format
                .filter(|_| wanted(ffi::PyBUF_FORMAT))
                .map_or(ptr::null_mut(), |format| format.as_ptr().cast_mut()),
            shape: or_null(ffi::PyBUF_ND, &found.shape),
            strides: or_null(ffi::PyBUF_STRIDES, &found.byte_strides),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        };
        // Relaxed: the GIL, which abi3 builds have, orders all uses of this count.
        exports.fetch_add(1, Ordering::Relaxed);
        // SAFETY: Python passes a view that can be written.
        unsafe { view.write(filled) };
        Ok(())
    }

    /// # Safety
    ///
    /// Python calls it once for each view.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Lease {
    pub(crate) fn new(mut batch: twinbuf::Batch, names: Names) -> Result<Self, Error> {
        let whole: &mut [u8] = &mut batch;
        let data = whole.as_mut_ptr();
        // A batch is in memory, so the number of its records fits `usize`.
        let plan = batch.plan().clone();
        let records = usize::try_from(plan.len()).unwrap_or(usize::MAX);
        let part = |field| {
            let bytes = batch.field::<u8>(field)?;
            let at = data.wrapping_add(bytes.as_ptr().addr() - data.addr());
            let record = batch.field_type(field)?;
            let dtype = dtype::of(record);
            let Some(offsets) = batch.offsets(field) else {
                let shape = dtype::of_records(records, record.shape());
                return Ok(Part::One(View::new(at, bytes.len(), dtype, shape)));
            };
            let views = offsets.windows(2).map(|ends| {
                let bytes = ends[1] - ends[0];
                let shape = Box::new([(bytes / dtype.size()) as isize]);
                View::new(at.wrapping_add(ends[0]), bytes, dtype, shape)
            });
            Ok(Part::Each(views.collect()))
        };
        let parts = (0..batch.field_count()).map(part).collect::<Result<_, Error>>()?;
        let (epoch, step, owner) = (batch.epoch(), batch.step(), Mutex::new(Owner::Slot(batch)));
        Ok(Self { parts, names, epoch, step, records: Some(plan), readonly: false, owner })
    }

    /// Makes a lease of a group of tensors, with a view for each. The views are read-only, because a group may stay in
    /// memory for the next pass.
    pub(crate) fn of_group(group: Group, step: u64) -> Self {
        let view = |tensor: twinbuf::stream::View<'_>| {
            let (bytes, of) = (tensor.bytes(), tensor.tensor());
            let (dtype, shape) = match of.dtype() {
                Some(dtype) => (dtype, of.shape().iter().map(|&axis| axis as isize).collect()),
                // Return a tensor of an unknown type as bytes, for the caller to decode.
                None => (DType::U8, vec![bytes.len() as isize].into()),
            };
            Part::One(View::new(bytes.as_ptr().cast_mut(), bytes.len(), dtype, shape))
        };
        let parts = group.tensors().map(view).collect();
        let names = Names::Dict(group.tensors().map(|tensor| tensor.name().to_owned()).collect());
        let (epoch, owner) = (group.pass(), Mutex::new(Owner::Group(group)));
        Self { parts, names, epoch, step, records: None, readonly: true, owner }
    }

    /// Returns the views of all parts.
    pub(crate) fn views(&self) -> impl Iterator<Item = &Arc<View>> {
        self.parts.iter().flat_map(|part| match part {
            Part::One(view) => slice::from_ref(view),
            Part::Each(views) => views,
        })
    }

    /// Takes the memory out of its slot, which gets new memory. Returns whether it was in a slot.
    pub(crate) fn leave_slot(&self) -> Result<bool, NoMemory> {
        let mut owner = lock(&self.owner);
        if let Owner::Group(group) = &mut *owner {
            return group.leave_slot().map_err(|_| NoMemory);
        }
        let (left, now) = match mem::replace(&mut *owner, Owner::Moving) {
            Owner::Slot(batch) => match batch.into_buffer() {
                Ok(buffer) => (Ok(true), Owner::Own(buffer)),
                Err(refused) => (Err(NoMemory), Owner::Slot(refused.0)),
            },
            other => (Ok(false), other),
        };
        *owner = now;
        left
    }

    /// Calls `make` with the memory of each view. Each data set becomes one object, or a list of objects if its records differ
    /// in length; `names` puts them into a tuple or a dict.
    fn pack<'py>(
        self: &Arc<Self>,
        py: Python<'py>,
        readonly: bool,
        make: impl Fn(Memory, Python<'py>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let made = |view: &Arc<View>| make(Memory::new(view.clone(), Some(self.clone()), readonly), py);
        let mut parts = self.parts.iter().map(|part| match part {
            Part::One(view) => made(view),
            Part::Each(views) => {
                Ok(PyList::new(py, views.iter().map(made).collect::<PyResult<Vec<_>>>()?)?.into_any())
            }
        });
        match &self.names {
            Names::One => parts.next().unwrap_or_else(|| Ok(py.None().into_bound(py))),
            Names::Tuple => Ok(PyTuple::new(py, parts.collect::<PyResult<Vec<_>>>()?)?.into_any()),
            Names::Dict(names) => {
                let dict = PyDict::new(py);
                names.iter().zip(parts).try_for_each(|(name, part)| dict.set_item(name, part?))?;
                Ok(dict.into_any())
            }
        }
    }

    pub(crate) fn arrays<'py>(self: &Arc<Self>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if let Some(view) = self.views().find(|view| dtype::format(view.dtype).is_none()) {
            return Err(dtype::lacking(view.dtype, "use `torch()`"));
        }
        self.pack(py, self.readonly, Memory::array)
    }

    /// The tensors. torch has none for reading only.
    pub(crate) fn tensors<'py>(self: &Arc<Self>, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.pack(py, false, Memory::tensor)
    }
}
