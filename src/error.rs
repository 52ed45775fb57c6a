//! The errors of loaders, generators, streams, pipes and writers.

use std::ffi::OsString;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// Any error, for example of a data set, a transform or a closure.
pub type BoxError = Box<dyn std::error::Error + Send + Sync + 'static>;

/// The batch that an error or a fill in progress belongs to. Displayed as `train: epoch 0, step 17`, or as `round 3`
/// for a generator without a name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// The name of the loader. `None` if the loader has no name.
    pub loader: Option<Arc<str>>,
    /// The epoch. For a generator, the round. For a stream, the pass.
    pub epoch: u64,
    /// The step within the epoch. For a stream, the position of the group in the pass. `None` for rounds, which have no
    /// steps: those of a generator, or of a pipe with [`rounds`](crate::pipe::Builder::rounds).
    pub step: Option<u64>,
}

/// The fill in progress of a worker; see [`Epochs::reading`](crate::loader::Epochs::reading).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Reading {
    /// The batch that the worker is loading.
    pub at: At,
    /// The time since the worker began to load the batch, transforms included.
    pub time: Duration,
    /// The first record of the last request to the data set. For a pipe, the offset that the source last passed to
    /// [`Filling::reads`](crate::pipe::Filling::reads). `None` before the first request of the batch, and for
    /// generators and streams.
    pub record: Option<u64>,
    /// The file of the record, and the record's offset in the file in bytes. `None` without a record, for a pipe, or if
    /// the data set has no [`locator`](crate::Dataset::locator) or that finds no file.
    pub file: Option<(PathBuf, u64)>,
}

/// Why a [`Writer`](crate::write::Writer) stopped.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Failure {
    /// The file under its final name, or the folder of the shards. Never the temporary file.
    pub path: PathBuf,
    /// What failed, for example `write` or `fsync`.
    pub call: &'static str,
    /// The offset in the file, in bytes. For `fsync`: the length of the file. For other calls on the whole file: 0.
    pub offset: u64,
    /// The system's error, or an error of this crate, such as `another writer has not finished`.
    pub source: Arc<io::Error>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} failed at byte {}", self.path.display(), self.call, self.offset)
    }
}

impl std::error::Error for Failure {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&*self.source)
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(loader) = &self.loader {
            write!(f, "{loader}: ")?;
        }
        match self.step {
            Some(step) => write!(f, "epoch {}, step {step}", self.epoch),
            None => write!(f, "round {}", self.epoch),
        }
    }
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

