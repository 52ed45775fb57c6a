//! Switches: environment variables that set options of a loader, for a program that cannot be recompiled.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::builder::{LoaderBuilder, MAX_WORKERS};
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::Trace;
use crate::pipe::memory::{Backend, MemoryLimit};

/// The start of the name of every switch.
const PREFIX: &str = "TWINBUF_";
/// The rest of the name.
const NAMES: [&str; 8] =
    ["OVERLAP", "COPY_STREAM", "WORKERS", "DEPTH", "HINTS", "MEMORY", "TRACE", "BREAKDOWN"];

/// Variables of the tests and of the software driver begin with one of these.
const RESERVED: [&str; 4] = ["TWINBUF_CUDA_", "TWINBUF_SOAK_", "TWINBUF_STRESS_", "TWINBUF_TEST_"];
/// These are not taken for the names of loaders: `TWINBUF_HOST_DEPTH` is a mistake for `TWINBUF_DEPTH`.
const NOT_LOADERS: [&str; 2] = ["HOST", "DEVICE"];

/// The steps between two log lines of a breakdown if the value is `on` or `true`.
const EVERY: u64 = 100;

const ON_OR_OFF: &str = "1, on or true, or 0, off or false";

/// The switches of one loader; `None` where the environment does not set one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Switches {
    overlap: Option<bool>,
    copy_stream: Option<bool>,
    workers: Option<usize>,
    depth: Option<usize>,
    hints: Option<bool>,
    /// The bytes, and whether they are one limit for all loaders.
    memory: Option<(u64, bool)>,
    /// The path of the trace. An empty path means no trace.
    trace: Option<PathBuf>,
    /// The steps between two log lines. 0 turns the breakdown off.
    breakdown: Option<u64>,
}

impl Switches {
    /// Reads the switches of a loader from environment variables. A variable with the loader's name has precedence over
    /// one for all loaders.
    fn from_vars<N, V>(loader: Option<&str>, vars: impl IntoIterator<Item = (N, V)>) -> Result<Self, Error>
    where
        N: AsRef<OsStr>,
        V: AsRef<OsStr>,
    {
        let own_prefix = loader.map(|name| format!("{PREFIX}{}_", variable(name)));
        let (mut switches, mut own) = (Self::default(), Vec::new());
        for (name, value) in vars {
            let (found, value) = (name.as_ref().to_string_lossy().into_owned(), value.as_ref());
            let of_own = own_prefix.as_deref().and_then(|prefix| found.strip_prefix(prefix));
            if let Some(switch) = of_own.filter(|switch| NAMES.contains(switch)) {
                own.push((switch.to_string(), found, value.to_os_string()));
            } else if let Some(switch) = found.strip_prefix(PREFIX).filter(|switch| NAMES.contains(switch)) {
                switches.set(switch, &found, value, true)?;
            } else if !is_foreign(&found) {
                return Err(Error::UnknownSwitch { name: found });
            }
        }
        for (switch, name, value) in own {
            switches.set(&switch, &name, &value, false)?;
        }
        Ok(switches)
    }

    /// Sets one switch. `together`: the variable `name` is for all loaders, not only for this one.
    fn set(&mut self, switch: &str, name: &str, value: &OsStr, together: bool) -> Result<(), Error> {
        match switch {
            "OVERLAP" => self.overlap = Some(parse(name, value, ON_OR_OFF, on_or_off)?),
            "COPY_STREAM" => self.copy_stream = Some(parse(name, value, ON_OR_OFF, on_or_off)?),
            "HINTS" => self.hints = Some(parse(name, value, ON_OR_OFF, on_or_off)?),
            "DEPTH" => {
                let wanted = "a whole number from 1";
                self.depth = Some(parse(name, value, wanted, |value| number(value, usize::MAX))?);
            }
            "WORKERS" => {
                let wanted = format!("a whole number from 1 to {MAX_WORKERS}");
                self.workers = Some(parse(name, value, &wanted, |value| number(value, MAX_WORKERS))?);
            }
            "MEMORY" => {
                let wanted = "a number of bytes, KiB, MiB or GiB, such as 512MiB";
                self.memory = Some((parse(name, value, wanted, bytes)?, together));
            }
            "TRACE" => self.trace = Some(value.into()),
            _ => {
                let wanted = "a number of steps, or on or true, or 0, off or false";
                self.breakdown = Some(parse(name, value, wanted, every)?);
            }
        }
        Ok(())
    }
}

