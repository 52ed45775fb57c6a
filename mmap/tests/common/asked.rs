//! Files of bytes, and batches that are asked for before they are read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use twinbuf_mmap::{BatchIndices, Error, Plan, ReadMode, ReadStats, Reader, Records};

/// Writes a file, and returns its path.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn write(folder: &Path, name: &str, bytes: &[u8]) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Reads a batch with a reader that requests it again afterwards, and returns the reader's counts.
pub(crate) fn read_and_ask(
    records: &Arc<Records>,
    batch: &BatchIndices,
    out: &mut [u8],
) -> (ReadStats, Result<usize, Error>) {
    let plan = Plan::builder(records.len()).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
    reader.begin([batch.clone(), batch.clone()]);
    let read = reader.read(batch, out);
    (reader.stats(), read)
}
