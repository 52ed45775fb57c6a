//! Data sets written in Python: any object with `__len__`, `dtype`, `shape` and `read_into(indices, out)`.

use std::sync::Arc;

use pyo3::prelude::*;
use twinbuf::mmap::DType;
use twinbuf::transform::RecordType;
use twinbuf::{BatchIndices, BoxError, Dataset};

use crate::dtype;
use crate::foreign::{Call, Work, answer_to};
use crate::object::Object;

/// A Python object as a data set.
pub(crate) struct PythonData {
    object: Arc<Object>,
    records: u64,
    fingerprint: u64,
    record: RecordType,
}

impl PythonData {
    pub(crate) fn new(
        object: Arc<Object>,
        records: u64,
        fingerprint: u64,
        dtype: &str,
        shape: &[usize],
    ) -> PyResult<Self> {
        Ok(Self { object, records, fingerprint, record: dtype::record(dtype, shape)? })
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
