#![allow(clippy::needless_pass_by_value)] // plans are made where they are passed

use std::fs::File;
use std::path::PathBuf;

#[cfg(target_os = "linux")]
use super::queue::tests::{ends_well, fork, leave};
use super::*;
use crate::ranges::Extent;
use crate::{BatchIndices, Cut, DType, LastBatch, Plan, RaggedRecords, Records, Shuffle};

/// Creates files of these lengths in bytes. Their bytes depend on the file and the offset.
fn files(folder: &tempfile::TempDir, lens: &[usize]) -> Vec<PathBuf> {
    let file = |(len, number): (&usize, u32)| {
        let path = folder.path().join(number.to_string());
        let mut bytes = vec![0; *len];
        for (at, bytes) in (0_u32..).zip(bytes.chunks_mut(4)) {
            let number = (at ^ number << 28).wrapping_mul(2_654_435_761);
            bytes.copy_from_slice(&number.to_le_bytes()[..bytes.len()]);
        }
        std::fs::write(&path, bytes).unwrap();
        path
    };
    lens.iter().zip(0..).map(file).collect()
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir_in(std::env::current_exe().unwrap().parent().unwrap()).unwrap()
}

/// Creates a reader with direct I/O. If the file system has none, prints that and returns `None`.
fn direct(records: &Arc<Ranges>, plan: &Plan) -> Option<Reader> {
    Reader::new(records.clone(), plan, ReadMode::Direct)
        .inspect_err(|error| eprintln!("not checked: {error}"))
        .ok()
}

/// Creates a reader for which `left` bytes of memory are left.
fn limited(records: &Arc<Ranges>, plan: &Plan, left: u64) -> Reader {
    let memory = (&Readers::default(), Some(left));
    Reader::with_memory(records.clone(), plan, ReadMode::Auto, memory).unwrap()
}

fn open(paths: &[PathBuf], record: usize) -> Arc<Ranges> {
    Records::open(paths, record).unwrap().ranges()
}

/// Opens new files of these lengths as records of `record` bytes. They vanish with the folder.
fn records(lens: &[usize], record: usize) -> (tempfile::TempDir, Arc<Ranges>) {
    let folder = folder();
    let paths = files(&folder, lens);
    (folder, open(&paths, record))
}

fn window(chunk_records: u64, window_chunks: u64) -> Shuffle {
    Shuffle::Window { chunk_records, window_chunks }
}

fn shuffled(data: &Ranges, batch: u64, shuffle: Shuffle) -> Plan {
    Plan::builder(data.len()).batch(batch).shuffle(shuffle).build().unwrap()
}

/// A new file of records of 4 KiB, their plan in full shuffle, and a reader with direct I/O. If there is none, prints that.
fn direct_of(len: usize, batch: u64) -> Option<(tempfile::TempDir, Arc<Ranges>, Plan, Reader)> {
    let (folder, records) = records(&[len], 4096);
    let plan = shuffled(&records, batch, Shuffle::Full);
    let reader = direct(&records, &plan)?;
    Some((folder, records, plan, reader))
}

fn epoch(plan: Plan, epoch: u64) -> impl Iterator<Item = BatchIndices> + Send + 'static {
    (0..).map_while(move |step| plan.batch(epoch, step))
}

fn read(reader: &Reader, batch: &BatchIndices) -> Vec<u8> {
    let len = usize::try_from(reader.data.size(batch)).unwrap();
    // At several distances from a page or a block.
    let shift = [0, 1, 126, 512][usize::try_from(batch.step() % 4).unwrap()];
    let mut out = vec![0xEE; shift + len + 3];
    assert_eq!(reader.read(batch, &mut out[shift..]).unwrap(), len);
    assert_eq!(out.split_off(shift + len), [0xEE; 3]);
    out.split_off(shift)
}

fn plain(records: &Ranges, batch: &BatchIndices) -> Vec<u8> {
    let mut out = vec![0xEE; usize::try_from(records.size(batch)).unwrap()];
    records.read(batch, &mut out).unwrap();
    out
}

/// Opens the files as records of varying length. Some are empty, and some are longer than a direct read.
fn ragged(folder: &tempfile::TempDir, paths: &[PathBuf]) -> Arc<Ranges> {
    let lens = |(number, path): (u64, &PathBuf)| {
        let lens = (0_u64..).map(move |record| match (record * 31 + number) % 19 {
            0..3 => 0,
            18 => 150_000,
            short => short * 137,
        });
        let index = folder.path().join(format!("{number}.idx.npy"));
        let bytes = std::fs::metadata(path).unwrap().len();
        std::fs::write(&index, twinbuf_testing::offsets(bytes, lens)).unwrap();
        index
    };
    let indexes: Vec<_> = (0..).zip(paths).map(lens).collect();
    RaggedRecords::open_indexed(paths.iter().zip(indexes)).unwrap().ranges()
}

/// Reads the batches of an epoch without a reader.
fn plain_epoch(records: &Ranges, plan: Plan, number: u64) -> Vec<Vec<u8>> {
    epoch(plan, number).map(|batch| plain(records, &batch)).collect()
}

/// Reads an epoch, and checks its batches.
fn check_against(expected: &[Vec<u8>], reader: &Reader, plan: Plan, number: u64) {
    reader.begin(epoch(plan.clone(), number));
    for (batch, expected) in epoch(plan.clone(), number).zip(expected) {
        assert!(read(reader, &batch) == *expected, "{:?} {}", plan.shuffle(), batch.step());
    }
}

/// Reads an epoch, and checks every byte.
fn check(reader: &Reader, plan: Plan, number: u64) {
    check_against(&plain_epoch(reader.ranges(), plan.clone(), number), reader, plan, number);
}

/// Checks rows, overlapping windows, windows with gaps, and rows that do not fit the blocks of a
/// disk, in two files and in every order. All data is read through the page cache, or all with
/// direct I/O, or some of each; with the usual prefetch, little or none.
#[test]
fn every_way_to_read_delivers_the_same_bytes() {
    let folder = folder();
    let paths = files(&folder, &[600_000, 1_320_000]);
    let cuts = [
        Cut::Rows,
        Cut::Windows { rows: 700, stride: 300 },
        Cut::Windows { rows: 100, stride: 130 },
        Cut::Windows { rows: 513, stride: 512 },
    ];
    let mut kinds: Vec<_> =
        cuts.iter().map(|cut| Records::open_headerless(&paths, DType::U16, *cut).unwrap().ranges()).collect();
    kinds[0] = open(&paths, 1000);
    kinds.push(open(&paths, 120_000));
    kinds.push(ragged(&folder, &paths));
    for (kind, records) in kinds.iter().enumerate() {
        for (order, shuffle) in [Shuffle::None, Shuffle::Full, Shuffle::Chunks { records: 50 }, window(64, 3)]
            .into_iter()
            .enumerate()
        {
            let plan = Plan::builder(records.len()).batch(70.min(records.len())).shuffle(shuffle);
            let plan = plan.last_batch(LastBatch::Keep).build().unwrap();
            let [three, four] = [3, 4].map(|number| plain_epoch(records, plan.clone(), number));
            let prefetches = [0, 100_000, PREFETCH];
            // Each of them with another order, or all with all.
            let first = (kind + order) % 3;
            for prefetch in prefetches.into_iter().cycle().skip(first).take(twinbuf_testing::extent(1, 3)) {
                let cached = Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap();
                let Some(direct) = direct(records, &plan) else { return };
                let some = Reader {
                    source: Source {
                        // The border between cached and streamed bytes is within a record of the second file.
                        cached: 910_001,
                        stream: direct_stream(records, [1 << 20; 2]),
                        ..Source::default()
                    },
                    ..Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap()
                };
                for mut reader in [cached, direct, some] {
                    reader.ahead.prefetch = prefetch;
                    for (number, expected) in [(3, &three), (3, &three), (4, &four)] {
                        check_against(expected, &reader, plan.clone(), number);
                    }
                    // Read a batch that `begin` did not announce, in two parts.
                    let batch = plan.batch(9, 0).unwrap();
                    let half = batch.len().div_ceil(2);
                    let whole = plain(records, &batch);
                    let parts = [batch.part(0..half), batch.part(half..batch.len())];
                    let parts: Vec<u8> =
                        parts.iter().flatten().flat_map(|part| read(&reader, part)).collect();
                    assert!(parts == whole);
                }
            }
        }
    }
}

