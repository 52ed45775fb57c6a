//! The context of a device. Returns errors where cudarc panics.

use std::sync::Arc;

use cudarc::driver::CudaContext;

use crate::cu::Current;
use crate::driver::{Driver, check};
use crate::error::Error;

/// Returns the primary context of device `ordinal`, counted from 0. Frameworks share this context.
///
/// Same as [`CudaContext::new`], with errors in place of its panics. The calling thread's current context stays as it
/// was.
///
/// # Errors
///
/// [`Error::NoDriver`], [`Error::NotADriver`], [`Error::StubDriver`], [`Error::NoDevice`]; [`Error::Option`] if
/// `ordinal` is out of range; [`Error::Driver`] if the driver fails.
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
        let wanted = format!("0 to {}", devices - 1);
        return Err(Error::Option { option: "ordinal", wanted, found: ordinal.to_string() });
    }
    // `CudaContext::new` makes the new context current and does not restore the old one.
    let _current = Current::keep()?;
    check("cuDevicePrimaryCtxRetain", CudaContext::new(ordinal))
}
