//! The protocol: what one slot's word can say, and every step it can take. No atomics here.
//!
//! Each slot of a ring has one 32-bit word. The ring applies the functions of this module to that word
//! atomically; the models, the property tests and the fuzz targets call the same functions.
//!
//! # States
//!
//! ```text
//!              commit (producer)
//!        ┌──────────────────────────────┐
//!        │                              ▼
//!     ┌──┴───┐                 ┌────────────────┐
//!     │ free │                 │ FULL, lap L    │   L = parity of the lap that filled it
//!     └──▲───┘                 └────────┬───────┘
//!        │                              │
//!        └──────────────────────────────┘
//!              release (consumer)
//! ```
//!
//! A *free* slot belongs to the producer, a `FULL` one to the consumer: whoever owns a slot is the only one
//! that touches its value, and the only one that may move the word along the diagram. Nobody else writes
//! `FULL` or `LAP`.
//!
//! `WAITER` may be added by either side in either state and says: *somebody sleeps until this word changes*.
//! The next hand-off clears it and must wake. `TX_GONE`, `TX_DONE` and `RX_GONE` are *sticky*: set once when
//! a handle goes, on all words of the ring, and kept by every hand-off.
//!
//! | bits | producer reads | consumer, on its lap | consumer, `FULL` of the previous lap |
//! | --- | --- | --- | --- |
//! | none | may fill | must wait | |
//! | `FULL` | must wait | may read | held by the consumer's own guard |
//! | `TX_GONE`, not `FULL` | | abandoned, or finished with `TX_DONE` | |
//! | `TX_GONE`, `FULL` | | may read: the data comes before the end | as above |
//! | `RX_GONE` | closed | | |
//!
//! # Why one lap bit is enough
//!
//! The consumer visits the slots in order. When it comes back to a slot whose guard it never released, the
//! word is still `FULL` of the lap before, because the producer cannot refill a slot before its release: it
//! is never two laps ahead. So one bit of parity tells "the next batch" from "the one I still hold", and a
//! leaked guard costs a slot, never a second reference to it.
//!
//! # Example
//!
//! One slot, step by step:
//!
//! ```
//! use twinbuf_core::state::{ConsumerView, Lap, ProducerView, State};
//!
//! let lap = Lap::FIRST;
//! let word = State::NEW;
//! assert_eq!(word.for_producer(), ProducerView::Free);
//! assert_eq!(word.for_consumer(lap), ConsumerView::Empty);
//!
//! let word = word.announce(); // the consumer is about to sleep
//! assert!(word.has_waiter()); // whoever replaces this wakes it
//! let word = word.commit(lap);
//! assert_eq!(format!("{word:?}"), "FULL");
//! assert_eq!(word.for_producer(), ProducerView::Full);
//! assert_eq!(word.for_consumer(lap), ConsumerView::Full);
//! assert_eq!(word.for_consumer(lap.next()), ConsumerView::AllHeld); // the consumer's own guard is alive
//!
//! let word = word.with(State::ABANDON); // the producer is gone, the data comes first
//! assert_eq!(word.for_consumer(lap), ConsumerView::Full);
//! assert_eq!(word.release().for_consumer(lap.next()), ConsumerView::Abandoned);
//! ```

use core::fmt;

/// The parity of a handle's lap around the ring: flips each time its index wraps to zero.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Lap(u32);

impl Lap {
    /// The lap in which both handles start.
    pub const FIRST: Lap = Lap(0);

    /// The parity of the lap that follows.
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
pub struct State(u32);

/// What the producer may do with the slot it would fill next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProducerView {
    /// The slot is the producer's: fill it.
    Free,
    /// The consumer has not released it yet.
    Full,
    /// The consumer is gone: whatever is filled now, nobody reads.
    Closed,
}

/// What the consumer may do with the slot it would read next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConsumerView {
    /// The slot is filled: read it.
    Full,
    /// Not filled yet.
    Empty,
    /// The producer called `finish` and everything before it has been received.
    Finished,
    /// The producer went away without `finish` and everything before that has been received.
    Abandoned,
    /// The slot is still held by the consumer's own guard of the previous lap.
    AllHeld,
}

