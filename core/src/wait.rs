//! How a blocked side waits: a strategy with the shape of an address wait, so that it exists without `std`.
//!
//! | strategy | needs | a waiting side | choose it when |
//! | --- | --- | --- | --- |
//! | [`Spin`] | nothing | burns its core | both sides have a core of their own and hand-offs take under ~10 µs |
//! | [`SpinYield`] | `std` | burns what nobody else wants | as `Spin`, on a machine that others use too |
//! | [`Park`] | `std` | sleeps in the kernel | batches take longer than a wake-up (some 10 µs): loaders |
//! | [`Backoff`] | `std` | spins a little, then sleeps | hand-offs come in bursts |
//! | your own | | WFE/SEV, an RTOS semaphore | see [`Wait`] |
//!
//! The `try_*`, `poll_*` and `*_async` calls work with every strategy and never call it to wait.

use core::time::Duration;

use crate::sync::{self, AtomicU32};

/// A strategy for waiting until a word changes.
///
/// The ring calls it only on the slow path: after it saw that the slot is not ready. It first asks
/// [`relax`](Wait::relax), as long as that returns `true`; then it sets the word's `WAITER` bit and calls
/// [`wait`](Wait::wait). A side that changes a word in which it finds `WAITER` calls [`wake`](Wait::wake).
/// A strategy that never leaves `relax` thus costs the other side nothing.
///
/// # Contract
///
/// A wake issued after the word changed must not be slept through: comparing the word and falling asleep are
/// one step with respect to `wake`, as in `futex(2)`. Waking for no reason is allowed. Breaking the contract
/// makes a ring hang; it never makes it unsound, so implementing this trait is safe.
///
/// # Examples
///
/// On a microcontroller, with the event register of its core (`wait for event`, `send event`): an event sent
/// between the comparison and the instruction stays in the register, so that it is not slept through.
///
/// ```
/// use core::sync::atomic::{AtomicU32, Ordering};
/// use twinbuf_core::{DoubleBuffer, Wait};
/// # fn wfe() { core::hint::spin_loop() }
/// # fn sev() {}
///
/// struct Event;
///
/// impl Wait for Event {
///     fn relax(&self, _round: u32) -> bool {
///         false // announce at once, so that `wake` is called
///     }
///     fn wait(&self, word: &AtomicU32, expected: u32) {
///         if word.load(Ordering::Relaxed) == expected {
///             wfe();
///         }
///     }
///     fn wake(&self, _word: &AtomicU32) {
///         sev();
///     }
/// }
///
/// static RING: DoubleBuffer<[u8; 512], Event> = DoubleBuffer::with_wait([[0; 512]; 2], Event);
/// # let (mut tx, rx) = RING.try_split_static().unwrap();
/// # tx.acquire().unwrap().commit().unwrap();
/// # rx.recv().unwrap();
/// ```
pub trait Wait {
    /// Called when the word was found unchanged; `round` says how often this wait was told `true` before.
    ///
    /// `true`: look again at once (after whatever pause was made in here). `false`: announce and wait.
    fn relax(&self, round: u32) -> bool;

    /// Blocks until `word` is no longer `expected`, until a [`wake`](Wait::wake) on it, or for any shorter
    /// time.
    fn wait(&self, word: &AtomicU32, expected: u32);

    /// Wakes every thread that waits on `word`. Must not panic: it runs where handles are dropped.
    fn wake(&self, word: &AtomicU32);

    /// Whether a call of this strategy may come back to the handle that waits. Only this crate can say no.
    #[doc(hidden)]
    fn may_call_back(&self, _: Ours) -> bool {
        true
    }
}

pub(crate) use ours::Ours;

mod ours {
    /// Has no name outside of this crate, and neither have methods that take it.
    #[derive(Debug)]
    pub struct Ours;
}

