//! The protocol: the bits of a slot's word, and every step the word can take. No atomics here.
//!
//! Each slot of a ring has one 32-bit word. The ring applies the functions of this module to that word atomically. The
//! oracle of the property tests and of the fuzz target compiles this file a second time and calls the same functions.
//!
//! # States
//!
//! ```text
//!                 commit, cancel (producer)
//!         ┌───────────────────────────────────────┐
//!         │                                       ▼
//!  ┌──────┴──────┐                     ┌─────────────────────┐
//!  │ free, lap L │                     │ FULL, lap L         │
//!  │             │                     │ (CANCELLED or not)  │
//!  └──────▲──────┘                     └──────────┬──────────┘
//!         │           L becomes L + 1             │
//!         └───────────────────────────────────────┘
//!                    release (consumer)
//! ```
//!
//! A *free* slot belongs to the producer, a `FULL` one to the consumer. The owner of a slot is the only one that
//! touches its value (but for `Producer::unread`) and moves the word along the diagram; either side may add bits.
//!
//! `LAP` is the parity of a lap: in a free slot, of the lap in which the producer may fill it; in a full slot, of the
//! lap in which the producer filled it.
//!
//! `CANCELLED` marks a reserved slot that was dropped without a commit: there is nothing to read, and the consumer
//! releases the slot as soon as it finds it.
//!
//! `WAITER` may be added by either side in either state: a thread or a task waits until this word changes. The next
//! hand-off clears the bit and must wake.
//!
//! `TX_GONE`, `TX_ODD`, `TX_DONE`, `RX_GONE` and `RX_ODD` are *sticky*: they are set once, when a handle is dropped,
//! and every hand-off keeps them. `TX_GONE` and `RX_GONE` are set on all words. `TX_ODD` and `RX_ODD` are set with them
//! on the words whose next visit by that handle is in an odd lap. `finish` sets `TX_DONE` as well, on all words.
//!
//! | bits | producer, on its lap | consumer, on its lap |
//! | --- | --- | --- |
//! | free, this lap | may fill | must wait |
//! | free, other lap | must wait: its own reserved slot of the lap before is still open | must wait |
//! | `FULL`, this lap | must wait | may read; skips it if `CANCELLED` |
//! | `FULL`, other lap | must wait | must wait: its own guard of the lap before is alive |
//! | `FULL`, this lap, `TX_GONE` | | as without: the data comes before the end |
//! | otherwise, `TX_GONE` without `TX_DONE` | | abandoned |
//! | otherwise, `TX_DONE`, `TX_ODD` of this lap | | finished |
//! | otherwise, `TX_DONE`, `TX_ODD` of the other lap | | must wait: the slot is reserved and still open |
//! | `RX_GONE` | closed | |
//!
//! # Why one lap bit is enough
//!
//! Both sides visit the slots in order. When the consumer returns to a slot whose guard is still alive, the word is
//! `FULL` of the previous lap, because the producer cannot refill a slot that was not released. When the producer
//! returns to a slot that it reserved and has not committed, the word is free for the previous lap, because the
//! consumer cannot release a slot that was not filled. Neither side is ever two laps ahead, so one bit of parity tells
//! the two laps apart. Leaking such a guard costs its slot; it never leads to a second reference.
//!
//! # How a leaked guard is found
//!
//! The owner of a borrowed ring gets exclusive access again only after both handles and all guards are gone or leaked.
//! The words then show a leak: a dropped handle has set `TX_GONE` or `RX_GONE`; a slot that the producer passed
//! without a commit or a drop is free for a lap other than `TX_ODD`; a slot that the consumer passed without a
//! release is `FULL` of a lap other than `RX_ODD`. After a leak the ring is `DEAD`: it never hands out a slot again.
//!
//! # Why an open slot is not the end
//!
//! A producer may finish while slots that it reserved are still open. At an open slot, the producer has passed this lap,
//! so its next visit is in the other one: `TX_ODD` tells an open slot from the end. The consumer waits there, as if the
//! producer still existed, and the guard's commit or drop wakes it. A leaked guard leaves the same word as an open one:
//! the consumer waits for it and never reads the end. Without `TX_DONE`, the consumer reads `Abandoned` at an open slot;
//! a later commit is still delivered, because `FULL` wins.

