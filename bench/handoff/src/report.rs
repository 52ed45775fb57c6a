//! The output: a table for people, and a CSV for `bench/tables.py` and `bench/pictures.py`.

use std::fmt::Write as _;

use crate::measure::{Measure, Role, Sample, Subject, Wait};
use crate::stats::{median, quartiles};

/// Keeps the subjects whose id is `wanted`, and the floors of their groups.
pub fn select(subjects: &mut Vec<Subject>, wanted: impl Fn(&str) -> bool) {
    let groups: Vec<_> =
        subjects.iter().filter(|subject| wanted(&subject.id())).map(|s| (s.wait, s.measure)).collect();
    subjects.retain(|subject| {
        let floor = subject.role == Role::Floor && groups.contains(&(subject.wait, subject.measure));
        floor || wanted(&subject.id())
    });
}

/// The figures of one subject.
struct Row<'a> {
    subject: &'a Subject,
    min: f64,
    median: f64,
    /// The quartiles, over the rounds, of the ratio to the floor of the same round: lower, median, upper.
    ratio: Option<[f64; 3]>,
    cpu: f64,
    /// Whether no other way to use the same library by value was faster.
    best: bool,
}

pub struct Report<'a> {
    head: String,
    rows: Vec<Row<'a>>,
}

impl<'a> Report<'a> {
    pub fn new(subjects: &'a [Subject], head: String) -> Self {
        let value = |sample: &Sample| sample.value;
        let floor = |subject: &Subject| {
            subjects.iter().find(|other| {
                other.role == Role::Floor && (other.wait, other.measure) == (subject.wait, subject.measure)
            })
        };
        let mut rows: Vec<Row> = subjects
            .iter()
            .map(|subject| Row {
                subject,
                min: subject.samples.iter().map(value).fold(f64::INFINITY, f64::min),
                median: median(subject.samples.iter().map(value)),
                ratio: floor(subject).map(|floor| {
                    quartiles(
                        subject
                            .samples
                            .iter()
                            .zip(&floor.samples)
                            .map(|(ours, theirs)| ours.value / theirs.value),
                    )
                }),
                cpu: median(subject.samples.iter().map(|sample| sample.cpu)),
                best: true,
            })
            .collect();
        let place = |row: &Row| {
            let order =
                (Wait::ALL.iter().position(|&w| w == row.subject.wait), position(row.subject.measure));
            (order, row.subject.role != Role::Floor)
        };
        rows.sort_by(|a, b| place(a).cmp(&place(b)).then(a.min.total_cmp(&b.min)));
        // Sorted by the minimum: the first by-value way of a library is its best.
        let mut seen = Vec::new();
        for row in &mut rows {
            let Subject { wait, measure, name, way, .. } = *row.subject;
            let by_value = row.subject.role == Role::Peer && !way.starts_with("in place");
            row.best = !by_value || !seen.contains(&(wait, measure, name));
            if by_value {
                seen.push((wait, measure, name));
            }
        }
        Self { head, rows }
    }

    /// The rows of each group that is not empty, the best ways only.
    fn groups(&self) -> impl Iterator<Item = (Wait, Measure, Vec<&Row<'a>>)> {
        let all = Measure::ALL.into_iter().flat_map(|measure| Wait::ALL.map(|wait| (wait, measure)));
        all.map(|(wait, measure)| {
            let of_group =
                |row: &&Row| (row.subject.wait, row.subject.measure) == (wait, measure) && row.best;
            (wait, measure, self.rows.iter().filter(of_group).collect::<Vec<_>>())
        })
        .filter(|(.., rows)| !rows.is_empty())
    }

    /// For people: Markdown, ready to be pasted.
    pub fn table(&self) -> String {
        let mut out = format!("{}\n", self.head);
        for (wait, measure, rows) in self.groups() {
            let _ = write!(
                out,
                "\n**{}, {}** ({})\n\n| {:<18} | {:<34} | {:>9} | {:>9} | {:>7} | {:>13} | {:>5} |\n",
                measure.name(),
                wait.name(),
                measure.unit(),
                "",
                "way",
                "min",
                "median",
                "× floor",
                "quartiles",
                "CPUs",
            );
            let _ = writeln!(
                out,
                "| {:-<18} | {:-<34} | {:->8}: | {:->8}: | {:->6}: | {:->12}: | {:->4}: |",
                "", "", "", "", "", "", ""
            );
            for row in rows {
                let (ratio, spread) = row.ratio.map_or_else(Default::default, |[low, ratio, high]| {
                    (format!("{ratio:.2}"), format!("{low:.2}–{high:.2}"))
                });
                let _ = writeln!(
                    out,
                    "| {:<18} | {:<34} | {:>9} | {:>9} | {ratio:>7} | {spread:>13} | {:>5.2} |",
                    row.subject.name,
                    row.subject.way,
                    number(row.min),
                    number(row.median),
                    row.cpu,
                );
            }
        }
        out
    }

    /// For programs: every way of every subject.
    pub fn csv(&self) -> String {
        let mut out = format!("# {}\n", self.head);
        out += "wait,measure,role,subject,way,unit,handoffs_per_sample,samples,min,median,median_ratio_to_floor,cpus,\
                ratio_lower_quartile,ratio_upper_quartile\n";
        for row in &self.rows {
            let Subject { wait, measure, role, name, way, handoffs, samples, .. } = row.subject;
            let role = format!("{role:?}").to_lowercase();
            // Quoted, because some contain the separator.
            let [low, ratio, high] = row
                .ratio
                .map_or_else(Default::default, |quartiles| quartiles.map(|ratio| format!("{ratio:.4}")));
            let _ = writeln!(
                out,
                "{},{},{role},\"{name}\",\"{way}\",{},{handoffs},{},{:.2},{:.2},{ratio},{:.3},{low},{high}",
                wait.name(),
                measure.name(),
                measure.unit(),
                samples.len(),
                row.min,
                row.median,
                row.cpu,
            );
        }
        out
    }
}

fn position(measure: Measure) -> Option<usize> {
    Measure::ALL.iter().position(|&other| other == measure)
}

/// Three digits or more.
fn number(value: f64) -> String {
    match value {
        _ if value < 10.0 => format!("{value:.2}"),
        _ if value < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
