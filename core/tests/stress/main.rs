//! Real threads, random operations on all sides: nothing is lost, doubled, reordered or torn.
//!
//! `TWINBUF_STRESS_HANDOFFS` sets the number of hand-offs per test (but of pools), `TWINBUF_STRESS_SEED` the seed of
//! the random numbers. A seed fixes what each thread does, not how the threads are scheduled. The long run:
//!
//! ```sh
//! TWINBUF_STRESS_HANDOFFS=10000000 cargo test --release -p twinbuf-core --test stress -- --nocapture
//! ```

mod many_threads;
mod pool;
mod two_threads;

use std::env;
use std::fmt::Debug;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use pollster::block_on;
use twinbuf_core::{
    Auto, Closed, Consumer, Park, Producer, ReadSlot, RecvError, Spin, TryAcquireError, TryRecvError,
    WaitUntil, WriteSlot,
};
use twinbuf_testing::Random;

// A quarter of a million in total. The spinning test gets by far the fewest: on a busy machine the other side may not
// be running.
#[test]
fn spin() {
    stress("two threads, Spin", 4_000, |random, at_most| two_threads::round(Spin, random, at_most));
}

#[test]
fn park() {
    stress("two threads, Park", 100_000, |random, at_most| two_threads::round(Park, random, at_most));
}

#[test]
fn auto() {
    stress("two threads, Auto", 100_000, |random, at_most| two_threads::round(Auto::new(), random, at_most));
}

#[test]
fn many_threads_park() {
    stress("many threads, Park", 25_000, |random, at_most| many_threads::round(Park, random, at_most));
}

#[test]
fn many_threads_auto() {
    stress("many threads, Auto", 25_000, |random, at_most| many_threads::round(Auto::new(), random, at_most));
}

#[test]
fn pools_that_finish() {
    let mut random = Random(variable("TWINBUF_STRESS_SEED").unwrap_or(1));
    for _ in 0..if cfg!(miri) { 20 } else { 10_000 } {
        pool::history(&mut random);
    }
}

/// Hands over `handoffs` slots, or the number set in the environment, in rounds of random length. `round` gets the maximum
/// number of hand-offs that it may do, and returns the number that it did.
fn stress(name: &str, handoffs: u64, round: impl Fn(&mut Random, u64) -> u64) {
    // Runs one test at a time: a round needs its two processors.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);

    let handoffs = variable("TWINBUF_STRESS_HANDOFFS").unwrap_or(handoffs);
    let seed = variable("TWINBUF_STRESS_SEED").unwrap_or(1);
    let mut random = Random(seed);
    let start = Instant::now();
    let (mut done, mut rounds) = (0, 0u64);
    while done < handoffs {
        let at_most = (handoffs - done).min(1 << random.below(14)).max(1);
        let once = AssertUnwindSafe(|| round(&mut random, at_most));
        done += catch_unwind(once).unwrap_or_else(|panic| {
            eprintln!("{name}: set TWINBUF_STRESS_SEED={seed} and TWINBUF_STRESS_HANDOFFS={handoffs}");
            eprintln!("{name}: failed in round {rounds} after {done} hand-offs");
            resume_unwind(panic)
        });
        rounds += 1;
    }
    // With --nocapture.
    let time = start.elapsed();
    let each = time.as_nanos() / u128::from(done);
    println!("{name}: {done} hand-offs, seed {seed}, {rounds} rounds, {time:.1?}, {each} ns each");
}

/// Why a call returned no slot.
#[derive(Debug, PartialEq, Eq)]
enum No {
    NotYet,
    Held,
    Cancelled,
    Finished,
    Abandoned,
    Closed,
}

impl From<Closed> for No {
    fn from(_: Closed) -> Self {
        Self::Closed
    }
}

impl From<TryAcquireError> for No {
    fn from(error: TryAcquireError) -> Self {
        if error == TryAcquireError::Closed { Self::Closed } else { Self::NotYet }
    }
}

impl From<TryRecvError> for No {
    fn from(error: TryRecvError) -> Self {
        match error {
            TryRecvError::Held => Self::Held,
            TryRecvError::Cancelled => Self::Cancelled,
            TryRecvError::Abandoned => Self::Abandoned,
            _ => Self::NotYet,
        }
    }
}

impl From<RecvError> for No {
    fn from(error: RecvError) -> Self {
        TryRecvError::from(error).into()
    }
}

/// The next slot by any of the calls, mostly the plain one.
fn acquire<'p, 'r, T, W: WaitUntil>(
    tx: &'p mut Producer<'r, T, W>,
    random: &mut Random,
) -> Result<WriteSlot<'p, 'r, T, W>, No> {
    match random.below(32) {
        0 => Ok(tx.try_acquire()?),
        1 => Ok(tx.acquire_timeout(duration(random))?),
        // A task that polls once and leaves, with its waker registered.
        2 => match tx.poll_acquire(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(slot) => Ok(slot?),
            Poll::Pending => Err(No::NotYet),
        },
        3..6 => Ok(block_on(tx.acquire_async())?),
        _ => Ok(tx.acquire()?),
    }
}

/// Same as `acquire`, for the consumer.
fn receive<'c, 'r, T, W: WaitUntil>(
    rx: &'c mut Consumer<'r, T, W>,
    random: &mut Random,
) -> Result<ReadSlot<'c, 'r, T, W>, No> {
    let slot = match random.below(32) {
        0 => rx.try_recv()?,
        1 => rx.recv_timeout(duration(random))?,
        2 => match rx.poll_recv(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(slot) => slot?,
            Poll::Pending => return Err(No::NotYet),
        },
        3 => rx.recv_timeout(*random.choose(&[Duration::from_secs(3600), Duration::MAX]))?,
        4..8 => block_on(rx.recv_async())?,
        _ => rx.recv()?,
    };
    slot.ok_or(No::Finished)
}

fn variable<T: FromStr<Err: Debug>>(name: &str) -> Option<T> {
    Some(env::var(name).ok()?.parse().unwrap_or_else(|error| panic!("{name}: {error:?}")))
}

/// From zero to about the time of a wake-up by the kernel.
fn duration(random: &mut Random) -> Duration {
    Duration::from_micros(random.below(50))
}
