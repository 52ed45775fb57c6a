//! One oracle for every engine: what a ring does, foretold step by step by a queue.
//!
//! [`check`] runs a sequence of operations on a real ring and on a model, and compares the two after every
//! step: what the calls return, the slots and their values, the statistics, the wakes of tasks and of the
//! strategy, the words as the pure functions of `twinbuf_core::state` leave them, and how many values were
//! dropped. One thread; what happens between threads is for the models and the stress test.

use std::array;
use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::future::Future;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::pin;
use std::slice;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, LazyLock};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use twinbuf_core::state::{ConsumerView, Lap, ProducerView, State};
use twinbuf_core::{
    AcquireTimeoutError, Closed, Consumer, FillError, Producer, ReadSlot, RecvError, RecvTimeoutError, Ring,
    TryAcquireError, TryRecvError, Wait, WaitUntil, WriteSlot,
};

/// One thing that a user of a ring may do. What is not possible at that point (a handle that is gone, a wait
/// that nobody would end) is skipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operation {
    /// Ask for the next slot; if there is one, write to it, and then.
    Acquire(Call, Then),
    /// End the writing that `Then::Hold` began.
    EndWrite(Then),
    Fill(Filling),
    /// Ask for the next filled slot, and hold it.
    Receive(Call),
    /// Release the `k`th held guard.
    Release(u8),
    /// Write through the `k`th held guard.
    Write(u8),
    /// Forget the `k`th held guard.
    LeakGuard(u8),
    Finish,
    DropProducer,
    DropConsumer,
    LeakProducer,
    LeakConsumer,
    /// Let both handles go and split the ring anew.
    Split,
    /// Let both handles go and turn the ring into handles that own it.
    IntoHandles,
}

/// How a slot is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Try,
    Block,
    /// The next of the iterator; a plain blocking call on the producer's side.
    Iterate,
    /// Wait for so many ticks of the [`World`]'s clock.
    Ticks(u8),
    /// With a timeout too long for the clock.
    Forever,
    /// Poll as this task.
    Poll(u8),
    /// Poll a future once as this task, and drop it.
    Await(u8),
}

/// What becomes of a slot that was acquired.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Then {
    Commit,
    Abort,
    Drop,
    Leak,
    /// Keep it while the consumer goes on, up to `EndWrite`.
    Hold,
}

/// How the closure of a `fill` ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Filling {
    Succeeds,
    Fails,
    Panics,
}

const TASKS: usize = 2;

impl Operation {
    /// Every operation, the plain ones first: a failing sequence shrinks towards them. Its index is its byte.
    pub(crate) fn all() -> &'static [Operation] {
        static ALL: LazyLock<Vec<Operation>> = LazyLock::new(Operation::list);
        &ALL
    }

    fn list() -> Vec<Operation> {
        const CALLS: [Call; 10] = [
            Call::Try,
            Call::Block,
            Call::Iterate,
            Call::Ticks(0),
            Call::Ticks(2),
            Call::Forever,
            Call::Poll(0),
            Call::Poll(1),
            Call::Await(0),
            Call::Await(1),
        ];
        const THENS: [Then; 5] = [Then::Commit, Then::Hold, Then::Abort, Then::Drop, Then::Leak];
        let mut all = Vec::new();
        for then in THENS {
            all.extend(CALLS.into_iter().filter(|&c| c != Call::Iterate).map(|c| Self::Acquire(c, then)));
        }
        all.extend(CALLS.map(Self::Receive));
        all.extend(THENS.into_iter().filter(|&then| then != Then::Hold).map(Self::EndWrite));
        all.extend([Filling::Succeeds, Filling::Fails, Filling::Panics].map(Self::Fill));
        all.extend((0..3).flat_map(|k| [Self::Release(k), Self::Write(k)]));
        all.push(Self::LeakGuard(0));
        all.extend(Self::ENDINGS);
        all
    }

    /// Those that take a handle away: much rarer than the others in a sequence that is to get anywhere.
    pub(crate) const ENDINGS: [Operation; 7] = [
        Self::Finish,
        Self::DropProducer,
        Self::DropConsumer,
        Self::LeakProducer,
        Self::LeakConsumer,
        Self::Split,
        Self::IntoHandles,
    ];

    /// The depth and the operations that these bytes say: one byte each. Any bytes say something.
    pub(crate) fn decode(bytes: &[u8]) -> (usize, Vec<Operation>) {
        let all = Self::all();
        let Some((&depth, bytes)) = bytes.split_first() else {
            return (2, Vec::new());
        };
        let operations = bytes.iter().map(|&byte| all[usize::from(byte) % all.len()]).collect();
        (usize::from(depth % 3) + 1, operations)
    }

    /// The bytes that say this, for the corpus.
    pub(crate) fn encode(depth: usize, operations: &[Operation]) -> Vec<u8> {
        let all = Self::all();
        let byte = |operation| all.iter().position(|other| other == operation);
        let bytes = operations.iter().map(|operation| byte(operation).expect("all has every operation"));
        [depth - 1].into_iter().chain(bytes).map(|byte| u8::try_from(byte).expect("a byte each")).collect()
    }
}

