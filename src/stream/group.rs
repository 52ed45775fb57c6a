//! A group of tensors in memory.

use std::any::type_name;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use bytemuck::AnyBitPattern;
use twinbuf_core::KeptSlot;
use twinbuf_mmap::{Buffer, Groups, Tensor};

use crate::backend::adaptive::Adaptive;
use crate::backend::host::Value;
use crate::batch::layout::fits;
use crate::batch::memory::Taken;
use crate::error::{At, Error};
use crate::slot::Slot;

/// A slot of the ring.
pub(super) type Held = KeptSlot<'static, Slot<Value<Memory>>, Adaptive>;

/// What a slot holds.
pub(crate) struct Memory {
    /// A group that is not kept.
    pub(super) own: Buffer,
    /// One that is.
    pub(super) kept: Option<Arc<Kept>>,
    pub(super) group: usize,
    /// What the stream takes of a limit: the last of the slots gives it back.
    #[expect(dead_code, reason = "dropped with the last slot")]
    pub(super) taken: Option<Arc<Taken>>,
}

/// The memory of a group that stays.
pub(super) struct Kept {
    pub(super) buffer: Buffer,
    pub(super) _taken: Option<Arc<Taken>>,
}

/// One group of tensors in memory. Dropping it frees its slot.
///
/// A group borrows nothing: it may move to another thread and may outlive its stream. Its bytes do not change while
/// it exists.
pub struct Group {
    place: Place,
    groups: Groups,
    group: usize,
    at: At,
}

pub(super) enum Place {
    Slot(Held),
    Kept(Arc<Kept>),
}

impl Group {
    pub(super) fn new(place: Place, groups: &Groups, group: usize, at: At) -> Self {
        Self { place, groups: groups.clone(), group, at }
    }

    /// Returns the index of the group in [`Groups`], from 0.
    #[must_use]
    pub fn number(&self) -> usize {
        self.group
    }

    /// Returns the pass of the group, from 0.
    #[must_use]
    pub fn pass(&self) -> u64 {
        self.at.epoch
    }

    /// Returns all tensors of the group.
    #[must_use]
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = View<'_>> {
        let bytes = self.bytes();
        let view = move |(tensor, range)| View { tensor, bytes: &bytes[range], at: &self.at };
        self.groups.tensors(self.group).map(view)
    }

    /// Returns the tensor with this name. If no tensor has exactly this name, returns the tensor whose name ends in
    /// `.` and `name`, provided there is exactly one: in a group of layer 17, `mlp.up_proj.weight` finds
    /// `model.layers.17.mlp.up_proj.weight`.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] if no tensor matches, or if several names end in `name`.
    pub fn tensor(&self, name: &str) -> Result<View<'_>, Error> {
        let mut ends = None;
        let mut count = 0;
        for view in self.tensors() {
            match view.name().strip_suffix(name) {
                Some("") => return Ok(view),
                Some(front) if front.ends_with('.') => {
                    count += 1;
                    ends = Some(view);
                }
                _ => {}
            }
        }
        if let (Some(view), 1) = (ends, count) {
            return Ok(view);
        }
        // A group may have hundreds.
        let names: Vec<_> = self.tensors().take(16).map(|view| view.tensor.name()).collect();
        let (wanted, found) = (format!("the name of one of {names:?}"), format!("{count} of them end in it"));
        Err(Error::Tensor { at: self.at.clone(), name: name.to_string(), wanted, found })
    }

    fn bytes(&self) -> &[u8] {
        match &self.place {
            Place::Slot(slot) => &slot.content.0.own,
            Place::Kept(kept) => &kept.buffer,
        }
    }
}

impl fmt::Debug for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Group")
            .field("number", &self.number())
            .field("pass", &self.pass())
            .field("tensors", &self.tensors().len())
            .finish_non_exhaustive()
    }
}

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
    /// `T` must be the element type, an array of it, or `u8`. `u16` is also valid for 16-bit floats. Quantized
    /// blocks and element types without a Rust equivalent can be read as any type. The byte order is not converted.
    ///
    /// # Errors
    ///
    /// - [`Error::Tensor`]: `T` does not match the element type.
    /// - [`Error::Cast`]: the size is not a multiple of the size of `T`, or the bytes are not aligned for `T`. For
    ///   element types without a Rust equivalent, the file aligns a tensor only to 1 byte (safetensors) or 32 bytes
    ///   (GGUF).
    pub fn cast<T: AnyBitPattern>(&self) -> Result<&'g [T], Error> {
        if !fits::<T>(self.tensor.dtype()) {
            let (name, wanted) = (self.name().to_string(), self.tensor.to_string());
            return Err(Error::Tensor {
                at: self.at.clone(),
                name,
                wanted,
                found: type_name::<T>().to_string(),
            });
        }
        let not_whole =
            |_| Error::Cast { at: self.at.clone(), wanted: type_name::<T>(), found: self.bytes.len() };
        bytemuck::try_cast_slice(self.bytes).map_err(not_whole)
    }
}

impl Deref for View<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.bytes
    }
}

impl fmt::Debug for View<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("View").field(&self.name()).field(&format_args!("{}", self.tensor)).finish()
    }
}
