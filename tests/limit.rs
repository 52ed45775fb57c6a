//! The memory limit holds while batches outlive their loader. Alone in its process, because it measures the
//! process's memory.

mod common;

use std::ptr::NonNull;

use common::{Reads, in_order};
use twinbuf::loader::{LoaderBuilder, MemoryLimit};
use twinbuf::mmap::Buffer;
use twinbuf::{Batch, BatchIndices, Error, Loader};

const BATCH: usize = 4 << 20;
const LIMIT: u64 = 16 << 20;

/// 64 records of 1 MiB, in batches of 4.
fn ones() -> LoaderBuilder {
    let read = |_: &BatchIndices, out: &mut [u8]| {
        out.fill(1);
        Ok(())
    };
    Loader::builder(Reads(64, 1 << 20, read), in_order(64, 4))
}

/// Resident bytes of this process.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    // SAFETY: takes no pointer.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * u64::try_from(page).unwrap()
}

#[cfg(not(target_os = "linux"))]
fn resident() -> u64 {
    0
}

#[test]
fn the_limit_holds_whatever_outlives_the_loader() {
    let before = resident();
    let within = || {
        let taken = resident().saturating_sub(before);
        assert!(taken <= LIMIT + (8 << 20), "wanted at most {LIMIT} and 8 MiB, found {taken}");
    };
    let limit = MemoryLimit::new(LIMIT);
    let build = || ones().depth(2).memory_limit(&limit).build();

    // Batches that outlive their loaders: two slots each.
    let mut kept = Vec::new();
    let error = loop {
        assert!(kept.len() < 20, "no end");
        match build() {
            Ok(mut loader) => kept.push(loader.epoch(0).next().unwrap().unwrap()),
            Err(error) => break error,
        }
        within();
    };
    assert_eq!(kept.len() as u64, LIMIT / (2 * BATCH as u64));
    assert!(matches!(error, Error::Memory { limit: LIMIT, taken: LIMIT, .. }), "{error}");
    kept.pop();
    assert_eq!(limit.taken(), LIMIT / 2);

    // Memory taken out of its slot; the slot gets new memory.
    let mut loader = build().unwrap();
    let mut epoch = loader.epoch(0);
    let batch = epoch.next().unwrap().unwrap();
    let refused = *batch.into_buffer().unwrap_err();
    let (batch, error): (Batch, Error) = refused;
    assert!(matches!(error, Error::Memory { wanted, .. } if wanted == BATCH as u64), "{error}");
    assert!(batch.iter().all(|&byte| byte == 1), "as it was");
    kept.clear();
    let mut buffers = vec![batch.into_buffer().map_err(|refused| refused.1).unwrap()];
    for batch in epoch {
        match batch.unwrap().into_buffer() {
            Ok(buffer) => buffers.push(buffer),
            Err(refused) => assert!(matches!(refused.1, Error::Memory { .. }), "{}", refused.1),
        }
        within();
    }
    assert_eq!((buffers.len(), limit.taken()), (2, LIMIT));
    assert!(buffers.iter().all(|buffer| buffer.len() == BATCH && buffer.iter().all(|&byte| byte == 1)));
    drop(loader);
    assert_eq!(limit.taken(), 2 * BATCH as u64, "buffers that left their slots count until they are dropped");
    drop(buffers);
    assert_eq!(limit.taken(), 0);

    // Memory lent by the caller stays in place.
    let slots = (0..2).map(|_| lent()).collect();
    let mut loader = ones().depth(2).memory_limit(&limit).slots(slots).build().unwrap();
    let batch = loader.epoch(0).next().unwrap().unwrap();
    let (batch, error) = *batch.into_buffer().unwrap_err();
    assert!(matches!(error, Error::Option { option: "slots", .. }), "{error}");
    drop(loader);
    assert_eq!(limit.taken(), 2 * BATCH as u64);
    drop(batch);
    assert_eq!(limit.taken(), 0);
    within();
}

/// Memory of the caller.
fn lent() -> Buffer {
    let mut own = Buffer::new(BATCH).unwrap();
    let start = NonNull::from(&mut own[..]).cast();
    // SAFETY: the new buffer owns `own`, which does not move its bytes, and nothing else reaches them.
    unsafe { Buffer::lent(start, BATCH, own) }
}
