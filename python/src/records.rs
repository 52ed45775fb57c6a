//! The Rust part of `Records`: files of records, and the steps that change the records on their way to the slot. The rest
//! is in `twinbuf/_records.py`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::{iter, mem};

use bytemuck::{AnyBitPattern, NoUninit};
use pyo3::exceptions::{PyMemoryError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyList, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use twinbuf::mmap::{Cut, DType, RaggedRecords, Ranges, ReadMode, files, transform as kernels};
use twinbuf::transform::{Context, RecordTransform, RecordType, Transform};
use twinbuf::{BoxError, Dataset, LastBatch};

use crate::dtype;
use crate::errors::{self, Failure};
use crate::foreign::{Call, answer_to, up_to_call};
use crate::locked::detached;
use crate::object::{Object, let_go};
use crate::plan::List;

/// The class `Records` derives from this one.
#[pyclass(frozen, subclass, module = "twinbuf._twinbuf", name = "_Records")]
pub(crate) struct Records {
    files: Files,
    /// What `to` and `map` do to each record, in order.
    steps: Vec<Step>,
    /// Whether neither was called.
    plain: bool,
    /// The types of a record: in the files, and after each step.
    types: Vec<RecordType>,
}

/// How to open and change records, as `_records.py` has checked it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
struct How {
    /// The name of the method that opens the files.
    kind: String,
    paths: Vec<PathBuf>,
    argument: Option<Argument>,
    skip_short: bool,
    windows: Option<(usize, usize)>,
    steps: Vec<Change>,
}

/// The bytes of a record; the name of a type, a tensor or an array; or the paths of indexes.
#[derive(FromPyObject)]
enum Argument {
    Bytes(usize),
    Name(String),
    Indexes(Vec<PathBuf>),
}

/// The scale and the shift of each channel.
type Scales = Option<(Vec<f32>, Vec<f32>)>;

/// A call of `to`: the type; for `mean`, `std` and `planar` the number of channels, and whether they come first. A call of
/// `map`: the function, and the type and shape of what it returns.
#[derive(FromPyObject)]
enum Change {
    To(String, Option<(usize, Scales, bool)>),
    Map(Py<PyAny>, String, Vec<usize>),
}

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

/// The files that these paths, folders and patterns name now.
#[pyfunction]
pub(crate) fn _files(py: Python<'_>, paths: Vec<PathBuf>) -> PyResult<Vec<OsString>> {
    let found = detached(py, || files(paths)).map_err(|error| unopened(py, &error))?;
    Ok(found.into_iter().map(PathBuf::into_os_string).collect())
}

impl How {
    fn open(&self, py: Python<'_>) -> PyResult<Files> {
        let cut = self.windows.map_or(Cut::Rows, |(rows, stride)| Cut::Windows { rows, stride });
        let options = twinbuf::Records::options().skip_short(self.skip_short);
        let paths = &self.paths;
        if let Some(Argument::Indexes(indexes)) = &self.argument {
            let (wanted, found) = (paths.len(), indexes.len());
            if wanted != found {
                let wanted = format!("one for each of {wanted} files");
                return Err(wrong(format!("indexes: wanted {wanted}, found {found}")));
            }
        }
        let fixed = |records| Files::Fixed(Arc::new(records));
        let ragged = |records| Files::Ragged(Arc::new(records));
        let opened = detached(py, || {
            PyResult::Ok(match (&*self.kind, &self.argument) {
                (_, Some(Argument::Indexes(indexes))) => {
                    RaggedRecords::open_indexed(paths.iter().zip(indexes)).map(ragged)
                }
                ("open_megatron", _) => RaggedRecords::open_megatron(paths).map(ragged),
                (_, Some(Argument::Bytes(bytes))) => options.open(paths, *bytes).map(fixed),
                ("open_headerless", Some(Argument::Name(dtype))) => {
                    options.open_headerless(paths, dtype::parse(dtype)?, cut).map(fixed)
                }
                ("open_safetensors", Some(Argument::Name(name))) => {
                    options.open_safetensors(paths, name, cut).map(fixed)
                }
                (_, Some(Argument::Name(name))) => options.open_npz(paths, name, cut).map(fixed),
                ("open_llm_c", _) => options.open_llm_c(paths, cut).map(fixed),
                _ => options.open_npy(paths, cut).map(fixed),
            })
        });
        opened?.map_err(|error| unopened(py, &error))
    }
}

impl Records {
    /// Returns the type of a record after the steps.
    fn record(&self) -> &RecordType {
        &self.types[self.steps.len()]
    }

    /// Returns the data set and the steps for a loader, which has its own references to objects of Python. Without `to`
    /// and `map` there is a step more for tokens of one size: a cast to the type that torch's embeddings and losses
    /// take.
    pub(crate) fn for_loader(&self, py: Python<'_>) -> PyResult<(Box<dyn Dataset>, Vec<Step>)> {
        let (mut steps, record) =
            (self.steps.iter().map(|step| step.copy(py)).collect::<Vec<_>>(), self.record());
        let tokens = matches!(record.dtype(), Some(DType::U16 | DType::U32));
        if tokens && self.plain && !record.is_ragged() && record.shape().len() < 2 {
            steps.push(Step::cast(dtype::of(record), DType::I64)?);
        }
        Ok((self.files.data_set(), steps))
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
    /// ``base``: the same records before the last step.
    #[new]
    fn new(py: Python<'_>, how: How, base: Option<&Self>) -> PyResult<Self> {
        let files = base.map_or_else(|| how.open(py), |base| Ok(base.files.clone()))?;
        let data = files.data_set();
        let record = match data.element() {
            Some((dtype, shape)) => RecordType::new(dtype, shape).map_err(wrong)?,
            None => RecordType::bytes(data.record_bytes()),
        };
        // Of the longest record, if they differ in length.
        let record = if let Files::Ragged(_) = files { record.ragged() } else { record };
        let (mut types, mut steps, plain) = (vec![record], Vec::new(), how.steps.is_empty());
        for change in how.steps {
            let record = &types[steps.len()];
            let from = dtype::of(record);
            let step = match change {
                Change::Map(..) if dtype::format(from).is_none() => return Err(dtype::no_array(from)),
                Change::Map(function, to, shape) => {
                    let (object, to) = (Object::new(function.bind(py)), dtype::record(&to, &shape)?);
                    Step::Map(Arc::new(Function { object: Arc::new(object), from: record.clone(), to }))
                }
                Change::To(_, Some(channels)) => Step::Normal(normal(record, from, channels)?),
                Change::To(name, None) => match dtype::parse(&name)? {
                    to if from == to => continue,
                    to => Step::cast(from, to)?,
                },
            };
            types.push(step.output(record).map_err(wrong)?);
            steps.push(step);
        }
        Ok(Self { files, steps, plain, types })
    }

    /// Read these records, and apply the steps to them. Returns an array, a list of arrays, or a tuple: the arguments of
    /// `made_by`, for a call of a function that ``answers`` does not have.
    #[pyo3(signature = (list, answers=Vec::new()))]
    fn _read<'py>(&self, py: Python<'py>, list: List, answers: Vec<Vec<u8>>) -> PyResult<Bound<'py, PyAny>> {
        let (list, ranges) = (list.records(py)?, self.files.ranges());
        let (mut steps, types, record) = (self.steps.clone(), &self.types, self.record());
        let (mut all, mut ends, mut bytes, mut answers) = (Vec::new(), Vec::new(), Vec::new(), answers);
        let (count, mut rooms) = (usize::try_from(list.len())?, vec![Vec::new(); steps.len()]);
        // About 1 MiB at a time, and at most 4096 records: scattered ones take a system call each.
        let piece = ((1 << 20) / (ranges.bytes() / ranges.len()).max(1)).clamp(1, 4096);
        let plan = twinbuf::Plan::builder(0).records(list).batch(piece).last_batch(LastBatch::Keep).build();
        let plan = if count == 0 { None } else { Some(plan.map_err(|error| errors::option(py, error))?) };
        for batch in plan.iter().flat_map(|plan| (0..).map_while(|step| plan.batch(0, step))) {
            if batch.step() > 0 {
                py.check_signals()?;
            }
            let read = || {
                let lengths: Vec<_> = ranges.lengths(&batch).collect();
                resize(&mut bytes, lengths.iter().sum())?;
                ranges.read(&batch, &mut bytes)?;
                // Records of one size together.
                let (parts, records) =
                    if types[0].is_ragged() { (lengths, 1) } else { (vec![bytes.len()], lengths.len()) };
                let mut rest = &*bytes;
                for len in parts {
                    let mut made;
                    (made, rest) = rest.split_at(len);
                    for ((step, out), room) in steps.iter_mut().zip(&types[1..]).zip(&mut rooms) {
                        // Room that is aligned as a slot is.
                        let most = out.len() * records;
                        resize(room, most.div_ceil(8))?;
                        let room = &mut bytemuck::cast_slice_mut::<u64, u8>(room)[..most];
                        let len = step.apply_one(made, room, &Context::new(&batch))?;
                        made = &room[..len];
                    }
                    let (end, part) = (all.len(), ends.len());
                    resize(&mut all, end + made.len())?;
                    all[end..].copy_from_slice(made);
                    resize(&mut ends, part + 1)?;
                    ends[part] = all.len();
                }
                Result::<(), BoxError>::Ok(())
            };
            let answers = mem::take(&mut answers).into_iter().map(Ok).collect();
            let (read, call) = detached(py, || up_to_call(answers, read));
            if let Some(call) = call {
                return Ok(call.arguments(py)?.0.into_any());
            }
            read.map_err(|error| match error.downcast::<twinbuf::mmap::Error>() {
                Ok(error) => errors::raise(py, Failure::of_file(&error)),
                Err(error) => errors::of_transform(py, error),
            })?;
        }
        let dtype = dtype::of(record);
        if dtype::format(dtype).is_none() {
            return Err(dtype::no_array(dtype));
        }
        let array = |bytes: &[u8]| {
            let copied = PyByteArray::new_with(py, bytes.len(), |out| {
                out.copy_from_slice(bytes);
                Ok(())
            });
            py.import("numpy")?.call_method1("frombuffer", (copied?, dtype::name(dtype)))
        };
        if record.is_ragged() {
            let starts = iter::once(0).chain(ends.iter().copied());
            let arrays = starts.zip(&ends).map(|(start, &end)| array(&all[start..end]));
            return Ok(PyList::new(py, arrays.collect::<PyResult<Vec<_>>>()?)?.into_any());
        }
        let shape: Vec<_> = iter::once(&count).chain(record.shape()).collect();
        array(&all)?.call_method1("reshape", (PyTuple::new(py, shape)?,))
    }

    /// Whether records differ in length.
    #[getter]
    fn _ragged(&self) -> bool {
        self.record().is_ragged()
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.files.ranges().len())?)
    }

    /// The name of the elements' type, as numpy and torch spell it.
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::name(dtype::of(self.record()))
    }

    /// The shape of one record; of the longest, if they differ in length.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.record().shape())
    }

    /// The bytes of all records in the files. Bytes shared by several windows are counted for each of them.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.files.ranges().bytes()
    }

    #[getter]
    fn _paths(&self) -> Vec<OsString> {
        self.files.ranges().shards().iter().map(|shard| shard.path().into()).collect()
    }

    #[getter]
    fn _skipped(&self) -> Vec<OsString> {
        match &self.files {
            Files::Fixed(records) => records.skipped().iter().map(OsString::from).collect(),
            Files::Ragged(_) => Vec::new(),
        }
    }

    fn __repr__(&self) -> String {
        let ranges = self.files.ranges();
        let (records, files) = (ranges.len(), ranges.shards().len());
        let upto = if self.record().is_ragged() { "up to " } else { "" };
        let (dtype, shape) = (dtype::name(dtype::of(self.record())), self.record().shape());
        format!("<Records: {records} of {dtype} {upto}{shape:?} in {files} file(s)>")
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.steps.iter().filter_map(Step::object).try_for_each(|object| object.traverse(&visit))
    }

    fn __clear__(&self, py: Python<'_>) {
        let_go(py, self.steps.iter().filter_map(|step| step.object()?.take()));
    }
}

