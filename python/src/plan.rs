//! `Plan`: which records make up each batch.

use std::hash::{Hash, Hasher};

use pyo3::IntoPyObjectExt;
use pyo3::exceptions::{PyIndexError, PyOverflowError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyRange, PySequence, PySlice, PyString, PyTuple};
use twinbuf::mmap::RecordList;
use twinbuf::{LastBatch, Shuffle};

use crate::dataset;
use crate::errors;
use crate::number::{indices, numbers, range, whole, whole_or_none};

/// The bytes of a chunk of a windowed shuffle, if the program gives no number of records: long enough for sequential
/// reads on any disk.
const CHUNK: u64 = 1 << 20;

/// The order of the records in every epoch, cut into batches and split over ranks.
///
/// A plan is a pure function of its arguments: the same batches on any machine, at any depth, after any resumption. It
/// stores no table.
///
/// Parameters
/// ----------
/// data
///     The data set, or a tuple or dict of data sets with the same number of records. A loader refuses the plan of a data
///     set with another number of records. Or a number: the plan then has the first records of any data set that has at
///     least as many.
/// batch
///     The number of records in a batch of one rank. Or a schedule, a list of up to 16 pairs ``(steps, records)``:
///     ``[(1000, 32), (4000, 64)]`` is 1000 steps of 32 records, then batches of 64. The last size stays until the
///     training ends, and its number of steps is ignored. Steps are counted over all epochs.
/// records
///     Which records of the data set: a ``range``, a ``slice``, or an array of whole numbers, in any order, also repeated:
///     a record comes as often in an epoch as it is in there. Default: all.
/// steps
///     The number of steps of an epoch, which then has the first records of its order. Default: as many as the records
///     fill.
/// shuffle
///     ``None``: the order of the files. ``"full"``: every record individually. ``Window(n)``: records are mixed over n
///     chunks from all over the files. These chunks are in memory and are replaced one by one. More and smaller chunks
///     mix better. ``Chunks(n)``: whole chunks of n records.
/// seed
///     Seed of the shuffle.
/// rank, world
///     This process and the number of processes. ``rank="env"`` takes both from the launcher's variables (torchrun,
///     Open MPI, Slurm and others). Default: rank 0 of 1.
/// drop_last
///     Whether to leave out the records that do not fill a last step. With False they make a smaller batch. With
///     several ranks the last step is filled up from the front of the epoch, so all ranks have the same number of
///     steps.
#[pyclass(frozen, eq, hash, module = "twinbuf", name = "Plan")]
pub(crate) struct Plan {
    pub(crate) inner: twinbuf::Plan,
    /// The number of records of the data set that the plan is made for. `None`: the plan was made for a number of
    /// records, and is for any data set that has at least as many.
    of: Option<u64>,
}

/// Plans with the same batches are equal.
impl PartialEq for Plan {
    fn eq(&self, other: &Self) -> bool {
        self.inner == other.inner
    }
}

impl Hash for Plan {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.inner.hash(state);
    }
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

/// A shuffle that mixes the records of ``chunks`` chunks at a time. The chunks come from all over the files.
///
/// A chunk has ``records`` records; by default as many as fit in 1 MiB. The page cache must hold two windows.
#[pyclass(frozen, eq, hash, get_all, module = "twinbuf", name = "Window")]
#[derive(PartialEq, Hash)]
pub(crate) struct Window {
    /// The number of chunks in memory.
    chunks: u64,
    /// The records of a chunk; None for 1 MiB of them.
    records: Option<u64>,
}

#[pymethods]
impl Window {
    #[new]
    #[pyo3(signature = (chunks, records=None))]
    fn new(chunks: &Bound<'_, PyAny>, records: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        Ok(Self { chunks: whole("chunks", chunks)?, records: whole_or_none("records", records)? })
    }

    fn __getnewargs__(&self) -> (u64, Option<u64>) {
        (self.chunks, self.records)
    }

