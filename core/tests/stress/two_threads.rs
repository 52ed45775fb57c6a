//! One thread on each side, and sometimes a third thread that releases: calls of every kind of both handles.

use std::collections::VecDeque;
use std::hint::spin_loop;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::mpsc;
use std::thread;

use twinbuf_core::{Consumer, KeptSlot, Producer, Ring, WaitUntil};

use super::{No, Random, acquire, receive};

/// Does at most `at_most` hand-offs, and returns their number.
pub(crate) fn round(wait: impl WaitUntil + Sync, random: &mut Random, at_most: u64) -> u64 {
    Round::random(random, at_most).run(wait)
}

/// Large enough that a copy takes many instructions and more than one cache line.
type Payload = [u64; 16];

/// One life of a ring's handles: the parameters that both sides share.
#[derive(Clone, Copy, Debug)]
struct Round {
    seed: u64,
    depth: usize,
    /// The number of hand-offs that the producer does, unless it is stopped.
    handoffs: u64,
    ending: Ending,
    /// Whether a third thread releases some of the guards.
    third_thread: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Finish,
    /// The producer is dropped after its last hand-off.
    Abandon,
    /// The consumer is dropped after this many.
    Close(u64),
}

impl Round {
    fn random(random: &mut Random, at_most: u64) -> Self {
        Self {
            seed: random.next(),
            // Mostly what the ring is for.
            depth: *random.choose(&[1, 2, 2, 3]),
            handoffs: at_most,
            ending: match random.below(4) {
                0 => Ending::Abandon,
                1 => Ending::Close(random.below(at_most)),
                _ => Ending::Finish,
            },
            third_thread: random.below(2) == 0,
        }
    }

    fn run(self, wait: impl WaitUntil + Sync) -> u64 {
        match self.depth {
            1 => self.run_at_depth::<1>(wait),
            2 => self.run_at_depth::<2>(wait),
            _ => self.run_at_depth::<3>(wait),
        }
    }

    /// Returns the number of received slots.
    fn run_at_depth<const N: usize>(self, wait: impl WaitUntil + Sync) -> u64 {
        let mut ring = Ring::with_wait([[0; 16]; N], wait);
        let (tx, rx) = ring.split();
        let (committed, received) = thread::scope(|scope| {
            let producer = scope.spawn(|| Producing::new(self).run(tx));
            let received = Consuming::new(self).run(rx);
            (producer.join(), received)
        });
        let committed = committed.unwrap_or_else(|panic| resume_unwind(panic));
        match self.ending {
            Ending::Finish | Ending::Abandon => {
                assert_eq!((committed, received), (self.handoffs, self.handoffs), "{self:?}");
            }
            Ending::Close(after) => {
                assert_eq!(received, after, "{self:?}");
                assert!((after..=after + N as u64).contains(&committed), "{committed} in {self:?}");
            }
        }
        received
    }

    /// Whether the slot with this number is reserved and dropped.
    fn is_cancelled(self, seq: u64) -> bool {
        self.stamp(seq) % 64 == 0
    }

    /// The expected value of every word of the payload with this number.
    fn stamp(self, seq: u64) -> u64 {
        Random(self.seed ^ seq).next()
    }
}

struct Producing {
    round: Round,
    random: Random,
    /// The first word that each slot was left with, by whichever side used it last, once that is known.
    left: Vec<Option<u64>>,
}

impl Producing {
    fn new(round: Round) -> Self {
        Self { round, random: Random(!round.seed), left: vec![None; round.depth] }
    }

    /// Returns the number of hand-offs.
    fn run(mut self, mut tx: Producer<'_, Payload, impl WaitUntil>) -> u64 {
        let mut seq = 0;
        while seq < self.round.handoffs {
            match self.hand_off(&mut tx, seq) {
                Ok(()) => seq += 1,
                Err(No::NotYet) => spin_loop(),
                Err(no) => {
                    assert_eq!(no, No::Closed);
                    assert!(matches!(self.round.ending, Ending::Close(_)), "closed in {:?}", self.round);
                    assert!(tx.is_closed());
                    return seq;
                }
            }
        }
        if self.round.ending == Ending::Finish {
            tx.finish();
        }
        seq
    }

    /// Writes the next slot, and commits it or not.
    fn hand_off(&mut self, tx: &mut Producer<'_, Payload, impl WaitUntil>, seq: u64) -> Result<(), No> {
        if self.random.below(32) == 0 && !self.round.is_cancelled(seq) {
            return self.fill(tx, seq);
        }
        let stamp = self.round.stamp(seq);
        let mut slot = acquire(tx, &mut self.random)?;
        assert_eq!(slot.seq(), seq);
        self.check_what_was_left(&slot, seq);
        if self.random.below(32) == 0 {
            // Given up half-filled: it must not be seen.
            slot[..8].fill(!stamp);
            self.leave(seq, !stamp);
            match self.random.below(2) {
                0 => drop(slot),
                #[expect(clippy::forget_non_drop, reason = "without a drop it is a promise of the ring")]
                _ => mem::forget(slot),
            }
            return Err(No::NotYet);
        }
        if self.round.is_cancelled(seq) {
            slot[..8].fill(!stamp);
            drop(slot.reserve());
            self.leave(seq, !stamp);
            return Ok(());
        }
        slot.fill(stamp);
        if self.random.below(8) == 0 {
            slot.reserve().commit()?;
        } else {
            slot.commit()?;
        }
        self.leave(seq, !stamp); // the consumer writes this
        Ok(())
    }

