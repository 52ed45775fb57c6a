//! Wakers are foreign code: they may panic, be replaced, and be polled in the middle of a wake.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Wake, Waker};

use twinbuf_core::{Consumer, HeapRing, KeptSlot, TryAcquireError, TryRecvError, Wait};

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

/// The functions of a waker without data. Its drop does nothing.
const fn table(clone: unsafe fn(*const ()) -> RawWaker, wake: unsafe fn(*const ())) -> RawWakerVTable {
    RawWakerVTable::new(clone, wake, wake, |_| ())
}

fn without_data(table: &'static RawWakerVTable) -> Waker {
    // SAFETY: the functions of the tables below do not use the data.
    unsafe { Waker::from_raw(RawWaker::new(ptr::null(), table)) }
}

fn poll<W: Wait>(rx: &mut Consumer<'_, u64, W>, waker: &Waker) -> Poll<u64> {
    rx.poll_recv(&mut Context::from_waker(waker)).map(|slot| *slot.unwrap().unwrap())
}

/// A combinator that makes a new waker for each poll gets one wake per hand-off, and polls once per wake.
#[test]
fn a_new_waker_for_every_poll_costs_no_further_poll() {
    const HANDOFFS: u32 = 100;
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let wakes = Arc::new(Count::default());
    let mut polls = 0;
    for value in 0..HANDOFFS {
        let seen = wakes.0.load(Relaxed);
        loop {
            struct Forward(Waker);
            impl Wake for Forward {
                fn wake(self: Arc<Self>) {
                    self.0.wake_by_ref();
                }
            }
            polls += 1;
            match poll(&mut rx, &Arc::new(Forward(wakes.clone().into())).into()) {
                Poll::Ready(found) => break assert_eq!(found, value.into()),
                Poll::Pending => tx.fill(|slot| *slot = value.into()).unwrap(),
            }
            assert_eq!(wakes.0.load(Relaxed), seen + 1, "one hand-off, one wake");
        }
    }
    println!("{polls} polls for {HANDOFFS} hand-offs");
    assert_eq!(polls, 2 * HANDOFFS);
}

/// Two wakers with the same data and different functions are different tasks.
#[test]
fn wakers_that_differ_by_their_functions_differ() {
    static WOKEN: [AtomicU32; 2] = [AtomicU32::new(0), AtomicU32::new(0)];
    static TABLES: [RawWakerVTable; 2] = [
        table(|_| RawWaker::new(ptr::null(), &TABLES[0]), |_| _ = WOKEN[0].fetch_add(1, Relaxed)),
        table(|_| RawWaker::new(ptr::null(), &TABLES[1]), |_| _ = WOKEN[1].fetch_add(1, Relaxed)),
    ];
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    for table in &TABLES {
        assert!(poll(&mut rx, &without_data(table)).is_pending());
    }
    tx.fill(|slot| *slot = 1).unwrap();
    assert_eq!(
        WOKEN.each_ref().map(|woken| woken.load(Relaxed)),
        [0, 1],
        "the task that polled last is woken"
    );
}

/// A task that polls within its wake, as an executor in an interrupt does, registers for the next hand-off.
#[test]
fn a_task_polls_within_the_wake() {
    struct Inline {
        rx: Mutex<Option<Consumer<'static, u64>>>,
        received: Mutex<Vec<u64>>,
        polls: AtomicU32,
    }
    impl Wake for Inline {
        fn wake(self: Arc<Self>) {
            let mut rx = self.rx.lock().unwrap();
            let waker = self.clone().into();
            loop {
                self.polls.fetch_add(1, Relaxed);
                match poll(rx.as_mut().unwrap(), &waker) {
                    Poll::Ready(value) => self.received.lock().unwrap().push(value),
                    Poll::Pending => return,
                }
            }
        }
    }
    let (mut tx, rx) = HeapRing::new([0, 0]).into_handles();
    let task =
        Arc::new(Inline { rx: Mutex::new(Some(rx)), received: Mutex::default(), polls: AtomicU32::new(0) });
    task.clone().wake(); // the first poll
    for value in 0..100 {
        tx.fill(|slot| *slot = value).unwrap();
    }
    assert!((0..100).eq(task.received.lock().unwrap().iter().copied()));
    assert_eq!(task.polls.load(Relaxed), 201, "one poll finds the value, the next one waits");
    drop(task.rx.lock().unwrap().take()); // the waker owns the task, and the task owns the consumer
}

