//! The smallest program: one thread fills, the other reads.
//!
//! `cargo run --example hello`

use std::thread;

fn main() -> Result<(), twinbuf_core::RecvError> {
    let (mut tx, mut rx) = twinbuf_core::channel([vec![0u8; 1 << 20], vec![0u8; 1 << 20]]);
    thread::spawn(move || {
        for batch in 0..10 {
            tx.fill(|slot| slot.fill(batch))?; // in place: waits for a free slot, fills it, hands it over
        }
        tx.finish();
        Ok::<(), twinbuf_core::Closed>(())
    });
    for (number, batch) in (0u8..).zip(&mut rx) {
        let batch = batch?; // an error is in order too; the slot is released at the end of the scope
        assert!(batch.iter().all(|&byte| byte == number));
        println!("batch {number}: {} bytes", batch.len());
    }
    Ok(())
}
