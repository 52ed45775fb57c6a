//! A task of embassy awaits blocks that an interrupt (here a thread) fills. The executor sleeps until the commit
//! wakes it.
//!
//! `cargo run --example embassy`

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use embassy_executor::Executor;
use twinbuf_core::{Consumer, DoubleBuffer, Producer, TryAcquireError};

const BLOCKS: u16 = 1000;

type Block = [u16; 64];

static RING: DoubleBuffer<Block> = DoubleBuffer::new([[0; 64]; 2]);
static DONE: AtomicBool = AtomicBool::new(false);

#[embassy_executor::task]
async fn read(mut rx: Consumer<'static, Block>) {
    while let Some(samples) = rx.recv_async().await.expect("the interrupt finishes") {
        assert!(samples.iter().all(|&sample| u64::from(sample) == samples.seq()));
    }
    DONE.store(true, Ordering::Release);
}

/// The interrupt handler: a bounded number of steps. `true` if it had a slot to fill.
fn on_interrupt(tx: &mut Producer<'static, Block>, block: u16) -> bool {
    match tx.try_acquire() {
        Ok(mut slot) => {
            slot.fill(block);
            slot.commit().is_ok() // wakes the task, if it waits
        }
        Err(TryAcquireError::Full) => false, // both slots are with the task: an overrun
        Err(error) => panic!("{error}"),
    }
}

fn main() {
    let (mut tx, rx) = RING.try_split_static().expect("split once");
    let interrupts = thread::spawn(move || {
        let (mut block, mut overruns) = (0, 0);
        while block < BLOCKS {
            if on_interrupt(&mut tx, block) {
                block += 1;
            } else {
                overruns += 1;
                thread::yield_now();
            }
        }
        tx.finish();
        overruns
    });
    let executor = Box::leak(Box::new(Executor::new()));
    executor
        .run_until(|spawner| spawner.spawn(read(rx).expect("spawned once")), || DONE.load(Ordering::Acquire));
    println!("{BLOCKS} blocks in order, {} interrupts found no free slot", interrupts.join().unwrap());
}
