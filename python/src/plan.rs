//! The Rust part of `Plan`, and numbers of records from Python and for it; the rest is in `twinbuf/_plan.py`.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyIndexError, PyMemoryError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyByteArray;
use twinbuf::{BatchIndices, LastBatch, RecordList, Shuffle};

use crate::errors;

/// The class `Plan` derives from this one.
#[pyclass(frozen, subclass, module = "twinbuf._twinbuf", name = "_Plan")]
pub(crate) struct Plan {
    pub(crate) inner: twinbuf::Plan,
    /// The number of records of the data set that the plan is made for. `None`: the plan was made for a number of
    /// records, and is for any data set that has at least as many.
    of: Option<u64>,
}

impl Plan {
    /// Refuses a data set that the plan was not made for: its batches would have other records than meant.
    pub(crate) fn check(&self, py: Python<'_>, found: u64) -> PyResult<()> {
        let Some(wanted) = self.of.filter(|&wanted| wanted != found) else { return Ok(()) };
        let line = format!(
            "plan: wanted the plan of a data set with {found} records, found that of one with {wanted}: for some of the \
             records, `Plan(data, batch, records=...)`"
        );
        Err(errors::option(py, line))
    }
}

/// The arguments of `Plan`, which it has checked.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct Options {
    records: u64,
    batches: Vec<(u64, u64)>,
    list: Option<List>,
    steps: Option<u64>,
    /// `none`, `full`, `chunks` with their records, or `window` with the records of a chunk and the number of chunks.
    shuffle: (String, u64, u64),
    seed: Option<u64>,
    /// This process and the number of processes. `None`: the launcher's.
    ranks: Option<(u64, u64)>,
    drop_last: bool,
}

impl Options {
    fn build(self, py: Python<'_>) -> PyResult<twinbuf::Plan> {
        let builder = match self.ranks {
            Some((rank, world)) => twinbuf::Plan::builder(self.records).rank(rank, world),
            None => twinbuf::Plan::from_env(self.records).map_err(|error| errors::option(py, error))?,
        };
        let shuffle = match (&*self.shuffle.0, self.shuffle.1, self.shuffle.2) {
            ("full", ..) => Shuffle::Full,
            ("chunks", records, _) => Shuffle::Chunks { records },
            ("window", chunk_records, window_chunks) => Shuffle::Window { chunk_records, window_chunks },
            _ => Shuffle::None,
        };
        let list = self.list.map(|list| list.records(py)).transpose()?;
        let builder = builder.batches(self.batches).shuffle(shuffle);
        let builder = list.into_iter().fold(builder, |builder, list| builder.records(list));
        let builder = self.steps.into_iter().fold(builder, |builder, steps| builder.steps(steps));
        let builder = self.seed.into_iter().fold(builder, |builder, seed| builder.seed(seed));
        let build =
            |tail| builder.clone().last_batch(tail).build().map_err(|error| errors::option(py, error));
        let plan = build(if self.drop_last { LastBatch::Drop } else { LastBatch::Keep })?;
        if self.drop_last || plan.world() == 1 { Ok(plan) } else { build(LastBatch::Wrap) }
    }
}

#[pymethods]
impl Plan {
    /// Makes a plan for a data set of so many records, of its options or its saved form.
    #[new]
    #[pyo3(signature = (of, options=None, saved=""))]
    fn new(py: Python<'_>, of: Option<u64>, options: Option<Options>, saved: &str) -> PyResult<Self> {
        let restored =
            || serde_json::from_str(saved).map_err(|error| PyValueError::new_err(error.to_string()));
        let inner = options.map_or_else(restored, |options| options.build(py))?;
        Ok(Self { inner, of })
    }

    /// Its saved form, for ``pickle``.
    fn _save(&self) -> PyResult<(Option<u64>, String)> {
        let saved = serde_json::to_string(&self.inner);
        Ok((self.of, saved.map_err(|error| PyValueError::new_err(error.to_string()))?))
    }

    /// Plans with the same options are equal, also if one is for a number of records and the other for a data set.
    fn __eq__(&self, other: &Self) -> bool {
        self.inner == other.inner
    }

    fn __hash__(&self) -> u64 {
        BuildHasherDefault::<DefaultHasher>::default().hash_one(&self.inner)
    }

    /// The number of steps of this rank in epoch 0, and in any other unless ``batch`` is a schedule.
    fn __len__(&self) -> PyResult<usize> {
        length(self.inner.steps(0))
    }

    /// The number of steps of this rank in an epoch.
    fn steps(&self, epoch: u64) -> u64 {
        self.inner.steps(epoch)
    }

    /// The number of steps of all epochs before this one.
    fn _steps_before(&self, epoch: u64) -> u64 {
        self.inner.steps_between(0..epoch, 0)
    }

