//! One oracle for every engine: what a ring does, foretold step by step by a queue.
//!
//! [`check`] runs a sequence of operations on a real ring and on a model, and compares the two after every
//! step: what the calls return, the slots and their values, the statistics, the wakes of tasks and of the
//! strategy, the words as the pure functions of `twinbuf_core::state` leave them, and how many values were
//! dropped. One thread; what happens between threads is for the models and the stress test.

mod consuming;
mod model;
mod operation;
mod producing;
mod world;

use std::fmt::{self, Write as _};
use std::mem;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use twinbuf_core::{Closed, HeapRing};

use model::{Model, Stats};
use operation::Then;
pub(crate) use operation::{Operation, Start};
use world::{Payload, Reading, Reserved, Rx, Strategy, Tx, World, Writing};

/// Runs what these bytes encode: the body of the fuzz target.
pub(crate) fn replay(bytes: &[u8]) {
    let (start, operations) = Operation::decode(bytes);
    check(start, &operations);
}

/// Runs the operations on such a ring; panics where it is not as foretold.
pub(crate) fn check(start: Start, operations: &[Operation]) {
    let world = World::default();
    let mut check = Check {
        world: &world,
        model: Model::new(start.depth),
        operations: operations.iter(),
        written: 0,
        texts: Default::default(),
    };
    let mut ring = world.ring(start);
    let mut next = if start.owned { Next::IntoHandles } else { Next::Split };
    loop {
        next = match next {
            Next::Split => {
                check.model.restart(false);
                let (tx, rx) = ring.split();
                let next = check.round(tx, rx);
                let text = format!("{} {{ slots: {:?}, .. }}", ring.name(), check.model.words);
                assert_eq!(ring.text(), text);
                next
            }
            Next::IntoHandles => {
                check.model.restart(true);
                let (tx, rx) = mem::replace(&mut ring, world.ring(start)).into_handles();
                let next = check.round(tx, rx);
                if !matches!(next, Next::Reunited(_)) {
                    check.model.values.fill(0); // those of the new ring
                }
                next
            }
            Next::Reunited(slots) => {
                check.compare_slots(&slots);
                check.model.drops += start.depth as u64; // the ring that was to take its place
                ring = Box::new(HeapRing::with_wait(slots, Strategy(&world)));
                Next::Split
            }
            Next::Nothing => break,
        };
    }
    let slots = ring.into_values();
    check.compare_slots(&slots);
    assert_eq!(world.drops.load(Relaxed), check.model.drops);
    drop(slots);
    assert_eq!(world.drops.load(Relaxed), check.model.drops + start.depth as u64);
    assert!(world.tasks.iter().all(|task| Arc::strong_count(task) == 1), "the ring leaked a waker");
}

/// What follows a round.
enum Next<'w> {
    Split,
    IntoHandles,
    Reunited(Vec<Payload<'w>>),
    Nothing,
}

/// What one pair of handles gave out, but for the producer, which a slot that is being written borrows.
struct Round<'r, 'w> {
    rx: Option<Rx<'r, 'w>>,
    reading: Vec<Reading<'r, 'w>>,
    reserved: Vec<Reserved<'r, 'w>>,
    /// What was leaked and has a share of its ring. Dropped at the end of the round, when nothing is left that it
    /// could act on: a real leak would keep the memory.
    leaked: Vec<Box<dyn Leaked + 'r>>,
}

trait Leaked {}
impl<T> Leaked for T {}

struct Check<'w, 'o> {
    world: &'w World,
    model: Model,
    operations: slice::Iter<'o, Operation>,
    /// The last value that was written anywhere.
    written: u64,
    /// A handle's `Debug`, and what it should be. Kept: this is done after every step.
    texts: [String; 2],
}

