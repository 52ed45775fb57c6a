//! The smallest program: one thread fills, the other reads.
//!
//! `cargo run --example smallest`

use std::thread;

use twinbuf_core::HeapRing;

fn main() -> Result<(), twinbuf_core::RecvError> {
    let (mut tx, mut rx) = HeapRing::from_fn(2, |_| vec![0u8; 1 << 20]).into_handles();
    thread::spawn(move || {
        for batch in 0..10 {
            tx.fill(|slot| slot.fill(batch))?; // in place: waits for a free slot, fills it, hands it over
        }
        tx.finish();
        Ok::<(), twinbuf_core::Closed>(())
    });
    while let Some(batch) = rx.recv()? {
        // an error comes in order too
        println!("batch {}: {} bytes of {}", batch.seq(), batch.len(), batch[0]); // released at the end of the scope
    }
    Ok(())
}
