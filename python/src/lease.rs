//! The memory of a batch, and its shape in Python.

use std::mem;
use std::sync::{Mutex, PoisonError};

use twinbuf::mmap::{Buffer, DType};
use twinbuf::{BatchIndices, Error};

use crate::dtype::Layout;

/// A batch that was handed out. Every array of it holds one reference; dropping the last one frees the slot.
pub(crate) struct Lease {
    /// One view per data set of the loader.
    pub(crate) views: Box<[View]>,
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    memory: Mutex<Memory>,
}

/// The records of one data set, in C order.
pub(crate) struct View {
    /// The first byte. It does not move while the lease exists.
    pub(crate) data: *mut u8,
    pub(crate) bytes: usize,
    pub(crate) dtype: DType,
    /// The number of records, followed by the axes of a record.
    pub(crate) shape: Box<[isize]>,
    /// In elements.
    pub(crate) strides: Box<[isize]>,
    pub(crate) byte_strides: Box<[isize]>,
}

// SAFETY: the memory behind `data` belongs to `memory`. That is `Send`, and nothing else reaches it while the lease
// exists. Simultaneous access by several threads to its arrays is up to Python code, as with any array.
unsafe impl Send for Lease {}
// SAFETY: as above; everything else is immutable after construction.
unsafe impl Sync for Lease {}

/// The owner of the bytes. They are accessed only through [`View::data`].
enum Memory {
    /// A slot of the loader.
    Slot(twinbuf::Batch),
    /// Taken out of its slot, because the loader needed the slot.
    Own { _buffer: Buffer, records: BatchIndices },
    /// Between the two states.
    Moving,
}

impl View {
    fn new(data: *mut u8, bytes: usize, records: usize, layout: &Layout) -> Self {
        let shape = layout.of_records(records);
        let strides = strides(&shape, 1);
        let byte_strides = self::strides(&shape, layout.dtype.size());
        Self { data, bytes, dtype: layout.dtype, shape, strides, byte_strides }
    }
}

/// The strides, in elements of this size, of an array in C order.
pub(crate) fn strides(shape: &[isize], size: usize) -> Box<[isize]> {
    // An element has the size of a number, so it fits.
    let mut strides = vec![size as isize; shape.len()].into_boxed_slice();
    for axis in (1..shape.len()).rev() {
        strides[axis - 1] = strides[axis] * shape[axis];
    }
    strides
}

impl Lease {
    pub(crate) fn new(mut batch: twinbuf::Batch, layouts: &[Layout]) -> Result<Self, Error> {
        let whole: &mut [u8] = &mut batch;
        let data = whole.as_mut_ptr();
        // A batch is in memory, so the number of its records fits.
        let records = usize::try_from(batch.plan().len()).unwrap_or(usize::MAX);
        let view = |(field, layout)| {
            let bytes = batch.field::<u8>(field)?;
            let offset = bytes.as_ptr().addr() - data.addr();
            Ok(View::new(data.wrapping_add(offset), bytes.len(), records, layout))
        };
        let views = layouts.iter().enumerate().map(view).collect::<Result<_, Error>>()?;
        let (epoch, step) = (batch.epoch(), batch.step());
        Ok(Self { views, epoch, step, memory: Mutex::new(Memory::Slot(batch)) })
    }

    /// The numbers of the batch's records.
    pub(crate) fn records(&self) -> BatchIndices {
        match &*self.memory.lock().unwrap_or_else(PoisonError::into_inner) {
            Memory::Slot(batch) => batch.plan().clone(),
            Memory::Own { records, .. } => records.clone(),
            Memory::Moving => unreachable!("only within a lock"),
        }
    }

    /// Frees the slot, which gets new memory. `None` if that was done before; `Some(false)` if there is not enough
    /// memory.
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
            other => {
                *memory = other;
                None
            }
        }
    }
}
