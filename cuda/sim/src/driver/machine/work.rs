//! The work in a stream's queue, and the marks in it.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::{Core, State, wait};
use crate::driver::clock::{Clock, Step};
use crate::driver::codes::{CONTEXT_IS_DESTROYED, Code, SUCCESS};
use crate::driver::ptx::Parameter;

/// A point in a stream, such as a `cuEventRecord` makes. A later record of the event makes a new mark.
#[derive(Default)]
pub(in crate::driver) struct Mark {
    /// When the stream passed it, with the sticky error at that time.
    pub(in crate::driver) passed: OnceLock<(Instant, Code)>,
    pub(in crate::driver) clock: Clock,
}

/// A host function of `cuLaunchHostFunc`.
pub(in crate::driver) type HostFunction = unsafe extern "C" fn(*mut c_void);

/// Runs as many bytes of an operation from this offset on.
pub(in crate::driver) type Piece = dyn FnMut(&mut State, u64, usize) -> Code + Send;

/// Work in a stream's queue.
pub(in crate::driver) enum Work {
    /// An operation on the device, of one of the kinds in `abi.rs`.
    Operate {
        kind: &'static str,
        bytes: usize,
        piece: Box<Piece>,
    },
    Kernel {
        id: u64,
        at: u64,
        bytes: usize,
        fill: Option<u8>,
        duration_us: u32,
    },
    /// Takes this long, and touches no memory.
    Spin {
        microseconds: u64,
    },
    Host {
        function: HostFunction,
        argument: usize,
        at: Step,
    },
    Free(u64),
    Record(Arc<Mark>),
    Wait(Arc<Mark>),
}

impl Work {
    pub(in crate::driver) fn operate(
        kind: &'static str,
        bytes: usize,
        piece: impl FnMut(&mut State, u64, usize) -> Code + Send + 'static,
    ) -> Result<Self, Code> {
        Ok(Self::Operate { kind, bytes, piece: Box::new(piece) })
    }
}

/// The entry points of PTX that this driver can run, by name: see `cuda/kernels`. Others are not run.
#[derive(Clone, Copy)]
pub(in crate::driver) enum Entry {
    Spin,
    Sum,
    Other,
}

/// A function of a module.
#[derive(Clone)]
pub(in crate::driver) struct Function {
    pub(in crate::driver) entry: Entry,
    pub(in crate::driver) parameters: Arc<[Parameter]>,
}

/// Waits until a mark is passed. Returns the error at that time.
pub(in crate::driver) fn wait_passed(mut core: Core, mark: &Mark) -> (Core, Code) {
    let run = core.run;
    loop {
        if let Some((_, code)) = mark.passed.get() {
            return (core, *code);
        }
        if core.run != run {
            // The run ended during this call.
            return (core, CONTEXT_IS_DESTROYED);
        }
        core = wait(core);
    }
}

/// Waits until these marks are passed. The calling host thread learns the clocks of those passed without an error.
pub(in crate::driver) fn synchronize(mut core: Core, marks: &[Arc<Mark>]) -> Result<(), Code> {
    let mut result = Ok(());
    for mark in marks {
        let (next, code) = wait_passed(core, mark);
        core = next;
        if code == SUCCESS {
            core.learn(&mark.clock);
        } else {
            result = Err(code);
            // If the run has ended meanwhile, `core` is that of another run, and has lost nothing.
            if core.lost != SUCCESS {
                core.tell();
            }
        }
    }
    result
}
