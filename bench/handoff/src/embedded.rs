//! The two closest relatives in embedded code, both used in place: `embassy_sync::zerocopy_channel` and bbqueue.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;

use bbqueue::BBQueue;
use bbqueue::export::ConstInit;
use bbqueue::prod_cons::stream::{StreamConsumer, StreamGrantR, StreamGrantW, StreamProducer};
use bbqueue::traits::coordination::cas::AtomicCoord;
use bbqueue::traits::notifier::maitake::MaiNotSpsc;
use bbqueue::traits::notifier::polling::Polling;
use bbqueue::traits::notifier::{AsyncNotifier, Notifier};
use bbqueue::traits::storage::Storage;
// Links the critical section of std, for embassy's mutex.
use critical_section as _;
use embassy_sync::blocking_mutex::raw::{CriticalSectionRawMutex, RawMutex};
use embassy_sync::zerocopy_channel::{Channel, Receiver, Sender};

use crate::measure::{Role, Rx, Subjects, Tx, Wait};
use crate::payload::{Block1M, Block4K, Inline, Payload};
use crate::task::{Async, awaited};

/// A channel and the slots that it borrows. Small slots share the line of its state, as in the ring.
#[repr(C, align(128))]
struct Zerocopy<M: RawMutex + 'static, P: 'static> {
    slots: UnsafeCell<[P; 2]>,
    channel: UnsafeCell<Option<Channel<'static, M, P>>>,
}

// SAFETY: both cells are opened once, by `zerocopy`. After that only the two ends reach them, and the ends are made for
// two threads.
unsafe impl<M: RawMutex + Sync, P: Send> Sync for Zerocopy<M, P> {}
// SAFETY: as above; the last of the two ends drops slots that may cross threads.
unsafe impl<M: RawMutex + Send, P: Send> Send for Zerocopy<M, P> {}

// Each end owns a share of the channel. The end is the first field, so it is dropped before the channel.
struct ZerocopyTx<M: RawMutex + 'static, P: 'static>(
    Sender<'static, M, P>,
    #[expect(unused)] Arc<Zerocopy<M, P>>,
);
struct ZerocopyRx<M: RawMutex + 'static, P: 'static>(
    Receiver<'static, M, P>,
    #[expect(unused)] Arc<Zerocopy<M, P>>,
);

fn zerocopy<M: RawMutex, P: Payload>() -> (ZerocopyTx<M, P>, ZerocopyRx<M, P>) {
    let shared =
        Arc::new(Zerocopy { slots: UnsafeCell::new([P::new(), P::new()]), channel: UnsafeCell::new(None) });
    // SAFETY: the only reference ever made to the slots; the channel keeps it and is dropped with them.
    let slots = unsafe { &mut *shared.slots.get() };
    // SAFETY: the only reference ever made to the channel; the two ends have it and keep it alive.
    let channel = unsafe { &mut *shared.channel.get() };
    let (tx, rx) = channel.insert(Channel::new(slots)).split();
    (ZerocopyTx(tx, shared.clone()), ZerocopyRx(rx, shared))
}

impl<M: RawMutex + Send + Sync, P: Payload> Tx for ZerocopyTx<M, P> {
    #[inline]
    fn send(&mut self, seq: u64) {
        loop {
            if let Some(slot) = self.0.try_send() {
                slot.fill(seq);
                break;
            }
            spin_loop();
        }
        self.0.send_done();
    }
}

impl<M: RawMutex + Send + Sync, P: Payload> Rx for ZerocopyRx<M, P> {
    #[inline]
    fn recv(&mut self) -> u64 {
        let sum = loop {
            if let Some(slot) = self.0.try_receive() {
                break slot.sum();
            }
            spin_loop();
        };
        self.0.receive_done();
        sum
    }
}

impl<M: RawMutex + Send + Sync, P: Payload> Tx for Async<ZerocopyTx<M, P>> {
    #[inline]
    fn send(&mut self, seq: u64) {
        self.task.block_on(self.end.0.send()).fill(seq);
        self.end.0.send_done();
    }
}

impl<M: RawMutex + Send + Sync, P: Payload> Rx for Async<ZerocopyRx<M, P>> {
    #[inline]
    fn recv(&mut self) -> u64 {
        let sum = self.task.block_on(self.end.0.receive()).sum();
        self.end.0.receive_done();
        sum
    }
}

/// The bytes of a bbqueue: room for two payloads, with their alignment.
#[repr(align(128))]
struct Room<P>(UnsafeCell<MaybeUninit<[P; 2]>>);

// SAFETY: the queue gives each byte to one side at a time.
unsafe impl<P: Send> Sync for Room<P> {}

impl<P: Payload> Storage for Room<P> {
    unsafe fn ptr_len(&self) -> (NonNull<u8>, usize) {
        // SAFETY: the address of a field.
        (unsafe { NonNull::new_unchecked(self.0.get().cast()) }, 2 * P::BYTES)
    }
}

