//! Files of bytes, epochs that are read whole, and batches that are asked for before they are read.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use twinbuf_mmap::{BatchIndices, Error, Plan, ReadMode, ReadStats, Reader, Records};

/// Writes a file, and returns its path.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn write(folder: &Path, name: &str, bytes: impl AsRef<[u8]>) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// An `.npy` file of this major version, with a dictionary and data.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn npy(major: u8, header: &str, data: &[u8]) -> Vec<u8> {
    let len = &u32::try_from(header.len()).unwrap().to_le_bytes()[..if major == 1 { 2 } else { 4 }];
    [b"\x93NUMPY", &[major, 0][..], len, header.as_bytes(), data].concat()
}

/// The batches of an epoch, in order.
#[allow(dead_code, reason = "each test binary uses its part")]
pub(crate) fn epoch(plan: &Plan, number: u64) -> impl Iterator<Item = BatchIndices> + Send + use<> {
    let plan = plan.clone();
    (0..).map_while(move |step| plan.batch(number, step))
}

/// Reads an epoch, and compares each record with the bytes that it must have. `case` is in the message.
#[allow(dead_code, reason = "each test binary uses its part")]
#[track_caller]
pub(crate) fn compare<'a>(records: &Records, plan: &Plan, case: &str, wanted: impl Fn(usize) -> &'a [u8]) {
    let size = records.record_bytes();
    for batch in epoch(plan, 0) {
        // Poisoned and longer than needed: a byte not written, or written past the end, shows.
        let mut out = vec![0xEE; usize::try_from(batch.len()).unwrap() * size + 3];
        let len = records.read(&batch, &mut out).unwrap();
        assert_eq!(len + 3, out.len(), "{case}");
        assert_eq!(out[len..], [0xEE; 3], "{case}");
        for (record, found) in batch.runs().flatten().zip(out[..len].chunks_exact(size)) {
            assert_eq!(found, wanted(usize::try_from(record).unwrap()), "{case}, record {record}");
        }
    }
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
