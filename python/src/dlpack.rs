//! Batches as DLPack tensors: version 1.0, and the unversioned form for older readers.
//!
//! The structures are those of dlpack.h. A consumer takes the tensor out of its capsule and deletes it; if none does,
//! the capsule deletes it.

use std::ffi::{CStr, c_void};
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

/// What a capsule has: a `Managed` or a `Versioned`. Its context comes from `Box::into_raw`.
trait Exported {
    /// The name of the capsule until a consumer takes the tensor out.
    const NAME: &'static CStr;
    fn context(&self) -> *mut c_void;
}

impl Exported for Managed {
    const NAME: &'static CStr = c"dltensor";

    fn context(&self) -> *mut c_void {
        self.context
    }
}

impl Exported for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";

    fn context(&self) -> *mut c_void {
        self.context
    }
}

/// What a tensor keeps alive: its memory, and its shape and strides in DLPack's type.
struct Context {
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _lease: Arc<Lease>,
}

/// Makes a capsule with a tensor for the view at place `field` of the lease, without a copy.
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
        // `shape` and `strides` are boxes, so they stay in place when the context moves.
        shape: context.shape.as_mut_ptr(),
        strides: context.strides.as_mut_ptr(),
        byte_offset: 0,
    };
    let context = Box::into_raw(context).cast::<c_void>();
    match versioned {
        true => {
            let deleter = Some(delete::<Versioned> as unsafe extern "C" fn(_));
            wrap(py, Versioned { major: 1, minor: 0, context, deleter, flags: 0, tensor })
        }
        false => {
            let deleter = Some(delete::<Managed> as unsafe extern "C" fn(_));
            wrap(py, Managed { tensor, context, deleter })
        }
    }
}

fn wrap<T: Exported>(py: Python<'_>, tensor: T) -> PyResult<Bound<'_, PyAny>> {
    let tensor = Box::into_raw(Box::new(tensor));
    // SAFETY: the pointer is not null, the name is static, and this thread is attached to the interpreter.
    let capsule =
        unsafe { ffi::PyCapsule_New(tensor.cast::<c_void>(), T::NAME.as_ptr(), Some(drop_unclaimed::<T>)) };
    if capsule.is_null() {
        // SAFETY: the tensor was made above. No capsule has it, so this is its only use.
        unsafe { delete(tensor) };
        return Err(PyErr::take(py).unwrap_or_else(|| PyMemoryError::new_err("no memory for a capsule")));
    }
    // SAFETY: `capsule` is a new reference and is not null.
    Ok(unsafe { Bound::from_owned_ptr(py, capsule) })
}

/// Frees the tensor and its share of the batch. Any thread may call it, attached to the interpreter or not.
///
/// # Safety
///
/// `tensor` is one that [`wrap`] made, and is not used again.
unsafe extern "C" fn delete<T: Exported>(tensor: *mut T) {
    // SAFETY: `wrap` made the pointer with `Box::into_raw`, and the caller does not use it again.
    let tensor = unsafe { Box::from_raw(tensor) };
    // SAFETY: `capsule` made the context with `Box::into_raw`, and only this tensor had it.
    give_up(unsafe { Box::from_raw(tensor.context().cast::<Context>()) });
}

/// Drops the context while this thread holds the GIL: its slot may own Python objects.
///
/// PyO3 decides by a count of its own whether a thread holds the GIL. That count is wrong here: torch, called from this
/// library, releases the GIL before it calls a deleter. So this function asks the interpreter.
fn give_up(context: Box<Context>) {
    // SAFETY: `Py_IsInitialized` may be called at any time, on any thread.
    if unsafe { ffi::Py_IsInitialized() } == 0 {
        // The interpreter is gone, so this drop frees no Python object.
        return drop(context);
    }
    // SAFETY: the interpreter exists. `Ensure` and `Release` are called as a pair, on one thread.
    let before = unsafe { ffi::PyGILState_Ensure() };
    drop(context);
    // SAFETY: as above.
    unsafe { ffi::PyGILState_Release(before) };
}

/// Deletes the tensor unless a consumer took it out: the consumer has then renamed the capsule.
///
/// # Safety
///
/// Python calls it once, with a capsule that [`wrap`] made, while this thread is attached to the interpreter.
unsafe extern "C" fn drop_unclaimed<T: Exported>(capsule: *mut ffi::PyObject) {
    // SAFETY: Python passes a live capsule, on a thread that is attached to the interpreter.
    if unsafe { ffi::PyCapsule_IsValid(capsule, T::NAME.as_ptr()) } != 0 {
        // SAFETY: the capsule is valid and has this name.
        let tensor = unsafe { ffi::PyCapsule_GetPointer(capsule, T::NAME.as_ptr()) };
        // SAFETY: `wrap` put a `T` into the capsule. A consumer that takes it out renames the capsule.
        unsafe { delete(tensor.cast::<T>()) };
    }
}
