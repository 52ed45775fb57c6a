//! Switches: environment variables that set options of a loader, for a program that cannot be recompiled.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use super::builder::LoaderBuilder;
use crate::error::Error;
use crate::observe::breakdown::Breakdown;
use crate::observe::trace::Trace;
use crate::pipe::memory::{Backend, MemoryLimit};
use crate::thread::MAX_WORKERS;

/// The start of the name of every switch.
const PREFIX: &str = "TWINBUF_";
/// The rest of the name, in the order in which they are set.
const NAMES: [&str; 8] =
    ["OVERLAP", "COPY_STREAM", "WORKERS", "DEPTH", "HINTS", "MEMORY", "TRACE", "BREAKDOWN"];

/// Variables that begin with one of these belong to tests or to the software driver.
const RESERVED: [&str; 4] = ["TWINBUF_CUDA_", "TWINBUF_SOAK_", "TWINBUF_STRESS_", "TWINBUF_TEST_"];
/// These are not taken for the names of loaders: `TWINBUF_HOST_DEPTH` is a mistake for `TWINBUF_DEPTH`.
const NOT_LOADERS: [&str; 2] = ["HOST", "DEVICE"];

/// The steps between two log lines of a breakdown if the value is `on` or `true`.
const EVERY: u64 = 100;

