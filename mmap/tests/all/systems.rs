//! What every system's own calls must do: hints that fail nowhere, direct reads of the same bytes, errors that name the
//! call that is missing.

use std::sync::Arc;

use twinbuf_mmap::{Cut, DType, Error, LastBatch, Plan, ReadMode, ReadOptions, Reader, Records, Shuffle};

const NUMBERS: usize = 300_000;

/// The bytes of an epoch, each batch asked for before it is read.
fn epoch(records: &Arc<Records>, shuffle: Shuffle, mode: ReadMode) -> Result<Vec<u8>, Error> {
    let plan =
        Plan::builder(records.len()).batch(64).shuffle(shuffle).last_batch(LastBatch::Keep).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadOptions::new().mode(mode))?;
    let batches = plan.clone();
    reader.begin((0..).map_while(move |step| batches.batch(0, step)));
    let mut all = Vec::new();
    for step in 0..plan.steps(0) {
        let batch = plan.batch(0, step).unwrap();
        let mut out = vec![0xEE; usize::try_from(batch.len()).unwrap() * records.record_bytes()];
        assert_eq!(reader.read(&batch, &mut out).unwrap(), out.len());
        all.extend(out);
    }
    let stats = reader.stats();
    assert_eq!(stats.failed, 0, "{stats:?}");
    // Counted where the system has them. (Linux leaves them out on some file systems.)
    if cfg!(windows) && mode == ReadMode::Auto {
        assert!(stats.hints > 0 && stats.hinted > 0, "{stats:?}");
    }
    Ok(all)
}

#[test]
fn hints_and_direct_reads_change_no_byte() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("numbers.bin");
    let numbers: Vec<u8> =
        (0_u32..).take(NUMBERS).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    std::fs::write(&path, &numbers).unwrap();
    // Some 1000 records of 1 KiB and an odd number. They overlap.
    let cut = Cut::Windows { rows: 301, stride: 299 };
    let records = Arc::new(Records::open_headerless([&path], DType::U32, cut).unwrap());
    for shuffle in [Shuffle::None, Shuffle::Full, Shuffle::Window { chunk_records: 16, window_chunks: 8 }] {
        let expected = epoch(&records, shuffle, ReadMode::Auto).unwrap();
        match epoch(&records, shuffle, ReadMode::Direct) {
            Ok(direct) => assert!(direct == expected, "{shuffle:?}"),
            // Of tmpfs before Linux 6.6, and other file systems.
            Err(Error::System { call: "open(O_DIRECT)", source, .. }) => eprintln!("not checked: {source}"),
            #[cfg(not(any(target_os = "linux", windows)))]
            Err(Error::Unsupported { .. }) => {}
            Err(error) => panic!("{error:?}"),
        }
    }
}

#[test]
fn what_a_system_lacks_is_named() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("bytes.bin");
    std::fs::write(&path, [1; 10_000]).unwrap();
    let records = Records::open([&path], 100).unwrap();
    let batch = Plan::builder(100).batch(100).build().unwrap().batch(0, 0).unwrap();
    let dropped = records.evict();
    let counted = records.residency();
    if cfg!(not(any(target_os = "linux", target_os = "android"))) {
        assert!(matches!(dropped, Err(Error::Unsupported { call: "posix_fadvise" })), "{dropped:?}");
        assert!(matches!(counted, Err(Error::Unsupported { call: "mincore" })), "{counted:?}");
    }
    // The records are as they were.
    let mut out = vec![0; 10_000];
    assert_eq!(records.read(&batch, &mut out).unwrap(), 10_000);
    assert!(out == [1; 10_000]);
}
