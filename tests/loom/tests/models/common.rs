//! Shared by all models: two parkers, four ways to wait, a clock, a task, and the run itself.

use std::any::Any;
use std::cell::{Cell, RefCell};
use std::env;
use std::fmt::Debug;
use std::future::Future;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use loom::sync::{Condvar, Mutex};
use loom::thread;
use twinbuf_core::sync::Ordering;
use twinbuf_core::{
    Closed, Consumer, KeptSlot, Producer, ReadSlot, RecvError, ReservedSlot, Ring, TryAcquireError,
    TryRecvError, Wait, WaitUntil, Word, WriteSlot,
};

pub(crate) type Tx<P> = Producer<'static, usize, P>;
pub(crate) type Rx<P> = Consumer<'static, usize, P>;
pub(crate) type Guard<P> = KeptSlot<'static, usize, P>;
pub(crate) type Reading<'c, P> = ReadSlot<'c, 'static, usize, P>;
pub(crate) type Writing<'p, P> = WriteSlot<'p, 'static, usize, P>;
pub(crate) type Reserved<P> = ReservedSlot<'static, usize, P>;

// Running ------------------------------------------------------------------------------------------------------

/// How often the explored schedules may preempt a thread that could continue. `None`: without a limit, so the search is
/// exhaustive.
pub(crate) type Bound = Option<usize>;

/// Runs the model of this test in a process of its own, unless `TWINBUF_MODELS_IN_PROCESS` is set.
///
/// loom maps and unmaps a stack for each thread of each execution. Two models in one process wait for each other there:
/// together they take longer than one after the other.
pub(crate) fn alone(test: &str, model: impl FnOnce()) {
    const IN_PROCESS: &str = "TWINBUF_MODELS_IN_PROCESS";
    if env::var_os(IN_PROCESS).is_some() {
        return model();
    }
    let test = test.strip_prefix("models::").unwrap_or(test);
    let output = Command::new(env::current_exe().unwrap())
        .args([test, "--exact", "--include-ignored", "--nocapture"])
        .env(IN_PROCESS, "1")
        .output()
        .unwrap();
    let printed = String::from_utf8_lossy(&output.stdout);
    // Only a model that ran to its end prints its row.
    if let (true, Some(row)) = (output.status.success(), printed.lines().find(|line| line.starts_with("| `")))
    {
        return println!("\n{row}");
    }
    panic!("{test}, {}:\n{printed}{}", output.status, String::from_utf8_lossy(&output.stderr));
}

/// One model: all variants, with every parker.
pub(crate) struct Run {
    name: String,
    hazard: String,
    bound: Bound,
    /// What is explored now.
    variant: String,
    executions: usize,
    start: Instant,
}

impl Run {
    pub(crate) fn new(name: &str, hazard: &[&str], bound: Bound) -> Self {
        let name = name.strip_prefix("models::").unwrap_or(name).into();
        let hazard = hazard.concat().trim().into();
        Self { name, hazard, bound, variant: String::new(), executions: 0, start: Instant::now() }
    }

    /// Explores one variant twice: at each [`spawn`], once with either thread going first.
    ///
    /// The order should make no difference, but loom remembers only the last access to an atomic: a load by the thread
    /// that goes first is never tried again after another thread's load and exchange.
    pub(crate) fn explore(&mut self, variant: &dyn Debug, f: impl Fn() + Send + Sync + 'static) {
        let f = Arc::new(f);
        for first in [First::Spawning, First::Spawned] {
            self.variant = format!("{variant:?}, {first:?}");
            let executions = Arc::new(AtomicUsize::new(0));
            let (f, count) = (f.clone(), executions.clone());
            let mut model = loom::model::Builder::new();
            model.preemption_bound = self.bound;
            model.max_branches = 20_000; // loom's path has room for 65 535
            model.check(move || {
                FIRST.set(first); // loom runs all modelled threads on this one
                count.fetch_add(1, Relaxed);
                f();
                free_kept();
            });
            self.executions += executions.load(Relaxed);
        }
    }
}

/// Prints the run as a row of a table, or the variant that failed.
impl Drop for Run {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return eprintln!("in {}, {}", self.name, self.variant);
        }
        let bound = self
            .bound
            .map_or("exhaustive".into(), |n| format!("{n} preemption{}", if n == 1 { "" } else { "s" }));
        let seconds = self.start.elapsed().as_secs_f64();
        println!("\n| `{}` | {} | {bound} | {} | {seconds:.1} s |", self.name, self.hazard, self.executions);
    }
}