const ON_OR_OFF: &str = "1, on or true, or 0, off or false";

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
    /// whose variable is not set stay unchanged, except as the table says.
    ///
    /// | variable | values | option |
    /// | --- | --- | --- |
    /// | `TWINBUF_OVERLAP` | `1`, `on`, `true`; `0`, `off`, `false` | [`overlap`](Self::overlap) |
    /// | `TWINBUF_COPY_STREAM` | the values of `TWINBUF_OVERLAP` | `copy_stream` of a loader for a device; without effect on others |
    /// | `TWINBUF_WORKERS` | 1 to 64 | [`workers`](Self::workers); if that changes their number, also the default [`depth`](Self::depth), unless `TWINBUF_DEPTH` is set |
    /// | `TWINBUF_DEPTH` | 1 and more | [`depth`](Self::depth) |
    /// | `TWINBUF_HINTS` | the values of `TWINBUF_OVERLAP` | [`hints`](Self::hints) |
    /// | `TWINBUF_MEMORY` | bytes, or a size such as `512MiB`; one limit for all loaders of a process | [`memory_limit`](Self::memory_limit); with it, another default [`depth`](Self::depth) |
    /// | `TWINBUF_TRACE` | a path; empty: no trace | [`trace`](Self::trace) |
    /// | `TWINBUF_BREAKDOWN` | log every this many steps; `on`, `true`: 100; `off`, `false`, 0: no breakdown | [`breakdown`](Self::breakdown) |
    ///
    /// For a named loader, a variable with the name has precedence: for the name `valid`, `TWINBUF_VALID_OVERLAP=0`
    /// overrides `TWINBUF_OVERLAP=1`. `TWINBUF_VALID_MEMORY` limits only this loader. In values other than paths, case
    /// does not matter, and leading and trailing spaces are ignored.
    ///
    /// If the plan has several ranks, the rank becomes part of the trace's file name: `trace.json` becomes
    /// `trace.rank3.json`. The trace covers as many epochs as the program's [`trace`](Self::trace) does, or the first
    /// 5.
    ///
    /// `TWINBUF_BREAKDOWN`, if it is on, turns overlap off. It logs the steps that the program ends with
    /// `loader.breakdown().end_step()`; see [`Loader::breakdown`](crate::Loader::breakdown).
    ///
    /// # Errors
    ///
    /// - [`Error::Switch`]: a variable has a value outside this table.
    /// - [`Error::UnknownSwitch`]: another variable starts with `TWINBUF_`. Variables that start with `TWINBUF_TEST_`,
    ///   `TWINBUF_STRESS_`, `TWINBUF_SOAK_` or `TWINBUF_CUDA_` belong to this crate's tests, and this method ignores
    ///   them. It also ignores the variables of loaders with other names, except those that the names `host` and
    ///   `device` would have, such as `TWINBUF_HOST_DEPTH`: they are taken for mistakes.
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
        self.with_vars(std::env::vars_os())
    }

    /// Sets the options of the variables among `vars`. A variable with the loader's name has precedence over one for all
    /// loaders.
    fn with_vars(
        mut self,
        vars: impl IntoIterator<Item = (impl AsRef<OsStr>, impl AsRef<OsStr>)>,
    ) -> Result<Self, Error> {
        let own_prefix = self.options.name.as_deref().map(|name| format!("{PREFIX}{}_", variable(name)));
        // In the order of `NAMES`; for each, the variable with the loader's name comes last and wins.
        let mut set = BTreeMap::new();
        for (name, value) in vars {
            let (found, value) =
                (name.as_ref().to_string_lossy().into_owned(), value.as_ref().to_os_string());
            let switch = |prefix| NAMES.iter().position(|&known| found.strip_prefix(prefix) == Some(known));
            let own = own_prefix.as_deref().and_then(switch).map(|at| (at, true));
            match own.or_else(|| switch(PREFIX).map(|at| (at, false))) {
                Some(switch) => _ = set.insert(switch, (found, value)),
                None if is_foreign(&found) => {}
                None => return Err(Error::UnknownSwitch { name: found }),
            }
        }
        let (workers, deep) = (self.own.workers, set.keys().any(|&(at, _)| NAMES[at] == "DEPTH"));
        set.into_iter().try_for_each(|((at, own), (name, value))| self.set(NAMES[at], &name, &value, own))?;
        // The program's depth was for its number of workers.
        self.own.depth = self.own.depth.filter(|_| deep || self.own.workers == workers);
        // An empty path: no trace.
        self.options.trace = self.options.trace.filter(|trace| !trace.path.as_os_str().is_empty());
        Ok(self)
    }

    /// Sets the option of one switch. `own`: the variable `name` is for this loader only.
    fn set(&mut self, switch: &str, name: &str, value: &OsStr, own: bool) -> Result<(), Error> {
        let Self { options, own: loader, .. } = self;
        match switch {
            "OVERLAP" => options.overlap = parse(name, value, ON_OR_OFF, on_or_off)?,
            "COPY_STREAM" => options.copy_stream = parse(name, value, ON_OR_OFF, on_or_off)?,
            "HINTS" => loader.hints = parse(name, value, ON_OR_OFF, on_or_off)?,
            "WORKERS" => {
                let wanted = format!("a whole number from 1 to {MAX_WORKERS}");
                loader.workers = parse(name, value, &wanted, |value| number(value, MAX_WORKERS))?;
            }
            "DEPTH" => {
                let wanted = "a whole number from 1";
                loader.depth = Some(parse(name, value, wanted, |value| number(value, usize::MAX))?);
            }
            "MEMORY" => {
                let bytes = parse(name, value, "a number of bytes, KiB, MiB or GiB, such as 512MiB", bytes)?;
                loader.memory_limit =
                    Some(if own { MemoryLimit::new(bytes) } else { MemoryLimit::of_process(bytes) });
            }
            "TRACE" => {
                let (path, plan) = (Path::new(value), &loader.plan);
                let ranks = plan.world() > 1 && !value.is_empty();
                options.trace.get_or_insert_with(|| Trace::new("")).path =
                    if ranks { with_rank(path, plan.rank()) } else { path.into() };
            }
            _ => {
                let wanted = "a number of steps, or on or true, or 0, off or false";
                options.breakdown = match parse(name, value, wanted, every)? {
                    0 => Breakdown::off(),
                    every => Breakdown::every(every),
                };
            }
        }
        Ok(())
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
