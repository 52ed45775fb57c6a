//! Switches from the environment, for a run that cannot be recompiled.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::{Path, PathBuf};

use crate::backend::Backend;
use crate::breakdown::Breakdown;
use crate::error::Error;
use crate::loader::{LoaderBuilder, MAX_HOST_DEPTH};
use crate::trace::Profile;

const OVERLAP: &str = "TWINBUF_OVERLAP";
const DEPTH: &str = "TWINBUF_DEPTH";
const HINTS: &str = "TWINBUF_HINTS";
const TRACE: &str = "TWINBUF_TRACE";
const BREAKDOWN: &str = "TWINBUF_BREAKDOWN";
const NAMES: [&str; 5] = [OVERLAP, DEPTH, HINTS, TRACE, BREAKDOWN];

/// The steps between two lines of a breakdown that is only switched on.
const EVERY: u64 = 100;

const ON_OR_OFF: &str = "1, on or true, or 0, off or false";

/// What the environment says about a loader; `None` where it says nothing.
///
/// | variable | values | in place of |
/// | --- | --- | --- |
/// | `TWINBUF_OVERLAP` | `1`, `on`, `true`; `0`, `off`, `false` | [`overlap`](LoaderBuilder::overlap) |
/// | `TWINBUF_DEPTH` | 1 to [`MAX_HOST_DEPTH`] | [`host_depth`](LoaderBuilder::host_depth) |
/// | `TWINBUF_HINTS` | as `TWINBUF_OVERLAP` | [`hints`](LoaderBuilder::hints) |
/// | `TWINBUF_TRACE` | a path; empty: no trace | [`profile`](LoaderBuilder::profile) |
/// | `TWINBUF_BREAKDOWN` | as `TWINBUF_OVERLAP`; from 2: every how many steps | [`breakdown`] |
///
/// [`breakdown`]: LoaderBuilder::breakdown
///
/// `TWINBUF_TRACE` is one path for every loader that asks the environment. Where the plan has several ranks,
/// the rank goes into the file's name: `trace.json` becomes `trace.rank3.json`. Two loaders of the same rank,
/// for training and for validation, would write one file: let only one of them ask.
///
/// `TWINBUF_BREAKDOWN` switches the overlap off, and logs no step unless the program ends its
/// steps: with `loader.breakdown().end_step()`, see [`Loader::breakdown`](crate::Loader::breakdown). A step
/// then has the loader's own phases, `load` and, to a device, `h2d`, and all the rest as `other`; the program
/// may time more.
///
/// Words may be in capitals, and spaces around a value do no harm, except in a path.
///
/// A variable that is set to anything else is an error: a switch that is ignored is worse than one that is
/// missing. So is a variable whose name differs from one of these by a slip or two (`TWINBUF_OVERLP`). Others
/// that begin with `TWINBUF_` are somebody else's, and ignored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Switches {
    /// `TWINBUF_OVERLAP`.
    pub overlap: Option<bool>,
    /// `TWINBUF_DEPTH`.
    pub depth: Option<usize>,
    /// `TWINBUF_HINTS`.
    pub hints: Option<bool>,
    /// `TWINBUF_TRACE`: the trace's file; empty for none.
    pub trace: Option<PathBuf>,
    /// `TWINBUF_BREAKDOWN`: the steps between two lines, 100 if it is only switched on; 0 for none.
    pub breakdown: Option<u64>,
}

impl Switches {
    /// What the environment of this process says.
    ///
    /// # Errors
    ///
    /// [`SwitchError`] for the first variable with which nothing can be done.
    pub fn from_env() -> Result<Self, SwitchError> {
        Self::from_vars(std::env::vars_os())
    }