/// Makes the transform of `to` for `mean`, `std` and `planar`.
fn normal(
    record: &RecordType,
    from: DType,
    (channels, scales, planar): (usize, Scales, bool),
) -> PyResult<Transform> {
    let transform = Transform::new(from, channels);
    let mut transform = transform
        .map_err(|error| wrong(format!("mean, std, planar: {}", dtype::in_python(&error.to_string()))))?;
    if let Some((scale, shift)) = scales {
        transform = transform.normalise(&scale, &shift).map_err(wrong)?;
    }
    if planar {
        let shape = record.shape();
        let [.., height, width, _] = shape else {
            let wanted = "records that end in height, width and channels";
            return Err(wrong(format!("planar: wanted {wanted}, found {shape:?}")));
        };
        transform = transform.planar(height * width).map_err(wrong)?;
    }
    Ok(transform)
}

/// One change of each record. `Records` has a list of them.
#[derive(Clone)]
pub(crate) enum Step {
    Cast {
        from: DType,
        to: DType,
    },
    /// To float32, with a scale and a shift for each channel, or as planes.
    Normal(Transform),
    Map(Arc<Function>),
}

/// A Python function that is called for each record.
pub(crate) struct Function {
    object: Arc<Object>,
    /// The types of the records that it is called with, and of those that it returns.
    from: RecordType,
    to: RecordType,
}

