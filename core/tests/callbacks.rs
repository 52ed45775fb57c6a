//! What the ring calls is foreign code: a strategy or a waker may come back to the consumer, or panic.

use std::cell::RefCell;
use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use twinbuf_core::{
    Consumer, Producer, RecvError, RecvTimeoutError, Ring, Spin, TryAcquireError, TryRecvError, Wait,
    WaitUntil, channel,
};

type Step = Box<dyn FnOnce()>;

thread_local! {
    /// What the strategy and the wakers of this thread still do, the next one last.
    static STEPS: RefCell<Vec<Step>> = const { RefCell::new(Vec::new()) };
}

/// Does the next step, if there is one left.
fn step() {
    let step = STEPS.with_borrow_mut(Vec::pop);
    step.expect("waits for ever")();
}

fn steps(steps: Vec<Step>) {
    STEPS.set(steps.into_iter().rev().collect());
}

/// The place in a wait at which a step is done.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Place {
    /// A look at the clock; only in a wait with a deadline.
    Clock,
    Relax,
    /// As `Relax`, which then says that the wait is to begin.
    LastRelax,
    Wait,
}

/// A strategy that does the next step in each of its waits.
struct Steps(Place);

impl Wait for Steps {
    fn relax(&self, _round: u32) -> bool {
        if matches!(self.0, Place::Relax | Place::LastRelax) {
            step();
        }
        self.0 == Place::Relax
    }

    fn wait(&self, _word: &AtomicU32, _expected: u32) {
        step();
    }

    fn wake(&self, _word: &AtomicU32) {}
}

impl WaitUntil for Steps {
    type Instant = ();

    fn after(&self, _timeout: Duration) -> Option<()> {
        Some(())
    }

    fn expired(&self, (): ()) -> bool {
        if self.0 == Place::Clock {
            step();
            return false;
        }
        STEPS.with_borrow(Vec::is_empty)
    }

    fn wait_until(&self, word: &AtomicU32, expected: u32, (): ()) {
        self.wait(word, expected);
    }
}

/// A waker that does the next step.
struct Stepping;

impl Wake for Stepping {
    fn wake(self: Arc<Self>) {
        step();
    }
}

/// A waker that counts.
#[derive(Default)]
struct Count(AtomicU32);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Relaxed);
    }
}

/// A waker that panics when it is dropped.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {}
}

impl Drop for Bomb {
    fn drop(&mut self) {
        resume_unwind(Box::new("no message"));
    }
}

type Tx<W> = Rc<RefCell<Producer<'static, u64, W>>>;
type Rx<W> = Rc<Consumer<'static, u64, W>>;

/// A ring that its handles own, so that steps can.
fn handles<const N: usize, W: Wait + Send + Sync + 'static>(wait: W) -> (Tx<W>, Rx<W>) {
    let (tx, rx) = Ring::with_wait([0; N], wait).into_handles();
    (Rc::new(RefCell::new(tx)), Rc::new(rx))
}

fn fill<W: Wait + 'static>(tx: &Tx<W>, value: u64) -> Step {
    let tx = tx.clone();
    Box::new(move || {
        let mut tx = tx.borrow_mut();
        let mut slot = tx.try_acquire().unwrap();
        *slot = value;
        slot.commit().unwrap();
    })
}

/// Receives `value` in the midst of another call of the consumer; `keep` leaks the guard.
fn receive<W: Wait + 'static>(rx: &Rx<W>, value: u64, keep: bool) -> Step {
    let rx = rx.clone();
    Box::new(move || {
        let slot = rx.try_recv().unwrap();
        assert_eq!(*slot, value);
        if keep {
            mem::forget(slot);
        }
    })
}

/// Polls for a value.
fn poll(rx: &Consumer<'_, u64>, waker: &Waker) -> Option<u64> {
    match rx.poll_recv(&mut Context::from_waker(waker)) {
        Poll::Ready(slot) => Some(*slot.unwrap()),
        Poll::Pending => None,
    }
}

