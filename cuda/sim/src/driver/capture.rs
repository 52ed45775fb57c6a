//! Captures of streams into graphs: which calls they forbid to which thread meanwhile. No work is captured, and every
//! graph is null.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::thread::{self, ThreadId};

use super::codes::{CAPTURE_INVALIDATED, CAPTURE_UNSUPPORTED, Code, INVALID_VALUE};

/// `CUstreamCaptureMode` of a capture or a thread.
type Mode = u32;

/// The initial mode of a thread.
const GLOBAL: Mode = 0;
const THREAD_LOCAL: Mode = 1;
const RELAXED: Mode = 2;

/// "Potentially unsafe" calls in the sense of `cuThreadExchangeStreamCaptureMode`: waits and queries of the host, and
/// allocation without a stream.
const UNSAFE: [&str; 10] = [
    "cuCtxSynchronize",
    "cuEventQuery",
    "cuEventSynchronize",
    "cuMemAllocHost_v2",
    "cuMemAlloc_v2",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemHostAlloc",
    "cuStreamQuery",
    "cuStreamSynchronize",
];

struct Capture {
    thread: ThreadId,
    mode: Mode,
    /// Whether a forbidden call was made meanwhile.
    broken: bool,
}

/// The streams that are being captured.
#[derive(Default)]
pub(super) struct Captures(BTreeMap<u64, Capture>);

thread_local! {
    /// This thread's mode, with its run.
    static OWN_MODE: Cell<(u64, Mode)> = const { Cell::new((0, GLOBAL)) };
}

fn own_mode(run: u64) -> Mode {
    let (set_in, mode) = OWN_MODE.get();
    if set_in == run { mode } else { GLOBAL }
}

/// Sets the calling thread's mode, and returns the one before.
pub(super) fn exchange(run: u64, mode: Mode) -> Result<Mode, Code> {
    let before = own_mode(run);
    if mode > RELAXED {
        return Err(INVALID_VALUE);
    }
    OWN_MODE.set((run, mode));
    Ok(before)
}

impl Captures {
    /// Begins a capture of this stream by the calling thread.
    pub(super) fn begin(&mut self, stream: u64, mode: Mode) -> Result<(), Code> {
        if mode > RELAXED || self.0.contains_key(&stream) {
            return Err(INVALID_VALUE);
        }
        self.0.insert(stream, Capture { thread: thread::current().id(), mode, broken: false });
        Ok(())
    }

    /// Ends a capture; an error if it was invalidated.
    pub(super) fn end(&mut self, stream: u64) -> Result<(), Code> {
        let capture = self.0.remove(&stream).ok_or(INVALID_VALUE)?;
        if capture.broken { Err(CAPTURE_INVALIDATED) } else { Ok(()) }
    }

    /// Whether this stream is being captured, so that no work can be enqueued in it.
    pub(super) fn holds(&self, stream: u64) -> bool {
        self.0.contains_key(&stream)
    }

    /// Invalidates the captures that forbid this call to the calling thread.
    pub(super) fn call(&mut self, run: u64, name: &str) -> Result<(), Code> {
        let mode = own_mode(run);
        if mode == RELAXED || !UNSAFE.contains(&name) {
            return Ok(());
        }
        let me = thread::current().id();
        let mut forbidden = Ok(());
        for capture in self.0.values_mut() {
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
