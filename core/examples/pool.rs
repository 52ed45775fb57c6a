//! A pool of workers whose results come in the order of the jobs.
//!
//! `cargo run --example pool`

use std::sync::{Arc, Mutex};
use std::thread;

use twinbuf_core::{HeapRing, Producer, RecvError, ReservedSlot};

const WORKERS: usize = 4;

/// What the workers take turns at: slots and jobs. The producer goes with the last job.
type Turn<J> = (Option<Producer<'static, Vec<u64>>>, J);

/// The next job and the slot for its result. `None` after the last job, and once the consumer gave up.
fn next<J: Iterator>(turn: &Mutex<Turn<J>>) -> Option<(J::Item, ReservedSlot<'static, Vec<u64>>)> {
    let mut looks = 0..16;
    loop {
        let mut locked = turn.lock().expect("no turn panics");
        let (tx, jobs) = &mut *locked;
        // A worker that waits for a slot with `turn` locked makes the others sleep, and each must be woken. So it first
        // checks up to 16 times whether a slot is free, and unlocks in between.
        if looks.next().is_none() || tx.as_mut()?.try_acquire().is_ok() {
            let slot = tx.as_mut()?.acquire().ok()?;
            if let Some(job) = jobs.next() {
                return Some((job, slot.reserve()));
            }
            drop(slot);
            tx.take()?.finish();
            return None;
        }
        drop(locked);
        thread::yield_now();
    }
}

fn main() -> Result<(), RecvError> {
    // A slot for each worker, one that is ready, and one in use.
    let (tx, mut rx) = HeapRing::from_fn(WORKERS + 2, |_| Vec::new()).into_handles();
    let turn = Arc::new(Mutex::new((Some(tx), 1..=1000)));
    for _ in 0..WORKERS {
        let turn = Arc::clone(&turn);
        thread::spawn(move || {
            while let Some((job, mut slot)) = next(&turn) {
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
