//! Pools of workers that finish without a counter or a join. One step of one worker may panic.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use twinbuf_core::{HeapRing, Producer};

use super::{No, Random, receive};

/// The turn of the workers: the one that holds it takes the next item and reserves a slot for it.
struct Turn {
    /// Taken by the worker that finishes.
    tx: Option<Producer<'static, u64>>,
    next: u64,
    items: u64,
    panics: Option<(u64, Step)>,
}

/// What a worker is about to do.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Acquire,
    Reserve,
    Fill,
    Return,
}

pub(crate) fn history(random: &mut Random) {
    let (workers, depth, items) = (1 + random.below(3), 1 + random.below(4), random.below(8));
    let step = *random.choose(&[Step::Acquire, Step::Reserve, Step::Fill, Step::Return]);
    let panics = Some((random.below(items + 1), step)).filter(|&(item, _)| item < items);
    let (tx, mut rx) = HeapRing::new(vec![u64::MAX; usize::try_from(depth).unwrap()]).into_handles();
    let turn = Arc::new(Mutex::new(Turn { tx: Some(tx), next: 0, items, panics }));
    let workers: Vec<_> = (0..workers)
        .map(|_| {
            let turn = turn.clone();
            thread::spawn(move || catch_unwind(AssertUnwindSafe(|| work(&turn))).is_ok())
        })
        .collect();
    drop(turn); // the last worker that goes drops the producer, if no worker has finished
    let about = (workers.len(), depth, items, panics);
    let mut seq = 0;
    let end = loop {
        match receive(&mut rx, random).map(|slot| (slot.seq(), *slot)) {
            Ok(found) => assert_eq!(found, (seq, seq), "{about:?}"),
            Err(No::Cancelled) => assert_eq!(Some((seq, Step::Fill)), panics, "{about:?}"),
            Err(No::NotYet) => continue,
            Err(end) => break end,
        }
        seq += 1;
    };
    let (expected, received) = match panics {
        Some((item, step)) if workers.len() == 1 => {
            (No::Abandoned, item + u64::from(matches!(step, Step::Fill | Step::Return)))
        }
        _ => (No::Finished, items),
    };
    assert_eq!((end, seq), (expected, received), "{about:?}");
    let panicked = workers.into_iter().map(|worker| worker.join().unwrap()).filter(|&ok| !ok).count();
    assert_eq!(panicked, usize::from(panics.is_some()), "{about:?}");
}

fn work(turn: &Mutex<Turn>) {
    loop {
        let mut held = turn.lock().unwrap_or_else(PoisonError::into_inner);
        let Turn { tx: Some(tx), next, items, panics } = &mut *held else { return };
        if next == items {
            return held.tx.take().unwrap().finish(); // others may still fill
        }
        let item = *next;
        let mut panics_at = |step| {
            if *panics == Some((item, step)) {
                *panics = None;
                resume_unwind(Box::new("no message"));
            }
        };
        panics_at(Step::Acquire);
        let slot = tx.acquire().unwrap();
        panics_at(Step::Reserve);
        let mut slot = slot.reserve();
        *next += 1;
        let fails = [Step::Fill, Step::Return].map(|step| *panics == Some((item, step)));
        drop(held);
        if fails[0] {
            resume_unwind(Box::new("no message")); // drops the guard
        }
        *slot = item;
        slot.commit().unwrap();
        if fails[1] {
            resume_unwind(Box::new("no message"));
        }
    }
}