/// Several steps at once.
fn both(first: Step, second: Step) -> Step {
    Box::new(move || {
        first();
        second();
    })
}

#[test]
fn a_strategy_receives_while_the_consumer_waits() {
    for place in [Place::Relax, Place::Wait] {
        for (keep, timed) in [(false, false), (true, false), (false, true), (true, true)] {
            let (tx, rx) = handles::<2, _>(Steps(place));
            steps(vec![both(fill(&tx, 10), receive(&rx, 10, keep)), fill(&tx, 11)]);
            let slot = if timed { rx.recv_timeout(Duration::MAX).unwrap() } else { rx.recv().unwrap() };
            assert_eq!((slot.seq(), *slot), (1, 11), "{place:?}, {keep}, {timed}");
            assert_eq!(rx.stats().handoffs, 2);
        }
    }
}

/// The word is what it was, so that the announcement succeeds, and yet it is no longer the one to wait for.
#[test]
fn a_strategy_receives_and_releases_just_before_the_announcement() {
    for (place, timed) in [(Place::LastRelax, false), (Place::LastRelax, true), (Place::Clock, true)] {
        let (tx, rx) = handles::<2, _>(Steps(place));
        steps(vec![both(both(fill(&tx, 10), receive(&rx, 10, false)), fill(&tx, 11))]);
        let slot = if timed { rx.recv_timeout(Duration::MAX).unwrap() } else { rx.recv().unwrap() };
        assert_eq!((slot.seq(), *slot), (1, 11), "{place:?}, {timed}");
        assert_eq!(rx.stats().handoffs, 2);
    }
}

#[test]
fn a_strategy_takes_the_only_slot_while_the_consumer_waits() {
    let (tx, rx) = handles::<1, _>(Steps(Place::Relax));
    steps(vec![both(fill(&tx, 10), receive(&rx, 10, true))]);
    assert_eq!(rx.recv().unwrap_err(), RecvError::AllHeld);
    assert_eq!(rx.stats().handoffs, 1);
    assert_eq!(rx.recv_timeout(Duration::ZERO).unwrap_err(), RecvTimeoutError::AllHeld);
}

#[test]
fn a_waker_receives_while_it_is_replaced() {
    for keep in [false, true] {
        let (tx, rx) = handles::<2, _>(Spin);
        let task = Arc::new(Count::default());
        let waker = Waker::from(task.clone());
        assert!(poll(&rx, &Arc::new(Stepping).into()).is_none());
        steps(vec![both(fill(&tx, 10), receive(&rx, 10, keep))]);
        assert_eq!(poll(&rx, &waker), None, "only the first slot was filled, {keep}");
        task.0.store(0, Relaxed);
        fill(&tx, 11)();
        assert_eq!(task.0.load(Relaxed), 1, "the task waits for the second slot, {keep}");
        assert_eq!(poll(&rx, &waker), Some(11));
    }
}

/// Both sides are told of the other's end though the waker that a handle leaves behind panics.
#[test]
fn a_waker_panics_when_it_is_dropped_with_its_handle() {
    let (mut tx, rx) = channel([0, 0]);
    assert!(rx.poll_recv(&mut Context::from_waker(&Arc::new(Bomb).into())).is_pending());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(rx))).is_err());
    assert_eq!(tx.try_acquire().unwrap_err(), TryAcquireError::Closed);

    for finish in [true, false] {
        let (mut tx, rx) = channel([0, 0]);
        tx.acquire().unwrap().commit().unwrap();
        tx.acquire().unwrap().commit().unwrap();
        assert!(tx.poll_acquire(&mut Context::from_waker(&Arc::new(Bomb).into())).is_pending());
        assert!(catch_unwind(AssertUnwindSafe(|| if finish { tx.finish() } else { drop(tx) })).is_err());
        drop(rx.try_recv().unwrap());
        drop(rx.try_recv().unwrap());
        let end = if finish { TryRecvError::Finished } else { TryRecvError::Abandoned };
        assert_eq!(rx.try_recv().unwrap_err(), end);
    }
}
