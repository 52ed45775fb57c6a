//! Figures, verdicts and advice of reports.

use std::time::Instant;

use super::*;
use crate::observe::history::Seen;
use crate::observe::log::{LoadTimes, Ticket};
use crate::observe::predict::{Model, Prediction};

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns the report of a loader with two slots, whose batches take `read` and `train` milliseconds to read and to
/// use.
fn report(overlap: bool, read: &[u64], train: u64) -> Report {
    let settings = Settings { overlap, depth: 2, workers: 1 };
    let origin = Instant::now();
    // Each load and each use runs on a processor for half of its time.
    let share = Some(crate::thread::Share { wall: 0.01, cpu: 0.005, delay: 0.0, running: 0.0 });
    let (mut now, mut units) = (origin, Vec::new());
    let (mut loaded, mut freed) = (origin, vec![origin; 2]);
    for (step, &read) in read.iter().enumerate() {
        let asked = now;
        let start = if overlap { loaded.max(freed[step]) } else { now };
        loaded = start + ms(read);
        let received = now.max(loaded);
        now = received + ms(train);
        freed.push(now);
        let ticket = Ticket { generation: 1, seq: step as u64, ..Ticket::default() };
        let load = LoadTimes { end: start + ms(read), cpu: share, ..LoadTimes::new(start) };
        let began = (step == 0).then_some(origin);
        let seen = Seen { began, released: now, use_cpu: share, ..Seen::new(ticket, load, asked, received) };
        units.push(seen);
    }
    Report {
        batches: units.len() as u64,
        wall: now - origin,
        recent: Recent { units }.into(),
        ..Report::new(Kind::Batches, settings, 0)
    }
}

/// Returns `report` after `change` was applied to each of its batches.
fn with(report: Report, mut change: impl FnMut(usize, &mut Seen)) -> Report {
    let mut recent = (*report.recent).clone();
    recent.units.iter_mut().enumerate().for_each(|(at, seen)| change(at, seen));
    Report { recent: recent.into(), ..report }
}

#[test]
fn the_verdict_is_the_stage_that_saves_most() {
    assert_eq!(Report::default().verdict(), Verdict::Unmeasured);
    for (overlap, read, train, verdict) in [
        (false, 0, 0, Verdict::Unmeasured), // the clock is too coarse to measure them
        (false, 10, 100, Verdict::ComputeBound),
        (false, 100, 110, Verdict::Balanced),
        (false, 110, 100, Verdict::Balanced),
        (false, 100, 10, Verdict::LoadBound),
        (true, 100, 100, Verdict::Balanced),
        (true, 100, 110, Verdict::ComputeBound),
        (true, 110, 100, Verdict::LoadBound),
    ] {
        let found = report(overlap, &[read; 50], train);
        assert_eq!(found.verdict(), verdict, "{overlap}, read {read}, train {train}");
    }
    // All reads take 1 ms, except for one that takes a second.
    let mut reads = [1; 100];
    reads[40] = 1000;
    assert_eq!(report(true, &reads, 3).verdict(), Verdict::LoadBound);
}

#[test]
fn what_was_measured_is_predicted_for_the_same_settings() {
    for overlap in [false, true] {
        let found = report(overlap, &[10, 30, 20, 40, 10, 10], 20);
        let same = found.predict(found.settings).unwrap();
        assert_eq!((same.wall, same.measured, same.batches), (found.wall, found.wall, 6), "{overlap}");
    }
    let found = report(true, &[10; 10], 10);
    let off = found.predict(Settings { overlap: false, ..found.settings }).unwrap();
    assert_eq!((off.wall, off.waiting), (ms(200), ms(100)));
    assert!((off.gain() - (1.0 - 200.0 / 110.0)).abs() < 1e-9);
    assert_eq!(Report::default().predict(found.settings), None);
}

