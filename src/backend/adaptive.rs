//! How the two sides of a loader's ring wait for each other.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use twinbuf_core::{Park, Wait, WaitUntil, Word};

/// Sleeps as [`Park`] does, and spins a little before it while recent waits were short.
///
/// It keeps a moving mean of how long waits take. While that is below 100 µs, about what a sleep takes that spinning
/// could have saved, a waiting side spins for up to about 50 µs before it sleeps. A ring with hand-offs in quick
/// succession is not held up by wake-ups of the kernel (about 10 µs each), and one whose sides wait for long uses no CPU
/// time for it.
///
/// One strategy is for one ring; both sides adapt it.
#[derive(Debug)]
pub struct Adaptive {
    /// The mean, in nanoseconds. A guess: any value is right.
    mean: AtomicU32,
    /// Whether there is a processor to spin on.
    spins: bool,
}

impl Adaptive {
    /// For a ring in a process where `threads` threads work at the same time, both sides included.
    ///
    /// If the calling thread may use fewer processors ([`std::thread::available_parallelism`]; on Linux it reads the
    /// affinity of that thread), it never spins: a side that spins would keep a processor from a thread that works.
    /// Threads inherit the affinity of the one that spawns them, as the threads of a loader do.
    pub(crate) fn for_threads(threads: usize) -> Self {
        // Where the number is not known, there are enough.
        let processors = std::thread::available_parallelism().map_or(usize::MAX, usize::from);
        Self::new(threads <= processors)
    }

    const fn new(spins: bool) -> Self {
        Self { mean: AtomicU32::new(0), spins }
    }

    // Every ordering is Relaxed: the mean is a guess, made from what was stored last, and publishes nothing.

    fn expects_short(&self) -> bool {
        self.mean.load(Ordering::Relaxed) < Self::SHORT
    }

    /// A wait begins. It is counted with length 0. That is right if it ends during the spinning.
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
        // Spinning that was for nothing counts as a long wait, however soon it ended after that: both sides may share a
        // processor.
        let took =
            if spun { Self::LONG } else { u32::try_from(start.elapsed().as_nanos()).unwrap_or(u32::MAX) };
        let mean = self.mean.load(Ordering::Relaxed);
        // A wait that is woken for nothing again and again counts several times.
        let mean = mean.saturating_add(took.min(Self::LONG) / Self::OF).min(Self::LONG);
        self.mean.store(mean, Ordering::Relaxed);
    }

    /// In nanoseconds: as long as the spinning and a wake-up take.
    const SHORT: u32 = 100_000;
    /// Longer waits count as this.
    const LONG: u32 = 4 * Self::SHORT;
    /// Each wait weighs 1/8 in the mean.
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
        std::hint::spin_loop();
        round < Self::ROUNDS && self.expects_short()
    }

    #[inline]
    fn wait(&self, word: Word<'_>, expected: u32) {
        self.timed(|| Park.wait(word, expected));
    }

    #[inline]
    fn wake(&self, word: Word<'_>) {
        Park.wake(word);
    }
}

impl WaitUntil for Adaptive {
    type Instant = Instant;

    fn after(&self, timeout: Duration) -> Option<Instant> {
        Park.after(timeout)
    }

    fn expired(&self, deadline: Instant) -> bool {
        Park.expired(deadline)
    }

    fn wait_until(&self, word: Word<'_>, expected: u32, deadline: Instant) {
        self.timed(|| Park.wait_until(word, expected, deadline));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SLEPT_IN_VAIN: fn() = || ();

    #[test]
    fn spinning_for_nothing_ends_and_begins_again() {
        let adaptive = Adaptive::new(true);
        assert!(adaptive.relax(0), "the first waits are taken for short");
        let vain = (0..10).take_while(|_| adaptive.relax(0)).map(|_| adaptive.timed(SLEPT_IN_VAIN)).count();
        assert!((1..=3).contains(&vain), "{vain} times in vain");
        let short =
            (0..100).take_while(|_| !adaptive.relax(0)).map(|_| adaptive.timed(SLEPT_IN_VAIN)).count();
        assert!((1..=20).contains(&short), "{short} short sleeps");
        let rounds = (0..).take_while(|&round| adaptive.relax(round)).count();
        assert!((900..=1100).contains(&rounds), "{rounds} rounds, of 20 to 50 ns each");
    }

    #[test]
    fn long_sleeps_are_timed_with_a_deadline_and_without() {
        let adaptive = Adaptive::new(true);
        adaptive.mean.store(Adaptive::SHORT, Ordering::Relaxed);
        for _ in 0..20 {
            adaptive.relax(0);
            adaptive.timed(|| std::thread::sleep(Duration::from_millis(1)));
        }
        assert!(!adaptive.expects_short(), "waits of a millisecond are long");
    }

    /// Woken for nothing, each 200 µs, for a minute and more, within one wait.
    #[test]
    fn a_wait_that_is_woken_for_nothing_is_bounded() {
        let adaptive = Adaptive::new(true);
        adaptive.begins();
        for _ in 0..1_000_000 {
            adaptive.timed(SLEPT_IN_VAIN);
        }
        assert!(adaptive.mean.load(Ordering::Relaxed) <= Adaptive::LONG);
    }

    #[test]
    fn among_more_threads_than_processors_nobody_spins() {
        let processors = std::thread::available_parallelism().unwrap().get();
        assert!(Adaptive::for_threads(processors).relax(0));
        let crowded = Adaptive::for_threads(processors + 1);
        for round in 0..1000 {
            assert!(!crowded.relax(0), "{round}");
            crowded.timed(SLEPT_IN_VAIN); // as if short waits followed each other
        }
    }
}
