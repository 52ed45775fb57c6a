//! The `CUresult`s that this driver returns, and the names of those that tests inject.
//! Numbers: the CUDA driver API's `CUresult`.

use std::ffi::CStr;

/// A `CUresult`.
pub(super) type Code = u32;

pub(super) const SUCCESS: Code = 0;
pub(super) const INVALID_VALUE: Code = 1;
pub(super) const OUT_OF_MEMORY: Code = 2;
pub(super) const NOT_INITIALIZED: Code = 3;
pub(super) const STUB_LIBRARY: Code = 34;
pub(super) const NO_DEVICE: Code = 100;
pub(super) const INVALID_DEVICE: Code = 101;
pub(super) const INVALID_CONTEXT: Code = 201;
pub(super) const INVALID_HANDLE: Code = 400;
pub(super) const NOT_READY: Code = 600;
pub(super) const ILLEGAL_ADDRESS: Code = 700;
pub(super) const CONTEXT_IS_DESTROYED: Code = 709;
pub(super) const NOT_PERMITTED: Code = 800;
pub(super) const NOT_SUPPORTED: Code = 801;
pub(super) const CAPTURE_UNSUPPORTED: Code = 900;
pub(super) const CAPTURE_INVALIDATED: Code = 901;

/// The code's name and description; `None` for a code that is not listed here.
pub(super) fn describe(code: Code) -> Option<(&'static CStr, &'static CStr)> {
    Some(match code {
        SUCCESS => (c"CUDA_SUCCESS", c"no error"),
        INVALID_VALUE => (c"CUDA_ERROR_INVALID_VALUE", c"invalid argument"),
        OUT_OF_MEMORY => (c"CUDA_ERROR_OUT_OF_MEMORY", c"out of memory"),
        NOT_INITIALIZED => (c"CUDA_ERROR_NOT_INITIALIZED", c"cuInit was not called"),
        4 => (c"CUDA_ERROR_DEINITIALIZED", c"driver shutting down"),
        STUB_LIBRARY => (c"CUDA_ERROR_STUB_LIBRARY", c"the toolkit's stub is loaded in place of a driver"),
        46 => (c"CUDA_ERROR_DEVICE_UNAVAILABLE", c"device busy or unavailable"),
        NO_DEVICE => (c"CUDA_ERROR_NO_DEVICE", c"no device found"),
        INVALID_DEVICE => (c"CUDA_ERROR_INVALID_DEVICE", c"invalid device ordinal"),
        INVALID_CONTEXT => (c"CUDA_ERROR_INVALID_CONTEXT", c"invalid context, or none current"),
        214 => (c"CUDA_ERROR_ECC_UNCORRECTABLE", c"uncorrectable ECC error"),
        INVALID_HANDLE => (c"CUDA_ERROR_INVALID_HANDLE", c"invalid stream or event"),
        NOT_READY => (c"CUDA_ERROR_NOT_READY", c"not finished"),
        ILLEGAL_ADDRESS => (c"CUDA_ERROR_ILLEGAL_ADDRESS", c"illegal memory access by the device"),
        CONTEXT_IS_DESTROYED => (c"CUDA_ERROR_CONTEXT_IS_DESTROYED", c"context is destroyed"),
        719 => (c"CUDA_ERROR_LAUNCH_FAILED", c"kernel failed"),
        NOT_PERMITTED => (c"CUDA_ERROR_NOT_PERMITTED", c"not permitted in a host function"),
        NOT_SUPPORTED => (c"CUDA_ERROR_NOT_SUPPORTED", c"not supported"),
        CAPTURE_UNSUPPORTED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", c"not permitted while a stream is captured")
        }
        CAPTURE_INVALIDATED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", c"a call that is not permitted broke the capture")
        }
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return None,
    })
}
