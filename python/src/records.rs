//! `Records`: files of records, and the steps that change the records on their way to the slot.

use std::iter;
use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyMemoryError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyByteArray, PyDict, PyInt, PyList, PyRange, PySlice, PyString, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::Dataset;
use twinbuf::mmap::{Cut, DType, Options, RaggedRecords, Ranges, ReadMode, files};
use twinbuf::transform::{Context, RecordTransform, RecordType, Transform};

use crate::dtype;
use crate::errors::{self, Failure};
use crate::foreign::directly;
use crate::locked::detached;
use crate::number::{numbers, range, whole, whole_or_none};
use crate::object::Object;
use crate::transform::{self, Step};

/// Records in one or several files, numbered consecutively from the first file on.
///
/// Open them with one of the static methods. Each takes a path or a list of paths. A path may be a folder or a pattern
/// such as ``train_*.bin``; its files are taken in natural order (``9`` before ``10``). All methods check every file's
/// header and length, and none reads the data.
///
/// A record is one entry of the array's first axis; `windows` makes records of several. `to` and `map` change records
/// while a loader copies them into its slots. ``data[i]`` reads one record as a numpy array, ``data[10:20]`` several.
#[pyclass(frozen, module = "twinbuf", name = "Records")]
pub(crate) struct Records {
    files: Files,
    /// A function that opens the files again, with another cut.
    opener: Arc<Opener>,
    /// How the files were cut into records.
    cut: Cut,
    /// What `to` and `map` do to each record, in order.
    steps: Vec<Step>,
    /// The type of a record after these steps.
    record: RecordType,
    /// The Python calls that ``pickle`` repeats, each as a name, a tuple and a dict: the one that opened the files, and
    /// those of `to` and `map`.
    calls: Vec<Object>,
}

type Opened<T> = Result<T, twinbuf::mmap::Error>;
type Opener = dyn Fn(Cut) -> Opened<Files> + Send + Sync;

#[derive(Clone)]
enum Files {
    Fixed(Arc<twinbuf::Records>),
    Ragged(Arc<RaggedRecords>),
}

impl Files {
    fn ranges(&self) -> Arc<Ranges> {
        match self {
            Self::Fixed(records) => records.ranges(),
            Self::Ragged(records) => records.ranges(),
        }
    }

    /// Returns the type of a record in the files; of the longest one, if they differ in length.
    fn record(&self) -> PyResult<RecordType> {
        let data = self.data_set();
        let record = match data.element() {
            Some((dtype, shape)) => RecordType::new(dtype, shape).map_err(wrong)?,
            None => RecordType::bytes(data.record_bytes()),
        };
        Ok(if let Self::Ragged(_) = self { record.ragged() } else { record })
    }

    fn data_set(&self) -> Box<dyn Dataset> {
        match self {
            Self::Fixed(records) => Box::new(records.clone()),
            Self::Ragged(records) => Box::new(records.clone()),
        }
    }
}

fn wrong(error: impl std::fmt::Display) -> PyErr {
    Python::attach(|py| errors::option(py, error))
}

fn unopened(py: Python<'_>, error: &twinbuf::mmap::Error) -> PyErr {
    errors::raise(py, Failure::of_file(error).told(dtype::in_python))
}

/// Makes the paths absolute for ``pickle``: another process may have another working directory.
fn absolute<'py>(py: Python<'py>, paths: &[PathBuf]) -> PyResult<Bound<'py, PyAny>> {
    let paths = paths.iter().map(std::path::absolute).collect::<Result<Vec<_>, _>>()?;
    paths.into_pyobject(py)
}

/// Converts an argument of one path or several.
pub(crate) fn paths_of(paths: &Bound<'_, PyAny>) -> PyResult<Vec<PathBuf>> {
    let one = paths.extract::<PathBuf>().map(|path| vec![path]);
    one.or_else(|_| paths.extract::<Vec<PathBuf>>()).map_err(|_| {
        let found = paths.repr().map_or_else(|_| paths.get_type().to_string(), |found| found.to_string());
        errors::of_type("paths", "a path or a list of paths, as `str` or `Path`", found)
    })
}

