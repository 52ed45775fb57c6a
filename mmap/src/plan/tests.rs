//! Tests of what the docs of plans promise.

#![allow(clippy::cast_possible_truncation)] // small numbers
#![allow(clippy::needless_pass_by_value)] // plans are made where they are passed

use std::collections::BTreeSet;

use super::*;

fn records(batch: impl std::borrow::Borrow<BatchIndices>) -> impl Iterator<Item = u64> {
    batch.borrow().runs().flatten()
}

impl BatchIndices {
    /// The chunks that no batch of the share needs after this one.
    fn chunks_behind(&self) -> Option<Vec<Range<u64>>> {
        let window = self.window()?;
        let Range { start, end } = window.positions;
        let last = end == window.share().end;
        let behind = if last { window.resident_at(end - 1).end } else { window.resident_at(end).start };
        Some(self.ranges(&window, window.resident_at(start).start..behind))
    }
}

fn window(chunk_records: u64, window_chunks: u64) -> Shuffle {
    Shuffle::Window { chunk_records, window_chunks }
}

/// Returns the only run of a plan's first batch.
fn only_run(plan: Plan) -> Range<u64> {
    let mut runs = plan.batch(0, 0).unwrap().runs();
    let run = runs.next().unwrap();
    assert_eq!(runs.next(), None);
    run
}

fn epoch(plan: Plan, epoch: u64) -> Vec<u64> {
    (0..plan.steps(0)).flat_map(|step| records(plan.batch(epoch, step).unwrap())).collect()
}

#[test]
fn every_refusal() {
    let of = |records| Plan::builder(records);
    let rank = |rank, world| PlanError::Rank { rank, world };
    let chunk = "a chunk needs at least one record, found 0";
    let refused = [
        (of(0), PlanError::NoRecords, "a plan needs at least one record, found 0"),
        (of(1).batch(0), PlanError::ZeroBatch, "a batch needs at least one record, found 0"),
        (of(1).shuffle(Shuffle::Chunks { records: 0 }), PlanError::ZeroChunk, chunk),
        (of(1).shuffle(window(0, 1)), PlanError::ZeroChunk, chunk),
        (of(1).shuffle(window(1, 0)), PlanError::ZeroWindow, "a window needs at least one chunk, found 0"),
        (
            of(1).seed(0),
            PlanError::SeedWithoutShuffle { seed: 0 },
            "the seed 0 has no effect, because the plan does not shuffle: set `shuffle`, or leave out the \
             seed",
        ),
        (of(9).rank(3, 3), rank(3, 3), "the rank must be below the world size 3, found 3"),
        (of(9).rank(0, 0), rank(0, 0), "the rank must be below the world size 0, found 0"),
        (
            of(9).batch(5).rank(0, 2),
            PlanError::NoStep { records: 9, batch: 5, world: 2 },
            "one step of 2 ranks needs 5 records for each, found 9 in all: take a smaller batch, or \
             keep the last batch",
        ),
        (
            of(9).batch(1 << 32).rank(0, 1 << 32).last_batch(LastBatch::Wrap),
            PlanError::StepTooLarge { batch: 1 << 32, world: 1 << 32 },
            "one step of 4294967296 ranks needs 4294967296 records for each: together with the data \
             set more than 2^64",
        ),
    ];
    for (builder, error, message) in refused {
        assert_eq!(builder.build(), Err(error));
        assert_eq!(error.to_string(), message);
    }
}

