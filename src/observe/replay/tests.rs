//! Replays of batches whose total time can be computed by hand.

use super::*;

const MACHINE: Machine = Machine {
    processors: 8.0,
    load_cpu: 0.0,
    train_cpu: 0.0,
    serial: 0.0,
    device_depth: 0,
    lockstep: false,
    wake: 0.0,
    start: 0.0,
};

const DEFAULT: Settings = Settings { overlap: true, depth: 2, workers: 1 };
const OFF: Settings = Settings { overlap: false, ..DEFAULT };

fn units(loads: &[f64], train: f64) -> Vec<Unit> {
    let unit = |(at, &read): (usize, &f64)| {
        let lead = (at == 0).then_some(0.0);
        Unit { lead, read, train, ..Unit::default() }
    };
    loads.iter().enumerate().map(unit).collect()
}

fn wall(units: &[Unit], machine: &Machine, settings: Settings) -> f64 {
    replay(units, machine, settings, MEASURED).unwrap().wall
}

fn workers(workers: usize) -> Settings {
    Settings { workers, depth: 2 * workers, ..DEFAULT }
}

fn depth(depth: usize) -> Settings {
    Settings { depth, ..DEFAULT }
}

#[test]
fn overlap_leaves_the_first_load_and_the_longer_side() {
    let even = units(&[10.0; 8], 10.0);
    let found = replay(&even, &MACHINE, OFF, MEASURED).unwrap();
    assert_eq!((found.wall, found.waiting), (160.0, 80.0));
    let found = replay(&even, &MACHINE, DEFAULT, MEASURED).unwrap();
    assert_eq!((found.wall, found.waiting), (90.0, 10.0));
    assert_eq!(wall(&even, &MACHINE, depth(1)), 160.0, "one slot: nothing to load into");
    // The loading thread fills both slots, then waits while the caller uses the batches: 1 + 4 * 10.
    assert_eq!(wall(&units(&[1.0; 4], 10.0), &MACHINE, DEFAULT), 41.0);
}

#[test]
fn workers_load_side_by_side_and_a_free_one_takes_the_next() {
    let slow = units(&[20.0; 4], 5.0);
    assert_eq!([1, 2, 4].map(|n| wall(&slow, &MACHINE, workers(n))), [85.0, 50.0, 40.0]);
    // One worker loads the long batch while the other loads the three after it.
    let fourth = units(&[30.0, 10.0, 10.0, 10.0], 0.0);
    assert_eq!(wall(&fourth, &MACHINE, Settings { depth: 6, ..workers(2) }), 30.0);
}

#[test]
fn slots_even_out_loads_that_differ() {
    let fourth = units(&[40.0, 10.0, 10.0, 10.0, 40.0, 10.0, 10.0, 10.0], 20.0);
    // With two slots, the first three uses end at 60, 80 and 100. The second long load starts at 100, when slot 0 is
    // free.
    let [two, four] = [2, 4].map(|slots| wall(&fourth, &MACHINE, depth(slots)));
    assert_eq!((two, four), (220.0, 200.0));
}

#[test]
fn a_hung_read_holds_up_only_its_thread() {
    let hung = units(&[10.0, 1000.0, 10.0, 10.0], 10.0);
    assert_eq!(wall(&hung, &MACHINE, DEFAULT), 1040.0);
    assert_eq!(wall(&hung, &MACHINE, workers(2)), 1030.0);
}

#[test]
fn nothing_is_loaded_before_an_iteration_begins() {
    let mut epochs = units(&[10.0; 5], 10.0);
    epochs.iter_mut().for_each(|unit| unit.lead = Some(0.0));
    for settings in [OFF, DEFAULT, depth(4), workers(4)] {
        assert_eq!(wall(&epochs, &MACHINE, settings), 100.0, "{settings:?}");
    }
    // The caller works for 4 before it asks for the batch of each epoch: that hides 4 of the load's 10.
    epochs.iter_mut().for_each(|unit| unit.lead = Some(4.0));
    assert_eq!(wall(&epochs, &MACHINE, DEFAULT), 5.0 * (6.0 + 10.0));
}

