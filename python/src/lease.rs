//! The memory of a batch, and its shape in Python.

use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::sync::{Mutex, PoisonError};
use std::{mem, ptr};

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;
use twinbuf::mmap::{Buffer, DType};
use twinbuf::stream::Group;
use twinbuf::{BatchIndices, Error};

use crate::dtype;
use crate::names::Names;

/// A batch or a group of tensors that the loop has. Each of its arrays holds a reference to this; the drop of the last
/// reference frees the slot.
pub(crate) struct Lease {
    /// The views of all parts, one part after the other.
    pub(crate) views: Box<[View]>,
    /// The parts: one for each data set of the loader, or one for each tensor of the group.
    pub(crate) parts: Box<[Part]>,
    pub(crate) names: Names,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) readonly: bool,
    memory: Mutex<Memory>,
}

/// The views of one data set, by their places in [`Lease::views`].
pub(crate) enum Part {
    /// All records are one view.
    One(usize),
    /// Each record is a view, because they differ in length.
    Each(Range<usize>),
}

/// Records of one data set, in C order.
pub(crate) struct View {
    /// The first byte. It does not move while the lease exists.
    pub(crate) data: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) dtype: DType,
    /// The number of records, followed by the axes of a record.
    pub(crate) shape: Box<[isize]>,
    /// The strides in elements.
    pub(crate) strides: Box<[isize]>,
    /// The strides in bytes.
    pub(crate) byte_strides: Box<[isize]>,
}

// SAFETY: the memory behind `data` belongs to `memory`. That is `Send`, and nothing else reaches it while the lease
// exists. Simultaneous access by several threads to its arrays is up to Python code, as with any array.
unsafe impl Send for Lease {}
// SAFETY: as for `Send`. `memory` has a lock, and all other fields are immutable after construction.
unsafe impl Sync for Lease {}

/// The owner of the bytes. They are accessed only through [`View::data`].
enum Memory {
    /// A slot of the loader.
    Slot(twinbuf::Batch),
    /// Taken out of its slot, because the loader needed the slot.
    Own { _buffer: Buffer, records: BatchIndices },
    /// Tensors of a stream.
    Group(Group),
    /// Only within [`Lease::leave_slot`], while it has the lock.
    Moving,
}

impl View {
    pub(crate) fn new(data: *mut u8, bytes: usize, dtype: DType, shape: Box<[isize]>) -> Self {
        let strides = strides(&shape, 1);
        let byte_strides = self::strides(&shape, dtype.size());
        Self { data, bytes, dtype, shape, strides, byte_strides }
    }

    /// Returns the view as a `Py_buffer`: writable, and with a null `internal`. It points to the shape and the strides
    /// of this object.
    pub(crate) fn buffer(&self, owner: Bound<'_, PyAny>, flags: c_int) -> PyResult<ffi::Py_buffer> {
        let wanted = |flag: c_int| flags & flag == flag;
        let format = dtype::format(self.dtype);
        if wanted(ffi::PyBUF_FORMAT) && format.is_none() {
            let name = dtype::name(self.dtype);
            return Err(PyBufferError::new_err(format!("the buffer protocol has no format for {name}")));
        }
        if wanted(ffi::PyBUF_F_CONTIGUOUS) && !wanted(ffi::PyBUF_ANY_CONTIGUOUS) && self.shape.len() > 1 {
            return Err(PyBufferError::new_err("a batch lies in C order"));
        }
        let or_null = |flag: c_int, axes: &[isize]| match wanted(flag) {
            true => axes.as_ptr().cast_mut(),
            false => ptr::null_mut(),
        };
        Ok(ffi::Py_buffer {
            buf: self.data.cast::<c_void>(),
            obj: owner.into_ptr(),
            len: self.bytes as isize,
            itemsize: self.dtype.size() as isize,
            readonly: 0,
            ndim: if wanted(ffi::PyBUF_ND) { self.shape.len() as c_int } else { 1 },
            format: format
                .filter(|_| wanted(ffi::PyBUF_FORMAT))
                .map_or(ptr::null_mut(), |format| format.as_ptr().cast_mut()),
            shape: or_null(ffi::PyBUF_ND, &self.shape),
            strides: or_null(ffi::PyBUF_STRIDES, &self.byte_strides),
            suboffsets: ptr::null_mut(),
            internal: ptr::null_mut(),
        })
    }
}

