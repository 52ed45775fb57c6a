//! Random histories of loaders with several workers, generators and cycled streams that fail, are left early and are called
//! again: nothing starts behind a failure before the failed one is made again, and each comes once, in order.
//!
//! `TWINBUF_HISTORIES` sets their number.

#![allow(clippy::cast_possible_truncation, reason = "all numbers are small")]

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use twinbuf::pipe::{Front, Items};
use twinbuf::{BatchIndices, BoxError, Error, Loader, generate};
use twinbuf_testing::Random as Dice;

use crate::common::{Reads, in_order, numbers};

fn histories(most: u64) -> u64 {
    std::env::var("TWINBUF_HISTORIES").map_or(most, |number| number.parse().unwrap())
}

/// Asks for the next item in one of four ways.
fn ask<F: Front>(items: &mut Items<'_, F>, dice: &mut Dice) -> Option<Result<F::Item, Error>> {
    loop {
        let found = match dice.below(4) {
            0 => items.try_next(),
            1 => items.next_timeout(Duration::from_micros(50)),
            2 => items.poll_next(&mut Context::from_waker(Waker::noop())),
            _ => return items.next(),
        };
        match found {
            Poll::Ready(found) => return found,
            Poll::Pending => std::thread::yield_now(),
        }
    }
}

#[test]
fn workers_give_the_plans_order_and_leave_batches_that_are_kept_alone() {
    for seed in 0..histories(60) {
        let (mut dice, mut own) = (Dice(seed), Dice(!seed));
        let workers = 2 + dice.below(3) as usize;
        let depth = workers + 1 + dice.below(3) as usize;
        // Each clone draws the same numbers.
        let read = move |batch: &BatchIndices, out: &mut [u8]| {
            let turns = if own.chance(25) { own.below(256) } else { own.below(2) };
            (0..turns).for_each(|_| std::thread::yield_now());
            numbers(batch, out)
        };
        let builder = Loader::builder(Reads(60, 8, read), in_order(60, 1)).workers(workers).depth(depth);
        let mut loader = builder.build().unwrap();
        // The loader reuses slots in their order. This test keeps a batch until the loader needs its slot again, after as
        // many further batches as there are slots.
        let mut kept = Vec::new();
        for _ in 0..6 {
            let end = dice.below(61);
            kept.clear();
            let mut epoch = loader.epochs(0..2);
            for step in 0..end {
                let found = ask(&mut epoch, &mut dice);
                let batch = found.unwrap().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
                let number = batch.cast::<u64>().unwrap()[0];
                assert_eq!((batch.step(), number), (step, step), "seed {seed}");
                kept.retain(|&(_, number)| number + (depth as u64) > step + 1);
                if dice.chance(33) {
                    kept.push((batch, number));
                }
                if !kept.is_empty() && dice.chance(50) {
                    let (batch, number) = kept.swap_remove(dice.below(kept.len() as u64) as usize);
                    assert_eq!(batch.cast::<u64>().unwrap(), [number], "seed {seed}: a batch that was kept");
                }
            }
        }
        drop(kept);
        loader.close().unwrap();
    }
}

