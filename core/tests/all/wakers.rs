//! Wakers are foreign code: they may panic, be replaced, and be polled in the middle of a wake.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
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

fn poll<W: Wait>(rx: &mut Consumer<'_, u64, W>, waker: &Waker) -> Poll<u64> {
    rx.poll_recv(&mut Context::from_waker(waker)).map(|slot| *slot.unwrap().unwrap())
}

/// Two tasks that take turns polling one consumer do not wake each other: only the latest one is woken.
#[test]
fn a_task_that_displaces_another_does_not_wake_it() {
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let tasks = [Arc::new(Count::default()), Arc::new(Count::default())];
    for round in 0..10 {
        assert!(poll(&mut rx, &tasks[round % 2].clone().into()).is_pending());
    }
    assert_eq!(tasks.each_ref().map(|task| task.0.load(Relaxed)), [0, 0]);
    tx.fill(|slot| *slot = 1).unwrap();
    assert_eq!(tasks.each_ref().map(|task| task.0.load(Relaxed)), [0, 1]);
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
    fn waker<const TASK: usize>() -> Waker {
        const fn table<const TASK: usize>() -> &'static RawWakerVTable {
            &RawWakerVTable::new(
                |_| RawWaker::new(ptr::null(), table::<TASK>()),
                |_| _ = WOKEN[TASK].fetch_add(1, Relaxed),
                |_| _ = WOKEN[TASK].fetch_add(1, Relaxed),
                |_| (),
            )
        }
        // SAFETY: the functions do not use the data.
        unsafe { Waker::from_raw(RawWaker::new(ptr::null(), table::<TASK>())) }
    }
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    assert!(poll(&mut rx, &waker::<0>()).is_pending());
    assert!(poll(&mut rx, &waker::<1>()).is_pending());
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

/// A producer waits for the slot that it has reserved itself, and continues when the consumer has released it.
#[test]
fn a_producer_awaits_its_own_reservation() {
    let (mut tx, mut rx) = HeapRing::new([0, 0]).into_handles();
    let [first, second] = [(); 2].map(|()| tx.acquire().unwrap().reserve());
    let (producer, consumer) = (Arc::new(Count::default()), Arc::new(Count::default()));
    let (producers, consumers) = (producer.clone().into(), consumer.clone().into());
    let mut acquired = Box::pin(tx.acquire_async());
    let mut cx = Context::from_waker(&producers);
    assert!(Pin::new(&mut acquired).poll(&mut cx).is_pending());
    assert!(poll(&mut rx, &consumers).is_pending()); // both wait for the same word
    first.commit().unwrap();
    assert_eq!((consumer.0.load(Relaxed), producer.0.load(Relaxed)), (1, 1), "the one bit was that of both");
    assert!(Pin::new(&mut acquired).poll(&mut cx).is_pending(), "committed and not received yet");
    assert_eq!(poll(&mut rx, &consumers), Poll::Ready(0));
    assert_eq!(producer.0.load(Relaxed), 2);
    let Poll::Ready(Ok(third)) = Pin::new(&mut acquired).poll(&mut cx) else { panic!("it was released") };
    assert_eq!(third.seq(), 2);
    drop(second);
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
    static TABLE: RawWakerVTable = RawWakerVTable::new(
        |_| {
            CLONES.fetch_add(1, Relaxed);
            RawWaker::new(ptr::null(), &TABLE)
        },
        |_| _ = WAKES.fetch_add(1, Relaxed),
        |_| _ = WAKES.fetch_add(1, Relaxed),
        |_| (),
    );
    // SAFETY: the functions do not use the data.
    let waker = unsafe { Waker::from_raw(RawWaker::new(ptr::null(), &TABLE)) };
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
    static TABLE: RawWakerVTable = RawWakerVTable::new(
        |_| {
            drop(KEPT.lock().unwrap().take()); // the slot is free before the poll looks again: ready, and registered
            RawWaker::new(ptr::null(), &TABLE)
        },
        |_| _ = WAKES.fetch_add(1, Relaxed),
        |_| _ = WAKES.fetch_add(1, Relaxed),
        |_| (),
    );
    // SAFETY: the functions do not use the data.
    let waker = unsafe { Waker::from_raw(RawWaker::new(ptr::null(), &TABLE)) };
    let (mut tx, mut rx) = HeapRing::new([0]).into_handles();
    tx.fill(|slot| *slot = 1).unwrap();
    *KEPT.lock().unwrap() = Some(rx.recv().unwrap().unwrap().keep());
    let Poll::Ready(Ok(slot)) = tx.poll_acquire(&mut Context::from_waker(&waker)) else { panic!("released") };
    let consumer = Arc::new(Count::default());
    assert!(poll(&mut rx, &consumer.clone().into()).is_pending());
    slot.commit().unwrap();
    assert_eq!((WAKES.load(Relaxed), consumer.0.load(Relaxed)), (0, 1));
}

/// The release of a kept slot wakes both the consumer and the producer that wait for it.
#[test]
fn a_release_wakes_both_sides() {
    let (mut tx, mut rx) = HeapRing::new([0]).into_handles();
    tx.fill(|slot| *slot = 1).unwrap();
    let kept = rx.recv().unwrap().unwrap().keep();
    let (producer, consumer) = (Arc::new(Count::default()), Arc::new(Count::default()));
    assert!(tx.poll_acquire(&mut Context::from_waker(&producer.clone().into())).is_pending());
    assert!(poll(&mut rx, &consumer.clone().into()).is_pending());
    drop(kept);
    assert_eq!((producer.0.load(Relaxed), consumer.0.load(Relaxed)), (1, 1));
    assert!(poll(&mut rx, &consumer.clone().into()).is_pending(), "released, and not filled yet");
    tx.fill(|slot| *slot = 2).unwrap();
    assert_eq!((producer.0.load(Relaxed), consumer.0.load(Relaxed)), (1, 2));
    assert_eq!(poll(&mut rx, &consumer.into()), Poll::Ready(2));
}
