//! How a blocked side waits: a strategy with the shape of an address wait, so that it exists without `std`.
//!
//! | strategy | needs | a waiting side | choose it when |
//! | --- | --- | --- | --- |
//! | [`Spin`] | nothing | burns its core | both sides have a core each and hand-offs take under ~10 µs |
//! | [`SpinYield`] | `std` | burns CPU time that no other thread asks for | as `Spin`, on a machine that others use too |
//! | [`Park`] | `std` | sleeps in the kernel | batches take longer than a wake-up (some 10 µs): loaders |
//! | [`Backoff`] | `std` | spins a little, then sleeps | hand-offs come in bursts |
//! | [`Adaptive`] | `std` | spins a little where waits have been short, else sleeps at once | you do not know: loaders |
//! | your own | | WFE/SEV, an RTOS semaphore | see [`Wait`] |
//!
//! The `try_*`, `poll_*` and `*_async` calls work with every strategy and never call it to wait.

#[cfg(feature = "alloc")]
use alloc::sync::Arc;
use core::fmt;
use core::time::Duration;

use crate::sync::{self, AtomicU32, Ordering};

/// The word of a slot, as a wait strategy gets to see it: it can be read and its address taken, and not written.
///
/// The ring owns the word. A strategy that could store to it could hand one slot to both sides.
///
/// ```compile_fail,E0599
/// use twinbuf_core::{Wait, Word};
/// struct Hostile;
/// impl Wait for Hostile {
///     fn relax(&self, _round: u32) -> bool { false }
///     fn wait(&self, word: Word<'_>, _expected: u32) { word.store(1); }
///     fn wake(&self, _word: Word<'_>) {}
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Word<'a>(&'a AtomicU32);

impl<'a> Word<'a> {
    pub(crate) fn new(word: &'a AtomicU32) -> Self {
        Self(word)
    }

    /// Returns the value of the word now. Relaxed: it tells whether the word has changed and publishes nothing. The
    /// ring reads the word again before it acts.
    #[must_use]
    pub fn load(self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the address of the word, for a system call or as a key. Only reads through it are allowed, and they
    /// must be atomic.
    #[must_use]
    pub fn as_ptr(self) -> *const u32 {
        core::ptr::from_ref(self.0).cast()
    }
}

impl fmt::Debug for Word<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        crate::state::State::from_bits(self.load()).fmt(f)
    }
}

/// A strategy for waiting until a word changes.
///
/// The ring calls it only on the slow path: after it saw that the slot is not ready. It first asks
/// [`relax`](Wait::relax), as long as that returns `true`; then it sets the word's `WAITER` bit and calls
/// [`wait`](Wait::wait). A side that changes a word in which it finds `WAITER` calls [`wake`](Wait::wake).
/// A strategy that never leaves `relax` thus costs the other side nothing.
///
/// # Contract
///
/// A wake that is issued after the word changed must end a wait that began before: comparing the word and falling
/// asleep are one step with respect to `wake`, as in `futex(2)`. Where the two are not one step (an event register,
/// a flag), the change of the word must be visible to a waiter before the event is: `wake` begins with a barrier
/// that orders the store before the event (`DSB` before `SEV` on ARM), and the waiter's next read of the word comes
/// after the event that it took (as after `WFE`). Waking for no reason is allowed.
///
/// Breaking the contract makes a ring hang. It never makes it unsound, so implementing this trait is safe.
///
/// # Examples
///
/// On a microcontroller, with the event register of its core (`wait for event`, `send event`): an event that is sent
/// between the comparison and the instruction stays in the register and ends the wait at once.
///
/// ```
/// use twinbuf_core::{DoubleBuffer, Wait, Word};
/// # fn wfe() { core::hint::spin_loop() }
/// # fn dsb_and_sev() {}
///
/// struct Event;
///
/// impl Wait for Event {
///     fn relax(&self, _round: u32) -> bool {
///         false // announce at once, so that `wake` is called
///     }
///     fn wait(&self, word: Word<'_>, expected: u32) {
///         if word.load() == expected {
///             wfe();
///         }
///     }
///     fn wake(&self, _word: Word<'_>) {
///         dsb_and_sev();
///     }
/// }
///
/// static RING: DoubleBuffer<[u8; 512], Event> = DoubleBuffer::with_wait([[0; 512]; 2], Event);
/// # let (mut tx, mut rx) = RING.try_split_static().unwrap();
/// # tx.acquire().unwrap().commit().unwrap();
/// # rx.recv().unwrap();
/// ```
pub trait Wait {
    /// Called when the word was found unchanged; `round` counts the times that this wait was told `true` before.
    ///
    /// `true`: look again at once (after whatever pause was made in here). `false`: announce and wait.
    fn relax(&self, round: u32) -> bool;

