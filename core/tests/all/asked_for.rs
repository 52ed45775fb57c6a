//! Requests of users of other in-place channels: the reason of a consumer that goes, and leaks without harm. The oracle
//! has the others: slots that are given up, and a ring that ends while a slot is borrowed.

use std::cell::Cell;
use std::sync::{Arc, Mutex};

use twinbuf_core::{Closed, DoubleBuffer, HeapRing, RecvError, ReservedSlot, TryAcquireError, TryRecvError};

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

    // While a guard is leaked, `reunite` does not take a ring on the heap apart, and the ring is never freed.
    let drops = Arc::new(());
    let (mut tx, rx) = HeapRing::from_fn(2, |_| drops.clone()).into_handles();
    // The guard is never dropped. A leak checker reaches its memory through the static, and so reports no leak.
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
