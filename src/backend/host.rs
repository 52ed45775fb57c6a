//! The host backend: batches stay in the slots that they were read into.

use std::fmt;
use std::task::Poll;
use std::time::{Duration, Instant};

use twinbuf_core::{
    Consumer, HeapRing, KeptSlot, Producer, ReadSlot, TryAcquireError, TryRecvError, WriteSlot,
};
use twinbuf_mmap::Buffer;

use super::Adaptive;
use super::batch::Batch;
use super::sealed::{self, Batches, SlotGuard, Slots};
use super::{Backend, NoSlot, Received, Sides, Waiting, too_large};
use crate::error::Error;
use crate::observe::log::What;
use crate::slot::{BatchMeta, Freed, Slot, Ticket};

/// The default backend of a loader: batches stay in host memory. Its epochs yield [`Batch`](crate::Batch).
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Backend for Host {
    type Batch = Batch;
}

impl sealed::Backend for Host {
    type Content = [u8];
    type Slots = Producer<'static, Slot<Buffer>, Adaptive>;
    type Batches = Consumer<'static, Slot<Buffer>, Adaptive>;

    const WAIT: What = What::Wait;

    fn make(self, sides: &mut Sides<'_>) -> Result<sealed::Lanes<Self>, Error> {
        let lanes = 0..sides.lanes;
        // The reading thread of each lane, and the caller's.
        let threads = sides.lanes + 1;
        let ring = |_| {
            let memory = match sides.lent() {
                Some(lent) => lent,
                None => Buffer::several(sides.host_depth, sides.slot).ok_or_else(|| too_large(sides.sum))?,
            };
            let slots: Vec<_> = memory.into_iter().map(Slot::new).collect();
            Ok(HeapRing::with_wait(slots, Adaptive::for_threads(threads)).into_handles())
        };
        lanes.map(ring).collect()
    }
}

/// Values that a source makes, in the slots that it was given.
pub(crate) struct Values<T>(pub(crate) Vec<T>);

/// A value as the content of a slot.
#[derive(Debug)]
pub(crate) struct Value<T>(pub(crate) T);

impl<T: Send + 'static> sealed::Backend for Values<T> {
    type Content = T;
    type Slots = Producer<'static, Slot<Value<T>>, Adaptive>;
    type Batches = Consumer<'static, Slot<Value<T>>, Adaptive>;

    const WAIT: What = What::Wait;

    fn make(self, _: &mut Sides<'_>) -> Result<sealed::Lanes<Self>, Error> {
        let slots: Vec<_> = self.0.into_iter().map(|value| Slot::new(Value(value))).collect();
        Ok(vec![HeapRing::with_wait(slots, Adaptive::for_threads(2)).into_handles()])
    }
}

impl<T> fmt::Debug for Values<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Values")
    }
}

/// What is filled in a slot of the ring.
pub trait Content: Send + 'static {
    type Filled: ?Sized;

    fn filled(&mut self) -> &mut Self::Filled;
}

impl Content for Buffer {
    type Filled = [u8];

    fn filled(&mut self) -> &mut [u8] {
        self
    }
}

impl<T: Send + 'static> Content for Value<T> {
    type Filled = T;

    fn filled(&mut self) -> &mut T {
        &mut self.0
    }
}

impl<C: Content> Slots for Producer<'static, Slot<C>, Adaptive> {
    type Content = C::Filled;
    type Guard<'s> = WriteSlot<'s, 'static, Slot<C>, Adaptive>;

    fn acquire(&mut self) -> Result<Self::Guard<'_>, NoSlot> {
        Producer::acquire(self).map_err(|_| NoSlot::Gone)
    }

    fn acquire_within(&mut self, timeout: Duration) -> Result<Self::Guard<'_>, NoSlot> {
        // Without a wait the clock is not read.
        let found = if timeout.is_zero() { self.try_acquire() } else { self.acquire_timeout(timeout) };
        found.map_err(|error| match error {
            TryAcquireError::Full => NoSlot::Held,
            _ => NoSlot::Gone,
        })
    }

    fn finish(self) {
        Producer::finish(self);
    }
}

impl<C: Content> SlotGuard for WriteSlot<'_, 'static, Slot<C>, Adaptive> {
    type Content = C::Filled;

    fn content(&mut self) -> &mut C::Filled {
        self.content.filled()
    }

    fn commit(mut self, mut meta: BatchMeta) -> Result<(), NoSlot> {
        let freed = self.freed.take();
        if let (Some(before), Some((at, thread))) = (&self.meta, freed) {
            let Ticket { generation, seq, .. } = before.ticket;
            meta.load.freed = Some(Freed { batch: (generation, seq), at, thread });
        }
        self.meta = Some(meta);
        WriteSlot::commit(self).map_err(|_| NoSlot::Gone)
    }
}

impl<C: Content> Batches for Consumer<'static, Slot<C>, Adaptive> {
    type Batch = KeptSlot<'static, Slot<C>, Adaptive>;

    fn receive(&mut self, waiting: &mut Waiting<'_, '_>, held_timeout: Duration) -> Received<Self::Batch> {
        match waiting {
            Waiting::Drain if self.is_held() => Received::SlotHeld,
            Waiting::Drain => received(self.recv().map_err(TryRecvError::from)),
            // A task is woken by the release of a slot too.
            Waiting::Poll(cx) => {
                match self.poll_recv(cx).map(|found| received(found.map_err(TryRecvError::from))) {
                    Poll::Ready(found) => found,
                    Poll::Pending if self.is_held() => Received::SlotHeld,
                    Poll::Pending => Received::NotYet,
                }
            }
            Waiting::Try => received(self.try_recv()),
            Waiting::Until(deadline) => received(self.recv_deadline(*deadline)),
            // The wait for an empty slot has no limit, the wait for a held one has: the guard that holds it is
            // there from the start.
            Waiting::Block => loop {
                match received(self.recv_deadline(Instant::now() + held_timeout.clamp(SHORTEST, LONGEST))) {
                    Received::NotYet => {}
                    found => return found,
                }
            },
        }
    }

    fn is_held(&self) -> bool {
        Consumer::is_held(self)
    }

    fn meta(batch: &mut Self::Batch) -> &mut BatchMeta {
        let Some(meta) = &mut batch.meta else { unreachable!("a slot is handed over with its meta data") };
        meta
    }

    fn slots(&self) -> (&'static str, usize) {
        ("host_depth", self.depth())
    }
}

/// Limits of the waits that a blocking wait is split into.
const SHORTEST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_secs(3600);

fn received<C: Content>(
    found: Result<Option<ReadSlot<'_, 'static, Slot<C>, Adaptive>>, TryRecvError>,
) -> Received<KeptSlot<'static, Slot<C>, Adaptive>> {
    match found {
        Ok(Some(batch)) => Received::Batch(batch.keep()),
        Err(TryRecvError::Empty) => Received::NotYet,
        Err(TryRecvError::Held) => Received::SlotHeld,
        Ok(None) | Err(_) => Received::Gone,
    }
}