    /// What these variables say, as (name, value).
    ///
    /// # Errors
    ///
    /// As [`from_env`](Switches::from_env).
    ///
    /// # Examples
    ///
    /// ```
    /// use twinbuf::Switches;
    /// let switches = Switches::from_vars([("TWINBUF_OVERLAP", "off"), ("HOME", "/root")])?;
    /// assert_eq!(switches.overlap, Some(false));
    /// assert_eq!(switches.depth, None);
    /// # Ok::<(), twinbuf::SwitchError>(())
    /// ```
    pub fn from_vars<N, V>(vars: impl IntoIterator<Item = (N, V)>) -> Result<Self, SwitchError>
    where
        N: AsRef<OsStr>,
        V: AsRef<OsStr>,
    {
        let mut switches = Self::default();
        for (name, value) in vars {
            let (name, value) = (name.as_ref().to_string_lossy(), value.as_ref());
            match &*name {
                OVERLAP => switches.overlap = Some(parse(OVERLAP, value, ON_OR_OFF, switch)?),
                HINTS => switches.hints = Some(parse(HINTS, value, ON_OR_OFF, switch)?),
                DEPTH => {
                    let wanted = format!("a whole number from 1 to {MAX_HOST_DEPTH}");
                    switches.depth = Some(parse(DEPTH, value, wanted, depth)?);
                }
                TRACE => switches.trace = Some(value.into()),
                BREAKDOWN => {
                    let wanted = "1, on or true, or 0, off or false, or every how many steps";
                    switches.breakdown = Some(parse(BREAKDOWN, value, wanted, every)?);
                }
                _ => {
                    if let Some(meant) = meant(&name) {
                        return Err(SwitchError::Unknown { name: name.into_owned(), meant });
                    }
                }
            }
        }
        Ok(switches)
    }
}

fn parse<T>(
    name: &'static str,
    value: &OsStr,
    wanted: impl Into<String>,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, SwitchError> {
    value
        .to_str()
        .and_then(|value| parse(&value.trim().to_ascii_lowercase()))
        .ok_or_else(|| SwitchError::Value { name, wanted: wanted.into(), found: value.to_os_string() })
}

fn switch(value: &str) -> Option<bool> {
    match value {
        "1" | "on" | "true" => Some(true),
        "0" | "off" | "false" => Some(false),
        _ => None,
    }
}

fn depth(value: &str) -> Option<usize> {
    value.parse().ok().filter(|depth| (1..=MAX_HOST_DEPTH).contains(depth))
}

fn every(value: &str) -> Option<u64> {
    match switch(value) {
        Some(true) => Some(EVERY),
        Some(false) => Some(0),
        None => value.parse().ok().filter(|&every| every > 0),
    }
}

/// The switch that `name` was probably meant to be.
fn meant(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_uppercase();
    // Two slips: a letter left out, put in or mistaken, or two that changed places.
    NAMES.into_iter().find(|known| strsim::osa_distance(known, &name) <= 2)
}

impl<B: Backend> LoaderBuilder<B> {
    /// Puts what the environment says ([`Switches`]) in place of what was said so far: to be called last.
    ///
    /// A trace is of as many epochs as that of [`profile`](LoaderBuilder::profile), or of the first 5 if
    /// there was none.
    ///
    /// # Errors
    ///
    /// [`Error::Switch`] for a variable with which nothing can be done.
    ///
    /// # Examples
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use twinbuf::{BoxError, Loader, Plan, Records};
    /// # fn f(data: Arc<Records>, plan: Plan) -> Result<(), BoxError> {
    /// // TWINBUF_DEPTH=4 ./train
    /// let loader = Loader::builder(data, plan).host_depth(3).from_env()?.build()?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn from_env(self) -> Result<Self, Error> {
        Ok(self.apply(Switches::from_env()?))
    }

    fn apply(mut self, switches: Switches) -> Self {
        let Switches { overlap, depth, hints, trace, breakdown } = switches;
        self.overlap = overlap.unwrap_or(self.overlap);
        self.host_depth = depth.unwrap_or(self.host_depth);
        self.hints = hints.unwrap_or(self.hints);
        if let Some(path) = trace {
            let path = if self.plan.world() > 1 { of_rank(&path, self.plan.rank()) } else { path };
            self.profile = match self.profile {
                _ if path.as_os_str().is_empty() => None,
                Some(profile) => Some(profile.at(path)),
                None => Some(Profile::chrome(path)),
            };
        }
        match breakdown {
            None => self,
            Some(0) => self.breakdown(Breakdown::off()),
            Some(every) => self.breakdown(Breakdown::every(every)),
        }
    }
}

