//! What a loader takes and asks for: memory as spelled out, pages in time and no more, given up when used.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel};

use common::{RECORD, files, open, plan};

use twinbuf::loader::MemoryLimit;
use twinbuf::mmap::{CachePolicy, HintStats, ReadMode, Residency};
use twinbuf::transform::Convert;
use twinbuf::{BatchPlan, BoxError, Dataset, Error, Loader, Plan, Records, Shuffle, Tail};

#[test]
fn a_loader_that_does_not_fit_its_limit_is_refused_with_the_sum() {
    let (_dir, paths) = files(&[64]);
    let build = |limit: u64, transformed: bool| {
        let builder = Loader::builder(open(&paths), plan(64, 8)).host_depth(3).memory_limit(limit);
        if transformed { builder.transform(Convert::U16ToU32) } else { builder }.build()
    };
    let slots = 3 * 8 * RECORD as u64;
    assert!(build(slots, false).is_ok());
    let error = build(slots - 1, false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "option `memory_limit`: wanted at least 12288 bytes (3 host slots of 8 records of 512 bytes), found 12287"
    );
    // Twice the size in the slots, and one batch of before: it is shorter than a part.
    let transformed = 2 * slots + 8 * RECORD as u64;
    assert!(build(transformed, true).is_ok());
    let error = build(transformed - 1, true).unwrap_err();
    assert!(error.to_string().contains("1024 bytes and 4096 bytes before the transform)"), "{error}");
}

/// Without hints and overlap too, reads past the page cache go through memory of the data set's.
#[test]
fn what_reads_need_beside_the_slots_counts_without_hints() {
    let (_dir, paths) = files(&[64]);
    let direct = || Records::options().read_mode(ReadMode::Direct).open(&paths, RECORD);
    if let Err(error) = direct() {
        return eprintln!("not checked: {error}");
    }
    for (hints, overlap) in [(true, true), (false, true), (true, false)] {
        let data = direct().unwrap();
        let plan = plan(64, 8);
        let all = 2 * 8 * RECORD as u64 + data.ahead_bytes(&plan);
        let build = Loader::builder(data, plan).hints(hints).overlap(overlap).memory_limit(all - 1).build();
        assert!(matches!(build, Err(Error::Memory { wanted, .. }) if wanted == all), "{hints} {overlap}");
    }
}

/// Says what it was asked for: the records hinted at, and an end after each read.
struct Asked(Sender<Option<Vec<u64>>>);

impl Dataset for Asked {
    fn records(&self) -> u64 {
        23
    }
    fn record_bytes(&self) -> usize {
        100
    }
    fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
        self.0.send(None)?;
        Ok(out.len())
    }
    fn will_need(&mut self, batch: &BatchPlan) -> HintStats {
        self.0.send(Some(batch.runs().flatten().collect())).expect("the test listens");
        HintStats::default()
    }
}

