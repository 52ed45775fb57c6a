//! Tasks: registered, dropped, replaced, woken at the wrong moment, or with a waker that panics. The comment of each model
//! names the failure that it must rule out.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, RawWaker, RawWakerVTable, Wake, Waker};

use twinbuf_core::Closed;

use crate::common::*;

check! {
    /// A future that is dropped while it waits takes a value with it, or the next wait's wake.
    receiving_future_dropped over [Try, Block, Timed, Async], 2, deep 3
}
fn receiving_future_dropped<P: Parker>(next: Mode) {
    let (park, tx, mut rx) = ring::<1, P>();
    clock(&park, next);
    let producer = sends(tx, Block, [1]);
    let waker = Task::new().waker();
    let received =
        pin!(rx.recv_async()).poll(&mut Context::from_waker(&waker)).map(|slot| *slot.unwrap().unwrap());
    if received.is_pending() {
        take(&mut rx, next, 1);
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
    let (park, mut tx, mut rx) = filled::<1, P>(&[1]);
    clock(&park, next);
    let producer = spawn(move || {
        let waker = Task::new().waker();
        // Ready or not: the guard that it returns is dropped, so nothing is handed over.
        let _ = pin!(tx.acquire_async()).poll(&mut Context::from_waker(&waker)).map(|slot| slot.map(drop));
        send(&mut tx, next, 2).unwrap();
        tx
    });
    take(&mut rx, Block, 1);
    let _tx = producer.join().unwrap();
    take(&mut rx, Block, 2);
}

check! {
    /// The consumer's waker is replaced by another task's: the second task sleeps for ever, or both are woken.
    consumer_waker_replaced, exhaustive
}
fn consumer_waker_replaced<P: Parker>() {
    let (_, tx, mut rx) = ring::<1, P>();
    let (first, second) = (Task::new(), Task::new());
    assert!(poll_recv(&mut rx, &first.waker()).is_none());
    let producer = sends(tx, Block, [1]);
    assert_eq!(*second.run(|waker| poll_recv(&mut rx, waker)).unwrap(), 1);
    drop(producer.join().unwrap());
    assert!(first.wakes() + second.wakes() <= 1, "one hand-off");
}

check! {
    /// The producer's waker is replaced by another task's: the second task sleeps for ever, or both are woken.
    producer_waker_replaced, exhaustive
}
fn producer_waker_replaced<P: Parker>() {
    let (_, mut tx, mut rx) = filled::<1, P>(&[1]);
    let (first, second) = (Task::new(), Task::new());
    assert!(poll_send(&mut tx, &first.waker(), 2).is_none());
    let consumer = spawn(move || {
        take(&mut rx, Block, 1);
        rx
    });
    second.run(|waker| poll_send(&mut tx, waker, 2)).unwrap();
    drop(consumer.join().unwrap());
    assert!(first.wakes() + second.wakes() <= 1, "one hand-off");
}

check! {
    /// A wake meets the registration of a task that is announced already: it finds no waker, and is lost.
    wake_meets_registration over [true, false], exhaustive
}
fn wake_meets_registration<P: Parker>(commit: bool) {
    let (_, mut tx, mut rx) = ring::<1, P>();
    let task = Task::new();
    assert!(poll_recv(&mut rx, &task.waker()).is_none());
    let producer = spawn(move || {
        if commit {
            put(&mut tx, 1);
            Some(tx)
        } else {
            tx.finish();
            None
        }
    });
    match task.run(|waker| poll_recv(&mut rx, waker)) {
        Ok(guard) => assert_eq!((*guard, commit), (1, true)),
        Err(end) => assert_eq!((end, commit), (End::Finished, false)),
    }
    drop(producer.join().unwrap());
}

check! {
    /// Two guards are released at once: the wake for the other slot hides the wake for the slot that the task waits for.
    two_wakes_meet over [1, 2], 2 quick 1, deep 3
}
fn two_wakes_meet<P: Parker>(polls: usize) {
    let (_, mut tx, mut rx) = filled::<2, P>(&[0, 1]);
    let task = Task::new();
    assert!(poll_send(&mut tx, &task.waker(), 2).is_none()); // announced at the first slot
    let (first, second) = (recv(&mut rx, Block).unwrap(), recv(&mut rx, Block).unwrap());
    let readers = [spawn(move || drop(first)), spawn(move || drop(second))];
    // Does not wait for the wake: it may still be in progress when the task waits at the second slot.
    send(&mut tx, Try, 2).unwrap();
    let early = (1..polls).any(|_| poll_send(&mut tx, &task.waker(), 3).is_some());
    if !early {
        task.run(|waker| poll_send(&mut tx, waker, 3)).unwrap();
    }
    readers.into_iter().for_each(|reader| reader.join().unwrap());
}

check! {
    /// A registration gives back what it stored, and a wake for a blocking wait reads it at the same time.
    blocks_after_polling, 3, deep 4
}
fn blocks_after_polling<P: Parker>() {
    let (_, tx, mut rx) = ring::<2, P>();
    let task = Task::new();
    assert!(poll_recv(&mut rx, &task.waker()).is_none());
    let producer = sends(tx, Block, [1, 2]);
    assert_eq!(*task.run(|waker| poll_recv(&mut rx, waker)).unwrap(), 1);
    take(&mut rx, Block, 2); // announced, with no waker registered for it
    drop(producer.join().unwrap());
}

check! {
    /// A handle that is gone leaves its task's waker in the ring, or drops it while it is taken out.
    waker_outlives_handle over ["consumer", "producer", "producer, never woken"], exhaustive
}
fn waker_outlives_handle<P: Parker>(side: &'static str) {
    let (_, mut tx, mut rx) = ring::<1, P>();
    let task = Task::new();
    if side == "consumer" {
        assert!(poll_recv(&mut rx, &task.waker()).is_none());
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
                take(&mut rx, Block, 1);
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
    let (park, mut tx, mut rx) = ring::<2, P>();
    assert!(poll_recv(&mut rx, &bomb()).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        // It panics if the consumer has not replaced the waker.
        let _ = survive(|| put(&mut tx, 1));
        put(&mut tx, 2);
        assert!(format!("{tx:?}").contains("seq: 2"));
        tx
    });
    take(&mut rx, mode, 1);
    take(&mut rx, mode, 2);
    drop(producer.join().unwrap());
}

check! {
    /// The producer's waker panics in a release: the slot, or the wake of a blocked producer, is lost.
    waker_panics_in_release over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_release<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = filled::<1, P>(&[1]);
    assert!(poll_send(&mut tx, &bomb(), 9).is_none());
    clock(&park, mode);
    let producer = sends(tx, mode, [2]);
    let guard = recv(&mut rx, Block).unwrap();
    let _ = survive(|| drop(guard));
    let _tx = producer.join().unwrap();
    take(&mut rx, Block, 2);
}

check! {
    /// The consumer's waker panics in the producer's end: the end is not told, or told on some slots only.
    waker_panics_in_end over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_end<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = ring::<2, P>();
    assert!(poll_recv(&mut rx, &bomb()).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        let _ = survive(|| drop(tx));
    });
    assert_eq!(recv(&mut rx, mode).map(drop), Err(End::Abandoned));
    producer.join().unwrap();
}

