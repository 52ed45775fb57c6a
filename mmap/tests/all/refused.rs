//! Calls that a seccomp filter refuses, as those of containers do: what can be done without them is, and the rest
//! is a typed error.
//!
//! Filters cannot be taken off and the crate remembers refusals, so each case runs in a new process.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;

use libc::{EACCES, EFAULT, EINVAL, EIO, ENOMEM, ENOSYS, EPERM, EROFS, c_int, c_long};
use libc::{SYS_fadvise64, SYS_fsync, SYS_pidfd_open, SYS_process_madvise};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};
use twinbuf_mmap::{BatchIndices, Error, Plan, ReadMode, ReadStats, Reader, Records, Residency, Shuffle};

/// Set in the process of one case, to its number and the error.
const CHILD: &str = "TWINBUF_REFUSED_CASE";

/// Shuffled below, so in most cases no two records of a batch touch.
const RECORDS: u64 = 8000;

/// More than one call of the kernel takes.
const BATCH: u64 = 1500;

/// A file of [`RECORDS`] pages, each a record.
struct Data {
    folder: tempfile::TempDir,
    page: usize,
}

impl Data {
    fn new() -> Self {
        let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        // SAFETY: takes no pointer.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
        let data = Self { folder, page };
        let mut bytes = vec![0; usize::try_from(RECORDS).unwrap() * page];
        (0..RECORDS).zip(bytes.chunks_exact_mut(page)).for_each(|(record, out)| out.fill(byte(record)));
        std::fs::write(data.path(), bytes).unwrap();
        data
    }

    fn path(&self) -> std::path::PathBuf {
        self.folder.path().join("data")
    }

    fn open(&self) -> Arc<Records> {
        Arc::new(Records::open([self.path()], self.page).unwrap())
    }

    /// Fails unless all bytes of a batch are read as they were written.
    fn check(&self, records: &Records, batch: &BatchIndices) {
        let mut out = vec![0xEE; usize::try_from(batch.len()).unwrap() * self.page];
        assert_eq!(records.read(batch, &mut out).unwrap(), out.len());
        self.compare(batch, &out);
    }

    fn compare(&self, batch: &BatchIndices, out: &[u8]) {
        for (record, bytes) in batch.runs().flatten().zip(out.chunks_exact(self.page)) {
            assert!(bytes == vec![byte(record); self.page], "record {record}");
        }
    }
}

/// What all bytes of a record are.
fn byte(record: u64) -> u8 {
    u8::try_from(record % 251).unwrap()
}

fn batch() -> BatchIndices {
    let plan = Plan::builder(RECORDS).batch(BATCH).shuffle(Shuffle::Full).seed(3).build().unwrap();
    plan.batch(0, 0).unwrap()
}

/// What is refused from now on to this thread and those that it starts.
pub(crate) fn refuse(calls: &[c_long], errno: c_int) {
    install(calls.iter().map(|&call| (call, Vec::new())).collect(), errno);
}

fn install(rules: BTreeMap<i64, Vec<SeccompRule>>, errno: c_int) {
    let action = SeccompAction::Errno(errno.try_into().unwrap());
    let arch = std::env::consts::ARCH.try_into().unwrap();
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, action, arch).unwrap();
    let program: BpfProgram = filter.try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

fn system(result: &Result<impl std::fmt::Debug, Error>, path: &Path, call: &str, errno: c_int) {
    let Err(Error::System { path: found, call: failed, source }) = result else { panic!("{result:?}") };
    assert_eq!((&**found, *failed, source.raw_os_error()), (path, call, Some(errno)));
}

/// The batch, asked for and read by a new reader.
fn ask(data: &Data, records: &Arc<Records>) -> ReadStats {
    // A rank of many does not ask for what is around its records.
    let plan = Plan::builder(RECORDS).rank(0, 40).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
    reader.begin([batch()]);
    let mut out = vec![0xEE; usize::try_from(BATCH).unwrap() * data.page];
    assert_eq!(reader.read(&batch(), &mut out).unwrap(), out.len());
    data.compare(&batch(), &out);
    reader.stats()
}

