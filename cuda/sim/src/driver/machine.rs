//! The driver's state, behind one lock: streams with their queues, events, allocations, clocks.
//!
//! Host calls that wait for work and workers that wait for events share one condition variable. Every change notifies
//! it. This is simple, and fast enough for a few streams.

use std::backtrace::Backtrace;
use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use self::memory::{Allocation, clear_host};
use self::streams::{Event, Stream};
use self::work::Entry;
use super::capture::Captures;
use super::clock::{Agent, Clock};
use super::codes::{Code, INVALID_CONTEXT, SUCCESS};
use super::failures::Failures;
use super::guard::Verdict;
use super::violation::Violation;
use crate::abi::{Live, RawOptions};

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
/// Handles of streams, events, kernels and host threads are greater than this. They are never reused, so handles of an
/// earlier run are recognized. `CU_STREAM_LEGACY` is 1, `CU_STREAM_PER_THREAD` is 2.
const FIRST_HANDLE: u64 = 0x5_0000;
/// Device addresses begin here, in the half of the address space that user processes lack: dereferencing one on the
/// host faults.
const FIRST_DEVICE_ADDRESS: u64 = 0xDE00_0000_0000_0000;

/// The agent of an access, its step, and its clock.
pub(super) struct Actor {
    agent: Agent,
    step: u64,
    clock: Clock,
    /// The call's stack, once it was asked for.
    stack: OnceCell<Arc<Backtrace>>,
}

impl Actor {
    fn stack(&self) -> Arc<Backtrace> {
        self.stack.get_or_init(|| Arc::new(Backtrace::force_capture())).clone()
    }
}

