//! Reads all records of some files, and says how long it took, what came from disk and how much memory it took.
//!
//! ```sh
//! cargo run --release -p twinbuf-mmap --example read_all -- --record 1048576 --batch 4 FILE...
//! ```
//!
//! `tools/memory.sh` runs it over a file far larger than the memory it is given.

use std::error::Error;
use std::num::NonZeroU64;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use clap::{Parser, ValueEnum};
use twinbuf_mmap::{Buffer, LastBatch, Plan, ReadMode, Reader, Records, Shuffle};

/// Reads all records of some files, and says how long it took, what came from disk and how much memory it took.
#[derive(Parser)]
#[command(name = "read_all")]
struct Args {
    /// The files, which together are the data set
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Bytes of a record; what is over at the end of a file is left out
    #[arg(long, value_name = "BYTES", default_value = "1048576")]
    record: NonZeroU64,
    /// Records in a batch
    #[arg(long, value_name = "RECORDS", default_value = "4")]
    batch: NonZeroU64,
    /// Shuffle chunks of this many records [default: in order]
    #[arg(long, value_name = "RECORDS")]
    shuffle: Option<NonZeroU64>,
    /// Mix the records of this many chunks
    #[arg(long, value_name = "CHUNKS", requires = "shuffle")]
    window: Option<NonZeroU64>,
    /// How to read
    #[arg(long, value_enum, default_value_t = Mode::Auto)]
    mode: Mode,
    /// Do not ask for batches before they are read
    #[arg(long)]
    no_hints: bool,
    /// Read what one rank of so many reads
    #[arg(long, num_args = 2, value_names = ["RANK", "RANKS"])]
    rank: Option<Vec<u64>>,
    /// How often to read all of it
    #[arg(long, default_value_t = 1)]
    epochs: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Auto,
    Pread,
    Direct,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("read_all: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mode = match args.mode {
        Mode::Auto => ReadMode::Auto,
        Mode::Pread => ReadMode::Pread,
        Mode::Direct => ReadMode::Direct,
    };
    let record = usize::try_from(args.record.get())?;
    let records = Arc::new(Records::options().partial(true).open(&args.files, record)?);
    let batch = args.batch.get().min(records.len());
    let order = match (args.shuffle, args.window) {
        (None, _) => Shuffle::None,
        (Some(chunk), None) => Shuffle::Chunks { records: chunk.get() },
        (Some(chunk), Some(chunks)) => {
            Shuffle::Window { chunk_records: chunk.get(), window_chunks: chunks.get() }
        }
    };
    let mut plan = Plan::builder(records.len()).batch(batch).shuffle(order).last_batch(LastBatch::Keep);
    if let Some(&[rank, world]) = args.rank.as_deref() {
        plan = plan.rank(rank, world);
    }
    let plan = plan.build()?;

    let slot = usize::try_from(batch)?.checked_mul(record).ok_or("a batch is too large")?;
    let mut slot = Buffer::new(slot).ok_or("no memory for a batch")?;
    let reader = Reader::new(records.ranges(), &plan, mode)?;
    println!("{}", reader.choice());
    for epoch in 0..args.epochs {
        let (begun, before) = (Instant::now(), reader.stats());
        let batches = || {
            let plan = plan.clone();
            (0..).map_while(move |step| plan.batch(epoch, step))
        };
        if !args.no_hints {
            reader.begin(batches());
        }
        for batch in batches() {
            reader.read(&batch, &mut slot)?;
        }
        let (seconds, after) = (begun.elapsed().as_secs_f64(), reader.stats());
        let [bytes, disk, hinted] =
            [after.bytes - before.bytes, after.disk - before.disk, after.hinted - before.hinted];
        println!("bytes {bytes} seconds {seconds:.2} disk {disk} hinted {hinted} failed {}", after.failed);
    }
    // The most memory that this process had at any time, mapped pages of files and all: `proc_pid_status(5)`.
    // Linux only.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
        println!("VmHWM {}", peak.trim());
    }
    Ok(())
}
