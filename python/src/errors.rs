//! Converts errors of the crates to Python exceptions.
//!
//! The classes are defined in Python (`twinbuf/errors.py`): the classes for file errors also derive from `OSError`,
//! which the stable ABI does not allow for a Rust class.

use std::error::Error as StdError;
use std::fmt::{self, Write};
use std::io;
use std::path::{Path, PathBuf};

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyDict;
use twinbuf::loader::At;
use twinbuf::mmap;
use twinbuf::{BoxError, Error};

/// The parts of an exception.
#[derive(Debug, Default)]
pub(crate) struct Failure {
    class: &'static str,
    message: String,
    path: Option<PathBuf>,
    offset: Option<u64>,
    errno: Option<i32>,
    at: Option<At>,
}

impl Failure {
    pub(crate) fn new(class: &'static str, message: impl Into<String>) -> Self {
        Self { class, message: message.into(), ..Self::default() }
    }

    /// Replaces the message by what `tell` makes of it.
    pub(crate) fn told(self, tell: impl FnOnce(&str) -> String) -> Self {
        Self { message: tell(&self.message), ..self }
    }

    /// A file that cannot be written.
    pub(crate) fn of_writing(path: PathBuf, error: &io::Error) -> Self {
        let class = match error.kind() {
            io::ErrorKind::NotFound => "MissingFileError",
            io::ErrorKind::PermissionDenied => "FilePermissionError",
            _ => "FileError",
        };
        let message = format!("{path:?}: {error}");
        Self { path: Some(path), errno: error.raw_os_error(), ..Self::new(class, message) }
    }

    /// An error of the crate that opens and reads files.
    pub(crate) fn of_file(error: &mmap::Error) -> Self {
        use mmap::Error as E;
        let source = StdError::source(error).and_then(|source| source.downcast_ref::<io::Error>());
        let (class, errno) = match error {
            // These have no `io::Error` as their source: use ENOENT (2) and EACCES (13).
            E::NotFound { .. } | E::NoFiles { .. } => ("MissingFileError", Some(2)),
            E::PermissionDenied { .. } => ("FilePermissionError", Some(13)),
            E::NoPaths | E::ZeroRecord | E::ZeroStride | E::NoSuchRecord { .. } => ("OptionError", None),
            _ => ("FileError", source.and_then(io::Error::raw_os_error)),
        };
        let (path, offset) = error.place().unzip();
        let (path, offset) = (path.map(Path::to_path_buf), offset.flatten());
        Self { path, offset, errno, ..Self::new(class, chain(error)) }
    }
}

/// Returns the error's message, followed by those of its causes. An exception of Python is left out: code of the program
/// makes its text.
fn chain(error: &dyn StdError) -> String {
    let mut line = error.to_string();
    let mut source = error.source();
    while let Some(error) = source.filter(|source| !source.is::<PyErr>()) {
        let _ = write!(line, ": {error}");
        source = error.source();
    }
    line
}

/// The names of `twinbuf.errors`, and `os.strerror`. They are here before the end of the program: late in it, modules are
/// empty, and none can be imported.
static CLASSES: PyOnceLock<Py<PyDict>> = PyOnceLock::new();

