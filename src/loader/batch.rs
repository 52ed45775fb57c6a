//! A batch in host memory: the guard of its slot.

use std::any::type_name;
use std::fmt;
use std::ops::{Deref, DerefMut};

use bytemuck::{AnyBitPattern, NoUninit};
use twinbuf_core::KeptSlot;
use twinbuf_mmap::{BatchPlan, Buffer};

use super::checkpoint::Checkpoint;
use super::layout::{Field, fits};
use crate::backend::adaptive::Adaptive;
use crate::error::{At, Error};
use crate::slot::{BatchMeta, Origin, Slot};

/// The bytes of one batch, in their slot: record after record, in the plan's order, as the transform left them.
///
/// From several data sets, it has one field after the other, each at a multiple of 64: [`fields`](Self::fields).
///
/// The bytes start at a multiple of 64. [`cast`](Self::cast) returns them as numbers. Dropping the batch frees its
/// slot. A batch borrows nothing: it may be sent to another thread, and may outlive its loader.
pub struct Batch {
    slot: KeptSlot<'static, Slot<Buffer>, Adaptive>,
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
        &self.meta().records().plan
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
    /// [`Error::Cast`] unless the bytes are a whole number of `T`s, [`Error::Field`] if there are several fields.
    pub fn cast<T: AnyBitPattern>(&self) -> Result<&[T], Error> {
        self.count_fields(1)?;
        bytemuck::try_cast_slice(self).map_err(|_| self.not_whole::<T>())
    }

    /// Returns the bytes as mutable values of type `T`, in place.
    ///
    /// # Errors
    ///
    /// As [`cast`](Self::cast).
    pub fn cast_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T], Error> {
        self.count_fields(1)?;
        let error = self.not_whole::<T>();
        bytemuck::try_cast_slice_mut(self).map_err(|_| error)
    }

    /// Returns the fields of a batch from several data sets ([`Fields`](crate::loader::Fields)), each as numbers in place:
    /// `let (x, y) = batch.fields::<(f32, i64)>()?;`
    ///
    /// Each slice has the field's part of all records, record after record, as [`field_shape`](Self::field_shape) says.
    /// A type in a tuple for each field, up to four; bytes (`u8`) for any.
    ///
    /// # Errors
    ///
    /// [`Error::Field`] for another number of fields, or another type than the data set has; [`Error::Cast`] unless the
    /// bytes are a whole number of values.
    pub fn fields<F: Numbers>(&self) -> Result<F::Slices<'_>, Error> {
        F::of(self)
    }

    /// Returns one field; see [`fields`](Self::fields).
    ///
    /// # Errors
    ///
    /// Those of [`fields`](Self::fields).
    pub fn field<T: AnyBitPattern>(&self, field: usize) -> Result<&[T], Error> {
        let (of, bytes) = self.field_bytes(field)?;
        if !fits::<T>(of.dtype) {
            let (wanted, found) = (format!("{of}"), type_name::<T>().to_string());
            return Err(Error::Field { at: self.at(), field, wanted, found });
        }
        let found = bytes.len();
        bytemuck::try_cast_slice(bytes).map_err(|_| Error::Cast {
            at: self.at(),
            wanted: type_name::<T>(),
            found,
        })
    }

    /// Returns the shape of one record in a field, in elements of its type: empty for a single number. Bytes, if the data set or
    /// the transform names no type.
    ///
    /// # Errors
    ///
    /// [`Error::Field`] if there is no such field.
    pub fn field_shape(&self, field: usize) -> Result<&[usize], Error> {
        Ok(&self.field_bytes(field)?.0.shape)
    }

    fn field_bytes(&self, field: usize) -> Result<(&Field, &[u8]), Error> {
        let Origin { plan, layout, .. } = self.meta().records();
        // A batch that fits its slot fits the memory.
        let range = usize::try_from(plan.len()).ok().and_then(|records| layout.range(field, records));
        match (layout.0.get(field), range) {
            (Some(of), Some(range)) => Ok((of, self.get(range).unwrap_or_default())),
            _ => {
                let (fields, found) = (layout.0.len(), field.to_string());
                Err(Error::Field { at: self.at(), field, wanted: format!("a field below {fields}"), found })
            }
        }
    }

    fn count_fields(&self, found: usize) -> Result<(), Error> {
        let fields = self.meta().records().layout.0.len();
        if found == fields {
            return Ok(());
        }
        let (wanted, found) = (format!("types for {fields} fields"), found.to_string());
        Err(Error::Field { at: self.at(), field: 0, wanted, found })
    }

    fn at(&self) -> At {
        At { loader: None, epoch: self.epoch(), step: Some(self.step()) }
    }

    /// Takes the memory out of its slot, which gets other memory and is free: to keep a batch without a copy for longer
    /// than the loader can wait. The bytes stay where they are, and the memory may be longer than the batch.
    ///
    /// # Errors
    ///
    /// The batch, if there is no other memory.
    pub fn into_buffer(mut self) -> Result<Buffer, Self> {
        match Buffer::new(self.slot.content.len()) {
            Some(other) => Ok(std::mem::replace(&mut self.slot.content, other)),
            None => Err(self),
        }
    }

    fn not_whole<T>(&self) -> Error {
        Error::Cast { at: self.at(), wanted: type_name::<T>(), found: self.len() }
    }

    fn meta(&self) -> &BatchMeta {
        self.slot.meta()
    }

    fn bytes(&self) -> usize {
        self.meta().result.as_ref().map_or(0, |&bytes| bytes)
    }
}

/// Types of numbers, one for each field of a batch: see [`Batch::fields`].
pub trait Numbers {
    /// A slice for each field.
    type Slices<'b>;

    /// The fields of a batch.
    ///
    /// # Errors
    ///
    /// Those of [`Batch::fields`].
    fn of(batch: &Batch) -> Result<Self::Slices<'_>, Error>;
}

macro_rules! tuple_of_numbers {
    ($count:literal: $($name:ident $at:tt),+) => {
        impl<$($name: AnyBitPattern),+> Numbers for ($($name,)+) {
            type Slices<'b> = ($(&'b [$name],)+);

            fn of(batch: &Batch) -> Result<Self::Slices<'_>, Error> {
                batch.count_fields($count)?;
                Ok(($(batch.field::<$name>($at)?,)+))
            }
        }
    };
}
tuple_of_numbers!(1: A 0);
tuple_of_numbers!(2: A 0, B 1);
tuple_of_numbers!(3: A 0, B 1, C 2);
tuple_of_numbers!(4: A 0, B 1, C 2, D 3);

impl BatchMeta {
    /// The position after the batch.
    pub(crate) fn checkpoint(&self) -> Checkpoint {
        let identity = &self.records().identity;
        Checkpoint {
            identity: Some((**identity).clone()),
            epoch: self.ticket.epoch,
            step: self.ticket.step + 1,
        }
    }
}

impl From<KeptSlot<'static, Slot<Buffer>, Adaptive>> for Batch {
    #[doc(hidden)]
    fn from(slot: KeptSlot<'static, Slot<Buffer>, Adaptive>) -> Self {
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
