//! The floors: the cost of the hardware and the kernel alone. Hand-written for this purpose only: no end, no
//! failure, no other way to wait.

use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::measure::{FLOOR, Rx, Subjects, Tx, Wait};
use crate::payload::{Block1M, Block4K, Payload};

/// Two flags and two slots, with the flags (and small slots) on one line. Plain loads and stores, no read-modify-write.
#[repr(C, align(128))]
struct Flags<P> {
    full: [AtomicU32; 2],
    slots: [UnsafeCell<P>; 2],
}

// SAFETY: the sender touches a slot while its flag is 0, the receiver while it is 1. Each sets the flag to
// the other value, with Release, when it is done.
unsafe impl<P: Send> Sync for Flags<P> {}

struct FlagTx<P>(Arc<Flags<P>>, usize);
struct FlagRx<P>(Arc<Flags<P>>, usize);

fn flags<P: Payload>() -> (FlagTx<P>, FlagRx<P>) {
    let slots = [P::made(0), P::made(0)].map(UnsafeCell::new);
    let flags = Arc::new(Flags { full: [const { AtomicU32::new(0) }; 2], slots });
    (FlagTx(flags.clone(), 0), FlagRx(flags, 0))
}

impl<P: Payload> Tx for FlagTx<P> {
    #[inline]
    fn send(&mut self, seq: u64) {
        let (full, slot) = (&self.0.full[self.1 & 1], &self.0.slots[self.1 & 1]);
        while full.load(Ordering::Acquire) != 0 {
            spin_loop();
        }
        // SAFETY: the flag is 0: the slot is the sender's, and there is one sender.
        unsafe { &mut *slot.get() }.fill(seq);
        full.store(1, Ordering::Release);
        self.1 += 1;
    }
}

impl<P: Payload> Rx for FlagRx<P> {
    #[inline]
    fn recv(&mut self) -> u64 {
        let (full, slot) = (&self.0.full[self.1 & 1], &self.0.slots[self.1 & 1]);
        while full.load(Ordering::Acquire) == 0 {
            spin_loop();
        }
        // SAFETY: the flag is 1: the slot is the receiver's, and there is one receiver.
        let sum = unsafe { &*slot.get() }.sum();
        full.store(0, Ordering::Release);
        self.1 += 1;
        sum
    }
}

/// One word and one value in each direction, all on one line: for one value in flight.
#[derive(Default)]
#[repr(C, align(128))]
struct PingPong {
    counts: [AtomicU32; 2],
    values: [UnsafeCell<u64>; 2],
}

// SAFETY: side i writes value i before it increments word i with Release. It writes again only after it has
// seen the other side's word increment, and the other side increments after it has read.
unsafe impl Sync for PingPong {}

/// One direction of a ping-pong; `FUTEX`: sleeps at once and always wakes.
struct Ping<const FUTEX: bool>(Arc<PingPong>, usize, u32);
type Side<const FUTEX: bool> = (Ping<FUTEX>, Ping<FUTEX>);

fn ping_pong<const FUTEX: bool>() -> (Side<FUTEX>, Side<FUTEX>) {
    let line = Arc::<PingPong>::default();
    let end = |direction| Ping(line.clone(), direction, 0);
    ((end(0), end(1)), (end(1), end(0)))
}

impl<const FUTEX: bool> Tx for Ping<FUTEX> {
    #[inline]
    fn send(&mut self, seq: u64) {
        self.2 = self.2.wrapping_add(1);
        // SAFETY: the other side is waiting for our word, and reads the value after it.
        unsafe { *self.0.values[self.1].get() = seq };
        let word = &self.0.counts[self.1];
        word.store(self.2, Ordering::Release);
        if FUTEX {
            futex_wake(word);
        }
    }
}

impl<const FUTEX: bool> Rx for Ping<FUTEX> {
    #[inline]
    fn recv(&mut self) -> u64 {
        let word = &self.0.counts[self.1];
        while word.load(Ordering::Acquire) == self.2 {
            if FUTEX {
                futex_wait(word, self.2);
            } else {
                spin_loop();
            }
        }
        self.2 = self.2.wrapping_add(1);
        // SAFETY: the other side has incremented its word and now waits for ours.
        unsafe { *self.0.values[self.1].get() }
    }
}

/// Sleeps while `word` is `expected`.
fn futex_wait(word: &AtomicU32, expected: u32) {
    let forever = ptr::null::<libc::timespec>();
    let op = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is valid for the call. EAGAIN and EINTR mean "look again", and the caller does.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, expected, forever) };
}

/// Wakes one thread that sleeps on `word`.
fn futex_wake(word: &AtomicU32) {
    let op = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
    // SAFETY: the word is valid for the call.
    unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), op, 1) };
}

/// The floors of every group except the idle waits.
pub fn add(list: &mut Subjects) {
    for wait in Wait::ALL {
        list.stream::<u64, _, _>((wait, FLOOR, "spins; one line"), flags::<u64>);
        list.stream::<Block4K, _, _>((wait, FLOOR, "spins; in place"), flags::<Block4K>);
        list.stream::<Block1M, _, _>((wait, FLOOR, "spins; in place"), flags::<Box<Block1M>>);
    }
    for wait in [Wait::Spin, Wait::SpinPark] {
        list.round_trip((wait, FLOOR, "spins; one line for both ways"), ping_pong::<false>);
    }
    list.round_trip((Wait::Park, FLOOR, "futex; one word each way"), ping_pong::<true>);
}
