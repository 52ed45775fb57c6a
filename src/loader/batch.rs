//! A batch: the guard of its slot, in host memory or on a device, its records, and their places in the slot.

use std::any::type_name;
use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use bytemuck::{AnyBitPattern, NoUninit};
#[cfg(feature = "cuda")]
use twinbuf_cuda::Lease;
use twinbuf_mmap::{BatchIndices, Buffer};

use super::checkpoint::{Checkpoint, Identity};
use super::layout::{Field, Layout};
use crate::error::{At, Error};
#[cfg(feature = "cuda")]
use crate::pipe::device::Cuda;
use crate::pipe::memory::{Backend, Host, Item, take_out};
use crate::pipe::ring::Sides;
use crate::transform::{RecordType, fits};

/// The bytes of one batch: the records one after another, in the plan's order, after the transforms. In host memory, or
/// as `Batch<Cuda>` in device memory.
///
/// With several data sets, the batch holds all records of field 0, then all records of field 1, and the remaining
/// fields in order. Each field starts at a multiple of 64 bytes; see [`fields`](Self::fields). The bytes between two fields
/// are 0, but arbitrary after a field whose records vary in length.
///
/// In host memory, the batch dereferences to its bytes. They are aligned to 64 bytes. [`cast`](Self::cast) returns them
/// as numbers. On a device it dereferences to its lease: call `on` for each stream that uses the
/// batch, and drop the batch as soon as the work that reads it is *enqueued*. The next copy into the slot waits for these
/// streams.
///
/// Dropping the batch frees its slot; on a device, if a stream that uses it is being captured, only after the capture.
/// A batch borrows nothing: it may move to another thread and may outlive its loader.
pub struct Batch<B: Backend = Host> {
    pub(super) slot: Item<B, Records>,
}

/// The records of a batch, and their places in its slot.
#[derive(Debug)]
pub struct Records {
    pub(crate) plan: BatchIndices,
    /// The plan and the data set that a checkpoint after the batch belongs to.
    pub(crate) identity: Arc<Identity>,
    pub(crate) layout: Arc<Layout>,
    /// For each field whose records vary in length: the offset of each record in the field, and the end of the last
    /// one. For other fields: empty.
    pub(crate) offsets: Vec<Vec<usize>>,
}

impl<B: Backend> Batch<B> {
    fn header(&self) -> &crate::pipe::ring::Header<Records> {
        B::Ring::<Records>::header(&self.slot)
    }

    fn records(&self) -> &Records {
        self.header().unit.as_ref().expect("a batch is handed out with its records")
    }

    /// Returns the epoch of the batch, from 0.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.header().ticket.place.epoch
    }

    /// Returns the step of the batch within its epoch, from 0.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.header().ticket.place.step
    }

    /// Returns the indices of the batch's records in the data set.
    #[must_use]
    pub fn plan(&self) -> &BatchIndices {
        &self.records().plan
    }

    /// Returns the position after this batch. A loader that resumes from it delivers the next batch first.
    #[must_use]
    pub fn checkpoint(&self) -> Checkpoint {
        self.records().identity.at(self.epoch(), self.step() + 1)
    }

    /// Returns the element type and the shape of one record of a field, after the transforms. Fields are numbered
    /// from 0.
    ///
    /// # Errors
    ///
    /// [`Error::Field`] if the field does not exist.
    pub fn field_type(&self, field: usize) -> Result<&RecordType, Error> {
        let fields = &self.records().layout.fields;
        let wanted = || format!("a field below {}", fields.len());
        fields.get(field).map(Field::record).ok_or_else(|| self.refuse(field, wanted(), field.to_string()))
    }

    /// Returns the number of fields.
    #[must_use]
    pub fn field_count(&self) -> usize {
        self.records().layout.fields.len()
    }

    /// Returns the range of a field in the slot. `None` if there is no such field.
    fn range(&self, field: usize) -> Option<Range<usize>> {
        let Records { plan, layout, offsets, .. } = self.records();
        let Range { start, end } = layout.range(field, usize::try_from(plan.len()).ok()?)?;
        let own = offsets.get(field).and_then(|offsets| offsets.last());
        Some(start..own.map_or(end, |own| start + own))
    }

    fn at(&self) -> At {
        At { loader: self.records().layout.name.clone(), epoch: self.epoch(), step: Some(self.step()) }
    }

    fn refuse(&self, field: usize, wanted: String, found: String) -> Error {
        Error::Field { at: self.at(), field, wanted, found }
    }
}

