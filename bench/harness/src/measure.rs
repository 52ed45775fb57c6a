//! Rounds: a temporary disturbance of the machine affects all subjects alike.

use std::time::{Duration, Instant};

use twinbuf::BoxError;

use crate::report::{Row, Table};

/// Something to measure: returns one figure for each column of the table.
pub struct Subject<'a> {
    pub name: String,
    run: Box<dyn Fn() -> Result<Vec<f64>, BoxError> + 'a>,
}

impl<'a> Subject<'a> {
    pub fn new(name: impl Into<String>, run: impl Fn() -> Result<Vec<f64>, BoxError> + 'a) -> Self {
        Self { name: name.into(), run: Box::new(run) }
    }
}

/// How often and how long.
#[derive(Clone, Copy)]
pub struct Effort {
    pub rounds: usize,
    /// After the first round, none starts that would probably end later than this long after the first one started.
    pub time: Duration,
}

impl Effort {
    /// A fraction of it, for one of several tables.
    pub fn part(self, parts: u32) -> Self {
        Self { time: self.time / parts, ..self }
    }

    /// Whether there is time for one more round after `done` rounds, the first of which started at `begun`.
    pub fn allows(self, done: usize, begun: Instant) -> bool {
        let rounds = u32::try_from(done).unwrap_or(u32::MAX);
        done < self.rounds && (done == 0 || begun.elapsed() / rounds * rounds.saturating_add(1) <= self.time)
    }
}

/// Runs all subjects round by round, each round in a new order, and adds the figures to `table`.
pub fn run(table: &mut Table, subjects: &[Subject<'_>], effort: Effort) -> Result<(), BoxError> {
    let begun = Instant::now();
    let mut order: Vec<usize> = (0..subjects.len()).collect();
    table.rows =
        subjects.iter().map(|subject| Row { name: subject.name.clone(), samples: Vec::new() }).collect();
    let mut rounds = 0;
    while effort.allows(rounds, begun) {
        rounds += 1;
        fastrand::shuffle(&mut order);
        for &i in &order {
            let sample = (subjects[i].run)()
                .map_err(|error| format!("{}, {}: {error}", table.title, subjects[i].name))?;
            assert_eq!(sample.len(), table.columns.len(), "{}", table.title);
            table.rows[i].samples.push(sample);
        }
    }
    Ok(())
}
