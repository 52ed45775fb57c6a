//! The `cu*` functions: contexts, streams, captures, graphs, modules, events, memory and copies.
//!
//! cudarc looks a symbol up when it is first called and panics if it is missing. The CUDA driver API reference has the
//! names and signatures, and describes what each function checks and waits for. README.md lists where this driver is
//! stricter. If a function has two versions with one signature, the toolkit that cudarc was built with decides which
//! one it calls.
#![allow(
    clippy::cast_possible_truncation,
    reason = "CUDA drivers exist for 64-bit systems only: u64 is usize"
)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::Arc;

use self::bodies::{
    copy, copy_any, download, elapsed, enqueue, free, function, is_managed, launch_function, load, set,
    upload,
};
use self::entry::{Needs, Out, Target, enter, stream, target, waitable};
use super::capture::exchange;
use super::codes::{
    CAPTURE_IMPLICIT, CAPTURE_UNSUPPORTED, Code, INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE,
    INVALID_VALUE, NOT_FOUND, NOT_READY, NOT_SUPPORTED, STUB_LIBRARY, SUCCESS, describe,
};
use super::faults::handle;
use super::machine::memory::Space;
use super::machine::work::{HostFunction, Work, synchronize};
use super::machine::{Core, State, initialized, is_forked, lock};
use crate::options::Installed;

mod bodies;
mod entry;

pub(super) use bodies::launch;

/// The value of a `CUdevice_attribute`, as of an H100; 0 for those that are not here.
fn attribute(core: &Core, attribute: c_int) -> c_int {
    match attribute {
        // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X and _Y, _Z.
        1..=3 => 1024,
        4 => 64,
        // MAX_GRID_DIM_X, _Y and _Z.
        5 => c_int::MAX,
        6 | 7 => 65_535,
        // MAX_SHARED_MEMORY_PER_BLOCK, _PER_MULTIPROCESSOR, _PER_BLOCK_OPTIN.
        8 => 49_152,
        81 => 233_472,
        97 => 232_448,
        // WARP_SIZE, MAX_BLOCKS_PER_MULTIPROCESSOR.
        10 | 106 => 32,
        // MAX_REGISTERS_PER_BLOCK, _PER_MULTIPROCESSOR.
        12 | 82 => 65_536,
        // MULTIPROCESSOR_COUNT, MAX_THREADS_PER_MULTIPROCESSOR.
        16 => 132,
        39 => 2048,
        // UNIFIED_ADDRESSING, STREAM_PRIORITIES_SUPPORTED, MANAGED_MEMORY, CONCURRENT_MANAGED_ACCESS.
        41 | 78 | 83 | 89 => 1,
        // COMPUTE_CAPABILITY_MAJOR; the minor one, 76, is 0.
        75 => 9,
        // ASYNC_ENGINE_COUNT.
        40 => 2,
        // MEMORY_POOLS_SUPPORTED.
        115 => c_int::from(core.options.pools),
        _ => 0,
    }
}

fn device(core: &Core, ordinal: c_int) -> Result<usize, Code> {
    let device = usize::try_from(ordinal).ok().filter(|device| *device < core.options.devices as usize);
    device.ok_or(INVALID_DEVICE)
}

/// `cuCtxCreate`, without what its versions add.
fn create_context(mut core: Core, created: &Out<u64>, ordinal: c_int) -> Result<(), Code> {
    let device = device(&core, ordinal)?;
    created.set(core.create_context(device))
}

/// `fn name(arguments) needs |core| body`: an exported function.
macro_rules! calls {
    ($(fn $name:ident($($argument:ident: $type:ty),*) $needs:ident |$core:pat_param| $body:expr;)*) => {
    $(
        /// See the CUDA driver API's function of this name.
        ///
        /// # Safety
        ///
        /// As there: pointers must be valid.
        #[unsafe(no_mangle)]
        unsafe extern "C" fn $name($($argument: $type),*) -> Code {
            enter(stringify!($name), Needs::$needs, |$core| $body)
        }
    )*

        /// The address of an exported function.
        fn address(name: &str) -> Option<*const c_void> {
            match name {
                $(stringify!($name) => Some($name as *const c_void),)*
                "cuGetErrorName" => Some(cuGetErrorName as *const c_void),
                "cuGetErrorString" => Some(cuGetErrorString as *const c_void),
                _ => None,
            }
        }
    };
}

