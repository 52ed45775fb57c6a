//! `Batch`: the guard of a slot, and the arrays that look into it.

use std::ffi::{CStr, c_int, c_void};
use std::mem;
use std::ptr;
use std::sync::{Arc, Mutex, PoisonError};

use pyo3::exceptions::{PyBufferError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use twinbuf::BatchPlan;
use twinbuf::mmap::Buffer;

use crate::dlpack;
use crate::dtype::{self, Layout};
use crate::plan;

/// A batch and the shape in which Python sees it. Every array on it holds one reference; the last to go frees the slot.
pub(crate) struct Lease {
    /// The first byte. It stays where it is as long as the batch lives.
    pub(crate) data: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) layout: Arc<Layout>,
    /// Records, then the axes of a record.
    pub(crate) shape: Box<[isize]>,
    /// In elements.
    pub(crate) strides: Box<[isize]>,
    byte_strides: Box<[isize]>,
    epoch: u64,
    step: u64,
    memory: Mutex<Memory>,
}

// SAFETY: the memory behind `data` belongs to `memory`, which is `Send`, and which nothing else reaches while the lease
// lives. What threads do with the arrays on it at the same time is up to Python code, as with any array.
unsafe impl Send for Lease {}
// SAFETY: as above; all else is not changed after it was made.
unsafe impl Sync for Lease {}

/// What keeps the bytes. They are reached through [`Lease::data`] alone.
enum Memory {
    /// A slot of the loader.
    Slot(twinbuf::Batch),
    /// Taken out of the slot, because the loader needed it.
    Own { _buffer: Buffer, records: BatchPlan },
    /// Between the two.
    Moving,
}

impl Lease {
    pub(crate) fn new(mut batch: twinbuf::Batch, layout: Arc<Layout>) -> Self {
        let bytes: &mut [u8] = &mut batch;
        let (data, bytes) = (bytes.as_mut_ptr(), bytes.len());
        let axes = layout.shape.iter().map(|&axis| axis as isize);
        // A batch lies in memory, so its records are fewer than `isize::MAX`.
        let shape: Box<[isize]> = std::iter::once(batch.plan().len() as isize).chain(axes).collect();
        let mut strides = vec![1; shape.len()].into_boxed_slice();
        for axis in (1..shape.len()).rev() {
            strides[axis - 1] = strides[axis] * shape[axis];
        }
        let size = layout.dtype.size() as isize;
        let byte_strides = strides.iter().map(|stride| stride * size).collect();
        let (epoch, step) = (batch.epoch(), batch.step());
        let memory = Mutex::new(Memory::Slot(batch));
        Self { data, bytes, layout, shape, strides, byte_strides, epoch, step, memory }
    }
}

impl Lease {
    /// Frees the slot, which gets other memory. `None` if that was done before; `Some(false)` if there is no memory.
    pub(crate) fn leave_slot(&self) -> Option<bool> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        match mem::replace(&mut *memory, Memory::Moving) {
            Memory::Slot(batch) => {
                let records = batch.plan().clone();
                let (left, now) = match batch.into_buffer() {
                    Ok(buffer) => (true, Memory::Own { _buffer: buffer, records }),
                    Err(batch) => (false, Memory::Slot(batch)),
                };
                *memory = now;
                Some(left)
            }
            other => {
                *memory = other;
                None
            }
        }
    }
}

/// One batch, in the slot that it was read into.
///
/// Arrays made from it look into the slot: nothing is copied, and they can be written to. The slot is free again when
/// the batch and all arrays on it are gone. Loops need no more: a name that is bound again lets go of what it had.
///
/// Data in use is never overwritten. The loader fills its ``depth`` slots in turn. When the next one is still in use, it
/// waits 0.1 s; then the batch keeps its memory, the slot gets new memory of the same size, and a warning is logged
/// once. To keep batches without that wait, copy them: ``batch.numpy().copy()``, ``batch.torch().clone()``.
///
/// Attributes
/// ----------
/// epoch, step
///     Its place in the plan.
#[pyclass(frozen, weakref, module = "twinbuf", name = "Batch")]
pub(crate) struct Batch {
    /// `None` once it was released.
    lease: Mutex<Option<Arc<Lease>>>,
    #[pyo3(get)]
    epoch: u64,
    #[pyo3(get)]
    step: u64,
}

impl Batch {
    pub(crate) fn new(lease: Arc<Lease>) -> Self {
        let (epoch, step) = (lease.epoch, lease.step);
        Self { lease: Mutex::new(Some(lease)), epoch, step }
    }

    fn lease(&self) -> PyResult<Arc<Lease>> {
        // Nothing that holds the lock can panic half-way.
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner);
        lease.clone().ok_or_else(|| PyValueError::new_err("the batch was released"))
    }
}