impl Records {
    /// Opens records of one size. For ``pickle``: `name` is the Python method, and `argument` its second argument,
    /// after the paths.
    fn open_as(
        paths: &Bound<'_, PyAny>,
        (name, argument): (&str, Option<&Bound<'_, PyAny>>),
        skip_short: bool,
        open: impl Fn(Options, Vec<PathBuf>, Cut) -> Opened<twinbuf::Records> + Send + Sync + 'static,
    ) -> PyResult<Self> {
        let (py, sources) = (paths.py(), paths_of(paths)?);
        let options = [("skip_short", skip_short)].into_py_dict(py)?;
        let arguments = iter::once(absolute(py, &sources)?).chain(argument.cloned());
        let call = (name, PyTuple::new(py, arguments.collect::<Vec<_>>())?, options).into_pyobject(py)?;
        let opener = move |cut| {
            let options = twinbuf::Records::options().skip_short(skip_short);
            open(options, files(&sources)?, cut).map(Arc::new).map(Files::Fixed)
        };
        Self::opened(py, Object::new(&call), Arc::new(opener), Cut::Rows)
    }

    fn opened(py: Python<'_>, call: Object, opener: Arc<Opener>, cut: Cut) -> PyResult<Self> {
        let files = detached(py, || opener(cut)).map_err(|error| unopened(py, &error))?;
        let record = files.record()?;
        Ok(Self { files, opener, cut, steps: Vec::new(), record, calls: vec![call] })
    }

    /// Returns the same records with one more step; ``pickle`` repeats `call`.
    fn with(&self, step: Option<Step>, call: &Bound<'_, PyTuple>) -> PyResult<Self> {
        let (py, mut record) = (call.py(), self.record.clone());
        let mut steps: Vec<_> = self.steps.iter().map(|step| step.copy(py)).collect();
        let mut calls: Vec<_> = self.calls.iter().map(|call| call.copy(py)).collect();
        calls.push(Object::new(call));
        if let Some(step) = step {
            record = step.output(&record).map_err(wrong)?;
            steps.push(step);
        }
        let (files, opener, cut) = (self.files.clone(), self.opener.clone(), self.cut);
        Ok(Self { files, opener, cut, steps, record, calls })
    }

    /// Returns the data set and the steps for a loader. Without `to` and `map` there is a step more for tokens: a cast
    /// to the type that torch's embeddings and losses take.
    pub(crate) fn for_loader(&self) -> PyResult<(Box<dyn Dataset>, Vec<Step>)> {
        let mut steps = self.steps.clone();
        let tokens = matches!(self.record.dtype(), Some(DType::U16 | DType::U32));
        if tokens && self.calls.len() == 1 && !self.record.is_ragged() && self.record.shape().len() < 2 {
            steps.push(Step::cast(self.dtype_in_slots(), DType::I64)?);
        }
        Ok((self.files.data_set(), steps))
    }

    fn dtype_in_slots(&self) -> DType {
        dtype::of(&self.record)
    }

    /// Returns the mean size of a record in the files, in bytes.
    pub(crate) fn record_bytes(&self) -> u64 {
        let ranges = self.files.ranges();
        ranges.bytes() / ranges.len().max(1)
    }

    fn not_ragged(&self, what: &str) -> PyResult<()> {
        match self.record.is_ragged() {
            true => Err(errors::of_type(what, "records of one size", "records that differ in length")),
            false => Ok(()),
        }
    }

    /// Reads these records, and applies the steps to them.
    fn read<'py>(
        &self,
        py: Python<'py>,
        numbers: impl ExactSizeIterator<Item = u64> + Send,
    ) -> PyResult<Bound<'py, PyAny>> {
        let ranges = self.files.ranges();
        let plan = twinbuf::Plan::builder(ranges.len()).batch(1).build();
        let plan = plan.map_err(|error| errors::option(py, error))?;
        let mut steps = self.steps.clone();
        let mut types = vec![self.files.record()?];
        for step in &steps {
            let out = step.output(&types[types.len() - 1]);
            types.push(out.map_err(|error| errors::of_transform(py, error))?);
        }
        let (mut all, mut ends) = (Vec::new(), Vec::new());
        let (record, count) = (&types[types.len() - 1], numbers.len());
        if record.is_ragged() {
            resize(&mut ends, count)?;
        }
        detached(py, || {
            let (mut record, mut room) = (Vec::new(), Vec::new());
            for (at, number) in numbers.enumerate() {
                let batch = plan.batch(0, number);
                let batch = batch.ok_or_else(|| PyIndexError::new_err("no such record"))?;
                resize(&mut record, ranges.lengths(&batch).sum())?;
                let read = ranges.read(&batch, &mut record);
                read.map_err(|error| Python::attach(|py| errors::raise(py, Failure::of_file(&error))))?;
                for (step, out) in steps.iter_mut().zip(&types[1..]) {
                    // Room that is aligned as a slot is.
                    resize(&mut room, out.len().div_ceil(8))?;
                    let room: &mut [u8] = &mut bytemuck::cast_slice_mut::<u64, u8>(&mut room)[..out.len()];
                    let made = directly(|| step.apply_one(&record, room, &Context::new(&batch)));
                    let made = made.map_err(|error| Python::attach(|py| errors::of_transform(py, error)))?;
                    resize(&mut record, made)?;
                    record.copy_from_slice(&room[..made]);
                }
                let end = all.len();
                resize(&mut all, end + record.len())?;
                all[end..].copy_from_slice(&record);
                ends.get_mut(at).into_iter().for_each(|end| *end = all.len());
            }
            PyResult::Ok(())
        })?;
        let array = |bytes: &[u8], records| {
            let copied = PyByteArray::new_with(py, bytes.len(), |out| {
                out.copy_from_slice(bytes);
                Ok(())
            });
            transform::array(py, copied?, record, records)
        };
        if record.is_ragged() {
            let start = |at: usize| at.checked_sub(1).map_or(0, |before| ends[before]);
            let arrays = (0..count).map(|at| array(&all[start(at)..ends[at]], 1)?.get_item(0));
            return Ok(PyList::new(py, arrays.collect::<PyResult<Vec<_>>>()?)?.into_any());
        }
        array(&all, count)
    }
}

