//! The ring under a pipe: where units are filled and received.
//!
//! A [`Ring`] has two [`Sides`]. One hands out free slots, in turn, to any number of threads; the other receives what they
//! committed, in the same order. [`Slots`] is such a ring in host memory, `DeviceSlots` one on a CUDA device. A
//! [`Header`] travels with each unit: its name, the result and the times of its fill, and on the host when its slot
//! was last released.

use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::ops::{Deref, DerefMut};
use std::panic::resume_unwind;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use twinbuf_core::TryRecvError;

use crate::error::{BoxError, Error};
use crate::observe::log::{Freed, LoadTimes, Ticket};
use crate::sync::{Consumer, HeapRing, KeptSlot, Producer, ReadSlot, ReservedSlot};
use crate::thread::caught;

/// What filled a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// This many bytes.
    Bytes(usize),
    /// Nothing: the source has no more, and the iteration ends here.
    End,
}

/// What a pipe keeps about the unit in a slot. It travels with the slot, from the worker to the caller.
#[derive(Debug)]
pub struct Header<U> {
    pub(crate) ticket: Ticket,
    /// `None` at the end, or after an error of the order.
    pub(crate) unit: Option<U>,
    pub(crate) result: Result<Content, Box<Error>>,
    pub(crate) load: LoadTimes,
}

impl<U> Header<U> {
    /// The header of a slot that is not filled yet. The caller has asked for units since `resumed`. `freed` is when the
    /// slot was released.
    pub(super) fn new(resumed: Instant, freed: Option<Freed>) -> Self {
        let load = LoadTimes { freed, ..LoadTimes::new(resumed) };
        Self { ticket: Ticket::default(), unit: None, result: Ok(Content::End), load }
    }

    /// Whether there is a unit and nothing failed before its fill.
    pub(super) fn is_to_fill(&self) -> bool {
        self.unit.is_some() && self.result.is_ok()
    }

    /// Takes what is foreign out of the header, to be dropped.
    fn take(&mut self) -> (Option<U>, Result<Content, Box<Error>>) {
        (self.unit.take(), mem::replace(&mut self.result, Ok(Content::End)))
    }

    pub(crate) fn bytes(&self) -> usize {
        match self.result {
            Ok(Content::Bytes(bytes)) => bytes,
            _ => 0,
        }
    }
}

/// How a caller waits for its next item.
#[derive(Debug)]
pub enum Waiting<'a, 'b> {
    /// Until it comes, or a held slot is not released in time.
    Block,
    /// Until it comes or the time is reached.
    Until(Instant),
    /// Not at all.
    Try,
    /// Not at all: later the task is woken.
    Poll(&'a mut Context<'b>),
}

impl Waiting<'_, '_> {
    /// Returns when this call gives up its wait for the release of the next slot, which is held. The wait for the fill after
    /// it has no other limit than the caller's. `None` if the call does not wait.
    pub(super) fn release_by(&self, held_since: &mut Option<Instant>, timeout: Duration) -> Option<Instant> {
        match self {
            Self::Block => Some(Instant::now() + timeout),
            Self::Until(end) => Some((*end).min(*held_since.get_or_insert_with(Instant::now) + timeout)),
            Self::Try | Self::Poll(_) => None,
        }
    }
}

/// What a receive call found.
#[derive(Debug)]
pub enum Received<I> {
    /// The next item.
    Item(I),
    /// The next slot is not filled yet.
    Empty,
    /// The next slot is still held by an item that was received before.
    Held,
    /// No item will come: the filling side is gone, or a worker that reserved the next slot unwound.
    Gone,
    /// The device failed.
    Failed(BoxError),
}

/// The slots of a pipe: what they are filled with, and what the caller receives.
///
/// [`Slots`] are in host memory, `DeviceSlots` on a CUDA device. A pipe can be built with no others, so no other crate
/// implements this trait.
pub trait Ring: Sides<<Self as Ring>::Unit, <Self as Ring>::Slot, <Self as Ring>::Item> {
    /// What a slot is filled with.
    type Unit: Send + 'static;
    /// The memory that a source fills.
    type Slot: ?Sized;
    /// A filled slot. A drop frees it.
    type Item: 'static;
}

