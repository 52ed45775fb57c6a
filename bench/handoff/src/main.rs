//! Hand-offs at depth two: twinbuf, its peers and the floor, in one process. See the README one folder up.

mod floor;
mod measure;
mod ours;
mod payload;
mod peers;

use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use clap::Parser;
use twinbuf::BoxError;
use twinbuf_bench_harness::{report, sys};

use measure::{Effort, FLOOR, Subject, Subjects, Wait};

/// Measures hand-offs at depth two and prints a table; writes handoff.csv.
#[derive(Parser)]
struct Options {
    /// 8 rounds of 5 ms samples instead of 40 of 25 ms: does it work?
    #[arg(long)]
    quick: bool,
    /// The number of rounds
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Where the figures go
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../results"))]
    out: PathBuf,
    /// Only subjects whose `measure/wait/name/way` matches, and the floors of their groups
    #[arg(long, value_name = "REGEX")]
    only: Option<regex_lite::Regex>,
}

impl Options {
    fn effort(&self) -> Effort {
        let (ms, cpus) = (Duration::from_millis, sys::processors());
        // There is at least one processor. The same one twice means that it is the only one.
        let cpus = [cpus[0], *cpus.get(1).unwrap_or(&cpus[0])];
        let (rounds, idle_rounds, sample, idle) =
            if self.quick { (8, 1, ms(5), ms(100)) } else { (40, 3, ms(25), ms(1000)) };
        Effort { rounds: self.rounds.unwrap_or(rounds).max(1), idle_rounds, sample, idle, cpus }
    }
}

fn main() -> Result<(), BoxError> {
    let options = Options::parse();
    // Creating a queue with slots of one MiB may use its creator's stack.
    let bench = thread::Builder::new().stack_size(256 << 20).spawn(move || bench(&options))?;
    bench.join().expect("the benchmark")
}

fn bench(options: &Options) -> Result<(), BoxError> {
    let effort = options.effort();
    let cpus = effort.cpus;
    let mut list = Subjects::default();
    floor::add(&mut list);
    ours::add(&mut list);
    peers::add(&mut list);
    let mut subjects = list.0;
    if cpus[0] == cpus[1] {
        eprintln!("only one processor: whoever spins would measure the scheduler; parked waits only");
        subjects.retain(|subject| subject.wait == Wait::Park);
    }
    if let Some(only) = &options.only {
        let groups: Vec<_> =
            subjects.iter().filter(|s| only.is_match(&s.id())).map(|s| (s.measure, s.wait)).collect();
        // Do not overwrite existing figures with empty ones.
        if groups.is_empty() {
            return Err(format!("--only: no subject matches {only}").into());
        }
        let floor = |s: &Subject| s.name == FLOOR && groups.contains(&(s.measure, s.wait));
        subjects.retain(|subject| floor(subject) || only.is_match(&subject.id()));
    }
    let head = format!(
        "{}; pinned to {} and {}; {} rounds of {:?}",
        sys::machine(),
        cpus[0],
        cpus[1],
        effort.rounds,
        effort.sample,
    );
    println!("{head}");
    let tables = measure::run(&subjects, &effort)?;
    std::fs::create_dir_all(&options.out)?;
    std::fs::write(options.out.join("handoff.csv"), report::csv(&tables, &head))?;
    println!("\nwritten: handoff.csv in {}", options.out.display());
    Ok(())
}
