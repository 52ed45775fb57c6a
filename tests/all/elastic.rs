//! Checkpoints that move: a loader with another batch size or number of ranks continues with the remaining records.

#![allow(clippy::cast_possible_truncation)] // small numbers

use std::collections::BTreeSet;

use crate::common::{RECORD, Reads, files, in_order, numbers, open, saved};
use twinbuf::loader::{Epochs, LoaderBuilder};
use twinbuf::{Checkpoint, Error, LastBatch, Loader, Plan, Shuffle};
use twinbuf_testing::Random;

/// A loader of numbers, as many as the plan has.
fn load(plan: &Plan) -> LoaderBuilder {
    Loader::builder(Reads(plan.list().range().end, 8, numbers), plan.clone())
}

/// Takes up to `steps` steps of one rank with `workers` threads, and returns the checkpoint after them. The records go
/// to `seen`.
fn go_on(
    plan: &Plan,
    from: &Checkpoint,
    steps: Option<u64>,
    workers: usize,
    seen: &mut Vec<u64>,
) -> (u64, Checkpoint) {
    let builder = if workers > 0 { load(plan).workers(workers) } else { load(plan).overlap(false) };
    let mut loader = builder.build().unwrap();
    for end in from.epoch()..from.epoch() + 4 {
        let foretold = from.steps_left(plan, end).unwrap() as usize;
        assert_eq!(loader.epochs_from(from, end).unwrap().size_hint().1, Some(foretold), "{from:?} to {end}");
    }
    let mut epochs = loader.epochs_from(from, from.epoch() + 1).unwrap();
    let (mut taken, promised) = (0, epochs.size_hint().1.unwrap() as u64);
    // Asks once more than there are batches: a rank without a part in the last step completes it by asking.
    while steps.is_none_or(|steps| taken < steps) {
        let Some(batch) = epochs.next() else { break };
        let batch = batch.unwrap();
        assert_eq!((batch.epoch(), batch.step()), (from.epoch(), from.step() + taken));
        taken += 1;
        seen.extend(batch.cast::<u64>().unwrap());
        assert_eq!(batch.checkpoint(), epochs.checkpoint());
    }
    assert!(taken == promised || steps == Some(taken), "{taken} of {promised} batches");
    (taken, saved(&epochs.checkpoint()))
}

/// One epoch whose ranks and batch size change at random steps. Returns the number of its pieces.
fn history(number: u64) -> u32 {
    let mut random = Random(number);
    let (first, records) = (random.below(3) * 17, 1 + random.below(300));
    let shuffle = match number % 4 {
        0 => Shuffle::None,
        1 => Shuffle::Chunks { records: 1 + random.below(20) },
        2 => Shuffle::Full,
        _ => Shuffle::Window { chunk_records: 1 + random.below(12), window_chunks: 1 + random.below(6) },
    };
    let tail = [LastBatch::Keep, LastBatch::Keep, LastBatch::Drop, LastBatch::Wrap][random.below(4) as usize];
    let plan = |sizes: &[(u64, u64)], world| {
        let plan = Plan::builder(first + records).batches(sizes.iter().copied()).shuffle(shuffle);
        let plan = plan.last_batch(tail).rank(0, world);
        let plan = if shuffle == Shuffle::None { plan } else { plan.seed(number) };
        plan.build().and_then(|plan| plan.with_records(first..first + records))
    };
    let epoch = random.below(3);
    // The checkpoint of any loader at the start of that epoch.
    let mut place = load(&plan(&[(1, 1)], 1).unwrap()).overlap(false).build().unwrap();
    let mut checkpoint = if epoch == 0 {
        Checkpoint::start()
    } else {
        drop(place.epochs(epoch..epoch + 1));
        place.checkpoint()
    };

    // Usually without threads: there would be thousands.
    let workers = if number % 50 < 4 { 1 + random.below(3) as usize } else { 0 };
    let (mut seen, mut changes) = (Vec::new(), 0);
    let step = loop {
        let mut sizes = Vec::new();
        for _ in 0..1 + random.below(3) {
            let batch = [4, 8, 4, 8, 1 + random.below(9)][random.below(5) as usize];
            // Of the whole training: sometimes in an epoch before this one, sometimes in this one.
            sizes.push((random.below(2 * records), batch));
        }
        let batch = sizes.iter().map(|size| size.1).max().unwrap();
        let world = 1 + random.below(3);
        let Ok(plan) = plan(&sizes, world) else { continue };
        let left = random.below(8);
        // The last part of the history runs to the end.
        let steps = (left > 0).then(|| random.below(records / (batch * world) + 2));
        let before = checkpoint.clone();
        let mut ends = Vec::new();
        let mut most = 0;
        for rank in 0..world {
            let plan = plan.with_rank(rank, world).unwrap();
            let (taken, end) = go_on(&plan, &before, steps, workers, &mut seen);
            most = most.max(taken);
            ends.push(end);
        }
        changes += 1;
        // A rank without a part in the last step is behind until it has asked for it.
        let furthest = ends.iter().max_by_key(|end| (end.epoch(), end.step())).unwrap().clone();
        if furthest.epoch() > before.epoch() {
            assert!(most == 0, "history {number}: the epoch was over");
            break before.plan().map_or(0, |plan| plan.batch_records() * plan.world());
        }
        if steps.is_none() {
            assert!(ends.iter().all(|end| *end == furthest), "history {number}: {ends:?}");
            let over = furthest.step() - before.step() == most;
            assert!(over, "history {number}: {furthest:?} after {most} steps from {before:?}");
            break batch * world;
        }
        checkpoint = furthest;
    };
    let mut counts = vec![0_u32; usize::try_from(records).unwrap()];
    for record in &seen {
        counts[usize::try_from(record - first).unwrap()] += 1;
    }
    let missing = counts.iter().filter(|&&count| count == 0).count() as u64;
    let twice = counts.iter().filter(|&&count| count > 1).count() as u64;
    let what = format!("history {number}: {shuffle:?}, {tail:?}, {missing} missing, {twice} twice");
    match tail {
        LastBatch::Keep => assert!(missing == 0 && twice == 0, "{what}"),
        LastBatch::Drop => assert!(missing < step && twice == 0, "{what}"),
        LastBatch::Wrap => assert_eq!(missing, 0, "{what}"),
    }
    changes
}