type Queue<P, A> = BBQueue<Room<P>, AtomicCoord, A>;
type Grants<P, A> = &'static Queue<P, A>;

// Each end owns a share of the queue. The end is the first field, so it is dropped before the queue.
struct GrantTx<P: Payload, A: Notifier + 'static>(
    StreamProducer<Grants<P, A>>,
    #[expect(unused)] Arc<Queue<P, A>>,
);
struct GrantRx<P: Payload, A: Notifier + 'static>(
    StreamConsumer<Grants<P, A>>,
    #[expect(unused)] Arc<Queue<P, A>>,
);

fn bbqueue<P: Inline, A: Notifier + ConstInit>() -> (GrantTx<P, A>, GrantRx<P, A>) {
    let queue = Arc::new(BBQueue::new_with_storage(Room(UnsafeCell::new(MaybeUninit::uninit()))));
    // SAFETY: the two ends keep the queue alive, and it does not move. Borrowed, because an end that owns its share
    // (`ArcBBQueue`) increments and decrements the count for each grant.
    let shared: Grants<P, A> = unsafe { &*Arc::as_ptr(&queue) };
    (GrantTx(shared.stream_producer(), queue.clone()), GrantRx(shared.stream_consumer(), queue))
}

#[inline]
fn write<P: Inline, A: Notifier>(mut grant: StreamGrantW<Grants<P, A>>, seq: u64) {
    let place = grant.as_mut_ptr().cast::<MaybeUninit<P>>();
    debug_assert!(grant.len() == P::BYTES && place.is_aligned());
    // SAFETY: the grant is as large as one payload. It is aligned, because the room is aligned and all grants have this
    // size.
    P::init(unsafe { &mut *place }, seq);
    grant.commit(P::BYTES);
}

/// A read grant covers all contiguous data; one payload of it is released.
#[inline]
fn read<P: Inline, A: Notifier>(grant: StreamGrantR<Grants<P, A>>) -> u64 {
    let place = grant.as_ptr().cast::<P>();
    debug_assert!(grant.len() >= P::BYTES && place.is_aligned());
    // SAFETY: as in `write`, which has initialized all of it.
    let sum = unsafe { &*place }.sum();
    grant.release(P::BYTES);
    sum
}

impl<P: Inline, A: Notifier + Send + Sync> Tx for GrantTx<P, A> {
    #[inline]
    fn send(&mut self, seq: u64) {
        let grant = loop {
            if let Ok(grant) = self.0.grant_exact(P::BYTES) {
                break grant;
            }
            spin_loop();
        };
        write(grant, seq);
    }
}

impl<P: Inline, A: Notifier + Send + Sync> Rx for GrantRx<P, A> {
    #[inline]
    fn recv(&mut self) -> u64 {
        let grant = loop {
            if let Ok(grant) = self.0.read() {
                break grant;
            }
            spin_loop();
        };
        read(grant)
    }
}

impl<P: Inline, A: AsyncNotifier + Send + Sync> Tx for Async<GrantTx<P, A>> {
    #[inline]
    fn send(&mut self, seq: u64) {
        write(self.task.block_on(self.end.0.wait_grant_exact(P::BYTES)), seq);
    }
}

impl<P: Inline, A: AsyncNotifier + Send + Sync> Rx for Async<GrantRx<P, A>> {
    #[inline]
    fn recv(&mut self) -> u64 {
        read(self.task.block_on(self.end.0.wait_read()))
    }
}

pub fn add(list: &mut Subjects) {
    type M = CriticalSectionRawMutex;
    let id = (Wait::Spin, Role::Peer, "embassy", "in place");
    list.words(id, zerocopy::<M, u64>);
    list.stream::<Block4K, _, _>(id, zerocopy::<M, Block4K>);
    list.stream::<Block1M, _, _>(id, zerocopy::<M, Box<Block1M>>);
    let id = (Wait::Async, Role::Peer, "embassy", "in place");
    list.words(id, || awaited(zerocopy::<M, u64>()));
    list.stream::<Block4K, _, _>(id, || awaited(zerocopy::<M, Block4K>()));
    list.stream::<Block1M, _, _>(id, || awaited(zerocopy::<M, Box<Block1M>>()));
    let id = (Wait::Spin, Role::Peer, "bbqueue", "in place");
    list.words(id, bbqueue::<u64, Polling>);
    list.stream::<Block4K, _, _>(id, bbqueue::<Block4K, Polling>);
    list.stream::<Block1M, _, _>(id, bbqueue::<Block1M, Polling>);
    let id = (Wait::Async, Role::Peer, "bbqueue", "in place");
    list.words(id, || awaited(bbqueue::<u64, MaiNotSpsc>()));
    list.stream::<Block4K, _, _>(id, || awaited(bbqueue::<Block4K, MaiNotSpsc>()));
    list.stream::<Block1M, _, _>(id, || awaited(bbqueue::<Block1M, MaiNotSpsc>()));
}