#[test]
fn other_ranks_and_ranges_are_checked_like_new_plans() {
    let plan = Plan::builder(100).batch(10).shuffle(Shuffle::Full).seed(3).rank(2, 3).build().unwrap();
    let first = Plan::builder(100).batch(10).shuffle(Shuffle::Full).seed(3).rank(0, 3).build().unwrap();
    assert_eq!(plan.with_rank(0, 3), Ok(first.clone()));
    assert_eq!(first.with_rank(2, 3), Ok(plan.clone()));
    assert_eq!(plan.with_rank(3, 3), Err(PlanError::Rank { rank: 3, world: 3 }));
    assert_eq!(plan.with_rank(0, 11), Err(PlanError::NoStep { records: 100, batch: 10, world: 11 }));
    assert_eq!(plan.with_records(0..100), Ok(plan.clone()));
    assert_eq!(plan.with_records(7..7), Err(PlanError::NoRecords));
    assert_eq!(plan.with_records(0..29), Err(PlanError::NoStep { records: 29, batch: 10, world: 3 }));

    // The plan of records 40..90 has the order of a plan of 50 records, moved by 40.
    let part = plan.with_records(40..90).unwrap();
    let same = Plan::builder(50).batch(10).shuffle(Shuffle::Full).seed(3).rank(2, 3).build().unwrap();
    assert_eq!((part.list().range(), part.records(), part.steps(0)), (40..90, 50, same.steps(0)));
    let moved = epoch(same, 4).into_iter().map(|record| record + 40).collect::<Vec<_>>();
    assert_eq!(epoch(part, 4), moved);
    let last = Plan::builder(1).build().unwrap().with_records(u64::MAX - 1..u64::MAX).unwrap();
    assert_eq!(only_run(last), u64::MAX - 1..u64::MAX);
}

#[test]
fn the_largest_numbers() {
    let all = u64::MAX;
    let whole = Plan::builder(all).batch(all).build().unwrap();
    assert_eq!((whole.steps(0), whole.batch(all, 0).unwrap().len()), (1, all));
    assert_eq!(only_run(whole.clone()), 0..all);
    assert_eq!(whole.batch(0, all), None);

    let builder = Plan::builder(all).batch(all).rank(all - 1, all);
    assert!(matches!(builder.clone().build(), Err(PlanError::NoStep { .. })));
    let last = builder.last_batch(LastBatch::Keep).build().unwrap();
    assert_eq!(last.steps(0), 1);
    assert_eq!(only_run(last), all - 1..all);

    // Two chunks, the second of one record. In 64 epochs they come in both orders.
    let chunked = Plan::builder(all).shuffle(Shuffle::Chunks { records: all - 1 }).build().unwrap();
    let ends: BTreeSet<_> =
        (0..64).map(|epoch| [0, all - 1].map(|step| chunked.batch(epoch, step).unwrap().first())).collect();
    assert!(ends.into_iter().eq([[0, all - 1], [all - 1, all - 2]]));
    let shuffled = Plan::builder(all).shuffle(Shuffle::Full).build().unwrap();
    assert!(records(shuffled.batch(all, all - 1).unwrap()).all(|record| record < all));
}

/// Nothing overflows in any order. Checks the first, a middle and the last step of an epoch of nearly 2^64 records.
#[test]
fn no_order_of_the_largest_sizes_overflows() {
    let sizes = [1, 3, u64::MAX - 1, u64::MAX];
    for records in [u64::MAX - 3, u64::MAX - 2, u64::MAX - 1, u64::MAX] {
        let windows = sizes.iter().flat_map(|&chunk| sizes.map(|chunks| window(chunk, chunks)));
        let chunks = sizes.map(|records| Shuffle::Chunks { records });
        for shuffle in windows.chain(chunks).chain([Shuffle::None, Shuffle::Full]) {
            let tails = [(1, LastBatch::Drop), (1 << 40, LastBatch::Wrap)];
            for ((batch, last_batch), world) in tails.into_iter().flat_map(|tail| [(tail, 1), (tail, 2)]) {
                let plan = Plan::builder(records).batch(batch).shuffle(shuffle).last_batch(last_batch);
                let Ok(plan) = plan.rank(world - 1, world).build() else { continue };
                let end = plan.steps(0);
                for step in [0, end / 2, end - 1] {
                    let batch = plan.batch(1, step).unwrap();
                    let inside = |run: Range<u64>| run.start < run.end && run.end <= records;
                    assert!(batch.runs().take(3).all(inside), "{plan:?}");
                    let (chunk, window) = batch.shuffle.window();
                    if chunk.saturating_mul(window) < 1000 && batch.window().is_some() {
                        let _ = (batch.chunks(false), batch.chunks(true));
                        let chunks = batch.window_chunks().unwrap();
                        let has = chunks.iter().any(|chunk| chunk.contains(&batch.first()));
                        assert!(has, "{plan:?}, {step}: {chunks:?}");
                    }
                }
            }
        }
    }
}

