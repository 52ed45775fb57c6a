//! Requests of users of other in-place channels.

use std::cell::Cell;
use std::future::Future;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use twinbuf_core::{
    Closed, DoubleBuffer, HeapRing, RecvError, ReservedSlot, Ring, TryAcquireError, TryRecvError,
};

/// A filled slot can be given up: it is reused, and the consumer does not see it (thingbuf#70).
#[test]
fn a_filled_slot_is_cancelled() {
    let (mut tx, mut rx) = HeapRing::new([vec![], vec![]]).into_handles();
    let mut slot = tx.acquire().unwrap();
    slot.extend([1, 2, 3]);
    drop(slot);
    assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty);
    let mut slot = tx.acquire().unwrap();
    assert_eq!(*slot, [1, 2, 3], "the same slot, with its buffer");
    slot.clear();
    slot.push(4);
    slot.commit().unwrap();
    assert_eq!(*rx.recv().unwrap().unwrap(), [4]);
}

/// One of several slots being filled can be given up too. The consumer is told of its place, once.
#[test]
fn a_reserved_slot_is_cancelled() {
    let (mut tx, mut rx) = HeapRing::new([0; 3]).into_handles();
    let slots = [(); 3].map(|()| tx.acquire().unwrap().reserve());
    for mut slot in slots {
        if slot.seq() != 1 {
            *slot = slot.seq();
            slot.commit().unwrap();
        }
    }
    tx.finish();
    let received = [(); 4].map(|()| rx.recv().map(|slot| slot.map(|slot| *slot)));
    assert_eq!(received, [Ok(Some(0)), Err(RecvError::Cancelled), Ok(Some(2)), Ok(None)]);
}

/// The ring is closed while a slot is borrowed, by either side (thingbuf#100).
#[test]
fn the_ring_is_closed_while_a_slot_is_borrowed() {
    // The consumer goes while the producer fills.
    let (mut tx, rx) = HeapRing::new([0, 0]).into_handles();
    let slot = tx.acquire().unwrap();
    drop(rx);
    assert_eq!(slot.commit(), Err(Closed));

    // The consumer goes while one of its guards is read.
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    tx.fill(|slot| *slot = 7).unwrap();
    let slot = rx.recv().unwrap().unwrap().keep();
    drop(rx);
    assert_eq!(tx.acquire().map(drop), Err(Closed));
    assert_eq!(*slot, 7);

    // The producer goes while the consumer reads.
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    tx.fill(|slot| *slot = 7).unwrap();
    let slot = rx.recv().unwrap().unwrap().keep();
    tx.finish();
    assert!(rx.recv().unwrap().is_none());
    assert_eq!(*slot, 7);

    // The producer is dropped while a reserved slot is being filled: its place is not the end, and a later commit
    // is received.
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let slot = tx.acquire().unwrap().reserve();
    drop(tx);
    assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned);
    slot.commit().unwrap();
    assert!(rx.recv().unwrap().is_some());
    assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned);

    // The producer finishes while a reserved slot is being filled: the consumer waits for it, then reads the end.
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let slot = tx.acquire().unwrap().reserve();
    tx.finish();
    assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty);
    slot.commit().unwrap();
    assert!(rx.recv().unwrap().is_some());
    assert!(rx.recv().unwrap().is_none());
}

/// A consumer that gives up says why in the slot that it reads: the producer finds it, whatever is in flight.
#[test]
fn a_consumer_says_why_it_goes() {
    for before in 0..4 {
        let (mut tx, mut rx) = HeapRing::new([const { Ok::<u32, &str>(0) }; 3]).into_handles();
        for value in 0..before {
            tx.fill(|slot| *slot = Ok(value)).unwrap();
            rx.recv().unwrap().unwrap();
        }
        tx.fill(|slot| *slot = Ok(10)).unwrap();
        tx.fill(|slot| *slot = Ok(11)).unwrap();
        let kept = rx.recv().unwrap().unwrap().keep();
        let mut open = tx.acquire().unwrap().reserve();
        *open = Ok(12);
        let mut slot = rx.recv().unwrap().unwrap();
        *slot = Err("the disk is full");
        slot.put_back();
        assert_eq!(*rx.try_recv().unwrap().unwrap(), Err("the disk is full"), "the same slot again");
        assert_eq!(tx.unread(), None, "the consumer exists");
        drop(rx);
        assert_eq!(tx.unread(), None, "it was released after all");
        assert_eq!(open.commit(), Err(Closed));
        assert_eq!(tx.unread(), Some(&mut Ok(12)), "committed, and never received");
        assert_eq!(*kept, Ok(10));
    }
    let (mut tx, mut rx) = HeapRing::new([const { Ok::<u32, &str>(0) }; 3]).into_handles();
    drop(tx.acquire().unwrap().reserve()); // cancelled
    tx.fill(|slot| *slot = Ok(1)).unwrap();
    tx.fill(|slot| *slot = Ok(2)).unwrap();
    assert_eq!(rx.recv().unwrap_err(), RecvError::Cancelled);
    let mut slot = rx.recv().unwrap().unwrap();
    *slot = Err("the disk is full");
    slot.put_back();
    drop(rx); // two slots are unread
    let (mut unread, mut closed) = (tx.unread().map(|reason| *reason), tx.try_acquire().map(drop));
    for _again in 0..2 {
        assert_eq!((unread, closed), (Some(Err("the disk is full")), Err(TryAcquireError::Closed)));
        (unread, closed) = (tx.unread().map(|reason| *reason), tx.acquire().map(drop).map_err(Into::into));
    }

    let (mut tx, rx) = HeapRing::new([0; 3]).into_handles();
    drop(tx.acquire().unwrap().reserve());
    tx.fill(|slot| *slot = 1).unwrap();
    drop(rx);
    assert_eq!(tx.unread(), Some(&mut 1), "cancelled slots are passed over");
}