/// Both sides learn of the other's end even if the waker that a handle leaves behind panics.
#[test]
fn a_waker_panics_when_it_is_dropped_with_its_handle() {
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    assert!(rx.poll_recv(&mut Context::from_waker(&Arc::new(Bomb).into())).is_pending());
    assert!(catch_unwind(AssertUnwindSafe(|| drop(rx))).is_err());
    assert_eq!(tx.try_acquire().unwrap_err(), TryAcquireError::Closed);

    for finish in [true, false] {
        let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
        tx.acquire().unwrap().commit().unwrap();
        tx.acquire().unwrap().commit().unwrap();
        assert!(tx.poll_acquire(&mut Context::from_waker(&Arc::new(Bomb).into())).is_pending());
        assert!(catch_unwind(AssertUnwindSafe(|| if finish { tx.finish() } else { drop(tx) })).is_err());
        drop(rx.try_recv().unwrap());
        drop(rx.try_recv().unwrap());
        let end = if finish { Ok(true) } else { Err(TryRecvError::Abandoned) };
        assert_eq!(rx.try_recv().map(|slot| slot.is_none()), end);
    }
}

/// A task that polls again while its waker is registered does not clone the waker again, and is not woken twice.
#[test]
fn a_waker_is_cloned_once_a_registration() {
    static CLONES: AtomicU32 = AtomicU32::new(0);
    static WAKES: AtomicU32 = AtomicU32::new(0);
    static TABLE: RawWakerVTable = table(
        |_| {
            CLONES.fetch_add(1, Relaxed);
            RawWaker::new(ptr::null(), &TABLE)
        },
        |_| _ = WAKES.fetch_add(1, Relaxed),
    );
    let waker = without_data(&TABLE);
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    for round in 1..=10 {
        for _ in 0..100 {
            assert!(poll(&mut rx, &waker).is_pending());
        }
        assert_eq!(CLONES.load(Relaxed), round);
        tx.fill(|slot| *slot = 1).unwrap();
        assert_eq!(WAKES.load(Relaxed), round);
        assert!(poll(&mut rx, &waker).is_ready());
    }
}

/// A commit wakes the consumer alone: not the producer's own task, even if its waker is still registered.
#[test]
fn a_commit_does_not_wake_the_task_that_commits() {
    static KEPT: Mutex<Option<KeptSlot<'static, u64>>> = Mutex::new(None);
    static WAKES: AtomicU32 = AtomicU32::new(0);
    static TABLE: RawWakerVTable = table(
        |_| {
            drop(KEPT.lock().unwrap().take()); // the slot is free before the poll looks again: ready, and registered
            RawWaker::new(ptr::null(), &TABLE)
        },
        |_| _ = WAKES.fetch_add(1, Relaxed),
    );
    let waker = without_data(&TABLE);
    let (mut tx, mut rx) = HeapRing::new([0]).into_handles();
    tx.fill(|slot| *slot = 1).unwrap();
    *KEPT.lock().unwrap() = Some(rx.recv().unwrap().unwrap().keep());
    let Poll::Ready(Ok(slot)) = tx.poll_acquire(&mut Context::from_waker(&waker)) else { panic!("released") };
    let consumer = Arc::new(Count::default());
    assert!(poll(&mut rx, &consumer.clone().into()).is_pending());
    slot.commit().unwrap();
    assert_eq!((WAKES.load(Relaxed), consumer.0.load(Relaxed)), (0, 1));
}