/// The thread that runs first after a spawn.
#[derive(Clone, Copy, Debug, PartialEq)]
enum First {
    Spawning,
    Spawned,
}

std::thread_local! {
    static FIRST: Cell<First> = const { Cell::new(First::Spawning) };
}

/// Spawns a modelled thread.
pub(crate) fn spawn<R: 'static>(f: impl FnOnce() -> R + 'static) -> thread::JoinHandle<R> {
    let thread = thread::spawn(f);
    if FIRST.get() == First::Spawned {
        thread::yield_now();
    }
    thread
}

/// Defines the test, or the two tests, of a model: a function over a [`Parker`], and over a variant if `over` lists
/// some.
///
/// The doc comment names the hazard. The bound is `exhaustive` or a number of preemptions, and without `TWINBUF_TEST_WHOLE`
/// that behind `quick`; the number behind `deep` adds an ignored test of that depth. The prefix `without a parker` means that nothing waits by one. The prefix `both asleep`
/// means that two sides wait for a third thread: if they only yielded, they could yield to each other forever.
macro_rules! check {
    (without a parker $($model:tt)+) => {
        check!(@model [YieldPark] $($model)+);
    };
    (both asleep $($model:tt)+) => {
        check!(@model [ModelPark] $($model)+);
    };
    (@model $parkers:tt $(#[doc = $hazard:literal])+
        $name:ident $(over [$($variant:expr),+ $(,)?])?, $fast:tt $(quick $quick:tt)? $(, deep $deep:tt)?) => {
        $(#[doc = $hazard])+
        mod $name {
            #[allow(unused_imports)]
            use super::*;

            fn run(bound: $crate::common::Bound) {
                let mut run = $crate::common::Run::new(module_path!(), &[$($hazard),+], bound);
                check!(@each run, $name, $parkers $(, $($variant),+)?);
            }

            #[test]
            fn fast() {
                let bound = check!(@bound $fast);
                $(let bound = twinbuf_testing::extent(check!(@bound $quick), bound);)?
                $crate::common::alone(concat!(module_path!(), "::fast"), || run(bound));
            }

            $(
                #[test]
                #[ignore = "deep: see README.md"]
                fn deep() {
                    $crate::common::alone(concat!(module_path!(), "::deep"), || run(check!(@bound $deep)));
                }
            )?
        }
    };
    (@each $run:ident, $name:ident, [$($parker:ident),+]) => {
        $($run.explore(&stringify!($parker), super::$name::<$crate::common::$parker>);)+
    };
    (@each $run:ident, $name:ident, $parkers:tt, $($variant:expr),+) => {
        for variant in [$($variant),+] {
            check!(@variant $run, $name, $parkers, variant);
        }
    };
    (@variant $run:ident, $name:ident, [$($parker:ident),+], $variant:ident) => {
        $($run.explore(&(stringify!($parker), $variant), move || {
            super::$name::<$crate::common::$parker>($variant);
        });)+
    };
    (@bound exhaustive) => { None };
    (@bound $bound:literal) => { Some($bound) };
    ($($model:tt)+) => {
        check!(@model [ModelPark, YieldPark] $($model)+);
    };
}
pub(crate) use check;

// Parkers ------------------------------------------------------------------------------------------------------

/// The only point in time: the call of [`Parker::ring_the_bell`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bell;

pub(crate) trait Parker: WaitUntil<Instant = Bell> + Clone + Send + Sync + 'static {
    fn new() -> Self;

    /// Lets the deadline pass.
    fn ring_the_bell(&self);

    /// The number of `wake` calls.
    fn wakes(&self) -> usize;

    /// Runs a future to its end, waiting as this parker waits.
    fn block_on<F: Future>(future: F) -> F::Output;
}

/// Sleeps until woken. After a lost wakeup no thread can run, and loom reports a deadlock.
#[derive(Clone)]
pub(crate) struct ModelPark(Arc<Bed>);

struct Bed {
    rung: Mutex<bool>,
    changed: Condvar,
    wakes: AtomicUsize,
}

impl Wait for ModelPark {
    fn relax(&self, _round: u32) -> bool {
        false
    }

    fn wait(&self, word: Word<'_>, expected: u32) {
        let mut rung = self.0.rung.lock().unwrap();
        while word.load() == expected {
            rung = self.0.changed.wait(rung).unwrap();
        }
    }

    fn wake(&self, _word: Word<'_>) {
        self.0.wakes.fetch_add(1, Relaxed);
        // Locked and unlocked, so the call does not come between a waiter's look at the word and its sleep.
        drop(self.0.rung.lock().unwrap());
        self.0.changed.notify_all();
    }
}

impl WaitUntil for ModelPark {
    type Instant = Bell;

    fn after(&self, _timeout: Duration) -> Option<Bell> {
        Some(Bell)
    }

    fn expired(&self, _: Bell) -> bool {
        *self.0.rung.lock().unwrap()
    }

    fn wait_until(&self, word: Word<'_>, expected: u32, _: Bell) {
        let mut rung = self.0.rung.lock().unwrap();
        while !*rung && word.load() == expected {
            rung = self.0.changed.wait(rung).unwrap();
        }
    }
}

impl Parker for ModelPark {
    fn new() -> Self {
        Self(Arc::new(Bed { rung: Mutex::new(false), changed: Condvar::new(), wakes: AtomicUsize::new(0) }))
    }

    fn ring_the_bell(&self) {
        *self.0.rung.lock().unwrap() = true;
        self.0.changed.notify_all();
    }

    fn wakes(&self) -> usize {
        self.0.wakes.load(Relaxed)
    }

    fn block_on<F: Future>(future: F) -> F::Output {
        loom::future::block_on(future)
    }
}

/// Lets others run and returns. Every return is spurious, and a wake carries no happens-before, unlike `ModelPark`'s
/// lock. Whatever is visible is visible by the ring's orderings alone.
#[derive(Clone)]
pub(crate) struct YieldPark(Arc<Bench>);

struct Bench {
    rung: loom::sync::atomic::AtomicBool,
    wakes: AtomicUsize,
}

impl Wait for YieldPark {
    fn relax(&self, _round: u32) -> bool {
        false
    }

    fn wait(&self, _word: Word<'_>, _expected: u32) {
        thread::yield_now();
    }

    fn wake(&self, _word: Word<'_>) {
        self.0.wakes.fetch_add(1, Relaxed);
    }
}

impl WaitUntil for YieldPark {
    type Instant = Bell;

    fn after(&self, _timeout: Duration) -> Option<Bell> {
        Some(Bell)
    }

    fn expired(&self, _: Bell) -> bool {
        self.0.rung.load(Ordering::Relaxed)
    }

    fn wait_until(&self, word: Word<'_>, expected: u32, _: Bell) {
        self.wait(word, expected);
    }
}

impl Parker for YieldPark {
    fn new() -> Self {
        Self(Arc::new(Bench { rung: loom::sync::atomic::AtomicBool::new(false), wakes: AtomicUsize::new(0) }))
    }

    fn ring_the_bell(&self) {
        self.0.rung.store(true, Ordering::Relaxed);
    }

    fn wakes(&self) -> usize {
        self.0.wakes.load(Relaxed)
    }

    /// Polls in a loop, whether woken or not.
    fn block_on<F: Future>(future: F) -> F::Output {
        let mut future = pin!(future);
        loop {
            if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                return output;
            }
            thread::yield_now();
        }
    }
}

