//! An executor in an interrupt handler, on the one core that it interrupts. Here the handler is a signal handler that
//! polls. It interrupts the main thread anywhere in a release, including the release's wake.
//!
//! The handler finishes before the main thread continues, so a wait for the main thread inside it would never end. Each
//! run of the handler polls at most [`MOST`] times, because a poll that finds nothing
//! must have left a waker that the interrupted wake, or the next one, finds.
#![cfg(all(target_os = "linux", not(miri)))]

use std::cell::UnsafeCell;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use twinbuf_core::{Consumer, DoubleBuffer, Producer};

/// A task that every signal runs, and again while it is marked as woken.
struct Task {
    woken: AtomicBool,
    wakes: AtomicU64,
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.wakes.fetch_add(1, Relaxed);
        self.woken.store(true, Relaxed);
    }
}

/// The state of the handler. No other code touches it once signals arrive.
struct Executor {
    tx: Producer<'static, u64>,
    task: Arc<Task>,
    waker: Waker,
    sent: u64,
    timer: libc::timer_t,
    /// The number of consecutive runs that found nothing released.
    vain: u32,
}

struct Shared(UnsafeCell<MaybeUninit<Executor>>);
// SAFETY: one thread, and only its signal handler touches the cell while the timer runs.
unsafe impl Sync for Shared {}

static EXECUTOR: Shared = Shared(UnsafeCell::new(MaybeUninit::uninit()));
static MOST_POLLS: AtomicU64 = AtomicU64::new(0);
static RUNS: AtomicU64 = AtomicU64::new(0);

/// One run may fill both slots (one poll each), find the ring full (one poll), and be woken in between.
const MOST: u64 = 8;
const HANDOFFS: u64 = 100_000;

/// The initial time from the end of one run to the next signal. The main thread releases a slot many times within it.
const EVERY: Duration = Duration::from_micros(37);

/// Sets the timer for one signal. The main thread has the time until then to itself, even on a slow machine: the time
/// is doubled for each run in vain, because a slow machine needs more than `EVERY` to return from the handler.
fn arm(executor: &Executor) {
    let after = EVERY * (1 << executor.vain.min(14));
    let after = libc::timespec { tv_sec: 0, tv_nsec: after.as_nanos().try_into().expect("below a second") };
    let spec = libc::itimerspec { it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 }, it_value: after };
    // SAFETY: the timer exists until the test ends; the pointer is to a local; a handler may call this
    // (signal-safety(7)).
    assert_eq!(unsafe { libc::timer_settime(executor.timer, 0, &raw const spec, ptr::null_mut()) }, 0);
}

/// Runs the task, woken or not, and repeats while it has been woken.
extern "C" fn on_signal(_: libc::c_int) {
    // SAFETY: no other code touches the cell while the timer runs; the signal is blocked while its handler runs.
    let executor = unsafe { &mut *EXECUTOR.0.get() };
    // SAFETY: written before the timer was set.
    let executor = unsafe { executor.assume_init_mut() };
    RUNS.fetch_add(1, Relaxed);
    let sent = executor.sent;
    let mut polls = 0;
    executor.task.woken.store(true, Relaxed);
    while executor.task.woken.swap(false, Relaxed) {
        loop {
            polls += 1;
            assert!(polls < 1_000_000, "polls for ever");
            let mut cx = Context::from_waker(&executor.waker);
            match executor.tx.poll_acquire(&mut cx) {
                Poll::Ready(Ok(mut slot)) => {
                    *slot = executor.sent;
                    executor.sent += 1;
                    slot.commit().expect("the consumer is there");
                }
                Poll::Ready(Err(error)) => panic!("{error}"),
                Poll::Pending => break,
            }
        }
    }
    MOST_POLLS.fetch_max(polls, Relaxed);
    executor.vain = if executor.sent == sent { executor.vain + 1 } else { 0 };
    if executor.sent < HANDOFFS {
        arm(executor);
    }
}

#[test]
fn an_executor_in_an_interrupt_is_not_kept_busy() {
    static RING: DoubleBuffer<u64> = DoubleBuffer::new([0, 0]);
    let (tx, mut rx): (_, Consumer<'static, u64>) = RING.try_split_static().unwrap();
    let task = Arc::new(Task { woken: AtomicBool::new(true), wakes: AtomicU64::new(0) });
    // SAFETY: zero is a valid value of all of its fields.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    action.sa_sigaction = on_signal as *const () as usize;
    // SAFETY: the handler has the required signature; the pointer is to a local.
    let set = unsafe { libc::sigaction(libc::SIGALRM, &raw const action, ptr::null_mut()) };
    assert_eq!(set, 0);
    // The signal is sent to this thread, and may arrive anywhere in the loop below.
    let mut timer: libc::timer_t = ptr::null_mut();
    // SAFETY: zero is a valid value of all of its fields.
    let mut event: libc::sigevent = unsafe { MaybeUninit::zeroed().assume_init() };
    event.sigev_notify = libc::SIGEV_THREAD_ID;
    event.sigev_signo = libc::SIGALRM;
    // SAFETY: takes nothing and cannot fail.
    event.sigev_notify_thread_id = unsafe { libc::gettid() };
    // SAFETY: both point to locals.
    let made = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
    assert_eq!(made, 0);
    let executor = Executor { tx, waker: task.clone().into(), task: task.clone(), sent: 0, timer, vain: 0 };
    // SAFETY: no signal comes yet, and there is one test.
    arm(unsafe { &mut *EXECUTOR.0.get() }.write(executor));

    let mut next = 0;
    while next < HANDOFFS {
        if let Ok(Some(slot)) = rx.try_recv() {
            assert_eq!(*slot, next);
            next += 1;
        } // released here: the release and its wake are interrupted anywhere
    }
    // SAFETY: the timer was made above.
    assert_eq!(unsafe { libc::timer_delete(timer) }, 0);
    let (runs, most) = (RUNS.load(Relaxed), MOST_POLLS.load(Relaxed));
    println!(
        "{runs} interrupts, {HANDOFFS} hand-offs, {} wakes; most polls in one: {most}",
        task.wakes.load(Relaxed)
    );
    assert!(most <= MOST, "{most} polls in one interrupt");
}