/// `process_madvise` or what it needs is refused: each piece is one `madvise`, and no page is left out.
fn hints_fall_back(data: &Data, records: &Arc<Records>, call: c_long, errno: c_int) {
    let gathered = ask(data, records);
    assert_eq!(gathered.failed, 0);
    if gathered.hints > 1024 {
        return println!("not checked: the kernel refuses already");
    }
    refuse(&[call], errno);
    let mut pieces = None;
    // Twice: once it is refused, and then it is not tried.
    for _ in 0..2 {
        let ReadStats { hinted, hints, failed, .. } = ask(data, records);
        assert_eq!((hinted, failed), (gathered.hinted, 0));
        assert!(hints > 1024, "{hints}, {gathered:?}");
        assert_eq!(*pieces.get_or_insert(hints), hints);
    }
}

/// No hint can be given at all: each piece is counted as failed, and the batch is read all the same.
fn hints_fail(data: &Data, records: &Arc<Records>, errno: c_int) {
    refuse(&[libc::SYS_process_madvise, libc::SYS_madvise], errno);
    let asked = ask(data, records);
    assert_eq!((asked.hinted, asked.failed), (0, asked.hints));
    assert!(asked.hints > 1024, "{asked:?}");
}

/// Records that are apart are one call each where the kernel does not copy them by one: found out once for the process,
/// or, if it cannot reach the memory, for each slot.
fn gathering_is_refused(data: &Data, records: &Arc<Records>, errno: c_int) {
    let plan = Plan::builder(RECORDS).build().unwrap();
    let reader = Reader::new(records.ranges(), &plan, ReadMode::Auto).unwrap();
    let runs = batch().runs().count() as u64;
    let mut slots = [0xEE; 2].map(|byte| vec![byte; usize::try_from(BATCH).unwrap() * data.page]);
    let mut calls = |slot: usize| {
        let before = Records::read_calls();
        reader.read(&batch(), &mut slots[slot]).unwrap();
        data.compare(&batch(), &slots[slot]);
        slots[slot].fill(0xEE);
        Records::read_calls() - before
    };
    assert!(calls(0) < runs / 100, "not one call for many");
    refuse(&[libc::SYS_process_vm_writev], errno);
    assert_eq!(calls(0), runs + 1);
    assert_eq!([calls(0), calls(0)], [runs; 2]);
    assert_eq!(calls(1), if errno == EFAULT { runs + 1 } else { runs });
    assert_eq!(calls(1), runs);
}

fn residency_is_refused(data: &Data, records: &Arc<Records>, errno: c_int) {
    refuse(&[libc::SYS_mincore], errno);
    system(&records.residency(), &data.path(), "mincore", errno);
    system(&records.residency_of(&batch()), &data.path(), "mincore", errno);
    data.check(records, &batch());
}

/// `cachestat(2)`; `libc` has no name for it.
const CACHESTAT: c_long = 451;

/// Ten stretches of 4096 pages without cached pages need no other call; with one page there, one does.
fn holes_are_counted_without(data: &Data, _: &Arc<Records>, errno: c_int) {
    // SAFETY: no descriptor is -1, so the kernel looks at no pointer.
    let status = unsafe { libc::syscall(CACHESTAT, -1, 0, 0, 0) };
    let error = io::Error::last_os_error();
    if (status, error.raw_os_error()) != (-1, Some(libc::EBADF)) {
        return println!("not checked: cachestat: {error}");
    }
    let kind = Command::new("stat").args(["-f", "-c", "%T"]).arg(data.path()).output().unwrap().stdout;
    if String::from_utf8_lossy(&kind).trim() == "overlayfs" {
        return println!("not checked: the pages of overlayfs are those of another file system");
    }
    let file = File::create(data.path()).unwrap();
    file.set_len(10 * 4096 * data.page as u64).unwrap();
    let records = data.open();
    refuse(&[libc::SYS_mincore], errno);
    assert_eq!(records.residency().unwrap(), Residency { pages: 10 * 4096, resident: 0 });
    file.write_all_at(&vec![1; data.page], 5000 * data.page as u64).unwrap();
    system(&records.residency(), &data.path(), "mincore", errno);
}

/// Each page is looked at, as on kernels that have no other call.
fn counting_falls_back(data: &Data, records: &Arc<Records>, errno: c_int) {
    let file = File::options().write(true).open(data.path()).unwrap();
    refuse(&[CACHESTAT], errno);
    file.set_len(0).unwrap();
    file.set_len(RECORDS * data.page as u64).unwrap();
    let page = vec![1; data.page];
    // Where memory is short, it may go before it is counted.
    let found = (0..1000).find_map(|_| {
        file.write_all_at(&page, 1000 * data.page as u64).unwrap();
        records.residency().ok().filter(|found| found.resident > 0)
    });
    assert_eq!(found, Some(Residency { pages: RECORDS, resident: 1 }));
}