impl<'w> Check<'w, '_> {
    /// Runs operations on one pair of handles, until the operations end or begin another round.
    fn round<'r>(&mut self, tx: Tx<'r, 'w>, rx: Rx<'r, 'w>) -> Next<'w>
    where
        'w: 'r,
    {
        let mut tx = Some(tx);
        let mut round = Round { rx: Some(rx), reading: Vec::new(), reserved: Vec::new(), leaked: Vec::new() };
        let next = loop {
            self.compare(tx.as_ref(), &round);
            let mut operation = self.operations.next().copied();
            if let Some(Operation::Acquire(call, Then::Hold)) = operation {
                let Some(slot) = tx.as_mut().and_then(|tx| self.acquire(tx, call)) else { continue };
                operation = self.hold(slot, &mut round);
            }
            match operation {
                None => break Next::Nothing,
                Some(Operation::EndWrite(_)) => {}
                Some(Operation::Split) => break Next::Split,
                Some(Operation::IntoHandles) => break Next::IntoHandles,
                Some(Operation::Reunite) => {
                    if let Some(ring) = self.reunite(&mut tx, &mut round) {
                        break Next::Reunited(ring);
                    }
                }
                Some(operation) => {
                    self.produce(&mut tx, &mut round, operation);
                    self.consume(&mut round, operation);
                }
            }
        };
        // The guards outlive the handles.
        self.consume(&mut round, Operation::DropConsumer);
        self.produce(&mut tx, &mut round, Operation::DropProducer);
        while !round.reading.is_empty() || !round.reserved.is_empty() {
            self.compare(None, &round);
            self.consume(&mut round, Operation::Release(0));
            self.consume(&mut round, Operation::DropReserved(0));
        }
        self.compare(None, &round);
        self.end_leaks(round.leaked);
        next
    }

    /// Goes on with a slot that is being written, up to `EndWrite` or an operation that needs the producer whole,
    /// which is returned.
    fn hold<'r>(&mut self, slot: Writing<'_, 'r, 'w>, round: &mut Round<'r, 'w>) -> Option<Operation>
    where
        'w: 'r,
    {
        loop {
            self.compare(None, round);
            let operation = self.operations.next().copied();
            match operation {
                Some(Operation::EndWrite(then)) => {
                    self.end_write(slot, then, round);
                    return operation;
                }
                None
                | Some(
                    Operation::Finish
                    | Operation::DropProducer
                    | Operation::LeakProducer
                    | Operation::Reunite
                    | Operation::Split
                    | Operation::IntoHandles,
                ) => {
                    self.end_write(slot, Then::Drop, round);
                    return operation;
                }
                Some(operation) => self.consume(round, operation),
            }
        }
    }

    /// A value that was not written before.
    fn fresh(&mut self) -> u64 {
        self.written += 1;
        self.written
    }

    /// What a commit returns now.
    fn committed(&self) -> Result<(), Closed> {
        if self.model.closed { Err(Closed) } else { Ok(()) }
    }

    /// Forgets a handle or a guard.
    fn leak<'r, L: 'r>(&mut self, what: Option<L>, round: &mut Round<'r, 'w>) {
        match what {
            Some(what) if self.model.owned => round.leaked.push(Box::new(what)),
            what => mem::forget(what),
        }
    }

    /// Frees the ring of a round in which something that had a share of it was leaked.
    fn end_leaks(&mut self, leaked: Vec<Box<dyn Leaked + '_>>) {
        for one in leaked {
            drop(one);
            self.model.drop_owner();
        }
        // What they wake now is not foretold.
        self.model.strategy_wakes = self.world.strategy_wakes.load(Relaxed);
        self.model.task_wakes = self.world.task_wakes();
        assert_eq!(self.world.drops.load(Relaxed), self.model.drops, "the last owner is gone");
    }

    /// The slots that a ring is taken apart into.
    fn compare_slots(&self, slots: &[Payload<'w>]) {
        assert!(slots.iter().map(|slot| slot.slot).eq(0..self.model.depth()), "a slot changed places");
        assert!(slots.iter().map(|slot| &slot.value).eq(&self.model.values), "a slot changed");
    }

    /// Everything that can be seen from outside, as the model has it.
    fn compare(&mut self, tx: Option<&Tx<'_, 'w>>, round: &Round<'_, 'w>) {
        let model = &self.model;
        if let Some(tx) = tx {
            let stats = tx.stats();
            assert_eq!(
                Stats { handoffs: stats.handoffs, waits: stats.waits, spurious_wakes: stats.spurious_wakes },
                model.producer.stats,
                "the producer's statistics"
            );
            assert_eq!(tx.is_closed(), model.closed);
            assert_eq!((tx.len(), tx.depth()), (model.full(), model.depth()), "filled slots");
            assert_eq!(tx.is_empty(), model.full() == 0);
            compare_handle(&mut self.texts, model, "Producer", tx, model.producer.stats.handoffs);
        }
        if let Some(rx) = &round.rx {
            let stats = rx.stats();
            assert_eq!(
                Stats { handoffs: stats.handoffs, waits: stats.waits, spurious_wakes: stats.spurious_wakes },
                model.consumer.stats,
                "the consumer's statistics"
            );
            assert_eq!((rx.len(), rx.depth()), (model.ready(), model.depth()), "slots to receive");
            assert_eq!(rx.is_empty(), model.ready() == 0);
            compare_handle(&mut self.texts, model, "Consumer", rx, model.consumer.stats.handoffs);
        }
        let reading = round.reading.iter().map(|slot| (slot.seq(), &**slot));
        let reserved = round.reserved.iter().map(|slot| (slot.seq(), &**slot));
        for (seq, payload) in reading.chain(reserved) {
            assert_eq!(payload.slot, model.place(seq).0, "a guard changed slots");
            assert_eq!(payload.value, model.values[payload.slot], "a slot changed under its guard");
        }
        let world = self.world;
        assert_eq!(world.strategy_wakes.load(Relaxed), model.strategy_wakes, "wakes of the strategy");
        assert_eq!(world.task_wakes(), model.task_wakes, "wakes of tasks");
        assert_eq!(world.drops.load(Relaxed), model.drops, "a value was dropped");
    }
}

/// A handle's `Debug` has how many it has handled, and the word of its next slot.
fn compare_handle(texts: &mut [String; 2], model: &Model, name: &str, handle: &dyn fmt::Debug, seq: u64) {
    let [is, should] = texts;
    is.clear();
    should.clear();
    let word = model.words[model.place(seq).0];
    write!(is, "{handle:?}").expect("a string takes it");
    write!(should, "{name} {{ seq: {seq}, next_slot: {word:?}, .. }}").expect("a string takes it");
    assert_eq!(is, should);
}