    /// Records in a full batch of one rank; in the largest of a schedule.
    #[getter]
    fn batch(&self) -> u64 {
        self.inner.batch_records()
    }

    /// The number of records of the plan, of all ranks.
    #[getter]
    fn records(&self) -> u64 {
        self.inner.records()
    }

    /// The seed of the shuffle.
    #[getter]
    fn seed(&self) -> u64 {
        self.inner.seed()
    }

    /// The number of this process.
    #[getter]
    fn rank(&self) -> u64 {
        self.inner.rank()
    }

    /// The number of processes.
    #[getter]
    fn world(&self) -> u64 {
        self.inner.world()
    }

    /// Whether the records that do not fill a last step are left out.
    #[getter]
    fn drop_last(&self) -> bool {
        self.inner.last_batch() == LastBatch::Drop
    }

    /// The numbers of the records of one batch, in batch order, as an int64 array.
    fn indices<'py>(&self, py: Python<'py>, epoch: u64, step: u64) -> PyResult<Bound<'py, PyAny>> {
        let batch = self.inner.batch(epoch, step).ok_or_else(|| {
            let steps = self.inner.steps(epoch);
            PyIndexError::new_err(format!("step: wanted one below {steps}, found {step}"))
        });
        indices(py, &batch?)
    }

    fn __repr__(&self) -> String {
        let plan = &self.inner;
        let (rank, world) = (plan.rank(), plan.world());
        let shuffle = match plan.shuffle() {
            Shuffle::None => "None".to_owned(),
            Shuffle::Full => "'full'".to_owned(),
            Shuffle::Chunks { records } => format!("Chunks({records})"),
            Shuffle::Window { chunk_records: records, window_chunks: chunks } => {
                format!("Window({chunks}, {records})")
            }
        };
        let sizes = plan.batches().map(|(steps, records)| match steps {
            u64::MAX => format!("(..., {records})"),
            _ => format!("({steps}, {records})"),
        });
        let batch = match &sizes.collect::<Vec<_>>()[..] {
            [_] => plan.batch_records().to_string(),
            sizes => format!("[{}]", sizes.join(", ")),
        };
        let list = match (plan.list().range(), plan.list().step()) {
            (range, Some(1)) if range.start == 0 => String::new(),
            (range, Some(1)) => format!(", records=range({}, {})", range.start, range.end),
            (range, Some(step)) => format!(", records=range({}, {}, {step})", range.start, range.end),
            (_, None) => format!(", records=[{} numbers]", plan.records()),
        };
        let steps = plan.epoch_steps().map_or(String::new(), |steps| format!(", steps={steps}"));
        let (of, seed) = (self.of.unwrap_or(plan.list().range().end), plan.seed());
        let tail = if self.drop_last() { "True" } else { "False" };
        format!(
            "Plan({of}, {batch}{list}{steps}, shuffle={shuffle}, seed={seed}, rank={rank}, world={world}, drop_last={tail})"
        )
    }
}

/// Records, as `_values.py` has checked them: the first one, the step and the number of them; or all of them.
#[derive(FromPyObject)]
pub(crate) enum List {
    Even(u64, u64, u64),
    Any(PyBuffer<u64>),
}

impl List {
    pub(crate) fn records(&self, py: Python<'_>) -> PyResult<RecordList> {
        match self {
            Self::Even(first, step, len) => {
                Ok(RecordList::even(*first, *step, *len).unwrap_or_else(|| (0..0).into()))
            }
            Self::Any(numbers) => Ok(numbers.to_vec(py)?.into()),
        }
    }
}

/// The numbers of a batch's records as a numpy array.
pub(crate) fn indices<'py>(py: Python<'py>, batch: &BatchIndices) -> PyResult<Bound<'py, PyAny>> {
    py.import("numpy")?.call_method1("frombuffer", (bytes_of(py, batch)?, "int64"))
}

/// The numbers of a batch's records, as the bytes of an array of int64.
pub(crate) fn bytes_of<'py>(py: Python<'py>, batch: &BatchIndices) -> PyResult<Bound<'py, PyByteArray>> {
    let len = batch.len().checked_mul(8).and_then(|len| isize::try_from(len).ok());
    let len = len.ok_or_else(|| PyMemoryError::new_err("no memory for the numbers of a batch"))? as usize;
    PyByteArray::new_with(py, len, |bytes| {
        for (out, record) in bytes.chunks_exact_mut(8).zip(batch.runs().flatten()) {
            out.copy_from_slice(&record.to_ne_bytes());
        }
        Ok(())
    })
}

/// What `len` returns, or raises for a class in Python whose number is too large.
pub(crate) fn length(count: u64) -> PyResult<usize> {
    let fits = usize::try_from(count).ok().filter(|&count| isize::try_from(count).is_ok());
    fits.ok_or_else(|| PyOverflowError::new_err("cannot fit 'int' into an index-sized integer"))
}
