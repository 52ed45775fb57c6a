//! Wait strategies: how a blocked side waits. The interface is modeled on an address wait, and can be implemented
//! without `std`.

use core::fmt;
use core::time::Duration;

use crate::sync::{self, AtomicU32, Ordering};

/// The state word of a slot, as a wait strategy sees it. A strategy can read the word and take its address, but
/// safe code cannot write it. A strategy that wrote the word could give the same slot to the producer and the
/// consumer at once.
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

    /// Returns the present value of the word, with a relaxed load. Use it only to detect a change: the load does not
    /// synchronize. The ring reads the word again before it acts.
    #[must_use]
    pub fn load(self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the address of the word, for a system call or as a key. Only atomic reads through this pointer are
    /// allowed.
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
/// | strategy | needs | a waiting side | choose it when |
/// | --- | --- | --- | --- |
/// | [`Auto`] | nothing | with `std`: looks for up to about 20 µs while that pays, then sleeps; without: as `Spin` | by default |
/// | [`Spin`] | nothing | uses its core fully | each side has its own core, and a wake-up (several µs) is too late |
/// | `Park` | `std` | sleeps in the kernel at once | every wait is long, or other threads keep the processors busy |
/// | your own | | for example WFE/SEV, an RTOS semaphore | the target has no `std` |
///
/// The `try_*`, `poll_*` and `*_async` calls of the handles work with every strategy and never call it to wait.
///
/// A call waits only if the slot is not ready. It then first calls [`relax`](Wait::relax) until this returns `false`.
/// Then it sets the `WAITER` bit of the word and calls [`wait`](Wait::wait). A side that changes a word with this bit
/// calls [`wake`](Wait::wake). If `relax` never returns `false`, a blocked side costs the other nothing.
///
/// # Contract
///
/// A `wake` after a change of the word must end every `wait` that began before it. With respect to `wake`, comparing
/// the word and going to sleep must be one step, as in `futex(2)`. If they are separate steps (an event register, a
/// flag), a waiter must see the change of the word before it sees the event: `wake` starts with a barrier that
/// orders the store before the event (`DSB` before `SEV` on ARM), and the waiter reads the word again after it took
/// the event (as after `WFE`). Spurious wake-ups are allowed.
///
/// If a strategy breaks the contract, the ring may hang, but it stays sound. For this reason the trait is safe to
/// implement.
///
/// # Examples
///
/// On a microcontroller, with the event register of its core (`wait for event`, `send event`): an event sent between
/// the comparison and the instruction stays in the register and ends the wait at once.
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
    /// Called when the slot is not ready. `round` is the number of earlier calls in this wait that returned `true`.
    ///
    /// Return `true` to check the word again; pause in this method if needed. Return `false` to announce the waiter
    /// and sleep.
    fn relax(&self, round: u32) -> bool;

    /// Blocks until `word` differs from `expected`, or until a [`wake`](Wait::wake) on it. It may return earlier.
    fn wait(&self, word: Word<'_>, expected: u32);

    /// Wakes all threads that wait on `word`. It must not panic, because it runs when handles are dropped.
    fn wake(&self, word: Word<'_>);
}

/// A [`Wait`] strategy that supports a deadline.
///
/// The strategy chooses the clock: `std::time::Instant` (feature `std`) for this crate's strategies, or ticks on a
/// system without this clock.
///
/// # Examples
///
/// A strategy for a tick counter that wraps around. A deadline has passed if `now - deadline`, with wrapping, is
/// less than half the range:
///
/// ```
/// use core::sync::atomic::{AtomicU32, Ordering};
/// use core::time::Duration;
/// use twinbuf_core::{DoubleBuffer, TryRecvError, Wait, WaitUntil, Word};
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
/// assert_eq!(rx.recv_timeout(Duration::from_millis(5)).unwrap_err(), TryRecvError::Empty);
/// ```
pub trait WaitUntil: Wait {
    /// A point in time on a monotonic clock.
    type Instant: Copy;

    /// Returns the point in time `timeout` from now. Returns `None` if the clock cannot represent it. The blocking
    /// call that asked for the deadline then waits without a limit.
    fn after(&self, timeout: Duration) -> Option<Self::Instant>;

    /// Returns `true` if `deadline` has passed.
    fn expired(&self, deadline: Self::Instant) -> bool;

    /// Blocks as [`Wait::wait`] does, but returns at `deadline` or shortly after.
    fn wait_until(&self, word: Word<'_>, expected: u32, deadline: Self::Instant);
}

/// Polls the word in a loop, with the processor's spin hint between polls.
///
/// Use it if each side has its own core. If both sides share one core, a wait can use up the rest of its time slice:
/// a round trip then takes milliseconds.
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

/// The default strategy. With the feature `std`, a waiting side looks at the word for about 1 µs. Then it yields its
/// processor and looks again, up to 64 times: about 20 µs if no other thread wants the processor. Then, or after one
/// yield of more than 50 µs, it sleeps as `Park` does. Without `std`, it polls in a loop as [`Spin`] does.
///
/// After a look in vain, the next waits sleep at once: 2 of them, then 4, at most 256. So a ring with long waits spends
/// almost no time on looking. A wait that a look ends halves that number. A sleep of less than 50 µs resets it to none.
///
/// If other threads keep all processors busy, a yield can give the processor away for milliseconds. After a yield of
/// more than 500 µs, the next 512 waits sleep at once, and a short sleep resets only the last 256 of them.
///
/// Use one `Auto` for one ring: both sides learn from it.
///
/// ```
/// use twinbuf_core::{Auto, DoubleBuffer};
/// static RING: DoubleBuffer<u64> = DoubleBuffer::new([0, 0]);
/// static SAME: DoubleBuffer<u64, Auto> = DoubleBuffer::with_wait([0, 0], Auto::new());
/// ```
#[derive(Debug, Default)]
pub struct Auto {
    /// The lower 16 bits count how many of the next waits sleep at once. The upper 16 bits are the length of the last
    /// such pause, from which the length of the next one is computed. Both are guesses: any value is right, so every
    /// access is Relaxed, and the two sides may overwrite each other's value.
    #[cfg(feature = "std")]
    pause: core::sync::atomic::AtomicU32,
}

impl Auto {
    /// Creates the strategy for one ring.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            #[cfg(feature = "std")]
            pause: core::sync::atomic::AtomicU32::new(0),
        }
    }
}

#[cfg(not(feature = "std"))]
impl Wait for Auto {
    #[inline]
    fn relax(&self, round: u32) -> bool {
        Spin.relax(round)
    }

    #[inline]
    fn wait(&self, word: Word<'_>, expected: u32) {
        Spin.wait(word, expected);
    }

    #[inline]
    fn wake(&self, _word: Word<'_>) {}
}

#[cfg(feature = "std")]
pub use with_std::Park;

#[cfg(feature = "std")]
mod with_std {
    use std::time::{Duration, Instant};

    use super::{Auto, Spin, Wait, WaitUntil, Word, address};
    use crate::sync;

    /// Sleeps in the kernel immediately. A waiting side uses no CPU.
    ///
    /// On 64-bit Linux, a sleep and a wake are one `futex(2)` call each on the slot's word, without a lock or an
    /// allocation of the process. On other systems they use `parking_lot_core`, with a lock on each call and
    /// allocations when a thread first sleeps.
    #[derive(Clone, Copy, Debug, Default)]
    pub struct Park;

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

    impl Wait for Auto {
        #[inline]
        fn relax(&self, round: u32) -> bool {
            if round == 0 && !self.looks() {
                return false;
            }
            if round < Self::LOOKS {
                sync::spin_loop();
                return true;
            }
            if round < Self::LOOKS + Self::YIELDS {
                let start = Instant::now();
                std::thread::yield_now();
                let time = start.elapsed();
                if time < Self::SHORT {
                    return true;
                }
                if time >= Self::SLICE {
                    self.gave_a_slice();
                    return false;
                }
            }
            self.looked_in_vain();
            false
        }

        #[inline]
        fn wait(&self, word: Word<'_>, expected: u32) {
            self.slept(|| Park.wait(word, expected));
        }

        #[inline]
        fn wake(&self, word: Word<'_>) {
            Park.wake(word);
        }
    }

    impl Auto {
        /// How many times a wait looks at the word before it yields. One look takes 20 to 50 ns (a pause instruction of
        /// the processor), so all take about 1 µs. More looks waste time if the other side needs this processor: with
        /// 100, a round trip on one processor takes twice the CPU time of `Park`.
        const LOOKS: u32 = 30;
        /// How many times it then yields its processor and looks again: about 20 µs if no other thread wants the
        /// processor. If the other side wants it, one yield is enough, and costs less than a sleep and a wake.
        const YIELDS: u32 = 64;
        /// The longest pause after a look in vain: how many waits then sleep at once.
        const LONGEST_PAUSE: u32 = 256;
        /// If a sleep takes less than this, looks would have ended the wait as well. On a busy machine, sleeps take
        /// longer.
        const SHORT: Duration = Duration::from_micros(50);

        /// A yield that takes longer gave a time slice to another program. The next yield may do so again, even if
        /// the other side is ready soon. A sleep ends when the other side is ready.
        const SLICE: Duration = Duration::from_micros(500);

        /// Called before the first look of a wait. Returns whether this wait looks before it sleeps.
        fn looks(&self) -> bool {
            let pause = self.pause.load(sync::Ordering::Relaxed);
            if pause == 0 {
                return true;
            }
            let (left, last) = (pause & 0xffff, pause >> 16);
            // Assume that a look will end this wait, and halve the next pause. If none does, `looked_in_vain` corrects
            // that.
            let next = if left > 0 { pause - 1 } else { (last / 2) << 16 };
            self.pause.store(next, sync::Ordering::Relaxed);
            left == 0
        }

        /// Called when a wait goes to sleep after it looked. Doubles the pause.
        fn looked_in_vain(&self) {
            let last = self.pause.load(sync::Ordering::Relaxed) >> 16;
            // `looks` has halved the pause already, so four times `last` is twice the pause before.
            let pause = (4 * last).clamp(2, Self::LONGEST_PAUSE);
            self.pause.store(pause << 16 | pause, sync::Ordering::Relaxed);
        }

        /// Called after a yield that took a time slice: other programs want the processors. Twice as many waits as in
        /// the longest pause now sleep at once; in the first half of them, a short sleep does not end the pause.
        fn gave_a_slice(&self) {
            let pause = Self::LONGEST_PAUSE;
            self.pause.store(pause << 16 | (2 * pause), sync::Ordering::Relaxed);
        }

        /// Runs `sleep`. A short sleep ends a pause of at most `LONGEST_PAUSE`: the next wait looks before it sleeps.
        /// Otherwise both sides could sleep at every hand-off, each until the other wakes it.
        fn slept(&self, sleep: impl FnOnce()) {
            let start = Instant::now();
            sleep();
            let left = self.pause.load(sync::Ordering::Relaxed) & 0xffff;
            if start.elapsed() < Self::SHORT && left <= Self::LONGEST_PAUSE {
                self.pause.store(0, sync::Ordering::Relaxed);
            }
        }
    }

    /// Implements `WaitUntil` with the std clock.
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
    std_clock!(Park, |_, word, expected, deadline| address::wait(word, expected, Some(deadline)));
    std_clock!(Auto, |this: &Auto, word, expected, deadline| {
        this.slept(|| address::wait(word, expected, Some(deadline)));
    });

    #[cfg(test)]
    mod tests {
        use super::Auto;

        #[test]
        fn after_a_yield_of_a_time_slice_short_sleeps_change_nothing_at_first() {
            let auto = Auto::new();
            auto.gave_a_slice();
            for wait in 0..256 {
                assert!(!auto.looks(), "wait {wait}");
                auto.slept(|| ());
            }
            // From here on one sleep shorter than `SHORT` ends the pause. A busy machine makes some sleeps longer.
            assert!((0..255).any(|_| {
                auto.slept(|| ());
                auto.looks()
            }));
        }
    }
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
        // Ignore the result: the caller reads the word again after a wake, a signal (EINTR) or the timeout, and if the
        // word had already changed before the call (EAGAIN).
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
        // SAFETY: the key is the address of a word that the caller borrows for the whole call, so no other use of
        // parking_lot_core has the same key. The closures neither panic nor park.
        unsafe { park(word.as_ptr().addr(), unchanged, || {}, |_, _| {}, DEFAULT_PARK_TOKEN, deadline) };
    }

    pub(super) fn wake_all(word: Word<'_>) {
        // SAFETY: no other use has the same key: it is the address of a word that the caller borrows.
        unsafe { unpark_all(word.as_ptr().addr(), DEFAULT_UNPARK_TOKEN) };
    }
}
