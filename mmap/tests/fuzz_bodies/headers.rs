//! Any bytes as a file of some format: refused with a typed error, or all records can be read.

use std::io::Write;
use std::path::Path;

use twinbuf_mmap::{Cut, Error, LastBatch, Plan, Records};

/// Opens `bytes` as a file by `open`; panics where the records are not what the file can hold.
pub(crate) fn headers(bytes: &[u8], open: impl Fn(&Path, Cut) -> Result<Records, Error>) {
    let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
    file.write_all(bytes).expect("written");
    for cut in [Cut::Rows, Cut::sequence(3), Cut::Windows { rows: 2, stride: 5 }] {
        match open(file.path(), cut) {
            Ok(records) => read(&records, bytes),
            Err(error) => {
                let message = error.to_string();
                assert!(!message.contains('\n'), "{message:?}");
            }
        }
    }
}

/// Reads every record, and compares it with the bytes at its reported place in the file.
fn read(records: &Records, bytes: &[u8]) {
    let size = records.record_bytes();
    assert_eq!(records.shape().iter().product::<usize>() * records.dtype().size(), size);
    assert!(size <= bytes.len() && records.len() <= bytes.len() as u64);
    let plan = Plan::builder(records.len()).batch(16).last_batch(LastBatch::Keep).build().expect("a record");
    let mut out = vec![0; 16 * size];
    for step in 0..plan.steps(0) {
        let batch = plan.batch(0, step).expect("a step below `steps`");
        let read = records.read(&batch, &mut out).expect("the file is whole");
        for (record, found) in batch.runs().flatten().zip(out[..read].chunks_exact(size)) {
            let offset = records.locate(record).expect("a record of the plan").offset;
            let offset = usize::try_from(offset).expect("inside the file");
            assert_eq!(found, &bytes[offset..offset + size]);
        }
    }
}
