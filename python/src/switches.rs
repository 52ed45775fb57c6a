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
