//! Random plans over lists of records, with repeats, steps an epoch, ranks, schedules and resumptions, against a model
//! that walks through the epoch one batch after the other.

#![allow(clippy::cast_possible_truncation)] // small numbers

use std::collections::BTreeSet;

use twinbuf_mmap::{LastBatch, PartialEpoch, Plan, RecordList, Shuffle};
use twinbuf_testing::Random;

/// What a plan is made of, but for the rank.
#[derive(Clone, Debug)]
struct Options {
    shuffle: Shuffle,
    last_batch: LastBatch,
    seed: u64,
    steps: Option<u64>,
    sizes: Vec<(u64, u64)>,
    world: u64,
}

impl Options {
    fn plan(&self, list: RecordList, rank: u64) -> Option<Plan> {
        let builder = Plan::builder(1).records(list).batches(self.sizes.clone()).shuffle(self.shuffle);
        let builder = builder.last_batch(self.last_batch).rank(rank, self.world);
        let builder = if self.shuffle == Shuffle::None { builder } else { builder.seed(self.seed) };
        let builder = if let Some(steps) = self.steps { builder.steps(steps) } else { builder };
        builder.build().ok()
    }

    /// The batch size after that many steps of the training.
    fn size(&self, step: u64) -> u64 {
        let mut end = 0_u64;
        let found = self.sizes.iter().find(|(steps, _)| {
            end = end.saturating_add(*steps);
            step < end
        });
        found.unwrap_or(&self.sizes[self.sizes.len() - 1]).1
    }
}

/// The positions of an epoch of `n` in the order of one rank, and how many of them were visited.
struct Model {
    n: u64,
    at: u64,
    step: u64,
    ended: bool,
}

impl Model {
    /// The places in the order that each rank visits in the next step; none past the end.
    fn next(&mut self, options: &Options, trained: u64) -> Vec<std::ops::Range<u64>> {
        let (size, world) = (options.size(trained + self.step), options.world);
        if self.ended || options.steps.is_some_and(|steps| self.step >= steps) {
            return Vec::new();
        }
        let left = self.n.saturating_sub(self.at);
        let short = left < size * world;
        let goes_on = options.last_batch == LastBatch::Wrap && (left > 0 || options.steps.is_some());
        self.ended = short && !(goes_on && options.steps.is_some());
        let lens: Vec<u64> = match options.last_batch {
            _ if !short => vec![size; world as usize],
            LastBatch::Keep => (0..world).map(|rank| left / world + u64::from(rank < left % world)).collect(),
            LastBatch::Wrap if goes_on => vec![size; world as usize],
            _ => Vec::new(),
        };
        let starts = lens.iter().scan(self.at, |at, len| Some(std::mem::replace(at, *at + len)));
        let places = starts.zip(&lens).map(|(start, len)| start..start + len).collect();
        self.at += lens.iter().sum::<u64>();
        self.step += u64::from(lens.iter().any(|&len| len > 0));
        places
    }
}

fn list(random: &mut Random) -> (RecordList, Vec<u64>) {
    let (first, n) = (random.below(50), 1 + random.below(300));
    let numbers: Vec<u64> = match random.below(4) {
        0 => return ((first..first + n).into(), (first..first + n).collect()),
        1 => {
            let step = 1 + random.below(9);
            (first..first + n * step).step_by(step as usize).collect()
        }
        // Repeats and runs, and any.
        2 => (0..n).flat_map(|at| (0..at % 4).map(move |_| first + at)).chain([3]).collect(),
        _ => (0..n).map(|_| random.below(n)).collect(),
    };
    (numbers.iter().copied().collect(), numbers)
}

