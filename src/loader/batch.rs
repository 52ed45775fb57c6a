//! A batch in host memory: the guard of its slot.

use std::any::type_name;
use std::fmt;
use std::ops::{Deref, DerefMut};

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_core::{Park, ReadSlot};
use twinbuf_mmap::{BatchPlan, Buffer};

use super::checkpoint::Checkpoint;
use crate::error::{At, Error};
use crate::slot::{BatchMeta, Slot};

/// The bytes of one batch, in their slot: record after record, in the plan's order, as the transform left them.
///
/// The bytes start at a multiple of 64. [`cast`](Self::cast) returns them as numbers. Dropping the batch frees its
/// slot. A batch borrows nothing: it may be sent to another thread, and may outlive its loader.
pub struct Batch {
    slot: ReadSlot<'static, Slot<Buffer>, Park>,
}

impl Batch {
    /// Returns the epoch that the batch belongs to.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.meta().ticket.epoch
    }

    /// Its step within the epoch, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.meta().ticket.step
    }

    /// Returns the records of the batch.
    #[must_use]
    pub fn plan(&self) -> &BatchPlan {
        &self.meta().records().0
    }

    /// Returns the position after this batch: resuming there delivers the next batch first.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.meta().checkpoint()
    }

    /// Returns the bytes as values of type `T`, in place: `batch.cast::<f32>()?`.
    ///
    /// No byte order is converted: a big-endian machine sees the numbers of little-endian files reversed.
    ///
    /// # Errors
    ///
    /// [`Error::Cast`] unless the bytes are a whole number of `T`s.
    pub fn cast<T: AnyBitPattern>(&self) -> Result<&[T], Error> {
        bytemuck::try_cast_slice(self).map_err(|_| self.not_whole::<T>())
    }

    /// Returns the bytes as mutable values of type `T`, in place.
    ///
    /// # Errors
    ///
    /// As [`cast`](Self::cast).
    pub fn cast_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T], Error> {
        let error = self.not_whole::<T>();
        bytemuck::try_cast_slice_mut(self).map_err(|_| error)
    }

    fn not_whole<T>(&self) -> Error {
        let at = At { loader: None, epoch: self.epoch(), step: Some(self.step()) };
        Error::Cast { at, wanted: type_name::<T>(), found: self.len() }
    }

    fn meta(&self) -> &BatchMeta {
        self.slot.meta()
    }

    fn bytes(&self) -> usize {
        self.meta().result.as_ref().map_or(0, |&bytes| bytes)
    }
}

impl BatchMeta {
    /// The position after the batch.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        let (_, identity) = self.records();
        Checkpoint {
            identity: Some((**identity).clone()),
            epoch: self.ticket.epoch,
            step: self.ticket.step + 1,
        }
    }
}

impl From<ReadSlot<'static, Slot<Buffer>, Park>> for Batch {
    #[doc(hidden)]
    fn from(slot: ReadSlot<'static, Slot<Buffer>, Park>) -> Self {
        Self { slot }
    }
}

impl Deref for Batch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.slot.content[..self.bytes()]
    }
}

impl DerefMut for Batch {
    fn deref_mut(&mut self) -> &mut [u8] {
        let bytes = self.bytes();
        &mut self.slot.content[..bytes]
    }
}

impl fmt::Debug for Batch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batch")
            .field("epoch", &self.epoch())
            .field("step", &self.step())
            .field("bytes", &self.len())
            .finish_non_exhaustive()
    }
}
