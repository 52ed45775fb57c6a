//! A ring that its handles and guards own: freed once, by the last of them, after all that the others did.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use loom::cell::UnsafeCell;
use twinbuf_core::{Consumer, HeapRing, Producer, RecvError, Ring};

use crate::common::*;

/// A value whose end loom checks like a write: all other accesses must come before it.
struct Tracked {
    value: UnsafeCell<usize>,
    freed: Arc<AtomicUsize>,
}

impl Tracked {
    fn add(&mut self, n: usize) {
        // SAFETY: no other reference to the contents: `&mut self`.
        self.value.with_mut(|value| unsafe { *value += n });
    }

    fn get(&self) -> usize {
        // SAFETY: nothing writes: `&self`, and only `add` does.
        self.value.with(|value| unsafe { *value })
    }
}

impl Drop for Tracked {
    fn drop(&mut self) {
        self.value.with_mut(|_| ());
        self.freed.fetch_add(1, Relaxed);
    }
}

type OwnedTx<P> = Producer<'static, Tracked, P>;
type OwnedRx<P> = Consumer<'static, Tracked, P>;

/// A ring of two slots, on the heap in one way or the other, and how many of its slots are freed.
fn owned<P: Parker>(heap: bool) -> (OwnedTx<P>, OwnedRx<P>, Arc<AtomicUsize>) {
    let freed = Arc::new(AtomicUsize::new(0));
    let slots = [0, 1].map(|_| Tracked { value: UnsafeCell::new(0), freed: freed.clone() });
    let (tx, rx) = if heap {
        HeapRing::with_wait(slots.into(), P::new()).into_handles()
    } else {
        Ring::with_wait(slots, P::new()).into_handles()
    };
    (tx, rx, freed)
}

check! {
    /// The two handles go at the same time: the ring is freed by none, by both, or while one still uses it.
    handles_go over [true, false], 2, deep 3
}
fn handles_go<P: Parker>(heap: bool) {
    let (mut tx, mut rx, freed) = owned::<P>(heap);
    let producer = spawn(move || {
        let _maybe_closed = tx.fill(|slot| slot.add(1));
        drop(tx);
    });
    if let Ok(mut slot) = rx.try_recv() {
        slot.add(1);
    }
    drop(rx);
    producer.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// A reserved guard is the last, on a thread of its own: the ring is gone when it commits, or is never freed.
    reserved_guard_is_last over [true, false], 2, deep 3
}
fn reserved_guard_is_last<P: Parker>(commit: bool) {
    let (mut tx, rx, freed) = owned::<P>(true);
    let mut slot = tx.acquire().unwrap().reserve();
    let seen = freed.clone();
    let filler = spawn(move || {
        assert_eq!(seen.load(Relaxed), 0, "a guard keeps the ring");
        slot.add(1);
        if commit {
            let _closed = slot.commit();
        } else {
            drop(slot);
        }
    });
    drop((tx, rx));
    filler.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// A read guard is the last, on a thread of its own: the ring is gone when it releases, or is never freed.
    read_guard_is_last, 2, deep 3
}
fn read_guard_is_last<P: Parker>() {
    let (mut tx, mut rx, freed) = owned::<P>(true);
    tx.fill(|slot| slot.add(1)).unwrap();
    let mut slot = rx.recv().unwrap();
    let seen = freed.clone();
    let reader = spawn(move || {
        assert_eq!(seen.load(Relaxed), 0, "a guard keeps the ring");
        slot.add(1);
        drop(slot);
    });
    drop((tx, rx));
    reader.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// Guards of both kinds on two threads, one of them the last: the ring is freed while the other uses it.
    two_guards_are_last, 2, deep 3
}
fn two_guards_are_last<P: Parker>() {
    let (mut tx, mut rx, freed) = owned::<P>(true);
    tx.fill(|slot| slot.add(1)).unwrap();
    let mut read = rx.recv().unwrap();
    let mut write = tx.acquire().unwrap().reserve();
    drop((tx, rx));
    let reader = spawn(move || {
        read.add(1);
        drop(read);
    });
    write.add(1);
    assert!(write.commit().is_err());
    reader.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// The handles are put together while a guard goes elsewhere: the slots are taken from under the guard, or one
    /// that has gone still counts.
    reunite_meets_guard over ["read", "commit", "cancel"], 2, deep 3
}
fn reunite_meets_guard<P: Parker>(guard: &'static str) {
    let (mut tx, mut rx, freed) = owned::<P>(true);
    let other = if guard == "read" {
        tx.fill(|slot| slot.add(1)).unwrap();
        let mut slot = rx.recv().unwrap();
        spawn(move || {
            slot.add(1);
            drop(slot);
        })
    } else {
        let mut slot = tx.acquire().unwrap().reserve();
        spawn(move || {
            slot.add(2);
            if guard == "commit" {
                slot.commit().unwrap();
            } else {
                drop(slot);
            }
        })
    };
    let slots = match tx.reunite(rx) {
        Ok(slots) => {
            assert_eq!(slots[0].get(), 2, "all that the guard did");
            other.join().unwrap();
            slots
        }
        Err((tx, rx)) => {
            assert_eq!(freed.load(Relaxed), 0);
            other.join().unwrap();
            tx.reunite(rx).map_err(drop).expect("the guard is gone")
        }
    };
    assert_eq!((slots[0].get(), freed.load(Relaxed)), (2, 0));
    drop(slots);
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// Two rings: the handles of one are put together with those of the other.
    reunite_two_rings, exhaustive
}
fn reunite_two_rings<P: Parker>() {
    let ((mut tx, rx, _), (mut other_tx, mut other_rx, _)) = (owned::<P>(true), owned::<P>(true));
    let producer = spawn(move || {
        other_tx.fill(|slot| slot.add(1)).unwrap();
        other_tx
    });
    assert_eq!(other_rx.recv().unwrap().get(), 1);
    let (tx2, other_rx) = tx.reunite(other_rx).map(drop).unwrap_err();
    tx = tx2;
    assert!(tx.reunite(rx).is_ok());
    assert!(producer.join().unwrap().reunite(other_rx).is_ok());
}

