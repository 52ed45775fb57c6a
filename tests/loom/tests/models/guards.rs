//! Guards that overlap, move between threads, and are dropped in any order, by a panic or never.

use twinbuf_core::{Closed, TryAcquireError, TryRecvError};

use crate::common::*;

check! {
    /// Two read guards, the second released first: the producer refills the wrong slot, or sleeps for ever.
    released_out_of_order over [Try, Block, Async], 3, deep 4
}
fn released_out_of_order<P: Parker>(mode: Mode) {
    let (_, tx, mut rx) = filled::<2, P>(&[0, 1]);
    let producer = sends(tx, mode, [2, 3]);
    let (a, b) = (recv(&mut rx, Block).unwrap(), recv(&mut rx, Block).unwrap());
    drop(b);
    assert_eq!(*a, 0, "still ours");
    drop(a);
    take(&mut rx, Block, 2);
    take(&mut rx, Block, 3);
    drop(producer.join().unwrap());
}

check! {
    /// A third thread releases while the consumer receives: the value or the wake of one of them is lost.
    released_elsewhere over [Try, Block, Timed, Async], 2, deep 3
}
fn released_elsewhere<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = filled::<1, P>(&[1]);
    clock(&park, mode);
    let guard = recv(&mut rx, Block).unwrap();
    let reader = spawn(move || {
        assert_eq!(*guard, 1);
        drop(guard);
    });
    send(&mut tx, mode, 2).unwrap();
    take(&mut rx, Block, 2);
    reader.join().unwrap();
}

check! {
    both asleep
    /// The consumer receives while its last guard is released elsewhere: it reads the old batch again, or sleeps through
    /// the release or through the commit that follows.
    receives_while_released over [Try, Block, Async], 2 quick 1, deep 3
}
fn receives_while_released<P: Parker>(mode: Mode) {
    let (_, tx, mut rx) = filled::<1, P>(&[1]);
    let guard = recv(&mut rx, Block).unwrap();
    let reader = spawn(move || drop(guard));
    let producer = sends(tx, Block, [2]);
    take(&mut rx, mode, 2);
    reader.join().unwrap();
    drop(producer.join().unwrap());
}

check! {
    /// A read guard that is leaked: its slot is handed out twice, or the consumer sleeps on itself.
    read_guard_leaked over [Try, Block, Timed, Async], 2, deep 3
}
fn read_guard_leaked<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = filled::<2, P>(&[0]);
    clock(&park, mode);
    std::mem::forget(recv(&mut rx, Block).unwrap());
    let producer = spawn(move || {
        put(&mut tx, 1);
        // The next slot is the leaked one.
        assert_eq!(send(&mut tx, mode, 2), Err(Closed));
    });
    take(&mut rx, mode, 1);
    assert_eq!(rx.try_recv().map(drop), Err(TryRecvError::Held));
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// A write guard that is leaked: its slot is lost, or what is half filled is received.
    write_guard_leaked over [Try, Block, Timed, Async], 2, deep 3
}
fn write_guard_leaked<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<1, P>();
    clock(&park, mode);
    let producer = spawn(move || {
        let mut slot = tx.acquire().unwrap();
        *slot = 9;
        let _leaked = std::mem::ManuallyDrop::new(slot);
        put(&mut tx, 1);
        assert_eq!(tx.try_acquire().map(drop), Err(TryAcquireError::Full));
        tx
    });
    let guard = recv(&mut rx, mode).unwrap();
    assert_eq!(*guard, 1);
    let tx = producer.join().unwrap();
    drop(guard);
    drop(tx);
}

check! {
    /// A write guard that is dropped: what is half filled is received, or the consumer is told of it.
    aborted over [Try, Block, Timed, Async], 2, deep 3
}
fn aborted<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<2, P>();
    clock(&park, mode);
    let producer = spawn(move || {
        let mut slot = tx.acquire().unwrap();
        *slot = 9;
        drop(slot);
        put(&mut tx, 1);
        tx.finish();
    });
    take(&mut rx, mode, 1);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Finished);
    producer.join().unwrap();
}

check! {
    /// A panic while filling: what is half filled is received, the loss is taken for the end, or slept through.
    panic_while_filling over [Try, Block, Timed, Async], 2, deep 3
}
fn panic_while_filling<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = filled::<2, P>(&[1]);
    clock(&park, mode);
    let producer = spawn(move || {
        let died = survive(move || {
            let mut tx = tx; // dropped by the panic
            tx.fill(|slot| {
                *slot = 9;
                std::panic::resume_unwind(Box::new(Bomb))
            })
        });
        assert!(died.is_err());
    });
    take(&mut rx, Block, 1);
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Abandoned);
    producer.join().unwrap();
}

check! {
    /// A read guard that borrows the consumer is leaked: its slot is lost, or what follows is received in its place.
    borrowing_read_guard_leaked over [Try, Block, Timed, Async], 2, deep 3
}
fn borrowing_read_guard_leaked<P: Parker>(mode: Mode) {
    let (park, tx, mut rx) = filled::<1, P>(&[1]);
    std::mem::forget(rx.recv().unwrap());
    clock(&park, mode);
    let producer = sends(tx, mode, [2]);
    take(&mut rx, mode, 1); // the same one again
    take(&mut rx, mode, 2);
    drop(producer.join().unwrap());
}

check! {
    both asleep
    /// Producer and consumer wait for the release of one kept slot, in all ways: one of the two is not woken.
    both_wait_for_a_kept_slot over [
        (Block, Block), (Block, Async), (Async, Block), (Async, Async), (Timed, Async), (Async, Timed)
    ], 1, deep 2
}
fn both_wait_for_a_kept_slot<P: Parker>((producing, receiving): (Mode, Mode)) {
    let (_, tx, mut rx) = filled::<1, P>(&[1]);
    let guard = recv(&mut rx, Block).unwrap();
    let producer = sends(tx, producing, [2]); // the bell is not rung
    let reader = spawn(move || drop(guard));
    take(&mut rx, receiving, 2);
    reader.join().unwrap();
    drop(producer.join().unwrap());
}
