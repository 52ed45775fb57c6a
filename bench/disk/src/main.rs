//! The loader against the disk: cold reads, ranks, scaling. See the README one folder up.

mod cell;
mod child;
mod cold;
mod fio;
mod load;
mod ranks;
mod scaling;

use std::fs;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use twinbuf::BoxError;
use twinbuf_bench_harness::{data, measure, report, sys};

use measure::Effort;

/// Measures the loader on a disk, prints tables and goals, and writes disk-SECTION.csv, or scaling.csv.
#[derive(Parser)]
struct Options {
    #[arg(required = true)]
    sections: Vec<Section>,
    /// One round of everything: does it work?
    #[arg(long)]
    quick: bool,
    /// The size of the file that is read, a multiple of 64; not for `scaling` [default: 512; for random 64 to 512 by the size of a record]
    #[arg(long, value_name = "N")]
    size_mib: Option<u64>,
    /// Memory is full of single pages of other files first, as other programs leave it
    #[arg(long)]
    used: bool,
    /// The most rounds: fewer if the time is over
    #[arg(long, default_value_t = 7, value_name = "N")]
    rounds: usize,
    /// The time for `scaling`
    #[arg(long, default_value_t = 8, value_name = "N")]
    minutes: u64,
    /// Where the files are made, on the disk that is measured
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target/data"))]
    dir: PathBuf,
    /// Where the figures go
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../results"))]
    out: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, ValueEnum)]
enum Section {
    /// Run all but `scaling`
    All,
    /// Measure cold random reads of 4 KiB, 64 KiB, 256 KiB and 1 MiB, and fio's
    Random,
    /// Measure cold sequential reads, and those of dd and fio
    Sequential,
    /// Compare 64 processes with one
    Ranks,
    /// Compare the wall time with the longer of load and compute, by batch size, depth, ratio and cache
    Scaling,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [child::CHILD, ref rest @ ..] => be_child(rest),
        _ => bench(&Options::parse()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("disk: {error}");
            ExitCode::FAILURE
        }
    }
}

fn be_child(args: &[&str]) -> Result<(), BoxError> {
    match args {
        ["rank", path, mode, epochs] => ranks::rank(path.as_ref(), mode, epochs.parse()?),
        _ => Err(format!("a child that knows not what to do: {args:?}").into()),
    }
}

fn bench(options: &Options) -> Result<(), BoxError> {
    // A batch of 1 MiB for each of the ranks, and a multiple of all batch sizes.
    if let Some(found) = options.size_mib.filter(|mib| *mib < 64 || !mib.is_multiple_of(64)) {
        return Err(format!("--size-mib: wanted a multiple of 64, found {found}").into());
    }
    let rounds = if options.quick { 1 } else { options.rounds.max(1) };
    fs::create_dir_all(&options.dir)?;
    fs::create_dir_all(&options.out)?;
    let head = format!("{}; {}", sys::machine(), sys::disk(&options.dir));
    if options.used {
        data::use_memory(&options.dir)?;
    }
    let begun = Instant::now();
    let mut written = Vec::<String>::new();
    // Each with its longest time in seconds.
    for (section, seconds) in [(Section::Random, 180), (Section::Sequential, 90), (Section::Ranks, 80)] {
        if ![section, Section::All].iter().any(|wanted| options.sections.contains(wanted)) {
            continue;
        }
        let mib = options.size_mib.unwrap_or(512);
        let effort = Effort { rounds, time: Duration::from_secs(seconds) };
        let head = format!("{head}; {mib} MiB{}", if options.used { "; used memory" } else { "" });
        let tables = match section {
            Section::Ranks => ranks::run(&data::random(&options.dir, mib)?, effort)?,
            _ => cold::run(section == Section::Random, &options.dir, options.size_mib, effort)?,
        };
        tables.iter().for_each(|table| print!("{}", table.text()));
        written.push(format!("disk-{section:?}.csv").to_lowercase());
        fs::write(options.out.join(&written[written.len() - 1]), report::csv(&tables, &head))?;
    }
    if options.sections.contains(&Section::Scaling) {
        println!("{head}");
        let effort = Effort { rounds, time: Duration::from_secs(60 * options.minutes) };
        scaling::run(&options.dir, &options.out, &head, effort)?;
        written.push("scaling.csv".to_owned());
    }
    println!("\nevery epoch took one read for each batch, or this program would have failed");
    println!("took {:.0?}; written: {} in {}", begun.elapsed(), written.join(", "), options.out.display());
    Ok(())
}
