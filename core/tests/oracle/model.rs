//! The ring as a queue, with its words. The queue's hand-offs, waits and ends also apply pure functions of
//! `core/src/state.rs` to words, and both must give the same answers.

use std::collections::VecDeque;
use std::mem;

use twinbuf_core::{TryAcquireError, TryRecvError};

use super::operation::Call;
use super::state::{ConsumerView, Lap, ProducerView, State};
use super::world::TASKS;

/// The model's state of one handle.
#[derive(Clone, Copy, Default)]
pub(super) struct Side {
    /// Slots passed so far.
    pub(super) handoffs: u64,
    /// The task whose waker the ring keeps.
    registered: Option<u8>,
}

/// How the producer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Finished,
    Abandoned,
}

/// A place in the queue.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Reserved, and neither committed nor cancelled. A leaked slot stays in this state.
    Open,
    Committed(u64),
    Cancelled,
}

pub(super) struct Model {
    /// The places that the producer has passed and the consumer has not.
    queue: VecDeque<Place>,
    /// Whether the consumer keeps a slot with a guard, alive or leaked.
    lent: Vec<bool>,
    pub(super) values: Vec<u64>,
    /// What the consumer gets after the queue, once the producer has ended.
    end: Option<End>,
    pub(super) closed: bool,
    /// The handles own the ring: its last owner frees it.
    pub(super) owned: bool,
    /// The number of handles and guards, including leaked ones.
    pub(super) owners: usize,
    /// Whether anything was leaked since the last pair of handles was made, or earlier if the ring had ended.
    pub(super) leaked: bool,
    pub(super) producer: Side,
    pub(super) consumer: Side,
    pub(super) words: Vec<State>,
    pub(super) strategy_wakes: u64,
    pub(super) task_wakes: [u64; TASKS],
    pub(super) drops: u64,
}

impl Model {
    pub(super) fn new(depth: usize) -> Self {
        Self {
            queue: VecDeque::new(),
            lent: vec![false; depth],
            values: vec![0; depth],
            end: None,
            closed: false,
            owned: false,
            owners: 2,
            leaked: false,
            producer: Side::default(),
            consumer: Side::default(),
            words: vec![State::NEW; depth],
            strategy_wakes: 0,
            task_wakes: [0; TASKS],
            drops: 0,
        }
    }

    /// Starts with a new pair of handles. Only the values and the external counts remain. A borrowed ring has ended if
    /// anything of it was leaked.
    pub(super) fn restart(&mut self, owned: bool) {
        let old = mem::replace(self, Self::new(self.depth()));
        self.owned = owned;
        self.values = old.values;
        self.strategy_wakes = old.strategy_wakes;
        self.task_wakes = old.task_wakes;
        self.drops = old.drops;
        if old.leaked && !owned {
            self.leaked = true;
            self.closed = true;
            self.end = Some(End::Abandoned);
            self.words.fill(State::DEAD);
        }
    }

    pub(super) fn depth(&self) -> usize {
        self.words.len()
    }

    /// The slot and the lap of the hand-off with this number.
    pub(super) fn place(&self, seq: u64) -> (usize, Lap) {
        let depth = self.depth() as u64;
        let slot = usize::try_from(seq % depth).expect("below the depth");
        (slot, if seq / depth % 2 == 0 { Lap::FIRST } else { Lap::FIRST.next() })
    }

    /// The result of `len`.
    pub(super) fn full(&self) -> usize {
        let filled = self.queue.iter().filter(|&&place| place != Place::Open).count();
        filled + self.lent.iter().filter(|&&lent| lent).count()
    }

