//! One producer reserves slots for four threads to fill; one consumer has guards that up to two others release.
//!
//! The threads commit and release in any order. The seed chooses which reserved slots are dropped.

use std::hint::spin_loop;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{self, Receiver};
use std::thread;

use twinbuf_core::{Closed, Consumer, HeapRing, KeptSlot, Producer, ReservedSlot, WaitUntil};

use super::{No, Random, acquire, receive};

const DEPTH: u64 = 8;
const FILLERS: u64 = 4;

/// Does at most `at_most` hand-offs, and returns their number.
pub(crate) fn round<W: WaitUntil + Send + Sync>(wait: W, random: &mut Random, at_most: u64) -> u64 {
    let drops = AtomicU64::new(0);
    let round = Round {
        seed: random.next(),
        handoffs: at_most,
        ending: *random.choose(&[Ending::Joined, Ending::Early, Ending::Close]),
        releasers: random.below(3),
        drops: &drops,
    };
    round.run(wait, random.below(at_most))
}

#[derive(Clone, Copy, Debug)]
struct Round<'a> {
    seed: u64,
    handoffs: u64,
    ending: Ending,
    /// The number of threads that release guards. With none, the consumer releases them.
    releasers: u64,
    /// The number of dropped values.
    drops: &'a AtomicU64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    /// The producer finishes when every slot is filled.
    Joined,
    /// The producer finishes while slots are still being filled: the consumer waits for them.
    Early,
    /// The consumer is dropped on the way.
    Close,
}

struct Payload<'a> {
    words: [u64; 16],
    drops: &'a AtomicU64,
}

impl Drop for Payload<'_> {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Relaxed);
    }
}

