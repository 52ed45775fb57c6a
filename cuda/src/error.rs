//! What can go wrong between a host slot and a lease.

use std::fmt;
use std::io;

use cudarc::driver::DriverError;

use crate::driver::Driver;

/// Why there is no driver, no uploader, no slot or no batch.
///
/// An error of the driver ends an uploader: after every batch that was copied before, both sides get that same
/// error, again and again.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// No CUDA driver is installed: none of these libraries could be loaded.
    NoDriver {
        /// Each name tried, with what the system said.
        tried: Vec<(String, String)>,
    },
    /// The library that was found is no CUDA driver: it lacks a function.
    NotADriver {
        /// The name it was loaded by.
        library: String,
        /// The function it lacks.
        function: &'static str,
    },
    /// The toolkit's stub was found in place of the driver. It is for linking only.
    StubDriver {
        /// The name it was loaded by.
        library: String,
    },
    /// The driver works, and finds no device that it can use.
    NoDevice {
        /// The name the driver was loaded by.
        library: String,
    },
    /// A call of the driver failed; CUDA also reports errors of earlier work this way.
    Driver {
        /// The function.
        call: &'static str,
        /// What it returned, a `CUresult`.
        code: u32,
        /// The driver's name for that.
        name: String,
    },
    /// An argument or option has a value that cannot work.
    Option {
        /// The argument or the builder's method.
        option: &'static str,
        /// What values it takes.
        wanted: String,
        /// The value it was given.
        found: String,
    },
    /// The copy thread could not be started.
    Spawn {
        /// What the system said.
        kind: io::ErrorKind,
    },
    /// The stream belongs to another context than the uploader.
    OtherContext,
    /// The stream is the per-thread default stream, which is another stream on another thread: use it through
    /// [`Lease::on_this_thread`](crate::Lease::on_this_thread).
    PerThreadStream,
    /// The device slot whose turn it is, is held by a lease that is still there, or was leaked.
    AllHeld {
        /// The number of device slots.
        device_depth: usize,
    },
    /// The next batch is not there yet. With `overlap(false)`, where only the caller commits, `recv` says so too:
    /// waiting would never end.
    Empty,
    /// The [`HostSlots`](crate::HostSlots) were dropped without `finish`, or
    /// [`on_copied`](crate::Uploader::on_copied) panicked: what was received may not be all.
    Abandoned,
    /// The [`DeviceBatches`](crate::DeviceBatches) are gone: nobody will receive what is filled now.
    Closed,
}

impl Error {
    pub(crate) fn driver(call: &'static str, error: DriverError) -> Self {
        let code = error.0 as u32;
        // It returned an error, so it is loaded. Not the enumeration's own name: a newer driver's code may be none.
        let name = Driver::load().map_or_else(|_| format!("{:?}", error.0), |driver| driver.name(code));
        Self::Driver { call, code, name }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoDriver { tried } => {
                f.write_str("no CUDA driver found; tried ")?;
                for (i, (name, error)) in tried.iter().enumerate() {
                    let comma = if i > 0 { ", " } else { "" };
                    write!(f, "{comma}{name} ({error})")?;
                }
                f.write_str(": install the NVIDIA driver, or make it visible to this container")
            }
            Self::NotADriver { library, function } => {
                write!(f, "{library}: wanted a CUDA driver, found a library without `{function}`")
            }
            Self::StubDriver { library } => write!(
                f,
                "{library}: wanted a CUDA driver, found the toolkit's stub, which is for linking only: take its folder \
                 out of the library path, and install the NVIDIA driver"
            ),
            Self::NoDevice { library } => write!(
                f,
                "{library}: the CUDA driver found no device: look at `nvidia-smi` and CUDA_VISIBLE_DEVICES"
            ),
            Self::Driver { call, code, name } => write!(f, "{call}: {name} ({code})"),
            Self::Option { option, wanted, found } => {
                write!(f, "option `{option}`: wanted {wanted}, found {found}")
            }
            Self::Spawn { kind } => write!(f, "the copy thread could not be started: {kind}"),
            Self::OtherContext => {
                f.write_str("wanted a stream of the uploader's context, found one of another")
            }
            Self::PerThreadStream => f.write_str(
                "wanted a stream that is the same on every thread, found the per-thread default stream: use \
                 `on_this_thread` first",
            ),
            Self::AllHeld { device_depth } => write!(
                f,
                "wanted the next of {device_depth} device slots, found it held by a lease: drop that, or raise \
                 `device_depth`"
            ),
            Self::Empty => f.write_str(
                "the next batch is not there: nothing was committed, or its copy was not issued yet",
            ),
            Self::Abandoned => {
                f.write_str("the host slots were dropped without `finish`, or `on_copied` panicked: the data may be incomplete")
            }
            Self::Closed => {
                f.write_str("the device batches are gone: nobody will receive what is filled now")
            }
        }
    }
}

impl std::error::Error for Error {}
