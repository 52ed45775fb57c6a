//! The end of a handle: it arrives, it arrives in order, and nobody sleeps through it.

use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering::Relaxed};
use twinbuf_core::Closed;

use crate::common::*;

check! {
    /// The consumer sleeps through `finish`, or through the loss of the producer, takes one for the other, or takes it for
    /// the end before it has all the data.
    producer_end over [
        (true, Try), (true, Block), (true, Timed), (true, Async),
        (false, Try), (false, Block), (false, Timed), (false, Async)
    ], 2, deep 3
}
fn producer_end<P: Parker>((finish, mode): (bool, Mode)) {
    let (park, mut tx, mut rx) = filled::<2, P>(&[1]);
    clock(&park, mode);
    let producer = spawn(move || {
        put(&mut tx, 2);
        stop(tx, finish);
    });
    take(&mut rx, Block, 1);
    take(&mut rx, mode, 2);
    let end = if finish { End::Finished } else { End::Abandoned };
    assert_eq!(recv(&mut rx, mode).unwrap_err(), end);
    assert_eq!(recv(&mut rx, Block).unwrap_err(), end, "the end stays");
    producer.join().unwrap();
}

check! {
    /// The end is told on some slots only, and the consumer waits at another one.
    end_at_every_slot over [0, 1, 2], exhaustive
}
fn end_at_every_slot<P: Parker>(at: usize) {
    let (_, mut tx, mut rx) = ring::<3, P>();
    for i in 0..at {
        put(&mut tx, i);
        take(&mut rx, Block, i);
    }
    let producer = spawn(move || tx.finish());
    assert_eq!(recv(&mut rx, Block).unwrap_err(), End::Finished);
    producer.join().unwrap();
}

check! {
    /// The producer sleeps through the loss of the consumer.
    consumer_drop over [Try, Block, Timed, Async], 2, deep 3
}
fn consumer_drop<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = filled::<1, P>(&[1]);
    clock(&park, mode);
    let producer = spawn(move || {
        assert_eq!(send(&mut tx, mode, 2), Err(Closed));
        assert!(tx.is_closed(), "it stays closed");
    });
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// The loss of the consumer is told on some slots only, and the producer waits at another one.
    consumer_drop_at_every_slot over [0, 1, 2], exhaustive
}
fn consumer_drop_at_every_slot<P: Parker>(at: usize) {
    let (_, mut tx, mut rx) = ring::<3, P>();
    for i in 0..3 + at {
        put(&mut tx, i);
        if i < at {
            take(&mut rx, Block, i);
        }
    }
    let producer = spawn(move || assert_eq!(send(&mut tx, Block, 9), Err(Closed)));
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// A commit overwrites the consumer's end, which comes between its look and its write.
    commit_meets_consumer_drop over [Try, Block, Timed, Async], 2, deep 3
}
fn commit_meets_consumer_drop<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    clock(&park, mode);
    let producer = spawn(move || {
        let first = send(&mut tx, mode, 1);
        let second = send(&mut tx, mode, 2);
        assert!(second.is_err(), "{first:?}, then {second:?} into a ring that nobody reads");
    });
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// A release overwrites the producer's end, which comes between its look and its write.
    release_meets_end over [Try, Block, Timed, Async], 2, deep 3
}
fn release_meets_end<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = filled::<1, P>(&[1]);
    clock(&park, mode);
    let producer = spawn(move || tx.finish());
    take(&mut rx, Block, 1);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Finished);
    producer.join().unwrap();
}

check! {
    /// A consumer that gives up says why in its slot, and goes: the producer that is told at another slot finds what was
    /// there before, or what follows, or nothing.
    consumer_says_why over [(0, Try), (0, Block), (1, Timed), (1, Async), (2, Block), (2, Async)], 2, deep 3
}
fn consumer_says_why<P: Parker>((at, mode): (usize, Mode)) {
    let (park, mut tx, mut rx) = ring::<3, P>();
    for i in 0..at {
        put(&mut tx, i);
        take(&mut rx, Block, i);
    }
    put(&mut tx, 1);
    put(&mut tx, 2);
    clock(&park, mode);
    let producer = spawn(move || {
        while send(&mut tx, mode, 3).is_ok() {
            assert!(tx.unread().is_none_or(|why| *why == 99), "the consumer exists, or has just gone");
        }
        assert_eq!(tx.unread(), Some(&mut 99));
    });
    let mut slot = rx.recv().unwrap().unwrap();
    assert_eq!(*slot, 1);
    *slot = 99;
    slot.put_back();
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// The end of either side overwrites the state of a slot, or the end of the other.
    both_end, exhaustive
}
fn both_end<P: Parker>() {
    let (_, mut tx, mut rx) = filled::<2, P>(&[1]);
    let producer = spawn(move || {
        let committed = fill(&mut tx, 2).is_ok();
        tx.finish();
        committed
    });
    take(&mut rx, Block, 1);
    drop(rx);
    let _either = producer.join().unwrap();
}

check! {
    /// An end that comes while a slot is handed over makes the other side see neither or the wrong one.
    end_while_held over [Block, Async], 2, deep 3
}
fn end_while_held<P: Parker>(mode: Mode) {
    let (_, mut tx, mut rx) = filled::<2, P>(&[1]);
    let held = recv(&mut rx, Block).unwrap();
    let producer = spawn(move || {
        put(&mut tx, 2);
        drop(tx);
    });
    take(&mut rx, mode, 2);
    // The consumer waits at the held slot if the producer still exists.
    assert_eq!(
        recv(&mut rx, mode).unwrap_err(),
        End::Abandoned,
        "nothing can follow, though the slot is held"
    );
    producer.join().unwrap();
    drop(held);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Abandoned);
}

check! {
    /// What the producer did before it went is not visible to the consumer that is told.
    producer_end_publishes over [Try, Block, Timed, Async], 2, deep 3
}
fn producer_end_publishes<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = ring::<2, P>();
    let why = Arc::new(AtomicBool::new(false));
    let says_why = why.clone();
    clock(&park, mode);
    let producer = spawn(move || {
        says_why.store(true, Relaxed);
        drop(tx);
    });
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Abandoned);
    assert!(why.load(Relaxed), "told of the end, and not of what came before");
    producer.join().unwrap();
}

check! {
    /// What the consumer did before it went is not visible to the producer that is told, by an acquire or a commit.
    consumer_end_publishes over [Try, Block, Timed, Async], 2, deep 3
}
fn consumer_end_publishes<P: Parker>(mode: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    let why = Arc::new(AtomicBool::new(false));
    let says_why = why.clone();
    clock(&park, mode);
    let producer = spawn(move || {
        while send(&mut tx, mode, 1).is_ok() {} // at most once
        assert!(why.load(Relaxed), "told of the end, and not of what came before");
    });
    says_why.store(true, Relaxed);
    drop(rx);
    producer.join().unwrap();
}
