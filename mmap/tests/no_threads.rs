//! In a container that allows no more threads, direct reads work without the threads of `io_uring`. This is the only test
//! of the file, because the limit holds for the whole process.
#![cfg(target_os = "linux")]

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use std::sync::Arc;

use twinbuf_mmap::{Plan, ReadMode, Reader, Records, Shuffle};

/// A control group that this process is in, of one thread at most.
struct Group(PathBuf);

impl Group {
    /// `None` if this process may not make one.
    fn new() -> Option<Self> {
        // Version 1, and version 2 as systemd mounts it alone and together with version 1.
        let roots = ["/sys/fs/cgroup/pids", "/sys/fs/cgroup", "/sys/fs/cgroup/unified"];
        roots.into_iter().find_map(|root| {
            let group = Self(Path::new(root).join(format!("twinbuf-test-{}", std::process::id())));
            fs::create_dir(&group.0).ok()?;
            // Dropped if one of them fails.
            put(&group.0.join("pids.max"), "1").ok()?;
            put(&group.0.join("cgroup.procs"), "0").ok()?;
            Some(group)
        })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let parent = self.0.parent().map(|parent| parent.join("cgroup.procs"));
        let _ = parent.map(|parent| put(&parent, "0"));
        let _ = fs::remove_dir(&self.0);
    }
}

/// Writes to a file that is there. With version 1 the root of all hierarchies is a file system in memory, which would make
/// one.
fn put(path: &Path, value: &str) -> io::Result<()> {
    File::options().write(true).open(path)?.write_all(value.as_bytes())
}

#[test]
fn direct_reads_need_no_thread() {
    const RECORD: usize = 4096;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let path = folder.path().join("data");
    let bytes = twinbuf_testing::bytes(8 << 20, 0);
    fs::write(&path, &bytes).unwrap();
    let records = Arc::new(Records::open([&path], RECORD).unwrap());
    let plan = Plan::builder(records.len()).batch(256).shuffle(Shuffle::Full).build().unwrap();
    let reader = || Reader::new(records.ranges(), &plan, ReadMode::Direct);
    if let Err(error) = reader() {
        return eprintln!("not checked: {error}");
    }
    let Some(_group) = Group::new() else { return eprintln!("not checked: no control group of processes") };
    assert!(std::thread::Builder::new().spawn(|| ()).is_err());
    let reader = reader().unwrap();
    let batches = plan.clone();
    reader.begin((0..).map_while(move |step| batches.batch(0, step)));
    let mut out = vec![0; 256 * RECORD];
    for step in 0..plan.steps(0) {
        let batch = plan.batch(0, step).unwrap();
        assert_eq!(reader.read(&batch, &mut out).unwrap(), out.len());
        for (record, found) in batch.runs().flatten().zip(out.chunks(RECORD)) {
            let at = usize::try_from(record).unwrap() * RECORD;
            assert!(found == &bytes[at..at + RECORD], "{record}");
        }
    }
}
