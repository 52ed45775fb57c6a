//! What comes out: tables, goals, a CSV, a picture.

use std::fmt::Write as _;

/// Figures of one kind, of several subjects.
pub struct Table {
    /// The section of the program that it belongs to.
    pub section: &'static str,
    pub title: String,
    /// Names with units. The first one is what the table is about.
    pub columns: Vec<&'static str>,
    pub rows: Vec<Row>,
    /// The row to which the first column is compared, round by round.
    pub reference: Option<usize>,
}

/// The figures of one subject.
pub struct Row {
    pub name: String,
    /// A sample a round; of each, a figure a column.
    pub samples: Vec<Vec<f64>>,
}

/// What is to be reached.
pub struct Goal {
    pub what: String,
    pub wanted: String,
    pub found: String,
    pub met: bool,
}

/// Everything that was measured.
#[derive(Default)]
pub struct Report {
    pub tables: Vec<Table>,
    pub goals: Vec<Goal>,
}

pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => f64::NAN,
        n if n % 2 == 1 => values[middle],
        _ => f64::midpoint(values[middle - 1], values[middle]),
    }
}

impl Row {
    pub fn column(&self, column: usize) -> impl Iterator<Item = f64> {
        self.samples.iter().map(move |sample| sample[column])
    }

    pub fn median(&self, column: usize) -> f64 {
        median(self.column(column))
    }

    pub fn min(&self, column: usize) -> f64 {
        self.column(column).fold(f64::INFINITY, f64::min)
    }

    pub fn max(&self, column: usize) -> f64 {
        self.column(column).fold(f64::NEG_INFINITY, f64::max)
    }
}

impl Table {
    pub fn new(section: &'static str, title: impl Into<String>, columns: &[&'static str]) -> Self {
        let (title, columns) = (title.into(), columns.to_vec());
        Self { section, title, columns, rows: Vec::new(), reference: None }
    }

    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The median, over the rounds, of the first column's ratio to the reference of the same round.
    pub fn ratio(&self, row: &Row) -> Option<f64> {
        let reference = &self.rows[self.reference?];
        Some(median(row.column(0).zip(reference.column(0)).map(|(ours, theirs)| ours / theirs)))
    }

    /// For people. Markdown, so that it can be pasted.
    pub fn text(&self) -> String {
        let rounds = self.rows.first().map_or(0, |row| row.samples.len());
        let mut out = format!("\n**{}** ({rounds} rounds)\n\n| {:<28} |", self.title, "");
        let width = |name: &str| name.chars().count().max(7);
        let names: Vec<String> = ["min", "median", "max"]
            .into_iter()
            .map(|which| format!("{which} {}", self.columns[0]))
            .chain(self.reference.map(|_| "ratio".to_owned()))
            .chain(self.columns[1..].iter().map(|&name| name.to_owned()))
            .collect();
        names.iter().for_each(|name| _ = write!(out, " {name:>0$} |", width(name)));
        let _ = write!(out, "\n| {:-<28} |", "");
        names.iter().for_each(|name| _ = write!(out, " {:->1$}: |", "", width(name) - 1));
        out.push('\n');
        for row in &self.rows {
            let _ = write!(out, "| {:<28} |", row.name);
            let figures = [row.min(0), row.median(0), row.max(0)].into_iter();
            let figures =
                figures.chain(self.ratio(row)).chain((1..self.columns.len()).map(|i| row.median(i)));
            for (name, figure) in names.iter().zip(figures) {
                let _ = write!(out, " {:>1$} |", number(figure), width(name));
            }
            out.push('\n');
        }
        out
    }

    /// A bar to the median, a pale one on to the maximum.
    fn svg(&self, out: &mut String, top: &mut f64) {
        const LABEL: f64 = 230.0;
        const BAR: f64 = 330.0;
        let end = self.rows.iter().map(|row| row.max(0)).fold(f64::MIN_POSITIVE, f64::max);
        let _ = writeln!(
            out,
            r#"<text x="10" y="{top}" class="title">{}: {}</text>"#,
            self.title, self.columns[0]
        );
        for row in &self.rows {
            *top += 16.0;
            let class = if row.name.starts_with("loader") { "ours" } else { "peer" };
            let (median, max) = (BAR * row.median(0) / end, BAR * row.max(0) / end);
            let y = *top - 9.0;
            let _ = writeln!(
                out,
                r#"<text x="{:.1}" y="{top:.1}" class="name">{}</text><rect x="{LABEL}" y="{y:.1}" width="{max:.1}" height="11" class="{class} pale"/><rect x="{LABEL}" y="{y:.1}" width="{median:.1}" height="11" class="{class}"/><text x="{:.1}" y="{top:.1}">{}</text>"#,
                LABEL - 6.0,
                row.name,
                LABEL + max + 5.0,
                number(row.median(0)),
            );
        }
        *top += 30.0;
    }
}

