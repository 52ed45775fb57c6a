//! fio, to measure the disk's speed.

use std::path::Path;
use std::process::Command;

use twinbuf::BoxError;

use twinbuf_bench_harness::data::MIB;

/// One run of fio, with one thread.
#[derive(Clone, Copy)]
pub struct Fio {
    pub engine: &'static str,
    /// Requests in flight.
    pub depth: u64,
    /// Past the page cache.
    pub direct: bool,
    /// Each block of the file once in random order, or sequentially.
    pub random: bool,
    /// Bytes of a request.
    pub block: u64,
    /// Bytes to read, if not the whole file.
    pub only: Option<u64>,
}

impl Fio {
    pub fn name(&self) -> String {
        let Self { engine, depth, direct, .. } = *self;
        format!("fio {engine} {depth}{}", if direct { "" } else { ", buffered" })
    }

    /// MiB/s by fio's clock, which excludes its start.
    pub fn run(&self, path: &Path) -> Result<f64, BoxError> {
        let Self { engine, depth, direct, random, block, only } = *self;
        let mut command = Command::new("fio");
        command.args(["--name=read", "--readonly", "--thread", "--output-format=terse", "--terse-version=3"]);
        command.arg(if random { "--rw=randread" } else { "--rw=read" });
        command.arg(format!("--randseed={}", fastrand::u32(..)));
        command.arg(format!("--filename={}", path.display())).arg(format!("--bs={block}"));
        command.arg(format!("--ioengine={engine}")).arg(format!("--direct={}", u8::from(direct)));
        command.arg(format!("--iodepth={depth}")).args(only.map(|bytes| format!("--io_size={bytes}")));
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stdout);
        // Fields 6 and 9 are KiB read and milliseconds ("TERSE OUTPUT" in fio(1)).
        let field = |line: &str, i: usize| line.split(';').nth(i)?.parse::<f64>().ok();
        let speed = || {
            let line = said.lines().find(|line| line.starts_with("3;"))?;
            let (error, kib, ms) = (field(line, 4)?, field(line, 5)?, field(line, 8)?);
            (error == 0.0 && kib > 0.0 && ms > 0.0).then_some(kib / 1024.0 / (ms / 1e3))
        };
        speed().ok_or_else(|| {
            let errors = String::from_utf8_lossy(&output.stderr);
            format!("wanted a line of fio's terse output, found {said:?} {errors:?}").into()
        })
    }

    /// Whether it works here: fio may be missing, or io_uring forbidden.
    pub fn works(&self, path: &Path) -> bool {
        let only = Some(self.block.max(MIB));
        Self { only, ..*self }
            .run(path)
            .inspect_err(|error| eprintln!("{}: left out: {error}", self.name()))
            .is_ok()
    }
}