impl Batch {
    /// Returns the bytes as values of type `T`, without a copy: `batch.cast::<f32>()?`.
    ///
    /// `T` must be the element type of the field ([`field_type`](Self::field_type)), an array of it, or `u8`. `u16`
    /// is also valid for the 16-bit float types. A struct is valid if it has the element's alignment (for complex
    /// numbers: that of a part) and its size is a multiple of the element's size. If the field has no type, `T` can be
    /// any type. The byte order is not converted: on a big-endian machine, numbers from little-endian files have
    /// reversed bytes.
    ///
    /// # Errors
    ///
    /// [`Error::Field`]: `T` does not match the field's type, the batch has several fields, or its size is not a multiple of
    /// the size of `T`, or the bytes are not aligned for `T`.
    pub fn cast<T: AnyBitPattern>(&self) -> Result<&[T], Error> {
        self.count_fields(1)?;
        self.field(0)
    }

    /// Returns the bytes as mutable values of type `T`, without a copy. `T` follows the rules of
    /// [`cast`](Self::cast).
    ///
    /// # Errors
    ///
    /// [`Error::Field`], as for [`cast`](Self::cast).
    pub fn cast_mut<T: AnyBitPattern + NoUninit>(&mut self) -> Result<&mut [T], Error> {
        let bytes = size_of_val(self.cast::<T>()?);
        Ok(bytemuck::cast_slice_mut(&mut self[..bytes]))
    }

    /// Returns all fields of a batch with several data sets ([`Fields`](crate::loader::Fields)) as slices, without a
    /// copy: `let (x, y) = batch.fields::<(f32, i64)>()?;`
    ///
    /// `F` is a tuple with one element type per field, for two to four fields. `u8` is valid for every field.
    /// [`field_type`](Self::field_type) returns the declared type of a field. [`cast`](Self::cast) states the rules
    /// for types. Each slice holds the field's data of all records, one record after another.
    ///
    /// # Errors
    ///
    /// [`Error::Field`]: the number of types differs from the number of fields, a type does not match the field's type
    /// after the transforms, or the size of a field is not a multiple of the size of its type, or not aligned for it.
    pub fn fields<F: Numbers>(&self) -> Result<F::Slices<'_>, Error> {
        F::of(self)
    }

    /// Returns the field with the index `field`, from 0, as values of type `T`, without a copy. `T` follows the
    /// rules of [`cast`](Self::cast).
    ///
    /// # Errors
    ///
    /// [`Error::Field`]: the field does not exist, `T` does not match its type, or its size is not a multiple of the size
    /// of `T`, or the field is not aligned for `T`.
    pub fn field<T: AnyBitPattern>(&self, field: usize) -> Result<&[T], Error> {
        let (of, name) = (self.field_type(field)?, type_name::<T>());
        if !fits::<T>(of.dtype()) {
            return Err(self.refuse(field, of.to_string(), name.to_string()));
        }
        // The range is empty if the slot does not have these bytes, as after a failed fill.
        let bytes = &self[self.range(field).filter(|range| range.end <= self.len()).unwrap_or_default()];
        let found = || format!("{} bytes", bytes.len());
        bytemuck::try_cast_slice(bytes)
            .map_err(|_| self.refuse(field, format!("a whole number of {name}"), found()))
    }

    /// Returns the bytes of one record. `record` is the index in the batch, from 0. If the batch has several fields,
    /// this returns the record of field 0. Returns `None` if the index is out of range.
    ///
    /// ```
    /// # use twinbuf::{BoxError, Loader};
    /// # fn f(mut loader: Loader) -> Result<(), BoxError> {
    /// for batch in loader.epoch(0) {
    ///     let batch = batch?; // of (images of any length, labels)
    ///     for (i, label) in batch.field::<i64>(1)?.iter().enumerate() {
    ///         let image = batch.record(i).ok_or("no such record")?;
    ///     }
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn record(&self, record: usize) -> Option<&[u8]> {
        let (start, end) = match self.offsets(0) {
            Some(offsets) => (*offsets.get(record)?, *offsets.get(record.checked_add(1)?)?),
            None => {
                let len = self.records().layout.fields.first()?.record().len();
                let start = record.checked_mul(len).filter(|_| (record as u64) < self.plan().len())?;
                (start, start + len)
            }
        };
        self.get(start..end)
    }

    /// Returns the offsets of the records in a field with variable-length records: N + 1 byte offsets for N records,
    /// counted from the start of the field. Record `i` is `offsets[i]..offsets[i + 1]` of
    /// [`field`](Self::field)`::<u8>`. Returns `None` if the field's records have a fixed length, or if the field does
    /// not exist.
    #[must_use]
    pub fn offsets(&self, field: usize) -> Option<&[usize]> {
        self.records().offsets.get(field).map(Vec::as_slice).filter(|offsets| !offsets.is_empty())
    }

    fn count_fields(&self, found: usize) -> Result<(), Error> {
        let fields = self.field_count();
        if found == fields {
            return Ok(());
        }
        Err(self.refuse(0, format!("types for {fields} fields"), found.to_string()))
    }

    /// Takes the memory out of the slot, to keep the batch for a long time without a copy. The loader allocates new
    /// memory for the slot, and the slot is free again.
    ///
    /// The returned buffer has the size of the slot and may be longer than the batch. It counts toward the loader's
    /// [memory limit](crate::loader::LoaderBuilder::memory_limit) until it is dropped.
    ///
    /// # Errors
    ///
    /// Returns the batch together with the error.
    ///
    /// - [`Error::Memory`]: the limit has no room for the slot's new memory.
    /// - [`Error::Option`]: the new memory cannot be allocated, or the caller provided the memory of the slots
    ///   ([`slots`](crate::loader::LoaderBuilder::slots)).
    pub fn into_buffer(mut self) -> Result<Buffer, Box<(Self, Error)>> {
        let layout = self.records().layout.clone();
        let own = match layout.lent {
            true => Err(Error::option("slots", "slots in memory of the loader's own", "the caller's")),
            false => take_out(&mut self.slot, layout.taken.as_ref()),
        };
        own.map_err(|error| Box::new((self, error)))
    }
}

