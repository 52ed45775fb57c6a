//! Where batches end up: in host slots, or on from there in the slots of a device; and how the two sides of their ring wait
//! for each other.

pub(crate) mod batch;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod host;

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::Context;
use std::time::{Duration, Instant};

use twinbuf_core::{Park, Wait, WaitUntil, Word};
use twinbuf_mmap::Buffer;

#[cfg(feature = "cuda")]
pub use self::cuda::{Cuda, DeviceBatch};
pub use self::host::Host;
use crate::error::{BoxError, Error};
use crate::observe::trace::LoaderTrace;
use crate::slot::{Naming, Sending};

/// The memory that receives a loader's batches: [`Host`], or `Cuda` with the feature `cuda`. This trait is sealed.
pub trait Backend:
    sealed::Backend<Content = [u8], Batches: sealed::Batches<Batch: Into<Self::Batch>>>
{
    /// The type of the batches that the caller receives.
    type Batch;
}

/// The two sides of a backend. Both hand out guards: acquire, fill, commit on the one side, receive on the other.
pub(crate) mod sealed {
    use std::fmt;
    use std::thread::ThreadId;
    use std::time::{Duration, Instant};

    use super::{NoSlot, Received, Sides, Waiting};
    use crate::error::Error;
    use crate::observe::log::What;
    use crate::slot::{BatchMeta, Ticket};

    /// Makes the two sides.
    pub trait Backend: Sized + fmt::Debug + 'static {
        /// What a slot holds.
        type Content: ?Sized;
        type Slots: Slots<Content = Self::Content>;
        type Batches: Batches;

        /// The wait for a batch.
        const WAIT: What;

        /// Slots in addition to the host slots, of the same size.
        fn device_depth(&self) -> usize {
            0
        }

        /// The two sides of each lane. Without overlap both are on one thread, and neither may wait for the other.
        fn make(self, sides: &mut Sides<'_>) -> Result<Lanes<Self>, Error>;
    }

    /// The two sides of each lane.
    pub(crate) type Lanes<B> = Vec<(<B as Backend>::Slots, <B as Backend>::Batches)>;

    /// The side that is filled.
    pub trait Slots: Send + 'static {
        type Content: ?Sized;
        type Guard<'s>: SlotGuard<Content = Self::Content>
        where
            Self: 's;

        /// Waits for a free slot.
        fn acquire(&mut self) -> Result<Self::Guard<'_>, NoSlot>;

        /// The next slot if the caller releases it within `timeout`.
        fn acquire_within(&mut self, timeout: Duration) -> Result<Self::Guard<'_>, NoSlot>;

        /// Nothing more will come.
        fn finish(self);
    }

    /// A free slot. Dropped without a commit, it is handed out again.
    pub trait SlotGuard {
        type Content: ?Sized;

        /// The content to fill, without what was flushed.
        fn content(&mut self) -> &mut Self::Content;

        /// The slot is about to be filled with this batch.
        fn begin(&mut self, _: Ticket) {}

        /// How many bytes to fill between two calls of [`flush`](Self::flush); `None` if the slot goes as a whole.
        fn chunk(&self) -> Option<usize> {
            None
        }

        /// Sends the complete chunks of the content's first `filled` bytes to the device while the rest is being
        /// filled. Returns how many bytes are no longer part of the content.
        fn flush(&mut self, _filled: usize) -> usize {
            0
        }

        /// Hands the slot over.
        fn commit(self, meta: BatchMeta) -> Result<(), NoSlot>
        where
            Self: Sized;
    }

    /// The side that is received from.
    pub trait Batches: 'static {
        type Batch;

        /// The next batch. A slot that the caller holds is waited for as long as `waiting` has patience.
        fn receive(&mut self, waiting: &mut Waiting<'_, '_>, held_timeout: Duration)
        -> Received<Self::Batch>;

        /// Whether the caller holds the slot of the next batch, as far as can be told without a wait.
        fn is_held(&self) -> bool {
            true
        }

        fn meta(batch: &mut Self::Batch) -> &mut BatchMeta;

        /// The option that sets how many slots batches hold, and how many there are.
        fn slots(&self) -> (&'static str, usize);

        /// How long the copies to the device have taken so far, and their bytes.
        fn copies(&self) -> (Duration, u64) {
            (Duration::ZERO, 0)
        }

        /// The start and end of this batch's copy; `None` if the copy is in progress or no copy is made.
        fn copied(&self, _: Ticket) -> Option<(Instant, Instant)> {
            None
        }

        /// The thread between the two sides, if there is one.
        fn copy_thread(&self) -> Option<ThreadId> {
            None
        }
    }
}

