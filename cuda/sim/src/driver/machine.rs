//! Everything the driver knows, behind one lock: streams with their queues, events, allocations, clocks.
//!
//! Whatever waits (host calls for work, workers for events) waits on one condition variable, which every change
//! wakes: simple, and fast enough for a handful of streams.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, LazyLock, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::capture::Captures;
use super::clock::{Access, Agent, Clock, History};
use super::codes::{Code, INVALID_CONTEXT, INVALID_HANDLE, INVALID_VALUE, OUT_OF_MEMORY, SUCCESS};
use super::failures::Failures;
use super::worker;
use crate::abi::{Live, RawOptions};

/// The lock, held.
pub(super) type Core = MutexGuard<'static, State>;

/// The agent that all host threads are together, and the legacy default streams' of the devices; all other agents are handles
/// (see `FIRST_HANDLE`).
const HOST: Agent = 1;
const LEGACY: [u64; 2] = [2, 3];
/// Handles of streams, events and kernels, and numbers of host threads, begin above this and are never given out
/// twice, so that those of an earlier run are recognized. `CU_STREAM_LEGACY` and `CU_STREAM_PER_THREAD` are 1, 2.
const FIRST_HANDLE: u64 = 0x5_0000;
/// Sentences kept until somebody asks; one broken edge can be met in every batch.
const MOST_VIOLATIONS: usize = 64;
/// Page-locked memory begins on a page, as the driver's does.
const PAGE: usize = 4096;
/// Device addresses begin here: a half of the address space that no user process has, so that dereferencing one
/// on the host faults.
const FIRST_DEVICE_ADDRESS: u64 = 0xDE00_0000_0000_0000;

/// What one `cuEventRecord` captured: later records of the event make new ones.
#[derive(Default)]
pub(super) struct Mark {
    /// When the stream came by, and the sticky error at that time.
    pub(super) passed: OnceLock<(Instant, Code)>,
    pub(super) clock: Clock,
}

/// Where an upload's bytes come from.
pub(super) enum Source {
    /// Page-locked memory, read when the copy runs; beside it what it held when the copy was enqueued.
    Pinned { address: usize, then: Vec<u8> },
    /// A copy made when the copy was enqueued.
    Staged(Vec<u8>),
}

/// A host function of `cuLaunchHostFunc`.
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Work in a stream's queue.
pub(super) enum Work {
    Upload { to: u64, from: Source },
    Download { to: usize, from: u64, bytes: usize },
    Copy { to: u64, from: u64, bytes: usize },
    Set { to: u64, bytes: usize, value: u8 },
    Kernel { id: u64, at: u64, bytes: usize, fill: Option<u8>, duration_us: u32 },
    Host { function: HostFunction, argument: usize, step: u64, clock: Clock },
    Free(u64),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
}

#[derive(Default)]
pub(super) struct Stream {
    pub(super) queue: VecDeque<Work>,
    /// The worker is at an operation that it has taken from the queue.
    pub(super) busy: bool,
    pub(super) destroyed: bool,
    clock: Clock,
    /// Synchronizes with the legacy default stream.
    blocking: bool,
    /// A default stream: made by the driver, not counted.
    default: bool,
    device: usize,
}

struct Event {
    device: usize,
    last: Option<Arc<Mark>>,
    flags: u32,
}

/// One allocation; its entry stays when it is freed, so that a later use is recognized. Addresses are never
/// given out twice in one run.
pub(super) struct Allocation {
    base: u64,
    bytes: usize,
    /// Device memory's contents, until the free has run.
    pub(super) data: Option<Vec<u8>>,
    /// Its free was called.
    freed: bool,
    history: History,
}

/// Host or device: two address spaces, checked in the same way.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Space {
    Host,
    Device,
}

impl Space {
    fn name(self) -> &'static str {
        match self {
            Self::Host => "page-locked",
            Self::Device => "device",
        }
    }
}

/// Who accesses memory, and what it knows.
pub(super) struct Actor {
    agent: Agent,
    step: u64,
    clock: Clock,
}

