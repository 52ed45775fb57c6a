//! A DMA engine with two buffers: it fills one while the program reads the other.
//!
//! The driver gives the engine (a thread plays it) both slots of a static ring. When one is full, the engine turns to the
//! other, and the driver commits the full one. A buffer that the engine has cannot be handed out: the engine has its guard.
//!
//! `cargo run --example dma --features embedded-dma`

use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread;

use embedded_dma::WriteBuffer;
use twinbuf_core::{Closed, DoubleBuffer, ReservedSlot};

const BLOCKS: usize = 100;
type Block = [u16; 256];

static RING: DoubleBuffer<Block> = DoubleBuffer::new([[0; 256]; 2]);

/// What a driver of an engine does behind its interface: converts to the buffers that it was given, in order.
fn engine<B: WriteBuffer<Word = u16>>(buffers: Receiver<B>, full: &SyncSender<B>) {
    let mut sample = 0;
    for mut buffer in buffers {
        // SAFETY: the buffer is used by nothing else until it is sent back.
        let (address, words) = unsafe { buffer.write_buffer() };
        for word in 0..words {
            // SAFETY: within the buffer.
            unsafe { address.wrapping_add(word).write_volatile(sample) };
            sample += 1;
        }
        full.send(buffer).expect("the driver listens");
    }
}

fn main() {
    let (mut tx, mut rx) = RING.try_split_static().expect("split once");
    let (program, programmed) = sync_channel::<ReservedSlot<'static, Block>>(2);
    let (full, interrupt) = sync_channel(2);
    thread::spawn(move || engine(programmed, &full));

    let driver = thread::spawn(move || {
        for block in 0..BLOCKS {
            if block >= 2 {
                interrupt.recv().expect("the engine runs").commit()?;
            }
            program.send(tx.acquire()?.reserve()).expect("the engine runs");
        }
        drop(program); // the engine stops after these two
        interrupt.iter().try_for_each(ReservedSlot::commit)?;
        tx.finish();
        Ok::<(), Closed>(())
    });

    let mut block = 0;
    while let Some(samples) = rx.recv().expect("the driver finishes") {
        assert!(samples.iter().zip(256 * block..).all(|(&sample, expected)| usize::from(sample) == expected));
        block += 1;
    } // released here, and given to the engine again
    driver.join().unwrap().expect("the program read to the end");
    println!("{BLOCKS} blocks in order");
}
