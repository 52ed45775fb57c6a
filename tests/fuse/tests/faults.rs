//! At every call in turn the file system delays, fails or truncates. Batches must be correct and in order, up to one
//! error with its path and, if a read fails, its offset. Nothing waits beyond a timeout, no hint waits, and no read
//! is silently repeated.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::task::Poll;
use std::time::Duration;

use tempfile::TempDir;
use twinbuf::mmap::{ReadMode, Reader};
use twinbuf::{Error, Loader, Plan, Records, Shuffle, mmap};
use twinbuf_fuse::{Caching, Call, Fault, Mounted};

const RECORD: usize = 40_000;
const RECORDS: u64 = 24;
const FILES: usize = 2;
const BATCH: u64 = 3;
/// The length to which [`Fault::Truncate`] cuts a file: inside a record.
const CUT: usize = 7 * RECORD + 100;
/// A test that takes longer hangs, and fails.
const HANGS: Duration = Duration::from_secs(120);

/// How the files are read: with the kernel's cache, without it, and by direct reads.
const WAYS: [(Caching, ReadMode); 3] = [
    (Caching::Pages, ReadMode::Pread),
    (Caching::Nothing, ReadMode::Pread),
    (Caching::Pages, ReadMode::Direct),
];

fn record(number: u64) -> Vec<u8> {
    (0..RECORD as u64).map(|byte| (number * 31 + byte % 251) as u8).collect()
}

fn contents() -> Vec<Vec<u8>> {
    let each = RECORDS / FILES as u64;
    (0..FILES as u64).map(|file| (file * each..(file + 1) * each).flat_map(record).collect()).collect()
}

/// A file system and its folder. The folder is removed after it.
struct Fixture {
    system: Mounted,
    folder: TempDir,
}

impl Fixture {
    /// `None`, with a message, if there is no FUSE.
    fn new(caching: Caching, background: u16) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        match Mounted::new(folder.path(), contents(), caching, background) {
            Err(error) => {
                assert!(std::env::var_os("TWINBUF_FUSE").is_none(), "{error}");
                eprintln!("not checked: FUSE: {error} (TWINBUF_FUSE=1 makes this a failure)");
                None
            }
            Ok(system) => Some(Self { system, folder }),
        }
    }

    fn paths(&self) -> Vec<PathBuf> {
        (0..FILES).map(|file| self.folder.path().join(format!("{file}.bin"))).collect()
    }

    fn open(&self) -> Result<Records, mmap::Error> {
        Records::open(self.paths(), RECORD)
    }
}

/// Shuffled: hints and reads are both at work.
fn plan() -> Plan {
    Plan::builder(RECORDS).batch(BATCH).shuffle(Shuffle::Full).seed(5).build().unwrap()
}

fn loader(records: Records, mode: ReadMode, overlap: bool) -> Result<Loader, Error> {
    Loader::builder(Arc::new(records), plan()).depth(3).read_mode(mode).overlap(overlap).build()
}

/// The bytes of a batch.
fn expected(step: u64) -> Vec<u8> {
    plan().batch(0, step).unwrap().runs().flatten().flat_map(record).collect()
}

/// Runs `case` on another thread, and fails if it does not end.
fn in_time(what: String, case: impl FnOnce() -> bool + Send + 'static) -> bool {
    let (sender, receiver) = channel();
    std::thread::spawn(move || sender.send(case()));
    match receiver.recv_timeout(HANGS) {
        Ok(result) => result,
        Err(std::sync::mpsc::RecvTimeoutError::Timeout) => panic!("{what}: hangs"),
        Err(_) => panic!("{what}: failed"),
    }
}

/// Checks one error of a file: its path, the byte at which it occurred and the system's number, where it has them.
fn check_error(error: &mmap::Error, fixture: &Fixture, fault: Fault) -> (PathBuf, Option<u64>) {
    let number = |source: &std::io::Error| {
        let Fault::Error(number) = fault else { panic!("{error:?}") };
        assert_eq!(source.raw_os_error(), Some(number), "{error:?}");
    };
    let (path, offset) = match error {
        mmap::Error::Read { path, offset, source } => {
            number(source);
            (path, Some(*offset))
        }
        mmap::Error::Open { path, source } | mmap::Error::System { path, source, .. } => {
            number(source);
            (path, None)
        }
        mmap::Error::Truncated { path, offset, .. } | mmap::Error::Ragged { path, offset, .. } => {
            assert_eq!(fault, Fault::Truncate(CUT), "{error:?}");
            (path, Some(*offset))
        }
        _ => panic!("{error:?}"),
    };
    assert!(fixture.paths().contains(path), "{error:?}");
    assert!(error.to_string().starts_with(&format!("{path:?}: ")), "{error}");
    (path.clone(), offset)
}

