//! Double-buffered DMA: an engine that has the next address before it needs it.
//!
//! The engine (a thread plays it) takes buffers, fills them and gives them back done. The driver keeps two of them
//! programmed, so that the engine never stops between two; the consumer reads a third. No unsafe here, and a buffer
//! that the engine still has cannot be handed out again: it has the guard.
//!
//! `cargo run --example dma`

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use twinbuf_core::{HeapRing, Park, ReservedSlot};

type Buffer = Box<[u16]>;
type Programmed = ReservedSlot<'static, Buffer, Park>;

/// Converts until it is switched off: fills what it was programmed with, in order.
fn engine(programmed: Receiver<Programmed>, done: &SyncSender<Programmed>) {
    let mut sample = 0;
    for mut buffer in programmed {
        for word in buffer.iter_mut() {
            *word = sample;
            sample += 1;
        }
        done.send(buffer).expect("the driver listens");
    }
}

fn main() {
    let (mut tx, mut rx) = HeapRing::from_fn(3, |_| Buffer::from([0; 256])).into_handles();
    let (program, programmed) = sync_channel(2);
    let (done, interrupt) = sync_channel(2);
    let dma = thread::spawn(move || engine(programmed, &done));

    let driver = thread::spawn(move || {
        for block in 0..100 {
            program.send(tx.acquire()?.reserve()).expect("the engine runs");
            if block >= 1 {
                interrupt.recv().expect("the engine runs").commit()?; // one done, one still programmed
            }
        }
        drop(program); // switches the engine off
        interrupt.iter().try_for_each(ReservedSlot::commit)?;
        tx.finish();
        Ok::<(), twinbuf_core::Closed>(())
    });

    let mut expected = 0u16;
    while let Some(block) = rx.recv().expect("the driver finishes") {
        for &word in block.iter() {
            assert_eq!(word, expected);
            expected += 1;
        }
    }
    driver.join().unwrap().expect("the consumer stayed to the end");
    dma.join().unwrap();
    println!("{expected} samples in order, two buffers always programmed");
}
