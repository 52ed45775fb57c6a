//! Where batches end up: in host slots, or on from there in the slots of a device; and how the two sides of their ring wait
//! for each other.

pub(crate) mod batch;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod host;

use std::fmt;
use std::sync::Arc;
use std::task::Context;
use std::time::{Duration, Instant};

use twinbuf_mmap::Buffer;

#[cfg(feature = "cuda")]
pub use self::cuda::{Cuda, DeviceBatch};
pub use self::host::Host;
use crate::error::{BoxError, Error};
use crate::observe::trace::LoaderTrace;
use crate::slot::{Naming, Sending};

/// The memory that receives a loader's batches: [`Host`], or `Cuda` with the feature `cuda`. This trait is sealed.
pub trait Backend:
    sealed::Backend<Content = [u8], Batches: sealed::Batches<Batch: Into<Self::Batch>>>
{
    /// The type of the batches that the caller receives.
    type Batch;
}

/// The two sides of a backend. Both hand out guards: acquire, fill, commit on the one side, receive on the other.
pub(crate) mod sealed {
    use std::fmt;
    use std::thread::ThreadId;
    use std::time::{Duration, Instant};

    use super::{NoSlot, Received, Sides, Waiting};
    use crate::error::Error;
    use crate::observe::log::What;
    use crate::slot::{BatchMeta, Ticket};

    /// Makes the two sides.
    pub trait Backend: Sized + fmt::Debug + 'static {
        /// What a slot holds.
        type Content: ?Sized;
        type Slots: Slots<Content = Self::Content>;
        type Batches: Batches;

        /// The wait for a batch.
        const WAIT: What;

        /// Slots in addition to the host slots, of the same size.
        fn device_depth(&self) -> usize {
            0
        }

        /// The two sides of each lane. Without overlap both are on one thread, and neither may wait for the other.
        fn make(self, sides: &mut Sides<'_>) -> Result<Lanes<Self>, Error>;
    }

    /// The two sides of each lane.
    pub(crate) type Lanes<B> = Vec<(<B as Backend>::Slots, <B as Backend>::Batches)>;

    /// The side that is filled.
    pub trait Slots: Send + 'static {
        type Content: ?Sized;
        type Guard<'s>: SlotGuard<Content = Self::Content>
        where
            Self: 's;

        /// Waits for a free slot.
        fn acquire(&mut self) -> Result<Self::Guard<'_>, NoSlot>;

        /// The next slot if the caller releases it within `timeout`.
        fn acquire_within(&mut self, timeout: Duration) -> Result<Self::Guard<'_>, NoSlot>;

        /// Nothing more will come.
        fn finish(self);
    }

    /// A free slot. Dropped without a commit, it is handed out again.
    pub trait SlotGuard {
        type Content: ?Sized;

        /// The content to fill, without what was flushed.
        fn content(&mut self) -> &mut Self::Content;

        /// The slot is about to be filled with this batch.
        fn begin(&mut self, _: Ticket) {}

        /// How many bytes to fill between two calls of [`flush`](Self::flush); `None` if the slot goes as a whole.
        fn chunk(&self) -> Option<usize> {
            None
        }

        /// Sends the complete chunks of the content's first `filled` bytes to the device while the rest is being
        /// filled. Returns how many bytes are no longer part of the content.
        fn flush(&mut self, _filled: usize) -> usize {
            0
        }

        /// Hands the slot over.
        fn commit(self, meta: BatchMeta) -> Result<(), NoSlot>
        where
            Self: Sized;
    }

    /// The side that is received from.
    pub trait Batches: 'static {
        type Batch;

        /// The next batch. A slot that the caller holds is waited for as long as `waiting` has patience.
        fn receive(&mut self, waiting: &mut Waiting<'_, '_>, held_timeout: Duration)
        -> Received<Self::Batch>;

        /// Whether the caller holds the slot of the next batch, as far as can be told without a wait.
        fn is_held(&self) -> bool {
            true
        }

        fn meta(batch: &mut Self::Batch) -> &mut BatchMeta;

        /// The option that sets how many slots batches hold, and how many there are.
        fn slots(&self) -> (&'static str, usize);

        /// How long the copies to the device have taken so far, and their bytes.
        fn copies(&self) -> (Duration, u64) {
            (Duration::ZERO, 0)
        }

        /// The start and end of this batch's copy; `None` if the copy is in progress or no copy is made.
        fn copied(&self, _: Ticket) -> Option<(Instant, Instant)> {
            None
        }

        /// The thread between the two sides, if there is one.
        fn copy_thread(&self) -> Option<ThreadId> {
            None
        }
    }
}