impl Step {
    /// Makes a cast. If there is none for these types, the error names those to which `from` can be cast.
    pub(crate) fn cast(from: DType, to: DType) -> PyResult<Self> {
        let step = Self::Cast { from, to };
        let can =
            |to| to == from || convert(from, to, &[], bytemuck::cast_slice_mut::<u64, u8>(&mut [])).is_ok();
        if can(to) {
            return Ok(step);
        }
        let way = dtype::format(from).map_or("use `torch()` of a loader's batch", |_| "use `map`");
        let (there, from, to) = (dtype::names(can), dtype::name(from), dtype::name(to));
        let line = format!("dtype: wanted {there} for records of {from}, found {to}: {way} for another type");
        Err(PyTypeError::new_err(line))
    }

    /// Returns a copy of the step with its own reference to the Python object.
    pub(crate) fn copy(&self, py: Python<'_>) -> Self {
        let Self::Map(function) = self else { return self.clone() };
        let (from, to) = (function.from.clone(), function.to.clone());
        Self::Map(Arc::new(Function { object: Arc::new(function.object.copy(py)), from, to }))
    }

    pub(crate) fn object(&self) -> Option<&Arc<Object>> {
        let Self::Map(function) = self else { return None };
        Some(&function.object)
    }
}

impl RecordTransform for Step {
    fn output(&self, record: &RecordType) -> Result<RecordType, BoxError> {
        let ragged = |found: RecordType| if record.is_ragged() { found.ragged() } else { found };
        match self {
            Self::Cast { from, to } => match record.dtype() {
                Some(_) => RecordType::new(*to, record.shape()).map(ragged),
                None => RecordType::new(*to, [record.len() / from.size()]).map(ragged),
            },
            Self::Normal(transform) => transform.output(record),
            Self::Map(function) => Ok(function.to.clone()),
        }
    }