/// Record 9 is alone in its chunk. In the first epochs with this seed, it is at several places.
#[test]
fn a_short_chunk_in_the_middle_shifts_what_follows() {
    let plan = Plan::builder(10).shuffle(Shuffle::Chunks { records: 3 }).seed(5).build().unwrap();
    let orders: Vec<Vec<u64>> = (0..8).map(|e| epoch(plan.clone(), e)).collect();
    let places: BTreeSet<usize> =
        orders.iter().map(|order| order.iter().position(|&record| record == 9).unwrap()).collect();
    assert!(places.len() > 2 && places.iter().all(|place| place % 3 == 0), "{places:?}");
    for order in orders {
        for chunk in [[0, 1, 2], [3, 4, 5], [6, 7, 8]] {
            assert!(order.windows(3).any(|window| window == chunk), "{order:?}");
        }
    }
}

/// The numbers of these epochs come from a separate implementation in Python that lists tapes, blocks and sections.
#[test]
fn golden_windows() {
    let order = |n, records, chunks, seed, e| {
        let window = window(records, chunks);
        epoch(Plan::builder(n).shuffle(window).seed(seed).build().unwrap(), e)
    };
    assert_eq!(order(20, 3, 2, 0, 0), [7, 8, 3, 9, 2, 4, 0, 19, 1, 17, 18, 16, 14, 11, 13, 15, 12, 6, 10, 5]);
    assert_eq!(order(20, 3, 2, 0, 1), [6, 2, 5, 7, 18, 3, 4, 19, 15, 17, 16, 14, 12, 11, 13, 9, 10, 0, 8, 1]);
    assert_eq!(order(10, 4, 64, 1, 0), [6, 8, 1, 4, 9, 3, 0, 7, 5, 2]);
    assert_eq!(
        order(24, 4, 3, 5, 0),
        [15, 14, 13, 9, 10, 6, 11, 16, 7, 5, 1, 12, 22, 4, 2, 8, 0, 21, 3, 18, 20, 17, 23, 19]
    );
    let ranks = Plan::builder(30).batch(2).shuffle(window(3, 2)).seed(7);
    let ranks = [0, 1].map(|rank| epoch(ranks.clone().rank(rank, 2).build().unwrap(), 2));
    assert_eq!(ranks[0], [25, 27, 26, 17, 16, 18, 8, 9, 28, 7, 20, 29, 0, 19]);
    assert_eq!(ranks[1], [21, 10, 11, 12, 2, 1, 3, 23, 24, 22, 14, 4, 15, 13]);
}

/// The first eight records of each order. They come from the implementation that `golden_windows` names.
#[test]
fn golden_orders() {
    let order = |n, seed, e| {
        let plan = Plan::builder(n).shuffle(Shuffle::Full).seed(seed).build().unwrap();
        (0..n.min(8)).flat_map(|step| records(plan.batch(e, step).unwrap())).collect::<Vec<_>>()
    };
    assert_eq!(order(4, 0, 0), [0, 3, 2, 1]);
    assert_eq!(order(10, 0, 0), [9, 3, 2, 4, 6, 7, 1, 0]);
    assert_eq!(order(10, 0, 1), [2, 4, 1, 9, 6, 5, 3, 8]);
    assert_eq!(order(1000, 1, 0), [190, 578, 8, 549, 691, 82, 544, 682]);
    assert_eq!(
        order(1 << 20, 42, 3),
        [332_957, 86_876, 654_528, 950_165, 765_424, 1_010_909, 644_239, 250_862]
    );
}

