//! `Records`: files of fixed-size records.

use std::path::PathBuf;
use std::sync::Arc;

use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use twinbuf::mmap::{Cut, DType, Options, files};

use crate::dtype::{self, Layout};
use crate::errors::{self, Failure};
use crate::number::{whole, whole_or_none};

/// Records of one size in one or several files, numbered consecutively from the first file on.
///
/// Open them with one of the static methods. Each takes a path or a list of paths. A path may be a folder or a pattern
/// such as ``train_*.bin``; its files are taken in natural order (``9`` before ``10``). All methods check every file's
/// header and length, and none reads the data.
///
/// A record is one row, the array's first axis; `windows` makes records of several rows.
#[pyclass(frozen, module = "twinbuf", name = "Records")]
pub(crate) struct Records {
    pub(crate) inner: Arc<twinbuf::Records>,
    format: Format,
    sources: Vec<PathBuf>,
    skip_short: bool,
}

/// How the files were opened, to open them again as windows.
#[derive(Clone)]
enum Format {
    Raw(usize),
    Headerless(DType),
    LlmC,
    Npy,
    Safetensors(String),
}

/// One path or several.
fn paths_of(paths: &Bound<'_, PyAny>) -> PyResult<Vec<PathBuf>> {
    let one = paths.extract::<PathBuf>().map(|path| vec![path]);
    one.or_else(|_| paths.extract::<Vec<PathBuf>>()).map_err(|_| {
        let found = paths.repr().map_or_else(|_| paths.get_type().to_string(), |found| found.to_string());
        PyTypeError::new_err(format!(
            "paths: wanted a path or a list of paths, as `str` or `Path`, found {found}"
        ))
    })
}

impl Records {
    fn open_as(paths: &Bound<'_, PyAny>, format: Format, skip_short: bool) -> PyResult<Self> {
        Self::cut(paths.py(), paths_of(paths)?, format, skip_short, Cut::Rows)
    }

    fn cut(
        py: Python<'_>,
        sources: Vec<PathBuf>,
        format: Format,
        skip_short: bool,
        cut: Cut,
    ) -> PyResult<Self> {
        let opened = py.detach(|| {
            let files = files(&sources)?;
            let options: Options = twinbuf::Records::options().skip_short(skip_short);
            match &format {
                Format::Raw(bytes) => options.open(files, *bytes),
                Format::Headerless(dtype) => options.open_headerless(files, *dtype, cut),
                Format::LlmC => options.open_llm_c(files, cut),
                Format::Npy => options.open_npy(files, cut),
                Format::Safetensors(tensor) => options.open_safetensors(files, tensor, cut),
            }
        });
        let inner = Arc::new(opened.map_err(|error| errors::raise(py, Failure::of_file(&error)))?);
        Ok(Self { inner, format, sources, skip_short })
    }

    pub(crate) fn layout(&self) -> Layout {
        Layout { dtype: self.inner.dtype(), shape: self.inner.shape().to_vec() }
    }
}

#[pymethods]
impl Records {
    /// Open files without a header as records of ``record_bytes`` bytes.
    #[staticmethod]
    #[pyo3(signature = (paths, record_bytes, *, skip_short=false))]
    fn open(paths: &Bound<'_, PyAny>, record_bytes: &Bound<'_, PyAny>, skip_short: bool) -> PyResult<Self> {
        Self::open_as(paths, Format::Raw(whole("record_bytes", record_bytes)?), skip_short)
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
        Self::open_as(paths, Format::Headerless(dtype::parse(dtype)?), skip_short)
    }

    /// Open token files with llm.c's header. A record is one token: use `windows`.
    #[staticmethod]
    #[pyo3(signature = (paths, *, skip_short=false))]
    fn open_llm_c(paths: &Bound<'_, PyAny>, skip_short: bool) -> PyResult<Self> {
        Self::open_as(paths, Format::LlmC, skip_short)
    }

    /// Open ``.npy`` files. A record is one entry of the first axis.
    #[staticmethod]
    #[pyo3(signature = (paths, *, skip_short=false))]
    fn open_npy(paths: &Bound<'_, PyAny>, skip_short: bool) -> PyResult<Self> {
        Self::open_as(paths, Format::Npy, skip_short)
    }

    /// Open the tensor of this name in ``.safetensors`` files. A record is one entry of the first axis.
    #[staticmethod]
    #[pyo3(signature = (paths, tensor, *, skip_short=false))]
    fn open_safetensors(paths: &Bound<'_, PyAny>, tensor: String, skip_short: bool) -> PyResult<Self> {
        Self::open_as(paths, Format::Safetensors(tensor), skip_short)
    }

    /// The same files as windows of ``rows`` rows, one every ``stride`` rows.
    ///
    /// ``windows(1025, 1024)`` is inputs and targets of 1024 tokens: adjacent windows share one token. No window
    /// crosses from one file into the next. Rows at the end of a file that do not fill a window are left out.
    #[pyo3(signature = (rows, stride=None))]
    fn windows(&self, rows: &Bound<'_, PyAny>, stride: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let py = rows.py();
        let (rows, stride) = (whole("rows", rows)?, whole_or_none("stride", stride)?);
        if let Format::Raw(_) = self.format {
            return Err(PyValueError::new_err(
                "windows are made of rows, and plain bytes have none: open the files with `open_headerless`",
            ));
        }
        let cut = Cut::Windows { rows, stride: stride.unwrap_or(rows) };
        Self::cut(py, self.sources.clone(), self.format.clone(), self.skip_short, cut)
    }

    fn __len__(&self) -> PyResult<usize> {
        Ok(usize::try_from(self.inner.len())?)
    }

    /// The name of the elements' type, as numpy and torch spell it.
    #[getter]
    fn dtype(&self) -> &'static str {
        dtype::name(self.inner.dtype())
    }

    /// The shape of one record.
    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.inner.shape())
    }

    /// The bytes of all records. Bytes shared by several windows are counted for each of them.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.inner.bytes()
    }

    /// The files, in the order of their records.
    #[getter]
    fn paths(&self) -> Vec<PathBuf> {
        self.inner.shards().iter().map(|shard| shard.path().to_owned()).collect()
    }

    /// The files that ``skip_short`` left out, because they are shorter than one record.
    #[getter]
    fn skipped(&self) -> Vec<PathBuf> {
        self.inner.skipped().to_vec()
    }

    fn __repr__(&self) -> String {
        let Layout { dtype, shape } = self.layout();
        let files = self.inner.shards().len();
        format!("<Records: {} of {} {shape:?} in {files} file(s)>", self.inner.len(), dtype::name(dtype))
    }

    fn __reduce__(&self) -> PyResult<()> {
        Err(PyTypeError::new_err(
            "Records cannot be pickled, because they hold open files: open them in the process that reads them",
        ))
    }
}