/// Sets the length; new elements are zero. `MemoryError` if there is no memory for them.
fn resize<T: Default + Clone>(all: &mut Vec<T>, len: usize) -> PyResult<()> {
    all.try_reserve(len.saturating_sub(all.len()))
        .map_err(|_| PyMemoryError::new_err("no memory for the records: read fewer at a time"))?;
    all.resize(len, T::default());
    Ok(())
}

#[pymethods]
impl Records {
    /// Open files without a header as records of ``record_bytes`` bytes.
    #[staticmethod]
    #[pyo3(signature = (paths, record_bytes, *, skip_short=false))]
    fn open(paths: &Bound<'_, PyAny>, record_bytes: &Bound<'_, PyAny>, skip_short: bool) -> PyResult<Self> {
        let bytes = whole("record_bytes", record_bytes)?;
        let open = move |options: Options, files, _| options.open(files, bytes);
        Self::open_as(paths, ("open", Some(record_bytes)), skip_short, open)
    }

    /// Open headerless files of numbers, as written by ``numpy.ndarray.tofile`` and nanoGPT.
    ///
    /// A record is one number: use `windows`. Files that begin like another format are refused.
    #[staticmethod]
    #[pyo3(signature = (paths, dtype, *, skip_short=false))]
    fn open_headerless(
        paths: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        skip_short: bool,
    ) -> PyResult<Self> {
        let element = dtype::parse(dtype)?;
        let open = move |options: Options, files, cut| options.open_headerless(files, element, cut);
        Self::open_as(paths, ("open_headerless", Some(dtype)), skip_short, open)
    }

    /// Open token files with llm.c's header. A record is one token: use `windows`.
    #[staticmethod]
    #[pyo3(signature = (paths, *, skip_short=false))]
    fn open_llm_c(paths: &Bound<'_, PyAny>, skip_short: bool) -> PyResult<Self> {
        Self::open_as(paths, ("open_llm_c", None), skip_short, Options::open_llm_c)
    }

