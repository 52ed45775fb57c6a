//! Reports as text.

use std::fmt;
use std::time::Duration;
use twinbuf_mmap::ReadStats;

use super::log::StageTimes;
use super::report::{EpochTimes, Kind, Report, Verdict};

/// Epochs that are printed.
const ROWS: usize = 8;

pub(super) fn count(many: u64, one: &str, more: &str) -> String {
    format!("{many} {}", if many == 1 { one } else { more })
}

/// A number with four digits that count.
fn digits(value: f64) -> String {
    let decimals = match value {
        ..10.0 => 3,
        ..100.0 => 2,
        ..1000.0 => 1,
        _ => 0,
    };
    format!("{value:.decimals$}")
}

/// A time in the unit that gives it digits: microseconds, milliseconds or seconds.
pub(super) fn time(time: Duration) -> String {
    match time.as_secs_f64() {
        0.0 => "0".to_string(),
        s @ ..1e-3 => format!("{} µs", digits(s * 1e6)),
        s @ ..1.0 => format!("{} ms", digits(s * 1e3)),
        s => format!("{} s", digits(s)),
    }
}

/// A number of bytes, to read.
#[allow(clippy::cast_precision_loss)] // not to calculate with
fn size(bytes: u64) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    match units.iter().find(|(shift, _)| bytes >> shift > 0) {
        Some((shift, unit)) => format!("{:.1} {unit}", bytes as f64 / (1_u64 << shift) as f64),
        None => format!("{bytes} B"),
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}

/// Prints a few lines of text: the times of both stages, the verdict, and the advice.
impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.kind == Kind::Rounds {
            write!(f, "{}", count(self.batches, "round", "rounds"))?;
        } else {
            let epochs = count(self.epochs, "epoch", "epochs");
            let batches = count(self.batches, "batch", "batches");
            write!(f, "{epochs}, {batches}")?;
            if self.kind != Kind::Items {
                write!(f, ", {}", size(self.bytes))?;
            }
            if self.io_calls > 0 {
                write!(f, ", {}", count(self.io_calls, "I/O call", "I/O calls"))?;
            }
        }
        write!(f, " in {}, {:.1} a second", time(self.wall), self.batches_per_second())?;
        match self.au() {
            Some(au) => writeln!(f, ", AU {au:.3}")?,
            None => writeln!(f)?,
        }
        writeln!(f, "{:<9} {:>10} {:>10}", "stage", "busy", "waiting")?;
        let row = |f: &mut fmt::Formatter<'_>, name, stage: StageTimes| {
            writeln!(f, "{name:<9} {:>10} {:>10}", time(stage.busy), time(stage.waiting))
        };
        write!(f, "{:<9} {:>10} {:>10}", self.loads_name(), time(self.read.busy), time(self.read.waiting))?;
        match self.read_rate() {
            rate if rate > 0.0 => writeln!(f, "    at {} GB/s", digits(rate / 1e9))?,
            _ => writeln!(f)?,
        }
        if !self.transform.is_zero() {
            writeln!(f, "transform {:>10}", time(self.transform))?;
        }
        if self.transfer_bytes > 0 {
            let rate = digits(self.transfer_rate() / 1e9);
            writeln!(f, "transfer  {:>10} {:>10}    at {rate} GB/s", time(self.transfer), "")?;
        }
        if !self.device.is_zero() {
            writeln!(f, "device    {:>10}    of the caller's waiting", time(self.device))?;
        }
        row(f, "train", self.train)?;
        if self.by_epoch.len() > 1 {
            writeln!(
                f,
                "{:<9} {:>10} {:>10} {:>10} {:>10} {:>8}",
                "epoch", "in all", "load", "train", "waiting", "batches"
            )?;
            for row in &self.by_epoch[self.by_epoch.len().saturating_sub(ROWS)..] {
                let EpochTimes { epoch, batches, wall, load, train, .. } = *row;
                let [wall, load, busy, waiting] = [wall, load, train.busy, train.waiting].map(time);
                writeln!(f, "{epoch:<9} {wall:>10} {load:>10} {busy:>10} {waiting:>10} {batches:>8}")?;
            }
        }
        for choice in &self.choices {
            writeln!(f, "files: {choice}")?;
        }
        if !self.choices.is_empty() {
            let ReadStats { bytes, disk, hinted, hint_time, .. } = self.reading;
            let memory = bytes.saturating_sub(disk);
            write!(f, "read: {} from disk, {} from memory", size(disk), size(memory))?;
            writeln!(f, "; {} hinted in {}", size(hinted), time(hint_time))?;
        }
        write!(f, "{}. ", self.verdict())?;
        f.write_str(&self.advice())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_time_has_digits() {
        for (nanos, wanted) in [
            (0, "0"),
            (7, "0.007 µs"),
            (12_346, "12.35 µs"),
            (123_456, "123.5 µs"),
            (1_234_567, "1.235 ms"),
            (999_400_000, "999.4 ms"),
            (12_345_678_901, "12.35 s"),
            (123_456_000_000_000, "123456 s"),
        ] {
            assert_eq!(time(Duration::from_nanos(nanos)), wanted);
        }
        assert_eq!(
            [0, 1023, 1024, 3 << 19, 5 << 30].map(size),
            ["0 B", "1023 B", "1.0 KiB", "1.5 MiB", "5.0 GiB"]
        );
    }
}
