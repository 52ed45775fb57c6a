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

/// Runs a test of this program in a process of its own, with `variable` set to `value`. It must print that it is done.
/// Returns what it printed.
#[allow(dead_code)]
pub(crate) fn again(test: &str, variable: &str, value: &str) -> Option<String> {
    let mut child = this_program()?;
    let output = child.env(variable, value).args(["--exact", test, "--nocapture"]).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let done = output.status.success() && said.contains(&format!("{variable} is done"));
    assert!(done, "{variable} {value}: {said}");
    Some(said)
}