#[test]
fn the_advice_is_the_smallest_change_that_gains() {
    let off = report(false, &[10; 100], 10);
    let advice = off.advice();
    assert!(advice.starts_with("Set `overlap(true)`: 49 % less, 1.01"), "{advice}");
    assert!(advice.ends_with(" s in place of 2.000 s for the last 100 batches (replayed)."), "{advice}");
    let by_breakdown = Report { by_breakdown: true, ..off };
    assert!(by_breakdown.advice().starts_with("Turn the breakdown off"), "{by_breakdown}");

    // A load waits for a disk or a service for half of its time. Two workers can wait at the same time.
    let found = report(true, &[20; 100], 10).recommended().unwrap();
    assert_eq!(found.settings, Settings { overlap: true, depth: 3, workers: 2 });
    // Every tenth read takes 40 ms, too long for two slots to hide.
    let tenth: Vec<_> = (0..100).map(|step| if step % 10 == 5 { 40 } else { 10 }).collect();
    let found = report(true, &tenth, 20).recommended().unwrap();
    assert_eq!(found.settings, Settings { overlap: true, depth: 3, workers: 1 });
    // The compute takes ten times as long as the reads, so no option gains.
    let choices = vec![];
    let alone = Report { choices, ..report(true, &[10; 100], 100) };
    assert_eq!(alone.recommended(), None);
    assert_eq!(alone.advice(), "Keep the settings. No option of the loader gains 3 %: the compute decides.");
    assert_eq!(Report::default().advice(), "Nothing was measured.");
}

/// A stream of tensors has one thread, and no call for several passes: the advice names neither.
#[test]
fn a_stream_is_advised_to_change_what_it_has() {
    let stream = |report: Report| Report { kind: Kind::Groups, ..report };
    // Two workers would read twice as fast, but a stream has no option `workers`.
    let mut found = stream(report(true, &[20; 100], 10));
    assert_eq!(found.recommended(), None);
    assert_eq!(found.verdict(), Verdict::LoadBound, "no byte came from a disk");
    (found.reading.bytes, found.reading.disk) = (100, 60);
    let advice = found.advice();
    assert!(
        advice.starts_with("Keep the settings. No option of the stream gains 3 %: the disk decides: "),
        "{advice}"
    );
    assert!(!advice.contains("records"), "{advice}");
    // Every tenth read takes 40 ms, too long for two slots to hide.
    let tenth: Vec<_> = (0..100).map(|step| if step % 10 == 5 { 40 } else { 10 }).collect();
    let found = stream(report(true, &tenth, 20)).recommended().unwrap();
    assert_eq!(found.settings, Settings { overlap: true, depth: 3, workers: 1 });
    let settings = stream(report(false, &tenth, 20)).recommended().unwrap().settings;
    assert_eq!(settings, Settings { overlap: true, depth: 3, workers: 1 });
    let advice = stream(report(false, &tenth, 20)).advice();
    assert!(advice.starts_with("Set `overlap(true)` and `depth(3)`: "), "{advice}");
    // Each pass has a single group.
    let found = stream(with(report(true, &[10; 20], 10), |_, seen| seen.began = Some(seen.asked)));
    assert!(!found.advice().contains("epochs"), "{}", found.advice());
}

#[test]
fn settings_out_of_any_range_are_predicted_at_once() {
    let found = report(true, &[20; 100], 10);
    let predict = |depth, workers| found.predict(Settings { overlap: true, depth, workers });
    for (depth, workers) in [(0, 1), (2, 0)] {
        assert_eq!(predict(depth, workers), None);
    }
    let (most, wall) = (predict(100, 100).unwrap(), |found: Prediction| (found.wall, found.waiting));
    for (depth, workers) in [(usize::MAX, 100), (100, usize::MAX), (usize::MAX, 1 << 30), (101, 101)] {
        let found = predict(depth, workers).unwrap();
        assert_eq!(wall(found), wall(most));
        assert_eq!(found.settings, Settings { overlap: true, depth, workers });
    }
}

#[test]
fn epochs_of_one_batch_are_asked_for_at_once() {
    let mut found = with(report(false, &[10; 20], 10), |_, seen| seen.began = Some(seen.asked));
    found.settings.overlap = true;
    assert_eq!(found.recommended(), None, "no option helps: {found}");
    let advice = found.advice();
    assert!(advice.starts_with("Ask for all epochs at once, with `epochs(..)`: 48 % less, "), "{advice}");
}

