//! The phases of the steps of training, or of the batches of validation: their times, and the table of them.

use std::collections::VecDeque;
use std::fmt::{self, Write as _};
use std::time::{Duration, Instant};

/// How many steps back the medians reach. The limit keeps memory from growing with the run.
const RECENT: usize = 1024;

/// The steps of training or of validation.
#[derive(Default)]
pub(super) struct Table {
    pub(super) steps: u64,
    /// In the order of their first use.
    phases: Vec<Phase>,
    /// When the current step began: with its first phase.
    pub(super) begun: Option<Instant>,
    /// What no phase accounts for.
    other: Times,
    total: Times,
}

struct Phase {
    name: &'static str,
    /// Of the current step.
    now: Option<Duration>,
    now_runs: u64,
    /// How often it ran, in all steps: once for each micro-step.
    runs: u64,
    times: Times,
}

/// The times of one phase.
#[derive(Default)]
struct Times {
    count: u64,
    sum: Duration,
    /// The last [`RECENT`] ones, the oldest first.
    recent: VecDeque<Duration>,
}

impl Table {
    /// The current step began at `start`, or before.
    pub(super) fn begin(&mut self, start: Instant) {
        self.begun = Some(self.begun.map_or(start, |begun| begun.min(start)));
    }

    /// Counts a time of the current step, or of the step that began at `start`.
    pub(super) fn count(&mut self, name: &'static str, start: Instant, time: Duration) {
        self.begin(start);
        let phase = match self.phases.iter_mut().position(|phase| phase.name == name) {
            Some(at) => &mut self.phases[at],
            None => {
                self.phases.push(Phase { name, now: None, now_runs: 0, runs: 0, times: Times::default() });
                let Some(phase) = self.phases.last_mut() else { unreachable!("just pushed") };
                phase
            }
        };
        phase.now = Some(phase.now.unwrap_or_default().saturating_add(time));
        phase.now_runs += 1;
    }

    /// Discards the current step.
    pub(super) fn leave_step(&mut self) {
        self.begun = None;
        self.phases.iter_mut().for_each(|phase| (phase.now, phase.now_runs) = (None, 0));
    }

    /// The step is over; writes its phases to `line`.
    pub(super) fn end_step(&mut self, now: Instant, mut line: Option<&mut String>) {
        self.steps += 1;
        let total = self.begun.take().map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun));
        let mut known = Duration::ZERO;
        for phase in &mut self.phases {
            let Some(time) = phase.now.take() else { continue };
            phase.runs += std::mem::take(&mut phase.now_runs);
            phase.times.add(time);
            known = known.saturating_add(time);
            write_ms(line.as_deref_mut(), phase.name, time);
        }
        let other = total.saturating_sub(known);
        self.other.add(other);
        self.total.add(total);
        write_ms(line.as_deref_mut(), "other", other);
        write_ms(line.as_deref_mut(), "total", total);
        if let Some(line) = line {
            line.push_str(" ms");
        }
    }
}

fn write_ms(line: Option<&mut String>, name: &str, time: Duration) {
    if let Some(line) = line {
        // Writing to a `String` does not fail.
        let _ = write!(line, " {name} {:.3}", ms(time));
    }
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

impl Times {
    fn add(&mut self, time: Duration) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(time);
        self.count += 1;
        self.sum = self.sum.saturating_add(time);
    }

    fn mean_ms(&self) -> f64 {
        ms(self.sum) / self.count.max(1) as f64
    }

    fn median(&self) -> Duration {
        let mut sorted = Vec::from(self.recent.clone());
        sorted.sort_unstable();
        match sorted.len() {
            0 => Duration::ZERO,
            n if n % 2 == 1 => sorted[n / 2],
            n => sorted[n / 2 - 1].saturating_add(sorted[n / 2]) / 2,
        }
    }
}

