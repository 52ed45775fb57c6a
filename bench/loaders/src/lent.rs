//! What a library's workers read with: one open file each, and reusable buffers.

use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use twinbuf::BoxError;

use crate::source::{Buffer, Source};
use crate::work::{Batch, Work};

/// Reads batches, on any number of threads.
///
/// A library that delivers its workers' results cannot refill a buffer, but it can deliver a batch that returns its
/// buffer when it is dropped. With a fresh buffer each time, images cost clearly more CPU time (page faults), even with
/// the settings of `malloc` that keep freed memory; tokens do not.
pub struct Lender {
    work: Work,
    order: Vec<u64>,
    /// Those that no worker is using.
    sources: Mutex<Vec<Source>>,
    /// Those that hold no batch.
    buffers: Mutex<Vec<Buffer>>,
}

/// A batch. Its buffer is returned when this is dropped.
pub struct Lent {
    /// `None` only while this is dropped.
    buffer: Option<Buffer>,
    lender: Arc<Lender>,
}

impl Lender {
    /// Opens the file and reads the order.
    pub fn open(work: &Work) -> Result<Arc<Self>, BoxError> {
        let (order, sources) = (work.order()?, Mutex::new(vec![Source::open(work)?]));
        Ok(Arc::new(Self { work: work.clone(), order, sources, buffers: Mutex::default() }))
    }

    /// Records of an epoch.
    pub fn len(&self) -> usize {
        self.order.len()
    }

    /// Records of a batch.
    pub fn batch(&self) -> usize {
        self.work.batch
    }

    /// The item of the record at this place of the epoch: the first record of a batch has the whole batch, the others
    /// have nothing.
    ///
    /// So a library that collects a batch record by record gets it in one piece.
    ///
    /// # Errors
    ///
    /// If the file cannot be opened, or read there.
    pub fn record(self: &Arc<Self>, place: usize) -> io::Result<Option<Lent>> {
        let Self { work, order, sources, buffers } = &**self;
        if !place.is_multiple_of(work.batch) {
            return Ok(None);
        }
        let mut source = pop(sources).map_or_else(|| Source::open(work), Ok)?;
        let mut buffer = pop(buffers).unwrap_or_else(|| Buffer::new(work));
        source.read(&order[place..][..work.batch], &mut buffer)?;
        push(sources, source);
        Ok(Some(Lent { buffer: Some(buffer), lender: self.clone() }))
    }
}

impl Lent {
    pub fn batch(&self) -> Batch<'_> {
        self.buffer.as_ref().expect("only a drop takes it").batch()
    }
}

impl Drop for Lent {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            push(&self.lender.buffers, buffer);
        }
    }
}

impl fmt::Debug for Lent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lent").finish_non_exhaustive()
    }
}

/// An idle one. Nothing panics while the lists are locked.
fn pop<T>(idle: &Mutex<Vec<T>>) -> Option<T> {
    idle.lock().unwrap_or_else(PoisonError::into_inner).pop()
}

fn push<T>(idle: &Mutex<Vec<T>>, one: T) {
    idle.lock().unwrap_or_else(PoisonError::into_inner).push(one);
}
