//! The bodies of the calls that copy, fill, launch and measure.

use std::ffi::{CStr, c_char, c_void};

use super::entry::{Needs, Out, enter, target};
use crate::driver::codes::{
    CAPTURE_UNSUPPORTED, Code, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_SUPPORTED,
};
use crate::driver::machine::memory::Space;
use crate::driver::machine::work::{Entry, Source, Work, synchronize, wait_passed};
use crate::driver::machine::{Core, State, lock};

/// Enqueues checked work, and waits for it if `wait` is set.
fn submit(mut core: Core, stream: u64, work: Work, wait: bool) -> Result<(), Code> {
    core.push(stream, work);
    if !wait {
        return Ok(());
    }
    let mark = core.record(stream);
    synchronize(core, &[mark])
}

/// A copy from the host. A page-locked source is read when the copy runs, and `wait` waits for it. Any other source is
/// staged before this returns, after the stream's earlier work if `wait` is set: the copy to the device may still be
/// under way then ("API synchronization behavior" of the CUDA driver API).
pub(super) fn upload(
    mut core: Core,
    to: u64,
    from: *const c_void,
    bytes: usize,
    handle: usize,
    wait: bool,
) -> Result<(), Code> {
    let Some(stream) = target(&mut core, handle)? else { return Ok(()) };
    if bytes == 0 {
        return Ok(());
    }
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    let pinned = core.pinned(from as u64, bytes)?;
    if wait && pinned.is_none() {
        let mark = core.record(stream);
        synchronize(core, &[mark])?;
        core = lock();
    }
    let actor = core.step(stream);
    core.access((Space::Device, to, bytes), &actor, true, "h2d")?;
    let source = if let Some(address) = pinned {
        core.access((Space::Host, from as u64, bytes), &actor, false, "h2d")?;
        Source::Pinned { address, bytes }
    } else {
        // SAFETY: the caller guarantees a source of this many bytes.
        Source::Staged(unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec())
    };
    submit(core, stream, Work::Upload { to, from: source }, wait && pinned.is_some())
}

/// A copy to the host. Returns when it is done, unless the destination is page-locked and `wait` is not set.
pub(super) fn download(
    mut core: Core,
    to: *mut c_void,
    from: u64,
    bytes: usize,
    handle: usize,
    wait: bool,
) -> Result<(), Code> {
    let pinned = core.pinned(to as u64, bytes)?;
    if pinned.is_none() && bytes > 0 {
        // It waits for the copy.
        core.permit()?;
    }
    let Some(stream) = target(&mut core, handle)? else { return Ok(()) };
    if bytes == 0 {
        return Ok(());
    }
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let actor = core.step(stream);
    core.access((Space::Device, from, bytes), &actor, false, "d2h")?;
    if pinned.is_some() {
        core.access((Space::Host, to as u64, bytes), &actor, true, "d2h")?;
    }
    let to = pinned.unwrap_or(to as u64);
    submit(core, stream, Work::Download { to, from, bytes }, wait || pinned.is_none())
}

/// A copy on the device.
pub(super) fn copy(mut core: Core, to: u64, from: u64, bytes: usize, handle: usize) -> Result<(), Code> {
    let Some(stream) = target(&mut core, handle)? else { return Ok(()) };
    if bytes == 0 {
        return Ok(());
    }
    let actor = core.step(stream);
    core.access((Space::Device, from, bytes), &actor, false, "d2d")?;
    core.access((Space::Device, to, bytes), &actor, true, "d2d")?;
    submit(core, stream, Work::Copy { to, from, bytes }, false)
}

/// A copy whose direction the addresses say. From host to host there is none here.
pub(super) fn copy_any(
    core: Core,
    (to, from, bytes): (u64, u64, usize),
    handle: usize,
    wait: bool,
) -> Result<(), Code> {
    match (State::is_device(to), State::is_device(from)) {
        (true, true) => copy(core, to, from, bytes, handle),
        (true, false) => upload(core, to, from as *const c_void, bytes, handle, wait),
        (false, true) => download(core, to as *mut c_void, from, bytes, handle, wait),
        (false, false) => Err(NOT_SUPPORTED),
    }
}

