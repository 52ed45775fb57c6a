//! A loader that goes on from a saved state delivers what the first one would have delivered, byte for byte.

mod common;

use common::{Fault, Faulty, RECORD, batches, files, open};
use twinbuf::{Error, Loader, Order, Plan, Records, State, Tail};

const RECORDS: u64 = 53;

fn plans() -> Vec<Plan> {
    let mut plans = Vec::new();
    for order in [Order::Sequential, Order::Chunks { records: 7 }, Order::Records] {
        for tail in [Tail::Drop, Tail::Keep, Tail::Wrap] {
            for (rank, world) in [(0, 1), (1, 2)] {
                let plan =
                    Plan::builder(RECORDS).batch(5).seed(11).order(order).tail(tail).shard(rank, world);
                plans.push(plan.build().unwrap());
            }
        }
    }
    plans
}

/// As it would be read back another day.
fn saved(state: &State) -> State {
    serde_json::from_str(&serde_json::to_string(state).unwrap()).unwrap()
}

#[test]
fn at_every_step_of_an_epoch_and_in_every_configuration() {
    let (_dir, paths) = files(&[20, RECORDS - 20]);
    let data = open(&paths);
    for plan in plans() {
        let build = |overlap, depth| {
            Loader::builder(data.clone(), plan).overlap(overlap).host_depth(depth).build().unwrap()
        };
        let whole: Vec<_> = batches(&build(false, 1), 4).into_iter().map(Result::unwrap).collect();
        for taken in 0..=whole.len() {
            for (overlap, depth) in [(false, 1), (true, 1), (true, 2), (true, 3)] {
                let case = format!("{plan:?}, after {taken}, overlap {overlap}, depth {depth}");
                // Saved by one configuration, and restored by another.
                let first = build(!overlap, 2);
                let mut epoch = first.epoch(4);
                for batch in epoch.by_ref().take(taken) {
                    batch.unwrap();
                }
                let state = saved(&first.state());
                assert_eq!((state.epoch(), state.step()), (4, taken as u64), "{case}");
                drop(epoch);
                assert_eq!(first.state(), state, "leaving the epoch consumes nothing: {case}");

                let second = build(overlap, depth);
                second.restore(&state).unwrap();
                assert_eq!(second.state(), state, "{case}");
                let rest: Vec<_> = batches(&second, 4).into_iter().map(Result::unwrap).collect();
                assert!(rest == whole[taken..], "{case}");
                assert_eq!(second.state().step(), whole.len() as u64, "{case}");
                // And from then on as always.
                let next: Vec<_> = batches(&second, 5).into_iter().map(Result::unwrap).collect();
                assert_eq!(next.len(), whole.len(), "{case}");
            }
        }
    }
}

#[test]
fn the_batch_in_use_counts_and_those_read_ahead_do_not() {
    let (_dir, paths) = files(&[40]);
    let plan = Plan::builder(40).batch(4).build().unwrap();
    let loader = Loader::builder(open(&paths), plan).host_depth(4).build().unwrap();
    assert_eq!((loader.state().epoch(), loader.state().step()), (0, 0));
    let mut epoch = loader.epoch(2);
    assert_eq!((loader.state().epoch(), loader.state().step()), (2, 0));
    let _first = epoch.next().unwrap().unwrap();
    let _second = epoch.next().unwrap().unwrap();
    assert_eq!((loader.state().epoch(), loader.state().step()), (2, 2));
}

#[test]
fn only_the_epoch_of_the_state_begins_at_its_step() {
    let (_dir, paths) = files(&[40]);
    let plan = Plan::builder(40).batch(4).build().unwrap();
    let loader = Loader::builder(open(&paths), plan).build().unwrap();
    assert_eq!(loader.epoch(3).take(4).count(), 4);
    let state = loader.state();
    let first_step = |epoch| loader.epoch(epoch).next().unwrap().unwrap().step();
    loader.restore(&state).unwrap();
    assert_eq!(first_step(4), 0, "another epoch begins at its start");
    assert_eq!(first_step(3), 0, "and uses the state up");
    loader.restore(&state).unwrap();
    assert_eq!(first_step(3), 4);
    assert_eq!(first_step(3), 0, "once");
    let mut last = loader.epoch(5);
    assert_eq!(last.by_ref().take(10).count(), 10);
    loader.restore(&state).unwrap();
    assert!(last.next().is_none());
    assert_eq!(loader.state(), state, "the end of an epoch that went on meanwhile is no step of it");
}

