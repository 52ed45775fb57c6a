//! The driver's state, behind one lock: streams with their queues, events, allocations, clocks.
//!
//! Host calls that wait for work and workers that wait for events share one condition variable. Every change that
//! they wait for notifies it. This is simple, and fast enough for a few streams.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::mem::ManuallyDrop;
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use self::memory::{Allocation, clear};
use self::streams::{Event, Stream};
use self::work::{Function, Mark, Work};
use super::capture::Captures;
use super::clock::{Agent, Clock, Step};
use super::codes::{Code, INVALID_CONTEXT};
use super::failures::Failures;
use super::guard::Verdict;
use super::operand::Instruction;
use super::stack::Stack;
use super::violation::{Report, Violation};
use crate::abi::Live;
use crate::options::{Options, Settings};
use crate::sys;

mod host;
pub(super) mod memory;
pub(super) mod streams;
pub(super) mod work;
mod worker;

/// The lock, held.
pub(super) type Core = MutexGuard<'static, State>;

/// The agent of all host threads together, and the agents of the devices' legacy default streams. All other agents are
/// handles (see `FIRST_HANDLE`).
const HOST: Agent = 1;
const LEGACY: [u64; 2] = [2, 3];
/// Handles are greater than this, except those of the default streams. They are never reused, so handles of an earlier
/// run are recognized. `CU_STREAM_LEGACY` is 1, `CU_STREAM_PER_THREAD` is 2.
const FIRST_HANDLE: u64 = 0x5_0000;
/// Device addresses, except those of managed memory, begin here, in the half of the address space that user processes
/// lack: dereferencing one on the host faults.
const FIRST_DEVICE_ADDRESS: u64 = 0xDE00_0000_0000_0000;

/// The step of an access.
pub(super) struct Actor {
    at: Step,
    /// The stack of the call that makes the access. Taken at the first request.
    stack: OnceCell<Arc<Stack>>,
}

impl Actor {
    fn new(at: Step) -> Self {
        Self { at, stack: OnceCell::new() }
    }

    fn stack(&self) -> Arc<Stack> {
        self.stack.get_or_init(|| Arc::new(Stack::here())).clone()
    }
}

/// A captured operation: a function that checks its accesses in a stream and returns its work.
pub(super) type Operation = Box<dyn Fn(&mut State, u64) -> Result<Work, Code> + Send + Sync>;

#[derive(Default)]
pub(super) struct State {
    pub(super) options: Options,
    /// The number of this run, from 1. Threads and contexts of earlier runs are recognized by their run number.
    pub(super) run: u64,
    pub(super) initialized: bool,
    /// Retains of each device's primary context.
    pub(super) retains: [u64; 2],
    /// The contexts of `cuCtxCreate`, with their devices.
    created: BTreeMap<u64, usize>,
    /// The sticky error, or `SUCCESS`.
    pub(super) lost: Code,
    /// Whether a call has returned the sticky error: the host then knows that no work runs any more.
    told: bool,
    pub(super) streams: BTreeMap<u64, Stream>,
    /// For each context, what its destroyed streams did that have ended.
    ended: BTreeMap<u64, Clock>,
    events: BTreeMap<u64, Event>,
    /// All allocations of the run, by their addresses.
    memory: BTreeMap<u64, Allocation>,
    /// The number of those of the device.
    on_device: usize,
    /// The last frees, oldest first: the allocation, the call, and its stack.
    frees: VecDeque<(u64, &'static str, Arc<Stack>)>,
    /// The allocations that are not freed and have pages closed to the program.
    closed: BTreeSet<u64>,
    /// All allocations that are not freed and that the program sees.
    seen: BTreeSet<u64>,
    /// The steps of the host functions that have not ended, and of those that run.
    pending: Vec<Step>,
    running: Vec<Step>,
    hosts: BTreeMap<Agent, Clock>,
    tokens: BTreeMap<u64, Clock>,
    /// The digest of each simulated kernel; `None` inside until it has run.
    pub(super) kernels: BTreeMap<u64, Option<Result<u64, Code>>>,
    pub(super) captures: Captures<Operation>,
    /// The end of each executable graph's last launch.
    pub(super) launched: BTreeMap<u64, Arc<Mark>>,
    /// The texts of loaded modules.
    pub(super) modules: BTreeMap<u64, String>,
    pub(super) functions: BTreeMap<u64, Function>,
    pub(super) failures: Failures,
    pub(super) calls: BTreeMap<&'static str, u64>,
    pub(super) violations: Vec<Violation>,
    /// The number of violations so far.
    found: usize,
    /// Where violations are written when they are found; `None` in a test, which asks for them.
    report: Option<Report>,
    next_handle: u64,
    next_address: u64,
    pub(super) live: Live,
    /// Pieces of work that the device may still run; `u64::MAX` if it is not held.
    pub(super) allowed: u64,
    /// Workers that wait because `allowed` is 0.
    pub(super) held: usize,
    streams_begun: u64,
    workers: Vec<JoinHandle<()>>,
}

/// The settings of the environment variable. The options of a test replace them.
fn settings() -> Settings {
    let text = std::env::var(Settings::VARIABLE).unwrap_or_default();
    text.parse().unwrap_or_else(|error| panic!("{}: {error}", Settings::VARIABLE))
}

extern "C" fn at_exit() {
    if is_forked() {
        return;
    }
    let core = lock();
    if let Some(report) = &core.report {
        report.end(core.found, &core.live);
    }
}

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    let mut settings = settings();
    let mut failures = Failures::default();
    settings.failures.drain(..).for_each(|failure| failures.arm(failure.name, failure.raw));
    // SAFETY: `at_exit` takes no arguments, and exists until the process ends: nothing unloads this library, whose threads
    // run its code.
    unsafe { sys::atexit(at_exit) };
    Mutex::new(State {
        options: settings.options,
        run: 1, // not 0: that is the initial value in threads
        failures,
        report: Some(Report::to(settings.report.as_deref())),
        next_handle: FIRST_HANDLE,
        next_address: FIRST_DEVICE_ADDRESS,
        allowed: u64::MAX,
        ..State::default()
    })
});
static CHANGED: Condvar = Condvar::new();

