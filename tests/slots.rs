//! Slots in memory that the caller allocated: batches are in it, and it is given back after the last of them.

mod common;

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use common::{RECORD, files};
use twinbuf::mmap::Buffer;
use twinbuf::{Batch, Error, Loader, Plan};

#[repr(align(64))]
struct Memory([u8; 2 * BATCH]);

/// Bytes of a batch.
const BATCH: usize = 4 * RECORD;

/// Counts itself when it is dropped, and only then frees the memory.
struct Lender {
    _memory: Box<Memory>,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// `bytes` bytes from `offset` on in memory of their own.
fn lent(offset: usize, bytes: usize, dropped: &Arc<AtomicUsize>) -> Buffer {
    let mut memory = Box::new(Memory([0xEE; 2 * BATCH]));
    let start = NonNull::from(&mut memory.0[offset..offset + bytes]).cast();
    // SAFETY: the box does not move its bytes, which nothing else reaches, and the lender frees them.
    unsafe { Buffer::lent(start, bytes, Lender { _memory: memory, dropped: dropped.clone() }) }
}

fn loader(slots: Vec<Buffer>, workers: usize, overlap: bool) -> Result<Loader, Error> {
    let (_dir, paths) = files(&[32]);
    let plan = Plan::builder(32).batch(4).build().unwrap();
    Loader::builder(common::open(&paths), plan).slots(slots).workers(workers).overlap(overlap).build()
}

#[test]
fn batches_are_in_the_callers_memory_until_the_last_is_dropped() {
    for (workers, overlap) in [(1, true), (2, true), (1, false)] {
        let dropped = Arc::new(AtomicUsize::new(0));
        let slots: Vec<Buffer> = (0..2 * workers).map(|_| lent(0, BATCH + workers, &dropped)).collect();
        let places: Vec<_> = slots.iter().map(|slot| slot.as_ptr().addr()).collect();
        let mut loader = loader(slots, workers, overlap).unwrap();
        let mut kept: Option<Batch> = None;
        let mut seen = std::collections::BTreeSet::new();
        for batch in loader.epoch(0) {
            let batch = batch.unwrap();
            assert_eq!(batch.len(), BATCH);
            let bytes: Vec<u8> = batch.plan().runs().flatten().flat_map(common::record).collect();
            assert_eq!(*batch, *bytes, "{workers} workers, overlap {overlap}");
            assert!(places.contains(&batch.as_ptr().addr()));
            seen.insert(batch.as_ptr().addr());
            kept = Some(batch);
        }
        assert_eq!(seen.len(), if overlap { 2 * workers } else { seen.len() }, "all of them are used");
        drop(loader);
        let others = 2 * (workers - 1);
        assert_eq!(dropped.load(Ordering::Relaxed), others, "those of the batch's worker stay");
        drop(kept);
        assert_eq!(dropped.load(Ordering::Relaxed), 2 * workers, "and no buffer more than once");
    }
}

#[test]
fn buffers_that_do_not_fit_are_refused() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let error = |slots: Vec<Buffer>, workers| loader(slots, workers, true).unwrap_err().to_string();
    let two = |offset, bytes| vec![lent(0, BATCH, &dropped), lent(offset, bytes, &dropped)];
    assert_eq!(
        error(two(0, BATCH - 1), 1),
        "option `slots`: wanted buffers of at least 2048 bytes, found 2047"
    );
    assert!(error(two(8, BATCH), 1).contains("wanted buffers at multiples of 64, found 0x"));
    assert!(error(two(0, BATCH), 2).contains("wanted 4 buffers: workers x host_depth, found 2"));
    assert!(error(Vec::new(), 1).contains("found 0"));
    assert_eq!(dropped.load(Ordering::Relaxed), 6, "given back");
}