    /// Blocks until `word` is no longer `expected`, until a [`wake`](Wait::wake) on it, or for any shorter
    /// time.
    fn wait(&self, word: Word<'_>, expected: u32);

    /// Wakes every thread that waits on `word`. Must not panic: it runs where handles are dropped.
    fn wake(&self, word: Word<'_>);
}

/// A strategy that can also stop waiting at a given time.
///
/// The clock is the strategy's: `std::time::Instant` for those of this crate, ticks on a system without.
///
/// # Examples
///
/// A strategy of a system that counts ticks. The counter wraps, so a deadline has come when it lies in the half of
/// the range behind the counter:
///
/// ```
/// use core::sync::atomic::{AtomicU32, Ordering};
/// use core::time::Duration;
/// use twinbuf_core::{DoubleBuffer, RecvTimeoutError, Wait, WaitUntil, Word};
///
/// static TICKS: AtomicU32 = AtomicU32::new(u32::MAX - 2); // advanced by the timer's interrupt
///
/// struct Ticks;
///
/// impl Wait for Ticks {
///     fn relax(&self, _round: u32) -> bool {
///         core::hint::spin_loop();
/// #       TICKS.fetch_add(1, Ordering::Relaxed);
///         true
///     }
///     fn wait(&self, _word: Word<'_>, _expected: u32) {}
///     fn wake(&self, _word: Word<'_>) {}
/// }
///
/// impl WaitUntil for Ticks {
///     type Instant = u32;
///     fn after(&self, timeout: Duration) -> Option<u32> {
///         let ticks = u32::try_from(timeout.as_millis()).ok().filter(|&ticks| ticks < 1 << 31)?;
///         Some(TICKS.load(Ordering::Relaxed).wrapping_add(ticks))
///     }
///     fn expired(&self, deadline: u32) -> bool {
///         TICKS.load(Ordering::Relaxed).wrapping_sub(deadline) < 1 << 31
///     }
///     fn wait_until(&self, word: Word<'_>, expected: u32, _deadline: u32) {
///         self.wait(word, expected);
///     }
/// }
///
/// let mut ring = DoubleBuffer::with_wait([0; 2], Ticks);
/// let (_tx, mut rx) = ring.split();
/// assert_eq!(rx.recv_timeout(Duration::from_millis(5)).unwrap_err(), RecvTimeoutError::Timeout);
/// ```
pub trait WaitUntil: Wait {
    /// A point in time on a clock that does not go back.
    type Instant: Copy;

    /// The point in time `timeout` from now; `None` if the clock cannot express it: the call waits without a limit.
    fn after(&self, timeout: Duration) -> Option<Self::Instant>;

    /// Whether `deadline` has come.
    fn expired(&self, deadline: Self::Instant) -> bool;

    /// As [`Wait::wait`], but no longer than until `deadline` (or hardly longer).
    fn wait_until(&self, word: Word<'_>, expected: u32, deadline: Self::Instant);
}

/// A strategy behind a pointer is that strategy: several rings can share one.
macro_rules! by_pointer {
    ($($(#[$meta:meta])* $pointer:ty),+) => { $(
        $(#[$meta])*
        impl<W: Wait + ?Sized> Wait for $pointer {
            #[inline]
            fn relax(&self, round: u32) -> bool {
                (**self).relax(round)
            }

            #[inline]
            fn wait(&self, word: Word<'_>, expected: u32) {
                (**self).wait(word, expected);
            }

            #[inline]
            fn wake(&self, word: Word<'_>) {
                (**self).wake(word);
            }
        }

        $(#[$meta])*
        impl<W: WaitUntil + ?Sized> WaitUntil for $pointer {
            type Instant = W::Instant;

            fn after(&self, timeout: Duration) -> Option<W::Instant> {
                (**self).after(timeout)
            }

            fn expired(&self, deadline: W::Instant) -> bool {
                (**self).expired(deadline)
            }

            fn wait_until(&self, word: Word<'_>, expected: u32, deadline: W::Instant) {
                (**self).wait_until(word, expected, deadline);
            }
        }
    )+ };
}
by_pointer!(&W, #[cfg(feature = "alloc")] Arc<W>);

/// Looks again and again, with the processor's hint for such loops in between.
///
/// The fastest hand-off where both sides have a core each; a waste of one where they have not.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin;

impl Wait for Spin {
    #[inline]
    fn relax(&self, _round: u32) -> bool {
        sync::spin_loop();
        true
    }

    #[inline]
    fn wait(&self, _word: Word<'_>, _expected: u32) {
        sync::spin_loop();
    }

    #[inline]
    fn wake(&self, _word: Word<'_>) {}
}

#[cfg(feature = "std")]
pub use with_std::{Adaptive, Backoff, Park, SpinYield};

#[cfg(feature = "std")]
mod with_std {
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::{Duration, Instant};

    use super::{Spin, Wait, WaitUntil, Word, address};
    use crate::sync;

    /// Spins a little, then gives the rest of its time slice away each round; never sleeps.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct SpinYield;

    /// Sleeps in the kernel at once: a waiting side uses no CPU.
    ///
    /// On 64-bit Linux both calls are one `futex(2)` on the slot's word: no lock, no allocation. Elsewhere it is the
    /// wait of `parking_lot_core`, which takes a lock of its table for each call and allocates once per thread.
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

    /// Sleeps as [`Park`] does, and spins a little before it while recent waits were short.
    ///
    /// It keeps a moving mean of how long waits take. While that is below 100 µs, about what a sleep takes that spinning
    /// could have saved, a waiting side spins for up to about 50 µs before it sleeps. So a ring whose hand-offs follow
    /// each other quickly is not held up by wake-ups of the kernel (some 10 µs each), and one whose sides wait for long
    /// uses no CPU time for it.
    ///
    /// One strategy is for one ring; both sides adapt it.
    #[derive(Debug)]
    pub struct Adaptive {
        /// The mean, in nanoseconds. Not the models' atomic: it is a guess, and any value is right.
        mean: AtomicU32,
        /// Whether there is a processor to spin on.
        spins: bool,
    }

    impl Default for Adaptive {
        fn default() -> Self {
            Self::new()
        }
    }

    impl Adaptive {
        /// Makes a strategy that expects short waits until some have been timed.
        #[must_use]
        pub const fn new() -> Self {
            Self { mean: AtomicU32::new(0), spins: true }
        }

        /// Makes a strategy for a ring in a process where so many threads work at the same time, both sides included.
        ///
        /// If the process may use fewer processors
        /// ([`available_parallelism`](std::thread::available_parallelism)), it never spins: a side that spins would keep
        /// a processor from a thread that works.
        ///
        /// ```
        /// use twinbuf_core::{Adaptive, HeapRing};
        /// let reading_threads = 4;
        /// let rings = (0..reading_threads)
        ///     .map(|_| HeapRing::with_wait(vec![0_u64; 2], Adaptive::among(reading_threads + 1)));
        /// # assert_eq!(rings.count(), 4);
        /// ```
        #[must_use]
        pub fn among(threads: usize) -> Self {
            // Where the number is not known, there are enough.
            let processors = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
            Self { spins: threads <= processors, ..Self::new() }
        }

        // Every ordering is Relaxed: the mean is a guess, made from what was stored last, and publishes nothing.

        fn expects_short(&self) -> bool {
            self.mean.load(Ordering::Relaxed) < Self::SHORT
        }

        /// A wait begins: it is taken for one of no length, as it is if it ends while it spins.
        fn begins(&self) {
            let mean = self.mean.load(Ordering::Relaxed);
            if mean > 0 {
                self.mean.store(mean - mean.div_ceil(Self::OF), Ordering::Relaxed);
            }
        }

        /// Sleeps, and counts the wait by what it took.
        fn timed(&self, sleep: impl FnOnce()) {
            if !self.spins {
                return sleep();
            }
            let spun = self.expects_short();
            let start = Instant::now();
            sleep();
            // That the spinning was for nothing counts as a long wait, however soon it ended after that: so it is where
            // both sides share a processor.
            let took =
                if spun { Self::LONG } else { u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX) };
            let mean = self.mean.load(Ordering::Relaxed);
            self.mean.store(mean + took.min(Self::LONG) / Self::OF, Ordering::Relaxed);
        }

        /// In nanoseconds: as long as the spinning and a wake-up take.
        const SHORT: u32 = 100_000;
        /// Longer waits count as this.
        const LONG: u32 = 4 * Self::SHORT;
        /// Each wait is one part in so many of the mean.
        const OF: u32 = 8;
        /// One look and one pause of the processor each take 20 to 50 ns.
        const ROUNDS: u32 = 1000;
    }

    impl Wait for Adaptive {
        #[inline]
        fn relax(&self, round: u32) -> bool {
            if !self.spins {
                return false;
            }
            if round == 0 {
                self.begins();
            }
            sync::spin_loop();
            round < Self::ROUNDS && self.expects_short()
        }

        #[inline]
        fn wait(&self, word: Word<'_>, expected: u32) {
            self.timed(|| address::wait(word, expected, None));
        }

        #[inline]
        fn wake(&self, word: Word<'_>) {
            Park.wake(word);
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
        fn wait(&self, _word: Word<'_>, _expected: u32) {
            std::thread::yield_now();
        }

        #[inline]
        fn wake(&self, _word: Word<'_>) {}
    }

    impl Wait for Park {
        #[inline]
        fn relax(&self, _round: u32) -> bool {
            false
        }

        #[inline]
        fn wait(&self, word: Word<'_>, expected: u32) {
            address::wait(word, expected, None);
        }

        #[inline]
        fn wake(&self, word: Word<'_>) {
            address::wake_all(word);
        }
    }

    impl Wait for Backoff {
        #[inline]
        fn relax(&self, round: u32) -> bool {
            sync::spin_loop();
            round < self.spins
        }

        #[inline]
        fn wait(&self, word: Word<'_>, expected: u32) {
            Park.wait(word, expected);
        }

        #[inline]
        fn wake(&self, word: Word<'_>) {
            Park.wake(word);
        }
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

                fn wait_until(&self, word: Word<'_>, expected: u32, deadline: Instant) {
                    $wait_until(self, word, expected, deadline);
                }
            }
        };
    }
    std_clock!(Spin, |this: &Spin, word, expected, _| this.wait(word, expected));
    std_clock!(SpinYield, |this: &SpinYield, word, expected, _| this.wait(word, expected));
    std_clock!(Park, |_, word, expected, deadline| address::wait(word, expected, Some(deadline)));
    std_clock!(Backoff, |_, word, expected, deadline| address::wait(word, expected, Some(deadline)));
    std_clock!(Adaptive, |this: &Adaptive, word, expected, deadline| {
        this.timed(|| address::wait(word, expected, Some(deadline)));
    });
}

/// The address wait of 64-bit Linux: one system call on the word itself.
#[cfg(all(feature = "std", target_os = "linux", target_pointer_width = "64"))]
mod address {
    use std::time::Instant;

    use super::Word;

    pub(super) fn wait(word: Word<'_>, expected: u32, deadline: Option<Instant>) {
        let timeout = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            libc::timespec {
                tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
                tv_nsec: left.subsec_nanos().into(),
            }
        });
        let timeout = timeout.as_ref().map_or(core::ptr::null(), core::ptr::from_ref);
        let operation = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
        // All its results mean "look again": woken, changed before (EAGAIN), a signal (EINTR), the time is over.
        // SAFETY: the word is borrowed for the call, which only reads it; the timeout is null or a local.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, expected, timeout) };
    }

    pub(super) fn wake_all(word: Word<'_>) {
        let operation = libc::FUTEX_WAKE | libc::FUTEX_PRIVATE_FLAG;
        // SAFETY: the kernel uses the address as a key and does not access the word.
        unsafe { libc::syscall(libc::SYS_futex, word.as_ptr(), operation, i32::MAX) };
    }
}

/// The address wait of all other systems.
#[cfg(all(feature = "std", not(all(target_os = "linux", target_pointer_width = "64"))))]
mod address {
    use std::time::Instant;

    use parking_lot_core::{DEFAULT_PARK_TOKEN, DEFAULT_UNPARK_TOKEN, park, unpark_all};

    use super::Word;

    pub(super) fn wait(word: Word<'_>, expected: u32, deadline: Option<Instant>) {
        let unchanged = || word.load() == expected;
        // SAFETY: the key is the address of a word that the caller borrows for the whole call, so that no other use
        // of parking_lot_core has the same key; the closures neither panic nor park.
        unsafe { park(word.as_ptr().addr(), unchanged, || {}, |_, _| {}, DEFAULT_PARK_TOKEN, deadline) };
    }

    pub(super) fn wake_all(word: Word<'_>) {
        // SAFETY: the key is the address of a borrowed word, as in `wait`.
        unsafe { unpark_all(word.as_ptr().addr(), DEFAULT_UNPARK_TOKEN) };
    }
}

#[cfg(all(test, feature = "std"))]
mod tests {
    use super::*;

    /// Nothing sleeps here: the word is never what is expected.
    #[test]
    fn spinning_for_nothing_ends_and_begins_again() {
        let word = AtomicU32::new(1);
        let adaptive = Adaptive::new();
        let sleep = || adaptive.wait(Word::new(&word), 0);
        assert!(adaptive.relax(0), "the first waits are taken for short");
        let vain = (0..10).take_while(|_| adaptive.relax(0)).map(|_| sleep()).count();
        assert!((1..10).contains(&vain), "{vain} times in vain");
        let short = (0..1000).take_while(|_| !adaptive.relax(0)).map(|_| sleep()).count();
        assert!((1..1000).contains(&short), "{short} short sleeps");
        assert!(!adaptive.relax(u32::MAX), "never for ever");
    }

    #[test]
    fn among_more_threads_than_processors_nobody_spins() {
        let word = AtomicU32::new(1);
        let (alone, crowded) = (Adaptive::among(1), Adaptive::among(usize::MAX));
        assert!(alone.relax(0));
        for round in 0..1000 {
            assert!(!crowded.relax(0), "{round}");
            crowded.wait(Word::new(&word), 0); // as if short waits followed each other
        }
    }
}
