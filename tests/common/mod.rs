//! Shared by the integration tests: files of known records, data sets that fail or wait at a chosen place, and a task
//! that nobody runs.

#![allow(dead_code, unreachable_pub, clippy::cast_possible_truncation)] // each test binary uses its part

#[cfg(unix)]
pub mod forked;
pub mod model;
pub mod trace;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use twinbuf::loader::At;
use twinbuf::loader::Backend;
use twinbuf::mmap::{ReadMode, Reader};
use twinbuf::pipe::{Front, Items};
use twinbuf::{
    BatchIndices, BoxError, Checkpoint, Dataset, Error, LastBatch, Loader, Plan, Records, Shuffle, mmap,
};

/// An example's program. `cargo test` builds it in the folder `examples` beside that of the tests.
pub fn example(name: &str) -> Command {
    let test = std::env::current_exe().unwrap();
    Command::new(test.ancestors().nth(2).unwrap().join("examples").join(name))
}

/// Longer than anything takes in these tests. Only a failing test waits this long.
pub const LONG: Duration = Duration::from_secs(300);

/// Lets other threads run until this is so.
#[track_caller]
pub fn until(mut is_so: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is_so() {
        assert!(began.elapsed() < LONG, "it never comes");
        std::thread::yield_now();
    }
}

/// Lets the other threads run, to expose a thread that does not wait when it should. Only briefly: on a busy processor
/// each call waits for everything else that runs there.
pub fn yield_often() {
    let began = Instant::now();
    for _ in 0..2000 {
        std::thread::yield_now();
        if began.elapsed() > Duration::from_millis(20) {
            return;
        }
    }
}

/// Uses a processor for this long.
pub fn busy(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

/// Bytes of a record in these tests.
pub const RECORD: usize = 512;

/// Record `i` of every file set: its number, followed by bytes that depend on it.
pub fn record(i: u64) -> Vec<u8> {
    let mut bytes = i.to_le_bytes().to_vec();
    bytes.extend((8..RECORD).map(|k| (i as u8).wrapping_mul(31).wrapping_add(k as u8)));
    bytes
}

/// A folder for files of a test.
pub fn folder() -> TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// The names in a folder, sorted.
pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// A file of this name with these bytes, in a folder of its own.
pub fn written(name: &str, bytes: impl IntoIterator<Item = u8>) -> (TempDir, PathBuf) {
    let folder = folder();
    let path = folder.path().join(name);
    std::fs::write(&path, Vec::from_iter(bytes)).unwrap();
    (folder, path)
}

/// Files with these numbers of records.
pub fn files(shards: &[u64]) -> (TempDir, Vec<PathBuf>) {
    let dir = folder();
    let mut first = 0;
    let paths = shards
        .iter()
        .enumerate()
        .map(|(i, &records)| {
            let path = dir.path().join(format!("{i}.bin"));
            let bytes: Vec<u8> = (first..first + records).flat_map(record).collect();
            std::fs::write(&path, bytes).unwrap();
            first += records;
            path
        })
        .collect();
    (dir, paths)
}

/// A plan that takes the records in their order, and leaves a partial batch out.
pub fn in_order(records: u64, batch: u64) -> Plan {
    Plan::builder(records).batch(batch).build().unwrap()
}

/// A plan that shuffles single records and keeps the partial batch.
pub fn plan(records: u64, batch: u64) -> Plan {
    Plan::builder(records)
        .batch(batch)
        .seed(7)
        .shuffle(Shuffle::Full)
        .last_batch(LastBatch::Keep)
        .build()
        .unwrap()
}

pub fn open(paths: &[PathBuf]) -> Arc<Records> {
    Arc::new(Records::open(paths, RECORD).unwrap())
}

/// `Auto` and, if the system has it, `Direct`; otherwise prints a message.
pub fn modes(data: &Arc<Records>) -> Vec<ReadMode> {
    let plan = Plan::builder(data.len()).build().unwrap();
    match Reader::new(data.ranges(), &plan, ReadMode::Direct) {
        Err(
            error @ (mmap::Error::System { call: "open(O_DIRECT)", .. } | mmap::Error::Unsupported { .. }),
        ) => {
            eprintln!("not checked: {error}");
            vec![ReadMode::Auto]
        }
        reader => {
            reader.unwrap();
            vec![ReadMode::Auto, ReadMode::Direct]
        }
    }
}

/// The place of a batch of an unnamed loader.
pub fn at(epoch: u64, step: u64) -> At {
    At { loader: None, epoch, step: Some(step) }
}

/// Calls `drive` while an iterator has nothing yet.
pub fn driven<F: Front>(
    items: &mut Items<'_, F>,
    mut drive: impl FnMut(),
) -> impl Iterator<Item = Result<F::Item, Error>> {
    std::iter::from_fn(move || {
        loop {
            match items.try_next() {
                Poll::Ready(found) => return found,
                Poll::Pending => drive(),
            }
        }
    })
}

/// Copies the batches of an epoch.
pub fn batches(loader: &mut Loader, epoch: u64) -> Vec<Vec<u8>> {
    loader.epoch(epoch).map(|batch| batch.unwrap().to_vec()).collect()
}

/// The checkpoint as it would be read back later.
pub fn saved(checkpoint: &Checkpoint) -> Checkpoint {
    serde_json::from_str(&serde_json::to_string(checkpoint).unwrap()).unwrap()
}

/// Checks the error of `option` for `slots` slots of at least `each` bytes. Returns what the error names after their sum.
pub fn more_than_memory(error: &Error, option: &str, slots: usize, each: u128) -> String {
    let Error::Option { option: found, wanted, found: bytes } = error else { panic!("{error:?}") };
    assert_eq!((*found, wanted.contains("bytes of memory")), (option, true), "{wanted}");
    let (bytes, slots_of) = bytes.split_once(" bytes: ").unwrap();
    assert!(bytes.parse::<u128>().unwrap() >= slots as u128 * each, "{error}");
    slots_of.strip_prefix(&format!("{slots} ")).unwrap_or_else(|| panic!("{error}")).to_string()
}

/// Records without a file: their number, the bytes of each, and what reads a batch. Each worker has a clone of it.
#[derive(Clone)]
pub struct Reads<F>(pub u64, pub usize, pub F);

impl<F> Dataset for Reads<F>
where
    F: FnMut(&BatchIndices, &mut [u8]) -> Result<(), BoxError> + Clone + Send + 'static,
{
    fn records(&self) -> u64 {
        self.0
    }

    fn record_bytes(&self) -> usize {
        self.1
    }

    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        (self.2)(batch, out).map(|()| out.len())
    }

    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
}

