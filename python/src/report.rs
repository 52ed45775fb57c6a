//! Makes a `Report` (`twinbuf/_report.py`) of the crate's report; and measures, with the crate's recorder, the loops of
//! `watch` and those over batches or groups on a device.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString};
use twinbuf::observe::{LoopRecorder, Trace};
use twinbuf::pipe;

use crate::errors::{self, Failure, in_python};
use crate::locked::lock;

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

/// The class, which is imported before the program ends: late in its end, no module can be imported.
pub(crate) static CLASS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Makes a report. It runs no code of Python, as [`errors::raise`].
pub(crate) fn report(py: Python<'_>, found: &twinbuf::Report, of: &Loop<'_>) -> PyResult<Py<PyAny>> {
    let (train, settings) = (&found.train, &found.settings);
    let here = format!("{}: put `tb.prefetch(...)` in place of `tb.watch(...)`", of.line);
    let told = |text: &str, here: &str| {
        // A loader of Python always reads the variables, and its data sets and functions have clones.
        let text = text.replace(" if the builder calls `from_env`", "");
        let text = text.replace(", if the data set and all transforms have `try_clone`", "");
        // `prefetch` has an option for the slots.
        let slots = found.to_try().map_or(0, |(settings, _)| settings.depth);
        let text = in_python(&text.replace(&format!(" {slots} slots"), &format!(" `depth({slots})`")));
        if of.line.is_empty() { text } else { text.replace("`overlap=True`", here) }
    };
    let escaped = |text: &str| text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;");
    let figures = PyDict::new(py);
    figures.set_item("name", of.name)?;
    figures.set_item("epochs", found.epochs)?;
    figures.set_item("batches", found.batches)?;
    figures.set_item("bytes", of.bytes.then_some(found.bytes))?;
    figures.set_item("wall", found.wall.as_secs_f64())?;
    figures.set_item("wait", train.waiting.as_secs_f64())?;
    figures.set_item("compute", train.busy.as_secs_f64())?;
    figures.set_item("load", (found.read.busy + found.transform).as_secs_f64())?;
    figures.set_item("transfer", found.transfer.as_secs_f64())?;
    figures.set_item("au", found.au())?;
    figures.set_item("overlap", settings.overlap)?;
    figures.set_item("depth", settings.depth)?;
    figures.set_item("workers", settings.workers)?;
    figures.set_item("kept", of.kept)?;
    figures.set_item("verdict", found.verdict().to_string())?;
    figures.set_item("advice", told(&found.advice(), &here))?;
    let class = CLASS.import(py, "twinbuf._report", "Report")?;
    // `Report.__new__` raises.
    let report = py.get_type::<PyAny>().call_method1("__new__", (class,))?;
    for (name, figure) in &figures {
        report.setattr(name.cast::<PyString>()?, figure)?;
    }
    let before = if of.name.is_empty() { String::new() } else { format!("{}: ", of.name) };
    let kept = match of.kept {
        0 => String::new(),
        1 => "\n1 batch was kept while its slot was needed: the slot got new memory.".to_owned(),
        kept => format!("\n{kept} batches were kept while their slots were needed: these got new memory."),
    };
    for (name, text) in [("_text", found.to_string()), ("_tables", format!("{found:#}"))] {
        report.setattr(name, format!("{before}{}{kept}{}", told(&text, &here), of.phases))?;
    }
    let [before, after] = [before, kept + &of.phases].map(|text| escaped(&text));
    let page = told(&found.html(), &escaped(&here)).replace("<pre>", &format!("<pre>{before}"));
    report.setattr("_page", page.replace("</pre>", &format!("{after}</pre>")))?;
    report.setattr("_figures", figures)?;
    Ok(report.unbind())
}

/// The crate's recorder, as a Python object.
#[pyclass(name = "_Recorder", module = "twinbuf._twinbuf", frozen)]
pub(crate) struct Recorder(pub(crate) Mutex<LoopRecorder>);

impl Recorder {
    /// Makes what measures the loop over items that a thread `sends` to a device.
    pub(crate) fn of(py: Python<'_>, run: &impl pipe::Front, sends: bool) -> PyResult<Option<Py<Self>>> {
        sends.then(|| Py::new(py, Self(Mutex::new(run.pipe().loop_recorder())))).transpose()
    }
}

#[pymethods]
impl Recorder {
    /// ``workers``: the items come from threads or processes of the iterable.
    #[new]
    fn new(py: Python<'_>, name: Option<&str>, trace: Option<PathBuf>, workers: bool) -> PyResult<Self> {
        let recorder = LoopRecorder::new(name, trace.map(Trace::new), workers);
        recorder.map(|recorder| Self(Mutex::new(recorder))).map_err(|error| errors::loading(py, error))
    }

    /// The loop asks for its next item, and has waited for it for so many seconds before.
    #[pyo3(signature = (waited=0.0))]
    fn asked(&self, waited: f64) {
        let now = Instant::now();
        lock(&self.0).asked(now.checked_sub(Duration::from_secs_f64(waited)).unwrap_or(now));
    }

    /// The loop has this item.
    fn received(&self, epoch: u64, step: u64) {
        lock(&self.0).received(epoch, step, Instant::now());
    }

    /// The loop asks for no more items.
    pub(crate) fn ended(&self) {
        lock(&self.0).ended(Instant::now());
    }

    /// Let go of the trace.
    fn close(&self) {
        lock(&self.0).close();
    }

    /// The report of a watched loop. ``line`` is where the loop is, for the advice.
    fn report(&self, py: Python<'_>, name: &str, line: &str) -> PyResult<Py<PyAny>> {
        let found = lock(&self.0).report();
        report(py, &found, &Loop { name, line, ..Default::default() })
    }
}

/// Writes the page of a report.
#[pyfunction]
pub(crate) fn _save(py: Python<'_>, path: PathBuf, page: &str) -> PyResult<()> {
    std::fs::write(&path, page).map_err(|error| errors::raise(py, Failure::of_writing(path, &error)))
}