/// Every rank steps as often as the longest one, and asks in vain where it has no batch. Its state after any step
/// is that of the others, and lets all of them together go on with every record that is left, each once.
#[test]
fn any_ranks_state_after_a_step_restores_any_other_rank() {
    let (_dir, paths) = files(&[RECORDS]);
    for tail in [Tail::Drop, Tail::Keep, Tail::Wrap] {
        // Of the last step's 3 records two ranks have none; of a world of 60 ranks, 7 have none at all.
        for (batch, world) in [(5, 5), (1, 60)] {
            if tail == Tail::Drop && batch * world > RECORDS {
                continue;
            }
            let load = |rank| {
                let plan = Plan::builder(RECORDS).batch(batch).tail(tail).shard(rank, world).build().unwrap();
                Loader::builder(open(&paths), plan).overlap(false).build().unwrap()
            };
            let longest = load(0).plan().steps();
            for from in [0, 2, 3, world - 1] {
                let first = load(from);
                let mut epoch = first.epoch(0);
                for taken in 0..=longest {
                    let state = saved(&first.state());
                    let case = format!("{tail:?}, {world} ranks, rank {from} after {taken}");
                    assert_eq!((state.epoch(), state.step()), (0, taken), "{case}");
                    for to in [0, 2, 3, world - 1] {
                        let second = load(to);
                        second.restore(&state).unwrap();
                        assert_eq!(second.state().step(), taken, "{case}, restored by rank {to}");
                        let mut rest = second.epoch(0);
                        assert_eq!(second.state().step(), taken, "{case}, begun by rank {to}");
                        let left = rest.by_ref().map(Result::unwrap).count() as u64;
                        assert_eq!(left, second.plan().steps().saturating_sub(taken), "{case} to {to}");
                        assert_eq!(second.state().step(), longest, "{case}, ended by rank {to}");
                    }
                    assert_eq!(epoch.next().is_some(), taken < first.plan().steps(), "{case}");
                }
            }
        }
    }
}

#[test]
fn no_rank_goes_on_past_the_longest_ones_last_step() {
    let (_dir, paths) = files(&[RECORDS]);
    for rank in 0..5 {
        let plan = Plan::builder(RECORDS).batch(5).tail(Tail::Keep).shard(rank, 5).build().unwrap();
        let loader = Loader::builder(open(&paths), plan).build().unwrap();
        let mut state = serde_json::to_value(loader.state()).unwrap();
        state["step"] = 4.into();
        let error = loader.restore(&serde_json::from_value(state).unwrap()).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the state is of another step: wanted at most the 3 steps of an epoch, found 4",
            "rank {rank}"
        );
    }
}

#[test]
fn another_plan_or_data_set_is_refused_and_changes_nothing() {
    let (_dir, paths) = files(&[48]);
    let (_dir, same_shape) = files(&[40, 8]);
    let plan = |seed| Plan::builder(24).batch(4).seed(seed).order(Order::Records).build().unwrap();
    let load = |paths, bytes, plan| {
        Loader::builder(std::sync::Arc::new(Records::open(paths, bytes).unwrap()), plan).build().unwrap()
    };
    let loader = load(&paths, RECORD, plan(1));
    assert_eq!(loader.epoch(7).take(2).count(), 2);
    let before = loader.state();
    let foreign = |other: &Loader| {
        assert_eq!(other.epoch(9).take(3).count(), 3);
        loader.restore(&other.state()).unwrap_err()
    };
    let message = foreign(&load(&paths, RECORD, plan(2))).to_string();
    assert!(
        message.starts_with("the state is of another plan: wanted") && message.contains("seed: 2"),
        "{message}"
    );
    for other in [load(&same_shape, RECORD, plan(1)), load(&paths, 2 * RECORD, plan(1))] {
        let error = foreign(&other);
        assert!(matches!(error, Error::Restore { what: "data set", .. }), "{error}");
    }
    let mut far = serde_json::to_value(&before).unwrap();
    far["step"] = 8.into();
    let error = loader.restore(&serde_json::from_value(far).unwrap()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the state is of another step: wanted at most the 6 steps of an epoch, found 8"
    );
    assert_eq!(loader.state(), before);
    assert_eq!(loader.epoch(7).count(), 6, "none of them was restored");
}

#[test]
fn a_state_is_saved_under_stable_names_and_nothing_else_is_read() {
    let (_dir, paths) = files(&[40]);
    let plan = Plan::builder(40).batch(4).build().unwrap();
    let loader = Loader::builder(open(&paths), plan).build().unwrap();
    let mut state = serde_json::to_value(loader.state()).unwrap();
    let names: Vec<_> = state.as_object().unwrap().keys().cloned().collect();
    assert_eq!(names, ["epoch", "fingerprint", "plan", "record_bytes", "step"]);
    state["depth"] = 2.into();
    assert!(
        serde_json::from_value::<State>(state).unwrap_err().to_string().contains("unknown field `depth`")
    );
}

#[test]
fn the_last_steps_of_the_longest_plan() {
    for (overlap, depth) in [(false, 1), (true, 1), (true, 2)] {
        let (dataset, _) = Faulty::new(u64::MAX, Fault::None, 0);
        let plan = Plan::builder(u64::MAX).order(Order::Records).build().unwrap();
        let builder = Loader::builder(dataset, plan).overlap(overlap).host_depth(depth);
        let loader = builder.prefetch(u64::MAX).build().unwrap();
        let mut state = serde_json::to_value(loader.state()).unwrap();
        state["step"] = (u64::MAX - 2).into();
        // The second time shows that the first one's end was one.
        for epoch in [u64::MAX - 1, u64::MAX] {
            state["epoch"] = epoch.into();
            loader.restore(&serde_json::from_value(state.clone()).unwrap()).unwrap();
            let steps: Vec<u64> = loader.epoch(epoch).map(|batch| batch.unwrap().step()).collect();
            assert_eq!(steps, [u64::MAX - 2, u64::MAX - 1], "overlap {overlap}, depth {depth}");
            assert!(loader.epoch(7).next().unwrap().is_ok(), "overlap {overlap}, depth {depth}");
        }
    }
}
