//! The `CUresult`s that this driver returns, and the names of those that tests inject.
//! Numbers: the CUDA driver API's `CUresult`.

use std::ffi::CStr;

/// A `CUresult`.
pub(super) type Code = u32;

/// A constant for each code, and the names that `cuGetErrorName` and `cuGetErrorString` return.
macro_rules! codes {
    ($($code:literal $constant:ident: $name:literal, $description:literal;)*) => {
        $(
            #[allow(dead_code, reason = "some are only injected")]
            pub(super) const $constant: Code = $code;
        )*

        /// The code's name and description; `None` for a code that is not listed here.
        pub(super) fn describe(code: Code) -> Option<(&'static CStr, &'static CStr)> {
            match code {
                $($code => Some(($name, $description)),)*
                _ => None,
            }
        }
    };
}

codes! {
    0 SUCCESS: c"CUDA_SUCCESS", c"no error";
    1 INVALID_VALUE: c"CUDA_ERROR_INVALID_VALUE", c"invalid argument";
    2 OUT_OF_MEMORY: c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory";
    3 NOT_INITIALIZED: c"CUDA_ERROR_NOT_INITIALIZED", c"cuInit was not called";
    4 DEINITIALIZED: c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down";
    34 STUB_LIBRARY: c"CUDA_ERROR_STUB_LIBRARY", c"the toolkit's stub is loaded in place of a driver";
    46 DEVICE_UNAVAILABLE: c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"device busy or unavailable";
    100 NO_DEVICE: c"CUDA_ERROR_NO_DEVICE", c"no device found";
    101 INVALID_DEVICE: c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal";
    201 INVALID_CONTEXT: c"CUDA_ERROR_INVALID_CONTEXT", c"invalid context, or none current";
    214 ECC_UNCORRECTABLE: c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error";
    400 INVALID_HANDLE: c"CUDA_ERROR_INVALID_HANDLE", c"invalid stream or event";
    401 ILLEGAL_STATE: c"CUDA_ERROR_ILLEGAL_STATE", c"not in a state for this call";
    500 NOT_FOUND: c"CUDA_ERROR_NOT_FOUND", c"no such symbol";
    600 NOT_READY: c"CUDA_ERROR_NOT_READY", c"not finished";
    700 ILLEGAL_ADDRESS: c"CUDA_ERROR_ILLEGAL_ADDRESS", c"illegal memory access by the device";
    709 CONTEXT_IS_DESTROYED: c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed";
    719 LAUNCH_FAILED: c"CUDA_ERROR_LAUNCH_FAILED", c"kernel failed";
    800 NOT_PERMITTED: c"CUDA_ERROR_NOT_PERMITTED", c"not permitted in a host function";
    801 NOT_SUPPORTED: c"CUDA_ERROR_NOT_SUPPORTED", c"not supported";
    900 CAPTURE_UNSUPPORTED: c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
        c"not permitted while a stream is captured";
    901 CAPTURE_INVALIDATED: c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
        c"a call that is not permitted broke the capture";
    902 CAPTURE_MERGE: c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"two captures would become one";
    903 CAPTURE_UNMATCHED: c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture was begun on another stream";
    904 CAPTURE_UNJOINED: c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
        c"a stream of the capture was not joined to its first one";
    905 CAPTURE_ISOLATION: c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
        c"captured work would depend on work outside the capture";
    906 CAPTURE_IMPLICIT: c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
        c"the legacy default stream would depend on a capture";
    907 CAPTURED_EVENT: c"CUDA_ERROR_CAPTURED_EVENT", c"the event was last recorded in a captured stream";
    908 CAPTURE_WRONG_THREAD: c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD",
        c"the capture was begun by another thread";
    999 UNKNOWN: c"CUDA_ERROR_UNKNOWN", c"unknown error";
}
