//! Where batches end up: in host slots, or on from there in the slots of a device.

use std::fmt;
use std::sync::Arc;
use std::task::Poll;
use std::thread::ThreadId;
use std::time::{Duration, Instant};

use twinbuf_core::{Consumer, Park, Producer, ReadSlot, RecvError, Ring, TryAcquireError, TryRecvError};

use crate::epoch::Batch;
use crate::error::{BoxError, Error};
use crate::loader::MAX_HOST_DEPTH;
use crate::reader::Waiting;
use crate::slot::{Load, Slot};
use crate::trace::Trace;

/// Where a loader's batches end up: [`Host`], or `Cuda` with the feature of that name. Nobody else implements it.
pub trait Backend: Sized + fmt::Debug + 'static {
    /// A batch, as the caller receives it.
    type Batch<'l>;
    /// The side that the reader fills.
    #[doc(hidden)]
    type Slots: Send + 'static;
    /// The side that the caller receives from.
    #[doc(hidden)]
    type Batches: 'static;
    /// How the wait for a batch is called in the trace.
    #[doc(hidden)]
    const WAIT: &'static str;

    /// How many slots it has beside the host slots, of the same size.
    #[doc(hidden)]
    fn device_depth(&self) -> usize;

    /// Both sides. Without `overlap` they are on one thread, and neither may wait for the other.
    #[doc(hidden)]
    fn make(self, sides: Sides<'_>) -> Result<(Self::Slots, Self::Batches), Error>;

    /// Waits for a free slot, if `wait`, and hands it over with what `fill` made of it, if anything.
    #[doc(hidden)]
    fn fill(
        slots: &mut Self::Slots,
        wait: bool,
        fill: &mut dyn FnMut(&mut [u8]) -> Option<Load>,
    ) -> Result<(), NoSlot>;

    #[doc(hidden)]
    fn finish(slots: Self::Slots);

    #[doc(hidden)]
    fn receive<'l>(batches: &'l Self::Batches, waiting: &mut Waiting<'_, '_>) -> Received<Self::Batch<'l>>;

    /// Which slots a batch holds: the option that says how many there are, and how many.
    #[doc(hidden)]
    fn held(batches: &Self::Batches, host_depth: usize) -> (&'static str, usize);

    #[doc(hidden)]
    fn load<'b>(batch: &'b mut Self::Batch<'_>) -> Option<&'b mut Load>;

    /// How long the device copies have taken so far, and their bytes; and that of the batch of this place.
    #[doc(hidden)]
    fn transfers(batches: &Self::Batches, ordinal: u64, step: u64) -> Transfers;

    /// The thread between the slots and the batches, if there is one.
    #[doc(hidden)]
    fn copy_thread(batches: &Self::Batches) -> Option<ThreadId>;
}

/// What a backend needs to know to make its sides.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a device needs to know more"))]
#[allow(missing_debug_implementations, reason = "nobody outside has one")]
pub struct Sides<'a> {
    /// Bytes of a slot.
    pub(crate) slot: usize,
    pub(crate) host_depth: usize,
    pub(crate) overlap: bool,
    pub(crate) trace: Option<Arc<Trace>>,
    /// The memory, spelled out.
    pub(crate) sum: &'a dyn fmt::Display,
}

/// There is no memory for this sum of slots.
pub(crate) fn too_large(sum: &dyn fmt::Display) -> Error {
    let wanted = "slots that fit the memory".to_string();
    Error::Option { option: "host_depth", wanted, found: sum.to_string() }
}

/// Why there is no slot to fill.
#[derive(Debug)]
pub enum NoSlot {
    /// The caller holds the batches, and on this thread nobody else could drop one.
    AllHeld,
    /// Nobody receives any more, or the backend has failed, which the receiving side will tell.
    Gone,
}

/// What came of a wait for a batch.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "memory does not fail"))]
#[derive(Debug)]
pub enum Received<B> {
    Batch(B),
    NotYet,
    AllHeld,
    Gone,
    /// The device's driver has failed.
    Failed(BoxError),
}

