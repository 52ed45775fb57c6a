//! A loader that continues from a saved state delivers what the first loader would have delivered, byte for byte.

use std::ops::Range;
use std::sync::mpsc::channel;
use std::time::Duration;

use crate::common::{RECORD, Reads, batches, files, in_order, names, nothing, open, saved, written};
use twinbuf::mmap::{Cut, DType};
use twinbuf::{Checkpoint, Error, LastBatch, Loader, Plan, Records, Shuffle, transform};

const RECORDS: u64 = 53;

fn plans() -> Vec<Plan> {
    let mut plans = Vec::new();
    for order in [Shuffle::None, Shuffle::Chunks { records: 7 }, Shuffle::Full] {
        for tail in [LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap] {
            for (rank, world) in [(0, 1), (1, 2)] {
                let plan = Plan::builder(RECORDS).batch(5).shuffle(order).last_batch(tail).rank(rank, world);
                // A seed without a shuffle is an error.
                let plan = if order == Shuffle::None { plan } else { plan.seed(11) };
                plans.push(plan.build().unwrap());
            }
        }
    }
    plans
}

#[test]
fn at_every_step_of_an_epoch_and_in_every_configuration() {
    let (_dir, paths) = files(&[20, RECORDS - 20]);
    let data = open(&paths);
    for plan in plans() {
        let build = |overlap, depth| {
            Loader::builder(data.clone(), plan.clone()).overlap(overlap).depth(depth).build().unwrap()
        };
        let whole = batches(&mut build(false, 1), 4);
        for taken in 0..=whole.len() {
            for (overlap, depth) in [(false, 1), (true, 2), (true, 3), (true, 4)] {
                let case = format!("{plan:?}, after {taken}, overlap {overlap}, depth {depth}");
                // Saved by one configuration and restored by another.
                let mut first = build(!overlap, 2);
                assert_eq!((first.checkpoint().epoch(), first.checkpoint().step()), (0, 0));
                let mut epoch = first.epoch(4);
                let mut last = None;
                for batch in epoch.by_ref().take(taken) {
                    last = Some(batch.unwrap().checkpoint());
                }
                let state = saved(&epoch.checkpoint());
                assert!(last.is_none_or(|last| last == state), "the batch knows its place too: {case}");
                assert_eq!((state.epoch(), state.step()), (4, taken as u64), "{case}");
                drop(epoch);
                assert_eq!(first.checkpoint(), state, "leaving the epoch consumes nothing: {case}");

                let mut second = build(overlap, depth);
                let rest = second.epochs_from(&state, 5).unwrap();
                assert_eq!(rest.checkpoint(), state, "{case}");
                assert_eq!(rest.size_hint().1, Some(whole.len() - taken), "{case}");
                let rest: Vec<_> = rest.map(|batch| batch.unwrap().to_vec()).collect();
                assert!(rest == whole[taken..], "{case}");
                assert_eq!(second.checkpoint().step(), whole.len() as u64, "{case}");
                // And from then on as usual.
                assert_eq!(batches(&mut second, 5).len(), whole.len(), "{case}");
            }
        }
    }
}

#[test]
fn no_other_call_changes_where_a_checkpoint_goes_on() {
    let (_dir, paths) = files(&[40]);
    let mut loader = Loader::builder(open(&paths), in_order(40, 4)).build().unwrap();
    assert_eq!(loader.epoch(1).take(4).count(), 4);
    let checkpoint = loader.checkpoint();
    // To the end of the training, whatever the loader did before.
    for _ in 0..2 {
        assert_eq!(loader.epoch(3).take(2).count(), 2);
        let rest = loader.epochs_from(&checkpoint, 4).unwrap().map(Result::unwrap);
        let expected = (4..10).map(|step| (1, step)).chain((0..20).map(|i| (2 + i / 10, i % 10)));
        assert!(rest.map(|batch| (batch.epoch(), batch.step())).eq(expected));
    }
    // A finished training has nothing left, and an epoch never has extra steps.
    assert_eq!(loader.epochs_from(&checkpoint, 1).unwrap().count(), 0);
    assert_eq!(loader.epochs_from(&checkpoint, 0).unwrap().count(), 0);
    assert_eq!(loader.checkpoint(), checkpoint);
    assert_eq!(loader.epoch(1).count(), 10);
    let end = loader.checkpoint();
    assert_eq!((end.epoch(), end.step()), (1, 10));
    assert_eq!(loader.epochs(5..5).count(), 0);
    assert_eq!(loader.checkpoint(), end, "a call without epochs leaves the loader where it is");
    assert_eq!(loader.epochs_from(&end, 2).unwrap().count(), 0);
    assert_eq!(loader.epochs_from(&end, 3).unwrap().next().unwrap().unwrap().epoch(), 2);
    // The start of a training fits any plan.
    assert_eq!(loader.epochs_from(&Checkpoint::start(), 2).unwrap().count(), 20);
}