// Waiting ------------------------------------------------------------------------------------------------------

/// How a side waits.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Mode {
    /// Calls `try_*` in a loop.
    Try,
    /// Blocks.
    Block,
    /// Blocks until the bell, rung by another thread at any time; then blocks without a deadline.
    Timed,
    /// Awaits.
    Async,
}
pub(crate) use Mode::*;

std::thread_local! {
    /// Values kept until the end of an execution. All threads that use them are joined by then: loom has no scoped
    /// threads that could borrow them.
    static RINGS: RefCell<Vec<Kept>> = const { RefCell::new(Vec::new()) };
}

struct Kept(*mut dyn Any);

/// Frees the values that this execution keeps. Runs within the execution, because a ring reads its words when it is
/// dropped.
fn free_kept() {
    for Kept(value) in RINGS.take() {
        // SAFETY: from `Box::into_raw` in `keep`, once; all modelled threads that had a handle have been joined.
        drop(unsafe { Box::from_raw(value) });
    }
}

/// Returns a reference to `value` that is valid until the end of the execution.
pub(crate) fn keep<T: 'static>(value: T) -> &'static mut T {
    let value = Box::into_raw(Box::new(value));
    RINGS.with_borrow_mut(|rings| rings.push(Kept(value)));
    // SAFETY: made from a box just above, and freed when the execution is over.
    unsafe { &mut *value }
}

