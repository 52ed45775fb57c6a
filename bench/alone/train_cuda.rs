//! The main job with the upload stage: read, copy to the device, compute there; in turn and overlapped.
//!
//! ```sh
//! cargo run --release --example train_cuda
//! ```
//!
//! In place of a model, the driver does work that needs no toolkit: it copies the batch from device memory to
//! device memory for about `--compute-ms`. Each step ends by reading eight bytes back, as a training loop reads
//! its loss; their order is hashed, and must be the same in every run.
//!
//! Without a driver or a device it says so in one line and exits with 2.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Parser;
use twinbuf::cuda::cudarc::driver::{CudaSlice, CudaStream, DevicePtr};
use twinbuf::observe::Trace;
use twinbuf::{BoxError, LastBatch, Loader, Plan, Records, Report, Shuffle, cuda};

#[path = "../../examples/data/mod.rs"]
mod data;

/// Bytes of a record.
const RECORD: usize = 1024;

/// Reads files, uploads them and computes on the device: in turn, and overlapped.
#[derive(Parser)]
#[command(name = "train_cuda")]
struct Args {
    /// Any file to read [default: 512 MiB made once under target/twinbuf/data]
    #[arg(long, value_name = "PATH")]
    data: Option<PathBuf>,
    /// The device, by its number
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Records of 1 KiB in a batch
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u64).range(1..))]
    batch: u64,
    /// Rounds; each runs both ways once
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// How long the device is to compute on each batch
    #[arg(long, value_name = "X", default_value_t = 4.0)]
    compute_ms: f64,
    /// Write a Chrome trace of the last run to this file
    #[arg(long, value_name = "PATH")]
    trace: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("train_cuda: {error}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<(), BoxError> {
    if !(0.0..=60_000.0).contains(&args.compute_ms) {
        return Err(format!("--compute-ms: wanted 0 to 60000 milliseconds, found {}", args.compute_ms).into());
    }
    let ctx = cuda::context(args.device)?;
    let paths = match &args.data {
        Some(path) => vec![path.clone()],
        None => data::made()?,
    };
    let records = Arc::new(Records::options().partial(true).open(&paths, RECORD)?);
    let plan = Plan::builder(records.len())
        .batch(args.batch)
        .shuffle(Shuffle::Chunks { records: args.batch })
        .last_batch(LastBatch::Keep)
        .build()?;
    let stream = ctx.new_stream()?;
    // No batch has more records than there are.
    let most = usize::try_from(args.batch.min(records.len()))?;
    let mut model = Model::new(&stream, most * RECORD, args.compute_ms)?;
    println!(
        "{}: {} batches of {} KiB an epoch, {} copies from device to device a step",
        ctx.name()?,
        plan.steps(0),
        args.batch,
        model.copies,
    );

    let mut order = None;
    for round in 0..args.rounds {
        for overlap in [false, true] {
            records.evict()?;
            let mut builder = Loader::builder(records.clone(), plan.clone()).overlap(overlap);
            if let (Some(path), true, true) = (&args.trace, overlap, round + 1 == args.rounds) {
                builder = builder.trace(Trace::new(path));
            }
            let mut loader = builder.cuda(ctx.clone()).build()?;
            let mut hash = 0xcbf2_9ce4_8422_2325_u64;
            for batch in loader.epoch(0) {
                let batch = batch?;
                for byte in model.train(&batch.on(&stream)?)? {
                    hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
                }
            }
            print(if overlap { "overlapped" } else { "in turn" }, hash, &loader.report());
            loader.close()?;
            if *order.get_or_insert(hash) != hash {
                return Err("the batches were not the same in every run".into());
            }
        }
    }
    println!("same batches in every run");
    Ok(())
}

fn print(mode: &str, hash: u64, report: &Report) {
    let s = |time: Duration| time.as_secs_f64();
    println!(
        "{mode:<10} {:>7.3} s: read {:.3}, transfer {:.3}, compute {:.3}, waited {:.3}; order {hash:016x}; {}",
        s(report.wall),
        s(report.read.busy),
        s(report.transfer),
        s(report.train.busy),
        s(report.train.waiting),
        report.verdict(),
    );
}

/// Copies from device memory to device memory.
struct Model {
    stream: Arc<CudaStream>,
    scratch: CudaSlice<u8>,
    copies: u32,
}

impl Model {
    /// One that takes about `ms` for a batch of this many bytes.
    fn new(stream: &Arc<CudaStream>, bytes: usize, ms: f64) -> Result<Self, BoxError> {
        let source = stream.alloc_zeros::<u8>(bytes)?;
        let scratch = stream.alloc_zeros::<u8>(bytes)?;
        let mut model = Self { stream: stream.clone(), scratch, copies: 1 };
        let mut took = |copies: u32| -> Result<f64, BoxError> {
            model.copies = copies;
            model.train(&source)?; // not counted: first touches
            let start = Instant::now();
            model.train(&source)?;
            Ok(start.elapsed().as_secs_f64() * 1e3)
        };
        // By the difference of two counts: the first launch and the reading back are not in it. The counts are
        // high: the copies take most of the time.
        let mut count = 16;
        let each = loop {
            let (some, twice) = (took(count)?, took(2 * count)?);
            if twice >= 1.5 * some || count >= 1 << 14 {
                break (twice - some).max(twice / 10.0) / f64::from(count);
            }
            count *= 2;
        };
        // Saturates, and is at least one: the bytes that are read back come from there.
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
        let copies = (ms / each) as u32;
        model.copies = copies.max(1);
        Ok(model)
    }

    /// Computes on a batch, waits for it, and gives the first bytes of the result.
    fn train(&mut self, batch: &impl DevicePtr<u8>) -> Result<[u8; 8], BoxError> {
        let mut scratch = self.scratch.slice_mut(..batch.len());
        for _ in 0..self.copies {
            self.stream.memcpy_dtod(batch, &mut scratch)?;
        }
        let mut first = [0; 8];
        self.stream.memcpy_dtoh(&scratch.slice(..first.len()), &mut first)?;
        self.stream.synchronize()?;
        Ok(first)
    }
}
