//! Where the bytes of loaders and streams end up: in slots of the host, or from there in slots of a device.

use std::fmt;
use std::ops::DerefMut;
use std::sync::Arc;

use twinbuf_mmap::Buffer;

use super::ring::{BothSides, Ring, Slots};
use crate::error::Error;
use crate::observe::trace::LoaderTrace;
use crate::observe::unit::Naming;

/// The memory that receives batches and groups of tensors: [`Host`], or `Cuda` with the feature `cuda`. A loader can be
/// built for no other, so no other crate implements this trait.
pub trait Backend: Make {
    /// The ring of slots, filled with units of type `U`.
    type Ring<U: Send + 'static>: Ring<Unit = U, Slot: DerefMut<Target = [u8]>>;
}

/// Makes the rings of a backend.
pub trait Make: fmt::Debug + Sized + 'static {
    /// Returns the number of slots on a device.
    fn device_depth(&self) -> usize {
        0
    }

    /// Makes the two sides of a ring.
    fn sides<U: Send + 'static>(
        self,
        memory: Memory<'_>,
    ) -> Result<BothSides<<Self as Backend>::Ring<U>>, Error>
    where
        Self: Backend;
}

/// A filled slot of a backend.
pub(crate) type Item<B, U> = <<B as Backend>::Ring<U> as Ring>::Item;

/// The slots that a backend makes.
pub struct Memory<'m> {
    /// Bytes of a slot.
    pub(crate) slot: usize,
    /// Host slots.
    pub(crate) depth: usize,
    /// The memory of the host slots, if there is some already.
    pub(crate) lent: Option<Vec<Buffer>>,
    /// What the memory is for.
    pub(crate) sum: &'m dyn fmt::Display,
    /// Whether a thread copies to the device, and its row of the trace.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for a device"))]
    pub(crate) overlap: bool,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for a device"))]
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "for a device"))]
    pub(crate) naming: Naming,
}

/// The default backend: batches and groups stay in host memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Backend for Host {
    type Ring<U: Send + 'static> = Slots<Buffer, U>;
}

impl Make for Host {
    fn sides<U: Send + 'static>(
        self,
        memory: Memory<'_>,
    ) -> Result<BothSides<<Self as Backend>::Ring<U>>, Error> {
        let Memory { slot, depth, lent, sum, .. } = memory;
        let slots = lent.or_else(|| Buffer::several(&vec![slot; depth]));
        Ok(Slots::ring(slots.ok_or_else(|| too_large(sum))?))
    }
}

/// There is not that much memory.
pub(crate) fn too_large(sum: &dyn fmt::Display) -> Error {
    let wanted = "slots that fit the memory".to_string();
    Error::Option { option: "depth", wanted, found: sum.to_string() }
}

debug!([] Memory['_], |memory| slot: memory.slot, depth: memory.depth);
