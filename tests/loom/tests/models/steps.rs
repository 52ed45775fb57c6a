//! Bounded steps: the maximum number of atomic accesses of a call, over all explored executions. The bound is exact.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use twinbuf_core::sync::steps;
use twinbuf_core::{TryRecvError, WriteSlot};

use crate::common::*;

/// Explores `f`, which measures a call, without a preemption bound. The call must never take more than `ceiling` steps,
/// and must take exactly that many at least once.
fn ceiling(name: &str, ceiling: usize, otherwise: &str, f: impl Fn() -> usize + Send + Sync + 'static) {
    let most = Arc::new(AtomicUsize::new(0));
    let seen = most.clone();
    let hazard = format!("at most {ceiling}: {otherwise}");
    Run::new(&format!("steps::{name}"), &[&hazard], None).explore(&"ModelPark", move || {
        let steps = f();
        assert!(steps <= ceiling, "{steps} steps, more than {ceiling}");
        seen.fetch_max(steps, Relaxed);
    });
    let most = most.load(Relaxed);
    assert_eq!(most, ceiling, "{most} steps at most: the ceiling is too high");
}

/// The steps that this thread makes in `f`.
fn measure<R>(f: impl FnOnce() -> R) -> (usize, R) {
    let before = steps();
    let result = f();
    (steps() - before, result)
}

/// The steps of `call` beside a thread that runs `other`, and its result.
fn beside<R>(other: impl FnOnce() + 'static, call: impl FnOnce() -> R) -> (usize, R) {
    let other = spawn(other);
    let measured = measure(call);
    other.join().unwrap();
    measured
}

/// The steps of a receive beside a producer that commits one value and ends.
fn receive<R>(call: impl FnOnce(&mut Rx<ModelPark>) -> R) -> usize {
    let (_, mut tx, mut rx) = ring::<1, ModelPark>();
    let producer = move || {
        put(&mut tx, 1);
        tx.finish();
    };
    beside(producer, || call(&mut rx)).0
}

/// The steps of an acquire beside a consumer that releases one slot and goes.
fn acquire<R>(call: impl FnOnce(&mut Tx<ModelPark>) -> R) -> usize {
    let (_, mut tx, mut rx) = filled::<1, ModelPark>(&[1]);
    let consumer = move || {
        take(&mut rx, Block, 1);
        drop(rx);
    };
    beside(consumer, || call(&mut tx)).0
}

/// A producer that polls once and goes.
fn polls_to_send(mut tx: Tx<ModelPark>) -> impl FnOnce() {
    move || {
        let _done = poll_send(&mut tx, &Task::new().waker(), 2);
        drop(tx);
    }
}

/// A consumer that polls once and goes.
fn polls_to_receive(mut rx: Rx<ModelPark>) -> impl FnOnce() {
    move || {
        drop(poll_recv(&mut rx, &Task::new().waker()));
        drop(rx);
    }
}

#[test]
fn try_recv() {
    ceiling("try_recv", 1, "it is not wait-free", || receive(|rx| rx.try_recv().map(std::mem::forget)));
}

#[test]
fn try_acquire() {
    ceiling("try_acquire", 1, "it is not wait-free", || acquire(|tx| tx.try_acquire().map(std::mem::forget)));
}

/// Two exchanges, because the consumer can add `WAITER` in between, and four steps to take its waker: the first, a
/// load, may find an old value.
#[test]
fn commit() {
    ceiling("commit", 6, "it is retried for ever", || {
        let (_, mut tx, rx) = ring::<1, ModelPark>();
        let slot = tx.try_acquire();
        beside(polls_to_receive(rx), || slot.map(WriteSlot::commit)).0
    });
}

/// Same as `commit`.
#[test]
fn release() {
    ceiling("release", 6, "it is retried for ever", || {
        let (_, tx, mut rx) = filled::<1, ModelPark>(&[1]);
        let guard = rx.recv().unwrap();
        beside(polls_to_send(tx), || drop(guard)).0
    });
}

/// Same as `commit`, plus two steps that find no waker of the consumer.
#[test]
fn release_kept() {
    ceiling("release_kept", 8, "it is retried for ever", || {
        let (_, tx, mut rx) = filled::<1, ModelPark>(&[1]);
        let guard = recv(&mut rx, Block).unwrap();
        beside(polls_to_send(tx), || drop(guard)).0
    });
}

/// Same as `commit`, with the wakers of both sides to take.
#[test]
fn reserved_commit() {
    ceiling("reserved_commit", 9, "it is retried for ever", || reserved(true));
}

/// Same as `reserved_commit`.
#[test]
fn cancel() {
    ceiling("cancel", 9, "it is retried for ever", || reserved(false));
}

fn reserved(commit: bool) -> usize {
    let (_, mut tx, rx) = ring::<1, ModelPark>();
    let slot = reserve(&mut tx, 1);
    assert!(poll_send(&mut tx, &Task::new().waker(), 2).is_none());
    beside(polls_to_receive(rx), || end(slot, commit)).0
}

/// One load, and a release as in `release`.
#[test]
fn try_recv_of_a_cancelled_place() {
    ceiling("try_recv_of_a_cancelled_place", 7, "it is retried for ever", || {
        let (_, mut tx, mut rx) = ring::<1, ModelPark>();
        drop(reserve(&mut tx, 9));
        let (steps, found) = beside(polls_to_send(tx), || rx.try_recv().map(std::mem::forget));
        assert_eq!(found, Err(TryRecvError::Cancelled));
        steps
    });
}

/// A look for its own waker (1), one step per slot (2), taking the other side's waker (4).
#[test]
fn finish() {
    ceiling("finish", 7, "it is retried for ever", || {
        let (_, tx, mut rx) = ring::<2, ModelPark>();
        let consumer = spawn(move || {
            drop(poll_recv(&mut rx, &Task::new().waker()));
            rx
        });
        let (steps, ()) = measure(|| tx.finish());
        drop(consumer.join().unwrap());
        steps
    });
}

/// One load, the announcement, two loads of the strategy (before and after the sleep), and one load at the end.
#[test]
fn parked_recv() {
    ceiling("parked_recv", 5, "a parked consumer spins", || receive(|rx| rx.recv().map(std::mem::forget)));
}

/// Same as `parked_recv`.
#[test]
fn parked_acquire() {
    ceiling("parked_acquire", 5, "a parked producer spins", || {
        acquire(|tx| tx.acquire().map(std::mem::forget))
    });
}

/// One load, the registration, one load, and the announcement, unless an earlier poll has made it.
#[test]
fn poll() {
    ceiling("poll", 6, "it is retried for ever", || {
        let (_, mut tx, mut rx) = ring::<1, ModelPark>();
        let waker = Task::new().waker();
        let (first, pending) = measure(|| poll_recv(&mut rx, &waker).is_none());
        assert!(pending);
        let producer = move || {
            put(&mut tx, 1);
            tx.finish();
        };
        let poll = || poll_recv(&mut rx, &waker).map(|guard| guard.map(std::mem::forget));
        first.max(beside(producer, poll).0)
    });
}
