//! Whether the advice of `twinbuf probe` holds: on files of 64 MiB to 2 GiB, from a cold and a warm page cache, in three
//! orders, it is asked three times, and what it recommends is measured in turn with the defaults.
//!
//! ```sh
//! cargo bench --manifest-path cli/Cargo.toml --bench advice [-- RUNS [FOLDER]]    # default: 50, the temporary folder
//! ```

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use twinbuf::{BoxError, Loader, Plan, Records, Shuffle};

const RECORD: usize = 16 << 10;
const BATCH: u64 = 64;
const STEPS: u64 = 64;
const ROUNDS: usize = 5;
const SIZES_MIB: [u64; 6] = [64, 128, 256, 512, 1024, 2048];
/// Milliseconds of compute a batch.
const COMPUTE: [f64; 3] = [0.3, 1.0, 4.0];

fn orders() -> [(&'static str, Shuffle); 3] {
    [
        ("sequential", Shuffle::None),
        ("window:256,8", Shuffle::Window { chunk_records: 256, window_chunks: 8 }),
        ("full", Shuffle::Full),
    ]
}

/// One set of files and a way to read them.
struct Case<'a> {
    path: &'a Path,
    order: (&'static str, Shuffle),
    cold: bool,
    compute_ms: f64,
}

impl Case<'_> {
    /// The calls that `probe` recommends; empty for the defaults.
    fn advice(&self) -> Result<String, BoxError> {
        let mut probe = Command::new(env!("CARGO_BIN_EXE_twinbuf"));
        probe.args(["probe", "--json", "--order", self.order.0]);
        probe.args(["--record-bytes", &RECORD.to_string(), "--batch", &BATCH.to_string()]);
        probe.args(["--steps", &STEPS.to_string(), "--compute-ms", &self.compute_ms.to_string()]);
        probe.args(self.cold.then_some("--cold")).arg(self.path);
        let found = probe.output()?;
        if !found.status.success() {
            return Err(String::from_utf8_lossy(&found.stderr).into());
        }
        let found: serde_json::Value = serde_json::from_slice(&found.stdout)?;
        let tried = &found["tried"];
        let calls = tried["calls"].as_str().filter(|_| tried["recommended"] == true);
        Ok(calls.unwrap_or_default().to_string())
    }

    /// Seconds of two epochs of a new loader with these calls.
    fn train(&self, calls: &str) -> Result<f64, BoxError> {
        let data = Records::open([self.path], RECORD)?;
        if self.cold {
            data.evict()?;
        }
        let plan = Plan::builder(data.len()).batch(BATCH).shuffle(self.order.1).build()?;
        let mut builder = Loader::builder(data, plan);
        for call in calls.split_terminator(')').filter(|call| !call.is_empty()) {
            let (option, value) = call.trim_start_matches('.').split_once('(').ok_or("wanted a call")?;
            builder = match option {
                "overlap" => builder.overlap(value.parse()?),
                "workers" => builder.workers(value.parse()?),
                "depth" => builder.depth(value.parse()?),
                _ => return Err(format!("unknown advice: {calls}").into()),
            };
        }
        let mut loader = builder.build()?;
        let started = Instant::now();
        for _ in 0..2 {
            for batch in loader.epoch(0).take(usize::try_from(STEPS)?) {
                let _batch = batch?;
                let end = Instant::now() + Duration::from_secs_f64(self.compute_ms / 1e3);
                while Instant::now() < end {
                    std::hint::spin_loop();
                }
            }
        }
        Ok(started.elapsed().as_secs_f64())
    }

    /// The time with these calls over that with the defaults: the median of some rounds.
    fn ratio(&self, calls: &str) -> Result<f64, BoxError> {
        let mut ratios = Vec::new();
        for round in 0..ROUNDS {
            let first = if round % 2 == 0 { self.train(calls)? } else { 0.0 };
            let defaults = self.train("")?;
            let own = if round % 2 == 0 { first } else { self.train(calls)? };
            ratios.push(own / defaults);
        }
        ratios.sort_by(f64::total_cmp);
        Ok(ratios[ROUNDS / 2])
    }
}

fn main() -> Result<(), BoxError> {
    let mut words = std::env::args().skip(1).filter(|word| !word.starts_with("--"));
    let runs: usize = words.next().map_or(Ok(50), |word| word.parse())?;
    let folder = words.next().unwrap_or_else(|| std::env::temp_dir().display().to_string());
    let folder = tempfile::tempdir_in(folder)?;
    let path = folder.path().join("data.bin");
    let (mut slower, mut disagree, mut advised, mut worst) = (0, 0, 0, 0.0_f64);
    println!(
        "{:>8} {:>13} {:>5} {:>8}  advice of three probes: time over the defaults'",
        "MiB", "order", "", "compute"
    );
    let mut written = 0;
    for run in 0..runs {
        // Files grow; each size has its share of the runs.
        let size = SIZES_MIB[run * SIZES_MIB.len() / runs];
        if size != written {
            let mut file = File::create(&path)?;
            for block in 0..size {
                file.write_all(&[block as u8; 1 << 20])?;
            }
            file.sync_all()?;
            written = size;
        }
        let case = Case {
            path: &path,
            order: orders()[run % 3],
            cold: run / 3 % 2 == 0,
            compute_ms: COMPUTE[(run / 6 + run) % 3],
        };
        if !case.cold {
            std::io::copy(&mut File::open(&path)?, &mut std::io::sink())?;
        }
        let advice = (0..3).map(|_| case.advice()).collect::<Result<Vec<_>, _>>()?;
        let advice: BTreeSet<_> = advice.into_iter().filter(|calls| !calls.is_empty()).collect();
        disagree += u32::from(advice.len() > 1);
        let mut shown = Vec::new();
        for calls in &advice {
            let ratio = case.ratio(calls)?;
            advised += 1;
            slower += u32::from(ratio > 1.05);
            worst = worst.max(ratio);
            shown.push(format!("{calls}: {ratio:.3}"));
        }
        let cache = if case.cold { "cold" } else { "warm" };
        let shown = if shown.is_empty() { "the defaults".to_string() } else { shown.join(", ") };
        println!("{size:>8} {:>13} {cache:>5} {:>5.1} ms  {shown}", case.order.0, case.compute_ms);
    }
    println!(
        "{runs} runs, {advised} recommendations: {slower} more than 5 % slower than the defaults, worst {worst:.3}; \
         {disagree} runs whose probes disagree"
    );
    Ok(())
}
