//! The host backend: batches stay in the slots that they were read into.

use std::task::Poll;
use std::time::{Duration, Instant};

use twinbuf_core::{
    Consumer, HeapRing, KeptSlot, Producer, ReadSlot, TryAcquireError, TryRecvError, WriteSlot,
};
use twinbuf_mmap::Buffer;

use super::batch::Batch;
use super::sealed::{self, Batches, SlotGuard, Slots};
use super::{Backend, NoSlot, Received, Sides, Waiting, too_large};
use crate::error::Error;
use crate::observe::log::What;
use crate::slot::{BatchMeta, Chunks, Freed, Slot, Ticket};

/// The most chunks of a slot: each costs a call from the filling thread.
const MAX_CHUNKS: usize = 64;

/// The default backend of a loader: batches stay in host memory. Its epochs yield [`Batch`](crate::Batch).
#[derive(Clone, Copy, Debug, Default)]
pub struct Host;

impl Backend for Host {
    type Batch = Batch;
}

impl sealed::Backend for Host {
    type Content = [u8];
    type Slots = Filling<Buffer>;
    type Batches = Consumer<'static, Slot<Buffer>>;

    const WAIT: What = What::Wait;

    fn make(self, sides: &mut Sides<'_>) -> Result<sealed::Lanes<Self>, Error> {
        let lanes = 0..sides.lanes;
        let (chunk, sending) = (sides.chunk(MAX_CHUNKS), sides.sending.take());
        let slot = |memory| {
            let chunks = sending.clone().zip(chunk).map(|(sending, chunk)| Chunks::new(sending, chunk));
            Slot { chunks: chunks.map(Box::new), ..Slot::new(memory) }
        };
        let lane = |_| {
            let memory = match sides.lent() {
                Some(lent) => lent,
                None => Buffer::several(&vec![sides.slot; sides.host_depth])
                    .ok_or_else(|| too_large(sides.sum))?,
            };
            let slots: Vec<_> = memory.into_iter().map(slot).collect();
            Ok(ring(slots))
        };
        lanes.map(lane).collect()
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

/// Where what is filled begins.
fn address<C: Content>(content: &mut C) -> usize {
    std::ptr::from_mut(content.filled()).cast::<u8>().expose_provenance()
}

/// The side of a ring that is filled.
#[derive(Debug)]
pub struct Filling<C: Content> {
    slots: Producer<'static, Slot<C>>,
}

fn ring<C: Content>(slots: Vec<Slot<C>>) -> (Filling<C>, Consumer<'static, Slot<C>>) {
    let (slots, batches) = HeapRing::new(slots).into_handles();
    (Filling { slots }, batches)
}

impl<C: Content> Slots for Filling<C> {
    type Content = C::Filled;
    type Guard<'s> = WriteSlot<'s, 'static, Slot<C>>;

    fn acquire(&mut self) -> Result<Self::Guard<'_>, NoSlot> {
        self.slots.acquire().map_err(|_| NoSlot::Gone)
    }

    fn acquire_within(&mut self, timeout: Duration) -> Result<Self::Guard<'_>, NoSlot> {
        let slots = &mut self.slots;
        // Without a wait the clock is not read.
        let found = if timeout.is_zero() { slots.try_acquire() } else { slots.acquire_timeout(timeout) };
        found.map_err(|error| match error {
            TryAcquireError::Full => NoSlot::Held,
            _ => NoSlot::Gone,
        })
    }

    fn finish(self) {
        self.slots.finish();
    }
}

impl<C: Content> SlotGuard for WriteSlot<'_, 'static, Slot<C>> {
    type Content = C::Filled;

    fn content(&mut self) -> &mut C::Filled {
        self.content.filled()
    }

    fn begin(&mut self, ticket: Ticket) {
        if let Slot { content, chunks: Some(chunks), .. } = &mut **self {
            chunks.begin(address(content), ticket);
        }
    }

    fn chunk(&self) -> Option<usize> {
        self.chunks.as_ref().map(|chunks| chunks.bytes)
    }

    fn flush(&mut self, filled: usize) -> usize {
        if let Slot { content, chunks: Some(chunks), .. } = &mut **self {
            chunks.filled(address(content), filled);
        }
        // Who sends them reads them only, and they stay in the slot.
        0
    }

    fn commit(mut self, mut meta: BatchMeta) -> Result<(), NoSlot> {
        let freed = self.freed.take();
        if let (Some(before), Some((at, thread))) = (&self.meta, freed) {
            meta.load.freed = Some(Freed { batch: before.ticket.place(), at, thread });
        }
        self.meta = Some(meta);
        WriteSlot::commit(self).map_err(|_| NoSlot::Gone)
    }
}

impl<C: Content> Batches for Consumer<'static, Slot<C>> {
    type Batch = KeptSlot<'static, Slot<C>>;

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
    found: Result<Option<ReadSlot<'_, 'static, Slot<C>>>, TryRecvError>,
) -> Received<KeptSlot<'static, Slot<C>>> {
    match found {
        Ok(Some(batch)) => Received::Batch(batch.keep()),
        Err(TryRecvError::Empty) => Received::NotYet,
        Err(TryRecvError::Held) => Received::SlotHeld,
        Ok(None) | Err(_) => Received::Gone,
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::slot::{Naming, Sending};

    #[test]
    fn chunks_of_the_batch_that_is_asked_for_are_sent_while_it_is_filled() {
        const MIB: usize = 1 << 20;
        let sent: Arc<Mutex<Vec<(usize, usize)>>> = Arc::default();
        let log = sent.clone();
        let send =
            move |_, bytes: Range<usize>| log.lock().unwrap().push((bytes.start / MIB, bytes.end / MIB));
        let sending = Sending { send: Arc::new(send), asked: Arc::default() };
        let mut sides = Sides {
            lanes: 1,
            slot: 20 * MIB,
            host_depth: 1,
            lent: None,
            sending: Some(sending.clone()),
            overlap: true,
            trace: None,
            naming: Naming::default(),
            sum: &"",
        };
        let (mut slots, _batches) = sealed::Backend::make(Host, &mut sides).unwrap().remove(0);
        let ticket = |seq| Ticket { generation: 1, seq, ordinal: 0, epoch: 0, step: seq, steps: 9, last: 0 };
        let mut fill = |seq, asked: u64, parts: [usize; 4]| {
            // Dropped without a commit, the slot is handed out again: the batch was left.
            let mut slot = Slots::acquire(&mut slots).unwrap();
            assert_eq!(slot.chunk(), Some(8 * MIB));
            slot.begin(ticket(seq));
            for (part, filled) in parts.into_iter().enumerate() {
                if part == 2 {
                    sending.ask(ticket(asked));
                }
                assert_eq!(slot.flush(filled * MIB), 0);
            }
            assert_eq!(slot.content().len(), 20 * MIB);
            std::mem::take(&mut *sent.lock().unwrap())
        };
        sending.ask(ticket(0));
        assert_eq!(fill(0, 0, [7, 9, 15, 16]), [(0, 8), (8, 16)]);
        assert_eq!(fill(1, 0, [8, 12, 16, 20]), [(0, 0)], "it is waited for, and batch 1 is not asked for");
        assert_eq!(fill(2, 2, [8, 12, 16, 20]), [(0, 16)], "nothing to wait for, and asked for late");
    }
}
