//! Batches as DLPack tensors: version 1.0, and the unversioned form for older readers.
//!
//! The structures are those of dlpack.h. A capsule whose tensor was never taken out deletes the tensor.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;

use pyo3::exceptions::PyMemoryError;
use pyo3::ffi;
use pyo3::prelude::*;

use crate::dtype;
use crate::lease::Lease;

/// Host memory: `kDLCPU`, device 0.
pub(crate) const HOST: (i32, i32) = (1, 0);

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor`.
#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: Tensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// `DLManagedTensorVersioned`.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    /// 0: the tensor is writable, and is not a copy.
    flags: u64,
    tensor: Tensor,
}

/// What a tensor keeps alive: its memory, and its axes in DLPack's type.
struct Context {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _lease: Arc<Lease>,
}

const NAME: &CStr = c"dltensor";
const NAME_VERSIONED: &CStr = c"dltensor_versioned";

/// A capsule with a tensor that views the batch: the records of one data set.
pub(crate) fn capsule<'py>(
    py: Python<'py>,
    lease: Arc<Lease>,
    field: usize,
    versioned: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let axes = |axes: &[isize]| axes.iter().map(|&axis| axis as i64).collect();
    let view = &lease.views[field];
    let (shape, strides) = (axes(&view.shape), axes(&view.strides));
    let ((code, bits), data) = (dtype::dlpack(view.dtype), view.data.cast::<c_void>());
    let mut context = Box::new(Context { shape, strides, _lease: lease });
    let tensor = Tensor {
        data,
        device: Device { kind: HOST.0, id: HOST.1 },
        ndim: context.shape.len() as i32,
        dtype: DataType { code, bits, lanes: 1 },
        // The boxes stay in place when the context moves.
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(context).cast::<c_void>();
    if versioned {
        let deleter = Some(delete_versioned as unsafe extern "C" fn(*mut Versioned));
        let tensor = Box::new(Versioned { major: 1, minor: 0, context, deleter, flags: 0, tensor });
        wrap(py, Box::into_raw(tensor).cast::<c_void>(), NAME_VERSIONED, drop_versioned, |tensor| {
            // SAFETY: this is the tensor made above.
            unsafe { delete_versioned(tensor.cast::<Versioned>()) }
        })
    } else {
        let deleter = Some(delete as unsafe extern "C" fn(*mut Managed));
        let tensor = Box::new(Managed { tensor, context, deleter });
        wrap(py, Box::into_raw(tensor).cast::<c_void>(), NAME, drop_plain, |tensor| {
            // SAFETY: this is the tensor made above.
            unsafe { delete(tensor.cast::<Managed>()) }
        })
    }
}

fn wrap<'py>(
    py: Python<'py>,
    tensor: *mut c_void,
    name: &'static CStr,
    destructor: ffi::PyCapsule_Destructor,
    delete: impl FnOnce(*mut c_void),
) -> PyResult<Bound<'py, PyAny>> {
    // SAFETY: the pointer is not null, the name is static, and this thread is attached to the interpreter.
    let capsule = unsafe { ffi::PyCapsule_New(tensor, name.as_ptr(), Some(destructor)) };
    if capsule.is_null() {
        delete(tensor);
        return Err(PyErr::take(py).unwrap_or_else(|| PyMemoryError::new_err("no memory for a capsule")));
    }
    // SAFETY: a new reference that is not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// Frees the tensor and its share of the batch. Any thread may call it, attached to the interpreter or not.
///
/// # Safety
///
/// `tensor` is one that [`capsule`] made, and is not used again.
unsafe extern "C" fn delete(tensor: *mut Managed) {
    // SAFETY: it was made by `Box::into_raw`, and the caller gives it up.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: so was its context.
    give_up(unsafe { Box::from_raw(tensor.context.cast::<Context>()) });
}

/// Drops the context while this thread holds the GIL: its slot may own Python objects.
///
/// PyO3 counts its own attachments. torch releases the GIL before it calls a deleter, even below a call into this
/// library. The count then says "attached" although the thread is not.
fn give_up(context: Box<Context>) {
    // SAFETY: may be called at any time.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        // No Python object is freed then.
        return drop(context);
    }
    // SAFETY: the interpreter exists; the two calls are a pair, on one thread.
    let before = unsafe { ffi::PyGILState_Ensure() };
    drop(context);
    // SAFETY: as above.
    unsafe { ffi::PyGILState_Release(before) };
}

/// Same as [`delete`], for a versioned tensor.
///
/// # Safety
///
/// Same as [`delete`].
unsafe extern "C" fn delete_versioned(tensor: *mut Versioned) {
    // SAFETY: it was made by `Box::into_raw`, and the caller gives it up.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: so was its context.
    give_up(unsafe { Box::from_raw(tensor.context.cast::<Context>()) });
}

/// Deletes the tensor unless it was taken out: then the capsule was renamed.
///
/// # Safety
///
/// Python calls it once, with a capsule that [`wrap`] made.
unsafe extern "C" fn drop_plain(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the capsule that is being freed.
    let tensor = unsafe { unclaimed(capsule, NAME) };
    if !tensor.is_null() {
        // SAFETY: a capsule of this name holds such a tensor.
        unsafe { delete(tensor.cast::<Managed>()) };
    }
}

/// Same as [`drop_plain`], for a versioned tensor.
///
/// # Safety
///
/// Same as [`drop_plain`].
unsafe extern "C" fn drop_versioned(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes the capsule that goes.
    let tensor = unsafe { unclaimed(capsule, NAME_VERSIONED) };
    if !tensor.is_null() {
        // SAFETY: a capsule of this name holds such a tensor.
        unsafe { delete_versioned(tensor.cast::<Versioned>()) };
    }
}

/// The contents of the capsule, or null if it was renamed.
///
/// # Safety
///
/// `capsule` is a capsule, and this thread is attached to the interpreter.
unsafe fn unclaimed(capsule: *mut ffi::PyObject, name: &CStr) -> *mut c_void {
    // SAFETY: as the caller promises.
    if unsafe { ffi::PyCapsule_IsValid(capsule, name.as_ptr()) } == 0 {
        return ptr::null_mut();
    }
    // SAFETY: the capsule has this name.
    unsafe { ffi::PyCapsule_GetPointer(capsule, name.as_ptr()) }
}