/// A ring of `N` slots that hold 0, its strategy, and its handles. The handles borrow the ring, so no step counts its
/// owners. (`freeing` has models of rings that their handles own.)
pub(crate) fn ring<const N: usize, P: Parker>() -> (P, Tx<P>, Rx<P>) {
    let park = P::new();
    let (tx, rx) = keep(Ring::with_wait([0; N], park.clone())).split();
    (park, tx, rx)
}

/// The same, with these values in its first slots.
pub(crate) fn filled<const N: usize, P: Parker>(values: &[usize]) -> (P, Tx<P>, Rx<P>) {
    let (park, mut tx, rx) = ring::<N, P>();
    values.iter().for_each(|&value| put(&mut tx, value));
    (park, tx, rx)
}

/// A thread that rings the bell, if the mode uses it.
pub(crate) fn clock<P: Parker>(park: &P, mode: Mode) {
    if mode == Timed {
        let park = park.clone();
        spawn(move || park.ring_the_bell());
    }
}

/// Why a receive returned no slot.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum End {
    Finished,
    Abandoned,
    Cancelled,
}

impl From<TryRecvError> for End {
    fn from(error: TryRecvError) -> Self {
        if error == TryRecvError::Cancelled {
            return Self::Cancelled;
        }
        assert_eq!(error, TryRecvError::Abandoned);
        Self::Abandoned
    }
}

impl From<RecvError> for End {
    fn from(error: RecvError) -> Self {
        TryRecvError::from(error).into()
    }
}