/// What a thread has of a run.
#[derive(Default)]
struct Own {
    run: u64,
    /// The contexts that it made current, with their devices. The last is the current one.
    contexts: Vec<(u64, usize)>,
    /// Its default streams, one for each device.
    streams: [Option<u64>; 2],
    /// Its agent, if host threads are separate.
    agent: Option<Agent>,
    /// The calls that it has made.
    calls: BTreeMap<&'static str, u64>,
}

// `ManuallyDrop`: destructors that run after those of a thread's local data may call the driver (C++'s of static objects, exit
// handlers).
thread_local! {
    static OWN: RefCell<ManuallyDrop<Own>> = RefCell::default();
    /// Whether this thread is in a call of the driver, or is a worker that runs no function of the program: it may hold the lock.
    static IN_CALL: Cell<bool> = const { Cell::new(false) };
    /// In a worker that runs a host function: the function's step.
    static IN_FUNCTION: RefCell<ManuallyDrop<Option<Step>>> = const { RefCell::new(ManuallyDrop::new(None)) };
}

/// The process that called `cuInit`; 0 before.
static PROCESS: AtomicU32 = AtomicU32::new(0);

/// Remembers the process that calls `cuInit`.
pub(super) fn initialized() {
    // Relaxed: a forked child has what its parent's thread wrote before.
    PROCESS.store(process::id(), Ordering::Relaxed);
}

/// Whether `cuInit` was called in the process that forked this one. It has no workers, and its lock may be held for good.
pub(super) fn is_forked() -> bool {
    // Relaxed: as in `initialized`.
    let initialized = PROCESS.load(Ordering::Relaxed);
    initialized != 0 && initialized != process::id()
}

