//! What can go wrong between a file and a batch.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Any error of a data set, a transform or a closure. The loader passes it on as a source.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The batch of an error. Displayed as `train: epoch 0, step 17`, or `round 3` for a generator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// The name of the loader, if it was given one.
    pub loader: Option<Arc<str>>,
    /// The epoch, or the round of a generator.
    pub epoch: u64,
    /// The step within the epoch; `None` for a generator, whose rounds have no steps.
    pub step: Option<u64>,
}

/// What a thread of a loader is reading; see [`Epochs::reading`](crate::loader::Epochs::reading).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reading {
    /// The batch.
    pub at: At,
    /// For how long it has been reading it.
    pub time: Duration,
    /// The first of the records that it has asked the data set for; `None` before it did, and for a generator.
    pub record: Option<u64>,
    /// The file of that record and its offset there in bytes, if the data set
    /// [knows](crate::Dataset::locator).
    pub file: Option<(PathBuf, u64)>,
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: loading for {:.3} s", self.at, self.time.as_secs_f64())?;
        if let Some(record) = self.record {
            write!(f, ", from record {record} on")?;
        }
        if let Some((path, offset)) = &self.file {
            write!(f, ", {} at byte {offset}", path.display())?;
        }
        Ok(())
    }
}

/// Why a loader could not be built, or an epoch could not continue.
///
/// An iterator of batches yields at most one error, after every batch that was loaded before it, and then ends.
///
/// Printed it is one line with everything that is known, whether by `{}`, by `{:?}` or by `main`: `train: epoch 0, step
/// 17: the batch could not be read: "tokens.bin": truncated while open, byte 1536 is missing: ...`. So the errors that
/// it was made of are no [source](std::error::Error::source): reporters would print them twice. The variants have them.
#[non_exhaustive]
pub enum Error {
    /// An option of the builder has a value that cannot work.
    Option {
        /// The builder's method.
        option: &'static str,
        /// The values it takes.
        wanted: String,
        /// The value it was given.
        found: String,
    },
    /// Files could not be opened in the way that [`read_mode`](crate::loader::LoaderBuilder::read_mode) asks for.
    Open(twinbuf_mmap::Error),
    /// The data set could not read a batch, or a generator's closure could not make a round. The source has the
    /// details: a [`mmap::Error`](twinbuf_mmap::Error) has the path and the offset.
    Load {
        /// The batch.
        at: At,
        /// The data set's or the closure's own error.
        source: BoxError,
    },
    /// The data set read fewer or more bytes than the batch has, and returned `Ok`.
    Length {
        /// The batch.
        at: At,
        /// The bytes of the batch, or with a transform of the part of it that was read.
        wanted: usize,
        /// The bytes that the data set claims to have read.
        found: usize,
    },
    /// The data set, the transform or a generator's closure panicked.
    Panicked {
        /// The batch.
        at: At,
        /// What panicked: `data set`, `transform` or `closure`.
        who: &'static str,
        /// The panic's message.
        message: String,
    },
    /// The transform cannot take such records, or one of them is bad.
    Transform {
        /// The batch; `None` when the loader is built.
        at: Option<At>,
        /// The transform's own error.
        source: BoxError,
    },
    /// A generator's hook failed before its round was started.
    Hook {
        /// The round.
        at: At,
        /// The hook's own error.
        source: BoxError,
    },
    /// The device's slots could not be allocated, or the device failed while no batch was waited for.
    Device(
        /// The error of the crate `twinbuf-cuda`.
        BoxError,
    ),
    /// The batch could not be copied to the device. It is the last error of this loader: build another.
    Upload {
        /// The batch.
        at: At,
        /// The error of the crate `twinbuf-cuda`.
        source: BoxError,
    },
    /// A batch has another field than was asked for.
    Field {
        /// The batch.
        at: At,
        /// The field, counted from 0.
        field: usize,
        /// What the batch has.
        wanted: String,
        /// What was asked for.
        found: String,
    },
    /// A group of tensors has no such tensor, or one of another type than was asked for.
    Tensor {
        /// The group: pass and step.
        at: At,
        /// The name that was asked for.
        name: String,
        /// What the group has: names of its tensors, or the tensor's type and shape.
        wanted: String,
        /// What was asked for, or how many tensors have this name.
        found: String,
    },
    /// A batch is not a whole number of values of the requested type.
    Cast {
        /// The batch.
        at: At,
        /// The type.
        wanted: &'static str,
        /// The bytes of the batch.
        found: usize,
    },
    /// The slots do not fit the memory limit.
    Memory {
        /// What the memory is for.
        sum: String,
        /// Bytes needed.
        wanted: u64,
        /// Bytes of the limit.
        limit: u64,
        /// Bytes of it that are taken: by other loaders, and by batches that are kept.
        taken: u64,
    },
    /// A checkpoint belongs to another plan or another data set.
    Checkpoint {
        /// The field that differs, for example `seed`.
        field: &'static str,
        /// The loader's own value.
        wanted: String,
        /// The checkpoint's.
        found: String,
    },
    /// A checkpoint could not be saved or loaded.
    CheckpointFile {
        /// The file.
        path: PathBuf,
        /// The system's error, or what is wrong with the text.
        source: BoxError,
    },
    /// The data set could not compute its fingerprint.
    Fingerprint(BoxError),
    /// The loader is used in a process that was forked from the one it was built in. Its thread stayed there.
    Forked {
        /// The batch.
        at: At,
    },
    /// The next slot still holds a batch that the caller has not dropped in time.
    SlotHeld {
        /// The batch that has no slot.
        at: At,
        /// The option that sets the number of slots: `host_depth` or `device_depth`.
        option: &'static str,
        /// The number of slots.
        slots: usize,
    },
    /// A load did not end within the time given to [`Loader::close_timeout`](crate::Loader::close_timeout). Its thread is
    /// left behind: it ends when the load does, and keeps the memory that it writes to.
    Timeout {
        /// The time given.
        waited: Duration,
        /// What it is reading; `None` if it has ended just now.
        reading: Option<Reading>,
    },
    /// The loading thread is gone. It catches panics of data sets, transforms and closures, so this is a bug in this
    /// crate, or a panic of a waker or of a subscriber of `tracing`.
    ThreadGone {
        /// The batch.
        at: At,
    },
    /// An environment variable has a value that its switch does not take; see
    /// [`LoaderBuilder::from_env`](crate::loader::LoaderBuilder::from_env).
    Switch {
        /// The variable.
        name: String,
        /// The values it takes.
        wanted: String,
        /// Its value; it may not be UTF-8.
        found: OsString,
    },
    /// An environment variable begins with `TWINBUF_` but is not a switch.
    UnknownSwitch {
        /// The variable.
        name: String,
        /// The switch with the most similar name, if there is one.
        meant: Option<&'static str>,
    },
    /// The loading thread could not be started.
    Spawn(io::Error),
    /// The trace could not be written. The batches are not affected.
    Trace {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn trace((path, source): (PathBuf, io::Error)) -> Self {
        Self::Trace { path, source }
    }

    /// The error's own line.
    fn line(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Option { option, wanted, found } => {
                write!(f, "option `{option}`: wanted {wanted}, found {found}")
            }
            Self::Load { at, .. } if at.step.is_none() => write!(f, "{at}: the closure failed"),
            Self::Load { at, .. } => write!(f, "{at}: the batch could not be read"),
            Self::Length { at, wanted, found } => {
                write!(f, "{at}: wanted a batch of {wanted} bytes, found {found} bytes read")
            }
            Self::Panicked { at, who, message } => write!(f, "{at}: the {who} panicked: {message}"),
            Self::Transform { at: Some(at), .. } => write!(f, "{at}: the records could not be transformed"),
            Self::Transform { at: None, .. } => {
                f.write_str("option `transform`: the data set's records cannot be transformed")
            }
            Self::Hook { at, .. } => write!(f, "{at}: the hook failed"),
            Self::Device(_) => f.write_str("the device failed"),
            Self::Upload { at, .. } => write!(f, "{at}: the batch could not be copied to the device"),
            Self::Field { at, field, wanted, found } => {
                write!(f, "{at}: field {field}: wanted {wanted}, found {found}")
            }
            Self::Tensor { at, name, wanted, found } => {
                write!(f, "{at}: tensor {name:?}: wanted {wanted}, found {found}")
            }
            Self::Cast { at, wanted, found } => {
                write!(f, "{at}: wanted a whole number of {wanted}, found {found} bytes")
            }
            Self::Memory { sum, wanted, limit, taken } => {
                write!(f, "option `memory_limit`: wanted at least {wanted} bytes ({sum}), found {limit}")?;
                match taken {
                    0 => Ok(()),
                    _ => write!(f, ", of which {taken} are taken"),
                }
            }
            Self::Checkpoint { field, wanted, found } => {
                write!(f, "the checkpoint has another {field}: wanted {wanted}, found {found}")
            }
            Self::CheckpointFile { path, .. } => {
                write!(f, "{}: the checkpoint could not be saved or loaded", path.display())
            }
            Self::Open(_) => f.write_str("the files cannot be read as `read_mode` asks for"),
            Self::Fingerprint(_) => f.write_str("the data set's fingerprint could not be computed"),
            Self::Forked { at } => write!(
                f,
                "{at}: the loading thread stayed in the process that this one was forked from: build after the fork"
            ),
            Self::SlotHeld { at, option, slots } => {
                write!(
                    f,
                    "{at}: wanted the next of {slots} slots, found it held by a batch received earlier: "
                )?;
                match at.step {
                    Some(_) => write!(f, "drop that batch, or raise `{option}`"),
                    None => f.write_str("drop that round"),
                }
            }
            Self::Timeout { waited, reading: Some(reading) } => {
                write!(f, "{reading}: wanted an end within {:.3} s", waited.as_secs_f64())
            }
            Self::Timeout { waited, reading: None } => {
                write!(f, "wanted the end of a load within {:.3} s", waited.as_secs_f64())
            }
            Self::ThreadGone { at } => write!(f, "{at}: the loading thread is gone"),
            Self::Switch { name, wanted, found } => {
                write!(f, "environment: {name}: wanted {wanted}, found {found:?}")
            }
            Self::UnknownSwitch { name, meant: Some(meant) } => {
                write!(f, "environment: there is no switch {name}; did you mean {meant}?")
            }
            Self::UnknownSwitch { name, meant: None } => {
                write!(f, "environment: there is no switch {name}")
            }
            Self::Spawn(_) => f.write_str("the loading thread could not be started"),
            Self::Trace { path, .. } => write!(f, "{}: the trace could not be written", path.display()),
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.line(f)?;
        let mut cause: Option<&(dyn std::error::Error + 'static)> = match self {
            Self::Load { source, .. }
            | Self::Upload { source, .. }
            | Self::Transform { source, .. }
            | Self::Hook { source, .. }
            | Self::CheckpointFile { source, .. }
            | Self::Fingerprint(source)
            | Self::Device(source) => Some(&**source),
            Self::Open(source) => Some(source),
            Self::Spawn(source) | Self::Trace { source, .. } => Some(source),
            _ => None,
        };
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

/// The message. `main` prints it for an error that it returns.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Error {}