/// Whether one of the batch's records has this byte.
fn in_batch(step: u64, fixture: &Fixture, path: &PathBuf, offset: u64) -> bool {
    let file = fixture.paths().iter().position(|other| other == path).unwrap() as u64;
    let each = RECORDS / FILES as u64;
    plan().batch(0, step).unwrap().runs().flatten().any(|record| {
        let start = (record % each) * RECORD as u64;
        record / each == file && (start..=start + RECORD as u64).contains(&offset)
    })
}

/// Returns whether the fault occurred.
fn one_case(caching: Caching, mode: ReadMode, overlap: bool, call: usize, fault: Fault) -> bool {
    let Some(fixture) = Fixture::new(caching, 12) else { return false };
    fixture.system.fail_after(call, fault);
    let records = match fixture.open() {
        Err(error) => {
            check_error(&error, &fixture, fault);
            return true;
        }
        // A file that is shorter when it is opened may be valid.
        Ok(records) if records.len() < RECORDS => panic!("{} records", records.len()),
        Ok(records) => records,
    };
    let mut loader = match loader(records, mode, overlap) {
        Err(Error::Open(error)) => {
            check_error(&error, &fixture, fault);
            return true;
        }
        Err(Error::Fingerprint(source)) => {
            check_error(source.downcast_ref().expect("an error of the files"), &fixture, fault);
            return true;
        }
        loader => loader.unwrap(),
    };
    for epoch in [0, 1] {
        let before = fixture.system.happened();
        let mut failed = false;
        for (step, batch) in (0_u64..).zip(loader.epoch(epoch)) {
            assert!(!failed, "a batch after the error");
            match batch {
                Ok(batch) if epoch == 0 => assert!(*batch == *expected(step), "step {step}: other bytes"),
                Ok(batch) => assert_eq!(batch.step(), step),
                Err(Error::Load { at, source }) => {
                    failed = true;
                    assert_eq!((at.epoch, at.step), (epoch, Some(step)));
                    let error = source.downcast_ref::<mmap::Error>().expect("an error of the files");
                    let (path, offset) = check_error(error, &fixture, fault);
                    if let (0, Some(offset)) = (epoch, offset) {
                        assert!(in_batch(step, &fixture, &path, offset), "{error}: not in step {step}");
                    }
                    // A single error is reported immediately: the read was not repeated.
                    let happened = fixture.system.happened();
                    if let (Caching::Nothing, 0, Some(read @ Call::Read(..))) = (caching, epoch, happened) {
                        let repeated = fixture.system.calls()[call + 1..].contains(&read);
                        assert!(!repeated || matches!(fault, Fault::Truncate(_)), "{read:?} again");
                    }
                }
                Err(error) => panic!("{error:?}"),
            }
        }
        // Without a cache nothing hides a failed read. (The kernel repeats a failed read-ahead that it started itself.)
        let happened = fixture.system.happened();
        if let (Caching::Nothing, 0, Some(Call::Read(..)), Fault::Error(_)) =
            (caching, epoch, happened, fault)
        {
            assert!(failed, "the error of {happened:?} got lost");
        }
        if let (Some(_), Fault::Truncate(_), 1) = (before, fault, epoch) {
            // Unless the whole file was read before it was truncated, and nobody has read it since.
            let file = fixture.system.happened().expect("before").file();
            let asked = fixture.system.calls()[call + 1..].iter().any(|later| match *later {
                Call::Read(other, offset) => Some(other) == file && offset >= CUT as u64,
                other => other.file() == file,
            });
            assert!(failed || !asked, "a truncated file is read to its end");
        }
    }
    loader.close().unwrap();
    fixture.system.happened().is_some()
}

#[test]
fn every_call_fails_in_turn() {
    let mut cases = 0;
    for (caching, mode) in WAYS {
        for overlap in [false, true] {
            for fault in [Fault::Error(libc::EIO), Fault::Error(libc::ESTALE), Fault::Truncate(CUT)] {
                for call in 0.. {
                    let what = format!("{caching:?}, {mode:?}, overlap {overlap}, {fault:?} at call {call}");
                    if !in_time(what, move || one_case(caching, mode, overlap, call, fault)) {
                        break;
                    }
                    cases += 1;
                }
            }
        }
    }
    println!("{cases} cases");
}

