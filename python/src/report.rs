//! `Report`: the crate's report, with the names of Python.

use std::path::PathBuf;
use std::time::Duration;

use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use twinbuf::loader::MAX_WORKERS;
use twinbuf::{Breakdown, observe};

use crate::errors::{self, Failure, in_python};
use crate::number::whole_or_none;

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
#[pyclass(frozen, module = "twinbuf", name = "Report")]
pub(crate) struct Report {
    inner: twinbuf::Report,
    /// The name of the loader or loop, which may be empty.
    #[pyo3(get)]
    name: String,
    kind: Kind,
    /// Where a watched loop is: its file and line.
    line: String,
    /// Batches that were kept while their slots were needed: each slot got new memory.
    #[pyo3(get)]
    kept: u64,
    /// The text of the breakdown, if there is one.
    phases: String,
}

/// What the last batches would have taken with other settings. Times are seconds.
#[pyclass(frozen, get_all, module = "twinbuf", name = "Prediction")]
pub(crate) struct Prediction {
    /// Whether batches are loaded ahead.
    overlap: bool,
    /// The number of slots.
    depth: usize,
    /// The number of loading threads.
    workers: usize,
    /// Batches that were replayed: the last ones, up to 1024.
    batches: u64,
    /// What these batches took.
    measured: f64,
    /// What they would have taken; with ``at_most``, at best.
    wall: f64,
    /// The part of ``wall`` that the loop would have waited.
    wait: f64,
    /// The part of ``measured`` that the settings save; negative if they take longer.
    gain: f64,
    /// Whether ``wall`` is a lower limit: loads may take turns, or other programs may take more of the processors.
    at_most: bool,
}

#[pymethods]
impl Prediction {
    fn __repr__(&self) -> String {
        let Self { overlap, depth, workers, batches, measured, wall, .. } = self;
        let overlap = if *overlap { "True" } else { "False" };
        format!(
            "<Prediction: overlap={overlap}, depth={depth}, workers={workers}: {wall:.6} s in place of {measured:.6} s \
             for {batches} batches>"
        )
    }
}

impl From<observe::Prediction> for Prediction {
    fn from(found: observe::Prediction) -> Self {
        let observe::Settings { overlap, depth, workers } = found.settings;
        let (measured, wall, wait) = (seconds(found.measured), seconds(found.wall), seconds(found.waiting));
        let (batches, gain, at_most) = (found.batches, found.gain(), found.at_most);
        Self { overlap, depth, workers, batches, measured, wall, wait, gain, at_most }
    }
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
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
        let overlap = "Set `overlap(true)`";
        let text = match self.kind {
            Kind::Watched => {
                let here = format!("{}: put `tb.prefetch(...)` in place of `tb.watch(...)`", self.line);
                text.replace(overlap, &here)
            }
            Kind::Prefetched => text.replace("Set `overlap(false)`", "Iterate without `tb.prefetch`"),
            Kind::Rounds => text.replace("Set `overlap(false)`", "Make each round in the loop"),
            Kind::Loader => text.to_string(),
        };
        let none = "No option of the loader gains";
        let text =
            if self.kind == Kind::Loader { text } else { text.replace(none, "No overlap or depth gains") };
        in_python(&text)
    }
}

#[pymethods]
impl Report {
    /// Epochs that were begun.
    #[getter]
    fn epochs(&self) -> u64 {
        self.inner.epochs
    }

    /// Batches that the loop received.
    #[getter]
    fn batches(&self) -> u64 {
        self.inner.batches
    }

    /// The bytes of these batches; None where they are not known.
    #[getter]
    fn bytes(&self) -> Option<u64> {
        (self.kind == Kind::Loader).then_some(self.inner.bytes)
    }

    /// From the first time that a batch of each epoch was asked for to the end of that epoch, added up.
    #[getter]
    fn wall(&self) -> f64 {
        seconds(self.inner.wall)
    }

    /// The part of ``wall`` in which the loop waited for batches.
    #[getter]
    fn wait(&self) -> f64 {
        seconds(self.inner.train.waiting)
    }