/// What a backend needs to make its sides.
#[allow(missing_debug_implementations, reason = "of a sealed trait")]
pub struct Sides<'a> {
    /// Loading threads, each with its own slots.
    pub(crate) lanes: usize,
    /// Bytes of a slot.
    pub(crate) slot: usize,
    /// Slots of a lane.
    pub(crate) host_depth: usize,
    /// The memory of all lanes' slots, if the caller gave it.
    pub(crate) lent: Option<Vec<Buffer>>,
    /// Sends parts of a batch from host slots.
    pub(crate) sending: Option<Sending>,
    pub(crate) overlap: bool,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a device needs to know more"))]
    pub(crate) trace: Option<Arc<LoaderTrace>>,
    #[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "a device needs to know more"))]
    pub(crate) naming: Naming,
    /// What the memory is for.
    pub(crate) sum: &'a dyn fmt::Display,
}

/// Larger batches are sent to a device in chunks of this size while the rest is being read: large enough for a copy at full
/// speed, and short compared with the read of a large batch.
const CHUNK: usize = 8 << 20;

impl Sides<'_> {
    /// The bytes of a chunk if a slot has at most this many. `None` if batches are smaller, or without overlap.
    pub(crate) fn chunk(&self, most: usize) -> Option<usize> {
        let chunk = CHUNK.max(self.slot.div_ceil(most));
        (self.overlap && self.slot > chunk).then_some(chunk)
    }

    /// The memory of a lane's slots, if the caller gave it.
    pub(crate) fn lent(&mut self) -> Option<Vec<Buffer>> {
        let lent = self.lent.as_mut()?;
        Some(lent.split_off(lent.len() - self.host_depth))
    }

    /// The row of a lane's thread in the trace. Row 1 is the caller's; the one after a lane's is for its copies.
    pub(crate) fn row(&self, lane: usize, name: &str) -> (u32, String) {
        let id = u32::try_from(2 + 2 * lane).unwrap_or(u32::MAX);
        if self.lanes == 1 { (id, name.to_string()) } else { (id, format!("{name} {}", lane + 1)) }
    }
}

/// There is not that much memory.
pub(crate) fn too_large(sum: &dyn fmt::Display) -> Error {
    let wanted = "slots that fit the memory".to_string();
    Error::Option { option: "host_depth", wanted, found: sum.to_string() }
}

/// Why there is no slot to fill.
#[derive(Debug)]
pub enum NoSlot {
    /// The caller holds the next slot.
    Held,
    /// Nothing receives any more, or the backend has failed; then the receiving side has the error.
    Gone,
}

/// What came of a wait for a batch.
#[cfg_attr(not(feature = "cuda"), allow(dead_code, reason = "memory does not fail"))]
#[derive(Debug)]
pub enum Received<B> {
    Batch(B),
    NotYet,
    /// The caller holds the next slot.
    SlotHeld,
    /// The filling side is gone.
    Gone,
    /// The device's driver has failed.
    Failed(BoxError),
}

/// How a caller waits for a batch.
#[derive(Debug)]
pub enum Waiting<'a, 'b> {
    Block,
    /// Not longer than this.
    Until(Instant),
    /// Not at all.
    Try,
    /// Until this task is woken.
    Poll(&'a mut Context<'b>),
    /// As long as batches come, but not for a slot that is held.
    Drain,
}

