//! Makes a `Report` (`twinbuf/_report.py`) of the crate's report, with the names of Python.

use std::path::PathBuf;

use pyo3::prelude::*;
use pyo3::types::{PyCFunction, PyDict, PyTuple};

use crate::errors::{self, Failure, in_python};

/// What a report is of.
#[derive(Default)]
pub(crate) struct Loop<'a> {
    /// The name of the loader or loop, which may be empty.
    pub(crate) name: &'a str,
    /// Where a watched loop is: its file and line. Empty for others.
    pub(crate) line: &'a str,
    /// Whether the bytes of its batches are known.
    pub(crate) bytes: bool,
    /// Batches that were kept while their slots were needed.
    pub(crate) kept: u64,
    /// The text of the breakdown, if there is one.
    pub(crate) phases: String,
}

impl Loop<'_> {
    /// Replaces the crate's names and advice in a text by what they are in Python.
    fn in_python(&self, text: &str) -> String {
        // A loader of Python always reads the variables.
        let text = text.replace(" if the builder calls `from_env`", "");
        let here = format!("{}: put `tb.prefetch(...)` in place of `tb.watch(...)`", self.line);
        in_python(&if self.line.is_empty() { text } else { text.replace("`overlap(true)`", &here) })
    }

    /// Returns the text of the crate's report as the text of this one.
    fn text(&self, text: &str) -> String {
        let name = if self.name.is_empty() { String::new() } else { format!("{}: ", self.name) };
        let kept = match self.kept {
            0 => String::new(),
            kept => {
                format!("\n{kept} batches were kept while their slots were needed: the slots got new memory.")
            }
        };
        name + &self.in_python(text) + &kept + &self.phases
    }
}

/// Makes a report.
pub(crate) fn report(py: Python<'_>, found: twinbuf::Report, of: &Loop<'_>) -> PyResult<Py<PyAny>> {
    let (train, settings) = (&found.train, &found.settings);
    let times = [
        ("wall", found.wall),
        ("wait", train.waiting),
        ("compute", train.busy),
        ("load", found.read.busy + found.transform),
        ("transfer", found.transfer),
    ];
    let figures = PyDict::new(py);
    figures.set_item("name", of.name)?;
    figures.set_item("epochs", found.epochs)?;
    figures.set_item("batches", found.batches)?;
    figures.set_item("bytes", of.bytes.then_some(found.bytes))?;
    for (name, time) in times {
        figures.set_item(name, time.as_secs_f64())?;
    }
    figures.set_item("au", found.au())?;
    figures.set_item("overlap", settings.overlap)?;
    figures.set_item("depth", settings.depth)?;
    figures.set_item("workers", settings.workers)?;
    figures.set_item("kept", of.kept)?;
    figures.set_item("verdict", found.verdict().to_string())?;
    figures.set_item("advice", of.in_python(&found.advice()))?;
    let texts = [found.to_string(), format!("{found:#}")].map(|text| of.text(&text));
    let page = of.in_python(&found.html());
    let save = move |arguments: &Bound<'_, PyTuple>, _: Option<&Bound<'_, PyDict>>| {
        let path = arguments.get_item(0)?.extract::<PathBuf>()?;
        let written = std::fs::write(&path, &page);
        written.map_err(|error| errors::raise(arguments.py(), Failure::of_writing(path, &error)))
    };
    let save = PyCFunction::new_closure(py, None, None, save)?;
    Ok(py.import("twinbuf._report")?.getattr("Report")?.call1((figures, texts, save))?.unbind())
}
