//! The output: tables and goals for people, and a CSV for `bench/tables.py` and `bench/pictures.py`.

use std::fmt::Write as _;

/// Figures of one kind for several subjects.
pub struct Table {
    /// The section of the program that produces it.
    pub section: &'static str,
    pub title: String,
    /// Names with units. The first one is the table's main figure.
    pub columns: Vec<&'static str>,
    pub rows: Vec<Row>,
    /// The rows whose best value is the reference for the first columns, round by round.
    pub reference: Vec<usize>,
    /// How many columns are compared.
    pub compared: usize,
}

/// The figures of one subject.
pub struct Row {
    pub name: String,
    /// One sample per round, with one figure per column.
    pub samples: Vec<Vec<f64>>,
}

/// A target.
pub struct Goal {
    pub what: String,
    pub wanted: String,
    pub found: String,
    pub met: bool,
}

/// All measurements.
#[derive(Default)]
pub struct Report {
    pub tables: Vec<Table>,
    pub goals: Vec<Goal>,
}

/// The lower quartile, the median and the upper quartile, each interpolated between its two nearest values.
pub fn quartiles(values: impl IntoIterator<Item = f64>) -> [f64; 3] {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    [0.25, 0.5, 0.75].map(|share| {
        let place = share * values.len().saturating_sub(1) as f64;
        let at = |place: f64| values.get(place as usize).copied().unwrap_or(f64::NAN);
        let (below, above) = (at(place.floor()), at(place.ceil()));
        below + (above - below) * place.fract()
    })
}

pub fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    quartiles(values)[1]
}

impl Row {
    pub fn column(&self, column: usize) -> impl Iterator<Item = f64> {
        self.samples.iter().map(move |sample| sample[column])
    }

    pub fn median(&self, column: usize) -> f64 {
        median(self.column(column))
    }

    pub fn quartiles(&self, column: usize) -> [f64; 3] {
        quartiles(self.column(column))
    }

    pub fn max(&self, column: usize) -> f64 {
        self.column(column).fold(f64::NEG_INFINITY, f64::max)
    }
}

impl Table {
    pub fn new(section: &'static str, title: impl Into<String>, columns: &[&'static str]) -> Self {
        let (title, columns) = (title.into(), columns.to_vec());
        Self { section, title, columns, rows: Vec::new(), reference: Vec::new(), compared: 1 }
    }

    pub fn row(&self, name: &str) -> Option<&Row> {
        self.rows.iter().find(|row| row.name == name)
    }

    /// The quartiles, over the rounds, of a column's ratio to the best reference of the same round.
    pub fn ratio(&self, row: &Row, column: usize) -> Option<[f64; 3]> {
        let best = |round: usize| {
            let all = self.reference.iter().map(|&i| self.rows[i].samples[round][column]);
            all.reduce(f64::max).filter(|best| !best.is_nan())
        };
        let ratios = row.column(column).enumerate().filter_map(|(round, ours)| Some(ours / best(round)?));
        let ratios: Vec<f64> = ratios.collect();
        (!ratios.is_empty()).then(|| quartiles(ratios))
    }

    /// For people: Markdown, ready to be pasted.
    pub fn text(&self) -> String {
        let rounds = self.rows.first().map_or(0, |row| row.samples.len());
        let mut out = format!("\n**{}** ({rounds} rounds)\n\n| {:<28} |", self.title, "");
        let width = |name: &str| name.chars().count().max(7);
        let ratio = ["ratio", "quartiles"].into_iter().filter(|_| !self.reference.is_empty());
        let names: Vec<String> = [self.columns[0], "quartiles"]
            .into_iter()
            .chain(ratio)
            .chain(self.columns[1..].iter().copied())
            .map(str::to_owned)
            .collect();
        names.iter().for_each(|name| _ = write!(out, " {name:>0$} |", width(name)));
        let _ = write!(out, "\n| {:-<28} |", "");
        names.iter().for_each(|name| _ = write!(out, " {:->1$}: |", "", width(name) - 1));
        out.push('\n');
        let spread =
            |[low, middle, high]: [f64; 3]| [number(middle), format!("{}–{}", number(low), number(high))];
        for row in &self.rows {
            let _ = write!(out, "| {:<28} |", row.name);
            let figures = spread(row.quartiles(0)).into_iter();
            let figures = figures.chain(self.ratio(row, 0).into_iter().flat_map(spread));
            let figures = figures.chain((1..self.columns.len()).map(|i| number(row.median(i))));
            for (name, figure) in names.iter().zip(figures) {
                let _ = write!(out, " {figure:>0$} |", width(name));
            }
            out.push('\n');
        }
        out
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

    /// For programs: one line per subject and column of the tables of a section.
    pub fn csv(&self, section: &str, head: &str) -> String {
        let mut out = format!(
            "# {head}\ntable,subject,column,rounds,lower,median,upper,ratio_lower,ratio_median,ratio_upper\n"
        );
        for table in self.tables.iter().filter(|table| table.section == section) {
            for row in &table.rows {
                for (i, column) in table.columns.iter().enumerate().filter(|&(i, _)| !row.median(i).is_nan())
                {
                    let _ =
                        write!(out, "\"{}\",\"{}\",{column},{}", table.title, row.name, row.samples.len());
                    row.quartiles(i).iter().for_each(|figure| _ = write!(out, ",{figure:.4}"));
                    match table.ratio(row, i).filter(|_| i < table.compared) {
                        Some(ratio) => ratio.iter().for_each(|figure| _ = write!(out, ",{figure:.4}")),
                        None => out.push_str(",,,"),
                    }
                    out.push('\n');
                }
            }
        }
        out
    }
}

/// Three digits or more.
pub fn number(value: f64) -> String {
    match value.abs() {
        // A column that this subject lacks.
        size if size.is_nan() => String::new(),
        _ if value.fract() == 0.0 => format!("{value:.0}"),
        size if size < 10.0 => format!("{value:.2}"),
        size if size < 100.0 => format!("{value:.1}"),
        _ => format!("{value:.0}"),
    }
}
