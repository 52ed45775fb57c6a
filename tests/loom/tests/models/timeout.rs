//! A deadline that comes at any moment: a hand-off that races it is received now or by the next call.

use std::time::Duration;

use twinbuf_core::{AcquireTimeoutError, Closed, RecvError, RecvTimeoutError};

use crate::common::*;

check! {
    /// The deadline comes with a commit: the value is lost, or the next wait sleeps through it.
    timeout_meets_commit over [Try, Block, Timed, Async], 2, deep 3
}
fn timeout_meets_commit<P: Parker>(next: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    clock(&park, Timed);
    let producer = spawn(move || {
        put(&mut tx, 1);
        tx
    });
    match rx.recv_timeout(Duration::ZERO) {
        Ok(guard) => assert_eq!(*guard, 1),
        Err(RecvTimeoutError::Timeout) => take(&rx, next, 1),
        Err(end) => panic!("{end:?}"),
    }
    drop(producer.join().unwrap());
}

check! {
    /// The deadline comes with a release: the slot is lost, or the next wait sleeps through it.
    timeout_meets_release over [Try, Block, Timed, Async], 2, deep 3
}
fn timeout_meets_release<P: Parker>(next: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    put(&mut tx, 1);
    clock(&park, Timed);
    let producer = spawn(move || {
        let timed_out = match tx.acquire_timeout(Duration::ZERO) {
            Ok(mut slot) => {
                *slot = 2;
                slot.commit().unwrap();
                false
            }
            Err(AcquireTimeoutError::Timeout) => true,
            Err(AcquireTimeoutError::Closed) => panic!("the consumer is alive"),
        };
        if timed_out {
            send(&mut tx, next, 2).unwrap();
        }
        tx
    });
    take(&rx, Block, 1);
    let tx = producer.join().unwrap();
    take(&rx, Block, 2);
    drop(tx);
}

check! {
    /// The deadline comes with the end of the producer: the end is lost, or the next wait sleeps through it.
    timeout_meets_end over [Try, Block, Timed, Async], 2, deep 3
}
fn timeout_meets_end<P: Parker>(next: Mode) {
    let (park, tx, rx) = ring::<1, P>();
    clock(&park, Timed);
    let producer = spawn(move || drop(tx));
    match rx.recv_timeout(Duration::ZERO).unwrap_err() {
        RecvTimeoutError::Abandoned => (),
        RecvTimeoutError::Timeout => assert_eq!(recv(&rx, next).unwrap_err(), RecvError::Abandoned),
        end => panic!("{end:?}"),
    }
    producer.join().unwrap();
}

check! {
    /// The deadline comes with the end of the consumer: the next wait sleeps through it.
    timeout_meets_consumer_drop over [Try, Block, Timed, Async], 2, deep 3
}
fn timeout_meets_consumer_drop<P: Parker>(next: Mode) {
    let (park, mut tx, rx) = ring::<1, P>();
    put(&mut tx, 1);
    clock(&park, Timed);
    let producer = spawn(move || match tx.acquire_timeout(Duration::ZERO).map(drop).unwrap_err() {
        AcquireTimeoutError::Closed => (),
        AcquireTimeoutError::Timeout => assert_eq!(send(&mut tx, next, 2), Err(Closed)),
    });
    drop(rx);
    producer.join().unwrap();
}

check! {
    /// A deadline that is over before the call: a slot that is ready is not given out, or the call sleeps.
    deadline_is_over, exhaustive
}
fn deadline_is_over<P: Parker>() {
    let (park, mut tx, rx) = ring::<1, P>();
    park.ring_the_bell();
    assert_eq!(rx.recv_timeout(Duration::ZERO).map(drop), Err(RecvTimeoutError::Timeout));
    let producer = spawn(move || {
        put(&mut tx, 1);
        assert_eq!(tx.acquire_timeout(Duration::ZERO).map(drop), Err(AcquireTimeoutError::Timeout));
        tx
    });
    // `Timeout` here, or the value: both are right while the commit is under way.
    let early = rx.recv_timeout(Duration::ZERO);
    if let Ok(guard) = &early {
        assert_eq!(**guard, 1);
    }
    let tx = producer.join().unwrap();
    if early.is_err() {
        assert_eq!(*rx.recv_timeout(Duration::ZERO).unwrap(), 1, "ready, so no deadline counts");
    }
    drop((early, tx));
}