#[test]
fn histories_of_ranks_and_schedules_see_every_record_once() {
    let histories: u32 = twinbuf_testing::extent(250, 1000);
    let changes: u32 = (0..histories.into()).map(history).sum();
    assert!(changes > 2 * histories, "{changes} changes");
    println!("{histories} histories, {changes} pieces");
}

#[test]
fn a_batch_size_that_grows_in_mid_epoch() {
    let plan = |batch| Plan::builder(44).batch(batch).shuffle(Shuffle::Full).seed(3).build().unwrap();
    let build = |batch| load(&plan(batch)).build().unwrap();
    let records = |epochs: Epochs<'_>| -> Vec<u64> {
        epochs.flat_map(|batch| batch.unwrap().cast().unwrap().to_vec()).collect()
    };
    let order = records(build(1).epoch(1));

    let mut small = build(4);
    assert_eq!(small.epoch(1).take(3).count(), 3);
    let checkpoint = saved(&small.checkpoint());
    assert_eq!((checkpoint.epoch(), checkpoint.step()), (1, 3));

    let mut large = build(8);
    let mut epochs = large.epochs_from(&checkpoint, 3).unwrap();
    assert_eq!(epochs.size_hint().1, Some(4 + 5));
    let mut at = 12;
    for step in 3..7 {
        let batch = epochs.next().unwrap().unwrap();
        assert_eq!((batch.epoch(), batch.step()), (1, step));
        assert_eq!(batch.cast::<u64>().unwrap(), &order[at..at + 8]);
        at += 8;
    }
    // The next epoch is the plan's regular one.
    let batch = epochs.next().unwrap().unwrap();
    assert_eq!((batch.epoch(), batch.step()), (2, 0));
    assert_eq!(Some(batch.plan()), plan(8).batch(2, 0).as_ref());
    let text = serde_json::to_value(batch.checkpoint()).unwrap();
    assert_eq!(text["before"], serde_json::json!([]));
    drop((batch, epochs));
    // So it is if the rest of the epoch is left out, by the plan of either loader.
    let next = large.epochs_from(&checkpoint, 2).unwrap().next().unwrap().unwrap().checkpoint().next_epoch();
    assert_eq!((next.epoch(), next.step()), (2, 0));
    assert_eq!(records(large.epochs_from(&next, 3).unwrap()), records(build(8).epoch(2)));
    assert_eq!(build(4).epochs_from(&next, 3).unwrap().count(), 11);
    // Back at the original batch size, the checkpoint contains nothing of the other one.
    let mut again = build(4);
    let rest = again.epochs_from(&checkpoint, 2).unwrap();
    assert_eq!(rest.checkpoint(), checkpoint);
}