use core::fmt;

/// The parity of a handle's lap around the ring. Flips each time the handle's index wraps to zero.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct Lap(u32);

impl Lap {
    /// The lap in which both handles start.
    pub const FIRST: Lap = Lap(0);

    /// Returns the parity of the lap that follows.
    #[must_use]
    pub const fn next(self) -> Lap {
        Lap(self.0 ^ State::LAP)
    }
}

impl fmt::Debug for Lap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0 == 0 { "even" } else { "odd" })
    }
}

/// The value of one slot's word.
#[derive(Clone, Copy, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct State(u32);

/// What the producer may do with the slot that it would fill next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum ProducerView {
    /// The slot is the producer's: fill it.
    Free,
    /// The consumer has not released it yet.
    Full,
    /// The producer reserved it one lap ago and has not committed it yet.
    Reserved,
    /// The consumer is gone, or the ring is `DEAD`: nothing will read what is filled now.
    Closed,
}

/// What the consumer may do with the slot that it would read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum ConsumerView {
    /// The slot is filled: read it.
    Full,
    /// The producer reserved the slot and dropped it without a commit: release it and take the next one.
    Cancelled,
    /// Not filled yet; the producer exists, or the slot was reserved before `finish` and is open or leaked.
    Empty,
    /// The producer called `finish` and everything before it has been received.
    Finished,
    /// The producer is gone without `finish`, and this place was not committed; or the ring is `DEAD`.
    Abandoned,
    /// The slot is still held by the consumer's own guard of the previous lap.
    Held,
}

impl State {
    const FULL: u32 = 1;
    const LAP: u32 = 1 << 1;
    const WAITER: u32 = 1 << 2;
    const CANCELLED: u32 = 1 << 3;
    const TX_GONE: u32 = 1 << 4;
    const TX_ODD: u32 = 1 << 5;
    const TX_DONE: u32 = 1 << 6;
    const RX_GONE: u32 = 1 << 7;
    const RX_ODD: u32 = 1 << 8;
    const STICKY: u32 = Self::TX_GONE | Self::TX_ODD | Self::TX_DONE | Self::RX_GONE | Self::RX_ODD;

    /// The word of a new ring: free for the first lap, no waiter, both handles alive.
    pub const NEW: State = State(0);
    /// The word of a ring that never hands out a slot again, because a handle or guard was leaked before. Its bits say
    /// that both handles are gone, although new handles exist, and the slot counts as leaked.
    pub const DEAD: State = State(Self::TX_GONE | Self::TX_ODD | Self::RX_GONE);

    /// Returns the bits that a dropped producer sets in a slot's word. `next`: the lap of the producer's next visit to
    /// the slot.
    #[must_use]
    pub const fn abandon(next: Lap) -> State {
        State(Self::TX_GONE | if next.0 == 0 { 0 } else { Self::TX_ODD })
    }

    /// Returns the bits that `finish` sets in a slot's word. `next`: the lap of the producer's next visit to the slot.
    #[must_use]
    pub const fn finish(next: Lap) -> State {
        State(Self::abandon(next).0 | Self::TX_DONE)
    }

    /// Returns the bits that a dropped consumer sets in a slot's word. `next`: the lap of the consumer's next visit to
    /// the slot.
    #[must_use]
    pub const fn close(next: Lap) -> State {
        State(Self::RX_GONE | if next.0 == 0 { 0 } else { Self::RX_ODD })
    }

    /// Returns the state that these bits of a word mean.
    #[must_use]
    pub const fn from_bits(bits: u32) -> State {
        State(bits)
    }

    /// Returns the bits to store in the word.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// Returns this word with `bits` added. The end of a handle adds its bits to every word, whatever the state of the
    /// slot; the ring does so by `fetch_or`.
    #[allow(dead_code)] // for the oracle
    #[must_use]
    pub const fn with(self, bits: State) -> State {
        State(self.0 | bits.0)
    }