#[test]
fn each_record_is_asked_for_once_and_no_further_ahead_than_the_budget() {
    for tail in [Tail::Drop, Tail::Keep, Tail::Wrap] {
        for (start, budget, records) in [
            (0, None, u64::MAX),
            (0, Some(0), 0),
            (0, Some(1), 1),
            (0, Some(300), 3),
            (0, Some(1200), 12),
            (2, Some(700), 7),
            (0, Some(u64::MAX), u64::MAX),
        ] {
            let case = format!("{tail:?}, budget {budget:?}, from step {start}");
            let plan = Plan::builder(23).batch(5).shuffle(Shuffle::Records).tail(tail).build().unwrap();
            let (told, asked) = channel();
            let builder = Loader::builder(Asked(told), plan);
            let builder = if let Some(bytes) = budget { builder.hint_window(bytes) } else { builder };
            let mut loader = builder.build().unwrap();
            // Each time, and after a resumption too.
            let checkpoint = serde_json::json!({
                "version": 1, "plan": plan, "record_bytes": 100, "fingerprint": 0, "epoch": 0, "step": start
            });
            let checkpoint = serde_json::from_value(checkpoint).unwrap();
            for (epoch, start) in [(0, start), (1, 0)] {
                let order = |from: usize| -> Vec<u64> {
                    (from as u64..)
                        .map_while(|step| plan.batch(epoch, step))
                        .flat_map(|b| b.runs().flatten())
                        .collect()
                };
                let wanted = order(start);
                let steps = if epoch == 0 {
                    loader.epochs_from(&checkpoint, 1).unwrap().count()
                } else {
                    loader.epoch(epoch).count()
                };
                // Epoch 1 begins when epoch 0 has been read, so what is asked for is this one's.
                assert_eq!(steps as u64 + start as u64, plan.steps());
                let mut found: Vec<u64> = Vec::new();
                let mut reads = 0;
                // The first batch alone before it is read, and then at most two more batches at a time.
                let mut through = 5;
                let more = |through: u64, step: u64| {
                    (through + 10).min((step * 5).saturating_add(records).max(through))
                };
                while reads < steps {
                    match asked.recv().unwrap() {
                        Some(records) => found.extend(records),
                        None => {
                            reads += 1;
                            assert_eq!(
                                found.len() as u64,
                                through.min(wanted.len() as u64),
                                "{case}, read {reads}"
                            );
                            // Once behind the first, and before each of the others.
                            if reads == 1 {
                                through = more(through, 1);
                            }
                            through = more(through, reads as u64 + 1);
                        }
                    }
                }
                if steps == 1 {
                    // What is asked for behind the first read comes behind its mark.
                    continue;
                }
                assert_eq!(found, wanted, "{case}");
            }
        }
    }
}

/// Counts the pages of each batch that are in memory just before it is read.
#[cfg(target_os = "linux")]
struct Counted(Arc<Records>, Arc<AtomicU64>);

#[cfg(target_os = "linux")]
impl Dataset for Counted {
    fn records(&self) -> u64 {
        self.0.len()
    }

    fn record_bytes(&self) -> usize {
        RECORD
    }

    fn read(&mut self, batch: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
        // Relaxed: the test looks when it has received the batch.
        self.1.fetch_add(self.0.residency_of(batch)?.resident, Ordering::Relaxed);
        self.0.read(batch, out)
    }

    fn evict(&mut self, batch: &BatchPlan, policy: CachePolicy) -> Result<(), BoxError> {
        self.0.evict(batch, policy)
    }
}

#[test]
#[cfg(target_os = "linux")]
fn pages_are_given_up_after_the_read() {
    let (_dir, paths) = files(&[4096]); // 512 pages
    let data = open(&paths);
    let plan = Plan::builder(4096).batch(512).build().unwrap();
    let pages = |resident| Residency { pages: 512, resident };
    (*data).evict().unwrap();
    if (*data).residency().unwrap().resident > 0 {
        eprintln!("not checked: the file system lets go of nothing");
        return;
    }
    let cached = |policy| {
        (*data).evict().unwrap();
        let found = Arc::new(AtomicU64::new(0));
        let mut loader = Loader::builder(Counted(data.clone(), found.clone()), plan)
            .hints(false)
            .cache_policy(policy)
            .build()
            .unwrap();
        assert!(loader.epoch(0).all(|batch| batch.is_ok()));
        assert_eq!(loader.report().evict_failed, 0);
        found.store(0, Ordering::Relaxed);
        assert!(loader.epoch(1).all(|batch| batch.is_ok()));
        (found.load(Ordering::Relaxed), (*data).residency().unwrap())
    };
    // Whoever drops the whole page cache meanwhile drops these pages too: then again.
    let kept = (0..100).any(|_| cached(CachePolicy::Keep) == (512, pages(512)));
    assert!(kept, "not all there in the second epoch, a hundred times");
    let (again, after) = cached(CachePolicy::Drop);
    // What the device reads ahead of the last batch may be there; the batches themselves are gone.
    assert!(again < 512 && after.resident < 512, "{again}, {after:?}");
}

/// Cannot give up anything.
struct Stubborn;