/// Some functions that not every version of CUDA has, each with the version that introduced it. A program calls the newest
/// one that the `cuda.h` of its version has. The list includes functions that this driver lacks, so that no program
/// gets an older signature in their place.
const VERSIONS: [(&str, c_int); 13] = [
    ("cuCtxCreate_v4", 12050),
    ("cuCtxCreate_v3", 11040),
    ("cuCtxGetDevice_v2", 13000),
    ("cuCtxSynchronize_v2", 13000),
    ("cuDeviceGetUuid_v2", 11040),
    ("cuEventElapsedTime_v2", 12080),
    ("cuGetProcAddress_v2", 12000),
    ("cuGraphInstantiate_v2", 11000),
    ("cuMemAdvise_v2", 12020),
    ("cuMemPrefetchAsync_v2", 12020),
    ("cuStreamBeginCapture_v2", 10010),
    ("cuStreamGetCtx_v2", 12050),
    ("cuThreadExchangeStreamCaptureMode", 10010),
];

/// The function that a program, built for this version of CUDA, calls by this name. `None` if this driver lacks it, or
/// that version does by [`VERSIONS`].
fn newest(name: &str, version: c_int) -> Option<*const c_void> {
    let since = |name: &String| VERSIONS.iter().find(|(known, _)| known == name).map(|(_, since)| *since);
    let names = ["_v4", "_v3", "_v2", ""].map(|suffix| format!("{name}{suffix}"));
    let mut has =
        names.iter().filter(|name| since(name).map_or(address(name).is_some(), |since| since <= version));
    address(has.next()?)
}

/// `cuGetProcAddress`, without and with the status that its second version has.
fn proc_address(
    symbol: *const c_char,
    found: &Out<*const c_void>,
    version: c_int,
    flags: u64,
    status: &Out<c_uint>,
) -> Result<(), Code> {
    /// Asks for functions that use the per-thread default stream. This driver has none.
    const PER_THREAD_DEFAULT_STREAM: u64 = 2;
    if symbol.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller gives a C string.
    let name = unsafe { CStr::from_ptr(symbol) }.to_string_lossy();
    let address = newest(&name, version).filter(|_| flags & PER_THREAD_DEFAULT_STREAM == 0);
    found.set(address.unwrap_or(std::ptr::null()))?;
    // CU_GET_PROC_ADDRESS_SUCCESS, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND.
    let _ = status.set(c_uint::from(address.is_none()));
    address.map(drop).ok_or(NOT_FOUND)
}

