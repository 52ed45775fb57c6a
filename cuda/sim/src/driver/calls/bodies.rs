//! The bodies of the calls that copy, fill, load modules, launch and measure.

use std::ffi::{CStr, c_char, c_void};
use std::ptr::null;
use std::sync::Arc;

use super::entry::{Needs, Out, Target, current, enter, stream, target, waitable};
use crate::driver::codes::{
    CAPTURE_UNSUPPORTED, Code, ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, NOT_READY,
    NOT_SUPPORTED, SUCCESS,
};
use crate::driver::machine::memory::Space;
use crate::driver::machine::work::{Entry, Function, Mark, Work, synchronize, wait_passed};
use crate::driver::machine::{Core, State, lock};
use crate::driver::ptx;

/// Checks an operation, and enqueues its work in the stream of a handle; if `wait` is set, waits for it. If the stream is
/// being captured, the operation goes into the graph instead, and is checked at each launch.
pub(super) fn enqueue(
    mut core: Core,
    handle: u64,
    wait: bool,
    operation: impl Fn(&mut State, u64) -> Result<Work, Code> + Send + Sync + 'static,
) -> Result<(), Code> {
    let stream = match target(&mut core, handle)? {
        Target::Stream(stream) => stream,
        Target::Capture(id, stream) => return core.captures.work(id, stream, Some(Box::new(operation))),
    };
    let work = operation(&mut core, stream)?;
    core.push(stream, work);
    if !wait {
        return Ok(());
    }
    let mark = core.record(stream);
    synchronize(core, &[mark])
}

/// A copy from the host. A page-locked source is read when the copy runs, and `wait` waits for it. Any other source is
/// staged before this returns (or the graph's launch), after the stream's earlier work if `wait` is set: the copy to the
/// device may still be under way then ("API synchronization behavior" of the CUDA driver API).
pub(super) fn upload(
    mut core: Core,
    (to, from, bytes): (u64, u64, usize),
    handle: u64,
    wait: bool,
) -> Result<(), Code> {
    if bytes == 0 || is_managed(&mut core, from) {
        return copy(core, (to, from, bytes), handle, wait);
    }
    let pageable = is_pageable(&mut core, from, bytes)?;
    if wait && pageable {
        let stream = waitable(&mut core, handle)?;
        let mark = core.record(stream);
        synchronize(core, &[mark])?;
        core = lock();
    }
    enqueue(core, handle, wait && !pageable, move |core, stream| {
        let actor = core.step(stream);
        core.access((Space::Device, to, bytes), &actor, true, "h2d")?;
        let pinned = core.pinned(from, bytes)?;
        let staged = if pinned.is_some() {
            core.access((Space::Host, from, bytes), &actor, false, "h2d")?;
            Vec::new()
        } else {
            // SAFETY: the caller guarantees a source of this many bytes.
            unsafe { std::slice::from_raw_parts(from as *const u8, bytes) }.to_vec()
        };
        Work::operate("h2d", bytes, move |core, at, bytes| match pinned {
            Some(address) => write_device(core, to + at, &read_host(address + at, bytes)),
            None => write_device(core, to + at, &staged[at as usize..][..bytes]),
        })
    })
}

/// A copy to the host. Returns when it is done, unless the destination is page-locked and `wait` is not set, or the copy
/// is captured.
pub(super) fn download(
    mut core: Core,
    (to, from, bytes): (u64, u64, usize),
    handle: u64,
    wait: bool,
) -> Result<(), Code> {
    if bytes == 0 || is_managed(&mut core, to) {
        return copy(core, (to, from, bytes), handle, wait);
    }
    let pageable = is_pageable(&mut core, to, bytes)?;
    if pageable {
        // This call waits for the copy, which a capture may forbid.
        core.permit()?;
    }
    enqueue(core, handle, wait || pageable, move |core, stream| {
        let actor = core.step(stream);
        core.access((Space::Device, from, bytes), &actor, false, "d2h")?;
        let pinned = core.pinned(to, bytes)?;
        if pinned.is_some() {
            core.access((Space::Host, to, bytes), &actor, true, "d2h")?;
        }
        // In the device's mapping of page-locked memory, or in pageable memory of a caller that waits or has captured the copy.
        let to = pinned.unwrap_or(to);
        Work::operate("d2h", bytes, move |core, at, bytes| {
            core.bytes(from + at, bytes).map_or(ILLEGAL_ADDRESS, |data| write_host(to + at, data))
        })
    })
}

/// Whether an address is in managed memory, which counts as memory of the device.
pub(super) fn is_managed(core: &mut State, address: u64) -> bool {
    core.device_allocation(address).is_some_and(|(base, ..)| core.mapping(base).is_some())
}

/// Whether a range of the host is not page-locked.
fn is_pageable(core: &mut State, address: u64, bytes: usize) -> Result<bool, Code> {
    if address == 0 { Err(INVALID_VALUE) } else { Ok(core.pinned(address, bytes)?.is_none()) }
}

