//! The part of `Writer` (`twinbuf/_write.py`) that copies rows into slots, without the GIL.

use std::io::Write;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use twinbuf::{Error, write};

use crate::dtype;
use crate::errors::{self, Failure};
use crate::locked::{LEAVE, Locked, check_end, detached};

#[pyclass(frozen, module = "twinbuf._twinbuf", name = "_Writer")]
pub(crate) struct Writer {
    /// `None` after the end. What `finish` came to, which Ctrl-C may have kept from the caller.
    writer: Locked<(Option<write::Writer>, Option<Finished>)>,
    /// A call that has the lock then discards the writer at its end. Relaxed: the lock orders the rest. A call that ends
    /// before it sees this leaves the lock to `discard`.
    discarded: AtomicBool,
}

type Finished = Result<String, write::Failure>;

impl Writer {
    /// Uses the writer without the GIL. A writer that ended, or that is in another process, is an error: after a `finish`
    /// that failed, the same one again.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        use_it: impl FnOnce(&mut Option<write::Writer>, &mut Option<Finished>) -> Result<Option<T>, Error> + Send,
    ) -> PyResult<T> {
        self.writer.check(py, "make the Writer after the fork")?;
        check_end(py)?;
        let ended = || errors::raise(py, Failure::new("LoaderError", "the Writer has ended: make a new one"));
        let used = self.writer.detached(py, |(writer, written)| {
            let used = use_it(writer, written);
            writer.take_if(|_| self.discarded.load(Ordering::Relaxed));
            match (used, written) {
                (Ok(None), Some(Err(failure))) => Err(Error::Write(failure.clone())),
                (used, _) => used,
            }
        });
        used.map_err(|error| errors::loading(py, error))?.ok_or_else(ended)
    }
}

#[pymethods]
impl Writer {
    #[new]
    fn new(
        py: Python<'_>,
        path: PathBuf,
        dtype: Option<&str>,
        shape: Vec<usize>,
        depth: usize,
        slot: usize,
        shard: Option<u64>,
    ) -> PyResult<Self> {
        let builder = match dtype {
            Some(name) => write::Writer::npy(&path, dtype::parse(name)?, &shape),
            None => write::Writer::raw(&path, shape.iter().product()),
        };
        let builder = builder.depth(depth).slot_bytes(slot);
        let builder = shard.into_iter().fold(builder, |builder, bytes| builder.shard_bytes(bytes));
        let writer = detached(py, || builder.build()).map_err(|error| errors::loading(py, error))?;
        Ok(Self { writer: Locked::new((Some(writer), None)), discarded: AtomicBool::new(false) })
    }

    fn append(&self, py: Python<'_>, rows: &Bound<'_, PyAny>) -> PyResult<()> {
        let rows = PyBuffer::<u8>::get(rows)?;
        // `None`: no rows, or not one after another, which `append` in Python rules out.
        let Some(bytes) = rows.as_slice_ptr() else { return Ok(()) };
        // SAFETY: `rows` keeps the memory until after the call. Whoever changes it meanwhile changes what is written.
        let bytes = unsafe { bytes.as_ref() };
        let failed = |error: std::io::Error| error.downcast().unwrap_or_else(Error::Spawn);
        self.with(py, |writer, _| {
            writer.as_mut().map(|writer| writer.write_all(bytes).map_err(failed)).transpose()
        })
    }

    /// Appends the bytes of the first pair. It is taken and written in one step for Python, which runs a signal's handler
    /// before it or after: no rows twice, none lost.
    fn append_first(&self, py: Python<'_>, late: &Bound<'_, PyAny>) -> PyResult<()> {
        self.append(py, &late.call_method0("popleft")?.get_item(1)?)
    }

    fn finish(&self, py: Python<'_>) -> PyResult<String> {
        self.with(py, |writer, written| {
            if let Some(writer) = writer.take() {
                *written = Some(match writer.finish() {
                    Err(Error::Write(failure)) => Err(failure),
                    finished => Ok(finished?.to_string()),
                });
            }
            Ok(written.clone().and_then(Result::ok))
        })
    }

    /// Waits at most [`LEAVE`] for a disk that hangs, and for a thread that waits for it.
    fn discard(&self, py: Python<'_>) {
        self.discarded.store(true, Ordering::Relaxed);
        let until = Instant::now() + LEAVE;
        detached(py, || {
            let writer = self.writer.lock_until(until).and_then(|mut state| state.0.take());
            writer.map(|writer| writer.discard_timeout(until.saturating_duration_since(Instant::now())))
        });
    }
}