/// Returns a loader's name as a part of a variable's name: `valid-2` becomes `VALID_2`.
fn variable(loader: &str) -> String {
    loader.chars().map(|c| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' }).collect()
}

/// Whether a variable that is no switch of this loader can be ignored: it belongs to the tests, to another loader or to
/// another program.
fn is_foreign(name: &str) -> bool {
    let Some(rest) = name.strip_prefix(PREFIX) else { return true };
    let mut loaders = NAMES.iter().filter_map(|known| rest.strip_suffix(known)?.strip_suffix('_'));
    RESERVED.iter().any(|prefix| name.starts_with(prefix))
        || loaders.any(|loader| !loader.is_empty() && !NOT_LOADERS.contains(&loader))
}

fn parse<T>(
    name: &str,
    value: &OsStr,
    wanted: &str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, Error> {
    let parsed = value.to_str().and_then(|value| parse(&value.trim().to_ascii_lowercase()));
    parsed.ok_or_else(|| Error::Switch {
        name: name.to_string(),
        wanted: wanted.to_string(),
        found: value.to_os_string(),
    })
}

fn on_or_off(value: &str) -> Option<bool> {
    match value {
        "1" | "on" | "true" => Some(true),
        "0" | "off" | "false" => Some(false),
        _ => None,
    }
}

fn number(value: &str, most: usize) -> Option<usize> {
    value.parse().ok().filter(|number| (1..=most).contains(number))
}

/// Parses a size such as `512mib`. The caller has converted the value to lower case.
fn bytes(value: &str) -> Option<u64> {
    let units = [("kib", 1 << 10), ("mib", 1 << 20), ("gib", 1 << 30), ("", 1_u64)];
    let (number, unit) = units.iter().find_map(|(name, unit)| Some((value.strip_suffix(name)?, unit)))?;
    number.trim_end().parse::<u64>().ok()?.checked_mul(*unit)
}

fn every(value: &str) -> Option<u64> {
    match value {
        "on" | "true" => Some(EVERY),
        "0" | "off" | "false" => Some(0),
        _ => value.parse().ok().filter(|&every| every > 0),
    }
}

impl<B: Backend> LoaderBuilder<B> {
    /// Replaces options by values from environment variables. Call it last, after [`name`](Self::name). Options
    /// whose variable is not set stay unchanged.
    ///
    /// | variable | values | option |
    /// | --- | --- | --- |
    /// | `TWINBUF_OVERLAP` | `1`, `on`, `true`; `0`, `off`, `false` | [`overlap`](Self::overlap) |
    /// | `TWINBUF_COPY_STREAM` | the values of `TWINBUF_OVERLAP` | `copy_stream` of a loader for a device; without effect on others |
    /// | `TWINBUF_WORKERS` | 1 to 64 | [`workers`](Self::workers); without `TWINBUF_DEPTH` also the default [`depth`](Self::depth) |
    /// | `TWINBUF_DEPTH` | 1 and more | [`depth`](Self::depth) |
    /// | `TWINBUF_HINTS` | the values of `TWINBUF_OVERLAP` | [`hints`](Self::hints) |
    /// | `TWINBUF_MEMORY` | bytes, or a size such as `512MiB`; one limit for all loaders | [`memory_limit`](Self::memory_limit) |
    /// | `TWINBUF_TRACE` | a path; empty: no trace | [`trace`](Self::trace) |
    /// | `TWINBUF_BREAKDOWN` | log every this many steps; `on`: 100; `off` or 0: no log | [`breakdown`](Self::breakdown) |
    ///
    /// For a named loader, a variable with the name has precedence: for the name `valid`, `TWINBUF_VALID_OVERLAP=0`
    /// overrides `TWINBUF_OVERLAP=1`. `TWINBUF_VALID_MEMORY` limits only this loader. Except in paths, case does not
    /// matter, and leading and trailing spaces are ignored.
    ///
    /// If the plan has several ranks, the rank becomes part of the trace's file name: `trace.json` becomes
    /// `trace.rank3.json`. The trace covers the number of epochs set by [`trace`](Self::trace), or the first 5
    /// epochs.
    ///
    /// `TWINBUF_BREAKDOWN` turns overlap off. It logs the steps that the program ends with
    /// `loader.breakdown().end_step()`; see [`Loader::breakdown`](crate::Loader::breakdown).
    ///
    /// # Errors
    ///
    /// - [`Error::Switch`]: a variable has a value outside this table.
    /// - [`Error::UnknownSwitch`]: another variable starts with `TWINBUF_`. Variables that start with `TWINBUF_TEST_`,
    ///   `TWINBUF_STRESS_`, `TWINBUF_SOAK_` or `TWINBUF_CUDA_` belong to this crate's tests, and this method ignores them.
    ///   It also ignores the variables of loaders with other names.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use twinbuf::{BoxError, Loader, Plan, Records};
    /// # fn f(data: Arc<Records>, plan: Plan) -> Result<(), BoxError> {
    /// // TWINBUF_DEPTH=4 ./train
    /// let loader = Loader::builder(data, plan).depth(3).from_env()?.build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_env(self) -> Result<Self, Error> {
        let switches = Switches::from_vars(self.options.name.as_deref(), std::env::vars_os())?;
        Ok(self.apply(switches))
    }

    fn apply(mut self, switches: Switches) -> Self {
        let Switches { overlap, copy_stream, workers, depth, hints, memory, trace, breakdown } = switches;
        let Self { options, own, .. } = &mut self;
        options.overlap = overlap.unwrap_or(options.overlap);
        options.copy_stream = copy_stream.unwrap_or(options.copy_stream);
        // If the environment sets the number of workers, drop the program's depth: it was for another number of
        // workers.
        own.depth = depth.or(own.depth.filter(|_| workers.is_none()));
        own.workers = workers.unwrap_or(own.workers);
        own.hints = hints.unwrap_or(own.hints);
        if let Some((bytes, together)) = memory {
            let limit = if together { MemoryLimit::of_process(bytes) } else { MemoryLimit::new(bytes) };
            own.memory_limit = Some(limit);
        }
        if let Some(path) = trace {
            let (rank, world) = (own.plan.rank(), own.plan.world());
            let path = if world > 1 { with_rank(&path, rank) } else { path };
            options.trace = match options.trace.take() {
                _ if path.as_os_str().is_empty() => None,
                Some(trace) => Some(Trace { path, ..trace }),
                None => Some(Trace::new(path)),
            };
        }
        match breakdown {
            None => {}
            Some(0) => options.breakdown = Breakdown::off(),
            Some(every) => options.breakdown = Breakdown::every(every),
        }
        self
    }
}

/// Returns `path` with the rank in the file's name, before its extension.
fn with_rank(path: &Path, rank: u64) -> PathBuf {
    let mut end = OsString::from(format!("rank{rank}"));
    if let Some(extension) = path.extension() {
        end.push(".");
        end.push(extension);
    }
    path.with_extension(end)
}

#[cfg(test)]
mod tests;
