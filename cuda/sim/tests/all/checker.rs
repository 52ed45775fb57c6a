//! The happens-before checker finds every removed edge in every run, and nothing in a correct program.

use std::ffi::c_void;
use std::ptr;
use std::sync::mpsc;

use crate::support::{
    BYTES, Edges, Pinned, address, assert_found, context, device, filled, launch_function, managed, pipeline,
    slot, start, stream, streams,
};
use cudarc::driver::result::stream::StreamKind;
use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};
use twinbuf_cuda_sim::{Control, Options, Sim};

#[test]
fn a_right_program_is_clean_in_200_seeds() {
    for seed in 0..200 {
        let sim = Sim::start(Options::seeded(seed));
        let kernels = pipeline(sim.control(), Edges::ALL, 6).unwrap();
        assert_eq!(sim.violations(), [""; 0], "seed {seed}");
        for (value, kernel) in (0..).zip(kernels) {
            let sum = kernel.map(|kernel| sim.checksum(kernel));
            assert!(sum.is_none_or(|sum| sum == Some(filled(value))), "seed {seed}, batch {value}");
        }
    }
}

#[test]
fn every_removed_edge_is_found_in_every_seed() {
    let refilled = "host write (write, the host) is not ordered after h2d (read";
    let table = [
        (Edges { refill: false, ..Edges::ALL }, "page-locked memory", refilled),
        (Edges { copied: false, ..Edges::ALL }, "device memory", "kernel (read"),
        (Edges { consumed: false, ..Edges::ALL }, "device memory", "h2d (write"),
    ];
    for (edges, memory, what) in table {
        for seed in 0..20 {
            let Some(sim) = Sim::start_software(Options::seeded(seed)) else { return };
            pipeline(sim.control(), edges, 6).unwrap();
            let found = sim.violations();
            let wanted = |found: &String| found.starts_with(memory) && found.contains(what);
            assert!(found.iter().any(wanted), "{edges:?}, seed {seed}: {found:#?}");
        }
    }
}

/// A small program, and the beginning of the expected finding (empty: none).
type Case<'a> = (&'a str, &'a dyn Fn(), &'a str);

const MEMSET: &str = "device memory +0x0..+0x1000: memset";
const SLOT_WRITTEN: &str =
    "page-locked memory +0x40..+0x41: host write (write, the host) is not ordered after d2h (write";
const SLOT_READ: &str =
    "page-locked memory +0x40..+0x41: host read (read, the host) is not ordered after d2h (write";

fn check(name: &str, program: impl FnOnce(), wanted: &str) {
    let Some(sim) = start() else { return };
    program();
    let found = sim.violations();
    match wanted {
        "" => assert_eq!(found, [""; 0], "{name}"),
        wanted => assert!(found.iter().any(|found| found.starts_with(wanted)), "{name}: {found:#?}"),
    }
}

#[test]
fn edges_of_every_kind() {
    let table: [Case<'_>; 18] = [
        ("streams without an edge", &|| two_streams(Order::Nothing), MEMSET),
        ("an event between streams", &|| two_streams(Order::Event), ""),
        ("an event recorded too early", &|| two_streams(Order::EarlyEvent), MEMSET),
        ("an event that was never recorded", &|| two_streams(Order::UnrecordedEvent), "device memory"),
        ("cuStreamSynchronize between streams", &|| two_streams(Order::Synchronize), ""),
        ("cuStreamQuery until it is done", &|| two_streams(Order::Query), ""),
        ("cuEventElapsedTime until it is done", &|| two_streams(Order::Elapsed), ""),
        ("cuCtxSynchronize", &|| two_streams(Order::Context), ""),
        ("a number that reaches from a neighbour into the slot", &|| straddle(true, 60), SLOT_WRITTEN),
        ("a number read that reaches into the slot", &|| straddle(false, 60), SLOT_READ),
        ("a number that ends before the slot", &|| straddle(true, 56), ""),
        ("managed memory filled by a call without a stream", &managed_memset, ""),
        (
            "host memory read once freed",
            &use_after_free,
            "host read of page-locked memory +0x8 after its free",
        ),
        (
            "a device copy of a slot that is written",
            &|| reads(false),
            "device memory +0x0..+0x1000: d2d (read",
        ),
        ("a download of a slot that is written", &|| reads(true), "device memory +0x0..+0x1000: d2h (read"),
        ("a free by the host waits", &free_waits, "page-locked memory +0x0..+0x1000: host free"),
        ("the allocation not waited for", &allocation, MEMSET),
        (
            "the per-thread streams of two threads",
            &per_thread,
            "device memory +0x0..+0x1000: memset (write, the per-thread default stream 0x",
        ),
    ];
    for (name, program, wanted) in table {
        check(name, program, wanted);
    }
}

