//! The ring with real threads: static and owned handles, timeouts, the end, and the cost of a wait. The stress test has
//! hand-offs of every kind, between two threads and among many.

use std::fmt::Debug;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use pollster::block_on;
use twinbuf_core::{
    Auto, Closed, DoubleBuffer, HeapRing, Park, Producer, RecvError, Spin, TryAcquireError, TryRecvError,
    Wait, WaitUntil,
};

/// Longer than any test.
const FAR: Duration = Duration::from_secs(1 << 20);

/// Enough for both sides to wait many times; fewer under an interpreter.
const MANY: u64 = if cfg!(miri) { 30 } else { 2000 };

fn fill<W: Wait>(tx: &mut Producer<'_, u64, W>, value: u64) {
    tx.fill(|slot| *slot = value).expect("the consumer is there");
}

/// Returns once the other side has announced that it waits for this handle's next slot.
fn until_waited_for(handle: &impl Debug) {
    while !format!("{handle:?}").contains("WAITER") {
        thread::yield_now();
    }
}

/// The ring is freed within a call that received the handle, so nothing in a handle may be a reference into the ring. A
/// normal run cannot show a violation; Miri does.
#[test]
fn the_last_of_the_owned_handles_frees_the_ring() {
    for producer_is_last in [true, false] {
        let (mut tx, mut rx) = HeapRing::new([vec![0; 10], vec![]]).into_handles();
        tx.acquire().unwrap().commit().unwrap();
        if producer_is_last {
            drop(rx);
            tx.finish();
        } else {
            drop(tx);
            assert_eq!(rx.recv().unwrap().unwrap().len(), 10);
            drop(rx);
        }
    }
}

#[test]
fn a_static_ring() {
    static RING: DoubleBuffer<u64, Park> = DoubleBuffer::with_wait([0, 0], Park);
    let (mut tx, mut rx) = RING.try_split_static().unwrap();
    let producer = thread::spawn(move || {
        (0..MANY).for_each(|value| fill(&mut tx, value));
        tx.finish();
    });
    for value in 0..MANY {
        assert_eq!(*rx.recv().expect("the producer finishes").expect("not the end"), value);
    }
    assert!(rx.recv().expect("the producer finishes").is_none());
    producer.join().unwrap();
    drop(rx);
    assert!(RING.try_split_static().is_none());
}

#[test]
fn a_wait_ends_with_its_timeout() {
    fn with(wait: impl WaitUntil<Instant = Instant>) {
        let mut ring = DoubleBuffer::with_wait([0, 0], wait);
        let (mut tx, mut rx) = ring.split();
        let timeout = Duration::from_millis(2);

        let start = Instant::now();
        assert_eq!(rx.recv_timeout(timeout).unwrap_err(), TryRecvError::Empty);
        assert!(start.elapsed() >= timeout);

        fill(&mut tx, 1);
        fill(&mut tx, 2);
        let deadline = Instant::now() + timeout;
        assert_eq!(tx.acquire_deadline(deadline).unwrap_err(), TryAcquireError::Full);
        assert!(Instant::now() >= deadline);

        // A filled slot is returned whatever the timeout; the wait lost nothing.
        assert_eq!(*rx.recv_timeout(Duration::ZERO).unwrap().unwrap(), 1);
        assert_eq!(*rx.recv_deadline(start).unwrap().unwrap(), 2);
        assert!(tx.acquire_timeout(Duration::ZERO).is_ok());
        drop(rx);
        assert_eq!(tx.acquire_timeout(timeout).unwrap_err(), TryAcquireError::Closed);
    }
    with(Spin);
    with(Park);
    with(Auto::new());
}

