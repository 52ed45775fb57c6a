//! Two kernels for tests and for the GPU report: one takes time, one sees every byte. Their source and the command that
//! compiles it are in `kernels.cu`.

use std::ffi::c_void;
use std::sync::Arc;
use std::time::Duration;

use cudarc::driver::{CudaContext, CudaStream, DriverError, result, sys};

/// Kernels loaded into a context.
pub(crate) struct Kernels {
    ctx: Arc<CudaContext>,
    module: sys::CUmodule,
    spin: sys::CUfunction,
    sum: sys::CUfunction,
}

impl Kernels {
    pub(crate) fn new(ctx: &Arc<CudaContext>) -> Result<Self, DriverError> {
        const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");
        ctx.bind_to_thread()?;
        // SAFETY: PTX that ends with a null byte.
        let module = unsafe { result::module::load_data(PTX.as_ptr().cast()) }?;
        let function = |name: &std::ffi::CStr| {
            // SAFETY: the module is loaded.
            unsafe { result::module::get_function(module, name.to_owned()) }
        };
        let (spin, sum) = (function(c"twinbuf_spin")?, function(c"twinbuf_sum")?);
        Ok(Self { ctx: ctx.clone(), module, spin, sum })
    }

    /// Keeps `stream` busy for at least this long, without using memory.
    pub(crate) fn spin(&self, stream: &CudaStream, time: Duration) -> Result<(), DriverError> {
        let mut nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.ctx.bind_to_thread()?;
        let parameters = &mut [(&raw mut nanoseconds).cast::<c_void>()];
        // SAFETY: the kernel takes one number of 64 bits.
        unsafe { result::launch_kernel(self.spin, (1, 1, 1), (1, 1, 1), 0, stream.cu_stream(), parameters) }
    }

    /// Adds the bytes of a range to the number of 64 bits at `sum`.
    ///
    /// # Safety
    ///
    /// Both are device memory of this context until the stream has come to the kernel's end.
    pub(crate) unsafe fn sum(
        &self,
        stream: &CudaStream,
        mut from: sys::CUdeviceptr,
        bytes: usize,
        mut sum: sys::CUdeviceptr,
    ) -> Result<(), DriverError> {
        let mut bytes = bytes as u64;
        self.ctx.bind_to_thread()?;
        let parameters = &mut [
            (&raw mut from).cast::<c_void>(),
            (&raw mut bytes).cast::<c_void>(),
            (&raw mut sum).cast::<c_void>(),
        ];
        // SAFETY: the kernel takes an address, a number of 64 bits and an address; the caller guarantees the memory.
        unsafe {
            result::launch_kernel(self.sum, (256, 1, 1), (256, 1, 1), 0, stream.cu_stream(), parameters)
        }
    }
}

impl Drop for Kernels {
    fn drop(&mut self) {
        let _ = self.ctx.bind_to_thread();
        // After an error, a kernel may still run.
        let _ = result::ctx::synchronize();
        // SAFETY: loaded by `new`, and used by nothing any more.
        let _ = unsafe { result::module::unload(self.module) };
    }
}