/// Over the batches of a rank, each chunk is requested once and given up once. All records of a batch are in its window. The
/// windows of a rank have only its own records, so each rank reads its share once, for several sizes and numbers of ranks.
#[test]
fn ranks_read_their_shares_once_and_nothing_else() {
    let flat = |ranges: Vec<Range<u64>>| ranges.into_iter().flatten().collect::<Vec<u64>>();
    for (n, chunk, chunks, batch, worlds) in [
        (16 * 64 * 20 + 7, 20, 64, 16, &[1, 4, 16, 64][..]),
        (30_000, 7, 100, 13, &[1, 4, 16, 64]),
        (9999, 1000, 3, 10, &[1, 4, 16, 64]),
        (10_000, 100, 10, 30, &[1]),
        (10_007, 64, 8, 64, &[3]),
        (9999, 50, 7, 1000, &[2]),
        (500, 100, 64, 10, &[1]),
    ] {
        for &world in worlds {
            let mut read = BTreeSet::new();
            for rank in 0..world {
                let plan = Plan::builder(n).batch(batch).shuffle(window(chunk, chunks)).seed(9);
                let plan = plan.rank(rank, world).build().unwrap();
                // The records that were requested, and those of them that were not given up.
                let (mut asked, mut there) = (BTreeSet::new(), BTreeSet::new());
                let (mut own, mut before) = (0, 0..0);
                for step in 0..plan.steps(0) {
                    let batch = plan.batch(2, step).unwrap();
                    for record in flat(batch.chunks(step > 0).unwrap()) {
                        assert!(
                            asked.insert(record) && there.insert(record),
                            "{record} again: {plan:?}, {step}"
                        );
                    }
                    assert!(records(&batch).all(|record| there.contains(&record)), "{plan:?}, {step}");
                    for record in flat(batch.chunks_behind().unwrap()) {
                        assert!(there.remove(&record), "{plan:?}, {step}");
                    }
                    let window = batch.window().unwrap();
                    let Range { start, end } = window.positions;
                    let resident = window.resident_at(start).start..window.resident_at(end - 1).end;
                    assert!(before.start <= resident.start && before.end <= resident.end, "{plan:?}, {step}");
                    assert!(step == 0 || resident.start <= before.end, "a chunk is left out");
                    // More chunks than `most()`: one for each border of blocks in the batch, and the partial chunks at
                    // both ends of the share.
                    let blocks = plan.batch_records().div_ceil(chunk);
                    assert!(resident.end - resident.start <= window.most() + blocks + 2, "{plan:?}, {step}");
                    let new = before.end.max(resident.start)..resident.end;
                    for record in new.flat_map(|at| window.records(at)).flatten() {
                        assert!(read.insert(record), "{record} twice: {plan:?}");
                        own += 1;
                    }
                    let there: Vec<_> = resident.clone().flat_map(|at| window.records(at)).collect();
                    assert!(records(&batch).all(|record| there.iter().any(|range| range.contains(&record))));
                    before = resident;
                }
                assert_eq!(own, plan.steps(0) * plan.batch_records(), "{plan:?}");
            }
        }
    }
    let sole = Plan::builder(100).batch(100).shuffle(window(5, 4)).build().unwrap();
    assert_eq!(sole.batch(0, 0).unwrap().chunks(false), None);
}

