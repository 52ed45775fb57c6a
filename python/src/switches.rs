//! Arguments that the environment overrides. The crate reads and checks them; this module reports them.

use std::env;

/// Returns the variable that sets a switch, if there is one: that of the loader with this name, or else that of all
/// loaders.
pub(crate) fn switch(loader: Option<&str>, switch: &str) -> Option<String> {
    let upper = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_uppercase() } else { '_' };
    let own = loader.map(|name| name.chars().map(upper).chain(['_']).collect());
    let names = own.into_iter().chain([String::new()]).map(|own| format!("TWINBUF_{own}{switch}"));
    names.into_iter().find(|name| env::var_os(name).is_some())
}

/// Whether a switch is on. `None` if no variable sets it. The crate refuses other values than on and off.
pub(crate) fn is_on(loader: Option<&str>, name: &str) -> Option<bool> {
    let value = env::var(switch(loader, name)?).ok()?;
    Some(!matches!(&*value.trim().to_ascii_lowercase(), "0" | "off" | "false"))
}
