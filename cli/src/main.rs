//! `twinbuf`: inspects files of records, measures what training on them waits for, and reads traces back.

mod data;
mod inspect;
mod probe;
mod summary;
mod text;
mod timeline;
mod trace;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use twinbuf::BoxError;

/// Shows what files of training records contain, what training on them waits for, and where the time of a traced run went.
#[derive(Parser)]
#[command(name = "twinbuf", version, max_term_width = 100)]
#[command(subcommand_required = true, arg_required_else_help = false)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Inspect(inspect::Options),
    Probe(probe::Options),
    Trace(trace::Options),
}

fn main() -> ExitCode {
    let found = match Args::try_parse() {
        Ok(Args { command: Command::Inspect(options) }) => inspect::run(&options),
        Ok(Args { command: Command::Probe(options) }) => probe::run(&options),
        Ok(Args { command: Command::Trace(options) }) => trace::run(&options),
        Err(error) if error.use_stderr() => Err(first_paragraph(&error.to_string()).into()),
        Err(help) => Ok(help.to_string()),
    };
    match found.and_then(|text| say(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // The standard error may be closed; the exit code remains.
            let _ = writeln!(io::stderr(), "twinbuf: {}", text::printable(&in_shell(&text::chain(&*error))));
            ExitCode::from(2)
        }
    }
}

/// Replaces a call that the library advises by what a shell does.
fn in_shell(line: &str) -> String {
    let line = line.replace(": if it is a pattern, expand it with `files()`", "");
    line.replace("list its files with `files()`", "name its files, as the shell does for `folder/*`")
}

/// Writes `text` to standard output.
fn say(text: &str) -> Result<(), BoxError> {
    let mut out = io::stdout().lock();
    let said = text::said(out.write_all(text.as_bytes()).and_then(|()| out.flush()));
    said.map_err(|error| format!("standard output: {error}").into())
}

/// Joins the first paragraph to one line: clap puts arguments on separate lines, and adds its usage.
fn first_paragraph(message: &str) -> String {
    let lines = message.lines().map(str::trim).take_while(|line| !line.is_empty());
    let line = lines.collect::<Vec<_>>().join(" ");
    line.strip_prefix("error: ").map(str::to_string).unwrap_or(line)
}
