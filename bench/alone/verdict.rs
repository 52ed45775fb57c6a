//! Whether the report is right: its verdict on a run, and the predicted gain against the measured gain.
//!
//! The device of the transfer-bound case is the software driver of the tests: its copies take time, and nothing else
//! about it is a GPU's.
//!
//! Each case is run without overlap, then with it. The report of the first run predicts the speedup of overlap. Disk
//! and compute are sleeps and spinning work of known lengths, so the right verdict is known.

use std::time::{Duration, Instant};

use twinbuf::observe::Verdict;
use twinbuf::transform::per_record;
use twinbuf::{BatchIndices, BoxError, Dataset, Loader, Plan, Report};

const STEPS: u64 = 200;
const ROUNDS: usize = 5;
const RECORD: usize = 4096;

/// A disk that takes this long for each batch, and no CPU.
struct Disk(Duration);

impl Dataset for Disk {
    fn records(&self) -> u64 {
        STEPS
    }

    fn record_bytes(&self) -> usize {
        RECORD
    }

    fn read(&mut self, _: &BatchIndices, out: &mut [u8]) -> Result<usize, BoxError> {
        std::thread::sleep(self.0);
        Ok(out.len())
    }
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

struct Case {
    name: &'static str,
    disk_us: u64,
    transform_us: u64,
    transfer_us: u64,
    compute_us: u64,
    /// Whether the device computes and the host does not wait for it: work is only enqueued.
    enqueued: bool,
    wanted: Verdict,
}

impl Case {
    fn run(&self, overlap: bool) -> Result<Report, BoxError> {
        let us = Duration::from_micros;
        let plan = Plan::builder(STEPS).batch(1).build()?;
        let mut builder = Loader::builder(Disk(us(self.disk_us)), plan).overlap(overlap);
        if self.transform_us > 0 {
            let time = us(self.transform_us);
            builder = builder.transform(per_record(RECORD, move |_, _, _| {
                spin(time);
                Ok(())
            }));
        }
        if self.transfer_us > 0 {
            return self.upload(builder);
        }
        let mut loader = builder.build()?;
        for batch in loader.epoch(0) {
            let _batch = batch?;
            spin(us(self.compute_us));
        }
        Ok(loader.report())
    }

    #[cfg(target_os = "linux")]
    fn upload(&self, builder: twinbuf::loader::LoaderBuilder) -> Result<Report, BoxError> {
        use twinbuf_cuda_sim::{Options, Sim};
        // Between two pieces of a copy there is a random delay: on average half of the longest.
        let delay_us = 125;
        let pieces = (u32::try_from(self.transfer_us)? * 2 / delay_us).max(1);
        let sim = Sim::start(Options { delay_us, pieces, ..Options::seeded(1) });
        let ctx = twinbuf::cuda::context(0)?;
        let stream = ctx.new_stream()?;
        let mut loader = builder.cuda(ctx).build()?;
        for batch in loader.epoch(0) {
            let batch = batch?;
            if self.enqueued {
                let compute = u32::try_from(self.compute_us)?;
                // SAFETY: the stream outlives the batch, and the kernel is enqueued before that is dropped.
                let address = unsafe { batch.on_raw(stream.cu_stream()) }?;
                let launched = sim.control().kernel_read(stream.cu_stream(), address, batch.len(), compute);
                launched.map_err(|code| format!("the kernel was not launched: {code}"))?;
                continue;
            }
            batch.on::<u8>(&stream)?;
            stream.synchronize()?; // the copy is there
            spin(Duration::from_micros(self.compute_us));
        }
        stream.synchronize()?;
        let report = loader.report();
        loader.close()?;
        Ok(report)
    }

    #[cfg(not(target_os = "linux"))]
    fn upload(&self, _: twinbuf::loader::LoaderBuilder) -> Result<Report, BoxError> {
        Err("the software driver is for Linux".into())
    }
}

fn main() -> Result<(), BoxError> {
    let case = |name, [disk_us, transform_us, transfer_us, compute_us]: [u64; 4], wanted| Case {
        name,
        disk_us,
        transform_us,
        transfer_us,
        compute_us,
        enqueued: false,
        wanted,
    };
    let enqueued = Case { enqueued: true, ..case("enqueued", [1000, 0, 500, 4000], Verdict::ComputeBound) };
    let cases = [
        case("compute", [300, 0, 0, 4000], Verdict::ComputeBound),
        case("disk", [4000, 0, 0, 1500], Verdict::DiskBound),
        case("transform", [500, 3500, 0, 2000], Verdict::TransformBound),
        case("transfer", [1500, 0, 4000, 1000], Verdict::TransferBound),
        case("balanced", [3000, 0, 0, 3000], Verdict::Balanced),
        enqueued,
    ];
    println!("{STEPS} batches, {ROUNDS} rounds, medians");
    println!("{:<16} {:<14} {:>9} {:>9} {:>10}", "case", "verdict", "foretold", "measured", "difference");
    let mut right = true;
    for case in &cases {
        if case.enqueued {
            // Without overlap nothing waits for the device either, so there is no gain to predict.
            let report = case.run(true)?;
            right &= report.verdict() == case.wanted;
            println!("{:<16} {:<14} {}", case.name, report.verdict().to_string(), report.advice());
            continue;
        }
        let (mut foretold, mut measured) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let serial = case.run(false)?;
            let overlapped = case.run(true)?;
            let found = serial.predict(overlapped.settings()).ok_or("nothing was measured")?;
            foretold.push(1.0 / (1.0 - found.gain()));
            measured.push(serial.wall.as_secs_f64() / overlapped.wall.as_secs_f64());
            right &= serial.verdict() == case.wanted && overlapped.verdict() == case.wanted;
        }
        let median = |mut values: Vec<f64>| {
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let (foretold, measured) = (median(foretold), median(measured));
        println!(
            "{:<16} {:<14} {foretold:>8.3}x {measured:>8.3}x {:>9.1}%",
            case.name,
            case.wanted.to_string(),
            (measured / foretold - 1.0) * 100.0
        );
    }
    println!("{}", if right { "every verdict right, in every run" } else { "a verdict was wrong" });
    Ok(())
}