impl Dataset for Stubborn {
    fn records(&self) -> u64 {
        8
    }
    fn record_bytes(&self) -> usize {
        1
    }
    fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
        Ok(out.len())
    }
    fn evict(&mut self, _: &BatchPlan, policy: CachePolicy) -> Result<(), BoxError> {
        assert_ne!(policy, CachePolicy::Keep, "nothing is to be given up");
        Err("no such call".into())
    }
}

#[test]
fn pages_that_cannot_be_given_up_are_counted_and_harm_no_batch() {
    for (evict, failed) in [(CachePolicy::Keep, 0), (CachePolicy::Drop, 4)] {
        let plan = Plan::builder(8).batch(2).build().unwrap();
        let mut loader = Loader::builder(Stubborn, plan).cache_policy(evict).build().unwrap();
        assert_eq!(loader.epoch(0).filter(Result::is_ok).count(), 4);
        assert_eq!(loader.report().evict_failed, failed);
        assert_eq!(loader.report().to_string().contains("could not be given up"), failed > 0);
    }
}

#[test]
fn what_goes_on_where_the_last_ended_is_left_to_the_system() {
    let asked = |order, shard: (u64, u64)| {
        let plan = Plan::builder(23).batch(3).shuffle(order).rank(shard.0, shard.1).build().unwrap();
        let (told, asked) = channel();
        let mut loader = Loader::builder(Asked(told), plan).build().unwrap();
        let mut found = Vec::new();
        for epoch in 0..2 {
            assert_eq!(loader.epoch(epoch).count() as u64, plan.steps());
        }
        drop(loader);
        found.extend(asked.iter().flatten().map(|records| (records[0], records.len())));
        (plan, found)
    };
    // In order there is no jump but to the first batch, which is read at once; a rank of two jumps every time.
    assert_eq!(asked(Shuffle::None, (0, 1)).1, []);
    assert_eq!(asked(Shuffle::None, (1, 2)).1, [(9, 3), (15, 3), (9, 3), (15, 3)]);
    // In chunks of two batches, the first of each.
    let (plan, found) = asked(Shuffle::Chunks { records: 6 }, (0, 1));
    let mut jumps = Vec::new();
    for epoch in 0..2 {
        let mut next = None;
        for batch in (0..).map_while(|step| plan.batch(epoch, step)) {
            let runs: Vec<_> = batch.runs().collect();
            if runs.len() > 1 || *next.get_or_insert(runs[0].start) != runs[0].start {
                jumps.push((runs[0].start, 3));
            }
            next = runs.last().map(|run| run.end);
        }
    }
    assert!(jumps.len() < 14, "some go on");
    assert_eq!(found, jumps);
}

#[test]
fn one_limit_for_several_loaders() {
    let (_dir, paths) = files(&[40]);
    let plan = Plan::builder(40).batch(8).build().unwrap();
    let slots = 2 * 8 * RECORD as u64;
    let limit = MemoryLimit::new(2 * slots + 1);
    let build = || Loader::builder(open(&paths), plan).memory_limit(&limit).build();
    let (mut train, valid) = (build().unwrap(), build().unwrap());
    assert_eq!(limit.taken(), 2 * slots);
    assert_eq!(
        build().unwrap_err().to_string(),
        "option `memory_limit`: wanted at least 8192 bytes (2 host slots of 8 records of 512 bytes), found 16385, of which \
         16384 are taken"
    );
    assert_eq!(limit.taken(), 2 * slots, "what was refused takes nothing");
    // A loader that could not be built after all gives its part back.
    drop(valid);
    let failed =
        Loader::builder(open(&paths), plan).memory_limit(&limit).trace("/no such folder/trace.json").build();
    assert!(matches!(failed, Err(Error::Trace { .. })));
    assert_eq!(limit.taken(), slots);
    assert_eq!(train.epoch(0).count(), 5);
    train.close().unwrap();
    assert_eq!(limit.taken(), 0);
    // A number is a limit of its own.
    for _ in 0..2 {
        Loader::builder(open(&paths), plan).memory_limit(slots).build().unwrap();
    }
}