#[test]
fn time_that_both_sides_wait_is_the_devices() {
    let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
    let of = |read: StageTimes, train: StageTimes, transfer| {
        let report = Report { batches: 1, wall: ms(4000), read, train, ..Report::default() };
        report.with_transfers(1, ms(transfer), u64::from(transfer > 0)).device
    };
    // The caller only enqueues work. It waits for the device, and so does the reader.
    assert_eq!(of(stage(1000, 3000), stage(10, 3990), 500), ms(3990));
    // Waits that have another cause.
    for (read, train, transfer) in [
        (stage(3900, 100), stage(10, 3990), 500),
        (stage(1000, 3000), stage(10, 3990), 3900),
        (stage(1000, 3000), stage(3900, 100), 500),
        (stage(2000, 0), stage(10, 3990), 1990), // without overlap
        (stage(1000, 3000), stage(10, 3990), 0), // without a device
    ] {
        assert_eq!(of(read, train, transfer), ms(0));
    }
}

#[test]
fn work_that_is_only_enqueued_is_the_computes() {
    // For each batch the caller enqueues work that keeps the device busy for 5 ms. It waits for one of two device
    // slots.
    let (mut now, mut done) = (None, vec![]);
    let found = with(report(true, &[1; 80], 1), |at, seen| {
        let asked = now.unwrap_or(seen.asked);
        let free = at.checked_sub(2).map_or(asked, |before| done[before]);
        seen.received = seen.load.end.max(asked).max(free);
        (seen.asked, seen.released) = (asked, seen.received + ms(1));
        done.push(done.last().map_or(seen.received, |last| seen.received.max(*last)) + ms(5));
        now = Some(seen.released);
    });
    // With more slots the caller would run further ahead, but the device would not finish earlier.
    let found = Report { device: ms(400), device_depth: 2, choices: vec![], ..found };
    assert_eq!(found.advice(), "Keep the settings. No option of the loader gains 3 %: the compute decides.");
    assert_eq!(found.verdict(), Verdict::ComputeBound);
}

#[test]
fn accelerator_utilization_leaves_the_first_step_aside() {
    let first = StageTimes { busy: ms(10), waiting: ms(190) };
    let train = StageTimes { busy: ms(610), waiting: ms(0) };
    // The first step takes 200 of 1000 ms and computes for 10 ms. The other 60 steps compute for 600 ms.
    let report = Report { batches: 61, wall: ms(1000), train, first, ..Report::default() };
    assert!((report.au().unwrap() - 600.0 / 800.0).abs() < 1e-9, "{report}");
    assert!((rate(report.batches, report.wall) - 61.0).abs() < 1e-9);
    assert!(report.to_string().contains("61.0 a second, AU 0.750\n"), "{report}");
    assert_eq!(Report { batches: 1, ..report }.au(), None);
    assert_eq!(Report::default().au(), None);
}

/// If the measurements allow no prediction, the advice names the reason.
#[test]
fn what_is_not_sure_is_not_said() {
    let silent = |found: Report, why: &str| {
        assert_eq!((found.recommended(), found.verdict()), (None, Verdict::Unmeasured));
        assert_eq!(found.advice(), format!("No advice: {why}."));
    };
    silent(report(false, &[10; 7], 10), "7 batches in 140.0 ms are too few");
    silent(report(false, &[1; 9], 1), "9 batches in 18.00 ms are too few");
    // The loading thread did something else for half of its time, which no batch explains.
    let found = with(report(true, &[10; 50], 1), |_, seen| seen.load.start += ms(5));
    silent(found, "replayed, the last 50 batches take 251.0 ms, and they took 501.0 ms");
}