/// Receives, waiting as `mode` specifies, and passes the slot to `f`.
fn recv_with<P: Parker, R>(
    rx: &mut Rx<P>,
    mode: Mode,
    f: impl FnOnce(Reading<'_, P>) -> R,
) -> Result<R, End> {
    let found = match mode {
        Try => loop {
            match rx.try_recv() {
                Err(TryRecvError::Empty | TryRecvError::Held) => thread::yield_now(),
                found => return found?.map(f).ok_or(End::Finished),
            }
        },
        Block => rx.recv()?,
        Timed => {
            let error = match rx.recv_timeout(Duration::ZERO) {
                Ok(slot) => return slot.map(f).ok_or(End::Finished),
                Err(error) => error,
            };
            if !matches!(error, TryRecvError::Empty | TryRecvError::Held) {
                return Err(error.into());
            }
            rx.recv()?
        }
        Async => P::block_on(rx.recv_async())?,
    };
    found.map(f).ok_or(End::Finished)
}

/// Receives, waiting as `mode` specifies, and keeps the slot.
pub(crate) fn recv<P: Parker>(rx: &mut Rx<P>, mode: Mode) -> Result<Guard<P>, End> {
    #[allow(clippy::redundant_closure_for_method_calls, reason = "the method is not general enough")]
    recv_with(rx, mode, |slot| slot.keep())
}

/// Fills the slot with `value` and commits it.
pub(crate) fn commit_with<P: Parker>(mut slot: Writing<'_, P>, value: usize) -> Result<(), Closed> {
    *slot = value;
    slot.commit()
}

/// Acquires, waiting as `mode` specifies, fills with `value` and commits.
pub(crate) fn send<P: Parker>(tx: &mut Tx<P>, mode: Mode, value: usize) -> Result<(), Closed> {
    let slot = match mode {
        Try => loop {
            match tx.try_acquire() {
                Ok(slot) => return commit_with(slot, value),
                Err(TryAcquireError::Full) => thread::yield_now(),
                Err(_) => return Err(Closed),
            }
        },
        Block => tx.acquire()?,
        Timed => match tx.acquire_timeout(Duration::ZERO) {
            Ok(slot) => return commit_with(slot, value),
            Err(TryAcquireError::Full) => tx.acquire()?,
            Err(_) => return Err(Closed),
        },
        Async => P::block_on(tx.acquire_async())?,
    };
    commit_with(slot, value)
}

/// Acquires, fills with `value` and commits.
pub(crate) fn fill<W: Wait>(tx: &mut Producer<'_, usize, W>, value: usize) -> Result<(), Closed> {
    tx.fill(|slot| *slot = value)
}

/// The same, for a ring whose consumer exists.
pub(crate) fn put<P: Parker>(tx: &mut Tx<P>, value: usize) {
    assert_eq!(fill(tx, value), Ok(()));
}

/// Reserves the next slot, which is free, and fills it with `value`.
pub(crate) fn reserve<P: Parker>(tx: &mut Tx<P>, value: usize) -> Reserved<P> {
    let mut slot = tx.try_acquire().unwrap().reserve();
    *slot = value;
    slot
}

/// Commits the slot, or cancels it.
pub(crate) fn end<T, P: Parker>(slot: ReservedSlot<'static, T, P>, commit: bool) -> Result<(), Closed> {
    if commit {
        return slot.commit();
    }
    drop(slot);
    Ok(())
}

/// A thread that hands over these values, and waits for a slot for each as `mode` specifies. Its producer comes back, so no
/// end follows the commits.
pub(crate) fn sends<P: Parker, const N: usize>(
    mut tx: Tx<P>,
    mode: Mode,
    values: [usize; N],
) -> thread::JoinHandle<Tx<P>> {
    spawn(move || {
        values.into_iter().for_each(|value| send(&mut tx, mode, value).unwrap());
        tx
    })
}

/// Ends the producer, by `finish` or without it.
pub(crate) fn stop<P: Parker>(tx: Tx<P>, finish: bool) {
    if finish {
        tx.finish();
    } // otherwise the producer is dropped
}

/// Receives `value` and releases it.
pub(crate) fn take<P: Parker>(rx: &mut Rx<P>, mode: Mode, value: usize) {
    recv_with(rx, mode, |slot| assert_eq!(*slot, value)).unwrap();
}

// Tasks --------------------------------------------------------------------------------------------------------

/// The task behind a model's waker.
pub(crate) struct Task {
    woken: Mutex<bool>,
    changed: Condvar,
    wakes: AtomicUsize,
}

impl Task {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { woken: Mutex::new(false), changed: Condvar::new(), wakes: AtomicUsize::new(0) })
    }

    pub(crate) fn waker(self: &Arc<Self>) -> Waker {
        Waker::from(self.clone())
    }

    /// Polls until it gets something, and sleeps in between.
    pub(crate) fn run<R>(self: &Arc<Self>, mut poll: impl FnMut(&Waker) -> Option<R>) -> R {
        let waker = self.waker();
        loop {
            if let Some(found) = poll(&waker) {
                return found;
            }
            self.sleep();
        }
    }

    /// Sleeps until the task is woken. A lost wake means forever.
    pub(crate) fn sleep(&self) {
        let mut woken = self.woken.lock().unwrap();
        while !*woken {
            woken = self.changed.wait(woken).unwrap();
        }
        *woken = false;
    }

    /// How often the task was woken.
    pub(crate) fn wakes(&self) -> usize {
        self.wakes.load(Relaxed)
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        self.wakes.fetch_add(1, Relaxed);
        *self.woken.lock().unwrap() = true;
        self.changed.notify_all();
    }
}

/// A waker that panics when it wakes.
pub(crate) struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        // Not `panic!`: its message would be printed in every execution.
        std::panic::resume_unwind(Box::new(Bomb));
    }
}

pub(crate) fn bomb() -> Waker {
    Waker::from(Arc::new(Bomb))
}

/// Runs `f` and catches a [`Bomb`]; any other panic is resumed.
pub(crate) fn survive<R>(f: impl FnOnce() -> R) -> Result<R, Bomb> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).map_err(|payload| {
        *payload.downcast::<Bomb>().unwrap_or_else(|other| std::panic::resume_unwind(other))
    })
}

/// Polls once for a filled slot; `None` while there is none.
pub(crate) fn poll_recv<P: Parker>(rx: &mut Rx<P>, waker: &Waker) -> Option<Result<Guard<P>, End>> {
    let Poll::Ready(found) = rx.poll_recv(&mut Context::from_waker(waker)) else { return None };
    Some(found.map_err(End::from).and_then(|slot| slot.map(ReadSlot::keep).ok_or(End::Finished)))
}

/// Polls once for a free slot and fills it with `value`; `None` while there is none.
pub(crate) fn poll_send<P: Parker>(
    tx: &mut Tx<P>,
    waker: &Waker,
    value: usize,
) -> Option<Result<(), Closed>> {
    let Poll::Ready(found) = tx.poll_acquire(&mut Context::from_waker(waker)) else { return None };
    Some(found.and_then(|slot| commit_with(slot, value)))
}