/// A program with a wrong form and a right one, by what is wrong, and the beginning of what is found then.
type Forms = (&'static str, fn(bool), &'static str);

#[test]
fn the_wrong_form_of_a_program_is_found_and_the_right_one_is_clean() {
    let slot_filled = "page-locked memory +0x0..+0x1: host write (write, stream";
    let source_written =
        "page-locked memory +0xfff..+0x1000: host write (write, the host) is not ordered after h2d (read";
    let managed_read =
        "device memory +0x8..+0x9: host read (read, the host) is not ordered after memset (write";
    let kernel = "device memory +0x0..+0x1000: kernel (write, stream";
    let table: [Forms; 12] = [
        ("a host function without an edge to the host", host_function, "page-locked memory"),
        ("a host function fills a slot for a copy beside it", function_fills, slot_filled),
        ("a host function that the wait says nothing of", late_function, slot_filled),
        ("host memory read before its copy", read_back, "page-locked memory +0x0..+0x1: host read"),
        ("a source written under its copy, and written back", write_and_write_back, source_written),
        ("a slot on the page of its neighbours", neighbours, SLOT_READ),
        ("an instruction that sets a byte too much", set_bytes, SLOT_WRITTEN),
        ("kernels that write one buffer", kernels, kernel),
        ("managed memory read while a stream writes it", managed_memory, managed_read),
        ("pageable memory, then another stream", pageable, MEMSET),
        ("host memory freed too early", free_host, "page-locked memory +0x0..+0x1000: host free"),
        ("device memory freed too early", free_device, "device memory +0x0..+0x1000: free"),
    ];
    for (name, program, wanted) in table {
        check(name, || program(false), wanted);
        check(&format!("not {name}"), || program(true), "");
    }
    // The system call returns an error.
    check("a file read into a slot before its copy is done", || read_a_file(false), "");
    check("a file read into a slot after its copy", || read_a_file(true), "");
}

#[test]
fn a_violation_has_the_stacks_of_the_access_and_of_the_copy() {
    let Some(sim) = start() else { return };
    read_back(false);
    let [found] = &sim.violations()[..] else { panic!("one") };
    let (access, copy) = found.split_once("\n  d2h at:\n    cuMemcpyDtoHAsync_v2").unwrap();
    let (_, access) = access.split_once("\n  host read at:\n").unwrap();
    assert!(access.contains("::bytes at ") || access.contains("bytes at "), "{found}");
    for stack in [access, copy] {
        assert!(stack.contains("read_back at ") && stack.contains("checker.rs:"), "{found}");
        assert!(!stack.contains("twinbuf_cuda_sim::driver"), "{found}");
    }
}

/// Two faults may have one sentence, because that does not tell one slot from another. A fault that comes again is one.
#[test]
fn each_place_of_the_program_that_races_is_reported_once() {
    let Some(sim) = start() else { return };
    let (_context, stream, memory, first) = slot();
    let second = Pinned::new(BYTES).unwrap();
    let one = |slot: &Pinned| slot.fill(1);
    let another = |slot: &Pinned| slot.fill(2);
    for _batch in 0..3 {
        for (slot, refill) in [(&first, &one as &dyn Fn(&Pinned)), (&second, &another)] {
            slot.upload(address(&memory), &stream).unwrap();
            refill(slot);
            stream.synchronize().unwrap();
        }
    }
    let found = sim.violations();
    let sentences: Vec<_> = found.iter().map(|found| found.lines().next()).collect();
    assert!(sentences.len() == 2 && sentences[0] == sentences[1] && found[0] != found[1], "{found:#?}");
}