#[test]
fn every_read_is_delayed_in_turn() {
    let mut cases = 0;
    for (caching, mode) in WAYS {
        for call in 0.. {
            let what = format!("{caching:?}, {mode:?}, call {call} delayed");
            if !in_time(what, move || delayed(caching, mode, call)) {
                break;
            }
            cases += 1;
        }
    }
    println!("{cases} cases");
}

/// Returns whether there was such a call.
fn delayed(caching: Caching, mode: ReadMode, call: usize) -> bool {
    let Some(fixture) = Fixture::new(caching, 12) else { return false };
    let mut loader = loader(fixture.open().unwrap(), mode, true).unwrap();
    fixture.system.fail_after(call, Fault::Delay);
    let mut epoch = loader.epoch(0);
    let (mut step, mut waited) = (0, false);
    loop {
        match epoch.next_timeout(Duration::from_millis(5)) {
            // The call returned although nobody answers.
            Poll::Pending if fixture.system.holds() => {
                waited = true;
                fixture.system.release();
            }
            Poll::Pending => {}
            Poll::Ready(None) => break,
            Poll::Ready(Some(batch)) => {
                assert!(*batch.unwrap() == *expected(step), "step {step}: other bytes");
                step += 1;
            }
        }
    }
    assert_eq!(step, RECORDS / BATCH);
    drop(epoch);
    // Work that nobody waited for, such as a hinted page, may remain.
    let happened = fixture.system.happened().is_some();
    fixture.system.release();
    loader.close().unwrap();
    happened || waited
}

/// A request ahead could block in this file system. Past the page cache, nothing is requested: each record is read once.
#[test]
fn windows_are_not_requested_ahead_past_the_page_cache() {
    let Some(fixture) = Fixture::new(Caching::Pages, 12) else { return };
    let records = fixture.open().unwrap();
    let shuffle = Shuffle::Window { chunk_records: 4, window_chunks: 2 };
    let plan = Plan::builder(RECORDS).batch(BATCH).shuffle(shuffle).build().unwrap();
    let reader = Reader::new(Arc::new(records).ranges(), &plan, ReadMode::Direct).unwrap();
    let batches: Vec<_> = (0..plan.steps(0)).filter_map(|step| plan.batch(0, step)).collect();
    reader.begin(batches.clone());
    let mut out = vec![0; RECORD * BATCH as usize];
    for batch in batches {
        reader.read(&batch, &mut out).unwrap();
        assert!(out == batch.runs().flatten().flat_map(record).collect::<Vec<_>>());
    }
    assert_eq!(reader.stats().disk, RECORDS * RECORD as u64);
}

/// More is hinted than the kernel keeps in flight for a file system, and nothing is answered.
#[test]
fn hints_wait_for_nothing() {
    let Some(fixture) = Fixture::new(Caching::Pages, 1) else { return };
    let fixture = Arc::new(fixture);
    // The first file is on another file system, whose hints do not wait.
    let folder = tempfile::tempdir().unwrap();
    let mut paths = fixture.paths();
    paths[0] = folder.path().join("0.bin");
    std::fs::write(&paths[0], &contents()[0]).unwrap();
    let records = Arc::new(Records::open(paths, RECORD).unwrap());
    fixture.system.fail_after(0, Fault::Delay);
    let (sender, receiver) = channel();
    let thread = std::thread::spawn(move || {
        // No batch is read before hints were sent for all of them, except one of zero bytes, which fails.
        let plan = Plan::builder(RECORDS).batch(RECORDS / 2).shuffle(twinbuf::Shuffle::Full).build().unwrap();
        let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
        let ahead = plan.clone();
        reader.begin((0..2).filter_map(move |step| ahead.batch(0, step)));
        let refused = reader.read(&plan.batch(0, 0).unwrap(), &mut []);
        let _ = sender.send((reader.stats(), refused.is_err()));
        records
    });
    let hinted = receiver.recv_timeout(HANGS);
    fixture.system.release();
    let records = thread.join().unwrap();
    let (hinted, refused) = hinted.expect("the hints wait for an answer");
    assert!(refused);
    println!("{hinted:?}");
    // Of the first file alone, in whole pages.
    assert!((1..=contents()[0].len() as u64 + 4096).contains(&hinted.hinted), "{hinted:?}");
    let mut out = vec![0; RECORD * RECORDS as usize];
    let all = Plan::builder(RECORDS).batch(RECORDS).build().unwrap().batch(0, 0).unwrap();
    records.read(&all, &mut out).unwrap();
    assert!(out == contents().concat());
}
