//! Slots that are reserved: several at once, committed in any order, on any thread, late, or never.

use std::task::Waker;
use std::time::Duration;

use twinbuf_core::{Closed, TryRecvError};

use crate::common::*;

check! {
    /// Two reserved slots, the second committed first: it overtakes the first, or one of the two is slept through.
    committed_out_of_order over [Try, Block, Timed, Async], 2, deep 3
}
fn committed_out_of_order<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<2, P>();
    let (first, second) = (reserve(&mut tx, 1), reserve(&mut tx, 2));
    clock(&park, mode);
    let producer = spawn(move || {
        second.commit().unwrap();
        first.commit().unwrap();
        tx // dropped by the other side: no end follows the commits
    });
    take(&mut rx, mode, 1);
    take(&mut rx, mode, 2);
    drop(producer.join().unwrap());
}

check! {
    /// Two reserved slots, committed on two threads: a value or a wake is lost, or the order.
    committed_on_two_threads over [Try, Block, Async], 2, deep 3
}
fn committed_on_two_threads<P: Parker>(mode: Mode) {
    let (_, mut tx, mut rx) = ring::<2, P>();
    let (first, second) = (reserve(&mut tx, 1), reserve(&mut tx, 2));
    let fillers = [second, first].map(|mut slot| {
        spawn(move || {
            *slot += 10;
            slot.commit().unwrap();
        })
    });
    take(&mut rx, mode, 11);
    take(&mut rx, mode, 12);
    fillers.into_iter().for_each(|filler| filler.join().unwrap());
    drop(tx);
}

check! {
    /// A reserved slot that is dropped: the consumer sleeps through it, reads it, or is told of it twice.
    cancelled over [Try, Block, Timed, Async], 2, deep 3
}
fn cancelled<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<2, P>();
    let slot = reserve(&mut tx, 9);
    clock(&park, mode);
    let filler = spawn(move || drop(slot));
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Cancelled);
    filler.join().unwrap();
    put(&mut tx, 1);
    let next = recv(&mut rx, Block).unwrap(); // does not wait
    assert_eq!((*next, next.seq()), (1, 1));
}

check! {
    /// A cancelled place between two values: a value is lost, or the place is never free again.
    cancelled_in_the_middle over [Try, Block, Timed, Async], 2, deep 3
}
fn cancelled_in_the_middle<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = filled::<3, P>(&[0]);
    let slot = reserve(&mut tx, 9);
    clock(&park, mode);
    let producer = spawn(move || {
        put(&mut tx, 2);
        drop(slot);
        tx
    });
    take(&mut rx, Block, 0);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Cancelled);
    take(&mut rx, mode, 2);
    let mut tx = producer.join().unwrap();
    for i in 3..6 {
        put(&mut tx, i); // does not wait: all three are free again
    }
    take(&mut rx, Block, 3);
}

check! {
    /// A cancelled place is released by the consumer that finds it: the producer that waits for it sleeps on.
    cancelled_place_is_released over [Try, Block, Timed, Async], 2, deep 3
}
fn cancelled_place_is_released<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<1, P>();
    drop(reserve(&mut tx, 9));
    clock(&park, mode);
    let producer = sends(tx, mode, [1]);
    assert_eq!(recv(&mut rx, Block).unwrap_err(), End::Cancelled);
    let _tx = producer.join().unwrap();
    take(&mut rx, Block, 1); // does not wait
}