/// A fault that is no access to page-locked memory goes to the handler that was there before.
#[test]
fn other_faults_end_the_process_as_before() {
    use std::os::unix::process::ExitStatusExt;
    const CHILD: &str = "TWINBUF_SIM_FAULTS";
    unsafe extern "C" {
        fn raise(signal: i32) -> i32;
    }
    if let Some(kind) = std::env::var_os(CHILD) {
        let _sim = Sim::start(Options::default());
        let _context = context().unwrap();
        let _slot = Pinned::new(BYTES).unwrap();
        if kind == "breakpoint" {
            // SAFETY: it sends the signal of a breakpoint, which ends this process, as the test wants.
            unsafe { raise(5) };
            return;
        }
        // SAFETY: no memory is at this address. The write faults, which ends this process, as the test wants.
        unsafe { std::ptr::without_provenance_mut::<u8>(8).write_volatile(1) };
    }
    for (kind, signal) in [("fault", 11), ("breakpoint", 5)] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["checker::other_faults_end_the_process_as_before", "--exact"]).env(CHILD, kind);
        let ended = child.output().unwrap().status;
        assert_eq!(ended.signal(), Some(signal), "{kind}: {ended}");
    }
}

#[derive(Clone, Copy)]
enum Order {
    Nothing,
    Event,
    EarlyEvent,
    UnrecordedEvent,
    Synchronize,
    Query,
    Elapsed,
    Context,
}

/// One stream writes, another overwrites.
fn two_streams(order: Order) {
    let (context, [one, two]) = streams();
    let mut memory = device(&one, BYTES).unwrap();
    let event = context.new_event(None).unwrap();
    two.join(&one).unwrap();
    if matches!(order, Order::EarlyEvent) {
        event.record(&one).unwrap();
    }
    one.memset_zeros(&mut memory).unwrap();
    match order {
        Order::Event => {
            event.record(&one).unwrap();
            two.wait(&event).unwrap();
        }
        Order::EarlyEvent | Order::UnrecordedEvent => two.wait(&event).unwrap(),
        Order::Synchronize => one.synchronize().unwrap(),
        Order::Query => {
            // SAFETY: the stream is alive.
            let query = || unsafe { cudarc::driver::sys::cuStreamQuery(one.cu_stream()) };
            while query().result().is_err() {}
        }
        Order::Elapsed => {
            let timed = || context.new_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).unwrap();
            let [start, end] = [timed(), timed()];
            start.record(&one).unwrap();
            end.record(&one).unwrap();
            // Not `elapsed_ms`, which waits.
            // SAFETY: the events are alive.
            let query = || unsafe { result::event::elapsed(start.cu_event(), end.cu_event()) };
            while query().is_err() {}
        }
        Order::Context => context.synchronize().unwrap(),
        Order::Nothing => {}
    }
    two.memset_zeros(&mut memory).unwrap();
    one.join(&two).unwrap();
}

/// A host function reads a slot that a copy filled; the host then fills it.
fn host_function(hands_over: bool) {
    let (_context, stream, memory, slot) = slot();
    slot.download(address(&memory), &stream).unwrap();
    let (done, wait) = mpsc::channel();
    let byte = slot.pointer.cast::<u8>();
    let read = move || {
        // SAFETY: the slot outlives the stream's work.
        unsafe { byte.read_volatile() };
        if hands_over {
            Control::get().release(1);
        }
        done.send(()).unwrap();
    };
    launch_function(&stream, read).unwrap();
    wait.recv().unwrap();
    if hands_over {
        Control::get().acquire(1);
    }
    slot.fill(1);
    stream.synchronize().unwrap();
}

/// A host function fills a slot. A copy of the slot is enqueued behind it, or on a stream of its own.
fn function_fills(behind: bool) {
    let (context, [one, two]) = streams();
    let (memory, slot) = (device(&one, BYTES).unwrap(), Pinned::new(BYTES).unwrap());
    two.join(&one).unwrap();
    let held = Control::get().hold(0); // the function runs once the copy is enqueued
    launch_function(&one, || slot.fill(1)).unwrap();
    slot.upload(address(&memory), if behind { &one } else { &two }).unwrap();
    drop(held);
    context.synchronize().unwrap();
}

