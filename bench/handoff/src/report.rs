//! The output: a line for each subject, and a CSV for `bench/tables.py` and `bench/pictures.py`.

use std::fmt::Write as _;

use twinbuf_bench_harness::report::{median, number, quartiles};

use crate::measure::{Measure, Role, Sample, Subject, Wait};

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
            })
            .collect();
        let place = |row: &Row| {
            let order =
                (Wait::ALL.iter().position(|&w| w == row.subject.wait), position(row.subject.measure));
            (order, row.subject.role != Role::Floor)
        };
        rows.sort_by(|a, b| place(a).cmp(&place(b)).then(a.min.total_cmp(&b.min)));
        Self { head, rows }
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut out = format!("{}\n{:>9} {:>9}  x floor\n", self.head, "min", "median");
        for Row { subject, min, median, ratio, .. } in &self.rows {
            let (min, median, [low, ratio, high]) =
                (number(*min), number(*median), ratio.unwrap_or([f64::NAN; 3]));
            let (id, unit) = (subject.id(), subject.measure.unit());
            let _ = writeln!(out, "{min:>9} {median:>9}  {ratio:.2} [{low:.2}, {high:.2}]  {id}, {unit}");
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