/// Runs what these bytes say: the body of the fuzz target.
pub(crate) fn replay(bytes: &[u8]) {
    let (depth, operations) = Operation::decode(bytes);
    check(depth, &operations);
}

/// Runs the operations on a ring of `depth` slots (1 to 3); panics where it is not as foretold.
pub(crate) fn check(depth: usize, operations: &[Operation]) {
    match depth {
        1 => check_ring::<1>(operations),
        2 => check_ring::<2>(operations),
        3 => check_ring::<3>(operations),
        _ => unreachable!("1 to 3 slots"),
    }
}

/// What the ring's foreign parts count: its clock and strategy, its tasks, its values.
#[derive(Default)]
struct World {
    now: AtomicU64,
    strategy_wakes: AtomicU64,
    tasks: [Arc<Task>; TASKS],
    drops: AtomicU64,
}

/// A task that counts how often it is woken.
#[derive(Default)]
struct Task(AtomicU64);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// A strategy without a second thread: every wait passes one tick of its clock and returns for nothing.
#[derive(Clone, Copy)]
struct Strategy<'w>(&'w World);

impl Wait for Strategy<'_> {
    fn relax(&self, round: u32) -> bool {
        round == 0
    }

    fn wait(&self, word: &AtomicU32, expected: u32) {
        panic!("would wait for ever: the word is {}, expected {expected}", word.load(Relaxed));
    }

    fn wake(&self, _word: &AtomicU32) {
        self.0.strategy_wakes.fetch_add(1, Relaxed);
    }
}

impl WaitUntil for Strategy<'_> {
    type Instant = u64;

    fn after(&self, timeout: Duration) -> Option<u64> {
        let ticks = u64::try_from(timeout.as_millis()).ok()?;
        self.0.now.load(Relaxed).checked_add(ticks)
    }

    fn expired(&self, deadline: u64) -> bool {
        self.0.now.load(Relaxed) >= deadline
    }

    fn wait_until(&self, word: &AtomicU32, expected: u32, _deadline: u64) {
        assert_eq!(word.load(Relaxed), expected, "told to wait for a word that says something else");
        self.0.now.fetch_add(1, Relaxed);
    }
}

/// A slot's value: knows its place, and counts its drop.
struct Payload<'w> {
    slot: usize,
    value: u64,
    drops: &'w AtomicU64,
}

impl Drop for Payload<'_> {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Relaxed);
    }
}

type Tx<'r, 'w> = Producer<'r, Payload<'w>, Strategy<'w>>;
type Rx<'r, 'w> = Consumer<'r, Payload<'w>, Strategy<'w>>;
type Writing<'p, 'w> = WriteSlot<'p, Payload<'w>, Strategy<'w>>;
type Reading<'c, 'w> = ReadSlot<'c, Payload<'w>, Strategy<'w>>;

/// What is counted for each side.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Stats {
    handoffs: u64,
    waits: u64,
    spurious_wakes: u64,
}

/// What the model knows of one side.
#[derive(Clone, Copy, Default)]
struct Side {
    stats: Stats,
    /// The task whose waker the ring keeps.
    registered: Option<u8>,
    /// The hand-off for which the last poll that had to wait was.
    pending: Option<u64>,
}

/// The ring as a queue.
struct Model {
    /// What was committed and not yet received.
    queue: VecDeque<u64>,
    /// Whether the consumer has a slot: by a guard, alive or leaked.
    lent: Vec<bool>,
    values: Vec<u64>,
    /// What the consumer gets after the queue, once the producer is gone.
    end: Option<TryRecvError>,
    closed: bool,
    /// Whether the handles own the ring: it is freed with the second of them.
    owned: bool,
    producer: Side,
    consumer: Side,
    words: Vec<State>,
    strategy_wakes: u64,
    task_wakes: [u64; TASKS],
    drops: u64,
}

