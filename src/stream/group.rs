//! A group of tensors in memory.

use std::any::type_name;
use std::ops::{Deref, Range};
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use twinbuf_mmap::{Buffer, Groups, Tensor};

use crate::error::{At, Error};
use crate::pipe::memory::{Backend, Host, Item, Taken, take_out};
use crate::transform::fits;

/// One group of tensors, in host memory or, as `Group<Cuda>`, in device memory. Dropping it frees its slot, if it has
/// one.
///
/// A group borrows nothing: it may move to another thread and may outlive its stream. Its bytes do not change while
/// it exists.
pub struct Group<B: Backend = Host> {
    pub(super) place: Place<B>,
    pub(super) groups: Groups,
    pub(super) group: usize,
    pub(super) at: At,
    /// What the stream takes of the memory limit. It is given back when the stream and all its groups have been
    /// dropped.
    pub(super) taken: Option<Arc<Taken>>,
}

/// Where the bytes of a group are.
pub(super) enum Place<B: Backend> {
    Slot(Item<B, usize>),
    /// In memory outside the slots, because the stream keeps the group or because it has left its slot. Only on the
    /// host: with a device, all groups are in slots.
    Kept(Arc<Buffer>),
}

impl<B: Backend> Group<B> {
    /// Returns the index of the group in [`Groups`], from 0.
    #[must_use]
    pub fn number(&self) -> usize {
        self.group
    }

    /// Returns the number of the pass that delivered this group, from 0. A pass goes through all groups once.
    #[must_use]
    pub fn pass(&self) -> u64 {
        self.at.epoch
    }

    /// Returns all tensors of the group, each with its range of the group's bytes.
    pub(super) fn ranges(&self) -> impl ExactSizeIterator<Item = (&Tensor, Range<usize>)> {
        self.groups.tensors(self.group)
    }

    /// Returns the tensor with this name, or the only one whose name ends in `.` and this name.
    pub(super) fn find(&self, name: &str) -> Result<(&Tensor, Range<usize>), Error> {
        if let Some(found) = self.ranges().find(|(tensor, _)| tensor.name() == name) {
            return Ok(found);
        }
        let is_end = |full: &str| full.strip_suffix(name).is_some_and(|front| front.ends_with('.'));
        let ends = || self.ranges().filter(|(tensor, _)| is_end(tensor.name()));
        let count = ends().count();
        if let (Some(found), 1) = (ends().next(), count) {
            return Ok(found);
        }
        // The error names at most 16 tensors, because a group may have hundreds.
        let names: Vec<_> = self.ranges().take(16).map(|(tensor, _)| tensor.name()).collect();
        let (wanted, found) = (format!("the name of one of {names:?}"), format!("{count} of them end in it"));
        Err(Error::Tensor { at: self.at.clone(), name: name.to_string(), wanted, found })
    }
}

impl Group {
    /// Frees the slot of the group, which gets new memory. The bytes of the group stay where they are. Use it to keep a
    /// group while the stream reads on. Returns whether the group was in a slot.
    ///
    /// # Errors
    ///
    /// [`Error::Memory`] if the [`memory_limit`](crate::stream::StreamBuilder::memory_limit) has no room for another
    /// slot, and [`Error::Option`] if the memory cannot be allocated. The group stays in its slot.
    pub fn leave_slot(&mut self) -> Result<bool, Error> {
        let Place::Slot(slot) = &mut self.place else { return Ok(false) };
        let own = take_out(slot, self.taken.as_deref())?;
        self.place = Place::Kept(Arc::new(own));
        Ok(true)
    }

    /// Returns all tensors of the group.
    #[must_use]
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = View<'_>> {
        self.ranges().map(|found| self.view(found))
    }

    /// Returns the tensor with this name. If no tensor has exactly this name, returns the tensor whose name ends in
    /// `.` and `name`, provided there is exactly one: in a group of layer 17, `mlp.up_proj.weight` finds
    /// `model.layers.17.mlp.up_proj.weight`.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] unless one tensor matches.
    pub fn tensor(&self, name: &str) -> Result<View<'_>, Error> {
        self.find(name).map(|found| self.view(found))
    }

    fn view<'g>(&'g self, (tensor, range): (&'g Tensor, Range<usize>)) -> View<'g> {
        let bytes = match &self.place {
            Place::Slot(slot) => slot,
            Place::Kept(kept) => &**kept,
        };
        View { tensor, bytes: &bytes[range], at: &self.at }
    }
}

debug!([B: Backend] Group[B], |group|
    number: group.number(), pass: group.pass(), tensors: group.ranges().len());

/// One tensor of a [`Group`]: its bytes, name, type and shape, without a copy. It dereferences to its bytes.
#[derive(Clone, Copy)]
pub struct View<'g> {
    tensor: &'g Tensor,
    bytes: &'g [u8],
    at: &'g At,
}

impl<'g> View<'g> {
    /// Returns the full name of the tensor.
    #[must_use]
    pub fn name(&self) -> &'g str {
        self.tensor.name()
    }

    /// Returns the description of the tensor: name, type and shape.
    #[must_use]
    pub const fn tensor(&self) -> &'g Tensor {
        self.tensor
    }

    /// Returns the bytes of the tensor, in the byte order of the file.
    #[must_use]
    pub const fn bytes(&self) -> &'g [u8] {
        self.bytes
    }

    /// Returns the elements as values of type `T`, without a copy.
    ///
    /// `T` is as for [`Batch::cast`](crate::Batch::cast). Quantized blocks and elements without a [`DType`](crate::mmap::DType)
    /// can be read as any type. The byte order is not converted.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`]: `T` does not match the element type, the size is not a multiple of the size of `T`, or the bytes
    /// are not aligned for `T`. Without a `DType`, the file aligns a tensor only to 1 byte
    /// (safetensors) or to 32 bytes by default (GGUF).
    pub fn cast<T: AnyBitPattern>(&self) -> Result<&'g [T], Error> {
        check::<T>(self.tensor, self.at)?;
        bytemuck::try_cast_slice(self.bytes).map_err(|_| not_whole::<T>(self.tensor, self.at))
    }
}

/// Returns an error if the elements of a tensor cannot be read as values of type `T`.
pub(super) fn check<T: AnyBitPattern>(tensor: &Tensor, at: &At) -> Result<(), Error> {
    if fits::<T>(tensor.dtype()) {
        return Ok(());
    }
    let (name, wanted) = (tensor.name().to_string(), tensor.to_string());
    Err(Error::Tensor { at: at.clone(), name, wanted, found: type_name::<T>().to_string() })
}

/// The error of bytes that are no whole number of aligned `T`.
pub(super) fn not_whole<T>(tensor: &Tensor, at: &At) -> Error {
    let (name, wanted) = (tensor.name().to_string(), format!("a whole number of {}", type_name::<T>()));
    Error::Tensor { at: at.clone(), name, wanted, found: format!("{} bytes", tensor.len()) }
}

impl Deref for View<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

debug!([] View['_], |view| name: view.name(), tensor: view.tensor);
