//! Long histories under random schedules: every wait ends, and everything arrives in order.
//!
//! This samples what loom cannot exhaust: two dozen hand-offs, try, blocking and async calls mixed, four threads. It
//! does not test orderings: shuttle's atomics are sequentially consistent. A lost wakeup is a deadlock; shuttle
//! reports it with the schedule to replay.

use std::collections::VecDeque;

use shuttle::future::block_on;
use shuttle::rand::{Rng, thread_rng};
use shuttle::sync::{Condvar, Mutex, mpsc};
use shuttle::thread;
use shuttle::{check_pct, check_random};
use twinbuf_core::{
    Consumer, KeptSlot, Producer, ReservedSlot, Ring, TryAcquireError, TryRecvError, Wait, Word,
};

const HANDOFFS: u64 = 24;
const SCHEDULES: usize = 40;

/// Sleeps on a condition variable, and sometimes returns from its wait without a reason.
struct Parker {
    lock: Mutex<()>,
    changed: Condvar,
}

impl Wait for Parker {
    fn relax(&self, round: u32) -> bool {
        round == 0 && thread_rng().gen_bool(0.25)
    }

    fn wait(&self, word: Word<'_>, expected: u32) {
        let guard = self.lock.lock().unwrap();
        if word.load() == expected && !thread_rng().gen_bool(0.25) {
            drop(self.changed.wait(guard));
        }
    }

    fn wake(&self, _word: Word<'_>) {
        drop(self.lock.lock());
        self.changed.notify_all();
    }
}

/// Fills every slot with its number, on this thread or on the thread behind `filler`.
fn produce<'r>(
    mut tx: Producer<'r, u64, Parker>,
    finish: bool,
    filler: &mpsc::Sender<ReservedSlot<'r, u64, Parker>>,
) {
    for seq in 0..HANDOFFS {
        let mut slot = loop {
            let found = match thread_rng().gen_range(0..4) {
                0 => tx.try_acquire(),
                1 => block_on(tx.acquire_async()).map_err(TryAcquireError::from),
                _ => tx.acquire().map_err(TryAcquireError::from),
            };
            let slot = match found {
                Ok(slot) => slot,
                Err(TryAcquireError::Full) => {
                    thread::yield_now();
                    continue;
                }
                Err(_closed) => return,
            };
            if thread_rng().gen_bool(0.9) {
                break slot;
            }
            drop(slot); // the next one is the same
        };
        assert_eq!(slot.seq(), seq);
        if thread_rng().gen_bool(0.5) {
            filler.send(slot.reserve()).unwrap();
            continue;
        }
        *slot = seq;
        if slot.commit().is_err() {
            return;
        }
    }
    if finish {
        tx.finish();
    }
}

/// Commits reserved slots, or drops them, in any order.
fn fill_elsewhere(slots: &mpsc::Receiver<ReservedSlot<'_, u64, Parker>>) {
    while let Ok(slot) = slots.recv() {
        if thread_rng().gen_bool(0.5) {
            thread::yield_now();
            if let Ok(later) = slots.try_recv() {
                fill(later); // before the slot that was reserved first
            }
        }
        fill(slot);
    }
}

fn fill(mut slot: ReservedSlot<'_, u64, Parker>) {
    *slot = slot.seq();
    if thread_rng().gen_bool(0.8) {
        let _closed = slot.commit();
    } // otherwise it is cancelled
}

fn consume<'r>(
    mut rx: Consumer<'r, u64, Parker>,
    until: u64,
    finish: bool,
    releaser: &mpsc::Sender<KeptSlot<'r, u64, Parker>>,
) {
    let mut held = VecDeque::new();
    let mut seq = 0;
    let end = loop {
        if seq == until {
            return;
        }
        // Another thread releases the guards that it has, but nobody else releases those held here.
        if rx.is_held() && !held.is_empty() {
            held.pop_front();
            continue;
        }
        let result = match thread_rng().gen_range(0..4) {
            0 => rx.try_recv(),
            1 => block_on(rx.recv_async()).map_err(TryRecvError::from),
            _ => rx.recv().map_err(TryRecvError::from),
        };
        match result {
            Ok(Some(slot)) => {
                assert_eq!((slot.seq(), *slot), (seq, seq));
                seq += 1;
                match thread_rng().gen_range(0..4) {
                    0 => held.push_back(slot.keep()),
                    1 => releaser.send(slot.keep()).unwrap(),
                    _ => drop(slot),
                }
            }
            Err(TryRecvError::Cancelled) => seq += 1,
            Err(TryRecvError::Empty | TryRecvError::Held) => thread::yield_now(),
            // A reserved slot is still open: its commit comes late. After `finish` the call would have waited.
            Err(_abandoned) if seq < HANDOFFS && !finish => thread::yield_now(),
            end => break end.map(|slot| slot.is_none()),
        }
        if held.len() > 1 {
            held.pop_back();
        }
    };
    assert_eq!(seq, HANDOFFS, "the end came early");
    assert_eq!(end, if finish { Ok(true) } else { Err(TryRecvError::Abandoned) });
}

/// One history: four threads, and at most `HANDOFFS` hand-offs.
fn history<const N: usize>() {
    let mut ring = Ring::with_wait([0; N], Parker { lock: Mutex::new(()), changed: Condvar::new() });
    let (tx, rx) = ring.split();
    let finish = thread_rng().gen_bool(0.5);
    // Sometimes the consumer ends first.
    let until = if thread_rng().gen_bool(0.25) { thread_rng().gen_range(0..HANDOFFS) } else { HANDOFFS + 1 };
    thread::scope(|scope| {
        let (reserve, reserved) = mpsc::channel::<ReservedSlot<'_, u64, Parker>>();
        let (give, take) = mpsc::channel::<KeptSlot<'_, u64, Parker>>();
        scope.spawn(move || fill_elsewhere(&reserved));
        scope.spawn(move || while take.recv().is_ok() {});
        scope.spawn(move || produce(tx, finish, &reserve));
        scope.spawn(move || consume(rx, until, finish, &give));
    });
}

#[test]
fn random_schedules() {
    check_random(history::<1>, SCHEDULES);
    check_random(history::<2>, SCHEDULES);
    check_random(history::<3>, SCHEDULES);
}

/// Few preemptions, at the most important places (Burckhardt et al., "A randomized scheduler with probabilistic
/// guarantees of finding bugs", ASPLOS 2010).
#[test]
fn few_preemptions() {
    check_pct(history::<1>, SCHEDULES, 4);
    check_pct(history::<2>, SCHEDULES, 4);
    check_pct(history::<3>, SCHEDULES, 4);
}
