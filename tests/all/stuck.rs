//! Reads that do not return: what the caller is told, and that it can continue without them.

use std::process::Command;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use crate::common::{RECORD, files, in_order, open, until};
use twinbuf::loader::{At, Locator, Reading};
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Records};

/// Records; those from `stuck` on are on a file server that does not answer.
#[derive(Clone)]
struct Remote {
    records: Arc<Records>,
    stuck: u64,
    /// Blocks reads until the other end is dropped: then the server comes back.
    server: Arc<Mutex<Receiver<()>>>,
    /// Gets the first record of each read that waits.
    waits: Sender<u64>,
    /// Shared by all clones; each worker has one.
    alive: Arc<()>,
    named: bool,
}

impl Dataset for Remote {
    fn records(&self) -> u64 {
        self.records.len()
    }
    fn record_bytes(&self) -> usize {
        RECORD
    }
    fn read(&mut self, batch: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        if batch.runs().flatten().any(|record| record >= self.stuck) {
            let first = batch.first();
            let _ = self.waits.send(first);
            let _ = self.server.lock().unwrap().recv();
        }
        self.records.read(batch, out)
    }
    fn try_clone(&self) -> Option<Box<dyn Dataset>> {
        Some(Box::new(self.clone()))
    }
    fn locator(&self) -> Option<Locator> {
        if self.named { self.records.locator() } else { None }
    }
}

/// Two files of 20 records each; those from `stuck` on cannot be read. Also returns the receiver of the waiting reads,
/// and what keeps them waiting.
fn remote(stuck: u64, named: bool) -> (tempfile::TempDir, Remote, Receiver<u64>, Sender<()>) {
    let (dir, paths) = files(&[20, 20]);
    let ((waits, waiting), (down, server)) = (channel(), channel());
    let (server, records) = (Arc::new(Mutex::new(server)), open(&paths));
    (dir, Remote { records, stuck, server, waits, alive: Arc::new(()), named }, waiting, down)
}

#[test]
fn a_caller_that_waits_is_told_what_is_read() {
    for (workers, named) in [(1, true), (2, true), (3, false)] {
        let (dir, remote, waiting, down) = remote(24, named);
        let mut loader =
            Loader::builder(remote, in_order(40, 4)).name("train").workers(workers).build().unwrap();
        let mut epoch = loader.epoch(5);
        for step in 0..6 {
            assert_eq!(epoch.next().unwrap().unwrap().step(), step);
        }
        waiting.recv().unwrap();
        let before = loop {
            // The thread of the batch may have been behind another one.
            assert!(epoch.next_timeout(Duration::from_millis(1)).is_pending());
            let there = |now: &Reading| now.at.step == Some(6) && now.record.is_some();
            if let Some(reading) = epoch.reading().filter(there) {
                break reading;
            }
        };
        assert!(epoch.next_timeout(Duration::from_millis(1)).is_pending(), "nothing is released");
        let reading = epoch.reading().unwrap();
        assert!(reading.time > before.time, "{reading} after {before}");
        assert_eq!(reading.at, At { loader: Some("train".into()), epoch: 5, step: Some(6) });
        assert_eq!(reading.record, Some(24));
        // The fifth record of the second file.
        let file = (dir.path().join("1.bin"), 4 * RECORD as u64);
        assert_eq!(reading.file, named.then_some(file));
        let (text, seconds) = (reading.to_string(), reading.time.as_secs_f64());
        let loading = format!("train: epoch 5, step 6: loading for {seconds:.3} s, from record 24 on");
        assert!(text.starts_with(&loading), "{text}");
        assert_eq!(text.ends_with("1.bin at byte 2048"), named, "{text}");
        // No batch was lost, and no read is pending in the end.
        drop(down);
        assert_eq!(epoch.by_ref().map(Result::unwrap).count(), 4);
        assert_eq!(epoch.reading(), None);
    }
}

/// The limit is 10 s.
#[test]
fn a_loader_that_is_dropped_waits_for_a_limited_time() {
    let (_dir, remote, waiting, down) = remote(0, true);
    let mut loader = Loader::builder(remote, in_order(40, 4)).build().unwrap();
    drop(loader.epoch(0));
    drop(loader.epoch(1));
    let epoch = loader.epoch(2);
    waiting.recv().unwrap();
    drop(epoch);
    drop(loader); // or the test never ends
    drop(down);
}

/// As when a runtime aborts the task: its thread has other tasks.
#[test]
fn a_task_that_is_dropped_leaves_a_stuck_read_behind() {
    for workers in 1..=2 {
        let (_dir, remote, waiting, down) = remote(4, true);
        let alive = remote.alive.clone();
        let mut epochs =
            Loader::builder(remote, in_order(40, 4)).workers(workers).build().unwrap().into_epochs(0..1);
        drop(pollster::block_on(epochs.next_async()).unwrap().unwrap());
        waiting.recv().unwrap();
        assert!(epochs.poll_next(&mut Context::from_waker(Waker::noop())).is_pending());
        // A drop that waits for the read is released before its limit of 10 s, and then the thread is gone.
        let (dropped, in_time) = channel();
        let release = std::thread::spawn(move || {
            let _ = in_time.recv_timeout(Duration::from_secs(8));
            drop(down);
        });
        drop(epochs);
        let left = Arc::strong_count(&alive);
        let _ = dropped.send(());
        release.join().unwrap();
        assert!(left > 1, "the drop has waited");
        until(|| Arc::strong_count(&alive) == 1);
    }
}

/// Not a test in itself: the child process of the next one.
#[test]
#[ignore = "the child of another test"]
fn child_whose_read_never_returns() {
    let (_dir, remote, waiting, _down) = remote(0, true);
    let mut loader = Loader::builder(remote, in_order(40, 4)).build().unwrap();
    let mut epoch = loader.epoch(0);
    waiting.recv().unwrap(); // otherwise there is no read to leave behind
    assert!(epoch.next_timeout(Duration::from_millis(20)).is_pending());
    drop(epoch);
    println!("{}", loader.close_timeout(Duration::from_millis(20)).unwrap_err());
}

#[test]
fn a_process_whose_read_never_returns_ends() {
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "stuck::child_whose_read_never_returns", "--ignored", "--nocapture"]);
    let started = Instant::now();
    let found = child.output().unwrap(); // or the test never ends
    let text = String::from_utf8_lossy(&found.stdout);
    assert!(found.status.success(), "{text} after {:?}", started.elapsed());
    let (_, told) = text.split_once("epoch 0, step 0: loading for ").unwrap_or_else(|| panic!("{text}"));
    let (seconds, place) = told.split_once(" s, from record 0 on, ").unwrap_or_else(|| panic!("{text}"));
    assert!(seconds.parse::<f64>().unwrap() >= 0.02, "{text}");
    assert!(place.contains("0.bin at byte 0: wanted an end within 0.020 s"), "{text}");
}