/// A host function fills a slot once the host has waited for the slot's copy, on a stream that waits for the copy or not.
fn late_function(waits: bool) {
    let (context, [one, two]) = streams();
    let (memory, slot) = (device(&one, BYTES).unwrap(), Pinned::new(BYTES).unwrap());
    let (go, wait) = mpsc::channel();
    let fill = || {
        wait.recv().unwrap();
        slot.fill(1);
    };
    if waits {
        slot.upload(address(&memory), &one).unwrap();
        two.join(&one).unwrap();
        launch_function(&two, fill).unwrap();
    } else {
        launch_function(&two, fill).unwrap();
        slot.upload(address(&memory), &one).unwrap();
    }
    one.synchronize().unwrap();
    go.send(()).unwrap();
    context.synchronize().unwrap();
}

fn read_back(wait: bool) {
    let (_context, stream) = stream();
    let memory = stream.clone_htod(&[7_u8; BYTES]).unwrap();
    let slot = Pinned::new(BYTES).unwrap();
    slot.download(address(&memory), &stream).unwrap();
    if wait {
        stream.synchronize().unwrap();
    }
    assert!(slot.bytes() == [7; BYTES] || !wait);
    stream.synchronize().unwrap();
}

/// Writes to a source while its copy may run, and writes the old value back: the data are right, whatever the timing.
fn write_and_write_back(wait: bool) {
    let (_context, stream, memory, slot) = slot();
    slot.fill(1);
    slot.upload(address(&memory), &stream).unwrap();
    let _read = slot.bytes(); // which an upload allows
    if wait {
        stream.synchronize().unwrap();
    }
    for value in [2_u8, 1] {
        let last = slot.pointer.cast::<u8>().wrapping_add(BYTES - 1);
        // SAFETY: inside the allocation.
        unsafe { last.write_volatile(value) };
    }
    stream.synchronize().unwrap();
}

const SLOT: usize = 64;

/// Runs a program while a copy into the second of some slots on a page runs. It gets the first.
fn beside_a_copy(slots: usize, program: impl FnOnce(*mut u8)) {
    let (_context, stream) = stream();
    let memory = device(&stream, SLOT).unwrap();
    let slots = Pinned::new(slots * SLOT).unwrap();
    slots.fill(1);
    let first = slots.pointer.cast::<u8>();
    // SAFETY: inside the allocation; nothing is read or written here.
    let second = unsafe { &mut *ptr::slice_from_raw_parts_mut(first.wrapping_add(SLOT), SLOT) };
    // SAFETY: whether the slot is left alone is what the test checks.
    unsafe { result::memcpy_dtoh_async(second, address(&memory), stream.cu_stream()) }.unwrap();
    program(first);
    stream.synchronize().unwrap();
}

/// The program uses the neighbours of the slot, and also the slot unless `leaves_alone` is set.
fn neighbours(leaves_alone: bool) {
    beside_a_copy(3, |first| {
        for at in (0..3 * SLOT).filter(|at| !leaves_alone || at / SLOT != 1) {
            let byte = first.wrapping_add(at);
            // SAFETY: inside the allocation.
            let before = unsafe { byte.read_volatile() };
            // SAFETY: as above.
            unsafe { byte.write_volatile(before + 1) };
        }
    });
}

/// The program accesses eight bytes that begin in the first slot.
fn straddle(write: bool, at: usize) {
    beside_a_copy(2, |first| {
        let number = first.wrapping_add(at).cast::<u64>();
        if write {
            // SAFETY: inside the allocation.
            unsafe { number.write_unaligned(std::hint::black_box(u64::MAX)) };
        } else {
            // SAFETY: as above.
            std::hint::black_box(unsafe { number.read_unaligned() });
        }
    });
}

/// Sets bytes with one instruction, as `memset` in the C library does, and copies them: those of the first slot, or one more.
fn set_bytes(no_more: bool) {
    beside_a_copy(2, |first| {
        let mut read = [0_u8; 2 * SLOT];
        #[cfg(target_arch = "x86_64")]
        {
            let (bytes, read) = (SLOT + usize::from(!no_more), read.as_mut_ptr());
            // SAFETY: sets bytes of the allocation.
            unsafe {
                std::arch::asm!("rep stosb", inout("rcx") bytes => _, inout("rdi") first => _, in("al") 7_u8);
            }
            // SAFETY: copies bytes of the allocation to as many.
            unsafe {
                std::arch::asm!("rep movsb", inout("rcx") bytes => _, inout("rdi") read => _, inout("rsi") first => _);
            }
        }
        assert!(read[..SLOT] == [7; SLOT]);
    });
}

