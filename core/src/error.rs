//! What can go wrong with a hand-over, one small enum for each kind of call.

use core::error::Error;
use core::fmt;

/// The consumer is gone: nothing reads what is filled from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct Closed;

/// Why [`Producer::try_acquire`](crate::Producer::try_acquire) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum TryAcquireError {
    /// The next slot is not free: the consumer has not released it, or a [`ReservedSlot`](crate::ReservedSlot) of
    /// the lap before still holds it.
    Full,
    /// The consumer is gone.
    Closed,
}

/// Why a timed acquire returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum AcquireTimeoutError {
    /// The next slot did not come free in time.
    Timeout,
    /// The consumer is gone.
    Closed,
}

/// Why [`Producer::try_fill`](crate::Producer::try_fill) handed nothing over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum FillError<E> {
    /// The consumer is gone.
    Closed,
    /// The closure failed: its slot was not committed, and the next fill gets the same slot.
    Failed(E),
}

/// Why [`Consumer::try_recv`](crate::Consumer::try_recv) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum TryRecvError {
    /// The producer has not committed the next slot yet.
    Empty,
    /// The producer called `finish`; everything it committed has been received.
    Finished,
    /// The producer is gone, and this place is not the end that `finish` sets: the producer was dropped without
    /// `finish`, or a slot that it reserved was leaked or is still open. What has been received may not be all.
    Abandoned,
    /// The producer reserved this slot and dropped it without a commit. Returned once, in the slot's place in the
    /// order; the next call returns what follows.
    Cancelled,
    /// The next slot in turn is held by a [`ReadSlot`](crate::ReadSlot) that this consumer returned a lap ago: release
    /// that first.
    SlotHeld,
}

/// Why [`Consumer::recv`](crate::Consumer::recv) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum RecvError {
    /// The producer called `finish`; everything it committed has been received.
    Finished,
    /// The producer is gone, and this place is not the end that `finish` sets: the producer was dropped without
    /// `finish`, or a slot that it reserved was leaked or is still open. What has been received may not be all.
    Abandoned,
    /// The producer reserved this slot and dropped it without a commit. Returned once, in the slot's place in the
    /// order; the next call returns what follows.
    Cancelled,
    /// The next slot in turn is held by a [`ReadSlot`](crate::ReadSlot) that this consumer returned a lap ago: release
    /// that first.
    SlotHeld,
}

/// Why a timed receive returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub enum RecvTimeoutError {
    /// The producer did not commit the next slot in time.
    Timeout,
    /// The producer called `finish`; everything it committed has been received.
    Finished,
    /// The producer is gone, and this place is not the end that `finish` sets: the producer was dropped without
    /// `finish`, or a slot that it reserved was leaked or is still open. What has been received may not be all.
    Abandoned,
    /// The producer reserved this slot and dropped it without a commit. Returned once, in the slot's place in the
    /// order; the next call returns what follows.
    Cancelled,
    /// The next slot in turn is held by a [`ReadSlot`](crate::ReadSlot) that this consumer returned a lap ago: release
    /// that first.
    SlotHeld,
}

impl From<RecvError> for RecvTimeoutError {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Finished => Self::Finished,
            RecvError::Abandoned => Self::Abandoned,
            RecvError::Cancelled => Self::Cancelled,
            RecvError::SlotHeld => Self::SlotHeld,
        }
    }
}

impl From<RecvError> for TryRecvError {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Finished => Self::Finished,
            RecvError::Abandoned => Self::Abandoned,
            RecvError::Cancelled => Self::Cancelled,
            RecvError::SlotHeld => Self::SlotHeld,
        }
    }
}

/// `?` passes a [`Closed`] on through every call of the producer.
macro_rules! from_closed {
    ($($error:ident $(<$e:ident>)?),+) => { $(
        impl $(<$e>)? From<Closed> for $error $(<$e>)? {
            fn from(_: Closed) -> Self {
                Self::Closed
            }
        }
    )+ };
}
from_closed!(TryAcquireError, AcquireTimeoutError, FillError<E>);

const CLOSED: &str = "the consumer of the ring is gone";
const FULL: &str = "the next slot is still in use";
const EMPTY: &str = "the next slot is not filled yet";
const FINISHED: &str = "the producer has finished and everything was received";
const ABANDONED: &str = "the producer is gone without a finish: the data may be incomplete";
const CANCELLED: &str = "the producer reserved this slot and dropped it without a commit";
const SLOT_HELD: &str = "the next slot is still held by a read guard: release that before receiving";

impl fmt::Display for Closed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(CLOSED)
    }
}

impl fmt::Display for TryAcquireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Full => FULL,
            Self::Closed => CLOSED,
        })
    }
}

impl fmt::Display for AcquireTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => FULL,
            Self::Closed => CLOSED,
        })
    }
}

impl<E: fmt::Display> fmt::Display for FillError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Closed => f.write_str(CLOSED),
            Self::Failed(error) => error.fmt(f),
        }
    }
}

impl fmt::Display for RecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Finished => FINISHED,
            Self::Abandoned => ABANDONED,
            Self::Cancelled => CANCELLED,
            Self::SlotHeld => SLOT_HELD,
        })
    }
}

impl fmt::Display for TryRecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => EMPTY,
            Self::Finished => FINISHED,
            Self::Abandoned => ABANDONED,
            Self::Cancelled => CANCELLED,
            Self::SlotHeld => SLOT_HELD,
        })
    }
}

impl fmt::Display for RecvTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => EMPTY,
            Self::Finished => FINISHED,
            Self::Abandoned => ABANDONED,
            Self::Cancelled => CANCELLED,
            Self::SlotHeld => SLOT_HELD,
        })
    }
}

impl Error for Closed {}
impl Error for TryAcquireError {}
impl Error for AcquireTimeoutError {}
impl<E: Error + 'static> Error for FillError<E> {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Closed => None,
            Self::Failed(error) => error.source(),
        }
    }
}
impl Error for TryRecvError {}
impl Error for RecvError {}
impl Error for RecvTimeoutError {}
