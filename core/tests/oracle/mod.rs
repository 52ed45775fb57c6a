//! One oracle for the property test, the fuzz target and its corpus: a queue predicts, step by step, what a ring does.
//!
//! [`check`] runs a sequence of operations on a real ring and on a model, and compares the two after every step: the
//! results of the calls, the slots and their values, the wakes of tasks and of the strategy, the handles' next words by
//! the pure functions of `core/src/state.rs`, and the number of dropped values. It uses one thread; the models and the
//! stress test cover what happens between threads.

mod consuming;
mod model;
mod operation;
mod producing;
#[allow(dead_code, unreachable_pub, reason = "the ring needs more of it")]
#[path = "../../src/state.rs"]
mod state;
mod world;

use std::array;
use std::fmt::{self, Write as _};
use std::mem;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use twinbuf_core::{Closed, HeapRing, Ring};

use model::Model;
use operation::Then;
pub(crate) use operation::{Operation, Start};
use world::{Kept, Payload, Reserved, Rx, Strategy, Tx, World, Writing};

/// Runs the operations that these bytes encode: the body of the fuzz target.
pub(crate) fn replay(bytes: &[u8]) {
    let (start, operations) = Operation::decode(bytes);
    check(start, &operations);
}

/// Runs the operations on a ring of this kind. Panics where the ring differs from the model.
pub(crate) fn check(start: Start, operations: &[Operation]) {
    let world = World::default();
    let mut check = Check {
        world: &world,
        model: Model::new(start.depth),
        operations: operations.iter(),
        written: 0,
        texts: Default::default(),
    };
    if start.heap {
        check.run_owned(start.depth);
    } else {
        match start.depth {
            1 => check.run_borrowed::<1>(),
            2 => check.run_borrowed::<2>(),
            3 => check.run_borrowed::<3>(),
            4 => check.run_borrowed::<4>(),
            _ => unreachable!("1 to 4 slots"),
        }
    }
    assert!(world.tasks.iter().all(|task| Arc::strong_count(task) == 1), "the ring leaked a waker");
}

/// What follows a round.
enum Next<'w> {
    Restart,
    Reunited(Vec<Payload<'w>>),
    Nothing,
}

/// One pair of handles and their guards. The producer is separate, because a slot being written borrows it.
struct Round<'r, 'w> {
    rx: Option<Rx<'r, 'w>>,
    kept: Vec<Kept<'r, 'w>>,
    reserved: Vec<Reserved<'r, 'w>>,
    /// Leaked values that have a share of their ring. They are dropped at the end of the round, when nothing they could
    /// act on is left: a real leak would keep the memory.
    leaked: Vec<Box<dyn FnOnce() + 'r>>,
}

struct Check<'w, 'o> {
    world: &'w World,
    model: Model,
    operations: slice::Iter<'o, Operation>,
    /// The latest value written anywhere.
    written: u64,
    /// The `Debug` text of a handle, and the expected one. The buffers are reused, because this runs after every step.
    texts: [String; 2],
}

