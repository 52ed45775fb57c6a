//! Tasks: registered, dropped, replaced, woken at the wrong moment, or with a waker that panics.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, RawWaker, RawWakerVTable, Waker};

use twinbuf_core::{Closed, RecvError, WriteSlot};

use crate::common::*;

check! {
    /// A future that is dropped while it waits takes a value with it, or the next wait's wake.
    receiving_future_dropped over [Try, Block, Timed, Async], 2, deep 3
}
fn receiving_future_dropped<P: Parker>(next: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    clock(&park, next);
    let producer = spawn(move || {
        put(&mut tx, 1);
        tx
    });
    let waker = Task::new().waker();
    let received = pin!(rx.recv_async()).poll(&mut Context::from_waker(&waker)).map(|guard| *guard.unwrap());
    if received.is_pending() {
        take(&rx, next, 1);
    } else {
        assert_eq!(received, std::task::Poll::Ready(1));
    }
    drop(producer.join().unwrap());
}

check! {
    /// A future that is dropped while it waits takes a slot with it, or the next wait's wake.
    acquiring_future_dropped over [Try, Block, Timed, Async], 2, deep 3
}
fn acquiring_future_dropped<P: Parker>(next: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    put(&mut tx, 1);
    clock(&park, next);
    let producer = spawn(move || {
        let waker = Task::new().waker();
        // Ready or not: whatever guard it gives is dropped, so that nothing is handed over.
        let _ = pin!(tx.acquire_async())
            .poll(&mut Context::from_waker(&waker))
            .map(|slot| slot.map(WriteSlot::abort));
        send(&mut tx, next, 2).unwrap();
        tx
    });
    take(&rx, Block, 1);
    let tx = producer.join().unwrap();
    take(&rx, Block, 2);
    drop(tx);
}

check! {
    /// `ready` says so of a slot that is then not there, or is slept through.
    ready_before_try, 2, deep 3
}
fn ready_before_try<P: Parker>() {
    let (_, mut tx, mut rx) = ring::<1, P>();
    let producer = spawn(move || {
        put(&mut tx, 1);
        tx.finish();
    });
    assert_eq!(P::block_on(rx.ready()), Ok(()));
    assert_eq!(*rx.try_recv().unwrap(), 1);
    assert_eq!(P::block_on(rx.ready()), Err(RecvError::Finished));
    producer.join().unwrap();
}

check! {
    /// The consumer's waker is replaced by another task's: the first task, or the second, sleeps for ever.
    consumer_waker_replaced, exhaustive
}
fn consumer_waker_replaced<P: Parker>() {
    let (_, mut tx, rx) = ring::<1, P>();
    let (first, second) = (Task::new(), Task::new());
    assert!(poll_recv(&rx, &first.waker()).is_none());
    let producer = spawn(move || {
        put(&mut tx, 1);
        tx
    });
    assert_eq!(*second.run(|waker| poll_recv(&rx, waker)).unwrap(), 1);
    first.sleep();
    drop(producer.join().unwrap());
}

check! {
    /// The producer's waker is replaced by another task's: the first task, or the second, sleeps for ever.
    producer_waker_replaced, exhaustive
}
fn producer_waker_replaced<P: Parker>() {
    let (_, mut tx, rx) = ring::<1, P>();
    put(&mut tx, 1);
    let (first, second) = (Task::new(), Task::new());
    assert!(poll_send(&mut tx, &first.waker(), 2).is_none());
    let consumer = spawn(move || {
        take(&rx, Block, 1);
        rx
    });
    second.run(|waker| poll_send(&mut tx, waker, 2)).unwrap();
    first.sleep();
    drop(consumer.join().unwrap());
}

