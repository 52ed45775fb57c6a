//! What both programs of this benchmark share: the work on a layer, and the line that each run prints.

use std::path::Path;
use std::time::{Duration, Instant};

use twinbuf::BoxError;
use twinbuf::mmap::Groups;
use twinbuf::stream::Tensors;

/// What a layer does to a number that goes through all of them. Each weight is used `repeats` times while it is in the first
/// cache, as by a matrix product.
pub fn compute(weights: &[f32], repeats: usize, mut x: f32) -> f32 {
    for block in weights.chunks(4096) {
        for _ in 0..repeats {
            let mut sums = [0.0f32; 16];
            for part in block.chunks_exact(16) {
                for (sum, weight) in sums.iter_mut().zip(part) {
                    *sum += weight * x;
                }
            }
            x = 0.5 + sums.iter().sum::<f32>() * 1e-3;
        }
    }
    x
}

/// Opens a model; its groups are its layers.
pub fn open(path: &Path) -> Result<(Tensors, Groups), BoxError> {
    let model = Tensors::open([path])?;
    let groups = model.groups_by(|name| name.split('.').nth(1)?.parse::<u32>().ok())?;
    Ok((model, groups))
}

/// A run: when it began, and what had been read from disks by then.
pub struct Run {
    start: Instant,
    read: u64,
    /// When each pass ended.
    ends: Vec<Duration>,
    /// Bytes from disks up to there.
    reads: Vec<u64>,
}

impl Run {
    pub fn start() -> Self {
        Self { start: Instant::now(), read: read_bytes(), ends: Vec::new(), reads: Vec::new() }
    }

    pub fn end_of_pass(&mut self) {
        self.ends.push(self.start.elapsed());
        self.reads.push(read_bytes() - self.read);
    }

    /// Prints `way,wall_s,first_pass_s,cpu_s,disk_mib,last_pass_mib,result`. The wall time ends with the last pass.
    pub fn print(&self, way: &str, result: u32) {
        let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let seconds = |end: Option<&Duration>| end.map_or(0.0, Duration::as_secs_f64);
        let (all, before) = match *self.reads {
            [.., before, all] => (all, before),
            [all] => (all, 0),
            [] => (0, 0),
        };
        println!(
            "{way},{:.4},{:.4},{:.2},{:.1},{:.1},{result:08x}",
            seconds(self.ends.last()),
            seconds(self.ends.first()),
            cpu_seconds(),
            mib(all),
            mib(all - before)
        );
    }
}

/// Bytes that this process has had read from disks.
fn read_bytes() -> u64 {
    let io = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let line = io.lines().find_map(|line| line.strip_prefix("read_bytes: "));
    line.and_then(|bytes| bytes.parse().ok()).unwrap_or(0)
}

/// Processor time of all threads so far: fields 14 and 15 of `proc_pid_stat(5)`, in hundredths of a second.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let fields = stat.rsplit(") ").next().unwrap_or("").split(' ');
    fields.skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}