    fn __repr__(&self) -> String {
        match self.records {
            Some(records) => format!("Window({}, {records})", self.chunks),
            None => format!("Window({})", self.chunks),
        }
    }
}

/// A shuffle of chunks of ``records`` consecutive records. The order within a chunk is kept.
#[pyclass(frozen, eq, hash, get_all, module = "twinbuf", name = "Chunks")]
#[derive(PartialEq, Hash)]
pub(crate) struct Chunks {
    /// The records of a chunk.
    records: u64,
}

#[pymethods]
impl Chunks {
    #[new]
    fn new(records: &Bound<'_, PyAny>) -> PyResult<Self> {
        Ok(Self { records: whole("records", records)? })
    }

    fn __getnewargs__(&self) -> (u64,) {
        (self.records,)
    }

    fn __repr__(&self) -> String {
        format!("Chunks({})", self.records)
    }
}

#[pymethods]
impl Plan {
    #[new]
    #[pyo3(signature = (
        data, batch, *, records=None, steps=None, shuffle=None, seed=None, rank=None, world=None, drop_last=true
    ))]
    #[allow(clippy::too_many_arguments, reason = "keywords")]
    fn new(
        data: &Bound<'_, PyAny>,
        batch: &Bound<'_, PyAny>,
        records: Option<&Bound<'_, PyAny>>,
        steps: Option<&Bound<'_, PyAny>>,
        shuffle: Option<&Bound<'_, PyAny>>,
        seed: Option<&Bound<'_, PyAny>>,
        rank: Option<&Bound<'_, PyAny>>,
        world: Option<&Bound<'_, PyAny>>,
        drop_last: bool,
    ) -> PyResult<Self> {
        let py = data.py();
        let (sizes, seed) = (sizes_of(batch)?, whole_or_none("seed", seed)?);
        let world = whole_or_none::<u64>("world", world)?;
        let (list, steps) = (records, whole_or_none::<u64>("steps", steps)?);
        let records = records_of(data)?;
        let of = (!data.is_instance_of::<PyInt>()).then_some(records);
        let shuffle = shuffle.map_or(Ok(Shuffle::None), |shuffle| shuffle_of(shuffle, data))?;
        let builder = match (rank, world) {
            (None, None) => {
                warn_of_ranks(py, records)?;
                twinbuf::Plan::builder(records)
            }
            (Some(rank), None) if rank.extract::<&str>().is_ok_and(|word| word == "env") => {
                twinbuf::Plan::from_env(records).map_err(|error| errors::option(py, error))?
            }
            (rank, world) => match (rank.map(|rank| whole::<u64>("rank", rank)), world) {
                (Some(Ok(rank)), Some(world)) => twinbuf::Plan::builder(records).rank(rank, world),
                (_, world) => {
                    let rank = rank.map_or(Ok("None".to_owned()), |rank| rank.repr()?.extract::<String>())?;
                    let world = world.map_or("None".to_owned(), |world| world.to_string());
                    let line = format!(
                        "rank, world: wanted both as numbers from 0 on, or rank=\"env\" alone, or neither, found \
                         rank={rank}, world={world}"
                    );
                    return Err(errors::option(py, line));
                }
            },
        };
        let builder = builder.batches(sizes).shuffle(shuffle);
        let list = list.map(|list| list_of(list, records)).transpose()?;
        let builder = list.into_iter().fold(builder, |builder, list| builder.records(list));
        let builder = steps.into_iter().fold(builder, |builder, steps| builder.steps(steps));
        let builder = seed.into_iter().fold(builder, |builder, seed| builder.seed(seed));
        let build =
            |tail| builder.clone().last_batch(tail).build().map_err(|error| errors::option(py, error));
        let inner = match drop_last {
            true => build(LastBatch::Drop)?,
            false => match build(LastBatch::Keep)? {
                plan if plan.world() > 1 => build(LastBatch::Wrap)?,
                plan => plan,
            },
        };
        Ok(Self { inner, of })
    }

    /// The number of steps of this rank in epoch 0, and in any other unless ``batch`` is a schedule.
    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.inner.steps(0))?)
    }

    /// The number of steps of this rank in an epoch.
    fn steps(&self, epoch: &Bound<'_, PyAny>) -> PyResult<u64> {
        Ok(self.inner.steps(whole("epoch", epoch)?))
    }

    /// Records in a full batch of one rank; in the largest of a schedule.
    #[getter]
    fn batch(&self) -> u64 {
        self.inner.batch_records()
    }

    /// The number of records of an epoch, of all ranks.
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
    fn indices<'py>(
        &self,
        epoch: &Bound<'py, PyAny>,
        step: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = epoch.py();
        let (epoch, step) = (whole("epoch", epoch)?, whole("step", step)?);
        match self.inner.batch(epoch, step) {
            Some(batch) => indices(py, &batch),
            None => {
                let steps = self.inner.steps(epoch);
                Err(PyIndexError::new_err(format!("step: wanted one below {steps}, found {step}")))
            }
        }
    }

    /// The plan from its saved form, for ``pickle``.
    #[staticmethod]
    fn _saved(saved: &str, of: Option<u64>) -> PyResult<Self> {
        let inner = serde_json::from_str(saved).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self { inner, of })
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let saved = serde_json::to_string(&slf.get().inner);
        let saved = saved.map_err(|error| PyValueError::new_err(error.to_string()))?;
        (slf.get_type().getattr("_saved")?, (saved, slf.get().of)).into_pyobject(slf.py())
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
        let list = match (plan.range(), plan.list().step()) {
            (range, Some(1)) if range.start == 0 => String::new(),
            (range, Some(1)) => format!(", records=range({}, {})", range.start, range.end),
            (range, Some(step)) => format!(", records=range({}, {}, {step})", range.start, range.end),
            (_, None) => format!(", records=[{} numbers]", plan.records()),
        };
        let steps = plan.epoch_steps().map_or(String::new(), |steps| format!(", steps={steps}"));
        format!(
            "Plan({}, {batch}{list}{steps}, shuffle={shuffle}, seed={}, rank={rank}, world={world}, drop_last={})",
            self.of.unwrap_or(plan.range().end),
            plan.seed(),
            if self.drop_last() { "True" } else { "False" },
        )
    }
}