pub(super) struct Summary<'t>(pub(super) &'static str, pub(super) &'static str, pub(super) &'t Table);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(what, of, table) = self;
        let sum = table.total.sum;
        write!(f, "{what}: {} {of}, {:.3} s", table.steps, sum.as_secs_f64())?;
        write!(f, "\nphase               mean ms  median ms   share")?;
        // With gradients accumulated over micro-steps, a phase runs several times in a step.
        let micro = table.phases.iter().any(|phase| phase.runs > phase.times.count);
        if micro {
            write!(f, "  runs a step    each ms")?;
        }
        let phases = table.phases.iter().map(|phase| (phase.name, &phase.times, phase.runs));
        for (name, times, runs) in phases.chain([("other", &table.other, 0), ("total", &table.total, 0)]) {
            let share = if sum.is_zero() { 0.0 } else { times.sum.as_secs_f64() / sum.as_secs_f64() };
            write!(
                f,
                "\n{name:<16} {:>10.3} {:>10.3} {:>5.1} %",
                times.mean_ms(),
                ms(times.median()),
                share * 100.0
            )?;
            if micro && runs > 0 {
                let (each, runs) = (ms(times.sum) / runs as f64, runs as f64 / times.count.max(1) as f64);
                write!(f, " {runs:>12.1} {each:>10.3}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians_of_the_last_times_only() {
        let mut times = Times::default();
        assert_eq!(times.median(), Duration::ZERO);
        for (add, median) in [(30, 30), (10, 20), (20, 20), (40, 25)] {
            times.add(Duration::from_nanos(add));
            assert_eq!(times.median(), Duration::from_nanos(median));
        }
        for _ in 0..RECENT {
            times.add(Duration::from_nanos(7));
        }
        assert_eq!(times.median(), Duration::from_nanos(7));
        assert_eq!(times.recent.len(), RECENT);
        assert_eq!(times.count, RECENT as u64 + 4);
        assert_eq!(times.sum, Duration::from_nanos(100 + 7 * RECENT as u64));
    }

    #[test]
    fn a_mean_of_more_times_than_32_bits_count() {
        let before = u64::from(u32::MAX);
        let mut times = Times { count: before, sum: Duration::from_secs(before), ..Times::default() };
        for _ in 0..3 {
            times.add(Duration::from_secs(1));
            assert!((times.mean_ms() - 1000.0).abs() < 1e-6, "{}", times.mean_ms());
        }
    }

    /// Times are fixed, because the table is compared.
    #[test]
    fn the_table() {
        let ms = Duration::from_millis;
        let (at, mut table) = (Instant::now(), Table::default());
        for (step, expected) in [
            " load 10.000 other 90.000 total 100.000 ms",
            " load 20.000 forward 50.000 other 30.000 total 100.000 ms",
            " load 30.000 other 70.000 total 100.000 ms",
            " load 40.000 forward 50.000 other 10.000 total 100.000 ms",
        ]
        .into_iter()
        .enumerate()
        {
            table.count("load", at, ms(10 * (step as u64 + 1)));
            if step % 2 == 1 {
                table.count("forward", at, ms(50));
            }
            let mut line = String::new();
            table.end_step(at + ms(100), Some(&mut line));
            assert_eq!(line, expected);
        }
        let text = Summary("training", "steps", &table).to_string();
        assert_eq!(
            text,
            "\
training: 4 steps, 0.400 s
phase               mean ms  median ms   share
load                 25.000     25.000  25.0 %
forward              50.000     50.000  25.0 %
other                50.000     50.000  50.0 %
total               100.000    100.000 100.0 %"
        );
    }

    #[test]
    fn a_phase_of_micro_steps_is_shown_for_each_of_them() {
        let ms = Duration::from_millis;
        let (at, mut table) = (Instant::now(), Table::default());
        let mut line = String::new();
        for _ in 0..2 {
            for micro in 0..4 {
                table.count("load", at, ms(1));
                table.count("forward", at, ms(10 + micro));
            }
            table.count("optimizer", at, ms(8));
            line.clear();
            table.end_step(at + ms(60), Some(&mut line));
        }
        assert_eq!(line, " load 4.000 forward 46.000 optimizer 8.000 other 2.000 total 60.000 ms");
        let text = Summary("training", "steps", &table).to_string();
        assert_eq!(
            text,
            "\
training: 2 steps, 0.120 s
phase               mean ms  median ms   share  runs a step    each ms
load                  4.000      4.000   6.7 %          4.0      1.000
forward              46.000     46.000  76.7 %          4.0     11.500
optimizer             8.000      8.000  13.3 %          1.0      8.000
other                 2.000      2.000   3.3 %
total                60.000     60.000 100.0 %"
        );
    }
}
