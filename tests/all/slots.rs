//! Slots in memory that the caller allocated: batches are stored in it, and it is returned after the last of them.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{self, RECORD, files, in_order, written};
use twinbuf::Breakdown;
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::Buffer;
use twinbuf::transform::{Convert, per_record};
use twinbuf::{Batch, Error, LastBatch, Loader, Plan, Records};

/// Bytes of a batch.
const BATCH: usize = 4 * RECORD;

/// Counts its drop, and only then frees the memory.
struct Lender {
    _memory: Buffer,
    dropped: Arc<AtomicUsize>,
}

impl Drop for Lender {
    fn drop(&mut self) {
        self.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

/// `bytes` bytes from `offset` on, in newly allocated memory.
fn lent(offset: usize, bytes: usize, dropped: &Arc<AtomicUsize>) -> Buffer {
    let mut memory = Buffer::new(2 * BATCH).unwrap();
    memory.fill(0xEE);
    let start = NonNull::from(&mut memory[offset..offset + bytes]).cast();
    // SAFETY: the buffer does not move its bytes, nothing else reaches them, and the lender frees them.
    unsafe { Buffer::lent(start, bytes, Lender { _memory: memory, dropped: dropped.clone() }) }
}

fn loader(slots: Vec<Buffer>, workers: usize, overlap: bool) -> Result<Loader, Error> {
    let (_dir, paths) = files(&[32]);
    let builder = Loader::builder(common::open(&paths), in_order(32, 4)).slots(slots).workers(workers);
    builder.depth(2 * workers).overlap(overlap).build()
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
        // A worker that is never free in time loads nothing.
        let used = if overlap { 2..=2 * workers } else { 1..=2 };
        assert!(used.contains(&seen.len()), "{workers} workers, overlap {overlap}: {} slots", seen.len());
        drop(loader);
        assert_eq!(dropped.load(Ordering::Relaxed), 0, "all stay until the last batch is dropped");
        drop(kept);
        assert_eq!(dropped.load(Ordering::Relaxed), 2 * workers, "and no buffer more than once");
    }
}

#[test]
fn buffers_that_do_not_fit_are_refused() {
    let dropped = Arc::new(AtomicUsize::new(0));
    let error = |slots: Vec<Buffer>, workers| loader(slots, workers, true).unwrap_err().to_string();
    let two = |offset, bytes| vec![lent(0, BATCH, &dropped), lent(offset, bytes, &dropped)];
    let short = "option `slots`: wanted buffers of at least 2048 bytes, found 2047";
    assert_eq!(error(two(0, BATCH - 1), 1), short);
    assert!(error(two(8, BATCH), 1).contains("wanted buffers at multiples of 64, found 0x"));
    assert!(error(two(0, BATCH), 2).contains("wanted 4 buffers: `depth`, found 2"));
    assert!(error(Vec::new(), 1).contains("found 0"));
    assert_eq!(dropped.load(Ordering::Relaxed), 6, "given back");
}

/// The requirements of the options, and the combinations that are refused.
#[test]
fn build_takes_the_wanted_slots_and_no_others() {
    type Set = fn(LoaderBuilder) -> LoaderBuilder;
    // The bytes of a batch of the second plan in two fields, the first of 3 bytes a record.
    let pair = 64 + 7 * RECORD;
    let cases: [(Set, usize, usize); 8] = [
        (|builder| builder, 16, pair),
        (|builder| builder.depth(2), 2, pair),
        (|builder| builder.memory_limit(1 << 20).workers(4), 6, pair),
        (|builder| builder.depth(3).workers(4).overlap(false), 3, pair),
        (|builder| builder.workers(4).breakdown(Breakdown::every(9).sink(|_| ())), 2, pair),
        (|builder| builder.transform_field(1, Convert::U16ToU32), 16, pair + 7 * RECORD),
        (|builder| builder.transform_field(0, per_record(3, |_, _, _| Ok(()))), 3, pair),
        (|builder| builder.memory_limit(u64::MAX).hints(false), 3, pair),
    ];
    let (_folder, narrow) = written("narrow", [1; 3 * 5]);
    let (_dir, wide) = files(&[5]);
    // Fewer records than a batch: they are repeated.
    let plan = Plan::builder(5).batch(7).last_batch(LastBatch::Wrap).build().unwrap();
    for (case, (set, count, bytes)) in cases.into_iter().enumerate() {
        let builder = || {
            let data = (Records::open([&narrow], 3).unwrap(), common::open(&wide));
            set(Loader::builder(data, plan.clone()))
        };
        let (wanted, slot) = builder().wanted_slots().unwrap();
        assert_eq!((wanted, slot.size(), slot.align()), (count, bytes, 64), "case {case}");
        let build = |count: usize, bytes: usize| {
            let slots = (0..count).map(|_| Buffer::new(bytes).unwrap()).collect();
            let mut loader = builder().slots(slots).build()?;
            loader.epoch(0).try_for_each(|batch| batch.map(drop))
        };
        assert!(build(wanted, slot.size()).is_ok(), "case {case}");
        for (count, bytes) in [(wanted - 1, bytes), (wanted + 1, bytes), (wanted, bytes - 1)] {
            let error = build(count, bytes).unwrap_err();
            assert!(matches!(error, Error::Option { option: "slots", .. }), "case {case}: {error}");
        }
    }
    // By default: as many slots of files as fit 2 MiB, 16 at most; three more than workers if fewer than two more
    // fit. Of 16 MiB or more each: two for one worker, otherwise two more than workers.
    const MIB: u64 = 1 << 20;
    std::fs::File::options().write(true).open(&narrow).unwrap().set_len(16 * MIB).unwrap();
    for (batch, workers, wanted) in [
        (MIB / 8, 1, 16),
        (MIB / 8 + 1, 1, 15),
        (400 << 10, 1, 5),
        (2 * MIB / 5, 1, 4), // whole pages
        (600 << 10, 1, 3),
        (700 << 10, 1, 4),
        (MIB, 1, 4),
        (16 * MIB - 1, 1, 4),
        (16 * MIB, 1, 2),
        (MIB, 15, 18),
        (16 * MIB, 2, 4),
    ] {
        let data = Records::open([&narrow], 1).unwrap();
        let builder = Loader::builder(data, in_order(16 * MIB, batch)).workers(workers);
        let found = builder.wanted_slots().unwrap().0;
        assert_eq!(found, wanted, "batches of {batch} bytes, {workers} workers");
    }
    let driven = Loader::builder(Records::open([&narrow], 1).unwrap(), in_order(100, 10)).driven();
    let no_files = Loader::builder(common::Reads(100, 8, common::nothing), in_order(100, 10));
    for (builder, which) in [(driven, "driven"), (no_files, "not files")] {
        assert_eq!(builder.wanted_slots().unwrap().0, 3, "{which}");
    }
}
