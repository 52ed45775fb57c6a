//! Training on a device, and a validation, a stream and a generator on the host, in one trace: its rows have names, and
//! their sums are the reports' figures within 1 %.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crate::common::model::Model;
use crate::common::{busy, files, open, plan, trace};
use serde_json::Value;
use twinbuf::observe::Trace;
use twinbuf::{Loader, cuda, generate};
use twinbuf_cuda_sim::{Options, Sim};

/// For each row and each event on it, the sum in seconds.
fn sums(events: &[Value]) -> BTreeMap<(String, String), f64> {
    let rows = trace::rows(events);
    let mut sums = BTreeMap::new();
    for event in events.iter().filter(|event| event["ph"] == "X") {
        let row = rows[&(event["pid"].as_u64().unwrap(), event["tid"].as_u64().unwrap())].clone();
        // A row of each worker has its number, and each epoch too.
        let plain = |name: &str| name.trim_end_matches(|c: char| c == ' ' || c.is_ascii_digit()).to_string();
        let (row, name) = (plain(&row).replace(" rank 0 of 1", ""), plain(event["name"].as_str().unwrap()));
        *sums.entry((row, name)).or_default() += event["dur"].as_f64().unwrap() / 1e6;
    }
    sums
}

#[test]
fn one_file_with_named_rows_whose_sums_are_the_reports() {
    let (dir, paths) = files(&[96]);
    let path = dir.path().join("trace.json");
    let sim = Sim::start(Options { delay_us: 300, ..Options::seeded(5) });
    let ctx = cuda::context(0).unwrap();
    let traced = || Trace::new(&path).epochs(9);
    let model = Model::new(&[4000, 3, 0, 25_000, 700, 9]);
    for (overlap, workers) in [(true, 1), (true, 2), (false, 1)] {
        let builder = |name, batch| {
            Loader::builder(open(&paths), plan(96, batch)).name(name).trace(traced()).overlap(overlap)
        };
        let mut train = builder("train", 8).workers(workers).cuda(ctx.clone()).build().unwrap();
        let mut valid = builder("valid", 16).build().unwrap();
        let stream = ctx.new_stream().unwrap();
        // The device is stopped in the first copy, so the caller has to wait at least for that one. Without overlap the
        // loader itself waits for each copy.
        let mut held = overlap.then(|| sim.hold(0));
        let began = Instant::now();
        // A lower bound of the time in the validations: the use of their batches, without the waits for them.
        let mut validated = Duration::ZERO;
        let mut epochs = train.epochs(0..2);
        while let Some(batch) = epochs.next() {
            let batch = batch.unwrap();
            if let Some(held) = held.take() {
                sim.wait_held();
                // The device's times may be early by the time from the start to here (`CopyTime::start`).
                busy(began.elapsed());
                drop(held);
                while epochs.report().transfer_bytes < 2 * batch.len() as u64 {
                    std::thread::yield_now(); // until the next copy ends too: releasing the batch finds its own
                }
            }
            drop(batch.on::<u8>(&stream).unwrap());
            // The host waits for the copy, like a training loop that reads its loss.
            stream.synchronize().unwrap();
            busy(Duration::from_millis(1));
            if batch.step() % 4 == 3 {
                for batch in valid.epoch(batch.step()) {
                    let started = Instant::now();
                    std::hint::black_box(batch.unwrap()[0]);
                    busy(Duration::from_micros(300));
                    validated += started.elapsed();
                }
            }
        }
        drop(epochs);
        let all = began.elapsed();
        // The copy thread checks the last copy when it gets to it: the trace will include that copy, and the report
        // must too.
        while train.report().transfer_bytes < train.report().bytes {
            std::thread::yield_now();
        }
        let layers = twinbuf::stream(model.groups()).name("layers").trace(traced()).overlap(overlap).cycle();
        let mut layers = layers.build().unwrap();
        // The second pass is left early: what was read ahead, of the next pass too, is discarded.
        for groups in [6, 5, 6] {
            for group in layers.pass().take(groups) {
                std::hint::black_box(group.unwrap());
                busy(Duration::from_micros(300));
            }
        }
        let make = |round: u64, slot: &mut u64| {
            busy(Duration::from_micros(300));
            *slot = round;
            Ok::<(), std::convert::Infallible>(())
        };
        let games = generate::with_slots([0; 2], make).name("games").trace(traced()).overlap(overlap);
        let mut games = games.build().unwrap();
        for round in games.rounds(8) {
            std::hint::black_box(*round.unwrap());
            busy(Duration::from_micros(300));
        }
        let games_report = games.report();
        games.close().unwrap();
        let (train_report, valid_report, layers_report) = (train.report(), valid.report(), layers.report());
        assert_eq!(layers_report.batches, 17);
        layers.close().unwrap();
        train.close().unwrap();
        valid.close().unwrap();
        drop(stream);

        let events = trace::events(&path);
        assert_eq!(trace::errors(&events), [""; 0], "overlap {overlap}, {workers} workers");
        let sums = sums(&events);
        let of = |row: &str, names: &[&str]| -> f64 {
            names.iter().filter_map(|name| sums.get(&(row.to_string(), (*name).to_string()))).sum()
        };
        let mut checked = 0;
        let mut same = |row: &str, names: &[&str], wanted: Duration| {
            let (found, wanted) = (of(row, names), wanted.as_secs_f64());
            assert!(wanted > 0.0, "{row} {names:?} of {train_report} {valid_report}");
            assert!((found / wanted - 1.0).abs() < 0.01, "{row} {names:?}: {found} s, the report {wanted} s");
            checked += 1;
        };
        same("train: train", &["train"], train_report.train.busy);
        same("train: train", &["gpu_queue_wait", "gpu_copy_wait"], train_report.train.waiting);
        // The wait for a copy has its own row and is not part of the use.
        let waits = |event: &Value| event["name"] == "gpu_copy_wait" && event["args"]["step"] == 0;
        assert!(!overlap || events.iter().any(waits), "{train_report}");
        same("train: read", &["disk_load"], train_report.read.busy);
        same("train: upload", &["gpu_transfer"], train_report.transfer);
        same("valid: train", &["train"], valid_report.train.busy);
        same("valid: train", &["queue_wait"], valid_report.train.waiting);
        same("valid: read", &["disk_load"], valid_report.read.busy);
        same("layers: train", &["train"], layers_report.train.busy);
        same("layers: train", &["queue_wait"], layers_report.train.waiting);
        same("games: train", &["train", "before"], games_report.train.busy);
        same("games: train", &["queue_wait"], games_report.train.waiting);
        same("games: generate", &["generate"], games_report.read.busy);
        // The trace has what was discarded too.
        let (read, counted) = (of("layers: read", &["disk_load"]), layers_report.read.busy.as_secs_f64());
        assert!(read > 0.99 * counted, "{read} s of {layers_report}");
        // The validations are within the training's epochs, but are neither its compute nor its wait.
        let paused = of("train: train", &["pause"]);
        let validation = valid_report.wall.as_secs_f64();
        assert!(paused > 0.99 * validation, "{paused} s of {validation} s: {valid_report}");
        let steps = of("train: train", &["chunk"]) - paused;
        let counted = (train_report.train.busy + train_report.train.waiting).as_secs_f64();
        assert!((steps / counted - 1.0).abs() < 0.01, "{steps} s without pauses of {train_report}");
        assert!(counted <= train_report.wall.as_secs_f64() + 1e-6, "{train_report}");
        assert!(counted <= (all - validated).as_secs_f64(), "{train_report}, {all:?} with {validated:?}");
        assert_eq!(checked, 12);
        let rows: BTreeSet<&String> = sums.keys().map(|(row, _)| row).collect();
        assert_eq!(rows.len(), 9, "{rows:?}");
        // Bytes are those of the report too.
        let bytes = |pid: u64, name: &str| -> u64 {
            let here = |event: &&Value| event["pid"] == pid && event["name"] == name;
            events.iter().filter(here).map(|event| event["args"]["bytes"].as_u64().unwrap()).sum()
        };
        assert_eq!(bytes(0, "disk_load"), train_report.read_bytes);
        assert_eq!(bytes(0, "gpu_transfer"), train_report.transfer_bytes);
        for name in ["disk_load", "gpu_transfer", "gpu_queue_wait", "train"] {
            let here = events.iter().filter(|event| event["pid"] == 0 && event["name"] == name);
            // A pause parts the use of a batch.
            let number = |event: &Value, of: &str| event["args"][of].as_u64().unwrap();
            let steps: BTreeSet<_> =
                here.map(|event| (number(event, "epoch"), number(event, "step"))).collect();
            assert!(steps.into_iter().eq((0..24).map(|at| (at / 12, at % 12))), "{name}");
        }
        assert_eq!(bytes(1 << 16, "disk_load"), valid_report.read_bytes);
        let text = format!("{train_report:#}");
        assert_eq!(text.matches(" GB/s\n").count(), 2, "{text}");
    }
    assert_eq!(sim.violations(), [""; 0]);
}
