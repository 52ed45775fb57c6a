//! The body of the fuzz target `plan`: bytes as a plan. The plan must cover the records of an epoch
//! as its `LastBatch` says.

use std::ops::Range;

use twinbuf_mmap::{BatchIndices, LastBatch, Plan, PlanBuilder, PlanError, Shuffle};

/// Data sets up to this size are listed record by record.
const LISTED: u64 = 1024;
/// Runs looked at where a batch may have more than there is time for.
const SAMPLE: usize = 32;

/// Builds the plan that these bytes say; panics where it breaks a promise of [`Plan`].
pub(crate) fn plan(bytes: &[u8]) {
    let mut bytes = bytes.iter().copied();
    let mut number = || number(&mut bytes);
    let flags = number();
    let (records, batch, world, rank) = (number(), number(), number(), number());
    let (chunk, seed, epoch, step) = (number(), number(), number(), number());
    let order = match flags % 3 {
        0 => Shuffle::None,
        1 => Shuffle::Chunks { records: chunk },
        _ if flags / 9 % 2 == 1 => Shuffle::Window { chunk_records: chunk, window_chunks: flags / 18 },
        _ => Shuffle::Full,
    };
    let tail = match flags / 3 % 3 {
        0 => LastBatch::Drop,
        1 => LastBatch::Keep,
        _ => LastBatch::Wrap,
    };
    let builder = Plan::builder(records).batch(batch).shuffle(order).last_batch(tail);
    let builder = if order == Shuffle::None { builder } else { builder.seed(seed) };

    let plan = builder.clone().rank(rank, world).build();
    // In 128 bits there is no overflow to be careful about.
    let whole_steps = u128::from(records).checked_div(u128::from(batch) * u128::from(world));
    match plan {
        Ok(plan) => {
            assert!(records > 0 && batch > 0 && rank < world, "{plan:?}");
            let whole_steps = u64::try_from(whole_steps.expect("not zero")).expect("at most the records");
            assert!(tail != LastBatch::Drop || whole_steps > 0, "a plan without a step: {plan:?}");
            let smaller = plan.steps(0).checked_sub(whole_steps).expect("all the whole steps");
            assert!(smaller <= u64::from(tail != LastBatch::Drop), "{plan:?}");
            for step in [0, step, whole_steps.saturating_sub(1), whole_steps, plan.steps(0), u64::MAX] {
                sample(&plan, epoch, step);
                if let Some(batch) = plan.batch(epoch, step) {
                    parts(&batch, seed);
                }
            }
            let wrapped = if tail == LastBatch::Wrap { batch.saturating_mul(world) } else { 0 };
            if records.max(world).max(wrapped) <= LISTED {
                list(&builder, world, epoch);
                list(&builder, 1, epoch);
            }
        }
        Err(PlanError::NoRecords) => assert_eq!(records, 0),
        Err(PlanError::ZeroBatch) => assert_eq!(batch, 0),
        Err(PlanError::ZeroChunk) => {
            assert!(matches!(
                order,
                Shuffle::Chunks { records: 0 } | Shuffle::Window { chunk_records: 0, .. }
            ));
        }
        Err(PlanError::ZeroWindow) => assert!(matches!(order, Shuffle::Window { window_chunks: 0, .. })),
        Err(PlanError::Rank { .. }) => assert!(rank >= world),
        Err(PlanError::NoStep { .. }) => assert_eq!((tail, whole_steps), (LastBatch::Drop, Some(0))),
        Err(PlanError::StepTooLarge { .. }) => {
            let step = u128::from(batch) * u128::from(world);
            assert!(tail == LastBatch::Wrap && step + u128::from(records) > u128::from(u64::MAX));
        }
        Err(error) => panic!("an error that is not foretold: {error}"),
    }
}

/// The next number: a small one in one byte, a larger one in a byte that says its width and that many bytes.
fn number(bytes: &mut impl Iterator<Item = u8>) -> u64 {
    let first = bytes.next().unwrap_or(0);
    if first < 0xF8 {
        return u64::from(first);
    }
    bytes.take(usize::from(first - 0xF7)).fold(0, |value, byte| value << 8 | u64::from(byte))
}

