//! The loader's report, as the object that the Python loops use too.

use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use twinbuf::Report;

use crate::errors::in_python;

/// The times of one step, in seconds from the first one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Step {
    pub(crate) epoch: u64,
    pub(crate) step: u64,
    pub(crate) start: f64,
    pub(crate) wait: f64,
    pub(crate) compute: f64,
}

pub(crate) fn report<'py>(
    py: Python<'py>,
    name: Option<&str>,
    report: &Report,
    steps: &[Step],
    depth: usize,
) -> PyResult<Bound<'py, PyAny>> {
    let module = py.import("twinbuf.report")?;
    let make = module.getattr("Step")?;
    let steps = steps
        .iter()
        .map(|&Step { epoch, step, start, wait, compute }| make.call1((epoch, step, start, wait, compute)));
    let seconds = |time: Duration| time.as_secs_f64();
    let figures = PyDict::new(py);
    figures.set_item("name", name.unwrap_or_default())?;
    figures.set_item("epochs", report.epochs)?;
    figures.set_item("batches", report.batches)?;
    figures.set_item("wall", seconds(report.wall))?;
    figures.set_item("wait", seconds(report.train.waiting))?;
    figures.set_item("compute", seconds(report.train.busy))?;
    figures.set_item("load", seconds(report.read.busy + report.transform))?;
    figures.set_item("first_wait", seconds(report.first.waiting))?;
    figures.set_item("first_compute", seconds(report.first.busy))?;
    figures.set_item("overlap", report.overlap)?;
    figures.set_item("depth", depth)?;
    figures.set_item("workers", report.workers)?;
    figures.set_item("advice", in_python(report.advice()))?;
    figures.set_item("bytes", report.bytes)?;
    figures.set_item("steps", steps.collect::<PyResult<Vec<_>>>()?)?;
    figures.set_item("text", in_python(&report.to_string()))?;
    module.getattr("Report")?.call((), Some(&figures))
}