calls! {
    // Driver, device.
    fn cuInit(flags: c_uint) Nothing |mut core| {
        handle();
        initialized();
        core.initialized = flags == 0;
        if flags == 0 { Ok(()) } else { Err(INVALID_VALUE) }
    };
    fn cuGetProcAddress(symbol: *const c_char, found: Out<*const c_void>, version: c_int, flags: u64) Nothing |_| {
        proc_address(symbol, &found, version, flags, &Out(std::ptr::null_mut()))
    };
    fn cuGetProcAddress_v2(
        symbol: *const c_char, found: Out<*const c_void>, version: c_int, flags: u64, status: Out<c_uint>
    ) Nothing |_| proc_address(symbol, &found, version, flags, &status);
    fn cuDriverGetVersion(version: Out<c_int>) Nothing |_| version.set(13_000);
    fn cuDeviceGetCount(count: Out<c_int>) Driver |core| {
        count.set(if core.options.installed == Installed::Device { core.options.devices as c_int } else { 0 })
    };
    fn cuDeviceGet(found: Out<c_int>, ordinal: c_int) Driver |core| {
        device(&core, ordinal).and_then(|_| found.set(ordinal))
    };
    fn cuDeviceGetName(name: Out<c_char>, length: c_int, ordinal: c_int) Driver |core| {
        const NAME: &std::ffi::CStr = c"twinbuf software device";
        device(&core, ordinal)?;
        // A name that does not fit is cut.
        let room = usize::try_from(length).ok().and_then(|length| length.checked_sub(1)).ok_or(INVALID_VALUE)?;
        let bytes = room.min(NAME.count_bytes());
        if name.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller's buffer has `length` bytes, and these are fewer.
        unsafe { std::ptr::copy_nonoverlapping(NAME.as_ptr(), name.0, bytes) };
        Out(name.0.wrapping_add(bytes)).set(0)
    };
    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, ordinal: c_int) Driver |core| {
        device(&core, ordinal).and_then(|_| uuid.set(*b"twinbuf-software"))
    };
    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, ordinal: c_int) Driver |core| {
        device(&core, ordinal).and_then(|_| uuid.set(*b"twinbuf-software"))
    };
    fn cuDeviceTotalMem_v2(bytes: Out<usize>, ordinal: c_int) Driver |core| {
        device(&core, ordinal)?;
        bytes.set(usize::try_from(core.options.device_bytes).unwrap_or(usize::MAX))
    };
    fn cuDeviceGetAttribute(value: Out<c_int>, number: c_int, ordinal: c_int) Driver |core| {
        device(&core, ordinal)?;
        value.set(attribute(&core, number))
    };

    // Context.
    fn cuDevicePrimaryCtxRetain(context: Out<u64>, ordinal: c_int) Driver |mut core| {
        let device = device(&core, ordinal)?;
        context.set(core.context(device))?;
        core.retains[device] += 1;
        core.live.contexts += 1;
        Ok(())
    };
    fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) Release |mut core| {
        let device = device(&core, ordinal)?;
        core.retains[device] = core.retains[device].checked_sub(1).ok_or(INVALID_CONTEXT)?;
        core.live.contexts -= 1;
        Ok(())
    };
    fn cuCtxCreate_v2(created: Out<u64>, _flags: c_uint, ordinal: c_int) Driver |core| {
        create_context(core, &created, ordinal)
    };
    fn cuCtxCreate_v3(
        created: Out<u64>, _affinity: *const c_void, _affinities: c_int, _flags: c_uint, ordinal: c_int
    ) Driver |core| create_context(core, &created, ordinal);
    fn cuCtxCreate_v4(
        created: Out<u64>, _parameters: *const c_void, _flags: c_uint, ordinal: c_int
    ) Driver |core| create_context(core, &created, ordinal);
    fn cuCtxDestroy_v2(context: u64) Release |mut core| core.destroy_context(context);
    fn cuCtxPushCurrent_v2(context: u64) Driver |core| core.push_current(context);
    fn cuCtxPopCurrent_v2(popped: Out<u64>) Driver |core| {
        let context = core.current();
        core.set_current(0)?;
        // The pointer is null if the caller does not want the context.
        let _ = popped.set(context);
        if context == 0 { Err(INVALID_CONTEXT) } else { Ok(()) }
    };
    fn cuCtxGetCurrent(context: Out<u64>) Driver |core| context.set(core.current());
    fn cuCtxSetCurrent(context: u64) Driver |core| core.set_current(context);
    fn cuCtxGetDevice(found: Out<c_int>) Context |core| found.set(core.device().unwrap_or(0) as c_int);
    fn cuCtxSetFlags(_flags: c_uint) Context |_| Ok(());
    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) Context |_| {
        // A pointer is null if the caller does not want that number. So in `cuMemGetAddressRange_v2`.
        let _ = (least.set(0), greatest.set(-5));
        Ok(())
    };
    fn cuCtxSynchronize() Context |mut core| {
        core.refuse_captured()?;
        let marks = core.record_current();
        synchronize(core, &marks)
    };

    // Streams.
    fn cuStreamCreate(created: Out<u64>, flags: c_uint) Context |mut core| created.set(core.create_stream(flags)?);
    fn cuStreamCreateWithPriority(created: Out<u64>, flags: c_uint, _priority: c_int) Context |mut core| {
        // The priority has no effect here. As with the real driver, one outside the range is no error.
        created.set(core.create_stream(flags)?)
    };
    fn cuStreamDestroy_v2(handle: u64) Return |mut core| {
        core.destroy_stream(handle)?;
        super::machine::changed();
        Ok(())
    };
    fn cuStreamSynchronize(handle: u64) Health |mut core| {
        let stream = waitable(&mut core, handle)?;
        let mark = core.record(stream);
        synchronize(core, &[mark])
    };
    fn cuStreamQuery(handle: u64) Health |mut core| {
        let stream = waitable(&mut core, handle)?;
        if core.is_idle(stream) { Ok(()) } else { Err(NOT_READY) }
    };
    fn cuStreamWaitEvent(handle: u64, event: u64, flags: c_uint) Context |mut core| {
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        let stream = stream(&mut core, handle)?;
        core.wait_event(stream, event)
    };
    fn cuLaunchHostFunc(handle: u64, function: Option<HostFunction>, argument: *mut c_void) Context |core| {
        let function = function.ok_or(INVALID_VALUE)?;
        let argument = argument as usize;
        enqueue(core, handle, false, move |core, stream| Ok(core.function(stream, function, argument)))
    };

    // Captures.
    fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) Driver |core| {
        if mode.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller has set it.
        let wanted = unsafe { mode.0.read() };
        mode.set(exchange(core.run, wanted)?)
    };
    fn cuStreamBeginCapture_v2(handle: u64, mode: c_uint) Context |mut core| {
        let stream = stream(&mut core, handle)?;
        if State::is_legacy(stream) {
            return Err(CAPTURE_UNSUPPORTED);
        }
        core.captures.begin(stream, mode)
    };
    fn cuStreamEndCapture(handle: u64, graph: Out<u64>) Context |mut core| {
        let stream = stream(&mut core, handle)?;
        graph.set(0)?;
        let operations = core.captures.end(stream)?;
        graph.set(core.add_graph(Arc::new(operations)))
    };
    fn cuStreamIsCapturing(handle: u64, status: Out<c_uint>) Context |mut core| {
        let stream = stream(&mut core, handle)?;
        // This query does not invalidate the capture.
        if core.implied(stream).is_empty() {
            status.set(core.captures.status(stream))
        } else {
            Err(CAPTURE_IMPLICIT)
        }
    };
    fn cuGraphDestroy(graph: u64) Return |mut core| {
        core.captures.graphs.remove(&graph).map(drop).ok_or(INVALID_VALUE)
    };
    // Here, an executable graph is another graph with the same operations. They run one after the other.
    fn cuGraphInstantiateWithFlags(made: Out<u64>, graph: u64, flags: u64) Context |mut core| {
        // The bits, from 1: AUTO_FREE_ON_LAUNCH, UPLOAD, DEVICE_LAUNCH (which excludes the first), USE_NODE_PRIORITY.
        if flags > 15 || flags & 5 == 5 {
            return Err(INVALID_VALUE);
        }
        let operations = core.captures.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)?;
        made.set(core.add_graph(operations))
    };
    fn cuGraphUpload(graph: u64, handle: u64) Context |mut core| {
        stream(&mut core, handle)?;
        if core.captures.graphs.contains_key(&graph) { Ok(()) } else { Err(INVALID_VALUE) }
    };
    fn cuGraphLaunch(graph: u64, handle: u64) Context |mut core| {
        let operations = core.captures.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)?;
        // A launch into a captured stream would make a graph inside a graph, which this driver lacks.
        let Target::Stream(stream) = target(&mut core, handle)? else { return Err(NOT_SUPPORTED) };
        // It runs behind the graph's launch before, also on another stream.
        core.follow_launch(stream, graph);
        for operation in operations.iter() {
            let work = operation(&mut core, stream)?;
            core.push(stream, work);
        }
        let mark = core.record(stream);
        core.launched.insert(graph, mark);
        Ok(())
    };
    fn cuGraphExecDestroy(graph: u64) Return |mut core| {
        core.launched.remove(&graph);
        core.captures.graphs.remove(&graph).map(drop).ok_or(INVALID_VALUE)
    };

    // Modules: PTX text.
    fn cuModuleLoadData(module: Out<u64>, image: *const c_char) Context |core| load(core, &module, image);
    fn cuModuleLoadDataEx(
        module: Out<u64>, image: *const c_char, _count: c_uint, _options: *const c_void, _values: *const c_void
    ) Context |core| load(core, &module, image);
    fn cuModuleGetFunction(found: Out<u64>, module: u64, name: *const c_char) Context |mut core| {
        found.set(function(&mut core, module, name)?)
    };
    fn cuModuleUnload(module: u64) Return |mut core| {
        core.modules.remove(&module).map(drop).ok_or(INVALID_HANDLE)
    };
    fn cuLaunchKernel(
        function: u64, x: c_uint, y: c_uint, z: c_uint, threads_x: c_uint, threads_y: c_uint,
        threads_z: c_uint, _shared: c_uint, handle: u64, parameters: *const *const c_void,
        extra: *const *const c_void
    ) Context |core| {
        if [x, y, z, threads_x, threads_y, threads_z].contains(&0) {
            return Err(INVALID_VALUE);
        }
        launch_function(core, function, handle, parameters, extra)
    };

    // Events.
    fn cuEventCreate(created: Out<u64>, flags: c_uint) Context |mut core| created.set(core.create_event(flags)?);
    fn cuEventDestroy_v2(event: u64) Return |mut core| core.destroy_event(event);
    fn cuEventRecord(event: u64, handle: u64) Context |mut core| {
        let stream = stream(&mut core, handle)?;
        core.record_event(event, stream)
    };
    fn cuEventQuery(event: u64) Health |mut core| {
        let Some(mark) = core.last_record(event)? else { return Ok(()) };
        match mark.passed.get() {
            None => Err(NOT_READY),
            Some((_, SUCCESS)) => {
                core.learn(&mark.clock);
                Ok(())
            }
            Some((_, code)) => {
                core.tell();
                Err(*code)
            }
        }
    };
    fn cuEventSynchronize(event: u64) Health |mut core| {
        let mark = core.last_record(event)?;
        core.count_spinning(event);
        synchronize(core, mark.as_slice())
    };
    fn cuEventElapsedTime(milliseconds: Out<f32>, start: u64, end: u64) Health |core| {
        elapsed(core, &milliseconds, start, end)
    };
    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: u64, end: u64) Health |core| {
        elapsed(core, &milliseconds, start, end)
    };

    // Memory.
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) Context |core| {
        let (limit, used) = (core.options.device_bytes, core.live.device_bytes);
        free.set(usize::try_from(limit.saturating_sub(used)).unwrap_or(usize::MAX))?;
        total.set(usize::try_from(limit).unwrap_or(usize::MAX))
    };
    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) Context |mut core| {
        address.set(core.allocate(Space::Device, false, bytes, 0)?)
    };
    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) Context |mut core| {
        // ATTACH_GLOBAL, ATTACH_HOST.
        if flags != 1 && flags != 2 {
            return Err(INVALID_VALUE);
        }
        address.set(core.allocate(Space::Device, true, bytes, 0)?)
    };
    fn cuStreamAttachMemAsync(handle: u64, address: u64, _bytes: usize, flags: c_uint) Context |mut core| {
        // The program promises which stream uses the memory; that is not checked. With SINGLE (4), it cannot be a default
        // stream.
        stream(&mut core, handle)?;
        let known = core.mapping(address).is_some() && matches!(flags, 1 | 2 | 4) && !(flags == 4 && handle < 3);
        if known { Ok(()) } else { Err(INVALID_VALUE) }
    };
    fn cuMemFree_v2(address: u64) Return |core| free(core, Space::Device, address);
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, handle: u64) Health |mut core| {
        if !core.options.pools {
            return Err(NOT_SUPPORTED);
        }
        let stream = match target(&mut core, handle)? {
            Target::Stream(stream) => stream,
            Target::Capture(id, stream) => {
                core.captures.work(id, stream, None)?;
                let captured = core.reserve_device(bytes);
                core.captures.memory.insert(captured);
                return address.set(captured);
            }
        };
        let allocated = core.allocate(Space::Device, false, bytes, 0)?;
        let actor = core.step(stream);
        core.access((Space::Device, allocated, bytes), &actor, true, "allocation")?;
        address.set(allocated)
    };
    fn cuMemFreeAsync(address: u64, handle: u64) Return |mut core| {
        if !core.options.pools {
            return Err(NOT_SUPPORTED);
        }
        let stream = match target(&mut core, handle)? {
            Target::Stream(stream) => stream,
            Target::Capture(id, stream) => {
                core.captures.work(id, stream, None)?;
                return if core.captures.memory.remove(&address) { Ok(()) } else { Err(INVALID_VALUE) };
            }
        };
        let actor = core.step(stream);
        core.free(Space::Device, address, &actor, "free")?;
        core.push(stream, Work::Free(address));
        Ok(())
    };
    fn cuMemGetAddressRange_v2(base: Out<u64>, bytes: Out<usize>, address: u64) Context |mut core| {
        let found = core.device_allocation(address).filter(|&(.., freed)| !freed).ok_or(INVALID_VALUE)?;
        let _ = (base.set(found.0), bytes.set(found.1));
        Ok(())
    };
    fn cuMemHostAlloc(address: Out<u64>, bytes: usize, flags: c_uint) Context |mut core| {
        // PORTABLE, DEVICEMAP, WRITECOMBINED.
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        address.set(core.allocate(Space::Host, true, bytes, flags)?)
    };
    fn cuMemAllocHost_v2(address: Out<u64>, bytes: usize) Context |mut core| {
        address.set(core.allocate(Space::Host, true, bytes, 0)?)
    };
    fn cuMemHostGetFlags(flags: Out<c_uint>, address: u64) Context |mut core| {
        flags.set(core.host_flags(address).ok_or(INVALID_VALUE)?)
    };
    fn cuMemFreeHost(address: u64) Return |core| free(core, Space::Host, address);

    // Copies. Those without a stream use the legacy default stream.
    fn cuMemcpyHtoD_v2(to: u64, from: u64, bytes: usize) Context |core| upload(core, (to, from, bytes), 0, true);
    fn cuMemcpyHtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: u64) Context |core| {
        upload(core, (to, from, bytes), handle, false)
    };
    fn cuMemcpyDtoH_v2(to: u64, from: u64, bytes: usize) Context |core| download(core, (to, from, bytes), 0, true);
    fn cuMemcpyDtoHAsync_v2(to: u64, from: u64, bytes: usize, handle: u64) Context |core| {
        download(core, (to, from, bytes), handle, false)
    };
    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) Context |core| copy(core, (to, from, bytes), 0, false);
    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, handle: u64) Context |core| {
        copy(core, (to, from, bytes), handle, false)
    };
    fn cuMemcpyPeerAsync(to: u64, _to_in: u64, from: u64, _from_in: u64, bytes: usize, handle: u64) Context |core| {
        copy(core, (to, from, bytes), handle, false)
    };
    fn cuMemcpy(to: u64, from: u64, bytes: usize) Context |core| copy_any(core, (to, from, bytes), 0, true);
    fn cuMemcpyAsync(to: u64, from: u64, bytes: usize, handle: u64) Context |core| {
        copy_any(core, (to, from, bytes), handle, false)
    };
    fn cuMemsetD8_v2(to: u64, value: u8, bytes: usize) Context |mut core| {
        // Waits only if the host sees the memory ("API synchronization behavior").
        let wait = is_managed(&mut core, to);
        set(core, (to, value, bytes), 0, wait)
    };
    fn cuMemsetD8Async(to: u64, value: u8, bytes: usize, handle: u64) Context |core| {
        set(core, (to, value, bytes), handle, false)
    };
}

