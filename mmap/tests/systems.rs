//! What every system's own calls must do: hints that fail nowhere, direct reads of the same bytes, errors that name the
//! call that is missing.

use twinbuf_mmap::{
    CachePolicy, Cut, DType, Error, HINT_CHUNK, HintStats, Plan, ReadMode, Records, Shuffle, Tail,
};

const NUMBERS: usize = 300_000;

/// The bytes of an epoch, each batch hinted before it is read.
fn epoch(records: &Records, shuffle: Shuffle) -> Vec<u8> {
    let plan = Plan::builder(records.len()).batch(64).shuffle(shuffle).tail(Tail::Keep).build().unwrap();
    let (mut all, mut hinted) = (Vec::new(), HintStats::default());
    for step in 0..plan.steps() {
        let batch = plan.batch(0, step).unwrap();
        hinted += records.will_need(&batch, HINT_CHUNK);
        let mut out = vec![0xEE; usize::try_from(batch.len()).unwrap() * records.record_bytes()];
        assert_eq!(records.read(&batch, &mut out).unwrap(), out.len());
        all.extend(out);
    }
    assert_eq!(hinted.failed, 0, "{hinted:?}");
    // Counted where the system has them. (Linux leaves them out on some file systems.)
    if cfg!(any(windows, target_vendor = "apple", target_os = "freebsd"))
        && records.read_mode() == ReadMode::Pread
    {
        assert!(hinted.calls > 0 && hinted.bytes > 0, "{hinted:?}");
    }
    all
}

#[test]
fn hints_and_direct_reads_change_no_byte() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("numbers.bin");
    let numbers: Vec<u8> =
        (0_u32..).take(NUMBERS).flat_map(|i| i.wrapping_mul(2_654_435_761).to_le_bytes()).collect();
    std::fs::write(&path, &numbers).unwrap();
    // Some 1000 records of 1 KiB and an odd number, which overlap.
    let cut = Cut::Windows { rows: 301, stride: 299 };
    let open = |mode| Records::options().read_mode(mode).open_headerless([&path], DType::U32, cut);
    for shuffle in [Shuffle::None, Shuffle::Records, Shuffle::Window { records: 16, chunks: 8 }] {
        let expected = epoch(&open(ReadMode::Auto).unwrap(), shuffle);
        match open(ReadMode::Direct) {
            Ok(direct) => assert!(epoch(&direct, shuffle) == expected, "{shuffle:?}"),
            // Of tmpfs before Linux 6.6, and other file systems.
            Err(Error::System { call: "open(O_DIRECT)", source, .. }) => eprintln!("not checked: {source}"),
            #[cfg(not(any(target_os = "linux", windows, target_vendor = "apple")))]
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
    let dropped = records.evict_batch(&batch, CachePolicy::Drop);
    let counted = records.residency();
    if cfg!(any(windows, target_vendor = "apple")) {
        assert!(matches!(dropped, Err(Error::Unsupported { call: "posix_fadvise" })), "{dropped:?}");
        assert!(matches!(counted, Err(Error::Unsupported { call: "mincore" })), "{counted:?}");
    }
    // The records are as they were.
    let mut out = vec![0; 10_000];
    assert_eq!(records.read(&batch, &mut out).unwrap(), 10_000);
    assert!(out == [1; 10_000]);
}