/// A strategy that can also stop waiting at a given time.
///
/// The clock is the strategy's own: `std::time::Instant` for those of this crate, ticks on a system without.
///
/// # Examples
///
/// A strategy of a system that counts ticks:
///
/// ```
/// use core::sync::atomic::{AtomicU32, Ordering};
/// use core::time::Duration;
/// use twinbuf_core::{DoubleBuffer, RecvTimeoutError, Wait, WaitUntil};
///
/// static TICKS: AtomicU32 = AtomicU32::new(0); // advanced by the timer's interrupt
///
/// struct Ticks;
///
/// impl Wait for Ticks {
///     fn relax(&self, _round: u32) -> bool {
///         core::hint::spin_loop();
/// #       TICKS.fetch_add(1, Ordering::Relaxed);
///         true
///     }
///     fn wait(&self, _word: &AtomicU32, _expected: u32) {}
///     fn wake(&self, _word: &AtomicU32) {}
/// }
///
/// impl WaitUntil for Ticks {
///     type Instant = u32;
///     fn after(&self, timeout: Duration) -> Option<u32> {
///         let ticks = u32::try_from(timeout.as_millis()).ok()?;
///         TICKS.load(Ordering::Relaxed).checked_add(ticks)
///     }
///     fn expired(&self, deadline: u32) -> bool {
///         TICKS.load(Ordering::Relaxed) >= deadline
///     }
///     fn wait_until(&self, word: &AtomicU32, expected: u32, _deadline: u32) {
///         self.wait(word, expected);
///     }
/// }
///
/// let mut ring = DoubleBuffer::with_wait([0; 2], Ticks);
/// let (_tx, rx) = ring.split();
/// assert_eq!(rx.recv_timeout(Duration::from_millis(5)).unwrap_err(), RecvTimeoutError::Timeout);
/// ```
pub trait WaitUntil: Wait {
    /// A point in time on a clock that does not go back.
    type Instant: Copy;

    /// The point in time `timeout` from now; `None` if it is too far away to be told: wait for ever.
    fn after(&self, timeout: Duration) -> Option<Self::Instant>;

    /// Whether `deadline` has come.
    fn expired(&self, deadline: Self::Instant) -> bool;

    /// As [`Wait::wait`], but no longer than until `deadline` (or hardly longer).
    fn wait_until(&self, word: &AtomicU32, expected: u32, deadline: Self::Instant);
}

/// Looks again and again, with the processor's hint for such loops in between.
///
/// The fastest hand-off where both sides have a core of their own; a waste of one where they have not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin;

impl Wait for Spin {
    #[inline]
    fn relax(&self, _round: u32) -> bool {
        sync::spin_loop();
        true
    }

    #[inline]
    fn wait(&self, _word: &AtomicU32, _expected: u32) {
        sync::spin_loop();
    }

    #[inline]
    fn wake(&self, _word: &AtomicU32) {}

    #[inline]
    fn may_call_back(&self, _: Ours) -> bool {
        false
    }
}

#[cfg(feature = "std")]
pub use with_std::{Backoff, Park, SpinYield};

#[cfg(feature = "std")]
mod with_std {
    use std::time::{Duration, Instant};

    use parking_lot_core::{DEFAULT_PARK_TOKEN, DEFAULT_UNPARK_TOKEN, park, unpark_all};

    use super::{Ours, Spin, Wait, WaitUntil};
    use crate::sync::{self, AtomicU32, Ordering};

    /// Spins a little, then gives the rest of its time slice away each round; never sleeps.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct SpinYield;

    /// Sleeps in the kernel at once: a waiting side uses no CPU.
    ///
    /// A futex on Linux, what comes nearest elsewhere (`parking_lot_core`).
    #[derive(Clone, Copy, Debug, Default)]
    pub struct Park;

    /// Spins for a given number of rounds, then sleeps as [`Park`] does.
    #[derive(Clone, Copy, Debug)]
    pub struct Backoff {
        spins: u32,
    }