impl Round<'_> {
    fn run<W: WaitUntil + Send + Sync>(self, wait: W, close_at: u64) -> u64 {
        let slots: Vec<_> = (0..DEPTH).map(|_| Payload { words: [0; 16], drops: self.drops }).collect();
        let (tx, rx) = HeapRing::with_wait(slots, wait).into_handles();
        let received = thread::scope(|scope| {
            scope.spawn(move || self.produce(tx));
            self.consume(rx, close_at)
        });
        assert_eq!(received, if self.ending == Ending::Close { close_at } else { self.handoffs }, "{self:?}");
        assert_eq!(self.drops.load(Relaxed), DEPTH, "{self:?}");
        received
    }

    fn stamp(self, seq: u64) -> u64 {
        Random(self.seed ^ seq).next()
    }

    fn is_cancelled(self, seq: u64) -> bool {
        self.stamp(seq) % 16 == 0
    }

    fn produce<W: WaitUntil + Sync>(self, mut tx: Producer<'_, Payload<'_>, W>) {
        let left = thread::scope(|scope| {
            let mut random = Random(!self.seed);
            let mut fillers: Vec<_> = (0..FILLERS)
                .map(|id| {
                    let (give, take) = mpsc::channel();
                    scope.spawn(move || {
                        in_any_order(&take, Random(self.seed.wrapping_add(id)), |slot| self.fill(slot));
                    });
                    give
                })
                .collect();
            let mut seq = 0;
            while seq < self.handoffs {
                match acquire(&mut tx, &mut random) {
                    Ok(slot) => {
                        let slot = slot.reserve();
                        assert_eq!(slot.seq(), seq, "{self:?}");
                        // Fails if that thread has panicked; the scope reports the panic.
                        let _ = random.choose(&fillers).send(slot);
                        seq += 1;
                    }
                    Err(No::NotYet) => spin_loop(),
                    Err(no) => {
                        assert_eq!((no, self.ending), (No::Closed, Ending::Close), "{self:?}");
                        break;
                    }
                }
            }
            fillers.clear(); // No more to come.
            if self.ending == Ending::Joined {
                return Some(tx);
            }
            tx.finish(); // Also after a close: then the last guard frees the ring, on the thread that holds it.
            None
        });
        // After the threads have ended.
        if let Some(tx) = left {
            tx.finish();
        }
    }

    /// Fills a reserved slot, or drops it.
    fn fill<W: WaitUntil>(self, mut slot: ReservedSlot<'_, Payload<'_>, W>) {
        let seq = slot.seq();
        let stamp = self.stamp(seq);
        assert_eq!(self.drops.load(Relaxed), 0, "freed under the guard of {seq}, {self:?}");
        if let Some(before) = seq.checked_sub(DEPTH) {
            assert_eq!(slot.words[0], !self.stamp(before), "what was left in the slot of {seq}, {self:?}");
        }
        if self.is_cancelled(seq) {
            slot.words[..8].fill(!stamp);
            return drop(slot);
        }
        slot.words.fill(stamp);
        if slot.commit() == Err(Closed) {
            assert_eq!(self.ending, Ending::Close, "closed in {self:?}");
        }
    }

    /// Returns the number of received slots.
    fn consume<W: WaitUntil + Sync>(self, mut rx: Consumer<'_, Payload<'_>, W>, close_at: u64) -> u64 {
        let mut random = Random(self.seed.rotate_left(32));
        thread::scope(|scope| {
            let releasers: Vec<_> = (0..self.releasers)
                .map(|id| {
                    let (give, take) = mpsc::channel::<KeptSlot<'_, Payload<'_>, W>>();
                    scope.spawn(move || {
                        in_any_order(&take, Random(self.seed.wrapping_sub(id)), |slot| {
                            self.check_held(slot.seq(), &slot);
                        });
                    });
                    give
                })
                .collect();
            let mut seq = 0;
            while self.ending != Ending::Close || seq < close_at {
                match receive(&mut rx, &mut random) {
                    Ok(mut slot) => {
                        let stamp = self.stamp(seq);
                        assert_eq!(slot.seq(), seq, "{self:?}");
                        assert!(!self.is_cancelled(seq), "number {seq} not cancelled in {self:?}");
                        assert_eq!(slot.words, [stamp; 16], "number {seq} of {self:?}");
                        slot.words[0] = !stamp;
                        seq += 1;
                        match &releasers[..] {
                            [] => self.check_held(slot.seq(), &slot),
                            releasers => drop(random.choose(releasers).send(slot.keep())),
                        }
                    }
                    Err(No::Cancelled) => {
                        assert!(self.is_cancelled(seq), "number {seq} cancelled in {self:?}");
                        seq += 1;
                    }
                    Err(No::NotYet) => spin_loop(),
                    Err(No::Held) => assert_ne!(self.releasers, 0, "nobody holds anything, {self:?}"),
                    Err(no) => {
                        assert_eq!(no, No::Finished, "{self:?}");
                        break;
                    }
                }
            }
            drop(rx); // before the guards that the other threads hold
            seq
        })
    }

    /// A slot that was held for a while must be unchanged.
    fn check_held(self, seq: u64, slot: &Payload<'_>) {
        let stamp = self.stamp(seq);
        assert_eq!(self.drops.load(Relaxed), 0, "freed under the guard of {seq}, {self:?}");
        let unchanged = slot.words[0] == !stamp && slot.words[1..] == [stamp; 15];
        assert!(unchanged, "number {seq} changed while held, {self:?}");
    }
}

/// Takes up to three guards at a time and processes them in any order.
fn in_any_order<G>(take: &Receiver<G>, mut random: Random, mut act: impl FnMut(G)) {
    let mut guards = Vec::new();
    loop {
        // With no guard in hand it waits: otherwise a guard kept here could be the one that all others wait for.
        match if guards.is_empty() { take.recv().ok() } else { take.try_recv().ok() } {
            Some(guard) => guards.push(guard),
            None if guards.is_empty() => return,
            None => {}
        }
        if guards.len() == 3 || random.below(2) == 0 {
            let index = random.below(guards.len() as u64);
            act(guards.swap_remove(usize::try_from(index).expect("below the length")));
        }
    }
}