impl Model {
    fn new(depth: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            lent: vec![false; depth],
            values: vec![0; depth],
            end: None,
            closed: false,
            owned: false,
            producer: Side::default(),
            consumer: Side::default(),
            words: vec![State::NEW; depth],
            strategy_wakes: 0,
            task_wakes: [0; TASKS],
            drops: 0,
        }
    }

    /// A new pair of handles; only the values, and what was counted outside, stay.
    fn restart(&mut self) {
        let depth = self.depth();
        let Self { values, strategy_wakes, task_wakes, drops, .. } = mem::replace(self, Self::new(depth));
        *self = Self { values, strategy_wakes, task_wakes, drops, ..Self::new(depth) };
    }

    fn depth(&self) -> usize {
        self.words.len()
    }

    /// The slot and the lap of the hand-off with this number.
    fn place(&self, seq: u64) -> (usize, Lap) {
        let depth = self.depth() as u64;
        let slot = usize::try_from(seq % depth).expect("below the depth");
        (slot, if seq / depth % 2 == 0 { Lap::FIRST } else { Lap::FIRST.next() })
    }

    fn write_place(&self) -> usize {
        self.place(self.producer.stats.handoffs).0
    }

    fn read_place(&self) -> usize {
        self.place(self.consumer.stats.handoffs).0
    }

    /// What the producer gets if it asks now.
    fn next_write(&self) -> Result<usize, TryAcquireError> {
        let slot = self.write_place();
        let (expected, view) = if self.closed {
            (Err(TryAcquireError::Closed), ProducerView::Closed)
        } else if self.queue.len() == self.depth() || self.lent[slot] {
            (Err(TryAcquireError::Full), ProducerView::Full)
        } else {
            (Ok(slot), ProducerView::Free)
        };
        assert_eq!(self.words[slot].for_producer(), view, "queue and words disagree: {:?}", self.words);
        expected
    }

    /// What the consumer gets if it asks now.
    fn next_read(&self) -> Result<usize, TryRecvError> {
        let (slot, lap) = self.place(self.consumer.stats.handoffs);
        let (expected, view) = if !self.queue.is_empty() {
            (Ok(slot), ConsumerView::Full)
        } else if self.lent[slot] {
            (Err(TryRecvError::AllHeld), ConsumerView::AllHeld)
        } else {
            match self.end {
                None => (Err(TryRecvError::Empty), ConsumerView::Empty),
                Some(TryRecvError::Finished) => (Err(TryRecvError::Finished), ConsumerView::Finished),
                Some(_) => (Err(TryRecvError::Abandoned), ConsumerView::Abandoned),
            }
        };
        assert_eq!(self.words[slot].for_consumer(lap), view, "queue and words disagree: {:?}", self.words);
        expected
    }

    fn commit(&mut self) {
        let (slot, lap) = self.place(self.producer.stats.handoffs);
        self.queue.push_back(self.values[slot]);
        self.producer.stats.handoffs += 1;
        let old = self.words[slot];
        self.words[slot] = old.commit(lap);
        if old.has_waiter() {
            self.strategy_wakes += 1;
            wake(&mut self.consumer, &mut self.task_wakes);
        }
    }

    /// The value that comes next.
    fn receive(&mut self) -> u64 {
        let slot = self.read_place();
        self.lent[slot] = true;
        self.consumer.stats.handoffs += 1;
        self.queue.pop_front().expect("foretold a slot")
    }

    fn release(&mut self, slot: usize) {
        self.lent[slot] = false;
        let old = self.words[slot];
        self.words[slot] = old.release();
        if old.has_waiter() {
            self.strategy_wakes += 1;
            wake(&mut self.producer, &mut self.task_wakes);
        }
    }

    fn drop_producer(&mut self, end: TryRecvError) {
        self.end = Some(end);
        self.producer.registered = None;
        let bits = if end == TryRecvError::Finished { State::FINISH } else { State::ABANDON };
        if self.mark(bits) {
            wake(&mut self.consumer, &mut self.task_wakes);
        }
        self.free();
    }

    fn drop_consumer(&mut self) {
        self.closed = true;
        self.consumer.registered = None;
        if self.mark(State::CLOSE) {
            wake(&mut self.producer, &mut self.task_wakes);
        }
        self.free();
    }

    /// Drops the values, if a handle that is gone now was the last to own them.
    fn free(&mut self) {
        if self.owned && self.closed && self.end.is_some() {
            self.drops += self.depth() as u64;
        }
    }

    /// Adds the bits to every word; whether anybody waits.
    fn mark(&mut self, bits: State) -> bool {
        let waiters = self.words.iter().filter(|word| word.has_waiter()).count() as u64;
        self.strategy_wakes += waiters;
        for word in &mut self.words {
            *word = word.with(bits);
        }
        waiters > 0
    }
}