#[test]
fn a_batch_that_is_kept_keeps_its_slot() {
    let mut kept = units(&[10.0; 4], 5.0);
    kept.iter_mut().for_each(|unit| unit.hold = Hold::Kept { later: 1, used: 0.0 });
    assert_eq!(replay(&kept, &MACHINE, depth(1), MEASURED), None, "it would wait for its own batch");
    assert_eq!(wall(&kept, &MACHINE, DEFAULT), 45.0);
    kept.iter_mut().for_each(|unit| unit.train = 10.0);
    kept.iter_mut().for_each(|unit| unit.hold = Hold::Kept { later: 1, used: 10.0 });
    // With two slots, the third load waits until batch 0 is dropped: at 30, at the end of the second use.
    assert_eq!([2, 3].map(|slots| wall(&kept, &MACHINE, depth(slots))), [70.0, 50.0]);
    // The caller drops each batch as soon as it has it, so the next load can start in the only slot.
    kept.iter_mut().for_each(|unit| unit.hold = Hold::Kept { later: 0, used: 0.0 });
    assert_eq!(wall(&kept, &MACHINE, depth(1)), 50.0);
}

#[test]
fn another_thread_has_one_batch_after_the_other() {
    let mut lent = units(&[1.0; 4], 0.0);
    lent.iter_mut().for_each(|unit| unit.hold = Hold::Lent { thread: 0, service: 10.0 });
    assert_eq!(wall(&lent, &MACHINE, DEFAULT), 22.0);
    assert_eq!(wall(&lent, &MACHINE, depth(4)), 4.0);
    let end = |settings| replay(&lent, &MACHINE, settings, MEASURED).unwrap().end;
    assert_eq!([DEFAULT, depth(4)].map(end), [41.0; 2], "more slots end its work no earlier");
    for (at, unit) in lent.iter_mut().enumerate() {
        unit.hold = Hold::Lent { thread: at % 2, service: 10.0 };
    }
    assert_eq!(wall(&lent, &MACHINE, DEFAULT), 13.0, "two threads");
}

#[test]
fn threads_that_compute_share_the_processors() {
    let both = units(&[10.0; 2], 10.0);
    let machine = |processors| Machine { processors, load_cpu: 1.0, train_cpu: 1.0, ..MACHINE };
    assert_eq!(wall(&both, &machine(1.0), DEFAULT), 40.0);
    assert_eq!(wall(&both, &machine(2.0), DEFAULT), 30.0);
    // Four loads on two processors.
    let loads = units(&[10.0; 4], 0.0);
    assert_eq!(wall(&loads, &machine(2.0), workers(4)), 20.0);
    // A load waits for half of its time, and needs no processor while it waits.
    let half = Machine { load_cpu: 0.5, ..machine(2.0) };
    assert_eq!(wall(&loads, &half, workers(4)), 10.0);
}

#[test]
fn workers_share_the_disk_of_files() {
    let loads = units(&[10.0; 8], 0.0);
    let shared = Machine { serial: 1.0, ..MACHINE };
    assert_eq!([1, 4].map(|n| wall(&loads, &shared, workers(n))), [80.0, 80.0]);
    let transform = Machine { load_cpu: 1.0, ..MACHINE };
    assert_eq!(wall(&loads, &transform, workers(4)), 20.0);
}

#[test]
fn one_copy_to_the_device_goes_on_at_a_time() {
    let mut copied = units(&[10.0; 3], 5.0);
    copied.iter_mut().for_each(|unit| unit.transfer = 20.0);
    let device = Machine { device_depth: 2, ..MACHINE };
    assert_eq!(wall(&copied, &device, DEFAULT), 75.0);
    assert_eq!(wall(&copied, &device, OFF), 3.0 * 35.0);
    assert_eq!(wall(&copied, &device, workers(3)), 75.0);
}

#[test]
fn pauses_are_no_part_of_the_time_but_loads_go_on() {
    let mut paused = units(&[10.0; 2], 10.0);
    paused[0].paused = 100.0;
    assert_eq!(wall(&paused, &MACHINE, DEFAULT), 30.0);
}

