//! Child processes of this program that are released together: the parent's side and the child's side.

use std::env;
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};

use twinbuf::BoxError;

/// The first argument of a child.
pub const CHILD: &str = "child";

/// A child process, killed when this is dropped.
pub struct Child {
    process: std::process::Child,
    stdin: ChildStdin,
    says: BufReader<ChildStdout>,
}

impl Child {
    /// Starts one with these arguments and this environment.
    pub fn spawn(args: &[String], env: &[(&str, String)]) -> Result<Self, BoxError> {
        let mut process = Command::new(env::current_exe()?)
            .arg(CHILD)
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let says = BufReader::new(process.stdout.take().ok_or("a child without its pipe")?);
        let stdin = process.stdin.take().ok_or("a child without its pipe")?;
        Ok(Self { process, stdin, says })
    }

    /// Waits until it [waits](wait).
    pub fn ready(&mut self) -> Result<(), BoxError> {
        self.line().map(drop)
    }

    /// Releases it.
    pub fn go(&mut self) -> io::Result<()> {
        self.stdin.write_all(b"\n")
    }

    /// Waits for its figures.
    pub fn figures<const N: usize>(&mut self) -> Result<[u64; N], BoxError> {
        let line = self.line()?;
        let figures = line.split_whitespace().map(str::parse).collect::<Result<Vec<u64>, _>>()?;
        figures.try_into().map_err(|_| format!("a child: wanted {N} numbers, found {line:?}").into())
    }

    fn line(&mut self) -> Result<String, BoxError> {
        let mut line = String::new();
        if self.says.read_line(&mut line)? == 0 {
            return Err(format!("a child ended too early: {}", self.process.wait()?).into());
        }
        Ok(line)
    }
}

impl Drop for Child {
    fn drop(&mut self) {
        // Fails if the process has ended; that is fine.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In a child: reports that it is ready, and waits for the release.
pub fn wait() -> Result<(), BoxError> {
    println!("ready");
    io::stdout().flush()?;
    io::stdin().read_line(&mut String::new())?;
    Ok(())
}

/// In a child: reports its figures.
pub fn say(figures: &[u64]) {
    let figures: Vec<String> = figures.iter().map(ToString::to_string).collect();
    println!("{}", figures.join(" "));
}