fn use_after_free() {
    let _context = context().unwrap();
    let slot = Pinned::new(BYTES).unwrap();
    let at = slot.pointer.cast::<u8>().wrapping_add(8);
    drop(slot);
    // SAFETY: the simulated driver keeps it mapped, to find this.
    unsafe { at.read_volatile() };
}

/// A system call that touches a closed page returns an error. After the wait, the page is open.
fn read_a_file(wait: bool) {
    use std::io::Read;
    let (_context, stream, memory, slot) = slot();
    slot.upload(address(&memory), &stream).unwrap();
    if wait {
        stream.synchronize().unwrap();
    }
    // SAFETY: as many bytes, and no copy uses them after the wait.
    let bytes = unsafe { &mut *slot.slice() };
    let read = std::fs::File::open("/dev/zero").unwrap().read(bytes);
    const EFAULT: i32 = 14;
    assert_eq!(read.map_err(|error| error.raw_os_error()), if wait { Ok(BYTES) } else { Err(Some(EFAULT)) });
    stream.synchronize().unwrap();
}

/// Launches a kernel of the program on each stream, from an address to another. The driver does not run it, and takes its
/// parameters for the accesses.
fn launch(copies: &[(&CudaStream, u64, u64)]) -> Result<(), DriverError> {
    const PTX: &std::ffi::CStr = c".version 8.0
        .visible .entry copy(.param .u64 copy_param_0, .param .u64 copy_param_1, .param .u32 copy_param_2) {
            ld.param.u64 %rd1, [copy_param_0];
            ld.param.u64 %rd2, [copy_param_1];
            ld.global.u32 %r1, [%rd1];
            st.global.u32 [%rd2], %r1;
            ret;
        }";
    // SAFETY: PTX, as a C string.
    let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) }?;
    // SAFETY: the module is loaded.
    let copy = unsafe { result::module::get_function(module, c"copy".to_owned()) }?;
    // SAFETY: the driver refuses it.
    let none = unsafe { result::launch_kernel(copy, (0, 1, 1), (1, 1, 1), 0, ptr::null_mut(), &mut []) };
    assert_eq!(none, Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE)));
    let launched = copies.iter().try_for_each(|(stream, from, to)| {
        let count = 4_u32;
        let mut parameters =
            [ptr::from_ref(from).cast(), ptr::from_ref(to).cast(), (&raw const count).cast::<c_void>()]
                .map(<*const c_void>::cast_mut);
        // SAFETY: the parameters are those of the kernel.
        unsafe { result::launch_kernel(copy, (1, 1, 1), (1, 1, 1), 0, stream.cu_stream(), &mut parameters) }
    });
    copies.iter().try_for_each(|(stream, ..)| stream.synchronize())?;
    // SAFETY: loaded above.
    unsafe { result::module::unload(module) }?;
    launched
}