fn wake(side: &mut Side, task_wakes: &mut [u64; TASKS]) {
    if let Some(task) = side.registered.take() {
        task_wakes[usize::from(task)] += 1;
    }
}

/// What a call does to `side`, whose next slot has this word, when it finds nothing (`found` is false) or
/// something.
fn call(side: &mut Side, word: &mut State, task_wakes: &mut [u64; TASKS], call: Call, found: bool) {
    match (call, found) {
        (Call::Ticks(ticks), false) => {
            side.stats.waits += 1;
            side.stats.spurious_wakes += u64::from(ticks);
            if ticks > 0 {
                *word = word.announce();
            }
        }
        (Call::Poll(task) | Call::Await(task), false) => {
            let handoff = side.stats.handoffs;
            if side.pending.replace(handoff) == Some(handoff) {
                side.stats.spurious_wakes += 1;
            } else {
                side.stats.waits += 1;
            }
            if let Some(other) = side.registered.replace(task).filter(|&other| other != task) {
                task_wakes[usize::from(other)] += 1;
            }
            *word = word.announce();
        }
        _ => {}
    }
}

/// Why a round with one pair of handles is over.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Next {
    Split,
    IntoHandles,
    Nothing,
}

struct Check<'w, 'o> {
    world: &'w World,
    model: Model,
    operations: slice::Iter<'o, Operation>,
    /// The last value that was written anywhere.
    written: u64,
    next: Next,
    /// What a handle says in `Debug`, and what it should say. Kept: this is done after every step.
    texts: [String; 2],
}

fn check_ring<const N: usize>(operations: &[Operation]) {
    let world = World::default();
    let ring = || {
        let slots = array::from_fn::<_, N, _>(|slot| Payload { slot, value: 0, drops: &world.drops });
        Ring::with_wait(slots, Strategy(&world))
    };
    let mut check = Check {
        world: &world,
        model: Model::new(N),
        operations: operations.iter(),
        written: 0,
        next: Next::Split,
        texts: Default::default(),
    };
    let mut current = ring();
    loop {
        check.model.restart();
        match check.next {
            Next::Split => {
                let (tx, rx) = current.split();
                check.round(tx, rx);
                let words = &check.model.words;
                assert_eq!(format!("{current:?}"), format!("Ring {{ slots: {words:?}, .. }}"));
            }
            Next::IntoHandles => {
                let (tx, rx) = mem::replace(&mut current, ring()).into_handles();
                check.model.owned = true;
                check.round(tx, rx);
                check.model.values.fill(0); // those of the new ring
            }
            Next::Nothing => break,
        }
    }
    let slots = current.into_inner();
    assert!(slots.iter().map(|slot| slot.slot).eq(0..N), "a slot changed places");
    assert!(slots.iter().map(|slot| slot.value).eq(check.model.values));
    assert_eq!(world.drops.load(Relaxed), check.model.drops);
    drop(slots);
    assert_eq!(world.drops.load(Relaxed), check.model.drops + N as u64);
    assert!(world.tasks.iter().all(|task| Arc::strong_count(task) == 1), "the ring leaked a waker");
}