pub(super) fn set(mut core: Core, to: u64, value: u8, bytes: usize, handle: usize) -> Result<(), Code> {
    let Some(stream) = target(&mut core, handle)? else { return Ok(()) };
    if bytes == 0 {
        return Ok(());
    }
    let actor = core.step(stream);
    core.access((Space::Device, to, bytes), &actor, true, "memset")?;
    submit(core, stream, Work::Set { to, bytes, value }, false)
}

/// Launches a simulated kernel that reads or fills a range. Counted under the real driver's name.
pub(in crate::driver) fn launch(
    id: &mut u64,
    handle: usize,
    (at, bytes): (u64, usize),
    fill: Option<u8>,
    duration_us: u32,
) -> Code {
    enter("cuLaunchKernel", Needs::Context, |mut core| {
        let stream = target(&mut core, handle)?;
        *id = core.add_kernel();
        let Some(stream) = stream else {
            // Captured work does not run.
            core.kernels.insert(*id, Some(Err(CAPTURE_UNSUPPORTED)));
            return Ok(());
        };
        let actor = core.step(stream);
        core.access((Space::Device, at, bytes), &actor, fill.is_some(), "kernel")?;
        submit(core, stream, Work::Kernel { id: *id, at, bytes, fill, duration_us }, false)
    })
}

/// Waits until all enqueued work has run or failed. Adds no edges.
pub(super) fn settle(mut core: Core) -> Core {
    for mark in core.record_all() {
        core = wait_passed(core, &mark).0;
    }
    core
}

pub(super) fn elapsed(
    core: &mut Core,
    milliseconds: &Out<f32>,
    start: usize,
    end: usize,
) -> Result<(), Code> {
    let (start, end) = (core.passed_at(start)?, core.passed_at(end)?);
    let forth = end.saturating_duration_since(start).as_secs_f32();
    let back = start.saturating_duration_since(end).as_secs_f32();
    milliseconds.set((forth - back) * 1e3)
}

/// The function of this name in a module's text.
pub(super) fn function(core: &mut Core, module: usize, name: *const c_char) -> Result<usize, Code> {
    let text = core.modules.get(&(module as u64)).ok_or(INVALID_HANDLE)?;
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
    if !text.contains(&format!(".entry {name}(")) {
        return Err(NOT_FOUND);
    }
    let entry = match name {
        "twinbuf_spin" => Entry::Spin,
        "twinbuf_sum" => Entry::Sum,
        _ => return Err(NOT_FOUND),
    };
    Ok(core.add_function(entry) as usize)
}

/// Launches a function of a module with its parameters.
pub(super) fn launch_function(
    mut core: Core,
    function: usize,
    handle: usize,
    parameters: *const *const c_void,
) -> Result<(), Code> {
    let entry = *core.functions.get(&(function as u64)).ok_or(INVALID_HANDLE)?;
    if parameters.is_null() {
        return Err(INVALID_VALUE);
    }
    let parameter = |i: usize| {
        // SAFETY: the caller gives a pointer to each parameter.
        let at = unsafe { parameters.add(i) };
        // SAFETY: as above.
        let parameter = unsafe { *at };
        // SAFETY: as above; all of them have 64 bits.
        unsafe { parameter.cast::<u64>().read_unaligned() }
    };
    let Some(stream) = target(&mut core, handle)? else { return Ok(()) };
    let actor = core.step(stream);
    let work = match entry {
        Entry::Spin => Work::Spin { microseconds: parameter(0) / 1000 },
        Entry::Sum => {
            let (from, bytes, to) = (parameter(0), parameter(1) as usize, parameter(2));
            if bytes > 0 {
                core.access((Space::Device, from, bytes), &actor, false, "kernel")?;
            }
            core.access((Space::Device, to, size_of::<u64>()), &actor, true, "kernel")?;
            Work::Sum { from, bytes, to }
        }
    };
    submit(core, stream, work, false)
}