/// Takes the lock.
pub(super) fn lock() -> Core {
    // A panic in an exported function aborts; one in a worker is a bug that a later assertion shows.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change.
pub(super) fn wait(core: Core) -> Core {
    CHANGED.wait(core).unwrap_or_else(PoisonError::into_inner)
}

/// Wakes all threads that wait for a change.
pub(super) fn changed() {
    CHANGED.notify_all();
}

/// Runs the body of a call or of a worker.
pub(super) fn in_call<T>(body: impl FnOnce() -> T) -> T {
    IN_CALL.set(true);
    let result = body();
    IN_CALL.set(false);
    result
}

/// Decides what to do with an access that a page fault stopped. This driver itself makes one if a result's pointer is into a
/// closed page, or a copy's target is not for writing.
pub(super) fn stopped(address: u64, write: bool, instruction: &mut Instruction) -> Verdict {
    if IN_CALL.get() { Verdict::InCall } else { lock().touched(address, write, instruction) }
}

/// Counts a call, for all threads and for this one.
pub(super) fn count(core: &mut State, name: &'static str) {
    *core.calls.entry(name).or_insert(0) += 1;
    core.own(|own| *own.calls.entry(name).or_insert(0) += 1);
}

/// The calls of one name that this thread has made in this run.
pub(super) fn own_calls(core: &State, name: &str) -> u64 {
    core.own(|own| own.calls.get(name).copied().unwrap_or(0))
}

/// Whether this thread is a worker that runs a host function.
pub(super) fn in_function() -> bool {
    IN_FUNCTION.with_borrow(|at| at.is_some())
}

/// Runs a host function as this step of its stream.
pub(super) fn run_function(at: Step, function: impl FnOnce()) {
    let set = |step| IN_FUNCTION.with_borrow_mut(|at| **at = step);
    set(Some(at));
    IN_CALL.set(false);
    function();
    IN_CALL.set(true);
    set(None);
}

/// Ends the current run and begins another. Drops queued work and joins the workers.
pub(super) fn start(options: Options) {
    let mut core = lock();
    core.run += 1;
    let workers = std::mem::take(&mut core.workers);
    changed();
    drop(core);
    for worker in workers {
        // A worker's panic was reported by the panic hook.
        let _ = worker.join();
    }
    let mut core = lock();
    clear(&mut core.memory);
    *core = State {
        options,
        run: core.run,
        next_handle: core.next_handle,
        next_address: core.next_address,
        allowed: u64::MAX,
        workers: std::mem::take(&mut core.workers),
        ..State::default()
    };
}

/// `Control::drain`: waits until all queues are empty and the workers of destroyed streams have ended. Adds no edges.
pub(super) extern "C" fn drain() {
    let mut core = lock();
    while core.streams.values().any(|stream| stream.destroyed || stream.busy || !stream.queue.is_empty()) {
        core = wait(core);
    }
}

impl State {
    /// Looks at what this thread has of this run.
    fn own<T>(&self, look: impl FnOnce(&mut Own) -> T) -> T {
        OWN.with_borrow_mut(|own| {
            if own.run != self.run {
                **own = Own { run: self.run, ..Own::default() };
            }
            look(own)
        })
    }

    /// The handle of a device's primary context. It differs in every run.
    pub(super) fn context(&self, device: usize) -> u64 {
        0xC0_0000 + self.run * 32 + device as u64 * 16
    }

    /// The device of a context that is alive.
    fn alive(&self, context: u64) -> Option<usize> {
        let primary = |&device: &usize| context == self.context(device) && self.retains[device] > 0;
        self.created.get(&context).copied().or_else(|| (0..2).find(primary))
    }

    /// The device whose context is current on this thread.
    pub(super) fn device(&self) -> Option<usize> {
        self.own(|own| own.contexts.last().map(|(_, device)| *device))
    }

    /// The context that is current on this thread, or 0.
    pub(super) fn current(&self) -> u64 {
        self.own(|own| own.contexts.last().map_or(0, |(context, _)| *context))
    }

    /// Whether the context that is current on this thread has not been destroyed.
    pub(super) fn current_is_alive(&self) -> bool {
        self.alive(self.current()).is_some()
    }

    /// Replaces the top of this thread's contexts; 0 removes it.
    pub(super) fn set_current(&self, context: u64) -> Result<(), Code> {
        let device = (context != 0).then(|| self.alive(context).ok_or(INVALID_CONTEXT)).transpose()?;
        self.own(|own| {
            own.contexts.pop();
            own.contexts.extend(device.map(|device| (context, device)));
        });
        Ok(())
    }

    pub(super) fn push_current(&self, context: u64) -> Result<(), Code> {
        let device = self.alive(context).ok_or(INVALID_CONTEXT)?;
        self.own(|own| own.contexts.push((context, device)));
        Ok(())
    }

    /// Creates a context of a device and makes it current on this thread. It shares the primary context's default streams.
    pub(super) fn create_context(&mut self, device: usize) -> u64 {
        let context = self.handle();
        self.created.insert(context, device);
        self.live.contexts += 1;
        let _ = self.push_current(context);
        context
    }

    /// Destroys a context that was created. Removes it from the top of this thread's contexts, if it is there.
    pub(super) fn destroy_context(&mut self, context: u64) -> Result<(), Code> {
        self.created.remove(&context).ok_or(INVALID_CONTEXT)?;
        self.live.contexts -= 1;
        if self.current() == context { self.set_current(0) } else { Ok(()) }
    }

    pub(super) fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    pub(super) fn add_graph(&mut self, operations: Arc<Vec<Operation>>) -> u64 {
        let id = self.handle();
        self.captures.graphs.insert(id, operations);
        id
    }
}
