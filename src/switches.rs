//! Switches from the environment, for a run that cannot be recompiled.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::path::PathBuf;

use crate::backend::Backend;
use crate::breakdown::Breakdown;
use crate::error::Error;
use crate::loader::{LoaderBuilder, MAX_HOST_DEPTH};
use crate::trace::Profile;

/// What all the switches' names begin with.
const PREFIX: &str = "TWINBUF_";

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
/// | `TWINBUF_DEPTH` | 1 to 8 | [`host_depth`](LoaderBuilder::host_depth) |
/// | `TWINBUF_HINTS` | as `TWINBUF_OVERLAP` | [`hints`](LoaderBuilder::hints) |
/// | `TWINBUF_TRACE` | a path; empty: no trace | [`profile`](LoaderBuilder::profile) |
/// | `TWINBUF_BREAKDOWN` | as `TWINBUF_OVERLAP`; from 2: every so many steps | [`breakdown`](LoaderBuilder::breakdown) |
///
/// Words may be in capitals, and spaces around a value do no harm, except in a path.
///
/// A variable that is set to anything else is an error: a switch that is ignored is worse than one that is missing.
/// So is a variable whose name differs from one of these by a slip or two (`TWINBUF_OVERLP`). Others that begin
/// with `TWINBUF_` are somebody else's, and ignored.
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
                DEPTH => switches.depth = Some(parse(DEPTH, value, "a whole number from 1 to 8", depth)?),
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
    wanted: &'static str,
    parse: impl FnOnce(&str) -> Option<T>,
) -> Result<T, SwitchError> {
    value
        .to_str()
        .and_then(|value| parse(&value.trim().to_ascii_lowercase()))
        .ok_or_else(|| SwitchError::Value { name, wanted, found: value.to_os_string() })
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
    // Two slips: a letter left out, put in or mistaken, or two that changed places.
    let near = |known: &&str| strsim::osa_distance(known, &name.to_ascii_uppercase()) <= 2;
    name.get(..PREFIX.len())
        .filter(|prefix| prefix.eq_ignore_ascii_case(PREFIX))
        .and_then(|_| NAMES.into_iter().find(near))
}

impl<B: Backend> LoaderBuilder<B> {
    /// Puts what the environment says ([`Switches`]) in place of what was said here so far: to be called last.
    ///
    /// A trace is of the first 5 epochs.
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
    /// let loader = Loader::builder(data, plan).host_depth(3).from_env()?.build()?; // TWINBUF_DEPTH=4 ./train
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
            self.profile = (!path.as_os_str().is_empty()).then(|| Profile::chrome(path));
        }
        match breakdown {
            None => self,
            Some(0) => self.breakdown(Breakdown::off()),
            Some(every) => self.breakdown(Breakdown::every(every)),
        }
    }
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
        wanted: &'static str,
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
        let on = code().breakdown(Breakdown::every(7));
        assert!(!on.apply(Switches { breakdown: Some(0), ..Switches::default() }).breakdown.is_on());
    }
}
