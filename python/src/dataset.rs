//! Data sets written in Python: any object with `__len__`, `dtype`, `shape` and `read_into(indices, out)`.

use std::ffi::c_int;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use pyo3::exceptions::{PyAttributeError, PyBufferError, PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyMemoryView, PyTuple};
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;
use twinbuf::{BatchIndices, BoxError, Dataset};

use crate::dtype;
use crate::errors;
use crate::lease::View;
use crate::number::indices;
use crate::object::Object;
use crate::reading::{Kept, Reading};
use crate::records::Records;

/// Returns the data sets in `data`: the values of a tuple or a dict, or `data` itself.
pub(crate) fn each<'py>(data: &Bound<'py, PyAny>) -> Vec<Bound<'py, PyAny>> {
    if let Ok(fields) = data.cast::<PyTuple>() {
        return fields.iter().collect();
    }
    match data.cast::<PyDict>() {
        Ok(fields) => fields.values().iter().collect(),
        Err(_) => vec![data.clone()],
    }
}

/// Returns the mean size of a record in bytes. `None` if a data set written in Python lacks what tells it.
pub(crate) fn record_bytes(data: &Bound<'_, PyAny>) -> Option<u64> {
    match data.cast::<Records>() {
        Ok(records) => Some(records.get().record_bytes()),
        Err(_) => record(data).ok().map(|record| record.len() as u64),
    }
}

/// Returns the type of a record of a data set written in Python, from its attributes `dtype` and `shape`.
fn record(data: &Bound<'_, PyAny>) -> PyResult<RecordType> {
    let attribute = |name: &str| {
        data.getattr(name).map_err(|error| match error.is_instance_of::<PyAttributeError>(data.py()) {
            true => {
                let wanted = "Records, or an object with `__len__`, `read_into(indices, out)` and the `dtype` and \
                              `shape` of a record";
                errors::of_type("data", wanted, format!("{} without `{name}`", data.get_type()))
            }
            false => error,
        })
    };
    attribute("read_into")?;
    dtype::record(&attribute("dtype")?, &attribute("shape")?)
}

/// A Python object as a data set. The thread that reads it takes the GIL for each batch.
pub(crate) struct PythonData {
    pub(crate) object: Arc<Object>,
    records: u64,
    fingerprint: u64,
    record: RecordType,
    kept: Arc<Kept>,
}

impl PythonData {
    pub(crate) fn new(data: &Bound<'_, PyAny>, kept: Arc<Kept>) -> PyResult<Self> {
        let record = record(data)?;
        let object = Arc::new(Object::new(data));
        let records = data.len()? as u64;
        let fingerprint = match data.getattr_opt("fingerprint")? {
            Some(found) => found.extract::<u64>().map_err(|_| {
                PyTypeError::new_err(
                    "fingerprint: wanted a whole number from 0 to 2**64 - 1, or no such attribute",
                )
            })?,
            None => 0,
        };
        Ok(Self { object, records, fingerprint, record, kept })
    }

    fn call(&self, py: Python<'_>, batch: &BatchIndices, out: &mut [u8]) -> PyResult<()> {
        let object = self.object.get(py);
        let Some(object) = object else { return Err(PyRuntimeError::new_err("the loader was collected")) };
        let records = usize::try_from(batch.len())?;
        let lent = Bound::new(py, Lent::new(out, records, &self.record))?;
        let indices = indices(py, batch)?;
        let view = PyMemoryView::from(&lent)?;
        let reading = Reading::begin(&self.kept);
        let result = object.bind(py).call_method1("read_into", (indices, &view));
        drop(reading);
        let result = match result {
            // Allow a number: `return file.readinto(out)` returns the number of bytes that it read.
            Ok(made) if made.is_none() || made.is_instance_of::<PyInt>() => Ok(()),
            Ok(made) => {
                let found =
                    format!("a {} returned: `numpy.asarray(out)[:] = array`", made.get_type().name()?);
                Err(errors::of_type("read_into", "`out` filled and nothing returned", found))
            }
            Err(raised) => Err(raised),
        };
        if let Err(error) = &result {
            // If a frame cannot be cleared, it still refers to the view. The check below detects that.
            let _ = clear_frames(py, error);
        }
        let mut returned = view.call_method0("release").is_ok();
        if returned && is_shared(&view) {
            // Something still refers to `out`: perhaps a tensor of `torch.frombuffer(out)`, which uses the memory
            // without an export. If it is an unreachable cycle, which is harmless, the collector frees it.
            py.import("gc")?.call_method0("collect")?;
            returned = !is_shared(&view);
        }
        drop(view);
        if !returned || lent.get().exports.load(Ordering::Relaxed) > 0 {
            if self.kept.keep() {
                // Do not return: this thread is left behind, and the slot with it. Otherwise the view would outlive the slot.
                py.detach::<(), _>(|| {
                    loop {
                        thread::park();
                    }
                });
            }
            result?;
            return Err(PyBufferError::new_err(
                "read_into kept `out`, or an array or tensor on it: fill it and let it go, because the slot is used again",
            ));
        }
        result
    }
}