/// A training of three epochs whose batch size changes twice in each of the first two.
#[test]
fn a_schedule_is_resumed_at_every_step() {
    let sizes = [(10, 32), (4, 64), (7, 128), (3, 16), (u64::MAX, 64)];
    let windows = Shuffle::Window { chunk_records: 10, window_chunks: 9 };
    for (shuffle, tail) in [
        (Shuffle::Full, LastBatch::Keep),
        (windows, LastBatch::Keep),
        (Shuffle::Chunks { records: 50 }, LastBatch::Drop),
        (Shuffle::None, LastBatch::Wrap),
    ] {
        let plan = Plan::builder(1000).batches(sizes).shuffle(shuffle).last_batch(tail).build().unwrap();
        let build = |workers| load(&plan).workers(workers).build().unwrap();
        let all = |loader: &mut Loader, from: &Checkpoint| -> Vec<(u64, u64, Vec<u64>)> {
            let mut epochs = loader.epochs_from(from, 3).unwrap();
            let promised = epochs.size_hint().1.unwrap();
            let batches = epochs.by_ref().map(|batch| batch.unwrap());
            let batches: Vec<_> = batches
                .map(|batch| (batch.epoch(), batch.step(), batch.cast::<u64>().unwrap().to_vec()))
                .collect();
            assert_eq!(batches.len(), promised);
            batches
        };
        let mut loader = build(1);
        let whole = all(&mut loader, &Checkpoint::start());
        for (_, _, records) in whole.iter().take(10) {
            assert_eq!(records.len(), 32);
        }
        assert_eq!(whole[10].2.len(), 64);
        assert_eq!((whole[13].2.len(), whole[14].2.len()), (64, 128));
        assert_eq!(loader.report().batches, whole.len() as u64);
        let mut loader = build(1);
        let mut rest = loader.epochs(0..3);
        let mut at = 0;
        while let Some(batch) = rest.next() {
            at += 1;
            let checkpoint = saved(&batch.unwrap().checkpoint());
            assert_eq!(checkpoint, rest.checkpoint());
            assert_eq!(all(&mut build(1 + at % 2), &checkpoint), whole[at..], "after {at} batches");
        }
        assert_eq!(at, whole.len());
    }
}

#[test]
fn a_start_at_a_step_of_a_later_epoch_is_checked_against_that_epoch() {
    // Steps of epochs 0 and 1: 5 and 10, 10 and 5.
    for (sizes, steps) in [([(5, 20), (1, 10)], 10), ([(10, 10), (1, 20)], 5)] {
        let plan = Plan::builder(100).batches(sizes).build().unwrap();
        let mut loader = load(&plan).build().unwrap();
        let start = Checkpoint::start().next_epoch();
        let inside = start.clone().with_step(steps - 1);
        assert_eq!(inside.steps_left(&plan, 2).unwrap(), 1);
        assert_eq!(loader.epochs_from(&inside, 2).unwrap().count(), 1);
        let error = loader.epochs_from(&start.with_step(steps + 1), 2).unwrap_err();
        assert!(matches!(error, Error::Checkpoint { field: "step", .. }), "{error}");
    }
}

#[test]
fn slots_are_of_the_largest_batch_from_the_start() {
    let plan = Plan::builder(100).batches([(5, 2), (3, 16), (1, 4)]).build().unwrap();
    let (slots, each) = load(&plan).wanted_slots().unwrap();
    assert_eq!((slots, each.size()), (3, 16 * 8));
    let mut loader = load(&plan).build().unwrap();
    let places: BTreeSet<_> = loader.epochs(0..3).map(|batch| batch.unwrap().as_ptr()).collect();
    assert_eq!(places.len(), 3);
    // 5 of 2, 3 of 16, and 10 of 4; then 25 of 4.
    assert_eq!(loader.report().batches, 18 + 2 * 25);
}

