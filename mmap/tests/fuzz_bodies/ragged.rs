//! Any bytes as an index of records of varying length: refused with a typed error, or all records can be read.

use twinbuf_mmap::{Plan, RaggedRecords};

/// The first byte chooses the format, the next two are the length of the data file, and the others are the index.
pub(crate) fn ragged(bytes: &[u8]) {
    let &[format, low, high, ref index @ ..] = bytes else { return };
    let data: Vec<u8> =
        (0..u16::from_le_bytes([low, high])).map(|at| at.to_le_bytes()[0] ^ at.to_le_bytes()[1]).collect();
    let folder = tempfile::tempdir().expect("a temporary folder");
    let (data_path, index_path) = (folder.path().join("data.bin"), folder.path().join("data.idx"));
    std::fs::write(&data_path, &data).expect("written");
    std::fs::write(&index_path, index).expect("written");
    let opened = match format % 2 {
        0 => RaggedRecords::open_indexed([(&data_path, &index_path)]),
        _ => RaggedRecords::open_megatron([&data_path]),
    };
    match opened {
        Ok(records) => read(&records, &data, index.len()),
        Err(error) => {
            let message = error.to_string();
            assert!(!message.contains('\n'), "{message:?}");
        }
    }
}

/// Reads every record, and compares it with the bytes of the file where it is said to be.
fn read(records: &RaggedRecords, data: &[u8], index: usize) {
    assert!(records.max_len() <= data.len() && records.bytes() <= data.len() as u64);
    assert!((1..=index as u64).contains(&records.len()));
    let mut out = vec![0; records.max_len()];
    let mut end = None;
    for record in 0..records.len() {
        let found = records.locate(record).expect("a record below `len`");
        let bytes = usize::try_from(found.offset).expect("in the file")
            ..usize::try_from(found.offset + found.len).expect("in the file");
        assert!(found.shard == 0 && end.is_none_or(|end| end == bytes.start), "record {record}: {bytes:?}");
        let plan = Plan::builder(records.len()).build().expect("a record");
        let batch = plan.batch(0, record).expect("a record below `len`");
        let len = records.read(&batch, &mut out).expect("the file is whole");
        assert_eq!(&out[..len], &data[bytes.clone()], "record {record}");
        end = Some(bytes.end);
    }
    assert_eq!((end, records.locate(records.len())), (Some(data.len()), None));
}