    /// What the producer gets if it asks now.
    pub(super) fn next_write(&self) -> Result<usize, TryAcquireError> {
        let (slot, lap) = self.place(self.producer.handoffs);
        let (expected, view) = if self.closed {
            (Err(TryAcquireError::Closed), ProducerView::Closed)
        } else if self.queue.len() == self.depth() && self.queue[0] == Place::Open {
            (Err(TryAcquireError::Full), ProducerView::Reserved)
        } else if self.queue.len() == self.depth() || self.lent[slot] {
            (Err(TryAcquireError::Full), ProducerView::Full)
        } else {
            (Ok(slot), ProducerView::Free)
        };
        assert_eq!(self.words[slot].for_producer(lap), view, "queue and words disagree: {:?}", self.words);
        expected
    }

    /// What the consumer gets if it asks now.
    pub(super) fn next_read(&self) -> Result<Option<usize>, TryRecvError> {
        let (slot, lap) = self.place(self.consumer.handoffs);
        let (expected, view) = match (self.queue.front(), self.end) {
            (Some(Place::Committed(_)), _) => (Ok(Some(slot)), ConsumerView::Full),
            (Some(Place::Cancelled), _) => (Err(TryRecvError::Cancelled), ConsumerView::Cancelled),
            (None, None) if self.lent[slot] => (Err(TryRecvError::Held), ConsumerView::Held),
            (None, Some(End::Finished)) => (Ok(None), ConsumerView::Finished),
            (_, Some(End::Abandoned)) => (Err(TryRecvError::Abandoned), ConsumerView::Abandoned),
            // Not filled yet: the producer exists, or it has finished and this slot is still open.
            (_, None | Some(End::Finished)) => (Err(TryRecvError::Empty), ConsumerView::Empty),
        };
        assert_eq!(self.words[slot].for_consumer(lap), view, "queue and words disagree: {:?}", self.words);
        expected
    }

    /// The slot that the producer gets as unread.
    pub(super) fn unread(&self) -> Option<usize> {
        let is_committed = |place: &Place| matches!(place, Place::Committed(_));
        let first = self.queue.iter().position(is_committed).filter(|_| self.closed)?;
        Some(self.place(self.consumer.handoffs + first as u64).0)
    }

    /// Records that the producer asked. `found`: it did not have to wait.
    pub(super) fn producer_asked(&mut self, call: Call, found: bool) {
        let (slot, _) = self.place(self.producer.handoffs);
        if !found {
            self.producer.waits(&mut self.words[slot], call);
        }
    }

    /// Same as `producer_asked`, for the consumer.
    pub(super) fn consumer_asked(&mut self, call: Call, found: bool) {
        let (slot, _) = self.place(self.consumer.handoffs);
        if !found {
            self.consumer.waits(&mut self.words[slot], call);
        }
    }

    /// Commits the acquired slot.
    pub(super) fn commit(&mut self) {
        let (slot, lap) = self.place(self.producer.handoffs);
        self.queue.push_back(Place::Committed(self.values[slot]));
        self.producer.handoffs += 1;
        if self.step(slot, |word| word.commit(lap)) {
            self.wake_consumer();
        }
    }

    /// Reserves the acquired slot.
    pub(super) fn reserve(&mut self) {
        self.queue.push_back(Place::Open);
        self.producer.handoffs += 1;
        self.owners += 1;
    }

    /// Commits the reserved slot of this hand-off.
    pub(super) fn commit_reserved(&mut self, seq: u64) {
        let (slot, lap) = self.place(seq);
        self.settle(seq, Place::Committed(self.values[slot]), |word| word.commit(lap));
    }

    /// Drops the reserved slot of this hand-off.
    pub(super) fn cancel(&mut self, seq: u64) {
        let (_, lap) = self.place(seq);
        self.settle(seq, Place::Cancelled, |word| word.cancel(lap));
    }

    fn settle(&mut self, seq: u64, place: Place, step: impl Fn(State) -> State) {
        let index = usize::try_from(seq - self.consumer.handoffs).expect("in the queue");
        assert!(self.queue[index] == Place::Open);
        self.queue[index] = place;
        if self.step(self.place(seq).0, step) {
            self.wake_consumer();
            self.wake_producer();
        }
        self.drop_owner();
    }