check! {
    /// A task that polls again is woken by its own older waker, and so polls for ever.
    polled_again, exhaustive
}
fn polled_again<P: Parker>() {
    let (_, mut tx, rx) = ring::<1, P>();
    let task = Task::new();
    for _ in 0..3 {
        assert!(poll_recv(&rx, &task.waker()).is_none());
    }
    assert_eq!(task.wakes(), 0);
    put(&mut tx, 1);
    assert_eq!(task.wakes(), 1);
    task.sleep();
    assert_eq!(*task.run(|waker| poll_recv(&rx, waker)).unwrap(), 1);
}

check! {
    /// A wake meets the registration of a task that is announced already: it finds no waker, and is lost.
    wake_meets_registration over [true, false], exhaustive
}
fn wake_meets_registration<P: Parker>(commit: bool) {
    let (_, mut tx, rx) = ring::<1, P>();
    let task = Task::new();
    assert!(poll_recv(&rx, &task.waker()).is_none());
    let producer = spawn(move || {
        if commit {
            put(&mut tx, 1);
            Some(tx)
        } else {
            tx.finish();
            None
        }
    });
    match task.run(|waker| poll_recv(&rx, waker)) {
        Ok(guard) => assert_eq!((*guard, commit), (1, true)),
        Err(end) => assert_eq!((end, commit), (RecvError::Finished, false)),
    }
    drop(producer.join().unwrap());
}

check! {
    /// Two guards released at once: the wake for the slot that is waited for is swallowed by the other's.
    two_wakes_meet over [1, 2], 3, deep 4
}
fn two_wakes_meet<P: Parker>(polls: usize) {
    let (_, mut tx, rx) = ring::<2, P>();
    put(&mut tx, 0);
    put(&mut tx, 1);
    let task = Task::new();
    assert!(poll_send(&mut tx, &task.waker(), 2).is_none()); // announced at the first slot
    with_static(rx, |rx| {
        let (first, second) = (rx.recv().unwrap(), rx.recv().unwrap());
        let readers = [spawn(move || drop(first)), spawn(move || drop(second))];
        // Without waiting for the wake: it may still be under way when the task waits at the second slot.
        send(&mut tx, Try, 2).unwrap();
        let early = (1..polls).any(|_| poll_send(&mut tx, &task.waker(), 3).is_some());
        if !early {
            task.run(|waker| poll_send(&mut tx, waker, 3)).unwrap();
        }
        for reader in readers {
            reader.join().unwrap();
        }
    });
}

check! {
    /// A registration gives back what it stored, and a wake for a blocking wait reads it at the same time.
    blocks_after_polling, exhaustive
}
fn blocks_after_polling<P: Parker>() {
    let (_, mut tx, rx) = ring::<2, P>();
    let task = Task::new();
    assert!(poll_recv(&rx, &task.waker()).is_none());
    let producer = spawn(move || {
        put(&mut tx, 1);
        put(&mut tx, 2);
        tx
    });
    assert_eq!(*task.run(|waker| poll_recv(&rx, waker)).unwrap(), 1);
    take(&rx, Block, 2); // announced, with no waker registered for it
    drop(producer.join().unwrap());
}

check! {
    /// A handle that is gone leaves its task's waker in the ring, or drops it while it is taken out.
    waker_outlives_handle over ["consumer", "producer", "producer, never woken"], exhaustive
}
fn waker_outlives_handle<P: Parker>(side: &'static str) {
    let (_, mut tx, rx) = ring::<1, P>();
    let task = Task::new();
    if side == "consumer" {
        assert!(poll_recv(&rx, &task.waker()).is_none());
        let producer = spawn(move || {
            let _maybe_closed = fill(&mut tx, 1);
            tx // keeps the ring
        });
        drop(rx);
        let tx = producer.join().unwrap();
        assert_eq!(Arc::strong_count(&task), 1);
        drop(tx);
    } else {
        put(&mut tx, 1);
        assert!(poll_send(&mut tx, &task.waker(), 2).is_none());
        let consumer = spawn(move || {
            if side == "producer" {
                take(&rx, Block, 1);
            }
            rx
        });
        drop(tx);
        let rx = consumer.join().unwrap();
        assert_eq!(Arc::strong_count(&task), 1);
        drop(rx);
    }
}