/// A tuple of element types, one per field of a batch; see [`Batch::fields`]. Implemented for tuples of two to four
/// types.
pub trait Numbers {
    /// A tuple with one slice per field.
    type Slices<'b>;

    /// Returns the fields of `batch`.
    ///
    /// # Errors
    ///
    /// [`Error::Field`], as for [`Batch::fields`].
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
tuple_of_numbers!(2: A 0, B 1);
tuple_of_numbers!(3: A 0, B 1, C 2);
tuple_of_numbers!(4: A 0, B 1, C 2, D 3);

impl Deref for Batch {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.slot[..self.header().bytes()]
    }
}

impl DerefMut for Batch {
    fn deref_mut(&mut self) -> &mut [u8] {
        let bytes = self.header().bytes();
        &mut self.slot[..bytes]
    }
}

/// What a lease of a device slot carries: the records and the times of a batch. It has no public fields or methods.
#[cfg(feature = "cuda")]
pub type BatchMeta = crate::pipe::ring::Header<Records>;

#[cfg(feature = "cuda")]
impl Batch<Cuda> {
    /// Returns the byte range of a field in the batch. Fields are numbered from 0. Returns `None` if the field does
    /// not exist. Pass the range to [`on_range`](Lease::on_range):
    /// `batch.on_range::<i64>(batch.field_range(1).ok_or("no labels")?, &stream)?`.
    #[must_use]
    pub fn field_range(&self, field: usize) -> Option<Range<usize>> {
        self.range(field)
    }

    /// Returns the lease of the slot, for example to call [`Lease::into_owned`].
    #[must_use]
    pub fn into_lease(self) -> Lease<BatchMeta> {
        self.slot
    }
}

#[cfg(feature = "cuda")]
impl Deref for Batch<Cuda> {
    type Target = Lease<BatchMeta>;

    fn deref(&self) -> &Lease<BatchMeta> {
        &self.slot
    }
}

debug!([B: Backend] Batch[B], |batch|
    epoch: batch.epoch(), step: batch.step(), bytes: batch.header().bytes());