#[test]
fn batches_that_are_kept_are_named_before_any_option() {
    // The caller drops each batch together with the next one, so no slot is free while it uses a batch.
    let (mut now, mut loaded) = (None, None);
    let found = with(report(true, &[10; 40], 10), |_, seen| {
        let asked = now.unwrap_or(seen.asked);
        seen.load.start = loaded.map_or(seen.load.start, |_| asked);
        seen.load.end = seen.load.start + ms(10);
        (seen.asked, seen.received) = (asked, asked.max(seen.load.end));
        seen.released = seen.received + ms(10);
        (now, loaded) = (Some(seen.released), Some(seen.load.end));
    });
    let released: Vec<_> = found.recent.units.iter().map(|seen| seen.released).collect();
    let found = with(found, |at, seen| seen.freed = released.get(at + 1).map(|freed| (*freed, seen.by)));
    let advice = found.advice();
    assert_eq!(advice, "1 batch is kept while the loader waits for slots: let go of what is not needed.");
    assert_eq!(found.recommended(), None);
}

/// Three loads end one after the other, as under a lock: each waits for the two before it, so it takes three times as
/// long as it would alone.
#[test]
fn loads_that_take_turns_are_not_advised_more_threads() {
    let found = with(report(true, &[10; 60], 1), |at, seen| {
        let begin = seen.load.end - ms(10);
        seen.load.start = begin.checked_sub(ms(10 * at.min(2) as u64)).unwrap_or(begin);
    });
    let found = Report { settings: Settings { workers: 3, depth: 4, ..found.settings }, ..found };
    assert_eq!(found.recommended(), None, "{found}");
    assert!(found.advice().contains("take turns"), "{found}");
}

/// Four loads sleep at the same time. They began at even distances, so they also end at even distances.
#[test]
fn loads_that_only_began_at_a_distance_do_not_take_turns() {
    let found = with(report(true, &[10; 100], 1), |at, seen| {
        // Each load starts as before, but takes 30 ms longer.
        let later = |time: Instant| time + ms(30);
        seen.asked = if at == 0 { seen.asked } else { later(seen.asked) };
        (seen.load.end, seen.received) = (later(seen.load.end), later(seen.received));
        seen.released = later(seen.released);
        seen.load.cpu = Some(crate::thread::Share { wall: 0.01, ..Default::default() });
    });
    let found = Report { settings: Settings { workers: 4, depth: 8, ..found.settings }, ..found };
    assert!(!found.advice().contains("take turns"), "{found}");
    // The gain is an upper limit: no load ran alone, so it is not known whether they wait for each other.
    let found = found.recommended().unwrap_or_else(|| panic!("{found}"));
    assert!(found.settings.workers > 4 && found.at_most, "{found:?}");
}

/// Loads that ran one after the other do not show whether two at the same time would wait for a lock.
#[test]
fn what_nobody_has_seen_side_by_side_gains_at_most() {
    let found = report(true, &[20; 100], 10);
    let gain = found.recommended().unwrap();
    assert!(gain.at_most, "{gain:?}");
    assert!(found.advice().contains(": up to 4"), "{found}");
    assert!(found.advice().ends_with("(replayed), unless a lock or other programs prevent it."), "{found}");
    assert!(!found.predict(Settings { depth: 4, ..found.settings }).unwrap().at_most, "only slots");
    // Loads now run in pairs, and each still takes 20 ms.
    let both = with(found, |at, seen| {
        let start = seen.load.start;
        seen.load.start = if at % 2 == 1 { start.checked_sub(ms(19)).unwrap_or(start) } else { start };
        seen.load.end = seen.load.start + ms(20);
    });
    let both = Report { settings: Settings { workers: 2, depth: 4, ..both.settings }, ..both };
    assert!(!both.predict(Settings { workers: 3, depth: 5, ..both.settings }).unwrap().at_most);
}

/// Returns the report of a loader whose threads wait for a processor for `delay` of each 0.01 s, while `running`
/// threads of all programs want one.
fn contended(overlap: bool, delay: f32, running: f32) -> Report {
    let share = crate::thread::Share { wall: 0.01, cpu: 0.004, delay, running: running * 0.01 };
    let share = Some(share);
    with(report(overlap, &[10; 60], 10), |_, seen| (seen.load.cpu, seen.use_cpu) = (share, share))
}