/// A launch may have its parameters in one buffer, each at its alignment, in place of a pointer to each.
#[test]
fn a_launch_takes_its_parameters_from_a_buffer() {
    const PTX: &std::ffi::CStr = c".version 8.0
        .visible .entry fill(.param .u32 fill_param_0, .param .align 2 .b8 fill_param_1[6], .param .u64 fill_param_2) {
            ld.param.u64 %rd1, [fill_param_2];
            st.global.u32 [%rd1], %r1;
            ret;
        }";
    let Some(sim) = start() else { return };
    let (context, [one, two]) = streams();
    let memory = device(&one, BYTES).unwrap();
    context.synchronize().unwrap();
    // SAFETY: PTX, as a C string.
    let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) }.unwrap();
    // SAFETY: the module is loaded.
    let fill = unsafe { result::module::get_function(module, c"fill".to_owned()) }.unwrap();
    let buffer = [0, 0, address(&memory)];
    let launch = |stream: &CudaStream, bytes: usize, parameters: *mut *mut c_void| {
        let (buffer, bytes) = ((&raw const buffer).cast(), (&raw const bytes).cast());
        // BUFFER_SIZE, BUFFER_POINTER, END.
        let options: [*const c_void; 5] =
            [ptr::without_provenance(2), bytes, ptr::without_provenance(1), buffer, ptr::null()];
        let mut extra = options.map(<*const c_void>::cast_mut);
        let (stream, extra) = (stream.cu_stream(), extra.as_mut_ptr());
        // SAFETY: the buffer is as the kernel declares its parameters.
        unsafe { sys::cuLaunchKernel(fill, 1, 1, 1, 1, 1, 1, 0, stream, parameters, extra) }.result()
    };
    let invalid = Err(DriverError(sys::CUresult::CUDA_ERROR_INVALID_VALUE));
    assert_eq!(launch(&one, 23, ptr::null_mut()), invalid);
    assert_eq!(launch(&one, 24, [ptr::null_mut(); 3].as_mut_ptr()), invalid);
    launch(&one, 24, ptr::null_mut()).unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    launch(&two, 24, ptr::null_mut()).unwrap();
    assert_found(&sim, "device memory +0x0..+0x1000: kernel (write");
    context.synchronize().unwrap();
    // SAFETY: loaded above.
    unsafe { result::module::unload(module) }.unwrap();
    one.join(&two).unwrap();
}

/// Two streams launch the kernel. Both read one buffer, and write another one or one each.
fn kernels(one_each: bool) {
    let (context, [one, two]) = streams();
    let memory = [(); 3].map(|()| device(&one, BYTES).unwrap());
    context.synchronize().unwrap();
    let [shared, first, second] = memory.each_ref().map(address);
    let other = if one_each { second } else { first };
    launch(&[(&one, shared, first), (&two, shared, other)]).unwrap();
}

/// The program may use managed memory while no stream uses it.
fn managed_memory(wait: bool) {
    let (_context, stream) = stream();
    let (memory, byte) = managed();
    // SAFETY: as many bytes.
    unsafe { byte.write_bytes(1, BYTES) };
    // SAFETY: as above.
    unsafe { result::memset_d8_async(memory, 7, BYTES, stream.cu_stream()) }.unwrap();
    if wait {
        stream.synchronize().unwrap();
    }
    // SAFETY: as above.
    let found = unsafe { byte.wrapping_add(8).read_volatile() };
    assert!(found == 7 || !wait);
    stream.synchronize().unwrap();
    // SAFETY: allocated above.
    unsafe { result::memory_free(memory) }.unwrap();
}

/// The calls for copies from and to the host take managed memory, as memory of the device.
#[test]
fn managed_memory_is_copied_as_host_memory_too() {
    let Some(sim) = start() else { return };
    let (_context, stream) = stream();
    let memory = device(&stream, BYTES).unwrap();
    stream.synchronize().unwrap();
    let (managed, bytes) = managed();
    for value in [1, 2] {
        // SAFETY: as many bytes, which no copy uses.
        unsafe { bytes.write_bytes(value, BYTES) };
        // SAFETY: as many bytes on both sides.
        unsafe { sys::cuMemcpyHtoD_v2(address(&memory), bytes.cast(), BYTES) }.result().unwrap();
        // SAFETY: as many bytes, and the copy has ended.
        unsafe { bytes.write_bytes(0, BYTES) };
        // SAFETY: as many bytes on both sides.
        unsafe { sys::cuMemcpyDtoH_v2(bytes.cast(), address(&memory), BYTES) }.result().unwrap();
        // SAFETY: as many bytes, and the copy has ended.
        assert_eq!(unsafe { bytes.wrapping_add(BYTES - 1).read() }, value);
    }
    assert_eq!(sim.violations(), [""; 0]);
    let (to, from) = (address(&memory), bytes.cast());
    // SAFETY: as many bytes on both sides.
    unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, BYTES, stream.cu_stream()) }.result().unwrap();
    // SAFETY: in the allocation. The race is what the test checks.
    unsafe { bytes.write_volatile(3) };
    assert_found(&sim, "device memory +0x0..+0x1: host write");
    stream.synchronize().unwrap();
    // SAFETY: allocated above.
    unsafe { result::memory_free(managed) }.unwrap();
}

