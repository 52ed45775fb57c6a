//! The errors of acquire and receive calls.

use core::error::Error;
use core::fmt;

/// The consumer has been dropped, or the ring ended by a leak ([`split`](crate::Ring::split)): nothing receives slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
pub struct Closed;

/// Why `try_acquire`, `acquire_timeout` or `acquire_deadline` of a [`Producer`](crate::Producer) returned no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum TryAcquireError {
    /// The next slot is in use: the consumer has not released it, or an earlier
    /// [`ReservedSlot`](crate::ReservedSlot) still holds it.
    Full,
    /// See [`Closed`].
    Closed,
}

/// Why a receive call returned neither a slot nor the end of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum RecvError {
    /// The producer has been dropped without [`finish`](crate::Producer::finish), or the ring ended by a leak
    /// ([`split`](crate::Ring::split)). The data may be incomplete.
    Abandoned,
    /// The producer reserved this slot and dropped the guard without a commit. The consumer receives this error
    /// once, at the position of the slot. The next call continues with the next slot.
    Cancelled,
}

/// Why `try_recv`, `recv_timeout` or `recv_deadline` returned neither a slot nor the end of the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "defmt", derive(defmt::Format))]
#[non_exhaustive]
pub enum TryRecvError {
    /// The next slot is not committed. After `finish`: its [`ReservedSlot`](crate::ReservedSlot) is open or leaked.
    Empty,
    /// An earlier [`KeptSlot`](crate::KeptSlot) still holds the next slot. Drop that guard first.
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
