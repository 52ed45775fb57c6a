//! The loader against the disk: cold reads, ranks, scaling. See the README one folder up.

mod cell;
mod child;
mod fio;
mod load;
mod random;
mod ranks;
mod scaling;
mod sequential;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use twinbuf::BoxError;
use twinbuf_bench_harness::{data, measure, report, sys};

use measure::Effort;

const HELP: &str = "\
Measures the loader on a disk, prints tables and goals, and writes disk-SECTION.csv, or scaling.csv.

Usage: disk [options] all | SECTION...
  random           cold random reads of 4 KiB, 64 KiB, 256 KiB and 1 MiB, beside fio
  sequential       cold sequential reads, beside dd and fio
  ranks            64 processes beside one
  scaling          wall time against the longer of load and compute, by batch size, depth, ratio and cache;
                   not one of all

  --quick          one round of everything: does it work?
  --size-mib N     the size of the file that is read (default 512; for random 64 to 512 by the size of a record)
  --used           random: memory is full of single pages of other files first, as other programs leave it
  --rounds N       so many rounds, if there is time for them (default 7)
  --minutes N      the time for `scaling` (default 8)
  --dir DIR        where the files are made, on the disk that is measured (default: target/data)
  --out DIR        where the figures go (default: bench/results)
  --help           this text";

/// The sections, each with its maximum number of seconds.
const SECTIONS: [(&str, u64); 3] = [("random", 180), ("sequential", 90), ("ranks", 80)];
/// A section that runs only by itself.
const SCALING: &str = "scaling";

struct Options {
    sections: Vec<&'static str>,
    size_mib: Option<u64>,
    used: bool,
    rounds: usize,
    minutes: u64,
    dir: PathBuf,
    out: PathBuf,
}

fn options() -> Result<Options, BoxError> {
    use lexopt::Arg::{Long, Value};
    use lexopt::ValueExt as _;

    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut options = Options {
        sections: Vec::new(),
        size_mib: None,
        used: false,
        rounds: 7,
        minutes: 8,
        dir: here.join("target/data"),
        out: here.join("../results"),
    };
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next()? {
        match arg {
            Long("quick") => options.rounds = 1,
            Long("minutes") => options.minutes = args.value()?.parse()?,
            Long("size-mib") => options.size_mib = Some(args.value()?.parse()?),
            Long("used") => options.used = true,
            Long("rounds") => options.rounds = args.value()?.parse::<usize>()?.max(1),
            Long("dir") => options.dir = args.value()?.into(),
            Long("out") => options.out = args.value()?.into(),
            Long("help") => {
                println!("{HELP}");
                std::process::exit(0);
            }
            Value(name) if name == "all" => options.sections.extend(SECTIONS.map(|(name, _)| name)),
            Value(name) => {
                match SECTIONS.map(|(name, _)| name).into_iter().chain([SCALING]).find(|&known| name == known)
                {
                    Some(known) => options.sections.push(known),
                    None => return Err(format!("no such section: {}", name.to_string_lossy()).into()),
                }
            }
            other => return Err(other.unexpected().into()),
        }
    }
    if options.sections.is_empty() {
        return Err("name a section, or all; see --help".into());
    }
    // A batch of 1 MiB for each of the ranks, and a multiple of all batch sizes.
    if let Some(found) = options.size_mib.filter(|mib| *mib < 64 || !mib.is_multiple_of(64)) {
        return Err(format!("--size-mib: wanted a multiple of 64, found {found}").into());
    }
    Ok(options)
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let done = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [child::CHILD, ref rest @ ..] => be_child(rest),
        _ => options().and_then(|options| bench(&options)),
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
    fs::create_dir_all(&options.dir)?;
    fs::create_dir_all(&options.out)?;
    let head = format!("{}; {}", sys::machine(), sys::disk(&options.dir));
    if options.used {
        data::use_memory(&options.dir)?;
    }
    let begun = Instant::now();
    let mut written = Vec::<String>::new();
    for (section, seconds) in SECTIONS.into_iter().filter(|(name, _)| options.sections.contains(name)) {
        let mib = options.size_mib.unwrap_or(512);
        let path = data::random(&options.dir, mib)?;
        let effort = Effort { rounds: options.rounds, time: Duration::from_secs(seconds) };
        let head = format!("{head}; {mib} MiB{}", if options.used { "; used memory" } else { "" });
        let tables = match section {
            "random" => random::run(&options.dir, options.size_mib, effort)?,
            "sequential" => sequential::run(&path, effort)?,
            _ => ranks::run(&path, effort)?,
        };
        tables.iter().for_each(|table| print!("{}", table.text()));
        written.push(format!("disk-{section}.csv"));
        fs::write(options.out.join(&written[written.len() - 1]), report::csv(&tables, &head))?;
    }
    if options.sections.contains(&SCALING) {
        println!("{head}");
        let effort = Effort { rounds: options.rounds, time: Duration::from_secs(60 * options.minutes) };
        scaling::run(&options.dir, &options.out, &head, effort)?;
        written.push("scaling.csv".to_owned());
    }
    println!("\nevery epoch took one read for each batch, or this program would have failed");
    println!("took {:.0?}; written: {} in {}", begun.elapsed(), written.join(", "), options.out.display());
    Ok(())
}