/// Converts the argument `records` of a plan over a data set with this many records.
fn list_of(list: &Bound<'_, PyAny>, records: u64) -> PyResult<RecordList> {
    let py = list.py();
    let steps = match list.cast::<PySlice>() {
        Ok(slice) => {
            let part = slice.indices(isize::try_from(records)?)?;
            Some(PyRange::new_with_step(py, part.start, part.stop, part.step)?)
        }
        Err(_) => list.cast::<PyRange>().ok().cloned(),
    };
    let outside = match steps {
        Some(steps) => match range(&steps, records)? {
            Ok(found) => return Ok(found),
            Err(outside) => outside,
        },
        None => {
            let found: RecordList = numbers("records", list)?.into_iter().collect();
            if found.range().end <= records {
                return Ok(found);
            }
            (found.range().end - 1).into_bound_py_any(py)?
        }
    };
    let wanted = if outside.lt(0)? { "from 0 on".to_owned() } else { format!("below {records}") };
    Err(errors::option(py, format!("records: wanted numbers {wanted}, found {outside}")))
}

/// Warns where a launcher started several processes: each would read every record.
fn warn_of_ranks(py: Python<'_>, records: u64) -> PyResult<()> {
    let plan = twinbuf::Plan::from_env(records).ok().and_then(|builder| builder.batch(1).build().ok());
    let Some(world @ 2..) = plan.map(|plan| plan.world()) else { return Ok(()) };
    let line = format!(
        "Plan: the launcher started {world} processes, and each of them reads all records: divide them with \
         rank=\"env\", or set rank=0, world=1 if that is meant"
    );
    errors::warn(py, &line)
}