pub(super) struct State {
    pub(super) options: RawOptions,
    /// The number of this run, from 1. Threads and contexts of earlier runs are recognized by their run number.
    pub(super) run: u64,
    pub(super) initialized: bool,
    /// Retains of each device's primary context.
    pub(super) retains: [u64; 2],
    /// The sticky error, or `SUCCESS`.
    pub(super) lost: Code,
    pub(super) streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    pub(super) host: BTreeMap<u64, Allocation>,
    pub(super) device: BTreeMap<u64, Allocation>,
    hosts: BTreeMap<Agent, Clock>,
    tokens: BTreeMap<u64, Clock>,
    /// The digest of each kernel; `None` inside until it has run.
    pub(super) kernels: BTreeMap<u64, Option<Result<u64, Code>>>,
    pub(super) captures: Captures,
    /// The texts of loaded modules.
    pub(super) modules: BTreeMap<u64, String>,
    pub(super) functions: BTreeMap<u64, Entry>,
    pub(super) failures: Failures,
    pub(super) calls: BTreeMap<&'static str, u64>,
    pub(super) violations: Vec<Violation>,
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

static STATE: LazyLock<Mutex<State>> = LazyLock::new(|| {
    Mutex::new(State {
        options: RawOptions {
            seed: 1,
            device_bytes: 1 << 30,
            host_bytes: 1 << 30,
            delay_us: 0,
            pieces: 1,
            pools: 1,
            kind: 0,
            devices: 1,
            host_threads_apart: 0,
        },
        run: 1, // not 0: that is the initial value in threads
        initialized: false,
        retains: [0; 2],
        lost: SUCCESS,
        streams: BTreeMap::new(),
        events: BTreeMap::new(),
        host: BTreeMap::new(),
        device: BTreeMap::new(),
        hosts: BTreeMap::new(),
        tokens: BTreeMap::new(),
        kernels: BTreeMap::new(),
        captures: Captures::default(),
        modules: BTreeMap::new(),
        functions: BTreeMap::new(),
        failures: Failures::default(),
        calls: BTreeMap::new(),
        violations: Vec::new(),
        next_handle: FIRST_HANDLE,
        next_address: FIRST_DEVICE_ADDRESS,
        live: Live::default(),
        allowed: u64::MAX,
        held: 0,
        streams_begun: 0,
        workers: Vec::new(),
    })
});
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// The run in which this thread made a context current, and the device. Run 0: never.
    static CURRENT_IN: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// This thread's default streams, with their runs.
    static OWN_STREAM: Cell<[(u64, u64); 2]> = const { Cell::new([(0, 0); 2]) };
    /// This thread's agent, if host threads are separate.
    static OWN_AGENT: Cell<(u64, Agent)> = const { Cell::new((0, 0)) };
    /// The calls that this thread has made, with their run.
    static OWN_CALLS: RefCell<(u64, BTreeMap<&'static str, u64>)> = const { RefCell::new((0, BTreeMap::new())) };
    /// In a worker that runs a host function: its stream's agent, step and clock.
    static IN_FUNCTION: RefCell<Option<(Agent, u64, Clock)>> = const { RefCell::new(None) };
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

/// Decides what an access of the program is that a closed page stopped.
pub(super) fn stopped(address: u64, write: bool) -> Verdict {
    lock().touched(address, write)
}

/// Counts a call, for all threads and for this one.
pub(super) fn count(core: &mut State, name: &'static str) {
    *core.calls.entry(name).or_insert(0) += 1;
    OWN_CALLS.with_borrow_mut(|(run, calls)| {
        if *run != core.run {
            *run = core.run;
            calls.clear();
        }
        *calls.entry(name).or_insert(0) += 1;
    });
}

/// The calls of one name that this thread has made in this run.
pub(super) fn own_calls(core: &State, name: &str) -> u64 {
    OWN_CALLS.with_borrow(|(run, calls)| calls.get(name).copied().filter(|_| *run == core.run).unwrap_or(0))
}

/// Whether this thread is a worker that runs a host function.
pub(super) fn in_function() -> bool {
    IN_FUNCTION.with_borrow(Option::is_some)
}

/// Runs a host function as its stream.
pub(super) fn run_function(agent: Agent, step: u64, clock: Clock, function: impl FnOnce()) {
    IN_FUNCTION.set(Some((agent, step, clock)));
    function();
    IN_FUNCTION.set(None);
}

/// Ends the current run and begins another. Drops queued work and joins the workers.
pub(super) fn start(options: RawOptions) {
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
    clear_host(&mut core.host);
    let core = &mut *core;
    core.options = options;
    core.initialized = false;
    core.retains = [0; 2];
    core.lost = SUCCESS;
    core.streams.clear();
    core.events.clear();
    core.device.clear();
    core.hosts.clear();
    core.tokens.clear();
    core.kernels.clear();
    core.captures = Captures::default();
    core.modules.clear();
    core.functions.clear();
    core.failures = Failures::default();
    core.calls.clear();
    core.violations.clear();
    core.live = Live::default();
    core.allowed = u64::MAX;
    core.held = 0;
    core.streams_begun = 0;
}

/// Waits until all queues are empty and the workers of destroyed streams have ended. Adds no edges.
pub(super) fn drain() {
    let mut core = lock();
    while core.streams.values().any(|stream| stream.destroyed || stream.busy || !stream.queue.is_empty()) {
        core = wait(core);
    }
}

impl State {
    /// The handle of a device's primary context. It differs in every run.
    pub(super) fn context(&self, device: usize) -> usize {
        0xC0_0000 + usize::try_from(self.run).unwrap_or(0) * 32 + device * 16
    }

    /// The device whose context is current on this thread.
    pub(super) fn device(&self) -> Option<usize> {
        let (run, device) = CURRENT_IN.get();
        (run == self.run).then_some(device)
    }

    /// The context that is current on this thread, or 0.
    pub(super) fn current(&self) -> usize {
        self.device().map_or(0, |device| self.context(device))
    }

    pub(super) fn set_current(&self, context: usize) -> Result<(), Code> {
        match context {
            0 => CURRENT_IN.set((0, 0)),
            context => {
                let known = |&device: &usize| context == self.context(device) && self.retains[device] > 0;
                CURRENT_IN.set((self.run, (0..2).find(known).ok_or(INVALID_CONTEXT)?));
            }
        }
        Ok(())
    }

    fn handle(&mut self) -> u64 {
        self.next_handle += 0x10;
        self.next_handle
    }

    pub(super) fn add_graph(&mut self) -> u64 {
        let id = self.handle();
        self.captures.graphs.insert(id);
        id
    }

    pub(super) fn add_module(&mut self, text: String) -> u64 {
        let id = self.handle();
        self.modules.insert(id, text);
        id
    }

    pub(super) fn add_function(&mut self, entry: Entry) -> u64 {
        let id = self.handle();
        self.functions.insert(id, entry);
        id
    }

    /// The handle of a new kernel. Its digest is not known yet.
    pub(super) fn add_kernel(&mut self) -> u64 {
        let id = self.handle();
        self.kernels.insert(id, None);
        id
    }
}
