//! The bodies of the calls that copy, fill, launch and measure.

use std::ffi::c_void;

use super::entry::{Needs, Out, enter, stream};
use crate::driver::codes::{Code, INVALID_VALUE};
use crate::driver::machine::Core;
use crate::driver::machine::memory::Space;
use crate::driver::machine::work::{Source, Work, synchronize, wait_passed};

/// Enqueues checked work, and waits for it if `wait` is set.
fn submit(mut core: Core, stream: u64, work: Work, wait: bool) -> Result<(), Code> {
    core.push(stream, work);
    if !wait {
        return Ok(());
    }
    let mark = core.record(stream);
    synchronize(core, &[mark])
}

/// A copy from the host. A page-locked source is read when the copy runs, any other source before this returns.
pub(super) fn upload(
    mut core: Core,
    to: u64,
    from: *const c_void,
    bytes: usize,
    handle: usize,
    wait: bool,
) -> Result<(), Code> {
    let stream = stream(&mut core, handle)?;
    if bytes == 0 {
        return Ok(());
    }
    let work = upload_work(&mut core, to, from, bytes, stream)?;
    submit(core, stream, work, wait)
}

/// Checks a copy of at least one byte from the host.
fn upload_work(
    core: &mut Core,
    to: u64,
    from: *const c_void,
    bytes: usize,
    stream: u64,
) -> Result<Work, Code> {
    if from.is_null() {
        return Err(INVALID_VALUE);
    }
    let actor = core.step(stream);
    core.access((Space::Device, to, bytes), &actor, true, "h2d")?;
    let pinned = core.is_pinned(from as usize, bytes);
    if pinned {
        core.access((Space::Host, from as u64, bytes), &actor, false, "h2d")?;
    }
    // SAFETY: the caller guarantees a source of this many bytes.
    let now = unsafe { std::slice::from_raw_parts(from.cast::<u8>(), bytes) }.to_vec();
    let source =
        if pinned { Source::Pinned { address: from as usize, then: now } } else { Source::Staged(now) };
    Ok(Work::Upload { to, from: source })
}

/// Several copies from the host, in one call.
pub(super) fn upload_all(
    mut core: Core,
    (to, from, bytes): (*const u64, *const u64, *const usize),
    count: usize,
    handle: usize,
) -> Result<(), Code> {
    // The real driver accepts neither a default stream nor an empty list.
    if handle <= 2 || count == 0 || to.is_null() || from.is_null() || bytes.is_null() {
        return Err(INVALID_VALUE);
    }
    let stream = stream(&mut core, handle)?;
    // SAFETY: the caller guarantees `count` targets.
    let to = unsafe { std::slice::from_raw_parts(to, count) };
    // SAFETY: and `count` sources.
    let from = unsafe { std::slice::from_raw_parts(from, count) };
    // SAFETY: and `count` sizes.
    let bytes = unsafe { std::slice::from_raw_parts(bytes, count) };
    for ((&to, &from), &bytes) in to.iter().zip(from).zip(bytes) {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let from = std::ptr::with_exposed_provenance(from as usize);
        let work = upload_work(&mut core, to, from, bytes, stream)?;
        core.push(stream, work);
    }
    Ok(())
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
    let stream = stream(&mut core, handle)?;
    if bytes == 0 {
        return Ok(());
    }
    if to.is_null() {
        return Err(INVALID_VALUE);
    }
    let actor = core.step(stream);
    core.access((Space::Device, from, bytes), &actor, false, "d2h")?;
    let pinned = core.is_pinned(to as usize, bytes);
    if pinned {
        core.access((Space::Host, to as u64, bytes), &actor, true, "d2h")?;
    }
    submit(core, stream, Work::Download { to: to as usize, from, bytes }, wait || !pinned)
}

/// A copy on the device.
pub(super) fn copy(mut core: Core, to: u64, from: u64, bytes: usize, handle: usize) -> Result<(), Code> {
    let stream = stream(&mut core, handle)?;
    if bytes == 0 {
        return Ok(());
    }
    let actor = core.step(stream);
    core.access((Space::Device, from, bytes), &actor, false, "d2d")?;
    core.access((Space::Device, to, bytes), &actor, true, "d2d")?;
    submit(core, stream, Work::Copy { to, from, bytes }, false)
}

pub(super) fn set(mut core: Core, to: u64, value: u8, bytes: usize, handle: usize) -> Result<(), Code> {
    let stream = stream(&mut core, handle)?;
    if bytes == 0 {
        return Ok(());
    }
    let actor = core.step(stream);
    core.access((Space::Device, to, bytes), &actor, true, "memset")?;
    submit(core, stream, Work::Set { to, bytes, value }, false)
}

/// Launches a simulated kernel, which reads or fills a range. Counted under the real driver's name.
pub(in crate::driver) fn launch(
    id: &mut u64,
    handle: usize,
    (at, bytes): (u64, usize),
    fill: Option<u8>,
    duration_us: u32,
) -> Code {
    enter("cuLaunchKernel", Needs::Context, |mut core| {
        let stream = stream(&mut core, handle)?;
        let actor = core.step(stream);
        core.access((Space::Device, at, bytes), &actor, fill.is_some(), "kernel")?;
        *id = core.add_kernel();
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

pub(super) fn elapsed(core: &Core, milliseconds: &Out<f32>, start: usize, end: usize) -> Result<(), Code> {
    let (start, end) = (core.passed_at(start)?, core.passed_at(end)?);
    let forth = end.saturating_duration_since(start).as_secs_f32();
    let back = start.saturating_duration_since(end).as_secs_f32();
    milliseconds.set((forth - back) * 1e3)
}