/// `path` with the rank in the file's name, before what comes after its last dot.
fn of_rank(path: &Path, rank: u64) -> PathBuf {
    let mut end = OsString::from(format!("rank{rank}"));
    if let Some(extension) = path.extension() {
        end.push(".");
        end.push(extension);
    }
    path.with_extension(end)
}

/// Why a variable of the environment is no use.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SwitchError {
    /// A switch has a value that it does not take.
    Value {
        /// The variable.
        name: &'static str,
        /// What values it takes.
        wanted: String,
        /// Its value, which may be no UTF-8.
        found: OsString,
    },
    /// There is no such switch, but one that is almost called so.
    Unknown {
        /// The variable.
        name: String,
        /// The switch that was probably meant.
        meant: &'static str,
    },
}

impl fmt::Display for SwitchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value { name, wanted, found } => {
                write!(f, "environment: {name}: wanted {wanted}, found {found:?}")
            }
            Self::Unknown { name, meant } => {
                write!(
                    f,
                    "environment: {name} is no switch: wanted {meant}, or a name that is not so like it"
                )
            }
        }
    }
}

impl std::error::Error for SwitchError {}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{BatchPlan, BoxError, Dataset, Loader, Plan};

    struct Zeros;

    impl Dataset for Zeros {
        fn records(&self) -> u64 {
            8
        }

        fn record_bytes(&self) -> usize {
            1
        }

        fn read(&mut self, _: &BatchPlan, out: &mut [u8]) -> Result<usize, BoxError> {
            Ok(out.len())
        }
    }

    #[test]
    fn the_environment_goes_before_the_code() {
        let code = || {
            Loader::builder(Zeros, Plan::builder(8).batch(1).build().unwrap())
                .overlap(false)
                .host_depth(3)
                .hints(false)
                .profile(Profile::chrome("code.json"))
        };
        let with = |vars: &[(&str, &str)]| code().apply(Switches::from_vars(vars.iter().copied()).unwrap());
        let said =
            |b: &LoaderBuilder| (b.overlap, b.host_depth, b.hints, b.profile.clone(), b.breakdown.is_on());
        assert_eq!(said(&with(&[])), said(&code()), "nothing said, nothing changed");
        let builder = with(&[
            (OVERLAP, "1"),
            (DEPTH, "5"),
            (HINTS, "on"),
            (TRACE, "environment.json"),
            (BREAKDOWN, "1"),
        ]);
        let trace = Some(Profile::chrome("environment.json"));
        assert_eq!(said(&builder), (true, 5, true, trace, true));
        assert_eq!(with(&[(TRACE, "")]).profile, None);
        let more = code().profile(Profile::chrome("code.json").epochs(9));
        let more = more.apply(Switches { trace: Some("environment.json".into()), ..Switches::default() });
        assert_eq!(more.profile, Some(Profile::chrome("environment.json").epochs(9)), "the code's epochs");
        let on = code().breakdown(Breakdown::every(7));
        assert!(!on.apply(Switches { breakdown: Some(0), ..Switches::default() }).breakdown.is_on());
    }
    #[test]
    fn each_rank_has_a_trace_of_its_own() {
        let traced = |rank, world, path: &str| {
            let plan = Plan::builder(8).batch(1).shard(rank, world).build().unwrap();
            let switches = Switches { trace: Some(path.into()), ..Switches::default() };
            Loader::builder(Zeros, plan).apply(switches).profile
        };
        for (rank, world, path, expected) in [
            (0, 1, "trace.json", "trace.json"),
            (0, 2, "trace.json", "trace.rank0.json"),
            (3, 4, "a.folder/run.2/trace.json", "a.folder/run.2/trace.rank3.json"),
            (3, 4, "../trace", "../trace.rank3"),
            (3, 4, ".trace", ".trace.rank3"),
            (3, 4, "trace.7.json", "trace.7.rank3.json"),
        ] {
            assert_eq!(
                traced(rank, world, path),
                Some(Profile::chrome(expected)),
                "{path}, {rank} of {world}"
            );
        }
        assert_eq!(traced(3, 4, ""), None, "still no trace");
    }
}
