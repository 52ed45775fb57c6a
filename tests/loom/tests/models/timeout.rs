//! A deadline that comes at any moment: a hand-off that races with it is received by this call or the next.
//!
//! With one slot and with two. After a wait that was given up, `WAITER` remains on one word and the next wait uses
//! another.

use std::time::Duration;

use twinbuf_core::{Closed, TryAcquireError, TryRecvError};

use crate::common::*;

/// Receives the next value by a timed call, and by another call after a timeout.
fn recv_late<P: Parker>(rx: &mut Rx<P>, next: Mode, value: usize) {
    match rx.recv_timeout(Duration::ZERO).map(|slot| *slot.unwrap()) {
        Ok(found) => assert_eq!(found, value),
        Err(TryRecvError::Empty) => take(rx, next, value),
        Err(end) => panic!("{end:?}"),
    }
}

/// Hands `value` over by a timed call, and by another call after a timeout.
fn send_late<P: Parker>(tx: &mut Tx<P>, next: Mode, value: usize) -> Result<(), Closed> {
    match tx.acquire_timeout(Duration::ZERO) {
        Ok(slot) => return commit_with(slot, value),
        Err(TryAcquireError::Full) => (),
        Err(_) => return Err(Closed),
    }
    send(tx, next, value)
}

check! {
    /// The deadline comes with a commit: the value is lost, or the next wait sleeps through it.
    timeout_meets_commit over [Try, Block, Timed, Async], 2, deep 3
}
fn timeout_meets_commit<P: Parker>(next: Mode) {
    let (park, tx, mut rx) = ring::<1, P>();
    clock(&park, Timed);
    let producer = sends(tx, Block, [1]);
    recv_late(&mut rx, next, 1);
    drop(producer.join().unwrap());
}

check! {
    /// As above, with two slots and two commits.
    timeout_meets_two_commits over [Try, Block, Async], 1, deep 2
}
fn timeout_meets_two_commits<P: Parker>(next: Mode) {
    let (park, tx, mut rx) = ring::<2, P>();
    clock(&park, Timed);
    let producer = sends(tx, Block, [1, 2]);
    recv_late(&mut rx, next, 1);
    recv_late(&mut rx, next, 2);
    drop(producer.join().unwrap());
}

check! {
    /// The deadline comes with a release: the slot is lost, or the next wait sleeps through it.
    timeout_meets_release over [Try, Block, Timed, Async], 2, deep 3
}
fn timeout_meets_release<P: Parker>(next: Mode) {
    meets_releases::<1, P>(next);
}

check! {
    /// As above, with two slots and two releases.
    timeout_meets_two_releases over [Try, Block, Async], 1, deep 2
}
fn timeout_meets_two_releases<P: Parker>(next: Mode) {
    meets_releases::<2, P>(next);
}

/// The deadline comes with the release of each of `N` slots.
fn meets_releases<const N: usize, P: Parker>(next: Mode) {
    let (park, mut tx, mut rx) = ring::<N, P>();
    (1..=N).for_each(|i| put(&mut tx, i));
    clock(&park, Timed);
    let producer = spawn(move || {
        (N + 1..=2 * N).for_each(|i| send_late(&mut tx, next, i).unwrap());
        tx
    });
    (1..=N).for_each(|i| take(&mut rx, Block, i));
    let _tx = producer.join().unwrap();
    (N + 1..=2 * N).for_each(|i| take(&mut rx, Block, i));
}

check! {
    /// The deadline comes with the end of the producer: the end is lost, or the next wait sleeps through it.
    timeout_meets_end over [(1, Try), (1, Block), (1, Timed), (1, Async), (2, Block), (2, Async)], 2, deep 3
}
fn timeout_meets_end<P: Parker>((slots, next): (usize, Mode)) {
    let (park, tx, mut rx) = if slots == 1 { ring::<1, P>() } else { ring::<2, P>() };
    clock(&park, Timed);
    let producer = spawn(move || drop(tx));
    match rx.recv_timeout(Duration::ZERO).map(drop).unwrap_err() {
        TryRecvError::Abandoned => (),
        TryRecvError::Empty => assert_eq!(recv(&mut rx, next).unwrap_err(), End::Abandoned),
        end => panic!("{end:?}"),
    }
    producer.join().unwrap();
}

