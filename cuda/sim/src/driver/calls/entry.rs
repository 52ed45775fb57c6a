//! The entry of every call but `cuGetErrorName` and `cuGetErrorString`: counts it, checks the context, applies an injected
//! error.

use crate::driver::capture::{Id, UNSAFE};
use crate::driver::codes::{
    CAPTURE_UNSUPPORTED, CONTEXT_IS_DESTROYED, Code, INVALID_CONTEXT, INVALID_VALUE, NO_DEVICE,
    NOT_INITIALIZED, NOT_PERMITTED, STUB_LIBRARY, SUCCESS,
};
use crate::driver::machine::{Core, count, in_call, in_function, is_forked, lock};
use crate::options::Installed;

/// The caller's pointer for a result.
#[repr(transparent)]
pub(super) struct Out<T>(pub(super) *mut T);

impl<T> Out<T> {
    pub(super) fn set(&self, value: T) -> Result<(), Code> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the driver's caller guarantees that the pointer is valid for writes.
        unsafe { self.0.write(value) };
        Ok(())
    }
}

/// What a call requires before its body runs.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Needs {
    Nothing,
    /// `cuInit`.
    Driver,
    /// Needs `cuInit`, and no sticky error.
    Health,
    /// The same, and a context that is current on this thread.
    Context,
    /// The call frees something. Its body runs despite an injected or sticky error; the error is returned afterwards.
    Return,
    /// The same, but it does not return a sticky error.
    Release,
}

/// The error that a stub, or a driver without a device, returns from a call.
fn absent(core: &Core, name: &str) -> Option<Code> {
    match core.options.installed {
        Installed::Stub => Some(STUB_LIBRARY),
        Installed::NoDevice if name == "cuInit" => Some(NO_DEVICE),
        Installed::NoDevice if name != "cuDeviceGetCount" => Some(NOT_INITIALIZED),
        _ => None,
    }
}

/// Counts a call, checks what it needs, applies an injected error, and runs its body.
pub(super) fn enter(name: &'static str, needs: Needs, body: impl FnOnce(Core) -> Result<(), Code>) -> Code {
    // The real driver forbids this, and may hang instead of returning an error.
    if in_function() {
        return NOT_PERMITTED;
    }
    if is_forked() {
        return NOT_INITIALIZED;
    }
    in_call(|| enter_locked(name, needs, body))
}

fn enter_locked(name: &'static str, needs: Needs, body: impl FnOnce(Core) -> Result<(), Code>) -> Code {
    let mut core = lock();
    count(&mut core, name);
    let injected = core.failures.call(name);
    if let Some(code) = absent(&core, name) {
        return code;
    }
    let gives_back = matches!(needs, Needs::Return | Needs::Release);
    if let Some(injected) = injected.filter(|injected| !injected.effect && !gives_back) {
        return injected.code;
    }
    if needs != Needs::Nothing && !core.initialized && core.options.installed == Installed::Device {
        return NOT_INITIALIZED;
    }
    let sticky =
        if matches!(needs, Needs::Nothing | Needs::Driver | Needs::Release) { SUCCESS } else { core.lost };
    if sticky != SUCCESS && needs != Needs::Return {
        core.tell();
        return sticky;
    }
    let ready = if needs == Needs::Context { current(&core) } else { Ok(()) };
    let permitted = ready.and_then(|()| if UNSAFE.contains(&name) { core.permit() } else { Ok(()) });
    let result = permitted.and_then(|()| body(core)).map_or_else(|code| code, |()| SUCCESS);
    match injected {
        Some(injected) => injected.code,
        None if sticky != SUCCESS => {
            lock().tell();
            sticky
        }
        None => result,
    }
}

/// Whether a context is current on this thread, and alive.
pub(super) fn current(core: &Core) -> Result<(), Code> {
    if core.current() == 0 {
        return Err(INVALID_CONTEXT);
    }
    if !core.current_is_alive() {
        return Err(CONTEXT_IS_DESTROYED);
    }
    Ok(())
}

/// The stream of a handle. A default stream requires a current context; a created stream has its own.
pub(super) fn stream(core: &mut Core, handle: u64) -> Result<u64, Code> {
    if handle <= 2 {
        current(core)?;
    }
    core.stream(handle)
}

/// Where an operation goes.
pub(super) enum Target {
    Stream(u64),
    /// The capture that a stream belongs to, and the stream.
    Capture(Id, u64),
}

/// The stream of a handle, to enqueue work in.
pub(super) fn target(core: &mut Core, handle: u64) -> Result<Target, Code> {
    let stream = stream(core, handle)?;
    match core.captures.of(stream) {
        Some(id) => Ok(Target::Capture(id, stream)),
        None => core.refuse_implicit(stream).map(|()| Target::Stream(stream)),
    }
}

/// The stream of a handle, to wait for or to query.
pub(super) fn waitable(core: &mut Core, handle: u64) -> Result<u64, Code> {
    let stream = stream(core, handle)?;
    if let Some(id) = core.captures.of(stream) {
        core.captures.invalidate(id);
        return Err(CAPTURE_UNSUPPORTED);
    }
    core.refuse_implicit(stream).map(|()| stream)
}
