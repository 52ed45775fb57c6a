//! Real threads, random operations on both sides: nothing lost, doubled, reordered or torn.
//!
//! `TWINBUF_STRESS_HANDOFFS` sets how many hand-offs each strategy does, `TWINBUF_STRESS_SEED` where the random
//! numbers begin. A seed fixes what each side does, not how the threads are scheduled. The long run:
//!
//! ```sh
//! TWINBUF_STRESS_HANDOFFS=100000000 cargo test --release -p twinbuf-core --test stress -- --nocapture
//! ```

use std::collections::VecDeque;
use std::env;
use std::fmt::Debug;
use std::future::poll_fn;
use std::hint::spin_loop;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;
use std::sync::mpsc;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use pollster::block_on;
use twinbuf_core::{
    AcquireTimeoutError, Backoff, Closed, Consumer, FillError, Park, Producer, ReadSlot, RecvError,
    RecvTimeoutError, Ring, Spin, SpinYield, TryAcquireError, TryRecvError, WaitUntil, WriteSlot,
};

// A million together. Fewest by far for those that spin: on a busy machine the other side may not be running.
#[test]
fn spin() {
    stress(Spin, 8_000);
}

#[test]
fn spin_yield() {
    stress(SpinYield, 32_000);
}

#[test]
fn park() {
    stress(Park, 480_000);
}

#[test]
fn backoff() {
    stress(Backoff::new(100), 480_000);
}

/// Enough words that a copy is many instructions, and more than one cache line.
type Payload = [u64; 16];

/// One life of a ring's handles: what is the same for both sides.
#[derive(Clone, Copy, Debug)]
struct Round {
    seed: u64,
    depth: usize,
    /// Hand-offs that the producer will do, if it may.
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
    /// The consumer is dropped after so many.
    Close(u64),
}

