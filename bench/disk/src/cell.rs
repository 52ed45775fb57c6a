//! One cell of the scaling grid: cache, batch size, depth and ratio, with one sample per round.

use std::time::Duration;

use twinbuf_bench_harness::data::MIB;
use twinbuf_bench_harness::report::{median, quartiles};

pub const DEPTHS: [usize; 3] = [2, 3, 4];
/// Compute / load.
pub const RATIOS: [f64; 5] = [0.1, 0.3, 1.0, 3.0, 10.0];
pub const CACHES: [&str; 2] = ["warm", "cold"];

/// Load and compute must each take at least this long per batch to be overlapped without loss.
const COUNTS: Duration = Duration::from_millis(1);

/// A place in the grid.
pub struct Cell {
    pub cache: &'static str,
    pub batch: u64,
    pub depth: usize,
    pub ratio: f64,
    /// One sample per round.
    pub samples: Vec<Sample>,
}

/// One epoch, and the times that neighboring runs predict for it, in seconds.
pub struct Sample {
    pub batches: u64,
    /// The load of all batches: without overlap, for a caller that does not compute.
    pub load: f64,
    /// Compute per batch.
    pub compute: f64,
    pub wall: f64,
    /// The longer of the total load and the total compute, plus what nothing can overlap with: the first load or the last
    /// compute.
    pub ideal: f64,
}

impl Cell {
    pub fn median(&self, of: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(of))
    }

    /// The quartiles, over the rounds, of the ratio of the wall time to the ideal of the same round.
    pub fn over_ideal(&self) -> [f64; 3] {
        quartiles(self.samples.iter().map(|s| s.wall / s.ideal))
    }

    pub fn load(&self) -> f64 {
        self.median(|s| s.load / s.batches as f64)
    }

    /// Whether neither load nor compute is too short to be overlapped without loss.
    pub fn counts(&self) -> bool {
        self.load().min(self.median(|s| s.compute)) >= COUNTS.as_secs_f64()
    }

    pub fn name(&self) -> String {
        format!("{}, {}, depth {}, ratio {}", self.cache, size(self.batch), self.depth, self.ratio)
    }
}

pub fn size(bytes: u64) -> String {
    if bytes < MIB { format!("{} KiB", bytes >> 10) } else { format!("{} MiB", bytes >> 20) }
}
