//! Figures, verdicts and advice of reports.

use super::*;

fn report(read_ms: u64, train_ms: u64, wall_ms: u64) -> Report {
    let ms = Duration::from_millis;
    Report {
        batches: 1,
        wall: ms(wall_ms),
        read: StageTimes { busy: ms(read_ms), waiting: ms(0) },
        train: StageTimes { busy: ms(train_ms), waiting: ms(0) },
        ..Report::default()
    }
}

#[test]
fn the_verdict_names_the_stage_that_decides() {
    assert_eq!(Report::default().verdict(), Verdict::Unmeasured);
    for (read, train, verdict) in [
        (0, 0, Verdict::Unmeasured), // by a clock too coarse for it
        (100, 10_000, Verdict::ComputeBound),
        (100, 125, Verdict::ComputeBound),
        (100, 124, Verdict::Balanced),
        (100, 100, Verdict::Balanced),
        (124, 100, Verdict::Balanced),
        (125, 100, Verdict::DiskBound),
        (10_000, 100, Verdict::DiskBound),
    ] {
        assert_eq!(report(read, train, 0).verdict(), verdict, "read {read}, train {train}");
    }
}

#[test]
fn time_that_both_sides_wait_is_the_devices() {
    let ms = Duration::from_millis;
    let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
    let of = |read: StageTimes, train: StageTimes, transfer| {
        let report = Report { batches: 1, wall: ms(4000), read, train, ..Report::default() };
        report.with_transfers(1, ms(transfer), u64::from(transfer > 0))
    };
    // Only enqueued: the caller waits for the device, and so does the reader.
    let enqueued = of(stage(1000, 3000), stage(10, 3990), 500);
    assert_eq!((enqueued.device, enqueued.verdict()), (ms(3990), Verdict::ComputeBound));
    assert!((enqueued.remaining_speedup() - 1.0).abs() < 1e-9, "better overlap gains nothing: {enqueued}");
    // Waits that have another cause.
    for (read, train, transfer, verdict) in [
        (stage(3900, 100), stage(10, 3990), 500, Verdict::DiskBound),
        (stage(1000, 3000), stage(10, 3990), 3900, Verdict::TransferBound),
        (stage(1000, 3000), stage(3900, 100), 500, Verdict::ComputeBound),
        (stage(2000, 0), stage(10, 3990), 1990, Verdict::Balanced), // without overlap
        (stage(1000, 3000), stage(10, 3990), 0, Verdict::DiskBound), // without a device
    ] {
        let report = of(read, train, transfer);
        assert_eq!((report.device, report.verdict()), (ms(0), verdict), "{report}");
    }
}

#[test]
fn nothing_takes_less_than_its_longest_stage() {
    let ms = Duration::from_millis;
    let stage = |busy, waiting| StageTimes { busy: ms(busy), waiting: ms(waiting) };
    // Only enqueued: when the caller is done with a batch its copy is still on its way.
    let (read, train) = (stage(200, 3800), stage(10, 3990));
    let enqueued = Report { batches: 10, wall: ms(4000), read, train, overlap: true, ..Report::default() };
    let report = enqueued.with_transfers(10, ms(3900), 1);
    assert_eq!((report.verdict(), report.ideal()), (Verdict::TransferBound, ms(3900)), "{report}");
    assert!(report.to_string().contains("Better overlap can still gain 2.5 %."), "{report}");
    assert!(report.to_string().ends_with("send smaller numbers."), "{report}");
    // A transform is the reading thread's work.
    let transformed = Report { transform: ms(900), ..self::report(200, 1000, 2000) };
    assert_eq!(transformed.ideal(), ms(1100), "{transformed}");
}

#[test]
fn accelerator_utilization_leaves_the_first_step_aside() {
    let ms = Duration::from_millis;
    let first = StageTimes { busy: ms(10), waiting: ms(190) };
    // 1000 ms in all, 200 of them the first step; 10 + 600 ms of compute.
    let report = Report { batches: 61, first, ..report(500, 610, 1000) };
    assert!((report.au().unwrap() - 600.0 / 800.0).abs() < 1e-9, "{report}");
    assert!((report.batches_per_second() - 61.0).abs() < 1e-9);
    assert!(report.to_string().contains("61.0 a second, AU 0.750\n"), "{report}");
    assert_eq!(Report { batches: 1, ..report }.au(), None);
    assert_eq!(Report::default().au(), None);
}

#[test]
fn the_gains_are_ratios_to_perfect_overlap() {
    let balanced = report(1000, 1000, 2000);
    assert!((balanced.possible_speedup() - 2.0).abs() < 1e-9);
    assert!((balanced.remaining_speedup() - 2.0).abs() < 1e-9);
    assert!(balanced.to_string().contains("Better overlap can still gain 50.0 %."), "{balanced}");
    assert_eq!(balanced.advice(), "Set `overlap(true)`: it is off.");
    let overlapped = Report { overlap: true, ..balanced };
    assert!(overlapped.advice().starts_with("Raise `host_depth`"), "{overlapped}");
    let first = StageTimes { busy: Duration::ZERO, waiting: Duration::from_millis(600) };
    let cold = Report { first, ..overlapped };
    assert!(cold.advice().contains("the first batch"), "{cold}");

    // Compute 99 to 1: there is nothing to gain, with overlap or without.
    let dominated = report(10, 990, 991);
    assert!((dominated.possible_speedup() - 1000.0 / 990.0).abs() < 1e-9);
    assert!(dominated.to_string().contains("ComputeBound"), "{dominated}");
    assert!(dominated.to_string().contains("Better overlap can still gain 0.1 %."), "{dominated}");
    assert!(dominated.to_string().ends_with("no option of the loader makes this faster."), "{dominated}");

    // Slower than without: no overlap is to be made better then.
    let small = Report { overlap: true, ..report(3, 2, 22) };
    assert!(small.to_string().starts_with("0 epochs, 1 batch, "), "{small}");
    assert!(small.to_string().starts_with("0 epochs, 1 batch, 0 B in 22.00 ms, "), "{small}");
    assert!(small.advice().contains("waking threads"), "{small}");
    // Without a thread there is none to wake.
    assert!(!Report { overlap: false, ..small }.advice().contains("waking"));
    assert!(!report(1, 100, 220).advice().contains("waking"), "{}", report(1, 100, 220));

    // The first read took its time and failed.
    let nothing = Report { epochs: 1, wall: Duration::from_millis(22), ..Report::default() };
    assert!(nothing.to_string().contains("Better overlap can still gain 0.0 %."), "{nothing}");

    // Hints make a read look shorter than the disk was busy: never a gain below nothing.
    assert!((report(500, 1000, 900).remaining_speedup() - 1.0).abs() < 1e-9);
    assert!((Report::default().possible_speedup() - 1.0).abs() < 1e-9);
}