check! {
    /// The consumer's waker panics in a commit: the producer's place is lost, and a later value with it.
    waker_panics_in_commit over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_commit<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = ring::<2, P>();
    assert!(poll_recv(&rx, &bomb()).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        // It panics if the consumer has not replaced the waker, which then panics over there.
        let _ = survive(|| put(&mut tx, 1));
        put(&mut tx, 2);
        assert_eq!(tx.stats().handoffs, 2);
        tx
    });
    retry(|| take(&rx, mode, 1));
    retry(|| take(&rx, mode, 2));
    drop(producer.join().unwrap());
}

check! {
    /// The producer's waker panics in a release: the slot, or the wake of a blocked producer, is lost.
    waker_panics_in_release over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_release<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    put(&mut tx, 1);
    assert!(poll_send(&mut tx, &bomb(), 9).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        retry(|| send(&mut tx, mode, 2)).unwrap();
        tx
    });
    let guard = rx.recv().unwrap();
    let _ = survive(|| drop(guard));
    let tx = producer.join().unwrap();
    take(&rx, Block, 2);
    drop(tx);
}

check! {
    /// The consumer's waker panics in the producer's end: the end is not told, or told on some slots only.
    waker_panics_in_end over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_end<P: Parker>(mode: Mode) {
    let (park, tx, rx) = ring::<2, P>();
    assert!(poll_recv(&rx, &bomb()).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        let _ = survive(|| drop(tx));
    });
    assert_eq!(retry(|| recv(&rx, mode).map(drop)), Err(RecvError::Abandoned));
    producer.join().unwrap();
}

check! {
    /// The producer's waker panics in the consumer's end: a blocked producer is not told.
    waker_panics_in_consumer_drop over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_consumer_drop<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    put(&mut tx, 1);
    assert!(poll_send(&mut tx, &bomb(), 9).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        assert_eq!(retry(|| send(&mut tx, mode, 2)), Err(Closed));
    });
    let _ = survive(|| drop(rx));
    producer.join().unwrap();
}

check! {
    /// A waker that panics when it is replaced takes the new one with it, or leaves the cell locked.
    replaced_waker_panics, exhaustive
}
fn replaced_waker_panics<P: Parker>() {
    let (_, mut tx, rx) = ring::<1, P>();
    assert!(poll_recv(&rx, &bomb()).is_none());
    let task = Task::new();
    let replaced = survive(|| poll_recv(&rx, &task.waker()).map(drop));
    assert!(replaced.is_err());
    let producer = spawn(move || {
        put(&mut tx, 1);
        tx
    });
    assert_eq!(*task.run(|waker| poll_recv(&rx, waker)).unwrap(), 1);
    drop(producer.join().unwrap());
}

check! {
    /// A waker that panics when it is cloned leaves the cell locked: no later task is ever woken.
    waker_clone_panics, exhaustive
}
fn waker_clone_panics<P: Parker>() {
    const VTABLE: RawWakerVTable =
        RawWakerVTable::new(|_| std::panic::resume_unwind(Box::new(Bomb)), |_| (), |_| (), |_| ());
    // SAFETY: no function of the table uses the data pointer.
    let unclonable = unsafe { Waker::from_raw(RawWaker::new(std::ptr::null(), &VTABLE)) };
    let (_, mut tx, rx) = ring::<1, P>();
    assert!(survive(|| poll_recv(&rx, &unclonable).map(drop)).is_err());
    let task = Task::new();
    assert!(poll_recv(&rx, &task.waker()).is_none());
    assert_eq!(task.wakes(), 0, "the cell is free, so that the task need not look again");
    let producer = spawn(move || {
        put(&mut tx, 1);
        tx
    });
    assert_eq!(*task.run(|waker| poll_recv(&rx, waker)).unwrap(), 1);
    drop(producer.join().unwrap());
}