    fn apply(&mut self, records: &[u8], out: &mut [u8], context: &Context<'_>) -> Result<(), BoxError> {
        match self {
            Self::Cast { from, to } => convert(*from, *to, records, out),
            Self::Normal(transform) => RecordTransform::apply(transform, records, out, context),
            Self::Map(function) => {
                let Function { object, from, to } = &**function;
                let call = || Call::Map {
                    object: object.clone(),
                    records: records.to_vec(),
                    seeds: context.records().map(|record| record.seed).collect(),
                    types: [from.clone(), to.clone()],
                };
                let made = answer_to(call)?;
                if made.len() != out.len() {
                    return Err(format!("{} bytes", out.len()).into());
                }
                out.copy_from_slice(&made);
                Ok(())
            }
        }
    }

    fn try_clone(&self) -> Option<Box<dyn RecordTransform>> {
        Some(Box::new(self.clone()))
    }

    fn pays(&self) -> bool {
        !matches!(self, Self::Map(_))
    }
}

/// Converts numbers one by one: each to a type that holds it, or to the nearest float.
fn convert(from: DType, to: DType, records: &[u8], out: &mut [u8]) -> Result<(), BoxError> {
    macro_rules! cast {
        ($($from:ident $number:ty: $($to:ident $result:ty),+;)+) => {
            match (from, to) {
                $($((DType::$from, DType::$to) => each(records, out, |number: $number| number as $result)?,)+)+
                (DType::U16, DType::U32) => kernels::u16_to_u32(records, numbers(out)?).map(drop)?,
                (DType::U16, DType::I64) => kernels::u16_to_i64(records, numbers(out)?).map(drop)?,
                (DType::F32, DType::F16) => kernels::f32_to_f16(records, numbers(out)?).map(drop)?,
                (DType::F32, DType::Bf16) => kernels::f32_to_bf16(records, numbers(out)?).map(drop)?,
                (_, DType::F32) => Transform::new(from, 1)?.apply(records, numbers(out)?).map(drop)?,
                _ => return Err("no such cast".into()),
            }
        };
    }
    cast! {
        Bool u8: U8 u8, I16 i16, I32 i32, I64 i64, U16 u16, U32 u32, U64 u64, F32 f32, F64 f64;
        U8 u8: I16 i16, I32 i32, I64 i64, U16 u16, U32 u32, U64 u64, F64 f64;
        I8 i8: I16 i16, I32 i32, I64 i64, F32 f32, F64 f64;
        U16 u16: I32 i32, U64 u64, F64 f64;
        I16 i16: I32 i32, I64 i64, F64 f64;
        U32 u32: I64 i64, U64 u64, F32 f32, F64 f64;
        I32 i32: I64 i64, F32 f32, F64 f64;
        U64 u64: F32 f32, F64 f64;
        I64 i64: F32 f32, F64 f64;
        F32 f32: F64 f64;
        F64 f64: F32 f32;
    }
    Ok(())
}

/// Returns the memory of a slot as numbers.
fn numbers<T: NoUninit + AnyBitPattern>(out: &mut [u8]) -> Result<&mut [T], BoxError> {
    bytemuck::try_cast_slice_mut(out).map_err(|error| format!("the slot: {error}").into())
}

fn each<A: AnyBitPattern, B: NoUninit + AnyBitPattern>(
    records: &[u8],
    out: &mut [u8],
    convert: impl Fn(A) -> B,
) -> Result<(), BoxError> {
    for (number, out) in records.chunks_exact(size_of::<A>()).zip(numbers(out)?) {
        *out = convert(bytemuck::pod_read_unaligned(number));
    }
    Ok(())
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