#[test]
fn a_checkpoint_file_is_replaced_whole_and_told_apart_from_none() {
    let (dir, paths) = files(&[40]);
    let path = dir.path().join("train.json");
    assert_eq!(Checkpoint::load_or_start(&path).unwrap(), Checkpoint::start());
    let mut loader = Loader::builder(open(&paths), in_order(40, 4)).build().unwrap();
    for batch in loader.epoch(0).take(3) {
        let checkpoint = batch.unwrap().checkpoint();
        checkpoint.save(&path).unwrap();
        assert_eq!(Checkpoint::load_or_start(&path).unwrap(), checkpoint);
    }
    assert_eq!(names(dir.path()), ["0.bin", "train.json"]);
    for start in [Checkpoint::start(), Checkpoint::start().next_epoch(), Checkpoint::start().with_step(2)] {
        start.save(&path).unwrap();
        assert_eq!(Checkpoint::load_or_start(&path).unwrap(), start);
    }
    for text in [
        "",
        "{}",
        "[1]",
        r#"{"version":5,"epoch":0,"step":0,"plan":null,"record_bytes":null,"fingerprint":null}"#,
    ] {
        std::fs::write(&path, text).unwrap();
        let error = Checkpoint::load_or_start(&path).unwrap_err();
        assert!(matches!(error, Error::CheckpointFile { .. }), "{error:?}");
        assert!(error.to_string().contains("train.json"), "{error}");
    }
}

#[test]
fn a_rank_without_records_is_at_the_end_of_any_number_of_epochs() {
    let (_dir, paths) = files(&[5]);
    let plan = Plan::builder(5).last_batch(LastBatch::Keep).rank(7, 8).build().unwrap();
    for overlap in [true, false] {
        let mut loader = Loader::builder(open(&paths), plan.clone()).overlap(overlap).build().unwrap();
        assert!(loader.epochs(0..3).next().is_none());
        assert_eq!(loader.report().epochs, 3);
        (0..2).for_each(|_| assert!(loader.epochs(0..u64::MAX).next().is_none()));
        assert_eq!(loader.report().epochs, u64::MAX);
        let end = loader.checkpoint();
        assert_eq!((end.epoch(), end.step()), (u64::MAX - 1, 1));
        assert!(loader.epochs_from(&end, u64::MAX).unwrap().next().is_none());
    }
}

#[test]
fn the_last_epoch_that_has_a_number_ends() {
    let (_dir, paths) = files(&[5]);
    for overlap in [true, false] {
        let mut loader = Loader::builder(open(&paths), in_order(5, 1)).overlap(overlap).build().unwrap();
        let batches = loader.epoch(u64::MAX).map(|batch| batch.unwrap().epoch());
        assert!(batches.eq([u64::MAX; 5]), "overlap {overlap}");
        let end = loader.checkpoint();
        assert_eq!((end.epoch(), end.step()), (u64::MAX, 5));
        assert_eq!(loader.epochs_from(&end, u64::MAX).unwrap().count(), 0);
    }
}