impl<'w> Check<'w, '_> {
    /// Runs operations on one pair of handles, until the operations end or take both away.
    fn round(&mut self, tx: Tx<'_, 'w>, rx: Rx<'_, 'w>) {
        let mut tx = Some(tx);
        self.next = Next::Nothing;
        let mut leak = false;
        let mut held = Vec::new();
        let writing = loop {
            self.compare(tx.as_ref(), Some(&rx));
            let Some(&operation) = self.operations.next() else { break None };
            match operation {
                Operation::Acquire(call, Then::Hold) => {
                    let Some(slot) = tx.as_mut().and_then(|tx| self.acquire(tx, call)) else { continue };
                    let (operation, slot) = self.hold(slot, &rx, &mut held);
                    if self.ends_consumer(operation, &mut leak) {
                        break slot;
                    }
                }
                operation if self.ends_consumer(Some(operation), &mut leak) => break None,
                operation => {
                    self.produce(&mut tx, operation);
                    self.consume(&rx, &mut held, operation);
                }
            }
        };
        while !held.is_empty() {
            self.consume(&rx, &mut held, Operation::Release(0));
        }
        drop(held);
        if leak && !self.model.owned {
            mem::forget(rx);
        } else {
            drop(rx);
            self.model.drop_consumer();
        }
        if let Some(slot) = writing {
            self.end_write(slot, Then::Commit);
        }
        while self.next == Next::Nothing {
            self.compare(tx.as_ref(), None);
            let Some(&operation) = self.operations.next() else { break };
            if !self.ends_consumer(Some(operation), &mut leak) {
                self.produce(&mut tx, operation);
            }
        }
        self.produce(&mut tx, Operation::DropProducer);
        self.compare(None, None);
    }

    /// Whether this operation takes the consumer away. `leak` is set if it is only forgotten.
    fn ends_consumer(&mut self, operation: Option<Operation>, leak: &mut bool) -> bool {
        match operation {
            Some(Operation::DropConsumer) | None => {}
            Some(Operation::LeakConsumer) => *leak = true,
            Some(Operation::Split) => self.next = Next::Split,
            Some(Operation::IntoHandles) => self.next = Next::IntoHandles,
            Some(_) => return false,
        }
        true
    }

    /// Lets the consumer go on while the producer writes. Gives the operation that ended this, and the slot if
    /// it is still being written.
    fn hold<'p, 'c>(
        &mut self,
        slot: Writing<'p, 'w>,
        rx: &'c Rx<'_, 'w>,
        held: &mut Vec<Reading<'c, 'w>>,
    ) -> (Option<Operation>, Option<Writing<'p, 'w>>) {
        loop {
            self.compare(None, Some(rx));
            let operation = self.operations.next().copied();
            match operation {
                Some(Operation::EndWrite(then)) => {
                    self.end_write(slot, then);
                    return (operation, None);
                }
                None
                | Some(
                    Operation::DropConsumer
                    | Operation::LeakConsumer
                    | Operation::Split
                    | Operation::IntoHandles,
                ) => return (operation, Some(slot)),
                Some(operation) => self.consume(rx, held, operation),
            }
        }
    }

    /// Does what of this is the producer's.
    fn produce(&mut self, tx: &mut Option<Tx<'_, 'w>>, operation: Operation) {
        let Some(handle) = tx else { return };
        let end = match operation {
            Operation::Acquire(call, then) => {
                if let Some(slot) = self.acquire(handle, call) {
                    self.end_write(slot, then);
                }
                return;
            }
            Operation::Fill(filling) => return self.fill(handle, filling),
            Operation::LeakProducer if !self.model.owned => return mem::forget(tx.take()),
            Operation::Finish => TryRecvError::Finished,
            Operation::DropProducer | Operation::LeakProducer => TryRecvError::Abandoned,
            _ => return,
        };
        match (end, tx.take()) {
            (TryRecvError::Finished, Some(tx)) => tx.finish(),
            (_, tx) => drop(tx),
        }
        self.model.drop_producer(end);
    }

    fn acquire<'p>(&mut self, tx: &'p mut Tx<'_, 'w>, call: Call) -> Option<Writing<'p, 'w>> {
        let expected = self.model.next_write();
        let closed = |Closed| TryAcquireError::Closed;
        let timed_out = |error| match error {
            AcquireTimeoutError::Timeout => TryAcquireError::Full,
            AcquireTimeoutError::Closed => TryAcquireError::Closed,
        };
        let pending = |poll| match poll {
            Poll::Ready(Ok(slot)) => Ok(slot),
            Poll::Ready(Err(Closed)) => Err(TryAcquireError::Closed),
            Poll::Pending => Err(TryAcquireError::Full),
        };
        let got = match call {
            Call::Block | Call::Iterate | Call::Forever if expected == Err(TryAcquireError::Full) => {
                return None;
            }
            Call::Try => tx.try_acquire(),
            Call::Block | Call::Iterate => tx.acquire().map_err(closed),
            Call::Ticks(ticks) => tx.acquire_timeout(Duration::from_millis(ticks.into())).map_err(timed_out),
            Call::Forever => tx.acquire_timeout(Duration::MAX).map_err(timed_out),
            Call::Poll(task) => pending(tx.poll_acquire(&mut Context::from_waker(&self.waker(task)))),
            Call::Await(task) => {
                pending(pin!(tx.acquire_async()).poll(&mut Context::from_waker(&self.waker(task))))
            }
        };
        let model = &mut self.model;
        let slot = model.write_place();
        let found = expected != Err(TryAcquireError::Full);
        self::call(&mut model.producer, &mut model.words[slot], &mut model.task_wakes, call, found);
        match got {
            Ok(got) => {
                assert_eq!(expected, Ok(got.slot), "acquired a slot");
                assert_eq!(got.seq(), model.producer.stats.handoffs);
                assert_eq!(got.value, model.values[got.slot], "the value that was left in the slot");
                Some(got)
            }
            Err(error) => {
                assert_eq!(expected, Err(error), "found no slot to acquire");
                None
            }
        }
    }

    /// A value that was not written before.
    fn fresh(&mut self) -> u64 {
        self.written += 1;
        self.written
    }

    fn end_write(&mut self, mut slot: Writing<'_, 'w>, then: Then) {
        slot.value = self.fresh();
        self.model.values[slot.slot] = slot.value;
        match then {
            Then::Commit => {
                let expected = if self.model.closed { Err(Closed) } else { Ok(()) };
                self.model.commit();
                assert_eq!(slot.commit(), expected);
            }
            Then::Abort => slot.abort(),
            #[expect(clippy::forget_non_drop, reason = "without a drop it is a promise of the ring")]
            Then::Leak => mem::forget(slot),
            Then::Drop | Then::Hold => drop(slot),
        }
    }

    fn fill(&mut self, tx: &mut Tx<'_, 'w>, filling: Filling) {
        let expected = match self.model.next_write() {
            Err(TryAcquireError::Full) => return,
            Err(TryAcquireError::Closed) => Ok(Err(FillError::Closed)),
            Ok(slot) => {
                self.model.values[slot] = self.fresh();
                match filling {
                    Filling::Succeeds => {
                        self.model.commit();
                        Ok(Ok(self.written))
                    }
                    Filling::Fails => Ok(Err(FillError::Failed("no more"))),
                    Filling::Panics => Err("broken"),
                }
            }
        };
        let value = self.written;
        // `resume_unwind` rather than `panic!`: no message, and no hook (a fuzzer's hook aborts).
        let result = catch_unwind(AssertUnwindSafe(|| {
            tx.fill(|slot| {
                slot.value = value;
                match filling {
                    Filling::Succeeds => Ok(value),
                    Filling::Fails => Err("no more"),
                    Filling::Panics => resume_unwind(Box::new("broken")),
                }
            })
        }));
        let result = result.map_err(|panic| *panic.downcast::<&str>().expect("the panic of the closure"));
        assert_eq!(result, expected);
    }

    /// Does what of this is the consumer's.
    fn consume<'c>(&mut self, rx: &'c Rx<'_, 'w>, held: &mut Vec<Reading<'c, 'w>>, operation: Operation) {
        match operation {
            Operation::Receive(call) => held.extend(self.receive(rx, call)),
            Operation::Release(k) if !held.is_empty() => {
                let slot = held.remove(usize::from(k) % held.len());
                let place = slot.slot;
                assert_eq!(slot.value, self.model.values[place], "a held slot changed");
                self.model.release(place);
                slot.release();
            }
            Operation::Write(k) if !held.is_empty() => {
                let k = usize::from(k) % held.len();
                let slot = &mut held[k];
                assert_eq!(slot.value, self.model.values[slot.slot], "a held slot changed");
                slot.value = self.fresh();
                self.model.values[slot.slot] = slot.value;
            }
            Operation::LeakGuard(k) if !held.is_empty() => {
                mem::forget(held.remove(usize::from(k) % held.len()));
            }
            _ => {}
        }
    }

    fn receive<'c>(&mut self, rx: &'c Rx<'_, 'w>, call: Call) -> Option<Reading<'c, 'w>> {
        let expected = self.model.next_read();
        let timed_out = |error| match error {
            RecvTimeoutError::Timeout => TryRecvError::Empty,
            RecvTimeoutError::Finished => TryRecvError::Finished,
            RecvTimeoutError::Abandoned => TryRecvError::Abandoned,
            RecvTimeoutError::AllHeld => TryRecvError::AllHeld,
        };
        let pending = |poll| match poll {
            Poll::Ready(Ok(slot)) => Ok(slot),
            Poll::Ready(Err(error)) => Err(TryRecvError::from(error)),
            Poll::Pending => Err(TryRecvError::Empty),
        };
        let got = match call {
            Call::Block | Call::Iterate | Call::Forever if expected == Err(TryRecvError::Empty) => {
                return None;
            }
            Call::Try => rx.try_recv(),
            Call::Block => rx.recv().map_err(TryRecvError::from),
            Call::Iterate => {
                let mut slots = rx.iter();
                let item = slots.next().unwrap_or(Err(RecvError::Finished)).map_err(TryRecvError::from);
                assert!(item.is_ok() || slots.next().is_none(), "the iterator goes on after its end");
                item
            }
            Call::Ticks(ticks) => rx.recv_timeout(Duration::from_millis(ticks.into())).map_err(timed_out),
            Call::Forever => rx.recv_timeout(Duration::MAX).map_err(timed_out),
            Call::Poll(task) => pending(rx.poll_recv(&mut Context::from_waker(&self.waker(task)))),
            Call::Await(task) => {
                pending(pin!(rx.recv_async()).poll(&mut Context::from_waker(&self.waker(task))))
            }
        };
        let model = &mut self.model;
        let slot = model.read_place();
        let found = expected != Err(TryRecvError::Empty);
        self::call(&mut model.consumer, &mut model.words[slot], &mut model.task_wakes, call, found);
        match got {
            Ok(got) => {
                assert_eq!(expected, Ok(got.slot), "received a slot");
                assert_eq!(got.seq(), model.consumer.stats.handoffs);
                assert_eq!(got.value, model.receive(), "the value that was committed");
                Some(got)
            }
            Err(error) => {
                assert_eq!(expected, Err(error), "found no slot to receive");
                None
            }
        }
    }

    fn waker(&self, task: u8) -> Waker {
        self.world.tasks[usize::from(task)].clone().into()
    }

    /// Everything that can be seen from outside, as the model has it.
    fn compare(&mut self, tx: Option<&Tx<'_, 'w>>, rx: Option<&Rx<'_, 'w>>) {
        if let Some(tx) = tx {
            let slot = self.model.write_place();
            self.compare_handle("Producer", tx, self.model.producer.stats, slot);
            let stats = tx.stats();
            assert_eq!(
                Stats { handoffs: stats.handoffs, waits: stats.waits, spurious_wakes: stats.spurious_wakes },
                self.model.producer.stats,
                "the producer's statistics"
            );
            assert_eq!(tx.is_closed(), self.model.closed);
        }
        if let Some(rx) = rx {
            let slot = self.model.read_place();
            self.compare_handle("Consumer", rx, self.model.consumer.stats, slot);
            let stats = rx.stats();
            assert_eq!(
                Stats { handoffs: stats.handoffs, waits: stats.waits, spurious_wakes: stats.spurious_wakes },
                self.model.consumer.stats,
                "the consumer's statistics"
            );
        }
        let Self { model, world, .. } = self;
        assert_eq!(world.strategy_wakes.load(Relaxed), model.strategy_wakes, "wakes of the strategy");
        for (task, (counted, expected)) in world.tasks.iter().zip(model.task_wakes).enumerate() {
            assert_eq!(counted.0.load(Relaxed), expected, "wakes of task {task}");
        }
        assert_eq!(world.drops.load(Relaxed), model.drops, "a value was dropped");
    }

    /// The handle says how many it has handled, and what the word of its next slot is.
    fn compare_handle(&mut self, name: &str, handle: &dyn fmt::Debug, stats: Stats, slot: usize) {
        let [says, should] = &mut self.texts;
        let word = self.model.words[slot];
        says.clear();
        should.clear();
        write!(says, "{handle:?}").expect("a string takes it");
        write!(should, "{name} {{ seq: {}, next_slot: {word:?}, .. }}", stats.handoffs)
            .expect("a string takes it");
        assert_eq!(says, should);
    }
}
