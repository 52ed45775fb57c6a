//! The parts of a ring that its user provides: the strategy with its clock, the tasks and the values. They count what
//! the ring does to them.

use std::array;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::task::{Wake, Waker};
use std::time::Duration;

use twinbuf_core::{Consumer, HeapRing, KeptSlot, Producer, ReservedSlot, Wait, WaitUntil, Word, WriteSlot};

pub(super) type Tx<'r, 'w> = Producer<'r, Payload<'w>, Strategy<'w>>;
pub(super) type Rx<'r, 'w> = Consumer<'r, Payload<'w>, Strategy<'w>>;
pub(super) type Writing<'p, 'r, 'w> = WriteSlot<'p, 'r, Payload<'w>, Strategy<'w>>;
pub(super) type Reserved<'r, 'w> = ReservedSlot<'r, Payload<'w>, Strategy<'w>>;
pub(super) type Kept<'r, 'w> = KeptSlot<'r, Payload<'w>, Strategy<'w>>;

pub(super) const TASKS: usize = 2;

#[derive(Default)]
pub(super) struct World {
    now: AtomicU64,
    pub(super) strategy_wakes: AtomicU64,
    pub(super) tasks: [Arc<Task>; TASKS],
    pub(super) drops: AtomicU64,
}

impl World {
    pub(super) fn waker(&self, task: u8) -> Waker {
        self.tasks[usize::from(task)].clone().into()
    }

    pub(super) fn task_wakes(&self) -> [u64; TASKS] {
        array::from_fn(|task| self.tasks[task].0.load(Relaxed))
    }

    pub(super) fn payload(&self, slot: usize) -> Payload<'_> {
        Payload { slot, value: 0, drops: &self.drops }
    }

    pub(super) fn heap_ring(&self, depth: usize) -> HeapRing<Payload<'_>, Strategy<'_>> {
        HeapRing::with_wait((0..depth).map(|slot| self.payload(slot)).collect::<Vec<_>>(), Strategy(self))
    }
}

/// A task that counts how often it is woken.
#[derive(Default)]
pub(super) struct Task(AtomicU64);

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// A strategy for a single thread: every timed wait advances its clock by one tick and returns without a wake.
#[derive(Clone, Copy)]
pub(super) struct Strategy<'w>(pub(super) &'w World);

impl Wait for Strategy<'_> {
    fn relax(&self, round: u32) -> bool {
        round == 0
    }

    fn wait(&self, word: Word<'_>, expected: u32) {
        panic!("would wait for ever: the word is {word:?}, expected {expected}");
    }

    fn wake(&self, _word: Word<'_>) {
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

    fn wait_until(&self, word: Word<'_>, expected: u32, _deadline: u64) {
        assert_eq!(word.load(), expected, "told to wait for a word that is something else");
        self.0.now.fetch_add(1, Relaxed);
    }
}

/// The value of a slot: holds its place, and counts its drop.
pub(super) struct Payload<'w> {
    pub(super) slot: usize,
    pub(super) value: u64,
    drops: &'w AtomicU64,
}

impl Drop for Payload<'_> {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Relaxed);
    }
}