impl State {
    const FULL: u32 = 1;
    const LAP: u32 = 1 << 1;
    const WAITER: u32 = 1 << 2;
    const TX_GONE: u32 = 1 << 3;
    const TX_DONE: u32 = 1 << 4;
    const RX_GONE: u32 = 1 << 5;
    const STICKY: u32 = Self::TX_GONE | Self::TX_DONE | Self::RX_GONE;

    /// The word of a new ring: free, nobody waits, nobody is gone.
    pub const NEW: State = State(0);
    /// The bits set on every word when the producer is dropped without `finish`.
    pub const ABANDON: State = State(Self::TX_GONE);
    /// The bits set on every word by `finish`.
    pub const FINISH: State = State(Self::TX_GONE | Self::TX_DONE);
    /// The bits set on every word when the consumer is dropped.
    pub const CLOSE: State = State(Self::RX_GONE);

    /// The state that these bits of a word mean.
    #[must_use]
    pub const fn from_bits(bits: u32) -> State {
        State(bits)
    }

    /// The bits to store in the word.
    #[must_use]
    pub const fn bits(self) -> u32 {
        self.0
    }

    /// This word with `bits` set as well: the end of a handle, in whatever state the slot is.
    #[must_use]
    pub const fn with(self, bits: State) -> State {
        State(self.0 | bits.0)
    }

    /// What the producer reads in the word of the slot that it would fill next.
    ///
    /// `Closed` wins over `Full`: a producer that waits for a consumer that is gone would wait for ever.
    #[must_use]
    pub const fn for_producer(self) -> ProducerView {
        if self.0 & Self::RX_GONE != 0 {
            ProducerView::Closed
        } else if self.0 & Self::FULL != 0 {
            ProducerView::Full
        } else {
            ProducerView::Free
        }
    }

    /// What the consumer, on lap `lap`, reads in the word of the slot that it would read next.
    ///
    /// `FULL` wins over `TX_GONE`: everything committed before the end is delivered before the end.
    #[must_use]
    pub const fn for_consumer(self, lap: Lap) -> ConsumerView {
        if self.0 & Self::FULL != 0 {
            if self.0 & Self::LAP == lap.0 { ConsumerView::Full } else { ConsumerView::AllHeld }
        } else if self.0 & Self::TX_GONE == 0 {
            ConsumerView::Empty
        } else if self.0 & Self::TX_DONE != 0 {
            ConsumerView::Finished
        } else {
            ConsumerView::Abandoned
        }
    }

    /// The producer, on lap `lap`, hands the filled slot over. Clears `WAITER`: see [`State::has_waiter`].
    #[must_use]
    pub const fn commit(self, lap: Lap) -> State {
        State(self.0 & Self::STICKY | Self::FULL | lap.0)
    }

    /// The consumer gives the slot back. Clears `WAITER`: see [`State::has_waiter`].
    #[must_use]
    pub const fn release(self) -> State {
        State(self.0 & Self::STICKY)
    }

    /// Somebody is about to sleep until the word changes.
    #[must_use]
    pub const fn announce(self) -> State {
        State(self.0 | Self::WAITER)
    }

    /// Whether the step that replaced this state must wake a waiter.
    #[must_use]
    pub const fn has_waiter(self) -> bool {
        self.0 & Self::WAITER != 0
    }

    /// Whether the consumer is gone.
    #[must_use]
    pub const fn is_closed(self) -> bool {
        self.0 & Self::RX_GONE != 0
    }
}

/// The names of the set bits, as in `FULL|LAP|WAITER`, with `free` in the place of a `FULL` that is not set.
impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [(u32, &str); 6] = [
            (State::FULL, "FULL"),
            (State::LAP, "LAP"),
            (State::WAITER, "WAITER"),
            (State::TX_GONE, "TX_GONE"),
            (State::TX_DONE, "TX_DONE"),
            (State::RX_GONE, "RX_GONE"),
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
