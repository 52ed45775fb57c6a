//! How often a reader allocates for a batch in its third epoch, on average: at most twice, and four
//! times for records of varying length.

use twinbuf_mmap::{Plan, RaggedRecords, Ranges, ReadMode, Reader, Records, Shuffle};

#[global_allocator]
static ALLOCATOR: twinbuf_testing::Counting = twinbuf_testing::Counting;

/// Returns the mean number of allocations per batch in the third epoch, without its first batch. `None` if the system
/// does not support this read mode.
fn for_a_batch(ranges: &std::sync::Arc<Ranges>, shuffle: Shuffle, mode: ReadMode) -> Option<f64> {
    let plan = Plan::builder(ranges.len()).batch(64).shuffle(shuffle).build().unwrap();
    let reader = Reader::new(ranges.clone(), &plan, mode)
        .inspect_err(|error| eprintln!("not checked: {error}"))
        .ok()?;
    let mut slot = vec![0; usize::try_from(ranges.most_bytes(64, &(0..ranges.len()).into())).unwrap()];
    let mut allocations = 0;
    for number in 0..3 {
        let batches = plan.clone();
        reader.begin((0..).map_while(move |step| batches.batch(number, step)));
        let first = plan.batch(number, 0).unwrap();
        reader.read(&first, &mut slot).unwrap();
        (allocations, _) = twinbuf_testing::allocated(|| {
            for step in 1..plan.steps(number) {
                reader.read(&plan.batch(number, step).unwrap(), &mut slot).unwrap();
            }
        });
    }
    Some(allocations as f64 / (plan.steps(2) - 1) as f64)
}

#[test]
fn a_batch_is_read_without_new_lists() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (path, index) = (folder.path().join("data"), folder.path().join("index.npy"));
    let bytes: Vec<u8> = (0..=250).cycle().take(8 << 20).collect();
    std::fs::write(&path, &bytes).unwrap();
    let lengths = (0..).map(|record| 100 + record * 31 % 1900);
    std::fs::write(&index, twinbuf_testing::offsets(8 << 20, lengths)).unwrap();
    let equal = Records::open([&path], 512).unwrap().ranges();
    assert_eq!(equal.bytes(), 8 << 20);
    let window = Shuffle::Window { chunk_records: 64, window_chunks: 16 };
    for (shuffle, mode, most) in [
        (Shuffle::None, ReadMode::Pread, 2.0),
        (Shuffle::Full, ReadMode::Pread, 2.0),
        (Shuffle::None, ReadMode::Direct, 2.0),
        (Shuffle::Full, ReadMode::Direct, 2.0),
        (window, ReadMode::Pread, 2.0),
        (window, ReadMode::Direct, 2.0),
    ] {
        let Some(found) = for_a_batch(&equal, shuffle, mode) else { continue };
        println!("{shuffle:?}, {mode:?}: {found:.2}");
        assert!(found <= most, "{shuffle:?} {mode:?}: {found}");
    }
    let ragged = RaggedRecords::open_indexed([(&path, &index)]).unwrap();
    for (shuffle, mode) in [
        (Shuffle::None, ReadMode::Pread),
        (Shuffle::Full, ReadMode::Pread),
        (Shuffle::Full, ReadMode::Direct),
    ] {
        let Some(found) = for_a_batch(&ragged.ranges(), shuffle, mode) else { continue };
        println!("records of varying length, {shuffle:?}, {mode:?}: {found:.2}");
        assert!(found <= 4.0, "{shuffle:?} {mode:?}: {found}");
    }
}