    /// Open ``.npy`` files. A record is one entry of the first axis.
    #[staticmethod]
    #[pyo3(signature = (paths, *, skip_short=false))]
    fn open_npy(paths: &Bound<'_, PyAny>, skip_short: bool) -> PyResult<Self> {
        Self::open_as(paths, ("open_npy", None), skip_short, Options::open_npy)
    }

    /// Open the tensor of this name in ``.safetensors`` files. A record is one entry of the first axis.
    #[staticmethod]
    #[pyo3(signature = (paths, tensor, *, skip_short=false))]
    fn open_safetensors(
        paths: &Bound<'_, PyAny>,
        tensor: &Bound<'_, PyString>,
        skip_short: bool,
    ) -> PyResult<Self> {
        let name = tensor.extract::<String>()?;
        let open = move |options: Options, files, cut| options.open_safetensors(files, &name, cut);
        Self::open_as(paths, ("open_safetensors", Some(tensor)), skip_short, open)
    }

    /// Open the array of this name in ``.npz`` files, as ``numpy.savez`` writes them. A record is one entry of the first
    /// axis.
    #[staticmethod]
    #[pyo3(signature = (paths, array, *, skip_short=false))]
    fn open_npz(paths: &Bound<'_, PyAny>, array: &Bound<'_, PyString>, skip_short: bool) -> PyResult<Self> {
        let name = array.extract::<String>()?;
        let open = move |options: Options, files, cut| options.open_npz(files, &name, cut);
        Self::open_as(paths, ("open_npz", Some(array)), skip_short, open)
    }

    /// Open records that differ in length: files of bytes, each with an index.
    ///
    /// An index is a ``.npy`` file of one more offset than there are records: record ``i`` is the bytes from offset ``i``
    /// to offset ``i + 1``. ``numpy.cumsum([0] + [len(record) for record in records])`` makes one. In a batch, such
    /// records are a list of arrays.
    #[staticmethod]
    fn open_indexed(paths: &Bound<'_, PyAny>, indexes: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, data, indexes) = (paths.py(), paths_of(paths)?, paths_of(indexes)?);
        let call = ("open_indexed", (absolute(py, &data)?, absolute(py, &indexes)?), PyDict::new(py));
        let found = detached(py, || Ok((files(&data)?, files(&indexes)?)));
        let (data, indexes) = found.map_err(|error| unopened(py, &error))?;
        let (wanted, found) = (data.len(), indexes.len());
        if wanted != found {
            return Err(wrong(format!("indexes: wanted one for each of {wanted} files, found {found}")));
        }
        let pairs: Vec<_> = data.into_iter().zip(indexes).collect();
        let open = move |_| RaggedRecords::open_indexed(pairs.clone()).map(Arc::new).map(Files::Ragged);
        Self::opened(py, Object::new(call.into_pyobject(py)?.as_any()), Arc::new(open), Cut::Rows)
    }

    /// Open token files of Megatron-LM: ``.bin`` with an index in the ``.idx`` of the same name. A record is a sequence;
    /// in a batch, they are a list of arrays. They have the type of the file: ``to("int64")`` makes them what torch's
    /// embeddings take.
    #[staticmethod]
    fn open_megatron(paths: &Bound<'_, PyAny>) -> PyResult<Self> {
        let (py, sources) = (paths.py(), paths_of(paths)?);
        let call = ("open_megatron", (absolute(py, &sources)?,), PyDict::new(py)).into_pyobject(py)?;
        let open = move |_| RaggedRecords::open_megatron(files(&sources)?).map(Arc::new).map(Files::Ragged);
        Self::opened(py, Object::new(&call), Arc::new(open), Cut::Rows)
    }