/// One batch of a plan of any size: it is there up to the last step, and its runs are inside the data set,
/// apart from each other (if the data set is not shorter), and as long together as the batch.
fn sample(plan: &Plan, epoch: u64, step: u64) {
    let batch = plan.batch(epoch, step);
    assert_eq!(batch.is_some(), step < plan.steps(0), "step {step} of {plan:?}");
    let Some(batch) = batch else { return };
    assert!((1..=plan.batch_records()).contains(&batch.len()));
    assert!(plan.last_batch() == LastBatch::Keep || batch.len() == plan.batch_records(), "{plan:?}");
    let mut runs = Vec::<Range<u64>>::new();
    // A shuffled batch is walked chunk by chunk to join those that touch: SAMPLE runs are soon found in a
    // large one, and a small one has no more.
    for run in batch.runs().take(SAMPLE) {
        assert!(run.start < run.end && run.end <= plan.records(), "{run:?} of {plan:?}");
        assert!(runs.last().is_none_or(|last| last.end != run.start), "two runs that touch: {plan:?}");
        let apart = runs.iter().all(|other| other.end <= run.start || run.end <= other.start);
        assert!(apart || batch.len() > plan.records(), "{plan:?}");
        runs.push(run);
    }
    let sampled = runs.iter().map(|run| run.end - run.start).sum::<u64>();
    assert!(sampled == batch.len() || (sampled < batch.len() && runs.len() == SAMPLE), "{plan:?}");
}

/// Parts of a batch are the whole, and there are no others past its end.
fn parts(batch: &BatchIndices, seed: u64) {
    let len = batch.len();
    let cut = |at: u64| at % (len + u64::from(len < u64::MAX));
    let mut ends = [0, cut(seed), cut(seed.rotate_left(32) ^ len), len];
    ends.sort_unstable();
    let parts = [0, 1, 2].map(|index| batch.part(ends[index]..ends[index + 1]));
    for (part, end) in parts.iter().zip(ends.windows(2)) {
        assert_eq!(part.as_ref().map_or(0, BatchIndices::len), end[1] - end[0], "{batch:?}");
    }
    assert_eq!(batch.part(0..len), Some(batch.clone()), "{batch:?}");
    let longer = len.saturating_add(1);
    for (start, end) in [(0, longer), (len, longer), (len - 1, u64::MAX), (u64::MAX - 1, u64::MAX), (1, 0)] {
        assert!(start < end && end <= len || batch.part(start..end).is_none(), "{batch:?}");
    }
    if len <= LISTED {
        for part in parts.iter().flatten() {
            assert_eq!(Some(part.first()), part.runs().flatten().next(), "{part:?}");
            let last = part.part(part.len() - 1..part.len()).expect("a part of a part");
            assert!(last.runs().flatten().eq(part.runs().flatten().last()), "{part:?}");
        }
        let listed = parts.into_iter().flatten().flat_map(|part| part.runs().flatten());
        assert!(listed.eq(batch.runs().flatten()), "{batch:?} at {ends:?}");
    }
}

/// Every record of an epoch over all ranks: each one once, or with [`LastBatch::Drop`] at most once, or with
/// [`LastBatch::Wrap`] as often as any other, but for one.
fn list(builder: &PlanBuilder, world: u64, epoch: u64) {
    let mut seen = Vec::new();
    let mut steps = Vec::new();
    for rank in 0..world {
        let plan = builder.clone().rank(rank, world).build().expect("one rank has a plan, so has another");
        steps.push(plan.steps(0));
        for step in 0..plan.steps(0) {
            let batch = plan.batch(epoch, step).expect("a step below `steps`");
            seen.extend(batch.runs().flatten());
        }
    }
    let plan = builder.clone().rank(0, world).build().expect("as above");
    assert!(steps.is_sorted_by(|a, b| a >= b), "a later rank has more steps: {plan:?}");
    assert!(steps[0] - steps[steps.len() - 1] <= u64::from(plan.last_batch() == LastBatch::Keep), "{plan:?}");
    let expected = match plan.last_batch() {
        LastBatch::Keep => plan.records(),
        LastBatch::Drop | LastBatch::Wrap => plan.steps(0) * plan.batch_records() * world,
    };
    assert!(expected >= plan.records() || plan.last_batch() == LastBatch::Drop, "left out: {plan:?}");
    assert_eq!(seen.len() as u64, expected, "{plan:?}");
    if plan.shuffle() == Shuffle::None && world == 1 {
        assert!(seen.iter().zip(0..).all(|(&record, at)| record == at % plan.records()), "{plan:?}");
    }
    let mut times = vec![0; usize::try_from(plan.records()).expect("few")];
    for record in seen {
        times[usize::try_from(record).expect("few")] += 1;
    }
    let least = expected / plan.records();
    assert!(times.iter().all(|times| (least..=least + 1).contains(times)), "{times:?} in {plan:?}");
    assert!(expected % plan.records() > 0 || times.iter().all(|&times| times == least), "{plan:?}");
}