/// Every rank takes as many steps as the longest rank; where it has no batch, its request returns none. Its state after
/// any step equals that of the others. From it, any rank continues with its remaining batches.
#[test]
fn any_ranks_state_after_a_step_restores_any_other_rank() {
    let (_dir, paths) = files(&[RECORDS]);
    for tail in [LastBatch::Drop, LastBatch::Keep, LastBatch::Wrap] {
        // Of the last step's 3 records two ranks get none; in a world of 60 ranks, 7 get none at all.
        for (batch, world) in [(5, 5), (1, 60)] {
            if tail == LastBatch::Drop && batch * world > RECORDS {
                continue;
            }
            let load = |rank| {
                let plan =
                    Plan::builder(RECORDS).batch(batch).last_batch(tail).rank(rank, world).build().unwrap();
                Loader::builder(open(&paths), plan).overlap(false).build().unwrap()
            };
            let longest = load(0).plan().steps(0);
            for from in [0, 2, 3, world - 1] {
                let mut first = load(from);
                let mut past = serde_json::to_value(first.checkpoint()).unwrap();
                past["step"] = (longest + 1).into();
                let error = first.epochs_from(&serde_json::from_value(past).unwrap(), 1).unwrap_err();
                let end = format!("wanted at most the {longest} steps of an epoch, found {}", longest + 1);
                let wanted = format!("the checkpoint has another step: {end}");
                assert_eq!(error.to_string(), wanted, "rank {from}");
                let mut epoch = first.epoch(0);
                let steps = epoch.size_hint().1.unwrap() as u64;
                for taken in 0..=longest {
                    let state = saved(&epoch.checkpoint());
                    let case = format!("{tail:?}, {world} ranks, rank {from} after {taken}");
                    assert_eq!((state.epoch(), state.step()), (0, taken), "{case}");
                    for to in [0, 2, 3, world - 1] {
                        let mut second = load(to);
                        let mut rest = second.epochs_from(&state, 1).unwrap();
                        assert_eq!(rest.checkpoint().step(), taken, "{case}, begun by rank {to}");
                        let left = rest.by_ref().map(Result::unwrap).count() as u64;
                        drop(rest);
                        assert_eq!(left, second.plan().steps(0).saturating_sub(taken), "{case} to {to}");
                        assert_eq!(second.checkpoint().step(), longest, "{case}, ended by rank {to}");
                    }
                    assert_eq!(epoch.next().is_some(), taken < steps, "{case}");
                }
            }
        }
    }
}

#[test]
fn another_plan_or_data_set_is_refused_and_changes_nothing() {
    let (_dir, paths) = files(&[48]);
    let (_dir, same_shape) = files(&[40, 8]);
    let plan = |seed| Plan::builder(24).batch(4).seed(seed).shuffle(Shuffle::Full).build().unwrap();
    let load = |paths, bytes, plan| {
        Loader::builder(std::sync::Arc::new(Records::open(paths, bytes).unwrap()), plan).build().unwrap()
    };
    let mut loader = load(&paths, RECORD, plan(1));
    assert_eq!(loader.epoch(7).take(2).count(), 2);
    let before = loader.checkpoint();
    let mut refused = |checkpoint: &Checkpoint| loader.epochs_from(checkpoint, 9).unwrap_err();
    let mut foreign = |mut other: Loader| {
        assert_eq!(other.epoch(9).take(3).count(), 3);
        match refused(&other.checkpoint()) {
            Error::Checkpoint { field, wanted, found } => (field, wanted, found),
            error => panic!("{error:?}"),
        }
    };
    let text = |field, wanted: &str, found: &str| (field, wanted.to_string(), found.to_string());
    assert_eq!(foreign(load(&paths, RECORD, plan(2))), text("seed", "1", "2"));
    let other = Plan::builder(24).batch(4).seed(1).shuffle(Shuffle::Chunks { records: 4 }).build().unwrap();
    assert_eq!(foreign(load(&paths, RECORD, other)), text("shuffle", "Full", "Chunks { records: 4 }"));
    let other = plan(1).with_records(8..32).unwrap();
    assert_eq!(foreign(load(&paths, RECORD, other)), text("range of records", "0..24", "8..32"));
    assert_eq!(foreign(load(&same_shape, RECORD, plan(1))).0, "data set fingerprint");
    assert_eq!(foreign(load(&paths, 2 * RECORD, plan(1))).0, "record size");
    let mut far = serde_json::to_value(&before).unwrap();
    far["step"] = 8.into();
    assert_eq!(
        refused(&serde_json::from_value(far).unwrap()).to_string(),
        "the checkpoint has another step: wanted at most the 6 steps of an epoch, found 8"
    );
    assert_eq!(loader.checkpoint(), before);
    assert_eq!(loader.epoch(7).count(), 6);
}