#[test]
fn another_schedule_continues_with_the_steps_of_the_training() {
    let build = |sizes: &[(u64, u64)]| {
        load(&Plan::builder(100).batches(sizes.iter().copied()).build().unwrap()).build().unwrap()
    };
    // Epoch 0 has 10 steps; epoch 1 is left after 5 of 20.
    let mut first = build(&[(10, 10), (1, 5)]);
    assert_eq!(first.epochs(0..2).take(15).count(), 15);
    let checkpoint = saved(&first.checkpoint());
    assert_eq!((checkpoint.epoch(), checkpoint.step()), (1, 5));
    // 15 steps were done: one more of 15 records, and then 20.
    let mut second = build(&[(16, 15), (1, 20)]);
    let sizes = |loader: &mut Loader, from: &Checkpoint| -> Vec<usize> {
        let batches = loader.epochs_from(from, 3).unwrap();
        batches.map(|batch| batch.unwrap().cast::<u64>().unwrap().len()).collect()
    };
    assert_eq!(sizes(&mut second, &checkpoint), [15, 20, 20, 20, 20, 20, 20, 20, 20]);
    assert_eq!(sizes(&mut second, &saved(&checkpoint.clone().with_step(20))), [20; 5]);
    // A checkpoint of a later epoch has counted the steps of both.
    let mut third = build(&[(16, 15), (4, 20), (1, 50)]);
    let mut epochs = third.epochs_from(&checkpoint, 4).unwrap();
    let last =
        epochs.by_ref().map(Result::unwrap).inspect(|batch| assert_eq!(batch.epoch(), 1)).nth(3).unwrap();
    let after = saved(&last.checkpoint());
    assert_eq!(serde_json::to_value(&after).unwrap()["trained"], 10);
    drop((last, epochs));
    assert_eq!(sizes(&mut third, &after), [20, 50]);
}

#[test]
fn steps_after_a_loss_spike_are_skipped() {
    let build = |batch| load(&in_order(40, batch)).build().unwrap();
    let mut loader = build(4);
    assert_eq!(loader.epoch(0).take(3).count(), 3);
    let checkpoint = loader.checkpoint();
    // An epoch that was started with another batch size.
    let mut large = build(7);
    let mut left = large.epochs_from(&checkpoint.with_step(4), 1).unwrap();
    assert_eq!(left.next().unwrap().unwrap().cast::<u64>().unwrap(), (16..23).collect::<Vec<u64>>());
    let skipped = saved(&left.checkpoint().with_step(6));
    drop(left);
    let next = large.epochs_from(&skipped, 1).unwrap().next().unwrap().unwrap();
    assert_eq!(next.cast::<u64>().unwrap(), (30..37).collect::<Vec<u64>>());
    // The start of any training.
    let mut loader = build(4);
    let skipped = saved(&Checkpoint::start().with_step(4));
    assert_eq!(loader.epochs_from(&skipped, 1).unwrap().count(), 6);
}

#[test]
fn a_past_that_cannot_be_is_refused() {
    let (_dir, paths) = files(&[40]);
    let mut loader = Loader::builder(open(&paths), in_order(40, 4)).build().unwrap();
    assert_eq!(loader.epoch(0).take(5).count(), 5);
    let good = serde_json::to_value(loader.checkpoint()).unwrap();
    assert_eq!(good["record_bytes"], RECORD);
    let many = |batch| {
        format!(
            "number of steps: wanted as many as the epoch has, found 6 steps of 1 ranks with {batch} records for each do \
             not fit into the 40 records that were left"
        )
    };
    for (batch, steps, step, wanted) in [
        (8, 6, 6, many(8)),
        (0, 6, 6, many(0)),
        (8, 2, 1, "step: wanted at least the 2 steps before it, found 1".to_string()),
        (8, 2, 9, "step: wanted at most the 8 steps of an epoch, found 9".to_string()),
    ] {
        let mut bad = good.clone();
        bad["before"] = serde_json::json!([{"batch": batch, "world": 1, "steps": steps}]);
        bad["step"] = step.into();
        let bad: Checkpoint = serde_json::from_value(bad).unwrap();
        let error = loader.epochs_from(&bad, 1).unwrap_err().to_string();
        assert_eq!(error, format!("the checkpoint has another {wanted}"));
    }
    let mut bad = good.clone();
    bad["before"] = serde_json::json!([{"batch": 1, "world": 1, "steps": u64::MAX}, {"batch": 1, "world": 1, "steps": 1}]);
    assert!(serde_json::from_value::<Checkpoint>(bad).is_err());
}