/// Such a call waits if the memory is managed ("API synchronization behavior").
fn managed_memset() {
    let _context = context().unwrap();
    let (memory, byte) = managed();
    // SAFETY: as many bytes.
    unsafe { sys::cuMemsetD8_v2(memory, 7, BYTES) }.result().unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { byte.wrapping_add(BYTES - 1).read_volatile() }, 7);
    // SAFETY: allocated above.
    unsafe { result::memory_free(memory) }.unwrap();
}

/// A copy of pageable memory returns when it is staged: another stream's work has no edge from it.
fn pageable(wait: bool) {
    let context = context().unwrap();
    let other = context.new_stream().unwrap();
    // SAFETY: the size is not 0.
    let memory = unsafe { result::malloc_sync(BYTES) }.unwrap();
    // SAFETY: as many bytes.
    unsafe { result::memcpy_htod_sync(memory, &[7_u8; BYTES]) }.unwrap();
    if wait {
        context.default_stream().synchronize().unwrap();
    }
    // SAFETY: as above.
    unsafe { result::memset_d8_async(memory, 1, BYTES, other.cu_stream()) }.unwrap();
    context.synchronize().unwrap();
    // SAFETY: allocated above.
    unsafe { result::free_sync(memory) }.unwrap();
}

fn free_host(wait: bool) {
    let (_context, stream, memory, slot) = slot();
    slot.fill(1);
    slot.upload(address(&memory), &stream).unwrap();
    if wait {
        stream.synchronize().unwrap();
    }
    drop(slot);
}

/// A stream reads what another one has just written.
fn reads(download: bool) {
    let (_context, [one, two]) = streams();
    let mut written = device(&one, BYTES).unwrap();
    let mut copy = device(&two, BYTES).unwrap();
    two.join(&one).unwrap();
    one.memset_zeros(&mut written).unwrap();
    if download {
        two.clone_dtoh(&written).unwrap();
    } else {
        two.memcpy_dtod(&written, &mut copy).unwrap();
    }
    one.join(&two).unwrap();
}

fn free_waits() {
    let (_context, stream, memory, slot) = slot();
    slot.upload(address(&memory), &stream).unwrap();
    let event = stream.record_event(None).unwrap();
    drop(slot);
    assert_eq!(event.try_is_complete(), Ok(true));
}

fn free_device(wait: bool) {
    let (_context, [copy, compute]) = streams();
    let memory = copy.clone_htod(&[7_u8; BYTES]).unwrap();
    compute.join(&copy).unwrap();
    Control::get().kernel_read(compute.cu_stream(), address(&memory), BYTES, 100).unwrap();
    if wait {
        copy.join(&compute).unwrap();
    }
    drop(memory);
}

fn allocation() {
    let (_context, [one, two]) = streams();
    let mut memory = device(&one, BYTES).unwrap();
    two.memset_zeros(&mut memory).unwrap();
    one.join(&two).unwrap();
}

/// One handle is another stream on each thread.
fn per_thread() {
    let context = context().unwrap();
    let mine = context.per_thread_stream();
    let mut memory = device(&mine, BYTES).unwrap();
    mine.memset_zeros(&mut memory).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| context.per_thread_stream().memset_zeros(&mut memory).unwrap());
    });
    context.synchronize().unwrap();
}

#[test]
fn use_after_free_is_reported_and_refused() {
    let Some(sim) = start() else { return };
    let (_context, stream) = stream();
    let [memory, other] = [(); 2].map(|()| device(&stream, BYTES).unwrap());
    let at = address(&memory);
    drop(memory);
    stream.synchronize().unwrap();
    let slot = Pinned::new(BYTES).unwrap();
    slot.upload(at, &stream).unwrap_err();
    // SAFETY: addresses, which the driver checks.
    unsafe { sys::cuMemcpy(address(&other), at, 16) }.result().unwrap_err();
    launch(&[(&stream, address(&other), at)]).unwrap_err();
    let found = sim.violations();
    let wanted =
        ["h2d of device memory +0x0..+0x1000", "d2d of device memory +0x0..+0x10", "kernel of device memory"];
    assert_eq!(found.len(), wanted.len(), "{found:#?}");
    for (found, wanted) in found.iter().zip(wanted) {
        assert!(found.starts_with(wanted) && found.contains("after its free"), "{found}");
        let (_, free) =
            found.split_once("\n  free at:\n    cuMemFreeAsync\n").expect("the stack of the free");
        assert!(free.contains("use_after_free_is_reported_and_refused"), "{found}");
    }
}