#[test]
fn no_round_starts_behind_one_that_failed() {
    for seed in 0..histories(300) {
        let mut dice = Dice(seed);
        let (overlap, lockstep) = (dice.chance(80), dice.chance(30));
        let fails = [0, 5, 30][dice.below(3) as usize];
        // The round that `make` may be called for, and how often it was called for another.
        let state = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let (makes, mut own) = (state.clone(), Dice(!seed));
        let make = move |round: u64, slot: &mut u64| {
            let (next, wrong) = &*makes;
            wrong.fetch_add(u64::from(next.load(Ordering::Relaxed) != round), Ordering::Relaxed);
            (0..own.below(4)).for_each(|_| std::thread::yield_now());
            if own.chance(fails) {
                if own.chance(50) {
                    std::panic::resume_unwind(Box::new("cursed"));
                }
                return Err::<(), BoxError>("no such round".into());
            }
            next.store(round + 1, Ordering::Relaxed);
            *slot = round;
            Ok(())
        };
        let mut builder = generate::with_slots(vec![0; 1 + dice.below(3) as usize], make).overlap(overlap);
        if lockstep {
            let mut hook = Dice(seed ^ 1);
            builder = builder.before(move |_| if hook.chance(fails) { Err("not yet") } else { Ok(()) });
        }
        let mut generator = builder.build().unwrap();
        let mut expected = 0;
        for _ in 0..dice.below(12) {
            let wanted = dice.below(7);
            let mut rounds = generator.rounds(wanted);
            let mut taken = 0;
            while !dice.chance(10) {
                match ask(&mut rounds, &mut dice) {
                    None => {
                        assert_eq!(taken, wanted, "seed {seed}");
                        break;
                    }
                    Some(Ok(round)) => {
                        assert_eq!((round.number(), *round), (expected, expected), "seed {seed}");
                        (expected, taken) = (expected + 1, taken + 1);
                    }
                    Some(Err(Error::Load { at, .. } | Error::Panicked { at, .. })) => {
                        assert_eq!(at.epoch, expected, "seed {seed}");
                        break;
                    }
                    Some(Err(Error::Hook { .. })) => break,
                    Some(Err(error)) => panic!("seed {seed}: {error}"),
                }
            }
            if dice.chance(30) {
                (0..dice.below(20)).for_each(|_| std::thread::yield_now());
            }
        }
        let _ = generator.close(); // with the error of a round that the caller left
        assert_eq!(state.1.load(Ordering::Relaxed), 0, "seed {seed}: rounds out of order");
    }
}

#[cfg(unix)]
#[test]
fn no_group_is_read_behind_one_that_failed() {
    use crate::common::model::Model;

    const GROUPS: u64 = 5;
    let model = Model::new(&[40; GROUPS as usize]);
    let file = std::fs::File::options().write(true).open(&model.path).unwrap();
    let whole = std::fs::read(&model.path).unwrap();
    let write =
        |from: usize| std::os::unix::fs::FileExt::write_all_at(&file, &whole[from..], from as u64).unwrap();
    let group = 2 * 40 + 16;
    let header = whole.len() - GROUPS as usize * group;
    for seed in 0..histories(100) {
        let mut dice = Dice(seed);
        let (overlap, depth) = (dice.chance(80), 2 + dice.below(3) as usize);
        let builder = twinbuf::stream(model.groups()).cycle().overlap(overlap).depth(depth);
        let mut groups = builder.read_mode(twinbuf::mmap::ReadMode::Pread).build().unwrap();
        for _ in 0..dice.below(8) {
            // The groups from this one on are cut off for a while.
            let cut = if dice.chance(30) { dice.below(GROUPS) } else { GROUPS };
            if cut < GROUPS {
                file.set_len((header + cut as usize * group + 8) as u64).unwrap();
            }
            let mut pass = groups.pass();
            for step in 0.. {
                if dice.chance(7) {
                    break;
                }
                match ask(&mut pass, &mut dice) {
                    None => {
                        assert_eq!(step, GROUPS, "seed {seed}");
                        break;
                    }
                    Some(Ok(group)) => model.check(&group, step as usize),
                    Some(Err(Error::Load { at, .. })) => {
                        assert_eq!(at.step, Some(step), "seed {seed}");
                        let loads = pass.report().loads;
                        (0..dice.below(20)).for_each(|_| std::thread::yield_now());
                        assert_eq!(pass.report().loads, loads, "seed {seed}: read behind a failure");
                        break;
                    }
                    Some(Err(error)) => panic!("seed {seed}: {error}"),
                }
            }
            drop(pass);
            write(header);
        }
        let _ = groups.close(); // with the error of a group that the caller left
    }
}