impl Waiting<'_, '_> {
    /// How long to wait for a slot that the caller holds.
    pub(crate) fn patience(&self, held_timeout: Duration) -> Duration {
        match self {
            Self::Block => held_timeout,
            Self::Until(deadline) => deadline.saturating_duration_since(Instant::now()),
            Self::Try | Self::Poll(_) | Self::Drain => Duration::ZERO,
        }
    }
}

/// Sleeps as [`Park`] does, and spins a little before it while recent waits were short.
///
/// It keeps a moving mean of how long waits take. While that is below 100 µs, about what a sleep takes that spinning
/// could have saved, a waiting side spins before it sleeps, for at most 20 to 50 µs: it depends on the processor. A ring
/// with hand-offs in quick succession is not held up by wake-ups of the kernel (about 10 µs each), and one whose sides
/// wait for long uses no CPU time for it.
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

/// The spinning of the side that is filled, before its wait of [`Adaptive`].
///
/// A caller that frees the slot of a sleeping thread has to wake it: 5 to 10 µs of the time in which it would compute.
/// The thread that fills has nothing else to do, so it spins for as long as a wait counts as short. After a spin in vain
/// it leaves out the next ones: 2 waits, then 4, at most 64. A loop with long steps pays 1.5 µs a batch.
#[derive(Debug)]
struct Spin {
    /// Whether there is a processor to spin on.
    spins: bool,
    /// How many waits a spin in vain leaves out.
    pause: u32,
    /// How many are left to leave out.
    left: u32,
}

impl Spin {
    const LIMIT: Duration = Duration::from_nanos(Adaptive::SHORT as u64);
    const LONGEST_PAUSE: u32 = 64;

    fn of(wait: &Adaptive) -> Self {
        Self { spins: wait.spins, pause: 1, left: 0 }
    }

    /// Returns once the slot is not held any more, or when a sleep is better.
    fn wait_while(&mut self, mut held: impl FnMut() -> bool) {
        if !self.spins || !held() {
            return;
        }
        if let Some(left) = self.left.checked_sub(1) {
            self.left = left;
            return;
        }
        let start = Instant::now();
        loop {
            // About as long as it takes to read the clock.
            (0..8).for_each(|_| std::hint::spin_loop());
            if !held() {
                self.pause = 1;
                return;
            }
            if start.elapsed() >= Self::LIMIT {
                break;
            }
        }
        self.pause = (self.pause * 2).min(Self::LONGEST_PAUSE);
        self.left = self.pause;
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

    #[test]
    fn the_filling_side_spins_less_often_after_spins_in_vain() {
        let mut spin = Spin::of(&Adaptive::new(true));
        // The waits of 300 with a slot that stays held in which it looked more than once.
        let vain = |spin: &mut Spin, waits: u32| {
            let spun = |_: &u32| {
                let mut looks = 0;
                spin.wait_while(|| {
                    looks += 1;
                    true
                });
                looks > 1
            };
            (0..waits).filter(spun).collect::<Vec<_>>()
        };
        assert_eq!(vain(&mut spin, 300), [0, 3, 8, 17, 34, 67, 132, 197, 262]);
        // Left out are 64 waits, of which 37 were.
        assert_eq!(vain(&mut spin, 27), [0; 0]);
        let mut looks = 0;
        spin.wait_while(|| {
            looks += 1;
            looks < 2
        });
        assert_eq!(looks, 2, "it sees that the slot is free");
        assert_eq!(vain(&mut spin, 9), [0, 3, 8], "and begins again");
    }

    #[test]
    fn a_free_slot_costs_one_look_and_is_no_wait() {
        let mut spin = Spin { left: 1, ..Spin::of(&Adaptive::new(true)) };
        let mut looks = 0;
        spin.wait_while(|| {
            looks += 1;
            false
        });
        assert_eq!((looks, spin.left), (1, 1));
    }

    #[test]
    fn without_a_processor_to_spin_on_the_filling_side_does_not_look() {
        Spin::of(&Adaptive::new(false)).wait_while(|| panic!("it looked"));
    }
}