#[pymethods]
impl Batch {
    /// The batch as an array of numpy, without a copy: shape ``(records, *shape of a record)``.
    ///
    /// Raises TypeError for bfloat16 and 8-bit floats, which numpy lacks; `torch` has them.
    fn numpy<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let layout = slf.get().lease()?.layout.clone();
        if dtype::format(layout.dtype).is_none() {
            let name = dtype::name(layout.dtype);
            return Err(PyTypeError::new_err(format!("numpy has no {name}: use `batch.torch()`")));
        }
        slf.py().import("numpy")?.call_method1("asarray", (slf,))
    }

    /// The batch as a tensor of torch in host memory, without a copy.
    fn torch<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let py = slf.py();
        let lease = slf.get().lease()?;
        let from_dlpack = py.import("torch.utils.dlpack")?.getattr("from_dlpack")?;
        from_dlpack.call1((dlpack::capsule(py, lease, true)?,))
    }

    /// The numbers of its records in the data set, in its order, as an array of int64.
    #[getter]
    fn indices<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let lease = self.lease()?;
        let records = match &*lease.memory.lock().unwrap_or_else(PoisonError::into_inner) {
            Memory::Slot(batch) => batch.plan().clone(),
            Memory::Own { records, .. } => records.clone(),
            Memory::Moving => unreachable!("only within a lock"),
        };
        plan::indices(py, &records)
    }

    /// Let go of the slot now. Arrays that were made from the batch keep it until they are gone too.
    fn release(&self) {
        let lease = self.lease.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(lease);
    }

    /// The number of records.
    fn __len__(&self) -> PyResult<usize> {
        Ok(self.lease()?.shape[0].unsigned_abs())
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    fn __exit__(&self, _kind: &Bound<'_, PyAny>, _error: &Bound<'_, PyAny>, _trace: &Bound<'_, PyAny>) {
        self.release();
    }

    /// The batch for ``from_dlpack`` of any library. Parameters as in the array API standard.
    #[pyo3(signature = (*, stream=None, max_version=None, dl_device=None, copy=None))]
    fn __dlpack__<'py>(
        &self,
        py: Python<'py>,
        stream: Option<&Bound<'py, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if stream.is_some() {
            return Err(PyValueError::new_err("stream: wanted None for host memory"));
        }
        if dl_device.is_some_and(|device| device != dlpack::HOST) || copy == Some(true) {
            return Err(PyBufferError::new_err("a batch is exported without a copy, in host memory"));
        }
        let versioned = max_version.is_some_and(|(major, _)| major >= 1);
        dlpack::capsule(py, self.lease()?, versioned)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        dlpack::HOST
    }

    /// # Safety
    ///
    /// Python calls it with a view to fill, as the buffer protocol has it.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let lease = slf.get().lease()?;
        let format = dtype::format(lease.layout.dtype);
        if flags & ffi::PyBUF_FORMAT == ffi::PyBUF_FORMAT && format.is_none() {
            let name = dtype::name(lease.layout.dtype);
            return Err(PyBufferError::new_err(format!("the buffer protocol has no format for {name}")));
        }
        let wanted = |flag: c_int| flags & flag == flag;
        if wanted(ffi::PyBUF_F_CONTIGUOUS) && !wanted(ffi::PyBUF_ANY_CONTIGUOUS) && lease.shape.len() > 1 {
            return Err(PyBufferError::new_err("a batch lies in C order"));
        }
        let or_null = |condition: bool, pointer: *const isize| match condition {
            true => pointer.cast_mut(),
            false => ptr::null_mut(),
        };
        let filled = ffi::Py_buffer {
            buf: lease.data.cast::<c_void>(),
            obj: slf.into_any().into_ptr(),
            len: lease.bytes as isize,
            itemsize: lease.layout.dtype.size() as isize,
            readonly: 0,
            ndim: if wanted(ffi::PyBUF_ND) { lease.shape.len() as c_int } else { 1 },
            format: match wanted(ffi::PyBUF_FORMAT) {
                true => format.map_or(ptr::null_mut(), |format: &CStr| format.as_ptr().cast_mut()),
                false => ptr::null_mut(),
            },
            shape: or_null(wanted(ffi::PyBUF_ND), lease.shape.as_ptr()),
            strides: or_null(wanted(ffi::PyBUF_STRIDES), lease.byte_strides.as_ptr()),
            suboffsets: ptr::null_mut(),
            // Keeps memory, shape and strides until the view is released.
            internal: Arc::into_raw(lease).cast_mut().cast::<c_void>(),
        };
        // SAFETY: Python passes a view that may be written.
        unsafe { view.write(filled) };
        Ok(())
    }

    /// # Safety
    ///
    /// Python calls it with a view that `__getbuffer__` filled, once.
    unsafe fn __releasebuffer__(&self, view: *mut ffi::Py_buffer) {
        // SAFETY: the view is one that `__getbuffer__` filled.
        let internal = unsafe { (*view).internal };
        // SAFETY: it put a counted reference there, which is taken back once.
        drop(unsafe { Arc::from_raw(internal.cast::<Lease>().cast_const()) });
    }

    fn __repr__(&self) -> String {
        let at = format!("epoch {}, step {}", self.epoch, self.step);
        match self.lease() {
            Ok(lease) => {
                format!("<Batch: {at}, {} {:?}>", dtype::name(lease.layout.dtype), lease.shape)
            }
            Err(_) => format!("<Batch: {at}, released>"),
        }
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "a Batch cannot be pickled, because it is a slot of its loader: send a copy, `batch.numpy().copy()`",
        ))
    }
}
