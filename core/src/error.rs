//! The reasons why a call returned no slot.

use core::error::Error;
use core::fmt;

/// The consumer is gone: nothing will read what is committed from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct Closed;

/// Why a non-blocking or timed acquire returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum TryAcquireError {
    /// The next slot is still in use: the consumer has not released it, or a [`ReservedSlot`](crate::ReservedSlot) of
    /// the previous lap still holds it.
    Full,
    /// The consumer is gone.
    Closed,
}

/// Why a receive returned neither a slot nor the end of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum RecvError {
    /// The producer is gone, and the data does not end here: it was dropped without `finish`, or the slot at this place
    /// was reserved and is still open or leaked. The data received so far may be incomplete.
    Abandoned,
    /// The producer reserved this slot and dropped it without a commit. Returned once, in the slot's place in the
    /// order; the next call continues with the next slot.
    Cancelled,
}

/// Why a non-blocking or timed receive returned neither a slot nor the end of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum TryRecvError {
    /// The producer has not committed the next slot yet.
    Empty,
    /// A [`KeptSlot`](crate::KeptSlot) of the previous lap holds the next slot: drop that guard first.
    Held,
    /// See [`RecvError::Abandoned`].
    Abandoned,
    /// See [`RecvError::Cancelled`].
    Cancelled,
}

impl From<Closed> for TryAcquireError {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

impl From<RecvError> for TryRecvError {
    fn from(error: RecvError) -> Self {
        match error {
            RecvError::Abandoned => Self::Abandoned,
            RecvError::Cancelled => Self::Cancelled,
        }
    }
}

const CLOSED: &str = "the consumer of the ring is gone";
const FULL: &str = "the next slot is still in use";
const EMPTY: &str = "the next slot is not filled yet";
const HELD: &str = "the next slot is still held by a kept read guard: drop that first";
const ABANDONED: &str = "the producer is gone without a finish: the data may be incomplete";
const CANCELLED: &str = "the producer reserved this slot and dropped it without a commit";

macro_rules! display {
    ($($error:ident { $($variant:pat => $text:expr),+ $(,)? })+) => { $(
        impl fmt::Display for $error {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($variant => $text),+ })
            }
        }

        impl Error for $error {}
    )+ };
}
display! {
    Closed { Self => CLOSED }
    TryAcquireError { Self::Full => FULL, Self::Closed => CLOSED }
    RecvError { Self::Abandoned => ABANDONED, Self::Cancelled => CANCELLED }
    TryRecvError {
        Self::Empty => EMPTY,
        Self::Held => HELD,
        Self::Abandoned => ABANDONED,
        Self::Cancelled => CANCELLED,
    }
}
