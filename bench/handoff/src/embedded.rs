//! The two closest relatives in embedded code, both used in place: `embassy_sync::zerocopy_channel` and bbqueue.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::mem::MaybeUninit;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// The smallest lock between threads: one exchange to take it, one store to release it. Not reentrant.
struct SpinRawMutex(AtomicBool);

// SAFETY: between the exchange that finds `false` and the store that restores it, no other thread gets past the loop.
// Acquire and Release: what was done under the lock is visible to its next holder.
unsafe impl RawMutex for SpinRawMutex {
    const INIT: Self = Self(AtomicBool::new(false));

    #[inline]
    fn lock<R>(&self, f: impl FnOnce() -> R) -> R {
        while self.0.swap(true, Ordering::Acquire) {
            while self.0.load(Ordering::Relaxed) {
                spin_loop();
            }
        }
        let done = f();
        self.0.store(false, Ordering::Release);
        done
    }
}

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

/// The bytes of a bbqueue: room for `N` payloads, with their alignment.
#[repr(align(128))]
struct Room<P, const N: usize>(UnsafeCell<MaybeUninit<[P; N]>>);

// SAFETY: the queue gives each byte to one side at a time.
unsafe impl<P: Send, const N: usize> Sync for Room<P, N> {}

impl<P: Payload, const N: usize> Storage for Room<P, N> {
    unsafe fn ptr_len(&self) -> (NonNull<u8>, usize) {
        // SAFETY: the address of a field.
        (unsafe { NonNull::new_unchecked(self.0.get().cast()) }, N * P::BYTES)
    }
}

type Queue<P, const N: usize, A> = BBQueue<Room<P, N>, AtomicCoord, A>;
type Grants<P, const N: usize, A> = &'static Queue<P, N, A>;

// Each end owns a share of the queue. The end is the first field, so it is dropped before the queue.
struct GrantTx<P: Payload, const N: usize, A: Notifier + 'static>(
    StreamProducer<Grants<P, N, A>>,
    #[expect(unused)] Arc<Queue<P, N, A>>,
);
struct GrantRx<P: Payload, const N: usize, A: Notifier + 'static>(
    StreamConsumer<Grants<P, N, A>>,
    #[expect(unused)] Arc<Queue<P, N, A>>,
);

fn bbqueue<P: Inline, const N: usize, A: Notifier + ConstInit>() -> (GrantTx<P, N, A>, GrantRx<P, N, A>) {
    let queue = Arc::new(BBQueue::new_with_storage(Room(UnsafeCell::new(MaybeUninit::uninit()))));
    // SAFETY: the two ends keep the queue alive, and it does not move. Borrowed, because an end that owns its share
    // (`ArcBBQueue`) increments and decrements the count for each grant.
    let shared: Grants<P, N, A> = unsafe { &*Arc::as_ptr(&queue) };
    (GrantTx(shared.stream_producer(), queue.clone()), GrantRx(shared.stream_consumer(), queue))
}

#[inline]
fn write<P: Inline, const N: usize, A: Notifier>(mut grant: StreamGrantW<Grants<P, N, A>>, seq: u64) {
    let place = grant.as_mut_ptr().cast::<MaybeUninit<P>>();
    debug_assert!(grant.len() == P::BYTES && place.is_aligned());
    // SAFETY: the grant is as large as one payload. It is aligned, because the room is aligned and all grants have this
    // size.
    P::init(unsafe { &mut *place }, seq);
    grant.commit(P::BYTES);
}

/// A read grant covers all contiguous data; one payload of it is released.
#[inline]
fn read<P: Inline, const N: usize, A: Notifier>(grant: StreamGrantR<Grants<P, N, A>>) -> u64 {
    let place = grant.as_ptr().cast::<P>();
    debug_assert!(grant.len() >= P::BYTES && place.is_aligned());
    // SAFETY: as in `write`, which has initialized all of it.
    let sum = unsafe { &*place }.sum();
    grant.release(P::BYTES);
    sum
}

impl<P: Inline, const N: usize, A: Notifier + Send + Sync> Tx for GrantTx<P, N, A> {
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

impl<P: Inline, const N: usize, A: Notifier + Send + Sync> Rx for GrantRx<P, N, A> {
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

impl<P: Inline, const N: usize, A: AsyncNotifier + Send + Sync> Tx for Async<GrantTx<P, N, A>> {
    #[inline]
    fn send(&mut self, seq: u64) {
        write(self.task.block_on(self.end.0.wait_grant_exact(P::BYTES)), seq);
    }
}

impl<P: Inline, const N: usize, A: AsyncNotifier + Send + Sync> Rx for Async<GrantRx<P, N, A>> {
    #[inline]
    fn recv(&mut self) -> u64 {
        read(self.task.block_on(self.end.0.wait_read()))
    }
}

/// embassy's channel under the lock `M`.
fn embassy<M: RawMutex + Send + Sync + 'static>(list: &mut Subjects, name: &'static str) {
    let id = (Wait::Spin, Role::Peer, name, "in place");
    list.words(id, zerocopy::<M, u64>);
    list.stream::<Block4K, _, _>(id, zerocopy::<M, Block4K>);
    list.stream::<Block1M, _, _>(id, zerocopy::<M, Box<Block1M>>);
    let id = (Wait::Async, Role::Peer, name, "in place");
    list.words(id, || awaited(zerocopy::<M, u64>()));
    list.stream::<Block4K, _, _>(id, || awaited(zerocopy::<M, Block4K>()));
    list.stream::<Block1M, _, _>(id, || awaited(zerocopy::<M, Box<Block1M>>()));
}

/// bbqueue with room for `N` payloads.
fn grants<const N: usize>(list: &mut Subjects, role: Role, name: &'static str) {
    let id = (Wait::Spin, role, name, "in place");
    list.words(id, bbqueue::<u64, N, Polling>);
    list.stream::<Block4K, _, _>(id, bbqueue::<Block4K, N, Polling>);
    list.stream::<Block1M, _, _>(id, bbqueue::<Block1M, N, Polling>);
    let id = (Wait::Async, role, name, "in place");
    list.words(id, || awaited(bbqueue::<u64, N, MaiNotSpsc>()));
    list.stream::<Block4K, _, _>(id, || awaited(bbqueue::<Block4K, N, MaiNotSpsc>()));
    list.stream::<Block1M, _, _>(id, || awaited(bbqueue::<Block1M, N, MaiNotSpsc>()));
}

pub fn add(list: &mut Subjects) {
    embassy::<CriticalSectionRawMutex>(list, "embassy");
    embassy::<SpinRawMutex>(list, "embassy, spin lock");
    grants::<2>(list, Role::Peer, "bbqueue");
    // With room for two, both must be read before either is written again: a byte ring wraps around only if the next
    // grant fits before the reader.
    grants::<3>(list, Role::Reference, "bbqueue of 3");
}
