//! Commit and release: what is handed over is seen, in order, once, and whoever waits for it wakes.

use twinbuf_core::{DoubleBuffer, Ring};

use crate::common::*;

check! {
    /// A commit is slept through, or the value is read before it is written.
    commit over [Try, Block, Timed, Async], 2, deep 3
}
fn commit<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = ring::<2, P>();
    clock(&park, mode);
    let producer = sends(tx, Block, [1]);
    take(&mut rx, mode, 1);
    drop(producer.join().unwrap());
}

check! {
    /// A release is slept through, or the slot is refilled before it has been read.
    release over [Try, Block, Timed, Async], 2, deep 3
}
fn release<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = filled::<1, P>(&[1]);
    clock(&park, mode);
    let producer = sends(tx, mode, [2]);
    take(&mut rx, Block, 1); // does not wait
    let tx = producer.join().unwrap();
    take(&mut rx, Block, 2); // does not wait
    drop(tx);
}

/// Sends `items` values through a ring of `N`; each side waits in its way.
fn values<const N: usize, P: Parker>(items: usize, producing: Mode, receiving: Mode) {
    let (_, mut tx, mut rx) = ring::<N, P>();
    let producer = spawn(move || {
        for i in 0..items {
            send(&mut tx, producing, i).unwrap();
        }
        tx.finish();
    });
    for i in 0..items {
        take(&mut rx, receiving, i);
    }
    assert_eq!(recv(&mut rx, receiving).unwrap_err(), End::Finished);
    producer.join().unwrap();
}

check! {
    /// One to three slots, over the wrap-around: a value is lost, doubled or overtaken. Two laps: the parity comes back to
    /// the first one's and the consumer takes an old batch for a new one.
    fifo over [
        (1, 2, Block, Block), (1, 2, Async, Async), (1, 2, Block, Async), (1, 2, Async, Block),
        (2, 3, Block, Block), (2, 3, Async, Async), (3, 4, Block, Block), (3, 4, Async, Async), (2, 5, Block, Block)
    ], 1, deep 2
}
fn fifo<P: Parker>((slots, items, producing, receiving): (usize, usize, Mode, Mode)) {
    match slots {
        1 => values::<1, P>(items, producing, receiving),
        2 => values::<2, P>(items, producing, receiving),
        _ => values::<3, P>(items, producing, receiving),
    }
}

check! {
    /// `WAITER` outlives the hand-off that it was meant for, and every later one makes a needless wake.
    needless_wake, exhaustive
}
fn needless_wake<P: Parker>() {
    let (park, tx, mut rx) = ring::<1, P>();
    let producer = sends(tx, Block, [1]);
    take(&mut rx, Block, 1);
    let mut tx = producer.join().unwrap();
    assert!(park.wakes() <= 1);
    put(&mut tx, 2); // nobody waits any more
    take(&mut rx, Block, 2);
    assert!(park.wakes() <= 1);
}

check! {
    /// `WAITER` outlives the release that it was meant for.
    needless_wake_after_release, exhaustive
}
fn needless_wake_after_release<P: Parker>() {
    let (park, tx, mut rx) = filled::<1, P>(&[1]);
    let producer = sends(tx, Block, [2]);
    take(&mut rx, Block, 1);
    drop(producer.join().unwrap());
    assert!(park.wakes() <= 1, "the commit wakes nobody, since nobody waits for it");
}

check! {
    /// The strategy that never announces itself misses a change, or sees it too early.
    spin, exhaustive
}
fn spin<P: Parker>() {
    let (mut tx, mut rx) = keep(Ring::<usize, 1>::new([0])).split();
    let producer = spawn(move || {
        for i in 0..2 {
            fill(&mut tx, i).unwrap();
        }
        tx.finish();
    });
    for i in 0..2 {
        assert_eq!(*rx.recv().unwrap().unwrap(), i);
    }
    assert!(rx.recv().unwrap().is_none());
    producer.join().unwrap();
}

check! {
    /// Two threads split the same static ring, and both get its handles.
    split_twice, exhaustive
}
fn split_twice<P: Parker>() {
    let ring: &DoubleBuffer<usize, P> = keep(DoubleBuffer::with_wait([0, 0], P::new()));
    let other = spawn(|| ring.try_split_static().map(drop).is_some());
    let mine = ring.try_split_static().map(drop).is_some();
    assert!(mine ^ other.join().unwrap(), "exactly one of the two is given the handles");
}