impl Report {
    pub fn goal(
        &mut self,
        what: impl Into<String>,
        wanted: impl Into<String>,
        found: impl Into<String>,
        met: bool,
    ) {
        self.goals.push(Goal { what: what.into(), wanted: wanted.into(), found: found.into(), met });
    }

    pub fn goals_text(&self) -> String {
        let mut out = format!("\n**Goals**\n\n| {:<72} | {:>12} | {:>12} | met |\n", "", "wanted", "found");
        let _ = writeln!(out, "| {:-<72} | {:->11}: | {:->11}: | --- |", "", "", "");
        for Goal { what, wanted, found, met } in &self.goals {
            let _ = writeln!(
                out,
                "| {what:<72} | {wanted:>12} | {found:>12} | {:<3} |",
                if *met { "yes" } else { "no" }
            );
        }
        out
    }

    /// For programs: a line a subject and column, then a line a goal.
    pub fn csv(&self, head: &str) -> String {
        let mut out = format!("# {head}\nsection,table,subject,column,samples,min,median,max,median_ratio\n");
        for table in &self.tables {
            for row in &table.rows {
                for (i, column) in table.columns.iter().enumerate().filter(|&(i, _)| !row.median(i).is_nan())
                {
                    let ratio = if i == 0 { table.ratio(row) } else { None };
                    let _ = writeln!(
                        out,
                        "{},\"{}\",\"{}\",{column},{},{:.4},{:.4},{:.4},{}",
                        table.section,
                        table.title,
                        row.name,
                        row.samples.len(),
                        row.min(i),
                        row.median(i),
                        row.max(i),
                        ratio.map_or(String::new(), |ratio| format!("{ratio:.4}")),
                    );
                }
            }
        }
        for Goal { what, wanted, found, met } in &self.goals {
            let _ = writeln!(out, "goal,\"{what}\",wanted {wanted},found {found},,,,,{met}");
        }
        out
    }

    pub fn svg(&self, head: &str) -> String {
        let (mut body, mut top) = (String::new(), 64.0);
        self.tables.iter().for_each(|table| table.svg(&mut body, &mut top));
        format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" width="660" height="{top}" viewBox="0 0 660 {top}">
<style>
text {{ font: 11px sans-serif; fill: #333 }}
.name {{ text-anchor: end }}
.title {{ font-weight: bold; font-size: 12px }}
rect.ours {{ fill: #d95f02 }} rect.peer {{ fill: #4a7fb5 }} rect.pale {{ opacity: 0.35 }}
</style>
<rect width="660" height="{top}" fill="white"/>
<text x="10" y="20" class="title">Disk and loader: median (solid) to maximum (pale) of the rounds</text>
<text x="10" y="38">{head}</text>
{body}</svg>
"#
        )
    }
}

/// Three digits or more.
pub fn number(value: f64) -> String {
    match value.abs() {
        // A column that this subject has not.
        size if size.is_nan() => String::new(),
        _ if value.fract() == 0.0 => format!("{value:.0}"),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