/// Returns the number of records in `data`. Several data sets must have the same number.
fn records_of(data: &Bound<'_, PyAny>) -> PyResult<u64> {
    match data.extract::<u64>() {
        // Python receives the numbers of records as int64 arrays.
        Ok(records) if i64::try_from(records).is_err() => {
            let line = format!("data: wanted at most 2**63 - 1 records, found {records}");
            return Err(errors::option(data.py(), line));
        }
        Ok(records) => return Ok(records),
        Err(error) if error.is_instance_of::<PyOverflowError>(data.py()) => return whole("data", data),
        Err(_) => {}
    }
    let is_list = data.is_exact_instance_of::<PyList>();
    if is_list || data.is_instance_of::<PyString>() || !data.hasattr("__len__")? {
        let (found, advice) = (data.get_type().name()?, if is_list { ": pass a tuple" } else { "" });
        let wanted = "a data set, a tuple or dict of data sets, or a whole number";
        return Err(errors::of_type("data", wanted, format!("a {found}{advice}")));
    }
    let lens = dataset::each(data).iter().map(|set| set.len()).collect::<PyResult<Vec<_>>>()?;
    let first = lens.first().copied().unwrap_or(0);
    let Some(other) = lens.iter().position(|&len| len != first) else { return Ok(first as u64) };
    let name = |at: usize| match data.cast::<PyDict>() {
        Ok(sets) => Ok(sets.keys().get_item(at)?.repr()?.to_string()),
        Err(_) => PyResult::Ok(at.to_string()),
    };
    let line = format!(
        "data: wanted the same number of records, found {first} in data[{}] and {} in data[{}]",
        name(0)?,
        lens[other],
        name(other)?
    );
    Err(errors::option(data.py(), line))
}

/// Converts the argument `batch` to pairs of steps and records.
fn sizes_of(batch: &Bound<'_, PyAny>) -> PyResult<Vec<(u64, u64)>> {
    let Ok(sizes) = batch.cast::<PySequence>() else { return Ok(vec![(0, whole("batch", batch)?)]) };
    let pair = |size: Bound<'_, PyAny>| {
        let (steps, records) = size.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>().map_err(|_| {
            let found = size.repr().map_or_else(|_| size.to_string(), |found| found.to_string());
            errors::of_type("batch", "a number of records, or pairs of steps and records", found)
        })?;
        Ok((whole("batch", &steps)?, whole("batch", &records)?))
    };
    sizes.try_iter()?.map(|size| pair(size?)).collect()
}

fn shuffle_of(shuffle: &Bound<'_, PyAny>, data: &Bound<'_, PyAny>) -> PyResult<Shuffle> {
    if let Ok(window) = shuffle.cast::<Window>() {
        let Window { chunks, records } = *window.get();
        let records = match records {
            Some(records) => records,
            None => {
                let bytes = dataset::each(data).iter().map(dataset::record_bytes).sum::<Option<u64>>();
                let bytes = bytes.ok_or_else(|| {
                    let line = "shuffle: the size of a record is unknown: wanted Window(chunks, records), found \
                                Window(chunks)";
                    errors::option(data.py(), line)
                })?;
                (CHUNK / bytes.max(1)).max(1)
            }
        };
        return Ok(Shuffle::Window { chunk_records: records, window_chunks: chunks });
    }
    if let Ok(chunks) = shuffle.cast::<Chunks>() {
        return Ok(Shuffle::Chunks { records: chunks.get().records });
    }
    let line = format!("shuffle: wanted None, \"full\", Window(n) or Chunks(n), found {}", shuffle.repr()?);
    match shuffle.extract::<String>() {
        Ok(word) if word == "full" => Ok(Shuffle::Full),
        Ok(_) => Err(errors::option(data.py(), line)),
        Err(_) => Err(PyTypeError::new_err(line)),
    }
}
