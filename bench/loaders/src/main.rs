//! Compares the loader with other loaders: the same batches, the same compute. See the README of the parent folder.

mod burn;
mod data;
mod dataloader_rs;
mod lent;
mod llm_c;
mod measure;
mod ours;
mod peers;
mod report;
mod source;
mod thread;
mod work;

use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io;
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use twinbuf::BoxError;
use twinbuf::mmap::ReadMode;
use twinbuf_bench_harness::measure::Effort;
use twinbuf_bench_harness::sys::machine;

use data::Files;
use peers::Subject;
use work::{Kind, Meter, Work};

/// The first argument of a child.
const CHILD: &str = "child";

/// The work of a Rust child. `Err` is what the caller got in place of a batch.
type Run = fn(&Work, &mut Meter<'_>) -> Result<(), BoxError>;

enum Way {
    Rust(Run),
    /// The library of `python_loader.py` with this many workers.
    Python(&'static str, u32),
}

/// Each library, with settings that suit two processors. burn, dataloader-rs, SPDL and Grain also run with 8 or 16 workers,
/// which keep more requests in flight for a cold file.
const SUBJECTS: [(&str, Way); 20] = [
    ("twinbuf", Way::Rust(|work, meter| ours::run(work, meter, ReadMode::Auto, 1))),
    ("twinbuf 2", Way::Rust(|work, meter| ours::run(work, meter, ReadMode::Auto, 2))),
    (peers::DIRECT, Way::Rust(|work, meter| ours::run(work, meter, ReadMode::Direct, 1))),
    ("thread", Way::Rust(thread::run)),
    (peers::SERIAL, Way::Rust(llm_c::run)),
    ("burn 1", Way::Rust(|work, meter| burn::run(work, meter, 1))),
    ("burn 2", Way::Rust(|work, meter| burn::run(work, meter, 2))),
    ("burn 8", Way::Rust(|work, meter| burn::run(work, meter, 8))),
    ("dataloader-rs 1", Way::Rust(|work, meter| dataloader_rs::run(work, meter, 1))),
    ("dataloader-rs 2", Way::Rust(|work, meter| dataloader_rs::run(work, meter, 2))),
    ("dataloader-rs 8", Way::Rust(|work, meter| dataloader_rs::run(work, meter, 8))),
    ("twinbuf py", Way::Python("twinbuf", 1)),
    ("torch 0", Way::Python("torch", 0)),
    ("torch 2", Way::Python("torch", 2)),
    ("SPDL 2", Way::Python("spdl", 2)),
    ("SPDL 8", Way::Python("spdl", 8)),
    ("Grain 2", Way::Python("grain", 2)),
    ("Grain 16", Way::Python("grain", 16)),
    ("dataloader-rs py 2", Way::Python("dataloader_rs", 2)),
    ("dataloader-rs py 8", Way::Python("dataloader_rs", 8)),
];

/// Runs the loader and other loaders on the same batches, and writes CSV files.
#[derive(Parser)]
struct Options {
    #[arg(required = true)]
    sections: Vec<Section>,
    /// A short test run: small files, one round
    #[arg(long)]
    quick: bool,
    /// The size of the file of images; that of tokens has half
    #[arg(long, default_value_t = 640, value_name = "N")]
    size_mib: u64,
    /// The most rounds: fewer if the time is over
    #[arg(long, default_value_t = 5, value_name = "N")]
    rounds: usize,
    /// The time for `peers`
    #[arg(long, default_value_t = 20, value_name = "N")]
    minutes: u64,
    /// Only this subject, and the serial loop; may be given again
    #[arg(long, value_name = "NAME", value_parser = SUBJECTS.map(|(name, _)| name))]
    only: Vec<String>,
    /// An interpreter that has what ../python/requirements.txt names; subjects whose library it lacks are left out
    #[arg(long, default_value = "python3")]
    python: PathBuf,
    /// Where the files are made, on the disk that is measured
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/target/data"))]
    dir: PathBuf,
    /// Where the figures go
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../results"))]
    out: PathBuf,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Section {
    /// Order and content of what each delivers, twice: loaders-same.csv
    Same,
    /// Samples a second, CPU time, AU and the trainer's slowdown; cold and warm, in order and shuffled: loaders.csv
    Peers,
}

fn main() -> ExitCode {
    let args: Vec<_> = env::args_os().skip(1).collect();
    let done = match &args[..] {
        [first, name] if first == CHILD => be_child(&name.to_string_lossy()),
        _ => bench(&Options::parse()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("loaders: {}", chain(&*error));
            ExitCode::FAILURE
        }
    }
}

fn bench(options: &Options) -> Result<(), BoxError> {
    let Options { dir, out, .. } = options;
    let (size_mib, rounds) =
        if options.quick { (&64, 1) } else { (&options.size_mib, options.rounds.max(1)) };
    let effort = Effort { rounds, time: Duration::from_secs(60 * options.minutes) };
    fs::create_dir_all(dir)?;
    fs::create_dir_all(out)?;
    let subjects = subjects(options)?;
    let kinds = Kind::ALL
        .map(|kind| Files::make(dir, kind, if kind == Kind::Tokens { size_mib / 2 } else { *size_mib }));
    let kinds = kinds.into_iter().collect::<Result<Vec<_>, _>>()?;
    let head = format!("{}; images of {size_mib} MiB, tokens of {} MiB", machine(), size_mib / 2);
    println!("{head}");
    let begun = Instant::now();
    let wanted = |section| options.sections.contains(&section);
    let write = |file: &str, text: String| fs::write(out.join(file), text);
    if wanted(Section::Same) {
        write("loaders-same.csv", report::same(&peers::same(&subjects, &kinds)?, &head))?;
    }
    if wanted(Section::Peers) {
        peers::speed(&subjects, &kinds, effort, |rows| {
            Ok(write("loaders.csv", report::speed(rows, &head))?)
        })?;
    }
    println!("took {:.0?}; written to {}", begun.elapsed(), out.display());
    Ok(())
}

/// The selected subjects, with their command lines.
fn subjects(options: &Options) -> Result<Vec<Subject>, BoxError> {
    let program = env::current_exe()?.display().to_string();
    let (mut found, mut known) = (Vec::new(), BTreeMap::new());
    for (name, way) in SUBJECTS {
        if !options.only.is_empty() && name != peers::SERIAL && options.only.iter().all(|only| only != name) {
            continue;
        }
        let program = match way {
            Way::Rust(_) => vec![program.clone(), CHILD.to_owned(), name.to_owned()],
            Way::Python(library, workers) => {
                if *known.entry(library).or_insert_with(|| has(&options.python, library)) {
                    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python_loader.py");
                    let program = [&options.python, &script].map(|path| path.display().to_string());
                    let arguments = [library.to_owned(), workers.to_string()];
                    program.into_iter().chain(arguments).collect()
                } else {
                    eprintln!("{name}: left out: {} cannot import {library}", options.python.display());
                    continue;
                }
            }
        };
        found.push(Subject { name, program });
    }
    Ok(found)
}

/// Whether that interpreter has the library.
fn has(python: &Path, library: &str) -> bool {
    let mut command = Command::new(python);
    command.args(["-c", &format!("import numpy, {library}")]).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

/// Runs as the subject of that name: executes each command and reports its result.
fn be_child(name: &str) -> Result<(), BoxError> {
    let run = SUBJECTS.into_iter().find_map(|(known, way)| match way {
        Way::Rust(run) if name == known => Some(run),
        _ => None,
    });
    let run = run.ok_or_else(|| format!("no such subject: {name}"))?;
    loop {
        let mut line = String::new();
        if io::stdin().read_line(&mut line)? == 0 {
            return Ok(());
        }
        let work: Work = serde_json::from_str(&line)?;
        let mut meter = Meter::new(&work);
        // A library may pass its worker's panic on to the caller.
        let error = match panic::catch_unwind(AssertUnwindSafe(|| run(&work, &mut meter))) {
            Ok(done) => done.err().map(|error| chain(&*error)),
            Err(payload) => {
                let words = payload.downcast_ref::<String>().map_or("?", String::as_str);
                Some(format!("a panic of the caller: {words}"))
            }
        };
        println!("{}", serde_json::to_string(&meter.outcome(error))?);
    }
}

/// An error with its causes.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}
