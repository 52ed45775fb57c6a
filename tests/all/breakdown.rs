//! The breakdown: the steps that are logged, and no log when it is off.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, OnceLock, mpsc};
use std::time::{Duration, Instant};

use crate::common::{RECORD, Reads, busy, files, nothing, open, plan};
use twinbuf::{Breakdown, Loader};

/// A breakdown, and the lines of its log.
fn logged(every: u64) -> (Breakdown, Arc<Mutex<Vec<String>>>) {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sink = lines.clone();
    (Breakdown::every(every).sink(move |line| sink.lock().unwrap().push(line.to_string())), lines)
}

/// A breakdown whose sink gets the breakdown, too.
fn with_itself(mut sink: impl FnMut(&Breakdown) + Send + 'static) -> Breakdown {
    let own = Arc::new(OnceLock::<Breakdown>::new());
    let sees = own.clone();
    let breakdown = Breakdown::every(1).sink(move |_| sink(sees.get().unwrap()));
    own.get_or_init(|| breakdown).clone()
}

/// What a line starts with, and its phases with their milliseconds.
fn parse(line: &str) -> (&str, Vec<(&str, f64)>) {
    let (head, phases) = line.split_once(": ").unwrap_or_else(|| panic!("{line}"));
    let phases = phases.strip_suffix(" ms").unwrap_or_else(|| panic!("{line}"));
    let words: Vec<&str> = phases.split(' ').collect();
    (head, words.chunks(2).map(|pair| (pair[0], pair[1].parse().unwrap())).collect())
}

fn names<'a>(phases: &[(&'a str, f64)]) -> Vec<&'a str> {
    phases.iter().map(|(name, _)| *name).collect()
}

#[test]
fn the_first_ten_steps_and_every_kth_are_logged() {
    for (every, expected) in [
        (0, (0..10).collect::<Vec<u64>>()),
        (1, (0..100).collect()),
        (7, (0..10).chain((14..100).step_by(7)).collect()),
        (30, (0..10).chain([30, 60, 90]).collect()),
        (1000, (0..10).collect()),
    ] {
        let (breakdown, lines) = logged(every);
        for _ in 0..100 {
            breakdown.phase("forward", || ());
            breakdown.end_step();
        }
        let lines = lines.lock().unwrap();
        let steps: Vec<&str> = lines.iter().map(|line| parse(line).0).collect();
        let expected: Vec<String> = expected.iter().map(|step| format!("step {step}")).collect();
        assert_eq!(steps, expected, "every {every}");
        assert!(breakdown.to_string().starts_with("100 steps, "), "all of them are counted");
    }
}

#[test]
fn phases_stand_in_the_order_of_their_first_use_and_make_up_the_step() {
    let (breakdown, lines) = logged(1);
    for step in 0..6u64 {
        breakdown.add("load", Duration::from_millis(20)); // in the past: the step began then
        assert_eq!(breakdown.phase("forward", || step * 2), step * 2, "its result comes through");
        if step == 2 {
            breakdown.phase("late", || ());
        }
        if step % 2 == 1 {
            breakdown.phase("optimizer", || busy(Duration::from_millis(1)));
        }
        // A second time, in two parts and in another order: the times are added, and the phase keeps its place.
        breakdown.phase("forward", || busy(Duration::from_millis(1)));
        breakdown.phase("forward", || busy(Duration::from_millis(1)));
        breakdown.end_step();
    }
    let lines = lines.lock().unwrap();
    for (step, line) in lines.iter().enumerate() {
        let phases = whole(line);
        assert_eq!(parse(line).0, format!("step {step}"));
        let expected: &[&str] = match step {
            2 => &["load", "forward", "late", "other", "total"],
            odd if odd % 2 == 1 => &["load", "forward", "optimizer", "other", "total"],
            _ => &["load", "forward", "other", "total"],
        };
        assert_eq!(names(&phases), expected, "{line}");
        let of = |name| phases.iter().find(|phase| phase.0 == name).unwrap().1;
        assert!((of("load") - 20.0).abs() < 1e-9, "{line}");
        assert!(of("forward") >= 2.0, "{line}");
    }
    let table = breakdown.to_string();
    let rows: Vec<&str> = table.lines().skip(2).map(|line| line.split(' ').next().unwrap()).collect();
    assert_eq!(rows, ["load", "forward", "optimizer", "late", "other", "total"], "{table}");
}

