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
pub(super) const ILLEGAL_STATE: Code = 401;
pub(super) const NOT_FOUND: Code = 500;
pub(super) const NOT_READY: Code = 600;
pub(super) const ILLEGAL_ADDRESS: Code = 700;
pub(super) const CONTEXT_IS_DESTROYED: Code = 709;
pub(super) const NOT_PERMITTED: Code = 800;
pub(super) const NOT_SUPPORTED: Code = 801;
pub(super) const CAPTURE_UNSUPPORTED: Code = 900;
pub(super) const CAPTURE_INVALIDATED: Code = 901;
pub(super) const CAPTURE_MERGE: Code = 902;
pub(super) const CAPTURE_UNMATCHED: Code = 903;
pub(super) const CAPTURE_UNJOINED: Code = 904;
pub(super) const CAPTURE_ISOLATION: Code = 905;
pub(super) const CAPTURE_IMPLICIT: Code = 906;
pub(super) const CAPTURED_EVENT: Code = 907;
pub(super) const CAPTURE_WRONG_THREAD: Code = 908;

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
        ILLEGAL_STATE => (c"CUDA_ERROR_ILLEGAL_STATE", c"not in a state for this call"),
        NOT_FOUND => (c"CUDA_ERROR_NOT_FOUND", c"no such symbol"),
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
        CAPTURE_MERGE => (c"CUDA_ERROR_STREAM_CAPTURE_MERGE", c"two captures would become one"),
        CAPTURE_UNMATCHED => {
            (c"CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", c"the capture was begun on another stream")
        }
        CAPTURE_UNJOINED => (
            c"CUDA_ERROR_STREAM_CAPTURE_UNJOINED",
            c"a stream of the capture was not joined to its first one",
        ),
        CAPTURE_ISOLATION => (
            c"CUDA_ERROR_STREAM_CAPTURE_ISOLATION",
            c"captured work would depend on work outside the capture",
        ),
        CAPTURE_IMPLICIT => {
            (c"CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", c"the legacy default stream would depend on a capture")
        }
        CAPTURED_EVENT => (c"CUDA_ERROR_CAPTURED_EVENT", c"the event was last recorded in a captured stream"),
        CAPTURE_WRONG_THREAD => {
            (c"CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", c"the capture was begun by another thread")
        }
        999 => (c"CUDA_ERROR_UNKNOWN", c"unknown error"),
        _ => return None,
    })
}
