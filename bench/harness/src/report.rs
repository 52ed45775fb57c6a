//! The output: tables and goals for people, and a CSV for `bench/tables.py` and `bench/pictures.py`.

use std::fmt::Write as _;

/// Figures of one kind for several subjects.
pub struct Table {
    pub title: String,
    /// The first one is the table's main figure.
    pub columns: Vec<&'static str>,
    pub rows: Vec<Row>,
    /// The rows whose largest value is the reference for the compared columns, round by round.
    pub reference: Vec<usize>,
    /// How many columns are compared in the CSV: the first ones.
    pub compared: usize,
}

/// The figures of one subject.
pub struct Row {
    pub name: String,
    /// One sample per round, with one figure per column.
    pub samples: Vec<Vec<f64>>,
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
}

impl Table {
    pub fn new(title: impl Into<String>, columns: &[&'static str]) -> Self {
        let (title, columns) = (title.into(), columns.to_vec());
        Self { title, columns, rows: Vec::new(), reference: Vec::new(), compared: 1 }
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

    /// For people.
    pub fn text(&self) -> String {
        let rounds = self.rows.first().map_or(0, |row| row.samples.len());
        let mut out = format!("\n{} ({rounds} rounds): {}\n", self.title, self.columns.join(", "));
        let spread =
            |[low, middle, high]: [f64; 3]| format!("{} [{}, {}]", number(middle), number(low), number(high));
        for row in &self.rows {
            let _ = write!(out, "{:<32} {}", row.name, spread(row.quartiles(0)));
            let _ = self.ratio(row, 0).map_or(Ok(()), |ratio| write!(out, ", ratio {}", spread(ratio)));
            (1..self.columns.len()).for_each(|i| _ = write!(out, ", {}", number(row.median(i))));
            out.push('\n');
        }
        out
    }
}

/// Prints what a target is, what was found, with quartiles, and whether it is met: at least or at most.
pub fn goal(what: &str, at_least: bool, wanted: f64, [low, found, high]: [f64; 3]) {
    let (sign, met) = if at_least { (">=", found >= wanted) } else { ("<=", found <= wanted) };
    let met = if met { "met" } else { "NOT met" };
    println!("{what}: {found:.3} [{low:.3}, {high:.3}], goal {sign} {wanted}: {met}");
}

/// For programs: one line per subject and column that the subject has.
pub fn csv(tables: &[Table], head: &str) -> String {
    let mut out = format!(
        "# {head}\ntable,subject,column,rounds,lower,median,upper,ratio_lower,ratio_median,ratio_upper\n"
    );
    for table in tables {
        for row in &table.rows {
            for (i, column) in table.columns.iter().enumerate().filter(|&(i, _)| !row.median(i).is_nan()) {
                let _ = write!(out, "\"{}\",\"{}\",{column},{}", table.title, row.name, row.samples.len());
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

/// No decimals for a whole number or from 100 on, one from 10 on, else two.
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