/// A checkpoint names the list, and does not contain it; ranges and equal steps are in the plan.
#[test]
fn a_plan_of_listed_records_resumes_over_the_same_list() {
    let (_dir, paths) = files(&[48]);
    let load = |records: Vec<u64>| {
        let plan =
            Plan::builder(48).records(records).batch(4).shuffle(Shuffle::Full).seed(3).build().unwrap();
        Loader::builder(open(&paths), plan).build().unwrap()
    };
    let list: Vec<u64> = (0..40).map(|at| at * at % 48).collect();
    let mut loader = load(list.clone());
    let whole: Vec<_> = loader.epoch(2).map(|batch| batch.unwrap().to_vec()).collect();
    let checkpoint = saved(&loader.epoch(2).nth(3).unwrap().unwrap().checkpoint());
    let mut again = load(list.clone());
    let rest = again.epochs_from(&checkpoint, 3).unwrap().map(|batch| batch.unwrap().to_vec());
    assert!(rest.eq(whole[4..].iter().cloned()));
    assert!(serde_json::to_string(&checkpoint).unwrap().len() < 500, "the list is not in it");
    for (records, field) in [
        (list.iter().rev().copied().collect(), "list of records"),
        ((0..40).collect(), "list of records"),
        (list[1..].to_vec(), "range of records"),
    ] {
        let error = load(records).epochs_from(&checkpoint, 3).unwrap_err();
        assert!(matches!(&error, Error::Checkpoint { field: found, .. } if *found == field), "{error}");
    }
}

#[test]
fn a_checkpoint_has_the_fields_of_its_version_and_no_others() {
    let (_dir, paths) = files(&[40]);
    let loader = Loader::builder(open(&paths), in_order(40, 4)).build().unwrap();
    for (checkpoint, null) in [(loader.checkpoint(), false), (Checkpoint::start(), true)] {
        let whole = serde_json::to_value(checkpoint).unwrap();
        assert!(serde_json::from_value::<Checkpoint>(whole.clone()).is_ok());
        for name in whole.as_object().unwrap().keys() {
            let mut state = whole.clone();
            state.as_object_mut().unwrap().remove(name);
            // `null` at the start of a training.
            let optional = null && name == "trained";
            assert_eq!(serde_json::from_value::<Checkpoint>(state).is_ok(), optional, "without `{name}`");
        }
        for version in [0, 1, 3, 5] {
            let mut state = whole.clone();
            state["version"] = version.into();
            let error = serde_json::from_value::<Checkpoint>(state).unwrap_err().to_string();
            assert_eq!(error, format!("field `version`: wanted 4, found {version}"));
        }
    }
    // Under stable names, and nothing else is read.
    let mut state = serde_json::to_value(loader.checkpoint()).unwrap();
    let names: Vec<_> = state.as_object().unwrap().keys().cloned().collect();
    assert_eq!(
        names,
        ["before", "epoch", "fingerprint", "plan", "record_bytes", "step", "trained", "version"]
    );
    let refused = |state: &serde_json::Value| {
        serde_json::from_value::<Checkpoint>(state.clone()).unwrap_err().to_string()
    };
    state["depth"] = 2.into();
    assert!(refused(&state).contains("unknown field `depth`"));
    state.as_object_mut().unwrap().retain(|name, _| name != "trained" && name != "depth");
    assert_eq!(refused(&state), "field `trained`: wanted one in version 4, found none");
}

#[test]
fn the_last_steps_of_the_longest_plan() {
    for (overlap, depth) in [(false, 1), (true, 2), (true, 3)] {
        let dataset = Reads(u64::MAX, RECORD, nothing);
        let plan = Plan::builder(u64::MAX).shuffle(Shuffle::Full).build().unwrap();
        let mut loader = Loader::builder(dataset, plan).overlap(overlap).depth(depth).build().unwrap();
        let mut state = serde_json::to_value(loader.checkpoint()).unwrap();
        state["step"] = (u64::MAX - 2).into();
        state["epoch"] = (u64::MAX - 1).into();
        let checkpoint = serde_json::from_value(state).unwrap();
        // The second time shows that the first run reached the end.
        for _ in 0..2 {
            let rest = loader.epochs_from(&checkpoint, u64::MAX).unwrap();
            let steps: Vec<u64> = rest.map(|batch| batch.unwrap().step()).collect();
            assert_eq!(steps, [u64::MAX - 2, u64::MAX - 1], "overlap {overlap}, depth {depth}");
            assert!(loader.epoch(u64::MAX).next().unwrap().is_ok(), "overlap {overlap}, depth {depth}");
        }
    }
}