fn direct_stream(records: &Ranges, room: [u64; 2]) -> Option<Stream> {
    let files =
        records.shards().iter().map(|shard| direct::Direct::open(&shard.file, &mut Vec::new()).unwrap());
    Some(Stream::new(files.collect(), room))
}

/// The chunks of a window are read once and as a whole, for chunks of any length.
#[test]
fn a_window_is_read_once() {
    let folder = folder();
    let paths = files(&folder, &[3072 * 20_000]);
    let records = open(&paths, 3072);
    let mut calls = Vec::new();
    for chunk in [341, 350, 512] {
        let plan = Plan::builder(records.len()).batch(64).shuffle(window(chunk, 8)).seed(5).build().unwrap();
        let Some(reader) = direct(&records, &plan) else { return };
        let begun = Records::read_calls();
        for number in 0..3 {
            let before = reader.stats().disk;
            check_without_preads(&reader, plan.clone(), number);
            let disk = reader.stats().disk - before;
            // Allow 1% more than the file: chunks begin and end within a block, which is read whole.
            assert!(disk <= 3072 * 20_000 * 101 / 100, "{chunk} {number}: {disk}");
        }
        calls.push(Records::read_calls() - begun);
    }
    assert!(calls.iter().all(|&other| other <= calls[0] * 11 / 10), "{calls:?}");
}

/// What is read directly into the slot is not requested ahead, and the other way round: not if windows have long records,
/// and not if a batch is longer than what is left of the prefetch window, also after the short last batch of an epoch.
#[test]
fn long_runs_are_read_once() {
    let folder = folder();
    let paths = sparse(&folder, &[72 << 20]);
    let read_more = |(record, batch, shuffle): (usize, u64, Shuffle)| {
        let records = open(&paths, record);
        let plan = Plan::builder(records.len()).batch(batch).shuffle(shuffle).last_batch(LastBatch::Keep);
        let plan = plan.build().unwrap();
        let reader = direct(&records, &plan)?;
        let batches = || (0..2).flat_map(|number| epoch(plan.clone(), number)).collect::<Vec<_>>();
        reader.begin(batches());
        batches().iter().for_each(|batch| drop(read(&reader, batch)));
        Some(reader.stats().disk - reader.stats().bytes)
    };
    let windows = [(4 << 20, 2, window(2, 3)), (2 << 20, 4, window(4, 1))];
    let in_order = [6, 7, 10, 11].map(|batch| (1 << 20, batch, Shuffle::None));
    let chunks = (1 << 20, 6, Shuffle::Chunks { records: 12 });
    let found: Vec<_> = windows.into_iter().chain(in_order).chain([chunks]).map(read_more).collect();
    assert!(found.iter().flatten().all(|&more| more == 0), "{found:?}");
}

/// A file that no request reads, because each use opens it: a call for each run, also with windows.
#[test]
fn long_runs_of_reopened_files_are_read_with_one_call() {
    let folder = folder();
    let records = open(&sparse(&folder, &[48 << 20]), 6 << 20);
    for shuffle in [Shuffle::Full, window(2, 2)] {
        let plan = shuffled(&records, 1, shuffle);
        let Some(mut reader) = direct(&records, &plan) else { return };
        reader.source.stream.iter_mut().flat_map(|stream| &mut stream.files).for_each(|of| of.file = None);
        let begun = Records::read_calls();
        check_without_preads(&reader, plan, 0);
        assert_eq!(Records::read_calls() - begun, 8, "{shuffle:?}");
    }
}

/// Chunks that share a block: each is a request of its own, and a request waits for no record of another chunk.
#[test]
fn a_chunk_waits_for_no_other_chunk() {
    let folder = folder();
    let paths = files(&folder, &[12 << 20]);
    let behind = Records::options().header(128).partial(true);
    let windows = |rows, stride| {
        Records::open_headerless(&paths, DType::U16, Cut::Windows { rows, stride }).unwrap().ranges()
    };
    for (records, chunk) in [
        (behind.open(&paths, 3073).unwrap().ranges(), 50),
        (behind.open(&paths, 3072).unwrap().ranges(), 50),
        (behind.open(&paths, 784).unwrap().ranges(), 256),
        (behind.open(&paths, 150_528).unwrap().ranges(), 2),
        (ragged(&folder, &paths), 20),
        (windows(1025, 1024), 70),
        (windows(3000, 1000), 70),
    ] {
        let shuffle = window(chunk, 12);
        let plan = Plan::builder(records.len()).batch(16).shuffle(shuffle).seed(5).build().unwrap();
        let Some(mut reader) = direct(&records, &plan) else { return };
        // The least memory: a window and an eighth, and two requests.
        let (chunk, window) = shuffle.window();
        let room = chunk * window * records.stride() / 8 * 9 + (4 << 20);
        reader.source.stream = direct_stream(&records, [room, 2 << 20]);
        let begun = Records::read_calls();
        check_without_preads(&reader, plan.clone(), 0);
        let (calls, chunks) = (Records::read_calls() - begun, records.len().div_ceil(chunk) + 1);
        assert!(calls <= chunks * 3 / 2, "{plan:?}: {calls} for {chunks} chunks");
        assert!(reader.stats().disk <= (12 << 20) / 20 * 21, "{plan:?}: {:?}", reader.stats());
        check(&reader, plan, 1);
    }
}

