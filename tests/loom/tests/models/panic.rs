//! A panic or an error while a slot is filled: the slot stays free, and the loss is told.

use twinbuf_core::{FillError, RecvError};

use crate::common::*;

check! {
    /// A panic while filling: what is half filled is received, the loss is taken for the end, or slept through.
    panic_while_filling over [Try, Block, Timed, Async], 2, deep 3
}
fn panic_while_filling<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<2, P>();
    put(&mut tx, 1);
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
    assert_eq!(recv(&mut rx, mode).unwrap_err(), RecvError::Abandoned);
    producer.join().unwrap();
}

check! {
    /// A fill that fails: the slot is handed over all the same, or lost to the next fill.
    fill_fails over [Try, Block, Timed, Async], 2, deep 3
}
fn fill_fails<P: Parker>(mode: Mode) {
    let (park, mut tx, mut rx) = ring::<1, P>();
    clock(&park, mode);
    let producer = spawn(move || {
        let failed: Result<(), _> = tx.try_fill(|slot| {
            *slot = 9;
            Err("no such file")
        });
        assert_eq!(failed, Err(FillError::Failed("no such file")));
        put(&mut tx, 1);
        tx
    });
    take(&mut rx, mode, 1);
    drop(producer.join().unwrap());
}