pub(crate) fn classes(py: Python<'_>) -> PyResult<&Bound<'_, PyDict>> {
    let found = CLASSES.get_or_try_init(py, || {
        let names = py.import("twinbuf.errors")?.dict().copy()?;
        names.set_item("strerror", py.import("os")?.getattr("strerror")?)?;
        PyResult::Ok(names.unbind())
    });
    Ok(found?.bind(py))
}

/// Makes an exception of one of the classes in `twinbuf.errors`. Names of Rust in its message become those of Python.
///
/// It runs no code of Python, only of the interpreter: a daemon thread that fails while the program ends would be ended
/// there, below this frame.
pub(crate) fn raise(py: Python<'_>, failure: Failure) -> PyErr {
    let Failure { class, message, path, offset, errno, at } = failure;
    let made = || -> PyResult<PyErr> {
        let classes = classes(py)?;
        let error = classes.as_any().get_item(class)?.call1((in_python(&message),))?;
        if let Some(path) = path {
            if error.hasattr("filename")? {
                error.setattr("filename", path.as_os_str())?;
            }
            error.setattr("_path", path.as_os_str())?;
        }
        error.setattr("offset", offset)?;
        if let Some(errno) = errno {
            error.setattr("errno", errno)?;
            error.setattr("strerror", classes.as_any().get_item("strerror")?.call1((errno,))?)?;
        }
        if let Some(At { loader, epoch, step, .. }) = at {
            error.setattr("loader", loader.as_deref())?;
            error.setattr("epoch", epoch)?;
            error.setattr("step", step)?;
        }
        Ok(PyErr::from_value(error))
    };
    made().unwrap_or_else(|error| error)
}

pub(crate) fn option(py: Python<'_>, error: impl fmt::Display) -> PyErr {
    raise(py, Failure::new("OptionError", error.to_string()))
}

/// An error of a loader or generator. An exception raised by Python code is returned as it was, with a note that names
/// the batch.
pub(crate) fn loading(py: Python<'_>, error: Error) -> PyErr {
    let whole = chain(&error);
    let of = |class, at| raise(py, Failure { at, ..Failure::new(class, &*whole) });
    match error {
        Error::Load { at, source } | Error::Transform { at: Some(at), source } => load(py, whole, at, source),
        Error::Transform { at: None, source } => of_transform(py, source),
        Error::Length { at, .. } | Error::Panicked { at, .. } | Error::ThreadGone { at } => {
            of("LoaderError", Some(at))
        }
        Error::Timeout { reading, .. } => of("LoaderTimeoutError", reading.map(|reading| reading.at)),
        Error::Forked { at } => of("ForkedError", Some(at)),
        Error::Checkpoint { field, wanted, found } => {
            let told = |text: &str| match field {
                "last_batch" => (if text == "Drop" { "True" } else { "False" }).to_string(),
                "shuffle" => shuffle_in_python(text),
                "range of records" => format!("range({})", text.replace("..", ", ").replace(" by ", ", ")),
                _ => text.trim_start_matches("Some(").trim_end_matches(')').to_string(),
            };
            let field = field.replace("last_batch", "`drop_last`").replace("list", "fingerprint of the list");
            let (wanted, found) = (told(&wanted), told(&found));
            let line = format!("the checkpoint has another {field}: wanted {wanted}, found {found}");
            raise(py, Failure::new("CheckpointError", line))
        }
        Error::Option { .. } | Error::Memory { .. } | Error::Switch { .. } | Error::UnknownSwitch { .. } => {
            option(py, whole)
        }
        Error::Open(error) => raise(py, Failure::of_file(&error).told(|_| whole)),
        Error::Fingerprint(source) => match source.downcast::<mmap::Error>() {
            Ok(error) => raise(py, Failure::of_file(&error)),
            Err(_) => of("LoaderError", None),
        },
        Error::Write(why) => {
            let failure = Failure::of_writing(why.path, &why.source).told(|_| whole);
            raise(py, Failure { offset: Some(why.offset), ..failure })
        }
        Error::Trace { path, source } => raise(py, Failure::of_writing(path, &source).told(|_| whole)),
        _ => of("LoaderError", None),
    }
}

/// Converts the error of a transform: to the exception that its Python code raised, or to an `OptionError`.
pub(crate) fn of_transform(py: Python<'_>, error: BoxError) -> PyErr {
    match error.downcast::<PyErr>() {
        Ok(raised) => *raised,
        Err(error) => option(py, error),
    }
}

/// What code of the program raised, for the loop. If the thread of the code raises it `here`, as it does with Ctrl-C, nobody
/// else may: the loop's next request then makes the item again.
pub(crate) fn of_call(raised: Bound<'_, PyAny>, here: bool) -> BoxError {
    if here { io::Error::from(io::ErrorKind::Interrupted).into() } else { PyErr::from_value(raised).into() }
}

/// Whether a thread has raised this error already.
pub(crate) fn was_raised(error: &Error) -> bool {
    let (Error::Load { source, .. } | Error::Transform { source, .. }) = error else { return false };
    source.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::Interrupted)
}

