//! `cuda-sim run [OPTION]... -- PROGRAM [ARGUMENT]...`: runs a program that uses the CUDA driver API on the software driver.

#[cfg(target_os = "linux")]
mod linux {
    use std::collections::BTreeMap;
    use std::ffi::{OsStr, OsString, c_int};
    use std::fs::DirBuilder;
    use std::io::{ErrorKind, Write};
    use std::os::unix::fs::DirBuilderExt;
    use std::path::Path;
    use std::process::{Command, ExitCode};
    use std::sync::atomic::{AtomicBool, Ordering};

    use twinbuf_cuda_sim::{Outcome, install, run};

    const USAGE: &str = "\
usage: cuda-sim run [--seeds N] [--set NAME=VALUE]... -- PROGRAM [ARGUMENT]...
       cuda-sim library FOLDER

run      runs the program N times (1), each with another seed of the delays, and reports what the checker found, with call
         stacks. Exits with 1 if that is something, else with the program's first code that is not 0; with 1 if that is 0
         and a run had no driver to check.
library  makes FOLDER/libcuda.so.1, to link with or to run with LD_LIBRARY_PATH=FOLDER: the report goes to standard error

  --set seed=1            the first seed
  --set delay=40          the longest delay of an operation, in microseconds
  --set pieces=4          the pieces of a copy
  --set pools=1           whether the device has memory pools
  --set devices=1         1 or 2
  --set device-bytes=N    the size of the device's memory; host-bytes=N that of page-locked memory
  --set fail=WHAT:N:CODE  the Nth call of a function (cuEventRecord:2:719), of any (call:17:2), or the Nth operation on the
                          device (h2d, d2h, d2d, memset, kernel, host, any) fails with this CUresult";

    const SIGINT: c_int = 2;
    static INTERRUPTED: AtomicBool = AtomicBool::new(false);

    unsafe extern "C" {
        fn signal(signal: c_int, handler: extern "C" fn(c_int)) -> usize;
    }

    /// Ctrl-C goes to the program that runs, too. When that ends, this one removes its folder, and starts no other.
    extern "C" fn interrupted(_: c_int) {
        INTERRUPTED.store(true, Ordering::Relaxed); // a flag alone: nothing is published with it
    }

    /// What the command line asks for.
    struct Asked {
        /// At least 1.
        seeds: u64,
        first: u64,
        settings: String,
        program: Vec<OsString>,
    }

    /// Writes a line to standard error. One that is closed or full changes neither the exit code nor what is removed.
    fn say(line: &str) {
        let _ = writeln!(std::io::stderr(), "{line}");
    }

    fn parse(mut arguments: impl Iterator<Item = OsString>) -> Result<Asked, String> {
        let mut asked = Asked { seeds: 1, first: 1, settings: String::new(), program: Vec::new() };
        let number = |name: &str, text: &str, least| {
            let number = text.parse().ok().filter(|number| *number >= least);
            number.ok_or_else(|| format!("{name}: wanted a number from {least} on, found {text:?}"))
        };
        while let Some(argument) = arguments.next() {
            let mut value = || {
                let missing = || format!("{}: wanted a value", argument.to_string_lossy());
                let value = arguments.next().ok_or_else(missing)?;
                value.into_string().map_err(|value| format!("{}: wanted UTF-8", value.to_string_lossy()))
            };
            match argument.to_str() {
                Some("--seeds") => asked.seeds = number("--seeds", &value()?, 1)?,
                Some("--set") => match value()? {
                    seed if seed.starts_with("seed=") => {
                        asked.first = number("--set seed", &seed["seed=".len()..], 0)?;
                    }
                    setting => asked.settings += &format!("{setting},"),
                },
                Some("--") => asked.program = arguments.by_ref().collect(),
                _ => {
                    let argument = argument.to_string_lossy();
                    return Err(format!("{argument}: not known; a program comes after --"));
                }
            }
        }
        if asked.program.is_empty() { Err("no program".to_owned()) } else { Ok(asked) }
    }

    fn run_all(asked: &Asked, folder: &Path) -> Result<u8, String> {
        install(folder).map_err(|error| error.to_string())?;
        // What was found, and with which seeds: the same race often shows with every one.
        let mut found = BTreeMap::<String, Vec<u64>>::new();
        let mut code = 0;
        for seed in asked.first..=asked.first.saturating_add(asked.seeds - 1) {
            let mut program = Command::new(&asked.program[0]);
            program.args(&asked.program[1..]);
            let outcome = run(folder, &format!("{}seed={seed}", asked.settings), &mut program);
            let Outcome { code: ended, violations, end } = outcome.map_err(|error| match error.kind() {
                ErrorKind::InvalidInput => format!("--set {error}"),
                _ => format!("{}: {error}", asked.program[0].to_string_lossy()),
            })?;
            if code == 0 {
                // A run without the driver has checked nothing.
                code = if end.is_none() { ended.max(1) } else { ended };
            }
            for violation in violations {
                found.entry(violation).or_default().push(seed);
            }
            let none = "no call reached the driver, or the program did not end itself";
            say(&format!("cuda-sim: seed {seed}: exit code {ended}, {}", end.as_deref().unwrap_or(none)));
            if INTERRUPTED.load(Ordering::Relaxed) {
                break;
            }
        }
        for (violation, seeds) in &found {
            let (times, first) = (seeds.len(), seeds[0]);
            say(&format!("cuda-sim: {times} of {} seeds, the first {first}: {violation}", asked.seeds));
        }
        Ok(if found.is_empty() { u8::try_from(code).unwrap_or(1) } else { 1 })
    }

    pub(crate) fn main() -> ExitCode {
        let mut arguments = std::env::args_os().skip(1);
        let command = arguments.next();
        let result = match (command.as_deref().and_then(OsStr::to_str), arguments.next()) {
            (Some("library"), Some(folder)) if arguments.len() == 0 => {
                install(Path::new(&folder)).map(|()| 0).map_err(|error| error.to_string())
            }
            (Some("run"), first) => parse(first.into_iter().chain(arguments)).and_then(|asked| {
                let folder = std::env::temp_dir().join(format!("cuda-sim-{}", std::process::id()));
                // SAFETY: the handler stores a flag and nothing else. `execve` gives the program the default action again.
                unsafe { signal(SIGINT, interrupted) };
                // This fails if the folder exists: it may belong to another user.
                let made = DirBuilder::new().mode(0o700).create(&folder);
                made.map_err(|error| format!("{}: {error}", folder.display()))?;
                let code = run_all(&asked, &folder);
                let _ = std::fs::remove_dir_all(&folder);
                code
            }),
            _ => Err(USAGE.to_owned()),
        };
        let code = result.unwrap_or_else(|error| {
            say(&error);
            2
        });
        ExitCode::from(code)
    }
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("cuda-sim runs on Linux");
}