/// Records of any length and distance, in any order and with any memory; also epochs that go on after another plan, in which
/// chunks are requested again.
#[test]
fn requests_that_overlap_deliver_the_same_bytes() {
    let folder = folder();
    let paths = files(&folder, &[700_000, 300_001]);
    for seed in 0..twinbuf_testing::extent(40, 400) {
        let mut state = twinbuf_testing::Random(seed as u64);
        let mut random = |most: u64| state.below(most);
        let mut long = || usize::try_from(1 + random(8)).unwrap() * usize::try_from(1 + random(900)).unwrap();
        let (rows, stride) = (long(), long().max(50));
        let header = Records::options().header(random(5000));
        let records = match random(5) {
            0 => ragged(&folder, &paths),
            _ => header.open_headerless(&paths, DType::U8, Cut::Windows { rows, stride }).unwrap().ranges(),
        };
        let chunk = 1 + random(80);
        let shuffle = match random(4) {
            0 => Shuffle::Full,
            1 => Shuffle::Chunks { records: chunk },
            _ => window(chunk, 1 + random(20)),
        };
        let (batch, room) =
            (1 + random(60.min(records.len())), [64 << 10 << random(5), 64 << 10 << random(5)]);
        let plan = Plan::builder(records.len()).batch(batch).shuffle(shuffle).last_batch(LastBatch::Keep);
        let plan = plan.build().unwrap();
        let Some(mut reader) = direct(&records, &plan) else { return };
        reader.source.stream = direct_stream(&records, room);
        reader.ahead.prefetch = 20_000 << random(8);
        check(&reader, plan.clone(), 0);
        let part =
            crate::PartialEpoch { batch: 1 + random(batch), world: 1, steps: random(records.len() / batch) };
        let rest = plan.resume(0, &[part]).unwrap();
        let batches: Vec<_> = (rest.first()..rest.end()).map(|step| rest.batch(1, step).unwrap()).collect();
        reader.begin(batches.clone());
        for batch in batches {
            assert!(read(&reader, &batch) == plain(&records, &batch), "{seed} {plan:?} {}", batch.step());
        }
    }
}

/// Reads an epoch, and does not check its bytes.
fn check_without_preads(reader: &Reader, plan: Plan, number: u64) {
    reader.begin(epoch(plan.clone(), number));
    epoch(plan, number).for_each(|batch| drop(read(reader, &batch)));
}

/// The reader requests more than there is room for. Requested bytes are not given up before their batch is read, and none
/// are requested after that.
#[test]
fn what_is_asked_for_far_ahead_is_read_once() {
    let (_folder, records) = records(&[96 << 20], 64 << 10);
    for batch in [128, 384] {
        let plan = Plan::builder(records.len()).batch(batch).shuffle(Shuffle::Full).seed(5).build().unwrap();
        let Some(mut reader) = direct(&records, &plan) else { return };
        reader.ahead.prefetch = 40 << 20;
        check(&reader, plan, 0);
        assert_eq!(reader.stats().disk, 96 << 20, "{batch}");
    }
}

/// An epoch that is not finished keeps no memory that later epochs need.
#[test]
fn epochs_that_are_left_make_room() {
    let (_folder, records) = records(&[40 << 20], 4096);
    for shuffle in [Shuffle::Full, window(256, 8)] {
        let plan = shuffled(&records, 256, shuffle);
        let Some(reader) = direct(&records, &plan) else { return };
        for number in 0..12 {
            reader.begin(epoch(plan.clone(), number));
            for batch in epoch(plan.clone(), number).take(10) {
                assert!(read(&reader, &batch) == plain(&records, &batch), "{number}");
            }
        }
        let before = reader.stats().disk;
        check(&reader, plan, 12);
        let disk = reader.stats().disk - before;
        assert!(disk <= (40 << 20) * 21 / 20, "{shuffle:?}: {disk}");
    }
}

/// The chunks at the border of two ranks belong to both: each rank reads only a part of their records.
#[test]
fn chunks_that_are_not_read_whole_make_room() {
    let (_folder, records) = records(&[40 << 20], 4096);
    let plan = Plan::builder(records.len()).batch(16).shuffle(window(64, 16)).rank(1, 7).build().unwrap();
    let Some(reader) = direct(&records, &plan) else { return };
    for number in 0..6 {
        check(&reader, plan.clone(), number);
    }
    assert!(reader.stats().disk <= 6 * (40 << 20) / 7 * 2, "{:?}", reader.stats());
}

/// The last batches share chunks with those of other ranks: also a part of one requests its own records alone.
#[test]
fn a_part_of_a_last_batch_requests_nothing_of_other_ranks() {
    let (_folder, records) = records(&[1000 * 4096], 4096);
    for last in [LastBatch::Keep, LastBatch::Wrap] {
        let plan = Plan::builder(records.len()).batch(100).shuffle(window(10, 8)).rank(1, 4).last_batch(last);
        let plan = plan.build().unwrap();
        let Some(mut reader) = direct(&records, &plan) else { return };
        // The window ends within the last batch.
        reader.ahead.prefetch = 130 * 4096;
        check(&reader, plan, 0);
        let stats = reader.stats();
        assert_eq!(stats.disk, stats.bytes, "{last:?}");
    }
}

/// Several threads read the batches of one plan.
#[test]
fn threads_share_what_is_ahead() {
    let (_folder, records) = records(&[8 << 20, 3 << 20], 512);
    for shuffle in [Shuffle::Full, window(100, 20)] {
        let plan = shuffled(&records, 300, shuffle);
        let Some(direct) = direct(&records, &plan) else { return };
        for reader in [direct, limited(&records, &plan, 9 << 20), limited(&records, &plan, 1 << 40)] {
            reader.begin(epoch(plan.clone(), 0));
            std::thread::scope(|scope| {
                for worker in 0..3 {
                    let (reader, records, batches) = (&reader, &records, epoch(plan.clone(), 0));
                    scope.spawn(move || {
                        for batch in batches.skip(worker).step_by(3) {
                            assert!(
                                read(reader, &batch) == plain(records, &batch),
                                "{shuffle:?} {}",
                                batch.step()
                            );
                        }
                    });
                }
            });
        }
    }
}

/// Reads a batch while others read the next `others`, and then the rest of the epoch. Returns the bytes from the disk.
fn read_slowly(reader: &Reader, plan: &Plan, others: u64) -> u64 {
    let slow = plan.batch(0, 0).unwrap();
    let (of, bytes, mut start) = ((&reader.data, &reader.source), reader.data.size(&slow), None);
    reader.begin(epoch(plan.clone(), 0));
    reader.ahead.advance(of, bytes, &mut start, &mut ReadStats::default());
    let check =
        |batch: &BatchIndices| assert!(read(reader, batch) == plain(&reader.data, batch), "{batch:?}");
    (1..=others).for_each(|step| check(&plan.batch(0, step).unwrap()));
    let (extents, mut out) = (reader.data.extents(slow.runs()), vec![0; usize::try_from(bytes).unwrap()]);
    reader.source.fill(reader.data.shards(), extents, bytes, &mut out, &mut ReadStats::default()).unwrap();
    assert!(out == plain(&reader.data, &slow));
    reader.ahead.advance(of, bytes, &mut start, &mut ReadStats::default());
    (others + 1..plan.steps(0)).for_each(|step| check(&plan.batch(0, step).unwrap()));
    reader.stats().disk
}