impl Round {
    fn random(random: &mut Random, at_most: u64) -> Self {
        let handoffs = at_most.min(1 << random.below(14)).max(1);
        Self {
            seed: random.next(),
            // Mostly what the ring is for.
            depth: *random.choose(&[1, 2, 2, 3]),
            handoffs,
            ending: match random.below(4) {
                0 => Ending::Abandon,
                1 => Ending::Close(random.below(handoffs)),
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

    /// Gives how many were received.
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

    /// What every word of the payload with this number is.
    fn stamp(self, seq: u64) -> u64 {
        Random(self.seed ^ seq).next()
    }
}

/// Why there is no slot this time.
enum No {
    NotYet,
    AllHeld,
    Ended(Ending),
}

struct Producing {
    round: Round,
    random: Random,
    /// The first word that each slot was last left with, by whichever side, once that is known.
    left: Vec<Option<u64>>,
}

impl Producing {
    fn new(round: Round) -> Self {
        Self { round, random: Random(!round.seed), left: vec![None; round.depth] }
    }

    /// Gives how many were committed while the consumer was there.
    fn run(mut self, mut tx: Producer<'_, Payload, impl WaitUntil>) -> u64 {
        let mut seq = 0;
        while seq < self.round.handoffs {
            match self.hand_off(&mut tx, seq) {
                Ok(()) => seq += 1,
                Err(No::NotYet) => spin_loop(),
                Err(No::Ended(_)) => {
                    assert!(matches!(self.round.ending, Ending::Close(_)), "closed in {:?}", self.round);
                    assert!(tx.is_closed());
                    return seq;
                }
                Err(No::AllHeld) => unreachable!("only a consumer holds"),
            }
        }
        assert_eq!(tx.stats().handoffs, seq);
        if self.round.ending == Ending::Finish {
            tx.finish();
        }
        seq
    }

    /// Writes the next slot, and commits it or not.
    fn hand_off(&mut self, tx: &mut Producer<'_, Payload, impl WaitUntil>, seq: u64) -> Result<(), No> {
        if self.random.below(32) == 0 {
            return self.fill(tx, seq);
        }
        let stamp = self.round.stamp(seq);
        let mut slot = acquire(tx, &mut self.random)?;
        assert_eq!(slot.seq(), seq);
        self.check_what_was_left(&slot, seq);
        if self.random.below(32) == 0 {
            // Given up half-way: must not be seen.
            slot[..8].fill(!stamp);
            self.leave(seq, !stamp);
            match self.random.below(3) {
                0 => drop(slot),
                1 => slot.abort(),
                #[expect(clippy::forget_non_drop, reason = "without a drop it is a promise of the ring")]
                _ => mem::forget(slot),
            }
            return Err(No::NotYet);
        }
        slot.fill(stamp);
        slot.commit().map_err(closed)?;
        self.leave(seq, !stamp); // which the consumer does
        Ok(())
    }

    fn fill(&mut self, tx: &mut Producer<'_, Payload, impl WaitUntil>, seq: u64) -> Result<(), No> {
        let stamp = self.round.stamp(seq);
        let ending = self.random.below(4);
        let result = catch_unwind(AssertUnwindSafe(|| {
            tx.fill(|slot| {
                self.check_what_was_left(slot, seq);
                self.leave(seq, !stamp);
                match ending {
                    0 => {
                        slot.fill(!stamp);
                        Err(())
                    }
                    1 => {
                        slot.fill(!stamp);
                        resume_unwind(Box::new(())) // a panic without a message
                    }
                    _ => {
                        slot.fill(stamp);
                        Ok(())
                    }
                }
            })
        }));
        match result {
            Ok(Ok(())) => Ok(()),
            Ok(Err(FillError::Closed)) => Err(closed(Closed)),
            Ok(Err(FillError::Failed(()))) => Err(No::NotYet),
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

fn closed(Closed: Closed) -> No {
    No::Ended(Ending::Close(0))
}

fn acquire<'p, W: WaitUntil>(
    tx: &'p mut Producer<'_, Payload, W>,
    random: &mut Random,
) -> Result<WriteSlot<'p, Payload, W>, No> {
    match random.below(32) {
        0 => tx.try_acquire().map_err(|error| match error {
            TryAcquireError::Full => No::NotYet,
            TryAcquireError::Closed => closed(Closed),
        }),
        1 => tx.acquire_timeout(random.duration()).map_err(|error| match error {
            AcquireTimeoutError::Timeout => No::NotYet,
            AcquireTimeoutError::Closed => closed(Closed),
        }),
        // A task that looks once and goes away, leaving its waker.
        2 => match tx.poll_acquire(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(slot) => slot.map_err(closed),
            Poll::Pending => Err(No::NotYet),
        },
        3 => block_on(tx.acquire_async()).map_err(closed),
        _ => tx.acquire().map_err(closed),
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

    /// Gives how many were received.
    fn run(self, rx: Consumer<'_, Payload, impl WaitUntil + Sync>) -> u64 {
        let round = self.round;
        let received = thread::scope(|scope| {
            let (give, take) = mpsc::channel();
            if round.third_thread {
                scope.spawn(move || take.into_iter().for_each(|slot| release(round, slot)));
            }
            self.receive_all(&rx, &give)
        });
        drop(rx); // with the thread that may have held its guards gone
        received
    }

    fn receive_all<'c, W: WaitUntil>(
        mut self,
        rx: &'c Consumer<'_, Payload, W>,
        releaser: &mpsc::Sender<ReadSlot<'c, Payload, W>>,
    ) -> u64 {
        let mut seq = 0;
        let mut held = VecDeque::new();
        let ended = loop {
            if self.round.ending == Ending::Close(seq) {
                break self.round.ending;
            }
            match receive(rx, &mut self.random) {
                Ok(mut slot) => {
                    assert_eq!(slot.seq(), seq);
                    let stamp = self.round.stamp(seq);
                    assert_eq!(*slot, [stamp; 16], "number {seq} of {:?}", self.round);
                    slot[0] = !stamp;
                    seq += 1;
                    match self.random.below(32) {
                        0 if self.round.third_thread => releaser.send(slot).expect("taken up to the end"),
                        0..8 => held.push_back(slot),
                        _ => slot.release(),
                    }
                }
                Err(No::NotYet) => spin_loop(),
                Err(No::AllHeld) => {
                    assert!(!held.is_empty() || self.round.third_thread, "nobody holds anything");
                    // The one that the ring waits for is the oldest, and it may be the third thread's.
                    match held.pop_front() {
                        Some(slot) => release(self.round, slot),
                        None => thread::yield_now(),
                    }
                }
                Err(No::Ended(ending)) => break ending,
            }
            if held.len() > 1 || (!held.is_empty() && self.random.below(4) == 0) {
                // Any of them, in any order.
                let index = self.random.below(held.len() as u64);
                let slot = held.remove(usize::try_from(index).expect("below the length"));
                release(self.round, slot.expect("below the length"));
            }
        };
        assert_eq!(ended, self.round.ending, "after {seq} of {:?}", self.round);
        assert_eq!(rx.stats().handoffs, seq);
        held.into_iter().for_each(|slot| release(self.round, slot));
        seq
    }
}

fn receive<'c, W: WaitUntil>(
    rx: &'c Consumer<'_, Payload, W>,
    random: &mut Random,
) -> Result<ReadSlot<'c, Payload, W>, No> {
    let no = |error| match error {
        RecvError::Finished => No::Ended(Ending::Finish),
        RecvError::Abandoned => No::Ended(Ending::Abandon),
        RecvError::AllHeld => No::AllHeld,
    };
    match random.below(32) {
        0 => rx.try_recv().map_err(|error| match error {
            TryRecvError::Empty => No::NotYet,
            TryRecvError::Finished => no(RecvError::Finished),
            TryRecvError::Abandoned => no(RecvError::Abandoned),
            TryRecvError::AllHeld => no(RecvError::AllHeld),
        }),
        1 => rx.recv_timeout(random.duration()).map_err(|error| match error {
            RecvTimeoutError::Timeout => No::NotYet,
            RecvTimeoutError::Finished => no(RecvError::Finished),
            RecvTimeoutError::Abandoned => no(RecvError::Abandoned),
            RecvTimeoutError::AllHeld => no(RecvError::AllHeld),
        }),
        2 => match rx.poll_recv(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(slot) => slot.map_err(no),
            Poll::Pending => Err(No::NotYet),
        },
        3 => block_on(poll_fn(|cx| rx.poll_recv(cx))).map_err(no),
        4 => rx.iter().next().unwrap_or(Err(RecvError::Finished)).map_err(no),
        _ => rx.recv().map_err(no),
    }
}

/// Releases a slot that was held for a while: it must still be what it was.
fn release<W: WaitUntil>(round: Round, slot: ReadSlot<'_, Payload, W>) {
    let stamp = round.stamp(slot.seq());
    assert!(slot[0] == !stamp && slot[1..] == [stamp; 15], "number {} changed while held", slot.seq());
    drop(slot);
}

/// Hands over at least `handoffs` payloads, or as many as the environment says, in rounds of random length.
fn stress<W: WaitUntil + Sync + Copy + Debug>(wait: W, handoffs: u64) {
    // One strategy at a time: a round needs its two processors.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);

    let handoffs = variable("TWINBUF_STRESS_HANDOFFS").unwrap_or(handoffs);
    let seed = variable("TWINBUF_STRESS_SEED").unwrap_or(1);
    let mut random = Random(seed);
    let start = Instant::now();
    let mut done = 0;
    let mut endings = [0; 3];
    while done < handoffs {
        let round = Round::random(&mut random, handoffs - done);
        let received = catch_unwind(AssertUnwindSafe(|| round.run(wait))).unwrap_or_else(|panic| {
            eprintln!("{wait:?}: set TWINBUF_STRESS_SEED={seed} and TWINBUF_STRESS_HANDOFFS={handoffs}");
            eprintln!("{wait:?}: failed in {round:?} after {done} hand-offs");
            resume_unwind(panic)
        });
        done += received;
        endings[match round.ending {
            Ending::Finish => 0,
            Ending::Abandon => 1,
            Ending::Close(_) => 2,
        }] += 1;
    }
    // With --nocapture; also which way the lives of the rings ended.
    let time = start.elapsed();
    let each = time.as_nanos() / u128::from(done);
    println!("{wait:?}: {done} hand-offs, seed {seed}, endings {endings:?}, {time:.1?}, {each} ns each");
    assert!(done >= handoffs);
}

fn variable<T: FromStr<Err: Debug>>(name: &str) -> Option<T> {
    Some(env::var(name).ok()?.parse().unwrap_or_else(|error| panic!("{name}: {error:?}")))
}

/// `SplitMix64` (Steele, Lea and Flood, OOPSLA 2014): any seed is good.
#[derive(Clone, Copy, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `end`; not quite even, which does not matter here.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    fn choose<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[usize::try_from(self.below(from.len() as u64)).expect("below the length")]
    }

    /// From nothing at all to about as long as a wake-up by the kernel.
    fn duration(&mut self) -> Duration {
        Duration::from_micros(self.below(50))
    }
}
