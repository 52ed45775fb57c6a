//! What users of other in-place channels ask for.

use std::task::{Context, Waker};

use twinbuf_core::{Closed, DoubleBuffer, HeapRing, RecvError, TryRecvError, channel};

/// A slot that was filled can be given up: it is reused, and the consumer does not see it (thingbuf#70).
#[test]
fn a_filled_slot_is_cancelled() {
    let (mut tx, mut rx) = channel([vec![], vec![]]);
    let mut slot = tx.acquire().unwrap();
    slot.extend([1, 2, 3]);
    slot.abort();
    assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty);
    let mut slot = tx.acquire().unwrap();
    assert_eq!(*slot, [1, 2, 3], "the same slot, with its buffer");
    slot.clear();
    slot.push(4);
    slot.commit().unwrap();
    assert_eq!(*rx.recv().unwrap(), [4]);
}

/// So can one of several that are being filled; its place is told, once.
#[test]
fn a_reserved_slot_is_cancelled() {
    let (mut tx, mut rx) = HeapRing::new(vec![0; 3]).into_handles();
    let slots = [(); 3].map(|()| tx.acquire().unwrap().reserve());
    for mut slot in slots {
        if slot.seq() != 1 {
            *slot = slot.seq();
            slot.commit().unwrap();
        }
    }
    tx.finish();
    let received: Vec<_> = rx.iter().map(|slot| slot.map(|slot| *slot)).collect();
    assert_eq!(received, [Ok(0), Err(RecvError::Cancelled), Ok(2)]);
}

/// The ring is closed while a slot is borrowed, by either side (thingbuf#100).
#[test]
fn the_ring_is_closed_while_a_slot_is_borrowed() {
    // The consumer goes while the producer fills.
    let (mut tx, rx) = channel([0, 0]);
    let slot = tx.acquire().unwrap();
    drop(rx);
    assert_eq!(slot.commit(), Err(Closed));

    // The consumer goes while one of its guards is read.
    let (mut tx, mut rx) = channel([0, 0]);
    tx.fill(|slot| *slot = 7).unwrap();
    let slot = rx.recv().unwrap();
    drop(rx);
    assert_eq!(tx.acquire().map(drop), Err(Closed));
    assert_eq!(*slot, 7);

    // The producer goes while the consumer reads.
    let (mut tx, mut rx) = channel([0, 0]);
    tx.fill(|slot| *slot = 7).unwrap();
    let slot = rx.recv().unwrap();
    tx.finish();
    assert_eq!(rx.recv().unwrap_err(), RecvError::Finished);
    assert_eq!(*slot, 7);

    // The producer goes while a reserved slot is filled: its place is not the end, until it is committed.
    let (mut tx, mut rx) = channel([0, 0]);
    let slot = tx.acquire().unwrap().reserve();
    tx.finish();
    assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned);
    slot.commit().unwrap();
    assert!(rx.recv().is_ok());
    assert_eq!(rx.recv().unwrap_err(), RecvError::Finished);
}

/// A leaked reservation is never taken for the end, and its slot never handed out again.
#[test]
fn a_leaked_reservation_hides_nothing() {
    let mut ring = DoubleBuffer::new([0, 0]);
    let (mut tx, mut rx) = ring.split();
    std::mem::forget(tx.acquire().unwrap().reserve());
    tx.fill(|slot| *slot = 1).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    assert!(tx.poll_acquire(&mut cx).is_pending(), "the slot of the leaked guard is not free");
    tx.finish();
    assert_eq!(rx.recv().unwrap_err(), RecvError::Abandoned, "a slot was committed behind it");
}