/// A thread is still reading a batch when others have read more than there is room for: nothing is read twice. With a
/// windowed shuffle, chunks that find no room in the meantime are.
#[test]
fn a_slow_read_keeps_what_was_requested_for_it() {
    let (_folder, records) = records(&[48 << 20], 4096);
    for (shuffle, batch, others, most) in
        [(Shuffle::Full, 1024, 6, 48 << 20), (window(16, 64), 256, 24, 56 << 20)]
    {
        let plan = shuffled(&records, batch, shuffle);
        let Some(reader) = direct(&records, &plan) else { return };
        let disk = read_slowly(&reader, &plan, others);
        assert!(disk <= most, "{shuffle:?}: {disk}");
    }
}

/// A thread that has taken a batch may begin to read it after others have read the next ones.
#[test]
fn a_late_read_finds_what_was_requested_for_it() {
    // In the meantime, others read 3 MiB, or 16 MiB.
    for (batch, late) in [(256, vec![21, 22, 23, 20]), (2048, vec![2, 3, 1])] {
        let Some((_folder, records, plan, reader)) = direct_of(48 << 20, batch) else { return };
        reader.begin(epoch(plan.clone(), 0));
        let [first, last] = [late.iter().min(), late.iter().max()].map(|step| *step.unwrap());
        for step in (0..first).chain(late).chain(last + 1..plan.steps(0)) {
            let batch = plan.batch(0, step).unwrap();
            assert!(read(&reader, &batch) == plain(&records, &batch), "{step}");
        }
        assert_eq!(reader.stats().disk, 48 << 20, "{batch}");
    }
}

/// A request has bytes of many records. If it fails, those are read alone.
#[test]
fn a_failed_request_fails_no_record_that_can_be_read() {
    let (_folder, records) = records(&[24 << 20], 4096);
    let orders = [Shuffle::None, Shuffle::Full, window(256, 3)];
    for shuffle in orders {
        let plan = shuffled(&records, 64, shuffle);
        let Some(direct) = direct(&records, &plan) else { return };
        for reader in [direct, limited(&records, &plan, 20 << 20)] {
            // `None` for the second reader if the files live in memory.
            let Some(stream) = &reader.source.stream else { continue };
            // Fail every request that is longer than a record or has the byte at `bad`.
            stream.state.lock().unwrap().queue = queue::Queue::by(|file, out, at| {
                let bad = (3 << 20) + 5 * 4096 + 77;
                if out.len() > 4096 || (at..at + out.len() as u64).contains(&bad) {
                    return Err(std::io::ErrorKind::Other.into());
                }
                crate::file::read_at(file, out, at)
            });
            for number in 0..2 {
                check(&reader, plan.clone(), number);
            }
        }
    }
}

/// Reads batches that `begin` did not announce, and returns how many of their bytes were read alone, without the stream.
fn read_alone(reader: &Reader, plan: &Plan, steps: std::ops::Range<u64>) -> u64 {
    let before = lock(&reader.source.stats).disk;
    for batch in steps.map(|step| plan.batch(0, step).unwrap()) {
        assert!(read(reader, &batch) == plain(reader.ranges(), &batch), "{}", batch.step());
    }
    lock(&reader.source.stats).disk - before
}

/// A batch that fails leaves requests that nobody takes. Later requests get their memory, also without a call of `begin`.
#[test]
fn a_failed_batch_keeps_no_memory() {
    let Some((_folder, records, plan, reader)) = direct_of(96 << 20, 256) else { return };
    let last = records.len() - 1;
    let order: Vec<u64> = std::iter::once(last).chain((1..256).map(|at| at * 3)).collect();
    let failing =
        Plan::builder(records.len()).batch(256).records(crate::RecordList::from(order)).build().unwrap();
    let file = File::options().write(true).open(&records.shards()[0].file.path).unwrap();
    file.set_len(last * 4096).unwrap();
    let left = plan.with_records(0..last).unwrap();
    reader.read(&failing.batch(0, 0).unwrap(), &mut vec![0; 256 * 4096]).unwrap_err();
    // Some records are read alone until the requests are given up.
    assert!(read_alone(&reader, &left, 0..30) <= 128 * 4096);
    assert_eq!(read_alone(&reader, &left, 30..80), 0);
}

/// Another thread reads each batch before the list of `begin` reaches it: the batch is read once and keeps no memory.
#[test]
fn a_batch_that_is_read_before_its_turn_keeps_no_memory() {
    let Some((_folder, records, plan, mut reader)) = direct_of(96 << 20, 256) else { return };
    reader.ahead.prefetch = 0;
    reader.begin(epoch(plan.clone(), 0).take(40));
    for batch in epoch(plan.clone(), 0).take(40) {
        let extents: Vec<_> = records.extents(batch.runs()).map(Result::unwrap).collect();
        reader.source.stream.as_ref().unwrap().ask_now(extents.iter());
        assert!(read(&reader, &batch) == plain(&records, &batch), "{}", batch.step());
    }
    assert_eq!((reader.stats().disk, read_alone(&reader, &plan, 40..80)), (40 << 20, 0));
}

/// Creates files of these lengths without data: they take no space on the disk.
fn sparse(folder: &tempfile::TempDir, lens: &[u64]) -> Vec<PathBuf> {
    let file = |(number, len): (usize, &u64)| {
        let path = folder.path().join(format!("sparse-{number}"));
        File::create(&path).unwrap().set_len(*len).unwrap();
        path
    };
    lens.iter().enumerate().map(file).collect()
}

#[test]
fn readers_of_a_process_share_its_memory() {
    const GIB: u64 = 1 << 30;
    let folder = folder();
    let readers = Readers::default();
    let memory = (&readers, Some(24 * GIB));
    let halves = sparse(&folder, &[14 * GIB, 14 * GIB]);
    let plan = |data: &Ranges| shuffled(data, 64, Shuffle::Full);
    let reader = |paths: &[PathBuf]| {
        let data = open(paths, 1 << 20);
        let plan = plan(&data);
        Reader::with_memory(data, &plan, ReadMode::Auto, memory).unwrap()
    };
    let one = reader(&halves);
    if one.source.stream.is_none() {
        return eprintln!("not checked: no direct I/O");
    }
    let (cached, room) = (one.choice().cached, one.memory());
    assert_eq!(cached, 24 * GIB / 16 * 15 - (32 << 20));
    // A second reader of the same data shares the cached bytes. Only its stream takes more memory.
    let again = reader(&halves);
    assert!((cached - room..=cached).contains(&again.choice().cached), "{again:?}");
    drop((one, again));
    // Two readers, each of half of one data set, as for training and validation, together get what one reader of all of
    // it gets.
    let data = open(&halves, 1 << 20);
    let (plan, half) = (plan(&data), data.len() / 2);
    let part = |records| {
        let plan = plan.with_records(records).unwrap();
        Reader::with_memory(data.clone(), &plan, ReadMode::Auto, memory).unwrap()
    };
    let loops = [part(0..half), part(half..2 * half)];
    let found = loops.each_ref().map(|reader| reader.choice().cached);
    println!("28 GiB, 24 GiB left: two loops {found:?}");
    assert_eq!((found[0], found.iter().sum()), (14 * GIB, cached));
    drop(loops);
    let both = [reader(&halves[..1]), reader(&halves[1..])];
    let found = both.each_ref().map(|reader| reader.choice().cached);
    println!("28 GiB, 24 GiB left: one {cached}, two fields {found:?}");
    assert_eq!((found[0], found.iter().sum()), (14 * GIB, cached));
    assert_eq!(both[1].choice().left, Some(10 * GIB));
    // A third reader gets no memory. When the two others are dropped, it does.
    let third = sparse(&folder, &[14 * GIB, 14 * GIB, GIB]);
    assert_eq!(reader(&third[2..]).choice().cached, 0);
    drop(both);
    assert_eq!(reader(&third[2..]).choice().cached, GIB);
    // The buffers of a reader that reads everything past the page cache count too.
    let past = Reader::with_memory(data, &plan, ReadMode::Direct, memory).unwrap();
    assert_eq!(reader(&third[2..]).choice().left, Some(24 * GIB - past.memory()));
}

