//! Hand-offs at depth two: twinbuf, its peers and the floor, in one process. See the README in this package.

mod embedded;
mod floor;
mod measure;
mod ours;
mod payload;
mod peers;
mod report;
mod task;

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{io, thread};

use twinbuf_bench_harness::sys;

use measure::{Effort, Subjects, Wait};

const HELP: &str = "\
Measures hand-offs at depth two and prints a table; writes handoff.csv.

Usage: handoff [options]
  --quick         8 rounds of 5 ms samples instead of 40 of 25 ms: does it work?
  --rounds N      so many rounds
  --out DIR       where the files go (default: bench/results)
  --only REGEX    only subjects whose `wait/measure/name/way` matches, and the floors of their groups
  --help          this text";

struct Options {
    effort: Effort,
    out: PathBuf,
    only: Option<regex_lite::Regex>,
}

fn options() -> Result<Options, Box<dyn std::error::Error>> {
    use lexopt::Arg::Long;
    use lexopt::ValueExt as _;

    let (mut quick, mut rounds, mut only, cpus) = (false, None, None, sys::processors());
    let mut out = Path::new(env!("CARGO_MANIFEST_DIR")).join("../results");
    let mut args = lexopt::Parser::from_env();
    while let Some(arg) = args.next()? {
        match arg {
            Long("quick") => quick = true,
            Long("rounds") => rounds = Some(args.value()?.parse::<usize>()?.max(1)),
            Long("out") => out = args.value()?.into(),
            Long("only") => only = Some(regex_lite::Regex::new(&args.value()?.string()?)?),
            Long("help") => {
                println!("{HELP}");
                std::process::exit(0);
            }
            other => return Err(other.unexpected().into()),
        }
    }
    // There is at least one processor. The same one twice means that it is the only one.
    let cpus = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
    let ms = Duration::from_millis;
    let effort = if quick {
        Effort { rounds: rounds.unwrap_or(8), idle_rounds: 1, sample: ms(5), idle: ms(100), cpus }
    } else {
        Effort { rounds: rounds.unwrap_or(40), idle_rounds: 3, sample: ms(25), idle: ms(1000), cpus }
    };
    Ok(Options { effort, out, only })
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let options = options()?;
    // Creating a queue by value with slots of one MiB uses its creator's stack.
    let bench = thread::Builder::new().stack_size(256 << 20).spawn(move || bench(&options))?;
    bench.join().expect("the benchmark").map_err(Into::into)
}

fn bench(options: &Options) -> io::Result<()> {
    let cpus = options.effort.cpus;
    let mut list = Subjects::default();
    floor::add(&mut list);
    ours::add(&mut list);
    peers::add(&mut list);
    embedded::add(&mut list);
    let mut subjects = list.0;
    if cpus[0] == cpus[1] {
        eprintln!("only one processor: whoever spins would measure the scheduler; parked waits only");
        subjects.retain(|subject| subject.wait == Wait::Park);
    }
    if let Some(only) = &options.only {
        report::select(&mut subjects, |id| only.is_match(id));
        // Do not overwrite existing figures with empty ones.
        if subjects.is_empty() {
            return Err(io::Error::other(format!("--only: no subject matches {only}")));
        }
    }
    let head = format!(
        "{}; pinned to {} and {}; {} rounds of {:?}",
        sys::machine(),
        cpus[0],
        cpus[1],
        options.effort.rounds,
        options.effort.sample,
    );
    let started = Instant::now();
    measure::run(&mut subjects, &options.effort, |now| {
        if io::stderr().is_terminal() {
            eprint!("\r\x1b[K{now}");
            let _ = io::stderr().flush();
        }
    });
    let report = report::Report::new(&subjects, format!("{head}; took {:.0?}", started.elapsed()));
    print!("{}", report.text());
    std::fs::create_dir_all(&options.out)?;
    std::fs::write(options.out.join("handoff.csv"), report.csv())?;
    println!("\nwritten: handoff.csv in {}", options.out.display());
    Ok(())
}
