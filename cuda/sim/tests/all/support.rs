//! The pipeline that the tests run through cudarc: two page-locked slots, two device slots, a copy stream, a
//! compute stream, and the three edges between them.

use std::ffi::c_void;
use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, DriverError, result, sys};
use twinbuf_cuda_sim::{Control, Kernel, Options, Sim, checksum_of};

type BoxError = Box<dyn std::error::Error>;

/// Bytes of a slot.
pub(crate) const BYTES: usize = 4096;

/// Page-locked memory, allocated and freed by the driver.
pub(crate) struct Pinned {
    pub(crate) pointer: *mut c_void,
    pub(crate) bytes: usize,
}

impl Pinned {
    pub(crate) fn new(bytes: usize) -> Result<Self, DriverError> {
        // SAFETY: the memory is written before it is read.
        Ok(Self { pointer: unsafe { result::malloc_host(bytes, 0) }?, bytes })
    }

    /// Its bytes as a raw slice: nothing here guarantees that the device does not change them.
    pub(crate) fn slice(&self) -> *mut [u8] {
        std::ptr::slice_from_raw_parts_mut(self.pointer.cast(), self.bytes)
    }

    /// Fills it from the host.
    pub(crate) fn fill(&self, value: u8) {
        // SAFETY: the allocation has this size.
        unsafe { self.pointer.write_bytes(value, self.bytes) };
    }