/// Sorts the records by 1000 classes. Returns the mean number of different classes in a batch and in 50 consecutive
/// batches, and the number of pairs of neighbors that are in one batch, in up to 800 batches.
fn mixing(n: u64, shuffle: Shuffle) -> (f64, f64, u64) {
    let plan = Plan::builder(n).batch(256).shuffle(shuffle).seed(1).build().unwrap();
    let batches: Vec<Vec<u64>> =
        (0..plan.steps(0).min(800)).map(|step| records(plan.batch(0, step).unwrap()).collect()).collect();
    let classes = |batches: &[Vec<u64>]| {
        let mut of: Vec<u64> = batches.iter().flatten().map(|record| record * 1000 / n).collect();
        of.sort_unstable();
        of.dedup();
        of.len()
    };
    let mean = |size| {
        let parts = batches.windows(size).step_by(size);
        parts.clone().map(classes).sum::<usize>() as f64 / parts.len() as f64
    };
    let neighbors = |batch: &Vec<u64>| {
        let mut batch = batch.clone();
        batch.sort_unstable();
        batch.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count() as u64
    };
    (mean(1), mean(50), batches.iter().map(neighbors).sum())
}

#[test]
fn sorted_classes_are_mixed() {
    // A window of 64 of the 128 chunks has half of the classes at a time.
    let (in_one, in_many, _) = mixing(1 << 16, window(512, 64));
    assert!(in_one > 205.0 && in_many > 600.0, "{in_one}, {in_many}");
    // A window of more than all 128 chunks has all classes.
    let (in_one, in_many, _) = mixing(1 << 16, window(512, 144));
    assert!(in_one > 220.0 && in_many >= 990.0, "{in_one}, {in_many}");
    // For comparison: a shuffle buffer of 128 * 341 records leaves 625 pairs of neighbors in the same batch.
    let (in_one, in_many, neighbors) = mixing(1_281_167, window(341, 128));
    assert!(in_one > 120.0 && in_many > 195.0 && neighbors < 750, "{in_one}, {in_many}, {neighbors}");
}

/// If there is one chunk more than a window has, the records are mixed as well as before. Each
/// larger window mixes about as well or better.
#[test]
fn a_larger_window_never_mixes_worse() {
    let mut last = (0.0, 0.0);
    for chunks in [8, 16, 32, 63, 64, 65, 80, 100, 127, 128, 129] {
        let (in_one, in_many, _) = mixing(1 << 16, window(512, chunks));
        assert!(
            in_one > 0.98 * last.0 && in_many > 0.97 * last.1,
            "{chunks}: {in_one}, {in_many} after {last:?}"
        );
        last = (in_one, in_many);
    }
    let plan = |chunks| {
        let shuffle = window(512, chunks);
        epoch(Plan::builder(1 << 16).batch(256).shuffle(shuffle).seed(1).build().unwrap(), 0)
    };
    assert_ne!(plan(64), plan(65));
    assert_ne!(plan(100), plan(127));
}

#[test]
fn no_batch_comes_again_in_another_epoch() {
    let shuffle = window(512, 64);
    let plan = Plan::builder(1 << 16).batch(64).shuffle(shuffle).seed(1).build().unwrap();
    let batches = |e| -> BTreeSet<Vec<u64>> {
        let sorted = |step| {
            let mut batch: Vec<u64> = records(plan.batch(e, step).unwrap()).collect();
            batch.sort_unstable();
            batch
        };
        (0..plan.steps(0)).map(sorted).collect()
    };
    assert!(batches(0).is_disjoint(&batches(1)));
}

/// A hash (FNV-1a) of the starts and ends of all runs, each as a word of 64 bits. The expected numbers come from a
/// separate implementation in Python that lists every record.
#[test]
fn golden_hash_of_a_million_records() {
    for (order, golden) in [
        (Shuffle::Full, 0x18f2_2bbc_1acd_6c1b_u64),
        (Shuffle::Chunks { records: 999 }, 0xf132_b571_2d48_5d97),
        (window(999, 64), 0x045e_2140_29c4_98dd),
    ] {
        let plan = Plan::builder(1_000_000).batch(1000).shuffle(order).seed(42).build().unwrap();
        let mut hash = 0xcbf2_9ce4_8422_2325_u64;
        for step in 0..plan.steps(0) {
            for end in plan.batch(3, step).unwrap().runs().flat_map(|run| [run.start, run.end]) {
                hash = (hash ^ end).wrapping_mul(0x0100_0000_01b3);
            }
        }
        assert_eq!(hash, golden, "{order:?}");
    }
}