/// `cuGetErrorName` and `cuGetErrorString` are not counted and never fail by injection: formatting an error calls
/// them, and a test that counts calls should not depend on that.
fn text(text: &Out<*const c_char>, find: impl FnOnce() -> Option<*const c_char>) -> Code {
    if !is_forked() && lock().options.installed == Installed::Stub {
        return STUB_LIBRARY;
    }
    let found = find();
    let code = if found.is_some() { SUCCESS } else { INVALID_VALUE };
    text.set(found.unwrap_or(std::ptr::null())).map_or_else(|code| code, |()| code)
}

/// See the CUDA driver API's function of this name.
///
/// # Safety
///
/// As there: the pointer must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorName(code: Code, name: Out<*const c_char>) -> Code {
    text(&name, || describe(code).map(|(name, _)| name.as_ptr()))
}

/// See the CUDA driver API's function of this name.
///
/// # Safety
///
/// As there: the pointer must be valid.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: Code, sentence: Out<*const c_char>) -> Code {
    text(&sentence, || describe(code).map(|(_, sentence)| sentence.as_ptr()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_gets_the_function_of_its_own_cuda_version() {
        let table = [
            ("cuCtxCreate", 3020, Some("cuCtxCreate_v2")),
            ("cuCtxCreate", 12040, Some("cuCtxCreate_v3")),
            ("cuCtxCreate", 12050, Some("cuCtxCreate_v4")),
            ("cuCtxSynchronize", 12090, Some("cuCtxSynchronize")),
            // This driver lacks the second version, and the first has another signature.
            ("cuCtxSynchronize", 13000, None),
            ("cuEventElapsedTime", 12000, Some("cuEventElapsedTime")),
            ("cuMemcpyHtoDAsync", 3020, Some("cuMemcpyHtoDAsync_v2")),
            ("cuGetErrorName", 6000, Some("cuGetErrorName")),
            ("cuNothing", 13000, None),
        ];
        for (name, version, wanted) in table {
            assert_eq!(newest(name, version), wanted.and_then(address), "{name}, {version}");
        }
    }
}