    /// Its bytes, copied.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut copy = vec![0; self.bytes];
        // SAFETY: the allocation has this size.
        unsafe { self.pointer.cast::<u8>().copy_to_nonoverlapping(copy.as_mut_ptr(), self.bytes) };
        copy
    }

    /// Enqueues a copy to the device.
    pub(crate) fn upload(&self, to: u64, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: the allocation has this size; nothing is read here.
        let source = unsafe { &*self.slice() };
        // SAFETY: whether the buffers are free is what the tests check.
        unsafe { result::memcpy_htod_async(to, source, stream.cu_stream()) }
    }

    /// Enqueues a copy from the device.
    pub(crate) fn download(&self, from: u64, stream: &CudaStream) -> Result<(), DriverError> {
        // SAFETY: as in `upload`.
        let to = unsafe { &mut *self.slice() };
        // SAFETY: as in `upload`.
        unsafe { result::memcpy_dtoh_async(to, from, stream.cu_stream()) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` and freed once.
        let _ = unsafe { result::free_host(self.pointer) };
    }
}

/// Enqueues a host function, which runs once. What it uses must be there until then.
pub(crate) fn launch_function<F: FnOnce()>(stream: &CudaStream, function: F) -> Result<(), DriverError> {
    unsafe extern "C" fn run<F: FnOnce()>(function: *mut c_void) {
        // SAFETY: given away below, for one call.
        let function = unsafe { Box::from_raw(function.cast::<F>()) };
        function();
    }
    let function = Box::into_raw(Box::new(function)).cast();
    // SAFETY: `run` takes the function, once.
    unsafe { result::stream::launch_host_function(stream.cu_stream(), run::<F>, function) }
}

/// Managed memory of a slot's size, for the device and for the host. [`result::memory_free`] frees it.
pub(crate) fn managed() -> (u64, *mut u8) {
    let global = sys::CUmemAttach_flags::CU_MEM_ATTACH_GLOBAL;
    // SAFETY: the size is not 0.
    let memory = unsafe { result::malloc_managed(BYTES, global) }.unwrap();
    (memory, memory as *mut u8)
}

/// Asserts that one violation was found, which begins with this text.
#[track_caller]
pub(crate) fn assert_found(sim: &Sim, wanted: &str) {
    let found = sim.violations();
    assert!(found.len() == 1 && found[0].starts_with(wanted), "wanted {wanted:?}, found {found:#?}");
}

/// Starts a run on the software driver. `None` if the real driver is used.
pub(crate) fn start() -> Option<Sim> {
    Sim::start_software(Options::default())
}

/// A context without implicit ordering.
pub(crate) fn context() -> Result<Arc<CudaContext>, DriverError> {
    let context = CudaContext::new(0)?;
    // SAFETY: the tests order their streams themselves.
    unsafe { context.disable_event_tracking() };
    Ok(context)
}

/// A context and a stream of it.
pub(crate) fn stream() -> (Arc<CudaContext>, Arc<CudaStream>) {
    let context = context().unwrap();
    let stream = context.new_stream().unwrap();
    (context, stream)
}

/// A context and two streams of it.
pub(crate) fn streams() -> (Arc<CudaContext>, [Arc<CudaStream>; 2]) {
    let (context, one) = stream();
    let two = context.new_stream().unwrap();
    (context, [one, two])
}

/// A context, a stream of it, and a slot in the memory of the device and in page-locked memory.
pub(crate) fn slot() -> (Arc<CudaContext>, Arc<CudaStream>, CudaSlice<u8>, Pinned) {
    let (context, stream) = stream();
    let memory = device(&stream, BYTES).unwrap();
    (context, stream, memory, Pinned::new(BYTES).unwrap())
}

/// Device memory, allocated on `stream` if there are pools.
pub(crate) fn device(stream: &Arc<CudaStream>, bytes: usize) -> Result<CudaSlice<u8>, DriverError> {
    // SAFETY: bytes of any value are bytes.
    unsafe { stream.alloc(bytes) }
}

/// A slice's address.
pub(crate) fn address(slice: &CudaSlice<u8>) -> u64 {
    slice.device_ptr(slice.stream()).0
}

/// The edges of the pipeline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Edges {
    /// A host slot is refilled only when its copy is done.
    pub(crate) refill: bool,
    /// The compute stream waits for the copy.
    pub(crate) copied: bool,
    /// The copy stream waits for the kernel that read the device slot.
    pub(crate) consumed: bool,
}

impl Edges {
    pub(crate) const ALL: Self = Self { refill: true, copied: true, consumed: true };
}

/// Runs `batches` batches. Batch `n` is filled with the byte `n`. Returns the kernels that read them; with the real driver,
/// `None` for each.
pub(crate) fn pipeline(sim: Control, edges: Edges, batches: u8) -> Result<Vec<Option<Kernel>>, BoxError> {
    let context = context()?;
    let copy = context.new_stream()?;
    let compute = context.new_stream()?;
    let host = [Pinned::new(BYTES)?, Pinned::new(BYTES)?];
    let slots = [device(&copy, BYTES)?, device(&copy, BYTES)?];
    // The allocations come before everything on the other stream.
    compute.join(&copy)?;
    let blocking = Some(sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC);
    let copied = [context.new_event(blocking)?, context.new_event(blocking)?];
    let consumed = [context.new_event(None)?, context.new_event(None)?];
    let mut kernels = Vec::new();
    for batch in 0..batches {
        let slot = usize::from(batch % 2);
        if edges.refill {
            copied[slot].synchronize()?;
        }
        host[slot].fill(batch);
        if edges.consumed {
            copy.wait(&consumed[slot])?;
        }
        host[slot].upload(address(&slots[slot]), &copy)?;
        copied[slot].record(&copy)?;
        if edges.copied {
            compute.wait(&copied[slot])?;
        }
        let kernel = sim.kernel_read(compute.cu_stream(), address(&slots[slot]), BYTES, 0);
        kernels.push(kernel.map_err(|code| code.to_string())?);
        consumed[slot].record(&compute)?;
    }
    context.synchronize()?;
    Ok(kernels)
}

/// A result as a number.
pub(crate) fn code(result: Result<(), DriverError>) -> u32 {
    result.map_or_else(|DriverError(code)| code as u32, |()| 0)
}

/// The digest of a slot filled with this byte.
pub(crate) fn filled(value: u8) -> u64 {
    checksum_of(&[value; BYTES])
}
