//! What can go wrong between a file and a batch.

use std::fmt;
use std::io;
use std::path::PathBuf;

use crate::generate::RoundError;
use crate::switches::SwitchError;

/// Any error of a data set: the loader only passes it on.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// Why a loader could not be built, or an epoch could not go on.
///
/// An epoch yields at most one error, after every batch that was read before it, and then ends.
#[derive(Debug)]
#[non_exhaustive]
pub enum Error {
    /// An option of the builder has a value that cannot work.
    Option {
        /// The builder's method.
        option: &'static str,
        /// What values it takes.
        wanted: String,
        /// The value it was given.
        found: String,
    },
    /// The data set could not read a batch. The source says where: a
    /// [`twinbuf_mmap::Error`] has the path and the offset.
    Read {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The data set's own error.
        source: BoxError,
    },
    /// The data set read fewer or more bytes than the batch has, and called it success.
    Length {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The bytes of the batch, or with a transform of the part of it that was read.
        wanted: usize,
        /// The bytes that the data set said it read.
        found: usize,
    },
    /// The data set panicked while it read a batch, or the transform while it was applied.
    Panicked {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// Which of the two: `data set` or `transform`.
        who: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The transform cannot take such records, or something is wrong with one.
    Transform {
        /// The epoch and the step of the batch; `None` when the loader is built.
        place: Option<(u64, u64)>,
        /// The transform's own error.
        source: BoxError,
    },
    /// The device's slots could not be made, or the device failed when nobody waited for a batch any more.
    Device(
        /// The error of the crate `twinbuf-cuda`.
        BoxError,
    ),
    /// The batch could not be brought to the device. It is the last error of this loader: build another.
    Upload {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The error of the crate `twinbuf-cuda`.
        source: BoxError,
    },
    /// A batch is no whole number of the numbers that were asked for.
    Numbers {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The type of the numbers.
        wanted: &'static str,
        /// The bytes of the batch.
        found: usize,
    },
    /// The slots do not fit what is left of the memory limit.
    Memory {
        /// What they are, spelled out.
        sum: String,
        /// Their bytes.
        wanted: u64,
        /// Bytes of the limit.
        limit: u64,
        /// Bytes of it that other loaders have.
        used: u64,
    },
    /// A saved state is not of this loader's plan or data set.
    Restore {
        /// What differs: `plan`, `data set` or `step`.
        what: &'static str,
        /// The loader's own.
        wanted: String,
        /// The state's.
        found: String,
    },
    /// The data set could not tell its fingerprint.
    Fingerprint(BoxError),
    /// The loader is used in a process that was forked from the one it was built in, where its thread is not.
    Forked {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
    },
    /// The slot whose turn it is, is held by a batch that the caller still has: the next one can go nowhere.
    AllHeld {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
        /// The option that says how many slots there are: `host_depth`, or `device_depth`.
        option: &'static str,
        /// How many there are.
        slots: usize,
    },
    /// Another epoch was started from the same loader while this one was still being iterated.
    Superseded {
        /// The epoch that cannot go on.
        epoch: u64,
    },
    /// A round that code was to make; see [`Loader::generate`](crate::Loader::generate).
    Round(RoundError),
    /// A variable of the environment; see [`LoaderBuilder::from_env`](crate::LoaderBuilder::from_env).
    Switch(SwitchError),
    /// The reading thread is gone. It catches the panics of data sets and transforms, so this is a bug in this crate,
    /// or a panic of a waker or of a subscriber of `tracing`.
    ReaderGone {
        /// The epoch of the batch.
        epoch: u64,
        /// The step of the batch within the epoch.
        step: u64,
    },
    /// The reading thread could not be started.
    Spawn(io::Error),
    /// The trace could not be written. The training was not disturbed by it.
    Trace {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option { option, wanted, found } => {
                write!(f, "option `{option}`: wanted {wanted}, found {found}")
            }
            Self::Read { epoch, step, source } => write!(f, "epoch {epoch}, step {step}: {source}"),
            Self::Length { epoch, step, wanted, found } => write!(
                f,
                "epoch {epoch}, step {step}: wanted a batch of {wanted} bytes, found {found} bytes read"
            ),
            Self::Panicked { epoch, step, who, message } => {
                write!(f, "epoch {epoch}, step {step}: the {who} panicked: {message}")
            }
            Self::Transform { place: Some((epoch, step)), source } => {
                write!(f, "epoch {epoch}, step {step}: the transform: {source}")
            }
            Self::Transform { place: None, source } => write!(f, "option `transform`: {source}"),
            Self::Device(source) => write!(f, "the device: {source}"),
            Self::Upload { epoch, step, source } => {
                write!(f, "epoch {epoch}, step {step}: the upload: {source}")
            }
            Self::Numbers { epoch, step, wanted, found } => write!(
                f,
                "epoch {epoch}, step {step}: wanted the batch as whole numbers of type {wanted}, found {found} bytes"
            ),
            Self::Memory { sum, wanted, limit, used } => write!(
                f,
                "option `memory_limit`: wanted {wanted} bytes ({sum}), found {limit} bytes in all, {used} of them \
                 taken by other loaders"
            ),
            Self::Restore { what, wanted, found } => {
                write!(f, "the state is of another {what}: wanted {wanted}, found {found}")
            }
            Self::Fingerprint(source) => write!(f, "the data set's fingerprint: {source}"),
            Self::Forked { epoch, step } => write!(
                f,
                "epoch {epoch}, step {step}: the loader's thread stayed in the process this one was forked from: \
                 build the loader after the fork"
            ),
            Self::AllHeld { epoch, step, option, slots } => write!(
                f,
                "epoch {epoch}, step {step}: wanted the next of {slots} slots, found it held by a batch that was received \
                 earlier: drop that, or raise `{option}`"
            ),
            Self::Superseded { epoch } => {
                write!(f, "epoch {epoch}: another epoch was started from the same loader")
            }
            Self::Round(source) => source.fmt(f),
            Self::Switch(source) => source.fmt(f),
            Self::ReaderGone { epoch, step } => {
                write!(f, "epoch {epoch}, step {step}: the reading thread is gone")
            }
            Self::Spawn(source) => write!(f, "the loader's thread could not be started: {source}"),
            Self::Trace { path, source } => {
                write!(f, "{}: the trace could not be written: {source}", path.display())
            }
        }
    }
}

impl From<RoundError> for Error {
    fn from(source: RoundError) -> Self {
        Self::Round(source)
    }
}

impl From<SwitchError> for Error {
    fn from(source: SwitchError) -> Self {
        Self::Switch(source)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Read { source, .. }
            | Self::Upload { source, .. }
            | Self::Transform { source, .. }
            | Self::Fingerprint(source)
            | Self::Device(source) => Some(&**source),
            Self::Spawn(source) | Self::Trace { source, .. } => Some(source),
            Self::Round(source) => source.source(),
            _ => None,
        }
    }
}