/// The error type of this crate, for example why a loader could not be built, or why an epoch could not continue.
///
/// An iterator of batches returns at most one error, after every batch before the one that failed, and then ends.
///
/// `Display` prints the message without the underlying errors, because error reporters print each
/// [`source`](std::error::Error::source) separately: `train: epoch 0, step 17: the batch could not be read`. `Debug`
/// prints all of them: `train: epoch 0, step 17: the batch could not be read: "tokens.bin": truncated while
/// open, byte 1536 is missing: ...`. `main` uses `Debug` for a returned error.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option or argument is invalid or does not fit the data, or memory cannot be allocated.
    #[error("option `{option}`: wanted {wanted}, found {found}")]
    Option {
        /// The name of the builder's method, or of the argument.
        option: &'static str,
        /// The valid values.
        wanted: String,
        /// The value that was set, or what does not fit.
        found: String,
    },
    /// The files could not be opened as [`read_mode`](crate::loader::LoaderBuilder::read_mode) requires.
    #[error("the files cannot be read as `read_mode` asks for")]
    Open(#[source] twinbuf_mmap::Error),
    /// The data set could not read a batch, or a generator's closure or a source of a pipe failed. For files, the
    /// source is a [`mmap::Error`](twinbuf_mmap::Error): that of a failed read has path and offset. Also: a pipe or a
    /// [driven](crate::loader::LoaderBuilder::driven) loader was used wrongly; the source is then a text.
    #[error("{at}: {}", if at.step.is_none() { "the closure failed" } else { "the batch could not be read" })]
    Load {
        /// The batch or round that failed.
        at: At,
        /// The error that the data set, the closure or the source returned, or a text.
        source: BoxError,
    },
    /// [`Dataset::read`](crate::Dataset::read) returned `Ok` with a wrong number of bytes.
    #[error("{at}: wanted a batch of {wanted} bytes, found {found} bytes read")]
    Length {
        /// The batch that failed.
        at: At,
        /// The number of bytes requested: of one field, or of a part of it.
        wanted: usize,
        /// The number of bytes that the data set reported.
        found: usize,
    },
    /// Foreign code panicked, for example the data set, a transform or a generator's closure.
    #[error("{at}: the {who} panicked: {message}")]
    Panicked {
        /// The batch or round that failed. If a drop or a waker panicked: the next one, or epoch 0 and step 0 in an
        /// error of `close`.
        at: At,
        /// The part that panicked, for example `data set`, `transform` or `closure`.
        who: &'static str,
        /// The panic message, or a text that says that there is none.
        message: String,
    },
    /// A transform does not accept the records of the data set, or it failed on a batch.
    #[error(
        "{}",
        at.as_ref().map_or(
            "option `transform`: the data set's records cannot be transformed".into(),
            |at| format!("{at}: the records could not be transformed")
        )
    )]
    Transform {
        /// The batch that failed. `None` if the transform does not accept the records.
        at: Option<At>,
        /// The error that the transform returned, or why its result is refused.
        source: BoxError,
    },
    /// The hook of a generator ([`before`](crate::generate::GeneratorBuilder::before)) returned an error.
    #[error("{at}: the hook failed")]
    Hook {
        /// The round that was passed to the hook.
        at: At,
        /// The error that the hook returned.
        source: BoxError,
    },
    /// A call of the device failed, for example to allocate slots, and no call was waiting for a batch. Also: a tensor
    /// of a `Group<Cuda>` cannot be used on the given stream.
    #[error("the device failed")]
    Device(
        /// The error of the crate `twinbuf-cuda`.
        #[source]
        BoxError,
    ),
    /// The batch could not be copied to the device. The loader cannot continue: build a new one.
    #[error("{at}: the batch could not be copied to the device")]
    Upload {
        /// The batch that failed.
        at: At,
        /// The error of the crate `twinbuf-cuda`.
        source: BoxError,
    },
    /// The batch has no such field or another number of fields, the field has another type, its bytes are no whole
    /// number of values of the requested type or misaligned for it, or the data set did not return one length for each
    /// record.
    #[error("{at}: field {field}: wanted {wanted}, found {found}")]
    Field {
        /// The batch.
        at: At,
        /// The index of the field, from 0. If the number of fields differs: 0.
        field: usize,
        /// What the batch has or needs, or what the type needs.
        wanted: String,
        /// The field, the type or the number of fields that was requested, or the size or the number of lengths that
        /// was found.
        found: String,
    },
    /// The requested tensor does not exist in the group, its name is ambiguous, it has another type, or its bytes are
    /// no whole number of values of the requested type, or misaligned for it.
    #[error("{at}: tensor {name:?}: wanted {wanted}, found {found}")]
    Tensor {
        /// The group: pass and step.
        at: At,
        /// The requested name. If the tensor was found: its full name.
        name: String,
        /// The names of the group's tensors, at most 16, the type and shape of the tensor, or what the requested type
        /// needs.
        wanted: String,
        /// How many of the group's tensors match the requested name, as text, the requested type, or the size of the
        /// tensor.
        found: String,
    },
    /// The slots and buffers need more memory than the limit has left.
    #[error(
        "option `memory_limit`: wanted at least {wanted} bytes ({sum}), found {limit}{}",
        if *taken > 0 { format!(", of which {taken} are taken") } else { String::new() }
    )]
    Memory {
        /// The items that need the memory, as text.
        sum: String,
        /// The number of bytes needed.
        wanted: u64,
        /// The limit in bytes.
        limit: u64,
        /// The number of bytes that were in use already.
        taken: u64,
    },
    /// The checkpoint belongs to another plan or another data set, or its step is outside of the epoch.
    #[error("the checkpoint has another {field}: wanted {wanted}, found {found}")]
    Checkpoint {
        /// The name of the value that differs, for example `seed`.
        field: &'static str,
        /// The loader's value, or the valid ones.
        wanted: String,
        /// The checkpoint's value.
        found: String,
    },
    /// A checkpoint file could not be written, read or parsed.
    #[error("{}: the checkpoint could not be saved or loaded", path.display())]
    CheckpointFile {
        /// The checkpoint file.
        path: PathBuf,
        /// The system's error, the parser's error, or why the path is refused.
        source: BoxError,
    },
    /// [`Dataset::fingerprint`](crate::Dataset::fingerprint) returned an error.
    #[error("the data set's fingerprint could not be computed")]
    Fingerprint(#[source] BoxError),
    /// The loader was built with overlap before a `fork` and used in the child process. The loading thread exists only
    /// in the parent process.
    #[error(
        "{at}: the loading thread stayed in the process that this one was forked from: build after the fork"
    )]
    Forked {
        /// The next batch.
        at: At,
    },
    /// The next slot still holds an earlier batch that the caller did not drop within the
    /// [`held_timeout`](crate::loader::LoaderBuilder::held_timeout).
    #[error(
        "{at}: wanted the next of {slots} slots, found it held by what the caller received earlier: drop that{}",
        // Only a generator's errors have no step, and it has no option for the number of slots.
        if at.step.is_some() { format!(", or raise `{option}`") } else { String::new() }
    )]
    SlotHeld {
        /// The batch that needs the slot.
        at: At,
        /// The option that sets the number of slots: `depth` or `device_depth`. `depth` also for generators and pipes,
        /// whose slots the caller passed.
        option: &'static str,
        /// The number of slots.
        slots: usize,
    },
    /// A fill did not end within the timeout of a `close_timeout`, for example
    /// [`Loader::close_timeout`](crate::Loader::close_timeout). Its thread was detached, unless a driver fills: it ends
    /// when the fill returns, and until then keeps the memory that it writes to.
    #[error(
        "{} within {:.3} s",
        reading.as_ref().map_or("wanted the end of a load".into(), |reading| format!("{reading}: wanted an end")),
        waited.as_secs_f64()
    )]
    Timeout {
        /// The timeout.
        waited: Duration,
        /// The read in progress, if there still is one.
        reading: Option<Reading>,
    },
    /// No worker is left: the drivers have dropped theirs, or a bug in this crate ended the loading thread. On a device
    /// without overlap also: the caller called `next` before a driver filled the slot.
    #[error("{at}: the loading thread is gone")]
    ThreadGone {
        /// The next batch.
        at: At,
    },
    /// An environment variable has an invalid value; see
    /// [`LoaderBuilder::from_env`](crate::loader::LoaderBuilder::from_env).
    #[error("environment: {name}: wanted {wanted}, found {found:?}")]
    Switch {
        /// The name of the variable.
        name: String,
        /// The valid values.
        wanted: String,
        /// The value of the variable. It may not be valid UTF-8.
        found: OsString,
    },
    /// An environment variable starts with `TWINBUF_`, but no option has this variable; see
    /// [`LoaderBuilder::from_env`](crate::loader::LoaderBuilder::from_env).
    #[error("environment: there is no switch {name}")]
    UnknownSwitch {
        /// The name of the variable.
        name: String,
    },
    /// The system could not start a thread.
    #[error("a thread could not be started")]
    Spawn(#[source] io::Error),
    /// A [`Writer`](crate::write::Writer) could not write. Nothing more is written, and the name is as it was.
    #[error(transparent)]
    Write(Failure),
    /// The trace file could not be created or written. Delivered batches remain valid.
    #[error("{path:?}: the trace could not be written")]
    Trace {
        /// The trace file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    /// Returns the error of an option with an invalid value.
    pub(crate) fn option(option: &'static str, wanted: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Option { option, wanted: wanted.into(), found: found.into() }
    }
}

/// Prints the message and those of all underlying errors. `main` prints a returned error with it.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")?;
        let mut cause = std::error::Error::source(self);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}
