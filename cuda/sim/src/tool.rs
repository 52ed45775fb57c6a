//! The driver for any program: a folder with a `libcuda.so.1`, and a run of a program that finds it there.

use std::io::{Error, ErrorKind};
use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, absolute};
use std::process::Command;
use std::{env, fs, io, process};

use crate::abi::{END, TARGET_API, VIOLATION};
use crate::driver::NAME;
use crate::options::{Failure, Settings};

/// The driver: the file of `build.rs`, which is empty where there is none.
pub(crate) fn library() -> io::Result<&'static [u8]> {
    const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/driver.so"));
    let none =
        "built without a driver: wanted a build for Linux with glibc, on the system that it is built for";
    if LIBRARY.is_empty() { Err(Error::new(ErrorKind::Unsupported, none)) } else { Ok(LIBRARY) }
}

/// Puts the driver into a folder, which it creates if necessary, as `libcuda.so.1` and `libcuda.so`. Nothing else here
/// makes files of these names, so it takes a real driver's place only for programs that search this folder. What the
/// folder has under these names is replaced.
///
/// # Errors
///
/// Those of the file system, with the folder; `Unsupported` if the driver was not built for this system.
pub fn install(folder: &Path) -> io::Result<()> {
    let mut library = library()?.to_vec();
    name(&mut library).ok_or_else(|| Error::new(ErrorKind::InvalidData, "not a driver of this package"))?;
    let into = || {
        fs::create_dir_all(folder)?;
        // A program that starts meanwhile finds the old files or the new ones.
        let new = folder.join(format!("{NAME}.{}", process::id()));
        fs::write(&new, library)?;
        fs::rename(&new, folder.join(NAME))?;
        symlink(NAME, &new)?;
        fs::rename(new, folder.join("libcuda.so"))
    };
    into().map_err(|error: Error| Error::new(error.kind(), format!("{}: {error}", folder.display())))
}

/// Makes `libcuda.so.1` the SONAME of a 64-bit ELF file that has a symbol of this name: `DT_SONAME` is an offset into
/// the table of names (elf(5)).
fn name(library: &mut [u8]) -> Option<()> {
    const LOAD: usize = 1;
    const DYNAMIC: usize = 2;
    const STRTAB: usize = 5;
    const STRSZ: usize = 10;
    const SONAME: usize = 14;
    let number = |at: usize, bytes: usize| {
        let number = library.get(at..at + bytes)?.iter().rev();
        usize::try_from(number.fold(0_u64, |number, byte| number << 8 | u64::from(*byte))).ok()
    };
    let (headers, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    // Of each program header: its type, the offset, the address and the size.
    let header = |i| {
        let at = headers + i * size;
        Some((number(at, 4)?, number(at + 8, 8)?, number(at + 16, 8)?, number(at + 32, 8)?))
    };
    let all: Vec<_> = (0..count).map(header).collect::<Option<_>>()?;
    let (_, dynamic, _, bytes) = *all.iter().find(|header| header.0 == DYNAMIC)?;
    let entry = |tag| (dynamic..dynamic + bytes).step_by(16).find(|at| number(*at, 8) == Some(tag));
    let (start, length) = (number(entry(STRTAB)? + 8, 8)?, number(entry(STRSZ)? + 8, 8)?);
    let holds = |(kind, _, address, bytes): &&(usize, usize, usize, usize)| {
        *kind == LOAD && (*address..*address + *bytes).contains(&start)
    };
    let (_, offset, address, _) = *all.iter().find(holds)?;
    let names = offset + start - address;
    let wanted = [b"\0", NAME.as_bytes(), b"\0"].concat();
    let found =
        library.get(names..names + length)?.windows(wanted.len()).position(|name| name == wanted)? + 1;
    let at = entry(SONAME)? + 8;
    library[at..at + 8].copy_from_slice(&(found as u64).to_le_bytes());
    Some(())
}

/// The end of a program.
#[derive(Debug)]
pub struct Outcome {
    /// Its exit code; 128 plus the signal's number if a signal ended it.
    pub code: i32,
    /// What the checker found, at most 16: a sentence each, and in further lines the call stacks.
    pub violations: Vec<String>,
    /// How many were found and what was not freed. `None` if the program made no driver call, skipped its exit
    /// handlers, or was ended by a signal.
    pub end: Option<String>,
}

/// Runs a program on the driver that [`install`] has put into `folder`, and waits for its end. Writes the file `report`
/// there. `settings` are `NAME=VALUE` with commas between; the names are those of `cuda-sim run --set`.
///
/// # Errors
///
/// Those of the file system and of starting the program; `InvalidInput` if a setting is wrong; `Unsupported` if a call
/// is to fail and the driver was not built for this system.
pub fn run(folder: &Path, settings: &str, program: &mut Command) -> io::Result<Outcome> {
    let wrong = |error| Error::new(ErrorKind::InvalidInput, error);
    let parsed = settings.parse::<Settings>().map_err(wrong)?;
    if parsed.report.is_some() {
        return Err(wrong("report: no such setting".to_owned()));
    }
    for failure in &parsed.failures {
        let Failure { raw, name } = failure;
        // A call that this driver lacks never fails, and the program would pass untested. The library has a table of names.
        let entry = [b"\0", name.as_bytes(), b"\0"].concat();
        let can_fail = name.starts_with("cu") && !failure.cannot_fail();
        let can_fail = can_fail && library()?.windows(entry.len()).any(|name| name == entry);
        if raw.target == TARGET_API && !can_fail {
            return Err(wrong(format!("fail={name}:{}:{}: no function of this driver", raw.nth, raw.code)));
        }
    }
    // The program may run in another folder than this process.
    let folder = absolute(folder)?;
    let report = folder.join("report");
    fs::write(&report, "")?;
    let mut path = folder.into_os_string();
    if let Some(more) = env::var_os("LD_LIBRARY_PATH") {
        path.push(":");
        path.push(more);
    }
    let settings = format!("{settings},report={}", report.display());
    let status = program.env("LD_LIBRARY_PATH", path).env(Settings::VARIABLE, settings).status()?;
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    let (mut violations, mut end) = (Vec::new(), None);
    for line in fs::read_to_string(&report)?.lines() {
        if let Some(violation) = line.strip_prefix(VIOLATION) {
            violations.push(violation.to_owned());
        } else if let Some(line) = line.strip_prefix(END) {
            end = Some(line.to_owned());
        } else if let Some(violation) = violations.last_mut() {
            *violation = format!("{violation}\n{line}");
        }
    }
    Ok(Outcome { code, violations, end })
}