/// The two sides of a ring of slots `S`, filled with units `U` and received as items `I`. An implementation hands out each
/// free slot once, and delivers what was committed in the order of `reserve`.
pub trait Sides<U, S: ?Sized, I>: Sized + 'static {
    /// The side that hands out free slots.
    type Producer: Send + 'static;
    /// A free slot to be filled, on any thread. A drop without [`commit`](Self::commit) is received as
    /// [`Gone`](Received::Gone).
    type Reserved: Send + 'static;
    /// The side that receives.
    type Consumer: Send + 'static;

    /// Whether the items are on a device: then the trace calls the caller's wait by another name.
    const ON_DEVICE: bool = false;

    /// Waits until the next slot is free: up to `until`, or not at all if there is no time given. Returns whether it is. If
    /// nothing receives any more, or the device failed, it never is; then the receiving side has the error.
    fn wait_free(producer: &mut Self::Producer, until: Option<Instant>) -> bool;

    /// Takes the next slot out of the side that hands them out, if it is free.
    fn reserve(producer: &mut Self::Producer) -> Option<Self::Reserved>;

    /// Returns the memory of the slot, and the header of the unit in it.
    fn parts(reserved: &mut Self::Reserved) -> (&mut S, &mut Header<U>);

    /// Hands the slot over, with `bytes` of it filled.
    fn commit(reserved: Self::Reserved, bytes: usize);

    /// Receives the next item. A [`Block`](Waiting::Block) must not meet a slot that is held.
    fn receive(consumer: &mut Self::Consumer, waiting: &mut Waiting<'_, '_>) -> Received<I>;

    /// Returns the header of the unit in an item.
    fn header(item: &I) -> &Header<U>;

    /// Returns the header of the unit in an item.
    fn header_mut(item: &mut I) -> &mut Header<U>;

    /// Returns the number of an item: 0 for the first of the ring.
    fn number(item: &I) -> u64;

    /// Returns the name of the option that sets how many slots items hold, and their number.
    fn depth(consumer: &Self::Consumer) -> (&'static str, usize);

    /// Returns the start and the end of this item's copy to a device. `None` if it is not done, or none is made.
    fn copied(_: &Self::Consumer, _number: u64) -> Option<(Instant, Instant)> {
        None
    }

    /// Returns how long the copies to a device have taken so far, and their bytes.
    fn copies(_: &Self::Consumer) -> (Duration, u64) {
        (Duration::ZERO, 0)
    }
}

/// The two sides of a ring.
#[expect(type_alias_bounds, reason = "names types of the ring")]
pub(super) type BothSides<R: Ring> = (R::Producer, R::Consumer);

/// A slot in host memory.
///
/// Two slots share no cache line, nor a pair of lines that a processor fetches together: one is written while the other
/// is read.
#[derive(Debug)]
#[repr(align(128))]
pub struct Slot<T, U> {
    content: ManuallyDrop<T>,
    /// The header of the unit in the slot. While the slot is free, that of an earlier unit, without the unit itself.
    header: Header<U>,
}

/// Drops each part, whichever panics. Several slots are dropped together, and a second panic that left a drop would abort
/// the process.
impl<T, U> Drop for Slot<T, U> {
    fn drop(&mut self) {
        // SAFETY: nothing uses the value after this, the only take of it: a slot is dropped once.
        let content = unsafe { ManuallyDrop::take(&mut self.content) };
        let (unit, result) = self.header.take();
        let parts = [caught(|| drop(content)), caught(|| drop(unit)), caught(|| drop(result))];
        if let (Some(message), false) = (parts.into_iter().find_map(Result::err), std::thread::panicking()) {
            resume_unwind(Box::new(message));
        }
    }
}

/// A ring of host slots, each with a value of type `T`. Its items are [`Filled`].
#[derive(Debug)]
pub struct Slots<T, U>(std::marker::PhantomData<fn() -> (T, U)>);

impl<T: Send + 'static, U: Send + 'static> Slots<T, U> {
    /// Makes a ring of these slots.
    pub(crate) fn ring(contents: Vec<T>) -> BothSides<Self> {
        let slot =
            |content| Slot { content: ManuallyDrop::new(content), header: Header::new(Instant::now(), None) };
        HeapRing::new(contents.into_iter().map(slot).collect::<Vec<_>>()).into_handles()
    }
}

impl<T: Send + 'static, U: Send + 'static> Ring for Slots<T, U> {
    type Unit = U;
    type Slot = T;
    type Item = Filled<T, U>;
}

impl<T: Send + 'static, U: Send + 'static> Sides<U, T, Filled<T, U>> for Slots<T, U> {
    type Producer = Producer<'static, Slot<T, U>>;
    type Reserved = ReservedSlot<'static, Slot<T, U>>;
    type Consumer = Consumer<'static, Slot<T, U>>;

    fn wait_free(producer: &mut Self::Producer, until: Option<Instant>) -> bool {
        let found = match until {
            Some(until) => producer.acquire_deadline(until),
            None => producer.try_acquire(),
        };
        // This drops the guard of the free slot without a commit: `reserve` then acquires the same slot.
        found.is_ok()
    }