/// Clears the frames in the traceback of an exception and of its causes, because they keep the view.
fn clear_frames(py: Python<'_>, error: &PyErr) -> PyResult<()> {
    let clear = py.import("traceback")?.getattr("clear_frames")?;
    // Before Python 3.12 the exception object may lack its traceback, so clear the traceback separately.
    if let Some(traceback) = error.traceback(py) {
        clear.call1((traceback,))?;
    }
    let (mut seen, mut left) = (Vec::new(), vec![error.value(py).clone().into_any()]);
    while let Some(error) = left.pop() {
        if error.is_none() || seen.contains(&error.as_ptr()) {
            continue;
        }
        seen.push(error.as_ptr());
        clear.call1((error.getattr("__traceback__")?,))?;
        left.extend([error.getattr("__cause__")?, error.getattr("__context__")?]);
    }
    Ok(())
}

/// Whether anything besides `view` refers to the memoryview.
fn is_shared(view: &Bound<'_, PyMemoryView>) -> bool {
    // SAFETY: `view` keeps the object alive, and this thread is attached to the interpreter.
    (unsafe { ffi::Py_REFCNT(view.as_ptr()) }) > 1
}

impl Dataset for PythonData {
    fn records(&self) -> u64 {
        self.records
    }

    fn record_bytes(&self) -> usize {
        self.record.len()
    }

    fn element(&self) -> Option<(DType, Vec<usize>)> {
        Some((dtype::of(&self.record), self.record.shape().to_vec()))
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        let Self { records, fingerprint, .. } = *self;
        let (object, record, kept) = (self.object.clone(), self.record.clone(), self.kept.clone());
        Some(Box::new(Self { object, records, fingerprint, record, kept }))
    }

    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        Ok(self.fingerprint)
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        let bytes = out.len();
        // Attaching fails while the interpreter exits. Nobody waits for this batch then.
        match Python::try_attach(|py| self.call(py, batch, out)) {
            Some(result) => result?,
            None => return Err("the interpreter is shutting down".into()),
        }
        Ok(bytes)
    }
}

/// The slot being filled, lent to `read_into` as a buffer.
#[pyclass(frozen, module = "twinbuf._twinbuf")]
pub(crate) struct Lent {
    view: View,
    /// The number of views that have not been released.
    exports: AtomicUsize,
}

// SAFETY: the memory is lent for one call. `PythonData::call` detects whether a view outlived it.
unsafe impl Send for Lent {}
// SAFETY: after construction only `exports` changes, and it is atomic.
unsafe impl Sync for Lent {}

impl Lent {
    fn new(out: &mut [u8], records: usize, record: &RecordType) -> Self {
        let (shape, element) = (dtype::of_records(records, record.shape()), dtype::of(record));
        // If the buffer protocol has no format for a type, lend unsigned integers of the same size.
        let dtype = match (dtype::format(element), element.size()) {
            (Some(_), _) => element,
            (None, 1) => DType::U8,
            (None, _) => DType::U16,
        };
        Self { view: View::new(out.as_mut_ptr(), out.len(), dtype, shape), exports: AtomicUsize::new(0) }
    }
}

#[pymethods]
impl Lent {
    /// # Safety
    ///
    /// Python calls it with a view to fill, according to the buffer protocol.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        // The view refers to this object, which keeps shape and strides.
        let filled = slf.get().view.buffer(slf.clone().into_any(), flags)?;
        slf.get().exports.fetch_add(1, Ordering::Relaxed);
        // SAFETY: Python passes a view that may be written.
        unsafe { view.write(filled) };
        Ok(())
    }

    /// # Safety
    ///
    /// Python calls it once for each view.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.exports.fetch_sub(1, Ordering::Relaxed);
    }
}
