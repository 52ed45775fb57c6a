//! What the environment sets in place of arguments. The crate reads and checks it; this tells of it.

use std::env;
use std::ffi::OsString;

/// The value of a switch of all loaders, or of the loader of this name, which comes first.
pub(crate) fn switch(loader: Option<&str>, switch: &str) -> Option<OsString> {
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    let own = loader.map(|name| name.chars().map(upper).collect::<String>());
    let own = own.and_then(|own| env::var_os(format!("TWINBUF_{own}_{switch}")));
    own.or_else(|| env::var_os(format!("TWINBUF_{switch}")))
}

/// The slots of each worker: those of the environment, where it sets them. The crate has refused what is no number.
pub(crate) fn depth(loader: Option<&str>, argument: usize) -> usize {
    let set = switch(loader, "DEPTH").and_then(|value| value.to_str()?.trim().parse().ok());
    set.unwrap_or(argument)
}

/// The workers, as [`depth`]: one where nothing is read ahead.
pub(crate) fn workers(loader: Option<&str>, argument: usize, overlap: bool) -> usize {
    let word =
        |name| switch(loader, name).and_then(|value| Some(value.to_str()?.trim().to_ascii_lowercase()));
    let off = |value: &String| matches!(value.as_str(), "0" | "off" | "false");
    let overlap = word("OVERLAP").map_or(overlap, |value| !off(&value));
    let breakdown = word("BREAKDOWN").is_some_and(|value| !off(&value));
    let set = word("WORKERS").and_then(|value| value.parse().ok());
    if overlap && !breakdown { set.unwrap_or(argument) } else { 1 }
}
