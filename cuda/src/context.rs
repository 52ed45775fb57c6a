//! The context of a device. Returns an error where cudarc panics for lack of a driver.

use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::cu::Current;
use crate::driver::{Driver, check};
use crate::error::{Error, wrong};

/// Returns the primary context of a device. `ordinal` is the number of the device, from 0. Frameworks share this
/// context.
///
/// It does the same as [`CudaContext::new`], but returns an error where that function panics because there is no
/// driver. It does not change the calling thread's current context.
///
/// # Errors
///
/// - [`Error::NoDriver`], [`Error::NotADriver`], [`Error::StubDriver`]: no usable driver was loaded.
/// - [`Error::NoDevice`]: the driver has no usable device.
/// - [`Error::Option`]: `ordinal` is out of range.
/// - [`Error::Driver`]: a driver call failed.
///
/// # Examples
///
/// ```
/// use twinbuf_cuda::{Error, context};
///
/// match context(0) {
///     Ok(ctx) => println!("{}", ctx.name().unwrap()),
///     Err(error @ (Error::NoDriver { .. } | Error::StubDriver { .. } | Error::NoDevice { .. })) => {
///         println!("running on the CPU: {error}");
///     }
///     Err(error) => panic!("{error}"),
/// }
/// ```
pub fn context(ordinal: usize) -> Result<Arc<CudaContext>, Error> {
    let devices = Driver::load()?.start()?;
    if ordinal >= devices {
        return Err(wrong("ordinal", format!("0 to {}", devices - 1), &ordinal));
    }
    // `CudaContext::new` makes the new context current and does not restore the old one; `_current` does.
    let _current = Current::keep()?;
    check("cuDevicePrimaryCtxRetain", CudaContext::new(ordinal))
}