#[test]
fn processors_that_others_have_are_not_promised() {
    let gain = |found: &Report| found.predict(Settings { overlap: true, ..found.settings }).unwrap().gain();
    // First, no other program wants a processor. Then others do, as the delays of our threads show, or the system's
    // count.
    let [alone, delayed, counted] =
        [(0.0, 1.0), (0.006, 0.0), (0.0, 5.0)].map(|(delay, running)| contended(false, delay, running));
    assert!(gain(&alone) > 0.45 && !alone.advice().contains("other programs"), "{alone}");
    for found in [&delayed, &counted] {
        assert!(gain(found) < gain(&alone) - 0.01, "{} and {}: {found}", gain(found), gain(&alone));
    }
    // A program with one thread fewer gets less of the processors, so turning overlap off is not advised.
    for found in [contended(true, 0.006, 0.0), contended(true, 0.0, 18.0)] {
        assert!(!found.advice().contains("overlap(false)"), "{found}");
    }
}

/// The advice does not call the settings the best if a change would save time without the other programs.
#[test]
fn settings_are_kept_only_if_nothing_gains_without_the_others_either() {
    let share = |cpu| crate::thread::Share { wall: 0.01, cpu, delay: 0.0, running: 40.0 };
    let off = |load, train, cpu| {
        let share = Some(share(cpu));
        with(report(false, &[load; 60], train), |_, seen| (seen.load.cpu, seen.use_cpu) = (share, share))
    };
    let silent = "No advice: other programs have a part of the processors.";
    assert_eq!(off(3, 37, 0.01).advice(), silent);
    let sleeps = off(10, 10, 0.0).advice();
    assert!(sleeps.starts_with("Set `overlap(true)`"), "who only sleeps needs none: {sleeps}");
    let decides = "Keep the settings. No option of the loader gains 3 %: the compute decides.";
    assert_eq!(off(0, 20, 0.01).advice(), decides);
}

/// A use of 2 ms takes 6 ms while others have the processors. Without them, the loads of 4 ms decide.
#[test]
fn a_verdict_that_others_change_is_not_given() {
    let beside = |running: f32| {
        let share = |cpu, delay| {
            let shares = crate::thread::Share { wall: 0.006, cpu, delay, running: running * 0.006 };
            Some(shares)
        };
        with(report(true, &[4; 60], 6), |_, seen| {
            (seen.load.cpu, seen.use_cpu) = (share(0.0, 0.0), share(0.002, 0.004));
        })
    };
    let (alone, busy) = (beside(1.0), beside(20.0));
    assert_eq!((alone.verdict(), busy.verdict()), (Verdict::ComputeBound, Verdict::Unmeasured), "{busy}");
    // The delay changes nothing here.
    let sleeps = with(busy, |_, seen| seen.use_cpu = seen.load.cpu);
    assert_eq!(sleeps.verdict(), Verdict::ComputeBound, "{sleeps}");
}

/// With one processor, loads that run at the same time may take it from each other, or wait for a lock.
#[test]
fn with_one_processor_no_more_workers_are_advised_that_nobody_has_seen() {
    let found = report(true, &[20; 100], 10);
    let mut model = Model::of(&found);
    model.demand.processors = 2.0;
    let more = model.recommended(&found).unwrap();
    assert!(more.settings.workers == 2 && model.unsure(&found).is_none(), "{more:?}");
    model.demand.processors = 1.0;
    let fewer = model.recommended(&found);
    assert!(fewer.is_none_or(|found| found.settings.workers == 1), "{fewer:?}");
    assert!(model.unsure(&found).is_some_and(|why| why.contains("one processor")));
}

/// During a wait, the live report has the sums at the beginning of the wait, plus the wait. Its single batches are
/// those of the last full copy.
#[test]
fn a_wait_that_begins_copies_no_batches() {
    let mut publisher = Publisher::default();
    let live = publisher.handle(report(true, &[10; 20], 10));
    publisher.waits(|_| Report { batches: 25, ..Report::default() });
    publisher.waits(|_| unreachable!("it goes on"));
    let found = live.get();
    assert_eq!((found.batches, found.recent.units.len()), (25, 20));
    publisher.waited(Instant::now());
    let waited = live.get().train.waiting;
    assert!(waited >= found.train.waiting && waited == live.get().train.waiting, "it is over");
}