/// Direct I/O would copy what is in memory already.
#[cfg(target_os = "linux")]
#[test]
fn files_that_live_in_memory_are_read_there() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return eprintln!("not checked: no /dev/shm") };
    let records = open(&sparse(&folder, &[64 << 20]), 4096);
    if !records.shards()[0].file.kept.as_ref().is_some_and(|file| crate::system::lives_in_memory(file)) {
        return eprintln!("not checked: /dev/shm is no tmpfs");
    }
    let plan = shuffled(&records, 64, Shuffle::Full);
    let reader = limited(&records, &plan, 32 << 20);
    assert_eq!((reader.choice().cached, reader.memory()), (64 << 20, 0));
}

/// Sparse files may have 2^63 bytes each. Three readers count on more than 2^64 bytes, and a window is all of its data.
#[cfg(target_os = "linux")]
#[test]
fn sums_of_the_largest_files_do_not_overflow() {
    let Ok(folder) = tempfile::tempdir_in("/dev/shm") else { return eprintln!("not checked: no /dev/shm") };
    let (readers, mut kept) = (Readers::default(), Vec::new());
    for set in 0..3 {
        let paths = [0, 1, 2].map(|file| folder.path().join(format!("{set}-{file}")));
        for path in &paths {
            if let Err(error) = File::create(path).unwrap().set_len(5 << 60) {
                return eprintln!("not checked: {error}");
            }
        }
        let records = open(&paths, 4096);
        let plan = shuffled(&records, 64, window(1, u64::MAX));
        for mode in [ReadMode::Auto, ReadMode::Direct] {
            let memory = (&readers, Some(1 << 30));
            let Ok(reader) = Reader::with_memory(records.clone(), &plan, mode, memory) else { continue };
            assert_eq!(reader.choice().data, 15 << 60);
            kept.push(reader);
        }
    }
}

/// A model of one and a half times the memory keeps a part of it.
#[cfg(feature = "safetensors")]
#[test]
fn a_model_keeps_a_part() {
    const GIB: u64 = 1 << 30;
    let folder = folder();
    let path = folder.path().join("model.safetensors");
    let len = usize::try_from(GIB).unwrap();
    let front = twinbuf_testing::safetensors((0..36).map(|at| (at, "U8", [len], len)), []);
    std::fs::write(&path, &front).unwrap();
    File::options().write(true).open(&path).unwrap().set_len(front.len() as u64 + 36 * GIB).unwrap();
    let groups = crate::Tensors::open([&path]).unwrap().groups_by(|name| Some(name.to_owned())).unwrap();
    let reader = |memory| Reader::of_groups_with(groups.clone(), ReadMode::Auto, 2 * GIB, memory).unwrap();
    let readers = Readers::default();
    let model = reader((&readers, Some(24 * GIB)));
    if model.source.stream.is_none() {
        return eprintln!("not checked: no direct I/O");
    }
    let cached = model.choice().cached;
    assert!((20 * GIB..21 * GIB).contains(&cached), "{cached}");
    assert_eq!(model.memory(), Reader::<crate::Groups>::MEMORY);
    // A loader in the same process gets only what the model leaves.
    let data = open(&sparse(&folder, &[8 * GIB]), 1 << 20);
    let plan = Plan::builder(data.len()).batch(64).build().unwrap();
    let loader = Reader::with_memory(data, &plan, ReadMode::Auto, (&readers, Some(24 * GIB))).unwrap();
    assert!(loader.choice().cached < 3 * GIB, "{:?}", loader.choice());
}

#[test]
fn a_readers_memory_does_not_grow_with_the_data() {
    const TIB: u64 = 1 << 40;
    let folder = folder();
    // 128 files of 8 TiB, because a file of ext4 has at most 16 TiB.
    for (files, most) in [(vec![TIB], 33 << 20), (vec![8 * TIB; 128], 37 << 20)] {
        let paths = sparse(&folder, &files);
        let data = open(&paths, 4096);
        let plan = shuffled(&data, 64, Shuffle::Full);
        for mode in [ReadMode::Auto, ReadMode::Direct, ReadMode::Pread] {
            let memory = (&Readers::default(), Some(24 << 30));
            let reader = match Reader::with_memory(data.clone(), &plan, mode, memory) {
                Err(error) => return eprintln!("not checked: {error}"),
                Ok(reader) => reader,
            };
            reader.begin(epoch(plan.clone(), 0));
            let mut out = vec![1; 64 * 4096];
            for step in 0..20 {
                assert_eq!(reader.read(&plan.batch(0, step).unwrap(), &mut out).unwrap(), out.len());
            }
            assert!(out.iter().all(|&byte| byte == 0));
            let around = lock(&reader.ahead.window).around.asked.len() as u64 * 8;
            let tib = files.iter().sum::<u64>() >> 40;
            println!("{tib} TiB, {mode:?}: {} bytes, {around} of them a list", reader.memory());
            assert!(reader.memory() <= most && around <= 4 << 20, "{mode:?}: {} {around}", reader.memory());
            assert!(around == 0 || around < 4096 || reader.memory() >= around, "{mode:?}: {around}");
        }
    }
}

/// Gives an open file another time of change, as a write to it does. Without a check, new numbers
/// would be read by the old header.
#[test]
fn a_file_that_is_written_again_in_place_is_an_error() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20, 1 << 20]);
    let data = open(&paths, 4096);
    let plan = shuffled(&data, 64, Shuffle::Full);
    let modes = [ReadMode::Pread, ReadMode::Direct];
    let reader = |&mode: &ReadMode| Reader::new(data.clone(), &plan, mode).ok();
    let readers: Vec<Reader> = modes.iter().filter_map(reader).collect();
    readers.iter().for_each(|reader| check(reader, plan.clone(), 0));
    let file = File::options().write(true).open(&paths[1]).unwrap();
    file.set_times(std::fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH)).unwrap();
    let mut out = vec![0; 64 * 4096];
    for reader in &readers {
        // Every batch fails, also without a new call of `begin`.
        for (number, step) in [(1, 0), (1, 1), (2, 3)] {
            let error = reader.read(&plan.batch(number, step).unwrap(), &mut out).unwrap_err();
            assert!(matches!(&error, Error::Replaced { path } if *path == paths[1]), "{error}");
        }
    }
}