pub(super) struct State {
    pub(super) options: RawOptions,
    /// The number of this run, from 1; threads and contexts of earlier ones recognize themselves by it.
    pub(super) run: u64,
    pub(super) initialized: bool,
    /// Of each device's primary context.
    pub(super) retains: [u64; 2],
    /// The sticky error, or `SUCCESS`.
    pub(super) lost: Code,
    pub(super) streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    pub(super) host: BTreeMap<u64, Allocation>,
    pub(super) device: BTreeMap<u64, Allocation>,
    hosts: BTreeMap<Agent, Clock>,
    tokens: BTreeMap<u64, Clock>,
    /// What kernels read or wrote; `None` inside: still to come.
    pub(super) kernels: BTreeMap<u64, Option<Result<u64, Code>>>,
    pub(super) captures: Captures,
    pub(super) failures: Failures,
    pub(super) calls: BTreeMap<&'static str, u64>,
    pub(super) violations: Vec<String>,
    next_handle: u64,
    next_address: u64,
    pub(super) live: Live,
    /// Pieces of work that the device may still do; `u64::MAX`: any number.
    pub(super) allowed: u64,
    /// Workers that stand still because `allowed` is 0.
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
        run: 1, // also without a `Sim`: 0 is what threads begin with
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
    /// The run in which this thread made a context current, and whose; 0: never.
    static CURRENT_IN: Cell<(u64, usize)> = const { Cell::new((0, 0)) };
    /// This thread's default streams, with their runs.
    static OWN_STREAM: Cell<[(u64, u64); 2]> = const { Cell::new([(0, 0); 2]) };
    /// This thread's number as an agent, if host threads are apart.
    static OWN_AGENT: Cell<(u64, Agent)> = const { Cell::new((0, 0)) };
    /// In a worker that runs a host function: its stream's agent, step and clock.
    static IN_FUNCTION: RefCell<Option<(Agent, u64, Clock)>> = const { RefCell::new(None) };
}