#[test]
fn a_round_in_lockstep_starts_when_the_one_before_was_received() {
    let rounds = units(&[10.0, 30.0, 30.0], 20.0);
    let lockstep = Machine { lockstep: true, ..MACHINE };
    assert_eq!([MACHINE, lockstep].map(|machine| wall(&rounds, &machine, DEFAULT)), [90.0, 90.0]);
    let rounds = units(&[10.0, 10.0, 30.0], 20.0);
    assert_eq!([MACHINE, lockstep].map(|machine| wall(&rounds, &machine, DEFAULT)), [80.0, 80.0]);
    let uneven = units(&[10.0, 10.0, 30.0, 30.0], 20.0);
    assert_eq!(wall(&uneven, &lockstep, depth(4)), 110.0);
    assert_eq!(wall(&uneven, &MACHINE, depth(4)), 100.0);
}

#[test]
fn a_caller_that_sleeps_wakes_later() {
    let wake = Machine { wake: 2.0, ..MACHINE };
    assert_eq!(wall(&units(&[20.0; 3], 5.0), &wake, DEFAULT), 67.0);
    assert_eq!(wall(&units(&[20.0; 3], 5.0), &wake, OFF), 75.0);
}

#[test]
fn a_thread_that_sleeps_starts_later() {
    let start = Machine { start: 3.0, ..MACHINE };
    // The third load's slot is free at 15. Its thread wakes 3 later and loads from 18 to 28; the caller waits from 25
    // on.
    let slow = units(&[5.0, 5.0, 10.0], 10.0);
    assert_eq!([MACHINE, start].map(|machine| wall(&slow, &machine, DEFAULT)), [35.0, 38.0]);
    assert_eq!(wall(&units(&[10.0; 8], 10.0), &start, OFF), 160.0);
}

#[test]
fn a_stage_can_be_faster() {
    let faster = [0.5, 1.0, 1.0, 1.0, 1.0];
    assert_eq!(replay(&units(&[20.0; 4], 5.0), &MACHINE, DEFAULT, faster).unwrap().wall, 45.0);
    let faster = [1.0, 1.0, 1.0, 0.5, 1.0];
    assert_eq!(replay(&units(&[5.0; 4], 20.0), &MACHINE, DEFAULT, faster).unwrap().wall, 45.0);
}

#[test]
fn nothing_takes_no_time() {
    assert_eq!(replay(&[], &MACHINE, DEFAULT, MEASURED), Some(Outcome::default()));
    assert_eq!(wall(&units(&[0.0; 3], 0.0), &MACHINE, DEFAULT), 0.0);
}

/// A waiting caller takes part in the load if there is a processor for it, and only then.
#[test]
fn a_caller_that_helps_halves_the_load_that_it_waits_for() {
    let unit = |train| Unit { read: 100.0, train, helps: true, ..Unit::default() };
    let wall = |processors, train, settings| {
        let machine = Machine { processors, load_cpu: 1.0, train_cpu: 1.0, wake: 30.0, ..MACHINE };
        replay(&vec![unit(train); 10], &machine, settings, MEASURED).unwrap().wall
    };
    let one = Settings { overlap: true, depth: 2, workers: 1 };
    assert_eq!(wall(2.0, 0.0, one), 500.0, "each load takes half of the time, and nobody has to be woken");
    assert_eq!(wall(1.0, 0.0, one), 1000.0, "two threads on one processor");
    // The caller's help halves the first load to 50. When it asks for a later batch, 40 of 100 are left, halved to 20.
    assert_eq!(wall(2.0, 60.0, one), 50.0 + 9.0 * (60.0 + 20.0) + 60.0);
    assert_eq!(
        wall(2.0, 0.0, Settings { overlap: false, ..one }),
        1000.0,
        "without a thread there is nobody to help"
    );
    let two = wall(2.0, 0.0, Settings { workers: 2, depth: 4, ..one });
    assert!(two > 500.0, "{two}: workers have all of a batch each, and are waited for");
}