    impl Backoff {
        /// Spins `spins` rounds, each one look at the word and one pause of the processor (some 10 to 50 ns),
        /// then sleeps.
        ///
        /// ```
        /// use twinbuf_core::{Backoff, DoubleBuffer};
        /// static RING: DoubleBuffer<u64, Backoff> = DoubleBuffer::with_wait([0, 0], Backoff::new(200));
        /// ```
        #[must_use]
        pub const fn new(spins: u32) -> Self {
            Self { spins }
        }
    }

    /// As many rounds as take about as long as a wake-up by the kernel: the spinning then costs at most as
    /// much as it could save (Karlin et al., "Empirical studies of competitive spinning", SOSP 1991).
    impl Default for Backoff {
        fn default() -> Self {
            Self::new(1000)
        }
    }

    /// Rounds that `SpinYield` spins before it asks the scheduler: about a microsecond.
    const YIELD_AFTER: u32 = 64;

    impl Wait for SpinYield {
        #[inline]
        fn relax(&self, round: u32) -> bool {
            if round < YIELD_AFTER {
                sync::spin_loop();
            } else {
                std::thread::yield_now();
            }
            true
        }

        #[inline]
        fn wait(&self, _word: &AtomicU32, _expected: u32) {
            std::thread::yield_now();
        }

        #[inline]
        fn wake(&self, _word: &AtomicU32) {}

        #[inline]
        fn may_call_back(&self, _: Ours) -> bool {
            false
        }
    }

    impl Wait for Park {
        #[inline]
        fn relax(&self, _round: u32) -> bool {
            false
        }

        #[inline]
        fn wait(&self, word: &AtomicU32, expected: u32) {
            sleep(word, expected, None);
        }

        #[inline]
        fn wake(&self, word: &AtomicU32) {
            let key = core::ptr::from_ref(word).addr();
            // SAFETY: the key is the address of a borrowed word, as in `sleep`.
            unsafe { unpark_all(key, DEFAULT_UNPARK_TOKEN) };
        }

        #[inline]
        fn may_call_back(&self, _: Ours) -> bool {
            false
        }
    }

    impl Wait for Backoff {
        #[inline]
        fn relax(&self, round: u32) -> bool {
            sync::spin_loop();
            round < self.spins
        }

        #[inline]
        fn wait(&self, word: &AtomicU32, expected: u32) {
            Park.wait(word, expected);
        }

        #[inline]
        fn wake(&self, word: &AtomicU32) {
            Park.wake(word);
        }

        #[inline]
        fn may_call_back(&self, _: Ours) -> bool {
            false
        }
    }

    fn sleep(word: &AtomicU32, expected: u32, deadline: Option<Instant>) {
        let key = core::ptr::from_ref(word).addr();
        // Relaxed: only "has it changed?"; the ring loads the word again, with Acquire, to act on it.
        let unchanged = || word.load(Ordering::Relaxed) == expected;
        // SAFETY: the key is the address of a word that the caller borrows for the whole call, so that no
        // other use of parking_lot_core has the same key; the closures neither panic nor park.
        unsafe { park(key, unchanged, || {}, |_, _| {}, DEFAULT_PARK_TOKEN, deadline) };
    }

    /// The std clock for a strategy, and how it waits until a deadline.
    macro_rules! std_clock {
        ($strategy:ty, $wait_until:expr) => {
            impl WaitUntil for $strategy {
                type Instant = Instant;

                fn after(&self, timeout: Duration) -> Option<Instant> {
                    Instant::now().checked_add(timeout)
                }

                fn expired(&self, deadline: Instant) -> bool {
                    Instant::now() >= deadline
                }

                fn wait_until(&self, word: &AtomicU32, expected: u32, deadline: Instant) {
                    $wait_until(self, word, expected, deadline);
                }
            }
        };
    }
    std_clock!(Spin, |this: &Spin, word, expected, _| this.wait(word, expected));
    std_clock!(SpinYield, |this: &SpinYield, word, expected, _| this.wait(word, expected));
    std_clock!(Park, |_, word, expected, deadline| sleep(word, expected, Some(deadline)));
    std_clock!(Backoff, |_, word, expected, deadline| sleep(word, expected, Some(deadline)));
}
