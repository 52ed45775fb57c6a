//! The errors of this crate.

use std::fmt::Display;
use std::io;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// The error that ended an uploader or a stager's scope, shared by its threads. Set once, before anyone sees the end.
pub(crate) type Fate = OnceLock<Error>;

/// Locks a mutex that a panic of the caller's code cannot leave in an invalid state.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls a function when it is dropped, also by a panic.
pub(crate) struct OnDrop<F: FnMut()>(pub(crate) F);

impl<F: FnMut()> Drop for OnDrop<F> {
    fn drop(&mut self) {
        (self.0)();
    }
}

/// Makes an error the one that ended the uploader or the scope, if it is the first.
pub(crate) fn ending<R>(fate: &Fate, result: Result<R, Error>) -> Result<R, Error> {
    result.inspect_err(|error| drop(fate.set(error.clone())))
}

/// Why a call finds the other side gone.
pub(crate) fn ended(fate: &Fate) -> Error {
    fate.get().cloned().unwrap_or(Error::Closed)
}

/// The error type of this crate.
///
/// A driver error in a copy ends the uploader. The training side still receives the batches before it, and then this
/// error from every receive call. Later acquire and commit calls return it too.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No CUDA driver was found: none of the library names could be loaded.
    #[error(
        "no CUDA driver found; tried {}: install the NVIDIA driver, or make it visible to this container",
        names(tried)
    )]
    NoDriver {
        /// Each library name, and the system's error for it.
        tried: Vec<(String, String)>,
    },
    /// A library with the name of the driver was loaded, but it lacks a driver function.
    #[error("{library}: wanted a CUDA driver, found a library without `{function}`")]
    NotADriver {
        /// The name of the loaded library.
        library: String,
        /// The name of the missing function.
        function: &'static str,
    },
    /// The CUDA toolkit's stub library was loaded instead of a driver. The stub is only for linking.
    #[error(
        "{library}: wanted a CUDA driver, found the toolkit's stub, which is for linking only: remove its folder from the \
         library path, and install the NVIDIA driver"
    )]
    StubDriver {
        /// The name of the loaded library.
        library: String,
    },
    /// The driver was loaded, but it has no usable device.
    #[error("{library}: the CUDA driver found no device: check `nvidia-smi` and CUDA_VISIBLE_DEVICES")]
    NoDevice {
        /// The name of the loaded library.
        library: String,
    },
    /// A driver call failed. CUDA may also report an error of earlier asynchronous work in this way.
    #[error("{call}: {name} ({code})")]
    Driver {
        /// The name of the driver function, or what is known of it if cudarc had kept the error.
        call: &'static str,
        /// The `CUresult` it returned.
        code: u32,
        /// The driver's name for the code.
        name: String,
    },
    /// An argument or an option has an invalid value.
    #[error("option `{option}`: wanted {wanted}, found {found}")]
    Option {
        /// The name of the argument, of the type parameter, or of the builder's method.
        option: &'static str,
        /// The valid values.
        wanted: String,
        /// The value that was passed.
        found: String,
    },
    /// A function of the caller that fills a [`Stager`](crate::Stager)'s slot failed.
    #[error("the bytes of a copy could not be read or written: {message}")]
    Fill {
        /// The kind of its error.
        kind: io::ErrorKind,
        /// Its error.
        message: String,
    },
    /// The system could not start a thread.
    #[error("a thread could not be started: {kind}")]
    Spawn {
        /// The kind of the system's error.
        kind: io::ErrorKind,
    },
    /// The stream or the memory belongs to a different context than the uploader or the stager.
    #[error("wanted a stream and memory of the uploader's context, found those of another context")]
    OtherContext,
    /// The stream is the per-thread default stream. On each thread, its handle refers to a different stream. A lease
    /// may move between threads, and its release could not be ordered. Use a stream from `ctx.new_stream()` or
    /// `ctx.default_stream()`, or copy the batch with [`Lease::into_owned`](crate::Lease::into_owned), because
    /// `into_owned` accepts this stream.
    #[error(
        "wanted a stream that is the same on every thread, found the per-thread default stream: copy the batch with \
         `into_owned`, or use a stream from `new_stream` or `default_stream`"
    )]
    PerThreadStream,
    /// The stream is being captured into a graph, or is the default stream while a blocking stream is. Captured work
    /// cannot wait for a copy, and the next copy cannot wait for captured work. Use the batch on the stream that
    /// launches the graph.
    #[error(
        "wanted a stream that is not being captured into a graph: use the batch on the stream that launches it"
    )]
    Captured,
    /// A lease holds the next device slot: the lease exists, was leaked, or was dropped while a stream that used it
    /// was being captured. From an acquire call also if the batch in that slot was not received yet (`overlap(false)`).
    #[error(
        "wanted the next of {device_depth} device slots, found it in use: receive its batch, drop its lease, end the capture of \
         the streams that used it, or raise `device_depth`"
    )]
    SlotHeld {
        /// The number of device slots.
        device_depth: usize,
    },
    /// The next host slot is in use: it was committed, and its copy was not seen to end, or a
    /// [`ReservedSlot`](crate::ReservedSlot) holds it.
    #[error("the next host slot is still being filled or copied")]
    Full,
    /// The next batch is not ready. With `overlap(false)`, `recv` returns this error too: the thread that receives may
    /// be the one that commits.
    #[error("the next batch is not ready: it was not committed, or its copy was not issued yet")]
    Empty,
    /// A [`ReservedSlot`](crate::ReservedSlot) was dropped without a commit: its batch will not come. The next receive
    /// call continues after it.
    #[error("a reserved host slot was dropped without a commit: its batch will not come")]
    Cancelled,
    /// The [`HostSlots`](crate::HostSlots) were dropped without `finish`, or the caller's code panicked while batches
    /// were copied ([`on_copied`](crate::Uploader::on_copied), a waker). The data may be incomplete.
    #[error(
        "the host slots were dropped without `finish`, or `on_copied` panicked: the data may be incomplete"
    )]
    Abandoned,
    /// The copies have ended, so nothing receives what is committed: the [`DeviceBatches`](crate::DeviceBatches) were
    /// dropped; or the [`HostSlots`](crate::HostSlots) were dropped without `finish`, before a reserved slot was
    /// committed; or the caller's code panicked, as for [`Abandoned`](Error::Abandoned) or in a fill of a
    /// [`Stager`](crate::Stager).
    #[error("one side of the uploader was dropped: no one receives what is committed")]
    Closed,
}

/// An argument or an option has an invalid value.
pub(crate) fn wrong(option: &'static str, wanted: String, found: &dyn Display) -> Error {
    Error::Option { option, wanted, found: found.to_string() }
}

/// Formats each library name with the system's error for it.
fn names(tried: &[(String, String)]) -> String {
    tried.iter().map(|(name, error)| format!("{name} ({error})")).collect::<Vec<_>>().join(", ")
}