#[test]
fn a_wait_with_a_far_timeout_ends_with_the_hand_off() {
    // The first timeout is too long for the clock, the second is not.
    for timeout in [Duration::MAX, FAR] {
        let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
        thread::scope(|scope| {
            let consumer = scope.spawn(move || {
                assert_eq!(*rx.recv_timeout(timeout).unwrap().unwrap(), 1);
                rx
            });
            until_waited_for(&tx);
            fill(&mut tx, 1);
            let mut rx = consumer.join().unwrap();
            fill(&mut tx, 2);
            fill(&mut tx, 3);
            let producer = scope.spawn(move || tx.acquire_timeout(timeout).map(|slot| slot.seq()));
            until_waited_for(&rx);
            assert_eq!(*rx.recv().unwrap().unwrap(), 2);
            assert_eq!(producer.join().unwrap(), Ok(3));
        });
    }
}

/// A blocking wait of one side ends when the other side is dropped.
#[test]
fn the_end_wakes_who_waits() {
    fn with(wait: impl WaitUntil + Sync) {
        let mut ring = DoubleBuffer::with_wait([0, 0], wait);
        for finish in [true, false] {
            let (tx, mut rx) = ring.split();
            thread::scope(|scope| {
                let consumer = scope.spawn(move || rx.recv().map(|slot| slot.is_some()));
                until_waited_for(&tx);
                if finish {
                    tx.finish();
                } else {
                    drop(tx);
                }
                let expected = if finish { Ok(false) } else { Err(RecvError::Abandoned) };
                assert_eq!(consumer.join().unwrap(), expected);
            });
        }
        for timed in [true, false] {
            let (mut tx, rx) = ring.split();
            fill(&mut tx, 1);
            fill(&mut tx, 2);
            thread::scope(|scope| {
                let producer = scope.spawn(move || {
                    if timed {
                        tx.acquire_timeout(FAR).map(drop).unwrap_err()
                    } else {
                        tx.acquire().map(drop).map_err(|Closed| TryAcquireError::Closed).unwrap_err()
                    }
                });
                until_waited_for(&rx);
                drop(rx);
                assert_eq!(producer.join().unwrap(), TryAcquireError::Closed);
            });
        }
    }
    with(Park);
    with(Auto::new());
}

/// Polled first on one thread, then on another, as an executor may.
#[test]
fn a_task_that_receives_moves_between_threads() {
    type Task<'a> = Pin<Box<dyn Future<Output = u64> + Send + 'a>>;

    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let mut task: Task<'_> = Box::pin(async move { *rx.recv_async().await.unwrap().unwrap() });
    let task = thread::spawn(move || {
        assert_eq!(task.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending);
        task
    });
    let task = task.join().unwrap();
    let waiting = thread::spawn(|| block_on(task));
    fill(&mut tx, 7);
    assert_eq!(waiting.join().unwrap(), 7);
}

/// While the other side works, a parked side uses almost no CPU time.
///
/// Measured in CPU time on both sides, so a busy machine does not affect the result.
#[cfg(target_os = "linux")]
mod cpu_time {
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    use twinbuf_core::Word;

    use super::*;

    /// The CPU time that the other side uses during the wait.
    const WORK: Duration = Duration::from_millis(200);
    /// The CPU time that the wait may use in this time. A side that spins would use as much as the other side.
    const WAIT: Duration = Duration::from_millis(10);

    /// The CPU time that this thread has used.
    fn used() -> Duration {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer is to a local variable.
        let result = unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        assert_eq!(result, 0);
        let [seconds, nanos] = [time.tv_sec, time.tv_nsec].map(|part| part.try_into().expect("not negative"));
        Duration::from_secs(seconds) + Duration::from_nanos(nanos)
    }

    fn work() {
        let start = used();
        while used() - start < WORK {}
    }

    /// The CPU time that `wait` uses on this thread.
    fn cost(wait: impl FnOnce()) -> Duration {
        let start = used();
        wait();
        used() - start
    }