/// Returns the strides of an array in C order: in elements if `size` is 1, in bytes if it is that of an element.
fn strides(shape: &[isize], size: usize) -> Box<[isize]> {
    // `size` is that of a single number, a few bytes, so it fits `isize`.
    let mut strides = vec![size as isize; shape.len()].into_boxed_slice();
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

impl Lease {
    pub(crate) fn new(mut batch: twinbuf::Batch, names: Names) -> Result<Self, Error> {
        let whole: &mut [u8] = &mut batch;
        let data = whole.as_mut_ptr();
        // A batch is in memory, so the number of its records fits `usize`.
        let records = usize::try_from(batch.plan().len()).unwrap_or(usize::MAX);
        let (mut views, mut parts) = (Vec::new(), Vec::new());
        for field in 0..batch.field_count() {
            let bytes = batch.field::<u8>(field)?;
            let at = data.wrapping_add(bytes.as_ptr().addr() - data.addr());
            let record = batch.field_type(field)?;
            let (dtype, first) = (dtype::of(record), views.len());
            let Some(offsets) = batch.offsets(field) else {
                views.push(View::new(at, bytes.len(), dtype, dtype::of_records(records, record.shape())));
                parts.push(Part::One(first));
                continue;
            };
            views.extend(offsets.windows(2).map(|ends| {
                let bytes = ends[1] - ends[0];
                let shape = Box::new([(bytes / dtype.size()) as isize]);
                View::new(at.wrapping_add(ends[0]), bytes, dtype, shape)
            }));
            parts.push(Part::Each(first..views.len()));
        }
        let (epoch, step) = (batch.epoch(), batch.step());
        let memory = Mutex::new(Memory::Slot(batch));
        Ok(Self { views: views.into(), parts: parts.into(), names, epoch, step, readonly: false, memory })
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
            View::new(bytes.as_ptr().cast_mut(), bytes.len(), dtype, shape)
        };
        let views: Box<[View]> = group.tensors().map(view).collect();
        let names = Names::Dict(group.tensors().map(|tensor| tensor.name().to_owned()).collect());
        let (parts, epoch) = ((0..views.len()).map(Part::One).collect(), group.pass());
        Self { views, parts, names, epoch, step, readonly: true, memory: Mutex::new(Memory::Group(group)) }
    }

    /// The numbers of the batch's records.
    pub(crate) fn records(&self) -> BatchIndices {
        match &*self.memory.lock().unwrap_or_else(PoisonError::into_inner) {
            Memory::Slot(batch) => batch.plan().clone(),
            Memory::Own { records, .. } => records.clone(),
            Memory::Moving | Memory::Group(_) => unreachable!("only within a lock; only of batches"),
        }
    }

    /// Takes the memory out of its slot, which gets new memory. Returns whether there was enough memory for that, and
    /// `None` if it was done before.
    pub(crate) fn leave_slot(&self) -> Option<bool> {
        let mut memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        match mem::replace(&mut *memory, Memory::Moving) {
            Memory::Slot(batch) => {
                let records = batch.plan().clone();
                let (left, now) = match batch.into_buffer() {
                    Ok(buffer) => (true, Memory::Own { _buffer: buffer, records }),
                    Err(refused) => (false, Memory::Slot(refused.0)),
                };
                *memory = now;
                Some(left)
            }
            Memory::Group(mut group) => {
                let left = group.leave_slot().map_or(Some(false), |left| left.then_some(true));
                *memory = Memory::Group(group);
                left
            }
            other => {
                *memory = other;
                None
            }
        }
    }
}