/// Simulates disks with blocks of 8, 16 and 64 KiB. Offsets, lengths and addresses must be multiples of the block.
#[test]
fn blocks_of_any_size_are_read() {
    let folder = folder();
    let paths = files(&folder, &[3_000_001]);
    for (record, block) in [(1000, 8 << 10), (1000, 16 << 10), (70_000, 16 << 10), (9000, 64 << 10)] {
        let data = Records::options().partial(true).open(&paths, record).unwrap().ranges();
        for shuffle in [Shuffle::None, Shuffle::Full, window(9, 3)] {
            let plan = Plan::builder(data.len()).batch(20.min(data.len())).shuffle(shuffle).build().unwrap();
            let Some(mut reader) = direct(&data, &plan) else { return };
            let stream = reader.source.stream.as_mut().unwrap();
            stream.files[0].block = block.into();
            // The disk accepts only offsets, lengths and addresses that are multiples of its block.
            let queue = match block >> 10 {
                8 => queue::Queue::by(aligned::<{ 8 << 10 }>),
                16 => queue::Queue::by(aligned::<{ 16 << 10 }>),
                _ => queue::Queue::by(aligned::<{ 64 << 10 }>),
            };
            stream.state.lock().unwrap().queue = queue;
            check(&reader, plan, 0);
            assert_eq!(reader.stats().failed, 0);
        }
    }
}

fn aligned<const BLOCK: u64>(file: &File, out: &mut [u8], at: u64) -> std::io::Result<usize> {
    let [len, memory] = [out.len(), out.as_ptr().addr()].map(|number| number as u64);
    assert!([at, len, memory].iter().all(|number| number % BLOCK == 0), "{at} {len} {memory:x}");
    crate::file::read_at(file, out, at)
}

/// A read that fails is an error with its offset. It was tried again alone before.
#[test]
fn a_read_ahead_that_fails_is_an_error_with_its_place() {
    let Some((_folder, records, plan, mut reader)) = direct_of(1 << 20, 16) else { return };
    let (batch, file) = (plan.batch(0, 0).unwrap(), records.shards()[0].path());
    // A descriptor that was opened without read access.
    let unreadable = Arc::new(File::options().append(true).open(file).unwrap());
    let wanted = std::io::Read::read(&mut &*unreadable, &mut [0]).unwrap_err().kind();
    let readable = reader.source.stream.as_mut().unwrap().files[0].file.replace(unreadable).unwrap();
    reader.begin([batch.clone()]);
    let mut out = vec![0; 16 * 4096];
    let Err(Error::Read { path, offset, source }) = reader.read(&batch, &mut out) else {
        panic!("wanted an error")
    };
    assert_eq!((&*path, source.kind(), offset % 4096), (file, wanted, 0));
    reader.source.stream.as_mut().unwrap().files[0].file.replace(readable);
    // The error is told once.
    reader.read(&batch, &mut out).unwrap();
    assert!(out == plain(&records, &batch));
}

/// A forked child uses the reader while reads of its parent are in flight.
#[cfg(target_os = "linux")]
#[test]
fn a_forks_child_reads_alone() {
    let Some((_folder, records, plan, reader)) = direct_of(8 << 20, 256) else { return };
    let batch = |step| plan.batch(0, step).unwrap();
    reader.begin(epoch(plan.clone(), 0));
    let expected = [0, 1, 2].map(|step| plain(&records, &batch(step)));
    assert!(read(&reader, &batch(0)) == expected[0]);
    let mut out = vec![0; 256 * 4096];
    let Some(child) = fork() else {
        leave(|| {
            for (step, expected) in (1..).zip(&expected[1..]) {
                reader.read(&batch(step), &mut out).unwrap();
                assert!(out == *expected);
            }
            drop(reader);
        })
    };
    assert!(read(&reader, &batch(1)) == expected[1] && read(&reader, &batch(2)) == expected[2]);
    ends_well(child);
}

/// A disk with blocks of 4096 bytes reads a hole at the front of a file in smaller blocks, so a larger block is found
/// only later.
#[cfg(target_os = "linux")]
#[test]
fn a_block_that_is_too_small_grows() {
    let folder = folder();
    let paths = files(&folder, &[1 << 20]);
    File::open(&paths[0]).unwrap().sync_all().unwrap();
    let records = Records::options().partial(true).open(&paths, 1000).unwrap().ranges();
    let plan = shuffled(&records, 100, Shuffle::Full);
    let Some(mut reader) = direct(&records, &plan) else { return };
    reader.source.stream.as_mut().unwrap().files[0].block = 128.into();
    check(&reader, plan, 0);
    let direct = &reader.source.stream.as_ref().unwrap().files[0];
    // A file system in memory, such as tmpfs, may read blocks of any size.
    if crate::file::read_at(direct.file.as_ref().unwrap(), &mut [0; 128], 128).is_ok() {
        return eprintln!("not checked: the file system reads blocks of 128 bytes");
    }
    assert!(direct.block() >= 512);
}

#[test]
fn the_share_follows_from_the_memory() {
    const MIB: u64 = 1 << 20;
    let folder = folder();
    let path = folder.path().join("large");
    File::create(&path).unwrap().set_len(1024 * MIB).unwrap();
    let records = open(&[path], 4096);
    let plan = |shuffle| shuffled(&records, 256, shuffle);
    let all = plan(Shuffle::Full);
    if limited(&records, &all, 512 * MIB).source.stream.is_none() {
        return eprintln!("not checked: no direct I/O, or the files live in memory");
    }
    let windows = |chunks| plan(window(256, chunks));
    for (plan, left, cached, memory) in [
        (all.clone(), 2048, 1024, 0),
        (all.clone(), 1093, 1024, 0),
        (all.clone(), 512, 448, 32),
        (windows(64), 512, 405, 76),
        // No room for windows: their records are read one by one.
        (windows(512), 512, 448, 32),
        (all.clone(), 64, 53, 8),
        // Too little memory for reads past the page cache: all data go through it.
        (all.clone(), 12, 1024, 0),
    ] {
        let reader = limited(&records, &plan, left * MIB);
        let choice = reader.choice();
        assert_eq!((choice.data, choice.left), (1024 * MIB, Some(left * MIB)));
        let mib = |bytes: u64| bytes.div_ceil(MIB);
        assert_eq!((mib(choice.cached), mib(reader.memory())), (cached, memory), "{left} {plan:?}");
        assert!(choice.cached == choice.data || choice.cached + reader.memory() <= left * MIB);
    }
    // If a plan has only a part of the records, the bytes before that part do not count as cached.
    let part = all.with_records(records.len() / 2..records.len()).unwrap();
    let reader = limited(&records, &part, 256 * MIB);
    assert_eq!(reader.choice().data, 512 * MIB);
    let cached = reader.source.cached_until(&records.shards()[0]);
    assert_eq!(cached - 512 * MIB, reader.choice().cached);
    // The options set the mode, so the memory that is left does not matter.
    let pread = Reader::new(records.clone(), &all, ReadMode::Pread).unwrap();
    assert_eq!((pread.choice().cached, pread.memory()), (1024 * MIB, 0));
    let direct = direct(&records, &windows(64)).unwrap();
    assert_eq!((direct.choice().cached, direct.memory()), (0, 32 * MIB + 64 * MIB * 9 / 8));
}