/// Checks every batch: a schedule has the right size after the steps of all epochs so far, and
/// every epoch has all records that it does not drop.
#[test]
fn a_schedule_counts_the_steps_of_the_training() {
    for (n, world, tail) in [
        (500, 1, LastBatch::Keep),
        (500, 3, LastBatch::Keep),
        (501, 2, LastBatch::Drop),
        (77, 3, LastBatch::Wrap),
    ] {
        for sizes in [
            [(3, 20), (10, 7), (0, 25), (31, 4), (2, 9)],
            [(400, 3), (1, 20), (1, 1), (5, 7), (1, 3)],
            [(u64::MAX - 1, 5), (1, 6), (1, 7), (1, 8), (1, 9)],
        ] {
            let plan = |rank| {
                let builder = Plan::builder(n).batches(sizes).last_batch(tail).rank(rank, world);
                builder.shuffle(Shuffle::Full).build().unwrap()
            };
            let schedule = sizes.iter().flat_map(|&(steps, size)| (0..steps).map(move |_| size));
            let mut schedule = schedule.chain(std::iter::repeat(sizes[4].1));
            let (mut trained, mut own) = (0, vec![0; world as usize]);
            for epoch in 0..12 {
                let mut seen = Vec::new();
                let longest = plan(0).steps(epoch);
                for (step, size) in (0..longest).zip(schedule.by_ref()) {
                    for rank in 0..world {
                        let Some(batch) = plan(rank).batch(epoch, step) else { continue };
                        let least = if step + 1 == longest && tail == LastBatch::Keep { 1 } else { size };
                        assert!((least..=size).contains(&batch.len()), "{sizes:?}, {epoch}, {step}");
                        seen.extend(records(&batch));
                    }
                }
                for rank in 0..world {
                    assert_eq!(plan(rank).steps_between(epoch..epoch + 1, trained), plan(rank).steps(epoch));
                    own[rank as usize] += plan(rank).steps(epoch);
                    assert_eq!(plan(rank).steps_between(0..epoch + 1, 0), own[rank as usize]);
                }
                trained += longest;
                let visits = seen.len() as u64;
                seen.sort_unstable();
                seen.dedup();
                match tail {
                    LastBatch::Keep => assert!(seen.into_iter().eq(0..n) && visits == n),
                    LastBatch::Drop => assert!(seen.len() as u64 == visits && n - visits < 20 * world),
                    LastBatch::Wrap => assert!(seen.into_iter().eq(0..n)),
                }
            }
        }
    }
    let plan = Plan::builder(10).batches([(5, 2), (1, 10)]).build().unwrap();
    assert_eq!((plan.steps_between(0..100, 0), plan.batch_records()), (104, 10));
    assert_eq!(plan.steps_between(0..u64::MAX, 0), u64::MAX);
    assert!(plan.batches().eq([(5, 2), (u64::MAX, 10)]));
    assert_eq!(Plan::builder(10).batches(plan.batches()).build(), Ok(plan));
}

#[test]
fn a_schedule_of_no_sizes_or_too_many_is_refused() {
    let sizes = |count| Plan::builder(100).batches((0..count).map(|_| (1, 3))).build();
    assert_eq!(sizes(0), Err(PlanError::BatchSizes));
    assert!(sizes(16).is_ok());
    assert_eq!(sizes(17), Err(PlanError::BatchSizes));
    assert_eq!(Plan::builder(9).batches([(1, 0), (1, 2)]).build(), Err(PlanError::ZeroBatch));
    let early = Plan::builder(9).batches([(1, 10), (1, 2)]).build();
    assert_eq!(early, Err(PlanError::NoStep { records: 9, batch: 10, world: 1 }));
    // A later call of `batch` replaces the schedule.
    let replaced = Plan::builder(9).batches([(1, 0), (1, 2)]).batch(3);
    assert_eq!(replaced.build(), Plan::builder(9).batch(3).build());
}
