//! Whether what a test leaves in the page cache can be taken out.

use std::path::Path;
use std::process::Command;

/// Whether the folder's file system is in memory; prints it. Such file systems keep their pages in any case.
pub(crate) fn lives_in_memory(folder: &Path) -> bool {
    let output = Command::new("stat").args(["-f", "-c", "%T"]).arg(folder).output().unwrap();
    let lives = matches!(String::from_utf8_lossy(&output.stdout).trim(), "tmpfs" | "ramfs");
    if lives {
        eprintln!("not checked: {folder:?} lives in memory");
    }
    lives
}