    /// The same records with elements of another type: they are cast while they are copied into the slot.
    ///
    /// Booleans and integers become any wider integer that holds all their numbers, float32 or float64. float32 becomes
    /// float16, bfloat16 or float64; these three become float32. `map` makes any other type.
    ///
    /// A loader casts tokens by default: records of uint16 or uint32 with at most one axis become int64, the type that
    /// torch's embeddings and losses take. ``to("uint16")`` leaves them as they are in the file. Records that differ in
    /// length are not cast by default, because a cast makes room in each slot for a batch of the longest record:
    /// ``to("int64")`` casts them.
    ///
    /// With ``mean`` or ``std``, one number or one for each channel (the last axis), an element ``x`` becomes
    /// ``(x / most - mean) / std``, where ``most`` is 255 for uint8, 65535 for uint16, 32768 for int16, and 1 for float16
    /// and bfloat16. ``planar`` puts the channels first: ``(height, width, channels)`` becomes ``(channels, height,
    /// width)``. Both take records of these five types, and make float32.
    #[pyo3(signature = (dtype, *, mean=None, std=None, planar=false))]
    fn to(
        &self,
        dtype: &Bound<'_, PyAny>,
        mean: Option<&Bound<'_, PyAny>>,
        std: Option<&Bound<'_, PyAny>>,
        planar: bool,
    ) -> PyResult<Self> {
        let (py, from, to) = (dtype.py(), self.dtype_in_slots(), dtype::parse(dtype)?);
        let step = match (mean, std) {
            (None, None) if !planar && from == to => None,
            (None, None) if !planar => Some(Step::cast(from, to)?),
            _ if to != DType::F32 => {
                let wanted = "dtype: wanted float32 for `mean`, `std` and `planar`";
                return Err(wrong(format!("{wanted}, found {}", dtype::name(to))));
            }
            _ => Some(Step::Normal(self.normal(from, mean, std, planar)?)),
        };
        let options = [("mean", mean), ("std", std)].into_py_dict(py)?;
        options.set_item("planar", planar)?;
        self.with(step, &("to", (dtype,), options).into_pyobject(py)?)
    }

    /// The same records after ``function(record, seed)``, which returns an array of this type and shape for each.
    ///
    /// The reading threads call it, with a copy of the record as a numpy array, and take the GIL for that: use several
    /// ``workers`` where it releases the GIL, as decoders do. ``seed`` is a number for this record in this epoch, made of
    /// the plan's seed: the same after any resume. Seed a generator with it to make random changes repeatable.
    fn map(
        &self,
        function: &Bound<'_, PyAny>,
        dtype: &Bound<'_, PyAny>,
        shape: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        if !function.is_callable() {
            return Err(errors::of_type("function", "a function", function.repr()?));
        }
        let (py, to) = (dtype.py(), dtype::record(dtype, shape)?);
        let call = ("map", (function, dtype, shape), PyDict::new(py)).into_pyobject(py)?;
        self.with(Some(Step::map(function, self.record.clone(), to)), &call)
    }

