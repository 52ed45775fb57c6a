//! Files larger than the room for mappings leave that room to the program. Alone here: the limit is the process's.
#![cfg(target_os = "linux")]

use std::fs::File;

use std::sync::Arc;

use twinbuf_mmap::{Plan, Records};

#[path = "common/asked.rs"]
mod asked;

/// Allows this process `more` bytes of addresses than it has now.
fn limit(more: u64) {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = pages.split(' ').next().unwrap().parse().unwrap();
    // SAFETY: reads a constant of the system; it takes no pointer.
    let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
    let most = pages * page + more;
    let limit = libc::rlimit64 { rlim_cur: most, rlim_max: most };
    // SAFETY: the kernel reads one `rlimit64`.
    let status = unsafe { libc::setrlimit64(libc::RLIMIT_AS, &raw const limit) };
    assert_eq!(status, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_data_set_without_room_for_all_its_mappings_takes_none() {
    const RECORD: usize = 1 << 20;
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let paths: Vec<_> = (0..40).map(|index| folder.path().join(index.to_string())).collect();
    for path in &paths {
        File::create(path).unwrap().set_len(64 << 20).unwrap();
    }
    limit(1 << 30);
    if Vec::<u8>::new().try_reserve_exact(1 << 30).is_ok() {
        // Emulators take it and do not pass it on.
        return eprintln!("not checked: RLIMIT_AS has no effect");
    }
    let records = Arc::new(Records::open(&paths, RECORD).unwrap());
    let mut out = Vec::new();
    out.try_reserve_exact(512 << 20).unwrap();
    out.resize(RECORD, 0xEE);
    let plan = Plan::builder(records.len()).build().unwrap();
    for step in [0, 39 * 64] {
        let batch = plan.batch(0, step).unwrap();
        out.fill(0xEE);
        let (stats, read) = asked::read_and_ask(&records, &batch, &mut out);
        assert_eq!(read.unwrap(), RECORD);
        assert!(out.iter().all(|&byte| byte == 0));
        assert_eq!((stats.hints, stats.failed), (0, 0), "{stats:?}");
    }
    // What has room is mapped.
    let records = Arc::new(Records::open(&paths[..4], RECORD).unwrap());
    assert_eq!(asked::read_and_ask(&records, &plan.batch(0, 0).unwrap(), &mut out).0.hints, 2);
}
