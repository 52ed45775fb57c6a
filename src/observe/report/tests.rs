//! Figures, verdicts and advice of reports.

use std::time::Instant;

use twinbuf_testing::{Random, extent};

use super::*;
use crate::observe::breakdown::Breakdown;
use crate::observe::log::{self, Freed, LoadTimes, Place, Ticket};
use crate::observe::recorder::{LoopRecorder, Recorder};
use crate::observe::trace::Track;
use crate::thread::MAX_WORKERS;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns the report of 10 batches, with these times in milliseconds: the use, the waits, and the loads of all workers.
fn report(used: u64, waits: u64, loads: u64) -> Report {
    let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
    let settings = Settings { overlap: true, depth: 3, workers: 1 };
    Report {
        batches: 10,
        wall: ms(used + waits),
        read: stage(loads, 0),
        train: stage(used, waits),
        ..Report::new(Kind::Batches, settings)
    }
}

impl Report {
    /// The same report with these loads, and with this time and these bytes of copies to a device.
    fn with_transfers(self, loads: u64, transfer: Duration, transfer_bytes: u64) -> Self {
        Self { loads, transfer, transfer_bytes, ..self }
    }

    /// The same report but for a change.
    fn but(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

/// The same without overlap.
fn in_turn(used: u64, loads: u64) -> Report {
    without_overlap(report(used, loads, loads))
}

fn without_overlap(report: Report) -> Report {
    Report { settings: Settings { overlap: false, ..report.settings }, ..report }
}

/// Returns the report of a loop that only enqueues work on a device, while loads wait for slots.
fn enqueued(copies: u64) -> Report {
    let found = report(100, 900, 200).with_transfers(10, ms(copies), 1 << 20);
    found.but(|report| report.read.waiting = ms(800))
}

/// The same, but the worker waits for slots to be freed.
fn full(report: Report) -> Report {
    report.but(|report| report.parts.full = ms(100))
}

/// The same, but a slot was kept for this time while a load waited for it.
fn held(time: u64, report: Report) -> Report {
    report.but(|report| report.parts.held = ms(time))
}

/// A recorder of batches, and a function that turns milliseconds since its start into a time.
fn recorder() -> (Recorder, impl Fn(u64) -> Instant + Copy) {
    let empty = Report::new(Kind::Batches, report(0, 0, 0).settings);
    let (recorder, created) = (Recorder::new(Track::default(), Breakdown::off(), empty), Instant::now());
    (recorder, move |after| created + ms(after))
}

/// The ticket of a step of one epoch.
fn ticket(step: u64) -> Ticket {
    Ticket { seq: step, place: Place { step, ..Place::default() }, ..Ticket::default() }
}

/// The times of a load.
fn load(start: Instant, end: Instant) -> LoadTimes {
    LoadTimes { end, ..LoadTimes::new(start) }
}

/// Records a step: when its batch was asked for, loaded and received.
fn step(recorder: &mut Recorder, ticket: Ticket, asked: Instant, load: &LoadTimes, received: Instant) {
    recorder.asked(ticket.place, asked, None);
    recorder.received(ticket, 0, load, received, None);
}

/// Runs on another thread: loops on one thread are pauses of each other.
fn elsewhere<R: Send>(run: impl FnOnce() -> R + Send) -> R {
    std::thread::scope(|scope| scope.spawn(run).join().unwrap())
}

/// Checks the verdict, and that each of these is in the advice, which has one to four lines here.
#[track_caller]
fn says(report: &Report, verdict: Verdict, words: &[&str]) {
    let advice = report.advice();
    assert_eq!(report.verdict(), verdict, "{advice}");
    assert!(advice.starts_with(&format!("{verdict}: ")), "{advice}");
    assert!((1..=4).contains(&advice.lines().count()), "{advice}");
    words.iter().for_each(|words| assert!(advice.contains(words), "{words}: {advice}"));
}

#[test]
fn fewer_than_8_batches_are_too_few_and_nothing_else_is() {
    assert_eq!(Report::default().advice(), "Nothing was measured.");
    let found = Report { batches: 7, ..report(10, 990, 990) };
    says(&found, Verdict::Unmeasured, &["7 batches are too few"]);
    says(&Report { batches: 8, ..found.clone() }, Verdict::LoadBound, &[]);
    says(&Report { kind: Kind::Rounds, ..found }, Verdict::Unmeasured, &["7 rounds are too few"]);
    let short = Duration::from_nanos(50);
    let train = StageTimes { busy: short, waiting: short };
    let found = Report { wall: 2 * short, train, ..report(0, 0, 0) };
    says(&found, Verdict::Balanced, &["waits for batches for 50 %"]);
    says(&report(0, 0, 0), Verdict::ComputeBound, &[]); // the clock is too coarse
}

#[test]
fn a_caller_that_does_not_wait_gains_nothing() {
    for found in [report(960, 40, 500), in_turn(960, 40)] {
        let words = ["waits for batches for 4.0 %", "uses them for 96 %", "saves at most 4.0 %"];
        says(&found, Verdict::ComputeBound, &words);
        assert!(!found.advice().contains("Try"), "{found}");
    }
}

#[test]
fn without_overlap_the_longer_of_load_and_use_decides() {
    let gains = |part: &str| {
        let call = "`overlap(true)`, to load while the loop uses (`TWINBUF_OVERLAP=1` if the builder calls `from_env`)";
        format!("Try: {call}. It saves at most {part} of the time.")
    };
    says(&in_turn(700, 300), Verdict::ComputeBound, &[&gains("30 %")]);
    says(&in_turn(480, 520), Verdict::Balanced, &[&gains("48 %")]);
    // With overlap, a copy is beside a load.
    let copied = without_overlap(report(100, 800, 500)).with_transfers(10, ms(300), 1);
    says(&copied, Verdict::LoadBound, &[&gains("45 %")]);
    // A start of an iteration waits as every other request does.
    let starts =
        in_turn(480, 520).but(|report| (report.parts.starts, report.parts.start_waits) = (10, ms(520)));
    says(&starts, Verdict::Balanced, &["Balanced: the loop waits for batches for 52 %", &gains("48 %")]);
    // So is what else takes time between a request and its batch.
    says(&without_overlap(report(300, 700, 600)), Verdict::LoadBound, &[&gains("40 %")]);
    // The builder has four workers, of which overlap starts threads.
    let four = Report { workers_with_overlap: 4, ..in_turn(200, 800) };
    says(&four, Verdict::LoadBound, &["It saves at most 80 % of the time, and only if a processor is idle"]);
    assert_eq!(four.to_try().map(|(settings, _)| settings.workers), Some(4));
    let off = Report { by_breakdown: true, ..in_turn(480, 520) };
    let turn_off = "Try: turn off the breakdown, which turns overlap off. It saves at most 48 %";
    says(&off, Verdict::Balanced, &[turn_off]);
    let both = Report { overlap_off: true, ..off };
    let words = "turn off the breakdown, which turns overlap off, and set `overlap(true)`. It saves";
    says(&both, Verdict::Balanced, &[words]);
    let one_slot = in_turn(480, 520).but(|report| report.settings.depth = 1);
    // Each is more than `build` accepts for one slot.
    let off = Report { by_breakdown: true, needs_clones: true, workers_with_overlap: 2, ..one_slot.clone() };
    let words =
        "overlap off, and set `depth(3)`, if the data set and all transforms have `try_clone`. It saves";
    says(&off, Verdict::Balanced, &[words]);
    let off = Report { overlap_off: true, needs_clones: false, ..off };
    says(&off, Verdict::Balanced, &["overlap off, and set `overlap(true)` and `depth(3)`. It saves"]);
    for kind in [Kind::Rounds, Kind::Items] {
        let found = Report { kind, ..one_slot.clone() };
        says(
            &found,
            Verdict::Balanced,
            &["Try: `overlap(true)` and 2 slots, to load while the loop uses. It"],
        );
    }
    let words =
        "`overlap(true)` and `depth(2)`, to load while the loop uses (`TWINBUF_OVERLAP=1 TWINBUF_DEPTH=2` if";
    says(&one_slot, Verdict::Balanced, &[words]);
    assert_eq!(one_slot.to_try().map(|(settings, _)| settings.depth), Some(2));
    let watched = Report { kind: Kind::Items, ..in_turn(480, 520) };
    assert!(!watched.advice().contains("TWINBUF"), "only a loader has variables: {watched}");
}

#[test]
fn workers_that_load_all_the_time_decide() {
    // Three workers: together they load for 2910 ms, each for 97 % of the 1000 ms.
    let mut three = report(120, 880, 2910);
    (three.settings.workers, three.settings.depth) = (3, 5);
    let one_more = "Try: `workers(4)`, one more loading thread (`TWINBUF_WORKERS=4` if the builder calls `from_env`). It saves at most 28 % of";
    says(&three, Verdict::LoadBound, &["Each of 3 loading threads is busy for 97 %", one_more]);
    let two_slots = report(120, 880, 880).but(|report| report.settings.depth = 2);
    says(&two_slots, Verdict::LoadBound, &["Try: `workers(2)` and `depth(3)`, one more loading thread ("]);
    let foreign = Report { needs_clones: true, ..report(120, 880, 880) };
    let words = "`from_env`), if the data set and all transforms have `try_clone`. It saves at most";
    says(&foreign, Verdict::LoadBound, &[words]);
    let limited = Report { limited: true, ..foreign };
    says(&limited, Verdict::LoadBound, &["have `try_clone`, if `memory_limit` allows it. It saves at most"]);
    // There are no more than 64.
    three.settings.workers = MAX_WORKERS;
    three.read.busy = ms(970 * MAX_WORKERS as u64);
    says(&three, Verdict::LoadBound, &["Make loading cheaper: that saves at most 88 %"]);
    assert!(three.to_try().is_none());
    let ahead = Report { kind: Kind::Ahead, ..report(120, 880, 880) };
    says(&ahead, Verdict::LoadBound, &["The workers of the iterable make them: start more"]);
    // The caller does a part of the loads: the worker loads all the time.
    let helped = report(200, 800, 1750).but(|report| report.parts.helped = ms(780));
    says(&helped, Verdict::LoadBound, &["busy for 97 %", "at most 35 %"]);
    says(&report(950, 60, 950), Verdict::Balanced, &["Only both faster saves more than 6.0 %"]);
}

#[test]
fn copies_decide_if_they_take_all_the_time() {
    let found = report(100, 900, 500).with_transfers(10, ms(950), 1);
    says(&found, Verdict::TransferBound, &["Copies to the device take 95 %"]);
}

/// The first copy may allocate, and copies ahead are in the first step too.
#[test]
fn copies_in_the_first_step_are_left_out() {
    let (mut recorder, at) = recorder();
    for step in 0..11 {
        let copy = |step: u64| match step {
            0 => (at(0), at(900)),
            1 => (at(900), at(990)),
            _ => (at(900 + 100 * step), at(905 + 100 * step)),
        };
        recorder.asked(ticket(step).place, at(900 + 100 * step), step.checked_sub(1).map(copy));
        let load = load(at(810 + 100 * step), at(900 + 100 * step));
        recorder.received(ticket(step), 0, &load, at(990 + 100 * step), None);
    }
    recorder.ended(at(2000));
    let found = recorder.report();
    assert_eq!((found.first.busy, found.first_step.copies), (ms(10), ms(990)));
    let found = found.with_transfers(11, ms(990 + 9 * 5), 1);
    says(&found, Verdict::LoadBound, &["The loading thread is busy for 81 % of the time"]);
    // A sender's first use is its first copy.
    let loop_of = |first| Report { first, ..report(100, 900, 0) };
    let mut sender = report(1035, 900, 970);
    sender.first.busy = ms(990);
    let found = loop_of(StageTimes::default()).on_device(Report { bytes: 1, ..sender });
    says(&found, Verdict::LoadBound, &["busy for 97 % of the time"]);
}

/// With several workers the loads take little on average, and slots are full behind a load that takes long.
#[test]
fn a_wait_for_a_load_is_no_wait_for_a_device() {
    let (mut recorder, at) = recorder();
    recorder.report.settings.workers = 4;
    for number in 0..12 {
        let (asked, received) = (at(100 * number), at(100 * number + 90));
        let since = at((100 * number).saturating_sub(300));
        let load = LoadTimes { since, ..load(asked, received) };
        step(&mut recorder, ticket(number), asked, &load, received);
    }
    recorder.ended(at(1200));
    let found = recorder.report().with_transfers(12, ms(10), 1);
    assert_eq!(found.parts.late, ms(11 * 90));
    assert!(!found.waits_for_device() && found.au().is_some(), "{found}");
}

#[test]
fn slots_that_are_kept_decide_if_most_waits_are_for_them() {
    let kept = |time| held(time, report(200, 800, 400));
    assert_eq!(kept(600).verdict(), Verdict::HeldBound);
    says(&kept(300), Verdict::LoadBound, &[]);
    // A batch that is let go also saves what a worker takes to wake up, and lets later loads start sooner.
    let words = ["For 50 % a load could not start", "It saves at most 60 %"];
    says(&kept(500), Verdict::HeldBound, &words);
}

/// A bound that is rounded to the nearest number may be below what was measured.
#[test]
fn bounds_are_rounded_up() {
    says(&in_turn(3010, 6990), Verdict::LoadBound, &["for 70 % of", "uses them for 30 %", "at most 31 %"]);
    says(&report(9799, 201, 5000), Verdict::ComputeBound, &["waits for batches for 2.0 %", "at most 2.1 %"]);
    says(&report(9799, 200, 5000), Verdict::ComputeBound, &["at most 2.1 %"]);
    let rounds = Report { kind: Kind::Rounds, ..report(1199, 8801, 9700) };
    says(&rounds, Verdict::GenerationBound, &["waits for rounds for 88 %", "at most 89 %"]);
    let found = report(1000, 9000, 5000).with_transfers(10, ms(9500), 1);
    says(&found, Verdict::TransferBound, &["at most 90 %"]);
    // Only a faster use saves what is beyond the loads.
    let words = ["waits for batches for 5.9 %", "Only both faster saves more than 9.5 %"];
    says(&report(950, 60, 915), Verdict::Balanced, &words);
    for (part, text) in [(0.0, "0.0 %"), (0.0991, "10 %"), (0.099, "9.9 %"), (0.3, "30 %"), (1.0, "100 %")] {
        assert_eq!(crate::observe::display::at_most(part), text);
    }
}

/// A loop that waits has a low utilization beside it, whatever decides.
#[test]
fn the_utilization_and_the_waits_add_up() {
    let copies = report(100, 900, 500).with_transfers(10, ms(950), 1);
    let kept = held(600, report(200, 800, 400));
    for found in [report(960, 40, 500), in_turn(300, 700), report(120, 880, 970), copies, kept] {
        let waits = found.train.waiting.as_secs_f64() / found.wall.as_secs_f64();
        assert!((found.au().unwrap() + waits - 1.0).abs() < 1e-9, "{found}");
    }
}

/// No thread works for more than all of the time, even if loads began before the loop.
#[test]
fn loads_outside_of_the_loop_are_not_busy_time_of_it() {
    let (mut recorder, at) = recorder();
    // The loads of the first 8 of 10 batches are over when the loop begins, at 800 ms. Those of the others take all of a
    // pause of 50 ms each. The loop waits for 10 ms and uses for 10 ms.
    elsewhere(|| {
        for number in 0..10 {
            let (asked, start, end) = match number {
                0..8 => (800 + 20 * number, 100 * number, 100 * number + 100),
                _ => (450 + 70 * number, 400 + 70 * number, 450 + 70 * number),
            };
            if number > 7 {
                log::pause((at(asked - 50), at(asked)));
            }
            step(&mut recorder, ticket(number), at(asked), &load(at(start), at(end)), at(asked + 10));
        }
        recorder.ended(at(1100));
        let found = recorder.report();
        assert_eq!((found.loads(), found.parts.outside), (ms(900), ms(900)));
        says(&found, Verdict::Balanced, &["Loads take 0.0 %, less than the use (50 %)"]);
    });
    says(&report(100, 900, 3000), Verdict::LoadBound, &["busy for 100 % of the time"]);
}

/// A load waits for its slot in the use before the last, which had a pause too.
#[test]
fn a_wait_in_a_pause_is_no_wait_for_a_slot_of_the_loop() {
    let (mut recorder, at) = recorder();
    // Each step takes 200 ms: a wait and a use of 10 ms each, and a pause. Each load waits for 300 ms.
    elsewhere(|| {
        for number in 2..12 {
            log::pause((at(200 * number - 180), at(200 * number)));
            let (since, start) = (at(200 * number - 310), at(200 * number - 10));
            let freed = Some(Freed { number: 99, at: start });
            let load = LoadTimes { since, freed, ..LoadTimes::new(start) };
            step(&mut recorder, ticket(number), at(200 * number), &load, at(200 * number + 10));
        }
        recorder.ended(at(2420));
    });
    let found = recorder.report();
    // The first load waits before the loop.
    assert_eq!((found.wall, found.parts.pauses, found.parts.full), (ms(400), ms(9 * 180), ms(9 * 20)));
}

/// One more worker loads in pauses too, and so does a thread of a loop that had none.
#[test]
fn loads_in_pauses_are_in_no_bound() {
    let nested = report(20, 200, 200).but(|report| report.parts.pauses = ms(80));
    says(&nested, Verdict::LoadBound, &["`workers(2)`", "at most 91 % of the time, and only if"]);
    says(&without_overlap(nested.clone()), Verdict::LoadBound, &["`overlap(true)`", "at most 46 %"]);
    let both = report(950, 60, 950).but(|report| report.parts.pauses = ms(100));
    says(&both, Verdict::Balanced, &["Only both faster saves more than 16 %"]);
}

/// With one more slot the third load is in the first step. It alone takes half of the time of all loads.
#[test]
fn a_bound_counts_the_loads_that_a_long_first_step_may_take() {
    let (mut recorder, at) = recorder();
    recorder.report.settings.depth = 2;
    step(&mut recorder, ticket(0), at(0), &load(at(0), at(20)), at(20));
    step(&mut recorder, ticket(1), at(5000), &load(at(20), at(40)), at(5000));
    step(&mut recorder, ticket(2), at(5010), &load(at(5000), at(6000)), at(6000));
    for number in 3..50 {
        let end = 5960 + 20 * number;
        step(&mut recorder, ticket(number), at(end - 10), &load(at(end - 20), at(end)), at(end));
    }
    recorder.ended(at(6950));
    let report = recorder.report();
    let (settings, saves) = report.to_try().unwrap();
    assert_eq!((settings.workers, settings.depth), (2, 3), "{report}");
    // Two workers load the other 47 batches in 470 ms, less than the 490 ms of all uses. Without them it takes 1950 ms.
    assert!((saves - 1460.0 / 1950.0).abs() < 1e-9, "{saves}: {report}");
}

/// They are in no sum that a bound shares among the workers, so no first step can take them away from it.
#[test]
fn loads_before_the_loop_are_not_moved_into_its_first_step() {
    let (mut recorder, at) = recorder();
    recorder.report.settings.depth = 2;
    step(&mut recorder, ticket(0), at(1000), &load(at(0), at(1000)), at(1000));
    step(&mut recorder, ticket(1), at(6000), &load(at(1000), at(1020)), at(6000));
    for number in 2..50 {
        let end = 5980 + 20 * number;
        step(&mut recorder, ticket(number), at(end - 18), &load(at(end - 20), at(end)), at(end));
    }
    recorder.ended(at(6962));
    let report = recorder.report();
    let (settings, saves) = report.to_try().unwrap();
    assert_eq!((settings.workers, settings.depth), (2, 3), "{report}");
    // Two workers load the other 48 batches in 480 ms, but for three that the first step may load. It took 962 ms.
    let loads = 480.0 - 3.0 * 20.0;
    assert!((saves - (962.0 - loads) / 962.0).abs() < 1e-9, "{saves}: {report}");
}

/// A loop and its loads, in milliseconds. No thread waits for a processor.
#[derive(Debug, Default)]
struct Simulated {
    /// The load and the use of each batch of each iteration.
    iterations: Vec<Vec<(u64, u64)>>,
    /// From the call that begins an iteration to its first request, and from the end of an iteration to the next call.
    ahead: u64,
    between: u64,
    /// The pause in each use.
    pause: u64,
    /// Whether loads go on between iterations, and whether the loop drops the first batch at once.
    cycles: bool,
    drops: bool,
    /// The time of a copy, and the slots on a device: 0 for none.
    copy: u64,
    device: usize,
}

impl Simulated {
    fn run(&self, settings: Settings, workers_with_overlap: usize) -> Report {
        let Settings { overlap, depth, workers } = settings;
        let (mut recorder, at) = recorder();
        (recorder.report.settings, recorder.report.workers_with_overlap) = (settings, workers_with_overlap);
        recorder.report.device_slots = self.device;
        // When each worker is ready, when the last load began, and when each batch was dropped.
        let (mut ready, mut begun, mut dropped, mut now) = (vec![0; workers], 0, Vec::new(), 0);
        // When each copy began and ended, and when the last one was issued. Copies run one after the other.
        let (mut copies, mut issued): (Vec<(u64, u64)>, _) = (Vec::new(), 0);
        for (epoch, steps) in (0..).zip(&self.iterations) {
            let called = now + self.between;
            now = called + self.ahead;
            let place = Place { epoch, ordinal: epoch, step: 0 };
            recorder.began(place, at(called));
            let mut copy = None;
            for (number, (took, used)) in (0..).zip(steps) {
                let (seq, worker) =
                    (dropped.len(), (0..workers).min_by_key(|&worker| ready[worker]).unwrap());
                let since = match overlap {
                    true if self.cycles && epoch > 0 => ready[worker],
                    true => ready[worker].max(called),
                    false => now,
                };
                let before = seq.checked_sub(depth);
                // A host slot is free when its batch is dropped or copied.
                let freed =
                    before.map(|before| if self.device > 0 { copies[before].1 } else { dropped[before] });
                let start = since.max(begun).max(freed.unwrap_or(0));
                let end = start + took;
                (begun, ready[worker]) = (start, end);
                issued = end.max(issued);
                if self.device > 0 {
                    issued = issued.max(seq.checked_sub(self.device).map_or(0, |before| dropped[before]));
                    let from = copies.last().map_or(issued, |&(_, copied)| copied.max(issued));
                    copies.push((from, from + self.copy));
                }
                let copied = copies.last().map_or(0, |&(_, copied)| copied);
                // With overlap, a batch is handed out when its copy is issued.
                let received = now.max(if overlap { issued } else { end.max(copied) });
                let freed = before.zip(freed).filter(|_| self.device == 0);
                let freed = freed.map(|(before, freed)| Freed { number: before as u64, at: at(freed) });
                let times = LoadTimes { since: at(since), freed, ..load(at(start), at(end)) };
                let ticket =
                    Ticket { seq: seq as u64, place: Place { step: number, ..place }, ..Ticket::default() };
                recorder.asked(ticket.place, at(now), copy);
                copy = copies.last().map(|&(from, to)| (at(from), at(to)));
                recorder.received(ticket, 0, &times, at(received), copy.filter(|_| copied <= received));
                let uses = received.max(copied);
                now = uses + used + self.pause;
                if self.pause > 0 {
                    log::pause((at(uses + used), at(now)));
                }
                dropped.push(if self.drops && seq == 0 { uses } else { now });
            }
            recorder.released(at(now), copy);
            recorder.ended(at(now));
        }
        let copied = copies.len() as u64;
        recorder.report().with_transfers(dropped.len() as u64, ms(self.copy * copied), copied)
    }

    /// The settings that the report of a run says to try, the part of the time that they save at most by it, and the part
    /// that they do save, both without the first step.
    fn tried(&self, settings: Settings, workers_with_overlap: usize) -> Option<(Settings, f64, f64)> {
        let run = |settings| elsewhere(|| self.run(settings, workers_with_overlap));
        let wall = |report: &Report| (report.wall - report.first.busy - report.first.waiting).as_secs_f64();
        let found = run(settings);
        let (option, most) = found.to_try()?;
        Some((option, most, 1.0 - wall(&run(option)) / wall(&found)))
    }
}

/// The call comes first, then the model is compiled, and more slots take the long load before the first request.
#[test]
fn a_bound_counts_the_loads_that_may_go_on_before_the_loop() {
    let mut loads = vec![(1, 15); 10];
    loads[3].0 = 280;
    let compiles = Simulated { iterations: vec![loads.clone()], ahead: 2000, ..Simulated::default() };
    // Validations whose first batches are loaded during the training before, and passes of a stream.
    let validates =
        Simulated { iterations: vec![loads.clone(); 4], ahead: 500, between: 100, ..Simulated::default() };
    let cycles = Simulated { iterations: vec![loads; 4], between: 500, cycles: true, ..Simulated::default() };
    for (simulated, saved) in [(compiles, 0.6), (validates, 0.6), (cycles, 0.4)] {
        let (option, most, saves) = simulated.tried(report(0, 0, 0).settings, 1).unwrap();
        assert_eq!(option.depth, 5);
        assert!(saves > saved && saves <= most + 1e-9, "{saves} of at most {most}: {simulated:?}");
    }
}

/// With overlap, copies into the slots of a device also start before the loop.
#[test]
fn a_bound_counts_the_copies_that_may_go_on_before_the_loop() {
    let iterations = vec![vec![(1, 6); 20]; 3];
    let simulated = Simulated { iterations, ahead: 1000, copy: 24, device: 3, ..Simulated::default() };
    let settings = Settings { overlap: false, ..report(0, 0, 0).settings };
    let (option, most, saves) = simulated.tried(settings, 1).unwrap();
    assert!(option.overlap && saves > 0.3 && saves <= most + 1e-9, "{saves} of at most {most}");
}

/// With more slots or workers, the loads at the front of the rest are done before it begins.
#[test]
fn a_bound_since_an_earlier_report_counts_the_loads_before_that() {
    let passes =
        |count| Simulated { iterations: vec![vec![(10, 3); 8]; count], cycles: true, ..Simulated::default() };
    let last = |settings| {
        let [all, before] = [3, 2].map(|count| elsewhere(|| passes(count).run(settings, 2)));
        all.since(&before)
    };
    let found = last(Settings { overlap: true, depth: 3, workers: 2 });
    let (option, most) = found.to_try().unwrap();
    let saves = 1.0 - last(option).wall.as_secs_f64() / found.wall.as_secs_f64();
    assert!(saves > 0.3 && saves <= most + 1e-9, "{saves} of at most {most}");
}

/// Loads that come late now and then, long first steps, calls long before the first request, pauses, copies.
#[test]
fn no_simulated_loop_saves_more_than_its_report_says() {
    let (mut tried, mut broken) = (0, Vec::new());
    for seed in 0..extent(500, 10_000) {
        let mut random = Random(seed);
        let (overlap, workers, depth) =
            (random.chance(80), *random.choose(&[1, 2, 3]), *random.choose(&[2, 3, 4]));
        let settings = Settings { overlap, depth, workers: if overlap { workers } else { 1 } };
        let [mean, used, rare] = [(); 3].map(|()| 1 + random.below(20));
        let (late, steps) = (random.below(400), 2 + random.below(40));
        let mut load = || if random.chance(rare) { late } else { mean };
        let mut iterations: Vec<Vec<_>> =
            (0..1 + seed % 4).map(|_| (0..steps).map(|_| (load(), used)).collect()).collect();
        iterations[0][0].1 += *random.choose(&[0, 0, 2000]);
        let [ahead, between] = [(); 2].map(|()| *random.choose(&[0, 0, 100, 1000]));
        let pause = *random.choose(&[0, 0, 0, 20]);
        let (cycles, drops) = (random.chance(20) && overlap, random.chance(20));
        let (copy, device) = (random.below(25), *random.choose(&[0, 0, 1, 2, 3]));
        let simulated = Simulated { iterations, ahead, between, pause, cycles, drops, copy, device };
        let Some((option, most, saves)) = simulated.tried(settings, workers) else { continue };
        tried += 1;
        if saves > most + 1e-9 {
            broken.push(format!("{seed}: {saves:.3} of at most {most:.3}: {settings:?}, {option:?}"));
        }
    }
    assert!(tried > 100 && broken.is_empty(), "{} of {tried}:\n{}", broken.len(), broken.join("\n"));
}

#[test]
fn loads_that_come_late_now_and_then_need_slots() {
    // A caller that helps may do more of the loads.
    let helped = full(report(300, 500, 600)).but(|report| report.parts.helped = ms(100));
    says(&helped, Verdict::LoadBound, &["`depth(5)`", "at most 44 %"]);
    // What the caller loads counts too.
    let helped = report(300, 700, 630).but(|report| report.parts.helped = ms(490));
    let words = "busy for 14 % of the time, and loads by the waiting caller 49 %.";
    says(&helped, Verdict::LoadBound, &[words]);
    let words = "Loads take 9.3 %, and loads by the waiting caller 33 %, less than the use (53 %)";
    says(&helped.but(|report| report.train.busy = ms(800)), Verdict::Balanced, &[words]);
    let rounds = Report { kind: Kind::Rounds, ..report(800, 200, 680) };
    assert!(!rounds.advice().contains("Try"), "a generator has two slots: {rounds}");
    let items = Report { kind: Kind::Items, ..report(800, 200, 680) };
    says(&items, Verdict::Balanced, &["Try: 5 slots in place of 3, to load further ahead. It saves"]);
    let rounds = Report { kind: Kind::Rounds, ..report(100, 900, 600) };
    let words =
        "slots take 0.0 %. In what is left, no round may start, or other programs may have the processor.\n";
    says(&rounds, Verdict::GenerationBound, &[words]);
}

/// The wait for the first batch of a later iteration is not that for a late load.
#[test]
fn the_verdict_is_without_later_starts_if_they_are_most_of_the_waits() {
    let start = |starts, waits: u64| {
        let parts = Parts { starts, start_waits: ms(waits), start_loads: ms(waits), ..Parts::default() };
        Report { parts, ..report(500, 340, 430) }
    };
    let words = [
        "without later starts, the loop waits for batches for 2.0 % of",
        "Later starts took 39 % of the time (330.0 ms): the waits for the first batch of 1 iteration.",
        "Try: one call of `epochs(..)` for all epochs, in place of one for each. It saves at most 41 %",
    ];
    says(&start(1, 330), Verdict::ComputeBound, &words);
    let rounds = Report { kind: Kind::Rounds, ..start(1, 330) };
    assert!(!rounds.advice().contains("Try"));
    let kept = |waits: u64| {
        let parts = Parts { starts: 1, start_waits: ms(waits - 1), ..Parts::default() };
        let found = Report { kind: Kind::Ahead, parts, ..report(500, waits, 430) };
        found.advice().ends_with(" Keep the settings.")
    };
    assert_eq!([25, 480].map(kept), [true, false]);
    let few = Report { batches: 6, ..start(1, 330) };
    says(&few, Verdict::Unmeasured, &["6 batches are too few for a verdict. It takes 8."]);
    assert!(!few.advice().contains("Try") && few.to_try().is_none(), "{few}");
    says(&start(3, 160), Verdict::Balanced, &["Try: `depth(5)`"]);
}

/// The waiting caller loads the first batch of each iteration while the worker begins with the second.
#[test]
fn loads_of_the_caller_in_later_starts_are_left_out_too() {
    let (mut recorder, at) = recorder();
    for iteration in 0..5 {
        let at = |ms: u64| at(100 * iteration + ms);
        for (step, asked, start, end) in [(0, 0, 0, 40), (1, 50, 35, 60)] {
            recorder.asked(ticket(step).place, at(asked), None);
            let load = load(at(start), at(end));
            if step == 0 {
                recorder.helped(ticket(step).place, &load);
            }
            recorder.received(ticket(step), 0, &load, at(end), None);
        }
        recorder.ended(at(70));
    }
    let words = "without later starts, the loop waits for batches for 36 % of the time. The loading thread is busy for 79 % \
                 of the time. Waits";
    says(&recorder.report(), Verdict::LoadBound, &[words, "Later starts took 53 %"]);
}

/// The first step often compiles, imports and allocates: it tells nothing about the others.
#[test]
fn the_verdict_is_without_the_first_step() {
    let first = StageTimes { busy: ms(2000), waiting: ms(500) };
    for waits in [900, 40] {
        let later = report(1000 - waits, waits, 970);
        let train =
            StageTimes { busy: later.train.busy + first.busy, waiting: later.train.waiting + first.waiting };
        let found = Report { train, first, wall: ms(3500), ..later.clone() };
        let words = "without the first step (71 % of all time, 2.500 s), the loop waits for batches for";
        says(&found, later.verdict(), &[words]);
        // The bound is another: slots are filled in the first step.
        let left = found.advice().replace("without the first step (71 % of all time, 2.500 s), ", "");
        assert_eq!(left.replace("at most 68 %", "at most 52 %"), later.advice());
    }
    // One that takes as long as the others is not mentioned, and neither are its loads.
    let (mut recorder, at) = recorder();
    for number in 0..11 {
        // The loads of the first two batches end in the first step. Each of the others waits for a slot before.
        let (since, start, end) = match number {
            0 => (0, 0, 20),
            1 => (0, 20, 90),
            _ => (100 * number - 110, 100 * number - 50, 100 * number + 20),
        };
        let freed = (number > 1).then(|| Freed { number: 99, at: at(start) });
        let load = LoadTimes { since: at(since), freed, ..load(at(start), at(end)) };
        step(&mut recorder, ticket(number), at(100 * number), &load, at(100 * number + 20));
    }
    recorder.ended(at(1100));
    let found = recorder.report();
    assert_eq!((found.first.busy, found.first.waiting), (ms(80), ms(20)));
    let first = found.first_step;
    assert_eq!((first.loads, first.start_loads, first.helped), (ms(90), ms(20), ms(0)));
    // The load of the third batch waits from 90 ms on, for 10 ms in the first step.
    assert_eq!((first.slot_waits, first.full, found.parts.full), (ms(20 + 10), ms(10), ms(9 * 60)));
    let words = "Balanced: the loop waits for batches for 20 % of the time. Loads take 63 %";
    says(&found, Verdict::Balanced, &[words]);
}

/// A read that fails is not the first step: the program asks again.
#[test]
fn a_wait_that_brings_nothing_is_no_step() {
    let lines = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let breakdown = Breakdown::every(1).sink({
        let lines = lines.clone();
        move |line| lines.lock().unwrap().push(line.to_string())
    });
    let (mut recorder, at) = recorder();
    recorder.breakdown = breakdown.clone();
    recorder.asked(ticket(0).place, at(0).checked_sub(ms(5000)).unwrap_or(at(0)), None);
    recorder.ended(at(0));
    let failed = recorder.report();
    step(&mut recorder, ticket(0), at(10), &load(at(10), at(20)), at(30));
    recorder.ended(at(70));
    let (found, first) = (recorder.report(), StageTimes { busy: ms(40), waiting: ms(20) });
    assert_eq!(found.first, first);
    assert_eq!((found.since(&failed).train, found.since(&failed).first), (first, first));
    breakdown.end_step();
    let line = lines.lock().unwrap().pop().unwrap();
    let total: f64 = line.split("total ").nth(1).unwrap().trim_end_matches(" ms").parse().unwrap();
    assert!(total <= at(0).elapsed().as_secs_f64() * 1e3, "{line}");
}

/// A program may ask for a report while it waits for a batch, and while it uses the first one.
#[test]
fn what_came_since_a_report_within_a_step_is_the_rest_of_that() {
    let (mut recorder, at) = recorder();
    let past = at(0).checked_sub(ms(5000)).unwrap_or(at(0));
    recorder.asked(ticket(0).place, past, None);
    let waits = recorder.report();
    recorder.received(ticket(0), 0, &LoadTimes::new(at(0)), at(1000), None);
    let uses = recorder.report();
    for number in 1..11 {
        let (asked, received) = (at(3900 + 100 * number), at(3950 + 100 * number));
        step(&mut recorder, ticket(number), asked, &LoadTimes::new(at(0)), received);
    }
    recorder.ended(at(5000));
    let all = recorder.report();
    assert_eq!((all.since(&waits).first.busy, all.since(&uses).first.busy), (ms(3000), ms(3000)));
    assert_eq!((all.since(&uses).first.waiting, all.since(&all).first), (ms(0), StageTimes::default()));
    for found in [&all, &all.since(&waits), &all.since(&uses)] {
        says(found, Verdict::Balanced, &["the loop waits for batches for 50 % of the time"]);
        assert!(!found.advice().contains("starts"), "{found}");
    }
    recorder.asked(ticket(0).place, past, None);
    let waits = recorder.report();
    assert!(waits.advice().contains("the waits for the first batch of 1 iteration."), "{waits}");
    recorder.received(ticket(0), 0, &LoadTimes::new(at(0)), at(9000), None);
    let found = recorder.report().since(&waits);
    assert_eq!(found.parts.start_waits, found.train.waiting);
}

/// Each iteration of a loop may have a recorder of its own. Its first step is no first step of the sum.
#[test]
fn the_sum_of_reports_leaves_one_first_step_out() {
    let report = |iterations: std::ops::Range<u64>| {
        elsewhere(|| {
            let (mut recorder, at) = recorder();
            for iteration in iterations {
                let at = |ms: u64| at(200 * iteration + ms);
                for number in 0..5 {
                    let ticket = Ticket { seq: 5 * iteration + number, ..ticket(number) };
                    let (asked, received) = (at(34 * number), at(34 * number + 20));
                    step(&mut recorder, ticket, asked, &load(asked, received), received);
                }
                recorder.ended(at(34 * 5));
            }
            recorder.report()
        })
    };
    let sum = (1..8).fold(report(0..1), |sum, iteration| sum.then(report(iteration..iteration + 1)));
    assert_eq!(sum.advice(), report(0..8).advice());
    says(&sum, Verdict::LoadBound, &["waits for batches for 59 %", "busy for 59 %"]);
    assert_eq!(sum.since(&report(0..1)).first, StageTimes::default());
    assert_eq!(sum.since(&Report::default()).first, sum.first);
}

/// A load is held up by a slot that is kept after the caller has asked for another batch. A slot that the batch in use
/// occupies is not.
#[test]
fn a_slot_is_kept_from_the_next_request_to_its_drop() {
    let (mut recorder, at) = recorder();
    let load = |since, freed: Option<(u64, u64)>| {
        let freed = freed.map(|(number, freed)| Freed { number, at: at(freed) });
        LoadTimes { freed, ..LoadTimes::new(at(since)) }
    };
    step(&mut recorder, Ticket::default(), at(0), &load(0, None), at(10));
    for (since, freed, kept) in [
        (0, None, 0),            // the first use of the slot
        (5, Some((0, 20)), 0),   // the batch was in use
        (5, Some((0, 50)), 30),  // it was kept after the request at 20 ms
        (30, Some((0, 50)), 20), // but the load was not ready before 30 ms
        (60, Some((0, 50)), 0),  // it was free before that
        (5, Some((9, 50)), 0),   // a batch that is forgotten
    ] {
        let next = Ticket { seq: 1, ..Ticket::default() };
        step(&mut recorder, next, at(20), &load(since, freed), at(100));
        assert_eq!(std::mem::take(&mut recorder.report.parts.held), ms(kept), "{since} {freed:?}");
    }
}

/// Until it is freed, and not until the worker gets a processor.
#[test]
fn a_worker_waits_for_a_slot_until_that_is_freed() {
    let (mut recorder, at) = recorder();
    recorder.asked(Place::default(), at(0), None);
    for (since, freed, full) in [(10, Some(30), 20), (10, Some(5), 20), (40, None, 20), (45, Some(46), 21)] {
        let freed = freed.map(|freed| Freed { number: 0, at: at(freed) });
        let load = LoadTimes { since: at(since), freed, ..LoadTimes::new(at(50)) };
        recorder.received(Ticket::default(), 0, &load, at(60), None);
        assert_eq!(recorder.report.parts.full, ms(full));
    }
}

#[test]
fn reports_add_up_and_what_came_since_is_their_difference() {
    let numbered = |from: u64| {
        let mut report = report(0, 0, 0);
        report.counts().zip(from..).for_each(|(count, number)| *count = number);
        report.times().zip(from..).for_each(|(time, number)| *time = ms(number));
        report
    };
    let (first, second) = (numbered(100), numbered(1));
    let mut both = first.then(second.clone());
    let counts = |report: &Report| [report.reading.bytes, report.reading.disk];
    for ((sum, one), other) in counts(&both).into_iter().zip(counts(&first)).zip(counts(&second)) {
        assert!(one > 0 && sum == one + other, "what the readers count too");
    }
    for (sum, number) in both.counts().zip(0..) {
        assert_eq!(*sum, 101 + 2 * number);
    }
    for (sum, number) in both.times().zip(0..) {
        assert_eq!(*sum, ms(101 + 2 * number));
    }
    assert_eq!(both.since(&first), second.but(|rest| rest.first_step.is_earlier = true));
    // Epochs and steps of before are not of since, and those without batches are no rows.
    let (mut recorder, at) = recorder();
    let mut epoch = |epoch: u64, steps: u64| {
        let start = 10 * epoch;
        recorder.began(Place { epoch, ordinal: epoch, step: 0 }, at(start));
        for number in 0..steps {
            let (now, mut ticket) = (at(start + number), ticket(number));
            ticket.place.epoch = epoch;
            step(&mut recorder, ticket, now, &LoadTimes::new(now), now);
        }
        recorder.ended(at(start + steps));
        recorder.report()
    };
    let before = epoch(0, 6);
    epoch(1, 0);
    let since = epoch(2, 5).since(&before);
    assert_eq!(since.by_epoch.iter().map(|row| (row.epoch, row.batches)).collect::<Vec<_>>(), [(2, 5)]);
    assert!(since.html().contains("<h2>The last 5 steps"), "{}", since.html());
    assert_eq!(Report::default().then(first.clone()), first);
}

/// Epochs may be repeated under one number, and the sender is ahead of the loop.
#[test]
fn a_loop_on_a_device_has_the_loads_and_copies_of_its_own_epochs() {
    let created = Instant::now();
    // Three times epoch 0. Loads and copies take twice as long in each as in the one before. The loop receives a batch
    // 5 ms after its sender, and is in the middle of the last epoch.
    let record = |delay: u64, steps: &[u64]| {
        let mut recorder = LoopRecorder::new(None, None, false).unwrap();
        for (pass, &steps) in (0_u64..).zip(steps) {
            let at = |ms: u64| created + Duration::from_millis(1000 * pass + delay + ms);
            for step in 0..steps {
                recorder.asked(at(20 * step));
                recorder.received(0, step, at(20 * step + (1 << pass)));
            }
            match steps {
                3 => recorder.asked(at(20 * steps)),
                _ => recorder.ended(at(20 * steps)),
            }
        }
        recorder.report()
    };
    let report = |delay, steps: [u64; 3]| elsewhere(|| record(delay, &steps));
    let found = report(5, [4, 4, 3]).on_device(report(0, [4, 4, 5]));
    let loads: Vec<_> = found.by_epoch.iter().map(|row| row.load).collect();
    assert_eq!(loads, [ms(4), ms(8), ms(20)]);
    let bars: Vec<_> = found.recent.iter().map(|seen| seen.load.1 - seen.load.0).collect();
    assert_eq!(bars, [[ms(1); 4], [ms(2); 4], [ms(4); 4]].concat());
    let page = found.html();
    let attribute = |rect: &str, name: &str| -> f64 {
        let text = rect.split(&format!(" {name}=\"")).nth(1).unwrap();
        text.split('"').next().unwrap().parse().unwrap()
    };
    for rect in page.split("<rect ").skip(1) {
        let (x, width) = (attribute(rect, "x"), attribute(rect, "width"));
        assert!(x >= 84.0 && x + width <= 760.5, "{rect}");
    }
}

/// A loop may say that it asked for the next item before it received the last, as one that waited elsewhere does.
#[test]
fn a_page_has_a_loop_on_a_device_whose_times_go_back() {
    let created = Instant::now();
    let record = |received: u64, asked: u64| {
        let mut recorder = LoopRecorder::new(None, None, false).unwrap();
        recorder.asked(created);
        recorder.received(0, 0, created + ms(received));
        recorder.asked(created + ms(asked));
        recorder.report()
    };
    let page = record(20, 10).on_device(record(5, 15)).html();
    assert!(page.contains("<title>wait, step 0: 20.00 ms</title>"), "{page}");
}

#[test]
fn time_that_both_sides_wait_is_the_devices() {
    let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
    let of = |read: StageTimes, train: StageTimes, transfer| {
        let report = Report { batches: 1, wall: ms(4000), read, train, ..Report::default() };
        report.with_transfers(1, ms(transfer), u64::from(transfer > 0)).waits_for_device()
    };
    // The caller only enqueues work. It waits for the device, and so does the reader.
    assert!(of(stage(1000, 3000), stage(10, 3990), 500));
    // Waits that have another cause.
    for (read, train, transfer) in [
        (stage(3900, 100), stage(10, 3990), 500),
        (stage(1000, 3000), stage(10, 3990), 3900),
        (stage(1000, 3000), stage(3900, 100), 500),
        (stage(2000, 0), stage(10, 3990), 1990), // without overlap
        (stage(1000, 3000), stage(10, 3990), 0), // without a device
    ] {
        assert!(!of(read, train, transfer));
    }
    // The loads waited for slots in pauses.
    let parts = Parts { pauses: ms(2000), ..Parts::default() };
    let (read, train) = (stage(1000, 3000), stage(10, 3990));
    let paused = Report { batches: 1, wall: ms(4000), read, train, parts, ..Report::default() };
    assert!(!paused.with_transfers(1, ms(500), 1).waits_for_device());
}

/// The examples of the guide are what reports print.
#[test]
fn the_guide_has_a_report_for_each_verdict() {
    let guide = include_str!("../../../docs/report.md");
    let kind = |kind, report: Report| Report { kind, ..report };
    let part = |transform, report: Report| {
        let read = StageTimes { busy: report.read.busy - ms(transform), ..report.read };
        Report { transform: ms(transform), read, ..report }
    };
    let starts = |report: &mut Report| {
        (report.epochs, report.parts.starts, report.parts.start_waits) = (3, 2, ms(330)); // no first step
        report.parts.start_loads = ms(330);
    };
    let first = |report: &mut Report| {
        report.first = StageTimes { busy: ms(1900), waiting: ms(100) };
        (report.train, report.wall) = (StageTimes { busy: ms(2020), waiting: ms(980) }, ms(3000));
    };
    let disk = |report: &mut Report| (report.reading.bytes, report.reading.disk) = (100, 60);
    let reports = [
        Report { batches: 7, ..report(10, 990, 990) },
        report(960, 40, 500),
        in_turn(300, 700),
        report(120, 880, 970).but(disk),
        report(120, 880, 970),
        full(report(300, 500, 600)),
        report(300, 500, 600),
        part(600, report(120, 880, 970)),
        kind(Kind::Rounds, report(120, 880, 970)),
        report(100, 900, 300).with_transfers(10, ms(950), 1 << 20),
        held(600, report(200, 800, 400)),
        report(800, 200, 680),
        report(950, 60, 950),
        report(120, 880, 970).but(first),
        report(500, 340, 430).but(starts),
        enqueued(300),
        enqueued(700),
    ];
    let text = |report: Report| {
        let report = Report { bytes: 10 << 20, epochs: report.epochs.max(1), ..report };
        format!("```text\n{report}\n```\n")
    };
    let lacks: Vec<_> = reports.into_iter().map(text).filter(|text| !guide.contains(text)).collect();
    assert!(lacks.is_empty(), "docs/report.md lacks:\n\n{}", lacks.join("\n"));
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
