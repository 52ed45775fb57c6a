//! Processes of this program itself, which start together: the parent's side and theirs.

use std::env;
use std::io::{self, BufRead as _, BufReader, PipeReader, PipeWriter, Read as _, Write as _};
use std::process::{ChildStdout, Command, Stdio};

use twinbuf::BoxError;

/// The first argument of a child.
pub const CHILD: &str = "child";

/// Holds the children back until it is dropped.
pub struct Gate {
    children: PipeReader,
    /// As long as this end is open, those who read from the other one wait.
    _ours: PipeWriter,
}

impl Gate {
    pub fn new() -> io::Result<Self> {
        let (children, ours) = io::pipe()?;
        Ok(Self { children, _ours: ours })
    }
}

/// A child, killed when this is dropped.
pub struct Child {
    process: std::process::Child,
    says: BufReader<ChildStdout>,
}

impl Child {
    /// Starts one with these arguments and this environment; it waits at the gate.
    pub fn spawn(gate: &Gate, args: &[String], env: &[(&str, String)]) -> Result<Self, BoxError> {
        let mut process = Command::new(env::current_exe()?)
            .arg(CHILD)
            .args(args)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(gate.children.try_clone()?)
            .stdout(Stdio::piped())
            .spawn()?;
        let says = BufReader::new(process.stdout.take().ok_or("a child without its pipe")?);
        Ok(Self { process, says })
    }

    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Waits until it is ready to pass the gate.
    pub fn ready(&mut self) -> Result<(), BoxError> {
        self.line().map(drop)
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
        // Fails if it has ended, which is as well.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// In a child: says that it is ready, and waits at the gate.
pub fn wait() -> Result<(), BoxError> {
    println!("ready");
    io::stdout().flush()?;
    io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

/// In a child: what it found.
pub fn say(figures: &[u64]) {
    let figures: Vec<String> = figures.iter().map(ToString::to_string).collect();
    println!("{}", figures.join(" "));
}
