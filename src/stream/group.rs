//! A group of tensors in memory: the guard of its slot, or a handle of memory that stays.

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

/// One group of tensors, in memory. Dropping it frees its slot.
///
/// It borrows nothing: it may be sent to another thread, and may outlive its stream. Its bytes do not change while it
/// is alive.
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

    /// Returns its number in [`Groups`].
    #[must_use]
    pub fn number(&self) -> usize {
        self.group
    }

    /// Returns the pass that it belongs to, from 0.
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

    /// Finds a tensor by its name, or by the end of its name if only one of the group has that: `mlp.up_proj.weight` is
    /// `model.layers.17.mlp.up_proj.weight` in a group of layer 17.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] if none has this name, or several end in it.
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

/// One tensor of a [`Group`], in place: its bytes, and what they are.
#[derive(Clone, Copy)]
pub struct View<'g> {
    tensor: &'g Tensor,
    bytes: &'g [u8],
    at: &'g At,
}

impl<'g> View<'g> {
    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &'g str {
        self.tensor.name()
    }

    /// Returns what it is: name, type and shape.
    #[must_use]
    pub const fn tensor(&self) -> &'g Tensor {
        self.tensor
    }

    /// Returns its bytes, for as long as the group is borrowed.
    #[must_use]
    pub const fn bytes(&self) -> &'g [u8] {
        self.bytes
    }

    /// Returns its elements as values of type `T`, in place.
    ///
    /// `T` is the type of the elements, or an array of it; `u8` for any, and `u16` for floats of 16 bits. Blocks and types
    /// that Rust lacks may be taken as anything. No byte order is converted.
    ///
    /// # Errors
    ///
    /// [`Error::Tensor`] for another type; [`Error::Cast`] unless the bytes are a whole number of `T`s at a multiple of
    /// their alignment. A type that Rust lacks is at any multiple of a byte in a file of `safetensors`, and of 32 in GGUF.
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
