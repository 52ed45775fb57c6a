//! A ring owned by its handles and guards: it is freed once, by the last of them, after everything that the others did.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use loom::cell::UnsafeCell;
use twinbuf_core::{Closed, Consumer, HeapRing, KeptSlot, Producer, Ring, WriteSlot};

use crate::common::*;

/// A value whose drop loom checks like a write: all other accesses must come before it.
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

/// A ring of two slots, and the number of its freed slots.
fn owned<P: Parker>() -> (OwnedTx<P>, OwnedRx<P>, Arc<AtomicUsize>) {
    let freed = Arc::new(AtomicUsize::new(0));
    let slots = [0, 1].map(|_| Tracked { value: UnsafeCell::new(0), freed: freed.clone() });
    let (tx, rx) = HeapRing::with_wait(slots, P::new()).into_handles();
    (tx, rx, freed)
}

/// The next slot, which must be filled.
fn kept<P: Parker>(rx: &mut OwnedRx<P>) -> KeptSlot<'static, Tracked, P> {
    rx.recv().unwrap().unwrap().keep()
}

/// A guard of this kind: what its thread does with it, so that its slot holds 2, and how it ends.
fn guard<P: Parker>(
    kind: &'static str,
    tx: &mut OwnedTx<P>,
    rx: &mut OwnedRx<P>,
) -> Box<dyn FnOnce() -> Result<(), Closed>> {
    if kind == "read" {
        tx.fill(|slot| slot.add(1)).unwrap();
        let mut slot = kept(rx);
        return Box::new(move || {
            slot.add(1);
            drop(slot);
            Ok(())
        });
    }
    let mut slot = tx.acquire().unwrap().reserve();
    Box::new(move || {
        slot.add(2);
        end(slot, kind == "commit")
    })
}

check! {
    /// The two handles go at the same time: the ring is freed by none, by both, or while one still uses it.
    handles_go, 2, deep 3
}
fn handles_go<P: Parker>() {
    let (mut tx, mut rx, freed) = owned::<P>();
    let producer = spawn(move || {
        let _maybe_closed = tx.fill(|slot| slot.add(1));
        drop(tx);
    });
    if let Ok(Some(mut slot)) = rx.try_recv() {
        slot.add(1);
    }
    drop(rx);
    producer.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// A guard is the last, on its own thread: the ring is gone when it commits, cancels or releases, or is never freed.
    guard_is_last over ["read", "commit", "cancel"], 2, deep 3
}
fn guard_is_last<P: Parker>(kind: &'static str) {
    let (mut tx, mut rx, freed) = owned::<P>();
    let guard = guard(kind, &mut tx, &mut rx);
    let seen = freed.clone();
    let other = spawn(move || {
        assert_eq!(seen.load(Relaxed), 0, "a guard keeps the ring");
        let _maybe_closed = guard();
    });
    drop((tx, rx));
    other.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// Hazard: after both handles are dropped, one thread drops a read guard while another commits a reserved slot, and the
    /// ring is freed while one of them still uses it.
    two_guards_are_last, 2, deep 3
}
fn two_guards_are_last<P: Parker>() {
    let (mut tx, mut rx, freed) = owned::<P>();
    tx.fill(|slot| slot.add(1)).unwrap();
    let mut read = kept(&mut rx);
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
    /// Both handles make a guard at once: one share is lost, and the ring is freed under the last guard.
    shares_made_at_once, 2, deep 3
}
fn shares_made_at_once<P: Parker>() {
    let (mut tx, mut rx, freed) = owned::<P>();
    tx.fill(|slot| slot.add(1)).unwrap();
    let seen = freed.clone();
    let producer = spawn(move || {
        // The consumer may have ended before.
        let Ok(mut slot) = tx.acquire().map(WriteSlot::reserve) else { return };
        drop(tx);
        assert_eq!(seen.load(Relaxed), 0, "a guard keeps the ring");
        slot.add(1);
        drop(slot);
    });
    let mut slot = kept(&mut rx);
    drop(rx);
    assert_eq!(freed.load(Relaxed), 0, "a guard keeps the ring");
    slot.add(1);
    drop(slot);
    producer.join().unwrap();
    assert_eq!(freed.load(Relaxed), 2);
}

check! {
    /// The handles are put together while a guard goes elsewhere: the slots are taken from under the guard, or one
    /// that has gone still counts.
    reunite_meets_guard over ["read", "commit", "cancel"], 2, deep 3
}
fn reunite_meets_guard<P: Parker>(kind: &'static str) {
    let (mut tx, mut rx, freed) = owned::<P>();
    let other = spawn(guard(kind, &mut tx, &mut rx));
    let slots = match tx.reunite(rx) {
        Ok(slots) => {
            assert_eq!(slots[0].get(), 2, "all that the guard did");
            other.join().unwrap().unwrap();
            slots
        }
        Err((tx, rx)) => {
            assert_eq!(freed.load(Relaxed), 0);
            other.join().unwrap().unwrap();
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
    let ((mut tx, rx, _), (mut other_tx, mut other_rx, _)) = (owned::<P>(), owned::<P>());
    let producer = spawn(move || {
        other_tx.fill(|slot| slot.add(1)).unwrap();
        other_tx
    });
    assert_eq!(kept(&mut other_rx).get(), 1);
    let (tx2, other_rx) = tx.reunite(other_rx).map(drop).unwrap_err();
    tx = tx2;
    assert!(tx.reunite(rx).is_ok());
    assert!(producer.join().unwrap().reunite(other_rx).is_ok());
}

check! {
    /// The ring is split again: something of the first pair of handles is left behind, or a leaked guard's slot is
    /// handed out.
    split_again over ["full", "ended", "announced", "reserved", "kept", "forgotten"], 1, deep 2
}
fn split_again<P: Parker>(left: &'static str) {
    let ring = keep(Ring::with_wait([0; 2], P::new()));
    let task = Task::new();
    {
        // SAFETY: this pair of handles is gone, or forgotten, when the next one is made.
        let (mut tx, mut rx) = unsafe { &mut *std::ptr::from_mut(ring) }.split();
        match left {
            "full" => put(&mut tx, 9),
            "ended" => tx.finish(),
            "reserved" => std::mem::forget(tx.acquire().unwrap().reserve()),
            "kept" => {
                put(&mut tx, 9);
                std::mem::forget(recv(&mut rx, Block).unwrap());
            }
            _ => {
                let waker = task.waker();
                assert!(poll_recv(&mut rx, &waker).is_none());
                if left == "forgotten" {
                    std::mem::forget((tx, rx)); // neither end is announced, and the waker stays
                }
            }
        }
    }
    let (mut tx, mut rx) = ring.split();
    let leaked = ["reserved", "kept", "forgotten"].contains(&left);
    assert_eq!(Arc::strong_count(&task), if left == "forgotten" { 2 } else { 1 });
    let producer = spawn(move || {
        let sent = [fill(&mut tx, 1), fill(&mut tx, 2)];
        assert_eq!(sent, if leaked { [Err(Closed); 2] } else { [Ok(()); 2] });
        tx.finish();
    });
    if !leaked {
        take(&mut rx, Block, 1);
        take(&mut rx, Block, 2);
    }
    assert_eq!(recv(&mut rx, Async).unwrap_err(), if leaked { End::Abandoned } else { End::Finished });
    producer.join().unwrap();
    assert_eq!(task.wakes(), 0);
}