/// A copy on the device; if `wait` is set, waits for it. One of no bytes does nothing.
pub(super) fn copy(
    core: Core,
    (to, from, bytes): (u64, u64, usize),
    handle: u64,
    wait: bool,
) -> Result<(), Code> {
    if bytes == 0 {
        return Ok(());
    }
    enqueue(core, handle, wait, move |core, stream| {
        let actor = core.step(stream);
        core.access((Space::Device, from, bytes), &actor, false, "d2d")?;
        core.access((Space::Device, to, bytes), &actor, true, "d2d")?;
        Work::operate("d2d", bytes, move |core, at, bytes| {
            let data = core.bytes(from + at, bytes).map(|data| data.to_vec());
            data.map_or(ILLEGAL_ADDRESS, |data| write_device(core, to + at, &data))
        })
    })
}

/// A copy whose direction follows from the two addresses. A copy from host to host is not supported.
pub(super) fn copy_any(
    mut core: Core,
    (to, from, bytes): (u64, u64, usize),
    handle: u64,
    wait: bool,
) -> Result<(), Code> {
    let mut is_device = |address| core.device_allocation(address).is_some();
    match (is_device(to), is_device(from)) {
        (true, true) => copy(core, (to, from, bytes), handle, false),
        (true, false) => upload(core, (to, from, bytes), handle, wait),
        (false, true) => download(core, (to, from, bytes), handle, wait),
        (false, false) => Err(NOT_SUPPORTED),
    }
}

/// Fills device memory; if `wait` is set, waits for it.
pub(super) fn set(
    core: Core,
    (to, value, bytes): (u64, u8, usize),
    handle: u64,
    wait: bool,
) -> Result<(), Code> {
    if bytes == 0 {
        return Ok(());
    }
    enqueue(core, handle, wait, move |core, stream| {
        let actor = core.step(stream);
        core.access((Space::Device, to, bytes), &actor, true, "memset")?;
        Work::operate("memset", bytes, move |core, at, bytes| {
            write_device(core, to + at, &vec![value; bytes])
        })
    })
}

/// Launches a simulated kernel that reads or fills a range. Counted as `cuLaunchKernel`.
pub(in crate::driver) fn launch(
    launched: &mut u64,
    handle: u64,
    (at, bytes): (u64, usize),
    fill: Option<u8>,
    duration_us: u32,
) -> Code {
    enter("cuLaunchKernel", Needs::Context, |mut core| {
        let id = core.handle();
        // Its digest is not known yet.
        core.kernels.insert(id, None);
        *launched = id;
        let stream = stream(&mut core, handle)?;
        if core.captures.of(stream).is_some() {
            // The capture only records the kernel: there is no digest until its graph has run.
            core.kernels.insert(id, Some(Err(CAPTURE_UNSUPPORTED)));
        }
        enqueue(core, handle, false, move |core, stream| {
            let actor = core.step(stream);
            core.access((Space::Device, at, bytes), &actor, fill.is_some(), "kernel")?;
            Ok(Work::Kernel { id, at, bytes, fill, duration_us })
        })
    })
}

/// Frees memory by the host. Waits until all enqueued work has run or failed, as the real driver does, without an edge: a missing
/// one was reported by the check of the free.
pub(super) fn free(mut core: Core, space: Space, address: u64) -> Result<(), Code> {
    current(&core)?;
    core.free_by_host(space, address)?;
    for mark in core.record_all() {
        core = wait_passed(core, &mark).0;
    }
    core.forget(address);
    Ok(())
}

pub(super) fn elapsed(mut core: Core, milliseconds: &Out<f32>, start: u64, end: u64) -> Result<(), Code> {
    let marks = [core.timed_record(start)?, core.timed_record(end)?];
    let passed = |mark: &Arc<Mark>| mark.passed.get().map(|(at, _)| *at).ok_or(NOT_READY);
    let (start, end) = (passed(&marks[0])?, passed(&marks[1])?);
    // As after a query that returned "done".
    marks.iter().for_each(|mark| core.learn(&mark.clock));
    let forth = end.saturating_duration_since(start).as_secs_f32();
    let back = start.saturating_duration_since(end).as_secs_f32();
    milliseconds.set((forth - back) * 1e3)
}

/// Loads a module: PTX text.
pub(super) fn load(mut core: Core, module: &Out<u64>, image: *const c_char) -> Result<(), Code> {
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives PTX, which is a C string.
    let text = unsafe { CStr::from_ptr(image) }.to_string_lossy().into_owned();
    let loaded = core.handle();
    core.modules.insert(loaded, text);
    module.set(loaded)
}

/// The function of this name in a module's text.
pub(super) fn function(core: &mut Core, module: u64, name: *const c_char) -> Result<u64, Code> {
    let text = core.modules.get(&module).ok_or(INVALID_HANDLE)?;
    if name.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives a C string.
    let name = unsafe { CStr::from_ptr(name) }.to_str().map_err(|_| NOT_FOUND)?;
    let parameters = ptx::parameters(text, name).ok_or(NOT_FOUND)?;
    let entry = match name {
        "twinbuf_spin" => Entry::Spin,
        "twinbuf_sum" => Entry::Sum,
        _ => Entry::Other,
    };
    let found = core.handle();
    core.functions.insert(found, Function { entry, parameters: parameters.into() });
    Ok(found)
}