    /// The part of ``wall`` in which the loop used batches.
    #[getter]
    fn compute(&self) -> f64 {
        seconds(self.inner.train.busy)
    }

    /// Time spent on loading, summed over all threads. Without overlap it equals ``wait``.
    #[getter]
    fn load(&self) -> f64 {
        seconds(self.inner.read.busy + self.inner.transform)
    }

    /// Time of copies to a device.
    #[getter]
    fn transfer(&self) -> f64 {
        seconds(self.inner.transfer)
    }

    /// Whether batches are loaded ahead.
    #[getter]
    fn overlap(&self) -> bool {
        self.inner.settings.overlap
    }

    /// The number of slots, or of items ahead.
    #[getter]
    fn depth(&self) -> usize {
        self.inner.settings.depth
    }

    /// The number of loading threads.
    #[getter]
    fn workers(&self) -> usize {
        self.inner.settings.workers
    }

    /// Accelerator utilization as MLPerf Storage defines it: compute over total, without the first step. None before the
    /// second step.
    #[getter]
    fn au(&self) -> Option<f64> {
        self.inner.au()
    }

    /// The stage that limits the loop, by a replay of the last batches.
    #[getter]
    fn verdict(&self) -> String {
        self.inner.verdict().to_string()
    }

    /// One sentence of advice, by a replay of the last batches.
    #[getter]
    fn advice(&self) -> String {
        self.in_python(&self.inner.advice())
    }

    /// Predict what the last batches would have taken with other settings, by a replay of their measured times.
    ///
    /// What is not given stays as it is, but another depth or number of workers has overlap. None if nothing was measured, or if the loop would wait for a slot that it keeps.
    /// Settings that a loader refuses raise `OptionError`.
    #[pyo3(signature = (*, overlap=None, depth=None, workers=None))]
    fn predict(
        &self,
        py: Python<'_>,
        overlap: Option<bool>,
        depth: Option<&Bound<'_, PyAny>>,
        workers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Option<Prediction>> {
        let within = |name: &str, given: Option<&Bound<'_, PyAny>>, most: usize| {
            let given = whole_or_none(name, given)?;
            let Some(found) = given.filter(|given| !(1..=most).contains(given)) else { return Ok(given) };
            let wanted = if most == usize::MAX { "1 or more".into() } else { format!("1 to {most}") };
            Err(errors::option(py, format!("{name}: wanted {wanted}, found {found}")))
        };
        let (depth, workers) =
            (within("depth", depth, usize::MAX)?, within("workers", workers, MAX_WORKERS)?);
        let now = self.inner.settings;
        let overlap = overlap.unwrap_or(now.overlap || depth.is_some() || workers.is_some());
        let (depth, workers) = (depth.unwrap_or(now.depth), workers.unwrap_or(now.workers));
        Ok(self.inner.predict(observe::Settings { overlap, depth, workers }).map(Prediction::from))
    }

    /// Predict the smallest change of settings that gains at least 3 %, or None if there is none.
    fn recommended(&self) -> Option<Prediction> {
        self.inner.recommended().map(Prediction::from)
    }

    /// Write a page for any browser: the report and the last steps. It needs no other file.
    fn save(&self, py: Python<'_>, path: PathBuf) -> PyResult<()> {
        let written = std::fs::write(&path, self.in_python(&self.inner.html()));
        written.map_err(|error| errors::raise(py, Failure::of_writing(path, &error)))
    }

    /// The figures as plain values.
    fn to_dict<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyDict>> {
        let figures = PyDict::new(slf.py());
        let names = "name epochs batches bytes wall wait compute load transfer au overlap depth workers kept verdict advice";
        for name in names.split_whitespace() {
            figures.set_item(name, slf.getattr(name)?)?;
        }
        Ok(figures)
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err("a Report cannot be pickled: send its figures, `report.to_dict()`"))
    }

    fn __str__(&self) -> String {
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
        name + &self.in_python(&self.inner.to_string()) + &kept + &self.phases
    }

    fn __repr__(&self) -> String {
        format!("<Report: {}>", self.__str__())
    }
}