/// A leaked reservation is never taken for the end, by any call, and its slot is never handed out again. A producer
/// that is dropped ends the wait; one that has finished does not, since its guards may still be at work.
#[test]
fn a_leaked_reservation_hides_nothing() {
    for (finish, leaked) in [true, false].into_iter().flat_map(|finish| (0..4).map(move |at| (finish, at))) {
        let mut ring = DoubleBuffer::new([0, 0]);
        let (mut tx, mut rx) = ring.split();
        for _ in 0..leaked {
            tx.fill(|slot| *slot = 1).unwrap();
            rx.recv().unwrap().unwrap();
        }
        std::mem::forget(tx.acquire().unwrap().reserve());
        tx.fill(|slot| *slot = 1).unwrap();
        let mut cx = Context::from_waker(Waker::noop());
        assert!(tx.poll_acquire(&mut cx).is_pending(), "the slot of the leaked guard is not free");
        let expected = if finish {
            tx.finish();
            TryRecvError::Empty
        } else {
            drop(tx);
            assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned, "a slot was committed behind it");
            TryRecvError::Abandoned
        };
        for _again in 0..2 {
            assert!(!rx.is_held());
            assert_eq!(rx.try_recv().unwrap_err(), expected);
            assert_eq!(rx.recv_timeout(Duration::from_micros(1)).unwrap_err(), expected);
            let polled = [
                rx.poll_recv(&mut cx).map(|got| got.map(drop)),
                pin!(rx.recv_async()).poll(&mut cx).map(|got| got.map(drop)),
            ];
            let abandoned = Poll::Ready(Err(RecvError::Abandoned));
            assert_eq!(polled, [if finish { Poll::Pending } else { abandoned }; 2]);
        }
    }
}

/// A device may still write to the slot of a leaked guard: its memory is never handed out again, by any call.
#[test]
fn the_memory_of_a_leaked_guard_is_never_handed_out_again() {
    // A borrowed ring, split again: no handle gets a slot.
    for leak_read in [false, true] {
        let drops = Cell::new(0);
        let mut ring = DoubleBuffer::new([(); 2].map(|()| Counted(&drops)));
        let (mut tx, mut rx) = ring.split();
        let slot = tx.acquire().unwrap().reserve();
        if leak_read {
            slot.commit().unwrap();
            std::mem::forget(rx.recv().unwrap().unwrap().keep());
        } else {
            std::mem::forget(slot);
        }
        drop((tx, rx));
        for _again in 0..3 {
            let (mut tx, mut rx) = ring.split();
            assert_eq!(tx.try_acquire().unwrap_err(), TryAcquireError::Closed);
            assert_eq!(tx.acquire().unwrap_err(), Closed);
            assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Abandoned);
            assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned);
            tx.finish();
            assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned);
        }
        drop(ring); // nor are the values of its slots dropped
        assert_eq!(drops.get(), 0);
    }

    // A ring on the heap is not taken apart, and never freed.
    let drops = Arc::new(());
    let (mut tx, rx) = HeapRing::from_fn(2, |_| drops.clone()).into_handles();
    // Never dropped, and stored where a leak checker finds it.
    static LEAKED: Mutex<Vec<ReservedSlot<'static, Arc<()>>>> = Mutex::new(Vec::new());
    LEAKED.lock().unwrap().push(tx.acquire().unwrap().reserve());
    let (tx, rx) = tx.reunite(rx).unwrap_err();
    drop((tx, rx));
    assert_eq!(Arc::strong_count(&drops), 3);

    // A static one is not split again.
    static RING: DoubleBuffer<u64> = DoubleBuffer::new([0, 0]);
    let (mut tx, rx) = RING.try_split_static().unwrap();
    std::mem::forget(tx.acquire().unwrap().reserve());
    drop((tx, rx));
    assert!(RING.try_split_static().is_none());
}

/// A late drop is no leak: a ring whose guards are dropped after its handles is like new afterwards.
#[test]
fn a_late_guard_is_no_leak() {
    for commit in [true, false] {
        let mut ring = Ring::new([0]);
        for _ in 0..3 {
            let (mut tx, mut rx) = ring.split();
            tx.fill(|slot| *slot = 1).expect("as new");
            assert_eq!(*rx.recv().unwrap().unwrap(), 1);
            let reserved = tx.acquire().unwrap().reserve(); // on the odd lap
            drop((tx, rx));
            if commit {
                assert_eq!(reserved.commit(), Err(Closed));
            }
        }
        for _ in 0..3 {
            let (mut tx, mut rx) = ring.split();
            tx.fill(|slot| *slot = 1).expect("as new");
            let kept = rx.recv().unwrap().unwrap().keep();
            drop((tx, rx));
            drop(kept);
        }
    }
}

/// Leaks that cost nothing: the ring is like new afterwards.
#[test]
fn a_leaked_borrowing_guard_costs_nothing() {
    let drops = Cell::new(0);
    let mut ring = DoubleBuffer::new([(); 2].map(|()| Counted(&drops)));
    for _ in 0..3 {
        let (mut tx, mut rx) = ring.split();
        #[expect(clippy::forget_non_drop, reason = "without a drop it is a promise of the ring")]
        std::mem::forget(tx.acquire().unwrap());
        tx.fill(|_| ()).unwrap();
        std::mem::forget(rx.recv().unwrap());
        assert_eq!(rx.recv().unwrap().unwrap().seq(), 0, "the same slot");
        tx.fill(|_| ()).unwrap(); // never received
    }
    drop(ring);
    assert_eq!(drops.get(), 2);
}

#[derive(Debug)]
struct Counted<'a>(&'a Cell<u32>);

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() + 1);
    }
}