#[test]
fn only_overlapping_ranges_conflict() {
    let sim = Sim::start(Options::default());
    let (_context, [one, two]) = streams();
    let mut memory = device(&one, BYTES).unwrap();
    two.join(&one).unwrap();
    let (mut front, mut back) = memory.split_at_mut(BYTES / 2);
    one.memset_zeros(&mut front).unwrap();
    two.memset_zeros(&mut back).unwrap();
    assert_eq!(sim.violations(), [""; 0]);
    let mut both = memory.slice_mut(BYTES / 2 - 1..BYTES);
    one.memset_zeros(&mut both).unwrap();
    if !sim.is_real() {
        assert_found(&sim, "device memory +0x800..+0x1000: memset");
    }
    one.join(&two).unwrap();
}

#[test]
fn the_legacy_stream_orders_blocking_streams_and_no_others() {
    // A race from the stream to the legacy stream, and one back.
    for (kind, races) in [(StreamKind::Default, 0), (StreamKind::NonBlocking, 2)] {
        let Some(sim) = start() else { return };
        let context = context().unwrap();
        let raw = result::stream::create(kind).unwrap();
        // SAFETY: the wrapper is dropped before the stream is destroyed.
        let stream = unsafe { context.wrap_borrowed_stream(raw) };
        let mut memory = device(&context.default_stream(), BYTES).unwrap();
        context.synchronize().unwrap();
        stream.memset_zeros(&mut memory).unwrap();
        context.default_stream().memset_zeros(&mut memory).unwrap();
        stream.memset_zeros(&mut memory).unwrap();
        context.synchronize().unwrap();
        assert_eq!(sim.violations().len(), races);
        drop(stream);
        // SAFETY: created above.
        unsafe { result::stream::destroy(raw) }.unwrap();
    }
}

/// Each device has one, and neither is ordered after the other.
#[test]
fn the_legacy_streams_of_two_devices_are_told_apart() {
    let Some(sim) = Sim::start_software(Options { devices: 2, ..Options::default() }) else { return };
    let contexts = [0, 1].map(|device| CudaContext::new(device).unwrap());
    // SAFETY: the size is not 0.
    let memory = unsafe { result::malloc_sync(BYTES) }.unwrap();
    for context in &contexts {
        context.bind_to_thread().unwrap();
        // SAFETY: as many bytes.
        unsafe { result::memset_d8_async(memory, 1, BYTES, ptr::null_mut()) }.unwrap();
    }
    let legacy = "memset (write, the legacy default stream";
    let wanted = format!("device memory +0x0..+0x1000: {legacy} of device 1) is not ordered after {legacy})");
    assert_found(&sim, &wanted);
    contexts.iter().for_each(|context| context.synchronize().unwrap());
    // SAFETY: allocated above.
    unsafe { result::free_sync(memory) }.unwrap();
}

#[test]
fn host_threads_apart_need_edges_between_them() {
    for hand_over in [false, true] {
        let sim = Sim::start(Options { host_threads_apart: true, ..Options::default() });
        let control = sim.control();
        let (_context, stream, memory, slot) = slot();
        let bytes = slot.slice() as *mut u8 as usize;
        slot.upload(address(&memory), &stream).unwrap();
        // This thread waits for the copy, another one refills the slot: to start a thread is an edge that the driver
        // cannot see.
        stream.synchronize().unwrap();
        sim.release(7);
        std::thread::spawn(move || {
            if hand_over {
                control.acquire(7);
            }
            // SAFETY: the slot has `BYTES` bytes and outlives the thread, which is joined. Its copy has ended, so nothing
            // else uses them.
            unsafe { (bytes as *mut u8).write_bytes(1, BYTES) };
        })
        .join()
        .unwrap();
        if hand_over || sim.is_real() {
            assert_eq!(sim.violations(), [""; 0]);
        } else {
            assert_found(&sim, "page-locked memory +0x0..+0x1: host write (write, host thread");
        }
        drop(slot);
    }
}
