//! Data sets written in Python: any object with `__len__`, `dtype`, `shape` and `read_into(indices, out)`.

use std::sync::Arc;

use pyo3::exceptions::{PyAttributeError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyTuple};
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;
use twinbuf::{BatchIndices, BoxError, Dataset};

use crate::dtype;
use crate::errors;
use crate::foreign::{Call, Work, answer_to};
use crate::object::Object;
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

/// A Python object as a data set.
pub(crate) struct PythonData {
    pub(crate) object: Arc<Object>,
    records: u64,
    fingerprint: u64,
    record: RecordType,
}

impl PythonData {
    pub(crate) fn new(data: &Bound<'_, PyAny>) -> PyResult<Self> {
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
        Ok(Self { object, records, fingerprint, record })
    }
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
        let (object, record) = (self.object.clone(), self.record.clone());
        Some(Box::new(Self { object, records, fingerprint, record }))
    }

    fn fingerprint(&mut self) -> Result<u64, BoxError> {
        Ok(self.fingerprint)
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        let call = || Call {
            object: self.object.clone(),
            work: Work::Read {
                batch: batch.clone(),
                record: self.record.clone(),
                out: (out.as_mut_ptr(), out.len()),
            },
        };
        answer_to(call).map(|_| out.len())
    }
}