/// Checks that copies from the mapping have the same bytes as `pread`, and end after a read that
/// had to wait for the disk.
#[test]
#[cfg(target_os = "linux")]
fn long_records_are_copied_together_while_the_cache_is_warm() {
    const BATCH: usize = 45;
    let folder = folder();
    let paths = files(&folder, &[5_000_050]);
    let records = Records::open(&paths, 100_001).unwrap();
    let plan = shuffled(&records, BATCH as u64, Shuffle::Full);
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Pread).unwrap();
    let mut slot = crate::Buffer::new(BATCH * 100_001).unwrap();
    let mut calls = Vec::new();
    for number in 0..12 {
        if number == 10 {
            records.evict().unwrap();
        }
        let batch = plan.batch(number, 0).unwrap();
        let begun = Records::read_calls();
        assert_eq!(reader.read(&batch, &mut slot).unwrap(), slot.len());
        calls.push((Records::read_calls() - begun, reader.stats().disk));
        assert!(slot[..] == plain(reader.ranges(), &batch), "epoch {number}");
    }
    if !reader.source.copied.is_counted() || calls[9].1 > calls[0].1 || calls[10].1 == calls[9].1 {
        eprintln!("not checked: reads from disks are not counted, or the pages came or stayed by themselves");
        return;
    }
    // While the cache is warm, one call copies the records in the slot's first 4 MiB, and one call each of the others.
    assert!(calls[0].0 > 30 && calls[9].0 < 8 && calls[11].0 > 30, "{calls:?}");
    for number in 12..22 {
        reader.read(&plan.batch(number, 0).unwrap(), &mut slot).unwrap();
    }
    let file = File::options().write(true).open(&paths[0]).unwrap();
    file.set_len(4_000_040).unwrap();
    let error = reader.read(&plan.batch(22, 0).unwrap(), &mut slot).unwrap_err();
    assert!(matches!(error, Error::Truncated { .. }), "{error}");
}

/// A caller asks it while it waits for a batch with a time limit, and a hint may take seconds on a slow disk.
#[test]
fn whether_all_is_in_memory_is_answered_during_a_hint() {
    let (_folder, records) = records(&[1 << 16], 4096);
    let plan = Plan::builder(records.len()).batch(1).build().unwrap();
    let reader = std::sync::Arc::new(limited(&records, &plan, 1 << 40));
    let hint = lock(&reader.ahead.window); // as a read has it while it hints
    let ((answered, answer), asked) = (std::sync::mpsc::channel(), reader.clone());
    std::thread::spawn(move || answered.send(asked.is_in_memory()));
    assert_eq!(answer.recv_timeout(std::time::Duration::from_secs(10)), Ok(false), "it waits for the hint");
    drop(hint);
}

/// A caller asks for them to see what a disk that hangs has done so far.
#[test]
fn figures_are_there_while_a_direct_read_waits() {
    static DISK: Mutex<()> = Mutex::new(());
    let Some((_folder, _, plan, reader)) = direct_of(1 << 20, 64) else { return };
    let queue = queue::Queue::by(|file, out, at| {
        drop(lock(&DISK));
        crate::file::read_at(file, out, at)
    });
    let reader = std::sync::Arc::new(reader);
    let state = || &reader.source.stream.as_ref().unwrap().state;
    state().lock().unwrap().queue = queue;
    let hangs = lock(&DISK);
    let (other, batch) = (reader.clone(), plan.batch(0, 0).unwrap());
    let reads = std::thread::spawn(move || read(&other, &batch));
    while state().try_lock().is_ok() {
        std::thread::yield_now();
    }
    let ((answered, answer), asked) = (std::sync::mpsc::channel(), reader.clone());
    std::thread::spawn(move || answered.send(asked.stats().bytes));
    assert_eq!(answer.recv_timeout(std::time::Duration::from_secs(10)), Ok(0), "they wait for the read");
    drop(hangs);
    assert_eq!(reads.join().unwrap(), plain(reader.ranges(), &plan.batch(0, 0).unwrap()));
}

/// Data that fits in memory is hinted once in an epoch, and not any more once it is in memory. What is read in order is
/// touched ahead, and no page of it is read twice.
#[test]
#[cfg(target_os = "linux")]
fn hints_end_when_everything_is_in_memory() {
    const MIB: u64 = 1 << 20;
    // Up to 48 MiB of a shuffle are hinted before the hints end, because one call hints 16 MiB or more.
    for (order, lens, batch, hinted, disk, most, least) in [
        (Shuffle::Full, &[64 << 20][..], 256, 60..=65, 60..=72, 48, 55),
        (Shuffle::None, &[40 << 20, 24 << 20], 16, 32..=64, 60..=66, 17, 32),
    ] {
        let (_folder, records) = records(lens, 4096);
        records.evict().unwrap();
        let plan = shuffled(&records, batch, order);
        let reader = limited(&records, &plan, 1 << 40);
        if records.residency().unwrap().resident > 0 || !reader.source.copied.is_counted() {
            return eprintln!("not checked: the file system keeps its pages, or does not count reads");
        }
        // The first epoch, three more that find all data in memory, and one that follows an eviction.
        let mut epochs = 0..;
        let mut run = |count| {
            let numbers = epochs.by_ref().take(count);
            numbers.for_each(|number| check_without_preads(&reader, plan.clone(), number));
            reader.stats()
        };
        let [first, warm] = [run(1), run(3)];
        let file = File::open(&records.shards()[0].file.path).unwrap();
        let touches = crate::system::touch(&file, MIB);
        records.evict().unwrap();
        let all = [first, warm, run(1)];
        if order == Shuffle::None && !touches {
            return eprintln!("not checked: no call that reads without waiting");
        }
        let in_mib = |range: std::ops::RangeInclusive<u64>, bytes: u64| {
            (range.start() * MIB..=range.end() * MIB).contains(&bytes)
        };
        assert!(in_mib(hinted, first.hinted) && in_mib(disk, first.disk), "{order:?}: {all:?}");
        assert!(warm.hinted - first.hinted <= most * MIB && warm.disk == first.disk, "{order:?}: {all:?}");
        assert!(all[2].hinted - warm.hinted >= least * MIB, "{order:?}: {all:?}");
    }
}

/// Chunks of 64 KiB in windows of 8: every chunk once, and the first window at once.
#[test]
#[cfg(target_os = "linux")]
fn a_windowed_epoch_is_asked_for_in_chunks() {
    const RECORD: usize = 4096;
    let (_folder, records) = records(&[1024 * RECORD], RECORD);
    let plan = shuffled(&records, 8, window(16, 8));
    // From the middle on, as after resuming, and as a whole.
    for first in [20, 0] {
        let mut reader = Reader::new(records.clone(), &plan, ReadMode::Auto).unwrap();
        reader.ahead.prefetch = 0;
        let batches = plan.clone();
        reader.begin((first..).map_while(move |step| batches.batch(1, step)));
        for step in first..plan.steps(0) {
            read(&reader, &plan.batch(1, step).unwrap());
            let hinted = reader.stats().hinted;
            assert!(hinted >= (8 * 16 * RECORD) as u64, "{first} {step}: {hinted}");
        }
        let hinted = reader.stats().hinted;
        assert!(first > 0 || hinted == records.bytes(), "{hinted}");
    }
}