    fn reserve(producer: &mut Self::Producer) -> Option<Self::Reserved> {
        Some(producer.try_acquire().ok()?.reserve())
    }

    fn parts(reserved: &mut Self::Reserved) -> (&mut T, &mut Header<U>) {
        let Slot { content, header } = &mut **reserved;
        (content, header)
    }

    fn commit(reserved: Self::Reserved, _: usize) {
        // Fails only if the consumer was dropped: then nobody would read the slot.
        let _ = reserved.commit();
    }

    fn receive(consumer: &mut Self::Consumer, waiting: &mut Waiting<'_, '_>) -> Received<Filled<T, U>> {
        match waiting {
            Waiting::Try => received(consumer.try_recv()),
            Waiting::Until(deadline) => received(consumer.recv_deadline(*deadline)),
            // If a guard holds the slot, its release also wakes the task.
            Waiting::Poll(cx) => {
                match consumer.poll_recv(cx).map(|found| received(found.map_err(TryRecvError::from))) {
                    Poll::Ready(found) => found,
                    Poll::Pending if consumer.is_held() => Received::Held,
                    Poll::Pending => Received::Empty,
                }
            }
            Waiting::Block => received(consumer.recv().map_err(TryRecvError::from)),
        }
    }

    fn header(item: &Filled<T, U>) -> &Header<U> {
        &item.0.header
    }

    fn header_mut(item: &mut Filled<T, U>) -> &mut Header<U> {
        &mut item.0.header
    }

    fn number(item: &Filled<T, U>) -> u64 {
        item.0.seq()
    }

    fn depth(consumer: &Self::Consumer) -> (&'static str, usize) {
        ("depth", consumer.depth())
    }
}

fn received<T: Send + 'static, U: Send + 'static>(
    found: Result<Option<ReadSlot<'_, 'static, Slot<T, U>>>, TryRecvError>,
) -> Received<Filled<T, U>> {
    match found {
        Ok(Some(slot)) => Received::Item(Filled(slot.keep())),
        Err(TryRecvError::Empty) => Received::Empty,
        Err(TryRecvError::Held) => Received::Held,
        Ok(None) | Err(_) => Received::Gone,
    }
}

/// A filled host slot. It dereferences to its value. Dropping it drops its unit and frees the slot, on any thread; it may
/// outlive its pipe.
pub struct Filled<T: Send + 'static, U: Send + 'static>(KeptSlot<'static, Slot<T, U>>);

impl<T: Send + 'static, U: Send + 'static> Filled<T, U> {
    /// Returns the unit that the slot was filled with.
    #[must_use]
    pub fn unit(&self) -> &U {
        let unit = self.0.header.unit.as_ref();
        let Some(unit) = unit else { unreachable!("an item is handed out with its unit") };
        unit
    }
}

/// Drops the unit, or an error that nobody received, here: both are foreign code, and a worker that takes the slot next
/// holds the turn. Then notes for the report when the slot was released.
impl<T: Send + 'static, U: Send + 'static> Drop for Filled<T, U> {
    fn drop(&mut self) {
        drop(self.0.header.take());
        self.0.header.load.freed = Some(Freed { number: self.0.seq(), at: Instant::now() });
    }
}

impl<T: Send + 'static, U: Send + 'static> Deref for Filled<T, U> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0.content
    }
}

impl<T: Send + 'static, U: Send + 'static> DerefMut for Filled<T, U> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.0.content
    }
}

debug!([T: fmt::Debug + Send + 'static, U: Send + 'static] Filled[T, U], |filled|
    epoch: filled.0.header.ticket.place.epoch, step: filled.0.header.ticket.place.step, value: **filled);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_knows_when_its_last_item_was_dropped() {
        let (mut producer, mut consumer) = Slots::<u64, ()>::ring(vec![0; 2]);
        let mut freed = |number| {
            let mut reserved = Slots::reserve(&mut producer).unwrap();
            let (_, header) = Slots::parts(&mut reserved);
            *header = Header::new(Instant::now(), header.load.freed);
            Slots::commit(reserved, 8);
            let mut found = Slots::receive(&mut consumer, &mut Waiting::Try);
            let Received::Item(item) = &mut found else { panic!("item {number}: {found:?}") };
            assert_eq!(Slots::number(item), number);
            let freed = Slots::header_mut(item).load.freed;
            std::thread::spawn(move || drop(found)).join().unwrap();
            freed
        };
        assert_eq!((freed(0), freed(1)), (None, None));
        let (first, second) = (freed(2).unwrap(), freed(3).unwrap());
        assert_eq!((first.number, second.number), (0, 1));
        assert!(first.at <= second.at);
    }
}