    /// Returns what the producer, on lap `lap`, reads in the word of the slot that it would fill next.
    ///
    /// `Closed` wins over `Full`: the consumer that would release the slot is gone.
    #[must_use]
    pub const fn for_producer(self, lap: Lap) -> ProducerView {
        if self.0 & Self::RX_GONE != 0 {
            ProducerView::Closed
        } else if self.0 & (Self::FULL | Self::LAP) == lap.0 {
            ProducerView::Free
        } else if self.0 & Self::FULL != 0 {
            ProducerView::Full
        } else {
            ProducerView::Reserved
        }
    }

    /// Returns what the consumer, on lap `lap`, reads in the word of the slot that it would read next.
    ///
    /// `FULL` wins over `TX_GONE`: if this slot was committed, it comes before the end.
    #[must_use]
    pub const fn for_consumer(self, lap: Lap) -> ConsumerView {
        if self.0 & (Self::FULL | Self::LAP) == Self::FULL | lap.0 {
            if self.0 & Self::CANCELLED != 0 { ConsumerView::Cancelled } else { ConsumerView::Full }
        } else if self.0 & Self::TX_GONE == 0 {
            if self.0 & Self::FULL != 0 { ConsumerView::Held } else { ConsumerView::Empty }
        } else if self.0 & (Self::TX_DONE | Self::RX_GONE) != Self::TX_DONE {
            // The producer was dropped without `finish`, or the ring is `DEAD`. A new producer of a `DEAD` ring can call
            // `finish`, which sets `TX_DONE`. So test `RX_GONE` too: of the words that a consumer reads, only those of a
            // `DEAD` ring have it.
            ConsumerView::Abandoned
        } else if (self.0 & Self::TX_ODD != 0) == (lap.0 != 0) {
            // The producer finished before it filled this slot again. This is the end even if the consumer's own guard
            // still holds the slot.
            ConsumerView::Finished
        } else {
            ConsumerView::Empty
        }
    }

    /// The producer hands over the slot that it filled on lap `lap`. Clears `WAITER`: see [`State::has_waiter`].
    #[must_use]
    pub const fn commit(self, lap: Lap) -> State {
        State(self.0 & Self::STICKY | Self::FULL | lap.0)
    }

    /// The producer gives up the slot that it reserved on lap `lap`. Clears `WAITER`: see [`State::has_waiter`].
    #[must_use]
    pub const fn cancel(self, lap: Lap) -> State {
        State(self.0 & Self::STICKY | Self::FULL | Self::CANCELLED | lap.0)
    }

    /// The consumer gives back the slot that was filled on lap `lap`. The slot is free for the next lap. Clears
    /// `WAITER`: see [`State::has_waiter`].
    #[must_use]
    pub const fn release(self, lap: Lap) -> State {
        State(self.0 & Self::STICKY | lap.next().0)
    }

    /// A side is about to sleep until the word changes.
    #[must_use]
    pub const fn announce(self) -> State {
        State(self.0 | Self::WAITER)
    }

    /// Whether the step that replaced this state must wake a waiter.
    #[must_use]
    pub const fn has_waiter(self) -> bool {
        self.0 & Self::WAITER != 0
    }

    /// Whether the slot is filled and not released. A cancelled slot counts as filled.
    #[must_use]
    pub const fn is_full(self) -> bool {
        self.0 & Self::FULL != 0
    }

    /// Whether the consumer is gone.
    #[must_use]
    pub const fn is_closed(self) -> bool {
        self.0 & Self::RX_GONE != 0
    }

    /// Whether the slot is committed and the consumer was dropped before it passed it: no guard of it can be alive.
    #[must_use]
    pub const fn is_unread(self) -> bool {
        let next = Lap(if self.0 & Self::RX_ODD == 0 { 0 } else { Self::LAP });
        self.is_closed() && matches!(self.for_consumer(next), ConsumerView::Full)
    }