check! {
    /// The producer's task waits, one lap ahead, for a slot that it reserved, and the consumer waits for the same one:
    /// the commit, or the drop, clears the one `WAITER` of both and wakes one.
    both_wait over [
        (true, Try), (true, Block), (true, Timed), (true, Async),
        (false, Try), (false, Block), (false, Timed), (false, Async),
    ], 2 quick 1, deep 3
}
fn both_wait<P: Parker>((commit, mode): (bool, Mode)) {
    let (park, mut tx, mut rx) = ring::<1, P>();
    let slot = reserve(&mut tx, 1);
    let task = Task::new();
    assert!(poll_send(&mut tx, &task.waker(), 2).is_none());
    clock(&park, mode);
    let producer = spawn(move || {
        end(slot, commit).unwrap();
        task.sleep(); // woken by the commit or drop, or by the consumer's release
        task.run(|waker| poll_send(&mut tx, waker, 2)).unwrap();
        tx
    });
    match recv(&mut rx, mode) {
        Ok(slot) => assert!(commit && *slot == 1),
        Err(end) => assert!(!commit && end == End::Cancelled),
    }
    take(&mut rx, Block, 2);
    drop(producer.join().unwrap());
}

check! {
    /// The producer waits, one lap ahead, for a slot that it reserved: it takes the slot while it is still reserved, or
    /// sleeps through the commit or the release.
    blocks_on_its_own_reservation over [Block, Timed, Async], 1, deep 2
}
fn blocks_on_its_own_reservation<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<1, P>();
    let slot = reserve(&mut tx, 1);
    clock(&park, mode);
    let producer = sends(tx, mode, [2]);
    slot.commit().unwrap();
    take(&mut rx, Block, 1);
    take(&mut rx, Block, 2);
    drop(producer.join().unwrap());
}

check! {
    /// `finish` (or the loss of the producer) with a reserved slot still open: the consumer takes its place for the
    /// end of the data, or for a loss that `finish` excludes, sleeps there, or never gets what is committed late.
    end_before_commit over [
        (true, Try), (true, Block), (true, Timed), (true, Async), (false, Block), (false, Async)
    ], 2, deep 3
}
fn end_before_commit<P: Parker>((finish, mode): (bool, Mode)) {
    let (park, mut tx, mut rx) = ring::<3, P>(); // the end is at another place, of the same lap
    let (first, second) = (reserve(&mut tx, 1), reserve(&mut tx, 2));
    clock(&park, mode);
    let producer = spawn(move || {
        second.commit().unwrap();
        stop(tx, finish);
        first.commit().unwrap();
    });
    let mut producer = Some(producer);
    match recv(&mut rx, mode) {
        Ok(slot) => assert_eq!(*slot, 1),
        Err(end) => {
            assert_eq!((finish, end), (false, End::Abandoned), "not finished: a slot is open");
            producer.take().unwrap().join().unwrap();
            take(&mut rx, Block, 1); // late
        }
    }
    take(&mut rx, mode, 2);
    let end = if finish { End::Finished } else { End::Abandoned };
    assert_eq!(recv(&mut rx, mode).unwrap_err(), end);
    if let Some(producer) = producer {
        producer.join().unwrap();
    }
}

check! {
    /// Reserved slots that are open on two threads as the producer finishes, one of them dropped: the end is read
    /// before the last value, or the consumer takes the wake of `finish` for that of the slot, and sleeps on.
    end_before_two_commits over [(true, Block), (true, Async), (false, Block), (false, Async)], 1, deep 2
}
fn end_before_two_commits<P: Parker>((commit, mode): (bool, Mode)) {
    let (_, mut tx, mut rx) = ring::<2, P>();
    let (first, second) = (reserve(&mut tx, 1), reserve(&mut tx, 2));
    let filler = spawn(move || end(first, commit).unwrap());
    let producer = spawn(move || {
        tx.finish();
        second.commit().unwrap();
    });
    let first = recv(&mut rx, mode).map(|slot| *slot);
    assert_eq!(first, if commit { Ok(1) } else { Err(End::Cancelled) });
    take(&mut rx, mode, 2);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Finished);
    filler.join().unwrap();
    producer.join().unwrap();
}