/// What a backend needs to make its sides.
#[allow(missing_debug_implementations, reason = "of a sealed trait")]
pub struct Sides<'a> {
    /// Loading threads, each with its own slots.
    pub(crate) lanes: usize,
    /// Bytes of a slot.
    pub(crate) slot: usize,
    /// Slots of a lane.
    pub(crate) host_depth: usize,
    /// The memory of all lanes' slots, if the caller gave it.
    pub(crate) lent: Option<Vec<Buffer>>,
    /// Sends parts of a batch from host slots.
    pub(crate) sending: Option<Sending>,
    pub(crate) overlap: bool,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a device needs to know more"))]
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a device needs to know more"))]
    pub(crate) naming: Naming,
    /// What the memory is for.
    pub(crate) sum: &'a dyn fmt::Display,
}

/// Larger batches are sent to a device in chunks of this size while the rest is being read: large enough for a copy at full
/// speed, and short compared with the read of a large batch.
const CHUNK: usize = 8 << 20;

impl Sides<'_> {
    /// The bytes of a chunk if a slot has at most this many. `None` if batches are smaller, or without overlap.
    pub(crate) fn chunk(&self, most: usize) -> Option<usize> {
        let chunk = CHUNK.max(self.slot.div_ceil(most));
        (self.overlap && self.slot > chunk).then_some(chunk)
    }

    /// The memory of a lane's slots, if the caller gave it.
    pub(crate) fn lent(&mut self) -> Option<Vec<Buffer>> {
        let lent = self.lent.as_mut()?;
        Some(lent.split_off(lent.len() - self.host_depth))
    }

    /// The row of a lane's thread in the trace. Row 1 is the caller's; the one after a lane's is for its copies.
    pub(crate) fn row(&self, lane: usize, name: &str) -> (u32, String) {
        let id = u32::try_from(2 + 2 * lane).unwrap_or(u32::MAX);
        if self.lanes == 1 { (id, name.to_string()) } else { (id, format!("{name} {}", lane + 1)) }
    }
}

/// There is not that much memory.
pub(crate) fn too_large(sum: &dyn fmt::Display) -> Error {
    let wanted = "slots that fit the memory".to_string();
    Error::Option { option: "host_depth", wanted, found: sum.to_string() }
}

/// Why there is no slot to fill.
#[derive(Debug)]
pub enum NoSlot {
    /// The caller holds the next slot.
    Held,
    /// Nothing receives any more, or the backend has failed; then the receiving side has the error.
    Gone,
}

/// What came of a wait for a batch.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "memory does not fail"))]
#[derive(Debug)]
pub enum Received<B> {
    Batch(B),
    NotYet,
    /// The caller holds the next slot.
    SlotHeld,
    /// The filling side is gone.
    Gone,
    /// The device's driver has failed.
    Failed(BoxError),
}

/// How a caller waits for a batch.
#[derive(Debug)]
pub enum Waiting<'a, 'b> {
    Block,
    /// Not longer than this.
    Until(Instant),
    /// Not at all.
    Try,
    /// Until this task is woken.
    Poll(&'a mut Context<'b>),
    /// As long as batches come, but not for a slot that is held.
    Drain,
}

impl Waiting<'_, '_> {
    /// How long to wait for a slot that the caller holds.
    pub(crate) fn patience(&self, held_timeout: Duration) -> Duration {
        match self {
            Self::Block => held_timeout,
            Self::Until(deadline) => deadline.saturating_duration_since(Instant::now()),
            Self::Try | Self::Poll(_) | Self::Drain => Duration::ZERO,
        }
    }
}