fn eviction_is_refused(data: &Data, records: &Records, (number, call): (c_long, &str), errno: c_int) {
    refuse(&[number], errno);
    system(&records.evict(), &data.path(), call, errno);
}

/// The error of file systems without `fsync`; they have nothing to write out: squashfs, erofs, iso9660.
fn nothing_to_write_out(data: &Data, records: &Arc<Records>, errno: c_int) {
    File::open(data.path()).unwrap().sync_all().unwrap();
    data.check(records, &batch());
    refuse(&[libc::SYS_fsync], errno);
    // The kernel leaves a page that it is just looking at itself; file systems that live in memory keep all.
    let gone = (0..1000).any(|_| {
        records.evict().unwrap();
        let Residency { pages, resident } = records.residency().unwrap();
        resident == 0 || resident == pages
    });
    assert!(gone, "{:?}", records.residency());
}

/// No file can be mapped: only what needs a mapping fails.
fn mapping_is_refused(data: &Data, _: &Arc<Records>, errno: c_int) {
    // Memory without a file, whose descriptor is -1, can still be had.
    let a_file =
        SeccompCondition::new(4, SeccompCmpArgLen::Dword, SeccompCmpOp::Ne, u32::MAX.into()).unwrap();
    let rule = SeccompRule::new(vec![a_file]).unwrap();
    install(BTreeMap::from([(libc::SYS_mmap, vec![rule])]), errno);
    let records = data.open();
    let asked = ask(data, &records);
    assert_eq!((asked.hints, asked.hinted, asked.failed), (0, 0, 0));
    records.evict().unwrap();
    records.fingerprint().unwrap();
    let error = records.residency().unwrap_err();
    let Error::System { path, call: "mmap", source } = &error else { panic!("{error:?}") };
    let kind = io::Error::from_raw_os_error(errno).kind();
    assert_eq!((path, source.kind()), (&data.path(), kind), "{error}");
}

/// What is refused, what to look at then, and the errors to do it with.
type Case = (&'static str, fn(&Data, &Arc<Records>, c_int), &'static [c_int]);

const CASES: [Case; 11] = [
    // EACCES is no error of a call that is never there, so it is tried again each time.
    ("process_madvise", |a, b, e| hints_fall_back(a, b, SYS_process_madvise, e), &[EPERM, ENOSYS, EACCES]),
    ("pidfd_open", |a, b, e| hints_fall_back(a, b, SYS_pidfd_open, e), &[EPERM, ENOSYS]),
    ("process_vm_writev", gathering_is_refused, &[EPERM, ENOSYS, EFAULT]),
    ("madvise", hints_fail, &[EPERM, ENOSYS]),
    ("mincore", residency_is_refused, &[EPERM, ENOSYS]),
    ("mincore", holes_are_counted_without, &[EPERM]),
    ("cachestat", counting_falls_back, &[EPERM, ENOSYS]),
    (
        "posix_fadvise",
        |a, b, e| eviction_is_refused(a, b, (SYS_fadvise64, "posix_fadvise"), e),
        &[EPERM, ENOSYS],
    ),
    ("fsync", nothing_to_write_out, &[EINVAL, EROFS]),
    ("fsync", |a, b, e| eviction_is_refused(a, b, (SYS_fsync, "fsync"), e), &[EIO]),
    ("mmap", mapping_is_refused, &[EACCES, ENOMEM]),
];

/// In the parent: starts itself once for each case. In the child: that case.
#[test]
fn refusals() {
    if let Ok(case) = std::env::var(CHILD) {
        let (case, errno) = case.split_once(' ').unwrap();
        let (_, check, _) = CASES[case.parse::<usize>().unwrap()];
        let data = Data::new();
        check(&data, &data.open(), errno.parse().unwrap());
        return println!("{CHILD} is done");
    }
    for (case, (call, _, errors)) in CASES.iter().enumerate() {
        for errno in *errors {
            println!("{call} refused with {}", io::Error::from_raw_os_error(*errno));
            let case = format!("{case} {errno}");
            let Some(said) = crate::common::again("refused::refusals", CHILD, &case) else { return };
            said.lines().filter(|line| line.starts_with("not checked")).for_each(|line| println!("{line}"));
        }
    }
}