impl<'w> Check<'w, '_> {
    /// Rounds with a ring that its handles borrow.
    fn run_borrowed<const N: usize>(&mut self) {
        let world = self.world;
        let mut ring =
            Ring::with_wait(array::from_fn::<_, N, _>(|slot| world.payload(slot)), Strategy(world));
        loop {
            self.model.restart(false);
            let (tx, rx) = ring.split();
            let next = self.round(tx, rx);
            let text = format!("Ring {{ slots: {:?}, .. }}", self.model.words);
            assert_eq!(format!("{ring:?}"), text);
            let leaked = self.model.words.iter().any(|word| word.is_leaked());
            assert_eq!(leaked, self.model.leaked, "the words do not tell of a leak: {text}");
            if !matches!(next, Next::Restart) {
                break;
            }
        }
        drop(ring);
        // A leaked guard may stay in use forever, so its value must stay, and all other values with it.
        self.model.drops += if self.model.leaked { 0 } else { N as u64 };
        assert_eq!(self.world.drops.load(Relaxed), self.model.drops);
    }

    /// Rounds with rings that their handles own.
    fn run_owned(&mut self, depth: usize) {
        let mut ring = self.world.heap_ring(depth);
        loop {
            self.model.restart(true);
            let (tx, rx) = ring.into_handles();
            ring = match self.round(tx, rx) {
                Next::Restart => {
                    self.model.values.fill(0); // those of the new ring
                    self.world.heap_ring(depth)
                }
                Next::Reunited(slots) => {
                    assert!(slots.iter().map(|slot| slot.slot).eq(0..depth), "a slot changed places");
                    assert!(slots.iter().map(|slot| &slot.value).eq(&self.model.values), "a slot changed");
                    HeapRing::with_wait(slots, Strategy(self.world))
                }
                Next::Nothing => break,
            };
        }
        assert_eq!(self.world.drops.load(Relaxed), self.model.drops);
    }

    /// Runs operations on one pair of handles until the operations end or start another round.
    fn round<'r>(&mut self, tx: Tx<'r, 'w>, rx: Rx<'r, 'w>) -> Next<'w>
    where
        'w: 'r,
    {
        let mut tx = Some(tx);
        let mut round = Round { rx: Some(rx), kept: Vec::new(), reserved: Vec::new(), leaked: Vec::new() };
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
                Some(Operation::Restart) => break Next::Restart,
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
        while !round.kept.is_empty() || !round.reserved.is_empty() {
            self.compare(None, &round);
            self.consume(&mut round, Operation::Release(0));
            self.consume(&mut round, Operation::DropReserved(0));
        }
        self.compare(None, &round);
        self.end_leaks(round.leaked);
        next
    }

    /// Continues with a slot being written, up to `EndWrite` or an operation that needs the whole producer. Returns
    /// that operation.
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
                    | Operation::Restart,
                ) => {
                    self.end_write(slot, Then::Drop, round);
                    return operation;
                }
                Some(operation) => self.consume(round, operation),
            }
        }
    }

    /// A value that was never written before.
    fn fresh(&mut self) -> u64 {
        self.written += 1;
        self.written
    }

    /// The current result of a commit.
    fn committed(&self) -> Result<(), Closed> {
        if self.model.closed { Err(Closed) } else { Ok(()) }
    }

    /// Forgets a handle or a guard.
    fn leak<'r, L: 'r>(&mut self, what: Option<L>, round: &mut Round<'r, 'w>) {
        self.model.leaked |= what.is_some();
        match what {
            Some(what) if self.model.owned => round.leaked.push(Box::new(|| drop(what))),
            what => mem::forget(what),
        }
    }

    /// Frees the ring of a round in which something that had a share of it was leaked.
    fn end_leaks(&mut self, leaked: Vec<Box<dyn FnOnce() + '_>>) {
        for one in leaked {
            one();
            self.model.drop_owner();
        }
        // The model does not predict the wakes that follow.
        self.model.strategy_wakes = self.world.strategy_wakes.load(Relaxed);
        self.model.task_wakes = self.world.task_wakes();
        assert_eq!(self.world.drops.load(Relaxed), self.model.drops, "the last owner is gone");
    }

    /// Compares what is visible from outside with the model.
    fn compare(&mut self, tx: Option<&Tx<'_, 'w>>, round: &Round<'_, 'w>) {
        let model = &self.model;
        if let Some(tx) = tx {
            assert_eq!(tx.is_closed(), model.closed);
            assert_eq!((tx.len(), tx.depth()), (model.full(), model.depth()), "filled slots");
            assert_eq!(tx.is_empty(), model.full() == 0);
            compare_handle(&mut self.texts, model, "Producer", tx, model.producer.handoffs);
        }
        if let Some(rx) = &round.rx {
            assert_eq!((rx.len(), rx.depth()), (model.full(), model.depth()), "filled slots");
            assert_eq!(rx.is_empty(), model.full() == 0);
            compare_handle(&mut self.texts, model, "Consumer", rx, model.consumer.handoffs);
        }
        let kept = round.kept.iter().map(|slot| (slot.seq(), &**slot));
        let reserved = round.reserved.iter().map(|slot| (slot.seq(), &**slot));
        for (seq, payload) in kept.chain(reserved) {
            assert_eq!(payload.slot, model.place(seq).0, "a guard changed slots");
            assert_eq!(payload.value, model.values[payload.slot], "a slot changed under its guard");
        }
        let world = self.world;
        assert_eq!(world.strategy_wakes.load(Relaxed), model.strategy_wakes, "wakes of the strategy");
        assert_eq!(world.task_wakes(), model.task_wakes, "wakes of tasks");
        assert_eq!(world.drops.load(Relaxed), model.drops, "a value was dropped");
    }
}

/// The `Debug` of a handle shows how many slots it has passed and the word of its next slot.
fn compare_handle(texts: &mut [String; 2], model: &Model, name: &str, handle: &dyn fmt::Debug, seq: u64) {
    let [is, should] = texts;
    is.clear();
    should.clear();
    let word = model.words[model.place(seq).0];
    write!(is, "{handle:?}").expect("a string takes it");
    write!(should, "{name} {{ seq: {seq}, next_slot: {word:?}, .. }}").expect("a string takes it");
    assert_eq!(is, should);
}
