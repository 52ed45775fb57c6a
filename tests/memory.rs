//! The memory of a loader is as documented.

mod common;

use common::{RECORD, files, in_order, modes, open, plan};
use twinbuf::loader::MemoryLimit;
use twinbuf::mmap::Reader;
use twinbuf::transform::Convert;
use twinbuf::{Error, Loader};

#[test]
fn a_loader_that_does_not_fit_its_limit_is_refused_with_the_sum() {
    let (_dir, paths) = files(&[64]);
    let build = |limit: u64, transformed: bool| {
        let builder = Loader::builder(open(&paths), plan(64, 8)).depth(3).memory_limit(limit);
        if transformed { builder.transform(Convert::U16ToU32) } else { builder }.build()
    };
    let slots = 3 * 8 * RECORD as u64;
    assert!(build(slots, false).is_ok());
    let sum = "at least 12288 bytes (3 host slots of 8 records of 512 bytes)";
    let error = build(slots - 1, false).unwrap_err().to_string();
    assert_eq!(error, format!("option `memory_limit`: wanted {sum}, found 12287"));
    // Twice the size in the slots, and one untransformed batch for the worker and for a caller that helps: it is shorter than a part.
    let helper = std::thread::available_parallelism().unwrap().get() > 1;
    let transformed = 2 * slots + (1 + u64::from(helper)) * 8 * RECORD as u64;
    assert!(build(transformed, true).is_ok());
    let error = build(transformed - 1, true).unwrap_err();
    let scratch = if helper { 8192 } else { 4096 };
    let sum = format!("1024 bytes and {scratch} bytes before the transform)");
    assert!(error.to_string().contains(&sum), "{error}");
}

/// Without hints or overlap, reads past the page cache still go through memory of the reader.
#[test]
fn what_reads_need_beside_the_slots_counts_without_hints() {
    let (_dir, paths) = files(&[64]);
    let (data, plan) = (open(&paths), plan(64, 8));
    let Some(&mode) = modes(&data).get(1) else { return };
    let reader = Reader::new(data.ranges(), &plan, mode).unwrap();
    for (hints, overlap) in [(true, true), (false, true), (true, false)] {
        let slots = if overlap { 3 } else { 2 };
        let all = slots * 8 * RECORD as u64 + reader.memory();
        let builder =
            Loader::builder(data.clone(), plan.clone()).read_mode(mode).hints(hints).overlap(overlap);
        let build = builder.memory_limit(all - 1).build();
        assert!(matches!(build, Err(Error::Memory { wanted, .. }) if wanted == all), "{hints} {overlap}");
    }
}

#[test]
fn one_limit_for_several_loaders() {
    let (_dir, paths) = files(&[40]);
    let plan = in_order(40, 8);
    let slots = 2 * 8 * RECORD as u64;
    let limit = MemoryLimit::new(2 * slots + 1);
    let build = || Loader::builder(open(&paths), plan.clone()).depth(2).memory_limit(&limit).build();
    let (mut train, valid) = (build().unwrap(), build().unwrap());
    assert_eq!(limit.taken(), 2 * slots);
    let sum = "at least 8192 bytes (2 host slots of 8 records of 512 bytes)";
    let wanted = format!("option `memory_limit`: wanted {sum}, found 16385, of which 16384 are taken");
    assert_eq!(build().unwrap_err().to_string(), wanted);
    assert_eq!(limit.taken(), 2 * slots, "what was refused takes nothing");
    // A loader that could not be built returns its part.
    drop(valid);
    let builder = Loader::builder(open(&paths), plan.clone()).depth(2).memory_limit(&limit);
    assert!(matches!(builder.trace("/no such folder/trace.json").build(), Err(Error::Trace { .. })));
    assert_eq!(limit.taken(), slots);
    assert_eq!(train.epoch(0).count(), 5);
    train.close().unwrap();
    assert_eq!(limit.taken(), 0);
    // A number is a separate limit.
    for _ in 0..2 {
        Loader::builder(open(&paths), plan.clone()).depth(2).memory_limit(slots).build().unwrap();
    }
}
