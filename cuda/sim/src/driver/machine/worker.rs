//! A stream's thread: runs the work of its queue late, in pieces, and with seeded delays.

use std::ffi::c_void;
use std::time::{Duration, Instant};

use super::work::{HostFunction, Work, wait_passed};
use super::{Core, changed, lock, run_function, wait};
use crate::driver::codes::{Code, ILLEGAL_ADDRESS, SUCCESS};
use crate::{FNV_PRIME, FNV_START};

/// A stream's thread.
struct Worker {
    run: u64,
    /// State of xorshift64, <https://www.jstatsoft.org/article/view/v008i14>.
    random: u64,
}

/// The body of a stream's thread. It ends when the stream is destroyed and empty, or when the run ends.
pub(super) fn run(stream: u64, run: u64, seed: u64) {
    let random = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut worker = Worker { run, random };
    let mut core = lock();
    // The legacy stream has the same key in all runs, so compare the run first.
    while core.run == run {
        let Some(state) = core.streams.get_mut(&stream) else { return };
        let Some(work) = state.queue.pop_front() else {
            if state.destroyed {
                core.end_stream(stream);
                changed();
                return;
            }
            core = wait(core);
            continue;
        };
        state.busy = true;
        core = worker.work(core, work);
        if core.run == run {
            if let Some(state) = core.streams.get_mut(&stream) {
                state.busy = false;
            }
            changed();
        }
    }
}

impl Worker {
    fn work(&mut self, mut core: Core, work: Work) -> Core {
        match work {
            Work::Record(mark) => {
                // Set once: each mark is enqueued once.
                let _ = mark.passed.set((Instant::now(), core.lost));
                core
            }
            Work::Wait(mark) => wait_passed(core, &mark).0,
            Work::Free(base) => {
                core = self.delay(core);
                if core.run == self.run {
                    core.forget(base);
                }
                core
            }
            Work::Host { function, argument, at } => {
                core = self.operate(core, "host", 1, |mut core, _, _| {
                    core.begin_function(at.clone());
                    drop(core);
                    run_function(at.clone(), || call(function, argument));
                    (lock(), SUCCESS)
                });
                if core.run == self.run {
                    core.end_function(&at);
                }
                core
            }
            Work::Operate { kind, bytes, mut piece } => {
                self.operate(core, kind, bytes, |mut core, at, bytes| {
                    let code = piece(&mut core, at as u64, bytes);
                    (core, code)
                })
            }
            Work::Spin { microseconds } => {
                if core.lost == SUCCESS {
                    core = self.sleep(core, microseconds);
                }
                self.operate(core, "kernel", 1, |core, _, _| (core, SUCCESS))
            }
            Work::Kernel { id, at, bytes, fill, duration_us } => {
                let mut sum = FNV_START;
                if core.lost == SUCCESS {
                    core = self.sleep(core, u64::from(duration_us));
                }
                core = self.operate(core, "kernel", bytes, |mut core, offset, bytes| {
                    let Some(data) = core.bytes(at + offset as u64, bytes) else {
                        return (core, ILLEGAL_ADDRESS);
                    };
                    if let Some(value) = fill {
                        data.fill(value);
                    }
                    sum = data.iter().fold(sum, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(FNV_PRIME));
                    (core, SUCCESS)
                });
                if core.run == self.run {
                    let result = if core.lost == SUCCESS { Ok(sum) } else { Err(core.lost) };
                    core.kernels.insert(id, Some(result));
                }
                core
            }
        }
    }

    /// Runs an operation in pieces. `piece` takes an offset and a length, and returns the lock and a code. An error is
    /// sticky. An injected error applies after the first piece, that of a host function before it. After a
    /// sticky error, nothing runs.
    fn operate(
        &mut self,
        mut core: Core,
        kind: &'static str,
        bytes: usize,
        mut piece: impl FnMut(Core, usize, usize) -> (Core, Code),
    ) -> Core {
        if core.lost != SUCCESS || core.run != self.run {
            return core;
        }
        let injected = core.failures.operation(kind);
        // A host function is one piece, so the error applies before it.
        if let Some(code) = injected.filter(|_| kind == "host") {
            core.lost = code;
            return core;
        }
        let pieces = usize::try_from(core.options.pieces).unwrap_or(1);
        let length = bytes.div_ceil(pieces).max(1);
        for at in (0..bytes).step_by(length) {
            core = self.delay(core);
            core = self.pass_hold(core);
            if core.lost != SUCCESS || core.run != self.run {
                return core;
            }
            let (next, code) = piece(core, at, length.min(bytes - at));
            core = next;
            if core.run != self.run {
                return core;
            }
            let code = injected.unwrap_or(code);
            if code != SUCCESS && core.lost == SUCCESS {
                core.lost = code;
            }
        }
        core
    }

    /// Waits until the device may run one more piece.
    fn pass_hold(&self, mut core: Core) -> Core {
        if core.allowed == 0 {
            core.held += 1;
            changed();
            while core.allowed == 0 && core.lost == SUCCESS && core.run == self.run {
                core = wait(core);
            }
            if core.run != self.run {
                return core;
            }
            core.held -= 1;
        }
        if core.allowed != u64::MAX {
            core.allowed = core.allowed.saturating_sub(1);
        }
        core
    }

    fn delay(&mut self, core: Core) -> Core {
        let longest = u64::from(core.options.delay_us);
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let microseconds = (self.random >> 16) % (longest + 1);
        self.sleep(core, microseconds)
    }

    /// Releases the lock for at least this long.
    fn sleep(&self, core: Core, microseconds: u64) -> Core {
        drop(core);
        if microseconds == 0 {
            std::thread::yield_now();
        } else {
            std::thread::sleep(Duration::from_micros(microseconds));
        }
        lock()
    }
}

fn call(function: HostFunction, argument: usize) {
    // SAFETY: the caller of `cuLaunchHostFunc` guarantees that the function can be called with this argument.
    unsafe { function(argument as *mut c_void) };
}
