//! Finds the fastest loader options for these files: measures each one and prints the best as lines of a program.

use serde::Serialize;
use std::fmt::Write as _;
use twinbuf::Shuffle;
use twinbuf::loader::LoaderBuilder;
use twinbuf::mmap::ReadMode;

/// Options that differ from the defaults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Setting {
    /// `None`: the loader chooses by the files' size.
    pub(crate) mode: Option<ReadMode>,
    pub(crate) workers: usize,
    pub(crate) hints: Hints,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hints {
    Default,
    Off,
    /// Mebibytes of the prefetch window.
    Window(u64),
}

impl Setting {
    pub(crate) const DEFAULT: Self = Self { mode: None, workers: 1, hints: Hints::Default };

    /// All settings worth a measurement, the defaults first; also the other read mode, if the system has it.
    pub(crate) fn all(shuffle: Shuffle, other: Option<ReadMode>, processors: usize) -> Vec<Self> {
        let mut all = vec![Self::DEFAULT];
        // For sequential reads the system reads ahead, and the loader sends no hints.
        if shuffle != Shuffle::None {
            let hints = [Hints::Off, Hints::Window(8), Hints::Window(128)];
            all.extend(hints.map(|hints| Self { hints, ..Self::DEFAULT }));
        }
        for mode in [None, other].into_iter().take(if other.is_some() { 2 } else { 1 }) {
            for workers in [1, 2, 4].into_iter().filter(|&workers| workers <= processors) {
                let setting = Self { mode, workers, hints: Hints::Default };
                all.extend((setting != Self::DEFAULT).then_some(setting));
            }
        }
        all
    }

    pub(crate) fn apply(self, builder: LoaderBuilder) -> LoaderBuilder {
        let builder = if self.workers > 1 { builder.workers(self.workers) } else { builder };
        let builder = builder.read_mode(self.mode.unwrap_or_default());
        match self.hints {
            Hints::Default => builder,
            Hints::Off => builder.hints(false),
            Hints::Window(mib) => builder.hint_window(mib << 20),
        }
    }

    /// The calls that build the loader in a program.
    fn calls(self) -> String {
        let mut builder = String::new();
        if let Some(mode) = self.mode {
            let _ = write!(builder, ".read_mode(ReadMode::{mode:?})");
        }
        if self.workers > 1 {
            let _ = write!(builder, ".workers({})", self.workers);
        }
        match self.hints {
            Hints::Default => {}
            Hints::Off => builder.push_str(".hints(false)"),
            Hints::Window(mib) => {
                let _ = write!(builder, ".hint_window({mib} << 20)");
            }
        }
        builder
    }

    fn name(self) -> String {
        let calls = self.calls();
        if calls.is_empty() { "the defaults".to_string() } else { calls }
    }
}

/// The measurement of the options, in seconds.
#[derive(Serialize)]
pub(crate) struct Found {
    options: Vec<Row>,
    /// The lines of a program.
    pub(crate) best: Vec<String>,
}

#[derive(Serialize)]
struct Row {
    name: String,
    median_s: f64,
    least_s: f64,
    most_s: f64,
}

/// The best setting must be this much faster than the defaults, because runs vary by about the same.
const WORTH_IT: f64 = 1.05;

impl Found {
    /// Chooses from the runs of each setting, each sorted, the defaults first. `open` is the call that opens the files.
    pub(crate) fn new(runs: &[(Setting, Vec<f64>)], open: &str, plan: &str) -> Self {
        let median = |runs: &[f64]| runs.get(runs.len() / 2).copied().unwrap_or(f64::MAX);
        let rows = runs.iter().map(|(setting, runs)| Row {
            name: setting.name(),
            median_s: median(runs),
            least_s: runs.first().copied().unwrap_or_default(),
            most_s: runs.last().copied().unwrap_or_default(),
        });
        let defaults = runs.first().map_or(f64::MAX, |(_, runs)| median(runs));
        let fastest = runs.iter().min_by(|a, b| median(&a.1).total_cmp(&median(&b.1)));
        let best = match fastest {
            Some((setting, runs)) if median(runs) * WORTH_IT < defaults => *setting,
            _ => Setting::DEFAULT,
        };
        let builder = best.calls();
        let lines = [
            format!("let data = {open};"),
            format!("let plan = {plan};"),
            format!("let mut loader = Loader::builder(data, plan){builder}.build()?;"),
        ];
        Self { options: rows.collect(), best: lines.into() }
    }

    pub(crate) fn write(&self, out: &mut String) -> std::fmt::Result {
        writeln!(out, "Options, overlapped:")?;
        for Row { name, median_s, least_s, most_s } in &self.options {
            let [median, least, most] = [median_s, least_s, most_s].map(|seconds| seconds * 1000.0);
            writeln!(out, "  {name:<28} {median:>10.2} ms ({least:.2} to {most:.2})")?;
        }
        writeln!(out, "Lines that measured best:")?;
        self.best.iter().try_for_each(|line| writeln!(out, "    {line}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_is_clearly_faster_replaces_the_defaults() {
        let direct = Setting { mode: Some(ReadMode::Direct), workers: 2, hints: Hints::Default };
        for (faster, builder) in [
            (0.96, "Loader::builder(data, plan).build()?"),
            (0.5, "plan).read_mode(ReadMode::Direct).workers(2).build()?"),
        ] {
            let runs = [(Setting::DEFAULT, vec![0.9, 1.0, 3.0]), (direct, vec![0.1, faster, 9.0])];
            let found = Found::new(&runs, "open()?", "Plan::builder(data.len()).build()?");
            assert!(found.best[2].contains(builder), "{:?}", found.best);
            assert_eq!(found.best[0], "let data = open()?;");
        }
    }

    #[test]
    fn the_other_mode_of_files_larger_than_memory_is_the_page_cache() {
        let pread = Setting { mode: Some(ReadMode::Pread), ..Setting::DEFAULT };
        assert_eq!(Setting::all(Shuffle::None, pread.mode, 1), [Setting::DEFAULT, pread]);
        let runs = [(Setting::DEFAULT, vec![1.0]), (pread, vec![0.5])];
        let found = Found::new(&runs, "open()?", "");
        assert_eq!(
            found.options.iter().map(|row| &row.name[..]).collect::<Vec<_>>(),
            ["the defaults", ".read_mode(ReadMode::Pread)"]
        );
        assert!(found.best[2].contains(".read_mode(ReadMode::Pread)"), "{:?}", found.best);
    }

    #[test]
    fn hints_are_measured_only_where_the_loader_makes_some() {
        assert_eq!(Setting::all(Shuffle::None, None, 1), [Setting::DEFAULT]);
        assert_eq!(Setting::all(Shuffle::None, Some(ReadMode::Direct), 2).len(), 4);
        assert_eq!(Setting::all(Shuffle::Full, Some(ReadMode::Direct), 4).len(), 4 + 2 + 3);
    }
}
