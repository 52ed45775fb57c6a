//! What tests ask of the system that they run on.

use std::process::{Command, Stdio};

/// This program, to be started again. `None`, with a printed reason, where that cannot be done: an emulator runs
/// programs of another processor, but the kernel starts none of them unless it was told how (`binfmt_misc`).
pub(crate) fn this_program() -> Option<Command> {
    let path = std::env::current_exe().unwrap();
    let mut trial = Command::new(&path);
    match trial.arg("--list").stdout(Stdio::null()).stderr(Stdio::null()).status() {
        Ok(status) if status.success() => return Some(Command::new(path)),
        Ok(status) => eprintln!("not checked: this program cannot start itself: {status}"),
        Err(error) => eprintln!("not checked: this program cannot start itself: {error}"),
    }
    None
}