/// Copies from the host to the device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Transfers {
    pub(crate) time: Duration,
    pub(crate) bytes: u64,
    /// When that of the batch in question was done, and how long it took; `None` if it is still on its way.
    pub(crate) this: Option<(Instant, Duration)>,
}

/// Batches stay in host memory: [`Batch`] is bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Backend for Host {
    type Batch<'l> = Batch<'l>;
    type Slots = Producer<'static, Slot, Park>;
    type Batches = Consumer<'static, Slot, Park>;

    const WAIT: &'static str = "queue_wait";

    fn device_depth(&self) -> usize {
        0
    }

    fn make(self, sides: Sides<'_>) -> Result<(Self::Slots, Self::Batches), Error> {
        let slots = (0..sides.host_depth).map(|_| Slot::new(sides.slot)).collect::<Option<Vec<_>>>();
        Ok(handles(slots.ok_or_else(|| too_large(sides.sum))?))
    }

    fn fill(
        slots: &mut Self::Slots,
        wait: bool,
        fill: &mut dyn FnMut(&mut [u8]) -> Option<Load>,
    ) -> Result<(), NoSlot> {
        let mut slot = if wait {
            slots.acquire().map_err(|_| NoSlot::Gone)?
        } else {
            slots.try_acquire().map_err(|error| match error {
                TryAcquireError::Full => NoSlot::AllHeld,
                TryAcquireError::Closed => NoSlot::Gone,
            })?
        };
        let Some(load) = fill(&mut slot.buffer) else { return Ok(()) };
        slot.load = Some(load);
        slot.commit().map_err(|_| NoSlot::Gone)
    }

    fn finish(slots: Self::Slots) {
        slots.finish();
    }

    fn receive<'l>(batches: &'l Self::Batches, waiting: &mut Waiting<'_, '_>) -> Received<Batch<'l>> {
        let received = match waiting {
            Waiting::Block => batches.recv(),
            Waiting::Try => match batches.try_recv() {
                Ok(slot) => Ok(slot),
                Err(TryRecvError::Empty) => return Received::NotYet,
                Err(TryRecvError::Finished) => Err(RecvError::Finished),
                Err(TryRecvError::Abandoned) => Err(RecvError::Abandoned),
                Err(TryRecvError::AllHeld) => Err(RecvError::AllHeld),
            },
            Waiting::Poll(cx) => match batches.poll_recv(cx) {
                Poll::Ready(received) => received,
                Poll::Pending => return Received::NotYet,
            },
        };
        match received {
            Ok(slot) => Received::Batch(Batch { slot }),
            Err(RecvError::AllHeld) => Received::AllHeld,
            Err(RecvError::Finished | RecvError::Abandoned) => Received::Gone,
        }
    }

    fn held(_: &Self::Batches, host_depth: usize) -> (&'static str, usize) {
        ("host_depth", host_depth)
    }

    fn load<'b>(batch: &'b mut Batch<'_>) -> Option<&'b mut Load> {
        let slot: &mut ReadSlot<'_, Slot, Park> = &mut batch.slot;
        slot.load.as_mut()
    }

    fn transfers(_: &Self::Batches, _: u64, _: u64) -> Transfers {
        Transfers::default()
    }

    fn copy_thread(_: &Self::Batches) -> Option<ThreadId> {
        None
    }
}

/// The ring of these slots, 1 to [`MAX_HOST_DEPTH`].
fn handles(slots: Vec<Slot>) -> (Producer<'static, Slot, Park>, Consumer<'static, Slot, Park>) {
    fn of<const N: usize>(
        slots: Vec<Slot>,
    ) -> (Producer<'static, Slot, Park>, Consumer<'static, Slot, Park>) {
        let Ok(slots) = <[Slot; N]>::try_from(slots) else { unreachable!("matched on their number") };
        Ring::with_wait(slots, Park).into_handles()
    }
    match slots.len() {
        1 => of::<1>(slots),
        2 => of::<2>(slots),
        3 => of::<3>(slots),
        4 => of::<4>(slots),
        5 => of::<5>(slots),
        6 => of::<6>(slots),
        7 => of::<7>(slots),
        8 => of::<8>(slots),
        depth => unreachable!("checked by the builder, 1 to {MAX_HOST_DEPTH}: {depth}"),
    }
}