/// Takes the lock.
pub(super) fn lock() -> Core {
    // A panic inside an exported function aborts; one in a worker is a bug that the next assertion shows.
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a change.
pub(super) fn wait(core: Core) -> Core {
    CHANGED.wait(core).unwrap_or_else(PoisonError::into_inner)
}

/// Wakes everyone who waits for a change.
pub(super) fn changed() {
    CHANGED.notify_all();
}

/// Whether this thread is a worker inside a host function.
pub(super) fn in_function() -> bool {
    IN_FUNCTION.with_borrow(Option::is_some)
}

/// Runs a host function as its stream.
pub(super) fn run_function(agent: Agent, step: u64, clock: Clock, function: impl FnOnce()) {
    IN_FUNCTION.set(Some((agent, step, clock)));
    function();
    IN_FUNCTION.set(None);
}

/// Ends what was and begins a run. Work in queues is dropped, threads are joined.
pub(super) fn start(options: RawOptions) {
    let mut core = lock();
    core.run += 1;
    let workers = std::mem::take(&mut core.workers);
    changed();
    drop(core);
    for worker in workers {
        // A worker that panicked has said so already.
        let _ = worker.join();
    }
    let mut core = lock();
    for (base, old) in std::mem::take(&mut core.host) {
        // What nobody freed may still be in somebody's hands: it stays.
        if old.freed {
            // SAFETY: allocated by `allocate_host` with this layout; its free was called, and the workers that
            // could still read it have ended.
            unsafe { dealloc(base as *mut u8, host_layout(old.bytes)) };
        }
    }
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
    core.failures = Failures::default();
    core.calls.clear();
    core.violations.clear();
    core.live = Live::default();
    core.allowed = u64::MAX;
    core.held = 0;
    core.streams_begun = 0;
}

fn host_layout(bytes: usize) -> Layout {
    Layout::from_size_align(bytes, PAGE).expect("a size that `allocate_host` has checked")
}

/// Waits until a mark is passed, and gives the error it was passed with.
pub(super) fn wait_passed(mut core: Core, mark: &Mark) -> (Core, Code) {
    let run = core.run;
    loop {
        if let Some((_, code)) = mark.passed.get() {
            return (core, *code);
        }
        if core.run != run {
            // The run ended under this call.
            return (core, super::codes::CONTEXT_IS_DESTROYED);
        }
        core = wait(core);
    }
}

/// Waits until these marks are passed; the calling host thread then knows what came before them.
pub(super) fn synchronize(mut core: Core, marks: &[Arc<Mark>]) -> Result<(), Code> {
    let mut result = Ok(());
    for mark in marks {
        let (next, code) = wait_passed(core, mark);
        core = next;
        if code == SUCCESS {
            core.learn(&mark.clock);
        } else {
            result = Err(code);
        }
    }
    result
}

/// Waits until all queues are empty and the workers of destroyed streams have ended. No edges.
pub(super) fn drain() {
    let mut core = lock();
    while core.streams.values().any(|stream| stream.destroyed || stream.busy || !stream.queue.is_empty()) {
        core = wait(core);
    }
}

impl State {
    /// The handle of a device's primary context: another one in every run.
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

    // Streams and events.

    fn add_stream(&mut self, blocking: bool, default: bool) -> u64 {
        let id = self.handle();
        self.insert_stream(id, blocking, default);
        id
    }

    fn insert_stream(&mut self, id: u64, blocking: bool, default: bool) {
        let device = self.device().unwrap_or(0);
        self.streams.insert(id, Stream { blocking, default, device, ..Stream::default() });
        self.live.threads += 1;
        // The stream's number in this run, not its handle: a seed gives the same delays in every run.
        self.streams_begun += 1;
        let (run, seed) = (self.run, self.options.seed.wrapping_add(self.streams_begun << 32));
        let thread = std::thread::Builder::new().name(format!("cuda-sim-{id:x}"));
        let worker = thread.spawn(move || worker::run(id, run, seed)).expect("a thread for a stream");
        self.workers.retain(|worker| !worker.is_finished());
        self.workers.push(worker);
    }

    pub(super) fn create_stream(&mut self, flags: u32) -> Result<u64, Code> {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        self.live.streams += 1;
        Ok(self.add_stream(flags == 0, false))
    }

    pub(super) fn destroy_stream(&mut self, handle: usize) -> Result<(), Code> {
        let stream =
            self.streams.get_mut(&(handle as u64)).filter(|stream| !stream.destroyed && !stream.default);
        stream.ok_or(INVALID_HANDLE)?.destroyed = true;
        self.live.streams -= 1;
        Ok(())
    }

    /// The stream behind a handle: a created one, the legacy default stream (0, 1) or the thread's own (2).
    pub(super) fn stream(&mut self, handle: usize) -> Result<u64, Code> {
        match handle {
            0 | 1 => {
                let legacy = LEGACY[self.device().unwrap_or(0)];
                if !self.streams.contains_key(&legacy) {
                    self.insert_stream(legacy, false, true);
                }
                Ok(legacy)
            }
            2 => {
                let (device, mut own) = (self.device().unwrap_or(0), OWN_STREAM.get());
                if own[device].0 == self.run {
                    return Ok(own[device].1);
                }
                own[device] = (self.run, self.add_stream(true, true));
                OWN_STREAM.set(own);
                Ok(own[device].1)
            }
            handle => match self.streams.get(&(handle as u64)) {
                Some(stream) if !stream.destroyed && !stream.default => Ok(handle as u64),
                _ => Err(INVALID_HANDLE),
            },
        }
    }

    fn at(&mut self, stream: u64) -> &mut Stream {
        self.streams.get_mut(&stream).expect("a handle that `stream` gave under this lock")
    }

    /// The next step of a stream: after everything that this thread knows, and after what implicit
    /// synchronization with the legacy default stream orders before it.
    pub(super) fn step(&mut self, stream: u64) -> Actor {
        let device = self.at(stream).device;
        let before: Vec<u64> = if stream == LEGACY[device] {
            let others = self.streams.iter().filter(|(_, other)| other.device == device);
            others.filter(|(_, other)| other.blocking && !other.destroyed).map(|(id, _)| *id).collect()
        } else if self.at(stream).blocking && self.streams.contains_key(&LEGACY[device]) {
            vec![LEGACY[device]]
        } else {
            Vec::new()
        };
        for other in before {
            let mark = self.mark(other);
            self.follow(stream, mark);
        }
        let known = self.known().clone();
        let clock = &mut self.at(stream).clock;
        clock.join(&known);
        Actor { step: clock.tick(stream), clock: clock.clone(), agent: stream }
    }

    pub(super) fn push(&mut self, stream: u64, work: Work) {
        self.at(stream).queue.push_back(work);
        changed();
    }

    /// Enqueues a host function, which acts as the stream's present step.
    pub(super) fn push_function(&mut self, stream: u64, function: HostFunction, argument: usize) {
        let Actor { step, clock, .. } = self.step(stream);
        self.push(stream, Work::Host { function, argument, step, clock });
    }

    /// Enqueues a mark at a stream's end without a step of its own.
    fn mark(&mut self, stream: u64) -> Arc<Mark> {
        let mark = Arc::new(Mark { clock: self.at(stream).clock.clone(), ..Mark::default() });
        self.push(stream, Work::Record(mark.clone()));
        mark
    }

    /// A stream's later work waits for a mark.
    fn follow(&mut self, stream: u64, mark: Arc<Mark>) {
        self.at(stream).clock.join(&mark.clock);
        self.push(stream, Work::Wait(mark));
    }

    /// Enqueues a mark at a stream's end.
    pub(super) fn record(&mut self, stream: u64) -> Arc<Mark> {
        self.step(stream);
        self.mark(stream)
    }

    /// Marks at the ends of all streams.
    pub(super) fn record_all(&mut self) -> Vec<Arc<Mark>> {
        let all: Vec<u64> = self.streams.keys().copied().collect();
        all.into_iter().map(|stream| self.mark(stream)).collect()
    }

    /// The same of the current context's alone.
    pub(super) fn record_current(&mut self) -> Vec<Arc<Mark>> {
        let device = self.device();
        let streams = self.streams.iter().filter(|(_, stream)| Some(stream.device) == device);
        let all: Vec<u64> = streams.map(|(id, _)| *id).collect();
        all.into_iter().map(|stream| self.mark(stream)).collect()
    }

    /// Whether a stream has done everything; if so, this thread knows it.
    pub(super) fn is_idle(&mut self, stream: u64) -> bool {
        let stream = self.at(stream);
        let idle = stream.queue.is_empty() && !stream.busy;
        if idle {
            let clock = stream.clock.clone();
            self.learn(&clock);
        }
        idle
    }

    pub(super) fn create_event(&mut self, flags: u32) -> Result<u64, Code> {
        // BLOCKING_SYNC, DISABLE_TIMING, INTERPROCESS (which needs DISABLE_TIMING).
        if flags > 7 || flags & 6 == 4 {
            return Err(INVALID_VALUE);
        }
        let id = self.handle();
        let device = self.device().unwrap_or(0);
        self.events.insert(id, Event { device, last: None, flags });
        self.live.events += 1;
        Ok(id)
    }

    pub(super) fn destroy_event(&mut self, handle: usize) -> Result<(), Code> {
        self.events.remove(&(handle as u64)).ok_or(INVALID_HANDLE)?;
        self.live.events -= 1;
        Ok(())
    }

    pub(super) fn record_event(&mut self, handle: usize, stream: u64) -> Result<(), Code> {
        let event = self.events.get(&(handle as u64)).ok_or(INVALID_HANDLE)?;
        // An event is recorded in its own context only; every other may wait for it.
        if event.device != self.at(stream).device {
            return Err(INVALID_HANDLE);
        }
        let mark = self.record(stream);
        self.events.get_mut(&(handle as u64)).ok_or(INVALID_HANDLE)?.last = Some(mark);
        Ok(())
    }

    /// A stream waits for an event's last record; for one never recorded it does not.
    pub(super) fn wait_event(&mut self, stream: u64, handle: usize) -> Result<(), Code> {
        if let Some(mark) = self.last_record(handle)? {
            self.step(stream);
            self.follow(stream, mark);
        }
        Ok(())
    }

    pub(super) fn last_record(&self, handle: usize) -> Result<Option<Arc<Mark>>, Code> {
        Ok(self.events.get(&(handle as u64)).ok_or(INVALID_HANDLE)?.last.clone())
    }

    /// When an event that measures time was passed.
    pub(super) fn passed_at(&self, handle: usize) -> Result<Instant, Code> {
        const DISABLE_TIMING: u32 = 2;
        let event = self.events.get(&(handle as u64)).ok_or(INVALID_HANDLE)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let mark = event.last.as_ref().ok_or(INVALID_HANDLE)?;
        mark.passed.get().map(|(at, _)| *at).ok_or(super::codes::NOT_READY)
    }

    // Clocks of the host.

    fn agent(&mut self) -> Agent {
        if self.options.host_threads_apart == 0 {
            return HOST;
        }
        let (run, agent) = OWN_AGENT.get();
        if run == self.run {
            return agent;
        }
        let agent = self.handle();
        OWN_AGENT.set((self.run, agent));
        agent
    }

    /// What this thread knows.
    fn known(&mut self) -> &mut Clock {
        let agent = self.agent();
        self.hosts.entry(agent).or_default()
    }

    /// This thread learns what a clock knows.
    pub(super) fn learn(&mut self, clock: &Clock) {
        self.known().join(clock);
    }

    /// This thread's next step; inside a host function, its stream's step.
    fn host_step(&mut self) -> Actor {
        if let Some((agent, step, clock)) = IN_FUNCTION.with_borrow(Clone::clone) {
            return Actor { agent, step, clock };
        }
        let agent = self.agent();
        let known = self.known();
        Actor { step: known.tick(agent), clock: known.clone(), agent }
    }

    pub(super) fn release(&mut self, token: u64) {
        let Actor { clock, .. } = self.host_step();
        self.tokens.entry(token).or_default().join(&clock);
    }

    pub(super) fn acquire(&mut self, token: u64) {
        let clock = self.tokens.get(&token).cloned().unwrap_or_default();
        let inside = IN_FUNCTION.with_borrow_mut(|inside| {
            if let Some((_, _, known)) = inside {
                known.join(&clock);
            }
            inside.is_some()
        });
        if !inside {
            self.learn(&clock);
        }
    }

    // Memory.

    fn allocations(&mut self, space: Space) -> &mut BTreeMap<u64, Allocation> {
        match space {
            Space::Host => &mut self.host,
            Space::Device => &mut self.device,
        }
    }

    /// The allocation that holds all of a range.
    fn holder(&mut self, space: Space, address: u64, bytes: usize) -> Option<&mut Allocation> {
        let (_, allocation) = self.allocations(space).range_mut(..=address).next_back()?;
        let end = address.checked_add(bytes as u64)?;
        (end <= allocation.base + allocation.bytes as u64).then_some(allocation)
    }

    pub(super) fn is_pinned(&mut self, address: usize, bytes: usize) -> bool {
        self.holder(Space::Host, address as u64, bytes).is_some()
    }

    /// Device memory's bytes, if an allocation holds the whole range and its free has not run.
    pub(super) fn bytes(&mut self, address: u64, bytes: usize) -> Option<&mut [u8]> {
        let allocation = self.holder(Space::Device, address, bytes)?;
        let from = usize::try_from(address - allocation.base).ok()?;
        allocation.data.as_mut()?.get_mut(from..from + bytes)
    }

    pub(super) fn report(&mut self, sentence: String) {
        if self.violations.len() < MOST_VIOLATIONS && !self.violations.contains(&sentence) {
            self.violations.push(sentence);
        }
    }

    /// Checks one access, and remembers it.
    ///
    /// # Errors
    ///
    /// `INVALID_VALUE` if no allocation holds the range, or its free was called (which is also reported).
    pub(super) fn access(
        &mut self,
        (space, address, bytes): (Space, u64, usize),
        actor: &Actor,
        write: bool,
        what: &'static str,
    ) -> Result<(), Code> {
        let allocation = self.holder(space, address, bytes).ok_or(INVALID_VALUE)?;
        let from = address - allocation.base;
        let to = from + bytes as u64;
        if allocation.freed {
            self.report(format!("{what} of {} memory +{from:#x}..+{to:#x} after its free", space.name()));
            return Err(INVALID_VALUE);
        }
        let new = Access { agent: actor.agent, step: actor.step, from, to, write, what };
        let races = allocation.history.add(new, &actor.clock);
        for old in races {
            let sentence = format!(
                "{} memory +{:#x}..+{:#x}: {} is not ordered after {}",
                space.name(),
                old.from.max(from),
                old.to.min(to),
                self.who(&new),
                self.who(&old),
            );
            self.report(sentence);
        }
        Ok(())
    }

    fn who(&self, access: &Access) -> String {
        let agent = match access.agent {
            HOST => "the host".to_owned(),
            id if LEGACY.contains(&id) => "the legacy default stream".to_owned(),
            id if access.what.starts_with("host") && !self.streams.contains_key(&id) => {
                format!("host thread {id:#x}")
            }
            id => format!("stream {id:#x}"),
        };
        let kind = if access.write { "write" } else { "read" };
        format!("{} ({kind}, {agent})", access.what)
    }

    /// The host accesses a range that it has announced; page-locked or not.
    pub(super) fn host_access(&mut self, address: u64, bytes: usize, write: bool) {
        let actor = self.host_step();
        let what = if write { "host write" } else { "host read" };
        // Memory that is not page-locked: nothing of the device's touches it later than its call.
        let _ = self.access((Space::Host, address, bytes), &actor, write, what);
    }

    pub(super) fn allocate_device(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        if self.live.device_bytes.saturating_add(bytes as u64) > self.options.device_bytes {
            return Err(OUT_OF_MEMORY);
        }
        let base = self.next_address;
        // 512 is the driver's alignment; a gap, so that one byte too far is found.
        self.next_address += (bytes as u64).next_multiple_of(512) + 512;
        let data = Some(vec![0xCD; bytes]);
        self.device.insert(base, Allocation { base, bytes, data, freed: false, history: History::default() });
        self.live.device_allocations += 1;
        self.live.device_bytes += bytes as u64;
        self.live.peak_device_bytes = self.live.peak_device_bytes.max(self.live.device_bytes);
        Ok(base)
    }

    pub(super) fn allocate_host(&mut self, bytes: usize) -> Result<u64, Code> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let total = self.live.host_bytes.saturating_add(bytes as u64);
        if total > self.options.host_bytes || Layout::from_size_align(bytes, PAGE).is_err() {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: the layout's size is not 0.
        let memory = unsafe { alloc(host_layout(bytes)) };
        if memory.is_null() {
            return Err(OUT_OF_MEMORY);
        }
        // SAFETY: just allocated with this size.
        unsafe { memory.write_bytes(0xA5, bytes) };
        let base = memory as u64;
        self.host
            .insert(base, Allocation { base, bytes, data: None, freed: false, history: History::default() });
        self.live.host_allocations += 1;
        self.live.host_bytes = total;
        self.live.peak_host_bytes = self.live.peak_host_bytes.max(total);
        Ok(base)
    }

    /// Checks a free as a write of all of it by `actor` and counts it as freed. Device memory's contents stay
    /// until [`State::forget`], host memory stays until the next run: whoever still uses it finds no other's data.
    pub(super) fn free(
        &mut self,
        space: Space,
        base: u64,
        actor: &Actor,
        what: &'static str,
    ) -> Result<(), Code> {
        let allocation = self.allocations(space).get(&base).filter(|allocation| !allocation.freed);
        let bytes = allocation.ok_or(INVALID_VALUE)?.bytes;
        self.access((space, base, bytes), actor, true, what)?;
        if let Some(allocation) = self.allocations(space).get_mut(&base) {
            allocation.freed = true;
        }
        match space {
            Space::Host => {
                self.live.host_allocations -= 1;
                self.live.host_bytes -= bytes as u64;
            }
            Space::Device => {
                self.live.device_allocations -= 1;
                self.live.device_bytes -= bytes as u64;
            }
        }
        Ok(())
    }

    /// As [`State::free`], by the calling host thread.
    pub(super) fn free_by_host(&mut self, space: Space, base: u64) -> Result<(), Code> {
        let actor = self.host_step();
        self.free(space, base, &actor, "host free")
    }

    /// A device allocation's contents are gone.
    pub(super) fn forget(&mut self, base: u64) {
        if let Some(allocation) = self.device.get_mut(&base) {
            allocation.data = None;
        }
    }

    /// A number for a kernel whose digest is still to come.
    pub(super) fn add_kernel(&mut self) -> u64 {
        let id = self.handle();
        self.kernels.insert(id, None);
        id
    }
}
