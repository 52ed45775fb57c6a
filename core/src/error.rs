//! What can go wrong with a hand-over, one small enum for each kind of call.

use core::error::Error;
use core::fmt;

/// The consumer is gone: nobody will read what is filled from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

/// Why [`Producer::try_acquire`](crate::Producer::try_acquire) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryAcquireError {
    /// The consumer has not released the next slot yet.
    Full,
    /// The consumer is gone.
    Closed,
}

/// Why a timed acquire returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AcquireTimeoutError {
    /// The consumer did not release the next slot in time.
    Timeout,
    /// The consumer is gone.
    Closed,
}

/// Why [`Producer::fill`](crate::Producer::fill) handed nothing over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FillError<E> {
    /// The consumer is gone.
    Closed,
    /// The closure failed: its slot was not committed, and the next fill gets the same slot.
    Failed(E),
}

/// Why [`Consumer::try_recv`](crate::Consumer::try_recv) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TryRecvError {
    /// The producer has not committed the next slot yet.
    Empty,
    /// The producer called `finish`; everything it committed has been received.
    Finished,
    /// The producer went away without `finish`: what has been received may not be all there was.
    Abandoned,
    /// The next slot in turn is held by a [`ReadSlot`](crate::ReadSlot) of this consumer: release that first.
    AllHeld,
}

/// Why [`Consumer::recv`](crate::Consumer::recv) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvError {
    /// The producer called `finish`; everything it committed has been received.
    Finished,
    /// The producer went away without `finish`: what has been received may not be all there was.
    Abandoned,
    /// The next slot in turn is held by a [`ReadSlot`](crate::ReadSlot) of this consumer: release that first.
    AllHeld,
}

/// Why a timed receive returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecvTimeoutError {
    /// The producer did not commit the next slot in time.
    Timeout,
    /// The producer called `finish`; everything it committed has been received.
    Finished,
    /// The producer went away without `finish`: what has been received may not be all there was.
    Abandoned,
    /// The next slot in turn is held by a [`ReadSlot`](crate::ReadSlot) of this consumer: release that first.
    AllHeld,
}

impl From<RecvError> for RecvTimeoutError {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Finished => Self::Finished,
            RecvError::Abandoned => Self::Abandoned,
            RecvError::AllHeld => Self::AllHeld,
        }
    }
}

impl From<RecvError> for TryRecvError {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Finished => Self::Finished,
            RecvError::Abandoned => Self::Abandoned,
            RecvError::AllHeld => Self::AllHeld,
        }
    }
}

const CLOSED: &str = "the consumer of the ring is gone";
const FULL: &str = "the next slot is still in use by the consumer";
const EMPTY: &str = "the next slot is not filled yet";
const FINISHED: &str = "the producer has finished and everything was received";
const ABANDONED: &str = "the producer went away without finish: the data may be incomplete";
const ALL_HELD: &str = "the next slot in turn is held by a read guard: release that before receiving";

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
            Self::AllHeld => ALL_HELD,
        })
    }
}

impl fmt::Display for TryRecvError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Empty => EMPTY,
            Self::Finished => FINISHED,
            Self::Abandoned => ABANDONED,
            Self::AllHeld => ALL_HELD,
        })
    }
}

impl fmt::Display for RecvTimeoutError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Timeout => EMPTY,
            Self::Finished => FINISHED,
            Self::Abandoned => ABANDONED,
            Self::AllHeld => ALL_HELD,
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