    /// Whether a handle or the guard of this slot was leaked. Meaningful only when none of them can be alive: see the
    /// module.
    #[must_use]
    pub const fn is_leaked(self) -> bool {
        let both_gone = self.0 & Self::TX_GONE != 0 && self.0 & Self::RX_GONE != 0;
        let next_is_odd = self.0 & if self.0 & Self::FULL == 0 { Self::TX_ODD } else { Self::RX_ODD } != 0;
        !both_gone || next_is_odd != (self.0 & Self::LAP != 0)
    }
}

/// The names of the set bits, such as `FULL|LAP|WAITER`; `free` first if `FULL` is not set.
impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(u32, &str); 9] = [
            (State::FULL, "FULL"),
            (State::LAP, "LAP"),
            (State::WAITER, "WAITER"),
            (State::CANCELLED, "CANCELLED"),
            (State::TX_GONE, "TX_GONE"),
            (State::TX_ODD, "TX_ODD"),
            (State::TX_DONE, "TX_DONE"),
            (State::RX_GONE, "RX_GONE"),
            (State::RX_ODD, "RX_ODD"),
        ];
        if self.0 & State::FULL == 0 {
            f.write_str("free")?;
        }
        let mut first = self.0 & State::FULL != 0;
        for (bit, name) in NAMES {
            if self.0 & bit != 0 {
                if !first {
                    f.write_str("|")?;
                }
                first = false;
                f.write_str(name)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    extern crate std;

    use super::{ConsumerView, Lap, ProducerView, State};

    #[test]
    fn one_slot_step_by_step() {
        let lap = Lap::FIRST;
        let word = State::NEW;
        assert_eq!(word.for_producer(lap), ProducerView::Free);
        assert_eq!(word.for_producer(lap.next()), ProducerView::Reserved); // reserved a lap ago, not committed yet
        assert_eq!(word.for_consumer(lap), ConsumerView::Empty);

        let word = word.announce(); // the consumer is about to sleep
        assert!(word.has_waiter()); // the step that replaces this state wakes it
        let word = word.commit(lap);
        assert_eq!(std::format!("{word:?}"), "FULL");
        assert_eq!(word.for_producer(lap.next()), ProducerView::Full);
        assert_eq!(word.for_consumer(lap), ConsumerView::Full);
        assert_eq!(word.for_consumer(lap.next()), ConsumerView::Held); // the consumer's own guard is alive

        let word = word.with(State::finish(lap.next())); // the producer is gone, the data comes first
        assert_eq!(word.for_consumer(lap), ConsumerView::Full);
        assert_eq!(word.for_consumer(lap.next()), ConsumerView::Finished);
        assert!(word.with(State::close(lap.next())).is_leaked(), "received and not released");
        assert!(!word.with(State::close(lap)).is_leaked(), "never received");
        assert!(word.with(State::close(lap)).is_unread());
        assert!(!word.with(State::close(lap.next())).is_unread(), "received");
        let word = word.release(lap);
        assert_eq!(word.for_consumer(lap.next()), ConsumerView::Finished);
        assert_eq!(std::format!("{word:?}"), "free|LAP|TX_GONE|TX_ODD|TX_DONE");
        let open = State::NEW.with(State::finish(lap.next())); // reserved before `finish`
        assert_eq!(open.for_consumer(lap), ConsumerView::Empty);
        assert_eq!(open.cancel(lap).for_consumer(lap), ConsumerView::Cancelled);
        assert_eq!(open.commit(lap).release(lap).for_consumer(lap.next()), ConsumerView::Finished);
        assert_eq!(State::DEAD.with(State::finish(lap)).for_consumer(lap), ConsumerView::Abandoned);
        assert!(word.is_leaked(), "the consumer is not gone");
        assert!(!word.with(State::close(lap.next())).is_leaked());
        assert!(State::DEAD.is_leaked());
        assert!(
            State::NEW.with(State::abandon(lap.next())).with(State::close(lap)).is_leaked(),
            "reserved, still open"
        );
    }
}