/// Checks that the kernel reads all bytes of a hint, and not many more.
#[test]
#[cfg(target_os = "linux")]
fn a_long_hint_brings_all_of_its_bytes() {
    const PIECE: usize = 1 << 20;
    let (_folder, records) = records(&[32 * PIECE + 2048], 2048);
    let (shard, page) = (&records.shards()[0], crate::buffer::page_size() as u64);
    let file = File::open(&shard.file.path).unwrap();
    let pages = |bytes: std::ops::Range<u64>| crate::system::cached(&file, bytes).unwrap_or(0);
    let end = shard.bytes.end;
    records.evict().unwrap();
    if crate::system::cached(&file, 0..end).is_err() || pages(0..end) > 0 {
        return eprintln!("not checked: no such call, or the file system keeps its pages");
    }
    let pieces = [(3 << 20, 1 << 20), (8 << 20, 256 << 10), (12 << 20, 4 << 20), (19 << 20, 777_777)];
    // Also hint the end of the file, whose last page is not whole.
    for (at, len) in pieces.into_iter().chain([(end - (300 << 10), 300 << 10)]) {
        let before = pages(0..end);
        let whole = crate::buffer::around(&(at..at + len), end, page);
        cached::hint(records.shards(), &mut vec![Extent::new(0, at..at + len, 0)], &mut ReadStats::default());
        let wanted = (whole.end - whole.start).div_ceil(page);
        assert_eq!(pages(whole), wanted, "{at} {len}");
        assert!(pages(0..end) - before <= wanted, "{at} {len}");
    }
}

/// Each batch is requested once, in order. One read requests at most two further batches, and none outside the window.
/// The first batch alone is requested before it is read.
#[test]
fn the_window_keeps_its_length() {
    let (_folder, records) = records(&[2300], 100);
    for tail in [LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap] {
        for (start, window) in [(0, 0), (0, 100), (0, 300), (0, 1200), (2, 700), (0, u64::MAX)] {
            let plan = Plan::builder(23).batch(5).shuffle(Shuffle::Full).last_batch(tail).build().unwrap();
            let mut reader = Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap();
            reader.ahead.prefetch = window;
            let batches = || epoch(plan.clone(), 0).skip(start);
            let all: u64 = batches().map(|batch| batch.len() * 100).sum();
            reader.begin(batches());
            let mut told = 0;
            let mut used = 0;
            for batch in batches() {
                let bytes = batch.len() * 100;
                read(&reader, &batch);
                // The reader requests later batches after the first read, and before each of the other reads.
                let first = if used == 0 { bytes } else { told };
                used += bytes;
                told = used.max(used.saturating_add(window).min(first + 2 * bytes)).min(all).max(told);
                assert_eq!(
                    lock(&reader.ahead.window).told,
                    told,
                    "{tail:?} {start} {window} {}",
                    batch.step()
                );
            }
        }
    }
}

/// Whole stretches pay only where a list leaves few records out between those that it has.
#[test]
#[cfg(target_os = "linux")]
fn what_a_list_leaves_out_is_not_asked_for() {
    let (_folder, records) = records(&[2048 * 4096], 4096);
    for (step, most) in [(64, 32 * 4096), (4, 2048 * 4096)] {
        let list = crate::RecordList::even(0, step, 2048 / step).unwrap();
        let plan =
            Plan::builder(records.len()).records(list).batch(1).shuffle(Shuffle::Full).build().unwrap();
        let reader = Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap();
        check_without_preads(&reader, plan, 0);
        let hinted = reader.stats().hinted;
        assert!((most * 9 / 10..=most).contains(&hinted), "every {step}th: {hinted} of {most}");
    }
}

/// Files that are shorter than a stretch: each is asked for as a whole, once.
#[test]
#[cfg(target_os = "linux")]
fn each_file_has_stretches_of_its_own() {
    let (_folder, records) = records(&[12 * 4096; 40], 4096);
    let plan = shuffled(&records, 16, Shuffle::Full);
    let reader = Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap();
    check_without_preads(&reader, plan, 0);
    assert_eq!(reader.stats().hinted, records.bytes());
}

/// The system's read-ahead stops at gaps and at the end of a file.
#[test]
#[cfg(target_os = "linux")]
fn gaps_and_the_fronts_of_files_are_asked_for_in_order_too() {
    let folder = folder();
    let paths = files(&folder, &[11 * 4096; 40]);
    let windows = Cut::Windows { rows: 4096, stride: 8192 };
    let windows = Records::open_headerless(&paths, DType::U8, windows).unwrap().ranges();
    for records in [windows, open(&paths, 4096)] {
        let plan = shuffled(&records, 4, Shuffle::None);
        let reader = Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap();
        check_without_preads(&reader, plan, 0);
        assert_eq!(reader.stats().hinted, 40 * 11 * 4096);
    }
}

/// The system's read-ahead continues over gaps that skip no page, if each record is a read of its own.
#[test]
#[cfg(target_os = "linux")]
fn gaps_of_less_than_a_page_are_left_to_the_system() {
    let folder = folder();
    let paths = files(&folder, &[23 * 4096]);
    for (rows, most) in [(8192, 1), (4096, 30)] {
        let windows = Cut::Windows { rows, stride: rows + 4 };
        let records = Records::open_headerless(&paths, DType::U8, windows).unwrap().ranges();
        let plan = shuffled(&records, 1, Shuffle::None);
        let mut reader = Reader::new(records, &plan, ReadMode::Pread).unwrap();
        reader.ahead.stretches = false;
        check_without_preads(&reader, plan, 0);
        assert!((most.min(11)..=most).contains(&reader.stats().hints), "{rows}: {:?}", reader.stats());
    }
}

#[test]
fn what_goes_on_where_the_last_ended_is_left_to_the_system() {
    let (_folder, records) = records(&[23 * 4096], 4096);
    let hinted = |order, (rank, world)| {
        let plan = Plan::builder(23).batch(3).shuffle(order).rank(rank, world).build().unwrap();
        let mut reader = Reader::new(records.clone(), &plan, ReadMode::Pread).unwrap();
        // As with many ranks, hints are only for the records themselves and not for the bytes around them.
        reader.ahead.stretches = false;
        for number in 0..2 {
            check_without_preads(&reader, plan.clone(), number);
        }
        reader.stats().hinted / 4096
    };
    if cfg!(not(target_os = "linux")) {
        return;
    }
    // Without a shuffle, a single rank continues where it was: only the front of the file is requested, in each epoch. One
    // of two ranks starts every batch at a new place.
    assert_eq!(hinted(Shuffle::None, (0, 1)), 2 * 3);
    assert_eq!(hinted(Shuffle::None, (1, 2)), 2 * 2 * 3);
    let chunks = hinted(Shuffle::Chunks { records: 6 }, (0, 1));
    assert!((3..=2 * 21).contains(&chunks), "{chunks}");
}