check! {
    /// The end that `finish` sets is on the word of a slot that is still reserved for the lap before: the consumer
    /// takes it for its own lap's, and misses the value.
    end_of_the_next_lap over [Block, Async], 2, deep 3
}
fn end_of_the_next_lap<P: Parker>(mode: Mode) {
    let (_, mut tx, mut rx) = ring::<1, P>();
    for i in 0..2 {
        put(&mut tx, i); // one round for each parity
        take(&mut rx, Block, i);
        if i == 1 {
            break;
        }
    }
    let slot = reserve(&mut tx, 2);
    let producer = spawn(move || {
        tx.finish();
        slot.commit().unwrap();
    });
    take(&mut rx, mode, 2);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Finished);
    producer.join().unwrap();
}

check! {
    /// A reserved slot that is leaked: it is handed out again, or the consumer is told that all data has come, or that
    /// a producer that has finished is lost, or sleeps through a loss.
    leaked over [
        (true, Try), (true, Timed), (true, Async), (false, Try), (false, Block), (false, Timed), (false, Async)
    ], 2, deep 3
}
fn leaked<P: Parker>((finish, mode): (bool, Mode)) {
    let (park, mut tx, mut rx) = ring::<2, P>();
    std::mem::forget(reserve(&mut tx, 9));
    clock(&park, mode);
    let producer = spawn(move || {
        put(&mut tx, 1);
        assert!(tx.try_acquire().is_err(), "the leaked slot is next");
        stop(tx, finish);
    });
    if finish {
        // As if it were open.
        let mut empty = || match mode {
            Try => assert_eq!(rx.try_recv().unwrap_err(), TryRecvError::Empty),
            Timed => assert_eq!(rx.recv_timeout(Duration::ZERO).unwrap_err(), TryRecvError::Empty),
            Block | Async => assert!(poll_recv(&mut rx, Waker::noop()).is_none()),
        };
        empty();
        producer.join().unwrap();
        return empty();
    }
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Abandoned);
    assert_eq!(recv(&mut rx, Block).unwrap_err(), End::Abandoned, "what follows is beyond it");
    producer.join().unwrap();
}

check! {
    /// The consumer goes while a slot is reserved: its commit, or its drop, overwrites the end, and the producer that
    /// waits for the slot sleeps on.
    consumer_drop_while_reserved over [(true, Block), (true, Async), (false, Block), (false, Async)], 2, deep 3
}
fn consumer_drop_while_reserved<P: Parker>((commit, mode): (bool, Mode)) {
    let (_, mut tx, rx) = ring::<1, P>();
    let slot = reserve(&mut tx, 1);
    let filler = spawn(move || end(slot, commit));
    let producer = spawn(move || assert_eq!(send(&mut tx, mode, 2), Err(Closed)));
    drop(rx);
    let _either = filler.join().unwrap();
    producer.join().unwrap();
}

check! {
    /// `WAITER` outlives the cancelled slot that was waited for, and the release makes a needless wake.
    needless_wake_after_cancel, exhaustive
}
fn needless_wake_after_cancel<P: Parker>() {
    let (park, mut tx, mut rx) = ring::<1, P>();
    let slot = reserve(&mut tx, 9);
    let filler = spawn(move || drop(slot));
    assert_eq!(recv(&mut rx, Block).unwrap_err(), End::Cancelled);
    filler.join().unwrap();
    assert!(park.wakes() <= 1, "the release wakes no side, since none waits for it");
    drop(tx);
}

check! {
    /// A reserved guard outlives its producer, whose waker it then finds gone, and the consumer's in the cell.
    guard_outlives_producer over [Try, Block, Timed, Async], 2, deep 3
}
fn guard_outlives_producer<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<1, P>();
    let slot = reserve(&mut tx, 1);
    let task = Task::new();
    assert!(poll_send(&mut tx, &task.waker(), 2).is_none());
    clock(&park, mode);
    let filler = spawn(move || slot.commit().unwrap());
    drop(tx);
    match recv(&mut rx, mode) {
        Ok(slot) => assert_eq!(*slot, 1),
        Err(end) => {
            assert_eq!(end, End::Abandoned);
            filler.join().unwrap();
            return take(&mut rx, Block, 1);
        }
    }
    filler.join().unwrap();
}