/// Reads records of 8 bytes: record `i` is the number `i`.
pub fn numbers(batch: &BatchIndices, out: &mut [u8]) -> Result<(), BoxError> {
    for (record, out) in batch.runs().flatten().zip(out.chunks_exact_mut(8)) {
        out.copy_from_slice(&record.to_le_bytes());
    }
    Ok(())
}

/// Reads nothing.
pub fn nothing(_: &BatchIndices, _: &mut [u8]) -> Result<(), BoxError> {
    Ok(())
}

/// Counts wakes and sends a message for each.
pub struct Woken(pub AtomicU64, pub Sender<()>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        let _ = self.1.send(());
    }
}

/// A waker that counts its wakes, and the receiver of their messages.
pub fn woken() -> (Arc<Woken>, Waker, Receiver<()>) {
    let (told, wakes) = channel();
    let woken = Arc::new(Woken(AtomicU64::new(0), told));
    (woken.clone(), Waker::from(woken), wakes)
}

/// Eight records without a file. A batch is read when the other end of the channel sends.
pub struct Gated(pub Receiver<()>);

impl Dataset for Gated {
    fn records(&self) -> u64 {
        8
    }

    fn record_bytes(&self) -> usize {
        4
    }

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        self.0.recv()?;
        Ok(out.len())
    }
}

/// The remains of a task after its executor is gone: only its waker keeps the task, and its future owns a `T`. Tells when
/// that was dropped without a panic.
struct LeftTask<T>(Mutex<Option<T>>, Sender<()>);

/// The waker of a task drops the loader that the task waits for, at the moment when its batch is reported.
pub fn is_dropped_by_a_waker<B: Backend>(loader: Loader<B>, open: &Sender<()>)
where
    Loader<B>: Send,
{
    let (end, ends) = channel();
    let task = Arc::new(LeftTask(Mutex::new(None), end));
    let waker = Waker::from(task.clone());
    let mut loader = loader;
    let mut epoch = loader.epoch(0);
    assert!(epoch.poll_next(&mut Context::from_waker(&waker)).is_pending());
    until(|| epoch.report().loads > 0); // an epoch dropped before its first load reads nothing
    drop(epoch);
    *task.0.lock().unwrap() = Some(loader);
    drop((waker, task));
    open.send(()).unwrap(); // the batch is reported to the waker, the last owner of the task
    ends.recv().expect("a thread cannot wait for its own end");
}

impl<T> Drop for LeftTask<T> {
    fn drop(&mut self) {
        drop(self.0.get_mut().unwrap().take());
        let _ = self.1.send(());
    }
}

impl<T: Send + 'static> Wake for LeftTask<T> {
    fn wake(self: Arc<Self>) {}
}
