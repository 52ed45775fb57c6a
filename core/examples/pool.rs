//! A pool of workers whose results come in the order of the jobs.
//!
//! `cargo run --example pool`

use std::sync::{Arc, Mutex};
use std::thread;

use twinbuf_core::{HeapRing, Producer, RecvError, ReservedSlot};

const WORKERS: usize = 4;

/// What the workers take turns at. The producer goes with the last job.
struct Turn<J> {
    tx: Option<Producer<'static, Vec<u64>>>,
    jobs: J,
}

impl<J: Iterator> Turn<J> {
    /// The next job and the slot for its result. `None` after the last job, and once the consumer gave up.
    fn next(&mut self) -> Option<(J::Item, ReservedSlot<'static, Vec<u64>>)> {
        let slot = self.tx.as_mut()?.acquire().ok()?;
        if let Some(job) = self.jobs.next() {
            return Some((job, slot.reserve()));
        }
        drop(slot);
        self.tx.take()?.finish();
        None
    }
}

fn main() -> Result<(), RecvError> {
    // A slot for each worker, one that is ready, and one in use.
    let (tx, mut rx) = HeapRing::from_fn(WORKERS + 2, |_| Vec::new()).into_handles();
    let turn = Arc::new(Mutex::new(Turn { tx: Some(tx), jobs: 1..=1000 }));
    for _ in 0..WORKERS {
        let turn = Arc::clone(&turn);
        thread::spawn(move || {
            // Locked for the turn alone, not for the work.
            while let Some((job, mut slot)) = { turn.lock().expect("no turn panics").next() } {
                slot.clear();
                slot.extend((1..=job).filter(|part| job % part == 0));
                if slot.commit().is_err() {
                    break; // the consumer gave up
                }
            }
        });
    }
    let mut jobs = 0;
    while let Some(divisors) = rx.recv()? {
        // A worker that panicked would be `RecvError::Cancelled` here.
        jobs += 1;
        assert_eq!(divisors.last(), Some(&jobs));
    }
    println!("{jobs} results in order");
    Ok(())
}