    /// The same files as windows of ``rows`` rows, one every ``stride`` rows.
    ///
    /// ``windows(1025, 1024)`` is inputs and targets of 1024 tokens: adjacent windows share one token. No window
    /// crosses from one file into the next. Rows at the end of a file that do not fill a window are left out.
    #[pyo3(signature = (rows, stride=None))]
    fn windows(&self, rows: &Bound<'_, PyAny>, stride: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let py = rows.py();
        let (rows, stride) = (whole::<usize>("rows", rows)?, whole_or_none("stride", stride)?);
        self.not_ragged("windows")?;
        if rows == 0 {
            return Err(wrong("rows: wanted at least 1, found 0"));
        }
        if self.files.data_set().element().is_none() {
            return Err(wrong(
                "windows are made of rows, and plain bytes have none: open the files with `open_headerless`",
            ));
        }
        if self.calls.len() > 1 {
            return Err(wrong("windows: wanted a call before `to` and `map`, found one after them"));
        }
        let cut = Cut::Windows { rows, stride: stride.unwrap_or(rows) };
        Self::opened(py, self.calls[0].copy(py), self.opener.clone(), cut)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.files.ranges().len())?)
    }

    /// A record as a numpy array. A slice or a list of numbers returns several: an array with one axis more, or a list of
    /// arrays if the records differ in length. Each call reads from the files.
    fn __getitem__<'py>(&self, py: Python<'py>, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let len = isize::try_from(self.files.ranges().len())?;
        if let Ok(slice) = index.cast::<PySlice>() {
            let part = slice.indices(len)?;
            return self
                .read(py, (0..part.slicelength).map(|i| (part.start + i as isize * part.step) as u64));
        }
        if let Ok(steps) = index.cast::<PyRange>() {
            let list = range(steps, len as u64)?.map_err(|found| {
                PyIndexError::new_err(format!("wanted records from 0 to {}, found {found}", len - 1))
            })?;
            return self.read(py, (0..steps.len()?).map(|at| list.get(at as u64).unwrap_or_default()));
        }
        if !index.is_instance_of::<PyInt>() && index.hasattr("__len__")? {
            let wanted = numbers("index", index)?;
            if let Some(most) = wanted.iter().max().filter(|&&most| most >= len as u64) {
                let line = format!("wanted records from 0 to {}, found {most}", len - 1);
                return Err(PyIndexError::new_err(line));
            }
            return self.read(py, wanted.into_iter());
        }
        let outside =
            || PyIndexError::new_err(format!("wanted a record from -{len} to {}, found {index}", len - 1));
        let wanted =
            index.extract::<isize>().map_err(|error| match error.is_instance_of::<PyOverflowError>(py) {
                true => outside(),
                false => error,
            })?;
        let number = if wanted < 0 { wanted + len } else { wanted };
        if !(0..len).contains(&number) {
            return Err(outside());
        }
        self.read(py, iter::once(number as u64))?.get_item(0)
    }

    /// The name of the elements' type, as numpy and torch spell it.
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::name(self.dtype_in_slots())
    }

    /// The shape of one record; of the longest, if they differ in length.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.record.shape())
    }

    /// The bytes of all records in the files. Bytes shared by several windows are counted for each of them.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.files.ranges().bytes()
    }

    /// The files, in the order of their records.
    #[getter]
    fn paths(&self) -> Vec<PathBuf> {
        self.files.ranges().shards().iter().map(|shard| shard.path().to_owned()).collect()
    }

    /// The files that ``skip_short`` left out, because they are shorter than one record.
    #[getter]
    fn skipped(&self) -> Vec<PathBuf> {
        match &self.files {
            Files::Fixed(records) => records.skipped().to_vec(),
            Files::Ragged(_) => Vec::new(),
        }
    }

    fn __repr__(&self) -> String {
        let ranges = self.files.ranges();
        let (records, files) = (ranges.len(), ranges.shards().len());
        let upto = if self.record.is_ragged() { "up to " } else { "" };
        let (dtype, shape) = (dtype::name(self.dtype_in_slots()), self.record.shape());
        format!("<Records: {records} of {upto}{dtype} {shape:?} in {files} file(s)>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        let functions = self.steps.iter().filter_map(Step::object).map(AsRef::as_ref);
        functions.chain(&self.calls).try_for_each(|object| object.traverse(&visit))
    }

    fn __clear__(&self) {
        self.steps.iter().filter_map(Step::object).for_each(|object| object.clear());
        self.calls.iter().for_each(Object::clear);
    }

    /// All records as one numpy array, for ``numpy.asarray``. It reads them from the files.
    #[pyo3(signature = (dtype=None, copy=None))]
    fn __array__<'py>(
        &self,
        py: Python<'py>,
        dtype: Option<&Bound<'py, PyAny>>,
        copy: Option<bool>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.not_ragged("numpy.asarray")?;
        if copy == Some(false) {
            return Err(PyValueError::new_err("copy: records are read from their files, which is a copy"));
        }
        py.import("numpy")?
            .call_method1("asarray", (self.read(py, (0..self.__len__()?).map(|at| at as u64))?, dtype))
    }

    /// For ``pickle``: opens the files again, and makes the same changes.
    #[staticmethod]
    fn _again<'py>(
        py: Python<'py>,
        calls: Vec<(String, Bound<'py, PyTuple>, Bound<'py, PyDict>)>,
        wanted: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let mut records = py.get_type::<Self>().into_any();
        for (name, arguments, options) in calls {
            records = records.call_method(name, arguments, Some(&options))?;
        }
        let found = records.len()?;
        if found != wanted {
            let line = format!("{}: wanted {wanted} records, found {found}", records.repr()?);
            return Err(errors::raise(py, Failure::new("FileError", line)));
        }
        Ok(records)
    }

    fn __reduce__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyTuple>> {
        let (py, this) = (slf.py(), slf.get());
        let calls = PyList::new(py, this.calls.iter().map(|call| call.get(py)))?;
        if let Cut::Windows { rows, stride } = this.cut {
            calls.insert(1, ("windows", (rows, stride), PyDict::new(py)))?;
        }
        (slf.get_type().getattr("_again")?, (calls, slf.as_any().len()?)).into_pyobject(py)
    }
}

