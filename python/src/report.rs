//! `Report`: the crate's report, with the names of Python.

use std::path::PathBuf;

use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use twinbuf::Breakdown;

use crate::errors::{self, Failure, in_python};

/// What the loop iterates over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Loader,
    Prefetched,
    Rounds,
    Watched,
}

/// Where the time of a loop went. Times are seconds of wall-clock time.
///
/// ``str()`` is a few lines of text; a notebook shows a picture, and `save` writes the same as a page.
///
/// Attributes
/// ----------
/// name
///     The name of the loader or loop, which may be empty.
/// epochs
///     Epochs that were begun.
/// batches, bytes
///     Batches that the loop received, and their bytes; None where these are not known.
/// wall
///     From the first time that a batch of each epoch was asked for to the end of that epoch, added up.
/// wait, compute
///     The parts of ``wall`` in which the loop waited for batches, and in which it used them.
/// load
///     Time spent on loading, summed over all threads. Without overlap it equals ``wait``.
/// transfer
///     Time of copies to a device.
/// au
///     Accelerator utilization as MLPerf Storage defines it: compute over total, without the first step. None before the
///     second step.
/// overlap
///     Whether batches are loaded ahead.
/// depth, workers
///     The number of slots, or of items ahead, and the number of loading threads.
/// kept
///     Batches that were kept while their slots were needed: each slot got new memory.
/// verdict
///     What takes the time of the loop, by the sums of what was measured.
/// advice
///     The verdict in words and what to try: a few lines. Each number was measured, or is what is saved at most.
#[pyclass(frozen, module = "twinbuf", name = "Report")]
pub(crate) struct Report {
    inner: twinbuf::Report,
    /// The name of the loader or loop, which may be empty.
    name: String,
    kind: Kind,
    /// Where a watched loop is: its file and line.
    line: String,
    /// Batches that were kept while their slots were needed: each slot got new memory.
    kept: u64,
    /// The text of the breakdown, if there is one.
    phases: String,
}

impl Report {
    pub(crate) fn new(inner: twinbuf::Report, name: &str, kind: Kind) -> Self {
        Self { inner, name: name.to_string(), kind, line: String::new(), kept: 0, phases: String::new() }
    }

    pub(crate) fn watched(inner: twinbuf::Report, name: &str, line: &str) -> Self {
        Self { line: line.to_string(), ..Self::new(inner, name, Kind::Watched) }
    }

    pub(crate) fn of_loader(inner: twinbuf::Report, name: &str, kept: u64, breakdown: &Breakdown) -> Self {
        let phases = if breakdown.is_on() { format!("\n{breakdown}") } else { String::new() };
        Self { kept, phases, ..Self::new(inner, name, Kind::Loader) }
    }

    /// Replaces the crate's names and advice in a text by what they are in Python.
    fn in_python(&self, text: &str) -> String {
        // A loader of Python always reads the variables.
        let text = text.replace(" if the builder calls `from_env`", "");
        let text = match self.kind {
            Kind::Watched => {
                let here = format!("{}: put `tb.prefetch(...)` in place of `tb.watch(...)`", self.line);
                text.replace("`overlap(true)`", &here)
            }
            Kind::Rounds => text.replace("`overlap(true)`", "`overlap=True`"),
            Kind::Loader | Kind::Prefetched => text,
        };
        in_python(&text)
    }
}

#[pymethods]
impl Report {
    /// Write a page for any browser: the report and the last steps. It needs no other file.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let written = std::fs::write(&path, self.in_python(&self.inner.html()));
        written.map_err(|error| errors::raise(py, Failure::of_writing(path, &error)))
    }

    /// The figures as plain values.
    fn to_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let twinbuf::Report { epochs, batches, train, settings, .. } = &self.inner;
        let times = [
            ("wall", self.inner.wall),
            ("wait", train.waiting),
            ("compute", train.busy),
            ("load", self.inner.read.busy + self.inner.transform),
            ("transfer", self.inner.transfer),
        ];
        let figures = PyDict::new(py);
        figures.set_item("name", &self.name)?;
        figures.set_item("epochs", epochs)?;
        figures.set_item("batches", batches)?;
        figures.set_item("bytes", (self.kind == Kind::Loader).then_some(self.inner.bytes))?;
        for (name, time) in times {
            figures.set_item(name, time.as_secs_f64())?;
        }
        figures.set_item("au", self.inner.au())?;
        figures.set_item("overlap", settings.overlap)?;
        figures.set_item("depth", settings.depth)?;
        figures.set_item("workers", settings.workers)?;
        figures.set_item("kept", self.kept)?;
        figures.set_item("verdict", self.inner.verdict().to_string())?;
        figures.set_item("advice", self.in_python(&self.inner.advice()))?;
        Ok(figures)
    }

    /// A figure.
    fn __getattr__<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyAny>> {
        let unknown = || PyAttributeError::new_err(format!("a Report has no attribute {name:?}"));
        self.to_dict(py)?.get_item(name)?.ok_or_else(unknown)
    }

    fn __dir__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        let methods = slf.py().get_type::<PyAny>().call_method1("__dir__", (slf,))?;
        methods.add(slf.get().to_dict(slf.py())?.keys())
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Report cannot be pickled: send its figures, `report.to_dict()`"))
    }

    /// ``format(report, "#")`` adds tables: the times of the stages, those of the last epochs, and how files were read.
    fn __format__(&self, spec: &str) -> PyResult<String> {
        match spec {
            "" => Ok(self.__str__()),
            "#" => Ok(self.text(format!("{:#}", self.inner))),
            _ => Err(PyValueError::new_err(format!(
                "format of a Report: wanted \"\" or \"#\", found {spec:?}"
            ))),
        }
    }

    fn __str__(&self) -> String {
        self.text(self.inner.to_string())
    }

    fn __repr__(&self) -> String {
        format!("<Report: {}>", self.__str__())
    }
}

impl Report {
    /// The text of the crate's report as the text of this one.
    fn text(&self, text: String) -> String {
        if self.inner.batches == 0 {
            return "Nothing was measured.".to_string();
        }
        let name = if self.name.is_empty() { String::new() } else { format!("{}: ", self.name) };
        let kept = match self.kept {
            0 => String::new(),
            kept => {
                format!("\n{kept} batches were kept while their slots were needed: the slots got new memory.")
            }
        };
        name + &self.in_python(&text) + &kept + &self.phases
    }
}