/// Returns whether there is such a plan.
fn check(seed: u64) -> bool {
    let random = &mut Random(seed);
    let (list, numbers) = list(random);
    let [few, many, chunk] = [12, 60, 20].map(|n| 1 + random.below(n));
    let n = numbers.len() as u64;
    assert_eq!(list.len(), n);
    assert!((0..n).all(|at| list.get(at) == Some(numbers[at as usize])) && list.get(n).is_none());
    let window = Shuffle::Window { chunk_records: 1 + random.below(20), window_chunks: 1 + random.below(8) };
    let shuffle = *random.choose(&[Shuffle::None, Shuffle::Full, Shuffle::Chunks { records: chunk }, window]);
    let sizes = |random: &mut Random, count| {
        (0..count).map(|_| (1 + random.below(12), 1 + random.below(9))).collect::<Vec<_>>()
    };
    let count = *random.choose(&[1, 1, 3]);
    let mut options = Options {
        shuffle,
        last_batch: *random.choose(&[LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap]),
        seed: random.below(u64::MAX),
        steps: *random.choose(&[None, Some(few), Some(many)]),
        sizes: sizes(random, count),
        world: 1 + random.below(4),
    };
    let (epoch, trained) = (random.below(5), random.below(30));
    // The positions in the order in which a single rank with batches of one record visits them. Places past the end
    // continue at the start (`at % n` below).
    let drop = LastBatch::Drop;
    let alone = Options { last_batch: drop, steps: None, sizes: vec![(1, 1)], world: 1, ..options.clone() };
    let alone = alone.plan((0..n).into(), 0).unwrap();
    let order: Vec<u64> = (0..n).flat_map(|at| alone.batch(epoch, at).unwrap().runs().flatten()).collect();
    let mut model = Model { n, at: 0, step: 0, ended: false };
    let (mut parts, mut seen): (Vec<PartialEpoch>, Vec<u64>) = (Vec::new(), Vec::new());
    let resumptions = random.below(4);
    for resumption in 0..=resumptions {
        let plans: Option<Vec<(Plan, Plan)>> = (0..options.world)
            .map(|rank| Some((options.plan(list.clone(), rank)?, options.plan((0..n).into(), rank)?)))
            .collect();
        let Some(plans) = plans else { return resumption > 0 };
        assert_eq!(plans[0].0.list().range(), list.range());
        let resume =
            |plan: &Plan| plan.resume(trained, &parts).unwrap_or_else(|error| panic!("{seed}: {error}"));
        let rests: Vec<_> = plans.iter().map(|(listed, plain)| [listed, plain].map(resume)).collect();
        assert_eq!(rests[0][0].first(), model.step, "{seed}");
        let cut = if resumption < resumptions { model.step + random.below(12) } else { u64::MAX };
        loop {
            let step = model.step;
            // Without steps, what wraps around or is smaller is the end of an epoch: no other plan goes on from it.
            let last = model.at + options.size(trained + step) * options.world > n;
            let wraps = options.last_batch == LastBatch::Wrap && options.steps.is_some();
            if step >= cut && (!last || wraps) {
                break;
            }
            let places = model.next(&options, trained);
            for (rank, both) in rests.iter().enumerate() {
                let [listed, plain] = both.each_ref().map(|rest| -> Vec<u64> {
                    rest.batch(epoch, step).iter().flat_map(|batch| batch.runs().flatten()).collect()
                });
                let case = || format!("{seed}, step {step}, rank {rank}: {options:?}");
                // The list has the record of each position.
                assert!(listed.into_iter().eq(plain.iter().map(|&at| numbers[at as usize])), "{}", case());
                let place = places.get(rank).cloned().unwrap_or(0..0);
                assert_eq!(plain.len() as u64, place.end - place.start, "{}", case());
                if !matches!(shuffle, Shuffle::Window { .. }) {
                    let wanted = place.map(|at| order[(at % n) as usize]);
                    assert!(plain.iter().copied().eq(wanted), "{}", case());
                }
                seen.extend(plain);
            }
            if places.is_empty() || model.step == step {
                let ends: Vec<u64> = rests.iter().map(|both| both[0].end()).collect();
                assert!(ends.iter().all(|&end| end <= step), "{seed}: {ends:?}, {step}");
                return all_once(&seen, n, &options, seed);
            }
        }
        parts.extend(rests[0][0].parts(model.step));
        options.world = 1 + random.below(4);
        options.sizes = sizes(random, count);
    }
    unreachable!("the last part ends with the epoch")
}

/// No position twice before all were there; with [`LastBatch::Keep`] and no steps, all of them.
fn all_once(seen: &[u64], n: u64, options: &Options, seed: u64) -> bool {
    let first = &seen[..seen.len().min(n as usize)];
    let once: BTreeSet<u64> = first.iter().copied().collect();
    let windows = matches!(options.shuffle, Shuffle::Window { .. });
    if options.last_batch != LastBatch::Wrap || !windows {
        assert_eq!(once.len(), first.len(), "{seed}: {options:?}");
        assert!(options.last_batch == LastBatch::Wrap || seen.len() as u64 <= n);
    }
    if options.last_batch == LastBatch::Keep && options.steps.is_none() {
        assert_eq!(seen.len() as u64, n, "{seed}: {options:?}");
    }
    true
}

/// `TWINBUF_FUZZ_CASES` sets how many.
#[test]
fn every_position_once_as_the_model_says() {
    let cases = std::env::var("TWINBUF_FUZZ_CASES")
        .ok()
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| twinbuf_testing::extent(500, 2000));
    let built = (0..cases).filter(|&seed| check(seed)).count() as u64;
    println!("{built} of {cases} were plans, and right");
    assert!(built > cases / 2, "{built} of {cases}");
}

