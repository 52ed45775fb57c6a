//! Captures of streams into graphs: which streams belong to a capture, and which calls a capture forbids to which
//! thread. A graph is the captured operations, in their order.
//!
//! Rules and codes: the CUDA driver API's `cuStreamBeginCapture`, `cuThreadExchangeStreamCaptureMode` and `CUresult`,
//! and "Stream Capture" in the CUDA programming guide.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::clock::Clock;
use super::codes::{
    CAPTURE_INVALIDATED, CAPTURE_ISOLATION, CAPTURE_MERGE, CAPTURE_UNJOINED, CAPTURE_UNMATCHED,
    CAPTURE_UNSUPPORTED, CAPTURE_WRONG_THREAD, CAPTURED_EVENT, Code, ILLEGAL_STATE, INVALID_VALUE,
};

/// `CUstreamCaptureMode` of a capture or a thread.
type Mode = u32;

/// The initial mode of a thread.
const GLOBAL: Mode = 0;
const THREAD_LOCAL: Mode = 1;
const RELAXED: Mode = 2;

/// "Potentially unsafe" calls in the sense of `cuThreadExchangeStreamCaptureMode`: they enqueue nothing in a created stream,
/// so a capture would not contain them. They are waits and queries by the host, allocations and frees without a stream,
/// synchronous copies, and loads and unloads of modules. Waits for an event, queries of one and copies to pageable memory are
/// unsafe too: their bodies call [`Captures::permit`].
pub(super) const UNSAFE: [&str; 16] = [
    "cuCtxSynchronize",
    "cuMemAllocHost_v2",
    "cuMemAllocManaged",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuMemcpy",
    "cuMemcpyDtoD_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoD_v2",
    "cuModuleLoadData",
    "cuModuleLoadDataEx",
    "cuModuleUnload",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

/// The number of a capture, from 1 in each run.
pub(super) type Id = u64;

struct Capture<Operation> {
    /// The number of the thread that began it.
    thread: u64,
    mode: Mode,
    /// The stream that it was begun on. It must be ended on the same one.
    origin: u64,
    /// Whether it was invalidated.
    broken: bool,
    /// Its streams. The clock of each has the captured work that comes before the stream's next operation.
    streams: BTreeMap<u64, Clock>,
    operations: Vec<Operation>,
}

/// The meaning of an event that was recorded in a captured stream.
#[derive(Clone)]
pub(super) struct Captured {
    id: Id,
    clock: Clock,
}

/// The captures that have not ended, and the graphs.
pub(super) struct Captures<Operation> {
    open: BTreeMap<Id, Capture<Operation>>,
    begun: Id,
    /// Addresses that captured allocations have returned: a captured free accepts no others.
    pub(super) memory: BTreeSet<u64>,
    /// Graphs, executable ones too, that were not destroyed.
    pub(super) graphs: BTreeMap<u64, Arc<Vec<Operation>>>,
}

impl<Operation> Default for Captures<Operation> {
    fn default() -> Self {
        Self { open: BTreeMap::new(), begun: 0, memory: BTreeSet::new(), graphs: BTreeMap::new() }
    }
}

thread_local! {
    /// This thread's mode, with the number of its run.
    static OWN_MODE: Cell<(u64, Mode)> = const { Cell::new((0, GLOBAL)) };
    /// Its number; 0 before it is asked for.
    static OWN_NUMBER: Cell<u64> = const { Cell::new(0) };
}

/// The number of the calling thread. Not its `ThreadId`: the standard library has none when a thread's local data are gone.
fn me() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    if OWN_NUMBER.get() == 0 {
        // Relaxed: nothing is published with it.
        OWN_NUMBER.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
    }
    OWN_NUMBER.get()
}

fn own_mode(run: u64) -> Mode {
    let (set_in, mode) = OWN_MODE.get();
    if set_in == run { mode } else { GLOBAL }
}

/// Sets the calling thread's mode, and returns the previous one.
pub(super) fn exchange(run: u64, mode: Mode) -> Result<Mode, Code> {
    let before = own_mode(run);
    if mode > RELAXED {
        return Err(INVALID_VALUE);
    }
    OWN_MODE.set((run, mode));
    Ok(before)
}

impl<Operation> Captures<Operation> {
    /// Begins a capture of this stream by the calling thread. The stream is not a legacy default stream.
    pub(super) fn begin(&mut self, stream: u64, mode: Mode) -> Result<(), Code> {
        if mode > RELAXED {
            return Err(INVALID_VALUE);
        }
        if self.of(stream).is_some() {
            return Err(ILLEGAL_STATE);
        }
        self.begun += 1;
        let streams = BTreeMap::from([(stream, Clock::default())]);
        let (thread, operations) = (me(), Vec::new());
        let capture = Capture { thread, mode, origin: stream, broken: false, streams, operations };
        self.open.insert(self.begun, capture);
        Ok(())
    }