#[test]
fn what_lies_between_two_steps_is_in_neither() {
    let (breakdown, lines) = logged(1);
    for _ in 0..3 {
        busy(Duration::from_millis(2)); // a checkpoint, say
        let began = Instant::now();
        breakdown.phase("forward", || ());
        breakdown.end_step();
        let at_most = began.elapsed().as_secs_f64() * 1e3;
        let lines = lines.lock().unwrap();
        let total = parse(lines.last().unwrap()).1.last().unwrap().1;
        assert!(total <= at_most + 0.001, "{total} ms of {at_most} ms");
    }
    breakdown.end_step();
    assert_eq!(lines.lock().unwrap()[3], "step 3: other 0.000 total 0.000 ms", "a step without phases");
    breakdown.phase("forward", || ());
    breakdown.add("h2d", Duration::from_millis(20)); // it began before
    breakdown.end_step();
    assert!(parse(&lines.lock().unwrap()[4]).1.last().unwrap().1 >= 20.0);
}

/// The milliseconds of each phase of a logged step. They add up to its total.
fn whole(line: &str) -> Vec<(&str, f64)> {
    let (_, phases) = parse(line);
    let (total, parts) = phases.split_last().unwrap();
    let sum: f64 = parts.iter().map(|(_, ms)| ms).sum();
    assert!((sum - total.1).abs() < 0.001 * phases.len() as f64, "the parts make up the total: {line}");
    phases
}

#[test]
fn off_it_only_runs_the_work() {
    for breakdown in [Breakdown::off(), Breakdown::default(), Breakdown::off().sink(|line| panic!("{line}"))]
    {
        assert!(!breakdown.is_on());
        for step in 0..20 {
            assert_eq!(breakdown.phase("forward", || step), step);
            breakdown.add("load", Duration::from_secs(1));
            breakdown.end_step();
        }
        assert_eq!(breakdown.to_string(), "breakdown: off");
    }
}

#[test]
fn a_phase_that_panics_is_not_counted() {
    let (breakdown, lines) = logged(1);
    let panicked =
        catch_unwind(AssertUnwindSafe(|| breakdown.phase("forward", || panic!("the caller's own"))));
    assert!(panicked.is_err());
    breakdown.phase("backward", || ());
    breakdown.end_step();
    assert_eq!(names(&parse(&lines.lock().unwrap()[0]).1), ["backward", "other", "total"]);
}

#[test]
fn times_without_end_are_counted_as_far_as_a_duration_goes() {
    let (breakdown, lines) = logged(1);
    for _ in 0..2 {
        breakdown.add("forward", Duration::MAX);
        breakdown.add("forward", Duration::MAX);
        breakdown.add("backward", Duration::MAX);
        breakdown.end_step();
    }
    assert_eq!(lines.lock().unwrap().len(), 2);
    assert!(breakdown.to_string().starts_with("2 steps, "), "{breakdown}");
}

#[test]
fn a_sink_may_use_the_breakdown_itself() {
    let lines = Arc::new(Mutex::new(0));
    let count = lines.clone();
    let breakdown = with_itself(move |own| {
        own.phase("logging", || own.to_string());
        own.end_step(); // its line is lost
        *count.lock().unwrap() += 1;
    });
    for _ in 0..3 {
        breakdown.end_step();
    }
    assert_eq!(*lines.lock().unwrap(), 3);
    assert!(breakdown.to_string().starts_with("6 steps, "));
}

#[test]
fn a_sink_that_panics_gets_the_next_line_all_the_same() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let sees = lines.clone();
    let breakdown = Breakdown::every(1).sink(move |line| {
        let step = line.split(':').next().unwrap().to_string();
        sees.lock().unwrap().push(step.clone());
        assert_ne!(step, "step 1", "the sink's own");
    });
    for step in 0..4 {
        let panicked = catch_unwind(AssertUnwindSafe(|| breakdown.end_step())).is_err();
        assert_eq!(panicked, step == 1);
    }
    assert_eq!(*lines.lock().unwrap(), ["step 0", "step 1", "step 2", "step 3"]);
}