    fn waiting_side_sleeps(wait: impl WaitUntil + Sync) {
        let mut ring = DoubleBuffer::with_wait([0, 0], wait);
        let (mut tx, mut rx) = ring.split();
        thread::scope(|scope| {
            let consumer = scope.spawn(move || {
                let blocking = cost(|| drop(rx.recv().unwrap()));
                let timed = cost(|| drop(rx.recv_timeout(FAR).unwrap()));
                let task = cost(|| drop(block_on(rx.recv_async()).unwrap()));
                (rx, [blocking, timed, task])
            });
            for value in 0..3 {
                work();
                fill(&mut tx, value);
            }
            let (mut rx, costs) = consumer.join().unwrap();
            assert!(costs.iter().all(|&cost| cost < WAIT), "the consumer used {costs:?}");

            fill(&mut tx, 3);
            fill(&mut tx, 4);
            let producer = scope.spawn(move || {
                let blocking = cost(|| fill(&mut tx, 5));
                let timed = cost(|| tx.acquire_timeout(FAR).unwrap().commit().unwrap());
                let task = cost(|| drop(block_on(tx.acquire_async()).unwrap()));
                [blocking, timed, task]
            });
            for _ in 0..3 {
                work();
                drop(rx.recv().unwrap());
            }
            let costs = producer.join().unwrap();
            assert!(costs.iter().all(|&cost| cost < WAIT), "the producer used {costs:?}");
        });
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no clock for CPU time")]
    fn parked() {
        waiting_side_sleeps(Park);
    }

    #[test]
    #[cfg_attr(miri, ignore = "Miri has no clock for CPU time")]
    fn by_default() {
        waiting_side_sleeps(Auto::new());
    }

    /// Short timeouts sleep too, each a few times. There are enough of them to fill `WORK`, and no slot arrives in any of them.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no clock for CPU time")]
    fn short_timeouts() {
        /// Counts the sleeps. On a busy machine many short ones use little CPU time.
        struct Counted(Auto);
        static SLEEPS: AtomicUsize = AtomicUsize::new(0);

        impl Wait for Counted {
            fn relax(&self, round: u32) -> bool {
                self.0.relax(round)
            }
            fn wait(&self, word: Word<'_>, expected: u32) {
                self.0.wait(word, expected);
            }
            fn wake(&self, word: Word<'_>) {
                self.0.wake(word);
            }
        }

        impl WaitUntil for Counted {
            type Instant = Instant;
            fn after(&self, timeout: Duration) -> Option<Instant> {
                self.0.after(timeout)
            }
            fn expired(&self, deadline: Instant) -> bool {
                self.0.expired(deadline)
            }
            fn wait_until(&self, word: Word<'_>, expected: u32, deadline: Instant) {
                SLEEPS.fetch_add(1, Relaxed);
                self.0.wait_until(word, expected, deadline);
            }
        }

        let (_tx, mut rx) = HeapRing::with_wait([0, 0], Counted(Auto::new())).into_handles();
        let each = WORK / 4;
        let cost = cost(|| (0..4).for_each(|_| assert!(rx.recv_timeout(each).is_err())));
        assert!(cost < WAIT, "four waits of {each:?} used {cost:?}");
        let sleeps = SLEEPS.load(Relaxed);
        assert!(sleeps <= 40, "four waits of {each:?} slept {sleeps} times");
    }

    /// A wait for a slot that another thread keeps sleeps too.
    #[test]
    #[cfg_attr(miri, ignore = "Miri has no clock for CPU time")]
    fn held() {
        let (mut tx, mut rx) = HeapRing::new([0]).into_handles();
        fill(&mut tx, 0);
        let slot = rx.recv().unwrap().unwrap().keep();
        tx.finish();
        assert!(rx.recv().unwrap().is_none(), "the end comes first");

        let (mut tx, mut rx) = HeapRing::new([0]).into_handles();
        drop(slot);
        fill(&mut tx, 1);
        let slot = rx.recv().unwrap().unwrap().keep();
        thread::scope(|scope| {
            let consumer = scope.spawn(move || cost(|| assert_eq!(*rx.recv().unwrap().unwrap(), 2)));
            until_waited_for(&tx);
            work();
            drop(slot);
            fill(&mut tx, 2);
            let cost = consumer.join().unwrap();
            assert!(cost < WAIT, "the consumer used {cost:?}");
        });
    }
}