check! {
    /// The ring is split again: something of the first pair of handles is left behind.
    split_again over ["full", "ended", "reserved", "announced"], 1, deep 2
}
fn split_again<P: Parker>(left: &'static str) {
    let inline = keep(Ring::with_wait([0; 2], P::new()));
    let heap = keep(HeapRing::with_wait(vec![0; 2], P::new()));
    // SAFETY: the first pair of handles is gone, or forgotten, when the second one is made.
    split_twice(left, || unsafe { &mut *std::ptr::from_mut(inline) }.split());
    // SAFETY: as above.
    split_twice(left, || unsafe { &mut *std::ptr::from_mut(heap) }.split());
}

fn split_twice<P: Parker>(left: &'static str, mut split: impl FnMut() -> (Tx<P>, Rx<P>)) {
    let task = Task::new();
    {
        let (mut tx, mut rx) = split();
        match left {
            "full" => tx.fill(|slot| *slot = 9).unwrap(),
            "ended" => tx.finish(),
            "reserved" => std::mem::forget(tx.acquire().unwrap().reserve()),
            _ => {
                let waker = task.waker();
                assert!(rx.poll_recv(&mut std::task::Context::from_waker(&waker)).is_pending());
                std::mem::forget((tx, rx)); // neither end is told, and the waker stays
            }
        }
    }
    let (mut tx, mut rx) = split();
    assert_eq!(Arc::strong_count(&task), 1, "the waker of the first pair is dropped");
    let producer = spawn(move || {
        put(&mut tx, 1);
        put(&mut tx, 2);
        tx.finish();
    });
    take(&mut rx, Block, 1);
    take(&mut rx, Block, 2);
    assert_eq!(recv(&mut rx, Async).unwrap_err(), RecvError::Finished);
    producer.join().unwrap();
    assert_eq!(task.wakes(), 0);
}