/// Whether the Python code of a read raised something other than an `Exception`, as Ctrl-C and `sys.exit` do, or was
/// interrupted by a handler that used the loader.
pub(crate) fn is_interrupt(error: &Error) -> bool {
    let (Error::Load { source, .. } | Error::Transform { source, .. }) = error else { return false };
    let Some(raised) = source.downcast_ref::<PyErr>() else { return false };
    Python::try_attach(|py| {
        let nested = classes(py).and_then(|classes| classes.as_any().get_item("NestedError"));
        !raised.is_instance_of::<PyException>(py)
            || nested.is_ok_and(|nested| raised.matches(py, nested).unwrap_or(false))
    })
    .unwrap_or(false)
}

fn load(py: Python<'_>, whole: String, at: At, source: BoxError) -> PyErr {
    let source = match source.downcast::<PyErr>() {
        Ok(raised) => {
            // The note names the batch. If it cannot be added, return the error without it.
            let _ = raised.value(py).call_method1("add_note", (in_python(&whole),));
            return *raised;
        }
        Err(source) => source,
    };
    let failure = match source.downcast::<mmap::Error>() {
        Ok(error) => Failure { message: whole, ..Failure::of_file(&error) },
        Err(_) => Failure::new("LoaderError", whole),
    };
    raise(py, Failure { at: Some(at), ..failure })
}

/// Converts a shuffle, as Rust prints it, to the argument of Python's `Plan`.
fn shuffle_in_python(shuffle: &str) -> String {
    let numbers: Vec<_> =
        shuffle.split(|c: char| !c.is_ascii_digit()).filter(|number| !number.is_empty()).collect();
    match (shuffle, &numbers[..]) {
        ("Full", _) => "\"full\"".to_string(),
        (_, [records, chunks]) => format!("Window({chunks}, {records})"),
        (_, [records]) => format!("Chunks({records})"),
        _ => shuffle.to_string(),
    }
}

/// Names in messages of the crates, and the names of the same things in Python.
const NAMES: [(&str, &str); 8] = [
    ("Records::len", "len(records)"),
    ("RaggedRecords::open_megatron", "Records.open_megatron"),
    ("Options::header(8)", "numpy.fromfile(path, 'uint8', offset=8)"),
    ("header(16)", "offset=16"),
    ("PlanBuilder::rank", "rank"),
    ("transform", "map"),
    ("dataset", "data"),
    ("epochs(..)", "epochs(n)"),
];

/// Replaces the names in a message of the crates by those of Python.
pub(crate) fn in_python(text: &str) -> String {
    let text = text.replace(": if it is a pattern, expand it with `files()`", "");
    let text = text.replace("or keep the last batch", "or set `drop_last=False`");
    let text = text.replace(" with `LastBatch::Wrap` or in the list", " in `records`");
    let text = text.replace("with the type U8", "as \"uint8\"");
    // Text between backquotes is code: every second part.
    let code = |(at, part): (usize, &str)| {
        if at % 2 == 0 {
            return part.to_string();
        }
        if let Some(&(_, name)) = NAMES.iter().find(|(rust, _)| *rust == part) {
            return name.to_string();
        }
        match part.strip_suffix(')').and_then(|call| call.split_once('(')) {
            Some((option @ ("depth" | "workers"), number)) => format!("{option}={number}"),
            Some(("overlap", on)) => format!("overlap={}", if on == "true" { "True" } else { "False" }),
            _ => part.replace("::", "."),
        }
    };
    text.split('`').enumerate().map(code).collect::<Vec<_>>().join("`")
}