    /// Ends the capture that was begun on this stream, and returns its operations.
    pub(super) fn end(&mut self, stream: u64) -> Result<Vec<Operation>, Code> {
        let id = self.of(stream).ok_or(ILLEGAL_STATE)?;
        let capture = &self.open[&id];
        if capture.origin != stream {
            return Err(CAPTURE_UNMATCHED);
        }
        if capture.mode != RELAXED && capture.thread != me() {
            return Err(CAPTURE_WRONG_THREAD);
        }
        let Some(capture) = self.open.remove(&id) else { return Err(ILLEGAL_STATE) };
        let all = &capture.streams[&stream];
        if capture.broken {
            Err(CAPTURE_INVALIDATED)
        } else if capture.streams.iter().any(|(stream, clock)| !all.knows(*stream, clock.step(*stream))) {
            Err(CAPTURE_UNJOINED)
        } else {
            Ok(capture.operations)
        }
    }

    /// Drops the captures that were begun on a stream, which is destroyed: nothing can end them any more.
    pub(super) fn destroy(&mut self, stream: u64) {
        self.open.retain(|_, capture| capture.origin != stream);
    }

    /// The capture that a stream belongs to.
    pub(super) fn of(&self, stream: u64) -> Option<Id> {
        self.open.iter().find(|(_, capture)| capture.streams.contains_key(&stream)).map(|(id, _)| *id)
    }

    /// `CUstreamCaptureStatus` of a stream: 0 none, 1 active, 2 invalidated.
    pub(super) fn status(&self, stream: u64) -> u32 {
        self.of(stream).map_or(0, |id| 1 + u32::from(self.open[&id].broken))
    }

    /// Invalidates a capture if it has not ended.
    pub(super) fn invalidate(&mut self, id: Id) {
        if let Some(capture) = self.open.get_mut(&id) {
            capture.broken = true;
        }
    }

    /// Adds work to the capture of a stream. `operation` is `None` for an allocation or a free.
    pub(super) fn work(&mut self, id: Id, stream: u64, operation: Option<Operation>) -> Result<(), Code> {
        let capture = self.valid(id)?;
        capture.streams.entry(stream).or_default().tick(stream);
        capture.operations.extend(operation);
        Ok(())
    }

    /// Records an event in a captured stream.
    pub(super) fn record(&mut self, id: Id, stream: u64) -> Result<Captured, Code> {
        let clock = self.valid(id)?.streams.entry(stream).or_default().clone();
        Ok(Captured { id, clock })
    }

    /// Makes a stream wait for an event. The event was recorded in a capture, or was `recorded` outside, or never.
    /// `Ok(true)`: neither stream nor event belongs to a capture.
    pub(super) fn wait(
        &mut self,
        stream: u64,
        event: Option<Captured>,
        recorded: bool,
    ) -> Result<bool, Code> {
        match (self.of(stream), event) {
            (None, None) => return Ok(true),
            // Waiting for an event that was never recorded has no effect.
            (Some(own), None) if !recorded => return self.valid(own).map(|_| false),
            (Some(own), None) => {
                self.valid(own)?;
                self.invalidate(own);
                return Err(CAPTURE_ISOLATION);
            }
            (own, Some(Captured { id, .. })) if !self.open.contains_key(&id) => {
                own.into_iter().for_each(|own| self.invalidate(own));
                return Err(CAPTURED_EVENT);
            }
            (Some(own), Some(Captured { id, .. })) if own != id => {
                self.invalidate(own);
                self.invalidate(id);
                return Err(CAPTURE_MERGE);
            }
            // The stream belongs to the capture from now on.
            (_, Some(Captured { id, clock })) => {
                self.valid(id)?.streams.entry(stream).or_default().join(&clock);
            }
        }
        Ok(false)
    }

    /// Queries an event. If it was recorded in a capture, this is an error and invalidates the capture.
    pub(super) fn ask(&mut self, event: Option<&Captured>) -> Result<(), Code> {
        let Some(event) = event else { return Ok(()) };
        self.invalidate(event.id);
        Err(CAPTURED_EVENT)
    }

    /// The captures that one of these streams belongs to.
    pub(super) fn among(&self, mut streams: impl FnMut(u64) -> bool) -> Vec<Id> {
        let mut has = |capture: &Capture<Operation>| capture.streams.keys().any(|stream| streams(*stream));
        self.open.iter().filter(|(_, capture)| has(capture)).map(|(id, _)| *id).collect()
    }

    fn valid(&mut self, id: Id) -> Result<&mut Capture<Operation>, Code> {
        self.open.get_mut(&id).filter(|capture| !capture.broken).ok_or(CAPTURE_INVALIDATED)
    }

    /// Invalidates the captures that forbid "potentially unsafe" calls to the calling thread; an error if there are any.
    pub(super) fn permit(&mut self, run: u64) -> Result<(), Code> {
        let mode = own_mode(run);
        if mode == RELAXED {
            return Ok(());
        }
        let me = me();
        let mut forbidden = Ok(());
        for capture in self.open.values_mut() {
            let forbids = if capture.thread == me {
                capture.mode != RELAXED
            } else {
                capture.mode == GLOBAL && mode != THREAD_LOCAL
            };
            if forbids {
                capture.broken = true;
                forbidden = Err(CAPTURE_UNSUPPORTED);
            }
        }
        forbidden
    }
}