check! {
    /// The deadline comes with the end of the consumer: the next wait sleeps through it.
    timeout_meets_consumer_drop over [
        (1, Try), (1, Block), (1, Timed), (1, Async), (2, Block), (2, Async)
    ], 2, deep 3
}
fn timeout_meets_consumer_drop<P: Parker>((slots, next): (usize, Mode)) {
    let (park, mut tx, rx) = if slots == 1 { ring::<1, P>() } else { ring::<2, P>() };
    for i in 0..slots {
        put(&mut tx, i);
    }
    clock(&park, Timed);
    let producer = spawn(move || assert_eq!(send_late(&mut tx, next, 2), Err(Closed)));
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// A timed receive of a slot that the consumer's own guard holds: it sleeps through the release, which another
    /// thread makes, or through the commit that follows, or reads the slot again.
    held_slot, 2, deep 3
}
fn held_slot<P: Parker>() {
    let (_, mut tx, mut rx) = filled::<1, P>(&[1]);
    let guard = recv(&mut rx, Block).unwrap();
    let other = spawn(move || {
        drop(guard);
        put(&mut tx, 2);
        tx
    });
    // The bell is not rung.
    assert_eq!(*rx.recv_timeout(Duration::ZERO).unwrap().unwrap(), 2);
    drop(other.join().unwrap());
}

check! {
    /// As above, with a task of the producer's that waits for the same release: one of the two is not woken.
    held_slot_awaited_by_both, 1, deep 2
}
fn held_slot_awaited_by_both<P: Parker>() {
    let (_, mut tx, mut rx) = filled::<1, P>(&[1]);
    let guard = recv(&mut rx, Block).unwrap();
    let task = Task::new();
    assert!(poll_send(&mut tx, &task.waker(), 2).is_none());
    let producer = spawn(move || {
        drop(guard);
        task.run(|waker| poll_send(&mut tx, waker, 2)).unwrap();
        tx
    });
    assert_eq!(*rx.recv_timeout(Duration::ZERO).unwrap().unwrap(), 2);
    drop(producer.join().unwrap());
}

check! {
    /// As above, and the deadline comes: the error is the wrong one, or the next call sleeps.
    held_slot_meets_timeout over [false, true], 2, deep 3
}
fn held_slot_meets_timeout<P: Parker>(released: bool) {
    let (park, mut tx, mut rx) = filled::<1, P>(&[1]);
    let guard = recv(&mut rx, Block).unwrap();
    clock(&park, Timed);
    if !released {
        assert_eq!(rx.recv_timeout(Duration::ZERO).map(drop), Err(TryRecvError::Held));
        return drop(guard);
    }
    let reader = spawn(move || drop(guard));
    match rx.recv_timeout(Duration::ZERO).map(drop).unwrap_err() {
        TryRecvError::Held | TryRecvError::Empty => (),
        end => panic!("{end:?}"),
    }
    reader.join().unwrap();
    put(&mut tx, 2); // does not wait
    take(&mut rx, Block, 2);
}

check! {
    /// A deadline that is over before the call: a slot that is ready is not given out, or the call sleeps.
    deadline_is_over, exhaustive
}
fn deadline_is_over<P: Parker>() {
    let (park, mut tx, mut rx) = ring::<1, P>();
    park.ring_the_bell();
    assert_eq!(rx.recv_timeout(Duration::ZERO).map(drop), Err(TryRecvError::Empty));
    let producer = spawn(move || {
        put(&mut tx, 1);
        assert_eq!(tx.acquire_timeout(Duration::ZERO).map(drop), Err(TryAcquireError::Full));
        tx
    });
    // `Empty` here, or the value: both are correct during the commit.
    let early = rx.recv_timeout(Duration::ZERO).map(|slot| slot.unwrap().keep());
    if let Ok(guard) = &early {
        assert_eq!(**guard, 1);
    }
    let tx = producer.join().unwrap();
    if early.is_err() {
        assert_eq!(*rx.recv_timeout(Duration::ZERO).unwrap().unwrap(), 1, "ready, so no deadline counts");
    }
    drop((early, tx));
}