#[test]
fn a_sink_given_while_another_is_called_is_the_one_that_stays() {
    let lines = Arc::new(Mutex::new(Vec::new()));
    let (old, new) = (lines.clone(), lines.clone());
    let breakdown = with_itself(move |own| {
        old.lock().unwrap().push("old");
        let new = new.clone();
        let _ = own.clone().sink(move |_| new.lock().unwrap().push("new"));
    });
    for _ in 0..3 {
        breakdown.end_step();
    }
    assert_eq!(*lines.lock().unwrap(), ["old", "new", "new"]);
}

/// Discards its output, and uses the breakdown during the write.
struct Writer(Breakdown);

impl std::fmt::Write for Writer {
    fn write_str(&mut self, _: &str) -> std::fmt::Result {
        self.0.phase("printing", || ());
        Ok(())
    }
}

#[test]
fn what_it_is_displayed_to_may_use_the_breakdown_itself() {
    use std::fmt::Write as _;

    let (breakdown, _) = logged(0);
    let (done, ends) = mpsc::channel();
    // On another thread: a lock that is taken twice then shows as a failure.
    std::thread::spawn(move || {
        write!(Writer(breakdown.clone()), "{breakdown} {breakdown:?}").unwrap();
        done.send(breakdown.to_string()).unwrap();
    });
    let table = ends.recv_timeout(Duration::from_secs(300)).unwrap();
    assert!(table.contains("\nprinting "), "{table}");
}

#[test]
fn a_loader_counts_its_load_and_does_not_overlap() {
    const LOAD: [&str; 4] = ["load", "forward", "other", "total"];
    for overlap in [false, true] {
        let (_dir, paths) = files(&[40]);
        let (breakdown, lines) = logged(1);
        let builder = Loader::builder(open(&paths), plan(40, 8)).overlap(overlap);
        let mut loader = builder.breakdown(breakdown).build().unwrap();
        assert!(format!("{loader:?}").contains("overlap: false"), "{loader:?}");
        let breakdown = loader.breakdown();
        for epoch in 0..2 {
            for batch in loader.epoch(epoch) {
                let batch = batch.unwrap();
                breakdown.phase("forward", || batch.iter().map(|&byte| u64::from(byte)).sum::<u64>());
                breakdown.end_step();
            }
        }
        for batch in loader.epoch(2) {
            drop(batch.unwrap());
            breakdown.end_step();
        }
        let mut lines = lines.lock().unwrap().clone();
        if overlap {
            let says = "breakdown: overlap is off while this is on, so that every phase is timed for itself";
            assert_eq!(lines.remove(0), says);
        }
        assert_eq!(lines.len(), 15);
        for line in &lines[..10] {
            assert_eq!(names(&parse(line).1), LOAD, "{line}");
        }
        assert_eq!(names(&parse(&lines[10]).1), ["load", "other", "total"], "{}", lines[10]);
        assert_eq!(loader.report().batches, 15);
    }
}

/// A program may train with one loader and validate with another, or make a loader for each epoch under one name.
#[test]
fn lines_have_the_name_of_each_loader_once() {
    let (breakdown, lines) = logged(1);
    for name in ["run: 1, train", "train", "run: 1, train"] {
        let dataset = Reads(30, RECORD, nothing);
        let builder = Loader::builder(dataset, plan(30, 8)).name(name).breakdown(breakdown.clone());
        drop(builder.build().unwrap());
    }
    breakdown.end_step();
    let lines = lines.lock().unwrap();
    let off = "breakdown: overlap is off while this is on";
    let starts = [format!("run: 1, train: {off}"), format!("run: 1, train, train: {off}")];
    for (line, start) in lines.iter().zip(&starts) {
        assert!(line.starts_with(start), "{line}");
    }
    assert!(lines.last().unwrap().starts_with("run: 1, train, train: step 0: "), "{lines:?}");
    assert!(breakdown.to_string().starts_with("run: 1, train, train: 1 steps"), "{breakdown}");
}
