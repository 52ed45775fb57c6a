//! Reads all records of some files once, and says how long it took and how much memory.
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
use std::time::Instant;

use clap::{Parser, ValueEnum};
use twinbuf_mmap::{Buffer, CachePolicy, HINT_CHUNK, HintStats, Plan, ReadMode, Records, Shuffle, Tail};

/// Reads all records of some files once, and says how long it took and how much memory.
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
    /// How to read
    #[arg(long, value_enum, default_value_t = Mode::Pread)]
    mode: Mode,
    /// What becomes of a batch's pages after use
    #[arg(long, value_enum, default_value_t = After::Keep)]
    evict: After,
    /// Ask for each batch's pages while the one before it is read
    #[arg(long)]
    hints: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    Pread,
    Direct,
}

#[derive(Clone, Copy, ValueEnum)]
enum After {
    Keep,
    Drop,
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
        Mode::Pread => ReadMode::Pread,
        Mode::Direct => ReadMode::Direct,
    };
    let evict = match args.evict {
        After::Keep => CachePolicy::Keep,
        After::Drop => CachePolicy::Drop,
    };
    let record = usize::try_from(args.record.get())?;
    let records = Records::options().partial(true).read_mode(mode).open(&args.files, record)?;
    let batch = args.batch.get().min(records.len());
    let order = args.shuffle.map_or(Shuffle::None, |chunk| Shuffle::Chunks { records: chunk.get() });
    let plan = Plan::builder(records.len()).batch(batch).shuffle(order).tail(Tail::Keep).build()?;

    let slot = usize::try_from(batch)?.checked_mul(record).ok_or("a batch is too large")?;
    let mut slot = Buffer::new(slot).ok_or("no memory for a batch")?;
    let mut bytes = 0;
    let mut hinted = HintStats::default();
    let begun = Instant::now();
    for step in 0..plan.steps() {
        if let Some(next) = plan.batch(0, step + 1).filter(|_| args.hints) {
            hinted += records.will_need(&next, HINT_CHUNK);
        }
        let batch = plan.batch(0, step).expect("a step below `steps`");
        bytes += records.read(&batch, &mut slot)? as u64;
        records.evict_batch(&batch, evict)?;
    }
    let seconds = begun.elapsed().as_secs_f64();

    println!("bytes {bytes}");
    println!("seconds {seconds:.2}");
    println!("hinted {} failed {}", hinted.bytes, hinted.failed);
    // The most memory that this process had at any time, mapped pages of files and all: `proc_pid_status(5)`.
    // Linux only.
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    if let Some(peak) = status.lines().find_map(|line| line.strip_prefix("VmHWM:")) {
        println!("VmHWM {}", peak.trim());
    }
    Ok(())
}