    fn fill(&mut self, tx: &mut Producer<'_, Payload, impl WaitUntil>, seq: u64) -> Result<(), No> {
        let stamp = self.round.stamp(seq);
        let panics = self.random.below(4) == 0;
        let result = catch_unwind(AssertUnwindSafe(|| {
            tx.fill(|slot| {
                self.check_what_was_left(slot, seq);
                self.leave(seq, !stamp);
                slot.fill(if panics { !stamp } else { stamp });
                if panics {
                    resume_unwind(Box::new(())) // a panic without a message
                }
            })
        }));
        match result {
            Ok(filled) => Ok(filled?),
            Err(panic) => match panic.downcast::<()>() {
                Ok(_) => Err(No::NotYet),
                Err(panic) => resume_unwind(panic),
            },
        }
    }

    fn leave(&mut self, seq: u64, first: u64) {
        let slot = usize::try_from(seq % self.round.depth as u64).expect("below the depth");
        self.left[slot] = Some(first);
    }

    /// The consumer writes to every slot too, and the producer must see that.
    fn check_what_was_left(&self, slot: &Payload, seq: u64) {
        let index = usize::try_from(seq % self.round.depth as u64).expect("below the depth");
        if let Some(first) = self.left[index] {
            assert_eq!(slot[0], first, "what was left in the slot of {seq}");
        }
    }
}

struct Consuming {
    round: Round,
    random: Random,
}

impl Consuming {
    fn new(round: Round) -> Self {
        Self { round, random: Random(round.seed.rotate_left(32)) }
    }

    /// Returns the number of received slots.
    fn run(self, mut rx: Consumer<'_, Payload, impl WaitUntil + Sync>) -> u64 {
        let round = self.round;
        let received = thread::scope(|scope| {
            let (give, take) = mpsc::channel();
            if round.third_thread {
                scope.spawn(move || take.into_iter().for_each(|slot| release(round, slot)));
            }
            self.receive_all(&mut rx, &give)
        });
        drop(rx); // after the thread that may have held its guards has ended
        received
    }

    fn receive_all<'r, W: WaitUntil>(
        mut self,
        rx: &mut Consumer<'r, Payload, W>,
        releaser: &mpsc::Sender<KeptSlot<'r, Payload, W>>,
    ) -> u64 {
        let mut seq = 0;
        let mut held = VecDeque::new();
        let ended = loop {
            if self.round.ending == Ending::Close(seq) {
                break self.round.ending;
            }
            // The ring waits for the oldest guard. If that guard is ours, nobody else drops it.
            if rx.is_held() {
                assert!(!held.is_empty() || self.round.third_thread, "nobody holds anything");
                if let Some(slot) = held.pop_front() {
                    release(self.round, slot);
                }
                if !held.is_empty() {
                    continue;
                }
            }
            let received = if self.random.below(32) == 0 {
                match rx.recv().map(|slot| slot.map(twinbuf_core::ReadSlot::keep)) {
                    Ok(Some(mut slot)) => {
                        self.check(slot.seq(), &mut slot, seq);
                        held.push_back(slot);
                        Ok(())
                    }
                    Err(error) => Err(error.into()),
                    Ok(None) => Err(No::Finished),
                }
            } else {
                receive(rx, &mut self.random).map(|mut slot| {
                    self.check(slot.seq(), &mut slot, seq);
                    match self.random.below(32) {
                        0 if self.round.third_thread => {
                            releaser.send(slot.keep()).expect("taken up to the end");
                        }
                        0..8 => held.push_back(slot.keep()),
                        _ => drop(slot),
                    }
                })
            };
            match received {
                Ok(()) => seq += 1,
                Err(No::NotYet) => spin_loop(),
                Err(No::Held) => thread::yield_now(),
                Err(No::Cancelled) => {
                    assert!(self.round.is_cancelled(seq), "number {seq} cancelled in {:?}", self.round);
                    seq += 1;
                }
                Err(No::Finished) => break Ending::Finish,
                Err(No::Abandoned) => break Ending::Abandon,
                Err(No::Closed) => unreachable!("only a producer is told"),
            }
            if held.len() > 1 || (!held.is_empty() && self.random.below(4) == 0) {
                // Any of them, in any order.
                let index = self.random.below(held.len() as u64);
                let slot = held.remove(usize::try_from(index).expect("below the length"));
                release(self.round, slot.expect("below the length"));
            }
        };
        assert_eq!(ended, self.round.ending, "after {seq} of {:?}", self.round);
        held.into_iter().for_each(|slot| release(self.round, slot));
        seq
    }

    /// Checks what was received as number `seq`, and writes to it.
    fn check(&self, found: u64, slot: &mut Payload, seq: u64) {
        assert_eq!(found, seq);
        assert!(!self.round.is_cancelled(seq), "number {seq} not cancelled in {:?}", self.round);
        let stamp = self.round.stamp(seq);
        assert_eq!(*slot, [stamp; 16], "number {seq} of {:?}", self.round);
        slot[0] = !stamp;
    }
}

/// Releases a slot that was held for a while: it must be unchanged.
fn release<W: WaitUntil>(round: Round, slot: KeptSlot<'_, Payload, W>) {
    let stamp = round.stamp(slot.seq());
    assert!(slot[0] == !stamp && slot[1..] == [stamp; 15], "number {} changed while held", slot.seq());
    drop(slot);
}