/// A plan that goes on itself has the batches that it would have had, also after its order has started again.
#[test]
fn a_plan_goes_on_as_if_it_had_not_stopped() {
    let mut wrapped = 0;
    let window = Shuffle::Window { chunk_records: 3, window_chunks: 2 };
    for (shuffle, records, steps) in [Shuffle::None, Shuffle::Full, window].into_iter().flat_map(|shuffle| {
        [1, 2, 20, 24].into_iter().flat_map(move |n| [3, 12, 40].map(|steps| (shuffle, n, steps)))
    }) {
        for (rank, world) in (1..4).flat_map(|world| (0..world).map(move |rank| (rank, world))) {
            let plan = Plan::builder(records).batch(3).shuffle(shuffle).steps(steps).rank(rank, world);
            let plan = plan.last_batch(LastBatch::Wrap).build().unwrap();
            let runs = |batch: Option<twinbuf_mmap::BatchIndices>| batch.unwrap().runs().collect::<Vec<_>>();
            for cut in 0..steps {
                // In one part, and in two.
                for first in [cut, cut / 2] {
                    let parts = [first, cut - first].map(|steps| PartialEpoch { batch: 3, world, steps });
                    let rest = plan.resume(0, &parts).unwrap();
                    for step in cut..steps {
                        let (found, wanted) = (runs(rest.batch(2, step)), runs(plan.batch(2, step)));
                        assert_eq!(found, wanted, "{step} after {parts:?} of {plan:?}");
                        wrapped += u64::from(shuffle == window && cut * 3 * world > records);
                    }
                }
            }
        }
    }
    assert!(wrapped > 1000, "{wrapped}");
}

#[test]
fn a_list_of_equal_steps_is_a_range() {
    let list = |numbers: &[u64]| numbers.iter().copied().collect::<RecordList>();
    assert_eq!(list(&[4, 5, 6]), RecordList::from(4..7));
    assert_eq!((list(&[4, 7, 10]).step(), list(&[4, 7, 10]).range()), (Some(3), 4..11));
    assert_eq!((list(&[9]).step(), list(&[9]).range(), list(&[]).len()), (Some(1), 9..10, 0));
    let any = list(&[4, 7, 9, 4]);
    assert_eq!((any.step(), any.range(), any.len()), (None, 4..10, 4));
    assert_eq!(
        format!("{:?} {:?} {any:?}", list(&[4, 5]), list(&[4, 6])),
        "4..6 4..7 by 2 4 records in 4..10"
    );
    assert!(any.fingerprint().is_some() && any.fingerprint() != list(&[4, 9, 7, 4]).fingerprint());
    assert_eq!(list(&[4, 4]).step(), None);
    assert_eq!(list(&[5, 4]).range(), 4..6);
    assert_eq!([0, 1].map(|at| list(&[u64::MAX]).get(at)), [Some(u64::MAX), None]);
    assert_eq!(list(&[u64::MAX - 1, 0, u64::MAX - 1]).range(), 0..u64::MAX);
    assert_eq!((list(&[3, u64::MAX]).range(), list(&[7; 3]).range()), (3..u64::MAX, 7..8));
    let even = |(first, step, len)| RecordList::even(first, step, len).is_some();
    assert_eq!([(u64::MAX - 1, 9, 1), (u64::MAX, 1, 0)].map(even), [true; 2]);
    let none = [(u64::MAX, 1, 1), (1, u64::MAX - 1, 2), (0, 1 << 63, 3), (0, 0, 1)];
    assert_eq!(none.map(even), [false; 4]);
}

#[test]
fn plans_of_lists_are_checked() {
    use twinbuf_mmap::PlanError;
    let plan = Plan::builder(100).batch(10).build().unwrap();
    assert_eq!(plan.with_records(Vec::new()), Err(PlanError::NoRecords));
    assert_eq!(plan.with_records(vec![1, 5, 2]), Err(PlanError::NoStep { records: 3, batch: 10, world: 1 }));
    for records in [vec![u64::MAX], vec![0, u64::MAX], vec![u64::MAX, 5, 7]] {
        let wanted = PlanError::RangeTooLarge { first: u64::MAX, records: 1 };
        assert_eq!(Plan::builder(1).records(records).build(), Err(wanted));
    }
    let steps = |steps, last| Plan::builder(100).batch(10).last_batch(last).steps(steps).build();
    assert_eq!(steps(0, LastBatch::Drop), Err(PlanError::ZeroSteps));
    assert_eq!(steps(10, LastBatch::Keep).unwrap().steps(3), 10);
    let many = PlanError::TooManySteps { steps: 11, records: 100, batch: 10, world: 1 };
    assert_eq!(steps(11, LastBatch::Drop), Err(many));
    assert_eq!(steps(11, LastBatch::Keep), Err(many));
    assert_eq!(steps(25, LastBatch::Wrap).unwrap().steps(0), 25);
    assert!(matches!(steps(u64::MAX, LastBatch::Wrap), Err(PlanError::StepTooLarge { .. })));
    let saved = |plan: &Plan| serde_json::from_str::<Plan>(&serde_json::to_string(plan).unwrap()).unwrap();
    for records in [vec![4, 9, 2, 2, 8], (3..90).step_by(7).collect(), (3..90).collect(), vec![0, 1 << 63]] {
        let plan = Plan::builder(1).records(records).steps(2).build().unwrap();
        assert_eq!(saved(&plan), plan);
    }
}