impl Records {
    /// Makes the transform of `to` for `mean`, `std` and `planar`.
    fn normal(
        &self,
        from: DType,
        mean: Option<&Bound<'_, PyAny>>,
        std: Option<&Bound<'_, PyAny>>,
        planar: bool,
    ) -> PyResult<Transform> {
        let shape = self.record.shape();
        let one = |numbers: &Option<Vec<f64>>| numbers.as_ref().is_none_or(|numbers| numbers.len() == 1);
        let numbers = |name: &str, found: Option<&Bound<'_, PyAny>>, wanted: &str, good: fn(f64) -> bool| {
            let Some(found) = found else { return Ok(None) };
            let numbers =
                found.extract::<f64>().map(|one| vec![one]).or_else(|_| found.extract::<Vec<f64>>());
            let Ok(numbers) = numbers else {
                return Err(errors::of_type(name, "a number, or one for each channel", found.repr()?));
            };
            match numbers.iter().find(|&&number| !good(number)) {
                Some(found) => Err(wrong(format!("{name}: wanted {wanted}, found {found}"))),
                None => Ok(Some(numbers)),
            }
        };
        let mean = numbers("mean", mean, "finite numbers", f64::is_finite)?;
        let std = numbers("std", std, "finite numbers other than 0", |std| std.is_finite() && std != 0.0)?;
        // If `mean` and `std` are the same for all channels, the number of channels does not matter.
        let channels =
            if one(&mean) && one(&std) && !planar { 1 } else { shape.last().copied().unwrap_or(1) };
        let transform = Transform::new(from, channels);
        let mut transform = transform
            .map_err(|error| wrong(format!("mean, std, planar: {}", dtype::in_python(&error.to_string()))))?;
        if mean.is_some() || std.is_some() {
            let most = match from {
                DType::U8 => 255.0,
                DType::U16 => 65535.0,
                DType::I16 => 32768.0,
                _ => 1.0,
            };
            let each = |numbers: Option<Vec<f64>>, default: f64| match numbers {
                None => vec![default; channels],
                Some(one) if one.len() == 1 => vec![one[0]; channels],
                Some(numbers) => numbers,
            };
            let (mean, std) = (each(mean, 0.0), each(std, 1.0));
            let scale: Vec<f32> = std.iter().map(|std| (1.0 / (most * std)) as f32).collect();
            let shift: Vec<f32> = mean.iter().zip(&std).map(|(mean, std)| (-mean / std) as f32).collect();
            if mean.len() != channels || std.len() != channels {
                let (mean, std) = (mean.len(), std.len());
                return Err(wrong(format!(
                    "mean, std: wanted one number or {channels}, one for each channel, found {mean} and {std}"
                )));
            }
            transform = transform.normalise(&scale, &shift).map_err(wrong)?;
        }
        if planar {
            let [.., height, width, _] = shape else {
                return Err(wrong(format!(
                    "planar: wanted records of height, width and channels, found {shape:?}"
                )));
            };
            transform = transform.planar(height * width).map_err(wrong)?;
        }
        Ok(transform)
    }
}

pub(crate) fn read_mode_of(py: Python<'_>, name: &str) -> PyResult<ReadMode> {
    match name {
        "auto" => Ok(ReadMode::Auto),
        "pread" => Ok(ReadMode::Pread),
        "direct" => Ok(ReadMode::Direct),
        _ => {
            let wanted = "option `read_mode`: wanted \"auto\", \"pread\" or \"direct\"";
            Err(errors::option(py, format!("{wanted}, found {name:?}")))
        }
    }
}