check! {
    /// The producer's waker panics in the consumer's end: a blocked producer is not told.
    waker_panics_in_consumer_drop over [Try, Block, Timed, Async], 2, deep 3
}
fn waker_panics_in_consumer_drop<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = filled::<1, P>(&[1]);
    assert!(poll_send(&mut tx, &bomb(), 9).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        assert_eq!(send(&mut tx, mode, 2), Err(Closed));
    });
    let _ = survive(|| drop(rx));
    producer.join().unwrap();
}

check! {
    /// A waker that panics when it is dropped, as it is replaced, takes the new one with it, or blocks the cell.
    replaced_waker_panics, exhaustive
}
fn replaced_waker_panics<P: Parker>() {
    struct DropBomb;
    impl Wake for DropBomb {
        fn wake(self: Arc<Self>) {}
    }
    impl Drop for DropBomb {
        fn drop(&mut self) {
            std::panic::resume_unwind(Box::new(Bomb));
        }
    }
    let (_, tx, mut rx) = ring::<1, P>();
    assert!(poll_recv(&mut rx, &Waker::from(Arc::new(DropBomb))).is_none());
    let task = Task::new();
    let replaced = survive(|| poll_recv(&mut rx, &task.waker()).map(drop));
    assert!(replaced.is_err());
    let producer = sends(tx, Block, [1]);
    assert_eq!(*task.run(|waker| poll_recv(&mut rx, waker)).unwrap(), 1);
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
    let (_, tx, mut rx) = ring::<1, P>();
    assert!(survive(|| poll_recv(&mut rx, &unclonable).map(drop)).is_err());
    let task = Task::new();
    assert!(poll_recv(&mut rx, &task.waker()).is_none());
    assert_eq!(task.wakes(), 0, "the cell is free, so that the task need not look again");
    let producer = sends(tx, Block, [1]);
    assert_eq!(*task.run(|waker| poll_recv(&mut rx, waker)).unwrap(), 1);
    drop(producer.join().unwrap());
}

check! {
    /// A task is polled for ever: each hand-off wakes it once at most, and each wake is followed by one poll.
    polls_are_bounded over [1, 2], 1, deep 2
}
fn polls_are_bounded<P: Parker>(slots: usize) {
    let (_, mut tx, mut rx) = if slots == 1 { ring::<1, P>() } else { ring::<2, P>() };
    let task = Task::new();
    let mut polls = 0;
    let producer = spawn(move || {
        send(&mut tx, Block, 1).unwrap();
        send(&mut tx, Block, 2).unwrap();
        tx.finish();
    });
    for value in 1..=2 {
        let guard = task.run(|waker| {
            polls += 1;
            poll_recv(&mut rx, waker)
        });
        assert_eq!(*guard.unwrap(), value);
    }
    let end = task.run(|waker| {
        polls += 1;
        poll_recv(&mut rx, waker).map(|end| end.map(drop))
    });
    assert_eq!(end, Err(End::Finished));
    producer.join().unwrap();
    assert!(task.wakes() <= 3, "{} wakes for two commits and the end", task.wakes());
    assert!(polls <= 3 + task.wakes(), "{polls} polls, {} wakes", task.wakes());
}

check! {
    /// The consumer's waker panics in the commit, or the drop, of a reserved slot: the producer's task, which waits
    /// for the same slot, is not woken.
    waker_panics_in_reserved_commit over [true, false], exhaustive
}
fn waker_panics_in_reserved_commit<P: Parker>(commit: bool) {
    let (_, mut tx, mut rx) = ring::<1, P>();
    let slot = reserve(&mut tx, 1);
    let task = Task::new();
    assert!(poll_send(&mut tx, &task.waker(), 2).is_none());
    assert!(poll_recv(&mut rx, &bomb()).is_none());
    let filler = spawn(move || {
        let died = survive(|| end(slot, commit));
        assert!(died.is_err());
    });
    task.sleep(); // before the consumer releases anything
    assert_eq!(recv(&mut rx, Try).is_ok(), commit);
    task.run(|waker| poll_send(&mut tx, waker, 2)).unwrap();
    filler.join().unwrap();
}