    /// The next value for the consumer.
    pub(super) fn committed_value(&self) -> u64 {
        match self.queue.front() {
            Some(&Place::Committed(value)) => value,
            _ => unreachable!("foretold a slot"),
        }
    }

    /// Keeps the next slot.
    pub(super) fn keep(&mut self) {
        let (slot, _) = self.place(self.consumer.handoffs);
        self.lent[slot] = true;
        self.consumer.handoffs += 1;
        self.owners += 1;
        self.queue.pop_front();
    }

    /// Releases the next slot: it was read, or it was cancelled and the consumer was told.
    pub(super) fn release(&mut self) {
        let (slot, lap) = self.place(self.consumer.handoffs);
        self.consumer.handoffs += 1;
        self.queue.pop_front();
        if self.step(slot, |word| word.release(lap)) {
            self.wake_producer();
        }
    }

    /// Drops the kept slot of this hand-off.
    pub(super) fn release_kept(&mut self, seq: u64) {
        let (slot, lap) = self.place(seq);
        self.lent[slot] = false;
        if self.step(slot, |word| word.release(lap)) {
            self.wake_producer();
            self.wake_consumer();
        }
        self.drop_owner();
    }

    pub(super) fn drop_producer(&mut self, end: End) {
        self.end.get_or_insert(end); // a ring that has ended stays abandoned
        self.producer.registered = None;
        let bits = if end == End::Finished { State::finish } else { State::abandon };
        if self.mark(self.producer.handoffs, bits) {
            self.wake_consumer();
        }
        self.drop_owner();
    }

    pub(super) fn drop_consumer(&mut self) {
        self.closed = true;
        self.consumer.registered = None;
        if self.mark(self.consumer.handoffs, State::close) {
            self.wake_producer();
        }
        self.drop_owner();
    }

    /// Removes a handle or a guard. The last one drops the values of an owned ring.
    pub(super) fn drop_owner(&mut self) {
        self.owners -= 1;
        if self.owned && self.owners == 0 {
            self.drops += self.depth() as u64;
        }
    }

    /// Adds the bits of the end to every word: those for the lap of the next visit of a handle that has passed `handoffs`
    /// slots. Returns whether anything waits.
    fn mark(&mut self, handoffs: u64, bits: impl Fn(Lap) -> State) -> bool {
        let (at, lap) = self.place(handoffs);
        let waiters = self.words.iter().filter(|word| word.has_waiter()).count() as u64;
        self.strategy_wakes += waiters;
        for (slot, word) in self.words.iter_mut().enumerate() {
            *word = word.with(bits(if slot < at { lap.next() } else { lap }));
        }
        waiters > 0
    }

    /// Replaces a word. Returns whether anything waits.
    fn step(&mut self, slot: usize, step: impl Fn(State) -> State) -> bool {
        let old = self.words[slot];
        self.words[slot] = step(old);
        self.strategy_wakes += u64::from(old.has_waiter());
        old.has_waiter()
    }

    fn wake_producer(&mut self) {
        self.producer.wake(&mut self.task_wakes);
    }

    fn wake_consumer(&mut self) {
        self.consumer.wake(&mut self.task_wakes);
    }
}

impl Side {
    /// Records a call that finds nothing in the word of the next slot.
    fn waits(&mut self, word: &mut State, call: Call) {
        match call {
            Call::Ticks(0) => {}
            Call::Ticks(_) => *word = word.announce(),
            Call::Poll(task) | Call::Await(task) => {
                self.registered = Some(task); // the one before is dropped, not woken
                *word = word.announce();
            }
            Call::Try | Call::Block | Call::Forever => {}
        }
    }

    fn wake(&mut self, task_wakes: &mut [u64; TASKS]) {
        if let Some(task) = self.registered.take() {
            task_wakes[usize::from(task)] += 1;
        }
    }
}