/// The buffer that has all of a kernel's parameters, and its size, of the `extra` options of a launch.
fn buffer(extra: *const *const c_void) -> Result<(*const u8, usize), Code> {
    // SAFETY: the caller gives pairs of an option's number and its value, and a 0 behind them.
    let option = |i: usize| unsafe { *extra.wrapping_add(i) };
    let (mut at, mut bytes) = (null(), 0);
    for i in (0..).step_by(2) {
        // END, BUFFER_POINTER, BUFFER_SIZE.
        match option(i) as usize {
            0 => break,
            1 => at = option(i + 1).cast::<u8>(),
            // SAFETY: the value is a pointer to the size.
            2 => bytes = unsafe { *option(i + 1).cast::<usize>() },
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok((at, bytes))
}

/// Launches a function of a module with its parameters: a pointer to each, or a buffer with all.
pub(super) fn launch_function(
    core: Core,
    function: u64,
    handle: u64,
    parameters: *const *const c_void,
    extra: *const *const c_void,
) -> Result<(), Code> {
    let Function { entry, parameters: declared } =
        core.functions.get(&function).cloned().ok_or(INVALID_HANDLE)?;
    let in_buffer = match (parameters.is_null(), extra.is_null()) {
        (true, false) => Some(buffer(extra)?),
        (false, true) => None,
        (true, true) if declared.is_empty() => None,
        _ => return Err(INVALID_VALUE),
    };
    // Kernels take their parameters when they are launched or captured.
    let given = declared.iter().enumerate().map(|(i, declared)| {
        let at = match in_buffer {
            _ if !declared.address => return Ok(0),
            Some((at, bytes)) if declared.offset + size_of::<u64>() <= bytes => {
                at.wrapping_add(declared.offset)
            }
            Some(_) => return Err(INVALID_VALUE),
            // SAFETY: the caller gives a pointer to each parameter.
            None => unsafe { *parameters.wrapping_add(i) }.cast(),
        };
        // SAFETY: as above, or inside the caller's buffer; it has 64 bits.
        Ok(unsafe { at.cast::<u64>().read_unaligned() })
    });
    let given = given.collect::<Result<Vec<u64>, Code>>()?;
    enqueue(core, handle, false, move |core, stream| {
        let actor = core.step(stream);
        match entry {
            Entry::Spin => Ok(Work::Spin { microseconds: given[0] / 1000 }),
            Entry::Sum => {
                let (from, bytes, to) = (given[0], given[1] as usize, given[2]);
                if bytes > 0 {
                    core.access((Space::Device, from, bytes), &actor, false, "kernel")?;
                }
                core.access((Space::Device, to, size_of::<u64>()), &actor, true, "kernel")?;
                // Adds the bytes of the range to the number at `to`, piece by piece.
                Work::operate("kernel", bytes, move |core, at, bytes| {
                    let sum = core.bytes(from + at, bytes);
                    let sum = sum.map(|data| data.iter().copied().map(u64::from).sum::<u64>());
                    let before = core.bytes(to, size_of::<u64>()).map(|number| number.to_vec());
                    let (Some(sum), Some(Ok(before))) = (sum, before.map(TryInto::try_into)) else {
                        return ILLEGAL_ADDRESS;
                    };
                    let after = u64::from_le_bytes(before).wrapping_add(sum);
                    write_device(core, to, &after.to_le_bytes())
                })
            }
            // The kernel may access each buffer that it is given, from the address to the end of the allocation.
            Entry::Other => {
                for (address, declared) in
                    given.iter().zip(declared.iter()).filter(|(_, declared)| declared.address)
                {
                    if let Some((base, bytes, _)) = core.device_allocation(*address) {
                        let rest = bytes - (address - base) as usize;
                        core.access((Space::Device, *address, rest), &actor, declared.written, "kernel")?;
                    }
                }
                Ok(Work::Spin { microseconds: 0 })
            }
        }
    })
}

fn write_device(core: &mut State, to: u64, data: &[u8]) -> Code {
    core.bytes(to, data.len()).map_or(ILLEGAL_ADDRESS, |bytes| {
        bytes.copy_from_slice(data);
        SUCCESS
    })
}

fn read_host(address: u64, bytes: usize) -> Vec<u8> {
    let mut copy = vec![0; bytes];
    // SAFETY: inside a page-locked allocation that is not unmapped before this run's workers have ended. A simultaneous
    // write there is the violation that tests look for.
    unsafe { std::ptr::copy_nonoverlapping(address as *const u8, copy.as_mut_ptr(), bytes) };
    copy
}

fn write_host(address: u64, data: &[u8]) -> Code {
    // SAFETY: inside a page-locked allocation (see `read_host`), or in memory of a caller that waits for this copy, or
    // captured it and guarantees the memory at each launch.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), address as *mut u8, data.len()) };
    SUCCESS
}
