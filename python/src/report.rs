//! The loader's report, as the object that the Python loops use too.

use std::fmt::Write as _;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyDict;
use twinbuf::observe::StepTimes;
use twinbuf::{Breakdown, Report};

use crate::errors::in_python;

/// The figures that every loop has.
pub(crate) fn figures<'py>(
    py: Python<'py>,
    report: &Report,
    steps: &[StepTimes],
) -> PyResult<Bound<'py, PyDict>> {
    let make = py.import("twinbuf.report")?.getattr("Step")?;
    let step = |step: &StepTimes| {
        let &StepTimes { epoch, step, start, train, .. } = step;
        make.call1((epoch, step, seconds(start), seconds(train.waiting), seconds(train.busy)))
    };
    let figures = PyDict::new(py);
    figures.set_item("epochs", report.epochs)?;
    figures.set_item("batches", report.batches)?;
    figures.set_item("wall", seconds(report.wall))?;
    figures.set_item("wait", seconds(report.train.waiting))?;
    figures.set_item("compute", seconds(report.train.busy))?;
    figures.set_item("first_wait", seconds(report.first.waiting))?;
    figures.set_item("first_compute", seconds(report.first.busy))?;
    figures.set_item("steps", steps.iter().map(step).collect::<PyResult<Vec<_>>>()?)?;
    Ok(figures)
}

fn seconds(time: Duration) -> f64 {
    time.as_secs_f64()
}

pub(crate) fn report<'py>(
    py: Python<'py>,
    name: Option<&str>,
    report: &Report,
    steps: &[StepTimes],
    depth: usize,
    breakdown: &Breakdown,
) -> PyResult<Bound<'py, PyAny>> {
    let figures = figures(py, report, steps)?;
    figures.set_item("name", name.unwrap_or_default())?;
    figures.set_item("load", seconds(report.read.busy + report.transform))?;
    figures.set_item("overlap", report.overlap)?;
    figures.set_item("depth", depth)?;
    figures.set_item("workers", report.workers)?;
    figures.set_item("advice", in_python(&report.advice()))?;
    figures.set_item("bytes", report.bytes)?;
    let mut text = in_python(&report.to_string());
    if breakdown.is_on() {
        let _ = write!(text, "\n{breakdown}");
    }
    figures.set_item("text", text)?;
    py.import("twinbuf.report")?.getattr("Report")?.call((), Some(&figures))
}
