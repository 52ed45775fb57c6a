//! A panic while a slot is being filled: the slot stays free, and the consumer learns of the loss.

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
    assert_eq!(recv(&mut rx, mode).unwrap_err(), End::Abandoned);
    producer.join().unwrap();
}