/// The documented way to a schedule of lengths: a loader for each length, all iterators made before the first step.
#[test]
fn sequences_that_grow_give_each_token_once_and_resume_at_every_step() {
    const SHORT: u64 = 4; // steps of 64 windows of 512
    const LONG: u64 = 3; // of 32 windows of 1024
    let tokens = SHORT * 64 * 512 + LONG * 32 * 1024;
    let numbers = 0..=u32::try_from(tokens).unwrap();
    let (_dir, path) = written("tokens.bin", numbers.flat_map(u32::to_le_bytes));
    let open = |length| Records::open_headerless([&path], DType::U32, Cut::sequence(length)).unwrap();
    let plan = |data: &Records, records: Range<u64>, batch| {
        let plan = Plan::builder(data.len()).records(records).batch(batch).shuffle(Shuffle::Full);
        plan.seed(batch).build().unwrap()
    };
    // The batches of a training that begins at loader `number`, and the state after each.
    let train = |number: usize, state: &Checkpoint, steps: usize| {
        let (short, long) = (open(512), open(1024));
        let plans = [plan(&short, 0..SHORT * 64, 64), plan(&long, SHORT * 64 * 512 / 1024..long.len(), 32)];
        let (tell, told) = channel();
        let noted = transform::per_record(4 * 1025, move |from, to, context| {
            to.copy_from_slice(from);
            Ok(tell.send(context.step)?)
        });
        let [first, second] = plans;
        let loaders = [
            Loader::builder(short, first).build().unwrap(),
            Loader::builder(long, second).transform(noted).build().unwrap(),
        ];
        let mut parts = Vec::new();
        for (i, loader) in loaders.into_iter().enumerate().skip(number) {
            let state = if i == number { state } else { &Checkpoint::start() };
            parts.push((i, loader.into_epochs_from(state, 1).unwrap()));
        }
        let mut found = Vec::new();
        for (i, batches) in &mut parts {
            for batch in batches.take(steps - found.len()) {
                let batch = batch.unwrap();
                if (*i, batch.step()) == (0, SHORT - 1) {
                    // The last batch of the first loader is in use, and the second one has read a batch.
                    for _ in 0..32 {
                        assert_eq!(told.recv_timeout(Duration::from_secs(300)), Ok(0));
                    }
                }
                let windows = batch.cast::<u32>().unwrap().to_vec();
                found.push((windows, *i, saved(&batch.checkpoint())));
            }
        }
        found
    };
    let whole = train(0, &Checkpoint::start(), usize::MAX);
    assert_eq!(whole.len() as u64, SHORT + LONG);
    let mut targets = vec![0; usize::try_from(tokens).unwrap() + 1];
    for (windows, loader, _) in &whole {
        for window in windows.chunks_exact([513, 1025][*loader]) {
            assert!(window.windows(2).all(|pair| pair[0] + 1 == pair[1]));
            window[1..].iter().for_each(|&token| targets[token as usize] += 1);
        }
    }
    assert_eq!(targets[0], 0, "the first token is an input only");
    assert!(targets[1..].iter().all(|&times| times == 1));
    for taken in 0..=whole.len() {
        let before = train(0, &Checkpoint::start(), taken);
        let (number, state) =
            before.last().map_or((0, Checkpoint::start()), |(_, at, state)| (*at, state.clone()));
        let rest = train(number, &state, usize::MAX);
        assert!([before, rest].concat() == whole, "after {taken}");
    }
}

/// A second pass over an epoch finds that a file was written to, with and without hints and overlap.
#[test]
fn a_repeated_epoch_finds_a_change() {
    for (hints, overlap) in [(true, true), (false, true), (true, false)] {
        let (_dir, paths) = files(&[64]);
        let builder = Loader::builder(open(&paths), in_order(64, 8)).hints(hints).overlap(overlap);
        let mut loader = builder.build().unwrap();
        for _ in 0..2 {
            assert!(loader.epoch(0).all(|batch| batch.is_ok()), "hints {hints}, overlap {overlap}");
        }
        let file = std::fs::OpenOptions::new().write(true).open(&paths[0]).unwrap();
        std::io::Write::write_all(&mut &file, &[7; 8]).unwrap();
        // The clock of the file system may not have moved.
        file.set_modified(std::time::UNIX_EPOCH).unwrap();
        let found = loader.epoch(0).find_map(Result::err);
        assert!(found.is_some(), "hints {hints}, overlap {overlap}");
    }
}
