//! The memory of a loader is as documented.

mod common;

use common::{RECORD, files, in_order, modes, open, plan};
use twinbuf::loader::{LoaderBuilder, MemoryLimit};
use twinbuf::mmap::Reader;
use twinbuf::transform::{Convert, per_record};
use twinbuf::{Error, Loader};

/// Checks that a loader takes so many bytes of a limit, and that an error spells them out.
fn takes(bytes: u64, sum: &str, builder: impl Fn() -> LoaderBuilder) {
    builder().memory_limit(bytes).build().expect(sum);
    let error = builder().memory_limit(bytes - 1).build().expect_err(sum).to_string();
    let wanted = format!("wanted at least {bytes} bytes ({sum}), found {}", bytes - 1);
    assert_eq!(error, format!("option `memory_limit`: {wanted}"));
}

#[test]
fn a_loader_that_does_not_fit_its_limit_is_refused_with_the_sum() {
    let (_dir, paths) = files(&[64]);
    let builder = || Loader::builder(open(&paths), plan(64, 8));
    takes(3 * 4096, "3 host slots of 8 records of 512 bytes", || builder().depth(3));
    takes(2 * 8192, "2 host slots of 8 records of 1024 bytes in 2 fields", || {
        Loader::builder((open(&paths), open(&paths)), plan(64, 8)).depth(2)
    });
    // One untransformed batch for each worker, and for a caller that helps, which runs no foreign code: it is shorter
    // than a part.
    let helper = std::thread::available_parallelism().unwrap().get() > 1;
    let scratch = 4096 * (1 + u64::from(helper));
    let sum = format!("3 host slots of 8 records of 1024 bytes and {scratch} bytes before the transform");
    takes(3 * 8192 + scratch, &sum, || builder().depth(3).transform(Convert::U16ToU32));
    for workers in 1..=4 {
        let scratch = 4096 * workers as u64;
        let sum = format!("5 host slots of 8 records of 512 bytes and {scratch} bytes before the transform");
        let own = || per_record(RECORD, |_, _, _| Ok(()));
        takes(5 * 4096 + scratch, &sum, || builder().depth(5).workers(workers).transform(own()));
    }
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
