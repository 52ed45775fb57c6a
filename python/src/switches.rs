//! Arguments that the environment overrides. The crate reads and checks them; this module reports them.

use std::env;

/// The variable of a switch that is set: the one of the loader with this name, or else the one of all loaders.
pub(crate) fn switch(loader: Option<&str>, switch: &str) -> Option<String> {
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    let own = loader.map(|name| name.chars().map(upper).collect::<String>());
    let names =
        own.map(|own| format!("TWINBUF_{own}_{switch}")).into_iter().chain([format!("TWINBUF_{switch}")]);
    names.into_iter().find(|name| env::var_os(name).is_some())
}

/// Whether a switch that is set is on. A value that is not one of the crate's is refused by the crate.
pub(crate) fn is_on(loader: Option<&str>, name: &str) -> Option<bool> {
    let value = env::var(switch(loader, name)?).ok()?;
    Some(!matches!(&*value.trim().to_ascii_lowercase(), "0" | "off" | "false"))
}
