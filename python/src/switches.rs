//! Arguments that the environment overrides. The crate reads and checks them; this module reports them.

use std::env;
use std::ffi::OsString;

/// The value of a switch: the one of the loader with this name, or else the one of all loaders.
pub(crate) fn switch(loader: Option<&str>, switch: &str) -> Option<OsString> {
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    let own = loader.map(|name| name.chars().map(upper).collect::<String>());
    let own = own.and_then(|own| env::var_os(format!("TWINBUF_{own}_{switch}")));
    own.or_else(|| env::var_os(format!("TWINBUF_{switch}")))
}
